"""Queues fall due at exact moments, in order, and stale moments are swept out."""

from __future__ import annotations

import pytest

from gatekeeper.clock import SingleTimer, VirtualClock
from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.queues import QueuePlace, Queues, Waiter
from gatekeeper.pacing.scopes import INF, Scope


@pytest.fixture
def queues() -> Queues:
    timer = SingleTimer(VirtualClock(), bool)
    timer.hold()
    return Queues(timer)


def _waited_for(queues: Queues, name: str, due: float, now: float = 0.0) -> Scope:
    scope = Scope(name, ScopeSettings())
    scope.basis, scope.interval = 0.0, due
    queues.join(scope, Waiter(f"http://{name}/"), now)
    return scope


def _ready(queues: Queues) -> list[str]:
    return [queue.scope.name for queue in queues.ready]


def test_scopes_fall_due_in_order_of_time_and_then_of_arrival(queues: Queues) -> None:
    for name, due in (("c", 3.0), ("a", 1.0), ("d", 3.0), ("b", 2.0), ("e", 3.0), ("f", 4.0)):
        _waited_for(queues, name, due)
    assert queues.next_due() == 1.0
    queues.fall_due(3.0)
    assert _ready(queues) == ["a", "b", "c", "d", "e"]
    assert queues.next_due() == 4.0
    queues.fall_due(3.9999999)
    assert "f" not in _ready(queues)


def test_a_scope_that_fell_due_earlier_is_ready_before_one_due_now(queues: Queues) -> None:
    _waited_for(queues, "late", 1.0)
    _waited_for(queues, "now", 0.0, now=5.0)
    assert _ready(queues) == ["late", "now"]


def test_a_scope_that_fell_due_unnoticed_is_ready_once(queues: Queues) -> None:
    scope = _waited_for(queues, "a", 1.0)
    queues.reposition(scope, 5.0)
    queues.fall_due(5.0)
    assert _ready(queues) == ["a"]


def test_a_scope_set_to_the_same_time_twice_falls_due_once(queues: Queues) -> None:
    scope = _waited_for(queues, "a", 1.0)
    for due in (2.0, 1.0, 3.0, 1.0):
        scope.interval = due
        queues.reposition(scope, 0.0)
    queues.fall_due(10.0)
    assert _ready(queues) == ["a"]
    assert queues.next_due() == INF


def test_outdated_entries_are_removed(queues: Queues) -> None:
    scopes = [_waited_for(queues, f"h{number}", 1.0 + number % 50) for number in range(500)]
    for step in range(40):
        for scope in scopes:
            scope.interval += 0.25  # Slower each time, so every entry becomes stale.
            queues.reposition(scope, 0.0)
        assert len(queues.moments) <= queues._entries <= 2 * 500 + 1024, step
    queues.fall_due(INF)
    assert sorted(_ready(queues)) == sorted(scope.name for scope in scopes)
    due = [scope.due_at() for name in _ready(queues) for scope in scopes if scope.name == name]
    assert due == sorted(due)


def test_a_queue_that_waits_for_an_event_has_no_due_time(queues: Queues) -> None:
    scope = _waited_for(queues, "a", 1.0)
    scope.ensure_history().paused = True
    queues.reposition(scope, 0.0)
    assert scope.queue.place is QueuePlace.HELD
    queues.fall_due(10.0)
    assert _ready(queues) == []
    scope.ensure_history().paused = False
    queues.reposition(scope, 10.0)
    assert _ready(queues) == ["a"]
