"""The progress of a crawl: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TextIO

from gatekeeper import urls
from gatekeeper.cli import paint
from gatekeeper.cli.crawl.manifest import Entry, Result
from gatekeeper.clock import Clock
from gatekeeper.decision import Decision, Reason, State, Verdict
from gatekeeper.errors import InvalidURL, StorageError, quoted
from gatekeeper.pacing.waiting import ClockView

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper

# --- what holds a crawl up -------------------------------------------------------------------


TURN = "turn"
"""The reason of a host that nothing holds up: its next turn comes, that is all."""
_MOST_TOLD = 50


@dataclass(frozen=True, slots=True)
class Holdup:
    """Why an origin is not asked now, and from when on it may be."""

    reason: str
    """One word for machines: a decision's reason, or TURN."""
    text: str
    """The same for people."""
    until: datetime | None = None
    """None: until somebody ends it."""

    @classmethod
    def of(cls, decision: Decision) -> Holdup:
        """What a deferral says. Its file is asked for again only at that moment."""
        text = decision.reason.replace("_", " ")
        if decision.state is State.UNREACHABLE:
            text = f"robots.txt: {text}"
            if decision.robots_status is not None:
                text += f" ({decision.robots_status})"
        return cls(decision.reason, text, decision.retry_at)

    def __str__(self) -> str:
        if self.until is None:
            return self.text
        return f"{self.text}; again at {self.until:%Y-%m-%d %H:%M:%S} UTC"


class Told:
    """Says of an origin that it is waited for: once for each reason, and not of too many."""

    def __init__(self, say: Callable[[str], object], *, most: int = _MOST_TOLD) -> None:
        self._say = say
        self._most = most
        self._told: set[tuple[str, str]] = set()

    def tell(self, origin: str, holdup: Holdup, slowed: str = "") -> None:
        """Say it, unless it was said, or it is but the next turn; and how slow it is after."""
        key = origin, holdup.reason
        if holdup.reason == TURN or key in self._told or len(self._told) > self._most:
            return
        self._told.add(key)
        if len(self._told) > self._most:
            self._say("waiting for still more hosts, which are not named one by one")
        else:
            self._say(f"waiting {origin}: {holdup}" + (f"; then {slowed}" if slowed else ""))


# --- counts ----------------------------------------------------------------------------------

_MOST_CAUSES = 10_000
"""Distinct causes kept for each outcome; what comes after is counted together."""
_OTHERS = ("", "other causes")


@dataclass(slots=True)
class Tally:
    """Counts; bounded, however many URLs there are."""

    total: int = 0
    """URLs taken in so far."""
    complete: bool = False
    """No more will come in."""
    skipped: int = 0
    """URLs of which an earlier run was done, or that were given twice."""
    unarchived: int = 0
    """Those of them whose pages are not in the WARC file of this run."""
    refused: int = 0
    """Those of them that an earlier run was denied, or that are no URLs."""
    begun: int = 0
    """Turns that were had."""
    in_flight: int = 0
    done: int = 0
    """URLs with an outcome."""
    size: int = 0
    """Bytes of bodies."""
    outcomes: Counter[Result] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    causes: dict[Result, Counter[tuple[str, str]]] = field(default_factory=dict)
    """For each outcome but fetched: how often which host, and why."""

    @property
    def waiting(self) -> int:
        """URLs without an outcome that are not being fetched at this moment."""
        return self.total - self.done - self.in_flight

    @property
    def clean(self) -> bool:
        """Whether everything was fetched, now or before."""
        return self.done == self.total == self.outcomes[Result.FETCHED] and not self.refused

    def take_in(self) -> None:
        """One more URL that is to have an outcome."""
        self.total += 1

    def skip(self, *, unarchived: bool, refused: bool) -> None:
        """A URL needs no asking; see `unarchived` and `refused`."""
        self.skipped += 1
        self.unarchived += unarchived
        self.refused += refused

    def end_list(self) -> None:
        """No more will come in."""
        self.complete = True

    def begin(self) -> None:
        """A request goes out, until `leave`."""
        self.begun += 1
        self.in_flight += 1

    def leave(self) -> None:
        """It is over, whatever came of it."""
        self.in_flight -= 1

    def add(self, entry: Entry) -> None:
        """Count one outcome."""
        self.done += 1
        self.outcomes[entry.outcome] += 1
        self.size += entry.size or 0
        if entry.outcome is Result.FETCHED:
            self.statuses[entry.status or 0] += 1
            return
        causes = self.causes.setdefault(entry.outcome, Counter())
        key = (_subject(entry), cause(entry))
        causes[key if key in causes or len(causes) < _MOST_CAUSES else _OTHERS] += 1

    def summary(self, *, most: int = 20, kept: bool = True) -> list[str]:
        """What is said at the end, a line each: what was denied by which line first. `kept`:
        whether the pages are stored anywhere."""
        lines = [self._fetched()]
        if not kept and self.size:
            lines.append("the pages were not kept: give -o DIR or --warc FILE for that")
        if self.unarchived:
            lines.append(
                f"not in the WARC file: {self.unarchived:,} of those done before, by a run "
                "that wrote none or another one"
            )
        if self.refused:
            lines.append(
                f"not fetched: {self.refused:,} of those done before, as they were refused or are "
                "no URLs; --retry-denied asks again for what was refused"
            )
        for outcome in (Result.DENIED, Result.FAILED):
            causes = self.causes.get(outcome, Counter())
            if not causes:
                continue
            lines.append(f"{outcome} {causes.total():,}")
            ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
            lines += [f"  {n:>6,}  {host}  {why}".rstrip() for (host, why), n in ranked[:most]]
            if len(ranked) > most:
                lines.append(f"          and {len(ranked) - most:,} more causes")
        return lines

    def _fetched(self) -> str:
        text = f"fetched {self.outcomes[Result.FETCHED]:,}"
        if self.statuses:
            parts = (f"{n:,} x {status}" for status, n in sorted(self.statuses.items()))
            text += f" ({', '.join(parts)})"
        text += f", {self.size:,} bytes"
        return f"{text}; {self.skipped:,} skipped, done before" if self.skipped else text


