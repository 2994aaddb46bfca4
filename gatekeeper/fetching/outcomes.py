"""What a retrieval of a robots.txt comes to, and what follows from it. Pure: no clock, no I/O.

Everything that the gate does about an outcome stands in its row of one table: what to answer,
what to call it, how long to keep it, whether a second try helps. `classify` finds the row of an
answer or of an exception; what no row names is `INTERNAL`, which defers, so that nothing falls
through to a welcome. Beside it: whether a body is a text, a page or neither (linear in the body),
how long an answer is fresh (RFC 9111 section 4.2), when to ask again after failures (RFC 9309
section 2.3.1.4), and the values that go into a retrieval and come out of it.

Times are seconds; "now" is wall time, because that is what sites write into their headers.
"""

from __future__ import annotations

import errno
import random
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, Protocol

import aiohttp
import msgspec

from gatekeeper.config import CacheConfig, FetchConfig
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.errors import AddressRefused
from gatekeeper.http_fields import delta_seconds, parse_http_date
from gatekeeper.robots.signals import parse_challenges, payment_asked
from gatekeeper.urls import Target


class Kept(StrEnum):
    """How long an outcome is kept."""

    FRESH = "fresh"
    """As HTTP says, within the floor and the cap."""
    DAY = "day"
    SIX_HOURS = "six_hours"
    LADDER = "ladder"
    """1, 2, 4, 8, 15, 30, 60 minutes ... 6 hours; Retry-After overrides."""
    SLOW_LADDER = "slow_ladder"
    """1 hour ... 24 hours: a name that doesn't exist won't come back in a minute."""
    LONG_LADDER = "long_ladder"
    """As LADDER, on to 24 hours."""
    NOT = "not"
    """Nothing is recorded: the outcome is no evidence about the site."""


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """One row of the table."""

    number: int
    """Its number in the table of outcomes; 0 for what is not listed there."""
    name: str
    verdict: Verdict | None
    """None: the text decides."""
    state: State
    reason: Reason
    kept: Kept
    retry: bool = False
    """One immediate second attempt is made before the row counts."""
    local: bool = False
    """Seen on many origins at once, it is our own uplink that fails."""
    lapses: bool = True
    """For a failure: after the 12 hours and 30 days of the ladder something else may hold."""


def _text(number: int, name: str, reason: Reason = Reason.NO_RULE) -> OutcomeRow:
    return OutcomeRow(number, name, None, State.PARSED, reason, Kept.FRESH)


def _absent(number: int, name: str, reason: Reason, kept: Kept = Kept.DAY) -> OutcomeRow:
    return OutcomeRow(number, name, Verdict.ALLOW, State.UNAVAILABLE, reason, kept)


def _failed(
    number: int,
    name: str,
    reason: Reason,
    kept: Kept = Kept.LADDER,
    *,
    retry: bool = False,
    local: bool = False,
    lapses: bool = True,
) -> OutcomeRow:
    return OutcomeRow(
        number, name, Verdict.DEFER, State.UNREACHABLE, reason, kept, retry, local, lapses
    )


_WITH_TEXT = frozenset({1, 2, 4, 6, 22})
"""Numbers of the rows that the parser speaks for."""


