"""The outcomes of retrieving a robots.txt, and their consequences. Pure: no clock, no I/O.

One table defines everything about an outcome: the verdict, the reason, how long to cache it and
whether to retry. `classify_head` finds the row of a response, `classify_error` that of an
exception; whatever has no row is `INTERNAL`, which defers, so that nothing unforeseen allows. The
module also has the checks whether a body is a text, a page or neither (linear in the body),
freshness (RFC 9111 section 4.2), the retry schedule after failures (RFC 9309 section 2.3.1.4), and
the inputs and results of a retrieval.

Times are seconds; "now" is wall time, which sites use in their headers.
"""

from __future__ import annotations

import codecs
import errno
import random
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import partial
from typing import Final, Protocol

import aiohttp
import msgspec

from gatekeeper.config import CacheConfig, FetchConfig
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.descriptors import is_shortage
from gatekeeper.errors import AddressRefused, causes
from gatekeeper.http_fields import REDIRECTS, delta_seconds, parse_http_date
from gatekeeper.robots.parser import KNOWN_FIELDS
from gatekeeper.robots.signals import field_values, parse_challenges, payment_asked
from gatekeeper.urls import Target


class CacheTime(StrEnum):
    """How long an outcome is cached."""

    FRESH = "fresh"
    """As HTTP's headers say, within the configured minimum and maximum."""
    DAY = "day"
    SIX_HOURS = "six_hours"
    LADDER = "ladder"
    """1, 2, 4, 8, 15, 30, 60 minutes ... 6 hours; Retry-After overrides."""
    SLOW_LADDER = "slow_ladder"
    """1 hour ... 24 hours: a name that doesn't exist won't appear within a minute."""
    LONG_LADDER = "long_ladder"
    """LADDER, continued to 24 hours."""
    NOT = "not"
    """Not cached: the outcome is no evidence about the site."""


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """One row of the table of outcomes; by default that of a failure."""

    number: int
    """The row's number in the table of outcomes; 0 if it is not listed there."""
    name: str
    reason: Reason
    cache_time: CacheTime = CacheTime.LADDER
    verdict: Verdict | None = Verdict.DEFER
    """None: the text decides."""
    state: State = State.UNREACHABLE
    retry: bool = False
    """The request is repeated once, immediately, before the row counts."""
    local: bool = False
    """If many origins have this outcome at the same time, our own uplink is failing."""
    lapses: bool = True
    """For a failure: after 12 hours or 30 days a `Fallback` may apply."""


_text = partial(
    OutcomeRow,
    reason=Reason.NO_RULE,
    cache_time=CacheTime.FRESH,
    verdict=None,
    state=State.PARSED,
)
_absent = partial(
    OutcomeRow, cache_time=CacheTime.DAY, verdict=Verdict.ALLOW, state=State.UNAVAILABLE
)
_unclear = partial(_absent, 14, cache_time=CacheTime.SIX_HOURS)
_failed = OutcomeRow
_WITH_TEXT = frozenset({1, 2, 4, 6, 22})
"""Numbers of the rows with a text for the parser."""


