"""What a host has shown and said: blocks, refusals, latency, errors, its RateLimit field.

A `History` exists only for scopes that have one: a host that answers well costs nothing
here. All moments are monotonic seconds; they are converted from and to wall seconds
where they are loaded and kept.

The circuit: closed -> open (blocked) -> half open (one probe, whatever the concurrency)
-> closed again by a success, or open for twice as long.
"""

from __future__ import annotations

import random

import msgspec

from gatekeeper.config import PacingConfig
from gatekeeper.pacing.backoff import BackOff

__all__ = ["REFUSALS", "History", "Report"]

REFUSALS = (429, 503)
"""What a site answers that is asked too often, RFC 6585 section 4 and RFC 9110 section 15.6.4."""
LATENCY_WEIGHT = 0.2
ERROR_CEILING = 60.0
LONGEST_BLOCK = 10 * 366 * 86_400.0


class Report(msgspec.Struct, frozen=True, gc=False):
    """What came of one request, in seconds and bytes; all None: nothing is known."""

    status: int | None = None
    elapsed: float | None = None
    """Seconds from the start of the request to the head of the response."""
    retry_after: float | None = None
    """Seconds that the response asked for."""
    size: int | None = None
    spread: float = 0.0
    """Seconds between requests that the RateLimit field allows (HTTP-11); 0: it is silent."""
    spread_for: float = 0.0
    """Seconds for which that holds."""
    under_way: bool = False
    """The request was sent before the host's last refusal came: of what has been done about
    that it says nothing."""

    @property
    def failed(self) -> bool:
        """A server error, or no response although the request took its time."""
        if self.status is None:
            return self.elapsed is not None
        return self.status >= 500

    @property
    def good(self) -> bool:
        """Only this may ever shorten an interval (promise 9)."""
        return self.status is not None and 200 <= self.status < 400


class History:
    """What one scope has shown; see the module. Mutable, touched by the books alone."""

    __slots__ = (
        "accuser",
        "back_off",
        "blocked_until",
        "errors",
        "failed_at",
        "failures",
        "latency",
        "paused",
        "probing",
        "reason",
        "refusals",
        "said",
        "said_until",
    )

    def __init__(self) -> None:
        self.blocked_until = float("-inf")
        self.reason = ""
        self.failures = 0
        """Blocks in a row."""
        self.failed_at = float("-inf")
        self.probing = False
        """Half open: one request at a time until one succeeds."""
        self.refusals = 0
        """How often the host turned us away, those apart whose requests were under way."""
        self.back_off: BackOff | None = None
        """How far it is slowed by a 429 or 503; None where it is not."""
        self.errors = 0
        self.latency: float | None = None
        self.paused = False
        self.said = 0.0
        self.said_until = float("-inf")
        self.accuser = ""
        """Of an address: the host that was turned away last."""

    def accused_by(self, host: str) -> bool:
        """An address: was another of its hosts turned away before this one?"""
        other, self.accuser = self.accuser, host
        return other not in ("", host)

    def owes(self, now: float, pacing: PacingConfig) -> bool:
        """Is there anything here that must not be forgotten?"""
        return bool(
            self.paused
            or now < self.blocked_until
            or now < self.said_until
            or (self.back_off is not None and not self.back_off.over(now, pacing))
            or self.errors
            or ((self.failures or self.probing) and not self._forgiven(now, pacing))
        )

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
        report: Report,
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
            self.said, self.said_until = report.spread, now + report.spread_for
        if report.status in REFUSALS or (
            # HTTP-08: Retry-After means something with redirects and refusals as well.
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
        self, report: Report, now: float, pacing: PacingConfig, rng: random.Random
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
            # A minimum (HTTP-08): obeyed as it stands.
            wait = min(report.retry_after, LONGEST_BLOCK)
            reason = f"{said}, Retry-After {report.retry_after:g}"
        else:
            doubled = pacing.backoff_initial * 2.0 ** min(self.failures - 1, 60)
            wait = min(doubled, pacing.backoff_max) * (1 + pacing.backoff_jitter * rng.random())
            reason = f"{said} without Retry-After, number {self.failures} in a row"
        self.block(now + wait, reason)

    def _succeeded(self, report: Report, now: float, usual: float, pacing: PacingConfig) -> None:
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

    def _note_latency(self, report: Report, pacing: PacingConfig) -> None:
        if pacing.latency_factor <= 0 or report.elapsed is None:
            return
        if self.latency is None:
            self.latency = max(0.0, report.elapsed)
        elif report.good or report.elapsed > self.latency:
            # A quick error page is no sign of health: it may only slow us (promise 9).
            self.latency += LATENCY_WEIGHT * (max(0.0, report.elapsed) - self.latency)

    def _forgiven(self, now: float, pacing: PacingConfig) -> bool:
        # Quiet counts from the end of the block: a long block is no good conduct.
        return now >= max(self.failed_at, self.blocked_until) + pacing.forgive_after
