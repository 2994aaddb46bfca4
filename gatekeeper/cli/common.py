"""What every command shares: its options, its settings, its gate."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from typing import TYPE_CHECKING, Any

from gatekeeper.cli.settings import Settings
from gatekeeper.errors import ConfigError

if TYPE_CHECKING:
    from gatekeeper.gate import Gatekeeper

__all__ = [
    "DENIED",
    "NAME",
    "OK",
    "USAGE",
    "add_command",
    "load",
    "open_gate",
    "version",
    "warn_if_anonymous",
]

NAME = "gatekeeper"
OK, DENIED, USAGE = 0, 1, 2

Subparsers = Any  # argparse's own class for them is private


def version() -> str:
    """The installed version of this package."""
    return importlib.metadata.version("gatekeeper")


def add_command(
    subparsers: Subparsers, name: str, *, summary: str, example: str, run: object
) -> argparse.ArgumentParser:
    """A command's parser, with the options that all commands have."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """--config, --user-agent, --allow-address, --json."""
    group = parser.add_argument_group("common options")
    group.add_argument("--config", metavar="FILE", help="TOML file; config.example.toml shows all")
    group.add_argument(
        "--user-agent", metavar="NAME", help='who you are: "examplebot/1.0 (+https://...)"'
    )
    group.add_argument(
        "--allow-address",
        metavar="CIDR",
        action="append",
        default=[],
        help="a private range that may be reached all the same (repeatable)",
    )
    group.add_argument("--json", action="store_true", help="output for machines")


def load(args: argparse.Namespace, **flags: Any) -> Settings:
    """The effective settings for a call; `flags` are dotted as `server__port`."""
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    if args.user_agent is not None:
        given["user_agent"] = args.user_agent
    settings = Settings.load(
        args.config, flags=given | _no_socket(args), allow=tuple(args.allow_address)
    )
    for variable in settings.ignored:
        print(
            f"{NAME}: {variable} is no setting, and is ignored (config.example.toml lists them)",
            file=sys.stderr,
        )
    return settings


def _no_socket(args: argparse.Namespace) -> dict[str, None]:
    """--host or --port overrides a `socket` that the file or the environment sets.

    Raises ConfigError where --socket stands beside them: only one of the two can be meant.
    """
    port = getattr(args, "port", None)
    if getattr(args, "host", None) is None and port is None:
        return {}
    if getattr(args, "socket", None) is not None:
        raise ConfigError("--socket stands instead of --host and --port: give one or the other")
    return {"server.socket": None}


def open_gate(settings: Settings) -> Gatekeeper:
    """A gate for a command that asks and ends: nothing is kept unless a path is set."""
    from gatekeeper.gate import Gatekeeper  # noqa: PLC0415 - `--help` needs no network code

    return Gatekeeper(settings.identity(), config=settings.config)


def log_to_stderr() -> None:
    """Warnings of the library as one line each."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")


def warn_if_anonymous(settings: Settings) -> None:
    """Say how to set an identity, where none is set."""
    if settings.config.user_agent is None:
        print(
            f"{NAME}: no identity is set, so sites see {settings.identity()!r}; give them a way "
            'to reach you with --user-agent "yourbot/1.0 (+https://...)" or `user_agent` in '
            "the configuration",
            file=sys.stderr,
        )
