"""One list of what keeps a host from being asked: `why`, states and refusals agree."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gatekeeper import (
    ClockView,
    Decision,
    Deferred,
    Gatekeeper,
    LeaseTimeout,
    MemoryLedger,
    NotYet,
    PoliteQueue,
    Reason,
    Verdict,
)
from gatekeeper.clock import VirtualClock, utc
from gatekeeper.pacing.ledger import (
    Granted,
    LedgerListener,
    NotBefore,
    ScopeClock,
    ScopeView,
    TakeRequest,
    Withheld,
)
from gatekeeper.pacing.waiters import HostStatus
from tests.gate_support import QUICK, gate_on, open_config
from tests.internet import FakeInternet, Page
from tests.waiting_support import until

URL = "http://a.test/x"


Open = Callable[..., Gatekeeper]


@pytest.fixture
def make(internet: FakeInternet, clock: VirtualClock) -> Open:
    def gate(**more: Any) -> Gatekeeper:
        config = open_config(**{"pacing": QUICK} | more.pop("settings", {}))
        return gate_on(internet, config, clock=clock, **more)

    return gate


def status_of(gate: Gatekeeper, host: str = "a.test") -> HostStatus:
    return gate.parts.scheduler.holdups.status(host)


def scanned(gate: Gatekeeper, host: str = "a.test") -> str:
    """The state by which `/v1/hosts` sorts, filters and counts."""
    scopes, _ = gate.parts.scheduler.watch()
    return gate.parts.scheduler.holdups.state(scopes[host], gate.parts.clock.monotonic())


async def views_of(gate: Gatekeeper, kind: str, host: str = "a.test") -> list[ClockView]:
    return [view for view in await gate.why(host) if view.kind == kind]


async def is_told(gate: Gatekeeper, decision: Decision, kind: str) -> None:
    """`why` and the state of the host say what the decision does, and until when."""
    (view,) = await views_of(gate, kind)
    assert (decision.verdict, view.scope) == (Verdict.DEFER, decision.origin)
    assert view.source.startswith(str(decision.reason))
    assert view.decides
    assert view.until is not None
    assert decision.retry_at is not None
    assert abs((view.until - decision.retry_at).total_seconds()) < 0.001
    status = status_of(gate)
    assert (status.state, scanned(gate)) == ("deferred", "deferred")
    assert status.due is not None
    assert str(decision.reason) in (status.why or "")
    assert gate.parts.scheduler.holdups.count()["deferred"] == 1


def dead(internet: FakeInternet) -> None:
    internet.refusing("a.test")


def answers_500(internet: FakeInternet) -> None:
    internet.site("a.test").on("/robots.txt", Page("", status=500))


def cut_off(internet: FakeInternet) -> None:
    internet.site("a.test").on(
        "/robots.txt", Page("User-agent: *", headers={"Content-Length": "1000"}, close=True)
    )


def closed_at_this_hour(internet: FakeInternet) -> None:
    internet.site("a.test").robots("User-agent: *\nVisit-time: 0200-0201\nDisallow: /no\n")


@pytest.mark.parametrize("site", [dead, answers_500, cut_off, closed_at_this_hour])
async def test_a_host_whose_file_defers_every_url_is_not_free(
    internet: FakeInternet, make: Open, clock: VirtualClock, site: Callable[[FakeInternet], None]
) -> None:
    site(internet)
    async with make() as gate:
        decision = await gate.check(URL)
        timed = decision.reason is Reason.OUTSIDE_VISIT_TIME
        await is_told(gate, decision, "visit-time" if timed else "file")
        assert decision.retry_at is not None
        await clock.elapse(decision.retry_at.timestamp() - clock.wall() + 1.0)
        assert status_of(gate).state == "free"  # the next question fetches the file again
        assert scanned(gate) == "free"


async def test_a_host_that_refused_its_file_is_deferred_after_its_block(
    internet: FakeInternet, make: Open, clock: VirtualClock
) -> None:
    internet.site("a.test").on("/robots.txt", Page("", status=503))
    async with make() as gate:
        decision = await gate.check(URL)
        assert (status_of(gate).state, scanned(gate)) == ("blocked", "blocked")
        (block,) = await views_of(gate, "block")
        assert block.until is not None
        assert decision.retry_at is not None
        await clock.elapse(block.until.timestamp() - clock.wall() + 0.001)
        assert not await views_of(gate, "block")
        if utc(clock.wall()) < decision.retry_at:
            await is_told(gate, decision, "file")


async def test_a_host_is_not_deferred_while_one_of_its_origins_answers(
    internet: FakeInternet, make: Open
) -> None:
    internet.site("http://a.test").on("/robots.txt", Page("", status=500))
    internet.site("http://a.test:8080").robots("")
    async with make() as gate:
        decision = await gate.check(URL)
        await is_told(gate, decision, "file")
        assert await gate.check("http://a.test:8080/x")
        (view,) = await views_of(gate, "file")
        assert (view.scope, view.decides) == ("http://a.test", False)
        assert (status_of(gate).state, scanned(gate)) == ("free", "free")


async def test_a_file_that_answers_again_frees_its_host(
    internet: FakeInternet, make: Open, clock: VirtualClock
) -> None:
    site = internet.site("a.test").on("/robots.txt", Page("", status=500), Page(""))
    async with make() as gate:
        await is_told(gate, await gate.check(URL), "file")
        await gate.refresh(URL)
        assert len(site.paths) == 2
        assert not await views_of(gate, "file")
        assert status_of(gate).state == "free"


async def test_a_restored_record_that_defers_is_listed(
    internet: FakeInternet, make: Open, clock: VirtualClock, tmp_path: Any
) -> None:
    internet.refusing("a.test")
    settings = {"storage": {"path": str(tmp_path / "state")}}
    async with make(settings=settings) as gate:
        await gate.check(URL)
    async with make(settings=settings) as gate:
        decision = await gate.check(URL)
        (view,) = await views_of(gate, "file")
        assert view.until is not None
        assert decision.retry_at is not None
        assert abs((view.until - decision.retry_at).total_seconds()) < 0.1


async def test_a_spent_budget_and_a_pause_are_host_states(
    internet: FakeInternet, make: Open
) -> None:
    internet.site("a.test").robots("").page("/x")
    settings = {"host": [{"match": "a.test", "max_pages_per_day": 1}]}
    async with make(settings=settings) as gate:
        async with gate.lease(URL) as lease:
            lease.report(status=200)
        assert (status_of(gate).state, scanned(gate)) == ("deferred", "deferred")
        assert "1 of 1 pages" in (status_of(gate).why or "")
        await gate.pause("a.test")
        status = status_of(gate)
        assert (status.state, status.due) == ("paused", None)


def test_origins_of_one_host_are_bounded(make: Open) -> None:
    from gatekeeper.fetching.outcomes import Outcome
    from gatekeeper.fetching.records import OriginAnswer, Record

    gate = make()
    decider = gate.parts.decider
    answer = OriginAnswer(Outcome.TIMEOUT, None, 0.0)
    for port in range(1000, 3000):
        origin = f"http://a.test:{port}"
        record = Record(origin, gate.config.fetch, current=answer, fresh_until=9.0, expires=9.0)
        decider.note(record)
    assert len(decider.noted["a.test"]) == 16


# --- a fleet whose store is lost, with when_lost = "divide" ---------------------------------


class Divided(MemoryLedger):
    """A ledger that has lost its store: another member serves a.test, this one all others."""

    lost = True
    listener: LedgerListener

    def listen(self, owner: str, listener: LedgerListener) -> None:
        self.listener = listener
        super().listen(owner, listener)

    def withheld(self, scopes: Sequence[str], interval: float) -> Withheld | None:
        return Withheld(math.inf, "host-2b") if self.lost and scopes[0] == "a.test" else None

    def take_nowait(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        return [
            NotBefore(1.0)
            if self.withheld([scope.scope for scope in request.scopes], 0.0)
            else super(Divided, self).take_nowait([request])[0]
            for request in requests
        ]


@pytest.fixture
def ledger(internet: FakeInternet, clock: VirtualClock) -> Divided:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")
    return Divided(clock)


def is_refused(decision: Decision | None, clock: VirtualClock) -> None:
    assert decision is not None
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.FLEET)
    assert "host-2b serves this host" in (decision.note or "")
    assert decision.retry_at is not None
    assert decision.retry_at > utc(clock.wall())


@pytest.mark.parametrize("known", [True, False], ids=["a known file", "an unknown file"])
@pytest.mark.parametrize("timeout", [None, 30.0, 0.0])
async def test_a_lease_of_a_host_that_another_member_serves_is_deferred_at_once(
    make: Open, clock: VirtualClock, ledger: Divided, known: bool, timeout: float | None
) -> None:
    async with make(ledger=ledger) as gate:
        if known:
            ledger.lost = False
            assert await gate.check(URL)
            ledger.lost = True
        for begin in (
            lambda: gate.acquire(URL, timeout=timeout),
            lambda: gate.lease(URL, timeout=timeout).__aenter__(),
        ):
            with pytest.raises(Deferred) as caught:
                await begin()
            is_refused(caught.value.decision, clock)
            assert "Decision(" not in repr(caught.value)
        if known:
            answer = await gate.try_acquire(URL)
            assert isinstance(answer, NotYet)
            assert answer.why == "fleet"
            is_refused(answer.decision, clock)
        (view,) = await views_of(gate, "fleet")
        assert view.decides
        assert "host-2b" in view.source
        assert status_of(gate).state == "deferred"
        assert not await views_of(gate, "fleet", "b.test")
        async with gate.lease("http://b.test/x", timeout=30.0) as lease:
            lease.report(status=200)


async def test_a_waiter_is_refused_when_the_store_is_lost(
    make: Open, clock: VirtualClock, ledger: Divided
) -> None:
    ledger.lost = False
    async with make(ledger=ledger) as gate, gate.lease(URL) as lease:
        waiting = [asyncio.create_task(gate.acquire(URL, owned=False)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        ledger.lost = True
        ledger.listener.lost(False)  # what a ledger that divides says: ask again
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, Deferred)
            is_refused(error.decision, clock)
        lease.report(status=200)


async def test_a_queue_does_not_wait_for_hosts_that_others_serve(
    make: Open, ledger: Divided, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    deferred: list[Decision] = []
    async with (
        make(ledger=ledger) as gate,
        PoliteQueue(gate, on_deferred=deferred.append) as queue,
    ):
        for number in range(3):
            await queue.put(f"http://a.test/{number}")
            await queue.put(f"http://b.test/{number}")
        for _ in range(3):
            async with await queue.get() as lease:
                assert lease.url.startswith("http://b.test/")
                lease.report(status=200)
    assert {one.reason for one in deferred} == {Reason.FLEET}
    assert "Decision(" not in caplog.text


class Endless:
    """A source of robots.txt files that waits for the store, as that of a fleet does."""

    asked = 0

    async def fetch(self, *_: object) -> Any:
        self.asked += 1
        return await asyncio.get_running_loop().create_future()

    async def reach(self, _: str) -> None:
        return None


async def test_no_lease_waits_for_the_robots_txt_of_a_host_that_another_member_serves(
    make: Open, clock: VirtualClock, ledger: Divided, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, source = make(ledger=ledger), Endless()
    monkeypatch.setattr(gate, "_robots_source", lambda _: source)
    async with gate:
        for begin in (
            lambda: gate.acquire(URL),
            lambda: gate.lease(URL).__aenter__(),
        ):
            with pytest.raises(Deferred) as caught:
                await asyncio.wait_for(begin(), 30.0)
            is_refused(caught.value.decision, clock)
        assert source.asked == 0
        asking = asyncio.create_task(gate.acquire("http://b.test/", owned=False))
        await until(lambda: source.asked)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_question_about_a_host_that_another_member_serves_names_the_member(
    make: Open, clock: VirtualClock, ledger: Divided
) -> None:
    async with make(ledger=ledger) as gate:
        decision = await gate.check(URL)
        is_refused(decision, clock)
        with pytest.raises(Deferred) as caught:
            await gate.acquire(URL)
        refusal = caught.value.decision
        assert (decision.note, decision.retry_at) == (refusal.note, refusal.retry_at)


class DividedByGroup(Divided):
    """Another member serves the hosts of the group alone."""

    def withheld(self, scopes: Sequence[str], interval: float) -> Withheld | None:
        return Withheld(math.inf, "host-2b") if self.lost and scopes[-1] == "group:g" else None


async def test_why_of_an_unknown_host_names_the_member_that_serves_its_group(
    internet: FakeInternet, make: Open, clock: VirtualClock
) -> None:
    settings = {
        "group": [{"name": "g", "interval": 1.0}],
        "host": [{"match": "a.test", "group": "g"}],
    }
    internet.site("b.test").robots("")
    async with make(ledger=DividedByGroup(clock), settings=settings) as gate:
        (view,) = await views_of(gate, "fleet")
        assert "host-2b" in view.source
        with pytest.raises(Deferred) as caught:
            await gate.acquire(URL)
        is_refused(caught.value.decision, clock)
        assert not await views_of(gate, "fleet", "b.test")
        assert await gate.check("http://b.test/x")


def test_a_budget_that_another_member_spent_defers_the_host(make: Open) -> None:
    gate = make(settings={"host": [{"match": "a.test", "max_pages_per_day": 1}]})
    holdups, day = gate.parts.scheduler.holdups, 100.0
    spent = ScopeView(ScopeClock("a.test", day=day, pages=1), (), 0)
    status = holdups.status("a.test", fleet=[spent])
    assert status.state == "deferred"
    assert "1 of 1 pages in 24 hours" in (status.why or "")
    assert status.due == gate.parts.clock.monotonic() + 86_400.0 - day
    over = ScopeView(ScopeClock("a.test", day=86_401.0, pages=1), (), 0)
    assert holdups.status("a.test", fleet=[over]).state == "free"


class Closed(Divided):
    """A ledger that grants nothing, and can be lost."""

    lost = False

    def take_nowait(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        return [NotBefore(100.0)] * len(requests)


async def test_a_loss_of_the_store_is_not_logged_for_each_waiting_host(
    internet: FakeInternet, make: Open, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"host": [{"match": "*.test", "robots": "allow"}]}
    ledger, deferred = Closed(clock), list[Decision]()
    async with (
        make(ledger=ledger, settings=settings) as gate,
        PoliteQueue(gate, on_deferred=deferred.append) as queue,
    ):
        for number in range(20):
            await queue.put(f"http://h{number}.test/")
        getting = asyncio.create_task(queue.get())
        while gate.stats().pacing.waiting < 20 or len(queue._waits._waiting) < 20:
            await clock.elapse(0.1)
        caplog.set_level("DEBUG")
        ledger.listener.lost(True)
        await until(lambda: len(deferred) >= 20)
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
    assert [one.getMessage() for one in caplog.records if ".test" in one.getMessage()] == []


class Restoring(Closed):
    """A ledger whose store is back, and whose data is being restored."""

    state = "recovering"


async def test_a_lease_refused_while_the_store_is_restored_says_so(
    internet: FakeInternet, make: Open, clock: VirtualClock
) -> None:
    settings = {"host": [{"match": "*.test", "robots": "allow"}]}
    async with make(ledger=Restoring(clock), settings=settings) as gate:
        (view,) = await views_of(gate, "fleet")
        answer = await gate.try_acquire(URL)
        assert isinstance(answer, NotYet)
        assert answer.why == view.kind == "fleet"
        with pytest.raises(LeaseTimeout, match=view.source):
            await gate.acquire(URL, timeout=0.0)
