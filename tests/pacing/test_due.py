"""The start rule, `Scope.due_at`. `.ci/structure` checks that nothing else states it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.scopes import INF, Scope, ScopeHistory
from gatekeeper.pacing.waiters import clock_holdups

NOW = 100.0
TIMES = st.sampled_from([-INF, 50.0, 99.0, NOW, 101.0, 150.0])
HISTORIES = st.builds(
    ScopeHistory, blocked_until=TIMES, probing=st.booleans(), paused=st.booleans()
)
SCOPES = st.builds(
    Scope,
    st.just("a.example"),
    st.builds(ScopeSettings, limit=st.integers(1, 3)),
    basis=TIMES.filter(lambda moment: moment <= NOW),
    interval=st.sampled_from([0.0, 1.0, 60.0]),
    in_flight=st.integers(0, 3),
    unheaded=st.integers(0, 3),
    history=st.none() | HISTORIES,
)


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


def test_a_block_and_a_pause_delay_a_scope() -> None:
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


@settings(max_examples=400)
@given(scope=SCOPES)
def test_every_wait_for_a_scope_has_a_reason_with_the_same_end(scope: Scope) -> None:
    scope.unheaded = min(scope.unheaded, scope.in_flight)
    reasons = clock_holdups(scope, NOW)
    events = {one.kind for one in reasons if one.until == INF}
    times = [one.until for one in reasons if one.until < INF]
    assert max(scope.due_at(events=False), NOW) == max([*times, NOW])
    if scope.due_at() == INF:
        assert events
    else:
        assert scope.due_at() == scope.due_at(events=False)
        assert "pause" not in events
