"""Plain requests are read as aiohttp reads them, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import aiohttp.http
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.sidecar import inline
from gatekeeper.sidecar.inline import NotPlainError, Request, RequestReader, read

MAX_LINE = 16_384
PLAIN = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nGET /"

LINES = st.sampled_from(
    [
        *(b"GET /x HTTP/1.1", b"POST /v1/check?url=a HTTP/1.1", b"DELETE /v1/leases/1 HTTP/1.1"),
        *(b"HEAD / HTTP/1.1", b"GET /x HTTP/1.0", b"GET http://a/x HTTP/1.1", b"GET /a#b HTTP/1.1"),
        *(b"get /x HTTP/1.1", b"GET  /x HTTP/1.1", b"GET /x HTTP/1.1 ", b"CONNECT /x HTTP/1.1"),
        *(b"GET /\xc3\xa9 HTTP/1.1", b"\r\nGET /x HTTP/1.1", b"GET /x\tHTTP/1.1", b"GET /x"),
    ]
)
FIELDS = st.sampled_from(
    [
        *(
            b"Host: a",
            b"Host: b",
            b"host:\ta ",
            b"Accept: */*",
            b"X: GET /x HTTP/1.1",
            b"X:",
            b": x",
        ),
        *(b"Content-Length: 5", b"Content-Length: 0", b"Content-Length:5", b"Content-Length: 05"),
        *(b"Content-Length: +5", b"Content-Length: 5, 5", b"Content-Length: -1", b"X : y"),
        *(b"Content-Length: 99999999999999999999", b"Content-Length: 5\nX: y", b"X: a\n\nb"),
        *(
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
            b"Transfer-Encoding: identity",
        ),
        *(b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"X: a\r b"),
        *(b"Upgrade: websocket", b"Content-Encoding: gzip", b"Expect: 100-continue", b" folded"),
        *(
            b"X: \xff",
            b"X: \x00",
            b"X\x00: y",
            b"X-\xc3: y",
            b"Sec-WebSocket-Key1: x",
            b"X: " + b"y" * 5000,
        ),
    ]
)
BODIES = st.sampled_from(
    [b"", b"GET /", b"\r\n\r\nx", b"GET /x HTTP/1.1\r\n\r\n", b"5\r\nGET /\r\n0\r\n\r\n"]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    fields = draw(st.lists(FIELDS, max_size=4))
    return b"\r\n".join([draw(LINES), *fields, b"", draw(BODIES)])


def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=4))})
    return [data[start:end] for start, end in itertools.pairwise(cuts)]


class Reference:
    """aiohttp's parser, as its server uses it."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            protocol = BaseProtocol(loop)
            self.parser: Any = aiohttp.http.HttpRequestParser(
                protocol, loop, 65_536, max_line_size=MAX_LINE, max_field_size=MAX_LINE
            )
        finally:
            loop.close()
        self.messages: list[Any] = []
        self.failed = False

    def feed(self, data: bytes) -> None:
        if self.failed:
            return
        try:
            messages, upgraded, _ = self.parser.feed_data(data)
        except HttpProcessingError:
            self.failed = True
            return
        self.failed = upgraded
        self.messages += messages


def seen(message: Any, payload: Any) -> tuple[object, ...]:
    assert payload.is_eof()
    body = payload.read_nowait() if payload is not aiohttp.streams.EMPTY_PAYLOAD else b""
    return message.method, message.path, message.headers, body


def in_loop(check: Any) -> None:
    async def run() -> None:
        check()

    asyncio.run(run())


@given(requests())
def test_a_request_read_inline_equals_what_aiohttp_reads(data: bytes) -> None:
    def check() -> None:
        try:
            request = read(data, MAX_LINE)
        except NotPlainError:
            return
        if request is None or request.missing:
            return
        reference = Reference()
        reference.feed(data + PLAIN)  # it ends where aiohttp says so
        assert not reference.failed
        first, second = reference.messages
        assert seen(*first) == request[:4]
        assert second[0].path == "/v1/check"
        assert not first[0].should_close

    in_loop(check)


@given(st.data())
def test_each_request_of_a_connection_is_read_once_however_it_is_cut(data: st.DataObject) -> None:
    """Octets that are not answered go to aiohttp: it must get whole requests."""

    def check() -> None:
        sent = [data.draw(st.one_of(st.just(PLAIN), requests())) for _ in range(3)]
        whole, rest, reader = Reference(), Reference(), RequestReader(MAX_LINE)
        order: list[tuple[object, ...]] = []
        for piece in data.draw(st.composite(pieces)(b"".join(sent))):
            whole.feed(piece)
            request = reader.read(piece)
            if request is not None:
                assert not rest.failed
                order += [seen(*one) for one in rest.messages]
                rest.messages.clear()
                order.append(request[:4])
            else:
                rest.feed(piece)
        expected = [one for one in whole.messages if one[1].is_eof()]
        order += [seen(*one) for one in rest.messages if one[1].is_eof()]
        assert order == [seen(*one) for one in expected]
        assert rest.failed == whole.failed

    in_loop(check)


async def test_a_connection_whose_request_came_in_pieces_is_read_again() -> None:
    reader = RequestReader(MAX_LINE)
    for cut in (1, 10, 40, len(PLAIN) - 1):
        assert reader.read(PLAIN[:cut]) is None
        assert reader.read(b"") is None
        assert reader.read(PLAIN[cut:]) is None
        assert reader.read(PLAIN) is not None
    assert reader.read(PLAIN + PLAIN[:3]) is None  # from here on aiohttp alone knows
    assert reader.read(PLAIN[3:]) is None
    assert reader.read(PLAIN) is None
    assert reader._missing == math.inf


async def test_what_is_kept_of_a_partial_request_is_bounded() -> None:
    reader = RequestReader(1024)
    for _ in range(10_000):
        assert reader.read(b"x" * 100) is None
    assert reader._head == b""
    assert reader._missing == math.inf


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 1024 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 1024 + b"\r\n\r\n",
    ],
)
async def test_lines_beyond_the_limit_are_not_read(data: bytes) -> None:
    assert read(data, MAX_LINE) is not None
    with pytest.raises(NotPlainError):
        read(data, 1024)


async def test_without_the_parser_of_aiohttp_no_request_is_read_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inline.read_fields.cache_clear()
    monkeypatch.delattr(aiohttp.http, "HttpRequestParser")
    with pytest.raises(NotPlainError):
        read(PLAIN, MAX_LINE)
    monkeypatch.undo()
    inline.read_fields.cache_clear()
    assert isinstance(read(PLAIN, MAX_LINE), Request)
