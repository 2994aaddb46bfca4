"""The commands as a user calls them: output, exit codes, one-line errors."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.cli import COMMANDS, main
from gatekeeper.terminal import json_text, log_to_stderr
from tests.internet import FakeInternet, Page, free_port

ROBOTS = "User-agent: *\nDisallow: /private\nCrawl-delay: 7\n"


@pytest.fixture
async def site(internet: FakeInternet) -> str:
    """A site at a literal address, since commands use the machine's own resolver."""
    internet.site("127.0.0.1").robots(ROBOTS)
    return f"http://127.0.0.1:{internet.listener().port()}"


async def command(*arguments: str) -> int:
    """Run a command in a thread, since it has its own event loop, and return the exit code."""
    who = ("--user-agent", "examplebot/1.0")
    return await asyncio.to_thread(main, [*arguments, *who, "--allow-address", "127.0.0.0/8"])


async def test_check_says_verdict_line_and_timing(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await command("check", f"{site}/private/x")

    out = capsys.readouterr().out
    assert code == 1
    assert out.startswith(f"deny   {site}/private/x\n")
    assert "line 2: Disallow: /private" in out
    assert "Crawl-delay: 7 s" in out


async def test_check_exits_0_when_all_urls_are_allowed(
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


async def test_check_reads_urls_from_standard_input(
    site: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"\ufeff# mine\n{site}/a\n\n  {site}/private\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), "ascii"))

    assert await command("check", "-", f"{site}/b") == 1
    verdicts = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert verdicts == [f"allow  {site}/a", f"deny   {site}/private", f"allow  {site}/b"]


async def test_check_of_a_line_that_is_not_utf_8_answers_the_others(
    site: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"{site}/caf".encode() + b"\xe9\n" + f"{site}/a\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))

    assert await command("check", "-") == 2
    captured = capsys.readouterr()
    assert captured.out.startswith(f"allow  {site}/a\n")
    assert "caf" in captured.err


@pytest.mark.parametrize("name", ["check", "lint", "fetch"])
def test_a_closed_standard_input_is_an_error_of_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main([name, "-", "--user-agent", "examplebot/1.0"]) == 2
    assert f"gatekeeper {name}: standard input is closed; " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["check", "lint"])
def test_a_command_without_a_user_agent_warns_once_how_to_set_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "http://127.0.0.1/"])

    told = [line for line in capsys.readouterr().err.splitlines() if "no identity is set" in line]
    assert len(told) == 1


def test_a_user_agent_whose_token_is_cut_short_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["check", "http://127.0.0.1/", "--user-agent", "my bot"])

    assert "user agent 'my bot': rules are selected for 'my'\n" in capsys.readouterr().err


