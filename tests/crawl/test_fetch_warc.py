"""`gatekeeper fetch --warc`: the file has all responses, and no record is ever removed."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from gatekeeper.config import AuditConfig, HostRule, StorageConfig
from gatekeeper.errors import ConfigError
from tests.crawl.crawling import CONFIG, OPEN, ROBOTS, archived, fetch, manifest, records
from tests.internet import FakeInternet, Page, Raw

NAMES = pytest.mark.parametrize("name", ["p.warc", "p.warc.gz"])


async def test_a_warc_file_holds_what_was_sent(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/x", "hello")
    path = tmp_path / "pages.warc.gz"
    assert await fetch(internet, "http://a.test/x", warc=path) == 0
    assert site.requests[-1].headers["Accept-Encoding"] == "identity"
    (_, (kind, body, page), (other, _, _), *_) = records(path)
    assert (kind, body, other) == ("response", b"hello", "request")
    assert page.rec_headers.get_header("WARC-Target-URI") == "http://a.test/x"
    assert page.rec_headers.get_header("WARC-IP-Address") == "127.0.0.1"


async def test_a_warc_file_goes_on_where_it_stopped(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    path = tmp_path / "pages.warc"
    await fetch(internet, "http://a.test/1", warc=path)
    await fetch(internet, "http://a.test/1", "http://a.test/2", warc=path)
    assert [path for path in site.paths if path != ROBOTS] == ["/1", "/2"]
    assert [body for _, _, body in archived(path)] == [b"one", b"two"]


# -- what else was answered


async def test_a_warc_file_holds_redirects(internet: FakeInternet, tmp_path: Path) -> None:
    site = internet.site("a.test").robots(OPEN).page("/new", "here")
    site.on("/old", Page("moved", status=301, headers={"Location": "/new"}))
    path = tmp_path / "p.warc"
    assert await fetch(internet, "http://a.test/old", warc=path) == 0
    assert archived(path) == [
        ("http://a.test/old", "301 Moved Permanently", b"moved"),
        ("http://a.test/new", "200 OK", b"here"),
    ]


async def test_a_redirect_whose_body_breaks_off_is_followed_all_the_same(
    internet: FakeInternet, tmp_path: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/new", "here")
    site.on("/old", Raw(b"HTTP/1.1 302 Found\r\nLocation: /new\r\nContent-Length: 5\r\n\r\nmov"))
    path = tmp_path / "p.warc"
    assert await fetch(internet, "http://a.test/old", warc=path) == 0
    assert [body for _, _, body in archived(path)] == [b"mov", b"here"]
    assert site.paths == [ROBOTS, "/old", "/new"]
    assert b"WARC-Truncated: disconnect" in path.read_bytes()


async def test_a_warc_file_holds_429_answers(net: FakeInternet, tmp_path: Path) -> None:
    site = net.site("a.test").robots(OPEN)
    site.on("/x", Page("no", status=429), Page("not yet", status=503))
    path = tmp_path / "p.warc"
    run = fetch(net, "http://a.test/x", warc=path, tries=2)
    assert await net.drive(run) == 1
    assert [body for _, _, body in archived(path)] == [b"no", b"not yet"]


async def test_a_record_without_a_line_in_the_manifest_stays_in_the_warc_file(
    net: FakeInternet, tmp_path: Path
) -> None:
    site = net.site("a.test").robots(OPEN)
    site.on("/x", Page("no", status=429, headers={"Retry-After": "3600"}), Page("here"))
    path = tmp_path / "p.warc"
    await net.drive(fetch(net, "http://a.test/x", warc=path, max_wait=5.0))
    assert await net.drive(fetch(net, "http://a.test/x", warc=path)) == 0
    assert [body for _, _, body in archived(path)] == [b"no", b"here"]


# -- across runs


async def test_a_block_outlives_a_run_that_has_no_folder(net: FakeInternet, tmp_path: Path) -> None:
    site = net.site("a.test").robots(OPEN)
    site.on("/x", Page("no", status=429, headers={"Retry-After": "3600"}))
    for _ in range(2):
        await net.drive(fetch(net, "http://a.test/x", warc=tmp_path / "p.warc", max_wait=5.0))
    assert site.paths == [ROBOTS, "/x"]


@NAMES
async def test_a_warc_file_unknown_to_the_manifest_is_appended_to(
    internet: FakeInternet, tmp_path: Path, name: str
) -> None:
    internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    path = tmp_path / name
    await fetch(internet, "http://a.test/1", warc=path)
    assert await fetch(internet, "http://a.test/2", warc=path, output=tmp_path / "out") == 0
    assert [body for _, _, body in archived(path)] == [b"one", b"two"]


async def test_a_foreign_warc_file_of_the_same_name_is_refused(
    internet: FakeInternet, tmp_path: Path
) -> None:
    internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    ours, foreign = tmp_path / "x" / "p.warc", tmp_path / "y" / "p.warc"
    await fetch(internet, "http://a.test/1", warc=ours, output=tmp_path / "out")
    foreign.parent.mkdir()
    foreign.write_bytes(b"somebody else's archive" * 1_000)
    with pytest.raises(ConfigError, match="does not belong to this crawl"):
        await fetch(internet, "http://a.test/2", warc=foreign, output=tmp_path / "out")
    assert foreign.read_bytes() == b"somebody else's archive" * 1_000
    assert manifest(tmp_path / "out")["http://a.test/1"]["warc"]["file"] == "../x/p.warc"


@pytest.mark.parametrize("before", [None, "p.warc", "other.warc"])
async def test_the_summary_counts_pages_of_earlier_runs_missing_from_the_warc_file(
    internet: FakeInternet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: str | None,
) -> None:
    internet.site("a.test").robots(OPEN).page("/1").page("/2")
    folder, urls = tmp_path / "out", ("http://a.test/1", "http://a.test/2")
    await fetch(internet, urls[0], output=folder, warc=tmp_path / before if before else None)
    capsys.readouterr()
    assert await fetch(internet, *urls, output=folder, warc=tmp_path / "p.warc") == 0
    said = "not in the WARC file: 1 of the skipped pages" in capsys.readouterr().out
    assert said is (before != "p.warc")


async def test_a_removed_warc_file_is_begun_anew_and_the_summary_says_so(
    internet: FakeInternet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two").page("/3", "three")
    path, urls = tmp_path / "p.warc", [f"http://a.test/{number}" for number in (1, 2, 3)]
    await fetch(internet, urls[0], warc=path)
    path.unlink()
    assert await fetch(internet, *urls[:2], warc=path) == 0
    assert "not in the WARC file: 1 of" in capsys.readouterr().out
    assert await fetch(internet, *urls, warc=path) == 0
    assert [body for _, _, body in archived(path)] == [b"two", b"three"]


@pytest.mark.parametrize("name", ["manifest.jsonl", "gatekeeper.db", "gatekeeper.db-wal"])
async def test_a_warc_file_with_the_name_of_a_file_of_the_folder_is_refused(
    internet: FakeInternet, tmp_path: Path, name: str
) -> None:
    """The manifest was said to be in use by another process; the state file was overwritten."""
    folder = tmp_path / "out"
    for path in (folder / name, tmp_path / "out" / ".." / "out" / name):
        with pytest.raises(ConfigError, match=rf"^--warc .*{name}: -o has its own file there; "):
            await fetch(internet, "http://a.test/x", output=folder, warc=path)
    assert list(folder.iterdir()) == []


# -- why each page could be requested


class Told(NamedTuple):
    """A record that says something about another one."""

    kind: str
    url: str
    text: str
    """Of a metadata record: its fields."""
    fields: dict[str, str]
    record: str
    refers_to: str | None
    concurrent_to: str | None


def told(path: Path, *kinds: str) -> list[Told]:
    """Return the records of these kinds."""
    found = []
    for kind, body, record in records(path):
        if kind in kinds:
            get, text = record.rec_headers.get_header, body.decode()
            is_fields = get("Content-Type") == "application/warc-fields"
            lines = [line.split(": ", 1) for line in text.splitlines()] if is_fields else []
            names = "WARC-Record-ID", "WARC-Refers-To", "WARC-Concurrent-To"
            found.append(Told(kind, get("WARC-Target-URI"), text, dict(lines), *map(get, names)))
    return found


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@NAMES
async def test_each_page_names_its_decision_and_the_text_that_made_it(
    internet: FakeInternet, tmp_path: Path, name: str
) -> None:
    rules = "User-agent: *\nAllow: /x\nDisallow: /\n"
    site = internet.site("a.test").page("/x", "hello")
    internet.site("b.test").page("/rules", rules)
    site.on(ROBOTS, Page("", status=301, headers={"Location": "http://b.test/rules"}))
    path = tmp_path / name
    assert await fetch(internet, "http://a.test/x", warc=path, output=tmp_path / "out") == 0
    (response,) = told(path, "response")
    (page,) = [one for one in told(path, "metadata") if one.url == response.url]
    assert page.refers_to == page.concurrent_to == response.record
    decision = manifest(tmp_path / "out")["http://a.test/x"]["decision"]
    assert page.fields == {
        "decision": decision["id"],
        "reason": "rule",
        "user-agent": "examplebot",
        "robots-line": "2",
        "robots-sha256": sha256(rules),
    }
    (robots,) = told(path, "resource")
    assert (robots.url, robots.text) == ("http://b.test/rules", rules)
    (about,) = [one for one in told(path, "metadata") if one.url == robots.url]
    assert about.refers_to == about.concurrent_to == robots.record
    assert about.fields == {"outcome": "rules", "status": "200", "sha256": sha256(rules)}


async def test_a_page_names_its_line_in_the_audit_record(
    internet: FakeInternet, tmp_path: Path
) -> None:
    internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    config = replace(CONFIG, audit=AuditConfig(folder=str(tmp_path / "audit")))
    path, asked = tmp_path / "p.warc", ("http://a.test/1", "http://a.test/2")
    assert await fetch(internet, *asked, warc=path, config=config) == 0
    (segment,) = (tmp_path / "audit").glob("*.jsonl.gz")
    lines = [json.loads(line) for line in gzip.decompress(segment.read_bytes()).splitlines()]
    pages = [one for one in told(path, "metadata") if "decision" in one.fields]
    assert [one.url for one in pages] == list(asked)
    for page in pages:
        assert page.fields["audit-chain"] == segment.name.rpartition("-")[0]
        line = lines[int(page.fields["audit-line"]) - 1]
        assert (line["kind"], line["url"]) == ("grant", page.url)
        assert line["decision"] == page.fields["decision"]
        assert line["text"] == page.fields["robots-sha256"]


async def test_the_robots_txt_of_each_origin_is_there_once_whatever_it_allows(
    internet: FakeInternet, tmp_path: Path
) -> None:
    closed = "User-agent: *\nDisallow: /\n"
    internet.site("open.test").robots(OPEN).page("/1", "one").page("/2", "two")
    internet.site("closed.test").robots(closed)
    internet.site("none.test").page("/x", "no file")
    urls = [f"http://open.test/{n}" for n in (1, 2)]
    urls += ["http://closed.test/x", "http://none.test/x"]
    path = tmp_path / "p.warc"
    await fetch(internet, *urls, warc=path)
    found = {one.url: one.text for one in told(path, "resource")}
    assert found == {"http://open.test/robots.txt": OPEN, "http://closed.test/robots.txt": closed}
    assert len(told(path, "resource")) == 2
    (none,) = [one for one in told(path, "metadata") if one.url == "http://none.test/robots.txt"]
    assert (none.fields, none.refers_to) == ({"outcome": "no_file", "status": "404"}, None)


async def test_a_text_of_the_state_file_is_there_before_its_pages_are_unexplained(
    internet: FakeInternet, tmp_path: Path
) -> None:
    site = internet.site("a.test").robots(OPEN).page("/1", "one").page("/2", "two")
    config = replace(CONFIG, storage=StorageConfig(path=str(tmp_path / "state.db")))
    for number in (1, 2):
        path = tmp_path / f"{number}.warc"
        assert await fetch(internet, f"http://a.test/{number}", warc=path, config=config) == 0
        assert [one.text for one in told(path, "resource")] == [OPEN]
        (page,) = [one for one in told(path, "metadata") if "decision" in one.fields]
        assert page.fields["robots-sha256"] == sha256(OPEN)
    assert site.paths.count(ROBOTS) == 1


async def test_a_crawl_that_is_refused_everywhere_keeps_every_text(
    internet: FakeInternet, tmp_path: Path
) -> None:
    names = [f"a{number}.test" for number in range(150)]
    for name in names:
        internet.site(name).robots(f"# {name}\nUser-agent: *\nDisallow: /\n")
    path = tmp_path / "p.warc.gz"
    await fetch(internet, *(f"http://{name}/" for name in names), warc=path)
    assert {one.text.split()[1] for one in told(path, "resource")} == set(names)


async def test_a_rule_of_the_operator_is_named_with_who_set_it(
    internet: FakeInternet, tmp_path: Path
) -> None:
    internet.site("a.test").robots("User-agent: *\nDisallow: /\n").page("/x", "ours")
    rule = HostRule(match="a.test", robots="allow", by="Kim", reason="two\nlines")
    path = tmp_path / "p.warc"
    config = replace(CONFIG, host=(rule,))
    assert await fetch(internet, "http://a.test/x", warc=path, config=config) == 0
    (page,) = [one for one in told(path, "metadata") if "decision" in one.fields]
    assert (page.fields["reason"], page.fields["note"]) == ("operator", "two lines (by Kim)")
    assert "robots-sha256" not in page.fields
