"""`/v1/hosts/{host}`: however a host is spelt, and whatever is no host."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from gatekeeper.config import Config, HostRule
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.reload import refuse_new_groups
from tests.internet import FakeInternet
from tests.waiting_support import seen_in_time, until


@pytest.mark.parametrize("spelling", ["A.TEST", "a.test.", "http://a.test/x"])
async def test_a_host_is_found_by_any_spelling(serve: Any, spelling: str) -> None:
    service = await serve()
    status, host = await service.post(f"/v1/hosts/{quote(spelling, safe='')}/pause", {})
    assert (status, host["host"], host["state"]) == (200, "a.test", "paused")


@pytest.mark.parametrize("spelling", ["::1", "[::1]"])
async def test_an_ipv6_host_needs_no_brackets(serve: Any, spelling: str) -> None:
    service = await serve()
    path = f"/v1/hosts/{quote(spelling, safe='')}"
    status, host = await service.post(f"{path}/pause", {})
    assert (status, host["host"]) == (200, "::1")
    assert (await service.post(f"{path}/refresh", {}))[0] in (200, 202)


async def test_text_that_is_no_host_is_a_bad_request(serve: Any) -> None:
    service = await serve()
    status, problem = await service.get(f"/v1/hosts/{quote('a b', safe='')}")
    assert status == 400
    assert "'a b' is not a host" in problem["detail"]


def test_a_reload_refuses_a_rule_that_needs_a_new_group() -> None:
    old = Config.from_dict({"group": [{"name": "g"}]})
    word = {"match": "a.test", "group": "g"}
    refuse_new_groups(old, Config.from_dict({"group": [{"name": "g"}], "host": [word]}))
    new = {"group": [{"name": "h"}], "host": [word | {"group": "h"}]}
    with pytest.raises(ConfigError, match="'h' takes effect only after a restart"):
        refuse_new_groups(old, Config.from_dict(new))


async def test_a_refresh_of_a_blocked_host_is_accepted_for_later(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("https://a.test").robots("")
    service = await serve()
    await service.post("/v1/hosts/a.test/block", {"seconds": 600})
    status, host = await service.post("/v1/hosts/a.test/refresh", {})

    assert (status, host["state"]) == (202, "blocked")


async def test_a_refresh_fetches_the_files_that_are_known_of_the_host(
    serve: Any, internet: FakeInternet
) -> None:
    """Of a host that was asked about at another port alone it asked for https://a.test."""
    asked = internet.site("http://a.test:8080").robots("")
    usual = internet.site("https://a.test").robots("")
    service = await serve()
    await service.get("/v1/check", params={"url": "http://a.test:8080/"})
    await service.post("/v1/hosts/a.test/refresh", {})
    await until(lambda: len(asked.paths) + len(usual.paths) == 2)

    assert usual.paths == []


async def test_a_batch_with_a_url_of_a_blocked_host_is_answered(
    serve: Any, internet: FakeInternet
) -> None:
    for name in ("a.test", "b.test"):
        internet.site(name).robots("")
    service = await serve()
    await service.post("/v1/hosts/a.test/block", {"seconds": 600})
    _, answer = await service.post("/v1/check", {"urls": ["http://a.test/", "http://b.test/"]})
    status, story = await service.get("/v1/explain", params={"url": "http://a.test/"})

    told = [(one["verdict"], one["reason"]) for one in answer["decisions"]]
    assert told == [("defer", "host_blocked"), ("allow", "empty_file")]
    assert (status, story["decision"]["retry_at"] is not None) == (200, True)


