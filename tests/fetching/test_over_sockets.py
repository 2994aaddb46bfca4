"""Directory and fetcher together, with the fake internet."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.fetching.directory import Directory
from gatekeeper.storage import SqliteStorage
from gatekeeper.storage.base import Storage
from tests.fetching.conftest import fetcher_on
from tests.fetching.directories import DAY
from tests.fetching.host_leases import HostLeases
from tests.internet import Conditional, FakeInternet, Page, Reset, redirect

RULES = "User-agent: *\nDisallow: /private\n"


@asynccontextmanager
async def directory_on(
    net: FakeInternet, storage: Storage | None = None, **sections: Any
) -> AsyncIterator[Directory]:
    config = Config.from_dict(sections)
    async with net.session() as session:
        fetcher = fetcher_on(
            session,
            net.clock,
            config,
            acquire=HostLeases(net.clock, config.pacing.default_interval),
            known=lambda origin: directory.known(origin),  # noqa: PLW0108 - it is made below
        )
        directory = Directory(
            fetcher, config=config, clock=net.clock, rng=random.Random(2), storage=storage
        )
        await directory.open()
        try:
            yield directory
        finally:
            await directory.close()


async def test_dead_origins_do_not_delay_living_ones(net: FakeInternet) -> None:
    clock = net.clock
    dead = [f"dead{n}.test" for n in range(30)]
    for n, name in enumerate(dead):
        (net.refusing, net.blackhole, net.rude)[n % 3](name)
    for n in range(270):
        net.site(f"o{n}.test").robots(f"User-agent: *\nDisallow: /{n}\n")
    took: dict[str, float] = {}

    async def one(directory: Directory, name: str) -> bool:
        record = await directory.get(f"http://{name}")
        took[name] = clock.monotonic()
        return record.reachable

    async with directory_on(net, fetch={"max_concurrent": 20}) as directory:
        names = dead + [f"o{n}.test" for n in range(270)]
        reachable = await net.drive(asyncio.gather(*(one(directory, name) for name in names)))
        assert sum(reachable) == 270
        # Ten silent ones occupy ten of the twenty slots for one second, not for ten.
        assert max(took[f"o{n}.test"] for n in range(270)) <= 2.0
        assert directory.stats().in_flight == 0
        assert not directory.stats().local_fault


async def test_a_refresh_is_conditional_and_a_304_renews(net: FakeInternet) -> None:
    assert isinstance(net.clock, VirtualClock)
    site = net.site("a.test").on("/robots.txt", Conditional(Page(RULES), etag='"1"'))
    async with directory_on(net) as directory:
        before = await net.drive(directory.get("http://a.test"))
        net.clock.advance(DAY)
        after = await net.drive(directory.get("http://a.test"))
        assert [r.headers.get("If-None-Match") for r in site.requests] == [None, '"1"']
        assert after.text is before.text
        assert after.fresh_until > net.clock.monotonic()


DATE = "Tue, 24 Nov 2026 12:00:00 GMT"
IN_TWO_HOURS = "Tue, 24 Nov 2026 14:00:00 GMT"
LATER = "Wed, 25 Nov 2026 12:00:00 GMT"
RENEWALS: dict[str, tuple[dict[str, str], dict[str, str], float]] = {
    "no word": ({}, {}, DAY),
    "max-age": ({"Cache-Control": "max-age=3600"}, {}, 3600),
    "s-maxage": ({"Cache-Control": "max-age=60, s-maxage=3600"}, {}, 3600),
    "the Age is the 304's own": ({"Cache-Control": "max-age=3600", "Age": "2900"}, {}, 3600),
    "an Age of the 304": ({"Cache-Control": "max-age=3600"}, {"Age": "900"}, 2700),
    "no-cache": ({"Cache-Control": "no-cache"}, {}, 600),
    "no-store": ({"Cache-Control": "no-store"}, {}, 600),
    "private": ({"Cache-Control": "private, max-age=3600"}, {}, 600),
    "Expires": ({"Date": DATE, "Expires": IN_TWO_HOURS}, {}, 7200),
    "Expires and a Date": ({"Date": DATE, "Expires": IN_TWO_HOURS}, {"Date": LATER}, 7200),
    "Expires and an Age": ({"Date": DATE, "Expires": IN_TWO_HOURS}, {"Age": "1200"}, 6000),
    "Expires: 0": ({"Expires": "0"}, {}, 600),
    "a coding that is none": ({"Content-Encoding": "none"}, {"Content-Encoding": "8bit"}, DAY),
    "renewed Expires": ({"Expires": "0"}, {"Date": DATE, "Expires": IN_TWO_HOURS}, 7200),
    "renewed max-age": ({"Cache-Control": "no-cache"}, {"Cache-Control": "max-age=7200"}, 7200),
    "renewed no-cache": ({"Cache-Control": "max-age=7200"}, {"Cache-Control": "no-cache"}, 600),
    "Expires behind max-age": (
        {"Cache-Control": "max-age=3600"},
        {"Date": DATE, "Expires": IN_TWO_HOURS},
        3600,
    ),
    "a max-age that is withdrawn": (
        {"Cache-Control": "max-age=3600", "Date": DATE, "Expires": IN_TWO_HOURS},
        {"Cache-Control": "public"},
        7200,
    ),
}


KEPT = ("after a restart", "after a failure")
ALL_SAID = (
    "no-cache",
    "Expires and a Date",
    "a max-age that is withdrawn",
    "a coding that is none",
)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [*((fields, "in memory") for fields in RENEWALS), *itertools.product(ALL_SAID, KEPT)],
)
async def test_a_304_leaves_in_force_what_it_does_not_repeat(
    net: FakeInternet, tmp_path: Path, fields: str, kept: str
) -> None:
    """RFC 9111 section 4.3.4, at every refresh and wherever the record was in between."""
    first, again, seconds = RENEWALS[fields]
    page = Page(RULES, headers=first)
    answer = Conditional(page, etag='"1"', not_modified_headers=again)
    site = net.site("a.test").on("/robots.txt", answer)
    async with AsyncExitStack() as stack:

        async def start() -> Directory:
            storage = None
            if kept == "after a restart":
                storage = SqliteStorage(tmp_path / "state", clock=net.clock)
                await stack.enter_async_context(storage)
            return await stack.enter_async_context(directory_on(net, storage))

        directory = await start()
        await net.drive(directory.get("http://a.test"))
        for _ in range(2):
            if kept == "after a restart":
                await stack.aclose()
                directory = await start()
            elif kept == "after a failure":
                site.on("/robots.txt", Page("", 503))
                await net.drive(directory.refresh("http://a.test"))
                site.on("/robots.txt", answer)
            record = await net.drive(directory.refresh("http://a.test"))
            assert record.expires - net.clock.monotonic() == pytest.approx(seconds, abs=2.0)
        assert directory.stats().revalidated >= 1
        assert record.text is not None
        assert record.current.metadata.coding == first.get("Content-Encoding", "")


async def test_a_record_that_came_by_a_redirect_keeps_what_its_target_said(
    net: FakeInternet,
) -> None:
    page = Page(RULES, headers={"Cache-Control": "max-age=3600"})
    net.site("b.test").on("/robots.txt", Conditional(page, etag='"1"'))
    net.site("a.test").on("/robots.txt", redirect("http://b.test/robots.txt"))
    async with directory_on(net) as directory:
        await net.drive(directory.get("http://b.test"))
        await net.drive(directory.get("http://a.test"))
        net.clock.advance(2 * 3600)
        record = await net.drive(directory.refresh("http://a.test"))
        assert directory.stats().revalidated == 1
        assert record.expires - net.clock.monotonic() == pytest.approx(3600, abs=2.0)


async def test_validators_of_an_error_page_are_not_sent(net: FakeInternet) -> None:
    """A 304 to them would keep the site open although it has a file by now."""
    date = "Tue, 24 Nov 2026 12:00:00 GMT"
    absent = Page("not here", 404, headers={"Last-Modified": date, "ETag": '"1"'})
    site = net.site("a.test").on("/robots.txt", absent)
    async with directory_on(net) as directory:
        await net.drive(directory.get("http://a.test"))
        site.on("/robots.txt", Conditional(Page(RULES), etag='"1"', last_modified=date))
        record = await net.drive(directory.refresh("http://a.test"))
        assert record.text is not None


async def test_unconditional_requests_can_be_had(net: FakeInternet) -> None:
    site = net.site("a.test").on("/robots.txt", Conditional(Page(RULES), etag='"1"'))
    async with directory_on(net, fetch={"conditional": False}) as directory:
        await net.drive(directory.get("http://a.test"))
        await net.drive(directory.refresh("http://a.test"))
        assert [r.headers.get("If-None-Match") for r in site.requests] == [None, None]


async def test_the_targets_record_is_consulted_and_filled(net: FakeInternet) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://www.test/robots.txt", 301))
    net.site("b.test").on("/robots.txt", redirect("http://www.test/robots.txt", 301))
    www = net.site("www.test").robots(RULES)
    async with directory_on(net) as directory:
        a = await net.drive(directory.get("http://a.test"))
        own = await net.drive(directory.get("http://www.test"))
        b = await net.drive(directory.get("http://b.test"))
        assert len(www.requests) == 1, "once per origin"
        assert a.text is own.text is b.text
        assert a.current.hops == b.current.hops == ("http://www.test/robots.txt",)
        assert own.current.hops == ()


async def test_each_request_of_a_retrieval_takes_a_lease(net: FakeInternet) -> None:
    site = net.site("a.test").on("/robots.txt", redirect("/r"))
    site.on("/r", Reset(), Page(RULES))
    async with directory_on(net, pacing={"default_interval": 2.0}) as directory:
        assert (await net.drive(directory.get("http://a.test"))).reachable
    assert len(site.requests) == 3
    assert min(site.gaps()) >= 2.0
    assert site.most_concurrent == 1


async def test_a_rule_before_the_limit_of_500_kib_is_read(
    net: FakeInternet,
) -> None:
    head = b"User-agent: *\nDisallow: /first\n"
    last = b"\nDisallow: /on-the-cut-of-the-file\n"
    filler = b"#" * (512_000 - len(head) - 20)
    net.site("a.test").robots(head + filler + last + b"Disallow: /behind\n")
    async with directory_on(net) as directory:
        record = await net.drive(directory.get("http://a.test"))
        standing = record.standing(net.clock)
        assert standing.robots is not None
        assert standing.robots.truncated
        policy = standing.robots.policy("testbot")
        assert not policy.allowed("/first")
        # The line at the cut is dropped entirely: a part of it would be another rule.
        assert policy.allowed("/on-the-cut-of-the-file")
        assert policy.allowed("/on-the")
        assert policy.allowed("/behind")


async def test_exactly_500_kib_are_read_to_the_last_line(net: FakeInternet) -> None:
    head, last = b"User-agent: *\n", b"\nDisallow: /last"
    net.site("a.test").robots(head + b"#" * (512_000 - len(head) - len(last)) + last)
    async with directory_on(net) as directory:
        record = await net.drive(directory.get("http://a.test"))
        assert record.text is not None
        assert not record.text.robots.truncated
        assert not record.text.robots.policy("testbot").allowed("/last")


async def test_a_fetch_ended_by_close_leaves_no_socket(net: FakeInternet) -> None:
    net.blackhole("a.test")
    async with directory_on(net) as directory:
        waiting = asyncio.create_task(directory.get("http://a.test"))
        await net.settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not [t for t in asyncio.all_tasks() if "_run_flight" in repr(t)]


async def test_an_unreachable_file_reads_as_a_deferral(net: FakeInternet) -> None:
    net.site("a.test").robots(Page("no", 503, [("Retry-After", "600")]))
    async with directory_on(net) as directory:
        record = await net.drive(directory.get("http://a.test"))
        standing = record.standing(net.clock)
        assert (standing.verdict, standing.state, standing.reason, standing.status) == (
            Verdict.DEFER,
            State.UNREACHABLE,
            Reason.SERVER_ERROR,
            503,
        )
        assert standing.retry_at is not None
        assert 600 <= standing.retry_at - net.clock.wall() <= 720
