"""`serve`, `healthcheck` and `config check`: how they use options, files and variables."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.cli import main
from gatekeeper.config import Config, ServerConfig
from gatekeeper.errors import ConfigError, StorageError
from gatekeeper.sidecar import listening, process
from gatekeeper.sidecar.process import ServeOptions


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options that the sidecar would have been started with."""
    started: list[ServeOptions] = []
    monkeypatch.setattr(process, "serve", started.append)
    return started


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> str:
        path = tmp_path / "gatekeeper.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_host_and_port_override_a_socket_of_the_file(file: Any, wired: list[ServeOptions]) -> None:
    path = file('[server]\nsocket = "/run/gatekeeper.sock"\nport = 9000\n')

    assert main(["serve", "--config", path, "--host", "::1"]) == 0
    assert main(["serve", "--config", path, "--port", "0"]) == 0
    assert main(["serve", "--config", path]) == 0
    found = [(w.config.server.socket, w.config.server.host, w.config.server.port) for w in wired]
    assert found == [
        (None, "::1", 9000),
        (None, "127.0.0.1", 0),
        ("/run/gatekeeper.sock", "127.0.0.1", 9000),
    ]


def test_a_socket_and_a_port_at_once_are_refused(
    wired: list[ServeOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--socket", "/run/s", "--port", "1"]) == 2
    assert "one or the other" in capsys.readouterr().err
    assert wired == []


def test_serve_tells_a_program_where_it_listens_in_json(
    wired: list[ServeOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["serve", "--json"])
    wired[0].announce("http://127.0.0.1:1", "curl ...")

    told = json.loads(capsys.readouterr().out)
    assert told == {"listening": "http://127.0.0.1:1", "try": "curl ..."}


def test_a_failing_healthcheck_speaks_json_when_asked_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["healthcheck", "--json", "--socket", "/nowhere.sock"]) == 1

    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["status"]) == ("/healthz", None)
    assert told["error"]


def test_an_environment_variable_that_is_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEKEEPER_USERAGENT", "examplebot/1.0")

    assert main(["config", "check"]) == 0
    assert "ignored GATEKEEPER_USERAGENT: no such setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[guard]\nallow = ["foo/9"]\n', "foo/9"),
        ('user_agent = "///"\n', "product token"),
        ('user_agent = "bot/1.0\\r\\nX-Smuggled: 1"\n', "user_agent"),
        ('[[host]]\nmatch = "a.example"\ngroup = "none"\n', "none"),
        ('[server]\nsocket = ""\n', "socket"),
        ('[storage]\npath = ""\n', "path"),
        ("[server]\nproxy_port = 8751\n", "server.proxy_port: the sidecar has no proxy"),
        ("[cache]\nmax_ttl = 1e12\n", "max_ttl"),
        ("[cache]\nmin_ttl = 900.0\nmax_ttl = 700.0\n", "min_ttl"),
        (b'user_agent = "b\xfc"\n', "not valid TOML"),
    ],
)
def test_config_check_refuses_what_serve_refuses(
    file: Any, capsys: pytest.CaptureFixture[str], text: str | bytes, named: str
) -> None:
    assert main(["config", "check", "--config", file(text)]) == 2

    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[guard]\nallow = ["127.0.0.1/33"]\n', "guard.allow: '127.0.0.1/33' does not"),
        ('[server]\nhost = "0.0.0.0"\n', "server.host = '0.0.0.0' can be reached"),
        ('[server]\ntoken_file = "/nowhere"\n', "server.token_file: /nowhere: No such file"),
        ('[server]\ntls_cert = "/a"\ntls_key = "/b"\n', "server.tls_*: "),
        ('[[host]]\nmatch = "*"\ngroup = "x"\n', "[[host]] match='*': no [[group]] named 'x'"),
        ('[storage]\npath = "/nowhere/x"\n', "storage.path: /nowhere/x: there is no directory"),
    ],
)
def test_a_setting_that_is_refused_after_parsing_still_names_the_file(
    file: Any, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = file(text)

    assert main(["config", "check", "--config", path]) == 2
    assert capsys.readouterr().err.startswith(f"gatekeeper config: {path}: {said}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "99999"], "--port: at most 65535, not 99999"),
        (["--host", "0.0.0.0"], "--host '0.0.0.0' can be reached from other machines"),
        (["--token-file", "/nowhere"], "--token-file: /nowhere: No such file"),
        (["--storage", "/nowhere/x"], "--storage: /nowhere/x: there is no directory /nowhere;"),
        (["--storage", ""], "--storage: a string that is not empty, not ''"),
        (["--fleet", ""], "--fleet: a string that is not empty, not ''"),
        (["--allow-address", "127.0.0.0/99"], "--allow-address: '127.0.0.0/99' does not"),
        (["--user-agent", ""], "--user-agent: '' contains no product token"),
    ],
)
def test_a_wrong_flag_is_named_as_it_was_given(
    file: Any, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    path = file('user_agent = "examplebot"\n[guard]\nallow = ["10.0.0.0/8"]\n')

    assert main(["serve", "--config", path, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"gatekeeper serve: {said}")


def test_a_wrong_range_of_the_file_is_not_blamed_on_the_flag(
    file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file('[guard]\nallow = ["127.0.0.0/99"]\n')

    assert main(["config", "check", "--config", path, "--allow-address", "10.0.0.0/8"]) == 2
    assert capsys.readouterr().err.startswith(f"gatekeeper config: {path}: guard.allow: ")


def test_a_state_file_in_use_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_use(options: ServeOptions) -> None:
        raise StorageError("/x: in use by another gatekeeper; give this one a file of its own")

    monkeypatch.setattr(process, "serve", in_use)
    assert main(["serve"]) == 2
    assert "a file of its own (--storage PATH sets another place)\n" in capsys.readouterr().err


def test_a_state_directory_that_cannot_be_written_names_the_storage_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

    with pytest.raises(ConfigError, match=r"--storage PATH, or --storage memory"):
        process.with_state(Config())


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "needs a port above 1023, or CAP_NET_BIND_SERVICE"),
        (errno.EADDRINUSE, "another one may be running"),
        (errno.EADDRNOTAVAIL, "--port or server.port changes it"),
    ],
)
def test_a_failure_to_listen_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refused(address: tuple[object, ...], *, family: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(listening.socket, "create_server", refused)
    with pytest.raises(ConfigError) as told:
        listening.open_sockets(ServerConfig(port=80))
    assert remedy in str(told.value)
    assert ("another one" in str(told.value)) is (number == errno.EADDRINUSE)


def test_serve_on_windows_says_that_it_needs_linux_or_macos(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(signal, "SIGHUP")
    assert main(["serve", "--storage", "memory"]) == 2
    assert "needs Linux or macOS" in capsys.readouterr().err
