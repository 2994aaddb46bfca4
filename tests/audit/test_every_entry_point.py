"""Every way to a request writes it before it is sent, wherever `audit.folder` is set."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Deferred, Denied, Gatekeeper, PoliteQueue, RemoteGatekeeper, SyncGatekeeper
from gatekeeper.session import polite_session, session_gate
from gatekeeper.signing import new_key
from tests.audit.conftest import chains_of, full_disk
from tests.conformance.conftest import sidecar_on
from tests.conformance.ways import AGENT, Sidecar, settings
from tests.integrations.conftest import scrapy_worker
from tests.integrations.rigs import RIGS
from tests.internet import FakeInternet, Page
from tests.processes import PYTHON
from tests.sidecar.conftest import Start, start

__all__ = ["scrapy_worker", "sidecar_on", "start"]

PAGE, DENIED = "http://a.test/page", "http://a.test/private"


@pytest.fixture
async def site(internet: FakeInternet) -> FakeInternet:
    """A site with one page, and one that may not be fetched."""
    a = internet.site("a.test")
    a.on("/page", Page("hello", headers={"X-Robots-Tag": "noai"}))
    a.robots("User-agent: *\nDisallow: /private\n")
    return internet


def judge(folder: Path, internet: FakeInternet, denied: str = DENIED) -> None:
    """Compare the record with what the sites saw: each request has a grant, written before."""
    lines = [line for chain in chains_of(folder).values() for line in chain]
    grants = [line for line in lines if line["kind"] == "grant"]
    assert [line["url"] for line in grants] == [one.url for one in internet.requests]
    assert len(grants) >= 2
    for grant, request in zip(grants, internet.requests, strict=True):
        assert grant["robots"] is (request.path == "/robots.txt")
    outcomes = {line["lease"]: line for line in lines if line["kind"] == "outcome"}
    for grant in grants:
        assert outcomes[grant["lease"]]["status"] == 200
        begin, head = (
            datetime.fromisoformat(text) for text in (grant["t"], outcomes[grant["lease"]]["head"])
        )
        assert begin <= head + timedelta(microseconds=1)
    assert [line["url"] for line in lines if line["kind"] == "refused"] == [denied]


async def embedded(internet: FakeInternet, config: Any) -> None:
    async with (
        Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
        internet.session() as plain,
    ):
        for url in (PAGE, DENIED):
            with suppress(Denied):
                async with gate.lease(url) as lease, plain.get(url) as response:
                    await response.read()
                    lease.report(status=response.status)


async def session(internet: FakeInternet, config: Any) -> None:
    async with polite_session(AGENT, config=config, resolver=internet.resolver) as polite:
        for url in (PAGE, DENIED):
            with suppress(Denied):
                async with polite.get(url) as response:
                    assert await response.text() == "hello"


async def queue(internet: FakeInternet, config: Any) -> None:
    async with (
        Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate,
        PoliteQueue(gate) as urls,
        internet.session() as plain,
    ):
        await urls.put(DENIED)
        await urls.put(PAGE)
        async with await urls.get() as lease, plain.get(lease.url) as response:
            await response.read()
            lease.report(status=response.status)
        await urls.join()


async def sync(internet: FakeInternet, config: Any) -> None:
    def work() -> None:
        with SyncGatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
            for url in (PAGE, DENIED):
                with suppress(Denied), gate.lease(url) as lease:
                    asyncio.run_coroutine_threadsafe(fetch(url), loop).result(60)
                    lease.report(status=200)

    async def fetch(url: str) -> None:
        async with internet.session() as plain, plain.get(url) as response:
            await response.read()

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(work)


WAYS: list[Callable[[FakeInternet, Any], Awaitable[None]]] = [embedded, session, queue, sync]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_each_way_in_this_process_writes_what_the_site_saw(
    way: Callable[[FakeInternet, Any], Awaitable[None]], site: FakeInternet, folder: Path
) -> None:
    await way(site, settings(audit={"folder": str(folder)}))
    judge(folder, site)


async def test_what_a_response_says_about_use_is_in_its_outcome(
    internet: FakeInternet, folder: Path
) -> None:
    says = {
        "Content-Usage": "train-ai=n",
        "X-Robots-Tag": "noindex, noai",
        "Link": '<https://l.test/terms>; rel="license"',
    }
    internet.site("a.test").on("/page", Page("hello", headers=says)).on("/paid", Page(status=402))
    config = settings(audit={"folder": str(folder)})
    async with polite_session(AGENT, config=config, resolver=internet.resolver) as polite:
        for url in (PAGE, "http://a.test/paid"):
            async with polite.get(url) as response:
                await response.read()
    ((_, lines),) = chains_of(folder).items()
    first, second = [line for line in lines if line["kind"] == "outcome"][-2:]
    assert first["signals"] == {
        "content_usage": {"train-ai": "n"},
        "x_robots_tag": ["noai", "noindex"],
        "licence": ["https://l.test/terms"],
    }
    assert first["size"] == 5
    assert second["signals"] == {"payment": True}


async def test_a_sidecar_writes_for_its_clients(
    site: FakeInternet, folder: Path, sidecar_on: Callable[..., Awaitable[Sidecar]]
) -> None:
    sidecar = await sidecar_on(site, audit={"folder": str(folder)})
    async with RemoteGatekeeper(sidecar.where, AGENT) as gate, site.session() as plain:
        for url in (PAGE, DENIED):
            with suppress(Denied):
                async with gate.lease(url) as lease, plain.get(url) as response:
                    await response.read()
                    lease.report(status=response.status)
    await sidecar.stop()
    judge(folder, site)


@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: rig.__name__)
async def test_each_integration_writes_what_the_site_saw(
    rig: Any, site: FakeInternet, folder: Path
) -> None:
    pytest.importorskip(rig.library)
    async with AsyncExitStack() as stack:
        one = rig(site, settings(audit={"folder": str(folder)}), None)
        await one.start()
        stack.push_async_callback(one.stop)
        assert (await one.get(PAGE)).text == "hello"
        with pytest.raises(Exception):  # noqa: B017, PT011 - of each library's own
            await one.get(DENIED)
    judge(folder, site)
    (outcome,) = [
        line
        for chain in chains_of(folder).values()
        for line in chain
        if line["kind"] == "outcome" and line["size"] == len("hello") and line["signals"]
    ]
    assert outcome["signals"] == {"x_robots_tag": ["noai"]}


async def test_gatekeeper_fetch_writes_what_the_site_saw(
    internet: FakeInternet, folder: Path
) -> None:
    base = f"http://127.0.0.1:{internet.listener().port()}"
    internet.site(base.removeprefix("http://")).page("/page", "hello").robots(
        "User-agent: *\nDisallow: /private\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "gatekeeper", "fetch", f"{base}/private", f"{base}/page"),
        *("--audit", str(folder), "--allow-address", "127.0.0.0/8"),
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "GATEKEEPER_PACING_DEFAULT_INTERVAL": "0"},
    )
    assert await process.wait() == 1  # a page was denied
    judge(folder, internet, denied=f"{base}/private")


async def test_the_owner_writes_the_decisions_of_its_workers(
    internet: FakeInternet, folder: Path, start: Start
) -> None:
    base = f"http://127.0.0.1:{internet.listener().port()}"
    internet.site(base.removeprefix("http://")).robots("User-agent: *\nDisallow: /private\n")
    settings_of_record = {"FOLDER": str(folder), "WHAT": "decisions"}
    env = {f"GATEKEEPER_AUDIT_{name}": value for name, value in settings_of_record.items()}
    sidecar = await start("--workers", "1", env=env)
    for number in range(20):
        status, decision = await sidecar.get("/v1/check", params={"url": f"{base}/{number}"})
        assert (status, decision["verdict"]) == (200, "allow")
    sidecar.tell(signal.SIGTERM)
    await sidecar.stopped()
    ((_, lines),) = chains_of(folder).items()
    decided = [line["url"] for line in lines if line["kind"] == "decision"]
    assert {f"{base}/{number}" for number in range(20)} <= set(decided)
    assert lines[-1]["kind"] == "seal"


async def test_an_outcome_says_whether_the_gate_signed_the_request(
    internet: FakeInternet, folder: Path, tmp_path: Path
) -> None:
    new_key(tmp_path / "bot.pem")
    internet.site("a.test").page("/page", "hello")
    identity = {"key": str(tmp_path / "bot.pem"), "directory": "https://bot.example"}
    config = settings(audit={"folder": str(folder)}, identity=identity)
    async with polite_session(AGENT, config=config, resolver=internet.resolver) as polite:
        async with polite.get(PAGE) as response:
            await response.read()
        async with session_gate(polite).lease(PAGE) as lease:  # somebody else sends it
            lease.report(status=200)
    ((_, lines),) = chains_of(folder).items()
    assert [line["signed"] for line in lines if line["kind"] == "outcome"] == [True, True, False]
    assert lines[-1]["signature"] is not None


async def test_no_request_is_sent_while_the_record_cant_be_written(
    site: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a page nor for its robots.txt."""
    config = settings(audit={"folder": str(folder)})
    async with polite_session(AGENT, config=config, resolver=site.resolver) as polite:
        with full_disk(monkeypatch):
            for _ in range(2):
                with pytest.raises(Deferred) as caught:
                    await polite.get(PAGE)
                assert caught.value.decision.reason == "storage"
        assert site.requests == []