class Outcome(Enum):
    """Every outcome of a retrieval; the value is its row.

    What is needed for every origin is a plain attribute: Enum's `value` and hash cost a Python
    call each.
    """

    row: OutcomeRow
    """The outcome's row of the table."""
    good: bool
    """A file, or a definite absence: it becomes the last good copy."""
    has_text: bool
    """There is a text for the parser."""

    def __init__(self, row: OutcomeRow) -> None:
        self.row = row
        self.good = row.state is not State.UNREACHABLE
        self.has_text = row.number in _WITH_TEXT

    RULES = _text(1, "rules")
    EMPTY = _text(2, "empty", reason=Reason.EMPTY_FILE, verdict=Verdict.ALLOW)
    SOFT_404 = _absent(3, "soft_404", Reason.SOFT_404)
    HTML_RULES = _text(4, "html_rules")
    NOT_TEXT = _absent(5, "not_text", Reason.NOT_TEXT)
    TRANSFORMED_RULES = _text(6, "transformed_rules")
    CHALLENGE = _failed(7, "challenge", Reason.CHALLENGE)
    INVALID_RESPONSE = _failed(8, "invalid_response", Reason.INVALID_RESPONSE)
    NOT_MODIFIED = _text(9, "not_modified")
    NOT_MODIFIED_NOTHING = _failed(9, "not_modified_nothing", Reason.INVALID_RESPONSE, retry=True)
    REDIRECT = _text(10, "redirect", cache_time=CacheTime.NOT)
    TOO_MANY_REDIRECTS = _absent(11, "too_many_redirects", Reason.TOO_MANY_REDIRECTS)
    REDIRECTED_AWAY = _failed(11, "redirected_away", Reason.TOO_MANY_REDIRECTS)
    BAD_REDIRECT = _failed(12, "bad_redirect", Reason.BAD_REDIRECT)
    EGRESS_POLICY = _failed(13, "egress_policy", Reason.EGRESS_POLICY, CacheTime.DAY, lapses=False)
    # The origin's own name or address is refused, not a redirect's: a later attempt can't
    # help, so this denies, with one constant reason for clients (T2).
    BLOCKED = _failed(13, "blocked", Reason.BLOCKED, CacheTime.DAY, Verdict.DENY, lapses=False)
    NO_FILE = _absent(14, "no_file", Reason.NO_FILE)
    NO_FILE_SAID_OTHERWISE = _unclear("no_file_said_otherwise", Reason.NO_FILE)
    # Payment and licence challenges are reported, but do not decide.
    PAYMENT_REQUIRED = _unclear("payment_required", Reason.PAYMENT_REQUIRED)
    LICENSE_REQUIRED = _unclear("license_required", Reason.LICENSE_REQUIRED)
    ACCESS_RESTRICTED = _unclear(
        "access_restricted", Reason.ACCESS_RESTRICTED, verdict=Verdict.DENY
    )
    CLIENT_ERROR = _failed(15, "client_error", Reason.CLIENT_ERROR, retry=True)
    RATE_LIMITED = _failed(16, "rate_limited", Reason.RATE_LIMITED)
    SERVER_ERROR = _failed(17, "server_error", Reason.SERVER_ERROR)
    CAPTIVE_PORTAL = _failed(18, "captive_portal", Reason.SERVER_ERROR, local=True)
    LOCAL_FAULT = _failed(18, "local_fault", Reason.LOCAL_FAULT, CacheTime.NOT)
    # Refused or reset: something responded, so our uplink works.
    CONNECT_FAILED = _failed(19, "connect_failed", Reason.CONNECT_FAILED)
    NO_ROUTE = _failed(19, "no_route", Reason.CONNECT_FAILED, local=True)
    CONNECT_TIMEOUT = _failed(20, "connect_timeout", Reason.TIMEOUT, local=True)
    TIMEOUT = _failed(20, "timeout", Reason.TIMEOUT)
    TRUNCATED = _failed(21, "truncated", Reason.TRUNCATED, retry=True)
    CUT_RULES = _text(22, "cut_rules")
    TOO_SLOW = _failed(23, "too_slow", Reason.TOO_SLOW)
    DNS_NXDOMAIN = _failed(24, "dns_nxdomain", Reason.DNS_NXDOMAIN, CacheTime.SLOW_LADDER)
    DNS_FAILURE = _failed(25, "dns_failure", Reason.DNS_FAILURE, local=True)
    TLS = _failed(26, "tls", Reason.TLS, CacheTime.LONG_LADDER)
    BAD_ENCODING = _failed(27, "bad_encoding", Reason.BAD_ENCODING, retry=True)
    OURS = _failed(28, "ours", Reason.INTERNAL, CacheTime.NOT)
    OVERLOADED = _failed(28, "overloaded", Reason.OVERLOADED, CacheTime.NOT)
    NO_DESCRIPTORS = _failed(28, "no_descriptors", Reason.OVERLOADED, CacheTime.NOT)
    # The storage can't store the clock that the request would start.
    STORAGE = _failed(0, "storage", Reason.STORAGE, CacheTime.NOT, lapses=False)
    # The fleet's shared ledger can't be reached for the lease.
    FLEET = _failed(0, "fleet", Reason.FLEET, CacheTime.NOT, lapses=False)
    # The lease for the file is far off: the host has blocked us, or the operator has paused it.
    HOST_BLOCKED = _failed(0, "host_blocked", Reason.HOST_BLOCKED, CacheTime.NOT, lapses=False)
    HOST_PAUSED = _failed(0, "host_paused", Reason.HOST_PAUSED, CacheTime.NOT, lapses=False)
    # Any unforeseen error: counted and logged, and never allows.
    INTERNAL = _failed(0, "internal", Reason.INTERNAL, lapses=False)

    @classmethod
    def named(cls, name: str) -> Outcome:
        """Return the outcome with that row name, or INTERNAL if this version doesn't know it."""
        return _BY_NAME.get(name, cls.INTERNAL)


