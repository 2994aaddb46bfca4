"""Signals about use, indexing and licences, in robots.txt, in response headers and in pages.

They are parsed and passed on; none of them changes which URLs may be fetched. In robots.txt:
Content-Usage (draft-ietf-aipref-attach), Content-Signal, Clean-param, Host, License. In a response:
Content-Usage (SIG-03), X-Robots-Tag (SIG-20), Robots-Tag (SIG-21), tdm-reservation (SIG-19), Link
rel="license" (SIG-15). In a page: meta robots (SIG-20). No function raises: what cannot be parsed
is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import TypeVar

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL

_PATH = re.compile(r"(/[^ \t]*+)[ \t]*+")
_SIGNAL = re.compile(r"[ \t]*+([A-Za-z0-9_-]++)[ \t]*+=[ \t]*+([A-Za-z0-9_-]++)[ \t]*+\Z")
_YES_OR_NO = frozenset({"search", "ai-input", "ai-train"})

# SIG-12: the AIPREF labels that correspond to Content-Signal. `ai-input` has no label.
CATEGORIES = frozenset({"train-ai", "search"})
"""The labels of the vocabulary (SIG-01)."""

# The grammar of structured fields (RFC 9651). Every repetition is possessive or
# atomic, so the time is linear.
_KEY = r"[a-z*][a-z0-9_\-.*]*+"
_TAIL = "%[89ab][0-9a-f]"
_BARE = (
    r"(?:[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*+"
    r"|-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})(?![0-9.])"
    r'|"(?>(?:[ !#-\[\]-~]|\\["\\])*)"'
    r"|\?[01]"
    r"|@-?[0-9]{1,15}(?![0-9.])"
    r"|:[A-Za-z0-9+/=]*+:"
    # A display string is UTF-8.
    rf'|%"(?>(?:[ !#$&-~]|%[0-7][0-9a-f]|%(?:c[2-9a-f]|d[0-9a-f]){_TAIL}'
    rf"|%(?:e0%[ab][0-9a-f]|e[1-9abcef]{_TAIL}|ed%[89][0-9a-f]){_TAIL}"
    rf'|%(?:f0%[9ab][0-9a-f]|f[123]{_TAIL}|f4%8[0-9a-f]){_TAIL}{_TAIL})*)")'
)
_PARAMS = rf"(?>(?:; *+{_KEY}(?>(?:={_BARE})?))*)"
_ITEMS = rf"\( *+(?>(?:{_BARE}{_PARAMS}(?>(?: ++{_BARE}{_PARAMS})*) *+)?)\){_PARAMS}"
_NEXT = r"[ \t]*+(?:,[ \t]*+(?!\Z)|\Z)"
_LABEL = (
    rf"({_KEY})(?:=(?:([yn])(?![!#$%&'*+\-.^_`|~0-9A-Za-z:/]){_PARAMS}|{_BARE}{_PARAMS}|{_ITEMS})"
    rf"|{_PARAMS}){_NEXT}"
)
_PARAM = rf"; *+({_KEY})(?:=({_BARE}))?"
_ROBOTS_TAG = rf"(?:({_BARE})({_PARAMS})|{_ITEMS}){_NEXT}"


@cache
def _members_of(member: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return an expression that matches a whole field of such members, and one for each of them."""
    # Without groups: Python 3.11 loses groups inside a possessive repetition.
    unmarked = re.sub(r"(?<!\\)\((?!\?)", "(?:", member)
    return re.compile(rf" *+(?>(?:{unmarked})*)\Z"), re.compile(member)


def _members(member: str, text: str) -> list[tuple[str, str]] | None:
    """Return the two groups of each member of a structured field, or None if the text is none."""
    whole, each = _members_of(member)
    return each.findall(text) if whole.match(text) else None


_CLEAN_PARAM_LIMIT = 500  # VND-12


class CleanParam(msgspec.Struct, frozen=True):
    """Query parameters that do not change the content of a page (VND-12)."""

    params: tuple[str, ...]
    path: str
    """Prefix of the paths to which this applies; empty for every path."""


def split_content_usage(value: str) -> tuple[str, str]:
    """Return path pattern and preferences of a Content-Usage line, the latter unparsed (SIG-04).

    The path is empty if the line has none; it is then the shortest path (SIG-05).

    >>> split_content_usage("/open/ train-ai=y")
    ('/open/', 'train-ai=y')
    """
    found = _PATH.match(value)
    return (found[1], value[found.end() :]) if found else ("", value)


