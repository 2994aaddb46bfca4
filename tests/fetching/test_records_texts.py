"""A text is in memory once, and its original octets can be restored."""

from __future__ import annotations

import pytest

from gatekeeper.config import Config
from gatekeeper.fetching import records
from gatekeeper.fetching.records import FileTexts
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
def test_a_text_at_rest_has_its_body_compressed_unless_it_is_short(
    texts: FileTexts, name: str
) -> None:
    text = texts.of(BODIES[name])
    text.rest()
    assert text.body() == BODIES[name]
    assert len(text.kept) == len(BODIES[name]) or len(text.kept) < len(BODIES[name]) / 2
    assert text.compressed is (len(BODIES[name]) > 2_048)


def test_a_text_is_read_as_its_readable_part(texts: FileTexts) -> None:
    robots = texts.of(BODIES["a page"]).robots
    assert robots == RobotsTxt.parse(robots.octets)
    assert not robots.policy("bot").allowed("/a")


def test_identical_bodies_are_one_text_for_as_long_as_it_is_in_use(texts: FileTexts) -> None:
    first = texts.of(BODIES["both"])
    texts.hold(first)
    again = texts.of(bytes(bytearray(BODIES["both"])))
    assert again is first
    texts.hold(again)
    assert len(texts) == 1
    texts.release(first)
    assert texts.find(BODIES["both"]) is first
    texts.release(again)
    assert texts.find(BODIES["both"]) is None
    assert len(texts) == 0


def test_two_bodies_with_one_key_are_two_texts(texts: FileTexts) -> None:
    first, other = texts.of(BODIES["both"]), texts.of(BODIES["no end"])
    other.key = first.key
    for text in (first, other):
        texts.hold(text)
    assert texts.of(BODIES["both"]) is first
    texts.release(other)
    assert texts.of(BODIES["both"]) is first
    texts.release(first)
    assert len(texts) == 0


@pytest.mark.parametrize("name", BODIES)
def test_a_text_at_rest_is_parsed_again_to_the_same_rules(texts: FileTexts, name: str) -> None:
    text = texts.of(BODIES[name])
    texts.hold(text)
    robots = text.robots
    text.add_policy(robots.policy("bot"), 8)
    for _ in range(2):
        text.rest()
        assert text.parsed is None
        assert text.policy_for("bot") is None
        assert text.body() == BODIES[name]
        assert text.robots == robots
        texts.wake(text, text.robots)
        assert text.parsed == robots


def test_the_texts_used_last_stay_parsed(texts: FileTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_AWAKE", 3)
    kept = [texts.of(b"User-agent: *\nDisallow: /%d\n" % number) for number in range(10)]
    for text in kept[:9]:
        texts.hold(text)
        assert text.parsed is None
        texts.wake(text, text.robots)
        assert kept[0].policy_for("bot") is None  # no policy, but marked as used
    assert [text for text in kept[:9] if text.parsed] == [kept[0], *kept[7:9]]
    for text in kept[:9]:
        texts.release(text)
    texts.hold(kept[9])
    assert texts.awake_bytes == 0
    texts.wake(kept[9], kept[9].robots)
    assert 0 < texts.awake_bytes < 2_000


def test_parsed_texts_have_a_bound_in_bytes() -> None:
    texts = FileTexts(Config.from_dict({"cache": {"max_bytes": 4_000_000}}))
    kept = [texts.of(b"User-agent: *\n" + b"Disallow: /%d\n" % n * 15_000) for n in range(5)]
    for text in kept:
        texts.hold(text)
        texts.wake(text, text.robots)
    assert [text.parsed is not None for text in kept] == [False] * 4 + [True]
    assert texts.awake_bytes <= 1_000_000
