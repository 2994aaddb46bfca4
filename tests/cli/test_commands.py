"""The commands as a user meets them: output, exit codes, one-line errors."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.cli import COMMANDS, main
from tests.internet import FakeInternet, Page

ROBOTS = "User-agent: *\nDisallow: /private\nCrawl-delay: 7\n"


@pytest.fixture
async def site(internet: FakeInternet) -> str:
    """A literal address, since a command has the machine's own resolver."""
    internet.site("127.0.0.1").robots(ROBOTS)
    return f"http://127.0.0.1:{internet.listener().port()}"


async def command(*arguments: str) -> int:
    """A command's exit code, run in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(main, [*arguments, "--allow-address", "127.0.0.0/8"])


async def test_check_says_verdict_line_and_timing(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await command("check", f"{site}/private/x")

    out = capsys.readouterr().out
    assert code == 1
    assert out.startswith(f"deny   {site}/private/x\n")
    assert "line 2: Disallow: /private" in out
    assert "Crawl-delay: 7 s" in out


async def test_check_exits_0_when_all_are_welcome(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("check", f"{site}/a", f"{site}/b") == 0
    assert capsys.readouterr().out.count("allow") == 2


async def test_check_gives_json_a_line_a_url(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    await command("check", "--json", f"{site}/private", f"{site}/b")

    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["decision"]["verdict"] for one in answers] == ["deny", "allow"]
    assert answers[0]["decision"]["rule"]["line"] == 2
    assert answers[0]["timing"]["crawl_delay"] == 7.0


async def test_check_of_no_url_is_a_usage_error_of_one_line(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("check", "nope", f"{site}/private") == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("gatekeeper check: 'nope'")
    assert len(captured.err.splitlines()) == 1
    assert "deny" in captured.out  # the others are answered all the same


async def test_check_of_an_unreachable_site_defers(
    internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("127.0.0.1").on("/robots.txt", Page(status=503))
    assert await command("check", f"http://127.0.0.1:{internet.listener().port()}/") == 1
    assert "ask again at" in capsys.readouterr().out


def test_check_refuses_private_addresses_unless_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "http://127.0.0.1:9/"]) == 1
    assert "blocked" in capsys.readouterr().out


def linted(tmp_path: Path, text: str, *options: str) -> int:
    path = tmp_path / "robots.txt"
    path.write_text(text, encoding="utf-8")
    return main(["lint", str(path), *options])


def test_lint_of_a_clean_file_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linted(tmp_path, "User-agent: *\nDisallow: /x\n") == 0
    assert "nothing to say" in capsys.readouterr().out


def test_lint_names_the_line_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert linted(tmp_path, "User-agent: *\nDisalow: /x\n") == 1
    assert "robots.txt:2: error:" in capsys.readouterr().out


def test_lint_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linted(tmp_path, "User-agent: *\nDisalow: /x\n", "--json")

    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == 1
    errors = [one for one in report["findings"] if one["severity"] == "error"]
    assert [one["line"] for one in errors] == [2]


def test_lint_reads_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdin:
        buffer = io.BytesIO(b"Disallow: /x\n")

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["lint", "-"]) in (0, 1)
    assert "stdin:1:" in capsys.readouterr().out


async def test_lint_fetches_a_url(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("lint", f"{site}/robots.txt") == 0
    assert site in capsys.readouterr().out


def test_lint_of_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "/nowhere/robots.txt"]) == 2
    assert capsys.readouterr().err == (
        "gatekeeper lint: /nowhere/robots.txt: No such file or directory\n"
    )


def test_config_show_names_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--user-agent", "somebot"]) == 0

    values = json.loads(capsys.readouterr().out)
    assert values["user_agent"] == {"value": "somebot", "source": "flag --user-agent"}
    assert values["server.port"] == {"value": 8750, "source": "default"}


def test_config_show_reads_as_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "show", "--user-agent", "somebot"])
    out = capsys.readouterr().out

    assert 'user_agent = "somebot"    # flag --user-agent' in out
    assert "[pacing]\ndefault_interval = 1.0\n" in out


def test_config_check_of_a_wrong_file_names_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[pacing]\ndelay = 1\n", encoding="utf-8")

    assert main(["config", "check", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "bad.toml" in error
    assert "delay" in error


def test_t5_config_check_refuses_an_open_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "open.toml"
    path.write_text('[server]\nhost = "0.0.0.0"\n', encoding="utf-8")

    assert main(["config", "check", "--config", str(path)]) == 2
    assert "token_file" in capsys.readouterr().err


def test_the_example_configuration_passes_its_own_check() -> None:
    example = Path(__file__).parents[2] / "config.example.toml"

    assert main(["config", "check", "--config", str(example)]) == 0


def test_healthcheck_of_nobody_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["healthcheck", "--socket", "/nowhere.sock"]) == 1
    assert "no answer" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    out = " ".join(capsys.readouterr().out.split())

    assert stopped.value.code == 0
    assert f"example: gatekeeper {name}" in out
    for option in ("--config", "--user-agent", "--allow-address", "--json"):
        assert option in out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["check"], ["serve", "--port", "x"]])
def test_a_wrong_call_exits_2(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--concurrency", "abc", "give a whole number, 1 or more"),
        ("--tries", "0", "give a whole number, 1 or more"),
        ("--concurrency", "1000000", "give at most 10000"),
        ("--timeout", "soon", "give seconds, more than 0"),
        ("--max-wait", "inf", "give seconds, more than 0"),
    ],
)
def test_a_wrong_number_is_named_with_its_option_and_the_remedy(
    capsys: pytest.CaptureFixture[str], option: str, value: str, remedy: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fetch", option, value, "https://a.test/"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument {option}: {value!r}; {remedy}\n")


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gatekeeper.cli.importlib.import_module", interrupted)
    assert main(["fetch", "https://a.test/"]) == 130
