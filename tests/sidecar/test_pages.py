"""The pages for operators without a browser: access, forms, escaping."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import pytest
from msgspec import structs

from gatekeeper.clock import VirtualClock, utc
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.decision_pages import line_changes
from gatekeeper.sidecar.pages.shell import (
    ASSETS,
    MAX_IDLE,
    MAX_SESSION,
    Sessions,
    asset,
    assets_hash,
)
from gatekeeper.sidecar.pages.status_pages import overview_page
from gatekeeper.sidecar.routes.operators import overview_of
from gatekeeper.sidecar.routes.pages import safe_path
from gatekeeper.sidecar.routing import Role
from gatekeeper.sidecar.security import Admission, Token, Tokens
from tests.internet import FakeInternet
from tests.pacing_support import is_paused
from tests.sidecar.conftest import connected, sent
from tests.sidecar.demo import demo, furnish, waiter
from tests.waiting_support import until

PAGES = ("", "hosts", "hosts/a.test", "explain", "waiting", "live", "history", "audit", "config")
ADMIN = Token(b"a" * 32, "olga", frozenset({Role.ADMIN, Role.CHECK}))
CHECKER = Token(b"c" * 32, "carl", frozenset({Role.CHECK}))
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Markup(HTMLParser):
    """Collects every tag with its attributes; checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "input", "br", "hr", "col"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def get(base: str, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, str]:
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.get(f"{base}/ui/{path}", allow_redirects=False, **options) as response,
    ):
        return response, await response.text()


async def post(base: str, path: str, fields: dict[str, str], **options: Any) -> Any:
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.post(f"{base}/ui/{path}", data=fields, allow_redirects=False, **options) as answer,
    ):
        return answer, await answer.text()


def form_word(text: str) -> str:
    found = re.search(r'data-form="([0-9a-f]+)"', text)
    assert found
    return found[1]


# --- every page -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_complete_html_and_loads_nothing_from_elsewhere(
    serve: Any, path: str
) -> None:
    service = await serve()
    response, text = await get(service.base, path)
    assert (response.status, response.content_type) == (200, "text/html")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name, attributes in Markup(text).tags:
        assert not {one for one in attributes if one.startswith("on") or one == "style"}
        assert name != "script" or attributes.get("src")
        for link in (attributes.get("href"), attributes.get("src"), attributes.get("action")):
            assert link is None or not re.match(r"\w+:|//", link)
            assert link is None or not link.startswith("/"), "a prefix would be lost"


