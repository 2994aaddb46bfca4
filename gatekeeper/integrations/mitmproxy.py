"""Any client over https: an add-on for mitmproxy that decides and paces each request.

`gatekeeper proxy` runs it; `mitmdump -s "$(gatekeeper proxy --script)"` adds it to a mitmproxy of
your own. mitmproxy dials a site only for a request or a tunnel that was decided: everything else
is refused where it dials (`PoliteProxy.server_connect`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http as statuses
import logging
import os
import re
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from aiohttp.abc import AbstractResolver

from gatekeeper import urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.client.wire import (
    PROBLEM_JSON,
    PROBLEM_TYPE,
    SANDBOXED,
    ProblemDocument,
    decision_headers,
    encode,
    retry_after,
)
from gatekeeper.config import Config, HostRule
from gatekeeper.decision import Decision
from gatekeeper.errors import (
    AddressRefused,
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
    StorageError,
    needs_extra,
)
from gatekeeper.fetching.tls import trusted_by
from gatekeeper.gate import Gatekeeper
from gatekeeper.integrations.hops import (
    BodyInUse,
    GuardedNames,
    Hop,
    begin,
    config_of,
    decide,
    unless_default,
)
from gatekeeper.pacing.host_settings import HostRules

with needs_extra("mitmproxy", __name__):
    from cryptography.hazmat.primitives import serialization
    from mitmproxy import ctx, http
    from mitmproxy.options import Options
    from mitmproxy.tools.dump import DumpMaster

__all__ = ["PoliteProxy"]

_log = logging.getLogger(__name__)

WAIT: Final = 60.0
"""Seconds that a request waits for its lease at most, unless the caller says otherwise."""
MOST_OF_HOST: Final = 1_000
"""Requests and tunnels of one host that wait or run at the same time."""
_MOST: Final = 10_000
"""Requests and tunnels of all hosts together."""
_KEPT_OCTETS: Final = 1_048_576
"""mitmproxy keeps the body of a refused request until it has come as a whole: up to this size."""
_PAGE_PARTS: Final = re.compile(r"(?!document$|iframe$|frame$|fencedframe$)[a-z]+")
"""Values of Sec-Fetch-Dest for what a page loads (Fetch Metadata, section 2.1)."""
_CLOSE_SECONDS: Final = 5.0
"""Timeout in seconds for closing the connections of clients as the proxy ends."""
_PORTS: Final = {"http": 80, "https": 443}
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

_addresses: ContextVar[list[tuple[str, int]] | None] = ContextVar("gatekeeper_addresses")
"""The addresses to dial, in the task of mitmproxy that opens a connection."""


@dataclass(eq=False)
class _Exchange:
    """A request or a tunnel, from the moment it is asked for until its body is over."""

    address: tuple[str, int]
    """Host and port, as mitmproxy names them."""
    is_tunnel: bool = False
    admitting: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    """The task that decides it and waits for its lease, until it may be sent."""
    found: list[tuple[str, int]] = field(default_factory=list)
    """The addresses that the guard allows; empty until the request is decided."""
    hop: Hop | None = None
    decision: Decision | None = None
    unconnected: OSError | None = None

    def end(self, *, by_network: bool = False) -> None:
        """End the lease. `by_network`: if there was no response, the site is the reason."""
        if self.admitting is not None and self.admitting is not asyncio.current_task():
            self.admitting.cancel()
        if self.hop is not None:
            why = self.unconnected
            self.hop.end(by_network=by_network or why is not None, unconnected=why)


class _NotPassedOn(Exception):
    """A request that is answered with a problem document of this status."""

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind


class PoliteProxy:
    """The add-on. Its methods are hooks of mitmproxy, which calls them by their names.

    A request that is denied is answered with 403, a deferred one with 429 and Retry-After, each
    with a problem document (RFC 9457) and the decision in header fields.
    """

    guarded: bool = True
    """The guard judges each address that mitmproxy dials."""

    def __init__(
        self,
        gate: Gatekeeper | RemoteGatekeeper | None,
        *,
        subresources: bool = False,
        passthrough: Iterable[str] = (),
        max_wait: float = WAIT,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`subresources`: what a browser loads for a page is decided, and takes no lease.
        `passthrough`: hosts (or `*.example.org`) whose TLS is not opened; a tunnel is decided by
        the front page of its origin. `max_wait`: seconds that a request waits for its lease at
        most. `gate`: None refuses everything. Raises ConfigError for a bad host."""
        self._open: dict[str, dict[str, _Exchange]] = {}
        """Exchanges by the ids of their clients' connections and of their flows."""
        self._count = 0
        self._connects: set[str] = set()
        """The ids of the clients' connections that began with CONNECT."""
        self._gate: Any = gate
        self._subresources = subresources
        self._passthrough = _rules(passthrough)
        self._max_wait = max_wait
        self._names = GuardedNames(Config() if gate is None else config_of(gate), resolver)

    # -- the life of the proxy

    async def running(self) -> None:
        """Take over how mitmproxy finds addresses, and keep it from dialling before a decision."""
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
            found = _addresses.get(None)
            if found is None:
                return await look_up(host, port, **options)
            return [one for pair in found for one in await look_up(*pair, **options)]

        # mitmproxy has no hook for it. `asyncio.open_connection` tries the addresses in order.
        vars(loop)["getaddrinfo"] = getaddrinfo
        ctx.options.update(connection_strategy="lazy")
        if self._gate is not None:
            for host, port, *_ in ctx.master.addons.get("proxyserver").listen_addrs():
                self._names.guard_of(self._gate).listens_on(host, port)  # T3

    async def done(self) -> None:
        """End every lease, and refuse what still comes."""
        self._gate = None
        vars(asyncio.get_running_loop()).pop("getaddrinfo", None)
        for client in list(self._open):
            self._end_all(client)
        await self._names.close()

    def client_disconnected(self, client: Any) -> None:
        """End the leases of a client that hung up, and what it waits for."""
        self._connects.discard(client.id)
        self._end_all(client.id)

    def _end_all(self, client: str) -> None:
        for flow in list(self._open.get(client, ())):
            self._end(client, flow)

    # -- a request

    async def requestheaders(self, flow: Any) -> None:
        """Decide a request and wait for its lease, or answer it with a refusal."""
        if flow.error is not None or flow.response is not None:
            return
        if self._tunnels(flow.client_conn.id):
            flow.request.stream = True  # inside a tunnel, which was decided as a whole
            return
        await self._answering(flow, self._admit_request(flow))

    async def _answering(self, flow: Any, admit: Coroutine[Any, Any, None]) -> None:
        """Answer a request that is refused. Whatever else fails here, the request is not sent."""
        try:
            await admit
        except BaseException as error:
            self._end(flow.client_conn.id, flow.id)
            if not isinstance(error, GatekeeperError | OSError | _NotPassedOn):
                flow.kill()
                raise
            _log.info("%s is refused: %s", urls.mask(_url_of(flow.request)), error)
            flow.response = _answer(error)
            if _is_large(flow.request):
                flow.kill()

    async def _admit_request(self, flow: Any) -> None:
        request = flow.request
        url, sent = _url_of(request), unless_default(request.headers.get("User-Agent"))
        if flow.client_conn.id not in self._connects:  # RFC 9112 section 3.2.2
            request.host_header = _origin_of(request).partition("://")[2]
        _check(request, url)
        exchange = self._begin(flow, url, sent)
        if self._subresources and _is_page_part(request):
            decision = await decide(self._gate, url, sent)
            name = (self._gate.user_agent or decision.user_agent) if sent is None else None
            headers = {} if name is None else {"User-Agent": name}
        else:
            hop = exchange.hop = await begin(self._gate, url, sent, self._max_wait)
            decision, headers = hop.lease.decision, hop.headers(request.method, url)
        exchange.decision = decision
        await self._look_up(exchange, url, sent)
        for name in [name for name in request.headers if name.lower().startswith("proxy-")]:
            request.headers.pop(name, None)  # for this proxy, not for the site
        request.headers.update(headers)
        _add_via(request)
        request.stream = True

    def _begin(
        self, flow: Any, url: str, sent: str | None, *, is_tunnel: bool = False
    ) -> _Exchange:
        """Note a request that is to be decided. Raises Denied, InvalidURL, GateClosed or
        _NotPassedOn."""
        if self._gate is None:
            raise GateClosed("the gate is not open")
        self._names.refuse_url(self._gate, url, sent)
        request, client = flow.request, flow.client_conn
        address = request.host, request.port
        every = (one for flows in self._open.values() for one in flows.values())
        if self._count >= _MOST or (
            self._count >= MOST_OF_HOST
            and sum(one.address[0] == address[0] for one in every) >= MOST_OF_HOST
        ):
            raise _NotPassedOn(503, "busy", f"too many requests for {request.host} wait here")
        exchange = _Exchange(address, is_tunnel)
        self._open.setdefault(client.id, {})[flow.id] = exchange
        self._count += 1
        return exchange

    async def _look_up(self, exchange: _Exchange, url: str, sent: str | None) -> None:
        """Find the addresses that may be dialled. Raises Denied if the guard allows none."""
        try:
            exchange.found = await self._names.addresses(self._gate, *exchange.address)
            exchange.admitting = None
        except AddressRefused as error:
            raise self._names.denied(url, sent) from error
        except OSError as error:
            exchange.unconnected = error
            raise

    def responseheaders(self, flow: Any) -> None:
        """Report the head of the response, and pass its body on without keeping it."""
        flow.response.stream = True
        exchange = self._open.get(flow.client_conn.id, {}).get(flow.id)
        if exchange is None:
            return
        headers = flow.response.headers
        if exchange.hop is not None:
            body = exchange.hop.answered(flow.response.status_code, headers)

            def count(piece: bytes) -> bytes:
                body.came(len(piece))
                return piece

            flow.response.stream = count
        for name in [name for name in headers if name.lower().startswith("x-gatekeeper-")]:
            headers.pop(name, None)  # a site can't speak for the gate
        if exchange.decision is not None:
            headers.update(decision_headers(exchange.decision))
        _add_via(flow.response)

    def response(self, flow: Any) -> None:
        """End the lease: the body is over. That of an upgrade ends here, with its 101."""
        self._end(flow.client_conn.id, flow.id)

    def error(self, flow: Any) -> None:
        """End the lease of a request that failed, or whose client gave up."""
        by_client = not flow.client_conn.connected or "by client" in flow.error.msg
        self._end(flow.client_conn.id, flow.id, by_network=not by_client)

    def _end(self, client: str, flow: str, *, by_network: bool = False) -> None:
        """Forget an exchange, unless it is over, and end its lease."""
        flows = self._open.get(client, {})
        if (exchange := flows.pop(flow, None)) is not None:
            self._count -= 1
            if not flows:
                del self._open[client]
            exchange.end(by_network=by_network)

    # -- a tunnel

    async def http_connect(self, flow: Any) -> None:
        """Decide a tunnel whose TLS is not opened. In others the requests are decided."""
        self._connects.add(flow.client_conn.id)
        if self._passthrough.find(flow.request.host.lower()) is not None:
            await self._answering(flow, self._admit_tunnel(flow))

    async def _admit_tunnel(self, flow: Any) -> None:
        url = _origin("https", flow.request.host, flow.request.port) + "/"
        exchange = self._begin(flow, url, None, is_tunnel=True)
        exchange.hop = await begin(self._gate, url, None, self._max_wait)
        await self._look_up(exchange, url, None)

    def tls_clienthello(self, data: Any) -> None:
        """Leave the TLS of a tunnel as it is."""
        data.ignore_connection = bool(self._tunnels(data.context.client.id))

    def _tunnels(self, client: str) -> list[str]:
        """Return the ids of the flows of a client that are tunnels."""
        return [flow for flow, one in self._open.get(client, {}).items() if one.is_tunnel]

    # -- what mitmproxy dials

    def server_connect(self, data: Any) -> None:
        """Let mitmproxy dial the addresses of a request that was decided, and no others."""
        if data.server.error is not None:
            return  # mitmproxy itself refuses it, as its own address for example
        data.server.error = "no request for this address was decided"
        for exchange in self._dialling(data):
            if exchange.found:
                self._names.guard.dialled()
                _addresses.set(exchange.found)
                data.server.error = None
                return

    def server_connected(self, data: Any) -> None:
        """Hold the slot of a tunnel as long as it is open."""
        for exchange in self._dialling(data):
            if exchange.is_tunnel and (hop := exchange.hop) is not None:
                hop.body = BodyInUse(hop.call, hop.call_later)
                hop.lease.ends_with(hop.body)

    def server_connect_error(self, data: Any) -> None:
        """Note why a site could not be dialled."""
        errno = _ERRNO.search(data.server.error or "")
        for exchange in self._dialling(data):
            if errno is not None:
                exchange.unconnected = OSError(int(errno[1]), data.server.error)

    def server_disconnected(self, data: Any) -> None:
        """End the lease of a tunnel."""
        for flow in self._tunnels(data.client.id):
            self._end(data.client.id, flow)

    def _dialling(self, data: Any) -> list[_Exchange]:
        """Return the exchanges of a client for which this address is dialled."""
        flows = self._open.get(data.client.id, {})
        address = data.server.address[:2]
        return [
            one
            for one in flows.values()
            if one.address == address and (one.hop is None or one.hop.body is None)
        ]

    # -- what would be kept

    def websocket_message(self, flow: Any) -> None:
        """Drop the messages that were passed on."""
        del flow.websocket.messages[:-1]

    def tcp_message(self, flow: Any) -> None:
        """Drop the messages of an upgraded connection that were passed on."""
        del flow.messages[:-1]