class Outcome(Enum):
    """Every outcome of one retrieval; the value is its row.

    What is asked of it for every origin stands in plain attributes: Enum's own `value` and
    hash cost a call in Python each.
    """

    row: OutcomeRow
    """The row of the table."""
    good: bool
    """A file, or a definite absence: becomes the last good copy."""
    has_text: bool
    """A text was read, which the parser speaks for."""

    def __init__(self, row: OutcomeRow) -> None:
        self.row = row
        self.good = row.state is not State.UNREACHABLE
        self.has_text = row.number in _WITH_TEXT

    RULES = _text(1, "rules")
    EMPTY = OutcomeRow(2, "empty", Verdict.ALLOW, State.PARSED, Reason.EMPTY_FILE, Kept.FRESH)
    SOFT_404 = _absent(3, "soft_404", Reason.SOFT_404)
    HTML_RULES = _text(4, "html_rules")
    NOT_TEXT = _absent(5, "not_text", Reason.NOT_TEXT)
    TRANSFORMED_RULES = _text(6, "transformed_rules")
    CHALLENGE = _failed(7, "challenge", Reason.CHALLENGE)
    INVALID_RESPONSE = _failed(8, "invalid_response", Reason.INVALID_RESPONSE)
    NOT_MODIFIED = _text(9, "not_modified")
    NOT_MODIFIED_NOTHING = _failed(9, "not_modified_nothing", Reason.INVALID_RESPONSE, retry=True)
    REDIRECT = OutcomeRow(10, "redirect", None, State.PARSED, Reason.NO_RULE, Kept.NOT)
    TOO_MANY_REDIRECTS = _absent(11, "too_many_redirects", Reason.TOO_MANY_REDIRECTS)
    REDIRECTED_AWAY = _failed(11, "redirected_away", Reason.TOO_MANY_REDIRECTS)
    BAD_REDIRECT = _failed(12, "bad_redirect", Reason.BAD_REDIRECT)
    EGRESS_POLICY = _failed(13, "egress_policy", Reason.EGRESS_POLICY, Kept.DAY, lapses=False)
    # The origin's own name or address is refused, not that of a redirect: no later
    # attempt helps, so the answer is no, and outwardly one constant word (T2).
    BLOCKED = OutcomeRow(
        13, "blocked", Verdict.DENY, State.UNREACHABLE, Reason.BLOCKED, Kept.DAY, lapses=False
    )
    NO_FILE = _absent(14, "no_file", Reason.NO_FILE)
    NO_FILE_SAID_OTHERWISE = _absent(14, "no_file_said_otherwise", Reason.NO_FILE, Kept.SIX_HOURS)
    # What else the site says of machines is told, and decides nothing.
    PAYMENT_REQUIRED = _absent(14, "payment_required", Reason.PAYMENT_REQUIRED, Kept.SIX_HOURS)
    LICENSE_REQUIRED = _absent(14, "license_required", Reason.LICENSE_REQUIRED, Kept.SIX_HOURS)
    ACCESS_RESTRICTED = OutcomeRow(
        14,
        "access_restricted",
        Verdict.DENY,
        State.UNAVAILABLE,
        Reason.ACCESS_RESTRICTED,
        Kept.SIX_HOURS,
    )
    CLIENT_ERROR = _failed(15, "client_error", Reason.CLIENT_ERROR, retry=True)
    RATE_LIMITED = _failed(16, "rate_limited", Reason.RATE_LIMITED)
    SERVER_ERROR = _failed(17, "server_error", Reason.SERVER_ERROR)
    CAPTIVE_PORTAL = _failed(18, "captive_portal", Reason.SERVER_ERROR, local=True)
    LOCAL_FAULT = _failed(18, "local_fault", Reason.LOCAL_FAULT, Kept.NOT)
    # Refused or reset: something answered, so our uplink works.
    CONNECT_FAILED = _failed(19, "connect_failed", Reason.CONNECT_FAILED)
    NO_ROUTE = _failed(19, "no_route", Reason.CONNECT_FAILED, local=True)
    CONNECT_TIMEOUT = _failed(20, "connect_timeout", Reason.TIMEOUT, local=True)
    TIMEOUT = _failed(20, "timeout", Reason.TIMEOUT)
    TRUNCATED = _failed(21, "truncated", Reason.TRUNCATED, retry=True)
    CUT_RULES = _text(22, "cut_rules")
    TOO_SLOW = _failed(23, "too_slow", Reason.TOO_SLOW)
    DNS_NXDOMAIN = _failed(24, "dns_nxdomain", Reason.DNS_NXDOMAIN, Kept.SLOW_LADDER)
    DNS_FAILURE = _failed(25, "dns_failure", Reason.DNS_FAILURE, local=True)
    TLS = _failed(26, "tls", Reason.TLS, Kept.LONG_LADDER)
    BAD_ENCODING = _failed(27, "bad_encoding", Reason.BAD_ENCODING, retry=True)
    OURS = _failed(28, "ours", Reason.INTERNAL, Kept.NOT)
    OVERLOADED = _failed(28, "overloaded", Reason.OVERLOADED, Kept.NOT)
    # The clock that the request would start can't be kept.
    STORAGE = _failed(0, "storage", Reason.STORAGE, Kept.NOT, lapses=False)
    # The ledger that a fleet shares can't be asked for the turn.
    FLEET = _failed(0, "fleet", Reason.FLEET, Kept.NOT, lapses=False)
    # The turn for the file is far off: the host turned us away, or the operator holds it back.
    HOST_BLOCKED = _failed(0, "host_blocked", Reason.HOST_BLOCKED, Kept.NOT, lapses=False)
    HOST_PAUSED = _failed(0, "host_paused", Reason.HOST_PAUSED, Kept.NOT, lapses=False)
    # Whatever nobody foresaw. Counted, logged, never a welcome.
    INTERNAL = _failed(0, "internal", Reason.INTERNAL, lapses=False)

    @classmethod
    def named(cls, name: str) -> Outcome:
        """The outcome of that row name; INTERNAL for one that this version doesn't know."""
        return _BY_NAME.get(name, cls.INTERNAL)


