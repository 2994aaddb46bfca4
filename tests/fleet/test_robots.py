"""robots.txt files are fetched once per fleet."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from gatekeeper.config import CacheConfig, FleetConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fetching.directory import Directory, Flight, current_flight
from gatekeeper.fetching.outcomes import (
    Lifetime,
    Metadata,
    Outcome,
    Retrieval,
    RobotsSource,
    Validators,
    last_look,
)
from gatekeeper.fleet import RedisLedger, robots, scripts
from gatekeeper.fleet import robots as robots_module
from gatekeeper.fleet.robots import SharedFetcher
from gatekeeper.fleet.store import Store, StoreRefuses
from tests.fleet.conftest import Join, heartbeat, store_of
from tests.fleet.server import BINARY, Server
from tests.pacing.ledger_rules import PATIENCE, Listener
from tests.waiting_support import until

ORIGIN = "https://a.example"


class Site:
    """The result of the members' fetchers, and how often they fetched. `due`: leases are free."""

    def __init__(self) -> None:
        self.asked = 0
        self.queued = 0
        self.due = asyncio.Event()
        self.due.set()
        self.answer = Retrieval(
            outcome=Outcome.RULES,
            status=200,
            body=b"User-agent: *\nDisallow: /x\n" * 50,
            etag='"1"',
        )
        self.open = asyncio.Event()
        self.open.set()

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        self.queued += 1
        await self.due.wait()
        if (look := last_look.get()) is not None:
            await look()
        self.asked += 1
        await self.open.wait()
        return self.answer

    async def reach(self, origin: str) -> bool | None:
        return None


class Files:
    """The files that a member has."""

    def __init__(self) -> None:
        self.held: dict[str, Retrieval] = {}
        self.renewed: list[str] = []

    def fresh(self) -> Iterator[tuple[str, float]]:
        for origin, one in self.held.items():
            assert one.lifetime.seconds is not None
            yield origin, one.lifetime.seconds

    def known(self, origin: str) -> Retrieval | None:
        return self.held.get(origin)

    def renew(self, origin: str) -> None:
        self.renewed.append(origin)


def directory(files: Files) -> Directory:
    return cast("Directory", files)


