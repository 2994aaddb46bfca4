"""`gatekeeper fetch` where the state takes nothing: it waits until there is room, and goes on."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gatekeeper.storage import writer
from tests.cli.crawling import OPEN, fetch, stored
from tests.internet import FakeInternet

URL = "http://a.test/x"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No journal takes a line; what is not the state's is written."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "MEND_INTERVAL", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        yield patch


async def test_nothing_is_asked_until_there_is_room(
    virtual_internet: FakeInternet, tmp_path: Path, full: pytest.MonkeyPatch
) -> None:
    net, folder = virtual_internet, tmp_path / "out"
    site = net.site("a.test").robots(OPEN).page("/x", "here")

    async def run() -> int:
        fetching = asyncio.create_task(fetch(net, URL, output=folder))
        await net.clock.sleep(60.0)
        assert not fetching.done()
        assert site.paths == []
        full.undo()
        return await fetching

    assert await net.drive(run()) == 0
    assert stored(folder, URL) == b"here"
