"""`Scheduler`, as seen by the tasks that wait for leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, HostRule
from gatekeeper.errors import GateClosed, LeaseTimeout
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.ledger import Report, ScopeClock
from gatekeeper.pacing.queues import REFETCH
from gatekeeper.pacing.scheduler import Scheduler
from gatekeeper.robots.timing import RobotsInterval
from tests.pacing_support import add_rule, hosts_of, is_paused, scheduler_on

A, B = "a.example", "b.example"
Make = Callable[..., Coroutine[Any, Any, Scheduler]]


def wish(seconds: float | None) -> Callable[[], RobotsInterval]:
    found = RobotsInterval(seconds, f"crawl-delay {seconds} s from robots.txt line 2")
    return lambda: found


class Visitor:
    """Asks for leases in tasks, and records when each got one."""

    def __init__(self, scheduler: Scheduler, clock: VirtualClock) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.starts: list[tuple[str, float]] = []
        self.grants: dict[str, Grant] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, host: str = A, *, hold: float | None = 0.0, **how: Any) -> None:
        task = self.tasks[name] = asyncio.create_task(self._visit(name, host, hold, how))
        # Tasks that still wait at the end of a test get GateClosed.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _visit(self, name: str, host: str, hold: float | None, how: Any) -> None:
        how.setdefault("admit", wish(1.0))
        ttl = how.pop("ttl", None)
        grant = await self.scheduler.acquire(f"https://{host}/{name}", host, **how)
        self.starts.append((name, self.clock.monotonic() - 1000.0))
        self.grants[name] = grant
        if ttl is not None:
            grant.renew(ttl)
        if hold is not None:
            if hold:
                await self.clock.sleep(hold)
            grant.report(200)
            grant.release()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.starts]

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)


@pytest.fixture
async def visitor(make: Make, clock: VirtualClock) -> Visitor:
    return Visitor(await make(), clock)


async def test_an_interval_counts_from_the_head_of_the_response(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("first", hold=None, admit=wish(2.0))
    visitor.ask("second", admit=wish(2.0))
    await clock.elapse(3.0)
    visitor.grants["first"].head()
    await clock.elapse(1.0)
    visitor.grants["first"].release()  # The body took another second.
    await clock.elapse(5.0)
    assert visitor.starts == [("first", 0.0), ("second", 5.0)]


async def test_no_second_lease_before_the_first_ones_head(make: Make, clock: VirtualClock) -> None:
    visitor = Visitor(await make(concurrency=2), clock)
    visitor.ask("first", hold=None)
    visitor.ask("second")
    await clock.elapse(30.0)
    assert visitor.names == ["first"]


async def test_without_an_interval_the_slots_alone_count(make: Make, clock: VirtualClock) -> None:
    visitor = Visitor(await make(concurrency=2), clock)
    for name in ("first", "second", "third"):
        visitor.ask(name, hold=None, admit=wish(0.0))
    await clock.settle()
    assert visitor.names == ["first", "second"]
    visitor.grants["second"].release()
    await clock.settle()
    assert visitor.names == ["first", "second", "third"]


async def test_all_slots_are_taken_when_a_pause_ends(make: Make, clock: VirtualClock) -> None:
    scheduler = await make(concurrency=3)
    visitor = Visitor(scheduler, clock)
    scheduler.pause(A)
    for name in ("1", "2", "3", "4"):
        visitor.ask(name, hold=None, admit=wish(0.0))
    await clock.settle()
    assert visitor.names == []
    scheduler.pause(A, paused=False)
    await clock.settle()
    assert visitor.names == ["1", "2", "3"]


async def test_hosts_do_not_wait_for_each_other(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("elsewhere", B, hold=None)
    await clock.settle()
    assert visitor.names == ["first", "elsewhere"]


async def test_leases_go_by_priority_and_then_by_arrival(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("now")
    await clock.settle()
    for name, priority in (("x", 0), ("y", 5), ("z", 0), ("w", 5)):
        visitor.ask(name, priority=priority)
    await clock.elapse(10.0)
    assert visitor.names == ["now", "y", "w", "x", "z"]


async def test_hosts_share_leases_evenly_at_max_in_flight(make: Make, clock: VirtualClock) -> None:
    visitor = Visitor(await make(max_in_flight=1), clock)
    for number in range(3):
        visitor.ask(f"a{number}", A, hold=1.0, admit=wish(0.0))
    for number in range(3):
        visitor.ask(f"b{number}", B, hold=1.0, admit=wish(0.0))
    await clock.elapse(10.0)
    assert visitor.names == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_a_lease_is_granted_in_time_after_max_in_flight_was_reached(
    make: Make, clock: VirtualClock
) -> None:
    """A host may fall due while others wait for room, and after the last of them has left."""
    visitor = Visitor(await make(max_in_flight=1), clock)
    visitor.ask("first", A, admit=wish(5.0))
    await clock.settle()
    visitor.ask("full", B, hold=2.0)
    await clock.settle()
    visitor.ask("second", A, admit=wish(5.0))
    visitor.ask("impatient", "c.example", timeout=1.0)
    await clock.elapse(10.0)
    assert visitor.starts == [("first", 0.0), ("full", 0.0), ("second", 5.0)]


async def test_one_host_with_many_waiters_delays_no_other_host(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(max_in_flight=2), clock)
    for number in range(300):
        visitor.ask(f"many{number}", A, hold=0.1, admit=wish(0.0))
    for number in range(50):
        visitor.ask(f"one{number}", f"h{number}.example", hold=0.1, admit=wish(0.0))
    await clock.elapse(7.0)
    assert sum(name.startswith("one") for name in visitor.names) == 50


async def test_a_longer_text_read_meanwhile_counts_from_the_last_request(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("under the old text", admit=wish(1.0))
    await clock.settle()
    visitor.ask("under the new text", admit=wish(10.0))
    await clock.elapse(30.0)
    assert visitor.starts == [("under the old text", 0.0), ("under the new text", 10.0)]


async def test_a_refused_waiter_gets_the_refusal_and_the_next_gets_the_lease(
    visitor: Visitor, clock: VirtualClock
) -> None:
    def refuse() -> RobotsInterval:
        raise PermissionError("now denied")

    visitor.ask("first")
    await clock.settle()
    visitor.ask("denied", admit=refuse)
    visitor.ask("second")
    await clock.elapse(1.0)
    assert visitor.names == ["first", "second"]
    with pytest.raises(PermissionError):
        await visitor.tasks["denied"]


# --- robots.txt ----------------------------------------------------------------------------


async def test_robots_go_before_pages_and_start_the_clock(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("page")
    await clock.settle()
    visitor.ask("next page", priority=100)

    async def robots() -> None:
        grant = await visitor.scheduler.acquire_robots(f"https://{A}/robots.txt", A)
        visitor.starts.append(("robots", clock.monotonic() - 1000.0))
        await clock.sleep(0.5)
        grant.release()

    task = asyncio.create_task(robots())
    await clock.elapse(10.0)
    await task
    assert visitor.starts == [("page", 0.0), ("robots", 1.0), ("next page", 2.5)]


async def test_an_expired_policy_gives_the_lease_to_robots_txt_and_keeps_the_place(
    visitor: Visitor, clock: VirtualClock
) -> None:
    scheduler, fresh = visitor.scheduler, False

    async def refetch() -> None:
        nonlocal fresh
        grant = await scheduler.acquire_robots(f"https://{A}/robots.txt", A)
        visitor.starts.append(("robots", clock.monotonic() - 1000.0))
        await clock.sleep(4.0)
        fresh = True
        grant.release()

    visitor.ask(
        "stale", admit=lambda: RobotsInterval(1.0, "x") if fresh else REFETCH, refetch=refetch
    )
    visitor.ask("behind", admit=wish(1.0))
    await clock.elapse(20.0)
    assert visitor.starts == [("robots", 0.0), ("stale", 5.0), ("behind", 6.0)]


async def test_a_failed_refetch_ends_that_waiter_alone(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def refetch() -> None:
        raise OSError("no route")

    visitor.ask("stale", admit=lambda: REFETCH, refetch=refetch)
    visitor.ask("behind")
    await clock.settle()
    assert visitor.names == ["behind"]
    with pytest.raises(OSError, match="no route"):
        await visitor.tasks["stale"]


async def test_a_policy_that_stays_expired_is_not_asked_for_ever(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def refetch() -> None:
        return None

    visitor.ask("stale", admit=lambda: REFETCH, refetch=refetch)
    await clock.settle()
    with pytest.raises(LeaseTimeout, match="can't be renewed"):
        await visitor.tasks["stale"]


# --- patience ------------------------------------------------------------------------------


async def test_a_timeout_of_0_does_not_wait(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("first", hold=None)
    await clock.settle()
    visitor.ask("second", timeout=0.0)
    await clock.settle()
    with pytest.raises(LeaseTimeout):
        await visitor.tasks["second"]
    assert visitor.scheduler.stats().waiting == 0


async def test_a_wait_that_can_not_end_in_time_is_not_begun(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("first", admit=wish(60.0))
    await clock.settle()
    visitor.ask("second", timeout=30.0)
    await clock.settle()
    with pytest.raises(LeaseTimeout, match="due in 60") as caught:
        await visitor.tasks["second"]
    assert caught.value.retry_at is not None
    assert caught.value.retry_at.timestamp() == pytest.approx(clock.wall() + 60.0)


async def test_a_waiter_is_refused_at_its_timeout(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("second", timeout=5.0)
    await clock.elapse(4.9)
    assert not visitor.tasks["second"].done()
    await clock.elapse(0.1)
    with pytest.raises(LeaseTimeout):
        await visitor.tasks["second"]


async def test_the_timeout_holds_while_robots_txt_is_fetched_and_after_it(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def refetch() -> None:
        await clock.sleep(3.0)

    stale = {"admit": lambda: REFETCH, "refetch": refetch}
    visitor.ask("during", timeout=2.0, **stale)
    await clock.elapse(2.0)
    with pytest.raises(LeaseTimeout):
        await visitor.tasks["during"]
    visitor.ask("after", timeout=4.0, **stale)
    await clock.elapse(4.0)
    with pytest.raises(LeaseTimeout):
        await visitor.tasks["after"]


async def test_the_number_of_waiters_is_bounded(make: Make, clock: VirtualClock) -> None:
    visitor = Visitor(await make(max_waiters=1), clock)
    visitor.ask("first", hold=None)
    visitor.ask("second")
    visitor.ask("third")
    await clock.settle()
    with pytest.raises(LeaseTimeout, match="max_waiters"):
        await visitor.tasks["third"]


# --- cancellation --------------------------------------------------------------------------


async def test_a_cancelled_waiter_leaves_no_trace(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("gone")
    visitor.ask("second")
    await clock.settle()
    await visitor.cancel("gone")
    visitor.grants["first"].release()
    await clock.elapse(1.0)
    assert visitor.names == ["first", "second"]
    assert visitor.scheduler.stats().waiting == 0


async def test_a_lease_granted_to_a_cancelled_waiter_is_passed_on(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("gone")
    visitor.ask("second")
    await clock.settle()
    visitor.grants["first"].release()
    clock.advance(1.0)  # The lease is granted, but its owner has not run yet.
    await visitor.cancel("gone")
    await clock.settle()
    assert visitor.starts == [("first", 0.0), ("second", 1.0)]
    assert visitor.scheduler.stats().passed_on == 1


async def test_a_lease_that_nobody_wants_any_more_is_given_back_and_its_clock_kept(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("gone")
    await clock.settle()
    visitor.grants["first"].release()
    clock.advance(1.0)
    await visitor.cancel("gone")
    visitor.ask("second")
    await clock.elapse(5.0)
    assert visitor.starts == [("first", 0.0), ("second", 2.0)]
    assert visitor.scheduler.stats().in_flight == 0


async def test_a_waiter_that_fetches_robots_txt_may_be_cancelled(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def refetch() -> None:
        await clock.sleep(60.0)

    visitor.ask("stale", admit=lambda: REFETCH, refetch=refetch)
    visitor.ask("behind")
    await clock.settle()
    assert visitor.names == []
    await visitor.cancel("stale")
    await clock.settle()
    assert visitor.names == ["behind"]


# --- the life of a lease -------------------------------------------------------------------


async def test_a_lease_never_ended_ends_at_its_expiry_and_counts_as_used(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("lost", hold=None, ttl=20.0)
    visitor.ask("second")
    await clock.elapse(60.0)
    assert visitor.starts == [("lost", 0.0), ("second", 21.0)]
    assert visitor.scheduler.stats().expired == 1


async def test_a_lease_without_its_own_lifetime_ends_after_lease_ttl(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(lease_ttl=10.0), clock)
    for host in (A, B):
        visitor.ask(f"lost {host}", host, hold=None)
        visitor.ask(f"second {host}", host)
        await clock.elapse(1.0)
    await clock.elapse(30.0)
    assert visitor.starts[2:] == [(f"second {A}", 11.0), (f"second {B}", 12.0)]


async def test_a_renewed_lease_lives_longer(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("lost", hold=None, ttl=20.0)
    visitor.ask("second")
    await clock.elapse(10.0)
    visitor.grants["lost"].renew(50.0)
    await clock.elapse(90.0)
    assert visitor.starts == [("lost", 0.0), ("second", 61.0)]


async def test_give_back_frees_the_slot_and_keeps_the_clock(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("unsent", hold=None)
    visitor.ask("second")
    await clock.elapse(0.4)
    visitor.grants["unsent"].give_back()
    await clock.elapse(5.0)
    assert visitor.starts == [("unsent", 0.0), ("second", 1.0)]


async def test_the_first_report_is_final(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("first", hold=None)
    await clock.settle()
    visitor.grants["first"].report(200)
    visitor.grants["first"].report(429, retry_after=1000.0)
    assert visitor.scheduler.blocked(A) is None


async def test_a_refusal_blocks_the_host_and_then_lets_one_probe_through(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(concurrency=3), clock)
    visitor.ask("refused", hold=None, admit=wish(0.0))
    await clock.settle()
    visitor.grants["refused"].report(503, retry_after="120")
    visitor.grants["refused"].release()
    for name in ("probe", "x", "y"):
        visitor.ask(name, hold=None, admit=wish(0.0))
    await clock.elapse(119.9)
    assert visitor.names == ["refused"]
    await clock.elapse(0.1)
    assert visitor.names == ["refused", "probe"]
    visitor.grants["probe"].report(200)
    await clock.elapse(0.2)  # twice pacing.backoff_floor
    visitor.grants["x"].head()
    await clock.elapse(0.2)
    assert visitor.names == ["refused", "probe", "x", "y"]


async def test_a_lease_renewed_twice_to_one_end_expires_once(
    visitor: Visitor, clock: VirtualClock
) -> None:
    grant = await visitor.scheduler.acquire(f"{A}/x", A, admit=wish(0.0))
    for _ in range(3):
        grant.renew(2.0)
    await clock.elapse(10.0)
    stats = visitor.scheduler.stats()
    assert (stats.expired, stats.in_flight) == (1, 0)


async def test_a_refusal_told_of_after_the_lease_expired_still_blocks(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("late", hold=None, ttl=5.0)
    await clock.elapse(10.0)
    visitor.grants["late"].report(429, retry_after=100.0)
    assert visitor.scheduler.blocked(A) is not None


# --- scopes --------------------------------------------------------------------------------


async def test_a_named_group_shares_one_clock(make: Make, clock: VirtualClock) -> None:
    config = Config(
        host=(HostRule(match="*.example", group="farm"),),
        group=(GroupRule(name="farm", interval=5.0),),
    )
    visitor = Visitor(await make(config), clock)
    for host in (A, B, "c.example"):
        visitor.ask(host, host)
    await clock.elapse(20.0)
    assert visitor.starts == [(A, 0.0), (B, 5.0), ("c.example", 10.0)]


async def test_a_group_bounds_what_is_in_flight(make: Make, clock: VirtualClock) -> None:
    config = Config(
        host=(HostRule(match="*.example", group="farm"),),
        group=(GroupRule(name="farm", concurrency=2),),
    )
    visitor = Visitor(await make(config), clock)
    for host in (A, B, "c.example", "d.example"):
        visitor.ask(host, host, hold=10.0)
    await clock.elapse(9.0)
    assert visitor.names == [A, B]
    await clock.elapse(9.0)
    assert visitor.names == [A, B, "c.example", "d.example"]


async def test_a_registered_domain_shares_one_clock(make: Make, clock: VirtualClock) -> None:
    visitor = Visitor(await make(domain_interval=3.0), clock)
    for host in ("a.shop.co.uk", "b.shop.co.uk", "b.other.co.uk"):
        visitor.ask(host, host)
    await clock.elapse(20.0)
    assert visitor.starts == [
        ("a.shop.co.uk", 0.0),
        ("b.other.co.uk", 0.0),
        ("b.shop.co.uk", 3.0),
    ]


async def test_an_address_is_blocked_when_two_of_its_hosts_refuse(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(address_interval=0.0), clock)
    address = ("address:203.0.113.9",)
    for host in (A, B):
        visitor.ask(host, host, hold=None, scopes=address)
        await clock.settle()
        visitor.grants[host].report(429, retry_after=100.0)
        visitor.grants[host].release()
    visitor.ask("third", "c.example", scopes=address)
    await clock.elapse(99.0)
    assert visitor.names == [A, B]
    await clock.elapse(2.0)
    assert visitor.names == [A, B, "third"]


# --- the operator --------------------------------------------------------------------------


async def test_a_paused_host_grants_nothing_until_resumed(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.scheduler.pause(A)
    visitor.ask("page")
    await clock.elapse(100.0)
    assert is_paused(visitor.scheduler, A)
    assert visitor.names == []
    visitor.scheduler.pause(A, paused=False)
    await clock.settle()
    assert visitor.names == ["page"]


async def test_a_blocked_host_grants_nothing_until_the_block_is_lifted(
    visitor: Visitor, clock: VirtualClock
) -> None:
    scheduler = visitor.scheduler
    scheduler.block(A, clock.wall() + 500.0, "maintenance")
    visitor.ask("page")
    await clock.elapse(10.0)
    assert scheduler.blocked(A) == (pytest.approx(clock.wall() + 490.0), "maintenance")
    assert visitor.names == []
    scheduler.block(A, clock.wall() - 1.0)
    await clock.settle()
    assert visitor.names == ["page"]


async def test_an_override_counts_from_now_on(visitor: Visitor, clock: VirtualClock) -> None:
    add_rule(visitor.scheduler, HostRule(match=A, interval=4.0))
    for name in "xy":
        visitor.ask(name)
    await clock.elapse(20.0)
    assert visitor.starts == [("x", 0.0), ("y", 4.0)]


async def test_a_local_fault_holds_pages_back_and_records_nothing(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("failing", hold=None)
    await clock.settle()
    visitor.scheduler.freeze({A})
    for _ in range(5):
        visitor.grants["failing"].report(None, 10.0)
    visitor.grants["failing"].release()
    visitor.ask("page")
    await clock.elapse(60.0)
    assert visitor.names == ["failing"]
    assert not any(view.kind == "back-off" for view in visitor.scheduler.why(A))
    visitor.scheduler.thaw()
    await clock.settle()
    assert visitor.names == ["failing", "page"]


async def test_during_a_local_fault_a_retry_after_is_obeyed(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.scheduler.freeze(set())
    visitor.ask("first", hold=None)
    await clock.settle()
    # Part of a response came before the connection was lost, so it counts as the host's.
    visitor.grants["first"].report(None, 0.1, 30.0)
    visitor.grants["first"].release()
    visitor.ask("next")
    await clock.elapse(29.0)
    assert visitor.names == ["first"]
    await clock.elapse(2.0)
    assert visitor.names == ["first", "next"]


async def test_during_a_local_fault_hosts_that_did_not_fail_go_on(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.scheduler.freeze({"failed.test"})
    visitor.ask("one")
    visitor.ask("two")
    await clock.elapse(60.0)
    assert visitor.names == ["one", "two"]


async def test_failures_counted_during_a_local_fault_are_undone(
    visitor: Visitor, clock: VirtualClock
) -> None:
    for number in range(5):
        visitor.ask(f"{number}", hold=None)
        await clock.elapse(100.0)
        visitor.grants[f"{number}"].report(None, 10.0)
        visitor.grants[f"{number}"].release()
    scheduler = visitor.scheduler
    assert any("errors in a row" in str(view) for view in scheduler.why(A))
    for number in range(5):
        scheduler.forgive(A, f"https://{A}/{number}")
    assert not any("errors in a row" in str(view) for view in scheduler.why(A))
    scheduler.forgive(A, f"https://{A}/0")
    scheduler.forgive("never-met.test", "https://never-met.test/")


async def test_failures_that_were_not_counted_are_not_undone(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def report(name: str, status: int | None) -> None:
        visitor.ask(name, hold=None)
        await clock.elapse(100.0)
        visitor.grants[name].report(status, 10.0)
        visitor.grants[name].release()

    for name, status in [("bad", None), ("good", 200), *[("broken", 500)] * 4, ("bad", None)]:
        await report(name, status)
    scheduler = visitor.scheduler
    for _ in range(3):
        scheduler.forgive(A, f"https://{A}/bad")
    assert any("4 errors in a row" in str(view) for view in scheduler.why(A))


async def test_dry_run_decides_and_counts_and_waits_for_nothing(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(dry_run=True), clock)
    for name in "xyz":
        visitor.ask(name, admit=wish(10.0))
    await clock.settle()
    stats = visitor.scheduler.stats()
    assert visitor.names == ["x", "y", "z"]
    assert (stats.dry_waits, stats.dry_seconds) == (2, 30.0)


class Connection:
    closed = False


async def test_a_response_that_nobody_reads_is_named_to_those_that_wait_for_it(
    make: Make, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, connection = await make(lease_ttl=10.0), Connection()
    visitor = Visitor(scheduler, clock)
    visitor.ask("page", hold=None)
    await clock.settle()
    visitor.grants["page"].hold_while(connection)
    await clock.elapse(15.0)
    assert not caplog.messages, "nobody waits"
    visitor.ask("next")
    with pytest.raises(LeaseTimeout, match="an open lease or response holds it"):
        await scheduler.acquire("u", A, admit=wish(0.0), timeout=0)
    await clock.elapse(10.0)
    (message,) = caplog.messages
    assert message.startswith(
        "requests wait for the response of https://a.example/page, open for 20 s"
    )
    assert any("https://a.example/page" in view.source for view in scheduler.why(A))
    connection.closed = True
    await clock.elapse(10.0)
    assert visitor.names == ["page", "next"]


async def test_why_names_every_clock(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("page", hold=None, admit=wish(10.0))
    await clock.settle()
    visitor.grants["page"].report(429, retry_after="120")
    said = {view.kind: view for view in visitor.scheduler.why(A)}
    assert said["next"].source == (
        "twice the usual 10 s since a 429 at 14:13; the usual rate is tried again at 15:13"
    )
    assert said["block"].source == "429, Retry-After 120"
    assert said["block"].seconds == pytest.approx(120.0)
    assert said["in_flight"].source == "busy x1; by https://a.example/page since 14:13:20"
    assert visitor.scheduler.why("unknown.example") == ()


async def test_when_due_calls_once_and_takes_no_lease(
    visitor: Visitor, clock: VirtualClock
) -> None:
    told: list[float] = []
    visitor.ask("page")
    await clock.settle()
    visitor.scheduler.when_due(A, lambda: told.append(clock.monotonic() - 1000.0))
    cancelled = visitor.scheduler.when_due(A, lambda: told.append(-1.0))
    cancelled()
    await clock.elapse(1.0)
    assert told == [1.0]
    visitor.ask("another")
    await clock.settle()
    assert visitor.names == ["page", "another"]


# --- lifecycle -----------------------------------------------------------------------------


async def test_closing_ends_every_wait_with_gate_closed(
    visitor: Visitor, clock: VirtualClock
) -> None:
    visitor.ask("first", hold=None)
    visitor.ask("second")
    await clock.settle()
    await visitor.scheduler.close()
    with pytest.raises(GateClosed):
        await visitor.tasks["second"]
    with pytest.raises(GateClosed):
        await visitor.scheduler.acquire("u", B, admit=wish(0.0))


async def test_close_waits_for_open_leases(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("page", hold=3.0)
    await clock.settle()
    closing = asyncio.create_task(visitor.scheduler.close(drain=10.0))
    await clock.elapse(2.9)
    assert not closing.done()
    await clock.elapse(0.1)
    assert closing.done()


async def test_close_does_not_wait_for_ever(visitor: Visitor, clock: VirtualClock) -> None:
    visitor.ask("page", hold=None)
    await clock.settle()
    closing = asyncio.create_task(visitor.scheduler.close(drain=10.0))
    await clock.elapse(10.0)
    assert closing.done()


async def test_nothing_is_granted_before_open(clock: VirtualClock) -> None:
    scheduler = scheduler_on(clock)
    with pytest.raises(GateClosed):
        await scheduler.acquire("u", A, admit=wish(0.0))


async def test_leases_are_granted_at_the_exact_time_they_are_due(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(), clock)
    odd = 1.0 + 1e-7  # less than a microsecond beyond one
    for name in "xyz":
        visitor.ask(name, admit=wish(odd))
    await clock.elapse(10.0)
    at = [start for _, start in visitor.starts]
    assert at[1] == pytest.approx(odd, abs=1e-9)
    assert at[2] >= at[1] + odd - 1e-9


async def test_a_lease_of_an_earlier_run_is_held_again_without_waiting(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make(default_interval=0.0)
    visitor = Visitor(scheduler, clock)
    # More leases than slots: both are open, whatever the limit.
    first = await scheduler.hold(f"https://{A}/1", A, 600.0)
    second = await scheduler.hold(f"https://{A}/2", A, 600.0)
    visitor.ask("next", admit=wish(None))
    await clock.elapse(30.0)
    assert visitor.names == []
    assert scheduler.stats().in_flight == 2

    first.report(200)
    first.release()
    second.report(200)
    await clock.elapse(30.0)
    assert visitor.names == []
    second.release()
    await clock.elapse(0.0)
    assert visitor.names == ["next"]


async def test_a_lease_held_again_ends_by_itself_and_counts_until_then(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make()
    visitor = Visitor(scheduler, clock)
    await scheduler.hold(f"https://{A}/1", A, 20.0)
    visitor.ask("next", admit=wish(5.0))
    await clock.elapse(60.0)

    assert visitor.starts == [("next", 25.0)]


async def test_hosts_that_did_not_answer_twice_have_at_most_half_of_the_leases(
    make: Make, clock: VirtualClock
) -> None:
    scheduler = await make(max_in_flight=40)
    visitor = Visitor(scheduler, clock)
    for name in ("first", "second"):  # a host that answers
        visitor.ask(name)
        await clock.elapse(2.0)
    for number in range(30):
        visitor.ask(f"silent{number}", f"silent{number}.example", hold=None)
    await clock.settle()
    assert len(visitor.names) == 2 + 20
    visitor.ask("third")
    visitor.tasks["robots"] = asyncio.create_task(_robots(scheduler, visitor))
    await clock.settle()
    assert visitor.names[-2:] == ["third", "robots"]
    # A failure, a lease that is given back and a response head make room for three.
    visitor.grants["silent0"].report(None, 1.0)
    visitor.grants["silent1"].give_back()
    visitor.grants["silent2"].head()
    await clock.settle()
    assert visitor.names[-3:] == ["silent20", "silent21", "silent22"]
    await visitor.cancel("silent23")
    for number in range(3, 23):
        visitor.grants[f"silent{number}"].release()
    await clock.settle()
    assert visitor.names[-6:] == [f"silent{number}" for number in range(24, 30)]


async def _robots(scheduler: Scheduler, visitor: Visitor) -> None:
    visitor.grants["robots"] = await scheduler.acquire_robots(
        "https://new.example/robots.txt", "new.example"
    )
    visitor.starts.append(("robots", 0.0))


async def test_of_few_leases_hosts_that_did_not_answer_twice_may_have_all(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(await make(max_in_flight=16), clock)
    for number in range(20):
        visitor.ask(f"silent{number}", f"silent{number}.example", hold=None)
    await clock.settle()
    assert len(visitor.names) == 16


async def test_a_waiter_whose_timeout_a_block_outlasts_is_refused_at_once(
    visitor: Visitor, clock: VirtualClock
) -> None:
    """Waiting is pointless, whether the block comes before a task joins or later."""
    visitor.ask("first", hold=None)
    visitor.ask("brief", timeout=600.0)
    visitor.ask("patient", timeout=10_000.0)
    visitor.ask("for ever")
    await clock.elapse(5.0)
    visitor.grants["first"].report(503, retry_after=7200)
    visitor.grants["first"].release()
    await clock.elapse(0.0)
    assert visitor.tasks["brief"].done()
    error = visitor.tasks["brief"].exception()
    assert isinstance(error, LeaseTimeout)
    assert error.retry_at is not None
    assert error.retry_at.timestamp() == pytest.approx(clock.wall() + 7200.0)
    assert visitor.scheduler.stats().timeouts == 1
    assert visitor.scheduler.stats().waiting == 2
    await clock.elapse(7300.0)
    assert visitor.names == ["first", "patient", "for ever"]


@pytest.mark.parametrize("how", ["operator", "ledger", "pushed", "domain"])
async def test_every_kind_of_block_refuses_the_waiters_it_outlasts_at_once(
    make: Make, clock: VirtualClock, how: str
) -> None:
    config = Config(
        group=(GroupRule("both", interval=1.0),),
        host=(HostRule(match="*.example", group="both"),) if how == "domain" else (),
    )
    visitor = Visitor(scheduler := await make(config), clock)
    visitor.ask("first", B if how == "domain" else A, hold=None)
    await clock.settle()
    visitor.ask("second", timeout=600.0)
    told: list[str] = []
    scheduler.when_due(A, lambda: told.append("brief"), longest=600.0)
    scheduler.when_due(A, lambda: told.append("patient"), longest=10_000.0)
    undo = scheduler.when_due(A, lambda: told.append("undone"), longest=600.0)
    await clock.elapse(5.0)
    assert told == []
    undo()
    if how == "operator":
        scheduler.block(A, clock.wall() + 7200.0)
    elif how == "ledger":
        scheduler._clock_heard(ScopeClock(A, 5.0, 1.0, 7200.0, "503"))
    elif how == "pushed":
        scheduler._report_heard(Report(A, 7200.0, "503"))
    else:
        [shared] = [name for name in hosts_of(scheduler) if name not in (A, B)]
        scheduler.block(shared, clock.wall() + 7200.0)
    visitor.grants["first"].release()
    await clock.elapse(0.0 if how != "domain" else 1.0)
    assert isinstance(visitor.tasks["second"].exception(), LeaseTimeout)
    assert told == ["brief"]
    # A new watch is notified as early; a watch that accepts a longer block is not.
    scheduler.when_due(A, lambda: told.append("later"), longest=600.0)
    await clock.elapse(1.0)
    assert told == ["brief", "later"]
    await clock.elapse(7300.0)
    assert told == ["brief", "later", "patient"]


async def test_a_block_that_begins_while_robots_txt_is_fetched_refuses_waiters_after_it(
    visitor: Visitor, clock: VirtualClock
) -> None:
    async def refetch() -> None:
        await clock.sleep(2.0)
        visitor.scheduler.block(A, clock.wall() + 7200.0)

    visitor.ask("first", admit=lambda: REFETCH, refetch=refetch, timeout=600.0)
    await clock.elapse(2.0)
    assert isinstance(visitor.tasks["first"].exception(), LeaseTimeout)


async def test_many_waiters_whom_blocks_outlast_are_refused_once_each(
    make: Make, clock: VirtualClock
) -> None:
    visitor = Visitor(scheduler := await make(), clock)
    visitor.ask("first", hold=None)
    for number in range(2500):
        visitor.ask(f"{number}", timeout=600.0)
    await clock.settle()
    for _ in range(3):  # Several blocks come before the waiters are refused.
        scheduler.block(A, clock.wall() + 7200.0)
    await clock.elapse(0.0)
    assert scheduler.stats().timeouts == 2500
    assert scheduler.stats().waiting == 0
    assert all(task.done() for name, task in visitor.tasks.items() if name != "first")
