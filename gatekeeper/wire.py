"""The bodies that a sidecar and its client exchange, each defined once, for both.

Requests are read strictly: a field that the sidecar does not know is an error. Answers are
read leniently: a sidecar may be newer than its client, so fields not known here are passed
over. Times are RFC 3339 in UTC, durations seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from gatekeeper.decision import Decision
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.robots import Candidate, Policy

MAX_BATCH = 1000
"""URLs that one `POST /v1/check` may have at most."""


def _plain(value: object) -> str:
    """For what has no JSON: a kind of str that a caller has is text to everybody else."""
    if isinstance(value, str):
        return str.__str__(value)
    raise NotImplementedError


encode: Callable[[object], bytes] = msgspec.json.Encoder(enc_hook=_plain).encode
"""Any of these as JSON."""

UserAgent = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

# The last look is for a line end, which Python's `$` lets pass: it would be one in the journal.
LeaseId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{16,64}$(?!\n)")]


Ttl = Annotated[float, msgspec.Meta(ge=1, le=600)]


HostState = Literal["free", "waiting", "busy", "blocked", "paused"]


class Batch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `POST /v1/check` asks."""

    urls: Annotated[list[str], msgspec.Meta(max_length=1000)]
    user_agent: UserAgent | None = None


class Decisions(msgspec.Struct, frozen=True):
    """The answers to a batch, in its order."""

    decisions: list[Decision]


class LeaseRequestBody(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What `POST /v1/leases` asks. Durations are seconds."""

    url: str
    wait: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long the answer may wait for the host's turn; server.max_wait at most."""
    ttl: Ttl = 60.0
    """When the lease ends by itself unless it is renewed or reported."""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    """Higher goes first among the requests of one client; clients take turns."""
    user_agent: UserAgent | None = None
    id: LeaseId | None = None
    """Made up by the client, from at least 96 random bits: the name that the lease gets unless one
    has it. A client that goes before the answer is here can give back by it what it never saw."""


class LeaseBody(msgspec.Struct, frozen=True):
    """A lease: send the request between `not_before` and `expires_at`, then report."""

    id: str
    url: str
    not_before: datetime
    expires_at: datetime
    decision: Decision


class Renewal(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a renewal may say: another `ttl`, else the one asked for at first."""

    ttl: Ttl | None = None


class LeaseReport(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What came of the request."""

    status: Annotated[int, msgspec.Meta(ge=100, le=999)] | None = None
    """The HTTP status; absent where no answer came."""
    elapsed: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """Seconds to the head of the response."""
    retry_after: (
        Annotated[float, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(max_length=200)] | None
    ) = None
    """The Retry-After header as it came, or seconds."""
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rate_limit: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    """The RateLimit header as it came."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What the text says to one agent about when and how often. Durations are seconds."""

    crawl_delay: float | None
    request_rates: list[str]
    visit_times: list[str]

    @classmethod
    def of(cls, policy: Policy) -> Timing:
        """As the policy has it."""
        return cls(
            crawl_delay=policy.crawl_delay,
            request_rates=[f"{one.documents}/{one.seconds:g}s" for one in policy.request_rates],
            visit_times=[f"{one.start:%H:%M}-{one.end:%H:%M}" for one in policy.visit_times],
        )


class FetchStory(msgspec.Struct, frozen=True, kw_only=True):
    """How the file came to us."""

    status: int | None
    fetched_at: datetime | None
    expires_at: datetime | None
    hops: tuple[str, ...]
    size: int | None
    """Bytes of the text; None where there is none."""
    truncated: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with everything that led to it."""

    decision: Decision
    robots_txt: str | None
    """The text, as it was read; None where there is none."""
    candidates: tuple[Candidate, ...]
    """Every rule that matched, the deciding one first."""
    fetch: FetchStory | None
    """None for a what-if, where nothing was fetched."""


class FleetHold(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a member that may be under way."""

    member: str
    """The name of its machine, a number that it made up, and that of its scheduler there."""
    since: datetime
    until: datetime
    """It ends then, unless the member renews it, as it does while the request is under way."""
    headed: bool
    """The head of the answer is there."""


class FleetScope(msgspec.Struct, frozen=True, kw_only=True):
    """What the store of a fleet knows of a host, or of a clock that it shares."""

    scope: str
    last_at: datetime | None
    """The latest start, head or failure, of any member; None: it was never asked, or long ago."""
    blocked_until: datetime | None
    block_reason: str
    paused: bool
    holds: tuple[FleetHold, ...]
    waiting: int
    """Members that wait for it."""
    day_pages: int
    """Of its budget: the pages of the day, of all members ..."""
    day_bytes: int
    """... and their bytes."""


class HostBody(msgspec.Struct, frozen=True, kw_only=True):
    """One host and every clock it has."""

    host: str
    state: HostState
    next_at: datetime | None
    """Before this no request may start; None where nothing but an event is waited for."""
    interval: float | None
    """Seconds between two requests, as far as it is known."""
    clocks: tuple[ClockView, ...]
    interval_source: str | None = None
    """Where the interval comes from."""
    in_flight: int = 0
    """Requests that were begun and have not ended."""
    waiting: int = 0
    """Requests for a lease that wait for it, of all clients."""
    robots: str | None = None
    """The state of its robots.txt, as in a decision: that of https, or else of http. None where
    none is in memory."""
    robots_status: int | None = None
    """The HTTP status of that."""
    robots_fetched_at: datetime | None = None
    robots_expires_at: datetime | None = None
    last_status: int | None = None
    """The HTTP status that a client last reported of a page."""
    last_status_at: datetime | None = None
    allowed: int = 0
    """Decisions about its URLs since the sidecar started, or since it forgot the host."""
    denied: int = 0
    deferred: int = 0
    fleet: tuple[FleetScope, ...] | None = None
    """What all members of the fleet hold; None: this gate is alone, or the store can't be asked.
    `GET /v1/hosts/{host}` alone says it."""


class BlockBody(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """For how long, or until when; a moment in the past lifts a block."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] | None = None
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] = "operator"


class RefreshBody(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Whose file: without `origin`, both schemes' at their own ports, as far as known."""

    origin: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    """One of the host's origins; the way to name one at a port of its own."""


class Alive(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of `/healthz`. `user_agent` is the name whose rules apply where a question names
    no other, and under which sites are asked: no secret, every site is told it."""

    status: str
    user_agent: str | None = None


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    """The id of the request, as in the log."""
    decision: Decision | None = None
    """With a lease that was denied or deferred: why."""
    most: float | None = None
    """Where too much was asked at once: the most that may be, of what `detail` speaks of."""
    held_since: datetime | None = None
    """Where a turn did not come in time: since when a lease holds the host."""
    held_until: datetime | None = None
    """When that lease ends at the latest, unless it is renewed."""
    held_by: str | None = None
    """The client that has it: told to that client, and to the role `admin`."""
    why: str | None = None
    """`host_blocked` or `host_paused`, where a turn did not come in time because of that."""
