"""Simulated days of sites that refuse: how often they refuse, and how much of their limit is used.

The scheduler's engine serves one host under virtual time, with an endless supply of URLs. The site
refuses by its own rule, which the engine does not know.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.options import Options
from benchmarks.report import Table
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.pacing.engine import Engine
from gatekeeper.pacing.host_settings import Rules
from gatekeeper.pacing.persistence import ScopeMemory
from gatekeeper.robots.timing import RobotsInterval

__all__ = ["SCENES", "Day", "Scene", "run", "simulate"]

DAY = 86_400.0
HOST = "a.example"

Site = Callable[[float], bool]
"""Returns whether a request at that time is served (otherwise it is refused)."""


def spaced(seconds: float) -> Site:
    """Refuse a request too soon after the previous one, whether that was served or not."""
    last = -math.inf

    def serves(now: float) -> bool:
        nonlocal last
        welcome = now - last >= seconds - 1e-9
        last = now
        return welcome

    return serves


def bucket(seconds: float, burst: int) -> Site:
    """Allow one request per `seconds`, and a burst: nginx's `limit_req`."""
    tokens, filled = float(burst), 0.0

    def serves(now: float) -> bool:
        nonlocal tokens, filled
        tokens, filled = min(float(burst), tokens + (now - filled) / seconds), now
        if tokens < 1.0 - 1e-9:
            return False
        tokens -= 1.0
        return True

    return serves


def window(most: int, seconds: float) -> Site:
    """Allow at most that many requests in any sliding window."""
    served: deque[float] = deque()

    def serves(now: float) -> bool:
        while served and served[0] <= now - seconds:
            served.popleft()
        if len(served) >= most:
            return False
        served.append(now)
        return True

    return serves


def at_random(share: float) -> Site:
    """Refuse that share of all requests, whatever the pace: a fault, not a limit."""
    rng = random.Random(9309)
    return lambda _now: rng.random() >= share


def in_bursts(every: float, length: float) -> Site:
    """Refuse everything at the beginning of each period: maintenance."""
    return lambda now: now % every >= length


@dataclass(frozen=True, slots=True)
class Scene:
    """One site: its rule, the interval in its file, and the Retry-After of its refusals."""

    title: str
    usual: float
    """Interval that its file asks for, in seconds."""
    allows: float
    """Requests per second that it would serve to a client that knows its rule and obeys its
    file."""
    site: Callable[[], Site]
    retry_after: float | None = 1.0
    """Retry-After of its refusals; None: absent, so that the block is `pacing.backoff_initial`."""


@dataclass(frozen=True, slots=True)
class Day:
    """The result of one day."""

    refused: int
    share: float
    """Used share of what the site allows."""
    slowest: float
    """The longest interval caused by refusals, in seconds."""


SCENES = (
    Scene("1 in 0.1 s", 0.05, 10.0, lambda: spaced(0.1)),
    Scene("1 in 0.13 s", 0.05, 1 / 0.13, lambda: spaced(0.13)),
    Scene("1 in 3 s", 0.05, 1 / 3, lambda: spaced(3.0)),
    Scene("1 in 0.13 s, 20 at once", 0.05, 1 / 0.13, lambda: bucket(0.13, 20)),
    Scene("60 a minute, Retry-After 60", 0.5, 1.0, lambda: window(60, 60.0), 60.0),
    Scene("60 a minute, no Retry-After", 0.5, 1.0, lambda: window(60, 60.0), None),
    Scene("60 a minute, Retry-After 1", 0.5, 1.0, lambda: window(60, 60.0)),
    Scene("1,000 an hour, Retry-After 600", 1.0, 1 / 3.6, lambda: window(1000, 3600.0), 600.0),
    Scene("1,000 an hour, Retry-After 60", 1.0, 1 / 3.6, lambda: window(1000, 3600.0), 60.0),
    Scene("1,000 an hour, no Retry-After", 1.0, 1 / 3.6, lambda: window(1000, 3600.0), None),
    Scene("0.01 % at random", 1.0, 1.0, lambda: at_random(0.0001)),
    Scene("0.1 % at random", 1.0, 1.0, lambda: at_random(0.001)),
    Scene("1 % at random", 1.0, 1.0, lambda: at_random(0.01)),
    Scene("1 % at random", 10.0, 0.1, lambda: at_random(0.01)),
    Scene("everything, 10 minutes in 6 hours", 1.0, 35 / 36, lambda: in_bursts(21_600.0, 600.0)),
    Scene("the same, no Retry-After", 1.0, 35 / 36, lambda: in_bursts(21_600.0, 600.0), None),
    Scene(
        "everything, 1 minute in 4 hours", 1.0, 239 / 240, lambda: in_bursts(14_400.0, 60.0), 60.0
    ),
    Scene("everything, 1 minute an hour", 1.0, 59 / 60, lambda: in_bursts(3600.0, 60.0), 60.0),
)


def simulate(scene: Scene, days: int = 1, *, length: float = DAY) -> list[Day]:
    """Simulate consecutive days of `length` seconds each."""
    clock = VirtualClock()
    memory = ScopeMemory(Rules(Config()), clock)
    engine = Engine(clock, memory, random.Random(1))
    engine.open()
    scope = memory.host(HOST)
    asked = RobotsInterval(scene.usual, f"crawl-delay {scene.usual:g} s from robots.txt line 2")
    serves = scene.site()
    found = []
    now = 0.0
    for day in range(1, days + 1):
        served = refused = 0
        slowest = 0.0
        while now < day * length:
            grant = engine.acquire_nowait("https://a.example/", HOST, asked, now)
            if grant is None:
                # A lease that was not granted may have changed the clock that it waits for.
                due = max(scope.due_at(), math.nextafter(now, math.inf))
                clock.advance(due - now)
                now = clock.monotonic()
                continue
            if serves(now):
                served += 1
                grant.report(200, 0.0, now=now)
            else:
                refused += 1
                grant.report(429, 0.0, scene.retry_after, now=now)
                slowest = max(slowest, scope.interval)
            grant.release(now)
        found.append(Day(refused, served / (length * scene.allows), slowest))
    return found


def run(options: Options) -> list[Table]:
    """Return the table of `docs/figures.md`."""
    days = options.rounds(quick=1, full=3)
    scenes = [scene for scene in SCENES if not options.quick or scene.usual >= 0.5]
    rows = []
    for scene in scenes:
        found = simulate(scene, days)
        rows.append(
            (
                scene.title,
                f"{scene.usual:g} s",
                f"{found[0].refused}",
                f"{found[0].share:.0%}",
                f"{found[-1].refused}",
                f"{found[-1].share:.0%}",
                f"{max(day.slowest for day in found):.3g} s",
            )
        )
    columns = (
        "the site refuses what is more than",
        "its file asks for",
        "refusals, day 1",
        "share used",
        f"day {days}",
        "share used ",
        "longest interval",
    )
    notes = (
        "One host, asked without a pause for as long as the clock of the scheduler permits, under "
        "virtual time; answers take no time. Share: pages served, of those that the site would "
        "have served to somebody who knew its rule and kept to its file.",
    )
    return [Table("After a refusal", columns, rows, notes=notes)]
