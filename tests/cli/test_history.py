"""`gatekeeper history`, as a user calls it."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gatekeeper.cli import main
from gatekeeper.storage import SqliteStorage
from tests.processes import PYTHON
from tests.storage.conftest import record_of

OLD = b"User-agent: *\nDisallow: /old\n"
NEW = b"User-agent: *\nDisallow: /new\x1b[2J\n"


def at(day: int) -> float:
    return datetime(2026, 11, day, 12, tzinfo=UTC).timestamp()


async def fill(path: Path) -> None:
    """Store OLD on the 1st and 2nd, NEW on the 4th and 6th, and no file on the 8th."""
    async with SqliteStorage(path) as storage:
        for day, text in ((1, OLD), (2, OLD), (4, NEW), (6, NEW), (8, None)):
            outcome, state = ("rule", "parsed") if text else ("no_file", "unavailable")
            made = record_of(text=text, at=at(day), outcome=outcome, state=state)
            storage.put_origin(made)


@pytest.fixture
async def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state.db"
    await fill(path)
    monkeypatch.setenv("GATEKEEPER_STORAGE_PATH", str(path))
    return path


def call(*arguments: str) -> int:
    return main(["history", *arguments])


def test_the_versions_are_listed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("https://A.example/some/page") == 0
    lines = capsys.readouterr().out.splitlines()
    digest = hashlib.sha256(OLD).hexdigest()
    assert lines[0] == "https://a.example: 3 versions, oldest first"
    assert lines[1] == (
        "  2026-11-01T12:00:00Z to 2026-11-02T12:00:00Z  rule 200  "
        f"{len(OLD)} bytes, sha256 {digest}"
    )
    assert lines[3].endswith("no_file 404  no file")


def test_the_text_at_a_time_is_printed_octet_for_octet(
    state: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert call("https://a.example", "--at", "2026-11-05") == 0
    captured = capsysbinary.readouterr()
    assert captured.out == NEW
    assert captured.err.startswith(b"2026-11-04T12:00:00Z to 2026-11-06T12:00:00Z")
    assert b"not asked again" not in captured.err


def test_a_version_not_confirmed_after_the_asked_time_is_marked_so(
    state: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert call("https://a.example", "--at", "2026-11-03T00:00:00+01:00") == 0
    captured = capsysbinary.readouterr()
    assert captured.out == OLD
    assert b"(not fetched again before that time)" in captured.err


def test_a_time_at_which_there_was_no_file_exits_0_and_says_so(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--at", "2026-11-20T00:00:00Z") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no file" in captured.err


def test_a_time_before_the_first_sighting_exits_1(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--at", "2026-10-01") == 1
    assert "first seen 2026-11-01T12:00:00Z" in capsys.readouterr().err


def test_an_unknown_origin_exits_1(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("https://b.example") == 1
    assert capsys.readouterr().err == "https://b.example: nothing is known\n"


def test_diff_shows_every_change_with_control_characters_escaped(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--diff") == 0
    assert capsys.readouterr().out == (
        "--- last seen 2026-11-02T12:00:00Z\n"
        "+++ first seen 2026-11-04T12:00:00Z\n"
        "@@ -1,2 +1,2 @@\n"
        " User-agent: *\n"
        "-Disallow: /old\n"
        "+Disallow: /new\\x1b[2J\n"
        "--- last seen 2026-11-06T12:00:00Z\n"
        "+++ first seen 2026-11-08T12:00:00Z\n"
        "@@ -1,2 +0,0 @@\n"
        "-User-agent: *\n"
        "-Disallow: /new\\x1b[2J\n"
    )


def test_diff_at_a_time_shows_the_last_change_before_that_time(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--diff", "--at", "2026-11-07") == 0
    out = capsys.readouterr().out
    assert out.count("@@ ") == 1
    assert "+Disallow: /new" in out


def test_the_first_version_has_nothing_to_be_compared_with(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--diff", "--at", "2026-11-02") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no earlier version" in captured.err


def test_texts_too_long_to_compare_are_shown_whole(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.cli.history.MAX_COMPARED", 3)
    assert call("https://a.example", "--diff", "--at", "2026-11-07") == 0
    assert "@@ -1,2 +1,2 @@\n-User-agent: *\n-Disallow" in capsys.readouterr().out


def test_json_lists_every_version_with_its_times_outcome_and_size(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["origin"] == "https://a.example"
    assert report["versions"][0] == {
        "first_seen": "2026-11-01T12:00:00Z",
        "last_seen": "2026-11-02T12:00:00Z",
        "outcome": "rule",
        "status": 200,
        "size": len(OLD),
        "sha256": hashlib.sha256(OLD).hexdigest(),
    }
    assert report["versions"][2]["sha256"] is None


def test_json_at_a_time_has_the_text_and_the_diff(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://a.example", "--json", "--diff", "--at", "2026-11-07") == 0
    (version,) = json.loads(capsys.readouterr().out)["versions"]
    assert version["confirmed"] is False
    assert version["text"] == NEW.decode()
    assert "+Disallow: /new" in version["diff"]


def test_json_of_an_unknown_origin_is_an_empty_list(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("https://b.example", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"origin": "https://b.example", "versions": []}


async def test_history_is_read_while_a_gate_has_the_file_open(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with SqliteStorage(state) as storage:
        assert call("https://a.example") == 0
        assert await storage.load_origin("https://a.example") is not None
        assert state.with_name("state.db-wal").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.example",), "http or https"),
        (("https://a.example", "--storage", "missing.db"), "missing.db: no such file"),
        (("https://a.example", "--storage", __file__), "not a database"),
        (("https://a.example", "--storage", "memory"), "nothing was stored"),
    ],
)
def test_a_wrong_call_is_an_error_of_one_line(
    state: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_text_that_is_no_time_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call("https://a.example", "--at", "yesterday")
    assert caught.value.code == 2
    assert "'yesterday' is not a time" in capsys.readouterr().err


def test_history_runs_as_a_command(state: Path) -> None:
    run = subprocess.run(
        [
            PYTHON,
            "-m",
            "gatekeeper",
            "history",
            "https://a.example",
            "--at",
            "2026-11-01T13",
        ],
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, OLD)


def test_history_without_a_stored_file_says_what_stores_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert call("https://a.example") == 2
    error = capsys.readouterr().err
    assert "nothing is stored yet" in error
    for remedy in ("gatekeeper serve", "--storage PATH", "DIR/gatekeeper.db"):
        assert remedy in error
