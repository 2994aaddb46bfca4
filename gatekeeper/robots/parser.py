"""Octets into lines (decoding, line ends, control characters, the size limit), lines into fields,
and the name of an agent.

Inside this package a text is stored as *octets in a str*: each
character stands for one octet (Latin-1). The standards compare octets (RFC 9309 section 2.2.2,
RFC-16; the 1996 draft, R96-17), so a file that is not valid UTF-8 loses nothing, decoding cannot
fail, and a file in any script takes one byte per octet. `to_unicode` converts such a string to
readable Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import chain, islice, pairwise

from gatekeeper.urls import printable


class Dialect(StrEnum):
    """The set of rules by which a group is interpreted (docs/standards.md)."""

    RFC9309 = "rfc9309"
    """Whole tokens, merged groups, longest match, `*` and a final `$`."""
    R1994 = "1994"
    """Records between blank lines, Disallow only, plain prefixes."""
    R1996 = "1996"
    """Records and plain prefixes, with Allow; the first matching rule in file order decides."""
    V2 = "2.0"
    """Robot-version 2.0: shell patterns anchored at both ends, evaluated in file order."""


_PRODUCT = re.compile(r"[^\s/;,()]+")
_VERSIONED = re.compile(r"[^\s/:]+/[0-9]")
_COMMENT = re.compile(r"\(([^()]*)\)?")

# Names of engines and browsers that robots claim to be compatible with.
_COMPATIBILITY_NAMES = {
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
    """Return the product token of a User-Agent header, a `token/version` or a token.

    A header that begins with a product other than Mozilla is named after that product. For a header
    that begins with Mozilla, the product is the one after the word `compatible` in a comment;
    failing that, the first one, comments included, that is not an engine or a browser; failing
    that, the first one that is not Mozilla. Return the empty string if the text contains no
    product.

    >>> product_token("ExampleBot/2.1 (+https://example.com/bot)"), product_token("ExampleBot")
    ('ExampleBot', 'ExampleBot')
    >>> product_token("Mozilla/5.0 (compatible; ExampleBot/2.1; +https://example.com/bot)")
    'ExampleBot'
    """
    if user_agent.isalpha() and user_agent.lower() != "mozilla":
        return user_agent  # the most common case needs no regular expression
    text = user_agent.strip()
    first = _PRODUCT.match(text)
    if first is None or first[0].lower() != "mozilla":
        return first[0] if first else ""
    outside = _COMMENT.sub(" ", text)
    items = [item.strip() for comment in _COMMENT.findall(text) for item in comment.split(";")]
    for before, item in pairwise(items):
        if before.lower() == "compatible" and (found := _PRODUCT.match(item)):
            return found[0]
    # In a comment only a word with a version is a product: `Linux x86_64` is not one.
    words = outside.split()[1:] + [item for item in items if _VERSIONED.match(item)]
    products = [found[0] for word in words if (found := _PRODUCT.match(word))]
    own = [name for name in products if name.lower() not in _COMPATIBILITY_NAMES]
    return (own or products or [first[0]])[0]


def token_warning(user_agent: str) -> str | None:
    """Return a warning if the product token of a user agent may surprise its owner; else None.

    >>> token_warning("my bot/1.0")
    "user agent 'my bot/1.0': rules are selected for 'my'"
    """
    token = product_token(user_agent)
    rest = user_agent.strip().partition(token)[2]
    # A product may be followed by a version and a comment (RFC 9110 10.1.5). Digits in a token are
    # common although RFC 9309 section 2.2.1 (RFC-10) does not allow them, but a number alone is not
    # a name.
    cut = user_agent.startswith(token) and rest and not rest.lstrip().startswith(("(", "/"))
    if not cut and any(char.isalpha() for char in token):
        return None
    return f"user agent {printable(user_agent, 120)!r}: rules are selected for {token!r}"


LIMIT = 512_000
"""Default number of octets that are read: 500 KiB, the minimum that RFC 9309 section 2.5 (RFC-41)
allows."""

Spans = tuple[tuple[int, int], ...]
"""(start, end) offsets of parts of a text, each of which begins at the start of a line."""

RULE = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+(.*+)", re.IGNORECASE | re.ASCII)
"""Matches a line end and the Allow or Disallow line after it (RFC 9309 section 2.2, RFC-06,
RFC-07). Comments are cut later, which is faster. A rule set begins with a user-agent line, so every
rule has a line end before it."""
_RULE_WITH_BLANKS = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:(.*+)", re.IGNORECASE | re.ASCII)

# Blank and tab are the only white space (RFC 9309 section 2.2, RFC-06), line ends the only other
# controls that are allowed. DEL is not a control character in the RFC's grammar.
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n"))
SPOILT = re.compile(r"^(?=[^\n]*[\x00-\x08\x0b-\x1f])", re.MULTILINE)
PIECE = 65_536
"""Octets of a text that are processed in one call, about: a single call of an expression lets no
other thread run, however long it takes."""
_V2_COMMENT = re.compile(r"[ \t]#")

_BOM_FIRST_OCTETS = {b"\xef", b"\xff", b"\xfe", b"\x00"}
_BOMS = (
    # Longer marks first: the UTF-32 mark begins with the UTF-16 one.
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xef\xbb", "utf-8"),  # cut short
    (b"\xef", "utf-8"),
)


def to_octets(text: str) -> str:
    """Convert Unicode to octets in a str: its UTF-8 octets, one character each."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def to_unicode(text: str) -> str:
    """Convert octets in a str to Unicode for display. Invalid UTF-8 becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("latin-1").decode("utf-8", "replace")


def decode(
    body: bytes | bytearray | memoryview | str, limit: int = LIMIT
) -> tuple[str, str, int, bool, str]:
    """Decode a body and normalise its line ends. Never raises on content.

    Return the first five arguments of `RobotsTxt`: text, lines, size, truncated and bom. Only CR,
    LF and CRLF end a line (RFC 9309 section 2.2, RFC-04; the 1994 standard, R94-02). A file longer
    than `limit` octets is cut after its last complete line (RFC-41). A byte order mark is skipped
    (RFC-39); UTF-16 and UTF-32 with a byte order mark are transcoded (RFC 9309 section 2.2.2,
    RFC-44).
    """
    if isinstance(body, str):
        data = body.encode("utf-8", "surrogatepass")
    else:
        data = body if type(body) is bytes else bytes(memoryview(body))  # TypeError for an int
    size = len(data)
    truncated = size > limit
    bom = ""
    if data[:1] in _BOM_FIRST_OCTETS:
        data, bom = _without_bom(data[:limit] if truncated else data)
    if truncated:
        data = _cut_at_line_end(data, len(data) if bom else limit)
    text = data.decode("latin-1")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text
    if len(data.translate(None, _CONTROLS)) != len(data):
        # A control octet makes its own line unreadable (RFC 9309 section 3, RFC-42). The line is
        # replaced by a comment, because a comment does not end a record.
        pieces = in_pieces(text, ((0, len(text)),))
        lines = "".join([SPOILT.sub("#", text[low:high]) for low, high in pieces])
    return text, lines, size, truncated, bom


def _cut_at_line_end(data: bytes, limit: int) -> bytes:
    if data[limit : limit + 1] and data[limit] in b"\r\n":
        return data[:limit]  # the last line ends exactly at the limit
    end = max(data.rfind(b"\n", 0, limit), data.rfind(b"\r", 0, limit))
    return data[: end + 1]


def _without_bom(data: bytes) -> tuple[bytes, str]:
    """Return the data without its byte order mark, in UTF-8, and the name of the mark's encoding.

    A truncated UTF-8 mark is skipped too, as Google does.
    """
    for mark, name in _BOMS:
        if data.startswith(mark):
            rest = data[len(mark) :]
            if name != "utf-8":
                rest = rest.decode(name, "replace").encode("utf-8", "surrogatepass")
            return rest, name
    return data, ""


def strip_comment(rest: str, *, v2: bool = False) -> str:
    """Return the text after a colon without its comment and surrounding blanks.

    In a 2.0 rule set `#` starts a comment only after a blank (V2-03). In all other dialects it
    starts one anywhere (RFC 9309 section 2.2.3, RFC-27; the 1994 standard, R94-05).
    """
    if "#" in rest:
        if v2:
            found = _V2_COMMENT.search(rest)
            rest = rest[: found.start()] if found else rest
        else:
            rest = rest[: rest.index("#")]
    return rest.strip(" \t")


def line_parts(raw: str, *, v2: bool = False) -> tuple[str, str, str]:
    """Return field, value and whole text of a line, decoded for display."""
    field, _, rest = raw.partition(":")
    return to_unicode(field.strip(" \t")), to_unicode(strip_comment(rest, v2=v2)), to_unicode(raw)


def in_pieces(text: str, spans: Spans) -> Spans:
    """Cut long spans into pieces of about `PIECE` octets, each of which begins at a line end."""
    if len(text) <= PIECE:
        return spans
    pieces = []
    for low, high in spans:
        start = low
        while high - start > PIECE and (end := text.find("\n", start + PIECE, high)) >= 0:
            pieces.append((start, end))
            start = end
        pieces.append((start, high))
    return tuple(pieces)


FieldLine = tuple[str, int]
"""The value of a line, as octets, and its offset in the text."""


def values_in(text: str, spans: Spans, *fields: str) -> dict[str, list[FieldLine]]:
    """Return the lines of each of the fields that occurs in the spans, by field in lower case."""
    found: dict[str, list[FieldLine]] = {}
    find = _line_pattern(fields).finditer
    for low, high in in_pieces(text, spans):
        for line in find("\n" + text[low:high]):
            value = line[2].rstrip(" \t"), low + line.start()
            found.setdefault(line[1].lower(), []).append(value)
    return found


@lru_cache(maxsize=64)
def _line_pattern(fields: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that matches a line end and the line of one of the given fields after
    it."""
    names = "|".join(map(re.escape, fields))
    pattern = rf"\n[ \t]*+({names})[ \t]*+:[ \t]*+([^#\n]*+)"
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


