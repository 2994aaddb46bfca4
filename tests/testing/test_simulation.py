from __future__ import annotations

import pytest

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.pacing.host_settings import DailyBudget
from gatekeeper.pacing.scopes import Scope
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.testing.simulation import simulate


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_crawl_violates_no_interval(seed: int) -> None:
    report = simulate(300, 3000, seed=seed)
    assert report.leases >= 3000
    assert report.violations == {}
    assert report.blocks > 10
    assert report.expired > 5


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_crawl_of_groups_violates_no_interval(seed: int) -> None:
    assert simulate(200, 1500, seed=seed, groups=7).violations == {}


def test_a_simulated_crawl_with_jitter_and_slots_violates_no_interval() -> None:
    pacing = PacingConfig(
        jitter=0.25, concurrency=3, default_interval=0.0, max_in_flight=50, lease_ttl=30.0
    )
    assert simulate(200, 2000, config=Config(pacing=pacing)).violations == {}


def test_the_simulation_finds_a_scheduler_that_is_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    from gatekeeper.pacing.engine import Engine

    kept = Engine.derive

    def hasty(engine: Engine, scope: Scope, asked: RobotsInterval, now: float) -> float:
        return max(0.0, kept(engine, scope, asked, now) - 0.1)

    monkeypatch.setattr(Engine, "derive", hasty)
    violations = simulate(50, 300).violations
    assert violations["early"] > 100


@pytest.mark.parametrize("groups", [0, 7])
def test_a_simulated_crawl_exceeds_no_budget(groups: int) -> None:
    config = Config(
        pacing=PacingConfig(max_pages_per_day=4, concurrency=3, lease_ttl=60.0),
        host=tuple(
            HostRule(match=f"*.g{n}.example", group=f"g{n}", max_pages_per_day=3)
            for n in range(groups)
        ),
        group=tuple(GroupRule(name=f"g{n}", interval=0.25) for n in range(groups)),
    )
    report = simulate(100, 1000, groups=groups, config=config)
    assert report.violations == {}
    assert report.leases >= 1000
    assert report.deferrals >= 100
    assert report.virtual_seconds > 2 * 86_400.0


def test_the_simulation_finds_a_budget_that_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DailyBudget, "spent", lambda self, pages, size: pages > self.pages)
    config = Config(pacing=PacingConfig(max_pages_per_day=4))
    assert simulate(20, 200, config=config).violations["budget"] > 10
