"""`Questions`: those asked in one turn of the loop leave together.

A batch is answered when its slowest URL is, so URLs of origins that the sidecar knows go
together, and each origin that it may have to ask first goes by itself: a slow origin
delays no other. Beside that nothing waits: a batch leaves at the end of the turn in which
its first URL was asked, unless as many as may be are under way already; then what gathers
meanwhile leaves with the next.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.decision import Decision
from gatekeeper.errors import GateClosed, GatekeeperError
from gatekeeper.remote.answers import Answers, Key
from gatekeeper.remote.batches import Batches
from gatekeeper.remote.line import Unreached
from gatekeeper.remote.tasks import Tasks

__all__ = ["Question", "Questions"]

_MOST_TEXT = 150_000
"""Characters of URLs in a batch: six bytes each at the worst, within the sidecar's 1 MiB."""
_PROMPT_AT_ONCE = 4
_SHORT = 250
"""URLs below which a batch is not cut up: a request of its own costs more than that saves."""
_COLD_AT_ONCE = 64


class Question(msgspec.Struct, eq=False):
    """One URL that somebody wants to know about; each waiter has a future of its own, so
    that one who is cancelled takes none of the others along."""

    key: Key
    origin: str
    waiters: list[asyncio.Future[Decision]]

    @property
    def wanted(self) -> bool:
        """Somebody still waits."""
        return any(not waiter.done() for waiter in self.waiters)


LaneKey = tuple[str, str | None]
"""Origin, or empty for all those that answer at once; and agent."""


class _Lane:
    """Questions that wait, by the batch they may travel in: (origin, agent)."""

    __slots__ = ("at_once", "busy", "most", "queues")

    def __init__(self, most: int, at_once: int) -> None:
        self.most = most
        """Batches under way."""
        self.at_once = at_once
        """The same, for one key."""
        self.busy: dict[LaneKey, int] = {}
        self.queues: dict[LaneKey, deque[Question]] = {}

    def next(self) -> LaneKey | None:
        """Whose batch may leave."""
        if sum(self.busy.values()) >= self.most:
            return None
        for key in self.queues:
            if self.busy.get(key, 0) < self.at_once:
                return key
        return None

    def length(self, longest: int) -> int:
        """URLs that a batch may have now, of the `longest` that any may.

        Those that fit into one are spread over all that may be under way, so that the
        sidecar answers one batch while the client reads another.
        """
        waiting = sum(map(len, self.queues.values()))
        free = self.most - sum(self.busy.values())
        if self.at_once == 1 or waiting > longest or not free:
            return longest
        return min(longest, max(_SHORT, -(-waiting // free)))

    def left(self, key: LaneKey) -> None:
        self.busy[key] = self.busy.get(key, 0) + 1

    def came_back(self, key: LaneKey) -> None:
        self.busy[key] -= 1
        if not self.busy[key]:
            del self.busy[key]


class Questions:
    """Gathers questions, sends batches, hands the answers out."""

    def __init__(
        self,
        post: Batches,
        answers: Answers,
        tasks: Tasks,
        unanswered: Callable[[Question, str], Decision],
        clock: Clock,
    ) -> None:
        self._batches = post
        self._monotonic = clock.monotonic
        self._turn = 0.0
        """When the first question of this turn of the loop was asked."""
        self._answers = answers
        self._tasks = tasks
        self._unanswered = unanswered
        self._asked: dict[Key, Question] = {}
        self._prompt = _Lane(_PROMPT_AT_ONCE, _PROMPT_AT_ONCE)
        self._cold = _Lane(_COLD_AT_ONCE, 1)
        self._scheduled = False
        self.batches = 0
        self.urls = 0

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, key: Key, origin: str) -> asyncio.Future[Decision]:
        """The answer to come; cancel the future to want it no more.

        `origin` is empty for text that is no URL, which needs nobody to be asked.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Decision] = loop.create_future()
        question = self._asked.get(key)
        if question is not None:
            question.waiters.append(future)
            return future
        if not self._scheduled:
            self._scheduled = True
            self._turn = self._monotonic()
            loop.call_soon(self._end_of_turn)
        question = self._asked[key] = Question(key, origin, [future])
        if not origin or self._turn < self._answers.prompt.get(origin, 0.0):
            queues, name = self._prompt.queues, ("", key[1])
        else:
            queues, name = self._cold.queues, (origin, key[1])
        queue = queues.get(name)
        if queue is None:
            queue = queues[name] = deque()
        queue.append(question)
        return future

    def _end_of_turn(self) -> None:
        self._scheduled = False
        self._let_go(self._prompt)
        self._let_go(self._cold)

    def _let_go(self, lane: _Lane) -> None:
        length = lane.length(self._batches.longest)
        while (key := lane.next()) is not None:
            batch = self._take(lane.queues[key], length)
            if not lane.queues[key]:
                del lane.queues[key]
            else:  # behind the others: one agent's million is not every agent's wait
                lane.queues[key] = lane.queues.pop(key)
            if batch:
                lane.left(key)
                self.batches += 1
                self.urls += len(batch)
                self._tasks.start(self._travel(lane, key, batch))

    def _take(self, queue: deque[Question], length: int) -> list[Question]:
        batch: list[Question] = []
        text = 0
        while queue and len(batch) < length:
            question = queue[0]
            if not question.waiters[0].done() or question.wanted:
                text += len(question.key[0])
                if batch and text > _MOST_TEXT:
                    break
                batch.append(question)
            else:
                del self._asked[question.key]
            queue.popleft()
        return batch

    async def _travel(self, lane: _Lane, key: LaneKey, batch: list[Question]) -> None:
        try:
            decisions = await self._batches.post([question.key[0] for question in batch], key[1])
        except Unreached as error:
            why = str(error)
            self._settle(batch, [self._unanswered(question, why) for question in batch])
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            self._fail(batch, error)
        else:
            self._answers.keep(zip(batch, decisions, strict=True))
            self._settle(batch, decisions)
        finally:
            lane.came_back(key)
            self._let_go(lane)

    def _settle(self, batch: list[Question], decisions: list[Decision]) -> None:
        asked = self._asked
        for question, decision in zip(batch, decisions, strict=True):
            del asked[question.key]
            for waiter in question.waiters:
                if not waiter.done():
                    waiter.set_result(decision)

    def _fail(self, batch: list[Question], error: Exception) -> None:
        for question in batch:
            del self._asked[question.key]
            for waiter in question.waiters:
                if not waiter.done():
                    # One each: an exception collects the traceback of everybody it meets.
                    own = copy.copy(error) if isinstance(error, GatekeeperError) else error
                    waiter.set_exception(own)

    def close(self) -> None:
        """Tell everybody who still waits. Call it when no batch is under way any more."""
        for lane in (self._prompt, self._cold):
            lane.queues.clear()
        left = list(self._asked.values())
        self._fail(left, GateClosed("the gate was closed before the answer came"))
