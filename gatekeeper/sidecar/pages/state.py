"""What the sidecar shows its operators now: hosts, leases, who waits, and the whole at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from gatekeeper.clock import utc
from gatekeeper.fetching.records import Moment
from gatekeeper.pacing.rules import SHARED
from gatekeeper.pacing.scopes import INF
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.sidecar.pages.feeds import DecisionFeed, Series, retrievals
from gatekeeper.sidecar.pages.host_index import STATES, HostIndex, HostOrder, state_of
from gatekeeper.wire import HostBody, HostState

if TYPE_CHECKING:
    from gatekeeper.clock import Clock
    from gatekeeper.fetching.records import Record
    from gatekeeper.pacing.scopes import Scope
    from gatekeeper.sidecar.leases import ClientLease
    from gatekeeper.sidecar.service import Service
    from gatekeeper.sidecar.waiting import LeaseWaiter


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that a client holds, or a request that waits for one."""

    state: Literal["held", "waiting"]
    id: str | None
    """None for one that waits."""
    url: str
    host: str
    client: str
    user_agent: str | None
    since: datetime
    """When it was granted, or since when it is waited for."""
    age: float
    """Seconds since then."""
    expires_at: datetime | None
    """Of one that is held: when it ends by itself; of one that waits: when it gives up."""
    left: float
    """Seconds until then."""
    priority: int | None = None
    place: int | None = None
    """Of one that waits: its place among those who wait for the host, from 1, by their age."""
    expected_at: datetime | None = None
    """Of one that waits: about when it is its turn; None where only an event decides that."""


class _Listed(NamedTuple):
    """One of them, shown only if it is on the page."""

    host: str
    client: str
    view: Callable[[], LeaseView]


class Reloads(msgspec.Struct, frozen=True, kw_only=True):
    """How the configuration was last read."""

    ok: bool
    at: datetime
    needs_restart: tuple[str, ...]
    """Settings that were changed in the file, and are in force after a restart."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The whole at a glance. Counters run since the start, rates are of the latest ten seconds."""

    state: str
    """starting, serving, draining, closed; or why it is not ready."""
    ready: bool
    user_agent: str
    version: str
    started_at: datetime
    now: datetime
    decisions: dict[str, int]
    """By verdict."""
    rates: dict[str, float | None]
    """As the values of `/v1/series`; None until the first ten seconds are over."""
    robots: dict[str, int]
    """Retrievals of robots.txt, by what they came to."""
    robots_ok: int
    robots_failed: int
    waiting: int
    oldest_wait: float | None
    """Seconds."""
    leases: int
    overdue: int
    """Leases that are nearly over: more than nine tenths of their time passed unreported."""
    expired: int
    """Leases that ran out unreported since the start."""
    hosts: int
    host_states: dict[str, int]
    hosts_complete: bool
    """Every host was looked at; False: the look goes on."""
    cache_share: float | None
    """Share of decisions for which no robots.txt had to be fetched; None before the first."""
    fleet: dict[str, Any] | None
    """None where this process is alone."""
    reload: Reloads
    events: int
    """Decisions that `/v1/events` has told of since the start."""


