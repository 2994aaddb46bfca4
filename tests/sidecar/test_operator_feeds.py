"""The data of the pages for operators: leases, decisions, events, series, settings."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.decision import Decision, Verdict
from gatekeeper.sidecar.metrics import Histogram
from gatekeeper.sidecar.pages.recent_decisions import POINTS, DecisionFeed
from gatekeeper.sidecar.routes import operators
from gatekeeper.sidecar.routes.operators import MAX_EVENTS, masked
from gatekeeper.sidecar.security import Token, Tokens
from tests.gate_support import decided
from tests.internet import FakeInternet
from tests.waiting_support import until


def decision(number: int) -> Decision:
    at = "https://a.test"
    return decided(Verdict.ALLOW, url=f"{at}/{number}", origin=at, id=f"t-{number:x}")


# --- the ring ---------------------------------------------------------------------------------


def test_the_feed_keeps_the_latest_decisions_and_counts_all() -> None:
    feed = DecisionFeed(VirtualClock(), ring=3)
    for number in range(1, 6):
        feed.add(decision(number), "r", "local")
    assert [one.number for one in feed.since(0)] == [3, 4, 5]
    assert feed.count == 5
    assert feed.counts("a.test").allow == 5
    assert feed.find("t-2") is None
    assert feed.find("t-4").number == 4  # type: ignore[union-attr]


def test_batches_are_in_the_feed_in_order() -> None:
    from gatekeeper.client.wire import Decisions, encode

    feed = DecisionFeed(VirtualClock())
    feed.add(decision(1), "r", "local")
    feed.add_batch(encode(Decisions([decision(n) for n in (2, 3, 4)])), 3, "r2", "other")
    feed.add(decision(5), "r3", "local")
    assert [one.decision.id for one in feed.since(0)] == ["t-1", "t-2", "t-3", "t-4", "t-5"]
    assert [one.number for one in feed.since(2)] == [3, 4, 5]
    assert [one.number for one in feed.since(0, 2)] == [4, 5]
    assert feed.find("t-3").client == "other"  # type: ignore[union-attr]
    assert feed.urls_of("https://a.test", 10)[0] == "https://a.test/5"
    assert set(feed.urls_of("https://a.test", 10)) == {f"https://a.test/{n}" for n in range(1, 6)}


def test_totals_of_a_host_go_over_its_origins() -> None:
    feed = DecisionFeed(VirtualClock())
    for origin in ("https://a.test", "http://a.test", "http://a.test:8080"):
        feed.count_of(origin).add(Verdict.DENY, 2)
    feed.count_of("http://[::1]:8080").add(Verdict.DEFER)
    assert (feed.counts("a.test").deny, feed.counts("a.test").allow) == (6, 0)
    assert feed.counts("a.test").origins == (
        "https://a.test",
        "http://a.test",
        "http://a.test:8080",
    )
    assert feed.counts("::1").defer == 1
    assert feed.counts("b.test").allow == 0
    for port in range(1000):
        feed.count_of(f"http://a.test:{port}")
    assert len(feed.counts("a.test").origins) <= 16


def test_totals_are_kept_of_the_hosts_in_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatekeeper.sidecar.pages.recent_decisions.HOSTS", 10)
    feed = DecisionFeed(VirtualClock())
    for number in range(1000):
        feed.count_of("https://often.test").add(Verdict.ALLOW)
        for port in range(3):
            feed.count_of(f"https://h{number}.test:{port}").add(Verdict.DENY)
    assert feed.counts("often.test").allow == 1000
    assert feed.counts("h999.test").deny == 3
    assert feed.counts("h1.test").deny == 0
    assert max(len(feed._hosts), len(feed._origins)) <= 20


async def test_every_kind_of_question_is_counted_in_the_feed(
    serve: Any, internet: FakeInternet
) -> None:
    """More than the ring holds, single questions and batches, inline responses included."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    sidecar = await serve()
    sidecar.service.operators.feed._ring.clear()
    batch = {"urls": ["http://a.test/x", "http://a.test/private", "nothing"] * 4}
    for _ in range(2):
        assert (await sidecar.post("/v1/check", batch))[0] == 200
        await sidecar.get("/v1/check", params={"url": "http://a.test/private"})
    await sidecar.post("/v1/leases", {"url": "http://a.test/x"})
    _, found = await sidecar.get("/v1/hosts/a.test")
    assert (found["allowed"], found["denied"], found["deferred"]) == (9, 10, 0)
    _, listed = await sidecar.get("/v1/hosts", params={"sort": "-denied"})
    assert listed["hosts"][0]["denied"] == 10


