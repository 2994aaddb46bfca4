"""`Decider`: makes the `Decision` about a URL from what is cached about its origin.

`Decider.decide` is the only place that turns a robots.txt, or the lack of one, and a URL into a
decision: every question and every lease calls it. It reads no clock, never waits and does no I/O;
the moment is an argument. Inside it, a `DecisionCache` answers what was decided before.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gatekeeper.config import Config, token_of
from gatekeeper.decision import BLOCKED_NOTE, Decision, Reason, State, Verdict
from gatekeeper.descriptors import describe_shortage
from gatekeeper.errors import InvalidURL, LedgerLost
from gatekeeper.fetching.guard_policy import Guard
from gatekeeper.fetching.outcomes import Outcome, OutcomeRow
from gatekeeper.fetching.records import (
    LARGE,
    FileText,
    FileTexts,
    Moment,
    Record,
    Standing,
    TwoClocks,
)
from gatekeeper.gate.decision_cache import (
    CachedDecision,
    CachedOrigin,
    DecisionBatch,
    DecisionCache,
    WrittenDecision,
)
from gatekeeper.http_fields import utc
from gatekeeper.pacing.rules import BudgetSpent, HostRules
from gatekeeper.pacing.scopes import NO_RATE, UNKNOWN
from gatekeeper.pacing.waiting import HostHoldup
from gatekeeper.robots import Match, Policy, RobotsTxt, Rule, product_token
from gatekeeper.robots.compiled import ROBOTS_FILE
from gatekeeper.robots.flat import NO_RULE, FlatRules
from gatekeeper.robots.patterns import is_robots_txt
from gatekeeper.robots.timing import RobotsInterval, may_visit, next_visit
from gatekeeper.split_dict import SplitDict
from gatekeeper.urls import Target, host_of, mask, parse

_log = logging.getLogger(__name__)

TRANSIT_SECONDS = 1.0
"""Seconds that a granted request may take to arrive: it must be allowed at their end, too."""

_RETRY_SECONDS = 1.0
"""Retry delay in seconds if only the caller itself is in the way of an answer."""

_ERROR_RETRY_SECONDS = 60.0
"""Retry delay in seconds after an internal error."""

_STORAGE_RETRY_SECONDS = 5.0
"""Retry delay in seconds while the state file can't be written."""
_FLEET_RETRY_SECONDS = 2.0
"""Retry delay in seconds while the fleet's store can't be reached."""

TurnError = LedgerLost | BudgetSpent
"""Errors, beside a state file that can't be written, for which no page of a host gets a turn."""

DENY_ALL = RobotsTxt.parse("User-agent: *\nDisallow: /\n")
"""Used instead of a file that can't be fetched: nothing is allowed (RFC 9309 section 2.3.1.4,
RFC-37)."""


class _Ruling(msgspec.Struct, frozen=True, gc=False):
    """What a record says about a path at one moment: the verdict, with what explains it."""

    verdict: Verdict
    reason: Reason
    rule: Rule | None = None
    conflict: bool = False
    retry_at: datetime | None = None
    crawl_delay: float | None = None
    clamped: str | None = None
    """Describes how `pacing.max_interval` shortens the file's interval; None if it does not."""


_ROBOTS_FILE = _Ruling(Verdict.ALLOW, Reason.ROBOTS_FILE)
_MAX_NOTED_HOSTS = 100_000
_MAX_NOTED_ORIGINS = 16
"""The most hosts, and origins of each, that `Decider.note` keeps; beyond, the oldest are dropped:
their clocks alone tell the state of the host then."""


def _judge(
    policy: Policy, match: Match, otherwise: Reason, walls: Sequence[float], clamped: str | None
) -> _Ruling:
    """Turn a match into a verdict.

    `otherwise` is the reason if no rule matched: that of the file, such as no_file, empty_file
    or soft_404. `walls` are the times at which Visit-time must admit a visit; empty if the
    policy has no Visit-time. `clamped` is that of the ruling.
    """
    verdict, retry_at = Verdict.ALLOW if match.allowed else Verdict.DENY, None
    reason = otherwise if match.rule is None else Reason.RULE
    if match.allowed and walls and policy.timed:
        closed = [at for at in map(utc, walls) if not policy.may_visit(at)]
        if closed:  # Robot Exclusion Standard 2.0, Visit-time (V2-24)
            verdict, reason = Verdict.DEFER, Reason.OUTSIDE_VISIT_TIME
            retry_at = policy.next_visit(closed[0])
    return _Ruling(
        verdict, reason, match.rule, match.conflict, retry_at, policy.crawl_delay, clamped
    )