def cause(entry: Entry) -> str:
    """Why a URL was not fetched, in words: the deciding line where there is one."""
    if entry.error is not None:
        return entry.error
    return _by(entry.decision) if entry.decision is not None else ""


def _by(decision: Decision) -> str:
    if decision.rule is not None:
        return f"line {decision.rule.line}: {decision.rule.text}"
    text = decision.reason.replace("_", " ")
    if decision.note:
        text += f" ({decision.note})"
    if decision.retry_at is not None:
        text += f", ask again at {decision.retry_at:%Y-%m-%d %H:%M:%S} UTC"
    return text


def no_url(entry: Entry) -> str:
    """A text that is no URL, and where it stands: "urls.txt:6: 'not a url'"."""
    shown = quoted(entry.url)
    return f"{entry.where}: {shown}" if entry.where else shown


def _subject(entry: Entry) -> str:
    """What a line of the summary is about: a host, or the text that is no URL."""
    if not entry.tries:
        return no_url(entry)
    try:
        return urls.host_of(urls.split(entry.final_url or entry.url)[0])
    except InvalidURL:
        return ""


# --- speed -----------------------------------------------------------------------------------

_WINDOW = 60.0
"""Seconds over which a rate is taken: long enough for hosts that answer once in a while."""


_LEAST = 1.0
"""Seconds before which no rate is shown."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The rates of the last minute, and the time that is left at them."""

    urls: float
    """URLs that came to their end, a second."""
    size: float
    """Bytes of bodies, a second."""
    left: float | None
    """Seconds; None where it can't be told: the total or the rate is not known."""


class Speedometer:
    """Reads the counts of a crawl again and again. Memory: the samples of one minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def read(self, now: float, tally: Tally, turns: Sequence[NextTurn]) -> Speed | None:
        """How fast it goes, `now` being seconds of any one clock; None at the beginning.

        No crawl ends before its slowest host: what is left is at least the time that a host
        of `turns` needs for those that wait for it, each an interval after the last one.
        """
        samples = self._samples
        samples.append((now, tally.done, tally.size))
        while len(samples) > 1 and samples[1][0] <= now - _WINDOW:
            samples.popleft()
        since, done, size = samples[0]
        if now - since < _LEAST:
            return None
        urls, octets = (tally.done - done) / (now - since), (tally.size - size) / (now - since)
        return Speed(urls, octets, _left(tally, urls, turns))


def _left(tally: Tally, rate: float, turns: Sequence[NextTurn]) -> float | None:
    rest = tally.total - tally.done
    if not tally.complete or not rest:
        return None
    longest = max((turn.seconds + turn.interval * (turn.waiting - 1) for turn in turns), default=0)
    left = max(rest / rate if rate else 0.0, longest)
    return left if 0 < left < math.inf else None


# --- what is shown ---------------------------------------------------------------------------

_COLOURS = {Result.FETCHED: "green", Result.DENIED: "yellow", Result.FAILED: "red"}
_LEFT_OUT = 11
"""States that are not said while they stay the same: then one line is a minute."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """An origin that somebody waits for."""

    host: str
    """With its port, where that is not the scheme's own."""
    seconds: float
    """Until its next turn, as far as is known; 0: now."""
    waiting: int
    origin: str = ""
    holdup: Holdup | None = None
    """The last of what it has to wait for, if there is anything."""
    interval: float = 0.0
    """Seconds between two of its turns, as far as is known."""
    slowed: str = ""
    """How far its refusals have slowed it, and until when."""

    @property
    def problem(self) -> str:
        """What keeps it waiting, if that is more than that others were just asked."""
        if self.holdup is not None and self.holdup.reason != TURN:
            return self.holdup.text
        return self.slowed

    def __str__(self) -> str:
        why = f": {self.problem}" if self.problem else ""
        return f"{self.host} in {duration(self.seconds)} ({self.waiting:,} waiting{why})"


