"""`gatekeeper fetch` while its state can't be written: it waits for room, and resumes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gatekeeper.crawl import runner
from gatekeeper.errors import StorageError
from gatekeeper.storage import writer
from tests.crawl.crawling import OPEN, fetch, stored
from tests.internet import FakeInternet

URL = "http://a.test/x"
pwrite = os.pwrite


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make writes to the journal fail; other files can be written."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "REPAIR_SECONDS", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        yield patch


async def test_no_request_is_sent_while_the_disk_is_full(
    virtual_internet: FakeInternet, tmp_path: Path, full: pytest.MonkeyPatch
) -> None:
    net, folder = virtual_internet, tmp_path / "out"
    site = net.site("a.test").robots(OPEN).page("/x", "here")
    # The writer thread uses the machine's clock, which is independent of the virtual one.
    full.setattr(runner, "DISK_WAIT", 1e9)

    async def run() -> int:
        fetching = asyncio.create_task(fetch(net, URL, output=folder))
        await net.clock.sleep(60.0)
        assert not fetching.done()
        assert site.paths == []
        full.setattr(os, "pwrite", pwrite)
        return await fetching

    assert await net.drive(run()) == 0
    assert stored(folder, URL) == b"here"


@pytest.mark.parametrize("max_wait", [3600.0, 100.0])
async def test_a_disk_that_stays_full_ends_the_crawl_with_one_line(
    virtual_internet: FakeInternet, tmp_path: Path, full: pytest.MonkeyPatch, max_wait: float
) -> None:
    net, folder = virtual_internet, tmp_path / "out"
    site = net.site("a.test").robots(OPEN).page("/x", "here")
    began = net.clock.monotonic()
    with pytest.raises(
        StorageError,
        match=r"gatekeeper\.db: No space.*no clock .* could be stored.*run the command again",
    ):
        await net.drive(fetch(net, URL, output=folder, max_wait=max_wait))
    assert net.clock.monotonic() - began == pytest.approx(min(300.0, max_wait), abs=40.0)
    assert site.paths == []
    full.undo()
    assert await net.drive(fetch(net, URL, output=folder)) == 0
    assert stored(folder, URL) == b"here"


@pytest.mark.parametrize("failing", ["manifest.jsonl", "manifest.jsonl.tried"])
async def test_a_manifest_that_cannot_be_written_ends_the_crawl_with_its_name_and_the_remedy(
    virtual_internet: FakeInternet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    net, folder, write = virtual_internet, tmp_path / "out", os.write
    net.site("a.test").robots(OPEN).page("/x", "here")

    def refuse(descriptor: int, data: bytes) -> int:
        if os.path.samestat(os.fstat(descriptor), (folder / failing).stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        with pytest.raises(StorageError, match=r"manifest\.jsonl: No space .*; run the command"):
            await net.drive(fetch(net, URL, output=folder))
    assert await net.drive(fetch(net, URL, output=folder)) == 0
    assert stored(folder, URL) == b"here"
