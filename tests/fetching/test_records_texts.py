"""A text is in memory once, and its octets can be had again as they came."""

from __future__ import annotations

import pytest

from gatekeeper.config import Config
from gatekeeper.fetching.records import FileTexts, deflate, inflate
from gatekeeper.robots import RobotsTxt

BODIES = {
    "line feeds": b"User-agent: *\nDisallow: /a\n",
    "both": b"User-agent: *\r\nDisallow: /a\r\n",
    "carriage returns": b"User-agent: *\rDisallow: /a\r",
    "a mixture": b"User-agent: *\r\nDisallow: /a\nAllow: /b\r",
    "no end": b"User-agent: *\nDisallow: /a",
    "nothing": b"",
    "a mark": b"\xef\xbb\xbfUser-agent: *\nDisallow: /a\n",
    "wide": "User-agent: *\nDisallow: /a\n".encode("utf-16"),
    "no UTF-8": b"User-agent: *\nDisallow: /caf\xe9\n",
    "a spoilt line": b"User-agent: *\nDisallow: /a\x01b\n",
    "a page": b"<html>\nUser-agent: *<br>Disallow: /a\n</html>",
    "too long": b"User-agent: *\n" + b"Disallow: /abcd\n" * 40_000,
}


@pytest.fixture
def texts() -> FileTexts:
    return FileTexts(Config())


@pytest.mark.parametrize("name", BODIES)
def test_the_body_is_given_back_octet_by_octet(texts: FileTexts, name: str) -> None:
    assert texts.of(BODIES[name]).body() == BODIES[name]


@pytest.mark.parametrize("name", BODIES)
def test_packing_gives_the_same_body_also_when_the_parsed_text_was_packed(
    texts: FileTexts, name: str
) -> None:
    text = texts.of(BODIES[name])
    text.robots.pack()
    assert inflate(text.packed()) == BODIES[name]
    assert text.body() == BODIES[name]


def test_a_text_that_comes_packed_is_not_packed_again(texts: FileTexts) -> None:
    packed = deflate(BODIES["both"])
    assert texts.of(BODIES["both"], packed).packed() is packed


def test_a_text_is_read_as_its_readable_part(texts: FileTexts) -> None:
    robots = texts.of(BODIES["a page"]).robots
    assert robots == RobotsTxt.parse(robots.octets)
    assert not robots.policy("bot").allowed("/a")


def test_identical_bodies_are_one_text(texts: FileTexts) -> None:
    first = texts.of(BODIES["both"])
    assert texts.of(bytes(bytearray(BODIES["both"]))) is first
    assert len(texts) == 1
