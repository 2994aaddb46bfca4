"""What a site does with a request: ordinary pages, and every way of going wrong.

Each behaviour is a frozen value; one with a state (`Hold`) says so. A behaviour that can
be answered without waiting gives its bytes in `reply`; any other is awaited as a call.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus

from tests.internet.wire import Exchange, Request

Headers = Mapping[str, str] | Sequence[tuple[str, str]]


class Behaviour:
    """The base: gives its bytes at once (`reply`), or is awaited (`__call__`)."""

    def chosen(self, request: Request) -> Behaviour:
        """The behaviour that this request gets: itself, unless it is a choice."""
        return self

    def reply(self, request: Request) -> tuple[bytes, bool] | None:
        """The whole answer and whether the connection stays open; None: await me instead."""
        return None

    async def __call__(self, exchange: Exchange) -> None:
        """Answer, or misbehave."""
        raise NotImplementedError


def head(status: int, headers: Headers, *, reason: str | None = None) -> bytes:
    """A response head, with the blank line that ends it."""
    if reason is None:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Odd"
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in pairs)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def as_bytes(body: bytes | str) -> bytes:
    """Text as UTF-8."""
    return body.encode() if isinstance(body, str) else body


def merged(defaults: Mapping[str, str], headers: Headers) -> list[tuple[str, str]]:
    """The defaults that the given headers do not name, then the given ones."""
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    named = {name.lower() for name, _ in pairs}
    return [(n, v) for n, v in defaults.items() if n.lower() not in named] + pairs


@dataclass(frozen=True)
class Page(Behaviour):
    """An ordinary answer, complete and well formed.

    `delay`: seconds of the internet's clock before the head. `headers` may repeat a name
    if given as pairs; they take the place of the default Content-Type.
    """

    body: bytes | str = b""
    status: int = 200
    headers: Headers = ()
    content_type: str | None = "text/plain; charset=utf-8"
    delay: float = 0.0
    close: bool = False
    reason: str | None = None

    @cached_property
    def _bytes(self) -> tuple[bytes, bytes]:
        body = as_bytes(self.body)
        defaults: dict[str, str] = {}
        if self.content_type and body:
            defaults["Content-Type"] = self.content_type
        if self.status not in (204, 304):
            defaults["Content-Length"] = str(len(body))
        if self.close:
            defaults["Connection"] = "close"
        return head(self.status, merged(defaults, self.headers), reason=self.reason), body

    def reply(self, request: Request) -> tuple[bytes, bool] | None:
        """The page at once, unless it has a delay."""
        return None if self.delay else self.render(request)

    def render(self, request: Request) -> tuple[bytes, bool]:
        """The bytes of the answer to this request."""
        start, body = self._bytes
        return (start if request.method == "HEAD" else start + body), not self.close

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.clock.sleep(self.delay)
        data, keep = self.render(exchange.request)
        await exchange.send(data)
        if not keep:
            exchange.close()


def html(body: str, **options: object) -> Page:
    """A page of HTML."""
    return Page(body, content_type="text/html; charset=utf-8", **options)  # type: ignore[arg-type]


def redirect(location: str, status: int = 302) -> Page:
    """A redirect; `location` is sent exactly as given."""
    return Page(b"", status, [("Location", location)])


@dataclass(frozen=True)
class Conditional(Behaviour):
    """A page with validators: 304 to a client that names one of them."""

    page: Page
    etag: str | None = None
    last_modified: str | None = None
    not_modified_headers: Headers = ()

    def reply(self, request: Request) -> tuple[bytes, bool] | None:
        """304 if the request's validator is ours, the page with its validators otherwise."""
        asked = request.headers
        validators = {"ETag": self.etag, "Last-Modified": self.last_modified}
        ours = [(name, value) for name, value in validators.items() if value is not None]
        if (self.etag is not None and asked.get("If-None-Match") == self.etag) or (
            "If-None-Match" not in asked
            and self.last_modified is not None
            and asked.get("If-Modified-Since") == self.last_modified
        ):
            return head(304, [*ours, *merged({}, self.not_modified_headers)]), True
        page = self.page
        headers = [*merged({}, page.headers), *ours]
        return Page(page.body, page.status, headers, page.content_type).render(request)


