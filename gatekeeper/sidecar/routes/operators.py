"""What feeds the pages for operators: `/v1/overview`, `/v1/leases`, `/v1/decisions/{id}`,
`/v1/events`, `/v1/series` and `/v1/config`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from aiohttp import web

from gatekeeper.clock import utc
from gatekeeper.config import values_of
from gatekeeper.decision import Decision
from gatekeeper.sidecar.exchange import (
    Call,
    Nothing,
    PageQuery,
    Problem,
    Role,
    Route,
    json_response,
    read_body,
    read_query,
)
from gatekeeper.sidecar.pages.feeds import GivenDecision, SeriesBody
from gatekeeper.sidecar.pages.state import LeaseView, Overview
from gatekeeper.sidecar.reload import needs_restart
from gatekeeper.sidecar.waiting import full

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

TICK: Final = 0.1
"""Seconds between two looks of a stream at the decisions."""
MOST: Final = 250
"""Decisions that a stream tells in one look; what is more is counted as dropped."""
_SEARCHED: Final = 1000
"""Decisions that a stream with a filter looks at each time."""
_SILENCE: Final = 10.0
"""Seconds after which a stream that has nothing to tell says that it is there."""
RETRY: Final = 2.0
"""Seconds after which a browser asks again for a stream that broke off."""
_ASKED_AGAIN: Final = 10.0
"""Seconds after which a stream looks whether its client may still listen."""
_PREFIX: Final = secrets.token_hex(4)
"""Stands before the number in the id of an event: those of an earlier process mean nothing."""


# --- the whole, leases ------------------------------------------------------------------------


async def overview(service: Service, call: Call) -> web.StreamResponse:
    """State, rates, leases, hosts held up, and how the configuration was last read."""
    return json_response(await service.operators.overview())


class LeaseQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `GET /v1/leases` asks."""

    state: Literal["any", "held", "waiting"] = "any"
    client: Annotated[str, msgspec.Meta(max_length=253)] | None = None
    """The whole name of a client."""
    host: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """Part of the host's name."""


class LeaseList(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits, the longest first; then the leases that are held, the oldest first."""

    leases: list[LeaseView]
    total: int
    """How many the filter leaves."""
    page: int
    pages: int
    held: int
    """All leases that are held ..."""
    waiting: int
    """... and all requests that wait for one."""


async def list_leases(service: Service, call: Call) -> web.StreamResponse:
    """A page of the leases that clients hold, and of the requests that wait for one."""
    return json_response(lease_list(service, read_query(call.query, LeaseQuery)))


def lease_list(service: Service, query: LeaseQuery) -> LeaseList:
    """A page of them: each passes by once, those on the page are kept."""
    total, first = 0, query.first
    shown: list[LeaseView] = []
    host = query.host.lower()
    for found in service.operators.leases(query.state):
        if host not in found.host or (query.client is not None and found.client != query.client):
            continue
        if first <= total < first + query.per_page:
            shown.append(found.view())
        total += 1
    return LeaseList(
        leases=shown,
        total=total,
        page=query.page,
        pages=query.pages(total),
        held=len(service.leases),
        waiting=len(service.leases.waiters),
    )


async def drop_lease(service: Service, call: Call) -> web.StreamResponse:
    """Take a lease away from a client that is thought to be gone; it counts as used."""
    await read_body(call.request, Nothing, limit=service.config.server.max_body)
    service.leases.drop(call.params["id"])
    return web.Response(status=204)


# --- decisions --------------------------------------------------------------------------------


class PastDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One of the latest decisions, and who asked when."""

    time: datetime
    client: str
    request: str
    """The id of the request, as in the log."""
    decision: Decision


async def past_decision(service: Service, call: Call) -> web.StreamResponse:
    """One of the latest decisions, by the id that it was given with."""
    found = service.operators.feed.find(call.params["id"])
    if found is None:
        raise Problem(404, "not-found", "no such decision among the latest; the log has older ones")
    return json_response(
        PastDecision(
            time=utc(found.at), client=found.client, request=found.request, decision=found.decision
        )
    )


class EventQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which decisions `GET /v1/events` tells of."""

    verdict: Literal["any", "allow", "deny", "defer"] = "any"
    host: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """Part of the origin."""
    client: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The whole name of the client; empty: any."""
    reason: Annotated[str, msgspec.Meta(max_length=40)] = ""
    """The whole word; empty: any."""
    latest: Annotated[int, msgspec.Meta(ge=0, le=200)] = 0
    """Begin with so many of those that were given before."""
    last_event_id: Annotated[str, msgspec.Meta(max_length=40)] = ""
    """As the header Last-Event-ID, which wins: go on behind that event."""

    @property
    def narrow(self) -> bool:
        """Some decisions are not wanted."""
        return self.verdict != "any" or bool(self.host or self.client or self.reason)

    def wants(self, given: GivenDecision) -> bool:
        """Whether it is one of those that are asked for."""
        decision = given.decision
        return (
            self.verdict in ("any", decision.verdict.value)
            and self.host in decision.origin
            and (not self.client or given.client == self.client)
            and (not self.reason or decision.reason.value == self.reason)
        )


class DecisionEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data of one event of the kind `decision`."""

    id: str
    time: datetime
    client: str
    request: str
    verdict: str
    reason: str
    url: str
    origin: str
    user_agent: str
    line: int | None = None
    """Of the rule that decided."""
    rule: str | None = None
    retry_at: datetime | None = None


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event of the kind `dropped`: decisions that were not told of."""

    now: int
    total: int
    """Since the stream was opened."""


async def stream_events(service: Service, call: Call) -> web.StreamResponse:
    """Tell of decisions until the client leaves or the service drains.

    A client that reads too slowly, or asks for more than `MOST` each `TICK`, is told how many it
    missed.
    """
    query = read_query(call.query, EventQuery)
    request = call.request
    last = request.headers.get("Last-Event-ID", query.last_event_id)
    stream = _EventStream(service, query, last)
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # nginx would keep events back
            "X-Content-Type-Options": "nosniff",
            "X-Request-Id": call.id,
            "Server": "gatekeeper",
        }
    )
    with _counted(service, call.client), service.streams, contextlib.suppress(ConnectionError):
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await response.write(stream.opening())
        look_again = service.clock.monotonic() + _ASKED_AGAIN
        while service.phase == "serving":
            if (now := service.clock.monotonic()) >= look_again:
                look_again = now + _ASKED_AGAIN
                if not _permitted(service, call):
                    break
            transport = request.transport
            if transport is None or transport.is_closing():
                break
            if text := stream.look():
                await response.write(text)
            await service.clock.sleep(TICK)
        await response.write(b"event: bye\ndata: {}\n\n")
    return response


