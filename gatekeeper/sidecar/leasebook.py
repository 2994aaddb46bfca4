"""The leases that were out when the process died: a small journal beside the state file.

A client does not die with its sidecar: its request may be under way, and its report still
comes. So each grant and each end is a line, written before the answer (kill -9 loses no
write that the system has taken), and on start the leases without an end are taken up
again: their hosts' slots stay taken until the report, or the end they were given. One that
ran out is kept for as long again as it lasted: its report may be under way.

    + ID EXPIRES URL AGENT CLIENT TTL BOOT_ID BOOT_AT     granted, or renewed
    - ID                                                  ended

EXPIRES is wall seconds, TTL before which the line was written; BOOT_ID and BOOT_AT say when
that was by the machine's own count (`clock.Stamp`). AGENT is empty for the service's own,
CLIENT (who holds it) where nobody said. Earlier versions wrote neither TTL nor what follows it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections import OrderedDict
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from gatekeeper.clock import Clock, Stamp, boot_of

__all__ = ["LeaseBook", "OpenLease"]

_MAX_BYTES = 4_194_304
_MAX_OPEN = 100_000
_PUNCTUATION = "!#$%&'()*+,/:;=?@[]~"


_TTL = 60.0
"""Of a lease whose line does not say: what a client gets that asks for nothing else."""
_REMEMBERED = 10_000
"""Leases that ran out whose report is still accepted; beyond, the oldest go."""


class OpenLease(msgspec.Struct, frozen=True, gc=False):
    """A lease without an end in the journal."""

    id: str
    expires_at: float
    """Wall seconds."""
    url: str
    agent: str | None = None
    """None: the service's own."""
    client: str | None = None
    """Who holds it; None where nobody said."""
    ttl: float = _TTL
    """Seconds from when it was granted or renewed to its end."""
    boot_id: str = ""
    boot_at: float = 0.0
    """When it was granted or renewed, by the machine's own count; see `clock.Stamp`."""

    @classmethod
    def lasting(
        cls,
        lease_id: str,
        url: str,
        ttl: float,
        clock: Clock,
        agent: str | None = None,
        client: str | None = None,
    ) -> OpenLease:
        """One that begins, or begins anew, at this moment."""
        boot_id, boot_at = boot_of(clock)
        return cls(lease_id, clock.wall() + ttl, url, agent, client, ttl, boot_id, boot_at)

    def left(self, clock: Clock) -> float:
        """Seconds until it ends, never more than its `ttl`; negative: since it has ended."""
        if not self.boot_id:  # written by an earlier version: the wall clock alone knows
            return self.expires_at - clock.wall()
        return self.ttl - Stamp(self.expires_at - self.ttl, self.boot_id, self.boot_at).age(clock)

    def reportable(self, clock: Clock) -> bool:
        """May its report still come? For its `ttl` after its end."""
        return self.left(clock) > -self.ttl


class LeaseBook:
    """The journal, open for appending. Without a path nothing is kept.

    `left_over` are the leases that an earlier process left open and whose report may still
    come. Raises OSError where the file can't be read or written.
    """

    def __init__(self, path: Path | None, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._open: dict[str, OpenLease] = {}
        self._over: OrderedDict[str, OpenLease] = OrderedDict()
        """Ran out without a word, the latest last."""
        self._fd = -1
        self._size = 0
        self._torn = False
        """A piece of a line is at the end of the file: nothing may be put behind it."""
        self._rewrite_at = _MAX_BYTES
        if path is not None:
            self._open = {
                lease.id: lease for lease in _read(path).values() if lease.reportable(clock)
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
        if self._path is None or (lease_id not in self._open and lease_id not in self._over):
            return
        self._append(f"- {lease_id}\n")
        self._open.pop(lease_id, None)
        self._over.pop(lease_id, None)
        self._compact()

    def ran_out(self, lease_id: str) -> None:
        """Its end has come: the journal's own line says when, so that no further one is
        needed. Its report may still end it in a word."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            self._over[lease_id] = lease
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)

    @property
    def kept(self) -> bool:
        """Whether anything is written at all."""
        return self._path is not None

    @property
    def writable(self) -> bool:
        """Whether a line can be written now: an empty one is, or else the file anew."""
        if self._path is None:
            return True
        try:
            self._append("\n")
        except OSError:
            if self._fd != -1:
                return False
            try:
                self._rewrite(self._path)  # the descriptor is lost, and the disk may be well
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
        if self._torn:
            if self._path is not None:
                self._rewrite(self._path)
            self._torn = False
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno == errno.EBADF:
                self._fd = -1  # closed by somebody: its number may be another file's by now
            raise
        if written < len(data):
            # A full disk takes a piece; with a later line behind it, it would be another URL.
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._torn = written > 0
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
        for lease_id in [one.id for one in self._over.values() if not one.reportable(self._clock)]:
            del self._over[lease_id]
        data = "".join(map(_line, (*self._over.values(), *self._open.values()))).encode()
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fresh.replace(path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
        self._close_file()
        self._torn = False
        self._fd, self._size = fd, len(data)
        self._rewrite_at = max(_MAX_BYTES, 2 * self._size)


def _line(lease: OpenLease) -> str:
    url = lease.url
    if not url.isprintable() or " " in url:
        url = quote(url, safe=_PUNCTUATION)  # a blank or a line end would make another line of it
    agent, client = _quoted(lease.agent or ""), _quoted(lease.client or "")
    return (
        f"+ {lease.id} {lease.expires_at:.3f} {url} {agent} {client} "
        f"{lease.ttl:.3f} {lease.boot_id} {lease.boot_at:.3f}\n"
    )


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
        elif parts[0] == "+" and len(parts) in (4, 5, 6, 9) and len(found) < _MAX_OPEN:
            with contextlib.suppress(ValueError):
                found[parts[1]] = _lease_of(*parts[1:])
    return found


def _lease_of(
    lease_id: str,
    expires_at: str,
    url: str,
    agent: str = "",
    client: str = "",
    ttl: str = f"{_TTL}",
    boot_id: str = "",
    boot_at: str = "0",
) -> OpenLease:
    """Raises ValueError for what is no number."""
    return OpenLease(
        lease_id,
        float(expires_at),
        url,
        unquote(agent) or None,
        unquote(client) or None,
        float(ttl),
        boot_id,
        float(boot_at),
    )
