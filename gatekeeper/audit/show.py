"""Tells in words what an audit record has about a URL, a host, a lease or a decision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from cachetools import FIFOCache

from gatekeeper.audit.chain import MAX_TEXT, recorded_url
from gatekeeper.audit.decisions import ChainState, WrongText
from gatekeeper.audit.lines import (
    AnsweredLine,
    BlockLine,
    GrantLine,
    Line,
    OutcomeLine,
    OverrideLine,
    PauseLine,
    RobotsLine,
    StartLine,
)
from gatekeeper.audit.reading import host_asked_for, host_of_line, merged, moment_text, read_chains
from gatekeeper.audit.report import what_it_sets
from gatekeeper.clock import number
from gatekeeper.errors import InvalidURL
from gatekeeper.urls import parse, printable

_MOST_LEASES: Final = 100_000
"""Open leases that are followed."""
_MAX_SHOWN: Final = 300


class ShownLine(msgspec.Struct, frozen=True):
    """A line of a record, and what it means."""

    file: str
    n: int
    time: str
    words: list[str]
    line: dict[str, Any]
    """The line itself."""


class _Finder:
    """Picks the lines of one chain that are about a URL, a host, or the id of a lease or a
    decision."""

    def __init__(self, what: str, folder: Path) -> None:
        """A text with `://` is a URL."""
        self._what = what
        self._url = recorded_url(parse(what).url) if "://" in what else None
        self._host: str | None = None
        with suppress(InvalidURL):  # the id of a lease is no host
            self._host = None if self._url else host_asked_for(what).host
        self._state = ChainState(folder)
        self._salt = ""
        self._leases: FIFOCache[str, bool] = FIFOCache(_MOST_LEASES)

    def concerns(self, line: Line) -> bool:
        """Return True if a line is about what was asked for."""
        self._state.note(line)
        if isinstance(line, OutcomeLine):
            return self._leases.pop(line.lease, False)
        found = self._host is not None and host_of_line(line) == self._host
        match line:
            case StartLine():
                self._salt = line.salt or ""
            case GrantLine() | AnsweredLine():
                ids = line.decision, line.lease if isinstance(line, GrantLine) else None
                found = found or self._what in ids or self._is_url(line.url)
            case RobotsLine() if self._url is not None:
                found = self._url.startswith(line.origin + "/")
        if found and isinstance(line, GrantLine):
            self._leases[line.lease] = True
        return found

    def _is_url(self, written: str) -> bool:
        asked, urls = self._url, self._state.urls
        if asked is None:
            return False
        if urls == "digest":
            return written == hashlib.sha256(f"{self._salt}{asked}".encode()).hexdigest()
        url = asked[:MAX_TEXT] if urls == "full" else asked[:MAX_TEXT].partition("?")[0]
        with suppress(InvalidURL):  # it was refused for that
            return url in (written, parse(written).url)
        return written == url

    # --- in words ---------------------------------------------------------------------------

    def words(self, line: Line) -> Iterator[str]:
        """Yield what a line means, one sentence each."""
        match line:
            case GrantLine():
                yield from self._grant(line)
            case OutcomeLine():
                yield from _outcome(line)
            case AnsweredLine():
                said = {"deny": "refused", "defer": "put off", "allow": "allowed"}[line.verdict]
                again = "" if line.retry_at is None else f"; again at {moment_text(line.retry_at)}"
                yield f"{line.url} was {said} to {line.agent}: {line.reason}{again}"
                yield from self._rule(line.text, line.line)
            case RobotsLine():
                yield from _robots(line)
            case BlockLine():
                if line.until is None or line.until <= line.t:
                    yield f"the block of {line.scope} was lifted by {line.by or 'nobody named'}"
                else:
                    yield f"{line.scope} was blocked until {moment_text(line.until)}: {line.reason}"
            case PauseLine():
                done = "resumed" if line.ended else "paused"
                yield f"{line.scope} was {done} by {line.by or 'nobody named'}"
            case OverrideLine():
                yield from _override(line)

    def _grant(self, line: GrantLine) -> Iterator[str]:
        what = "a request for robots.txt" if line.robots else str(line.reason)
        yield f"{line.url} was granted to {line.agent}: {what} (lease {line.lease})"
        yield from self._rule(line.text, line.line)
        for one in line.scopes:
            since = "none is known" if one.since is None else f"{number(one.since)} s ago"
            yield (
                f"{one.scope}: at least {number(one.interval)} s between two requests "
                f"({one.source}); the last one: {since}"
            )

    def _rule(self, digest: str | None, number: int | None) -> Iterator[str]:
        """Yield the line of the file that decided, with its text."""
        if digest is None:
            return
        if number is None:
            yield f"no line of robots.txt {digest} decided"
            return
        try:
            rows = self._state.read(digest).text.split("\n")
        except WrongText as error:
            yield f"line {number} decided, but {error}"
            return
        text = rows[number - 1] if 0 < number <= len(rows) else "which is not there"
        yield f"line {number} of robots.txt {digest} decided: {text.strip()}"


def _outcome(line: OutcomeLine) -> Iterator[str]:
    if line.start is None:
        yield f"lease {line.lease} was given back: no request was sent"
        return
    status = "without a response" if line.status is None else f"with status {line.status}"
    size = "" if line.size is None else f", {line.size:,} bytes"
    signed = ", signed" if line.signed else ""
    yield f"sent at {line.start:%Y-%m-%dT%H:%M:%S.%fZ}{signed}; it ended {status}{size}"
    if line.retry_after is not None:
        yield f"the site asked to wait {number(line.retry_after)} s (Retry-After)"
    yield from (f"signal: {name} {value}" for name, value in line.signals.items())


def _robots(line: RobotsLine) -> Iterator[str]:
    source = {"network": "read", "state": "taken from the state file"}.get(line.source, "shared")
    status = "" if line.status is None else f", status {line.status}"
    yield f"robots.txt of {line.origin} was {source}: {line.outcome}{status}"
    if line.text is not None:
        at = "an unknown time" if line.fetched_at is None else moment_text(line.fetched_at)
        yield f"its text: {line.text}, {line.size or 0:,} bytes, of {at}"
    if line.since is not None:
        yield f"it can't be fetched since {moment_text(line.since)}"


def _override(line: OverrideLine) -> Iterator[str]:
    by, why = line.by or "nobody named", line.reason or "no reason given"
    if line.ended:
        yield f"the override for {line.match} ended ({line.source}): {by}, {why}"
    else:
        until = "" if line.until is None else f" until {moment_text(line.until)}"
        yield f"the override for {line.match} is in force{until} ({line.source}): {by}, {why}"
        yield f"it sets: {what_it_sets(line)}"


def lines_about(folders: Sequence[Path], what: str) -> Iterator[ShownLine]:
    """Yield what the records have about a URL, a host, a lease or a decision, ordered by time.

    Raises InvalidURL for a text with `://` that is no URL, and ConfigError for a folder that can't
    be read or has no chain. Damage is passed over: see `verify`.
    """
    readers = read_chains(folders, lambda _difference: None)
    finders = [_Finder(what, one.files.folder) for one in readers]
    for entry in merged(readers):
        line = entry.line
        finder = finders[entry.chain]
        if line is not None and finder.concerns(line):
            plain = msgspec.to_builtins(line)
            words = [printable(one, _MAX_SHOWN) for one in finder.words(line)]
            yield ShownLine(entry.file, line.n, plain.get("t", ""), words, plain)