GUARD_REFUSALS = frozenset({Outcome.BLOCKED, Outcome.EGRESS_POLICY})
"""Outcomes caused by our own guard, not by the site."""
_BY_NAME = {outcome.row.name: outcome for outcome in Outcome}

_CHALLENGE_STATUS = frozenset({403, 405, 503})
_SPECIAL_2XX = {
    203: Outcome.TRANSFORMED_RULES,
    204: Outcome.EMPTY,  # RFC 9309 section 2.3.1.1 (HTTP-18)
    205: Outcome.EMPTY,
    206: Outcome.INVALID_RESPONSE,  # HTTP-17: the whole file was requested
}


def classify_head(
    status: int, headers: Mapping[str, str] | None = None, *, config: FetchConfig
) -> Outcome:
    """Return the outcome of a response's head.

    `headers` are looked up in lower case (any case-insensitive mapping will do). A 2xx gives RULES:
    the body decides between rows 1 to 5 (see `classify_body`).

    >>> classify_head(404, config=FetchConfig()).row.verdict
    <Verdict.ALLOW: 'allow'>
    """
    headers = headers or {}
    if config.challenge == "defer" and _is_challenge(status, headers):
        return Outcome.CHALLENGE
    if 400 <= status <= 499:
        return _of_client_error(status, headers, config)
    if 500 <= status <= 599:
        return Outcome.CAPTIVE_PORTAL if status == 511 else Outcome.SERVER_ERROR
    if 200 <= status <= 299:
        return _SPECIAL_2XX.get(status, Outcome.RULES)
    if status in REDIRECTS:
        return Outcome.REDIRECT
    if status == 304:
        return Outcome.NOT_MODIFIED
    if 300 <= status <= 399:
        return Outcome.BAD_REDIRECT  # row 12: 300, 305, 306
    return Outcome.INVALID_RESPONSE  # row 8: a final 1xx, 600 and above


def _is_challenge(status: int, headers: Mapping[str, str]) -> bool:
    # Row 7: the site answered with a challenge page, not with the file.
    if status == 202:
        return True
    if status not in _CHALLENGE_STATUS:
        return False
    mitigated = headers.get("cf-mitigated", "").strip().lower()
    return mitigated == "challenge" or bool(headers.get("x-amzn-waf-action"))


def _of_client_error(status: int, headers: Mapping[str, str], config: FetchConfig) -> Outcome:
    if status in {404, 410}:
        return Outcome.NO_FILE
    if status == 429:
        return Outcome.RATE_LIMITED  # row 16; VND-06: not the letter of RFC-36
    if status in {408, 421, 425}:
        return Outcome.CLIENT_ERROR  # row 15: about the connection or request, not the file
    if (status == 401 and config.on_401 == "deny") or (status == 403 and config.on_403 == "deny"):
        return Outcome.ACCESS_RESTRICTED  # the 1996 draft (R96-05)
    asked = headers.get("www-authenticate")
    challenges = parse_challenges([asked] if asked else [])
    if payment_asked(status, headers, challenges):
        return Outcome.PAYMENT_REQUIRED
    if challenges:
        return Outcome.LICENSE_REQUIRED
    return Outcome.NO_FILE_SAID_OTHERWISE


