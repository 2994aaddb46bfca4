"""What a robots.txt says beside Allow and Disallow: about use, about money, about the site.

Nothing here changes what may be fetched (standards.md section 6): it is read, combined and
handed on. Every reader takes the value of one line, never raises, and gives nothing for a
value it can't use.

Preferences are dictionaries from a category (`train-ai`, `search`, ...) to `y` or `n`; a
category that is missing is unknown (SIG-02).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots.structured import FieldError, Token, parse_dictionary

__all__ = [
    "CleanParam",
    "absolute_url",
    "combine_signals",
    "combine_usage",
    "parse_clean_param",
    "parse_content_signal",
    "parse_content_usage",
    "parse_host",
    "parse_preferences",
    "usage_of_signal",
]

_PATH = re.compile(r"(/[^ \t]*)[ \t]*")
_SIGNAL = re.compile(r"[ \t]*([A-Za-z0-9_-]+)[ \t]*=[ \t]*([A-Za-z0-9_-]+)[ \t]*\Z")
_YES_OR_NO = frozenset({"search", "ai-input", "ai-train"})

# SIG-12: what a Content-Signal says in the words of AIPREF. `ai-input` has no label there.
_SIGNAL_CATEGORIES = {"ai-train": "train-ai", "search": "search"}
_SIGNAL_VALUES = {"yes": "y", "no": "n"}

_CLEAN_PARAM_LIMIT = 500  # VND-12


class CleanParam(msgspec.Struct, frozen=True):
    """Query parameters that don't change what a page holds (VND-12)."""

    params: tuple[str, ...]
    path: str
    """Prefix of the paths it is about; empty for every path."""


def parse_content_usage(value: str) -> tuple[str, dict[str, str]]:
    """Path pattern and preferences of a Content-Usage line (SIG-04).

    The path is empty where the line has none, the shortest that there is (SIG-05).

    >>> parse_content_usage("/open/ train-ai=y")
    ('/open/', {'train-ai': 'y'})
    """
    found = _PATH.match(value)
    if found is None:
        return "", parse_preferences(value)
    return found[1], parse_preferences(value[found.end() :])


def parse_preferences(text: str) -> dict[str, str]:
    """Categories that a Dictionary decides; of one that can't be read, none (SIG-02, SIG-08).

    >>> parse_preferences("train-ai=n, search=maybe"), parse_preferences("Train-AI=n")
    ({'train-ai': 'n'}, {})
    """
    try:
        members = parse_dictionary(text)
    except FieldError:
        return {}
    return {
        key: str(item.value)
        for key, item in members.items()
        if isinstance(item.value, Token) and item.value in {"y", "n"}
    }


def combine_usage(views: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Several sources as one: per category disallow beats allow beats unknown (SIG-07).

    >>> combine_usage([{"search": "y", "train-ai": "y"}, {"train-ai": "n"}])
    {'search': 'y', 'train-ai': 'n'}
    """
    combined: dict[str, str] = {}
    for view in views:
        for category, wish in view.items():
            if combined.get(category) != "n":
                combined[category] = wish
    return combined


def parse_content_signal(value: str) -> dict[str, str]:
    """What a Content-Signal line says: its keys and values in lower case (SIG-12).

    Pairs that are none, and an answer other than yes or no to a question of yes or no, are
    left out. Unknown keys are kept.

    >>> parse_content_signal("search=yes,ai-train = no, use=reference, x")
    {'search': 'yes', 'ai-train': 'no', 'use': 'reference'}
    """
    return combine_signals([_pair(part) for part in value.split(",")])


def combine_signals(views: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Several Content-Signal lines as one: `no` beats all else, then the first stands."""
    combined: dict[str, str] = {}
    for view in views:
        for key, answer in view.items():
            if answer == "no":
                combined[key] = answer
            else:
                combined.setdefault(key, answer)
    return combined


def usage_of_signal(signal: Mapping[str, str]) -> dict[str, str]:
    """A Content-Signal in the categories of Content-Usage, to be combined with it (SIG-12)."""
    return {
        category: _SIGNAL_VALUES[signal[key]]
        for key, category in _SIGNAL_CATEGORIES.items()
        if signal.get(key) in _SIGNAL_VALUES
    }


def absolute_url(value: str) -> str | None:
    """The value of a Sitemap (VND-13) or License line (SIG-15), if it is an absolute URL.

    >>> absolute_url("https://example.com/s.xml"), absolute_url("/s.xml")
    ('https://example.com/s.xml', None)
    """
    try:
        urls.parse(value)
    except InvalidURL:
        return None
    return value


def parse_host(value: str) -> str | None:
    """The value of a Host line (VND-13), with or without a scheme, if it names one."""
    return value if value and absolute_url(value if "://" in value else f"http://{value}") else None


def parse_clean_param(value: str) -> CleanParam | None:
    """The value of a Clean-param line: `p0[&p1...] [path]`, case kept (VND-12).

    >>> parse_clean_param("sid&ref /shop/")
    CleanParam(params=('sid', 'ref'), path='/shop/')
    """
    if len(value) > _CLEAN_PARAM_LIMIT:
        return None
    words = value.split()
    if not words or len(words) > 2:
        return None
    params = tuple(name for name in words[0].split("&") if name)
    return CleanParam(params, words[1] if len(words) == 2 else "") if params else None


def _pair(text: str) -> dict[str, str]:
    found = _SIGNAL.match(text)
    if found is None:
        return {}
    key, answer = found[1].lower(), found[2].lower()
    if key in _YES_OR_NO and answer not in _SIGNAL_VALUES:
        return {}
    return {key: answer}
