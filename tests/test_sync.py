"""`SyncGatekeeper`: a gate for blocking code, with many threads, and at the process's exit."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    Gatekeeper,
    HostRule,
    InvalidURL,
    LeaseTimeout,
    NotYet,
    SyncGatekeeper,
)
from gatekeeper.gate.lease_base import open_leases
from gatekeeper.sync import SyncLease
from tests.conformance.conftest import sidecar_on
from tests.conformance.ways import AGENT, settings
from tests.gate_support import QUICK
from tests.internet import FakeInternet, Hold, Page

__all__ = ["sidecar_on"]

DENYING = "User-agent: *\nDisallow: /private\n"
Made = Callable[..., Any]


@pytest.fixture(params=["embedded", "sidecar"])
def made(request: pytest.FixtureRequest, sidecar_on: Any) -> Made:
    """`gate = await made(internet, pacing={...})`: a gate that is not open yet."""

    async def make(internet: FakeInternet, **tables: Any) -> SyncGatekeeper:
        if request.param == "embedded":
            return SyncGatekeeper(AGENT, config=settings(**tables), resolver=internet.resolver)
        return SyncGatekeeper.remote((await sidecar_on(internet, **tables)).where, AGENT)

    return make


async def test_a_sync_gate_answers_questions(internet: FakeInternet, made: Made) -> None:
    internet.site("a.test").robots(DENYING)
    internet.site("b.test").robots(Page("", status=503))

    def ask(gate: SyncGatekeeper) -> None:
        with gate:
            assert gate.allowed("http://a.test/")
            assert not gate.allowed("http://a.test/private")
            decision = gate.check("http://a.test/private")
            assert decision.rule is not None
            assert decision.rule.line == 2
            assert gate.peek("http://a.test/private") is not None
            asked = ["http://a.test/1", "no url", "http://b.test/", "http://a.test/private"]
            found = [str(one.verdict) for one in gate.check_many(asked)]
            assert found == ["allow", "deny", "defer", "deny"]
            for one in gate.check_many(asked):
                assert one
                break  # abandoned questions leave nothing behind
            policy = gate.policy("http://a.test/")
            assert not policy.allowed("/private")
            assert gate.robots("http://a.test/") is not None
            assert gate.why("a.test")
            assert gate.stats()
            gate.pause("a.test")
            assert isinstance(gate.try_acquire("http://a.test/"), NotYet)
            gate.resume("a.test")
            gate.override(HostRule(match="a.test", robots="deny", by="Kim"), seconds=600)
            assert (gate.check("http://a.test/").note or "").startswith("by Kim, until 20")
            gate.override(HostRule(match="a.test"), seconds=0)
            assert gate.allowed("http://a.test/")
            with pytest.raises(InvalidURL):
                gate.allowed("mailto:a@b.test")
        with pytest.raises(GateClosed):
            gate.allowed("http://a.test/")
        gate.close()

    await asyncio.to_thread(ask, await made(internet))


async def test_sitemaps_are_iterated(internet: FakeInternet, made: Made) -> None:
    site = internet.site("a.test").robots("Sitemap: http://a.test/s\nSitemap: http://a.test/t\n")
    site.page("/s", "http://a.test/1\nhttp://a.test/2\n")
    internet.site("b.test").robots(Page("", status=503))

    def ask(gate: SyncGatekeeper) -> None:
        with gate:
            found = gate.sitemaps("http://a.test")
            assert next(found).url == "http://a.test/1"
            assert found.complete
            with gate.lease("http://a.test/1"):  # no lease is held in between
                pass
            assert [entry.url for entry in found] == ["http://a.test/2"]
            assert [finding.code for finding in found.findings] == ["not-fetched"]
            assert not found.complete
            for _ in gate.sitemaps("http://a.test", max_entries=1):
                break  # abandoned
            with pytest.raises(Deferred):
                next(gate.sitemaps("http://b.test"))
            with pytest.raises(InvalidURL):
                gate.sitemaps("a.test")
            left = gate.sitemaps("http://a.test")
        with pytest.raises(GateClosed):
            next(left)

    await asyncio.to_thread(ask, await made(internet))


async def test_a_denied_and_a_deferred_lease_raise_their_errors(
    internet: FakeInternet, made: Made
) -> None:
    internet.site("a.test").robots(DENYING)
    internet.site("b.test").robots(Page("", status=503))

    def ask(gate: SyncGatekeeper) -> None:
        with gate:
            with pytest.raises(Denied), gate.lease("http://a.test/private"):
                pass
            with pytest.raises(Deferred) as caught:
                gate.acquire("http://b.test/")
            assert caught.value.retry_at is not None
            with gate.lease("http://a.test/x") as lease:
                assert (lease.url, lease.host) == ("http://a.test/x", "a.test")
                assert lease.decision
                # A thread that would wait for itself gets the error immediately.
                with pytest.raises(LeaseTimeout, match="/x"):
                    gate.acquire("http://a.test/y")
                lease.report(status=200)
            with gate.lease("http://a.test/y", timeout=10):
                pass
            with pytest.raises(RuntimeError, match="mine"), gate.lease("http://a.test/z"):
                raise RuntimeError("mine")
            with gate.acquire("http://a.test/z", timeout=10) as lease:
                assert [one() for one in open_leases.get()] == [
                    lease
                ]  # for the adapters of this thread
            assert open_leases.get() == ()
            with gate.lease("http://a.test/z", timeout=10):
                pass

    await asyncio.to_thread(ask, await made(internet))


async def test_the_decision_of_a_lease_is_made_in_the_gates_loop_and_outlives_the_gate(
    internet: FakeInternet,
) -> None:
    internet.site("a.test").robots(DENYING)
    gate = SyncGatekeeper(AGENT, config=settings(pacing=QUICK), resolver=internet.resolver)

    def counted() -> int:
        return sum(gate.stats().decisions.values())  # type: ignore[union-attr]

    def ask() -> None:
        with gate:
            for number in range(3):
                with gate.lease(f"http://a.test/{number}") as lease:
                    lease.report(status=200)
            before = counted()
            lease = gate.acquire("http://a.test/x")
            assert counted() == before + 1
            lease.end()
        assert lease.decision.url == "http://a.test/x"

    await asyncio.to_thread(ask)


async def test_threads_share_the_clock_of_a_host(internet: FakeInternet, made: Made) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    internet.site("b.test").robots("")
    started: list[float] = []

    def visit(gate: SyncGatekeeper) -> None:
        for _ in range(2):
            with gate.lease("http://a.test/") as lease:
                started.append(time.monotonic())
                lease.report(status=200)
            with gate.lease("http://b.test/") as lease:
                lease.report(status=200)

    def crawl(gate: SyncGatekeeper) -> None:
        with gate, ThreadPoolExecutor(5) as threads:
            list(threads.map(visit, [gate] * 5))

    await asyncio.to_thread(crawl, await made(internet))
    started.sort()
    # Each thread reads the time a little after its grant.
    gaps = [b - a for a, b in itertools.pairwise(started)]
    assert len(started) == 10
    assert started[-1] - started[0] >= 9 * 0.1 - 0.05
    assert min(gaps) > 0.03


def someone_waits(gate: Any) -> bool:
    if isinstance(gate, Gatekeeper):
        return gate.stats().pacing.waiting > 0
    return bool(gate.stats().requests > 1)  # the second one asks


async def test_a_waiting_thread_is_released_when_the_gate_closes(
    internet: FakeInternet, made: Made
) -> None:
    internet.site("a.test").robots("")
    gate = await made(internet)
    held = await asyncio.to_thread(gate.acquire, "http://a.test/1", owned=False)
    waiting = asyncio.create_task(asyncio.to_thread(gate.acquire, "http://a.test/2"))
    while not await asyncio.to_thread(gate.do, someone_waits):
        await asyncio.sleep(0)
    await asyncio.to_thread(gate.close)
    with pytest.raises(GateClosed):
        await waiting
    held.end()  # has no effect and raises no error
    held.leave()


async def test_a_slow_origin_holds_up_no_other_thread(internet: FakeInternet, made: Made) -> None:
    hold = Hold(Page(""))
    internet.site("slow.test").robots(hold)
    internet.site("a.test").robots("")
    gate = await made(internet)
    slow = asyncio.create_task(asyncio.to_thread(gate.allowed, "http://slow.test/"))
    await hold.waiting.acquire()
    assert await asyncio.to_thread(gate.allowed, "http://a.test/")
    assert not slow.done()
    hold.release()
    assert await slow
    await asyncio.to_thread(gate.close)


async def test_a_lease_may_be_ended_by_another_thread(internet: FakeInternet, made: Made) -> None:
    internet.site("a.test").robots("")
    gate = await made(internet)
    lease = await asyncio.to_thread(gate.acquire, "http://a.test/1", owned=False)
    assert isinstance(lease, SyncLease)
    thread = threading.Thread(target=lease.end)
    thread.start()
    await asyncio.to_thread(thread.join)
    second = await asyncio.to_thread(gate.acquire, "http://a.test/2", timeout=10)
    second.give_back()
    await asyncio.to_thread(gate.close)


async def test_a_thread_that_ends_leaves_no_task_behind(internet: FakeInternet) -> None:
    internet.site("a.test").robots("")
    gate = SyncGatekeeper(AGENT, config=settings(), resolver=internet.resolver)
    for _ in range(20):
        thread = threading.Thread(target=gate.allowed, args=("http://a.test/",))
        thread.start()
        await asyncio.to_thread(thread.join)
    del thread
    gc.collect()

    async def tasks(_: Any) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return sum("_serve" in repr(task) for task in asyncio.all_tasks())

    assert await asyncio.to_thread(gate.wait, tasks) <= 2
    await asyncio.to_thread(gate.close)


def test_settings_are_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError):
        SyncGatekeeper("")
    with pytest.raises(ConfigError), SyncGatekeeper.remote("ftp://nowhere"):
        pass


def test_an_error_of_opening_is_raised_by_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    gate = SyncGatekeeper(AGENT, config=settings(storage={"path": str(tmp_path / "taken")}))
    with pytest.raises(Exception, match="taken"):
        gate.allowed("http://a.test/")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, without a network: the operator allows every URL."""
    head = (
        "import logging, os, signal, sys, threading\n"
        "logging.basicConfig(level=logging.WARNING)\n"  # an error that is only logged fails, too
        "from gatekeeper import Config, GateClosed, SyncGatekeeper\n"
        "config = Config.from_dict({'host': [{'match': '*', 'robots': 'allow'}],"
        " 'pacing': {'default_interval': 0.0}, **dict(TABLES)})\n"
        "gate = SyncGatekeeper('examplebot/1.0', config=config)\n"
    )
    tables = "TABLES = []\n" if "TABLES" not in code else ""
    first, _, rest = code.partition("#\n") if "TABLES" in code else ("", "", code)
    return subprocess.run(
        [
            *(sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"),
            *("-c", tables + first + head + rest),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_gate_that_nobody_closes_is_closed_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    done = run(
        f"TABLES = [('storage', {{'path': {str(path)!r}}})]\n#\n"
        "lease = gate.acquire('http://a.example/')\n"
        "lease.report(status=429, retry_after=300)\n"
        "lease.end()\n"
        "print('done')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    again = run(
        f"TABLES = [('storage', {{'path': {str(path)!r}}})]\n#\n"
        "print(gate.try_acquire('http://a.example/').why)\n"
    )
    assert (again.stdout, again.stderr) == ("host_blocked\n", "")


def test_an_error_of_the_program_does_not_hang_its_end() -> None:
    done = run("lease = gate.acquire('http://a.example/')\nraise SystemExit(3)\n")
    assert (done.returncode, done.stderr) == (3, "")


def test_a_dropped_gate_ends_its_thread() -> None:
    done = run(
        "import gc\n"
        "gate.allowed('http://a.example/')\n"
        "[thread] = [t for t in threading.enumerate() if t.name == 'gatekeeper']\n"
        "del gate\n"
        "gc.collect()\n"
        "thread.join(20)\n"
        "print(thread.is_alive())\n"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    done = run(
        "gate.allowed('http://a.example/')\n"
        "sys.stdout.flush()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        gate.allowed('http://a.example/')\n"
        "    except GateClosed as error:\n"
        "        print('child:', error, flush=True)\n"
        "    gate.close()\n"
        "    sys.exit(7)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), gate.allowed('http://a.example/'))\n"
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("child: this gate belongs to the process")
    assert done.stdout.splitlines()[1] == "7 True"


def test_an_interruption_right_after_a_call_is_posted_leaves_no_lease() -> None:
    """The gate's thread often runs first, and the interruption comes before the thread waits."""
    done = run(
        "from gatekeeper import sync\n"
        "post = sync._post\n"
        "def interrupted(to, work, *given, **options):\n"
        "    sync._post = post\n"
        "    post(to, work, *given, **options)\n"
        "    raise KeyboardInterrupt\n"
        "sync._post = interrupted\n"
        "try:\n"
        "    gate.acquire('http://a.example/2')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "gate.acquire('http://a.example/3', timeout=20).end()\n"
        "gate.close()\n"
        "print('ended')\n"
    )
    assert (done.stdout, done.stderr) == ("interrupted\nended\n", "")


def test_an_interrupted_thread_leaves_the_lease_to_the_next() -> None:
    done = run(
        "held = gate.acquire('http://a.example/1', owned=False)\n"
        "def interrupt():\n"
        "    while not gate.stats().pacing.waiting:\n"
        "        pass\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    gate.acquire('http://a.example/2')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "held.end()\n"
        "gate.acquire('http://a.example/3', timeout=20).end()\n"
        "gate.close()\n"
        "print('ended')\n"
    )
    assert (done.stdout, done.stderr) == ("interrupted\nended\n", "")
