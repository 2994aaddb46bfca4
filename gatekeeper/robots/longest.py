"""RFC 9309: of the rules that match a path the longest one decides.

`LongestMatch.answer` is for a hot path: from what follows the authority in a URL straight to the
verdict, or None where the text has to be read as a URL first. `in_general` is the same for a policy
whose rules are held otherwise.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import chain, compress, repeat
from operator import not_
from typing import Final, Protocol

from gatekeeper import speedups
from gatekeeper.robots import compiled
from gatekeeper.robots.compiled import (
    CHANGED,
    LIKE_AN_ESCAPE,
    ROBOTS_FILE,
    Compiled,
    ready_rules,
)
from gatekeeper.robots.model import RULE, Dialect, Spans
from gatekeeper.robots.patterns import (
    COMPARED,
    PLAIN,
    ROBOTS_TXT,
    Meter,
    TooDear,
    is_plain,
    is_robots_txt,
    query_form,
    rfc_path,
    rfc_patterns,
    unescaped,
    wild_match,
)
from gatekeeper.robots.rules import Numbered, octets_of, split_url
from gatekeeper.urls import SURELY_SHORT

__all__ = ["LongestMatch", "PlainAnswer", "QuickAnswer", "TextSource", "as_written", "in_general"]


class TextSource(Protocol):
    """Where a rule set finds its text: a `RobotsTxt`."""

    @property
    def size(self) -> int:
        """Octets of the file."""

    @property
    def lines(self) -> str:
        """The text that spans speak of."""


QuickAnswer = Callable[[str], bool | None]
"""Takes what follows the authority in a URL, as written, beginning with `/`. True, False, or
None: ask again with the whole URL, which may be no URL at all."""

PlainAnswer = Callable[[str], bool]
"""The verdict about a path that is known to be plain: ASCII, without blanks, escapes, dot
segments, query or fragment."""

COMPILED: Final = not __file__.endswith(".py")
"""This module is compiled: a loop over the characters of a path is faster than any call."""
_LONG = SURELY_SHORT
"""Characters that are answered about; the reader of URLs knows their bound."""
_LISTED = b"*?$\n" + PLAIN.encode()
_INNER_DOLLAR = re.compile(r"\$(?!\n|\Z)").search
_dot_segment = re.compile(r"/\.\.?(?:[/?#]|\Z)").search
# These find what `model.RULE` finds, faster, as they leave comments to be cut.
_ALLOW = re.compile(r"\n[ \t]*+allow", re.IGNORECASE).search
_RULES = re.compile(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+(.*+)", re.IGNORECASE | re.ASCII).findall
_DISALLOWED = re.compile(r"\n(?:Disallow|[ \t]*+(?i:disallow)[ \t]*+):[ \t]*+(.*+)").findall
_NEVER = "-"
"""No path begins with it: the value of a rule that has no effect."""
_NOWHERE = "\n"
"""No URL begins with it."""
_EMPTY = ("", "*")
_FEW = 32
"""Rules up to which trying each is faster than bisection."""
_WORTH = 32
"""Questions that take a look at each rule; it costs about as much more, together, as making the
rules ready."""
_EAGER_OCTETS = 16_384
"""Text beyond which a set is made ready before its first question."""
_EXPLAINING = 500_000
"""Steps that naming all the rules that match a path may take, beside looking at each."""


def as_written(path: str) -> bool:
    """No escape, blank, control, dot segment and nothing beside ASCII. Fast where it is compiled.

    >>> as_written("/a.b?c"), as_written("/.b"), as_written("/a%20"), as_written("/a b")
    (True, False, False, False)
    """
    before = 0
    for place in range(len(path)):
        octet = ord(path[place])
        if octet <= 32 or octet >= 127 or octet == 37 or (octet == 46 and before == 47):
            return False
        before = octet
    return True


def in_general(allows: Callable[[str], bool]) -> QuickAnswer:
    """The answer of a policy that has no quick one of its own: `allows` takes a path and query in
    which nothing is escaped."""

    def answer(path: str) -> bool | None:
        if (
            path.isascii()
            and path.isprintable()
            and "%" not in path
            and "#" not in path
            and " " not in path
            and ("/." not in path or not _dot_segment(path))
            and len(path) < _LONG
        ):
            return allows(path)
        return None

    return answer


class LongestMatch:
    """RFC 9309: the longest match wins whatever the order, a tie allows (RFC-16 to RFC-19).

    The rules are read off the text when the first question comes, and kept as the file lists
    them, in a few tuples of strings, so that a file that is asked a handful of questions costs
    little more than its text. Most paths begin as no Disallow does, and hold no piece that one of
    those needs that begin with a star: they are allowed without a look at any rule. For what is
    left the longest match of either kind is looked for; once that was done `_WORTH` times, the
    rules are made ready as `Compiled`. Of a large text they are at once.
    """

    __slots__ = (
        *("_allowed", "_authority", "_clues", "_forbids", "_left", "_many", "_opened", "_patterns"),
        *("_plain", "_prefixes", "_queries", "_quick", "_ready", "_roomy", "_source", "_strict"),
        *("_sure", "_values", "spans"),
    )

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, source: TextSource, spans: Spans) -> None:
        self.spans = spans
        self._source: TextSource | None = source
        """Where the rules are read; None once they are."""
        self._authority = _NOWHERE
        """That of the last URL that had to be read whole: of the next one the path is left."""
        self._roomy = -1
        """Characters of a text that is answered about at once, none before the rules are read."""
        self._quick = -1
        """Of one that is answered about by `allows_url` itself."""
        self._ready: Compiled | None = None
        eager = source.size > _EAGER_OCTETS and sum([b - a + 64 for a, b in spans]) > _EAGER_OCTETS
        self._begin()
        if eager or not speedups.ON:
            found = [RULE.findall(source.lines, low, high) for low, high in spans]
            self._make_ready(found[0] if len(found) == 1 else [*chain.from_iterable(found)])
            self._source = None
            if speedups.ON:
                self._roomy = _LONG - 1

    def _begin(self) -> None:
        """What holds where every path is left to the rules made ready."""
        self._prefixes: tuple[str, ...] = ("/",)
        """A path that begins with one of them is matched by a Disallow."""
        self._many = False
        """They are in order, and none begins with another one: the one just before a path is the
        only one that it may begin with."""
        self._sure = False
        """No rule allows."""
        self._clues: tuple[str, ...] = ()
        """What stands in each path that another Disallow matches, ..."""
        self._patterns: tuple[str, ...] = ()
        """... these, one by one; behind them those whose only star is the last octet."""
        self._values: tuple[str, ...] = ()
        """In normal form, in the order of the file."""
        self._forbids: tuple[str, ...] = ()
        """Of each the empty text if it allows; empty where none does."""
        self._plain: tuple[str, ...] = ()
        """Those that forbid, without a star and a final `$`."""
        self._opened: tuple[str, ...] | None = None
        """The values that allow. None: not listed yet."""
        self._allowed: tuple[str, ...] = ("",)
        """What a path begins with that is matched by one of them, or is `/robots.txt`."""
        self._queries = False
        """A rule has a `?`: a path with escapes may have to be compared in two forms (RFC-25)."""
        self._strict = False
        """A pattern may be found in what is escaped: a path is compared in its normal form."""
        self._left = _WORTH
        """Looks at each rule until the rules are made ready."""

    def _list(self, source: TextSource) -> None:
        """Read the rules."""
        # Another thread may do the same, and ask as soon as it has: nothing is ever set but to what
        # it is in the end.
        forbids, values = _columns(source.lines, self.spans)
        joined = "\n".join(values)
        roomy, strict = _LONG - 1, False
        odd = joined.encode("latin-1").translate(None, _LISTED)
        if odd or ("$" in joined and _INNER_DOLLAR(joined)):
            joined = rfc_patterns(joined)
            values = joined.split("\n")
            strict = "%" in joined
        self._queries = "?" in joined
        if "?" in joined and strict and CHANGED(joined):  # a rule of two forms
            self._make_ready([*zip(forbids or repeat("s"), values, strict=False)])
        else:
            if "" in values:  # an empty pattern has no effect (RFC 9309 section 2.2.2, RFC-21)
                values = [value or _NEVER for value in values]
            self._values = plain = tuple(values)
            if forbids:
                self._forbids = tuple(forbids)
                plain = tuple(compress(values, forbids))
            else:
                self._allowed = (ROBOTS_TXT,)
                self._sure = True
            self._plain = self._prefixes = plain
            if "*" in joined or "$" in joined:
                flat = joined.count("*") + joined.count("$") <= compiled.FLAT_RULES
                roomy = min(roomy, compiled.PAIRS // len(joined)) if flat else 0
                strict = strict or LIKE_AN_ESCAPE(joined) is not None
                self._take_wild(plain)
        self._strict = strict
        self._roomy = roomy
        self._quick = -1 if strict or len(self._prefixes) > _FEW else roomy
        self._source = None

    def _take_wild(self, values: tuple[str, ...]) -> None:
        """Take the values of rules that forbid."""
        starts: list[str] = []
        starred: list[str] = []
        patterns: list[str] = []
        clues: list[str] = []
        for value in [value for value in values if "*" in value or value[-1] == "$"]:
            head, star, rest = value.partition("*")
            rest = rest.rstrip("*")
            if star and not rest:
                starred.append(value)
                starts.append(head or "/")
            else:
                patterns.append(value)
                if len(head) < 2:
                    head = rest.removesuffix("$").rpartition("*")[2]
                clues.append(head if star else head[:-1])
        self._plain = tuple([value for value in values if "*" not in value and value[-1] != "$"])
        self._prefixes = (*self._plain, *starts) if starts else self._plain
        self._patterns, self._clues = (*patterns, *starred), tuple(clues)

    def allows_url(self, url: str) -> bool:
        """The verdict for a URL, or a path. Raises InvalidURL for text that is neither."""
        path = url.removeprefix(self._authority)
        # `answer` gives the same; most URLs need no call of it.
        if (
            as_written(path)
            if COMPILED
            else "%" not in path and " " not in path and "/." not in path and path.isprintable()
        ) and len(path) <= self._quick:
            some = self._prefixes
            if (
                path.startswith(some[bisect_right(some, path) - 1])
                if self._many
                else path.startswith(some)
            ):
                if "#" not in path:
                    if self._sure:
                        return path == ROBOTS_TXT
                    return path.startswith(self._allowed) and self._compare(path)
            elif path and path[0] == "/":
                clues = self._clues
                if not clues:
                    return True
                for clue in clues:
                    if clue in path:
                        break
                else:
                    return True
                if "#" not in path:
                    return self._closer(path)
        if path[:1] != "/":
            origin, path = split_url(url)
            if origin and url.startswith(origin + "/"):
                self._authority = origin
            return self.allows(path)
        verdict = self.answer(path)
        return self.allows(split_url(url)[1]) if verdict is None else verdict

    @property
    def quick_answer(self) -> QuickAnswer:
        """See `Policy.quick_answer`."""
        source = self._source
        if source is not None:
            self._list(source)
        return self.answer if self._roomy >= 0 else in_general(self.allows)

    def answer(self, path: str) -> bool | None:
        """The verdict about what follows the authority in a URL, as written, beginning with `/`.
        None: the whole URL has to be read first."""
        # Neither a fragment nor a character that would be escaped can make a path match a prefix
        # or a piece that it does not match as it stands: they hold plain octets alone.
        if (
            " " in path
            or not path.isprintable()
            or ("/." in path and _dot_segment(path))
            or len(path) > self._roomy
        ):
            return None
        if "%" in path:
            if "/%2" in path or "/." in path:
                return None
            # Where no rule holds an escape, one of a plain octet alone can make a difference.
            if self._strict or not unescaped(path):
                path = rfc_path(path)
            if self._queries and "?" in path and "%" in path:
                return None
        elif self._strict and ("*" in path or not is_plain(path)):
            path = rfc_path(path)
        if not self._many and len(self._prefixes) > _FEW:
            self._order()
        some = self._prefixes
        if (
            path.startswith(some[bisect_right(some, path) - 1])
            if self._many
            else path.startswith(some)
        ):
            # What was found may stand in the fragment.
            return None if "#" in path else path.startswith(self._allowed) and self._compare(path)
        for clue in self._clues:
            if clue in path:
                return None if "#" in path else self._closer(path)
        return True

    def _order(self) -> None:
        """Put many prefixes in order, once that pays."""
        self._left -= 1
        if self._left < 0:
            kept: list[str] = []
            for prefix in sorted(self._prefixes):
                if not kept or not prefix.startswith(kept[-1]):
                    kept.append(prefix)
            self._prefixes = tuple(kept)
            self._many = True  # after: another thread may be here
            self._left = _WORTH
            if not self._strict:
                self._quick = self._roomy

    def _closer(self, path: str) -> bool:
        """`answer` for a path that holds what some pattern needs, and has no fragment."""
        for pattern, clue in zip(self._patterns, self._clues, strict=False):
            if clue in path and wild_match(pattern, path):
                return path.startswith(self._allowed) and self._compare(path)
        return True

    def _compare(self, path: str) -> bool:
        """The verdict about a path that some Disallow matches, and maybe an Allow; in its normal
        form, or one in which that makes no difference."""
        ready = self._ready or self._if_ready(path)
        if ready is not None:
            return ready.decide(path) & 1 == 1
        longest = max(map(len, self._allowing(path)), default=0) if self._forbids else 0
        return (longest > 0 and not self._longer(path, longest)) or is_robots_txt(path)

    def _longer(self, path: str, longest: int) -> bool:
        """A Disallow matches that is longer."""
        for prefix in self._plain:
            if prefix in path and len(prefix) > longest and path.startswith(prefix):
                return True
        for pattern in self._candidates(path):
            if len(pattern) > longest and wild_match(pattern, path):
                return True
        return False

    def _candidates(self, path: str) -> list[str]:
        """The Disallows with a star or a final `$` that may match."""
        found = [*compress(self._patterns, map(path.__contains__, self._clues))]
        return [*found, *self._patterns[len(self._clues) :]]

    def allows(self, path: str) -> bool:
        """The verdict alone, about a path with its query as `split_url` gives it."""
        source = self._source
        if source is not None:
            self._list(source)
        verdict = self.answer(path)
        return self.decide(path) & 1 == 1 if verdict is None else verdict

    @property
    def decider(self) -> Callable[[str], int]:
        """`decide`, for whoever will ask often."""
        return self.decide

    def decide(self, path: str) -> int:
        """The code of the deciding rule (see `rules`), or -1."""
        source = self._source
        if source is not None:
            self._list(source)
        ready = self._ready
        if ready is None:
            if "%" in path or self._strict:
                path = rfc_path(path)
            if is_robots_txt(path):
                return ROBOTS_FILE
            ready = self._if_ready(path)
        if ready is not None:
            return ready.decide(path)
        allowed = self._longest(self._allowing(path), 1) if self._forbids else ""
        found = []
        if path.startswith(self._plain):
            found = [each for each in self._plain if each in path and path.startswith(each)]
        found += [each for each in self._candidates(path) if wild_match(each, path)]
        denied = self._longest(found, 0)
        if len(denied) > len(allowed):
            return self._place(denied, 0) * 2
        return self._place(allowed, 1) * 2 + 1 if allowed else -1

    def _allowing(self, path: str) -> list[str]:
        """The Allows that match."""
        opened = self._opened
        if opened is None:
            opened = tuple(compress(self._values, map(not_, self._forbids)))
            heads = opened
            if "*" in (joined := "".join(opened)) or "$" in joined:
                heads = tuple([value.partition("*")[0].removesuffix("$") for value in opened])
            self._allowed = (*heads, ROBOTS_TXT)
            self._opened = opened  # after: another thread may be here
        found: list[str] = []
        for place, head in enumerate(self._allowed):
            if head in path and place < len(opened) and path.startswith(head):
                pattern = opened[place]
                if pattern is head or wild_match(pattern, path):
                    found.append(pattern)
        return found

    def _longest(self, found: list[str], allow: int) -> str:
        """The longest of the patterns of one kind, of equal ones the first in the file."""
        if len(found) < 2:
            return found[0] if found else ""
        longest = max(map(len, found))
        found = [pattern for pattern in found if len(pattern) == longest]
        return min(found, key=lambda pattern: self._place(pattern, allow))

    def _place(self, pattern: str, allow: int) -> int:
        """Where in the file the first rule of that kind stands that has this pattern."""
        place = self._values.index(pattern)
        while self._forbids and bool(self._forbids[place]) is bool(allow):
            place = self._values.index(pattern, place + 1)
        return place

    def _if_ready(self, path: str) -> Compiled | None:
        """The rules made ready, if the path takes that, or it is time for it."""
        self._left -= 1
        if (
            self._left < 0
            or len(path) > self._roomy
            # A rule with a `?` is compared with two forms of the path (RFC 9309 section 2.2.2,
            # RFC-25).
            or ("%" in path and self._queries and query_form(path) != path)
        ):
            self._make_ready([*zip(self._forbids or repeat("s"), self._values, strict=False)])
        return self._ready

    def _make_ready(self, found: list[tuple[str, str]]) -> None:
        self._ready = ready_rules(found, robots_file=True)

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first.

        In a file made so that this takes long, of those up to some place in the file.
        """
        plain = rfc_path(path)
        query = query_form(plain)
        meter = Meter(_EXPLAINING)
        known: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        try:
            for number, (_, value) in enumerate(rules):
                if value not in known:
                    if "*" in value:
                        meter.spend(len(plain) * len(value) >> COMPARED)
                    known[value] = octets_of(value, plain, query)
                if known[value]:
                    found.append((number, known[value]))
        except TooDear:
            pass
        found.sort(key=lambda each: (-each[1], not rules[each[0]].allow))
        return found


def _columns(text: str, spans: Spans) -> tuple[list[str], list[str]]:
    """Of each rule in the spans whether it forbids, as text that is empty if it does not, and its
    value. The first is empty where all forbid, which is found in half of the time."""
    forbids: list[str] = []
    values: list[str] = []
    for low, high in spans:
        if forbids or _ALLOW(text, low, high):
            found = _RULES(text, low, high)
            forbids += ["s"] * (len(values) - len(forbids))
            forbids += ["s" if dis else "" for dis, _ in found]
            values += [value for _, value in found]
        else:
            values += _DISALLOWED(text, low, high)
    joined = "\n".join(values)
    if "#" in joined:
        values = [value.partition("#")[0] for value in values]
    if " " in joined or "\t" in joined:
        values = [value.rstrip(" \t") for value in values]
    return forbids, values
