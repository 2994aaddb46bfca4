"""The guard with real sockets: nothing refused is ever dialled.

127.1.0.0/16 stands for the public internet (the operator allowed it), 127.66.0.1 for the
inner network. Every site there would answer; the server's own log shows whether it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from gatekeeper.config import Config, GuardConfig
from gatekeeper.decision import BLOCKED_NOTE, Reason
from gatekeeper.errors import AddressRefused, ConfigError, Denied
from gatekeeper.fetching.allowed_addresses import ADDRESS_NOTE, NAME_NOTE, PORT_NOTE, Guard, Kind
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.session import guarded_connector
from tests.internet import Fail, FakeInternet, has_ipv6

PUBLIC, INNER = "127.1.9.1", "127.66.0.1"
CONFIG = Config(guard=GuardConfig(allow=("127.1.0.0/16",)))

happy_eyeballs = pytest.mark.parametrize(
    "delay", [0.25, None], ids=["happy eyeballs", "one by one"]
)


@pytest.fixture
def world(internet: FakeInternet) -> FakeInternet:
    internet.site("good.test", address=PUBLIC).otherwise("welcome")
    internet.site("inner.test", address=INNER).otherwise("a secret")
    return internet


@asynccontextmanager
async def guarded(
    net: FakeInternet, delay: float | None = 0.25, *, config: Config = CONFIG, **options: object
) -> AsyncIterator[aiohttp.ClientSession]:
    connector = guarded_connector(
        config, resolver=net.resolver, happy_eyeballs_delay=delay, ssl=net.client_ssl, **options
    )
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def body(session: aiohttp.ClientSession, url: str, **options: object) -> str:
    async with session.get(url, **options) as response:
        return await response.text()


async def assert_refused(session: aiohttp.ClientSession, url: str) -> None:
    with pytest.raises(Denied) as caught:
        await session.get(url)
    # The same class and word at every stage (T2).
    assert type(caught.value) is Denied
    assert caught.value.decision.reason is Reason.BLOCKED
    # What the URL's text shows may be told; the address of a name may not.
    note = caught.value.decision.note
    assert note in (BLOCKED_NOTE, ADDRESS_NOTE, NAME_NOTE, PORT_NOTE.format(25))


def inner_urls(net: FakeInternet) -> dict[str, str]:
    port = net.listener(INNER).port()
    return {
        "literal": f"http://{INNER}:{port}/",
        "mapped": f"http://[::ffff:{INNER}]:{port}/",
        "name": "http://inner.test/",
        "name-of-mapped": "http://mapped.test/",
    }


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no ::1 here")
WAYS = [
    "literal",
    "name",
    pytest.param("mapped", marks=needs_ipv6),
    pytest.param("name-of-mapped", marks=needs_ipv6),
]


@pytest.mark.parametrize("way", WAYS)
async def test_without_the_guard_each_url_reaches_the_private_server(
    world: FakeInternet, way: str
) -> None:
    world.dns("mapped.test", f"::ffff:{INNER}")
    async with world.session() as session:
        assert await body(session, inner_urls(world)[way]) == "a secret"
    assert world.dialled(INNER)


@happy_eyeballs
@pytest.mark.parametrize("way", WAYS)
async def test_the_guard_refuses_every_url_of_a_private_server(
    world: FakeInternet, way: str, delay
) -> None:
    world.dns("mapped.test", f"::ffff:{INNER}")
    async with guarded(world, delay) as session:
        await assert_refused(session, inner_urls(world)[way])
    assert world.connections == []


@happy_eyeballs
@pytest.mark.parametrize("way", WAYS)
async def test_the_guard_refuses_every_redirect_to_a_private_server(
    world: FakeInternet, way: str, delay
) -> None:
    world.dns("mapped.test", f"::ffff:{INNER}")
    world.sites["good.test"].redirect("/start", inner_urls(world)[way])
    async with guarded(world, delay) as session:
        await assert_refused(session, "http://good.test/start")
    assert world.sites["good.test"].paths == ["/start"]
    assert not world.dialled(INNER)


@happy_eyeballs
async def test_the_public_site_is_reached(world: FakeInternet, delay) -> None:
    async with guarded(world, delay) as session:
        assert await body(session, "http://good.test/") == "welcome"
        assert await body(session, "https://good.test/") == "welcome"
        port = world.listener(PUBLIC).port()
        assert await body(session, f"http://{PUBLIC}:{port}/") == "welcome"


@happy_eyeballs
async def test_rebinding_finds_no_gap_between_look_ups(world: FakeInternet, delay) -> None:
    world.dns("r.test", PUBLIC, INNER)
    async with guarded(world, delay, use_dns_cache=False, force_close=True) as session:
        assert await body(session, "http://r.test/") == "welcome"
        await assert_refused(session, "http://r.test/")
    assert not world.dialled(INNER)


@happy_eyeballs
async def test_the_answer_that_was_judged_is_the_one_that_is_dialled(
    world: FakeInternet, delay
) -> None:
    world.dns("r.test", PUBLIC, INNER)
    async with guarded(world, delay, force_close=True) as session:
        for _ in range(3):  # the connector's cache holds the judged answer
            await body(session, "http://r.test/")
    assert len(world.resolver.queries) == 1
    assert not world.dialled(INNER)


class ChangingAnswer(dict[str, object]):
    """An answer with one address when it is judged and another when it is dialled."""

    looked = 0

    def __getitem__(self, key: str) -> object:
        if key == "host":
            self.looked += 1
            return PUBLIC if self.looked == 1 else INNER
        return super().__getitem__(key)


class ChangingResolver(AbstractResolver):
    """Answers with such answers at that port, then with the other answers."""

    def __init__(self, port: int, answers: int, others: tuple[ResolveResult, ...] = ()) -> None:
        self.port, self.answers, self.others = port, answers, others

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        answer = {"hostname": host, "port": self.port, "family": 2, "proto": 0, "flags": 0}
        return [*(ChangingAnswer(answer) for _ in range(self.answers)), *self.others]  # type: ignore[list-item]

    async def close(self) -> None: ...


@happy_eyeballs
@pytest.mark.parametrize("answers", [1, 3])
async def test_a_change_between_check_and_dial_is_caught_at_the_socket(
    world: FakeInternet, delay, answers: int
) -> None:
    resolver = ChangingResolver(world.listener(INNER).port(), answers)
    connector = guarded_connector(CONFIG, resolver=resolver, happy_eyeballs_delay=delay)
    async with aiohttp.ClientSession(connector=connector) as session:
        await assert_refused(session, "http://r.test/")
    assert world.connections == []


async def test_a_refusal_is_recognised_though_the_errors_were_merged(
    world: FakeInternet, monkeypatch
) -> None:
    async def merging(addr_infos, socket_factory, **_: object) -> None:
        """Merge the errors of several attempts, as aiohappyeyeballs does."""
        texts = []
        for info in addr_infos:
            try:
                socket_factory(info).close()
            except OSError as error:
                texts.append(str(error))
        raise OSError("Multiple exceptions: " + ", ".join(texts))

    monkeypatch.setattr("aiohappyeyeballs.start_connection", merging)
    resolver = ChangingResolver(world.listener(INNER).port(), 2)
    async with aiohttp.ClientSession(
        connector=guarded_connector(CONFIG, resolver=resolver)
    ) as session:
        await assert_refused(session, "http://r.test/")


async def test_a_failed_dial_beside_refused_addresses_is_no_refusal(
    world: FakeInternet,
) -> None:
    world.refusing("dead.test")
    dead = await world.resolver.resolve("dead.test", 80)
    resolver = ChangingResolver(world.listener(INNER).port(), 1, tuple(dead))
    async with aiohttp.ClientSession(
        connector=guarded_connector(CONFIG, resolver=resolver)
    ) as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get("http://r.test/")
    assert not isinstance(caught.value.os_error, AddressRefused)
    assert world.connections == []


@happy_eyeballs
@pytest.mark.parametrize(
    "answers",
    [
        [INNER, PUBLIC],
        [PUBLIC, INNER],
        ["::1", "10.0.0.1", INNER, PUBLIC],
        [PUBLIC, "::ffff:127.66.0.1", "169.254.169.254"],
    ],
    ids=",".join,
)
async def test_of_mixed_answers_only_the_public_is_dialled(
    world: FakeInternet, delay, answers: list[str]
) -> None:
    world.dns("mixed.test", answers)
    guard = Guard(CONFIG)
    async with guarded(world, delay, guard=guard) as session:
        assert await body(session, "http://mixed.test/") == "welcome"
    assert {connection.address for connection in world.connections} == {PUBLIC}
    assert guard.stats().dialled == 1
    assert sum(guard.stats().refused.values()) == len(answers) - 1


@happy_eyeballs
async def test_a_name_with_refused_addresses_alone_is_refused(world: FakeInternet, delay) -> None:
    world.dns("bad.test", ["10.0.0.1", "::1", INNER])
    async with guarded(world, delay) as session:
        await assert_refused(session, "http://bad.test/")
    assert world.connections == []


@happy_eyeballs
async def test_happy_eyeballs_goes_on_past_a_dead_address(world: FakeInternet, delay) -> None:
    dead = world.refusing("dead.test")
    allowed = Config(guard=GuardConfig(allow=("127.1.0.0/16", dead)))
    world.dns("mixed.test", [INNER, dead, PUBLIC])
    async with guarded(world, delay, config=allowed) as session:
        assert await body(session, "http://mixed.test/") == "welcome"
    assert not world.dialled(INNER)


async def test_a_dead_public_address_is_no_refusal_though_others_were_dropped(
    world: FakeInternet,
) -> None:
    dead = world.refusing("dead.test")
    world.dns("mixed.test", [INNER, dead])
    async with guarded(world) as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get("http://mixed.test/")
    assert isinstance(caught.value.os_error, ConnectionRefusedError)


@pytest.mark.parametrize("step", [Fail.NXDOMAIN, Fail.SERVFAIL, Fail.EMPTY])
async def test_a_failed_look_up_is_no_refusal(world: FakeInternet, step: Fail) -> None:
    world.dns("gone.test", step)
    async with guarded(world) as session:
        with pytest.raises(aiohttp.ClientConnectorDNSError) as caught:
            await session.get("http://gone.test/")
    assert not isinstance(caught.value.os_error, AddressRefused)


async def test_requests_that_share_a_look_up_share_its_refusal(world: FakeInternet) -> None:
    world.resolver.delay = (1e-6, 1e-6)  # a look-up without delay would end before it is shared
    async with guarded(world) as session:
        results = await asyncio.gather(
            *(session.get(f"http://inner.test/{n}") for n in range(5)), return_exceptions=True
        )
    assert all(isinstance(error, Denied) for error in results)
    assert len(world.resolver.queries) == 1


async def test_the_error_tells_nothing_about_private_addresses(world: FakeInternet) -> None:
    texts = set()
    async with guarded(world) as session:
        for answer in ([INNER], ["10.0.0.1"], ["::1", "169.254.169.254"]):
            world.dns("probe.test", answer)
            session.connector.clear_dns_cache()
            with pytest.raises(Denied) as caught:
                await session.get("http://probe.test/")
            texts.add(str(caught.value))
    assert len(texts) == 1
    assert "blocked" in texts.pop()


@pytest.mark.parametrize("url", ["http://localhost/", "http://redis/", "http://db.internal/"])
async def test_names_of_inner_networks_are_not_looked_up(world: FakeInternet, url: str) -> None:
    async with guarded(world) as session:
        await assert_refused(session, url)
    assert world.resolver.queries == []


async def test_the_guarded_resolver_refuses_inner_names_by_itself(world: FakeInternet) -> None:
    world.dns("db.internal", PUBLIC)
    with pytest.raises(AddressRefused):
        await GuardedResolver(Guard(CONFIG), world.resolver).resolve("db.internal", 80)
    assert world.resolver.queries == []


async def test_a_redirect_to_a_bad_port_is_refused(world: FakeInternet) -> None:
    world.sites["good.test"].redirect("/start", "http://good.test:25/")
    async with guarded(world) as session:
        await assert_refused(session, "http://good.test/start")


async def test_a_websocket_is_denied(world: FakeInternet) -> None:
    async with guarded(world) as session:
        with pytest.raises(Denied):
            await session.ws_connect("ws://good.test/")
    assert world.connections == []


async def test_localhost_itself_may_be_allowed_by_its_name(world: FakeInternet) -> None:
    world.site("localhost", address=INNER).page("/", "my own")
    config = Config(guard=GuardConfig(allow=("localhost",)))
    async with guarded(world, config=config) as session:
        assert await body(session, "http://localhost/") == "my own"
        await assert_refused(session, inner_urls(world)["literal"])
        await assert_refused(session, "http://good.test/")


@happy_eyeballs
async def test_t1_no_other_allowed_name_leads_to_this_machine(world: FakeInternet, delay) -> None:
    world.dns("mixed.test", [INNER, "169.254.169.254"])
    config = Config(guard=GuardConfig(allow=("*.test",)))
    async with guarded(world, delay, config=config) as session:
        for url in ("http://inner.test/", "http://mixed.test/", "http://good.test/"):
            await assert_refused(session, url)
    assert world.connections == []


async def test_our_own_listener_is_not_dialled_though_its_range_is_allowed(
    world: FakeInternet,
) -> None:
    guard = Guard(CONFIG)
    guard.listens_on(PUBLIC, world.listener(PUBLIC).port())
    async with guarded(world, guard=guard) as session:
        await assert_refused(session, f"http://{PUBLIC}:{world.listener(PUBLIC).port()}/")
        await assert_refused(session, "http://good.test/")
    assert world.connections == []
    assert guard.stats().refused == {Kind.SELF: 2}


async def test_a_pooled_connection_is_used_again(world: FakeInternet) -> None:
    guard = Guard(CONFIG)
    async with guarded(world, guard=guard) as session:
        for _ in range(3):
            await body(session, "http://good.test/")
    assert len(world.connections) == 1
    assert guard.stats().dialled == 1


async def test_an_answer_of_a_thousand_addresses_is_cut(world: FakeInternet) -> None:
    dead = world.refusing("dead.test")
    world.dns("many.test", [dead] * 1000)
    guard = Guard(CONFIG)
    async with guarded(world, None, guard=guard) as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get("http://many.test/")
    # Four addresses are kept; aiohttp starts again with one fewer after each failure.
    assert guard.stats().dialled == 4 + 3 + 2 + 1


async def test_the_default_connector_brings_its_own_resolver() -> None:
    async with aiohttp.ClientSession(connector=guarded_connector()) as session:
        await assert_refused(session, "http://169.254.169.254/")
        await assert_refused(session, "http://localhost/")


@pytest.mark.parametrize("ours", [True, False])
async def test_the_connector_closes_its_own_resolver_only(
    world: FakeInternet, monkeypatch, ours: bool
) -> None:
    closed = []

    class Closing(ChangingResolver):
        async def close(self) -> None:
            closed.append(self)

    resolver = Closing(80, 0)
    monkeypatch.setattr(aiohttp, "DefaultResolver", lambda: resolver)
    await guarded_connector(resolver=None if ours else resolver).close()
    assert closed == ([resolver] if ours else [])


async def test_a_socket_factory_for_the_guarded_connector_is_refused() -> None:
    with pytest.raises(ConfigError):
        guarded_connector(socket_factory=lambda info: None)


# -- proxies (T19)


async def test_a_proxy_without_the_url_only_mode_is_a_config_error(world: FakeInternet) -> None:
    async with guarded(world) as session:
        with pytest.raises(ConfigError, match="url-only"):
            await session.get("http://good.test/", proxy="http://inner.test/")
    assert world.connections == []


async def test_behind_a_proxy_the_url_is_judged_and_the_proxy_is_not(world: FakeInternet) -> None:
    world.site("example.com").otherwise("by proxy")
    config = Config(guard=GuardConfig(mode="url-only"))
    async with guarded(world, config=config) as session:
        proxy = "http://inner.test/"
        assert await body(session, "http://example.com/", proxy=proxy) == "by proxy"
        with pytest.raises(Denied):
            await session.get("http://10.0.0.1/", proxy=proxy)
        await assert_refused(session, "http://inner.test/")  # no proxy: judged in full
    assert len(world.requests) == 1
