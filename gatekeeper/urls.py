"""From the text of a URL to a `Target`, and its text for people and logs.

There are two ways to the same answer. The complete one refuses malformed text, has yarl read the
authority, and brings the path to the form in which it is sent. The fast one is for plain text
whose authority was met before, or can be read in one way only. `parse` and `split` take the fast
one where they can; a test compares the two.

No other URL parser may be used anywhere: parsers disagree about `①②⑦.0.0.1`, and where two
of them disagree, one of them checks and the other one dials.

The path keeps the escapes it came with (`%26` is not `&`, RFC 9309 section 2.2.2, RFC-25), so
whoever sends a target with aiohttp must say `yarl.URL(target.url, encoded=True)`: left to itself
yarl decodes some.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gatekeeper import speedups
from gatekeeper.errors import InvalidURL
from gatekeeper.speedups import lazy_pattern

if TYPE_CHECKING:
    from yarl import URL


MAX_URL = 65_536
"""Characters of a URL, as it is written and as it is sent. Servers refuse a request line beyond
8 to 64 KiB, so nothing longer can be fetched; and the cost of matching grows with the length,
which a site's page chooses."""

MAX_PATH = MAX_URL - len("http://a")
"""Characters of a path with its query, as it is sent: no URL has room for more."""

_MAX_AUTHORITIES = 50_000
_MAX_AUTHORITY = 1_000
"""Characters. A name has 253, and some more as escaped by IDNA; mapping costs more than linear."""

_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65_535

_NO_HOST = "no host; write http://host/path"
_UNREADABLE = "brackets, a backslash or a look-alike delimiter in the host"

# Octets that travel as they are (RFC 3986: unreserved, sub-delims, ":@/?"), less `%`.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/?"

