"""The Lua scripts of a fleet's ledger.

`OPERATIONS` does in one atomic step what `testing.memory_ledger` does call by call; a test compares
the two over generated histories. Its `free_at` repeats `Scope.due_at`, which the other one calls.
Stored times are microseconds of the server's clock; durations are sent over the wire. A scope is
one string key, encoded with cmsgpack. Only fields that differ from their default are written:

=====  ==========================================================================================
field  meaning
=====  ==========================================================================================
b      basis: the latest start, head or failure
i, g   the interval in force since then, and whether it is a guess
u, l   the end of a block, and the length of that block; r: the reason
p      1 if paused
n, m   an interval that was learned from a response, and until when it applies
d      the first page of the day, if there is a budget; q, z: pages and bytes since then
h      holds: {token, end, headed, start, basis, interval and guess before, 1 for a counted page}
t      tickets: {token, interval, slots, guess, due}
e      the epoch in which it was written
=====  ==========================================================================================

All keys are passed in KEYS; the first is that of the epoch. A call whose epoch is not the store's
changes nothing and reports that.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from gatekeeper.clock import micros
from gatekeeper.errors import ConfigError

if TYPE_CHECKING:
    from gatekeeper.fleet.store import Store

FORMAT: Final = 1
"""The version of the storage format. Members can share a namespace only if theirs are equal.

Versions of gatekeeper with the same format can run side by side, as in a rolling upgrade: each runs
its own scripts, reads the fields and the leading parts of messages that it knows, and drops the
rest. A change that would be wrong if an older member dropped it needs a new format."""

EPOCH_KEYS: Final = ("epoch", "known", "pushed", "members", "read")
"""Names of the keys that an epoch begins with, see `DECLARE`."""


def key_prefix(namespace: str) -> str:
    """Return what the keys and channels of a fleet begin with: the namespace as a hash tag."""
    return f"{{{namespace}}}:"


async def read_epoch(store: Store, prefix: str) -> tuple[str, str, str]:
    """Return the epoch, the server on which it began, and when, in microseconds of its clock; empty
    texts if there is none. Raises LedgerLost, and ConfigError if its keys have another format."""
    asked = ("HMGET", f"{prefix}epoch", "id", "server", "at", "format")
    found = await store.run(*asked, form=list[bytes | None])
    epoch, server, began, version = ((one or b"").decode() for one in found)
    if epoch and version != str(FORMAT):
        raise ConfigError(
            f"fleet.namespace: the keys of {prefix} have format {version}, but this "
            f"version of gatekeeper writes format {FORMAT}: choose another namespace"
        )
    return epoch, server, began


async def declare(store: Store, prefix: str, before: str, hold: float, *channel: str) -> int:
    """Begin an epoch after `before`: see `DECLARE`. Return 0 if another one began meanwhile."""
    keys = [prefix + name for name in EPOCH_KEYS]
    epoch = secrets.token_hex(4)
    arguments = [before, epoch, store.identity, str(micros(hold)), str(FORMAT), *channel]
    begun: int = await store.script(DECLARE, keys, arguments, int)
    return begun


_BEGIN = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function whole(number) return string.format('%.0f', number) end
"""
"""How a script begins that needs the time, and writes it without the exponent of Lua."""


def _timed(script: str) -> str:
    return _BEGIN + script


