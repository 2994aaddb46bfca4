"""Which options of the libraries take the choice of the address away from the guard (T19).

Each signature is listed as a whole: an option of a later version fails here until somebody has
looked at what it does.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gatekeeper import Config, ConfigError, Gatekeeper, SyncGatekeeper, polite_session
from gatekeeper.config import GuardConfig
from gatekeeper.integrations.transports import GUARDED_OPTIONS
from gatekeeper.session import guarded_connector, plain_session
from tests.conformance.ways import AGENT, settings
from tests.internet import FakeInternet

URL_ONLY = Config(guard=GuardConfig(allow=("127.0.0.0/8", "*.test"), mode="url-only"))

# --- the list: by callable, what takes the address, and everything else ----------------------

POOL = (
    {"proxy", "uds", "network_backend"},
    GUARDED_OPTIONS - {"verify", "cert"},  # these two are options of the transport
)
CLIENT = (
    {"proxy", "mounts", "transport", "trust_env"},  # `proxy` and `mounts` bypass any transport
    "auth base_url cert cookies default_encoding event_hooks follow_redirects headers http1 http2"
    " limits max_redirects params timeout verify",
)
HTTPX_TRANSPORT = (  # one of the caller's own is not guarded, whatever its options are
    {"proxy", "uds", "trust_env"},
    "cert http1 http2 limits local_address retries socket_options verify",
)
CRAWLEE = {"proxy_info"}

SIGNATURES: dict[str, tuple[set[str], Any]] = {
    "httpcore.AsyncConnectionPool": POOL,
    "httpcore.ConnectionPool": POOL,
    "httpcore2.AsyncConnectionPool": POOL,
    "httpcore2.ConnectionPool": POOL,
    "httpx.AsyncClient": CLIENT,
    "httpx.Client": CLIENT,
    "httpx2.AsyncClient": CLIENT,
    "httpx2.Client": CLIENT,
    "httpx.AsyncHTTPTransport": HTTPX_TRANSPORT,
    "httpx.HTTPTransport": HTTPX_TRANSPORT,
    "httpx2.AsyncHTTPTransport": HTTPX_TRANSPORT,
    "httpx2.HTTPTransport": HTTPX_TRANSPORT,
    "requests.adapters.HTTPAdapter": (
        set(),
        "pool_connections pool_maxsize max_retries pool_block",
    ),
    "requests.adapters.HTTPAdapter.send": (
        {"proxies"},  # also where the environment names them
        "request stream timeout verify cert",
    ),
    "requests.adapters.HTTPAdapter.init_poolmanager": (
        set(),
        "connections maxsize block pool_kwargs",
    ),
    "urllib3.connection.HTTPConnection": (
        {"proxy", "proxy_config"},  # set by a manager of proxies alone
        "host port timeout source_address blocksize socket_options",
    ),
    "urllib3.HTTPConnectionPool": (
        {"_proxy", "_proxy_headers", "_proxy_config"},
        "host port timeout maxsize block headers retries conn_kw",
    ),
    "aiohttp.TCPConnector": (
        {"socket_factory", "resolver"},  # both are the guard's
        "verify_ssl fingerprint use_dns_cache ttl_dns_cache dns_cache_max_size family ssl_context"
        " ssl local_addr keepalive_timeout force_close limit limit_per_host enable_cleanup_closed"
        " loop timeout_ceil_threshold happy_eyeballs_delay interleave ssl_shutdown_timeout",
    ),
    "aiohttp.ClientSession": (
        {"connector", "proxy", "trust_env"},
        "base_url loop cookies headers proxy_auth skip_auto_headers auth json_serialize"
        " json_serialize_bytes request_class response_class ws_response_class version cookie_jar"
        " connector_owner raise_for_status read_timeout conn_timeout timeout auto_decompress"
        " requote_redirect_url trace_configs read_bufsize max_line_size max_field_size max_headers"
        " fallback_charset_resolver middlewares ssl_shutdown_timeout",
    ),
    "aiohttp.ClientSession._request": (
        {"proxy"},
        "method str_or_url params data json cookies headers skip_auto_headers auth allow_redirects"
        " max_redirects compress chunked expect100 raise_for_status read_until_eof proxy_auth"
        " timeout verify_ssl fingerprint ssl_context ssl server_hostname proxy_headers"
        " trace_request_ctx read_bufsize auto_decompress max_line_size max_field_size max_headers"
        " middlewares upload_tracker",
    ),
    "crawlee.http_clients.HttpClient.crawl": (CRAWLEE, "request session statistics timeout"),
    "crawlee.http_clients.HttpClient.send_request": (
        CRAWLEE,
        "url method headers payload session timeout",
    ),
    "crawlee.http_clients.HttpClient.stream": (
        CRAWLEE,
        "url method headers payload session timeout",
    ),
}
"""A browser and Scrapy dial by themselves, so there is nothing of the guard's to take: their pages
in docs/integrations/ say so."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_option_of_a_library_is_known(name: str) -> None:
    parts = name.split(".")
    depth = next(n for n, part in enumerate(parts) if part[0].isupper())
    found: Any = pytest.importorskip(parts[0]) and import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        found = getattr(found, part)
    takes, other = SIGNATURES[name]
    listed = takes | set(other.split() if isinstance(other, str) else other)
    new = set(inspect.signature(found).parameters) - listed - {"self", "args", "kwargs"}
    assert not new, f"does one of these choose the address that is dialled? {new}"


