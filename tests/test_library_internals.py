"""Heads: long ones are read, within bounds; a flood of interim answers (1xx) ends with its
connection, and holds nobody up. Private names of aiohttp and yarl stand in one module."""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from gatekeeper import Gatekeeper
from gatekeeper import library_internals as interim
from gatekeeper.decision import Reason, Verdict
from gatekeeper.errors import ConfigError, MissingExtra
from gatekeeper.library_internals import MAX_HEAD_OCTETS, MAX_INTERIM_ANSWERS, limit_heads
from gatekeeper.session import guarded_connector, plain_session, polite_session, session_gate
from tests.gate_support import open_config
from tests.internet import FakeInternet, Interim, Raw

CONFIG = open_config(pacing={"default_interval": 0, "min_interval": 0})
FLOODS = (100, 102, 103)
ENDLESS = 60.0
"""Seconds, as a backstop: an endless flood that is read never ends by itself."""


@asynccontextmanager
async def a_polite_session(net: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with polite_session("testbot/1.0", config=CONFIG, resolver=net.resolver) as session:
        yield session


@asynccontextmanager
async def the_middleware(net: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with AsyncExitStack() as stack:
        gate = await stack.enter_async_context(
            Gatekeeper("testbot/1.0", config=CONFIG, resolver=net.resolver)
        )
        yield await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=gate.parts.make_connector(),
                middlewares=(gate.middleware,),
                headers={"User-Agent": "testbot/1.0"},
            )
        )


