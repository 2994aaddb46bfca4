"""The manifest: one JSON line for every URL that is done with, and the memory of a crawl.

A line is written once what it speaks of is on disk, in one call: whatever stops the
process, the file ends in whole lines and at most one torn one, which the next run cuts off.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from gatekeeper.decision import Decision, Reason
from gatekeeper.errors import StorageError

# --- the folder ------------------------------------------------------------------------------

NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
"""For os.open: fail at a symbolic link. 0 where the system has no such thing (Windows)."""
_DIRECTORY: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_FROM_ABOVE: Final = {os.open, os.rename, os.unlink} <= os.supports_dir_fd
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0)
_T = TypeVar("_T")
_At = tuple[str, int | None]


class Folder:
    """A directory, and the files in the directories that it holds.

    Each method raises StorageError that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, directory: str, name: str) -> IO[bytes]:
        """A new, empty file, whatever had its name before; the directory is made as needed."""
        return self._do(lambda one: os.fdopen(_created(one, name), "w+b"), directory)

    def store(self, data: bytes, place: tuple[str, str], to: tuple[str, str]) -> None:
        """A new file with that content: whole in the one place (its directory, its name) before
        it is moved to the other."""

        def write(one: _At, other: _At) -> None:
            descriptor = _created(one, place[1])
            try:
                _write(descriptor, data)
            except BaseException:
                os.unlink(one[0] + place[1], dir_fd=one[1])
                raise
            finally:
                os.close(descriptor)
            _replace(one, place[1], other, to[1])

        self._do(write, place[0], to[0])

    def move(self, place: tuple[str, str], to: tuple[str, str]) -> None:
        """Move a file (its directory, its name), over another one or a link of that name."""
        self._do(lambda one, other: _replace(one, place[1], other, to[1]), place[0], to[0])

    def remove(self, directory: str, name: str) -> None:
        """Remove a file; one that is not there is no error."""

        def unlink(one: _At) -> None:
            with suppress(FileNotFoundError):
                os.unlink(one[0] + name, dir_fd=one[1])

        self._do(unlink, directory)

    def _do(self, action: Callable[..., _T], *directories: str) -> _T:
        """Call it with where each directory is, made as needed."""
        opened: list[int] = []
        try:
            return action(*[self._at(directory, opened) for directory in directories])
        except OSError as error:
            for directory in directories:
                if (path := self.path / directory).is_symlink():
                    raise _link(path) from error
            raise StorageError(f"{self.path / directories[-1]}: {error.strerror}") from error
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _at(self, directory: str, opened: list[int]) -> _At:
        """What a name in the directory begins with, and the descriptor that it starts from."""
        path = f"{self.path}{os.sep}{directory}"
        if not _FROM_ABOVE:
            Path(path).mkdir(exist_ok=True)
            if Path(path).is_symlink():
                raise _link(Path(path))
            return f"{path}{os.sep}", None
        try:
            found = os.open(path, _DIRECTORY | NO_LINK)
        except FileNotFoundError:
            os.mkdir(path)
            found = os.open(path, _DIRECTORY | NO_LINK)
        opened.append(found)
        return "", found


def _created(at: _At, name: str) -> int:
    try:
        return os.open(at[0] + name, _NEW, 0o644, dir_fd=at[1])
    except FileExistsError:
        os.unlink(at[0] + name, dir_fd=at[1])
        return os.open(at[0] + name, _NEW, 0o644, dir_fd=at[1])


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it: in one call, as a rule."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def _replace(one: _At, name: str, other: _At, to: str) -> None:
    os.replace(one[0] + name, other[0] + to, src_dir_fd=one[1], dst_dir_fd=other[1])


def refuse_links(folder: Path, *names: str) -> None:
    """Raise StorageError for a symbolic link in the folder whose name begins so."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(names) and entry.is_symlink():
                raise _link(folder / entry.name)


def _link(path: Path) -> StorageError:
    return StorageError(
        f"{path}: is a symbolic link, and none is followed in a crawl's output; take it away"
    )


# --- the manifest ----------------------------------------------------------------------------


class Result(StrEnum):
    """What came of a URL."""

    FETCHED = "fetched"
    """An answer came, whatever its status, and its body is stored."""
    DENIED = "denied"
    """It may not be fetched; the decision says by which line. Final, unless the guard or an
    override of the operator's refused it: those are asked about again by every run."""
    FAILED = "failed"
    """No answer, one that could not be read, or nothing but requests to wait; tried again by
    the next run. Or no URL at all: that will not change, and is said once."""


