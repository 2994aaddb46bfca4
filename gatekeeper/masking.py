"""Text of a URL for people and logs: nobody's secrets, no control characters, not too long.

Any text at all is masked, so nothing here relies on its being a URL.
"""

from __future__ import annotations

import re

__all__ = ["mask", "not_text", "printable"]

# `@`, what IDNA maps to it, and its escapes, however often they were escaped again.
_AT = r"(?:[@\ufe6b\uff20]|%(?:25)*+40)"
_SIGN = re.compile(_AT)
_START = re.compile(r"(?:(?:https?:|[a-z][a-z0-9+.\-]*+:(?=//))?[/\\]*+)", re.IGNORECASE)
# An authority in which nothing can be a password, and what may follow one.
_PLAIN = re.compile(
    r"https?://(?:[^\s/?#\\:@\[\]%\ufe6b\uff20]++|\[[0-9a-f:.]++\])(?::[0-9]*+)?(?:[/?#]|\Z)",
    re.IGNORECASE,
)
# Another URL's authority within a path or a query, escaped or not, to its last `@`.
_SLASH = r"%(?:25)*+2f"
_WITHIN = re.compile(rf"(//|{_SLASH}{_SLASH})(?:[^/?#\\%]|%(?!(?:25)*+2f))*{_AT}", re.IGNORECASE)
_QUERY = re.compile(r"([?#]).+\Z", re.DOTALL)


def mask(raw: str, *, query: bool = True, limit: int = 200) -> str:
    """The text for people and logs: credentials masked, controls escaped, cut to `limit`.

    Where the authority is a plain host and port, what follows it is shown, but for URLs within
    it that hold credentials. Of any other text everything up to its last `@` is masked: where
    the text is no URL, nobody can say where a password ends.

    With `query=False` the query is masked too, and the fragment (T11).

    >>> mask("https://ann:secret@example.com/a?token=1", query=False)
    'https://***@example.com/a?***'
    """
    shown = raw
    if _SIGN.search(raw):
        shown = _without_userinfo(raw)
    if not query:
        shown = _QUERY.sub(r"\1***", shown, count=1)
    return printable(shown, limit)


def _without_userinfo(raw: str) -> str:
    if plain := _PLAIN.match(raw):
        return raw[: plain.end()] + _WITHIN.sub(r"\1***@", raw[plain.end() :])
    start = _START.match(raw)
    end = 0
    for sign in _SIGN.finditer(raw):
        end = sign.end()
    return f"{raw[: start.end() if start else 0]}***@{raw[end:]}"


def printable(text: str, limit: int) -> str:
    """The text with what can't be printed escaped, cut to `limit` characters."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def not_text(url: object) -> TypeError:
    """For what is asked about as a URL and is no str; the other mistakes are InvalidURL."""
    kind = type(url).__name__
    return TypeError(f"url must be str, not {kind}" + ("; give str(url)" * (kind == "URL")))
