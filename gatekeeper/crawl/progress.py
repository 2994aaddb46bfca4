"""The progress display of a crawl: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Self, TextIO

import msgspec

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.crawl.manifest import Entry, Result
from gatekeeper.decision import Decision, Reason, State
from gatekeeper.errors import StorageError, quoted
from gatekeeper.pacing.waiters import ClockView
from gatekeeper.robots import Severity
from gatekeeper.sitemaps import SitemapFinding
from gatekeeper.terminal import paint
from gatekeeper.urls import mask, printable

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper

# --- why hosts wait --------------------------------------------------------------------------


INTERVAL = "turn"
"""The reason of a host that only waits for its interval to pass."""
_MAX_REPORTED = 50


class Holdup(msgspec.Struct, frozen=True):
    """Why an origin may not be requested now, and when it may be."""

    reason: str
    """One word for machines: a decision's reason, or INTERVAL."""
    why: str
    """The reason for people."""
    retry_at: datetime | None = None
    """The time from which it may be requested; None: not before an operator allows it."""

    @classmethod
    def of(cls, decision: Decision) -> Holdup:
        """Return the hold-up of a deferral. Its file is not fetched again before that time."""
        text = decision.reason.replace("_", " ")
        if decision.state is State.UNREACHABLE:
            text = f"robots.txt: {text}"
            if decision.robots_status is not None:
                text += f" ({decision.robots_status})"
        return cls(decision.reason, text, decision.retry_at)

    def __str__(self) -> str:
        if self.retry_at is None:
            return self.why
        return f"{self.why}; again at {self.retry_at:%Y-%m-%d %H:%M:%S} UTC"


class HoldupReporter:
    """Reports origins that the crawl waits for: once per reason, and only a limited number."""

    def __init__(self, say: Callable[[str], object], *, most: int = _MAX_REPORTED) -> None:
        self._say = say
        self._most = most
        self._reported: set[tuple[str, str]] = set()

    def report(self, origin: str, holdup: Holdup, slowed: str = "") -> None:
        """Report a hold-up and the slower pace after it, unless it was reported or is INTERVAL."""
        key = origin, holdup.reason
        if holdup.reason == INTERVAL or key in self._reported or len(self._reported) > self._most:
            return
        self._reported.add(key)
        if len(self._reported) > self._most:
            self._say("waiting for more hosts, which are not listed")
        else:
            self._say(f"waiting for {origin}: {holdup}" + (f"; then {slowed}" if slowed else ""))


# --- counts ----------------------------------------------------------------------------------

_MAX_CAUSES = 10_000
"""Distinct causes that are counted; later ones are counted together as other causes."""
_OTHER_CAUSES = ("", "other causes")


