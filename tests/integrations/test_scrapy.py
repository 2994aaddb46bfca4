"""Real runs of `scrapy` against the fake internet, judged by its log."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Config, Deferred, Denied, Gatekeeper, LeaseTimeout, PoliteQueue
from gatekeeper.clock import VirtualClock
from gatekeeper.config import PacingConfig
from gatekeeper.signing import new_key
from gatekeeper.testing import ScriptedGate, drive
from tests.conformance.conftest import sidecar_on
from tests.conformance.ways import settings
from tests.documents.blocks import SITE
from tests.effort import LONG
from tests.integrations.rigs import SCRAPY_PYTHON, ScrapyDownloads
from tests.integrations.rigs import Scrapy as Rig
from tests.integrations.scrapy_worker import WorkerFailed
from tests.internet import FakeInternet, Hold, Page, Reset, redirect
from tests.test_signing import as_sent, verify
from tests.waiting_support import until

pytest.importorskip("scrapy")

__all__ = ["sidecar_on"]

AGENT = "examplebot/1.0 (+https://example.org/bot)"
ROOT = Path(__file__).parents[2]
PYTHON = SCRAPY_PYTHON or sys.executable
SETTINGS: dict[str, Any] = {
    "ADDONS": {"gatekeeper.integrations.scrapy.Addon": 500},
    "ROBOTSTXT_OBEY": True,  # as in Scrapy's project template
    "USER_AGENT": AGENT,
    "LOG_LEVEL": "INFO",
    "TELNETCONSOLE_ENABLED": False,
    "RETRY_ENABLED": False,
    "GATEKEEPER_CONFIG": {
        "guard": {"allow": ["127.0.0.0/8", "*.test"]},
        "pacing": {"default_interval": 0.0},
    },
}
SPIDER = """
import json, os
import scrapy
from scrapy.exceptions import IgnoreRequest
from scrapy.utils.defer import maybe_deferred_to_future

class Spider(scrapy.Spider):
    name = "spider"
    custom_settings = json.loads(os.environ["SETTINGS"])
    wanted = json.loads(os.environ["URLS"])

    def say(self, *what):
        print(json.dumps(what), flush=True)

    async def start(self):
        for number, url in enumerate(self.wanted):
            yield scrapy.Request(url, callback=self.parse, errback=self.failed)

    def parse(self, response):
        self.say("got", response.status, response.url)
        EXTRA

    def failed(self, failure):
        self.say("failed", failure.type.__name__, failure.request.url, str(failure.value))

    def closed(self, reason):
        self.say("closed", reason, {k: v for k, v in self.crawler.stats.get_stats().items()
                                    if isinstance(v, (int, float, str))})
