"""`gatekeeper lint PATH|URL...`: report what is wrong or surprising in a robots.txt."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from gatekeeper import __version__, terminal
from gatekeeper.cli import CommandParser, load
from gatekeeper.config import Config
from gatekeeper.errors import GatekeeperError, counted
from gatekeeper.robots import Finding, Severity
from gatekeeper.sites.fixes import repaired
from gatekeeper.sites.lint import CODES, coding_findings
from gatekeeper.sites.texts import Text, is_url, parse_text, read_all, replace_file
from gatekeeper.terminal import DENIED, NAME, OK

EXAMPLE = f"{NAME} lint https://example.org/robots.txt"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `lint`."""
    parser.option(
        "sources FILE|DIR|URL...",
        "files, URLs, - for stdin, or directories: every file in them whose name ends with "
        "robots.txt",
    )
    parser.option("--strict", "exit 1 on warnings as well")
    parser.option(
        "--ignore CODE...",
        "do not report this kind of finding (repeatable, or several with commas)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        help="text (the default), one JSON object per file (as --json), annotations of GitHub "
        "Actions, or one SARIF 2.1.0 document",
    )
    parser.option("--fix", "fix files where the fix is certain")
    parser.option("--diff", "with --fix: show the changes without making them")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if no error was found, 1 if one was, 2 if there was nothing to read.

    With --strict warnings count as errors do. With --diff: exit 1 if anything would change.
    """
    terminal.log_to_stderr()
    _check_call(args)
    ignored = _ignored_codes(args.ignore)
    config = load(args).config
    if args.diff:
        return _show_changes(config, args.sources, ignored)
    format_ = args.format or ("json" if args.json else "text")
    failing = {Severity.ERROR, Severity.WARNING} if args.strict else {Severity.ERROR}
    reports: list[LintReport] = []
    for text in read_all(config, args.sources):
        if args.fix:
            text = _apply_fixes(config, text, ignored)  # noqa: PLW2901
        report = _report(text, ignored)
        reports.append(report)
        if format_ == "text":
            _print_text(report, text.robots.text.split("\n") if text.robots is not None else [])
        elif format_ == "json":
            print(terminal.json_text(report))
        elif format_ == "github":
            _print_github(report)
    if format_ == "sarif":
        print(terminal.json_text(_sarif(reports)))
    failed = any(finding.severity in failing for report in reports for finding in report.findings)
    return DENIED if failed else OK


def _check_call(args: argparse.Namespace) -> None:
    if args.diff and not args.fix:
        args.parser.error("--diff shows what --fix would change: give both")
    if args.fix and any(source == "-" or is_url(source) for source in args.sources):
        args.parser.error("--fix changes files; it can't change standard input or a URL")
    if args.json and args.format not in {None, "json"}:
        args.parser.error("--json is --format json: give one of the two")


def _ignored_codes(given: Iterable[str]) -> frozenset[str]:
    """Return the codes to ignore. Raises GatekeeperError for an unknown one."""
    codes = [code.strip() for each in given for code in each.split(",") if code.strip()]
    for code in codes:
        if code not in CODES:
            hint = terminal.did_you_mean(code, CODES, otherwise="; docs/lint.md lists them all")
            raise GatekeeperError(f"--ignore {code}: there is no such code{hint}")
    return frozenset(codes)


_PAGE = (Finding(1, "html", CODES["html"].severity, CODES["html"].meaning),)


def _report(text: Text, ignored: frozenset[str]) -> LintReport:
    robots = text.robots
    found = robots.findings if robots is not None else _PAGE if text.is_page else ()
    kept = (
        finding for finding in coding_findings(text.coding) + found if finding.code not in ignored
    )
    findings = sorted(kept, key=lambda finding: (finding.line, finding.code))
    return LintReport(
        source=text.name,
        size=robots.size if robots else 0,
        truncated=robots is not None and robots.truncated,
        errors=sum(finding.severity is Severity.ERROR for finding in findings),
        findings=findings,
        missing=robots is None and not text.is_page,
    )


def _apply_fixes(config: Config, text: Text, ignored: frozenset[str]) -> Text:
    """Apply the fixes to the text and to its file, and return the fixed text."""
    body = _fixed(config, text, ignored)
    if body == text.body:
        return text
    replace_file(Path(text.name), body)
    return parse_text(config, text.name, body)


def _fixed(config: Config, text: Text, ignored: frozenset[str]) -> bytes:
    return repaired(text.body, ignore=ignored, dialect=config.robots.dialect)


def _show_changes(config: Config, sources: Iterable[str], ignored: frozenset[str]) -> int:
    """Print a unified diff; exit 1 if there is anything in it."""
    code = OK
    for text in read_all(config, sources):
        old, new = (
            body.decode("utf-8", "backslashreplace").splitlines()
            for body in (text.body, _fixed(config, text, ignored))
        )
        for line in difflib.unified_diff(old, new, text.name, text.name, lineterm=""):
            code = DENIED
            print(line)
    return code


# --- output: for people, as JSON, for GitHub Actions, as SARIF -------------------------------


_WIDTH = 100
"""Maximum characters of a line to show."""


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `--json`: all findings in one text."""

    source: str
    size: int
    truncated: bool
    errors: int
    findings: list[Finding]
    missing: bool = False
    """The site has no robots.txt."""