OURS = frozenset({Outcome.BLOCKED, Outcome.EGRESS_POLICY})
"""What our own guard brought about, and no site."""
_BY_NAME = {outcome.row.name: outcome for outcome in Outcome}

_REDIRECTS = frozenset({301, 302, 303, 307, 308})  # RFC 9110 section 15.4 (HTTP-13)
_CHALLENGE_STATUS = frozenset({202, 403, 405, 503})
_ODD_SUCCESSES = {
    203: Outcome.TRANSFORMED_RULES,
    204: Outcome.EMPTY,  # RFC 9309 section 2.3.1.1 (HTTP-18)
    205: Outcome.EMPTY,
    206: Outcome.INVALID_RESPONSE,  # HTTP-17: we asked for the whole
}


def classify(
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    error: BaseException | None = None,
    config: FetchConfig,
    first_hop: bool = True,
    connected: bool = True,
    in_body: bool = False,
) -> Outcome:
    """The row of an answer's head, or of what was raised instead of an answer.

    `headers` are looked up in lower case (any case-insensitive mapping will do).
    `first_hop`: the origin itself was asked, not a redirect. `connected`: for a
    TimeoutError, whether the connection stood already. `in_body`: the head had come.
    A 2xx comes out as RULES: the body decides between rows 1 to 5 (see `content.judge`).

    >>> classify(status=404, config=FetchConfig()).row.verdict
    <Verdict.ALLOW: 'allow'>
    >>> classify(error=TimeoutError(), config=FetchConfig()).row.verdict
    <Verdict.DEFER: 'defer'>
    """
    if error is not None:
        return _of_error(error, first_hop=first_hop, connected=connected, in_body=in_body)
    if status is None:
        return Outcome.INTERNAL
    if config.challenge == "defer" and _is_challenge(status, headers or {}):
        return Outcome.CHALLENGE
    return _of_status(status, headers or {}, config)


def _is_challenge(status: int, headers: Mapping[str, str]) -> bool:
    # Row 7: the site answered a wall, not a file.
    if status == 202:
        return True
    if status not in _CHALLENGE_STATUS:
        return False
    mitigated = headers.get("cf-mitigated", "").strip().lower()
    return mitigated == "challenge" or bool(headers.get("x-amzn-waf-action"))


def _of_status(status: int, headers: Mapping[str, str], config: FetchConfig) -> Outcome:
    if 400 <= status <= 499:
        return _of_client_error(status, headers, config)
    if 500 <= status <= 599:
        return Outcome.CAPTIVE_PORTAL if status == 511 else Outcome.SERVER_ERROR
    if 200 <= status <= 299:
        return _ODD_SUCCESSES.get(status, Outcome.RULES)
    if status in _REDIRECTS:
        return Outcome.REDIRECT
    if status == 304:
        return Outcome.NOT_MODIFIED
    if 300 <= status <= 399:
        return Outcome.BAD_REDIRECT  # row 12: 300, 305, 306
    return Outcome.INVALID_RESPONSE  # row 8: a final 1xx, 600 and above


