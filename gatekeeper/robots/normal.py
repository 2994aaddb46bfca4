"""Normal forms of a path and of a rule's value, so that comparing octets is right.

All of them take and give *octets in a str* (see `lines`), except that the URL's side may
still be Unicode, which is UTF-8 on the wire (RFC 9309 section 2.2.2, RFC-22).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gatekeeper.robots.lines import octets

__all__ = [
    "PLAIN",
    "ROBOTS_TXT",
    "decoded",
    "decoded_patterns",
    "is_plain",
    "is_robots_txt",
    "query_form",
    "rfc_path",
    "rfc_pattern",
    "rfc_patterns",
    "unescaped",
]

PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
"""Octets that stand for themselves wherever they stand in a rule's value."""
_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
# Brackets are reserved too, but no path or query may hold them (RFC 3986 section 3.3): a URL
# that was sent always has them escaped, so a rule's `[` can only mean `%5B`.
_RESERVED = b":/?#@!$&'()*+,;="
# What a pattern may hold unchanged; `%` and `$` need a look.
_PLAIN = bytes(set(_UNRESERVED + _RESERVED) - set(b"$"))

# No pattern here tries anything twice, and what stands together is changed together: the time
# is linear in the text, whatever it is.
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPES = re.compile(r"((?:%[0-9A-Fa-f]{2})++)")
_CHANGING_ESCAPES = re.compile(
    r"(%(?:2[DE]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE]|[a-f][0-9A-Fa-f]|[0-9A-F][a-f])"
    r"(?:%[0-9A-Fa-f]{2})*+)"
)
_DECODABLE = re.compile(r"%(?:2[DEde]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])")
_SPECIAL = re.compile(r"[*?\[\]\\]")
_INNER_DOLLAR = re.compile(r"\$(?!\n|\Z)")

_NO_OCTET = "\u0101"
_SLASH_ESCAPED = "\u0100"  # no octet: stands for %2F where everything else is decoded

ROBOTS_TXT = "/robots.txt"
"""May always be asked for (RFC 9309 section 2.2.2, RFC-20, R96-16, V2-34)."""
_LONGEST_ROBOTS_TXT = 3 * len(ROBOTS_TXT)


_OCTETS = [chr(octet) if octet in _UNRESERVED else f"%{octet:02X}" for octet in range(256)]
"""What stands for each octet that came escaped (RFC 9309 section 2.2.2, RFC-23)."""


class _Escaping(NamedTuple):
    """What stands for each octet that came as it is (RFC 9309 section 2.2.2, RFC-22)."""

    kept: bytes
    """Octets that stand for themselves."""
    table: list[str]

    @classmethod
    def of(cls, kept: bytes) -> _Escaping:
        return cls(kept, [chr(o) if o in kept else f"%{o:02X}" for o in range(256)])


_IN_PATTERN = _Escaping.of(b"%" + _PLAIN)
_IN_PATTERNS = _Escaping.of(b"%$\n" + _PLAIN)
_IN_PATH = _Escaping.of(b"%" + _PLAIN.replace(b"*", b""))
_FEW = 16


def _escapes() -> tuple[dict[str, str], dict[str, str]]:
    rfc, old = {}, {}
    for octet in range(256):
        digits = f"{octet:02x}"
        for high in {digits[0], digits[0].upper()}:
            for low in {digits[1], digits[1].upper()}:
                rfc[f"%{high}{low}"] = _OCTETS[octet]
                old[f"%{high}{low}"] = _SLASH_ESCAPED if octet == 0x2F else chr(octet)
    return rfc, old


_RFC, _OLD = _escapes()
_LITERAL = {escape: _SPECIAL.sub(r"\\\g<0>", octet) for escape, octet in _OLD.items()}


def _rfc(escapes: str) -> str:
    return "".join(map(_OCTETS.__getitem__, _unescaped(escapes)))


def _old(escapes: str) -> str:
    return _unescaped(escapes).decode("latin-1").replace("/", _SLASH_ESCAPED)


