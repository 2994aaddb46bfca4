"""`gatekeeper lint FILE|URL`: what is wrong, or surprising, in a robots.txt."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from gatekeeper.cli.common import (
    DENIED,
    NAME,
    OK,
    Subparsers,
    add_command,
    hint,
    json_text,
    load,
    log_to_stderr,
    open_gate,
    paint,
    standard_input,
    warn_if_anonymous,
)
from gatekeeper.cli.settings import Settings
from gatekeeper.decision import State
from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import Finding, RobotsTxt, Severity
from gatekeeper.urls import parse

__all__ = ["add_parser", "run"]


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """`--json`: everything found in one text."""

    source: str
    size: int
    truncated: bool
    errors: int
    findings: list[Finding]


def add_parser(subparsers: Subparsers) -> None:
    """Put `lint` among the commands."""
    parser = add_command(
        subparsers,
        "lint",
        summary="find what is wrong in a robots.txt, with line numbers",
        example=f"{NAME} lint https://example.org/robots.txt",
        run=run,
    )
    parser.add_argument("source", metavar="FILE|URL", help="a file, a URL, or - for stdin")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if no error was found, 1 if one was, 2 if there was nothing to read."""
    log_to_stderr()
    settings = load(args)
    source, robots = _read(settings, args.source)
    if robots is None:
        if args.json:
            _print_json(LintReport(source=source, size=0, truncated=False, errors=0, findings=[]))
        else:
            print(f"{source}: there is no file, so everything is welcome")
        return OK
    findings = sorted(robots.findings, key=lambda finding: (finding.line, finding.code))
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if args.json:
        _print_json(
            LintReport(
                source=source,
                size=robots.size,
                truncated=robots.truncated,
                errors=errors,
                findings=findings,
            )
        )
    else:
        _print(source, findings, errors)
    return DENIED if errors else OK


def _read(settings: Settings, source: str) -> tuple[str, RobotsTxt | None]:
    """What was read, and its parsed text; None where the site has none.

    Raises OSError for a bad file.
    """
    if source.startswith(("http://", "https://")):
        warn_if_anonymous(settings)
        import asyncio  # noqa: PLC0415 - a file takes none

        origin = parse(source).origin
        return f"{origin}/robots.txt", asyncio.run(_fetch(settings, origin))
    try:
        body = standard_input().read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise GatekeeperError(f"{source}: {error.strerror}{hint(source)}") from error
    return source, RobotsTxt.parse(
        body, dialect=settings.config.robots.dialect, limit=settings.config.fetch.max_body
    )


async def _fetch(settings: Settings, origin: str) -> RobotsTxt | None:
    async with open_gate(settings.obeying()) as gate:
        robots = await gate.robots(f"{origin}/robots.txt")
        if robots is None:
            # Not of /robots.txt itself, which may be asked for whatever became of it (RFC-20).
            decision = await gate.check(f"{origin}/")
            if decision.state is not State.UNAVAILABLE:
                raise GatekeeperError(
                    f"{origin}/robots.txt: the file can't be had ({decision.reason})"
                )
    return robots


def _print_json(report: LintReport) -> None:
    print(json_text(report))


_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def _print(source: str, findings: list[Finding], errors: int) -> None:
    name = "stdin" if source == "-" else source
    for finding in findings:
        place = f"{name}:{finding.line}" if finding.line else name  # 0: the file as a whole
        severity = paint(finding.severity, _COLOURS[finding.severity])
        print(f"{place}: {severity}: {finding.message} [{finding.code}]")
    if not findings:
        print(f"{name}: nothing to say against it")
    else:
        print(f"{name}: {_count(len(findings), 'finding')}, {_count(errors, 'error')}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
