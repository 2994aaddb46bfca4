"""Pages of /v1/fetch are signed, and only by the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gatekeeper.identity import new_key
from tests.internet import FakeInternet
from tests.test_identity import as_sent, verify


async def test_v1_fetch_signs_robots_txt_every_hop_and_the_page(
    door: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    public = new_key(tmp_path / "bot.pem").public
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").redirect(
        "/go", "http://b.test/page"
    )
    internet.site("b.test").robots("User-agent: *\nDisallow: /no\n").page("/page", "the page")
    service = await door(
        identity={"key": str(tmp_path / "bot.pem"), "directory": "https://bot.example"}
    )
    async with service.session.get(
        service.base + "/v1/fetch",
        params={"url": "http://a.test/go"},
        headers={"Signature": "sig1=:AAAA:", "Signature-Input": "sig1=()"},
    ) as response:
        assert (response.status, await response.text()) == (200, "the page")
        assert "Signature" not in response.headers
    assert [(r.host, r.path) for r in internet.requests] == [
        ("a.test", "/robots.txt"),
        ("a.test", "/go"),
        ("b.test", "/robots.txt"),
        ("b.test", "/page"),
    ]
    for request in internet.requests:
        assert len(request.headers.getall("Signature")) == 1
        verify(as_sent(request), public)
