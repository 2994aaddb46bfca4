"""Real peers: nginx in front of a site, TLS, slow clients, floods of connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import posixpath
import re
import resource
import selectors
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import aiohttp
import pytest

from gatekeeper import RobotsTxt
from gatekeeper.sidecar import listening, routing
from tests.effort import LONG
from tests.internet import FakeInternet
from tests.internet.certs import authority, issue_files
from tests.sidecar.conftest import connected, sent

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
POLLS = 5_000 if LONG else 1_500
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "nginx" / "gatekeeper.conf"
DEPLOYMENT = ROOT / "docs" / "deployment.md"


@asynccontextmanager
async def nginx(directory: Path, config: str, sock: socket.socket) -> AsyncIterator[str]:
    """Run nginx on a socket that listens already, handed over as in its own binary upgrade.

    So no other process can take the port, and a client that connects before nginx runs waits.
    """
    assert NGINX is not None
    path = directory / "nginx.conf"
    path.write_text(
        f"daemon off; pid {directory}/pid; error_log stderr; worker_processes 1;\n"
        "events { worker_connections 64; }\n"
        f"http {{ access_log off; client_body_temp_path {directory}; proxy_temp_path {directory};\n"
        f"fastcgi_temp_path {directory}; uwsgi_temp_path {directory};\n"
        f"scgi_temp_path {directory};\n{config}\n}}\n",
        encoding="utf-8",
    )
    process = await asyncio.create_subprocess_exec(
        *(NGINX, "-c", str(path), "-e", "stderr"),
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(sock.fileno(),),
        env={**os.environ, "NGINX": f"{sock.fileno()};"},
    )
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def behind_nginx(
    serve: Any, internet: FakeInternet, directory: Path, robots: str, added: str = ""
) -> AsyncIterator[tuple[Any, str]]:
    """Run the recipe of `examples/nginx/`. Yields the sidecar, and the base URL at nginx.

    Only addresses and paths are filled in: nginx serves the site's pages and robots.txt. `added`
    goes into the `server` block.
    """
    site = internet.site("127.0.0.1").robots(robots)
    site.page("/page", "the page").page("/private", "a secret").page("/private/x", "another")
    sidecar = await serve(forward_auth=True)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    places = {
        "listen 8080": f"listen 127.0.0.1:{port}",
        "server_name www.example.org;": f"server_name 127.0.0.1; {added}",
        "127.0.0.1:8750": sidecar.base.removeprefix("http://"),
        "127.0.0.1:8000": f"127.0.0.1:{internet.listener().port()}",
    }
    config = RECIPE.read_text(encoding="utf-8")
    for printed, here in places.items():
        assert printed in config
        config = config.replace(printed, here)
    with sock:
        async with nginx(directory, config, sock) as base:
            yield sidecar, base


async def status_at(sidecar: Any, url: str, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with sidecar.session.get(url, headers=named) as response:
        return int(response.status)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_the_nginx_recipe_lets_through_what_robots_txt_allows(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    robots = "User-agent: badbot\nDisallow: /private\n"
    async with behind_nginx(serve, internet, tmp_path, robots) as (sidecar, base):
        async with sidecar.session.get(base + "/page") as cold:
            assert (cold.status, cold.headers["Retry-After"]) == (403, "1")
        # The sidecar's own request for robots.txt passes through the same nginx.
        _, known = await sidecar.get("/v1/check", params={"url": base + "/"})
        assert (known["state"], known["robots_status"]) == ("parsed", 200)
        answers = {
            (agent, path): await status_at(sidecar, base + path, User_Agent=agent)
            for agent in ("badbot/1.0", "goodbot/1.0")
            for path in ("/page", "/private")
        }

    assert answers == {
        ("badbot/1.0", "/page"): 200,
        ("badbot/1.0", "/private"): 403,
        ("goodbot/1.0", "/page"): 200,
        ("goodbot/1.0", "/private"): 200,
    }


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_t7_no_request_of_a_visitor_opens_a_denied_page_behind_the_nginx_recipe(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    robots = "User-agent: *\nDisallow: /private\n"
    async with behind_nginx(serve, internet, tmp_path, robots) as (sidecar, base):
        await sidecar.get("/v1/check", params={"url": base + "/"})
        assert await status_at(sidecar, base + "/page") == 200
        here = base.removeprefix("http://")
        forged: list[dict[str, str]] = [
            {"X_Original_URL": base + "/page"},
            {"X_Original_URI": "/page"},
            {"X_Forwarded_Uri": "/page"},
            {"X_Forwarded_Host": f"{here}/page?"},
            {"X_Forwarded_Proto": "https"},
            *({"Host": host} for host in ("elsewhere.test", f"{here}?", f"{here}#", "a@b")),
        ]
        answers = [await status_at(sidecar, base + "/private/x", **one) for one in forged]

    assert answers == [403] * len(forged)


def forms(path: bytes) -> set[bytes]:
    """Return targets that some reader may take for the path, or for /robots.txt."""
    name, rest = path[1:], path[2:]
    ups = (b"..", b"%2e%2e", b".%2e", b"%2E.")
    slashes = (b"/", b"%2f", b"%2F", b"//", b"/./", b"\\", b"%5c", b"%252f")
    return {
        *(
            path + slash + up + slash + up + slash + b"robots.txt"
            for up in ups
            for slash in slashes
        ),
        *(b"/robots.txt" + slash + up + slash + name for up in ups for slash in slashes),
        *(b"/a" + b"/" + up + b"/" + name for up in ups),
        *(
            path + end
            for end in (b"", b"/", b"?x", b"#x", b"%23x", b";x", b"%00", b"%0a", b"?", b".")
        ),
        *(path + end + b"/../../robots.txt" for end in (b"?", b"#", b"%3f", b"%23", b";", b"%00")),
        *(
            b"/robots.txt" + end + b"/../" + name
            for end in (b"?", b"#", b"%3f", b"%23", b";", b"%00")
        ),
        *(
            b"/robots.txt" + end
            for end in (b"", b"?" + name, b"/", b"/x", b"%2fx", b";x", b"%20", b".")
        ),
        b"/" + b"%%%02x" % name[0] + rest,
        b"/./" + name,
        b"/%2e/" + name,
        b"http://127.0.0.1" + path,
        b"http://127.0.0.1/robots.txt/.." + path,
        b"http://127.0.0.1" + path + b"/..%2f..%2frobots.txt",
    }


def as_merged(target: str) -> str:
    """Return a path as a backend reads it that decodes it, merges slashes and resolves dots."""
    return posixpath.normpath(re.sub("/+", "/", unquote(target.partition("?")[0])))


REFUSAL = re.search(r"`(if \(\$request_uri .*?)`", DEPLOYMENT.read_text(encoding="utf-8"))
"""The line of nginx that the document has for backends that merge slashes or decode."""


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize("merges", [False, True], ids=["a backend", "one that merges slashes"])
async def test_t7_no_form_of_a_target_passes_the_nginx_recipe_without_a_decision(
    serve: Any, internet: FakeInternet, tmp_path: Path, merges: bool
) -> None:
    assert REFUSAL is not None
    robots = "User-agent: *\nDisallow: /private\n"
    policy = RobotsTxt.parse(robots).policy("*")
    added = REFUSAL[1] if merges else ""
    async with behind_nginx(serve, internet, tmp_path, robots, added) as (sidecar, base):
        await sidecar.get("/v1/check", params={"url": base + "/"})
        assert await status_at(sidecar, base + "/page") == 200
        head = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        for target in sorted(forms(b"/private/x")):
            internet.requests.clear()
            answer = await sent(base, head % target)
            seen = [one.target for one in internet.requests]
            read = [as_merged(one) for one in seen] if merges else seen
            assert all(policy.allowed(one) for one in read), (target, seen)
            if b"User-agent" in answer:
                assert [one.partition("?")[0] for one in seen] == ["/robots.txt"], (target, seen)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize(
    "odd",
    [b"User-Agent: a\r\nUser-Agent: b\r\n", b"X-Any: a\x01b\r\n", b"User-Agent: a\x01b\r\n"],
)
async def test_t7_odd_headers_of_a_visitor_are_no_server_error(
    serve: Any, internet: FakeInternet, tmp_path: Path, odd: bytes
) -> None:
    robots = "User-agent: *\nDisallow: /private\n"
    async with behind_nginx(serve, internet, tmp_path, robots) as (sidecar, base):
        await sidecar.get("/v1/check", params={"url": base + "/"})
        answer = await sent(base, b"GET /private HTTP/1.0\r\n" + odd + b"\r\n")

    assert answer.split(b" ", 2)[1] == b"403"


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """Files with a certificate, its key and authority, and with a client's certificate and key."""
    paths = {name: str(tmp_path / name) for name in ("ca", "client")}
    authority().cert_pem.write_to_path(paths["ca"])
    authority().issue_cert("crawler.test").private_key_and_cert_chain_pem.write_to_path(
        paths["client"]
    )
    paths["crt"], paths["key"] = issue_files(tmp_path)
    return paths


