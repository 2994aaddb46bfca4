"""`Questions`: sends the questions of one iteration of the event loop in batches.

A batch is answered when its slowest URL is. So URLs of origins that the sidecar has cached share
batches, and each origin that it may have to fetch first has batches of its own: a slow origin
delays no other. There is no other delay: a batch is sent at the end of the iteration in which its
first URL was asked. If the most batches are under way already, the questions that gather meanwhile
are sent with the next.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import repeat

import msgspec

from gatekeeper.client.connection import SidecarConnection, SidecarUnreachable, limit_in, read
from gatekeeper.client.wire import MAX_BATCH, Batch, Decisions, encode
from gatekeeper.clock import Clock, OwnedTasks
from gatekeeper.decision import Decision, State, Verdict
from gatekeeper.errors import GateClosed, GatekeeperError, SidecarError

_MAX_BATCH_TEXT = 150_000
"""The most characters of URLs in a batch: six bytes each at worst, within the sidecar's 1 MiB."""
_MAX_CACHED_BATCHES = 4
"""The most batches of cached origins that are under way at the same time."""
_MIN_SPLIT = 250
"""URLs up to which a batch is not split: another request costs more than it saves."""
_MAX_COLD_BATCHES = 64
"""The most batches of other origins that are under way at the same time."""


class Question(msgspec.Struct, eq=False):
    """One URL and agent that callers ask about.

    Each waiter has a future of its own, so that cancelling one does not cancel the others.
    """

    key: Key
    origin: str
    waiters: list[asyncio.Future[Decision]]


BatchKey = tuple[str, str | None]
"""Origin, or "" for all origins that the sidecar has cached; and agent."""


