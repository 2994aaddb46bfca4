"""`RedisLedger`: the ledger that a fleet shares, on Valkey or Redis.

All calls made in one iteration of the event loop share a round trip, called a flight. A flight
consists of pipelined script calls of up to 128 requests each (32 if the requests have several
scopes). The next flight is sent on the same connection without waiting for the answers, so the
store executes flights in the order in which they were sent. If the store rejects a flight that
arrived too late and executes the next one, the later flight overtakes the earlier one. Two rules
keep that safe: an end carries the reports that must take effect before it, and a hold that has
ended is not renewed. Without the store nothing is granted: see `FleetConfig.when_lost`.

An *epoch* identifies the contents of the store. A store that was restarted, replaced or emptied,
or whose clock was set, starts a new epoch, and every scope is in quarantine until each member has
pushed what it knows. docs/fleet.md describes the consequences for operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from gatekeeper.clock import Clock, SystemClock, micros
from gatekeeper.config import CacheConfig, FleetConfig
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.outcomes import RobotsSource
from gatekeeper.fleet import scripts
from gatekeeper.fleet.members import MemberList, waiting_text
from gatekeeper.fleet.operations import (
    Operation,
    batches,
    clock_operation,
    decode_reply,
    end_operation,
    index_scopes,
    repeated_ends,
    report_operation,
    scope_clock,
    scope_view,
    without_ended_renewals,
)
from gatekeeper.fleet.overrides import FleetOverrides
from gatekeeper.fleet.robots import SharedFetcher
from gatekeeper.fleet.store import Flights, Store, StoreAttempts, StoreDown
from gatekeeper.pacing.ledger import (
    LAPSE,
    MAX_TICKETS,
    End,
    FleetStats,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    ScopeView,
    TakeRequest,
    Withheld,
)

HEARTBEAT_SECONDS = 2.0
"""Seconds between two heartbeats of a member."""
LOST_AFTER = 1.0
"""Seconds without a response after which the store is considered lost."""
_CLOCK_TOLERANCE = 0.05
"""Seconds by which the store's clock may deviate from ours, in addition to the round trip."""
_CLOCK_DRIFT = 0.001
"""Tolerated drift between the two clocks, in seconds per second."""
_MAX_ATTEMPTS = 5
"""Attempts to send a call that arrives too late."""
_SECONDS_PER_FLIGHT = 0.1
"""Seconds that the store may need for each earlier flight before it executes a call."""
MAX_FLIGHTS = 16
"""Maximum number of flights under way at the same time."""
_CLOSE_TIMEOUT = 0.2
"""Seconds for which `close` waits for calls that are in flight."""
_POLL_SECONDS = 1.0
"""Seconds between two requests for a scope while notifications can't be received."""
_UNKNOWN_RETRY = 0.25
"""Seconds between two attempts while some member may not know this one yet."""
PUSH_BATCH = 500
"""Clocks pushed per script call after the store has lost its contents."""
_BEAT_KEYS = ("epoch", "members", "overrides", "read", "overrides:ends")

_log = logging.getLogger(__name__)


class _TokenState(msgspec.Struct, gc=False):
    """The state of one token that this member holds or waits for."""

    scopes: tuple[str, ...]
    granted: bool = False
    headed: bool = False
    ended: bool = False
    """Whether its end was sent or is being sent."""


class _PendingCall(NamedTuple):
    """A call that waits for the next flight. Calls of lower `order` take effect first."""

    order: int
    operations: list[Operation]
    answers: int
    future: asyncio.Future[Any]


class SharedLog(Counter[str]):
    """By condition, how many ledgers of one store observe it, so that each is logged only once."""

    def begins(self, condition: str) -> bool:
        """Note that a ledger observes a condition. Return True if it is the first one."""
        self[condition] += 1
        return self[condition] == 1

    def ends(self, condition: str) -> bool:
        """Note that a condition is over for a ledger. Return True if it was the last one."""
        self[condition] -= 1
        return not self[condition]


