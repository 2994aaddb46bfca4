"""The command `gatekeeper`: one module a command.

A command's module has two functions, `add_parser(subparsers)` and `run(args) -> int`,
and its name stands in `COMMANDS`. Exit codes: 0 all well; 1 refused, or errors found;
2 a mistake in the call, the configuration or the input.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from gatekeeper.cli.common import NAME, USAGE, version
from gatekeeper.errors import GatekeeperError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("serve", "check", "fetch", "lint", "history", "healthcheck", "config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are one line on stderr.

    >>> main(["check", "--help"])  # doctest: +SKIP
    """
    command = ""
    try:
        # Parsing, too: it imports every command, and Ctrl-C may come meanwhile.
        args = _parser().parse_args(argv)
        command = args.command
        return int(args.run(args))
    except GatekeeperError as error:
        return fail(command, str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does: no more to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return fail(command, _describe(error))


def fail(command: str, message: str) -> int:
    """Print the one line that an error gets; the exit code for it."""
    print(f"{f'{NAME} {command}'.rstrip()}: {' '.join(message.split())}", file=sys.stderr)
    return USAGE


def _describe(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Ask a site's robots.txt first, then wait your turn.",
        epilog=f"example: {NAME} check https://example.org/",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"gatekeeper.cli.{name}").add_parser(commands)
    return parser
