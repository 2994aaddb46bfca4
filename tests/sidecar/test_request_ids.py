"""Every response names its request, as the log does, and the server (T20)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.internet import FakeInternet
from tests.sidecar.decision_log_support import LogOf


@pytest.fixture
async def service(serve: Any, internet: FakeInternet) -> Any:
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/", "home")
    return await serve()


async def test_each_question_has_an_id_that_its_line_in_the_log_tells(service: Any) -> None:
    ids, log = [], LogOf(service.service)
    for path in ("/", "/", "/private", "/private"):  # cold, then answered inline
        asked = {"url": f"http://a.test{path}"}
        async with service.session.get(service.base + "/v1/check", params=asked) as response:
            ids.append(response.headers["X-Request-Id"])

    assert len(set(ids)) == 4
    assert [line["request"] for line in log.lines()] == ids


async def test_a_lease_its_report_and_its_return_have_an_id(service: Any) -> None:
    base, ids = service.base + "/v1/leases", []
    for end in ("report", "DELETE"):
        for _ in range(2):  # the first one is handled the usual way, the second inline
            wanted = {"url": "http://a.test/", "wait": 5}
            async with service.session.post(base, json=wanted) as response:
                lease = await response.json()
                ids.append(response.headers["X-Request-Id"])
            if end == "DELETE":
                asked = service.session.delete(f"{base}/{lease['id']}")
            else:
                asked = service.session.post(f"{base}/{lease['id']}/report", json={"status": 200})
            async with asked as response:
                assert response.status == 204
                ids.append(response.headers["X-Request-Id"])

    assert len(set(ids)) == 8


@pytest.mark.parametrize(
    "path",
    ["/v1/check?url=http://a.test/", "/v1/fetch?url=http://a.test/", "/healthz", "/metrics", "/no"],
)
async def test_no_response_names_the_libraries_of_the_service(service: Any, path: str) -> None:
    async with service.session.get(service.base + path) as response:
        await response.read()

    assert response.headers["Server"] == "gatekeeper"
    assert response.headers["X-Request-Id"]
