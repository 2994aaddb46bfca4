"""Checks of whole groups for the linter: which rules can match, and which can decide."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from gatekeeper.robots.findings import Report
from gatekeeper.robots.lines import octets
from gatekeeper.robots.lint_values import quoted
from gatekeeper.robots.model import Dialect, Group, Rule
from gatekeeper.robots.normal import decoded, is_robots_txt, rfc_pattern
from gatekeeper.robots.patterns import squeeze

__all__ = ["check_groups"]

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DOT_SEGMENT = re.compile(r"[^*?]*/\.\.?/")
# Habits that mean nothing here; `*.*` is one of shells, and does what it looks like.
_REGULAR = re.compile(
    r"\\|(?<!\*)\.\*|\.\+|\([^()|]*+\|[^()]*+\)|\[\^?[A-Za-z0-9]-[A-Za-z0-9]|\A\^"
)
_REGULAR_V2 = re.compile(r"(?<!\*)\.\*|\.\+|\([^()|]*+\|[^()]*+\)|\A\^")
_BEGINS_V2 = ("/", "*", "?", "[", "\\")
_EVERYTHING = frozenset({"/", "*", "/*"})
_ORDERED = frozenset({Dialect.R1996, Dialect.V2})


def check_groups(report: Report, groups: Sequence[Group]) -> None:
    """All groups of a file, in one pass."""
    seen: dict[str, int] = {}
    for group in groups:
        for agent in {agent.lower() for agent in group.agents if agent}:
            first = seen.setdefault(agent, group.line)
            if first == group.line:
                continue
            if agent == "*" and group.dialect is not Dialect.RFC9309:
                report.add(group.line, "several-star-groups", f"The first is in line {first}.")
            else:
                report.add(group.line, "repeated-agent", f"{quoted(agent)} in line {first}.")
        _check_group(report, group)


def _check_group(report: Report, group: Group) -> None:
    if not group.rules:
        report.add(group.line, "group-without-rules")
        return
    for rule in group.rules:
        if rule.value:
            _check_value(report, rule, group.dialect)
    rules = [rule for rule in group.rules if rule.value]
    # `Allow: /` alone is no whitelist: it says, needlessly but clearly, that all is welcome.
    if (
        rules
        and all(_allows(rule) for rule in group.rules)
        and not any(squeeze(rule.value) in _EVERYTHING for rule in rules)
    ):
        report.add(rules[0].line, "lone-allow")
    if group.dialect in _ORDERED:
        _check_order(report, rules, group.dialect)
    else:
        _check_longest(report, rules)


def _check_value(report: Report, rule: Rule, dialect: Dialect) -> None:
    value = rule.value
    if " " in value or "\t" in value:
        report.add(rule.line, "blank-in-value", quoted(value))
    if not value.isascii():
        report.add(rule.line, "unescaped-non-ascii", quoted(value))
    if "%" in value and _BAD_ESCAPE.search(value):
        report.add(rule.line, "bad-escape", quoted(value))
    if (_REGULAR_V2 if dialect is Dialect.V2 else _REGULAR).search(value):
        report.add(rule.line, "regular-expression", quoted(value))
    if is_robots_txt(value):
        report.add(rule.line, "robots-txt-rule")
    if why := _unmatchable(value, dialect):
        report.add(rule.line, "unmatchable-rule", why)
    elif dialect is Dialect.RFC9309 and "$" in value[:-1]:
        report.add(rule.line, "dollar-inside", quoted(value))
    elif dialect in {Dialect.R1994, Dialect.R1996} and "*" in value:
        report.add(rule.line, "literal-star", quoted(value))


def _unmatchable(value: str, dialect: Dialect) -> str:
    """Why no path can match, or nothing."""
    if "://" in value and value.lower().startswith(("http://", "https://", "//")):
        return "A rule is a path; leave out scheme and host."
    begins = {Dialect.RFC9309: ("/", "*"), Dialect.V2: _BEGINS_V2}.get(dialect, ("/",))
    if not value.startswith(begins):
        return f"Every path begins with a slash, {quoted(value)} does not."
    # Robots resolve dot segments before they ask; behind a `?` or a `*` they may stay.
    if "/." in value and _DOT_SEGMENT.match(value):
        return "Robots resolve `.` and `..` in a URL before they compare."
    return ""


def _check_longest(report: Report, rules: Sequence[Rule]) -> None:
    """RFC 9309, and 1994, where only Disallow is there: order means nothing.

    Rules that match the same paths differ in trailing stars at most: the longest of them
    decides, and among equals Allow (RFC-17, RFC-18).
    """
    deciding: dict[str, tuple[tuple[int, bool], Rule]] = {}
    for rule in rules:
        pattern = squeeze(rfc_pattern(octets(rule.value)))
        rank = len(pattern), _allows(rule)
        key = pattern if pattern.endswith("$") else pattern.rstrip("*")
        other_rank, other = deciding.setdefault(key, (rank, rule))
        if other is rule:
            continue
        if _allows(other) == _allows(rule):
            report.add(rule.line, "duplicate-rule", f"It is line {other.line} again.")
        elif rank > other_rank:
            report.add(other.line, "unreachable-rule", f"Line {rule.line} decides.")
        else:
            report.add(rule.line, "unreachable-rule", f"Line {other.line} decides.")
        if rank > other_rank:
            deciding[key] = rank, rule


def _check_order(report: Report, rules: Sequence[Rule], dialect: Dialect) -> None:
    """1996 and 2.0, where the first match decides: what an earlier rule covers is dead."""
    covers: _Covers = _Prefixes() if dialect is Dialect.R1996 else _Shells()
    for rule in rules:
        earlier = covers.by(rule.value)
        if earlier is None:
            covers.add(rule)
        elif _allows(earlier) == _allows(rule) and earlier.value == rule.value:
            report.add(rule.line, "duplicate-rule", f"It is line {earlier.line} again.")
        else:
            report.add(rule.line, "unreachable-rule", f"Line {earlier.line} decides.")


class _Prefixes:
    """Plain prefixes: a value that begins with an earlier one is covered by it (R96-18)."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._lengths: list[int] = []
        # From the least on: a value costs no more look-ups than it has octets.

    def add(self, rule: Rule) -> None:
        value = decoded(octets(rule.value))
        self._rules[value] = rule
        place = bisect_left(self._lengths, len(value))
        if self._lengths[place : place + 1] != [len(value)]:
            self._lengths.insert(place, len(value))

    def by(self, value: str) -> Rule | None:
        value = decoded(octets(value))
        for length in self._lengths:
            if length > len(value):
                break
            if (rule := self._rules.get(value[:length])) is not None:
                return rule
        return None


class _Shells:
    """Patterns of 2.0: only the same pattern, and one that matches everything, are told."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._all: Rule | None = None

    def add(self, rule: Rule) -> None:
        self._rules[rule.value] = rule
        if squeeze(rule.value) in {"*", "/*"}:
            self._all = rule

    def by(self, value: str) -> Rule | None:
        return self._all or self._rules.get(value)


_Covers = _Prefixes | _Shells


def _allows(rule: Rule) -> bool:
    return rule.field.lower() == "allow"
