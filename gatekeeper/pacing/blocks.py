"""What a host has shown and said: blocks, back-off, the safe rate, latency, errors.

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

__all__ = ["History", "Report"]

SAFE_CEILING = 60.0
"""Learning from a 429 alone never slows beyond this; the site's own wish may."""
SAFE_LEAST = 1.0
QUIET_SUCCESSES = 50
"""Answers in a row after which the learnt interval shrinks by a tenth."""
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
        "blocked_until",
        "drew",
        "errors",
        "failed_at",
        "failures",
        "latency",
        "paused",
        "probing",
        "quiet",
        "reason",
        "safe",
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
        self.safe = 0.0
        """Interval learnt from a 429."""
        self.drew = 0.0
        """The interval that drew it; `safe` never shrinks back to that."""
        self.quiet = 0
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
            or self.safe
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
        self, report: Report, now: float, gap: float, pacing: PacingConfig, rng: random.Random
    ) -> bool:
        """Take one report into account; True if it blocks the scope.

        `gap` is the interval that was in force for the request.
        """
        self._note_latency(report, pacing)
        if report.spread:
            self.said, self.said_until = report.spread, now + report.spread_for
        if report.status in (429, 503) or (
            # HTTP-08: Retry-After means something with redirects and refusals as well.
            report.retry_after is not None and (report.status is None or report.status >= 300)
        ):
            self._turned_away(report, now, gap, pacing, rng)
            return True
        if report.failed:
            self.errors += 1
            self.quiet = 0
        elif report.good:
            self._succeeded(now, pacing)
        return False

    def _turned_away(
        self, report: Report, now: float, gap: float, pacing: PacingConfig, rng: random.Random
    ) -> None:
        if self._forgiven(now, pacing):
            self.failures = 0
        self.failures += 1
        self.failed_at = now
        self.probing = True
        self.quiet = 0
        if report.status == 429:
            self.drew = max(self.drew, gap)
            self.safe = max(self.safe, gap, min(max(2 * gap, SAFE_LEAST), SAFE_CEILING))
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

    def _succeeded(self, now: float, pacing: PacingConfig) -> None:
        self.errors = 0
        self.probing = False
        if self._forgiven(now, pacing):
            self.failures = 0
        if not self.safe:
            return
        self.quiet += 1
        if self.quiet >= QUIET_SUCCESSES:
            # Additive-increase with a memory: creep back, never to the rate that drew a 429.
            self.quiet = 0
            self.safe = min(self.safe, max(self.safe * 0.9, self.drew * 1.1, SAFE_LEAST / 2))

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
