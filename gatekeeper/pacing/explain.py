"""What `why()` shows and the deadlock check asks: a host's clocks, and the slots of a lease."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gatekeeper.clock import Clock, utc
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.pacing.scopes import INF, REFUSED, Interval, Scope, ScopeHistory, interval_for

__all__ = ["EVERYTHING", "ClockView", "Need", "explain", "needs"]

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
    """The operator's cap made it shorter than the site asks."""
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


def _clocks(scope: Scope, clock: Clock, pacing: PacingConfig) -> list[ClockView]:
    now, wall = clock.monotonic(), clock.wall()
    views: list[ClockView] = []
    found, history = scope.derived, scope.history
    if found is not None and history is not None:
        # What was in force at the last request need not be any more.
        found = interval_for(scope.asked, scope.settings, history, pacing, now)
    refused = (history.slowed(now, wall, pacing) if history is not None else "") or REFUSED

    due = scope.clock_at()
    if now < due < INF:
        why = found.source if found is not None else "clock of an earlier run"
        why = refused if why == REFUSED else why
        if found is None and scope.settings.default_source.endswith(" interval"):
            why = f"{scope.settings.default_source} {scope.interval:g} s"
        views.append(ClockView(scope.name, "next", why, due - now, utc(wall + due - now)))
    if found is not None:
        views.extend(_intervals(scope, found, refused))
        if history is not None and history.back_off is not None:
            drawn = utc(wall + history.back_off.when - now)
            views = [replace(v, since=drawn) if v.source == refused else v for v in views]
    if scope.in_flight:
        waits = f", {scope.unheaded} before the head of the response" if scope.unheaded else ""
        views.append(ClockView(scope.name, "in_flight", f"busy x{scope.in_flight}{waits}"))
    if history is not None:
        views.extend(_held_against(scope.name, history, now, wall))
    return views


def _held_against(name: str, history: ScopeHistory, now: float, wall: float) -> Iterator[ClockView]:
    failed_at = utc(wall + history.failed_at - now) if history.failures else None
    if (left := history.blocked_until - now) > 0:
        drawn = failed_at if _ANSWER.match(history.reason) else None
        yield ClockView(name, "block", history.reason, left, utc(wall + left), since=drawn)
    if history.paused:
        yield ClockView(name, "pause", "operator")
    if failed_at is not None:
        text = f"{history.failures} blocks in a row, the last at {failed_at:%H:%M:%S}"
        yield ClockView(name, "back-off", text)
    if history.probing:
        yield ClockView(name, "probe", "after a block: one request at a time until one succeeds")


def _intervals(scope: Scope, found: Interval, refused: str) -> list[ClockView]:
    """One for each part; `refused` is the whole sentence for `REFUSED`."""
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


EVERYTHING = ""
"""The name under which all leases count together (pacing.max_in_flight)."""


class Need(NamedTuple):
    """A slot that a lease takes."""

    scope: str
    slots: int
    """How many there are."""
    paced: bool
    """An interval is in force: a lease whose head is awaited keeps everybody else out."""


def needs(memory: ScopeMemory, host: str, near: Iterable[str] = ()) -> list[Need]:
    """Of which scopes a lease of the host takes a slot.

    `near` names scopes that the host shares beside those that are known: its addresses,
    before its first lease. None in a dry run, in which nobody waits.
    """
    pacing = memory.rules.pacing
    if pacing.dry_run:
        return []
    scope = memory.scopes.get(host)
    known: tuple[Scope, ...]
    if scope is None:
        known, near = (), (*memory.rules.shared_names(host), *near)
    else:
        known = (scope, *scope.shared)
    names = {one.name for one in known}
    beside = (memory.scopes[name] for name in near if name in memory.scopes and name not in names)
    found = [Need(one.name, one.slots(), one.interval > 0) for one in (*known, *beside)]
    found.append(Need(EVERYTHING, pacing.max_in_flight, False))
    return found
