"""Every clock of a host, each with where it came from."""

from __future__ import annotations

import re
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, utc
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.scopes import INF, REFUSED, Interval, Scope, interval_for

__all__ = ["ClockView", "explain", "slowed"]

_ANSWER = re.compile(r"\A(?:[0-9]{3}|no status)\b")
"""How the reason of a block begins that an answer of the host drew."""


class ClockView(msgspec.Struct, frozen=True):
    """One reason why a scope has to wait, or would.

    `kind`: interval, next, block, pause, probe, back-off or in_flight. `str(view)` is a
    line for people.
    """

    scope: str
    kind: str
    source: str
    """Where it comes from, such as "crawl-delay 10 s from robots.txt line 7"."""
    seconds: float | None = None
    """Of an interval: its length. Of a clock that runs: what is left of it."""
    until: datetime | None = None
    """When it ends (aware, UTC); None where an event ends it."""
    decides: bool = False
    """Among the intervals: the one in force."""
    clamped: bool = False
    """The operator's cap made the site's wish shorter."""
    since: datetime | None = None
    """Of a block, or an interval, that an answer drew: when that came (aware, UTC)."""

    def __str__(self) -> str:
        source = self.source
        if self.since is not None and self.kind == "block":  # "429 at 12:03, Retry-After 120"
            source = _ANSWER.sub(rf"\g<0> at {self.since:%H:%M}", source)
        text = f"{self.scope}: {self.kind}: {source}"
        if self.until is not None:
            text += f" (until {self.until:%Y-%m-%dT%H:%M:%SZ})"
        return text


def explain(scope: Scope, clock: Clock, pacing: PacingConfig) -> tuple[ClockView, ...]:
    """What holds a host's scope and those it shares, and what would."""
    views: list[ClockView] = []
    for one in (scope, *scope.shared):
        views.extend(_clocks(one, clock, pacing))
    return tuple(views)


def slowed(scope: Scope, clock: Clock, pacing: PacingConfig) -> str:
    """How far refusals slow a host at this moment, in one line; empty where they do not."""
    history = scope.history
    if history is None or history.back_off is None:
        return ""
    return history.back_off.sentence(clock.monotonic(), clock.wall(), pacing)


def _clocks(scope: Scope, clock: Clock, pacing: PacingConfig) -> list[ClockView]:
    now, wall = clock.monotonic(), clock.wall()
    views: list[ClockView] = []
    found = scope.interval
    if found is not None and scope.history is not None:
        # What was in force at the last request need not be any more.
        found = interval_for(scope.wish, scope.settings, scope.history, pacing, now)
    refused = slowed(scope, clock, pacing) or REFUSED

    def add(kind: str, source: str, until: float | None = None) -> None:
        left = None if until is None else until - now
        at = None if left is None else utc(wall + left)
        views.append(ClockView(scope.name, kind, source, left, at))

    due = scope.basis + scope.gap
    if now < due < INF:
        why = found.source if found is not None else "clock of an earlier run"
        why = refused if why == REFUSED else why
        if found is None and scope.settings.default_source.endswith(" interval"):
            why = f"{scope.settings.default_source} {scope.gap:g} s"
        add("next", why, due)
    if found is not None:
        views.extend(_intervals(scope, found, refused))
        taught = None if scope.history is None else scope.history.back_off
        if taught is not None:
            drawn = utc(wall + taught.when - now)
            views = [replace(v, since=drawn) if v.source == refused else v for v in views]
    if scope.in_flight:
        waits = f", {scope.unheaded} before the head of the response" if scope.unheaded else ""
        add("in_flight", f"busy x{scope.in_flight}{waits}")
    if (history := scope.history) is not None:
        if history.blocked_until > now:
            add("block", history.reason, history.blocked_until)
            if history.failures and _ANSWER.match(history.reason):
                views[-1] = replace(views[-1], since=utc(wall + history.failed_at - now))
        if history.paused:
            add("pause", "operator")
        if history.failures:
            since = utc(wall + history.failed_at - now)
            add("back-off", f"{history.failures} blocks in a row, the last at {since:%H:%M:%S}")
        if history.probing:
            add("probe", "after a block: one request at a time until one succeeds")
    return views


def _intervals(scope: Scope, found: Interval, refused: str) -> list[ClockView]:
    """One for each voice; `refused` says at length what `REFUSED` stands for."""
    return [
        ClockView(
            scope.name,
            "interval",
            refused if source == REFUSED else source,
            seconds,
            decides=source == found.source,
            clamped=found.clamped,
        )
        for seconds, source in found.parts
    ]
