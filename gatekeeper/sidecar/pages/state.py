"""The current state of the sidecar for operators: hosts, leases and waiters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from typing import Any, Literal

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import FleetHold, FleetScope, HostBody
from gatekeeper.clock import Clock, UtcTime, utc
from gatekeeper.fetching.records import Record
from gatekeeper.gate import Gatekeeper
from gatekeeper.pacing.host_settings import SHARED_PREFIXES
from gatekeeper.pacing.ledger import ScopeView
from gatekeeper.pacing.scopes import INF, Scope
from gatekeeper.pacing.waiters import HELD_UP, STATES, HostHoldups
from gatekeeper.sidecar.held_leases import ClientLease, LeaseTable
from gatekeeper.sidecar.lease_requests import LeaseWaiter
from gatekeeper.sidecar.metrics import Metrics
from gatekeeper.sidecar.pages.host_index import MAX_NAMED, HostIndex, HostOrder, HostStates
from gatekeeper.sidecar.pages.recent_decisions import DecisionFeed, Series


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that a client holds, or a request that waits for one."""

    state: Literal["held", "waiting"]
    id: str | None
    """The id of the lease; None for a waiting request."""
    url: str
    host: str
    client: str
    user_agent: str | None
    since: UtcTime
    """When the lease was granted, or when the request started to wait."""
    age: float
    """Seconds since then."""
    expires_at: UtcTime | None
    """When a held lease ends by itself, or when a waiting request gives up."""
    left: float
    """Seconds until then."""
    priority: int | None = None
    place: int | None = None
    """The position of a waiting request among those for its host, by age, counting from 1."""
    expected_at: UtcTime | None = None
    """When a waiting request can expect its lease; None if that depends on an event."""


_LeaseEntry = tuple[str, str, Callable[[], LeaseView]]
"""The host and the client of a lease or a waiting request, and what makes its view."""