def test_the_numbers_kept_by_host_are_bounded() -> None:
    feed = DecisionFeed(VirtualClock())
    for number in range(120_000):
        feed.reported(f"h{number}.test", 200)
    assert len(feed._statuses) <= 100_000
    assert feed.last_status("h119999.test") == (200, VirtualClock().wall())
    assert feed.last_status("h1.test") is None


def test_a_quantile_of_an_empty_histogram_is_nan() -> None:
    assert Histogram.quantile([0] * 13, 0.5) != Histogram.quantile([0] * 13, 0.5)
    assert Histogram.quantile([0] * 12 + [4], 0.95) == 300.0


# --- leases -----------------------------------------------------------------------------------


async def test_leases_and_waiters_are_listed_with_client_age_and_time_left(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "ttl": 100, "wait": 5})
    waiting = asyncio.create_task(
        service.post("/v1/leases", {"url": "http://a.test/y", "wait": 30, "priority": 3})
    )
    listed: dict[str, Any] = {"waiting": 0}
    while not listed["waiting"]:
        _, listed = await service.get("/v1/leases")
    first, second = listed["leases"]

    assert (first["state"], first["url"], first["place"]) == ("waiting", "http://a.test/y", 1)
    assert (first["priority"], 0 < first["left"] <= 30) == (3, True)
    assert (second["state"], second["id"]) == ("held", lease["id"])
    assert (second["client"], 0 < second["left"] <= 100) == ("127.0.0.1", True)
    assert (listed["held"], listed["total"]) == (1, 2)

    _, host = await service.get("/v1/hosts/a.test")
    assert (host["waiting"], host["in_flight"], host["state"]) == (1, 1, "busy")
    status, _ = await service.post(f"/v1/leases/{lease['id']}/drop", {})
    assert status == 204
    assert (await waiting)[0] == 201
    assert service.service.leases.ended["dropped"] == 1


async def test_leases_are_filtered_and_paged(serve: Any, internet: FakeInternet) -> None:
    for n in range(5):
        internet.site(f"h{n}.test").robots("")
    service = await serve()
    for n in range(5):
        await service.post("/v1/leases", {"url": f"http://h{n}.test/", "wait": 5})
    _, page = await service.get("/v1/leases?per_page=2&page=3")
    assert ([one["host"] for one in page["leases"]], page["pages"]) == (["h4.test"], 3)
    _, one = await service.get("/v1/leases?host=h3&state=held&client=127.0.0.1")
    assert [one["host"] for one in one["leases"]] == ["h3.test"]
    for query in ("client=other", "state=waiting", "host=nowhere"):
        _, none = await service.get(f"/v1/leases?{query}")
        assert (none["leases"], none["total"], none["held"]) == ([], 0, 5)


async def test_a_report_of_a_dropped_lease_still_counts(serve: Any, internet: FakeInternet) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "wait": 5})
    await service.post(f"/v1/leases/{lease['id']}/drop", {})
    assert (await service.post(f"/v1/leases/{lease['id']}/drop", {}))[0] == 404
    status, _ = await service.post(
        f"/v1/leases/{lease['id']}/report", {"status": 503, "retry_after": 60}
    )
    _, host = await service.get("/v1/hosts/a.test")
    assert (status, host["state"], host["last_status"]) == (204, "blocked", 503)


