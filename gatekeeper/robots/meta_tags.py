"""Meta elements at the beginning of a page, such as `<meta name="robots" content="noindex">`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from html.parser import HTMLParser

MAX_HTML = 65_536
"""Octets of a page that are read; its head is at the beginning."""
_MAX_TAG = 2_048
"""Characters after the last name that are read, for the rest of its tag."""


def meta_contents(html: bytes | str, names: Iterable[str]) -> list[str]:
    """Return the contents of the meta elements with one of these names (in lower case), in order.

    It never raises, and takes time in proportion to the 64 KiB that it reads.

    >>> meta_contents(b'<!doctype html><META NAME=Robots content="noindex, noai">', ["robots"])
    ['noindex, noai']
    """
    wanted = frozenset(names)
    text = _text(html)
    # Most pages have none, and the others have them at the beginning: the tokenizer takes ten
    # milliseconds for 64 KiB.
    alternatives = "|".join(map(re.escape, sorted(wanted)))
    named = rf"name\s*+=\s*+[\"']?\s*+(?:{alternatives})"
    last = max((found.end() for found in re.finditer(named, text.lower())), default=None)
    if last is None:
        return []
    reader = _MetaReader(wanted)
    # Not closed afterwards: the text may end in the middle of a tag or a comment, and some versions
    # of Python would then look for the end of each `<!--` before it, in quadratic time.
    with suppress(AssertionError, ValueError):  # what is too broken is read no further
        reader.feed(text[: last + _MAX_TAG])
    return reader.found


def _text(html: bytes | str) -> str:
    """Decode the beginning of a page. Names and rules are ASCII, so any superset of it will do."""
    start = html[:MAX_HTML]
    if isinstance(start, str):
        return start
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return start.decode("utf-16", "replace")
    return start.decode("latin-1")


class _MetaReader(HTMLParser):
    """Collects the contents of meta elements."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self._names = names
        self.found: list[str] = []

    def parse_html_declaration(self, i: int) -> int:
        """Skip a declaration. `<![...>` is a comment, as in browsers; Python raises for some."""
        if self.rawdata.startswith("<![", i):
            return self.rawdata.find(">", i) + 1 or -1
        return super().parse_html_declaration(i)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at a start tag."""
        if tag == "meta":
            values: dict[str, str] = {}
            for name, value in attrs:
                values.setdefault(name, value or "")  # of two equal names the first counts
            if values.get("name", "").strip().lower() in self._names:
                self.found.append(values.get("content", ""))
