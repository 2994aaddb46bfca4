"""`RobotsTxt`: a robots.txt, parsed once and usable for any number of agents.

The first half of the module turns octets into lines (decoding, line ends, control characters, the
size limit) and lines into fields. Inside this package a text is stored as *octets in a str*: each
character stands for one octet (Latin-1). The standards compare octets (RFC 9309 section 2.2.2,
RFC-16; the 1996 draft, R96-17), so a file that is not valid UTF-8 loses nothing, decoding cannot
fail, and a file in any script takes one byte per octet. `to_unicode` converts such a string to
readable Unicode.

Parsing only finds the lines. The groups of an agent are located when its policy is created, its
rules are read for the first question, and all other records are read when they are requested: most
files contain rules for robots that never come. Modules that only some questions need are imported
on first use.
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
from gatekeeper.late import late
from gatekeeper.speedups import lazy_pattern

if TYPE_CHECKING:
    from gatekeeper.robots.model import Group, Rule
    from gatekeeper.robots.policy import Conflicts, Policy, V2Semantics
    from gatekeeper.robots.signals import CleanParam
    from gatekeeper.sites.lint import Finding


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


_PRODUCT = lazy_pattern(r"[^\s/;,()]+")
_VERSIONED = lazy_pattern(r"[^\s/:]+/[0-9]")
_COMMENT = lazy_pattern(r"\(([^()]*)\)?")

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
        return user_agent  # avoids compiling a regular expression for a plain name
    text = user_agent.strip()
    first = _PRODUCT.match(text)
    if first is not None and first[0] == user_agent:
        return user_agent  # the common case: already a token
    if first is None or first[0].lower() != "mozilla":
        return first[0] if first else ""
    outside = _COMMENT.sub(" ", text)
    items = [item.strip() for comment in _COMMENT.findall(text) for item in comment.split(";")]
    for before, item in pairwise(items):
        if before.lower() == "compatible" and (found := _PRODUCT.match(item)):
            return found[0]
    # In a comment only a word with a version is a product: `Linux x86_64` is not one.
    versioned = [item for item in items if _VERSIONED.match(item)]
    products = [_first_product(word) for word in outside.split()[1:] + versioned]
    products = [name for name in products if name]
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
    from gatekeeper.urls import printable  # noqa: PLC0415 - only messages need it

    return f"user agent {printable(user_agent, 120)!r}: rules are selected for {token!r}"


def _first_product(word: str) -> str:
    found = _PRODUCT.match(word)
    return found[0] if found else ""


LIMIT = 512_000
"""Default number of octets that are read: 500 KiB, the minimum that RFC 9309 section 2.5 (RFC-41)
allows."""

Spans = tuple[tuple[int, int], ...]
"""(start, end) offsets of parts of a text, each of which begins at the start of a line."""

RULE = lazy_pattern(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+([^#\n]*+)", re.IGNORECASE | re.ASCII)
"""Matches a line end and the Allow or Disallow line after it, with the comment cut as RFC 9309
requires (section 2.2, RFC-06, RFC-07, RFC-27). A rule set begins with a user-agent line, so every
rule has a line end before it."""

# These match a part of what RULE matches, faster, and leave comments to the caller.
ALLOW = lazy_pattern(r"\n[ \t]*+allow", re.IGNORECASE)
ALLOWED = lazy_pattern(r"\n[ \t]*+[Aa](?i:llow)[ \t]*+:[ \t]*+(.*+)")
DISALLOWED = lazy_pattern(r"\n(?:Disallow|[ \t]*+(?i:disallow)[ \t]*+):[ \t]*+(.*+)")

# Blank and tab are the only white space (RFC 9309 section 2.2, RFC-06), line ends the only other
# controls that are allowed. DEL is not a control character in the RFC's grammar.
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\r\n"))
SPOILT = lazy_pattern(r"^(?=[^\n]*[\x00-\x08\x0b-\x1f])", re.MULTILINE)
PIECE = 65_536
"""Octets of a text that are processed in one call, about: a single call of an expression lets no
other thread run, however long it takes."""
_V2_COMMENT = lazy_pattern(r"[ \t]#")

_BOM_FIRST_OCTETS = {b"\xef", b"\xff", b"\xfe", b"\x00"}
_BOMS = (
    # Longer marks first: the UTF-32 mark begins with the UTF-16 one.
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
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
            text = data[len(mark) :].decode(name, "replace")
            return text.encode("utf-8", "surrogatepass"), name
    for mark in (b"\xef\xbb\xbf", b"\xef\xbb", b"\xef"):
        if data.startswith(mark):
            return data[len(mark) :], "utf-8"
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


def values_in(text: str, spans: Spans, *fields: str) -> dict[str, list[str]]:
    """Return the values of the given fields' lines in the spans, as octets, by field.

    `fields` are in lower case; each of them is a key of the result.
    """
    found: dict[str, list[str]] = {field: [] for field in fields}
    find = _line_pattern(fields).findall
    for low, high in in_pieces(text, spans):
        for field, value in find("\n" + text[low:high]):
            found[field.lower()].append(value.rstrip(" \t"))
    return found


def lines_of(text: str, spans: Spans, field: str) -> Iterator[tuple[int, str]]:
    """Yield the offset and the value, as octets, of each line of the field in the spans."""
    find = _line_pattern((field,)).finditer
    for low, high in in_pieces(text, spans):
        for found in find(text, max(low - 1, 0), high):  # with the line end before the span
            yield found.start() + 1, found[2].rstrip(" \t")


@lru_cache(maxsize=64)
def _line_pattern(fields: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that matches a line end and the line of one of the given fields after
    it."""
    names = "|".join(map(re.escape, fields))
    pattern = rf"\n[ \t]*+({names})[ \t]*+:[ \t]*+([^#\n]*+)"
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


