"""`lint`, `test`, `diff` and `compose`: the commands for site owners."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gatekeeper.cli import main
from gatekeeper.cli.lint import LintReport
from gatekeeper.cli.test import Case, CaseReport, CaseResult
from gatekeeper.robots import Finding
from gatekeeper.sites import texts
from gatekeeper.sites.composition import (
    Change,
    Composed,
    ComposeProblem,
    Difference,
    FragmentLine,
    Ruling,
)
from gatekeeper.sites.lint import CODES
from gatekeeper.sites.texts import write_output
from tests.internet import FakeInternet, Page
from tests.processes import PYTHON
from tests.test_imports import HEAVY, brought_in

BAD = "User-agent: *\nDisalow: /x\nDisallow: /a b\n"
ROBOTS = "User-agent: *\nDisallow: /private\nCrawl-delay: 0.01\n"
SCHEMA = Path(__file__).parents[1] / "vectors" / "sarif-2.1.0.json"


@pytest.fixture
async def site(internet: FakeInternet) -> str:
    internet.site("127.0.0.1").robots(ROBOTS)
    return f"http://127.0.0.1:{internet.listener().port()}"


async def command(*arguments: str) -> int:
    who = ("--user-agent", "examplebot/1.0 (+https://a.test)")
    return await asyncio.to_thread(main, [*arguments, *who, "--allow-address", "127.0.0.0/8"])


def written(folder: Path, **files: str) -> list[str]:
    paths = []
    for name, text in files.items():
        path = folder / f"{name}.txt"
        path.write_text(text, "utf-8")
        paths.append(str(path))
    return paths


# --- lint ------------------------------------------------------------------------------------


def test_lint_takes_files_and_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a" / ".hidden").mkdir(parents=True)
    for name in ("a/robots.txt", "a/shop.robots.txt", "a/.hidden/robots.txt", "a/humans.txt"):
        (tmp_path / name).write_text("User-agent: *\nDisallow: /x\n")
    (single,) = written(tmp_path, single=BAD)
    assert main(["lint", str(tmp_path / "a"), single]) == 1
    said = capsys.readouterr().out
    assert said.count("no findings") == 2
    assert "single.txt:2: error" in said


def test_lint_of_a_directory_without_robots_txt_files_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(tmp_path)]) == 2
    assert "no file in it has a name that ends with robots.txt" in capsys.readouterr().err


def test_strict_fails_on_warnings_and_ignore_leaves_out(tmp_path: Path) -> None:
    (path,) = written(tmp_path, a="User-agent: *\nDisallow: /a b\n")
    assert main(["lint", path]) == 0
    assert main(["lint", path, "--strict"]) == 1
    assert main(["lint", path, "--strict", "--ignore", "blank-in-value"]) == 0
    assert main(["lint", path, "--strict", "--ignore", "html,blank-in-value"]) == 0


def test_an_unknown_code_is_refused_with_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, a=BAD)
    assert main(["lint", path, "--ignore", "blank-in-values"]) == 2
    assert "did you mean blank-in-value?" in capsys.readouterr().err


def test_lint_as_text_shows_the_column_in_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, a=f"User-agent: *\nDisallow: /a b\nDisallow: /{'x' * 200}%\n")
    main(["lint", path])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "blank-in-value" in line)
    assert lines[at + 1 : at + 3] == ["    Disallow: /a b", "                ^"]
    at = next(i for i, line in enumerate(lines) if "bad-escape" in line)
    assert lines[at + 1][lines[at + 2].index("^")] == "%"
    assert len(lines[at + 1]) < 110


def test_lint_as_json_has_columns_and_one_line_per_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, a=BAD, b="User-agent: *\nDisallow: /\n")
    assert main(["lint", "--format", "json", *paths]) == 1
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    finding = next(f for f in first["findings"] if f["code"] == "misspelt-field")
    assert (finding["line"], finding["column"], finding["end_column"]) == (2, 1, 8)
    assert second["findings"] == []


def test_github_annotations_escape_what_their_syntax_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, **{"a,b:100%": BAD})
    main(["lint", "--format", "github", path])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in lines)
    blank = next(line for line in lines if "(blank-in-value)" in line)
    head, _, message = blank.removeprefix("::warning ").partition("::")
    told = dict(part.split("=", 1) for part in head.split(","))
    assert told["file"].endswith("a%2Cb%3A100%25.txt")
    assert (told["line"], told["col"], told["endColumn"]) == ("3", "13", "14")
    assert "%2520" in message


def sarif(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["lint", "--format", "sarif", *arguments])
    found = json.loads(capsys.readouterr().out)
    validator = jsonschema.Draft202012Validator(
        json.loads(SCHEMA.read_text("utf-8")), format_checker=jsonschema.FormatChecker()
    )
    assert [error.message for error in validator.iter_errors(found)] == []
    return found


def test_sarif_is_valid_by_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\ufeff\nUser-agent: *\n\nDisallow: /ä%\nSitemap: x\n\x01\nUser-agent: b\n"
    found = sarif(capsys, *written(tmp_path, a=BAD, **{"b c": odd, "empty": ""}))
    (run,) = found["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(CODES)
    misspelt = next(r for r in run["results"] if r["ruleId"] == "misspelt-field")
    assert run["tool"]["driver"]["rules"][misspelt["ruleIndex"]]["id"] == "misspelt-field"
    place = misspelt["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 2, "startColumn": 1, "endColumn": 8}
    uris = {
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]
    }
    assert any(uri.endswith("/b%20c.txt") for uri in uris)


def test_sarif_without_findings_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, a="User-agent: *\nDisallow: /\n")
    assert sarif(capsys, path)["runs"][0]["results"] == []


def test_fix_writes_the_file_and_lists_the_findings_that_remain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, a=BAD)
    Path(path).chmod(0o640)
    assert main(["lint", "--fix", path]) == 0
    assert Path(path).read_text() == "User-agent: *\nDisallow: /x\nDisallow: /a b\n"
    assert Path(path).stat().st_mode & 0o777 == 0o640
    assert "blank-in-value" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_diff_shows_what_fix_would_change_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = written(tmp_path, a=BAD)
    assert main(["lint", "--fix", "--diff", path]) == 1
    assert "-Disalow: /x\n+Disallow: /x\n" in capsys.readouterr().out
    assert Path(path).read_text() == BAD
    assert main(["lint", "--fix", "--diff", "--ignore", "misspelt-field", path]) == 0


@pytest.mark.parametrize(
    "call",
    [["--diff"], ["--fix", "-"], ["--fix", "https://a.test/"], ["--json", "--format", "sarif"]],
)
def test_lint_options_that_contradict_each_other_are_refused(
    tmp_path: Path, call: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["lint", *call, *written(tmp_path, a=BAD)])
    assert stop.value.code == 2


@pytest.mark.parametrize("name", ["lint", "diff", "compose", "test"])
def test_a_command_on_files_brings_in_no_http_client(tmp_path: Path, name: str) -> None:
    (path,) = written(tmp_path, a=BAD)
    cases = tmp_path / "cases.toml"
    cases.write_text('[[case]]\nurl = "/b"\nallowed = true\n')
    rest = {"diff": [path], "test": ["--expect", str(cases)]}.get(name, [])
    code = f"from gatekeeper.cli import main\nmain({[name, path, *rest]!r})"
    assert (
        brought_in(code, "aiohttp", "asyncio", "sqlite3", "ssl", "idna", "prometheus_client") == []
    )
    assert brought_in("from gatekeeper.cli import main", *HEAVY) == []


async def test_an_html_page_served_as_robots_txt_is_an_error(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be called a missing file: an application that answers every path was not seen."""
    page = Page("<!DOCTYPE html><title>Home</title>", content_type="text/html")
    internet.site("127.0.0.1").robots(page)
    site = f"http://127.0.0.1:{internet.listener().port()}"
    assert await command("lint", site) == 1
    assert "/robots.txt:1: error: The file is an HTML page" in capsys.readouterr().out
    assert await command("lint", "--ignore", "html", site) == 0
    assert await command("diff", "--exit-code", site, "/dev/null") == 0
    internet.site("127.0.0.1").robots(Page("", status=404))
    assert await command("lint", site) == 0
    assert "there is no file, so everything is allowed" in capsys.readouterr().out


