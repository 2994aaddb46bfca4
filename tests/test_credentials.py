"""Credentials in a URL are refused on every hop, though aiohttp hides them (T1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gatekeeper import Denied, Gatekeeper, InvalidURL, Reason, polite_session
from tests.gate_support import QUICK, open_config
from tests.internet import FakeInternet, Page, redirect

AGENT = "examplebot/1.0 (+https://example.org/bot)"
BASIC = {"Authorization": "Basic dTpw"}
CONFIG = open_config(pacing=QUICK)


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    return internet.site("a.test").robots("").page("/page", "the page")


@pytest.fixture
async def polite(internet: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with polite_session(AGENT, config=CONFIG, resolver=internet.resolver) as session:
        yield session


@pytest.fixture
async def plain(internet: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    """A session of the caller's own, with the gate's middleware."""
    async with Gatekeeper(AGENT, config=CONFIG, resolver=internet.resolver) as gate:
        connector = gate.parts.make_connector()
        async with aiohttp.ClientSession(
            connector=connector, middlewares=(gate.middleware,)
        ) as session:
            yield session


@pytest.fixture(params=["polite", "plain"])
def session(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "location",
    ["http://u:p@a.test/page", "//u:p@a.test/page", "http://u@a.test/page", "http://:p@a.test/"],
)
async def test_no_redirect_makes_a_session_send_credentials(
    site: Any, session: aiohttp.ClientSession, location: str
) -> None:
    site.on("/go", redirect(location))
    with pytest.raises(Denied) as caught:
        await session.get("http://a.test/go")

    told = caught.value.decision
    assert (told.reason, told.user_agent) == (Reason.BLOCKED, "examplebot")
    assert told.id
    assert site.paths == ["/robots.txt", "/go"]


async def test_credentials_in_the_first_url_are_refused_by_a_polite_session(
    site: Any, polite: aiohttp.ClientSession
) -> None:
    with pytest.raises(Denied) as caught:
        await polite.get("http://u:p@a.test/page")

    assert caught.value.decision.reason is Reason.BLOCKED
    assert "u:p" not in str(caught.value)
    assert site.paths == []


async def test_an_at_sign_in_a_path_is_no_credentials(
    site: Any, session: aiohttp.ClientSession
) -> None:
    site.on("/go", redirect("/@ann")).page("/@ann", "hers")
    async with session.get("http://a.test/go") as response:
        assert await response.text() == "hers"
    async with session.get("http://a.test/@ann") as response:
        assert await response.text() == "hers"


async def test_the_authorization_field_of_the_caller_is_sent(
    site: Any, session: aiohttp.ClientSession
) -> None:
    async with session.get("http://a.test/page", headers=BASIC) as response:
        await response.read()

    assert site.requests[-1].headers["Authorization"] == BASIC["Authorization"]


async def test_a_redirect_that_is_not_followed_keeps_its_location(
    site: Any, session: aiohttp.ClientSession
) -> None:
    site.on("/go", Page("", status=302, headers={"Location": "http://u:p@a.test/page"}))
    async with session.get("http://a.test/go", allow_redirects=False) as response:
        assert response.headers["Location"] == "http://u:p@a.test/page"
    async with session.get("http://a.test/page") as response:
        assert await response.text() == "the page"


@pytest.mark.parametrize("where", ["http://[]@/", "//[x]@a.test/"])
async def test_a_redirect_that_yarl_cannot_read_fails_alone(
    site: Any, session: aiohttp.ClientSession, where: str
) -> None:
    """aiohttp lets yarl's IndexError through; who follows no redirects never meets it."""
    site.on("/odd", Page("", status=302, headers={"Location": where}))
    async with session.get("http://a.test/odd", allow_redirects=False) as response:
        assert response.headers["Location"] == where
    with pytest.raises((aiohttp.ClientError, IndexError)):
        await session.get("http://a.test/odd")
    async with session.get("http://a.test/page") as response:
        assert await response.text() == "the page"