def _rules(hosts: Iterable[str]) -> HostRules:
    return HostRules([HostRule(match=host) for host in hosts])


def _origin(scheme: str, host: str, port: int) -> str:
    host = urls.bracketed(host)
    return f"{scheme}://{host}" if port == _PORTS.get(scheme) else f"{scheme}://{host}:{port}"


def _origin_of(request: http.Request) -> str:
    return _origin(request.scheme or "https", request.host, request.port)


def _url_of(request: http.Request) -> str:
    return _origin_of(request) + ("" if request.path == "*" else request.path)


def _check(request: http.Request, url: str) -> None:
    """Raise _NotPassedOn for a request whose origin or content the site would read differently."""
    origin = urls.parse(url).origin
    for host in filter(None, (request.authority, request.headers.get("Host"))):
        if urls.parse(f"{request.scheme}://{host}/").origin != origin:
            told = f"the Host is {urls.mask(host)}, the target or CONNECT says {origin}"
            raise _NotPassedOn(421, "misdirected", f"{told}: they must agree")
    coding = request.headers.get("Transfer-Encoding", "chunked")
    if coding.strip().lower() != "chunked":  # RFC 9112 section 6.1
        raise _NotPassedOn(501, "transfer-coding", f"transfer coding {coding!r} is not passed on")