"""


@dataclass
class Run:
    code: int | None
    lines: list[Any]
    log: str

    @property
    def stats(self) -> dict[str, Any]:
        return next((line[2] for line in self.lines if line[0] == "closed"), {})

    def got(self) -> list[str]:
        return [line[2] for line in self.lines if line[0] == "got"]

    def failed(self) -> dict[str, tuple[str, str]]:
        return {line[2]: (line[1], line[3]) for line in self.lines if line[0] == "failed"}


class Scrapy:
    """Runs a spider in a separate process, in which names resolve to the fake internet."""

    def __init__(self, internet: FakeInternet, folder: Path) -> None:
        self.internet = internet
        self.folder = folder
        self.port = internet.listener().port()
        self.more: list[str] = []
        (folder / "sitecustomize.py").write_text(SITE, "utf-8")

    def url(self, host: str, path: str = "/") -> str:
        return f"http://{host}.test:{self.port}{path}"

    def _environ(self, urls: list[str], settings: dict[str, Any]) -> dict[str, str]:
        return {
            "SETTINGS": json.dumps({**SETTINGS, **settings}),
            "URLS": json.dumps(urls),
            "MORE": json.dumps(self.more),
        }

    async def start(
        self,
        urls: list[str],
        *,
        extra: str = "pass",
        command: tuple[str, ...] = (),
        **settings: Any,
    ) -> asyncio.subprocess.Process:
        """Start a separate process."""
        (self.folder / "spider.py").write_text(SPIDER.replace("EXTRA", extra), "utf-8")
        environ = {
            **os.environ,
            "PYTHONPATH": f"{self.folder}:{ROOT}",
            "FAKE_PORTS": json.dumps({"80": self.port}),
            "FAKE_NAMES": json.dumps(self._names()),
            **self._environ(urls, settings),
        }
        return await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "scrapy", "runspider", "spider.py", *command),
            cwd=self.folder,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    def _names(self) -> list[str]:
        return [name for name in self.internet.sites if not name[0].isdigit()]

    async def finish(self, process: asyncio.subprocess.Process) -> Run:
        output, errors = await process.communicate()
        lines = [json.loads(line) for line in output.decode().splitlines()]
        return Run(process.returncode, lines, errors.decode())

    async def run(
        self,
        urls: list[str],
        *,
        spider: str = SPIDER,
        extra: str = "pass",
        command: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> Run:
        """Run in a separate process if there is a command line, else in the worker of the rigs."""
        if command is not None:
            started = await self.start(urls, extra=extra, command=command, **settings)
            return await self.finish(started)
        crawl = await Rig.connect()
        try:
            await crawl.tell("names", {name: ["127.0.0.1"] for name in self._names()}, {})
            source, environ = spider.replace("EXTRA", extra), self._environ(urls, settings)
            lines = await crawl.call("run", source, str(self.folder), environ)
        finally:
            await crawl.close()
        return Run(0, lines, (self.folder / "log").read_text())


@pytest.fixture
def scrapy(internet: FakeInternet, tmp_path: Path) -> Scrapy:
    return Scrapy(internet, tmp_path)


async def test_a_crawl_is_decided_paced_and_reported(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    text = "User-agent: *\nCrawl-delay: 0.1\nDisallow: /private\n"
    site = internet.site("a.test").robots(text)
    for path in ("/1", "/2", "/3", "/private/x"):
        site.page(path, "hello")
    site.on("/to-private", redirect("/private/y")).on("/to-b", redirect(scrapy.url("b", "/x")))
    other = internet.site("b.test").robots("User-agent: *\nDisallow: /x\n").page("/x")
    internet.site("dead.test").robots("").on("/", Reset())
    asked = ["/1", "/2", "/3", "/private/x", "/to-private", "/to-b"]
    run = await scrapy.run(
        [*(scrapy.url("a", path) for path in asked), scrapy.url("dead")], command=()
    )
    assert run.code == 0, run.log
    assert sorted(run.got()) == [scrapy.url("a", path) for path in ("/1", "/2", "/3")]
    refused = {url: kind for url, (kind, _) in run.failed().items()}
    dead = refused.pop(scrapy.url("dead"))
    assert not dead.startswith("Request")  # Scrapy's error for a connection that broke
    assert refused == dict.fromkeys(
        [
            scrapy.url("a", "/private/x"),
            scrapy.url("a", "/private/y"),  # each redirect hop is decided
            scrapy.url("b", "/x"),
        ],
        "RequestDenied",
    )
    assert "line 3" in run.failed()[scrapy.url("a", "/private/x")][1]
    assert sorted(site.paths) == sorted(["/robots.txt", "/1", "/2", "/3", "/to-private", "/to-b"])
    assert other.paths == ["/robots.txt"]
    assert min(site.gaps()) >= 0.1
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}
    assert run.stats["robotstxt/forbidden"] == 3
    assert run.stats["gatekeeper/leases"] == 6
    assert run.stats["scheduler/dequeued"] == run.stats["scheduler/enqueued"]
    assert run.stats["robotstxt/request_count"] == 3
    assert run.stats["robotstxt/response_status_count/200"] == 3


async def test_the_signals_of_a_page_are_in_its_meta(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    page = gzip.compress(
        b'<meta name="examplebot" content="noai"><meta name="robots" content="none">'
    )
    tags = [("X-Robots-Tag", "noarchive"), ("X-Robots-Tag", "otherbot: nosnippet")]
    coded = [("Content-Encoding", "gzip"), ("Content-Type", "text/html"), *tags]
    site = internet.site("a.test").robots("")
    site.on("/", Page(page, headers=coded)).page("/plain", "noai").redirect("/to", "/plain")
    extra = (
        'self.say("signals", response.url, sorted(response.meta["gatekeeper_signals"].rules.names))'
    )
    urls = [scrapy.url("a"), scrapy.url("a", "/to")]
    run = await scrapy.run(urls, extra=extra)
    assert {line[1]: line[2] for line in run.lines if line[0] == "signals"} == {
        scrapy.url("a"): ["noai", "noarchive", "nofollow", "noindex"],
        scrapy.url("a", "/plain"): [],
    }


async def test_a_malformed_url_fails_alone(internet: FakeInternet, scrapy: Scrapy) -> None:
    """As a start URL it ended the crawl, and the links after it on a page were lost."""
    site = internet.site("a.test").robots("").page("/1").page("/2").page("/3")
    site.on("/to-bad", redirect("http://b..test/hop"))
    more = """
        if response.url.endswith("/1"):
            for url in ("http://c..test/x", self.wanted[1][:-1] + "3"):
                yield scrapy.Request(url, callback=self.parse, errback=self.failed)
    """
    bad = "http://d..test/x"
    wanted = [bad, scrapy.url("a", "/2"), scrapy.url("a", "/1"), scrapy.url("a", "/to-bad")]
    run = await scrapy.run(wanted, extra=more)
    assert sorted(run.got()) == [scrapy.url("a", f"/{number}") for number in (1, 2, 3)]
    assert {url: kind for url, (kind, _) in run.failed().items()} == dict.fromkeys(
        [bad, "http://c..test/x", "http://b..test/hop"], "RequestInvalidURL"
    )


DOWNLOADS = """
        if response.url.endswith("/first"):
            for url in json.loads(os.environ["MORE"]):
                engine = self.crawler.engine
                try:
                    if hasattr(engine, "download_async"):
                        found = await engine.download_async(scrapy.Request(url))
                    else:  # before Scrapy 2.14
                        found = await maybe_deferred_to_future(engine.download(scrapy.Request(url)))
                    self.say("inline", found.status, found.url)
                except IgnoreRequest as error:
                    self.say("refused", str(error), url)
