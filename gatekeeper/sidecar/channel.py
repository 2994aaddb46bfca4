"""What the process that owns the turns and its workers tell each other: messages, in order, and
open connections, over a socket pair that nobody else can reach.

A connection travels as its file descriptor (SCM_RIGHTS, unix(7)), with the octets that were read
of its next request and not answered. So whoever has it has the client itself: its address, its
body as it comes, and word when it hangs up.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from gatekeeper.config import Config, HostRule
from gatekeeper.sidecar.pages.feeds import DecisionNote


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """A bearer token; see `security.Token`."""

    value: bytes
    name: str
    roles: list[str]


class Adopt(_Body, frozen=True):
    """To a worker, first and whenever it changes: what is in force from now on."""

    config: Config
    tokens: list[TokenText]
    rules: list[HostRule]
    """The operator's, about hosts."""
    identity: str
    version: str
    addresses: list[tuple[str, int]]
    """Those listened on."""


class RuntimeRules(_Body, frozen=True):
    """To a worker: the operator's rules about hosts, all of them, in force from now on."""

    rules: list[HostRule]


class Connected(_Body, frozen=True):
    """Either way: a connection, which comes with this message."""

    begun: bytes = b""
    """What was read of it and not answered."""
    passes: int = 0
    """How often it was passed on lately."""


class Known(_Body, frozen=True):
    """To a worker: what is known of an origin; see `GateInternals.shared_record`."""

    origin: str
    record: bytes


class Forget(_Body, frozen=True):
    """To a worker: what it knows of these origins is no longer so."""

    origins: list[str]


class ClientFull(_Body, frozen=True):
    """To a worker: a client has as many requests under way as it may, or no longer so many."""

    client: str
    full: bool


class Mark(_Body, frozen=True):
    """To a worker: tell what was counted, and say that you came so far."""

    number: int


class Leave(_Body, frozen=True):
    """To a worker: pass every connection back, tell what was counted, and end."""


class Ready(_Body, frozen=True):
    """From a worker: it takes connections."""


class Want(_Body, frozen=True):
    """From a worker: it was asked about an origin of which it knows nothing."""

    origin: str


class Reached(_Body, frozen=True):
    """From a worker: the answer to `Mark`. What came before it is in force."""

    number: int


class OriginTally(msgspec.Struct, frozen=True, array_like=True):
    """Decisions about the URLs of one origin."""

    origin: str
    allow: int
    deny: int
    defer: int


class BatchNote(msgspec.Struct, frozen=True, array_like=True):
    """The decisions of a batch."""

    at: float
    request: str
    client: str
    decisions: list[str]
    """As JSON."""


class Counted(_Body, frozen=True):
    """From a worker: what it counted since it told last."""

    requests: list[tuple[str, str, int, int]]
    """Route, method, status, how many."""
    decisions: list[tuple[str, str, int]]
    """Verdict, reason, how many."""
    origins: list[OriginTally]
    bases: list[msgspec.Raw]
    """Decisions that notes differ from in URL and id alone, in MessagePack: few are looked at."""
    notes: list[DecisionNote]
    batches: list[BatchNote]
    """The latest of them."""
    unnoted: int
    """Decisions that no note tells of."""
    refused: dict[str, int]
    """URLs that the guard refused, by kind."""
    logged: tuple[int, int]
    """Lines of the decision log that were written, and that were dropped."""
    connections: int
    """Open now."""


Message = (
    Adopt
    | RuntimeRules
    | Connected
    | Known
    | Forget
    | ClientFull
    | Mark
    | Leave
    | Ready
    | Want
    | Reached
    | Counted
)

_LENGTH: Final = struct.Struct(">I")
_READ: Final = 262_144
_FDS: Final = 8
"""Room for more than one piece of data brings: the kernel ends a piece behind a descriptor."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of a socket pair, in the running loop. `on_message(message, connection)` is called
    for each one that comes, `on_lost()` once, when the other end is gone or speaks nonsense.

    Sending never waits: what the other end does not take yet is queued, and `queued` says how
    many octets that is.
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
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Nothing comes or goes any more."""
        return self._closed

    def send(self, message: Message, fd: int = -1) -> None:
        """Send a message, with a descriptor if it is `Connected`: the caller may close its own at
        once. Without effect on a channel that is closed."""
        if self._closed:
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
        """Close it, with what has not gone and what was not taken. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in (*self._fds, *(fd for _, fd in self._queue)):
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
        self._queue.clear()

    def _write(self, data: memoryview, fd: int) -> int:
        """How many octets went; the descriptor goes with the first."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            return self._sock.sendmsg([data], rights if fd >= 0 else [])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # it is gone: `_readable` hears of it as well
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

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                _READ, socket.CMSG_SPACE(4 * _FDS), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(rights[: len(rights) - len(rights) % found.itemsize])
                self._fds.extend(found)
        if flags & socket.MSG_CTRUNC:
            self._fds.append(-1)  # no descriptor was left in this process for it
        if not data:
            self._lost()
            return
        self._read += data
        try:
            self._take()
        except msgspec.MsgspecError:
            self._lost()

    def _lost(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost()

    def _take(self) -> None:
        read, start = self._read, 0
        while len(read) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(read, start)
            end = start + _LENGTH.size + length
            if len(read) < end:
                break
            message: Message = _decoder.decode(bytes(read[start + _LENGTH.size : end]))
            start = end
            connection = None
            if type(message) is Connected:
                fd = self._fds.popleft() if self._fds else -1
                if fd < 0:
                    continue
                connection = socket.socket(fileno=fd)
            self._on_message(message, connection)
            if self._closed:
                return
        del read[:start]
