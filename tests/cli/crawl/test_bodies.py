"""Bodies on disk: names that nothing in a URL can break, and whole files only."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper import urls
from gatekeeper.cli.crawl.bodies import Body, name_for, parts
from gatekeeper.errors import InvalidURL, StorageError

URL = "https://a.test/page"


def content(*pieces: bytes) -> StreamReader:
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), limit=2**16, loop=loop)
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    return stream


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
def test_names_are_made_of_safe_characters(url: str, kind: str, begins: str, ends: str) -> None:
    name = name_for(url, kind)
    assert name.startswith(begins)
    assert name.endswith(ends)


@given(st.text(max_size=300))
def test_no_url_leaves_its_folder_or_grows_beyond_a_name(path: str) -> None:
    try:
        url = urls.parse("https://a.test/" + path).url
    except InvalidURL:
        return
    host, _, name = name_for(url, "text/html").partition("/")
    assert host == "a.test"
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) < 100


def test_two_urls_never_share_a_name() -> None:
    assert name_for("https://a.test/x?1", "") != name_for("https://a.test/x?2", "")


async def test_a_kept_body_stands_in_its_place_and_nothing_else_does(tmp_path: Path) -> None:
    with Body(URL, tmp_path, limit=100, spool=False) as body:
        await body.receive(content(b"hello ", b"world"))
        name = body.keep("text/plain")
    assert name == name_for(URL, "text/plain")
    assert (tmp_path / name).read_bytes() == b"hello world"
    assert body.size == 11
    assert body.sha256 == hashlib.sha256(b"hello world").hexdigest()
    assert list(parts(tmp_path).iterdir()) == []


async def test_a_body_that_was_not_kept_leaves_nothing(tmp_path: Path) -> None:
    with Body(URL, tmp_path, limit=100, spool=False) as body:
        await body.receive(content(b"half of it"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    with Body(URL, tmp_path, limit=8, spool=False) as body:
        await body.receive(content(b"12345", b"67890", b"more"))
        name = body.keep("")
    assert body.cut == "length"
    assert name is not None
    assert (tmp_path / name).read_bytes() == b"12345678"


async def test_a_body_of_exactly_the_limit_is_whole() -> None:
    with Body(URL, None, limit=5, spool=False) as body:
        await body.receive(content(b"12345"))
    assert body.cut is None


async def test_a_later_body_of_the_same_url_replaces_the_earlier(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        with Body(URL, tmp_path, limit=100, spool=False) as body:
            await body.receive(content(text))
            name = body.keep("")
    assert name is not None
    assert (tmp_path / name).read_bytes() == b"new"


async def test_without_a_folder_nothing_is_written_but_everything_counted() -> None:
    with Body(URL, None, limit=100, spool=False) as body:
        await body.receive(content(b"hello"))
        assert body.keep("") is None
    assert body.size == 5


async def test_a_full_disk_is_not_taken_for_a_failed_request(tmp_path: Path) -> None:
    part = parts(tmp_path) / hashlib.sha256(URL.encode()).hexdigest()
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    full = pytest.raises(StorageError, match="No space left")
    with Body(URL, tmp_path, limit=10**9, spool=False) as body, full:
        await body.receive(content(b"x" * 100_000))
