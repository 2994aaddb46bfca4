"""The transports for httpx and httpx2, which differ only in the library's classes.

`gatekeeper.integrations.httpx` and `.httpx2` pass their library's classes to these mixins.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

from aiohttp.abc import AbstractResolver

from gatekeeper import descriptors
from gatekeeper.clock import OwnedTasks
from gatekeeper.errors import AddressRefused, ConfigError, Denied, GateClosed, GatekeeperError
from gatekeeper.gate.protocols import Gate
from gatekeeper.integrations.hops import (
    Attempts,
    BodyInUse,
    GuardedNames,
    Hop,
    HopErrors,
    accept_unguarded,
    begin,
    begin_sync,
    config_of,
)
from gatekeeper.sync import SyncGatekeeper

Mapped = Callable[[], AbstractContextManager[None]]


class _LeasedBody:
    """The body of a response, whose lease ends when it is closed or dropped."""

    def __init__(self, inner: Any, body: BodyInUse, mapped: Mapped) -> None:
        """`mapped`: returns a context manager that converts errors of connections to the library's
        errors."""
        self._inner = inner
        self._body = body
        self._converting_errors = mapped


class LeasedAsyncStream(_LeasedBody):
    """The body of an asynchronous response."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._converting_errors():
            async for part in self._inner:
                self._body.came(len(part))
                yield part

    async def aclose(self) -> None:
        """Close the body; httpx calls this when it has been read to its end."""
        try:
            if hasattr(self._inner, "aclose"):
                await self._inner.aclose()
        finally:
            self._body.free()


class LeasedStream(_LeasedBody):
    """The body of a synchronous response."""

    def __iter__(self) -> Iterator[bytes]:
        with self._converting_errors():
            for part in self._inner:
                self._body.came(len(part))
                yield part

    def close(self) -> None:
        """Close the body; httpx calls this when it has been read to its end."""
        try:
            if hasattr(self._inner, "close"):
                self._inner.close()
        finally:
            self._body.free()


_Asked = TypeVar("_Asked")
_MAX_IDLE: Final = 100
"""Idle connections of a pool at most: httpcore looks at each of them for every request."""

GUARDED_OPTIONS: Final = frozenset(
    (
        *("verify", "cert", "ssl_context", "http1", "http2"),
        *("max_connections", "max_keepalive_connections", "keepalive_expiry"),
        *("retries", "local_address", "socket_options"),
    )
)
"""Options of a connection pool with which the guard still chooses the address that is dialled; with
any other (`proxy`, `uds`, `network_backend`, and those of later versions) it may not."""


