"""`RobotsTxt`: a file read once, to be seen through many agents' eyes.

From octets to lines first: decoding, line ends, controls, the limit; and the fields in a line.
Inside this package a file is kept as *octets in a str*: every character stands for one octet
(Latin-1). The standards compare octets (RFC 9309 section 2.2.2, RFC-16; the 1996 draft, R96-17), so
nothing is lost on a file that is no UTF-8, nothing can fail to decode, and a file of any script
costs one byte an octet. `shown` turns such text into what people read.

Parsing finds the lines. The groups of an agent are found when it is chosen, its rules with its
first question, and every other record when somebody asks for it: most files hold rules for
robots that will never come. What only some questions need is imported with the first of them.
"""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gatekeeper import robots as parts
from gatekeeper.speedups import lazy_pattern

if TYPE_CHECKING:
    from gatekeeper.robots.lint import Finding
    from gatekeeper.robots.model import Group, Rule
    from gatekeeper.robots.policy import Conflicts, Policy, V2Semantics
    from gatekeeper.robots.signals import CleanParam


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


_PRODUCT = lazy_pattern(r"[^\s/;,()]+")
_VERSIONED = lazy_pattern(r"[^\s/:]+/[0-9]")
_COMMENT = lazy_pattern(r"\(([^()]*)\)?")

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
        return user_agent  # no regular expression is compiled for a plain name
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