"""


async def test_inline_requests_own_user_agents_and_dont_obey_robotstxt_are_honoured(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    text = (
        "User-agent: examplebot\nDisallow: /private\nCrawl-delay: 0.1\n\n"
        "User-agent: otherbot\nDisallow: /other\nCrawl-delay: 0.1\n"
    )
    site = internet.site("a.test").robots(text)
    for path in ("/first", "/inline", "/private", "/private/2", "/other", "/private/3"):
        site.page(path)
    spider = SPIDER.replace(
        "yield scrapy.Request(url, callback=self.parse, errback=self.failed)",
        "yield scrapy.Request(url.partition('#')[0], callback=self.parse, errback=self.failed,"
        " headers={'User-Agent': 'otherbot/2.0'} if url.endswith('#other') else {},"
        " meta={'dont_obey_robotstxt': url.endswith('#any')})",
    ).replace("def parse", "async def parse")
    scrapy.more = [scrapy.url("a", "/inline"), scrapy.url("a", "/private/3")]
    run = await scrapy.run(
        [
            scrapy.url("a", "/first"),
            scrapy.url("a", "/private#any"),
            scrapy.url("a", "/private/2#other"),
            scrapy.url("a", "/other#other"),
        ],
        spider=spider.replace("        EXTRA", DOWNLOADS),
    )
    assert run.code == 0, run.log
    assert sorted(run.got()) == sorted(
        scrapy.url("a", path) for path in ("/first", "/private", "/private/2")
    )
    assert [*run.failed()] == [scrapy.url("a", "/other")]
    assert ["inline", 200, scrapy.url("a", "/inline")] in run.lines
    [refused] = [line for line in run.lines if line[0] == "refused"]
    assert refused[2] == scrapy.url("a", "/private/3")
    assert sorted(site.paths) == sorted(
        ["/robots.txt", "/first", "/private", "/private/2", "/inline"]
    )
    assert min(site.gaps()) >= 0.1
    [own] = [request for request in site.requests if request.target == "/private/2"]
    assert own.headers["User-Agent"] == "otherbot/2.0"


GROWING = """
        number = int(response.url.rpartition("/")[2])
        self.say("seen", number)
        if number < 40:
            yield scrapy.Request(response.urljoin(f"/{number + 100}"), self.parse, priority=number)
