"""From what is known of an origin to the `Decision` about one URL: no waiting, no I/O."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import Counter
from datetime import datetime

from msgspec.structs import replace

from gatekeeper.clock import Clock, utc
from gatekeeper.config import Config
from gatekeeper.decision import BLOCKED_NOTE, Decision, Reason, State, Verdict
from gatekeeper.fetching.guard import Guard
from gatekeeper.fetching.records import Record, Standing
from gatekeeper.pacing.rules import HostRules
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.normal import is_robots_txt
from gatekeeper.urls import Target, mask

__all__ = ["ON_THE_WAY", "Decider"]

_log = logging.getLogger(__name__)

ON_THE_WAY = 1.0
"""Seconds for which a granted request may be on its way: it must be welcome then as well."""

_SOON = 1.0
"""Seconds until a question is worth asking again that nothing but its asker holds up."""

_AFTER_AN_ERROR = 60.0
"""Seconds until a question that met an error of ours is worth asking again."""

_ROOM = 5.0
"""Seconds after which to ask again where the state file can't be written."""

_DENY_ALL = RobotsTxt.parse("User-agent: *\nDisallow: /\n")


class Decider:
    """Builds every Decision of a gate; holds no state but the counter of ids."""

    def __init__(
        self, config: Config, *, clock: Clock, guard: Guard | None, overrides: HostRules
    ) -> None:
        self._config = config
        self._cap = config.pacing.max_interval
        self._clock = clock
        self._guard = guard
        self._overrides = overrides
        # Unique between processes by the prefix, within one by the counter: no clock, no
        # random number on the way of an answer.
        self.counts: Counter[tuple[Verdict, Reason]] = Counter()
        self.prefix = f"{os.getpid():x}{secrets.token_hex(4)}-"
        self.serial = itertools.count(1)

    def adjust(self, config: Config) -> None:
        """Decide by another configuration; what a policy was read by has to stay as it was."""
        self._config = config
        self._cap = config.pacing.max_interval

    def next_id(self) -> str:
        """A decision id: the prefix of this process and a counter."""
        return f"{self.prefix}{next(self.serial):x}"

    def invalid(self, raw: str, problem: str, agent: str) -> Decision:
        """DENY for text that is no URL, where an exception would lose the others."""
        self.counts[Verdict.DENY, Reason.INVALID_URL] += 1
        return Decision(
            verdict=Verdict.DENY,
            reason=Reason.INVALID_URL,
            url=mask(raw),
            origin="",
            user_agent=agent,
            note=problem,
            id=self.next_id(),
        )

    def failed(self, raw: str, agent: str, error: Exception) -> Decision:
        """DEFER for a URL that an error of ours kept from being decided; it is logged."""
        _log.error("no decision about %s", mask(raw, query=False), exc_info=error)
        self.counts[Verdict.DEFER, Reason.INTERNAL] += 1
        return Decision(
            verdict=Verdict.DEFER,
            reason=Reason.INTERNAL,
            url=mask(raw),
            origin="",
            user_agent=agent,
            note=f"an error of gatekeeper's own ({type(error).__name__}); its log says more",
            retry_at=utc(self._clock.wall() + _AFTER_AN_ERROR),
            id=self.next_id(),
        )

    def outright(self, raw: str, target: Target, agent: str) -> Decision | None:
        """What the guard or the operator decides without a look at the file."""
        refusal = None if self._guard is None else self._guard.refuses_target(target)
        if refusal is not None:
            return self._simple(Verdict.DENY, Reason.BLOCKED, raw, target, agent, note=refusal.note)
        rule = self._overrides.find(target.host)
        if rule is None or rule.robots == "obey":
            return None
        verdict = Verdict.ALLOW if rule.robots == "allow" else Verdict.DENY
        return self._simple(
            verdict, Reason.OPERATOR, raw, target, agent, state=State.OVERRIDE, note=rule.reason
        )

    def unknown(self, raw: str, target: Target, agent: str) -> Decision:
        """DEFER: nothing usable is known of the origin, and nobody may wait for it here."""
        return self._simple(Verdict.DEFER, Reason.INTERNAL, raw, target, agent)

    def held_back(self, raw: str, target: Target, agent: str, held: str, whose: str) -> Decision:
        """DEFER: the file needs a turn of a host whose turn the asker itself holds, or who
        started it; `held` is the URL of that lease, `whose` says in words who holds it."""
        decision = self._simple(
            Verdict.DEFER,
            Reason.OWN_LEASE,
            raw,
            target,
            agent,
            note=f"robots.txt would wait for {held}, {whose}",
        )
        return replace(decision, retry_at=utc(self._clock.wall() + _SOON))

    def unkept(self, raw: str, target: Target, agent: str, why: str) -> Decision:
        """DEFER: the clock that a turn would start can't be kept."""
        decision = self._simple(
            Verdict.DEFER,
            Reason.STORAGE,
            raw,
            target,
            agent,
            note=f"the clock of {target.host} can't be kept: {why}",
        )
        return replace(decision, retry_at=utc(self._clock.wall() + _ROOM))

    def by_record(
        self, raw: str, target: Target, record: Record, agent: str, ahead: float = 0.0
    ) -> Decision:
        """What the file, or the lack of one, says about the URL at this moment.

        `ahead`: seconds for which a Visit-time must go on.
        """
        standing = record.standing(self._clock)
        if is_robots_txt(target.path):  # RFC-20, R96-16, V2-34
            return self._by_standing(
                Verdict.ALLOW, Reason.ROBOTS_FILE, standing, raw, target, agent
            )
        if standing.verdict is not None or standing.robots is None:
            verdict = standing.verdict or Verdict.DEFER
            return self._by_standing(verdict, standing.reason, standing, raw, target, agent)
        policy = self.policy(record, standing.robots, agent)
        return self._by_policy(policy, standing, raw, target, agent, ahead)

    def policy(self, record: Record, robots: RobotsTxt, agent: str) -> Policy:
        """The file as it reads for one agent; compiled once a record and agent."""
        policy = record.policies.get(agent)
        if policy is None or policy.robots is not robots:
            settings = self._config.robots
            policy = robots.policy(
                agent,
                conflicts=settings.conflicts,
                v2_semantics=settings.v2_semantics,
                inherit_crawl_delay=settings.inherit_crawl_delay,
            )
            record.keep_policy(agent, policy)
        return policy

    @staticmethod
    def closed_policy(agent: str) -> Policy:
        """What stands for a file that can't be had: nothing may be fetched (RFC-37)."""
        return _DENY_ALL.policy(agent)

    def _by_policy(
        self,
        policy: Policy,
        standing: Standing,
        raw: str,
        target: Target,
        agent: str,
        ahead: float,
    ) -> Decision:
        match = policy.match_path(target.path, target.origin)
        verdict = Verdict.ALLOW if match.allowed else Verdict.DENY
        # Without a rule the reason is the file's own: no_file, empty_file, soft_404 ...
        reason = Reason.RULE if match.rule is not None else standing.reason
        retry_at = None
        if match.allowed and policy.timed:
            wall = self._clock.wall()
            for moment in (utc(wall), utc(wall + ahead)):
                if not policy.may_visit(moment):  # V2-24: outside every window
                    verdict, reason = Verdict.DEFER, Reason.OUTSIDE_VISIT_TIME
                    retry_at = policy.next_visit(moment)
                    break
        cut = None if self._cap is None else self._cut(policy, standing, self._cap)
        self.counts[verdict, reason] += 1
        return Decision(
            verdict=verdict,
            reason=reason,
            url=_shown(raw),
            origin=target.origin,
            user_agent=agent,
            state=standing.state,
            rule=match.rule,
            retry_at=retry_at,
            robots_status=standing.status,
            fetched_at=_moment(standing.fetched_at),
            expires_at=_moment(standing.expires_at),
            hops=standing.hops,
            crawl_delay=policy.crawl_delay,
            conflict=match.conflict,
            clamped=cut is not None,
            note=cut,
            id=self.next_id(),
        )

    def _cut(self, policy: Policy, standing: Standing, cap: float) -> str | None:
        """What the operator's cap makes of the text's wish, in words, where it bites."""
        now = utc(self._clock.wall())
        wish = policy.interval(now, standing.took)
        if wish is None or wish <= cap:
            return None
        source = policy.interval_source(now, standing.took)
        return f"{source}, capped at {cap:g} s by pacing.max_interval"

    def _by_standing(
        self,
        verdict: Verdict,
        reason: Reason,
        standing: Standing,
        raw: str,
        target: Target,
        agent: str,
    ) -> Decision:
        # T2: what the guard refused is outwardly one constant word.
        reason = Reason.BLOCKED if reason is Reason.EGRESS_POLICY else reason
        self.counts[verdict, reason] += 1
        return Decision(
            verdict=verdict,
            reason=reason,
            url=_shown(raw),
            origin=target.origin,
            user_agent=agent,
            state=standing.state,
            retry_at=_moment(standing.retry_at) if verdict is Verdict.DEFER else None,
            robots_status=standing.status,
            fetched_at=_moment(standing.fetched_at),
            expires_at=_moment(standing.expires_at),
            hops=standing.hops,
            note=BLOCKED_NOTE if reason is Reason.BLOCKED else None,
            id=self.next_id(),
        )

    def _simple(
        self,
        verdict: Verdict,
        reason: Reason,
        raw: str,
        target: Target,
        agent: str,
        *,
        state: State | None = None,
        note: str | None = None,
    ) -> Decision:
        self.counts[verdict, reason] += 1
        return Decision(
            verdict=verdict,
            reason=reason,
            url=_shown(raw),
            origin=target.origin,
            user_agent=agent,
            state=state,
            note=note,
            id=self.next_id(),
        )


def _shown(raw: str) -> str:
    """The URL as asked about; only one with an `@` can carry credentials to mask."""
    return mask(raw) if "@" in raw else raw


def _moment(wall: float | None) -> datetime | None:
    return None if wall is None else utc(wall)