async def test_t5_a_client_certificate_opens_and_its_lack_does_not(
    start: Any, tls: dict[str, str]
) -> None:
    sidecar = await start(
        env={
            "GATEKEEPER_SERVER_TLS_CERT": tls["crt"],
            "GATEKEEPER_SERVER_TLS_KEY": tls["key"],
            "GATEKEEPER_SERVER_TLS_CLIENT_CA": tls["ca"],
        }
    )
    assert sidecar.base.startswith("https://")
    stranger, friend = ssl.create_default_context(cafile=tls["ca"]), None
    friend = ssl.create_default_context(cafile=tls["ca"])
    friend.load_cert_chain(tls["client"])
    answers = []
    for context in (stranger, friend):
        for path in ("/v1/hosts", "/healthz"):
            connector = aiohttp.TCPConnector(ssl=context)
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get(sidecar.base + path) as response,
            ):
                answers.append(response.status)

    assert answers == [401, 200, 200, 200]


async def test_t9_a_client_that_never_finishes_its_head_is_disconnected(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FIRST_REQUEST_SECONDS", 0.05)
    service = await serve()
    async with asyncio.timeout(30):
        assert await sent(service.base, b"GET /healthz HTTP/1.1\r\nHost: ") == b""


async def test_t9_a_body_that_never_ends_is_answered_408(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "BODY_TIMEOUT", 0.05)
    service = await serve()
    async with connected(service.base) as (reader, writer), asyncio.timeout(30):
        writer.write(
            b"POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b'Content-Length: 50\r\n\r\n{"urls": ["'
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("length", [b"Content-Length: 99999999", b"Transfer-Encoding: chunked"])
async def test_t8_an_oversized_body_is_refused_before_it_is_kept(serve: Any, length: bytes) -> None:
    service = await serve(max_body=100)
    async with connected(service.base) as (reader, writer), asyncio.timeout(30):
        writer.write(
            b"POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            + length
            + b"\r\n\r\n"
            + (b"c8\r\n" + b"x" * 200 + b"\r\n" if b"chunked" in length else b"")
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")


async def test_t8_an_oversized_head_is_refused(serve: Any) -> None:
    service = await serve()
    async with service.session.get(
        service.base + "/healthz", headers={"X-Long": "x" * 20_000}
    ) as response:
        assert response.status == 400
        assert response.content_type == "application/problem+json"


LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
SCARCE = """
import os, resource, runpy, sys
sys.path.insert(0, os.getcwd())
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None  # as where it is not installed
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from gatekeeper.sidecar import listening, routing
listening.FIRST_REQUEST_SECONDS = 3600.0  # the crowd stays silent, however slow the machine
sys.argv = ["gatekeeper", "serve", "--port", "0", "--storage", "memory"]
runpy.run_module("gatekeeper", run_name="__main__")
"""
"""Program that starts a sidecar with a limit of 128 open files."""


def told(crowd: list[socket.socket]) -> set[bytes]:
    """Return the status lines that arrive until there is none for a second."""
    lines: set[bytes] = set()
    with selectors.DefaultSelector() as waiting:
        for one in crowd:
            waiting.register(one, selectors.EVENT_READ)
        while ready := waiting.select(1.0 if lines else 40.0):
            for key, _ in ready:
                waiting.unregister(key.fileobj)
                lines.add(cast("socket.socket", key.fileobj).recv(100).partition(b"\r\n")[0])
    return lines


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loop", LOOPS)
async def test_a_connection_beyond_the_limit_is_refused_and_the_service_recovers(
    tmp_path: Path, loop: str
) -> None:
    limited = tmp_path / "limited"
    limited.write_text(SCARCE.format(loop=loop), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(limited),
        env={**os.environ, "GATEKEEPER_SERVER_DRAIN_GRACE": "0"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert process.stderr is not None
        assert line, (await process.stderr.read()).decode()
        port = int(line.rpartition(":")[2])
        with contextlib.ExitStack() as leaving:
            # While the process is stopped, all connections queue up: the worst burst.
            process.send_signal(signal.SIGSTOP)
            address = ("127.0.0.1", port)
            crowd = [leaving.enter_context(socket.create_connection(address)) for _ in range(30)]
            process.send_signal(signal.SIGCONT)
            for _ in range(170):
                further = await asyncio.to_thread(socket.create_connection, address)
                crowd.append(leaving.enter_context(further))
            assert await asyncio.to_thread(told, crowd) == {b"HTTP/1.1 503 Service Unavailable"}
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            recovered = False
            while not recovered:
                # A client that is turned away early may find the connection closed.
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/healthz") as response:
                        recovered = response.status == 200
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
        assert b"further ones get 503" in log
        assert b"Traceback" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


class _Scarce:
    """A listening socket for which no descriptor is left."""

    def setblocking(self, _: bool) -> None: ...

    def listen(self, _: int) -> None: ...

    def fileno(self) -> int:
        return 99

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "full")


async def test_a_shortage_of_descriptors_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, readers, later = 0.0, [], []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_reader", lambda fd, call: readers.append(call))
    monkeypatch.setattr(loop, "remove_reader", lambda fd: None)
    acceptor = listening.Acceptor(cast("Any", _Scarce()), lambda _: None, backlog=8)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now)
        patched.setattr(loop, "call_later", lambda seconds, call: later.append((seconds, call)))
        await acceptor.start()
        for _ in range(100):
            readers[-1]()
            assert later[-1][0] == 1.0
            later[-1][1]()  # it listens again
        assert len(caplog.records) == 1
        now = 60.0
        readers[-1]()
        assert len(caplog.records) == 2


async def test_all_waiting_connections_are_accepted_in_one_iteration_of_the_loop() -> None:
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=50) as sock:
        clients = [socket.create_connection(sock.getsockname()) for _ in range(40)]
        acceptor = listening.Acceptor(sock, taken.append, backlog=50)
        await acceptor.start()
        turns = 0
        while not taken:
            await asyncio.sleep(0)
            turns += 1
            assert turns < 1000
        assert len(taken) == 40
        await acceptor.stop()
    for one in (*clients, *taken):
        one.close()


def test_a_low_limit_of_open_files_is_shared_with_the_gate_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    limits = listening.raise_file_limit()
    assert limits.clients + limits.backlog < 64
    assert "only 64 files may be open" in caplog.text


@pytest.mark.timeout(240)
async def test_thousands_of_long_polls_wait_and_get_their_leases(
    start: Any, internet: FakeInternet
) -> None:
    """As many as the limit of open files allows, at most `POLLS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        many = min(POLLS, hard // 2 - 200)
        internet.site("127.0.0.1").robots("")
        url = f"http://127.0.0.1:{internet.listener().port()}/"
        env = {"GATEKEEPER_PACING_DEFAULT_INTERVAL": "0", "GATEKEEPER_SERVER_LOG_DECISIONS": "none"}
        sidecar = await start("--storage", "memory", env=env)
        connector = aiohttp.TCPConnector(limit=0)
        patient = aiohttp.ClientTimeout(total=None, sock_connect=None)
        async with aiohttp.ClientSession(
            sidecar.base, connector=connector, timeout=patient
        ) as crowd:

            async def report(lease: dict[str, Any]) -> None:
                path = f"/v1/leases/{lease['id']}/report"
                async with crowd.post(path, json={"status": 200}) as response:
                    assert response.status == 204

            async def take() -> dict[str, Any]:
                async with crowd.post("/v1/leases", json={"url": url, "wait": 300}) as response:
                    assert response.status == 201
                    lease: dict[str, Any] = await response.json()
                    return lease

            async def poll() -> None:
                await report(await take())

            async def waiting() -> int:
                async with crowd.get("/metrics") as response:
                    lines = (await response.text()).splitlines()
                line = next(x for x in lines if x.startswith('gatekeeper_leases{state="waiting"}'))
                return int(float(line.rpartition(" ")[2]))

            first = await take()
            async with asyncio.TaskGroup() as polls:
                for number in range(1, many + 1):
                    polls.create_task(poll())
                    # In portions: a connection has 20 s to send its request (T9), and on a busy
                    # machine an iteration of the loop with 5,000 tasks takes longer.
                    if number % 100 == 0 or number == many:
                        while await waiting() < number:
                            await asyncio.sleep(0)
                await report(first)
            assert await waiting() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