"""


async def test_kill_9_and_resume_with_a_jobdir(internet: FakeInternet, scrapy: Scrapy) -> None:
    hold = Hold(Page("held"))
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.02\n")
    other = internet.site("b.test").robots("User-agent: *\nCrawl-delay: 0.02\n")
    for number in (*range(40), *range(100, 140)):
        for one in (site, other):
            one.page(f"/{number}")
    site.on("/20", hold, Page("at last"))
    asked = [scrapy.url(host, f"/{number}") for number in range(40) for host in "ab"]
    options: dict[str, Any] = {"extra": GROWING.strip(), "JOBDIR": "job"}
    process = await scrapy.start(asked, **options)
    await hold.waiting.acquire()
    process.send_signal(signal.SIGKILL)
    first = await scrapy.finish(process)
    in_flight = [request.url for request in internet.requests if request.answered is None]
    hold.release()
    assert first.stats == {}
    second = await scrapy.run([], **options)
    assert second.code == 0, second.log
    every = {
        scrapy.url(host, f"/{number}") for number in (*range(40), *range(100, 140)) for host in "ab"
    }
    # Requests that start() had not yielded yet when it was killed are unknown; the rest is there.
    enqueued = every & {*first.got(), *second.got()}
    parents = {url for url in enqueued if int(url.rpartition("/")[2]) < 100}
    children = {url for url in enqueued if int(url.rpartition("/")[2]) >= 100}
    assert scrapy.url("a", "/20") in parents
    assert {url.replace(f":{scrapy.port}/1", f":{scrapy.port}/") for url in children} or True
    assert len(children) == len(parents)  # no link of a page is lost
    repeated = [url for url, n in Counter([*first.got(), *second.got()]).items() if n > 1]
    assert len(repeated) <= 2, repeated
    assert in_flight
    assert min(site.gaps()) >= 0.02
    third = await scrapy.run([], **options)
    assert third.got() == []


async def test_a_crawl_paused_with_a_jobdir_loses_and_repeats_no_request(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.05\n")
    for number in (*range(40), *range(100, 140)):
        site.page(f"/{number}")
    asked = [scrapy.url("a", f"/{number}") for number in range(40)]
    options: dict[str, Any] = {"extra": GROWING.strip(), "JOBDIR": "job"}
    first = await scrapy.run(asked, CLOSESPIDER_PAGECOUNT=10, **options)
    assert first.code == 0, first.log
    assert 10 <= len(first.got()) < 40
    second = await scrapy.run([], **options)
    pages = Counter([*first.got(), *second.got()])
    assert set(pages.values()) == {1}
    assert len(pages) == 80
    assert Counter(site.paths)["/robots.txt"] == 1  # it is stored, too


async def test_a_files_pipeline_takes_leases(internet: FakeInternet, scrapy: Scrapy) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\nDisallow: /no\n")
    site.page("/1").page("/file.pdf", "pdf").page("/no.pdf", "no")
    late = Page("", status=503, headers={"Retry-After": "7200"})
    internet.site("c.test").robots(late).page("/file.pdf", "pdf")
    files = ["/file.pdf", "/no.pdf", scrapy.url("c", "/file.pdf")]
    run = await scrapy.run(
        [scrapy.url("a", "/1")],
        extra=f'yield {{"file_urls": [response.urljoin(path) for path in {files}]}}',
        ITEM_PIPELINES={"scrapy.pipelines.files.FilesPipeline": 1},
        FILES_STORE="files",
    )
    assert sorted(site.paths) == ["/1", "/file.pdf", "/robots.txt"]
    assert min(site.gaps()) >= 0.1
    assert internet.sites["c.test"].paths == ["/robots.txt"]
    assert run.stats["file_status_count/downloaded"] == 1
    assert run.stats["gatekeeper/defer/server_error"] == 1
    assert "ask again at" in run.log


def crawl_with(gate: Gatekeeper, crawler: Any) -> Any:
    """The crawl of a crawler, whose gate is open."""
    from gatekeeper.integrations.scrapy_requests import ScrapyCrawl

    crawl = ScrapyCrawl.of(crawler)
    opening = asyncio.get_running_loop().create_future()
    opening.set_result(gate)
    crawl.gate, crawl._opening = gate, opening
    return crawl


async def test_a_deferred_download_waits_no_longer_than_max_wait(
    virtual_internet: FakeInternet,
) -> None:
    from scrapy import Request
    from scrapy.exceptions import IgnoreRequest
    from scrapy.http import Response
    from scrapy.utils.test import get_crawler

    from gatekeeper.integrations.scrapy import PoliteMiddleware

    soon, late = (Page("", status=503, headers={"Retry-After": many}) for many in ("120", "900"))
    site = virtual_internet.site("a.test").on("/robots.txt", soon, Page(""))
    virtual_internet.site("b.test").robots(late)
    clock, drive = virtual_internet.clock, virtual_internet.drive
    crawler = get_crawler(
        settings_dict={"GATEKEEPER_MAX_WAIT": 300, "TWISTED_REACTOR_ENABLED": False}
    )
    async with Gatekeeper(
        AGENT, config=settings(), resolver=virtual_internet.resolver, clock=clock
    ) as gate:
        crawl_with(gate, crawler)
        middleware = PoliteMiddleware.from_crawler(crawler)
        began = clock.monotonic()
        request = Request("http://a.test/file")
        await drive(middleware.process_request(request))
        assert 120 <= clock.monotonic() - began < 300
        assert site.paths == ["/robots.txt", "/robots.txt"]
        assert gate.stats().pacing.in_flight == 1
        middleware.process_response(request, Response(request.url))
        assert gate.stats().pacing.in_flight == 0
        began = clock.monotonic()
        with pytest.raises(Deferred, match="ask again at") as caught:
            await drive(middleware.process_request(Request("http://b.test/file")))
        assert isinstance(caught.value, IgnoreRequest)
        assert clock.monotonic() - began < 1.0
        assert caught.value.retry_at is not None
        waiting = asyncio.create_task(middleware.process_request(Request("http://c.test/file")))
        virtual_internet.site("c.test").robots(soon)
        await virtual_internet.settle()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert gate.stats().pacing.in_flight == 0


async def test_a_request_that_is_sent_again_keeps_its_lease_until_it_left_the_downloader(
    virtual_internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scrapy import Request, signals
    from scrapy.http import Response
    from scrapy.utils.test import get_crawler

    from gatekeeper.integrations.scrapy_requests import PoliteMiddleware

    virtual_internet.site("a.test").robots("")
    crawler = get_crawler(settings_dict={"TWISTED_REACTOR_ENABLED": False})
    async with Gatekeeper(
        AGENT,
        config=settings(),
        resolver=virtual_internet.resolver,
        clock=virtual_internet.clock,
    ) as gate:
        crawl = crawl_with(gate, crawler)
        monkeypatch.setattr(crawl, "is_wanted", lambda _: True)
        middleware = PoliteMiddleware.from_crawler(crawler)
        request = Request("http://a.test/file")

        def leave() -> None:
            crawler.signals.send_catch_log(signals.request_left_downloader, request=request)

        await virtual_internet.drive(middleware.process_request(request))
        leave()
        middleware.process_response(request, Response(request.url))
        again = asyncio.create_task(middleware.process_request(request))
        await virtual_internet.drive(asyncio.wait([again]))
        await virtual_internet.settle()
        assert gate.stats().pacing.in_flight == 1  # its task is done, its download is not
        middleware.process_response(request, Response(request.url))
        assert gate.stats().pacing.in_flight == 0


async def test_a_crawl_whose_sidecar_is_gone_comes_to_an_end(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    """Each deferral is of five seconds, and they must not be waited for one by one."""
    asked = [scrapy.url(host, f"/{number}") for host in "ab" for number in range(4)]
    async with asyncio.timeout(60):
        run = await scrapy.run(
            asked,
            GATEKEEPER_URL=f"http://{internet.refusing('gone.test')}:1",
            GATEKEEPER_MAX_WAIT=6,
        )
    assert {url: kind for url, (kind, _) in run.failed().items()} == dict.fromkeys(
        asked, "RequestDeferred"
    )
    assert run.stats["gatekeeper/defer/gate_unreachable"] == len(asked)
    assert internet.requests == []


@pytest.mark.parametrize("own", [(), ("-s", "SCHEDULER=scrapy.core.scheduler.Scheduler")])
async def test_another_reactor_is_refused_with_the_remedy(
    internet: FakeInternet, scrapy: Scrapy, own: tuple[str, ...]
) -> None:
    internet.site("a.test").robots("").page("/")
    reactor = "TWISTED_REACTOR=twisted.internet.selectreactor.SelectReactor"
    run = await scrapy.run([scrapy.url("a")], command=("-s", reactor, *own))
    said = run.log + str(run.failed())
    assert "leave TWISTED_REACTOR at its default" in said
    assert internet.requests == []


async def test_a_stopped_crawl_does_not_wait_for_leases(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 900\n").page("/")
    rig = ScrapyDownloads(internet, settings(), None)
    rig.max_wait = 3_600.0
    await rig.start()
    try:
        waiting = asyncio.create_task(rig.get("http://a.test/"))
        await until(lambda: site.paths)
        await rig.close()
        with pytest.raises(LeaseTimeout, match="stopped"):
            await waiting
    finally:
        await rig.stop()
    assert site.paths == ["/robots.txt"]


async def test_a_retried_request_takes_another_lease(internet: FakeInternet) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.2\n").page("/", "hello")
    rig = Rig(internet, settings(), None)
    await rig.start()
    try:
        await rig.tell_names()
        assert await rig.crawl.call("twice", "http://a.test/") == (200, "hello")
    finally:
        await rig.stop()
    assert site.paths == ["/robots.txt", "/", "/"]
    assert min(site.gaps()) >= 0.2


async def test_a_request_over_a_kept_connection_that_breaks_is_sent_once(
    internet: FakeInternet,
) -> None:
    site = internet.site("a.test").robots("").page("/", "hello").on("/broken", Reset())
    rig = Rig(internet, settings(), None)
    await rig.start()
    try:
        await rig.tell_names()
        await rig.crawl.call("get", "http://a.test/", {}, {})
        with pytest.raises(WorkerFailed):
            await rig.crawl.call("get", "http://a.test/broken", {}, {})
    finally:
        await rig.stop()
    assert site.paths == ["/robots.txt", "/", "/broken"]


async def test_a_response_cut_off_by_scrapy_is_no_failure_of_its_host(
    internet: FakeInternet,
) -> None:
    internet.site("a.test").robots("").page("/large", "x" * 100)
    internet.site("b.test").robots("").on("/", Reset())
    rig = Rig(internet, settings(), None)
    await rig.start()
    try:
        await rig.tell_names()
        said = {}
        for url in ("http://a.test/large", "http://b.test/"):
            for _ in range(3):
                with pytest.raises(WorkerFailed):
                    await rig.crawl.call("get", url, {}, {"download_maxsize": 10})
            said[url[7]] = [str(view) for view in await rig.ask("why", f"{url[7]}.test")]
    finally:
        await rig.stop()
    assert len(said["a"]) == 1 < len(said["b"]), said


async def test_a_crawl_that_has_ended_is_freed(internet: FakeInternet) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/")

    async def crawls(count: int) -> Counter[str]:
        for _ in range(count):
            rig = Rig(internet, settings(), None)
            await rig.start()
            await rig.get("http://a.test/")
            with suppress(Denied):
                await rig.get("http://a.test/private")
            await rig.close()
            await rig.stop()
        observer = await Rig.connect()
        found: Counter[str] = await observer.call("alive")
        await observer.close()
        return found

    before, rounds = await crawls(2), 50 if LONG else 4
    left = await crawls(rounds) - before
    assert not {name: count for name, count in left.items() if count >= rounds}


async def test_with_another_scheduler_requests_wait_in_the_middleware(
    internet: FakeInternet, scrapy: Scrapy
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\nDisallow: /no\n")
    site.page("/1").page("/2")
    run = await scrapy.run(
        [scrapy.url("a", path) for path in ("/1", "/no", "/2")],
        SCHEDULER="scrapy.core.scheduler.Scheduler",
    )
    assert run.code == 0, run.log
    assert sorted(site.paths) == ["/1", "/2", "/robots.txt"]
    assert min(site.gaps()) >= 0.1


@pytest.mark.parametrize(
    "settings",
    [{"command": ("-s", "TWISTED_REACTOR_ENABLED=False")}, {"HTTPCACHE_ENABLED": True}],
    ids=["no-reactor", "cache"],
)
async def test_a_crawl_works_without_a_reactor_and_with_a_cache(
    internet: FakeInternet, scrapy: Scrapy, settings: dict[str, Any]
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/1").page("/2")
    asked = [scrapy.url("a", path) for path in ("/1", "/no", "/2")]
    for times in (1, 2):
        run = await scrapy.run(asked, **settings)
        assert run.code == 0, run.log
        assert len(run.got()) == 2
        pages = [path for path in site.paths if path != "/robots.txt"]
        assert len(pages) == (2 if "HTTPCACHE_ENABLED" in settings else 2 * times)


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "with a JOBDIR"])
async def test_a_cached_response_takes_no_lease(
    internet: FakeInternet, scrapy: Scrapy, kept: bool
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.1\n")
    asked = [scrapy.url("a", f"/{number}") for number in range(4)]
    for number in range(4):
        site.page(f"/{number}", "text")
    first = await scrapy.run(asked, HTTPCACHE_ENABLED=True)
    assert sorted(first.got()) == asked, first.log
    seen = [*site.paths]
    assert len(seen) == 5
    settings = {"JOBDIR": "job"} if kept else {}
    # A URL of another scheme, which needs no lease either.
    again = await scrapy.run([*asked, "data:,x"], HTTPCACHE_ENABLED=True, **settings)
    assert sorted(again.got()) == sorted([*asked, "data:,x"]), again.log
    assert again.stats["httpcache/hit"] == 4
    assert "gatekeeper/leases" not in again.stats
    assert again.stats["scheduler/dequeued/disk" if kept else "scheduler/dequeued/memory"] == 5
    assert site.paths == seen
    if not kept:
        for file in scrapy.folder.rglob("pickled_meta"):
            os.utime(file, (0, 1))
        stale = await scrapy.run(asked[:1], HTTPCACHE_ENABLED=True, HTTPCACHE_EXPIRATION_SECS=1)
        assert stale.stats["gatekeeper/leases"] == 1
        assert site.paths[5:] == ["/robots.txt", "/0"]


def test_requests_that_need_no_lease_survive_a_restart(tmp_path: Path) -> None:
    from gatekeeper.integrations.scrapy import _DirectRequests

    first = _DirectRequests(tmp_path / "direct")
    for number in range(4):
        first.put(f"data:,{number}", f"request {number}".encode())
    first.put("data:,9", 9)  # a request that can't be stored
    done, under_way, ended = first.pop(), first.pop(), first.pop()
    assert done is not None
    assert ended is not None
    for _ in range(2):
        done.done()
    assert len(first) == 2
    first._kept.close()  # type: ignore[union-attr] # as kill -9 does
    second = _DirectRequests(tmp_path / "direct")
    assert len(second) == 3
    again = second.pop()
    assert again is not None
    assert again.data == b"request 1"
    assert under_way is not None
    second.put("data:,4", b"request 4")
    second.close()  # requests in flight are done
    third = _DirectRequests(tmp_path / "direct")
    left = [third.pop() for _ in range(len(third))]
    assert [one and one.data for one in left] == [b"request 2", b"request 3", b"request 4"]
    third.close()


async def test_the_default_user_agent_of_scrapy_counts_as_unset(
    internet: FakeInternet, scrapy: Scrapy, sidecar_on: Any
) -> None:
    """The sidecar's User-Agent is sent then, and decides."""
    site = internet.site("a.test").robots("User-agent: examplebot\nDisallow: /private\n").page("/x")
    asked = [scrapy.url("a", "/x"), scrapy.url("a", "/private")]
    run = await scrapy.run(
        asked,
        USER_AGENT="Scrapy/2.19.0 (+https://scrapy.org)",
        GATEKEEPER_URL=(await sidecar_on(internet)).where,
    )
    assert run.got() == asked[:1], run.log
    assert "examplebot" in run.failed()[asked[1]][1]
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}