# --- what takes the address is refused, unless it is accepted --------------------------------

TAKING: dict[str, Callable[[Any, Any], Any]] = {
    "proxy": lambda httpcore, _: httpcore.Proxy("http://127.0.0.1:1"),
    "uds": lambda _, __: "/run/site.sock",
    "network_backend": lambda httpcore, kind: getattr(httpcore, f"{kind}MockBackend")([]),
    "of_a_later_version": lambda _, __: "x",
}


@pytest.mark.parametrize("option", TAKING)
@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_a_transport_option_that_bypasses_the_guard_is_refused(
    library: str, option: str
) -> None:
    pytest.importorskip(library)
    httpcore: Any = import_module(library.replace("httpx", "httpcore"))
    module: Any = import_module(f"gatekeeper.integrations.{library}")
    blocking = SyncGatekeeper(AGENT, config=settings())
    lenient = SyncGatekeeper(AGENT, config=URL_ONLY)
    async with Gatekeeper(AGENT, config=settings()) as gate:
        for make, strict, easy, kind in (
            (module.PoliteTransport, gate, Gatekeeper(AGENT, config=URL_ONLY), "Async"),
            (module.SyncPoliteTransport, blocking, lenient, ""),
        ):
            given = {option: TAKING[option](httpcore, kind)}
            with pytest.raises(ConfigError, match=rf"{option} .*guarded=False"):
                make(strict, **given)
            if option == "of_a_later_version":
                continue
            for transport in (make(strict, guarded=False, **given), make(easy, **given)):
                assert not transport.guarded
            assert make(strict, **{option: None}).guarded


@pytest.mark.parametrize("option", sorted(GUARDED_OPTIONS))
@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_a_transport_option_that_does_not_bypass_the_guard_is_accepted(
    library: str, option: str
) -> None:
    pytest.importorskip(library)
    module: Any = import_module(f"gatekeeper.integrations.{library}")
    given = {option: HARMLESS.get(option, True)}
    async with Gatekeeper(AGENT, config=settings()) as gate:
        assert module.PoliteTransport(gate, **given).guarded
    assert module.SyncPoliteTransport(SyncGatekeeper(AGENT, config=settings()), **given).guarded


HARMLESS: dict[str, Any] = {
    "cert": None,
    "keepalive_expiry": 5.0,
    "local_address": "127.0.0.1",
    "max_connections": 3,
    "max_keepalive_connections": 3,
    "retries": 1,
    "socket_options": [],
    "ssl_context": ssl.create_default_context(),
}


