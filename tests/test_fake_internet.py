"""The judge is judged first: the fake internet does what its tests rely on."""

from __future__ import annotations

import asyncio
import gzip

import aiohttp
import pytest

from gatekeeper.clock import VirtualClock
from tests.internet import (
    Bomb,
    BrokenChunk,
    CloseSilently,
    Conditional,
    Custom,
    Drip,
    Encoded,
    Exchange,
    Fail,
    FakeInternet,
    Hold,
    NeverAnswer,
    Page,
    Raw,
    Reset,
    Stall,
    Truncated,
    has_ipv6,
    html,
    redirect,
)


async def get(net: FakeInternet, url: str, **options: object) -> tuple[int, bytes]:
    async with net.session() as session, session.get(url, **options) as response:
        return response.status, await response.read()


async def test_two_hosts_on_one_address_are_told_apart_by_name(internet: FakeInternet) -> None:
    internet.site("a.test").page("/", "from a")
    internet.site("b.test").page("/", "from b")
    assert await get(internet, "http://a.test/") == (200, b"from a")
    assert await get(internet, "http://b.test/") == (200, b"from b")


async def test_a_path_without_behaviour_is_404(internet: FakeInternet) -> None:
    internet.site("a.test")
    assert (await get(internet, "http://a.test/nowhere"))[0] == 404


async def test_successive_requests_get_successive_behaviours(internet: FakeInternet) -> None:
    internet.site("a.test").on("/", Page(status=503), Page("better"))
    answers = [(await get(internet, "http://a.test/"))[0] for _ in range(3)]
    assert answers == [503, 200, 200]


async def test_an_origin_may_differ_by_port_and_scheme(internet: FakeInternet) -> None:
    internet.site("a.test").page("/", "80")
    internet.site("a.test:8080").page("/", "8080")
    internet.site("https://a.test").page("/", "tls")
    bodies = [
        (await get(internet, url))[1]
        for url in ("http://a.test/", "http://a.test:8080/", "https://a.test/")
    ]
    assert bodies == [b"80", b"8080", b"tls"]


async def test_a_site_of_its_own_address_answers_to_the_literal(internet: FakeInternet) -> None:
    address = internet.address()
    internet.site("a.test", address=address).page("/", "by number")
    port = internet.listener(address).port()
    assert (await get(internet, f"http://{address}:{port}/"))[1] == b"by number"


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here")
async def test_a_site_may_live_on_ipv6(internet: FakeInternet) -> None:
    internet.site("six.test", address="::1").page("/", "six")
    assert (await get(internet, "http://six.test/"))[1] == b"six"
    assert internet.dialled("::1")


async def test_the_log_has_what_was_sent(internet: FakeInternet) -> None:
    site = internet.site("a.test").page("/p")
    async with internet.session() as session:
        await session.post("http://a.test/p?q=1", data=b"body", headers={"X-Y": "z"})
        await session.get("http://a.test/p")
    first, second = site.requests
    assert (first.method, first.target, first.path, first.body) == ("POST", "/p?q=1", "/p", b"body")
    assert first.headers["x-y"] == "z"
    assert first.connection is second.connection
    assert first.ended is not None
    await internet.settle()
    assert first.connection.closed is not None


async def test_a_redirect_chain_leads_over_hosts(internet: FakeInternet) -> None:
    internet.site("a.test").on("/", redirect("http://b.test/x", 301))
    internet.site("b.test").redirect("/x", "/y").on("/y", html("<p>there"))
    async with internet.session() as session, session.get("http://a.test/") as response:
        assert response.content_type == "text/html"
        assert [str(r.url) for r in response.history] == ["http://a.test/", "http://b.test/x"]


async def test_concurrency_is_seen_by_the_server(internet: FakeInternet) -> None:
    hold = Hold(Page("now"))
    site = internet.site("a.test").on("/", hold)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(get(internet, "http://a.test/"))
        for _ in range(3):
            await hold.waiting.acquire()
        hold.release()
    assert site.most_concurrent == 3
    assert [request.concurrent for request in site.requests] == [1, 2, 3]
    assert site.in_flight == 0


