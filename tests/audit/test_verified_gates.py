"""What a gate writes, verified: a gate that obeys passes, and one that does not is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Config, Denied, HostRule
from gatekeeper.clock import VirtualClock
from gatekeeper.gate import decider
from gatekeeper.gate.decider import PathRuling
from gatekeeper.pacing import engine
from gatekeeper.pacing.scopes import Interval, Scope
from gatekeeper.robots import Policy
from gatekeeper.testing import ScriptedGate, drive
from tests.audit.conftest import verified
from tests.audit.maker import check_schema

A, B = "https://a.test", "https://b.test"
FILE = """User-agent: *
Disallow: /private
Allow: /private/door
Disallow: /*.pdf$
Crawl-delay: 7
"""
PATHS = (
    f"{A}/",
    f"{A}/private/x",
    f"{A}/private/door?x=1",
    f"{B}/1",
    f"{A}/a.pdf",
    f"{A}/a.pdf?x",
    f"{B}/2",
    f"{A}/b",
)


def config_of(folder: Path, **sections: Any) -> Config:
    audit = {"folder": str(folder), **sections.pop("audit", {})}
    return Config.from_dict({"audit": audit, **sections})


async def ask(gate: ScriptedGate, *urls: str, status: int = 200) -> None:
    """Fetch pages one after the other; those that are refused are left out."""
    for url in urls:
        try:
            async with gate.lease(url) as lease:
                lease.report(status=status, size=10)
        except Denied:
            continue


async def crawl(
    folder: Path, clock: VirtualClock | None = None, storage: str | None = None, **sections: Any
) -> None:
    """A crawl of two sites under virtual time."""
    clock = clock or VirtualClock()
    if storage is not None:
        sections["storage"] = {"path": storage}
    async with ScriptedGate(config=config_of(folder, **sections), clock=clock) as gate:
        gate.say(A, FILE)
        await drive(clock, ask(gate, *PATHS))


@pytest.mark.parametrize("urls", ["full", "path", "digest"])
async def test_a_gate_that_obeys_passes(tmp_path: Path, urls: str) -> None:
    folder, clock = tmp_path / "audit", VirtualClock()
    config = config_of(
        folder,
        audit={"urls": urls, "what": "decisions"},
        host=[{"match": "c.test", "robots": "allow", "reason": "ours", "interval": 3.0}],
    )
    async with ScriptedGate(config=config, clock=clock) as gate:
        gate.say(A, FILE)
        gate.say("https://down.test", 503)
        gate.say("https://denied.test", 403)
        gate.say("https://empty.test", "")
        more = ("https://c.test/x", "https://denied.test/", "https://empty.test/", "http://a.test/")
        await drive(clock, ask(gate, *PATHS, "https://down.test/", *more))
        await drive(clock, ask(gate, f"{A}/again", "https://c.test/y", status=503))
        gate.override(HostRule(match="b.test", robots="deny"))
        await drive(clock, ask(gate, f"{B}/3", f"{A}/later", f"{A}/sooner"))
        gate.say(A, FILE.replace("/private", "/secret"))
        clock.advance(90_000.0)
        await drive(clock, ask(gate, f"{A}/private/x", f"{A}/secret"))

    assert check_schema(folder) >= {"start", "robots", "grant", "outcome", "refused", "decision"}
    report = verified(folder)
    assert report.differences == []
    assert report.requests >= 10
    assert report.starts >= 6


async def test_a_file_that_the_state_file_kept_is_verified_in_the_next_chain(
    tmp_path: Path,
) -> None:
    clock, state = VirtualClock(), str(tmp_path / "state.sqlite")
    for _ in range(2):
        await crawl(tmp_path / "audit", clock, state)

    report = verified(tmp_path / "audit")
    assert report.differences == []
    assert len(report.chains) == 2


async def test_an_absence_that_the_state_file_kept_decides_while_the_file_cant_be_fetched(
    tmp_path: Path,
) -> None:
    folder, clock = tmp_path / "audit", VirtualClock()
    config = config_of(folder, storage={"path": str(tmp_path / "state.sqlite")})
    for said in (404, 503):
        async with ScriptedGate(config=config, clock=clock) as gate:
            gate.say(A, said)
            for seconds in (0.0, 50_000.0):
                clock.advance(seconds)
                await drive(clock, ask(gate, f"{A}/1"))
        clock.advance(90_000.0)

    report = verified(folder)
    assert report.differences == []
    assert (report.kinds["refused"], report.decisions) == (1, 4)
    check_schema(folder)


async def test_a_rule_that_the_decider_ignores_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decider.rule_on

    def blind(
        policy: Policy, path: str, origin: str, otherwise: Any, walls: Any = ()
    ) -> PathRuling:
        ruling = real(policy, path, origin, otherwise, walls)
        if ruling.rule is not None and ruling.rule.line == 2:
            return PathRuling(decider.Verdict.ALLOW, otherwise)
        return ruling

    with monkeypatch.context() as patched:
        patched.setattr(decider, "rule_on", blind)
        await crawl(tmp_path / "audit")

    (one,) = verified(tmp_path / "audit").differences
    assert one.what == "decision"
    assert "line 2" in one.text


def half_the_interval(patched: pytest.MonkeyPatch) -> None:
    """The gate believes that the file asks for half of it, and says so."""
    real = engine.interval_for

    def half(*arguments: Any, **options: Any) -> Interval:
        found = real(*arguments, **options)
        return Interval(found.seconds / 2, found.parts, found.clamped, found.usual / 2)

    patched.setattr(engine, "interval_for", half)
    patched.setattr(
        engine, "usual_interval", lambda asked, settings: (asked, half(asked, settings))
    )


def half_the_wait(patched: pytest.MonkeyPatch) -> None:
    """The gate knows the interval, and starts too early."""

    def due_at(scope: Scope, events: bool = True) -> float:
        if events and scope.in_flight:
            return float("inf")
        return scope.basis + scope.interval / 2

    patched.setattr(Scope, "due_at", due_at)


@pytest.mark.parametrize("broken", [half_the_interval, half_the_wait])
async def test_a_pace_that_is_too_fast_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patched:
        broken(patched)
        await crawl(tmp_path / "audit")

    found = verified(tmp_path / "audit").differences
    assert found
    assert {one.what for one in found} == {"pace"}


class FastClock(VirtualClock):
    """Its monotonic seconds are a tenth as long as those of its wall clock."""

    def wall(self) -> float:
        return 1_790_000_000.0 + self.monotonic() / 10


async def test_a_gate_whose_clock_runs_too_fast_is_found(tmp_path: Path) -> None:
    await crawl(tmp_path / "audit", FastClock())

    found = verified(tmp_path / "audit").differences
    assert {one.what for one in found} == {"pace"}
    assert "the interval in force is 7.000 s" in found[0].text