async def test_no_transport_option_reaches_a_rebound_name(
    internet: FakeInternet,
) -> None:
    httpx = pytest.importorskip("httpx")
    from gatekeeper.integrations.httpx import PoliteTransport

    internet.site("inner.test").robots("").page("/x", "secret")
    config = settings(guard={"allow": [internet.listener().address]})
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        assert await gate.check("http://inner.test/x")
        internet.resolver.scripts["inner.test"] = ["10.1.2.3"]
        for given in ({}, {"local_address": "127.0.0.1"}, {"socket_options": []}, {"retries": 2}):
            transport = PoliteTransport(gate, resolver=internet.resolver, **given)
            async with httpx.AsyncClient(transport=transport) as client:
                assert transport.guarded
                with pytest.raises(httpx.RequestError):
                    await client.get("http://inner.test/x")


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_no_extension_of_a_request_replaces_the_url_that_was_decided(
    internet: FakeInternet, library: str
) -> None:
    httpx = pytest.importorskip(library)
    module: Any = import_module(f"gatekeeper.integrations.{library}")
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/private")
    async with (
        Gatekeeper(AGENT, config=settings(), resolver=internet.resolver) as gate,
        httpx.AsyncClient(transport=module.PoliteTransport(gate)) as client,
    ):
        with pytest.raises(ConfigError, match="target"):
            await client.get("http://a.test/", extensions={"target": b"/private"})
    assert site.paths == []


def elsewhere(**arguments: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(**(arguments | {"connector": aiohttp.TCPConnector()}))


def in_the_environment(**arguments: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(**arguments, trust_env=True)


@pytest.mark.parametrize(
    "given",
    [
        {"proxy": "http://127.0.0.1:1"},
        {"trust_env": True},
        {"connector": None},
        {"session_factory": elsewhere},
        {"session_factory": in_the_environment},
    ],
    ids=["proxy", "trust_env", "connector", "another connector", "environment"],
)
async def test_a_session_argument_that_bypasses_the_guard_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        async with polite_session(AGENT, config=settings(), **given):
            pass
    if "session_factory" not in given:
        with pytest.raises(ConfigError):
            plain_session(AGENT, config=settings(), **given)
    await asyncio.sleep(0)


async def test_a_socket_factory_for_a_guarded_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="socket_factory"):
        guarded_connector(settings(), socket_factory=lambda _: None)


async def test_a_connector_s_session_takes_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    connector = guarded_connector(settings())
    async with aiohttp.ClientSession(connector=connector, trust_env=True) as session:
        with pytest.raises(ConfigError, match="url-only"):
            await session.get("http://a.test/")


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5h://127.0.0.1:1"])
@pytest.mark.parametrize("environment", [False, True], ids=["given", "of the environment"])
def test_a_proxy_of_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, proxy: str, environment: bool
) -> None:
    requests = pytest.importorskip("requests")
    from gatekeeper.integrations.requests import PoliteAdapter

    if environment:
        monkeypatch.setenv("ALL_PROXY", proxy)
    with ScriptedSync() as gate, requests.Session() as session:
        session.mount("http://", PoliteAdapter(gate))
        given = {} if environment else {"proxies": {"http": proxy}}
        with pytest.raises(ConfigError, match="guarded=False"):
            session.get("http://a.test/", **given)


class ScriptedSync(SyncGatekeeper):
    """A blocking gate without a network."""

    def __init__(self) -> None:
        from gatekeeper.testing import ScriptedGate

        super().__init__(AGENT, config=settings())
        self._make = lambda: ScriptedGate(AGENT, config=settings())


async def test_a_foreign_crawlee_client_and_a_proxy_are_refused() -> None:
    pytest.importorskip("crawlee")
    from crawlee.http_clients import ImpitHttpClient
    from crawlee.proxy_configuration import ProxyInfo

    from gatekeeper.integrations.crawlee import PoliteHttpClient

    async with Gatekeeper(AGENT, config=settings()) as gate:
        with pytest.raises(ConfigError, match="guarded=False"):
            PoliteHttpClient(gate, ImpitHttpClient(follow_redirects=False))
        proxy = ProxyInfo(
            url="http://127.0.0.1:1",
            scheme="http",
            hostname="127.0.0.1",
            port=1,
            username="",
            password="",
        )
        with pytest.raises(ConfigError, match="guarded=False"):
            await PoliteHttpClient(gate).send_request("http://a.test/", proxy_info=proxy)


@pytest.mark.parametrize("page", ["playwright", "scrapy"])
def test_the_page_of_a_library_that_dials_itself_says_so(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "integrations" / f"{page}.md").read_text("utf-8")
    assert "opens connections itself, so the guard judges URLs" in text
