"""What is kept of one origin, and how it reads at a moment.

A `Record` has two slots: `current`, what the latest attempt came to, and `good`, the last
answer that was a file or a definite absence. A failure never overwrites the good one.

Records are confined to the event loop. Their lifetimes are monotonic seconds; wall seconds
are kept beside them only for what is shown and stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.fetching.ladder import Holds, holds_meanwhile
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.texts import Text
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.quick import QuickAnswer

__all__ = ["NO_TEXT", "Answer", "Record", "Standing"]

NO_TEXT: Final = RobotsTxt.parse(b"")
"""What an origin without a file says: nothing, so everything is welcome."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """One answer of an origin, or the lack of one."""

    outcome: Outcome
    status: int | None
    wall: float
    """Wall seconds when it came, or was last revalidated."""
    hops: tuple[str, ...] = ()
    took: float = 0.0
    etag: str | None = None
    last_modified: str | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a record reads at one moment."""

    verdict: Verdict | None
    """None: ask the policy of `robots`."""
    robots: RobotsTxt | None
    """The text that speaks; the empty one where there is none; None where nothing may."""
    state: State
    reason: Reason
    """Where the policy is asked: the reason to give if no rule matched."""
    status: int | None
    """HTTP status of the latest attempt."""
    fetched_at: float
    """Wall seconds when the text that speaks was fetched or revalidated."""
    expires_at: float
    """Wall seconds when what is known here ends."""
    retry_at: float | None
    """Wall seconds; with DEFER alone."""
    hops: tuple[str, ...] = ()
    took: float | None = None
    """Seconds that the last successful retrieval took."""


class Record:
    """What is kept of one origin. Read it between awaits only: it may be replaced.

    `fresh_until` is the monotonic moment of soft expiry: until then nothing is asked.
    `robots` is the text that speaks within that time, None while the file can't be had.
    `policies` are those compiled so far, by product token, shared by all origins that
    serve the very same text.
    """

    __slots__ = (
        "_config",
        "_uptime",
        "current",
        "expires",
        "fresh_until",
        "good",
        "house",
        "origin",
        "page_ok",
        "policies",
        "prepared",
        "ready",
        "robots",
        "step",
        "text",
        "unreachable_since",
    )

    def __init__(
        self,
        origin: str,
        config: Config,
        *,
        current: Answer,
        fresh_until: float,
        expires: float,
        good: Answer | None = None,
        text: Text | None = None,
        unreachable_since: float | None = None,
        step: int = 0,
        page_ok: float | None = None,
        uptime: Callable[[float], float] = float,
    ) -> None:
        """`uptime` turns a monotonic moment into seconds in which nothing was wrong with our
        own network; `unreachable_since` is in those."""
        self._config = config
        self._uptime = uptime
        self.origin = origin
        self.current = current
        self.good = good
        self.text = text
        """The text of `good`, None where it has none."""
        self.fresh_until = fresh_until
        self.expires = expires
        """Monotonic: hard expiry of a good answer, else the moment of the next attempt."""
        self.unreachable_since = unreachable_since
        """When the first failure in a row was, in seconds of `uptime`."""
        self.step = step
        self.page_ok = page_ok
        """Monotonic moment when a page was last reported 2xx or 3xx."""
        speaks = NO_TEXT if text is None else text.robots
        self.robots: RobotsTxt | None = speaks if self.reachable else None
        self.policies: dict[str, Policy] = {} if text is None else text.policies
        self.ready: QuickAnswer | None = None
        self.prepared: dict[str, Any] | None = None
        self.house: Any = None
        """All set by whoever decides; a new record begins without, and one that leaves
        `Directory.warm` loses them. `ready` answers about the text behind the authority, for
        the agent of the house; `prepared` holds whole answers, by agent, and `house` those for
        the agent of the house."""

    @property
    def reachable(self) -> bool:
        """The latest attempt brought a file or a definite absence."""
        return self.current.outcome.good

    @property
    def policy_only(self) -> bool:
        """Until `fresh_until` the policy of `robots` alone gives the answer."""
        outcome = self.current.outcome
        return outcome.good and outcome.row.verdict is not Verdict.DENY

    def outlive(self, moment: float) -> None:
        """Let it answer until that monotonic moment at least, without being asked for anew."""
        self.fresh_until = max(self.fresh_until, moment)
        self.expires = max(self.expires, moment)

    def keep_policy(self, token: str, policy: Policy) -> None:
        """Remember a compiled policy; the oldest goes beyond `cache.max_agents`."""
        while len(self.policies) >= self._config.cache.max_agents:
            del self.policies[next(iter(self.policies))]
        self.policies[token] = policy

    def unreachable_for(self, now: float) -> float:
        """Seconds since the first failure in a row; 0 while the file can be had."""
        since = self.unreachable_since
        return 0.0 if since is None else max(0.0, self._uptime(now) - since)

    def holds(self, now: float) -> Holds:
        """What answers at that monotonic moment while the latest attempt is a failure."""
        if not self.current.outcome.row.lapses:
            return Holds.NOTHING
        return holds_meanwhile(
            self._config.fetch,
            unreachable_for=self.unreachable_for(now),
            has_last_good=self.good is not None,
            page_ok_ago=None if self.page_ok is None else now - self.page_ok,
        )

    def usable(self, now: float) -> bool:
        """It can answer at that monotonic moment without asking first."""
        if now < self.expires:
            return True
        return not self.reachable and self.holds(now) is not Holds.NOTHING

    def standing(self, clock: Clock) -> Standing:
        """How the record reads now."""
        now = clock.monotonic()
        offset = clock.wall() - now
        if self.current.outcome.good:
            return self._speaks(self.current, offset, stale=False)
        holds = self.holds(now)
        if holds is Holds.LAST_GOOD and self.good is not None:
            return self._speaks(self.good, offset, stale=True)
        row = self.current.outcome.row
        welcome = holds is Holds.WELCOME
        retry_at = self.expires + offset
        return Standing(
            verdict=Verdict.ALLOW if welcome else row.verdict,
            robots=NO_TEXT if welcome else None,
            state=State.UNREACHABLE,
            reason=Reason.LONG_UNREACHABLE if welcome else row.reason,
            status=self.current.status,
            fetched_at=self.current.wall,
            expires_at=retry_at,
            retry_at=None if welcome or row.verdict is not Verdict.DEFER else retry_at,
            hops=self.current.hops,
            took=None if self.good is None else self.good.took,
        )

    def _speaks(self, answer: Answer, offset: float, *, stale: bool) -> Standing:
        row = answer.outcome.row
        return Standing(
            verdict=row.verdict,
            robots=NO_TEXT if self.text is None else self.text.robots,
            state=State.STALE if stale else row.state,
            reason=row.reason,
            status=self.current.status,
            fetched_at=answer.wall,
            expires_at=self.expires + offset,
            retry_at=None,
            hops=answer.hops,
            took=answer.took,
        )

    def retire(self) -> None:
        """It is no longer warm: whoever still holds it has to look at the clock."""
        self.ready = self.prepared = self.house = None

    def __repr__(self) -> str:
        return f"Record({self.origin!r}, {self.current.outcome.row.name}, step={self.step})"
