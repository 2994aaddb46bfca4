"""Which rule sets of a text an agent obeys, by each dialect.

RFC 9309 section 2.2.1 has *groups*: user-agent lines and what follows, up to a user-agent line
after a rule (RFC-02, RFC-05). The older texts have *records* between blank lines (the 1994
standard, R94-03). The result of choosing is one or more *readings*. The first follows the dialect
that the rule set declares or that was forced. If that is not RFC 9309, the RFC's readings of the
same file follow, so that a policy can take the stricter verdict (DIA-03).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from gatekeeper.robots.longest import LongestMatch
from gatekeeper.robots.parser import Dialect, Spans
from gatekeeper.robots.rules import PrefixesInOrder, ShellRules

# Each of these begins with a line end, which is found fast: no other thread runs during a search.
_RULE_LINE = re.compile(r"\n[ \t]*+(?:allow|disallow)[ \t]*+:")
_DISALLOW_LINE = re.compile(r"\n[ \t]*+disallow[ \t]*+:")
_BLANK_LINE = re.compile(r"\n[ \t]*+(?![^\n])")
_VERSION_LINE = re.compile(r"(?>(?:\n[ \t]*+#[^\n]*+)*)\n[ \t]*+robot-version[ \t]*+:([^\n]*+)")
"""Matches, after the end of a line, comments and a Robot-version line."""
_IDENTIFIER = re.compile(r"[a-z_-]*+")  # RFC 9309 section 2.2 (RFC-03), RFC-15
WORD_END = re.compile(r"[/ \t]")
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]++)?\Z")  # the 2.0 draft (V2-08)


RuleSet = LongestMatch | PrefixesInOrder | ShellRules
"""The rules that an agent obeys, by one dialect."""


class AgentRecord(NamedTuple):
    """A part of the text between blank lines that begins with user-agent lines."""

    start: int
    """Offset of the first user-agent line."""
    end: int
    agents: tuple[str, ...]
    """Values of the user-agent lines, in lower case."""
    version: tuple[int, int] | None
    """Major and minor version of a valid Robot-version line directly after the user-agent lines, if
    any (the 2.0 draft, V2-06, V2-08)."""

    @property
    def dialect(self) -> Dialect:
        """The declared dialect: 2.0 from major version 2 on (V2-10, V2-12), else 1996 (DIA-05)."""
        return Dialect.V2 if self.version and self.version[0] >= 2 else Dialect.R1996


AgentLines = Sequence[tuple[int, bool, str]]
"""All results of `agent_lines` for a text."""


def agent_lines(
    lower: str, rule_line: re.Pattern[str] = _RULE_LINE
) -> Iterator[tuple[int, bool, str]]:
    """Yield the user-agent lines of a text in lower case.

    Each result is the offset of the line, whether the line begins a group of RFC 9309, and its
    value including a comment. The first line begins a group, and so does one after a `rule_line`.
    Only the first `user-agent` of a line is considered, so the cost is linear.
    """
    first = True
    last = 0  # the end of the previous user-agent line
    found = lower.find("user-agent")
    while found >= 0:
        start = found
        if found and lower[found - 1] != "\n":
            start = lower.rfind("\n", last, found) + 1
        end = lower.find("\n", found)
        if end < 0:
            end = len(lower)
        rest = lower[found + 10 : end]
        if rest[:1] != ":":
            rest = rest.lstrip(" \t")
        if rest[:1] == ":" and (start == found or not lower[start:found].strip(" \t")):
            # Only a rule closes a group, not a blank line and not another record (RFC 9309 sections
            # 2.1 and 2.2, RFC-05, RFC-31).
            begins = first or (
                start > last + 1 and rule_line.search(lower, last, start) is not None
            )
            yield start, begins, rest[1:].strip(" \t")
            first, last = False, end
        found = lower.find("user-agent", end)


def group_starts(text: str) -> list[int]:
    """Return the offset of the first user-agent line of each RFC 9309 group."""
    return [start for start, begins, _ in agent_lines(text.lower()) if begins]


def groups_named(lower: str, name: str, lines: AgentLines) -> Spans:
    """Return the spans of the groups in a lower-case text that have a user-agent line with exactly
    this name.

    `lines` is the result of `agent_lines` for the text.
    """
    if not name or name not in lower:
        return ()
    spans: list[tuple[int, int]] = []
    group, named = 0, False
    for start, begins, value in lines:
        if begins:
            if named:
                spans.append((group, start))
            group, named = start, False
        if value.startswith(name) and (value == name or name in names_of(value)):
            named = True
    if named:
        spans.append((group, len(lower)))
    return tuple(spans)


def names_of(value: str) -> tuple[str, ...]:
    """Return the names that a user-agent value matches: the whole value, its first word and its
    identifier (RFC-15).

    `value` is in lower case. An empty name matches no agent.
    """
    value = value.partition("#")[0].strip(" \t")
    word = WORD_END.split(value, maxsplit=1)[0]
    identifier = _IDENTIFIER.match(value)[0]  # type: ignore[index] # it always matches
    return tuple([name for name in dict.fromkeys((value, word, identifier)) if name])


def records_of(text: str, *, allow_ends: bool = True) -> tuple[AgentRecord, ...]:
    """Return the records of the 1994, 1996 and 2.0 dialects.

    Comment-only lines are dropped first (the 1994 standard, R94-06). A blank line ends a record
    (R94-03), and so does a user-agent line after a rule (R94-14). Allow counts as a rule unless
    `allow_ends` is False, as in 1994 (R94-08).
    """
    lower = text.lower()
    return _records(lower, [*agent_lines(lower, _RULE_LINE if allow_ends else _DISALLOW_LINE)])


def _records(lower: str, lines: AgentLines) -> tuple[AgentRecord, ...]:
    """Do what `records_of` does, for a text in lower case and its `agent_lines`."""
    records: list[AgentRecord] = []
    agents: list[str] = []
    first, size = 0, len(lower)
    for (start, _, value), (following, begins, _) in pairwise([*lines, (size + 1, True, "")]):
        if not agents:
            first = start
        agents.append(value.partition("#")[0].rstrip(" \t"))
        line_end = lower.find("\n", start)
        line_end = size if line_end < 0 else line_end
        if blank := _BLANK_LINE.search(lower, line_end, following - 1):
            end = blank.start() + 1
        elif begins:
            end = min(following, size)
        else:
            continue
        # It follows the last user-agent line (V2-06), and only the first one there counts (V2-07).
        found = _VERSION_LINE.match(lower, line_end)
        version = _version(found[1]) if found else None
        records.append(AgentRecord(first, end, tuple(agents), version))
        agents = []
    return tuple(records)


def _version(rest: str) -> tuple[int, int] | None:
    found = _VERSION.match(rest.partition("#")[0].strip(" \t"))
    if not found or not int(found[1]):
        return None
    return int(found[1]), int(found[2])


def choose(
    text: str, forced: Dialect | None, name: str, *, precedence: bool = False
) -> tuple[RuleSet, ...]:
    """Return the readings that the agent obeys, the declared or forced one first.

    `text` is `RobotsTxt.lines`; `forced` is the dialect that was requested, or None if each rule
    set declares its own (DIA-13). `name` is a product token in lower case. For `precedence` see
    `ShellRules`.
    """
    if forced is None or forced is Dialect.RFC9309:
        lower = text.lower()
        lines = tuple(agent_lines(lower))
        if forced is None and "robot-version" in lower:
            return _auto_readings(text, lower, lines, name, precedence=precedence)
        # All groups of exactly that name, or else all of `*`, are merged (RFC 9309 section 2.2.1,
        # RFC-11 to RFC-14).
        groups = groups_named(lower, name, lines) or groups_named(lower, "*", lines)
        return (LongestMatch(text, groups),)
    records = records_of(text, allow_ends=forced is not Dialect.R1994)
    if forced is Dialect.R1996:
        # The first record with a value that contains the name, or else the first `*` (the 1996
        # draft, R96-12, R96-13).
        chosen = [r for r in records if name and any(name in a for a in r.agents)][:1]
        chosen = chosen or _star_records(records)[:1]
    elif forced is Dialect.R1994:
        # Several records for `*` are merged (the 1994 standard, R94-12).
        chosen = _best_records(records, name)[:1] or _star_records(records)
    else:
        named = _best_records(records, name)
        chosen = _newest(named)[:1] or _newest(_star_records(records))  # V2-05, V2-09, V2-13
        forced = chosen[0].dialect if chosen else forced
    return (_record_rules(text, forced, chosen, precedence=precedence),)


def _record_rules(
    text: str, dialect: Dialect, records: Sequence[AgentRecord], *, precedence: bool
) -> RuleSet:
    spans = tuple((record.start, record.end) for record in records)
    if dialect is Dialect.V2:
        return ShellRules(text, spans, precedence=precedence)
    return PrefixesInOrder(text, spans, disallow_only=dialect is Dialect.R1994)


def _best_records(records: Sequence[AgentRecord], name: str) -> list[AgentRecord]:
    """Return the records that match the name best.

    An equal value is best, then the longest value that is part of the name, then a value that
    contains the name (the 1994 standard, R94-10, R94-13). An empty value matches no agent.
    """
    ranks = [max([_rank(agent, name) for agent in record.agents]) for record in records]
    best = max(ranks, default=(0, 0))
    return [each for each, rank in zip(records, ranks, strict=True) if rank == best > (0, 0)]


def _rank(agent: str, name: str) -> tuple[int, int]:
    value = WORD_END.split(agent, maxsplit=1)[0]  # without version and second word
    if not value or not name or value == "*":
        return (0, 0)
    if value == name:
        return (3, 0)
    if value in name:
        return (2, len(value))
    return (1, 0) if name in value else (0, 0)


def _star_records(records: Sequence[AgentRecord]) -> list[AgentRecord]:
    return [record for record in records if "*" in record.agents]


def _newest(records: Sequence[AgentRecord]) -> list[AgentRecord]:
    """Return the records of the highest version that is supported (the 2.0 draft, V2-13).

    Robots skip a record whose minor version is odd, because it is experimental (V2-09, DIA-06). A
    record without a version counts as 1.0 (V2-06).
    """
    versions = [record.version or (1, 0) for record in records]
    highest = max((version for version in versions if version[1] % 2 == 0), default=None)
    return [record for record, v in zip(records, versions, strict=True) if v == highest]


def _auto_readings(
    text: str, lower: str, lines: AgentLines, name: str, *, precedence: bool
) -> tuple[RuleSet, ...]:
    """Choose in auto mode, in a file with a Robot-version: the declared reading, then the RFC's
    (DIA-03)."""
    declared = [record for record in _records(lower, lines) if record.version]
    starts = [start for start, begins, _ in lines if begins]
    versioned = {starts[bisect_right(starts, record.start) - 1] for record in declared}
    exact = groups_named(lower, name, lines)
    groups = exact or groups_named(lower, "*", lines)
    plain = tuple([span for span in groups if span[0] not in versioned])
    if exact:  # DIA-09: an exact name anywhere takes precedence over a part of one
        named = [r for r in declared if any(name in names_of(agent) for agent in r.agents)]
    else:
        named = _best_records(declared, name)
    rest = () if exact and not named else _star_records(declared)
    first: RuleSet | None = None
    if chosen := _newest(named)[:1]:
        first = _record_rules(text, chosen[0].dialect, chosen, precedence=precedence)
    elif named and exact and plain:
        first = LongestMatch(text, plain)  # its own rule set without a version
    elif chosen := _newest(rest):
        first = _record_rules(text, chosen[0].dialect, chosen, precedence=precedence)
    elif named or rest:
        # Only experimental sets match: use the default group, if it has no version (the 2.0 draft,
        # V2-09, DIA-06).
        stars = groups_named(lower, "*", lines)
        first = LongestMatch(text, tuple([s for s in stars if s[0] not in versioned]))
    if first is None:
        return (LongestMatch(text, groups),)
    # Groups are never merged across versions (DIA-10).
    marked = tuple([span for span in groups if span[0] in versioned])
    return (first, *(LongestMatch(text, each) for each in (marked, plain) if each))
