"""The tools for agents, called by the SDK's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import gatekeeper
from gatekeeper import ConfigError, session_gate
from gatekeeper.session import polite_session
from gatekeeper.sidecar.security import Tokens
from tests.conformance.ways import AGENT, settings
from tests.documents.blocks import SITE
from tests.internet import FakeInternet, Hold, Page, free_port, redirect
from tests.robots.test_cost_of_values import least
from tests.waiting_support import until

mcp = pytest.importorskip("mcp")

from gatekeeper.integrations.mcp import as_text, build, serving  # noqa: E402

LATER = {"Retry-After": "300"}
CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "fetch", "arguments": {"url": "http://a.test/x"}},
}
ACCEPT = {"Accept": "application/json, text/event-stream"}
DENYING = "User-agent: *\nDisallow: /private\nCrawl-delay: 0.05\n"


@asynccontextmanager
async def agent(internet: FakeInternet, wait: float = 60.0) -> AsyncIterator[Any]:
    """A client of the server, and the server's gate."""
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
        assert set(tools) == {"may_i_fetch", "fetch", "explain", "sitemaps"}
        for tool in tools.values():
            assert tool.output_schema
            hints = tool.annotations
            assert hints.read_only_hint
            assert hints.open_world_hint
            assert hints.idempotent_hint
        assert client.server_info.version == gatekeeper.__version__
        asked = [client.call_tool("fetch", {"url": f"http://a.test/{n}"}) for n in range(10)]
        for number, found in enumerate(await asyncio.gather(*asked)):
            assert not found.is_error
            page = found.structured_content
            assert page["content"] == f"# Page {number}"
            assert (page["status"], page["truncated"], page["complete"]) == (200, 0, True)
        assert site.paths.count("/robots.txt") == 1
        assert len(site.paths) == 11
        assert min(site.gaps()) >= 0.05
        assert site.requests[-1].headers["User-Agent"] == AGENT
        assert gate.stats().pacing.in_flight == 0


async def test_a_denied_page_is_not_fetched_and_the_reason_is_told(internet: FakeInternet) -> None:
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


async def test_a_page_is_cut_at_max_bytes_and_has_the_asked_format(internet: FakeInternet) -> None:
    internet.site("a.test").robots("").page("/", "x" * 5000, content_type="text/plain")
    internet.sites["a.test"].page("/h", "<p>a <b>b</b></p>", content_type="text/html")
    async with agent(internet) as (client, _):
        page = (
            await client.call_tool("fetch", {"url": "http://a.test/", "max_bytes": 1000})
        ).structured_content
        assert (page["size"], page["complete"], len(page["content"])) == (1000, False, 1000)
        for form, text in (("text", "a b"), ("markdown", "a b"), ("raw", "<p>a <b>b</b></p>")):
            page = (
                await client.call_tool("fetch", {"url": "http://a.test/h", "form": form})
            ).structured_content
            assert page["content"] == text
        too_much = {"url": "http://a.test/", "max_bytes": 10**9}
        assert (await client.call_tool("fetch", too_much)).is_error


async def test_the_rest_of_a_page_is_read_without_a_request_until_its_text_expires(
    internet: FakeInternet,
) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(250))
    site = internet.site("a.test").robots("").page("/", text, content_type="text/plain")
    now = 0.0
    async with (
        polite_session(AGENT, config=settings(), resolver=internet.resolver) as session,
        mcp.Client(build(session, timer=lambda: now)) as client,
    ):

        async def part(start: int) -> dict[str, Any]:
            asked = {"url": "http://a.test/", "start_index": start, "max_length": 100}
            found = await client.call_tool("fetch", asked)
            return found.structured_content if not found.is_error else found.content[0].text

        parts = [await part(start) for start in (0, 100, 200, 250)]
        assert [one["truncated"] for one in parts] == [150, 50, 0, 0]
        assert [one["start_index"] for one in parts] == [0, 100, 200, 250]
        assert "".join(one["content"] for one in parts) == text
        assert "has 250 characters" in await part(251)
        assert site.paths.count("/") == 1
        await part(0)
        assert site.paths.count("/") == 2
        now = 301.0
        await part(100)
        assert site.paths.count("/") == 3


