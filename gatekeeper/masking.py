"""Text of a URL for people and logs: nobody's secrets, no control characters, not too long.

Any text at all is masked, so nothing here relies on its being a URL.
"""

from __future__ import annotations

import re

__all__ = ["mask", "not_text", "printable"]

_AUTHORITY_END = re.compile(r"[/?#\\]")
_NO_PORT = re.compile(r":[0-9]*[^0-9]")
_QUERY = re.compile(r"([?#]).+\Z", re.DOTALL)


def mask(raw: str, *, query: bool = True, limit: int = 200) -> str:
    """The text for people and logs: credentials masked, controls escaped, cut to `limit`.

    With `query=False` the query is masked too, and the fragment (T11).

    >>> mask("https://ann:secret@example.com/a?token=1", query=False)
    'https://***@example.com/a?***'
    """
    start = raw.find("//") + 2 if "//" in raw else 0
    after = _AUTHORITY_END.search(raw, start)
    end = after.start() if after else len(raw)
    at = raw.rfind("@", start, end)
    if at < 0 and _NO_PORT.search(raw, max(start, raw.rfind("]", start, end)), end):
        at = raw.rfind("@", end)  # `user:pa/ss@host`: no URL, but still somebody's secret
    shown = raw if at < 0 else f"{raw[:start]}***{raw[at:]}"
    if not query:
        shown = _QUERY.sub(r"\1***", shown, count=1)
    return printable(shown, limit)


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
