"""What the header of a response and the beginning of a page say about use, indexing and licences.

They are parsed and passed on; none of them changes which URLs may be fetched. In a header:
Content-Usage (SIG-03), X-Robots-Tag (SIG-20), Robots-Tag (SIG-21), tdm-reservation (SIG-19), Link
rel="license" (SIG-15). In a page: meta elements such as `<meta name="robots" content="noindex">`
(SIG-20). No function raises: what cannot be parsed is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import chain

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.http_fields import LIST_MEMBER, PARAM, members
from gatekeeper.robots.signals import (
    MAX_FIELD,
    QUOTED_PAIR,
    AccessChallenge,
    absolute_url,
    field_values,
    parse_challenges,
    parse_preferences,
    payment_asked,
)

_Rules = Iterator[tuple[str, str]]
"""Rules of a page: their names in lower case, and their arguments, or empty texts."""

_ARGUMENTS = frozenset(
    {"unavailable_after", "max-image-preview", "max-snippet", "max-video-preview"}
)
_PREVIEWS = ("none", "standard", "large")
_WEEKDAY = re.compile(r"(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\Z")
_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")
_COUNT = re.compile(r"-1\Z|[0-9]{1,9}\Z")
_LONGEST_PRICE = 100

_LINK = re.compile(
    r"<([^<>]*)>[ \t]*((?>(?:;[ \t]*[^\s=;,\"<>]+[ \t]*"
    r"(?:=[ \t]*(?:\"(?>(?:[^\"\\]|\\.)*)\"|[^\s;,\"<>]*+)[ \t]*)?)*))"
)
_LINK_PARAM = re.compile(r";[ \t]*([^\s=;,]+)[ \t]*(?:=[ \t]*(?:\"([^\"]*)\"|([^\s;,]*)))?")


class PageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Indexing rules for one page and one agent, the most restrictive ones of several sources
    (SIG-20)."""

    names: frozenset[str] = frozenset()
    """Rules without a value, in lower case: `noindex`, `nofollow`, `noarchive`, `noai`, ... `none`
    is stored as `noindex` and `nofollow`; `all` is left out."""
    max_snippet: int | None = None
    """Maximum number of characters; -1 means unlimited."""
    max_image_preview: str | None = None
    """`none`, `standard` or `large`."""
    max_video_preview: int | None = None
    """Maximum number of seconds; -1 means unlimited."""
    unavailable_after: datetime | None = None
    """Moment after which the page must not be shown (aware, UTC)."""

    @property
    def index(self) -> bool:
        """Whether the page may be indexed."""
        return "noindex" not in self.names

    @property
    def follow(self) -> bool:
        """Whether the page's links may be followed."""
        return "nofollow" not in self.names


class PageSignals(msgspec.Struct, frozen=True, kw_only=True):
    """All signals in the header of a response, and in the page's meta robots.

    >>> page_signals({"X-Robots-Tag": "noindex", "Content-Usage": "train-ai=n"}, "bot").rules.index
    False
    """

    content_usage: dict[str, str]
    """Category to `y` or `n`; a missing category is unknown (SIG-02)."""
    rules: PageRules
    """X-Robots-Tag, Robots-Tag and meta robots combined."""
    tdm_reserved: bool | None
    """Whether text and data mining is reserved; None if not specified (SIG-18)."""
    tdm_policy: str | None
    """URL of the policy for the reservation."""
    licenses: tuple[str, ...]
    """Absolute URLs of licences (SIG-15)."""
    payment_required: bool = False
    """Whether the status is 402 or a header field asks for a payment."""
    license_required: bool = False
    """Whether a licence is required: `WWW-Authenticate: License` (RSL 1.0, SIG-16)."""
    price: str | None = None
    """Value of `crawler-price`, such as `USD 0.01` (Cloudflare's pay per crawl)."""
    challenges: tuple[AccessChallenge, ...] = ()
    """The licence and payment challenges of WWW-Authenticate, in order."""


PAGE_FIELDS = frozenset(
    [
        "content-usage",
        "crawler-price",
        "link",
        "payment-required",
        "robots-tag",
        "tdm-policy",
        "tdm-reservation",
        "www-authenticate",
        "x-robots-tag",
    ]
)
"""The fields that `page_signals` reads, in lower case. Without any of them only the status and the
page itself are signals."""


