"""`gatekeeper serve --workers N`: its processes behave as one service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gatekeeper import Gatekeeper
from gatekeeper.cli import main
from gatekeeper.config import Config, GuardConfig, PacingConfig, ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import worker as worker_module
from gatekeeper.sidecar import workers as workers_module
from gatekeeper.sidecar.channel import Channel, HandOver
from gatekeeper.sidecar.listening import Acceptor, Server
from gatekeeper.sidecar.reload import check_server, reload
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.service import Service
from gatekeeper.sidecar.workers import Workers
from tests.internet import FakeInternet
from tests.internet.sites import Site
from tests.sidecar.conftest import Sidecar, collect
from tests.waiting_support import seen_in_time, until

OPEN, CLOSED = "User-agent: *\nAllow: /\n", "User-agent: *\nDisallow: /\n"
QUIET = {"GATEKEEPER_SERVER_LOG_DECISIONS": "none", "GATEKEEPER_PACING_DEFAULT_INTERVAL": "0"}


@pytest.fixture
async def site(internet: FakeInternet) -> Site:
    return internet.site("127.0.0.1").robots(OPEN)


@pytest.fixture
async def origin(internet: FakeInternet, site: Site) -> str:
    return f"http://127.0.0.1:{internet.listener().port()}"


async def begin(start: Any, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """Start a sidecar, and return when both of its workers answer."""
    sidecar = await start("--workers", "2", *arguments, env={**QUIET, **(env or {})})
    for number in (1, 2):
        assert await sidecar.said(f"worker {number} (process ")
    return sidecar


def pids(sidecar: Any) -> list[int]:
    """Return the process ids of the current workers."""
    found = {
        number: line.partition(f"worker {number} (process ")[2].partition(")")[0]
        for number in (1, 2)
        for line in sidecar.errors
        if f"worker {number} (process " in line and "answers" in line
    }
    return [int(pid) for pid in found.values()]


@contextlib.asynccontextmanager
async def connection(sidecar: Any) -> Any:
    """Yields `ask(path, body=None)` over one connection; it returns the status and JSON or text."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:

        async def ask(path: str, body: object = None, **options: Any) -> tuple[int, Any]:
            method = "GET" if body is None else "POST"
            async with session.request(
                method, sidecar.base + path, json=body, **options
            ) as response:
                text = await response.text()
                is_json = "json" in response.headers.get("Content-Type", "")
                return response.status, json.loads(text) if is_json and text else text

        yield ask


async def verdicts(sidecar: Any, url: str, connections: int = 6) -> set[str]:
    """Return the verdicts about a URL over several new connections, and so of both workers."""
    found = set()
    for _ in range(connections):
        async with connection(sidecar) as ask:
            for _ in range(2):  # the second one by the process that has the connection now
                _, told = await ask(f"/v1/check?url={quote(url, safe='')}")
                found.add(told["verdict"])
    return found


async def metric(sidecar: Any, name: str) -> float:
    async with connection(sidecar) as ask:
        _, text = await ask("/metrics")
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_workers_share_one_fetch_and_one_count(
    start: Any, internet: FakeInternet, origin: str, site: Site
) -> None:
    sidecar = await begin(start)
    async with contextlib.AsyncExitStack() as stack:
        asks = [await stack.enter_async_context(connection(sidecar)) for _ in range(12)]
        query = f"/v1/check?url={quote(origin + '/a', safe='')}"
        told = await asyncio.gather(*(ask(query) for ask in asks))
        assert [status for status, _ in told] == [200] * 12
        assert len([one for one in internet.requests if one.path == "/robots.txt"]) == 1

        batch = [f"{origin}/{n}" for n in range(50)]
        for ask in asks:
            status, body = await ask("/v1/check", {"urls": batch})
            assert [one["url"] for one in body["decisions"]] == batch
        decided = 12 + 12 * 50
        async with connection(sidecar) as fresh:
            assert (await fresh(query))[0] == 200
            decided += 1
            assert await metric(sidecar, "gatekeeper_worker_connections") >= 1
        assert await metric(sidecar, "gatekeeper_decisions_total") == decided
        assert (
            await metric(sidecar, 'gatekeeper_http_requests_total{code="200",method="POST"') == 12
        )
        status, found = await asks[0](f"/v1/decisions/{told[-1][1]['id']}")
        assert (status, found["decision"]["url"]) == (200, f"{origin}/a")
        _, host = await asks[0]("/v1/hosts/127.0.0.1")
        assert host["allowed"] == decided

        site.robots(CLOSED)
        status, _ = await asks[1]("/v1/hosts/127.0.0.1/refresh", {"origin": origin})
        assert status == 200
        answers = await asyncio.gather(*(ask(query) for ask in asks))
        assert {one["verdict"] for _, one in answers} == {"deny"}
    assert await verdicts(sidecar, f"{origin}/a") == {"deny"}
    sidecar.tell(signal.SIGTERM)
    assert await sidecar.stopped() == 0