def _is_page_part(request: http.Request) -> bool:
    """Return whether a browser says that it loads this for a page.

    Browsers say it in Sec-Fetch-Dest; over plain http they send no such field, but mark navigations
    by Upgrade-Insecure-Requests.
    """
    if (kind := request.headers.get("Sec-Fetch-Dest")) is not None:
        return _PAGE_PARTS.fullmatch(kind) is not None
    browser = request.headers.get("User-Agent", "").startswith("Mozilla/")
    return browser and "Upgrade-Insecure-Requests" not in request.headers


def _is_large(request: http.Request) -> bool:
    """Return whether a refused request announces a larger body than may be kept."""
    length = request.headers.get("Content-Length", "0")
    return not length.isdecimal() or int(length) > _KEPT_OCTETS


def _add_via(message: Any) -> None:
    """Name this proxy in Via (RFC 9110 section 7.6.3)."""
    message.headers.add("Via", f"{message.http_version.removeprefix('HTTP/')} gatekeeper")


_PROBLEMS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (Deferred, 429, "deferred"),
    (Denied, 403, "denied"),
    (LeaseTimeout, 429, "not-yet"),
    (InvalidURL, 400, "invalid-url"),
    (StorageError, 503, "storage"),
    (ConfigError, 400, "bad-request"),
    (GateClosed, 503, "closing"),
    (GatekeeperError, 503, "unavailable"),
    (OSError, 502, "no-answer"),
)


