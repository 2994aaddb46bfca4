"""The command `gatekeeper`: one module per subcommand, and the code that they share.

The module of a subcommand has an `EXAMPLE`, `add_arguments(parser)` and `run(args) -> int`, and
is listed in `COMMANDS`. Exit codes: 0 success; 1 refused, or errors found; 2 a mistake in the
call, the configuration or the input. Modules that `--help` does not need are imported where they
are used.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gatekeeper import __version__
from gatekeeper.errors import ConfigError, GatekeeperError, InvalidURL, needs_extra
from gatekeeper.terminal import NAME, USAGE, did_you_mean, prepare_streams, url_hint

if TYPE_CHECKING:
    from gatekeeper.cli.settings import Settings

_N = TypeVar("_N", int, float)

TOKEN = "GATEKEEPER_TOKEN"  # noqa: S105 - the variable with the token of a sidecar's client

COMMANDS = {
    "serve": "run the sidecar: the gate over HTTP",
    "check": "say whether URLs may be fetched, and which line decided",
    "fetch": "fetch pages politely: each host at its own pace, nothing that its robots.txt denies",
    "lint": "find mistakes in a robots.txt, with line numbers",
    "test": "check a robots.txt against a list of expected verdicts",
    "diff": "show which verdicts change between two robots.txt files, with the deciding lines",
    "compose": "combine several files into one robots.txt, and report their conflicts",
    "proxy": "a proxy through which any client fetches politely, over https as well (mitmproxy)",
    "mcp": "serve the tools may_i_fetch, fetch and explain to agents (MCP)",
    "history": "show the past versions of a site's robots.txt",
    "audit": "verify, show, report or erase the audit record of what a gate did",
    "healthcheck": "check that the running sidecar is alive",
    "top": "watch a running sidecar: its overview, and its hosts, those that are held up first",
    "identity": "create the key that signs requests, and the pages to publish about the bot",
    "fleet": "begin a fleet on a new Valkey or Redis, so that its first member need not wait",
    "config": "check the configuration, or show the effective settings",
}
"""Each command and its summary."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A fatal error is printed as one line on stderr.

    With --json it is also printed on stdout, as `{"error": ...}`. `main(["check", "--help"])` is
    `gatekeeper check --help`.
    """
    args = argparse.Namespace(command="", json=False, settings=None)
    prepare_streams()
    try:
        # Parsing is inside the `try` as well: it imports the command, and Ctrl-C may interrupt it.
        try:
            _parse(argv, args)
            return int(args.run(args))
        finally:  # --help raises SystemExit, and its output has to be flushed too
            sys.stdout.flush()
    except GatekeeperError as error:
        return report_failure(args, _error_text(error, args))
    except KeyboardInterrupt:
        return _exit_code(130)
    except BrokenPipeError:  # the reader of our output has exited, such as `| head`
        return _exit_code(141)
    except OSError as error:
        text = error.strerror or str(error)
        return report_failure(args, f"{error.filename}: {text}" if error.filename else text)


def report_failure(args: argparse.Namespace, message: str) -> int:
    """Print an error as one line, and return the exit code for it."""
    line = " ".join(message.split())
    with suppress(OSError):
        print(f"{f'{NAME} {args.command}'.rstrip()}: {line}", file=sys.stderr)
    with suppress(OSError):
        if args.json:
            print(json.dumps({"error": line}))
    return _exit_code(USAGE)


def _exit_code(code: int) -> int:
    """Return the exit code after discarding output that can't be written.

    Otherwise the interpreter would try to write it again at exit, complain, and exit with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _error_text(error: GatekeeperError, args: argparse.Namespace) -> str:
    """Return the text of an error with the source of a wrong value or with a suggestion."""
    if isinstance(error, ConfigError) and args.settings is not None:
        return str(args.settings.blame(error))
    return f"{error}{url_hint(error.url)}" if isinstance(error, InvalidURL) else str(error)


def _parse(argv: Sequence[str] | None, args: argparse.Namespace) -> None:
    """Parse the arguments into `args`. A wrong call ends the process with the usage message."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]  # `help check` as `check --help`
    parser = _parser([word for word in argv if word in COMMANDS][:1])
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        hint = did_you_mean(argv[0], COMMANDS, otherwise="")
        parser.error(f"there is no command {argv[0]!r}; `{NAME} --help` lists all{hint}")
    if not argv:
        parser.print_help()
        parser.exit(USAGE)  # a script that passed no command has not done what it was meant to do
    _, unknown = parser.parse_known_args(argv, args)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, args)}")


def _hint(unknown: list[str], args: argparse.Namespace) -> str:
    """Return a suggestion for the first unknown option; empty if no option is similar."""
    from gatekeeper.config import PROXY_REMOVED  # noqa: PLC0415 - needed for mistakes only

    option = unknown[0].partition("=")[0]
    if (args.command, option) == ("serve", "--proxy"):  # until version 0.9
        return f"; {PROXY_REMOVED}"
    options = re.findall(r"--[a-z][a-z-]+", args.parser.format_help())
    return did_you_mean(option, options, otherwise="")


def _build() -> str:
    """Return whether the performance-critical modules of this installation are compiled."""
    spec = importlib.util.find_spec("gatekeeper.robots.longest")
    is_pure = spec is None or (spec.origin or "").endswith(".py")
    return "pure Python" if is_pure else "compiled"


_NAMES_FILE = re.compile(r"FILE|PATH|DIR|OLD|NEW|FRAGMENT|\.toml").search
"""Finds out whether the metavar of an argument names a file."""


class _Completion(argparse.Action):
    """Prints the script that completes calls in a shell, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        with needs_extra("cli", "--completion"):
            import shtab  # noqa: PLC0415 - an extra

        CommandParser.files = shtab.FILE
        print(shtab.complete(_parser(COMMANDS), values))
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """The parser of one command."""

    files: ClassVar[Any] = None
    """How an argument that names a file is marked while a script that completes calls is made."""

    def option(self, form: str, text: str, *, to: Any = None, **more: Any) -> None:
        """Add an argument in the form of the usage message, with its help. `to`: a group.

        "-o --output DIR" has a value, "--ignore CODE..." is repeatable, and "--strict" is a switch.
        "old OLD" is no option, and has to be given; of "urls URL..." there is at least one. One
        that is a setting has its dotted name as `dest`.
        """
        *names, metavar = form.split()
        if metavar.startswith("-"):
            names.append(metavar)
            more["action"] = "store_true"
        elif metavar.endswith("...") and form.startswith("-"):
            more |= {"metavar": metavar.removesuffix("..."), "action": "append", "default": []}
        elif metavar.endswith("..."):
            more |= {"metavar": metavar.removesuffix("..."), "nargs": "+"}
        else:
            more["metavar"] = metavar
        added: Any = (to or self).add_argument(*names, help=text, **more)
        if self.files is not None and _NAMES_FILE(metavar):
            added.complete = self.files