class WarcPlace(msgspec.Struct, frozen=True):
    """Where a page stands in a WARC file, in bytes."""

    file: str
    """Relative to the manifest."""
    offset: int
    end: int


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the manifest. Durations are seconds, sizes bytes, times UTC."""

    url: str
    """The URL that was given, in its normal form."""
    outcome: Result
    at: datetime
    """When its last request was sent, or when it was decided that none would be."""
    status: int | None = None
    final_url: str | None = None
    """Where redirects led; None if there were none."""
    redirects: tuple[tuple[int, str], ...] = ()
    """Each hop's status, and where it led."""
    decision: Decision | None = None
    """The answer for the last hop."""
    tries: int = 1
    """Requests for the last hop; 0: what was given is no URL that could be asked for."""
    elapsed: float | None = None
    """From sending the last request to the head of its response."""
    took: float | None = None
    """From sending the last request to the end of the body."""
    size: int | None = None
    """Bytes of the body. None of a fetched URL: redirected to a page that another entry has."""
    sha256: str | None = None
    """Of the body as stored."""
    truncated: bool = False
    """The body was longer than --max-body; the rest was not read."""
    content_type: str | None = None
    content_encoding: str | None = None
    """Set where the body is stored as it was sent, and was encoded."""
    file: str | None = None
    """The body, relative to the manifest."""
    warc: WarcPlace | None = None
    signals: dict[str, Any] | None = None
    """What the response's headers say about the use of it."""
    error: str | None = None
    where: str | None = None
    """Of a text that is no URL: the file and the line it was read from, "urls.txt:6"."""

    @property
    def refused(self) -> bool:
        """Whether it is settled that this will not be fetched: its site's word, or no URL at all.

        What this machine's own configuration refused is not: the next run may have another one.
        """
        if not self.tries:
            return True
        reason = self.decision.reason if self.decision is not None else None
        return self.outcome is Result.DENIED and reason not in _OUR_OWN


_OUR_OWN = frozenset({Reason.BLOCKED, Reason.OPERATOR})
"""Refusals by the guard and by the operator's overrides: asking again costs no request."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class Manifest:
    """The lines written so far, as far as a later run needs to know them.

    `archive` is the WARC file of this run, as a WarcPlace names it; "" if it is a new one.
    `retry_denied`: what an earlier run was denied is not done with.
    Memory: 16 bytes and a set's slot for every URL that is done. Open it with `with`, and
    under a lock.
    """

    def __init__(
        self, path: Path, *, archive: str | None = None, retry_denied: bool = False
    ) -> None:
        self.path = path
        self._retry_denied = retry_denied
        self.unreadable: int = 0
        """Lines in the middle that are no entries; they are left alone."""
        self.warc_places: dict[str, WarcPlace] = {}
        """The last page in each WARC file."""
        self._archive = archive
        self._fetched: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._elsewhere: set[bytes] = set()
        self._file: int | None = None

    def __enter__(self) -> Manifest:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Appended to by this process alone, so that what is read is all there is.
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK, 0o644)
        for line in self._whole_lines(self._file):
            try:
                self._learn(_decode(line))
            except msgspec.MsgspecError:
                self.unreadable += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def done(self, url: str) -> bool:
        """Whether that URL was refused, or fetched, be it as a hop of a redirect; or is none."""
        key = digest(url)
        return key in self._fetched or key in self._refused

    def fetched(self, url: str) -> bool:
        """Whether its page is had."""
        return digest(url) in self._fetched

    def unarchived(self, url: str) -> bool:
        """Whether its page was fetched by a run that did not put it into this run's WARC."""
        return digest(url) in self._elsewhere

    def write(self, entry: Entry) -> bytes:
        """Append a line, whole; the line."""
        if self._file is None:
            raise ValueError("the manifest is not open")
        line = _encode(entry) + b"\n"
        _write(self._file, line)
        self._learn(entry)
        return line

    def _learn(self, entry: Entry) -> None:
        if entry.warc is not None:
            self.warc_places[entry.warc.file] = entry.warc
        # Of several lines about one URL the last one stands.
        again, own = self._retry_denied and entry.tries > 0, digest(entry.url)
        if entry.refused and not again:
            self._refused.add(own)
        elif self._refused:
            self._refused.discard(own)
        if entry.outcome is Result.FETCHED:
            self._fetched.add(own)
            if entry.size is None:
                return
            # Only who has the page may vouch for where it was found.
            hops = [digest(hop) for _, hop in entry.redirects]
            self._fetched.update(hops)
            if self._archive is not None and (
                entry.warc is None or entry.warc.file != self._archive
            ):
                self._elsewhere.update((own, *hops))

    def _whole_lines(self, descriptor: int) -> Iterator[bytes]:
        """Every line that has its end; what follows the last one is cut off the file."""
        end = 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    end += len(line)
                    yield line
        os.ftruncate(descriptor, end)


