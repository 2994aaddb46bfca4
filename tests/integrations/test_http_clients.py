"""httpx, httpx2 and requests: what the conformance suite does not cover."""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import pickle
import threading
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper import (
    Config,
    ConfigError,
    Deferred,
    Denied,
    Gatekeeper,
    Lease,
    LeaseTimeout,
    Reason,
    StorageError,
    SyncGatekeeper,
    Verdict,
)
from gatekeeper.config import IdentityConfig
from gatekeeper.fetching.faults import MIN_FAILED_SITES
from gatekeeper.integrations import hops
from gatekeeper.session import Guard
from gatekeeper.signing import PublicKey, new_key
from gatekeeper.sync import SyncLease
from tests.conformance.ways import AGENT, settings
from tests.gate_support import decided
from tests.internet import FakeInternet, Hold, Page, Raw
from tests.internet.certs import server_context
from tests.test_signing import as_sent, verify

LIBRARIES = ["httpx", "httpx2"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def transports(library: Any) -> Any:
    return importlib.import_module(f"gatekeeper.integrations.{library.__name__}")


async def test_an_open_lease_is_adopted_by_a_request(internet: FakeInternet, library: Any) -> None:
    site = internet.site("a.test").robots("").page("/x", "mine")
    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        library.AsyncClient(transport=transport(gate)) as client,
    ):
        async with gate.lease("http://a.test/x") as lease:
            assert (await client.get("http://a.test/x")).text == "mine"
            assert not lease.ended
            with pytest.raises(LeaseTimeout):  # the lease is in use: a request would wait for it
                await client.get("http://a.test/x")
        assert lease.ended
    assert site.paths == ["/robots.txt", "/x"]


async def test_the_wait_for_a_lease_does_not_count_for_the_timeout(
    internet: FakeInternet, library: Any
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 1.2\n").page("/x", "mine")
    transport = transports(library).PoliteTransport
    async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate:
        timeout = library.Timeout(1.0)  # A busy machine may take tenths of it to connect.
        async with library.AsyncClient(transport=transport(gate), timeout=timeout) as client:
            for _ in range(2):
                assert (await client.get("http://a.test/x")).status_code == 200


async def test_event_hooks_see_each_hop(internet: FakeInternet, library: Any) -> None:
    internet.site("a.test").robots("").redirect("/x", "/y").page("/y", "there")
    seen: list[str] = []

    async def note(response: Any) -> None:
        seen.append(f"{response.status_code} {response.url.path}")

    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        library.AsyncClient(
            transport=transport(gate), event_hooks={"response": [note]}, follow_redirects=True
        ) as client,
    ):
        await client.get("http://a.test/x")
    assert seen == ["302 /x", "200 /y"]


async def test_another_transport_needs_guarded_false(internet: FakeInternet, library: Any) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    polite = transports(library).PoliteTransport
    mine = library.MockTransport(lambda request: library.Response(200, text=str(request.url)))
    async with Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate:
        with pytest.raises(ConfigError, match="guarded=False"):
            polite(gate, mine)
        transport = polite(gate, mine, guarded=False)
        assert transport.guarded is False
        async with library.AsyncClient(transport=transport) as client:
            assert (await client.get("http://a.test/x")).text == "http://a.test/x"
            with pytest.raises(Denied):
                await client.get("http://a.test/private")


async def test_a_task_that_would_wait_for_its_own_stream_is_refused(
    internet: FakeInternet, library: Any
) -> None:
    internet.site("a.test").robots("").page("/x", "mine" * 100)
    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        library.AsyncClient(transport=transport(gate)) as client,
        client.stream("GET", "http://a.test/x"),
    ):
        with pytest.raises(library.RequestError) as caught:
            await client.get("http://a.test/y")
        assert isinstance(caught.value, LeaseTimeout)


def polite_requests(gate: SyncGatekeeper, **options: Any) -> Any:
    requests = pytest.importorskip("requests")
    from gatekeeper.integrations.requests import PoliteAdapter

    session = requests.Session()
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, PoliteAdapter(gate, **options))
    return session