def page_signals(
    headers: Mapping[str, str],
    agent: str,
    html: bytes | str = b"",
    *,
    url: str | None = None,
    status: int | None = None,
) -> PageSignals:
    """Parse the header fields of a response, and its page, for one agent (a product token).

    `headers` is a case-insensitive mapping, with `getall` if a field may occur several times (as in
    aiohttp), or any mapping with the usual spelling of names. `html` is the beginning of the page,
    of which 64 KiB are read: its meta elements named `robots`, or like the agent, count as
    X-Robots-Tag does; of several rules the strictest applies. `url`, the page's own URL, is the
    base of relative licence URLs. `status` is the status of the response.

    >>> page_signals({}, "bot", b'<meta name="bot" content="noindex">').rules.index
    False
    """
    links = parse_license_links(field_values(headers, "Link"), url=url)
    policy = field_values(headers, "tdm-policy")
    challenges = parse_challenges(field_values(headers, "WWW-Authenticate"))
    price = field_values(headers, "Crawler-Price")
    return PageSignals(
        # Several fields form one Dictionary (SIG-03, RFC 9651).
        content_usage=parse_preferences(_joined(field_values(headers, "Content-Usage"))),
        rules=_strictest(
            chain(
                _header_rules(field_values(headers, "X-Robots-Tag"), agent),
                _tag_rules(field_values(headers, "Robots-Tag"), agent),
                _meta_rules(html, agent),
            )
        ),
        tdm_reserved=parse_tdm_reservation(field_values(headers, "tdm-reservation")),
        tdm_policy=absolute_url(policy[0].strip()) if len(policy) == 1 else None,
        licenses=links,
        payment_required=payment_asked(status, headers, challenges),
        license_required=any(challenge.scheme == "license" for challenge in challenges),
        price=price[0].strip()[:_LONGEST_PRICE] if price and price[0].isprintable() else None,
        challenges=challenges,
    )


def html_in(content_type: str | None, body: bytes) -> bytes:
    """Return the beginning of a body for `page_signals`, if its Content-Type is that of a page.

    >>> html_in("text/html; charset=utf-8", b"<p>"), html_in("image/png", b"...")
    (b'<p>', b'')
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    return body[:MAX_HTML] if kind in {"text/html", "application/xhtml+xml"} else b""


def _header_rules(values: Iterable[str], agent: str) -> _Rules:
    """Yield the rules of X-Robots-Tag for `agent` and for all agents (SIG-20)."""
    for value in values:
        concerned = True  # each field line applies to all agents until it names one
        parts = iter(value[:MAX_FIELD].split(","))
        for part in parts:
            head, colon, rest = part.partition(":")
            name = head.strip().lower()
            # `otherbot: noindex` and `unavailable_after: ...` both have a colon. The names of rules
            # with an argument are known; any other word before a colon is the name of an agent.
            if colon and name not in _ARGUMENTS:
                concerned = name in {"*", agent.lower()}
                head, _, rest = rest.partition(":")
                name = head.strip().lower()
            argument = _argument(name, rest, parts)
            if concerned:
                yield name, argument


def _tag_rules(values: Iterable[str], agent: str) -> _Rules:
    """Yield the rules of a Robots-Tag, of its members `*` and the agent's own (SIG-21)."""
    for token, params in members(LIST_MEMBER, _joined(values)) or ():
        if token.lower() in {"*", agent.lower()}:
            for name, value in dict(members(PARAM, params) or ()).items():
                if value != "?0":
                    yield name, _argument_of(value)


def _argument_of(value: str) -> str:
    """Return the value of a parameter as X-Robots-Tag has it; empty if it has none."""
    if value[:1] == '"':
        return QUOTED_PAIR.sub(r"\1", value[1:-1])
    if value[:1] == "@":
        with suppress(ValueError, OverflowError, OSError):  # a date that no calendar holds
            return str(datetime.fromtimestamp(int(value[1:]), UTC))
    return "" if value == "?1" else value


def _meta_rules(html: bytes | str, agent: str) -> _Rules:
    """Yield the rules of a page's meta elements for `agent` and for all agents (SIG-20)."""
    for content in meta_contents(html, {"robots", agent.lower()}) if html else ():
        parts = iter(content.split(","))
        for part in parts:
            head, colon, rest = part.partition(":")
            if colon:
                name = head.strip().lower()
                yield name, _argument(name, rest, parts)
            else:  # some authors leave the commas out
                yield from [(word.lower(), "") for word in part.split()]


def parse_tdm_reservation(values: Iterable[str]) -> bool | None:
    """Return True for `1` (reserved), False for `0`, None for anything else (SIG-18). Reserved
    takes precedence: several fields may have been joined with commas (RFC 9110 section 5.3)."""
    stripped = {each.strip() for value in values for each in value[:MAX_FIELD].split(",")}
    if "1" in stripped:
        return True
    return False if "0" in stripped else None


