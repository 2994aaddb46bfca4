"""The inputs of the benchmarks are reproducible and shaped like real files."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from benchmarks import manners
from benchmarks.__main__ import main
from benchmarks.against import compared, figure_of
from benchmarks.corpus import generate, load, shape
from benchmarks.manners_judge import judge, judge_restart, may_be_had
from benchmarks.manners_peers import PEERS, Peer
from benchmarks.manners_site import PRIVATE, Host, Kind, World, crawl, interrupted
from benchmarks.refusals import SCENES, simulate
from benchmarks.report import Table
from benchmarks.timing import Contender, Sample, compete, spread
from tests.effort import some_of
from tests.waiting_support import until


def test_the_same_seed_makes_the_same_sites() -> None:
    assert generate(20) == generate(20)
    assert generate(20) != generate(20, seed=1)


def test_made_up_sites_have_the_size_and_the_rules_of_real_ones() -> None:
    found = shape(generate())
    assert 1_000 < found["bytes_mean"] < 2_200
    assert 8 < found["rules_p50"] < 25
    assert 60 < found["rules_p90"] < 150
    assert 150 < found["rules_p99"] < 700


def test_a_corpus_can_be_read_from_a_file(tmp_path: Path) -> None:
    row = {"robots_txt": "User-agent: *\n", "urls": ["https://a.example/"]}
    path = tmp_path / "robots.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (site,) = load(path)
    assert site.body == b"User-agent: *\n"
    assert site.urls == ("https://a.example/",)


@pytest.mark.parametrize("text", ["", "{}", "[]", "x", '{"robots_txt": 1, "urls": []}'])
def test_a_file_that_is_no_corpus_is_an_error_of_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "robots.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["--only", "text", "--corpus", str(path)])
    assert f"error: --corpus {path}: " in capsys.readouterr().err


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    slow = Sample((2.0, 20.0, 2.0), work=10)
    fast = Sample((1.0, 10.0, 1.0), work=10)
    assert fast.faster_than(slow) == (2.0, 2.0, 2.0)


def test_a_spread_stays_within_the_measured_values() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    low, median, high = spread([1.0, 2.0, 9.0])
    assert 1.0 <= low < median == 2.0 < high <= 9.0
    assert spread([float(number) for number in range(11)]) == (1.0, 5.0, 9.0)


def test_every_contender_works_once_a_round_after_a_warm_up() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def contender(name: str) -> Contender:
        def work(turn: int) -> int:
            seen[name].append(turn)
            return 5

        return Contender(work)

    samples = compete({name: contender(name) for name in seen}, rounds=3)
    assert seen == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    assert [len(sample.rounds) for sample in samples.values()] == [3, 3]


def test_a_table_is_markdown() -> None:
    table = Table("Title", ("", "figure"), [("ours", "1 µs")], "fast", ("a note",))
    assert table.markdown() == (
        "## Title\n\nGoal: fast\n\n"
        "|      | figure |\n|------|--------|\n| ours | 1 µs   |\n\n- a note\n"
    )


FIXED = some_of(["1 in 3 s", "60 a minute, Retry-After 60", "60 a minute, no Retry-After"], 2)


@pytest.mark.parametrize("title", FIXED)
def test_a_site_with_a_fixed_limit_is_met_a_few_times_a_day_and_well_used(title: str) -> None:
    (scene,) = [scene for scene in SCENES if scene.title == title]
    (day,) = simulate(scene)
    assert 5 <= day.refused <= 12  # at first, and after 1, 2, 4, 8 and 16 hours
    assert day.share > 0.6


HOURLY = some_of((s.title for s in SCENES if s.title.startswith("1,000 an hour")), 2)


@pytest.mark.parametrize("title", HOURLY)
def test_a_site_that_counts_by_the_hour_is_met_at_most_once_an_hour(title: str) -> None:
    """A trial of the usual rate succeeds for many minutes before the quota is used up."""
    (scene,) = [scene for scene in SCENES if scene.title == title]
    first, second = simulate(scene, 2)
    assert first.refused <= 40
    assert second.refused <= 6
    if "600" in title:
        assert first.refused <= 24
        assert second.share > 0.8


def test_a_fault_once_in_ten_thousand_costs_little() -> None:
    (scene,) = [scene for scene in SCENES if scene.title == "0.01 % at random"]
    (day,) = simulate(scene)
    assert day.refused < 12
    assert day.share > 0.8


def test_a_longer_duration_and_a_lower_rate_are_both_worse() -> None:
    def run(duration: str, rate: str) -> dict[tuple[str, str, str], str]:
        return {("gate", "check", "time"): duration, ("pacing", "one host", "leases/s"): rate}

    before = [run("5.0x (4.9x to 5.1x), 1.00 µs", "200 k"), run("5.0x, 1.00 µs", "210 k")]
    now = [run("5.0x, 2.00 µs", "100 k"), run("5.0x, 2.00 µs", "105 k")]
    assert [round(worse, 2) for *_, worse in compared(before, now)] == [2.0, 2.0]
    assert [round(worse, 2) for *_, worse in compared(now, before)] == [0.5, 0.5]


def test_only_what_all_runs_print_as_a_duration_a_size_or_a_rate_is_compared() -> None:
    table = ("text", "gatekeeper")
    before = [{(*table, "ratio"): "1.20x", (*table, "hosts"): "200", (*table, "gone"): "1 ms"}]
    assert compared(before, [{(*table, "ratio"): "1.00x", (*table, "hosts"): "100"}]) == []
    assert figure_of("2.8 kB") == (2800.0, True)
    assert figure_of("no figure") is None


# --- manners: what the judge sees in the log of the sites -----------------------------------


class Visitor:
    """A client that does what its script says, at the times that its script says."""

    def __init__(self, make: Callable[[Callable[[], float]], World]) -> None:
        self.time = 1000.0
        self.world = make(lambda: self.time)
        self.session: aiohttp.ClientSession

    def first(self, kind: Kind) -> Host:
        return next(host for host in self.world.hosts.values() if host.kind is kind)

    async def get(
        self, host: Host | str, path: str = "/robots.txt", *, follow: bool = False
    ) -> int:
        address = host if isinstance(host, str) else host.address
        url = f"http://{address}:{self.world.port}{path}"
        async with self.session.get(url, allow_redirects=follow) as response:
            return response.status

    async def politely(self) -> None:
        """Fetch all that may be fetched, each host at its own pace."""
        for host in self.world.hosts.values():
            await self.get(host)
            if host.kind in (Kind.ROBOTS_503, Kind.ROBOTS_PRIVATE, Kind.SLOW):
                continue
            for path in host.paths:
                if not path.startswith("/private/"):
                    self.time += 1.0
                    if await self.get(host, path) in (429, 503):
                        self.time += host.seconds
                        await self.get(host, path)


@pytest.fixture
async def visitor() -> AsyncIterator[Visitor]:
    visitor = Visitor(crawl)
    async with visitor.world.serving(), aiohttp.ClientSession() as visitor.session:
        yield visitor


async def test_the_judge_finds_no_fault_in_a_polite_crawl(visitor: Visitor) -> None:
    await visitor.politely()
    found = judge(visitor.world)
    assert found.faults() == set()
    assert (found.pages, found.gaps) == (len(may_be_had(visitor.world)), 15)
    assert (found.shortest, found.robots_fetches) == (1.0, 1.0)
    assert len(visitor.world.hosts) == 30


async def disallowed(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.RULES), "/private/1.html")


async def hops(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.REDIRECT), "/to/here", follow=True)


async def hops_elsewhere(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.REDIRECT), "/to/there", follow=True)


async def short_gaps(visitor: Visitor) -> None:
    host = visitor.first(Kind.DELAY)
    await visitor.get(host, "/5.html")
    visitor.time += 0.89
    await visitor.get(host, "/6.html")


async def refused(visitor: Visitor, kind: Kind, path: str, after: float) -> None:
    """Ask a host again that refuses once more, as if it had never been asked."""
    host = visitor.first(kind)
    visitor.world.forget(host)
    assert await visitor.get(host, "/a.html") in (429, 503)
    visitor.time += after
    await visitor.get(host, path)


async def in_429(visitor: Visitor) -> None:
    await refused(visitor, Kind.LIMITED, "/a.html", 0.0)


async def in_429_elsewhere(visitor: Visitor) -> None:
    await refused(visitor, Kind.LIMITED, "/b.html", 1.89)


async def in_503(visitor: Visitor) -> None:
    await refused(visitor, Kind.DOWN, "/robots.txt", 0.2)


async def robots_503(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.ROBOTS_503), "/1.html")


async def robots_most(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.NO_FILE))


async def private(visitor: Visitor) -> None:
    await visitor.get(visitor.first(Kind.TO_PRIVATE), "/to/private", follow=True)


async def private_link(visitor: Visitor) -> None:
    await visitor.get(PRIVATE, "/by-link.html")


async def private_robots(visitor: Visitor) -> None:
    await visitor.get(PRIVATE, "/by-robots.txt")


BAD: dict[Callable[[Visitor], Awaitable[None]], set[str]] = {
    disallowed: {"disallowed"},
    hops: {"hops"},
    hops_elsewhere: {"hops"},
    short_gaps: {"short_gaps"},
    in_429: {"in_429"},
    in_429_elsewhere: {"in_429"},
    in_503: {"in_503", "robots_most"},
    robots_503: {"robots_503"},
    robots_most: {"robots_most"},
    private: {"private"},
    private_link: {"private"},
    private_robots: {"private"},
}


@pytest.mark.parametrize("fault", BAD, ids=lambda fault: fault.__name__)
async def test_the_judge_finds_one_fault_in_a_polite_crawl(
    fault: Callable[[Visitor], Awaitable[None]], visitor: Visitor
) -> None:
    await visitor.politely()
    await fault(visitor)
    assert judge(visitor.world).faults() == BAD[fault]


async def test_a_request_that_crossed_a_refusal_or_came_a_little_early_is_no_fault(
    visitor: Visitor,
) -> None:
    await visitor.politely()
    await refused(visitor, Kind.LIMITED, "/b.html", 0.05)
    await refused(visitor, Kind.DOWN, "/a.html", 2.0)
    host = visitor.first(Kind.DELAY)
    await visitor.get(host, "/5.html")
    visitor.time += 0.95
    await visitor.get(host, "/6.html")
    assert judge(visitor.world).faults() == set()


async def test_the_judge_finds_what_a_restarted_crawl_has_forgotten() -> None:
    visitor = Visitor(interrupted)
    world = visitor.world
    async with world.serving(), aiohttp.ClientSession() as visitor.session:
        for host in world.hosts.values():
            if host.kind is not Kind.NEW:
                await visitor.get(host)
            if "/1.html" in host.paths:
                await visitor.get(host, "/1.html")
        killed_at = visitor.time
        visitor.time += 0.5
        assert (
            f"http://{visitor.first(Kind.NEW).address}:{world.port}/later.html"
            in world.later_urls()
        )
        await visitor.get(visitor.first(Kind.NEW), "/later.html")
        polite = judge_restart(world, killed_at)
        assert (polite.inside, polite.held, polite.robots_again, polite.twice) == (0, 4, 0, 0)
        assert (polite.robots, polite.before) == (9, 6)
        visitor.time = killed_at + 3.89  # the Crawl-delay is 4 s
        await visitor.get(visitor.first(Kind.DELAY), "/later.html")
        visitor.time = killed_at + 59.89  # and Retry-After 60 s
        await visitor.get(visitor.first(Kind.DOWN), "/1.html")
        await visitor.get(visitor.first(Kind.RULES))
        await visitor.get(visitor.first(Kind.RULES), "/1.html")
        found = judge_restart(world, killed_at)
    assert (found.inside, found.held, found.robots_again, found.twice) == (2, 4, 1, 1)


async def test_a_page_of_a_slow_host_comes_when_it_is_released() -> None:
    visitor = Visitor(interrupted)
    async with visitor.world.serving(), aiohttp.ClientSession() as visitor.session:
        host = visitor.first(Kind.SLOW)
        page = asyncio.ensure_future(visitor.get(host, "/slow.html"))
        await until(lambda: bool(visitor.world.log))
        assert not page.done()
        visitor.world.release()
        assert await page == 200


def test_a_crawler_that_is_not_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PEERS_PYTHON", raising=False)
    monkeypatch.setitem(PEERS, "a peer", Peer(print, ("aiohttp", "no-such-distribution")))
    here, missing = manners.contenders(("a peer", "polite_session"))
    assert [one.name for one in here] == ["polite_session"]
    assert missing == ("a peer: not measured, no-such-distribution is not installed",)


def test_a_crawler_without_manners_has_them_all_in_its_row() -> None:
    """In processes: it is killed while a page hangs, and begins again from the start."""
    module, version = "tests.impolite_program", "1.0"
    row = manners.measured(manners.Contender("none", module, sys.executable, version))
    assert (row.crawl.disallowed, row.crawl.hops, row.crawl.robots_503) == (8, 6, 9)
    assert (row.crawl.private, row.crawl.gaps, row.crawl.robots_most) == (2, 15, 0)
    assert row.restart.inside == row.restart.held >= 2
    assert row.restart.twice == row.restart.before == 10
    crawls, restarts = (table.markdown() for table in manners.tables([row], ("x: not measured",)))
    assert "| none 1.0 | 8 of 8 " in crawls
    assert "- x: not measured" in crawls
    assert "| 10 of 10 " in restarts