RuleLines = list[tuple[str, str]]
"""The Allow and Disallow lines of a rule set. Each has a text that is empty for an Allow, and the
value. The index in the list is the number of the rule."""


def rules_in(text: str, spans: Spans, *, v2: bool = False) -> RuleLines:
    """Return each Allow and Disallow line in the spans."""
    if not v2 or "#" not in text:
        disallows, values = rule_columns(text, spans)
        return [*zip(disallows or ["s"] * len(values), values, strict=True)]
    return [  # in 2.0 a `#` may belong to the value (the 2.0 draft, V2-03)
        (dis, strip_comment(rest, v2=True))
        for low, high in in_pieces(text, spans)
        for dis, rest in _RULE_WITH_BLANKS.findall(text, low, high)
    ]


def rule_columns(text: str, spans: Spans) -> tuple[list[str], list[str]]:
    """Return two columns for the rules in the spans: a non-empty string for each Disallow, and the
    values.

    The first column is empty if all rules are Disallows.
    """
    find = RULE.findall
    found = [rule for low, high in in_pieces(text, spans) for rule in find(text, low, high)]
    disallows = ["s" if dis else "" for dis, _ in found]
    values = [value for _, value in found]
    joined = "\n".join(values)
    if "#" in joined:
        values = [value.partition("#")[0] for value in values]
    if " " in joined or "\t" in joined:
        values = [value.rstrip(" \t") for value in values]
    return [] if all(disallows) else disallows, values


def rule_starts(text: str, spans: Spans, first: int = 0) -> Iterator[int]:
    """Yield the offset of each Allow and Disallow line in the spans, in order, from the rule with
    the number `first` on."""
    pieces = in_pieces(text, spans)
    found = chain.from_iterable(RULE.finditer(text, low, high) for low, high in pieces)
    for rule in islice(found, first, None):
        yield rule.start() + 1


def line_numbers(text: str, offsets: Sequence[int]) -> dict[int, int]:
    """Return the line number of each offset at which a line begins."""
    numbers = {}
    number, counted = 1, 0
    for offset in sorted(offsets):
        number += text.count("\n", counted, offset)
        numbers[offset], counted = number, offset
    return numbers


KNOWN_FIELDS = {
    "allow",
    "clean-param",
    "comment",
    "content-signal",
    "content-usage",
    "crawl-delay",
    "disallow",
    "host",
    "license",
    "request-rate",
    "robot-version",
    "sitemap",
    "user-agent",
    "visit-time",
}
"""Fields that this package interprets, in lower case."""
