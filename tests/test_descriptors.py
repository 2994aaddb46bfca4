"""File descriptors: idle connections are bounded, and give way when there are none left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gatekeeper import Config, Gatekeeper, descriptors, polite_session, session_gate
from gatekeeper.fetching.guard import GuardedConnector
from gatekeeper.integrations.hops import begin
from gatekeeper.library_internals import close_pooled
from tests import descriptors_program as program
from tests.internet import FakeInternet
from tests.processes import PYTHON

FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
WAYS = ["gate", "session", "connector", "httpx", "crawlee", "httpx_sync", "requests"]


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def circular() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    return one


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (FULL, True),
        (OSError(errno.ENFILE, "too many in the system"), True),
        (socket.gaierror(errno.EMFILE, "Too many open files"), True),
        (caused(RuntimeError("a library's"), caused(ValueError("its cause"), FULL)), True),
        (ExceptionGroup("several", [OSError(errno.ECONNREFUSED, "no"), FULL]), True),
        (OSError("Multiple exceptions: [Errno 111] no, [Errno 24] Too many open files"), True),
        (OSError("Multiple exceptions: [Errno 111] no, [Errno 113] no"), False),
        (OSError(errno.ENOMEM, "no memory"), False),
        (socket.gaierror(socket.EAI_AGAIN, "later"), False),
        (circular(), False),
        (TimeoutError(), False),
    ],
)
def test_a_shortage_of_descriptors_is_recognised_in_every_wrapping_error(
    error: Exception, short: bool
) -> None:
    assert descriptors.is_shortage(error) is short


def test_the_limit_of_idle_connections_is_a_share_or_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for files, limit in ((1024, 256), (2, 1), (None, 16_384), (10**9, 16_384)):
        monkeypatch.setattr(descriptors, "open_files_limit", lambda files=files: files)
        assert descriptors.idle_limit(None) == limit
        assert descriptors.idle_limit(7) == 7


async def test_of_too_many_idle_connections_the_oldest_are_closed(internet: FakeInternet) -> None:
    names = [f"{letter}.test" for letter in "abcdef"]
    for name in names:
        internet.site(name).page("/x")
    config = Config.from_dict({**program.LOOSE, "fetch": {"max_idle_connections": 3}})
    async with Gatekeeper("examplebot/1.0", config=config, resolver=internet.resolver) as gate:
        for name in names:
            await gate.check(f"http://{name}/x")
        dialled = gate.parts.guard.stats().dialled  # type: ignore[union-attr]
        connector = gate.parts.connector
        async with aiohttp.ClientSession(connector=connector, connector_owner=False) as session:

            async def new(name: str) -> int:
                before = gate.parts.guard.stats().dialled  # type: ignore[union-attr]
                async with session.get(f"http://{name}/x") as page:
                    await page.read()
                return gate.parts.guard.stats().dialled - before  # type: ignore[union-attr]

            assert dialled == len(names)
            assert [await new(name) for name in ("f.test", "e.test", "d.test")] == [0, 0, 0]
            assert await new("a.test") == 1
            assert await new("f.test") == 1  # it has become the oldest
            assert await new("a.test") == 0


@pytest.mark.parametrize(("cause", "counts"), [(FULL, False), (ConnectionError("no"), True)])
async def test_a_dial_without_a_descriptor_says_nothing_about_the_host(
    internet: FakeInternet, cause: OSError, counts: bool
) -> None:
    internet.site("a.test").robots("")
    config = Config.from_dict(program.LOOSE)
    async with Gatekeeper("examplebot/1.0", config=config, resolver=internet.resolver) as gate:
        for _ in range(4):
            hop = await begin(gate, "http://a.test/x", None)
            hop.end(by_network=True, unconnected=caused(RuntimeError("a library's"), cause))
        views = [str(view) for view in await gate.why("a.test")]
    assert any("errors in a row" in view for view in views) is counts


@pytest.mark.parametrize(("cause", "counts"), [(FULL, False), (ConnectionError("no"), True)])
async def test_a_session_without_a_descriptor_says_nothing_about_the_host(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch, cause: OSError, counts: bool
) -> None:
    internet.site("a.test").robots("")
    config = Config.from_dict(program.LOOSE)

    refused, open_socket = False, GuardedConnector.open_socket

    def fail(connector: GuardedConnector, info: Any) -> socket.socket:
        if refused:
            raise cause
        return open_socket(connector, info)

    monkeypatch.setattr(GuardedConnector, "open_socket", fail)
    agent, resolver = "examplebot/1.0", internet.resolver
    async with polite_session(agent, config=config, resolver=resolver) as session:
        gate = session_gate(session)
        await gate.check("http://a.test/x")
        assert session.connector is not None
        close_pooled(session.connector)
        refused = True
        for _ in range(4):
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get("http://a.test/x")
        views = [str(view) for view in await gate.why("a.test")]
    assert any("errors in a row" in view for view in views) is counts


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every request, and keep the connection open."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n#ok\n")
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


_found: dict[str, Any] = {}


@pytest_asyncio.fixture
async def found() -> AsyncIterator[dict[str, Any]]:
    """What the program reports; it runs once."""
    if not _found:
        hosts = [f"127.0.7.{number}" for number in range(1, program.BEFORE + program.AFTER + 1)]
        with socket.socket() as free:
            free.bind((hosts[0], 0))
            port = free.getsockname()[1]
        async with await asyncio.start_server(_serve, hosts, port):
            arguments = ("-m", program.__name__, str(port))
            process = await asyncio.create_subprocess_exec(
                PYTHON, *arguments, stdout=asyncio.subprocess.PIPE
            )
            _found.update(json.loads((await process.communicate())[0]))
    yield _found


@pytest.mark.parametrize("way", WAYS)
async def test_a_new_origin_is_reached_although_idle_connections_take_every_descriptor(
    found: dict[str, Any], way: str
) -> None:
    assert found[f"by_{way}"] == [200] * program.AFTER


async def test_a_lasting_shortage_of_descriptors_defers_and_names_the_limit(
    found: dict[str, Any],
) -> None:
    *short, later = found["without_idle"]
    for verdict, reason, note in short:  # by its address, and by a name, which is looked up
        assert (verdict, reason) == ("defer", "overloaded")
        assert f"RLIMIT_NOFILE {program.LIMIT}" in note
        assert "ulimit -n" in note
    assert later[0] == "allow"


async def test_a_quarter_of_the_descriptors_is_idle_at_most(found: dict[str, Any]) -> None:
    own = 3  # of the event loop, and for names
    assert found["bounded"] <= program.LIMIT // 4 + own
