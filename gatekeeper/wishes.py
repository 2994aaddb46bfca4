"""What a robots.txt, or the want of one, means for the clocks of its host.

The directory of files and the scheduler of turns are strangers to each other (DESIGN
section 2); here they are introduced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gatekeeper import urls
from gatekeeper.clock import Clock, Timer, utc
from gatekeeper.deadlock import WaitGraph
from gatekeeper.deciding import ON_THE_WAY, Decider
from gatekeeper.errors import StorageError
from gatekeeper.fetching.directory import HeldUp, flying
from gatekeeper.fetching.guard import Whereabouts
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.records import Record
from gatekeeper.pacing.queues import Grant
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import NO_RATE, UNKNOWN, RobotsInterval
from gatekeeper.robots import RobotsTxt

__all__ = ["Wishes"]

PARKED: Final = "no such name"
"""The reason of a block that only says that the host's name does not exist (row 24)."""


_PATIENCE: Final = 5.0
"""Seconds that a question may wait for a block to end."""
_PAUSED: Final = 60.0
"""Seconds after which to ask again about a host that is paused: its end is unknown."""
_SLACK: Final = 60.0
"""Seconds by which a turn may be had late."""


class Wishes:
    """Tells the scheduler what the files ask for, and what fetching them came to."""

    def __init__(
        self,
        scheduler: Scheduler,
        decider: Decider,
        clock: Clock,
        agent: str,
        waits: WaitGraph[Any],
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._decider = decider
        self._clock = clock
        self._agent = agent
        self._waits = waits
        self._whereabouts = whereabouts
        self.look_up: Callable[[str], Record | None] = lambda _origin: None
        """What is in memory of an origin, however old."""
        self.holder: Callable[[], Callable[[HeldUp | None], None]] = lambda: _nobody
        """Gives what tells those who wait for the same file why its turn does not come."""

    def of(self, record: Record, agent: str) -> RobotsInterval:
        """The pace that the text asks for at this moment, with the line that says so."""
        standing = record.standing(self._clock)
        if standing.robots is None:
            return UNKNOWN
        return self._pace(record, standing.robots, standing.took, agent)

    def at_any_hour(self, record: Record, agent: str) -> RobotsInterval | None:
        """The same where it is the same at any hour of the record's soft life, else None."""
        policy = record.policies.get(agent)
        return None if policy is None or policy.request_rates else self.of(record, agent)

    def _pace(
        self, record: Record, robots: RobotsTxt, took: float | None, agent: str
    ) -> RobotsInterval:
        policy = self._decider.policy(record, robots, agent)
        wall = self._clock.wall()
        moment = utc(wall)
        seconds = policy.interval(moment, took)
        if seconds is None:
            return NO_RATE
        if policy.request_rates:
            # The hours of a slower rate may begin before the request arrives.
            ahead = utc(wall + ON_THE_WAY)
            soon = policy.interval(ahead, took)
            if soon is not None and soon > seconds:
                seconds, moment = soon, ahead
        return RobotsInterval(seconds, policy.interval_source(moment, took))

    def robots_turn(self, url: str) -> RobotsTurn:
        """A robots.txt request takes the host's turn and starts its clock (promise 7).

        For one `async with`.
        """
        return RobotsTurn(self, url)

    async def take_robots_turn(self, url: str) -> Grant:
        """Wait for it; its pace is what the origin's last known text asks for, though it may
        have expired.
        """
        target = urls.parse(url)
        scopes: tuple[str, ...] = ()
        if self._whereabouts is not None:
            scopes = await self._whereabouts.scopes(target.host, target.port)
        record = self.look_up(target.origin)
        wish = UNKNOWN
        if record is None:
            self._scheduler.refuse_unknown(target.host)
        if record is not None and record.text is not None:
            wish = self._pace(record, record.text.robots, None, self._agent)
        elif record is not None and record.reachable:
            wish = NO_RATE
        self.unpark(target.host)  # asking is how one learns that the name is back
        flight = flying.get()
        if flight is not None:
            self._waits.file_waits(flight.origin, target.host, scopes)
        try:
            with _Lookout(self._clock, self.holder(), partial(self.held, target.host)):
                return await self._scheduler.acquire_robots(
                    url, target.host, wish=wish, scopes=scopes
                )
        finally:
            if flight is not None:
                self._waits.file_goes_on(flight.origin)

    def held(self, host: str) -> tuple[Outcome, float] | None:
        """What keeps everybody from the host for more than a moment, and for how long."""
        found = self._scheduler.held(host)
        if found is None or found[1] == PARKED:
            return None
        seconds = found[0]
        if seconds == math.inf:
            return Outcome.HOST_PAUSED, _PAUSED
        return (Outcome.HOST_BLOCKED, seconds) if seconds > _PATIENCE else None

    def learnt(self, record: Record) -> None:
        """An origin was asked: its pace holds from that request on, whoever comes next.

        And its file holds for one turn at least. Were the pace slower than the file's
        lifetime, every turn would go to robots.txt, and never one to a page. Where the answer
        blocked the host, it is not asked again before the end of that: so says `retry_at`.
        """
        host = urls.host_of(record.origin)
        if record.current.outcome is Outcome.DNS_NXDOMAIN:
            if self._scheduler.blocked(host) is None:
                left = record.expires - self._clock.monotonic()
                self._park(host, self._clock.wall() + left)
        else:
            turn = self._scheduler.told(host, self.of(record, self._agent))
            now, blocked = self._clock.monotonic(), self._scheduler.blocked(host)
            if record.reachable and turn > 0:
                record.outlive(now + turn + _SLACK)
            elif not record.reachable and blocked is not None:
                record.outlive(now + blocked[0] - self._clock.wall())

    def unpark(self, host: str) -> None:
        """Lift the block of a host whose name did not exist, and no other block."""
        blocked = self._scheduler.blocked(host)
        if blocked is not None and blocked[1] == PARKED:
            self._park(host, 0.0)

    def _park(self, host: str, until_wall: float) -> None:
        with contextlib.suppress(StorageError):  # in force all the same, and but a hint
            self._scheduler.block(host, until_wall, PARKED)


class _Lookout:
    """Looks now and then what a robots.txt's turn waits for, and tells those who wait with it.

    A block may begin while it stands in line: nobody may be kept waiting by it unawares.
    """

    __slots__ = ("_clock", "_tell", "_timer", "_why")

    def __init__(self, clock: Clock, tell: Callable[[HeldUp | None], None], why: HeldUp) -> None:
        self._clock = clock
        self._tell = tell
        self._why = why
        self._timer: Timer | None = None

    def __enter__(self) -> None:
        self._look()

    def _look(self) -> None:
        self._tell(self._why)
        self._timer = self._clock.call_at(self._clock.monotonic() + _PATIENCE, self._look)

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tell(None)


class RobotsTurn:
    """The turn of a robots.txt request, given back at the end of the block."""

    __slots__ = ("_grant", "_url", "_wishes")

    def __init__(self, wishes: Wishes, url: str) -> None:
        self._wishes = wishes
        self._url = url
        self._grant: Grant | None = None

    async def __aenter__(self) -> Grant:
        grant = self._grant = await self._wishes.take_robots_turn(self._url)
        return grant

    async def __aexit__(self, *error: object) -> None:
        if self._grant is not None:
            self._grant.release()


def _nobody(_why: HeldUp | None) -> None:
    """Nobody waits with this turn."""
