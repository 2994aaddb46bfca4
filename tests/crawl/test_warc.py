"""WARC files: whole records, unchanged bytes, and files of other programs left alone."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict
from yarl import URL

from gatekeeper.crawl.manifest import WarcPlace
from gatekeeper.crawl.output import Warc
from gatekeeper.errors import ConfigError, StorageError
from tests.crawl.crawling import records

SOFTWARE = "gatekeeper/0.9"


AT = datetime(2027, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def head(url: str = "https://a.test/x?y=1", **headers: str) -> Any:
    """Return a response with the attributes of aiohttp's."""
    return SimpleNamespace(
        request_info=SimpleNamespace(headers=CIMultiDict({"Host": "a.test", "User-Agent": "bot"})),
        url=URL(url, encoded=True),
        method="GET",
        version=SimpleNamespace(major=1, minor=1),
        status=200,
        reason="OK",
        raw_headers=tuple((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
        connection=None,
    )


def write(warc: Warc, text: bytes, *, cut: str | None = None, **headers: str) -> WarcPlace:
    return warc.write(head(**headers), AT, received(io.BytesIO(text), len(text), cut), {})


def received(content: io.BytesIO, size: int, cut: str | None = None) -> Any:
    """Return a body with the attributes of a crawl's."""
    return SimpleNamespace(open=lambda: content, size=size, cut=cut)


@pytest.mark.parametrize("name", ["pages.warc", "pages.warc.gz"])
def test_a_page_is_a_response_and_a_request(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"<p>hello", content_type="text/html")
    info, response, request, _ = records(path)
    assert info[0] == "warcinfo"
    assert b"software: gatekeeper/0.9" in info[1]
    assert response[:2] == ("response", b"<p>hello")
    assert response[2].http_headers.get_header("Content-Type") == "text/html"
    assert response[2].rec_headers.get_header("WARC-Target-URI") == "https://a.test/x?y=1"
    assert response[2].rec_headers.get_header("WARC-Date") == "2027-01-02T03:04:05.000678Z"
    assert request[0] == "request"
    assert request[2].http_headers.get_header("User-Agent") == "bot"


def test_records_are_written_as_warc_1_1(tmp_path: Path) -> None:
    path = tmp_path / "pages.warc"
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"x")
    assert path.read_bytes().startswith(b"WARC/1.1\r\n")


def test_the_transfer_coding_that_was_taken_off_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "pages.warc"
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"x", transfer_encoding="chunked")
    headers = records(path)[1][2].http_headers
    assert headers.get_header("Transfer-Encoding") is None
    assert headers.get_header("X-Archive-Orig-Transfer-Encoding") == "chunked"


def test_a_body_that_was_cut_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pages.warc"
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"x", cut="length")
    assert records(path)[1][2].rec_headers.get_header("WARC-Truncated") == "length"


def bodies(path: Path) -> list[bytes]:
    return [text for kind, text, _ in records(path) if kind == "response"]


both = pytest.mark.parametrize("name", ["pages.warc", "pages.warc.gz"])


@both
@pytest.mark.parametrize("torn", [1, 5, 200])
@pytest.mark.parametrize("known", [True, False])
def test_a_partial_record_at_the_end_is_cut_off_and_whole_records_stay(
    tmp_path: Path, name: str, torn: int, known: bool
) -> None:
    path = tmp_path / name
    with Warc(path, software=SOFTWARE) as warc:
        last = write(warc, b"first")
        write(warc, b"never noted")
        end = path.stat().st_size
        write(warc, os.urandom(1_000))
    path.write_bytes(path.read_bytes()[: end + torn])
    with Warc(path, software=SOFTWARE, last=last if known else None) as warc:
        assert path.stat().st_size == end
        write(warc, b"second")
    assert bodies(path) == [b"first", b"never noted", b"second"]


@both
def test_a_warc_file_unknown_to_any_manifest_is_appended_to(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"first")
    before = path.read_bytes()
    with Warc(path, software="gatekeeper/9.9") as warc:
        write(warc, b"second")
    assert path.read_bytes().startswith(before)
    assert bodies(path) == [b"first", b"second"]


@both
def test_a_file_damaged_in_its_middle_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Warc(path, software=SOFTWARE) as warc:
        end = write(warc, b"first").offset
        write(warc, b"second")
    text = path.read_bytes()
    path.write_bytes(text[:end] + b"\0" * 20 + text[end + 20 :])
    text = path.read_bytes()
    with pytest.raises(ConfigError, match=f"damaged at byte {end:,}"):
        Warc(path, software=SOFTWARE).__enter__()
    assert path.read_bytes() == text


@both
@pytest.mark.parametrize("place", [WarcPlace("x", 0, 77), WarcPlace("x", 0, 10**6)])
def test_a_warc_file_that_does_not_match_the_manifest_is_refused_unchanged(
    tmp_path: Path, name: str, place: WarcPlace
) -> None:
    path = tmp_path / name
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"first")
    text = path.read_bytes()
    with pytest.raises(ConfigError, match="does not match the manifest of this crawl"):
        Warc(path, software=SOFTWARE, last=place).__enter__()
    assert path.read_bytes() == text


@pytest.mark.parametrize("text", [b"my thesis", b"\x1f\x8bbroken", b"WARC/1.1\r\nWARC-Type: x"])
def test_a_file_of_another_program_is_refused_unchanged(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "pages.warc"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="does not belong to this crawl"):
        Warc(path, software=SOFTWARE).__enter__()
    assert path.read_bytes() == text


def test_a_record_that_fails_to_be_written_is_cut_off(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        read_so_far = 0

        def read(self, size: int | None = -1) -> bytes:
            if self.read_so_far > 110:  # it is read for its digest first
                raise OSError(5, "input/output error")
            self.read_so_far += 20
            return super().read(20)

    path = tmp_path / "pages.warc"
    with Warc(path, software=SOFTWARE) as warc:
        write(warc, b"first")
        with pytest.raises(StorageError, match=r"pages\.warc: input/output error; run the command"):
            warc.write(head(), AT, received(Broken(b"y" * 100), 100), {})
        write(warc, b"second")
    assert bodies(path) == [b"first", b"second"]
