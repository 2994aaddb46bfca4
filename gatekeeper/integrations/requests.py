"""A polite transport adapter for requests.

With a `SyncGatekeeper`: `session.mount("https://", PoliteAdapter(gate))`, and for http:// too.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp.abc import AbstractResolver

from gatekeeper import descriptors
from gatekeeper.errors import (
    AddressRefused,
    Deferred,
    Denied,
    InvalidURL,
    LeaseTimeout,
    needs_extra,
)
from gatekeeper.integrations.hops import BodyInUse, HopErrors, Hops, accept_unguarded
from gatekeeper.sync import SyncGatekeeper

with needs_extra("requests", __name__):
    import requests
    from requests.adapters import DEFAULT_POOLSIZE, HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.exceptions import MaxRetryError
    from urllib3.response import HTTPResponse
    from urllib3.util.response import is_fp_closed
    from urllib3.util.retry import Retry

__all__ = ["PoliteAdapter"]
__all__ += ["RequestDeferred", "RequestDenied", "RequestInvalidURL", "RequestLeaseTimeout"]

_ERRORS = HopErrors(__name__, requests.RequestException, invalid=(requests.exceptions.InvalidURL,))
RequestDenied: type[Denied] = _ERRORS.denied
RequestDeferred: type[Deferred] = _ERRORS.deferred
RequestLeaseTimeout: type[LeaseTimeout] = _ERRORS.late
RequestInvalidURL: type[InvalidURL] = _ERRORS.invalid


class PoliteAdapter(HTTPAdapter):
    """An adapter for `session.mount` that decides, paces and reports requests, redirects, retries.

    `gate` is a `SyncGatekeeper`; close it after the session. A lease is held until the body has
    been read, or the response is closed or dropped. Time spent waiting for a lease does not count
    towards timeouts. A request without a User-Agent of its own is sent with the gate's.
    `max_retries` and the other `options` are those of `requests.adapters.HTTPAdapter`; each retry
    has its own lease. Each wait for a lease raises LeaseTimeout after `max_wait` seconds (None: no
    limit).

    The guard checks each address that is connected to. It can't do so behind a proxy, including one
    that the environment names: that raises ConfigError unless you pass `guarded=False`. `resolver`
    resolves names; by default that of the gate is used.

    Requests raise `gatekeeper.Denied`, `Deferred`, `LeaseTimeout` and `InvalidURL`, which are
    subclasses of `requests.RequestException` as well.

    >>> with SyncGatekeeper("examplebot/1.0") as gate, requests.Session() as session:
    ...     for scheme in ("https://", "http://"):
    ...         session.mount(scheme, PoliteAdapter(gate))
    """

    guarded: bool = True
    """The guard checks each address that is connected to (except behind proxies)."""

    def __init__(
        self,
        gate: SyncGatekeeper,
        *,
        max_retries: Retry | int = 0,
        max_wait: float | None = None,
        guarded: bool | None = None,
        resolver: AbstractResolver | None = None,
        **options: Any,
    ) -> None:
        self._accepted = guarded
        self._hops = Hops(gate, _ERRORS, max_wait=max_wait, resolver=resolver, blocking=True)
        self._thread = threading.local()
        self._retry = Retry(max_retries, read=False) if max_retries == 0 else max_retries
        # `send` retries, with a lease for each; urllib3 would repeat requests without leases.
        idle = descriptors.idle_limit(self._hops.config.fetch.max_idle_connections)
        size = max(1, min(options.pop("pool_maxsize", DEFAULT_POOLSIZE), idle))
        hosts = max(1, min(options.pop("pool_connections", DEFAULT_POOLSIZE), idle // size))
        super().__init__(max_retries=0, pool_connections=hosts, pool_maxsize=size, **options)

    def init_poolmanager(self, *given: Any, **options: Any) -> None:
        """Create pools that connect through the guard. Called by requests."""
        super().init_poolmanager(*given, **options)
        descriptors.register(self)
        classes = self.poolmanager.pool_classes_by_scheme = {}
        for scheme, pool, connection in (
            ("http", HTTPConnectionPool, HTTPConnection),
            ("https", HTTPSConnectionPool, HTTPSConnection),
        ):
            own = type("GuardedConnection", (_Guarded, connection), {"gatekeeper_adapter": self})
            classes[scheme] = type("GuardedPool", (pool,), {"ConnectionCls": own})

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: another process has no gate, and would send requests without one."""
        raise TypeError("no PoliteAdapter is copied: make one for the gate of each process")

    def close_idle(self) -> bool:
        """Close the idle connections; see `descriptors.IdlePool`. urllib3 closes all or none."""
        found = len(self.poolmanager.pools) > 0
        self.poolmanager.clear()
        return found

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        """Raise ConfigError unless `guarded=False`: addresses behind a proxy can't be checked."""
        accept_unguarded(self._hops.config, self._accepted, "a proxy")
        return super().proxy_manager_for(proxy, **options)

    def send(
        self, request: requests.PreparedRequest, *given: Any, **options: Any
    ) -> requests.Response:
        """Decide a request, wait for its lease, and send it. Called for each redirect as well. The
        other arguments are those of HTTPAdapter."""
        retry = Retry.from_int(self._retry)
        while True:
            try:
                response = self._send_once(request, *given, **options)
            except requests.RequestException as error:
                again = _after_error(retry, request, error)
                if again is None:
                    raise
                retry = again
                retry.sleep()
                continue
            wait = response.headers.get("Retry-After") is not None
            if not retry.is_retry(request.method or "", response.status_code, wait):
                return response
            try:
                retry = retry.increment(request.method, request.url, response=response.raw)
            except MaxRetryError as error:
                if not retry.raise_on_status:
                    return response
                _drain(response)
                raise requests.exceptions.RetryError(error, request=request) from error
            _drain(response)
            retry.sleep(response.raw)

    def _send_once(
        self, request: requests.PreparedRequest, *given: Any, **options: Any
    ) -> requests.Response:
        url, sent = request.url or "", _text(request.headers.get("User-Agent"))
        hop = self._hops.begin_sync(url, sent, request)
        request.headers.update(hop.headers(request.method or "GET", url))
        self._thread.unconnected = response = None
        try:
            response = super().send(request, *given, **options)
            _lease_body(response, self._hops.answered(hop, response.status_code, response.headers))
        except BaseException as error:
            if response is not None:  # the report could not be stored
                response.close()
            unconnected, self._thread.unconnected = self._thread.unconnected, None
            refused = isinstance(unconnected, AddressRefused)
            by_library = isinstance(error, requests.RequestException)
            hop.end(by_network=by_library and not refused, unconnected=unconnected)
            if by_library and refused:
                raise self._hops.refused(url, sent, request) from error
            raise
        return response

    def dial(self, connection: Any, connect: Any) -> None:
        """Connect to the first allowed address that accepts the connection.

        Called by the connections. Afterwards the connection's host is restored to the name, which
        the Host field and the verification of certificates need.
        """
        host, port, timeout = connection.host, connection.port, connection.timeout
        if getattr(connection, "server_hostname", host) is None:
            connection.server_hostname = host.strip("[]")

        def dial(address: str, real: int, seconds: float) -> None:
            connection.host, connection.port, connection.timeout = address, real, seconds
            try:
                connect()
            except Exception:
                connection.close()
                raise
            finally:
                connection.host, connection.port, connection.timeout = host, port, timeout

        limit = float(timeout) if isinstance(timeout, int | float) else None
        try:
            self._hops.connect_sync(host, port, limit, dial, (Exception,))
        except Exception as error:
            self._thread.unconnected = error
            raise

    def close(self) -> None:
        """Close the connections and end open leases."""
        super().close()
        self._hops.close_sync()


