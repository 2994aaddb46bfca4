"""The manifest: one JSON line for every result of a URL. With it a later run resumes the crawl.

A line is written in one call, after the body that it describes is on disk. However the process
ends, the file has whole lines and at most one torn line at its end, which the next run cuts off.

Next to it, a file lists the URLs that were requested, by their digests. A URL in it without a
final result failed, or was in flight when the process was killed. It may well fail again, so a
later run requests it after the URLs that were never requested.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from gatekeeper.decision import Decision, Reason
from gatekeeper.errors import StorageError

# --- the folder ------------------------------------------------------------------------------

NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
"""Flag of os.open: fail at a symbolic link. 0 on systems without such a flag (Windows)."""
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0)
_APPEND: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK


class Folder:
    """A directory, and the files in its subdirectories. No symbolic link that is in it is followed.

    Each method raises StorageError, which names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, directory: str, name: str) -> IO[bytes]:
        """Create an empty file in a subdirectory, replacing a file or link of that name.

        The subdirectory is created if needed.
        """
        with self._opened(directory) as (folder,):
            return os.fdopen(create_file(f"{folder}{os.sep}{name}"), "w+b")

    def move(self, path: tuple[str, str], to: tuple[str, str]) -> None:
        """Move a file (its subdirectory and name), replacing a file or link of the new name."""
        with self._opened(path[0], to[0]) as (source, target):
            os.replace(f"{source}{os.sep}{path[1]}", f"{target}{os.sep}{to[1]}")

    def remove(self, directory: str, name: str) -> None:
        """Remove a file, if it exists."""
        with self._opened(directory) as (folder,), suppress(FileNotFoundError):
            os.unlink(f"{folder}{os.sep}{name}")

    @contextmanager
    def _opened(self, *directories: str) -> Iterator[list[str]]:
        """Give the path of each subdirectory, which is created if needed."""
        paths = [f"{self.path}{os.sep}{directory}" for directory in directories]  # no Path: slow
        try:
            for path in paths:
                try:
                    is_link = stat.S_ISLNK(os.lstat(path).st_mode)
                except FileNotFoundError:
                    os.mkdir(path)
                    continue
                if is_link:
                    raise _symlink_error(path)
            yield paths
        except OSError as error:
            raise not_stored(paths[-1], error) from error


def create_file(path: str) -> int:
    """Create a file, replacing a file or link of that name, and return its descriptor."""
    try:
        return os.open(path, _CREATE, 0o644)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, _CREATE, 0o644)


def not_stored(path: Path | str, error: OSError) -> StorageError:
    """Return the error that ends a crawl which can't write to a path."""
    return StorageError(f"{path}: {error.strerror}; run the command again to resume")


def _write_all(path: Path, descriptor: int, data: bytes) -> None:
    """Write all of the data, usually in one call. Raises StorageError, which names the path."""
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
    except OSError as error:
        raise not_stored(path, error) from error


def refuse_links(folder: Path, *names: str) -> None:
    """Raise StorageError if the folder has a symbolic link whose name starts with one of these."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(names) and entry.is_symlink():
                raise _symlink_error(folder / entry.name)


def _symlink_error(path: Path | str) -> StorageError:
    return StorageError(
        f"{path}: is a symbolic link, which a crawl's output must not contain; remove it"
    )


# --- the manifest ----------------------------------------------------------------------------


class Result(StrEnum):
    """The outcome of a URL."""

    FETCHED = "fetched"
    """A response arrived, with any status, and its body is stored."""
    DENIED = "denied"
    """The URL may not be fetched; the decision names the line. Final, unless the guard or an
    operator's override refused it: every run asks about those again."""
    FAILED = "failed"
    """No response, an unreadable one, or only responses that ask to wait. Not final: later runs try
    again. Or the text is not a URL: that will not change, and is reported once."""