def _for_all(standing: Standing) -> _Ruling | None:
    """Return the ruling about every URL of an origin without a text that applies, else None."""
    if standing.verdict is None and standing.applies:
        return None
    # T2: everything that the guard refused is shown with the same reason.
    refused = standing.reason is Reason.EGRESS_POLICY
    return _Ruling(
        standing.verdict or Verdict.DEFER,
        Reason.BLOCKED if refused else standing.reason,
        retry_at=_utc_or_none(standing.retry_at),
    )


def _note_of(ruling: _Ruling, record: Record) -> str | None:
    """Return the remedy that a decision by a record names, or how its interval is clamped."""
    if ruling.reason is Reason.BLOCKED:
        return BLOCKED_NOTE
    if ruling.reason is Reason.OVERLOADED and record.current.outcome is Outcome.NO_DESCRIPTORS:
        return describe_shortage()
    return ruling.clamped


def _outside_visit_time(standing: Standing, at: datetime) -> _Ruling | None:
    """Return the deferral of every URL that the text allows, if `at` is outside its Visit-time."""
    windows = () if standing.text is None else standing.text.windows
    if not windows or may_visit(windows, at):
        return None
    retry_at = next_visit(windows, at)
    return _Ruling(Verdict.DEFER, Reason.OUTSIDE_VISIT_TIME, retry_at=retry_at)


def _usual_origins(host: str) -> tuple[str, str]:
    name = f"[{host}]" if ":" in host else host
    return f"https://{name}", f"http://{name}"


def refused_request(url: str, header: str, note: str, decision_id: str = "") -> Decision:
    """Return DENY for a request that the guard refused at the socket.

    `header` is its User-Agent header, `note` the guard's note. All refusals share one exception
    class and one reason (T2).
    """
    try:
        origin = parse(url).origin
    except InvalidURL:
        origin = ""
    return Decision(
        verdict=Verdict.DENY,
        reason=Reason.BLOCKED,
        url=mask(url),
        origin=origin,
        user_agent=product_token(header) or header,
        note=note,
        id=decision_id,
    )


class UnbuiltDecision(msgspec.Struct, frozen=True):
    """Inputs of an ALLOW decision by an origin's file, which is built when it is first read.

    Few callers read the decision of a lease.
    """

    decider: Decider
    record: Record
    url: str
    target: Target
    moment: Moment

    @property
    def origin(self) -> str:
        """Origin of the file."""
        return self.target.origin

    def build(self) -> Decision:
        """Build the decision as of its moment."""
        decider = self.decider
        return decider.decide_by(self.record, self.url, self.target, decider.agent, self.moment)


