"""`gatekeeper lint PATH|URL...`: what is wrong, or surprising, in a robots.txt."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from gatekeeper.cli.common import DENIED, NAME, OK, Subparsers, add_command, load, log_to_stderr
from gatekeeper.cli.lint_formats import LintReport, writer
from gatekeeper.cli.settings import Settings
from gatekeeper.cli.texts import Text, is_url, read_all, replace_file
from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import Finding, RobotsTxt, Severity
from gatekeeper.robots.lint import CODES

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Put `lint` among the commands."""
    parser = add_command(
        subparsers,
        "lint",
        summary="find what is wrong in a robots.txt, with line numbers",
        example=f"{NAME} lint https://example.org/robots.txt",
        run=run,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="FILE|DIR|URL",
        help="files, URLs, - for stdin, or directories: every file in them whose name ends with "
        "robots.txt",
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 on warnings, too")
    parser.add_argument(
        "--ignore",
        metavar="CODE",
        action="append",
        default=[],
        help="leave out a kind of finding (repeatable, or several with commas)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        help="for people (the default), one JSON object a file (as --json), annotations of GitHub "
        "Actions, or one SARIF 2.1.0 document",
    )
    parser.add_argument("--fix", action="store_true", help="mend files where it is certain how")
    parser.add_argument(
        "--diff", action="store_true", help="with --fix: show what would change, change nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 if no error was found, 1 if one was, 2 if there was nothing to read."""
    log_to_stderr()
    _check_call(args)
    ignored = _ignored(args.ignore)
    settings = load(args)
    if args.diff:
        return _show_changes(settings, args.sources, ignored)
    write = writer(args.format or ("json" if args.json else "text"))
    failing = {Severity.ERROR, Severity.WARNING} if args.strict else {Severity.ERROR}
    failed = False
    for text in read_all(settings, args.sources):
        if args.fix:
            text = _mended(settings, text, ignored)  # noqa: PLW2901
        report = _report(text, ignored)
        write.add(report, text.robots.text.split("\n") if text.robots is not None else [])
        failed = failed or any(finding.severity in failing for finding in report.findings)
    write.end()
    return DENIED if failed else OK


def _check_call(args: argparse.Namespace) -> None:
    if args.diff and not args.fix:
        args.parser.error("--diff shows what --fix would change: give both")
    if args.fix and any(source == "-" or is_url(source) for source in args.sources):
        args.parser.error("--fix changes files, not standard input and not what stands at a URL")
    if args.json and args.format not in {None, "json"}:
        args.parser.error("--json is --format json: give one of the two")


def _ignored(given: Iterable[str]) -> frozenset[str]:
    """The codes; raises GatekeeperError for what is none."""
    codes = [code.strip() for each in given for code in each.split(",") if code.strip()]
    for code in codes:
        if code not in CODES:
            import difflib  # noqa: PLC0415 - for those who err

            near = difflib.get_close_matches(code, CODES, 1)
            meant = f"; did you mean {near[0]}?" if near else "; docs/lint.md lists them all"
            raise GatekeeperError(f"--ignore {code}: there is no such code{meant}")
    return frozenset(codes)


def _report(text: Text, ignored: frozenset[str]) -> LintReport:
    robots = text.robots
    found: list[Finding] = []
    if robots is not None:
        kept = (finding for finding in robots.findings if finding.code not in ignored)
        found = sorted(kept, key=lambda finding: (finding.line, finding.code))
    return LintReport(
        source=text.name,
        size=robots.size if robots else 0,
        truncated=robots is not None and robots.truncated,
        errors=sum(finding.severity is Severity.ERROR for finding in found),
        findings=found,
        missing=robots is None,
    )


def _mended(settings: Settings, text: Text, ignored: frozenset[str]) -> Text:
    """The text with its fixes applied, in its file, too."""
    body = _fixed(settings, text, ignored)
    if body == text.body:
        return text
    replace_file(Path(text.name), body)
    robots = RobotsTxt.parse(
        body, dialect=settings.config.robots.dialect, limit=settings.config.fetch.max_body
    )
    return Text(name=text.name, body=body, robots=robots)


def _fixed(settings: Settings, text: Text, ignored: frozenset[str]) -> bytes:
    from gatekeeper.robots.fixes import repaired  # noqa: PLC0415

    return repaired(text.body, ignore=ignored, dialect=settings.config.robots.dialect).body


def _show_changes(settings: Settings, sources: Iterable[str], ignored: frozenset[str]) -> int:
    """Print a unified diff; exit 1 if there is anything in it."""
    changed = False
    for text in read_all(settings, sources):
        for line in _unified(text.name, text.body, _fixed(settings, text, ignored)):
            changed = True
            print(line)
    return DENIED if changed else OK


def _unified(name: str, old: bytes, new: bytes) -> Iterator[str]:
    import difflib  # noqa: PLC0415

    before, after = (body.decode("utf-8", "backslashreplace").splitlines() for body in (old, new))
    yield from difflib.unified_diff(before, after, name, name, lineterm="")
