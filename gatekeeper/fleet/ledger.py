"""`RedisLedger`: the ledger that a fleet shares, on Valkey or Redis.

All calls that are made in one turn of the event loop share a round trip, called a flight. A flight
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
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import CacheConfig, FleetConfig
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fetching.outcomes import RobotsSource
from gatekeeper.fleet.members import MemberList
from gatekeeper.fleet.operations import (
    Operation,
    batches,
    clock_told,
    decoded,
    ended,
    ends_once_more,
    packed,
    reported,
    scope_clock,
    scope_view,
)
from gatekeeper.fleet.overrides import FleetOverrides
from gatekeeper.fleet.robots import SharedFetcher
from gatekeeper.fleet.scripts import BEAT, DECLARE, FORMAT, LEAVE, PUSHED, TURN
from gatekeeper.fleet.store import Flights, Store, StoreDown, StoreIdentity
from gatekeeper.pacing.ledger import (
    LAPSE,
    MAX_TICKETS,
    End,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    ScopeView,
    TakeRequest,
    micros,
)

BEAT_EVERY = 2.0
"""Seconds between two heartbeats of a member."""
_GRACE = 1.0
"""Seconds without a response after which the store is considered lost."""
_STEP = 0.05
"""Seconds by which the store's clock may deviate from ours, in addition to the round trip."""
_SLEW = 0.001
"""Tolerated drift between the two clocks, in seconds per second."""
_TRIES = 5
"""Attempts to send a call that arrives too late."""
_BEHIND = 0.1
"""Seconds that the store may need for each earlier flight before it executes a call."""
MAX_FLIGHTS = 16
"""Maximum number of flights under way at the same time."""
_FAREWELL = 0.2
"""Seconds for which `close` waits for calls that are in flight."""
_POLL = 1.0
"""Seconds between two requests for a scope while notifications can't be received."""
_UNKNOWN = 0.25
"""Seconds between two attempts while some member may not know this one yet."""
_AT_ONCE = 500
"""Clocks pushed per script call after the store has lost its contents."""

_log = logging.getLogger(__name__)


class FleetStats(msgspec.Struct, frozen=True):
    """The state of a fleet's ledger, as this member sees it."""

    state: str
    """`connected`, `lost`, or `recovering`: the store is back, and members push what they know."""
    members: int
    """Number of members with a recent heartbeat, including this one."""
    member: str
    """The name of this member."""
    calls: int
    """Number of script calls since the start."""
    requests: int
    """Number of requests, heads and ends in those calls."""
    failures: int
    """Number of flights that failed."""
    epochs: int
    """How often this member declared a new epoch, since the store had lost its contents."""
    dividing: bool
    """Whether the store is lost and this member continues with its own share of the hosts."""


class _Held(msgspec.Struct, gc=False):
    """The state of one token that this member holds or waits for."""

    scopes: tuple[str, ...]
    granted: bool = False
    headed: bool = False
    over: bool = False
    """Whether its end was sent or is being sent."""


class _Told(NamedTuple):
    """A call that waits for the next flight. Calls of lower `order` take effect first."""

    order: int
    operations: list[Operation]
    answers: int
    future: asyncio.Future[Any]


