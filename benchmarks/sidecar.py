"""The sidecar beside an aiohttp handler that returns a constant, in processes of their own.

What is compared is the processor time that each server spends on a request, read from
the kernel: on a busy machine it moves far less than requests a second do.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from benchmarks.corpus import AGENT
from benchmarks.options import Options
from benchmarks.report import Table, count, seconds

__all__ = ["run"]

CONNECTIONS = 32
ORIGINS = 100
BATCH = 1000


def run(options: Options) -> list[Table]:
    """One table for each event loop that is installed."""
    loops = ["asyncio"]
    try:
        import uvloop  # noqa: F401

        loops.append("uvloop")
    except ImportError:
        pass
    return [_table(loop, options) for loop in loops]


def _table(loop: str, options: Options) -> Table:
    rounds = 5 if options.quick else 15
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(_server(name, loop)) for name in ("constant", "gatekeeper")
        }
        works = _works(servers)
        taken: dict[str, list[float]] = {name: [] for name in works}
        names = list(works)
        rng = random.Random(8750)
        for turn in range(rounds + 1):
            rng.shuffle(names)
            for name in names:
                spent = works[name](400 if options.quick else 1500)
                if turn:
                    taken[name].append(spent)
    constant = taken["a constant (aiohttp)"]
    rows, figures = [], {}
    for name, rounds_taken in taken.items():
        each = statistics.median(rounds_taken)
        share = statistics.median(c / own for c, own in zip(constant, rounds_taken, strict=True))
        rows.append((name, seconds(each), f"{count(1 / each)}/s", f"{share:.2f}"))
        figures[name] = {"server_seconds_each": each, "share_of_constant": share}
    return Table(
        f"The sidecar ({loop})",
        ("", "server time each", "each/s of one core", "share of the constant's rate"),
        rows,
        "GET /v1/check at least 0.85; POST /v1/check at least 500 k decisions/s; "
        "a lease and its report at least 0.7 a request",
        (f"{CONNECTIONS} connections, {ORIGINS} warm origins on loopback; batches of {BATCH}.",),
        figures,
    )


Work = Callable[[int], float]


def _works(servers: dict[str, _Server]) -> dict[str, Work]:
    """Name -> do about so many requests, return server seconds for one unit."""
    gate, constant = servers["gatekeeper"], servers["constant"]
    origins = gate.origins
    checks = [
        _get(f"/v1/check?url={quote(f'{o}/page/{n}', safe='')}") for n, o in enumerate(origins)
    ]
    batches = [
        _post(
            "/v1/check",
            {"urls": [f"{origins[(n + k) % len(origins)]}/a/{k}" for k in range(BATCH)]},
        )
        for n in range(8)
    ]

    def leases(requests: int) -> float:
        return gate.leases(requests // 2) / 2

    return {
        "a constant (aiohttp)": lambda n: constant.ask([_get("/")], n),
        "GET /v1/check, warm": lambda n: gate.ask(checks, n),
        f"POST /v1/check, a decision of {BATCH}": lambda n: gate.ask(batches, n // 40) / BATCH,
        "a lease and its report, each": leases,
    }


class _Server:
    """A server process, and connections to it."""

    def __init__(self, process: subprocess.Popen[str], port: int, origins: list[str]) -> None:
        self._pid = process.pid
        self.port = port
        self.origins = origins
        self._connections = [
            socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)
        ]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def ask(self, requests: list[bytes], total: int) -> float:
        """Server seconds for one request."""
        done = 0
        start = self._spent()
        while done < total:
            wave = self._connections[: total - done]
            for number, connection in enumerate(wave):
                connection.sendall(requests[(done + number) % len(requests)])
            for connection in wave:
                status, _ = _read(connection)
                if status != 200:
                    raise RuntimeError(f"answered {status}")
            done += len(wave)
        return (self._spent() - start) / done

    def leases(self, total: int) -> float:
        """Server seconds for a lease and its report, in waves like the other requests."""
        done = 0
        start = self._spent()
        while done < total:
            for number, connection in enumerate(self._connections):
                url = f"{self.origins[(done + number) % len(self.origins)]}/{done + number}"
                connection.sendall(_post("/v1/leases", {"url": url, "wait": 0, "ttl": 60}))
            reports = []
            for connection in self._connections:
                status, answer = _read(connection)
                if status != 201:
                    raise RuntimeError(f"a lease was answered {status}: {answer!r}")
                lease = json.loads(answer)["id"]
                reports.append(_post(f"/v1/leases/{lease}/report", {"status": 200}))
            # A wave of its own, as the constant's requests have: to be asked one by one
            # costs a server a turn of its loop each time.
            for connection, report in zip(self._connections, reports, strict=True):
                connection.sendall(report)
            for connection in self._connections:
                if _read(connection)[0] != 204:
                    raise RuntimeError("a report was refused")
            done += CONNECTIONS
        return (self._spent() - start) / done

    def _spent(self) -> float:
        """Seconds of processor time of all its threads, as the kernel counts them."""
        tasks = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def _server(name: str, loop: str) -> Iterator[_Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sidecar", name, loop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        server = _Server(process, told["port"], told["origins"])
        yield server
        server.close()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _get(target: str, port: int | None = None) -> bytes:
    host = "127.0.0.1" if port is None else f"127.0.0.1:{port}"
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode()


def _post(target: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _read(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer."""
    data = connection.recv(65536)
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(x[15:]) for x in lines if x.startswith(b"content-length:")), 0)
    parts = [body]
    left = length - len(body)
    while left > 0:
        part = connection.recv(min(left, 1 << 20))
        parts.append(part)
        left -= len(part)
    return int(head[9:12]), b"".join(parts)


# -- the server processes ------------------------------------------------------------------


async def _serve_constant() -> None:
    body = b'{"verdict":"allow","pad":"' + b"x" * 430 + b'"}'

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await _until_closed(runner.addresses[0][1], [])
    await runner.cleanup()


async def _serve_gate() -> None:
    from gatekeeper import Gatekeeper
    from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig
    from gatekeeper.sidecar.listening import Server
    from gatekeeper.sidecar.security import ANY_LITERAL
    from gatekeeper.sidecar.service import Service

    origins = await _origins()
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8",)),
        pacing=PacingConfig(default_interval=0.0, concurrency=100),
        server=ServerConfig(log_decisions="none"),
    )
    async with Gatekeeper(AGENT, config=config) as gate:
        async for decision in gate.check_many([f"{origin}/" for origin in origins]):
            assert decision, decision.explain()
        service = Service(gate, config, hosts=frozenset({"127.0.0.1", ANY_LITERAL}))
        service.serve()
        server = Server(service.handle, header=16384, inline=service.inline)
        runner = web.ServerRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await _until_closed(runner.addresses[0][1], origins)
        await service.close()
        await runner.cleanup()


async def _origins() -> list[str]:
    """Origins on loopback, each an address of its own, with a robots.txt of middling size."""
    text = "User-agent: *\nDisallow: /private/\nDisallow: /*.pdf$\nAllow: /a/\n" + "".join(
        f"Disallow: /section{n}/\n" for n in range(12)
    )

    async def robots(request: web.BaseRequest) -> web.Response:
        return web.Response(text=text)

    runner = web.ServerRunner(web.Server(robots))
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    return [f"http://127.0.{1 + n // 200}.{1 + n % 200}:{site.port}" for n in range(ORIGINS)]


async def _until_closed(port: int, origins: list[str]) -> None:
    print(json.dumps({"port": port, "origins": origins}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    factory = None
    if sys.argv[2] == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve_constant() if sys.argv[1] == "constant" else _serve_gate())
