"""What the commands, `gatekeeper fetch` and the tools for site owners share: streams of a terminal,
exit codes, and lists of URLs as input.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

from gatekeeper.errors import ConfigError, InvalidURL

if TYPE_CHECKING:
    from gatekeeper.config import Config
    from gatekeeper.gate import Gatekeeper

NAME = "gatekeeper"
OK, DENIED, USAGE = 0, 1, 2
BOM = b"\xef\xbb\xbf"
"""The UTF-8 byte order mark, which some editors put before the first line."""


_CODES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


def prepare_streams() -> None:
    """Make stdout and stderr escape characters that their encoding lacks.

    So neither the text of a page nor the name of a file ends a command on an ASCII terminal.
    Streams that were closed (`2>&-`) are opened on the null device, so that no socket gets their
    file descriptors.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def json_text(value: object, stream: TextIO | None = None) -> str:
    """Return the value as one line of JSON in characters that the stream can encode.

    `stream` is stdout unless given. The line has no newline at its end.
    """
    import msgspec  # noqa: PLC0415 - `--help` does not need it

    text = msgspec.json.encode(value).decode()
    if text.isascii() or _is_unicode(stream or sys.stdout):
        return text
    # In JSON such characters occur in strings only, where an escape means the same.
    return _BEYOND_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in "red", "green", "yellow" or "cyan" if the stream is a terminal.

    `stream` is stdout unless given. NO_COLOR (no-color.org) and TERM=dumb switch colours off,
    FORCE_COLOR switches them on.
    """
    given, stream = os.environ.get, stream or sys.stdout
    wanted = not given("NO_COLOR") and (
        given("FORCE_COLOR") or (stream.isatty() and given("TERM") != "dumb")
    )
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if wanted else text


def log_to_stderr() -> None:
    """Print each warning of the library as one line; on a terminal with its time (UTC)."""
    time_field = "%(asctime)s " if sys.stderr is not None and sys.stderr.isatty() else ""
    formatter = logging.Formatter(f"{time_field}%(name)s: %(message)s", "%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def identity_of(config: Config) -> str:
    """Return the effective User-Agent: the configured one or the default."""
    version = import_module("gatekeeper").__version__  # no import of its products
    return config.user_agent or f"gatekeeper/{version.rpartition('.')[0]}"


def open_gate(config: Config, *, overrides: bool = True) -> Gatekeeper:
    """Return a gate for a short-lived command. It stores nothing unless storage.path is set.

    `overrides`: with the operator's allow and deny. Without them it asks about the site only.
    """
    from msgspec.structs import replace  # noqa: PLC0415 - `--help` does not need it

    from gatekeeper.gate import Gatekeeper  # noqa: PLC0415 - `--help` needs no network code

    if not overrides:
        config = replace(config, host=tuple(replace(one, robots="obey") for one in config.host))
    return Gatekeeper(identity_of(config), config=config)


def warn_if_anonymous(config: Config) -> None:
    """Print a warning if no identity is set, or if its product token may surprise its owner."""
    from gatekeeper.robots.parser import token_warning  # noqa: PLC0415

    identity = identity_of(config)
    warning = token_warning(identity)
    if warning is not None:
        print(f"{NAME}: {warning}", file=sys.stderr)
        warnings.filterwarnings("ignore", re.escape(warning), UserWarning)  # the gate's own
    if config.user_agent is None:
        print(
            f"{NAME}: no identity is set, so sites see {identity!r}; give them a way "
            'to reach you with --user-agent "yourbot/1.0 (+https://...)" or `user_agent` in '
            "the configuration",
            file=sys.stderr,
        )


def agent_for(config: Config, sidecar: str | None) -> str | None:
    """Return the User-Agent of a gate of our own, or what is set for asking a sidecar, which has an
    identity of its own."""
    if sidecar is not None:
        return config.user_agent
    warn_if_anonymous(config)
    return identity_of(config)


def did_you_mean(unknown: str, names: Iterable[str], *, otherwise: str, cutoff: float = 0.6) -> str:
    """Return the end of a sentence about an unknown name: the similar one, if any, or `otherwise`.

    `cutoff`: how similar it must be, from 0 to 1.
    """
    import difflib  # noqa: PLC0415 - needed for mistakes only

    matches = difflib.get_close_matches(unknown, list(names), 1, cutoff)
    return f"; did you mean {matches[0]}?" if matches else otherwise


def standard_input() -> BinaryIO:
    """Return standard input as a binary stream. Raises ConfigError if it is closed.

    A list of URLs or a robots.txt need not have the encoding of the terminal.
    """
    # sys.stdin is None if the descriptor was closed; its number may belong to another file by now.
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("standard input is closed; name a file, or give the URLs as arguments")
    return cast("BinaryIO", getattr(sys.stdin, "buffer", sys.stdin))


def url_of_line(line: bytes) -> str | None:
    r"""Return the URL in a line, or None for a blank line or a comment.

    Bytes that are not UTF-8 are preserved: `urls` refuses them, and no other page is requested
    instead.

    >>> url_of_line(b" https://example.org/ \n"), url_of_line(b"# later\n")
    ('https://example.org/', None)
    """
    text = line.decode("utf-8", "surrogateescape").strip()
    return text if text and not text.startswith("#") else None


def urls_of(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the URLs in lines, without blank ones and comments."""
    for number, line in enumerate(lines):
        url = url_of_line(line if number else line.removeprefix(BOM))
        if url is not None:
            yield url


def url_hint(text: str) -> str:
    """Return the suggestion that ends an error about a host given instead of a URL; else "".

    >>> url_hint("example.org/page"), url_hint("page"), url_hint("robots.txt")
    ('; did you mean https://example.org/page?', '', '')
    """
    host = text.partition("/")[0]
    if "://" in text or not any(mark in host for mark in ".:") or host.endswith(".txt"):
        return ""  # no domain ends so, but files do
    from gatekeeper.urls import parse  # noqa: PLC0415

    try:
        return f"; did you mean {parse(f'https://{text}').url}?"
    except InvalidURL:
        return ""