class SharedNews:
    """Conditions that several ledgers of one store observe, so that each is logged only once."""

    def __init__(self) -> None:
        self._met: dict[str, set[str]] = {}

    def begins(self, what: str, ledger: str) -> bool:
        """Note that a ledger observes a condition. Return True if it is the first one."""
        met = self._met.setdefault(what, set())
        met.add(ledger)
        return len(met) == 1

    def ends(self, what: str, ledger: str) -> bool:
        """Note that a condition is over for a ledger. Return True if it was the last one."""
        self._met[what].discard(ledger)
        return not self._met[what]


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
        news: SharedNews | None = None,
    ) -> None:
        """`config` has the other settings. `member` is the name of this member; by default a unique
        one is generated. Ledgers that share `news` log a common condition once. Raises ConfigError
        if the URL can't be used or the extra `redis` is not installed."""
        config = config or FleetConfig()
        self.config: FleetConfig = config
        self._clock = clock or SystemClock()
        self._url = url
        self._store = Store(url, config, tag=namespace)
        self._namespace = namespace
        self._texts: Store | None = None
        self._shared: SharedFetcher | None = None
        self._prefix = f"{{{namespace}}}:"
        names = ("epoch", "known", "pushed", "members", "read")
        self._epoch_keys = [self._key(name) for name in names]
        self.member: str = member or f"{_machine()}-{secrets.token_hex(4)}"
        """The name of this member: by default the machine's name and a random suffix."""
        self._listeners: dict[str, LedgerListener] = {}
        keys = self._key("epoch"), self._key("overrides")
        self.overrides: FleetOverrides = FleetOverrides(
            *(self._store, keys, self._key("all")), tell_now=self._tell_now
        )
        """Overrides that operators set at run time, on any member."""
        self._held: dict[str, _Held] = {}
        self._pending: list[_Told] = []
        self._air = Flights()
        self._beating: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()
        """Serializes recoveries and heartbeats."""
        self._beat_now = asyncio.Event()
        self._epoch = ""
        """The epoch in which this member may make calls; empty until it is known."""
        self._lived_in = ""
        """The latest epoch in which this member may have been granted something."""
        self._members = MemberList(self.member, self._clock, config.hold)
        self._offset: tuple[float, float, float] | None = None
        """The store's clock minus ours: lower bound, upper bound, and when they were measured."""
        self._complaint = ""
        """The configuration error that was logged last, so that it is logged only once."""
        self._failing_since: float | None = None
        self._lost_at: float | None = None
        self._quarantine_until = 0.0
        self._news = news or SharedNews()
        self._waits = False
        """Whether the log says that nothing is granted during a quarantine."""
        self._subscribed = 0
        """Number of channels with a confirmed subscription."""
        self._open = False
        self._calls = self._requests = self._failures = self._epochs = 0

    def sharing(
        self, fetcher: RobotsSource, cache: CacheConfig, renew: Callable[[str], object]
    ) -> RobotsSource:
        """Return a source of robots.txt files that the fleet fetches once. It calls `renew(origin)`
        when another member has a newer file than this one."""
        self._texts = Store(self._url, self.config, any_memory=True, tag=self._namespace)
        self._shared = SharedFetcher(
            *(fetcher, self._texts, cache, self._prefix, self.member),
            renew=renew,
            alone=lambda: self._dividing,
        )
        return self._shared

    def _tell_now(self) -> None:
        self._beat_now.set()

    def _key(self, name: str) -> str:
        return self._prefix + name

    # --- life ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the store's settings and join the fleet. Raises ConfigError if they can't guarantee
        its promises. A store that can't be reached is considered lost, and is retried."""
        if self._open:
            return
        try:
            async with self._using:
                await self._recover(starting=True)
        except LedgerLost as error:
            self._open = True
            self._lose(error)
        except ConfigError:
            await self._store.close()
            raise
        self._open = True
        if self._news.begins("member", self._prefix):
            _log.info("member %s of the fleet at %s", self.member, self._store.where)
        loop = asyncio.get_running_loop()
        self._hearing = loop.create_task(self._hear())
        self._beating = loop.create_task(self._beat())
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
        self._beat_now.set()
        # Cancelling a call closes the connection, which is still needed to leave the fleet.
        under_way = [task for task in (self._beating, *self._air.flights) if task is not None]
        if under_way:
            await asyncio.wait(under_way, timeout=_FAREWELL)
        for task in (self._hearing, *under_way):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        _fail(self._pending, LedgerLost("the ledger is closed"))
        self._pending = []
        with contextlib.suppress(LedgerLost):
            async with self._using:
                if self._epoch:
                    keys = [self._epoch_keys[0], self._key("members")]
                    await self._store.script(LEAVE, keys, [self.member, self._epoch])
        await self._store.close()
        if self._texts is not None and self._shared is not None:
            await self._shared.close()
            await self._texts.close()

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
        waits = not self._members.known or self._clock.monotonic() < self._quarantine_until
        return "recovering" if waits else "connected"

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
            members=max(1, len(self._members.ages)),
            member=self.member,
            calls=self._calls,
            requests=self._requests,
            failures=self._failures,
            epochs=self._epochs,
            dividing=self._dividing,
        )

    # --- the Ledger protocol ------------------------------------------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request, or return when to ask again. Raises LedgerLost."""
        if self._dividing:
            return [self._take_alone(request) for request in requests]
        for token, scopes in requests:
            if token not in self._held:
                self._held[token] = _Held(tuple(one.scope for one in scopes))
        if not self._members.known:
            return [NotBefore(_UNKNOWN)] * len(requests)
        operations = [("t", token, scopes) for token, scopes in requests]
        answers = await self._call(3, operations, len(requests))
        return [
            self._answer(request, answer) for request, answer in zip(requests, answers, strict=True)
        ]

    async def head(self, tokens: Sequence[str]) -> None:
        """Note that the response heads have arrived."""
        held = [(token, one) for token in tokens if (one := self._held.get(token)) is not None]
        for _, one in held:
            one.headed = True
        await self._tell(1, [("h", token, one.scopes) for token, one in held])

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. The reports take effect first, so that no request starts in between."""
        reports = dict.fromkeys(report for end in ends for report in end.reports)
        operations = [*map(reported, reports)]
        for token, outcome, _, size in ends:
            if (one := self._held.get(token)) is not None:
                one.over = True
                operations.append(ended(token, one.scopes, outcome, size))
        await self._tell(1, operations)
        for end in ends:
            self._held.pop(end.token, None)

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds by a full time to live from now."""
        await self._tell(2, self._renewals(tokens))

    async def block(self, reports: Sequence[Report]) -> None:
        """Apply reports and notify every member of them."""
        await self._tell(0, [reported(report) for report in reports])

    async def pause(self, scopes: Sequence[str]) -> None:
        """Grant no request of these scopes to any member until `resume`."""
        await self._tell(0, [("p", scope, 1) for scope in scopes])

    async def resume(self, scopes: Sequence[str]) -> None:
        """Grant requests of these scopes again."""
        await self._tell(0, [("p", scope, 0) for scope in scopes])

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what is known of each scope and which members hold it. Raises LedgerLost."""
        if self._dividing:
            raise LedgerLost(f"{self._store.where} can't be reached")
        found = await self._call(3, [("v", scope) for scope in scopes], len(scopes))
        return [scope_view(one) for one in found]

    def _is_over(self, token: str) -> bool:
        return (held := self._held.get(token)) is None or held.over

    def _renewals(self, tokens: Sequence[str]) -> list[Operation]:
        held = [(token, one) for token in tokens if (one := self._held.get(token)) is not None]
        return [("r", token, one.scopes, int(one.headed)) for token, one in held if not one.over]

    def _answer(self, request: TakeRequest, answer: Any) -> Granted | NotBefore:
        if answer[0] == 1:
            if (held := self._held.get(request.token)) is not None:
                held.granted = True
            return Granted(request.token, self.config.hold, tuple(map(scope_clock, answer[1])))
        seconds = answer[1] / 1e6
        if answer[0] == 2:
            self._quarantine_until = self._clock.monotonic() + seconds
            return NotBefore(seconds)
        clocks = tuple(map(scope_clock, answer[2]))
        # Without notifications the waiter has to poll.
        return NotBefore(self._air.ahead(seconds if self.hearing else min(seconds, _POLL)), clocks)

    # --- flights ------------------------------------------------------------------------------

    async def _tell(self, order: int, operations: list[Operation]) -> None:
        if operations and not self._dividing:  # once the store is back, `clocks` has it all
            await self._call(order, operations, 0)

    async def _call(self, order: int, operations: list[Operation], answers: int) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._pending.append(_Told(order, operations, answers, future))
        self._board()
        return await future

    def _board(self) -> None:
        """Send a flight in the next turn of the loop, unless too many are under way."""
        # While the epoch is unknown, a single flight determines it for all of them.
        most = MAX_FLIGHTS if self._epoch else 1
        if self._pending and not self._air.boarding and len(self._air.flights) < most:
            self._air.boarding = True
            flight = asyncio.get_running_loop().create_task(self._fly())
            self._air.flights.add(flight)
            flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._air.flights.discard(flight)
        if self._open:
            self._board()

    async def _fly(self) -> None:
        self._air.boarding = False
        told, self._pending = self._pending, []
        told.sort(key=lambda one: one.order)
        try:
            if not self._epoch:
                async with self._using:
                    if not self._epoch:
                        await self._recover()
            found = await self._turn([one for call in told for one in call.operations])
            for one in told:
                answers, found = found[: one.answers], found[one.answers :]
                if not one.future.done():
                    one.future.set_result(answers)
        except (LedgerLost, ConfigError) as error:
            self._failures += 1
            _fail(told, LedgerLost(str(error)))
        finally:
            _fail(told, LedgerLost("the ledger is closed"))

    async def _turn(self, operations: list[Operation], epoch: str = "") -> list[Any]:
        """Execute the operations in order, and return the answers of those that have one. `epoch`
        is passed during a recovery only: the new epoch, in which no other calls are made yet."""
        self._requests += len(operations)
        self._air.turns_by(1)
        try:
            return await self._answers(operations, epoch or self._epoch)
        finally:
            self._air.turns_by(-1)

    async def _answers(self, operations: list[Operation], epoch: str) -> list[Any]:
        answers: list[Any] = []
        waiting = batches(operations)
        recovering = epoch != self._epoch
        for _ in range(_TRIES):
            waiting += ends_once_more(waiting, self._is_over)
            sent = self._clock.monotonic()
            calls = [self._packed(batch, sent, epoch) for batch in waiting]
            try:
                replies = await self._store.scripts(TURN, calls)
            except LedgerLost as error:
                self._failed(error)
                raise
            self._calls += len(calls)
            received = self._clock.monotonic()
            self._air.nearest[0] = min(self._air.nearest[0], received - sent)
            found = [decoded(reply) for reply in replies]
            if any(one[1] == 0 for one in found) or not (recovering or epoch == self._epoch):
                self._epoch = ""
                raise LedgerLost("the store's memory is another one than it was")
            await self._check_time(found[-1][0] / 1e6, sent, received, epoch)
            # All calls from the first late one on are sent again: each is idempotent, and their
            # order is preserved.
            done = next((n for n, one in enumerate(found) if one[1] == 2), len(found))
            for one in found[:done]:
                answers += one[2]
            waiting = waiting[done:]
            if not waiting:
                if not recovering:
                    self._reached()
                return answers
        raise LedgerLost("calls of the store arrive too late, time after time")

    def _packed(
        self, operations: list[Operation], sent: float, epoch: str
    ) -> tuple[list[str], list[bytes]]:
        scopes, told = packed(operations)
        hold, lapse = micros(self.config.hold), micros(LAPSE)
        parts = [epoch, hold, lapse, MAX_TICKETS, self._prefix, told]
        if self._offset is not None:
            low, high, seen = self._offset
            slack = _STEP + _SLEW * (sent - seen)
            # The store may need a while for the calls before this one.
            late = slack + _BEHIND * self._air.turns
            parts += [int((sent + low - slack) * 1e6), int((sent + high + late) * 1e6)]
        text = msgspec.msgpack.encode(parts)
        return [self._epoch_keys[0], *(self._key(f"s:{scope}") for scope in scopes)], [text]

    # --- epochs -------------------------------------------------------------------------------

    async def _recover(self, *, starting: bool = False) -> None:
        """Reconnect and determine the epoch. If it is a new one, push what this member knows."""
        tried_at = self._clock.monotonic()
        try:
            await self._store.hang_up()
            await self._air.all_answered.wait()  # calls in flight belong to the old connection
            identity = await self._store.connect(starting=starting)
            epoch = await self._agree(identity)
            if epoch != self._lived_in:
                await self._tell_all(epoch)
            self._lived_in = epoch
            await self._sign(epoch)
            self._epoch = epoch
        except LedgerLost as error:
            self._epoch = ""
            if isinstance(error, StoreDown):
                self._members.nobody_served(tried_at)
            self._failed(error)
            raise
        self._reached()

    async def _agree(self, identity: StoreIdentity) -> str:
        """Return the current epoch: the stored one if it began on this very server, otherwise a
        new one. The first member to declare it wins."""
        for _ in range(5):
            found = await self._store.run("HMGET", self._epoch_keys[0], "id", "server", "format")
            current, server, version = (_text(one) for one in found)
            if current and version != str(FORMAT):
                raise ConfigError(
                    f"fleet.namespace: what is stored under {self._prefix} has format {version}, "
                    f"and this version of gatekeeper writes {FORMAT}: choose another namespace"
                )
            if current and server == identity.text:
                return current
            await self._declare(current, identity)
        raise LedgerLost("the members can't agree about the store's epoch")

    async def _declare(self, expected: str, identity: StoreIdentity) -> None:
        arguments = [expected, secrets.token_hex(4), identity.text]
        arguments += [str(micros(self._members.longest_hold)), str(FORMAT)]
        await self._store.script(DECLARE, self._epoch_keys, arguments)
        self._epochs += 1

    async def _tell_all(self, epoch: str) -> None:
        """Push every clock, block and hold that this member knows of to a store without them."""
        word, self._offset = self._members.word(epoch, bool(self._lived_in)), None
        if word:
            clocks = [one for listener in self._listeners.values() for one in listener.clocks()]
            if not all(one.scope for one in clocks):
                self._members.some_are_silent()
            operations = [
                *(clock_told(one) for one in clocks if one.scope),
                *self._renewals([token for token, one in self._held.items() if one.granted]),
            ]
            for first in range(0, len(operations), _AT_ONCE):
                await self._turn(operations[first : first + _AT_ONCE], epoch)
        await self.overrides.tell_again(epoch)
        arguments = [epoch, self.member, str(word), self._key("all")]
        over = await self._store.script(
            PUSHED, self._epoch_keys, [*arguments, *self._members.tells(epoch, word)]
        )
        self._members.told(too_late=over == 2)

    async def _check_time(self, server: float, sent: float, received: float, epoch: str) -> None:
        """Compare the store's clock with ours. If it was set, the moments that it stored are
        wrong: declare a new epoch and raise LedgerLost."""
        low, high, known = server - received, server - sent, self._offset
        self._offset = (low, high, received)
        if known is None:
            return
        slack = _STEP + _SLEW * (received - known[2])
        if low > known[1] + slack or high < known[0] - slack:
            _log.warning("the store's clock was set by %.3f s: a new epoch begins", low - known[0])
            self._epoch, self._offset = "", None
            await self._declare(epoch, self._store.identity)
            raise LedgerLost("the store's clock was set")

    def _failed(self, why: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = self._clock.monotonic()
        self._epoch = ""
        if self._open and self._clock.monotonic() >= self._failing_since + _GRACE:
            self._lose(why)

    def _lose(self, why: Exception) -> None:
        if self._lost_at is not None:
            return
        self._lost_at = self._clock.monotonic()
        how = "nothing is granted"
        if self.config.when_lost == "divide":
            how = "each member goes on with the hosts that are its own"
        said = str(why).removeprefix(f"{self._store.where}: ")
        if self._news.begins("lost", self._prefix):
            _log.error("%s can't be reached (%s): %s", self._store.where, said, how)
        if self.config.when_lost == "wait":
            for listener in self._listeners.values():
                listener.lost(True)

    def _reached(self) -> None:
        self._failing_since = None
        if self._lost_at is None:
            return
        if self._news.ends("lost", self._prefix):
            seconds = self._clock.monotonic() - self._lost_at
            _log.warning("%s is back after %.1f s", self._store.where, seconds)
        self._lost_at = None
        for listener in self._listeners.values():
            listener.lost(False)

    def _note_quarantine(self, seconds: float) -> None:
        """Log once that nothing is granted for a while, and once that the quarantine is over."""
        if self._waits is (waits := seconds > 0):
            return
        self._waits = waits
        if not waits:
            if self._news.ends("waits", self._prefix):
                _log.info("%s: turns are given again", self._store.where)
        elif self._news.begins("waits", self._prefix):
            _log.log(
                logging.WARNING if self._open else logging.INFO,  # expected for the first member
                "%s is empty, or another than it was (a restart, a failover, FLUSHALL): nobody gets"
                " a turn until every member has told what it knows, %.0f s at most",
                self._store.where,
                seconds,
            )

    # --- members ------------------------------------------------------------------------------

    async def _sign(self, epoch: str = "") -> None:
        """Send a heartbeat and read the list of members. `epoch`: see `_turn`."""
        epoch = epoch or self._epoch
        forget = str(micros(max(60.0, 3 * self.config.hold)))
        channel = self._key("all") if self._members.greets else ""
        names = ("epoch", "members", "overrides", "read")
        known = str(int(self._members.known))
        sent = self._clock.monotonic()
        answer = await self._store.script(
            BEAT,
            [self._key(name) for name in names],
            [self.member, forget, channel, epoch, str(self._members.read), known],
        )
        found_in, left, now, _, words, *_ = answer
        if not epoch or _text(found_in) != epoch:  # both are empty if both sides lost it
            self._epoch = ""
            raise LedgerLost("the store's memory is another one than it was")
        received = self._clock.monotonic()
        self._quarantine_until = received + int(left) / 1e6
        self._note_quarantine(int(left) / 1e6)
        self._air.nearest = [received - sent, self._air.nearest[0]]
        await self._check_time(int(now) / 1e6, sent, received, epoch)
        if self._members.note(epoch, sent, received, answer):
            self._beat_now.set()
        await self.overrides.catch_up(int(words))

    async def _beat(self) -> None:
        while True:
            wait = BEAT_EVERY if self._failing_since is None and self._members.known else _UNKNOWN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._beat_now.wait()
            self._beat_now.clear()
            if not self._open:
                return
            try:
                async with self._using:
                    if self._epoch:
                        await self.overrides.tell(self._epoch)
                        await self._sign()
                        await self._turn([])
                    else:
                        await self._recover()
            except LedgerLost as error:
                _log.debug("%s", error)
                self._failed(error)
            except ConfigError as error:
                level = logging.DEBUG if str(error) == self._complaint else logging.ERROR
                _log.log(level, "%s", error)
                self._complaint = str(error)
                self._failed(error)
            except Exception as error:  # noqa: BLE001 - without heartbeats the member is forgotten
                _log.exception("a beat failed")
                self._failed(error)

    async def _join(self) -> None:
        """Wait briefly until the other members know this one; nothing is granted before that."""
        wait = 0.025
        for _ in range(5):
            if self._members.known or not self._epoch:
                return
            await asyncio.sleep(wait)
            wait *= 2
            with contextlib.suppress(LedgerLost):
                async with self._using:
                    await self._sign()

    async def _hear(self) -> None:
        """Receive notifications: scopes that opened, reports, pauses, newcomers."""

        def subscribed(channels: int) -> None:
            self._subscribed = channels

        def channels() -> list[str]:
            return [self._key("all"), *(self._key(f"m:{owner}") for owner in self._listeners)]

        while True:
            try:
                await self._store.listen(channels, self._heard, subscribed)
            except LedgerLost as error:
                _log.debug("%s", error)
            except Exception:  # noqa: BLE001 - without notifications no block would arrive
                _log.exception("listening failed")
            self._subscribed = 0
            await asyncio.sleep(0.25)

    def _ask_again(self) -> None:
        """Have waiters ask again, since the quarantine is over."""
        if self._lost_at is None:
            for listener in self._listeners.values():
                listener.lost(False)

    def _heard(self, channel: str, data: bytes) -> None:
        try:
            said = msgspec.msgpack.decode(data)
            if channel != self._key("all"):
                owner = channel.rpartition(":")[2]
                self._listeners[owner].opened(said[0], self._air.ahead(said[1] / 1e6))
                return
            kind = said[0]
            if kind == "j":
                self._beat_now.set()
            elif kind == "o":
                self.overrides.heard(said[1], said[2])
            elif kind == "t" and self._shared is not None:
                self._shared.told(said[1], said[2], bool(said[3]))
            elif kind == "g":
                self._quarantine_until = self._clock.monotonic() + said[1] / 1e6
                asyncio.get_running_loop().call_later(said[1] / 1e6, self._ask_again)
            for listener in self._listeners.values():
                if kind == "b":
                    # A later version may append fields.
                    _, scope, seconds, reason, interval, interval_for = said[:6]
                    listener.blocked(
                        Report(scope, seconds / 1e6, reason, interval / 1e6, interval_for / 1e6)
                    )
                elif kind == "p":
                    listener.paused(said[1], bool(said[2]))
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError):
            _log.warning("a message on %s can't be read: another program uses it", channel)

    # --- without the store --------------------------------------------------------------------

    @property
    def _dividing(self) -> bool:
        return self._lost_at is not None and self.config.when_lost == "divide"

    def _take_alone(self, request: TakeRequest) -> Granted | NotBefore:
        """Grant a request for a host that this member owns, once requests that other members may
        have started before the loss no longer matter."""
        # The last scope is shared by the most hosts, so hosts that share it have the same owner.
        name = request.scopes[-1].scope
        if not self._members.owns(name):
            return NotBefore(_POLL)
        longest = max(one.interval for one in request.scopes)
        left = (self._lost_at or 0.0) + 2 * BEAT_EVERY + longest - self._clock.monotonic()
        if left > 0:
            return NotBefore(left)
        self._held[request.token] = _Held(tuple(one.scope for one in request.scopes), granted=True)
        return Granted(request.token, self.config.hold)


def _machine() -> str:
    """Return the machine's name, reduced to the characters that a member's name may contain."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:32] or "member"


def _fail(told: list[_Told], error: Exception) -> None:
    for one in told:
        if not one.future.done():
            one.future.set_exception(error)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
