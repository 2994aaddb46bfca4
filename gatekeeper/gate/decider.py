"""`Decider`: makes the `Decision` about a URL from what is cached about its origin.

`rule_on` is the only function that makes a ruling of the rules of a file and a path, and `_told`
the only one that makes a `Decision` of one: every question and every lease comes to them. Nothing
here reads a clock, waits or does I/O; the moment is an argument.

There are two roads to them. The long one (`decide_by`) asks the guard, the operator's rules and the
record. On a warm origin their answers do not change, so the long road leaves a `Frame` in the
record, the decision without its path; the short road (`recall`) fills in the frame. Where a verdict
is enough, for `allowed` and until the decision of a lease is read, the rules alone give it.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from gatekeeper.config import Config, token_of
from gatekeeper.decision import BLOCKED_NOTE, Decision, Reason, State, Verdict
from gatekeeper.descriptors import describe_shortage
from gatekeeper.errors import InvalidURL, LedgerLost
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.outcomes import Outcome, OutcomeRow
from gatekeeper.fetching.records import (
    FileText,
    FileTexts,
    Frame,
    Moment,
    Record,
    Standing,
    TwoClocks,
)
from gatekeeper.http_fields import utc
from gatekeeper.pacing.host_settings import BudgetSpent, HostRules, explained
from gatekeeper.pacing.scopes import NO_RATE, UNKNOWN
from gatekeeper.pacing.waiters import HostHoldup
from gatekeeper.robots import Policy, RobotsTxt, Rule, product_token
from gatekeeper.robots.flat import NO_RULE, FlatRules
from gatekeeper.robots.patterns import is_normal_path, is_robots_txt
from gatekeeper.robots.timing import RobotsInterval, may_visit, next_visit
from gatekeeper.split_dict import MASK, SplitDict
from gatekeeper.urls import (
    MAX_URL,
    Target,
    host_of,
    is_sent_as_written,
    mask,
    not_text,
    parse,
    usual_origins,
    without_userinfo,
)

_log = logging.getLogger(__name__)

TRANSIT_SECONDS = 1.0
"""Seconds that a granted request may take to arrive: it must be allowed at their end, too."""

_RETRY_SECONDS = 1.0
"""Retry delay in seconds if only the caller itself is in the way of an answer."""

_ERROR_RETRY_SECONDS = 60.0
"""Retry delay in seconds after an internal error."""

_LEASE_RETRY_SECONDS = {Reason.STORAGE: 5.0, Reason.FLEET: 2.0}
"""Retry delay in seconds while the state file can't be written, or the fleet grants no lease."""

NoLeaseError = LedgerLost | BudgetSpent
"""Errors, beside a state file that can't be written, for which no page of a host gets a lease."""

DENY_ALL = RobotsTxt.parse("User-agent: *\nDisallow: /\n")
"""Used instead of a file that can't be fetched: nothing is allowed (RFC 9309 section 2.3.1.4,
RFC-37)."""


class PathRuling(msgspec.Struct, frozen=True, gc=False):
    """What is said about a path at one moment: the verdict, with what explains it."""

    verdict: Verdict
    reason: Reason
    rule: Rule | None = None
    conflict: bool = False
    retry_at: datetime | None = None
    note: str | None = None


_ALLOW, _DENY, _DEFER = Verdict.ALLOW, Verdict.DENY, Verdict.DEFER
_RULE = Reason.RULE
_ROBOTS_FILE = PathRuling(_ALLOW, Reason.ROBOTS_FILE)
""""/robots.txt" is implicitly allowed (RFC 9309 section 2.2.2, RFC-20; the drafts of 1996 and 2.0,
R96-16 and V2-34)."""
LATELY = 1_000
"""A text at rest wakes if its origin was asked about lately: if no more than so many questions lie
between that `Decider.asked_lately` counts. A crawl that asks a hundred thousand origins one by one
wakes none."""
_MAX_NOTED_HOSTS = 100_000
_MAX_NOTED_ORIGINS = 16
"""The most hosts, and origins of each, that `Decider.note` keeps; beyond, the oldest are dropped:
their clocks alone tell the state of the host then."""


