"""Where requests of the service go, and what may direct them: T13, T14, T19 over HTTP."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import gatekeeper
from gatekeeper import RemoteGatekeeper
from tests.internet import FakeInternet, redirect

OPEN = "User-agent: *\nDisallow:\n"
SHUT = "User-agent: *\nDisallow: /\n"


async def test_t13_a_batch_is_decided_by_the_file_of_each_port_and_scheme(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("http://a.test").robots(OPEN)
    internet.site("http://a.test:8080").robots(SHUT)
    service = await serve()
    urls = ["http://a.test/x", "http://a.test:8080/x", "http://A.TEST.:80/x", "http://a.test/y"]
    for _ in range(2):  # cold, then from the decision cache
        _, answer = await service.post("/v1/check", {"urls": urls})
        verdicts = [(one["origin"], one["verdict"]) for one in answer["decisions"]]
        assert verdicts == [
            ("http://a.test", "allow"),
            ("http://a.test:8080", "deny"),
            ("http://a.test", "allow"),
            ("http://a.test", "allow"),
        ]


async def test_t13_a_known_origin_does_not_decide_for_a_similar_name(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots(OPEN)
    internet.site("a.test.b.test").robots(SHUT)
    service = await serve()
    await service.get("/v1/check", params={"url": "http://a.test/x"})
    _, other = await service.get("/v1/check", params={"url": "http://a.test.b.test/x"})
    assert (other["origin"], other["verdict"]) == ("http://a.test.b.test", "deny")


async def test_t14_a_decision_by_a_redirected_file_names_the_hops(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").on("/robots.txt", redirect("http://b.test/for-a"))
    internet.site("b.test").on("/for-a", SHUT).robots(OPEN)
    service = await serve()
    _, sent = await service.get("/v1/check", params={"url": "http://a.test/x"})
    _, own = await service.get("/v1/check", params={"url": "http://b.test/x"})

    assert (sent["verdict"], sent["hops"]) == ("deny", ["http://b.test/for-a"])
    assert own["verdict"] == "allow"
    assert not own.get("hops")


@pytest.fixture
def proxied(internet: FakeInternet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set an HTTP proxy for everything in the environment."""
    proxy = internet.site("proxy.test", address=internet.address()).otherwise("by proxy")
    where = f"http://proxy.test:{internet.port_of(proxy.addresses[0], 80)}"
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, where)
        monkeypatch.setenv(name.upper(), where)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return proxy


async def test_t19_a_proxy_of_the_environment_gets_neither_robots_nor_pages(
    serve: Any, internet: FakeInternet, proxied: Any
) -> None:
    internet.site("a.test").robots(OPEN).page("/page", "the page")
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/page"}
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")

    assert proxied.requests == []


async def test_t19_a_proxy_of_the_environment_gets_no_question_to_the_sidecar(
    serve: Any, internet: FakeInternet, proxied: Any
) -> None:
    internet.site("a.test").robots(OPEN)
    service = await serve()
    async with RemoteGatekeeper(service.base) as gate:
        assert await gate.allowed("http://a.test/x")

    assert proxied.requests == []


def test_t19_no_session_of_ours_trusts_the_environment() -> None:
    """Each ClientSession of the package omits trust_env, sets False, or copies a session's."""
    said = []
    for path in sorted(Path(gatekeeper.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "ClientSession" in text else ():
            if isinstance(node, ast.Call) and _name(node.func).endswith("ClientSession"):
                said += [ast.unparse(k.value) for k in node.keywords if k.arg == "trust_env"]
    assert said
    assert set(said) <= {"False", "lent.trust_env"}


def _name(called: ast.expr) -> str:
    return str(getattr(called, "attr", getattr(called, "id", "")))