def rule_offsets(text: str, spans: Spans) -> array[int]:
    """Return the offset of each Allow and Disallow line in the spans, in order."""
    pieces = in_pieces(text, spans)
    return array("I", [m.start() + 1 for lo, hi in pieces for m in RULE.finditer(text, lo, hi)])


def line_numbers(text: str, offsets: Sequence[int]) -> dict[int, int]:
    """Return the line number of each offset at which a line begins."""
    numbers = {}
    number, counted = 1, 0
    for offset in sorted(offsets):
        number += text.count("\n", counted, offset)
        numbers[offset], counted = number, offset
    return numbers


_MIN_PACKED_OCTETS = 256
"""Texts with fewer octets do not get smaller by compression."""
_DIALECTS = ("auto", *Dialect)
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
FILE_FIELDS = frozenset({"clean-param", "host", "license", "sitemap"})
"""Fields of records that belong to no group, at any position."""


class RobotsTxt:
    """A parsed robots.txt. Immutable, hashable by content, picklable, and safe to share between
    threads.

    >>> robots = RobotsTxt.parse("User-agent: *\\nDisallow: /private/\\nAllow: /private/door")
    >>> policy = robots.policy("examplebot")
    >>> policy.allowed("https://example.com/private/x"), policy.allowed("/private/door")
    (False, True)
    """

    __slots__ = (
        "_lines",
        "_original",
        "bom",
        "forced",
        "size",
        "truncated",
    )

    size: int
    """Octets of the body as given to `parse`."""
    truncated: bool
    """Whether the body exceeded the limit and was cut after its last complete line (RFC 9309
    section 2.5, RFC-41)."""
    bom: str
    """The encoding announced by a byte order mark, or the empty string."""
    forced: Dialect | None
    """The dialect that was requested, or None if each rule set declares its own (DIA-13)."""

    def __init__(
        self, text: str, lines: str, size: int, truncated: bool, bom: str, forced: Dialect | None
    ) -> None:
        """Create a file from decoded text; use `parse` to read a body.

        `text` is octets in a str with `\\n` as line ends. `lines` is the same text with unreadable
        lines replaced by comments; it is the very object `text` if there are none.
        """
        self._lines: str | bytes = lines
        self._original: str | bytes | None = None if text is lines else text
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
        """Parse a body. Never raises on content.

        `dialect` is `auto`, which lets each rule set declare its own (docs/standards.md), or one of
        `rfc9309`, `1994`, `1996`, `2.0`, which is applied to the whole file. `limit` is in octets
        and must be at least 512,000 to satisfy RFC-41. Raises ValueError for an unknown dialect or
        a limit below 1, and TypeError for a body that is neither text nor octets.
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
        """Return the rules of this file for one agent.

        `user_agent` is a product token, a `token/version` or a whole User-Agent header. `conflicts`
        specifies the verdict where the declared dialect of a rule set and RFC 9309 disagree:
        `strict` denies, `declared` follows the declared dialect (DIA-03). `v2_semantics` selects
        file order or the struck text's precedence for 2.0 rule sets (the 2.0 draft, V2-21). With
        `inherit_crawl_delay` an agent whose own group has no Crawl-delay uses the one of `*`, as
        Bing does (VND-09).
        """
        return _new_policy(self, user_agent, conflicts, v2_semantics, inherit_crawl_delay)

    @property
    def text(self) -> str:
        """The text that was read: decoded, cut at the limit, with `\\n` as line ends."""
        return to_unicode(self.octets)

    @property
    def octets(self) -> str:
        """The text as octets in a str. Internal to this package."""
        whole = self._original
        return self.lines if whole is None else _unpacked(whole)

    @property
    def lines(self) -> str:
        """The text with unreadable lines replaced by comments. Internal to this package."""
        text = self._lines
        return text if isinstance(text, str) else _unpacked(text)

    def pack(self) -> None:
        """Compress the stored text to a third of its size. Each later access costs about 5 µs more.

        For files that are not in use at the moment, or whose rules are compiled: such a policy
        needs the text only for explanations. Takes some 20 µs, or 10 ms for 500 KiB. Safe while
        other threads read: they see the same text in either form.
        """
        if isinstance(self._lines, str):
            self._lines = _packed(self._lines)
            if isinstance(self._original, str):
                self._original = _packed(self._original)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups with their lines; in a forced older dialect, the records."""
        return tuple(self._iter_groups())

    @property
    def sitemaps(self) -> tuple[str, ...]:
        """Absolute URLs of Sitemap lines anywhere in the file (VND-13)."""
        return tuple(filter(None, map(parts.signals.absolute_url, self._values("sitemap"))))

    @property
    def licenses(self) -> tuple[str, ...]:
        """Absolute URLs of License lines (SIG-15)."""
        return tuple(filter(None, map(parts.signals.absolute_url, self._values("license"))))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names given in Host lines (VND-13)."""
        return tuple(filter(None, map(parts.signals.parse_host, self._values("host"))))

    @property
    def clean_params(self) -> tuple[CleanParam, ...]:
        """Query parameters that do not change the content of a page (VND-12)."""
        return tuple(
            filter(None, map(parts.signals.parse_clean_param, self._values("clean-param")))
        )

    @property
    def extensions(self) -> tuple[Rule, ...]:
        """All lines with a field that this package does not interpret, in file order."""
        found = parts.model.records_in(self.lines)
        return tuple(rule for rule in found if rule.field.lower() not in KNOWN_FIELDS)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Errors and questionable constructs in the file (GK-06). Computed on each access."""
        found: tuple[Finding, ...] = late(__name__, "findings")(self)
        return found

    def _values(self, field: str) -> list[str]:
        text = self.lines
        found = values_in(text, ((0, len(text)),), field)[field]
        return list(map(to_unicode, found))

    def _iter_groups(self) -> Iterator[Group]:
        text = self.lines
        number, counted = 1, 0  # counted incrementally: one pass for all groups
        for start, end, dialect, versioned in self._group_spans(text):
            number += text.count("\n", counted, start)
            counted = start
            found = list(parts.model.records_in(text[start:end], number, v2=dialect is Dialect.V2))
            if found:  # text between blank lines may hold no record
                yield parts.model.group_of(found, dialect, versioned)

    def _group_spans(self, text: str) -> Iterator[tuple[int, int, Dialect, bool]]:
        """Yield start, end and dialect of each group, and whether it declares a version."""
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


def _import_policy(*args: Any) -> Policy:
    """Import `Policy` on the first call and create one.

    It is imported by name: compiled code that accesses `parts.policy.Policy` does not import the
    module.
    """
    from gatekeeper.robots.policy import Policy  # noqa: PLC0415

    global _new_policy  # noqa: PLW0603
    _new_policy = Policy
    return Policy(*args)


_new_policy: Callable[..., Policy] = _import_policy


def _packed(text: str) -> str | bytes:
    return text if len(text) < _MIN_PACKED_OCTETS else zlib.compress(text.encode("latin-1"), 1)


def _unpacked(text: str | bytes) -> str:
    return text if isinstance(text, str) else _decompressed(text)


@lru_cache(maxsize=1)  # a batch asks for the rules of one file again and again
def _decompressed(text: bytes) -> str:
    return zlib.decompress(text).decode("latin-1")
