"""Finds a decision in a segment without reading it all.

The writer keeps an index of the open segment in memory, and puts that of a closed one beside it, as
`CHAIN-000001.ids`. An index is no part of the record, but a hint: the line itself is read where the
index says, and a segment without an index is read as a whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from gatekeeper.audit.chain import CLOSED, OPEN, SEAL, BadLine, SegmentName
from gatekeeper.audit.files import is_written, open_segment, whole_file
from gatekeeper.audit.lines import MAX_LINE, read_line
from gatekeeper.gate.parts import FoundLine

MAX_IDS: Final = 1_000_000
"""Entries of an index, of 12 octets each. A segment with more lines about decisions has none."""
_MAX_MEMBER: Final = 1_048_576
"""Octets of a member of a compressed segment that are read."""
_MAX_PLACES: Final = 100
"""Places of one key that are read. If an index has more, the segment is read as a whole."""


class DecisionIndex:
    """Of each line about a decision in one segment: the place at which to read.

    Threads may search it while lines are added and cut: no key is without its place.
    """

    def __init__(self) -> None:
        self.keys: array[int] = array("I")
        """The CRC-32 of the id of each decision."""
        self.places: array[int] = array("Q")
        """Octets from the begin of the file to the line, or to the member of a compressed file."""

    def add(self, decision: str, place: int) -> None:
        """Add the next line of the segment."""
        if len(self.keys) <= MAX_IDS:
            self.places.append(place)
            self.keys.append(zlib.crc32(decision.encode()))

    def cut(self, size: int) -> None:
        """Remove the lines behind so many octets: they could not be written."""
        count = bisect_left(self.places, size)
        del self.keys[count:], self.places[count:]

    @property
    def complete(self) -> bool:
        """Whether it has all lines of its segment."""
        return len(self.keys) <= MAX_IDS

    def find(self, decision: str) -> Iterator[int]:
        """Yield the places at which the line may be."""
        octets, size = self.keys.tobytes(), self.keys.itemsize
        wanted, at = array("I", [zlib.crc32(decision.encode())]).tobytes(), -1
        while (at := octets.find(wanted, at + 1)) >= 0:
            if at % size == 0:  # not between two keys
                yield from self.places[at // size : at // size + 1]  # none, if it was cut since

    def save(self, segment: Path, members: Iterable[tuple[int, int]]) -> None:
        """Put the index of a compressed segment beside it. Raises OSError.

        `members`: the place of each, and the octets of the plain segment up to its end.
        """
        places = array("Q")
        for place, end in members:
            places.extend(array("Q", [place]) * (bisect_left(self.places, end) - len(places)))
        if self.complete:
            with whole_file(index_path(segment)) as file:
                file.write(self.keys.tobytes() + places.tobytes())


def index_path(segment: Path) -> Path:
    """Return the path of the index of a closed segment."""
    return segment.with_name(segment.name.partition(OPEN)[0] + ".ids")


def _load(segment: Path) -> DecisionIndex | None:
    """Return the index of a closed segment; None if there is none, or only a part of it."""
    found = DecisionIndex()
    size = found.keys.itemsize + found.places.itemsize
    try:
        with open_segment(index_path(segment)) as file:
            octets = file.read(MAX_IDS * size + 1)
    except OSError:
        return None
    count, rest = divmod(len(octets), size)
    if rest or not 0 < count <= MAX_IDS:
        return None
    split = count * found.keys.itemsize
    found.keys.frombytes(octets[:split])
    found.places.frombytes(octets[split:])
    return found


def find_decision(
    folder: Path, name: SegmentName, index: DecisionIndex, decision: str
) -> FoundLine | None:
    """Find a line about a decision in the open segment of a chain, by its index, and in the last
    closed one: of that chain, or if it has none yet, of the others. For a thread. Raises OSError.
    """
    found = _find(folder, name, index, decision)
    if found is None:
        closed = name._replace(number=name.number - 1)
        last = closed if closed.number > 0 else _last_of_others(folder, name.chain)
        found = None if last is None else _find(folder, last, None, decision)
    return found


def _last_of_others(folder: Path, chain: str) -> SegmentName | None:
    """Return the segment of another chain that was written to last and is written no more."""
    found: list[tuple[float, SegmentName]] = []
    for entry in os.scandir(folder):
        name = SegmentName.parse(entry.name)
        if name is not None and name.suffix != SEAL and name.chain != chain:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime, name))
    for _, one in sorted(found, reverse=True):
        if one.suffix != OPEN or not is_written(folder / str(one)):
            return one
    return None


def _find(
    folder: Path, name: SegmentName, index: DecisionIndex | None, decision: str
) -> FoundLine | None:
    wanted = f'"decision":"{decision}"'.encode()
    for suffix in (OPEN, CLOSED):
        path = folder / str(name._replace(suffix=suffix))
        known = index if suffix == OPEN else _load(path)
        with contextlib.suppress(FileNotFoundError, EOFError, zlib.error):
            for raw in _lines(path, known, decision):
                if wanted in raw and raw.endswith(b"\n"):
                    with contextlib.suppress(BadLine):
                        read_line(raw)
                        line = msgspec.json.decode(raw)
                        if line.get("decision") == decision:
                            return FoundLine(name.chain, path.name, line)
    return None


def _lines(path: Path, index: DecisionIndex | None, decision: str) -> Iterator[bytes]:
    """Yield the lines among which a decision is: by the index, or else all. Long ones are cut."""
    places: set[int] | None = None
    if index is not None and index.complete:
        places = {*itertools.islice(index.find(decision), _MAX_PLACES + 1)}
    if places is None or len(places) > _MAX_PLACES:
        with open_segment(path) as lines:
            yield from iter(lambda: lines.readline(MAX_LINE), b"")
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for place in sorted(place for place in places if place < size):
            file.seek(place)
            if path.name.endswith(OPEN):
                yield file.readline(MAX_LINE)
            else:
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
                octets = decoder.decompress(file.read(_MAX_MEMBER), _MAX_MEMBER)
                yield from octets.splitlines(keepends=True)
