"""Replaces the lines of a host by their digests, so that the chain still verifies.

First the erasure is written, as a chain of its own that names every line; then each segment is
written again under another name, and renamed. A crash in between leaves lines that are not erased
yet: run it again. A segment that a process writes to is left alone, and reported.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gatekeeper.audit.chain import (
    CLOSED,
    NO_DIGEST,
    OPEN,
    SEAL,
    VERSION,
    BadLine,
    SegmentName,
    chain_name,
    digest_of,
    encode_line,
    seal_fields,
    text_path,
    time_text,
)
from gatekeeper.audit.files import (
    is_written,
    remove_unfinished,
    stored_texts,
    texts_named,
    write_segment,
)
from gatekeeper.audit.index import index_path
from gatekeeper.audit.lines import AnsweredLine, GrantLine, Line, OutcomeLine, StartLine, read_line
from gatekeeper.audit.reading import (
    DAMAGED,
    ChainFiles,
    add_to,
    find_chains,
    host_asked_for,
    host_of_line,
    raw_lines,
    why,
)
from gatekeeper.errors import ConfigError, InvalidURL, counted
from gatekeeper.signing import SigningKey
from gatekeeper.urls import printable

_MOST_SPANS: Final = 10_000
"""Spans that one `erasure` line names; more need another line."""


class ErasureReport(msgspec.Struct, kw_only=True):
    """What was erased, and what was not."""

    host: str
    lines: int = 0
    segments: int = 0
    texts: int = 0
    erasure: str | None = None
    """The segment that says so; None if there was nothing to erase."""
    left: list[str] = []
    """What could not be erased, and what helps."""


class _Segment(msgspec.Struct):
    """A segment with lines of the host."""

    path: Path
    name: str
    spans: list[list[int]]
    writing: bool
    """A process writes to it, or compresses it."""

    @property
    def count(self) -> int:
        """The number of lines to erase."""
        return sum(last - first + 1 for first, last in self.spans)


class _Search:
    """Finds the lines of a host in the chains of a folder."""

    def __init__(self, host: str, report: ErasureReport) -> None:
        self.host = host
        self.report = report
        self.texts: set[str] = set()
        """Digests of those that lines name which are not the host's."""
        self.damaged = False
        """Not every line could be read."""
        self.unknown = 0
        """Lines of which it can't be told whether they are the host's."""
        self._leases: set[str] = set()
        self._digests = False

    def chain(self, files: ChainFiles) -> Iterator[_Segment]:
        """Yield the segments of a chain that have lines of the host."""
        self._leases, self._digests = set(), False
        for number in sorted({*files.segments, *files.seals}):
            name = SegmentName(files.name, number)
            # All forms that there are: a killed process may have left two.
            for suffix in (OPEN, CLOSED, SEAL):
                path = files.folder / str(name._replace(suffix=suffix))
                # Asked first: what is compressed since then is found in its new form.
                found = _Segment(path, str(name), [], suffix == OPEN and is_written(path))
                if os.path.lexists(path):
                    self._read(found)
                if found.spans:
                    yield found

    def _read(self, found: _Segment) -> None:
        """Find the lines of the host in a segment."""
        path = found.path
        try:
            for octets, _, whole in raw_lines(path):
                try:
                    line = read_line(octets or b"") if whole else None
                except BadLine:  # it may be of a later version
                    self.texts.update(texts_named(octets or b""))
                    continue
                if line is None:
                    continue
                if self._is_own(line):
                    add_to(found.spans, line.n)
                elif text := getattr(line, "text", None):
                    self.texts.add(text)
        except FileNotFoundError:
            return  # `audit.keep` removed it since
        except DAMAGED as error:
            self.report.left.append(f"{path}: can't be read further: {why(error)}")
            self.damaged = True
            found.spans = []  # it can't be written again as a whole

    def _is_own(self, line: Line) -> bool:
        """Return True if a line is the host's."""
        if isinstance(line, OutcomeLine):
            own = line.lease in self._leases
            self._leases.discard(line.lease)
            return own
        host = host_of_line(line)
        own = host == self.host
        if isinstance(line, StartLine):
            self._digests = line.urls == "digest"
        elif isinstance(line, AnsweredLine) and host is None:  # its URL can't be parsed
            self.unknown += self._digests
            own = not self._digests and self.host in line.url.lower()
        elif isinstance(line, GrantLine) and own:
            self._leases.add(line.lease)
        return own


def _host(text: str) -> str:
    """Return the name of a host as lines have it. Raises ConfigError."""
    with suppress(InvalidURL):
        target = host_asked_for(text)
        if target.path == "/" and target.port == 80 and not target.userinfo:
            return target.host
    raise ConfigError(f"{text!r} is no host; give a name, such as www.example.org")


