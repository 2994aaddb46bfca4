"""Removes old segments of a folder, leaves their last lines, and finds texts to remove with them.

It works on all chains of the folder, since most writers have ended by the time. A segment that a
running process writes is locked, and stays. For a thread: files are read in blocks.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gatekeeper.audit.chain import OPEN, SEAL, BadLine, SegmentName
from gatekeeper.audit.files import is_written, open_either, stored_texts, texts_named, whole_file
from gatekeeper.audit.index import index_path
from gatekeeper.audit.lines import read_line

_BLOCK: Final = 1 << 20
_DAMAGED: Final = (gzip.BadGzipFile, EOFError, zlib.error)

_log = logging.getLogger(__name__)


def remove_old(folder: Path, before: float, own: str) -> set[str]:
    """Remove the segments that were closed before a wall time, in seconds since 1970. Raises
    OSError.

    Return the digests of the texts that no segment names any more: these can be removed, if nothing
    that is not written yet names them. None are returned if no segment was removed, while another
    process writes a chain here, which may name any, or if a segment can't be read; `own` is the
    name of the caller's chain.
    """
    unnamed = stored_texts(folder)  # before the segments: those that come meanwhile are not in it
    old: list[tuple[SegmentName, Path]] = []
    rest: list[Path] = []
    chains, alone = {own}, True
    for entry in os.scandir(folder):
        name = SegmentName.parse(entry.name)
        if name is None:
            continue
        chains.add(name.chain)
        if name.suffix == SEAL or not entry.is_file():
            continue
        path = folder / entry.name
        running = name.suffix == OPEN and (name.chain == own or is_written(path))
        alone = alone and (not running or name.chain == own)
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if running or entry.stat().st_mtime >= before:
                rest.append(path)
            else:
                old.append((name, path))
    for name, path in sorted(old):
        try:
            _remove(name, path)
        except OSError as error:
            _log.warning("%s can't be removed: %s", path, error)
            alone = False  # it may name any text
    if not old or not alone:
        return set()
    for path in rest:
        try:
            for block in _blocks(path):
                unnamed -= texts_named(block)
        except (OSError, *_DAMAGED):
            return set()
    found = map(SegmentName.parse, os.listdir(folder))
    others = any(name.chain not in chains for name in found if name is not None)
    return set() if others else unnamed  # one that began meanwhile may name any


def _remove(name: SegmentName, path: Path) -> None:
    """Remove a segment, and write its last line to a file of its own: its seal, or what a later
    start may name of a chain that a killed process left. Raises OSError, if it can't be read or the
    line can't be written: it stays then."""
    last = b""
    try:
        for block in _blocks(path):
            last = block.rpartition(b"\n")[0].rpartition(b"\n")[2] or last  # not a torn line
    except FileNotFoundError:
        return  # another process removed it
    except _DAMAGED:
        last = b""
    with contextlib.suppress(BadLine):
        read_line(last)
        with whole_file(path.with_name(str(name._replace(suffix=SEAL)))) as file:
            file.write(last + b"\n")
    for one in (index_path(path), path):
        one.unlink(missing_ok=True)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a segment in blocks of whole lines; the last one may be torn."""
    with open_either(path) as file:
        while block := file.read(_BLOCK) + file.readline():
            yield block
