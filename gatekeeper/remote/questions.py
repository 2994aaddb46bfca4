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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec

from gatekeeper.clock import Clock, utc
from gatekeeper.decision import Decision, State, Verdict
from gatekeeper.errors import GateClosed, GatekeeperError, SidecarError
from gatekeeper.remote.connection import (
    OwnedTasks,
    SidecarConnection,
    SidecarUnreachable,
    bound_in,
    read,
)
from gatekeeper.wire import MAX_BATCH, Batch, Decisions, encode

_MOST_TEXT = 150_000
"""Characters of URLs in a batch: six bytes each at the worst, within the sidecar's 1 MiB."""
_KNOWN_AT_ONCE = 4
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


BatchKey = tuple[str, str | None]
"""Origin, or empty for all those that answer at once; and agent."""


class _BatchQueues(msgspec.Struct, eq=False):
    """Questions that wait, by the batch they may travel in: (origin, agent)."""

    most: int
    """Batches under way."""
    at_once: int
    """Those of one key."""
    busy: dict[BatchKey, int] = {}
    queues: dict[BatchKey, deque[Question]] = {}

    def next(self) -> BatchKey | None:
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

    def left(self, key: BatchKey) -> None:
        self.busy[key] = self.busy.get(key, 0) + 1

    def came_back(self, key: BatchKey) -> None:
        self.busy[key] -= 1
        if not self.busy[key]:
            del self.busy[key]