class Reloads(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last reload of the configuration."""

    ok: bool
    at: UtcTime
    needs_restart: tuple[str, ...]
    """Settings that were changed in the file and take effect after a restart."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The overview. Counters run since the start; rates are of the latest ten seconds."""

    state: str
    """starting, serving, draining or closed, or why the service is not ready."""
    ready: bool
    user_agent: str
    version: str
    started_at: UtcTime
    now: UtcTime
    decisions: dict[str, int]
    """Decisions by verdict."""
    rates: dict[str, float | None]
    """The values of the latest step of `/v1/series`; None during the first ten seconds."""
    robots: dict[str, int]
    """robots.txt retrievals by outcome."""
    robots_ok: int
    robots_failed: int
    waiting: int
    oldest_wait: float | None
    """Seconds that the oldest waiting request has waited; None if there is none."""
    oldest_wait_host: str | None
    """The host that it waits for."""
    leases: int
    overdue: int
    """Leases that are nearly over: nine tenths of their time have passed without a report."""
    expired: int
    """Leases that expired without a report since the start."""
    hosts: int
    host_states: dict[str, int]
    hosts_complete: bool
    """True if all hosts were scanned for `host_states`; False: the scan goes on."""
    held_up: list[HostBody]
    """Up to five hosts that are blocked, paused or deferred, some of each state. Of a state, those
    with the most waiting requests come first."""
    cache_share: float | None
    """Share of decisions for which no robots.txt had to be fetched; None before the first."""
    fleet: dict[str, Any] | None
    """None if this process is not in a fleet."""
    reload: Reloads
    events: int
    """Decisions sent over `/v1/events` since the start."""


class OperatorState:
    """The data of the pages, made once for a service. `start` begins to sample the series."""

    def __init__(
        self,
        gate: Gatekeeper,
        clock: Clock,
        leases: LeaseTable,
        metrics: Metrics,
        feed: DecisionFeed,
    ) -> None:
        self._parts = gate.parts
        self._leases = leases
        self.clock = clock
        self.started: float = self.clock.wall()
        self.feed = feed
        self.series: Series = Series(gate, leases, metrics.queue_wait, clock, self._follow)
        self.streams: Counter[str] = Counter()
        """Open streams of events by client."""
        self.events_sent = 0
        """Events sent."""

    def start(self) -> None:
        """Start to sample the counters every ten seconds. Idempotent."""
        self.series.start()
        self._follow()

    async def close(self) -> None:
        """Stop the timer and the background tasks. Idempotent."""
        self.series.close()
        if "hosts" in vars(self):
            await self.hosts.close()

    def _follow(self) -> None:
        self.hosts.follow()

    # --- hosts --------------------------------------------------------------------------

    @cached_property
    def hosts(self) -> HostIndex:
        """The index of the hosts in memory. A worker process has none."""
        scopes, changes = self._parts.scheduler.watch()
        return HostIndex(scopes, changes, self.clock, self.holdups.state, shared=SHARED_PREFIXES)

    @property
    def holdups(self) -> HostHoldups:
        """What keeps each host from being asked."""
        return self._parts.scheduler.holdups

    def scope(self, host: str) -> Scope | None:
        """Return the scope of a host, or None if it is not in memory."""
        return self._parts.scheduler.watch()[0].get(host)

    def order(self, name: str) -> HostOrder | None:
        """Return the sort order with a name; None for "host", the order by name."""
        if name == "host":
            return None
        counts, last, waiting = self.feed.counts, self.feed.last_status, self.waiting_by_host()
        keys: dict[str, Callable[[Scope, float], float]] = {
            "state": lambda scope, now: STATES.index(self.holdups.state(scope, now)),
            "next": lambda scope, now: self.holdups.due(scope, now) - now,
            "interval": lambda scope, _now: scope.interval,
            "in_flight": lambda scope, _now: scope.in_flight,
            "waiting": lambda scope, _now: waiting[scope.name],
            "held_up": lambda scope, now: self._urgency(scope, now) + waiting[scope.name],
            "status": lambda scope, _now: (last(scope.name) or (0, 0.0))[0],
            "allowed": lambda scope, _now: counts(scope.name).allow,
            "denied": lambda scope, _now: counts(scope.name).deny,
        }
        return HostOrder(name, keys[name])

    def _urgency(self, scope: Scope, now: float) -> float:
        """Return a number that is greater for a state that operators see first, and that no number
        of waiting requests reaches."""
        state = self.holdups.state(scope, now)
        return 1e9 * (len(HELD_UP) - HELD_UP.index(state)) if state in HELD_UP else 0.0

    async def states(self) -> tuple[HostStates, list[HostBody]]:
        """Count the hosts by state, and describe up to five that are held up: one of each state,
        then a second one of each."""
        waiting = self.waiting_by_host()
        found = await self.hosts.states(lambda scope: -waiting[scope.name])
        names = chain.from_iterable(zip_longest(*found.held_up.values()))
        every = (host_body(self, name, waiting=waiting[name]) for name in names if name)
        shown = islice((one for one in every if one.state in HELD_UP), MAX_NAMED)
        return found, sorted(shown, key=lambda one: HELD_UP.index(one.state))

    def waiting_by_host(self) -> Counter[str]:
        """Return the number of requests that wait for a lease of each host."""
        return Counter(waiter.host for waiter in self._leases.waiters)

    def origins(self, host: str) -> list[str]:
        """Return the known origins of a host, https first."""
        usual = filter(self._parts.directory.recall, urls.usual_origins(host))
        return list(dict.fromkeys((*usual, *sorted(self.feed.counts(host).origins))))

    def record(self, host: str) -> Record | None:
        """Return the record that represents a host, or None if no record is known.

        It is the record of https at the default port, else of http, else of another port.
        """
        recall = self._parts.directory.recall
        return next(filter(None, map(recall, self.origins(host))), None)

    # --- leases -------------------------------------------------------------------------

    def leases(self, state: str = "any") -> Iterator[_LeaseEntry]:
        """Yield the waiting requests, oldest first, then the held leases, in the order of granting.

        `state`: "waiting", "held" or "any".
        """
        table = self._leases
        places: Counter[str] = Counter()
        if state != "held":
            for waiter in sorted(table.waiters, key=lambda one: one.since):
                places[waiter.host] += 1
                view = partial(self._waiting, waiter, places[waiter.host])
                yield waiter.host, waiter.client, view
        if state != "waiting":
            for held in table:
                yield held.lease.host, held.client, partial(self._held, held)

    def _waiting(self, waiter: LeaseWaiter, place: int) -> LeaseView:
        now, wall = self.clock.monotonic(), self.clock.wall()
        gives_up = waiter.since + waiter.wanted.wait - now
        return LeaseView(
            state="waiting",
            id=None,
            url=waiter.wanted.url,
            host=waiter.host,
            client=waiter.client,
            user_agent=waiter.wanted.user_agent,
            since=utc(wall - (now - waiter.since)),
            age=now - waiter.since,
            expires_at=utc(wall + gives_up),
            left=gives_up,
            priority=waiter.wanted.priority,
            place=place,
            expected_at=self._expected(waiter.host, place, now, wall),
        )

    def _held(self, held: ClientLease) -> LeaseView:
        return LeaseView(
            state="held",
            id=held.id,
            url=held.lease.url,
            host=held.lease.host,
            client=held.client,
            user_agent=held.user_agent,
            since=held.granted_at,
            age=self.clock.wall() - held.granted_at.timestamp(),
            expires_at=held.expires_at,
            left=held.due - self.clock.monotonic(),
        )

    def _expected(self, host: str, place: int, now: float, wall: float) -> datetime | None:
        scope = self.scope(host)
        if scope is None:
            return None
        if (due := self.holdups.due(scope, now)) == INF:
            return None
        interval = max(one.interval for one in (scope, *scope.shared))
        return utc(wall + due - now + (place - 1) * interval)


def host_body(
    state: OperatorState, host: str, *, waiting: int, fleet: Sequence[ScopeView] = ()
) -> HostBody:
    """Return the description of one host. `fleet`: what the fleet's store knows of it."""
    clock = state.clock
    now, wall = clock.monotonic(), clock.wall()
    status = state.holdups.status(host, fleet=fleet)
    clocks, due = status.clocks, status.due
    deciding = [c for c in clocks if c.kind == "interval" and c.decides and c.seconds is not None]
    longest = max(deciding, key=lambda one: one.seconds or 0.0, default=None)
    scope, record = state.scope(host), state.record(host)
    file: dict[str, Any] = {}
    if record is not None:
        standing = record.standing(clock)
        file = {
            "robots": standing.state.value,
            "robots_status": standing.status,
            "robots_fetched_at": utc(standing.fetched_at),
            "robots_expires_at": utc(standing.expires_at),
        }
    counts = state.feed.counts(host)
    last_status, last_at = state.feed.last_status(host) or (None, None)
    return HostBody(
        host=host,
        state=status.state,
        next_at=None if due is None else utc(wall + due - now),
        interval=longest.seconds if longest is not None else None,
        clocks=clocks,
        interval_source=longest.source if longest is not None else None,
        why=status.why,
        in_flight=scope.in_flight if scope is not None else 0,
        waiting=waiting,
        **file,
        last_status=last_status,
        last_status_at=None if last_at is None else utc(last_at),
        allowed=counts.allow,
        denied=counts.deny,
        deferred=counts.defer,
        fleet=tuple(_fleet_scope(view, wall) for view in fleet) or None,
    )


def _fleet_scope(view: ScopeView, wall: float) -> FleetScope:
    """Describe what the fleet's store knows about a scope. `wall`: the current wall time."""
    clock = view.clock
    return FleetScope(
        scope=clock.scope,
        last_at=None if clock.age is None else utc(wall - clock.age),
        blocked_until=utc(wall + clock.blocked) if clock.blocked else None,
        block_reason=clock.reason,
        paused=clock.paused,
        holds=tuple(
            FleetHold(
                member=hold.owner,
                since=utc(wall - hold.age),
                until=utc(wall + hold.seconds),
                headed=hold.headed,
            )
            for hold in view.holds
        ),
        waiting=view.waiting,
        day_pages=clock.pages,
        day_bytes=clock.bytes,
    )