class OperatorState:
    """What feeds the pages, made once for a service. `start` begins the last hour's series."""

    def __init__(self, service: Service, feed: DecisionFeed) -> None:
        self._service = service
        self.clock: Clock = service.clock
        self.started: float = self.clock.wall()
        self.feed = feed
        self._hosts: HostIndex | None = None
        self.series: Series = Series(service, self.clock, self._follow)
        self.streams: Counter[str] = Counter()
        """Streams of events that are open, by client."""
        self.told = 0
        """Events sent."""
        self._encoded: dict[int, bytes] = {}

    def start(self) -> None:
        """Begin to look at the counters every ten seconds. Idempotent."""
        self.series.start()
        self._follow()

    async def close(self) -> None:
        """End what goes on. Idempotent."""
        self.series.close()
        if self._hosts is not None:
            await self._hosts.close()

    def encoded(self, number: int, write: Callable[[], bytes]) -> bytes:
        """What `write` makes of the decision of that number, made once for all streams."""
        found = self._encoded.get(number)
        if found is None:
            if len(self._encoded) >= _ENCODED:
                self._encoded.clear()
            found = self._encoded[number] = write()
        return found

    def _follow(self) -> None:
        self.hosts.follow()

    @property
    def hosts(self) -> HostIndex:
        """The hosts in memory, in pages."""
        if self._hosts is None:
            scopes, changes = self._service.internals.watch_hosts()
            self._hosts = HostIndex(scopes, changes, self.clock, shared=SHARED)
        return self._hosts

    # --- hosts --------------------------------------------------------------------------

    def scope(self, host: str) -> Scope | None:
        """What is in memory of a host's clock."""
        return self._service.internals.watch_hosts()[0].get(host)

    def order(self, name: str) -> HostOrder | None:
        """What `sort` names; None for the host's own name."""
        if name == "host":
            return None
        if name == "waiting":
            waiting = self.waiting_by_host()
            return HostOrder(name, lambda scope, _now: waiting[scope.name])
        if name in ("allowed", "denied"):
            counts = self.feed.counts
            which = "allow" if name == "allowed" else "deny"
            return HostOrder(name, lambda scope, _now: getattr(counts(scope.name), which))
        if name == "status":
            last = self.feed.last_status
            return HostOrder(name, lambda scope, _now: (last(scope.name) or (0, 0.0))[0])
        return HostOrder(name, _KEYS[name])

    def waiting_by_host(self) -> Counter[str]:
        """How many requests wait for a lease of each host."""
        waiters = self._service.leases.waiters
        return Counter(waiter.host for waiter in waiters) if len(waiters) else Counter()

    def origins(self, host: str) -> list[str]:
        """Origins of a host of which something is known: https first."""
        shown = f"[{host}]" if ":" in host else host
        usual = [f"https://{shown}", f"http://{shown}"]
        found = [one for one in usual if self._service.internals.record(one) is not None]
        return list(dict.fromkeys((*found, *sorted(self.feed.counts(host).origins))))

    def record(self, host: str) -> Record | None:
        """The record that speaks for a host: that of https, or else of http, at the usual port,
        or else of another port."""
        recall = self._service.internals.record
        return next(filter(None, map(recall, self.origins(host))), None)

    # --- leases -------------------------------------------------------------------------

    def leases(self, state: str = "any") -> Iterator[_Listed]:
        """Who waits, the longest first; then the leases that are held, in the order in which they
        were granted. `state`: "waiting", "held" or "any"."""
        table = self._service.leases
        places: Counter[str] = Counter()
        if state != "held":
            for waiter in sorted(table.waiters, key=lambda one: one.since):
                places[waiter.host] += 1
                yield _Listed(
                    waiter.host, waiter.client, partial(self._waiting, waiter, places[waiter.host])
                )
        if state != "waiting":
            for held in table:
                yield _Listed(held.lease.host, held.client, partial(self._held, held))

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
            priority=waiter.priority,
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
        every = (scope, *scope.shared)
        if any(one.history is not None and one.history.paused for one in every):
            return None
        due = max(now, *(one.promised_at() for one in every))
        if due == INF:
            return None
        interval = max(one.interval for one in every)
        return utc(wall + due - now + (place - 1) * interval)

    # --- the whole ----------------------------------------------------------------------

    async def overview(self) -> Overview:
        """The whole at a glance."""
        service, now = self._service, self.clock.monotonic()
        stats = service.gate.stats()
        decisions: Counter[str] = Counter({"allow": 0, "deny": 0, "defer": 0})
        for (verdict, _), count in stats.decisions.items():
            decisions[verdict.value] += count
        total = sum(decisions.values())
        fetches = stats.directory.fetches
        states, complete = await self.hosts.states()
        held = list(service.leases)
        good, failed = retrievals(stats)
        metrics = service.metrics
        return Overview(
            state=service.phase if service.ready or service.phase != "serving" else service.unready,
            ready=service.ready,
            user_agent=service.gate.user_agent,
            version=service.version,
            started_at=utc(self.started),
            now=utc(self.clock.wall()),
            decisions=dict(decisions),
            rates=self.series.rates(),
            robots=stats.directory.outcomes,
            robots_ok=good,
            robots_failed=failed,
            waiting=len(service.leases.waiters),
            oldest_wait=max((now - one.since for one in service.leases.waiters), default=None),
            leases=len(held),
            overdue=sum(one.due - now < _NEARLY * one.ttl for one in held),
            expired=service.leases.ended["expired"],
            hosts=len(self.hosts),
            host_states=states,
            hosts_complete=complete,
            cache_share=max(0.0, 1.0 - fetches / total) if total else None,
            fleet=None if stats.fleet is None else msgspec.to_builtins(stats.fleet),
            reload=Reloads(
                ok=metrics.last_reload_ok,
                at=utc(metrics.last_reload_at),
                needs_restart=tuple(service.restart_required),
            ),
            events=self.told,
        )


_NEARLY: Final = 0.1
_ENCODED: Final = 1024


def _left(scope: Scope, now: float) -> float:
    """Seconds until the clocks and blocks of a host are over; 0 where they are."""
    due = max(one.promised_at() for one in (scope, *scope.shared))
    return max(0.0, due - now)


_KEYS: Final = {
    "next": _left,
    "interval": lambda scope, _now: scope.interval,
    "in_flight": lambda scope, _now: scope.in_flight,
    "state": lambda scope, now: STATES.index(state_of(scope, now)),
}


def host_body(
    state: OperatorState, host: str, clocks: tuple[ClockView, ...], *, waiting: int
) -> HostBody:
    """What is told of one host; `clocks` are those of `Gatekeeper.why`."""
    clock = state.clock
    wall = clock.wall()
    kinds = {one.kind for one in clocks}
    ends = [c.until for c in clocks if c.until is not None and c.until.timestamp() > wall]
    deciding = [c for c in clocks if c.kind == "interval" and c.decides and c.seconds is not None]
    longest = max(deciding, key=lambda one: one.seconds or 0.0, default=None)
    scope, record = state.scope(host), state.record(host)
    standing = None
    if record is not None:
        standing = record.standing(Moment(clock.monotonic(), wall))
    last, counts = state.feed.last_status(host), state.feed.counts(host)
    return HostBody(
        host=host,
        state=_state(kinds, waits=bool(ends)),
        next_at=max(ends) if ends else None,
        interval=longest.seconds if longest is not None else None,
        clocks=clocks,
        interval_source=longest.source if longest is not None else None,
        in_flight=scope.in_flight if scope is not None else 0,
        waiting=waiting,
        robots=standing.state.value if standing is not None else None,
        robots_status=standing.status if standing is not None else None,
        robots_fetched_at=utc(standing.fetched_at) if standing is not None else None,
        robots_expires_at=utc(standing.expires_at) if standing is not None else None,
        last_status=last[0] if last is not None else None,
        last_status_at=utc(last[1]) if last is not None else None,
        allowed=counts.allow,
        denied=counts.deny,
        deferred=counts.defer,
    )


def _state(kinds: set[str], *, waits: bool) -> HostState:
    if "pause" in kinds:
        return "paused"
    if "block" in kinds:
        return "blocked"
    if "in_flight" in kinds:
        return "busy"
    return "waiting" if waits else "free"
