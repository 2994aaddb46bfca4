"""`/v1/forward-auth`: what a proxy is answered, whatever headers its visitor sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest
from multidict import CIMultiDict

from gatekeeper.sidecar import background
from gatekeeper.sidecar.listening import Server
from tests.internet import FakeInternet, Hold, NeverAnswer, Page
from tests.sidecar.conftest import sent
from tests.sidecar.decision_log_support import LogOf
from tests.waiting_support import until

ROBOTS = "User-agent: *\nDisallow: /private\n\nUser-agent: testbot\nAllow: /\n"
FORWARDED = {
    "X-Forwarded-Proto": "http",
    "X-Forwarded-Host": "a.test",
    "X-Forwarded-Uri": "/page",
    "User-Agent": "somebot/1.0",
}


@pytest.fixture
def site(internet: FakeInternet) -> Any:
    return internet.site("a.test").robots(ROBOTS)


async def ask(
    service: Any, headers: dict[str, str] | CIMultiDict[str], path: str = ""
) -> aiohttp.ClientResponse:
    async with service.session.get(
        service.base + "/v1/forward-auth" + path, headers=headers
    ) as response:
        await response.read()
        return response


async def warm(serve: Any, **server: Any) -> Any:
    """Return a service that has the record of a.test."""
    service = await serve(forward_auth=True, **server)
    await service.get("/v1/check", params={"url": "http://a.test/"})
    return service


async def test_t7_forward_auth_is_off_by_default(serve: Any) -> None:
    service = await serve()
    assert (await ask(service, FORWARDED)).status == 404


async def test_t7_forward_auth_answers_trusted_peers_alone(serve: Any) -> None:
    service = await serve(forward_auth=True, trusted_peers=("192.0.2.1/32",))
    assert (await ask(service, FORWARDED)).status == 403


# -- what is not known ----------------------------------------------------------------------


async def test_an_unknown_origin_is_403_and_its_file_is_fetched(
    serve: Any, internet: FakeInternet
) -> None:
    hold = Hold(Page(ROBOTS))
    internet.site("a.test").on("/robots.txt", hold)
    service = await serve(forward_auth=True)
    first = await ask(service, FORWARDED)
    assert (first.status, first.headers["Retry-After"]) == (403, "1")

    hold.release()
    await service.get("/v1/check", params={"url": "http://a.test/page"})
    second = await ask(service, FORWARDED)
    assert second.status == 200
    assert second.headers["X-Gatekeeper-Decision-Id"]


async def test_t20_a_403_for_an_unknown_origin_has_an_id_a_reason_and_a_line_in_the_log(
    serve: Any, site: Any
) -> None:
    service = await serve(forward_auth=True)
    log = LogOf(service.service)
    headers = (await ask(service, FORWARDED)).headers
    assert headers["X-Gatekeeper-Reason"] == "unknown"

    [told] = log.lines()
    assert told["id"] == headers["X-Gatekeeper-Decision-Id"]
    assert (told["verdict"], told["reason"]) == ("defer", "unknown")
    assert told["client"] == "127.0.0.1"


async def test_rfc20_robots_txt_itself_is_allowed_for_an_unknown_origin(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").on("/robots.txt", NeverAnswer())
    service = await serve(forward_auth=True)
    answer = await ask(service, FORWARDED | {"X-Forwarded-Uri": "/robots.txt"})
    assert (answer.status, answer.headers["X-Gatekeeper-Reason"]) == (200, "robots_file")
    assert internet.requests == []


async def test_a_short_configured_wait_answers_the_first_question(serve: Any, site: Any) -> None:
    service = await serve(forward_auth=True, forward_auth_wait=0.15)
    await ask(service, FORWARDED)
    await until(lambda: not service.service.learner)  # the fetch may take longer
    assert (await ask(service, FORWARDED)).status == 200


async def test_one_forward_auth_request_is_one_decision(serve: Any, site: Any) -> None:
    service = await warm(serve)
    before = sum(service.service.gate.stats().decisions.values())
    await ask(service, FORWARDED)
    assert sum(service.service.gate.stats().decisions.values()) == before + 1


async def test_t8_an_origin_is_learnt_by_one_task_however_often_it_is_asked_about(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").on("/robots.txt", NeverAnswer())
    service = await serve(forward_auth=True)
    await asyncio.gather(*(ask(service, FORWARDED) for _ in range(30)))
    assert len(service.service.learner) == 1


async def test_t8_origins_that_do_not_answer_hold_up_neither_others_nor_the_operator(
    serve: Any, internet: FakeInternet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_ORIGINS", 2)
    service = await serve(forward_auth=True)
    for name in ("a.test", "b.test", "c.test"):
        internet.site(name).on("/robots.txt", NeverAnswer())
        assert (await ask(service, FORWARDED | {"X-Forwarded-Host": name})).status == 403
    assert (len(service.service.learner), service.service.learner.put_off) == (2, 1)

    internet.site("d.test").robots(ROBOTS)
    body = {"origin": "http://d.test"}
    status, _ = await service.post("/v1/hosts/d.test/refresh", body)
    assert status == 200
    answer = await ask(service, FORWARDED | {"X-Forwarded-Host": "d.test"})
    assert answer.status == 200


async def test_t8_an_origin_is_followed_for_a_bounded_time(virtual_internet: FakeInternet) -> None:
    clock: Any = virtual_internet.clock

    async def silent(_origin: str) -> None:
        await asyncio.Event().wait()

    gate: Any = SimpleNamespace(parts=SimpleNamespace(questions=SimpleNamespace(learn=silent)))
    learner = background.OriginLearner(gate, clock)
    task = learner.learn("http://a.test")
    assert task is learner.learn("http://a.test")
    await clock.elapse(11.0)
    assert len(learner) == 0
    await learner.close()


# -- who is judged --------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["", "(none of your business)", "?!"])
async def test_a_visitor_without_a_user_agent_is_judged_as_star(
    serve: Any, site: Any, agent: str
) -> None:
    service = await warm(serve)  # its own agent, testbot, is allowed everything
    headers = FORWARDED | {"X-Forwarded-Uri": "/private", "User-Agent": agent}
    if not agent:
        headers[aiohttp.hdrs.USER_AGENT] = ""
    assert (await ask(service, headers)).status == 403


# -- what is asked --------------------------------------------------------------------------

STYLES = [
    pytest.param(FORWARDED, "", id="Traefik and Caddy"),
    pytest.param({"X-Original-URL": "http://a.test/page"}, "", id="ingress-nginx"),
    pytest.param(
        {"X-Forwarded-Proto": "http", "X-Forwarded-Host": "a.test", "X-Original-URI": "/page"},
        "",
        id="nginx",
    ),
    pytest.param({"X-Forwarded-Proto": "http", "Host": "a.test"}, "/page?x=1", id="Envoy"),
]


@pytest.mark.parametrize(("headers", "path"), STYLES)
async def test_the_headers_of_each_supported_proxy_are_understood(
    serve: Any, site: Any, headers: dict[str, str], path: str
) -> None:
    service = await warm(serve)

    assert (await ask(service, headers, path)).status == 200
    denied = {name: value.replace("/page", "/private") for name, value in headers.items()}
    assert (await ask(service, denied, path.replace("/page", "/private"))).status == 403


FORGED = [
    {"X-Original-URL": "http://a.test/page"},
    {"X-Original-URL": "http://b.test/private"},
    {"X-Original-URI": "/page"},
    {"X-Forwarded-Uri": "/page"},
    {"X-Forwarded-Host": "b.test"},
    {"X-Forwarded-Proto": "https"},
]


@pytest.mark.parametrize(
    "forged", FORGED, ids=lambda forged: " ".join(map(": ".join, forged.items()))
)
@pytest.mark.parametrize(("headers", "path"), STYLES)
async def test_t7_no_header_of_the_visitor_changes_what_the_proxy_asks_about(
    serve: Any,
    internet: FakeInternet,
    site: Any,
    headers: dict[str, str],
    path: str,
    forged: dict[str, str],
) -> None:
    internet.site("b.test").robots("")
    service = await warm(serve)
    await service.get("/v1/check", params={"url": "http://b.test/"})
    set_by_proxy = {name: value.replace("/page", "/private") for name, value in headers.items()}
    both = CIMultiDict([*set_by_proxy.items(), *forged.items()])
    assert (await ask(service, both, path.replace("/page", "/private"))).status == 403


@pytest.mark.parametrize("host", ["a.test?", "a.test#", "a.test/page?", "x@a.test", "a.test:", ""])
@pytest.mark.parametrize("name", ["X-Forwarded-Host", "Host"])
async def test_t7_a_host_is_a_name_and_a_port(serve: Any, site: Any, host: str, name: str) -> None:
    service = await warm(serve)
    headers = FORWARDED | {"X-Forwarded-Uri": "/private"}
    del headers["X-Forwarded-Host"]
    assert (await ask(service, headers | {name: host})).status == 403


@pytest.mark.parametrize("url", ["http://a.test?/private", "http://a.test#/private", "/page", ""])
async def test_t7_a_whole_url_has_a_host_and_a_path(serve: Any, site: Any, url: str) -> None:
    service = await warm(serve)
    assert (await ask(service, {"X-Original-URL": url})).status == 403


async def test_t7_a_path_ends_at_no_number_sign(serve: Any, site: Any) -> None:
    service = await warm(serve)
    headers = FORWARDED | {"X-Forwarded-Uri": "/page#/../private"}
    assert (await ask(service, headers)).status == 403


async def test_a_host_may_be_an_address_with_a_port(serve: Any, internet: FakeInternet) -> None:
    internet.site("127.0.0.1").robots(ROBOTS)
    origin = f"127.0.0.1:{internet.listener().port()}"
    service = await serve(forward_auth=True)
    await service.get("/v1/check", params={"url": f"http://{origin}/"})
    assert (await ask(service, FORWARDED | {"X-Forwarded-Host": origin})).status == 200
    brackets = await ask(service, FORWARDED | {"X-Forwarded-Host": "[2001:db8::1]:80"})
    assert brackets.headers["X-Gatekeeper-Reason"] == "blocked"


@pytest.mark.parametrize("missing", ["X-Forwarded-Proto", "X-Forwarded-Uri"])
async def test_t7_a_request_without_a_certain_target_is_403(
    serve: Any, site: Any, missing: str
) -> None:
    service = await serve(forward_auth=True)
    headers = {name: value for name, value in FORWARDED.items() if name != missing}
    assert (await ask(service, headers)).status == 403


# -- 200 or 403, nothing else ---------------------------------------------------------------

ODD: Iterable[Any] = [
    pytest.param(b"X-Forwarded-Host: b.test\r\n", id="two hosts"),
    pytest.param(b"X-Forwarded-Uri: /other\r\n", id="two paths"),
    pytest.param(b"User-Agent: other\r\n", id="two names"),
    pytest.param(b"Host: b.test\r\n", id="two Host headers"),
    pytest.param(b"X-Any: a\x01b\r\n", id="a control character"),
    pytest.param(b"X-Any: " + b"x" * 20_000 + b"\r\n", id="a header too long"),
    pytest.param(b"Bad Header: x\r\n", id="no header at all"),
]


def request(more: bytes, path: bytes = b"/v1/forward-auth") -> bytes:
    usual = "".join(f"{name}: {value}\r\n" for name, value in FORWARDED.items()).encode()
    return b"GET " + path + b" HTTP/1.0\r\nHost: 127.0.0.1\r\n" + usual + more + b"\r\n"


async def status_of(service: Any, *parts: bytes) -> bytes:
    return (await sent(service.base, *parts)).split(b" ", 2)[1]


@pytest.mark.parametrize("more", ODD)
async def test_t7_a_target_that_cannot_be_read_is_403(serve: Any, site: Any, more: bytes) -> None:
    service = await warm(serve)
    assert await status_of(service, request(b"")) == b"200"
    assert await status_of(service, request(more)) == b"403"


async def fed(service: Any, *pieces: bytes) -> bytes:
    """Feed the pieces one by one, each as soon as the previous one was read. Return the status."""
    protocol = Server(service.service.handle, header=16_384)()
    told = MagicMock(spec=asyncio.Transport)
    answered = asyncio.Event()
    told.is_closing.return_value = False
    told.get_extra_info.return_value = None
    told.write.side_effect = told.writelines.side_effect = lambda _: answered.set()
    protocol.connection_made(told)
    for piece in pieces:
        protocol.data_received(piece)
    await answered.wait()
    protocol.connection_lost(None)
    written = told.write.call_args or told.writelines.call_args
    data = written[0][0]
    return (data if isinstance(data, bytes) else b"".join(data)).split(b" ", 2)[1]


@pytest.mark.parametrize("cut", [1, 10, 30, 150])
async def test_t7_a_target_that_cannot_be_read_is_403_when_sent_in_pieces(
    serve: Any, site: Any, cut: int
) -> None:
    service = await warm(serve)
    whole = request(b"X-Any: a\x01b\r\n")
    assert await fed(service, whole[:cut], whole[cut:]) == b"403"


async def test_a_url_too_long_to_be_read_is_403(serve: Any, site: Any) -> None:
    service = await warm(serve)
    path = b"/v1/forward-auth/" + b"x" * 20_000
    assert await status_of(service, request(b"", path)) == b"403"


async def test_an_unreadable_request_outside_forward_auth_is_400(serve: Any, site: Any) -> None:
    service = await warm(serve)
    assert await status_of(service, request(b"Bad Header: x\r\n", b"/v1/check")) == b"400"


async def test_an_internal_error_is_403(
    serve: Any, site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = await warm(serve)

    def broken(_url: str, **_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(service.service.gate, "peek", broken)
    assert (await ask(service, FORWARDED)).status == 403
    assert "a bug" in caplog.text


# -- bounds, and the Host that is ours ------------------------------------------------------


async def test_t15_a_proxy_is_bounded_like_any_client(serve: Any, site: Any) -> None:
    service = await warm(serve, client_rate=2.0)
    answers = [await ask(service, FORWARDED)]
    while answers[-1].status == 200:
        answers.append(await ask(service, FORWARDED))

    # Never 429: nginx turns anything but 200, 401 and 403 into a 500.
    assert answers[-1].status == 403
    assert int(answers[-1].headers["Retry-After"]) >= 1
    assert service.service.clients.refused["rate"] == 1


async def test_t15_concurrent_requests_of_a_proxy_are_bounded(
    serve: Any, internet: FakeInternet
) -> None:
    hold = Hold(Page(ROBOTS))
    internet.site("a.test").on("/robots.txt", hold)
    service = await serve(forward_auth=True, client_concurrency=1, forward_auth_wait=20.0)
    clients = service.service.clients
    entered = asyncio.Event()
    enter = clients.enter

    def noted(client: str) -> None:
        enter(client)
        entered.set()

    clients.enter = noted
    first = asyncio.create_task(ask(service, FORWARDED))
    await entered.wait()
    assert (await ask(service, FORWARDED)).status == 403
    assert clients.refused["concurrency"] == 1
    hold.release()
    await first
    assert (await ask(service, FORWARDED)).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("gate.internal", 200),
        ("GATE.internal:8750", 200),
        ("other.internal:99", 200),
        ("other.internal", 403),
        ("a.test", 403),
        ("gate.internal.evil.example", 403),
        ("xgate.internal", 403),
        ("", 403),
    ],
)
async def test_t4_forward_auth_answers_for_listed_hosts_only(
    serve: Any, site: Any, host: str, status: int
) -> None:
    service = await warm(serve, forward_auth_hosts=("Gate.internal", "other.internal:99"))
    assert (await ask(service, FORWARDED | {"Host": host})).status == status


async def test_forward_auth_without_a_list_answers_for_any_host(serve: Any, site: Any) -> None:
    service = await warm(serve)
    assert (await ask(service, FORWARDED | {"Host": "visited.example"})).status == 200
