"""`gatekeeper test FILE|URL --expect CASES.toml`: compare a robots.txt with expected verdicts."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from gatekeeper.cli import CommandParser, load
from gatekeeper.errors import GatekeeperError, counted
from gatekeeper.robots import Rule
from gatekeeper.sites.texts import Text, is_url, place_of, read_bounded, read_sitemap, read_text
from gatekeeper.terminal import DENIED, NAME, OK, json_text, log_to_stderr, paint
from gatekeeper.urls import MAX_URL, printable

if TYPE_CHECKING:
    from gatekeeper.config import Config


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[case]]`: the expected verdict for a URL."""

    url: str
    """An absolute URL, or a path with its query."""
    allowed: bool
    agent: str = "*"
    """A product token; `*` is a robot that the file does not name."""
    line: int | None = None
    """The deciding line, counting from 1; 0: no rule decides; None: any."""


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of cases."""

    case: list[Case]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case, and the actual verdict of the file."""

    where: str
    """The source of the case: `cases.toml, case 3`, or the sitemap."""
    case: Case
    allowed: bool
    rule: Rule | None
    passed: bool = False


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `--json`: the number of cases, and the cases that differ."""

    source: str
    cases: int
    differing: list[CaseResult]


EXAMPLE = f"{NAME} test robots.txt --expect cases.toml --sitemap sitemap.xml"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `test`."""
    parser.option("source FILE|URL", "a file, a URL, or - for stdin")
    parser.option(
        "--expect CASES.toml...",
        "[[case]] tables with url (absolute or a path) and allowed, and optionally agent "
        "(default *) and line (repeatable)",
    )
    parser.option(
        "--sitemap FILE|URL...",
        "every URL in it must be allowed (repeatable); one at a URL is fetched politely",
    )
    parser.option("--agents NAME", "agents for --sitemap (*)", nargs="+", default=["*"])


def run(args: argparse.Namespace) -> int:
    """Exit 0 if all verdicts are as expected, 1 if any differs, 2 if there is nothing to test."""
    log_to_stderr()
    if not args.expect and not args.sitemap:
        args.parser.error("nothing to check: give --expect or --sitemap")
    if [args.source, *args.expect, *args.sitemap].count("-") > 1:
        args.parser.error("standard input can be read only once")
    config = load(args).config
    cases = [each for name in args.expect for each in _cases(name)]
    text = read_text(config, args.source)
    for name in args.sitemap:
        cases += _sitemap_cases(config, name, args.agents)
    differing = _differing(config, text, cases)
    if args.json:
        print(json_text(CaseReport(source=text.name, cases=len(cases), differing=differing)))
    else:
        _print(text.name, len(cases), differing)
    return DENIED if differing else OK


def _cases(name: str) -> list[tuple[str, Case]]:
    """Read a file of cases, with the source of each. Raises GatekeeperError for an invalid one."""
    try:
        table = tomllib.loads(read_bounded(name).decode("utf-8-sig"))
        cases = msgspec.convert(table, Cases).case
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise GatekeeperError(f"{name}: not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise GatekeeperError(
            f'{name}: {error}; a case has url = "/path", allowed = true or false, and optionally '
            'agent = "NAME" and line = 3'
        ) from error
    if not cases:
        raise GatekeeperError(f"{name}: it has no [[case]]")
    return [(f"{name}, case {number}", case) for number, case in enumerate(cases, 1)]


def _sitemap_cases(config: Config, name: str, agents: list[str]) -> Iterator[tuple[str, Case]]:
    urls = read_sitemap(config, name)
    if not urls:
        raise GatekeeperError(f"{name}: it has no URLs")
    for url in urls:
        yield from ((name, Case(url, True, agent)) for agent in agents)


def _differing(config: Config, text: Text, cases: list[tuple[str, Case]]) -> list[CaseResult]:
    origin = text.name.removesuffix("/robots.txt") if is_url(text.name) else ""
    agents = {case.agent for _, case in cases}
    policies = {agent: config.robots.policy(text.rules, agent) for agent in agents}
    results = []
    for where, case in cases:
        try:
            match = policies[case.agent].match(case.url)
        except GatekeeperError as error:
            raise GatekeeperError(f"{where}: {error}") from error
        if origin and match.origin not in {"", origin}:
            raise GatekeeperError(
                f"{where}: {case.url} is not on {origin}; another robots.txt decides it"
            )
        line = match.rule.line if match.rule is not None else 0
        if match.allowed != case.allowed or case.line not in {None, line}:
            result = CaseResult(where=where, case=case, allowed=match.allowed, rule=match.rule)
            results.append(result)
    return results


def _print(source: str, cases: int, differing: list[CaseResult]) -> None:
    rows = [(r.case.agent, r.case.url, _expected(r), _actual(r), r.where) for r in differing]
    if rows:
        head = ("agent", "URL", "expected", "actual", "from")
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(printable("  ".join(cells).rstrip(), MAX_URL))
    text = f"{len(differing)} differ" if differing else "all as expected"
    text = paint(text, "red" if differing else "green")
    print(f"{source}: {counted(cases, 'case')}, {text}")


def _expected(result: CaseResult) -> str:
    case = result.case
    verdict = "allow" if case.allowed else "deny"
    if case.line is None:
        return verdict
    return f"{verdict} by line {case.line}" if case.line else f"{verdict} by no rule"


def _actual(result: CaseResult) -> str:
    return f"{'allow' if result.allowed else 'deny'} by {place_of(result.rule)}"
