"""The start rule, `Scope.due_at`. `.ci/structure` checks that nothing else states it."""

from __future__ import annotations

import pytest

from gatekeeper.pacing.rules import ScopeSettings
from gatekeeper.pacing.scopes import INF, Scope


@pytest.mark.parametrize(
    ("in_flight", "unheaded", "interval", "limit", "due"),
    [
        (0, 0, 2.0, 1, 12.0),
        (1, 1, 2.0, 1, INF),  # no slot
        (1, 1, 2.0, 2, INF),  # a head is awaited
        (1, 0, 2.0, 2, 12.0),
        (1, 1, 0.0, 2, 10.0),  # no interval, so no head is awaited
    ],
)
def test_a_scope_is_due_by_clock_slots_and_heads(
    in_flight: int, unheaded: int, interval: float, limit: int, due: float
) -> None:
    scope = Scope("a.example", ScopeSettings(limit=limit))
    scope.basis, scope.interval = 10.0, interval
    scope.in_flight, scope.unheaded = in_flight, unheaded
    assert scope.due_at() == due
    assert scope.due_at(events=False) == 10.0 + interval


def test_a_block_and_a_pause_put_it_off() -> None:
    scope = Scope("a.example", ScopeSettings(limit=3))
    scope.basis, scope.interval = 10.0, 0.0
    scope.ensure_history().block(50.0, "503")
    assert scope.due_at() == scope.due_at(events=False) == 50.0
    scope.ensure_history().probing, scope.in_flight = True, 1  # half open: one at a time
    assert scope.due_at() == INF
    assert scope.due_at(events=False) == 50.0
    scope.in_flight = 0
    scope.ensure_history().paused = True
    assert scope.due_at() == INF