@asynccontextmanager
async def the_connector_alone(net: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    connector = guarded_connector(CONFIG, resolver=net.resolver)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


SESSIONS = {one.__name__: one for one in (a_polite_session, the_middleware, the_connector_alone)}


@pytest.mark.parametrize("status", FLOODS)
@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_flood_of_interim_responses_fails_the_request(
    internet: FakeInternet, kind: str, status: int
) -> None:
    internet.site("a.test").robots("").on("/flood", Interim(status)).page("/", "still there")
    async with SESSIONS[kind](internet) as session, asyncio.timeout(ENDLESS):
        with pytest.raises(aiohttp.ClientResponseError, match="interim answers"):
            await session.get("http://a.test/flood")
        async with session.get("http://a.test/") as response:
            assert await response.text() == "still there"


@pytest.mark.parametrize("kind", SESSIONS)
async def test_interim_responses_up_to_the_limit_are_accepted(
    internet: FakeInternet, kind: str
) -> None:
    site = internet.site("a.test").robots("")
    site.on("/few", Interim(103, MAX_INTERIM_ANSWERS, headers={"Link": "</s.css>; rel=preload"}))
    site.on("/many", Interim(103, MAX_INTERIM_ANSWERS + 1))
    async with SESSIONS[kind](internet) as session, asyncio.timeout(ENDLESS):
        for _ in range(2):  # the second one over the same connection, counted anew
            async with session.get("http://a.test/few") as response:
                assert await response.text() == "welcome"
        with pytest.raises(aiohttp.ClientResponseError):
            await session.get("http://a.test/many")
    assert len({id(request.connection) for request in site.requests if request.path == "/few"}) == 1


@pytest.mark.parametrize(("size", "passes"), [(25_000, True), (30_000, False)])
async def test_interim_responses_are_bounded_in_octets(
    internet: FakeInternet, size: int, passes: bool
) -> None:
    large = Interim(103, 10, headers={"Link": "x" * size})
    internet.site("a.test").robots("").on("/large", large)
    assert (10 * size < MAX_HEAD_OCTETS) is passes
    async with a_polite_session(internet) as session, asyncio.timeout(ENDLESS):
        if passes:
            async with session.get("http://a.test/large") as response:
                assert response.status == 200
        else:
            with pytest.raises(aiohttp.ClientResponseError, match="octets"):
                await session.get("http://a.test/large")


@pytest.mark.parametrize("status", FLOODS)
async def test_a_robots_txt_behind_a_flood_of_interim_responses_defers(
    internet: FakeInternet, status: int
) -> None:
    internet.site("a.test").on("/robots.txt", Interim(status))
    async with Gatekeeper("testbot/1.0", config=CONFIG, resolver=internet.resolver) as gate:
        async with asyncio.timeout(ENDLESS):
            decision = await gate.check("http://a.test/")
        assert decision.verdict is Verdict.DEFER


@pytest.mark.parametrize("status", FLOODS)
async def test_a_robots_txt_behind_a_flood_defers_over_a_callers_session(
    internet: FakeInternet, status: int
) -> None:
    site = internet.site("a.test").on("/robots.txt", Interim(status))
    internet.site("b.test").on("/robots.txt", Interim(status, MAX_INTERIM_ANSWERS))
    async with internet.session() as session:
        gate = Gatekeeper("testbot/1.0", config=CONFIG, session=session)
        async with gate, asyncio.timeout(ENDLESS):
            assert (await gate.check("http://a.test/")).verdict is Verdict.DEFER
            assert (await gate.check("http://b.test/")).robots_status == 200
    assert len(site.requests) == 1


LONG_HEADS = {
    "one field": b"X-Long: " + b"x" * 60_000 + b"\r\n",
    "the reason": b"",
    "many fields": b"".join(b"X-%d: y\r\n" % n for n in range(2_000)),
    "many long fields": b"".join(b"X-%d: %s\r\n" % (n, b"y" * 9_000) for n in range(28)),
}
TOO_LONG_HEADS = {
    "one field": b"X-Long: " + b"x" * 66_000 + b"\r\n",
    "many fields": b"X: y\r\n" * 9_000,
    "many long fields": b"".join(b"X-%d: %s\r\n" % (n, b"y" * 9_000) for n in range(31)),
    "endless fields": b"X: y\r\n" * 400_000,
}


def long_head(fields: bytes) -> Raw:
    reason = b"OK" if fields else b"O" + b"K" * 60_000
    start = b"HTTP/1.1 200 %s\r\nContent-Type: text/plain\r\nContent-Length: 27\r\n" % reason
    return Raw(start + fields + b"\r\nUser-agent: *\nDisallow: /p\n", "keep")


@asynccontextmanager
async def a_plain_session(net: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with plain_session("testbot/1.0", config=CONFIG, resolver=net.resolver) as session:
        yield session


@pytest.mark.parametrize("kind", LONG_HEADS)
async def test_a_long_head_is_read(internet: FakeInternet, kind: str) -> None:
    """RFC 9309 section 2.3.1.1, RFC 9110 section 5.4: for robots.txt and for pages."""
    answer = long_head(LONG_HEADS[kind])
    internet.site("a.test").on("/robots.txt", answer).on("/text", answer)
    for session in (a_polite_session, a_plain_session):
        async with session(internet) as client, client.get("http://a.test/text") as page:
            assert (await page.text()).startswith("User-agent")
    async with (
        internet.session() as lent,  # a session of the caller, with aiohttp's limits
        Gatekeeper("testbot/1.0", config=CONFIG, session=lent) as gate,
    ):
        assert (await gate.check("http://a.test/p")).rule is not None


@pytest.mark.parametrize("kind", TOO_LONG_HEADS)
async def test_a_head_is_bounded_in_its_fields_and_as_a_whole(
    internet: FakeInternet, kind: str
) -> None:
    answer = long_head(TOO_LONG_HEADS[kind])
    internet.site("a.test").robots("").on("/text", answer)
    internet.site("b.test").on("/robots.txt", answer)
    async with a_polite_session(internet) as session:
        with pytest.raises(aiohttp.ClientResponseError):
            await session.get("http://a.test/text")
        decision = await session_gate(session).check("http://b.test/")
        assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.INVALID_RESPONSE)


async def test_a_caller_may_set_other_head_limits(internet: FakeInternet) -> None:
    internet.site("a.test").robots("").on("/text", long_head(LONG_HEADS["one field"]))
    async with polite_session(
        "testbot/1.0", config=CONFIG, resolver=internet.resolver, max_field_size=8_190
    ) as session:
        with pytest.raises(aiohttp.ClientResponseError):
            await session.get("http://a.test/text")


def test_every_session_of_the_package_has_these_limits() -> None:
    """The gate's own lends only its connector."""
    made = [
        (path.stem, ast.unparse(call))
        for path in Path(interim.__file__).parent.rglob("*.py")
        if re.search(r"ClientSession\)?\(", text := path.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and any(getattr(part, "attr", "") == "ClientSession" for part in ast.walk(call.func))
    ]
    assert len(made) > 5
    without = [name for name, call in made if "HEAD_LIMITS" not in call]
    assert without == ["gatekeeper"]


class Closed(asyncio.Transport):
    """A transport that takes note of being closed."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.fixture
async def asked() -> AsyncIterator[Callable[[], tuple[Any, Closed]]]:
    """`asked()`: a protocol whose request was sent, and its transport."""
    made: list[ResponseHandler] = []

    def make() -> tuple[Any, Closed]:
        protocol, transport = ResponseHandler(asyncio.get_running_loop()), Closed()
        made.append(protocol)
        protocol.connection_made(transport)
        limit_heads(protocol)
        protocol.set_response_params()
        return protocol, transport

    yield make
    for protocol in made:
        protocol.connection_lost(None)


FLOOD = b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many octets aiohttp was given at a time."""
    pieces: list[int] = []

    def count(protocol: ResponseHandler, data: bytes) -> None:
        pieces.append(len(data))
        ResponseHandler.data_received(protocol, data)

    monkeypatch.setattr(interim, "_parse_data", count)
    return pieces


async def test_a_response_without_interim_ones_is_read_in_one_piece(
    asked: Callable[[], tuple[Any, Closed]], read: list[int]
) -> None:
    """It is what most pages are; each further piece costs as much as the first."""
    protocol, transport = asked()
    for _ in range(2):
        protocol.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9_000)
        _, payload = await protocol.read()
        assert len(await payload.read()) == 9_000
        protocol.set_response_params()
    assert [size for size in read if size] == [9_041] * 2
    assert not transport.closed


@pytest.mark.parametrize("begin", [ANSWER, b"HTTP/1.1 103 Early\r\n\r\n" + ANSWER])
async def test_after_one_interim_response_too_many_no_more_is_read(
    asked: Callable[[], tuple[Any, Closed]], read: list[int], begin: bytes
) -> None:
    protocol, transport = asked()
    protocol.data_received(begin + ANSWER * 5_000)
    assert transport.closed
    assert sum(read) <= 4_096


async def test_only_a_small_part_of_a_flood_is_read(
    asked: Callable[[], tuple[Any, Closed]], read: list[int]
) -> None:
    protocol, transport = asked()
    protocol.data_received(FLOOD)
    protocol.data_received(FLOOD)

    assert transport.closed
    assert sum(read) <= 4_096
    assert len(protocol) == MAX_INTERIM_ANSWERS  # what is queued for the request
    for _ in range(MAX_INTERIM_ANSWERS):
        await protocol.read()
    with pytest.raises(HttpProcessingError):
        await protocol.read()


@pytest.mark.parametrize("more", [FLOOD, ANSWER * 1000])
async def test_octets_after_the_response_close_the_connection(
    asked: Callable[[], tuple[Any, Closed]], more: bytes
) -> None:
    protocol, transport = asked()
    protocol.data_received(ANSWER + more[:65_536])
    message, payload = await protocol.read()

    assert (message.code, await payload.read()) == (200, b"ok")
    assert transport.closed
    assert len(protocol) == 0


async def test_octets_on_an_idle_connection_close_it(
    asked: Callable[[], tuple[Any, Closed]],
) -> None:
    protocol, transport = asked()
    protocol.data_received(ANSWER)
    await protocol.read()
    assert not transport.closed
    protocol.data_received(FLOOD[:65_536])

    assert transport.closed
    assert protocol.should_close
    assert len(protocol) == 0


async def test_a_connection_holds_no_parser_of_an_earlier_request(
    asked: Callable[[], tuple[Any, Closed]],
) -> None:
    """With what it holds it would be looked through by the collector, for each request."""
    protocol, _ = asked()
    protocol.data_received(ANSWER)
    await protocol.read()
    parser = protocol._parser
    protocol.set_response_params()
    references = sys.getrefcount(parser)
    assert references <= 2  # ours, and that of the call


async def test_a_protocol_of_another_kind_is_left_alone() -> None:
    class Other(ResponseHandler):
        pass

    other = Other(asyncio.get_running_loop())
    limit_heads(other)
    limit_heads(object())
    assert type(other) is Other


def test_a_flood_of_interim_responses_is_refused_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with FakeInternet() as net:
            net.site("a.test").robots("").on("/flood", Interim())
            async with the_connector_alone(net) as session, asyncio.timeout(ENDLESS):
                with pytest.raises(aiohttp.ClientResponseError, match="interim answers"):
                    await session.get("http://a.test/flood")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _private(tree: ast.AST) -> set[tuple[str, bool | None]]:
    """Names `_x` that are looked up, with True on `self` and `super()`, with False on anything
    else; with None those of functions."""
    return {
        (node.name, None)
        if not isinstance(node, ast.Attribute)
        else (node.attr, _is_self(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr))
        if getattr(node, "attr", "") not in _OF_NAMED_TUPLES
    }


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and not node.args:
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


_OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
"""Documented names of `typing.NamedTuple`, which begin with an underscore only to leave the field
names free."""


@functools.cache
def _private_of(made: type) -> set[tuple[str, bool | None]]:
    return _private(ast.parse(inspect.getsource(made)))


def _modules() -> dict[str, ast.Module]:
    root = Path(interim.__file__).parent
    return {
        ".".join(("gatekeeper", *path.relative_to(root).with_suffix("").parts)): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in root.rglob("*.py")
        if path.stem not in ("__init__", "__main__", "library_internals")
    }


def test_a_transport_without_a_pool_of_that_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="PoliteTransport does not fit"):
        interim.connect_through(object(), object())


def test_private_names_of_other_packages_stand_in_this_module_alone() -> None:
    modules = _modules()
    looked_up = {module: _private(tree) for module, tree in modules.items()}
    ours = {name for names in looked_up.values() for name, of_self in names if of_self is not False}
    found = {
        (module, name)
        for module, names in looked_up.items()
        for name, of_self in names
        if of_self is False and name not in ours
    }
    for module, tree in modules.items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            try:
                made = getattr(importlib.import_module(module), node.name)
            except MissingExtra:  # that of mitmproxy needs Python 3.12
                continue
            inherited = {
                name
                for base in made.__mro__[1:]
                if base.__module__.partition(".")[0] in ("aiohttp", "yarl")
                for name, of_self in _private_of(base)
                if of_self
            }
            found |= {
                (module, name) for name, of_self in _private(node) if of_self and name in inherited
            }
    assert found == set()
