"""An error about one URL ends neither the crawl nor its page, whatever the text and its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gatekeeper.crawl.engine import Crawl
from tests.crawl.crawling import OPEN, fetch, manifest, stored
from tests.internet import FakeInternet, Page, Raw, redirect

ODD = [
    *("http://xn--\u00df.com/", "http://xn--\u2167", "http://xn--\u017f/", "http://xn--\u2460/x"),
    *("//:-", "//:%", "//@:-", "http://[::1]@/", "//xn--\u00df/", "http://a b/", "//h:\uff10/"),
]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
async def test_a_redirect_to_no_valid_url_fails_and_the_other_urls_are_fetched(
    internet: FakeInternet, folder: Path, odd: str
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x", "here")
    site.on("/old", redirect(odd.encode().decode("latin-1")))  # as octets, as sites send it
    assert await fetch(internet, "http://a.test/old", "http://a.test/x", output=folder) == 1
    assert "redirected to an invalid URL" in manifest(folder)["http://a.test/old"]["error"]
    assert stored(folder, "http://a.test/x") == b"here"


async def test_lines_that_are_no_urls_fail_and_the_other_urls_are_fetched(
    internet: FakeInternet, folder: Path, tmp_path: Path
) -> None:
    internet.site("a.test").robots(OPEN).page("/x", "here")
    listed = tmp_path / "urls.txt"
    listed.write_text("\n".join([*ODD, "http://a.test/x"]), encoding="utf-8")
    assert await fetch(internet, input=str(listed), output=folder) == 1
    entries = manifest(folder)
    assert entries.pop("http://a.test/x")["outcome"] == "fetched"
    assert {entry["outcome"] for entry in entries.values()} == {"failed"}
    assert all("invalid URL" in entry["error"] for entry in entries.values())


@pytest.mark.parametrize("odd", ODD, ids=ascii)
async def test_a_link_or_sitemap_that_is_no_url_costs_no_page(
    internet: FakeInternet, folder: Path, odd: str
) -> None:
    octets = odd.encode().decode("latin-1")
    site = internet.site("a.test").robots(f"Sitemap: {odd}\nHost: {odd}\nLicense: {odd}\n{OPEN}")
    site.on("/x", Page("here", headers={"Link": f'<{octets}>; rel="license"'}))
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert stored(folder, "http://a.test/x") == b"here"


async def test_a_response_that_can_not_be_read_fails_with_the_reason(
    internet: FakeInternet, folder: Path
) -> None:
    """The error used to show aiohttp's status 400, which no site had sent."""
    twice = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"
    internet.site("a.test").robots(OPEN).on("/x", Raw(twice))
    assert await fetch(internet, "http://a.test/x", output=folder) == 1
    said = manifest(folder)["http://a.test/x"]["error"]
    assert said.startswith("the site's answer can't be read: ")
    assert "400" not in said


async def test_a_redirect_with_credentials_is_refused(internet: FakeInternet, folder: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x")
    site.on("/old", redirect("http://ann:secret@a.test/x"))
    assert await fetch(internet, "http://a.test/old", output=folder) == 1
    assert "/x" not in site.paths
    text = (folder / "manifest.jsonl").read_text()
    assert "credentials" in text
    assert "secret" not in text


@pytest.mark.usefixtures("faulty")
async def test_an_internal_error_fails_only_its_own_url(
    internet: FakeInternet, folder: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x", "here")
    site.on("/old", redirect("/%62oom"))
    given = ("http://a.test/%62oom?token=1", "http://a.test/old", "http://a.test/x")
    assert await fetch(internet, *given, output=folder) == 1
    entries = manifest(folder)
    for url in given[:2]:
        assert entries[url]["outcome"] == "failed"
        assert "internal error of gatekeeper (UnicodeDecodeError)" in entries[url]["error"]
    assert stored(folder, "http://a.test/x") == b"here"


async def test_an_internal_error_in_a_request_fails_only_its_own_url(
    internet: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    internet.site("a.test").robots(OPEN).page("/bad").page("/x", "here")
    send = Crawl.exchange

    async def fail(crawl: Any, lease: Any, body: Any) -> Any:
        if lease.url.endswith("/bad"):
            raise IndexError("injected")
        return await send(crawl, lease, body)

    monkeypatch.setattr(Crawl, "exchange", fail)
    assert await fetch(internet, "http://a.test/bad", "http://a.test/x", output=folder) == 1
    assert "(IndexError)" in manifest(folder)["http://a.test/bad"]["error"]
    assert stored(folder, "http://a.test/x") == b"here"


async def test_header_fields_that_break_their_reader_cost_no_page(
    internet: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    internet.site("a.test").robots(OPEN).page("/x", "here")

    def fail(_: object) -> object:
        raise IndexError("injected")

    monkeypatch.setattr("gatekeeper.crawl.engine.signals", fail)
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert stored(folder, "http://a.test/x") == b"here"
