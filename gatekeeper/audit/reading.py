"""Reads the chains of a folder, and checks that each line follows the one before.

Several chains are read as one stream, ordered by time. A file is open only while its lines are
read, and no more than one line of a chain is in memory.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from gatekeeper.audit.chain import (
    CLOSED,
    NO_DIGEST,
    OPEN,
    SEAL,
    BadLine,
    SegmentName,
    digest_of,
    is_signed,
)
from gatekeeper.audit.files import open_either
from gatekeeper.audit.lines import (
    MAX_LINE,
    AnsweredLine,
    EndLine,
    ErasedLine,
    GrantLine,
    HeldLine,
    Line,
    OverrideLine,
    RobotsLine,
    SealLine,
    StartLine,
    read_line,
)
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.signing import PublicKey
from gatekeeper.urls import Target, host_of, parse, printable

DAMAGED = (OSError, EOFError, zlib.error)
"""What a file that can't be read, or a damaged compressed one, raises."""
_MAX_WRONG = 10_000
"""Lines of a segment that are no lines of a record; with more, the rest is not read: a small
compressed file can have very many of them."""
_MAX_SHOWN = 2_000
"""Characters of a difference that are shown."""


class AuditDifference(msgspec.Struct, frozen=True):
    """One thing in a record that is not as it has to be, with its place."""

    what: str
    """chain, seal, witness, decision, pace or erasure."""
    file: str
    line: int
    """`n` of the line; 0: the file as a whole."""
    text: str

    def __str__(self) -> str:
        place = f"{self.file}: line {self.line}" if self.line else self.file
        return f"{place}: {self.what}: {printable(self.text, _MAX_SHOWN)}"


Report = Callable[[AuditDifference], None]


class ChainFiles(msgspec.Struct, eq=False):
    """The files of one chain."""

    folder: Path
    name: str
    segments: dict[int, Path]
    seals: dict[int, Path]
    """The seals that removed segments left behind."""
    copies: dict[int, Path] = msgspec.field(default_factory=dict)
    """Compressed segments of which the plain one is there as well: the process was killed before
    it had removed that."""

    @property
    def started(self) -> float:
        """Seconds since 1970 at which the chain began, by its name; 0 if the name has no time."""
        try:
            at = datetime.strptime(self.name.rpartition("-")[2], "%Y%m%dT%H%M%S%fZ")
        except ValueError:
            return 0.0
        return at.replace(tzinfo=UTC).timestamp()


class ChainEntry(NamedTuple):
    """A line with its place. Entries are ordered by time, and then by their chain."""

    wall: float
    chain: int
    """The number of its chain in the list of all."""
    line: Line | None
    """None at the end of its chain."""
    file: str


def find_chains(folders: Iterable[Path]) -> list[ChainFiles]:
    """Return the chains of the folders, by the time at which they began.

    A folder that is given twice counts once. Raises ConfigError for one that can't be read or has
    no chain, and for a chain that is in two of them.
    """
    found: list[ChainFiles] = []
    places: dict[str, Path] = {}
    for folder in {os.path.realpath(one): Path(one) for one in folders}.values():
        chains: dict[str, ChainFiles] = {}
        try:
            # A listing may miss both forms of a segment that is compressed meanwhile. The next one
            # has the new form.
            names = sorted({*os.listdir(folder), *os.listdir(folder)})
        except OSError as error:
            raise ConfigError(f"{folder}: can't be read ({error.strerror})") from error
        for name in names:  # a `.jsonl` comes before its `.jsonl.gz`
            parts = SegmentName.parse(name)
            if parts is None:
                continue
            chain = chains.setdefault(parts.chain, ChainFiles(folder, parts.chain, {}, {}))
            parts_of = chain.seals if parts.suffix == SEAL else chain.segments
            if parts.number in parts_of:
                parts_of = chain.copies
            parts_of[parts.number] = folder / name
        if not chains:
            raise ConfigError(f"{folder}: no audit record: it has no file NAME-000001{OPEN}")
        for name, chain in chains.items():
            if places.setdefault(name, folder) != folder:
                raise ConfigError(
                    f"{folder}: chain {name} is in {places[name]} as well: give each record once"
                )
            found.append(chain)
    return sorted(found, key=lambda chain: (chain.started, chain.name))


