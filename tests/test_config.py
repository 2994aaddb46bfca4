"""config.example.toml documents Config: both have the same settings."""

from __future__ import annotations

import re
import tomllib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper import Gatekeeper, RemoteGatekeeper
from gatekeeper.config import Config, GroupRule, HostRule, agent_named, as_config
from gatekeeper.errors import ConfigError
from gatekeeper.robots.parser import token_warning

EXAMPLE = Path(__file__).parent.parent / "config.example.toml"
TABLES: dict[str, type[msgspec.Struct]] = {"host": HostRule, "group": GroupRule}


def example(*, everything: bool) -> dict[str, Any]:
    """Parse the file as it is, or with each `#name = value` and `#[[table]]` uncommented."""
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
    with pytest.raises(
        ConfigError, match=r"here\.toml: fetch\.timout: no such setting; did you mean"
    ):
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
def test_a_setting_with_a_harmful_value_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config.from_dict(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"pacing": {"default_intervall": 1}},
            "pacing.default_intervall: no such setting; did you mean default_interval?",
        ),
        ({"pacin": {"jitter": 1}}, "[pacin]: no such section; did you mean [pacing]?"),
        ({"hosts": [{"match": "*"}]}, "[hosts]: no such section; did you mean [[host]]?"),
        (
            {"nonsense": {}},
            "[nonsense]: no such section; `gatekeeper config show` lists all of them",
        ),
        ({"fetch": {"default_interval": 1.0}}, "fetch.default_interval: belongs in [pacing]"),
        ({"default_interval": 1.0}, "default_interval: belongs in [pacing]"),
        ({"robots": {"max_body": 1}}, "robots.max_body: belongs in [fetch] or [server]"),
        (
            {"pacing": {"user_agent": "a"}},
            "pacing.user_agent: belongs at the top, before the first [section]",
        ),
        ({"useragent": "a"}, "useragent: no such setting; did you mean user_agent?"),
        (
            {"defaultinterval": 1},
            "defaultinterval: no such setting; did you mean default_interval in [pacing]?",
        ),
        (
            {"pacing": {"default_interval": "2s"}},
            "pacing.default_interval: a number of seconds such as 1.0, not '2s'",
        ),
        (
            {"pacing": {"max_interval": "2s"}},
            "pacing.max_interval: a number of seconds such as 2.0, not '2s'",
        ),
        (
            {"cache": {"max_bytes": 1.5}},
            "cache.max_bytes: a whole number of bytes such as 1073741824, not 1.5",
        ),
        ({"fetch": {"conditional": "yes"}}, "fetch.conditional: true or false, not 'yes'"),
        (
            {"fetch": {"profile": "googel"}},
            'fetch.profile: one of "strict", "archival", "google", not \'googel\'',
        ),
        (
            {"guard": {"allow": "127.0.0.1"}},
            "guard.allow: a list, such as [\"127.0.0.1\"], not '127.0.0.1'",
        ),
        ({"guard": {"ports": 80}}, "guard.ports: a list, such as [80], not 80"),
        (
            {"guard": {"ports": ["80"]}},
            "guard.ports: a list of whole numbers from 1 to 65535, such as [80], not ['80']",
        ),
        (
            {"guard": {"ports": [80, 65536]}},
            "guard.ports: a list of whole numbers from 1 to 65535, such as [80], not [80, 65536]",
        ),
        ({"server": {"port": 99999}}, "server.port: at most 65535, not 99999"),
        ({"fetch": {"max_redirects": 4}}, "fetch.max_redirects: at least 5, not 4"),
        ({"cache": {"min_ttl": 0}}, "cache.min_ttl: more than 0, not 0"),
        ({"server": {"socket": ""}}, "server.socket: a string that is not empty, not ''"),
        ({"server": {"host": 1}}, "server.host: a string in quotes, not 1"),
        ({"pacing": 3}, "pacing: a table, written as [pacing], not 3"),
        ({"host": {"match": "*"}}, "host: any number of tables, each written as [[host]], not"),
        ({"host": [{"match": "*"}, {"robots": "deny"}]}, "[[host]] number 2: match is missing"),
        (
            {"host": [{"match": "*", "intervall": 1}]},
            "[[host]] number 1: intervall: no such setting; did you mean interval?",
        ),
        (
            {"group": [{"name": "x", "interval": "1"}]},
            "[[group]] number 1: interval: a number of seconds such as 0.0, not '1'",
        ),
        (
            {"host": [{"match": "*", "by": "x" * 201}]},
            "[[host]] number 1: by: a string of at most 200 characters, not 'xxx",
        ),
        ({"host": [{"match": "*", "by": ""}]}, "[[host]] number 1: by: a string that is not empty"),
    ],
)
def test_a_wrong_value_is_refused_with_the_setting_and_what_it_takes(
    raw: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.from_dict(raw, source="a.toml")
    assert str(refused.value).startswith(f"a.toml: {said}")


@pytest.mark.parametrize(
    "written", ["2026-12-01T00:00:00Z", "2026-12-01 05:30:00+05:30", '"2026-12-01T00:00:00Z"']
)
def test_a_rule_ends_at_a_date_with_its_zone(tmp_path: Path, written: str) -> None:
    path = tmp_path / "g.toml"
    path.write_text(f'[[host]]\nmatch = "*"\nuntil = {written}\n', encoding="utf-8")
    assert Config.load(path).host[0].until == datetime(2026, 12, 1, tzinfo=UTC)
    raw = {"host": [{"match": "*", "until": "2026-12-01T00:00:00Z", "interval": "x"}]}
    with pytest.raises(ConfigError, match=r"interval: a number"):  # not: until
        Config.from_dict(raw)


@pytest.mark.parametrize(
    "written",
    [
        "2026-12-01T00:00:00",
        "2026-12-01",
        "18:00:00",
        "3600",
        "0.5",
        "true",
        '"2h"',
        '"2026-12-01"',
    ],
)
def test_an_end_without_a_zone_or_as_a_duration_is_refused_with_the_remedy(
    tmp_path: Path, written: str
) -> None:
    path = tmp_path / "g.toml"
    path.write_text(f'[[host]]\nmatch = "*"\nuntil = {written}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        Config.load(path)
    assert str(refused.value) == (
        f"{path}: [[host]] number 1: until: a date with its zone (a duration would start again at "
        f"each reload) as 2026-12-31T18:00:00Z, not {written}".replace('"', "'")
    )


@pytest.mark.parametrize("section", sorted(sections()))
def test_every_setting_says_what_it_takes(section: str) -> None:
    for name in names(sections()[section]):
        with pytest.raises(ConfigError, match=rf"^here: {section}\.{name}: .*, not "):
            Config.from_dict({section: {name: {"a": "table"}}}, source="here")


@pytest.mark.parametrize("wrong", ["gatekeeper.toml", {"guard": {"allow": []}}, 3])
def test_an_argument_config_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"config must be a Config.*Config\.load\(path\)"):
        Gatekeeper("examplebot", config=wrong)
    with pytest.raises(ConfigError, match="config must be a Config"):
        RemoteGatekeeper("http://127.0.0.1:1", config=wrong)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("guard", {"allow": ["127.0.0.0/8"]}, "must be a GuardConfig, not a dict"),
        ("pacing", None, "must be a PacingConfig, not a NoneType"),
        ("host", ({"match": "*"},), "must be a tuple of HostRule"),
        ("group", [GroupRule(name="a")], "must be a tuple of GroupRule"),
    ],
)
def test_a_section_of_another_kind_is_refused_by_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.{field} {said}.*Config\.from_dict"):
        as_config(Config(**{field: value}))


