"""The journal of open leases: what it stores, and what happens if it can't."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.client.wire import LeaseReport, LeaseRequestBody
from gatekeeper.clock import VirtualClock, boot_of
from gatekeeper.config import ServerConfig
from gatekeeper.sidecar import held_leases
from gatekeeper.sidecar.held_leases import LeaseJournal, LeaseTable, OpenLease
from gatekeeper.sidecar.routing import Problem
from tests.internet import FakeInternet

URL = "http://a.test/page"
FULL = Path("/dev/full")
REPORT = LeaseReport(status=200)
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state-leases"


def left_in(path: Path, now: float = 0.0) -> dict[str, OpenLease]:
    return left_by(path, VirtualClock(wall=now))


def left_by(path: Path, clock: VirtualClock) -> dict[str, OpenLease]:
    journal = LeaseJournal(path, clock=clock)
    journal.close()
    return {lease.id: lease for lease in journal.left_over}


def starting_now(lease_id: str, ttl: float, clock: VirtualClock) -> OpenLease:
    """Return a lease that is granted now, for `ttl` seconds."""
    expires_at, boot = clock.wall() + ttl, boot_of(clock)
    return OpenLease(lease_id, expires_at, URL, None, None, ttl, *boot)


def fd_of(path: Path) -> int:
    """The descriptor by which this process has a file open."""
    [found] = [
        one
        for one in Path("/dev/fd").iterdir()
        if one.is_symlink() and os.readlink(one) == str(path)
    ]
    return int(found.name)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Make every write to a journal fail, and the creation of a new file beside it."""
    fd = fd_of(path)
    kept, full = os.dup(fd), os.open(FULL, os.O_WRONLY)
    os.dup2(full, fd)
    fresh = path.with_name(path.name + ".new")
    fresh.mkdir()
    try:
        yield
    finally:
        fresh.rmdir()
        os.dup2(kept, fd)
        os.close(kept)
        os.close(full)


@pytest.mark.parametrize(
    "lease",
    [
        OpenLease("a", 5.0, URL),
        OpenLease("a", 5.0, URL, "Other Bot/1.0 (+http://b.test/?q=%20)\n- a"),
        OpenLease("a", 5.0, URL, None, "127.0.0.1"),
        OpenLease("a", 5.0, URL, "Other/1.0 -", "certificate of %41 b"),
        OpenLease("a", 5.0, "http://a.test/%20?x=1#y", ttl=20.0, boot_id="b", boot_at=1.5),
    ],
)
def test_an_open_lease_is_read_as_it_was_written(path: Path, lease: OpenLease) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(lease)
    journal.close()

    assert left_in(path) == {"a": lease}


def test_a_line_of_an_earlier_version_is_read(path: Path) -> None:
    path.write_text(f"+ a 5.000 {URL}\n+ b 5.000 {URL}\n- b\n+ c 5.0", encoding="utf-8")

    assert left_in(path) == {"a": OpenLease("a", 5.0, URL)}


def test_a_blank_in_a_url_is_escaped_in_the_journal(path: Path) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(OpenLease("a", 5.0, "http://a.test/x y\n- a"))
    journal.close()

    assert left_in(path)["a"].url == "http://a.test/x%20y%0A-%20a"


@pytest.mark.parametrize(("now", "left"), [(5.0, True), (14.9, True), (15.1, False)])
def test_an_expired_lease_is_kept_in_the_journal_for_as_long_again(
    path: Path, now: float, left: bool
) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(starting_now("a", 5.0, VirtualClock(wall=0.0)))
    journal.granted(starting_now("b", 10.0, VirtualClock(wall=-5.0)))
    journal.granted(OpenLease("earlier-version", -50.0, URL))
    journal.close()

    assert ("a" in left_in(path, now)) is (now < 10.0)
    assert ("b" in left_in(path, now)) is left
    assert ("earlier-version" in left_in(path, now)) is (now < 10.0)


@pytest.mark.parametrize("jump", [-86_400.0, -7200.0, 7200.0, 86_400.0])
def test_a_wall_clock_set_between_two_processes_changes_no_expiry(path: Path, jump: float) -> None:
    clock = VirtualClock()
    journal = LeaseJournal(path, clock=clock)
    journal.granted(starting_now("a", 60.0, clock))
    journal.close()
    clock.advance(20.0)
    clock.jump_wall(jump)

    assert left_by(path, clock)["a"].remaining(clock) == pytest.approx(40.0)


def test_after_a_reboot_the_wall_clock_decides_and_no_expiry_is_delayed(
    path: Path,
) -> None:
    clock = VirtualClock()
    journal = LeaseJournal(path, clock=clock)
    journal.granted(starting_now("a", 60.0, clock))
    journal.close()
    clock.reboot()
    clock.jump_wall(20.0)
    assert left_by(path, clock)["a"].remaining(clock) == pytest.approx(40.0)
    clock.jump_wall(-86_400.0)
    assert left_by(path, clock)["a"].remaining(clock) == 60.0


