"""Rules of RFC 9309 as one piece of plain text each: what answers for an origin at rest.

A gate that holds hundreds of thousands of files can't keep an object a rule for each of them, nor
let the garbage collector walk over them. `FlatRules` are a few strings, made in one pass over the
rules that an agent obeys, and asked by searching these: most rules begin like no path that is asked
about. Sets for which that is not exact, or would not be fast, have none.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gatekeeper.robots.patterns import (
    is_plain,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    wild_match,
)

__all__ = ["NO_RULE", "FlatRules", "flat_rules"]

NO_RULE: Final = 1
"""The score of a path that no rule matches: it is allowed (RFC 9309 section 2.2.2, RFC-19)."""

_MAX_OCTETS: Final = 16_384
"""Octets of rules up to which searching them is fast: 99 files in a hundred hold no more."""
_MAX_LOOSE: Final = 150
"""Rules that any path may match, each of which is looked at for each path."""
_MAX_ALIKE: Final = 60
"""Rules that begin alike up to which each is looked at."""
_MAX_PATH: Final = 2_048
"""Octets of a path up to which patterns are compared here."""


class FlatRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one set, as texts in which each rule stands between line feeds."""

    denied: str
    """Disallow values that begin with a slash and an octet that is no star."""
    allowed: str
    """Allow values that do."""
    loose: tuple[str, ...]
    """Those that begin with a star, or a slash and a star, an Allow with a `+` before it."""
    whole: int
    """The score of the rules that are a slash alone: they match every path."""
    queries: bool
    """A rule has a `?`: a path with escapes in its query may have to be compared in two forms
    (RFC 9309 section 2.2.2, RFC-25)."""
    crawl_delay: float | None = None
    """Seconds by Crawl-delay."""

    def score(self, path: str) -> int | None:
        """Twice the octets of the longest rule that matches a path, and one more if it allows
        (RFC 9309 section 2.2.2, RFC-17 and RFC-18), or NO_RULE. None: ask the policy.

        The path is not `/robots.txt`, and begins with a slash.
        """
        if len(path) > _MAX_PATH:
            return None
        if "%" in path or "*" in path or not is_plain(path):
            path = rfc_path(path)
            if self.queries and query_form(path) != path:
                return None
        best = self.whole
        key = "\n" + (path[:2] if path != "/" else "/$")
        if key in self.denied:
            best = _best(self.denied, key, path, best, 0)
        if best and key in self.allowed:
            best = _best(self.allowed, key, path, best, 1)
        if not best:
            return None
        for rule in self.loose:
            allow = rule[0] == "+"
            pattern = rule[1:] if allow else rule
            score = len(pattern) << 1 | allow
            if score > best and _may_match(pattern, path) and wild_match(squeeze(pattern), path):
                best = score
        return best


def _best(rules: str, key: str, path: str, best: int, allow: int) -> int:
    """The best score of the rules that begin with `key`, if that is more than `best`; 0 where they
    are many."""
    place = rules.find(key)
    for _ in range(_MAX_ALIKE):
        if place < 0:
            return best
        end = rules.index("\n", place + 1)
        rule = rules[place + 1 : end]
        score = len(rule) << 1 | allow
        if score > best and (
            path.startswith(rule)
            if "*" not in rule and rule[-1] != "$"
            else wild_match(squeeze(rule), path)
        ):
            best = score
        place = rules.find(key, end)
    return 0


def _may_match(pattern: str, path: str) -> bool:
    """The literal behind the first star stands in the path."""
    rest = pattern[pattern.index("*") + 1 :]
    return rest.partition("*")[0].rstrip("$") in path


def flat_rules(found: list[tuple[str, str]], crawl_delay: float | None) -> FlatRules | None:
    """The rules in this form, of each whether it is a `dis`allow and its value; None where they
    have to be asked otherwise, as they are many."""
    joined = "\n".join([value for _, value in found]) + "\n"
    if len(joined) > _MAX_OCTETS:
        return None
    if not is_plain(joined.replace("$\n", "").replace("\n", "")):
        joined = rfc_patterns(joined)
        if "?" in joined and ("%3A" in joined or "%2F" in joined):
            return None  # a rule of two forms (RFC 9309 section 2.2.2, RFC-25)
    denied, allowed, loose, whole = ["\n"], ["\n"], [], NO_RULE
    for (dis, _), value in zip(found, joined.split("\n"), strict=False):
        if value[:1] == "*" or value[:2] == "/*":
            loose.append(value if dis else "+" + value)
        elif value == "/":
            whole = max(whole, 2 if dis else 3)
        elif value[:1] == "/":
            (denied if dis else allowed).append(value + "\n")
    if len(loose) > _MAX_LOOSE:
        return None
    return FlatRules(
        *("".join(denied), "".join(allowed), tuple(loose)), whole, "?" in joined, crawl_delay
    )