OPERATIONS: Final = _timed("""
local E = redis.call('HMGET', KEYS[1], 'id', 'until', 'floor')
local epoch, hold, lapse, most, prefix, ops, early, late = unpack(cmsgpack.unpack(ARGV[1]))
if E[1] ~= epoch then return cmsgpack.pack({now, 0}) end
if early and (now < early or now > late) then return cmsgpack.pack({now, 2}) end
local quarantine = tonumber(E[2]) or 0
local floor = tonumber(E[3]) or -1
local NEVER = 9007199254740992
local HOUR = 3600000000
local DAY = 24 * HOUR
local cut = #prefix + 3
local records, touched = {}, {}
local raw = #KEYS > 1 and redis.call('MGET', unpack(KEYS, 2)) or {}

local function tell(channel, ...)
  redis.call('PUBLISH', prefix .. channel, cmsgpack.pack({...}))
end

local function moved(r, moment)
  if not r.b or moment > r.b then r.b = moment end
end

local function settle(r)
  local holds = {}
  for _, one in ipairs(r.h) do
    if one[2] > now then holds[#holds + 1] = one
    elseif one[3] == 0 then moved(r, one[2]) end
  end
  r.h = holds
  local tickets = {}
  for _, one in ipairs(r.t) do
    if one[5] + lapse > now then tickets[#tickets + 1] = one end
  end
  r.t = tickets
  if r.d and now >= r.d + DAY then r.d, r.q, r.z = nil, 0, 0 end
end

-- The server's clock may be another one since: nothing lies further ahead than it is long.
local function of_this_epoch(r)
  if r.b and r.b > now then r.b = now end
  if r.d and r.d > now then r.d = now end
  for _, one in ipairs(r.h) do
    one[2] = math.min(one[2], now + hold)
    one[4] = math.min(one[4], now)
  end
  r.u = math.min(r.u, now + r.l)
  r.m = math.min(r.m, now + DAY)
  r.t = {}
  r.e = epoch
end

local function load(i)
  touched[i] = true
  local r = records[i]
  if r then return r end
  r = raw[i] and cmsgpack.unpack(raw[i]) or {e = epoch}
  r.i, r.g = r.i or 0, r.g or 0
  r.u, r.l, r.p = r.u or 0, r.l or 0, r.p or 0
  r.n, r.m, r.h, r.t = r.n or 0, r.m or 0, r.h or {}, r.t or {}
  r.q, r.z = r.q or 0, r.z or 0
  if r.e ~= epoch then of_this_epoch(r) end
  settle(r)
  records[i] = r
  return r
end

local function name(i) return string.sub(KEYS[i + 1], cut) end

local function in_force(r, interval, guess)
  local longest = interval
  if guess == 1 or r.g == 0 then longest = math.max(longest, r.i) end
  if now < r.m then longest = math.max(longest, r.n) end
  return longest
end

local function free_at(r, interval, slots, guess)
  local seconds = in_force(r, interval, guess)
  local free = r.u
  -- What nobody could tell counts as asked when the last hold of those who are gone ran out.
  local basis = math.max(r.b or -1, floor)
  if basis >= 0 then free = math.max(free, basis + seconds) end
  if r.p == 1 then return NEVER, true end
  local unheaded, first = false, NEVER
  for _, one in ipairs(r.h) do
    if one[3] == 0 then unheaded = true end
    first = math.min(first, one[2])
  end
  if #r.h >= slots or (unheaded and math.max(seconds, r.i) > 0) then
    return math.max(free, first), true
  end
  return free, false
end

local function find(list, token)
  for place, one in ipairs(list) do
    if one[1] == token then return place, one end
  end
end

local function tell_first(r)
  local first = r.t[1]
  if not first then return end
  local free, open_ended = free_at(r, first[2], first[3], first[4])
  local moment = NEVER
  if not open_ended then moment = math.max(free, now) end
  if moment == first[5] then return end
  first[5] = moment
  local owner = string.match(first[1], '^[^:]*')
  tell('m:' .. owner, first[1], math.max(0, math.min(free - now, HOUR)))
end

local function leave(r, token)
  local place = find(r.t, token)
  if place then table.remove(r.t, place) end
  return place
end

local function due(r, token, interval, slots, guess)
  local free, open_ended = free_at(r, interval, slots, guess)
  if free > now then return free, open_ended end
  for _, ticket in ipairs(r.t) do
    if ticket[1] == token then break end
    -- One that was told to ask now, or that waits for this very scope, for a longer interval.
    if ticket[5] < NEVER and ticket[5] <= math.max(now, (free_at(r, unpack(ticket, 2, 4)))) then
      return ticket[5] + lapse, true
    end
  end
  return now, false
end

local function wait(token, asked, found)
  local ask_at, certain = 0, true
  for _, one in ipairs(found) do
    ask_at = math.max(ask_at, one[1])
    if one[2] then certain = false end
  end
  local clocks = {}
  for k, one in ipairs(found) do
    local i, interval, slots, guess = unpack(asked[k])
    local r = load(i)
    local place = find(r.t, token)
    if one[1] <= now then
      if place then leave(r, token); tell_first(r) end
    else
      local blocked = math.max(0, r.u - now)
      clocks[#clocks + 1] = {name(i), r.b and now - r.b or false, in_force(r, interval, guess),
        blocked, blocked > 0 and r.r or '', r.p}
      if not place and #r.t >= most then
        ask_at = math.max(ask_at, one[1] + #r.t * in_force(r, interval, guess))
      else
        if not place then
          r.t[#r.t + 1] = {token, interval, slots, guess, NEVER}
          place = #r.t
        end
        local first = r.t[1][5]
        if place > 1 and not (one[1] < first and first < NEVER) then
          certain = false
          local behind = first < NEVER and first or now + hold
          ask_at = math.max(ask_at, behind + (place - 1) * lapse)
          if place > 2 then ask_at = math.max(ask_at, now + hold) end
        end
      end
    end
  end
  for k in ipairs(found) do
    local _, ticket = find(load(asked[k][1]).t, token)
    if ticket then ticket[5] = certain and ask_at or NEVER end
  end
  return {0, math.min(ask_at - now, HOUR), clocks}
end

local function count(r, pages, bytes)
  r.d, r.q, r.z = r.d or now, r.q + pages, r.z + bytes
end

local function used(i)
  local r = load(i)
  return {name(i), false, 0, 0, '', 0, r.d and now - r.d or false, r.q, r.z}
end

local function granted(asked)
  local told = {}
  for _, one in ipairs(asked) do
    if one[5] then told[#told + 1] = used(one[1]) end
  end
  return {1, told}
end

-- A page of a host whose budget is spent waits in no scope.
local function spent(token, asked)
  for _, one in ipairs(asked) do
    local r, pages, bytes = load(one[1]), one[5], one[6]
    if pages and r.d and ((pages > 0 and r.q >= pages) or (bytes > 0 and r.z >= bytes)) then
      for _, other in ipairs(asked) do
        if leave(load(other[1]), token) then tell_first(load(other[1])) end
      end
      return {0, math.min(r.d + DAY - now, HOUR), {used(one[1])}}
    end
  end
end

local function take(token, asked)
  local mine = {}
  for _, one in ipairs(asked) do mine[#mine + 1] = select(2, find(load(one[1]).h, token)) end
  if #mine == #asked then
    for _, one in ipairs(mine) do one[2] = now + hold end
    return granted(asked)
  end
  if quarantine > now then return {2, quarantine - now} end
  local refusal = spent(token, asked)
  if refusal then return refusal end
  local found, open = {}, true
  for k, one in ipairs(asked) do
    local moment, open_ended = due(load(one[1]), token, one[2], one[3], one[4])
    found[k] = {moment, open_ended}
    if moment > now then open = false end
  end
  if not open then return wait(token, asked, found) end
  for _, one in ipairs(asked) do
    local r = load(one[1])
    r.h[#r.h + 1] = {token, now + hold, 0, now, r.b or -1, r.i, r.g, one[5] and 1}
    r.b, r.i, r.g = now, one[2], one[4]
    if one[5] then count(r, 1, 0) end
    leave(r, token)
    tell_first(r)
  end
  return granted(asked)
end

local function view(i)
  local r = load(i)
  local holds, blocked = {}, math.max(0, r.u - now)
  for k, one in ipairs(r.h) do holds[k] = {one[1], now - one[4], one[2] - now, one[3]} end
  return {{name(i), r.b and now - r.b or false, in_force(r, 0, 0), blocked,
    blocked > 0 and r.r or '', r.p, r.d and now - r.d or false, r.q, r.z}, holds, #r.t}
end

local answers = {}
local act = {
  v = function(op) answers[#answers + 1] = view(op[2]) end,
  t = function(op) answers[#answers + 1] = take(op[2], op[3]) end,
  h = function(op)
    for _, i in ipairs(op[3]) do
      local r = load(i)
      local _, mine = find(r.h, op[2])
      if not mine or mine[3] == 0 then moved(r, now) end
      if mine then mine[3] = 1 end
      tell_first(r)
    end
  end,
  e = function(op)
    for k, i in ipairs(op[4]) do
      local r = load(i)
      local place, mine = find(r.h, op[2])
      if mine then table.remove(r.h, place) end
      if op[3] == 0 then
        if not mine or mine[3] == 0 then moved(r, now) end
      elseif op[3] == 2 and mine and r.b == mine[4] then
        r.b, r.i, r.g = mine[5], mine[6], mine[7]
        if r.b < 0 then r.b = nil end
      end
      if op[3] ~= 0 then
        if mine and mine[8] then r.q = math.max(0, r.q - 1) end
      elseif op[5] and k == 1 then count(r, 0, op[5]) end  -- the host's own scope
      leave(r, op[2])
      tell_first(r)
    end
  end,
  r = function(op)
    for _, i in ipairs(op[3]) do
      local r = load(i)
      local _, mine = find(r.h, op[2])
      if not mine then
        mine = {op[2], now, op[4], now, r.b or -1, r.i, r.g}
        r.h[#r.h + 1] = mine
        if op[4] == 0 then moved(r, now) end
      end
      mine[2] = now + hold
    end
  end,
  b = function(op)
    local r = load(op[2])
    local seconds, interval = op[3], op[5]
    if seconds <= 0 and interval <= 0 then
      r.u, r.l, r.r = 0, 0, nil
    elseif now + seconds > r.u then
      r.u, r.l, r.r = now + seconds, seconds, op[4]
    end
    if interval > 0 then
      if now >= r.m then r.n = 0 end
      r.n = math.max(r.n, interval)
      r.m = math.max(r.m, now + op[6])
    end
    tell('all', 'b', name(op[2]), seconds, op[4], interval, op[6])
    tell_first(r)
  end,
  p = function(op)
    local r = load(op[2])
    r.p = op[3]
    tell('all', 'p', name(op[2]), op[3])
    tell_first(r)
  end,
  -- What a member knows of a clock, after the store has lost what it knew.
  c = function(op)
    local r = load(op[2])
    if op[3] >= 0 then
      moved(r, now - op[3])
      r.i = math.max(r.i, op[4])
      -- A hold that was told before and is undone must not take the clock along.
      for _, one in ipairs(r.h) do
        one[5], one[6] = math.max(one[5], now - op[3]), math.max(one[6], op[4])
      end
    end
    if op[5] > 0 and now + op[5] > r.u then r.u, r.l, r.r = now + op[5], op[5], op[6] end
    if op[7] == 1 then r.p = 1 end
    if op[8] then
      r.d = math.max(r.d or 0, now - op[8])
      r.q, r.z = math.max(r.q, op[9]), math.max(r.z, op[10])
    end
  end,
}
for _, op in ipairs(ops) do act[op[1]](op) end

for i in pairs(touched) do
  local r = records[i]
  local last = math.max(r.u, r.m)
  if r.b then last = math.max(last, r.b + r.i) end
  for _, one in ipairs(r.h) do last = math.max(last, one[2] + r.i) end
  if r.d then last = math.max(last, r.d + DAY) end
  if not r.b and last <= now and #r.h == 0 and #r.t == 0 and r.p == 0 then
    if raw[i] then redis.call('DEL', KEYS[i + 1]) end
  else
    local kept = {e = epoch, b = r.b}
    if r.i > 0 then kept.i = r.i end
    if r.g > 0 then kept.g = r.g end
    if r.u > now then kept.u, kept.l, kept.r = r.u, r.l, r.r end
    if r.p > 0 then kept.p = 1 end
    if r.m > now then kept.n, kept.m = r.n, r.m end
    if r.d then kept.d, kept.q, kept.z = r.d, r.q, r.z end
    if #r.h > 0 then kept.h = r.h end
    if #r.t > 0 then kept.t = r.t end
    -- It outlives each promise in it by a minute: an interval that is asked for later and is
    -- longer counts from the same basis.
    if r.p > 0 then redis.call('SET', KEYS[i + 1], cmsgpack.pack(kept))
    else
      local left = math.ceil(math.max(0, last - now) / 1000) + 60000
      redis.call('SET', KEYS[i + 1], cmsgpack.pack(kept), 'PX', whole(left))
    end
  end
end
return cmsgpack.pack({now, 1, answers})
""")
"""Execute operations. KEYS: the epoch, then the scopes. ARGV[1], packed: the epoch, hold, lapse,
the maximum number of tickets, the prefix of names, the operations, and the earliest and latest time
at which the caller expects the call to arrive. A call outside those times changes nothing, since
the clock may have been set.

The answer is the server's time, a status (0: another epoch, 1: done, 2: outside the expected times)
and the answers of the operations that have one. Operations by letter: t take, h head, e end,
r renew, b report (block or learned interval), p pause or resume, c push a clock, v view."""

