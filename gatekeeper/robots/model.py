"""What an answer is made of: `Rule`, `Candidate`, `Match`, `Group`; and the product token."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gatekeeper.robots.policy import Policy
else:
    Policy = Any  # it imports this module; `help` and `inspect.signature` look the name up

__all__ = [
    "Candidate",
    "Dialect",
    "Group",
    "Match",
    "Rule",
    "Severity",
    "product_token",
]


class Dialect(StrEnum):
    """How a rule set is read (docs/standards.md)."""

    RFC9309 = "rfc9309"
    """Whole tokens, merged groups, longest match, `*` and a final `$`."""
    R1994 = "1994"
    """Records between blank lines, Disallow only, plain prefixes."""
    R1996 = "1996"
    """The same with Allow; the first rule in file order wins."""
    V2 = "2.0"
    """Robot-version 2.0: shell patterns anchored at both ends, file order."""


class Severity(StrEnum):
    """How much a finding about the file matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Rule(msgspec.Struct, frozen=True):
    """One line of a robots.txt, as it stands in the file.

    `line` counts from 1; `field` and `value` are the two sides of the colon without
    blanks and comments; `text` is the line without its line end. Octets that are no
    UTF-8 show as U+FFFD.
    """

    line: int
    field: str
    value: str
    text: str


class Candidate(Rule, frozen=True):
    """A rule that matched, with the number of octets that it wins or loses by (RFC-17)."""

    length: int


class Group(msgspec.Struct, frozen=True):
    """One group (RFC 9309) or record (1994, 1996, 2.0) of the file, as its dialect sees it."""

    line: int
    """Where its first user-agent line stands."""
    agents: tuple[str, ...]
    """The values of its user-agent lines, as written."""
    rules: tuple[Rule, ...]
    """Its Allow and Disallow lines, in file order."""
    records: tuple[Rule, ...]
    """Every other line with a colon in it that stands in the group."""
    version: str | None = None
    """What a well-placed Robot-version line says (V2-06)."""
    dialect: Dialect = Dialect.RFC9309
    """The dialect that it declares, or that was forced."""


class Match(msgspec.Struct, frozen=True):
    """The answer of a `Policy` about one URL, with its reason."""

    allowed: bool
    rule: Rule | None
    """The rule that decided; None where no rule matched."""
    dialect: Dialect
    """The dialect that the rule set declares, or that was forced."""
    conflict: bool
    """The declared dialect and RFC 9309 disagree about this URL (DIA-03)."""
    path: str
    """The path and query that was asked about."""
    policy: Policy
    origin: str = ""
    """Where the path was asked about, if that is known."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every rule that matched, the deciding one first. Worked out when asked for."""
        return self.policy.candidates(self.path, self.origin)


_PRODUCT = re.compile(r"[^\s/;,()]+")
_VERSIONED = re.compile(r"[^\s/:]+/[0-9]")
_COMMENT = re.compile(r"\(([^()]*)\)?")

# Engines and browsers that robots claim to be compatible with.
_DISGUISES = {
    "applewebkit",
    "chrome",
    "compatible",
    "gecko",
    "khtml",
    "like",
    "mobile",
    "mozilla",
    "safari",
    "version",
}


def product_token(user_agent: str) -> str:
    """The product that a User-Agent header, `token/version` or a token speaks of.

    A header that begins with its own product is called by that. One that begins with Mozilla
    is somebody in disguise: its product is the one behind the word `compatible` in a comment,
    else the first one, comments included, that is no engine and no browser, else the first
    that is not Mozilla.

    >>> product_token("ExampleBot/2.1 (+https://example.com/bot)"), product_token("ExampleBot")
    ('ExampleBot', 'ExampleBot')
    >>> product_token("Mozilla/5.0 (compatible; ExampleBot/2.1; +https://example.com/bot)")
    'ExampleBot'
    """
    text = user_agent.strip()
    first = _PRODUCT.match(text)
    if first is not None and first[0] == user_agent:
        return user_agent  # a token already, as it mostly is
    if first is None or first[0].lower() != "mozilla":
        return first[0] if first else ""
    outside = _COMMENT.sub(" ", text)
    items = [item.strip() for comment in _COMMENT.findall(text) for item in comment.split(";")]
    for before, item in pairwise(items):
        if before.lower() == "compatible" and (found := _PRODUCT.match(item)):
            return found[0]
    # In a comment only what carries a version is a product: `Linux x86_64` is none.
    versioned = [item for item in items if _VERSIONED.match(item)]
    products = [_name(word) for word in outside.split()[1:] + versioned]
    products = [name for name in products if name]
    own = [name for name in products if name.lower() not in _DISGUISES]
    return (own or products or [first[0]])[0]


def _name(word: str) -> str:
    found = _PRODUCT.match(word)
    return found[0] if found else ""
