"""How each dialect cuts the text into rule sets and chooses the ones that an agent obeys.

RFC 9309 section 2.2.1 has *groups*: user-agent lines and what follows, up to a user-agent line
behind a rule (RFC-02, RFC-05). The older texts have *records* between blank lines (R94-03). What
comes of choosing is one or more *readings*: the first by the dialect that the rule set declares or
that was forced; behind it, where that is not RFC 9309, the RFC's reading of the same file, so
that a policy can take the stricter of the two (DIA-03).
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gatekeeper.robots.model import Dialect
from gatekeeper.robots.rules import LongestMatch, PrefixesInOrder, RuleSet, ShellRules, TextSource

__all__ = [
    "Groups",
    "Source",
    "choose",
    "find_groups",
    "records_of",
]

_RULE_LINE = re.compile(r"^[ \t]*+(?:dis)?+allow[ \t]*+:", re.MULTILINE)
_RULE_LETTERS = frozenset("AaDd")
"""No line that begins or ends a record, or says its version, begins with one of these."""
_IDENTIFIER = re.compile(r"[a-z_-]*+")  # RFC-03, RFC-15
_WORD_END = re.compile(r"[/ \t]")
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]++)?\Z")  # V2-08


class AgentRecord(NamedTuple):
    """A stretch of the text between blank lines, with user-agent lines at its head."""

    start: int
    """Where its first user-agent line begins."""
    end: int
    agents: tuple[str, ...]
    """The values of its user-agent lines, in lower case."""
    version: tuple[int, int] | None
    """A Robot-version that follows them immediately and can be read (V2-06, V2-08)."""

    @property
    def experimental(self) -> bool:
        """An odd minor version: to be skipped (V2-09, DIA-06)."""
        return self.version is not None and self.version[1] % 2 == 1

    @property
    def dialect(self) -> Dialect:
        """What its version declares: 2.0 from major 2 on (V2-10, V2-12), else 1996 (DIA-05)."""
        return Dialect.V2 if self.version and self.version[0] >= 2 else Dialect.R1996


class Groups(NamedTuple):
    """The groups of RFC 9309, for a few bytes each."""

    names: str
    """The names of every group, each name between line feeds, the groups between returns."""
    starts: array[int]
    """Where the first user-agent line of each begins."""
    versioned: bool
    """A Robot-version may stand somewhere."""

    def named(self, name: str) -> list[int]:
        """The groups that have this very name, in file order."""
        needle = f"\n{name}\n"
        found: list[int] = []
        group = before = 0
        place = self.names.find(needle)
        while place >= 0:
            group += self.names.count("\r", before, place)
            before = place
            if not found or found[-1] != group:
                found.append(group)
            place = self.names.find(needle, place + 1)
        return found


def find_groups(text: str) -> Groups:
    """The groups of RFC 9309.

    Only the first `user-agent` of a line is looked at, so that the cost stays linear.
    """
    lower = text.lower()
    names: list[str] = []
    starts: list[int] = []
    last = 0  # the end of the user-agent line before
    found = lower.find("user-agent")
    while found >= 0:
        start = lower.rfind("\n", last, found) + 1 or last
        end = lower.find("\n", found)
        if end < 0:
            end = len(lower)
        rest = lower[found + 10 : end]
        if rest[:1] != ":":
            rest = rest.lstrip(" \t")
        if rest[:1] == ":" and (start == found or not lower[start:found].strip(" \t")):
            # Nothing but a rule closes a group: no blank line, no other record (RFC-05, RFC-31).
            if not starts or (start > last + 1 and _RULE_LINE.search(lower, last, start)):
                names.append("\r\n" if starts else "\n")
                starts.append(start)
            names.append(_names(rest[1:]))
            last = end
        found = lower.find("user-agent", end)
    return Groups("".join(names), array("I", starts), "robot-version" in lower)


def _names(rest: str) -> str:
    """What a user-agent line may be called by: whole, first word, or identifier (RFC-15).

    Each name ends with a line feed. An empty one is nobody's.
    """
    if "#" in rest:
        rest = rest[: rest.index("#")]
    value = rest.strip(" \t")
    if value == "*":
        return "*\n"
    identifier = _IDENTIFIER.match(value)[0]  # type: ignore[index]
    if identifier == value:
        return value + "\n" if value else ""
    word = _WORD_END.split(value, maxsplit=1)[0]
    return "".join(f"{name}\n" for name in dict.fromkeys((value, word, identifier)) if name)


def records_of(text: str, *, allow_ends: bool = True) -> tuple[AgentRecord, ...]:
    """The records of 1994, 1996 and 2.0.

    Comment-only lines are dropped before anything else (R94-06). Blank lines end a record
    (R94-03), and so does a user-agent line behind a rule (R94-14); an Allow is one unless
    `allow_ends` is false, as in 1994 (R94-08).
    """
    records: list[AgentRecord] = []
    agents: list[str] = []
    version: tuple[int, int] | None = None
    start = offset = 0
    ruled = named = versioned = False  # named: the line before was a user-agent line

    def close(end: int) -> None:
        if agents:
            records.append(AgentRecord(start, end, tuple(agents), version))
            agents.clear()

    for line in text.split("\n"):
        if ruled and not named and line[:1] in _RULE_LETTERS:
            offset += len(line) + 1  # one more rule, or something that does not count
            continue
        field, _, rest = line.strip(" \t").partition(":")
        field = field.rstrip(" \t").lower()
        here, offset = offset, offset + len(line) + 1
        if field[:1] == "#":
            continue
        if field == "user-agent":
            if ruled:
                close(here)
            if not agents:
                start, version, ruled, versioned = here, None, False, False
            agents.append(rest.partition("#")[0].strip(" \t").lower())
            named = True
            continue
        if not field and not rest and not line.strip(" \t"):
            close(here)
            ruled = False
        elif field == "robot-version" and named and not versioned:
            versioned = True  # only one a rule set, the first (V2-07)
            version = _version(rest)
        elif field == "disallow" or (field == "allow" and allow_ends):
            ruled = True
        named = False
    close(len(text))
    return tuple(records)


def _version(rest: str) -> tuple[int, int] | None:
    found = _VERSION.match(rest.partition("#")[0].strip(" \t"))
    if not found or not int(found[1]):
        return None
    return int(found[1]), int(found[2])


class Source(NamedTuple):
    """What choosing needs to know of a file."""

    file: TextSource
    text: str
    """Its lines."""
    groups: Groups
    dialect: Dialect | None
    """The forced one."""
    precedence: bool


def choose(source: Source, name: str) -> tuple[RuleSet, ...]:
    """The readings that the agent obeys, the declared or forced one first.

    `name` is a product token in lower case.
    """
    dialect = source.dialect
    if dialect is Dialect.RFC9309 or (dialect is None and not source.groups.versioned):
        return (_longest(source, _groups(source, name)),)
    records = records_of(source.text, allow_ends=dialect is not Dialect.R1994)
    if dialect is None:
        return _declared(source, name, records)
    if dialect is Dialect.R1996:
        # The first record whose value contains the name, else the first `*` (R96-12, R96-13).
        chosen = [r for r in records if name and any(name in a for a in r.agents)][:1]
        chosen = chosen or _stars(records)[:1]
    elif dialect is Dialect.R1994:
        chosen = _called(records, name)[:1] or _stars(records)  # united (R94-12)
    else:
        named = _called(records, name)
        chosen = _newest(named)[:1] or _newest(_stars(records))  # V2-05, V2-09, V2-13
        dialect = chosen[0].dialect if chosen else dialect
    return (_by_record(source, dialect, chosen),)


def _groups(source: Source, name: str) -> list[int]:
    """All groups of that very name, else all of `*` (RFC-11 to RFC-14)."""
    return source.groups.named(name) or source.groups.named("*")


def _longest(source: Source, groups: Sequence[int]) -> RuleSet:
    """RFC 9309: the groups united (RFC 9309 section 2.2.1, RFC-12)."""
    starts = source.groups.starts
    count, end = len(starts), len(source.text)
    return LongestMatch(
        source.file,
        tuple([(starts[i], starts[i + 1] if i + 1 < count else end) for i in groups]),
    )


def _by_record(source: Source, dialect: Dialect, records: Sequence[AgentRecord]) -> RuleSet:
    spans = tuple((record.start, record.end) for record in records)
    if dialect is Dialect.V2:
        return ShellRules(source.text, spans, precedence=source.precedence)
    return PrefixesInOrder(source.text, spans, disallow_only=dialect is Dialect.R1994)


def _called(records: Sequence[AgentRecord], name: str) -> list[AgentRecord]:
    """The records that fit the name best: its own, else the longest value inside it, else a
    value that it is inside of (R94-10, R94-13). An empty value fits nobody."""
    best: tuple[int, int] = (0, 0)
    found: list[AgentRecord] = []
    for record in records:
        rank = max((_rank(agent, name) for agent in record.agents), default=(0, 0))
        if rank > best:
            best, found = rank, []
        if rank == best and rank > (0, 0):
            found.append(record)
    return found


def _rank(agent: str, name: str) -> tuple[int, int]:
    value = _WORD_END.split(agent, maxsplit=1)[0]  # no version, no second word
    if not value or not name or value == "*":
        return (0, 0)
    if value == name:
        return (3, 0)
    if value in name:
        return (2, len(value))
    return (1, 0) if name in value else (0, 0)


def _stars(records: Sequence[AgentRecord]) -> list[AgentRecord]:
    return [record for record in records if "*" in record.agents]


def _newest(records: Sequence[AgentRecord]) -> list[AgentRecord]:
    """Those of the highest version that is understood (V2-09, V2-13); none is 1.0 (V2-06)."""
    known = [record for record in records if not record.experimental]
    highest = max((record.version or (1, 0) for record in known), default=None)
    return [record for record in known if (record.version or (1, 0)) == highest]


def _declared(source: Source, name: str, records: Sequence[AgentRecord]) -> tuple[RuleSet, ...]:
    """Auto, in a file with a Robot-version: the declared reading, then the RFC's (DIA-03)."""
    groups = _groups(source, name)
    declared = [record for record in records if record.version is not None]
    versioned = {bisect_right(source.groups.starts, record.start) - 1 for record in declared}
    plain = [i for i in groups if i not in versioned]
    exact = bool(source.groups.named(name))
    if exact:  # DIA-09: an exact name anywhere comes before a part of one
        needle = f"\n{name}\n"
        named = [r for r in declared if any(needle in f"\n{_names(a)}" for a in r.agents)]
    else:
        named = _called(declared, name)
    rest = () if exact and not named else _stars(declared)
    first: RuleSet | None = None
    if chosen := _newest(named)[:1]:
        first = _by_record(source, chosen[0].dialect, chosen)
    elif named and exact and plain:
        first = _longest(source, plain)  # its own set without a version
    elif chosen := _newest(rest):
        first = _by_record(source, chosen[0].dialect, chosen)
    elif named or rest:
        # Only experimental sets fit: the default, if it has no version (V2-09, DIA-06).
        stars = source.groups.named("*")
        first = _longest(source, [i for i in stars if i not in versioned])
    if first is None:
        return (_longest(source, groups),)
    # Never merged across versions (DIA-10).
    marked = [i for i in groups if i in versioned]
    return (first, *(_longest(source, each) for each in (marked, plain) if each))