_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def _print_text(report: LintReport, lines: list[str]) -> None:
    """Print a report for people; `lines` are the lines of the text."""
    name = "stdin" if report.source == "-" else report.source
    if report.missing:
        print(f"{name}: there is no file, so everything is allowed")
        return
    for finding in report.findings:
        place = f"{name}:{finding.line}" if finding.line else name  # 0: the file as a whole
        severity = terminal.paint(finding.severity, _COLOURS[finding.severity])
        print(f"{place}: {severity}: {finding.message} [{finding.code}]")
        if finding.column:
            print("\n".join(_marker_lines(finding, lines[finding.line - 1])))
    if report.findings:
        errors = counted(report.errors, "error")
        print(f"{name}: {counted(len(report.findings), 'finding')}, {errors}")
    else:
        print(f"{name}: no findings")


def _marker_lines(finding: Finding, line: str) -> list[str]:
    """Return the line and a marker line below it; nothing if the finding marks no characters."""
    start, end = finding.column - 1, finding.end_column - 1
    if start == end:
        return []
    skipped = max(0, min(start, end - _WIDTH))
    part = line[skipped : skipped + _WIDTH]
    text = "".join(char if char.isprintable() else "?" for char in part.replace("\t", " "))
    mark = "^" * max(1, min(end, skipped + _WIDTH) - start)
    return [f"    {text}", "    " + " " * (start - skipped) + mark]


_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def _print_github(report: LintReport) -> None:
    """Print workflow commands, which GitHub Actions shows next to the lines."""
    for finding in report.findings:
        properties = {"title": f"robots.txt ({finding.code})", "file": report.source}
        if finding.line:
            properties["line"] = str(finding.line)
        if finding.column:
            properties |= {"col": str(finding.column), "endColumn": str(finding.end_column)}
        joined = ",".join(f"{key}={text.translate(_PROPERTY)}" for key, text in properties.items())
        print(f"::{_GITHUB[finding.severity]} {joined}::{finding.message.translate(_DATA)}")


_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _DATA | str.maketrans({":": "%3A", ",": "%2C"})
"""What is escaped in the text of a workflow command, and in its properties."""


_SARIF = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def _sarif(reports: Iterable[LintReport]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 document (OASIS), the format in which code hosts accept findings."""
    rules = [
        {
            "id": code,
            "shortDescription": {"text": entry.meaning},
            "help": {"text": f"docs/lint.md#{code} has a bad and a good example."},
            "defaultConfiguration": {"level": _SARIF[entry.severity]},
        }
        for code, entry in CODES.items()
    ]
    run = {
        "tool": {"driver": {"name": NAME, "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(one.source, found) for one in reports for found in one.findings],
    }
    schema = (
        "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    )
    return {"$schema": schema, "version": "2.1.0", "runs": [run]}


def _result(source: str, finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(source)}}
    if finding.line:
        location["region"] = {"startLine": finding.line}
    if finding.column:
        location["region"] |= {"startColumn": finding.column, "endColumn": finding.end_column}
    return {
        "ruleId": finding.code,
        "ruleIndex": list(CODES).index(finding.code),
        "level": _SARIF[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": location}],
    }


def _uri(source: str) -> str:
    """Return a URI reference (RFC 3986) for a source as it was given."""
    if is_url(source):
        return source
    if source == "-":
        return "stdin"
    path = source.replace("\\", "/").removeprefix("./")
    return f"file://{quote(path)}" if path.startswith("/") else quote(path)
