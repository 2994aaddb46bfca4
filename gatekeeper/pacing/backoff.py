"""How far refusals slow a host, and when it is asked faster again: a state machine, no I/O.

A site that answers 429 or 503 says that it was asked too often, and not how often it may be
asked. So the pace is found by trying (each number is a setting of `[pacing]`):

* A refusal doubles the interval in force, from at least the host's own interval, or from
  `backoff_floor` where it has none; the interval that was refused is remembered.
* After `backoff_retry` the refused interval is tried again. While that goes well, the interval
  in force halves for every `backoff_answers` good answers or `backoff_quiet` seconds without
  a refusal, whichever comes first, until it is the host's own once more; when that has gone
  well for `backoff_quiet` seconds, all is forgotten.
* A trial refused within `backoff_quiet` seconds is put off for twice as long as the one before,
  up to `backoff_retry_max`. One that went well for longer was no mistake: what is refused
  later counts as new.

A single 429 costs a factor of two for an hour; a site with a fixed limit is met a few times on
the first day and once a day from then on. All moments are monotonic seconds.
"""

from __future__ import annotations

from gatekeeper.clock import utc
from gatekeeper.config import PacingConfig

__all__ = ["BackOff"]

_NEVER = float("inf")
_EVEN = 1.0 + 1e-9
"""Halving what was doubled may miss by a rounding error."""


class BackOff:
    """What refusals have taught about one host; begun by the first of them.

    `usual` is everywhere the interval without this: what the text, the operator and the host's
    latency ask for, in seconds.

    >>> pacing, taught = PacingConfig(), BackOff()
    >>> taught.refuse(429, usual=0.05, now=0.0, until=1.0, pacing=pacing)
    >>> taught.in_force(0.05, 3599.0, pacing), taught.in_force(0.05, 3601.0, pacing)
    (0.1, 0.0)
    """

    __slots__ = (
        "_usual",
        "forgotten",
        "good",
        "guessed",
        "refused",
        "since",
        "slowed",
        "status",
        "trial",
        "try_at",
        "wait",
        "when",
    )

    def __init__(self) -> None:
        self.refused = 0.0
        """The interval that was refused last."""
        self.slowed = 0.0
        """Seconds that are kept to instead of the usual ones; 0: the usual ones."""
        self.status = 0
        """Of the last refusal; 0: an earlier version did not keep it."""
        self.when = -_NEVER
        """The moment of the last refusal."""
        self.wait = 0.0
        """Seconds from a refusal to the trial."""
        self.try_at = _NEVER
        self.trial = _NEVER
        """When the trial began; inf: it has not."""
        self.since = -_NEVER
        """In a trial: the beginning, or the last halving."""
        self.good = 0
        """Good answers since then."""
        self.guessed = False
        """What was refused was our default: the host's own interval was not known then."""
        self.forgotten = False
        """The host was asked at its usual pace again, and all was well: drop this."""
        self._usual = 0.0

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
        elif counts and self.trial < _NEVER:
            soon = now - self.trial < pacing.backoff_quiet
            again = 2.0 * self.wait if soon else pacing.backoff_retry
            self.wait = min(again, pacing.backoff_retry_max)
        if counts:
            self.refused = max(usual, self.slowed) or pacing.backoff_floor
            self.guessed = guessed
        self._double(pacing)
        self.status, self.when, self.forgotten = status, now, False
        # A long block is no good conduct: the pace after it is at first the slower one.
        self.try_at = max(now + self.wait, until + pacing.backoff_quiet)

    def answered(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """A good answer to a request that was sent since the last refusal."""
        self._settle(usual, now, pacing)
        if self.trial == _NEVER or not self.slowed:
            return
        self.good += 1
        if self.good >= pacing.backoff_answers:
            self._halve(now, pacing)

    def found(self, usual: float, pacing: PacingConfig) -> None:
        """The host's own interval is known now: what was refused by a guess is that, if less."""
        if self.guessed:
            self.guessed = False
            self.refused = min(self.refused, usual or pacing.backoff_floor)
            if self.trial == _NEVER:
                self._double(pacing)

    def restore(
        self,
        refused: float,
        status: int,
        when: float,
        wait: float,
        until: float,
        pacing: PacingConfig,
    ) -> None:
        """As an earlier process kept it: what was learnt since that refusal is learnt anew."""
        self.refused, self.status, self.when = refused, status, when
        self.wait = min(wait or pacing.backoff_retry, pacing.backoff_retry_max)
        self._double(pacing)
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
            count = "twice" if abs(times - 2.0) < 0.005 else f"{times:.3g} times"
            pace = f"{count} the usual {usual:.3g} s"
        else:
            pace = f"{self.slowed:.3g} s instead of none"
        less = self.slowed / 2.0
        goal = "the usual rate" if self._usual_enough(less, pacing) else f"one in {less:.3g} s"
        by = self.try_at
        if self.trial < _NEVER:
            by = self.since + pacing.backoff_quiet
        again = f"{goal} is tried again at {_clock(by - now, wall)}"
        if self.trial < _NEVER:
            again += f", or after {pacing.backoff_answers - self.good} good answers"
        what = f"a {self.status}" if self.status else "a refusal"
        return f"{pace} since {what} at {_clock(self.when - now, wall)}; {again}"

    def _settle(self, usual: float, now: float, pacing: PacingConfig) -> None:
        """Let happen what time alone has brought since the last look."""
        self._usual = usual
        if self.trial == _NEVER:
            if now < self.try_at:
                return
            self.trial = self.try_at
            self._halve(self.try_at, pacing)
        while not self.forgotten and now >= self.since + pacing.backoff_quiet:
            if self.slowed:
                self._halve(self.since + pacing.backoff_quiet, pacing)
            else:
                self.forgotten = True

    def _double(self, pacing: PacingConfig) -> None:
        self.slowed = max(self.refused, min(2.0 * self.refused, pacing.backoff_max))
        self.trial, self.good = _NEVER, 0

    def _halve(self, at: float, pacing: PacingConfig) -> None:
        less = self.slowed / 2.0
        self.slowed = 0.0 if self._usual_enough(less, pacing) else less
        self.since, self.good = at, 0

    def _usual_enough(self, seconds: float, pacing: PacingConfig) -> bool:
        return seconds <= (self._usual or pacing.backoff_floor) * _EVEN


def _clock(ahead: float, wall: float) -> str:
    """The time of day, with the day where that is another one."""
    moment, today = utc(wall + ahead), utc(wall)
    return f"{moment:%H:%M}" if moment.date() == today.date() else f"{moment:%Y-%m-%d %H:%M}"
