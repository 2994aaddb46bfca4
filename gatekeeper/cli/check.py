"""`gatekeeper check URL...`: the verdict, the deciding line and the timing of each URL."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from gatekeeper import terminal
from gatekeeper.cli import CommandParser, load
from gatekeeper.client.wire import Timing
from gatekeeper.config import Config
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import quoted
from gatekeeper.terminal import DENIED, NAME, OK, USAGE
from gatekeeper.urls import printable

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper


class CheckedURL(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `--json`: a decision, the file's timing, and the seconds that the answer took."""

    decision: Decision
    timing: Timing | None
    took: float


EXAMPLE = f"{NAME} check https://example.org/a https://example.org/b"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `check`."""
    parser.option("urls URL...", "an http or https URL; `-` reads standard input, one per line")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if all URLs may be fetched, 1 if any may not, 2 if any argument is not a URL."""
    terminal.log_to_stderr()
    config = load(args).config
    terminal.warn_if_anonymous(config)
    return asyncio.run(_check(config, list(_urls(args.urls)), as_json=args.json))


def _urls(given: Iterable[str]) -> Iterator[str]:
    for url in given:
        if url == "-":
            yield from terminal.urls_of(terminal.standard_input())
        else:
            yield url


async def _check(config: Config, urls: list[str], *, as_json: bool) -> int:
    code = OK
    async with terminal.open_gate(config) as gate:
        started = time.perf_counter()
        async for decision in gate.check_many(urls):
            took = round(time.perf_counter() - started, 6)
            if decision.reason is Reason.INVALID_URL:
                problem = f"{decision.note}{terminal.url_hint(decision.url)}"
                print(f"{NAME} check: {quoted(decision.url)}: {problem}", file=sys.stderr)
                code = USAGE
            elif not decision:
                code = max(code, DENIED)
            checked = CheckedURL(decision=decision, timing=await _timing(gate, decision), took=took)
            if as_json:
                print(terminal.json_text(checked))
            elif decision.reason is not Reason.INVALID_URL:
                print("\n".join(_lines(checked)))
            sys.stdout.flush()
    return code


async def _timing(gate: Gatekeeper, decision: Decision) -> Timing | None:
    """Return the timing in the file that decided, or None if no file was consulted."""
    if decision.state is None or not decision.origin or decision.robots_status is None:
        return None
    return Timing.of(await gate.policy(decision.url))


_COLOURS = {Verdict.ALLOW: "green", Verdict.DENY: "red", Verdict.DEFER: "yellow"}


def _lines(checked: CheckedURL) -> list[str]:
    """Format an answer for people: the verdict, then the details, indented."""
    decision = checked.decision
    verdict = terminal.paint(f"{decision.verdict:<6}", _COLOURS[decision.verdict])
    lines = [f"{verdict} {decision.url}"]
    if decision.rule is not None:
        lines.append(f"       line {decision.rule.line}: {printable(decision.rule.text, 200)}")
    else:
        lines.append(f"       {decision.reason.replace('_', ' ')}")
    if decision.note:
        lines.append(f"       {decision.note}")
    if decision.conflict:
        lines.append("       the declared dialect and RFC 9309 disagree; robots.conflicts decides")
    if decision.retry_at is not None:
        lines.append(f"       ask again at {decision.retry_at:%Y-%m-%d %H:%M:%S} UTC")
    if checked.timing is not None:
        lines.extend(f"       {text}" for text in _timing_lines(checked.timing))
    lines.append(f"       {_file(decision)}took {checked.took * 1000:.0f} ms, id {decision.id}")
    return lines


def _file(decision: Decision) -> str:
    if decision.state is None:
        return ""
    status = f" ({decision.robots_status})" if decision.robots_status is not None else ""
    return f"robots.txt {decision.state}{status}, "


def _timing_lines(timing: Timing) -> list[str]:
    lines = []
    if timing.crawl_delay is not None:
        lines.append(f"Crawl-delay: {timing.crawl_delay:g} s between two requests")
    lines.extend(f"Request-rate: {rate}" for rate in timing.request_rates)
    lines.extend(f"Visit-time: {window} UTC" for window in timing.visit_times)
    return lines
