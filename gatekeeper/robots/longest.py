"""RFC 9309's own reading of a rule set: the longest match wins."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from gatekeeper.robots import normal
from gatekeeper.robots.glance import first_verdict, octets_of
from gatekeeper.robots.lines import RULE, Spans
from gatekeeper.robots.model import Dialect
from gatekeeper.robots.normal import ROBOTS_TXT
from gatekeeper.robots.pieces import COMPARED, Meter, TooDear
from gatekeeper.robots.prefixes import Compiled, Suspects, prefixes_only
from gatekeeper.robots.rulesets import Numbered, TextSource, split_url
from gatekeeper.robots.shapes import SortedRules
from gatekeeper.robots.wilds import WildRules
from gatekeeper.urls import SURELY_SHORT

__all__ = ["LongestMatch", "ready_rules"]

_DOT_SEGMENT = re.compile(r"/\.\.?(?:[/?]|\Z)").search
_MAKING_READY = threading.Lock()
"""One for all sets: it is held for microseconds, and once for each."""
_EAGER_OCTETS = 16_384
"""Text beyond which a set is made ready before its first question."""
_EXPLAINING = 500_000
"""Steps that naming all the rules that match a path may take, beside looking at each."""
_GLANCE = 256
"""Octets of a path beyond which it is, too: the work grows with the product of both."""


class LongestMatch:
    """RFC 9309: the longest match wins whatever the order, a tie allows (RFC-16 to RFC-19).

    A small set is made ready for its second question only: many a host is asked about one
    page, and one answer can be read off the text. Once it is ready it needs the text no more,
    and lets it be packed.
    """

    __slots__ = ("_asked", "_authority", "_ready", "_source", "spans")

    dialect = Dialect.RFC9309
    spans: Spans

    def __init__(self, source: TextSource, spans: Spans) -> None:
        self.spans = spans
        self._source: TextSource | None = source
        """Where the rules are read; None once they are ready."""
        self._ready: Compiled | None = None
        self._asked = False
        self._authority = ""
        if source.size > _EAGER_OCTETS and sum([hi - lo + 64 for lo, hi in spans]) > _EAGER_OCTETS:
            self._make_ready()

    def _make_ready(self) -> Compiled:
        """The set made ready, once, whoever else is asking."""
        with _MAKING_READY:
            source = self._source
            if source is not None:
                self._ready = compiled(source.lines, self.spans)
                self._source = None
        if source is not None:
            source.pack()
        ready = self._ready
        assert ready is not None  # noqa: S101 - it is what the lock waited for
        return ready

    def allows_url(self, url: str) -> bool:
        """The verdict for a URL, or a path. Raises InvalidURL for text that is neither."""
        # The authority of the question before was read already: what is left is the path.
        path = url.removeprefix(self._authority)
        if (
            path[:1] != "/"
            or "%" in path
            or "#" in path
            or " " in path
            or ("." in path and "/." in path and _DOT_SEGMENT(path))
            or not path.isprintable()
            or len(url) > SURELY_SHORT
        ):
            origin, path = split_url(url)
            if origin and url.startswith(origin + "/"):
                self._authority = origin
        ready = self._ready
        return self.allows(path) if ready is None else ready.allows(path)

    def allows(self, path: str) -> bool:
        """The verdict alone."""
        ready = self._ready
        if ready is not None:
            return ready.allows(path)
        source = self._source
        if source is None or self._asked:
            return self._make_ready().allows(path)
        self._asked = True
        path = normal.rfc_path(path)
        if len(path) > _GLANCE:
            return self._make_ready().allows(path)
        return first_verdict(source.lines, self.spans, path) or path == ROBOTS_TXT

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""
        return (self._ready or self._make_ready()).decide(path)

    @property
    def asker(self) -> Callable[[str], bool]:
        """`allows` by the shortest way there is at this moment; for whoever will ask often."""
        ready = self._ready
        return self.allows if ready is None else ready.allows

    @property
    def decider(self) -> Callable[[str], int]:
        """`decide` likewise."""
        return (self._ready or self._make_ready()).decide

    def suspects(self) -> Suspects | None:
        """What to look for in a path before asking about it; None: ask."""
        return (self._ready or self._make_ready()).suspects()

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first.

        In a file made so that this takes long, of those up to some place in the file.
        """
        plain = normal.rfc_path(path)
        query = normal.query_form(plain)
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


def compiled(text: str, spans: Spans) -> Compiled:
    """The rules that stand in the spans, made ready to be asked."""
    found: list[tuple[str, str]] = []
    for low, high in spans:
        found += RULE.findall(text, low, high)
    return ready_rules(found)


def ready_rules(found: list[tuple[str, str]]) -> Compiled:
    """Rules made ready: of each whether it is a `dis`allow, and its value."""
    rules = SortedRules(found)
    return prefixes_only(rules) or WildRules(rules)
