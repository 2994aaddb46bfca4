"""Octets to lines: decoding, line ends, controls, the limit; and the fields in a line.

Inside this room a file is kept as *octets in a str*: every character stands for one octet
(Latin-1). The standards compare octets (RFC-16, R96-17), so nothing is lost on a file that
is no UTF-8, nothing can fail to decode, and a file of any script costs one byte an octet.
`shown` turns such text into what people read.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import msgspec

from gatekeeper.robots.model import Rule

__all__ = [
    "LIMIT",
    "RULE",
    "Decoded",
    "Spans",
    "TextLine",
    "decode",
    "iter_lines",
    "line_numbers",
    "octets",
    "rule_at",
    "rule_offsets",
    "shown",
    "value_of",
    "values_in",
]

LIMIT = 512_000
"""Octets of a file that are read: 500 KiB, the least that RFC-41 allows."""

Spans = tuple[tuple[int, int], ...]
"""Stretches of the text, each beginning with a line."""

RULE = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+([^#\n]*+)", re.IGNORECASE | re.ASCII)
"""The end of a line and an Allow or Disallow line behind it, its comment cut the RFC's way
(RFC-06, RFC-07, RFC-27). A rule set begins with a user-agent line, so that none is missed."""

# Blank and tab are the only white space (RFC-06), line ends the only other controls that may
# occur. DEL is no control to the RFC's grammar (defect E5).
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n"))
_SPOILT = re.compile(r"^(?=[^\n]*[\x00-\x08\x0b-\x1f])", re.MULTILINE)
_V2_COMMENT = re.compile(r"[ \t]#")

_MARKED = {b"\xef", b"\xff", b"\xfe", b"\x00"}
_BOMS = (
    # The longer one first: the UTF-32 mark begins with the UTF-16 one.
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


class Decoded(msgspec.Struct, frozen=True):
    """What came of the octets of a file."""

    text: str
    """Octets in a str, line ends `\\n`."""
    lines: str
    """The same, spoilt lines made comments: what is read. The same object if none is spoilt."""
    size: int
    """Octets handed in."""
    truncated: bool
    bom: str
    """The encoding that a byte order mark announced, or nothing."""


class TextLine(msgspec.Struct, frozen=True):
    """One line of a file, as `iter_lines` gives it. All text is shown text."""

    number: int
    """Counting from 1."""
    text: str
    """Without its line end."""
    field: str
    """What stands before the colon, in lower case; empty where there is no colon."""
    value: str
    """What stands after it, without blanks and comment (RFC 9309 section 2.2.3, RFC-27)."""
    comment: bool
    """A `#` stands in the line."""
    spoilt: bool
    """A control octet makes the line unreadable (RFC 9309 section 3, RFC-42)."""


def octets(text: str) -> str:
    """Unicode as octets in a str: the UTF-8 octets, one character each."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def shown(text: str) -> str:
    """Octets in a str as Unicode; what is no UTF-8 shows as U+FFFD."""
    if text.isascii():
        return text
    return text.encode("latin-1").decode("utf-8", "replace")


def decode(body: bytes | str, limit: int = LIMIT) -> Decoded:
    """Read octets as lines. Never raises on content.

    Only CR, LF and CRLF end a line (RFC-04, R94-02). Past `limit` the file is cut after its
    last whole line (RFC-41). A byte order mark is skipped (RFC-39), UTF-16 and UTF-32 behind
    theirs are transcoded (RFC 9309 section 2.2.2, RFC-44).
    """
    if isinstance(body, str):
        data = body.encode("utf-8", "surrogatepass")
    else:
        data = body if type(body) is bytes else bytes(body)
    size = len(data)
    truncated = size > limit
    bom = ""
    if data[:1] in _MARKED:
        data, bom = _unmarked(data[:limit] if truncated else data)
    if truncated:
        data = _cut(data, len(data) if bom else limit)
    text = data.decode("latin-1")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text
    if len(data.translate(None, _CONTROLS)) != len(data):
        # A control octet spoils its own line (RFC-42); as a comment it is no boundary either.
        lines = _SPOILT.sub("#", text)
    return Decoded(text, lines, size, truncated, bom)


