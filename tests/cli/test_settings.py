"""The effective configuration: default, file, environment, flag; the later one wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from gatekeeper.cli.settings import Settings
from gatekeeper.config import Config
from gatekeeper.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "gatekeeper.toml"
    path.write_text(
        'user_agent = "filebot/1.0"\n'
        "[pacing]\ndefault_interval = 2.0\n"
        '[guard]\nallow = ["10.0.0.0/8"]\n'
        '[[host]]\nmatch = "a.example"\nrobots = "deny"\n',
        encoding="utf-8",
    )
    return str(path)


def test_nothing_said_is_all_defaults() -> None:
    settings = Settings.load(None, environ={})

    assert settings.config == Config()
    assert {one.source for one in settings} == {"default"}


def test_the_file_is_named_as_the_source(file: str) -> None:
    settings = Settings.load(file, environ={})

    assert settings.config.pacing.default_interval == 2.0
    assert settings.source("pacing.default_interval") == f"file {file}"
    assert settings.source("host") == f"file {file}"
    assert settings.source("pacing.concurrency") == "default"


def test_the_environment_overrides_the_file(file: str) -> None:
    environ = {"GATEKEEPER_PACING_DEFAULT_INTERVAL": "3.5", "GATEKEEPER_USER_AGENT": "envbot"}
    settings = Settings.load(file, environ=environ)

    assert settings.config.pacing.default_interval == 3.5
    assert settings.identity() == "envbot"
    assert settings.source("user_agent") == "environment GATEKEEPER_USER_AGENT"


def test_a_flag_overrides_the_environment(file: str) -> None:
    settings = Settings.load(
        file, environ={"GATEKEEPER_SERVER_PORT": "1"}, flags={"server.port": 2}
    )

    assert settings.config.server.port == 2
    assert settings.source("server.port") == "flag --port"


def test_allowed_addresses_are_added_to_those_of_the_file(file: str) -> None:
    settings = Settings.load(file, environ={}, allow=("127.0.0.0/8",))

    assert settings.config.guard.allow == ("10.0.0.0/8", "127.0.0.0/8")


def test_the_file_may_come_from_the_environment(file: str) -> None:
    assert Settings.load(None, environ={"GATEKEEPER_CONFIG": file}).identity() == "filebot/1.0"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("GATEKEEPER_SERVER_PORT", "9000", "server.port", 9000),
        ("GATEKEEPER_SERVER_FORWARD_AUTH", "true", "server.forward_auth", True),
        ("GATEKEEPER_GUARD_ALLOW", "10.0.0.0/8, ::1/128", "guard.allow", ("10.0.0.0/8", "::1/128")),
        ("GATEKEEPER_GUARD_ALLOW", "", "guard.allow", ()),
        ("GATEKEEPER_GUARD_PORTS", "80,443", "guard.ports", (80, 443)),
        ("GATEKEEPER_STORAGE_PATH", "/x/state", "storage.path", "/x/state"),
        ("GATEKEEPER_PACING_MAX_INTERVAL", "60", "pacing.max_interval", 60.0),
    ],
)
def test_a_variable_takes_the_type_of_its_setting(
    variable: str, text: str, name: str, value: object
) -> None:
    settings = Settings.load(None, environ={variable: text})

    assert {one.name: one.value for one in settings}[name] == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [("GATEKEEPER_SERVER_PORT", "eighty"), ("GATEKEEPER_SERVER_PRT", "80")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        Settings.load(None, environ={variable: text})


def test_variables_of_others_are_left_alone() -> None:
    # Kubernetes sets such ones for a service that is called gatekeeper.
    environ = {"GATEKEEPER_PORT": "tcp://10.0.0.1:8750", "GATEKEEPER_SERVICE_HOST": "10.0.0.1"}

    assert Settings.load(None, environ=environ).config == Config()


def test_a_variable_that_looks_like_a_setting_and_is_none_is_told() -> None:
    environ = {"GATEKEEPER_USERAGENT": "bot/1.0", "GATEKEEPER_PORT_8750_TCP": "tcp://10.0.0.1"}

    assert Settings.load(None, environ=environ).ignored == ("GATEKEEPER_USERAGENT",)
