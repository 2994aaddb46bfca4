"""Writes the lines of one chain, segment by segment.

A line is *written* when the system has it (write(2), not fsync), so that kill -9 loses none. What
must be written first, such as a grant, is written together with all lines that wait, by one call;
other lines wait until the end of the loop's iteration. Numbers and digests are given to lines when
they are written: what could not be written leaves no gap in the chain.

If writing fails, the file is cut to its last whole line, and the lines that wait are tried again
with growing pauses. Lines of which there may be any number are only counted meanwhile, and an
`omitted` line says how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gatekeeper.audit.chain import (
    CLOSED,
    NO_DIGEST,
    OPEN,
    SEAL,
    VERSION,
    BadLine,
    SegmentName,
    chain_name,
    encode,
    seal_fields,
    time_text,
)
from gatekeeper.audit.files import (
    LOCKS,
    close_file,
    compress,
    lock_file,
    make_folder,
    open_segment,
    remove_unfinished,
)
from gatekeeper.audit.index import DecisionIndex
from gatekeeper.audit.lines import WRITTEN, SealLine, digest_after, read_line
from gatekeeper.audit.reading import DAMAGED, find_chains
from gatekeeper.clock import Clock, OwnedTasks, SingleTimer
from gatekeeper.config import AuditConfig
from gatekeeper.errors import StorageError
from gatekeeper.signing import SigningKey

_DAY: Final = 86_400.0
"""Seconds after which a segment is closed."""
_MAX_WAITING: Final = 1_000
"""Lines that wait for the end of the iteration; further ones are written at once."""
MAX_KEPT: Final = 10_000
"""Lines that wait while nothing can be written; further ones are counted."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds between two attempts to write."""
_CLOSING: Final = 600.0
"""Seconds that closing waits for the compression of the last segments."""
_LOOK: Final = 1.0
"""Seconds after which the writer looks again whether its open segment was removed."""
_TAIL: Final = 1 << 20
"""Octets at the end of a segment in which its last line is searched."""
_MAX_NAMED: Final = 1_000
"""Unsealed chains that a start names: the latest ones."""
_DECIDED: Final = frozenset({"grant", "refused", "decision"})
"""Kinds that name a decision."""
_OPTIONAL: Final = frozenset({"refused", "decision"})
"""Kinds that are counted instead of kept while nothing can be written."""

_log = logging.getLogger(__name__)
_open_writers: weakref.WeakSet[ChainWriter] = weakref.WeakSet()


def _leave_chains_to_parent() -> None:
    """Let a forked child, whose loop does not run, write nothing to the chains of its parent."""
    for writer in list(_open_writers):
        writer.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_chains_to_parent)


