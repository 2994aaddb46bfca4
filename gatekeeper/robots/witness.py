"""Which URL shows that a rule decides: found by search, or shown not to exist.

A pattern of RFC 9309 is read as a finite automaton over the characters of a path: between two
stars stands a literal piece, which is searched for from the left, and the leftmost find is always
good enough, so that one state (the piece, and how much of it was just read) tells all. A path that
rule R decides is one that R's automaton takes, while those of all rules that beat R do not. The
product of these automata is walked from the start in order of the length of the path; where the
walk ends without such a path, there is none.

The product of many patterns with stars can have very many states, so that the walk has a bound, and
"not found" is said apart from "there is none".
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gatekeeper.robots.model import Rule, rule_at
from gatekeeper.robots.parser import Dialect, Spans, line_numbers, octets, rule_offsets
from gatekeeper.robots.patterns import (
    PLAIN,
    ROBOTS_TXT,
    query_form,
    rfc_path,
    rfc_pattern,
    squeeze,
    wild_match,
)
from gatekeeper.robots.policy import choose
from gatekeeper.robots.rules import RuleSet, rules_in
from gatekeeper.urls import MAX_PATH

if TYPE_CHECKING:
    from gatekeeper.robots.policy import Policy

MAX_STEPS = 8_000_000
"""Steps of about a microsecond that one question about a file may take: some ten seconds, for a
file that was made for it."""
_MAX_SEARCH = 200_000
"""Steps of one search, so that one hard rule leaves room for the others."""
_TRIED = 10
"""Steps as which it counts to ask a policy about a path, beside one for every so many patterns."""
_TRIED_PATTERNS = 4


class Witness(msgspec.Struct, frozen=True):
    """A rule of a policy, and a URL that shows it at work."""

    rule: Rule
    """The Allow or Disallow line."""
    url: str | None
    """A path with its query that this very rule decides; None where there is none, or none was
    found."""
    never: bool
    """No URL at all is decided by this rule. False with a `url` of None: the search was given up,
    or the rule set is in another dialect than RFC 9309, where only likely paths are tried."""


class SearchGivenUp(Exception):
    """The walk took as many steps as it may; whether there is such a path is not known."""


class Budget:
    """Steps that several searches may take together."""

    __slots__ = ("left",)

    def __init__(self, steps: int | None = None) -> None:
        self.left: int = MAX_STEPS if steps is None else steps

    def spend(self, steps: int) -> None:
        """Take so many. Raises SearchGivenUp where nothing was left."""
        if self.left <= 0:
            raise SearchGivenUp
        self.left -= steps

    def take(self) -> Budget:
        """The share of one more search. Raises SearchGivenUp where nothing is left."""
        if self.left <= 0:
            raise SearchGivenUp
        return Budget(min(self.left, _MAX_SEARCH))


_DEAD, _TAKEN = -1, -2
"""States that nothing leaves: no path that goes on so matches; every such path does."""


class _Automaton:
    """One pattern in normal form. A state is a number: see `_starts`."""

    __slots__ = ("_anchored", "_borders", "_memory", "_pieces", "_starts", "initial", "least")

    def __init__(self, pattern: str) -> None:
        self._anchored = pattern.endswith("$")
        self._pieces = (pattern[:-1] if self._anchored else pattern).split("*")
        if len(self._pieces) > 1 and not self._pieces[-1]:
            self._anchored = False  # a star at the end takes whatever comes
        self._borders: dict[int, list[int]] = {}
        self._memory: dict[tuple[int, str], int] = {}
        self._starts = []
        """Of each piece the state in which none of it was read; one more for each octet read."""
        state = 0
        for piece in self._pieces:
            self._starts.append(state)
            state += len(piece) + 1
        self.least = sum(map(len, self._pieces))
        """Octets of the shortest path that matches."""
        self.initial = self._settled(0, 0)

    def _settled(self, place: int, read: int) -> int:
        """The state, with what needs no further octet done: a whole piece, an empty one."""
        pieces = self._pieces
        while read == len(pieces[place]):
            if place + 1 == len(pieces):
                if self._anchored:
                    break
                return _TAKEN
            place, read = place + 1, 0
        return self._starts[place] + read

    def ends(self, state: int) -> bool:
        """A path that ends in this state matches."""
        return state == _TAKEN or (
            self._anchored and state == self._starts[-1] + len(self._pieces[-1])
        )

    def step(self, state: int, text: str) -> int:
        """The state behind some more characters."""
        if state < 0:
            return state
        key = state, text
        known = self._memory.get(key)
        if known is None:
            known = state
            for char in text:
                known = self._next(known, char)
                if known < 0:
                    break
            self._memory[key] = known
        return known

    def _next(self, state: int, char: str) -> int:
        place = self._place(state)
        read = state - self._starts[place]
        piece = self._pieces[place]
        if not place:  # the first piece begins the path
            if read < len(piece) and piece[read] == char:
                return self._settled(0, read + 1)
            return _DEAD
        borders = self._borders.get(place)
        if borders is None:
            borders = self._borders[place] = _borders(piece)
        while read and (read == len(piece) or piece[read] != char):
            read = borders[read]
        if piece[read : read + 1] == char:
            read += 1
        return self._settled(place, read)

    def _place(self, state: int) -> int:
        return bisect_left(self._starts, state + 1) - 1

    def wanted(self, state: int) -> str:
        """The only characters that lead on from here; nothing where others may stand, too."""
        return "" if state < 0 or self._place(state) else self._pieces[0][state:]

    def missing(self, state: int) -> int:
        """Octets that have to come at least before a path matches."""
        if state < 0:
            return 0
        place = self._place(state)
        rest = sum(map(len, self._pieces[place:])) if place < len(self._pieces) else 0
        return rest - (state - self._starts[place])


def _borders(piece: str) -> list[int]:
    """For each octets read how many of them may begin the piece anew (Knuth, Morris, Pratt)."""
    borders = [0] * (len(piece) + 1)
    size = 0
    for end in range(1, len(piece)):
        while size and piece[end] != piece[size]:
            size = borders[size]
        if piece[end] == piece[size]:
            size += 1
        borders[end + 1] = size
    return borders


_RAW, _QUERY = 0, 1
"""A path in its normal form, and as `query_form` gives it."""

_RuleState = tuple[int, ...]


class RankedRule:
    """An effective rule of RFC 9309, its rank among the others, and its automata.

    A rule with a `?` has up to four: it matches as it stands or in the form of its query, and so
    does the path (`query_form`).
    """

    __slots__ = ("allow", "automata", "head", "least", "number", "pattern", "rank", "start")

    def __init__(self, number: int, allow: bool, pattern: str) -> None:
        self.number: int = number
        """Its place among the rules of its set."""
        self.allow: bool = allow
        self.pattern: str = pattern
        """Its value in normal form."""
        forms = [pattern]
        self.automata: list[tuple[_Automaton, int]]
        length = len(pattern)
        if "?" in pattern:
            form = query_form(pattern)
            length = len(form)
            forms = list(dict.fromkeys((pattern, form)))
        automata = [_Automaton(squeeze(each)) for each in forms]
        views = (_RAW, _QUERY) if "?" in pattern else (_RAW,)
        self.automata = [(each, view) for each in automata for view in views]
        self.rank: tuple[int, bool, int] = (length, allow, -number)
        """The longest, of these an Allow, of these the first decides (RFC 9309 section 2.2.2,
        RFC-17, RFC-18)."""
        literal = pattern.partition("*")[0]
        self.head: str = literal.removesuffix("$").partition("?")[0]
        """Octets that every matching path begins with."""
        self.least: int = min(each.least for each in automata)
        self.start: _RuleState = tuple(each.initial for each, _ in self.automata)

    def step(self, state: _RuleState, views: tuple[str, str]) -> _RuleState | None:
        """The state behind a token; None: no such path matches. `(_TAKEN,)`: all do."""
        after = []
        alive = False
        for (automaton, view), one in zip(self.automata, state, strict=True):
            new = automaton.step(one, views[view])
            if new == _TAKEN:
                return _ALL
            alive = alive or new != _DEAD
            after.append(new)
        return tuple(after) if alive else None

    def ends(self, state: _RuleState) -> bool:
        """A path that ends here matches."""
        if state == _ALL:
            return True
        return any(a.ends(one) for (a, _), one in zip(self.automata, state, strict=True))

    def missing(self, state: _RuleState) -> int:
        """Octets that have to come at least before a path matches."""
        if state == _ALL:
            return 0
        return min(
            a.missing(one) for (a, _), one in zip(self.automata, state, strict=True) if one != _DEAD
        )

    def wanted(self, state: _RuleState) -> str:
        """The only characters that lead on; nothing where there is a choice."""
        if len(state) > 1 or state == _ALL:
            return ""
        return self.automata[0][0].wanted(state[0])


_ALL: _RuleState = (_TAKEN,)
_ROBOTS_TXT = RankedRule(-1, True, ROBOTS_TXT + "$")
"""Beats every rule (RFC 9309 section 2.2.2, RFC-20)."""


class RuleTable:
    """The effective rules of one agent, to be asked which of them may meet which."""

    def __init__(self, rules: Iterable[RankedRule]) -> None:
        self.rules: tuple[RankedRule, ...] = tuple(rules)
        heads: dict[str, list[RankedRule]] = {}
        for rule in self.rules:
            heads.setdefault(rule.head, []).append(rule)
        self._heads = heads
        self._sorted = sorted(heads)
        wild = sum("*" in rule.pattern for rule in self.rules)
        self.asking: int = _TRIED + wild // _TRIED_PATTERNS
        """Steps as which asking the policy about a path counts."""

    def near(self, head: str) -> Iterator[RankedRule]:
        """Those that may match a path which begins with `head`."""
        for size in range(len(head)):
            yield from self._heads.get(head[:size], ())
        place = bisect_left(self._sorted, head)
        while place < len(self._sorted) and self._sorted[place].startswith(head):
            yield from self._heads[self._sorted[place]]
            place += 1

    def overrules(self, rule: RankedRule | None, head: str) -> bool:
        """Seen at once: a plain prefix of `head` beats the rule for every path that begins so."""
        least = 0 if rule is None else len(rule.pattern)
        for size in range(len(head), least, -1):
            for each in self._heads.get(head[:size], ()):
                if each.pattern == each.head and (rule is None or each.rank > rule.rank):
                    return True
        return False

    @property
    def meaning(self) -> frozenset[tuple[bool, str]]:
        """Rule sets of one meaning give one verdict for every URL."""
        return frozenset((rule.allow, rule.pattern) for rule in self.rules)


def ranked(number: int, allow: bool, value: str) -> RankedRule | None:
    """The rule by its value, as octets in a str; None where it has no effect."""
    if not value.startswith(("/", "*")):
        return None  # RFC 9309 section 2.2 (RFC-21), RFC-32
    return RankedRule(number, allow, rfc_pattern(value))


class _State(NamedTuple):
    """Where the walk stands: all that the path so far means for what may follow."""

    dots: int
    """How the last segment began: see `_next_dots`."""
    must: tuple[_RuleState, ...]
    rivals: tuple[tuple[int, _RuleState], ...]
    """Those that may still match, by their place."""


def find_path(parts: Sequence[tuple[RuleTable, RankedRule | None]], budget: Budget) -> str | None:
    """The shortest path that every part decides by its rule; None: there is none.

    Raises SearchGivenUp where that is not known when the budget is spent.
    """
    must = [rule for _, rule in parts if rule is not None]
    head = max((rule.head for rule in must), key=len, default="")
    if not all(head.startswith(rule.head) for rule in must):
        return None
    if max((rule.least for rule in must), default=0) > MAX_PATH:
        return None
    rivals = [_ROBOTS_TXT]
    for table, rule in parts:
        rivals += [each for each in table.near(head) if rule is None or each.rank > rule.rank]
    budget.spend(len(rivals) >> 2)  # looking at each counts, too: a file may hold 40,000
    if any(_covers(rival, rule) for rival in rivals for rule in must):
        return None
    share = budget.take()
    granted = share.left
    try:
        return _Walk(must, rivals, share).path()
    finally:
        budget.left -= granted - share.left


def _covers(wider: RankedRule, rule: RankedRule) -> bool:
    """Seen without a walk: whatever matches the one matches the other. False: it is not known.

    A star of the narrower pattern is a character like any other here, one that only a star of
    the wider one can take.
    """
    if wider.pattern == rule.pattern:
        return True
    if "?" in wider.pattern or "?" in rule.pattern:
        return False
    text = rule.pattern[:-1] if rule.pattern.endswith("$") else rule.pattern + "*"
    return wild_match(squeeze(wider.pattern), text)


class _Walk:
    """One walk through the product of automata, the shortest path first."""

    def __init__(self, must: list[RankedRule], rivals: list[RankedRule], budget: Budget) -> None:
        self._must = must
        self._rivals = rivals
        self._budget = budget
        self._tokens = _tokens([*must, *rivals])
        self._by_first: dict[str, list[tuple[str, str, str]]] = {}
        for token in self._tokens:
            self._by_first.setdefault(token[0][0], []).append(token)

    def path(self) -> str | None:
        """The path. Raises SearchGivenUp."""
        if any(rival.start == _ALL for rival in self._rivals):
            return None
        first = _State(
            _START,
            tuple(rule.start for rule in self._must),
            tuple((place, rival.start) for place, rival in enumerate(self._rivals)),
        )
        order = count()
        seen = {first}
        # By the least length that the whole path can have; `order` keeps states uncompared.
        heap = [(self._missing(first), next(order), "", first)]
        while heap:
            _, _, path, state = heapq.heappop(heap)
            if path and self._found(state):
                return path
            for token in self._leading(state):
                after = self._after(state, token)
                if after is None or after in seen:
                    continue
                longer = path + token[0]
                if len(longer) > MAX_PATH:
                    continue
                seen.add(after)
                least = len(longer) + self._missing(after)
                heapq.heappush(heap, (least, next(order), longer, after))
        return None

    def _missing(self, state: _State) -> int:
        return max(
            (rule.missing(one) for rule, one in zip(self._must, state.must, strict=True)),
            default=0,
        )

    def _found(self, state: _State) -> bool:
        return (
            state.dots not in _DOTS
            and all(rule.ends(one) for rule, one in zip(self._must, state.must, strict=True))
            and not any(self._rivals[place].ends(one) for place, one in state.rivals)
        )

    def _leading(self, state: _State) -> list[tuple[str, str, str]]:
        """The tokens that may lead on."""
        if state.dots == _START:
            return self._by_first["/"]
        for rule, one in zip(self._must, state.must, strict=True):
            if wanted := rule.wanted(one):
                found = self._by_first.get(wanted[0], [])
                return [token for token in found if wanted.startswith(token[0])]
        return self._tokens

    def _after(self, state: _State, token: tuple[str, str, str]) -> _State | None:
        raw, form, _ = token
        dots = _next_dots(state.dots, raw)
        if dots < 0:
            return None
        views = (raw, form if state.dots == _IN_QUERY else raw)
        self._budget.left -= 1 + len(state.must) + len(state.rivals)
        if self._budget.left < 0:
            raise SearchGivenUp
        must = []
        for rule, one in zip(self._must, state.must, strict=True):
            new = one if one == _ALL else rule.step(one, views)
            if new is None:
                return None
            must.append(new)
        rivals = []
        for place, one in state.rivals:
            new = self._rivals[place].step(one, views)
            if new == _ALL:
                return None  # whatever comes, a better rule matches
            if new is not None:
                rivals.append((place, new))
        return _State(dots, tuple(must), tuple(rivals))


# Dot segments are resolved before a rule is asked (RFC 3986 section 5.2.4): no path has any.
_START, _SLASH, _ONE_DOT, _TWO_DOTS, _WITHIN, _IN_QUERY = range(6)
_DOTS = frozenset({_ONE_DOT, _TWO_DOTS})


def _next_dots(dots: int, octet: str) -> int:
    """How the last segment begins behind one more token; -1 where no URL has such a path."""
    if dots == _IN_QUERY:
        return _IN_QUERY
    if octet in {"/", "?"}:
        if dots in _DOTS or (dots == _START and octet != "/"):
            return -1
        return _SLASH if octet == "/" else _IN_QUERY
    if octet == ".":
        return {_SLASH: _ONE_DOT, _ONE_DOT: _TWO_DOTS}.get(dots, _WITHIN)
    return _WITHIN


_SINGLE = [char for char in PLAIN + "?" if rfc_path(char) == char]
"""The characters that stand for themselves in a path's normal form."""
_ESCAPED = [f"%{octet:02X}" for octet in range(256) if rfc_path(f"%{octet:02X}") == f"%{octet:02X}"]
_OTHER = "xzqkwvjybdfghlmnprstuaeioc_~0123456789-ABCDEFGHIJKLMNOPQRSTUVWXYZ!'(),;@+&=:"
"""Which character shall stand for all that no pattern names: the first that is free."""


