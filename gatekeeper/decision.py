"""`Decision`, the answer about one URL at one moment; its enums; and the errors that carry one.

Those errors stop a request. They are also aiohttp errors, so that the handlers of aiohttp's users
catch them. `gatekeeper.errors` exports them too, and imports them on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

import aiohttp
import msgspec

from gatekeeper.clock import UtcTime, utc
from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import Rule
from gatekeeper.urls import printable


class Verdict(StrEnum):
    """What to do with the URL."""

    ALLOW = "allow"
    """The URL may be fetched."""
    DENY = "deny"
    """The URL may not be fetched."""
    DEFER = "defer"
    """Not now: ask again at `retry_at`."""


class State(StrEnum):
    """What a decision is based on."""

    PARSED = "parsed"
    """A robots.txt that was read and is within its lifetime."""
    UNAVAILABLE = "unavailable"
    """There is no file: everything is allowed (RFC 9309 section 2.3.1.3, RFC-36)."""
    UNREACHABLE = "unreachable"
    """The file can't be fetched: deferred (RFC 9309 section 2.3.1.4, RFC-37)."""
    STALE = "stale"
    """An older copy, while the file can't be fetched (RFC 9309 section 2.4, RFC-40)."""
    OVERRIDE = "override"
    """The operator's configuration, not the site's file."""