async def test_a_worker_that_is_killed_under_load_loses_no_lease_and_comes_back(
    start: Any, origin: str
) -> None:
    sidecar = await begin(start, env={"GATEKEEPER_PACING_CONCURRENCY": "10000"})
    stopped, leases, lost = asyncio.Event(), [], 0
    query = f"/v1/check?url={quote(origin + '/a', safe='')}"

    async def load() -> None:
        nonlocal lost
        while not stopped.is_set():
            try:
                async with connection(sidecar) as ask:
                    for _ in range(20):
                        status, told = await ask(query)
                        assert (status, told["verdict"]) == (200, "allow")
                    status, lease = await ask("/v1/leases", {"url": f"{origin}/a", "wait": 5})
                    assert status == 201
                    leases.append(lease["id"])
            except aiohttp.ClientConnectionError:
                lost += 1

    loads = [asyncio.create_task(load()) for _ in range(4)]
    killed = pids(sidecar)[0]
    async with asyncio.timeout(30):
        await until(lambda: len(leases) >= 4)
        os.kill(killed, signal.SIGKILL)
        assert await sidecar.said("ended by SIGKILL; it is started again in 0.5 s")
        held = len(leases)
        await until(lambda: len(leases) >= held + 4 and killed not in pids(sidecar))
    stopped.set()
    await asyncio.gather(*loads)

    async with connection(sidecar) as ask:
        _, told = await ask("/v1/leases")
        assert told["total"] == len(leases)
        for lease in leases:
            assert (await ask(f"/v1/leases/{lease}/report", {"status": 200}))[0] == 204
    assert lost <= 4  # only what the worker was answering


async def test_limits_and_rules_hold_across_all_workers(
    start: Any, origin: str, site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "gatekeeper.toml"
    word = '[[host]]\nmatch = "127.0.0.1"\nrobots = "{}"\ninterval = 60.0\n'
    file.write_text("[server]\nclient_concurrency = 2\n" + word.format("obey"))
    sidecar = await begin(start, "--config", str(file))
    query = f"/v1/check?url={quote(origin + '/a', safe='')}"
    async with contextlib.AsyncExitStack() as stack:
        asks = [await stack.enter_async_context(connection(sidecar)) for _ in range(6)]
        for ask in asks[2:]:
            assert (await ask(query))[1]["verdict"] == "allow"
        wanted = {"url": f"{origin}/a", "wait": 60}  # the robots.txt fetch has just used the turn
        polls = [asyncio.create_task(ask("/v1/leases", wanted)) for ask in asks[:2]]
        # Both wait for their lease, so a third request is refused, by worker and owner alike.
        async with asyncio.timeout(20):
            while [(await ask(query))[0] for ask in asks[2:]] != [429] * 4:
                await asyncio.sleep(0.01)
        for poll in polls:
            poll.cancel()
        await asyncio.wait(polls)
        async with asyncio.timeout(20):
            while [(await ask(query))[0] for ask in asks[2:]] != [200] * 4:
                await asyncio.sleep(0.01)

        file.write_text("[server]\nclient_concurrency = 9\n" + word.format("deny"))
        status, done = await asks[2]("/v1/admin/reload", {})
        assert (status, done["applied"]) == (200, ["server.client_concurrency", "host"])
    assert await verdicts(sidecar, f"{origin}/a") == {"deny"}


async def test_workers_learn_of_an_override_and_of_its_end(start: Any, origin: str) -> None:
    sidecar = await begin(start)
    rule = {"robots": "deny", "by": "Kim"}
    path = "/v1/hosts/127.0.0.1/override"
    assert await verdicts(sidecar, f"{origin}/a") == {"allow"}
    assert (await sidecar.post(path, rule | {"seconds": 3600}))[0] == 200
    assert await verdicts(sidecar, f"{origin}/a") == {"deny"}

    async def allow(seconds: float) -> None:
        assert (await sidecar.post(path, {"robots": "allow", "seconds": seconds}))[0] == 200

    async def answers(wanted: str) -> bool:
        return await verdicts(sidecar, f"{origin}/a") == {wanted}

    await seen_in_time(allow, lambda: answers("allow"))
    await until(lambda: answers("deny"))


async def test_a_unix_socket_and_tokens_work_with_workers(
    start: Any, origin: str, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"asker:check:{'a' * 40}\ncrawler:crawl:{'c' * 40}\n")
    tokens.chmod(0o600)
    with tempfile.TemporaryDirectory(prefix="gk") as place:
        sidecar = await begin(start, "--socket", f"{place}/s", "--token-file", str(tokens))
        asker, crawler = (
            {"headers": {"Authorization": f"Bearer {letter * 40}"}} for letter in "ac"
        )
        url = f"{sidecar.base}/v1/check?url={quote(origin + '/a', safe='')}"
        for _ in range(4):
            for options, expected in ((asker, 200), ({}, 401), (crawler, 200)):
                async with sidecar.session.get(url, **options) as response:
                    assert response.status == expected
        wanted = {"url": f"{origin}/a"}
        for options, expected in ((asker, 403), (crawler, 201)):
            async with sidecar.session.post(
                f"{sidecar.base}/v1/leases", json=wanted, **options
            ) as response:
                assert response.status == expected

        sidecar.tell(signal.SIGKILL)
        await sidecar.stopped()
        assert await sidecar.said("the owner process is gone")
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids(sidecar)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "/a", "tls_key": "/b"}, "put a proxy in front that ends TLS"),
        ({"client_rate": 5.0}, "server.client_rate is counted by one process"),
    ],
)
def test_settings_that_do_not_work_with_workers_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_server(Config(server=ServerConfig(workers=2, **settings)))


