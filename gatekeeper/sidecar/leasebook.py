"""The leases that were out when the process died: a small journal beside the state file.

A client does not die with its sidecar: its request may be under way, and its report still
comes. So each grant and each end is a line, written before the answer (kill -9 loses no
write that the system has taken), and on start the leases without an end are taken up
again: their hosts' slots stay taken until the report, or the end they were given.

    + ID EXPIRES URL        granted; wall seconds
    - ID                    ended
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LeaseBook", "OpenLease"]

_MAX_BYTES = 4_194_304
_MAX_OPEN = 100_000


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A lease without an end in the journal."""

    id: str
    expires_at: float
    """Wall seconds."""
    url: str


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
        if path is not None:
            self._open = {
                lease.id: lease for lease in _read(path).values() if lease.expires_at > now
            }
            self._rewrite(path)
        self.left_over = tuple(self._open.values())

    def granted(self, lease_id: str, expires_at: float, url: str) -> None:
        """A grant, or a renewal: the later line counts."""
        if self._path is None:
            return
        lease = self._open[lease_id] = OpenLease(lease_id, expires_at, url)
        self._append(_line(lease))

    def ended(self, lease_id: str) -> None:
        """An end, of whatever kind; unknown ones are no error."""
        if self._path is not None and self._open.pop(lease_id, None) is not None:
            self._append(f"- {lease_id}\n")

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
        os.write(self._fd, data)
        self._size += len(data)
        if self._size > _MAX_BYTES and self._path is not None:
            self._rewrite(self._path)

    def _rewrite(self, path: Path) -> None:
        """The file anew with what is open, put in place in one step."""
        self._close_file()
        fresh = path.with_name(path.name + ".new")
        data = "".join(map(_line, self._open.values())).encode()
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.write(fd, data)
        fresh.replace(path)
        self._fd, self._size = fd, len(data)


def _line(lease: OpenLease) -> str:
    return f"+ {lease.id} {lease.expires_at:.3f} {lease.url}\n"


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
        elif parts[0] == "+" and len(parts) == 4 and len(found) < _MAX_OPEN:
            try:
                found[parts[1]] = OpenLease(parts[1], float(parts[2]), parts[3])
            except ValueError:
                continue
    return found