class Reason(StrEnum):
    """Why a decision was made. The text of each reason begins with its possible verdicts.

    A deferral ends at `retry_at`: ask again then, and fetch nothing before. The rows of
    `fetching.outcomes` assign a reason to each outcome of a retrieval.
    """

    # The text decided.
    RULE = "rule"
    """allow, deny: a line of robots.txt decided; `rule` holds it."""
    NO_RULE = "no_rule"
    """allow, deny: robots.txt has no rule that matches this URL, so it may be fetched. It is denied
    in two cases: the rules would take too long to try (only a hostile text does that), or a 2.0
    rule set lists all that may be fetched (robots.v2_semantics = "precedence")."""
    EMPTY_FILE = "empty_file"
    """allow: robots.txt is empty or holds only comments, so everything may be fetched."""
    ROBOTS_FILE = "robots_file"
    """allow: /robots.txt itself may always be fetched (RFC 9309 section 2.2.2, RFC-20)."""
    OUTSIDE_VISIT_TIME = "outside_visit_time"
    """defer: robots.txt restricts visits to certain hours (Visit-time), and it is outside them
    now; ask again when the next window opens."""
    # There is no file.
    NO_FILE = "no_file"
    """allow: the site has no robots.txt (404, or another 4xx status that means the same)."""
    PAYMENT_REQUIRED = "payment_required"
    """allow: robots.txt was answered with 402 or another demand for payment, which counts as
    no file (RFC 9309 section 2.3.1.3); pages may demand payment as well: see the signals of
    their responses."""
    LICENSE_REQUIRED = "license_required"
    """allow: robots.txt was answered with 401 or 403 and a demand for a licence
    (WWW-Authenticate: License), which counts as no file; pages may demand one as well: see the
    signals of their responses."""
    SOFT_404 = "soft_404"
    """allow: an HTML page without any rules was served in place of robots.txt, which counts as
    no file."""
    NOT_TEXT = "not_text"
    """allow: binary data was served in place of robots.txt, which counts as no file."""
    TOO_MANY_REDIRECTS = "too_many_redirects"
    """allow, defer: robots.txt redirects in a loop or too often, which counts as no file; with
    fetch.too_many_redirects = "unreachable" it counts as unreachable and defers."""
    LONG_UNREACHABLE = "long_unreachable"
    """allow: the file was unreachable for thirty days while the site's pages answered (RFC
    9309 section 2.3.1.4, RFC-38), or for twelve hours with fetch.unseen_unreachable =
    "allow_after_12h"."""
    # The file could not be fetched.
    ACCESS_RESTRICTED = "access_restricted"
    """deny: robots.txt was answered with 401 or 403, and fetch.on_401 or fetch.on_403 is
    "deny": the site is closed to you; leave it out."""
    CHALLENGE = "challenge"
    """defer: a challenge page for robots was served in place of robots.txt; if that continues,
    ask the site's owner for access."""
    INVALID_RESPONSE = "invalid_response"
    """defer: the response for robots.txt is not usable HTTP, such as a malformed head, an
    unrequested 206 or a status of 600."""
    BAD_REDIRECT = "bad_redirect"
    """defer: robots.txt redirects without a usable Location: it is missing, malformed, or not an
    http or https URL; only the site can mend it."""
    EGRESS_POLICY = "egress_policy"
    """defer: robots.txt redirects to an address that the guard refuses; decisions show
    `blocked` instead (T2)."""
    CLIENT_ERROR = "client_error"
    """defer: robots.txt was answered with 408, 421 or 425 twice; these statuses concern the
    exchange, not the file."""
    RATE_LIMITED = "rate_limited"
    """defer: robots.txt was answered with 429; the whole host is left alone until
    `retry_at`."""
    SERVER_ERROR = "server_error"
    """defer: robots.txt was answered with 5xx, so the site's rules are unknown."""
    LOCAL_FAULT = "local_fault"
    """defer: so many sites fail at the same time that your own network is the likely cause;
    check it."""
    CONNECT_FAILED = "connect_failed"
    """defer: the site accepts no connection."""
    TIMEOUT = "timeout"
    """defer: the site did not answer the request for robots.txt in time."""
    TRUNCATED = "truncated"
    """defer: the connection broke in the middle of robots.txt; half a list of rules is worse
    than none."""
    TOO_SLOW = "too_slow"
    """defer: robots.txt arrived so slowly that the time limit was reached."""
    DNS_NXDOMAIN = "dns_nxdomain"
    """defer: the host's name does not exist or has no address; check its spelling, because it
    is looked up again only hours later."""
    DNS_FAILURE = "dns_failure"
    """defer: the DNS resolver did not answer; check your resolver if that continues."""
    TLS = "tls"
    """defer: no secure connection could be made, because of an expired or untrusted
    certificate, for example; plain http is never tried instead. `note` has the cause that OpenSSL
    gives, and the setting that helps: `fetch.ca_file` or `fetch.ca_dir` for a private authority."""
    BAD_ENCODING = "bad_encoding"
    """defer: the compression of robots.txt is corrupt, unknown or a decompression bomb, or its
    Content-Encoding names no coding and the body is no text."""
    INTERNAL = "internal"
    """defer: gatekeeper failed, or ran out of memory, so nothing is allowed; the log has the
    details."""
    OVERLOADED = "overloaded"
    """defer: gatekeeper has reached a limit of its own. Either no file descriptor is left: `note`
    says how to get more. Or more questions wait for robots.txt files than `cache.max_waiters`
    permits: ask fewer at a time."""
    OWN_LEASE = "own_lease"
    """defer: fetching the file needs a lease of a host that the asking task itself holds; end
    that lease first."""
    UNKNOWN = "unknown"
    """defer: nothing is known about the origin yet, and this call may not wait for its
    robots.txt; ask again in a moment."""
    GATE_UNREACHABLE = "gate_unreachable"
    """defer, allow: the client's own answer while its sidecar is unreachable (allow only with
    fail="open"); check that `gatekeeper serve` is running."""
    # The guard, the operator, or the caller's own text decided.
    OPERATOR = "operator"
    """allow, deny: the operator's configuration decided ([[host]] robots), or a rule set at run
    time, whatever the site says; `note` has the operator's reason, who set the rule and until when
    (`by`, `until`), `expires_at` its end."""
    BLOCKED = "blocked"
    """deny, defer: the guard refuses the URL, its address or its port (defer: robots.txt redirects
    there). Callers get only this one word (T2). List your own networks in guard.allow and their
    ports in guard.ports. Three things stay refused: what guard.deny lists, a URL with credentials,
    and the addresses at which gatekeeper itself listens. For a blocked host see `host_blocked`."""
    INVALID_URL = "invalid_url"
    """deny: the text is not an http or https URL; `note` says what is wrong with it."""
    HOST_BLOCKED = "host_blocked"
    """defer: the file is not cached, and its host may not be asked for a while, because of its
    own 429 or 503 or an operator's block."""
    HOST_PAUSED = "host_paused"
    """defer: the file is not cached, and an operator has paused its host; it goes on when the
    host is resumed."""
    # Concerning leases only.
    STORAGE = "storage"
    """defer: the state file or the audit record can't be written (a full disk, for example), so
    that a lease could not be kept; do what `note` says (free some space, make the file writable,
    put it back), and it recovers by itself."""
    FLEET = "fleet"
    """defer: the store that the fleet shares is unreachable or has just come back, so the
    clocks of the hosts are unknown, or another member serves the host meanwhile (`note` names it);
    restore the store, and it recovers by itself."""
    BUDGET = "budget"
    """defer: the pages or bytes that the host may be asked for in a day (max_pages_per_day,
    max_bytes_per_day) are used up; continue when the next day begins, or raise the limit."""
    CLOSING = "closing"
    """defer: deprecated, and removed in the next minor version: nothing returns it. A gate that
    closes raises GateClosed."""