def _of_client_error(status: int, headers: Mapping[str, str], config: FetchConfig) -> Outcome:
    if status in {404, 410}:
        return Outcome.NO_FILE
    if status == 429:
        return Outcome.RATE_LIMITED  # row 16; VND-06: not the letter of RFC-36
    if status in {408, 421, 425}:
        return Outcome.CLIENT_ERROR  # row 15: about the exchange, not the file
    if (status == 401 and config.on_401 == "deny") or (status == 403 and config.on_403 == "deny"):
        return Outcome.ACCESS_RESTRICTED  # the 1996 draft (R96-05)
    asked = headers.get("www-authenticate")
    challenges = parse_challenges([asked] if asked else [])
    if payment_asked(status, headers, challenges):
        return Outcome.PAYMENT_REQUIRED
    if challenges:
        return Outcome.LICENSE_REQUIRED
    return Outcome.NO_FILE_SAID_OTHERWISE


_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError, ssl.CertificateError)
_NO_SUCH_NAME = frozenset(
    getattr(socket, name, socket.EAI_NONAME)
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
)
_ARES_NO_SUCH_NAME = ((1,), (4,))  # ENODATA, ENOTFOUND


def _of_error(error: BaseException, *, first_hop: bool, connected: bool, in_body: bool) -> Outcome:
    causes = list(_causes(error))
    if any(isinstance(cause, AddressRefused) for cause in causes):
        return Outcome.BLOCKED if first_hop else Outcome.EGRESS_POLICY
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return _of_dns(causes)
    if any(isinstance(c, OSError) and c.errno in _OUT_OF_RESOURCES for c in causes):
        return Outcome.OURS  # row 28: our own lack is no evidence about the site
    if any(isinstance(cause, _TLS_ERRORS) for cause in causes):
        return Outcome.TLS
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT if connected else Outcome.CONNECT_TIMEOUT
    if isinstance(error, aiohttp.ClientConnectorError):
        return _of_connecting(causes)
    if isinstance(error, aiohttp.ClientResponseError):
        return Outcome.INVALID_RESPONSE  # row 8: the head couldn't be read
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return Outcome.INTERNAL if first_hop else Outcome.BAD_REDIRECT
    if isinstance(error, aiohttp.ClientError | OSError):
        # Row 21: a reset or a short body. Half a Disallow list is worse than none.
        return Outcome.TRUNCATED if connected or in_body else _of_connecting(causes)
    return Outcome.INTERNAL


_NO_ROUTE = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}
)
_ERRNO = re.compile(r"\[Errno (\d{1,5})\]")


def _of_connecting(causes: list[BaseException]) -> Outcome:
    """No connection: because nothing led there, or because something said no?

    Of several addresses that were tried, one that said no is enough: it was reached.
    """
    numbers = {cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno}
    if not numbers:  # aiohappyeyeballs merges errors that differ into one text
        texts = (str(cause) for cause in causes if isinstance(cause, OSError))
        numbers = {int(number) for text in texts for number in _ERRNO.findall(text)}
    if numbers and numbers <= _NO_ROUTE:
        return Outcome.NO_ROUTE
    if numbers and numbers <= _NO_ROUTE | {errno.ETIMEDOUT}:
        return Outcome.CONNECT_TIMEOUT
    return Outcome.CONNECT_FAILED