@contextlib.contextmanager
def _counted(service: Service, client: str) -> Iterator[None]:
    """One more stream of the client; Problem 503 or 429 where all may have, or it has, as many as
    there may be (T15)."""
    streams, server = service.operators.streams, service.config.server
    most = (server.max_streams + 1) // 2 if server.client_streams is None else server.client_streams
    if streams[client] >= most:
        service.clients.refused["streams"] += 1
        raise Problem(
            429,
            "too-many-streams",
            f"{most} streams of events are open to one client (server.client_streams): close a "
            "page that has one, or ask again in 5 seconds",
            headers={"Retry-After": "5"},
            most=most,
        )
    if streams.total() >= server.max_streams:
        raise full("streams of events are open already (server.max_streams)", server.max_streams)
    streams[client] += 1
    try:
        yield
    finally:
        streams[client] -= 1
        if not streams[client]:
            del streams[client]


def _permitted(service: Service, call: Call) -> bool:
    """Whether the token is still one, and has the role: a reload may have taken it away (T17)."""
    if call.permitted is not None:
        return call.permitted()
    try:
        service.admission.admit(call.request, frozenset({Role.ADMIN}))
    except Problem:
        return False
    return True


class _EventStream:
    """One client's place among the decisions, and what it was not told."""

    def __init__(self, service: Service, query: EventQuery, last: str) -> None:
        self._state = service.operators
        self._feed = service.operators.feed
        self._clock = service.clock
        self._query = query
        self._dropped = 0
        self._said_at = 0.0
        self._looked_at = service.clock.monotonic()
        self.restarted = False
        """What the client saw last was told by an earlier process."""
        prefix, _, number = last.partition("-")
        count = self._feed.count
        self._cursor = count
        if last and prefix == _PREFIX and number.isdecimal() and int(number) <= count:
            self._cursor = int(number)
        elif last:
            self.restarted = True
        elif query.latest:
            wanted = (one for one in reversed(self._feed.since(0)) if query.wants(one))
            earlier = list(islice(wanted, query.latest))
            self._cursor = earlier[-1].number - 1 if earlier else count

    def opening(self) -> bytes:
        """The first event: where the stream begins."""
        self._said_at = self._clock.monotonic()
        started = msgspec.json.encode({"restarted": self.restarted})
        return b"retry: %d\nid: %s-%d\nevent: hello\ndata: %b\n\n" % (
            *(RETRY * 1000, _PREFIX.encode(), self._cursor),
            started,
        )

    def look(self) -> bytes:
        """What is to be sent now; empty: nothing."""
        feed, query = self._feed, self._query
        before, count, now = self._cursor, feed.count, self._clock.monotonic()
        # Where the loop is busy the looks are further apart: each may tell up to four times more.
        most = int(MOST * min(max(1.0, (now - self._looked_at) / TICK), 4.0))
        self._looked_at = now
        parts: list[bytes] = []
        if count > before:
            self._cursor = count
            seen = feed.since(before, _SEARCHED if query.narrow else most)
            seen = [one for one in seen if one.number <= count]
            wanted = [one for one in seen if query.wants(one)] if query.narrow else seen
            missed = count - before - len(seen) + max(0, len(wanted) - most)
            if missed > 0:
                self._dropped += missed
                told = msgspec.json.encode(Dropped(now=missed, total=self._dropped))
                parts.append(b"event: dropped\ndata: %b\n\n" % told)
            parts += map(self._event, wanted[-most:])
            self._state.told += len(wanted[-most:])
        if parts:
            self._said_at = now
        elif now - self._said_at >= _SILENCE:
            self._said_at = now
            parts.append(b"id: %s-%d\nevent: beat\ndata: {}\n\n" % (_PREFIX.encode(), self._cursor))
        return b"".join(parts)

    def _event(self, given: GivenDecision) -> bytes:
        return self._state.encoded(given.number, lambda: _written(given))


