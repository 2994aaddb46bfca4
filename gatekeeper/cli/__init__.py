"""The command `gatekeeper`: one module a command.

A command's module has an `EXAMPLE`, `add_arguments(parser)` and `run(args) -> int`, and its name
stands in `COMMANDS`. Exit codes: 0 all well; 1 refused, or errors found; 2 a mistake in the call,
the configuration or the input.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from gatekeeper import __version__
from gatekeeper.cli.common import NAME, USAGE, be_lenient, hint
from gatekeeper.errors import ConfigError, GatekeeperError, InvalidURL

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "serve": "run the sidecar: the gate over HTTP",
    "check": "say whether URLs may be fetched, and which line decided",
    "fetch": "fetch pages politely: each host in its turn, nothing that its robots.txt denies",
    "lint": "find what is wrong in a robots.txt, with line numbers",
    "test": "hold a robots.txt against a list of what shall be allowed and what shall not",
    "diff": "show which verdicts change between two robots.txt, each with both deciding lines",
    "compose": "make one robots.txt from several sources, and name their conflicts",
    "mcp": "give agents the tools may_i_fetch, fetch and explain (MCP)",
    "history": "show what a site's robots.txt said, and when",
    "healthcheck": "ask the running sidecar whether it is alive",
    "top": "watch a running sidecar: its overview, and the hosts that wait",
    "identity": "make the key that signs requests, and what is published about the bot",
    "config": "check the configuration, or show what is in force",
}
"""Each command and its summary."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. An error that ends it is one line on stderr.

    With --json the same stands on stdout, too, as `{"error": ...}`.

    >>> main(["check", "--help"])  # doctest: +SKIP
    """
    args = argparse.Namespace(command="", json=False, settings=None)
    be_lenient()
    try:
        # Parsing, too: it imports the command, and Ctrl-C may come meanwhile.
        try:
            _parse(argv, args)
            return int(args.run(args))
        finally:  # --help ends here as well
            sys.stdout.flush()
    except GatekeeperError as error:
        return fail(args, _told(error, args))
    except KeyboardInterrupt:
        return _ended(130)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        return _ended(141)
    except OSError as error:
        return fail(args, _describe(error))


def fail(args: argparse.Namespace, message: str) -> int:
    """Print the one line that an error gets; the exit code for it."""
    line = " ".join(message.split())
    with suppress(OSError):
        print(f"{f'{NAME} {args.command}'.rstrip()}: {line}", file=sys.stderr)
    with suppress(OSError):
        if args.json:
            print(json.dumps({"error": line}))
    return _ended(USAGE)


def _ended(code: int) -> int:
    """The exit code, once what can't be written is let go: the interpreter would try again at its
    end, complain of it, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _told(error: GatekeeperError, args: argparse.Namespace) -> str:
    """The error's text, with where a wrong value stands, or what may have been meant."""
    if isinstance(error, ConfigError) and args.settings is not None:
        return str(args.settings.blame(error))
    return f"{error}{hint(error.url)}" if isinstance(error, InvalidURL) else str(error)


def _describe(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def _parse(argv: Sequence[str] | None, args: argparse.Namespace) -> None:
    """Read the call into `args`. A wrong one ends the process with the command's own usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]  # `help check` as `check --help`
    parser = _parser(argv)
    if not argv:
        parser.print_help()
        parser.exit(USAGE)  # a script whose command was empty has not done what it was to do
    _, unknown = parser.parse_known_args(argv, args)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")


def _build() -> str:
    """Whether the hot modules of this installation are compiled."""
    found = importlib.util.find_spec("gatekeeper.robots.longest")
    pure = found is None or (found.origin or "").endswith(".py")
    return "pure Python" if pure else "compiled"


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for a call: of the commands only the one that it names is imported."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Ask a site's robots.txt first, then wait your turn.",
        epilog=f"example: {NAME} check https://example.org/ - "
        f"`{NAME} COMMAND --help` says more of a command. Verdicts, findings and what fetch meets "
        "are coloured on a terminal; NO_COLOR=1 turns that off, FORCE_COLOR=1 on.",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__} ({_build()})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    called = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name == called:
            module = importlib.import_module(f"gatekeeper.cli.{name}")
            command.epilog = f"example: {module.EXAMPLE}"
            command.set_defaults(run=module.run, parser=command)
            _add_common(command)
            module.add_arguments(command)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """--config, --user-agent, --allow-address, --json."""
    group = parser.add_argument_group("common options")
    group.add_argument(
        "--config", metavar="FILE", help=f"TOML file; `{NAME} config show` lists every setting"
    )
    group.add_argument(
        "--user-agent", metavar="NAME", help='who you are: "examplebot/1.0 (+https://...)"'
    )
    group.add_argument(
        "--allow-address",
        metavar="CIDR",
        action="append",
        default=[],
        help="a private range, or a host name, that may be reached all the same (repeatable); "
        "a range does not cover an inner name such as localhost: give the name",
    )
    group.add_argument("--json", action="store_true", help="output for machines")
