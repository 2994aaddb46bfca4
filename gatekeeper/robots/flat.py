"""Rules of RFC 9309 as a few pieces of plain text: what answers for an origin at rest.

A gate that holds hundreds of thousands of files can't keep an object a rule for each of them, nor
let the garbage collector walk over them. `FlatRules` are a few strings, made in one pass over the
rules that an agent obeys, and asked by searching these: most rules begin like no path that is asked
about, and most patterns need a piece that it does not hold. Sets for which that is not exact, or
would not be fast, have none.
"""

from __future__ import annotations

import re
from itertools import compress
from operator import not_
from typing import Final

import msgspec

from gatekeeper.robots.model import RULE, Rule, Spans, rule_at
from gatekeeper.robots.patterns import (
    PLAIN,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    wild_match,
)

__all__ = ["NO_RULE", "SENT", "FlatRules", "flat_rules", "rule_with"]

NO_RULE: Final = 1
"""The score of a path that no rule matches: it is allowed (RFC 9309 section 2.2.2, RFC-19)."""

_MAX_OCTETS: Final = 16_384
"""Octets of rules up to which searching them is fast: 99 files in a hundred hold no more."""
_FEW: Final = 16
"""Prefixes that begin alike up to which each is searched for."""
_MAX_PATTERNS: Final = 250
"""Patterns whose piece a path holds up to which each is compared."""
_MAX_PATH: Final = 2_048
"""Octets of a path up to which patterns are compared here."""
_WRITTEN: Final = PLAIN.encode() + b"*?$\n"
"""Octets that stand in rules in normal form as the file has them, but for an inner `$`."""
SENT: Final = PLAIN.encode() + b"?"
"""Octets that a path in its normal form has as they were sent."""
_INNER_DOLLAR: Final = re.compile(r"\$(?!\n)").search
_TWO_FORMS: Final = re.compile(r"\?[^\n]*%(?:3A|2F)").search
"""A rule that is compared in two forms (RFC 9309 section 2.2.2, RFC-25)."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set: their values in normal form, those of a kind in the order of the
    file."""

    denied: str
    """Disallow values without `*` and `$`, each between line feeds."""
    allowed: str
    """Allow values without."""
    patterns: str
    """Those that have one, line by line, behind a `-`, or a `+` for Allow."""
    pieces: str
    """Of each pattern a piece that every path holds which it matches, line by line."""
    whole: int
    """The score of the rules that are a slash alone: they match every path."""
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
        return None if compared is None else self.score_of(compared)

    def score_of(self, compared: str) -> int | None:
        """`score` of a path in its normal form, as one is in which all octets are of `SENT`."""
        if len(compared) > _MAX_PATH:
            return None
        best, key = self.whole, "\n" + compared[:2]
        if len(key) > 2:
            if key in self.denied and (octets := _longest(self.denied, key, compared)):
                best = max(best, octets << 1)
            if key in self.allowed and (octets := _longest(self.allowed, key, compared)):
                best = max(best, octets << 1 | 1)
        if not self.patterns:
            return best
        pieces = self.pieces.split("\n")
        if True not in map(compared.__contains__, pieces):
            return best
        found = [*compress(self.patterns.split("\n"), map(compared.__contains__, pieces))]
        if len(found) > _MAX_PATTERNS:
            return None
        for rule in found:
            score = len(rule) - 1 << 1 | (rule[0] == "+")
            if score > best and rule[1] in "/*" and wild_match(squeeze(rule[1:]), compared):
                best = score
        return best

    def values(self, path: str, score: int) -> list[str]:
        """The values, in normal form, of the rules that give a path that score."""
        path, octets = self._compared(path) or "", score >> 1
        plain, mark = (self.allowed, "+") if score & 1 else (self.denied, "-")
        found = [
            rule[1:]
            for rule in self.patterns.split("\n")
            if len(rule) == octets + 1
            and rule[0] == mark
            and rule[1] in "/*"
            and wild_match(squeeze(rule[1:]), path)
        ]
        if octets <= len(path) and f"\n{path[:octets]}\n" in plain:
            found.append(path[:octets])
        return found

    def _compared(self, path: str) -> str | None:
        """The path as rules are compared with it; None: it can't be here."""
        if len(path) > _MAX_PATH:
            return None
        if not path.isascii() or path.encode().translate(None, SENT):
            path = rfc_path(path)
            if self.queries and query_form(path) != path:
                return None
        return path


def _longest(rules: str, key: str, path: str) -> int:
    """Octets of the longest of the rules that begin with `key` and that the path begins with."""
    best, place = 0, rules.find(key)
    for _ in range(_FEW):
        end = rules.index("\n", place + 1)
        if end - place - 1 > best and path.startswith(rules[place + 1 : end]):
            best = end - place - 1
        place = rules.find(key, end)
        if place < 0:
            return best
    return max(best, *[len(rule) for rule in rules[place:].split("\n") if path.startswith(rule)])


def flat_rules(text: str, spans: Spans, crawl_delay: float | None) -> FlatRules | None:
    """The rules of those spans in this form; None where they have to be asked otherwise."""
    found: list[tuple[str, str]] = []
    for low, high in spans:
        found += RULE.findall(text, low, high)
    if not found:
        return FlatRules("\n", "\n", "", "", NO_RULE, False, True, crawl_delay)
    forbids, values = zip(*found, strict=True)
    joined = "\n".join(values) + "\n"
    if len(joined) > _MAX_OCTETS:
        return None
    if " \n" in joined or "\t\n" in joined:
        values = tuple([value.rstrip(" \t") for value in values])
        joined = "\n".join(values) + "\n"
    as_written = True
    if joined.encode("latin-1").translate(None, _WRITTEN) or _INNER_DOLLAR(joined):
        normal = rfc_patterns(joined)
        if "?" in normal and _TWO_FORMS(normal):
            return None
        as_written = normal == joined
        joined, values = normal, tuple(normal.split("\n")[:-1])
    patterns, pieces, whole = "", "", NO_RULE
    if "*" in joined or "$" in joined:
        starred = ["*" in value or value[-1:] == "$" for value in values]
        odd = [*zip(compress(forbids, starred), compress(values, starred), strict=True)]
        patterns = "\n".join([("-" if dis else "+") + value for dis, value in odd])
        pieces = "\n".join([value.rstrip("*$").rpartition("*")[2] for _, value in odd])
        plain = [*map(not_, starred)]
        forbids, values = tuple(compress(forbids, plain)), tuple(compress(values, plain))
    if "" in forbids:
        allowed = "\n".join(["", *compress(values, map(not_, forbids)), ""])
        values = tuple(compress(values, forbids))
        if "\n/\n" in allowed:
            whole = max(whole, 3)
    else:
        allowed = "\n"
    if "/" in values:
        whole = max(whole, 2)
    denied = "\n".join(["", *values, ""])
    return FlatRules(
        denied, allowed, patterns, pieces, whole, "?" in joined, as_written, crawl_delay
    )


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
