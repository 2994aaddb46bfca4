"""The operators' API: `/v1/overview`, `/v1/leases`, `/v1/decisions/{id}`, `/v1/events`,
`/v1/series` and `/v1/config`."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.clock import UtcTime, utc
from gatekeeper.config import values_of
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import InvalidURL
from gatekeeper.gate.parts import FoundLine
from gatekeeper.sidecar.lease_requests import full
from gatekeeper.sidecar.logs import DecisionEvent
from gatekeeper.sidecar.pages.recent_decisions import GivenDecision, SeriesBody, totals_of
from gatekeeper.sidecar.pages.state import LeaseView, Overview, Reloads
from gatekeeper.sidecar.reload import needs_restart
from gatekeeper.sidecar.routing import Call, EmptyObject, PageQuery, Problem, Routes, json_response
from gatekeeper.sidecar.service import Service

ROUTES: Routes[Service] = Routes()

TICK: Final = 0.1
"""Seconds between two reads of the decisions by a stream."""
MAX_EVENTS: Final = 250
"""Maximum decisions that a stream sends per read; the others are counted as dropped."""
_MAX_SEARCHED: Final = 1000
"""Decisions that a stream with a filter examines per read."""
_HEARTBEAT: Final = 10.0
"""Seconds without an event after which a stream sends a heartbeat."""
RETRY: Final = 2.0
"""Seconds after which a browser reconnects to a stream that broke off."""
RECHECK: Final = 10.0
"""Seconds after which a stream checks again that its client is permitted: a session may end."""
_NEARLY_OVER: Final = 0.1
"""Share of its time that a lease has left when it is nearly over."""
_GOODBYE: Final = 1.0
"""Seconds that a stream has for its last event when its client is not permitted any more."""
_MAX_DIGITS: Final = 20
"""Digits of the number in the id of an event."""
_PREFIX: Final = secrets.token_hex(4)
"""Precedes the number in the id of an event, so that ids of an earlier process are recognized."""


# --- overview and leases ----------------------------------------------------------------------


@ROUTES.add("GET", "/v1/overview", answers={200: Overview})
async def get_overview(service: Service, call: Call) -> web.StreamResponse:
    """State, rates, leases, delayed hosts, and the result of the last reload."""
    return json_response(await overview_of(service))


async def overview_of(service: Service) -> Overview:
    """Return the overview of the service."""
    state, clock = service.operators, service.clock
    now = clock.monotonic()
    stats = service.gate.stats()
    totals = totals_of(stats)
    decisions = {verdict.value: totals[verdict.value] for verdict in Verdict}
    total = sum(decisions.values())
    fetches = stats.directory.fetches
    states, held_up = await state.states()
    held, waiters = list(service.leases), service.leases.waiters
    oldest = min(waiters, key=lambda one: one.since, default=None)
    metrics = service.metrics
    return Overview(
        state=service.phase if service.ready or service.phase != "serving" else service.unready,
        ready=service.ready,
        user_agent=service.gate.user_agent,
        version=service.version,
        started_at=utc(state.started),
        now=utc(clock.wall()),
        decisions=decisions,
        rates=state.series.rates(),
        robots=stats.directory.outcomes,
        robots_ok=totals["robots_ok"],
        robots_failed=totals["robots_failed"],
        waiting=len(waiters),
        oldest_wait=None if oldest is None else now - oldest.since,
        oldest_wait_host=None if oldest is None else oldest.host,
        leases=len(held),
        overdue=sum(one.due - now < _NEARLY_OVER * one.ttl for one in held),
        expired=service.leases.ended["expired"],
        hosts=len(state.hosts),
        host_states=states.counts,
        hosts_complete=states.complete,
        held_up=held_up,
        cache_share=max(0.0, 1.0 - fetches / total) if total else None,
        fleet=None if stats.fleet is None else msgspec.to_builtins(stats.fleet),
        reload=Reloads(
            ok=metrics.last_reload_ok,
            at=utc(metrics.last_reload_at),
            needs_restart=tuple(service.restart_required),
        ),
        events=state.events_sent,
    )


class LeaseQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /v1/leases`."""

    state: Literal["any", "held", "waiting"] = "any"
    client: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The exact name of the client; empty: any."""
    host: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """A substring of the host."""


class LeaseList(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting requests, oldest first, then held leases, oldest first."""

    leases: list[LeaseView]
    total: int
    """Leases and waiting requests that pass the filter."""
    page: int
    pages: int
    held: int
    """All held leases."""
    waiting: int
    """All waiting requests."""


