"""Bodies: a text, a page, or neither."""

from __future__ import annotations

import pytest

from gatekeeper.fetching.outcomes import (
    Outcome,
    classify_body,
    is_binary,
    is_media,
    is_plain_text,
    parser_input,
)
from tests.effort import processor_time


def judged(body: bytes) -> Outcome:
    return classify_body(Outcome.RULES, body, truncated=False)


@pytest.mark.parametrize(
    "body",
    [b"", b" \r\n\t\n", b"# only\n# comments\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf# hello\n"],
)
def test_a_file_without_a_record_is_empty(body: bytes) -> None:
    assert judged(body) is Outcome.EMPTY


@pytest.mark.parametrize(
    "body",
    [
        b"User-agent: *\nDisallow: /\n",
        b"Sitemap: https://a.test/s.xml",
        "User-agent: *".encode("utf-16"),
        b"anything at all",
    ],
)
def test_a_text_is_left_to_the_parser(body: bytes) -> None:
    assert judged(body) is Outcome.RULES
    assert parser_input(body) == body


@pytest.mark.parametrize(
    "body",
    [
        b"<!DOCTYPE html><html><title>Not found</title></html>",
        b"\xef\xbb\xbf\r\n  <html>welcome</html>",
        b"<?xml version='1.0'?><html/>",
        b"<!-- made by hand --><p>The user-agent is a browser</p>",
    ],
)
def test_a_page_without_an_agent_line_is_no_file(body: bytes) -> None:
    assert judged(body) is Outcome.SOFT_404


@pytest.mark.parametrize(
    "body",
    [
        b"<html><body><pre>User-agent: *\nDisallow: /x\n</pre></body></html>",
        b"<html><body>User-agent: *<br>Disallow: /x<br/></body></html>",
        b"<p>User-agent: *</p><p>Disallow: /x</p>",
    ],
)
def test_rules_inside_a_page_are_taken_out_of_it(body: bytes) -> None:
    assert judged(body) is Outcome.HTML_RULES
    lines = [line.strip() for line in parser_input(body).splitlines() if line.strip()]
    assert lines == [b"User-agent: *", b"Disallow: /x"]


@pytest.mark.parametrize(
    ("start", "kind", "binary"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0", "text/plain", True),
        (b"User-agent: *", "image/png", True),
        (b"", "video/mp4", True),
        (b"User-agent: *", "application/octet-stream", False),
        ("User-agent: *".encode("utf-16"), "text/plain", False),
        ("User-agent: *".encode("utf-32"), "text/plain", False),
        (b"x" * 1024 + b"\0", "", False),
        (b"user-agent: a\ndisallow: /n\0ul\ndisallow: /b\n", "text/plain", False),
        (b"\0\nuser agent: a\nno user-agent: a\n", "text/plain", True),
    ],
)
def test_binary_content_is_recognised(start: bytes, kind: str, binary: bool) -> None:
    assert (is_media(kind) or is_binary(start)) is binary


@pytest.mark.parametrize(
    "body",
    [
        b"<" * 500_000,
        b"<html>" + b"<a " * 160_000,
        b" " * 500_000,
        b"x" + b"\n\t \t " * 100_000,
        b"x\nallow" + b" " * 500_000,
        b"x" + b"\nuser-agent " * 40_000,
    ],
)
def test_no_page_costs_more_than_its_size(body: bytes) -> None:
    def read() -> None:
        judged(body)
        parser_input(body)
        is_plain_text(body, len(body))

    assert processor_time(read, 1.0) < 1.0
