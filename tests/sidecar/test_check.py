"""`/v1/check`, the probes and the problem documents, over a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from gatekeeper.config import Config, ServerConfig
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import GateClosed, InvalidURL
from gatekeeper.robots import Rule
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.service import Service
from tests.gate_support import decided


class ScriptedGate:
    """A gate with scripted answers, since these tests are about the service."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    ready = True
    holdups = SimpleNamespace(count=dict, state=None, due=None)

    def stats(self) -> SimpleNamespace:
        """Return stats without any decision."""
        return SimpleNamespace(fleet=None, decisions={}, directory=SimpleNamespace(outcomes={}))

    parts = SimpleNamespace(
        guard=None,
        listeners=[],
        scheduler=SimpleNamespace(watch=lambda: ({}, []), holdups=SimpleNamespace(state=None)),
    )
    """No hosts; nothing is fetched."""

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        if self.error is not None:
            raise self.error
        if not url.startswith("http"):
            raise InvalidURL(url, "no scheme")
        if "private" in url:
            rule = Rule(line=3, field="disallow", value="/private", text="Disallow: /private")
            return decided(url=url, rule=rule, id="d-1", user_agent=user_agent or "bot")
        fields = {"url": url, "id": "d-1", "user_agent": user_agent or "bot"}
        return decided(Verdict.ALLOW, reason=Reason.NO_RULE, **fields)

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        return [await self.check(url, user_agent=user_agent) for url in urls]


@pytest.fixture
def gate() -> ScriptedGate:
    return ScriptedGate()


@pytest.fixture
def config() -> Config:
    return Config(server=ServerConfig(max_batch=3, max_body=2000, log_decisions="none"))


@pytest.fixture
async def service(gate: ScriptedGate, config: Config) -> Service:
    service = Service(gate, config, ROUTES, answers=gate, addresses=[("0.0.0.0", 0)])  # type: ignore[arg-type]
    service.serve()
    return service


@pytest.fixture
async def base(service: Service) -> AsyncIterator[str]:
    server = RawTestServer(service.handle)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_denial_is_an_answer_and_names_its_line(
    base: str, client: aiohttp.ClientSession
) -> None:
    async with client.get(
        f"{base}/v1/check", params={"url": "https://a.example/private?x=1&y=2"}
    ) as response:
        body = await response.json()

    assert response.status == 200
    assert body["verdict"] == "deny"
    assert body["url"] == "https://a.example/private?x=1&y=2"
    assert body["rule"] == {
        "line": 3,
        "field": "disallow",
        "value": "/private",
        "text": "Disallow: /private",
    }


async def test_the_agent_of_the_question_is_used(base: str, client: aiohttp.ClientSession) -> None:
    params = {"url": "https://a.example/", "user_agent": "other bot/1.0"}
    async with client.get(f"{base}/v1/check", params=params) as response:
        assert (await response.json())["user_agent"] == "other bot/1.0"


async def test_a_batch_keeps_its_order(base: str, client: aiohttp.ClientSession) -> None:
    urls = ["https://a.example/private", "https://a.example/", "https://a.example/private/2"]
    async with client.post(f"{base}/v1/check", json={"urls": urls}) as response:
        decisions = (await response.json())["decisions"]

    assert [one["url"] for one in decisions] == urls
    assert [one["verdict"] for one in decisions] == ["deny", "allow", "deny"]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("", "url"),
        ("url=ftp://a.example/", "no scheme"),
        ("url=https://a.example/&url=https://b.example/", "twice"),
        ("url=https://a.example/&useragent=x", "useragent"),
        ("url=https://a.example/&useragent=x", "unknown field `useragent`"),
        ("url=http://a.example/?x=1&y=2", "curl -G --data-urlencode url="),
        ("url=%ff", "UTF-8"),
        ("url=https://a.example/&user_agent=", "user_agent"),
    ],
)
async def test_a_bad_question_is_a_problem_document(
    base: str, client: aiohttp.ClientSession, query: str, detail: str
) -> None:
    async with client.get(f"{base}/v1/check?{query}") as response:
        body = await response.json(content_type="application/problem+json")

    assert response.status == body["status"] == 400
    assert body["title"] == "Bad Request"
    assert body["type"].startswith("urn:gatekeeper:problem:")
    assert detail in body["detail"]
    assert body["instance"].endswith(response.headers["X-Request-Id"])


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b'{"urls": ["https://a.example/"]}', "text/plain", 415),
        (b"{", "application/json", 400),
        (b'{"urls": "https://a.example/"}', "application/json", 400),
        (b'{"urls": [], "more": 1}', "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"urls": ["1", "2", "3", "4"]}', "application/json", 413),
        (b'{"urls": ["' + b"x" * 2000 + b'"]}', "application/json", 413),
    ],
)
async def test_a_bad_batch_is_a_problem_document(
    base: str, client: aiohttp.ClientSession, body: bytes, content_type: str, status: int
) -> None:
    async with client.post(
        f"{base}/v1/check", data=body, headers={"Content-Type": content_type}
    ) as response:
        assert response.status == status
        assert response.content_type == "application/problem+json"