PARSED: dict[str, tuple[str, list[tuple[str, str, bool]]]] = {
    "plain rules": (
        "User-agent: * \nDisallow: /cellar \nAllow: /garden \nCrawl-delay: 7",
        [("/garden", "*", True), ("/cellar", "*", False), ("/attic", "*", True)],
    ),
    "wildcards, blanks around them": (
        """User-agent: fox
           Disallow: /den/*/exit$ \t

           User-agent: hare
           Allow: /*meadow
           Disallow: /
        """,
        [
            ("/den", "fox", True),
            ("/den/1/exit", "fox", False),
            ("/den/one/more/exit", "fox", False),
            ("/den/1/exits", "fox", True),
            ("/meadow", "hare", True),
            ("/a/high_meadow", "hare", True),
            ("/meadows/9", "hare", True),
            ("/forest", "hare", False),
        ],
    ),
    "the longer rule": (
        "User-agent: *\nDisallow: /\nAllow: /gate",
        [("/gate", "*", True), ("/gates", "*", True), ("/wall", "*", False)],
    ),
    "an empty file": ("", [("/", "*", True), ("/", "firefox", True), ("/any/page", "*", True)]),
    "an agent and a URL beyond ASCII": (
        """
        User-Agent: *
        Disallow: /intern/
        Disallow: /caf\u00e9/
        Disallow: /r%C3%B8d/

        User-Agent: Bl\u00e5b\u00e6rBot
        Disallow: /skov/
        """,
        [
            ("/", "*", True),
            ("/intern/", "*", False),
            ("/caf\u00e9/", "*", False),
            ("/caf%C3%A9/", "*", False),
            ("/r\u00f8d/", "*", False),
            ("/r%c3%b8d/", "*", False),
            ("/intern/", "Bl\u00e5b\u00e6rBot", True),
            ("/skov/", "*", True),
            ("/skov/", "Bl\u00e5b\u00e6rBot", False),
            ("/intern/", "\u304b\u304f", False),  # no ASCII letters: the rules for any agent
        ],
    ),
    "versions and comments of agents": (
        "User-agent: *\nDisallow: /x\n\nUser-agent: fox\nDisallow: /y\n",
        [
            ("/x", "Fox/2.0 (+https://example.org/fox)", True),
            ("/y", "Fox/2.0 (+https://example.org/fox)", False),
            ("/x", "Mozilla/5.0 (compatible; hare/1.0)", False),
        ],
    ),
}
"""Scrapy's own tests of parsers, except for the order of rules in the file: by RFC 9309 section
2.2.2 the longest rule decides."""


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("case", PARSED)
def test_the_parser_alone_reads_as_scrapy_asks_of_any_parser(case: str, as_bytes: bool) -> None:
    text, questions = PARSED[case]
    parser = scrapy_parser(text.encode())
    for path, agent, allowed in questions:
        url: Any = f"https://animals.example{path}"
        name: Any = agent
        if as_bytes:
            url, name = url.encode(), agent.encode()
        assert parser.allowed(url, name) is allowed, (path, agent)