def _cut(data: bytes, limit: int) -> bytes:
    if data[limit : limit + 1] and data[limit] in b"\r\n":
        return data[:limit]  # the last line ends just at the limit
    end = max(data.rfind(b"\n", 0, limit), data.rfind(b"\r", 0, limit))
    return data[: end + 1]


def _unmarked(data: bytes) -> tuple[bytes, str]:
    """Without its byte order mark, in UTF-8. A mark cut short is skipped too, as Google does."""
    for mark, name in _BOMS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(name, "replace")
            return text.encode("utf-8", "surrogatepass"), name
    for mark in (b"\xef\xbb\xbf", b"\xef\xbb", b"\xef"):
        if data.startswith(mark):
            return data[len(mark) :], "utf-8"
    return data, ""


def value_of(rest: str, *, v2: bool = False) -> str:
    """What stands after a colon, without comment and outer blanks.

    In a 2.0 rule set `#` starts a comment only after a blank (V2-03); elsewhere anywhere
    (RFC 9309 section 2.2.3, RFC-27, R94-05).
    """
    if "#" in rest:
        if v2:
            found = _V2_COMMENT.search(rest)
            rest = rest[: found.start()] if found else rest
        else:
            rest = rest[: rest.index("#")]
    return rest.strip(" \t")


def iter_lines(text: str) -> Iterator[TextLine]:
    """Every line of a file (its `Decoded.text`), blank ones too, with its field and value."""
    for number, raw in enumerate(text.split("\n"), 1):
        head, colon, rest = raw.partition("#")[0].partition(":")
        yield TextLine(
            number=number,
            text=shown(raw),
            field=shown(head.strip(" \t").lower()) if colon else "",
            value=shown(rest.strip(" \t")),
            comment="#" in raw,
            spoilt=_SPOILT.match(raw) is not None,
        )


def values_in(text: str, spans: Spans, *fields: str) -> dict[str, list[str]]:
    """The values of each field's lines in the spans, as octets. `fields` are in lower case."""
    found: dict[str, list[str]] = {field: [] for field in fields}
    lines = _lines_of(fields)
    for low, high in spans:
        for field, value in lines("\n" + text[low:high]):
            found[field.lower()].append(value.rstrip(" \t"))
    return found


@lru_cache(maxsize=64)
def _lines_of(fields: tuple[str, ...]) -> Callable[[str], list[tuple[str, str]]]:
    """Finds the lines of some fields in a text that begins with a line end."""
    names = "|".join(map(re.escape, fields))
    pattern = rf"\n[ \t]*+({names})[ \t]*+:[ \t]*+([^#\n]*+)"
    return re.compile(pattern, re.IGNORECASE | re.ASCII).findall


def rule_offsets(text: str, spans: Spans) -> array[int]:
    """Where each Allow and Disallow line of the spans begins, in order."""
    return array("I", [m.start() + 1 for lo, hi in spans for m in RULE.finditer(text, lo, hi)])


def line_numbers(text: str, offsets: Sequence[int]) -> dict[int, int]:
    """The number of the line that begins at each offset."""
    numbers = {}
    number, counted = 1, 0
    for offset in sorted(offsets):
        number += text.count("\n", counted, offset)
        numbers[offset], counted = number, offset
    return numbers


def rule_at(text: str, offset: int, line: int, *, v2: bool = False) -> Rule:
    """The line that begins at `offset`, as people see it; `line` is its number."""
    end = text.find("\n", offset)
    raw = text[offset : end if end >= 0 else len(text)]
    field, _, rest = raw.partition(":")
    return Rule(
        line=line,
        field=shown(field.strip(" \t")),
        value=shown(value_of(rest, v2=v2)),
        text=shown(raw),
    )