def test_config_none_means_the_defaults() -> None:
    given = Config(host=(HostRule(match="*"),))

    assert as_config(None) == Config()
    assert as_config(given) is given


@pytest.mark.parametrize("name", ["", " ", "*", "*/1.0", "münch/1", "bot\t1", "bot\r\nX: 1", "///"])
def test_a_user_agent_that_identifies_nobody_is_refused_everywhere(name: str) -> None:
    with pytest.raises(ConfigError, match=r"user_agent: .*say who you are"):
        agent_named(name)
    with pytest.raises(ConfigError, match=r"here: user_agent: .*say who you are"):
        Config.from_dict({"user_agent": name}, source="here")
    with pytest.raises(ConfigError, match=r"user_agent: .*say who you are"):
        Gatekeeper(name)
    with pytest.raises(ConfigError, match=r"user_agent: .*say who you are"):
        RemoteGatekeeper("http://127.0.0.1:1", user_agent=name)


@pytest.mark.parametrize(
    ("name", "token"), [("my bot", "my"), ("my bot/1.0", "my"), ("bot;x", "bot"), ("1.0", "1.0")]
)
def test_a_user_agent_whose_token_is_cut_short_is_warned_of(name: str, token: str) -> None:
    said = f"user agent {name!r}: rules are selected for {token!r}"
    assert token_warning(name) == said
    for gate in (Gatekeeper, partial(RemoteGatekeeper, "http://127.0.0.1:1")):
        with pytest.warns(UserWarning, match=re.escape(said)) as warned:
            gate(user_agent=name)
        assert [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize(
    "name",
    [
        "examplebot",
        "bot2000/1",
        "examplebot/1.0 (+https://example.org/bot)",
        "examplebot (+https://example.org/bot)",
        "Mozilla/5.0 (compatible; examplebot/2.1; +https://example.org/bot)",
    ],
)
def test_a_usual_user_agent_causes_no_warning(name: str) -> None:
    assert token_warning(name) is None
