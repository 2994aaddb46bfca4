"""What an audit record says in sum, for people: who was asked how often and how fast, what was
refused and why, which signals were met, and who decided otherwise.

One pass verifies the record and counts. The memory grows with the number of hosts; the report
shows the busiest ones, and the sum of the others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec
from cachetools import FIFOCache

from gatekeeper.audit.lines import (
    AnsweredLine,
    BlockLine,
    GrantLine,
    Line,
    OutcomeLine,
    OverrideLine,
    RobotsLine,
    StartLine,
)
from gatekeeper.audit.reading import ChainEntry, host_of_line, moment_text
from gatekeeper.audit.verify import Verification, VerifyReport
from gatekeeper.clock import utc

MAX_HOSTS: Final = 200
"""Hosts that a report shows."""
MAX_ROWS: Final = 200
"""Rows of every other table."""
_MAX_BARS: Final = 120
"""Points in time of the chart. They move apart when a record is longer."""
_MAX_SPANS: Final = 1_000
"""Spans of its events that are counted before they are made longer."""
_MAX_TEXT: Final = 300
_MOST_LEASES: Final = 100_000
_OTHERS: Final = "others"
_DEEPEST: Final = 20
"""Objects within objects that are shown."""


class HostRow(msgspec.Struct, gc=False):
    """What a record says of one host."""

    host: str
    requests: int = 0
    """Requests that were sent, those for robots.txt included."""
    robots: int = 0
    """Requests for robots.txt."""
    refused: int = 0
    """Requests that were denied or put off."""
    failed: int = 0
    """Requests without a response, or answered with 429 or 5xx."""
    bytes: int = 0
    blocks: int = 0
    shortest: float | None = None
    """The shortest time between two requests, in seconds; None: there was one only."""
    interval: float | None = None
    """The interval in force then."""
    asked: str = ""
    """Where that interval came from; that of the last request if there was one only."""


class OverrideRow(msgspec.Struct):
    """A rule of the operator, and who set it."""

    match: str
    by: str | None
    reason: str | None
    since: str
    until: str | None
    rule: str
    """What it sets."""
    ended: str | None = None


class AuditReport(msgspec.Struct, kw_only=True):
    """A record in sum."""

    verified: VerifyReport
    user_agents: list[str] = []
    versions: list[str] = []
    hosts: list[HostRow] = []
    """The busiest ones."""
    other_hosts: int = 0
    others: HostRow = msgspec.field(default_factory=lambda: HostRow(_OTHERS))
    """The sum of the hosts that are not shown."""
    allowed: dict[str, int] = {}
    """Leases for pages, by the reason of their decision."""
    refused: dict[str, int] = {}
    """Refusals, as "deny: rule"."""
    statuses: dict[str, int] = {}
    files: dict[str, int] = {}
    """What was read in place of robots.txt, by the outcome."""
    signals: dict[str, int] = {}
    overrides: list[OverrideRow] = []
    blocks: int = 0
    interval: float = 60.0
    """Seconds between two points of `times`."""
    times: list[tuple[str, int, int]] = []
    """Requests and refusals from each time on."""


class TimeSeries:
    """Counts over time, in a bounded number of equal spans."""

    def __init__(self) -> None:
        self.seconds: int = 60
        self._counts: Counter[tuple[int, int]] = Counter()
        """By the number of the span, and the kind of the events."""

    def add(self, wall: float, which: int) -> None:
        """Count one event of a kind, 0 or 1."""
        self._counts[int(wall // self.seconds), which] += 1
        if len(self._counts) > _MAX_SPANS:
            self._lengthen()

    def _lengthen(self) -> None:
        """Double the length of the spans until there are few."""
        while max(self._counts)[0] - min(self._counts)[0] >= _MAX_BARS:
            self.seconds *= 2
            shorter, self._counts = self._counts, Counter()
            for (number, which), count in shorter.items():
                self._counts[number // 2, which] += count

    def rows(self) -> list[tuple[str, int, int]]:
        """Return each span with its begin and counts, those without events included."""
        if not self._counts:
            return []
        self._lengthen()
        numbers = range(min(self._counts)[0], max(self._counts)[0] + 1)
        return [
            (moment_text(utc(one * self.seconds)), self._counts[one, 0], self._counts[one, 1])
            for one in numbers
        ]


def _count(counts: dict[str, int], key: str) -> None:
    """Count a key that a site may choose: of very many ones only some are kept."""
    key = key if key in counts or len(counts) < MAX_ROWS else _OTHERS
    counts[key] = counts.get(key, 0) + 1


class _Sums:
    """Counts the lines of a record, for a report."""

    def __init__(self, report: AuditReport) -> None:
        self.report = report
        self.hosts: dict[str, HostRow] = {}
        self.leases: FIFOCache[tuple[int, str], str] = FIFOCache(_MOST_LEASES)
        """The hosts of open leases. Those of processes that were killed stay for some time."""
        self.series = TimeSeries()
        self.agents: dict[str, int] = {}
        self.versions: dict[str, int] = {}
        self.in_force: dict[tuple[int, str], OverrideRow] = {}

    def row(self, host: str) -> HostRow:
        """Return the row of a host."""
        return self.hosts.setdefault(host, HostRow(host))

    def see(self, entry: ChainEntry, line: Line) -> None:
        """Count one line."""
        match line:
            case GrantLine():
                self._grant(entry, line)
            case OutcomeLine():
                self._outcome(entry, line)
            case AnsweredLine():
                self._refusal(entry, line)
            case RobotsLine():
                _count(self.report.files, line.outcome)
            case BlockLine() if line.until is not None and line.until > line.t:
                self.report.blocks += 1
                if line.scope in self.hosts:
                    self.row(line.scope).blocks += 1
            case OverrideLine():
                self._override(entry, line)
            case StartLine():
                _count(self.agents, line.user_agent)
                _count(self.versions, line.gatekeeper)

    def _grant(self, entry: ChainEntry, line: GrantLine) -> None:
        host = line.scopes[0].scope if line.scopes else ""
        row = self.row(host)
        if line.robots:
            row.robots += 1
        else:
            _count(self.report.allowed, str(line.reason))
        row.requests += 1
        if line.scopes:
            row.asked = line.scopes[0].source
        self.series.add(entry.wall, 0)
        self.leases[entry.chain, line.lease] = host

    def _outcome(self, entry: ChainEntry, line: OutcomeLine) -> None:
        host = self.leases.pop((entry.chain, line.lease), None)
        if host is None:
            return
        row = self.row(host)
        if line.start is None:  # it was given back
            row.requests -= 1
            return
        row.bytes += line.size or 0
        status = line.status
        if status is None or status == 429 or status >= 500:
            row.failed += 1
        _count(self.report.statuses, "no response" if status is None else str(status))
        for name, value in line.signals.items():
            _count(self.report.signals, f"{name}: {_words(value)}"[:_MAX_TEXT])

    def _refusal(self, entry: ChainEntry, line: AnsweredLine) -> None:
        if line.verdict == "allow":
            return
        _count(self.report.refused, f"{line.verdict}: {line.reason}")
        self.series.add(entry.wall, 1)
        self.row(host_of_line(line) or "").refused += 1

    def _override(self, entry: ChainEntry, line: OverrideLine) -> None:
        row = self.in_force.pop((entry.chain, line.match), None)
        at = moment_text(line.t)
        if row is not None:
            row.ended = at
        if line.ended or len(self.report.overrides) >= MAX_ROWS:
            return
        until = None if line.until is None else moment_text(line.until)
        sets = what_it_sets(line)[:_MAX_TEXT]
        row = OverrideRow(line.match, line.by, line.reason, at, until, sets)
        self.report.overrides.append(row)
        self.in_force[entry.chain, line.match] = row


_SHOWN: Final = frozenset({"match", "by", "reason", "until"})
"""Fields of a rule that have columns of their own."""


def what_it_sets(line: OverrideLine) -> str:
    """Return the settings of an override as text for people."""
    return _words({k: v for k, v in (line.rule or {}).items() if v is not None and k not in _SHOWN})


def _words(value: Any, depth: int = 0) -> str:
    """Return a value as text for people."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one, depth + 1)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_words(one, depth + 1) for one in value)
    return "yes" if value is True else "no" if value is False else str(value)


def report_of(verification: Verification) -> AuditReport:
    """Run a verification, and sum up what it reads."""
    report = AuditReport(verified=verification.result)
    sums = _Sums(report)
    verification.run(sums.see)
    for host, row in sums.hosts.items():
        log = verification.pace.scopes.get(host)
        if log is not None and log.shortest < float("inf"):
            row.shortest, row.interval, row.asked = log.shortest, log.interval_then, log.source_then
    rows = sorted(sums.hosts.values(), key=lambda row: (-row.requests, -row.refused, row.host))
    report.user_agents, report.versions = sorted(sums.agents), sorted(sums.versions)
    report.hosts, report.other_hosts = rows[:MAX_HOSTS], max(0, len(rows) - MAX_HOSTS)
    for name in ("allowed", "refused", "statuses", "files", "signals"):
        setattr(report, name, dict(Counter(getattr(report, name)).most_common()))
    report.times = sums.series.rows()
    report.interval = float(sums.series.seconds)
    for name in ("requests", "robots", "refused", "failed", "bytes", "blocks"):
        setattr(report.others, name, sum(getattr(row, name) for row in rows[MAX_HOSTS:]))
    return report
