"""What an answer is made of, for people: `Rule`, `Candidate`, `Match`, `Group`.

No question needs them that is answered by yes or no: the module is imported when one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from gatekeeper.robots.parser import SPOILT, Dialect, parts_of, shown

if TYPE_CHECKING:
    from gatekeeper.robots.policy import Policy
else:
    Policy = Any  # it imports this module; `help` and `inspect.signature` look the name up

_STANDARD = frozenset({"user-agent", "allow", "disallow"})


class Severity(StrEnum):
    """How much a finding about the file matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One line of a robots.txt, as it stands in the file.

    `line` counts from 1; `field` and `value` are the two sides of the colon without
    blanks and comments; `text` is the line without its line end. Octets that are no
    UTF-8 show as U+FFFD. Rules are equal where these four are: a `Candidate` and its rule, too.
    """

    line: int
    field: str
    value: str
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and astuple(self)[:4] == astuple(other)[:4]

    def __hash__(self) -> int:
        return hash((self.line, self.text))


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


def iter_lines(text: str) -> Iterator[TextLine]:
    """Every line of a file (`RobotsTxt.octets`), blank ones too, with its field and value."""
    for number, raw in enumerate(text.split("\n"), 1):
        head, colon, rest = raw.partition("#")[0].partition(":")
        yield TextLine(
            number=number,
            text=shown(raw),
            field=shown(head.strip(" \t").lower()) if colon else "",
            value=shown(rest.strip(" \t")),
            comment="#" in raw,
            spoilt=SPOILT.match(raw) is not None,
        )


def rule_at(text: str, offset: int, line: int, *, v2: bool = False) -> Rule:
    """The line that begins at `offset`, as people see it; `line` is its number."""
    end = text.find("\n", offset)
    return Rule(line, *parts_of(text[offset : end if end >= 0 else len(text)], v2=v2))


def records_in(text: str, number: int = 1, *, v2: bool = False) -> Iterator[Rule]:
    """Every line with a field, of a text that begins with line `number`."""
    for line, raw in enumerate(text.split("\n"), number):
        field, colon, _ = raw.partition(":")
        field = field.strip(" \t")
        if colon and field and "#" not in field:
            yield Rule(line, *parts_of(raw, v2=v2))


def group_of(found: list[Rule], dialect: Dialect, versioned: bool) -> Group:
    """The group of these lines; `versioned`: it declares its dialect."""
    fields = [rule.field.lower() for rule in found]
    # Behind the last user-agent line that has one (the 2.0 draft, V2-06).
    behind = enumerate(pairwise(fields), 1)
    places = [at for at, pair in behind if pair == ("user-agent", "robot-version")]
    return Group(
        line=found[0].line,
        agents=tuple(r.value for r, f in zip(found, fields, strict=True) if f == "user-agent"),
        rules=tuple(r for r, f in zip(found, fields, strict=True) if f in {"allow", "disallow"}),
        records=tuple(r for r, f in zip(found, fields, strict=True) if f not in _STANDARD),
        version=found[places[-1]].value if versioned and places else None,
        dialect=dialect,
    )
