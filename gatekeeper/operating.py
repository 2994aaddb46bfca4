"""What an operator does with a gate: look at it, hold hosts back, overrule a file."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from gatekeeper import urls
from gatekeeper.clock import Clock, utc
from gatekeeper.config import Config, HostRule, host_named
from gatekeeper.deadlock import WaitGraph
from gatekeeper.deciding import Decider
from gatekeeper.decision import Reason, Verdict
from gatekeeper.errors import ConfigError, GateClosed, LeaseTimeout
from gatekeeper.fetching.directory import Directory, DirectoryStats
from gatekeeper.fetching.fetcher import Fetcher
from gatekeeper.fetching.guard import Guard, GuardStats
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from gatekeeper.fetching.records import Record
from gatekeeper.leasing import Lease, Lessor
from gatekeeper.pacing.explain import ClockView
from gatekeeper.pacing.rules import HostRules
from gatekeeper.pacing.scheduler import SHARED, PacingStats, Scheduler, check_moment
from gatekeeper.prepared import PreparedAnswers
from gatekeeper.robots import Policy, RobotsTxt, product_token
from gatekeeper.storage.base import HistoryEntry, Storage
from gatekeeper.urls import Target
from gatekeeper.wishes import Wishes

__all__ = ["GateStats", "Operated", "token_of"]


@functools.lru_cache(maxsize=4096)  # a process speaks for few agents
def token_of(user_agent: str) -> str:
    """The product token that chooses the group in robots.txt. Raises ConfigError for none."""
    token = product_token(user_agent)
    if not token:
        raise ConfigError(
            f"user agent {user_agent!r} holds no product token; "
            'say who you are, such as "examplebot/1.0 (+https://example.org/bot)"'
        )
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStats:
    """What a gate counts. All counters run since it was made."""

    guarded: bool
    """The requests go through our guard; False: through a session that was handed in."""
    warm_allowed: int
    """Answers of `allowed` from the hot path, which builds no Decision."""
    warm_denied: int
    decisions: dict[tuple[Verdict, Reason], int]
    """Decisions built, by verdict and reason."""
    directory: DirectoryStats
    pacing: PacingStats
    guard: GuardStats | None


class Operated:
    """The operator's methods of a gate."""

    config: Config
    guard: Guard | None
    _agent: str
    _clock: Clock
    _directory: Directory | None
    _fetcher: Fetcher | None
    _answers: PreparedAnswers
    _decider: Decider
    _lessor: Lessor
    _overrides: HostRules
    _scheduler: Scheduler
    _storage: Storage | None
    _wishes: Wishes
    _waits: WaitGraph[Lease]
    _warm: dict[str, Record]
    _warm_allowed: int
    _warm_denied: int

    @property
    def _open(self) -> Directory:
        if self._directory is None:
            raise GateClosed("open the gate first: async with Gatekeeper(...) as gate")
        return self._directory

    def _token_of(self, user_agent: str | None) -> str:
        return self._agent if user_agent is None else token_of(user_agent)

    async def _learn(
        self, target: Target, task: asyncio.Task[object] | None, *, force: bool = False
    ) -> Record:
        """What is known of the target's origin, asked for, on behalf of the task, if need be.

        Raises WaitsForItself where that could never come, as the task holds what it waits for.
        """
        if force:
            return await self._lessor.ask(self._open.refresh, target, task)
        if self._open.peek(target.origin) is not None:
            return await self._open.get(target.origin)  # it does not wait
        return await self._lessor.ask(self._open.get, target, task)

    async def _record_of(self, url: str) -> Record:
        """What is known of the URL's origin, asked for if need be.

        Raises LeaseTimeout where it would have to wait for a lease of the asking task, or
        for the end of a host's block or pause.
        """
        target = urls.parse(url)
        return self._known(target, await self._learn(target, asyncio.current_task()))

    def _known(self, target: Target, record: Record) -> Record:
        if record.current.outcome not in (Outcome.HOST_BLOCKED, Outcome.HOST_PAUSED):
            return record
        retry_at = utc(self._clock.wall() + record.expires - self._clock.monotonic())
        raise LeaseTimeout(
            target.url,
            f"{target.url}: its robots.txt can't be asked for, a host is "
            f"{record.current.outcome.row.name.removeprefix('host_')}; "
            f"ask again at {retry_at:%Y-%m-%dT%H:%M:%SZ}",
            retry_at=retry_at,
        )

    async def robots(self, url: str) -> RobotsTxt | None:
        """The robots.txt that speaks for the URL's origin; None where there is none to read.

        Raises InvalidURL.
        """
        record = await self._record_of(url)
        standing = record.standing(self._clock)
        return standing.robots if record.text is not None else None

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """The file as it reads for the agent. Raises InvalidURL.

        Where there is no file it allows everything, and where the file can't be had it
        allows nothing (RFC-36, RFC-37).
        """
        agent = self._token_of(user_agent)
        record = await self._record_of(url)
        standing = record.standing(self._clock)
        if standing.robots is None:
            return self._decider.closed_policy(agent)
        return self._decider.policy(record, standing.robots, agent)

    async def history(self, origin: str) -> list[HistoryEntry]:
        """Versions of the origin's robots.txt, oldest first; none without a storage.

        Raises InvalidURL.
        """
        if self._storage is None:
            return []
        return await self._storage.history(urls.parse(origin).origin)

    async def source(self, url: str) -> bytes | None:
        """The octets of the robots.txt that `robots` is parsed from; None where there is none.

        Raises InvalidURL.
        """
        record = await self._record_of(url)
        return None if record.text is None else record.text.body()

    def _forget_ready(self) -> None:
        """No answer of the hot path outlives a change of the operator's word."""
        for record in self._warm.values():
            record.retire()

    @property
    def clock(self) -> Clock:
        """Where the gate reads the time."""
        return self._clock

    def when_due(
        self, host: str, callback: Callable[[], object], *, priority: float = 0
    ) -> Callable[[], None]:
        """Call back once when a turn of the host can be had; returns what undoes it.

        Takes no turn. The callback is called from within the scheduler, perhaps at once:
        it must be short and must not raise.
        """
        return self._scheduler.when_due(host, callback, priority=priority)

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for others.
        """
        return self._scheduler.why(host_named(host))

    def hosts(self) -> tuple[str, ...]:
        """Every host that has a clock in memory."""
        return tuple(name for name in self._scheduler.hosts() if not name.startswith(SHARED))

    def host_states(self) -> Counter[str]:
        """How many hosts and shared clocks in memory are "paused", "blocked", "waiting"
        (somebody waits for their turn) or "idle". It looks at each of them, which takes a
        tenth of a second for a million: with many, call it from another thread.
        """
        return self._scheduler.host_states()

    async def refresh(self, origin: str) -> None:
        """Ask the origin (or the origin of that URL) again now. Raises InvalidURL, and
        LeaseTimeout where it would have to wait for a lease of the asking task, or for the
        end of a host's block or pause: the origin is asked then.
        """
        target = urls.parse(origin)
        self._known(target, await self._learn(target, asyncio.current_task(), force=True))

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """No request to the host before `until` (aware datetime, or wall seconds).

        Raises ConfigError for what names no host or no moment, and changes nothing then.
        """
        host = host_named(host)
        wall = until.timestamp() if isinstance(until, datetime) else until
        check_moment(host, wall)
        self._wishes.unpark(host)
        self._scheduler.block(host, wall, reason)

    async def pause(self, host: str) -> None:
        """No turns for the host until `resume`; survives a restart. Raises ConfigError."""
        self._scheduler.pause(host_named(host))

    async def resume(self, host: str) -> None:
        """Turns again; lifts a pause, not a block. Raises ConfigError."""
        self._scheduler.resume(host_named(host))

    def override(self, rule: HostRule) -> None:
        """Say a `[[host]]` word at run time: it replaces an earlier one for that match, and
        what it leaves out is as if nobody had said it. `group` must be one of the
        configuration's. Raises ConfigError, and changes nothing then.
        """
        self._scheduler.say(rule)
        self._overrides.say(rule)
        self._forget_ready()

    def lift_override(self, match: str) -> None:
        """Take every word for that `match` back, the configured one too. Raises ConfigError."""
        self._scheduler.unsay(match)
        self._overrides.unsay(match)
        self._forget_ready()

    def replace_overrides(self, rules: tuple[HostRule, ...]) -> None:
        """Put other `[[host]]` tables in force, all at once, for all that was said before.

        Raises ConfigError, and changes nothing then.
        """
        self._scheduler.replace_words(rules)
        self._overrides.replace(rules)
        self._forget_ready()

    def adjust(self, config: Config) -> None:
        """Put the `[guard]`, the `[pacing]` and the `[[host]]` tables of another configuration in
        force, all at once; its other settings have to be those of this gate's own, and so have
        `pacing.lease_ttl`, `address_interval` and `domain_interval`.

        Raises ConfigError, and changes nothing then.
        """
        old = self.config
        if self.guard is not None and config.guard != old.guard:
            Guard(config)  # raises, if anything does
        if config.host != old.host:
            self.replace_overrides(config.host)
        if config.pacing != old.pacing:
            self._scheduler.adjust(config.pacing)
            self._waits.adjust(config.pacing.own_wait)
            if self._fetcher is not None:
                self._fetcher.adjust(config.pacing)
        if self.guard is not None and config.guard != old.guard:
            self.guard.adjust(config.guard)
            self._open.void_refusals()
        self.config = config
        self._decider.adjust(config)
        self._answers.adjust(config)
        self._forget_ready()

    def subscribe(
        self, callback: Callable[[str, RobotsTxt | None, RobotsTxt | None], None]
    ) -> Callable[[], None]:
        """Call `callback(origin, old, new)` when an origin's rules change; returns undo."""
        return self._open.subscribe(callback)

    def on_retrieval(self, callback: Callable[[str, Retrieval, float], object]) -> None:
        """Have `callback(origin, retrieval, seconds)` called after each robots.txt fetch.

        `seconds` include the wait for turns, `retrieval.took` is the network alone. One
        callback: a later one replaces it. It must be short and must not raise. It is called
        in the context of whoever was the first to ask. Raises GateClosed.
        """
        self._open.on_retrieval = callback

    def stats(self) -> GateStats:
        """Counters and gauges of every room, at this moment."""
        return GateStats(
            guarded=self.guard is not None,
            warm_allowed=self._warm_allowed,
            warm_denied=self._warm_denied,
            decisions=dict(self._decider.counts + self._answers.counts()),
            directory=self._open.stats(),
            pacing=self._scheduler.stats(),
            guard=None if self.guard is None else self.guard.stats(),
        )

    @property
    def ready(self) -> bool:
        """Open, our own network seems to be up, and what is promised can be kept."""
        return self.storage_failing is None and (
            self._directory is not None and self._directory.ready
        )

    @property
    def storage_failing(self) -> str | None:
        """Why the state file takes no promises now, so that leases are deferred with the reason
        `storage`; None: it does, or there is none, or storage.on_failure is "continue"."""
        return getattr(self._storage, "failing", None)
