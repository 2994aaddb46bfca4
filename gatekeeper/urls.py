"""Parse URLs to `Target`s, and format them for people and logs.

There are two ways to the same result. The complete one rejects malformed text, has yarl parse the
authority, and converts the path to the form in which it is sent. The fast one handles plain text
whose authority was seen before or can be read in only one way. `parse` and `split` take the fast
way if they can; a test compares the two.

No other URL parser may be used anywhere: parsers disagree about `①②⑦.0.0.1`, and if a check and a
connection use different parsers, the check is void.

The path keeps the escapes with which it was written (`%26` is not `&`, RFC 9309 section 2.2.2,
RFC-25). Code that sends a target with aiohttp must therefore pass `yarl.URL(target.url,
encoded=True)`; otherwise yarl decodes some of them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from gatekeeper.errors import InvalidURL

if TYPE_CHECKING:
    from yarl import URL


MAX_URL = 65_536
"""Maximum number of characters of a URL, both as written and as sent. Servers reject request lines
longer than 8 to 64 KiB, so nothing longer can be fetched, and the cost of matching grows with the
length, which a site's page chooses."""

MAX_PATH = MAX_URL - len("http://a")
"""Maximum number of characters of a path with its query, as sent: no URL has room for more."""

ALWAYS_SENDABLE_LENGTH = MAX_PATH // 12
"""A text of at most so many characters can't exceed the limit of a URL by percent-encoding."""

MAX_AUTHORITIES = 50_000
_MAX_AUTHORITY = 1_000
"""Maximum number of characters of an authority. A name has at most 253, and some more when escaped
by IDNA; the cost of mapping it is more than linear."""

_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65_535

_NO_HOST = "no host; write http://host/path"
_UNREADABLE = "brackets, a backslash or a look-alike delimiter in the host"

# Octets that are sent as written (RFC 3986: unreserved, sub-delims, ":@/?"), without `%`.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/?"

