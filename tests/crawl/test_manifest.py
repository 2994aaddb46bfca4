"""The manifest: what a crawl knows after it was stopped at any point."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gatekeeper.crawl.manifest import Entry, Manifest, Result, WarcPlace
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.robots import Rule

AT = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest.jsonl"


def entry(url: str, outcome: Result = Result.FETCHED, **more: object) -> Entry:
    return Entry(url=url, outcome=outcome, at=AT, **more)  # type: ignore[arg-type]


def test_a_fetched_url_is_done_in_the_next_run(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1"))
    with Manifest(path) as manifest:
        assert manifest.done("https://a.test/1")
        assert not manifest.done("https://a.test/2")


def test_a_denied_url_is_done(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1", Result.DENIED))
        assert manifest.done("https://a.test/1")


def test_a_failed_url_is_tried_again(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1", Result.FAILED))
    with Manifest(path) as manifest:
        assert not manifest.done("https://a.test/1")


HOPS = ((301, "https://a.test/"), (302, "https://a.test/home"))


def test_the_hops_of_a_fetched_page_are_done(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("http://a.test/", redirects=HOPS, size=5))
    with Manifest(path) as manifest:
        assert manifest.done("https://a.test/")
        assert manifest.fetched("https://a.test/home")


def test_an_entry_without_a_page_marks_only_its_own_url_as_done(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("http://a.test/", redirects=HOPS))
    with Manifest(path) as manifest:
        assert manifest.done("http://a.test/")
        assert not manifest.done("https://a.test/home")


def test_a_denied_url_is_done_without_a_page(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1", Result.DENIED))
        assert not manifest.fetched("https://a.test/1")


@pytest.mark.parametrize(
    ("warc", "missing"),
    [(WarcPlace("p.warc", 0, 9), False), (WarcPlace("old/p.warc", 0, 9), True), (None, True)],
)
def test_the_manifest_knows_which_pages_the_warc_file_of_this_run_lacks(
    path: Path, warc: WarcPlace | None, missing: bool
) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1", size=5, warc=warc))
        assert not manifest.unarchived("https://a.test/1")  # there is none
    with Manifest(path, archive="p.warc") as manifest:
        assert manifest.unarchived("https://a.test/1") is missing


@pytest.mark.parametrize("torn", [b'{"url":"https://a.te', b"{", b"\xff", b'"'])
def test_a_torn_last_line_is_cut_off(path: Path, torn: bytes) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1"))
    with path.open("ab") as file:
        file.write(torn)
    with Manifest(path) as manifest:
        assert manifest.done("https://a.test/1")
        manifest.write(entry("https://a.test/2"))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["url"] for line in lines] == ["https://a.test/1", "https://a.test/2"]


def test_a_last_line_without_a_line_end_is_not_counted_as_done(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with Manifest(path) as manifest:
        assert not manifest.done("https://a.test/1")


def test_a_line_in_the_middle_that_is_no_entry_is_counted_and_left_alone(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1"))
    path.write_bytes(b"a note\n" + path.read_bytes())
    with Manifest(path) as manifest:
        assert manifest.unreadable == 1
        assert manifest.done("https://a.test/1")
    assert path.read_bytes().startswith(b"a note\n")


def test_the_manifest_knows_the_last_record_of_each_warc_file(path: Path) -> None:
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/1", warc=WarcPlace("a.warc", 0, 700)))
        manifest.write(entry("https://a.test/2", warc=WarcPlace("a.warc", 700, 900)))
    with Manifest(path) as manifest:
        assert manifest.warc_places == {"a.warc": WarcPlace("a.warc", 700, 900)}


def test_an_entry_has_the_deciding_line_and_the_time_in_rfc_3339(path: Path) -> None:
    rule = Rule(line=4, field="disallow", value="/x", text="Disallow: /x")
    decision = Decision(
        verdict=Verdict.DENY,
        reason=Reason.RULE,
        url="https://a.test/x",
        origin="https://a.test",
        user_agent="bot",
        rule=rule,
    )
    with Manifest(path) as manifest:
        manifest.write(entry("https://a.test/x", Result.DENIED, decision=decision))
    said = json.loads(path.read_text())
    assert said["at"] == "2027-01-02T03:04:05Z"
    assert said["decision"]["verdict"] == "deny"
    assert said["decision"]["rule"] == {
        "line": 4,
        "field": "disallow",
        "value": "/x",
        "text": "Disallow: /x",
    }