async def test_virtual_time_passes_while_a_body_drips(net: FakeInternet) -> None:
    net.site("a.test").on("/", Drip("0123456789", size=1, every=3.0))
    assert (await net.drive(get(net, "http://a.test/")))[1] == b"0123456789"
    assert net.clock.monotonic() == 30.0


async def test_a_page_with_a_delay_ends_that_much_later(net: FakeInternet) -> None:
    net.site("a.test").page("/", "late", delay=5.0)
    assert (await net.drive(get(net, "http://a.test/")))[1] == b"late"
    assert net.requests[0].ended == 5.0


async def test_name_service_may_be_slow(net: FakeInternet) -> None:
    net.site("a.test").page("/")
    net.resolver.delay = (0.1, 0.3)
    await net.drive(get(net, "http://a.test/"))
    assert 0.1 <= net.requests[0].at <= 0.3


@pytest.mark.parametrize("behaviour", [CloseSilently(), Reset(), Raw(b"SMTP hello\r\n\r\n")])
async def test_no_answer_is_an_error_of_the_client(internet: FakeInternet, behaviour) -> None:
    internet.site("a.test").on("/", behaviour)
    with pytest.raises(aiohttp.ClientError):
        await get(internet, "http://a.test/")


@pytest.mark.parametrize(
    "behaviour",
    [
        Truncated("some"),
        Truncated("some", reset=True),
        BrokenChunk("some"),
        BrokenChunk("some", garbage=True),
        Reset(after=b"some"),
        Encoded("x" * 1000, damage="garbage"),
        Encoded("x" * 1000, damage="flipped"),
    ],
    ids=repr,
)
async def test_a_broken_body_is_an_error_of_the_client(internet: FakeInternet, behaviour) -> None:
    internet.site("a.test").on("/", behaviour)
    with pytest.raises(aiohttp.ClientError):
        await get(internet, "http://a.test/")


async def test_a_sound_encoding_is_read(internet: FakeInternet) -> None:
    internet.site("a.test").on("/g", Encoded("plain")).on("/d", Encoded("plain", "deflate"))
    assert (await get(internet, "http://a.test/g"))[1] == b"plain"
    assert (await get(internet, "http://a.test/d"))[1] == b"plain"


async def test_a_bomb_grows_as_it_is_read(internet: FakeInternet) -> None:
    internet.site("a.test").on("/", Bomb(2**22))
    assert len((await get(internet, "http://a.test/"))[1]) == 2**22


