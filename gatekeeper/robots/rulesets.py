"""Rule sets: the rules that one agent obeys, made ready to be asked, a class a reading.

No rule is an object here. Rules are numbered as they stand in the text, and a set keeps its
patterns and what it needs to choose among them. `decide` gives a *code*: the number of the
deciding rule times two, plus one if it allows; or -1, which allows, where no rule matches; or
DENIED; or ROBOTS_FILE, which allows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots.lines import RULE, Spans, value_of
from gatekeeper.robots.model import Dialect
from gatekeeper.urls import SURELY_SHORT

__all__ = [
    "DENIED",
    "ROBOTS_FILE",
    "Numbered",
    "RuleSet",
    "TextSource",
    "lines_in",
    "rules_in",
    "split_url",
]

DENIED = -2
"""A code: denied, but by no line of the file."""
ROBOTS_FILE = -3
"""A code: the path is `/robots.txt`, which may always be asked for (RFC-20, R96-16, V2-34)."""
_BLANKS = frozenset(" \t")


class TextSource(Protocol):
    """Where a rule set finds its text, and tells that it has read it: a `RobotsTxt`."""

    @property
    def size(self) -> int:
        """Octets of the file."""

    @property
    def lines(self) -> str:
        """The text that spans speak of."""

    def pack(self) -> None:
        """The text will hardly be needed any more."""


class Numbered(NamedTuple):
    """An Allow or Disallow line of a set; its number is its place."""

    allow: bool
    value: str


class RuleSet(Protocol):
    """What a `Policy` asks. Paths begin with `/` and carry their query."""

    @property
    def dialect(self) -> Dialect:
        """The one that these rules are read by."""

    @property
    def spans(self) -> Spans:
        """Where the rules stand in the text."""

    def allows(self, path: str) -> bool:
        """The verdict alone."""

    def decide(self, path: str) -> int:
        """The code of the deciding rule, or -1."""

    def matching(self, path: str, rules: list[Numbered]) -> list[tuple[int, int]]:
        """Number and length of every rule that matches, the deciding one first.

        `rules` is what `rules_in` gives for the text that the set was made of.
        """


def rules_in(text: str, spans: Spans, *, v2: bool = False) -> list[Numbered]:
    """Each Allow and Disallow line of the spans."""
    return [Numbered(not dis, value) for dis, value in lines_in(text, spans, v2=v2)]


def lines_in(text: str, spans: Spans, *, v2: bool = False) -> list[tuple[str, str]]:
    """The same: whether each is a `dis`allow, and its value."""
    if not v2 or "#" not in text:
        return [
            (dis, value.rstrip(" \t") if value[-1:] in _BLANKS else value)
            for low, high in spans
            for dis, value in RULE.findall(text, low, high)
        ]
    rules = []
    for low, high in spans:
        for found in RULE.finditer(text, low, high):
            # RULE cuts comments the RFC's way; here a `#` may belong to the value (V2-03).
            end = text.find("\n", found.end(), high)
            rest = text[found.start(2) - 1 : end if end >= 0 else high].removeprefix(":")
            rules.append((found[1] or "", value_of(rest, v2=True)))
    return rules


def split_url(url: str) -> tuple[str, str]:
    """Origin, if there is one, and path with query. A path alone is read as in a URL.

    Raises InvalidURL for text that is neither, and for any that is too long to be sent.
    """
    if url[:1] != "/":
        try:
            return urls.split(url)
        except InvalidURL:
            return "", urls.path_of(url)  # the host alone may be what is wrong with it
    if len(url) > SURELY_SHORT or "#" in url or "/." in url or "/%2" in url:
        return "", urls.split("http://a" + url)[1]
    return "", url
