"""Normal forms of a path and of a rule's value, so that comparing octets is right.

All of them take and give *octets in a str* (see `lines`), except that the URL's side may
still be Unicode, which is UTF-8 on the wire (RFC-22).
"""

from __future__ import annotations

import re

from gatekeeper.robots.lines import octets

__all__ = [
    "decoded",
    "decoded_pattern",
    "is_plain",
    "query_form",
    "rfc_path",
    "rfc_pattern",
    "unescaped",
]

_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
# Brackets are reserved too, but no path or query may hold them (RFC 3986 section 3.3): a URL
# that was sent always has them escaped, so a rule's `[` can only mean `%5B`.
_RESERVED = b":/?#@!$&'()*+,;="
# What a pattern may hold unchanged; `%` and `$` need a look.
_PLAIN = bytes(set(_UNRESERVED + _RESERVED) - set(b"$"))

_ODD_IN_PATH = re.compile(r"%(?:[0-9A-Fa-f]{2})?|[^A-Za-z0-9\-._~:/?#@!&'()+,;=]")
_ODD_IN_PATTERN = re.compile(r"%(?:[0-9A-Fa-f]{2})?|[^A-Za-z0-9\-._~:/?#@!&'()+,;=*]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_DECODABLE = re.compile(r"%(?:2[DEde]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])")

_SLASH_ESCAPED = "\u0100"  # no octet: stands for %2F where everything else is decoded


def _tables() -> tuple[dict[str, str], dict[str, str]]:
    rfc = {chr(octet): f"%{octet:02X}" for octet in range(256)}
    old = {}
    for octet in range(256):
        plain = chr(octet) if octet in _UNRESERVED else f"%{octet:02X}"
        digits = f"{octet:02x}"
        for high in {digits[0], digits[0].upper()}:
            for low in {digits[1], digits[1].upper()}:
                rfc[f"%{high}{low}"] = plain
                old[f"%{high}{low}"] = chr(octet)
    for slash in ("%2f", "%2F"):
        old[slash] = _SLASH_ESCAPED
    return rfc, old


_RFC, _OLD = _tables()


def _rfc(found: re.Match[str]) -> str:
    return _RFC[found[0]]


def _old(found: re.Match[str]) -> str:
    return _OLD[found[0]]


def is_plain(text: str) -> bool:
    """The text holds no octet that a normal form changes, `*` apart."""
    return text.isascii() and not text.encode().translate(None, _PLAIN)


def rfc_path(path: str) -> str:
    """A URL's path and query as RFC 9309 compares it.

    Octets that no URL may hold are escaped (RFC-22), escaped unreserved ones decoded
    (RFC-23), the hex digits of the rest put in upper case (RFC-24), `*` and `$` escaped, so
    that only `%2A` and `%24` in a rule can mean them (RFC-30).
    """
    return _ODD_IN_PATH.sub(_rfc, octets(path))


def rfc_pattern(value: str) -> str:
    """A rule's value as RFC 9309 compares it: `*` and a final `$` keep their meaning (RFC-28).

    A blank inside a value counts as `%20` (RFC-42, R94-29).
    """
    if value.endswith("$"):
        return _ODD_IN_PATTERN.sub(_rfc, value[:-1]) + "$"
    return _ODD_IN_PATTERN.sub(_rfc, value)


def query_form(text: str) -> str:
    """After the first `?` a literal `:` or `/` equals its escape (RFC-25, Figure 4 row 2).

    Takes and gives a normal form of `rfc_path` or `rfc_pattern`.
    """
    path, mark, query = text.partition("?")
    return path + mark + query.replace("%3A", ":").replace("%2F", "/") if mark else text


def unescaped(path: str) -> bool:
    """No escape in the path stands for an unreserved octet: decoding would change none."""
    return _DECODABLE.search(path) is None


def decoded(text: str) -> str:
    """Octets as the 1996 draft compares them: all escapes decoded but that of `/` (R96-17)."""
    return _ESCAPE.sub(_old, text) if "%" in text else text


def decoded_pattern(value: str) -> str:
    """The same for a shell pattern: what comes out of an escape is no special (V2-36)."""
    return _ESCAPE.sub(_literal, value)


def _literal(found: re.Match[str]) -> str:
    char = _OLD[found[0]]
    return "\\" + char if char in "*?[]\\" else char
