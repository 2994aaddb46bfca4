"""What every command shares: its options, its settings, its gate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from gatekeeper import __version__
from gatekeeper.errors import ConfigError, InvalidURL

# What `--help` can do without is imported where it is used.
if TYPE_CHECKING:
    from gatekeeper.cli.settings import Settings
    from gatekeeper.gate import Gatekeeper

__all__ = [
    "BOM",
    "DENIED",
    "NAME",
    "OK",
    "USAGE",
    "add_command",
    "check_place",
    "hint",
    "load",
    "open_gate",
    "standard_input",
    "standard_input_lines",
    "url_of_line",
    "version",
    "warn_if_anonymous",
]

NAME = "gatekeeper"
OK, DENIED, USAGE = 0, 1, 2
BOM = b"\xef\xbb\xbf"
"""Editors that write it mean no part of the first line."""

Subparsers = Any  # argparse's own class for them is private


def version() -> str:
    """The version of this package."""
    return __version__


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
    parser.set_defaults(run=run, parser=parser)
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
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


def load(args: argparse.Namespace, **flags: Any) -> Settings:
    """The effective settings for a call; `flags` are dotted as `server__port`."""
    from gatekeeper.cli.settings import Settings, meant  # noqa: PLC0415

    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    if args.user_agent is not None:
        given["user_agent"] = args.user_agent
    settings = Settings.load(
        args.config, flags=given | _no_socket(args), allow=tuple(args.allow_address)
    )
    args.settings = settings  # for `main`, which says whose setting an error is about
    for variable in settings.ignored:
        print(f"{NAME}: {variable} is no setting, and is ignored{meant(variable)}", file=sys.stderr)
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


def check_place(settings: Settings) -> None:
    """Raises ConfigError where the directory of a state file that was named is not there.

    Made in silence, a misspelt one would have the state of a sidecar begin anew.
    """
    path = settings.config.storage.path
    if path is None or path == "memory" or Path(path).absolute().parent.is_dir():
        return
    folder = Path(path).absolute().parent
    raise ConfigError(f"storage.path: {path}: there is no directory {folder}; make it first")


def open_gate(settings: Settings) -> Gatekeeper:
    """A gate for a command that asks and ends: nothing is kept unless a path is set."""
    from gatekeeper.gate import Gatekeeper  # noqa: PLC0415 - `--help` needs no network code

    return Gatekeeper(settings.identity(), config=settings.config)


def warn_if_anonymous(settings: Settings) -> None:
    """Say how to set an identity, where none is set, or one that may not be what it seems."""
    from gatekeeper.config import agent_doubt  # noqa: PLC0415

    doubt = agent_doubt(settings.identity())
    if doubt is not None:
        print(f"{NAME}: {doubt}", file=sys.stderr)
    if settings.config.user_agent is None:
        print(
            f"{NAME}: no identity is set, so sites see {settings.identity()!r}; give them a way "
            'to reach you with --user-agent "yourbot/1.0 (+https://...)" or `user_agent` in '
            "the configuration",
            file=sys.stderr,
        )


def standard_input() -> BinaryIO:
    """Its bytes: how a terminal is set up says nothing about a list of URLs, or a robots.txt.

    Raises ConfigError where it is closed.
    """
    # Python has None here where the descriptor was closed, and the number may be another
    # file's by now.
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("standard input is closed; name a file, or give the URLs as arguments")
    return cast("BinaryIO", getattr(sys.stdin, "buffer", sys.stdin))


def url_of_line(line: bytes) -> str | None:
    """The URL that a line gives; None for a blank one and for a comment.

    What is not UTF-8 stays what it is: `urls` refuses it, and no other page is asked for in
    its place.

    >>> url_of_line(b" https://example.org/ \n"), url_of_line(b"# later\n")
    ('https://example.org/', None)
    """
    text = line.decode("utf-8", "surrogateescape").strip()
    return text if text and not text.startswith("#") else None


def standard_input_lines() -> Iterator[str]:
    """The URLs that stand there, one a line. Raises ConfigError where it is closed."""
    for number, line in enumerate(standard_input()):
        url = url_of_line(line if number else line.removeprefix(BOM))
        if url is not None:
            yield url


def hint(text: str) -> str:
    """For a host that stands in place of a URL: how an error about it ends; else nothing.

    >>> hint("example.org/page"), hint("page")
    ('; did you mean https://example.org/page?', '')
    """
    if "://" in text or not any(mark in text.partition("/")[0] for mark in ".:"):
        return ""
    from gatekeeper.urls import parse  # noqa: PLC0415

    try:
        return f"; did you mean {parse(f'https://{text}').url}?"
    except InvalidURL:
        return ""