def _parser(called: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser, with the arguments of those commands that are called: only their modules
    are imported."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Ask a site's robots.txt first, then wait until the host is due.",
        epilog=f"example: {NAME} check https://example.org/ - "
        f"`{NAME} COMMAND --help` describes a command. Verdicts, findings and results of fetch "
        "are coloured on a terminal; NO_COLOR=1 switches colours off, FORCE_COLOR=1 on.",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__} ({_build()})")
    parser.add_argument(
        "--completion",
        choices=("bash", "zsh", "fish"),
        action=_Completion,
        help="print the script that completes commands and options in that shell (extra `cli`)",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name in called:
            module = importlib.import_module(f"gatekeeper.cli.{name}")
            command.epilog = f"example: {module.EXAMPLE}"
            command.set_defaults(run=module.run, parser=command)
            _add_common(command)
            module.add_arguments(command)
    return parser


def _add_common(parser: CommandParser) -> None:
    """Add --config, --user-agent, --allow-address and --json."""
    option = partial(parser.option, to=parser.add_argument_group("common options"))
    option("--config FILE", f"TOML file; `{NAME} config show` lists every setting")
    option("--user-agent NAME", 'your identity: "examplebot/1.0 (+https://...)"')
    option(
        "--allow-address CIDR...",
        "a private address range or a host name that may be reached (repeatable); "
        "a range does not include internal names such as localhost: give the name",
    )
    option("--json", "print JSON")


# --- shared by the commands ------------------------------------------------------------------


def add_wait(parser: CommandParser, text: str) -> None:
    """Add the argument `--wait`, of which `text` is the help."""
    parser.option("--wait SECONDS", text, type=seconds, default=60.0)


def number_type(
    kind: Callable[[str], _N], wanted: str, fits: Callable[[_N], bool] = lambda _: True
) -> Callable[[str], _N]:
    """Return an argument type: a number that `fits`, described by `wanted` to people."""

    def read(text: str) -> _N:
        with suppress(ValueError):
            if fits(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text!r}; give {wanted}")

    return read


integer: Callable[[str], int] = number_type(int, "a whole number")
"""Argument type: a whole number, whose range is checked elsewhere."""
positive: Callable[[str], int] = number_type(
    int, "a whole number, 1 or more", lambda number: number >= 1
)
seconds: Callable[[str], float] = number_type(
    float, "a number of seconds above 0", lambda number: 0 < number < math.inf
)


def refuse_taken(host: str, port: int) -> None:
    """Raise OSError if this process can't listen on a port of this machine."""
    import socket  # noqa: PLC0415 - not needed by `--help`

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def load(args: argparse.Namespace) -> Settings:
    """Return the effective settings for a call. Arguments with a dotted name are settings.

    A configured `socket` gives way to --host or --port. Raises ConfigError if --socket is given as
    well: only one of the two can be meant.
    """
    from gatekeeper.cli.settings import Settings, suggest  # noqa: PLC0415 - not needed by `--help`

    given = {name: value for name, value in vars(args).items() if value is not None}
    flags = {name: value for name, value in given.items() if "." in name or name == "user_agent"}
    if not flags.keys().isdisjoint({"server.host", "server.port"}):
        if "server.socket" in flags:
            raise ConfigError("--socket replaces --host and --port: give one or the other")
        flags["server.socket"] = None
    settings = Settings.load(args.config, flags=flags, allow=tuple(args.allow_address))
    args.settings = settings  # lets `main` name the source of a setting in an error message
    for variable in settings.ignored:
        print(f"{NAME}: ignored {variable}: no such setting{suggest(variable)}", file=sys.stderr)
    return settings


def check_folder(settings: Settings) -> None:
    """Raise ConfigError if the directory of a configured state file does not exist.

    If it were created, a sidecar with a misspelt path would start without its state.
    """
    from gatekeeper.config import MEMORY  # noqa: PLC0415

    path = settings.config.storage.path
    if path is None or path == MEMORY or Path(path).absolute().parent.is_dir():
        return
    folder = Path(path).absolute().parent
    raise ConfigError(f"storage.path: {path}: there is no directory {folder}; create it first")
