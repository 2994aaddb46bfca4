"""Which origin's rules apply: no origin's file applies to another origin (T13, T14)."""

from __future__ import annotations

import pytest

from gatekeeper import urls
from gatekeeper.errors import InvalidURL
from gatekeeper.fetching.outcomes import Outcome
from tests.fetching.test_over_sockets import directory_on
from tests.internet import FakeInternet, Page, redirect

OPEN = "User-agent: *\nDisallow:\n"
SHUT = "User-agent: *\nDisallow: /\n"


def rules(path: str) -> str:
    return f"User-agent: *\nDisallow: {path}\n"


# -- T13: the key is scheme, host and port


async def test_t13_scheme_and_port_have_files_of_their_own(net: FakeInternet) -> None:
    files = {
        "http://a.test": "/plain",
        "https://a.test": "/secure",
        "http://a.test:8080": "/other-port",
        "http://b.test": "/other-host",
    }
    for name, path in files.items():
        net.site(name).robots(rules(path))
    async with directory_on(net) as directory:
        for origin in files:
            await net.drive(directory.get(origin))
        for origin, own in files.items():
            record = directory.peek(origin)
            assert record is not None
            assert record.text is not None
            policy = record.text.robots.policy("testbot")
            assert {path for path in files.values() if not policy.allowed(path)} == {own}, origin


@pytest.mark.parametrize(
    ("spelt", "origin"),
    [
        ("HTTP://A.Test/x", "http://a.test"),
        ("http://a.test./x", "http://a.test"),
        ("http://a.test:80/x", "http://a.test"),
        ("http://a.test:080/x", "http://a.test"),
        ("https://a.test:443/x", "https://a.test"),
        ("http://a.test:443/x", "http://a.test:443"),
        ("https://a.test:80/x", "https://a.test:80"),
        ("http://b.test@a.test/x", "http://a.test"),
        ("http://b.test:80@a.test/x", "http://a.test"),
        ("http://a.test?@b.test/x", "http://a.test"),
        ("http://a.test#@b.test/x", "http://a.test"),
        ("http://exämple.test/x", "http://xn--exmple-cua.test"),
        ("http://XN--EXMPLE-CUA.test/x", "http://xn--exmple-cua.test"),
    ],
)
def test_t13_every_spelling_of_an_origin_is_one_key(spelt: str, origin: str) -> None:
    assert urls.parse(spelt).origin == origin


@pytest.mark.parametrize("spelt", ["http://a.test\\@b.test/x", "http://a.test%2eb.test:x/"])
def test_t13_a_url_that_two_parsers_read_differently_is_refused(spelt: str) -> None:
    with pytest.raises(InvalidURL):
        urls.parse(spelt)


async def test_t13_an_outage_at_one_port_does_not_affect_another(
    net: FakeInternet,
) -> None:
    net.site("http://a.test").robots(OPEN)
    net.site("http://a.test:8080").robots(Page("", status=503))
    async with directory_on(net) as directory:
        broken = await net.drive(directory.get("http://a.test:8080"))
        sound = await net.drive(directory.get("http://a.test"))
    assert (broken.reachable, sound.reachable) == (False, True)


# -- T14: a redirect lets B decide for A, and nothing else


async def test_t14_a_redirected_file_decides_for_its_origin_and_names_the_hops(
    net: FakeInternet,
) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/theirs"))
    net.site("b.test").on("/theirs", redirect("/elsewhere")).on("/elsewhere", rules("/no"))
    async with directory_on(net) as directory:
        record = await net.drive(directory.get("http://a.test"))
    assert record.current.hops == ("http://b.test/theirs", "http://b.test/elsewhere")
    assert record.text is not None
    assert not record.text.robots.policy("testbot").allowed("/no")


@pytest.mark.parametrize(
    "where", ["/theirs", "/robots.txt?from=a", "/ROBOTS.TXT", "//robots.txt", "/x/robots.txt"]
)
async def test_t14_a_redirect_to_another_path_of_b_does_not_decide_for_b(
    net: FakeInternet, where: str
) -> None:
    net.site("a.test").on("/robots.txt", redirect(f"http://b.test{where}"))
    b = net.site("b.test").robots(SHUT).on(where, OPEN)
    async with directory_on(net) as directory:
        await net.drive(directory.get("http://a.test"))
        assert directory.peek("http://b.test") is None
        own = await net.drive(directory.get("http://b.test"))
    assert own.text is not None
    assert not own.text.robots.policy("testbot").allowed("/x")
    assert b.paths[-1] == "/robots.txt"


async def test_t14_a_redirect_to_the_robots_txt_of_b_fills_the_record_of_b_in_that_scheme(
    net: FakeInternet,
) -> None:
    """A redirect that ends at exactly B's /robots.txt has fetched B's file as well."""
    net.site("a.test").on("/robots.txt", redirect("https://b.test/robots.txt"))
    net.site("https://b.test").robots(OPEN)
    async with directory_on(net) as directory:
        await net.drive(directory.get("http://a.test"))
        filled = directory.peek("https://b.test")
        assert filled is not None
        assert filled.current.hops == ()
        assert directory.peek("http://b.test") is None


async def test_t14_an_intermediate_hop_gets_no_record(net: FakeInternet) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/robots.txt"))
    net.site("b.test").on("/robots.txt", redirect("http://c.test/robots.txt"))
    net.site("c.test").robots(OPEN)
    async with directory_on(net) as directory:
        await net.drive(directory.get("http://a.test"))
        assert directory.peek("http://b.test") is None
        assert directory.peek("http://c.test") is not None


async def test_t14_an_error_met_by_a_redirect_to_b_is_no_outage_of_b(
    net: FakeInternet,
) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/robots.txt"))
    net.site("b.test").on("/robots.txt", Page("", status=503), Page(OPEN))
    async with directory_on(net) as directory:
        sent = await net.drive(directory.get("http://a.test"))
        assert sent.current.outcome is Outcome.SERVER_ERROR
        assert directory.peek("http://b.test") is None
        assert (await net.drive(directory.get("http://b.test"))).reachable