class Member:
    """Makes members of a fleet, each with a connection of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stores: dict[str, Store] = {}

    def __call__(
        self,
        site: Site,
        name: str,
        cache: CacheConfig | None = None,
        divided: Callable[[], bool] = lambda: True,
    ) -> SharedFetcher:
        store = self.stores[name] = Store(self.server.url, FleetConfig(), any_epoch=True)
        cache = cache or CacheConfig()
        return SharedFetcher(site, store, cache, "{gatekeeper}:", name, divided=divided)


@pytest.fixture
async def member(server: Server) -> AsyncIterator[Member]:
    yield (made := Member(server))
    for store in made.stores.values():
        await store.close()


async def lost(*_: object) -> None:
    raise LedgerLost("away")


def waits(one: RobotsSource) -> bool:
    """Whether a member waits for a file that another one fetches."""
    return ORIGIN in shared(one)._written_events


async def stored(one: SharedFetcher, origin: str = ORIGIN) -> Any:
    """What the store has of an origin."""
    found, _ = await one._read(origin)
    assert found is not None
    return found


async def test_many_members_at_once_fetch_once(member: Member) -> None:
    site = Site()
    site.open.clear()
    members = [member(site, f"m{number}") for number in range(6)]
    fetches = [asyncio.create_task(one.fetch(ORIGIN)) for one in members]
    await until(lambda: site.asked == 1)
    await until(lambda: sum(map(waits, members)) == 5)
    site.open.set()
    found = await asyncio.gather(*fetches)
    assert site.asked == 1
    assert {one.body for one in found} == {site.answer.body}
    assert {(one.outcome, one.status, one.etag) for one in found} == {(Outcome.RULES, 200, '"1"')}


async def test_a_member_that_has_the_file_and_asks_again_fetches_it(member: Member) -> None:
    """Because it has expired there or a refresh is forced; the others take the new one."""
    site = Site()
    one, other = member(site, "one"), member(site, "other")
    await one.fetch(ORIGIN)
    await other.fetch(ORIGIN)
    assert site.asked == 1
    await one.fetch(ORIGIN)
    assert site.asked == 2
    await other.fetch(ORIGIN)
    assert site.asked == 2


async def test_a_shared_copy_expires_when_the_original_does(member: Member, server: Server) -> None:
    site = Site()
    site.answer = Retrieval(outcome=Outcome.RULES, status=200, body=b"", lifetime=Lifetime(7200.0))
    one, other = member(site, "one"), member(site, "other")
    await one.fetch(ORIGIN)
    key = "{gatekeeper}:r:" + ORIGIN
    server.ask("PEXPIRE", key, str(round((1.5 * 6600 - 3600) * 1000)))  # an hour later
    found = await other.fetch(ORIGIN)
    assert found.lifetime.seconds is not None
    # Earlier than the site specifies by `min_ttl`, since members cache it for at least that.
    assert 2995.0 < found.lifetime.seconds <= 3000.0
    server.ask("PEXPIRE", key, str(round((1.5 * 6600 - 6700) * 1000)))
    third = member(site, "third")
    await third.fetch(ORIGIN)
    assert site.asked == 2


async def test_a_record_renewed_by_a_304_is_shared_with_its_headers(member: Member) -> None:
    site = Site()
    said = Metadata(brief=False, max_age=7200.0)
    site.answer = msgspec.structs.replace(
        site.answer, lifetime=Lifetime(7200.0), metadata=said, outcome=Outcome.SOFT_404
    )
    cache = CacheConfig(default_ttl=3600.0)
    one, other = member(site, "one", cache), member(site, "other", cache)
    await one.fetch(ORIGIN)
    assert (await other.fetch(ORIGIN)).metadata == said

    renewed = said.renewed_by(Metadata(brief=True, max_age=7200.0))
    site.answer = Retrieval(
        outcome=Outcome.NOT_MODIFIED,
        status=304,
        lifetime=Lifetime(7200.0, brief=True),
        metadata=renewed,
    )
    await one.fetch(ORIGIN)
    found = await other.fetch(ORIGIN)
    assert (found.outcome, found.metadata) == (Outcome.SOFT_404, renewed)
    assert found.lifetime.brief
    assert found.lifetime.seconds is not None
    assert found.lifetime.seconds <= 600.0  # an absence, and no-cache: the minimum


async def test_a_short_lifetime_is_not_made_longer_by_being_shared(
    member: Member, server: Server
) -> None:
    """The site specifies 24 s, which also applies to members that read the shared file."""
    site, cache = Site(), CacheConfig(min_ttl=4.0)
    site.answer = Retrieval(outcome=Outcome.RULES, status=200, body=b"", lifetime=Lifetime(24.0))
    await member(site, "one", cache).fetch(ORIGIN)
    found = await member(site, "other", cache).fetch(ORIGIN)
    assert found.lifetime.seconds is not None
    assert found.lifetime.seconds <= 20.0
    key = "{gatekeeper}:r:" + ORIGIN
    server.ask("PEXPIRE", key, str(round((1.5 * 20 - 20) * 1000)))  # 20 s later
    await member(site, "third", cache).fetch(ORIGIN)
    assert site.asked == 2


async def test_a_file_written_between_the_look_and_the_claim_is_not_fetched_again(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    one, other = member(site, "one"), member(site, "other")
    store = member.stores["one"]
    script = store.script

    async def late(text: str, *arguments: Any) -> Any:
        if text == scripts.CLAIM:
            monkeypatch.setattr(store, "script", script)
            await other.fetch(ORIGIN)  # look, claim, fetch, write, release the claim
        return await script(text, *arguments)

    monkeypatch.setattr(store, "script", late)
    assert (await one.fetch(ORIGIN)).body == site.answer.body
    assert site.asked == 1
    await one.fetch(ORIGIN)  # and the claim is released
    await other.fetch(ORIGIN)
    assert site.asked == 2


@pytest.mark.parametrize("forced", [False, True])
async def test_a_member_whose_claim_was_lost_takes_the_result_of_another_member(
    member: Member, server: Server, forced: bool
) -> None:
    """A store that lost its data lost the claims, so two members may wait for the host's lease."""
    slow, quick = Site(), Site()
    slow.due.clear()
    one, other = member(slow, "one"), member(quick, "other")
    token = current_flight.set(Flight(ORIGIN, force=forced))
    waiting = asyncio.create_task(one.fetch(ORIGIN))
    current_flight.reset(token)
    await until(lambda: slow.queued == 1)
    server.ask("FLUSHALL")
    await other.fetch(ORIGIN)
    slow.due.set()
    assert (await waiting).body == quick.answer.body
    assert (slow.asked, quick.asked) == (0, 1)
    assert server.ask("EXISTS", "{gatekeeper}:f:" + ORIGIN) == b":0\r\n"  # both claims are released