@dataclass(slots=True)
class Tally:
    """The counts of a crawl. Memory is bounded, however many URLs there are."""

    total: int = 0
    """URLs read so far, without the skipped ones."""
    complete: bool = False
    """True when the whole list was read."""
    skipped: int = 0
    """URLs that an earlier run has dealt with, or that were given twice."""
    unarchived: int = 0
    """Skipped URLs whose pages are not in the WARC file of this run."""
    refused: int = 0
    """Skipped URLs that an earlier run was denied, or that are not URLs."""
    not_urls: int = 0
    """Those of them that are not URLs."""
    begun: int = 0
    """Leases taken."""
    in_flight: int = 0
    done: int = 0
    """URLs with an outcome."""
    size: int = 0
    """Bytes of all bodies."""
    outcomes: Counter[Result] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    sitemaps: list[SitemapFinding] = field(default_factory=list)
    """What is wrong with sitemaps, at most 1,000 findings for each of the given origins."""
    causes: Counter[tuple[Result, str, str]] = field(default_factory=Counter)
    """Counts of (outcome, host, reason), except for fetched."""

    @property
    def waiting(self) -> int:
        """URLs without an outcome that are not being fetched now."""
        return self.total - self.done - self.in_flight

    def clean(self, *, denied_ok: bool = False) -> bool:
        """Return True if every URL was fetched, by this run or an earlier one, or with `denied_ok`
        fetched or denied, and every sitemap was read."""
        good, bad = self.outcomes[Result.FETCHED], self.refused
        if denied_ok:
            good, bad = good + self.outcomes[Result.DENIED], self.not_urls
        return self.done == self.total == good and not bad and not self.unread

    @property
    def unread(self) -> list[SitemapFinding]:
        """What is missing of sitemaps that could not be read completely."""
        return [one for one in self.sitemaps if one.severity is Severity.ERROR]

    def skip(self, *, unarchived: bool, refused: bool, is_url: bool = True) -> None:
        """Count a URL that need not be fetched; see the attributes `unarchived` and `refused`."""
        self.skipped += 1
        self.unarchived += unarchived
        self.refused += refused
        self.not_urls += refused and not is_url

    def add(self, entry: Entry) -> None:
        """Count the outcome of a URL."""
        self.done += 1
        self.outcomes[entry.outcome] += 1
        self.size += entry.size or 0
        if entry.outcome is Result.FETCHED:
            self.statuses[entry.status or 0] += 1
            return
        key = entry.outcome, _subject(entry), cause(entry)
        if key not in self.causes and len(self.causes) >= _MAX_CAUSES:
            key = entry.outcome, *_OTHER_CAUSES
        self.causes[key] += 1

    def summary(self, *, most: int = 20, stored: bool = True) -> list[str]:
        """Return the lines of the final summary: counts, then denied and failed URLs by cause.

        `stored`: whether the pages are stored anywhere; `most`: causes to list for each outcome.
        """
        lines = [self._fetched()]
        if not stored and self.size:
            lines.append("the pages were not stored: use -o DIR or --warc FILE to store them")
        if self.unarchived:
            lines.append(f"not in the WARC file: {self.unarchived:,} of the skipped pages")
        if self.refused:
            lines.append(
                f"not fetched: {self.refused:,} of the skipped URLs, which were denied or are not "
                "URLs; --retry-denied asks again about denied ones"
            )
        if errors := self.unread:
            number = len({one.source for one in errors})
            lines.append(f"not read completely: {number:,} sitemaps")
            lines += [f"          {mask(one.source)}  {one.message}" for one in errors[:most]]
        for outcome in (Result.DENIED, Result.FAILED):
            if number := self.outcomes[outcome]:
                lines.append(f"{outcome} {number:,}")
            ranked = sorted((-n, key[1:]) for key, n in self.causes.items() if key[0] is outcome)
            lines += [f"  {-n:>6,}  {host}  {why}".rstrip() for n, (host, why) in ranked[:most]]
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


_MAX_TEXT, _MAX_ERROR = 200, 1_000
"""Characters of a rule or note, and of an error, that are shown."""


def cause(entry: Entry) -> str:
    """Return in words why a URL was not fetched: the deciding line, if there is one. Text of a site
    is escaped for terminals, and cut."""
    if entry.error is not None or (decision := entry.decision) is None:
        return printable(entry.error or "", _MAX_ERROR)
    if decision.rule is not None:
        return f"line {decision.rule.line}: {printable(decision.rule.text, _MAX_TEXT)}"
    text = decision.reason.replace("_", " ")
    if decision.note:
        text += f" ({printable(decision.note, _MAX_TEXT)})"
    if decision.retry_at is not None:
        text += f", ask again at {decision.retry_at:%Y-%m-%d %H:%M:%S} UTC"
    return text


def no_url(entry: Entry) -> str:
    """Return a text that is not a URL, with its file and line: "urls.txt:6: 'not a url'"."""
    shown = quoted(entry.url)
    return f"{entry.where}: {shown}" if entry.where else shown


def _subject(entry: Entry) -> str:
    """Return the subject of a line of the summary: a host, or the text that is not a URL."""
    if not entry.tries:
        return no_url(entry)
    return urls.host_of(urls.split(entry.final_url or entry.url)[0])


# --- speed -----------------------------------------------------------------------------------

_WINDOW = 60.0
"""Seconds over which a rate is measured, long enough for hosts with long intervals."""


_MIN_SPAN = 1.0
"""Seconds before the first rate is shown."""


