"""`serve`, `healthcheck` and `config check`: what they make of options, files and variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.cli import main
from gatekeeper.sidecar import lifecycle
from gatekeeper.sidecar.lifecycle import Wiring


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[Wiring]:
    """What `serve` would have been started with."""
    started: list[Wiring] = []
    monkeypatch.setattr(lifecycle, "serve", started.append)
    return started


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> str:
        path = tmp_path / "gatekeeper.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_host_and_port_override_a_socket_of_the_file(file: Any, wired: list[Wiring]) -> None:
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


def test_a_socket_and_a_port_at_once_are_a_mistake(
    wired: list[Wiring], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--socket", "/run/s", "--port", "1"]) == 2
    assert "one or the other" in capsys.readouterr().err
    assert wired == []


def test_serve_tells_a_program_where_it_listens_in_json(
    wired: list[Wiring], capsys: pytest.CaptureFixture[str]
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


def test_a_variable_that_is_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEKEEPER_USERAGENT", "examplebot/1.0")

    assert main(["config", "check"]) == 0
    assert "GATEKEEPER_USERAGENT is no setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[guard]\nallow = ["foo/9"]\n', "foo/9"),
        ('user_agent = "///"\n', "product token"),
        ('user_agent = "bot/1.0\\r\\nX-Smuggled: 1"\n', "user_agent"),
        ('[[host]]\nmatch = "a.example"\ngroup = "none"\n', "none"),
        ('[server]\nsocket = ""\n', "socket"),
        ('[storage]\npath = ""\n', "path"),
        ("[cache]\nmax_ttl = 1e12\n", "max_ttl"),
        ("[cache]\nmin_ttl = 900.0\nmax_ttl = 700.0\n", "min_ttl"),
        (b'user_agent = "b\xfc"\n', "not valid TOML"),
    ],
)
def test_config_check_refuses_what_serve_would(
    file: Any, capsys: pytest.CaptureFixture[str], text: str | bytes, named: str
) -> None:
    assert main(["config", "check", "--config", file(text)]) == 2

    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
