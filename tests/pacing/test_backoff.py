"""`BackOff`: how far refusals slow a host, and when it is sped up again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper.clock import VirtualClock
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import ScopeSettings
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.pacing.scopes import (
    LONGEST,
    UNKNOWN,
    BackOff,
    RequestReport,
    ScopeHistory,
    interval_for,
)
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.storage.base import ClockRecord
from gatekeeper.testing import drive
from tests.effort import of_many, some_of
from tests.pacing_support import FakeStorage, scope_of, scopes_of

HOST = "a.example"
PACING = PacingConfig(backoff_jitter=0.0)
HOUR, DAY = 3600.0, 86_400.0
Make = Callable[..., Awaitable[Scheduler]]


class Host:
    """One host's back-off, with its refusals and good responses. Its own interval may be 0."""

    def __init__(self, usual: float = 1.0, **pacing: object) -> None:
        self.usual = usual
        self.pacing = PacingConfig(**pacing)  # type: ignore[arg-type]
        self.back_off = BackOff()
        self.now = 0.0

    def refuse(self, *, status: int = 429, wait: float = 0.0) -> None:
        self.back_off.refuse(
            status, usual=self.usual, now=self.now, until=self.now + wait, pacing=self.pacing
        )

    def good(self, count: int = 1) -> None:
        for _ in range(count):
            self.back_off.answered(self.usual, self.now, self.pacing)

    @property
    def interval(self) -> float:
        return max(self.usual, self.back_off.in_force(self.usual, self.now, self.pacing))

    def at(self, now: float) -> float:
        self.now = now
        return self.interval


def test_a_single_refusal_costs_a_factor_of_two_for_an_hour() -> None:
    host = Host(0.05)
    host.refuse(wait=1.0)
    host.good(10_000)
    assert host.at(HOUR - 0.1) == 0.1
    assert host.at(HOUR) == 0.05


def test_each_refusal_doubles_the_interval_in_force() -> None:
    host, found = Host(0.05), []
    for _ in range(5):
        host.refuse()
        found.append(host.interval)
    assert found == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert host.back_off.refused == 0.8


def test_a_refusal_of_a_host_without_an_interval_begins_at_the_floor() -> None:
    host = Host(0.0)
    host.refuse()
    assert host.interval == 0.2
    assert host.at(HOUR) == 0.0


def test_the_floor_is_for_hosts_without_an_interval_alone() -> None:
    host = Host(0.01)
    host.refuse()
    assert host.interval == 0.02


def test_no_refusal_slows_beyond_the_longest_back_off_but_the_host_itself() -> None:
    host = Host(40.0, backoff_max=100.0)
    for _ in range(4):
        host.refuse()
    assert host.interval == 100.0
    slow = Host(3600.0, backoff_max=100.0)
    slow.refuse()
    assert slow.interval == 3600.0


def test_the_usual_rate_is_tried_again_after_1_2_4_hours_up_to_a_day() -> None:
    host, waits = Host(1.0), []
    for _ in range(7):
        host.refuse()
        begun = host.now
        while host.interval > 1.0:
            host.now += 60.0
        waits.append((host.now - begun) / HOUR)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 24.0]


def test_a_trial_that_lasted_as_long_as_its_wait_resets_the_waits() -> None:
    """Not earlier, since a site that counts by the hour serves the first minutes of each trial."""
    for lasts, then in ((299.0, 4 * HOUR), (2 * HOUR - 1.0, 4 * HOUR), (2 * HOUR, HOUR)):
        host = Host(1.0)
        host.refuse()
        host.at(HOUR + 299.0)
        host.refuse()
        assert host.back_off.wait == 2 * HOUR
        host.at(host.now + 2 * HOUR + lasts)
        host.good(99)
        host.refuse()
        assert host.back_off.wait == then


def test_a_refusal_long_after_the_last_one_resets_the_waits() -> None:
    """The slower interval is refused as well, so the site's limit is not between the two."""
    for calm, then in ((1799.0, 4 * HOUR), (1801.0, HOUR)):
        host = Host(1.0)
        for _ in range(3):
            host.refuse()
            host.at(host.back_off.try_at)
        host.refuse()
        host.good()
        host.back_off.wait = 4 * HOUR
        host.at(host.now + calm)
        host.refuse()
        assert host.back_off.wait == then


