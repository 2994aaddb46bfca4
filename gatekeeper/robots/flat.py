"""Rules of RFC 9309 as a few pieces of plain text: what answers for an origin at rest.

A gate that holds hundreds of thousands of files can't keep an object a rule for each of them, nor
let the garbage collector walk over them. `FlatRules` are a few strings, made in one pass over the
rules that an agent obeys, and asked by searching these: most rules begin like no path that is asked
about, and most patterns need a piece that it does not hold. Sets for which that is not exact, or
would not be fast, have none.
"""

from __future__ import annotations

from itertools import compress
from typing import Final

import msgspec

from gatekeeper.robots.model import Rule, rule_at
from gatekeeper.robots.parser import ALLOWED, DISALLOWED, RULE, Spans
from gatekeeper.robots.patterns import (
    PLAIN,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    wild_match,
)
from gatekeeper.speedups import lazy_pattern

__all__ = ["NO_RULE", "FlatRules", "flat_rules", "is_compared_as_sent", "rule_with"]

NO_RULE: Final = 1
"""The score of a path that no rule matches: it is allowed (RFC 9309 section 2.2.2, RFC-19)."""

_MAX_OCTETS: Final = 16_384
"""Octets of rules up to which searching them is fast: 99 files in a hundred hold no more."""
_FEW: Final = 16
"""Rules that begin alike up to which each is searched for."""
_MAX_KEY: Final = 8
"""Octets of a path by which rules are searched for."""
_MARKS: Final = "<>|"
_ALLOWS: Final = ">|"
_WILD: Final = "<|"
"""What stands behind a value that is no plain Disallow: no normal form has one of these."""
_MAX_PATTERNS: Final = 250
"""Patterns whose piece a path holds up to which each is compared."""
_MAX_PATH: Final = 2_048
"""Octets of a path up to which patterns are compared here."""
_WRITTEN: Final = PLAIN.encode() + b"*?$\n"
"""Octets that stand in rules in normal form as the file has them, but for an inner `$`."""
_SENT: Final = PLAIN.encode() + b"?"
"""Octets that a path in its normal form has as they were sent."""
_INNER_DOLLAR: Final = lazy_pattern(r"\$(?!\n)")
_TWO_FORMS: Final = lazy_pattern(r"\?[^\n]*%(?:3A|2F)")
"""A rule that is compared in two forms (RFC 9309 section 2.2.2, RFC-25)."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set: their values in normal form, the longest first, of two that are as long
    an Allow first. So the first that matches a path decides.

    They are few objects, since each that a question has to read is one that no processor cache
    holds where it is asked among hundreds of thousands.
    """

    rules: str
    """Those that begin with more than a slash: each between line feeds, a pattern or an Allow with
    its mark (`_ALLOWS`, `_WILD`) behind it."""
    patterns: str
    """The patterns that begin with a wildcard, or with one behind a slash: line by line, behind a
    `-`, or a `+` for Allow."""
    pieces: str
    """Of each of those a piece that every path holds which it matches, line by line."""
    whole: int
    """The score of the rules that are a slash alone: they match every path."""
    key: int
    """Octets without a wildcard that each of `rules` has at its beginning."""
    queries: bool
    """A rule has a `?`: a path with escapes in its query may have to be compared in two forms
    (RFC 9309 section 2.2.2, RFC-25)."""
    as_written: bool
    """Every value is what the file says."""
    crawl_delay: float | None = None
    """Seconds by Crawl-delay."""

    def score(self, path: str) -> int | None:
        """Twice the octets of the longest rule that matches a path, and one more if it allows
        (RFC 9309 section 2.2.2, RFC-17 and RFC-18), or NO_RULE. None: ask the policy.

        The path is not `/robots.txt`, and begins with a slash.
        """
        compared = self._compared(path)
        return None if compared is None else self.score_as_sent(compared)

    def score_as_sent(self, path: str) -> int | None:
        """`score` of a path that `is_compared_as_sent`."""
        best, rules = self.whole, self.rules
        if len(path) > _MAX_PATH:
            return None
        if rules:
            key = "\n" + path[: self.key]
            place = rules.find(key)
            if place >= 0:
                found = _first(rules, key, place, path)
                if found is None:
                    return None
                best = found or best
        if not self.pieces:
            return best
        pieces = self.pieces.split("\n")
        if True not in map(path.__contains__, pieces):
            return best
        left = [*compress(self.patterns.split("\n"), map(path.__contains__, pieces))]
        if len(left) > _MAX_PATTERNS:
            return None
        for rule in left:
            score = len(rule) - 1 << 1 | (rule[0] == "+")
            if score <= best:
                break
            if wild_match(squeeze(rule[1:]), path):
                return score
        return best

    def values(self, path: str, score: int) -> list[str]:
        """The values, in normal form, of the rules that give a path that score."""
        path, octets, allow = self._compared(path) or "", score >> 1, score & 1
        found = ["/"] if score == self.whole else []
        found += [
            rule[1:]
            for rule in self.patterns.split("\n")
            if len(rule) == octets + 1
            and (rule[0] == "+") == allow
            and wild_match(squeeze(rule[1:]), path)
        ]
        rules, plain, wild = self.rules, ">" if allow else "", "|" if allow else "<"
        if octets <= len(path) and f"\n{path[:octets]}{plain}\n" in rules:
            found.append(path[:octets])
        if wild in rules:
            found += [
                rule[:-1]
                for rule in rules.split("\n")
                if len(rule) == octets + 1 and rule[-1] == wild and _matches(rule, path)
            ]
        return found

    def _compared(self, path: str) -> str | None:
        """The path as rules are compared with it; None: it can't be here."""
        if len(path) > _MAX_PATH:
            return None
        if not is_compared_as_sent(path):
            path = rfc_path(path)
            if self.queries and query_form(path) != path:
                return None
        return path


