"""Checks of single values for the linter: names of agents, versions, misspelt fields."""

from __future__ import annotations

import re

from gatekeeper.robots.findings import Report
from gatekeeper.robots.lines import Line

__all__ = ["check_agent", "check_version", "field_without_colon", "quoted", "spelling"]

_TOKEN = re.compile(r"[A-Za-z_-]+\Z|\*\Z")
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]{1,9})?\Z")

# U+FFFD is what a non-breaking space of another encoding shows as.
_ODD_BLANK = re.compile(
    "[\u00a0\u00ad\u1680\u2000-\u200f\u2028\u2029\u202f\u205f\u2060\u3000\ufeff\ufffd]"
)
_FIELD_AND_VALUE = re.compile(r"[ \t]*+([A-Za-z-]++)[ \t]++(?=[/*]|[^ \t]++[ \t]*+(?:#|\Z))")

_FIELDS = (
    *("user-agent", "allow", "disallow", "sitemap", "crawl-delay", "request-rate", "visit-time"),
    *("robot-version", "comment", "content-usage", "content-signal", "clean-param", "license"),
    *("host", "noindex"),
)
# Farther off than one slip of the finger, but seen.
_SEEN = {
    "useragent": "user-agent",
    "user agent": "user-agent",
    "user_agent": "user-agent",
    "agent": "user-agent",
    "dissalow": "disallow",
    "diasallow": "disallow",
    "dissallows": "disallow",
    "disallowed": "disallow",
    "dis-allow": "disallow",
    "dis allow": "disallow",
    "allowed": "allow",
    "allows": "allow",
    "user-agents": "user-agent",
    "user agents": "user-agent",
    "deny": "disallow",
    "crawldelay": "crawl-delay",
    "crawl delay": "crawl-delay",
    "crawl_delay": "crawl-delay",
    "site map": "sitemap",
    "site-map": "sitemap",
    "site_map": "sitemap",
    "licence": "license",
    "hosts": "host",
}
_SHORTEST = 5
"""One slip makes too many other words of a shorter one."""


def quoted(text: str) -> str:
    """The beginning of it as printable text."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def check_agent(report: Report, line: Line) -> None:
    """A user-agent line names a product token, or `*`."""
    if not line.value:
        report.add(line.number, "empty-agent")
    elif odd_blank(line.value):
        report.add(line.number, "odd-blank", quoted(line.value))
    elif "," in line.value or ";" in line.value:
        report.add(line.number, "agent-list", quoted(line.value))
    elif not _TOKEN.match(line.value):
        report.add(line.number, "odd-agent", quoted(line.value))


def odd_blank(text: str) -> bool:
    """A character that looks like a blank, or like nothing, and is neither blank nor tab.

    >>> odd_blank("bot\u00a0"), odd_blank("a bot")
    (True, False)
    """
    return _ODD_BLANK.search(text) is not None


def field_without_colon(text: str) -> str | None:
    """The known field that a line without a colon behind it begins with.

    >>> field_without_colon("Disallow /x"), field_without_colon("Allow me to explain: ...")
    ('disallow', None)
    """
    found = _FIELD_AND_VALUE.match(text)
    if found is None:
        return None
    field = found[1].lower()
    return field if field in _FIELDS else None


def check_version(report: Report, line: int, value: str) -> None:
    """A Robot-version that stands in its place (V2-08 to V2-12)."""
    found = _VERSION.match(value)
    major = int(found[1]) if found else 0
    if found is None or major == 0:
        report.add(line, "bad-version", quoted(value))
    elif int(found[2]) % 2:
        report.add(line, "experimental-version")
    elif major > 2:
        report.add(line, "newer-version")


def spelling(field: str) -> str | None:
    """The field that was meant, if it is one slip away from a known one (RFC-45).

    >>> spelling("dissallow"), spelling("user agent"), spelling("x-robots")
    ('disallow', 'user-agent', None)
    """
    meant = _SEEN.get(field)
    if meant is not None:
        return meant
    return next((name for name in _FIELDS if len(name) >= _SHORTEST and _slip(field, name)), None)


def _slip(a: str, b: str) -> bool:
    """One character too much, too few, wrong, or two of them swapped."""
    if abs(len(a) - len(b)) > 1:
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return (
        a[i + 1 :] == b[i:]
        or a[i:] == b[i + 1 :]
        or a[i + 1 :] == b[i + 1 :]
        or (a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :])
    )