async def test_a_body_without_the_json_content_type_is_415_with_the_remedy(
    base: str, client: aiohttp.ClientSession
) -> None:
    async with client.post(f"{base}/v1/check") as response:
        detail = (await response.json(content_type=None))["detail"]

    assert response.status == 415
    assert "`Content-Type: application/json`, and {} where" in detail


async def test_an_unknown_parameter_does_not_mention_percent_encoding(
    base: str, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{base}/v1/check?url=http://a.example/&y=2") as response:
        assert "percent" not in (await response.json(content_type=None))["detail"]


async def test_an_unknown_path_is_404(base: str, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{base}/v1/chekc") as response:
        assert response.status == 404
        assert response.content_type == "application/problem+json"


async def test_a_wrong_method_names_the_right_ones(
    base: str, client: aiohttp.ClientSession
) -> None:
    async with client.delete(f"{base}/v1/check") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "GET, HEAD, POST"


async def test_an_internal_error_tells_nothing_but_its_id(
    base: str, client: aiohttp.ClientSession, gate: ScriptedGate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = RuntimeError("the secret inside")
    async with client.get(f"{base}/v1/check", params={"url": "https://a.example/"}) as response:
        text = await response.text()

    assert response.status == 500
    assert "secret" not in text
    assert response.headers["X-Request-Id"] in caplog.text


async def test_a_closed_gate_is_503_with_retry_after(
    base: str, client: aiohttp.ClientSession, gate: ScriptedGate
) -> None:
    gate.error = GateClosed()
    async with client.get(f"{base}/v1/check", params={"url": "https://a.example/"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1


async def test_a_draining_sidecar_is_alive_and_not_ready(
    base: str, client: aiohttp.ClientSession, service: Service
) -> None:
    async with client.get(f"{base}/readyz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})

    service.phase = "draining"
    async with client.get(f"{base}/readyz") as response:
        assert response.status == 503
    async with client.get(f"{base}/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "alive"})


async def test_head_is_get_without_a_body(base: str, client: aiohttp.ClientSession) -> None:
    async with client.head(f"{base}/healthz") as response:
        assert response.status == 200
        assert await response.read() == b""


async def test_responses_are_counted_by_route_and_status(
    base: str, client: aiohttp.ClientSession, service: Service
) -> None:
    for path in ("/private", "/private", "/"):
        params = {"url": f"https://a.example{path}"}
        async with client.get(f"{base}/v1/check", params=params) as response:
            await response.read()

    assert service.metrics.requests == {("/v1/check", "GET", 200): 3}


async def test_a_connection_stays_usable_after_an_internal_error(
    base: str, client: aiohttp.ClientSession, gate: ScriptedGate
) -> None:
    gate.error = web.HTTPGone()
    async with client.get(f"{base}/v1/check", params={"url": "https://a.example/"}) as response:
        assert response.status == 500
    gate.error = None
    async with client.get(f"{base}/v1/check", params={"url": "https://a.example/"}) as response:
        assert response.status == 200
