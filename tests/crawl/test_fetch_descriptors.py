"""`gatekeeper fetch` when no file descriptor is left: it waits, and loses nothing."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.crawl import manifest as manifests
from gatekeeper.errors import StorageError
from gatekeeper.fetching.guard import GuardedConnector
from tests.crawl.crawling import OPEN, archived, fetch, manifest, stored
from tests.internet import FakeInternet, Page

URL = "http://a.test/x"
LARGE = "large" * 400_000


class Failing:
    """A function that finds no descriptor in its first calls."""

    def __init__(self, function: Callable[..., Any], times: float) -> None:
        self.left = times
        self._function = function

    def __call__(self, *given: Any, **options: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._function(*given, **options)


def without_sockets(monkeypatch: pytest.MonkeyPatch, times: float) -> Failing:
    """Make that many dials fail."""
    failing = Failing(GuardedConnector.open_socket, times)

    def open_socket(connector: GuardedConnector, info: Any) -> socket.socket:
        found: socket.socket = failing(connector, info)
        return found

    monkeypatch.setattr(GuardedConnector, "open_socket", open_socket)
    return failing


@pytest.mark.parametrize("body", ["here", LARGE])
async def test_a_page_waits_for_a_descriptor_for_its_file(
    net: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    site = net.site("a.test").robots(OPEN).page("/x", body)
    failing = Failing(manifests.create_file, 4)
    monkeypatch.setattr(manifests, "create_file", failing)
    assert await net.drive(fetch(net, URL, output=folder)) == 0
    assert failing.left == 0
    assert stored(folder, URL) == body.encode()
    assert site.paths.count("/x") == 1


async def test_a_large_page_waits_for_a_descriptor_for_its_record(
    virtual_internet: FakeInternet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, warc = virtual_internet, tmp_path / "pages.warc"
    net.site("a.test").robots(OPEN).page("/x", LARGE)
    failing = Failing(tempfile.TemporaryFile, 4)
    monkeypatch.setattr(tempfile, "TemporaryFile", failing)
    assert await net.drive(fetch(net, URL, warc=warc)) == 0
    assert failing.left == 0
    assert [body for _, _, body in archived(warc)] == [LARGE.encode()]


async def test_a_request_that_found_no_descriptor_does_not_count_as_a_try(
    net: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = net.site("a.test").robots(OPEN).on("/x", Page("here"))
    assert await net.drive(fetch(net, "http://a.test/y", output=folder)) == 0  # reads robots.txt
    failing = without_sockets(monkeypatch, 12)
    assert await net.drive(fetch(net, URL, output=folder, tries=1)) == 0
    assert failing.left == 0
    entry = manifest(folder)[URL]
    assert (entry["outcome"], entry.get("tries", 1)) == ("fetched", 1)
    assert site.paths.count("/x") == 1


@pytest.mark.parametrize("missing", ["file", "socket"])
async def test_a_lasting_shortage_of_descriptors_ends_the_crawl_with_one_line(
    net: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    net.site("a.test").robots(OPEN).page("/x").page("/y")
    assert await net.drive(fetch(net, "http://a.test/y", output=folder)) == 0
    if missing == "file":
        monkeypatch.setattr(manifests, "create_file", Failing(manifests.create_file, 1e9))
    else:
        without_sockets(monkeypatch, 1e9)
    began = net.clock.monotonic()
    with pytest.raises(StorageError, match=r"Too many open files|no file descriptor is left"):
        await net.drive(fetch(net, URL, output=folder))
    assert net.clock.monotonic() - began >= 300
