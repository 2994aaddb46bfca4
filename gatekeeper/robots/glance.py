"""A verdict read off the text, and how long one rule's match is: nothing is made ready."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from gatekeeper.robots import normal
from gatekeeper.robots.lines import Spans
from gatekeeper.robots.patterns import squeeze, wild_match

__all__ = ["PLAIN", "first_verdict", "octets_of"]

PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@!&'()+,;="
"""Octets that stand for themselves wherever they stand in a rule's value."""


_plain_head = re.compile(f"[{re.escape(PLAIN)}]*+").match


def first_verdict(text: str, spans: Spans, path: str) -> bool:
    """Whether RFC 9309 allows the path: of most rules two octets say that they don't match.

    Takes the path in its normal form, and does not know of `/robots.txt`.
    """
    escapes = "%" in path
    query = normal.query_form(path) if escapes else path
    search = _likely(path[1:2])
    best = 1  # the score of no rule: octets times two, plus one if it allows (RFC-17 to RFC-19)
    for low, high in spans:
        for dis, head, rest in search(text, low, high):
            if not path.startswith(head):
                continue
            if not rest:
                octets = len(head)
            elif escapes or _may_end(rest, path):
                octets = octets_of(head + rest, path, query)
            else:
                continue
            score = octets << 1 if dis else octets << 1 | 1
            if octets and score > best:
                best = score
    return best & 1 == 1


@lru_cache(maxsize=128)
def _likely(second: str) -> Callable[[str, int, int], list[tuple[str, str, str]]]:
    """Finds the rules that a path with this second octet may match.

    Gives whether each forbids, the plain octets that its value begins with, and the rest.
    """
    plain = re.escape(PLAIN)
    other = re.escape(PLAIN.replace(second, "") if second else PLAIN)
    return re.compile(
        # A set begins with its user-agent line, so that a line feed stands before each rule;
        # looking for that first makes the search twice as fast as `^` does.
        r"\n[ \t]*+(?i:(dis|)allow)[ \t]*+:[ \t]*+"  # the value keeps its case
        rf"(?=\*|/(?:[^{other}#\n]|(?![^#\n])))([{plain}]*+)([^#\n]*+)",
        re.ASCII,
    ).findall


def octets_of(value: str, path: str, query: str) -> int:
    """How long a rule's pattern is if it matches, else 0.

    Takes a path in its normal form, and as `normal.query_form` gives it.
    """
    value = value.rstrip(" \t")
    if value[:1] != "/" and value[:1] != "*":
        return 0
    if not path.startswith(_plain_head(value)[0]):  # type: ignore[index]
        return 0
    pattern = normal.rfc_pattern(value)
    if "?" not in pattern:
        return len(pattern) if wild_match(squeeze(pattern), path) else 0
    form = normal.query_form(pattern)
    squeezed = {squeeze(pattern), squeeze(form)}
    if any(wild_match(each, seen) for each in squeezed for seen in {path, query}):
        return len(form)
    return 0


def _may_end(rest: str, path: str) -> bool:
    """The last literal piece of a rule stands in a path without escapes, or might.

    A piece that is no plain text has an escape in its normal form, if it is not one that the
    normal form undoes.
    """
    piece = rest[rest.rfind("*") + 1 :].rstrip("$ \t")
    return piece in path or "%" in piece
