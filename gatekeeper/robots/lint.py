"""Findings about a file: what its author got wrong, or may not have meant.

Every check is one pass over lines or rules, so that a hostile file costs no more than a
multiple of its size. `CODES` documents each code; the messages quote little of the file,
and only in printable form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gatekeeper.robots import signals, timing
from gatekeeper.robots.findings import CODES, MAX_FINDINGS, Code, Finding, Full, Report
from gatekeeper.robots.lines import Line, iter_lines
from gatekeeper.robots.lint_groups import check_groups
from gatekeeper.robots.lint_values import (
    check_agent,
    check_version,
    field_without_colon,
    quoted,
    spelling,
)
from gatekeeper.robots.model import Dialect, Group, Severity

if TYPE_CHECKING:
    from gatekeeper.robots.parser import RobotsTxt

__all__ = ["CODES", "MAX_FINDINGS", "Code", "Finding", "findings", "lint"]

_HTML = re.compile(r"[\s\ufeff]*<(?:!doctype\s+html|html|head|body|\?xml)\b", re.IGNORECASE)

_IN_GROUPS = frozenset(
    {
        *("crawl-delay", "request-rate", "visit-time", "robot-version", "comment"),
        *("content-usage", "content-signal", "noindex"),
    }
)
_ANYWHERE = frozenset({"sitemap", "host", "clean-param", "license"})


def findings(robots: RobotsTxt) -> tuple[Finding, ...]:
    """Everything that is to be said about a file, by line.

    >>> from gatekeeper.robots import RobotsTxt
    >>> [(f.line, f.code) for f in findings(RobotsTxt.parse("User-agent: *\\nDissalow: /"))]
    [(1, 'group-without-rules'), (2, 'misspelt-field')]
    """
    return lint(
        robots.octets,
        robots.groups,
        truncated=robots.truncated,
        bom=robots.bom,
        dialect=robots.forced,
    )


def lint(
    text: str,
    groups: Sequence[Group],
    *,
    truncated: bool = False,
    bom: str = "",
    dialect: Dialect | None = None,
) -> tuple[Finding, ...]:
    """The same from its parts: the decoded text, its groups, and the dialect if forced.

    `text` is octets in a str (see `lines`).
    """
    report = Report()
    cut = False
    try:
        html = _check_file(report, text, truncated=truncated, bom=bom)
        reader = _Lines(report, dialect, html=html)
        for line in iter_lines(text):
            reader.read(line)
        reader.end()
        check_groups(report, groups)
    except Full:
        cut = True
    return report.result(cut=cut)


def _check_file(report: Report, text: str, *, truncated: bool, bom: str) -> bool:
    if bom == "utf-8":
        report.add(1, "bom")
    elif bom:
        report.add(1, "encoding", f"It is in {bom}.")
    if truncated:
        report.add(text.count("\n") + 1, "truncated")
    if _HTML.match(text) is None:
        return False
    report.add(1, "html")
    return True


class _Lines:
    """Reads line by line, with as much memory as the checks need of what came before."""

    def __init__(self, report: Report, dialect: Dialect | None, *, html: bool) -> None:
        self._report = report
        self._html = html
        """The lines of a page are no records, and one finding about that is enough."""
        self._old = dialect is not None and dialect is not Dialect.RFC9309
        """Blank lines end a record (R94-03)."""
        self._any_record = False
        self._any_agent = False
        self._in_group = False
        self._ruled = False
        """The group has a rule: the next user-agent line begins another one (RFC-02)."""
        self._blank = True
        """The last line that is no comment was blank, or there was none."""
        self._parted = 0
        """The first blank line behind the user-agent lines of a group without rules."""
        self._version_fits = False
        self._versions = 0
        self._usage = 0
        """The line of a Content-Usage since the last user-agent line or rule."""
        self._checks: dict[str, Callable[[int, str], None]] = {
            "sitemap": self._value("bad-sitemap", signals.absolute_url),
            "license": self._value("bad-license", signals.absolute_url),
            "host": self._value("bad-host", signals.parse_host),
            "clean-param": self._value("bad-clean-param", signals.parse_clean_param),
            "crawl-delay": self._value("bad-crawl-delay", timing.parse_crawl_delay),
            "request-rate": self._value("bad-request-rate", timing.parse_request_rate),
            "visit-time": self._value("bad-visit-time", timing.parse_visit_time),
            "content-usage": self._content_usage,
            "content-signal": self._value("bad-content-signal", _signal),
            "robot-version": self._robot_version,
        }

    def read(self, line: Line) -> None:
        """Check one line, and remember what the next ones need to know of it."""
        if line.spoilt:
            self._report.add(line.number, "control")
            return
        if "\ufffd" in line.text:
            self._report.add(line.number, "not-utf8")
        if line.field:
            self._record(line)
        elif not line.text.strip(" \t"):
            self._blank_line(line.number)
        elif not line.text.lstrip(" \t").startswith("#"):  # a lone comment is no boundary (R94-06)
            self._version_fits = False
            self._no_colon(line)

    def end(self) -> None:
        """Say what only the whole file shows."""
        if self._html:
            return
        if not self._any_record:
            self._report.add(0, "empty")
        elif not self._any_agent:
            self._report.add(0, "no-group")

    def _blank_line(self, number: int) -> None:
        self._blank = True
        self._version_fits = False  # DIA-04: a blank line breaks "immediately"
        if self._in_group and not self._ruled:
            self._parted = self._parted or number
        if self._old:
            self._in_group = False

    def _record(self, line: Line) -> None:
        self._any_record = True
        if line.field == "user-agent":
            self._agent(line)
        elif line.field in {"allow", "disallow"}:
            self._rule(line)
        else:
            self._other(line)
            self._version_fits = False
        self._blank = False

    def _agent(self, line: Line) -> None:
        if not self._in_group or self._ruled:
            if not self._blank:
                self._report.add(line.number, "missing-blank-line")
            self._ruled = False
            self._parted = self._versions = self._usage = 0
        elif self._usage:
            self._report.add(self._usage, "content-usage-between-agents")
            self._usage = 0
        self._any_agent = self._in_group = self._version_fits = True
        check_agent(self._report, line)

    def _rule(self, line: Line) -> None:
        self._version_fits = False
        if not self._in_group:
            self._report.add(line.number, "rule-outside-group")
            return
        if self._parted and not self._ruled:
            self._report.add(self._parted, "blank-inside-group")
        self._ruled = True
        self._parted = self._usage = 0

    def _other(self, line: Line) -> None:
        if line.field not in _IN_GROUPS and line.field not in _ANYWHERE:
            meant = spelling(line.field)
            if meant is not None:
                self._report.add(line.number, "misspelt-field", f"Did you mean {meant}?")
            elif field_without_colon(line.text):
                self._no_colon(line)
            else:
                self._noise(line.number, "unknown-field", quoted(line.field))
            return
        if line.field in _IN_GROUPS and line.field != "robot-version" and not self._in_group:
            self._report.add(line.number, "record-outside-group")
        check = self._checks.get(line.field)
        if check is not None:
            check(line.number, line.value)

    def _no_colon(self, line: Line) -> None:
        # Behind a known field something that a robot was to obey is lost.
        lost = Severity.ERROR if field_without_colon(line.text) else None
        self._noise(line.number, "no-colon", quoted(line.text), lost)

    def _noise(self, line: int, code: str, detail: str, severity: Severity | None = None) -> None:
        if not self._html:
            self._report.add(line, code, detail, severity)

    def _value(self, code: str, read: Callable[[str], object]) -> Callable[[int, str], None]:
        def check(line: int, value: str) -> None:
            if read(value) is None:
                self._report.add(line, code, quoted(value))

        return check

    def _content_usage(self, line: int, value: str) -> None:
        self._usage = line if self._in_group and not self._ruled else 0
        labels = signals.usage_labels(signals.split_content_usage(value)[1])
        if not labels or not any(labels.values()):
            self._report.add(line, "bad-content-usage", quoted(value))
            return
        unknown = [label for label in labels if label not in signals.CATEGORIES]
        if unknown:
            self._report.add(line, "unknown-usage-label", quoted(", ".join(unknown)))

    def _robot_version(self, line: int, value: str) -> None:
        if self._version_fits:
            self._versions += 1
            check_version(self._report, line, value)
        else:
            self._report.add(line, "repeated-version" if self._versions else "misplaced-version")


def _signal(value: str) -> dict[str, str] | None:
    return signals.parse_content_signal(value) or None