def is_compared_as_sent(path: str) -> bool:
    """The path is its normal form, by which it is compared with rules.

    >>> is_compared_as_sent("/a?b=c"), is_compared_as_sent("/%61"), is_compared_as_sent("/a*")
    (True, False, False)
    """
    return path.isascii() and not path.encode().translate(None, _SENT)


def _matches(rule: str, path: str) -> bool:
    """A line of `FlatRules.rules` matches the path."""
    if path.startswith(rule.rstrip(_MARKS)):
        return True
    return rule[-1] in _WILD and wild_match(squeeze(rule[:-1]), path)


def _score(rule: str) -> int:
    """That of a line of `FlatRules.rules`."""
    return len(rule.rstrip(_MARKS)) << 1 | (rule[-1:] in _ALLOWS)


def _first(rules: str, key: str, place: int, path: str) -> int | None:
    """The score of the first of the rules that matches a path, of those that begin with `key`, as
    the one at that place does; 0: none does. None: too many may."""
    for _ in range(_FEW):
        end = rules.index("\n", place + 1)
        rule = rules[place + 1 : end]
        if path.startswith(rule):
            return len(rule) << 1
        if rule[-1] in _MARKS and _matches(rule, path):
            return _score(rule)
        place = rules.find(key, end)
        if place < 0:
            return 0
    left = [rule for rule in rules[place + 1 :].split("\n") if rule.startswith(key[1:])]
    if sum(rule[-1] in _WILD for rule in left) > _MAX_PATTERNS:
        return None
    found = next((rule for rule in left if _matches(rule, path)), None)
    return 0 if found is None else _score(found)


