"""The words that an answer is made of: `Rule`, `Candidate`, `Match`, `Group` and two enums."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gatekeeper.robots.policy import Policy
else:
    Policy = Any  # it imports this module; `help` and `inspect.signature` look the name up

__all__ = ["Candidate", "Dialect", "Group", "Match", "Rule", "Severity"]


class Dialect(StrEnum):
    """How a rule set is read (standards.md section 9)."""

    RFC9309 = "rfc9309"
    """Whole tokens, merged groups, longest match, `*` and a final `$`."""
    R1994 = "1994"
    """Records between blank lines, Disallow only, plain prefixes."""
    R1996 = "1996"
    """The same with Allow; the first rule in file order wins."""
    V2 = "2.0"
    """Robot-version 2.0: shell patterns anchored at both ends, file order."""


class Severity(StrEnum):
    """How much a finding about the file matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Rule(msgspec.Struct, frozen=True):
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
    """A rule that matched, with the number of octets that it wins or loses by (RFC-17)."""

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
    """What a well-placed Robot-version line says (V2-06)."""
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
