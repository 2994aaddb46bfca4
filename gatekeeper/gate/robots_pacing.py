"""`RobotsPacing`: how a robots.txt, or the lack of one, affects the clocks of its host.

The directory of files and the scheduler of leases know nothing of each other; `RobotsPacing`
connects them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextvars import Token
from functools import partial
from typing import Any, Final

import msgspec

from gatekeeper.clock import Clock, SharedTimer
from gatekeeper.errors import HoldLapsed, StorageError
from gatekeeper.fetching.directory import DelayReason, Directory, current_flight
from gatekeeper.fetching.guard import HostAddresses, before_send
from gatekeeper.fetching.outcomes import Outcome, last_look
from gatekeeper.fetching.records import Moment, Record
from gatekeeper.gate.decider import Decider
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import NO_RATE, UNKNOWN
from gatekeeper.urls import Target, host_of

PARKED: Final = "no such name"
"""Reason of a block that was set because the host's name does not exist."""

PATIENCE_SECONDS: Final = 5.0
"""Seconds that a question may wait for a block to end, or for a fleet's store."""
_PAUSED_RETRY_SECONDS: Final = 60.0
"""Seconds after which to ask again about a paused host, whose end is unknown."""
_LEASE_SLACK_SECONDS: Final = 60.0
"""Seconds that a lease may be late."""


class RobotsPacing:
    """Reports to the scheduler which intervals the files ask for and how their retrievals ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        decider: Decider,
        clock: Clock,
        *,
        waits: WaitGraph[Any],
        dns: HostAddresses | None,
        files: Callable[[], Directory],
    ) -> None:
        """`files()` returns the directory of the open gate. `dns`, if any, looks up the addresses
        whose clocks hosts share."""
        self._scheduler = scheduler
        self._decider = decider
        self._clock = clock
        self._alarm = SharedTimer(clock)
        self._waits = waits
        self._dns = dns
        self._files = files

    def close(self) -> None:
        """Cancel the timer, once every retrieval has ended."""
        self._alarm.cancel()

    async def take_robots_grant(self, target: Target) -> Grant:
        """Wait for the lease of a robots.txt request.

        Its interval is that of the last known text of the origin, even if that expired.
        """
        host = target.host
        scopes: tuple[str, ...] = ()
        if self._dns is not None:
            scopes = await self._dns.scopes(host, target.port)
        record = self._files().recall(target.origin)
        interval = UNKNOWN
        if record is None:
            self._scheduler.holdups.refuse_unknown(host)
        elif record.text is not None:
            interval = self._decider.interval_of(
                record, record.text, None, self._decider.agent, self._moment()
            )
        elif record.reachable:
            interval = NO_RATE
        self.unpark(host)  # the request shows whether the name exists again
        flight = current_flight.get()
        if flight is not None:
            self._waits.file_waits(flight.origin, host, scopes)
        try:
            why = partial(self.held, host, self._clock.monotonic())
            with _GrantWatch(self._alarm, self._files().delay_setter(), why):
                return await self._scheduler.acquire_robots(
                    target.url, host, asked=interval, scopes=scopes
                )
        finally:
            if flight is not None:
                self._waits.file_goes_on(flight.origin)

    def held(self, host: str, since: float) -> tuple[Outcome, float] | None:
        """Return what delays every request to the host for more than a moment, and the seconds
        after which to ask again: a block or a pause, or that the fleet's store has lost its data.
        None if nothing does. The lease is waited for since the monotonic time `since`: a fleet
        mostly restores its data in a moment, and nobody knows before that it does not."""
        found = self._scheduler.held(host)
        if found is None or found[1] == PARKED:
            late = self._clock.monotonic() >= since + PATIENCE_SECONDS
            lost = late and self._scheduler.holdups.unavailable
            return (Outcome.FLEET, PATIENCE_SECONDS) if lost else None
        seconds = found[0]
        if seconds == math.inf:
            return Outcome.HOST_PAUSED, _PAUSED_RETRY_SECONDS
        return (Outcome.HOST_BLOCKED, seconds) if seconds > PATIENCE_SECONDS else None

    def learnt(self, record: Record) -> None:
        """Apply a new record: its interval counts from the robots.txt request, for every request.

        The file stays valid for one lease at least: with an interval longer than the file's
        lifetime, every lease would go to robots.txt and none to a page. If the response blocked the
        host, the file is asked for again only after the block, as `retry_at` promises.
        """
        host = host_of(record.origin)
        if record.current.outcome is Outcome.DNS_NXDOMAIN:
            if self._scheduler.blocked(host) is None:
                left = record.expires - self._clock.monotonic()
                self._park(host, self._clock.wall() + left)
        else:
            left = self._scheduler.robots_read(
                host, lambda: self._decider.interval(record, self._decider.agent, self._moment())
            )
            now = self._clock.monotonic()
            if record.reachable:
                if left > 0:
                    record.outlive(now + left + _LEASE_SLACK_SECONDS)
            elif (blocked := self._scheduler.blocked(host)) is not None:
                record.outlive(now + blocked[0] - self._clock.wall())
        self._decider.note(record)

    def unpark(self, host: str) -> None:
        """Lift the block of a host whose name did not exist; leave any other block."""
        blocked = self._scheduler.blocked(host)
        if blocked is not None and blocked[1] == PARKED:
            self._park(host, 0.0)

    def _moment(self) -> Moment:
        return Moment(self._clock.monotonic(), self._clock.wall())

    def _park(self, host: str, until_wall: float) -> None:
        with contextlib.suppress(StorageError):  # the block holds in memory, and is only a hint
            self._scheduler.block(host, until_wall, PARKED, by="gatekeeper")


class _GrantWatch(msgspec.Struct, eq=False):
    """Tells the waiters of a robots.txt, every few seconds, what its lease waits for.

    A block may begin while they wait; those who can't wait that long have to learn of it.
    """

    _alarm: SharedTimer
    _tell: Callable[[DelayReason | None], None]
    _why: DelayReason
    ends: float = 0.0

    def __enter__(self) -> None:
        self.due(self._alarm.clock.monotonic())

    def due(self, now: float) -> None:
        """Called by the timer: tell the waiters, and set the next look."""
        self._tell(self._why)
        self._alarm.set(self, now + PATIENCE_SECONDS)

    def __exit__(self, *error: object) -> None:
        self._alarm.drop(self)
        self._tell(None)


class RobotsLease(msgspec.Struct, eq=False):
    """The lease of a robots.txt request, as an async context manager.

    It takes a grant of the host and starts its clock as a page does.
    """

    _pacing: RobotsPacing
    _target: Target
    _grant: Grant | None = None
    _previous_check: Token[Callable[[], bool] | None] | None = None

    async def __aenter__(self) -> Grant:
        grant = await self._pacing.take_robots_grant(self._target)
        if (look := last_look.get()) is not None:
            try:
                await look()
            except BaseException:
                grant.pass_on()
                raise
        self._grant = grant
        if grant.hold is not None:
            self._previous_check = before_send.set(lambda: grant.stale)
        return grant

    async def __aexit__(self, *error: object) -> None:
        if self._previous_check is not None:
            before_send.reset(self._previous_check)
        if self._grant is None:
            return
        if isinstance(error[1], HoldLapsed):
            self._grant.give_back()
        else:
            self._grant.release()