class _Library(Generic[_Asked]):
    """Base of both transports. A subclass names the modules of its library: `class PoliteTransport(
    AsyncHopTransport, httpx.AsyncBaseTransport, httpx=httpx, httpcore=httpcore, errors=ERRORS)`.
    """

    httpx: ClassVar[Any]
    httpcore: ClassVar[Any]
    errors: ClassVar[HopErrors]
    leased: ClassVar[Any]
    """The class of bodies with a lease."""
    streams: ClassVar[str]
    """The name of the library's base class for such bodies."""

    guarded: bool
    """Whether the guard checks each address that is connected to; otherwise it checks URLs only."""

    def __init_subclass__(
        cls, *, httpx: Any = None, httpcore: Any = None, errors: HopErrors | None = None
    ) -> None:
        if errors is not None:
            cls.httpx, cls.httpcore, cls.errors = httpx, httpcore, errors
            cls.leased = type("LeasedBody", (cls.leased, getattr(httpx, cls.streams)), {})

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
        self._gate = gate
        self._max_wait = max_wait
        config = config_of(gate, blocking=isinstance(self, HopTransport))
        dialling = [name for name in options if name not in GUARDED_OPTIONS and options[name]]
        self.guarded = transport is None and not dialling
        if transport is not None:
            accept_unguarded(config, guarded, "a transport of your own")
        for name in dialling:
            accept_unguarded(config, guarded, f"the option {name} of the transport")
        self._max_idle = min(_MAX_IDLE, descriptors.idle_limit(config.fetch.max_idle_connections))
        self._names = GuardedNames(config, resolver)
        self._bodies: weakref.WeakSet[BodyInUse] = weakref.WeakSet()
        self._inner = transport or self._own(options)

    def _own(self, options: dict[str, Any]) -> Any:
        """Return a transport whose connections are checked by the guard."""
        raise NotImplementedError

    @contextmanager
    def _converted(self, request: Any) -> Iterator[None]:
        """Convert our errors to those that derive from the library's as well."""
        if "target" in request.extensions:
            raise ConfigError("the extension `target` would be sent in place of the decided URL")
        try:
            yield
        except GatekeeperError as error:
            raise self.errors.of(error, request) from error

    def _pool(self, kind: Any, backend: Any, options: dict[str, Any]) -> Any:
        """Return a connection pool of class `kind` that connects through `backend`."""
        verify, cert = options.pop("verify", True), options.pop("cert", None)
        context = verify
        if not isinstance(verify, ssl.SSLContext):
            context = self.httpx.create_ssl_context(verify=verify, cert=cert, trust_env=True)
        return kind(
            # Unlimited, since leases limit connections; waiting in the pool would use up a lease.
            **{
                "max_connections": None,
                "max_keepalive_connections": self._max_idle,
                "keepalive_expiry": 15.0,
                "ssl_context": context,
            }
            | options
            | ({"network_backend": backend} if self.guarded else {}),
        )

    def _raw(self, request: Any) -> Any:
        url = request.url
        return self.httpcore.Request(
            method=request.method,
            url=self.httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )

    def _response(self, answer: Any) -> Any:
        return self.httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=answer.stream,
            extensions=answer.extensions,
        )

    @contextmanager
    def _sending(self, hop: Hop, request: Any, url: str, sent: str | None) -> Iterator[None]:
        """Send under the hop's lease, and report failures to it."""
        request.headers.update(hop.headers(request.method, url))
        try:
            yield
        except AddressRefused as error:
            hop.failed(by_network=False)
            raise self.errors.of(self._names.denied(url, sent), request) from error
        except BaseException as error:
            network = isinstance(error, self.httpx.RequestError | OSError)
            dialled = isinstance(error, self.httpx.ConnectError | self.httpx.ConnectTimeout)
            hop.failed(
                by_network=network and not isinstance(error, Denied),
                unconnected=error if dialled else None,
            )
            raise

    def _leased(self, hop: Any, response: Any) -> Any:
        body = hop.answered(response.status_code, response.headers)
        if response.is_closed:  # it was created with its whole body
            body.came(len(response.content))
            body.free()
            return response
        self._bodies.add(body)
        response.stream = self.leased(response.stream, body, self._converting_errors)
        return response

    def _free(self) -> None:
        for body in list(self._bodies):
            body.free()

    @contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Convert errors of httpcore to those of httpx with the same name."""
        try:
            yield
        except Exception as error:
            for kind in type(error).__mro__:
                if kind.__module__.partition(".")[0] == self.httpcore.__name__:
                    found = getattr(self.httpx, kind.__name__, None)
                    if found is not None:
                        raise found(str(error)) from error
            raise


class AsyncHopTransport(_Library[Gate]):
    """Mixin for an asynchronous transport."""

    leased = LeasedAsyncStream
    streams = "AsyncByteStream"

    def _own(self, options: dict[str, Any]) -> Any:
        backend = _Backend(self.httpcore, self._names, self._gate)
        pool = self._pool(self.httpcore.AsyncConnectionPool, backend, options)
        return _PoolTransport(self, pool)

    async def handle_async_request(self, request: Any) -> Any:
        """Decide a request, wait for its lease, and send it. httpx calls this for each redirect."""
        url, sent = str(request.url), request.headers.get("User-Agent")
        with self._converted(request):
            if self.guarded:
                self._names.refuse_url(self._gate, url, sent)
            hop = await begin(self._gate, url, sent, self._max_wait)
        with self._sending(hop, request, url, sent):
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
            self._free()
            await self._names.close()


class HopTransport(_Library[SyncGatekeeper]):
    """Mixin for a synchronous transport."""

    leased = LeasedStream
    streams = "SyncByteStream"

    def _own(self, options: dict[str, Any]) -> Any:
        backend = _SyncBackend(self.httpcore, self._names, self._gate)
        pool = self._pool(self.httpcore.ConnectionPool, backend, options)
        return _SyncPoolTransport(self, pool)

    def handle_request(self, request: Any) -> Any:
        """Decide a request, wait for its lease, and send it. httpx calls this for each redirect."""
        url, sent = str(request.url), request.headers.get("User-Agent")
        with self._converted(request):
            if self.guarded:
                self._gate.do(lambda inner: self._names.refuse_url(inner, url, sent))
            hop = begin_sync(self._gate, url, sent, self._max_wait)
        with self._sending(hop, request, url, sent):
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
            self._free()
            with suppress(GateClosed):
                self._gate.wait(lambda _: self._names.close())


class _OverPool:
    """Base of a transport over a connection pool of httpcore. httpx's own transport can't be used,
    since it offers no way to set how the pool connects."""

    def __init__(self, outer: _Library[Any], pool: Any) -> None:
        self._outer = outer
        self._pool = pool
        descriptors.register(self)

    def close_idle(self) -> bool:
        """Begin to close half of the idle connections; see `descriptors.IdlePool`."""
        idle = [one for one in self._pool.connections if one.is_idle()]
        self._close(idle[: (len(idle) + 1) // 2])
        return bool(idle)

    def _close(self, idle: list[Any]) -> None:
        raise NotImplementedError


class _PoolTransport(_OverPool):
    """The asynchronous transport."""

    def __init__(self, outer: _Library[Any], pool: Any) -> None:
        super().__init__(outer, pool)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = OwnedTasks()

    def _close(self, idle: list[Any]) -> None:
        with suppress(RuntimeError):  # its loop is closed, and so are its connections
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._start_closing, idle)

    def _start_closing(self, idle: list[Any]) -> None:
        for connection in idle:
            if connection.is_idle():
                self._closing.start(connection.aclose())

    async def handle_async_request(self, request: Any) -> Any:
        outer, self._loop = self._outer, asyncio.get_running_loop()
        with outer._converting_errors():
            return outer._response(await self._pool.handle_async_request(outer._raw(request)))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _SyncPoolTransport(_OverPool):
    """`_PoolTransport` for threads."""

    def _close(self, idle: list[Any]) -> None:
        for connection in idle:
            connection.close()

    def handle_request(self, request: Any) -> Any:
        outer = self._outer
        with outer._converting_errors():
            return outer._response(self._pool.handle_request(outer._raw(request)))

    def close(self) -> None:
        self._pool.close()


class _Dialling:
    """A network backend of httpcore that connects only to addresses that the guard allows."""

    network: ClassVar[str]
    """The name of httpcore's backend that makes the connections."""

    def __init__(self, httpcore: Any, names: GuardedNames, gate: Any) -> None:
        self._httpcore = httpcore
        self._network = getattr(httpcore, self.network)()
        self.sleep = self._network.sleep
        self._failures = httpcore.ConnectError, httpcore.ConnectTimeout
        self._names = names
        self._gate = gate

    @contextmanager
    def _looking_up(self) -> Iterator[None]:
        try:
            yield
        except AddressRefused:
            raise
        except OSError as error:
            raise self._httpcore.ConnectError(str(error)) from error

    def connect_unix_socket(self, path: str, *_: Any, **__: Any) -> Any:
        """Raise AddressRefused, since a unix socket is not the address of a site."""
        raise AddressRefused

    def _failure(self, host: str, attempts: Attempts) -> Exception:
        return attempts.failure() or self._httpcore.ConnectError(f"{host} has no address")


