"""A client generated from `/openapi.json` works, and its generator gives no warnings."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gatekeeper.sidecar.routes.health import document
from gatekeeper.sidecar.routes.table import ROUTES
from tests.internet import FakeInternet, Page
from tests.sidecar.test_tokens import BARE, with_tokens

PACKAGE = "generated_gatekeeper_client"


@pytest.fixture(scope="module", params=[False, True], ids=["open", "tokens"])
def client(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    """`client("api.leases.acquire_lease")` returns a module of the generated package."""
    pytest.importorskip("openapi_python_client")
    folder: Path = tmp_path_factory.mktemp("client")
    contract = folder / "openapi.json"
    contract.write_text(json.dumps(document(ROUTES, version="1", tokens=request.param)), "utf-8")
    settings = folder / "settings.json"
    settings.write_text('{"post_hooks": []}', "utf-8")  # else it runs formatters
    run = subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--fail-on-warning"),
            *("--path", contract, "--config", settings, "--output-path", folder / PACKAGE),
            *("--meta", "none"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "warning" not in (run.stdout + run.stderr).lower()
    sys.path.insert(0, str(folder))

    def part(name: str) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.{name}")

    part.tokens = request.param
    yield part
    sys.path.remove(str(folder))
    for name in [one for one in sys.modules if one.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


async def test_a_generated_client_asks_leases_reports_and_fetches(
    client: Any, serve: Any, internet: FakeInternet
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /private\nCrawl-delay: 0.01\n")
    site.page("/x", b"\x00octets").on("/gone", Page("no longer", status=403))
    sidecar = await serve()
    models = client("models")
    if client.tokens:
        sidecar = with_tokens(sidecar)
        gate = client("client").AuthenticatedClient(sidecar.base, BARE)
    else:
        gate = client("client").Client(sidecar.base)
    async with gate as gate:

        async def ask(operation: str, *given: Any, **named: Any) -> Any:
            call = client(f"api.{operation}").asyncio_detailed
            return await call(*given, client=gate, **named)

        decision = (await ask("questions.check_url", url_query="http://a.test/private")).parsed
        assert (decision.verdict, decision.rule.line) == ("deny", 2)
        assert decision.fetched_at.tzinfo is not None
        batch = models.Batch(urls=["http://a.test/x", "no URL"])
        batch = (await ask("questions.check_urls", body=batch)).parsed
        assert [one.reason for one in batch.decisions] == ["no_rule", "invalid_url"]
        story = (await ask("questions.explain_url", url_query="http://a.test/private")).parsed
        assert [one.line for one in story.candidates] == [2]

        wanted = models.LeaseRequestBody(url="http://a.test/x", wait=5.0)
        lease = (await ask("leases.acquire_lease", body=wanted)).parsed
        assert lease.expires_at > lease.not_before
        renewed = (await ask("leases.renew_lease", lease.id, body=models.Renewal(ttl=100.0))).parsed
        assert renewed.expires_at > lease.expires_at
        report = models.LeaseReport(status=200, elapsed=0.1)
        assert (await ask("leases.report_lease", lease.id, body=report)).status_code == 204
        lost = await ask("leases.give_back_lease", "unknown")
        assert (lost.status_code, lost.parsed.status) == (404, 404)

        denied = models.LeaseRequestBody(url="http://a.test/private")
        denied = await ask("leases.acquire_lease", body=denied)
        assert (denied.status_code, denied.parsed.decision.reason) == (403, "rule")
        page = (await ask("pages.fetch_page", url_query="http://a.test/x")).parsed
        assert page.payload.read() == b"\x00octets"
        # The site's own 403 is not a problem document.
        page = await ask("pages.fetch_page", url_query="http://a.test/gone")
        assert (page.status_code, page.parsed.payload.read()) == (403, b"no longer")

        order = {"state": models.ListHostsState("any"), "sort": models.ListHostsSort("-in_flight")}
        hosts = (await ask("hosts.list_hosts", **order)).parsed
        assert [one.host for one in hosts.hosts] == ["a.test"]
        assert (await ask("hosts.pause_host", "a.test", body=models.EmptyObject())).parsed.state
        assert (await ask("service.is_ready")).parsed.status == "ready"
        assert (await ask("operators.get_overview")).parsed.decisions["allow"] >= 1


async def test_without_its_token_a_generated_client_gets_a_problem(client: Any, serve: Any) -> None:
    if not client.tokens:
        return  # this service requires no token
    sidecar = with_tokens(await serve())
    async with client("client").AuthenticatedClient(sidecar.base, "wrong" * 8) as gate:
        refused = await client("api.questions.check_url").asyncio_detailed(
            client=gate, url_query="http://a.test/"
        )
    assert (refused.status_code, refused.parsed.status) == (401, 401)
