"""`gatekeeper fetch` with unusable arguments: a one-line error, and nothing is created."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gatekeeper.cli import main
from gatekeeper.crawl.engine import Answer, Crawl
from gatekeeper.crawl.output import Body
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import ConfigError, Deferred, StorageError
from gatekeeper.gate.lease import Lease
from tests.crawl.crawling import OPEN, ROBOTS, fetch, manifest
from tests.internet import Custom, FakeInternet, Page


async def test_a_warc_file_without_warcio_is_an_error_and_creates_no_file(
    internet: FakeInternet, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "warcio.warcwriter", None)
    with pytest.raises(
        ConfigError, match=r"pip install 'robots-gatekeeper\[warc\]' \(in a checkout: "
    ):
        await fetch(internet, "http://a.test/x", output=folder, warc=tmp_path / "p.warc")
    assert list(tmp_path.iterdir()) == []


async def test_a_file_in_place_of_the_folder_is_named(
    internet: FakeInternet, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"^-o .*/file: is not a directory; name another$"):
        await fetch(internet, "http://a.test/x", output=file)
    with pytest.raises(ConfigError, match=r"^-o .*/file/in: .*/file.* is not a directory; "):
        await fetch(internet, "http://a.test/x", output=file / "in")
    with pytest.raises(ConfigError, match=r"^--warc .*/p\.warc: .*/file is not a directory; "):
        await fetch(internet, "http://a.test/x", warc=file / "p.warc")


async def test_a_folder_that_cannot_be_made_is_named(
    internet: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        ConfigError, match=r"^-o .* can't be created \(Permission denied\); choose a "
    ):
        await fetch(internet, "http://a.test/x", output=folder)


async def test_a_bad_line_is_reported_once_with_its_file_and_number(
    internet: FakeInternet, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    listed = tmp_path / "urls.txt"
    listed.write_text("http://a.test/x\n# a comment\nnot a url\nnot a url\n")
    assert await fetch(internet, input=str(listed), output=folder) == 1
    assert f"       1  {listed}:3: 'not a url'  invalid URL: " in capsys.readouterr().out
    assert manifest(folder)["not a url"]["where"] == f"{listed}:3"
    before = (folder / "manifest.jsonl").read_bytes()
    assert await fetch(internet, input=str(listed), output=folder) == 1
    assert (folder / "manifest.jsonl").read_bytes() == before
    assert capsys.readouterr().out.startswith("fetched 0, 0 bytes; 3 skipped, done before\n")


async def test_a_line_that_is_not_utf_8_is_a_bad_line_and_the_rest_goes_on(
    internet: FakeInternet, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be requested as another page, with a replacement character for each byte."""
    site = internet.site("a.test").robots(OPEN).page("/x")
    listed = tmp_path / "urls.txt"
    listed.write_bytes(b"http://a.test/caf\xe9\nhttp://\xff.test/\nhttp://a.test/x\n")
    assert await fetch(internet, input=str(listed), output=folder) == 1
    assert site.paths == [ROBOTS, "/x"]
    out = capsys.readouterr().out
    # The problem in words, and each byte escaped once.
    said = "invalid URL: is not UTF-8, or holds half of a character; write it in UTF-8"
    assert f"{listed}:1: 'http://a.test/caf\\udce9'  {said}" in out
    assert f"{listed}:2: 'http://\\udcff.test/'  {said}" in out
    assert {entry.get("where") for entry in manifest(folder).values()} == {
        f"{listed}:1", f"{listed}:2", None,
    }  # fmt: skip


@pytest.mark.parametrize("option", ["-i", "-o", "--warc"])
def test_an_empty_path_is_not_the_folder_one_is_in(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fetch", "http://a.test/", option, ""])
    assert f"argument {option}" in (err := capsys.readouterr().err)
    assert "the path is empty; use" in err


async def test_lines_of_a_manifest_that_are_no_entries_are_counted_in_a_warning(
    internet: FakeInternet, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    internet.site("a.test").robots(OPEN).page("/x")
    folder.mkdir()
    (folder / "manifest.jsonl").write_text("mine\nand mine\n")
    await fetch(internet, "http://a.test/x", output=folder)
    assert "manifest.jsonl: 2 lines are not entries of a crawl" in caplog.text


async def test_a_crawl_without_output_says_that_no_page_was_stored(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots(OPEN).page("/x", "hello")
    await fetch(internet, "http://a.test/x")
    assert "pages were not stored: use -o DIR or --warc FILE" in capsys.readouterr().out


async def test_a_url_deferred_at_the_grant_of_its_lease_is_tried_again_later(
    internet: FakeInternet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be recorded as denied, and no later run asked again."""
    site = internet.site("a.test").robots(OPEN).page("/x")
    deferred = Decision(
        verdict=Verdict.DEFER, reason=Reason.OVERLOADED, url="", origin="", user_agent="bot"
    )
    left, real = [Deferred(deferred)], Crawl.exchange

    async def exchange(crawl: Crawl, lease: Lease, body: Body) -> Answer:
        if left:
            raise left.pop()
        return await real(crawl, lease, body)

    monkeypatch.setattr(Crawl, "exchange", exchange)
    assert await fetch(internet, "http://a.test/x", output=folder) == 0
    assert manifest(folder)["http://a.test/x"]["outcome"] == "fetched"
    assert site.paths == [ROBOTS, "/x"]


async def test_a_manifest_that_is_removed_ends_the_crawl(
    internet: FakeInternet, folder: Path
) -> None:
    """Entries used to be written to the removed file, and the next run fetched every page again."""

    def remove(_: object) -> Page:
        (folder / "manifest.jsonl").unlink()
        return Page("a page")

    internet.site("a.test").robots(OPEN).on("/x", Custom(choose=remove))
    with pytest.raises(
        StorageError, match=r"manifest\.jsonl: was removed during the crawl; run it"
    ):
        await fetch(internet, "http://a.test/x", output=folder)
    assert not (folder / "manifest.jsonl").exists()
