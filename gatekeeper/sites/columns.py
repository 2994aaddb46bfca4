"""Which characters of a line a finding concerns, and the patterns by which they are found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gatekeeper.robots.model import Finding
from gatekeeper.robots.parser import SPOILT, to_unicode

FILE_FIELDS = frozenset({"clean-param", "host", "license", "sitemap"})
"""Fields of records that belong to no group, at any position."""

NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
# A non-breaking space in another encoding is decoded as U+FFFD.
_ODD_BLANKS = "\u00a0\u00ad\u1680\u2000-\u200f\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
_ODD = f"[{_ODD_BLANKS}\ufffd]"
ODD_BLANK = re.compile(_ODD)
ODD_END = re.compile(f"[{_ODD_BLANKS}]\\Z")
ODD_ENDS = re.compile(rf"\A{_ODD}++|(?<!{_ODD}){_ODD}++\Z")
"""Matches the characters around a text that look like blanks."""
SECOND_RECORD = re.compile(
    r"(?:user-agent|disallow|(?<![^ \t])(?:allow|crawl-delay|sitemap))[ \t]*+:", re.IGNORECASE
)
BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Constructs without a meaning in robots.txt. `*.*` and `name.*.js` come from shells and work as
# expected. Every alternative begins with its character, not with an assertion, so that a search
# skips the characters that begin none.
_ANYTHING = r"\.\*(?:(?<!\*\.\*)(?!\.)|(?<=/\.\*))"
_ANY_DIALECT = rf"{_ANYTHING}|\.\+|\([^()|]*+\|[^()]*+\)|\^(?<=\A\^)"
REGEX_SYNTAX = re.compile(rf"\\|{_ANY_DIALECT}|\[\^?[A-Za-z0-9]-[A-Za-z0-9]")
REGEX_SYNTAX_V2 = re.compile(_ANY_DIALECT)


class Parts(NamedTuple):
    """Positions of the parts of a line: (start, end), counting from 0."""

    line: tuple[int, int]
    """The line without surrounding blanks."""
    record: tuple[int, int]
    """Field and value, without a comment."""
    field: tuple[int, int]
    value: tuple[int, int]


def parts_of(text: str) -> Parts:
    """Return where the parts of a line are."""
    record = text.partition("#")[0]
    head, colon, rest = record.partition(":")
    whole = _stripped(text, 0, len(text))
    if not colon:
        inner = _stripped(text, 0, len(record))
        return Parts(whole, inner, inner, (inner[1], inner[1]))
    field = _stripped(text, 0, len(head))
    value = _stripped(text, len(head) + 1, len(head) + 1 + len(rest))
    end = value[1] if value[1] > value[0] else len(head) + 1
    return Parts(whole, (field[0], end), field, value)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    bare = text[start:end].rstrip(" \t")
    end = start + len(bare)
    return end - len(bare.lstrip(" \t")), end


_WITHIN: dict[str, re.Pattern[str]] = {
    "odd-blank": ODD_BLANK,
    "blank-in-value": re.compile(r"[ \t]+"),
    "unescaped-non-ascii": NOT_ASCII,
    "bad-escape": BAD_ESCAPE,
    "several-records": SECOND_RECORD,
    "dollar-inside": re.compile(r"\$(?!\Z)"),
    "literal-star": re.compile(r"\*"),
    "regular-expression": REGEX_SYNTAX,
    "hash-in-path": re.compile("#"),
    "control": re.compile(r"[\x00-\x08\x0b-\x1f]"),
    "not-utf8": re.compile("\ufffd+"),
}
"""What is searched for in the part of the line that a finding concerns, by code."""
WHOLE_FILE = frozenset({"bom", "encoding"})
"""Codes that concern octets before the first line, or the encoding of all lines."""


def located(finding: Finding, text: str, part: str) -> Finding:
    """Return the finding with its columns in a line. `part`: the name of a field of `Parts`."""
    start, end = _span(finding.code, text, part)
    return msgspec.structs.replace(finding, column=start + 1, end_column=end + 1)


def _span(code: str, text: str, part: str) -> tuple[int, int]:
    """Return start and end of the finding in the line, counting from 0."""
    if code in WHOLE_FILE:
        return 0, 0
    parts = parts_of(text)
    start, end = getattr(parts, part)
    if start == end:
        return parts.record
    found = _WITHIN[code].search(text[start:end]) if code in _WITHIN else None
    return (start + found.start(), start + found.end()) if found else (start, end)


class TextLine(msgspec.Struct, frozen=True):
    """One line of a file, as returned by `iter_lines`. All strings are decoded for display."""

    number: int
    """Line number, counting from 1."""
    text: str
    """The line without its line end."""
    field: str
    """The text before the colon, in lower case; empty if the line has no colon."""
    value: str
    """The text after the colon, without blanks and comment (RFC 9309 section 2.2.3, RFC-27)."""
    spoilt: bool
    """Whether a control octet makes the line unreadable (RFC 9309 section 3, RFC-42)."""


def iter_lines(text: str) -> Iterator[TextLine]:
    """Yield every line of a file (`RobotsTxt.octets`), including blank ones."""
    for number, raw in enumerate(text.split("\n"), 1):
        head, colon, rest = raw.partition("#")[0].partition(":")
        yield TextLine(
            number=number,
            text=to_unicode(raw),
            field=to_unicode(head.strip(" \t").lower()) if colon else "",
            value=to_unicode(rest.strip(" \t")),
            spoilt=SPOILT.match(raw) is not None,
        )