async def test_a_reload_refuses_settings_that_do_not_work_with_workers(serve: Any) -> None:
    service = (await serve()).service
    server = msgspec.structs.replace(service.config.server, workers=2)
    service.config = msgspec.structs.replace(service.config, server=server)
    later = msgspec.structs.replace(server, workers=0, client_rate=5.0)  # `workers` needs a restart
    service.reread = lambda: msgspec.structs.replace(service.config, server=later)
    with pytest.raises(ConfigError, match="client_rate is counted by one process"):
        await reload(service)
    assert service.config.server.client_rate is None


def test_a_flag_that_does_not_work_with_workers_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--workers", "65"]) == 2
    assert "--workers" in capsys.readouterr().err


async def test_systemd_hands_a_socket_to_a_sidecar_with_workers_and_reloads_it(
    origin: str, tmp_path: Path
) -> None:
    """A service manager hands over a socket, and sees READY, RELOADING and STOPPING.

    RELOADING lasts until every worker follows the new file. In the end no process is left.
    """
    file = tmp_path / "gatekeeper.toml"
    word = (
        '[server]\nlog_rate = {}\nmax_header = {}\n[[host]]\nmatch = "127.0.0.1"\nrobots = "{}"\n'
    )
    file.write_text(word.format(1000, 16_384, "obey"))
    script = (
        "import os, sys; given = int(sys.argv[1]); os.dup2(given, 3); given == 3 or os.close(given)"
        "; os.environ['LISTEN_PID'] = str(os.getpid()); "
        "os.execv(sys.executable, [sys.executable, '-m', 'gatekeeper', 'serve', "
        "'--storage', 'memory', '--workers', '2', '--allow-address', '127.0.0.0/8', '--config', "
        "sys.argv[2]])"
    )
    loop = asyncio.get_running_loop()
    with (
        tempfile.TemporaryDirectory(prefix="gk") as place,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(f"{place}/notify")
        manager.setblocking(False)

        async def told() -> str:
            async with asyncio.timeout(45):
                return (await loop.sock_recv(manager, 200)).decode().partition("\n")[0]

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script,
            str(listener.fileno()),
            str(file),
            pass_fds=(listener.fileno(),),
            env={
                **os.environ,
                **QUIET,
                "LISTEN_FDS": "1",
                "NOTIFY_SOCKET": f"{place}/notify",
                "GATEKEEPER_SERVER_DRAIN_GRACE": "0",
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        sidecar = Sidecar(process, f"http://127.0.0.1:{listener.getsockname()[1]}", "", None)  # type: ignore[arg-type]
        assert process.stderr is not None
        reader = asyncio.create_task(collect(process.stderr, sidecar))
        try:
            assert await told() == "READY=1"
            for number in (1, 2):
                assert await sidecar.said(f"worker {number} (process ")
            assert await verdicts(sidecar, f"{origin}/a") == {"allow"}
            before = pids(sidecar)
            file.write_text(word.format(2000, 9_000, "deny"))
            for pid in (*before, process.pid):  # as `kill -HUP` of the whole process group does
                os.kill(pid, signal.SIGHUP)
            assert [await told(), await told()] == ["RELOADING=1", "READY=1"]
            assert await verdicts(sidecar, f"{origin}/a") == {"deny"}
            assert await sidecar.said("the configuration was read again; changed: server.log_rate")
            assert await sidecar.said("these settings need a restart: server.max_header")
            assert pids(sidecar) == before
            assert await metric(sidecar, "gatekeeper_worker_restarts") == 0
            assert not any(_listens(pid, listener) for pid in before)
            process.send_signal(signal.SIGTERM)
            assert await told() == "STOPPING=1"
            async with asyncio.timeout(20):
                assert await process.wait() == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reader


def _listens(pid: int, listener: socket.socket) -> bool:
    """Return whether the process has a descriptor of the socket."""
    inode = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
    return inode in {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}


async def test_a_stop_answers_what_is_under_way_with_a_worker_and_with_the_owner(
    start: Any, origin: str
) -> None:
    """The owner answers a request of which a worker has read half, and refuses waiting leases.

    Every process exits.
    """
    sidecar = await begin(start, env={"GATEKEEPER_PACING_DEFAULT_INTERVAL": "60"})
    host, port = sidecar.base.removeprefix("http://").split(":")
    query = f"/v1/check?url={quote(origin + '/a', safe='')}"
    async with contextlib.AsyncExitStack() as stack:
        ask, waiting = [await stack.enter_async_context(connection(sidecar)) for _ in range(2)]
        assert (await ask(query))[0] == 200
        assert await verdicts(sidecar, f"{origin}/a") == {"allow"}
        halves = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            head = f"GET {query} HTTP/1.1\r\nHost: {host}:{port}\r\n".encode()
            writer.write(head + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            halves.append((reader, writer))
        wanted = {"url": f"{origin}/a", "wait": 60}  # the robots.txt fetch has just used the turn
        poll = asyncio.create_task(waiting("/v1/leases", wanted))
        async with asyncio.timeout(20):
            while (await ask("/v1/hosts/127.0.0.1"))[1]["waiting"] == 0:
                await asyncio.sleep(0.01)

        sidecar.tell(signal.SIGTERM)
        assert (await poll)[0] == 503
        for reader, writer in halves:
            with contextlib.suppress(ConnectionResetError):
                await reader.readuntil(b"}")  # the rest of the first answer
            writer.write(b"\r\n")
        for reader, _ in halves:
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    assert await sidecar.stopped() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(sidecar))


async def test_a_worker_that_hangs_gets_no_connection_and_is_killed(
    internet: FakeInternet, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner notices by itself, without a scrape or a reload."""
    for name, seconds in (
        ("_CHECK_SECONDS", 0.05),
        ("_LATE_SECONDS", 0.3),
        ("SYNC_SECONDS", 600.0),
        ("_RESTART_SECONDS", 0.0),
    ):
        monkeypatch.setattr(workers_module, name, seconds)
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8",)),
        pacing=PacingConfig(default_interval=0.0),
        server=ServerConfig(log_decisions="none", workers=2),
    )
    query = f"/v1/check?url={quote(origin + '/a', safe='')}"
    async with contextlib.AsyncExitStack() as stack:
        gate = await stack.enter_async_context(Gatekeeper("testbot/1.0", config=config))
        sock = socket.create_server(("127.0.0.1", 0))
        named = [sock.getsockname()[:2]]
        workers = Workers(2)
        service = Service(gate, config, ROUTES, addresses=named, workers=workers)
        stack.push_async_callback(service.close)
        service.serve()
        server = Server(
            service.handle, header=16_384, inline=service.inline, pass_on=workers.pass_on
        )
        runner = web.ServerRunner(server)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        base = SimpleNamespace(base=f"http://127.0.0.1:{named[0][1]}")
        await stack.enter_async_context(workers.serving(server))
        acceptor = Acceptor(sock, workers.dispatch, backlog=128)
        await acceptor.start()
        stack.push_async_callback(acceptor.stop)
        await stack.enter_async_context(asyncio.timeout(60))
        await until(lambda: len(workers.accepting()) == 2)

        held = [await stack.enter_async_context(connection(base)) for _ in range(8)]
        for _ in range(3):  # answered by the owner first, then by a worker
            for ask in held:
                assert (await ask(query))[0] == 200
        hung = workers.accepting()[0].process.pid
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: len(workers.accepting()) != 2)
        for _ in range(4):  # no new connection waits for the worker that hangs
            async with connection(base) as ask:
                assert (await ask(query))[0] == 200
        assert Path(f"/proc/{hung}").exists()

        monkeypatch.setattr(workers_module, "SYNC_SECONDS", 0.5)
        await workers.settle()  # the worker is killed, and its connections break
        for ask in held:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                assert (await ask(query))[0] == 200
        await until(lambda: not Path(f"/proc/{hung}").exists())
        await until(lambda: workers.restarts >= 1)


async def test_a_connection_that_meets_origins_stays_with_its_worker(
    start: Any, internet: FakeInternet
) -> None:
    """A worker keeps a connection that asks about a new origin, if the owner has its record.

    If the owner has no record either, the connection goes to the owner and is answered there.
    """
    sidecar = await begin(start)
    origins = []
    for n in range(1, 21):
        internet.site(f"127.0.0.{n}").robots(OPEN if n % 2 else CLOSED)
        origins.append(f"http://127.0.0.{n}:{internet.listener(f'127.0.0.{n}').port()}")
    async with connection(sidecar) as ask:  # the owner has all records but the last
        for origin in origins[:-1]:
            assert (await ask(f"/v1/explain?url={quote(origin + '/a', safe='')}"))[0] == 200
    async with contextlib.AsyncExitStack() as stack:
        asks = [await stack.enter_async_context(connection(sidecar)) for _ in range(4)]
        for n, origin in enumerate(origins[:-1], 1):
            query = f"/v1/check?url={quote(origin + '/a', safe='')}"
            for status, told in await asyncio.gather(*(ask(query) for ask in asks)):
                assert (status, told["verdict"]) == (200, "allow" if n % 2 else "deny")
        assert await metric(sidecar, "gatekeeper_worker_connections") >= 4  # none was passed on
        last = f"/v1/check?url={quote(origins[-1] + '/a', safe='')}"
        for status, told in await asyncio.gather(*(ask(last) for ask in asks)):
            assert (status, told["verdict"]) == (200, "deny")
    robots = [one.host for one in internet.requests if one.path == "/robots.txt"]
    assert len(robots) == len(set(robots)) == len(origins)


async def test_connections_that_a_process_passed_on_before_it_ended_are_taken() -> None:
    """Each takes one read, and the end of the process may be noticed before."""
    taken: list[socket.socket] = []
    ours, theirs = socket.socketpair()
    ended = Channel(theirs, lambda *_: None, lambda: None)
    channel = Channel(ours, lambda _, one: taken.append(cast("socket.socket", one)), lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        for _ in range(20):
            ended.send(HandOver(), sock.fileno())
    ended.close()
    channel.read_rest()
    assert channel.closed
    assert len(taken) == 20
    for one in taken:
        one.close()


async def test_a_question_that_comes_while_another_waits_for_a_record_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    passed: list[HandOver] = []
    known: set[str] = set()
    worker = SimpleNamespace(
        loop=asyncio.get_running_loop(),
        clients=set(),
        done=asyncio.get_running_loop().create_future(),
        max_connections=1,
        max_request=1000,
        max_header=8190,
        waiting={"http://a.test": []},
        missing_origin=None,
        channel=SimpleNamespace(send=lambda message, _fd: passed.append(message)),
    )

    def answer(request: Any, *_: object) -> bytes | None:
        worker.missing_origin = "http://a.test"
        return b"answered" if known else None

    worker.answer = answer
    first, second = (b"GET /v1/check?url=%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in (1, 2))
    made = worker_module._WorkerConnection(cast("Any", worker), b"")
    await worker.loop.connect_accepted_socket(lambda: made, ours)
    with theirs:
        made.data_received(first)
        made.data_received(second)
        known.add("http://a.test")
        made.retry()
        assert passed == [HandOver(first + second)]  # the owner reads requests one after the other
