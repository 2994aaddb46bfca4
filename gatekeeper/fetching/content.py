"""Looking at a body before it is read as robots.txt: a text, a page, or neither. Pure.

Every function here is linear in the body, whatever a hostile site put into it.
"""

from __future__ import annotations

import re

from gatekeeper.fetching.outcomes import Outcome

__all__ = ["is_binary", "is_media", "judge", "readable"]

_SNIFFED = 1024
_MEDIA = frozenset({"image", "video", "audio", "font"})
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_PAGE = re.compile(
    rb"\A(?:\xef\xbb\xbf)?[ \t\r\n\f]*"
    rb"<(?:!--|(?:!doctype[ \t\r\n]+html|\?xml|html|head|body|title|meta|script|style|link|"
    rb"div|span|p|pre|br|h[1-6]|table|center|font|iframe|a|b|i)\b)",
    re.IGNORECASE,
)
_AGENT_LINE = re.compile(rb"(?:^|[\r\n])[ \t]*user-?agent[ \t]*:", re.IGNORECASE)
# What stands first in its line and is no comment. The blanks are not given back, which keeps
# the search linear in however many of them.
_SAID = re.compile(rb"(?:\A|[\r\n])[ \t\v\f]*+[^\s#]")
# A tag that ends a line on the screen ends one in the text: a rule after <br> is a rule.
_BREAKS = re.compile(rb"/?(?:br|p|div|pre|li|tr|h[1-6])(?![a-z0-9])", re.IGNORECASE)


def is_media(content_type: str) -> bool:
    """Row 5: a media type that is no text at all."""
    return content_type.partition("/")[0].strip().lower() in _MEDIA


def is_binary(start: bytes) -> bool:
    """Row 5: NUL in the first KiB.

    UTF-16 and UTF-32 have NULs in every other place, and say so by their first octets.
    """
    return b"\0" in start[:_SNIFFED] and not start.startswith(_WIDE_BOMS)


def judge(outcome: Outcome, body: bytes, *, truncated: bool) -> Outcome:
    """Which of rows 1 to 6 and 22 the body of a 2xx belongs to."""
    if _is_page(body):
        # HTTP-15: the media type is not asked; real files come as text/html every day.
        if _AGENT_LINE.search(_without_tags(body)) is None:
            return Outcome.SOFT_404
        return Outcome.HTML_RULES
    if truncated:
        return Outcome.CUT_RULES
    if _says_nothing(body):
        return Outcome.EMPTY
    return outcome


def readable(body: bytes) -> bytes:
    """The body as the parser is to see it: tags taken out of a page (row 4)."""
    return _without_tags(body) if _is_page(body) else body


def _is_page(body: bytes) -> bool:
    # A window, so that a long run of blanks in front costs little.
    return _PAGE.match(body[:_SNIFFED].lstrip(b" \t\r\n\f")) is not None


def _says_nothing(body: bytes) -> bool:
    if body.startswith(_WIDE_BOMS):
        return False
    return _SAID.search(body.removeprefix(b"\xef\xbb\xbf")) is None


def _without_tags(body: bytes) -> bytes:
    """Everything outside <...>. Two finds a tag, so linear where `<[^>]*>` would not be."""
    first, *pieces = body.split(b"<")
    out = [first]
    for piece in pieces:
        end = piece.find(b">")
        if end < 0:
            out.append(piece)
            continue
        if _BREAKS.match(piece):
            out.append(b"\n")
        out.append(piece[end + 1 :])
    return b"".join(out)