def rule_on(
    policy: Policy, path: str, origin: str, otherwise: Reason, walls: Sequence[float] = ()
) -> PathRuling:
    """Return the ruling of a file on a path.

    `otherwise` is the reason if no rule matches: that of the file, such as no_file, empty_file or
    soft_404. `walls` are the times at which Visit-time must admit a visit; empty if the policy has
    no Visit-time.
    """
    match = policy.match_path(path, origin)
    rule = match.rule
    if not match.allowed:
        return PathRuling(_DENY, otherwise if rule is None else _RULE, rule, match.conflict)
    if rule is None and is_robots_txt(path):
        return _ROBOTS_FILE
    if walls and policy.timed:
        closed = [at for at in map(utc, walls) if not policy.may_visit(at)]
        if closed:  # Robot Exclusion Standard 2.0, Visit-time (V2-24)
            outside, then = Reason.OUTSIDE_VISIT_TIME, policy.next_visit(closed[0])
            return PathRuling(_DEFER, outside, rule, match.conflict, then)
    return PathRuling(_ALLOW, otherwise if rule is None else _RULE, rule, match.conflict)


def _for_all(standing: Standing, record: Record) -> PathRuling | None:
    """Return the ruling about every URL of an origin without a text that applies, else None."""
    verdict, reason = standing.verdict, standing.reason
    if verdict is None and standing.applies:
        return None
    note = None
    if reason in (Reason.EGRESS_POLICY, Reason.BLOCKED):
        # T2: everything that the guard refused is shown with the same reason.
        reason, note = Reason.BLOCKED, BLOCKED_NOTE
    elif reason is Reason.OVERLOADED and record.current.outcome is Outcome.NO_DESCRIPTORS:
        note = describe_shortage()
    elif reason is Reason.TLS:
        note = record.current.metadata.cause or None
    retry_at = _utc_or_none(standing.retry_at)
    return PathRuling(verdict or _DEFER, reason, retry_at=retry_at, note=note)


def _told(frame: Decision, ruling: PathRuling, url: str, decision_id: str = "") -> Decision:
    """Return the decision about a URL: the frame with what the ruling says."""
    if ruling is _ROBOTS_FILE:  # what the file asks for does not concern itself
        frame = replace(frame, crawl_delay=None, clamped=False, note=None)
    return replace(
        frame,
        verdict=ruling.verdict,
        reason=ruling.reason,
        url=url,
        rule=ruling.rule,
        retry_at=ruling.retry_at,
        conflict=ruling.conflict,
        note=ruling.note or frame.note,
        id=decision_id,
    )


def _frame(
    origin: str, agent: str, state: State | None = None, reason: Reason = _RULE, **known: Any
) -> Decision:
    """Return a decision without a ruling; `known` are other fields of it."""
    return Decision(
        verdict=_ALLOW,
        reason=reason,
        url="",
        origin=origin,
        user_agent=agent,
        state=state,
        **known,
    )


def _lease_note(reason: Reason, host: str, why: str) -> str:
    return f"a lease of {host} can't be saved: {why}" if reason is Reason.STORAGE else why


def _outside_visit_time(standing: Standing, at: datetime) -> PathRuling | None:
    """Return the deferral of every URL that the text allows, if `at` is outside its Visit-time."""
    windows = () if standing.text is None else standing.text.windows
    if not windows or may_visit(windows, at):
        return None
    retry_at = next_visit(windows, at)
    return PathRuling(Verdict.DEFER, Reason.OUTSIDE_VISIT_TIME, retry_at=retry_at)


def refused_request(url: str, header: str, note: str, decision_id: str = "") -> Decision:
    """Return DENY for a request that the guard refused at the socket.

    `header` is its User-Agent header, `note` the guard's note. All refusals share one exception
    class and one reason (T2).
    """
    try:
        origin = parse(url).origin
    except InvalidURL:
        origin = ""
    frame = _frame(origin, product_token(header) or header)
    return _told(frame, PathRuling(_DENY, Reason.BLOCKED, note=note), mask(url), decision_id)


