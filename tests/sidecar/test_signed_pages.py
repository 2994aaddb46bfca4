"""Requests of /v1/fetch are signed, and header fields for machines are passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gatekeeper.robots import page_signals
from gatekeeper.signing import new_key
from tests.internet import FakeInternet, Page
from tests.test_signing import as_sent, verify


async def test_v1_fetch_signs_robots_txt_every_hop_and_the_page(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    public = new_key(tmp_path / "bot.pem").public
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").redirect(
        "/go", "http://b.test/page"
    )
    internet.site("b.test").robots("User-agent: *\nDisallow: /no\n").page("/page", "the page")
    service = await serve(
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


async def test_v1_fetch_passes_on_what_a_site_answers_to_machines(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("").on(
        "/paid",
        Page(
            "pay first",
            402,
            headers=[
                ("Crawler-Price", "USD 0.01"),
                ("Content-Usage", "train-ai=n"),
                ("Content-Usage", "search=y"),
                ("WWW-Authenticate", 'Basic realm="who are you?"'),
                ("WWW-Authenticate", 'License error="invalid_request", scope="a\\"b"'),
                ("Link", "</l.xml>; rel=license, " + "x" * 7_000),
                ("Link", "x" * 7_000),
            ],
        ),
    )
    service = await serve()
    async with service.session.get(
        service.base + "/v1/fetch", params={"url": "http://a.test/paid"}
    ) as response:
        assert response.status == 402
        told = response.headers
    assert told["Crawler-Price"] == "USD 0.01"
    assert told["Content-Usage"] == "train-ai=n, search=y"
    assert told.getall("WWW-Authenticate") == ['license error="invalid_request", scope="a\\"b"']
    assert "Link" not in told  # longer than clients accept; the page is passed on nevertheless
    assert page_signals(told, "bot", status=402).license_required
