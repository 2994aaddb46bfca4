"""From the text of a URL to the `yarl.URL` that aiohttp sends, and back.

yarl takes every text apart anew, quotes it and puts it together again. The pages of a host
differ in their path alone, and most paths hold nothing to be quoted: for these it is enough
to put the path behind what yarl made of the authority.
"""

from __future__ import annotations

import re
from typing import Final

from yarl import URL

__all__ = ["Spelling", "url_of"]

_ROOT = re.compile(r"https?://[a-z0-9.\-]+(?::[0-9]{1,5})?/")
# What yarl leaves as it is in a path; a query or a fragment takes the long road.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
_MAX_AUTHORITIES: Final = 10_000


def url_of(text: str) -> URL:
    """`URL(text)`. Raises ValueError for every text that yarl can't read."""
    try:
        return URL(text)
    except IndexError as error:  # yarl of `http://[a]@/`
        raise ValueError(f"{text!r} is no URL") from error


class Spelling:
    """Reads URLs as yarl does, faster where they are plain; and knows the last one's text.

    >>> spelling = Spelling()
    >>> url = spelling.read("https://example.com/a")
    >>> url == URL("https://example.com/a"), spelling.text_of(url)
    (True, 'https://example.com/a')
    """

    __slots__ = ("_last", "_roots", "_text")

    def __init__(self) -> None:
        # One for each authority that was met: paths are put in the place of its slash.
        self._roots: dict[str, URL] = {}
        self._last: URL | None = None
        self._text = ""

    def read(self, text: str) -> URL:
        """`URL(text)`. Raises ValueError for what is none."""
        cut = text.find("/", 8)  # behind `https://`
        root = self._roots.get(text[: cut + 1])  # without a slash: the empty text, never known
        if root is None:
            return self._read_whole(text, cut)
        path = text[cut:]
        if not path.isascii() or path.encode().translate(None, _PLAIN) or "/." in path:
            return url_of(text)
        self._text = text
        self._last = url = root.with_path(path, encoded=True)
        return url

    def _read_whole(self, text: str, cut: int) -> URL:
        """The long road; an authority that yarl leaves as it is will be known again."""
        url = url_of(text)
        root = text[: cut + 1]
        if _ROOT.fullmatch(root) and f"{url.scheme}://{url.raw_authority}/" == root:
            if len(self._roots) >= _MAX_AUTHORITIES:
                self._roots.clear()
            self._roots[root] = URL(root)
        return url

    def text_of(self, url: URL) -> str:
        """`str(url)`."""
        return self._text if url is self._last else str(url)