def _of_dns(causes: list[BaseException]) -> Outcome:
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _NO_SUCH_NAME:
            return Outcome.DNS_NXDOMAIN
        # aiodns, which aiohttp takes when it is installed: (code, text) by c-ares.
        if type(cause).__name__ == "DNSError" and cause.args[:1] in _ARES_NO_SUCH_NAME:
            return Outcome.DNS_NXDOMAIN
    return Outcome.DNS_FAILURE


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and what it wraps; bounded, for a chain may be a ring."""
    found: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue and len(found) < 32:
        one = queue.pop(0)
        if one is None or any(one is seen for seen in found):
            continue
        found.append(one)
        queue.append(one.__cause__)
        queue.append(one.__context__)
        wrapped = getattr(one, "os_error", None) or getattr(one, "_os_error", None)
        if isinstance(wrapped, BaseException):
            queue.append(wrapped)
        if isinstance(one, BaseExceptionGroup):
            queue.extend(one.exceptions)
    return found


_SNIFFED = 1024
_MEDIA = frozenset({"image", "video", "audio", "font"})
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_PAGE = re.compile(
    rb"\A(?:\xef\xbb\xbf)?[ \t\r\n\f]*"
    rb"<(?:!--|(?:!doctype[ \t\r\n]+html|\?xml|html|head|body|title|meta|script|style|link|"
    rb"div|span|p|pre|br|h[1-6]|table|center|font|iframe|a|b|i)\b)",
    re.IGNORECASE,
)
_AGENT_LINE = re.compile(rb"(?:^|[\r\n])[ \t]*user-?agent[ \t]*:", re.IGNORECASE)
# What stands first in its line and is no comment. The blanks are not given back, which keeps
# the search linear in however many of them.
_SAID = re.compile(rb"(?:\A|[\r\n])[ \t\v\f]*+[^\s#]")
# A tag that ends a line on the screen ends one in the text: a rule after <br> is a rule.
_BREAKS = re.compile(rb"/?(?:br|p|div|pre|li|tr|h[1-6])(?![a-z0-9])", re.IGNORECASE)


def is_media(content_type: str) -> bool:
    """Row 5: a media type that is no text at all."""
    return content_type.partition("/")[0].strip().lower() in _MEDIA


def is_binary(start: bytes) -> bool:
    """Row 5: NUL in the first KiB, and no group begins there.

    UTF-16 and UTF-32 have NULs in every other place, and say so by their first octets. In a file
    that has groups a stray NUL spoils its own line: the rest is to be read all the same (RFC 9309
    section 2.3.1.5, RFC-42).
    """
    head = start[:_SNIFFED]
    if b"\0" not in head or head.startswith(_WIDE_BOMS):
        return False
    return _AGENT_LINE.search(head) is None


def judge(outcome: Outcome, body: bytes, *, truncated: bool) -> Outcome:
    """Which of rows 1 to 6 and 22 the body of a 2xx belongs to."""
    if _is_page(body):
        # HTTP-15: the media type is not asked; real files come as text/html every day.
        if _AGENT_LINE.search(_without_tags(body)) is None:
            return Outcome.SOFT_404
        return Outcome.HTML_RULES
    if truncated:
        return Outcome.CUT_RULES
    if _says_nothing(body):
        return Outcome.EMPTY
    return outcome


def readable(body: bytes) -> bytes:
    """The body as the parser is to see it: tags taken out of a page (row 4)."""
    return _without_tags(body) if _is_page(body) else body


def _is_page(body: bytes) -> bool:
    if b"<" not in body:
        return False
    # A window, so that a long run of blanks in front costs little.
    return _PAGE.match(body[:_SNIFFED].lstrip(b" \t\r\n\f")) is not None


def _says_nothing(body: bytes) -> bool:
    if body.startswith(_WIDE_BOMS):
        return False
    return _SAID.search(body.removeprefix(b"\xef\xbb\xbf")) is None


def _without_tags(body: bytes) -> bytes:
    """Everything outside <...>. Two finds a tag, so linear where `<[^>]*>` would not be."""
    first, *pieces = body.split(b"<")
    out = [first]
    for piece in pieces:
        end = piece.find(b">")
        if end < 0:
            out.append(piece)
            continue
        if _BREAKS.match(piece):
            out.append(b"\n")
        out.append(piece[end + 1 :])
    return b"".join(out)


SIX_HOURS: Final = 21_600.0
_MOST: Final = float(2**31)  # RFC 9111 section 4.2.1 (HTTP-06): delta-seconds that overflow


class Lifetime(msgspec.Struct, frozen=True, gc=False):
    """What an answer says about its own lifetime."""

    seconds: float | None = None
    """Remaining at the moment of the answer, age subtracted; None: the answer names no lifetime."""
    brief: bool = False
    """no-store, private or no-cache: hold it no longer than the floor (RFC 9111 section 5.2.2,
    HTTP-05)."""


_SILENT: Final = Lifetime()


def lifetime(headers: Mapping[str, str], now: float) -> Lifetime:
    """Read Cache-Control, Expires and Age (RFC 9111 section 4.2.1, HTTP-02 to HTTP-06).

    `headers` maps case-insensitively, or in the usual capitals.

    >>> lifetime({"Cache-Control": "max-age=600", "Age": "500"}, 0.0).seconds
    100.0
    """
    control = headers.get("Cache-Control", "")
    if not control and "Expires" not in headers:
        return _SILENT
    directives = _directives(control)
    brief = not directives.keys().isdisjoint({"no-store", "private", "no-cache"})
    for name in ("s-maxage", "max-age"):  # HTTP-02: a gate serves many, so it is shared
        if name in directives:
            seconds = delta_seconds(directives[name])
            # RFC 9111 section 4.2.1 (HTTP-06): an unreadable value is a stale one. HTTP-04: less
            # the age. The Date header is left out of the age: our own clock may be the wrong one
            # of the two.
            remaining = 0.0 if seconds is None else seconds - _age(headers)
            return Lifetime(max(0.0, remaining), brief)
    expires = headers.get("Expires")
    if expires is None:
        return Lifetime(None, brief)
    until = parse_http_date(expires, now)
    if until is None:
        return Lifetime(0.0, brief)  # `Expires: 0` means: expired
    date = parse_http_date(headers.get("Date", ""), now)
    return Lifetime(max(0.0, until - (now if date is None else date) - _age(headers)), brief)


def fresh_for(kept: Kept, said: Lifetime, cache: CacheConfig) -> float:
    """How long an answer may be used: within the floor and the 24 hours of RFC 9309 section 2.4
    (RFC-40).

    A definite absence has its own time (row 14), which the site may shorten.
    """
    base = SIX_HOURS if kept is Kept.SIX_HOURS else cache.default_ttl
    seconds = base if said.seconds is None else said.seconds
    if kept is not Kept.FRESH:
        seconds = min(seconds, base)
    if said.brief:
        seconds = 0.0
    return min(max(seconds, cache.min_ttl), cache.max_ttl)


def soft_expiry(fresh: float, rng: random.Random) -> float:
    """When to refresh in the background: early, and never two origins in step."""
    return fresh * (0.75 + 0.2 * rng.random())


def _directives(value: str) -> dict[str, str]:
    """Cache-Control as a dictionary; of duplicates the first one counts (RFC 9111 section 4.2.1,
    HTTP-06)."""
    found: dict[str, str] = {}
    for part in value.split(","):
        name, _, argument = part.partition("=")
        found.setdefault(name.strip(" \t").lower(), argument.strip(' \t"'))
    return found


def _age(headers: Mapping[str, str]) -> float:
    value = headers.get("Age", "").partition(",")[0].strip(" \t")
    return delta_seconds(value) or 0.0


DAY: Final = 86_400.0
HALF_DAY: Final = 43_200.0
MONTH: Final = 30 * DAY

_MINUTES: Final = (1, 2, 4, 8, 15, 30, 60, 120, 240, 360)
_RUNGS: Final = {
    Kept.LADDER: tuple(60.0 * minutes for minutes in _MINUTES),
    Kept.LONG_LADDER: tuple(60.0 * minutes for minutes in (*_MINUTES, 720, 1440)),
    Kept.SLOW_LADDER: tuple(3600.0 * hours for hours in (1, 2, 4, 8, 16, 24)),
    Kept.DAY: (DAY,),
    Kept.SIX_HOURS: (HALF_DAY / 2,),
}
_JITTER: Final = 0.2


def next_try(
    kept: Kept, step: int, rng: random.Random, *, retry_after: float | None = None
) -> float:
    """Seconds until the next attempt; `step` counts the failures in a row, from 0.

    Jittered by 20 % so that two origins never stay in step. A Retry-After (RFC 9110 section
    10.2.3, HTTP-08) replaces the rung as it stands, up to 24 hours, and no shorter than the first
    rung: an error never speeds us up.
    """
    rungs = _RUNGS[kept]
    if retry_after is not None:
        return min(max(retry_after, rungs[0]), DAY)
    rung = rungs[min(step, len(rungs) - 1)]
    return rung * rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)


class Holds(Enum):
    """What answers while the file can't be had."""

    NOTHING = auto()
    """Complete disallow (RFC 9309 section 2.3.1.4, RFC-37), as a deferral."""
    LAST_GOOD = auto()
    """The old copy (RFC 9309 section 2.4, RFC-40)."""
    WELCOME = auto()
    """As if there were no file (RFC 9309 section 2.3.1.4, RFC-38)."""