def scrapy_parser(body: bytes) -> Any:
    from gatekeeper.integrations.scrapy import RobotParser

    return RobotParser.from_crawler(None, body)  # type: ignore[arg-type]


def test_the_parser_alone_tells_the_crawl_delay() -> None:
    parser = scrapy_parser(
        b"User-agent: *\nDisallow:\nCrawl-delay: 2.5\n\nUser-agent: fox\nCrawl-delay: 7\n"
    )
    assert parser.crawl_delay(b"hare") == 2.5
    assert parser.crawl_delay("fox") == 7
    assert scrapy_parser(b"").crawl_delay("fox") is None


@pytest.mark.parametrize(
    "body",
    [
        b"\x89PNG\r\n\x1a\n\x00\r",
        b"\xff\xfe\x00",
        b"<html><p>no file",
        b"Disallow: /",
    ],
)
def test_the_parser_alone_allows_everything_for_a_body_that_is_no_file(body: bytes) -> None:
    parser = scrapy_parser(body)
    for path, agent in (("/", "*"), ("/", "firefox"), ("/any/page", "*")):
        assert parser.allowed(f"https://animals.example{path}", agent)


def test_the_parser_alone_reads_on_behind_bytes_that_are_no_text() -> None:
    body = b"User-agent: *\nDisallow: /a\xff\n# caf\xe9\n\xfe\xff\nDisallow: /cellar\n"
    parser = scrapy_parser(body)
    assert not parser.allowed("https://animals.example/cellar", "*")
    assert parser.allowed("https://animals.example/garden", "*")