def _written(given: GivenDecision) -> bytes:
    """One event, as it is sent to everybody who wants it."""
    decision = given.decision
    rule = decision.rule
    data = msgspec.json.encode(
        DecisionEvent(
            id=decision.id,
            time=utc(given.at),
            client=given.client,
            request=given.request,
            verdict=decision.verdict,
            reason=decision.reason,
            url=decision.url[:2048],
            origin=decision.origin,
            user_agent=decision.user_agent,
            line=rule.line if rule is not None else None,
            rule=rule.text[:200] if rule is not None else None,
            retry_at=decision.retry_at,
        )
    )
    return b"id: %s-%d\nevent: decision\ndata: %b\n\n" % (_PREFIX.encode(), given.number, data)


async def series(service: Service, call: Call) -> web.StreamResponse:
    """The last hour in numbers, one point each ten seconds."""
    return json_response(service.operators.series.body())


# --- the configuration ------------------------------------------------------------------------


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """One setting in force."""

    name: str
    value: Any
    """Secrets are masked."""
    source: str
    """default, or the file, the environment's variable or the flag that it came from."""
    needs_restart: bool
    """A change of it is in force after a restart only."""
    pending: bool = False
    """It was changed in the file, and waits for a restart."""


class ConfigBody(msgspec.Struct, frozen=True):
    """Every setting in force, in the order of the sections."""

    settings: list[SettingView]


async def config(service: Service, call: Call) -> web.StreamResponse:
    """The configuration in force, and where each value of it came from."""
    return json_response(config_body(service))


def config_body(service: Service) -> ConfigBody:
    """Every setting in force, in the order of the sections."""
    return ConfigBody(list(_settings(service)))


def _settings(service: Service) -> Iterator[SettingView]:
    for name, value in values_of(service.config):
        yield SettingView(
            name=name,
            value=masked(msgspec.to_builtins(value)),
            source=service.sources.get(name, "default"),
            needs_restart=needs_restart(name),
            pending=name in service.restart_required,
        )


def masked(value: Any) -> Any:
    """The value with the user and password of each URL in it covered.

    >>> masked(["redis://me:secret@db:6379/0", 5])
    ['redis://***@db:6379/0', 5]
    """
    if isinstance(value, dict):
        return {name: masked(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    if isinstance(value, str) and "://" in value:
        scheme, _, rest = value.partition("://")
        authority, slash, path = rest.partition("/")
        if "@" in path.partition("?")[0] and ":" in authority:
            authority, path = "***@", path.rpartition("@")[2]  # a password with a slash in it
        path = path.partition("?")[0] + ("?***" if "?" in path else "")
        if "@" in authority:
            authority = "***@" + authority.rpartition("@")[2]
        return f"{scheme}://{authority}{slash}{path}"
    return value


ROUTES = (
    Route(
        "GET",
        "/v1/overview",
        overview,
        "The whole at a glance.",
        operation="getOverview",
        answers={200: Overview},
    ),
    Route(
        "GET",
        "/v1/leases",
        list_leases,
        "Leases that are held, and who waits for one.",
        operation="listLeases",
        query=LeaseQuery,
        answers={200: LeaseList},
    ),
    Route(
        "POST",
        "/v1/leases/{id}/drop",
        drop_lease,
        "Take a lease away; it counts as used.",
        operation="dropLease",
        body=Nothing,
        answers={204: None},
        problems=(404, 503),
    ),
    Route(
        "GET",
        "/v1/decisions/{id}",
        past_decision,
        "One of the latest decisions.",
        operation="getDecision",
        answers={200: PastDecision},
        problems=(404,),
    ),
    Route(
        "GET",
        "/v1/events",
        stream_events,
        "Decisions as they are given, as server-sent events.",
        operation="streamDecisions",
        query=EventQuery,
        answers={200: "text/event-stream"},
        events={"decision": DecisionEvent, "dropped": Dropped},
        problems=(429, 503),
    ),
    Route(
        "GET",
        "/v1/series",
        series,
        "The last hour in numbers.",
        operation="getSeries",
        answers={200: SeriesBody},
    ),
    Route(
        "GET",
        "/v1/config",
        config,
        "The configuration in force, and where it came from.",
        operation="getConfiguration",
        answers={200: ConfigBody},
    ),
)