class _BatchQueues(msgspec.Struct, eq=False):
    """Queues of questions, one for each key of batches that they may share."""

    max_batches: int = _MAX_CACHED_BATCHES
    """The most batches under way at the same time."""
    max_per_key: int = _MAX_CACHED_BATCHES
    """The most batches of one key under way at the same time."""
    under_way: Counter[BatchKey] = msgspec.field(default_factory=Counter)
    """The batches under way, by key."""
    queues: dict[BatchKey, deque[Question]] = {}

    def next(self) -> BatchKey | None:
        """Return the key whose next batch may be sent. None if there is none."""
        if self.under_way.total() >= self.max_batches:
            return None
        return next((key for key in self.queues if self.under_way[key] < self.max_per_key), None)

    def length(self, largest: int) -> int:
        """Return the most URLs that a batch may have now; `largest` is the most for any batch.

        Questions that would fit into one batch are spread over all that may be under way, so that
        the sidecar answers one batch while the client reads another.
        """
        waiting = sum(map(len, self.queues.values()))
        free = self.max_batches - self.under_way.total()
        if self.max_per_key == 1 or waiting > largest or not free:
            return largest
        return min(largest, max(_MIN_SPLIT, -(-waiting // free)))


class Questions(msgspec.Struct, eq=False):
    """Gathers questions, sends them in batches, and resolves their waiters."""

    _connection: SidecarConnection
    _answers: RememberedDecisions
    _tasks: OwnedTasks
    _unanswered: Callable[[Key, str, str], Decision]
    _max_batch: int = MAX_BATCH
    """The most URLs of a batch; lowered when the sidecar refuses one (server.max_batch)."""
    _asked: dict[Key, Question] = {}
    _cached: _BatchQueues = msgspec.field(default_factory=_BatchQueues)
    _cold: _BatchQueues = msgspec.field(default_factory=lambda: _BatchQueues(_MAX_COLD_BATCHES, 1))
    _scheduled: bool = False
    batches: int = 0
    urls: int = 0

    def ask(self, key: Key, origin: str) -> asyncio.Future[Decision]:
        """Return a future of the decision; cancel it to drop the question.

        `origin` is empty for a malformed URL, for which the sidecar fetches nothing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Decision] = loop.create_future()
        question = self._asked.get(key)
        if question is not None:
            question.waiters.append(future)
            return future
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._end_of_iteration)
        question = self._asked[key] = Question(key, origin, [future])
        now = self._connection.clock.monotonic()
        if not origin or now < self._answers.cached_origins.get(origin, 0.0):
            queues, name = self._cached.queues, ("", key[1])
        else:
            queues, name = self._cold.queues, (origin, key[1])
        queues.setdefault(name, deque()).append(question)
        return future

    def _end_of_iteration(self) -> None:
        self._scheduled = False
        self._start_batches(self._cached)
        self._start_batches(self._cold)

    def _start_batches(self, queues: _BatchQueues) -> None:
        length = queues.length(self._max_batch)
        while (key := queues.next()) is not None:
            queue = queues.queues.pop(key)
            batch = self._take(queue, length)
            if queue:  # at the end, so that a million questions of one agent delay no other
                queues.queues[key] = queue
            if batch:
                queues.under_way[key] += 1
                self.batches += 1
                self.urls += len(batch)
                self._tasks.start(self._send_batch(queues, key, batch))

    def _take(self, queue: deque[Question], length: int) -> list[Question]:
        batch: list[Question] = []
        text = 0
        while queue and len(batch) < length:
            question = queue[0]
            if all(map(asyncio.Future.done, question.waiters)):  # nobody waits for it any more
                del self._asked[question.key]
            else:
                text += len(question.key[0])
                if batch and text > _MAX_BATCH_TEXT:
                    break
                batch.append(question)
            queue.popleft()
        return batch

    async def _send_batch(self, queues: _BatchQueues, key: BatchKey, batch: list[Question]) -> None:
        try:
            decisions = await self._post([question.key[0] for question in batch], key[1])
        except SidecarUnreachable as error:
            why = str(error)
            self._settle(batch, [self._unanswered(one.key, one.origin, why) for one in batch])
        except Exception as error:  # noqa: BLE001 - the callers get it
            self._settle(batch, repeat(error))
        else:
            self._answers.remember(zip(batch, decisions, strict=True))
            self._settle(batch, decisions)
        finally:
            queues.under_way -= Counter([key])  # which drops what is 0
            self._start_batches(queues)

    async def _post(self, urls: list[str], agent: str | None) -> list[Decision]:
        """Ask the sidecar; return the decisions in the order of the URLs.

        A batch that is refused as too long is sent in parts; later ones are shorter. Raises
        SidecarError or SidecarUnreachable.
        """
        answer = await self._connection.ask("POST", "/v1/check", encode(Batch(urls, agent)))
        if answer.status == 413 and len(urls) > 1:
            limit = limit_in(answer)
            if limit is not None:
                self._max_batch = max(1, min(self._max_batch, int(limit)))
            # A refusal without a limit concerns the bytes of the body: server.max_body.
            length = min(self._max_batch, len(urls) - 1) if limit is not None else len(urls) // 2
            parts = [urls[at : at + length] for at in range(0, len(urls), length)]
            return [decision for part in parts for decision in await self._post(part, agent)]
        decisions = read(answer, Decisions).decisions
        if len(decisions) != len(urls):
            raise SidecarError(
                answer.status, "unreadable", f"{len(decisions)} answers to {len(urls)} questions"
            )
        return decisions

    def _settle(self, batch: list[Question], results: Iterable[Decision | Exception]) -> None:
        for question, result in zip(batch, results, strict=False):
            del self._asked[question.key]
            for waiter in question.waiters:
                if waiter.done():
                    continue
                if isinstance(result, Decision):
                    waiter.set_result(result)
                else:  # a copy for each waiter, as raising an exception adds to its traceback
                    ours = isinstance(result, GatekeeperError)
                    waiter.set_exception(copy.copy(result) if ours else result)

    def close(self) -> None:
        """Fail the remaining questions with GateClosed. Call it when no batch is under way."""
        for queues in (self._cached, self._cold):
            queues.queues.clear()
        error = GateClosed("the gate was closed before the answer came")
        self._settle(list(self._asked.values()), repeat(error))


# --- the client's cache: decisions while they are valid, and origins that the sidecar has cached


_OVERRIDE_SECONDS = 5.0
"""Seconds for which a decision of the operator or the guard is cached: it can change at any time,
and clients are not notified."""
_MINUTE = 60.0
_MAX_ORIGINS = 65_536
"""The most origins that are remembered as cached by the sidecar."""
Key = tuple[str, str | None]
"""URL and agent."""


def lifetime(decision: Decision, wall: float, cap: float) -> float:
    """Return the seconds for which a decision, made at `wall`, may be repeated without asking.

    Zero or less if it may not be. DEFER until `retry_at`. ALLOW and DENY by the file until
    `expires_at`, and for at most `cap` seconds, as the file may be fetched again before it expires.
    ALLOW at most to the end of the minute: a decision does not show whether the file has a
    Visit-time, whose windows end with a minute (2.0 draft, V2-24). A decision of the operator or
    the guard for five seconds, or until it ends.
    """
    if decision.verdict is Verdict.DEFER:
        return _left(decision.retry_at, wall)
    if decision.state is None or decision.state is State.OVERRIDE:
        most = min(cap, _OVERRIDE_SECONDS)
        return most if decision.expires_at is None else min(most, _left(decision.expires_at, wall))
    most = min(cap, _MINUTE - wall % _MINUTE) if decision.verdict is Verdict.ALLOW else cap
    return min(most, _left(decision.expires_at, wall))


def _left(end: datetime | None, wall: float) -> float:
    return 0.0 if end is None else end.timestamp() - wall


class RememberedDecisions(msgspec.Struct, eq=False):
    """Cache of decisions by URL and agent, at most `size` of them; 0 caches none."""

    _clock: Clock
    _size: int
    _cap: float
    """The most seconds for which one is cached."""
    # The least recently used first. An LRUCache would add five calls to every question.
    _decisions: OrderedDict[Key, tuple[float, Decision]] = msgspec.field(
        default_factory=OrderedDict
    )
    cached_origins: dict[str, float] = {}
    """Origins that the sidecar presumably has cached, with the monotonic time until which. Cleared
    when full, after which each origin has a batch of its own once; keeping it in order of use would
    cost every question a write."""

    def __len__(self) -> int:
        return len(self._decisions)

    def find(self, key: Key) -> Decision | None:
        """Return the cached decision if it is still valid."""
        found = self._decisions.get(key)
        if found is None:
            return None
        if self._clock.monotonic() < found[0]:
            self._decisions.move_to_end(key)
            return found[1]
        del self._decisions[key]
        return None

    def remember(self, answered: Iterable[tuple[Question, Decision]]) -> None:
        """Cache each decision for as long as it is valid, and note that its origin is cached.

        All of them must have been made just now.
        """
        wall, now = self._clock.wall(), self._clock.monotonic()
        decisions, origins = self._decisions, self.cached_origins
        for question, decision in answered:
            seconds = lifetime(decision, wall, self._cap)
            if seconds <= 0:
                continue
            decisions[question.key] = (now + seconds, decision)
            origin = question.origin
            if now >= origins.get(origin, 0.0):
                if decision.verdict is not Verdict.DEFER:
                    # Longer than the decision: the sidecar caches the file until it expires.
                    seconds = max(seconds, _left(decision.expires_at, wall))
                if len(origins) >= _MAX_ORIGINS:
                    origins.clear()
                origins[origin] = now + seconds
        while len(decisions) > self._size:
            decisions.popitem(last=False)

    def forget(self) -> None:
        """Clear the cache: a file or a rule was changed through this client."""
        self._decisions.clear()
        self.cached_origins.clear()