class RedisLedger:
    """A `Ledger` on Valkey, or on Redis 6.2 or later. Open it before use and close it afterwards.

    >>> async def main() -> None:
    ...     ledger = RedisLedger("redis://127.0.0.1:6379/0")
    ...     async with Gatekeeper("examplebot", ledger=ledger) as gate:
    ...         ...  # the gate opens and closes it
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "gatekeeper",
        clock: Clock | None = None,
        config: FleetConfig | None = None,
        member: str | None = None,
        shared_log: SharedLog | None = None,
    ) -> None:
        """`config` has the other settings. `member` is the name of this member; by default a unique
        one is generated. Ledgers with the same `shared_log` log a common condition once. Raises
        ConfigError if the URL can't be used or the extra `redis` is not installed."""
        config = config or FleetConfig()
        self.config: FleetConfig = config
        self._clock = clock or SystemClock()
        self._new_store = partial(Store, url, config, tag=namespace)
        self._store = self._new_store()
        self._shared_fetcher: SharedFetcher | None = None
        self._prefix = scripts.key_prefix(namespace)
        self._epoch_keys = [*map(self._key, scripts.EPOCH_KEYS)]
        self.member: str = member or f"{_machine_name()}-{secrets.token_hex(4)}"
        """The name of this member: by default the machine's name and a random suffix."""
        self._listeners: dict[str, LedgerListener] = {}
        self._heartbeat_now = heartbeat = asyncio.Event()
        self.overrides: FleetOverrides = FleetOverrides(self._store, self._prefix, heartbeat.set)
        """Overrides that operators set at run time, on any member."""
        self._tokens: dict[str, _TokenState] = {}
        self._pending: list[_PendingCall] = []
        self._flights = Flights()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._listen_task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Serializes recoveries and heartbeats."""
        self._epoch = ""
        """The epoch in which this member may make calls; empty until it is known."""
        self._last_epoch = ""
        """The latest epoch in which this member may have been granted something."""
        self._members = MemberList(self.member, self._clock, config.hold)
        self._clock_offset: tuple[float, float, float] | None = None
        """The store's clock minus ours: lower bound, upper bound, and when they were measured."""
        self._beats = StoreAttempts("a heartbeat", self.member, logged := set[str]())
        self._listens = StoreAttempts("receiving notifications", self.member, logged)
        self._failing_since: float | None = None
        self._lost_at: float | None = None
        self._quarantine_until = 0.0
        self._shared_log = SharedLog() if shared_log is None else shared_log
        self._quarantine_logged = False
        """Whether the log says that nothing is granted during a quarantine."""
        self._subscribed = 0
        """Number of channels with a confirmed subscription."""
        self._open = False
        self._calls = self._requests = self._failures = self._epochs = 0

    def sharing(
        self,
        fetcher: RobotsSource,
        cache: CacheConfig,
        files: Callable[[], Directory | None],
        mine: Callable[[str], bool] = lambda _origin: True,
    ) -> RobotsSource:
        """Return a source of robots.txt files that the fleet fetches once. `files()` returns the
        files that this member has, None: not yet. `mine`: the origins that this ledger stores."""
        store = self._new_store(any_epoch=True)
        self._shared_fetcher = shared = SharedFetcher(
            fetcher, store, cache, self._prefix, self.member, files, mine, divided=self._divided
        )
        return shared

    def _key(self, name: str) -> str:
        return self._prefix + name

    # --- opening and closing ------------------------------------------------------------------

    async def open(self) -> None:
        """Check the store's settings and join the fleet. Raises ConfigError if they can't guarantee
        its promises. A store that can't be reached is considered lost, and is retried."""
        if self._open:
            return
        try:
            async with self._lock:
                await self._recover(starting=True)
        except LedgerLost as error:
            self._set_lost(error)
        except ConfigError:
            await self._store.close()
            raise
        self._open = True
        if self._shared_log.begins("member"):
            _log.info("this is member %s of the fleet at %s", self.member, self._store.where)
        loop = asyncio.get_running_loop()
        self._listen_task = loop.create_task(self._listen_loop())
        self._heartbeat_task = loop.create_task(self._heartbeat_loop())
        try:
            await self._join()
        except ConfigError:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the fleet and close the connections. Holds that are still open expire."""
        if not self._open:
            return
        self._open = False
        self._heartbeat_now.set()
        # Cancelling a call closes the connection, which is still needed to leave the fleet.
        under_way = [task for task in (self._heartbeat_task, *self._flights.tasks) if task]
        if under_way:
            await asyncio.wait(under_way, timeout=_CLOSE_TIMEOUT)
        for task in (self._listen_task, *under_way):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        _fail(self._pending, LedgerLost("the ledger is closed"))
        self._pending = []
        with contextlib.suppress(LedgerLost):
            async with self._lock:
                if self._epoch:
                    keys = [self._epoch_keys[0], self._key("members")]
                    await self._store.script(scripts.LEAVE, keys, [self.member, self._epoch])
        await self._store.close()
        if self._shared_fetcher is not None:
            await self._shared_fetcher.close()

    async def __aenter__(self) -> RedisLedger:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Notify `listener` of events about the tokens of `owner`, and of those about everyone."""
        self._listeners[owner] = listener

    @property
    def state(self) -> str:
        """`connected`, `lost` or `recovering`."""
        if self._lost_at is not None or not self._epoch:
            return "lost" if self._lost_at is not None else "recovering"
        return "recovering" if self.recovery or not self._members.known else "connected"

    @property
    def recovery(self) -> str:
        """For what this member waits, and how long, after the store lost its data; or empty."""
        left = self._quarantine_until - self._clock.monotonic()
        return waiting_text(left) if left > 0 else ""

    @property
    def ready(self) -> bool:
        """Whether leases can be granted, if only by dividing the hosts among the members."""
        return self._lost_at is None or self.config.when_lost == "divide"

    @property
    def hearing(self) -> bool:
        """Whether notifications of other members arrive. If not, waiters ask again each second."""
        return self._subscribed > len(self._listeners)

    def stats(self) -> FleetStats:
        """Return the current state and the counters."""
        return FleetStats(
            state=self.state,
            members=max(1, len(self._members.heartbeat_ages)),
            member=self.member,
            calls=self._calls,
            requests=self._requests,
            failures=self._failures,
            epochs=self._epochs,
            dividing=self._divided(),
            recovery=self.recovery,
        )

    # --- the Ledger protocol ------------------------------------------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request, or return when to ask again. Raises LedgerLost."""
        if self._divided():
            return [self._take_divided(request) for request in requests]
        for token, scopes in requests:
            if token not in self._tokens:
                self._tokens[token] = _TokenState(tuple(one.scope for one in scopes))
        if not self._members.known:
            return [NotBefore(_UNKNOWN_RETRY)] * len(requests)
        operations = [("t", token, scopes) for token, scopes in requests]
        answers = await self._call(3, operations, len(requests))
        return [
            self._answer(request, answer) for request, answer in zip(requests, answers, strict=True)
        ]

    async def head(self, tokens: Sequence[str]) -> None:
        """Note that the response heads have arrived."""
        states = {token: self._tokens[token] for token in tokens if token in self._tokens}
        for state in states.values():
            state.headed = True
        await self._notify(1, [("h", token, state.scopes) for token, state in states.items()])

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. The reports take effect first, so that no request starts in between."""
        reports = dict.fromkeys(report for end in ends for report in end.reports)
        operations = [report_operation(report) for report in reports]
        for token, outcome, _, size in ends:
            if (state := self._tokens.get(token)) is not None:
                state.ended = True
                operations.append(end_operation(token, state.scopes, outcome, size))
        await self._notify(1, operations)
        for end in ends:
            self._tokens.pop(end.token, None)

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds by a full time to live from now."""
        await self._notify(2, self._renewals(tokens))

    async def block(self, reports: Sequence[Report]) -> None:
        """Apply reports and notify every member of them."""
        await self._notify(0, [report_operation(report) for report in reports])

    async def pause(self, scopes: Sequence[str]) -> None:
        """Grant no request of these scopes to any member until `resume`."""
        await self._notify(0, [("p", scope, 1) for scope in scopes])

    async def resume(self, scopes: Sequence[str]) -> None:
        """Grant requests of these scopes again."""
        await self._notify(0, [("p", scope, 0) for scope in scopes])

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what is known of each scope and which members hold it. Raises LedgerLost."""
        if self._divided():
            raise LedgerLost(f"{self._store.where} can't be reached")
        found = await self._call(3, [("v", scope) for scope in scopes], len(scopes))
        return [scope_view(one) for one in found]

    def _has_ended(self, token: str) -> bool:
        return (state := self._tokens.get(token)) is None or state.ended

    def _renewals(self, tokens: Sequence[str]) -> list[Operation]:
        states = [(token, self._tokens[token]) for token in tokens if not self._has_ended(token)]
        return [("r", token, state.scopes, int(state.headed)) for token, state in states]

    def _answer(self, request: TakeRequest, answer: Any) -> Granted | NotBefore:
        status, value, *rest = answer
        if status == 1:
            if (state := self._tokens.get(request.token)) is not None:
                state.granted = True
            return Granted(request.token, self.config.hold, tuple(map(scope_clock, value)))
        seconds = value / 1e6
        if status == 2:
            self._quarantine_until = self._clock.monotonic() + seconds
            return NotBefore(seconds)
        if not self.hearing:
            seconds = min(seconds, _POLL_SECONDS)  # without notifications the waiter has to poll
        return NotBefore(self._flights.send_delay(seconds), tuple(map(scope_clock, rest[0])))

    # --- flights ------------------------------------------------------------------------------

    async def _notify(self, order: int, operations: list[Operation]) -> None:
        if operations and not self._divided():  # once the store is back, `clocks` has it all
            await self._call(order, operations, 0)

    async def _call(self, order: int, operations: list[Operation], answers: int) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._pending.append(_PendingCall(order, operations, answers, future))
        self._schedule_flight()
        return await future

    def _schedule_flight(self) -> None:
        """Send a flight in the next iteration of the loop, unless too many are under way."""
        # While the epoch is unknown, a single flight determines it for all of them.
        limit = MAX_FLIGHTS if self._epoch else 1
        if self._pending and not self._flights.scheduled and len(self._flights.tasks) < limit:
            self._flights.scheduled = True
            flight = asyncio.get_running_loop().create_task(self._send_flight())
            self._flights.tasks.add(flight)
            flight.add_done_callback(self._flight_done)

    def _flight_done(self, flight: asyncio.Task[None]) -> None:
        self._flights.tasks.discard(flight)
        if self._open:
            self._schedule_flight()

    async def _send_flight(self) -> None:
        self._flights.scheduled = False
        calls, self._pending = self._pending, []
        calls.sort(key=lambda call: call.order)
        try:
            if not self._epoch:
                async with self._lock:
                    if not self._epoch:
                        await self._recover()
            answers = await self._execute([one for call in calls for one in call.operations])
            first = 0
            for call in calls:
                if not call.future.done():
                    call.future.set_result(answers[first : first + call.answers])
                first += call.answers
        except (LedgerLost, ConfigError) as error:
            self._failures += 1
            _fail(calls, LedgerLost(str(error)))
        finally:
            _fail(calls, LedgerLost("the ledger is closed"))

    async def _execute(self, operations: list[Operation], epoch: str = "") -> list[Any]:
        """Execute the operations in order, and return the answers of those that have one. `epoch`
        is passed during a recovery only: the new epoch, in which no other calls are made yet."""
        self._requests += len(operations)
        with self._flights.unanswered_call():
            return await self._execute_calls(operations, epoch or self._epoch)

    async def _execute_calls(self, operations: list[Operation], epoch: str) -> list[Any]:
        answers: list[Any] = []
        waiting = batches(operations)
        recovering = epoch != self._epoch
        for _ in range(_MAX_ATTEMPTS):
            # Ends are sent after a recovery, so what it pushes must hold until they arrive.
            if not recovering:
                waiting = without_ended_renewals(waiting, self._has_ended)
                waiting += repeated_ends(waiting, self._has_ended)
            sent = self._clock.monotonic()
            calls = [self._packed(batch, sent, epoch) for batch in waiting]
            try:
                replies = await self._store.scripts(scripts.OPERATIONS, calls)
            except LedgerLost as error:
                self._failed(error)
                raise
            self._calls += len(calls)
            received = self._clock.monotonic()
            self._flights.shortest_trips[0] = min(self._flights.shortest_trips[0], received - sent)
            decoded = [decode_reply(reply) for reply in replies]
            statuses = [reply.status for reply in decoded]
            if 0 in statuses or not (recovering or epoch == self._epoch):
                self._epoch = ""
                raise LedgerLost("the store's contents have changed")
            await self._check_clock(decoded[-1].now / 1e6, sent, received, epoch)
            # All calls from the first late one on are sent again: each is idempotent, and their
            # order is preserved.
            done = statuses.index(2) if 2 in statuses else len(decoded)
            for reply in decoded[:done]:
                answers += reply.answers
            waiting = waiting[done:]
            if not waiting:
                if not recovering:
                    self._set_reached()
                return answers
        raise LedgerLost("calls reach the store too late, again and again")

    def _packed(
        self, operations: list[Operation], sent: float, epoch: str
    ) -> tuple[list[str], list[bytes]]:
        scopes, indexed = index_scopes(operations)
        hold, lapse = micros(self.config.hold), micros(LAPSE)
        parts = [epoch, hold, lapse, MAX_TICKETS, self._prefix, indexed]
        if self._clock_offset is not None:
            low, high, seen = self._clock_offset
            slack = _CLOCK_TOLERANCE + _CLOCK_DRIFT * (sent - seen)
            # The store may need a while for the calls before this one.
            late = slack + _SECONDS_PER_FLIGHT * self._flights.unanswered
            parts += [int((sent + low - slack) * 1e6), int((sent + high + late) * 1e6)]
        text = msgspec.msgpack.encode(parts)
        return [self._epoch_keys[0], *(self._key(f"s:{scope}") for scope in scopes)], [text]

    # --- epochs -------------------------------------------------------------------------------

    async def _recover(self, *, starting: bool = False) -> None:
        """Reconnect and determine the epoch. If it is a new one, push what this member knows."""
        tried_at = self._clock.monotonic()
        try:
            await self._store.hang_up()
            await self._flights.all_answered.wait()  # calls in flight belong to the old connection
            await self._store.connect(starting=starting)
            epoch = await self._determine_epoch()
            if epoch != self._last_epoch:
                await self._push_all(epoch)
            self._last_epoch = epoch
            await self._send_heartbeat(epoch)
            self._epoch = epoch
        except LedgerLost as error:
            if isinstance(error, StoreDown):
                self._members.store_is_down(tried_at)
            self._failed(error)
            raise
        self._set_reached()

    async def _determine_epoch(self) -> str:
        """Return the current epoch: the stored one if it began on this very server, otherwise a
        new one. The first member to declare it wins."""
        for _ in range(5):
            current, server, _ = await scripts.read_epoch(self._store, self._prefix)
            if current and server == self._store.identity:
                return current
            await self._declare(current)
        raise LedgerLost("the members can't agree on the store's epoch")

    async def _declare(self, before: str) -> None:
        hold = self._members.longest_hold
        await scripts.declare(self._store, self._prefix, before, hold)
        self._epochs += 1

    async def _push_all(self, epoch: str) -> None:
        """Push every clock, block and hold that this member knows of to a store without them."""
        self._clock_offset = None
        completeness = self._members.completeness(epoch, bool(self._last_epoch))
        clocks = [one for listener in self._listeners.values() for one in listener.clocks()]
        if not completeness:  # from the state file: its pauses may have been undone meanwhile
            clocks = [one._replace(paused=False) for one in clocks]
        if not all(one.scope for one in clocks):
            self._members.clocks_are_missing()
        operations = [
            *(clock_operation(one) for one in clocks if one.scope),
            *self._renewals([token for token, one in self._tokens.items() if one.granted]),
        ]
        for first in range(0, len(operations), PUSH_BATCH):
            await self._execute(operations[first : first + PUSH_BATCH], epoch)
        if self._shared_fetcher is not None:
            await self._shared_fetcher.offer(self._store, self.config.hold / 4)
        await self.overrides.write_all(epoch)
        arguments = [epoch, self.member, str(completeness), self._key("all")]
        arguments += self._members.push_arguments(epoch, completeness)
        status = await self._store.script(scripts.PUSHED, self._epoch_keys, arguments)
        self._members.pushed(too_late=status == 2)

    async def _check_clock(self, server: float, sent: float, received: float, epoch: str) -> None:
        """Compare the store's clock with ours. If it was set, the moments that it stored are
        wrong: declare a new epoch and raise LedgerLost."""
        low, high, before = server - received, server - sent, self._clock_offset
        self._clock_offset = (low, high, received)
        if before is None:
            return
        slack = _CLOCK_TOLERANCE + _CLOCK_DRIFT * (received - before[2])
        if low > before[1] + slack or high < before[0] - slack:
            _log.warning("the store's clock was set by %.3f s: a new epoch begins", low - before[0])
            self._epoch, self._clock_offset = "", None
            await self._declare(epoch)
            raise LedgerLost("the store's clock was set")

    def _failed(self, why: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = self._clock.monotonic()
        self._epoch = ""
        if self._open and self._clock.monotonic() >= self._failing_since + LOST_AFTER:
            self._set_lost(why)

    def _set_lost(self, why: Exception) -> None:
        if self._lost_at is not None:
            return
        self._lost_at = self._clock.monotonic()
        consequence = "no leases are granted"
        if self.config.when_lost == "divide":
            consequence = "each member continues with its own share of the hosts"
        reason = str(why).removeprefix(f"{self._store.where}: ")
        if self._shared_log.begins("lost"):
            _log.error("%s can't be reached (%s): %s", self._store.where, reason, consequence)
        # While members divide the hosts, the waiters ask again, to learn who serves theirs.
        self._notify_lost(self.config.when_lost == "wait")

    def _set_reached(self) -> None:
        self._failing_since = None
        if self._lost_at is None:
            return
        if self._shared_log.ends("lost"):
            seconds = self._clock.monotonic() - self._lost_at
            _log.warning("%s is back after %.1f s", self._store.where, seconds)
        self._lost_at = None
        self._notify_lost(False)

    def _notify_lost(self, lost: bool) -> None:
        for listener in self._listeners.values():
            listener.lost(lost)

    def _note_quarantine(self, seconds: float) -> None:
        """Log once that nothing is granted for a while, and once that the quarantine is over."""
        if self._quarantine_logged is (seconds > 0):
            return
        self._quarantine_logged = seconds > 0
        if seconds > 0 and self._shared_log.begins("quarantine"):
            level = logging.WARNING if self._open else logging.INFO  # expected for the first member
            text = "%s: no leases are granted until every member has reported its state: %s"
            _log.log(level, text, self._store.where, waiting_text(seconds))
        elif seconds <= 0 and self._shared_log.ends("quarantine"):
            _log.info("%s: leases are granted again", self._store.where)

    # --- members ------------------------------------------------------------------------------

    async def _send_heartbeat(self, epoch: str = "") -> None:
        """Send a heartbeat and read the list of members. `epoch`: see `_execute`."""
        epoch = epoch or self._epoch
        forget = str(micros(max(60.0, 3 * self.config.hold)))
        channel = self._key("all") if self._members.announces else ""
        keys = [self._key(name) for name in _BEAT_KEYS]
        arguments = [self.member, forget, channel, epoch, str(self._members.list_time)]
        sent = self._clock.monotonic()
        arguments.append(str(int(self._members.known)))
        answer = await self._store.script(scripts.BEAT, keys, arguments, scripts.BEAT_FORM)
        current, left, now, _, writes, *_ = answer
        if not epoch or current.decode() != epoch:  # both are empty if both sides lost it
            self._epoch = ""
            raise LedgerLost("the store's contents have changed")
        received = self._clock.monotonic()
        self._quarantine_until = received + int(left) / 1e6
        self._note_quarantine(int(left) / 1e6)
        self._flights.shortest_trips = [received - sent, self._flights.shortest_trips[0]]
        await self._check_clock(int(now) / 1e6, sent, received, epoch)
        if self._members.update(epoch, sent, received, answer):
            self._heartbeat_now.set()
        await self.overrides.catch_up(int(writes))

    async def _heartbeat_loop(self) -> None:
        while True:
            settled = self._failing_since is None and self._members.known
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS if settled else self._beats.pause()):
                    await self._heartbeat_now.wait()
            self._heartbeat_now.clear()
            if not self._open:
                return
            try:
                async with self._lock:
                    if self._epoch:
                        await self.overrides.write_new(self._epoch)
                        await self._send_heartbeat()
                        await self._execute([])
                    else:
                        await self._recover()
                self._beats.succeeded()
            except Exception as error:  # noqa: BLE001 - without heartbeats the member is forgotten
                self._beats.failed(error)
                self._failed(error)

    async def _join(self) -> None:
        """Wait briefly until the other members know this one; nothing is granted before that."""
        for seconds in (0.025, 0.05, 0.1, 0.2, 0.4):
            if self._members.known or not self._epoch:
                return
            await asyncio.sleep(seconds)
            with contextlib.suppress(LedgerLost):
                async with self._lock:
                    await self._send_heartbeat()

    async def _listen_loop(self) -> None:
        """Receive notifications: scopes that opened, reports, pauses, newcomers."""

        def subscribed(channels: int) -> None:
            self._subscribed = channels
            self._listens.succeeded()

        def channels() -> list[str]:
            return [self._key("all"), *(self._key(f"m:{owner}") for owner in self._listeners)]

        while True:
            try:
                await self._store.listen(channels, self._receive, subscribed)
            except Exception as error:  # noqa: BLE001 - without notifications no block would arrive
                self._listens.failed(error)
            self._subscribed = 0
            await asyncio.sleep(self._listens.pause())

    def _ask_again(self) -> None:
        """Have waiters ask again, since the quarantine is over."""
        if self._lost_at is None:
            self._notify_lost(False)

    def _receive(self, channel: str, data: bytes) -> None:
        try:
            kind, *values = message = msgspec.msgpack.decode(data)
            if channel != self._key("all"):
                token, delay, *_ = message
                owner = channel.rpartition(":")[2]
                self._listeners[owner].opened(token, self._flights.send_delay(delay / 1e6))
                return
            if kind == "j":
                self._heartbeat_now.set()
            elif kind == "o":
                self.overrides.received(*values[:3])
            elif kind == "t" and self._shared_fetcher is not None:
                self._shared_fetcher.written(values[0], values[1], bool(values[2]))
            elif kind == "w" and self._shared_fetcher is not None and values[0] == self.member:
                self._shared_fetcher.supply(values[1])
            elif kind == "g":
                self._quarantine_until = self._clock.monotonic() + values[0] / 1e6
                asyncio.get_running_loop().call_later(values[0] / 1e6, self._ask_again)
            for listener in self._listeners.values():
                if kind == "b":
                    # A later version may append fields.
                    scope, seconds, reason, interval, interval_for, *_ = values
                    listener.blocked(
                        Report(scope, seconds / 1e6, reason, interval / 1e6, interval_for / 1e6)
                    )
                elif kind == "p":
                    listener.paused(values[0], bool(values[1]))
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError):
            _log.warning("a message on %s can't be read: another program may use it", channel)

    # --- without the store --------------------------------------------------------------------

    def _divided(self) -> bool:
        return self._lost_at is not None and self.config.when_lost == "divide"

    def withheld(self, scopes: Sequence[str], interval: float) -> Withheld | None:
        """See `Ledger`. A member that divides the hosts grants those that it owns, once requests
        that other members may have started before the loss no longer matter."""
        if not self._divided():
            return None
        # The last scope is shared by the most hosts, so hosts that share it have the same owner.
        owner = self._members.owner_of(scopes[-1])
        if owner != self.member:
            return Withheld(math.inf, owner)
        left = (self._lost_at or 0.0) + 2 * HEARTBEAT_SECONDS + interval - self._clock.monotonic()
        return Withheld(left) if left > 0 else None

    def _take_divided(self, request: TakeRequest) -> Granted | NotBefore:
        names = tuple(one.scope for one in request.scopes)
        withheld = self.withheld(names, max(one.interval for one in request.scopes))
        if withheld is not None:
            return NotBefore(_POLL_SECONDS if withheld.owner else withheld.seconds)
        self._tokens[request.token] = _TokenState(names, granted=True)
        return Granted(request.token, self.config.hold)


def _machine_name() -> str:
    """Return the machine's name, reduced to the characters that a member's name may contain."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:32] or "member"


def _fail(calls: list[_PendingCall], error: Exception) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_exception(error)
