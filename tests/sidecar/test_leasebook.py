"""The journal of open leases: what it keeps, and what happens where it can't."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.leasebook import LeaseBook, OpenLease
from gatekeeper.sidecar.leases import LeaseTable
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.waiting import Wanted
from tests.internet import FakeInternet

URL = "http://a.test/page"
FULL = Path("/dev/full")
REPORT = {
    "status": 200,
    "elapsed": None,
    "retry_after": None,
    "size": None,
    "rate_limit": None,
}
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state-leases"


def left_in(path: Path, now: float = 0.0) -> dict[str, OpenLease]:
    book = LeaseBook(path, now=now)
    book.close()
    return {lease.id: lease for lease in book.left_over}


@contextmanager
def full_disk(book: LeaseBook) -> Iterator[None]:
    kept, book._fd = book._fd, os.open(FULL, os.O_WRONLY)
    try:
        yield
    finally:
        os.close(book._fd)
        book._fd = kept


@pytest.mark.parametrize(
    "lease",
    [
        OpenLease("a", 5.0, URL),
        OpenLease("a", 5.0, URL, "Other Bot/1.0 (+http://b.test/?q=%20)\n- a"),
        OpenLease("a", 5.0, "http://a.test/%20?x=1#y"),
        OpenLease("a", 5.0, URL, None, "127.0.0.1"),
        OpenLease("a", 5.0, URL, "Other/1.0 -", "certificate of %41 b"),
    ],
)
def test_an_open_lease_is_read_as_it_was_written(path: Path, lease: OpenLease) -> None:
    book = LeaseBook(path, now=0.0)
    book.granted(lease)
    book.close()

    assert left_in(path) == {"a": lease}


def test_a_line_of_an_earlier_version_is_read(path: Path) -> None:
    path.write_text(f"+ a 5.000 {URL}\n+ b 5.000 {URL}\n- b\n+ c 5.0", encoding="utf-8")

    assert left_in(path) == {"a": OpenLease("a", 5.0, URL)}


def test_a_blank_in_a_url_makes_no_other_field_of_it(path: Path) -> None:
    book = LeaseBook(path, now=0.0)
    book.granted(OpenLease("a", 5.0, "http://a.test/x y\n- a"))
    book.close()

    assert left_in(path)["a"].url == "http://a.test/x%20y%0A-%20a"


def test_what_ran_out_is_not_left_over(path: Path) -> None:
    book = LeaseBook(path, now=0.0)
    book.granted(OpenLease("a", 5.0, URL))
    book.close()

    assert left_in(path, now=6.0) == {}


def test_a_line_that_went_in_by_half_is_taken_out_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = LeaseBook(path, now=0.0)
    book.granted(OpenLease("a", 5.0, URL))
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) - 4]))
        with pytest.raises(OSError, match="space"):
            book.granted(OpenLease("b", 5.0, URL))
    book.granted(OpenLease("c", 5.0, URL))
    book.close()

    assert set(left_in(path)) == {"a", "c"}


def test_an_end_that_was_not_written_can_be_said_again(path: Path) -> None:
    book = LeaseBook(path, now=0.0)
    book.granted(OpenLease("a", 5.0, URL))
    if FULL.exists():
        with full_disk(book), pytest.raises(OSError, match="space"):
            book.ended("a")
    book.ended("a")
    book.close()

    assert left_in(path) == {}


def test_a_journal_that_cannot_be_made_shorter_goes_on_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = LeaseBook(path, now=0.0)
    book._rewrite_at = 1
    path.with_name(path.name + ".new").mkdir()  # nothing can be written there
    book.granted(OpenLease("a", 5.0, URL))
    book.granted(OpenLease("b", 5.0, URL))
    path.with_name(path.name + ".new").rmdir()
    book.close()

    assert set(left_in(path)) == {"a", "b"}


class Kept:
    """A table over a real gate, with a journal."""

    def __init__(self, service: Any, book: LeaseBook) -> None:
        self.gate = service.gate
        self.book = book
        self.clock = VirtualClock()
        self.table = LeaseTable(ServerConfig(), self.clock, book)

    async def take(self, **wanted: Any) -> str:
        asked = Wanted(URL, 0.0, wanted.pop("ttl", 60.0), 0, None)
        return (await self.table.acquire(self.gate, asked, "client", lambda: False)).id

    @property
    def in_flight(self) -> int:
        return int(self.gate.stats().pacing.in_flight)


@pytest.fixture
async def kept(door: Any, internet: FakeInternet, path: Path) -> AsyncIterator[Kept]:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    service = (await door(pacing={"concurrency": 3})).service
    await service.gate.check(URL)
    one = Kept(service, LeaseBook(path, now=0.0))
    yield one
    one.table.close()


@needs_a_full_disk
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_full_disk_leaks_no_turn_and_says_what_helps(kept: Kept, at_once: bool) -> None:
    async def take() -> None:
        if at_once:
            kept.table.take(kept.gate, URL, 60.0, "client")
        else:
            await kept.take()

    with full_disk(kept.book), pytest.raises(Problem) as caught:
        await take()

    assert (caught.value.status, caught.value.kind) == (503, "storage")
    assert "storage.path" in caught.value.detail
    assert caught.value.headers["Retry-After"]
    assert (len(kept.table), kept.in_flight) == (0, 0)
    await kept.take()


@needs_a_full_disk
async def test_while_the_disk_is_full_no_turn_is_taken_at_all(kept: Kept) -> None:
    granted = kept.gate.stats().pacing.granted
    with full_disk(kept.book):
        for _ in range(3):
            assert kept.table._unwritten is False or kept.table.take(kept.gate, URL, 1, "c") is None
            with pytest.raises(Problem, match="storage"):
                await kept.take()

    assert kept.gate.stats().pacing.granted == granted + 1
    assert kept.table.refused["journal"] == 3


@needs_a_full_disk
async def test_a_full_disk_does_not_stop_the_sweep(kept: Kept) -> None:
    for _ in range(3):
        await kept.take(ttl=5.0)
    with full_disk(kept.book):
        kept.clock.advance(6.0)

    assert (len(kept.table), kept.in_flight) == (0, 0)
    assert kept.table.ended["expired"] == 3


@needs_a_full_disk
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda table, one: table.report(one, **REPORT), "reported"),
        (lambda table, one: table.give_back(one), "given_back"),
    ],
)
async def test_an_end_that_a_full_disk_refused_can_be_told_again(
    kept: Kept, end: Any, how: str
) -> None:
    lease_id = await kept.take()
    with full_disk(kept.book), pytest.raises(Problem, match="storage"):
        end(kept.table, lease_id)
    assert lease_id in kept.table

    end(kept.table, lease_id)
    assert (len(kept.table), kept.in_flight) == (0, 0)
    assert kept.table.ended[how] == 1


@needs_a_full_disk
async def test_a_renewal_that_a_full_disk_refused_changes_nothing(kept: Kept) -> None:
    lease_id = await kept.take(ttl=10.0)
    with full_disk(kept.book), pytest.raises(Problem, match="storage"):
        kept.table.renew(lease_id, 500.0)
    kept.clock.advance(11.0)

    assert len(kept.table) == 0