def holds_meanwhile(
    config: FetchConfig,
    *,
    unreachable_for: float,
    has_last_good: bool,
    page_ok_ago: float | None,
) -> Holds:
    """What answers, after so many seconds without the file.

    `page_ok_ago`: seconds since a page of the origin was last reported 2xx or 3xx, None if
    never. With an old copy: 12 hours of nothing, then the copy (at once with
    `stale_if_unreachable` or the archival profile). Google's profile drops the copy after
    30 days (VND-05), the others keep it. Without one: nothing; after 30 days welcome if the
    site is generally up, and with `unseen_unreachable` as after 12 hours.
    """
    generally_up = page_ok_ago is not None and page_ok_ago <= DAY
    long_gone = unreachable_for >= MONTH
    if has_last_good and not (long_gone and config.profile == "google"):
        at_once = config.stale_if_unreachable or config.profile == "archival"
        return Holds.LAST_GOOD if at_once or unreachable_for >= HALF_DAY else Holds.NOTHING
    if long_gone and generally_up:
        return Holds.WELCOME
    if (
        not has_last_good
        and config.unseen_unreachable == "allow_after_12h"
        and unreachable_for >= HALF_DAY
    ):
        return Holds.WELCOME
    return Holds.NOTHING


ANSWERED: Final = 0
UNKNOWN_ORIGIN: Final = 1
FAILED: Final = 2
precedence: ContextVar[int] = ContextVar("gatekeeper_precedence", default=UNKNOWN_ORIGIN)
"""Who goes first where retrievals wait for a slot: origins that answered before, then those
never met, then those that failed."""


