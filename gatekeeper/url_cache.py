"""From the text of a URL to the `yarl.URL` that aiohttp sends, without parsing each one anew.

yarl takes every text apart, quotes it and puts it together again, and works out host and port
for each URL. The pages of a host differ in their path alone, and most paths hold nothing that
would be quoted: for those it is enough to put the path behind an authority that was parsed
before. Behind the switch of `speedups`; without it each text is parsed by yarl.
"""

from __future__ import annotations

import re
from typing import Final

from yarl import URL

from gatekeeper import speedups
from gatekeeper.urls import make_room

__all__ = ["CachedAuthority", "UrlCache", "url_of"]

_ROOT = re.compile(r"https?://[a-z0-9.\-]+(?::[0-9]{1,5})?/")
# What yarl leaves as it is in a path; a query or a fragment is always parsed.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
_LONGEST: Final = 8_000
"""Characters of a text that is read from the cache; `urls` has its own bound."""
_MAX_AUTHORITIES: Final = 10_000


def url_of(text: str) -> URL:
    """`URL(text)`, with one kind of error.

    Raises ValueError for every text that yarl can't read.
    """
    try:
        return URL(text)
    except IndexError as error:  # yarl of `http://[a]@/`
        raise ValueError("this is no URL") from error  # without it: it may hold a password


class CachedAuthority:
    """Scheme, host and port that were parsed before."""

    __slots__ = ("origin", "root")

    def __init__(self, origin: str, root: URL) -> None:
        self.origin: str = origin
        """As the text has it, without the slash."""
        self.root: URL = root
        """The URL of its `/`: other URLs differ in what follows."""


_NONE = CachedAuthority("", URL())


class UrlCache:
    """Reads URLs as yarl does, faster where authority and path are plain.

    It also knows the last URL that it read so, with its parts: whoever meets that very object
    again need not take it apart. At most 10,000 authorities are kept.

    >>> cache = UrlCache()
    >>> for name in "ab":
    ...     url = cache.read(f"https://example.com/{name}")
    >>> url == URL("https://example.com/b")
    True
    >>> if cache.last is url:
    ...     assert (cache.authority.origin, cache.path) == ("https://example.com", "/b")
    """

    __slots__ = ("_authorities", "_on", "authority", "last", "path", "text")

    def __init__(self) -> None:
        self._on = speedups.ON
        self._authorities: dict[str, CachedAuthority] = {}
        self.last: URL | None = None
        """The last URL whose authority was met before and whose path is plain: `text`,
        `authority` and `path` are its own. Such a path is ASCII, and holds neither escapes nor
        dot segments nor a query."""
        self.text: str = ""
        self.authority: CachedAuthority = _NONE
        self.path: str = ""

    def read(self, text: str) -> URL:
        """`URL(text)`. Raises ValueError for text that is no URL."""
        cut = text.find("/", 8)  # behind `https://`
        authority = self._authorities.get(text[: cut + 1])  # without a slash: "", never kept
        if authority is None:
            return self._read_new(text, cut)
        path = text[cut:]
        if (
            not path.isascii()
            or path.encode().translate(None, _PLAIN)
            or "/." in path
            or len(path) > _LONGEST
        ):
            return url_of(text)
        self.last = url = authority.root.with_path(path, encoded=True)
        self.text = text
        self.authority = authority
        self.path = path
        return url

    def _read_new(self, text: str, cut: int) -> URL:
        """Have yarl parse it; an authority that yarl leaves as it is is kept."""
        url = url_of(text)
        root = text[: cut + 1]
        if self._on and _ROOT.fullmatch(root) and f"{url.scheme}://{url.raw_authority}/" == root:
            make_room(self._authorities, _MAX_AUTHORITIES)
            self._authorities[root] = CachedAuthority(text[:cut], url.with_path("/"))
        return url
