"""`Turns`: how a client waits for a turn that a sidecar hands out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import datetime

from gatekeeper import urls
from gatekeeper.clock import Clock, deadline, utc
from gatekeeper.deadlock import Wait, WaitGraph, WaitsForItself
from gatekeeper.decision import Decision
from gatekeeper.errors import (
    Deferred,
    GateClosed,
    GatekeeperError,
    LeaseTimeout,
    SidecarError,
)
from gatekeeper.middleware import hold_in_context, inherited
from gatekeeper.pacing.engine import Need
from gatekeeper.remote.errands import Errands
from gatekeeper.remote.leases import TTL, Held, RemoteLease
from gatekeeper.remote.line import Answer, Line, Unreached, backoff
from gatekeeper.remote.tasks import Tasks
from gatekeeper.remote.wire import LeaseGiven, LeaseWanted, bound_in, encode, problem, read
from gatekeeper.urls import Target

__all__ = ["Turns"]

_GRACE = 15.0
"""Seconds beyond `wait` in which the answer to a long poll must come."""
_LAST = 0.5
"""... and beyond the moment at which its caller wants to have given up, whatever comes."""
_INF = float("inf")


class Turns:
    """Long polls, at most `most_polls` at once, each of `poll` seconds at most.

    A turn that was asked for and whose answer got lost is asked for again: at the worst a
    turn is wasted, as the sidecar ends the lease by itself; none is ever taken twice.
    """

    def __init__(
        self,
        line: Line,
        errands: Errands,
        tasks: Tasks,
        unanswered: Callable[[str, str, str | None, str], Decision],
        *,
        poll: float,
        most_polls: int,
        patience: float,
        own_wait: float,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._line = line
        self._errands = errands
        self._tasks = tasks
        self._unanswered = unanswered
        self._poll = poll
        self._most_polls = most_polls
        self._slots = asyncio.Semaphore(most_polls)
        self._patience = patience
        self._clock = clock
        self._rng = rng
        self.waits: WaitGraph[RemoteLease] = WaitGraph(clock, own_wait, _needs)
        self.held = Held(errands, self.waits.holdings, clock)
        self.granted = 0

    async def acquire(
        self,
        url: str,
        *,
        priority: int,
        timeout: float | None,
        user_agent: str | None,
        owned: bool,
    ) -> RemoteLease:
        """See `RemoteGatekeeper.acquire`."""
        target = urls.parse(url)
        end = _INF if timeout is None else self._clock.monotonic() + max(0.0, timeout)
        asked = _Asked(url, target, priority, user_agent, end)
        stuck: WaitsForItself | None = None
        waiting: Wait[RemoteLease] | None = None
        try:
            waiting = self._begin_wait(target) if owned else None
        except WaitsForItself as error:
            stuck = error
        try:
            await self._slot(asked)
            try:
                given = await (self._given(asked) if stuck is None else self._beside(asked, stuck))
            finally:
                self._slots.release()
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.cancelled()
            raise
        finally:
            if waiting is not None:
                self.waits.end(waiting)
        self.granted += 1
        # No await between the arrival and the books: the lease is never nobody's.
        lease = self.held.take(given, target.host, user_agent, owned=owned)
        if owned:
            hold_in_context(lease)
        return lease

    def _begin_wait(self, target: Target) -> Wait[RemoteLease] | None:
        """Say that this task waits for the host; None where that is in nobody's way.

        Raises WaitsForItself where, as far as this client can see, it could never end.
        """
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - whoever awaits a lease runs inside a task
            return None
        # Another gate's leases are no business of this one's hosts.
        under = [one for one in inherited(task) if getattr(one, "_held", None) is self.held]
        return self.waits.begin(task, target.url, target.host, (), under)

    async def look(self, url: str, *, priority: int, user_agent: str | None) -> RemoteLease:
        """The lease, if its turn is now: one round trip, which may take its time.

        `acquire` with a timeout of 0 would hang up where the answer takes longer, and waste
        the turn that it brings.
        """
        asked = _Asked(url, urls.parse(url), priority, user_agent, _INF)
        try:
            answer = await self._asking(asked, 0.0)
        except Unreached as error:
            raise self._deferred(asked, str(error)) from None
        if answer.status != 201:
            raise self._refusal(asked, answer)
        self.granted += 1
        return self.held.take(read(answer, LeaseGiven), asked.target.host, user_agent, owned=False)

    async def _slot(self, asked: _Asked) -> None:
        left = None if asked.end == _INF else asked.end - self._clock.monotonic()
        try:
            async with deadline(self._clock, left):
                await self._slots.acquire()
        except TimeoutError:
            raise LeaseTimeout(
                asked.target.url,
                f"{asked.target.url}: {self._most_polls} others of this client wait already",
            ) from None

    async def _beside(self, asked: _Asked, stuck: WaitsForItself) -> LeaseGiven:
        """A lease for a host of which this task holds one, or those who wait for it.

        The sidecar hears of a lease's head only when it ends, so what is not granted at once
        would wait for a task that waits.
        """
        try:
            answer = await self._asking(asked, 0.0)
        except Unreached as error:
            raise self._deferred(asked, str(error)) from None
        if answer.status == 201:
            return read(answer, LeaseGiven)
        refusal = self._refusal(asked, answer)
        raise stuck if isinstance(refusal, LeaseTimeout) else refusal

    async def _given(self, asked: _Asked) -> LeaseGiven:
        """Poll until the turn comes, it is refused, or the time is over."""
        give_up = self._clock.monotonic() + (0.0 if self._line.down else self._patience)
        attempt = 0
        while True:
            now = self._clock.monotonic()
            wait = max(0.0, min(self._poll, asked.end - now))
            pause = backoff(attempt, self._rng)
            try:
                answer = await self._asking(asked, wait)
            except Unreached as error:
                self._persist(asked, str(error), pause, give_up)
            else:
                if answer.status == 201:
                    return read(answer, LeaseGiven)
                if self._shortened(answer, wait):
                    continue
                pause = max(pause, answer.retry_after or 0.0)
                refusal = self._refusal(asked, answer)
                if answer.busy and not isinstance(refusal, Deferred):
                    self._persist(asked, answer.detail, pause, give_up)
                else:
                    # Rounded up to whole seconds: one less is certain.
                    soonest = now + max(wait, (answer.retry_after or 0.0) - 1.0)
                    if not isinstance(refusal, LeaseTimeout) or soonest >= asked.end:
                        raise refusal
                    pause = self._until_next_poll(now, wait, pause)
                    give_up = self._clock.monotonic() + self._patience
            attempt += 1
            self._line.repeated += 1
            left = asked.end - self._clock.monotonic()
            await self._clock.sleep(max(0.0, min(pause, left)))

    def _shortened(self, answer: Answer, wait: float) -> bool:
        """The sidecar lets nobody wait so long (server.max_wait): polls are shorter now."""
        most = bound_in(answer) if answer.status == 400 else None
        if most is None or not 0 < most < wait:
            return False
        self._poll = min(self._poll, most)
        return True

    def _until_next_poll(self, began: float, wait: float, named: float) -> float:
        """Seconds to sleep: none after a whole poll; after one that was cut short, as the
        turn lies further off than a poll lasts, until a poll can reach it."""
        if self._clock.monotonic() - began >= wait:
            return 0.0
        return max(1.0, named - self._poll)

    def _persist(self, asked: _Asked, why: str, pause: float, give_up: float) -> None:
        """Raise Deferred once there is no time left to try again."""
        if self._clock.monotonic() + pause > min(give_up, asked.end):
            raise self._deferred(asked, why)

    def _deferred(self, asked: _Asked, why: str) -> Deferred:
        self._line.down = True
        return Deferred(self._unanswered(asked.url, asked.target.origin, asked.user_agent, why))

    def _refusal(self, asked: _Asked, answer: Answer) -> GatekeeperError:
        error = problem(answer, asked.url)
        if isinstance(error, SidecarError) and answer.status in (429, 503):
            moment = self._moment(answer.retry_after)
            return LeaseTimeout(asked.target.url, error.detail, retry_at=moment)
        return error

    def _moment(self, seconds: float | None) -> datetime | None:
        return None if seconds is None else utc(self._clock.wall() + seconds)

    async def _asking(self, asked: _Asked, wait: float) -> Answer:
        """One long poll, in a task of its own: a caller who is cancelled leaves at once, and
        what the sidecar may have answered in that very moment is not lost."""
        body = LeaseWanted(
            asked.url,  # as it came: the sidecar's guard must see all of it
            wait=wait,
            ttl=TTL,
            priority=min(max(asked.priority, -1000), 1000),
            user_agent=asked.user_agent,
        )
        left = max(0.0, asked.end - self._clock.monotonic())
        timeout = min(wait + _GRACE, left + _LAST)
        poll = self._tasks.start(
            self._line.request("POST", "/v1/leases", encode(body), timeout=timeout)
        )
        try:
            return await asyncio.shield(poll)
        except asyncio.CancelledError:
            if poll.cancelled():
                raise GateClosed("the gate was closed before the turn came") from None
            poll.add_done_callback(self._give_back)
            # In the next turn of the loop: an answer that was read in this one arrives yet.
            asyncio.get_running_loop().call_soon(poll.cancel)
            raise

    def _give_back(self, poll: asyncio.Task[Answer]) -> None:
        if poll.cancelled() or poll.exception() is not None or poll.result().status != 201:
            return
        self.held.give_back_id(read(poll.result(), LeaseGiven).id)


def _needs(host: str, _near: tuple[str, ...]) -> tuple[Need, ...]:
    """What a client knows of a host's slots: that there is one."""
    return (Need(host, 1, False),)


class _Asked:
    """What one caller wants."""

    __slots__ = ("end", "priority", "target", "url", "user_agent")

    def __init__(
        self, url: str, target: Target, priority: int, user_agent: str | None, end: float
    ) -> None:
        self.url = url
        self.target = target
        self.priority = priority
        self.user_agent = user_agent
        self.end = end
