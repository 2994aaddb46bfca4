"""The transports for httpx and httpx2, which differ only in the library's classes.

`gatekeeper.integrations.httpx` and `.httpx2` name their library to these mixins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Generic, TypeVar

from aiohttp.abc import AbstractResolver

from gatekeeper import descriptors
from gatekeeper.errors import AddressRefused, ConfigError, Denied
from gatekeeper.gate.protocols import Gate
from gatekeeper.integrations.hops import BodyInUse, Hop, HopErrors, Hops, accept_unguarded
from gatekeeper.library_internals import connect_through
from gatekeeper.sync import SyncGatekeeper


class _LeasedBody:
    """The body of a response, asynchronous or not, whose lease ends when it is closed or dropped.

    httpx closes a body when it has been read to its end.
    """

    def __init__(self, inner: Any, body: BodyInUse) -> None:
        self._inner = inner
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._body.came(len(part))
            yield part

    def __iter__(self) -> Iterator[bytes]:
        for part in self._inner:
            self._body.came(len(part))
            yield part

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._body.free()

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._body.free()


_MAX_IDLE: Final = 100
"""Idle connections of a pool at most: httpcore looks at each of them for every request."""


_Asked = TypeVar("_Asked")
GUARDED_OPTIONS: Final = frozenset(
    (
        *("verify", "cert", "ssl_context", "http1", "http2"),
        *("max_connections", "max_keepalive_connections", "keepalive_expiry"),
        *("retries", "local_address", "socket_options"),
    )
)
"""Options of a connection pool with which the guard still chooses the address that is dialled; with
any other (`proxy`, `uds`, `network_backend`, and those of later versions) it may not."""


Library = tuple[Any, Any, HopErrors]
"""The modules of httpx and of httpcore, and the error classes."""


class _Library(Generic[_Asked]):
    """Base of both transports."""

    _library: ClassVar[Library]
    """Set by the transports."""
    blocking: ClassVar[bool]

    _close: Callable[[list[Any]], object]
    """Begins to close connections."""

    guarded: bool
    """Whether the guard checks each address that is connected to; otherwise it checks URLs only."""

    def __init__(
        self,
        gate: _Asked,
        transport: Any = None,
        *,
        guarded: bool | None = None,
        resolver: AbstractResolver | None = None,
        max_wait: float | None = None,
        **options: Any,
    ) -> None:
        self._httpx, self._httpcore, errors = self._library
        base = self._httpx.AsyncByteStream, self._httpx.SyncByteStream
        self._body_kind = type("LeasedBody", (_LeasedBody, *base), {})
        self._hops = hops = Hops(
            gate, errors, max_wait=max_wait, resolver=resolver, blocking=self.blocking
        )
        dialling = [name for name in options if name not in GUARDED_OPTIONS and options[name]]
        self.guarded = hops.guarded = transport is None and not dialling
        if transport is not None:
            accept_unguarded(hops.config, guarded, "a transport of your own")
        for name in dialling:
            accept_unguarded(hops.config, guarded, f"the option {name} of the transport")
        self._inner = transport or self._own(options)

    def _own(self, options: dict[str, Any]) -> Any:
        """Return the library's transport, over a connection pool that connects through the guard
        unless an option prevents that."""
        verify, cert = options.pop("verify", True), options.pop("cert", None)
        context = self._httpx.create_ssl_context(verify, cert)
        idle = descriptors.idle_limit(self._hops.config.fetch.max_idle_connections)
        if self.guarded:
            options["network_backend"] = self._guarded_backend()
        usual = {
            # Unlimited, since leases limit connections; waiting in the pool would use up a lease.
            "max_connections": None,
            "max_keepalive_connections": min(_MAX_IDLE, idle),
            "keepalive_expiry": 15.0,
            "ssl_context": context,
        }
        kind = "" if self.blocking else "Async"
        self._pool = getattr(self._httpcore, f"{kind}ConnectionPool")(**usual | options)
        descriptors.register(self)
        transport = getattr(self._httpx, f"{kind}HTTPTransport")
        return connect_through(transport(verify=context), self._pool)

    def _guarded_backend(self) -> Any:
        """Return a network backend for httpcore that connects to the first address that the guard
        allows and that accepts the connection."""
        core, hops = self._httpcore, self._hops
        network = core.SyncBackend() if self.blocking else core.AnyIOBackend()
        connect: Callable[..., Any] = hops.connect_sync if self.blocking else hops.connect
        failures = core.ConnectError, core.ConnectTimeout

        def connect_tcp(host: str, port: int, timeout: float | None = None, **options: Any) -> Any:
            dial = partial(network.connect_tcp, **options)  # address, port, seconds
            return connect(host, port, timeout, dial, failures, failures[0])

        return SimpleNamespace(connect_tcp=connect_tcp, sleep=network.sleep)

    def close_idle(self) -> bool:
        """Begin to close half of the idle connections; see `descriptors.IdlePool`."""
        idle = [one for one in self._pool.connections if one.is_idle()]
        self._close(idle[: (len(idle) + 1) // 2])
        return bool(idle)

    def _asked(self, request: Any) -> tuple[str, str | None, Any]:
        """Return what to begin: the URL of a request, its User-Agent, and itself."""
        if "target" in request.extensions:
            raise ConfigError("the extension `target` would be sent in place of the decided URL")
        return str(request.url), request.headers.get("User-Agent"), request

    @contextmanager
    def _sending(self, hop: Hop, request: Any) -> Iterator[None]:
        """Send under the hop's lease, and report failures to it."""
        url, sent = str(request.url), request.headers.get("User-Agent")
        request.headers.update(hop.headers(request.method, url))
        try:
            yield
        except AddressRefused as error:
            hop.end(by_network=False)
            raise self._hops.refused(url, sent, request) from error
        except BaseException as error:
            network = isinstance(error, self._httpx.RequestError | OSError)
            dialled = isinstance(error, self._httpx.ConnectError | self._httpx.ConnectTimeout)
            hop.end(
                by_network=network and not isinstance(error, Denied),
                unconnected=error if dialled else None,
            )
            raise

    def _leased(self, hop: Hop, response: Any) -> Any:
        body = self._hops.answered(hop, response.status_code, response.headers)
        if response.is_closed:  # it was created with its whole body
            body.came(len(response.content))
            body.free()
        else:
            response.stream = self._body_kind(response.stream, body)
        return response


