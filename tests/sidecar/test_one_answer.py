"""GET and POST give the same decision, whatever is percent-encoded in a URL."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from gatekeeper.robots import RobotsTxt
from tests.internet import FakeInternet

ATOMS = [*"ab/:?AF$", "%2f", "%2F", "%3a", "%61", "%c3%a9", "%C3%A9", "%2a"]
Door = Callable[..., Awaitable[Any]]


def drawn(rng: random.Random, *more: str) -> str:
    return "/" + "".join(rng.choices([*ATOMS, *more], k=rng.randint(0, 6)))


async def test_get_and_post_give_the_verdict_of_the_robots_txt(
    serve: Door, internet: FakeInternet
) -> None:
    rng = random.Random(24)
    sidecar = await serve()
    for number in range(6):
        lines = (f"{rng.choice(['Allow', 'Disallow'])}: {drawn(rng, '*', '*')}" for _ in range(8))
        text = "User-agent: *\n" + "\n".join(lines) + "\n"
        site = internet.site(f"site{number}.test").robots(text)
        policy = RobotsTxt.parse(text).policy("testbot")
        urls = [site.url + drawn(rng) for _ in range(40)]
        expected = [policy.allowed(url) for url in urls]
        for _ in ("cold", "warm"):
            status, told = await sidecar.post("/v1/check", {"urls": urls})
            assert status == 200
            assert [each["verdict"] == "allow" for each in told["decisions"]] == expected
        for url, allowed in zip(urls, expected, strict=True):
            for _ in ("cold", "warm"):
                status, one = await sidecar.get(f"/v1/check?url={quote(url, safe='')}")
                assert (status, one["verdict"] == "allow") == (200, allowed), (text, url)


async def test_a_url_that_is_too_long_is_refused_by_get_and_post(
    serve: Door, internet: FakeInternet
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /x\n")
    sidecar = await serve()
    long, short = site.url + "/" + "a" * 66_000, site.url + "/y"
    for _ in ("cold", "warm"):
        status, told = await sidecar.post("/v1/check", {"urls": [long, short]})
        assert status == 200
        first, second = told["decisions"]
        assert (first["verdict"], first["reason"]) == ("deny", "invalid_url")
        assert (second["verdict"], second["reason"]) == ("allow", "no_rule")
    # Too long for a request line.
    status, told = await sidecar.get(f"/v1/check?url={long}")
    assert (status, told["type"]) == (400, "urn:gatekeeper:problem:bad-request")
