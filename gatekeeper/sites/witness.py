"""Find a URL that a given rule decides, or prove that there is none.

A pattern of RFC 9309 is treated as a finite automaton over the characters of a path. Its state is
the set of places in the pattern up to which the path can be read so far. A path is decided by rule
R if the automaton of R accepts it and those of all rules that take precedence over R do not. The
product of these automata is searched from the start state in order of path length; if the search
ends without such a path, there is none.

The product of many patterns with stars can have a very large number of states. The search is
therefore bounded, and "not found" is distinguished from "does not exist".
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise, product
from typing import NamedTuple, TypeVar

import msgspec

from gatekeeper.robots.groups import agent_lines, names_of
from gatekeeper.robots.longest import LongestMatch
from gatekeeper.robots.model import Rule, rule_at
from gatekeeper.robots.parser import (
    Dialect,
    Spans,
    line_numbers,
    product_token,
    rule_starts,
    rules_in,
    to_octets,
)
from gatekeeper.robots.patterns import (
    PLAIN,
    ROBOTS_TXT,
    query_form,
    rfc_path,
    rfc_pattern,
    squeeze,
    wild_match,
)
from gatekeeper.robots.policy import Policy, RobotsTxt
from gatekeeper.urls import MAX_PATH

MAX_STEPS = 2_000_000
"""Maximum number of steps, of about a microsecond each, for one question about a file."""
MAX_SEARCH = 100_000
"""Maximum number of steps of one search, so that one hard rule leaves steps for the others."""
_QUERY_STEPS = 10
"""Steps counted for asking a policy about a path, in addition to one per `_PATTERNS_PER_STEP`
patterns."""
_PATTERNS_PER_STEP = 4


class Witness(msgspec.Struct, frozen=True):
    """A rule of a policy, and a URL that the rule decides."""

    rule: Rule
    """The Allow or Disallow line."""
    url: str | None
    """A path with its query that this rule decides; None if there is none, or none was found."""
    never: bool
    """Whether no URL is decided by this rule. If False and `url` is None, the search was given up,
    or the rule set has another dialect than RFC 9309, for which only likely paths are tried."""


class SearchGivenUp(Exception):
    """Raised when a search exceeds its steps; it is not known whether such a path exists."""


class Budget:
    """Steps that several searches share."""

    __slots__ = ("left", "search")

    def __init__(self, steps: int | None = None, *, share: int = 1) -> None:
        """`share`: each search may take this part of `MAX_SEARCH`. A file with many searches for
        pairs of lines should be compared within a second."""
        self.left: int = MAX_STEPS if steps is None else steps
        self.search: int = MAX_SEARCH // share
        """Maximum number of steps of a single search."""

    def spend(self, steps: int) -> None:
        """Subtract the steps. Raises SearchGivenUp if none were left."""
        if self.left <= 0:
            raise SearchGivenUp
        self.left -= steps


class _Automaton:
    """The automaton of one pattern in normal form.

    A state is the set of places in the pattern up to which the path so far can be read, one bit
    each; 0: no continuation of the path matches. Once a star was reached, the places before it are
    left out, since the star matches whatever they would.
    """

    __slots__ = ("_anchored", "_places", "_stars", "_text", "always", "initial")

    def __init__(self, pattern: str) -> None:
        self._anchored = pattern.endswith("$")
        self._text = text = squeeze(pattern[:-1] if self._anchored else pattern + "*")
        self._places: dict[str, int] = {}
        """For each character the places before which it stands."""
        self._stars = self._before("*") if "*" in text else 0
        self.always: int = 3 << len(text) - 1 if text.endswith("*") else -1
        """The state in which every continuation of the path matches; -1: there is none."""
        self.initial: int = self._closed(1)

    def _before(self, char: str) -> int:
        places = self._places.get(char)
        if places is None:
            bits = "".join("1" if each == char else "0" for each in reversed(self._text))
            places = self._places[char] = int(bits or "0", 2)
        return places

    def _closed(self, state: int) -> int:
        """Add the places behind stars, and leave out those before the last star."""
        stars = state & self._stars
        last_star = max(0, stars.bit_length() - 1)
        return (state | stars << 1) >> last_star << last_star

    def ends(self, state: int) -> bool:
        """Return True if a path that ends in this state matches."""
        return bool(state >> len(self._text))

    def step(self, state: int, token: str) -> int:
        """Return the state after some more characters."""
        for char in token:
            state = self._closed((state & self._before(char)) << 1 | (state & self._stars))
        return state

    def rest(self, state: int) -> tuple[str, bool]:
        """Return a pattern of which every match, after this state, is one of the whole pattern; and
        whether there are no others: within a piece after a star there are."""
        place = (state & -state).bit_length() - 1
        rest = self._text[place:] + ("$" if self._anchored else "")
        return rest, state == self._closed(1 << place)

    def forced(self, state: int) -> str:
        """Return the only possible continuation from here, or the empty string if there are
        others."""
        if state & self._stars:
            return ""
        return self._text[state.bit_length() - 1 :].partition("*")[0]

    def needed(self, state: int) -> int:
        """Return the minimum number of octets that have to follow before a path matches."""
        place = state.bit_length() - 1
        return len(self._text) - place - self._text.count("*", place)


_RAW, _QUERY = 0, 1
"""Views of a path: in normal form, and as returned by `query_form`."""

_RuleState = tuple[int, ...]
_CHANGED_IN_QUERY = re.compile("[*?].*[:/%]").search
"""Finds what `query_form` may change, in the pattern or in a path that it matches."""


class RankedRule:
    """An effective rule of RFC 9309 with its rank and its automata.

    A rule with a `?` has up to four automata, because rule and path may each be compared in normal
    form or in the form of `query_form`.
    """

    def __init__(self, number: int, allow: bool, pattern: str) -> None:
        self.number: int = number
        """Index among the rules of the set."""
        self.allow: bool = allow
        self.pattern: str = pattern
        """Value in normal form."""
        form = query_form(pattern)
        automata = [_Automaton(each) for each in dict.fromkeys((pattern, form))]
        views = (_RAW, _QUERY) if "?" in pattern else (_RAW,)
        self.automata: list[tuple[_Automaton, int]] = list(product(automata, views))
        self.outline: _Automaton | None = automata[0]
        """Matches, as paths are sent, every path that the rule matches; None if none is known."""
        if "?" in pattern and _CHANGED_IN_QUERY(pattern):
            before = pattern.partition("?")[0]
            self.outline = None if _CHANGED_IN_QUERY(before) else _Automaton(before)
        self.rank: tuple[int, bool, int] = (len(form), allow, -number)
        """The longest rule decides, of equally long ones an Allow, and of these the first (RFC 9309
        section 2.2.2, RFC-17, RFC-18)."""
        literal = pattern.partition("*")[0]
        self.head: str = literal.removesuffix("$").partition("?")[0]
        """Octets with which every matching path begins."""
        self.min_length: int = min(each.needed(each.initial) for each in automata)
        self.start: _RuleState = tuple(each.initial for each, _ in self.automata)
        if automata[0].initial == automata[0].always:
            self.start = _ALWAYS

    def step(self, state: _RuleState, views: tuple[str, str]) -> _RuleState | None:
        """Return the state after a token; None if no such path matches, `_ALWAYS` if all of them
        match."""
        after = []
        for (automaton, view), one in zip(self.automata, state, strict=True):
            new = automaton.step(one, views[view])
            if new == automaton.always:
                return _ALWAYS
            after.append(new)
        return tuple(after) if any(after) else None

    def ends(self, state: _RuleState) -> bool:
        """Return True if a path that ends in this state matches."""
        if state == _ALWAYS:
            return True
        return any(a.ends(one) for (a, _), one in zip(self.automata, state, strict=True))

    def needed(self, state: _RuleState) -> int:
        """Return the minimum number of octets that have to follow before a path matches."""
        if state == _ALWAYS:
            return 0
        return min(a.needed(one) for (a, _), one in zip(self.automata, state, strict=True) if one)

    def forced(self, state: _RuleState) -> str:
        """Return the only possible continuation, or the empty string if there are several."""
        if len(state) > 1 or state == _ALWAYS:
            return ""
        return self.automata[0][0].forced(state[0])


_ALWAYS: _RuleState = (-1,)
_ROBOTS_TXT = RankedRule(-1, True, ROBOTS_TXT + "$")
"""The built-in rule that takes precedence over all others (RFC 9309 section 2.2.2, RFC-20)."""


class RuleTable:
    """The effective rules of one agent, indexed to find rules that can match the same path."""

    def __init__(self, rules: Iterable[RankedRule]) -> None:
        self.rules: tuple[RankedRule, ...] = tuple(rules)
        heads: dict[str, list[RankedRule]] = {}
        for rule in self.rules:
            heads.setdefault(rule.head, []).append(rule)
        self._heads = heads
        self._sorted = sorted(heads)
        wild = sum("*" in rule.pattern for rule in self.rules)
        self.query_steps: int = _QUERY_STEPS + wild // _PATTERNS_PER_STEP
        """Steps counted for asking the policy about a path."""

    def candidates(self, head: str) -> Iterator[RankedRule]:
        """Yield the rules that may match a path which begins with `head`."""
        for size in range(len(head)):
            yield from self._heads.get(head[:size], ())
        place = bisect_left(self._sorted, head)
        while place < len(self._sorted) and self._sorted[place].startswith(head):
            yield from self._heads[self._sorted[place]]
            place += 1

    def overrules(self, rule: RankedRule | None, head: str) -> bool:
        """Return True if a plain prefix of `head` takes precedence over the rule for every path
        with that beginning."""
        min_length = 0 if rule is None else len(rule.pattern)
        for size in range(len(head), min_length, -1):
            for each in self._heads.get(head[:size], ()):
                if each.pattern == each.head and (rule is None or each.rank > rule.rank):
                    return True
        return False

    @property
    def meaning(self) -> frozenset[tuple[bool, str]]:
        """Rule sets with the same meaning give the same verdict for every URL."""
        return frozenset((rule.allow, rule.pattern) for rule in self.rules)


def ranked(number: int, allow: bool, value: str) -> RankedRule | None:
    """Build a rule from its value (octets in a str), or return None if it has no effect."""
    if not value.startswith(("/", "*")):
        return None  # RFC 9309 section 2.2 (RFC-21), RFC-32
    return RankedRule(number, allow, rfc_pattern(value))


class _State(NamedTuple):
    """A state of the search: everything about the path so far that matters for its continuation."""

    dots: int
    """How the last segment begins: see `_next_dots`."""
    must: tuple[_RuleState, ...]
    rivals: tuple[tuple[int, _RuleState], ...]
    """Index and state of the rivals that may still match."""


def find_path(parts: Sequence[tuple[RuleTable, RankedRule | None]], budget: Budget) -> str | None:
    """Return the shortest path that every part decides by its rule, or None if there is none.

    Raises SearchGivenUp if the budget is exceeded before the answer is known.
    """
    must = [rule for _, rule in parts if rule is not None]
    head = max((rule.head for rule in must), key=len, default="")
    if not all(head.startswith(rule.head) for rule in must):
        return None
    if max((rule.min_length for rule in must), default=0) > MAX_PATH:
        return None
    rivals = [_ROBOTS_TXT]
    for table, rule in parts:
        rivals += [each for each in table.candidates(head) if rule is None or each.rank > rule.rank]
    budget.spend(len(rivals) >> 2)  # looking at each is counted, too: a file may have 40,000
    if _ends_differ(must) or any(_covers(rival, rule, head) for rival in rivals for rule in must):
        return None
    return _Walk(must, rivals, budget).path()


def _ends_differ(rules: Sequence[RankedRule]) -> bool:
    """Return True if no path can end as each of the patterns with a final `$` demands."""
    patterns = [r.pattern for r in rules if r.pattern.endswith("$") and "?" not in r.pattern]
    ends = sorted((pattern[:-1].rpartition("*")[2] for pattern in patterns), key=len)
    return not all(ends[-1].endswith(end) for end in ends)


def _covers(wider: RankedRule, rule: RankedRule, head: str) -> bool:
    """Return True if every path with this beginning that matches `rule` also matches `wider`, as
    far as is visible without a search.

    False means that it is not known. A star of the narrower pattern is treated as an ordinary
    character, which only a star of the wider one can match.
    """
    if wider.pattern == rule.pattern:
        return True
    outer, inner = wider.automata[0][0], rule.outline
    if inner is None:
        return False
    for begin in ("", head):
        after, state = outer.step(outer.initial, begin), inner.step(inner.initial, begin)
        if after == outer.always:
            return True
        if after and state:
            text, exact = inner.rest(state)
            text = text.removesuffix("$")
            other = outer.rest(after)[0]
            # `wild_match` takes a `/` at the beginning for granted.
            if exact and text.startswith(other[:1].strip("*")) and wild_match(other, text):
                return True
    return False


class _Walk:
    """A search through the product of automata, the shortest path first."""

    def __init__(self, must: list[RankedRule], rivals: list[RankedRule], budget: Budget) -> None:
        self._must = must
        self._rivals = rivals
        self._budget = budget
        self._stop = max(0, budget.left - budget.search)
        """Steps of the budget that this search leaves."""
        self._tokens = _tokens([*must, *rivals])
        self._by_first: dict[str, list[tuple[str, str, str]]] = {}
        for token in self._tokens:
            self._by_first.setdefault(token[0][0], []).append(token)

    def path(self) -> str | None:
        """Return the path, or None if there is none. Raises SearchGivenUp."""
        if any(rival.start == _ALWAYS for rival in self._rivals):
            return None
        first = _State(
            _START,
            tuple(rule.start for rule in self._must),
            tuple((place, rival.start) for place, rival in enumerate(self._rivals)),
        )
        order = count()
        seen = {first}
        # Ordered by the minimum length of the whole path; `order` avoids comparing states.
        heap = [(self._needed(first), next(order), "", first)]
        while heap:
            _, _, path, state = heapq.heappop(heap)
            if path and self._is_found(state):
                return path
            for token in self._next_tokens(state):
                after = self._state_after(state, token)
                if after is None or after in seen:
                    continue
                longer = path + token[0]
                if len(longer) > MAX_PATH:
                    continue
                seen.add(after)
                min_length = len(longer) + self._needed(after)
                heapq.heappush(heap, (min_length, next(order), longer, after))
        return None

    def _needed(self, state: _State) -> int:
        return max(
            (rule.needed(one) for rule, one in zip(self._must, state.must, strict=True)), default=0
        )

    def _is_found(self, state: _State) -> bool:
        return (
            state.dots not in _DOTS
            and all(rule.ends(one) for rule, one in zip(self._must, state.must, strict=True))
            and not any(self._rivals[place].ends(one) for place, one in state.rivals)
        )

    def _next_tokens(self, state: _State) -> list[tuple[str, str, str]]:
        """Return the tokens that may follow."""
        if state.dots == _START:
            return self._by_first["/"]
        for rule, one in zip(self._must, state.must, strict=True):
            if forced := rule.forced(one):
                found = self._by_first.get(forced[0], [])
                return [token for token in found if forced.startswith(token[0])]
        return self._tokens

    def _state_after(self, state: _State, token: tuple[str, str, str]) -> _State | None:
        raw, form, _ = token
        dots = _next_dots(state.dots, raw)
        if dots < 0:
            return None
        views = (raw, form if state.dots == _IN_QUERY else raw)
        self._budget.left -= 1 + len(state.must) + len(state.rivals)
        if self._budget.left < self._stop:
            raise SearchGivenUp
        must = []
        for rule, one in zip(self._must, state.must, strict=True):
            new = one if one == _ALWAYS else rule.step(one, views)
            if new is None:
                return None
            must.append(new)
        rivals = []
        for place, one in state.rivals:
            new = self._rivals[place].step(one, views)
            if new == _ALWAYS:
                return None  # a rule with precedence matches every continuation
            if new is not None:
                rivals.append((place, new))
        return _State(dots, tuple(must), tuple(rivals))


# Dot segments are resolved before paths are compared with rules (RFC 3986 section 5.2.4), so no
# path contains any.
_START, _SLASH, _ONE_DOT, _TWO_DOTS, _WITHIN, _IN_QUERY = range(6)
_DOTS = frozenset({_ONE_DOT, _TWO_DOTS})


def _next_dots(dots: int, octet: str) -> int:
    """Return how the last segment begins after one more token, or -1 if no URL has such a path."""
    if dots == _IN_QUERY:
        return _IN_QUERY
    if octet in {"/", "?"}:
        if dots in _DOTS or (dots == _START and octet != "/"):
            return -1
        return _SLASH if octet == "/" else _IN_QUERY
    if octet == ".":
        return {_SLASH: _ONE_DOT, _ONE_DOT: _TWO_DOTS}.get(dots, _WITHIN)
    return _WITHIN


SINGLE = [char for char in PLAIN + "?" if rfc_path(char) == char]
"""Characters that stand for themselves in the normal form of a path."""
ESCAPED = [f"%{octet:02X}" for octet in range(256) if rfc_path(f"%{octet:02X}") == f"%{octet:02X}"]
_OTHER = "xzqkwvjybdfghlmnprstuaeioc_~0123456789-ABCDEFGHIJKLMNOPQRSTUVWXYZ!'(),;@+&=:"
"""Candidates, in order of preference, for the character that represents all that no pattern
contains."""


def _tokens(rules: Sequence[RankedRule]) -> list[tuple[str, str, str]]:
    """Return the steps of a path: the token, its form in a query, and its signature.

    Characters and escapes that no pattern can distinguish are represented by one token.
    """
    used = set().union(*(rule.pattern for rule in rules)) | set("/.?")
    forms = any(len(rule.automata) > 1 for rule in rules)
    other = next((char for char in _OTHER if char not in used), "")
    singles = [char for char in SINGLE if char in used or char == other]
    found = [(char, char, char) for char in singles]
    # If a character is free, it can represent every escape except the two that equal other
    # characters in a query (RFC 9309 section 2.2.2, RFC-25).
    few = ["%2F", "%3A"] if forms else []
    escapes = ESCAPED if "%" in used or not other else few
    signatures: dict[str, tuple[str, str, str]] = {}
    for escape in escapes:
        form = {"%3A": ":", "%2F": "/"}.get(escape, escape) if forms else escape
        visible = "".join(char if char in used else "\x00" for char in escape)
        signature = visible if form == escape else visible + form
        signatures.setdefault(signature, (escape, form, signature))
    return found + list(signatures.values())


class Reading(NamedTuple):
    """The parts of a policy of RFC 9309."""

    decide: Callable[[str], int]
    """Returns the policy's code for a path: twice the number of the deciding rule, plus one if it
    allows; -1 if no rule matches."""
    table: RuleTable
    lines: list[Rule]
    """The line of each rule, by its number."""
    spans: Spans
    """Spans of the groups that the agent obeys; equal spans contain equal rules."""

    @classmethod
    def by(cls, text: str, spans: Spans) -> Reading:
        """Create the reading of the groups at these places of the text."""
        rules: dict[tuple[bool, str], RankedRule] = {}
        for i, (dis, value) in enumerate(rules_in(text, spans)):
            if (rule := ranked(i, not dis, value)) is not None:
                rules.setdefault((rule.allow, rule.pattern), rule)  # a repeated rule never decides
        table = RuleTable(rules.values())
        return cls(LongestMatch(text, spans).decide, table, _lines_of(text, spans), spans)

    def line_of(self, rule: RankedRule | None) -> Rule | None:
        """Return the line of a rule."""
        return None if rule is None else self.lines[rule.number]

    def decides(self, path: str, rule: RankedRule | None) -> bool:
        """Return True if this rule decides the path; for None, if no rule does."""
        code = self.decide(path)
        return code == -1 if rule is None else code >= 0 and code >> 1 == rule.number


class Readings:
    """The readings of a text, by agent. Agents that obey the same groups share one, and the text is
    searched for groups once, not for each agent."""

    def __init__(self, robots: RobotsTxt) -> None:
        self._robots = robots
        self._by_spans: dict[Spans, Reading] = {}
        self._groups: dict[str, Spans] | None = None
        lower, forced = robots.lines.lower(), robots.forced
        if forced is Dialect.RFC9309 or (forced is None and "robot-version" not in lower):
            self._groups = _groups_by_name(lower)

    def of(self, agent: str) -> Reading | None:
        """Return the rules for an agent, or None if another dialect than RFC 9309 is involved."""
        if self._groups is None:
            found = self._robots.policy(agent).plain
            if found is None:
                return None
            spans = found.spans
        else:
            name = to_octets(product_token(agent)).lower()
            spans = self._groups.get(name) or self._groups.get("*", ())
        if spans not in self._by_spans:
            self._by_spans[spans] = Reading.by(self._robots.lines, spans)
        return self._by_spans[spans]


def _groups_by_name(lower: str) -> dict[str, Spans]:
    """Return for each name in a lower-case text what `groups_named` finds for it."""
    lines = list(agent_lines(lower))
    starts = [start for start, begins, _ in lines if begins]
    spans = iter(pairwise([*starts, len(lower)]))
    found: dict[str, list[tuple[int, int]]] = {}
    span = (0, 0)
    for _, begins, value in lines:
        span = next(spans) if begins else span
        for name in names_of(value):
            groups = found.setdefault(name, [])
            if span not in groups[-1:]:
                groups.append(span)
    return {name: tuple(groups) for name, groups in found.items()}


def _lines_of(text: str, spans: Spans) -> list[Rule]:
    offsets = [*rule_starts(text, spans)]
    numbers = line_numbers(text, offsets)
    return [rule_at(text, offset, numbers[offset]) for offset in offsets]


Part = tuple[Reading, RankedRule | None]
"""A rule of a reading; None stands for no rule."""


def likely_decided_by(parts: Sequence[Part], budget: Budget) -> tuple[bool, str | None]:
    """Return whether the answer of `decided_by` is visible without a search, and the answer.

    Raises SearchGivenUp if no steps are left.
    """
    rules = [rule for _, rule in parts if rule is not None]
    head = max((rule.head for rule in rules), key=len, default="")
    budget.spend(2 + (len(head) >> 8))
    if any(reading.table.overrules(rule, head) for reading, rule in parts):
        return True, None
    patterns = list(dict.fromkeys(rule.pattern for rule in rules))
    query_steps = sum(reading.table.query_steps for reading, _ in parts)
    find = shared_paths if len(patterns) == 2 else likely_paths
    for path in find(*patterns or ("/",)):
        budget.spend(query_steps + (len(path) >> 4))
        if all(reading.decides(path, its) for reading, its in parts):
            return True, path
    return False, None


def decided_by(parts: Sequence[Part], budget: Budget) -> str | None:
    """Return a path that each reading decides by its rule (None: by no rule), or None if there is
    none.

    Raises SearchGivenUp if the budget is exceeded before the answer is known.
    """
    known, path = likely_decided_by(parts, budget)
    if known:
        return path
    path = find_path([(reading.table, rule) for reading, rule in parts], budget)
    if path is not None and not all(reading.decides(path, its) for reading, its in parts):
        raise SearchGivenUp  # the path exceeds the policy's own step limit
    return path


_Question = TypeVar("_Question")


def answers(
    questions: Iterable[tuple[_Question, Sequence[Part]]], budget: Budget
) -> Iterator[tuple[_Question, str | None, bool]]:
    """Yield each question to which `decided_by` has a path, or of which nothing is known (None).

    Likely paths are tried for all questions before the search for any. If the budget does not
    suffice for that, the third value is True: the questions after this one are not asked.
    """
    waiting: list[tuple[_Question, Sequence[Part]]] = []
    for question, parts in questions:
        try:
            known, path = likely_decided_by(parts, budget)
        except SearchGivenUp:
            yield question, None, True
            break
        if path is not None:
            yield question, path, False
        elif not known:
            waiting.append((question, parts))
    for question, parts in waiting:
        try:
            if (path := decided_by(parts, budget)) is not None:
                yield question, path, False
        except SearchGivenUp:
            yield question, None, False


def witnesses(policy: Policy) -> tuple[Witness, ...]:
    """Return for each rule that the policy's agent obeys a URL that it decides, in file order.

    >>> from gatekeeper.robots import RobotsTxt
    >>> text = "User-agent: *\\nDisallow: /a\\nAllow: /*.html$\\nDisallow: /a*\\nDisallow: /abc"
    >>> [(w.rule.line, w.url, w.never) for w in witnesses(RobotsTxt.parse(text).policy("bot"))]
    [(2, None, True), (3, '/.html', False), (4, '/a', False), (5, '/abc', False)]
    """
    reading = Readings(policy.robots).of(policy.agent)
    if reading is None:
        return tuple(_try_likely_paths(policy, rule) for rule in _any_rules(policy))
    effective = {rule.number: rule for rule in reading.table.rules}
    budget = Budget()
    found = []
    for number, line in enumerate(reading.lines):
        rule = effective.get(number)
        try:
            path = None if rule is None else decided_by([(reading, rule)], budget)
        except SearchGivenUp:
            found.append(Witness(line, None, False))
        else:
            found.append(Witness(line, path, path is None))
    return tuple(found)


def _any_rules(policy: Policy) -> list[Rule]:
    """Return the rules of every reading, in file order."""
    text = policy.robots.lines
    rules = {rule.line: rule for each in policy._compared for rule in _lines_of(text, each.spans)}
    return [rules[line] for line in sorted(rules)]


def _try_likely_paths(policy: Policy, rule: Rule) -> Witness:
    for path in likely_paths(to_octets(rule.value)):
        decided = policy.match_path(path).rule
        if decided is not None and decided.line == rule.line:
            return Witness(rule, path, False)
    return Witness(rule, None, False)


def likely_paths(value: str) -> Iterator[str]:
    """Yield paths that a rule may match in any dialect, derived from its value or pattern.

    >>> list(likely_paths("/*.php$"))
    ['/.php', '/x.php', '/.phpx', '/x.phpx']
    """
    bare = value.removesuffix("$")
    tried = []
    for end in ("", "x"):
        for star in ("", "x") if "*" in bare else ("",):
            path = bare.replace("*", star) + end
            tried.append(path if path.startswith("/") else "/" + path)
    yield from _paths(tried)


def shared_paths(one: str, other: str) -> Iterator[str]:
    """Yield paths that two patterns in normal form may both match: the longer beginning, and then
    the pieces of both.

    >>> list(shared_paths("/*?id=", "/shop/*.php$"))
    ['/shop/?id=.php', '/shop/x?id=x.php']
    """
    halves = [
        (pattern.removesuffix("$").split("*"), pattern[-1:] == "$") for pattern in (one, other)
    ]
    head = max((pieces[0] or "/" for pieces, _ in halves), key=len)
    tried = []
    for (pieces, ended), (last, _) in (halves, halves[::-1]):
        middle = pieces[1:]
        if ended and middle:
            if not last[-1].endswith(middle[-1]):
                continue  # what has to be at the end comes last
            middle = middle[:-1]
        whole = [head, *middle, *last[1:]]
        tried += ["".join(whole), "x".join(whole)]
    if not any(ended for _, ended in halves):
        tried += [path + "x" for path in tried]
    yield from _paths(tried)


def _paths(tried: Iterable[str]) -> Iterator[str]:
    """Yield the normal forms of what can be a path."""
    for path in dict.fromkeys(map(rfc_path, tried)):
        if len(path) <= MAX_PATH and not _DOT_SEGMENT(path.partition("?")[0]):
            yield path


_DOT_SEGMENT = re.compile(r"/\.\.?(?:/|\Z)").search
