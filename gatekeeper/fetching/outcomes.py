"""What each HTTP or network outcome of a robots.txt retrieval means: a table.

The rows and their numbers are those of fetching.md section 1. Everything that the gate
does about an outcome stands in its row: what to answer, what to call it, how long to
keep it. `classify` finds the row of an answer or of an exception. Pure: no clock, no I/O.

Nothing falls through to a welcome: what no row names is `INTERNAL`, which defers.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

import aiohttp

from gatekeeper.config import FetchConfig
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.errors import AddressRefused

__all__ = ["OURS", "Kept", "Outcome", "Row", "classify"]


class Kept(StrEnum):
    """How long an outcome is kept."""

    FRESH = "fresh"
    """As HTTP says, within the floor and the cap (fetching.md section 3)."""
    DAY = "day"
    SIX_HOURS = "six_hours"
    LADDER = "ladder"
    """1, 2, 4, 8, 15, 30, 60 minutes ... 6 hours; Retry-After overrides."""
    SLOW_LADDER = "slow_ladder"
    """1 hour ... 24 hours: a name that doesn't exist won't come back in a minute."""
    LONG_LADDER = "long_ladder"
    """As LADDER, on to 24 hours."""
    NOT = "not"
    """Nothing is recorded: the outcome says nothing about the site."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    number: int
    """In fetching.md section 1; 0 for what the table doesn't list."""
    name: str
    verdict: Verdict | None
    """None: the text decides."""
    state: State
    reason: Reason
    kept: Kept
    retry: bool = False
    """One immediate second attempt is made before the row counts."""
    local: bool = False
    """Seen on many origins at once, it is our own uplink that fails (section 6)."""
    lapses: bool = True
    """For a failure: after the 12 hours and 30 days of the ladder something else may hold."""


def _text(number: int, name: str, reason: Reason = Reason.NO_RULE) -> Row:
    return Row(number, name, None, State.PARSED, reason, Kept.FRESH)


def _absent(number: int, name: str, reason: Reason, kept: Kept = Kept.DAY) -> Row:
    return Row(number, name, Verdict.ALLOW, State.UNAVAILABLE, reason, kept)


def _failed(
    number: int,
    name: str,
    reason: Reason,
    kept: Kept = Kept.LADDER,
    *,
    retry: bool = False,
    local: bool = False,
    lapses: bool = True,
) -> Row:
    return Row(number, name, Verdict.DEFER, State.UNREACHABLE, reason, kept, retry, local, lapses)


_WITH_TEXT = frozenset({1, 2, 4, 6, 22})
"""Numbers of the rows that the parser speaks for."""


