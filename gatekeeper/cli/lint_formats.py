"""What `gatekeeper lint` prints: for people, as JSON, for GitHub Actions, as SARIF."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from gatekeeper.cli.common import NAME, json_text, paint, version
from gatekeeper.cli.texts import is_url
from gatekeeper.robots import Finding, Severity
from gatekeeper.robots.lint import CODES

__all__ = ["LintReport", "ReportWriter", "writer"]

_WIDTH = 100
"""Characters of a line that are shown."""


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """`--json`: everything found in one text."""

    source: str
    size: int
    truncated: bool
    errors: int
    findings: list[Finding]
    missing: bool = False
    """The site has no robots.txt."""


class ReportWriter(Protocol):
    """One format."""

    def add(self, report: LintReport, lines: list[str]) -> None:
        """Print a report, or keep it for the end. `lines`: those of the text."""

    def end(self) -> None:
        """Print what is printed once."""


def writer(name: str) -> ReportWriter:
    """The format "text", "json", "github" or "sarif"."""
    formats: dict[str, type[ReportWriter]] = {
        "text": _Text,
        "json": _Json,
        "github": _Github,
        "sarif": _Sarif,
    }
    return formats[name]()


_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


class _Text(ReportWriter):
    def add(self, report: LintReport, lines: list[str]) -> None:
        name = "stdin" if report.source == "-" else report.source
        if report.missing:
            print(f"{name}: there is no file, so everything is welcome")
            return
        for finding in report.findings:
            place = f"{name}:{finding.line}" if finding.line else name  # 0: the file as a whole
            severity = paint(finding.severity, _COLOURS[finding.severity])
            print(f"{place}: {severity}: {finding.message} [{finding.code}]")
            if finding.column:
                print("\n".join(_marked(finding, lines[finding.line - 1])))
        if report.findings:
            counts = _count(len(report.findings), "finding"), _count(report.errors, "error")
            print(f"{name}: {', '.join(counts)}")
        else:
            print(f"{name}: nothing to say against it")

    def end(self) -> None:
        pass


def _marked(finding: Finding, line: str) -> list[str]:
    """The line, and a mark below what the finding is about; nothing where there is nothing."""
    start, end = finding.column - 1, finding.end_column - 1
    if start == end:
        return []
    skipped = max(0, min(start, end - _WIDTH))
    part = line[skipped : skipped + _WIDTH]
    told = "".join(char if char.isprintable() else "?" for char in part.replace("\t", " "))
    mark = "^" * max(1, min(end, skipped + _WIDTH) - start)
    return [f"    {told}", "    " + " " * (start - skipped) + mark]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class _Json(ReportWriter):
    def add(self, report: LintReport, lines: list[str]) -> None:
        print(json_text(report))

    def end(self) -> None:
        pass


_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


class _Github(ReportWriter):
    """Workflow commands, which GitHub Actions shows beside the lines."""

    def add(self, report: LintReport, lines: list[str]) -> None:
        for finding in report.findings:
            told = {"title": f"robots.txt ({finding.code})", "file": report.source}
            if finding.line:
                told["line"] = str(finding.line)
            if finding.column:
                told |= {"col": str(finding.column), "endColumn": str(finding.end_column)}
            properties = ",".join(f"{name}={_property(value)}" for name, value in told.items())
            print(f"::{_GITHUB[finding.severity]} {properties}::{_data(finding.message)}")

    def end(self) -> None:
        pass


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_SARIF = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


class _Sarif(ReportWriter):
    """SARIF 2.1.0 (OASIS), which code hosts take for their lists of findings."""

    def __init__(self) -> None:
        self._results: list[dict[str, Any]] = []
        self._codes = list(CODES)

    def add(self, report: LintReport, lines: list[str]) -> None:
        self._results += [self._result(report.source, finding) for finding in report.findings]

    def _result(self, source: str, finding: Finding) -> dict[str, Any]:
        place: dict[str, Any] = {"artifactLocation": {"uri": _uri(source)}}
        if finding.line:
            place["region"] = {"startLine": finding.line}
        if finding.column:
            place["region"] |= {"startColumn": finding.column, "endColumn": finding.end_column}
        return {
            "ruleId": finding.code,
            "ruleIndex": self._codes.index(finding.code),
            "level": _SARIF[finding.severity],
            "message": {"text": finding.message},
            "locations": [{"physicalLocation": place}],
        }

    def end(self) -> None:
        rules = [
            {
                "id": code,
                "shortDescription": {"text": entry.meaning},
                "help": {"text": f"docs/lint.md#{code} has a bad and a good example."},
                "defaultConfiguration": {"level": _SARIF[entry.severity]},
            }
            for code, entry in CODES.items()
        ]
        driver = {"name": NAME, "version": version(), "rules": rules}
        run = {
            "tool": {"driver": driver},
            "columnKind": "unicodeCodePoints",
            "results": self._results,
        }
        schema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
        print(json_text({"$schema": schema, "version": "2.1.0", "runs": [run]}))


def _uri(source: str) -> str:
    """A URI reference (RFC 3986) for a path as it was given."""
    if is_url(source):
        return source
    from urllib.parse import quote  # noqa: PLC0415

    if source == "-":
        return "stdin"
    path = source.replace("\\", "/").removeprefix("./")
    return f"file://{quote(path)}" if path.startswith("/") else quote(path)
