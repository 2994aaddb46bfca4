"""Malformed request bodies: an immediate problem document, and no internal error."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import zlib
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gatekeeper.client.wire import Batch
from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.routes.check import WhatIf
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.routing import Problem, read_body
from tests.effort import of_many
from tests.internet import FakeInternet
from tests.sidecar.conftest import connected, sent

QUESTION = b'{"urls":[]}'


async def answer(service: Any, head: str, body: bytes, then: bytes = b"") -> bytes:
    """Send the octets on a connection that stays open, and return the head of the response.

    `then`: the beginning of a further request, sent afterwards; return the head of its response.
    """
    start = "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    async with connected(service.base) as (reader, writer):
        writer.write(f"{start}{head}\r\n\r\n".encode() + body)
        got = await reader.readuntil(b"\r\n\r\n")
        if then:
            length = got.lower().partition(b"content-length:")[2].split()[0]
            await reader.readexactly(int(length))
            writer.write(then)
            got = await reader.readuntil(b"\r\n\r\n")
    return got


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "x-unknown"])
@pytest.mark.parametrize("packed", [True, False])
async def test_an_encoded_body_is_415(
    serve: Any, caplog: pytest.LogCaptureFixture, encoding: str, packed: bool
) -> None:
    body = QUESTION
    if packed:
        body = zlib.compress(body) if encoding == "deflate" else gzip.compress(body)
    service = await serve()
    with caplog.at_level(logging.ERROR):
        head = f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}"
        got = await answer(service, head, body)
        # A false encoding is not decoded: that would break the connection under the next request.
        then = await answer(service, head, body, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")

    assert got.split()[1] == b"415"
    assert then.split()[1] == b"200"
    assert caplog.records == []


async def test_a_client_that_expects_100_continue_gets_it(serve: Any) -> None:
    service = await serve()
    head = f"Expect: 100-continue\r\nContent-Length: {len(QUESTION)}"
    start = "POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    async with connected(service.base) as (reader, writer), asyncio.timeout(10.0):
        writer.write(f"{start}{head}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(QUESTION)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_client_of_http_1_0_gets_no_100_continue(serve: Any) -> None:
    """It would take that for the response (RFC 9110 section 10.1.1)."""
    service = await serve()
    start = "POST /v1/check HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head = f"Expect: 100-continue\r\nContent-Length: {len(QUESTION)}"
    async with connected(service.base) as (reader, writer), asyncio.timeout(10.0):
        writer.write(f"{start}{head}\r\n\r\n".encode() + QUESTION[:1])
        for _ in range(200):
            await asyncio.sleep(0)  # The service begins to wait for the rest.
        writer.write(QUESTION[1:])
        got = await reader.readuntil(b"\r\n\r\n")
    assert got.split()[:2] == [b"HTTP/1.0", b"200"]


async def test_a_malformed_chunk_is_400_at_once(caplog: pytest.LogCaptureFixture) -> None:
    reading = asyncio.Event()

    async def read(request: web.BaseRequest) -> web.StreamResponse:
        reading.set()
        try:
            await read_body(request, Batch, limit=1000)
        except Problem as problem:
            return problem.response()
        raise AssertionError("it was read")

    runner = web.ServerRunner(Server(read, header=8192))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    with caplog.at_level(logging.ERROR):
        writer.write(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nb\r\n" + QUESTION + b"\r\n"
        )
        await reading.wait()
        writer.write(b"zz\r\n")
        got = await reader.read()
    writer.close()
    await runner.cleanup()

    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.") == 1
    assert caplog.records == []


async def test_a_chunked_body_is_read(serve: Any) -> None:
    service = await serve()
    body = b"b\r\n" + QUESTION + b"\r\n0\r\n\r\n"
    assert (await answer(service, "Transfer-Encoding: chunked", body)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("wait", [300.5, 9999])
async def test_a_wait_beyond_max_wait_is_refused_with_the_limit(serve: Any, wait: float) -> None:
    service = await serve()
    status, problem = await service.post("/v1/leases", {"url": "http://a.test/", "wait": wait})
    assert (status, problem["most"]) == (400, 300)
    assert problem["detail"] == "body: `wait` may be 300 at most (server.max_wait) - at `$.wait`"


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/v1/leases", b'{"url": "http://a.test/", "id": "\\ud800"}', "'id'"),
        ("/v1/check", b'{"urls": [], "user_agent": "\\udfff"}', "'user_agent'"),
        ("/v1/check", b'{"urls": [], "\\ud800": 1}', r"'\ud800'"),
        ("/v1/check", b'{"urls": ["\\ud800"], "user_agent": 1}', "$.user_agent"),
        ("/v1/check", b'{"urls": ["\xff"]}', "UTF-8"),
        ("/v1/hosts/a.test/pause", b"", "send {}"),
        ("/v1/hosts/a.test/pause", b'{"x": 1}', "`x`; known: none"),
        ("/v1/check", b'{"url": "http://a.test/"}', "`url`; known: `urls`, `user_agent`"),
    ],
)
async def test_a_refusal_names_the_field_and_the_remedy(
    serve: Any, path: str, body: bytes, detail: str
) -> None:
    service = await serve()
    headers = {"Content-Type": "application/json"}
    async with service.session.post(service.base + path, data=body, headers=headers) as response:
        assert response.status == 400
        assert detail in (await response.json(content_type=None))["detail"]


@pytest.mark.parametrize(
    ("query", "choices"),
    [
        ("hosts?state=x", "give one of free, waiting, busy, deferred, blocked, paused"),
        ("hosts?sort=", "give one of host, -host, next, -next"),
        ("leases?state=", "give one of any, held, waiting"),
        ("events?verdict=maybe", "give one of any, allow, deny, defer"),
        ("events?reason=typo", "matching regex '^(rule|no_rule|"),
    ],
)
async def test_an_unknown_choice_is_answered_with_the_known_ones(
    serve: Any, query: str, choices: str
) -> None:
    service = await serve()
    async with service.session.get(f"{service.base}/v1/{query}") as response:
        assert response.status == 400
        assert choices in (await response.json(content_type=None))["detail"]


@pytest.mark.parametrize(
    "head",
    [
        f"GET /v1/check?url=http://a.test/{'a' * 70_000} HTTP/1.1\r\nHost: a",
        f"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Long: {'a' * 70_000}",
    ],
)
async def test_a_line_that_is_too_long_is_answered_with_the_limit(serve: Any, head: str) -> None:
    service = await serve()
    got = await sent(service.base, f"{head}\r\n\r\n".encode())
    assert b" 400 " in got.splitlines()[0]
    assert b"server.max_header; ask about long URLs by POST /v1/check" in got


DENIED = "http://a.test/no"
VALID: dict[str, object] = {
    "url": DENIED,
    "urls": [DENIED],
    "robots_txt": "User-agent: *\nDisallow: /no\n",
    "user_agent": "otherbot",
    "seconds": 1,
}
"""Values of the fields that a body needs, so that the one under test is reached."""
HALVES = [
    r'"\ud800"',
    r'"http://a.test/\udfff"',
    r'["\ud800"]',
    r'{"\ud800":1}',
    r'[{"\ud800":[]}]',
]
VALUES = [
    *(
        "null",
        "true",
        "0",
        "-1",
        "0.5",
        "1e15",
        "1e300",
        "1e400",
        "-1e400",
        "9" * 400,
        "9" * 5000,
        "NaN",
    ),
    *('""', '"text"', r'"\u0000"', '"é"', '"' + "x" * 5000 + '"', "[]", '[""]', "[1,null]", "[[]]"),
    *("{}", '{"a":1}', "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 50_000),
    *HALVES,
]
"""JSON texts of every type; some are too large or too deep, or no JSON."""
STRUCTS = {
    **{(one.method, one.path): one.body for one in ROUTES if one.body is not None},
    ("POST", "/ui/what-if"): WhatIf,
}


@pytest.mark.parametrize(("method", "path"), STRUCTS)
async def test_no_request_body_causes_an_internal_error(
    serve: Any, internet: FakeInternet, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    """Every JSON type in every field, alone and beside half of a character in another field."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    service = await serve()
    kind: Any = STRUCTS[method, path]
    fields = msgspec.structs.fields(kind)
    base = {one.encode_name: VALID[one.encode_name] for one in fields if one.required}
    bodies = [*VALUES]
    for name in [*(one.encode_name for one in fields), "unknown"]:
        others = "".join(f",{json.dumps({k: v})[1:-1]}" for k, v in base.items() if k != name)
        bodies += [f'{{"{name}":{value}{others}}}' for value in VALUES]
        bodies += [f'{{"{name}":{value},"url":{HALVES[0]}}}' for value in VALUES]
    where = path.replace("{host}", "a.test").replace("{id}", "A" * 20)
    headers = {"Content-Type": "application/json"}
    with caplog.at_level(logging.ERROR):
        for body in random.sample(bodies, of_many(len(bodies))):
            async with service.session.request(
                method, service.base + where, data=body.encode(), headers=headers
            ) as response:
                text = await response.read()
            assert response.status < 500, (body[:100], text)
    assert caplog.records == []
