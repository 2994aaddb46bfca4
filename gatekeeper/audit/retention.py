"""Removes old segments of a folder, leaves their last lines, and finds texts to remove with them.

It works on all chains of the folder, since most writers have ended by the time. A segment that a
running process writes is locked, and stays. For a thread: files are read in blocks.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gatekeeper.audit.chain import CLOSED, OPEN, SEAL, BadLine, SegmentName
from gatekeeper.audit.files import is_written, whole_file
from gatekeeper.audit.index import index_path
from gatekeeper.audit.lines import read_line

_BLOCK: Final = 1 << 20
_TEXT: Final = re.compile(rb'"text":"([0-9a-f]{64})"')
_DAMAGED: Final = (OSError, EOFError, zlib.error)


def remove_old(folder: Path, before: float, own: str) -> set[str]:
    """Remove the segments that were closed before a wall time, in seconds since 1970.

    Return the digests of the texts that they named and no other segment names: these can be
    removed, if nothing that is not written yet names them. None are returned while another process
    writes a chain here, which may name any; `own` is the name of the caller's chain.
    """
    old: list[tuple[SegmentName, Path]] = []
    rest: list[tuple[SegmentName, Path]] = []
    alone = True
    for entry in os.scandir(folder):
        name = SegmentName.parse(entry.name)
        if name is None or name.suffix == SEAL:
            continue
        path = folder / entry.name
        running = name.suffix == OPEN and (name.chain == own or is_written(path))
        alone = alone and (not running or name.chain == own)
        with contextlib.suppress(OSError):  # another process removed it
            (rest if running or entry.stat().st_mtime >= before else old).append((name, path))
    named: set[str] = set()
    for name, path in sorted(old):
        last = b""
        try:
            for block in _blocks(path):
                named.update(digest.decode() for digest in _TEXT.findall(block))
                last = block.rpartition(b"\n")[0] or last  # not a torn line
        except _DAMAGED:
            last = b""
        _leave_last_line(name, path, last)
        for one in (index_path(path), path):
            with contextlib.suppress(OSError):
                one.unlink()
    if not alone:
        return set()
    for _, path in rest:
        if not named:
            break
        with contextlib.suppress(*_DAMAGED):
            for block in _blocks(path):
                named.difference_update(digest.decode() for digest in _TEXT.findall(block))
    return named


def _leave_last_line(name: SegmentName, path: Path, last: bytes) -> None:
    """Write the last line of a segment to a file of its own: its seal, or what a later start may
    name of a chain that a killed process left."""
    raw = last.rpartition(b"\n")[2]
    with contextlib.suppress(BadLine):
        read_line(raw)
        with whole_file(path.with_name(str(name._replace(suffix=SEAL)))) as file:
            file.write(raw + b"\n")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a segment in blocks of whole lines; the last one may be torn."""
    with gzip.open(path) if path.name.endswith(CLOSED) else path.open("rb") as file:
        while block := file.read(_BLOCK) + file.readline():
            yield block
