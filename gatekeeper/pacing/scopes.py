"""Scopes: what a clock belongs to, and everything that says when it is due.

A scope is a host, or something that hosts share: an address, a registered domain, a named
group. Each has a clock (`Scope`), an interval that lies between its requests
(`interval_for`), and, where its host ever refused, failed or was slow, a history of that
(`ScopeHistory`, with `BackOff` for what refusals have taught). `Scope.due_at` puts them together
and is the only place that says when a request may start.

Nothing here does I/O or reads a clock: the time is a parameter. Moments are monotonic seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from gatekeeper.clock import number, utc
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.ledger import Report, ScopeClock
from gatekeeper.pacing.rules import DAY, DailyBudget, ScopeSettings, Usage
from gatekeeper.robots.timing import RobotsInterval

INF = float("inf")
LONGEST = 10 * 366 * 86_400.0
"""Ten years, in seconds: no interval or block is kept for longer than a datetime can say."""
DURABLE = 1.0
"""A clock that lies further ahead than so many seconds is kept on disk before a grant or a report
returns, and so outlives the process. Shorter ones are covered by one note that a process ran."""
PROVEN = 2
"""A host of which so many requests in a row were answered is one that answers."""
_MAX_INTERVALS = 10_000
_EVEN = 1.0 + 1e-9
"""Tolerance of a comparison: halving what was doubled may miss by a rounding error."""


@dataclass(slots=True, eq=False, repr=False)
class BackOff:
    """How far refusals slow one host, and when it is asked faster again: a state machine.

    A site that answers 429 or 503 says that it was asked too often, and not how often it may be
    asked. So the rate is found by trying (each number is a setting of `[pacing]`):

    * A refusal doubles the interval in force, from at least the host's own interval, or from
      `backoff_floor` where it has none. The interval that was refused is remembered, unless
      nothing was served for `backoff_initial` or longer: then the site refuses everything for a
      while, which says nothing of the interval.
    * The interval in force halves for every `backoff_answers` good answers or `backoff_quiet`
      seconds without a refusal, whichever comes first, down to twice the remembered one.
    * After `backoff_retry` that one is tried again, and while that goes well the interval in force
      halves further, until it is the host's own once more. A site may count by the hour or by the
      day: all is forgotten when the trial has lasted as long as the wait before it.
    * A trial that is refused sooner is put off for twice as long as the one before, up to
      `backoff_retry_max`. A refusal outside a trial, `forgive_after` seconds after the last one,
      shows that what had been learnt is not so (a fault, or another limit): the waits begin anew.

    A single 429 costs a factor of two for an hour; a site with a fixed limit is met a few times
    on the first day and once or twice a day from then on.

    `usual` is everywhere the interval without this, in seconds: what the text, the operator and
    the host's latency ask for. One is made at the first refusal.

    >>> pacing, taught = PacingConfig(), BackOff()
    >>> taught.refuse(429, usual=0.05, now=0.0, until=1.0, pacing=pacing)
    >>> taught.in_force(0.05, 3599.0, pacing), taught.in_force(0.05, 3601.0, pacing)
    (0.1, 0.0)
    """

    refused: float = 0.0
    """The interval that was refused last."""
    slowed: float = 0.0
    """Seconds that are kept to instead of the usual ones; 0: the usual ones."""
    status: int = 0
    """Of the last refusal; 0: an earlier version did not keep it."""
    when: float = -INF
    """The moment of the last refusal."""
    calm_from: float = -INF
    """The end of the block that it brought."""
    served: bool = True
    """There was a good answer since then."""
    wait: float = 0.0
    """Seconds from a refusal to the trial."""
    try_at: float = INF
    trial: float = INF
    """When the trial began; inf: it has not."""
    since: float = -INF
    """The last refusal's end, the beginning of the trial, or the last halving."""
    good: int = 0
    """Good answers since then."""
    guessed: bool = False
    """What was refused was our default: the host's own interval was not known then."""
    forgotten: bool = False
    """The host was asked at its usual pace again, and all was well: drop this."""
    _usual: float = 0.0

    # --- what happens -------------------------------------------------------------------

    def refuse(
        self,
        status: int,
        *,
        usual: float,
        now: float,
        until: float,
        pacing: PacingConfig,
        guessed: bool = False,
    ) -> None:
        """A 429 or 503. `until`: the end of the block that it brought; `guessed`: `usual` is a
        default, as the host's robots.txt could not be had yet.
        """
        self._settle(usual, now, pacing)
        first = self.wait == 0.0 or self.forgotten
        # A robots.txt that can't be had is asked for now and then, whatever the interval says:
        # to be refused over and over says nothing about the pace of pages.
        counts = first or not (guessed and self.guessed)
        if first:
            self.wait = min(pacing.backoff_retry, pacing.backoff_retry_max)
        elif counts and self.trial < INF:
            again = 2.0 * self.wait if now < self._believed_at(pacing) else pacing.backoff_retry
            self.wait = min(again, pacing.backoff_retry_max)
        elif counts and now >= self.calm_from + pacing.forgive_after:
            self.wait = min(pacing.backoff_retry, pacing.backoff_retry_max)
        level = self.refused
        if counts:
            level = max(usual, self.slowed) or pacing.backoff_floor
            soon = now - self.when < pacing.backoff_initial
            if first or self.served or self.trial < INF or soon:
                self.refused = level
            self.guessed, self.served = guessed, False
        self._slow_to(2.0 * level, pacing)
        self.status, self.when, self.forgotten = status, now, False
        self.since = self.calm_from = max(now, until)
        # A long block is no good conduct: the pace after it is at first the slower one.
        self.try_at = max(now + self.wait, until + pacing.backoff_quiet)

    def answered(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """A good answer to a request that was sent since the last refusal."""
        self._settle(usual, now, pacing)
        self.served = True
        if not self._eases():
            return
        self.good += 1
        if self.good >= pacing.backoff_answers:
            self._halve(now, pacing)

    def found(self, usual: float, pacing: PacingConfig) -> None:
        """The host's own interval is known now: what was refused by a guess is that, if less."""
        if self.guessed:
            self.guessed = False
            self.refused = min(self.refused, usual or pacing.backoff_floor)
            if self.trial == INF:
                self._slow_to(2.0 * self.refused, pacing)

    def restore(
        self,
        refused: float,
        status: int,
        when: float,
        wait: float,
        until: float,
        pacing: PacingConfig,
        slowed: float = 0.0,
    ) -> None:
        """As an earlier process kept it: what was learnt since that refusal is learnt anew.

        `slowed`: the interval that was in force then.
        """
        self.refused, self.status, self.when = refused, status, when
        self.wait = min(wait or pacing.backoff_retry, pacing.backoff_retry_max)
        self._slow_to(max(2.0 * refused, slowed), pacing)
        self.since = self.calm_from = max(when, until)
        self.try_at = max(when + self.wait, until + pacing.backoff_quiet)

    # --- what follows -------------------------------------------------------------------

    def in_force(self, usual: float, now: float, pacing: PacingConfig) -> float:
        """Seconds that have to lie between two requests now; 0: nothing but the usual ones."""
        self._settle(usual, now, pacing)
        return self.slowed

    def over(self, now: float, pacing: PacingConfig) -> bool:
        """Is there nothing left to be remembered?"""
        self._settle(self._usual, now, pacing)
        return self.forgotten

    def sentence(self, now: float, wall: float, pacing: PacingConfig) -> str:
        """What is in force, since when, and until when, in one line; empty: nothing is.

        `wall` is the same moment as `now`. Moments are in UTC.
        """
        usual = self._usual
        self._settle(usual, now, pacing)
        if self.slowed <= usual:
            return ""
        times = self.slowed / usual if usual else 0.0
        if times:
            count = "twice" if abs(times - 2.0) < 0.005 else f"{number(times)} times"
            pace = f"{count} the usual {number(usual)} s"
        else:
            pace = f"{number(self.slowed)} s instead of none"
        less = self.slowed / 2.0
        goal = "the usual rate" if self._usual_enough(less, pacing) else f"one in {number(less)} s"
        again = f"{goal} is tried again at {_clock(self._eases_by(pacing) - now, wall)}"
        if self._eases():
            again += f", or after {pacing.backoff_answers - self.good} good answers"
        what = f"a {self.status}" if self.status else "a refusal"
        return f"{pace} since {what} at {_clock(self.when - now, wall)}; {again}"

    def _settle(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """Let happen what time alone has brought since the last look."""
        self._usual = usual
        while self.trial == INF and now >= (by := self._eases_by(pacing)):
            if by == self.try_at:
                self.trial = by
            self._halve(by, pacing)
        if self.trial == INF:
            return
        while self.slowed and now >= (by := self._eases_by(pacing)):
            self._halve(by, pacing)
        self.forgotten = not self.slowed and now >= self._believed_at(pacing)

    def _eases(self) -> bool:
        """Does good conduct shorten the interval in force now?"""
        return self.slowed > (2.0 * self.refused * _EVEN if self.trial == INF else 0.0)

    def _eases_by(self, pacing: PacingConfig) -> float:
        """When time alone shortens it next."""
        if not self._eases():
            return self.try_at
        by = self.since + pacing.backoff_quiet
        return by if self.trial < INF else min(by, self.try_at)

    def _believed_at(self, pacing: PacingConfig) -> float:
        """When a trial that goes well for so long has shown that nothing is refused any more."""
        return max(self.trial + self.wait, self.since + pacing.backoff_quiet)

    def _slow_to(self, seconds: float, pacing: PacingConfig) -> None:
        self.slowed = max(self.refused, min(seconds, pacing.backoff_max))
        self.trial, self.good = INF, 0

    def _halve(self, at: float, pacing: PacingConfig) -> None:
        less = self.slowed / 2.0
        if self.trial == INF:
            less = max(less, 2.0 * self.refused)
        self.slowed = 0.0 if self._usual_enough(less, pacing) else less
        self.since = at
        self.good = 0

    def _usual_enough(self, seconds: float, pacing: PacingConfig) -> bool:
        return seconds <= (self._usual or pacing.backoff_floor) * _EVEN


def _clock(ahead: float, wall: float) -> str:
    """The time of day, with the day where that is another one."""
    moment, today = utc(wall + ahead), utc(wall)
    return f"{moment:%H:%M}" if moment.date() == today.date() else f"{moment:%Y-%m-%d %H:%M}"


REFUSALS = (429, 503)
"""What a site answers that is asked too often, RFC 6585 section 4 and RFC 9110 section 15.6.4."""
LATENCY_WEIGHT = 0.2
ERROR_CEILING = 60.0


class RequestReport(msgspec.Struct, frozen=True, gc=False):
    """What came of one request, in seconds and bytes; all None: nothing is known."""

    status: int | None = None
    elapsed: float | None = None
    """Seconds from the start of the request to the head of the response."""
    retry_after: float | None = None
    """Seconds that the response asked for."""
    size: int | None = None
    spread: float = 0.0
    """Seconds between requests that the RateLimit field allows, 0 where there is none:
    draft-ietf-httpapi-ratelimit-headers (HTTP-11)."""
    spread_for: float = 0.0
    """Seconds for which that holds."""
    under_way: bool = False
    """The request was sent before the host's last refusal came: it does not tell whether what
    was done about that helps."""

    @property
    def failed(self) -> bool:
        """A server error, or no response although the request took its time."""
        if self.status is None:
            return self.elapsed is not None
        return self.status >= 500

    @property
    def good(self) -> bool:
        """Only such a report may ever shorten an interval."""
        return self.status is not None and 200 <= self.status < 400


@dataclass(slots=True, eq=False, repr=False)
class ScopeHistory:
    """What one scope has shown and said: blocks, refusals, latency, errors, its RateLimit field.

    It exists only for scopes that have something to show: a host that answers well has none.
    Its circuit is closed, then open (blocked), then half open (one request at a time, whatever
    the concurrency), then closed again by a success, or open for twice as long.
    """

    blocked_until: float = -INF
    reason: str = ""
    failures: int = 0
    """Blocks in a row."""
    failed_at: float = -INF
    probing: bool = False
    """Half open: one request at a time until one succeeds."""
    refusals: int = 0
    """How often the host turned us away, those apart whose requests were under way."""
    back_off: BackOff | None = None
    """How far it is slowed by a 429 or 503; None where it is not."""
    errors: int = 0
    latency: float | None = None
    paused: bool = False
    said: float = 0.0
    said_until: float = -INF
    accuser: str = ""
    """Of an address: the host that was turned away last."""
    usage: Usage | None = None
    """What it was asked for today, where it has a budget."""

    def accused_by(self, host: str) -> bool:
        """An address: was another of its hosts turned away before this one?"""
        other = self.accuser
        self.accuser = host
        return other not in ("", host)

    def owes(self, now: float, pacing: PacingConfig) -> bool:
        """Is there anything here that must not be forgotten?"""
        return bool(
            self.paused
            or now < self.blocked_until
            or now < self.said_until
            or (self.usage is not None and now < self.usage.began + DAY)
            or (self.back_off is not None and not self.back_off.over(now, pacing))
            or self.errors
            or ((self.failures or self.probing) and not self._forgiven(now, pacing))
        )

    def slowed(self, now: float, wall: float, pacing: PacingConfig) -> str:
        """How far refusals slow the host, in one line; empty where they do not."""
        return "" if self.back_off is None else self.back_off.sentence(now, wall, pacing)

    def error_pause(self) -> float:
        """Seconds that errors in a row ask for: none for two, then 1, 2, 4 ... 60."""
        if self.errors < 3:
            return 0.0
        return min(ERROR_CEILING, 2.0 ** min(self.errors - 3, 10))

    def block(self, until: float, reason: str) -> None:
        """No request before `until`; an earlier end never shortens a later one."""
        if until > self.blocked_until:
            self.blocked_until = until
            self.reason = reason

    def unblock(self) -> None:
        """The operator's word: ask again now, one request first."""
        self.blocked_until = float("-inf")
        self.reason = ""

    def observe(
        self,
        report: RequestReport,
        now: float,
        usual: float,
        pacing: PacingConfig,
        rng: random.Random,
        *,
        guessed: bool = False,
    ) -> bool:
        """Take one report into account; True if it blocks the scope.

        `usual` is the interval of the request without what refusals, errors and a RateLimit
        field add; `guessed`: it is a default, for the host's robots.txt is not known yet.
        """
        self._note_latency(report, pacing)
        if report.spread:
            self.said = report.spread
            self.said_until = now + report.spread_for
        if report.status in REFUSALS or (
            # RFC 9110 section 10.2.3 (HTTP-08): it may come with redirects and refusals as well.
            report.retry_after is not None and (report.status is None or report.status >= 300)
        ):
            self._turned_away(report, now, pacing, rng)
            if report.status in REFUSALS and not (report.under_way and self.back_off):
                if self.back_off is None:
                    self.back_off = BackOff()
                self.back_off.refuse(
                    report.status,
                    usual=usual,
                    now=now,
                    until=self.blocked_until,
                    pacing=pacing,
                    guessed=guessed,
                )
            return True
        if report.failed:
            self.errors += 1
        elif report.good:
            self._succeeded(report, now, usual, pacing)
        return False

    def _turned_away(
        self, report: RequestReport, now: float, pacing: PacingConfig, rng: random.Random
    ) -> None:
        if self._forgiven(now, pacing):
            self.failures = 0
        if not (report.under_way and self.failures):
            # Many requests that were under way at once are turned away for one reason.
            self.failures += 1
            self.refusals += 1
        self.failed_at = now
        self.probing = True
        said = "no status" if report.status is None else str(report.status)
        if report.retry_after is not None:
            # A minimum: RFC 9110 section 10.2.3 (HTTP-08).
            wait = min(report.retry_after, LONGEST)
            reason = f"{said}, Retry-After {number(report.retry_after)}"
        else:
            doubled = pacing.backoff_initial * 2.0 ** min(self.failures - 1, 60)
            wait = min(doubled, pacing.backoff_max) * (1 + pacing.backoff_jitter * rng.random())
            reason = f"{said} without Retry-After, number {self.failures} in a row"
        self.block(now + wait, reason)

    def _succeeded(
        self, report: RequestReport, now: float, usual: float, pacing: PacingConfig
    ) -> None:
        self.errors = 0
        if report.under_way:
            return
        self.probing = False
        if self._forgiven(now, pacing):
            self.failures = 0
        if self.back_off is not None:
            self.back_off.answered(usual, now, pacing)
            if self.back_off.forgotten:
                self.back_off = None

    def _note_latency(self, report: RequestReport, pacing: PacingConfig) -> None:
        if pacing.latency_factor <= 0 or report.elapsed is None:
            return
        if self.latency is None:
            self.latency = max(0.0, report.elapsed)
        elif report.good or report.elapsed > self.latency:
            # A quick error page is no sign of health: it may only slow us down.
            self.latency += LATENCY_WEIGHT * (max(0.0, report.elapsed) - self.latency)

    def _forgiven(self, now: float, pacing: PacingConfig) -> bool:
        # Quiet counts from the end of the block: a long block is no good conduct.
        return now >= max(self.failed_at, self.blocked_until) + pacing.forgive_after


NO_RATE = RobotsInterval()
UNKNOWN = RobotsInterval(None, "robots.txt is not known yet")
"""Until it could be had nobody knows what the host asks for: the default is a guess."""
REFUSED = "after a refusal"
"""The source of the part that a `BackOff` brings; `why` says more of it."""


class Interval(msgspec.Struct, frozen=True):
    """The least time between two requests of a scope.

    >>> interval_for(RobotsInterval(10.0, "crawl-delay 10 s"), ScopeSettings()).seconds
    10.0
    """

    seconds: float
    parts: tuple[tuple[float, str], ...] = ()
    """Everything that asked for an interval: its seconds and its source."""
    clamped: bool = False
    """The operator's cap made it shorter than the site asks."""
    usual: float = 0.0
    """Seconds without what refusals, errors and a RateLimit field add to it."""

    @property
    def source(self) -> str:
        """The part that decided."""
        return max(self.parts, key=lambda part: part[0])[1] if self.parts else ""


UNDERIVED = Interval(float("nan"))
"""Nothing is known of where an interval comes from. No interval has as many seconds."""


def interval_for(
    asked: RobotsInterval,
    settings: ScopeSettings,
    history: ScopeHistory | None = None,
    pacing: PacingConfig | None = None,
    now: float = 0.0,
) -> Interval:
    """The largest of what site, operator and history ask for; `now` is monotonic seconds."""
    parts: list[tuple[float, str]] = []
    clamped = False
    seconds = asked.seconds
    if seconds is not None and seconds >= 0:  # NaN asks for nothing
        seconds = min(seconds, LONGEST)
        if settings.cap is not None and seconds > settings.cap:
            # Only by the operator's explicit setting, and flagged in `why()`.
            parts.append((settings.cap, f"{asked.source}, capped at {settings.cap:g} s"))
            clamped = True
        else:
            parts.append((seconds, asked.source))
    elif settings.own is None:
        parts.append((settings.default, f"{settings.default_source} {settings.default:g} s"))
    if settings.own is not None:
        parts.append((settings.own, settings.own_source))
    if settings.floor > 0:
        parts.append((settings.floor, f"pacing.min_interval {settings.floor:g} s"))
    if history is None or pacing is None:
        usual = max(parts)[0]
        return Interval(usual, tuple(parts), clamped, usual)
    if pacing.latency_factor > 0 and history.latency is not None:
        slow = pacing.latency_factor * history.latency
        slow = max(pacing.latency_floor, min(slow, pacing.latency_cap))
        parts.append((slow, f"latency {number(history.latency)} s x {pacing.latency_factor:g}"))
    usual = max(parts)[0]
    parts.extend(_for_now(history, usual, pacing, now))
    return Interval(max(parts)[0], tuple(parts), clamped, usual)


@lru_cache(_MAX_INTERVALS)
def usual_interval(
    asked: RobotsInterval, settings: ScopeSettings
) -> tuple[RobotsInterval, Interval]:
    """What a text asks for, and the interval of a host without a history that comes of it: one
    object for all hosts that are asked for the same, which are many."""
    return asked, interval_for(asked, settings)


def _for_now(
    history: ScopeHistory, usual: float, pacing: PacingConfig, now: float
) -> list[tuple[float, str]]:
    """What the host's answers ask for until further notice: refusals, errors, RateLimit."""
    parts: list[tuple[float, str]] = []
    if history.back_off is not None:
        slowed = history.back_off.in_force(usual, now, pacing)
        if slowed > usual:
            parts.append((slowed, REFUSED))
    if (pause := history.error_pause()) > 0:
        parts.append((pause, f"{history.errors} errors in a row"))
    if history.said > 0 and now < history.said_until:
        parts.append((history.said, f"RateLimit field: one in {number(history.said)} s"))
    return parts


def report_of(scope: Scope, now: float) -> Report:
    """What a scope that was turned away, or blocked by the operator, means for everybody."""
    history = scope.past()
    taught, seconds = history.back_off, max(0.0, history.blocked_until - now)
    if taught is None or not taught.slowed:
        return Report(scope.name, seconds, history.reason)
    return Report(scope.name, seconds, history.reason, taught.slowed, max(0.0, taught.try_at - now))


def clock_of(scope: Scope, now: float) -> ScopeClock:
    """What is known of a scope, for a ledger that has lost what it knew."""
    age = None if scope.basis == -INF else now - scope.basis
    history = scope.history
    if history is None:
        return ScopeClock(scope.name, age, scope.interval)
    blocked = max(0.0, history.blocked_until - now)
    clock = ScopeClock(scope.name, age, scope.interval, blocked, history.reason, history.paused)
    if (used := history.usage) is None or now >= used.began + DAY:
        return clock
    return clock._replace(day=now - used.began, pages=used.pages, bytes=used.bytes)


def learn(scope: Scope, report: Report, now: float, pacing: PacingConfig) -> None:
    """Take what the answer to another process meant for everybody as an answer to this one."""
    if not (report.seconds or report.interval):
        if scope.history is not None:
            scope.history.unblock()
        return
    history = scope.past()
    if report.seconds > 0:
        history.block(now + report.seconds, report.reason)
        history.probing = True
    known = 0.0 if history.back_off is None else history.back_off.slowed
    if report.seconds > 0 and report.interval > known * _EVEN:
        history.back_off = BackOff()
        history.back_off.restore(
            report.interval / 2.0, 0, now, report.interval_for, history.blocked_until, pacing
        )
    elif report.seconds <= 0 and report.interval > 0:
        scope.interval = max(scope.interval, report.interval)


def jittered(seconds: float, share: float, rng: random.Random) -> float:
    """`seconds` and up to that share more; never less than was promised."""
    return seconds * (1.0 + share * rng.random()) if share > 0 else seconds


@dataclass(slots=True, eq=False, repr=False)
class Scope:
    """What a clock belongs to: a host, an address, a registered domain, a named group.

    `basis` is the latest start or response head, and `interval` the seconds in force after it.
    They are kept apart, so that an interval learnt later (a robots.txt that was just read)
    counts from the same request.
    """

    name: str
    settings: ScopeSettings
    shared: tuple[Scope, ...] = ()
    """Scopes that a lease of this host takes beside its own."""
    basis: float = -INF
    interval: float = 0.0
    """Seconds in force, jitter included."""
    asked: RobotsInterval = NO_RATE
    """What the text of the host asked for last."""
    derived: Interval = UNDERIVED
    """What the interval was derived from; `UNDERIVED`: an earlier process did that."""
    in_flight: int = 0
    to_prove: int = PROVEN
    """Requests in a row of which the head has to come before the host counts as proven."""
    unheaded: int = 0
    """Leases whose response head is still awaited."""
    history: ScopeHistory | None = None
    queue: Any = None
    """Who waits for it, a `ScopeQueue`; None where nobody does."""

    def due_at(self) -> float:
        """When the next request may start: by clock, block, pause and free slots.

        Monotonic seconds, perhaps past; inf: not before something happens (a lease ends, its
        response begins, the operator resumes the host).
        """
        history = self.history
        if self.in_flight:
            # Half open, after a block: one request at a time, whatever the limit.
            half_open = history is not None and history.probing
            if self.in_flight >= (1 if half_open else self.settings.limit) or (
                self.unheaded and self.interval > 0
            ):
                return INF
        if history is None:
            return self.basis + self.interval
        return INF if history.paused else self.promised_at()

    def promised_at(self) -> float:
        """The moment before which no request starts, whoever is in flight: clock and block."""
        due = self.basis + self.interval
        return due if self.history is None else max(due, self.history.blocked_until)

    def clock_at(self, interval: float = 0.0) -> float:
        """When its interval is over, or `interval` seconds from the basis if that is later."""
        return self.basis + max(self.interval, interval)

    def not_before(self, moment: float) -> None:
        """No start before that moment, whatever the interval turns out to be.

        The interval set is longer than any other: none is counted from this basis once more.
        """
        self.interval = LONGEST
        self.basis = moment - LONGEST

    def past(self) -> ScopeHistory:
        """Its history, begun if there is none."""
        if self.history is None:
            self.history = ScopeHistory()
        return self.history

    def budget_left(self, now: float) -> DailyBudget | None:
        """The budget that a page would count for; raises BudgetSpent where nothing is left."""
        budget, past = self.settings.budget, self.history
        if budget is not None and past is not None and past.usage is not None:
            past.usage.check(self.name, budget, now)
        return budget

    def count(self, start: float, pages: int = 0, size: int = 0) -> None:
        """Add to what was used of the budget: see `Usage.count`."""
        past = self.past()
        past.usage = past.usage or Usage()
        past.usage.count(start, pages, size)

    def slots(self) -> int:
        """How many requests may be in flight at once."""
        half_open = self.history is not None and self.history.probing
        return 1 if half_open else self.settings.limit