async def test_the_bytes_of_all_kept_texts_are_bounded(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.integrations.mcp.KEPT_BYTES", 4_000)
    site = internet.site("a.test").robots("")
    for number in range(5):
        site.page(f"/{number}", "x" * 1_500, content_type="text/plain")
    site.page("/large", "x" * 10_000, content_type="text/plain")
    async with agent(internet) as (client, _):
        for path in ("large", *range(5), *range(5)):
            asked = {"url": f"http://a.test/{path}", "max_length": 1_000}
            page = (await client.call_tool("fetch", asked)).structured_content
            rest = asked | {"start_index": 1_000, "max_length": 100_000}
            more = (await client.call_tool("fetch", rest)).structured_content
            assert len(page["content"]) + len(more["content"]) == page["truncated"] + 1_000
        assert site.paths.count("/large") == 2  # too large to be kept
        assert all(site.paths.count(f"/{number}") == 2 for number in range(5))


async def test_sitemaps_are_listed_with_their_findings(
    internet: FakeInternet,
) -> None:
    entries = "".join(
        f"<url><loc>http://a.test/{number}</loc><lastmod>2026-11-{number:02}</lastmod></url>"
        for number in range(1, 5)
    )
    listed = "Sitemap: http://a.test/map.xml\nSitemap: http://a.test/none.xml\n"
    site = internet.site("a.test").robots(listed + "User-agent: *\nDisallow: /private\n")
    site.page("/map.xml", f"<urlset>{entries}</urlset>", content_type="text/xml")
    site.on("/none.xml", Page(status=404))
    async with agent(internet) as (client, _):

        async def asked(**given: object) -> Any:
            return await client.call_tool("sitemaps", {"origin": "http://a.test", **given})

        found = (await asked(guess=False)).structured_content
        assert [page["url"] for page in found["pages"]] == [
            f"http://a.test/{number}" for number in range(1, 5)
        ]
        assert found["pages"][0]["lastmod"] == "2026-11-01T00:00:00+00:00"
        assert found["more"] is False
        assert found["findings"] == ["http://a.test/none.xml: status 404 instead of a sitemap"]
        few = (await asked(max_entries=2)).structured_content
        assert (len(few["pages"]), few["more"]) == (2, True)
        new = (await asked(since="2026-11-05")).structured_content
        assert [page["url"] for page in new["pages"]] == ["http://a.test/4"]
        wrong = await asked(since="yesterday")
        assert wrong.is_error
        assert "2026-11-01" in wrong.content[0].text


async def test_a_prompt_is_the_text_of_the_page_or_the_refusal(
    internet: FakeInternet,
) -> None:
    site = internet.site("a.test").robots(DENYING)
    site.page("/x", "<h1>Hello</h1>", content_type="text/html")
    async with agent(internet) as (client, _):
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["fetch"]
        for path, text in (("x", "# Hello"), ("private", "line 2")):
            found = await client.get_prompt("fetch", {"url": f"http://a.test/{path}"})
            assert text in found.messages[0].content.text
    assert site.paths == ["/robots.txt", "/x"]


async def test_progress_says_what_the_host_waits_for(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.integrations.mcp.PROGRESS_SECONDS", 0.02)
    hold = Hold(Page("late", content_type="text/plain"))
    internet.site("a.test").robots(DENYING).on("/slow", hold)
    told: list[tuple[float, float | None, str | None]] = []
    third = asyncio.Event()

    async def progress(seconds: float, total: float | None, message: str | None) -> None:
        told.append((seconds, total, message))
        if len(told) == 3:
            third.set()

    async with agent(internet, wait=300.0) as (client, _):
        asked = {"url": "http://a.test/slow"}
        call = asyncio.create_task(client.call_tool("fetch", asked, progress_callback=progress))
        await third.wait()
        hold.release()
        assert not (await call).is_error
    assert [seconds for seconds, _, _ in told] == sorted({seconds for seconds, _, _ in told})
    assert {total for _, total, _ in told} == {300.0}
    assert any("crawl-delay 0.05 s" in (message or "") for _, _, message in told)


async def test_a_fetch_that_does_not_end_in_time_frees_its_lease(
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
    own = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gatekeeper", "mcp", "--http", str(own)),
        env=environment(tmp_path, port),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        while b"running on" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        # As from a page in a browser whose name was rebound to this address.
        async with aiohttp.ClientSession() as browser:
            for given in ({"Host": "evil.test"}, {"Origin": "http://evil.test"}):
                where = f"http://127.0.0.1:{own}/mcp"
                async with browser.post(where, json=CALL, headers=given | ACCEPT) as answer:
                    assert answer.status in (403, 421)
        for _ in range(2):
            async with mcp.Client(f"http://127.0.0.1:{own}/mcp") as client:
                found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/x"})
                assert found.structured_content["content"] == "hello", found
    finally:
        process.terminate()
        await process.communicate()
    assert site.paths == ["/robots.txt", "/x", "/x"]


async def test_a_refused_redirect_has_the_decision_of_its_target(internet: FakeInternet) -> None:
    internet.site("a.test").robots(DENYING).on("/x", redirect("/private/y"))
    async with agent(internet) as (client, _):
        refused = (await client.call_tool("fetch", {"url": "http://a.test/x"})).structured_content
    assert (refused["verdict"], refused["reason"], refused["line"]) == ("deny", "rule", 2)
    assert refused["url"] == "http://a.test/private/y"
    assert refused["user_agent"] == "examplebot"


async def test_a_host_that_is_not_due_in_time_is_refused_at_once(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("").on("/x", Page(status=429, headers=LATER)).page("/y")
    async with agent(internet) as (client, gate):
        await client.call_tool("fetch", {"url": "http://a.test/x"})
        found = await client.call_tool("fetch", {"url": "http://a.test/y"})
        assert found.is_error
        assert "ask again at 2" in found.content[0].text
        await gate.block("a.test", 0)
        await gate.pause("a.test")
        assert (await client.call_tool("fetch", {"url": "http://a.test/y"})).is_error
        assert site.paths == ["/robots.txt", "/x"]
        assert gate.stats().pacing.in_flight == 0


@pytest.mark.parametrize("tool", ["may_i_fetch", "explain", "fetch"])
async def test_every_tool_ends_at_its_time_limit(internet: FakeInternet, tool: str) -> None:
    internet.site("a.test").on("/robots.txt", Hold(Page("")))
    async with agent(internet, wait=0.2) as (client, _):
        found = await client.call_tool(tool, {"url": "http://a.test/x"})
        assert found.is_error
        assert "0.2 s" in found.content[0].text


async def test_concurrent_fetches_are_bounded(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.integrations.mcp.MOST_FETCHES", 2)
    hold = Hold(Page("late"))
    internet.site("a.test").robots("").on("/slow", hold)
    async with agent(internet) as (client, _):
        asked = {"url": "http://a.test/slow"}
        calls = [asyncio.create_task(client.call_tool("fetch", asked)) for _ in range(2)]
        await hold.waiting.acquire()
        await until(lambda: internet.sites["a.test"].paths.count("/slow"))
        found = await client.call_tool("fetch", asked)
        while not found.is_error:  # both calls are on their way to the server
            found = await client.call_tool("fetch", asked)
        assert "2 pages are being fetched" in found.content[0].text
        hold.release()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_credentials_in_a_url_are_refused(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("").page("/x")
    async with agent(internet) as (client, _):
        found = await client.call_tool("fetch", {"url": "http://me:secret@a.test/x"})
    assert found.is_error
    assert "secret" not in found.content[0].text
    assert "/x" not in site.paths


async def test_binary_content_is_refused_and_the_charset_of_a_page_is_used(
    internet: FakeInternet,
) -> None:
    site = internet.site("a.test").robots("").page("/i", b"\x89PNG\0\0", content_type="image/png")
    site.page("/u", "h\u00e9".encode("utf-16"), content_type="text/plain; charset=utf-16")
    for name in ("punycode", "idna", "unicode_escape", "undefined", "hex", "nonsense"):
        site.page(f"/{name}", "h\u00e9-x", content_type=f"text/plain; charset={name}")
    async with agent(internet) as (client, _):
        found = await client.call_tool("fetch", {"url": "http://a.test/i"})
        assert found.is_error
        assert "image/png" in found.content[0].text
        for name in ("u", "punycode", "idna", "unicode_escape", "undefined", "hex", "nonsense"):
            found = await client.call_tool("fetch", {"url": f"http://a.test/{name}"})
            assert found.structured_content["content"].startswith("h\u00e9"), name


# --- with a sidecar


async def test_a_server_over_a_sidecar_uses_the_user_agent_of_the_sidecar(
    internet: FakeInternet, sidecar_on: Any
) -> None:
    site = internet.site("a.test").robots(DENYING).page("/x", "hello", content_type="text/plain")
    sidecar = await sidecar_on(internet, tokens=Tokens((b"t" * 40,)))
    given = {"config": settings(), "resolver": internet.resolver, "wait": 20.0}
    async with (
        serving(None, gate=sidecar.where, token="t" * 40, **given) as server,
        mcp.Client(server) as client,
    ):
        found = await client.call_tool("fetch", {"url": "http://a.test/x"})
        assert found.structured_content["content"] == "hello", found
        found = await client.call_tool("explain", {"url": "http://a.test/private"})
        assert found.structured_content["line"] == 2
        assert found.structured_content["clocks"]
    assert site.requests[-1].headers["User-Agent"] == AGENT
    assert sidecar.gate.stats().pacing.in_flight == 0
    async with (
        serving(AGENT, gate=sidecar.where, token="wrong" * 8, **given) as server,
        mcp.Client(server) as client,
    ):
        assert (await client.call_tool("fetch", {"url": "http://a.test/x"})).is_error
    await sidecar.stop()
    with pytest.raises(ConfigError, match="does not say who it is"):
        async with serving(None, gate=sidecar.where, **given):
            pass
    with pytest.raises(ConfigError, match="needs a sidecar"):
        async with serving(None):
            pass
    assert site.paths == ["/robots.txt", "/x"]


async def test_parallel_calls_over_a_sidecar_share_its_pace(
    internet: FakeInternet, sidecar_on: Any
) -> None:
    """Two agents each start a server, and both share one pace."""
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n").page("/x")
    sidecar = await sidecar_on(internet)
    given = {"config": settings(), "resolver": internet.resolver, "gate": sidecar.where}
    async with (
        serving(AGENT, **given) as one,
        serving(AGENT, **given) as other,
        mcp.Client(one) as first,
        mcp.Client(other) as second,
    ):
        asked = [agent.call_tool("fetch", {"url": "http://a.test/x"}) for agent in (first, second)]
        asked += [agent.call_tool("fetch", {"url": "http://a.test/x"}) for agent in (first, second)]
        for found in await asyncio.gather(*asked):
            assert not found.is_error
    assert len(site.paths) == 5
    assert min(site.gaps()) >= 0.1


async def test_the_command_asks_a_sidecar(
    internet: FakeInternet, sidecar_on: Any, tmp_path: Path
) -> None:
    from mcp import StdioServerParameters

    port = internet.listener().port()
    internet.site("a.test").robots(DENYING).page("/x", "hello", content_type="text/plain")
    sidecar = await sidecar_on(internet, tokens=Tokens((b"t" * 40,)))
    env = environment(tmp_path, port) | {"GATEKEEPER_TOKEN": "t" * 40}
    del env["GATEKEEPER_USER_AGENT"]
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "gatekeeper", "mcp", "--gate", sidecar.where], env=env
    )
    async with mcp.Client(parameters) as client:
        found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/x"})
        assert found.structured_content["content"] == "hello", found
        found = await client.call_tool("fetch", {"url": f"http://a.test:{port}/private"})
        assert found.structured_content["line"] == 2
    assert internet.sites["a.test"].requests[-1].headers["User-Agent"] == AGENT
    assert sidecar.count("/v1/leases") == 1


# --- the text of pages


def test_text_is_taken_from_pages() -> None:
    page = "<ul><li>one</li><li><a href='/two'>two</a></li></ul><style>p{}</style>"
    assert as_text(page, markdown=True) == "- one\n\n- [two](/two)"
    assert as_text(page) == "one\n\ntwo"
    assert as_text("<a>" * 1000, markdown=True) == ""
    assert as_text("") == ""


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<html><head><title>t</title><body>a", "a"),  # the end tags of head and body are optional
        ("<pre>a\n  b &lt;c&gt;</pre>d", "```\na\n  b <c>\n```\nd"),
        ("<a title='x>y' href=\"/q\">t</a>", "[t](/q)"),
        ("<a href=/1>one<a href=/2>two</a>", "[one](/1)[two](/2)"),
        ("<a href=/1></a><a>b</a>", "b"),
        ("a < b <3 > c", "a < b <3 > c"),
        ("a<!-- <p> -->b<!-->c<!DOCTYPE x>d", "abcd"),
        ("a<script>if (1</script2) </SCRIPT >b", "ab"),
        ("a<svg/>b<svg>c</svg>d<noscript>e", "abde"),
        ("a &amp; &#233; &#" + "9" * 5000 + ";", "a & \u00e9 \ufffd"),
        ("a<b", "a"),
        ("a\x00b\x01c", "a\ufffdb\ufffdc"),
    ],
)
def test_odd_pages_are_read_as_browsers_read_them(page: str, text: str) -> None:
    assert as_text(page, markdown=True) == text


@pytest.mark.parametrize(
    "unit",
    [
        *("<", "<!--", "<a ", "</", "<a href='", "&#", "<!", "<?", "<script>", "<![CDATA[", "</a "),
        *("<title>", "<a><b ", "&a", "<x/", "<a b=c ", "<script></script ", "<style></", "<p>"),
        *(
            "<a href=x>",
            "<a href=x>y",
            '<a b="',
            "<svg><title>",
            "<pre>\n",
            "<br>\n\n",
            " \n",
            "<a a= ",
        ),
    ],
)
def test_a_page_costs_in_proportion_to_its_size(unit: str) -> None:
    attributes = unit.replace("<", "").replace(">", "") or "="
    for begin, part, end in (("", unit, ""), ("<a ", attributes, ">")):

        def taken(size: int, begin: str = begin, part: str = part, end: str = end) -> float:
            page = begin + part * (size // len(part)) + end
            return least(lambda: as_text(page, markdown=True), 2)

        # A quadratic algorithm takes 64 times as long each time, unlike other load on the machine.
        assert any(taken(80_000) < 20 * max(taken(10_000), 0.001) for _ in range(5))
