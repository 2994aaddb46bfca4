"""Bodies on disk: file names are safe for any URL, and files are complete."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tracemalloc
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import IO

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper import urls
from gatekeeper.crawl import manifest, output
from gatekeeper.crawl.manifest import Folder
from gatekeeper.crawl.output import Body, name_for
from gatekeeper.errors import InvalidURL, StorageError

URL = "https://a.test/page"


def content(*pieces: bytes, limit: int = 2**16) -> StreamReader:
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), limit=limit, loop=loop)
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    return stream


async def stored(pages: Folder, url: str = URL) -> str | None:
    with Body(url, pages, limit=100, spool=False) as body:
        await body.receive(content(b"hello"))
        return body.keep("text/plain")


@pytest.fixture(params=["in memory while small", "in a file from the first byte"])
def pages(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    """The folder of a crawl, with small bodies in memory or with all bodies in files."""
    if "file" in request.param:
        monkeypatch.setattr(output, "MAX_IN_MEMORY", -1)
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("url", "kind", "begins", "ends"),
    [
        ("https://a.test/", "text/html", "a.test/index-", ".html"),
        ("https://a.test/news/2027.html?id=3", "text/html", "a.test/2027.html-", ".html"),
        ("https://a.test/%2e%2e%2fetc%2fpasswd", "", "a.test/2e-2e-2fetc-2fpasswd-", ".bin"),
        ("https://a.test/.htaccess", "text/plain", "a.test/htaccess-", ".txt"),
        ("https://a.test/a\\b", "text/plain", "a.test/a-5Cb-", ".txt"),
        ("http://[::1]:81/x", "text/plain", "_1/x-", ".txt"),
    ],
)
def test_a_file_name_is_made_of_safe_characters(
    url: str, kind: str, begins: str, ends: str
) -> None:
    name = name_for(url, kind)
    assert name.startswith(begins)
    assert name.endswith(ends)


@given(st.text(max_size=300))
def test_no_url_makes_a_path_outside_the_folder_or_a_name_too_long(path: str) -> None:
    try:
        url = urls.parse("https://a.test/" + path).url
    except InvalidURL:
        return
    host, _, name = name_for(url, "text/html").partition("/")
    assert host == "a.test"
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) < 100


def test_two_urls_have_two_file_names() -> None:
    assert name_for("https://a.test/x?1", "") != name_for("https://a.test/x?2", "")


async def test_a_kept_body_is_the_only_file_in_its_folder(pages: Folder, tmp_path: Path) -> None:
    with Body(URL, pages, limit=100, spool=False) as body:
        await body.receive(content(b"hello ", b"world"))
        name = body.keep("text/plain")
    assert name == name_for(URL, "text/plain")
    assert (tmp_path / name).read_bytes() == b"hello world"
    assert body.size == 11
    assert body.sha256 == hashlib.sha256(b"hello world").hexdigest()
    assert list((tmp_path / ".parts").iterdir()) == []


async def test_a_body_that_was_not_kept_leaves_no_file(pages: Folder, tmp_path: Path) -> None:
    with Body(URL, pages, limit=100, spool=False) as body:
        await body.receive(content(b"half of it"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_a_large_body_leaves_memory_for_its_file(tmp_path: Path) -> None:
    folder, piece, number = Folder(tmp_path), b"x" * (128 * 1024), 20
    with ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for one in range(number):
            body = stack.enter_context(Body(f"{URL}/{one}", folder, limit=2**20, spool=False))
            await body.receive(content(piece, piece, piece, limit=2**20))
        assert tracemalloc.get_traced_memory()[0] < number * 120 * 1024


async def test_reading_of_a_body_stops_at_the_limit(pages: Folder, tmp_path: Path) -> None:
    with Body(URL, pages, limit=8, spool=False) as body:
        await body.receive(content(b"12345", b"67890", b"more"))
        name = body.keep("")
    assert body.cut == "length"
    assert name is not None
    assert (tmp_path / name).read_bytes() == b"12345678"


async def test_a_body_of_exactly_the_limit_is_whole() -> None:
    with Body(URL, None, limit=5, spool=False) as body:
        await body.receive(content(b"12345"))
    assert body.cut is None


async def test_a_later_body_of_the_same_url_replaces_the_earlier(
    pages: Folder, tmp_path: Path
) -> None:
    for text in (b"old", b"new"):
        with Body(URL, pages, limit=100, spool=False) as body:
            await body.receive(content(text))
            name = body.keep("")
    assert name is not None
    assert (tmp_path / name).read_bytes() == b"new"


async def test_without_a_folder_a_body_is_counted_and_not_written() -> None:
    with Body(URL, None, limit=100, spool=False) as body:
        await body.receive(content(b"hello"))
        assert body.keep("") is None
    assert body.size == 5


async def test_a_full_disk_is_not_taken_for_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "create", lambda *_: FileIO("/dev/full", "r+b"))
    full = pytest.raises(StorageError, match=r"\.parts: No space left")
    folder = Folder(tmp_path)
    with Body(URL, folder, limit=10**9, spool=False) as body, full:
        await body.receive(content(b"x" * 100_000))


async def test_a_small_body_that_meets_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, mode: str) -> IO[bytes]:
        os.close(descriptor)
        return open("/dev/full", mode)

    folder = Folder(tmp_path)
    with Body(URL, folder, limit=100, spool=False) as body:
        await body.receive(content(b"hello"))
        monkeypatch.setattr(manifest.os, "fdopen", full)
        with pytest.raises(StorageError, match=r"\.parts: No space left"):
            body.keep("")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_a_folder_that_is_taken_away_meanwhile_is_made_again(pages: Folder) -> None:
    assert (name := await stored(pages)) is not None
    for directory in pages.path.iterdir():
        shutil.rmtree(directory)
    assert await stored(pages) == name
    assert (pages.path / name).read_bytes() == b"hello"


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="nothing lists descriptors here")
async def test_no_directory_stays_open_after_a_body_is_stored(pages: Folder) -> None:
    before = len(os.listdir("/dev/fd"))
    names = [await stored(pages, f"http://{host}.test/") for host in "abcabca"]
    assert len(os.listdir("/dev/fd")) == before
    assert all(name is not None and (pages.path / name).is_file() for name in names)


# -- links that somebody left in the folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory with a file, to which nothing may be written."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "precious").write_bytes(b"mine")
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pages"
    made.mkdir()
    return made


async def store(folder: Path) -> str | None:
    return await stored(Folder(folder))


def untouched(elsewhere: Path) -> bool:
    return [(one.name, one.read_bytes()) for one in elsewhere.iterdir()] == [("precious", b"mine")]


@pytest.mark.parametrize("name", ["a.test", ".parts"])
async def test_no_link_is_followed_to_another_directory(
    folder: Path, elsewhere: Path, name: str
) -> None:
    (folder / name).symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(StorageError, match=rf"{name}: is a symbolic link"):
        await store(folder)
    assert untouched(elsewhere)


async def test_a_link_in_the_place_of_a_file_is_replaced(folder: Path, elsewhere: Path) -> None:
    name = name_for(URL, "text/plain")
    part = folder / ".parts" / hashlib.sha256(URL.encode()).hexdigest()
    for link in (folder / name, part):
        link.parent.mkdir()
        link.symlink_to(elsewhere / "precious")
    assert await store(folder) == name
    assert untouched(elsewhere)
    assert not (folder / name).is_symlink()
    assert (folder / name).read_bytes() == b"hello"
    assert list((folder / ".parts").iterdir()) == []


async def test_the_folder_itself_may_be_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(folder, target_is_directory=True)
    name = await store(alias)
    assert name is not None
    assert (folder / name).read_bytes() == b"hello"
