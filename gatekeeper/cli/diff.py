"""`gatekeeper diff OLD NEW`: the verdicts that change between two files."""

from __future__ import annotations

import argparse

from gatekeeper.cli import CommandParser, load
from gatekeeper.errors import counted
from gatekeeper.robots import Difference, Ruling, diff
from gatekeeper.sites.texts import place_of, read_bounded, read_text
from gatekeeper.terminal import DENIED, NAME, OK, json_text, log_to_stderr, paint, urls_of

EXAMPLE = f"{NAME} diff https://example.org robots.txt --exit-code"


_SHOWN = 10
"""Maximum number of pairs of lines that are shown as not searched."""


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `diff`."""
    parser.option("old OLD", "a file, a URL, or - for stdin")
    parser.option("new NEW", "a file, a URL, or - for stdin")
    agents = "product tokens (default: all that either file names, and * for the others)"
    parser.option("--agents NAME", agents, nargs="+")
    parser.option(
        "--urls FILE",
        "URLs or paths, one per line, to compare besides those derived from the rules; - is stdin",
    )
    parser.option("--exit-code", "exit 1 if a verdict changes")


def run(args: argparse.Namespace) -> int:
    """Exit 0; with --exit-code 1 if any verdict changes; 2 for input that can't be read."""
    log_to_stderr()
    if [args.old, args.new, args.urls].count("-") > 1:
        args.parser.error("standard input can be read only once")
    config = load(args).config
    old, new = read_text(config, args.old), read_text(config, args.new)
    urls = urls_of(read_bounded(args.urls).splitlines()) if args.urls is not None else ()
    difference = diff(old.rules, new.rules, agents=args.agents, urls=urls)
    if args.json:
        print(json_text(difference))
    else:
        _print(old.name, new.name, difference)
    return DENIED if difference.changes and args.exit_code else OK


def _print(old: str, new: str, difference: Difference) -> None:
    agents: tuple[str, ...] | None = None
    for change in difference.changes:
        if change.agents != agents:
            agents = change.agents
            print(", ".join("everybody else" if agent == "*" else agent for agent in agents))
        rulings = _ruling("-", old, change.old), _ruling("+", new, change.new)
        print(f"  {change.url}", *rulings, sep="\n")
    print(f"{old} -> {new}: {counted(len(difference.changes), 'change')} of a verdict")
    if difference.complete:
        return
    print("there may be more: not every pair of lines could be compared")
    rest = ", and all that follows" if difference.stopped else ""
    for before, after in difference.unsearched[:_SHOWN]:
        print(f"  not searched: {old}, {place_of(before)}; {new}, {place_of(after)}{rest}")
        rest = ""
    if len(difference.unsearched) > _SHOWN:
        print("  and others")


def _ruling(sign: str, name: str, ruling: Ruling) -> str:
    verdict = paint("allow", "green") if ruling.allowed else paint("deny ", "red")
    return f"    {sign} {verdict} {name}, {place_of(ruling.rule)}"