# C0, DEL, C1, the two Unicode line ends, and halves of characters. yarl drops tab, CR and LF
# silently, which lets two readers of one text see two URLs.
_FORBIDDEN = lazy_pattern("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONE = r"%(?![0-9A-Fa-f]{2})"
_LONE_PERCENT = lazy_pattern(_LONE)
_UNSENDABLE = lazy_pattern(rf"{_LONE}|[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%]+")
_MAYBE_DOTS = lazy_pattern(r"/(?:\.|%2[eE])")
_DOT_SEGMENT = lazy_pattern(r"/\.\.?(?:[/?#]|\Z)")
_PORT = lazy_pattern(r"[0-9]{0,5}\Z")  # yarl takes `:+80` and `:０８０`, being int()
_NOT_A_NAME = lazy_pattern(r"[^a-z0-9\-._~!$&'()*+,;=]")
_NUMBER = lazy_pattern(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_LABEL_ENDS = lazy_pattern("[.\u3002\uff0e\uff61]")
_HALF_MAPPED = lazy_pattern(r"[xX][nN]--.*[^\x00-\x7f]")
_SCHEME = lazy_pattern(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_WHOLE_AUTHORITY = lazy_pattern(r"[A-Za-z]+://[^/?#@]+/\Z")
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# A last label that begins with a letter is no number; nothing here is tried twice.
_PLAIN_AUTHORITY = lazy_pattern(
    r"(https?)://((?:[a-z0-9_-]++\.)*+[a-z][a-z0-9_-]*+|"
    rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET})(?::([0-9]{{1,5}}))?/"
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
    """The port to dial: the scheme's own where the text names none."""
    origin: str
    """The key of a robots.txt (URL-01): the default port left out, IPv6 in brackets."""
    path: str
    """Path and query as they are sent: dot segments resolved, fragment dropped, everything
    that can't travel escaped, an empty query's `?` kept (URL-04). Begins with `/`."""
    userinfo: bool = False
    """The text held credentials. They are dropped here; the Guard refuses the URL."""

    @property
    def url(self) -> str:
        """The whole URL, without credentials and fragment."""
        return self.origin + self.path


def parse(raw: str) -> Target:
    """Read a URL whole. Raises InvalidURL for text that is no http or https URL.

    Only malformed text is refused here: which names, ports and addresses may be visited is
    the Guard's business.
    """
    found = _plain(raw)
    if found is None:
        return _parse_whole(raw)
    place, path = found
    return Target(
        scheme=place.scheme, host=place.host, port=place.port, origin=place.origin, path=path
    )


def _parse_whole(raw: str) -> Target:
    """The long road; the authority is remembered for the short one."""
    url = _read(raw)
    credentials, at, hostport = url.raw_authority.rpartition("@")
    host, port = _authority(raw, url.scheme, hostport)
    path = _path(url, raw)
    target = Target(
        scheme=url.scheme,
        host=host,
        port=port,
        origin=_origin_of(url.scheme, f"[{host}]" if ":" in host else host, port),
        path=path,
        userinfo=bool(credentials or at),
    )
    written = raw[: raw.find("/", 8) + 1]
    # Only an authority that ends at this slash, and holds no credentials, may stand for it.
    if _WHOLE_AUTHORITY.match(written):
        _remember(written, _Place(target.origin, target.scheme, host, port))
    return target


def _origin_of(scheme: str, bracketed: str, port: int) -> str:
    return f"{scheme}://{bracketed}" if port == _PORTS[scheme] else f"{scheme}://{bracketed}:{port}"


def join(base: Target, reference: str) -> Target:
    """Where a reference (a `Location`, say) found at `base` leads. Raises InvalidURL.

    >>> join(parse("https://example.com/a/b"), "../robots.txt").url
    'https://example.com/robots.txt'
    """
    if reference[:1] == " " or reference[-1:] == " ":
        _refuse_text(reference)  # what else there may be against it `parse` finds in the whole
    named = _SCHEME.match(reference)
    # A scheme of the base's own that no authority follows is passed over, as browsers do and
    # RFC 3986 section 5.2.2 permits.
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
    """The text of where a Location found at `url` leads, with the credentials that it may hold: the
    guard has to see them, and `join` leaves them out. Raises InvalidURL.

    >>> redirected("https://example.com/a", "//user:pass@b.test/")
    'https://user:pass@b.test/'
    """
    location = location.strip(" \t")
    if _SCHEME.match(location):  # it must stand by itself: `http:` alone is no URL
        parse(location)
        return location
    at = parse(url)
    if location.startswith("//"):
        return redirected(url, f"{at.scheme}:{location}")
    return join(at, location).url


def path_of(raw: str) -> str:
    """Path and query as `parse` gives them, whatever the host is. Raises InvalidURL.

    For the text of a robots.txt, which has something to say about the paths of any URL.

    >>> path_of("http://no%20host.example/a")
    '/a'
    """
    url = _read(raw)
    if not url.raw_authority:
        raise _invalid(raw, _NO_HOST)
    return _path(url, raw)


def sendable(url: URL) -> str:
    """The text of a URL that a session is about to send, as `parse` and `split` take it.

    What yarl was told to leave as it is (`encoded=True`) may lead elsewhere than its text says,
    or end the request line early. Raises InvalidURL where the host that would be dialled is
    not the one that is read here, or where the request line would hold a blank.

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
    if dialled != host and _as_read(raw, dialled) != host:
        raise _invalid(raw, f"it would be sent to another host, {printable(dialled, 120)!r}")
    if " " in requested:
        raise _invalid(raw, "a blank in the path; escape it as %20")
    return raw


def _as_read(raw: str, dialled: str) -> str:
    """The host in the form of `Target.host`, of one that means the same to any resolver."""
    if ":" in dialled:
        return _ipv6(raw, dialled)
    return dialled.lower().removesuffix(".")


def split(raw: str) -> tuple[str, str]:
    """Origin and path-and-query, exactly as `parse` gives them, but fast. Raises InvalidURL.

    >>> split("https://example.com/a?b")
    ('https://example.com', '/a?b')
    """
    found = _plain(raw)
    if found is not None:
        return found[0].origin, found[1]
    target = _parse_whole(raw)
    return target.origin, target.path


def split_ordinary(raw: str) -> tuple[str, str] | None:
    """What `split` gives, or None for text that takes `parse` to read: it decides nothing.

    For a hot path that has to look twice at anything odd: text with credentials, dot
    segments, characters to escape or an authority not seen before is None.
    """
    try:
        end = raw.find("/", 8)  # 8: past `http://a` and `https://`
    except (AttributeError, TypeError):
        raise not_text(raw) from None
    place = _seen.get(raw[: end + 1])  # with no slash at all: the empty text, never seen
    if place is None or len(raw) > MAX_URL:
        return None
    path = raw[end:]
    return (place.origin, path) if is_sent_as_written(path) else None


def is_sent_as_written(path: str) -> bool:
    """What stands behind an authority, from a slash on, is the path that `split` gives.

    False: it may be so, or not. No bound on its length is looked at.
    """
    if not path.isascii() or ("/." in path and _DOT_SEGMENT.search(path)):
        return False
    # Taking every plain octet away in C is faster than searching for one that is not.
    odd = path.encode().translate(None, _PLAIN)
    return not odd or not (
        odd.strip(b"%") or _LONE_PERCENT.search(path) or _MAYBE_DOTS.search(path)
    )


def plain_octets(raws: Sequence[str]) -> list[bytes] | None:
    """Each of the texts as octets, where `split_ordinary` gives the path of each as it stands, if
    it knows the authority. None: it may be so, or not.

    One look at many texts: a look at each costs several times as much.

    >>> plain_octets(["https://example.com/a", "https://example.com/b?c"])
    [b'https://example.com/a', b'https://example.com/b?c']
    >>> plain_octets(["https://example.com/a/../b"]) is None
    True
    """
    text = "\n".join(raws)
    if not text.isascii() or "/." in text:
        return None
    if len(text) > MAX_URL and max(map(len, raws)) > MAX_URL:
        return None
    octets = text.encode()
    # What is left are the line feeds between them.
    return octets.split(b"\n") if len(octets.translate(None, _PLAIN)) == len(raws) - 1 else None


def host_of(origin: str) -> str:
    """The host of an origin as `Target.origin` has it; an IPv6 address without brackets.

    >>> host_of("https://example.com:8443"), host_of("http://[::1]")
    ('example.com', '::1')
    """
    hostport = origin.partition("//")[2]
    if hostport.startswith("["):
        return hostport[1:].partition("]")[0]
    return hostport.partition(":")[0]


class _Place(msgspec.Struct, frozen=True, gc=False):
    """An origin, and what it is made of: see `Target`."""

    origin: str
    scheme: str
    host: str
    port: int


# Authorities that were read, as they were written: `HTTPS://Example.com/` -> its origin. The oldest
# go when it is full, which costs one parse an authority; those asked about last could be kept
# only with a write for every question. Nothing in it is for the garbage collector to walk.
_seen: dict[str, _Place] = {}


def _plain(raw: str) -> tuple[_Place, str] | None:
    """What `split_ordinary` gives, also of an authority not seen before that is spelt as most are;
    with all that is known of it."""
    try:
        end = raw.find("/", 8)
    except (AttributeError, TypeError):
        raise not_text(raw) from None
    written = raw[: end + 1]
    place = _seen.get(written) or _met_first(written)
    if place is None or len(raw) > MAX_URL:
        return None
    path = raw[end:]
    return (place, path) if is_sent_as_written(path) else None


def _met_first(written: str) -> _Place | None:
    """An authority not seen before, with its slash, that is spelt as most are.

    Names of letters, digits, hyphens and underscores in lower case, and canonical dotted
    quads: what every reader of URLs leaves as it is.
    """
    found = _PLAIN_AUTHORITY.fullmatch(written) if len(written) < _MAX_AUTHORITY else None
    if found is None:
        return None
    scheme, host, digits = found.groups()
    port = int(digits) if digits else _PORTS[scheme]
    if port > _MAX_PORT:
        return None
    return _remember(written, _Place(_origin_of(scheme, host, port), scheme, host, port))


def _remember(written: str, place: _Place) -> _Place:
    make_room(_seen, _MAX_AUTHORITIES)
    _seen[written] = place
    return place


def make_room(known: dict[Any, Any], most: int) -> None:
    """Drop the oldest of what may be dropped where there are so many.

    Some at once: finding the first key of a dictionary passes over all that were taken out before
    it, which one by one would cost the square. And not all, which would stop the loop for long.
    """
    if len(known) >= most:
        for key in [*islice(known, len(known) // 64 + 1)]:
            del known[key]


def _first_of_yarl(text: str, *, encoded: bool = False) -> URL:
    """yarl's reader, imported when it is first used.

    Ordinary URLs are read without it, and so are the paths that a robots.txt is asked about.
    """
    from yarl import URL  # noqa: PLC0415

    global _yarl  # noqa: PLW0603
    _yarl = URL
    return URL(text, encoded=encoded)


_yarl: Callable[..., URL] = _first_of_yarl


def _read(raw: str) -> URL:
    """The text cut into parts, none of them changed."""
    _refuse_text(raw)
    try:
        url = _yarl(raw, encoded=True)
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
    """Host and port as they are dialled. Judges the mapped host only, never the raw one."""
    name, colon, port = hostport.rpartition("]")[2].partition(":")
    if "%" in hostport:  # escapes and IPv6 zones: parsers disagree about both
        raise _invalid(raw, "a '%' in the host; write the name itself")
    if len(hostport) > _MAX_AUTHORITY:
        raise _invalid(raw, "the host is longer than any name")
    if colon and not _PORT.match(port):
        raise _invalid(raw, "the port is no number of at most five digits")
    if port and int(port) > _MAX_PORT:
        raise _invalid(raw, f"there is no port {int(port)}; {_MAX_PORT} is the last")
    try:
        url = _yarl(f"{scheme}://{hostport}")
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
        raise _invalid(raw, "no IPv6 address in the brackets") from error
    if "." not in text:
        return text
    # Python 3.13 writes ::ffff:127.0.0.1, earlier ones ::ffff:7f00:1. A key that is written to
    # disk has to read the same after an upgrade: hexadecimal, as the WHATWG serialises it.
    head, _, quad = text.rpartition(":")
    number = int(ipaddress.IPv4Address(quad))
    return f"{head}:{number >> 16:x}:{number & 0xFFFF:x}"


def _name(raw: str, written: str, mapped: str) -> str:
    """The mapped name without its root dot (URL-05), if it is one at all."""
    host = mapped.removesuffix(".")
    if not host:
        raise _invalid(raw, _NO_HOST)
    if host.startswith(".") or host.endswith(".") or ".." in host:
        raise _invalid(raw, "an empty label in the host")
    if found := _NOT_A_NAME.search(host):
        raise _invalid(raw, f"{found[0]!r} in the host")
    if _NUMBER.match(host.rpartition(".")[2]) and not _is_dotted_quad(mapped):
        raise _invalid(raw, "a numeric host that is no canonical dotted quad")
    if any(_HALF_MAPPED.match(label) for label in _LABEL_ENDS.split(written)):
        raise _invalid(raw, "an xn-- label that is not ASCII; write it in ASCII")
    # Where IDNA2008 knows no answer yarl falls back to IDNA2003, which turns ß into ss and ς
    # into σ: another host than the browser's (URL-05).
    if not written.isascii() and _deviations(written) != _deviations(host):
        raise _invalid(raw, "the host can't be mapped to ASCII; write it in its xn-- form")
    return host


def _is_dotted_quad(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)  # strict: four decimal octets, no leading zeros
    except ValueError:
        return False
    return True


def _deviations(host: str) -> tuple[int, int]:
    text = _decoded(host.lower())
    return text.count("ß"), text.count("ς")


def _decoded(host: str) -> str:
    """A-labels as Unicode, by Punycode alone; a label that is none stays as it is."""
    return ".".join(map(_decoded_label, _LABEL_ENDS.split(host)))


def _decoded_label(label: str) -> str:
    if not label.startswith("xn--"):
        return label
    try:
        return label[4:].encode("ascii").decode("punycode", "replace")
    except ValueError:  # some versions raise it of what holds no Punycode, "replace" or not
        return label


def _path(url: URL, raw: str) -> str:
    path = url.raw_path
    if _MAYBE_DOTS.search(path):
        path = _without_dot_segments(path)
    query = url.raw_query_string
    # yarl drops the `?` of an empty query; a rule may ask for it (URL-04).
    if query or "?" in raw.partition("#")[0]:
        path = f"{path}?{query}"
    path = _UNSENDABLE.sub(_escaped, path)
    if len(path) > MAX_PATH:
        raise _invalid(raw, f"longer than {MAX_URL} characters as it is sent")
    return path


def _without_dot_segments(path: str) -> str:
    """RFC 3986 section 5.2.4, `%2e` read as a dot (URL-03)."""
    kept: list[str] = []
    last = ""
    for segment in path[1:].split("/"):
        last = segment.lower().replace("%2e", ".") if len(segment) <= 6 else segment
        if last == "..":
            if kept:
                kept.pop()
        elif last != ".":
            kept.append(segment)
    if last in {".", ".."}:
        kept.append("")
    return "/" + "/".join(kept)


def _escaped(found: re.Match[str]) -> str:
    return "%" + found[0].encode().hex("%").upper()


def _invalid(raw: str, problem: str) -> InvalidURL:
    return InvalidURL(mask(raw), problem)


# --- for people and logs --------------------------------------------------------------------
#
# Any text at all is masked, so nothing here relies on its being a URL.

# `@`, what IDNA maps to it, and its escapes, however often they were escaped again.
_AT = r"(?:[@\ufe6b\uff20]|%(?:25)*+40)"
_SIGN = lazy_pattern(_AT)
_START = lazy_pattern(r"(?:(?:https?:|[a-z][a-z0-9+.\-]*+:(?=//))?[/\\]*+)", re.IGNORECASE)
# An authority in which nothing can be a password, and what may follow one.
_NO_PASSWORD = lazy_pattern(
    r"https?://(?:[^\s/?#\\:@\[\]%\ufe6b\uff20]++|\[[0-9a-f:.]++\])(?::[0-9]*+)?(?:[/?#]|\Z)",
    re.IGNORECASE,
)
# Another URL's authority within a path or a query, escaped or not, to its last `@`.
_SLASH = r"%(?:25)*+2f"
_WITHIN = lazy_pattern(rf"(//|{_SLASH}{_SLASH})(?:[^/?#\\%]|%(?!(?:25)*+2f))*{_AT}", re.IGNORECASE)
_QUERY = lazy_pattern(r"([?#]).+\Z", re.DOTALL)


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
    if plain := _NO_PASSWORD.match(raw):
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


def without_credentials(url: str) -> str:
    """A store's URL as it may be shown: without user, password and options.

    >>> without_credentials("rediss://crawler:secret@redis.example:6380/0")
    'rediss://redis.example:6380/0'
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes:  # no URL: what an error about it quotes is what was given
        scheme, rest = "", url
    place = rest.partition("#")[0].partition("?")[0]
    if "@" not in place.partition("/")[0] or "@" in place.partition("/")[2]:
        place = rest  # whatever stands before the last @ may be a password that was not escaped
    shown = place.rpartition("@")[2].partition("#")[0].partition("?")[0]
    return f"{scheme}{slashes}{shown}"


_REMEDIES = {"URL": "give str({name})", "bytes": "decode it first"} | dict.fromkeys(
    ("list", "tuple", "set", "frozenset", "dict", "generator"), "give one at a time"
)


def not_text(given: object, name: str = "url") -> TypeError:
    """For an argument that has to be a str and is none; the other mistakes are InvalidURL."""
    kind = type(given).__name__
    remedy = _REMEDIES.get(kind, "").format(name=name)
    return TypeError(f"{name} must be str, not {kind}" + (f"; {remedy}" if remedy else ""))


# --- URLs as aiohttp sends them -----------------------------------------------------------------
#
# yarl takes every text apart, quotes it and puts it together again, and works out host and port for
# each URL. The pages of a host differ in their path alone, and most paths hold nothing that would
# be quoted: for those it is enough to put the path behind an authority that was parsed before.

_ROOT = lazy_pattern(r"https?://[a-z0-9.\-]+(?::[0-9]{1,5})?/")
# What yarl leaves as it is in a path; a query or a fragment is always parsed.
_PLAIN_PATH = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
_LONGEST: Final = 8_000
"""Characters of a text that a `UrlCache` reads by itself."""
_MAX_ROOTS: Final = 10_000
"""Kept by a `UrlCache`."""


def url_of(text: str) -> URL:
    """`URL(text)`, with one kind of error.

    Raises ValueError for every text that yarl can't read.
    """
    try:
        return _yarl(text)
    except IndexError as error:  # yarl of `http://[a]@/`
        raise ValueError("this is no URL") from error  # without it: it may hold a password


class UrlCache:
    """Reads URLs as yarl does, faster where authority and path are plain.

    It also knows the last URL that it read so, with its origin: whoever meets that very object
    again need not take it apart. At most 10,000 authorities are kept.

    >>> from yarl import URL
    >>> cache = UrlCache()
    >>> for name in "ab":
    ...     url = cache.read(f"https://example.com/{name}")
    >>> url == URL("https://example.com/b")
    True
    >>> if cache.last is url:
    ...     assert (cache.origin, cache.text) == ("https://example.com", "https://example.com/b")
    """

    __slots__ = ("_authorities", "_on", "last", "origin", "text")

    def __init__(self) -> None:
        self._on = speedups.ON
        self._authorities: dict[str, tuple[str, URL]] = {}
        """By scheme, host and port with a slash, as texts have them: without it, and its URL."""
        self.last: URL | None = None
        """The last URL whose authority was met before and whose path is plain: `text` and `origin`
        are its own. Such a path is ASCII, and holds neither escapes nor dot segments nor a query.
        """
        self.text: str = ""
        self.origin: str = ""

    def read(self, text: str) -> URL:
        """`URL(text)`. Raises ValueError for text that is no URL."""
        cut = text.find("/", 8)  # behind `https://`
        authority = self._authorities.get(text[: cut + 1])  # without a slash: "", never kept
        if authority is None:
            return self._read_new(text, cut)
        path = text[cut:]
        if (
            not path.isascii()
            or path.encode().translate(None, _PLAIN_PATH)
            or "/." in path
            or len(path) > _LONGEST
        ):
            return url_of(text)
        self.origin, root = authority
        self.last = url = root.with_path(path, encoded=True)
        self.text = text
        return url

    def _read_new(self, text: str, cut: int) -> URL:
        """Have yarl parse it; an authority that yarl leaves as it is is kept."""
        url = url_of(text)
        root = text[: cut + 1]
        if self._on and _ROOT.fullmatch(root) and f"{url.scheme}://{url.raw_authority}/" == root:
            make_room(self._authorities, _MAX_ROOTS)
            self._authorities[root] = text[:cut], url.with_path("/")
            return self.read(text)  # so that it is known as the last
        return url