class Hurry(msgspec.Struct, frozen=True):
    """What is different about a retrieval that only finds out whether anybody answers."""

    seconds: float
    """How long it may take to connect, and then to the head, where that is less than usual."""
    on_request: Callable[[], object]
    """Called before each of its requests: it has waited for its turn and its slot then."""


hurried: ContextVar[Hurry | None] = ContextVar("gatekeeper_hurried", default=None)
"""Set where the retrievals of this context are in a hurry."""


class Validators(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What makes a request conditional (RFC 9110 section 13.1, HTTP-01)."""

    url: str
    """The URL that gave them: only a request for that one carries them."""
    etag: str | None = None
    last_modified: str | None = None


class Retrieval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one retrieval came to."""

    outcome: Outcome
    status: int | None = None
    """Of the last answer; None where no answer came."""
    hops: tuple[str, ...] = ()
    """The URLs that it was redirected to, the last one answered."""
    url: str = ""
    """The last URL that was asked."""
    body: bytes | None = None
    """Decoded octets of a text, else None. One octet more than `fetch.max_body` where the
    text goes on: so the parser sees for itself that it was cut, and drops the last line."""
    etag: str | None = None
    last_modified: str | None = None
    lifetime: Lifetime = Lifetime()
    retry_after: float | None = None
    """Seconds that the site asks to wait, as it said it (not capped)."""
    took: float = 0.0
    """Seconds on the network, all hops; waiting for turns not counted."""
    truncated: bool = False
    received: int = 0
    """Octets of the body on the wire."""
    detail: str = ""
    """For the log: what was raised. Never shown to a client (T2)."""
    addresses: tuple[str, ...] = ()
    """Those that were dialled for the last hop, as far as our own connector saw it."""


class HostTurn(Protocol):
    """The right to send one request to a host."""

    def report(
        self,
        *,
        status: int | None = None,
        elapsed: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        """What came of it: the status, None for none; seconds to the head; Retry-After."""


class RobotsSource(Protocol):
    """Where the directory gets its files: `Fetcher`, or a test's stand-in."""

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Ask for the origin's robots.txt. A failure is an outcome, not an exception."""

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; nothing is requested over it.

        False: it failed as a lost uplink would make it fail. None: it can't be told.
        """


TakeTurn = Callable[[Target], AbstractAsyncContextManager[HostTurn]]
"""Waits for the turn of a URL's host and gives it back on leaving."""

Refuse = Callable[[str], object | None]
"""The guard's word about a URL: None, or what is wrong with it."""

Known = Callable[[str], Retrieval | None]
"""What is known and fresh about an origin, as if it had just been asked."""