BLOCKED_NOTE = (
    "the guard refuses what this name or a redirect leads to; guard.allow (--allow-address) lists "
    "ranges of your own network, guard.ports its ports, guard.deny overrides both; else the site "
    "must mend it"
)
"""Note of a decision with reason `blocked` where the URL's text does not show why: the remedies of
every possible cause, and nothing about what was found, so that a caller learns nothing about the
network (T2). The guard's other notes depend only on the URL's text and the configuration."""


# gc=False: a decision holds only values, so it can't be part of a reference cycle, and the garbage
# collector need not track a batch of a thousand.
class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer about one URL at one moment.

    `bool(decision)` is true only for ALLOW. DENY means that the URL may not be fetched, DEFER that
    it may not be fetched before `retry_at`. Times are aware datetimes in UTC, durations are
    seconds.

    >>> Decision(verdict=Verdict.DENY, reason=Reason.RULE, url="https://a.example/x",
    ...          origin="https://a.example", user_agent="bot").explain()
    'deny https://a.example/x for bot: rule'
    """

    verdict: Verdict
    """Whether the URL may be fetched."""
    reason: Reason
    """Why."""
    url: str
    """The URL that was asked about, with credentials masked."""
    origin: str
    """Scheme, host and port whose robots.txt decided; empty for an invalid URL."""
    user_agent: str
    """The product token whose policy decided."""
    state: State | None = None
    """None if no file was consulted (invalid or refused URL)."""
    rule: Rule | None = None
    """The line of robots.txt that decided, if one did."""
    retry_at: UtcTime | None = None
    """With DEFER: the earliest time at which asking again can help."""
    robots_status: int | None = None
    """HTTP status of the last robots.txt response; None if there was none."""
    fetched_at: UtcTime | None = None
    """When the file that decided was fetched or revalidated."""
    expires_at: UtcTime | None = None
    """When the cached state of the origin's robots.txt expires, or the operator's override ends."""
    hops: tuple[str, ...] = ()
    """URLs that robots.txt was redirected through; the last one served the file."""
    crawl_delay: float | None = None
    """Seconds between two requests by the file's Crawl-delay."""
    conflict: bool = False
    """Whether the declared dialect and RFC 9309 disagree about this URL (DIA-03)."""
    clamped: bool = False
    """Whether the operator's `pacing.max_interval` shortens the interval that the file asks for."""
    note: str | None = None
    """The operator's reason for an override, the interval that was shortened, what is wrong with
    an invalid URL, or a remedy."""
    id: str = ""
    """Unique within the process and, by its prefix, between processes."""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.ALLOW

    def explain(self) -> str:
        """Describe the decision in one line for people: verdict, URL, and what decided.

        Safe to print: text from a site is cut to 200 characters and escaped for terminals.
        """
        # Empty for a client that leaves the name to a sidecar which it could not ask.
        agent = f" for {self.user_agent}" if self.user_agent else ""
        text = f"{self.verdict} {self.url}{agent}: {self.reason}"
        if self.rule is not None:
            text += f" (line {self.rule.line}: {printable(self.rule.text, _MAX_SHOWN)})"
        if self.note:
            text += f" ({printable(self.note, _MAX_SHOWN)})"
        if self.retry_at is not None:
            text += f"; ask again at {self.retry_at:%Y-%m-%dT%H:%M:%SZ}"
        return text