class ChainWriter:
    """One chain in a folder. Open it in the loop that uses it, and close it.

    `start` returns the fields of the chain's first line.
    """

    def __init__(
        self,
        config: AuditConfig,
        clock: Clock,
        start: Callable[[ChainWriter], dict[str, Any]],
        *,
        key: SigningKey | None = None,
        closed: Callable[[], Awaitable[object]],
    ) -> None:
        """`key` signs the seals. `closed` is called after a segment was compressed."""
        self._folder = Path(config.folder or ".")
        self._config = config
        self._clock = clock
        self._start = start
        self._key = key
        self._on_closed = closed
        self.host: str = socket.gethostname()
        self.name: str = ""
        """The name of the chain: HOST-PID-START."""
        self.place: tuple[str, int] = "", 0
        """The chain and the number of the latest line that is no seal."""
        self.sealed: tuple[str, int] | None = None
        """When the chain was last sealed, and the number of that line."""
        self.salt: str = secrets.token_hex(16)
        """The salt of the digests of URLs."""
        self.failing: str | None = None
        """Why nothing can be written at the moment."""
        self.named: list[dict[str, Any]] = []
        """The last whole line of each unsealed chain in the folder, for `start`."""
        self._waiting: list[Any] = []
        """Lines of `WRITTEN`, whose places in the chain are not known yet."""
        self._armed = False
        self._omitted, self._omitted_since, self._why = 0, 0.0, ""
        self._retry = SingleTimer(clock, self._try_again)
        self._pause = _FIRST_PAUSE
        self._tasks = OwnedTasks()
        self._compressing: set[int] = set()
        """Descriptors of closed segments, which hold their locks."""
        self._closed = True
        self._forget_file()

    def _forget_file(self) -> None:
        self._fd, self._size, self._torn = -1, 0, False
        self.number: int = 0
        """The number of the open segment."""
        self.lines: int = 0
        """The number of lines of the chain."""
        self._prev, self._first = NO_DIGEST, 1
        self._ends = self._rotate_at = self._look_at = 0.0
        self.index: DecisionIndex = DecisionIndex()
        """Of the open segment."""

    # --- life ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin the chain. Raises StorageError if the folder can't be used; on a full disk the
        chain begins later."""
        self._loop = asyncio.get_running_loop()
        self._closed = False
        try:
            self.named = await asyncio.to_thread(self._prepare)
            self._begin()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise StorageError(
                    f"audit.folder: {self._folder}: can't be used ({error.strerror}); give a "
                    "folder that this user may write to"
                ) from error
            self.fail(error)
        _open_writers.add(self)

    def _prepare(self) -> list[dict[str, Any]]:
        make_folder(self._folder)
        remove_unfinished(self._folder.glob(".*"))
        return list(unsealed(self._folder))

    def _begin(self) -> bool:
        """Create the first segment of a new chain, and write its `start` and what waits; see
        `_write`. Raises OSError."""
        wall = self._clock.wall()
        while True:
            self.name = chain_name(self.host, os.getpid(), wall)
            try:
                self._use(self._create(1), 1)
                break
            except FileExistsError:  # another gate of this process, at the same moment
                wall += 1e-6
        self._waiting.insert(0, self.line("start", **self._start(self)))
        return self._write()

    async def close(self, reason: str) -> None:
        """Write what waits, the end and the last seal; compress the last segment."""
        _open_writers.discard(self)
        self._closed = True
        self._count_omitted()
        self._waiting.append(self.line("end", reason=reason))
        path = self._seal("end") if self._fd >= 0 and self._write(rotate=False) else None
        self._retry.cancel()
        if path is not None:
            self._compress(path)
        else:
            _log.error("the audit record %s has no end: %s", self.name, self.failing)
            if self._fd >= 0:
                close_file(self._fd)
        self._forget_file()
        await self._tasks.finish(self._clock, _CLOSING)

    def leave_to_parent(self) -> None:
        """Write nothing in a forked child: the parent's chain goes on in the parent."""
        for fd in (*self._compressing, self._fd):
            if fd >= 0:
                close_file(fd)
        self._closed = True
        self._compressing.clear()
        self._forget_file()
        self._waiting.clear()

    # --- lines --------------------------------------------------------------------------

    def line(self, kind: str, **fields: Any) -> Any:
        """Return a line of this moment."""
        clock = self._clock
        t = time_text(clock.wall())
        return WRITTEN[kind](VERSION, 0, "", t, clock.monotonic(), kind, **fields)

    def note(self, kind: str, **fields: Any) -> bool:
        """Write a line of this moment by the end of the loop's iteration; see `add`."""
        return self.add(self.line(kind, **fields))

    def add(self, line: Any) -> bool:
        """Write a line by the end of the loop's iteration. Return False if it is left out."""
        waiting = self._waiting
        if self._closed:
            return False
        if self.failing is not None and (line.kind in _OPTIONAL or len(waiting) >= MAX_KEPT):
            self.omit(self.failing)
            return False
        waiting.append(line)
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._end_of_iteration)
        elif len(waiting) >= _MAX_WAITING and self.failing is None:
            self._write()
        return True

    def add_now(self, line: Any) -> bool:
        """Write a line, and those that wait before it. Return False if that failed: then the line
        is forgotten."""
        if self._closed or self.failing is not None:
            return False
        self._waiting.append(line)
        if self._write():
            return True
        self._waiting.pop()
        return False

    def flush(self) -> bool:
        """Write the lines that wait. Return False if that failed, or must wait."""
        return self.failing is None and (not self._waiting or self._write())

    def omit(self, why: str, count: int = 1) -> None:
        """Count lines that are left out."""
        if self._omitted and why != self._why:
            self._count_omitted()
        if not self._omitted:
            self._omitted_since, self._why = self._clock.wall(), why
        self._omitted += count

    def _count_omitted(self) -> None:
        """Add the line that says how many lines were left out."""
        count, self._omitted = self._omitted, 0
        last = self._waiting[-1] if self._waiting and self.failing is not None else None
        if count and last is not None and last.kind == "omitted":
            last.count += count  # so that what waits is bounded
        elif count:
            since = time_text(self._omitted_since)
            self._waiting.append(self.line("omitted", count=count, since=since, why=self._why))

    def settle_rate(self) -> None:
        """Say how many lines were left out, as the second in which they were is over."""
        if self.failing is None:
            self._count_omitted()

    def _end_of_iteration(self) -> None:
        self._armed = False
        self.flush()

    # --- writing ------------------------------------------------------------------------

    def _write(self, *, rotate: bool = True) -> bool:
        """Write every line that waits. Return False if that failed."""
        n, prev, size, index, lines = self.lines, self._prev, self._size, self.index, []
        now = 0.0
        try:
            if self._fd < 0:
                return self._begin()  # which writes all that waits
            if self._torn:
                os.ftruncate(self._fd, self._size)
                self._torn = False
            for line in self._waiting:
                n += 1
                line.n, line.prev, now = n, prev, line.m
                raw = encode(line)
                prev = sha256(raw).hexdigest()  # `digest_of`, without a call
                lines.append(raw)
                if line.kind in _DECIDED and line.decision is not None:
                    index.add(line.decision, size)
                size += len(raw) + 1
            if rotate and now >= self._look_at:
                self._look_for_file(now)
            lines.append(b"")
            if os.write(self._fd, b"\n".join(lines)) != size - self._size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._cut()
            self.fail(error)
            return False
        self.lines, self._prev, self._size = n, prev, size
        self._waiting.clear()
        if rotate:
            self.place = self.name, n
            if size >= self._config.rotate or now >= self._ends:
                self._rotate()
        return True

    def _cut(self) -> None:
        """Cut the file to its last whole line, now or before the next attempt."""
        self.index.cut(self._size)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._torn = True

    def _look_for_file(self, now: float) -> None:
        """Raise OSError if the open segment was removed. The next attempt begins another chain,
        whose start names the last line of this one, which is lost."""
        self._look_at = now + _LOOK
        if not os.fstat(self._fd).st_nlink:
            segment = str(SegmentName(self.name, self.number))
            self.named.append({"segment": segment, "n": self.lines, "digest": self._prev})
            close_file(self._fd)
            self._forget_file()
            raise FileNotFoundError(errno.ENOENT, "its open segment was removed")

    def fail(self, error: OSError) -> None:
        """Note that the chain, or something beside it that lines name, can't be written."""
        why = f"the audit record in {self._folder} can't be written: {error.strerror or error}"
        if self.failing is None:
            _log.error("%s", why)
            self._pause = _FIRST_PAUSE
        self.failing = why
        if self._closed:
            return
        self._retry.set(self._clock.monotonic() + self._pause)
        self._pause = min(2.0 * self._pause, _LONGEST_PAUSE)

    def _try_again(self) -> None:
        self._count_omitted()
        if self._write():
            self.failing = None
            _log.warning("the audit record in %s can be written again", self._folder)

    # --- segments -----------------------------------------------------------------------

    def _create(self, number: int) -> int:
        """Create the file of a segment, and return its descriptor. Raises OSError."""
        path = self._folder / str(SegmentName(self.name, number))
        for suffix in (CLOSED, SEAL):  # of a chain that began at the same time, by a clock set back
            if path.with_name(str(SegmentName(self.name, number, suffix))).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
        fd = os.open(path, flags, 0o600)
        lock_file(fd)
        return fd

    def _use(self, fd: int, number: int) -> None:
        self._fd, self.number, self._size = fd, number, 0
        self.index = DecisionIndex()
        self._first = self.lines + 1
        self._ends = self._clock.monotonic() + _DAY

    def _rotate(self) -> None:
        """Seal the segment and begin the next one. If that fails, the segment grows."""
        now = self._clock.monotonic()
        if now < self._rotate_at:
            return
        self._rotate_at = now + _LONGEST_PAUSE
        try:
            fd = self._create(self.number + 1)
        except OSError as error:
            _log.warning("the audit record in %s gets no next segment: %s", self._folder, error)
            return
        path = self._seal("age" if now >= self._ends else "size")
        if path is None:
            close_file(fd)
            with contextlib.suppress(OSError):
                (self._folder / str(SegmentName(self.name, self.number + 1))).unlink()
            return
        self._compress(path)
        self._use(fd, self.number + 1)
        self._rotate_at = 0.0

    def _seal(self, reason: str) -> Path | None:
        """Write a seal. Return the path of the segment, or None if that failed."""
        place = self.name, self.lines + 1, self._prev, self._first
        line = self.line("seal", **seal_fields(self._key, *place, reason))
        self._waiting.append(line)
        if not self._write(rotate=False):
            self._waiting.pop()
            return None
        self.sealed = line.t, line.n
        return self._folder / str(SegmentName(self.name, self.number))

    def _compress(self, path: Path) -> None:
        """Compress the open segment, which has its seal."""
        if LOCKS:
            self._compressing.add(self._fd)
        else:
            close_file(self._fd)
        self._tasks.start(self._compressed(path, self._fd, self.index, self._clock.wall()))

    async def _compressed(self, path: Path, *rest: Any) -> None:
        try:
            await asyncio.to_thread(self._compress_now, path, *rest)
        except OSError as error:  # it stays as it is: as good, but larger
            _log.warning("%s can't be compressed: %s", path, error)
        await self._on_closed()

    def _compress_now(self, path: Path, fd: int, index: DecisionIndex, wall: float) -> None:
        try:
            compress(path, wall, index.save)
        finally:
            if LOCKS:
                self._compressing.discard(fd)
                close_file(fd)