def _literal(escapes: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", _old(escapes))


def _replaced(
    text: str, runs: re.Pattern[str], known: dict[str, str], read: Callable[[str], str]
) -> str:
    """The text with every run of escapes replaced: by what is known of it, or as it is read.

    No call a run, unless it is one of several escapes: a text may hold 100,000.
    """
    parts = runs.split(text)
    if len(parts) == 1:
        return text
    parts[1::2] = [known.get(run) or read(run) for run in parts[1::2]]
    return "".join(parts)


def _unescaped(escapes: str) -> bytes:
    return bytes.fromhex(escapes.replace("%", ""))


def _normal(text: str, escaping: _Escaping) -> str:
    if "%" in text:
        text = _replaced(_LONE_PERCENT.sub("%25", text), _CHANGING_ESCAPES, _RFC, _rfc)
    odd = set(text.encode("latin-1").translate(None, escaping.kept))
    if len(odd) > _FEW:
        return text.translate(escaping.table)
    for octet in odd:  # to replace a few in turn is far quicker than to translate
        text = text.replace(chr(octet), escaping.table[octet])
    return text


def is_plain(text: str) -> bool:
    """The text holds no octet that a normal form changes, `*` apart."""
    return text.isascii() and not text.encode().translate(None, _PLAIN)


def rfc_path(path: str) -> str:
    """A URL's path and query as RFC 9309 compares it.

    Octets that no URL may hold are escaped (RFC-22), escaped unreserved ones decoded
    (RFC-23), the hex digits of the rest put in upper case (RFC-24), `*` and `$` escaped, so
    that only `%2A` and `%24` in a rule can mean them (RFC 9309 section 2.2.3, RFC-30).
    """
    return _normal(octets(path), _IN_PATH)


def rfc_pattern(value: str) -> str:
    """A rule's value as RFC 9309 compares it: `*` and a final `$` keep their meaning (RFC-28).

    A blank inside a value counts as `%20` (RFC 9309 section 3, RFC-42, R94-29).
    """
    if value.endswith("$"):
        return _normal(value[:-1], _IN_PATTERN) + "$"
    return _normal(value, _IN_PATTERN)


def rfc_patterns(values: str) -> str:
    """`rfc_pattern` of many values at once: one a line, and so is the result."""
    return _normal(_INNER_DOLLAR.sub("%24", values), _IN_PATTERNS)


def query_form(text: str) -> str:
    """After the first `?` a literal `:` or `/` equals its escape (RFC-25, Figure 4 row 2).

    Takes and gives a normal form of `rfc_path` or `rfc_pattern`. A rule with a `?` matches
    where it does as it stands or in this form, of the rule and of the path.
    """
    path, mark, query = text.partition("?")
    return path + mark + query.replace("%3A", ":").replace("%2F", "/") if mark else text


def is_robots_txt(path: str) -> bool:
    """The path is `/robots.txt`, however its characters are escaped (RFC-20, RFC-23).

    >>> is_robots_txt("/robots.txt"), is_robots_txt("/robots%2etxt"), is_robots_txt("/Robots.txt")
    (True, True, False)
    """
    if "%" in path and len(path) <= _LONGEST_ROBOTS_TXT:
        path = rfc_path(path)
    return path == ROBOTS_TXT


def unescaped(path: str) -> bool:
    """No escape in the path stands for an unreserved octet: decoding would change none."""
    return _DECODABLE.search(path) is None


def decoded(text: str) -> str:
    """Octets as the 1996 draft compares them: all escapes decoded but that of `/` (R96-17)."""
    return _replaced(text, _ESCAPES, _OLD, _old) if "%" in text else text


def decoded_patterns(values: Sequence[str]) -> list[str]:
    """The same for shell patterns: what comes out of an escape is no special (V2-36)."""
    joined = _replaced(_NO_OCTET.join(values), _ESCAPES, _LITERAL, _literal)
    return joined.split(_NO_OCTET) if values else []
