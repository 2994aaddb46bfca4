"""From the text of a URL to the `yarl.URL` that aiohttp sends, and back.

yarl takes every text apart anew, quotes it and puts it together again, and asks every URL
for its host and port. The pages of a host differ in their path alone, and most paths hold
nothing to be quoted: for these it is enough to put the path behind what yarl made of the
authority.
"""

from __future__ import annotations

import re
from typing import Any, Final

from yarl import URL

__all__ = ["Place", "Spelling", "url_of"]

_ROOT = re.compile(r"https?://[a-z0-9.\-]+(?::[0-9]{1,5})?/")
# What yarl leaves as it is in a path; a query or a fragment takes the long road.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
_LONGEST: Final = 8_000
"""Characters of a text that takes the short road; readers of URLs know their own bounds."""
_MAX_AUTHORITIES: Final = 10_000

# What yarl works out of scheme and authority, once for each URL object.
_OF_AUTHORITY = (
    *("absolute", "raw_authority", "raw_user", "user", "raw_password", "password"),
    *("raw_host", "host", "host_subcomponent", "host_port_subcomponent", "explicit_port", "port"),
)


def url_of(text: str) -> URL:
    """`URL(text)`. Raises ValueError for every text that yarl can't read."""
    try:
        return URL(text)
    except IndexError as error:  # yarl of `http://[a]@/`
        raise ValueError("this is no URL") from error  # without it: it may hold a password


class Place:
    """Where a URL leads, as far as its scheme and authority say it."""

    __slots__ = ("known", "origin", "root", "scheme_and_authority")

    def __init__(self, origin: str, root: URL) -> None:
        self.origin = origin
        """As the text has it, without the slash."""
        self.root = root
        """Its `/`: other URLs differ in what follows."""
        self.scheme_and_authority = root.scheme, root.raw_authority
        self.known = _worked_out(root)
        """What every URL of this place has in common, for yarl's own memory of it."""


def _worked_out(url: URL) -> dict[str, Any]:
    """What yarl remembers of the URL's authority; nothing, if it does so in another way."""
    try:
        found = {name: getattr(url, name) for name in _OF_AUTHORITY}
    except (AttributeError, ValueError):  # another yarl; a host that says to be IDNA and is not
        return {}
    memory = getattr(url, "_cache", None)
    if isinstance(memory, dict) and all(
        name in memory and memory[name] is value for name, value in found.items()
    ):
        return found
    return {}


_NOWHERE = Place("", URL())


class Spelling:
    """Reads URLs as yarl does, faster where they are plain; and knows the last of those.

    >>> spelling = Spelling()
    >>> for name in "ab":
    ...     url = spelling.read(f"https://example.com/{name}")
    >>> url == URL("https://example.com/b"), spelling.last is url
    (True, True)
    >>> spelling.text, spelling.place.origin, spelling.path
    ('https://example.com/b', 'https://example.com', '/b')
    """

    __slots__ = ("_places", "last", "path", "place", "text")

    def __init__(self) -> None:
        # One for each authority that was met: paths are put in the place of its slash.
        self._places: dict[str, Place] = {}
        self.last: URL | None = None
        """The last URL that was read and whose path is plain, at a place that was met before:
        then `text`, `place` and `path` are its own. Such a path is ASCII, and holds neither
        escapes nor dot segments nor a query."""
        self.text = ""
        self.place = _NOWHERE
        self.path = ""

    def read(self, text: str) -> URL:
        """`URL(text)`. Raises ValueError for what is none."""
        cut = text.find("/", 8)  # behind `https://`
        place = self._places.get(text[: cut + 1])  # without a slash: the empty text, never known
        if place is None:
            return self._read_whole(text, cut)
        path = text[cut:]
        if (
            not path.isascii()
            or path.encode().translate(None, _PLAIN)
            or "/." in path
            or len(path) > _LONGEST
        ):
            return url_of(text)
        self.last = url = place.root.with_path(path, encoded=True)
        if place.known:
            url._cache.update(place.known)  # type: ignore[typeddict-item]
        self.text = text
        self.place = place
        self.path = path
        return url

    def _read_whole(self, text: str, cut: int) -> URL:
        """The long road; an authority that yarl leaves as it is will be known again."""
        url = url_of(text)
        root = text[: cut + 1]
        if _ROOT.fullmatch(root) and f"{url.scheme}://{url.raw_authority}/" == root:
            if len(self._places) >= _MAX_AUTHORITIES:
                self._places.clear()
            self._places[root] = Place(text[:cut], url.with_path("/"))
        return url
