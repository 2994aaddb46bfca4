"""From whatever a robot calls itself to the product token that groups are chosen by."""

from __future__ import annotations

import re
from itertools import pairwise

__all__ = ["product_token"]

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
