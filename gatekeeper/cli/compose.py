"""`gatekeeper compose FRAGMENT...`: one robots.txt from several sources."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gatekeeper.cli import CommandParser, load
from gatekeeper.robots import Fragment, compose
from gatekeeper.sites.texts import is_url, read_text, write_output
from gatekeeper.terminal import DENIED, NAME, OK, json_text, log_to_stderr
from gatekeeper.urls import printable

EXAMPLE = f"{NAME} compose shop.txt blog.txt -o robots.txt"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `compose`."""
    parser.option(
        "fragments FRAGMENT...",
        "a file; `# compose: owner=NAME prefix=/x/` at its start limits it to these paths",
    )
    parser.option("-o --output FILE", "output file (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Exit 0 after writing the file, 1 after printing the problems and writing nothing."""
    log_to_stderr()
    if any(is_url(name) for name in args.fragments):
        args.parser.error(
            "a fragment must be a file; download it first, so that you know its content"
        )
    if args.output and Path(args.output).resolve() in [Path(f).resolve() for f in args.fragments]:
        args.parser.error("-o names one of the fragments; give the composed file its own name")
    config = load(args).config
    composed = compose(Fragment(name, read_text(config, name).body) for name in args.fragments)
    if args.json:
        print(json_text(composed))
    for problem in composed.problems:
        print(f"{printable(problem.message, 1_000)} [{problem.code}]", file=sys.stderr)
    if composed.text is None:
        return DENIED
    if args.output is not None or not args.json:
        # A robots.txt is UTF-8 (RFC 9309 section 2.2), whatever the encoding of the terminal is.
        write_output(args.output, composed.text)
    return OK