async def test_odd_statuses_go_out_as_they_are(internet: FakeInternet) -> None:
    odd = Raw(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\nok")
    internet.site("a.test").on("/", odd)
    assert await get(internet, "http://a.test/") == (299, b"ok")


@pytest.mark.parametrize("behaviour", [NeverAnswer(), Stall()])
async def test_a_silent_server_keeps_the_request_open_until_the_client_goes(
    net: FakeInternet, behaviour
) -> None:
    net.site("a.test").on("/", behaviour)
    task = asyncio.create_task(get(net, "http://a.test/"))
    await net.settle()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await net.settle()
    assert net.requests[0].ended is not None


async def test_conditional_pages_answer_304(internet: FakeInternet) -> None:
    internet.site("a.test").on("/", Conditional(Page("x"), etag='"1"', last_modified="then"))
    assert (await get(internet, "http://a.test/"))[0] == 200
    assert (await get(internet, "http://a.test/", headers={"If-None-Match": '"1"'}))[0] == 304
    assert (await get(internet, "http://a.test/", headers={"If-None-Match": '"2"'}))[0] == 200
    assert (await get(internet, "http://a.test/", headers={"If-Modified-Since": "then"}))[0] == 304


async def test_a_test_may_bring_behaviours_of_its_own(internet: FakeInternet) -> None:
    async def act(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    choose = Custom(choose=lambda request: Page(request.headers["User-Agent"]))
    internet.site("a.test").on("/act", act).on("/choose", choose)
    assert (await get(internet, "http://a.test/act"))[1] == b"hi"
    answer = await get(internet, "http://a.test/choose", headers={"User-Agent": "me/1"})
    assert answer[1] == b"me/1"


@pytest.mark.parametrize("step", [Fail.NXDOMAIN, Fail.SERVFAIL])
async def test_a_look_up_that_fails_is_a_dns_error_of_the_client(
    internet: FakeInternet, step: Fail
) -> None:
    internet.dns("a.test", step)
    async with internet.session() as session:
        with pytest.raises(aiohttp.ClientConnectorDNSError):
            await session.get("http://a.test/")


async def test_an_empty_dns_answer_has_no_address(internet: FakeInternet) -> None:
    internet.dns("a.test", Fail.EMPTY)
    assert await internet.resolver.resolve("a.test", 80) == []


async def test_a_look_up_may_time_out(net: FakeInternet) -> None:
    net.dns("a.test", Fail.TIMEOUT)
    with pytest.raises(OSError, match="Temporary failure"):
        await net.drive(net.resolver.resolve("a.test", 80))
    assert net.clock.monotonic() == 5.0


async def test_answers_change_from_look_up_to_look_up(internet: FakeInternet) -> None:
    internet.dns("r.test", "127.1.0.1", ["127.1.0.2", "127.1.0.3"])
    seen = [[a["host"] for a in await internet.resolver.resolve("r.test", 80)] for _ in range(3)]
    assert seen == [["127.1.0.1"], ["127.1.0.2", "127.1.0.3"], ["127.1.0.2", "127.1.0.3"]]
    assert [query.name for query in internet.resolver.queries] == ["r.test"] * 3


async def test_a_closed_port_refuses(internet: FakeInternet) -> None:
    internet.refusing("a.test")
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(internet, "http://a.test/")


async def test_a_rude_host_resets_each_connection(internet: FakeInternet) -> None:
    address = internet.rude("a.test")
    with pytest.raises(aiohttp.ClientError):
        await get(internet, "http://a.test/")
    assert internet.dialled(address)


async def test_a_black_hole_never_connects(net: FakeInternet) -> None:
    address = net.blackhole("a.test")
    task = asyncio.create_task(get(net, "http://a.test/"))
    await net.settle()
    assert not task.done()
    assert not net.dialled(address)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("tls", ["self-signed", "expired", "wrong-name"])
async def test_bad_certificates_are_refused_by_the_client(internet: FakeInternet, tls) -> None:
    internet.site("a.test", tls=tls).page("/")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await get(internet, "https://a.test/")
    assert internet.requests == []


async def test_https_fails_where_the_port_speaks_plain_http(internet: FakeInternet) -> None:
    internet.site("a.test", tls="none", address=internet.address()).page("/")
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(internet, "https://a.test/")


async def test_a_fault_in_a_behaviour_reaches_the_test() -> None:
    async def faulty(exchange: Exchange) -> None:
        exchange.close()
        raise ZeroDivisionError

    async def visit() -> None:
        async with FakeInternet() as net:
            net.site("a.test").on("/", faulty)
            await asyncio.gather(get(net, "http://a.test/"), return_exceptions=True)

    with pytest.raises(ExceptionGroup, match="in the fake internet"):
        await visit()


async def test_drive_says_when_nothing_can_happen_any_more() -> None:
    async with FakeInternet(clock=VirtualClock()) as net:
        with pytest.raises(AssertionError, match="virtual seconds"):
            await net.drive(net.clock.sleep(100), limit=10)


async def test_two_hundred_hosts_answer_at_once(internet: FakeInternet) -> None:
    body = gzip.compress(b"page " * 100)
    for number in range(200):
        internet.site(f"host{number}.test").otherwise(Page(body))
    async with internet.session() as session:

        async def visit(number: int) -> int:
            total = 0
            for page in range(5):
                async with session.get(f"http://host{number}.test/{page}") as response:
                    total += len(await response.read())
            return total

        totals = await asyncio.gather(*(visit(number) for number in range(200)))
    assert set(totals) == {5 * len(body)}
    assert len(internet.requests) == 1000