DECLARE: Final = _timed("""
if (redis.call('HGET', KEYS[1], 'id') or '') ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS))
redis.call('HSET', KEYS[1], 'id', ARGV[2], 'server', ARGV[3], 'format', ARGV[5],
  'at', whole(now), 'hold', ARGV[4], 'until', whole(now + (ARGV[6] and 0 or 1.5 * ARGV[4])))
if ARGV[6] then redis.call('PUBLISH', ARGV[6], cmsgpack.pack({'g', 0}))
else redis.call('HSET', KEYS[1], 'floor', whole(now + ARGV[4])) end
return 1
""")
"""Start an epoch if the expected one is still current (compare-and-set). KEYS: the epoch, the
members that any member knows, the members that have pushed what they know, the list of members, and
when each one read that list. ARGV: the expected epoch (empty: none), the new one, the server's
identity, the longest hold, the format; and for an epoch without a quarantine the channel for all.
Returns 1 if it was started."""

PUSHED: Final = _timed("""
local E = redis.call('HMGET', KEYS[1], 'id', 'told', 'at', 'hold', 'until', 'gone')
if E[1] ~= ARGV[1] then return 0 end
redis.call('SADD', KEYS[3], ARGV[2])
-- Before the quarantine can end: who reads the list after it must find everybody on it.
redis.call('ZADD', KEYS[4], whole(now), ARGV[2])
local word, told, gone = tonumber(ARGV[3]), tonumber(E[2]) or 0, tonumber(E[6]) or -1
if word > 0 then
  told = math.max(told, word)
  redis.call('HSET', KEYS[1], 'told', told)
  if ARGV[5] ~= '' then
    gone = math.max(gone, now - ARGV[5])
    redis.call('HSET', KEYS[1], 'gone', whole(gone))
  end
  for i = 6, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
end
if (tonumber(E[5]) or 0) <= now then return 2 end
if told >= 3 and #redis.call('SDIFF', KEYS[2], KEYS[3]) == 0 then
  redis.call('HSET', KEYS[1], 'until', whole(now))
  if gone < 0 then redis.call('HDEL', KEYS[1], 'floor')
  else redis.call('HSET', KEYS[1], 'floor', whole(gone)) end
  redis.call('PUBLISH', ARGV[4], cmsgpack.pack({'g', 0}))
else
  redis.call('HSET', KEYS[1], 'until', whole(E[3] + 1.5 * E[4]), 'floor', whole(E[3] + E[4]))
end
return 1
""")
"""Note that a member has pushed all that it knows. Once every member that any member knows has done
so, the quarantine is over. KEYS: those of `DECLARE`. ARGV: the epoch; the member; how complete its
list is (0: it was not a member in an earlier epoch; 1: there may be members that it does not know;
3: it knows every member); the channel for all; how long ago the latest member left that can't push
(empty: none did); the members that it knows. A scope that no member pushed counts as requested at
that time. Returns 2 if the quarantine had already ended, 0 if the epoch is another one."""