_OUT_OF_MEMORY = frozenset({errno.ENOBUFS, errno.ENOMEM})
_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError, ssl.CertificateError)
_NO_SUCH_NAME = frozenset(
    getattr(socket, name, socket.EAI_NONAME)
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
)
_ARES_NO_SUCH_NAME = ((1,), (4,))  # ENODATA, ENOTFOUND


def classify_error(
    error: BaseException, *, first_hop: bool = True, connected: bool = True
) -> Outcome:
    """Return the outcome of the exception that was raised instead of a response.

    `first_hop`: the request went to the origin itself, not to a redirect. `connected`: there was a
    connection already.

    >>> classify_error(TimeoutError()).row.verdict
    <Verdict.DEFER: 'defer'>
    """
    chain = causes(error)
    if any(isinstance(cause, AddressRefused) for cause in chain):
        return Outcome.BLOCKED if first_hop else Outcome.EGRESS_POLICY
    # Row 28: our own shortage is no evidence about the site. A look-up needs a descriptor, too.
    if is_shortage(error):
        return Outcome.NO_DESCRIPTORS
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return _of_dns(chain)
    if any(isinstance(c, OSError) and c.errno in _OUT_OF_MEMORY for c in chain):
        return Outcome.OURS
    if any(isinstance(cause, _TLS_ERRORS) for cause in chain):
        return Outcome.TLS
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT if connected else Outcome.CONNECT_TIMEOUT
    if isinstance(error, aiohttp.ClientConnectorError):
        return _of_connecting(chain)
    if isinstance(error, aiohttp.ClientResponseError):
        return Outcome.INVALID_RESPONSE  # row 8: the head could not be parsed
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return Outcome.INTERNAL if first_hop else Outcome.BAD_REDIRECT
    if isinstance(error, aiohttp.ClientError | OSError):
        # Row 21: a reset or a short body. A partial Disallow list is worse than none.
        return Outcome.TRUNCATED if connected else _of_connecting(chain)
    return Outcome.INTERNAL


_NO_ROUTE = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}
)
_ERRNO = re.compile(r"\[Errno (\d{1,5})\]")


def _of_connecting(chain: list[BaseException]) -> Outcome:
    """Return the outcome of a failed connection: no route, a timeout, or a refusal.

    If several addresses were tried, one refusal is enough: that address was reached.
    """
    numbers = {cause.errno for cause in chain if isinstance(cause, OSError) and cause.errno}
    if not numbers:  # aiohappyeyeballs merges errors that differ into one text
        texts = (str(cause) for cause in chain if isinstance(cause, OSError))
        numbers = {int(number) for text in texts for number in _ERRNO.findall(text)}
    if numbers and numbers <= _NO_ROUTE:
        return Outcome.NO_ROUTE
    if numbers and numbers <= _NO_ROUTE | {errno.ETIMEDOUT}:
        return Outcome.CONNECT_TIMEOUT
    return Outcome.CONNECT_FAILED


def _of_dns(chain: list[BaseException]) -> Outcome:
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in _NO_SUCH_NAME:
            return Outcome.DNS_NXDOMAIN
        # aiodns, which aiohttp uses if it is installed, raises (code, text) of c-ares.
        if type(cause).__name__ == "DNSError" and cause.args[:1] in _ARES_NO_SUCH_NAME:
            return Outcome.DNS_NXDOMAIN
    return Outcome.DNS_FAILURE


