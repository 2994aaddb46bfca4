"""A `PoliteQueue` that says what became of each URL: its gate gives refusals out as turns.

`PoliteQueue` drops what is denied and waits out what is deferred. A crawler that has to say what
became of each request wraps its gate by `queue_gate`: the queue then gives out a `RefusedTurn` in
the place of a lease for what is denied, and for what nobody would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime
from math import inf
from typing import Any, Final

from cachetools import LRUCache
from msgspec.structs import replace

from gatekeeper import urls
from gatekeeper.clock import Clock, utc
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import Denied, LeaseTimeout, SidecarError
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.remote.client import RemoteGatekeeper
from gatekeeper.split_dict import SplitDict

MAX_WAIT: Final = 600.0
"""Seconds for which a deferred request is waited for, unless the crawler says otherwise."""
_MOST_GIVEN_UP: Final = 20_000


class Deferrals:
    """For how long each origin has been deferring without a break.

    An origin is remembered until twice to four times `longest` seconds after it was asked last:
    whoever waits for it asks again sooner.
    """

    def __init__(self, clock: Clock, longest: float) -> None:
        self._now = clock.monotonic
        self._lasts = 2 * longest
        self._lately = SplitDict[str, float]()
        """The moment since which an origin has been deferring, for those asked lately."""
        self._before = SplitDict[str, float]()
        """... and for those that were not asked since `_lately` began."""
        self._next = 0.0
        """When `_lately` becomes `_before`."""

    def __len__(self) -> int:
        return self._lately.size + self._before.size

    def waited(self, origin: str) -> float:
        """Seconds since it began to: it defers now."""
        now = self._now()
        if now >= self._next:
            late = now >= self._next + self._lasts
            self._before = SplitDict() if late else self._lately
            self._lately, self._next = SplitDict(), now + self._lasts
        since = self._lately.get(origin)
        if since is None:
            before = self._before.take(origin)
            since = self._lately[origin] = now if before is None else before
        return now - since

    def ended(self, origin: str) -> None:
        """It does not defer any more."""
        self._lately.take(origin)
        self._before.take(origin)


class RefusedTurn:
    """Stands for a lease where the URL is denied: the request goes on to the middleware, which
    refuses it, so that its errback hears of it."""

    def __init__(self, why: Decision | str, clock: Clock) -> None:
        self.why = why
        """The decision; or in words, for a host that nobody would wait for."""
        self.expires_at: datetime = utc(clock.wall() + 3600.0)
        self.data: Any = None

    def enter(self) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""

    def give_back(self) -> None:
        """Nothing is held."""


SIDECAR = ""
"""Stands for the sidecar where those are that defer: it is no origin."""


class Refusals:
    """What the queue asks of its gate, where a refusal is a turn of its own.

    A deferral is waited for until `max_wait` seconds after the first one of its origin; a lease or
    a denial in between begins the count anew, and so does a pause by the operator. While a sidecar
    can't be asked, that is one wait for all origins.
    """

    def __init__(self, clock: Clock, max_wait: float) -> None:
        self.clock = clock
        self._most = max_wait
        self._deferrals = Deferrals(clock, max_wait)

    def refusal(self, decision: Decision | None) -> RefusedTurn | None:
        """For a denial, and for a deferral that lasts longer than anybody would wait."""
        if decision is None or decision.verdict is Verdict.ALLOW:
            return None
        paused = decision.reason is Reason.HOST_PAUSED
        if paused or decision.verdict is Verdict.DENY:
            self._deferrals.ended(decision.origin)
            return None if paused else RefusedTurn(decision, self.clock)  # who paused it resumes it
        until, left = decision.retry_at, inf
        if until is not None:
            left = max(0.0, until.timestamp() - self.clock.wall())
        by_sidecar = decision.reason is Reason.GATE_UNREACHABLE
        return self._unless_soon(SIDECAR if by_sidecar else decision.origin, left, decision)

    def _unless_soon(self, who: str, left: float, why: Decision | str) -> RefusedTurn | None:
        """For a deferral of so many seconds."""
        if who != SIDECAR:
            self._deferrals.ended(SIDECAR)
        late = left + self._deferrals.waited(who) > self._most
        return RefusedTurn(why, self.clock) if late else None

    def _had(self, lease: Any) -> Any:
        """The lease, which came: nobody defers any more."""
        if len(self._deferrals):
            self._deferrals.ended(SIDECAR)
            # Anybody may ask for a robots.txt: that says nothing of a file which can't be had.
            if lease.decision.reason is not Reason.ROBOTS_FILE:
                self._deferrals.ended(lease.decision.origin)
        return lease

    def too_late(self, origin: str, until: float, why: str) -> RefusedTurn | None:
        """For a host whose next turn comes at that moment (wall seconds), if that is too late."""
        if until - self.clock.wall() <= self._most:
            return None
        text = f"{origin} may not be asked before {utc(until):%Y-%m-%dT%H:%M:%SZ}: {why}"
        return RefusedTurn(text, self.clock)

    async def _or_refusal(self, url: str, asking: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._had(await asking)
        except Denied as error:
            found = self.refusal(error.decision)
            if found is None:
                raise
        except LeaseTimeout as error:
            self._deferrals.ended(SIDECAR)  # no word on the origin: its file may be what is late
            found = self._late(url, error)
            if found is None:
                raise
        return found

    def _late(self, url: str, error: LeaseTimeout) -> RefusedTurn | None:
        """For a turn that did not come in time."""
        raise NotImplementedError


class NearGate(Refusals):
    """... of a gate in this process."""

    def __init__(self, gate: Gatekeeper, max_wait: float) -> None:
        self._inside = internals(gate)
        super().__init__(self._inside.clock, max_wait)
        self._given_up: LRUCache[str, Decision] = LRUCache(_MOST_GIVEN_UP)
        """Origins whose file can't be had for long, and the same of their hosts."""

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision, if it is known."""
        return self._inside.peek(url, user_agent=user_agent)

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """The decision, once the file is here, or is known not to come for long."""
        decision = await self._inside.check(url, user_agent=user_agent)
        if decision.verdict is not Verdict.DEFER or self.refusal(decision) is None:
            return decision
        self._given_up[decision.origin] = self._given_up[urls.parse(url).host] = decision
        return replace(decision, verdict=Verdict.DENY)  # the queue would wait for its end

    def take(self, url: str) -> Any:
        """The turn, or the refusal, if it is known at a glance."""
        lease = self._inside.take(url)
        if lease is not None:
            return self._had(lease)
        target = urls.parse(url)
        if self._inside.robots_file(url) is None:
            found = self._gave_up(target.origin) or self.refusal(self._inside.peek(url))
            if found is not None:
                return found
        return self._blocked(target)

    def _gave_up(self, whose: str) -> RefusedTurn | None:
        """For an origin whose file can't be had yet, or one of a host."""
        decision = self._given_up.get(whose)
        until = None if decision is None else decision.retry_at
        passed = until is not None and until.timestamp() <= self.clock.wall()
        return None if passed else self.refusal(decision)  # it is asked again then

    def _blocked(self, target: urls.Target) -> RefusedTurn | None:
        held = self._inside.held(target.host)
        if held is None or held[0] == inf:  # inf: the operator paused it, and will resume it
            return None
        return self.too_late(target.origin, self.clock.wall() + held[0], held[1])

    async def acquire(self, url: str, *, timeout: float, **options: Any) -> Any:
        """The turn, or the refusal."""
        seconds = min(timeout, self._most)
        return await self._or_refusal(url, self._inside.acquire(url, timeout=seconds, **options))

    def _late(self, url: str, error: LeaseTimeout) -> RefusedTurn | None:
        del error
        return self._blocked(urls.parse(url))

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back when a turn of the host can be had, or nobody would wait for it."""
        if self._gave_up(host) is not None:
            callback()
            return lambda: None
        return self._inside.when_due(host, callback, priority=priority, longest=self._most)


class FarGate(Refusals):
    """... of a sidecar."""

    at_a_glance = False

    def __init__(self, gate: RemoteGatekeeper, max_wait: float) -> None:
        super().__init__(gate.clock, max_wait)
        self._gate = gate

    async def look(self, url: str, **options: Any) -> Any:
        """The turn, if it is now, or the refusal."""
        return await self._or_refusal(url, self._gate.look(url, **options))

    async def acquire(self, url: str, **options: Any) -> Any:
        """The turn, or the refusal."""
        return await self._or_refusal(url, self._gate.acquire(url, **options))

    async def _or_refusal(self, url: str, asking: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await super()._or_refusal(url, asking)
        except SidecarError as error:  # a wrong token, say: somebody may see to it
            if (found := self._unless_soon(SIDECAR, 0.0, str(error))) is None:
                raise
            return found

    def _late(self, url: str, error: LeaseTimeout) -> RefusedTurn | None:
        if error.retry_at is None:
            return None
        origin = urls.parse(url).origin
        return self.too_late(origin, error.retry_at.timestamp(), "its next turn")


def queue_gate(gate: Gatekeeper | RemoteGatekeeper, max_wait: float) -> NearGate | FarGate:
    """A gate for a `PoliteQueue` that gives refusals out as turns.

    `max_wait`: seconds for which a deferred URL, or a host that is blocked, is waited for; what
    lasts longer is refused.
    """
    return NearGate(gate, max_wait) if isinstance(gate, Gatekeeper) else FarGate(gate, max_wait)