class NotYet(msgspec.Struct, frozen=True, gc=False):
    """Returned by `try_acquire` if no lease is available now. It is falsy, unlike a lease.

    >>> NotYet(datetime(2026, 11, 22, 12, 0, 5), "turn") or "later"
    'later'
    """

    due_at: UtcTime
    """When asking again can help (aware, UTC); an estimate if that depends on other requests."""
    why: str
    """"turn" if other requests of the host go first or its interval is running; "host_blocked";
    "host_paused"; or the `Reason` of a deferral, such as "unknown" while robots.txt is fetched."""
    decision: Decision | None = None
    """The deferral, if there is one."""

    def __bool__(self) -> bool:
        return False


def not_yet(
    wall: float, why: str, due_at: datetime | None = None, decision: Decision | None = None
) -> NotYet:
    """Make a `NotYet` at the wall time `wall`, in POSIX seconds.

    For a paused host, whose end only the operator knows, it is due in a minute. Without `due_at`
    it is due in a second.
    """
    if why == Reason.HOST_PAUSED:
        due_at = utc(wall + 60.0)
    return NotYet(due_at or utc(wall + 1.0), str(why), decision)


_MAX_SHOWN = 200
"""Characters of a rule or note that `explain` shows."""


class Denied(GatekeeperError, aiohttp.ClientError):
    """This request may not be sent; `decision` has the reason.

    Raised where a request is stopped: by entering a lease, and by a gated session. `Deferred` is a
    subclass: catch it first if "not now" and "no" are handled differently.
    """

    retryable: ClassVar[bool] = False
    """Whether asking again can help: False, and True for `Deferred`. For libraries that retry."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision

    def __str__(self) -> str:
        return self.decision.explain()

    def __repr__(self) -> str:  # a log shows one line, not every field of the decision
        return f"{type(self).__name__}({str(self)!r})"


class Deferred(Denied):
    """This request may not be sent now; ask again at `retry_at` (an aware UTC datetime)."""

    retryable: ClassVar[bool] = True

    @property
    def retry_at(self) -> datetime | None:
        """The earliest time at which asking again can help."""
        return self.decision.retry_at


def refuse(decision: Decision) -> None:
    """Raise Denied or Deferred unless the decision is ALLOW."""
    if decision.verdict is Verdict.DENY:
        raise Denied(decision)
    if decision.verdict is Verdict.DEFER:
        raise Deferred(decision)


class LeaseTimeout(GatekeeperError, aiohttp.ClientError, TimeoutError):
    """No lease was granted within the timeout, or waiting for one could never end.

    `url` is the URL that waited, `retry_at` the earliest time (aware, UTC) at which a lease can be
    granted as far as is known, or None; `why` has the values of `NotYet.why`.
    """

    def __init__(
        self, url: str, message: str, *, retry_at: datetime | None = None, why: str = "turn"
    ) -> None:
        super().__init__(message)
        self.url = url
        self.retry_at = retry_at
        self.why = why

    def __reduce__(self) -> tuple[Callable[..., LeaseTimeout], tuple[Any, ...], dict[str, Any]]:
        # `args` alone does not suffice to make it again, when it is unpickled for example.
        return _lease_timeout, (type(self), str(self)), vars(self)


def _lease_timeout(kind: type[LeaseTimeout], message: str) -> LeaseTimeout:
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    return error


for _error in (Denied, Deferred, LeaseTimeout):  # the module that documents them
    _error.__module__ = "gatekeeper.errors"
