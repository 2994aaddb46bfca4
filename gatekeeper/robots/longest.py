"""RFC 9309: of the rules that match a path the longest one decides.

`LongestMatch.answer` is for a hot path: from what follows the authority in a URL straight to the
verdict, or None where the text has to be read as a URL first.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from itertools import chain, compress, repeat
from operator import not_

from gatekeeper import speedups
from gatekeeper.robots import compiled
from gatekeeper.robots.compiled import CHANGED, LIKE_AN_ESCAPE, ROBOTS_FILE, CompiledRules
from gatekeeper.robots.parser import ALLOW, DISALLOWED, RULE, Dialect, Spans
from gatekeeper.robots.patterns import (
    COMPARED,
    COMPILED,
    PLAIN,
    ROBOTS_TXT,
    Meter,
    TooDear,
    as_written,
    is_plain,
    is_robots_txt,
    query_form,
    rfc_path,
    rfc_patterns,
    unescaped,
    wild_match,
)
from gatekeeper.robots.rules import (
    DOT_SEGMENT,
    Listed,
    TextSource,
    octets_of,
    split_url,
)
from gatekeeper.speedups import SURELY_SHORT, lazy_pattern

QuickAnswer = Callable[[str], bool | None]
"""Takes what follows the authority in a URL, as written, beginning with `/`. True, False, or
None: ask again with the whole URL, which may be no URL at all."""

_LONG = SURELY_SHORT
"""Characters that are answered about; the reader of URLs knows their bound."""
_LISTED = b"*?$\n" + PLAIN.encode()
_KEPT = b"?" + PLAIN.encode()
"""What stands in a path's normal form as it came."""
_INNER_DOLLAR = lazy_pattern(r"\$(?!\n|\Z)")
# Finds what `parser.RULE` finds, faster, as it leaves comments to be cut.
_RULES = lazy_pattern(r"\n[ \t]*+(dis|)allow[ \t]*+:[ \t]*+(.*+)", re.IGNORECASE | re.ASCII)
_NEVER = " "
"""No text that is answered about holds it: the value of a rule that has no effect."""
_UNKNOWN: tuple[str, ...] = ("",)
"""Every path begins with it."""
_NOWHERE = "\n"
"""No URL begins with it."""
_MOST = 256
"""Rules up to which the longest that matches is found by trying each, from the longest on."""
_WORTH = 8
"""Questions about the deciding rule that cost about as much as compiling the rules."""
_EAGER_OCTETS = 16_384
"""Text beyond which a set is made ready before its first question."""
_EXPLAINING = 500_000
"""Steps that naming all the rules that match a path may take, beside looking at each."""


