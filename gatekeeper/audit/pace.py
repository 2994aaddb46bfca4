"""Checks that no request of an audit record came too early: by the intervals, blocks and pauses of
each scope, over the chains of all gates that share it.

The memory that it takes grows with the number of scopes and of open leases, not of lines.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from gatekeeper.audit.lines import BlockLine, GrantLine, OutcomeLine, PauseLine, ScopeInForce
from gatekeeper.audit.reading import AuditDifference

TOLERANCE: Final = 0.1
"""Seconds by which clocks of two processes may differ, unless the caller says otherwise."""
SLACK: Final = 0.002
"""Seconds by which a start may precede the end of the interval, on the one clock of a process:
lines tell microseconds, and a start is written a moment after it is due."""
_NAME_IS_GONE: Final = "no such name"
"""Reason of a block that a request for robots.txt lifts: it shows whether the name exists again."""
MAX_OPEN: Final = 100_000
"""Leases without an outcome that are kept. Of more, the oldest count from their grant."""
_MAX_STARTS: Final = 64
"""Starts of a scope that are kept while leases of it are open."""
_INF: Final = float("inf")
Differences = Iterator[AuditDifference]
"""Requests that came too early, with the places of their grants."""


class LeaseStart(msgspec.Struct, gc=False):
    """The start of one request in one scope. A place is the file and `n` of its grant."""

    wall: float
    mono: float
    chain: int
    file: str
    n: int
    interval: float = 0.0
    source: str = ""
    """Of the interval."""


class HeldSpan(NamedTuple):
    """A block or a pause of a scope, in seconds since 1970."""

    since: float
    until: float
    """Without end: a pause."""
    chain: int
    """The one that says so."""
    reason: str | None = None


_NO_HOLD: Final = HeldSpan(0.0, -_INF, -1)


class ScopeLog(msgspec.Struct):
    """What is known about one scope."""

    starts: list[LeaseStart] = msgspec.field(default_factory=list)
    """The last ones, ordered by time."""
    open: int = 0
    """Leases without an outcome yet."""
    block: HeldSpan = _NO_HOLD
    pause: HeldSpan = _NO_HOLD
    shortest: float = _INF
    """The shortest time between two starts in seconds, and the interval in force then."""
    interval_then: float = 0.0
    source_then: str = ""


class PendingLease(msgspec.Struct):
    """A grant whose outcome is still to come."""

    grant: LeaseStart
    """As far as it is known: the time of the grant."""
    scopes: list[tuple[ScopeLog, ScopeInForce]]
    holds: list[tuple[str, HeldSpan]]
    """The blocks and pauses that the record has before the grant, by scope."""


class Pace:
    """Follows the grants, outcomes and blocks of all chains, in the order of time."""

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.tolerance: float = tolerance
        self.compared: int = 0
        """Pairs of starts in one scope that were compared."""
        self.requests: int = 0
        self.unused: int = 0
        """Leases that sent no request."""
        self.without_outcome: int = 0
        """Leases that count from their grant."""
        self.scopes: defaultdict[str, ScopeLog] = defaultdict(ScopeLog)
        self._open: dict[tuple[int, str], PendingLease] = {}

    # --- events ---------------------------------------------------------------------------------

    def grant(self, line: GrantLine, wall: float, chain: int, file: str) -> Differences:
        """Note a grant. Yield what is wrong with it."""
        scopes = [(self.scopes[one.scope], one) for one in line.scopes]
        holds = []
        for log, one in scopes:
            lifted = line.robots and log.block.reason == _NAME_IS_GONE
            found = (log.pause,) if lifted else (log.block, log.pause)
            holds += [(one.scope, hold) for hold in found if hold.until > wall]
            log.open += 1
        if len(self._open) >= MAX_OPEN:
            yield from self._close(next(iter(self._open)), None)
        key = (chain, line.lease)
        if key in self._open:
            text = "it has the id of a lease that has not ended"
            yield AuditDifference("pace", file, line.n, text)
            yield from self._close(key, None)
        start = LeaseStart(wall, line.m, chain, file, line.n)
        self._open[key] = PendingLease(start, scopes, holds)

    def outcome(self, line: OutcomeLine, chain: int) -> Differences:
        """Note the outcome of a lease. Yield what is wrong."""
        key = (chain, line.lease)
        if key not in self._open:
            return  # its grant was erased, or stands in a segment that was removed
        if line.start is None:
            self.unused += 1
            for log, _ in self._open.pop(key).scopes:
                log.open -= 1
        else:
            yield from self._close(key, line.start.timestamp())

    def end(self, chain: int) -> Differences:
        """Note the end of a chain: leases without an outcome count from their grant."""
        for key in [key for key in self._open if key[0] == chain]:
            self.without_outcome += 1
            yield from self._close(key, None)

    def block(self, line: BlockLine, wall: float, chain: int) -> None:
        """Note a block, or that it is lifted."""
        log = self.scopes[line.scope]
        until = wall if line.until is None else line.until.timestamp()
        if until <= wall:
            log.block = _NO_HOLD
        elif until > log.block.until:
            log.block = HeldSpan(wall, until, chain, line.reason)

    def pause(self, line: PauseLine, wall: float, chain: int) -> None:
        """Note a pause, or its end."""
        self.scopes[line.scope].pause = _NO_HOLD if line.ended else HeldSpan(wall, _INF, chain)

    # --- the checks -----------------------------------------------------------------------------

    def _held(self, lease: PendingLease, wall: float) -> Differences:
        """Yield the blocks and pauses in which a request began."""
        grant = lease.grant
        for scope, hold in lease.holds:
            own, left = hold.chain == grant.chain, hold.until - wall
            if wall < hold.since + (0.0 if own else self.tolerance):
                continue  # it was granted before
            if left > (SLACK if own else self.tolerance):
                text = "paused" if left == _INF else f"blocked for {left:.3f} s more"
                yield AuditDifference("pace", grant.file, grant.n, f"{scope} is {text}")

    def _close(self, key: tuple[int, str], start: float | None) -> Differences:
        """End a lease whose request was sent at `start`; None: at its grant, as far as is known."""
        lease = self._open.pop(key)
        grant = lease.grant
        wall = grant.wall if start is None else start
        mono = grant.mono + (wall - grant.wall)
        self.requests += 1
        yield from self._held(lease, wall)
        for log, scope in lease.scopes:
            log.open -= 1
            known = grant.chain, grant.file, grant.n
            one = LeaseStart(wall, mono, *known, scope.interval, scope.source)
            yield from self._insert(scope.scope, log, one)

    def _insert(self, name: str, log: ScopeLog, one: LeaseStart) -> Differences:
        """Put a start among those of its scope, and compare it with its neighbours."""
        starts = log.starts
        place = len(starts)
        if starts and one.wall < starts[-1].wall:
            place = bisect.bisect_right(starts, one.wall, key=attrgetter("wall"))
        starts.insert(place, one)
        for at in (place, place + 1):
            if 0 < at < len(starts):
                before, after = starts[at - 1], starts[at]
                if (gap := after.wall - before.wall) < log.shortest:
                    log.shortest = gap
                    log.interval_then, log.source_then = after.interval, after.source
                yield from self._compare(name, before, after)
        if not log.open:
            del starts[:-1]
        elif len(starts) > _MAX_STARTS:
            del starts[: -_MAX_STARTS // 2]

    def _compare(self, name: str, before: LeaseStart, one: LeaseStart) -> Differences:
        self.compared += 1
        if before.chain == one.chain and before.mono > one.mono:  # the wall clock was set back
            before, one = one, before
        gap, wanted, clock = one.wall - before.wall, one.interval, ""
        own, slack = before.chain == one.chain, SLACK + wanted * 0.001  # clocks are adjusted slowly
        mono = one.mono - before.mono
        if gap < wanted - (max(slack, self.tolerance) if own else self.tolerance):
            clock = f" by the wall clock, {mono:.3f} s by the monotonic one" if own else ""
        elif own and mono < wanted - slack:
            gap, clock = mono, " by the monotonic clock"
        else:
            return
        text = (
            f"{name} was asked {gap:.3f} s after line {before.n} of {before.file}{clock}; "
            f"the interval in force is {wanted:.3f} s"
        )
        yield AuditDifference("pace", one.file, one.n, text)