def test_an_outage_of_a_site_does_not_slow_it_for_longer_than_it_lasted() -> None:
    """If a minute's pause does not help, the interval is not the cause."""
    host = Host(1.0)
    for _ in range(5):
        host.refuse(wait=60.0)
        host.now += 60.0
    assert host.interval == 32.0
    assert host.back_off.refused == 1.0
    host.good(200)
    assert host.interval == 8.0
    host.now += 600.0
    assert host.interval == 2.0
    host.now = host.back_off.try_at
    assert host.interval == 1.0


def test_a_trial_halves_the_interval_after_good_answers_or_time() -> None:
    host = Host(1.0)
    for _ in range(4):
        host.refuse()
    assert host.at(HOUR - 1.0) == 16.0
    assert host.at(HOUR) == 8.0
    host.good(99)
    assert host.interval == 8.0
    host.good()
    assert host.interval == 4.0
    assert host.at(HOUR + 299.0) == 4.0
    assert host.at(HOUR + 300.0) == 2.0
    assert host.at(HOUR + 600.0) == 1.0
    host.at(2 * HOUR - 1.0)
    assert not host.back_off.forgotten
    host.at(2 * HOUR)
    assert host.back_off.forgotten


def test_the_time_of_a_block_does_not_count_as_good_answers() -> None:
    host = Host(1.0)
    host.refuse(wait=3 * HOUR)
    assert host.at(3 * HOUR + 299.0) == 2.0
    assert host.at(3 * HOUR + 300.0) == 1.0


def test_each_number_of_the_back_off_is_a_setting() -> None:
    host = Host(
        0.0,
        backoff_floor=1.0,
        backoff_answers=3,
        backoff_quiet=10.0,
        backoff_retry=60.0,
        backoff_retry_max=100.0,
    )
    host.refuse()
    host.refuse()
    assert host.interval == 4.0
    assert host.at(60.0) == 2.0
    host.good(3)
    assert host.interval == 0.0
    host.refuse()
    assert host.back_off.wait == 100.0


@pytest.mark.parametrize("site_allows", some_of([1.9, 0.07, 0.3, 0.1], 2))
def test_a_site_with_a_fixed_limit_is_met_at_most_once_an_hour(site_allows: float) -> None:
    host, met, last = Host(0.05), [], -DAY
    while host.now < DAY:
        if host.now - last < site_allows - 1e-9:
            met.append(host.now)
            host.refuse(wait=1.0)
        else:
            host.good()
        last = host.now
        # Steps of a minute after a refusal, since a day has many pages.
        host.now += max(host.interval, 1.0 if met and met[-1] == host.now else 0.0)
    first = [moment for moment in met if moment < 60.0]
    later = met[len(first) :]
    assert len(first) <= 6
    assert all(
        after - before >= HOUR for before, after in zip(met[len(first) - 1 :], later, strict=False)
    )
    assert len(later) <= 5


# --- in words ------------------------------------------------------------------------------

NOON = 12 * HOUR + 180.0
"""12:03 of some day, as wall seconds."""


def said(host: Host) -> str:
    return host.back_off.describe(host.now, NOON + host.now, host.pacing)


def test_the_line_of_a_slowed_host_says_how_slow_since_when_and_until_when() -> None:
    host = Host(0.05)
    host.refuse()
    expected = "twice the usual 0.05 s since a 429 at 12:03; the usual rate is tried again at 13:03"
    assert said(host) == expected
    host.refuse(status=503)
    assert said(host) == (
        "4 times the usual 0.05 s since a 503 at 12:03; one in 0.1 s is tried again at 13:03"
    )
    host.now = HOUR
    assert said(host) == (
        "twice the usual 0.05 s since a 503 at 12:03; the usual rate is tried again at 13:08, "
        "or after 100 good answers"
    )
    host.now = HOUR + 300.0
    assert said(host) == ""