def watcher(*, quiet: bool, stream: TextIO | None = None) -> Progress:
    """What fits: nothing, a live display on a terminal with rich, or plain lines."""
    stream = stream or sys.stderr
    if quiet:
        return Progress()
    if stream.isatty():
        try:
            return Live(stream)
        except ImportError:
            pass
    return Plain(stream)


class Progress:
    """What is told how a crawl goes while it runs. This one shows nothing of it."""

    every: float = 5.0
    """Seconds between two `show`s."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def entry(self, entry: Entry) -> None:
        """One URL is done with."""

    def show(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None = None) -> None:
        """The state of things, the hosts whose turns come next, and how fast it goes."""

    def say(self, text: str) -> None:
        """Show a text that was asked for, at once: whoever presses Ctrl-C reads along."""
        print(text, file=sys.stderr, flush=True)


class Plain(Progress):
    """A line for every URL, and one for the state of things every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = ""
        self._left_out = 0

    def __exit__(self, *error: object) -> None:
        self._stream.flush()

    def entry(self, entry: Entry) -> None:
        """Say what came of it."""
        word, line = str(entry.outcome), line_of(entry)
        if line.startswith(word):  # of a page that was fetched the status stands there
            line = paint(word, _COLOURS[entry.outcome], self._stream) + line[len(word) :]
        print(line, file=self._stream)

    def show(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None = None) -> None:
        """Say how far it is, once there is anything to say; less often while nothing moves."""
        if not (tally.total or tally.skipped or tally.complete):
            return
        state = state_of(tally)
        if state == self._state and self._left_out < _LEFT_OUT:
            self._left_out += 1
            return
        self._state, self._left_out = state, 0
        text = f"-- {state}{_pace(speed)}"
        if turns:
            text += f"; next: {', '.join(str(turn) for turn in turns[:3])}"
        self.say(text)

    def say(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self._stream, flush=True)