def test_a_shortened_journal_keeps_expired_leases(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_leases, "MAX_BYTES", 1)  # it is shortened at each write
    clock = VirtualClock()
    journal = LeaseJournal(path, clock=clock)
    for name in ("a", "b"):
        journal.granted(starting_now(name, 60.0, clock))
    clock.advance(61.0)
    journal.ended("b")
    journal.close()

    assert set(left_by(path, clock)) == {"a"}


def test_a_late_end_may_be_what_shortens_the_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is forgotten as the file is written anew, before its end is written."""
    monkeypatch.setattr(held_leases, "MAX_BYTES", 1)
    clock = VirtualClock()
    journal = LeaseJournal(path, clock=clock)
    for name in ("a", "b", "c"):
        journal.granted(starting_now(name, 60.0, clock))
    clock.advance(121.0)
    journal.ended("b")
    journal.close()

    assert left_by(path, clock) == {}


def test_a_journal_whose_descriptor_was_closed_is_opened_again(path: Path) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(OpenLease("a", 5.0, URL))
    os.close(fd_of(path))
    with pytest.raises(OSError, match="descriptor"):
        journal.granted(OpenLease("b", 5.0, URL))
    assert journal.writable
    journal.granted(OpenLease("c", 5.0, URL))
    journal.close()

    assert set(left_in(path)) == {"a", "c"}


def test_a_partly_written_line_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(OpenLease("a", 5.0, URL))
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) - 4]))
        with pytest.raises(OSError, match="space"):
            journal.granted(OpenLease("b", 5.0, URL))
    journal.granted(OpenLease("c", 5.0, URL))
    journal.close()

    assert set(left_in(path)) == {"a", "c"}


def test_an_end_that_was_not_written_can_be_repeated(path: Path) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(OpenLease("a", 5.0, URL))
    if FULL.exists():
        with full_disk(path), pytest.raises(OSError, match="space"):
            journal.ended("a")
    journal.ended("a")
    journal.close()

    assert left_in(path) == {}


def test_a_journal_that_cannot_be_made_shorter_goes_on_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_leases, "MAX_BYTES", 1)
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    path.with_name(path.name + ".new").mkdir()  # a directory, so that no file can be written
    journal.granted(OpenLease("a", 5.0, URL))
    journal.granted(OpenLease("b", 5.0, URL))
    path.with_name(path.name + ".new").rmdir()
    journal.close()

    assert set(left_in(path)) == {"a", "b"}


class Kept:
    """A table over a real gate, with a journal."""

    def __init__(self, service: Any, path: Path, clock: VirtualClock) -> None:
        self.gate = service.gate
        self.path = path
        self.clock = clock
        self.table = LeaseTable(ServerConfig(), clock, LeaseJournal(path, clock=clock))

    async def take(self, **wanted: Any) -> str:
        asked = LeaseRequestBody(url=URL, ttl=wanted.pop("ttl", 60.0))
        return (await self.table.acquire(self.gate, asked, "client", lambda: False)).id

    @property
    def in_flight(self) -> int:
        return int(self.gate.stats().pacing.in_flight)


@pytest.fixture
async def kept(serve: Any, internet: FakeInternet, path: Path) -> AsyncIterator[Kept]:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    service = (await serve(pacing={"concurrency": 3})).service
    for _ in range(10):  # often enough that its decision is cached, and a lease is granted inline
        await service.gate.check(URL)
    clock = VirtualClock()
    one = Kept(service, path, clock)
    yield one
    one.table.close()


@needs_a_full_disk
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_full_disk_leaks_no_lease_and_names_the_remedy(kept: Kept, at_once: bool) -> None:
    async def take() -> None:
        if at_once:
            kept.table.acquire_nowait(kept.gate, URL, 60.0, "client")
        else:
            await kept.take()

    with full_disk(kept.path), pytest.raises(Problem) as caught:
        await take()

    assert (caught.value.status, caught.value.kind) == (503, "storage")
    assert "storage.path" in caught.value.detail
    assert caught.value.wait is not None
    assert (len(kept.table), kept.in_flight) == (0, 0)
    await kept.take()


@needs_a_full_disk
async def test_while_the_disk_is_full_no_lease_is_granted(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    granted = kept.gate.stats().pacing.granted
    with full_disk(kept.path):
        for _ in range(3):
            with pytest.raises(Problem, match="storage"):
                await kept.take()
            assert kept.table.acquire_nowait(kept.gate, URL, 1, "c") is None

    assert kept.gate.stats().pacing.granted == granted + 1
    assert kept.table.refused["journal"] == 3
    assert caplog.messages == [
        "a lease can't be stored for the next process: [Errno 28] No space left on device"
    ]


@needs_a_full_disk
async def test_a_full_disk_does_not_stop_the_sweep(kept: Kept) -> None:
    for _ in range(3):
        await kept.take(ttl=5.0)
    with full_disk(kept.path):
        kept.clock.advance(6.0)

    assert (len(kept.table), kept.in_flight) == (0, 0)
    assert kept.table.ended["expired"] == 3


@needs_a_full_disk
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda table, one: table.report(one, REPORT), "reported"),
        (lambda table, one: table.give_back(one), "given_back"),
    ],
)
async def test_an_end_refused_by_a_full_disk_can_be_reported_again(
    kept: Kept, end: Any, how: str
) -> None:
    lease_id = await kept.take()
    with full_disk(kept.path), pytest.raises(Problem, match="storage"):
        end(kept.table, lease_id)
    assert lease_id in kept.table

    end(kept.table, lease_id)
    assert (len(kept.table), kept.in_flight) == (0, 0)
    assert kept.table.ended[how] == 1


@needs_a_full_disk
async def test_a_renewal_that_a_full_disk_refused_changes_nothing(kept: Kept) -> None:
    lease_id = await kept.take(ttl=10.0)
    with full_disk(kept.path), pytest.raises(Problem, match="storage"):
        kept.table.renew(lease_id, 500.0)
    kept.clock.advance(11.0)

    assert len(kept.table) == 0


# --- a restart -----------------------------------------------------------------------------


async def restarted(kept: Kept, path: Path, seconds: float) -> LeaseTable:
    """Return the table of the next process, `seconds` later."""
    kept.table.close()
    kept.clock.advance(seconds)
    table = LeaseTable(ServerConfig(), kept.clock, LeaseJournal(path, clock=kept.clock))
    await table.restore(kept.gate)
    return table


@pytest.mark.parametrize("status", [429, 503, 302, 403])
async def test_a_report_of_a_lease_that_expired_during_the_restart_counts(
    kept: Kept, path: Path, status: int
) -> None:
    lease_id = await kept.take(ttl=30.0)
    table = await restarted(kept, path, 45.0)
    assert (len(table), kept.in_flight) == (0, 0)
    assert kept.gate.parts.scheduler.blocked("a.test") is None

    told = LeaseReport(status=status, retry_after="600")
    assert table.report(lease_id, told) is None
    blocked = kept.gate.parts.scheduler.blocked("a.test")
    assert blocked is not None
    assert blocked[0] - kept.gate.parts.clock.wall() == pytest.approx(600.0, abs=1.0)
    table.report(lease_id, LeaseReport(status=status, retry_after="9000"))
    assert kept.gate.parts.scheduler.blocked("a.test")[0] == pytest.approx(blocked[0], abs=1.0)

    table.close()
    again = LeaseTable(ServerConfig(), kept.clock, LeaseJournal(path, clock=kept.clock))
    with pytest.raises(Problem, match="no-lease"):
        again.report(lease_id, told)
    again.close()


async def test_a_report_long_after_the_expiry_is_refused(kept: Kept, path: Path) -> None:
    lease_id = await kept.take(ttl=30.0)
    table = await restarted(kept, path, 61.0)
    with pytest.raises(Problem, match="no-lease"):
        table.report(lease_id, REPORT)
    table.close()


async def test_a_lease_that_had_run_out_before_the_end_of_the_process_is_reportable(
    kept: Kept, path: Path
) -> None:
    lease_id = await kept.take(ttl=30.0)
    kept.clock.advance(31.0)
    assert len(kept.table) == 0
    table = await restarted(kept, path, 20.0)
    table.report(lease_id, LeaseReport(status=429, retry_after=600.0))
    assert kept.gate.parts.scheduler.blocked("a.test") is not None
    table.close()


def test_a_removed_journal_is_written_again_with_every_open_lease(path: Path) -> None:
    journal = LeaseJournal(path, clock=VirtualClock(wall=0.0))
    journal.granted(OpenLease("a", 5.0, URL))
    path.unlink()
    journal.granted(OpenLease("b", 5.0, URL))
    assert set(left_in(path)) == {"a", "b"}
    journal.ended("a")
    journal.close()
    assert set(left_in(path)) == {"b"}


async def test_a_client_may_name_its_lease_unless_the_name_is_taken(kept: Kept) -> None:
    mine = "client-made-id-0"
    one = kept.table.acquire_nowait(kept.gate, URL, 60.0, "client", mine)
    assert one is not None
    assert one.id == mine
    kept.table.give_back(mine)
    other = kept.table.acquire_nowait(kept.gate, URL, 60.0, "another", mine)
    assert other is not None
    assert other.id != mine  # the former holder may still report it