def parse_preferences(text: str) -> dict[str, str]:
    """Return the preferences in a Dictionary; none if it cannot be parsed (SIG-02, SIG-08).

    Labels that are not in the vocabulary are ignored (SIG-01); the text of the line still has them.

    >>> parse_preferences("train-ai=n, search=maybe"), parse_preferences("Train-AI=n")
    ({'train-ai': 'n'}, {})
    """
    labels = usage_labels(text)
    return {
        label: answer for label, answer in (labels or {}).items() if answer and label in CATEGORIES
    }


def usage_labels(text: str) -> dict[str, str] | None:
    """Return every label of a Dictionary with `y`, `n`, or the empty string for any other value;
    the last of several members with one label counts.

    Return None if the text cannot be parsed.
    """
    labels = _members(_LABEL, text)
    return None if labels is None else dict(labels)


def combine(views: Iterable[Mapping[str, str]], no: str) -> dict[str, str]:
    """Combine several sources: for each key the answer `no` beats any other (SIG-07); otherwise the
    first one counts.

    >>> combine([{"search": "y", "train-ai": "y"}, {"train-ai": "n"}], "n")
    {'search': 'y', 'train-ai': 'n'}
    """
    combined: dict[str, str] = {}
    for view in views:
        for key, answer in view.items():
            if answer == no or key not in combined:
                combined[key] = answer
    return combined


def parse_content_signal(value: str) -> dict[str, str]:
    """Return the keys and values of a Content-Signal line in lower case (SIG-12).

    Malformed pairs are left out, and so are answers other than yes or no for a yes-or-no key.
    Unknown keys are included.

    >>> parse_content_signal("search=yes,ai-train = no, use=reference, x")
    {'search': 'yes', 'ai-train': 'no', 'use': 'reference'}
    """
    # Repeated pairs are parsed once: a line of commas may hold 500,000 equal ones.
    return combine(map(_parse_pair, dict.fromkeys(value.split(","))), "no")


def absolute_url(value: str) -> str | None:
    """Return the value of a Sitemap (VND-13) or License line (SIG-15) if it is an absolute URL,
    else None.

    >>> absolute_url("https://example.com/s.xml"), absolute_url("/s.xml")
    ('https://example.com/s.xml', None)
    """
    if len(value) > urls.MAX_URL:
        return None  # avoids building a message of half a megabyte
    try:
        urls.parse(value)
    except InvalidURL:
        return None
    return value


def parse_host(value: str) -> str | None:
    """Return the value of a Host line (VND-13), with or without a scheme, if it names a host, else
    None."""
    return value if value and absolute_url(value if "://" in value else f"http://{value}") else None