async def test_a_member_that_lost_the_store_looks_there_again_once_it_has_its_lease(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member gives the store up after a while, and then waits for a lease as long as it takes."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(robots_module, "CLAIM_FOR", 0.05)
    slow, quick = Site(), Site()
    slow.due.clear()
    one, other = member(slow, "one"), member(quick, "other")
    with monkeypatch.context() as patch:
        patch.setattr(member.stores["one"], "script", lost)
        waiting = asyncio.create_task(one.fetch(ORIGIN))
        await until(lambda: slow.queued == 1)
        await other.fetch(ORIGIN)  # before the first one has the store again, and could claim it
    slow.due.set()
    assert (await waiting).body == quick.answer.body
    assert (slow.asked, quick.asked) == (0, 1)


async def test_a_304_is_shared_with_the_text_that_it_speaks_of(member: Member) -> None:
    site = Site()
    one, other = member(site, "one"), member(site, "other")
    await one.fetch(ORIGIN)
    text = site.answer.body
    site.answer = Retrieval(outcome=Outcome.NOT_MODIFIED, status=304, etag='"1"')
    assert (await one.fetch(ORIGIN)).outcome is Outcome.NOT_MODIFIED
    found = await other.fetch(ORIGIN)
    assert (found.outcome, found.body) == (Outcome.RULES, text)
    assert site.asked == 2


async def test_a_member_that_waits_for_a_file_is_told_at_once(
    member: Member, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a message, the next look would come after an hour here."""
    monkeypatch.setattr(robots, "FIRST_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(robots, "MAX_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(robots, "CLAIM_FOR", 9000.0)
    site, ledger = Site(), await join()
    ledger.listen("a", Listener())
    await until(lambda: ledger.hearing)
    site.open.clear()
    fetching = asyncio.create_task(member(site, "one").fetch(ORIGIN))
    await until(lambda: site.asked == 1)
    other = ledger.sharing(site, CacheConfig(), lambda: None)
    waiting = asyncio.create_task(other.fetch(ORIGIN))
    await until(lambda: waits(other))
    site.open.set()
    async with asyncio.timeout(PATIENCE):
        assert (await waiting).body == (await fetching).body
    assert site.asked == 1


async def test_a_newer_file_is_offered_to_who_has_an_older_one(
    member: Member, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, ledger, files = Site(), await join(), Files()
    offered = files.renewed
    ledger.listen("a", Listener())
    await until(lambda: ledger.hearing)
    one, other = member(site, "one"), ledger.sharing(site, CacheConfig(), lambda: directory(files))
    await one.fetch("https://b.example")  # which the other one does not have
    await one.fetch(ORIGIN)
    await other.fetch(ORIGIN)
    site.answer = Retrieval(outcome=Outcome.SERVER_ERROR, status=500)
    await one.fetch(ORIGIN)  # not better than the version that it has
    site.answer = Retrieval(outcome=Outcome.RULES, status=200, body=b"User-agent: *")
    await one.fetch(ORIGIN)
    await until(lambda: bool(offered))
    assert offered == [ORIGIN]
    assert (await other.fetch(ORIGIN)).body == b"User-agent: *"
    asked, heard, hears = site.asked, list[str](), other.written

    def told(origin: str, stamp: str, good: bool) -> None:
        hears(origin, stamp, good)
        heard.append(origin)

    monkeypatch.setattr(other, "written", told)
    await other.fetch(ORIGIN)  # a member's own result is not offered to itself
    await until(lambda: bool(heard))
    assert offered == [ORIGIN]
    assert site.asked == asked + 1


@pytest.mark.parametrize("known", [False, True])
async def test_a_refresh_asks_the_site_whatever_lies_in_the_store(
    member: Member, known: bool
) -> None:
    site = Site()
    one, other = member(site, "one"), member(site, "other")
    if known:
        await other.fetch(ORIGIN)
    await one.fetch(ORIGIN)
    asked = site.asked
    flight = Flight(ORIGIN, force=True)
    token = current_flight.set(flight)
    await other.fetch(ORIGIN)
    current_flight.reset(token)
    assert site.asked == asked + 1


async def test_a_result_that_is_our_own_fault_is_not_shared(member: Member) -> None:
    site = Site()
    site.answer = Retrieval(outcome=Outcome.OVERLOADED)
    await member(site, "one").fetch(ORIGIN)
    await member(site, "other").fetch(ORIGIN)
    assert site.asked == 2


async def test_a_member_that_dies_delays_a_file_by_no_more_than_its_claim(
    member: Member, server: Server
) -> None:
    site, dead = Site(), Site()
    dead.open.clear()
    dying = asyncio.create_task(member(dead, "dying").fetch(ORIGIN))
    await until(lambda: dead.asked == 1)
    living = member(site, "living")
    waiting = asyncio.create_task(living.fetch(ORIGIN))
    await until(lambda: waits(living))
    assert site.asked == 0
    server.ask("PEXPIRE", "{gatekeeper}:f:" + ORIGIN, "1")  # as time would
    await waiting
    assert site.asked == 1
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)


async def test_without_the_store_each_fetches_for_itself(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.01)
    site = Site()
    for name in ("one", "other"):
        one = member(site, name)
        monkeypatch.setattr(member.stores[name], "script", lost)
        monkeypatch.setattr(member.stores[name], "run", lost)
        assert (await one.fetch(ORIGIN)).outcome is Outcome.RULES
    assert site.asked == 2


async def test_a_store_call_that_fails_once_causes_no_second_fetch(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.01)
    site = Site()
    await member(site, "one").fetch(ORIGIN)
    other = member(site, "other")
    store = member.stores["other"]
    script = store.script

    async def breaks(*_: object) -> None:
        monkeypatch.setattr(store, "script", script)
        raise LedgerLost("the connection broke")

    monkeypatch.setattr(store, "script", breaks)
    assert (await other.fetch(ORIGIN)).body == site.answer.body
    assert site.asked == 1


async def test_an_unreachable_store_is_tried_by_a_bounded_number_of_retrievals(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may take two seconds, and a thousand origins may be requested."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.2)
    site, tries = Site(), 0
    one = member(site, "one")
    answer = asyncio.Event()

    async def hanging(*_: object) -> None:
        nonlocal tries
        tries += 1
        await answer.wait()
        raise LedgerLost("away")

    monkeypatch.setattr(member.stores["one"], "script", hanging)
    monkeypatch.setattr(member.stores["one"], "run", hanging)
    fetches = [asyncio.create_task(one.fetch(f"https://h{n}.example")) for n in range(200)]
    await until(lambda: tries > 0)
    answer.set()
    found = await asyncio.gather(*fetches)
    assert {retrieval.outcome for retrieval in found} == {Outcome.RULES}
    assert site.asked == 200
    assert tries <= 2 * 8


async def test_a_store_that_denies_access_is_left_alone_for_longer(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt logs in once more, which a store with a list of failures may punish."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.01)
    monkeypatch.setattr(robots_module, "CLAIM_FOR", 0.1)
    site, tries = Site(), 0
    one = member(site, "one", divided=lambda: False)

    async def refuses(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise StoreRefuses("invalid password")

    monkeypatch.setattr(member.stores["one"], "script", refuses)
    for _ in range(3):
        found = await asyncio.gather(*(one.fetch(f"https://h{n}.example") for n in range(50)))
        assert {(each.outcome, each.detail) for each in found} == {
            (Outcome.FLEET, "invalid password")
        }
    assert tries <= 8
    assert site.asked == 0


@pytest.mark.parametrize("what", ["outcome", "body", "rubbish"])
async def test_a_file_written_by_another_version_that_cannot_be_read_is_fetched(
    member: Member, server: Server, what: str
) -> None:
    site = Site()
    one = member(site, "one")
    await one.fetch(ORIGIN)
    key = "{gatekeeper}:r:" + ORIGIN
    found = await stored(one)
    if what == "outcome":
        text = msgspec.msgpack.encode(msgspec.structs.replace(found, outcome="of a later time"))
    elif what == "body":
        text = msgspec.msgpack.encode(msgspec.structs.replace(found, body=b"not compressed"))
    else:
        text = b"rubbish"
    await member.stores["one"].run("SET", key, text, "PX", round(found.kept * 1000))
    other = Site()
    assert (await member(other, "other").fetch(ORIGIN)).body == site.answer.body
    assert other.asked == 1


async def test_while_no_lease_is_granted_the_store_is_asked_until_it_answers(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is back, it has the result of another member: the file is not fetched again."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.01)
    site, tries = Site(), 0
    await member(site, "one").fetch(ORIGIN)
    other = member(site, "other", divided=lambda: False)
    store = member.stores["other"]
    script = store.script

    async def away(*_: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 5:
            monkeypatch.setattr(store, "script", script)
        raise LedgerLost("away")

    monkeypatch.setattr(store, "script", away)
    assert (await other.fetch(ORIGIN)).body == site.answer.body
    assert site.asked == 1
    tries = -1000
    monkeypatch.setattr(store, "script", away)
    monkeypatch.setattr(robots_module, "CLAIM_FOR", 0.1)
    # For at most the lifetime of a claim. Leases may be granted meanwhile, if the store refuses
    # the connections for files alone.
    assert (await other.fetch(ORIGIN)).outcome is Outcome.FLEET
    assert site.asked == 1


@pytest.mark.skipif(BINARY is None, reason="no redis-server here")
async def test_at_maxclients_the_question_is_deferred_although_leases_are_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger's connections live, and the store refuses the new one for the file."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.01)
    monkeypatch.setattr(robots_module, "CLAIM_FOR", 0.1)
    full, site = Server("--maxclients", "1"), Site()
    full.start()
    store = Store(full.url, FleetConfig(), any_epoch=True)
    prefix = "{gatekeeper}:"
    one = SharedFetcher(site, store, CacheConfig(), prefix, "one", divided=lambda: False)
    with socket.socket(socket.AF_UNIX) as ledger:
        ledger.connect(str(full.socket))
        found = await one.fetch(ORIGIN)
    assert (found.outcome, site.asked) == (Outcome.FLEET, 0)
    assert "maxclients" in found.detail
    async with asyncio.timeout(PATIENCE):
        while (await one.fetch(ORIGIN)).outcome is Outcome.FLEET:
            pass
    assert site.asked == 1
    await one.close()
    await store.close()
    full.close()


async def test_a_result_that_could_not_be_written_is_written_once_the_store_answers(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is renewed meanwhile, and the caller has its answer immediately."""
    monkeypatch.setattr(robots_module, "AWAY_SECONDS", 0.02)
    site = Site()
    one, other = member(site, "one"), member(site, "other")
    store, away = member.stores["one"], asyncio.Event()
    script = store.script

    async def unwritten(text: str, *arguments: object) -> object:
        if text == scripts.WRITE and not away.is_set():
            raise LedgerLost("away")
        return await script(text, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "script", unwritten)
    assert (await one.fetch(ORIGIN)).body == site.answer.body
    waiting = asyncio.create_task(other.fetch(ORIGIN))
    await until(lambda: waits(other))
    away.set()
    assert (await waiting).body == site.answer.body
    assert site.asked == 1
    whole = await stored(other)
    await one.close()
    # Its age counts from the fetch, not from the write.
    another = Site()
    await member(another, "third").fetch("https://b.example")
    fresh = await stored(other, "https://b.example")
    assert fresh.fresh - PATIENCE < whole.fresh < fresh.fresh - 2.0


async def test_a_result_that_waits_to_be_written_ends_with_the_member(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member(Site(), "one")
    store = member.stores["one"]
    script = store.script

    async def unwritten(text: str, *arguments: object) -> object:
        if text == scripts.WRITE:
            raise LedgerLost("away")
        return await script(text, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "script", unwritten)
    before = asyncio.all_tasks()
    await one.fetch(ORIGIN)
    assert asyncio.all_tasks() - before
    await one.close()
    assert not asyncio.all_tasks() - before


HELD = Retrieval(
    outcome=Outcome.RULES, status=200, body=b"User-agent: *\nDisallow: /held\n", etag='"7"'
)
HOUR = Lifetime(3600.0)


class Pair:
    """Two members. `holder` has `files`, and `seeker` asks."""

    def __init__(self, holder: RedisLedger, seeker: RedisLedger) -> None:
        self.sites = Site(), Site()
        self.files = Files()
        self.ledgers = holder, seeker
        cache = CacheConfig()
        self.holder = shared(holder.sharing(self.sites[0], cache, lambda: directory(self.files)))
        self.seeker = shared(seeker.sharing(self.sites[1], cache, lambda: None))

    async def forget(self, server: Server) -> None:
        """Empty the store, and wait until both members have pushed what they know."""
        server.ask("FLUSHALL")
        for ledger in self.ledgers:
            with pytest.raises(LedgerLost):
                await heartbeat(ledger)
            await ledger.look(["any"])
            await until(lambda: ledger.hearing)  # noqa: B023 - awaited here


def shared(source: RobotsSource) -> SharedFetcher:
    assert isinstance(source, SharedFetcher)
    return source


@pytest.fixture
async def pair(join: Join) -> Pair:
    ledgers = await join(), await join()
    for ledger in ledgers:
        ledger.listen(ledger.member, Listener())
    return Pair(*ledgers)


@pytest.mark.parametrize(
    "held",
    [
        HELD,
        Retrieval(outcome=Outcome.NO_FILE, status=404),
        Retrieval(outcome=Outcome.SERVER_ERROR, status=503, retry_after=3600.0),
        Retrieval(outcome=Outcome.RULES, status=200, body=b"", hops=("https://c.example/r",)),
    ],
    ids=["text", "absent", "failing", "redirected"],
)
async def test_a_file_that_the_store_lost_comes_from_the_member_that_has_it(
    pair: Pair, server: Server, held: Retrieval
) -> None:
    pair.files.held[ORIGIN] = msgspec.structs.replace(held, lifetime=HOUR)
    await pair.forget(server)
    found = await pair.seeker.fetch(ORIGIN)
    assert (found.outcome, found.body, found.status) == (held.outcome, held.body, held.status)
    assert (found.etag, found.hops) == (held.etag, held.hops)
    assert pair.sites[1].asked == 0
    assert found.lifetime.seconds is not None
    assert 0.0 < found.lifetime.seconds <= 3600.0 - CacheConfig().min_ttl
    await until(lambda: server.ask("KEYS", "*[fo]:https*") == b"*0\r\n")  # no claim, no offer


async def test_a_member_that_missed_the_request_for_its_file_is_asked_again(
    pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.forget(server)
    supply, missed = pair.holder.supply, list[str]()

    def misses(origin: str) -> None:
        missed.append(origin)
        monkeypatch.setattr(pair.holder, "supply", supply)

    monkeypatch.setattr(pair.holder, "supply", misses)
    assert (await pair.seeker.fetch(ORIGIN)).body == HELD.body
    assert (missed, pair.sites[1].asked) == ([ORIGIN], 0)


async def test_a_dead_member_that_has_the_file_delays_it_by_one_claim(
    pair: Pair, server: Server
) -> None:
    pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.forget(server)
    await pair.ledgers[0].close()
    seeking = asyncio.create_task(pair.seeker.fetch(ORIGIN))
    await until(lambda: waits(pair.seeker))
    claim, offer = ("{gatekeeper}:f:" + ORIGIN, "{gatekeeper}:o:" + ORIGIN)
    assert 0 < int(server.ask("PTTL", offer)[1:-2]) < 10_000  # it was an hour
    for key in (offer, claim):
        server.ask("PEXPIRE", key, "1")  # as time would
    assert (await seeking).body == pair.sites[1].answer.body
    assert pair.sites[1].asked == 1


async def test_a_seeker_that_already_waits_for_a_lease_takes_the_file_that_is_offered(
    pair: Pair, server: Server
) -> None:
    """It claimed the origin after the store had lost the file, and before it was offered."""
    pair.sites[1].due.clear()
    waiting = asyncio.create_task(pair.seeker.fetch(ORIGIN))
    await until(lambda: pair.sites[1].queued == 1)
    pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.forget(server)
    pair.sites[1].due.set()
    assert (await waiting).body == HELD.body
    assert pair.sites[1].asked == 0


async def test_a_refresh_does_not_take_what_is_offered(pair: Pair, server: Server) -> None:
    pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.forget(server)
    token = current_flight.set(Flight(ORIGIN, force=True))
    assert (await pair.seeker.fetch(ORIGIN)).body == pair.sites[1].answer.body
    current_flight.reset(token)
    assert pair.sites[1].asked == 1


@pytest.mark.parametrize("why", ["dropped", "about to expire", "ours"])
async def test_a_file_that_can_not_be_supplied_any_more_is_fetched(
    pair: Pair, server: Server, why: str
) -> None:
    pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.forget(server)
    if why == "dropped":
        pair.files.held.clear()
    else:
        late = Lifetime(CacheConfig().min_ttl - 1.0)  # the other would use it for longer
        outcome = Outcome.RULES if why == "about to expire" else Outcome.OURS
        pair.files.held[ORIGIN] = msgspec.structs.replace(HELD, lifetime=late, outcome=outcome)
    assert (await pair.seeker.fetch(ORIGIN)).body == pair.sites[1].answer.body
    assert pair.sites[1].asked == 1


async def test_files_are_offered_to_the_store_as_long_as_time_suffices(
    pair: Pair, server: Server
) -> None:
    for number in range(1_700):
        pair.files.held[f"https://h{number}.example"] = msgspec.structs.replace(HELD, lifetime=HOUR)
    await pair.holder.offer(store_of(pair.ledgers[0]), 0.0)
    assert server.ask("KEYS", "*:o:*") == b"*0\r\n"
    await pair.holder.offer(store_of(pair.ledgers[0]), PATIENCE)
    assert server.ask("KEYS", "*:o:*").startswith(b"*1700\r\n")
    assert server.ask("PTTL", "{gatekeeper}:o:https://h1.example").startswith(b":35")


async def test_a_text_in_the_store_beyond_the_size_limit_is_not_unpacked(
    member: Member, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few octets in the store could fill the memory."""
    one, site = member(Site(), "one"), Site()
    await one.fetch(ORIGIN)
    monkeypatch.setattr(robots_module, "MAX_TEXT", 1_000)
    await member(site, "other").fetch(ORIGIN)
    assert site.asked == 1
