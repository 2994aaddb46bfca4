"""`gatekeeper serve` as a process: start, answers, signals, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.internet import FakeInternet
from tests.internet.certs import issue_files
from tests.processes import PYTHON, run
from tests.waiting_support import until

ROBOTS = "User-agent: *\nDisallow: /private\n"
TOKEN = "t" * 40


@pytest.fixture
async def origin(internet: FakeInternet) -> str:
    site = internet.site("127.0.0.1").robots(ROBOTS)
    site.page("/page", "the page")
    return f"http://127.0.0.1:{internet.listener().port()}"


async def test_serve_without_configuration_runs_and_names_user_agent(
    start: Any, origin: str
) -> None:
    sidecar = await start()
    status, decision = await sidecar.get("/v1/check", params={"url": f"{origin}/private/x"})

    assert (status, decision["verdict"], decision["rule"]["line"]) == (200, "deny", 2)
    assert await sidecar.said("--user-agent")


async def test_the_printed_curl_line_works(start: Any) -> None:
    sidecar = await start("--user-agent", "testbot/1.0")
    words = shlex.split(sidecar.curl)
    words[-1] = "url=http://10.0.0.1/"  # refused by the guard, so no network is needed
    curl = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await curl.communicate()

    assert json.loads(out)["reason"] == "blocked"


@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_the_curl_line_works_with_tls_and_a_token(
    start: Any, socket_folder: Path, tmp_path: Path, way: str
) -> None:
    tokens = tmp_path / "my tokens"
    tokens.write_text(f"# of the crawler\n\ncrawler:check,crawl:{TOKEN}\n{'u' * 40}\n")
    tokens.chmod(0o600)
    cert, key = issue_files(tmp_path, "gate.example.org")  # an external name of this machine
    env = {"GATEKEEPER_SERVER_TLS_CERT": cert, "GATEKEEPER_SERVER_TLS_KEY": key}
    socket = ("--socket", str(socket_folder / "s")) if way == "unix" else ()
    sidecar = await start("--token-file", str(tokens), *socket, env=env)
    assert TOKEN not in sidecar.curl
    line = sidecar.curl.rpartition("url=")[0] + "url=http://10.0.0.1/"
    curl = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await curl.communicate()

    assert json.loads(out)["reason"] == "blocked", err


async def test_sigterm_ends_serve_with_exit_code_0(start: Any) -> None:
    sidecar = await start()
    sidecar.tell(signal.SIGTERM)

    assert await sidecar.said("stopping: draining at most 20 s")
    assert await sidecar.stopped() == 0


def in_the_background_of_nohup() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


async def test_serve_in_the_background_ignores_ctrl_c_and_obeys_sighup_and_sigterm(
    start: Any, tmp_path: Path
) -> None:
    path = tmp_path / "gatekeeper.toml"
    path.write_text("[server]\nmax_batch = 5\n", encoding="utf-8")
    sidecar = await start("--config", str(path), first=in_the_background_of_nohup)
    sidecar.tell(signal.SIGINT)
    path.write_text("[server]\nmax_batch = 7\n", encoding="utf-8")
    sidecar.tell(signal.SIGHUP)
    while (await sidecar.post("/v1/check", {"urls": ["http://10.0.0.1/"] * 6}))[0] == 413:
        await asyncio.sleep(0)
    assert (await sidecar.get("/readyz"))[0] == 200
    sidecar.tell(signal.SIGTERM)
    assert await sidecar.stopped() == 0


async def test_t16_a_draining_service_takes_reports_and_grants_nothing(
    start: Any, origin: str
) -> None:
    sidecar = await start(env={"GATEKEEPER_PACING_DEFAULT_INTERVAL": "0"})
    status, lease = await sidecar.post("/v1/leases", {"url": f"{origin}/page", "wait": 5})
    assert status == 201
    sidecar.tell(signal.SIGTERM)
    while (await sidecar.get("/readyz"))[0] == 200:
        await asyncio.sleep(0)

    refused, problem = await sidecar.post("/v1/leases", {"url": f"{origin}/page"})
    assert (refused, problem["type"]) == (503, "urn:gatekeeper:problem:draining")
    status, _ = await sidecar.post(f"/v1/leases/{lease['id']}/report", {"status": 200})
    assert status == 204
    assert await sidecar.stopped() == 0


async def test_a_second_ctrl_c_ends_the_wait_for_open_leases(start: Any, origin: str) -> None:
    sidecar = await start(env={"GATEKEEPER_SERVER_DRAIN_TIMEOUT": "1000"})
    status, _ = await sidecar.post("/v1/leases", {"url": f"{origin}/page", "wait": 5})
    assert status == 201
    sidecar.tell(signal.SIGINT)
    assert await sidecar.said("stopping: draining at most 1000 s; press Ctrl-C again to stop now")
    sidecar.tell(signal.SIGINT)
    assert await sidecar.stopped() == 0


async def test_t5_a_unix_socket_is_the_owners_alone_and_goes_with_the_process(
    start: Any, socket_folder: Path
) -> None:
    path = socket_folder / "s"
    sidecar = await start("--socket", str(path))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (await sidecar.get("/healthz"))[0] == 200
    sidecar.tell(signal.SIGTERM)
    assert await sidecar.stopped() == 0
    assert not path.exists()


async def test_t6_without_the_token_nothing_is_answered_but_probes(
    start: Any, tmp_path: Path, origin: str
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    sidecar = await start("--token-file", str(tokens))
    params = {"url": f"{origin}/page"}

    assert (await sidecar.get("/v1/check", params=params))[0] == 401
    assert (await sidecar.get("/metrics"))[0] == 401
    assert (await sidecar.get("/healthz"))[0] == 200
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert (await sidecar.get("/v1/check", params=params, headers=headers))[0] == 200


async def test_t6_a_reload_brings_the_new_token(start: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    sidecar = await start("--token-file", str(tokens))
    old, new = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, "n" * 40))
    tokens.write_text("n" * 40, encoding="utf-8")

    assert (await sidecar.post("/v1/admin/reload", {}, headers=old))[0] == 200
    assert (await sidecar.get("/v1/hosts", headers=old))[0] == 401
    assert (await sidecar.get("/v1/hosts", headers=new))[0] == 200


async def test_t17_a_reload_of_a_bad_file_changes_nothing_and_sets_a_metric(
    start: Any, tmp_path: Path
) -> None:
    path = tmp_path / "gatekeeper.toml"
    path.write_text("[server]\nmax_batch = 5\n", encoding="utf-8")
    sidecar = await start("--config", str(path))
    path.write_text("[server]\nmax_batch = 7\nmax_wait = 'long'\n", encoding="utf-8")

    status, problem = await sidecar.post("/v1/admin/reload", {})
    assert status == 409
    assert "max_wait" in problem["detail"]
    status, _ = await sidecar.post("/v1/check", {"urls": ["http://10.0.0.1/"] * 6})
    assert status == 413
    async with sidecar.session.get(sidecar.base + "/metrics") as response:
        assert "gatekeeper_config_last_reload_successful 0.0" in await response.text()

    path.write_text("[server]\nmax_batch = 7\n", encoding="utf-8")
    sidecar.tell(signal.SIGHUP)
    while (await sidecar.post("/v1/check", {"urls": ["http://10.0.0.1/"] * 6}))[0] == 413:
        await asyncio.sleep(0)


async def test_a_reload_says_what_needs_a_restart(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "gatekeeper.toml"
    path.write_text("", encoding="utf-8")
    sidecar = await start("--config", str(path))
    path.write_text(
        "[server]\nmax_wait = 9\n[pacing]\nconcurrency = 3\n[cache]\nhot_records = 3\n"
        '[[host]]\nmatch = "a.example"\nrobots = "deny"\nreason = "not ours"\n',
        encoding="utf-8",
    )

    status, told = await sidecar.post("/v1/admin/reload", {})
    assert (status, told) == (
        200,
        {
            "applied": ["pacing.concurrency", "server.max_wait", "host"],
            "needs_restart": ["cache.hot_records"],
        },
    )
    _, decision = await sidecar.get("/v1/check", params={"url": "http://a.example/"})
    assert (decision["state"], decision["note"]) == ("override", "not ours")


async def test_t3_the_sidecar_never_requests_itself(start: Any) -> None:
    sidecar = await start()
    _, decision = await sidecar.get("/v1/check", params={"url": sidecar.base + "/"})

    # Deferred or denied, but never fetched: the guard refused to connect.
    assert decision["verdict"] != "allow"
    async with sidecar.session.get(sidecar.base + "/metrics") as response:
        assert 'route="unmatched"' not in await response.text()


async def test_a_second_sidecar_on_one_state_file_is_refused(start: Any) -> None:
    await start()
    with pytest.raises(AssertionError, match="gatekeeper serve:"):
        await start()


async def test_healthcheck_asks_the_configured_address(start: Any, socket_folder: Path) -> None:
    await start("--socket", str(socket_folder / "s"))
    command = (PYTHON, "-m", "gatekeeper", "healthcheck", "--ready")
    done = await run(*command, GATEKEEPER_SERVER_SOCKET=str(socket_folder / "s"))

    assert done == (0, "/readyz: 200\n")


async def test_a_lease_survives_kill_9_and_its_report_is_taken_once(
    start: Any, origin: str
) -> None:
    first = await start()
    status, lease = await first.post("/v1/leases", {"url": f"{origin}/page", "wait": 5})
    assert status == 201
    first.process.kill()
    await first.stopped()

    second = await start()
    busy, _ = await second.post("/v1/leases", {"url": f"{origin}/page"})
    assert busy == 429
    report = f"/v1/leases/{lease['id']}/report"
    assert (await second.post(report, {"status": 200}))[0] == 204
    assert (await second.get("/v1/hosts/127.0.0.1"))[1]["state"] != "busy"


async def test_a_socket_of_systemd_is_used_and_systemd_is_notified(
    start: Any, socket_folder: Path
) -> None:
    import socket as sockets

    listener = sockets.create_server(("127.0.0.1", 0))
    manager = sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM)
    manager.bind(str(socket_folder / "notify"))
    manager.setblocking(False)
    # As systemd does between fork and exec: the socket is fd 3, the pid is in LISTEN_PID.
    script = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = "
        "str(os.getpid()); os.execv(sys.executable, [sys.executable, '-m', 'gatekeeper', "
        "'serve', '--storage', 'memory'])"
    )
    with listener, manager:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script,
            str(listener.fileno()),
            pass_fds=(listener.fileno(),),
            env={
                **os.environ,
                "LISTEN_FDS": "1",
                "NOTIFY_SOCKET": str(socket_folder / "notify"),
                "GATEKEEPER_SERVER_DRAIN_GRACE": "0",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(45):
                assert await loop.sock_recv(manager, 100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await loop.sock_recv(manager, 100) == b"STOPPING=1"
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def test_the_history_of_a_file_outlives_the_process(
    start: Any, internet: FakeInternet, origin: str
) -> None:
    first = await start()
    await first.get("/v1/check", params={"url": f"{origin}/page"})
    first.tell(signal.SIGTERM)
    await first.stopped()
    second = await start()
    _, found = await second.get("/v1/history", params={"origin": origin})

    assert found["origin"] == origin
    assert [(one["status"], one["size"]) for one in found["versions"]] == [(200, len(ROBOTS))]


async def test_kill_9_under_load_violates_no_interval(
    start: Any, internet: FakeInternet, origin: str
) -> None:
    """Judged by the origin's own log: no two requests before and after are too close."""
    env = {"GATEKEEPER_PACING_DEFAULT_INTERVAL": "0.4"}
    out: list[str] = []

    async def crawl(sidecar: Any, requests: int) -> None:
        async with aiohttp.ClientSession() as site:
            for _ in range(requests):
                body = {"url": f"{origin}/page", "wait": 30}
                status, lease = await sidecar.post("/v1/leases", body)
                if status != 201:
                    return
                out.append(lease["id"])
                async with site.get(f"{origin}/page") as page:
                    await page.read()
                report = f"/v1/leases/{lease['id']}/report"
                await sidecar.post(report, {"status": page.status})
                out.remove(lease["id"])

    first = await start(env=env)
    async with asyncio.TaskGroup() as crawlers:
        tasks = [crawlers.create_task(_ignoring_its_end(crawl(first, 100))) for _ in range(5)]
        await asyncio.wait_for(_served(internet, 3), 40)
        first.process.kill()
    assert all(task.done() for task in tasks)
    await first.stopped()

    second = await start(env=env)
    for lease_id in out:  # the clients survived: their leases hold the host's slots
        await second.post(f"/v1/leases/{lease_id}/report", {"status": 200})
    async with asyncio.TaskGroup() as crawlers:
        for _ in range(3):
            crawlers.create_task(crawl(second, 1))
    pages = [one for one in internet.requests if one.path == "/page"]
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(pages)]

    assert len(pages) >= 6
    assert min(gaps) > 0.35  # the interval, less the delay of a loopback request


async def _served(internet: FakeInternet, pages: int) -> None:
    await until(lambda: sum(one.path == "/page" for one in internet.requests) >= pages)


async def _ignoring_its_end(work: Any) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        await work
