"""Queues in which a refusal is a turn: what was put comes back, with its lease or with why not.

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
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Denied, LeaseTimeout
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.remote.client import RemoteGatekeeper

__all__ = ["MAX_WAIT", "FarGate", "NearGate", "RefusedTurn", "queue_gate"]

MAX_WAIT: Final = 600.0
"""Seconds for which a deferred request is waited for, unless the crawler says otherwise."""
_MOST_GIVEN_UP: Final = 20_000


class RefusedTurn:
    """Stands for a lease where the URL is denied: the request goes on to the middleware, which
    refuses it, so that its errback hears of it."""

    def __init__(self, why: Decision | str, expires_at: datetime) -> None:
        self.why = why
        """The decision; or in words, for a host that nobody would wait for."""
        self.expires_at = expires_at
        self.data: Any = None

    def enter(self) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""

    def give_back(self) -> None:
        """Nothing is held."""


class _Refusals:
    """What the queue asks of its gate, where a refusal is a turn of its own."""

    def __init__(self, clock: Clock, max_wait: float) -> None:
        self.clock = clock
        self._max_wait = max_wait

    def refusal(self, decision: Decision | None) -> RefusedTurn | None:
        """For a denial, and for a deferral that lasts longer than anybody would wait."""
        if decision is None or decision.verdict is Verdict.ALLOW:
            return None
        now = self.clock.wall()
        if decision.verdict is Verdict.DEFER:
            until = decision.retry_at
            if until is not None and until.timestamp() - now <= self._max_wait:
                return None
        return RefusedTurn(decision, utc(now + 3600.0))

    def too_late(self, origin: str, until: float, why: str) -> RefusedTurn | None:
        """For a host whose next turn comes at that moment (wall seconds), if that is too late."""
        now = self.clock.wall()
        if until - now <= self._max_wait:
            return None
        text = f"{origin} may not be asked before {utc(until):%Y-%m-%dT%H:%M:%SZ}: {why}"
        return RefusedTurn(text, utc(now + 3600.0))


class NearGate(_Refusals):
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
            return lease
        target = urls.parse(url)
        if self._inside.robots_file(url) is None:
            given_up = self.refusal(self._given_up.get(target.origin))
            found = given_up or self.refusal(self._inside.peek(url))
            if found is not None:
                return found
        return self._blocked(target)

    def _blocked(self, target: urls.Target) -> RefusedTurn | None:
        held = self._inside.held(target.host)
        if held is None or held[0] == inf:  # inf: the operator paused it, and will resume it
            return None
        return self.too_late(target.origin, self.clock.wall() + held[0], held[1])

    async def acquire(self, url: str, *, timeout: float, **options: Any) -> Any:
        """The turn, or the refusal."""
        try:
            return await self._inside.acquire(url, timeout=min(timeout, self._max_wait), **options)
        except Denied as error:
            found = self.refusal(error.decision)
            if found is None:
                raise
            return found
        except LeaseTimeout:
            found = self._blocked(urls.parse(url))
            if found is None:
                raise
            return found

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back when a turn of the host can be had, or nobody would wait for it."""
        if self.refusal(self._given_up.get(host)) is not None:
            callback()
            return lambda: None
        return self._inside.when_due(host, callback, priority=priority, longest=self._max_wait)


class FarGate(_Refusals):
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
            return await asking
        except LeaseTimeout as error:
            found = None
            if error.retry_at is not None:
                origin = urls.parse(url).origin
                found = self.too_late(origin, error.retry_at.timestamp(), "its next turn")
            if found is None:
                raise
            return found
        except Denied as error:
            found = self.refusal(error.decision)
            if found is None:
                raise
            return found


def queue_gate(gate: Gatekeeper | RemoteGatekeeper, max_wait: float) -> NearGate | FarGate:
    """A gate for a `PoliteQueue` that gives refusals out as turns.

    `max_wait`: seconds for which a deferred URL, or a host that is blocked, is waited for; what
    lasts longer is refused.
    """
    return NearGate(gate, max_wait) if isinstance(gate, Gatekeeper) else FarGate(gate, max_wait)
