"""What a crawl came to, counted while it runs: for the progress bar and the summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gatekeeper import urls
from gatekeeper.cli.crawl.manifest import Entry, Outcome
from gatekeeper.decision import Decision
from gatekeeper.errors import InvalidURL

__all__ = ["Tally", "cause", "no_url"]

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
    in_flight: int = 0
    size: int = 0
    """Bytes of bodies."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    causes: dict[Outcome, Counter[tuple[str, str]]] = field(default_factory=dict)
    """For each outcome but fetched: how often which host, and why."""

    @property
    def done(self) -> int:
        """URLs with an outcome."""
        return self.outcomes.total()

    @property
    def waiting(self) -> int:
        """URLs without an outcome that are not being fetched at this moment."""
        return self.total - self.done - self.in_flight

    @property
    def clean(self) -> bool:
        """Whether everything was fetched, now or before."""
        return self.done == self.total == self.outcomes[Outcome.FETCHED] and not self.refused

    def add(self, entry: Entry) -> None:
        """Count one outcome."""
        self.outcomes[entry.outcome] += 1
        self.size += entry.size or 0
        if entry.outcome is Outcome.FETCHED:
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
        for outcome in (Outcome.DENIED, Outcome.FAILED):
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
        text = f"fetched {self.outcomes[Outcome.FETCHED]:,}"
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
    return f"{entry.where}: {entry.url!r}" if entry.where else repr(entry.url)


def _subject(entry: Entry) -> str:
    """What a line of the summary is about: a host, or the text that is no URL."""
    if not entry.tries:
        return no_url(entry)
    try:
        return urls.host_of(urls.split(entry.final_url or entry.url)[0])
    except InvalidURL:
        return ""