BEAT: Final = _timed("""
local old = whole(now - ARGV[2])
-- First what takes memory: once a script has written, a store that is full lets it do all.
local added = redis.call('ZADD', KEYS[2], whole(now), ARGV[1])
redis.call('PEXPIRE', KEYS[3], whole(ARGV[2] / 1000))
redis.call('PEXPIRE', KEYS[5], 604800000)
local E = redis.call('HMGET', KEYS[1], 'id', 'until', 'words', 'floor', 'gone')
if E[1] == ARGV[4] and ARGV[5] ~= '0' then
  redis.call('ZADD', KEYS[4], ARGV[5], ARGV[1])
  if ARGV[6] == '1' then redis.call('ZADD', KEYS[4], ARGV[5], '+' .. ARGV[1]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', old)
local gone, left = tonumber(E[5]) or -1, math.max(0, (tonumber(E[2]) or 0) - now)
-- While the quarantine lasts those who did not tell may still come.
if left == 0 then gone = math.max(gone, tonumber(E[4]) or -1) end
if redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', old) > 0 and E[1] then
  gone = math.max(gone, now)
  redis.call('HSET', KEYS[1], 'gone', whole(now))
end
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[3], cmsgpack.pack({'j', ARGV[1]})) end
return {E[1] or '', left, whole(now), redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'),
  tonumber(E[3]) or 0, ARGV[6] == '0' and redis.call('ZRANGE', KEYS[4], 0, -1, 'WITHSCORES') or {},
  added, whole(gone)}
""")
"""A member's heartbeat. KEYS: the epoch, the members, the overrides (which expire with the last
member), when each member read the list of members, and the records of the overrides. ARGV: the
member; how long a silent member is remembered; the channel on which to announce a newcomer (empty:
it is not one); the epoch; the time of the last list of this epoch that the member has read (0:
none); 1 if it is known.

The answer: the epoch; the rest of the quarantine; the server's time; the members with their latest
heartbeats; the number of writes of overrides; when each member read the list (only for a member
that is not known; an entry with a + is that of a known member); 1 if the member was not on the
list; and when the latest member left whose clocks only the store has (-1: none did)."""