class Decider:
    """Builds every decision of a gate.

    Its state is the counts of decisions and the decision cache.
    """

    def __init__(
        self,
        config: Config,
        *,
        agent: str,
        guard: Guard | None,
        overrides: HostRules,
    ) -> None:
        """`agent` is the product token of the gate's own name; `overrides` are the operator's
        `[[host]]` rules."""
        self._config = config
        self.agent: str = agent
        self._max_interval = config.pacing.max_interval
        # An id is a random prefix of the process and a number, so that it needs neither a clock
        # nor a random number of its own.
        self._prefix = f"{os.getpid():x}{secrets.token_hex(4)}-"
        self._guard = guard
        self._overrides = overrides
        self.records: SplitDict[str, Record] = SplitDict()
        """Hot records by origin; the directory adds and removes them. A `warm` record answers by
        the policy of its text alone."""
        self.texts: FileTexts = FileTexts(config)
        """The texts of all records."""
        self._counts: Counter[tuple[Verdict, Reason]] = Counter()
        self._no_text = self.texts.read(b"")
        """Has the policies of all origins without a file."""
        self.noted: SplitDict[str, dict[str, None]] = SplitDict()
        """By host, its origins for `file_holdups` (each a dictionary as ordered set)."""
        self._cache = DecisionCache(
            self.records, self._prefix, agent=agent, max_agents=config.cache.max_agents
        )
        self.numbers: itertools.count[int] = itertools.count(1)
        """The numbers in the decision ids."""
        self.recall_allowed: Callable[[str], CachedOrigin | None] = self._cache.allowed_origin
        """Return the cache entry of a URL's origin if the gate's own agent may fetch the URL. None
        if the URL is not plain text or not allowed."""
        self.verdict: Callable[[Record, str], bool | None] = self._cache.verdict
        """Decide the part of a URL after its authority, for the gate's own agent, by the warm
        record of its origin. None: `check` has to decide."""

    def _next_id(self) -> str:
        return f"{self._prefix}{next(self.numbers):x}"

    def token(self, user_agent: str | None) -> str:
        """Return the product token of a name; None: the gate's own. Raises ConfigError."""
        return self.agent if user_agent is None else token_of(user_agent)

    def adjust(self, config: Config) -> None:
        """Apply the pacing settings of another configuration."""
        self._config = config
        self._max_interval = config.pacing.max_interval
        self.forget()

    def forget(self) -> None:
        """Clear the decision cache: the operator's rules or the configuration changed."""
        self._cache.forget()

    def counts(self) -> dict[tuple[Verdict, Reason], int]:
        """Count the decisions given so far, by verdict and reason."""
        return dict(self._counts + self._cache.counts())

    def count(self, decisions: Mapping[tuple[Verdict, Reason], int]) -> None:
        """Add decisions that other processes gave on behalf of this decider, or with a negative
        number take back those that the caller makes again."""
        self._counts.update(decisions)

    # --- the decision -------------------------------------------------------------------

    def decide(
        self, raw: str, target: Target, agent: str, record: Record | None, moment: Moment
    ) -> Decision | None:
        """Decide about a URL for the agent. Return None if the file of its origin is needed first.

        `raw` is the URL as given, `target` the parsed URL, `record` the cached record of its
        origin, if any. Visit-time must admit a visit at the moment, and after its `transit`.
        """
        if record is None:
            return self.decide_without_file(raw, target, agent)
        return self.decide_by(record, raw, target, agent, moment)

    def decide_by(
        self, record: Record, raw: str, target: Target, agent: str, moment: Moment
    ) -> Decision:
        """Decide as `decide` does, for an origin with a record: there is always a decision."""
        decision = self.decide_without_file(raw, target, agent)
        if decision is not None:
            return decision
        decision = self._by_record(raw, target.path, agent, record, moment)
        if self._cache.on and record.warm and moment.now < record.fresh_until:
            self._cache_decision(decision, target.path, record, agent, moment)
        return decision

    def steady_interval(
        self, record: Record, raw: str, target: Target, moment: Moment
    ) -> RobotsInterval | None:
        """Return the file's interval if the file allows the URL to the gate's own agent at every
        hour. None: `decide_by` has to decide. Optional speed."""
        text = record.text
        if (
            not record.reachable
            or moment.now >= record.fresh_until
            or self._cache.count_question(record)  # its decisions are cached from now on
            or (rules := self._flat(record, text, self.agent)) is None
            or text is None
            or text.interval is None
            or self.decide_without_file(raw, target, self.agent) is not None
        ):
            return None
        score = rules.score(target.path)
        return text.interval if score is not None and score & 1 else None

    def decide_without_file(self, raw: str, target: Target, agent: str) -> Decision | None:
        """Decide by the guard and the operator's rules, without the file. None if neither does."""
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

    def _by_record(
        self, raw: str, path: str, agent: str, record: Record, moment: Moment
    ) -> Decision:
        standing = record.standing(moment)
        if is_robots_txt(path):
            # "/robots.txt" is implicitly allowed (RFC 9309 section 2.2.2, RFC-20; the drafts of
            # 1996 and 2.0, R96-16 and V2-34).
            ruling = _ROBOTS_FILE
        else:
            ruling = _for_all(standing) or self._by_text(path, agent, record, standing, moment)
            if ruling.verdict is Verdict.DEFER:
                self.note(record)
        self._counts[ruling.verdict, ruling.reason] += 1
        return Decision(
            verdict=ruling.verdict,
            reason=ruling.reason,
            url=_masked(raw),
            origin=record.origin,
            user_agent=agent,
            state=standing.state,
            rule=ruling.rule,
            retry_at=ruling.retry_at,
            robots_status=standing.status,
            fetched_at=_utc_or_none(standing.fetched_at),
            expires_at=_utc_or_none(standing.expires_at),
            hops=standing.hops,
            crawl_delay=ruling.crawl_delay,
            conflict=ruling.conflict,
            clamped=ruling.clamped is not None,
            note=_note_of(ruling, record),
            id=self._next_id(),
        )

    def _by_text(
        self, path: str, agent: str, record: Record, standing: Standing, moment: Moment
    ) -> _Ruling:
        text = standing.text
        rules = self._flat(record, text, agent)
        score = None if rules is None else rules.score(path)
        if rules is not None and score == NO_RULE:
            return _Ruling(Verdict.ALLOW, standing.reason, crawl_delay=rules.crawl_delay)
        policy = self.policy(record, text, agent)
        if text is not None and agent == self.agent:
            text.windows = policy.visit_times
        rule = None if rules is None or score is None else policy.rule_by(rules, path, score)
        if rules is not None and score is not None and rule is not None:
            verdict = Verdict.ALLOW if score & 1 else Verdict.DENY
            return _Ruling(verdict, Reason.RULE, rule, crawl_delay=rules.crawl_delay)
        match = policy.match_path(path, record.origin)
        walls = (moment.wall_time, moment.wall_time + moment.transit)
        clamped = self._clamped(policy, standing, moment)
        return _judge(policy, match, standing.reason, walls, clamped)

    def _flat(self, record: Record, text: FileText | None, agent: str) -> FlatRules | None:
        """Return the flat rules that answer most questions of the gate's own agent without parsing
        the text. None if there are none. Optional speed."""
        if text is None or agent != self.agent or text.size >= LARGE or not self._cache.on:
            return None
        if self._max_interval is not None:
            return None  # whether the interval is clamped depends on the hour
        text.used = True
        rules = text.ready
        if rules is None and text.parsed is not None:
            policy = self.policy(record, text, agent)
            rules = text.ready = policy.flat() or policy
        return rules if isinstance(rules, FlatRules) else None

    def _clamped(self, policy: Policy, standing: Standing, moment: Moment) -> str | None:
        """Describe how `pacing.max_interval` shortens the file's interval. None if it does not."""
        if self._max_interval is None:
            return None
        now = utc(moment.wall_time)
        seconds = policy.interval(now, standing.took)
        if seconds is None or seconds <= self._max_interval:
            return None
        source = policy.interval_source(now, standing.took)
        return f"{source}, capped at {self._max_interval:g} s by pacing.max_interval"

    # --- the policy ---------------------------------------------------------------------

    def policy(self, record: Record, text: FileText | None, agent: str) -> Policy:
        """Return the policy of the record's text for one agent; without a text, that of no file.

        A text in parsed form keeps its policies. A packed text is parsed for this question only,
        unless its origin was asked about lately: then it stays parsed.
        """
        text = text or self._no_text
        policy = text.policy_for(agent)
        if policy is None:
            robots = text.robots
            if text.parsed is None and self._cache.would_cache_next(record):
                self.texts.wake(text, robots)
            policy = self.policy_of(robots, agent)
            text.add_policy(policy, self._config.cache.max_agents)
        return policy

    def policy_of(self, robots: RobotsTxt, agent: str) -> Policy:
        """Return the policy of any file for one agent, by the `[robots]` settings."""
        settings = self._config.robots
        return robots.policy(
            agent,
            conflicts=settings.conflicts,
            v2_semantics=settings.v2_semantics,
            inherit_crawl_delay=settings.inherit_crawl_delay,
        )

    def interval(self, record: Record, agent: str, moment: Moment) -> RobotsInterval:
        """Return the interval that the file asks for, with the line it comes from."""
        if record.reachable:
            return self.interval_of(record, record.text, record.current.took, agent, moment)
        standing = record.standing(moment)
        if not standing.applies:
            return UNKNOWN
        return self.interval_of(record, standing.text, standing.took, agent, moment)

    def interval_of(
        self, record: Record, text: FileText | None, took: float | None, agent: str, moment: Moment
    ) -> RobotsInterval:
        """Return the interval by a text of the record, which may have expired, or by no text.

        `took`: seconds that its retrieval took.
        """
        own_agent = agent == self.agent
        if text is not None and own_agent and text.interval is not None:
            return text.interval
        policy = self.policy(record, text, agent)
        if text is not None and own_agent:
            text.windows = policy.visit_times
        steady = policy.asks_steadily
        no_rate = steady and policy.crawl_delay is None
        interval = NO_RATE if no_rate else self._interval_now(policy, took, moment)
        if text is not None and own_agent and steady:
            text.interval = interval
        return interval

    @staticmethod
    def _interval_now(policy: Policy, took: float | None, moment: Moment) -> RobotsInterval:
        wall = moment.wall_time
        at = utc(wall)
        seconds = policy.interval(at, took)
        if seconds is None:
            return NO_RATE
        if policy.request_rates:
            # The hours of a slower Request-rate may begin before the request arrives.
            later = utc(wall + TRANSIT_SECONDS)
            then = policy.interval(later, took)
            if then is not None and then > seconds:
                seconds, at = then, later
        return RobotsInterval(seconds, policy.interval_source(at, took))

    # --- what keeps a host from being asked -----------------------------------------------

    def note(self, record: Record) -> None:
        """Note a new record, or one for which a URL is deferred, for `file_holdups`."""
        origin, windows = record.origin, record.text is not None and record.text.windows
        host = host_of(origin)
        noted = self.noted.get(host)
        if record.policy_only and not windows and origin in _usual_origins(host):
            if noted is not None:
                noted.pop(origin, None)
                if not noted:
                    del self.noted[host]
            return
        if noted is None:
            self.noted.make_room(_MAX_NOTED_HOSTS)
            noted = self.noted[host] = {}
        noted[origin] = None
        if len(noted) > _MAX_NOTED_ORIGINS:
            del noted[next(iter(noted))]

    def file_holdups(
        self, host: str, look: Callable[[str], Record | None], clock: TwoClocks
    ) -> list[HostHoldup]:
        """Return which files defer every URL of an origin of the host at the time of `clock`, to
        the gate's own agent. `look` returns the record of an origin. It changes nothing, so it may
        be called in another thread."""
        if (noted := self.noted.get(host)) is None:
            return []
        now, wall, answers = clock.monotonic(), clock.wall(), False
        found: list[HostHoldup] = []
        for origin in dict.fromkeys((*_usual_origins(host), *tuple(noted))):
            record = look(origin)
            if record is None or not record.usable(now):
                continue  # its file is fetched for the next question
            standing = record.standing(clock)
            ruling = _for_all(standing) or _outside_visit_time(standing, utc(wall))
            if ruling is None or ruling.verdict is Verdict.ALLOW:
                answers = True
            elif ruling.retry_at is not None:
                outside = ruling.reason is Reason.OUTSIDE_VISIT_TIME
                more = "" if outside or standing.status is None else f" ({standing.status})"
                until = now + ruling.retry_at.timestamp() - wall
                kind = "visit-time" if outside else "file"
                found.append(HostHoldup(kind, origin, until, f"{ruling.reason}{more}"))
        for one in found:
            one.partly = answers
        return found

    # --- the cache ----------------------------------------------------------------------

    def recall(self, url: str, agent: str, clock: TwoClocks) -> Decision | None:
        """Decide about a URL whose origin is warm, by the decision cache.

        It gives the same answers as `decide`. None if the URL is not plain text, or if the guard
        and the operator's rules have to be consulted.
        """
        now = clock.monotonic()
        found = self._cache.warm_record(url, now)
        if found is None:
            return None
        record, path = found
        if (cached := record.cached) is not None:
            origin: CachedOrigin | None = cached.get(agent)
            if origin is not None and origin.cacheable:
                return self.build_cached(origin, path, url, next(self.numbers))
        if agent != self.agent or record.ready != self._cache.rules_version:
            return None
        text, moment = record.text, Moment(now, clock.wall())
        if text is not None and text.parsed is None and text.size >= LARGE:
            return None
        decision = self._by_record(url, path, agent, record, moment)
        self._cache_decision(decision, path, record, agent, moment)
        return decision

    def find(self, url: str, agent: str, now: float) -> tuple[CachedOrigin, str] | None:
        """Return the cache entry of the URL's origin, and the URL's path, as `recall` uses them."""
        return self._cache.find(url, agent, now)

    def build_cached(self, origin: CachedOrigin, path: str, url: str, number: int) -> Decision:
        """Build the decision about a URL from the cache entry of its origin; `number` becomes its
        id."""
        cached = self._cached_decision(origin, path)
        return replace(cached.decision, url=url, id=f"{self._prefix}{number:x}")

    def _cached_decision(self, origin: CachedOrigin, path: str) -> CachedDecision:
        """Return the cached decision about a path, made first if need be, and count it."""
        code = origin.rule_of(path)
        cached = origin.decisions.get(code)
        if cached is None:
            cached = self._cache_rule(origin, code, path)
        cached.counter[0] += 1
        return cached

    def _cache_rule(self, origin: CachedOrigin, code: int, path: str) -> CachedDecision:
        """Cache the decision of a rule that no URL matched before."""
        if code == ROBOTS_FILE:  # RFC 9309 section 2.2.2 (RFC-20)
            ruling = _ROBOTS_FILE
        else:
            match = origin.policy.match_of(code, path, origin.origin)
            ruling = _judge(origin.policy, match, origin.reason, (), origin.first_decision.note)
        decision = replace(
            origin.first_decision,
            verdict=ruling.verdict,
            reason=ruling.reason,
            rule=ruling.rule,
            crawl_delay=ruling.crawl_delay,
            conflict=ruling.conflict,
            clamped=ruling.clamped is not None,
            note=ruling.clamped,
        )
        return self._cache.add_decision(origin, code, decision)

    def write(self, url: str, agent: str, now: float) -> WrittenDecision | None:
        """Recall a decision to be sent as JSON. None if the cache does not have it."""
        found = self._cache.find(url, agent, now)
        if found is None:
            return None
        return WrittenDecision(self._cached_decision(*found), url, next(self.numbers))

    def write_many(self, urls: Sequence[str], agent: str, now: float) -> DecisionBatch:
        """Recall decisions about many URLs, to be sent as JSON.

        A decision is also missing if its rule decided no URL before. They are not yet counted.
        """
        return self._cache.write_many(urls, agent, now, self.numbers)

    def _cache_decision(
        self, decision: Decision, path: str, record: Record, agent: str, moment: Moment
    ) -> None:
        """Cache what makes the next questions about a warm record cheaper."""
        origin = self._cache.entry(record, agent)
        if origin is None:
            text = record.text
            # The decision about /robots.txt itself is not made by a rule of the file.
            if not record.reachable or decision.reason is Reason.ROBOTS_FILE:
                return
            frequent, own = self._cache.count_question(record), agent == self.agent
            if not frequent and (not own or record.ready == self._cache.rules_version):
                return
            rules = None if frequent else self._flat(record, text, agent)
            if rules is None:
                policy = self.policy(record, text, agent)
                # With a Visit-time each decision depends on the clock: nothing can be cached.
                if policy.timed:
                    return
                if own and text is not None and text.parsed is not None and text.ready is None:
                    text.ready = policy
            if own:
                record.ready, record.rules = self._cache.rules_version, rules
            if not frequent:
                return
            hourly = bool(policy.request_rates)
            origin = self._cache.add_origin(
                record,
                policy,
                agent,
                decision,
                interval=None if hourly else self.interval(record, agent, moment),
                # Whether the interval is clamped, which a decision shows, depends on the hour.
                cacheable=not (hourly and self._max_interval is not None),
            )
        if origin is not None and origin.cacheable:
            self._cache.add_decision(origin, origin.rule_of(path), decision)

    # --- without a file -----------------------------------------------------------------

    def invalid(self, raw: str, problem: str, agent: str) -> Decision:
        """Return DENY for a malformed URL of a batch, where an exception would lose the others."""
        return self._simple(Verdict.DENY, Reason.INVALID_URL, raw, None, agent, note=problem)

    def internal_error(self, raw: str, agent: str, error: Exception, moment: Moment) -> Decision:
        """Return DEFER for a URL whose question met an internal error, and log the error."""
        _log.error("no decision about %s", mask(raw, query=False), exc_info=error)
        note = f"an internal error of gatekeeper ({type(error).__name__}); see its log"
        return self._defer(Reason.INTERNAL, raw, None, agent, moment, _ERROR_RETRY_SECONDS, note)

    def refused(self, url: str, header: str, note: str) -> Decision:
        """Return `refused_request` with an id (T20). The guard counts it."""
        return refused_request(url, header, note, self._next_id())

    def robots_file(self, raw: str, target: Target, agent: str) -> Decision | None:
        """Return ALLOW if the URL is a /robots.txt, whatever is known of its origin; else None."""
        if not is_robots_txt(target.path):
            return None
        return self._simple(Verdict.ALLOW, Reason.ROBOTS_FILE, raw, target, agent)

    def unknown(self, raw: str, target: Target, agent: str, moment: Moment) -> Decision:
        """Return DEFER: nothing usable is cached, and the question may not wait for the file."""
        return self._defer(Reason.UNKNOWN, raw, target, agent, moment, _RETRY_SECONDS)

    def own_lease(
        self, raw: str, target: Target, agent: str, held: str, whose: str, moment: Moment
    ) -> Decision:
        """Return DEFER: the file needs a turn of a host whose lease the asking task, or the task
        that started it, holds.

        `held` is the URL of that lease, `whose` describes its holder.
        """
        note = f"robots.txt would wait for {held}, {whose}"
        return self._defer(Reason.OWN_LEASE, raw, target, agent, moment, _RETRY_SECONDS, note)

    def no_turn(
        self, raw: str, target: Target, agent: str, why: str | TurnError, moment: Moment
    ) -> Decision:
        """Return DEFER: the host grants no turn.

        `why` is the error: the fleet's ledger is lost, or the budget is spent; or a text: why the
        clock that a turn starts can't be written to the state file.
        """
        note = str(why)
        if isinstance(why, BudgetSpent):
            reason, seconds = Reason.BUDGET, why.seconds
        elif isinstance(why, LedgerLost):
            reason, seconds = Reason.FLEET, _FLEET_RETRY_SECONDS
        else:
            reason, seconds = Reason.STORAGE, _STORAGE_RETRY_SECONDS
            note = f"the clock of {target.host} can't be saved: {why}"
        return self._defer(reason, raw, target, agent, moment, seconds, note)

    def what_if(
        self, raw: str, target: Target, agent: str, policy: Policy, row: OutcomeRow, wall: float
    ) -> Decision:
        """Return the decision of a hypothetical file, fetched with the outcome of `row`, at that
        wall time. It is not counted and has no id."""
        if is_robots_txt(target.path):  # RFC 9309 section 2.2.2 (RFC-20)
            ruling = _ROBOTS_FILE
        elif row.verdict is not None:
            ruling = _Ruling(row.verdict, row.reason)
        else:
            match = policy.match_path(target.path, target.origin)
            ruling = _judge(policy, match, row.reason, (wall,), None)
        return Decision(
            verdict=ruling.verdict,
            reason=ruling.reason,
            url=mask(raw),
            origin=target.origin,
            user_agent=agent,
            state=row.state,
            rule=ruling.rule,
            retry_at=ruling.retry_at,
            crawl_delay=ruling.crawl_delay,
            conflict=ruling.conflict,
        )

    def _defer(
        self,
        reason: Reason,
        raw: str,
        target: Target | None,
        agent: str,
        moment: Moment,
        seconds: float,
        note: str | None = None,
    ) -> Decision:
        """Return DEFER for that many seconds."""
        at = utc(moment.wall_time + seconds)
        return self._simple(Verdict.DEFER, reason, raw, target, agent, note=note, retry_at=at)

    def _simple(
        self,
        verdict: Verdict,
        reason: Reason,
        raw: str,
        target: Target | None,
        agent: str,
        *,
        state: State | None = None,
        note: str | None = None,
        retry_at: datetime | None = None,
    ) -> Decision:
        self._counts[verdict, reason] += 1
        return Decision(
            verdict=verdict,
            reason=reason,
            url=mask(raw) if target is None else _masked(raw),
            origin="" if target is None else target.origin,
            user_agent=agent,
            state=state,
            retry_at=retry_at,
            note=note,
            id=self._next_id(),
        )


def _masked(raw: str) -> str:
    """Return the URL with credentials masked; only one with an `@` can have them."""
    return mask(raw) if "@" in raw else raw


def _utc_or_none(wall: float | None) -> datetime | None:
    return None if wall is None else utc(wall)
