"""`gatekeeper history ORIGIN`: the past versions of a site's robots.txt.

The command reads the storage of a gate, which may be running at the same time. What that gate
wrote within the last `storage.flush_interval` is not there yet.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gatekeeper.cli import CommandParser, load
from gatekeeper.clock import utc
from gatekeeper.errors import ConfigError, StorageError, counted
from gatekeeper.storage import HistoryEntry, schema
from gatekeeper.terminal import DENIED, NAME, OK, json_text
from gatekeeper.urls import parse, printable

MAX_COMPARED = 4_000_000
"""Maximum pairs of lines to compare; for more, the whole text is shown as replaced."""

EXAMPLE = f"{NAME} history https://example.org --at 2026-11-20T12:00:00Z"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `history`."""
    parser.option("origin ORIGIN", "scheme and host, or any URL of the site")
    text_at = "print the text as of this time (RFC 3339; UTC if no zone is given)"
    parser.option("--at TIME", text_at, type=_parse_time)
    parser.option("--diff", "show each change; with --at, the last one by that time")
    parser.option("--storage PATH", "the state file, if not as configured", dest="storage.path")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if there is a version to show, 1 if none is known (of that time)."""
    settings = load(args)
    origin = parse(args.origin).origin
    path = _state_file(settings.config.storage.path)
    with closing(schema.open_to_read(path)) as connection, schema.explained(path):
        return _show(connection, origin, args)


def _state_file(configured: str | None) -> Path:
    if configured == "memory":
        raise ConfigError("storage.path is `memory`: nothing was stored; give --storage PATH")
    if configured is not None:
        return Path(configured)
    from gatekeeper.sidecar.process import state_path  # noqa: PLC0415

    path = state_path()
    if not path.exists():
        raise StorageError(
            f"{path}: nothing is stored yet: run `{NAME} serve`, or give --storage PATH "
            f"(`{NAME} fetch -o DIR` stores DIR/gatekeeper.db)"
        )
    return path


def _parse_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; write it as 2026-11-20 or 2026-11-20T12:00:00Z"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _show(connection: sqlite3.Connection, origin: str, args: argparse.Namespace) -> int:
    known, read = schema.history_of(connection, origin), partial(schema.text_of, connection)
    at = None if args.at is None else args.at.timestamp()
    versions = [one for one in known if at is None or one.first_seen <= at]
    if not versions:
        message = "nothing is known" if at is None else "nothing is known about that time"
        if known:
            message += f"; first seen {_time(known[0].first_seen)}"
        if args.json:
            print(json_text({"origin": origin, "versions": []}))
        else:
            print(f"{origin}: {message}", file=sys.stderr)
        return DENIED
    if at is not None:
        versions = versions[-2 if args.diff else -1 :]
    if args.json:
        print(json_text({"origin": origin, "versions": _versions(read, versions, at, args.diff)}))
    elif args.diff:
        _print_changes(read, versions)
    elif at is not None:
        _print_text(read, versions[-1], at)
    else:
        print(f"{origin}: {counted(len(versions), 'version')}, oldest first")
        print("\n".join(f"  {_line(entry)}" for entry in versions))
    return OK


_Read = Callable[[bytes], bytes | None]
"""Returns the text with a digest."""


def _versions(
    read: _Read, entries: Sequence[HistoryEntry], at: float | None, diff: bool
) -> list[dict[str, Any]]:
    """Return what `--json` prints: the versions, oldest first; with a time the last, and its
    text."""
    versions = [_version(entry) for entry in entries]
    if diff:
        for version, pair in zip(versions[1:], itertools.pairwise(entries), strict=True):
            version["diff"] = "".join(_unified_diff(read, *pair))
    if at is not None:
        body = read(entries[-1].body_hash)
        text = None if body is None else body.decode("utf-8", "replace")
        # Confirmed: seen both before and after that time.
        return [versions[-1] | {"confirmed": at <= entries[-1].last_seen, "text": text}]
    return versions


def _version(entry: HistoryEntry) -> dict[str, Any]:
    """Return a version as `--json` prints it. `sha256` is null if there was no file."""
    return {
        "first_seen": _time(entry.first_seen),
        "last_seen": _time(entry.last_seen),
        "outcome": entry.outcome,
        "status": entry.status,
        "size": entry.size,
        "sha256": entry.body_hash.hex() or None,
    }


def _print_text(read: _Read, entry: HistoryEntry, at: float) -> None:
    """Print the description on stderr, and the unchanged bytes of the text on stdout."""
    confirmed = "" if at <= entry.last_seen else " (not fetched again before that time)"
    print(_line(entry) + confirmed, file=sys.stderr)
    body = read(entry.body_hash)
    if body is None:
        return
    if sys.stdout.isatty():
        print(_printable(body.decode("utf-8", "replace")), end="")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()


def _print_changes(read: _Read, entries: Sequence[HistoryEntry]) -> None:
    if len(entries) == 1:
        print(f"no earlier version to compare with: {_line(entries[0])}", file=sys.stderr)
    for before, after in itertools.pairwise(entries):
        sys.stdout.writelines(_unified_diff(read, before, after))


def _unified_diff(read: _Read, before: HistoryEntry, after: HistoryEntry) -> Iterable[str]:
    """Yield a unified diff; each line ends with a newline and is safe for a terminal."""
    old, new = (_text_lines(read(entry.body_hash)) for entry in (before, after))
    names = (f"last seen {_time(before.last_seen)}", f"first seen {_time(after.first_seen)}")
    if len(old) * len(new) > MAX_COMPARED:
        # The time to compare grows with the square of the lines, and faster for hostile texts.
        yield f"--- {names[0]}\n+++ {names[1]}\n@@ -1,{len(old)} +1,{len(new)} @@\n"
        yield from (f"-{line}" for line in old)
        yield from (f"+{line}" for line in new)
        return
    yield from difflib.unified_diff(old, new, *names)


def _text_lines(body: bytes | None) -> list[str]:
    if body is None:
        return []
    text = body.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return [f"{_printable(line)}\n" for line in text.removesuffix("\n").split("\n")]


def _printable(text: str) -> str:
    """Escape characters with which a site's text could control the terminal or reorder text."""
    return re.sub(r"[^\n\t]+", lambda part: printable(part[0], len(part[0])), text)


def _line(entry: HistoryEntry) -> str:
    status = "" if entry.status is None else f" {entry.status}"
    what = f"{entry.size:,} bytes, sha256 {entry.body_hash.hex()}" if entry.body_hash else "no file"
    seen = f"{_time(entry.first_seen)} to {_time(entry.last_seen)}"
    return f"{seen}  {entry.outcome}{status}  {what}"


def _time(wall: float) -> str:
    return f"{utc(wall):%Y-%m-%dT%H:%M:%SZ}"
