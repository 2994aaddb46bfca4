"""`RobotsTxt`: a file read once, to be seen through many agents' eyes.

Parsing finds the lines. The groups of an agent are found when it is chosen, its rules with its
first question, and every other record when somebody asks for it: most files hold rules for
robots that will never come.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from gatekeeper.robots import signals
from gatekeeper.robots.model import (
    LIMIT,
    Decoded,
    Dialect,
    Group,
    Rule,
    decode,
    shown,
    value_of,
    values_in,
)
from gatekeeper.robots.policy import Conflicts, Policy, V2Semantics, group_starts, records_of

if TYPE_CHECKING:
    from gatekeeper.robots.lint import Finding

__all__ = [
    "RobotsTxt",
]

_WORTH_PACKING = 256
"""Octets below which compressed text is no smaller."""
_DIALECTS = ("auto", *Dialect)
_STANDARD = frozenset({"user-agent", "allow", "disallow"})
_KNOWN = _STANDARD | {
    "clean-param",
    "comment",
    "content-signal",
    "content-usage",
    "crawl-delay",
    "host",
    "license",
    "request-rate",
    "robot-version",
    "sitemap",
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

    def __init__(self, decoded: Decoded, forced: Dialect | None) -> None:
        self._text: str | bytes = decoded.lines
        self._whole: str | bytes | None = None if decoded.text is decoded.lines else decoded.text
        self.size = decoded.size
        self.truncated = decoded.truncated
        self.bom = decoded.bom
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
        return cls(decode(body, limit), forced)

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
        return Policy(
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
        return tuple(filter(None, map(signals.absolute_url, self._values("sitemap"))))

    @property
    def licenses(self) -> tuple[str, ...]:
        """Absolute License URLs (SIG-15)."""
        return tuple(filter(None, map(signals.absolute_url, self._values("license"))))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names in Host lines (VND-13)."""
        return tuple(filter(None, map(signals.parse_host, self._values("host"))))

    @property
    def clean_params(self) -> tuple[signals.CleanParam, ...]:
        """Query parameters that do not change a page (VND-12)."""
        return tuple(filter(None, map(signals.parse_clean_param, self._values("clean-param"))))

    @property
    def extensions(self) -> tuple[Rule, ...]:
        """Every line with a field that this package does not interpret, in file order."""
        found = _records(self.lines)
        return tuple(rule for rule in found if rule.field.lower() not in _KNOWN)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the file, or surprising (GK-06). Worked out when asked for."""
        from gatekeeper.robots.lint import findings  # noqa: PLC0415 - costs nothing unless asked

        return findings(self)

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
            found = list(_records(text[start:end], number, v2=dialect is Dialect.V2))
            if found:  # a stretch between blank lines may hold no record at all
                yield _group(found, dialect, versioned)

    def _stretches(self, text: str) -> Iterator[tuple[int, int, Dialect, bool]]:
        """Start, end and dialect of each group, and whether it declares a version."""
        if self.forced in {None, Dialect.RFC9309}:
            starts = group_starts(text)
            records = records_of(text) if "robot-version" in text.lower() else ()
            heads = [record.start for record in records]
            for start, end in pairwise([*starts, len(text)]):
                inside = records[bisect_right(heads, start - 1) : bisect_right(heads, end - 1)]
                declared = [record for record in inside if record.version]
                dialect = declared[0].dialect if declared else Dialect.RFC9309
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
        return _restore, self._key()

    def __repr__(self) -> str:
        cut = ", truncated" if self.truncated else ""
        groups = len(group_starts(self.lines))
        return f"<RobotsTxt of {self.size} octets, {groups} groups{cut}>"

    def _key(self) -> tuple[str, str, int, bool, str, Dialect | None]:
        return self.octets, self.lines, self.size, self.truncated, self.bom, self.forced


def _packed(text: str) -> str | bytes:
    return text if len(text) < _WORTH_PACKING else zlib.compress(text.encode("latin-1"), 1)


def _unpacked(text: str | bytes) -> str:
    return text if isinstance(text, str) else zlib.decompress(text).decode("latin-1")


def _group(found: list[Rule], dialect: Dialect, versioned: bool) -> Group:
    fields = [rule.field.lower() for rule in found]
    at = fields.index("robot-version") if versioned and "robot-version" in fields else -1
    return Group(
        line=found[0].line,
        agents=tuple(r.value for r, f in zip(found, fields, strict=True) if f == "user-agent"),
        rules=tuple(r for r, f in zip(found, fields, strict=True) if f in {"allow", "disallow"}),
        records=tuple(r for r, f in zip(found, fields, strict=True) if f not in _STANDARD),
        version=found[at].value if at >= 0 else None,
        dialect=dialect,
    )


def _restore(
    text: str, read: str, size: int, truncated: bool, bom: str, forced: Dialect | None
) -> RobotsTxt:
    return RobotsTxt(Decoded(text, read, size, truncated, bom), forced)


def _records(text: str, number: int = 1, *, v2: bool = False) -> Iterator[Rule]:
    """Every line with a field, of a text that begins with line `number`."""
    for line, raw in enumerate(text.split("\n"), number):
        field, colon, rest = raw.partition(":")
        field = field.strip(" \t")
        if colon and field and "#" not in field:
            value = value_of(rest, v2=v2)
            yield Rule(line, shown(field), shown(value), shown(raw))
