"""The effective configuration: default, file, environment, flag; the last one wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from gatekeeper.cli.settings import Settings
from gatekeeper.config import Config, values_of
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import identity_of


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


def test_settings_without_any_source_are_the_defaults() -> None:
    settings = Settings.load(None, environ={})

    assert settings.config == Config()
    assert settings.sources == {}


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
    assert identity_of(settings.config) == "envbot"
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
    settings = Settings.load(None, environ={"GATEKEEPER_CONFIG": file})

    assert settings.config.user_agent == "filebot/1.0"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("GATEKEEPER_SERVER_PORT", "9000", "server.port", 9000),
        ("GATEKEEPER_SERVER_FORWARD_AUTH", "true", "server.forward_auth", True),
        ("GATEKEEPER_GUARD_ALLOW", "10.0.0.0/8, ::1/128", "guard.allow", ("10.0.0.0/8", "::1/128")),
        ("GATEKEEPER_GUARD_ALLOW", "", "guard.allow", ()),
        ("GATEKEEPER_GUARD_PORTS", "80,443", "guard.ports", (80, 443)),
        ("GATEKEEPER_GUARD_ALLOW", '["10.0.0.0/8", "::1"]', "guard.allow", ("10.0.0.0/8", "::1")),
        ("GATEKEEPER_GUARD_PORTS", "[80,443]", "guard.ports", (80, 443)),
        ("GATEKEEPER_SERVER_ALLOWED_HOSTS", "[::1]:9,a", "server.allowed_hosts", ("[::1]:9", "a")),
        ("GATEKEEPER_STORAGE_PATH", "/x/state", "storage.path", "/x/state"),
        ("GATEKEEPER_PACING_MAX_INTERVAL", "60", "pacing.max_interval", 60.0),
    ],
)
def test_a_variable_takes_the_type_of_its_setting(
    variable: str, text: str, name: str, value: object
) -> None:
    settings = Settings.load(None, environ={variable: text})

    assert dict(values_of(settings.config))[name] == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [("GATEKEEPER_SERVER_PORT", "eighty"), ("GATEKEEPER_SERVER_PRT", "80")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        Settings.load(None, environ={variable: text})


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("GATEKEEPER_SERVER_PORT", "99999", "at most 65535, not 99999"),
        ("GATEKEEPER_SERVER_PORT", "eighty", "a whole number such as 8750, not 'eighty'"),
        ("GATEKEEPER_CACHE_MIN_TTL", "inf", "at most 316224000, not inf"),
        ("GATEKEEPER_FETCH_CONDITIONAL", "maybe", "true or false, not 'maybe'"),
        ("GATEKEEPER_SERVER_PRT", "80", "no such setting; did you mean GATEKEEPER_SERVER_PORT?"),
        ("GATEKEEPER_SERVER_PROXY_PORT", "80", "no such setting: the sidecar has no proxy"),
        ("GATEKEEPER_GUARD_PORTS", "[80,", "a list of whole numbers from 1 to 65535, such as [80]"),
        ("GATEKEEPER_GUARD_ALLOW", "[80]", "a list of strings in quotes, such as"),
        ("GATEKEEPER_USER_AGENT", "", "'' contains no product token"),
        ("GATEKEEPER_STORAGE_PATH", "", "a string that is not empty, not ''"),
    ],
)
def test_a_wrong_variable_is_told_with_what_it_takes(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load(None, environ={variable: text})
    assert str(refused.value).startswith(f"{variable}: {said}")


def test_a_variable_that_contradicts_another_setting_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load(None, environ={"GATEKEEPER_CACHE_MIN_TTL": "90000"})
    assert str(refused.value).startswith("GATEKEEPER_CACHE_MIN_TTL=90000 is above cache.max_ttl")


def test_the_source_of_storage_path_is_the_flag_storage() -> None:
    settings = Settings.load(None, environ={}, flags={"storage.path": "/x"})
    assert settings.source("storage.path") == "flag --storage"


def test_service_variables_of_kubernetes_are_ignored() -> None:
    # Kubernetes sets such variables for a service that is called gatekeeper.
    environ = {"GATEKEEPER_PORT": "tcp://10.0.0.1:8750", "GATEKEEPER_SERVICE_HOST": "10.0.0.1"}

    assert Settings.load(None, environ=environ).config == Config()


def test_a_variable_that_looks_like_a_setting_and_is_none_is_listed() -> None:
    environ = {"GATEKEEPER_USERAGENT": "bot/1.0", "GATEKEEPER_PORT_8750_TCP": "tcp://10.0.0.1"}

    assert Settings.load(None, environ=environ).ignored == ("GATEKEEPER_USERAGENT",)