@pytest.mark.parametrize("path", ["", "?x=1"])
async def test_a_browser_is_redirected_from_the_root_to_the_pages(serve: Any, path: str) -> None:
    service = await serve()
    async with service.session.get(
        f"{service.base}/{path}", headers={"Accept": "text/html"}, allow_redirects=False
    ) as response:
        assert (response.status, response.headers["Location"]) == (303, "ui/")
    async with service.session.get(f"{service.base}/ui", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (308, "ui/")
    _, index = await service.get("/")
    assert index["service"] == "gatekeeper"


async def test_pages_are_not_in_the_contract_for_programs(serve: Any) -> None:
    service = await serve()
    _, contract = await service.get("/openapi.json")
    assert not [path for path in contract["paths"] if path.startswith("/ui")]


async def test_files_have_a_hash_in_their_address_and_never_change(serve: Any) -> None:
    service = await serve()
    for name, kind in ASSETS.items():
        url = f"{service.base}/ui/static/{assets_hash()}/{name}"
        async with service.session.get(url) as response:
            assert (response.status, response.content_type) == (200, kind)
            assert "immutable" in response.headers["Cache-Control"]
            assert await response.read() == asset(name)
        async with service.session.get(url.replace(assets_hash(), "0" * 16)) as response:
            assert response.status == 404


def test_all_static_files_together_are_below_120_kb() -> None:
    assert sum(len(asset(name)) for name in ASSETS) < 120_000


@pytest.mark.parametrize(
    "folder",
    [
        Path(str(files("gatekeeper.sidecar.pages").joinpath("static", "vendor"))),
        Path(__file__).parent / "vendor",
    ],
    ids=["package", "tests"],
)
def test_vendored_files_have_their_published_hashes(folder: Path) -> None:
    (vendored,) = json.loads((folder / "vendor.json").read_text()).values()
    assert set(vendored["sha256"]) == {one.name for one in folder.iterdir()} - {"vendor.json"}
    for name, digest in vendored["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


# --- hostile texts ----------------------------------------------------------------------------


def test_texts_put_into_markup_are_escaped() -> None:
    assert html.markup('<p title="{}">{}</p>', HOSTILE, [HOSTILE]).count("<") == 2
    assert html.attributes(title=HOSTILE).count('"') == 2
    assert html.escaped("a\x1b[31m\u202e\u2066b") == "a\\u001b[31m\\u202e\\u2066b"


async def test_text_of_a_site_or_a_client_is_never_html(internet: FakeInternet) -> None:
    """Hostile text in every column: robots.txt, paths, agents, clients, reasons, Retry-After."""
    internet.site("http://a.test").robots(
        f"User-agent: *\nDisallow: /{HOSTILE}\nDisallow: /no\nCrawl-delay: 0.01\n# {HOSTILE}\n"
    )
    async with demo(internet) as shop:
        service = shop.service
        path = quote(HOSTILE)
        agent = f"bot/1.0 {HOSTILE}"
        for url in (f"http://a.test/{path}", f"http://a.test/no?{HOSTILE}"):
            await shop.gate.check(url)
            query = urlencode({"url": url, "user_agent": agent})
            async with shop.session.get(f"{shop.base}/v1/check?{query}") as response:
                assert response.status == 200
        await shop.post("/v1/leases", {"url": f"http://a.test/x{HOSTILE}", "wait": 5, "ttl": 99})
        await shop.gate.block("b.test", service.clock.wall() + 900, HOSTILE)
        service.sources = {"server.port": HOSTILE}
        told = {"url": f"http://a.test/no{HOSTILE}", "user_agent": agent}
        for page in (
            *PAGES,
            "hosts/b.test",
            f"explain?{urlencode(told)}",
            f"history?{urlencode({'origin': HOSTILE})}",
            f"live?{urlencode({'host': HOSTILE})}",
            f"hosts?{urlencode({'q': HOSTILE})}",
            f"waiting?{urlencode({'client': HOSTILE})}",
            f"hosts/{quote(HOSTILE, safe='')}",
            f"sign-in?{urlencode({'next': HOSTILE})}",
        ):
            _, text = await get(shop.base, page)
            tags = Markup(text).tags
            assert not [one for one, _ in tags if one == "img"], page
            assert all(attributes.get("src") for one, attributes in tags if one == "script"), page
        _, text = await get(shop.base, f"explain?{urlencode(told)}")
        assert "&lt;script&gt;" in text


# --- signing in -------------------------------------------------------------------------------


async def sign_in(base: str, token: Token) -> str:
    answer, _ = await post(base, "sign-in", {"token": token.value.decode(), "next": "hosts?q=a"})
    assert (answer.status, answer.headers["Location"]) == (303, "./hosts?q=a")
    cookie: str = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path" not in cookie
    return cookie.partition(";")[0]


async def test_with_tokens_a_browser_signs_in_once(internet: FakeInternet) -> None:
    async with demo(internet, tokens=Tokens((ADMIN, CHECKER))) as shop:
        answer, _ = await get(shop.base, "hosts?q=a")
        assert (answer.status, answer.headers["Location"]) == (303, "./sign-in?next=hosts%3Fq%3Da")
        answer, _ = await get(shop.base, "hosts/a.test")
        assert answer.headers["Location"].startswith("../sign-in?")
        wrong, text = await post(shop.base, "sign-in", {"token": "x" * 32})
        assert (wrong.status, "Set-Cookie" in wrong.headers) == (401, False)
        assert "Unknown token" in text

        cookie = {"Cookie": await sign_in(shop.base, ADMIN)}
        answer, text = await get(shop.base, "hosts", headers=cookie)
        assert (answer.status, "Sign out olga" in text) == (200, True)
        assert "Set-Cookie" in answer.headers  # each view extends it
        other = {"Cookie": await sign_in(shop.base, CHECKER)}
        answer, text = await get(shop.base, "hosts", headers=other)
        assert (answer.status, "needs admin" in text) == (403, True)
        assert (await get(shop.base, "explain", headers=other))[0].status == 200
        assert (await get(shop.base, "series"))[0].status == 401
        assert (await get(shop.base, "series", headers=cookie))[0].status == 200
        # The cookie is for pages only, so pages of other sites can't use it for the API.
        async with shop.session.get(f"{shop.base}/v1/hosts", headers=cookie) as response:
            assert response.status == 401
        bearer = {"Authorization": "Bearer " + "a" * 32}
        assert (await get(shop.base, "hosts", headers=bearer))[0].status == 200


async def test_a_cookie_is_signed_ends_and_goes_with_its_token(internet: FakeInternet) -> None:
    async with demo(internet, tokens=Tokens((ADMIN, CHECKER))) as shop:
        cookie = await sign_in(shop.base, CHECKER)
        forged = cookie.replace("carl", "olga")
        long = f"gatekeeper_session=olga|{'9' * 5000}|{'9' * 5000}|x|y"
        superscript = "gatekeeper_session=olga|2|99999999999999|x|y"
        empty = "gatekeeper_session=||||"
        for bad in (forged, cookie[:-1] + "0", cookie + "x", long, superscript, empty, ""):
            if bad != cookie:
                answer, _ = await get(shop.base, "explain", headers={"Cookie": bad})
                assert answer.status == 303
        shop.service.apply_config(shop.service.config, Tokens((ADMIN,)))
        answer, _ = await get(shop.base, "explain", headers={"Cookie": cookie})
        assert answer.status == 303


@pytest.mark.parametrize("rest", [b"\xff|y", b"x|\xff"])
async def test_a_cookie_that_is_no_text_leads_to_the_sign_in(
    internet: FakeInternet, rest: bytes
) -> None:
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        cookie = b"Cookie: gatekeeper_session=olga|1|99999999999|" + rest
        head = b"GET /ui/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        answer = await sent(shop.base, head + cookie + b"\r\n\r\n")
        assert b" 303 " in answer.splitlines()[0]


async def test_signing_out_leaves_no_cookie_behind(internet: FakeInternet) -> None:
    """A browser stores a cookie without a path for the folder of the page that set it."""
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        cookie = {"Cookie": await sign_in(shop.base, ADMIN)}
        for path in ("hosts/a.test", "static/0/app.js", "events", "series"):
            async with shop.session.get(f"{shop.base}/ui/{path}", headers=cookie) as answer:
                assert "Set-Cookie" not in answer.headers, path
        for path in ("", "hosts", "explain", "live"):
            assert "Set-Cookie" in (await get(shop.base, path, headers=cookie))[0].headers


async def test_behind_a_proxy_with_tls_the_cookie_goes_over_tls_alone(
    internet: FakeInternet,
) -> None:
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        origin = {"Origin": shop.base.replace("http:", "https:")}
        token = {"token": ADMIN.value.decode()}
        answer, _ = await post(shop.base, "sign-in", token, headers=origin)
        assert "; Secure" in answer.headers["Set-Cookie"]
        cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
        answer, _ = await get(shop.base, "hosts", headers=cookie)
        assert "; Secure" in answer.headers["Set-Cookie"]
        answer, _ = await post(shop.base, "sign-in", token)
        assert "; Secure" not in answer.headers["Set-Cookie"]


@pytest.mark.parametrize("path", ["/v1/events", "/ui/events"])
async def test_a_stream_ends_with_its_token(
    internet: FakeInternet, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.routes.operators.RECHECK", 0.0)
    async with demo(internet, tokens=Tokens((ADMIN, CHECKER))) as shop:
        headers = {"Authorization": "Bearer " + "a" * 32}
        if path == "/ui/events":
            headers = {"Cookie": await sign_in(shop.base, ADMIN)}
        async with shop.session.get(shop.base + path, headers=headers) as stream:
            assert b"hello" in await stream.content.readuntil(b"\n\n")
            await shop.gate.check("http://a.test/")
            shop.service.apply_config(shop.service.config, Tokens((CHECKER,)))
            assert b"event: bye" in await stream.content.read()


async def test_a_stream_ends_when_the_token_of_its_session_is_replaced(
    internet: FakeInternet,
) -> None:
    """At once, though another token of the same client is valid."""
    new = Token(b"n" * 32, ADMIN.name, ADMIN.roles)
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        headers = {"Cookie": await sign_in(shop.base, ADMIN)}
        async with shop.session.get(shop.base + "/ui/events", headers=headers) as stream:
            assert b"hello" in await stream.content.readuntil(b"\n\n")
            shop.service.apply_config(shop.service.config, Tokens((new, ADMIN)))
            shop.service.apply_config(shop.service.config, Tokens((new,)))
            assert b"event: bye" in await stream.content.read()


async def test_a_stream_ends_with_the_cookie_of_its_session(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.routes.operators.RECHECK", 0.0)
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        shop.service.sessions = Sessions(shop.clock)
        headers = {"Cookie": await sign_in(shop.base, ADMIN)}
        async with shop.session.get(shop.base + "/ui/events", headers=headers) as stream:
            assert b"hello" in await stream.content.readuntil(b"\n\n")
            shop.clock.by += MAX_IDLE + 1
            assert b"event: bye" in await stream.content.read()


async def test_a_form_that_arrives_too_slowly_is_refused(
    internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.routing.BODY_TIMEOUT", 0.05)
    async with (
        demo(internet, tokens=Tokens((ADMIN,))) as shop,
        connected(shop.base) as (reader, writer),
    ):
        writer.write(
            b"POST /ui/sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
            b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken="
        )
        assert b" 408 " in await reader.readline()


def test_a_session_ends_when_idle_and_after_half_a_day() -> None:
    from aiohttp.test_utils import make_mocked_request

    from gatekeeper.config import ServerConfig

    clock = VirtualClock()
    sessions, admission = (
        Sessions(clock),
        Admission(ServerConfig(), tokens=Tokens((ADMIN,)), hosts=None),
    )
    cookie = sessions.begin(ADMIN)

    def look() -> Any:
        headers = {"Cookie": f"gatekeeper_session={cookie}"}
        return sessions.visitor(make_mocked_request("GET", "/ui/", headers=headers), admission)

    for _ in range(MAX_SESSION // (MAX_IDLE - 100) - 1):
        clock.advance(MAX_IDLE - 100)
        cookie = look().cookie
    clock.advance(MAX_IDLE)
    assert look() is None
    cookie = sessions.begin(ADMIN)
    clock.advance(MAX_IDLE + 1)
    assert look() is None


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        ("hosts?q=a", "./hosts?q=a"),
        ("https://evil.test/", "./"),
        ("//evil.test", "./"),
        ("/\\evil.test", "./"),
        ("../../x", "./"),
        ("%2e%2e/x", "./"),
        ("javascript:alert(1)", "./"),
        ("a\r\nSet-Cookie: x", "./"),
        ("", "./"),
    ],
)
def test_signing_in_redirects_only_to_the_sidecars_own_pages(wanted: str, where: str) -> None:
    assert safe_path(wanted) == where


# --- forms ------------------------------------------------------------------------------------


async def test_a_form_without_its_token_changes_nothing(internet: FakeInternet) -> None:
    async with demo(internet) as shop:
        await furnish(shop)
        _, text = await get(shop.base, "hosts/shop.test")
        word = form_word(text)
        for fields in ({}, {"form": "0" * 64}):
            answer, _ = await post(shop.base, "hosts/shop.test/pause", fields)
            assert answer.status == 403
        crossing = {"Origin": "http://evil.test"}
        answer, _ = await post(shop.base, "hosts/shop.test/pause", {"form": word}, headers=crossing)
        assert answer.status == 403
        assert not is_paused(shop.service.gate.parts.scheduler, "shop.test")

        answer, _ = await post(shop.base, "hosts/shop.test/pause", {"form": word})
        assert (answer.status, answer.headers["Location"]) == (303, "../shop.test")
        assert is_paused(shop.service.gate.parts.scheduler, "shop.test")
        await post(shop.base, "hosts/shop.test/resume", {"form": word})
        assert not is_paused(shop.service.gate.parts.scheduler, "shop.test")
        block = {"form": word, "seconds": "600", "reason": "calm"}
        await post(shop.base, "hosts/shop.test/block", block)
        assert shop.service.gate.parts.scheduler.blocked("shop.test")[1] == "calm"  # type: ignore[index]
        for seconds in ("-1", "nan", "inf", "x", ""):
            answer, _ = await post(
                shop.base, "hosts/shop.test/block", {"form": word, "seconds": seconds}
            )
            assert answer.status == 400
        (lease,) = shop.service.leases
        answer, _ = await post(shop.base, f"leases/{lease.id}/drop", {"form": word})
        assert (answer.status, len(shop.service.leases)) == (303, 0)
        answer, _ = await post(shop.base, f"leases/{lease.id}/drop", {"form": word})
        assert answer.status == 404


async def test_the_form_token_of_one_session_is_refused_in_another(internet: FakeInternet) -> None:
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        one, two = await sign_in(shop.base, ADMIN), await sign_in(shop.base, ADMIN)
        _, text = await get(shop.base, "hosts", headers={"Cookie": one})
        answer, _ = await post(
            shop.base, "hosts/a.test/pause", {"form": form_word(text)}, headers={"Cookie": two}
        )
        assert answer.status == 403
        answer, _ = await post(
            shop.base, "sign-out", {"form": form_word(text)}, headers={"Cookie": one}
        )
        assert "Max-Age=0" in answer.headers["Set-Cookie"]


async def test_signing_out_ends_every_copy_of_the_session_and_no_other(
    internet: FakeInternet,
) -> None:
    async with demo(internet, tokens=Tokens((ADMIN,))) as shop:
        one, two = await sign_in(shop.base, ADMIN), await sign_in(shop.base, ADMIN)
        answer, text = await get(shop.base, "hosts", headers={"Cookie": one})
        renewed = answer.headers["Set-Cookie"].partition(";")[0]
        form = {"form": form_word(text)}
        await post(shop.base, "sign-out", form, headers={"Cookie": one})
        for cookie in (one, renewed):
            answer, _ = await get(shop.base, "hosts", headers={"Cookie": cookie})
            assert answer.status == 303
            answer, _ = await post(
                shop.base, "hosts/a.test/pause", form, headers={"Cookie": cookie}
            )
            assert answer.status == 303
            assert answer.headers["Location"].startswith("../../sign-in")
        answer, _ = await get(shop.base, "hosts", headers={"Cookie": two})
        assert answer.status == 200


async def test_a_form_that_is_too_long_is_refused(serve: Any) -> None:
    service = await serve()
    answer, _ = await post(service.base, "hosts/a.test/pause", {"form": "x" * 20_000})
    assert answer.status == 413


@pytest.mark.parametrize("path", ["hosts", "waiting", "live", "explain", "history"])
async def test_a_search_form_lets_a_browser_send_what_the_page_accepts_and_no_more(
    serve: Any, path: str
) -> None:
    """A page of an error loses what was typed."""
    service, fields, name = await serve(), 0, ""
    for tag, attributes in Markup((await get(service.base, path))[1]).tags:
        name = attributes.get("name") or name
        if tag == "option":
            values = {attributes["value"]: 200}
        elif tag == "input" and attributes.get("type") != "hidden" and name != "url":
            most = int(attributes["maxlength"])
            values = {"a" * most: 200, "a" * (most + 1): 400}
        else:
            continue
        fields += 1
        for value, status in values.items():
            response, _ = await get(service.base, f"{path}?{urlencode({name: value})}")
            assert (name, len(value), response.status) == (name, len(value), status)
    assert fields


async def test_the_form_of_a_block_has_the_limits_of_a_block(serve: Any) -> None:
    service = await serve()
    page = (await get(service.base, "hosts/a.test"))[1]
    inputs = {one.get("name"): one for tag, one in Markup(page).tags if tag == "input"}
    seconds, reason = int(inputs["seconds"]["max"]), int(inputs["reason"]["maxlength"])
    for more, status in ((0, 303), (1, 400)):
        fields = {"form": form_word(page), "seconds": str(seconds + more), "reason": "r" * reason}
        assert (await post(service.base, "hosts/a.test/block", fields))[0].status == status


# --- texts of the pages -----------------------------------------------------------------------


def text_of(page: str) -> str:
    """The text of a page without its tags, in one line."""
    spaced = re.sub(r"</?(?:h1|li|p|td|th|tr)\b[^>]*>", " ", page.partition("<h1>")[2])
    return " ".join(re.sub(r"<[^>]*>", "", spaced).split())


async def test_the_overview_names_the_hosts_that_are_held_up_with_cause_and_end(
    internet: FakeInternet,
) -> None:
    internet.site("http://down.test").robots("busy", status=503, headers={"Retry-After": "600"})
    async with demo(internet) as shop:
        wall = shop.service.clock.wall()
        _, page = await get(shop.base, "")
        assert "Nothing needs attention." in page
        await shop.gate.check("http://down.test/")
        await shop.gate.pause("olga.test")
        _, page = await get(shop.base, "")
        end = rf"{utc(wall + 600):%H:}\d\d UTC \(in (10 min|9 min \d+ s)\)"
        cause = r"503 at \d\d:\d\d, Retry-After 600"
        assert re.search(rf"down\.test ■ blocked until {end}: {cause}", text_of(page))
        assert "olga.test ▲ paused until it is resumed: operator" in text_of(page)
        assert "All:" not in page
        for n in range(9):
            await shop.gate.block(f"h{n}.test", wall + 200_000, "429")
        _, page = await get(shop.base, "")
        shown = re.findall(r"(\S+)\.test . (?:blocked|paused|deferred)", text_of(page))
        assert shown == ["down", "h0", "h1", "h2", "olga"]
        assert f"until {utc(wall + 200_000):%Y-%m-%d} " in text_of(page)
        assert "All: 10 blocked, 1 paused" in text_of(page)
        assert 'href="hosts?state=blocked"' in page
        _, page = await get(shop.base, "hosts/down.test")
        assert re.match(rf"down\.test ■ blocked until {end}: {cause}", text_of(page))


async def test_the_overview_leaves_out_counts_of_0(internet: FakeInternet) -> None:
    """No tile says that the settings are in force, nor that 0 hosts are blocked."""
    async with demo(internet) as shop:
        _, page = await get(shop.base, "")
        cards = text_of(page).partition("version")[0]
        assert "ettings" not in cards
        assert not re.search(r"\b0 (?:allow|blocked|busy|failed|nearly|expired)", cards)


async def test_the_page_of_a_host_has_its_actions_first_and_pages_of_its_waiters(
    internet: FakeInternet,
) -> None:
    async with demo(internet) as shop:
        await furnish(shop, rounds=1)
        waiters = [waiter(shop, f"products/{n}") for n in range(7)]
        await until(lambda: len(shop.service.leases.waiters) == 7)
        internet.site("http://xshop.test").robots("")
        await shop.post("/v1/leases", {"url": "http://xshop.test/other", "wait": 20})
        _, page = await get(shop.base, "hosts/shop.test")
        assert page.index('class="lead"') < page.index('class="actions"') < page.index("<h2")
        seen = []
        for number in (1, 2, 3):
            _, page = await get(shop.base, f"hosts/shop.test?per_page=3&page={number}")
            assert f"Page {number} of 3" in page
            seen += re.findall(r"http://\w+\.test/products/\d", text_of(page))
        assert seen == [f"http://shop.test/products/{n}" for n in range(7)] + [
            "http://shop.test/products/1"  # the lease
        ]
        assert 'href="shop.test?page=2&amp;per_page=3#leases"' in page
        answer, _ = await get(shop.base, "hosts/shop.test?page=x")
        assert answer.status == 400
        for one in waiters:
            one.cancel()
        await asyncio.wait(waiters)


async def test_the_pages_show_the_state_of_hosts_and_leases(internet: FakeInternet) -> None:
    async with demo(internet) as shop:
        await furnish(shop)
        _, overview = await get(shop.base, "")
        assert "2 blocked" in overview
        _, hosts = await get(shop.base, "hosts?state=paused")
        assert ("archive.test" in hosts, "news.test" in hosts) == (True, False)
        _, host = await get(shop.base, "hosts/shop.test")
        assert "crawl-delay 2 s from robots.txt line 8" in host
        assert "curl -X POST" in host
        query = urlencode({"url": "http://shop.test/products/private/2"})
        _, why = await get(shop.base, f"explain?{query}")
        assert why.index("decides") < why.index("loses")
        assert 'value="4" class="decides group"' in why
        _, wrong = await get(shop.base, "explain?url=nonsense")
        assert "Invalid question" in wrong


async def test_explain_shows_the_normal_form_of_a_rule_where_it_differs(
    serve: Any, internet: FakeInternet
) -> None:
    text = "User-agent: *\nDisallow: /caf%c3%a9/%7euser\nAllow: /caf\u00e9\nDisallow: /plain\n"
    internet.site("a.test").robots(text)
    service = await serve()

    async def told(url: str) -> str:
        response, text = await get(service.base, f"explain?{urlencode({'url': url})}")
        assert response.status == 200
        return text

    text = await told("HTTP://A.test:80/caf%c3%a9/~user/x")
    assert "<code>/caf%c3%a9/%7euser</code> reads <code>/caf%C3%A9/~user</code>" in text
    assert "<code>/caf\u00e9</code> reads <code>/caf%C3%A9</code>" in text
    assert " ◀ decides reads <code>/caf%C3%A9/~user</code>" in text
    assert "The URL is read as <code>http://a.test/caf%C3%A9/~user/x</code>." in text
    text = await told("http://a.test/plain")
    assert "is read as" not in text
    assert " reads <code>" not in text


async def test_problems_are_listed_first_on_the_overview(serve: Any) -> None:
    service = (await serve()).service
    seen = await overview_of(service)
    assert "Nothing needs attention." in str(overview_page(service, seen).body)
    reload = structs.replace(seen.reload, ok=False, needs_restart=("server.port",))
    wrong = structs.replace(
        seen,
        ready=False,
        state="draining",
        reload=reload,
        fleet={"state": "lost", "members": 3},
        oldest_wait=90.0,
        oldest_wait_host="shop.test",
        overdue=2,
        rates=seen.rates | {"robots_failed": 4.0},
    )
    text = str(overview_page(service, wrong).body)
    for said in (
        "Not ready: draining",
        "The last reload failed",
        "server.port",
        "The store of the fleet is lost",
        '1 min 30 s</span> for <a href="hosts/shop.test">shop.test</a>; <a href="waiting">see who',
        "2 leases are nearly over",
        "4 robots.txt fetches failed",
    ):
        assert said in text


async def test_history_shows_what_changed_and_which_verdicts(
    internet: FakeInternet, tmp_path: Path
) -> None:
    site = internet.site("http://a.test").robots("User-agent: *\nDisallow: /old\n")
    async with demo(internet, storage=str(tmp_path / "state")) as shop:
        for path in ("old", "new", "same"):
            query = urlencode({"url": f"http://a.test/{path}"})
            async with shop.session.get(f"{shop.base}/v1/check?{query}") as response:
                await response.read()
        site.robots("User-agent: *\nDisallow: /new\n")
        await shop.gate.refresh("http://a.test")
        _, text = await get(shop.base, f"history?{urlencode({'origin': 'http://a.test'})}")
    changed = text[text.index("Which verdicts changed") : text.index("What changed in the text")]
    assert ("a.test/old" in changed, "a.test/new" in changed) == (True, True)
    assert "a.test/same" not in changed
    assert "<code>Disallow: /old</code>" in text


def test_a_diff_of_what_differs_everywhere_ends_at_once() -> None:
    old = [f"Disallow: /{n}" for n in range(20_000)]
    new = [f"Disallow: /{-n}" for n in range(20_000)]
    changes = line_changes(old, new)
    assert [(one.same, len(one.old), len(one.new)) for one in changes] == [(False, 20_000, 20_000)]


@pytest.mark.parametrize(
    ("old", "new"), [("abcabba", "cbabac"), ("", "ab"), ("ab", ""), ("axb", "ayb"), ("ab", "ab")]
)
def test_a_diff_gives_both_texts_back(old: str, new: str) -> None:
    changes = line_changes(list(old), list(new))
    assert "".join(line for one in changes for line in one.old) == old
    assert "".join(line for one in changes for line in one.new) == new
    assert all(one.old == one.new for one in changes if one.same)
