"""Rules of RFC 9309 as two pieces of plain text: what answers for an origin at rest.

A gate that holds hundreds of thousands of files can't keep an object a rule for each of them, nor
let the garbage collector walk over them. `FlatRules` are two strings, made in one pass over the
rules that an agent obeys, and asked by searching these: most rules begin like no path that is asked
about. Sets for which that is not exact, or would not be fast, have none.
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

__all__ = ["NO_RULE", "FlatRules", "flat_rules", "rule_with"]

NO_RULE: Final = 1
"""The score of a path that no rule matches: it is allowed (RFC 9309 section 2.2.2, RFC-19)."""

_MAX_OCTETS: Final = 16_384
"""Octets of rules up to which searching them is fast: 99 files in a hundred hold no more."""
_MAX_ALIKE: Final = 250
"""Rules that begin alike, or may match whatever a path begins with, up to which each is looked
at."""
_MAX_PATH: Final = 2_048
"""Octets of a path up to which patterns are compared here."""
_LOOSE: Final = ("\n*", "\n/*")
"""How rules begin that may match any path."""
_WRITTEN: Final = PLAIN.encode() + b"*?$\n"
"""Octets that stand in rules in normal form as the file has them, but for an inner `$`."""
_SENT: Final = PLAIN.encode() + b"?"
"""Octets that a path in its normal form has as they were sent."""
_INNER_DOLLAR: Final = re.compile(r"\$(?!\n)").search
_TWO_FORMS: Final = re.compile(r"\?[^\n]*%(?:3A|2F)").search
"""A rule that is compared in two forms (RFC 9309 section 2.2.2, RFC-25)."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set: their values in normal form, each between line feeds, in the order of
    the file."""

    denied: str
    """Disallow values."""
    allowed: str
    """Allow values."""
    whole: int
    """The score of the rules that are a slash alone: they match every path."""
    loose: bool
    """A rule begins with a star, or a slash and a star."""
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
        if compared is None:
            return None
        best = self.whole
        key = "\n" + (compared[:2] if compared != "/" else "/$")
        for begin in (key, *_LOOSE) if self.loose else (key,):
            if begin in self.denied:
                best = _best(self.denied, begin, compared, best, 0)
            if best and begin in self.allowed:
                best = _best(self.allowed, begin, compared, best, 1)
        return best or None

    def value(self, path: str, score: int) -> str | None:
        """The value, in normal form, of the rule that gives a path that score: of several the first
        in the file. None: ask the policy."""
        path, octets = self._compared(path) or "", score >> 1
        for value in (self.allowed if score & 1 else self.denied).split("\n"):
            if len(value) == octets and _matches(value, path):
                return value
        return None

    def _compared(self, path: str) -> str | None:
        """The path as rules are compared with it; None: it can't be here."""
        if len(path) > _MAX_PATH:
            return None
        if not path.isascii() or path.encode().translate(None, _SENT):
            path = rfc_path(path)
            if self.queries and query_form(path) != path:
                return None
        return path


def _best(rules: str, key: str, path: str, best: int, allow: int) -> int:
    """The best score of the rules that begin with `key`, if that is more than `best`; 0 where they
    are many."""
    place = rules.find(key)
    for _ in range(_MAX_ALIKE):
        if place < 0:
            return best
        end = rules.index("\n", place + 1)
        score = (end - place - 1) << 1 | allow
        if score > best and _matches(rules[place + 1 : end], path):
            best = score
        place = rules.find(key, end)
    return 0


def _matches(rule: str, path: str) -> bool:
    if "*" not in rule:
        return path == rule[:-1] if rule[-1] == "$" else path.startswith(rule)
    # The literal behind the first star stands in the path.
    piece = rule[rule.index("*") + 1 :].partition("*")[0].rstrip("$")
    return piece in path and wild_match(squeeze(rule), path)


def flat_rules(text: str, spans: Spans, crawl_delay: float | None) -> FlatRules | None:
    """The rules of those spans in this form; None where they have to be asked otherwise."""
    found: list[tuple[str, str]] = []
    for low, high in spans:
        found += RULE.findall(text, low, high)
    if not found:
        return FlatRules("\n", "\n", NO_RULE, False, False, True, crawl_delay)
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
    denied, allowed = f"\n{joined}", "\n"
    if "" in forbids:
        denied = "\n".join(["", *compress(values, forbids), ""])
        allowed = "\n".join(["", *compress(values, map(not_, forbids)), ""])
    whole = 3 if "\n/\n" in allowed else 2 if "\n/\n" in denied else NO_RULE
    loose = joined.startswith(("*", "/*")) or "\n*" in joined or "\n/*" in joined
    queries = "?" in joined
    return FlatRules(denied, allowed, whole, loose, queries, as_written, crawl_delay)


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