class WarcPlace(msgspec.Struct, frozen=True):
    """The position of a page in a WARC file, in bytes."""

    file: str
    """The path of the WARC file, relative to the manifest."""
    offset: int
    end: int


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the manifest. Durations are seconds, sizes bytes, times UTC."""

    url: str
    """The given URL, in its normal form."""
    outcome: Result
    at: datetime
    """When its last request was sent, or when it was decided not to send one."""
    status: int | None = None
    final_url: str | None = None
    """The URL that redirects led to; None if there were none."""
    redirects: tuple[tuple[int, str], ...] = ()
    """The status of each hop, and the URL it led to."""
    decision: Decision | None = None
    """The decision for the last hop."""
    tries: int = 1
    """Requests for the last hop; 0: the given text is not a URL that could be requested."""
    elapsed: float | None = None
    """Time from sending the last request to the head of its response."""
    took: float | None = None
    """Time from sending the last request to the end of the body."""
    size: int | None = None
    """Size of the body. None for a fetched URL that redirected to the page of another entry."""
    sha256: str | None = None
    """The digest of the body as stored."""
    truncated: bool = False
    """The body was longer than --max-body; the rest was not read."""
    content_type: str | None = None
    content_encoding: str | None = None
    """The encoding of a body that is stored in encoded form, as it was sent."""
    file: str | None = None
    """The file with the body, relative to the manifest."""
    warc: WarcPlace | None = None
    signals: dict[str, Any] | None = None
    """What the response headers say about the use of the page."""
    error: str | None = None
    where: str | None = None
    """For a text that is not a URL: the file and the line it was read from, "urls.txt:6"."""

    @property
    def refused(self) -> bool:
        """True if the URL will not be fetched later either: its site denies it, or it is not a URL.

        A refusal by our own configuration is not final: the next run may have another one.
        """
        if not self.tries:
            return True
        reason = self.decision.reason if self.decision is not None else None
        return self.outcome is Result.DENIED and reason not in _LOCAL_REASONS

    @property
    def kind(self) -> tuple[object, ...]:
        """What is compared to tell whether a later run had the same result. The text of an error is
        not: one fault may show in several ways."""
        return self.outcome, self.status, None if self.decision is None else self.decision.reason


_LOCAL_REASONS = frozenset({Reason.BLOCKED, Reason.OPERATOR})
"""Refusals by the guard and by the operator's overrides. Asking again costs no request."""

_TRIED: Final = ".tried"
_DIGEST_OCTETS: Final = 16

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class Manifest:
    """The manifest file, and what a run has to know about the URLs that are done.

    `archive` is the WARC file of this run, as a WarcPlace names it; "" if it is new. With
    `retry_denied`, URLs that an earlier run was denied count as not done. Memory: 16 bytes and a
    slot in a set for every URL with a final result or that was tried, and a slot in a dictionary
    for every other result. Make it while holding the lock, as a context manager.
    """

    def __init__(
        self, path: Path, *, archive: str | None = None, retry_denied: bool = False
    ) -> None:
        self.path = path
        self._retry_denied = retry_denied
        self.unreadable: int = 0
        """Lines that are not entries; they are left unchanged."""
        self.warc_places: dict[str, WarcPlace] = {}
        """The position of the last page in each WARC file."""
        self._archive = archive
        self._fetched: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._unarchived: set[bytes] = set()
        self._kinds: dict[bytes, tuple[object, ...]] = {}
        """The kind of the last result of each URL without a final one."""
        # Only this process appends to the file, so reading it once gives all entries.
        self._file = os.open(path, _APPEND, 0o644)
        self._tried_file = os.open(f"{path}{_TRIED}", _APPEND, 0o644)
        self._tried = set(self._read_tried(self._tried_file))
        """URLs that an earlier run requested, without a final result."""
        for line in self._whole_lines(self._file):
            try:
                self._remember(_decode(line))
            except msgspec.MsgspecError:
                self.unreadable += 1

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        os.close(self._tried_file)

    def done(self, url: str) -> bool:
        """Return True if the URL was refused, or fetched, possibly as a hop, or is not a URL."""
        key = digest(url)
        return key in self._fetched or key in self._refused

    def fetched(self, url: str) -> bool:
        """Return True if the page of the URL was fetched."""
        return digest(url) in self._fetched

    def begin(self, url: str) -> None:
        """Note, before the first request of a URL, that it is tried."""
        key = digest(url)
        if key not in self._tried:
            _write_all(self.path, self._tried_file, key)

    def tried(self, url: str) -> bool:
        """Return True if an earlier run requested the URL, and it has no final result."""
        return digest(url) in self._tried

    def unarchived(self, url: str) -> bool:
        """Return True if the page was fetched by a run that did not write it to this WARC file."""
        return digest(url) in self._unarchived

    def write(self, entry: Entry) -> None:
        """Append the line of an entry in one call, unless the last line about the URL says the
        same. Raises StorageError if the file was removed: its entries would be lost, unnoticed."""
        if not os.fstat(self._file).st_nlink:
            raise StorageError(f"{self.path}: was removed during the crawl; run it again")
        if self._kinds.get(digest(entry.url)) != entry.kind:
            _write_all(self.path, self._file, _encode(entry) + b"\n")
            self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        if entry.warc is not None:
            self.warc_places[entry.warc.file] = entry.warc
        # If there are several lines about one URL, the last one counts.
        key, fetched = digest(entry.url), entry.outcome is Result.FETCHED
        refused = entry.refused and not (self._retry_denied and entry.tries > 0)
        (self._refused.add if refused else self._refused.discard)(key)
        if fetched or refused:
            self._kinds.pop(key, None)
            self._tried.discard(key)
        else:
            self._kinds[key] = entry.kind
            if entry.outcome is Result.FAILED:
                self._tried.add(key)
        if fetched:
            # Hops count as fetched only if this entry has the page that they led to.
            hops = [] if entry.size is None else [digest(hop) for _, hop in entry.redirects]
            self._fetched.update((key, *hops))
            archive = None if entry.warc is None else entry.warc.file
            if entry.size is not None and self._archive not in (None, archive):
                self._unarchived.update((key, *hops))

    @staticmethod
    def _read_tried(descriptor: int) -> Iterator[bytes]:
        """Yield every digest in the file of the URLs that were tried, and cut a torn one off."""
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, size - size % _DIGEST_OCTETS)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            while key := file.read(_DIGEST_OCTETS):
                yield key

    def _whole_lines(self, descriptor: int) -> Iterator[bytes]:
        """Yield every line that ends with a newline, and cut the rest off the file."""
        end = 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    end += len(line)
                    yield line
        os.ftruncate(descriptor, end)