def test_the_line_of_a_slowed_host_names_a_later_day_and_a_missing_interval() -> None:
    host = Host(0.0, backoff_retry=DAY)
    host.refuse()
    assert said(host) == (
        "0.2 s instead of none since a 429 at 12:03; the usual rate is tried again at "
        "1970-01-02 12:03"
    )


# --- the model -----------------------------------------------------------------------------

statuses = st.sampled_from((None, 200, 200, 304, 404, 429, 429, 500, 503))
events = st.lists(
    st.tuples(
        statuses,
        st.sampled_from((0.0, 0.1, 1.0, 60.0, 299.0, 301.0, 3599.0, 3601.0, 90_000.0)),
        st.sampled_from((None, None, 0.0, 5.0, 7200.0)),
        st.integers(1, 150),
        st.booleans(),
    ),
    max_size=25,
)
own = st.sampled_from((0.0, 0.03, 1.0, 10.0))


@settings(deadline=None, max_examples=of_many(300))
@given(events, own, st.booleans())
def test_an_error_never_shortens_the_interval(
    told: list[tuple[int | None, float, float | None, int, bool]], usual: float, slow: bool
) -> None:
    pacing = PacingConfig(latency_factor=3.0 if slow else 0.0)
    history, now = ScopeHistory(), 0.0
    wish, kept = RobotsInterval(usual, "crawl-delay"), ScopeSettings()

    def found() -> tuple[float, float]:
        return interval_for(wish, kept, history, pacing, now).seconds, history.blocked_until

    for status, passed, retry_after, times, sent_before_refusal in told:
        now += passed
        for _ in range(times):
            before = found()
            interval = interval_for(wish, kept, history, pacing, now)
            report = RequestReport(
                status, 0.2, retry_after, sent_before_refusal=sent_before_refusal
            )
            history.observe(report, now, interval.usual, pacing, random.Random(1))
            after = found()
            if status is None or status >= 400:
                assert after >= before
                assert after[0] >= before[0]
                assert after[1] >= before[1]
            if status in (429, 503) and not sent_before_refusal:
                back_off = history.back_off
                assert back_off is not None
                assert after[0] >= min(
                    2 * max(interval.usual, back_off.refused), pacing.backoff_max
                )


class Model:
    """The rule as a table: the levels above the usual interval, and the effect of each event."""

    def __init__(self, usual: float) -> None:
        self.base = usual or 0.1
        self.level = self.refused = 0
        self.wait = self.try_at = self.began = self.since = self.when = self.calm = 0.0
        self.good = 0
        self.known = self.trial = self.served = False

    def pass_to(self, now: float) -> None:
        if not self.known:
            return
        while not self.trial:
            eases = self.level > self.refused + 1
            by = min(self.since + 300.0, self.try_at) if eases else self.try_at
            if now < by:
                return
            self.trial, self.began = by == self.try_at, by
            self.ease(by)
        while self.level and now >= self.since + 300.0:
            self.ease(self.since + 300.0)
        self.known = self.level > 0 or now < self.believed

    def ease(self, now: float) -> None:
        self.level, self.since, self.good = self.level - 1, now, 0

    @property
    def believed(self) -> float:
        return max(self.began + self.wait, self.since + 300.0)

    def refuse(self, now: float, until: float) -> None:
        first = not self.known
        if first:
            self.wait, self.level = HOUR, 0
        elif self.trial:
            self.wait = min(2 * self.wait, DAY) if now < self.believed else HOUR
        elif now >= self.calm + 1800.0:
            self.wait = HOUR
        if first or self.trial or self.served or now - self.when < 60.0:
            self.refused = self.level
        self.level += 1
        self.known, self.trial, self.served, self.good = True, False, False, 0
        self.when, self.calm = now, max(now, until)
        self.since, self.try_at = self.calm, max(now + self.wait, until + 300.0)

    def answer(self, now: float) -> None:
        self.served = True
        if self.known and self.level > (0 if self.trial else self.refused + 1):
            self.good += 1
            if self.good == 100:
                self.ease(now)