class Decider:
    """Builds every decision of a gate.

    Its state is the counts of decisions.
    """

    def __init__(
        self,
        config: Config,
        *,
        agent: str,
        guard: Guard | None,
        overrides: HostRules,
        cause: Callable[[str, str], str | None] = lambda _host, _kind: None,
    ) -> None:
        """`agent` is the product token of the gate's own name; `overrides` are the operator's
        `[[host]]` rules; `cause(host, "fleet" or "storage")` returns why the host gets no lease."""
        self._config = config
        self.agent: str = agent
        self._max_interval = config.pacing.max_interval
        # An id is a random prefix of the process and a number, so that it needs neither a clock
        # nor a random number of its own.
        prefix = f"{os.getpid():x}{secrets.token_hex(4)}"
        self._ids = map(f"{prefix}-{{:x}}".format, itertools.count(1))
        self._guard = guard
        self._overrides = overrides
        self._cause = cause
        self.records: SplitDict[str, Record] = SplitDict()
        """Records by origin; the directory adds and removes them."""
        self.texts: FileTexts = FileTexts(config, agent)
        """The texts of all records."""
        self._counts: Counter[tuple[Verdict, Reason]] = Counter()
        self.no_text: FileText = self.texts.read(b"")
        """Has the policies of all origins without a file."""
        self.policy(self.no_text, agent, wake=True)
        self.noted: SplitDict[str, dict[str, None]] = SplitDict()
        """By host, its origins for `file_holdups` (each a dictionary as ordered set)."""
        self._first, self._table = self.records.first, self.records.table
        """The numbers in the decision ids."""
        self._version = 1
        """The number of the operator's latest change; see `Record.ready`."""
        self._asked = 0
        """Questions that took the long road."""

    def token(self, user_agent: str | None) -> str:
        """Return the product token of a name; None: the gate's own. Raises ConfigError."""
        return self.agent if user_agent is None else token_of(user_agent)

    def adjust(self, config: Config) -> None:
        """Apply the pacing settings of another configuration."""
        self._config = config
        self._max_interval = config.pacing.max_interval
        self.forget()

    def forget(self) -> None:
        """Prepare every record anew: the operator's rules or the configuration changed."""
        self._version += 1

    def clear(self) -> None:
        """Drop every record: no question may be answered any more."""
        self.records.clear()
        self.texts.clear()

    def counts(self) -> dict[tuple[Verdict, Reason], int]:
        """Count the decisions given so far, by verdict and reason."""
        return dict(self._counts)

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
        path, standing = target.path, record.standing(moment)
        frame, lately = self._frame_of(record, standing, agent), self.asked_lately(record)
        if is_robots_txt(path):
            return self.tell(frame, _ROBOTS_FILE, raw)
        ruling = self._without_lease(record, moment, _for_all(standing, record))
        if ruling is None:
            ruling, frame = self._by_text(frame, path, record, standing, moment, lately=lately)
        if agent == self.agent and record.policy_only and moment.now < record.fresh_until:
            self._prepare(record, frame, moment, lately=lately)
        if ruling.verdict is _DEFER:
            self.note(record)
        return self.tell(frame, ruling, raw)

    def decide_without_file(self, raw: str, target: Target, agent: str) -> Decision | None:
        """Decide by the guard and the operator's rules, without the file. None if neither does."""
        refusal = None if self._guard is None else self._guard.refuses_target(target)
        if refusal is not None:
            return self._simple(Verdict.DENY, Reason.BLOCKED, raw, target, agent, note=refusal.note)
        rule = self._overrides.find(target.host)
        if rule is None or rule.robots == "obey":
            return None
        verdict = Verdict.ALLOW if rule.robots == "allow" else Verdict.DENY
        frame = _frame(target.origin, agent, State.OVERRIDE)
        ruling = PathRuling(verdict, Reason.OPERATOR, note=explained(rule))
        return self.tell(replace(frame, expires_at=rule.until), ruling, raw)

    @staticmethod
    def _frame_of(record: Record, standing: Standing, agent: str) -> Decision:
        return _frame(
            record.origin,
            agent,
            standing.state,
            reason=standing.reason,
            robots_status=standing.status,
            fetched_at=_utc_or_none(standing.fetched_at),
            expires_at=_utc_or_none(standing.expires_at),
            hops=standing.hops,
        )

    def _without_lease(
        self, record: Record, moment: Moment, ruling: PathRuling | None
    ) -> PathRuling | None:
        """Say why the host grants no lease, if that is why there is no file."""
        seconds = None if ruling is None else _LEASE_RETRY_SECONDS.get(ruling.reason)
        if ruling is None or seconds is None:
            return ruling
        host, retry_at = host_of(record.origin), utc(moment.wall_time + seconds)
        why = self._cause(host, ruling.reason)
        note = None if why is None else _lease_note(ruling.reason, host, why)
        return replace(ruling, retry_at=retry_at, note=note)

    def _by_text(
        self,
        frame: Decision,
        path: str,
        record: Record,
        standing: Standing,
        moment: Moment,
        *,
        lately: bool,
    ) -> tuple[PathRuling, Decision]:
        """Return the ruling of the text on a path, and the frame with what the text asks for."""
        text, agent = standing.text, frame.user_agent
        if text is not None and agent == self.agent and not lately and self._max_interval is None:
            # The form at rest knows that no rule matches; to name the rule is too much for it.
            flat = text.rules
            if isinstance(flat, FlatRules) and flat.score(path) == NO_RULE:
                frame = replace(frame, crawl_delay=flat.crawl_delay)
                return PathRuling(_ALLOW, frame.reason), frame
        policy = self.policy(text, agent, wake=lately)
        if text is not None and agent == self.agent:
            text.windows = policy.visit_times
        walls = (moment.wall_time, moment.wall_time + moment.transit)
        ruling = rule_on(policy, path, record.origin, frame.reason, walls)
        clamped, delay = self._clamped(policy, standing, moment), policy.crawl_delay
        if clamped is not None or delay is not None:
            frame = replace(frame, crawl_delay=delay, clamped=clamped is not None, note=clamped)
        return ruling, frame

    # --- warm origins -------------------------------------------------------------------

    def asked_lately(self, record: Record) -> bool:
        """Count a question that takes the long road, or is answered at rest. Return True if the
        last one about the record was lately."""
        self._asked += 1
        lately = 0 < record.asked > self._asked - LATELY
        record.asked = self._asked
        record.used = True
        return lately

    def _prepare(self, record: Record, frame: Decision, moment: Moment, *, lately: bool) -> None:
        """Leave in a record what makes the next question about it cheaper."""
        text, hourly = record.text or self.no_text, False
        if text.parsed is not None:
            hourly = bool(self.policy(text, self.agent).request_rates)
        if text.windows:
            return  # each decision depends on the clock
        if record.ready != self._version:  # an earlier frame may hold earlier settings
            record.ready, record.frame = self._version, None
        if not lately or text.parsed is None:
            return
        # Whether the interval is clamped, which a frame holds, may depend on the hour.
        if not (hourly and self._max_interval is not None):
            interval = None if hourly else self.interval(record, self.agent, moment)
            record.frame = Frame(frame, host_of(record.origin), interval)

    def find(self, url: str, now: float) -> Record | None:
        """Return the record of a URL that is written with its origin's exact text; None unless the
        record is ready and fresh. Raises TypeError for what is not text."""
        try:
            origin = url[: url.index("/", 8)]  # after `https://`
        except ValueError:
            return None
        except (AttributeError, TypeError):
            raise not_text(url) from None
        record = self._first.get(origin) or self._table[hash(origin) & MASK].get(origin)
        if record is None or record.ready != self._version or now >= record.fresh_until:
            return None
        if not record.used:
            record.used = True
        return record

    def recall(self, url: str, agent: str, clock: TwoClocks) -> Decision | None:
        """Decide as `decide` does about a URL of a warm origin.

        None if the record has no frame, for another agent than the gate's own, and if the URL is
        not written as it is sent.
        """
        record = self.find(url, clock.monotonic()) if agent == self.agent else None
        if record is None:
            return None
        frame, policy = record.frame, (record.text or self.no_text).own
        if frame is None or policy is None or len(url) > MAX_URL:
            return None
        path = url[len(record.origin) :]
        if ("/." in path or not is_normal_path(path)) and not is_sent_as_written(path):
            return None
        return self.tell_by(policy, frame.decision, url)

    def allows(self, record: Record, url: str) -> Policy | None:
        """Return the policy of the record's text if it is awake and allows a URL whose record
        `find` returned, and that is sent as written; else None: the long road decides."""
        text, path = record.text or self.no_text, url[len(record.origin) :]
        policy, rules = text.own, text.rules
        if policy is None or len(url) > MAX_URL:
            return None
        if rules is None:  # other dialects than RFC 9309
            allowed = is_sent_as_written(path) and policy.allows(path, record.origin)
        else:
            allowed = rules.allows_plain(path) is True
        return policy if allowed else None

    def tell_by(self, policy: Policy, frame: Decision, url: str) -> Decision:
        """Return the decision about a URL that is sent as written, by a policy of the frame's
        origin."""
        path = url[len(frame.origin) :]
        return self.tell(frame, rule_on(policy, path, frame.origin, frame.reason), url)

    def tell(self, frame: Decision, ruling: PathRuling, url: str) -> Decision:
        """Return the decision about a URL, counted and with an id."""
        self._counts[ruling.verdict, ruling.reason] += 1
        url = without_userinfo(url) if "@" in url else url  # only such a URL can have credentials
        return _told(frame, ruling, url, next(self._ids))

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

    def policy(self, text: FileText | None, agent: str, *, wake: bool = False) -> Policy:
        """Return the policy of a text for one agent; without a text, that of no file.

        A text in parsed form keeps its policies. A text at rest is parsed for this question only,
        but with `wake`, or if its rules have no form at rest, until it is put to rest again.
        """
        text = text or self.no_text
        policy = text.policy_for(agent)
        if policy is None:
            robots = text.robots
            policy = self.policy_of(robots, agent)
            if wake or (agent == self.agent and not text.flatten(policy)):
                self.texts.wake(text, robots)
            text.add_policy(policy, self._config.cache.max_agents)
        return policy

    def policy_of(self, robots: RobotsTxt, agent: str) -> Policy:
        """Return the policy of any file for one agent, by the `[robots]` settings."""
        return self._config.robots.policy(robots, agent)

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
        policy = self.policy(text, agent, wake=True)  # mostly a request comes next
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
        if record.policy_only and not windows and origin in usual_origins(host):
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
        for origin in dict.fromkeys((*usual_origins(host), *tuple(noted))):
            record = look(origin)
            if record is None or not record.usable(now):
                continue  # its file is fetched for the next question
            standing = record.standing(clock)
            ruling = _for_all(standing, record) or _outside_visit_time(standing, utc(wall))
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
        return refused_request(url, header, note, next(self._ids))

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
        """Return DEFER: the file needs a lease of a host whose lease the asking task, or the task
        that started it, holds.

        `held` is the URL of that lease, `whose` describes its holder.
        """
        note = f"robots.txt would wait for {held}, {whose}"
        return self._defer(Reason.OWN_LEASE, raw, target, agent, moment, _RETRY_SECONDS, note)

    def no_lease(
        self, raw: str, target: Target, agent: str, why: str | NoLeaseError, moment: Moment
    ) -> Decision:
        """Return DEFER: the host grants no lease.

        `why` is the error: the fleet's ledger is lost, or the budget is spent; or a text: why the
        clock that a lease starts can't be written to the state file.
        """
        if isinstance(why, BudgetSpent):
            reason, seconds = Reason.BUDGET, why.seconds
        else:
            reason = Reason.FLEET if isinstance(why, LedgerLost) else Reason.STORAGE
            seconds = _LEASE_RETRY_SECONDS[reason]
        note = _lease_note(reason, target.host, str(why))
        return self._defer(reason, raw, target, agent, moment, seconds, note)

    def what_if(
        self, raw: str, target: Target, agent: str, policy: Policy, row: OutcomeRow, wall: float
    ) -> Decision:
        """Return the decision of a hypothetical file, fetched with the outcome of `row`, at that
        wall time. It is not counted and has no id."""
        frame = _frame(target.origin, agent, row.state)
        if is_robots_txt(target.path):
            ruling = _ROBOTS_FILE
        elif row.verdict is not None:
            ruling = PathRuling(row.verdict, row.reason)
        else:
            ruling = rule_on(policy, target.path, target.origin, row.reason, (wall,))
            frame = replace(frame, crawl_delay=policy.crawl_delay)
        return _told(frame, ruling, mask(raw))

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
        note: str | None = None,
        retry_at: datetime | None = None,
    ) -> Decision:
        frame = _frame("" if target is None else target.origin, agent)
        url = mask(raw) if target is None else raw
        return self.tell(frame, PathRuling(verdict, reason, retry_at=retry_at, note=note), url)


def _utc_or_none(wall: float | None) -> datetime | None:
    return None if wall is None else utc(wall)
