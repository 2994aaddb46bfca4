from __future__ import annotations

import sys

import pytest

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig
from gatekeeper.errors import ConfigError
from gatekeeper.pacing.host_settings import HostRules, Rules


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("a.example.org", "a.example.org"),
        ("b.example.org", "*.example.org"),
        ("c.deep.example.org", "*.deep.example.org"),
        ("example.org", "*"),  # `*.example.org` matches every name below it.
        ("other.net", "*"),
    ],
)
def test_the_most_specific_match_counts(host: str, found: str) -> None:
    names = ("*", "*.example.org", "A.Example.org", "*.deep.example.org")
    rule = HostRules([HostRule(match=name) for name in names]).find(host)
    assert rule is not None
    assert rule.match.lower() == found


def test_all_hosts_of_a_rule_share_one_settings_object() -> None:
    rules = Rules(Config(host=(HostRule(match="*.example.org", interval=3.0),)))
    assert rules.for_host("a.example.org") is rules.for_host("b.example.org")
    assert rules.for_host("a.example.org").own == 3.0


def test_a_rule_set_at_run_time_replaces_the_configured_one_whole() -> None:
    rules = Rules(Config(host=(HostRule(match="a.example", interval=3.0, concurrency=4),)))
    rules.add(HostRule(match="A.example.", interval=9.0))
    assert (rules.for_host("a.example").own, rules.for_host("a.example").limit) == (9.0, 1)
    rules.add(HostRule(match="a.example", robots="deny"))
    assert rules.for_host("a.example").own is None
    assert rules.overridden("a.example")


def test_a_reload_removes_every_rule_that_is_not_in_it() -> None:
    rules = Rules(
        Config(
            host=(HostRule(match="a.example", interval=3.0), HostRule(match="*", interval=2.0)),
        )
    )
    rules.add(HostRule(match="a.example", interval=9.0))
    rules.replace((HostRule(match="*", interval=2.0),))
    assert rules.for_host("a.example").own == 2.0
    assert not rules.overridden("a.example")
    rules.replace(())
    assert rules.for_host("a.example").own is None


def test_two_host_tables_for_one_match_are_refused() -> None:
    first, second = HostRule(match="a.example", interval=1.0), HostRule(match="A.example.")
    with pytest.raises(ConfigError, match=r"\[\[host\]\] match='A.example.': an earlier table"):
        HostRules([first, second])


def test_two_groups_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[\[group\]\] name='a': an earlier table"):
        Rules(Config(group=(GroupRule(name="a"), GroupRule(name="a", interval=5.0))))


def test_a_rule_with_an_unknown_group_changes_nothing() -> None:
    rules = Rules(Config(host=(HostRule(match="a.example", interval=3.0),)))
    with pytest.raises(ConfigError, match=r"no \[\[group\]\] named 'x'"):
        rules.add(HostRule(match="a.example", group="x"))
    assert rules.for_host("a.example").own == 3.0


def test_groups_and_domains_are_shared() -> None:
    rules = Rules(
        Config(
            pacing=PacingConfig(domain_interval=0.5),
            host=(HostRule(match="*.co.uk", group="uk"),),
            group=(GroupRule(name="uk", interval=2.0, concurrency=3),),
        )
    )
    assert rules.shared_names("www.shop.co.uk") == ("domain:shop.co.uk", "group:uk")
    assert rules.shared_names("192.0.2.1") == ()
    assert rules.shared_names("localhost") == ()
    assert rules.for_shared("domain:shop.co.uk").default == 0.5
    assert (rules.for_shared("group:uk").default, rules.for_shared("group:uk").limit) == (2.0, 3)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no \[\[group\]\] named 'x'"):
        Rules(Config(host=(HostRule(match="a", group="x"),)))


def test_a_domain_interval_without_the_psl_extra_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "publicsuffixlist", None)
    with pytest.raises(ConfigError, match=r"gatekeeper\[psl\]"):
        Rules(Config(pacing=PacingConfig(domain_interval=1.0)))
