"""How a crawl goes, for whoever watches: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from gatekeeper.cli.crawl.holdups import TURN, Holdup
from gatekeeper.cli.crawl.manifest import Entry, Outcome
from gatekeeper.cli.crawl.speed import Speed
from gatekeeper.cli.crawl.tally import Tally, cause, no_url
from gatekeeper.cli.terminal import paint

__all__ = ["NextTurn", "Plain", "Progress", "Silent", "line_of", "watcher"]


_COLOURS = {Outcome.FETCHED: "green", Outcome.DENIED: "yellow", Outcome.FAILED: "red"}
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


class Progress(Protocol):
    """Shows a crawl while it runs. `every` is the seconds between two `show`s."""

    every: float

    def __enter__(self) -> Progress: ...

    def __exit__(self, *error: object) -> None: ...

    def entry(self, entry: Entry) -> None:
        """One URL is done with."""

    def show(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None = None) -> None:
        """The state of things, the hosts whose turns come next, and how fast it goes."""

    def say(self, text: str) -> None:
        """Something that whoever watches asked for; at once."""


def watcher(*, quiet: bool, stream: TextIO | None = None) -> Progress:
    """What fits: nothing, a live display on a terminal with rich, or plain lines."""
    stream = stream or sys.stderr
    if quiet:
        return Silent()
    if stream.isatty():
        try:
            return Live(stream)
        except ImportError:
            pass
    return Plain(stream)


class Silent:
    """Shows nothing of itself."""

    every = 5.0

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def entry(self, entry: Entry) -> None:
        """Nothing."""

    def show(self, tally: Tally, turns: Sequence[NextTurn], speed: Speed | None = None) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Whoever presses Ctrl-C reads along."""
        print(text, file=sys.stderr, flush=True)


class Plain:
    """A line for every URL, and one for the state of things every few seconds."""

    every = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = ""
        self._left_out = 0

    def __enter__(self) -> Plain:
        return self

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


class Live:
    """A bar and the hosts whose turns come next, redrawn in place; needs rich."""

    every = 0.5

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = Console(file=stream)
        # Drawn when told to: a thread of rich's own would race with the crawl's numbers.
        self._live = RichLive(console=self._console, auto_refresh=False)

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def entry(self, entry: Entry) -> None:
        """Print what was not fetched above the bar; the rest moves it."""
        if entry.outcome is not Outcome.FETCHED:
            self.say(line_of(entry), _COLOURS[entry.outcome])

    def say(self, text: str, style: str | None = None) -> None:
        """Print it above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)

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
        f"{tally.done:,}/{total} done: {tally.outcomes[Outcome.FETCHED]:,} fetched, "
        f"{tally.outcomes[Outcome.DENIED]:,} denied, {tally.outcomes[Outcome.FAILED]:,} failed; "
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
    if entry.outcome is not Outcome.FETCHED:
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