def erase(
    folder: Path, host: str, *, by: str, reason: str, key: SigningKey | None = None
) -> ErasureReport:
    """Replace the lines of a host, and remove the texts that only it used.

    `by` and `reason` stand in the erasure; `key` signs its seal. What killed processes began to
    write is removed. Raises ConfigError for what is no host, or a folder without a record, and
    OSError if a file can't be written.
    """
    host = _host(host)
    report = ErasureReport(host=host)
    search = _Search(host, report)
    chains = find_chains([folder])
    remove_unfinished(folder.rglob(".*"))
    found = [segment for files in chains for segment in search.chain(files)]
    for segment in found:
        if segment.writing:
            report.left.append(
                f"{segment.path}: {segment.count:,} lines: a process writes to it; run this again "
                "when it has ended or has begun its next segment"
            )
    ready = [segment for segment in found if not segment.writing]
    if ready:
        report.erasure = _write_erasure(folder, ready, host, by, reason, key)
    for segment in ready:
        try:
            _replace(segment)
        except FileNotFoundError:
            if segment.path.exists():
                raise
            continue  # `audit.keep` removed it since
        report.segments += 1
        report.lines += segment.count
    if search.unknown:
        report.left.append(
            f"{search.unknown:,} refusals and decisions have URLs as digests: whose they are can't "
            "be told"
        )
    if not search.damaged:  # else other lines may name them
        unnamed = stored_texts(folder) - search.texts
        _remove_texts(folder, unnamed, report, live=len(ready) < len(found))
    return report


def _remove_texts(folder: Path, unnamed: set[str], report: ErasureReport, *, live: bool) -> None:
    """Remove the texts that no other line names, also those that an earlier call left."""
    segments = [path for files in find_chains([folder]) for path in files.segments.values()]
    live = live or any(path.name.endswith(OPEN) and is_written(path) for path in segments)
    if unnamed and live:
        report.left.append(
            f"{len(unnamed):,} texts: a process that writes to the folder may name them again; run "
            "this again when it has ended"
        )
        return
    for digest in unnamed:
        (folder / text_path(digest)).unlink(missing_ok=True)
        report.texts += 1


# --- writing --------------------------------------------------------------------------------------


def _write_erasure(
    folder: Path,
    segments: Iterable[_Segment],
    host: str,
    by: str,
    reason: str,
    key: SigningKey | None,
) -> str:
    """Write the chain that names the erased lines, and return its only segment."""
    wall, pid = time.time(), os.getpid()
    name = chain_name(socket.gethostname(), pid, wall)
    t, m, prev, n = time_text(wall), time.monotonic(), NO_DIGEST, 0
    lines: list[bytes] = []

    def add(kind: str, **fields: object) -> None:
        nonlocal prev, n
        n += 1
        lines.append(encode_line(n, prev, t, m, kind, fields))
        prev = digest_of(lines[-1])

    hidden = f"sha256:{hashlib.sha256(host.encode()).hexdigest()}"
    for segment in segments:
        for at in range(0, len(segment.spans), _MOST_SPANS):
            spans = segment.spans[at : at + _MOST_SPANS]
            add("erasure", segment=segment.name, host=hidden, lines=spans, by=by, reason=reason)
    add("seal", **seal_fields(key, name, n + 1, prev, 1, "end"))
    path = folder / str(SegmentName(name, 1))
    write_segment(path, (line + b"\n" for line in lines))
    return path.name


def _replace(segment: _Segment) -> None:
    """Write a segment again, with its lines in the spans replaced."""
    spans = iter(segment.spans)

    def copied() -> Iterator[bytes]:
        first, last = next(spans)
        for octets, digest, whole in raw_lines(segment.path):
            if not whole:
                return  # a torn line, which is no part of the chain
            if octets is None:
                raise ConfigError(f"{segment.path}: a line is too long to be kept: see `verify`")
            with suppress(BadLine):
                line = read_line(octets)
                if line.n > last:
                    first, last = next(spans, (1, 0))
                if first <= line.n <= last:
                    left = f'"n":{line.n},"prev":"{line.prev}","kind":"erased","digest":"{digest}"'
                    octets = f'{{"v":{VERSION},{left}}}'.encode()  # noqa: PLW2901
            yield octets + b"\n"

    index_path(segment.path).unlink(missing_ok=True)
    write_segment(segment.path, copied())


def lines_of(report: ErasureReport) -> Iterator[str]:
    """Yield the result as lines for people."""
    if report.erasure is None:
        yield f"the record has no line of {report.host} that can be erased"
    else:
        yield (
            f"erased: {counted(report.lines, 'line')} in {counted(report.segments, 'segment')}, as "
            f"{report.erasure} says; removed: {counted(report.texts, 'text')}"
        )
    yield from (f"left: {printable(one, 500)}" for one in report.left)
