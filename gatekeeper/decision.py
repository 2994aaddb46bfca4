"""The answer about one URL at one moment: `Decision` and the words it uses."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from gatekeeper.robots import Rule

__all__ = ["Decision", "Reason", "State", "Verdict"]


class Verdict(StrEnum):
    """What to do with the URL."""

    ALLOW = "allow"
    DENY = "deny"
    DEFER = "defer"
    """Not now: ask again at `retry_at`."""


class State(StrEnum):
    """What stands behind the answer."""

    PARSED = "parsed"
    """A file was read and is within its lifetime."""
    UNAVAILABLE = "unavailable"
    """There is no file (RFC-36): welcome."""
    UNREACHABLE = "unreachable"
    """The file could not be had (RFC-37): deferred."""
    STALE = "stale"
    """An older copy speaks while the file can't be had (RFC-40)."""
    OVERRIDE = "override"
    """The operator's word, not the site's."""


class Reason(StrEnum):
    """Why, in one word. fetching.md section 1 gives the rows behind the outcomes."""

    # The text decided.
    RULE = "rule"
    NO_RULE = "no_rule"
    EMPTY_FILE = "empty_file"
    ROBOTS_FILE = "robots_file"
    """/robots.txt itself may always be asked for (RFC-20)."""
    OUTSIDE_VISIT_TIME = "outside_visit_time"
    # There is no file.
    NO_FILE = "no_file"
    SOFT_404 = "soft_404"
    NOT_TEXT = "not_text"
    TOO_MANY_REDIRECTS = "too_many_redirects"
    LONG_UNREACHABLE = "long_unreachable"
    """Thirty days without the file while the site itself answers (RFC-38)."""
    # The file could not be had.
    ACCESS_RESTRICTED = "access_restricted"
    CHALLENGE = "challenge"
    INVALID_RESPONSE = "invalid_response"
    BAD_REDIRECT = "bad_redirect"
    EGRESS_POLICY = "egress_policy"
    CLIENT_ERROR = "client_error"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    LOCAL_FAULT = "local_fault"
    CONNECT_FAILED = "connect_failed"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"
    TOO_SLOW = "too_slow"
    DNS_NXDOMAIN = "dns_nxdomain"
    DNS_FAILURE = "dns_failure"
    TLS = "tls"
    BAD_ENCODING = "bad_encoding"
    INTERNAL = "internal"
    OVERLOADED = "overloaded"
    """More questions wait for robots.txt files than `cache.max_waiters` lets in."""
    OWN_LEASE = "own_lease"
    """The file needs a turn of a host whose turn the asker itself holds."""
    UNKNOWN = "unknown"
    """Nothing is known of the origin yet, and this question may not wait until it is."""
    GATE_UNREACHABLE = "gate_unreachable"
    """A client's own answer, while its sidecar can't be asked."""
    # Somebody else decided.
    OPERATOR = "operator"
    BLOCKED = "blocked"
    """The guard refused; outwardly always this one word (T2)."""
    INVALID_URL = "invalid_url"
    HOST_BLOCKED = "host_blocked"
    """The file is not known, and its host may not be asked for a while."""
    HOST_PAUSED = "host_paused"
    """The same until the operator lets it go on."""
    # Concerning leases only.
    CLOSING = "closing"


# gc=False: a decision holds values alone, so no cycle goes through it, and a batch of a
# thousand costs the collector nothing.
class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer about one URL at one moment.

    `bool(decision)` is true for ALLOW alone. Times are aware datetimes in UTC,
    durations are seconds.

    >>> Decision(verdict=Verdict.DENY, reason=Reason.RULE, url="https://a.example/x",
    ...          origin="https://a.example", user_agent="bot").explain()
    'deny https://a.example/x for bot: rule'
    """

    verdict: Verdict
    reason: Reason
    url: str
    """The URL as it was asked about, credentials masked."""
    origin: str
    """Scheme, host and port whose robots.txt answered; empty for an invalid URL."""
    user_agent: str
    """The product token that the policy was chosen for."""
    state: State | None = None
    """None where no file was consulted (invalid or refused URL)."""
    rule: Rule | None = None
    """The line of robots.txt that decided, if one did."""
    retry_at: datetime | None = None
    """With DEFER: the earliest moment at which asking again can help."""
    robots_status: int | None = None
    """HTTP status of the last robots.txt answer; None where there was none."""
    fetched_at: datetime | None = None
    """When the file that answered was fetched or revalidated."""
    expires_at: datetime | None = None
    """When what is known here ends."""
    hops: tuple[str, ...] = ()
    """The URLs that robots.txt was redirected through, the last one answered."""
    crawl_delay: float | None = None
    """Seconds the text asks for between two requests, by Crawl-delay."""
    conflict: bool = False
    """The declared dialect and RFC 9309 disagree about this URL (DIA-03)."""
    clamped: bool = False
    """The operator's `pacing.max_interval` cuts what the text asks for at this moment."""
    note: str | None = None
    """The operator's reason for an override, what he cuts short, or what is wrong with an
    invalid URL."""
    id: str = ""
    """Unique within the process and, by its prefix, between processes."""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.ALLOW

    def explain(self) -> str:
        """One line for people: the verdict, the URL, and what decided.

        Safe to print: what a site wrote is cut, and steers no terminal.
        """
        text = f"{self.verdict} {self.url} for {self.user_agent}: {self.reason}"
        if self.rule is not None:
            text += f" (line {self.rule.line}: {_shown(self.rule.text)})"
        if self.note:
            text += f" ({_shown(self.note)})"
        if self.retry_at is not None:
            text += f"; ask again at {self.retry_at:%Y-%m-%dT%H:%M:%SZ}"
        return text


_SHOWN = 200
"""Characters of a line that `explain` shows."""


def _shown(text: str) -> str:
    cut = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