async def test_lint_warns_of_an_unknown_content_encoding(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "User-agent: *\nDisallow: /x\n"
    internet.site("127.0.0.1").robots(Page(text, headers=[("Content-Encoding", "utf-8")]))
    site = f"http://127.0.0.1:{internet.listener().port()}"
    assert await command("lint", "--strict", site) == 1
    out = capsys.readouterr().out
    assert "/robots.txt: warning: The file is not sent as plain UTF-8" in out
    assert "'utf-8' is no coding" in out
    assert await command("lint", "--strict", "--ignore", "encoding", site) == 0


# --- compose ---------------------------------------------------------------------------------


def test_compose_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop, blog = written(
        tmp_path,
        shop="# compose: owner=ann prefix=/shop/\nUser-agent: *\nDisallow: /shop/cart\n",
        blog="# compose: owner=bob prefix=/blog/\nUser-agent: a\nDisallow: /blog/x\n",
    )
    assert main(["compose", shop, blog]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "robots.txt"
    assert main(["compose", shop, blog, "-o", str(out)]) == 0
    assert out.read_text() == printed
    assert "(owner ann, prefix /shop/)" in printed
    assert main(["lint", "--strict", str(out)]) == 0


def test_compose_does_not_write_to_a_fragment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compose *.txt -o robots.txt` read its own result in the second run: no rule ever went."""
    one, two = written(tmp_path, a="User-agent: *\nDisallow: /x\n", b="User-agent: *\n")
    with pytest.raises(SystemExit, match="2"):
        main(["compose", one, two, "-o", str(tmp_path / ".." / tmp_path.name / "b.txt")])
    assert "-o names one of the fragments" in capsys.readouterr().err
    assert Path(two).read_text() == "User-agent: *\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_compose_prints_utf_8_whatever_the_encoding_of_the_terminal(
    tmp_path: Path, encoding: str
) -> None:
    """A file that was redirected from stdout had other characters than the fragments."""
    (one,) = written(tmp_path, a="User-agent: *\nDisallow: /caf\u00e9\n")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [PYTHON, "-m", "gatekeeper", "compose", one]
    printed = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert b"Disallow: /caf\xc3\xa9\n" in printed


def test_a_page_with_octets_that_are_no_text_is_written(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    write_output(str(tmp_path / "page"), "b\udcff")
    write_output(None, "b\udcff")
    assert (tmp_path / "page").read_bytes() == rb"b\udcff"
    assert capfdbinary.readouterr().out == rb"b\udcff"


def test_an_output_file_that_cannot_be_written_is_named_as_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = written(tmp_path, a="User-agent: *\nDisallow: /x\n")
    out = tmp_path / "nowhere" / "robots.txt"
    assert main(["compose", one, "-o", str(out)]) == 2
    assert capsys.readouterr().err == f"gatekeeper compose: {out}: No such file or directory\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_an_output_file_that_is_a_pipe_or_a_device_stays_one(tmp_path: Path) -> None:
    """With the rights of root, `-o /dev/null` put a file in the place of the device."""
    (one,) = written(tmp_path, a="User-agent: *\nDisallow: /x\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["compose", one, "-o", str(pipe)]) == 0
        assert pipe.is_fifo()
        assert b"Disallow: /x\n" in os.read(reader, 65_536)
    finally:
        os.close(reader)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no /dev/zero")
def test_input_beyond_the_size_limit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MAX_BYTES", 1 << 20)
    null = "/dev/null"
    for command in (
        *(["lint"], ["compose"], ["diff", null], ["diff", null, null, "--urls"]),
        *(["test", null, "--sitemap"], ["test", null, "--expect"]),
    ):
        assert main([*command, "/dev/zero"]) == 2
        said = capsys.readouterr().err
        assert ": /dev/zero: longer than 1 MiB, the limit for input\n" in said


def test_compose_with_a_conflict_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = written(
        tmp_path, a="User-agent: *\nDisallow: /x\n", b="User-agent: *\nAllow: /x/y\n"
    )
    out = tmp_path / "robots.txt"
    assert main(["compose", one, other, "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{one}:2 (Disallow: /x) and {other}:2 (Allow: /x/y)" in said
    assert "/x/y differently" in said
    assert not out.exists()
    assert main(["compose", "--json", one, other]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["url"]) == ("conflict", "/x/y")


# --- diff ------------------------------------------------------------------------------------


def test_diff_names_the_deciding_line_of_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = written(
        tmp_path,
        old="User-agent: *\nDisallow: /a\n",
        new="User-agent: *\nDisallow: /a\nAllow: /a/b\n\nUser-agent: bot\nDisallow: /a\n",
    )
    assert main(["diff", old, new]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "everybody else",
        "  /a/b",
        f"    - deny  {old}, line 2: Disallow: /a",
        f"    + allow {new}, line 3: Allow: /a/b",
        f"{old} -> {new}: 1 change of a verdict",
    ]
    assert main(["diff", "--exit-code", old, new]) == 1
    assert main(["diff", "--exit-code", old, new, "--agents", "bot"]) == 0
    assert main(["diff", "--exit-code", old, old]) == 0


def test_diff_names_the_lines_that_were_not_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.sites.witness.MAX_SEARCH", 0)
    old, new = written(
        tmp_path,
        old="User-agent: *\nDisallow: /*a*b\nAllow: /*ab***\nAllow: /*axb***\nAllow: /*b***a\n",
        new="User-agent: *\nAllow: /*a\n",
    )
    assert main(["diff", old, new]) == 0
    said = capsys.readouterr().out.splitlines()
    at = said.index("there may be more: not every pair of lines could be compared")
    wanted = f"  not searched: {old}, line 2: Disallow: /*a*b; {new}, line 2: Allow: /*a"
    assert wanted in said[at + 1 :]
    monkeypatch.setattr("gatekeeper.sites.witness.MAX_STEPS", 1)
    assert main(["diff", old, new]) == 0
    first, *others = capsys.readouterr().out.partition("compared\n")[2].splitlines()
    assert first.endswith(", and all that follows")
    assert not any("all that follows" in other for other in others)


def test_diff_judges_given_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, urls = written(
        tmp_path,
        old="",
        new="User-agent: *\nDisallow: /a\n",
        urls="# mine\nhttps://x.test/a?b\n/c\n",
    )
    assert main(["diff", "--json", old, new, "--urls", urls]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [change["url"] for change in found["changes"]] == ["https://x.test/a?b", "/a"]
    assert found["complete"] is True


async def test_diff_compares_a_file_with_the_file_of_a_site(
    site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (new,) = written(tmp_path, new="User-agent: *\nDisallow: /private\nDisallow: /b\n")
    assert await command("diff", "--exit-code", site, new) == 1
    assert "/b" in capsys.readouterr().out


# --- test ------------------------------------------------------------------------------------


def cases(folder: Path, text: str) -> str:
    path = folder / "cases.toml"
    path.write_text(text)
    return str(path)


def test_test_with_cases_that_hold_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (robots,) = written(tmp_path, r="User-agent: bot\nDisallow: /a\n\nUser-agent: *\nDisallow: /\n")
    expect = cases(
        tmp_path,
        '[[case]]\nagent = "bot"\nurl = "https://x.test/a"\nallowed = false\nline = 2\n'
        '[[case]]\nagent = "bot"\nurl = "/b"\nallowed = true\nline = 0\n'
        '[[case]]\nurl = "/b"\nallowed = false\n',
    )
    assert main(["test", robots, "--expect", expect]) == 0
    assert capsys.readouterr().out == f"{robots}: 3 cases, all as expected\n"


def test_cases_that_fail_are_printed_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (robots,) = written(tmp_path, r="User-agent: *\nDisallow: /a\n")
    expect = cases(
        tmp_path,
        '[[case]]\nurl = "/a"\nallowed = true\n'
        '[[case]]\nurl = "/a"\nallowed = false\nline = 7\n'
        '[[case]]\nurl = "/b"\nallowed = true\n',
    )
    assert main(["test", robots, "--expect", expect]) == 1
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[1][1:] == ["/a", "allow", "deny by line 2: Disallow: /a", f"{expect}, case 1"]
    assert cells[2][1:3] == ["/a", "deny by line 7"]
    assert cells[3] == [f"{robots}: 3 cases, 2 differ"]
    assert main(["test", "--json", robots, "--expect", expect]) == 1
    assert len(json.loads(capsys.readouterr().out)["differing"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "[[case]]\n", "case = 1\n", "[[case]\n", '[[case]]\nurl = "/a"\n'),
        '[[case]]\nurl = "/a"\nallow = true\n',
        '[[case]]\nurl = "nonsense"\nallowed = true\n',
    ],
)
def test_a_bad_file_of_cases_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (robots,) = written(tmp_path, r="User-agent: *\nDisallow: /a\n")
    assert main(["test", robots, "--expect", cases(tmp_path, text)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "cases.toml" in said


@pytest.mark.parametrize("option", ["--expect", "--sitemap"])
def test_standard_input_can_not_be_both_the_file_and_the_cases(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second read got nothing, so the cases were compared with an empty file."""
    with pytest.raises(SystemExit, match="2"):
        main(["test", "-", option, "-"])
    assert "standard input can be read only once" in capsys.readouterr().err


def test_test_without_expectations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["test", *written(tmp_path, r="")])


async def test_a_case_of_another_host_is_refused(
    site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expect = cases(tmp_path, '[[case]]\nurl = "https://other.test/a"\nallowed = true\n')
    assert await command("test", site, "--expect", expect) == 2
    assert "another robots.txt decides it" in capsys.readouterr().err


def sitemap(*urls: str) -> str:
    items = "".join(f"<url><loc> {url} </loc><lastmod>2026</lastmod></url>" for url in urls)
    return f'<?xml version="1.0"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{items}</urlset>'


def test_test_fails_when_a_url_of_the_sitemap_is_denied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    robots, pages = written(
        tmp_path,
        r="User-agent: *\nDisallow: /a?\n",
        s=sitemap("https://x.test/a?x&amp;y", "https://x.test/b"),
    )
    assert main(["test", robots, "--sitemap", pages]) == 1
    assert "https://x.test/a?x&y" in capsys.readouterr().out
    assert main(["test", robots, "--sitemap", pages, "--agents", "a", "b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cases"] == 4


async def test_a_sitemap_at_a_url_is_fetched_politely(
    internet: FakeInternet, site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = internet.site("127.0.0.1").robots(ROBOTS)
    here.on(
        "/index.xml",
        Page(f"<sitemapindex><sitemap><loc>{site}/one.xml.gz</loc></sitemap></sitemapindex>"),
    )
    here.on("/one.xml.gz", Page(gzip.compress(sitemap(f"{site}/private/x").encode())))
    assert await command("test", site, "--sitemap", f"{site}/index.xml") == 1
    assert f"{site}/private/x" in capsys.readouterr().out
    assert await command("test", site, "--sitemap", f"{site}/private/s.xml") == 2
    assert "/private/s.xml" in capsys.readouterr().err
    assert await command("test", site, "--sitemap", f"{site}/none.xml") == 2
    assert "status 404" in capsys.readouterr().err


def test_a_sitemap_may_be_a_list_or_gzipped(tmp_path: Path) -> None:
    (robots,) = written(tmp_path, r="User-agent: *\nDisallow: /a\n")
    for body in (b"\xef\xbb\xbfhttps://x.test/a\n\n", gzip.compress(b"https://x.test/a")):
        (tmp_path / "s").write_bytes(body)
        assert main(["test", robots, "--sitemap", str(tmp_path / "s")]) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<urlset><url>",
        b"\x1f\x8bnonsense",
        b"<urlset><url><loc>/relative</loc></url></urlset>",
        b"<html></html>",
        b"",
    ],
    ids=["cut", "gzip", "relative", "page", "empty"],
)
def test_a_file_that_is_no_sitemap_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    (robots,) = written(tmp_path, r="User-agent: *\nDisallow: /a\n")
    (tmp_path / "s.xml").write_bytes(body)
    assert main(["test", robots, "--sitemap", str(tmp_path / "s.xml")]) == 2
    assert "s.xml" in capsys.readouterr().err


def test_the_fields_of_the_output_for_machines_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sites.md").read_text("utf-8")
    rows = {
        "lint": (LintReport, Finding),
        "test": (CaseReport, CaseResult, Case),
        "diff": (Difference, Change, Ruling),
        "compose": (Composed, ComposeProblem, FragmentLine),
    }
    for name, kinds in rows.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        for kind in kinds:
            for field in kind.__struct_fields__:
                assert f"`{field}`" in row


SPIKED = "User-agent: *\nDisallow: /a\u009b31m\u202eb\n"


def test_control_characters_of_a_site_are_escaped_by_every_site_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"old": SPIKED, "new": "User-agent: *\nAllow: /a\n", "cases": ""}
    old, new, cases = written(tmp_path, **files)
    url = "/a%C2%9B31m%E2%80%AEb"
    Path(cases).write_text(f'[[case]]\nurl = "{url}"\nallowed = true\n', "utf-8")
    for call in (["diff", old, new], ["test", old, "--expect", cases], ["compose", old, new]):
        main(call)
        said = "".join(capsys.readouterr())
        assert r"Disallow: /a\x9b31m\u202eb" in said
        assert said.replace("\n", "").isprintable()


async def test_check_escapes_control_characters_of_a_site(
    internet: FakeInternet, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("127.0.0.1").robots(SPIKED)
    assert await command("check", f"{site}/a%C2%9B31m%E2%80%AEb") == 1
    said = capsys.readouterr().out
    assert r"line 2: Disallow: /a\x9b31m\u202eb" in said