_SNIFFED_OCTETS = 1024
_MEDIA = frozenset({"image", "video", "audio", "font"})
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_HTML_START = re.compile(
    rb"\A(?:\xef\xbb\xbf)?[ \t\r\n\f]*"
    rb"<(?:!--|(?:!doctype[ \t\r\n]+html|\?xml|html|head|body|title|meta|script|style|link|"
    rb"div|span|p|pre|br|h[1-6]|table|center|font|iframe|a|b|i)\b)",
    re.IGNORECASE,
)
_AGENT_LINE = re.compile(rb"(?:^|[\r\n])[ \t]*user-?agent[ \t]*:", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")
_RECORD_LINE = re.compile(
    rb"(?:^|[\r\n])[ \t]*(?:%s)[ \t]*:" % "|".join(sorted(KNOWN_FIELDS)).encode(), re.IGNORECASE
)
# A line's first non-blank character that does not start a comment. The possessive quantifier
# keeps the search linear in the number of blanks.
_CONTENT_LINE = re.compile(rb"(?:\A|[\r\n])[ \t\v\f]*+[^\s#]")
# Tags that end a line on the screen end one in the text: a rule after <br> counts.
_LINE_BREAK_TAGS = re.compile(rb"/?(?:br|p|div|pre|li|tr|h[1-6])(?![a-z0-9])", re.IGNORECASE)


def is_media(content_type: str) -> bool:
    """Row 5: return True for a media type that is not text."""
    return content_type.partition("/")[0].strip().lower() in _MEDIA


def is_binary(start: bytes) -> bool:
    """Row 5: return True if the first KiB has a NUL octet and no user-agent line.

    UTF-16 and UTF-32 contain NULs, and are recognised by their byte order mark. In a file with
    groups a stray NUL breaks only its own line: the rest must still be read (RFC 9309 section
    2.3.1.5, RFC-42).
    """
    head = start[:_SNIFFED_OCTETS]
    if b"\0" not in head or head.startswith(_WIDE_BOMS):
        return False
    return _AGENT_LINE.search(head) is None


def is_plain_text(body: bytes, limit: int) -> bool:
    """Return True if the body, cut at `limit`, is valid UTF-8 with no control characters but tab,
    LF, CR and FF; and has a record, or is a page or empty: base64 would read as a file without
    rules."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body[:limit], len(body) <= limit)
    except UnicodeDecodeError:
        return False
    if _CONTROL.search(text) is not None:
        return False
    return _is_empty(body) or _is_page(body) or _RECORD_LINE.search(body) is not None


def classify_body(outcome: Outcome, body: bytes, *, truncated: bool) -> Outcome:
    """Return the outcome of a 2xx by its body: one of rows 1 to 6 and 22."""
    if _is_page(body):
        # HTTP-15: the media type is ignored, as many real files are sent as text/html.
        if _AGENT_LINE.search(_without_tags(body)) is None:
            return Outcome.SOFT_404
        return Outcome.HTML_RULES
    if truncated:
        return Outcome.CUT_RULES
    if _is_empty(body):
        return Outcome.EMPTY
    return outcome


def parser_input(body: bytes) -> bytes:
    """Return the body for the parser: without tags if it is a page (row 4)."""
    return _without_tags(body) if _is_page(body) else body


def _is_page(body: bytes) -> bool:
    if b"<" not in body:
        return False
    # Limited to a window, so that a long run of leading blanks is cheap.
    return _HTML_START.match(body[:_SNIFFED_OCTETS].lstrip(b" \t\r\n\f")) is not None


def _is_empty(body: bytes) -> bool:
    if body.startswith(_WIDE_BOMS):
        return False
    return _CONTENT_LINE.search(body.removeprefix(b"\xef\xbb\xbf")) is None


def _without_tags(body: bytes) -> bytes:
    """Return everything outside <...>, by two searches per tag: the pattern `<[^>]*>` would not be
    linear."""
    first, *pieces = body.split(b"<")
    out = [first]
    for piece in pieces:
        end = piece.find(b">")
        if end < 0:
            out.append(piece)
            continue
        if _LINE_BREAK_TAGS.match(piece):
            out.append(b"\n")
        out.append(piece[end + 1 :])
    return b"".join(out)


SIX_HOURS: Final = 21_600.0


class Lifetime(msgspec.Struct, frozen=True, gc=False):
    """A response's lifetime according to its headers."""

    seconds: float | None = None
    """Seconds left when the response arrived, its age subtracted; None: no lifetime is given."""
    brief: bool = False
    """no-store, private or no-cache: cache it no longer than the minimum (RFC 9111 section 5.2.2,
    HTTP-05)."""


class Metadata(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the header of an answer says that still counts after a 304 which does not repeat it (RFC
    9111 sections 3.2 and 4.3.4, HTTP-20)."""

    brief: bool | None = None
    """That of its lifetime; None: there is no Cache-Control."""
    max_age: float | None = None
    """Seconds of the s-maxage or max-age of Cache-Control; None: it has neither."""
    expires: float | None = None
    """Seconds from Date to Expires; None: there is no Expires."""
    coding: str = ""
    """The first token of Content-Encoding that names no registered coding, if there is one: the
    body was read as if it were not there (HTTP-14)."""
    cause: str = ""
    """Why no secure connection could be made, for the note of the deferral; there was no answer."""

    def renewed_by(self, newer: Metadata) -> Metadata:
        """Return the metadata of a stored answer after a 304: its fields replace the stored ones.

        An Expires that is not repeated counts from the Date of the 304 on, for as long as at first.
        """
        control = self if newer.brief is None else newer
        expires = self.expires if newer.expires is None else newer.expires
        coding = self.coding or newer.coding
        return Metadata(control.brief, control.max_age, expires, coding, newer.cause)

    def lifetime(self, age: float) -> Lifetime:
        """Return the lifetime of an answer of that age in seconds."""
        # HTTP-04: the age is subtracted. It does not use the Date header, as our own clock may be
        # the wrong one of the two.
        seconds = self.expires if self.max_age is None else self.max_age
        return Lifetime(None if seconds is None else max(0.0, seconds - age), bool(self.brief))


NO_METADATA: Final = Metadata()


def metadata_of(
    headers: Mapping[str, str], now: float, coding: str = "", cause: str = ""
) -> Metadata:
    """Read Cache-Control, Expires and Date (RFC 9111 section 4.2.1, HTTP-02 to HTTP-06).

    `headers` is a case-insensitive mapping, or has the usual capitalisation. `coding`: that of the
    body. `cause`: why there is no answer.
    """
    control, expires = field_values(headers, "Cache-Control"), headers.get("Expires")
    if not control and expires is None:
        return Metadata(coding=coding, cause=cause) if coding or cause else NO_METADATA
    brief: bool | None = None
    max_age: float | None = None
    if control:
        directives = _directives(",".join(control))
        brief = not directives.keys().isdisjoint({"no-store", "private", "no-cache"})
        for name in ("s-maxage", "max-age"):  # HTTP-02: a gate is a shared cache
            if name in directives:
                # RFC 9111 section 4.2.1 (HTTP-06): an invalid value counts as stale.
                max_age = delta_seconds(directives[name]) or 0.0
                break
    until = None if expires is None else parse_http_date(expires, now)
    date = parse_http_date(headers.get("Date", ""), now)
    lasting = 0.0 if until is None else max(0.0, until - (now if date is None else date))
    # `Expires: 0` means: expired.
    return Metadata(brief, max_age, None if expires is None else lasting, coding)


def fresh_for(cache_time: CacheTime, said: Lifetime, cache: CacheConfig) -> float:
    """Return for how many seconds an answer may be used: at least the configured minimum, at most
    the 24 hours of RFC 9309 section 2.4 (RFC-40).

    A definite absence has its own duration (row 14), which the site's headers may shorten.
    """
    base = SIX_HOURS if cache_time is CacheTime.SIX_HOURS else cache.default_ttl
    seconds = base if said.seconds is None else said.seconds
    if cache_time is not CacheTime.FRESH:
        seconds = min(seconds, base)
    if said.brief:
        seconds = 0.0
    return min(max(seconds, cache.min_ttl), cache.max_ttl)


def soft_expiry(fresh: float, rng: random.Random) -> float:
    """Return the seconds until a background refresh: before expiry, with jitter."""
    return fresh * (0.75 + 0.2 * rng.random())


def _directives(value: str) -> dict[str, str]:
    """Return Cache-Control as a dictionary; the first of duplicate directives counts (RFC 9111
    section 4.2.1, HTTP-06)."""
    found: dict[str, str] = {}
    for part in value.split(","):
        name, _, argument = part.partition("=")
        found.setdefault(name.strip(" \t").lower(), argument.strip(' \t"'))
    return found


def age_of(headers: Mapping[str, str]) -> float:
    """Return the seconds of Age (RFC 9111 section 5.1), 0 if there is none or it is invalid."""
    value = headers.get("Age", "").partition(",")[0].strip(" \t")
    return delta_seconds(value) or 0.0


DAY: Final = 86_400.0
HALF_DAY: Final = 43_200.0
MONTH: Final = 30 * DAY

_MINUTES: Final = (1, 2, 4, 8, 15, 30, 60, 120, 240, 360)
_RUNGS: Final = {
    CacheTime.LADDER: tuple(60.0 * minutes for minutes in _MINUTES),
    CacheTime.LONG_LADDER: tuple(60.0 * minutes for minutes in (*_MINUTES, 720, 1440)),
    CacheTime.SLOW_LADDER: tuple(3600.0 * hours for hours in (1, 2, 4, 8, 16, 24)),
    CacheTime.DAY: (DAY,),
}
_JITTER: Final = 0.2


def next_try(
    cache_time: CacheTime, step: int, rng: random.Random, *, retry_after: float | None = None
) -> float:
    """Return the seconds until the next attempt; `step` counts the failures in a row, from 0.

    A jitter of 20 % keeps origins from staying in step. A Retry-After (RFC 9110 section 10.2.3,
    HTTP-08) replaces the rung without jitter, up to 24 hours, but no shorter than the first rung:
    an error never speeds us up.
    """
    rungs = _RUNGS[cache_time]
    if retry_after is not None:
        return min(max(retry_after, rungs[0]), DAY)
    rung = rungs[min(step, len(rungs) - 1)]
    return rung * rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)


class Fallback(Enum):
    """What applies while the file is unreachable."""

    NOTHING = auto()
    """Complete disallow (RFC 9309 section 2.3.1.4, RFC-37), as a deferral."""
    LAST_GOOD = auto()
    """The last good copy (RFC 9309 section 2.4, RFC-40)."""
    ALLOW_ALL = auto()
    """Everything is allowed, as without a file (RFC 9309 section 2.3.1.4, RFC-38)."""


def fallback_while_unreachable(
    config: FetchConfig, *, unreachable_for: float, has_last_good: bool, page_ok_ago: float | None
) -> Fallback:
    """Return what applies after the file has been unreachable for so many seconds.

    `page_ok_ago`: seconds since a page of the origin was last reported with 2xx or 3xx, None if
    never. With a last good copy: NOTHING for 12 hours, then the copy (immediately with
    `stale_if_unreachable` or the archival profile). Google's profile drops the copy after 30
    days (VND-05), the others keep it. Without a copy: NOTHING; ALLOW_ALL after 30 days if the site
    is generally up, or after 12 hours with `unseen_unreachable = "allow_after_12h"`.
    """
    generally_up = page_ok_ago is not None and page_ok_ago <= DAY
    long_gone = unreachable_for >= MONTH
    if has_last_good and not (long_gone and config.profile == "google"):
        at_once = config.stale_if_unreachable or config.profile == "archival"
        return Fallback.LAST_GOOD if at_once or unreachable_for >= HALF_DAY else Fallback.NOTHING
    if long_gone and generally_up:
        return Fallback.ALLOW_ALL
    if (
        not has_last_good
        and config.unseen_unreachable == "allow_after_12h"
        and unreachable_for >= HALF_DAY
    ):
        return Fallback.ALLOW_ALL
    return Fallback.NOTHING


ANSWERED: Final = 0
UNKNOWN_ORIGIN: Final = 1
FAILED: Final = 2
precedence: ContextVar[int] = ContextVar("gatekeeper_precedence", default=UNKNOWN_ORIGIN)
"""The priority of a retrieval that waits for a slot: origins that answered before, then those
never asked, then those that failed."""


class ProbeLimits(msgspec.Struct, frozen=True):
    """The settings of a probe: a retrieval that only tests whether the network works."""

    seconds: float
    """The maximum for connecting, and again until the head, if less than the configured ones."""
    on_request: Callable[[], object]
    """Called before each request, once the lease and the slot are acquired."""


probe_limits: ContextVar[ProbeLimits | None] = ContextVar("gatekeeper_probe_limits", default=None)
"""Set if the retrievals of this context are probes."""


last_look: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar(
    "gatekeeper_last_look", default=None
)
"""Awaited when a retrieval has its lease, before the request. If it raises, the lease is given
back, nothing is sent, and `RobotsSource.fetch` raises the same."""


class Validators(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The validators of a conditional request (RFC 9110 section 13.1, HTTP-01)."""

    url: str
    """The URL that sent them: only a request for that URL carries them."""
    etag: str | None = None
    last_modified: str | None = None
    metadata: Metadata = NO_METADATA
    """Those of the stored answer, which a 304 renews."""


class Retrieval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one retrieval."""

    outcome: Outcome
    status: int | None = None
    """Status of the last response; None if there was none."""
    hops: tuple[str, ...] = ()
    """The URLs that it was redirected to; the last one sent the response."""
    url: str = ""
    """The last URL that was requested."""
    body: bytes | None = None
    """Decoded octets of a text, else None. If the text is longer than `fetch.max_body`, one octet
    more than that: the parser sees that it was cut, and drops the last line."""
    etag: str | None = None
    last_modified: str | None = None
    lifetime: Lifetime = Lifetime()
    metadata: Metadata = NO_METADATA
    """For a 304: those of the stored answer, renewed by it."""
    retry_after: float | None = None
    """Seconds that the site asks to wait, at most `pacing.backoff_max`; None: it does not ask."""
    took: float = 0.0
    """Network seconds of all hops, without waiting for leases."""
    detail: str = ""
    """The error, for the log. Never shown to a client (T2)."""
    addresses: tuple[str, ...] = ()
    """The addresses dialled for the last hop, if the connector is a GuardedConnector."""
    shared: bool = False
    """Another member of the fleet fetched it."""


class HopLease(Protocol):
    """The right to send one request to a host."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Report the request's result: status (None: no response), seconds until the head, and
        Retry-After in seconds."""


class RobotsSource(Protocol):
    """The source of the directory's files: `Fetcher`, or a stand-in of a test."""

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Retrieve the origin's robots.txt. A failure is an outcome, not an exception."""

    async def reach(self, origin: str) -> bool | None:
        """Test whether a new connection to the origin can be made, without a request.

        Return False if it failed as it would with a lost uplink, and None if that is unknown.
        """


class RequestSigner(Protocol):
    """Signs requests; see `gatekeeper.signing.Signer`. Call it just before one is sent."""

    def headers(self, method: str, url: str) -> dict[str, str]:
        """Return the header fields that sign a request. Raises InvalidURL."""

    def sign(self, request: aiohttp.ClientRequest) -> None:
        """Sign an aiohttp request, replacing an earlier signature of this signer."""

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Sign a request, as an aiohttp client middleware."""


AcquireLease = Callable[[Target], AbstractAsyncContextManager[HopLease]]
"""Acquires a lease of a URL's host, and releases it on exit."""

Refuse = Callable[[str], object | None]
"""The guard's judgement of a URL: None, or what is wrong with it."""

Known = Callable[[str], Retrieval | None]
"""Returns an origin's fresh record as the retrieval that would have given it, or None."""
