"""How long a request may take on the network, when only its time there is to count.

aiohttp's own total timeout runs from the call to the last byte, and so counts the waiting
for a turn as well. An `Allowance` runs while a hop is under way or its body is read, and
stands still between hops. One timer serves all of a session's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import ref

import msgspec
from aiohttp import ClientResponse

from gatekeeper.clock import Clock, Deadline, Timer

__all__ = ["UNLIMITED", "Allowance", "Allowances", "Unlimited"]

_INF = float("inf")


class Allowances:
    """The allowances that run, and the one timer that looks after them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now = clock.monotonic
        self.running: dict[Allowance, None] = {}
        self._timer: Timer | None = None
        self.armed = _INF
        """No allowance that runs ends before that moment."""

    def arm(self, moment: float) -> None:
        """Look at them then."""
        self.cancel()
        self.armed = moment
        self._timer = self.clock.call_at(moment, self._look)

    def cancel(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.armed = _INF

    def _look(self) -> None:
        self._timer = None
        self.armed = _INF
        now = self.now()
        for over in [one for one in self.running if one.ends <= now]:
            over.expire()
        # Nearly all are done long before their end: what runs now is few, and met anew.
        if self.running:
            self.arm(min(one.ends for one in self.running))


class Allowance(msgspec.Struct, eq=False):
    """The seconds that one request, with its redirects, may still spend on the network."""

    among: Allowances
    left: float | None
    """None: no limit; over, where not above zero."""
    ends: float = _INF
    """While they run: the moment at which they are over."""
    _under_way: int = 0
    """Hops that were sent and whose connection is not free; more than one where somebody
    tries again while the first answer's body still comes."""
    _task: asyncio.Task[object] | None = None
    _before: int = 0
    _deadline: Deadline | None = None
    _response: Callable[[], ClientResponse | None] | None = None
    """The response whose body is read, weakly: one that is dropped frees its connection."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """A hop goes out, from the task: the seconds run."""
        left = self.left
        if left is None or task is None:
            return
        self._task = task
        self._before = task.cancelling()
        self._under_way += 1
        if self._under_way > 1:
            return  # they run
        among = self.among
        self.ends = ends = among.now() + left
        among.running[self] = None
        if ends < among.armed:
            among.arm(ends)

    def watch(self, response: ClientResponse) -> None:
        """The head is here: they run on until `stop`, when the connection is free."""
        self._response = ref(response)
        if self._deadline is not None and self._fired():
            self.expire()  # whoever caught our cancellation and went on

    def let_go(self) -> None:
        """Free the connection of an earlier attempt, of which nobody reads on: the next one
        would wait for its slot."""
        held, self._response = self._response, None
        if held is not None and (response := held()) is not None:
            response.release()

    def stop(self) -> None:
        """A hop is over; with the last one they stand still."""
        self._response = None
        if self._under_way > 1:
            self._under_way -= 1
            return
        self._under_way = 0
        among = self.among
        if among.running.pop(self, self) is None:
            self.left = self.ends - among.now()

    def ran_out(self, error: BaseException) -> bool:
        """The hop failed with that error; whether it did because the time was over.

        A cancellation that came from elsewhere in the same moment is not swallowed.
        """
        self.stop()
        task = self._task
        return (
            task is not None
            and self._fired()
            and task.cancelling() <= self._before
            and isinstance(error, asyncio.CancelledError)
        )

    def _fired(self) -> bool:
        """Whether the task was cancelled by us, which is taken back."""
        limit, self._deadline = self._deadline, None
        if limit is None or self._task is None:
            return False
        limit.end()
        if not limit.fired:
            return False
        self._task.uncancel()
        return True

    def expire(self) -> None:
        """The time is over: end what is under way, the hop or the body."""
        self.among.running.pop(self, None)
        self.left = 0.0
        if self._response is not None:
            response = self._response()
            if response is not None:
                response.content.set_exception(TimeoutError())
                response.close()
        elif self._task is not None:
            self._deadline = Deadline(self.among.clock, self._task)
            self._deadline.fire()


class Unlimited:
    """What stands for an `Allowance` where nobody but aiohttp counts a request's time."""

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """A hop goes out."""

    def watch(self, response: ClientResponse) -> None:
        """The head is here."""

    def let_go(self) -> None:
        """Another attempt begins: who made the last one looks after its connection."""

    def stop(self) -> None:
        """A hop is over."""

    def ran_out(self, error: BaseException) -> bool:
        """Never."""
        return False


UNLIMITED = Unlimited()