BEAT_FORM: Final = tuple[bytes, int, bytes, list[bytes], int, list[bytes], int, bytes]
"""The type of that answer."""

LEAVE: Final = _timed("""
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HGET', KEYS[1], 'id') == ARGV[2] then
  redis.call('HSET', KEYS[1], 'gone', whole(now))
end
""")
"""Remove a member that leaves. KEYS: the epoch, the members. ARGV: the member, the epoch."""

CLAIM: Final = """
local owner = redis.call('GET', KEYS[1])
local holder = KEYS[2] and redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] and not (owner and owner ~= ARGV[1] and owner ~= holder) then
  if owner ~= holder then
    owner = holder
    redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
    redis.call('PEXPIRE', KEYS[2], ARGV[2] - 1)
  end
  redis.call('PUBLISH', ARGV[3], cmsgpack.pack({'w', holder, ARGV[4]}))
end
if owner and owner ~= ARGV[1] then return math.max(1, redis.call('PTTL', KEYS[1])) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
"""
"""Claim or renew the right to fetch a file. Returns 0, or the milliseconds for which another
member has the claim. If another member offers the file, it gets the claim, once, and is told to
write the file; again with each call, because it may miss a message. KEYS: the claim, and the offer
unless offers do not count. ARGV: the member, milliseconds, the channel for all, the origin."""

