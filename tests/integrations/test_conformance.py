"""The conformance suite: the promises of every integration, judged by the sites' logs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from gatekeeper import Deferred, Denied, GateClosed, InvalidURL, LeaseTimeout, NotYet, Reason
from gatekeeper.fetching.faults import MIN_FAILED_SITES
from tests.conformance.ways import AGENT
from tests.integrations.rigs import Rig
from tests.internet import Fail, FakeInternet, Hold, Page, Reset, Stall, redirect
from tests.waiting_support import until

DENYING = "User-agent: *\nDisallow: /private\n"


async def settled(rig: Rig) -> None:
    """Wait until every lease has ended; the test's own timeout is the limit."""
    while await rig.in_flight():
        await asyncio.sleep(0)


async def test_a_denied_url_never_reaches_the_server(internet: FakeInternet, rig_on: Any) -> None:
    site = internet.site("a.test").robots(DENYING).page("/x", "hello")
    rig = await rig_on(internet)
    assert (await rig.get("http://a.test/x")).text == "hello"
    with pytest.raises(Denied) as caught:
        await rig.get("http://a.test/private")
    assert isinstance(caught.value, rig.base_error())
    assert not isinstance(caught.value, Deferred)
    assert caught.value.decision.rule.line == 2  # type: ignore[union-attr]
    assert site.paths == ["/robots.txt", "/x"]


async def test_an_unreachable_file_defers(internet: FakeInternet, rig_on: Any) -> None:
    site = internet.site("a.test").robots(Page("", status=503)).page("/x")
    rig = await rig_on(internet)
    with pytest.raises(Deferred) as caught:
        await rig.get("http://a.test/x")
    assert isinstance(caught.value, rig.base_error())
    assert caught.value.retry_at is not None
    assert set(site.paths) == {"/robots.txt"}


async def test_each_redirect_hop_is_decided(internet: FakeInternet, rig_on: Any) -> None:
    internet.site("a.test").robots("").on("/x", redirect("http://b.test/private"))
    other = internet.site("b.test").robots(DENYING).page("/y", "there")
    internet.sites["a.test"].on("/y", redirect("http://b.test/y"))
    rig = await rig_on(internet)
    with pytest.raises(Denied) as caught:
        await rig.get("http://a.test/x")
    assert caught.value.decision.origin == "http://b.test"
    assert (await rig.get("http://a.test/y")).text == "there"
    assert other.paths == ["/robots.txt", "/y"]
    await settled(rig)


async def test_each_redirect_hop_takes_a_lease(internet: FakeInternet, rig_on: Any) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.05\n")
    site.on("/1", redirect("/2")).on("/2", redirect("/3")).page("/3", "there")
    rig = await rig_on(internet)
    assert (await rig.get("http://a.test/1")).text == "there"
    assert site.paths == ["/robots.txt", "/1", "/2", "/3"]
    assert min(site.gaps()) >= 0.05


async def test_crawl_delay_is_kept_between_any_two(internet: FakeInternet, rig_on: Any) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.05\n").page("/", "hello")
    rig = await rig_on(internet)
    found = await asyncio.gather(*(rig.get("http://a.test/") for _ in range(6)))
    assert [one.text for one in found] == ["hello"] * 6
    assert len(site.paths) == 7
    assert min(site.gaps()) >= 0.05
    assert site.most_concurrent == 1


async def test_a_retry_after_blocks_only_its_host(internet: FakeInternet, rig_on: Any) -> None:
    busy = Page("busy", status=429, headers={"Retry-After": "300"})
    site = internet.site("a.test").robots("").on("/x", busy)
    internet.site("b.test").robots("").page("/", "free")
    rig = await rig_on(internet)
    assert (await rig.get("http://a.test/x")).status == 429
    await settled(rig)
    found = await rig.ask("try_acquire", "http://a.test/x")
    assert isinstance(found, NotYet)
    assert found.due_at.timestamp() - internet.clock.wall() > 200
    assert (await rig.get("http://b.test/")).text == "free"
    if rig.gives_up:
        with pytest.raises(LeaseTimeout, match=r"may not be asked|no lease") as late:
            await rig.get("http://a.test/x")
        assert isinstance(late.value, rig.base_error())
    assert site.paths == ["/robots.txt", "/x"]