@settings(deadline=None, max_examples=of_many(300))
@given(events, own)
def test_the_back_off_equals_its_model(
    told: list[tuple[int | None, float, float | None, int, bool]], usual: float
) -> None:
    host, model = Host(usual, backoff_max=3e8), Model(usual)
    for status, passed, retry_after, times, _ in told:
        host.now += passed
        model.pass_to(host.now)
        refused = status in (429, 503)
        for _ in range(1 if refused else times):
            if refused:
                until = host.now + (retry_after or 0.0)
                host.refuse(wait=retry_after or 0.0)
                model.refuse(host.now, until)
            elif status is not None and status < 400:
                host.good()
                model.answer(host.now)
            level = model.level if model.known else 0
            expected = 2.0**level * model.base if level else usual
            assert host.interval == pytest.approx(max(expected, usual))


# --- in the scheduler ----------------------------------------------------------------------


async def leases(
    scheduler: Scheduler, clock: VirtualClock, count: int, wish: RobotsInterval, host: str = HOST
) -> float:
    """Return the seconds that `count` leases take one after another, each answered immediately."""
    begun = clock.monotonic()

    async def ask() -> None:
        for _ in range(count):
            grant = await scheduler.acquire("u", host, admit=lambda: wish)
            grant.report(200, 0.0)
            grant.release()

    await drive(clock, ask(), limit=90 * DAY)
    return clock.monotonic() - begun


async def refuse(
    scheduler: Scheduler, clock: VirtualClock, wish: RobotsInterval, **report: object
) -> None:
    async def ask() -> None:
        grant = await scheduler.acquire("u", HOST, admit=lambda: wish)
        grant.report(429, 0.0, **report)  # type: ignore[arg-type]
        grant.release()

    await drive(clock, ask(), limit=90 * DAY)


FAST = RobotsInterval(0.05, "crawl-delay 0.05 s from robots.txt line 2")


