"""The guard at the socket: no request reaches an address that the guard refuses.

Pages choose the URLs that a crawler requests, so every URL may be an attempt to attack the
network in which the crawler runs (T1). The guard judges at three points:

    GuardedConnector.connect    the URL of each hop, before anything is done with it
    the resolver                each address of a name, before it is used
    socket_factory              the final address, at the moment of dialling

The last two are both needed. aiohttp calls no resolver for a literal address; and only the
resolver can tell that all addresses of a name were refused. An address is checked and used once:
the ones that pass the resolver are those that are dialled, so DNS rebinding finds no gap.

A refusal is recognised by the guard's own record of the attempt: aiohttp merges the errors of
several attempts into a plain OSError, so the class of an exception proves nothing.

Look-ups by the system's resolver have their own threads: `getaddrinfo` occupies one until the name
server answers or gives up, which may take half a minute, and the event loop's few threads have
other work. Some threads are reserved for names that were found before. With
`pacing.address_interval`, hosts at one address share its clock: the look-up for a lease and the
connector's dial use the same result, a failure included, cached for as long as aiohttp would.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp
import cachetools
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper import descriptors, urls
from gatekeeper.clock import Clock, deadline
from gatekeeper.config import Config
from gatekeeper.decision import BLOCKED_NOTE, Decision
from gatekeeper.errors import AddressRefused, ConfigError, Denied, HoldLapsed
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.limits import PrioritySemaphore, current_deadline
from gatekeeper.library_internals import DialConnector, close_pooled, limit_heads

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace
    from yarl import URL


_MAX_THREADS: Final = 64
_RESERVED_THREADS: Final = 8
"""Threads reserved for names that were found before."""
_MAX_KNOWN_NAMES: Final = 20_000
"""The maximum number of such names."""


def system_resolver() -> AbstractResolver:
    """Return aiohttp's resolver if it needs no threads (aiodns is installed), else ours.

    Needs a running loop, as every resolver does.
    """
    if aiohttp.DefaultResolver is aiohttp.ThreadedResolver:
        return SystemResolver()
    return aiohttp.DefaultResolver()


class SystemResolver(aiohttp.ThreadedResolver):
    """`aiohttp.ThreadedResolver` with its own threads. Close it with its connector."""

    def __init__(self, *, threads: int = _MAX_THREADS, reserved: int = _RESERVED_THREADS) -> None:
        # It acts as the event loop of its base class, which uses only the next two methods of it.
        super().__init__(cast("asyncio.AbstractEventLoop", self))
        self._running_loop = asyncio.get_running_loop()
        self._executor: Executor = ThreadPoolExecutor(
            threads + reserved, thread_name_prefix="gatekeeper-names"
        )
        self._shared_threads = PrioritySemaphore(threads)
        self._reserved_threads = PrioritySemaphore(reserved)
        self._known: cachetools.LRUCache[str, None] = cachetools.LRUCache(_MAX_KNOWN_NAMES)

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        """Look up a name as the loop's method does, in a thread of this resolver."""
        return await self._run_in_thread(partial(_addresses, host, port, **options))

    async def getnameinfo(self, address: Any, flags: int = 0) -> Any:
        """Look up an address as the loop's method does, in a thread of this resolver."""
        return await self._run_in_thread(partial(socket.getnameinfo, address, flags))

    async def _run_in_thread(self, work: Callable[[], Any]) -> Any:
        try:
            looking = self._running_loop.run_in_executor(self._executor, work)
        except RuntimeError as error:
            raise OSError(f"the resolver is closed: {error}") from error
        return await looking

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the name's addresses. Raises OSError as the system does."""
        threads = self._shared_threads
        if host in self._known and self._reserved_threads.free:
            threads = self._reserved_threads
        await self._wait_for_thread(threads)
        looking = asyncio.ensure_future(super().resolve(host, port, family))
        # The thread is occupied until the name server gives up, even if the caller is cancelled.
        looking.add_done_callback(partial(self._look_up_done, threads, host))
        return await asyncio.shield(looking)

    @staticmethod
    async def _wait_for_thread(semaphore: PrioritySemaphore) -> None:
        if semaphore.acquire_nowait():
            return
        limit = current_deadline.get()
        if limit is not None:
            limit.queued()
        await semaphore.acquire()
        if limit is not None:
            limit.connecting()

    def _look_up_done(
        self, semaphore: PrioritySemaphore, host: str, looking: asyncio.Future[Any]
    ) -> None:
        semaphore.release()
        if not looking.cancelled() and looking.exception() is None:
            self._known[host] = None
        else:
            self._known.pop(host, None)

    async def close(self) -> None:
        """Release the threads; busy ones end after their look-up."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int, **options: Any) -> Any:
    """`socket.getaddrinfo`, which may say that a name does not exist if it can open no file."""
    try:
        return socket.getaddrinfo(host, port, **options)
    except socket.gaierror:
        descriptors.refuse_shortage()
        raise


# The maximum number of addresses of a name that are tried, per family. An answer may have
# thousands, and aiohttp dials n dead ones n(n+1)/2 times: a name could be aimed at another host.
_MAX_ADDRESSES_TRIED = 4


class _Attempt(msgspec.Struct, eq=False):
    """The guard's record of one connection attempt; shared with the tasks that it starts."""

    host: str
    proxied: bool
    refused: int = 0
    dialled: int = 0