OFFER: Final = """
for i = 1, #KEYS do redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[i + 1]) end
"""
"""Offer files that a member has, after the store has lost them. KEYS: the offers. ARGV: the member,
and for how many milliseconds it has each file."""

RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', unpack(KEYS)) end
return 0
"""
"""Release the claim. KEYS: the claim, and the offer if it ends as well. ARGV: the member."""

READ: Final = "return {redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[1])}"
"""Return the milliseconds until a cached file expires, and the file. KEYS: the file."""

WRITE: Final = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('PUBLISH', ARGV[3], ARGV[4])
"""
"""Cache a file and publish a message about it. KEYS: the file. ARGV: the file, milliseconds until
it expires, the channel, the message."""

OVERRIDE: Final = """
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
for i = 5, #ARGV, 4 do
  local match, text, record, expected = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local found = redis.call('HGET', KEYS[2], match)
  local writes = not found or found == text
  if ARGV[2] == '0' then
    writes = expected == '' or expected == redis.call('HGET', KEYS[3], match)
  end
  if writes then
    redis.call('HSET', KEYS[2], match, text)
    if record ~= '' then redis.call('HSET', KEYS[3], match, record)
    else redis.call('HDEL', KEYS[3], match) end
    redis.call('PUBLISH', ARGV[4], cmsgpack.pack({'o', match, text, record}))
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], 604800000)
return redis.call('HINCRBY', KEYS[1], 'words', 1)
"""
"""Write and publish overrides that operators set at run time. KEYS: the epoch, the overrides, their
records. ARGV: the epoch; 1 if they are written again after a loss, so that existing ones are newer
and win; the milliseconds until they expire; the channel for all; the matches, each followed by its
rule, its record, and the record that it replaces (empty: any). Members of earlier versions renew
only the overrides: so the records, which mean nothing without them, last for a week."""
