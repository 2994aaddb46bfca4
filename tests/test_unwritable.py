"""While the state file takes nothing: no lease whose clock would have to be stored, by any way."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gatekeeper import Deferred, Gatekeeper, PoliteQueue, StorageError, polite_session
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.storage import ClockRecord, SqliteStorage, journal
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet
from tests.pacing_support import is_paused

SLOW = "http://slow.test/page"
QUICK = "http://quick.test/page"
COLD = "http://cold.test/page"


@contextmanager
def full_disk() -> Iterator[None]:
    """No journal takes a line: not even in the room that it had taken ahead."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        yield


@contextmanager
def reserved_room_only() -> Iterator[None]:
    """No journal takes a line but of what can't be refused, in the room held back for that."""

    def refuse(*_: object) -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "preallocate", refuse)
        patch.setattr(journal, "RESERVED_OCTETS", 131_072)
        yield


class Scene:
    def __init__(self, internet: FakeInternet, gate: Gatekeeper, session: Any) -> None:
        self.internet = internet
        self.gate = gate
        self.session = session
        """A session of one's own, with the gate's middleware."""

    def asked(self, path: str = "/page") -> int:
        return sum(request.path == path for request in self.internet.requests)

    async def lease(self, url: str) -> None:
        async with self.gate.lease(url) as lease:
            lease.report(status=200)

    async def acquire(self, url: str) -> None:
        (await self.gate.acquire(url)).give_back()

    async def middleware(self, url: str) -> None:
        async with self.session.get(url) as response:
            assert response.status == 200

    async def recovered(self) -> None:
        assert self.gate.parts.storage is not None
        await self.gate.parts.storage.flush()
        assert self.gate.ready


WAYS: dict[str, Callable[[Scene, str], Awaitable[None]]] = {
    "lease": Scene.lease,
    "acquire": Scene.acquire,
    "middleware": Scene.middleware,
}


@asynccontextmanager
async def scene(internet: FakeInternet, path: Path, **storage: Any) -> AsyncIterator[Scene]:
    """Hosts that are known, one with a long interval; the disk is well."""
    internet.site("slow.test").robots("User-agent: *\nCrawl-delay: 8\n").page("/page", "it")
    internet.site("quick.test").robots("User-agent: *\nCrawl-delay: 0.5\n").page("/page", "it")
    internet.site("cold.test").robots("User-agent: *\nCrawl-delay: 8\n").page("/page", "it")
    storage = {"path": str(path / "state.db"), "flush_interval": 3600.0} | storage
    config = open_config(storage=storage)
    async with gate_on(internet, config) as gate:
        session = aiohttp.ClientSession(
            connector=gate.parts.make_connector(), middlewares=(gate.middleware,)
        )
        async with session:
            one = Scene(internet, gate, session)
            for url in (SLOW, QUICK):
                await one.lease(url)
            yield one


async def refused(work: Awaitable[None]) -> Decision:
    with pytest.raises(Deferred) as caught:
        await work
    decision = caught.value.decision
    assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.STORAGE)
    assert decision.retry_at is not None
    return decision


@pytest.mark.parametrize("way", WAYS)
async def test_no_lease_is_granted_on_a_full_disk_and_leases_resume_with_room(
    virtual_internet: FakeInternet, tmp_path: Path, way: str
) -> None:
    ask = WAYS[way]

    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with full_disk():
                for _ in range(3):
                    decision = await refused(ask(it, SLOW))
                assert "No space left" in (decision.note or "")
                assert str(tmp_path) not in decision.explain()
                assert not it.gate.ready
                assert it.gate.parts.storage_failing == "No space left on device"
                await refused(ask(it, QUICK))  # a block that it drew could not be kept
                assert it.gate.stats().pacing.in_flight == 0
                assert await it.gate.allowed(SLOW), "what is welcome is welcome"
                asked = it.asked()
            await it.recovered()
            await ask(it, SLOW)
            assert it.asked() == asked + (way == "middleware")

    await virtual_internet.drive(run())