def parse_license_links(values: Iterable[str], *, url: str | None = None) -> tuple[str, ...]:
    """Return the absolute URLs in `Link: <...>; rel="license"` (SIG-15), in order, without
    duplicates."""
    found: dict[str, None] = {}
    for value in values:
        for link in _LINK.finditer(value[:MAX_FIELD]):
            params: dict[str, str] = {}
            for name, quoted, bare in _LINK_PARAM.findall(link[2]):
                params.setdefault(name.lower(), quoted or bare)  # RFC 8288: the first counts
            if "license" in params.get("rel", "").lower().split():
                target = _resolve(link[1].strip(), url)
                if target is not None:
                    found[target] = None
    return tuple(found)


def _resolve(reference: str, base: str | None) -> str | None:
    try:
        return urls.join(urls.parse(base), reference).url if base else absolute_url(reference)
    except InvalidURL:
        return None


def _argument(name: str, rest: str, parts: Iterator[str]) -> str:
    """Return the argument of a rule; a date such as `Fri, 25 Jun 2027` takes the next part, too."""
    argument = rest.strip()
    if name == "unavailable_after" and _WEEKDAY.match(argument.lower()):
        argument = f"{argument},{next(parts, '')}"
    return argument


def _strictest(rules: _Rules) -> PageRules:
    names: set[str] = set()
    counts: dict[str, list[int]] = {"max-snippet": [], "max-video-preview": []}
    previews: list[str] = []
    moments: list[datetime] = []
    for name, argument in rules:
        if name == "none":
            names |= {"noindex", "nofollow"}
        elif name in counts:
            if _COUNT.match(argument):
                counts[name].append(int(argument))
        elif name == "max-image-preview":
            if argument.lower() in _PREVIEWS:
                previews.append(argument.lower())
        elif name == "unavailable_after":
            moments += _parse_date(argument)
        elif name != "all" and not argument and _NAME.match(name):
            names.add(name)
    snippet, video = (min(each, key=_as_limit, default=None) for each in counts.values())
    return PageRules(
        names=frozenset(names),
        max_snippet=snippet,
        max_image_preview=min(previews, key=_PREVIEWS.index, default=None),
        max_video_preview=video,
        unavailable_after=min(moments, default=None),
    )


def _as_limit(count: int) -> float:
    return float("inf") if count == -1 else count  # unlimited


def _parse_date(text: str) -> list[datetime]:
    """Return the moment of a date of RFC 822, RFC 850 or ISO 8601; none for other text. A date
    without a time zone is UTC."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - slow import, rarely used

    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError, TypeError, IndexError, OverflowError):
            moment = read(text)
            return [moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)]
    return []


def _joined(values: Iterable[str]) -> str:
    text = ", ".join(values)
    return text if len(text) <= MAX_FIELD else ""  # truncated, the field would mean something else


MAX_HTML = 65_536
"""Octets of a page that are read; its head is at the beginning."""
_MAX_TAG = 2_048
"""Characters after the last name that are read, for the rest of its tag."""


def meta_contents(html: bytes | str, names: Collection[str]) -> list[str]:
    """Return the contents of the meta elements with one of these names (in lower case), in order.

    It never raises, and takes time in proportion to the 64 KiB that it reads.

    >>> meta_contents(b'<!doctype html><META NAME=Robots content="noindex, noai">', ["robots"])
    ['noindex, noai']
    """
    text = _text(html)
    # Most pages have none, and the others have them at the beginning: the tokenizer takes ten
    # milliseconds for 64 KiB.
    alternatives = "|".join(map(re.escape, sorted(names)))
    named = rf"name\s*+=\s*+[\"']?\s*+(?:{alternatives})"
    last = max((found.end() for found in re.finditer(named, text.lower())), default=None)
    if last is None:
        return []
    reader = _MetaReader(names)
    # Not closed afterwards: the text may end in the middle of a tag or a comment, and some versions
    # of Python would then look for the end of each `<!--` before it, in quadratic time.
    with suppress(AssertionError, ValueError):  # what is too broken is read no further
        reader.feed(text[: last + _MAX_TAG])
    return reader.found


def _text(html: bytes | str) -> str:
    """Decode the beginning of a page. Names and rules are ASCII, so any superset of it will do."""
    start = html[:MAX_HTML]
    if isinstance(start, str):
        return start
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return start.decode("utf-16", "replace")
    return start.decode("latin-1")


class _MetaReader(HTMLParser):
    """Collects the contents of meta elements."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(convert_charrefs=True)
        self._names = names
        self.found: list[str] = []

    def parse_html_declaration(self, i: int) -> int:
        """Skip a declaration. `<![...>` is a comment, as in browsers; Python raises for some."""
        if self.rawdata.startswith("<![", i):
            return self.rawdata.find(">", i) + 1 or -1
        return super().parse_html_declaration(i)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at a start tag."""
        if tag == "meta":
            values: dict[str, str] = {}
            for name, value in attrs:
                values.setdefault(name, value or "")  # of two equal names the first counts
            if values.get("name", "").strip().lower() in self._names:
                self.found.append(values.get("content", ""))