async def test_a_host_that_refused_says_how_far_it_is_slowed(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 0.05\n")
    service = await serve()
    _, lease = await service.post("/v1/leases", {"url": "http://a.test/x", "wait": 5})
    await service.post(f"/v1/leases/{lease['id']}/report", {"status": 429, "retry_after": 1})
    _, host = await service.get("/v1/hosts/a.test")
    assert host["interval"] == 0.1
    (clock,) = [one for one in host["clocks"] if one["kind"] == "interval" and one["decides"]]
    assert clock["source"].startswith("twice the usual 0.05 s since a 429 at ")
    assert "; the usual rate is tried again at " in clock["source"]
    assert clock["since"] is not None


async def test_a_host_does_not_show_the_url_of_a_lease(serve: Any, internet: FakeInternet) -> None:
    internet.site("http://a.test").robots("")
    service = await serve()
    status, _ = await service.post("/v1/leases", {"url": "http://a.test/x?token=1", "wait": 30})
    assert status == 201
    _, host = await service.get("/v1/hosts/a.test")
    (held,) = (one for one in host["clocks"] if one["kind"] == "in_flight")
    assert held["source"] == "busy x1, 1 before the head of the response"


async def verdict(service: Any) -> tuple[str, str | None]:
    _, decision = await service.get("/v1/check", params={"url": "http://a.test/x"})
    return decision["verdict"], decision["note"]


@pytest.mark.parametrize("match", ["a.test", "A.TEST.", "*.test", "*"])
async def test_an_override_is_in_force_until_it_ends_and_says_who_set_it(
    serve: Any, internet: FakeInternet, match: str
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    path = f"/v1/hosts/{quote(match, safe='')}/override"
    body = {"robots": "deny", "reason": "a <complaint>", "by": "Kim", "seconds": 3600}
    status, told = await service.post(path, body)
    assert (status, told["clocks"][0]["kind"]) == (200, "override")
    found, note = await verdict(service)
    assert found == "deny"
    assert note is not None
    assert note.startswith("a <complaint> (by Kim, until 20")
    (view,) = (await service.get("/v1/hosts/a.test"))[1]["clocks"]
    assert (view["kind"], view["source"]) == ("override", "robots deny: a <complaint> (by Kim)")
    assert 3590 < view["seconds"] <= 3600
    async with service.session.get(f"{service.base}/ui/hosts/a.test") as response:
        page = await response.text()
    assert "has an override: robots deny: a &lt;complaint&gt; (by Kim) (until 20" in page

    async def allow(seconds: float) -> None:
        soon = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        assert (await service.post(path, {"robots": "allow", "until": soon}))[0] == 200

    await seen_in_time(allow, lambda: is_again(service, "allow"), first=0.3)
    await until(lambda: is_again(service, "deny"))
    assert (await service.post(path, {"seconds": 0}))[1]["clocks"] == []
    assert await verdict(service) == ("allow", None)


async def is_again(service: Any, wanted: str) -> bool:
    return (await verdict(service))[0] == wanted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"seconds": 5, "until": "2036-01-01T00:00:00Z"}, "either `seconds` or"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": "5"}, "seconds"),
        ({"until": "2036-01-01T00:00:00"}, "until"),
        ({"until": 3600}, "until"),
        ({"by": "x" * 201}, "by"),
        ({"by": "a\nb"}, "by: at most 200 printable"),
        ({"robots": "alow"}, "robots"),
        ({"group": "nowhere"}, "no [[group]] named"),
        ({"match": "b.test"}, "match"),
    ],
)
async def test_an_override_with_a_mistake_changes_nothing(
    serve: Any, internet: FakeInternet, body: dict[str, Any], said: str
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    status, problem = await service.post("/v1/hosts/a.test/override", {"robots": "deny", **body})
    assert (status, said in problem["detail"]) == (400, True), problem
    assert (await verdict(service))[0] == "allow"


async def test_a_reload_leaves_an_override_in_force_and_changes_what_is_below_it(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    await service.post("/v1/hosts/a.test/override", {"robots": "deny", "reason": "above"})
    rules = (HostRule(match="a.test", robots="deny", reason="below"), HostRule(match="b.test"))
    service.service.reread = lambda: replace(service.service.config, host=rules)
    assert (await service.post("/v1/admin/reload", {}))[1]["applied"] == ["host"]
    assert await verdict(service) == ("deny", "above")
    await service.post("/v1/hosts/a.test/override", {"seconds": 0})
    assert await verdict(service) == ("deny", "below")
