"""What every command shares: its options, its settings, its gate."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from gatekeeper.errors import ConfigError, InvalidURL

if TYPE_CHECKING:
    from gatekeeper.cli.settings import Settings
    from gatekeeper.gate import Gatekeeper

__all__ = [
    "BOM",
    "DENIED",
    "NAME",
    "OK",
    "TOKEN",
    "USAGE",
    "be_lenient",
    "check_place",
    "hint",
    "json_text",
    "load",
    "log_to_stderr",
    "open_gate",
    "paint",
    "standard_input",
    "standard_input_lines",
    "url_of_line",
    "warn_if_anonymous",
]


# --- the terminal ----------------------------------------------------------------------------

_CODES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


def be_lenient() -> None:
    """Have stdout and stderr escape what their encoding lacks: no page's text, and no name of a
    file, ends a command on an ASCII terminal.

    Streams that were closed (`2>&-`) lead nowhere, and no socket gets their numbers.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def json_text(value: object, stream: TextIO | None = None) -> str:
    """The value as one line of JSON, without its end, in characters that the stream has.

    `stream` is stdout unless given.
    """
    import msgspec  # noqa: PLC0415 - `--help` needs none

    text = msgspec.json.encode(value).decode()
    if text.isascii() or _is_unicode(stream or sys.stdout):
        return text
    # In JSON they stand in strings alone, where an escape means the same.
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in "red", "green", "yellow" or "cyan", where the stream (stdout) is a terminal.

    NO_COLOR (no-color.org) and TERM=dumb turn colours off, FORCE_COLOR on.
    """
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if _coloured(stream or sys.stdout) else text


def _coloured(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def log_to_stderr() -> None:
    """Warnings of the library as one line each, on a terminal with their time (UTC)."""
    at = "%(asctime)s " if sys.stderr is not None and sys.stderr.isatty() else ""
    formatter = logging.Formatter(f"{at}%(name)s: %(message)s", "%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


# --- what commands share ---------------------------------------------------------------------

# What `--help` can do without is imported where it is used.


NAME = "gatekeeper"
OK, DENIED, USAGE = 0, 1, 2
TOKEN = "GATEKEEPER_TOKEN"  # noqa: S105 - the variable that holds it for those who ask a sidecar
BOM = b"\xef\xbb\xbf"
"""Editors that write it mean no part of the first line."""


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

    If it were made, a sidecar with a misspelt path would start without its state.
    """
    from gatekeeper.config import MEMORY  # noqa: PLC0415

    path = settings.config.storage.path
    if path is None or path == MEMORY or Path(path).absolute().parent.is_dir():
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
    """Its bytes: the encoding of a terminal is not that of a list of URLs, or of a robots.txt.

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
