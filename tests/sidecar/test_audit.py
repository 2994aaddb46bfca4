"""What the sidecar shows of its audit record, and what it finds there."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from tests.internet import FakeInternet

PAGE = "http://a.test/page"


async def page(service: Any, path: str = "audit") -> str:
    async with service.session.get(f"{service.base}/ui/{path}") as response:
        assert response.status == 200
        return html.unescape(re.sub(r"<[^>]+>", " ", await response.text()))


async def decided(service: Any, internet: FakeInternet, count: int = 1) -> list[str]:
    """Return the ids of the decisions of so many leases, which no client asked about."""
    internet.site("a.test").robots("User-agent: *\nAllow: /page\nDisallow: /\n")
    found = []
    for _ in range(count):
        async with service.service.gate.lease(PAGE) as lease:
            lease.report(status=200)
            found.append(lease.decision.id)
    return found


async def test_the_page_says_where_the_record_is_and_how_to_get_a_report(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    folder = tmp_path / "the record"
    service = await serve(audit={"folder": str(folder), "rotate": 4096})
    await decided(service, internet, 20)
    text = " ".join((await page(service)).split())
    open_one = max(folder.glob("*.jsonl"))
    chain = open_one.name.rpartition("-")[0]
    assert f"Folder {folder} Chain {chain} Lines of the chain" in text
    assert "on Each request is written" in text
    assert re.search(r"Last seal of the chain line \d+ at 20\S+Z, not signed", text)
    assert re.search(r"Segments in the folder [2-9] \([\d,\u202f ]+ bytes\)", text), text
    assert f"gatekeeper audit report '{folder}' -o report.html" in text
    assert "Audit" in (await page(service, "")).split()


async def test_without_a_record_the_page_says_so_and_no_page_links_to_it(serve: Any) -> None:
    service = await serve()
    assert "audit.folder is not set" in await page(service)
    async with service.session.get(f"{service.base}/ui/") as response:
        assert 'href="./audit"' not in await response.text()


@pytest.mark.parametrize(
    ("on_failure", "said"), [("refuse", "no request starts"), ("continue", "requests go on")]
)
async def test_a_record_that_fails_says_why_and_what_that_means(
    serve: Any, internet: FakeInternet, tmp_path: Path, on_failure: str, said: str
) -> None:
    folder = tmp_path / "audit"
    service = await serve(audit={"folder": str(folder), "on_failure": on_failure})
    (folder / "texts").write_text("in the way of the folder of texts")
    internet.site("a.test").robots("")
    await service.get("/v1/check", params={"url": PAGE})
    text = await page(service)
    assert "failing" in text.split()
    assert re.search(rf"can't be written: [A-Z][a-z ]+: {said}", text)


async def test_a_decision_is_found_in_the_record_once_it_is_not_among_the_latest(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    service = await serve(audit={"folder": str(folder), "rotate": 4096})
    found = await decided(service, internet, 60)
    status, body = await service.get(f"/v1/decisions/{found[-1]}")
    assert status == 200
    decision, audit = body["decision"], body["audit"]
    assert (decision["verdict"], decision["reason"], decision["url"]) == ("allow", "rule", PAGE)
    assert (decision["id"], decision["origin"]) == (found[-1], "http://a.test")
    assert (audit["kind"], audit["line"], audit["segment"][: len(audit["chain"])]) == (
        *("grant", 2),
        audit["chain"],
    )
    # Also in the last closed segment, but not in earlier ones.
    there = [(await service.get(f"/v1/decisions/{one}"))[0] for one in found]
    assert there == sorted(there, reverse=True)
    assert set(there) == {200, 404}
    status, problem = await service.get(f"/v1/decisions/{found[0]}")
    assert f"gatekeeper audit show {folder} {found[0]}" in problem["detail"]


@pytest.mark.parametrize("wanted", ["never", "..%2F..%2Fx", "a-b%22", "x" * 500, "0-0"])
async def test_what_is_no_decision_is_not_found(serve: Any, tmp_path: Path, wanted: str) -> None:
    service = await serve(audit={"folder": str(tmp_path / "audit")})
    status, problem = await service.get(f"/v1/decisions/{wanted}")
    assert (status, problem["type"]) == (404, "urn:gatekeeper:problem:not-found")


async def test_a_refusal_is_found_whatever_its_url_looks_like(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /\n")
    for urls in ("full", "digest"):
        folder = tmp_path / urls
        service = await serve(audit={"folder": str(folder), "urls": urls})
        url = 'http://a.test/"decision":"1-1"'
        status, problem = await service.post("/v1/leases", {"url": url, "wait": 5})
        assert status == 403
        wanted = problem["decision"]["id"]
        service.service.operators.feed.take_latest(1)
        status, body = await service.get(f"/v1/decisions/{wanted}")
        assert (status, body["decision"]["verdict"], body["decision"]["id"]) == (
            *(200, "deny"),
            wanted,
        )
        assert body["audit"]["kind"] == "refused"
        assert body["decision"]["origin"] == ("http://a.test" if urls == "full" else "")
