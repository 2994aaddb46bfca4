"""`FakeInternet`: sites, listeners, the log, and driving a test through virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
from collections.abc import Awaitable, Coroutine, Iterable, Sized
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from gatekeeper.clock import Clock, SystemClock, VirtualClock
from tests.internet.behaviours import Behaviour
from tests.internet.certs import TLS, client_context, server_context
from tests.internet.names import Names, Step
from tests.internet.sites import NOT_FOUND, Site
from tests.internet.wire import Connection, Request, Wire

T = TypeVar("T")

_SHARED = "127.0.0.1"
_TRIPS = 5
"""Ways through the kernel, before nothing is on its way any more."""
_TLS_PORTS = frozenset({443, 8443})


class Listener:
    """One address with a real port (two: plain and TLS) that the system chose."""

    def __init__(self, net: FakeInternet, address: str) -> None:
        self._net = net
        self.address = address
        self._ports: dict[bool, int] = {}

    def port(self, *, tls: bool = False) -> int:
        """The real port; the socket is bound, and listens, from the first asking on."""
        if tls not in self._ports:
            family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
            # The protocol said outright: asyncio switches Nagle's algorithm off only then,
            # and with it a piece would wait for 40 real milliseconds.
            sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sock.setblocking(False)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((self.address, 0))
            sock.listen(4096)  # until the server runs, clients wait in the backlog
            self._ports[tls] = sock.getsockname()[1]
            self._net.serve(self.address, sock, tls)
        return self._ports[tls]


class FakeInternet:
    """Many named hosts on loopback, behind a resolver of their own. See the package."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        dns_delay: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.resolver = Names(self.clock, self.port_of, rng=rng, delay=dns_delay)
        self.sites: dict[str, Site] = {}
        self.requests: list[Request] = []
        self.connections: list[Connection] = []
        self.wires: set[Wire] = set()
        self.activity = 0
        """Grows with every byte that moves: when it rests, the network is quiet."""
        self.rude_addresses: set[str] = set()
        self._listeners: dict[str, Listener] = {}
        self._dead_ports: dict[str, int] = {}
        self._by_address: dict[str, Site] = {}
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._courier: tuple[socket.socket, socket.socket] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._next_address = int(ipaddress.IPv4Address("127.1.0.0"))
        self._in_threads: set[asyncio.Future[Any]] = set()
        """Calls that the loop gave to a thread and that have no answer yet."""

    async def __aenter__(self) -> Self:
        # Kept, so that a plain (not async) fixture too may open sites.
        self._loop = asyncio.get_running_loop()
        self._loop.run_in_executor = self._counted  # type: ignore[assignment, method-assign]
        return self

    def _counted(self, executor: Any, work: Any, *args: Any) -> asyncio.Future[Any]:
        """`loop.run_in_executor` that `settle` knows of: a thread is no timer, and may be slow."""
        loop = self._loop
        future = type(loop).run_in_executor(loop, executor, work, *args)
        self._in_threads.add(future)
        future.add_done_callback(self._answered)
        return future

    def _answered(self, future: asyncio.Future[Any]) -> None:
        self._in_threads.discard(future)
        self.activity += 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            server.close()
        gone = [wire.gone.wait() for wire in self.wires]
        for wire in list(self.wires):
            wire.abort()
        await asyncio.gather(*gone)
        for server in self._servers:
            await server.wait_closed()
        for sock in self._sockets:
            sock.close()
        await asyncio.sleep(0)
        if self._failures and error is None:
            raise ExceptionGroup("in the fake internet", self._failures)  # type: ignore[type-var]

    # -- building it

    def site(
        self,
        name: str,
        *,
        address: str | Iterable[str] | None = None,
        tls: TLS = "good",
    ) -> Site:
        """A host. `name` is "a.test", or "a.test:8080" / "https://a.test" for one origin.

        All hosts share 127.0.0.1 unless they are given an `address` (or several) of their
        own; `internet.address()` finds a fresh one.
        """
        name = name.lower()
        addresses = [address] if isinstance(address, str) else list(address or [_SHARED])
        site = self.sites[name] = Site(name, addresses, tls)
        for one in addresses:
            self.listener(one).port()
            if address is not None:
                self._by_address[one] = site
        host = name.partition("://")[2] or name
        self.resolver.script(host.partition(":")[0], addresses)
        return site

    def address(self) -> str:
        """A loopback address that nobody has yet: 127.1.0.1 and so on."""
        while True:
            self._next_address += 1
            address = str(ipaddress.IPv4Address(self._next_address))
            if address not in self._listeners and address not in self._dead_ports:
                return address

    def dns(self, name: str, *steps: Step) -> None:
        """Script the name's look-ups; see `Names.script`."""
        self.resolver.script(name, *steps)

    def refusing(self, name: str) -> str:
        """A host whose port is closed: connecting is refused at once. Gives its address."""
        address = self.address()
        sock = self._bound(address)
        self._dead_ports[address] = sock.getsockname()[1]
        self.resolver.script(name, address)
        return address

    def blackhole(self, name: str) -> str:
        """A host that never completes a connection (its backlog is full). Gives its address."""
        address = self.address()
        sock = self._bound(address)
        sock.listen(0)
        for _ in range(2):  # one more than the backlog holds: the next SYN goes unanswered
            filler = socket.socket()
            filler.setblocking(False)
            self._sockets.append(filler)
            with contextlib.suppress(BlockingIOError):
                filler.connect(sock.getsockname())
        self._dead_ports[address] = sock.getsockname()[1]
        self.resolver.script(name, address)
        return address

    def rude(self, name: str) -> str:
        """A host that resets each connection as soon as it is made. Gives its address."""
        address = self.address()
        self.rude_addresses.add(address)
        self.listener(address).port()
        self.resolver.script(name, address)
        return address

    def _bound(self, address: str) -> socket.socket:
        sock = socket.socket()
        sock.bind((address, 0))
        self._sockets.append(sock)
        return sock

    # -- addresses and ports

    def listener(self, address: str = _SHARED) -> Listener:
        """The listener of a loopback address; `listener().port()` is what a literal URL needs."""
        if address not in self._listeners:
            self._listeners[address] = Listener(self, address)
        return self._listeners[address]

    def port_of(self, address: str, port: int) -> int:
        """The real port behind a URL's port, or that same port where nobody listens."""
        parsed = ipaddress.ip_address(address)
        mapped = getattr(parsed, "ipv4_mapped", None)
        plain = str(mapped or parsed)
        if plain in self._dead_ports:
            return self._dead_ports[plain]
        if plain not in self._listeners:
            return port
        site = self._by_address.get(plain)
        wants_tls = port in _TLS_PORTS and not (site and site.tls == "none")
        return self._listeners[plain].port(tls=wants_tls)

    def serve(self, address: str, sock: socket.socket, tls: bool) -> None:
        """Begin to serve a listening socket (Listener calls this)."""
        port = sock.getsockname()[1]

        async def start() -> None:
            server = await self._loop.create_server(
                lambda: Wire(self, address, port, tls),
                sock=sock,
                backlog=4096,
                ssl=self._tls_context(address) if tls else None,
            )
            self._servers.append(server)

        self._sockets.append(sock)
        self.spawn(start())

    def _tls_context(self, address: str) -> ssl.SSLContext:
        def choose(ssl_object: Any, name: str | None, _: ssl.SSLContext) -> None:
            site = self.sites.get(f"https://{name}") or self.sites.get(name or "")
            ssl_object.context = server_context(name or address, site.tls if site else "good")

        # A context of its own (the cached ones are shared): it carries this net's callback.
        context = server_context.__wrapped__(address, "good")
        context.sni_callback = choose
        return context

    # -- for Wire

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that this internet owns, ends and asks for its error."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    def _site_of(self, request: Request) -> Site | None:
        host = request.host
        sites = self.sites
        return (
            sites.get(f"{request.scheme}://{host}")
            or sites.get(host)
            or sites.get(host.rpartition(":")[0] if ":" in host else host.rstrip("."))
            or self._by_address.get(request.connection.address)
        )

    def arrived(self, request: Request) -> Behaviour:
        """Log a request and choose what is to be done with it."""
        self.requests.append(request)
        request.connection.requests.append(request)
        site = request.site = self._site_of(request)
        if site is None:
            return NOT_FOUND
        site.in_flight += 1
        site.most_concurrent = max(site.most_concurrent, site.in_flight)
        request.concurrent = site.in_flight
        site.requests.append(request)
        return site.choose(request).chosen(request)

    def ended(self, request: Request) -> None:
        """The server has done with a request, or its client has gone."""
        if request.ended is not None:
            return
        request.ended = self.clock.monotonic()
        if request.site is not None:
            request.site.in_flight -= 1

    # -- for tests

    @property
    def client_ssl(self) -> ssl.SSLContext:
        """A client's TLS context that trusts this internet's good certificates."""
        return client_context()

    def session(self, **options: Any) -> aiohttp.ClientSession:
        """A plain aiohttp session on this internet: no gate, no guard."""
        connector = aiohttp.TCPConnector(resolver=self.resolver, ssl=self.client_ssl, limit=0)
        return aiohttp.ClientSession(connector=connector, **options)

    def dialled(self, address: str) -> bool:
        """Whether anybody connected to that address."""
        return any(connection.address == address for connection in self.connections)

    async def settle(self) -> None:
        """Let the loop run until nothing moves on the network, nothing is on its way, and no
        thread is at work for it."""
        while True:
            await self._rest()
            seen = self.activity
            await self._through_the_kernel()
            await self._rest()
            if seen == self.activity:
                return

    async def _rest(self) -> None:
        """Let the loop run until it has nothing to do but to wait; of a loop that does not say so,
        for twenty turns in which no octet has moved."""
        ready: Sized | None = getattr(asyncio.get_running_loop(), "_ready", None)
        seen, still = self.activity, 0
        while still < 20:
            await asyncio.sleep(0)
            if self._in_threads:
                await asyncio.wait(self._in_threads, timeout=0.001)
                still = 0
                continue
            if ready is not None and not ready:  # nor has the selector brought anything
                return
            still = still + 1 if ready is None and seen == self.activity else 0
            seen = self.activity

    async def _through_the_kernel(self) -> None:
        """What was sent before has arrived: octets of our own have gone the same way since."""
        loop = asyncio.get_running_loop()
        if self._courier is None:
            with socket.create_server(("127.0.0.1", 0)) as server:
                here = socket.create_connection(server.getsockname())
                there, _ = server.accept()
            self._courier = here, there
            for sock in self._courier:
                sock.setblocking(False)
                self._sockets.append(sock)
        here, there = self._courier
        for _ in range(_TRIPS):
            here.send(b"x")
            try:
                there.recv(1)
            except BlockingIOError:
                await loop.sock_recv(there, 1)

    async def _stirs(self, clock: VirtualClock, task: asyncio.Future[Any]) -> bool:
        """Whether something was still on its way: a busy kernel may take its time."""
        before = self.activity, clock.next_timer()
        await self._through_the_kernel()
        await self._rest()
        return task.done() or before != (self.activity, clock.next_timer())

    async def drive(self, awaitable: Awaitable[T], *, limit: float = 86_400.0) -> T:
        """Await it while the VirtualClock moves by itself, from timer to timer.

        Time moves only when the network is quiet. Where no timer is left the work must be
        with a thread: it is waited for, ten real seconds at most. AssertionError if it is
        not done within `limit` virtual seconds.
        """
        clock = self.clock
        assert isinstance(clock, VirtualClock), "drive() needs FakeInternet(clock=VirtualClock())"
        task = asyncio.ensure_future(awaitable)
        end, patience = clock.monotonic() + limit, 200
        try:
            while True:
                await self._rest()
                if task.done():
                    return task.result()
                when = clock.next_timer()
                if when is not None:
                    if when > clock.monotonic() and await self._stirs(clock, task):
                        continue
                    assert when <= end, f"not done within {limit} virtual seconds"
                    clock.advance(max(0.0, when - clock.monotonic()))
                    continue
                patience -= 1
                assert patience, "nothing is left to wait for, and it is not done"
                await asyncio.wait({task}, timeout=0.05)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def has_ipv6() -> bool:
    """Whether ::1 can be bound here."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 for a server that can't choose one itself; 10,000 above it another.

    Both below 32,768, where no connection and no port 0 of anybody's gets one: else it might be
    taken by the time the server binds it, or while the server is away for a moment. Where to look
    is the system's own chance: the tests' is the same in each process of a run.
    """
    while True:
        port = random.SystemRandom().randrange(11_000, 22_000)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind((_SHARED, port))
            other.bind((_SHARED, port + 10_000))
            return port
