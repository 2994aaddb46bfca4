"""What a terminal, or whatever else stands at the other end of our output, can show."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from typing import TextIO

__all__ = ["be_lenient", "json_text", "log_to_stderr", "paint"]

_CODES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


def be_lenient() -> None:
    """Have stdout and stderr escape what their encoding lacks: no page's text, and no name of a
    file, ends a command on an ASCII terminal."""
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