def host_asked_for(text: str) -> Target:
    """Parse a host as people write it: an IPv6 address may lack its brackets. Raises InvalidURL."""
    bare = f"[{text}]" if text.count(":") > 1 and "[" not in text else text
    return parse(f"http://{bare}/")


def host_of_line(line: Line | AnsweredLine) -> str | None:
    """Return the host that a line is about; None if it is about none, or does not say which."""
    match line:
        case RobotsLine():
            return host_of(line.origin)
        case GrantLine() | AnsweredLine():
            with suppress(InvalidURL):  # it may be a digest
                return parse(line.url).host
            if isinstance(line, GrantLine) and line.scopes:
                return line.scopes[0].scope
        case HeldLine():
            return line.scope
        case OverrideLine():
            return line.match
    return None


class RawLine(NamedTuple):
    """One line of a file."""

    octets: bytes | None
    """Without its newline; None if it is longer than MAX_LINE."""
    digest: str
    whole: bool
    """It has its newline."""


def raw_lines(path: Path) -> Generator[RawLine, None, None]:
    """Yield the lines of a segment. One that is compressed meanwhile is read from its new file.

    Raises OSError, EOFError or zlib.error.
    """
    with open_either(path) as file:
        while octets := file.readline(MAX_LINE):
            if octets.endswith(b"\n"):
                octets = octets[:-1]
                yield RawLine(octets, digest_of(octets), True)
            elif len(octets) < MAX_LINE:
                yield RawLine(octets, digest_of(octets), False)
            else:
                yield _long_line(octets, file)


def _long_line(octets: bytes, file: BinaryIO) -> RawLine:
    digest, whole = hashlib.sha256(octets), False
    while not whole and (octets := file.readline(MAX_LINE)):
        whole = octets.endswith(b"\n")
        digest.update(octets[:-1] if whole else octets)
    return RawLine(None, digest.hexdigest(), whole)


def why(error: BaseException) -> str:
    """Return what was wrong with a file, in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def add_to(spans: list[list[int]], n: int) -> None:
    """Add a number to the spans of first and last numbers that stand together."""
    if spans and spans[-1][1] == n - 1:
        spans[-1][1] = n
    else:
        spans.append([n, n])


def moment_text(at: datetime) -> str:
    """Return a time for people, in UTC to the second."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


class ChainSummary(msgspec.Struct, kw_only=True):
    """Where the protection of one chain ends."""

    folder: str
    chain: str
    lines: int = 0
    sealed: int = 0
    """`n` of the last seal that is as it has to be; 0: none."""
    sealed_at: str | None = None
    key: str | None = None
    """The key that signed that seal."""
    behind: int = 0
    """Lines behind it."""
    torn: bool = False
    """The last line was not written to its end, which ends the chain."""
    ended: bool = False
    """The process closed it."""


