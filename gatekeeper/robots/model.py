"""Value objects that describe a file and its verdicts: `Rule`, `Candidate`, `Group`, `Match`,
`Finding`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

import msgspec
from msgspec.structs import astuple

from gatekeeper.robots.parser import Dialect, line_parts

DENIED = -2
"""Code for a path that is denied, but not by a line of the file (see `rules`)."""
ROBOTS_FILE = -3
"""Code for the path `/robots.txt`, which may always be fetched (RFC 9309 section 2.2.2, RFC-20; the
drafts of 1996 and 2.0, R96-16 and V2-34)."""
_RULE_FIELDS = frozenset({"user-agent", "allow", "disallow"})


class Severity(StrEnum):
    """How serious a finding about a file is."""

    INFO = "info"
    """Worth knowing; nothing is lost."""
    WARNING = "warning"
    """Robots may read the line in another way than its author meant."""
    ERROR = "error"
    """Robots ignore the line, or refuse the file."""


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One line of a robots.txt with a field and a value.

    `line` counts from 1. `field` and `value` are the two sides of the colon, without blanks and
    comments. `text` is the whole line without its line end. Octets that are not valid UTF-8 appear
    as U+FFFD. Rules compare equal if these four attributes are equal, so a `Candidate` equals its
    rule.
    """

    line: int
    """Line number, counting from 1."""
    field: str
    """What stands before the colon."""
    value: str
    """What stands behind the colon."""
    text: str
    """The whole line."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and astuple(self)[:4] == astuple(other)[:4]

    def __hash__(self) -> int:
        return hash((self.line, self.text))


class Candidate(Rule, frozen=True):
    """A rule that matched, with its length in octets, by which the deciding rule is chosen (RFC
    9309 section 2.2.2, RFC-17)."""

    length: int
    """Octets of the pattern."""


class Group(msgspec.Struct, frozen=True):
    """A group (RFC 9309) or record (1994, 1996, 2.0) of a file, as its dialect delimits it."""

    line: int
    """Line number of the first user-agent line."""
    agents: tuple[str, ...]
    """Values of the user-agent lines, as written."""
    rules: tuple[Rule, ...]
    """The Allow and Disallow lines, in file order."""
    records: tuple[Rule, ...]
    """Every other line of the group that contains a colon."""
    version: str | None = None
    """Value of a correctly placed Robot-version line, if any (the 2.0 draft, V2-06)."""
    dialect: Dialect = Dialect.RFC9309
    """The dialect that the group declares, or the forced one."""


class CandidateSource(Protocol):
    """What a `Match` needs of the `Policy` that made it."""

    def candidates(self, path: str, origin: str = "") -> tuple[Candidate, ...]:
        """Return the rules that match the path, the deciding one first."""


class Match(msgspec.Struct, frozen=True):
    """The verdict of a `Policy` about one URL, with the rule that decided."""

    allowed: bool
    """Whether the URL may be fetched."""
    rule: Rule | None
    """The deciding rule, or None if no rule matched."""
    dialect: Dialect
    """The dialect that the rule set declares, or the forced one."""
    conflict: bool
    """Whether the declared dialect and RFC 9309 disagree about this URL (DIA-03)."""
    path: str
    """The path and query that were checked."""
    policy: CandidateSource
    """The policy that was asked."""
    origin: str = ""
    """The origin of the path, or the empty string if it is not known."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All rules that matched, the deciding one first. Computed on each access."""
        return self.policy.candidates(self.path, self.origin)


class Finding(msgspec.Struct, frozen=True):
    """A finding about a file that its author should know.

    `line` counts from 1, and is 0 for the file as a whole. `code` is a key of
    `gatekeeper.sites.lint.CODES`.
    """

    line: int
    """Line number, counting from 1; 0 for the file as a whole."""
    code: str
    """One word for the kind of mistake (docs/lint.md)."""
    severity: Severity
    """How serious it is."""
    message: str
    """A sentence for people."""
    column: int = 0
    """First character concerned, counting from 1; 0 if the finding is not about particular
    characters."""
    end_column: int = 0
    """The character after the last one concerned; equal to `column` for a position between two
    characters."""


class DecodedText(msgspec.Struct, frozen=True, gc=False):
    """The octets of a file after decoding: what a `RobotsTxt` is made of."""

    octets: str
    """The text as octets in a str with `\\n` as line ends. Internal to this package."""
    lines: str
    """The text with unreadable lines replaced by comments; the very object `octets` if there are
    none. Internal to this package."""
    size: int
    """Octets of the body as given to `parse`."""
    truncated: bool
    """Whether the body exceeded the limit and was cut after its last complete line (RFC 9309
    section 2.5, RFC-41)."""
    bom: str
    """The encoding announced by a byte order mark, or the empty string."""
    forced: Dialect | None
    """The dialect that was requested, or None if each rule set declares its own (DIA-13)."""


def rule_at(text: str, offset: int, line: int, *, v2: bool = False) -> Rule:
    """Return the line that begins at `offset`, decoded for display. `line` is its number."""
    end = text.find("\n", offset)
    return Rule(line, *line_parts(text[offset : end if end >= 0 else len(text)], v2=v2))


def records_in(text: str, number: int = 1, *, v2: bool = False) -> Iterator[Rule]:
    """Yield every line that has a field. `number` is the line number at which the text begins."""
    for line, raw in enumerate(text.split("\n"), number):
        field, colon, _ = raw.partition(":")
        field = field.strip(" \t")
        if colon and field and "#" not in field:
            yield Rule(line, *line_parts(raw, v2=v2))


def group_of(records: list[Rule], dialect: Dialect, versioned: bool) -> Group:
    """Build a group from its lines. `versioned` is True if the group declares its dialect."""
    fields = [rule.field.lower() for rule in records]
    # The Robot-version after the last user-agent line that is followed by one counts (the 2.0
    # draft, V2-06).
    behind = enumerate(pairwise(fields), 1)
    versions = [at for at, pair in behind if pair == ("user-agent", "robot-version")]
    return Group(
        line=records[0].line,
        agents=tuple(r.value for r, f in zip(records, fields, strict=True) if f == "user-agent"),
        rules=tuple(r for r, f in zip(records, fields, strict=True) if f in {"allow", "disallow"}),
        records=tuple(r for r, f in zip(records, fields, strict=True) if f not in _RULE_FIELDS),
        version=records[versions[-1]].value if versioned and versions else None,
        dialect=dialect,
    )