_attempt: ContextVar[_Attempt | None] = ContextVar("gatekeeper_guard_attempt", default=None)


before_send: ContextVar[Callable[[], bool] | None] = ContextVar(
    "gatekeeper_before_send", default=None
)
"""Called once a request has its connection; returns True if it must not be sent any more."""
connecting: ContextVar[Callable[[bool], object] | None] = ContextVar(
    "gatekeeper_connecting", default=None
)
"""Called with True when this context starts to make a new connection, and with False when that is
over; not called for a kept-alive connection."""


class GuardedResolver(AbstractResolver):
    """A resolver that removes addresses that may not be dialled."""

    def __init__(self, guard: Guard, inner: AbstractResolver | None) -> None:
        self._guard = guard
        self._inner = inner or system_resolver()
        self._owned = inner is None

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses that may be dialled. Raises AddressRefused if all are refused."""
        attempt = _attempt.get()
        if attempt is not None and attempt.proxied:
            return await self._inner.resolve(host, port, family)
        return await _vetted(self._guard, host, partial(self._inner.resolve, host, port, family))

    async def close(self) -> None:
        """Close the inner resolver if it was created here."""
        if self._owned:
            await self._inner.close()


async def _vetted(
    guard: Guard, host: str, look_up: Callable[[], Awaitable[list[ResolveResult]]]
) -> list[ResolveResult]:
    """Return the addresses of a name that may be dialled. Raises AddressRefused."""
    if guard.refuses_name(host) is not None:
        raise AddressRefused
    answers = await descriptors.with_descriptor(look_up)
    kept: list[ResolveResult] = []
    families: Counter[int] = Counter()
    for answer in answers:
        if guard.refuses_answer(answer["host"], answer["port"], host) is not None:
            continue
        families[answer["family"]] += 1
        if families[answer["family"]] <= _MAX_ADDRESSES_TRIED:
            kept.append(answer)
    if answers and not kept:
        raise AddressRefused
    if not kept:  # aiohttp can't handle an empty list
        raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
    return kept


Deny = Callable[[str, str, str], Decision]
"""Makes the decision about a refused request from its URL, its User-Agent header, and the note of
the refusal."""

_connect = aiohttp.TCPConnector.connect  # called for each request, and cheaper than super()


class GuardedConnector(DialConnector):
    """A TCPConnector that dials nothing that the guard refuses. Needs a running loop.

    A request refused at any of the three points raises Denied (an aiohttp.ClientError) with the
    decision that `deny` makes. `guard` is the judge, with its `stats()`.
    """

    def __init__(
        self,
        guard: Guard,
        resolver: AbstractResolver | None,
        *,
        deny: Deny,
        url_cache: urls.UrlCache | None = None,
        max_idle: int | None = None,
        **options: Any,
    ) -> None:
        """`resolver` None: the system's. `url_cache`: the cache that has parsed the requests' URLs,
        if there is one. `max_idle`: idle connections to keep (`fetch.max_idle_connections`).
        `options` are passed to aiohttp.TCPConnector."""
        self.guard = guard
        self._url_cache = url_cache or urls.UrlCache()
        self._deny = deny
        self._guarded_resolver = GuardedResolver(guard, resolver)
        self._judged_version = guard.version
        super().__init__(
            max_idle=descriptors.idle_limit(max_idle),
            resolver=self._guarded_resolver,
            socket_factory=self.open_socket,
            **options,
        )

    def open_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Judge the address at the moment of dialling. Raises AddressRefused.

        aiohttp calls it for every attempt: literals, names, redirects, happy eyeballs. The
        error is an OSError, so that happy eyeballs continues with the next address.
        """
        family, kind, proto, _, sockaddr = info
        host, port = str(sockaddr[0]), int(sockaddr[1])
        attempt = _attempt.get()
        if attempt is None:
            refusal = self.guard.refuses_address(host, port)
        elif attempt.proxied:
            refusal = None  # the operator has chosen the proxy; only the URL is judged (T19)
        else:
            refusal = self.guard.refuses_answer(host, port, attempt.host)
        if refusal is not None:
            if attempt is not None:
                attempt.refused += 1
            raise AddressRefused
        if attempt is not None:
            attempt.dialled += 1
        if (limit := current_deadline.get()) is not None:
            limit.addresses.append(host)
        self.guard.dialled()
        return socket.socket(family, kind, proto)

    def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Coroutine[Any, Any, Connection]:
        """Judge the URL of the hop, also for pooled connections, then connect.

        It raises when called, not when awaited, which saves a coroutine per request.
        """
        if self._judged_version != self.guard.version:
            self._drop_judged()
        if req.proxy is not None:
            refuse_proxy(self.guard.mode, req.proxy)
        url, cache = req.url, self._url_cache
        passed = url is cache.last and self.guard.passed(cache.origin)
        if not passed and (refusal := self.guard.refuses_url(str(url))) is not None:
            raise self._denied(req, refusal.note)
        if (lapsed := before_send.get()) is not None:
            return self._connect_in_time(_connect(self, req, traces, timeout), lapsed, url)
        return _connect(self, req, traces, timeout)

    @staticmethod
    async def _connect_in_time(
        connect: Coroutine[Any, Any, Connection], lapsed: Callable[[], bool], url: URL
    ) -> Connection:
        """Connect, and check `lapsed` after TLS, right before the request is written. Raises
        HoldLapsed."""
        connection = await connect
        if lapsed():
            connection.release()  # reusable, as nothing was written to it
            raise HoldLapsed(f"the hold of {url.raw_host} ran out before the request was sent")
        return connection

    def _drop_judged(self) -> None:
        """After a change of settings: drop connections and look-ups that the old ones allowed."""
        self._judged_version = self.guard.version
        self.clear_dns_cache()
        close_pooled(self)

    async def dialled(
        self, req: ClientRequest, dial: Callable[[], Coroutine[Any, Any, ResponseHandler]]
    ) -> ResponseHandler:
        """Make a new connection, with a record of the attempt."""
        attempt = _Attempt(req.url.raw_host or "", proxied=req.proxy is not None)
        token = _attempt.set(attempt)
        on_connecting = connecting.get()
        if on_connecting is not None:
            on_connecting(True)
        try:
            protocol = await descriptors.with_descriptor(dial)
            limit_heads(protocol)
            return protocol
        except aiohttp.ClientConnectorError as error:
            # If addresses were refused and none was dialled, it is the guard's refusal, however
            # aiohttp merged the errors. The error's type matters too: a look-up shared with
            # another request was recorded in that request's attempt, not in this one.
            refused = attempt.refused and not attempt.dialled
            if refused or isinstance(error.os_error, AddressRefused):
                raise self._denied(req)  # noqa: B904 - `_denied` sets the cause
            # Frames of aiohttp and aiohappyeyeballs refer to both errors: avoid cycles with them.
            error.__traceback__ = error.os_error.__traceback__ = None
            raise
        finally:
            _attempt.reset(token)
            if on_connecting is not None:
                on_connecting(False)

    def _denied(self, request: ClientRequest, note: str = BLOCKED_NOTE) -> Denied:
        """Return the error to raise, with the same note for every look-up (T2)."""
        denied = Denied(self._deny(str(request.url), request.headers.get("User-Agent", ""), note))
        denied.__cause__ = AddressRefused()
        return denied

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close the connections, and the resolver unless the caller gave it."""
        await super().close(abort_ssl=abort_ssl)
        await self._guarded_resolver.close()


def refuse_proxy(mode: str, proxy: object) -> None:
    """Raise ConfigError for a proxy, unless the guard's `mode` is "url-only".

    With a proxy only URLs can be judged, which the operator has to accept explicitly (T19).
    """
    if proxy is not None and mode != "url-only":
        raise ConfigError(
            'behind a proxy the guard can only judge URLs: set guard.mode = "url-only" '
            "to accept that, or leave the proxy out"
        )


ANSWER_SECONDS = 10.0
"""Seconds for which the addresses of a host are cached."""
_FAILURE_SECONDS = 1.0
"""Seconds until a failed look-up is repeated."""
_MAX_CACHED_NAMES = 20_000
"""The maximum number of cached names."""

_Key = tuple[str, int]

UNRESOLVED = "address:unresolved"
"""The scope of names that could not be resolved, if the connector is not ours and may still dial
them."""


class _LookUp(msgspec.Struct, frozen=True):
    """What the latest look-up of a host found."""

    ends: float
    """Monotonic moment at which it is to be repeated."""
    scopes: tuple[str, ...] = ()
    answers: list[ResolveResult] = []
    failure: tuple[int, str] | None = None
    """Code and text of a failed one: the name can't be dialled until another one succeeds."""