class Speedometer:
    """Computes rates from regular samples of the counts. Memory: the samples of one minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def read(self, now: float, tally: Tally, due: Sequence[DueOrigin]) -> str:
        """Take a sample at `now` (seconds of any clock). Return the rates of the last minute and
        the remaining time, as far as they are known, as the end of a line.

        No crawl ends before its slowest host: the remaining time is at least the time that a host
        of `turns` needs for its waiting URLs, one per interval.
        """
        samples = self._samples
        samples.append((now, tally.done, tally.size))
        while len(samples) > 1 and samples[1][0] <= now - _WINDOW:
            samples.popleft()
        start, done, size = samples[0]
        if now - start < _MIN_SPAN:
            return ""
        rate = (tally.done - done) / (now - start)
        text = f"{rate:.3g}" if rate < 1_000 else f"{rate:,.0f}"
        text = f", {text} URLs/s, {octets((tally.size - size) / (now - start))}/s"
        remaining = tally.total - tally.done
        if not tally.complete or not remaining:
            return text
        slowest = (one.seconds + one.interval * (one.waiting - 1) for one in due)
        left = max((remaining / rate if rate else 0.0, *slowest))
        return f"{text}, about {duration(left)} left" if 0 < left < math.inf else text


# --- displays --------------------------------------------------------------------------------

_COLOURS = {Result.FETCHED: "green", Result.DENIED: "yellow", Result.FAILED: "red"}
_MAX_SKIPPED = 11
"""Unchanged states that are not printed between two that are: one line per minute remains."""


@dataclass(frozen=True, slots=True)
class DueOrigin:
    """An origin with waiting URLs, and when it is due next."""

    origin: str
    seconds: float
    """Seconds until it is due, as far as is known; 0: now."""
    waiting: int
    """URLs that wait for it."""
    holdup: Holdup | None = None
    """The hold-up that ends last, if there is any."""
    interval: float = 0.0
    """Seconds between two of its requests, as far as is known."""
    slowed: str = ""
    """How much its refusals have slowed it down, and until when."""

    @property
    def host(self) -> str:
        """The host, with its port if that is not the scheme's default."""
        return self.origin.rpartition("://")[2]

    @property
    def problem(self) -> str:
        """Why it waits, if for more than its interval; else how it is slowed down, or ""."""
        if self.holdup is not None and self.holdup.reason != INTERVAL:
            return self.holdup.why
        return self.slowed

    def __str__(self) -> str:
        why = f": {self.problem}" if self.problem else ""
        return f"{self.host} in {duration(self.seconds)} ({self.waiting:,} waiting{why})"


def watcher(*, quiet: bool, stream: TextIO | None = None) -> Progress:
    """Return the suitable display: none if `quiet`, live on a terminal with rich, else lines."""
    stream = stream or sys.stderr
    if quiet:
        return Progress()
    if stream.isatty():
        with suppress(ImportError):
            return Live(stream)
    return Plain(stream)


class Progress:
    """The interface of progress displays. This class displays nothing but messages."""

    every: float = 5.0
    """Seconds between two calls of `show`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def entry(self, entry: Entry) -> None:
        """Display the outcome of one URL."""

    def show(self, tally: Tally, due: Sequence[DueOrigin], speed: str = "") -> None:
        """Display the counts, the hosts that are due next, and the speed."""

    def say(self, text: str) -> None:
        """Print a message immediately, such as the answer to a Ctrl-C."""
        print(text, file=self._stream, flush=True)


class Plain(Progress):
    """Prints a line for every URL, and one with the counts every few seconds."""

    _state = ""
    _unchanged = 0

    def entry(self, entry: Entry) -> None:
        """Print the outcome of one URL."""
        outcome, line = str(entry.outcome), line_of(entry)
        if line.startswith(outcome):  # the line of a fetched page starts with its status
            line = paint(outcome, _COLOURS[entry.outcome], self._stream) + line[len(outcome) :]
        self.say(line)

    def show(self, tally: Tally, due: Sequence[DueOrigin], speed: str = "") -> None:
        """Print the counts, once there are any; less often while nothing changes."""
        if not (tally.total or tally.skipped or tally.complete):
            return
        state = state_of(tally)
        if state == self._state and self._unchanged < _MAX_SKIPPED:
            self._unchanged += 1
            return
        self._state, self._unchanged = state, 0
        text = f"-- {state}{speed}"
        if due:
            text += f"; next: {', '.join(str(one) for one in due[:3])}"
        self.say(text)


class Live(Progress):
    """A progress bar and the hosts that are due next, redrawn in place. Needs rich."""

    every: float = 0.5

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = Console(file=stream)
        # Redrawn by `show` only: a thread of rich would race with the crawl's counts.
        self._live = RichLive(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def entry(self, entry: Entry) -> None:
        """Print a URL that was not fetched above the bar."""
        if entry.outcome is not Result.FETCHED:
            self.say(line_of(entry), _COLOURS[entry.outcome])

    def say(self, text: str, style: str | None = None) -> None:
        """Print a message above the bar."""
        from rich.text import Text  # noqa: PLC0415 - an extra

        # Not `print(..., style=)`, which would colour the bar as well.
        self._console.print(Text(text, style or ""), soft_wrap=True)

    def show(self, tally: Tally, due: Sequence[DueOrigin], speed: str = "") -> None:
        """Redraw the bar and the hosts."""
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - an extra
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        # The total is unknown until the whole list was read; until then the bar pulses.
        bar = ProgressBar(
            total=tally.total if tally.complete else None, completed=tally.done, width=40
        )
        rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for one in due:
            rows.add_row(
                Text(one.host), duration(one.seconds), f"{one.waiting:,} waiting", Text(one.problem)
            )
        frame = Table.grid()  # a bar outside a grid does not end its line
        for row in (bar, Text(f"{state_of(tally)}{speed}"), rows):
            frame.add_row(row)
        self._live.update(frame, refresh=True)


def state_of(tally: Tally) -> str:
    """Return the counts in one line: done, fetched, denied, failed, waiting, in flight, bytes."""
    total = f"{tally.total:,}" if tally.complete else f"{tally.total:,}+"
    return (
        f"{tally.done:,}/{total} done: {tally.outcomes[Result.FETCHED]:,} fetched, "
        f"{tally.outcomes[Result.DENIED]:,} denied, {tally.outcomes[Result.FAILED]:,} failed; "
        f"{tally.waiting:,} waiting, {tally.in_flight:,} in flight; {octets(tally.size)}"
    )


def line_of(entry: Entry) -> str:
    """Return the outcome of one URL in one line."""
    if entry.outcome is not Result.FETCHED:
        return f"{entry.outcome} {_url_text(entry)}: {cause(entry)}"
    size = f" {entry.size:,} bytes" if entry.size is not None else ""
    cut = ", truncated" if entry.truncated else ""
    return f"{entry.status} {_url_text(entry)}{size}{cut}"


def _url_text(entry: Entry) -> str:
    if not entry.tries:
        return no_url(entry)
    return f"{entry.url} -> {entry.final_url}" if entry.final_url else entry.url


def octets(number: float) -> str:
    """Format a size for people, in decimal units.

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
    """Format a waiting time for people.

    >>> duration(0), duration(3.2), duration(75), duration(7205)
    ('now', '3.2 s', '1:15', '2:00:05')
    """
    if seconds <= 0:
        return "now"
    if seconds == math.inf:
        return "an unknown time"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- hosts with waiting URLs -----------------------------------------------------------------