def _answer(error: Exception) -> http.Response:
    """Return the problem document for what refused a request."""
    if isinstance(error, _NotPassedOn):
        status, kind = error.status, error.kind
    else:
        found = ((one, kind) for base, one, kind in _PROBLEMS if isinstance(error, base))
        status, kind = next(found)
    decision = error.decision if isinstance(error, Denied) else None
    detail = str(error) if decision is None else decision.explain()
    if status == 502:
        detail = "the site could not be reached"
    document = ProblemDocument(
        type=PROBLEM_TYPE + kind,
        title=statuses.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        decision=decision,
    )
    headers = {"Content-Type": PROBLEM_JSON, "Server": "gatekeeper", **SANDBOXED}
    if decision is not None:
        headers |= decision_headers(decision)
    if status in (429, 503):
        moment = getattr(error, "retry_at", None)
        headers["Retry-After"] = retry_after(moment.timestamp() - time.time() if moment else 1.0)
    return http.Response.make(status, encode(document), headers)


# --- the command


@dataclass(frozen=True)
class Listening:
    """What clients need to know of a proxy that listens."""

    url: str
    certificate: Path
    """The file with the certificate of its authority, which clients must trust."""
    spki: str
    """The hash of that authority's key, for Chromium's --ignore-certificate-errors-spki-list."""