@pytest.mark.parametrize("first", ["report", "give_back"])
async def test_only_the_first_report_of_a_lease_is_shown(
    serve: Any, internet: FakeInternet, first: str
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "wait": 5})
    if first == "report":
        await service.post(f"/v1/leases/{lease['id']}/report", {"status": 200})
    else:
        await service.session.delete(f"{service.base}/v1/leases/{lease['id']}")
    status, _ = await service.post(f"/v1/leases/{lease['id']}/report", {"status": 503})
    _, host = await service.get("/v1/hosts/a.test")
    assert (status, host["state"]) == (204, "free")
    assert host["last_status"] == (200 if first == "report" else None)


# --- decisions and events ---------------------------------------------------------------------


async def test_a_decision_is_found_by_its_id(serve: Any, internet: FakeInternet) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    service = await serve()
    _, asked = await service.get("/v1/check?url=http://a.test/no")
    _, batch = await service.post("/v1/check", {"urls": ["http://a.test/b", "http://a.test/c"]})
    for given in (asked, *batch["decisions"]):
        status, found = await service.get(f"/v1/decisions/{given['id']}")
        assert (status, found["decision"]["url"]) == (200, given["url"])
        assert found["client"] == "127.0.0.1"
    assert (await service.get("/v1/decisions/never"))[0] == 404