@ROUTES.add("GET", "/v1/leases", query=LeaseQuery, answers={200: LeaseList})
async def list_leases(service: Service, call: Call) -> web.StreamResponse:
    """A page of the leases that clients hold, and of the requests that wait for one."""
    return json_response(lease_list(service, call.parameters(LeaseQuery)))


def lease_list(service: Service, query: LeaseQuery, *, name: str | None = None) -> LeaseList:
    """Return a page of leases and waiting requests, with a `name` those of that host.

    Views are made for those on the page only.
    """
    part = query.host.lower()
    found = [
        view
        for host, client, view in service.operators.leases(query.state)
        if part in host and query.client in ("", client) and name in (None, host)
    ]
    return LeaseList(
        leases=[view() for view in found[query.first : query.first + query.per_page]],
        total=len(found),
        page=query.page,
        pages=query.pages(len(found)),
        held=len(service.leases),
        waiting=len(service.leases.waiters),
    )


@ROUTES.add(
    "POST", "/v1/leases/{id}/drop", body=EmptyObject, answers={204: None}, problems=(404, 503)
)
async def drop_lease(service: Service, call: Call) -> web.StreamResponse:
    """End a lease whose client is believed to be gone; it counts as used."""
    await call.body(EmptyObject)
    service.leases.drop(call.params["id"])
    return web.Response(status=204)


# --- decisions --------------------------------------------------------------------------------


class RecordedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the audit record about a decision."""

    chain: str
    segment: str
    n: int
    """The number of the line in its chain."""
    kind: str
    line: int | None = None
    """The line of the robots.txt that decided."""
    text: str | None = None
    """The digest of the robots.txt."""


class PastDecision(msgspec.Struct, frozen=True):
    """One of the latest decisions, with the client and the time."""

    time: UtcTime
    client: str
    request: str
    """The id of the request, as in the log. Empty, as is the client, for one that only the audit
    record still has."""
    decision: Decision
    audit: RecordedLine | None = None
    """Where the audit record has it, if it is no longer among the latest."""


_DECISION_ID: Final = re.compile("[0-9a-f]{1,40}-[0-9a-f]{1,20}")


@ROUTES.add("GET", "/v1/decisions/{id}", answers={200: PastDecision}, problems=(404, 503))
async def get_decision(service: Service, call: Call) -> web.StreamResponse:
    """One of the latest decisions, by its id, or one that the audit record has."""
    wanted = call.params["id"]
    found = service.operators.feed.find(wanted)
    if found is not None:
        past = PastDecision(utc(found.at), found.client, found.request, found.decision)
        return json_response(past)
    audit = service.gate.parts.audit
    if audit is None:
        raise Problem(404, "not-found", "no such decision among the latest; the log has older ones")
    if _DECISION_ID.fullmatch(wanted):
        try:
            line = await audit.find(wanted)
            if line is not None:
                return json_response(_from_record(line))
        except (OSError, ValueError) as error:
            raise Problem(503, "audit", f"the audit record can't be read: {error}") from error
    where = f"gatekeeper audit show {service.config.audit.folder} {wanted[:64]}"
    said = "no such decision among the latest, nor in the two latest segments of the audit record; "
    raise Problem(404, "not-found", f"{said}search all of them: {where}")


def _from_record(found: FoundLine) -> PastDecision:
    """Return a decision as its line has it: without what only the robots.txt knows."""
    line = found.line
    origin = ""
    with contextlib.suppress(InvalidURL):  # a digest, or what was no URL
        origin = urls.split(line["url"])[0]
    decision = {
        "verdict": line.get("verdict", "allow"),  # a grant has none
        "reason": line["reason"],
        "url": line["url"],
        "origin": origin,
        "user_agent": line["agent"],
        "retry_at": line.get("retry_at"),
        "id": line["decision"],
    }
    recorded = {**line, "chain": found.chain, "segment": found.segment}
    parts = msgspec.convert(decision, Decision), msgspec.convert(recorded, RecordedLine)
    return PastDecision(datetime.fromisoformat(line["t"]), "", "", *parts)


class EventQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /v1/events`: a filter, and where to start."""

    verdict: Literal["any", "allow", "deny", "defer"] = "any"
    host: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """A substring of the origin."""
    client: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The exact name of the client; empty: any."""
    reason: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(Reason)})?$")] = ""
    """The reason; empty: any."""
    latest: Annotated[int, msgspec.Meta(ge=0, le=200)] = 0
    """Past decisions to send first."""
    last_event_id: Annotated[str, msgspec.Meta(max_length=40)] = ""
    """Continue after this event. The header Last-Event-ID takes precedence."""

    @property
    def narrow(self) -> bool:
        """True if the filter excludes any decisions."""
        return self.verdict != "any" or bool(self.host or self.client or self.reason)

    def wants(self, given: GivenDecision) -> bool:
        """Return True if a decision passes the filter."""
        decision = given.decision
        return (
            self.verdict in ("any", decision.verdict.value)
            and self.host.lower() in decision.origin
            and (not self.client or given.client == self.client)
            and (not self.reason or decision.reason.value == self.reason)
        )


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event of the kind `dropped`: numbers of decisions that were not sent."""

    now: int
    total: int
    """All since the stream was opened."""