def _tokens(rules: Sequence[RankedRule]) -> list[tuple[str, str, str]]:
    """The steps of a path: each as it is, as it is in a query's form, and what makes it special.

    Characters and escapes that no pattern can tell apart are the same step.
    """
    used = set().union(*(rule.pattern for rule in rules)) | set("/.?")
    forms = any(len(rule.automata) > 1 for rule in rules)
    other = next((char for char in _OTHER if char not in used), "")
    singles = [char for char in _SINGLE if char in used or char == other]
    found = [(char, char, char) for char in singles]
    # With a free character whatever an escape spells can be spelt, but for the two that equal
    # other characters in a query (RFC 9309 section 2.2.2, RFC-25).
    few = ["%2F", "%3A"] if forms else []
    escapes = _ESCAPED if "%" in used or not other else few
    signatures: dict[str, tuple[str, str, str]] = {}
    for escape in escapes:
        form = {"%3A": ":", "%2F": "/"}.get(escape, escape) if forms else escape
        told = "".join(char if char in used else "\x00" for char in escape)
        signature = told if form == escape else told + form
        signatures.setdefault(signature, (escape, form, signature))
    return found + list(signatures.values())


class Reading(NamedTuple):
    """A policy of RFC 9309 taken apart."""

    decide: Callable[[str], int]
    """The policy's word about a path: twice the number of the deciding rule, and one if it allows;
    -1 where no rule matches."""
    table: RuleTable
    lines: list[Rule]
    """The line of each rule by its number."""
    spans: Spans
    """Where the groups stand that the agent obeys: the same spans, the same rules."""

    @classmethod
    def of(cls, policy: Policy) -> Reading | None:
        """None where some of the rules are read by another dialect than RFC 9309."""
        readings = _readings(policy)
        if policy.conflicts == "declared":
            readings = readings[:1]
        if len(readings) > 1 or readings[0].dialect is not Dialect.RFC9309:
            return None
        text, spans = policy.robots.lines, readings[0].spans
        found = (ranked(i, not dis, value) for i, (dis, value) in enumerate(rules_in(text, spans)))
        table = RuleTable(rule for rule in found if rule is not None)
        decide = policy.decider()
        assert decide is not None  # noqa: S101 - there is one reading
        return cls(decide, table, _lines_of(text, spans), spans)

    def line_of(self, rule: RankedRule | None) -> Rule | None:
        """The line of the file."""
        return None if rule is None else self.lines[rule.number]

    def decides(self, path: str, rule: RankedRule | None) -> bool:
        """It is this rule, or for None no rule, that decides the path."""
        code = self.decide(path)
        return code == -1 if rule is None else code >= 0 and code >> 1 == rule.number


