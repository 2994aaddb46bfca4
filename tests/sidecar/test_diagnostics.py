"""The listener of `server.diagnostics`: health and metrics for those that may reach no more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import listening
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.routing import ANY
from gatekeeper.sidecar.service import DIAGNOSTICS, Service
from tests.sidecar.conftest import as_served
from tests.sidecar.test_every_route import path_of

TOKEN = "t" * 40
Run = Callable[..., Awaitable[tuple[Service, str, aiohttp.ClientSession]]]


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    """`await run(token_file=...)`: the service, the URL of its diagnostics, and a session."""
    async with AsyncExitStack() as stack:

        async def begin(**settings: Any) -> tuple[Service, str, aiohttp.ClientSession]:
            served = as_served(**({"diagnostics": "0.0.0.0:0"} | settings))
            service, _ = await stack.enter_async_context(served)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            [(_, port)] = service.diagnostics
            return service, f"http://127.0.0.1:{port}", session

        yield begin


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


async def statuses(session: aiohttp.ClientSession, base: str, **options: Any) -> dict[str, int]:
    found = {}
    for path in DIAGNOSTICS:
        async with session.get(base + path, **options) as response:
            found[path] = response.status
    return found


async def test_the_diagnostics_listener_answers_three_paths_and_no_other_route(run: Run) -> None:
    """Also to requests that the API answers inline, and whatever credentials they have."""
    _, base, session = await run()
    assert await statuses(session, base) == dict.fromkeys(DIAGNOSTICS, 200)
    others = [route for route in ROUTES if route.path not in DIAGNOSTICS]
    assert len(others) > 40
    for route in others:
        method = "GET" if route.method == ANY else route.method
        async with session.request(
            method,
            base + path_of(route),
            json={"url": "http://127.0.0.1/"} if method == "POST" else None,
            allow_redirects=False,
        ) as response:
            assert response.status == 404, route.path
            said = await response.json(content_type=None)
            assert "only /healthz, /readyz, /metrics are served here" in said["detail"]
    for method in ("POST", "PUT", "DELETE"):
        async with session.request(method, base + "/metrics") as response:
            assert response.status == 405


async def test_with_tokens_the_diagnostics_metrics_need_one(run: Run, tokens: str) -> None:
    _, base, session = await run(token_file=tokens)
    assert await statuses(session, base) == {"/healthz": 200, "/readyz": 200, "/metrics": 401}
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert await statuses(session, base, headers=bearer) == dict.fromkeys(DIAGNOSTICS, 200)


async def test_diagnostics_are_served_beside_a_unix_socket(run: Run, tmp_path: Path) -> None:
    _, base, session = await run(socket=str(tmp_path / "s"))
    assert await statuses(session, base) == dict.fromkeys(DIAGNOSTICS, 200)


async def test_t4_diagnostics_metrics_accept_addresses_and_allowed_host_headers(
    run: Run,
) -> None:
    _, base, session = await run(allowed_hosts=("gate.internal:8751",))
    for host, status in (("evil.example", 403), ("gate.internal:8751", 200), ("10.1.2.3:1", 200)):
        expected = {"/healthz": 200, "/readyz": 200, "/metrics": status}
        assert await statuses(session, base, headers={"Host": host}) == expected


async def test_only_the_owner_of_workers_serves_diagnostics(run: Run) -> None:
    _, base, session = await run(workers=1)
    for _ in range(3):
        assert await statuses(session, base) == dict.fromkeys(DIAGNOSTICS, 200)
    async with session.get(base + "/metrics") as response:
        text = await response.text()
    assert "gatekeeper_workers 1.0" in text
    assert "gatekeeper_worker_connections 0.0" in text
    assert 'gatekeeper_http_requests_total{code="200",method="GET",route="/readyz"} 3.0' in text


async def test_t3_the_gate_never_requests_the_diagnostics_listener(run: Run) -> None:
    service, base, _ = await run()
    decision = await service.gate.check(base + "/metrics")
    assert decision.verdict != "allow"
    assert not any(route == "unmatched" for route, _, _ in service.metrics.requests)


@pytest.mark.parametrize("given", ["8751", ":8751", "a:b:1", "::1:8751", "a:70000", "a:", "a b:1"])
def test_an_address_without_port_or_host_is_explained(given: str) -> None:
    with pytest.raises(ConfigError, match=r'server\.diagnostics: .*such as "0\.0\.0\.0:8751"'):
        listening.diagnostics_address(ServerConfig(diagnostics=given))


def test_an_unknown_host_name_is_blamed_on_server_diagnostics() -> None:
    with pytest.raises(ConfigError, match=r"server\.diagnostics: nowhere\.invalid: "):
        listening.open_diagnostics_sockets(ServerConfig(diagnostics="nowhere.invalid:0"))
