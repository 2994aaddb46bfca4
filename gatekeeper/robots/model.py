"""The lines of a robots.txt, and what an answer is made of: `Rule`, `Candidate`, `Match`, `Group`.

From octets to lines: decoding, line ends, controls, the limit; and the fields in a line. Inside
this package a file is kept as *octets in a str*: every character stands for one octet (Latin-1).
The standards compare octets (RFC 9309 section 2.2.2, RFC-16; the 1996 draft, R96-17), so nothing
is lost on a file that is no UTF-8, nothing can fail to decode, and a file of any script costs one
byte an octet. `shown` turns such text into what people read.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gatekeeper.robots.policy import Policy
else:
    Policy = Any  # it imports this module; `help` and `inspect.signature` look the name up

__all__ = [
    "LIMIT",
    "RULE",
    "Candidate",
    "Decoded",
    "Dialect",
    "Group",
    "Match",
    "Rule",
    "Severity",
    "Spans",
    "TextLine",
    "decode",
    "iter_lines",
    "line_numbers",
    "octets",
    "product_token",
    "rule_at",
    "rule_offsets",
    "shown",
    "value_of",
    "values_in",
]


class Dialect(StrEnum):
    """How a rule set is read (docs/standards.md)."""

    RFC9309 = "rfc9309"
    """Whole tokens, merged groups, longest match, `*` and a final `$`."""
    R1994 = "1994"
    """Records between blank lines, Disallow only, plain prefixes."""
    R1996 = "1996"
    """Records and plain prefixes, with Allow; the first rule in file order wins."""
    V2 = "2.0"
    """Robot-version 2.0: shell patterns anchored at both ends, file order."""


class Severity(StrEnum):
    """How much a finding about the file matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One line of a robots.txt, as it stands in the file.

    `line` counts from 1; `field` and `value` are the two sides of the colon without
    blanks and comments; `text` is the line without its line end. Octets that are no
    UTF-8 show as U+FFFD.
    """

    line: int
    field: str
    value: str
    text: str


class Candidate(Rule, frozen=True):
    """A rule that matched, with the number of octets that it wins or loses by (RFC 9309 section
    2.2.2, RFC-17)."""

    length: int


class Group(msgspec.Struct, frozen=True):
    """One group (RFC 9309) or record (1994, 1996, 2.0) of the file, as its dialect sees it."""

    line: int
    """Where its first user-agent line stands."""
    agents: tuple[str, ...]
    """The values of its user-agent lines, as written."""
    rules: tuple[Rule, ...]
    """Its Allow and Disallow lines, in file order."""
    records: tuple[Rule, ...]
    """Every other line with a colon in it that stands in the group."""
    version: str | None = None
    """What a well-placed Robot-version line says (the 2.0 draft, V2-06)."""
    dialect: Dialect = Dialect.RFC9309
    """The dialect that it declares, or that was forced."""


class Match(msgspec.Struct, frozen=True):
    """The answer of a `Policy` about one URL, with its reason."""

    allowed: bool
    rule: Rule | None
    """The rule that decided; None where no rule matched."""
    dialect: Dialect
    """The dialect that the rule set declares, or that was forced."""
    conflict: bool
    """The declared dialect and RFC 9309 disagree about this URL (DIA-03)."""
    path: str
    """The path and query that was asked about."""
    policy: Policy
    origin: str = ""
    """Where the path was asked about, if that is known."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every rule that matched, the deciding one first. Worked out when asked for."""
        return self.policy.candidates(self.path, self.origin)


_PRODUCT = re.compile(r"[^\s/;,()]+")
_VERSIONED = re.compile(r"[^\s/:]+/[0-9]")
_COMMENT = re.compile(r"\(([^()]*)\)?")

# Engines and browsers that robots claim to be compatible with.
_DISGUISES = {
    "applewebkit",
    "chrome",
    "compatible",
    "gecko",
    "khtml",
    "like",
    "mobile",
    "mozilla",
    "safari",
    "version",
}


def product_token(user_agent: str) -> str:
    """The product that a User-Agent header, `token/version` or a token speaks of.

    A header that begins with its own product is called by that. One that begins with Mozilla
    is somebody in disguise: its product is the one behind the word `compatible` in a comment,
    else the first one, comments included, that is no engine and no browser, else the first
    that is not Mozilla.

    >>> product_token("ExampleBot/2.1 (+https://example.com/bot)"), product_token("ExampleBot")
    ('ExampleBot', 'ExampleBot')
    >>> product_token("Mozilla/5.0 (compatible; ExampleBot/2.1; +https://example.com/bot)")
    'ExampleBot'
    """
    if user_agent.isalpha() and user_agent.lower() != "mozilla":
        return user_agent
    text = user_agent.strip()
    first = _PRODUCT.match(text)
    if first is not None and first[0] == user_agent:
        return user_agent  # a token already, as it mostly is
    if first is None or first[0].lower() != "mozilla":
        return first[0] if first else ""
    outside = _COMMENT.sub(" ", text)
    items = [item.strip() for comment in _COMMENT.findall(text) for item in comment.split(";")]
    for before, item in pairwise(items):
        if before.lower() == "compatible" and (found := _PRODUCT.match(item)):
            return found[0]
    # In a comment only what carries a version is a product: `Linux x86_64` is none.
    versioned = [item for item in items if _VERSIONED.match(item)]
    products = [_name(word) for word in outside.split()[1:] + versioned]
    products = [name for name in products if name]
    own = [name for name in products if name.lower() not in _DISGUISES]
    return (own or products or [first[0]])[0]


def _name(word: str) -> str:
    found = _PRODUCT.match(word)
    return found[0] if found else ""


LIMIT = 512_000
"""Octets of a file that are read: 500 KiB, the least that RFC 9309 section 2.5 (RFC-41) allows."""

Spans = tuple[tuple[int, int], ...]
"""Stretches of the text, each beginning with a line."""

RULE = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+([^#\n]*+)", re.IGNORECASE | re.ASCII)
"""The end of a line and an Allow or Disallow line behind it, its comment cut the RFC's way
(RFC 9309 section 2.2, RFC-06, RFC-07, RFC-27). A rule set begins with a user-agent line, so that
none is missed."""

# Blank and tab are the only white space (RFC 9309 section 2.2, RFC-06), line ends the only other
# controls that may occur. DEL is no control to the RFC's grammar.
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
    """`text`, spoilt lines made comments: what is read. It is `text` itself if none is spoilt."""
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


def decode(body: bytes | bytearray | memoryview | str, limit: int = LIMIT) -> Decoded:
    """Read octets as lines. Never raises on content.

    Only CR, LF and CRLF end a line (RFC 9309 section 2.2, RFC-04, the 1994 standard, R94-02). Past
    `limit` the file is cut after its last whole line (RFC-41). A byte order mark is skipped
    (RFC-39), UTF-16 and UTF-32 behind theirs are transcoded (RFC 9309 section 2.2.2, RFC-44).
    """
    if isinstance(body, str):
        data = body.encode("utf-8", "surrogatepass")
    else:
        data = body if type(body) is bytes else bytes(memoryview(body))  # of an int: TypeError
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
        # A control octet spoils its own line (RFC 9309 section 3, RFC-42); as a comment it is no
        # boundary either.
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
    (RFC 9309 section 2.2.3, RFC-27, the 1994 standard, R94-05).
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
