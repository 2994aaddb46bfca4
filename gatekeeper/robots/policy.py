"""`Policy`: the rules of a `RobotsTxt` for one agent. It decides about URLs and explains its
verdicts.

The first half of the module splits the text into rule sets by each dialect and chooses those that
an agent obeys. RFC 9309 section 2.2.1 has *groups*: user-agent lines and what follows, up to a
user-agent line after a rule (RFC-02, RFC-05). The older texts have *records* between blank lines
(the 1994 standard, R94-03). The result of choosing is one or more *readings*. The first follows the
dialect that the rule set declares or that was forced. If that is not RFC 9309, the RFC's readings
of the same file follow, so that a policy can take the stricter verdict (DIA-03).
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from gatekeeper import robots as parts
from gatekeeper import speedups
from gatekeeper.robots.longest import LongestMatch, QuickAnswer
from gatekeeper.robots.parser import (
    Dialect,
    Spans,
    in_pieces,
    line_numbers,
    lines_of,
    product_token,
    rule_offsets,
    to_octets,
    values_in,
)
from gatekeeper.robots.rules import (
    PrefixesInOrder,
    ShellRules,
    UsageRules,
    rules_in,
    split_url,
)
from gatekeeper.speedups import lazy_pattern

if TYPE_CHECKING:
    from gatekeeper.robots import timing
    from gatekeeper.robots.flat import FlatRules
    from gatekeeper.robots.model import Candidate, Match, Rule
    from gatekeeper.robots.parser import RobotsTxt

_RULE_LINE = lazy_pattern(r"^[ \t]*+(?:dis)?+allow[ \t]*+:", re.MULTILINE)
_RULE_LETTERS = frozenset("AaDd")
"""No line that begins or ends a record, or gives its version, begins with one of these letters."""
_IDENTIFIER = lazy_pattern(r"[a-z_-]*+")  # RFC 9309 section 2.2 (RFC-03), RFC-15
WORD_END = lazy_pattern(r"[/ \t]")
_VERSION = lazy_pattern(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]++)?\Z")  # the 2.0 draft (V2-08)


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
    def experimental(self) -> bool:
        """Whether the minor version is odd, so that robots skip the record (the 2.0 draft, V2-09,
        DIA-06)."""
        return self.version is not None and self.version[1] % 2 == 1

    @property
    def dialect(self) -> Dialect:
        """The declared dialect: 2.0 from major version 2 on (V2-10, V2-12), else 1996 (DIA-05)."""
        return Dialect.V2 if self.version and self.version[0] >= 2 else Dialect.R1996


AgentLines = Sequence[tuple[int, bool, str]]
"""All results of `agent_lines` for a text."""


def agent_lines(lower: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the user-agent lines of a text in lower case.

    Each result is the offset of the line, whether the line begins a group of RFC 9309, and its
    value including a comment. Only the first `user-agent` of a line is considered, so the cost is
    linear.
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
                start > last + 1 and _RULE_LINE.search(lower, last, start) is not None
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
    records: list[AgentRecord] = []
    agents: list[str] = []
    version: tuple[int, int] | None = None
    start = offset = 0
    has_rule = after_agent = has_version = False  # after_agent: directly after one

    def close(end: int) -> None:
        if agents:
            records.append(AgentRecord(start, end, tuple(agents), version))
            agents.clear()

    for line in text.split("\n"):
        if has_rule and not after_agent and line[:1] in _RULE_LETTERS:
            offset += len(line) + 1  # another rule, or a line without meaning here
            continue
        field, colon, rest = line.strip(" \t").partition(":")
        line_start, offset = offset, offset + len(line) + 1
        if field[:1] == "#":
            continue
        # A line without a colon is not a record (the 1994 standard, R94-04).
        field = field.rstrip(" \t").lower() if colon else ""
        if field == "user-agent":
            if has_rule:
                close(line_start)
            if not agents:
                start, has_rule = line_start, False
            version, has_version = None, False  # it follows the last user-agent line (V2-06)
            agents.append(rest.partition("#")[0].strip(" \t").lower())
            after_agent = True
            continue
        if not line.strip(" \t"):
            close(line_start)
            has_rule = False
        elif field == "robot-version" and after_agent and not has_version:
            has_version = True  # only the first of a rule set counts (the 2.0 draft, V2-07)
            version = _version(rest)
        elif field == "disallow" or (field == "allow" and allow_ends):
            has_rule = True
        after_agent = False
    close(len(text))
    return tuple(records)


def _version(rest: str) -> tuple[int, int] | None:
    found = _VERSION.match(rest.partition("#")[0].strip(" \t"))
    if not found or not int(found[1]):
        return None
    return int(found[1]), int(found[2])


def choose(robots: RobotsTxt, name: str, *, precedence: bool = False) -> tuple[RuleSet, ...]:
    """Return the readings that the agent obeys, the declared or forced one first.

    `name` is a product token in lower case. For `precedence` see `ShellRules`.
    """
    dialect, text = robots.forced, robots.lines
    if dialect is None or dialect is Dialect.RFC9309:
        lower = text.lower()
        lines = tuple(agent_lines(lower))
        if dialect is None and "robot-version" in lower:
            return _auto_readings(robots, lower, lines, name, precedence=precedence)
        # All groups of exactly that name, or else all of `*`, are merged (RFC 9309 section 2.2.1,
        # RFC-11 to RFC-14).
        groups = groups_named(lower, name, lines) or groups_named(lower, "*", lines)
        return (LongestMatch(robots, groups),)
    records = records_of(text, allow_ends=dialect is not Dialect.R1994)
    if dialect is Dialect.R1996:
        # The first record with a value that contains the name, or else the first `*` (the 1996
        # draft, R96-12, R96-13).
        chosen = [r for r in records if name and any(name in a for a in r.agents)][:1]
        chosen = chosen or _star_records(records)[:1]
    elif dialect is Dialect.R1994:
        # Several records for `*` are merged (the 1994 standard, R94-12).
        chosen = _best_records(records, name)[:1] or _star_records(records)
    else:
        named = _best_records(records, name)
        chosen = _newest(named)[:1] or _newest(_star_records(records))  # V2-05, V2-09, V2-13
        dialect = chosen[0].dialect if chosen else dialect
    return (_record_rules(text, dialect, chosen, precedence=precedence),)


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
    best: tuple[int, int] = (0, 0)
    matches: list[AgentRecord] = []
    for record in records:
        rank = max((_rank(agent, name) for agent in record.agents), default=(0, 0))
        if rank > best:
            best, matches = rank, []
        if rank == best and rank > (0, 0):
            matches.append(record)
    return matches


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
    """Return the records of the highest version that is supported (the 2.0 draft, V2-09, V2-13). A
    record without a version counts as 1.0 (V2-06)."""
    known = [record for record in records if not record.experimental]
    highest = max((record.version or (1, 0) for record in known), default=None)
    return [record for record in known if (record.version or (1, 0)) == highest]


def _auto_readings(
    robots: RobotsTxt, lower: str, lines: AgentLines, name: str, *, precedence: bool
) -> tuple[RuleSet, ...]:
    """Choose in auto mode, in a file with a Robot-version: the declared reading, then the RFC's
    (DIA-03)."""
    text = robots.lines
    declared = [record for record in records_of(text) if record.version is not None]
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
        first = LongestMatch(robots, plain)  # its own rule set without a version
    elif chosen := _newest(rest):
        first = _record_rules(text, chosen[0].dialect, chosen, precedence=precedence)
    elif named or rest:
        # Only experimental sets match: use the default group, if it has no version (the 2.0 draft,
        # V2-09, DIA-06).
        stars = groups_named(lower, "*", lines)
        first = LongestMatch(robots, tuple([s for s in stars if s[0] not in versioned]))
    if first is None:
        return (LongestMatch(robots, groups),)
    # Groups are never merged across versions (DIA-10).
    marked = tuple([span for span in groups if span[0] in versioned])
    return (first, *(LongestMatch(robots, each) for each in (marked, plain) if each))


Conflicts = Literal["strict", "declared"]
V2Semantics = Literal["order", "precedence"]

_DIRECTIVE = lazy_pattern(
    r"\n[ \t]*+[CRVcrv]"
    r"(?i:rawl-delay|equest-rate|isit-time|omment|ontent-(?:signal|usage))[ \t]*+:"
)
"""Matches the start of a line with one of `timing.FIELDS`. The first line of a file belongs to no
group. Most lines begin with another letter, which is detected fastest without `re.IGNORECASE`."""
_LARGE = 65_536
"""Octets of rules from which the offsets of all rules are computed on creation, not for the first
match."""
_MAX_CANDIDATES = 1_000
"""Maximum number of candidates that are listed: more than anybody reads, fewer than a file may
contain."""


class Policy:
    """The rules of a robots.txt for one agent. Immutable, hashable, picklable, safe to share
    between threads.

    Created by `RobotsTxt.policy`. If a rule set declares a dialect other than RFC 9309 and
    `conflicts` is `strict`, a URL is allowed only if both readings allow it (DIA-03); `declared`
    follows the declared dialect. In both modes `Match.conflict` reports that the readings differ.
    """

    __slots__ = (
        "_cached_directives",
        "_cached_offsets",
        "_compared_readings",
        "_readings",
        "_usage",
        "agent",
        "allowed",
        "conflicts",
        "dialect",
        "inherit_crawl_delay",
        "robots",
        "v2_semantics",
    )

    allowed: Callable[[str], bool]
    """allowed(url) -> bool: whether the URL may be fetched.

    The URL is absolute, or a path with its query. The host is not considered, except by the 1994
    dialect (R94-26). Raises InvalidURL for text that is neither.
    """
    robots: RobotsTxt
    """The file."""
    agent: str
    """The product token for which rule sets were chosen."""
    dialect: Dialect
    """The dialect that the chosen rule set declares, or the forced one."""

    def __init__(
        self,
        robots: RobotsTxt,
        user_agent: str,
        conflicts: Conflicts = "strict",
        v2_semantics: V2Semantics = "order",
        inherit_crawl_delay: bool = False,
    ) -> None:
        if conflicts not in {"strict", "declared"}:
            raise ValueError(f'conflicts is "strict" or "declared", not {conflicts!r}')
        if v2_semantics not in {"order", "precedence"}:
            raise ValueError(f'v2_semantics is "order" or "precedence", not {v2_semantics!r}')
        self.robots = robots
        self.agent = product_token(user_agent)
        self.conflicts = conflicts
        self.v2_semantics = v2_semantics
        self.inherit_crawl_delay: bool = inherit_crawl_delay
        name = to_octets(self.agent).lower()  # in this order, as the text of the file
        readings = choose(robots, name, precedence=v2_semantics == "precedence")
        self._compared_readings: tuple[RuleSet, ...] = ()
        if conflicts == "declared":  # the others are compared, but do not decide
            readings, self._compared_readings = readings[:1], readings[1:]
        self._readings = readings
        self.dialect = readings[0].dialect
        single = self._only_rules if speedups.ON else None
        # A bound method of the policy itself would be a reference cycle.
        self.allowed = single.allows_url if single else partial(_allowed, readings)
        self._cached_directives: parts.timing.Directives | None = None
        self._usage: UsageRules | None = None
        self._cached_offsets: list[array[int]] | None = None
        if robots.size > _LARGE and sum(high - low for low, high in readings[0].spans) > _LARGE:
            self._rule_offsets(robots.lines)

    def allows(self, path: str, origin: str) -> bool:
        """Return the verdict for a path with its query and its origin, as from `urls.split`.

        >>> from gatekeeper.robots import RobotsTxt
        >>> policy = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot")
        >>> policy.allows("/x?y", ""), policy.allows("/a", "")
        (False, True)
        """
        single = self._only_rules
        return single.allows(path) if single else _allows(self._readings, path, origin)

    def flat(self) -> FlatRules | None:
        """Return the rules as a few strings, or None if the rules alone do not decide."""
        first = self._readings[0]
        directives = self._directives()
        if (
            not isinstance(first, LongestMatch)
            or not self._single_reading
            or directives.visit_times
        ):
            return None
        return parts.flat.flat_rules(self.robots.lines, first.spans, directives.crawl_delay)

    def rule_by(self, rules: FlatRules, path: str, score: int) -> Rule | None:
        """Return the rule that gave a path this score in the `flat` rules.

        Return None if only `match_path` can find the rule.
        """
        text, spans, allow = self.robots.lines, self._readings[0].spans, score & 1 == 1
        values = rules.values(path, score) if rules.as_written else []
        found = [parts.flat.rule_with(value, text, spans, allow=allow) for value in values]
        # Of several rules the first in the file decides.
        return min(filter(None, found), key=lambda rule: rule.line, default=None)

    def quick_answer(self) -> QuickAnswer | None:
        """Return a function for hot paths, or None if there is none.

        `answer(text after the authority)` returns the verdict, or None if the whole URL has to be
        parsed.

        >>> from gatekeeper.robots import RobotsTxt
        >>> answer = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot").quick_answer()
        >>> answer("/x?y"), answer("/a"), answer("/a/../x")
        (False, True, None)
        """
        return self._only_rules.quick_answer if self._only_rules else None

    def decider(self, origin: str = "") -> Callable[[str], int] | None:
        """Return a function from a path of the origin to the code of the deciding rule.

        Paths with the same code get the same verdict for the same reason. ROBOTS_FILE is the code
        of `/robots.txt`, which may always be fetched (RFC 9309 section 2.2.2, RFC-20). Return None
        if more than one reading decides.
        """
        if not self._single_reading:
            return None
        decide = self._readings[0].decide
        if isinstance(self._readings[0], PrefixesInOrder):  # R94-26 considers the origin
            return partial(decide, origin=origin)
        return decide

    @property
    def _only_rules(self) -> LongestMatch | None:
        """The only rule set, if it is one of RFC 9309; else None."""
        first = self._readings[0]
        return first if isinstance(first, LongestMatch) and len(self._readings) == 1 else None

    @property
    def _single_reading(self) -> bool:
        """Whether there is only one reading, so that no other can differ."""
        return len(self._readings) == 1 and not self._compared_readings

    def match(self, url: str) -> Match:
        """Return the verdict with the deciding rule and its line. Raises InvalidURL like
        `allowed`."""
        origin, path = split_url(url)
        return self.match_path(path, origin)

    def match_path(self, path: str, origin: str = "") -> Match:
        """Return the `match` for a path with its query and its origin, as from `urls.split`.

        If the origin is not known, a rule of the 1994 dialect that is a whole URL applies to any
        origin.
        """
        readings = self._readings
        code, by, conflict = readings[0].decide(path, origin), 0, False
        for place in range(1, len(readings)):
            other = readings[place].decide(path, origin)
            if (code ^ other) & 1:
                conflict = True
                if code & 1:  # the stricter one decides
                    code, by = other, place
        for reading in self._compared_readings:
            conflict = conflict or bool((code ^ reading.decide(path, origin)) & 1)
        rule = self._rule(by, code >> 1) if code >= 0 else None
        return parts.model.Match(code & 1 == 1, rule, self.dialect, conflict, path, self, origin)

    def match_of(self, code: int, path: str, origin: str) -> Match:
        """Return the `match_path` for a path to which `decider` gave this code."""
        rule = self._rule(0, code >> 1) if code >= 0 else None
        return parts.model.Match(code & 1 == 1, rule, self.dialect, False, path, self, origin)

    def candidates(self, path: str, origin: str = "") -> tuple[Candidate, ...]:
        """Return the rules that match the path, the deciding one first, with their lengths in
        octets.

        At most a thousand are returned; only a file constructed for that purpose has more.
        """
        text = self.robots.lines
        places = self._rule_offsets(text)
        readings = list(enumerate(self._readings))
        # The reading that decides comes first: with `strict` one that denies (DIA-03).
        readings.sort(key=lambda each: each[1].decide(path, origin) & 1)
        lengths: dict[int, tuple[int, bool]] = {}
        for place, reading in readings:
            v2 = reading.dialect is Dialect.V2
            rules = rules_in(text, reading.spans, v2=v2)
            for number, length in reading.matching(path, rules, origin):
                lengths.setdefault(places[place][number], (length, v2))
        chosen = list(islice(lengths.items(), _MAX_CANDIDATES))
        numbers = line_numbers(text, [offset for offset, _ in chosen])
        return tuple(
            parts.model.Candidate(rule.line, rule.field, rule.value, rule.text, length)
            for offset, (length, v2) in chosen
            for rule in (parts.model.rule_at(text, offset, numbers[offset], v2=v2),)
        )

    def _rule(self, place: int, number: int) -> Rule:
        text = self.robots.lines
        offset = self._rule_offsets(text)[place][number]
        v2 = self._readings[place].dialect is Dialect.V2
        return parts.model.rule_at(text, offset, text.count("\n", 0, offset) + 1, v2=v2)

    def _rule_offsets(self, text: str) -> list[array[int]]:
        """Return the offsets of the rules of each reading. The result is cached for large files."""
        offsets = self._cached_offsets
        if offsets is None:
            spans = [reading.spans for reading in self._readings]
            by_spans = {each: rule_offsets(text, each) for each in dict.fromkeys(spans)}
            offsets = [by_spans[each] for each in spans]
            if self.robots.size > _LARGE:
                self._cached_offsets = offsets
        return offsets

    @property
    def crawl_delay(self) -> float | None:
        """Seconds of Crawl-delay, the largest of several (VND-01), or None."""
        return self._directives().crawl_delay

    @property
    def request_rates(self) -> tuple[timing.RequestRate, ...]:
        """The valid Request-rates, in file order. Of more than 100 different ones only the slowest
        is left, for all hours."""
        return self._directives().request_rates

    @property
    def visit_times(self) -> tuple[timing.Window, ...]:
        """The windows in which visits are welcome; empty means at any time (the 2.0 draft, V2-24).
        Of more than 100 different ones the first 100 are left."""
        return self._directives().visit_times

    @property
    def timed(self) -> bool:
        """Whether a verdict depends on the time of day, because there is a Visit-time."""
        return bool(self._directives().visit_times)

    @property
    def comments(self) -> tuple[str, ...]:
        """Messages of the site to the operators of the robot (the 2.0 draft, V2-32)."""
        return self._directives().comments

    @property
    def content_signal(self) -> dict[str, str]:
        """The Content-Signal preferences of the rule set, and for keys that it does not have those
        of the lines before the first user-agent line, which concern the whole file (SIG-12)."""
        text, own = self.robots.lines, self._directives().signal
        end = next((start for start, _, _ in agent_lines(text.lower())), len(text))
        values = values_in(text, ((0, end),), "content-signal")["content-signal"]
        read = parts.signals.parse_content_signal
        return parts.signals.combine(map(read, values), "no") | own

    def content_usage(self, url: str) -> dict[str, str] | None:
        """Return the preferences of the longest matching Content-Usage (SIG-05), or None if the URL
        is denied.

        A missing category means that the preference is unknown. Labels that are not in the
        vocabulary are left out. Raises InvalidURL like `allowed`.
        """
        if not self.allowed(url):
            return None  # SIG-06
        if self._usage is None:
            self._usage = UsageRules(self._directives().usage)
        return self._usage.of(split_url(url)[1])

    def may_visit(self, at: datetime) -> bool:
        """Return True if a visit is welcome at that moment. Raises ValueError for a naive
        datetime."""
        return parts.timing.may_visit(self.visit_times, at)

    def next_visit(self, at: datetime) -> datetime:
        """Return the first moment from `at` on at which a visit is welcome, in UTC.

        Raises ValueError for a naive datetime.
        """
        return parts.timing.next_visit(self.visit_times, at)

    @property
    def asks_steadily(self) -> bool:
        """Whether `interval` is the same at any moment and for any duration of the last
        retrieval."""
        return not self._directives().request_rates and not self._has_rule_of_thumb

    def interval(self, at: datetime, took: float | None = None) -> float | None:
        """Return the seconds between two requests that the text asks for at that moment, or None.

        `took` is the duration of the last retrieval in seconds. It matters only for a 2.0 rule set
        without a rate, for which the draft has a rule of thumb (V2-31).
        """
        directives, thumb = self._directives(), self._has_rule_of_thumb
        return parts.timing.effective_interval(
            directives.crawl_delay, directives.request_rates, rule_of_thumb=thumb, at=at, took=took
        )

    @property
    def _has_rule_of_thumb(self) -> bool:
        return self.dialect is Dialect.V2 or self.robots.forced is Dialect.V2

    def interval_source(self, at: datetime, took: float | None = None) -> str:
        """Describe the line that determines `interval`; empty if the text asks for no interval."""
        seconds, directives = self.interval(at, took), self._directives()
        if seconds is None:
            return ""
        rate = parts.timing.rate_in_force(directives.request_rates, at)
        if seconds != directives.crawl_delay and rate is None:
            return parts.timing.by_rule_of_thumb(seconds)
        text = self.robots.lines
        if rate is None or seconds == directives.crawl_delay:
            return parts.timing.by_crawl_delay(text, self._spans_of("crawl-delay"), seconds)
        return parts.timing.by_request_rate(text, self._spans_of("request-rate"), rate)

    def _directives(self) -> parts.timing.Directives:
        directives = self._cached_directives
        if directives is None:
            values: dict[str, list[str]] = {}
            text = self.robots.lines
            whole = in_pieces(text, ((0, len(text)),))
            if any(_DIRECTIVE.search(text, low, high) for low, high in whole):
                for found in self._field_values(*parts.timing.FIELDS):
                    values |= {field: values.get(field) or each for field, each in found.items()}
            read = parts.timing.read_directives
            directives = read(values) if values else parts.timing.NO_DIRECTIVES
            self._cached_directives = directives
        return directives

    def _field_values(self, *fields: str) -> Iterator[dict[str, list[str]]]:
        """Yield the values of the fields in each of the spans that may have them.

        The first that has a field applies. The Crawl-delay of `*` comes last, if agents without one
        inherit it (VND-09).
        """
        text = self.robots.lines
        for reading in self._readings:
            yield values_in(text, reading.spans, *fields)
        if self.inherit_crawl_delay and "crawl-delay" in fields:
            yield values_in(text, choose(self.robots, "*")[0].spans, "crawl-delay")

    def _spans_of(self, field: str) -> Spans:
        """Return the first spans that have the field; see `_field_values`."""
        text, readings = self.robots.lines, [reading.spans for reading in self._readings]
        if self.inherit_crawl_delay and field == "crawl-delay":
            readings.append(choose(self.robots, "*")[0].spans)
        return next((spans for spans in readings if any(lines_of(text, spans, field))), ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return Policy, self._key()

    def __repr__(self) -> str:
        return f"<Policy for {self.agent!r} by {self.dialect} of {self.robots!r}>"

    def _key(self) -> tuple[RobotsTxt, str, Conflicts, V2Semantics, bool]:
        return (
            self.robots,
            self.agent,
            self.conflicts,
            self.v2_semantics,
            self.inherit_crawl_delay,
        )


def _allowed(readings: tuple[RuleSet, ...], url: str) -> bool:
    """Implement `Policy.allowed` for anything but a single rule set of RFC 9309."""
    origin, path = split_url(url)
    return _allows(readings, path, origin)


def _allows(readings: tuple[RuleSet, ...], path: str, origin: str) -> bool:
    """Return True if all readings allow the path."""
    return all(reading.decide(path, origin) & 1 for reading in readings)
