"""The tools for agents, asked by the SDK's own client."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import session_gate
from gatekeeper.session import polite_session
from tests.conformance.ways import AGENT, settings, until
from tests.documents.blocks import SITE
from tests.internet import FakeInternet, Hold, Page, redirect

mcp = pytest.importorskip("mcp")

from gatekeeper.integrations.mcp import as_text, build  # noqa: E402

DENYING = "User-agent: *\nDisallow: /private\nCrawl-delay: 0.05\n"


@asynccontextmanager
async def agent(internet: FakeInternet, wait: float = 60.0) -> AsyncIterator[Any]:
    """A client of the server, and the gate behind it."""
    async with (
        polite_session(AGENT, config=settings(), resolver=internet.resolver) as session,
        mcp.Client(build(session, wait=wait)) as client,
    ):
        yield client, session_gate(session)


async def test_ten_fetches_cost_one_robots_txt_and_keep_the_pace(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots(DENYING)
    for number in range(10):
        site.page(
            f"/{number}", f"<h1>Page {number}</h1><script>x()</script>", content_type="text/html"
        )
    async with agent(internet) as (client, gate):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"may_i_fetch", "fetch", "explain"}
        assert all(tool.output_schema for tool in tools.values())
        asked = [client.call_tool("fetch", {"url": f"http://a.test/{n}"}) for n in range(10)]
        for number, found in enumerate(await asyncio.gather(*asked)):
            assert not found.is_error
            page = found.structured_content
            assert page["content"] == f"# Page {number}"
            assert (page["status"], page["truncated"]) == (200, False)
        assert site.paths.count("/robots.txt") == 1
        assert len(site.paths) == 11
        assert min(site.gaps()) >= 0.05
        assert site.requests[-1].headers["User-Agent"] == AGENT
        assert gate.stats().pacing.in_flight == 0


async def test_what_is_denied_is_not_fetched_and_says_why(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots(DENYING).on("/x", redirect("/private/y"))
    async with agent(internet) as (client, _):
        for path in ("/private", "/x"):
            found = await client.call_tool("fetch", {"url": f"http://a.test{path}"})
            assert found.is_error
            assert "line 2" in found.content[0].text
        assert site.paths == ["/robots.txt", "/x"]
        answer = await client.call_tool("may_i_fetch", {"url": "http://a.test/private"})
        assert answer.structured_content["allowed"] is False
        told = (
            await client.call_tool("explain", {"url": "http://a.test/private"})
        ).structured_content
        assert (told["line"], told["rule"]) == (2, "Disallow: /private")
        assert told["crawl_delay"] == 0.05
        assert told["clocks"]


async def test_a_503_defers_and_a_private_address_is_refused(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots(Page("", status=503)).page("/x")
    async with agent(internet) as (client, _):
        found = await client.call_tool("fetch", {"url": "http://a.test/x"})
        assert found.is_error
        assert "deferred" in found.content[0].text
        answer = await client.call_tool("may_i_fetch", {"url": "http://a.test/x"})
        assert answer.structured_content["verdict"] == "defer"
        assert answer.structured_content["retry_at"] is not None
        assert set(site.paths) == {"/robots.txt"}
        for url in ("http://169.254.169.254/latest", "http://10.0.0.1/", "file:///etc/passwd"):
            assert (await client.call_tool("fetch", {"url": url})).is_error


async def test_sizes_are_bounded_and_forms_are_as_asked(internet: FakeInternet) -> None:
    internet.site("a.test").robots("").page("/", "x" * 5000, content_type="text/plain")
    internet.sites["a.test"].page("/h", "<p>a <b>b</b></p>", content_type="text/html")
    async with agent(internet) as (client, _):
        page = (
            await client.call_tool("fetch", {"url": "http://a.test/", "max_bytes": 1000})
        ).structured_content
        assert (page["size"], page["truncated"], len(page["content"])) == (1000, True, 1000)
        for form, text in (("text", "a b"), ("markdown", "a b"), ("raw", "<p>a <b>b</b></p>")):
            page = (
                await client.call_tool("fetch", {"url": "http://a.test/h", "form": form})
            ).structured_content
            assert page["content"] == text
        too_much = {"url": "http://a.test/", "max_bytes": 10**9}
        assert (await client.call_tool("fetch", too_much)).is_error


async def test_a_turn_that_does_not_come_in_time_and_a_cancelled_call_free_the_lease(
    internet: FakeInternet,
) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/slow", hold).page("/x")
    async with agent(internet, wait=0.5) as (client, gate):
        found = await client.call_tool("fetch", {"url": "http://a.test/slow"})
        assert found.is_error
        assert "0.5 s" in found.content[0].text
        await until(lambda: not gate.stats().pacing.in_flight)
        await gate.block("a.test", internet.clock.wall() - 1)


async def test_a_cancelled_call_frees_the_lease(internet: FakeInternet) -> None:
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/slow", hold)
    async with agent(internet) as (client, gate):
        call = asyncio.create_task(client.call_tool("fetch", {"url": "http://a.test/slow"}))
        await hold.waiting.acquire()
        assert gate.stats().pacing.in_flight == 1
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: not gate.stats().pacing.in_flight)


def environment(folder: Path, port: int) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(SITE, "utf-8")
    return {
        **os.environ,
        "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}",
        "FAKE_PORTS": json.dumps({"80": port}),
        "FAKE_NAMES": json.dumps(["a.test"]),
        "GATEKEEPER_GUARD_ALLOW": "127.0.0.0/8,*.test",
        "GATEKEEPER_USER_AGENT": AGENT,
    }


async def test_the_command_serves_over_stdio(internet: FakeInternet, tmp_path: Path) -> None:
    from mcp import StdioServerParameters

    port = internet.listener().port()
    internet.site("a.test").robots(DENYING).page("/x", "hello", content_type="text/plain")
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "gatekeeper", "mcp"], env=environment(tmp_path, port)
    )
    async with mcp.Client(parameters) as client:
        found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/x"})
        assert found.structured_content["content"] == "hello", found
        found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/private"})
        assert found.is_error


async def test_the_command_serves_over_http_to_several_with_one_gate(
    internet: FakeInternet, tmp_path: Path
) -> None:
    port = internet.listener().port()
    site = internet.site("a.test").robots(DENYING).page("/x", "hello", content_type="text/plain")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gatekeeper", "mcp", "--http", str(own)),
        env=environment(tmp_path, port),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        while b"running on" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        for _ in range(2):
            async with mcp.Client(f"http://127.0.0.1:{own}/mcp") as client:
                found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/x"})
                assert found.structured_content["content"] == "hello", found
    finally:
        process.terminate()
        await process.communicate()
    assert site.paths == ["/robots.txt", "/x", "/x"]


def test_text_is_taken_from_pages_in_linear_time() -> None:
    page = "<ul><li>one</li><li><a href='/two'>two</a></li></ul><style>p{}</style>"
    assert as_text(page, markdown=True) == "- one\n\n- [two](/two)"
    assert as_text(page) == "one\n\ntwo"
    assert as_text("<a>" * 1000, markdown=True) == "[" * 200
    assert as_text("") == ""
