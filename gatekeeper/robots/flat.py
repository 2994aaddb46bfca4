"""Rules of RFC 9309 as a few plain strings, which answer for an origin that is not in active use.

A gate that caches hundreds of thousands of files cannot keep an object per rule for each of them,
nor let the garbage collector traverse them. `FlatRules` consists of a few strings, joined from the
rules that an agent obeys, and answers by searching them: most rules share no prefix with the
requested path, and most patterns need a piece that it does not contain. There is no flat form for
rule sets for which this is not exact or not fast.
"""

from __future__ import annotations

import re
from itertools import compress
from typing import Final

import msgspec

from gatekeeper.robots.patterns import (
    is_normal_path,
    is_robots_txt,
    query_form,
    rfc_path,
    squeeze,
    wild_match,
)
from gatekeeper.urls import is_sent_as_written

NO_RULE: Final = 1
"""Score of a path that no rule matches: it is allowed (RFC 9309 section 2.2.2, RFC-19)."""

_MAX_OCTETS: Final = 16_384
"""Maximum octets of rules for which searching is fast: 99 % of files have no more."""
_MAX_SHORT: Final = 2_048
"""Maximum octets of rules for which a search takes at most some 20 µs."""
_MAX_KEY: Final = 8
"""Maximum octets of a path's beginning by which rules are searched for."""
_SHORT_BEGINNINGS: Final = re.compile(rf"\n([^*$\n]{{0,{_MAX_KEY - 1}}}+)([*$][^\n]*+)")
"""Finds the rules with a wildcard in their first octets: what is before it, and the rest."""
_MAX_PATTERNS: Final = 250
"""Maximum number of patterns with a piece in the path that are compared."""
_MAX_PATH: Final = 2_048
"""Maximum octets of a path that is compared here."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set: their values in normal form.

    There are few objects, because each object that a question reads is a cache miss when one of
    hundreds of thousands of origins is asked about.
    """

    rules: str
    """All rules, those in `patterns` too, each between line feeds, first those that deny."""
    first_allow: int
    """Offset in `rules` from which on they allow."""
    patterns: str
    """The patterns that begin with a wildcard or with a slash and a wildcard, one per line,
    preceded by `-`, or by `+` for Allow."""
    pieces: str
    """For each of `patterns` a literal piece of every path that it matches, one per line."""
    slash_score: int
    """Score of the rules that are a single slash: they match every path."""
    key_length: int
    """Number of octets at the beginning of each rule that contain no wildcard; but for those in
    `patterns`, and for values of one octet, such as a slash."""
    queries: bool
    """Whether a rule contains a `?`: a path with escapes in its query may have to be compared in
    two forms (RFC 9309 section 2.2.2, RFC-25)."""
    crawl_delay: float | None = None
    """Seconds of Crawl-delay."""

    @property
    def long(self) -> bool:
        """Whether a search may take much longer than an answer of the matcher: where many rules
        share a prefix."""
        return len(self.rules) > _MAX_SHORT

    def allows_plain(self, path: str) -> bool | None:
        """Return the verdict about the text after the authority in a URL, if it is sent as written
        (`urls.is_sent_as_written`) and these rules can tell; else None: the policy has to be asked.

        The text begins with `/`. `/robots.txt` is allowed (RFC 9309 section 2.2.2, RFC-20).
        """
        if "/." not in path and is_normal_path(path):
            score = self._score_normal(path)
        else:
            score = self.score(path) if is_sent_as_written(path) else None
        return None if score is None else score & 1 == 1 or is_robots_txt(path)

    def score(self, path: str) -> int | None:
        """Return the score of a path: twice the octets of the longest matching rule, plus one if it
        allows.

        Return NO_RULE if no rule matches, and None if the policy has to be asked. The path begins
        with a slash and is not `/robots.txt` (RFC 9309 section 2.2.2, RFC-17 and RFC-18).
        """
        if not is_normal_path(path):
            path = rfc_path(path)
            if self.queries and query_form(path) != path:
                return None
        return self._score_normal(path)

    def _score_normal(self, path: str) -> int | None:
        """Return the `score` of a path for which `is_normal_path` is True."""
        best, rules = self.slash_score, self.rules
        if len(path) > _MAX_PATH:
            return None
        key = "\n" + path[: self.key_length]
        place = rules.find(key) if len(path) > 1 else -1
        compared = 0
        while place >= 0:
            end = rules.index("\n", place + 1)
            score = end - place - 1 << 1 | (place >= self.first_allow)
            if score > best:
                value = rules[place + 1 : end]
                if path.startswith(value):
                    best = score
                elif "*" in value or value[-1] == "$":
                    compared += 1
                    if compared > _MAX_PATTERNS:
                        return None
                    if wild_match(squeeze(value), path):
                        best = score
            place = rules.find(key, end)
        return self._best_pattern(path, best) if self.pieces else best

    def _best_pattern(self, path: str, best: int) -> int | None:
        """Return the score of the longest of `patterns` that matches, if it is greater than `best`,
        else `best`. None if there are too many to compare."""
        pieces = self.pieces.split("\n")
        if True not in map(path.__contains__, pieces):
            return best
        candidates = [*compress(self.patterns.split("\n"), map(path.__contains__, pieces))]
        if len(candidates) > _MAX_PATTERNS:
            return None
        for rule in candidates:
            score = len(rule) - 1 << 1 | (rule[0] == "+")
            if score > best and wild_match(squeeze(rule[1:]), path):
                best = score
        return best


def flat_rules(
    denied: list[str], allowed: list[str], crawl_delay: float | None
) -> FlatRules | None:
    """Return rules in flat form, or None if searching them would be slow.

    `denied` and `allowed` are the values of the rules in normal form.
    """
    denying = "\n".join(["", *denied])
    rules = "\n".join([denying, *allowed, ""])
    if len(rules) > _MAX_OCTETS:
        return None
    slash_score = 3 if "/" in allowed else 2 if "/" in denied else NO_RULE
    lengths = {_MAX_KEY, *map(len, denied), *map(len, allowed)}
    patterns: list[str] = []
    if "*" in rules or "$" in rules:
        find, first_allow = _SHORT_BEGINNINGS.findall, len(denying)
        for sign, found in (("+", find(rules, first_allow)), ("-", find(rules, 0, first_allow))):
            lengths.update([len(beginning) for beginning, _ in found])
            patterns += [f"{sign}{head}{rest}" for head, rest in found if head in {"", "/"}]
    # Every path contains a slash.
    pieces = [rule[1:].rstrip("*$").rpartition("*")[2] or "/" for rule in patterns]
    return FlatRules(
        rules=rules,
        first_allow=len(denying),
        patterns="\n".join(patterns),
        pieces="\n".join(pieces),
        slash_score=slash_score,
        key_length=min(lengths - {0, 1}),
        queries="?" in rules,
        crawl_delay=crawl_delay,
    )