@ROUTES.add(
    "GET",
    "/v1/events",
    query=EventQuery,
    answers={200: "text/event-stream"},
    events={"decision": DecisionEvent, "dropped": Dropped},
    problems=(429, 503),
)
async def stream_decisions(service: Service, call: Call) -> web.StreamResponse:
    """Send decisions until the client disconnects or the service drains.

    A client that reads too slowly, or whose filter selects more than 250 decisions each 0.1 s, is
    told how many it missed.
    """
    query = call.parameters(EventQuery)
    request = call.request
    last = request.headers.get("Last-Event-ID", query.last_event_id)
    events = _events(service, query, last)
    opening = next(events)
    response = stream_response(call, "text/event-stream")
    with open_stream(service, call), contextlib.suppress(ConnectionError):
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await response.write(opening)
        call.goodbye = _GOODBYE
        look_again = service.clock.monotonic() + RECHECK
        while service.phase == "serving" and call.refused is None:
            if (now := service.clock.monotonic()) >= look_again:
                look_again = now + RECHECK
                if not call.permitted():
                    break
            if request.transport is None or request.transport.is_closing():
                break
            if text := next(events):
                await response.write(text)
            await service.clock.sleep(TICK)
        await response.write(b"event: bye\ndata: {}\n\n")
    return response


def stream_response(call: Call, kind: str) -> web.StreamResponse:
    """Return the response of a stream of texts, whose head is not sent yet."""
    return web.StreamResponse(
        headers={
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # otherwise nginx would hold texts back
            "X-Content-Type-Options": "nosniff",
            "X-Request-Id": call.id,
            "Server": "gatekeeper",
        }
    )


@contextlib.contextmanager
def open_stream(service: Service, call: Call) -> Iterator[None]:
    """Count a stream of a client while it is open.

    Raises Problem 429 if the client has too many streams, 503 if all clients together have (T15).
    """
    client, streams, server = call.client, service.operators.streams, service.config.server
    most = (server.max_streams + 1) // 2 if server.client_streams is None else server.client_streams
    if streams[client] >= most:
        service.clients.refused["streams"] += 1
        said = (
            f"{most} streams are open to one client (server.client_streams): close one, or a page "
        )
        detail = f"{said}that has one, or ask again in 5 seconds"
        raise Problem(429, "too-many-streams", detail, wait=5, most=most)
    if streams.total() >= server.max_streams:
        raise full("streams are open already (server.max_streams)", server.max_streams)
    streams[client] += 1
    call.streams = True
    try:
        yield
    finally:
        streams[client] -= 1
        if not streams[client]:
            del streams[client]