def _listening() -> Listening:
    """Return what mitmproxy listens on, once it runs."""
    host, port, *_ = ctx.master.addons.get("proxyserver").listen_addrs()[0]
    path = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
    spki = key_hash(ctx.master.addons.get("tlsconfig").certstore.default_ca)
    return Listening(_origin("http", host, port), path, spki)


def key_hash(certificate: Any) -> str:
    """Return the hash of a certificate's key (SubjectPublicKeyInfo), as Chromium writes it."""
    octets = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return base64.b64encode(hashlib.sha256(octets).digest()).decode()


async def serve(
    proxy: PoliteProxy, config: Config, where: tuple[str, int], announce: Callable[[Listening], Any]
) -> None:
    """Run mitmproxy with the add-on until SIGTERM or SIGINT. Call in the main thread.

    Sites are trusted by the same authorities as by the gate. Raises ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="gatekeeper-") as folder:
        options = Options(
            listen_host=where[0],
            listen_port=where[1],
            ssl_verify_upstream_trusted_ca=_write_authorities(config, Path(folder)),
            ssl_verify_upstream_trusted_confdir=ssl.get_default_verify_paths().capath,
        )
        master = DumpMaster(options, with_dumper=False)
        options.update(onboarding=False, termlog_verbosity="warn")
        master.addons.add(proxy, SimpleNamespace(running=lambda: announce(_listening())))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, master.shutdown)
        await master.run()
        await close_connections(master)


def _write_authorities(config: Config, folder: Path) -> str | None:
    """Write the certificates of the authorities that the gate trusts to a file, and return its
    path; None if there are none."""
    context = trusted_by(config.fetch)
    if isinstance(context, bool):
        context = ssl.create_default_context()
    text = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    path = folder / "authorities.pem"
    return str(path) if path.write_text(text, "ascii") else None


async def close_connections(master: Any) -> None:
    """Close what mitmproxy leaves to the end of the process."""
    proxyserver = master.addons.get("proxyserver")
    for server in proxyserver.servers:
        await server.stop()
    for handler in list(proxyserver.connections.values()):
        await handler.on_timeout()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            while proxyserver.active_connections():  # noqa: ASYNC110 - mitmproxy has no event
                await asyncio.sleep(0.01)


# --- gates, and the add-on of `mitmdump -s`


@asynccontextmanager
async def open_gate(
    user_agent: str | None, config: Config, sidecar: str | None
) -> AsyncIterator[Gatekeeper | RemoteGatekeeper]:
    """Open a gate in this process, or the client of the sidecar at that URL.

    The token of a sidecar is read from GATEKEEPER_TOKEN. Raises ConfigError if there is no name to
    fetch as.
    """
    if sidecar is None:
        if user_agent is None:
            raise ConfigError("user_agent: a gate needs the name to fetch as: set it")
        async with Gatekeeper(user_agent, config=config) as gate:
            yield gate
        return
    token = os.environ.get("GATEKEEPER_TOKEN")
    async with RemoteGatekeeper(sidecar, user_agent, token=token, config=config) as remote:
        if remote.user_agent is None:
            raise ConfigError(f"{sidecar} does not say who it is: start it first, or give a name")
        yield remote


class PoliteScript(PoliteProxy):
    """The add-on with options of mitmproxy: `--set gatekeeper_config=FILE`."""

    def __init__(self) -> None:
        super().__init__(None)
        self._stack = AsyncExitStack()

    def load(self, loader: Any) -> None:
        """Add the options."""
        for name, kind, default, text in (
            ("config", str, "", "The TOML file with gatekeeper's settings."),
            ("sidecar", str, "", "The URL of a sidecar to ask, instead of a gate in this process."),
            ("subresources", bool, False, "What a page loads is decided, and takes no lease."),
            ("passthrough", str, "", "Hosts whose TLS is not opened, with commas between."),
        ):
            loader.add_option(f"gatekeeper_{name}", kind, default, text)

    async def running(self) -> None:
        """Open the gate."""
        options = ctx.options
        path, hosts = options.gatekeeper_config, options.gatekeeper_passthrough
        config = Config.load(path) if path else Config()
        opening = open_gate(config.user_agent, config, options.gatekeeper_sidecar or None)
        gate = await self._stack.enter_async_context(opening)
        self._subresources = options.gatekeeper_subresources
        self._passthrough = _rules(host.strip() for host in hosts.split(",") if host.strip())
        self._gate, self._names = gate, GuardedNames(config)
        await super().running()

    async def done(self) -> None:
        """Close the gate."""
        await super().done()
        await self._stack.aclose()
