"""The JSON bodies that a sidecar and its clients exchange.

Requests are parsed strictly: an unknown field is an error. Responses are parsed leniently, as a
sidecar may be newer than its client: unknown fields are ignored. Times are RFC 3339 in UTC,
durations are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from gatekeeper.clock import UtcTime
from gatekeeper.config import Count, HostRule, Seconds, Size
from gatekeeper.decision import Decision
from gatekeeper.pacing.waiters import ClockView, HostState
from gatekeeper.robots import Candidate, Policy
from gatekeeper.sitemaps import SitemapFinding

MAX_BATCH = 1000
"""The most URLs that one `POST /v1/check` may have."""


encode: Callable[[object], bytes] = msgspec.json.Encoder(enc_hook=str.__str__).encode
"""Encode any of these bodies as JSON, with a subclass of str as a plain string."""

UserAgent = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

# Python's `$` also matches before a final line feed, which would break a line of the journal.
LeaseId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{16,64}$(?!\n)")]


Ttl = Annotated[float, msgspec.Meta(ge=1, le=600)]


class RequestBody(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body of a request."""


class Batch(RequestBody, frozen=True):
    """Body of `POST /v1/check`."""

    urls: Annotated[list[str], msgspec.Meta(max_length=1000)]
    user_agent: UserAgent | None = None


class Decisions(msgspec.Struct, frozen=True):
    """The decisions about a batch, in its order."""

    decisions: list[Decision]


class LeaseRequestBody(RequestBody, frozen=True, kw_only=True):
    """Body of `POST /v1/leases`. Durations are seconds."""

    url: str
    wait: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long the response may wait for the host; at most server.max_wait."""
    ttl: Ttl = 60.0
    """When the lease expires unless it is renewed or reported."""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    """Higher goes first among the requests of one client; clients are served alternately."""
    user_agent: UserAgent | None = None
    id: LeaseId | None = None
    """The lease's id, chosen by the client from at least 96 random bits; ignored if it is in use.
    A client that disconnects before the response arrives can give the lease back by it."""


class LeaseBody(msgspec.Struct, frozen=True):
    """A granted lease: send the request between `not_before` and `expires_at`, then report."""

    id: str
    url: str
    not_before: UtcTime
    expires_at: UtcTime
    decision: Decision


class Renewal(RequestBody, frozen=True):
    """Body of a renewal: another `ttl`; None keeps the one first requested."""

    ttl: Ttl | None = None


class LeaseReport(RequestBody, frozen=True, kw_only=True):
    """The outcome of the request."""

    status: Annotated[int, msgspec.Meta(ge=100, le=999)] | None = None
    """The HTTP status; absent if there was no response."""
    elapsed: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """Seconds to the head of the response."""
    retry_after: (
        Annotated[float, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(max_length=200)] | None
    ) = None
    """The Retry-After header, unparsed, or seconds."""
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Bytes of the response's body."""
    rate_limit: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    """The RateLimit header, unparsed."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """When and how often one agent may visit, by the file. Durations are seconds."""

    crawl_delay: float | None
    request_rates: list[str]
    visit_times: list[str]

    @classmethod
    def of(cls, policy: Policy) -> Timing:
        """Return the timing of a policy."""
        return cls(
            crawl_delay=policy.crawl_delay,
            request_rates=[*map(str, policy.request_rates)],
            visit_times=[f"{one.start:%H:%M}-{one.end:%H:%M}" for one in policy.visit_times],
        )


class FetchStory(msgspec.Struct, frozen=True, kw_only=True):
    """How the file was retrieved."""

    status: int | None
    fetched_at: UtcTime | None
    expires_at: UtcTime | None
    hops: tuple[str, ...]
    size: int | None
    """Bytes of the text; None if there is none."""
    truncated: bool
    ignored_coding: str | None = None
    """A token of its Content-Encoding that names no registered coding; None if there is none."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with everything that led to it."""

    decision: Decision
    robots_txt: str | None
    """The text as it was read; None if there is none."""
    candidates: tuple[Candidate, ...]
    """Every rule that matched, the deciding one first."""
    fetch: FetchStory | None
    """None for a what-if question, for which nothing is fetched."""