class ChainReader:
    """Reads one chain. What does not fit is reported, and reading goes on behind it.

    Iterate over `entries` once; the attributes are final at its end.
    """

    def __init__(
        self, number: int, files: ChainFiles, report: Report, *, keys: Sequence[PublicKey] = ()
    ) -> None:
        """`keys`: every seal has to be signed with one of them. Without any, no signature is
        checked."""
        self.number: int = number
        self.files: ChainFiles = files
        self.wanted: dict[int, str] = {}
        """Digests of lines, by `n`, that starts of other chains name."""
        self.summary: ChainSummary = ChainSummary(folder=str(files.folder), chain=files.name)
        self.placeholders: dict[str, list[list[int]]] = {}
        """First and last `n` of erased lines that stand together, by the segment."""
        self.seals: int = 0
        self.kept_seals: int = 0
        self.last: int = 0
        """`n` of the last line."""
        self.wall: float = files.started
        """Seconds since 1970 of the last line."""
        self._report = report
        self._keys = {key.keyid: key for key in keys}
        self._prev, self._jump = NO_DIGEST, False
        """What is read next need not follow: what is missing is reported already."""
        self._file = str(files.folder / files.name)

    def entries(self) -> Iterator[ChainEntry]:
        """Yield every line that can be read, and an entry without a line at the end."""
        segments, seals = self.files.segments, self.files.seals
        numbers = sorted({*segments, *seals})
        last = segments.get(numbers[-1]) if len(numbers) > 1 else None
        with suppress(FileNotFoundError):  # it is compressed meanwhile
            if last is not None and last.is_file() and not last.stat().st_size:
                numbers.pop()  # the process was killed before its first line
        expected = 1
        for number in numbers:
            self._file = str(segments.get(number) or seals[number])
            if number != expected:
                self._differ(f"segments {expected} to {number - 1} are missing, and left no seal")
                self._jump = True
            expected = number + 1
            if number in segments:
                yield from self._segment(number, is_last=number == numbers[-1])
                self._compare(number)
            else:
                self._read_kept_seal(seals[number], is_last=number == numbers[-1])
        for n in sorted(n for n in self.wanted if n > self.last):
            self._differ(f"line {n}, which a later start names, is missing: the tail is removed", n)
        self.summary.behind = self.last - self.summary.sealed
        yield ChainEntry(self.wall, self.number, None, self._file)

    def _segment(self, number: int, *, is_last: bool) -> Iterator[ChainEntry]:
        path, sealed, self._wrong = self.files.segments[number], False, 0
        first = None if self._jump else self.last + 1
        file, name = self._file, str(SegmentName(self.files.name, number))
        try:
            for octets, digest, whole in raw_lines(path):
                n = self.last + 1
                if not whole:
                    self.summary.torn = is_last
                    if not is_last:
                        self._differ("it is cut off, but not the last one of its chain", n)
                    break
                if sealed:
                    self._differ("it stands behind the seal of its segment", n)
                    sealed = False
                line = self._line(octets, digest)
                if line is None:
                    continue
                first = first or line.n
                if isinstance(line, ErasedLine):
                    add_to(self.placeholders.setdefault(name, []), line.n)
                else:
                    self.wall = line.t.timestamp()
                    if isinstance(line, SealLine):
                        sealed = True
                        self._check_seal(line, first)
                    elif isinstance(line, EndLine):
                        self.summary.ended = True
                yield ChainEntry(self.wall, self.number, line, file)
        except FileNotFoundError:  # `audit.keep` removed it since it was listed
            seal = self.files.folder / str(SegmentName(self.files.name, number, SEAL))
            self._file = str(seal)
            self._read_kept_seal(seal, is_last=is_last)
            return
        except (*DAMAGED, BadLine) as error:
            self._differ(f"can't be read further: {why(error)}", self.last + 1)
            self._jump = True
        if not sealed and (not is_last or path.name.endswith(CLOSED)):
            self._differ("it ends without a seal, but is not the segment that was written last")

    def _compare(self, number: int) -> None:
        """Check that the compressed copy of a segment says the same."""
        if (copy := self.files.copies.get(number)) is not None:
            with suppress(*DAMAGED):
                pairs = zip_longest(raw_lines(copy), raw_lines(self.files.segments[number]))
                if all(one == other for one, other in pairs):
                    return
            self._differ(f"it is not what its compressed form {copy.name} has")

    def _line(self, octets: bytes | None, digest: str) -> Line | None:
        """Read the next line, and check that it follows; None if it can't be read."""
        n, prev = self.last + 1, self._prev
        self.summary.lines += 1
        try:
            if octets is None:
                raise BadLine(f"longer than {MAX_LINE:,} octets")
            line = read_line(octets)
        except BadLine as error:
            self._differ(f"no line of a record: {printable(str(error), 200)}", n)
            self._prev, self.last, self._wrong = digest, n, self._wrong + 1
            if self._wrong > _MAX_WRONG:
                raise BadLine(f"more than {_MAX_WRONG:,} lines are no lines of a record") from None
            return None
        if not self._jump:
            if line.n != n:
                self._differ(f"line {line.n} stands here: lines were added, removed or moved", n)
            elif line.prev != prev:
                self._differ(f"it does not follow line {n - 1}: one of the two was changed", n)
        self._come_to(line, digest)
        return line

    def _come_to(self, line: Line, digest: str) -> None:
        """Note the line that the next one has to follow."""
        digest = line.digest if isinstance(line, ErasedLine) else digest
        if self.wanted.pop(line.n, digest) != digest:
            self._differ("it is not the line that a later start names", line.n)
        self._jump, self._prev, self.last = False, digest, line.n

    # --- seals ------------------------------------------------------------------------------

    def _read_kept_seal(self, path: Path, *, is_last: bool) -> None:
        """Read the last line of a segment that was removed."""
        try:
            octets, digest, _ = next(raw_lines(path), RawLine(b"", "", False))
            line = read_line(octets or b"")
        except (*DAMAGED, BadLine) as error:
            self._differ(f"can't be read: {printable(why(error), 200)}", what="seal")
            self._jump = True
            return
        self.kept_seals += 1
        if not isinstance(line, ErasedLine):
            self.wall = line.t.timestamp()
        if isinstance(line, SealLine):
            if not self._jump and line.first != self.last + 1:
                self._differ(f"its segment began at {line.first}, not {self.last + 1}", line.n)
            self._check_seal(line, line.first)
        elif not is_last:  # a segment that a killed process left has no seal
            self._differ("it is no seal, but not of the last segment", line.n, "seal")
        self._come_to(line, digest)
        self.wanted = {n: wanted for n, wanted in self.wanted.items() if n > line.n}

    def _check_seal(self, line: SealLine, first: int) -> None:
        self.seals += 1
        wrong = ""
        if line.first != first or line.lines != line.n - 1:
            wrong = f"it counts lines {line.first} to {line.lines}, not {first} to {line.n - 1}"
        elif self._keys:
            key = self._keys.get(line.key or "")
            if line.signature is None:
                wrong = "it is not signed"
            elif key is None:
                wrong = f"it is signed by another key: {printable(str(line.key), 60)}"
            elif not is_signed(key, self.files.name, line.n, line.prev, line.signature):
                wrong = "its signature does not hold"
        if wrong:
            self._differ(wrong, line.n, "seal")
        else:
            summary = self.summary
            summary.sealed, summary.sealed_at, summary.key = line.n, moment_text(line.t), line.key

    def _differ(self, text: str, n: int = 0, what: str = "chain") -> None:
        self._report(AuditDifference(what, self._file, n, text))