@pytest.mark.parametrize("call", [["check"], ["lint"], ["history"]])
def test_a_host_without_a_scheme_is_refused_with_a_suggested_url(
    call: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*call, "example.org/x", "--user-agent", "examplebot"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("; did you mean https://example.org/x?\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("call", [["lint", "/nowhere"], ["config", "check"], ["history", "x"]])
def test_an_error_is_json_on_stdout_when_asked_for(
    call: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if call[0] == "config":
        monkeypatch.setenv("GATEKEEPER_SERVER_PORT", "x")

    assert main([*call, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"gatekeeper {call[0]}: {json.loads(captured.out)['error']}\n"


def test_an_unknown_option_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", "--confg", "x", "https://example.org/"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: gatekeeper check ")
    assert "--confg" in error.splitlines()[-1]


def test_check_refuses_private_addresses_unless_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "http://127.0.0.1:9/"]) == 1
    assert "blocked" in capsys.readouterr().out


def linted(tmp_path: Path, text: str, *options: str) -> int:
    path = tmp_path / "robots.txt"
    path.write_text(text, encoding="utf-8")
    return main(["lint", str(path), *options])


def test_lint_of_a_clean_file_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert linted(tmp_path, "User-agent: *\nDisallow: /x\n") == 0
    assert "no findings" in capsys.readouterr().out


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Disallow: /x\n")))
    assert main(["lint", "-"]) in (0, 1)
    assert "stdin:1:" in capsys.readouterr().out


def test_lint_names_no_line_for_a_finding_about_the_whole_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert linted(tmp_path, "") == 0
    assert "robots.txt: info: " in capsys.readouterr().out


def test_lint_counts_a_single_finding_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linted(tmp_path, "User-agent: *\nDisalow: /x\nDisallow: /y\n")
    assert capsys.readouterr().out.endswith("robots.txt: 1 finding, 1 error\n")


async def test_lint_fetches_a_url(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("lint", f"{site}/robots.txt") == 0
    assert site in capsys.readouterr().out


async def test_lint_of_a_page_names_the_file_that_was_read(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("lint", f"{site}/some/page?x=1") == 0
    assert capsys.readouterr().out.startswith(f"{site}/robots.txt: ")

    await command("lint", "--json", f"{site}/some/page?x=1")
    assert json.loads(capsys.readouterr().out)["source"] == f"{site}/robots.txt"


async def test_lint_of_a_host_that_is_down_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("lint", f"http://127.0.0.1:{free_port()}/robots.txt") == 2
    assert "can't be fetched (connect_failed)" in capsys.readouterr().err


async def test_lint_reads_the_file_of_a_host_that_the_configuration_denies(
    site: str, tmp_path: Path, internet: FakeInternet, capsys: pytest.CaptureFixture[str]
) -> None:
    internet.site("127.0.0.1").on("/robots.txt", Page(status=404))
    path = tmp_path / "own.toml"
    path.write_text('[[host]]\nmatch = "127.0.0.1"\nrobots = "deny"\n', encoding="utf-8")

    assert await command("lint", f"{site}/robots.txt", "--config", str(path)) == 0
    assert "there is no file" in capsys.readouterr().out


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


def test_config_show_prints_toml_with_sources_as_comments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["config", "show", "--user-agent", "somebot"])
    out = capsys.readouterr().out

    assert 'user_agent = "somebot"    # flag --user-agent' in out
    assert "[pacing]\ndefault_interval = 1.0\n" in out


def test_config_show_says_what_unset_settings_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    main(["config", "show"])
    out = capsys.readouterr().out

    assert "rules are selected for gatekeeper\n" in out
    path = f"{tmp_path}/gatekeeper/state.sqlite"
    assert f"path = (not set)    # nothing is stored, except by `gatekeeper serve`: {path}\n" in out


def test_config_show_says_which_product_token_selects_rules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["config", "show", "--user-agent", "Mozilla/5.0 (compatible; examplebot/1.0)"])
    assert "flag --user-agent; rules are selected for examplebot\n" in capsys.readouterr().out


def test_config_check_of_a_wrong_file_names_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[pacing]\ndelay = 1\n", encoding="utf-8")

    assert main(["config", "check", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "bad.toml" in error
    assert "delay" in error


def test_config_check_names_a_rule_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gatekeeper.toml"
    rule = '[[host]]\nmatch = "{}.example"\nrobots = "deny"\nuntil = {}-01-01T00:00:00Z\n'
    path.write_text(rule.format("a", 2001) + rule.format("b", 2901), encoding="utf-8")
    assert main(["config", "check", "--config", str(path)]) == 0
    assert capsys.readouterr().err == (
        "gatekeeper: [[host]] match='a.example' has ended, and is not in force: "
        "robots deny: until 2001-01-01T00:00:00Z\n"
    )


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


def test_healthcheck_without_a_listening_service_exits_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["healthcheck", "--socket", "/nowhere.sock"]) == 1
    assert "no answer from unix:/nowhere.sock" in capsys.readouterr().out


def test_healthcheck_names_the_address_that_it_asked(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["healthcheck", "--host", "0.0.0.0", "--port", str(port)]) == 1
    assert f"no answer from http://127.0.0.1:{port} (" in capsys.readouterr().out


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


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    out = capsys.readouterr().out
    assert out.startswith("usage: gatekeeper ")
    assert [name for name in COMMANDS if f"\n    {name}" not in out] == []


@pytest.mark.parametrize("arguments", [["help"], ["help", "check"]])
def test_help_is_a_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: gatekeeper", *arguments[1:]]))


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["check"], ["serve", "--port", "x"]])
def test_wrong_arguments_exit_2(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--concurrency", "abc", "give a whole number, 1 or more"),
        ("--tries", "0", "give a whole number, 1 or more"),
        ("--concurrency", "1000000", "give at most 10000"),
        ("--timeout", "soon", "give a number of seconds above 0"),
        ("--max-wait", "inf", "give a number of seconds above 0"),
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


ODD = "User-agent: *\nDisalow: /caf\u00e9\nDisallow: /\u4e2d\U0001f600\n"


class Ascii(io.TextIOWrapper):
    """Standard output of a terminal that supports ASCII only."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "ascii", errors="strict")

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined, no-any-return]


def on_ascii(monkeypatch: pytest.MonkeyPatch) -> Ascii:
    """Replace standard output from here on. In a fixture, pytest would set its own again."""
    stream = Ascii()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", Ascii())
    return stream


def test_lint_escapes_non_ascii_text_on_an_ascii_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ascii_out = on_ascii(monkeypatch)
    path = tmp_path / "robots-\u00e9.txt"
    path.write_text(ODD, encoding="utf-8")
    assert main(["lint", str(path)]) == 1
    assert "robots-\\xe9.txt:2: error:" in ascii_out.text
    assert "\\u4e2d" in ascii_out.text


async def test_every_command_works_on_an_ascii_terminal(
    internet: FakeInternet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascii_out = on_ascii(monkeypatch)
    internet.site("127.0.0.1").robots("User-agent: *\nDisallow: /\u00fc\u4e2d\n").page("/x")
    site = f"http://127.0.0.1:{internet.listener().port()}"
    path = tmp_path / "robots-\u00e9.txt"
    path.write_text(ODD, encoding="utf-8")
    config = tmp_path / "\u00e9.toml"
    config.write_text('[[host]]\nmatch = "a.test"\nreason = "\u00fc"\n', encoding="utf-8")
    calls = [
        ["lint", str(path)],
        ["lint", str(tmp_path / "\u4e2d")],
        ["check", f"{site}/\u00fc\u4e2d", "\u4e2d"],
        ["fetch", f"{site}/\u00fc\u4e2d", "\u4e2d", "--retry-denied"],
        ["config", "show", "--config", str(config)],
        ["config", "check", "--config", str(config)],
        ["healthcheck", "--socket", str(tmp_path / "\u00e9")],
        ["history", site, "--config", str(config)],
    ]
    for call in calls:
        for more in ([], ["--json"]):
            before = len(ascii_out.text)
            assert await command(*call, *more) in (0, 1, 2)
            said = ascii_out.text[before:]
            for line in said.splitlines() if more and call[0] != "config" else ():
                json.loads(line)
            if more and call[:2] == ["config", "show"]:
                json.loads(said)


def test_json_output_is_ascii_and_loses_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_out = on_ascii(monkeypatch)
    print(json_text({"text": '\u4e2d\U0001f600"\u00e9'}))
    assert ascii_out.text.isascii()
    assert json.loads(ascii_out.text) == {"text": '\u4e2d\U0001f600"\u00e9'}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_are_written_to_terminals_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    terminal: bool,
    coloured: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    linted(tmp_path, "User-agent: *\nDisalow: /x\n")
    assert ("robots.txt:2: \x1b[31merror\x1b[0m: " in stream.getvalue()) is coloured
    assert ("\x1b" in stream.getvalue()) is coloured


async def test_check_colours_its_verdicts(
    site: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    await command("check", f"{site}/private", f"{site}/")
    out = capsys.readouterr().out
    assert f"\x1b[31mdeny  \x1b[0m {site}/private" in out
    assert f"\x1b[32mallow \x1b[0m {site}/" in out


def test_warnings_on_a_terminal_begin_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), Terminal()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "stderr", stream)
    log_to_stderr()
    logging.getLogger("gatekeeper.guard").warning("refused")
    assert re.fullmatch(r"\d\d:\d\d:\d\d gatekeeper\.guard: refused\n", stream.getvalue())


# --- where the output goes ---------------------------------------------------------------


def shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, with buffered output as users have it.

    `gatekeeper` is replaced by the command under test.
    """
    (tmp_path / "robots.txt").write_text("Disallow /x\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = line.replace("gatekeeper", f"{sys.executable} -m gatekeeper")
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


needs_a_shell = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has none")


@needs_a_shell
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gatekeeper lint robots.txt >/dev/full", "gatekeeper lint: No space left on device\n"),
        ("gatekeeper --help >/dev/full", "gatekeeper: No space left on device\n"),
        ("gatekeeper config show --json >/dev/full", "gatekeeper config: No space left on dev"),
    ],
)
def test_output_to_a_full_disk_is_an_error_of_one_line(
    line: str, said: str, tmp_path: Path
) -> None:
    done = shell(line, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(said)


@needs_a_shell
@pytest.mark.parametrize("what", ["lint robots.txt", "--help"])
def test_a_closed_output_pipe_ends_the_command_without_a_message(what: str, tmp_path: Path) -> None:
    gone = f"{{ gatekeeper {what}; echo $? >&3; }} 3>code | true; cat code"
    done = shell(gone, tmp_path)
    assert (done.stdout, done.stderr) == ("141\n", "")


@needs_a_shell
@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("gatekeeper lint robots.txt >&-", 1, ""),
        ("gatekeeper lint robots.txt 2>&-", 1, "robots.txt: info"),
        ("gatekeeper fetch https://127.0.0.1/ <&- >&- 2>&-", 1, ""),
    ],
)
def test_closed_standard_streams_cause_no_error_message(
    line: str, code: int, told: str, tmp_path: Path
) -> None:
    done = shell(line, tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(told)