@pytest.mark.parametrize("cached", [{}, {"Age": "0"}, {"Age": "30"}])
async def test_a_spent_quota_slows_unless_a_cache_tells_of_it(
    internet: FakeInternet, rig_on: Any, cached: dict[str, str]
) -> None:
    """HTTP-11: a cached response has the quota of another client (RFC 9111 section 5.1)."""
    page = Page("x", headers={"RateLimit": '"default";r=0;t=300'} | cached)
    internet.site("a.test").robots("").on("/x", page)
    rig = await rig_on(internet)
    await rig.get("http://a.test/x")
    await settled(rig)
    clocks = await rig.ask("why", "a.test")
    assert any("RateLimit" in clock.source for clock in clocks) is not bool(cached)


@pytest.mark.parametrize("budget", ["max_pages_per_day", "max_bytes_per_day"])
async def test_a_budget_defers_until_its_day_is_over(
    internet: FakeInternet, rig_on: Any, budget: str
) -> None:
    site = internet.site("a.test").robots("").page("/1", "x" * 100).page("/2")
    rig = await rig_on(internet, host=[{"match": "a.test", budget: 1}])
    await rig.get("http://a.test/1")
    await settled(rig)
    with pytest.raises(Deferred) as caught:
        await rig.get("http://a.test/2")
    assert isinstance(caught.value, rig.base_error())
    assert caught.value.decision.reason is Reason.BUDGET
    assert caught.value.retry_at is not None
    assert caught.value.retry_at.timestamp() > internet.clock.wall()
    assert f"{caught.value.retry_at:%Y-%m-%dT%H:%M:%SZ}" in str(caught.value)
    assert site.paths == ["/robots.txt", "/1"]


async def test_a_slow_host_delays_no_other_host(internet: FakeInternet, rig_on: Any) -> None:
    hold = Hold(Page("late"))
    internet.site("slow.test").robots("").on("/", hold)
    internet.site("a.test").robots("").page("/", "free")
    rig = await rig_on(internet)
    slow = asyncio.create_task(rig.get("http://slow.test/"))
    await hold.waiting.acquire()
    for _ in range(3):
        assert (await rig.get("http://a.test/")).text == "free"
    assert not slow.done()
    hold.release()
    assert (await slow).text == "late"


async def test_many_requests_for_a_host_with_a_long_interval_delay_no_other_host(
    internet: FakeInternet, rig_on: Any
) -> None:
    """As many requests wait for them as Scrapy sends at a time (CONCURRENT_REQUESTS)."""
    far = internet.site("far.test").robots("User-agent: *\nCrawl-delay: 900\n")
    internet.site("a.test").robots("").page("/", "free")
    rig = await rig_on(internet)
    if rig.threads:
        return  # each request waits in its own thread, which can't be cancelled
    waiting = [asyncio.create_task(rig.get(f"http://far.test/{number}")) for number in range(17)]
    async with asyncio.timeout(30):
        await until(lambda: far.paths)
        for _ in range(3):
            assert (await rig.get_beside("http://a.test/")).text == "free"
    assert far.paths == ["/robots.txt"]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_streamed_body_holds_the_slot_until_closed(
    internet: FakeInternet, rig_on: Any
) -> None:
    site = internet.site("a.test").robots("").page("/1", "x" * 100).page("/2", "second")
    rig = await rig_on(internet)
    if not rig.streams:
        return  # it returns whole pages
    response = await rig.begin("http://a.test/1")
    await internet.settle()
    assert await rig.in_flight() == 1
    with contextlib.suppress(LeaseTimeout):
        # The task that holds the lease gets an error, since it would wait for itself; others wait.
        found = await rig.ask("try_acquire", "http://a.test/2")
        assert isinstance(found, NotYet)
    assert "/2" not in site.paths
    await rig.finish(response)
    await settled(rig)
    assert (await rig.get("http://a.test/2")).text == "second"
    assert site.most_concurrent == 1


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # caused by requests
async def test_a_dropped_response_frees_the_lease(internet: FakeInternet, rig_on: Any) -> None:
    internet.site("a.test").robots("").on("/1", Stall("x" * 100)).page("/2", "second")
    rig = await rig_on(internet)
    if not rig.drops:
        return  # it returns whole pages
    await rig.drop("http://a.test/1")
    while await rig.in_flight():
        gc.collect()  # a thread may hold a reference for a moment longer
        for _ in range(100):
            await asyncio.sleep(0)
    assert (await rig.get("http://a.test/2")).text == "second"