@lru_cache(maxsize=4096)
def digest(url: str) -> bytes:
    """Return the 16 bytes that represent a URL of any length in memory."""
    return hashlib.blake2b(url.encode(), digest_size=_DIGEST_OCTETS).digest()


# --- redirects -------------------------------------------------------------------------------


class RedirectChains:
    """The redirect chains of one run. Each URL belongs to the chain of one given URL.

    A chain that leads into the chain of another URL waits for the outcome of that one. `longest`
    limits how many chains wait for one another in a row. Memory: a slot in a dictionary and 16
    bytes for every URL seen, and an entry for every chain that waits.
    """

    def __init__(self, max_chain: int) -> None:
        self._max_chain = max_chain
        # None while the chain of the URL is unfinished.
        self._outcomes: dict[bytes, Result | None] = {}
        # The given URL of each hop in an unfinished chain; given URLs belong to their own chain.
        self._owners: dict[bytes, bytes] = {}
        self._leaders: dict[bytes, bytes] = {}
        self._followers: dict[bytes, list[Entry]] = {}

    def __contains__(self, url: str) -> bool:
        return digest(url) in self._outcomes

    def begin(self, url: str) -> None:
        """Start the chain of a given URL."""
        self._outcomes[digest(url)] = None

    def extend(self, url: str, hop: str) -> None:
        """Add a hop, which no other chain has or had, to the chain of a URL."""
        key = digest(hop)
        self._outcomes[key] = None
        self._owners[key] = digest(url)

    def outcome(self, url: str) -> Result | None:
        """Return the outcome of the chain of a URL; None: it has no chain, or an unfinished one."""
        return self._outcomes.get(digest(url))

    def follow(self, entry: Entry) -> str | None:
        """Hold back an entry until the chain that its last redirect led into is finished.

        Return None, or a problem if that chain waits for this one, or if too many chains wait
        for one another; then the entry is not held back.
        """
        url, hop = entry.redirects[-1][1], digest(entry.redirects[-1][1])
        key, leader = digest(entry.url), self._owners.get(hop, hop)
        current: bytes | None = leader
        for _ in range(self._max_chain):
            if current == key:
                return f"redirect loop, back to {url}"
            current = self._leaders.get(current) if current is not None else None
        if current is not None:
            return f"more than {self._max_chain} redirects"
        self._leaders[key] = leader
        self._followers.setdefault(leader, []).append(entry)
        return None

    def end(self, entry: Entry) -> list[Entry]:
        """Finish the chain of an entry, and return the waiting entries, with the same outcome."""
        key = digest(entry.url)
        if key in self._outcomes:
            self._outcomes[key] = entry.outcome
        self._leaders.pop(key, None)
        for _, url in entry.redirects:
            hop = digest(url)
            # A hop of an entry that followed another chain belongs to that chain.
            if self._owners.get(hop) == key:
                del self._owners[hop]
                self._outcomes[hop] = entry.outcome
        return [self._merged(entry, follower) for follower in self._followers.pop(key, ())]

    def _merged(self, leader: Entry, follower: Entry) -> Entry:
        """Return the follower's entry: its own hops, the rest of the leader's, the same outcome.

        It has no size and no file: the leader's entry has them, and they are counted once.
        """
        joint = follower.redirects[-1][1]
        chain = [leader.url, *(url for _, url in leader.redirects)]
        redirects = follower.redirects + leader.redirects[chain.index(joint) :]
        if len(redirects) > self._max_chain:  # the follower would have failed alone, too
            return msgspec.structs.replace(
                follower, outcome=Result.FAILED, error=f"more than {self._max_chain} redirects"
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
