"""Signals about use and licences in robots.txt, and what a response asks for before it is served.

They are parsed and passed on; none of them changes which URLs may be fetched. In robots.txt:
Content-Usage (draft-ietf-aipref-attach), Content-Signal, Clean-param, Host, License. In a response:
licence and payment challenges. No function raises: what cannot be parsed is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.http_fields import BARE, ITEMS, KEY, NEXT, PARAMS, members

_PATH = re.compile(r"(/[^ \t]*+)[ \t]*+")
_SIGNAL = re.compile(r"[ \t]*+([A-Za-z0-9_-]++)[ \t]*+=[ \t]*+([A-Za-z0-9_-]++)[ \t]*+\Z")
_YES_OR_NO = frozenset({"search", "ai-input", "ai-train"})

# SIG-12: the AIPREF labels that correspond to Content-Signal. `ai-input` has no label.
CATEGORIES = frozenset({"train-ai", "search"})
"""The labels of the vocabulary (SIG-01)."""

_LABEL = (
    rf"({KEY})(?:=(?:([yn])(?![!#$%&'*+\-.^_`|~0-9A-Za-z:/]){PARAMS}|{BARE}{PARAMS}|{ITEMS})"
    rf"|{PARAMS}){NEXT}"
)

_CLEAN_PARAM_LIMIT = 500  # VND-12


class CleanParam(msgspec.Struct, frozen=True):
    """Query parameters that do not change the content of a page (VND-12)."""

    params: tuple[str, ...]
    """Names of the parameters."""
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
    labels = members(_LABEL, text)
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


MAX_FIELD = 65_536
"""Maximum number of characters that are read of one field. The latest draft requires at least 8 KiB
(SIG-21)."""


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
_LONGEST_PARAM = 4_096
"""Maximum number of characters of a parameter; the invoice of a payment has some hundred."""
_CHALLENGE_PART = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]++)"
    r"(?:[ \t]*+=[ \t]*+(?:\"((?>(?:[^\"\\]|\\.)*))\"|([^\s,\"]*+)))?"
)
_TO_QUOTE = re.compile(r"[\"\\]")
QUOTED_PAIR = re.compile(r"\\(.)")


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
        for part in _CHALLENGE_PART.finditer(value[:MAX_FIELD]):
            name, quoted, bare = part[1].lower(), part[2], part[3]
            if quoted is not None or bare is not None:
                if params is not None and len(params) < _MAX_PARAMS:
                    value_text = bare if quoted is None else QUOTED_PAIR.sub(r"\1", quoted)
                    params.setdefault(name, value_text[:_LONGEST_PARAM])
                continue
            params = None
            if name in _SCHEMES:
                if len(found) >= _MAX_CHALLENGES:
                    return tuple(found)
                params = {}
                found.append(AccessChallenge(name, params))
    return tuple(found)


def field_values(headers: Mapping[str, str], name: str) -> list[str]:
    """Return the value of each line of a header field."""
    getall = getattr(headers, "getall", None)
    if getall is not None:
        return list(getall(name, ()))
    value = headers.get(name, headers.get(name.lower()))
    return [] if value is None else [value]
