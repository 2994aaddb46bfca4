"""The server's side of one TCP connection: a small HTTP/1.1 reader that keeps a log.

Ordinary pages are answered at once, inside `data_received`, so that the fake internet can
carry a load test; everything else runs as a task that the `FakeInternet` owns.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from multidict import CIMultiDict

if TYPE_CHECKING:
    from gatekeeper.clock import Clock
    from tests.internet.net import FakeInternet
    from tests.internet.sites import Site

_MAX_HEAD = 65_536
_LINGER_NOT = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing sends RST


@dataclass(slots=True, eq=False)
class Connection:
    """One TCP connection as the server saw it; `requests` may stay empty."""

    number: int
    address: str
    """The listener's address that was dialled."""
    port: int
    tls: bool
    opened: float
    closed: float | None = None
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One request as the server saw it. Times are seconds of the internet's clock."""

    at: float
    """When its head had arrived."""
    method: str
    target: str
    """The request target, query included, exactly as sent."""
    scheme: str
    host: str
    """The Host header, in lower case, with the port if it was sent."""
    head: bytes
    connection: Connection
    concurrent: int = 1
    """Requests of this host in flight when it arrived, this one included."""
    body: bytes = b""
    ended: float | None = None
    """When the server had done with it, or its client had gone; None while it is in flight."""
    answered: float | None = None
    """When the head of the answer was sent; None before."""
    answer: bytes = b""
    """What was sent first: the head of the answer, and with a small page its body."""
    site: Site | None = None

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def url(self) -> str:
        """The URL that was asked for."""
        return f"{self.scheme}://{self.host}{self.target}"

    @property
    def headers(self) -> CIMultiDict[str]:
        """The request's headers."""
        headers: CIMultiDict[str] = CIMultiDict()
        for line in self.head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            headers.add(name.decode("latin-1"), value.strip().decode("latin-1"))
        return headers

    @property
    def status(self) -> int | None:
        """The status that was answered; None where none was."""
        digits = self.answer[9:12]
        return int(digits) if self.answer.startswith(b"HTTP/1.") and digits.isdigit() else None

    def answer_header(self, name: str) -> str | None:
        """A header of the answer."""
        head = self.answer.partition(b"\r\n\r\n")[0]
        for line in head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return None

    def __repr__(self) -> str:
        return f"<{self.at:.3f} {self.method} {self.url}>"


class Exchange:
    """What a behaviour works with: the request, and the means to answer or to misbehave."""

    __slots__ = ("_wire", "clock", "request")

    def __init__(self, wire: Wire, request: Request, clock: Clock) -> None:
        self._wire = wire
        self.request = request
        self.clock = clock

    async def send(self, data: bytes) -> None:
        """Write, waiting while the client does not read. Raises if it has gone."""
        self._wire.write(data)
        await self._wire.writable.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the client has gone")

    @property
    def gone(self) -> asyncio.Event:
        """Set when the connection is lost."""
        return self._wire.gone

    def close(self) -> None:
        """End the connection in an orderly way (FIN) once all is written."""
        self._wire.close()

    def reset(self) -> None:
        """End it at once, and rudely (RST)."""
        self._wire.reset()


class Wire(asyncio.Protocol):
    """Reads requests off one connection, one after the other."""

    def __init__(self, net: FakeInternet, address: str, port: int, tls: bool) -> None:
        self._net = net
        self._place = (address, port, tls)
        self._scheme = "https" if tls else "http"
        self._buffer = b""
        self._busy = False
        self._request: Request | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.gone = asyncio.Event()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # cast, not assert: uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)
        self._net.activity += 1
        address, port, tls = self._place
        number = len(self._net.connections)
        self.connection = Connection(number, address, port, tls, self._net.clock.monotonic())
        self._net.connections.append(self.connection)
        self._net.wires.add(self)
        if address in self._net.rude_addresses:
            self.reset()

    def connection_lost(self, exc: Exception | None) -> None:
        self._net.activity += 1
        self.connection.closed = self._net.clock.monotonic()
        self._net.wires.discard(self)
        if self._busy and self._request is not None:
            self._net.ended(self._request)
        self.gone.set()
        self.writable.set()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self._net.activity += 1
        self._buffer += data
        if not self._busy:
            self._read()

    # -- what Exchange and FakeInternet use

    def write(self, data: bytes) -> None:
        self._net.activity += 1
        request = self._request
        if self._transport.is_closing():
            return
        if request is not None and request.answered is None:
            request.answered, request.answer = self._net.clock.monotonic(), data
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    # -- reading

    def _read(self) -> None:
        """Take each complete request off the buffer; stops where one needs a task."""
        while not self._busy and not self._transport.is_closing():
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD or b"\x00" in self._buffer[:64]:
                    self._refuse(400)
                return
            head = self._buffer[:end]
            length = _content_length(head)
            if length is None:
                self._refuse(501)
                return
            if len(self._buffer) < end + 4 + length:
                return
            request = self._parse(head)
            if request is None:
                self._refuse(400)
                return
            request.body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(request)

    def _parse(self, head: bytes) -> Request | None:
        line, _, rest = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return None
        host = ""
        at = rest.lower().find(b"host:")
        while at > 0 and rest[at - 1] != 10:
            at = rest.lower().find(b"host:", at + 1)
        if at >= 0:
            host = rest[at + 5 :].partition(b"\r\n")[0].strip().decode("latin-1").lower()
        target = words[1]
        if target.startswith("http://"):  # of a client that takes us for a proxy: RFC 9112, 3.2.2
            host, slash, path = target[7:].partition("/")
            target = slash + path or "/"
        now = self._net.clock.monotonic()
        return Request(now, words[0], target, self._scheme, host, head, self.connection)

    def _answer(self, request: Request) -> None:
        self._request = request
        behaviour = self._net.arrived(request)
        reply = behaviour.reply(request)
        if reply is not None:
            data, keep = reply
            self.write(data)
            self._net.ended(request)
            if not keep:
                self.close()
            return
        self._busy = True
        self._net.spawn(self._perform(Exchange(self, request, self._net.clock), behaviour))

    async def _perform(self, exchange: Exchange, behaviour: object) -> None:
        try:
            await behaviour(exchange)  # type: ignore[operator]
        except ConnectionError:
            pass  # the client left in the middle: its right
        finally:
            self._net.ended(exchange.request)
            self._busy = False
        self._read()

    def _refuse(self, status: int) -> None:
        self.write(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        self.close()


def _content_length(head: bytes) -> int | None:
    """The length of the request's body; None where it is chunked, which nobody needs here."""
    low = head.lower()
    if b"\r\ntransfer-encoding:" in low:
        return None
    _, found, rest = low.partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0