@lru_cache(maxsize=4096)
def digest(url: str) -> bytes:
    """What stands for a URL in memory: 16 bytes, however long it is."""
    return hashlib.blake2b(url.encode(), digest_size=16).digest()


# --- redirects -------------------------------------------------------------------------------


class Trails:
    """The URLs of one run, each part of one way: of a given URL over its redirects to its end.

    `longest` bounds the ways that wait for one another in a row. Memory: a dictionary's slot
    and 16 bytes for every URL met, an entry for every way that waits.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # None while the way that it is part of has no end.
        self._outcomes: dict[bytes, Result | None] = {}
        # Hops only, while their way has no end; a given URL is part of its own.
        self._owners: dict[bytes, bytes] = {}
        self._leaders: dict[bytes, bytes] = {}
        self._followers: dict[bytes, list[Entry]] = {}

    def __contains__(self, url: str) -> bool:
        return digest(url) in self._outcomes

    def begin(self, url: str) -> None:
        """A given URL sets out."""
        self._outcomes[digest(url)] = None

    def extend(self, url: str, hop: str) -> None:
        """Its redirects go on to a URL that no other way holds, or held."""
        key = digest(hop)
        self._outcomes[key] = None
        self._owners[key] = digest(url)

    def outcome(self, url: str) -> Result | None:
        """What the way that it is part of came to; None: there is none, or no end yet."""
        return self._outcomes.get(digest(url))

    def follow(self, entry: Entry) -> str | None:
        """Keep an entry until the way that its last redirect led into has its end.

        The problem instead, and nothing kept, if that end would wait for this one, or if
        too many wait for one another.
        """
        url, hop = entry.redirects[-1][1], digest(entry.redirects[-1][1])
        own, leader = digest(entry.url), self._owners.get(hop, hop)
        ahead: bytes | None = leader
        for _ in range(self._longest):
            if ahead == own:
                return f"redirected in a circle, back to {url}"
            ahead = self._leaders.get(ahead) if ahead is not None else None
        if ahead is not None:
            return f"more than {self._longest} redirects"
        self._leaders[own] = leader
        self._followers.setdefault(leader, []).append(entry)
        return None

    def end(self, entry: Entry) -> list[Entry]:
        """A way has its end; the entries that waited for it, saying the same."""
        own = digest(entry.url)
        if own in self._outcomes:
            self._outcomes[own] = entry.outcome
        self._leaders.pop(own, None)
        for _, url in entry.redirects:
            hop = digest(url)
            # A hop of those that follow somebody is that one's.
            if self._owners.get(hop) == own:
                del self._owners[hop]
                self._outcomes[hop] = entry.outcome
        return [self._as(entry, waited) for waited in self._followers.pop(own, ())]

    def _as(self, leader: Entry, follower: Entry) -> Entry:
        """The follower's entry: its own way and the rest of the leader's, to the same end.

        Without size and file: those are the leader's, and counted once.
        """
        met = follower.redirects[-1][1]
        way = [leader.url, *(url for _, url in leader.redirects)]
        redirects = follower.redirects + leader.redirects[way.index(met) :]
        if len(redirects) > self._longest:  # as it would have come to alone
            return msgspec.structs.replace(
                follower, outcome=Result.FAILED, error=f"more than {self._longest} redirects"
            )
        return msgspec.structs.replace(
            follower,
            outcome=leader.outcome,
            redirects=redirects,
            final_url=redirects[-1][1],
            decision=leader.decision,
            status=follower.status if leader.outcome is Result.FETCHED else leader.status,
            error=leader.error,
        )