def parse_clean_param(value: str) -> CleanParam | None:
    """Parse the value of a Clean-param line: `p0[&p1...] [path]`, case-sensitive (VND-12).

    Return None if it is malformed.

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


def _parse_pair(text: str) -> dict[str, str]:
    found = _SIGNAL.match(text)
    if found is None:
        return {}
    key, answer = found[1].lower(), found[2].lower()
    if key in _YES_OR_NO and answer not in ("yes", "no"):
        return {}
    return {key: answer}


_Value = TypeVar("_Value")

_LIMIT = 65_536
"""Maximum number of characters that are read of one field. The latest draft requires at least 8 KiB
(SIG-21)."""

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


class AccessChallenge(msgspec.Struct, frozen=True):
    """A request in a WWW-Authenticate field for a licence or a payment."""

    scheme: str
    """In lower case: `license` (RSL), `payment` (draft-httpauth-payment), `l402`, `lsat` or
    `x402`."""
    params: dict[str, str]
    """The parameters, names in lower case; the first of several with one name."""

    @property
    def text(self) -> str:
        """The challenge as it appears in the field."""
        quoted = ((name, _TO_QUOTE.sub(r"\\\g<0>", value)) for name, value in self.params.items())
        params = ", ".join([f'{name}="{value}"' for name, value in quoted])
        return f"{self.scheme} {params}".rstrip()

    @property
    def pays(self) -> bool:
        """Whether the challenge asks for a payment."""
        return self.scheme in _PAYMENTS


_PAYMENTS = frozenset({"payment", "l402", "lsat", "x402"})
_SCHEMES = _PAYMENTS | {"license"}
_MAX_CHALLENGES = 20
_MAX_PARAMS = 50
_LONGEST_PRICE = 100
_LONGEST_PARAM = 4_096
"""Maximum number of characters of a parameter; the invoice of a payment has some hundred."""
_CHALLENGE_PART = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]++)"
    r"(?:[ \t]*+=[ \t]*+(?:\"((?>(?:[^\"\\]|\\.)*))\"|([^\s,\"]*+)))?"
)
_TO_QUOTE = re.compile(r"[\"\\]")
_QUOTED_PAIR = re.compile(r"\\(.)")


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
        content_usage=parse_content_usage_header(field_values(headers, "Content-Usage")),
        rules=_strictest(
            [
                parse_x_robots_tag(field_values(headers, "X-Robots-Tag"), agent),
                parse_robots_tag(field_values(headers, "Robots-Tag"), agent),
                parse_meta_robots(html, agent),
            ]
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
    return body[:_LIMIT] if kind in {"text/html", "application/xhtml+xml"} else b""


def payment_asked(
    status: int | None, headers: Mapping[str, str], challenges: Iterable[AccessChallenge]
) -> bool:
    """Return True if a response asks for a payment (RFC 9110 section 15.5.3 and the schemes based
    on it).

    x402 puts its terms into a Payment-Required field, pay per crawl its price into crawler-price.
    """
    return (
        status == 402
        or any(challenge.pays for challenge in challenges)
        or any(field_values(headers, name) for name in ("Crawler-Price", "Payment-Required"))
    )


def parse_challenges(values: Iterable[str]) -> tuple[AccessChallenge, ...]:
    """Return the licence and payment challenges of WWW-Authenticate (RFC 9110 section 11.6.1).

    Other schemes, such as Basic, are left out.

    >>> parse_challenges(['Basic realm="x", License error="invalid_token", realm="y"'])
    (AccessChallenge(scheme='license', params={'error': 'invalid_token', 'realm': 'y'}),)
    """
    found: list[AccessChallenge] = []
    for value in values:
        params: dict[str, str] | None = None
        for part in _CHALLENGE_PART.finditer(value[:_LIMIT]):
            name, quoted, bare = part[1].lower(), part[2], part[3]
            if quoted is not None or bare is not None:
                if params is not None and len(params) < _MAX_PARAMS:
                    value_text = bare if quoted is None else _QUOTED_PAIR.sub(r"\1", quoted)
                    params.setdefault(name, value_text[:_LONGEST_PARAM])
                continue
            params = None
            if name in _SCHEMES:
                if len(found) >= _MAX_CHALLENGES:
                    return tuple(found)
                params = {}
                found.append(AccessChallenge(name, params))
    return tuple(found)


def parse_content_usage_header(values: Iterable[str]) -> dict[str, str]:
    """Return the preferences of a response. Several fields form one Dictionary (SIG-03, RFC
    9651)."""
    return parse_preferences(_joined(values))


def parse_x_robots_tag(values: Iterable[str], agent: str) -> PageRules:
    """Return the rules for `agent` and for all agents (SIG-20).

    >>> parse_x_robots_tag(["otherbot: noindex", "unavailable_after: 25 Jun 2027 15:00 GMT"],
    ...                    "bot").names
    frozenset()
    """
    rules: list[PageRules] = []
    for value in values:
        concerned = True  # each field line applies to all agents until it names one
        for name, argument in _iter_x_robots_rules(value[:_LIMIT]):
            if name is None:
                concerned = argument.lower() in {"*", agent.lower()}
            elif concerned:
                rules.append(_parse_page_rule(name, argument))
    return _strictest(rules)


def parse_robots_tag(values: Iterable[str], agent: str) -> PageRules:
    """Return the rules of a Robots-Tag: its members `*` and the agent's own combined (SIG-21).

    >>> sorted(parse_robots_tag(["*;nosnippet, ExampleBot;noindex"], "examplebot").names)
    ['noindex', 'nosnippet']
    """
    rules: list[PageRules] = []
    for token, params in _members(_ROBOTS_TAG, _joined(values)) or ():
        if token.lower() in {"*", agent.lower()}:
            arguments = dict(_members(_PARAM, params) or ())
            rules += [
                _parse_page_rule(name, _argument_of(value))
                for name, value in arguments.items()
                if value != "?0"
            ]
    return _strictest(rules)


def _argument_of(value: str) -> str:
    """Return the value of a parameter as X-Robots-Tag has it; empty if it has none."""
    if value[:1] == '"':
        return _QUOTED_PAIR.sub(r"\1", value[1:-1])
    if value[:1] == "@":
        with suppress(ValueError, OverflowError, OSError):  # a date that no calendar holds
            return str(datetime.fromtimestamp(int(value[1:]), UTC))
    return "" if value == "?1" else value


def parse_meta_robots(html: bytes | str, agent: str) -> PageRules:
    """Return the rules of a page's meta elements for `agent` and for all agents (SIG-20).

    >>> rules = parse_meta_robots('<meta name="bot" content="none, max-snippet:5">', "bot")
    >>> sorted(rules.names), rules.max_snippet
    (['nofollow', 'noindex'], 5)
    """
    if not html:
        return PageRules()
    from gatekeeper.robots.meta_tags import meta_contents  # noqa: PLC0415 - a slow import

    rules: list[PageRules] = []
    for content in meta_contents(html, {"robots", agent.lower()}):
        parts = iter(content.split(","))
        for part in parts:
            head, colon, rest = part.partition(":")
            if colon:
                name = head.strip().lower()
                rules.append(_parse_page_rule(name, _argument(name, rest, parts)))
            else:  # some authors leave the commas out
                rules += [_parse_page_rule(word.lower(), "") for word in part.split()]
    return _strictest(rules)


def parse_tdm_reservation(values: Iterable[str]) -> bool | None:
    """Return True for `1` (reserved), False for `0`, None for anything else (SIG-18). Reserved
    takes precedence: several fields may have been joined with commas (RFC 9110 section 5.3)."""
    stripped = {each.strip() for value in values for each in value[:_LIMIT].split(",")}
    if "1" in stripped:
        return True
    return False if "0" in stripped else None


def parse_license_links(values: Iterable[str], *, url: str | None = None) -> tuple[str, ...]:
    """Return the absolute URLs in `Link: <...>; rel="license"` (SIG-15), in order, without
    duplicates."""
    found: dict[str, None] = {}
    for value in values:
        for link in _LINK.finditer(value[:_LIMIT]):
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
        if base is None:
            return absolute_url(reference)
        return urls.join(urls.parse(base), reference).url
    except InvalidURL:
        return None


def _iter_x_robots_rules(value: str) -> Iterator[tuple[str | None, str]]:
    """Yield (name, argument) for each rule, and (None, agent) where the rules for another agent
    begin."""
    parts = iter(value.split(","))
    for part in parts:
        head, colon, rest = part.partition(":")
        name = head.strip().lower()
        # `otherbot: noindex` and `unavailable_after: ...` both have a colon. The names of rules
        # with an argument are known; any other word before a colon is the name of an agent.
        if colon and name not in _ARGUMENTS:
            yield None, name if _AGENT.match(name) else ""
            head, _, rest = rest.partition(":")
            name = head.strip().lower()
        yield name, _argument(name, rest, parts)


def _argument(name: str, rest: str, parts: Iterator[str]) -> str:
    """Return the argument of a rule; a date such as `Fri, 25 Jun 2027` takes the next part, too."""
    argument = rest.strip()
    if name == "unavailable_after" and _WEEKDAY.match(argument.lower()):
        argument = f"{argument},{next(parts, '')}"
    return argument


def _parse_page_rule(name: str, argument: str) -> PageRules:
    if name == "none":
        return PageRules(names=frozenset({"noindex", "nofollow"}))
    if name == "unavailable_after":
        return PageRules(unavailable_after=_parse_date(argument))
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
        max_snippet=_smallest([each.max_snippet for each in rules], _as_limit),
        max_image_preview=_smallest([each.max_image_preview for each in rules], previews),
        max_video_preview=_smallest([each.max_video_preview for each in rules], _as_limit),
        unavailable_after=_smallest([each.unavailable_after for each in rules], datetime.timestamp),
    )


def _smallest(values: Iterable[_Value | None], key: Callable[[_Value], float]) -> _Value | None:
    return min((value for value in values if value is not None), key=key, default=None)


def _as_limit(count: int) -> float:
    return float("inf") if count == _UNLIMITED else count


def _parse_date(text: str) -> datetime | None:
    """Parse a date of RFC 822, RFC 850 or ISO 8601, or return None. A date without a time zone is
    UTC."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - slow import, rarely used

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
    return text if len(text) <= _LIMIT else ""  # truncated, the field would mean something else


def field_values(headers: Mapping[str, str], name: str) -> list[str]:
    """Return the value of each line of a header field."""
    getall = getattr(headers, "getall", None)
    if getall is not None:
        return list(getall(name, ()))
    value = headers.get(name, headers.get(name.lower()))
    return [] if value is None else [value]
