"""Mistakes in calls of each command: a one-line error that names the input and the remedy."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from gatekeeper.cli import COMMANDS, main
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.held_leases import LeaseJournal
from gatekeeper.sidecar.listening import open_sockets

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *arguments: str) -> str:
    """Run a command that exits with 2, and return its last line."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    assert code == 2, said
    assert "Traceback" not in said.err
    return said.err.splitlines()[-1]


NUMBERS = {
    "serve --port": "a whole number",
    "serve --workers": "a whole number",
    "healthcheck --port": "a whole number",
    "top --port": "a whole number",
    "mcp --http": "a whole number",
    "mcp --wait": "a number of seconds above 0",
    "top --every": "a number of seconds above 0",
    "fetch --tries": "a whole number, 1 or more",
    "fetch --timeout": "a number of seconds above 0",
}


@pytest.mark.parametrize("text", ["abc", "5s", "", "nan", "1e999", "1.5.0"])
@pytest.mark.parametrize("option", NUMBERS)
def test_an_option_that_is_no_number_is_refused_with_the_allowed_range(
    capsys: Capture, option: str, text: str
) -> None:
    command, name = option.split()
    said = refused(capsys, command, f"{name}={text}")
    assert said == f"gatekeeper {command}: error: argument {name}: {text!r}; give {NUMBERS[option]}"


@pytest.mark.parametrize("option", ["top --every", "fetch --timeout", "mcp --wait"])
@pytest.mark.parametrize("text", ["0", "-1"])
def test_an_option_in_seconds_has_to_be_above_0(capsys: Capture, option: str, text: str) -> None:
    command, name = option.split()
    assert refused(capsys, command, f"{name}={text}").endswith("; give a number of seconds above 0")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_misspelt_option_is_refused_with_a_suggestion(capsys: Capture, command: str) -> None:
    needs = {"check": ["http://a.test/"], "lint": ["x"], "test": ["x"], "diff": ["x", "y"]}
    needs |= {"compose": ["x"], "history": ["http://a.test/"]}
    needs |= {"identity": ["show"], "config": ["show"], "fleet": ["init", "redis://a.test"]}
    needs |= {"audit": ["verify", "x"]}
    said = refused(capsys, command, *needs.get(command, []), "--confg=x", "--zzz")
    assert "unrecognized arguments: --confg=x --zzz; did you mean --config?" in said


def test_the_option_of_the_removed_proxy_is_refused_with_its_remedy(capsys: Capture) -> None:
    assert refused(capsys, "serve", "--proxy", "3128").endswith("; use `gatekeeper proxy`")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("fecth", "fetch"), ("chek", "check"), ("helthcheck", "healthcheck"), ("xyzzy", None)],
)
def test_a_misspelt_command_is_refused_with_a_suggestion(
    capsys: Capture, word: str, meant: str | None
) -> None:
    hint = f"; did you mean {meant}?" if meant else ""
    told = f"gatekeeper: error: there is no command '{word}'; `gatekeeper --help` lists all{hint}"
    assert refused(capsys, word, "http://a.test/", "--json") == told
    assert refused(capsys, "help", word) == told


@pytest.mark.parametrize("address", ["8080", "127.0.0.1:70000", ":80", "127.0.0.1:http"])
def test_proxy_takes_a_host_and_a_port(capsys: Capture, address: str) -> None:
    said = refused(capsys, "proxy", "--listen", address)
    assert f"--listen: {address!r}; give HOST:PORT" in said