def _events(service: Service, query: EventQuery, last: str) -> Iterator[bytes]:
    """Yield the first event of a stream, with the position at which it starts; then, as often as it
    is asked, the events to send now: empty if there are none. `last` is the id of the last event
    that the client has seen, which may be of an earlier process."""
    operators, clock = service.operators, service.clock
    feed, sent_at = operators.feed, clock.monotonic()
    read_at, dropped = sent_at, 0
    prefix, _, number = last.partition("-")
    # Python refuses to read a number of thousands of digits.
    plain = len(number) <= _MAX_DIGITS and number.isdecimal()
    known = prefix == _PREFIX and plain and int(number) <= feed.count
    cursor = int(number) if known else feed.count
    if not last and (earlier := list(islice(filter(query.wants, feed.latest()), query.latest))):
        cursor = earlier[-1].number - 1
    started = msgspec.json.encode({"restarted": bool(last) and not known})
    head = f"retry: {RETRY * 1000:.0f}\nid: {_PREFIX}-{cursor}\nevent: hello\ndata: "
    yield head.encode() + started + b"\n\n"
    while True:
        count, now = feed.count, clock.monotonic()
        # If the loop is busy, reads are further apart; each may then send up to four times as much.
        most = int(MAX_EVENTS * min(max(1.0, (now - read_at) / TICK), 4.0))
        read_at = now
        parts: list[bytes] = []
        if count > cursor:
            seen = feed.since(cursor, _MAX_SEARCHED if query.narrow else most)
            wanted = [one for one in seen if query.wants(one)] if query.narrow else seen
            missed = count - cursor - len(seen) + max(0, len(wanted) - most)
            cursor = count
            if missed > 0:
                dropped += missed
                data = msgspec.json.encode(Dropped(now=missed, total=dropped))
                parts.append(b"event: dropped\ndata: %b\n\n" % data)
            parts += map(_encode, wanted[-most:])
            operators.events_sent += len(wanted[-most:])
        if not parts and now - sent_at >= _HEARTBEAT:
            parts.append(b"id: %s-%d\nevent: beat\ndata: {}\n\n" % (_PREFIX.encode(), cursor))
        sent_at = now if parts else sent_at
        yield b"".join(parts)


def _encode(given: GivenDecision) -> bytes:
    """Encode the event of a decision."""
    decision = given.decision
    event = DecisionEvent.of(decision, given.request, given.client, at=given.at, url=decision.url)
    data = msgspec.json.encode(event)
    return b"id: %s-%d\nevent: decision\ndata: %b\n\n" % (_PREFIX.encode(), given.number, data)


@ROUTES.add("GET", "/v1/series", answers={200: SeriesBody})
async def get_series(service: Service, call: Call) -> web.StreamResponse:
    """The metrics of the last hour, one point for each ten seconds."""
    return json_response(service.operators.series.body())


# --- the configuration ------------------------------------------------------------------------


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """One effective setting."""

    name: str
    value: Any
    """The value; secrets are masked."""
    source: str
    """"default", or the file, environment variable or flag that the value came from."""
    needs_restart: bool
    """True if a change takes effect only after a restart."""
    pending: bool = False
    """True if the setting was changed in the file and needs a restart to take effect."""


class ConfigBody(msgspec.Struct, frozen=True):
    """All effective settings, in the order of the sections."""

    settings: list[SettingView]


@ROUTES.add("GET", "/v1/config", answers={200: ConfigBody})
async def get_configuration(service: Service, call: Call) -> web.StreamResponse:
    """The effective configuration, and the source of each value."""
    return json_response(config_body(service))


def config_body(service: Service) -> ConfigBody:
    """Return all effective settings, in the order of the sections."""
    settings = [
        SettingView(
            name=name,
            value=masked(msgspec.to_builtins(value)),
            source=service.sources.get(name, "default"),
            needs_restart=needs_restart(name),
            pending=name in service.restart_required,
        )
        for name, value in values_of(service.config)
    ]
    return ConfigBody(settings)


_URL: Final = re.compile(r"\A[\w+.-]+://.*|\b\w+://\S+", re.DOTALL)
"""A value that is a URL, whose password may hold anything, or a URL within a text."""


def masked(value: Any) -> Any:
    """Return the value with the credentials, queries and fragments of all URLs in it masked.

    >>> masked(["redis://me:secret@db:6379/0", 5])
    ['redis://***@db:6379/0', 5]
    """
    if isinstance(value, dict):
        return {name: masked(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    if isinstance(value, str):
        start = len(value) - len(value.lstrip())
        url = _URL.sub(lambda one: urls.mask(one[0], query=False, limit=2000), value[start:])
        return value[:start] + url
    return value
