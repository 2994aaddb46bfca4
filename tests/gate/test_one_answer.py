"""Cold or warm, single or in a batch: the gate's answer is that of the file itself."""

from __future__ import annotations

import pytest

from gatekeeper import Gatekeeper, InvalidURL, Reason
from gatekeeper.robots import RobotsTxt
from tests.gate_support import gate_on, open_config
from tests.internet import FakeInternet

CASES = [
    ("Disallow: /*ad", "/caf%c3%ad", True),
    ("Disallow: /*F", "/a%2f", False),
    ("Disallow: *A5*", "/?q=%e4%bd%a0%e5%a5%bd", False),
    ("Disallow: *A9*", "/é", False),
    ("Disallow: /*2A", "/a*b", False),
    ("Disallow: /a*%2F*?b", "/a?x=%2F?b", False),
    ("Disallow: /a*%2F*?b", "/a?x=%2f?b", False),
    ("Disallow: /", "/robots%2etxt", True),
    ("Disallow: /*r", "/%72obots.txt", True),
    ("Disallow: /", "/robots%2ftxt", False),
]


async def every_way(net: FakeInternet, gate: Gatekeeper, url: str) -> list[bool]:
    async def batch() -> list[bool]:
        return [bool(each) async for each in gate.check_many([url, url])]

    peeked = gate.peek(url)
    return [
        await net.drive(gate.allowed(url)),
        bool(await net.drive(gate.check(url))),
        bool(await net.drive(gate.check(url))),
        *(await net.drive(batch())),
        await net.drive(gate.allowed(url)),
        *([] if peeked is None else [bool(peeked)]),
    ]


@pytest.mark.parametrize(("rule", "path", "allowed"), CASES)
async def test_every_method_of_the_gate_gives_one_answer(
    net: FakeInternet, rule: str, path: str, allowed: bool
) -> None:
    text = f"User-agent: *\n{rule}\nDisallow: /never\n"
    net.site("a.test").robots(text)
    policy = RobotsTxt.parse(text).policy("testbot")
    cold = RobotsTxt.parse(text).policy("testbot")
    assert [cold.allowed(f"http://a.test{path}"), policy.match(path).allowed] == [allowed] * 2

    async with gate_on(net) as gate:
        cold_answers = await every_way(net, gate, f"http://a.test{path}")
        await every_way(net, gate, "http://a.test/other")
        await every_way(net, gate, "http://a.test/never/x")
        assert {*cold_answers, *await every_way(net, gate, f"http://a.test{path}")} == {allowed}


async def test_robots_txt_has_one_reason_however_it_is_escaped(net: FakeInternet) -> None:
    net.site("a.test").robots("User-agent: *\nDisallow: /\n")
    async with gate_on(net) as gate:
        for path in ("/x", "/robots%2etxt", "/robots.txt", "/%72obots.txt", "/robots%2etxt"):
            decision = await net.drive(gate.check(f"http://a.test{path}"))
            reason = Reason.RULE if path == "/x" else Reason.ROBOTS_FILE
            assert decision.reason is reason


async def test_rules_of_the_1994_dialect_for_other_origins_are_ignored(net: FakeInternet) -> None:
    text = (
        "User-agent: *\nDisallow: http://other.test/a\nDisallow: http://a.test/b\n"
        "Disallow: HTTP://A.test:80/c\nDisallow: /d\n"
    )
    net.site("a.test").robots(text)
    async with gate_on(net, open_config(robots={"dialect": "1994"})) as gate:
        for _ in range(2):
            for path, allowed in (("/a", True), ("/b", False), ("/c", False), ("/d", False)):
                answers = await every_way(net, gate, f"http://a.test{path}")
                assert set(answers) == {allowed}, path


@pytest.mark.parametrize("path", ["/" + "a" * 65_536, "/é" + "é" * 30_000, "/" + "𝄞" * 6_000])
async def test_a_url_too_long_to_be_sent_is_refused(net: FakeInternet, path: str) -> None:
    net.site("a.test").robots("User-agent: *\nDisallow: /x\n")
    url = f"http://a.test{path}"
    policy = RobotsTxt.parse("User-agent: *\nDisallow: /x\n").policy("testbot")
    async with gate_on(net) as gate:
        for _ in range(2):
            with pytest.raises(InvalidURL):
                await net.drive(gate.allowed(url))
            with pytest.raises(InvalidURL):
                await net.drive(gate.check(url))
            with pytest.raises(InvalidURL):
                policy.allowed(url)
            with pytest.raises(InvalidURL):
                policy.match(url)
            assert await net.drive(gate.allowed("http://a.test/y"))
            assert policy.allowed("http://a.test/y")