def test_proxy_needs_a_newer_python_and_an_extra(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--help` and `--script` need neither."""
    monkeypatch.setitem(sys.modules, "mitmproxy", None)
    monkeypatch.setattr("gatekeeper.cli.proxy.PYTHON", (3, 11))
    said = refused(capsys, "proxy")
    assert "mitmproxy needs Python 3.12 or newer, and this is 3.11" in said
    monkeypatch.setattr("gatekeeper.cli.proxy.PYTHON", (3, 12))
    monkeypatch.delitem(sys.modules, "gatekeeper.integrations.mitmproxy", raising=False)
    assert "pip install 'robots-gatekeeper[mitmproxy]'" in refused(capsys, "proxy")
    assert main(["proxy", "--script"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "mitmproxy_script.py"
    assert path.is_file()


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_mcp_refuses_a_port_out_of_range(capsys: Capture, port: str) -> None:
    pytest.importorskip("mcp")
    assert f"--http: {port!r}: " in (said := refused(capsys, "mcp", f"--http={port}"))
    assert said.endswith("; give another port")


def test_mcp_at_a_port_in_use_is_one_line(capsys: Capture) -> None:
    pytest.importorskip("mcp")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, "mcp", "--user-agent", "b/1", "--http", str(port))
    assert said.endswith(f"--http: '{port}': Address already in use; give another port")


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (
            {"host": "nowhere.invalid"},
            "server.host: nowhere.invalid: .*; give an address or a name of this machine",
        ),
        ({"socket": "/nowhere/s"}, r"server\.socket: /nowhere/s: .*; make its directory first"),
        ({"socket": "/tmp/" + "x" * 200}, r"path too long; give a shorter one"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_with_the_reason(
    server: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        open_sockets(ServerConfig(port=0, **server))


def test_a_missing_token_file_is_named(capsys: Capture) -> None:
    said = refused(capsys, "serve", "--token-file", "/nowhere/tokens", "--storage", "memory")
    assert (
        "--token-file: /nowhere/tokens: No such file or directory; give a file that holds" in said
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("user_agent = 'b/1'\n".encode("utf-16"), "not UTF-8; save it in UTF-8"),
        (b"user_agent = 'b\xfc'\n", "not UTF-8; save it in UTF-8"),
    ],
)
def test_a_configuration_in_another_encoding_is_refused_with_its_name(
    tmp_path: Path, text: bytes, told: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"x.toml: not valid TOML: {told}"):
        Config.load(path)


def test_a_byte_order_mark_before_a_configuration_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbfuser_agent = 'b/1'\n")
    assert Config.load(path).user_agent == "b/1"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "dir"])
def test_history_refuses_a_storage_path_that_is_no_file(
    capsys: Capture, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "x"
    path.mkdir() if kind == "dir" else os.mkfifo(path)
    said = refused(capsys, "history", "https://a.test", "--storage", str(path))
    assert f"{path}: not a file; give the path of the gate's storage" in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["leases", "leases.new"])
def test_a_lease_journal_that_is_a_pipe_is_an_error_and_does_not_hang(
    tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        LeaseJournal(tmp_path / "leases", clock=VirtualClock(), wait=True)


def test_a_failed_healthcheck_asks_whether_serve_runs_there(
    capsys: Capture, tmp_path: Path
) -> None:
    assert main(["healthcheck", "--socket", str(tmp_path / "s")]) == 1
    assert "; is `gatekeeper serve` running there?" in capsys.readouterr().out


NO_HOSTS = ["a..b", "x" * 70, "a\udcff"]


@pytest.mark.parametrize("host", NO_HOSTS)
@pytest.mark.parametrize("command", ["healthcheck", "top", "serve", "mcp"])
def test_a_host_that_is_no_name_is_told_in_one_line(
    capsys: Capture, command: str, host: str
) -> None:
    where = f"--gate=http://{host}:1" if command == "mcp" else f"--host={host}"
    assert main([command, where]) == (2 if command in ("serve", "mcp") else 1)
    said = capsys.readouterr()
    last = (said.err or said.out).splitlines()[-1]
    shown = host.encode("ascii", "backslashreplace").decode()
    assert ("sidecar" if command == "mcp" else shown) in last


@pytest.mark.parametrize("host", ["a b", "a\tb"])
def test_a_host_with_blanks_gets_no_answer(capsys: Capture, host: str) -> None:
    assert main(["healthcheck", "--host", host]) == 1
    assert "no answer from" in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting", ["storage.path", "audit.folder", "server.socket", "fetch.ca_dir", "identity.key"]
)
def test_a_path_with_a_nul_is_a_mistake_in_the_configuration(setting: str) -> None:
    section, name = setting.split(".")
    with pytest.raises(ConfigError, match=f"{setting}: has a NUL character"):
        Config.from_dict({section: {name: "a\0b"}})


@pytest.mark.parametrize("path", [".", ".."])
def test_a_folder_as_state_file_is_refused(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setenv("GATEKEEPER_STORAGE_PATH", path)
    assert refused(capsys, "check", "http://a.test/").endswith(
        f"{path}: not a file; give the path of a file"
    )


def test_a_variable_that_is_not_utf_8_is_refused_like_any_other_value(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEKEEPER_USER_AGENT", "\udcff")
    assert "GATEKEEPER_USER_AGENT" in refused(capsys, "config", "check")


def test_a_warc_file_whose_path_is_not_utf_8_is_refused(capsys: Capture, tmp_path: Path) -> None:
    path = f"{tmp_path}/\udcff.warc"
    assert "the path is not UTF-8" in refused(capsys, "fetch", "--warc", path, "http://a.test/")


def test_audit_verify_without_a_folder_names_the_missing_argument(capsys: Capture) -> None:
    assert refused(capsys, "audit", "verify").endswith("arguments are required: DIR")