def test_the_parser_alone_caches_a_bounded_number_of_agents() -> None:
    parser = scrapy_parser(b"User-agent: *\nDisallow: /x\n")
    for number in range(1_000):
        assert not parser.allowed("https://animals.example/x", f"fox{number}/{number}")
    assert parser._policy.cache_info().currsize <= 100


async def test_every_hop_is_signed(scrapy: Scrapy, tmp_path: Path) -> None:
    public = new_key(tmp_path / "bot.pem").public
    scrapy.internet.site("a.test").robots("").on("/x", redirect(scrapy.url("a", "/y"))).page("/y")
    identity = {"key": str(tmp_path / "bot.pem"), "directory": "https://bot.example"}
    run = await scrapy.run(
        [scrapy.url("a", "/x")],
        GATEKEEPER_CONFIG={**SETTINGS["GATEKEEPER_CONFIG"], "identity": identity},
    )
    assert run.got() == [scrapy.url("a", "/y")], run.log
    asked = scrapy.internet.requests
    assert [request.path for request in asked] == ["/robots.txt", "/x", "/y"]
    for request in asked:
        assert len(request.headers.getall("Signature")) == 1
        verify(as_sent(request), public)


@pytest.mark.parametrize("asked_by", ["the queue", "another"])
@pytest.mark.parametrize("already_waits", [True, False])
async def test_a_long_block_refuses_at_once_who_waits_for_the_host(
    already_waits: bool, asked_by: str
) -> None:
    """Whichever request caused it, and whether or not the next request is in the scheduler yet."""
    from gatekeeper.integrations.queue_refusals import RefusedLease, queue_gate

    clock = VirtualClock()
    pacing = PacingConfig(default_interval=0.0)
    async with ScriptedGate(clock=clock, config=Config(pacing=pacing)) as gate:
        await gate.check("http://c.test/")
        async with PoliteQueue(queue_gate(gate, 600.0)) as queue:
            if asked_by == "another":
                lease = await gate.acquire("http://c.test/file", owned=False)
            await queue.put("http://c.test/1")
            await queue.put("http://c.test/2")
            if asked_by == "the queue":
                turn = await queue.get()
                lease = turn.lease
            waiting = asyncio.create_task(queue.get())
            await clock.settle()
            if already_waits:
                for _ in range(3):
                    with suppress(asyncio.QueueEmpty):
                        queue.get_nowait()
                    await clock.elapse(0.05)
            assert not waiting.done()
            lease.report(status=503, elapsed=0.1, retry_after="7200")
            lease.end()
            refused = await drive(clock, waiting, limit=1.0)
            assert isinstance(refused.lease, RefusedLease)
            assert "may not be asked before" in str(refused.lease.why)
            refused.done()