async def test_on_a_nearly_full_disk_only_hosts_whose_clocks_must_be_stored_are_refused(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with reserved_room_only():
                for _ in range(3):
                    await refused(it.lease(SLOW))
                    await it.lease(QUICK)
                async with it.gate.lease(QUICK) as lease:
                    lease.report(status=429, retry_after=60)
                assert "quick.test" in {record.scope for record in journaled(tmp_path)}
            await it.recovered()

    await virtual_internet.drive(run())


def journaled(path: Path) -> list[ClockRecord]:
    """What the next process would find after kill -9."""
    found: list[ClockRecord] = []
    for file in path.glob("*.promises-*"):  # a slow machine has begun another one meanwhile
        with suppress(FileNotFoundError):  # and removed this one, as the next one has it all
            copy = path / "copy"
            copy.write_bytes(file.read_bytes())
            found += [record for _, record in journal.read_generation(copy)]
    return found


async def test_no_request_is_sent_once_the_disk_was_found_full(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    """Another's promise met it: hosts that never need the journal stop as well."""

    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with full_disk():
                assert it.gate.parts.storage is not None
                with pytest.raises(StorageError):
                    it.gate.parts.storage.owe(ClockRecord(scope="other.test", next_at=0.0))
                await it.gate.parts.clock.sleep(1.0)
                await refused(it.lease(QUICK))
            await it.recovered()
            await it.lease(QUICK)

    await virtual_internet.drive(run())


async def test_a_polite_session_on_a_full_disk_raises_storage_error(
    net: FakeInternet, tmp_path: Path
) -> None:
    net.site("slow.test").robots("User-agent: *\nCrawl-delay: 8\n").page("/page", "it")

    async def run() -> None:
        storage = SqliteStorage(tmp_path / "state.db", clock=net.clock)
        config = open_config()
        async with polite_session(
            user_agent="testbot/1.0",
            config=config,
            resolver=net.resolver,
            clock=net.clock,
            storage=storage,
        ) as session:
            async with session.get(SLOW) as response:
                assert response.status == 200

            async def again() -> None:
                async with session.get(SLOW):
                    pass

            with full_disk():
                await refused(again())
            await storage.flush()

    await net.drive(run())


async def test_a_queue_gives_its_url_when_there_is_room_again(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it, PoliteQueue(it.gate) as queue:
            await queue.put(SLOW)
            await queue.put(QUICK)
            with reserved_room_only():
                async with await queue.get() as lease:
                    assert lease.url == QUICK
                getting = asyncio.create_task(queue.get())
                await it.gate.parts.clock.sleep(20.0)
                assert not getting.done()
            await it.recovered()
            async with await getting as lease:
                assert lease.url == SLOW
            assert queue.stats().deferred >= 1

    await virtual_internet.drive(run())


async def test_a_host_of_unknown_interval_is_not_requested_on_a_full_disk(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    """Its answer would start a clock that kill -9 forgets."""

    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with full_disk():
                await refused(it.lease(SLOW))  # so that it is known
                before = it.asked("/robots.txt")
                decision = await it.gate.check(COLD)
                unlike = await refused(it.lease(COLD))
                assert (decision.note, decision.retry_at) == (unlike.note, unlike.retry_at)
                assert "a lease of cold.test can't be saved: " in (decision.note or "")
                assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.STORAGE)
                await refused(it.lease(COLD))
                assert it.asked("/robots.txt") == before
            await it.recovered()
            await it.gate.parts.clock.sleep(2.0)
            await it.lease(COLD)

    await virtual_internet.drive(run())


async def test_a_robots_txt_request_that_starts_a_long_clock_waits_on_a_full_disk(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            before = it.asked("/robots.txt")
            with full_disk():
                await it.gate.refresh(SLOW)
                assert it.asked("/robots.txt") == before
            await it.recovered()
            await it.gate.refresh(SLOW)
            assert it.asked("/robots.txt") == before + 1

    await virtual_internet.drive(run())


async def test_a_block_by_a_429_holds_and_is_written_when_there_is_room(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with full_disk():
                async with it.gate.lease(QUICK) as lease:
                    lease.report(status=429, retry_after=60)
                await refused(it.lease(QUICK))
                await it.gate.parts.clock.sleep(70.0)
                await refused(it.lease(QUICK))
            await it.recovered()
            # Before a lease that could find that time enough has passed to forget the refusal.
            assert it.gate.parts.storage is not None
            kept = await it.gate.parts.storage.load_clock("quick.test")
            await it.lease(QUICK)
            assert kept is not None
            # Failures are forgiven with time, and any time may have passed until there was room.
            assert kept.refused_status == 429
            assert kept.refused_at > 0

    await virtual_internet.drive(run())


async def test_a_pause_that_can_not_be_stored_holds_and_raises_storage_error(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path) as it:
            with full_disk():
                with pytest.raises(StorageError, match="No space left"):
                    await it.gate.pause("quick.test")
                assert is_paused(it.gate.parts.scheduler, "quick.test")
            await it.recovered()
            await it.gate.resume("quick.test")

    await virtual_internet.drive(run())


async def test_with_on_failure_continue_every_lease_is_granted(
    virtual_internet: FakeInternet, tmp_path: Path
) -> None:
    async def run() -> None:
        async with scene(virtual_internet, tmp_path, on_failure="continue") as it:
            with full_disk():
                for url in (SLOW, QUICK, COLD):
                    await it.lease(url)
                assert it.gate.ready
            await it.recovered()

    await virtual_internet.drive(run())


@pytest.mark.skipif(os.name == "nt", reason="open files can't be deleted")
async def test_a_last_write_that_fails_hides_no_error_of_the_program(
    virtual_internet: FakeInternet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Why a block is left says more than that clocks could not be kept at its end."""

    async def run(error: Exception | None) -> None:
        async with scene(virtual_internet, tmp_path) as it:
            await it.lease(SLOW)
            (tmp_path / "state.db").unlink()
            if error is not None:
                raise error

    with pytest.raises(LookupError, match="its own"):
        await virtual_internet.drive(run(LookupError("its own")))
    assert "was removed while it was in use" in caplog.text
    with pytest.raises(StorageError, match="was removed while it was in use"):
        await virtual_internet.drive(run(None))
