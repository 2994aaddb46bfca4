"""`show` tells in words what the record has about a URL, a host, a lease or a decision."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gatekeeper.audit.chain import MAX_TEXT, time_text
from gatekeeper.audit.show import ShownLine, lines_about
from gatekeeper.cli import main
from gatekeeper.errors import InvalidURL
from tests.audit.maker import BEGIN, Maker

A = "https://a.test"


def shown(folder: Path, what: str) -> list[ShownLine]:
    return list(lines_about([folder], what))


def words(folder: Path, what: str) -> str:
    return "\n".join(word for one in shown(folder, what) for word in one.words)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    made = Maker(tmp_path / "audit")
    made.robots(A)
    made.robots("https://b.test", None)
    made.page("https://b.test/1", 1.0)
    made.page(f"{A}/private/door?x=1")
    made.wait(10.0).refused(f"{A}/private/x", decision="D77", retry_at=time_text(BEGIN + 60))
    return made


def test_a_url_is_shown_with_its_file_its_line_and_its_outcome(maker: Maker) -> None:
    robots, grant, outcome = shown(maker.folder, "HTTPS://A.test:443/private/door?x=1")

    assert robots.words[0] == f"robots.txt of {A} was read: rules, status 200"
    assert "decided: Allow: /private/door" in grant.words[1]
    assert grant.words[1].startswith("line 3 of robots.txt ")
    assert grant.words[2].startswith("a.test: at least 10 s between two requests")
    assert "ended with status 200, 1,000 bytes" in outcome.words[0]
    assert (grant.n, grant.line["kind"], grant.file) == (6, "grant", str(maker.path))


def test_a_host_is_shown_with_everything_that_is_about_it(maker: Maker) -> None:
    maker.override("a.test", "deny", until=time_text(BEGIN + 99))
    maker.override("a.test", "deny", ended=True)
    maker.block("a.test", 30.0, by="response")
    maker.block("a.test", 0.0, by="operator")
    pause = {"scope": "a.test", "by": "operator", "reason": None, "since": None, "until": None}
    maker.line("pause", **pause, ended=False)
    maker.outcome(maker.grant(f"{A}/y"), start=None, retry_after=9.0, signals={"licence": "x"})

    text = words(maker.folder, "A.test")
    for part in (
        "was refused to examplebot: rule; again at 2026-01-31T12:01:00Z",
        "the override for a.test is in force until 2026-01-31T12:01:39Z (call)",
        "it sets: robots deny\n",
        "the override for a.test ended",
        "a.test was blocked until 2026-01-31T12:00:40Z: 429",
        "the block of a.test was lifted by operator",
        "a.test was paused by operator",
        "was given back: no request was sent",
    ):
        assert part in text
    assert "b.test" not in text


@pytest.mark.parametrize(("what", "kinds"), [("D77", ["refused"]), ("L2", ["grant", "outcome"])])
def test_the_lines_of_a_decision_or_a_lease_are_shown_by_its_id(
    maker: Maker, what: str, kinds: list[str]
) -> None:
    assert [one.line["kind"] for one in shown(maker.folder, what)] == kinds


def test_a_url_is_found_without_its_query_and_by_its_digest(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "path", urls="path")
    maker.robots(A, None)
    maker.page(f"{A}/x", 1.0)
    assert len(shown(maker.folder, f"{A}/x?a=b")) == 3

    maker = Maker(tmp_path / "digest", urls="digest", salt="5a17")
    digest = hashlib.sha256(f"5a17{A}/x?a=b".encode()).hexdigest()
    maker.line("refused", **(refusal | {"url": digest}))
    assert len(shown(maker.folder, f"{A}/x?a=b")) == 1
    assert shown(maker.folder, f"{A}/x") == []


def test_a_url_is_found_though_it_was_cut_and_without_its_fragment(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    long = f"{A}/".ljust(MAX_TEXT + 5, "x")
    maker.line("refused", **(refusal | {"url": long[:MAX_TEXT]}))
    maker.line("refused", **(refusal | {"url": f"{A}/x"}))
    assert len(shown(maker.folder, long)) == 1
    assert len(shown(maker.folder, f"{A}/x#part")) == 1


refusal = {
    "url": "",
    "agent": "bot",
    "verdict": "deny",
    "decision": "D",
    "reason": "rule",
    "line": 1,
    "text": None,
    "retry_at": None,
}


def test_a_text_that_is_gone_is_said_to_be_gone(maker: Maker) -> None:
    for path in (maker.folder / "texts").rglob("*.gz"):
        path.unlink()
    assert "is not there" in words(maker.folder, f"{A}/private/x")


def test_texts_of_sites_do_not_control_the_terminal(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    maker.robots(A, "User-agent: *\nDisallow: /\x1b[31m\u202e\n")
    maker.refused(f"{A}/x", verdict="deny", reason="rule", line=2)
    assert main(["audit", "show", str(maker.folder), "a.test"]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_the_command_gives_json_and_exits_1_without_a_find(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "show", str(maker.folder), "D77", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["line"]["url"] == f"{A}/private/x"
    assert main(["audit", "show", str(maker.folder), "nobody"]) == 1
    assert "nothing about 'nobody'" in capsys.readouterr().err
    assert main(["audit", "show", str(maker.folder), "ftp://x/"]) == 2
    with pytest.raises(InvalidURL):
        shown(maker.folder, "ftp://x/")
    with pytest.raises(SystemExit):
        main(["audit", "show", str(maker.folder)])
