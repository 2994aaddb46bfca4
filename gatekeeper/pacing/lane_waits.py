"""What a lane of a `PoliteQueue` waits for until a `get` may try it.

Its host's turn (the scheduler calls back: no task, no future, no timer); its robots.txt
(asked for in the background, a bounded number at a time); its place in line, where others
ask the same host and would always be faster; or a moment. Whatever comes of the waiting,
the lane is then ready, or waits for the next thing: none is ever left behind, and none is
tried again without a pause when nothing has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextvars import Context
from datetime import datetime
from functools import partial

from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import LeaseTimeout, StorageError
from gatekeeper.pacing.lanes import Hand, Lane, Lanes, LaneState
from gatekeeper.pacing.overflow import Entry
from gatekeeper.pacing.queue_gate import (
    FAR_PATIENCE,
    FIRST_PAUSE,
    HOLD,
    LAST_PAUSE,
    MAX_ASKING,
    MAX_STANDING,
    NEAR,
    PATIENCE,
    RETRY,
    STANDS,
    DistantGate,
    QueueGate,
    QueueLease,
)

__all__ = ["LaneWaits"]

_log = logging.getLogger(__name__)
_DOUBLINGS = 16


class LaneWaits:
    """Every lane that is not ready. An entry handed over is kept, whatever happens."""

    def __init__(self, gate: QueueGate | DistantGate, near: QueueGate | None, lanes: Lanes) -> None:
        """`near`: the gate, where it tells at a glance what is known; None: it is distant."""
        self._gate = gate
        self._near = near
        self._clock = gate.clock
        self._lanes = lanes
        self._cold: deque[Lane] = deque()
        self._asking: set[asyncio.Task[None]] = set()
        self._standing: set[asyncio.Task[QueueLease]] = set()
        self._hands = 0
        self._closed = False
        self.deferred = 0
        """Times that a lane was sent away by a decision."""

    async def close(self) -> None:
        """Wait for nothing more. Idempotent."""
        self._closed = True
        tasks = (*self._asking, *self._standing)
        for task in tasks:
            task.cancel()
        for lane in self._lanes:
            if lane.hand is not None:
                lane.hand.end.cancel()
                lane.hand.lease.give_back()
                lane.hand = None
        self._cold.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the host's turn ----------------------------------------------------------------

    def place(self, lane: Lane) -> None:
        """Its first URL was given out: what does it wait for now?"""
        lane.setbacks, lane.asked = 0, False
        if not len(lane.backlog):
            self._lanes.forget(lane)
        elif lane.stands > 0 and self._room:
            lane.stands -= 1
            try:
                entry = lane.backlog.pop()
            except StorageError:
                self.back_off(lane)  # the next get meets it itself
            else:
                self._stand_in_line(lane, entry)
        else:
            self.watch(lane)

    def go_on(self, lane: Lane) -> None:
        """Its first URL is done without a turn: the next may be tried at once."""
        lane.setbacks, lane.asked = 0, False
        if len(lane.backlog):
            self._lanes.ready(lane, announced=lane.announced)
        else:
            self._lanes.forget(lane)

    def watch(self, lane: Lane) -> None:
        """Have the scheduler say when its host is due."""
        if self._closed:
            return
        if self._near is None:  # it can only be asked
            self._lanes.ready(lane)
            return
        lane.state = LaneState.WATCHED

        def due() -> None:
            lane.unwatch = None
            if lane.state is LaneState.WATCHED and not self._closed:
                self._lanes.ready(lane, announced=True)

        try:
            unwatch = self._near.when_due(lane.host, due, priority=-lane.rank())
        except (LeaseTimeout, StorageError):  # no room for the host, or not to be read now
            self.back_off(lane)
            return
        if lane.state is LaneState.WATCHED:
            lane.unwatch = unwatch

    # --- a place in line ----------------------------------------------------------------

    @property
    def _room(self) -> bool:
        return len(self._standing) + self._hands < MAX_STANDING

    def missed(self, lane: Lane, entry: Entry, retry_at: datetime | None = None) -> None:
        """It could not have its turn, which comes at `retry_at` as far as the gate knows."""
        if self._closed:
            return
        if self._far_off(lane, entry, retry_at):
            return
        if self._near is not None and not lane.announced:
            lane.backlog.put_back(entry)
            self.watch(lane)  # it may not have been due
        elif self._room:
            lane.stands = STANDS
            self._stand_in_line(lane, entry)
        else:
            lane.backlog.put_back(entry)
            self.back_off(lane)

    def _far_off(self, lane: Lane, entry: Entry, retry_at: datetime | None) -> bool:
        """Whether a distant gate says that its turn does not come soon: no place in the
        sidecar's line is taken for it then, and the lane waits here."""
        left = 0.0 if retry_at is None else retry_at.timestamp() - self._clock.wall()
        if self._near is not None or left <= NEAR:
            return False
        lane.backlog.put_back(entry)
        self._lanes.defer(lane, self._clock.monotonic() + left - NEAR / 2)
        return True

    def overtaken(self, lane: Lane) -> None:
        """A URL was put that goes before the one which stands in line: let it stand there."""
        if lane.stand is not None and lane.backlog.rank() < lane.stand[0][0]:
            lane.stands += 1
            lane.stand[1].cancel()

    def _stand_in_line(self, lane: Lane, entry: Entry) -> None:
        lane.state = LaneState.STANDING
        patience = PATIENCE if self._near is not None else FAR_PATIENCE
        turn = self._gate.acquire(
            entry[2], priority=round(-entry[0]), timeout=patience, owned=False
        )
        task = asyncio.ensure_future(turn)
        lane.stand = entry, task
        self._standing.add(task)
        # A callback, not code behind an await: a task may be cancelled before it begins.
        began = self._clock.monotonic()
        task.add_done_callback(partial(self._stood, lane, entry, began))

    def _stood(
        self, lane: Lane, entry: Entry, began: float, task: asyncio.Task[QueueLease]
    ) -> None:
        self._standing.discard(task)
        lane.stand = None
        if self._near is None and self._clock.monotonic() - began > NEAR:
            lane.stands = 0  # its next turn is as far off: then it is asked when
        error = None if task.cancelled() else task.exception()
        lease = None if task.cancelled() or error is not None else task.result()
        if self._closed:
            if lease is not None:
                lease.give_back()
        elif lease is not None:
            self._hold(lane, entry, lease)
        elif not (isinstance(error, LeaseTimeout) and self._far_off(lane, entry, error.retry_at)):
            overtaken = task.cancelled() and lane.backlog.rank() < entry[0]
            lane.backlog.put_back(entry)
            if overtaken:
                self.place(lane)
            else:  # the next get meets by itself what stands in the way
                _log.debug("no turn for %s by standing in line: %r", lane.origin, error)
                lane.stands = 0
                self.back_off(lane)

    def _hold(self, lane: Lane, entry: Entry, lease: QueueLease) -> None:
        """The turn is had: it is for the next get, if one comes soon."""
        left = lease.expires_at.timestamp() - self._clock.wall()
        end = self._clock.monotonic() + min(HOLD, left / 2)
        lane.hand = Hand(entry, lease, self._clock.call_at(end, self._unused, lane))
        self._hands += 1
        self._lanes.ready(lane)

    def in_hand(self, lane: Lane) -> tuple[Entry, QueueLease] | None:
        """The turn that was had for it, which is the caller's then."""
        hand, lane.hand = lane.hand, None
        if hand is None:
            return None
        hand.end.cancel()
        self._hands -= 1
        return hand.entry, hand.lease

    def _unused(self, lane: Lane) -> None:
        """Everybody is busy elsewhere: others shall have the turn."""
        had = self.in_hand(lane)
        if had is not None:
            lane.backlog.put_back(had[0])
            lane.stands = 0
            try:
                had[1].give_back()
            finally:
                self.watch(lane)

    # --- robots.txt ---------------------------------------------------------------------

    def ask(self, lane: Lane) -> None:
        """Its robots.txt is unknown: ask for it in the background."""
        if lane.asked:
            lane.asked = False  # it was told, and is forgotten again already
            self.back_off(lane)
            return
        lane.state = LaneState.COLD
        self._cold.append(lane)
        self._ask_more()

    def _ask_more(self) -> None:
        near = self._near
        while near and self._cold and len(self._asking) < MAX_ASKING and not self._closed:
            asking = self._ask_for(self._cold.popleft(), near)
            # Nobody's child: whoever is in `get` now may hold leases, and does not wait for it.
            task = asyncio.get_running_loop().create_task(asking, context=Context())
            self._asking.add(task)
            task.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._ask_more()

    async def _ask_for(self, lane: Lane, near: QueueGate) -> None:
        try:
            decision = await near.check(f"{lane.origin}/")
        except Exception as error:  # noqa: BLE001 - whatever it is, the lane comes back
            _log.warning("asking %s for its robots.txt failed: %r", lane.origin, error)
            self._lanes.defer(lane, self._clock.monotonic() + RETRY)
            return
        if decision.verdict is Verdict.DEFER:
            self.defer(lane, decision)  # nobody could ask it now, for one
        else:
            lane.asked = True
            self.watch(lane)

    # --- a moment -----------------------------------------------------------------------

    def defer(self, lane: Lane, decision: Decision) -> None:
        """Not before the decision's `retry_at`."""
        self.deferred += 1
        wait = RETRY
        if decision.retry_at is not None:
            wait = decision.retry_at.timestamp() - self._clock.wall()
        self.back_off(lane, wait)

    def back_off(self, lane: Lane, least: float = 0.0) -> None:
        """It was tried for nothing: not at once again, and later each time in a row."""
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(lane.setbacks, _DOUBLINGS))
        if least < LAST_PAUSE:
            lane.setbacks += 1
        self._lanes.defer(lane, self._clock.monotonic() + max(pause, least))