class HostAddresses(AbstractResolver):
    """Finds the scopes of hosts' addresses, such as "address:203.0.113.9".

    It is also the resolver of the connectors, so that they dial the addresses that were looked up
    here, which are cached. A name whose look-up before a lease failed can't be dialled, until
    another one succeeds.
    """

    def __init__(
        self, config: Config, clock: Clock, guard: Guard | None, resolver: AbstractResolver | None
    ) -> None:
        """`guard`: None if the connector is not ours; addresses are then not vetted. `resolver`
        None: the system's."""
        self._clock = clock
        self._patience = config.fetch.connect_timeout
        self._guard = guard
        self._inner = resolver
        self._owned = resolver is None
        self._latest: cachetools.LRUCache[_Key, _LookUp] = cachetools.LRUCache(_MAX_CACHED_NAMES)
        self._under_way: dict[_Key, asyncio.Event] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses to dial. Raises gaierror if the look-up before a lease failed."""
        latest = self._latest.get((host, port))
        if latest is not None and latest.failure is not None:
            raise socket.gaierror(*latest.failure)
        if latest is None or not latest.answers or self._clock.monotonic() >= latest.ends:
            return await self._resolve_now(host, port, family)
        return [one for one in latest.answers if family in (socket.AF_UNSPEC, one["family"])]

    async def _resolve_now(
        self, host: str, port: int, family: socket.AddressFamily
    ) -> list[ResolveResult]:
        if self._inner is None:  # created here, as it needs a running loop
            self._inner = system_resolver()
        return await self._inner.resolve(host, port, family)

    def _fresh(self, key: _Key) -> _LookUp | None:
        latest = self._latest.get(key)
        return latest if latest is not None and self._clock.monotonic() < latest.ends else None

    async def scopes(self, host: str, port: int) -> tuple[str, ...]:
        """Return one scope for each address of the host that may be dialled. Never raises.

        If the name can't be resolved, the result is empty, and the connector's dial will fail
        too; or, if the connector is not ours, the scope that all such names share.
        """
        try:
            return _scopes((host,))  # a literal address needs no look-up
        except ValueError:
            pass
        key = (host, port)
        while (found := self._fresh(key)) is None:
            if (asking := self._under_way.get(key)) is not None:
                await asking.wait()
                continue  # the other caller may have been cancelled: then look up here
            done = self._under_way[key] = asyncio.Event()
            try:
                self._latest[key] = await self._look_up(host, port)
            finally:
                del self._under_way[key]
                done.set()
        return found.scopes

    def knows(self, target: urls.Target) -> bool:
        """Return True if `scopes` would answer without waiting."""
        if self._fresh((target.host, target.port)) is not None:
            return True
        try:
            ipaddress.ip_address(target.host)
        except ValueError:
            return False
        return True

    async def _look_up(self, host: str, port: int) -> _LookUp:
        guard, now = self._guard, self._clock.monotonic
        try:
            async with deadline(self._clock, self._patience):
                look_up = partial(self._resolve_now, host, port, socket.AF_UNSPEC)
                answers = await (look_up() if guard is None else _vetted(guard, host, look_up))
            scopes = _scopes(answer["host"] for answer in answers)
            return _LookUp(now() + ANSWER_SECONDS, scopes, answers)
        except AddressRefused:  # the guard will refuse the dial too
            return _LookUp(now() + _FAILURE_SECONDS)
        except Exception as error:  # noqa: BLE001 - a resolver may raise anything
            if guard is None:
                return _LookUp(now() + _FAILURE_SECONDS, (UNRESOLVED,))
            told = isinstance(error, socket.gaierror) or descriptors.is_shortage(error)
            code = getattr(error, "errno", None) if told else None
            failure = socket.EAI_AGAIN if code is None else code, str(error) or type(error).__name__
            return _LookUp(now() + _FAILURE_SECONDS, failure=failure)

    async def close(self) -> None:
        """Close the resolver."""
        self._latest.clear()
        if self._owned and self._inner is not None:
            inner, self._inner = self._inner, None
            await inner.close()


def _scopes(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the scopes of addresses, sorted, as answers come in any order. Raises ValueError."""
    names = set()
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        names.add(f"address:{address.compressed}")
    return tuple(sorted(names))