def unsealed(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the last whole line of each chain in the folder that has no last seal, by reading the
    ends of files alone. Damaged ends are left out. Raises OSError."""
    if not any(map(SegmentName.parse, os.listdir(folder))):
        return
    chains = [one for one in find_chains([folder]) if one.segments]
    open_ones = [one for one in chains if one.segments[max(one.segments)].name.endswith(OPEN)]
    for files in open_ones[-_MAX_NAMED:]:
        for number in sorted(files.segments, reverse=True)[:2]:  # the last may have no line yet
            with contextlib.suppress(BadLine, *DAMAGED):
                raw = _last_line(path := files.segments[number])
                line = read_line(raw)
                if not (isinstance(line, SealLine) and line.reason == "end"):
                    yield {"segment": path.name, "n": line.n, "digest": digest_after(raw, line)}
                break


def _last_line(path: Path) -> bytes:
    """Return the last whole line of a segment, without its newline. Raises OSError, EOFError or
    zlib.error, and BadLine if there is none near the end."""
    with open_segment(path) as file:
        if path.name.endswith(CLOSED):  # seldom: it has a seal, and its next segment no line
            end = b"".join(deque(file, 1))
        else:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            end = file.read()
    whole, newline, _torn = end.rpartition(b"\n")
    if not newline:
        raise BadLine(f"{path}: no whole line")
    return whole.rpartition(b"\n")[2]