class AsyncHopTransport(_Library[Gate]):
    """Mixin for an asynchronous transport."""

    blocking = False
    _loop: asyncio.AbstractEventLoop | None = None
    """The loop of the connections."""

    async def handle_async_request(self, request: Any) -> Any:
        """Decide a request, wait for its lease, and send it. httpx calls this for each redirect."""
        self._loop = asyncio.get_running_loop()
        hop = await self._hops.begin(*self._asked(request))
        with self._sending(hop, request):
            response = await self._inner.handle_async_request(request)
            try:
                return self._leased(hop, response)
            except BaseException:  # the report could not be stored
                await response.stream.aclose()
                raise

    async def aclose(self) -> None:
        """Close the connections and end open leases."""
        try:
            await self._inner.aclose()
        finally:
            await self._hops.close()

    def _close(self, idle: list[Any]) -> None:
        async def close() -> None:
            for connection in idle:
                if connection.is_idle():
                    await connection.aclose()

        loop = self._loop
        if loop is not None and not loop.is_closed():  # else its connections are closed, too
            asyncio.run_coroutine_threadsafe(close(), loop)


class HopTransport(_Library[SyncGatekeeper]):
    """Mixin for a synchronous transport."""

    blocking = True

    def handle_request(self, request: Any) -> Any:
        """Decide a request, wait for its lease, and send it. httpx calls this for each redirect."""
        hop = self._hops.begin_sync(*self._asked(request))
        with self._sending(hop, request):
            response = self._inner.handle_request(request)
            try:
                return self._leased(hop, response)
            except BaseException:  # the report could not be stored
                response.stream.close()
                raise

    def close(self) -> None:
        """Close the connections and end open leases."""
        try:
            self._inner.close()
        finally:
            self._hops.close_sync()

    def _close(self, idle: list[Any]) -> None:
        for connection in idle:
            connection.close()