class LongestMatch:
    """RFC 9309: the longest match wins whatever the order, a tie allows (RFC-16 to RFC-19).

    The rules are read off the text when the first question comes, and kept as the file lists
    them, in a few tuples of strings, so that a file that is asked a handful of questions costs
    little more than its text. Most paths begin as no Disallow does, and hold no piece that one of
    those needs that begin with a star: they are allowed without a look at any rule, and most others
    are denied without one. For what is left the rules are put in the order of their length, of
    which the first that matches decides. Of a large text they are compiled, at once.
    """

    __slots__ = (
        *("_allowed", "_authority", "_clues", "_forbids", "_left", "_longer", "_ordered"),
        *("_patterns", "_pieces", "_plain", "_prefixes", "_queries", "_ready", "_roomy"),
        *("_short", "_source", "_strict", "_values", "spans"),
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
        self._short = -1
        """Of one that is answered about by `allows_url` itself."""
        self._left = _WORTH
        """Questions about the deciding rule until the rules are compiled."""
        self._ready: CompiledRules | None = None
        eager = source.size > _EAGER_OCTETS and sum([b - a + 64 for a, b in spans]) > _EAGER_OCTETS
        self._begin()
        if eager or not speedups.ON:
            found = [RULE.findall(source.lines, low, high) for low, high in spans]
            self._compile(found[0] if len(found) == 1 else [*chain.from_iterable(found)])
            self._source = None
            if speedups.ON:
                self._roomy = _LONG - 1

    def _begin(self) -> None:
        """What holds where every path is left to the compiled rules."""
        self._prefixes: tuple[str, ...] = ("/",)
        """A path that begins with one of them is matched by a Disallow."""
        self._clues: tuple[str, ...] = ()
        """What stands in each path that another Disallow matches ..."""
        self._patterns: tuple[str, ...] = ()
        """... and this Disallow; empty where it matches each path in which its clue stands."""
        self._values: tuple[str, ...] = ()
        """In normal form, in the order of the file."""
        self._forbids: tuple[str, ...] = ()
        """Of each the empty text if it allows; empty where none does."""
        self._allowed = _UNKNOWN
        """What a path begins with that is matched by a Disallow, and allowed."""
        self._plain: tuple[str, ...] = ()
        """Disallows that are prefixes, the longest first."""
        self._ordered: tuple[str, ...] = ()
        """The other rules, the longest first. Empty: not put in order yet ..."""
        self._pieces: tuple[str, ...] = ()
        """... what stands in each path that they match ..."""
        self._longer: tuple[int, ...] = ()
        """... and of an Allow how many of the prefixes are longer; of a Disallow -1."""
        self._queries = False
        """A rule has a `?`: a path with escapes may have to be compared in two forms (RFC-25)."""
        self._strict = True
        """A pattern may be found in what is escaped: a path is compared in its normal form."""

    def _list(self, source: TextSource) -> None:
        """Read the rules."""
        # Another thread may do the same, and ask as soon as it has: nothing is ever set but to what
        # it is in the end.
        forbids, values = _columns(source.lines, self.spans)
        joined = "\n".join(values)
        roomy, strict = _LONG - 1, False
        odd = joined.encode("latin-1").translate(None, _LISTED)
        if odd or ("$" in joined and _INNER_DOLLAR.search(joined)):
            joined = rfc_patterns(joined)
            values = joined.split("\n")
            strict = "%" in joined
        self._queries = "?" in joined
        if "?" in joined and strict and CHANGED.search(joined):  # a rule of two forms
            self._compile([*zip(forbids or repeat("s"), values, strict=False)])
        else:
            if "" in values:  # an empty pattern has no effect (RFC 9309 section 2.2.2, RFC-21)
                values = [value or _NEVER for value in values]
            self._values = plain = tuple(values)
            if forbids:
                self._forbids = tuple(forbids)
                plain = tuple(compress(values, forbids))
            else:
                self._allowed = (ROBOTS_TXT,)
            if "*" in joined or "$" in joined:
                flat = joined.count("*") + joined.count("$") <= compiled.FLAT_RULES
                roomy = min(roomy, compiled.PAIRS // len(joined)) if flat else 0
                strict = strict or LIKE_AN_ESCAPE.search(joined) is not None
                plain = self._take_wild(plain)
            self._prefixes = plain
        self._strict, self._roomy = strict, roomy
        self._short = -1 if strict else roomy
        self._source = None

    def _take_wild(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Take the patterns of rules that forbid; what is left is prefixes."""
        prefixes: list[str] = []
        patterns: list[str] = []
        clues: list[str] = []
        for value in values:
            if "*" not in value and value[-1] != "$":
                prefixes.append(value)
                continue
            head, star, rest = value.partition("*")
            rest = rest.rstrip("*")
            if star and not rest:
                prefixes.append(head or "/")
                continue
            anywhere = False
            if len(head) < 2:
                head = rest.removesuffix("$").rpartition("*")[2]
                anywhere = head == rest and (value[0] == "*" or (value[0] == "/" != head[:1]))
            patterns.append("" if anywhere else value)
            clues.append(head if star else head[:-1])
        self._patterns, self._clues = tuple(patterns), tuple(clues)
        return tuple(prefixes)

    def allows_url(self, url: str) -> bool:
        """The verdict for a URL, or a path. Raises InvalidURL for text that is neither."""
        path = url.removeprefix(self._authority)
        # `answer` gives the same; most URLs need no call of it.
        if len(path) <= self._short and (
            as_written(path)
            if COMPILED
            else " " not in path and "%" not in path and "/." not in path and path.isprintable()
        ):
            if path.startswith(self._prefixes):
                if path[0] == "/" and "#" not in path:
                    return path.startswith(self._allowed) and self._compare(path)
            elif path and path[0] == "/":
                for clue in self._clues:
                    if clue in path:
                        break
                else:
                    return True
                if "#" not in path:
                    return self._closer(path, clue)
        if path[:1] != "/":
            origin, path = split_url(url)
            if origin and url.startswith(origin + "/"):
                self._authority = origin
            return self.allows(path)
        verdict = self.answer(path)
        return self.allows(split_url(url)[1]) if verdict is None else verdict

    @property
    def quick_answer(self) -> QuickAnswer | None:
        """See `Policy.quick_answer`."""
        source = self._source
        if source is not None:
            self._list(source)
        return self.answer if self._roomy >= 0 else None

    def answer(self, path: str) -> bool | None:
        """The verdict about what follows the authority in a URL, as written, beginning with `/`.
        None: the whole URL has to be read first."""
        # Neither a fragment nor a character that would be escaped can make a path match a prefix
        # or a piece that it does not match as it stands: they hold plain octets alone.
        if (
            " " in path
            or not path.isprintable()
            or ("/." in path and DOT_SEGMENT.search(path))
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
        if path.startswith(self._prefixes):
            # What was found may stand in the fragment.
            return None if "#" in path else path.startswith(self._allowed) and self._compare(path)
        for clue in self._clues:
            if clue in path:
                return None if "#" in path else self._closer(path, clue)
        return True

    def _closer(self, path: str, first: str) -> bool:
        """`answer` for a path that has no fragment; `first`: the first of the clues in it."""
        clues = self._clues
        for place in range(clues.index(first), len(clues)):
            if clues[place] in path:
                pattern = self._patterns[place]
                if not pattern or wild_match(pattern, path):
                    return path.startswith(self._allowed) and self._compare(path)
        return True

    def _compare(self, path: str) -> bool:
        """The verdict about a path that some Disallow matches, and maybe an Allow; in its normal
        form, or in one in which that makes no difference."""
        ready = self._ready
        if ready is not None:
            return ready.decide(path) & 1 == 1
        if path == ROBOTS_TXT:
            return True
        if not self._ordered and self._forbids:
            opens = self._opens()
            if self._allowed is _UNKNOWN:
                heads = [value.partition("*")[0].removesuffix("$") for value in opens]
                self._allowed = (*dict.fromkeys(heads), ROBOTS_TXT)
                if not path.startswith(self._allowed):
                    return False
            if len(self._values) > _MOST:
                return self._compile_listed().decide(path) & 1 == 1
            self._order(opens)
        for place, piece in enumerate(self._pieces):
            if piece in path:
                rule = self._ordered[place]
                if path.startswith(rule) if rule is piece else wild_match(rule, path):
                    longer = self._longer[place]
                    return longer >= 0 and not path.startswith(self._plain[:longer])
        return False

    def _opens(self) -> list[str]:
        """The Allows. Where a Disallow matches, none decides that has fewer octets than each of
        these."""
        least = min(map(len, compress(self._values, self._forbids)), default=0)
        allows = compress(self._values, map(not_, self._forbids))
        return [value for value in allows if len(value) >= least]

    def _order(self, opens: list[str]) -> None:
        """Put the Allows, and the Disallows that are no prefixes, in the order of their length, of
        equal ones an Allow first: RFC 9309 section 2.2.2 (RFC-17, RFC-18). For each Allow say how
        many of the prefixes are longer."""
        denied = sorted(compress(self._values, self._forbids), key=len, reverse=True)
        others = {v: None for v in denied if "*" in v.rstrip("*") or v[-1] == "$"}
        plain = [value for value in denied if value not in others]
        lengths = [-len(value) for value in plain]
        known = {value: bisect_left(lengths, -len(value)) for value in opens}
        ordered = sorted([*opens, *others], key=len, reverse=True)
        # A prefix is its own piece.
        self._pieces = tuple([value.rstrip("*$").rpartition("*")[2] for value in ordered])
        self._longer = tuple([known.get(value, -1) for value in ordered])
        self._plain = tuple([value.rstrip("*") for value in plain])
        self._ordered = tuple(ordered)  # after all else: another thread may be here

    def _compile_listed(self) -> CompiledRules:
        return self._compile([*zip(self._forbids or repeat("s"), self._values, strict=False)])

    def _compile(self, found: list[tuple[str, str]]) -> CompiledRules:
        self._ready = ready = CompiledRules(found, robots_file=True)
        return ready

    def allows(self, path: str) -> bool:
        """The verdict alone, about a path with its query as `split_url` gives it."""
        source = self._source
        if source is not None:
            self._list(source)
        verdict = self.answer(path)
        return self.decide(path) & 1 == 1 if verdict is None else verdict

    def decide(self, path: str, origin: str = "") -> int:
        """The code of the deciding rule (see `rules`), or -1."""
        ready = self._ready
        if ready is not None:
            return ready.decide(path)
        if self._source is not None:
            self._list(self._source)
            return self.decide(path)
        if "%" in path or self._strict:
            path = rfc_path(path)
        # A rule with a `?` is compared with two forms of the path (RFC 9309 section 2.2.2, RFC-25).
        two = self._queries and "%" in path and query_form(path) != path
        self._left -= 1
        if len(path) > self._roomy or two or self._left < 0:
            return self._compile_listed().decide(path)
        if path.startswith(ROBOTS_TXT) and is_robots_txt(path):
            return ROBOTS_FILE
        longest, code = 0, -1
        for place, value in enumerate(self._values):
            # Of equal ones an Allow, of these the first.
            allows = bool(self._forbids) and not self._forbids[place]
            rank = len(value) * 2 + allows
            odd = "*" in value or value[-1] == "$"
            if rank > longest and (wild_match(value, path) if odd else path.startswith(value)):
                longest, code = rank, place * 2 + allows
        return code

    def matching(
        self,
        path: str,
        rules: list[Listed],
        origin: str = "",
    ) -> list[tuple[int, int]]:
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
        found.sort(key=lambda each: (-each[1], bool(rules[each[0]][0])))
        return found


def _columns(text: str, spans: Spans) -> tuple[list[str], list[str]]:
    """Of each rule in the spans whether it forbids, as text that is empty if it does not, and its
    value. The first is empty where all forbid, which is found in half of the time."""
    forbids: list[str] = []
    values: list[str] = []
    for low, high in spans:
        if forbids or ALLOW.search(text, low, high):
            found = _RULES.findall(text, low, high)
            forbids += ["s"] * (len(values) - len(forbids))
            forbids += ["s" if dis else "" for dis, _ in found]
            values += [value for _, value in found]
        else:
            values += DISALLOWED.findall(text, low, high)
    joined = "\n".join(values)
    if "#" in joined:
        values = [value.partition("#")[0] for value in values]
    if " " in joined or "\t" in joined:
        values = [value.rstrip(" \t") for value in values]
    return forbids, values
