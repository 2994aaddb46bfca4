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
    "CATEGORIES",
    "CleanParam",
    "absolute_url",
    "combine_signals",
    "combine_usage",
    "parse_clean_param",
    "parse_content_signal",
    "parse_content_usage",
    "parse_host",
    "parse_preferences",
    "split_content_usage",
    "usage_labels",
    "usage_of_signal",
]

_PATH = re.compile(r"(/[^ \t]*+)[ \t]*+")
_SIGNAL = re.compile(r"[ \t]*+([A-Za-z0-9_-]++)[ \t]*+=[ \t]*+([A-Za-z0-9_-]++)[ \t]*+\Z")
_YES_OR_NO = frozenset({"search", "ai-input", "ai-train"})

# SIG-12: what a Content-Signal says in the words of AIPREF. `ai-input` has no label there.
_SIGNAL_CATEGORIES = {"ai-train": "train-ai", "search": "search"}
_SIGNAL_VALUES = {"yes": "y", "no": "n"}

CATEGORIES = frozenset({"train-ai", "search"})
"""The labels of the vocabulary (SIG-01)."""
_MAX_ODD_USAGE = 1_024

# The grammar of RFC 9651, less dates, byte sequences and display strings, whose text may be
# right and whose value wrong. Every repetition is possessive: the time is linear.
_KEY = r"[a-z*][a-z0-9_\-.*]*+"
_BARE = (
    r"(?:[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*+"
    r"|-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})(?![0-9.])"
    r'|"(?:[ !#-\[\]-~]|\\["\\])*+"'
    r"|\?[01])"
)
_PARAMS = rf"(?:; *+{_KEY}(?:={_BARE})?+)*+"
_ITEMS = rf"\( *+(?:{_BARE}{_PARAMS}(?: ++{_BARE}{_PARAMS})*+ *+)?+\){_PARAMS}"
_ANSWER = r"([yn])(?![!#$%&'*+\-.^_`|~0-9A-Za-z:/])"
_MEMBER = (
    rf"({_KEY})(?:=(?:{_ANSWER}{_PARAMS}|{_BARE}{_PARAMS}|{_ITEMS})|{_PARAMS})"
    r"[ \t]*+(?:,[ \t]*+(?!\Z)|\Z)"
)
_MEMBERS = re.compile(_MEMBER).findall
# Without its groups: Python 3.11 loses track of a group within a possessive repetition.
_UNMARKED = _MEMBER.replace(f"({_KEY})", _KEY).replace("([yn])", "[yn]")
_DICTIONARY = re.compile(rf" *+(?:{_UNMARKED})*+\Z").match

_CLEAN_PARAM_LIMIT = 500  # VND-12


class CleanParam(msgspec.Struct, frozen=True):
    """Query parameters that don't change what a page holds (VND-12)."""

    params: tuple[str, ...]
    path: str
    """Prefix of the paths it is about; empty for every path."""


def parse_content_usage(value: str) -> tuple[str, dict[str, str]]:
    """Path pattern and preferences of a Content-Usage line (SIG-04); unknown labels left out.

    The path is empty where the line has none, the shortest that there is (SIG-05).

    >>> parse_content_usage("/open/ train-ai=y")
    ('/open/', {'train-ai': 'y'})
    """
    path, text = split_content_usage(value)
    return path, parse_preferences(text)


def split_content_usage(value: str) -> tuple[str, str]:
    """Path pattern and the text of the preferences, unread (SIG-04)."""
    found = _PATH.match(value)
    return (found[1], value[found.end() :]) if found else ("", value)


def parse_preferences(text: str) -> dict[str, str]:
    """Categories that a Dictionary decides; of one that can't be read, none (SIG-02, SIG-08).

    A label that the vocabulary does not know is ignored (SIG-01); the line keeps it.

    >>> parse_preferences("train-ai=n, search=maybe"), parse_preferences("Train-AI=n")
    ({'train-ai': 'n'}, {})
    """
    said = usage_labels(text)
    return {
        label: answer for label, answer in (said or {}).items() if answer and label in CATEGORIES
    }


def usage_labels(text: str) -> dict[str, str] | None:
    """Every label of a Dictionary, with `y`, `n`, or nothing for anything else; None where it
    can't be read.

    The common kinds of values are read in one go. One that holds dates, octets or text of
    other alphabets is read a value at a time, if it is no longer than 1,024 characters.
    """
    if _DICTIONARY(text):
        return dict(_MEMBERS(text))
    if len(text) > _MAX_ODD_USAGE:
        return None
    try:
        members = parse_dictionary(text)
    except FieldError:
        return None
    return {
        key: str(item.value) if isinstance(item.value, Token) and item.value in {"y", "n"} else ""
        for key, item in members.items()
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
    # What is said twice is read once: a line of commas holds 500,000 of the same nothing.
    return combine_signals(map(_pair, dict.fromkeys(value.split(","))))


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
    if len(value) > urls.MAX_URL:
        return None  # spares wording a refusal of half a megabyte
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