def flat_rules(text: str, spans: Spans, crawl_delay: float | None) -> FlatRules | None:
    """The rules of those spans in this form; None where they have to be asked otherwise."""
    denied: list[str] = []
    allowed: list[str] = []
    for low, high in spans:
        denied += DISALLOWED.findall(text, low, high)
        allowed += ALLOWED.findall(text, low, high)
    joined = "\n".join(denied + allowed) + "\n"
    if "#" in joined or " \n" in joined or "\t\n" in joined:
        denied, allowed = _trimmed(denied), _trimmed(allowed)
        joined = "\n".join(denied + allowed) + "\n"
    if len(joined) > _MAX_OCTETS:
        return None
    as_written = True
    if joined.encode("latin-1").translate(None, _WRITTEN) or (
        "$" in joined and _INNER_DOLLAR.search(joined)
    ):
        normal = rfc_patterns(joined)
        if "?" in normal and _TWO_FORMS.search(normal):
            return None
        as_written = normal == joined
        joined, values = normal, normal.split("\n")
        denied, allowed = values[: len(denied)], values[len(denied) : -1]
    whole = 3 if "/" in allowed else 2 if "/" in denied else NO_RULE
    key, rules, patterns = _sorted_out(allowed, denied, wild="*" in joined or "$" in joined)
    # Every path has a slash.
    pieces = [rule[1:].rstrip("*$").rpartition("*")[2] or "/" for rule in patterns]
    odd = "\n".join(patterns), "\n".join(pieces)
    return FlatRules(rules, *odd, whole, key, "?" in joined, as_written, crawl_delay)


def _sorted_out(allowed: list[str], denied: list[str], *, wild: bool) -> tuple[int, str, list[str]]:
    """`FlatRules.key`, `rules`, and the lines of `patterns`. `wild`: some have a `*` or a `$`."""
    patterns: list[str] = []
    heads = [_MAX_KEY]
    odd: list[str] = []
    if wild:
        allowed = _plain_of(allowed, "+", "|", heads, odd, patterns)
        denied = _plain_of(denied, "-", "<", heads, odd, patterns)
        patterns.sort(key=len, reverse=True)
    # Of two lines that are as long the value without a mark is the longer one, and an Allow is a
    # line longer than a Disallow of its value. What is as long stays in this order.
    rules = [*denied, *[value + ">" for value in allowed], *odd]
    rules.sort(key=len, reverse=True)
    while rules:
        shortest = len(rules[-1]) - (rules[-1][-1:] in _MARKS)
        if shortest > 1:
            heads.append(shortest)
            break
        rules.pop()  # a slash alone, or nothing
    return min(heads), "\n".join(["", *rules, ""]) if rules else "", patterns


def _plain_of(
    values: list[str], sign: str, mark: str, heads: list[int], odd: list[str], patterns: list[str]
) -> list[str]:
    """Those that are no patterns. The others are added to one of the lists, and how long they are
    up to their first wildcard to `heads`."""
    wild = [value for value in values if "*" in value or value[-1:] == "$"]
    if not wild:
        return values
    for value in wild:
        fixed = value.find("*")
        if fixed < 0:
            fixed = len(value) - 1
        if fixed > 1:
            odd.append(value + mark)
            heads.append(fixed)
        elif value[0] in "/*":
            patterns.append(sign + value)
    left_out = {*wild}
    return [value for value in values if value not in left_out]


def _trimmed(values: list[str]) -> list[str]:
    """Without comments, and the blanks at their ends."""
    return [value.partition("#")[0].rstrip(" \t") for value in values]


def rule_with(value: str, text: str, spans: Spans, *, allow: bool) -> Rule | None:
    """The first rule of those spans with that value as written; None: there is none."""
    for low, high in spans:
        place = text.find(value, low, high)
        while place >= 0:
            start = text.rfind("\n", low, place)
            found = RULE.match(text, start, high) if start >= 0 else None
            if found and (not found[1]) is allow and found[2].rstrip(" \t") == value:
                return rule_at(text, start + 1, text.count("\n", 0, start + 1) + 1)
            end = text.find("\n", place, high)
            place = text.find(value, end, high) if end >= 0 else -1
    return None