def _lines_of(text: str, spans: Spans) -> list[Rule]:
    offsets = rule_offsets(text, spans)
    numbers = line_numbers(text, offsets)
    return [rule_at(text, offset, numbers[offset]) for offset in offsets]


def decided_by(parts: Sequence[tuple[Reading, RankedRule | None]], budget: Budget) -> str | None:
    """A path that each reading decides by its rule (None: by none); None: there is no such path.

    Raises SearchGivenUp where that could not be found out within the budget.
    """
    rules = [rule for _, rule in parts if rule is not None]
    head = max((rule.head for rule in rules), key=len, default="")
    budget.spend(2 + (len(head) >> 8))
    if any(reading.table.overrules(rule, head) for reading, rule in parts):
        return None
    patterns = dict.fromkeys(rule.pattern for rule in rules)
    asking = sum(reading.table.asking for reading, _ in parts)
    for likely in chain.from_iterable(map(likely_paths, patterns)):
        budget.spend(asking + (len(likely) >> 4))
        if all(reading.decides(likely, its) for reading, its in parts):
            return likely
    path = find_path([(reading.table, rule) for reading, rule in parts], budget)
    if path is not None and not all(reading.decides(path, its) for reading, its in parts):
        raise SearchGivenUp  # what can't be judged in time is denied by no line
    return path