class Live(Progress):
    """A bar and the hosts whose turns come next, redrawn in place; needs rich."""

    every: float = 0.5

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = Console(file=stream)
        # Drawn when told to: a thread of rich's own would race with the crawl's numbers.
        self._live = RichLive(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def entry(self, entry: Entry) -> None:
        """Print what was not fetched above the bar; the rest moves it."""
        if entry.outcome is not Result.FETCHED:
            self.say(line_of(entry), _COLOURS[entry.outcome])

    def say(self, text: str, style: str | None = None) -> None:
        """Print it above the bar."""
        from rich.text import Text  # noqa: PLC0415 - an extra

        # Not `print(..., style=)`: that would colour the bar below as well.
        self._console.print(Text(text, style or ""), soft_wrap=True)

    def show(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None = None) -> None:
        """Redraw."""
        self._live.update(self._picture(tally, turns, speed), refresh=True)

    def _picture(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None) -> Any:
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - an extra
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        # Until the list was read to its end nobody knows the total: the bar pulses.
        bar = ProgressBar(
            total=tally.total if tally.complete else None, completed=tally.done, width=40
        )
        rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for turn in turns:
            rows.add_row(
                Text(turn.host),
                duration(turn.seconds),
                f"{turn.waiting:,} waiting",
                Text(turn.problem),
            )
        frame = Table.grid()  # a bar alone does not end its line
        for row in (bar, Text(f"{state_of(tally)}{_pace(speed)}"), rows):
            frame.add_row(row)
        return frame


def state_of(tally: Tally) -> str:
    """Done, denied, waiting, failed, in one line."""
    total = f"{tally.total:,}" if tally.complete else f"{tally.total:,}+"
    return (
        f"{tally.done:,}/{total} done: {tally.outcomes[Result.FETCHED]:,} fetched, "
        f"{tally.outcomes[Result.DENIED]:,} denied, {tally.outcomes[Result.FAILED]:,} failed; "
        f"{tally.waiting:,} waiting, {tally.in_flight:,} in flight; {octets(tally.size)}"
    )


def _pace(speed: Speed | None) -> str:
    """How fast it goes and how long it takes, as the end of a line."""
    if speed is None:
        return ""
    rate = f"{speed.urls:.3g}" if speed.urls < 1_000 else f"{speed.urls:,.0f}"
    text = f", {rate} URLs/s, {octets(speed.size)}/s"
    return text if speed.left is None else f"{text}, about {duration(speed.left)} left"


def line_of(entry: Entry) -> str:
    """One URL's outcome in one line."""
    if entry.outcome is not Result.FETCHED:
        return f"{entry.outcome} {_names(entry)}: {cause(entry)}"
    size = f" {entry.size:,} bytes" if entry.size is not None else ""
    cut = ", truncated" if entry.truncated else ""
    return f"{entry.status} {_names(entry)}{size}{cut}"


def _names(entry: Entry) -> str:
    if not entry.tries:
        return no_url(entry)
    return f"{entry.url} -> {entry.final_url}" if entry.final_url else entry.url


def octets(number: float) -> str:
    """A size as people say it, in decimal units.

    >>> octets(999), octets(1_500), octets(2_345_678)
    ('999 bytes', '1.5 kB', '2.3 MB')
    """
    if number < 1_000:
        return f"{number:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        number /= 1_000
        if number < 1_000:
            return f"{number:.1f} {unit}"
    return f"{number / 1_000:.1f} TB"


def duration(seconds: float) -> str:
    """A waiting time as people say it.

    >>> duration(0), duration(3.2), duration(75), duration(7205)
    ('now', '3.2 s', '1:15', '2:00:05')
    """
    if seconds <= 0:
        return "now"
    if seconds == math.inf:
        return "no time that is known"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- the hosts that are waited for -----------------------------------------------------------


_NEVER = float("inf")
_REASONS = {
    "block": Reason.HOST_BLOCKED,
    "pause": Reason.HOST_PAUSED,
    "budget": Reason.BUDGET,
}
_HELD = frozenset({"pause"})
"""Kinds of clock that no time ends, but somebody."""


class Hosts:
    """How many URLs wait for each origin: two of one host have files of their own, and one
    may be deferred while the other is not. Memory: an entry for each origin that is waited for.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, url: str, origin: str | None = None) -> None:
        """One more URL waits for its origin, here and below for those who know it."""
        origin = origin or urls.split(url)[0]
        count, _ = self._waiting.get(origin, (0, url))
        self._waiting[origin] = (count + 1, url)

    def drop(self, url: str, origin: str | None = None) -> None:
        """One of them waits no longer."""
        origin = origin or urls.split(url)[0]
        count, some = self._waiting.get(origin, (0, url))
        if count > 1:
            self._waiting[origin] = (count - 1, some)
        else:
            self._waiting.pop(origin, None)

    async def busiest(self, gate: Gatekeeper, clock: Clock, most: int) -> list[NextTurn]:
        """The origins that most URLs wait for, the one whose turn comes first in front."""
        names = heapq.nlargest(most, self._waiting, key=lambda name: self._waiting[name][0])
        turns = [await self._turn(name, gate, clock) for name in names]
        return sorted(turns, key=lambda turn: (turn.seconds, turn.host))

    async def soonest(self, gate: Gatekeeper, clock: Clock, enough: float) -> float:
        """Seconds until the first turn of any; one within `enough` ends the search."""
        best = _NEVER
        for origin in tuple(self._waiting):
            best = min(best, (await self._turn(origin, gate, clock)).seconds)
            if best <= enough:
                break
        return best

    async def turn(self, url: str, gate: Gatekeeper, clock: Clock) -> NextTurn:
        """When the turn of that URL's origin comes, whether or not it waits for it already."""
        return await self._turn(urls.parse(url).origin, gate, clock)

    async def _turn(self, origin: str, gate: Gatekeeper, clock: Clock) -> NextTurn:
        count, url = self._waiting.get(origin, (0, ""))
        wall, seconds, holdup, interval = clock.wall(), 0.0, None, 0.0
        slowed = ""
        views: Iterable[ClockView] = ()
        with suppress(StorageError):  # nothing can be read: the decision says so
            views = await gate.why(urls.parse(origin).host)
        for view in views:
            if view.decides:
                interval = max(interval, view.seconds or 0.0)
            if view.kind == "interval" and view.since is not None:
                slowed = view.source
            if view.until is None:
                left = _NEVER if view.kind in _HELD else 0.0
            else:
                left = view.until.timestamp() - wall
            if left > seconds:
                reason = _REASONS.get(view.kind, TURN)
                seconds, holdup = left, Holdup(reason, view.source, view.until)
        decision = gate.peek(url) if url else None
        if decision is not None and decision.verdict is Verdict.DEFER:
            until = decision.retry_at
            left = until.timestamp() - wall if until is not None else _NEVER
            if left > seconds:
                seconds, holdup = left, Holdup.of(decision)
        host = origin.partition("://")[2]
        return NextTurn(
            host, seconds, count, origin=origin, holdup=holdup, interval=interval, slowed=slowed
        )
