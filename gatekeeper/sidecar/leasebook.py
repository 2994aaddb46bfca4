"""The leases that were out when the process died: a small journal beside the state file.

A client does not die with its sidecar: its request may be under way, and its report still
comes. So each grant and each end is a line, written before the answer (kill -9 loses no
write that the system has taken), and on start the leases without an end are taken up
again: their hosts' slots stay taken until the report, or the end they were given.

    + ID EXPIRES URL [AGENT [CLIENT]]   granted; wall seconds; AGENT is empty for the service's
                                        own; CLIENT is who holds it
    - ID                                ended
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

__all__ = ["LeaseBook", "OpenLease"]

_MAX_BYTES = 4_194_304
_MAX_OPEN = 100_000
_PUNCTUATION = "!#$%&'()*+,/:;=?@[]~"


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A lease without an end in the journal."""

    id: str
    expires_at: float
    """Wall seconds."""
    url: str
    agent: str | None = None
    """None: the service's own."""
    client: str | None = None
    """Who holds it; None where nobody said."""


class LeaseBook:
    """The journal, open for appending. Without a path nothing is kept.

    `left_over` are the leases that an earlier process left open and that have not run out.
    Raises OSError where the file can't be read or written.
    """

    def __init__(self, path: Path | None, *, now: float) -> None:
        self._path = path
        self._open: dict[str, OpenLease] = {}
        self._fd = -1
        self._size = 0
        self._rewrite_at = _MAX_BYTES
        if path is not None:
            self._open = {
                lease.id: lease for lease in _read(path).values() if lease.expires_at > now
            }
            self._rewrite(path)
        self.left_over = tuple(self._open.values())

    def granted(self, lease: OpenLease) -> None:
        """A grant, or a renewal: the later line counts. Raises OSError: then nothing is kept."""
        if self._path is None:
            return
        self._append(_line(lease))
        self._open[lease.id] = lease
        self._compact()

    def ended(self, lease_id: str) -> None:
        """An end, of whatever kind; unknown ones are no error.

        Raises OSError: then the lease is still open here, and its end can be said again.
        """
        if self._path is None or lease_id not in self._open:
            return
        self._append(f"- {lease_id}\n")
        del self._open[lease_id]
        self._compact()

    def forget(self, lease_id: str) -> None:
        """It ran out: the journal's own line says when, so that no further one is needed."""
        self._open.pop(lease_id, None)

    @property
    def writable(self) -> bool:
        """Whether a line can be written now: an empty one is."""
        if self._path is None:
            return True
        try:
            self._append("\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file, with what is open in it; later calls write nothing. Idempotent."""
        self._path = None
        self._close_file()

    def _close_file(self) -> None:
        if self._fd != -1:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: str) -> None:
        data = line.encode()
        # One write: a line is there whole, or, after a power cut, cut and ignored.
        if os.write(self._fd, data) < len(data):
            # A full disk takes a piece; with a later line behind it, it would be another URL.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)

    def _compact(self) -> None:
        if self._size > self._rewrite_at and self._path is not None:
            try:
                self._rewrite(self._path)
            except OSError:
                # The old file says the same, at greater length.
                self._rewrite_at = self._size + _MAX_BYTES

    def _rewrite(self, path: Path) -> None:
        """The file anew with what is open, put in place in one step."""
        fresh = path.with_name(path.name + ".new")
        data = "".join(map(_line, self._open.values())).encode()
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fresh.replace(path)
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        self._close_file()
        self._fd, self._size = fd, len(data)
        self._rewrite_at = max(_MAX_BYTES, 2 * self._size)


def _line(lease: OpenLease) -> str:
    url = lease.url
    if not url.isprintable() or " " in url:
        url = quote(url, safe=_PUNCTUATION)  # a blank or a line end would make another line of it
    line = f"+ {lease.id} {lease.expires_at:.3f} {url}"
    if lease.client is not None:
        return f"{line} {_quoted(lease.agent or '')} {_quoted(lease.client)}\n"
    return f"{line}\n" if lease.agent is None else f"{line} {_quoted(lease.agent)}\n"


@functools.lru_cache(maxsize=1024)  # few clients, and fewer agents, of many leases
def _quoted(text: str) -> str:
    return quote(text, safe="")


def _read(path: Path) -> dict[str, OpenLease]:
    """What is open by the journal; a line that can't be read is passed over."""
    found: dict[str, OpenLease] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for line in text.split("\n")[:-1]:
        parts = line.split(" ")
        if parts[0] == "-" and len(parts) == 2:
            found.pop(parts[1], None)
        elif parts[0] == "+" and 4 <= len(parts) <= 6 and len(found) < _MAX_OPEN:
            agent, client = (*(unquote(part) or None for part in parts[4:]), None, None)[:2]
            try:
                found[parts[1]] = OpenLease(parts[1], float(parts[2]), parts[3], agent, client)
            except ValueError:
                continue
    return found