@pytest.mark.parametrize("base", ["http://[::1]@/", "a.test", "ftp://a.test/"])
async def test_a_base_url_that_is_no_url_is_refused(internet: FakeInternet, base: str) -> None:
    with pytest.raises(InvalidURL):
        async with polite_session(AGENT, config=CONFIG, resolver=internet.resolver, base_url=base):
            pass


@pytest.mark.parametrize("base", ["http://u:p@a.test/", "http://u@a.test", "http://@a.test/x/"])
async def test_credentials_in_a_base_url_are_refused(
    site: Any, internet: FakeInternet, base: str
) -> None:
    for given in (base, URL(base, encoded=True)):
        async with polite_session(
            AGENT, config=CONFIG, resolver=internet.resolver, base_url=given
        ) as session:
            for path in ("/page", URL("/page"), "/@ann"):
                with pytest.raises(Denied) as caught:
                    await session.get(path)
                assert caught.value.decision.reason is Reason.BLOCKED
                assert "u:p" not in str(caught.value)
            async with session.get("http://a.test/page") as response:  # it names a host itself
                assert response.status == 200
    assert "/page" in site.paths


async def test_a_base_url_without_credentials_serves_its_paths(
    site: Any, internet: FakeInternet
) -> None:
    site.page("/@ann", "hers")
    async with polite_session(
        AGENT, config=CONFIG, resolver=internet.resolver, base_url="http://a.test/"
    ) as session:
        for path, text in (("/page", "the page"), ("/@ann", "hers"), (URL("/page"), "the page")):
            async with session.get(path) as response:
                assert await response.text() == text


@pytest.mark.parametrize("url", ["http://@a.test/page", "http://:@a.test/page"])
async def test_empty_credentials_are_refused_by_a_polite_session(
    site: Any, polite: aiohttp.ClientSession, url: str
) -> None:
    for given in (url, URL(url, encoded=True)):
        with pytest.raises(Denied):
            await polite.get(given)
    assert site.paths == []


@pytest.mark.parametrize("url", ["http://[::1]@/", "http://u:secret@a b/", "http://[a]@a.test/"])
async def test_a_url_that_yarl_cannot_read_raises_invalid_url(
    polite: aiohttp.ClientSession, url: str
) -> None:
    with pytest.raises(InvalidURL) as caught:
        await polite.get(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://A.TEST%2e/page",
        "http://ａ.test/page",
        "http://a。test/page",
        "http://a.test/page HTTP/1.1\r\nX-Smuggled: 1",
        "http://a.test/a page",
        "http://a.test/?a b",
        "http://①②⑦.0.0.1/page",
        "http://2130706433/page",
    ],
    ids=ascii,
)
async def test_an_unnormalised_url_that_leads_elsewhere_is_refused(
    site: Any, session: aiohttp.ClientSession, text: str
) -> None:
    """yarl was told to leave the text alone, so aiohttp would dial and send it as it stands."""
    async with session.get("http://a.test/page") as response:  # the host and its guard are known
        assert response.status == 200
    with pytest.raises(InvalidURL):
        await session.get(URL(text, encoded=True))
    assert site.paths == ["/robots.txt", "/page"]


@pytest.mark.parametrize("text", ["http://a.test/%70age", "http://A.Test/%70age"])
async def test_an_unnormalised_url_that_leads_where_it_says_is_sent(
    site: Any, session: aiohttp.ClientSession, text: str
) -> None:
    async with session.get(URL(text, encoded=True)) as response:
        assert response.status == 404
    assert site.paths[-1] == "/%70age"


async def test_a_port_that_is_no_number_is_no_url_to_a_polite_session(
    polite: aiohttp.ClientSession,
) -> None:
    with pytest.raises(InvalidURL):
        await polite.get(URL("http://a.test:-/", encoded=True))