def witnesses(policy: Policy) -> tuple[Witness, ...]:
    """Of each rule that the policy's agent obeys, a URL that it decides, in file order.

    >>> from gatekeeper.robots import RobotsTxt
    >>> text = "User-agent: *\\nDisallow: /a\\nAllow: /*.html$\\nDisallow: /a*\\nDisallow: /abc"
    >>> [(w.rule.line, w.url, w.never) for w in witnesses(RobotsTxt.parse(text).policy("bot"))]
    [(2, None, True), (3, '/.html', False), (4, '/a', False), (5, '/abc', False)]
    """
    reading = Reading.of(policy)
    if reading is None:
        return tuple(_tried(policy, rule) for rule in _any_rules(policy))
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


def _readings(policy: Policy) -> tuple[RuleSet, ...]:
    precedence = policy.v2_semantics == "precedence"
    return choose(policy.robots, policy.agent.lower(), precedence=precedence)


def _any_rules(policy: Policy) -> list[Rule]:
    """The rules of every reading, in file order."""
    readings = _readings(policy)
    text = policy.robots.lines
    rules = {rule.line: rule for each in readings for rule in _lines_of(text, each.spans)}
    return [rules[line] for line in sorted(rules)]


def _tried(policy: Policy, rule: Rule) -> Witness:
    for path in likely_paths(octets(rule.value)):
        decided = policy.match_path(path).rule
        if decided is not None and decided.line == rule.line:
            return Witness(rule, path, False)
    return Witness(rule, None, False)


def likely_paths(value: str) -> Iterator[str]:
    """Paths that a rule may match, by its value or pattern, whatever its dialect.

    >>> list(likely_paths("/*.php$"))
    ['/.php', '/x.php', '/.phpx', '/x.phpx']
    """
    bare = value.removesuffix("$")
    tried = []
    for end in ("", "x"):
        for star in ("", "x") if "*" in bare else ("",):
            path = bare.replace("*", star) + end
            tried.append(path if path.startswith("/") else "/" + path)
    for path in dict.fromkeys(map(rfc_path, tried)):
        if len(path) <= MAX_PATH and not _DOT_SEGMENT(path.partition("?")[0]):
            yield path


_DOT_SEGMENT = re.compile(r"/\.\.?(?:/|\Z)").search
