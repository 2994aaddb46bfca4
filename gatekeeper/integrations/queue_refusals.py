"""`queue_gate`: a gate for a `PoliteQueue` that returns refused URLs instead of dropping them.

`PoliteQueue` drops denied URLs and waits for deferred ones. A crawler that has to report the result
of each request passes its gate through `queue_gate`. The queue then returns a `RefusedLease` in
place of a lease for URLs that are denied, or deferred for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime
from math import inf
from typing import Any, Final

from cachetools import LRUCache, TTLCache
from msgspec.structs import replace

from gatekeeper import urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.clock import Clock, utc
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import Denied, LeaseTimeout, SidecarError
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.lease_base import note_refusal

MAX_WAIT: Final = 600.0
"""Default of the maximum number of seconds to wait for a deferred request."""
_MAX_GIVEN_UP: Final = 20_000
"""Maximum number of origins and hosts whose deferral is remembered as too long."""
_MAX_DEFERRING: Final = 100_000
"""Maximum number of deferring origins whose time is kept."""


class RefusedLease:
    """Takes the place of a lease for a refused URL. The crawler's middleware then rejects the
    request, so that its error handler is called."""

    def __init__(self, why: Decision | str, clock: Clock) -> None:
        self.why = why
        """The decision, or a text for a host that can't be requested within the maximum wait."""
        self.expires_at: datetime = utc(clock.wall() + 3600.0)
        self.data: Any = None

    def enter(self) -> None:
        """Do nothing, since nothing is held."""

    leave = enter
    give_back = enter


SIDECAR = ""
"""The key of the sidecar among the origins that defer; not a valid origin."""