@dataclass(frozen=True)
class Drip(Behaviour):
    """The body in pieces of `size` bytes, one every `every` seconds of the clock.

    `every` may be an asyncio.Semaphore instead: each release lets one piece go.
    """

    body: bytes | str
    size: int = 1
    every: float | asyncio.Semaphore = 0.5
    status: int = 200
    headers: Headers = ()

    async def __call__(self, exchange: Exchange) -> None:
        body = as_bytes(self.body)
        defaults = {"Content-Type": "text/plain", "Content-Length": str(len(body))}
        await exchange.send(head(self.status, merged(defaults, self.headers)))
        for at in range(0, len(body), self.size):
            if isinstance(self.every, asyncio.Semaphore):
                await self.every.acquire()
            else:
                await exchange.clock.sleep(self.every)
            await exchange.send(body[at : at + self.size])


@dataclass(frozen=True, eq=False)
class Hold(Behaviour):
    """Answers with `then` once `release()` is called: to see what waits meanwhile."""

    then: Behaviour = field(default_factory=Page)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Acquire it to wait until a request has arrived."""

    def release(self) -> None:
        """Let everything go that waits or will come."""
        self._open.set()

    async def __call__(self, exchange: Exchange) -> None:
        self.waiting.release()
        await self._open.wait()
        then = self.then.chosen(exchange.request)
        reply = then.reply(exchange.request)
        if reply is None:
            await then(exchange)
            return
        await exchange.send(reply[0])
        if not reply[1]:
            exchange.close()


@dataclass(frozen=True)
class Interim(Behaviour):
    """Interim answers (1xx), `times` of them and then an answer, or again and again for ever."""

    status: int = 100
    times: int | None = None
    then: Behaviour = field(default_factory=lambda: Page("welcome"))
    headers: Headers = ()

    async def __call__(self, exchange: Exchange) -> None:
        one = head(self.status, merged({}, self.headers))
        if self.times is None:
            while True:
                await exchange.send(one * 10_000)  # before it looks whether anybody reads
                await asyncio.sleep(0)
        await exchange.send(one * self.times)
        reply = self.then.chosen(exchange.request).reply(exchange.request)
        assert reply is not None
        await exchange.send(reply[0])


@dataclass(frozen=True)
class NeverAnswer(Behaviour):
    """Takes the request and says nothing until the client goes."""

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.gone.wait()


@dataclass(frozen=True)
class Stall(Behaviour):
    """Sends the head and the beginning of the body, then nothing until the client goes."""

    body: bytes | str = b"User-agent: *\n"
    more: int = 1000
    """Bytes that the head promises beyond the body."""
    status: int = 200

    async def __call__(self, exchange: Exchange) -> None:
        body = as_bytes(self.body)
        await exchange.send(
            head(self.status, {"Content-Length": str(len(body) + self.more)}) + body
        )
        await exchange.gone.wait()


@dataclass(frozen=True)
class Raw(Behaviour):
    """Exactly these bytes; then "close", "keep" or "reset" the connection.

    For bad heads, statuses outside 100 to 599, interim responses, whatever comes to mind.
    """

    data: bytes
    then: str = "close"

    def reply(self, request: Request) -> tuple[bytes, bool] | None:
        """The bytes."""
        return None if self.then == "reset" else (self.data, self.then == "keep")

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.send(self.data)
        await asyncio.sleep(0)
        exchange.reset()


@dataclass(frozen=True)
class Truncated(Behaviour):
    """Promises `missing` bytes more than it sends, and closes."""

    body: bytes | str
    missing: int = 100
    headers: Headers = ()
    reset: bool = False

    async def __call__(self, exchange: Exchange) -> None:
        body = as_bytes(self.body)
        length = {"Content-Type": "text/plain", "Content-Length": str(len(body) + self.missing)}
        await exchange.send(head(200, merged(length, self.headers)) + body)
        await asyncio.sleep(0)
        if self.reset:
            exchange.reset()
        else:
            exchange.close()


@dataclass(frozen=True)
class BrokenChunk(Behaviour):
    """A chunked body that ends in the middle of a chunk, or with a size that is none."""

    body: bytes | str
    garbage: bool = False

    async def __call__(self, exchange: Exchange) -> None:
        body = as_bytes(self.body)
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        tail = b"zz\r\n" if self.garbage else b"40\r\nthis chunk ends too"
        headers = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
        await exchange.send(head(200, headers) + chunk + tail)
        await asyncio.sleep(0)
        exchange.close()


@dataclass(frozen=True)
class Reset(Behaviour):
    """RST: before the head, or after the head and some of the body (`after`)."""

    after: bytes | None = None

    async def __call__(self, exchange: Exchange) -> None:
        if self.after is not None:
            length = str(len(self.after) + 100)
            await exchange.send(head(200, {"Content-Length": length}) + self.after)
            await asyncio.sleep(0)
        exchange.reset()


@dataclass(frozen=True)
class CloseSilently(Behaviour):
    """Reads the request and closes without a word."""

    async def __call__(self, exchange: Exchange) -> None:
        exchange.close()


@dataclass(frozen=True)
class Encoded(Behaviour):
    """A body with Content-Encoding, sound or damaged.

    `damage`: None, "garbage" (not compressed at all), "cut" (the stream ends early) or
    "flipped" (bytes changed in the middle).
    """

    body: bytes | str
    encoding: str = "gzip"
    damage: str | None = None
    headers: Headers = ()

    def reply(self, request: Request) -> tuple[bytes, bool] | None:
        """The head and the (perhaps damaged) body."""
        plain = as_bytes(self.body)
        data = gzip.compress(plain) if self.encoding == "gzip" else zlib.compress(plain)
        if self.damage == "garbage":
            data = plain
        elif self.damage == "cut":
            data = data[: len(data) // 2]
        elif self.damage == "flipped":
            middle = len(data) // 2
            data = data[:middle] + bytes(b ^ 0xFF for b in data[middle : middle + 8]) + data[-8:]
        defaults = {
            "Content-Type": "text/plain",
            "Content-Encoding": self.encoding,
            "Content-Length": str(len(data)),
        }
        return head(200, merged(defaults, self.headers)) + data, True


@dataclass(frozen=True)
class Bomb(Behaviour):
    """A gzip body that grows to `size` bytes; sent in pieces, as the client reads."""

    size: int = 2**30
    filler: bytes = b"#" * 65_536

    async def __call__(self, exchange: Exchange) -> None:
        headers = {
            "Content-Type": "text/plain",
            "Content-Encoding": "gzip",
            "Connection": "close",
        }
        await exchange.send(head(200, headers))
        squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
        for _ in range(self.size // len(self.filler)):
            data = squeeze.compress(self.filler)
            if data:
                await exchange.send(data)
        await exchange.send(squeeze.flush())
        exchange.close()


@dataclass(frozen=True)
class Custom(Behaviour):
    """A function of the test: `async def act(exchange)`, or `def choose(request) -> Behaviour`."""

    act: Callable[[Exchange], Awaitable[None]] | None = None
    choose: Callable[[Request], Behaviour] | None = None

    def chosen(self, request: Request) -> Behaviour:
        """What the function chooses, if there is one; asked once a request."""
        return self.choose(request).chosen(request) if self.choose else self

    async def __call__(self, exchange: Exchange) -> None:
        assert self.act is not None, "Custom needs `act` or `choose`"
        await self.act(exchange)
