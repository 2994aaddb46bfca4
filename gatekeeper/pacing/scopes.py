"""Scopes: what a clock belongs to, and everything that determines when it is due.

A scope is a host, or something that hosts share: an address, a registered domain, or a named group.
Each scope has a clock (`Scope`) and an interval between its requests (`interval_for`). If its host
ever refused, failed or was slow, it also has a history (`ScopeHistory`, with `BackOff` for
refusals). `Scope.due_at` combines them, and is the start rule: the only place that determines when
a request may start. A fleet's script repeats it in Lua, and is tested against it by way of the
model in `testing.memory_ledger`, which calls it.

Nothing here does I/O or reads a clock: the time is a parameter, in monotonic seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec

from gatekeeper.clock import number, utc
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.host_settings import DAY, BudgetSpent, ScopeSettings, Usage
from gatekeeper.robots.timing import RobotsInterval

INF = float("inf")
LONGEST = 10 * 366 * 86_400.0
"""Ten years, in seconds. No interval or block is longer, so that a datetime can express its end."""
DURABLE = 1.0
"""Clocks that lie more than this many seconds ahead are on disk before a grant or report returns,
and so outlive the process. One record that a process was running covers the shorter ones."""
PROVEN = 2
"""Number of requests in a row that a host has to answer to count as one that answers."""
ROUNDING = 1.0 + 1e-9
"""Relative tolerance of comparisons: halving what was doubled may be off by a rounding error."""


@dataclass(slots=True, eq=False, repr=False)
class BackOff:
    """State machine of one host's refusals: how far they slow it, and when it is sped up again.

    A site that answers 429 or 503 says that requests come too often, but not how often they may
    come. So the rate is found by trial (each number is a setting of `[pacing]`):

    * A refusal doubles the interval in force, starting from at least the host's own interval, or
      from `backoff_floor` if it has none. The refused interval is remembered, unless nothing was
      served for `backoff_initial` or longer: then the site refuses everything for a while, which
      says nothing about the interval.
    * The interval in force halves for every `backoff_answers` good responses or `backoff_quiet`
      seconds without a refusal, whichever comes first, down to twice the remembered interval.
    * After `backoff_retry` the remembered interval is tried again. While the trial goes well, the
      interval in force halves further, until it is the host's own again. As a site may count by
      the hour or by the day, the back-off is forgotten only when the trial has lasted as long as
      the wait before it.
    * If a trial is refused earlier, the next one comes after twice the wait, up to
      `backoff_retry_max`. A refusal outside a trial, `forgive_after` seconds after the last one,
      shows that the remembered interval was wrong (a fault, or another limit): the waits start
      again at `backoff_retry`.

    A single 429 costs a factor of two for an hour. A site with a fixed limit refuses a few times
    on the first day, and once or twice a day after that.

    `usual` always means the interval without the back-off, in seconds: what robots.txt, the
    operator and the host's latency ask for. A `BackOff` is created at the first refusal.

    >>> pacing, taught = PacingConfig(), BackOff()
    >>> taught.refuse(429, usual=0.05, now=0.0, until=1.0, pacing=pacing)
    >>> taught.in_force(0.05, 3599.0, pacing), taught.in_force(0.05, 3601.0, pacing)
    (0.1, 0.0)
    """

    refused: float = 0.0
    """The interval that was refused last, in seconds."""
    slowed: float = 0.0
    """Interval in force instead of the usual one, in seconds; 0: the usual one is in force."""
    status: int = 0
    """Status of the last refusal; 0 if an earlier version did not store it."""
    refused_at: float = -INF
    """When the last refusal came."""
    block_end: float = -INF
    """When the block by the last refusal ends."""
    served: bool = True
    """A good response came since the last refusal."""
    wait: float = 0.0
    """Seconds from a refusal to the trial."""
    try_at: float = INF
    """When the trial is to start."""
    trial: float = INF
    """When the trial started; inf: it has not."""
    since: float = -INF
    """The latest of: the end of the last refusal's block, the start of the trial, a halving."""
    good_responses: int = 0
    """Good responses since `since`."""
    guessed: bool = False
    """The refused interval was the default: the host's own interval was not known then."""
    forgotten: bool = False
    """The trial succeeded at the usual interval: this object may be dropped."""
    _usual: float = 0.0

    # --- events -------------------------------------------------------------------------

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
        """Note a 429 or 503. `until` is the end of the resulting block; `guessed` means that
        `usual` is a default, since the host's robots.txt is not known yet.
        """
        self._settle(usual, now, pacing)
        first = self.wait == 0.0 or self.forgotten
        # An unreachable robots.txt is retried now and then, whatever the interval: repeated
        # refusals of it say nothing about the pace of pages.
        counts = first or not (guessed and self.guessed)
        if first:
            self.wait = min(pacing.backoff_retry, pacing.backoff_retry_max)
        elif counts and self.trial < INF:
            again = 2.0 * self.wait if now < self._believed_at(pacing) else pacing.backoff_retry
            self.wait = min(again, pacing.backoff_retry_max)
        elif counts and now >= self.block_end + pacing.forgive_after:
            self.wait = min(pacing.backoff_retry, pacing.backoff_retry_max)
        level = self.refused
        if counts:
            level = max(usual, self.slowed) or pacing.backoff_floor
            soon = now - self.refused_at < pacing.backoff_initial
            if first or self.served or self.trial < INF or soon:
                self.refused = level
            self.guessed, self.served = guessed, False
        self._slow_to(2.0 * level, pacing)
        self.status, self.refused_at, self.forgotten = status, now, False
        self.since = self.block_end = max(now, until)
        # Time spent in a block does not count as good conduct: after it the slower interval
        # applies for a while.
        self.try_at = max(now + self.wait, until + pacing.backoff_quiet)

    def answered(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """Note a good response to a request that was sent after the last refusal."""
        self._settle(usual, now, pacing)
        self.served = True
        if not self._eases():
            return
        self.good_responses += 1
        if self.good_responses >= pacing.backoff_answers:
            self._halve(now, pacing)

    def interval_known(self, usual: float, pacing: PacingConfig) -> None:
        """Note that the host's own interval is known now. If the refused interval was a guess,
        lower it to the host's own."""
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
        """Restore the state after the last refusal that an earlier process recorded. What was
        learnt since that refusal is lost. `slowed`: the interval that was in force then.
        """
        self.refused, self.status, self.refused_at = refused, status, when
        self.wait = min(wait or pacing.backoff_retry, pacing.backoff_retry_max)
        self._slow_to(max(2.0 * refused, slowed), pacing)
        self.since = self.block_end = max(when, until)
        self.try_at = max(when + self.wait, until + pacing.backoff_quiet)

    # --- consequences -------------------------------------------------------------------

    def in_force(self, usual: float, now: float, pacing: PacingConfig) -> float:
        """Return the interval in force now, in seconds; 0: the usual one."""
        self._settle(usual, now, pacing)
        return self.slowed

    def over(self, now: float, pacing: PacingConfig) -> bool:
        """Return True if nothing is left to be remembered."""
        self._settle(self._usual, now, pacing)
        return self.forgotten

    def describe(self, now: float, wall: float, pacing: PacingConfig) -> str:
        """Describe the interval in force, with its cause and its next trial, in one line; empty if
        it is the usual one. `wall` is the wall time at `now`; times are printed in UTC.
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
            again += f", or after {pacing.backoff_answers - self.good_responses} good answers"
        what = f"a {self.status}" if self.status else "a refusal"
        return f"{pace} since {what} at {_clock(self.refused_at - now, wall)}; {again}"

    def _settle(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """Apply the transitions that are due by time alone."""
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
        """Return True if good responses and quiet time shorten the interval in force."""
        return self.slowed > (2.0 * self.refused * ROUNDING if self.trial == INF else 0.0)

    def _eases_by(self, pacing: PacingConfig) -> float:
        """Return when time alone next shortens the interval."""
        if not self._eases():
            return self.try_at
        by = self.since + pacing.backoff_quiet
        return by if self.trial < INF else min(by, self.try_at)

    def _believed_at(self, pacing: PacingConfig) -> float:
        """Return when a trial without a refusal has lasted long enough to be believed."""
        return max(self.trial + self.wait, self.since + pacing.backoff_quiet)

    def _slow_to(self, seconds: float, pacing: PacingConfig) -> None:
        self.slowed = max(self.refused, min(seconds, pacing.backoff_max))
        self.trial, self.good_responses = INF, 0

    def _halve(self, at: float, pacing: PacingConfig) -> None:
        less = self.slowed / 2.0
        if self.trial == INF:
            less = max(less, 2.0 * self.refused)
        self.slowed = 0.0 if self._usual_enough(less, pacing) else less
        self.since = at
        self.good_responses = 0

    def _usual_enough(self, seconds: float, pacing: PacingConfig) -> bool:
        return seconds <= (self._usual or pacing.backoff_floor) * ROUNDING


def _clock(ahead: float, wall: float) -> str:
    """Format a time of day, with the date if that is not today's."""
    moment, today = utc(wall + ahead), utc(wall)
    return f"{moment:%H:%M}" if moment.date() == today.date() else f"{moment:%Y-%m-%d %H:%M}"


REFUSALS = (429, 503)
"""Statuses of a site that is asked too often: RFC 6585 section 4, RFC 9110 section 15.6.4."""
LATENCY_WEIGHT = 0.2
"""Weight of the newest response in the moving average of a host's latency."""
ERROR_CEILING = 60.0
"""Longest interval that errors in a row ask for, in seconds."""
_FAILED_URLS = 64
"""URLs without a response that are remembered for one host, by their hashes."""
_BLAME_PAGE = 1800.0
"""Seconds for which an answer shows that the page, not its host, is why a URL fails again."""


class RequestReport(msgspec.Struct, frozen=True, gc=False):
    """How one request went, in seconds. All None: nothing is known."""

    status: int | None = None
    elapsed: float | None = None
    """Seconds from the start of the request to the head of the response."""
    retry_after: float | None = None
    """Seconds to wait that the response asked for."""
    spread: float = 0.0
    """Seconds between requests that the RateLimit field allows, 0 without such a field:
    draft-ietf-httpapi-ratelimit-headers (HTTP-11)."""
    spread_for: float = 0.0
    """Seconds for which `spread` is valid."""
    sent_before_refusal: bool = False
    """The request was sent before the host's last refusal arrived, so it does not show whether
    the slower interval helps."""
    url_hash: int = 0
    """Tells URLs without a response apart."""

    @property
    def failed(self) -> bool:
        """True for a server error, or if there was no response although `elapsed` is known."""
        if self.status is None:
            return self.elapsed is not None
        return self.status >= 500

    @property
    def good(self) -> bool:
        """True for 2xx and 3xx. Only such a report may ever shorten an interval."""
        return self.status is not None and 200 <= self.status < 400


@dataclass(slots=True, eq=False, repr=False)
class ScopeHistory:
    """Blocks, refusals, latency, errors and RateLimit field of one scope.

    Only scopes with something to remember have a history: a host that answers well has none.
    It acts as a circuit breaker: closed, then open (blocked), then half open (one request at a
    time, whatever the concurrency), then closed again by a success, or open for twice as long.
    """

    blocked_until: float = -INF
    reason: str = ""
    failures: int = 0
    """Blocks in a row."""
    failed_at: float = -INF
    """When the last block was caused."""
    probing: bool = False
    """Half open: one request at a time until one succeeds."""
    refusals: int = 0
    """Number of refusals, not counting requests that were in flight when a refusal arrived."""
    back_off: BackOff | None = None
    """How far a 429 or 503 slows the scope; None if it does not."""
    errors: int = 0
    """Failed requests in a row, without those that are evidence about their page only."""
    failed_urls: dict[int, float] | None = None
    """Hash of each URL that got no response -> the host's last answer since; -inf: none yet."""
    latency: float | None = None
    """Moving average of the time to a response head, in seconds; None: not measured."""
    paused: bool = False
    """Paused by the operator."""
    rate_limit: float = 0.0
    """Interval of the last RateLimit field, in seconds."""
    rate_limit_until: float = -INF
    """When `rate_limit` stops being valid."""
    last_refused: str = ""
    """For an address: its host that was refused last."""
    usage: Usage | None = None
    """Pages and bytes of the current day, if the scope has a budget."""

    def is_second_refused(self, host: str) -> bool:
        """For an address: note that a host was refused; True if another host was the last one."""
        other = self.last_refused
        self.last_refused = host
        return other not in ("", host)

    def matters(self, now: float, pacing: PacingConfig) -> bool:
        """Return True if anything here must not be forgotten yet."""
        return bool(
            self.paused
            or now < self.blocked_until
            or now < self.rate_limit_until
            or (self.usage is not None and now < self.usage.began + DAY)
            or (self.back_off is not None and not self.back_off.over(now, pacing))
            or self.errors
            or (self.failed_urls and now < max(self.failed_urls.values()) + _BLAME_PAGE)
            or ((self.failures or self.probing) and not self._forgiven(now, pacing))
        )

    def error_pause(self) -> float:
        """Return the interval for errors in a row, in seconds: 0 up to two, then 1, 2, 4 ... 60."""
        if self.errors < 3:
            return 0.0
        return min(ERROR_CEILING, 2.0 ** min(self.errors - 3, 10))

    def block(self, until: float, reason: str) -> None:
        """Allow no request before `until`. A block never shortens a longer one."""
        if until > self.blocked_until:
            self.blocked_until = until
            self.reason = reason

    def unblock(self) -> None:
        """End the block now. If the history is `probing`, one request goes first."""
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
        """Evaluate one report; return True if it blocks the scope.

        `usual` is the request's interval without what refusals, errors and a RateLimit field add.
        `guessed`: that interval is a default, since the host's robots.txt is not known yet.
        """
        self._note_latency(report, pacing)
        if report.spread:
            self.rate_limit = report.spread
            self.rate_limit_until = now + report.spread_for
        if report.status in REFUSALS or (
            # RFC 9110 section 10.2.3 (HTTP-08): redirects and refusals may have it as well.
            report.retry_after is not None and (report.status is None or report.status >= 300)
        ):
            self._refused(report, now, pacing, rng)
            if report.status in REFUSALS and not (report.sent_before_refusal and self.back_off):
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
            if report.status is not None or self._is_news(report.url_hash, now):
                self.errors += 1
            return False
        if report.status is not None and self.failed_urls is not None:
            self.failed_urls.pop(report.url_hash, None)
            self.failed_urls = dict.fromkeys(self.failed_urls, now) or None
        if report.good:
            self._succeeded(report, now, usual, pacing)
        return False

    def _is_news(self, url_hash: int, now: float) -> bool:
        """Note a URL without a response; return True if that counts against the host. It does not
        if the URL failed before and the host has answered since: the page is the cause then."""
        urls = self.failed_urls = self.failed_urls or {}
        if now < urls.get(url_hash, -INF) + _BLAME_PAGE:
            return False
        urls[url_hash] = -INF
        if len(urls) > _FAILED_URLS:
            del urls[next(iter(urls))]
        return True

    def forgive(self, url_hash: int) -> None:
        """Take back an error without a response, if it was counted."""
        urls = self.failed_urls or {}
        if urls.get(url_hash, -INF) == -INF:
            urls.pop(url_hash, None)
            self.errors -= 1

    def _refused(
        self, report: RequestReport, now: float, pacing: PacingConfig, rng: random.Random
    ) -> None:
        if self._forgiven(now, pacing):
            self.failures = 0
        if not (report.sent_before_refusal and self.failures):
            # Requests that were in flight together are refused for one reason.
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
        if report.sent_before_refusal:
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
        elapsed = min(max(0.0, report.elapsed), DAY)  # infinity would stay in the average
        if self.latency is None:
            self.latency = elapsed
        elif report.good or elapsed > self.latency:
            # A quick error page is not a sign of health: an error may only raise the average.
            self.latency += LATENCY_WEIGHT * (elapsed - self.latency)

    def _forgiven(self, now: float, pacing: PacingConfig) -> bool:
        # Quiet time counts from the end of the block: waiting in a block is not good conduct.
        return now >= max(self.failed_at, self.blocked_until) + pacing.forgive_after


_NO_HISTORY, _DEFAULTS = ScopeHistory(), PacingConfig()

NO_RATE = RobotsInterval()
UNKNOWN = RobotsInterval(None, "robots.txt is not known yet")
"""The host's robots.txt was not fetched yet, so its interval is a guess: the default."""
EARLIER = "the clock of an earlier run"
"""Source of an interval that only a stored clock tells."""
REFUSED = "after a refusal"
"""Source of the part that comes from a `BackOff`. `why` shows its full sentence instead."""


class Interval(msgspec.Struct, frozen=True):
    """The least time between two requests of a scope.

    >>> interval_for(RobotsInterval(10.0, "crawl-delay 10 s"), ScopeSettings()).seconds
    10.0
    """

    seconds: float
    parts: tuple[tuple[float, str], ...] = ()
    """Everything that asks for an interval: seconds and source."""
    clamped: bool = False
    """The operator's cap made it shorter than the site asks."""
    usual: float = 0.0
    """Seconds without what refusals, errors and a RateLimit field add."""

    @property
    def source(self) -> str:
        """Source of the part that decides."""
        return max(self.parts, key=lambda part: part[0])[1] if self.parts else ""


UNDERIVED = Interval(float("nan"))
"""The source of an interval is not known. Its seconds, NaN, equal those of no interval."""


def interval_for(
    asked: RobotsInterval,
    settings: ScopeSettings,
    history: ScopeHistory = _NO_HISTORY,
    pacing: PacingConfig = _DEFAULTS,
    now: float = 0.0,
) -> Interval:
    """Return the largest interval that site, operator and history ask for. `now`: monotonic."""
    parts: list[tuple[float, str]] = []
    clamped = False
    seconds = asked.seconds
    if seconds is not None and seconds >= 0:  # NaN asks for nothing
        seconds = min(seconds, LONGEST)
        if settings.cap is not None and seconds > settings.cap:
            # Only the operator's explicit setting shortens it, and `why()` shows that.
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
    if pacing.latency_factor > 0 and history.latency is not None:
        slow = pacing.latency_factor * history.latency
        slow = max(pacing.latency_floor, min(slow, pacing.latency_cap))
        parts.append((slow, f"latency {number(history.latency)} s x {pacing.latency_factor:g}"))
    usual = max(parts)[0]
    if history.back_off is not None:
        slowed = history.back_off.in_force(usual, now, pacing)
        if slowed > usual:
            parts.append((slowed, REFUSED))
    if (pause := history.error_pause()) > 0:
        parts.append((pause, f"{history.errors} errors in a row"))
    if history.rate_limit > 0 and now < history.rate_limit_until:
        parts.append(
            (history.rate_limit, f"RateLimit field: one in {number(history.rate_limit)} s")
        )
    return Interval(max(parts)[0], tuple(parts), clamped, usual)


def usual_interval(
    asked: RobotsInterval, settings: ScopeSettings
) -> tuple[RobotsInterval, Interval]:
    """Return what robots.txt asks for, and the interval of a host without a history that follows:
    the same two objects for the many hosts that ask for the same."""
    return asked, interval_for(asked, settings)


def jittered(seconds: float, share: float, rng: random.Random) -> float:
    """Return `seconds` plus a random part of up to `share` of it; never less than `seconds`."""
    return seconds * (1.0 + share * rng.random()) if share > 0 else seconds


@dataclass(slots=True, eq=False, repr=False)
class Scope:
    """A clock with its settings and state: of a host, an address, a domain or a named group.

    `basis` is the latest start or response head, and `interval` the seconds in force after it.
    They are separate, so that an interval that is learnt later (from a robots.txt that was just
    read) counts from the same request.
    """

    name: str
    settings: ScopeSettings
    shared: tuple[Scope, ...] = ()
    """Scopes that a lease of this host takes in addition to its own."""
    basis: float = -INF
    interval: float = 0.0
    """Seconds in force, jitter included."""
    asked: RobotsInterval = NO_RATE
    """What the host's robots.txt asked for last."""
    derived: Interval = UNDERIVED
    """The interval with its sources; `UNDERIVED` if it comes from an earlier process."""
    in_flight: int = 0
    """Open leases."""
    to_prove: int = PROVEN
    """Response heads in a row that are still missing until the host counts as proven."""
    unheaded: int = 0
    """Leases whose response head is still awaited."""
    history: ScopeHistory | None = None
    queue: Any = None
    """The `ScopeQueue` of its waiters; None if there are none."""

    def due_at(self, events: bool = True) -> float:
        """The start rule: return when the next request may start.

        The time, possibly in the past, is the later of the end of the interval since `basis` and
        the end of a block. inf: not before an event, whatever the time. The operator resumes the
        host; an open lease ends if all slots are taken (half open, after a block, there is one); or
        an awaited response head arrives while an interval is in force, since the interval counts
        from there. `events=False`: the time alone, whatever is in flight or paused.
        """
        history = self.history
        if events:
            if self.in_flight and (
                self.in_flight >= self.slots() or (self.unheaded and self.interval > 0)
            ):
                return INF
            if history is not None and history.paused:
                return INF
        due = self.basis + self.interval
        return due if history is None else max(due, history.blocked_until)

    def clock_at(self, interval: float = 0.0) -> float:
        """Return when its interval is over, or `interval` seconds after the basis if later."""
        return self.basis + (max(interval, self.interval))

    def robots_interval(self, asked: RobotsInterval | None) -> RobotsInterval:
        """Return the interval for fetching a robots.txt. If its text is not known, use the interval
        of an earlier run's clock: that run was killed after it read the text, but before it stored
        it."""
        if asked is None or asked is NO_RATE or asked is UNKNOWN:
            if self.asked.source == EARLIER:
                return self.asked
            if self.derived is UNDERIVED and DURABLE < self.interval < LONGEST:
                return RobotsInterval(self.interval, EARLIER)
        return self.asked if asked is None else asked

    @property
    def past(self) -> ScopeHistory:
        """The scope's history, or an empty one to read if there is none."""
        return self.history or _NO_HISTORY

    def ensure_history(self) -> ScopeHistory:
        """Return the scope's history; create it if there is none."""
        if self.history is None:
            self.history = ScopeHistory()
        return self.history

    def budget_spent(self, now: float) -> BudgetSpent | None:
        """Return the error for a page that the budget does not allow now; None if it does."""
        budget, used = self.settings.budget, self.past.usage
        if budget is None or used is None or not (left := used.allows_after(budget, now)):
            return None
        return BudgetSpent(self.name, budget, used, left)

    def count_usage(self, start: float, pages: int = 0, size: int = 0) -> None:
        """Add pages and bytes to the day's usage. See `Usage.count`."""
        past = self.ensure_history()
        past.usage = past.usage or Usage()
        past.usage.count(start, pages, size)

    def slots(self) -> int:
        """Return how many requests may be in flight at the same time. Half open, after a block, it
        is one, whatever the limit."""
        half_open = self.history is not None and self.history.probing
        return 1 if half_open else self.settings.limit