class Outcome(Enum):
    """Every outcome of one retrieval; the value is its row.

    What is asked of it for every origin stands in plain attributes: Enum's own `value` and
    hash cost a call in Python each.
    """

    row: Row
    """The row of the table."""
    good: bool
    """A file, or a definite absence: becomes the last good copy."""
    has_text: bool
    """A text was read, which the parser speaks for."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.good = row.state is not State.UNREACHABLE
        self.has_text = row.number in _WITH_TEXT

    __hash__ = object.__hash__  # each is one of its kind

    RULES = _text(1, "rules")
    EMPTY = Row(2, "empty", Verdict.ALLOW, State.PARSED, Reason.EMPTY_FILE, Kept.FRESH)
    SOFT_404 = _absent(3, "soft_404", Reason.SOFT_404)
    HTML_RULES = _text(4, "html_rules")
    NOT_TEXT = _absent(5, "not_text", Reason.NOT_TEXT)
    TRANSFORMED_RULES = _text(6, "transformed_rules")
    CHALLENGE = _failed(7, "challenge", Reason.CHALLENGE)
    INVALID_RESPONSE = _failed(8, "invalid_response", Reason.INVALID_RESPONSE)
    NOT_MODIFIED = _text(9, "not_modified")
    NOT_MODIFIED_NOTHING = _failed(9, "not_modified_nothing", Reason.INVALID_RESPONSE, retry=True)
    REDIRECT = Row(10, "redirect", None, State.PARSED, Reason.NO_RULE, Kept.NOT)
    TOO_MANY_REDIRECTS = _absent(11, "too_many_redirects", Reason.TOO_MANY_REDIRECTS)
    REDIRECTED_AWAY = _failed(11, "redirected_away", Reason.TOO_MANY_REDIRECTS)
    BAD_REDIRECT = _failed(12, "bad_redirect", Reason.BAD_REDIRECT)
    EGRESS_POLICY = _failed(13, "egress_policy", Reason.EGRESS_POLICY, Kept.DAY, lapses=False)
    # The origin's own name or address is refused, not that of a redirect: no later
    # attempt helps, so the answer is no, and outwardly one constant word (T2).
    BLOCKED = Row(
        13, "blocked", Verdict.DENY, State.UNREACHABLE, Reason.BLOCKED, Kept.DAY, lapses=False
    )
    NO_FILE = _absent(14, "no_file", Reason.NO_FILE)
    NO_FILE_SAID_OTHERWISE = _absent(14, "no_file_said_otherwise", Reason.NO_FILE, Kept.SIX_HOURS)
    ACCESS_RESTRICTED = Row(
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
    # The turn for the file is far off: the host turned us away, or the operator holds it back.
    HOST_BLOCKED = _failed(0, "host_blocked", Reason.HOST_BLOCKED, Kept.NOT, lapses=False)
    HOST_PAUSED = _failed(0, "host_paused", Reason.HOST_PAUSED, Kept.NOT, lapses=False)
    # fetching.md 2.9: whatever nobody foresaw. Counted, logged, never a welcome.
    INTERNAL = _failed(0, "internal", Reason.INTERNAL, lapses=False)

    @classmethod
    def named(cls, name: str) -> Outcome:
        """The outcome of that row name; INTERNAL for one that this version doesn't know."""
        return _BY_NAME.get(name, cls.INTERNAL)


OURS = frozenset({Outcome.BLOCKED, Outcome.EGRESS_POLICY})
"""What our own guard brought about, and no site."""
_BY_NAME = {outcome.row.name: outcome for outcome in Outcome}

_REDIRECTS = frozenset({301, 302, 303, 307, 308})  # HTTP-13
_CHALLENGE_STATUS = frozenset({202, 403, 405, 503})
_ODD_SUCCESSES = {
    203: Outcome.TRANSFORMED_RULES,
    204: Outcome.EMPTY,  # HTTP-18
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
    return _of_status(status, config)


def _is_challenge(status: int, headers: Mapping[str, str]) -> bool:
    # Row 7: the site answered a wall, not a file.
    if status == 202:
        return True
    if status not in _CHALLENGE_STATUS:
        return False
    mitigated = headers.get("cf-mitigated", "").strip().lower()
    return mitigated == "challenge" or bool(headers.get("x-amzn-waf-action"))


def _of_status(status: int, config: FetchConfig) -> Outcome:
    if 400 <= status <= 499:
        return _of_client_error(status, config)
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


def _of_client_error(status: int, config: FetchConfig) -> Outcome:
    if status in {404, 410}:
        return Outcome.NO_FILE
    if status == 429:
        return Outcome.RATE_LIMITED  # row 16; VND-06: not the letter of RFC-36
    if status in {408, 421, 425}:
        return Outcome.CLIENT_ERROR  # row 15: about the exchange, not the file
    if (status == 401 and config.on_401 == "deny") or (status == 403 and config.on_403 == "deny"):
        return Outcome.ACCESS_RESTRICTED  # R96-05
    return Outcome.NO_FILE_SAID_OTHERWISE


_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError, ssl.CertificateError)
_NO_SUCH_NAME = frozenset(
    code
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
    if (code := getattr(socket, name, None)) is not None
)
_ARES_NO_SUCH_NAME = ((1,), (4,))  # ENODATA, ENOTFOUND


def _of_error(error: BaseException, *, first_hop: bool, connected: bool, in_body: bool) -> Outcome:
    causes = list(_causes(error))
    if any(isinstance(cause, AddressRefused) for cause in causes):
        return Outcome.BLOCKED if first_hop else Outcome.EGRESS_POLICY
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return _of_dns(causes)
    if any(isinstance(c, OSError) and c.errno in _OUT_OF_RESOURCES for c in causes):
        return Outcome.OURS  # row 28: our own lack says nothing about the site
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