RULE = lazy_pattern(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+([^#\n]*+)", re.IGNORECASE | re.ASCII)
"""The end of a line and an Allow or Disallow line behind it, its comment cut the RFC's way
(RFC 9309 section 2.2, RFC-06, RFC-07, RFC-27). A rule set begins with a user-agent line, so that
none is missed."""

# These find a part of that, faster, and leave comments to be cut.
ALLOW = lazy_pattern(r"\n[ \t]*+allow", re.IGNORECASE)
ALLOWED = lazy_pattern(r"\n[ \t]*+[Aa](?i:llow)[ \t]*+:[ \t]*+(.*+)")
DISALLOWED = lazy_pattern(r"\n(?:Disallow|[ \t]*+(?i:disallow)[ \t]*+):[ \t]*+(.*+)")

# Blank and tab are the only white space (RFC 9309 section 2.2, RFC-06), line ends the only other
# controls that may occur. DEL is no control to the RFC's grammar.
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n"))
SPOILT = lazy_pattern(r"^(?=[^\n]*[\x00-\x08\x0b-\x1f])", re.MULTILINE)
_V2_COMMENT = lazy_pattern(r"[ \t]#")

_MARKED = {b"\xef", b"\xff", b"\xfe", b"\x00"}
_BOMS = (
    # The longer one first: the UTF-32 mark begins with the UTF-16 one.
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


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


def decode(
    body: bytes | bytearray | memoryview | str, limit: int = LIMIT
) -> tuple[str, str, int, bool, str]:
    """Read octets as lines: the first five things that a `RobotsTxt` is made of. Never raises on
    content.

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
        lines = SPOILT.sub("#", text)
    return text, lines, size, truncated, bom


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


def parts_of(raw: str, *, v2: bool = False) -> tuple[str, str, str]:
    """The field and the value of a line, and the line, as people see them."""
    field, _, rest = raw.partition(":")
    return shown(field.strip(" \t")), shown(value_of(rest, v2=v2)), shown(raw)


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


_WORTH_PACKING = 256
"""Octets below which compressed text is no smaller."""
_DIALECTS = ("auto", *Dialect)
_KNOWN = {
    *("allow", "clean-param", "comment", "content-signal", "content-usage", "crawl-delay"),
    *("disallow", "host", "license", "request-rate", "robot-version", "sitemap", "user-agent"),
    "visit-time",
}


class RobotsTxt:
    """The text of a robots.txt, parsed. Immutable, hashable by content, picklable, shareable.

    >>> robots = RobotsTxt.parse("User-agent: *\\nDisallow: /private/\\nAllow: /private/door")
    >>> policy = robots.policy("examplebot")
    >>> policy.allowed("https://example.com/private/x"), policy.allowed("/private/door")
    (False, True)
    """

    __slots__ = (
        "_text",
        "_whole",
        "bom",
        "forced",
        "size",
        "truncated",
    )

    size: int
    """Octets of the body, as it was handed in."""
    truncated: bool
    """The body was longer than the limit and cut after its last whole line (RFC 9309 section 2.5,
    RFC-41)."""
    bom: str
    """The encoding that a byte order mark announced, or nothing."""
    forced: Dialect | None
    """The dialect that was asked for; None lets every rule set have its own (DIA-13)."""

    def __init__(
        self, text: str, lines: str, size: int, truncated: bool, bom: str, forced: Dialect | None
    ) -> None:
        """`text`: octets in a str, line ends `\\n`. `lines`: what is read of it, spoilt lines made
        comments; the text itself if none is spoilt."""
        self._text: str | bytes = lines
        self._whole: str | bytes | None = None if text is lines else text
        self.size = size
        self.truncated = truncated
        self.bom = bom
        self.forced = forced

    @classmethod
    def parse(
        cls,
        body: bytes | bytearray | memoryview | str,
        *,
        dialect: str = "auto",
        limit: int = LIMIT,
    ) -> RobotsTxt:
        """Read a body. Never raises on content.

        `dialect` is `auto`, which lets every rule set choose (docs/standards.md), or one
        of `rfc9309`, `1994`, `1996`, `2.0`, which forces it on the whole file. `limit` is in
        octets, at least 512,000 to satisfy RFC-41. Raises ValueError for another dialect or a
        limit below 1, TypeError for a body that is neither text nor octets.
        """
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect is one of {', '.join(_DIALECTS)}, not {dialect!r}")
        if limit < 1:
            raise ValueError(f"limit is a number of octets, 1 or more, not {limit}")
        forced = None if dialect == "auto" else Dialect(dialect)
        text, lines, size, truncated, bom = decode(body, limit)
        return cls(text, lines, size, truncated, bom, forced)

    def policy(
        self,
        user_agent: str,
        *,
        conflicts: Conflicts = "strict",
        v2_semantics: V2Semantics = "order",
        inherit_crawl_delay: bool = False,
    ) -> Policy:
        """The file as it reads for one agent.

        `user_agent` is a product token, `token/version` or a whole User-Agent header.
        `conflicts`: where a rule set's declared dialect and RFC 9309 disagree, `strict` denies
        and `declared` takes the dialect's word (DIA-03). `v2_semantics`: file order, or the
        struck text's precedence (the 2.0 draft, V2-21). `inherit_crawl_delay`: an agent with a
        group of its own that names no Crawl-delay takes that of `*`, as Bing's does (VND-09).
        """
        return _policy(
            self,
            user_agent,
            conflicts=conflicts,
            v2_semantics=v2_semantics,
            inherit_crawl_delay=inherit_crawl_delay,
        )

    @property
    def text(self) -> str:
        """The file as it was read: decoded, cut at the limit, every line end a `\\n`."""
        return shown(self.octets)

    @property
    def octets(self) -> str:
        """The text as octets in a str; for this package's own use."""
        whole = self._whole
        return self.lines if whole is None else _unpacked(whole)

    @property
    def lines(self) -> str:
        """The lines as they are read, spoilt ones made comments; for this package's own use."""
        text = self._text
        return text if isinstance(text, str) else _unpacked(text)

    def pack(self) -> None:
        """Keep the text compressed from now on: a third of its size, for some 5 µs a look.

        For whoever keeps a file that is not asked at the moment, or whose rules were made ready:
        a policy needs the text but to explain then. Takes some 20 µs, of 500 KiB 10 ms.
        Safe while others read, who see the one or the other form of the same text.
        """
        if isinstance(self._text, str):
            self._text = _packed(self._text)
            if isinstance(self._whole, str):
                self._whole = _packed(self._whole)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, or in a forced older dialect the records, with their lines."""
        return tuple(self._each_group())

    @property
    def sitemaps(self) -> tuple[str, ...]:
        """Absolute Sitemap URLs, wherever in the file (VND-13)."""
        return tuple(filter(None, map(parts.signals.absolute_url, self._values("sitemap"))))

    @property
    def licenses(self) -> tuple[str, ...]:
        """Absolute License URLs (SIG-15)."""
        return tuple(filter(None, map(parts.signals.absolute_url, self._values("license"))))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names in Host lines (VND-13)."""
        return tuple(filter(None, map(parts.signals.parse_host, self._values("host"))))

    @property
    def clean_params(self) -> tuple[CleanParam, ...]:
        """Query parameters that do not change a page (VND-12)."""
        return tuple(
            filter(None, map(parts.signals.parse_clean_param, self._values("clean-param")))
        )

    @property
    def extensions(self) -> tuple[Rule, ...]:
        """Every line with a field that this package does not interpret, in file order."""
        found = parts.model.records_in(self.lines)
        return tuple(rule for rule in found if rule.field.lower() not in _KNOWN)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the file, or surprising (GK-06). Worked out when asked for."""
        return parts.lint.findings(self)

    def _values(self, field: str) -> list[str]:
        text = self.lines
        found = values_in(text, ((0, len(text)),), field)[field]
        return list(map(shown, found))

    def _each_group(self) -> Iterator[Group]:
        text = self.lines
        number, counted = 1, 0  # counted on from group to group: 10,000 of them cost one pass
        for start, end, dialect, versioned in self._stretches(text):
            number += text.count("\n", counted, start)
            counted = start
            found = list(parts.model.records_in(text[start:end], number, v2=dialect is Dialect.V2))
            if found:  # a stretch between blank lines may hold no record at all
                yield parts.model.group_of(found, dialect, versioned)

    def _stretches(self, text: str) -> Iterator[tuple[int, int, Dialect, bool]]:
        """Start, end and dialect of each group, and whether it declares a version."""
        from gatekeeper.robots.policy import group_starts, records_of  # noqa: PLC0415

        if self.forced in {None, Dialect.RFC9309}:
            starts = group_starts(text)
            records = records_of(text) if "robot-version" in text.lower() else ()
            heads = [record.start for record in records]
            for start, end in pairwise([*starts, len(text)]):
                inside = records[bisect_right(heads, start - 1) : bisect_right(heads, end - 1)]
                declared = [record for record in inside if record.version]
                dialect = declared[-1].dialect if declared else Dialect.RFC9309
                yield start, end, dialect, bool(declared)
        else:
            allow_ends = self.forced is not Dialect.R1994
            for record in records_of(text, allow_ends=allow_ends):
                dialect = record.dialect if self.forced is Dialect.V2 else self.forced
                yield record.start, record.end, dialect, record.version is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RobotsTxt) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return RobotsTxt, self._key()

    def __repr__(self) -> str:
        from gatekeeper.robots.policy import group_starts  # noqa: PLC0415

        cut = ", truncated" if self.truncated else ""
        groups = len(group_starts(self.lines))
        return f"<RobotsTxt of {self.size} octets, {groups} groups{cut}>"

    def _key(self) -> tuple[str, str, int, bool, str, Dialect | None]:
        return self.octets, self.lines, self.size, self.truncated, self.bom, self.forced


def _first_policy(*given: Any, **more: Any) -> Policy:
    """`Policy`, imported when it is first made. By name, since compiled code calls what is named
    as an attribute of a compiled module without importing that."""
    from gatekeeper.robots.policy import Policy  # noqa: PLC0415

    global _policy  # noqa: PLW0603
    _policy = Policy
    return Policy(*given, **more)


_policy: Callable[..., Policy] = _first_policy


def _packed(text: str) -> str | bytes:
    return text if len(text) < _WORTH_PACKING else zlib.compress(text.encode("latin-1"), 1)


def _unpacked(text: str | bytes) -> str:
    return text if isinstance(text, str) else zlib.decompress(text).decode("latin-1")
