"""The sidecar compared with an aiohttp handler that returns a constant, in separate processes.

The compared figure is the processor time that each server spends on a request, as counted by the
kernel: on a busy machine it varies much less than requests per second. It still depends on the
core, so the servers share one core and the client has another. It also varies over time, so a round
is short, asks every server once, and gives one ratio. Reported are the median, p10 and p90 of the
ratios.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
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
from benchmarks.timing import ratios, spread

__all__ = ["run"]

CONNECTIONS = 32
ORIGINS = 100
BATCH = 1000
WORKERS = 2


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
    rounds = options.rounds(quick=25, full=150)
    before = _pinned(0)
    try:
        with ExitStack() as stack:
            names = "constant", "gatekeeper", "workers"
            works = _works({name: stack.enter_context(_server(name, loop)) for name in names})
            taken = _taken(works, rounds)
    finally:
        if sys.platform == "linux" and before is not None:
            os.sched_setaffinity(0, before)
    rows, figures = [], {}
    for name, own in taken.items():
        to = taken[ONE if name.startswith(ONE) and name != ONE else CONSTANT]
        low, each, high = taking = spread(own)
        least, share, most = shares = ratios(to, own)
        shown = shares.shown("{:.2f}".format)
        rows.append((name, taking.shown(seconds), f"{count(1 / each)}/s", shown))
        figures[name] = {
            "server_seconds_each": each,
            "p10": low,
            "p90": high,
            "share_of_constant" if to is taken[CONSTANT] else "share_of_one_process": share,
            "share_p10": least,
            "share_p90": most,
        }
    return Table(
        f"The sidecar ({loop})",
        ("", "server time each", "each/s of one core", "share of the constant's rate"),
        rows,
        "GET /v1/check at least 1.0; a lease and its report at least 0.75 a request; "
        "POST /v1/check at least 150 k decisions/s; with workers at least 0.85 of one process",
        (
            f"{CONNECTIONS} connections, {ORIGINS} warm origins on loopback; batches of {BATCH}; "
            f"{rounds} rounds: median (p10 to p90).",
            f"The share of the row with {WORKERS} workers is that of one process's rate; its time "
            "is that of all of its processes.",
        ),
        figures,
    )


CONSTANT = "a constant (aiohttp)"
ONE = "GET /v1/check, warm"


def _taken(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return the server seconds for one unit of each kind of work, per round."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    rng = random.Random(8750)
    for turn in range(-_WARMING, rounds):
        rng.shuffle(names)
        for name in names:
            spent = works[name](_ROUND)
            if turn >= 0:
                taken[name].append(spent)
    return taken


_ROUND = 384
"""Requests per kind of work and round: about 10 ms of a server's time."""
_WARMING = 5


def _pinned(core: int) -> set[int] | None:
    """Pin this process to one of its cores. Return the cores it could use before, or None if the
    system does not support pinning or there is only one core."""
    if sys.platform != "linux":
        return None
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        return None
    os.sched_setaffinity(0, {sorted(cores)[core]})
    return cores


Work = Callable[[int], float]


