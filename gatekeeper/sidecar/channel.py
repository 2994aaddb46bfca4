"""Messages and open connections between the owner process and its workers.

The two ends of a socket pair exchange messages in order. A connection travels as its file
descriptor (SCM_RIGHTS, unix(7)), with the octets of its next request that were read and not
answered. So the receiver deals with the client directly: it has the client's address, reads the
body as it arrives, and notices when the client hangs up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from gatekeeper.config import Config, HostRule
from gatekeeper.decision import Reason, Verdict
from gatekeeper.sidecar.pages.recent_decisions import Counts, DecisionNote
from gatekeeper.sidecar.replica import SharedRecord
from gatekeeper.sidecar.security import Token


class _TaggedMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message: an array of the name of its class and its fields."""


class Configure(_TaggedMessage, frozen=True):
    """To a worker: the configuration in force. Sent first, and again after each change."""

    config: Config
    tokens: tuple[Token, ...]
    rules: list[HostRule]
    """The operator's rules about hosts."""
    identity: str
    addresses: list[tuple[str, int]]
    """The addresses and ports that the service listens on."""


class HandOver(_TaggedMessage, frozen=True):
    """In either direction: the connection whose descriptor comes with this message."""

    unanswered: bytes = b""
    """Octets that were read from the connection and not answered."""


class DropRecord(_TaggedMessage, frozen=True):
    """To a worker: drop the record of this origin, if there is one."""

    origin: str


class ClientAtLimit(_TaggedMessage, frozen=True):
    """To a worker: a client reached its limit of concurrent requests, or fell below it again."""

    client: str
    at_limit: bool


class Sync(_TaggedMessage, frozen=True):
    """To a worker: send the counts, then answer with `Synced`."""

    number: int


class Stop(_TaggedMessage, frozen=True):
    """To a worker: pass every connection back, send the counts, and exit."""


class Ready(_TaggedMessage, frozen=True):
    """From a worker: it accepts connections."""


class RecordRequest(_TaggedMessage, frozen=True):
    """From a worker: it was asked about an origin for which it has no record."""

    origin: str


class Synced(_TaggedMessage, frozen=True):
    """From a worker: the answer to `Sync`. Every message sent before it is in force."""

    number: int


class WorkerCounts(_TaggedMessage, frozen=True):
    """From a worker: what it counted since its previous `WorkerCounts`."""

    requests: Mapping[tuple[str, str, int], int]
    """The number of requests by route, method and status."""
    decisions: Mapping[tuple[Verdict, Reason], int]
    origins: Mapping[str, Counts]
    """The totals of each host by one of its origins."""
    notes: list[DecisionNote]
    """The latest decisions."""
    unnoted: int
    """Number of decisions that have no note."""
    refused: Mapping[str, int]
    """Number of URLs that the guard refused, by kind."""
    logged: tuple[int, int]
    """Number of lines of the decision log that were written, and that were dropped."""
    connections: int
    """Number of open connections."""


ToWorker = Configure | HandOver | SharedRecord | DropRecord | ClientAtLimit | Sync | Stop
FromWorker = HandOver | Ready | RecordRequest | Synced | WorkerCounts
Message = ToWorker | FromWorker

_LENGTH: Final = struct.Struct(">I")
_READ_SIZE: Final = 262_144
_MAX_FDS: Final = 8
"""Descriptors that one read has room for. The kernel ends a read after the data that carries a
descriptor, so one read never brings more."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of the socket pair, in the running loop.

    `on_message(message, connection)` is called for each message received, `on_lost()` once, when
    the other end is gone or sends what can't be decoded. Sending never waits: data that the other
    end does not accept yet is queued. `queued` is the number of queued octets.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, socket.socket | None], object],
        on_lost: Callable[[], object],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self._fds: deque[int] = deque()
        self._queue: deque[tuple[memoryview, int]] = deque()
        self.queued: int = 0
        self.closed: bool = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Message, fd: int = -1) -> None:
        """Send a message, for `HandOver` with the descriptor of its connection.

        The caller may close its own descriptor immediately. No effect on a closed channel.
        """
        if self.closed:
            return
        body = _encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        if not self._queue:
            sent = self._write(data, fd)
            if sent == len(data):
                return
            if sent:
                data, fd = data[sent:], -1
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._queue.append((data, os.dup(fd) if fd >= 0 else -1))
        self.queued += len(data)

    def close(self) -> None:
        """Close the channel and every descriptor still queued in either direction. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in (*self._fds, *(fd for _, fd in self._queue)):
            if fd >= 0:
                os.close(fd)

    def _write(self, data: memoryview, fd: int) -> int:
        """Return how many octets were sent; the descriptor goes with the first one."""
        try:
            return self._sock.send(data) if fd < 0 else socket.send_fds(self._sock, [data], [fd])
        except OSError:  # its buffer is full, or the other end is gone, as `_readable` reports
            return 0

    def _writable(self) -> None:
        while self._queue:
            data, fd = self._queue[0]
            sent = self._write(data, fd)
            self.queued -= sent
            if sent and fd >= 0:
                os.close(fd)
            if sent < len(data):
                if sent:
                    self._queue[0] = data[sent:], -1
                return
            self._queue.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def read_rest(self) -> None:
        """Handle all messages that have arrived. For an end whose other process has ended.

        That process may have sent connections at last, and each takes one read.
        """
        while not self.closed and self._readable():
            pass

    def _readable(self) -> bool:
        """Read once, and handle the messages. Return whether there was anything to read."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, _READ_SIZE, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, fds, flags = b"", [], 0
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            self._fds.append(-1)  # this process had no free descriptor to receive it
        if not data:
            self._lost()
            return True
        self._read += data
        try:
            self._dispatch()
        except msgspec.MsgspecError:
            self._lost()
        return True

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_lost()

    def _dispatch(self) -> None:
        read, start = self._read, 0
        while len(read) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(read, start)
            end = start + _LENGTH.size + length
            if len(read) < end:
                break
            message: Message = _decoder.decode(bytes(read[start + _LENGTH.size : end]))
            start = end
            connection = None
            if type(message) is HandOver:
                fd = self._fds.popleft() if self._fds else -1
                if fd < 0:
                    continue
                connection = socket.socket(fileno=fd)
            self._on_message(message, connection)
            if self.closed:
                return
        del read[:start]
