"""A question gets the same answer about a cold and a warm origin, and a text at rest."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper import Decision, Denied, Gatekeeper, VirtualClock
from gatekeeper.robots import RobotsTxt
from tests.gate_support import common, gate_on
from tests.internet import FakeInternet

FILES = st.lists(
    st.builds(
        "{}: {}".format,
        st.sampled_from(["Allow", "Disallow", "Allow", "Disallow", "User-agent", "Robot-version"]),
        st.sampled_from(
            ["/", "/a", "/a/b", "/*b", "/a*c$", "/robots.txt", "/%61", "*", "testbot", "2.0.0", ""]
        ),
    )
    | st.sampled_from(["Crawl-delay: 2", "Request-rate: 1/3", "Request-rate: 1/9 0000-2359"]),
    max_size=8,
).map(lambda lines: "\n".join(["User-agent: *", *lines, ""]))
PATHS = st.lists(
    st.sampled_from(
        ["/", "/a", "/a/b", "/abc", "/x?b", "/%61/b", "/robots.txt", "/robots%2etxt", "/a/../b"]
    ),
    min_size=1,
    max_size=4,
)


async def leased(gate: Gatekeeper, url: str) -> Decision:
    try:
        async with gate.lease(url) as lease:
            lease.report(status=200)
            return lease.decision
    except Denied as error:
        return error.decision


def rest(gate: Gatekeeper) -> None:
    """Put every text to rest, as if many other origins had been asked about since."""
    for record in gate.parts.decider.records.values():
        record.asked = 0
        if record.text is not None:
            record.text.rest()


async def every_way(gate: Gatekeeper, url: str, *, resting: bool) -> list[dict[str, object]]:
    decider, clock = gate.parts.decider, gate.parts.clock

    def at_rest() -> Gatekeeper:
        if resting:
            rest(gate)
        return gate

    first = await gate.check(url)
    assert await at_rest().allowed(url) is bool(first)
    assert await gate.allowed(url) is bool(first)  # by the fast path, if there is one
    [listed] = await at_rest().check_all([url])
    many = [decision async for decision in at_rest().check_many([url, url])]
    found = [first, await at_rest().check(url), at_rest().peek(url), listed, *many]
    at_rest()
    if (recalled := decider.recall(url, decider.agent, clock)) is not None:
        found.append(recalled)
    named = await leased(at_rest(), url)
    assert (named.verdict, named.reason, named.rule) == (first.verdict, first.reason, first.rule)
    return [common(decision, "fetched_at", "expires_at") for decision in found]


async def answers(text: str, paths: list[str], *, resting: bool) -> list[dict[str, object]]:
    async with FakeInternet(clock=VirtualClock()) as net:
        net.site("a.test").robots(text)
        async with gate_on(net) as gate:
            given = []
            for path in paths:
                found = await net.drive(every_way(gate, f"http://a.test{path}", resting=resting))
                assert all(one == found[0] for one in found), (text, path)
                given.append(found[0])
            return given


@given(FILES, PATHS)
@settings(max_examples=40, deadline=None)
def test_parsed_and_resting_files_give_the_verdict_of_the_policy(
    text: str, paths: list[str]
) -> None:
    awake = asyncio.run(answers(text, paths, resting=False))
    resting = asyncio.run(answers(text, paths, resting=True))
    policy = RobotsTxt.parse(text).policy("testbot")

    assert awake == resting
    for path, decision in zip(paths, awake, strict=True):
        assert (decision["verdict"] == "allow") is policy.match(f"http://a.test{path}").allowed