async def test_sixty_leases_after_a_429_take_twice_as_long_beside_its_block(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    await refuse(scheduler, clock, FAST, retry_after=1)
    assert await leases(scheduler, clock, 60, FAST) == pytest.approx(1.0 + 59 * 0.1)


async def test_the_usual_rate_is_back_an_hour_after_a_429(make: Make, clock: VirtualClock) -> None:
    scheduler = await make()
    await refuse(scheduler, clock, FAST, retry_after=1)
    await clock.elapse(HOUR)
    assert await leases(scheduler, clock, 60, FAST) == pytest.approx(59 * 0.05, abs=0.06)


async def test_a_refusal_doubles_the_interval_without_its_jitter(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make(jitter=1.0)
    for _ in range(4):
        await refuse(scheduler, clock, FAST, retry_after=0)
        await clock.elapse(5.0)
    (view,) = [view for view in scheduler.why(HOST) if view.decides]
    assert view.seconds == pytest.approx(0.8)


async def test_a_refusal_doubles_the_interval_without_the_rate_limit_field(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    await refuse(scheduler, clock, FAST, retry_after=1, rate_limit='"d";r=0;t=600')
    await clock.elapse(700.0)
    assert await leases(scheduler, clock, 11, FAST) == pytest.approx(1.0, abs=0.11)


async def test_a_refusal_doubles_the_interval_without_the_latency_factor(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make(latency_factor=10.0)
    grant = await scheduler.acquire("u", HOST, admit=lambda: FAST)
    grant.report(429, elapsed=0.2, retry_after=1)
    grant.release()
    back_off = scopes_of(scheduler)[HOST].ensure_history().back_off
    assert back_off is not None
    assert back_off.refused == 0.05  # The latency did not apply to that request.
    (view,) = [view for view in scheduler.why(HOST) if view.decides]
    assert view.seconds == pytest.approx(2.0)
    await refuse(scheduler, clock, FAST, retry_after=1)
    (view,) = [view for view in scheduler.why(HOST) if view.decides]
    assert view.source.startswith("twice the usual 2 s since a 429")


@pytest.mark.parametrize("retry_after", [None, 1.0])
async def test_refusals_of_requests_in_flight_together_count_once(
    make: Make, clock: VirtualClock, retry_after: float | None
) -> None:
    scheduler = await make(concurrency=8, backoff_jitter=0.0)
    none = RobotsInterval(0.0, "crawl-delay 0 s")
    grants = [await scheduler.acquire("u", HOST, admit=lambda: none) for _ in range(8)]
    for grant in grants:  # also at one moment
        grant.report(429, 0.1, retry_after)
        grant.release()
    blocked = scheduler.blocked(HOST)
    assert blocked is not None
    assert blocked[0] - clock.wall() == pytest.approx(retry_after or 60.0)
    (view,) = [view for view in scheduler.why(HOST) if view.decides]
    assert view.seconds == 0.2


async def test_a_robots_txt_that_can_not_be_had_says_nothing_of_the_pace_of_pages(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()

    async def maintenance() -> None:
        for _ in range(6):
            grant = await scheduler.acquire_robots("r", HOST, asked=UNKNOWN)
            grant.report(503, 0.1, retry_after=300.0)
            grant.release()
            scheduler.robots_read(HOST, lambda: UNKNOWN)
        grant = await scheduler.acquire_robots("r", HOST, asked=UNKNOWN)
        grant.report(200, 0.1)
        grant.release()

    await drive(clock, maintenance(), limit=90 * DAY)
    scheduler.robots_read(HOST, lambda: FAST)
    assert await leases(scheduler, clock, 11, FAST) == pytest.approx(1.1, abs=0.11)


async def test_the_rate_of_a_text_is_worked_out_only_for_a_host_with_a_clock(make: Make) -> None:
    scheduler = await make()
    looked: list[str] = []

    def asked() -> RobotsInterval:
        looked.append(HOST)
        return FAST

    assert scheduler.robots_read(HOST, asked) == 0.0
    assert looked == []
    (await scheduler.acquire_robots("r", HOST, asked=UNKNOWN)).release()
    scheduler.robots_read(HOST, asked)
    assert looked == [HOST]


async def test_a_shared_clock_is_not_slowed_by_the_refusal_of_one_host(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make(address_interval=0.1)
    scopes = ("address:192.0.2.1",)
    for host in (HOST, "b.example"):
        grant = await scheduler.acquire("u", host, admit=lambda: RobotsInterval(1.0), scopes=scopes)
        grant.report(429 if host == HOST else 200, 0.0, 1.0)
        grant.release()
        await clock.elapse(2.0)
    assert await leases(scheduler, clock, 11, FAST, "b.example") == pytest.approx(1.0, abs=0.11)
    assert await leases(scheduler, clock, 11, RobotsInterval(1.0), HOST) == pytest.approx(
        20.0, abs=2.1
    )


# --- what outlives the process -------------------------------------------------------------


class Runs:
    """Successive schedulers over the same storage."""

    def __init__(self, make: Make, clock: VirtualClock) -> None:
        self.make, self.clock = make, clock
        self.storage = FakeStorage()

    async def begin(self) -> Scheduler:
        self.scheduler = await self.make(storage=self.storage, backoff_jitter=0.0)
        return self.scheduler

    async def again(self, *, crash: bool) -> Scheduler:
        if crash:
            self.storage = self.storage.crash()
        await self.scheduler.close()
        return await self.begin()

    def line(self) -> str:
        found = [view for view in self.scheduler.why(HOST) if "since a" in view.source]
        return found[0].source if found else ""


@pytest.mark.parametrize("crash", [True, False])
async def test_the_back_off_and_its_next_trial_survive_a_restart(
    make: Make, clock: VirtualClock, crash: bool
) -> None:
    runs = Runs(make, clock)
    scheduler = await runs.begin()
    await refuse(scheduler, clock, FAST, retry_after=1)
    before = runs.line()
    await clock.elapse(600.0)
    scheduler = await runs.again(crash=crash)
    assert await leases(scheduler, clock, 11, FAST) == pytest.approx(1.0, abs=0.25)
    assert runs.line() == before
    await clock.elapse(3000.0)
    scheduler = await runs.again(crash=crash)
    assert await leases(scheduler, clock, 21, FAST) == pytest.approx(1.0, abs=0.25)
    await refuse(scheduler, clock, FAST, retry_after=1)
    scheduler = await runs.again(crash=crash)
    back_off = scopes_of(scheduler)[HOST].ensure_history().back_off
    assert back_off is not None
    assert back_off.wait == 2 * HOUR  # The trial was refused immediately.


@pytest.mark.parametrize("crash", [True, False])
async def test_an_ended_back_off_does_not_return_after_a_restart(
    make: Make, clock: VirtualClock, crash: bool
) -> None:
    runs = Runs(make, clock)
    scheduler = await runs.begin()
    for _ in range(6):
        await refuse(scheduler, clock, FAST, retry_after=1)
        await clock.elapse(5.0)
    await clock.elapse(3 * HOUR)
    await leases(scheduler, clock, 3, FAST)
    assert runs.storage.load_clock_nowait(HOST) is not None
    assert runs.storage.load_clock_nowait(HOST).safe_interval == 0.0  # type: ignore[union-attr]
    scheduler = await runs.again(crash=crash)
    await clock.elapse(2.0)
    assert await leases(scheduler, clock, 21, FAST) == pytest.approx(1.0, abs=0.1)


async def test_the_back_off_stored_by_the_earlier_version_holds_for_an_hour(
    make: Make, clock: VirtualClock
) -> None:
    runs = Runs(make, clock)
    runs.storage.durable[HOST] = ClockRecord(
        scope=HOST,
        next_at=clock.wall() - 10.0,
        interval=1.0,
        failures=1,
        last_failure_at=clock.wall() - 1800.0,
        safe_interval=1.0,
    )
    scheduler = await runs.begin()
    await clock.elapse(2.0)
    assert await leases(scheduler, clock, 11, FAST) == pytest.approx(10.0, abs=1.0)
    assert "since a refusal at" in next(v.source for v in scheduler.why(HOST) if v.decides)
    await clock.elapse(1800.0)
    assert await leases(scheduler, clock, 11, FAST) == pytest.approx(5.0, abs=0.6)


async def test_a_lease_of_an_earlier_run_that_was_refused_is_slowed_by_its_own_interval(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    scope = scope_of(scheduler, HOST)
    scope.basis, scope.interval = clock.monotonic() - LONGEST, LONGEST
    grant: Grant = await scheduler.hold("u", HOST, 60.0)
    grant.report(429, 0.1, 1.0)
    grant.release()
    (view,) = [view for view in scheduler.why(HOST) if view.decides]
    assert view.seconds == 2.0


async def test_why_and_the_log_tell_a_back_off_in_one_line(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gatekeeper.pacing")
    scheduler = await make()
    await refuse(scheduler, clock, FAST, retry_after=1)
    line = "twice the usual 0.05 s since a 429 at 14:13; the usual rate is tried again at 15:13"
    assert [record.getMessage() for record in caplog.records] == [f"{HOST}: {line}"]
    views = {view.kind: view for view in scheduler.why(HOST)}
    assert views["next"].source == line
    (view,) = [view for view in scheduler.why(HOST) if view.kind == "interval" and view.decides]
    assert (view.source, view.seconds) == (line, 0.1)
    assert str(view) == f"{HOST}: interval: {line}"
    assert view.since is not None
    await clock.elapse(2 * HOUR)  # No request was made meanwhile.
    (view,) = [view for view in scheduler.why(HOST) if view.kind == "interval"]
    assert (view.source, view.seconds) == (FAST.source, 0.05)


async def test_an_answer_that_is_no_refusal_is_not_logged(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gatekeeper.pacing")
    scheduler = await make(concurrency=2)
    none = RobotsInterval(0.0, "crawl-delay 0 s")
    first, second = [await scheduler.acquire("u", HOST, admit=lambda: none) for _ in range(2)]
    first.report(301, 0.1, 5.0)
    second.report(404, 0.1)
    assert not caplog.records