class _Backend(_Dialling):
    """The asynchronous backend, for every event loop that anyio supports."""

    network = "AnyIOBackend"

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, **options: Any
    ) -> Any:
        """Connect to the first allowed address that accepts the connection."""
        began = time.monotonic()
        with self._looking_up():
            found = await self._names.addresses(self._gate, host, port)
        attempts = Attempts(self._names, found, timeout, began)
        for address, real, seconds in attempts:
            try:
                return await descriptors.with_descriptor(
                    partial(self._network.connect_tcp, address, real, timeout=seconds, **options)
                )
            except self._failures as error:
                attempts.failures.append(error)
        raise self._failure(host, attempts)


class _SyncBackend(_Dialling):
    """The synchronous backend. Names are resolved in the gate's loop."""

    network = "SyncBackend"

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, **options: Any
    ) -> Any:
        """Connect to the first allowed address that accepts the connection."""
        began = time.monotonic()
        with self._looking_up():
            found = self._gate.wait(lambda inner: self._names.addresses(inner, host, port))
        attempts = Attempts(self._names, found, timeout, began)
        for address, real, seconds in attempts:
            try:
                return descriptors.with_descriptor_sync(
                    partial(self._network.connect_tcp, address, real, timeout=seconds, **options)
                )
            except self._failures as error:
                attempts.failures.append(error)
        raise self._failure(host, attempts)