class Questions:
    """Gathers questions, sends batches, hands the answers out."""

    def __init__(
        self,
        connection: SidecarConnection,
        answers: RememberedDecisions,
        tasks: OwnedTasks,
        unanswered: Callable[[Question, str], Decision],
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._longest = MAX_BATCH
        """URLs that a batch may have, as far as is known: server.max_batch may be less."""
        self._monotonic = clock.monotonic
        self._turn = 0.0
        """When the first question of this turn of the loop was asked."""
        self._answers = answers
        self._tasks = tasks
        self._unanswered = unanswered
        self._asked: dict[Key, Question] = {}
        self._known = _BatchQueues(_KNOWN_AT_ONCE, _KNOWN_AT_ONCE)
        self._cold = _BatchQueues(_COLD_AT_ONCE, 1)
        self._scheduled = False
        self.batches: int = 0
        self.urls: int = 0

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
        if not origin or self._turn < self._answers.known.get(origin, 0.0):
            queues, name = self._known.queues, ("", key[1])
        else:
            queues, name = self._cold.queues, (origin, key[1])
        queue = queues.get(name)
        if queue is None:
            queue = queues[name] = deque()
        queue.append(question)
        return future

    def _end_of_turn(self) -> None:
        self._scheduled = False
        self._start_batches(self._known)
        self._start_batches(self._cold)

    def _start_batches(self, queues: _BatchQueues) -> None:
        length = queues.length(self._longest)
        while (key := queues.next()) is not None:
            batch = self._take(queues.queues[key], length)
            if not queues.queues[key]:
                del queues.queues[key]
            else:  # behind the others: one agent's million is not every agent's wait
                queues.queues[key] = queues.queues.pop(key)
            if batch:
                queues.left(key)
                self.batches += 1
                self.urls += len(batch)
                self._tasks.start(self._send_batch(queues, key, batch))

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

    async def _send_batch(self, queues: _BatchQueues, key: BatchKey, batch: list[Question]) -> None:
        try:
            decisions = await self._post([question.key[0] for question in batch], key[1])
        except SidecarUnreachable as error:
            why = str(error)
            self._settle(batch, [self._unanswered(question, why) for question in batch])
        except Exception as error:  # noqa: BLE001 - the callers get it
            self._fail(batch, error)
        else:
            self._answers.keep(zip(batch, decisions, strict=True))
            self._settle(batch, decisions)
        finally:
            queues.came_back(key)
            self._start_batches(queues)

    async def _post(self, urls: list[str], agent: str | None) -> list[Decision]:
        """The decisions in the order of the URLs. Raises SidecarError, or
        SidecarUnreachable. A refusal says how long batches may be, from then on."""
        answer = await self._connection.ask("POST", "/v1/check", encode(Batch(urls, agent)))
        if answer.status == 413 and len(urls) > 1:
            most = bound_in(answer)
            if most is not None:
                self._longest = max(1, min(self._longest, int(most)))
            # Without a number it was the octets: server.max_body.
            length = min(self._longest, len(urls) - 1) if most is not None else len(urls) // 2
            parts = [urls[at : at + length] for at in range(0, len(urls), length)]
            return [decision for part in parts for decision in await self._post(part, agent)]
        decisions = read(answer, Decisions).decisions
        if len(decisions) != len(urls):
            raise SidecarError(
                answer.status, "unreadable", f"{len(decisions)} answers to {len(urls)} questions"
            )
        return decisions

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
        for queues in (self._known, self._cold):
            queues.queues.clear()
        left = list(self._asked.values())
        self._fail(left, GateClosed("the gate was closed before the answer came"))


# --- What a client remembers: decisions while they hold, and which origins answer at once.


_OPERATORS_WORD = 5.0
"""Seconds that a word of the operator or of the guard is kept: it can change at any time,
and nobody tells the clients."""
_MINUTE = 60.0
_ORIGINS = 65_536
Key = tuple[str, str | None]
"""URL and agent."""


class DecisionLifetimes:
    """For how many seconds decisions of this moment may be repeated without asking.

    Never beyond their own end: DEFER until `retry_at`. ALLOW and DENY by the file until
    `expires_at`, and `cap` seconds at most, as the file may be asked for again before that;
    ALLOW to the end of the minute at most: a decision does not say whether the file has a
    Visit-time, whose windows end with a minute (2.0 draft, V2-24). An operator's or the guard's
    word for a few seconds.
    """

    __slots__ = ("_cap", "_minute", "_short", "_soon", "_wall")

    def __init__(self, wall: float, cap: float) -> None:
        self._wall = wall
        self._cap = cap
        self._soon = utc(wall + cap)  # two moments are compared faster than subtracted
        self._minute = min(cap, _MINUTE - wall % _MINUTE)
        self._short = min(cap, _OPERATORS_WORD)

    def of(self, decision: Decision) -> float:
        """Seconds; none, or fewer, where it may not be repeated."""
        verdict, end = decision.verdict, decision.expires_at
        if verdict is Verdict.DEFER:
            return self.left(decision.retry_at)
        if decision.state is None or decision.state is State.OVERRIDE:
            return self._short
        seconds = self._minute if verdict is Verdict.ALLOW else self._cap
        if end is not None and end > self._soon:
            return seconds
        return min(seconds, self.left(end))

    def left(self, end: datetime | None) -> float:
        """Seconds until then."""
        return 0.0 if end is None else end.timestamp() - self._wall


class RememberedDecisions:
    """Decisions by URL and agent, at most `size` of them; 0 keeps none."""

    def __init__(self, clock: Clock, *, size: int, cap: float) -> None:
        self._clock = clock
        self._cap = cap
        self._size = size
        # The one not asked about for longest first. An LRUCache takes five calls where this
        # one takes none, on the way of every question.
        self._kept: OrderedDict[Key, tuple[float, Decision]] = OrderedDict()
        self.known: dict[str, float] = {}
        """Origins that the sidecar knows, as far as is known here, until a monotonic moment.
        Emptied when full, which costs a batch of its own an origin; to move each origin to
        the end of a row would cost every question a write."""
        self._monotonic = clock.monotonic

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key) -> Decision | None:
        """The decision, if it still holds."""
        found = self._kept.get(key)
        if found is None:
            return None
        if self._monotonic() < found[0]:
            self._kept.move_to_end(key)
            return found[1]
        del self._kept[key]
        return None

    def keep(self, answered: Iterable[tuple[Question, Decision]]) -> None:
        """Remember each for as long as it holds, and that its origin answers at once.

        All are of this moment.
        """
        lifetimes, now = DecisionLifetimes(self._clock.wall(), self._cap), self._monotonic()
        kept, prompt = self._kept if self._size else None, self.known
        for question, decision in answered:
            seconds = lifetimes.of(decision)
            if seconds <= 0:
                continue
            if kept is not None:
                kept[question.key] = (now + seconds, decision)
            origin = question.origin
            if now >= prompt.get(origin, 0.0):
                if decision.verdict is not Verdict.DEFER:
                    # Longer than the answer itself: the sidecar keeps the whole file.
                    seconds = max(seconds, lifetimes.left(decision.expires_at))
                if len(prompt) >= _ORIGINS:
                    prompt.clear()
                prompt[origin] = now + seconds
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Forget everything: somebody changed something."""
        self._kept.clear()
        self.known.clear()