_REASONS = {
    "block": Reason.HOST_BLOCKED,
    "pause": Reason.HOST_PAUSED,
    "budget": Reason.BUDGET,
    "fleet": Reason.FLEET,
    "storage": Reason.STORAGE,
}
_ENDLESS = {"pause": math.inf, "fleet": 1.0, "storage": 1.0}
"""Seconds that count for kinds of clock whose end is unknown; others may end at any moment."""


class WaitingHosts(Counter[str]):
    """The number of URLs that wait for each origin.

    Two origins of a host have separate files, and one may be deferred while the other is not.
    Memory: an entry for each origin with waiting URLs.
    """

    def drop(self, origin: str) -> None:
        """Count a URL of the origin as no longer waiting."""
        self[origin] -= 1
        if self[origin] <= 0:
            del self[origin]

    async def busiest(self, gate: Gatekeeper, clock: Clock, most: int) -> list[DueOrigin]:
        """Return the `most` origins with the most waiting URLs, sorted by when they are due."""
        due = [await self.due(origin, gate, clock) for origin, _ in self.most_common(most)]
        return sorted(due, key=lambda one: (one.seconds, one.host))

    async def soonest(self, gate: Gatekeeper, clock: Clock, enough: float) -> float:
        """Return the seconds until the first origin is due; stop at one within `enough`."""
        best = math.inf
        for origin in tuple(self):
            best = min(best, (await self.due(origin, gate, clock)).seconds)
            if best <= enough:
                break
        return best

    async def due(self, origin: str, gate: Gatekeeper, clock: Clock) -> DueOrigin:
        """Return when an origin is due next, which need not be waiting itself."""
        wall, seconds, holdup, interval, slowed = clock.wall(), 0.0, None, 0.0, ""
        try:
            views = await gate.why(urls.host_of(origin))
        except StorageError as error:  # it can't be read
            views = (ClockView(origin, "storage", str(error)),)
        for view in views:
            of_file = view.kind in ("file", "visit-time")
            if of_file and view.scope != origin:
                continue  # another origin of the host
            if view.kind == "interval" and view.decides:
                interval = max(interval, view.seconds or 0.0)
            if view.kind == "interval" and view.since is not None:
                slowed = view.source
            if view.until is None:
                left = _ENDLESS.get(view.kind, 0.0)
            else:
                left = view.until.timestamp() - wall
            if left > seconds:
                reason, why = _REASONS.get(view.kind, INTERVAL), view.source
                if of_file:
                    reason, why = why.partition(" ")[0], why.replace("_", " ")
                    why = f"robots.txt: {why}" if view.kind == "file" else why
                seconds, holdup = left, Holdup(reason, why, view.until)
        return DueOrigin(origin, seconds, self[origin], holdup, interval, slowed)