def _works(servers: dict[str, _Server]) -> dict[str, Work]:
    """Return functions by name that send about that many requests and return seconds per unit."""
    gate, constant, workers = servers["gatekeeper"], servers["constant"], servers["workers"]
    origins = gate.origins

    def checks_of(server: _Server) -> list[bytes]:
        return [
            _get(f"/v1/check?url={quote(f'{o}/page/{n}', safe='')}", server.port)
            for n, o in enumerate(server.origins)
        ]

    checks, others = checks_of(gate), checks_of(workers)
    batches = [
        _post(
            "/v1/check",
            {"urls": [f"{origins[(n + k) % len(origins)]}/a/{k}" for k in range(BATCH)]},
            gate.port,
        )
        for n in range(8)
    ]

    def leases(requests: int) -> float:
        return gate.leases(requests // 2) / 2

    return {
        CONSTANT: lambda n: constant.ask([_get("/")], n),
        ONE: lambda n: gate.ask(checks, n),
        f"{ONE}, {WORKERS} workers": lambda n: workers.ask(others, 4 * n),
        f"POST /v1/check, a decision of {BATCH}": lambda n: gate.ask(batches, n // 40) / BATCH,
        "a lease and its report, each": leases,
    }


class _Server:
    """A server process, and connections to it."""

    def __init__(self, pids: list[int], port: int, origins: list[str]) -> None:
        self._pids = pids
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
        """Return the server seconds for one request."""
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
        """Return the server seconds for a lease and its report, in waves like other requests."""
        done = 0
        start = self._spent()
        while done < total:
            for number, connection in enumerate(self._connections):
                url = f"{self.origins[(done + number) % len(self.origins)]}/{done + number}"
                connection.sendall(
                    _post("/v1/leases", {"url": url, "wait": 0, "ttl": 60}, self.port)
                )
            reports = []
            for connection in self._connections:
                status, answer = _read(connection)
                if status != 201:
                    raise RuntimeError(f"a lease was answered {status}: {answer!r}")
                lease = json.loads(answer)["id"]
                reports.append(_post(f"/v1/leases/{lease}/report", {"status": 200}, self.port))
            # In waves, like the requests of the constant handler: requests one by one cost a
            # server an iteration of its event loop each.
            for connection, report in zip(self._connections, reports, strict=True):
                connection.sendall(report)
            for connection in self._connections:
                if _read(connection)[0] != 204:
                    raise RuntimeError("a report was refused")
            done += CONNECTIONS
        return (self._spent() - start) / done

    def _spent(self) -> float:
        """Return the processor seconds of all its threads, as counted by the kernel."""
        tasks = (
            task for pid in self._pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
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
        server = _Server(told["pids"], told["port"], told["origins"])
        yield server
        server.close()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _get(target: str, port: int | None = None) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: {_host(port)}\r\nAccept: */*\r\n\r\n".encode()


def _host(port: int | None) -> str:
    return "127.0.0.1" if port is None else f"127.0.0.1:{port}"


def _post(target: str, body: object, port: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {_host(port)}\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _read(connection: socket.socket) -> tuple[int, bytes]:
    """Read one response. Return its status and body."""
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
    await _until_closed(runner.addresses[0][1], [], [os.getpid()])
    await runner.cleanup()


async def _serve_gate(count: int) -> None:
    """Serve the sidecar with that many workers."""
    from gatekeeper import Gatekeeper
    from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig
    from gatekeeper.sidecar.listening import Acceptor, Server
    from gatekeeper.sidecar.routes.table import ROUTES
    from gatekeeper.sidecar.service import Service
    from gatekeeper.sidecar.workers import Workers

    origins = await _origins()
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8",)),
        pacing=PacingConfig(default_interval=0.0, concurrency=100),
        server=ServerConfig(log_decisions="none", workers=count),
    )
    async with Gatekeeper(AGENT, config=config) as gate:
        async for decision in gate.check_many([f"{origin}/" for origin in origins]):
            assert decision, decision.explain()
        sock = socket.create_server(("127.0.0.1", 0))
        named = [sock.getsockname()[:2]]
        workers = Workers(count) if count else None
        service = Service(gate, config, ROUTES, addresses=named, workers=workers)
        service.serve()
        server = Server(
            service.handle,
            header=16384,
            inline=service.inline,
            pass_on=None if workers is None else workers.pass_on,
        )
        runner = web.ServerRunner(server)
        await runner.setup()
        if workers is None:
            await Acceptor(sock, server.serve, backlog=128).start()
            await _until_closed(sock.getsockname()[1], origins, [os.getpid()])
        else:
            async with workers.serving(server):
                ready = workers.accepting
                while len(ready()) != count:
                    await asyncio.sleep(0.01)
                pids = [one.process.pid for one in ready()]
                await Acceptor(sock, workers.dispatch, backlog=128).start()
                await _until_closed(sock.getsockname()[1], origins, [os.getpid(), *pids])
        await service.close()
        await runner.cleanup()


async def _origins() -> list[str]:
    """Serve origins on loopback, each with its own address and a robots.txt of medium size."""
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


async def _until_closed(port: int, origins: list[str], pids: list[int]) -> None:
    print(json.dumps({"port": port, "origins": origins, "pids": pids}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    factory = None
    if sys.argv[2] == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    _pinned(1)
    processes = WORKERS if sys.argv[1] == "workers" else 0
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve_constant() if sys.argv[1] == "constant" else _serve_gate(processes))
