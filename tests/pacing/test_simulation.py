from __future__ import annotations

import pytest

from gatekeeper.config import Config, PacingConfig
from gatekeeper.pacing.scopes import Scope
from gatekeeper.pacing.simulation import simulate


@pytest.mark.parametrize("seed", range(3))
def test_no_promise_is_broken(seed: int) -> None:
    report = simulate(300, 3000, seed=seed)
    assert report.leases >= 3000
    assert report.violations == {}
    assert report.blocks > 10
    assert report.expired > 5


@pytest.mark.parametrize("seed", range(3))
def test_no_promise_to_a_group_is_broken(seed: int) -> None:
    assert simulate(200, 1500, seed=seed, groups=7).violations == {}


def test_jitter_and_many_slots_break_nothing() -> None:
    pacing = PacingConfig(
        jitter=0.25, concurrency=3, default_interval=0.0, max_in_flight=50, lease_ttl=30.0
    )
    assert simulate(200, 2000, config=Config(pacing=pacing)).violations == {}


def test_the_judge_sees_a_scheduler_that_is_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    from gatekeeper.pacing.engine import Engine

    kept = Engine.set_interval

    def hasty(engine: Engine, scope: Scope, seconds: float, now: float, same: bool = False) -> bool:
        return kept(engine, scope, max(0.0, seconds - 0.1), now, same)

    monkeypatch.setattr(Engine, "set_interval", hasty)
    violations = simulate(50, 300).violations
    assert violations["early"] > 100
