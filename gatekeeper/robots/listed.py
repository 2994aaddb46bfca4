"""The rules of RFC 9309 as a file lists them: what answers the first questions, and most of all.

`ListedRules.answer` is for a hot path: from what follows the authority in a URL straight to the
verdict, or None where the text has to be read as a URL first. `in_general` is the same for a policy
whose rules are held otherwise.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import contains, not_, or_
from typing import NamedTuple, Protocol

from gatekeeper.robots import compiled
from gatekeeper.robots.compiled import (
    CHANGED,
    LIKE_AN_ESCAPE,
    ROBOTS_FILE,
    Compiled,
    ready_rules,
)
from gatekeeper.robots.patterns import (
    PLAIN,
    ROBOTS_TXT,
    query_form,
    rfc_path,
    rfc_patterns,
    squeeze,
    wild_match,
)
from gatekeeper.urls import SURELY_SHORT

__all__ = ["ListedRules", "PlainAnswer", "QuickAnswer", "TextSource", "in_general"]


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

_LONG = SURELY_SHORT
"""Characters that are answered about; the reader of URLs knows their bound."""
_INNER_DOLLAR = re.compile(r"\$(?!\n|\Z)").search
_SPECIAL = re.compile(r"[*$]").search
_dot_segment = re.compile(r"/\.\.?(?:[/?#]|\Z)").search
_FEW = 32
"""Prefixes up to which trying each, in one call, is faster than bisection."""
_WORTH = 24
"""Questions that take a look at each rule and cost, together, what making them ready costs."""


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


class ListedRules:
    """The rules of a set as the file lists them, in a few tuples of strings.

    To list them takes a few microseconds, so that a file that is asked a handful of questions
    costs little more than its text. Most paths begin with no prefix, and hold no piece, that some
    Disallow needs: they are allowed without a look at any rule. Of the others the deciding rule
    is found by a look at each; once that was done `_WORTH` times, the rules are made ready as
    `Compiled`. Of a large set they are at once.
    """

    __slots__ = (
        *("_allowed", "_asked", "_forbids", "_left", "_likely", "_many", "_maybe", "_pieces"),
        *("_prefixes", "_queries", "_ranked", "_ready", "_roomy", "_strict", "_values"),
    )

    def __init__(self, found: list[tuple[str, str]], *, large: bool = False) -> None:
        """`found`: as `ready_rules` takes it; `large`: make the rules ready at once."""
        self._left = _WORTH
        self._roomy = _LONG - 1
        """Characters of a path up to which rules are looked at one by one."""
        self._prefixes: tuple[str, ...] = ()
        """A path that begins with one of them is matched by a Disallow."""
        self._many: tuple[str, ...] = ()
        """The prefixes, where they are many."""
        self._asked = 0
        """Questions about `_many`; negative once they are in order."""
        self._pieces: tuple[str, ...] = ()
        """A path that holds one of them is matched by a Disallow."""
        self._likely: tuple[str, ...] = ()
        """A path that begins with one of them may be matched by a Disallow."""
        self._maybe: tuple[str, ...] = ()
        """A path that holds one of them may be, too."""
        self._allowed: tuple[str, ...] = (ROBOTS_TXT,)
        """A path that begins with none of them is matched by no Allow that may win."""
        self._queries = False
        """A rule has a `?`: a path with escapes may have to be compared in two forms (RFC-25)."""
        self._strict = False
        """A pattern may be found in what is escaped: a path is compared in its normal form."""
        self._values: tuple[str, ...] = ()
        """In normal form, in the order of the file."""
        self._forbids: tuple[str, ...] = ()
        """Of each the empty text if it allows; empty where none does."""
        self._ranked: _Ranked | None = None
        self._ready: Compiled | None = None
        if large or not self._take(found):
            self._make_ready(found)
            self._prefixes = self._allowed = ("",)

    def _take(self, found: list[tuple[str, str]]) -> bool:
        """Take the rules; False: they can't be listed."""
        columns: list[tuple[str, ...]] = [*zip(*found, strict=True)] or [(), ()]
        forbids, values = columns
        joined = "\n".join(values)
        odd = joined.encode("latin-1").translate(None, _LISTED)
        if odd or ("$" in joined and _INNER_DOLLAR(joined)):
            if b" " in odd or b"\t" in odd:
                joined = "\n".join([value.rstrip(" \t") for value in values])
            joined = rfc_patterns(joined)
            values = tuple(joined.split("\n"))
            self._strict = "%" in joined
        if "" in values:  # an empty pattern has no effect (RFC 9309 section 2.2.2, RFC-21)
            values = tuple([value or _NEVER for value in values])
        self._queries = "?" in joined
        if self._queries and self._strict and CHANGED(joined):
            return False  # a rule of two forms
        prefixes = self._values = values
        if "" in forbids:
            self._forbids = forbids
            prefixes = tuple(compress(values, forbids))
            # An Allow that is shorter than each Disallow never wins (RFC-17).
            least = min(map(len, prefixes), default=_LONG)
            opened = compress(values, map(not_, forbids))
            heads = [_head_of(value) for value in opened if len(value) >= least]
            self._allowed = (ROBOTS_TXT, *heads)
        if "*" in joined or "$" in joined:
            flat = joined.count("*") + joined.count("$") <= compiled.FLAT_RULES
            self._roomy = min(self._roomy, compiled.PAIRS // len(joined)) if flat else 0
            self._strict = self._strict or LIKE_AN_ESCAPE(joined) is not None
            prefixes = self._take_wild(prefixes)
        if len(prefixes) > _FEW:
            self._many = prefixes
        else:
            self._prefixes = prefixes
        return True

    def _take_wild(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Take the values of rules that forbid; gives the prefixes."""
        starred = [*map(contains, values, repeat("*"))]
        prefixes = [*compress(values, map(not_, starred))]
        pieces: list[str] = []
        likely: list[str] = []
        maybe: list[str] = []
        for value in compress(values, starred):
            head, _, rest = value.partition("*")
            if rest[-1:] in _EMPTY:
                rest = rest.rstrip("*")  # a star at the end says what every end says
            if not rest:
                prefixes.append(head)
            elif head and head != "/":
                likely.append(head)
            elif "*" in rest or rest[-1] == "$" or (head and rest[0] == "/"):
                maybe.append(rest.removesuffix("$").rpartition("*")[2])
            else:
                pieces.append(rest)
        exact = [value for value in prefixes if value[-1:] == "$"]
        if exact:
            prefixes = [value for value in prefixes if value[-1:] != "$"]
            likely += [value[:-1] for value in exact]
        self._pieces, self._likely, self._maybe = tuple(pieces), tuple(likely), tuple(maybe)
        return tuple(prefixes)

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
        if "%" in path or self._strict:
            if "/%2" in path or "/." in path:
                return None
            path = rfc_path(path)
            if self._queries and "?" in path and "%" in path:
                return None
        if not path.startswith(self._prefixes) and not (self._many and self._begins(path)):
            for piece in self._pieces:
                if piece in path:
                    break
            else:
                return self._perhaps(path) if self._likely or self._maybe else True
        if "#" in path:
            return None
        if path.startswith(self._allowed):
            return self._find(path) & 1 == 1
        return False

    def _perhaps(self, path: str) -> bool | None:
        """`answer` for a path that no rule is sure to forbid."""
        if not path.startswith(self._likely):
            for piece in self._maybe:
                if piece in path:
                    break
            else:
                return True
        return None if "#" in path else self._find(path) & 1 == 1

    def _begins(self, path: str) -> bool:
        """The path begins with one of many prefixes."""
        if self._asked < 0:
            many = self._many
            return path.startswith(many[bisect_right(many, path) - 1])
        many = self._many
        self._asked += 1
        if self._asked > _FEW:
            # Without those that begin with another one the one just before a path is the only
            # one that it may begin with.
            kept: list[str] = []
            for prefix in sorted(many):
                if not kept or not prefix.startswith(kept[-1]):
                    kept.append(prefix)
            self._many = tuple(kept)
            self._asked = -1  # after: another thread may be here
        return path.startswith(many)

    def decide(self, path: str) -> int:
        """The code of the deciding rule (see `rules`)."""
        if self._ready is None and ("%" in path or self._strict):
            path = rfc_path(path)
        return self._find(path)

    def _find(self, path: str) -> int:
        """`decide` for a path in its normal form, or one in which that makes no difference."""
        ready = self._ready
        if ready is not None:
            return ready.decide(path)
        self._left -= 1
        if self._left < 0 or len(path) > self._roomy:
            forbids = self._forbids or ("s",) * len(self._values)
            return self._make_ready([*zip(forbids, self._values, strict=True)]).decide(path)
        ranked = self._ranked
        if ranked is None:
            ranked = self._ranked = _Ranked.of(self._values, self._forbids)
        return ranked.decide(path)

    def _make_ready(self, found: list[tuple[str, str]]) -> Compiled:
        ready = self._ready = ready_rules(found, robots_file=True)
        self._ranked = None
        return ready


_NEVER = "-"
"""No path begins with it: the value of a rule that has no effect."""
_LISTED = b"*?$\n" + PLAIN.encode()
_EMPTY = ("", "*")


def _head_of(value: str) -> str:
    """What stands before the first star or final `$` of a pattern."""
    return value[: value.index("*")] if "*" in value else value.removesuffix("$")


class _Ranked(NamedTuple):
    """Rules by what they win by: the first one that matches decides (RFC 9309 section 2.2.2, RFC-17
    to RFC-19). Before all others stands one for `/robots.txt` (RFC-20)."""

    heads: tuple[str, ...]
    """What a path begins with that the rule matches."""
    values: tuple[str, ...]
    """In normal form."""
    codes: Sequence[int]

    @classmethod
    def of(cls, values: tuple[str, ...], forbids: tuple[str, ...]) -> _Ranked:
        """Takes rules in the order of the file."""
        codes = list(range(0, 2 * len(values), 2))
        if "" in forbids:
            codes = [code + (not forbid) for code, forbid in zip(codes, forbids, strict=True)]
        scores = [len(value) << 1 | code & 1 for value, code in zip(values, codes, strict=True)]
        order = sorted(range(len(values)), key=scores.__getitem__, reverse=True)
        ranked = tuple([values[number] for number in order])
        heads = tuple(map(_head_of, ranked)) if _SPECIAL("\n".join(ranked)) else ranked
        codes = [ROBOTS_FILE, *[codes[number] for number in order]]
        return cls((ROBOTS_TXT, *heads), (f"{ROBOTS_TXT}$", *ranked), array("i", codes))

    def decide(self, path: str) -> int:
        """The code of the deciding rule. `path` may be as it came, if it holds no escape."""
        heads, values, codes = self
        query = query_form(path) if "%" in path else path
        fits: Iterable[bool] = map(path.startswith, heads)
        if query != path:  # a head may hold a `?` (RFC 9309 section 2.2.2, RFC-25)
            fits = map(or_, fits, map(query.startswith, heads))
        for place in compress(range(len(heads)), fits):
            value = values[place]
            if value is heads[place] or _matches(value, path, query):
                return codes[place]
        return -1


def _matches(value: str, path: str, query: str) -> bool:
    last = value.removesuffix("$").rpartition("*")[2]
    if last not in path and last not in query:
        return False
    short = squeeze(value)
    return wild_match(short, path) or ("?" in value and wild_match(short, query))