# C0, DEL, C1, the two Unicode line ends, and lone surrogates. yarl silently drops tab, CR and LF,
# so that two parsers of one text could see two URLs.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONE = r"%(?![0-9A-Fa-f]{2})"
_LONE_PERCENT = re.compile(_LONE)
_UNSENDABLE = re.compile(rf"{_LONE}|[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%]+")
_MAYBE_DOTS = re.compile(r"/(?:\.|%2[eE])")
_DOT_SEGMENT = re.compile(r"/\.\.?(?:[/?#]|\Z)")
_PORT = re.compile(r"[0-9]{0,5}\Z")  # yarl uses int(), which accepts `:+80` and `:０８０`
_NOT_A_NAME = re.compile(r"[^a-z0-9\-._~!$&'()*+,;=]")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_LABEL_ENDS = re.compile("[.\u3002\uff0e\uff61]")
_HALF_MAPPED = re.compile(r"[xX][nN]--.*[^\x00-\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_WHOLE_AUTHORITY = re.compile(r"[A-Za-z]+://[^/?#@]+/\Z")
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_QUAD = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_DOTTED_QUAD = re.compile(rf"{_QUAD}\Z")
# A last label that begins with a letter is not a number. The expression does not backtrack.
_PLAIN_AUTHORITY = re.compile(
    r"(https?)://((?>(?:[a-z0-9_-]++\.)*)[a-z][a-z0-9_-]*+|"
    rf"{_QUAD})(?::([0-9]{{1,5}}))?/"
)


class Target(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A URL as the gate sees it: an origin, and a path with its query.

    >>> parse("HTTPS://Example.COM:443/a/../b?x=1#top").url
    'https://example.com/b?x=1'
    """

    scheme: str
    """`http` or `https`."""
    host: str
    """A-labels in lower case without the root dot, or an address without brackets."""
    port: int
    """The port to connect to: the scheme's default if the text has none."""
    origin: str
    """The key of a robots.txt (URL-01): without the default port, with brackets around an IPv6
    address."""
    path: str
    """Path and query as sent: dot segments resolved, fragment dropped, octets that cannot be sent
    escaped, the `?` of an empty query included (URL-04). Begins with `/`."""
    userinfo: bool = False
    """Whether the text contained credentials. They are dropped here; the Guard refuses the URL."""

    @property
    def url(self) -> str:
        """The whole URL, without credentials and fragment."""
        return self.origin + self.path


def parse(raw: str) -> Target:
    """Parse a URL. Raises InvalidURL for text that is not an http or https URL.

    Only malformed text is rejected here. Which names, ports and addresses may be visited is decided
    by the Guard.
    """
    found = _parse_plain(raw)
    if found is None:
        return _parse_whole(raw)
    place, path = found
    return replace(place, path=path)


def _parse_whole(raw: str) -> Target:
    """Parse a URL completely, and remember its authority for the fast way."""
    url = _parse_with_yarl(raw)
    credentials, at, hostport = url.raw_authority.rpartition("@")
    host, port = _authority(raw, url.scheme, hostport)
    path = _path(url, raw)
    target = Target(
        scheme=url.scheme,
        host=host,
        port=port,
        origin=_origin_of(url.scheme, bracketed(host), port),
        path=path,
        userinfo=bool(credentials or at),
    )
    written = raw[: raw.find("/", 8) + 1]
    # Only an authority that ends at this slash and contains no credentials may be reused.
    if _WHOLE_AUTHORITY.match(written):
        _remember(written, replace(target, path="/"))
    return target


def _origin_of(scheme: str, bracketed: str, port: int) -> str:
    return f"{scheme}://{bracketed}" if port == _PORTS[scheme] else f"{scheme}://{bracketed}:{port}"


def join(base: Target, reference: str) -> Target:
    """Resolve a reference, such as a `Location`, against `base`. Raises InvalidURL.

    >>> join(parse("https://example.com/a/b"), "../robots.txt").url
    'https://example.com/robots.txt'
    """
    if reference[:1] == " " or reference[-1:] == " ":
        _refuse_text(reference)  # `parse` finds other defects in the joined URL
    named = _SCHEME.match(reference)
    # The base's own scheme without an authority is ignored, as browsers do and RFC 3986 section
    # 5.2.2 permits.
    if named and (named[1].lower() != base.scheme or reference.startswith("//", named.end())):
        return parse(reference)
    relative = reference[named.end() :] if named else reference
    if relative.startswith("//"):
        return parse(f"{base.scheme}:{relative}")
    if relative.startswith("/"):
        return parse(base.origin + relative)
    if not relative or relative.startswith("#"):
        return parse(base.url)
    path = base.path.partition("?")[0]
    if not relative.startswith("?"):
        path = path[: path.rindex("/") + 1]
    return parse(base.origin + path + relative)


def redirected(url: str, location: str) -> str:
    """Return the text of the URL to which a Location found at `url` leads. Raises InvalidURL.

    Credentials in the Location are included, because the guard has to see them; `join` drops them.

    >>> redirected("https://example.com/a", "//user:pass@b.test/")
    'https://user:pass@b.test/'
    """
    location = location.strip(" \t")
    if _SCHEME.match(location):  # it must be complete: `http:` alone is not a URL
        parse(location)
        return location
    at = parse(url)
    if location.startswith("//"):
        return redirected(url, f"{at.scheme}:{location}")
    return join(at, location).url


def path_of(raw: str) -> str:
    """Return path and query as `parse` does, even for an invalid host. Raises InvalidURL.

    For robots.txt rules, which apply to the paths of any URL.

    >>> path_of("http://no%20host.example/a")
    '/a'
    """
    url = _parse_with_yarl(raw)
    if not url.raw_authority:
        raise _invalid(raw, _NO_HOST)
    return _path(url, raw)


def sendable(url: URL) -> str:
    """Return the text of a URL that a session is about to send, for `parse` and `split`.

    A URL that was built with `encoded=True` may lead to another host than its text shows, or end
    the request line early. Raises InvalidURL if the host to which yarl would connect differs from
    the one parsed here, or if the request line would contain a blank.

    >>> from yarl import URL
    >>> sendable(URL("https://example.com/a%20b"))
    'https://example.com/a%20b'
    """
    try:
        raw, dialled, requested = str(url), url.raw_host or "", url.raw_path_qs
    except (ValueError, IndexError) as error:
        written = f"{url.scheme}://{url.raw_authority}{url.raw_path}"
        raise _invalid(written, _UNREADABLE) from error
    host = host_of(split(raw)[0])
    if dialled != host:  # unless it means the same to any resolver
        normal = _ipv6(raw, dialled) if ":" in dialled else dialled.lower().removesuffix(".")
        if normal != host:
            raise _invalid(raw, f"it would be sent to another host, {printable(dialled, 120)!r}")
    if " " in requested:
        raise _invalid(raw, "a blank in the path; escape it as %20")
    return raw


def split(raw: str) -> tuple[str, str]:
    """Return origin and path-and-query as `parse` does, but faster. Raises InvalidURL.

    >>> split("https://example.com/a?b")
    ('https://example.com', '/a?b')
    """
    found = _parse_plain(raw)
    if found is not None:
        return found[0].origin, found[1]
    target = _parse_whole(raw)
    return target.origin, target.path


def split_ordinary(raw: str) -> tuple[str, str] | None:
    """Return the result of `split`, or None for text that only `parse` can handle.

    For hot paths that treat unusual text separately. The result is None for text with credentials,
    dot segments, characters to escape, or a new authority with an uncommon spelling.
    """
    found = _parse_plain(raw)
    return None if found is None else (found[0].origin, found[1])


def is_sent_as_written(path: str) -> bool:
    """Return True if the text after an authority, from the slash on, equals the path that `split`
    returns.

    False means that it may or may not be equal. The length is not checked.
    """
    if not path.isascii() or ("/." in path and _DOT_SEGMENT.search(path)):
        return False
    # Removing all plain octets in C is faster than searching for another one.
    special = path.encode().translate(None, _PLAIN)
    return not special or not (
        special.strip(b"%") or _LONE_PERCENT.search(path) or _MAYBE_DOTS.search(path)
    )


def bracketed(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def usual_origins(host: str) -> tuple[str, str]:
    """Return the origins of a host at the default ports, https first."""
    name = bracketed(host)
    return f"https://{name}", f"http://{name}"


def host_of(origin: str) -> str:
    """Return the host of an origin in the form of `Target.origin`; an IPv6 address without
    brackets.

    >>> host_of("https://example.com:8443"), host_of("http://[::1]")
    ('example.com', '::1')
    """
    hostport = origin.partition("//")[2]
    if hostport.startswith("["):
        return hostport[1:].partition("]")[0]
    return hostport.partition(":")[0]


# Targets of the authorities that were parsed, as written: `HTTPS://Example.com/`. The oldest are
# evicted when the cache is full, at a cost of one parse per authority. Evicting the least recently
# used would need a write for every question. The garbage collector has to traverse none of the
# entries.
_seen: dict[str, Target] = {}
is_known_authority: Callable[[object], bool] = _seen.__contains__
"""Whether a text from the scheme to the slash after the authority is one that was parsed."""


def _parse_plain(raw: str) -> tuple[Target, str] | None:
    """Return a target with the authority, and the path; None for text that only `_parse_whole` can
    handle."""
    try:
        end = raw.find("/", 8)  # 8: after `http://a` and `https://`
    except (AttributeError, TypeError):
        raise not_text(raw) from None
    written = raw[: end + 1]  # without a slash: "", never a key
    place = _seen.get(written) or _parse_new_authority(written)
    if place is None or len(raw) > MAX_URL:
        return None
    path = raw[end:]
    return (place, path) if is_sent_as_written(path) else None


def _parse_new_authority(written: str) -> Target | None:
    """Parse an authority that was not seen before, including its slash, if its spelling is common.

    These are names of lower-case letters, digits, hyphens and underscores, and canonical dotted
    quads, which every URL parser leaves unchanged. Return None for any other.
    """
    found = _PLAIN_AUTHORITY.fullmatch(written) if len(written) < _MAX_AUTHORITY else None
    if found is None:
        return None
    scheme, host, digits = found.groups()
    port = int(digits) if digits else _PORTS[scheme]
    if port > _MAX_PORT:
        return None
    origin = _origin_of(scheme, host, port)
    place = Target(scheme=scheme, host=host, port=port, origin=origin, path="/")
    return _remember(written, place)


def _remember(written: str, place: Target) -> Target:
    make_room(_seen, MAX_AUTHORITIES)
    _seen[written] = place
    return place


def make_room(known: dict[Any, Any], most: int) -> None:
    """Evict the oldest entries of a cache if it holds `most` or more.

    A 64th is evicted at a time: finding the first key of a dictionary skips all deleted ones before
    it, so evicting one by one would take quadratic time. Evicting all would stop the loop for long.
    """
    if len(known) >= most:
        for key in [*islice(known, len(known) // 64 + 1)]:
            del known[key]


def _parse_with_yarl(raw: str) -> URL:
    """Split the text into its parts, all unchanged."""
    from yarl import URL  # noqa: PLC0415 - ordinary URLs are parsed without it

    _refuse_text(raw)
    try:
        url = URL(raw, encoded=True)
    except (ValueError, IndexError) as error:  # IndexError: yarl of `http://[a]@/`
        raise _invalid(raw, _UNREADABLE) from error
    if url.scheme not in _PORTS:  # URL-07
        raise _invalid(raw, "not an http or https URL; write it out with its scheme")
    return url


def _refuse_text(raw: str) -> None:
    if len(raw) > MAX_URL:
        raise _invalid(raw, f"longer than {MAX_URL} characters")
    if found := _FORBIDDEN.search(raw):
        if found[0] >= "\ud800":
            raise _invalid(raw, "is not UTF-8, or holds half of a character; write it in UTF-8")
        raise _invalid(raw, f"holds the control character {found[0]!a}; escape or drop it")
    if raw[:1] == " " or raw[-1:] == " ":
        raise _invalid(raw, "begins or ends with a blank; strip it")


def _authority(raw: str, scheme: str, hostport: str) -> tuple[str, int]:
    """Return host and port to connect to. Only the mapped host is checked, never the one as
    written."""
    name, colon, port = hostport.rpartition("]")[2].partition(":")
    if "%" in hostport:  # parsers disagree about escapes and IPv6 zones
        raise _invalid(raw, "a '%' in the host; write the name itself")
    if len(hostport) > _MAX_AUTHORITY:
        raise _invalid(raw, "the host is longer than any name")
    if colon and not _PORT.match(port):
        raise _invalid(raw, "the port is not a number of at most five digits")
    if port and int(port) > _MAX_PORT:
        raise _invalid(raw, f"there is no port {int(port)}; {_MAX_PORT} is the last")
    from yarl import URL  # noqa: PLC0415

    try:
        url = URL(f"{scheme}://{hostport}")
    except (ValueError, IndexError) as error:
        raise _invalid(raw, f"the host can't be read: {printable(str(error), 120)}") from error
    host = (url.raw_host or "").lower()
    if hostport.startswith("["):
        if name or ":" not in host:
            raise _invalid(raw, "brackets hold an IPv6 address, nothing else")
        return _ipv6(raw, host), url.port or 0
    return _name(raw, hostport, host), url.port or 0


def _ipv6(raw: str, host: str) -> str:
    try:
        text = ipaddress.IPv6Address(host).compressed
    except ValueError as error:
        raise _invalid(raw, "not an IPv6 address in the brackets") from error
    if "." not in text:
        return text
    # Python 3.13 formats ::ffff:127.0.0.1, earlier versions ::ffff:7f00:1. A key that is written to
    # disk must not change with an upgrade: hexadecimal, as the WHATWG serialises it.
    head, _, quad = text.rpartition(":")
    number = int(ipaddress.IPv4Address(quad))
    return f"{head}:{number >> 16:x}:{number & 0xFFFF:x}"


def _name(raw: str, written: str, mapped: str) -> str:
    """Return the mapped name without its root dot (URL-05). Raises InvalidURL if it is not a
    name."""
    host = mapped.removesuffix(".")
    if not host:
        raise _invalid(raw, _NO_HOST)
    if host.startswith(".") or host.endswith(".") or ".." in host:
        raise _invalid(raw, "an empty label in the host")
    if found := _NOT_A_NAME.search(host):
        raise _invalid(raw, f"{found[0]!r} in the host")
    if _NUMBER.match(host.rpartition(".")[2]) and not _DOTTED_QUAD.match(mapped):
        raise _invalid(raw, "a numeric host that is not a canonical dotted quad")
    if any(_HALF_MAPPED.match(label) for label in _LABEL_ENDS.split(written)):
        raise _invalid(raw, "an xn-- label that is not ASCII; write it in ASCII")
    # If IDNA2008 does not map a name, yarl falls back to IDNA2003, which maps ß to ss and ς to σ: a
    # different host than in a browser (URL-05).
    if not written.isascii() and _deviations(written) != _deviations(host):
        raise _invalid(raw, "the host can't be mapped to ASCII; write it in its xn-- form")
    return host


def _deviations(host: str) -> tuple[int, int]:
    text = ".".join(map(_decoded_label, _LABEL_ENDS.split(host.lower())))
    return text.count("ß"), text.count("ς")


def _decoded_label(label: str) -> str:
    """Convert an A-label to Unicode by Punycode alone. Any other label is unchanged."""
    if not label.startswith("xn--"):
        return label
    try:
        return label[4:].encode("ascii").decode("punycode", "replace")
    except ValueError:  # some versions raise it for invalid Punycode even with "replace"
        return label


def _path(url: URL, raw: str) -> str:
    path = url.raw_path
    if _MAYBE_DOTS.search(path):
        path = _without_dot_segments(path)
    query = url.raw_query_string
    # yarl drops the `?` of an empty query, but a rule may require it (URL-04).
    if query or "?" in raw.partition("#")[0]:
        path = f"{path}?{query}"
    path = _UNSENDABLE.sub(_percent_encoded, path)
    if len(path) > MAX_PATH:
        raise _invalid(raw, f"longer than {MAX_URL} characters as it is sent")
    return path


def _without_dot_segments(path: str) -> str:
    """Remove dot segments (RFC 3986 section 5.2.4), treating `%2e` as a dot (URL-03)."""
    segments: list[str] = []
    last = ""
    for segment in path[1:].split("/"):
        last = segment.lower().replace("%2e", ".") if len(segment) <= 6 else segment
        if last == "..":
            if segments:
                segments.pop()
        elif last != ".":
            segments.append(segment)
    if last in {".", ".."}:
        segments.append("")
    return "/" + "/".join(segments)


def _percent_encoded(found: re.Match[str]) -> str:
    return "%" + found[0].encode().hex("%").upper()


def _invalid(raw: str, problem: str) -> InvalidURL:
    return InvalidURL(mask(raw), problem)


# --- for people and logs --------------------------------------------------------------------
#
# Any text can be masked; nothing here relies on its being a URL.

# `@`, the characters that IDNA maps to it, and its escapes, however often they were escaped again.
_AT = r"(?:[@\ufe6b\uff20]|%(?>(?:25)*)40)"
_AT_SIGN = re.compile(_AT)
_URL_START = re.compile(r"(?:(?:https?:|[a-z][a-z0-9+.\-]*+:(?=//))?[/\\]*+)", re.IGNORECASE)
# An authority that cannot contain a password, and what may follow it.
_NO_PASSWORD = re.compile(
    r"https?://(?:[^\s/?#\\:@\[\]%\ufe6b\uff20]++|\[[0-9a-f:.]++\])(?::[0-9]*+)?(?:[/?#]|\Z)",
    re.IGNORECASE,
)
# The authority of another URL in a path or query, escaped or not, up to its last `@`.
_SLASH = r"%(?>(?:25)*)2f"
_EMBEDDED_USERINFO = re.compile(
    rf"(//|{_SLASH}{_SLASH})(?:[^/?#\\%]|%(?!(?>(?:25)*)2f))*{_AT}", re.IGNORECASE
)
_QUERY = re.compile(r"([?#]).+\Z", re.DOTALL)


def mask(raw: str, *, query: bool = True, limit: int = 200) -> str:
    """Format a text for people and logs: credentials masked, controls escaped, cut to `limit`
    characters.

    If the authority is a plain host and port, the rest of the text is shown, except for credentials
    in URLs within it. In any other text everything up to the last `@` is masked, because in a text
    that is not a URL the end of a password cannot be known.

    With `query=False` the query and the fragment are masked too (T11).

    >>> mask("https://ann:secret@example.com/a?token=1", query=False)
    'https://***@example.com/a?***'
    """
    masked = without_userinfo(raw)
    if not query:
        masked = _QUERY.sub(r"\1***", masked, count=1)
    return printable(masked, limit)


def without_userinfo(raw: str) -> str:
    """Return a text with credentials masked, as `mask` does, and else as it is."""
    if not _AT_SIGN.search(raw):
        return raw
    if plain := _NO_PASSWORD.match(raw):
        return raw[: plain.end()] + _EMBEDDED_USERINFO.sub(r"\1***@", raw[plain.end() :])
    start = _URL_START.match(raw)
    end = 0
    for sign in _AT_SIGN.finditer(raw):
        end = sign.end()
    return f"{raw[: start.end() if start else 0]}***@{raw[end:]}"


def printable(text: str, limit: int) -> str:
    """Escape unprintable characters and cut the text to `limit` characters."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_credentials(url: str) -> str:
    """Return the URL of a store for display: without user, password and options.

    >>> without_credentials("rediss://crawler:secret@redis.example:6380/0")
    'rediss://redis.example:6380/0'
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes:  # not a URL: an error about it quotes it as given
        scheme, rest = "", url
    place = rest.partition("#")[0].partition("?")[0]
    if "@" not in place.partition("/")[0] or "@" in place.partition("/")[2]:
        place = rest  # all text before the last @ may be an unescaped password
    stripped = place.rpartition("@")[2].partition("#")[0].partition("?")[0]
    return f"{scheme}{slashes}{stripped}"


_REMEDIES = {"URL": "give str({name})", "bytes": "decode it first"} | dict.fromkeys(
    ("list", "tuple", "set", "frozenset", "dict", "generator"), "give one at a time"
)


def not_text(given: object, name: str = "url") -> TypeError:
    """Return the error for an argument that must be a str. Other mistakes raise InvalidURL."""
    kind = type(given).__name__
    remedy = _REMEDIES.get(kind, "").format(name=name)
    return TypeError(f"{name} must be str, not {kind}" + (f"; {remedy}" if remedy else ""))


# --- URLs as aiohttp sends them -----------------------------------------------------------------
#
# yarl splits, quotes and reassembles every text, and computes host and port of each URL. The pages
# of a host differ only in their path, and most paths need no quoting: for those it is enough to
# append the path to an authority that was parsed before.

_ROOT = re.compile(r"https?://[a-z0-9.\-]+(?::[0-9]{1,5})?/")
# Octets that yarl leaves unchanged in a path. Queries and fragments are always parsed.
_PLAIN_PATH = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
_MAX_FAST_PATH: Final = 8_000
"""Maximum number of characters of a path that a `UrlCache` handles itself."""
MAX_ROOTS: Final = 10_000
"""Maximum number of authorities in a `UrlCache`."""


def url_of(text: str) -> URL:
    """Return `URL(text)`, with a single kind of error.

    Raises ValueError for every text that yarl cannot parse.
    """
    from yarl import URL  # noqa: PLC0415

    try:
        return URL(text)
    except IndexError as error:  # yarl of `http://[a]@/`
        raise ValueError("this is not a URL") from error  # without the text: it may hold a password


class UrlCache:
    """Builds URLs as yarl does, faster if authority and path are plain.

    It also remembers the last URL it built, with its origin, so that code which receives that very
    object need not parse it again. At most 10,000 authorities are cached.

    >>> from yarl import URL
    >>> cache = UrlCache()
    >>> for name in "ab":
    ...     url = cache.read(f"https://example.com/{name}")
    >>> url == URL("https://example.com/b")
    True
    >>> if cache.last is url:
    ...     assert (cache.origin, cache.text) == ("https://example.com", "https://example.com/b")
    """

    __slots__ = ("_authorities", "last", "origin", "text")

    def __init__(self) -> None:
        self._authorities: dict[str, tuple[str, URL]] = {}
        """By scheme, host and port with a slash, as in texts: the same without the slash, and its
        URL."""
        self.last: URL | None = None
        """The last URL that had a cached authority and a plain path. `text` and `origin` belong to
        it. A plain path is ASCII and contains neither escapes nor dot segments nor a query."""
        self.text: str = ""
        self.origin: str = ""

    def read(self, text: str) -> URL:
        """Return `URL(text)`. Raises ValueError for text that is not a URL."""
        cut = text.find("/", 8)  # after `https://`
        authority = self._authorities.get(text[: cut + 1])  # without a slash: "", never a key
        if authority is None:
            return self._read_new(text, cut)
        path = text[cut:]
        if (
            not path.isascii()
            or path.encode().translate(None, _PLAIN_PATH)
            or "/." in path
            or len(path) > _MAX_FAST_PATH
        ):
            return url_of(text)
        self.origin, root = authority
        self.last = url = root.with_path(path, encoded=True)
        self.text = text
        return url

    def _read_new(self, text: str, cut: int) -> URL:
        """Have yarl parse the text, and cache the authority if yarl leaves it unchanged."""
        url = url_of(text)
        root = text[: cut + 1]
        if _ROOT.fullmatch(root) and f"{url.scheme}://{url.raw_authority}/" == root:
            make_room(self._authorities, MAX_ROOTS)
            self._authorities[root] = text[:cut], url.with_path("/")
            return self.read(text)  # sets `last`
        return url