class _Guarded:
    """Mixin for a connection of urllib3 that connects through its adapter."""

    gatekeeper_adapter: PoliteAdapter
    proxy: Any

    def connect(self) -> None:
        connect = super().connect  # type: ignore[misc]
        if self.proxy is not None:
            connect()  # `proxy_manager_for` has checked that proxies are accepted
        else:
            self.gatekeeper_adapter.dial(self, connect)


def _drain(response: requests.Response) -> None:
    """Read a response to its end, so that its connection can be reused."""
    with suppress(requests.RequestException):
        _ = response.content
    response.close()


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _after_error(
    retry: Retry, request: requests.PreparedRequest, error: requests.RequestException
) -> Retry | None:
    """Return the remaining retries after a failed request, or None if it must not be retried, as a
    refusal of ours, which has no cause."""
    cause = error.args[0] if error.args else None
    cause = getattr(cause, "reason", None) or cause
    if not isinstance(cause, Exception):
        return None
    try:
        return retry.increment(request.method, request.url, error=cause)
    except Exception:  # noqa: BLE001 - urllib3 raises the cause itself if it can't be retried
        return None


def _lease_body(response: requests.Response, body: BodyInUse) -> None:
    """Extend the lease until the connection of the response returns to its pool, or the response is
    closed or dropped."""
    raw: Any = response.raw
    if raw is None or is_fp_closed(raw):  # no body
        body.free()
    else:
        raw.__class__, raw.gatekeeper_body = _LeasedResponse, body


class _LeasedResponse(HTTPResponse):
    """A response that counts the bytes that are read of its body, and frees it when its connection
    is released.

    urllib3 releases the connection during the call that reads the last bytes, and counts those
    afterwards. It does not count chunked bodies at all, so their size after decoding is used.
    """

    gatekeeper_body: BodyInUse
    _is_reading = _is_over = _is_chunked = False

    def release_conn(self) -> None:
        """Free the body. Called by urllib3 when the body has been read to its end."""
        try:
            super().release_conn()
        finally:
            self._free()

    def close(self) -> None:
        """Free the body. Called by urllib3 when the body is abandoned, too."""
        try:
            super().close()
        finally:
            self._free()

    def read(self, *given: Any, **options: Any) -> bytes:
        """Read and count bytes."""
        with self._reading():
            return super().read(*given, **options)

    def read1(self, *given: Any, **options: Any) -> bytes:
        """Read and count bytes."""
        with self._reading():
            return super().read1(*given, **options)

    def read_chunked(self, *given: Any, **options: Any) -> Generator[bytes, None, None]:
        """Yield and count the parts of a chunked body."""
        self._is_chunked = True
        for part in super().read_chunked(*given, **options):
            self.gatekeeper_body.came(len(part))
            yield part

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False
            if self._is_over:
                self._free()

    def _free(self) -> None:
        self._is_over = True
        if self._is_reading:
            return
        if not (self.gatekeeper_body.closed or self._is_chunked):
            self.gatekeeper_body.came(self.tell())  # the size on the wire, before decoding
        self.gatekeeper_body.free()
