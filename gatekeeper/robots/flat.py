"""Rules of RFC 9309 as a few plain strings, which answer for an origin that is not in active use.

A gate that caches hundreds of thousands of files cannot keep an object per rule for each of them,
nor let the garbage collector traverse them. `FlatRules` consists of a few strings, built in one
pass over the rules that an agent obeys, and answers by searching them: most rules share no prefix
with the requested path, and most patterns need a piece that it does not contain. There is no flat
form for rule sets for which this is not exact or not fast.
"""

from __future__ import annotations

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
_MAX_KEY: Final = 8
"""Maximum octets of a path's beginning by which rules are searched for."""
_MARKS: Final = "<>|"
_ALLOWS: Final = ">|"
_WILD: Final = "<|"
"""Marks after a value that is not a plain Disallow: no normal form contains one of these
characters."""
_MAX_PATTERNS: Final = 250
"""Maximum number of patterns with a piece in the path that are compared."""
_MAX_PATH: Final = 2_048
"""Maximum octets of a path that is compared here."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set: their values in normal form, the longest first, Allow before Disallow
    in a tie.

    So the first rule that matches a path decides. There are few objects, because each object that a
    question reads is a cache miss when one of hundreds of thousands of origins is asked about.
    """

    rules: str
    """Rules that begin with more than a slash, each between line feeds. A pattern or an Allow is
    followed by its mark (`_ALLOWS`, `_WILD`)."""
    patterns: str
    """The patterns that begin with a wildcard or with a slash and a wildcard, one per line,
    preceded by `-`, or by `+` for Allow."""
    pieces: str
    """For each of `patterns` a literal piece of every path that it matches, one per line."""
    slash_score: int
    """Score of the rules that are a single slash: they match every path."""
    key_length: int
    """Number of octets at the beginning of each of `rules` that contain no wildcard."""
    queries: bool
    """Whether a rule contains a `?`: a path with escapes in its query may have to be compared in
    two forms (RFC 9309 section 2.2.2, RFC-25)."""
    crawl_delay: float | None = None
    """Seconds of Crawl-delay."""

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
        if rules:
            key = "\n" + path[: self.key_length]
            place, compared = rules.find(key), 0
            while place >= 0:
                end = rules.index("\n", place + 1)
                rule = rules[place + 1 : end]
                value = rule.rstrip(_MARKS)
                wild = rule[-1] in _WILD
                if path.startswith(value) or (wild and wild_match(squeeze(value), path)):
                    best = len(value) << 1 | (rule[-1] in _ALLOWS)
                    break
                compared += wild
                if compared > _MAX_PATTERNS:
                    return None
                place = rules.find(key, end)
        if not self.pieces:
            return best
        pieces = self.pieces.split("\n")
        if True not in map(path.__contains__, pieces):
            return best
        candidates = [*compress(self.patterns.split("\n"), map(path.__contains__, pieces))]
        if len(candidates) > _MAX_PATTERNS:
            return None
        for rule in candidates:
            score = len(rule) - 1 << 1 | (rule[0] == "+")
            if score <= best:
                break
            if wild_match(squeeze(rule[1:]), path):
                return score
        return best


def flat_rules(
    denied: list[str], allowed: list[str], crawl_delay: float | None
) -> FlatRules | None:
    """Return rules in flat form, or None if searching them would be slow.

    `denied` and `allowed` are the values of the rules in normal form, as from
    `LongestMatch.values`.
    """
    joined = "\n".join(denied + allowed)
    if len(joined) > _MAX_OCTETS:
        return None
    slash_score = 3 if "/" in allowed else 2 if "/" in denied else NO_RULE
    key_length = _MAX_KEY
    rules: list[str] = []
    patterns: list[str] = []
    if "*" in joined or "$" in joined:
        for values, sign, mark in ((allowed, "+", "|"), (denied, "-", "<")):
            for value in [value for value in values if "*" in value or value[-1] == "$"]:
                literal = len(value.partition("*")[0].removesuffix("$"))
                if literal > 1:
                    rules.append(value + mark)
                    key_length = min(key_length, literal)
                elif value[0] in "/*":
                    patterns.append(sign + value)
        patterns.sort(key=len, reverse=True)
        denied = [value for value in denied if "*" not in value and value[-1] != "$"]
        allowed = [value for value in allowed if "*" not in value and value[-1] != "$"]
    # Of two lines of equal length, a value without a mark is the longer one, and an Allow line is
    # one character longer than the Disallow line of the same value. The sort is stable.
    rules = denied + [value + ">" for value in allowed if len(value) > 1] + rules
    rules.sort(key=len, reverse=True)
    while rules and len(rules[-1]) == 1:
        rules.pop()  # a slash, or a value without effect
    if rules:
        key_length = min(key_length, len(rules[-1].rstrip(_MARKS)))
    # Every path contains a slash.
    pieces = [rule[1:].rstrip("*$").rpartition("*")[2] or "/" for rule in patterns]
    return FlatRules(
        rules="\n".join(["", *rules, ""]) if rules else "",
        patterns="\n".join(patterns),
        pieces="\n".join(pieces),
        slash_score=slash_score,
        key_length=key_length,
        queries="?" in joined,
        crawl_delay=crawl_delay,
    )
