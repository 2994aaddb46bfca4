"""What a response says of itself, beside robots.txt: about use, indexing and licences.

    Content-Usage      preferences about this content (SIG-03)
    X-Robots-Tag       rules for search engines, in a grammar of its own (SIG-20)
    Robots-Tag         the same as a structured field (SIG-21)
    tdm-reservation    text and data mining is reserved, or is not (SIG-19)
    Link               rel="license" (SIG-15)

All of it is read and handed on; none of it changes what may be fetched. Readers never raise:
a field that can't be read counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.robots.signals import absolute_url, parse_preferences
from gatekeeper.robots.structured import FieldError, Token, parse_list

__all__ = [
    "PageRules",
    "PageSignals",
    "from_headers",
    "parse_content_usage_header",
    "parse_license_links",
    "parse_robots_tag",
    "parse_tdm_reservation",
    "parse_x_robots_tag",
]

_Value = TypeVar("_Value")

_LIMIT = 65_536
"""Characters read of one field: the newest draft wants 8 KiB at least (SIG-21)."""

_ARGUMENTS = frozenset(
    {"unavailable_after", "max-image-preview", "max-snippet", "max-video-preview"}
)
_PREVIEWS = ("none", "standard", "large")
_WEEKDAY = re.compile(r"(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\Z")
_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")
_COUNT = re.compile(r"-1\Z|[0-9]{1,9}\Z")
_AGENT = re.compile(r"[^\s,;:=]+\Z")
_UNLIMITED = -1

_LINK = re.compile(
    r"<([^<>]*)>[ \t]*((?:;[ \t]*[^\s=;,\"<>]+[ \t]*"
    r"(?:=[ \t]*(?:\"(?:[^\"\\]|\\.)*+\"|[^\s;,\"<>]*+)[ \t]*)?)*+)"
)
_LINK_PARAM = re.compile(r";[ \t]*([^\s=;,]+)[ \t]*(?:=[ \t]*(?:\"([^\"]*)\"|([^\s;,]*)))?")


class PageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules about one page for one agent: of several sources the most restrictive (SIG-20)."""

    names: frozenset[str] = frozenset()
    """Rules without a value, in lower case: `noindex`, `nofollow`, `noarchive`, `noai`, ...
    (`none` is its two parts, `all` is nothing)."""
    max_snippet: int | None = None
    """Characters; -1 is as many as one likes."""
    max_image_preview: str | None = None
    """`none`, `standard` or `large`."""
    max_video_preview: int | None = None
    """Seconds; -1 is as many as one likes."""
    unavailable_after: datetime | None = None
    """Not to be shown after this moment (aware, UTC)."""

    @property
    def index(self) -> bool:
        """The page may be indexed."""
        return "noindex" not in self.names

    @property
    def follow(self) -> bool:
        """Its links may be followed."""
        return "nofollow" not in self.names