@asynccontextmanager
async def listening(service: Any, query: str = "", **headers: str) -> Any:
    """Yields `read`: `await read()` returns the next event as (kind, id, data)."""
    async with service.session.get(f"{service.base}/v1/events{query}", headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"

        async def read() -> tuple[str, str, Any]:
            found: dict[str, str] = {}
            while line := (await response.content.readline()).decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                found[name] = value
            assert found, "the stream ended"
            return found["event"], found.get("id", ""), json.loads(found["data"])

        assert (await read())[0] == "hello"
        yield read


async def test_events_tell_of_decisions_by_filter(serve: Any, internet: FakeInternet) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    service = await serve()
    async with (
        listening(service) as every,
        listening(service, "?verdict=deny&reason=rule&host=A.Test") as denied,
    ):
        await service.get("/v1/check?url=http://a.test/yes")
        await service.get("/v1/check?url=http://a.test/no")
        told = [await every(), await every()]
        only = await denied()
    assert [data["url"] for _, _, data in told] == ["http://a.test/yes", "http://a.test/no"]
    assert (only[0], only[2]["verdict"], only[2]["line"]) == ("decision", "deny", 2)
    assert service.service.operators.streams.total() <= 2


async def test_a_stream_resumes_after_the_last_event_id(serve: Any, internet: FakeInternet) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    async with listening(service) as read:
        await service.get("/v1/check?url=http://a.test/1")
        _, last, _ = await read()
    for n in (2, 3):
        await service.get(f"/v1/check?url=http://a.test/{n}")
    async with listening(service, **{"Last-Event-ID": last}) as read:
        assert [(await read())[2]["url"] for _ in range(2)] == [
            "http://a.test/2",
            "http://a.test/3",
        ]
    async with listening(service, "?latest=1") as read:
        assert (await read())[2]["url"] == "http://a.test/3"


async def test_a_stream_that_is_too_slow_is_told_how_much_it_missed(
    serve: Any, internet: FakeInternet
) -> None:
    service = await serve()
    feed = service.service.operators.feed
    async with listening(service) as read:
        for number in range(4 * MAX_EVENTS + 50):
            feed.add(decision(number), "r", "local")
        kind, _, data = await read()
        assert (kind, data["now"]) == ("dropped", data["total"])
        assert 50 <= data["now"] <= 3 * MAX_EVENTS + 50  # the sooner it looked, the more
        assert (await read())[2]["url"] == f"https://a.test/{data['now']}"


@pytest.mark.parametrize("number", ["5", "9" * 6_000], ids=["of another", "too long"])
async def test_an_event_id_of_an_earlier_process_restarts_the_stream_and_says_so(
    serve: Any, number: str
) -> None:
    service = await serve()
    prefix = "0ther"
    if len(number) > 1:  # that of this process, which its first event tells
        async with service.session.get(f"{service.base}/v1/events") as response:
            await response.content.readline()
            prefix = (await response.content.readline())[4:].partition(b"-")[0].decode()
    last = f"{prefix}-{number}"
    async with service.session.get(
        f"{service.base}/v1/events", headers={"Last-Event-ID": last}
    ) as response:
        text = b""
        while b"\n\n" not in text:
            text += await response.content.readany()
    assert b'"restarted":true' in text


async def test_a_draining_service_ends_its_streams(serve: Any) -> None:
    service = await serve()
    async with service.session.get(f"{service.base}/v1/events") as response:
        await response.content.readline()
        service.service.phase = "draining"
        text = await response.content.read()
    assert text.endswith(b"event: bye\ndata: {}\n\n")
    await until(lambda: not service.service.streams)


async def refused_stream(service: Any, session: aiohttp.ClientSession) -> tuple[int, str, str]:
    """Open one stream more. Return the status, Retry-After and detail of the refusal."""
    async with session.get(f"{service.base}/v1/events") as response:
        problem = await response.json(content_type=None)
        return response.status, response.headers["Retry-After"], problem["detail"]


@pytest.mark.parametrize(
    ("settings", "of_one"),
    [({}, 32), ({"max_streams": 3}, 2), ({"max_streams": 5, "client_streams": 4}, 4)],
)
async def test_one_client_cannot_take_all_streams(
    serve: Any, settings: dict[str, int], of_one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client gets half of the streams by default.

    Another client gets one while the first is refused; both may again when one of the first's ends.
    """
    monkeypatch.setattr(operators, "TICK", 0.01)
    service = await serve(**settings)
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with AsyncExitStack() as held, aiohttp.ClientSession(connector=elsewhere) as other:
        streams = [await held.enter_async_context(listening(service)) for _ in range(of_one)]
        status, after, told = await refused_stream(service, service.session)
        assert (status, after) == (429, "5")
        assert f"{of_one} streams" in told
        assert "server.client_streams" in told
        assert service.service.clients.refused["streams"] == 1
        async with other.get(f"{service.base}/v1/events") as response:
            assert response.status == 200
            await response.content.readline()
            assert len(streams) == of_one
            assert service.service.operators.streams.total() == of_one + 1
    # The service notices when it next looks that they are gone.
    await until(lambda: not service.service.operators.streams)
    async with listening(service):
        assert service.service.operators.streams == {"127.0.0.1": 1}


async def test_all_streams_together_are_bounded(serve: Any) -> None:
    service = await serve(max_streams=2, client_streams=2)
    async with AsyncExitStack() as held:
        for number in (2, 3):
            connector = aiohttp.TCPConnector(local_addr=(f"127.0.0.{number}", 0))
            session = await held.enter_async_context(aiohttp.ClientSession(connector=connector))
            await held.enter_async_context(session.get(f"{service.base}/v1/events"))
        status, after, told = await refused_stream(service, service.session)
        assert (status, after) == (503, "1")
        assert "2 streams" in told


# --- the last hour, the overview, the settings ------------------------------------------------


async def test_the_series_has_a_point_each_ten_seconds_and_an_hour_of_them(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    series = service.service.operators.series
    series.start()
    for n in range(20):
        await service.get(f"/v1/check?url=http://a.test/{n}")
    await service.post("/v1/leases", {"url": "http://a.test/", "wait": 1})
    series.sample()
    _, body = await service.get("/v1/series")
    assert body["step"] == 10.0
    assert body["values"]["allow"] == [pytest.approx(2.0, abs=0.3)]
    assert (body["values"]["robots_ok"], body["values"]["leases"]) == ([1.0], [1.0])
    assert body["values"]["wait_p50"][0] is not None
    for _ in range(POINTS + 5):
        series.sample()
    _, body = await service.get("/v1/series")
    assert {len(one) for one in (body["times"], *body["values"].values())} == {POINTS}
    assert body["values"]["wait_p50"][-1] is None


async def test_the_overview_has_the_state_and_the_totals(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    await service.get("/v1/check?url=http://a.test/")
    await service.post("/v1/hosts/b.test/block", {"seconds": 600})
    _, seen = await service.get("/v1/overview")
    assert (seen["state"], seen["ready"], seen["decisions"]["allow"]) == ("serving", True, 1)
    assert (seen["host_states"]["blocked"], seen["robots_ok"]) == (1, 1)
    assert (seen["reload"]["ok"], seen["fleet"], seen["oldest_wait"]) == (True, None, None)


async def test_the_configuration_is_shown_with_its_sources_and_without_secrets(serve: Any) -> None:
    service = await serve(max_leases=7)
    service.service.sources = {"server.max_leases": "flag --max-leases"}
    _, body = await service.get("/v1/config")
    settings = {one["name"]: one for one in body["settings"]}
    assert settings["server.max_leases"]["value"] == 7
    assert settings["server.max_leases"]["source"] == "flag --max-leases"
    assert settings["pacing.default_interval"]["source"] == "default"
    assert settings["server.port"]["needs_restart"]
    assert not settings["server.max_leases"]["needs_restart"]
    assert masked({"url": "redis://u:p@h/0?password=x"}) == {"url": "redis://***@h/0?***"}
    assert masked(" redis://u:p w@h/0") == " redis://***@h/0"
    assert masked("see https://u:p@h/x?token=t, a@b.c") == "see https://***@h/x?*** a@b.c"
    assert masked("bot/1 (+https://e.org/b; a@b.c)") == "bot/1 (+https://e.org/b; a@b.c)"


async def test_a_past_version_has_its_text(
    start: Any, internet: FakeInternet, tmp_path: Any
) -> None:
    from gatekeeper import Gatekeeper
    from gatekeeper.config import Config, GuardConfig, StorageConfig
    from gatekeeper.sidecar.routes.check import RobotsQuery, past_version
    from gatekeeper.sidecar.routes.table import ROUTES
    from gatekeeper.sidecar.routing import Call, Problem
    from gatekeeper.sidecar.service import Service

    site = internet.site("a.test").robots("User-agent: *\nDisallow: /old\n")
    config = Config(
        guard=GuardConfig(allow=("127.0.0.0/8", "*.test")),
        storage=StorageConfig(path=str(tmp_path / "state")),
    )
    async with Gatekeeper("testbot/1.0", config=config, resolver=internet.resolver) as gate:
        service = Service(gate, config, ROUTES)
        await gate.check("http://a.test/")
        site.robots("")
        await gate.block("a.test", 0.0)
        (old,) = await gate.history("http://a.test")
        query = RobotsQuery("http://a.test", version=old.body_hash.hex())
        found = await past_version(service, "http://a.test", query)
        assert (found.robots_txt, found.groups[0].rules[0].value) == (
            "User-agent: *\nDisallow: /old\n",
            "/old",
        )
        assert found.user_agent == "testbot"  # the product token, as everywhere
        query = msgspec.structs.replace(query, user_agent="otherbot/2.0")
        assert (await past_version(service, "http://a.test", query)).user_agent == "otherbot"
        with pytest.raises(Problem, match="no such version"):
            await past_version(service, "http://b.test", query)
        await service.close()
    del Call


@pytest.mark.parametrize(
    "path",
    ["/v1/overview", "/v1/leases", "/v1/events", "/v1/series", "/v1/config", "/v1/decisions/x"],
)
async def test_operator_feeds_need_the_role_admin(serve: Any, path: str) -> None:
    service = await serve()
    tokens = Tokens((Token(b"c" * 32, "crawler", frozenset(["crawl", "check"])),))  # type: ignore[arg-type]
    service.service.apply_config(service.service.config, tokens)
    headers = {"Authorization": "Bearer " + "c" * 32}
    assert (await service.get(path))[0] == 401
    assert (await service.get(path, headers=headers))[0] == 403