async def test_a_cancelled_request_frees_the_lease(internet: FakeInternet, rig_on: Any) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/1", hold).page("/2", "second")
    rig = await rig_on(internet)
    if not rig.cancels:
        return  # a thread can't be cancelled; interruptions are tested in test_sync
    first = asyncio.create_task(rig.get("http://a.test/1"))
    await hold.waiting.acquire()
    waiting = asyncio.create_task(rig.get("http://a.test/2"))
    await internet.settle()
    for task in (waiting, first):
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    if not rig.stops:
        hold.release()  # the request goes on, and holds its host until it is done
    await settled(rig)
    assert (await rig.get("http://a.test/2")).text == "second"


async def test_a_failed_request_is_the_library_s_error_and_frees_the_lease(
    internet: FakeInternet, rig_on: Any
) -> None:
    internet.site("a.test").robots("").on("/1", Reset())
    rig = await rig_on(internet)
    with pytest.raises(rig.base_error()) as caught:
        await rig.get("http://a.test/1")
    assert not isinstance(caught.value, Denied)
    await settled(rig)


async def test_a_closed_client_frees_the_lease(internet: FakeInternet, rig_on: Any) -> None:
    internet.site("a.test").robots("").on("/1", Stall("x" * 100))
    rig = await rig_on(internet)
    if not rig.drops:
        return  # it returns whole pages
    response = await rig.begin("http://a.test/1")
    assert await rig.in_flight() == 1
    await rig.close()
    await settled(rig)
    await rig.finish(response)


@pytest.mark.parametrize("sent", ["otherbot/2.0", "nicebot/1.0"])
async def test_the_identity_sent_is_the_one_judged(
    internet: FakeInternet, rig_on: Any, sent: str
) -> None:
    text = "User-agent: otherbot\nDisallow: /\n\nUser-agent: examplebot\nDisallow: /private\n"
    site = internet.site("a.test").robots(text).page("/x").page("/private")
    rig = await rig_on(internet)
    await rig.get("http://a.test/x")
    assert site.requests[-1].headers["User-Agent"] == AGENT  # replaces the library's default
    if not rig.names:
        return  # it has only one User-Agent
    if sent == "otherbot/2.0":
        with pytest.raises(Denied) as caught:
            await rig.get("http://a.test/x", User_Agent=sent)
        assert caught.value.decision.user_agent == "otherbot"
        assert len(site.paths) == 2
    else:
        await rig.get("http://a.test/private", User_Agent=sent)
        assert site.requests[-1].headers["User-Agent"] == sent


async def test_while_the_gate_is_down_nothing_is_sent(internet: FakeInternet, rig_on: Any) -> None:
    site = internet.site("a.test").robots("").page("/x")
    rig = await rig_on(internet, max_wait=1.0)
    await rig.get("http://a.test/x")
    await settled(rig)
    if rig.sidecar is not None:
        await rig.sidecar.stop()
        with pytest.raises(Deferred, match="gate_unreachable") as caught:
            await rig.get("http://a.test/x")
        assert isinstance(caught.value, rig.base_error())
    elif rig.closes_gate:
        await rig.close_gate()
        with pytest.raises(GateClosed):
            await rig.get("http://a.test/x")
    assert site.paths == ["/robots.txt", "/x"]