class FleetHold(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a fleet's member that may be under way."""

    member: str
    """The name of the member's machine, the member's own random number, and the number of the
    scheduler there."""
    since: UtcTime
    until: UtcTime
    """When the hold expires; the member renews it while the request is under way."""
    headed: bool
    """Whether the head of the response has arrived."""


class FleetScope(msgspec.Struct, frozen=True, kw_only=True):
    """State of a host, or of a clock that it shares, in a fleet's store."""

    scope: str
    last_at: UtcTime | None
    """The latest start, head or failure of any member's request; None if there was none lately."""
    blocked_until: UtcTime | None
    block_reason: str
    paused: bool
    holds: tuple[FleetHold, ...]
    waiting: int
    """Members that wait for the scope."""
    day_pages: int
    """Pages that all members requested today, which count for the budget."""
    day_bytes: int
    """Bytes that all members received today, which count for the budget."""


class HostBody(msgspec.Struct, frozen=True, kw_only=True):
    """One host and its clocks."""

    host: str
    state: HostState
    next_at: UtcTime | None
    """The earliest start of the next request; None if only an event, such as a report, can free the
    host, or if nothing keeps it from being asked."""
    interval: float | None
    """Seconds between two requests, if known."""
    clocks: tuple[ClockView, ...]
    interval_source: str | None = None
    """Where the interval comes from."""
    why: str | None = None
    """What keeps the host in its state, as a line for people; None if it is free."""
    in_flight: int = 0
    """Requests that were begun and have not ended."""
    waiting: int = 0
    """Requests for a lease that wait for the host, of all clients."""
    robots: str | None = None
    """State of its robots.txt, as in a decision, by https if known, else by http; None if neither
    is in memory."""
    robots_status: int | None = None
    """HTTP status of that robots.txt."""
    robots_fetched_at: UtcTime | None = None
    robots_expires_at: UtcTime | None = None
    last_status: int | None = None
    """The HTTP status that a client last reported for a page."""
    last_status_at: UtcTime | None = None
    allowed: int = 0
    """URLs of the host that were allowed since the sidecar started or forgot the host."""
    denied: int = 0
    deferred: int = 0
    fleet: tuple[FleetScope, ...] | None = None
    """State shared by all members of the fleet, in `GET /v1/hosts/{host}` only; None without a
    fleet, or if its store can't be reached."""


class BlockBody(RequestBody, frozen=True, kw_only=True):
    """Body of a block: for how long, or until when; a time in the past lifts a block."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] | None = None
    until: UtcTime | None = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] = "operator"


class OverrideBody(RequestBody, frozen=True, kw_only=True):
    """Body of an override: the settings of a `[[host]]` rule, and for how long it is in force."""

    robots: Literal["obey", "allow", "deny"] = "obey"
    interval: Seconds | None = None
    concurrency: Count | None = None
    max_pages_per_day: Count | None = None
    max_bytes_per_day: Size | None = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    group: str | None = None
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """Who says so."""
    until: UtcTime | None = None
    """When it ends; after that, the rule that it replaced is in force again."""
    seconds: Seconds | None = None
    """In how many seconds it ends, in place of `until`; 0 ends all overrides of the match."""

    @classmethod
    def of(cls, rule: HostRule, seconds: float | None) -> OverrideBody:
        """Return the body for a rule, whose match is in the path."""
        settings = {**msgspec.structs.asdict(rule), "seconds": seconds}
        del settings["match"]
        return cls(**settings)

    def rule(self, match: str) -> HostRule:
        """Return the rule for a match."""
        settings = {**msgspec.structs.asdict(self), "match": match}
        del settings["seconds"]
        return HostRule(**settings)


class RefreshBody(RequestBody, frozen=True, kw_only=True):
    """Body of a refresh. Without `origin`: the files of both schemes at their default ports, as
    far as they are known."""

    origin: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    """One of the host's origins; needed for one at another port."""


class Alive(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of `/healthz`.

    `user_agent` is the sidecar's own name: its rules apply if a question has no name, and requests
    are sent under it. It is not a secret: every site sees it.
    """

    status: str
    user_agent: str | None = None


PROBLEM_JSON = "application/problem+json"
PROBLEM_TYPE = "urn:gatekeeper:problem:"
SANDBOXED = {
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response that may quote a site, so that a browser runs nothing of it (T12)."""


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    """The id of the request, as in the log."""
    decision: Decision | None = None
    """The decision, if a lease was denied or deferred."""
    most: float | None = None
    """If a limit was exceeded: the limit, in the unit that `detail` names."""
    held_since: UtcTime | None = None
    """If no lease came in time: since when a lease holds the host."""
    held_until: UtcTime | None = None
    """When that lease expires unless it is renewed."""
    held_by: str | None = None
    """The client that holds the lease, shown to that client and to the role `admin`; or another
    member of the fleet, shown to `admin`."""
    why: str | None = None
    """`host_blocked`, `host_paused` or `fleet` if that kept the lease from coming in time."""


def retry_after(seconds: float) -> str:
    """Return the value of a Retry-After header: whole seconds, rounded up, at least 1.

    >>> retry_after(0.2), retry_after(1.0), retry_after(1.01)
    ('1', '1', '2')
    """
    return str(max(1, math.ceil(seconds)))


def decision_headers(decision: Decision) -> dict[str, str]:
    """Return a decision as response headers, for clients that do not read the body."""
    headers = {
        "X-Gatekeeper-Verdict": decision.verdict.value,
        "X-Gatekeeper-Reason": decision.reason.value,
        "X-Gatekeeper-Decision-Id": decision.id,
    }
    if decision.rule is not None:
        headers["X-Gatekeeper-Line"] = str(decision.rule.line)
    return headers


class SitemapLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `GET /v1/sitemaps`: a page that a site lists, or a finding about a sitemap."""

    url: str | None = None
    lastmod: datetime | None = None
    source: str | None = None
    finding: SitemapFinding | None = None
