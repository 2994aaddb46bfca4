"""config.example.toml is the documentation of Config: neither knows what the other lacks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper.config import Config, GroupRule, HostRule
from gatekeeper.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "config.example.toml"
TABLES = {"host": HostRule, "group": GroupRule}


def example(*, everything: bool) -> dict[str, Any]:
    """The file as it stands, or with each `#name = value` and `#[[table]]` switched on."""
    text = EXAMPLE.read_text(encoding="utf-8")
    if everything:
        text = re.sub(r"^#(?=[a-z\[])", "", text, flags=re.MULTILINE)
    return tomllib.loads(text)


def sections() -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: field.type
        for field in msgspec.structs.fields(Config)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


def names(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def test_the_example_as_it_stands_is_all_defaults() -> None:
    assert Config.load(EXAMPLE) == Config()


def test_the_example_is_valid_with_every_line_switched_on() -> None:
    config = Config.from_dict(example(everything=True))

    assert config.host[0].match == "*.example.org"
    assert config.group[0].name == config.host[0].group


@pytest.mark.parametrize("section", sorted(sections()))
def test_every_setting_of_a_section_is_documented(section: str) -> None:
    assert set(example(everything=True)[section]) == names(sections()[section])


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_setting_of_a_repeated_table_is_documented(table: str) -> None:
    assert set(example(everything=True)[table][0]) == names(TABLES[table])


def test_every_table_and_top_setting_is_documented() -> None:
    assert set(example(everything=True)) == names(Config)


def test_a_default_is_written_out_and_only_an_unset_one_is_commented_out() -> None:
    written = example(everything=False)

    for name, struct in sections().items():
        fields = msgspec.structs.fields(struct)
        assert set(written[name]) == {field.name for field in fields if field.default is not None}


def test_an_unknown_setting_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"here\.toml.*timout.*fetch"):
        Config.from_dict({"fetch": {"timout": 3}}, source="here.toml")


def test_an_unreadable_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config"):
        Config.load(tmp_path / "missing.toml")


def test_bad_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[fetch\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"bad\.toml.*not valid TOML"):
        Config.load(path)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('user_agent = "b\xfcbot/1.0"\n'.encode("latin-1"))

    with pytest.raises(ConfigError, match=r"latin\.toml: not valid TOML"):
        Config.load(path)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"user_agent": "bot/1.0\r\nX-Smuggled: 1"}, "user_agent"),
        ({"fetch": {"from_address": "me@a.example\nX: 1"}}, "from_address"),
        ({"cache": {"max_ttl": 1e12}}, "max_ttl"),
        ({"cache": {"max_ttl": float("inf")}}, "max_ttl"),
        ({"pacing": {"default_interval": float("nan")}}, "default_interval"),
        ({"cache": {"min_ttl": 700.0, "max_ttl": 600.0}}, "min_ttl"),
        ({"server": {"socket": ""}}, "socket"),
        ({"storage": {"path": ""}}, "path"),
    ],
)
def test_what_can_mean_nothing_good_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config.from_dict(raw)