def read_chains(
    folders: Iterable[Path], report: Report, *, keys: Sequence[PublicKey] = ()
) -> list[ChainReader]:
    """Return a reader for each chain of the folders, by the time at which they began.

    Each knows which of its lines the starts of others name. Raises ConfigError.
    """
    readers = [
        ChainReader(number, files, report, keys=keys)
        for number, files in enumerate(find_chains(folders))
    ]
    by_name = {(one.files.folder, one.files.name): one for one in readers}
    for reader in readers:
        start = _start_of(reader.files)
        for named in () if start is None else start.chains:
            parts = SegmentName.parse(named.segment)
            other = parts and by_name.get((reader.files.folder, parts.chain))
            if other is reader:
                continue
            if other is None:
                text = "is missing"
            elif other.wanted.setdefault(named.n, named.digest) != named.digest:
                text = "ends otherwise by the start of another chain"
            else:
                continue
            name = printable(named.segment, 120)
            text = f"{name}, which its start names up to line {named.n}, {text}"
            report(AuditDifference("chain", str(reader.files.segments[1]), 1, text))
    return readers


def _start_of(files: ChainFiles) -> StartLine | None:
    """Return the first line of a chain if it is a start; None if it was removed, or is damaged."""
    if 1 not in files.segments:
        return None
    with suppress(*DAMAGED, BadLine), closing(raw_lines(files.segments[1])) as lines:
        first = next(lines, None)
        line = read_line(first.octets or b"") if first is not None and first.whole else None
        return line if isinstance(line, StartLine) else None
    return None


def merged(readers: Iterable[ChainReader]) -> Iterator[ChainEntry]:
    """Yield the entries of all chains, ordered by time.

    A chain is opened when the others have come to the time at which it began, so that few are open
    at the same time.
    """
    return (entry for entry in heapq.merge(*map(_opened_late, readers)) if entry.file)


def _opened_late(reader: ChainReader) -> Iterator[ChainEntry]:
    yield ChainEntry(reader.files.started, reader.number, None, "")  # no file is open yet
    yield from reader.entries()