async def test_a_private_address_is_refused(internet: FakeInternet, rig_on: Any) -> None:
    internet.site("a.test").robots("").on("/x", redirect("http://169.254.169.254/latest"))
    rig = await rig_on(internet)  # URLs are checked even without a guard at the socket
    for url in ("http://10.1.2.3/", "http://a.test/x", "http://[::ffff:10.1.2.3]/"):
        with pytest.raises(Denied, match="blocked") as caught:
            await rig.get(url)
        assert isinstance(caught.value, rig.base_error())
        assert caught.value.decision.user_agent == "examplebot"  # not the library's default
    assert not internet.dialled("10.1.2.3")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a.test:22/", "port 22"),
        ("http://10.1.2.3/", "addresses that are not public"),
        ("http://printer.internal/", "names of an inner network"),
    ],
)
async def test_a_denied_request_has_the_note_of_a_check(
    internet: FakeInternet, rig_on: Any, url: str, said: str
) -> None:
    """Not with the note "what this name or a redirect leads to" in every case."""
    rig = await rig_on(internet, guard={"allow": ["127.0.0.0/8", "*.test"]})
    with pytest.raises(Denied, match=said) as caught:
        await rig.get(url)
    assert caught.value.decision.note == (await rig.ask("check", url)).note


async def test_a_name_rebound_to_a_private_address_is_refused(
    internet: FakeInternet, rig_on: Any
) -> None:
    """The first, harmless answer is for the robots.txt, the second for the page."""
    site = internet.site("a.example").robots("").page("/")
    rig = await rig_on(internet, guard={"allow": ["127.0.0.0/8"]})
    if not rig.guarded:
        return
    await rig.ask("check", "http://a.example/")
    internet.dns("a.example", "10.1.2.3")
    with pytest.raises(Denied, match="blocked") as caught:
        await rig.get("http://a.example/")
    assert isinstance(caught.value, rig.base_error())
    assert site.paths == ["/robots.txt"]
    await settled(rig)


async def test_text_that_is_no_url_is_an_error_and_no_denial(
    internet: FakeInternet, rig_on: Any
) -> None:
    rig = await rig_on(internet)
    with pytest.raises((InvalidURL, *rig.base_error(), ValueError)) as caught:
        await rig.get("http://a%zz.test/")
    assert not isinstance(caught.value, Denied)  # not refused by the guard


async def test_tls_is_checked_by_name(internet: FakeInternet, rig_on: Any) -> None:
    internet.listener().port(tls=True)  # called in this thread, so that it serves in its loop
    internet.site("a.test").page("/", "safe")
    internet.site("wrong.test", tls="wrong-name").page("/")
    rig = await rig_on(internet, host=[{"match": "*", "robots": "allow"}])
    if not rig.checks_certificates:
        return  # up to the library
    assert (await rig.get("https://a.test/")).text == "safe"
    with pytest.raises(rig.base_error()):
        await rig.get("https://wrong.test/")


@pytest.mark.parametrize("how", [Fail.SERVFAIL, Fail.NXDOMAIN, "refused"])
async def test_pages_that_could_not_be_dialled_are_evidence_of_a_lost_uplink(
    internet: FakeInternet, rig_on: Any, how: str
) -> None:
    """Like robots.txt files and the pages of a polite session."""
    names = [f"a{number}.test" for number in range(MIN_FAILED_SITES + 1)]
    for name in names:
        internet.dns(name, how) if isinstance(how, Fail) else internet.refusing(name)
    rig = await rig_on(internet, host=[{"match": "*", "robots": "allow"}])
    asked = (rig.get(f"http://{name}/") for name in names)
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, rig.base_error())
    await settled(rig)
    # Failures of a sidecar's client say nothing about the sidecar's own uplink.
    lost = how is Fail.SERVFAIL and rig.sidecar is None
    assert (await rig.stats()).directory.local_fault is lost