async def test_a_gate_never_waits_in_its_loop_for_the_lease_of_another_one(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them would wait for each other for ever."""
    site = internet.site("a.test").robots("").page("/x", "mine")
    threads: set[threading.Thread] = set()
    claim = SyncLease.claim

    def noted(lease: SyncLease, url: str) -> bool:
        threads.add(threading.current_thread())
        return claim(lease, url)

    monkeypatch.setattr(SyncLease, "claim", noted)

    def crawl() -> bool:
        one = SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver)
        other = SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver)
        with one, other, polite_requests(other) as session, one.lease("http://a.test/x"):
            assert session.get("http://a.test/x").text == "mine"
        return threads == {threading.current_thread()}

    assert await asyncio.to_thread(crawl)
    assert site.paths == ["/robots.txt", "/x"]


async def test_another_thread_adopts_no_lease_of_asynchronous_code(internet: FakeInternet) -> None:
    """`to_thread` copies the context: the lease was reported and ended outside its loop. Another
    lease of the same sidecar would wait for the end of this one."""
    site = internet.site("a.test").robots("").page("/x", "mine")
    with SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as blocking:
        async with (
            Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            gate.lease("http://a.test/x") as lease,
        ):
            with (
                polite_requests(blocking) as session,
                pytest.raises(LeaseTimeout, match="its lease is open in asynchronous code"),
            ):
                await asyncio.to_thread(session.get, "http://a.test/x")
            assert (lease.reported, lease.ended) == (False, False)
    assert site.paths == ["/robots.txt"]


async def test_each_retry_of_urllib3_takes_a_lease(internet: FakeInternet) -> None:
    retries = pytest.importorskip("urllib3").Retry(3, status_forcelist=[500], backoff_factor=0)
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    site.on("/x", Page("", status=500), Page("", status=500), Page("there"))
    site.on("/never", Page("", status=500))

    def crawl() -> None:
        requests = pytest.importorskip("requests")
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate, max_retries=retries) as session,
        ):
            assert session.get("http://a.test/x").text == "there"
            with pytest.raises(requests.exceptions.RetryError):
                session.get("http://a.test/never")

    await asyncio.to_thread(crawl)
    assert site.paths == ["/robots.txt", *["/x"] * 3, *["/never"] * 4]
    assert min(site.gaps()) >= 0.1


async def test_each_retry_after_a_refused_connection_takes_a_lease(internet: FakeInternet) -> None:
    internet.refusing("a.test")
    config = settings(host=[{"match": "*", "robots": "allow"}])

    def crawl() -> int:
        requests = pytest.importorskip("requests")
        with (
            SyncGatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
            polite_requests(gate, max_retries=2) as session,
        ):
            with pytest.raises(requests.ConnectionError):
                session.get("http://a.test/x")
            return int(gate.stats().pacing.granted)  # type: ignore[union-attr]

    assert await asyncio.to_thread(crawl) == 3


async def test_a_proxy_of_a_request_is_refused(internet: FakeInternet) -> None:
    internet.site("a.test").robots("")

    def crawl() -> None:
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            with pytest.raises(ConfigError, match="proxy"):
                session.get("http://a.test/x", proxies={"http": "http://127.0.0.1:9"})
            assert gate.stats().pacing.in_flight == 0  # type: ignore[union-attr]

    await asyncio.to_thread(crawl)


@pytest.mark.parametrize("url", ["http://[::1", "ftp://a.test/", "http://a.test:99999/"])
async def test_a_wrong_url_is_an_error_of_the_library_and_of_ours(
    internet: FakeInternet, library: Any, url: str
) -> None:
    found = transports(library)
    assert issubclass(found.RequestInvalidURL, library.InvalidURL)
    assert issubclass(found.RequestInvalidURL, library.UnsupportedProtocol)
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        library.AsyncClient(transport=found.PoliteTransport(gate)) as client,
    ):
        with pytest.raises((library.InvalidURL, library.UnsupportedProtocol)):
            await client.get(url)


async def test_a_wrong_url_is_the_error_of_requests(internet: FakeInternet) -> None:
    requests = pytest.importorskip("requests")

    def work() -> None:
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for url in ("http://a.test:99999/", "http://a..test/", "http://\u2024/"):
                with pytest.raises(requests.exceptions.InvalidURL):
                    session.get(url)

    await asyncio.to_thread(work)


async def test_a_session_of_requests_refuses_to_be_pickled_or_copied(
    internet: FakeInternet,
) -> None:
    """Its copy would have no gate."""

    def work() -> None:
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for call in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match="make one for the gate of each process"):
                    call(session)

    await asyncio.to_thread(work)


def test_errors_tell_a_retrying_library_whether_a_retry_may_help() -> None:
    assert (Denied.retryable, Deferred.retryable) == (False, True)


async def test_requests_reuses_its_connections_under_their_names(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("").page("/x", "mine")

    def crawl() -> None:
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for _ in range(3):
                assert session.get("http://a.test/x").text == "mine"

    await asyncio.to_thread(crawl)
    pages = [request for request in site.requests if request.target == "/x"]
    assert {request.host for request in pages} == {"a.test"}
    assert len({id(request.connection) for request in pages}) == 1


@pytest.fixture
def signing(tmp_path: Path) -> tuple[Config, PublicKey]:
    """Return a configuration with a signing key, and the public key."""
    path = tmp_path / "bot.pem"
    public = new_key(path).public
    identity = IdentityConfig(key=str(path), directory="https://bot.example")
    return msgspec.structs.replace(settings(), identity=identity), public


async def test_each_hop_over_httpx_is_signed(
    internet: FakeInternet, library: Any, signing: tuple[Config, PublicKey]
) -> None:
    config, public = signing
    internet.site("a.test").robots("").redirect("/x", "/y").page("/y", "there")
    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
        library.AsyncClient(transport=transport(gate), follow_redirects=True) as client,
    ):
        assert (await client.get("http://a.test/x")).text == "there"
    assert [request.path for request in internet.requests] == ["/robots.txt", "/x", "/y"]
    for request in internet.requests:
        assert len(request.headers.getall("Signature")) == 1
        verify(as_sent(request), public)


async def test_each_hop_over_requests_is_signed(
    internet: FakeInternet, signing: tuple[Config, PublicKey]
) -> None:
    config, public = signing
    requests = pytest.importorskip("requests")
    adapter = importlib.import_module("gatekeeper.integrations.requests").PoliteAdapter
    internet.site("a.test").robots("").redirect("/x", "/y").page("/y", "there")

    def crawl() -> str:
        with (
            SyncGatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
            requests.Session() as session,
        ):
            session.mount("http://", adapter(gate))
            text: str = session.get("http://a.test/x?q=1").text
            return text

    assert await asyncio.to_thread(crawl) == "there"
    assert [request.path for request in internet.requests] == ["/robots.txt", "/x", "/y"]
    for request in internet.requests:
        assert len(request.headers.getall("Signature")) == 1
        verify(as_sent(request), public)


@pytest.mark.parametrize("why", ["silent", "no route", "silent or refused"])
async def test_connections_that_time_out_are_evidence_of_a_lost_uplink(
    internet: FakeInternet, library: Any, why: str
) -> None:
    """An address that refuses the connection was reached, which shows that the uplink works."""
    names = [f"a{number}.test" for number in range(MIN_FAILED_SITES + 1)]
    for name in names:
        addresses = [internet.blackhole(name)]
        if why == "silent or refused":
            addresses.append(internet.refusing(name))
        internet.dns(name, addresses)
    options = {"local_address": "192.0.2.1"} if why == "no route" else {}  # not a local address
    config = settings(host=[{"match": "*", "robots": "allow"}])
    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
        library.AsyncClient(
            transport=transport(gate, **options), timeout=0.2 if why == "silent" else 2.0
        ) as client,
    ):
        errors = await asyncio.gather(
            *(client.get(f"http://{name}/") for name in names), return_exceptions=True
        )
        silent = why == "silent"
        assert {type(error).__name__ for error in errors} == {
            "ConnectTimeout" if silent else "ConnectError"
        }
        assert gate.stats().directory.local_fault is (why != "silent or refused")


async def test_connections_of_requests_that_time_out_are_evidence_of_a_lost_uplink(
    internet: FakeInternet,
) -> None:
    requests = pytest.importorskip("requests")
    names = [f"a{number}.test" for number in range(MIN_FAILED_SITES + 1)]
    for name in names:
        internet.blackhole(name)
    config = settings(host=[{"match": "*", "robots": "allow"}])

    def crawl() -> bool:
        with (
            SyncGatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for name in names:
                with pytest.raises(requests.ConnectTimeout):
                    session.get(f"http://{name}/", timeout=0.02)
            return bool(gate.stats().directory.local_fault)  # type: ignore[union-attr]

    assert await asyncio.to_thread(crawl)


async def test_a_lease_of_a_request_without_a_response_awaits_its_head(
    internet: FakeInternet, library: Any
) -> None:
    """Its lease awaits a head, as for a request of a polite session."""
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/x", hold)
    transport = transports(library).PoliteTransport
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        library.AsyncClient(transport=transport(gate)) as client,
    ):
        asked = asyncio.create_task(client.get("http://a.test/x"))
        await hold.waiting.acquire()
        [lease] = gate.parts.leases.holdings.everybody()
        assert lease.awaits_head
        hold.release()
        assert (await asked).text == "late"
        assert not lease.awaits_head


@pytest.mark.parametrize("name", ["httpx", "httpx2", "requests", "scrapy", "crawlee"])
def test_errors_survive_pickling(name: str) -> None:
    """As in crawlers that work in several processes."""
    pytest.importorskip(name)
    module = importlib.import_module(f"gatekeeper.integrations.{name}")
    decision = decided(Verdict.DEFER, reason=Reason.BUDGET)
    late = module.RequestLeaseTimeout("http://a.test/", "no lease", retry_at=datetime.now(UTC))
    for error in (
        module.RequestDenied(decision),
        module.RequestDeferred(decision),
        module.RequestInvalidURL("http://a%zz.test/", "no"),
        late,
    ):
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error)
        assert str(other) == str(error)
    assert pickle.loads(pickle.dumps(late)).retry_at == late.retry_at


@pytest.mark.parametrize("chunked", [False, True])
async def test_every_byte_that_requests_reads_counts(internet: FakeInternet, chunked: bool) -> None:
    """urllib3 counts the last ones after it has released the connection, and chunks never."""
    head = "Transfer-Encoding: chunked" if chunked else "Content-Length: 60"
    body = "1e\r\n" + "x" * 30 + "\r\n" + "1e\r\n" + "x" * 30 + "\r\n0\r\n\r\n"
    page = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n" + (body if chunked else "x" * 60)
    internet.site("a.test").robots("").on("/x", Raw(page.encode(), then="keep"))
    config = settings(host=[{"match": "a.test", "max_bytes_per_day": 240}])

    def crawl() -> None:
        with (
            SyncGatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for _ in range(2):
                assert len(session.get("http://a.test/x").content) == 60
            with session.get("http://a.test/x", stream=True) as response:
                assert [len(part) for part in response.iter_content(30)] == [30, 30]
            with session.get("http://a.test/x", stream=True) as response:
                assert len(response.raw.read()) == 60
            with pytest.raises(Deferred, match="budget"):
                session.get("http://a.test/x")

    await asyncio.to_thread(crawl)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # caused by requests
@pytest.mark.parametrize("begun", [False, True])
async def test_a_body_that_requests_drops_frees_the_lease_without_a_garbage_collection(
    internet: FakeInternet, begun: bool
) -> None:
    internet.site("a.test").robots("").page("/x", "x" * 100)

    def crawl() -> None:
        with (
            SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
            polite_requests(gate) as session,
        ):
            for _ in range(3):
                response = session.get("http://a.test/x", stream=True)
                assert response.status_code == 200
                if begun:
                    assert next(response.iter_content(10))
                del response

    gc.disable()
    try:
        await asyncio.to_thread(crawl)
    finally:
        gc.enable()


def test_an_attempt_to_connect_never_has_a_timeout_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timeout of 0 a socket does not wait, and its error is not a timeout."""
    now = [100.0]
    monkeypatch.setattr(hops.time, "monotonic", lambda: now[0])
    found = [("127.0.0.1", 1), ("127.0.0.2", 2), ("127.0.0.3", 3)]
    seconds = []
    for _, _, each in hops.attempts(Guard(Config()), found, 6.0, 100.0):
        seconds.append(each)
        now[0] += 5.0
    assert seconds == [2.0, 0.5, 0.001]
    unlimited = hops.attempts(Guard(Config()), found, None, 100.0)
    assert [each for _, _, each in unlimited] == [20.0, 30.0, 60.0]


@pytest.mark.parametrize("kind", ["httpx", "httpx2", "requests"])
async def test_a_report_that_cannot_be_stored_raises_and_frees_the_lease(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    client = pytest.importorskip(kind)
    internet.site("a.test").robots("").page("/x", "mine").page("/y", "next")

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    def crawl() -> None:
        with SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate:
            if kind == "requests":
                session = polite_requests(gate)
            else:
                session = client.Client(transport=transports(client).SyncPoliteTransport(gate))
            with session:
                with monkeypatch.context() as patch:
                    patch.setattr(Lease, "answered", fail)
                    with pytest.raises(StorageError):
                        session.get("http://a.test/x")
                assert gate.stats().pacing.in_flight == 0  # type: ignore[union-attr]
                assert session.get("http://a.test/y").text == "next"

    await asyncio.to_thread(crawl)


class H2Site(asyncio.Protocol):
    """A site that supports only HTTP/2. A page whose name starts with "half" never ends."""

    seen: list[tuple[float, dict[str, str]]]
    """When each stream started, and its header fields."""
    made: list[H2Site]

    def connection_made(self, transport: Any) -> None:
        self.made.append(self)
        self.transport = transport
        self.h2 = importlib.import_module("h2.connection").H2Connection(
            importlib.import_module("h2.config").H2Configuration(client_side=False)
        )
        self.h2.initiate_connection()
        transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if type(event).__name__ != "RequestReceived":
                continue
            fields = {name.decode(): value.decode() for name, value in event.headers}
            self.seen.append((asyncio.get_running_loop().time(), fields))
            whole = not fields[":path"].startswith("/half")
            self.h2.send_headers(event.stream_id, [(":status", "200")])
            self.h2.send_data(event.stream_id, fields[":path"].encode(), end_stream=whole)
        self.transport.write(self.h2.data_to_send())


async def test_http2_requests_are_paced_on_one_connection(
    internet: FakeInternet, library: Any
) -> None:
    pytest.importorskip("h2")
    context = server_context("h2.test", "good")
    context.set_alpn_protocols(["h2"])
    internet.dns("h2.test", "127.0.0.1")
    site = type("Site", (H2Site,), {"seen": [], "made": []})
    server = await asyncio.get_running_loop().create_server(site, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    transport = transports(library).PoliteTransport
    config = settings(host=[{"match": "*", "robots": "allow"}], pacing={"default_interval": 0.05})
    async with (
        server,
        Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
        library.AsyncClient(
            transport=transport(gate, http2=True, verify=internet.client_ssl)
        ) as client,
    ):
        url = f"https://h2.test:{port}"
        found = await asyncio.gather(*(client.get(f"{url}/{n}") for n in range(4)))
        assert {response.http_version for response in found} == {"HTTP/2"}
        assert [response.text for response in found] == [f"/{n}" for n in range(4)]
        async with client.stream("GET", f"{url}/half") as half:
            assert half.http_version == "HTTP/2"
            assert gate.stats().pacing.in_flight == 1  # held by the stream, not by the connection
        assert gate.stats().pacing.in_flight == 0
        assert (await client.get(f"{url}/last")).text == "/last"
    assert len(site.made) == 1
    assert {fields["user-agent"] for _, fields in site.seen} == {AGENT}
    began = [when for when, _ in site.seen]
    assert len(began) == 6
    assert min(after - before for before, after in pairwise(began)) >= 0.05