class Refusals:
    """The part of the gate that a queue uses, with refusals returned as leases.

    A deferred request waits until `max_wait` seconds after the first deferral of its origin. A
    lease, a denial or a pause by the operator restarts that time. An unreachable sidecar counts as
    one deferral of all origins.
    """

    def __init__(self, clock: Clock, max_wait: float) -> None:
        self.clock = clock
        self._max_wait = max_wait
        # Requests that wait for an origin ask again sooner than it is forgotten.
        self._deferring = TTLCache[str, float](_MAX_DEFERRING, 2 * max_wait, clock.monotonic)
        """For each origin, since when it has been deferring requests without interruption."""

    def refusal(self, decision: Decision | None) -> RefusedLease | None:
        """Return a refusal for a denial or a deferral that exceeds the maximum wait, else None."""
        if decision is None or decision.verdict is Verdict.ALLOW:
            return None
        paused = decision.reason is Reason.HOST_PAUSED
        if paused or decision.verdict is Verdict.DENY:
            self._deferring.pop(decision.origin, None)
            # A paused host is waited for until the operator resumes it.
            return None if paused else RefusedLease(decision, self.clock)
        until, left = decision.retry_at, inf
        if until is not None:
            left = max(0.0, until.timestamp() - self.clock.wall())
        by_sidecar = decision.reason is Reason.GATE_UNREACHABLE
        return self._unless_soon(SIDECAR if by_sidecar else decision.origin, left, decision)

    def _unless_soon(self, who: str, left: float, why: Decision | str) -> RefusedLease | None:
        """Return a refusal if a deferral that ends in `left` seconds exceeds the maximum wait."""
        if who != SIDECAR:
            self._deferring.pop(SIDECAR, None)
        now = self.clock.monotonic()
        since = self._deferring[who] = self._deferring.get(who, now)
        late = left + now - since > self._max_wait
        return RefusedLease(why, self.clock) if late else None

    def _granted(self, lease: Any) -> Any:
        """Return the lease, after noting that its origin does not defer any more."""
        self._deferring.pop(SIDECAR, None)
        # A robots.txt may always be requested, even if retrieving it has failed.
        if lease.decision.reason is not Reason.ROBOTS_FILE:
            self._deferring.pop(lease.decision.origin, None)
        return lease

    def too_late(self, origin: str, until: float, why: str) -> RefusedLease | None:
        """Return a refusal if a host is not due before `until` (wall clock), too late."""
        if until - self.clock.wall() <= self._max_wait:
            return None
        text = f"{origin} may not be asked before {utc(until):%Y-%m-%dT%H:%M:%SZ}: {why}"
        return RefusedLease(text, self.clock)

    async def _or_refusal(self, url: str, asking: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._granted(await asking)
        except (Denied, LeaseTimeout, SidecarError) as error:
            if isinstance(error, Denied):
                found = self.refusal(error.decision)
            elif isinstance(error, SidecarError):  # a wrong token, say, which may be corrected
                found = self._unless_soon(SIDECAR, 0.0, str(error))
            else:
                # The origin's deferral may go on: the lease may have waited for its robots.txt.
                self._deferring.pop(SIDECAR, None)
                found = self._late(url, error)
            if found is None:
                raise
            return found

    _late: Callable[[str, LeaseTimeout], RefusedLease | None]
    """Returns a refusal for a lease that was not granted in time, if its host is blocked for longer
    than the maximum wait."""


class LocalRefusals(Refusals):
    """`Refusals` for a gate in this process."""

    def __init__(self, gate: Gatekeeper, max_wait: float) -> None:
        self._gate = gate
        self._scheduler = gate.parts.scheduler
        self.held: Callable[[str], tuple[float, str] | None] = self._scheduler.held
        self.peek: Callable[..., Decision | None] = gate.peek
        super().__init__(gate.parts.clock, max_wait)
        self._given_up: LRUCache[str, Decision] = LRUCache(_MAX_GIVEN_UP)
        """Decisions for origins that defer for too long, by origin and by host."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Return the decision, with a deferral that exceeds the maximum wait as a denial."""
        decision = await self._gate.check(url, user_agent=user_agent)
        if decision.verdict is not Verdict.DEFER or self.refusal(decision) is None:
            return decision
        self._given_up[decision.origin] = self._given_up[urls.parse(url).host] = decision
        return replace(decision, verdict=Verdict.DENY)  # the queue would wait for a deferral

    def acquire_nowait(self, url: str) -> Any:
        """Return a lease or a refusal if that is possible without waiting, else None."""
        lease = self._gate.parts.leases.acquire_nowait(url, None)
        if lease is not None:
            return self._granted(lease)
        target = urls.parse(url)
        decider = self._gate.parts.decider
        if decider.robots_file(url, target, decider.agent) is None:
            decision = self._gate.peek(url)
            found = self._gave_up(target.origin) or self.refusal(decision)
            if found is not None:
                if decision is not None and decision.verdict is not Verdict.ALLOW:
                    note_refusal(self._gate, decision)
                return found
        return self._blocked(target)

    def _gave_up(self, whose: str) -> RefusedLease | None:
        """Return a refusal if an origin, or any origin of a host, still defers for too long."""
        decision = self._given_up.get(whose)
        until = None if decision is None else decision.retry_at
        passed = until is not None and until.timestamp() <= self.clock.wall()
        return None if passed else self.refusal(decision)  # once passed, the origin is asked again

    def _blocked(self, target: urls.Target) -> RefusedLease | None:
        held = self.held(target.host)
        if held is None or held[0] == inf:  # inf: paused until the operator resumes the host
            return None
        return self.too_late(target.origin, self.clock.wall() + held[0], held[1])

    async def acquire(self, url: str, *, timeout: float, **options: Any) -> Any:
        """Wait for a lease or a refusal."""
        seconds = min(timeout, self._max_wait)
        return await self._or_refusal(url, self._gate.acquire(url, timeout=seconds, **options))

    def _late(self, url: str, error: LeaseTimeout) -> RefusedLease | None:
        del error
        return self._blocked(urls.parse(url))

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call `callback` when the host is due or is known to exceed the maximum wait. Return a
        function that cancels the callback."""
        if self._gave_up(host) is not None:
            callback()
            return lambda: None
        return self._scheduler.when_due(host, callback, priority=priority, longest=self._max_wait)


class RemoteRefusals(Refusals):
    """`Refusals` for a sidecar's client."""

    at_a_glance = False

    def __init__(self, gate: RemoteGatekeeper, max_wait: float) -> None:
        super().__init__(gate.clock, max_wait)
        self._gate = gate

    async def acquire_if_due(self, url: str, **options: Any) -> Any:
        """Return a lease if it can be granted now, or a refusal."""
        return await self._or_refusal(url, self._gate.acquire_if_due(url, **options))

    async def acquire(self, url: str, **options: Any) -> Any:
        """Wait for a lease or a refusal."""
        return await self._or_refusal(url, self._gate.acquire(url, **options))

    def _late(self, url: str, error: LeaseTimeout) -> RefusedLease | None:
        if error.retry_at is None:
            return None
        origin = urls.parse(url).origin
        return self.too_late(origin, error.retry_at.timestamp(), "its host is not due until then")


def queue_gate(
    gate: Gatekeeper | RemoteGatekeeper, max_wait: float
) -> LocalRefusals | RemoteRefusals:
    """Return a gate for a `PoliteQueue` that returns refusals as leases.

    `max_wait`: maximum number of seconds to wait for a deferred URL or a blocked host; requests
    that would wait longer are refused.
    """
    if isinstance(gate, Gatekeeper):
        return LocalRefusals(gate, max_wait)
    return RemoteRefusals(gate, max_wait)