class PageSignals(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a response's header says of itself.

    >>> from_headers({"X-Robots-Tag": "noindex", "Content-Usage": "train-ai=n"}, "bot").rules.index
    False
    """

    content_usage: dict[str, str]
    """Category to `y` or `n`; what is missing is unknown (SIG-02)."""
    rules: PageRules
    """X-Robots-Tag and Robots-Tag together."""
    tdm_reserved: bool | None
    """Text and data mining is reserved; None: unset (SIG-18)."""
    tdm_policy: str | None
    """Where the policy stands that goes with the reservation."""
    licenses: tuple[str, ...]
    """Absolute URLs of licences (SIG-15)."""


def from_headers(headers: Mapping[str, str], agent: str, *, url: str | None = None) -> PageSignals:
    """Read a response's header fields for one agent (a product token).

    `headers` is a mapping that ignores case, with `getall` where a field may come several
    times (aiohttp's), or any mapping with the usual spelling. `url`, the page's own, resolves
    relative licences.
    """
    links = parse_license_links(_all(headers, "Link"), url=url)
    policy = _all(headers, "tdm-policy")
    return PageSignals(
        content_usage=parse_content_usage_header(_all(headers, "Content-Usage")),
        rules=_strictest(
            [
                parse_x_robots_tag(_all(headers, "X-Robots-Tag"), agent),
                parse_robots_tag(_all(headers, "Robots-Tag"), agent),
            ]
        ),
        tdm_reserved=parse_tdm_reservation(_all(headers, "tdm-reservation")),
        tdm_policy=absolute_url(policy[0].strip()) if len(policy) == 1 else None,
        licenses=links,
    )


def parse_content_usage_header(values: Iterable[str]) -> dict[str, str]:
    """Preferences of a response; several fields are one Dictionary (SIG-03, RFC 9651)."""
    return parse_preferences(_joined(values))


def parse_x_robots_tag(values: Iterable[str], agent: str) -> PageRules:
    """The rules for `agent` and for everybody (SIG-20).

    >>> parse_x_robots_tag(["otherbot: noindex", "unavailable_after: 25 Jun 2027 15:00 GMT"],
    ...                    "bot").names
    frozenset()
    """
    rules: list[PageRules] = []
    for value in values:
        concerned = True  # each field line begins by speaking to everybody
        for name, argument in _x_robots_rules(value[:_LIMIT]):
            if name is None:
                concerned = argument.lower() in {"*", agent.lower()}
            elif concerned:
                rules.append(_rule(name, argument))
    return _strictest(rules)


def parse_robots_tag(values: Iterable[str], agent: str) -> PageRules:
    """The same from a Robots-Tag: `*` and the agent's own member together (SIG-21).

    >>> sorted(parse_robots_tag(["*;nosnippet, ExampleBot;noindex"], "examplebot").names)
    ['noindex', 'nosnippet']
    """
    try:
        members = parse_list(_joined(values))
    except FieldError:
        return PageRules()
    rules: list[PageRules] = []
    for item in members:
        if isinstance(item.value, Token) and item.value.lower() in {"*", agent.lower()}:
            for name, argument in item.params.items():
                if argument is not False:
                    text = "" if argument is True else str(argument)
                    rules.append(_rule(name, text))
    return _strictest(rules)


def parse_tdm_reservation(values: Iterable[str]) -> bool | None:
    """`1` is reserved, `0` is not, anything else is unset (SIG-18); reserved beats free."""
    said = {value.strip() for value in values}
    if "1" in said:
        return True
    return False if "0" in said else None


def parse_license_links(values: Iterable[str], *, url: str | None = None) -> tuple[str, ...]:
    """Absolute URLs behind `Link: <...>; rel="license"` (SIG-15), in order, each once."""
    found: dict[str, None] = {}
    for value in values:
        for link in _LINK.finditer(value[:_LIMIT]):
            params: dict[str, str] = {}
            for name, quoted, bare in _LINK_PARAM.findall(link[2]):
                params.setdefault(name.lower(), quoted or bare)  # RFC 8288: the first counts
            if "license" in params.get("rel", "").lower().split():
                target = _resolved(link[1].strip(), url)
                if target is not None:
                    found[target] = None
    return tuple(found)


def _resolved(reference: str, base: str | None) -> str | None:
    try:
        if base is None:
            return absolute_url(reference)
        return urls.join(urls.parse(base), reference).url
    except InvalidURL:
        return None


def _x_robots_rules(value: str) -> Iterator[tuple[str | None, str]]:
    """(name, argument) of each rule, and (None, agent) where another agent is addressed."""
    parts = iter(value.split(","))
    for part in parts:
        head, colon, rest = part.partition(":")
        name = head.strip().lower()
        # `otherbot: noindex` and `unavailable_after: ...` share the colon: what has an
        # argument by its name has one, any other word before a colon is an agent's.
        if colon and name not in _ARGUMENTS:
            yield None, name if _AGENT.match(name) else ""
            head, _, rest = rest.partition(":")
            name = head.strip().lower()
        argument = rest.strip()
        if name == "unavailable_after" and _WEEKDAY.match(argument.lower()):
            argument = f"{argument},{next(parts, '')}"  # `Fri, 25 Jun 2027`: one date, one comma
        yield name, argument


def _rule(name: str, argument: str) -> PageRules:
    if name == "none":
        return PageRules(names=frozenset({"noindex", "nofollow"}))
    if name == "unavailable_after":
        return PageRules(unavailable_after=_date(argument))
    if name == "max-image-preview":
        size = argument.lower()
        return PageRules(max_image_preview=size if size in _PREVIEWS else None)
    if name in {"max-snippet", "max-video-preview"}:
        count = int(argument) if _COUNT.match(argument) else None
        if name == "max-snippet":
            return PageRules(max_snippet=count)
        return PageRules(max_video_preview=count)
    if name == "all" or argument or not _NAME.match(name):
        return PageRules()
    return PageRules(names=frozenset({name}))


def _strictest(rules: Sequence[PageRules]) -> PageRules:
    previews = _PREVIEWS.index
    return PageRules(
        names=frozenset().union(*[each.names for each in rules]),
        max_snippet=_least([each.max_snippet for each in rules], _room),
        max_image_preview=_least([each.max_image_preview for each in rules], previews),
        max_video_preview=_least([each.max_video_preview for each in rules], _room),
        unavailable_after=_least([each.unavailable_after for each in rules], datetime.timestamp),
    )


def _least(values: Iterable[_Value | None], key: Callable[[_Value], float]) -> _Value | None:
    return min((value for value in values if value is not None), key=key, default=None)


def _room(count: int) -> float:
    return float("inf") if count == _UNLIMITED else count


def _date(text: str) -> datetime | None:
    """RFC 822, RFC 850 or ISO 8601; a date without a zone is UTC."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - a dear import, seldom used

    moment: datetime | None = None
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = read(text)
            break
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
    if moment is None:
        return None
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        return None


def _joined(values: Iterable[str]) -> str:
    text = ", ".join(values)
    return text if len(text) <= _LIMIT else ""  # cut, it would be another field


def _all(headers: Mapping[str, str], name: str) -> list[str]:
    getall = getattr(headers, "getall", None)
    if getall is not None:
        return list(getall(name, ()))
    value = headers.get(name, headers.get(name.lower()))
    return [] if value is None else [value]
