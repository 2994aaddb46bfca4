"""`/.well-known/tdmrep.json`: which paths reserve text and data mining (SIG-18).

Reading and matching only; whoever fetches the file does it under the origin's robots.txt.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gatekeeper.robots import normal
from gatekeeper.robots.lines import octets
from gatekeeper.robots.patterns import squeeze, wild_match
from gatekeeper.robots.signals import absolute_url

__all__ = ["TdmRule", "match_tdmrep", "parse_tdmrep"]

_LIMIT = 512_000
_MAX_RULES = 10_000


class TdmRule(msgspec.Struct, frozen=True):
    """One entry of the file."""

    location: str
    """A path pattern as in RFC 9309."""
    reserved: bool | None
    """Mining is reserved, or free; None: unset."""
    policy: str | None
    """An absolute URL with the terms, if there is one."""


def parse_tdmrep(body: bytes) -> tuple[TdmRule, ...]:
    """The rules of a file, in order; none for a file that is not an array of objects.

    Never raises on content. Entries without a location are left out.

    >>> parse_tdmrep(b'[{"location": "/a/*.jpg", "tdm-reservation": 1}]')
    (TdmRule(location='/a/*.jpg', reserved=True, policy=None),)
    """
    if len(body) > _LIMIT:
        return ()
    try:
        entries = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if not isinstance(entries, list):
        return ()
    rules: list[TdmRule] = []
    for entry in entries[:_MAX_RULES]:
        if isinstance(entry, dict) and isinstance(location := entry.get("location"), str):
            policy = entry.get("tdm-policy")
            rules.append(
                TdmRule(
                    location,
                    _reserved(entry.get("tdm-reservation")),
                    absolute_url(policy) if isinstance(policy, str) else None,
                )
            )
    return tuple(rules)


def match_tdmrep(rules: Iterable[TdmRule], path: str) -> TdmRule | None:
    """The rule about a path with its query (as `urls.split` gives it): the first that matches."""
    target = normal.rfc_path(path)
    for rule in rules:
        if wild_match(squeeze(normal.rfc_pattern(octets(rule.location))), target):
            return rule
    return None


def _reserved(value: object) -> bool | None:
    # Exactly the number: JSON's true is no 1, and "1" in quotes is another value.
    if isinstance(value, int) and not isinstance(value, bool) and value in {0, 1}:
        return value == 1
    return None
