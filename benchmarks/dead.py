"""The pace of hosts that answer while many dead origins are asked, through each entry point.

Five hosts on loopback may be asked five times per second each. The figure is the share of that pace
which they keep beside 10 to 2,000 dead origins, which refuse, have no name, never answer or reset.
Sockets and time are real; nothing leaves 127.0.0.0/8.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from benchmarks.options import Options
from benchmarks.report import Table
from gatekeeper import Config, Deferred, Denied, Gatekeeper, RemoteGatekeeper, polite_session
from gatekeeper.config import GuardConfig, PacingConfig, ServerConfig

__all__ = ["run"]

_WARM = 5
_INTERVAL = 0.2
_AGENT = "benchmark/1.0"
_KINDS = ("refused", "no such name", "silent", "reset")
_CONFIG = Config(
    guard=GuardConfig(allow=("127.0.0.0/8", "*.test")),
    pacing=PacingConfig(default_interval=_INTERVAL),
    server=ServerConfig(log_decisions="none"),
)
Works = Callable[["World", list[str]], Coroutine[Any, Any, None]]


class Names(AbstractResolver):
    """A resolver: 127.0.0.1 for live hosts and for one machine, a unique address otherwise."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name. Raises OSError if it does not exist."""
        if host.startswith("nosuchname-") or host.endswith(".nosuchname.test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        _, dash, number = host.removesuffix(".test").partition("-")
        address = f"127.9.{int(number) // 250}.{int(number) % 250 + 1}" if dash else "127.0.0.1"
        found = ResolveResult(
            hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0
        )
        return [found]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class World:
    """Hosts that answer and hosts that do not, in another process, and one sidecar."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports

    @property
    def warm(self) -> list[str]:
        """Return the URL prefixes of the hosts that answer."""
        return [f"http://warm{n}.test:{self.ports['warm']}/" for n in range(_WARM)]

    def dead(self, kind: str, count: int, *, one: bool) -> list[str]:
        """Return URLs of dead origins: all of a single domain and machine, or each of its own."""
        port = self.ports.get(kind, 80)
        word = kind.replace(" ", "")
        names = (f"n{i}.{word}.test" if one else f"{word}-{i}.test" for i in range(count))
        return [f"http://{name}:{port}/" for name in names]

    async def pages(self) -> tuple[int, float]:
        """Return the number of pages served so far, and the time of counting."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["warm"])
        writer.write(b"GET /count HTTP/1.1\r\n\r\n")
        counted, at = (await reader.readline()).split()
        writer.close()
        return int(counted), float(at)


@contextmanager
def _process(role: str) -> Iterator[dict[str, int]]:
    """Run a part of this benchmark in a process until the block is left. Yield its ports."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dead", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class _Sites:
    """The servers: each kind of host has its own port, on every address."""

    def __init__(self) -> None:
        self.pages = 0
        self.ports: dict[str, int] = {}
        self._sockets: list[socket.socket] = []

    async def serve(self) -> None:
        """Listen, print the ports, and serve until standard input ends."""
        answering = await asyncio.start_server(self._answer, "0.0.0.0", 0, backlog=1024)
        resetting = await asyncio.start_server(self._reset, "0.0.0.0", 0, backlog=4096)
        self.ports["warm"] = answering.sockets[0].getsockname()[1]
        self.ports["reset"] = resetting.sockets[0].getsockname()[1]
        for kind in ("refused", "silent"):
            bound = socket.create_server(("0.0.0.0", 0)) if kind == "silent" else socket.socket()
            if kind == "silent":
                bound.listen(0)
            else:
                bound.bind(("0.0.0.0", 0))
            self.ports[kind] = bound.getsockname()[1]
            self._sockets.append(bound)
        for _ in range(2):  # one more than that backlog holds: the next SYN goes unanswered
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", self.ports["silent"]))
            self._sockets.append(filler)
        async with answering, resetting:
            await _until_told(self.ports)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /count "):
                    writer.write(f"{self.pages} {time.monotonic()}\n".encode())
                    break
                self.pages += not head.startswith(b"GET /robots.txt")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()

    async def _reset(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def _until_told(ports: dict[str, int]) -> None:
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _serve_sidecar() -> None:
    from gatekeeper.sidecar.listening import Server
    from gatekeeper.sidecar.routes.table import ROUTES
    from gatekeeper.sidecar.service import Service

    async with Gatekeeper(_AGENT, config=_CONFIG, resolver=Names()) as gate:
        service = Service(gate, _CONFIG, ROUTES)
        service.serve()
        server = Server(service.handle, header=16_384, inline=service.inline)
        runner = web.ServerRunner(server, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await _until_told({"sidecar": runner.addresses[0][1]})
        finally:
            await service.close()
            await runner.cleanup()


# -- the entry points: each fetches pages of live hosts, and keeps asking the dead ones


async def _embedded(world: World, dead: list[str]) -> None:
    async with polite_session(user_agent=_AGENT, config=_CONFIG, resolver=Names()) as session:

        async def get(url: str) -> None:
            async with session.get(url) as response:
                await response.read()

        await _insist(world, dead, get)


async def _sidecar(world: World, dead: list[str]) -> None:
    with _process("sidecar") as ports:
        base = f"http://127.0.0.1:{ports['sidecar']}"
        connector = aiohttp.TCPConnector(limit=0, resolver=Names())
        async with (
            RemoteGatekeeper(base, _AGENT) as remote,
            RemoteGatekeeper(base, _AGENT) as other,
            aiohttp.ClientSession(connector=connector) as pages,
        ):

            async def get(url: str) -> None:
                async with remote.lease(url) as lease, pages.get(url) as response:
                    lease.report(status=response.status)

            async def check() -> None:
                while dead:
                    async for _ in other.check_many(dead):
                        pass
                    await asyncio.sleep(1.0)

            asking = asyncio.create_task(check())
            try:
                await _insist(world, [], get)
            finally:
                asking.cancel()


async def _insist(world: World, dead: list[str], get: Callable[[str], Awaitable[None]]) -> None:
    async def again(url: str) -> None:
        while True:
            try:
                await get(url)
            except Deferred as error:
                left = 0.0 if error.retry_at is None else error.retry_at.timestamp() - time.time()
                await asyncio.sleep(max(0.1, left))
            except (Denied, aiohttp.ClientError, OSError):
                await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as tasks:
        for url in (*world.warm, *dead):
            tasks.create_task(again(url))


async def _fetch(world: World, dead: list[str]) -> None:
    from gatekeeper.crawl.progress import Progress
    from gatekeeper.crawl.runner import crawl
    from gatekeeper.crawl.sources import Job

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        listed = Path(folder, "urls")
        living = (f"{url}{page}" for page in range(600) for url in world.warm)
        listed.write_text("\n".join((*dead, *living)), encoding="utf-8")
        job = Job(identity=_AGENT, config=_CONFIG, input=str(listed))
        extra: dict[str, Any] = {"resolver": Names()}
        await crawl(job, Progress(), **extra)


_DOORS: dict[str, Works] = {"embedded": _embedded, "sidecar": _sidecar, "fetch": _fetch}


def run(options: Options) -> list[Table]:
    """Return one table per entry point."""
    counts = (25, 200) if options.quick else (10, 25, 200, 2000)
    span = 3.0 if options.quick else 8.0
    return [asyncio.run(_table(door, counts, span)) for door in _DOORS]


async def _table(door: str, counts: tuple[int, ...], span: float) -> Table:
    rows, figures = [], {}
    alones: list[float] = []
    with _process("sites") as ports:
        world = World(ports)
        # A single site is recognised independently of the entry point, so it is measured once.
        for kind, one in itertools.product(
            _KINDS, (False, True) if door == "embedded" else (False,)
        ):
            alone = await _pace(world, door, [], span)
            alones.append(alone)
            paces = []
            for count in counts:
                dead = world.dead(kind, count, one=one)
                paces.append(await _pace(world, door, dead, span) / alone)
            name = f"{kind}, {'one site' if one else 'many'}"
            rows.append((name, *(f"{pace:.0%}" for pace in paces)))
            figures[name] = dict(zip(map(str, counts), paces, strict=True))
    return Table(
        f"Hosts that answer, beside dead ones: {door}",
        ("dead", *(f"{count:,}" for count in counts)),
        rows,
        "at least 95% of the pace without them",
        (
            f"{_WARM} hosts, one page in {_INTERVAL} s each, over {span:g} s: "
            f"{min(alones):.1f} to {max(alones):.1f} pages/s alone, measured before each row. "
            "The dead are asked first, and again as often as allowed. The sites, and the sidecar, "
            "are processes of their own.",
        ),
        {"alone": alones, "share": figures},
    )


async def _pace(world: World, door: str, dead: list[str], span: float) -> float:
    """Measure pages per second of the live hosts, starting one second after the first question."""
    work = asyncio.create_task(_DOORS[door](world, dead))
    try:
        await asyncio.sleep(1.0)
        before, began = await world.pages()
        await asyncio.sleep(span)
        pages, ended = await world.pages()
        return (pages - before) / (ended - began)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_Sites().serve() if sys.argv[1] == "sites" else _serve_sidecar())
