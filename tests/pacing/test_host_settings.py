from __future__ import annotations

import math
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError
from gatekeeper.pacing.host_settings import MAX_OVERRIDES, HostRules, Rules, lasting


def add(rules: Rules, rule: HostRule) -> None:
    """Set a rule over those of its match."""
    match = match_named(rule.match)
    rules.put(match, (*rules.set_for(match), rule))


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
    add(rules, HostRule(match="A.example.", interval=9.0))
    assert (rules.for_host("a.example").own, rules.for_host("a.example").limit) == (9.0, 1)
    add(rules, HostRule(match="a.example", robots="deny"))
    assert rules.for_host("a.example").own is None
    assert rules.set_for("a.example")


def test_a_reload_replaces_what_stands_below_the_rules_set_at_run_time() -> None:
    rules = Rules(
        Config(
            host=(HostRule(match="a.example", interval=3.0), HostRule(match="*", interval=2.0)),
        )
    )
    add(rules, HostRule(match="a.example", interval=9.0))
    rules.replace((HostRule(match="*", interval=2.0),))
    assert rules.for_host("a.example").own == 9.0
    assert rules.set_for("a.example")
    rules.put("a.example", ())
    assert rules.for_host("a.example").own == 2.0
    assert not rules.set_for("a.example")
    rules.replace(())
    assert rules.for_host("a.example").own is None


START = datetime(2026, 12, 1, tzinfo=UTC)


class Ends:
    """Rules of one host, each with its interval as a name, under a wall clock."""

    def __init__(self, *configured: HostRule) -> None:
        self.wall = START.timestamp()
        self.rules = Rules(Config(host=configured), lambda: self.wall)

    def set(self, interval: float, seconds: float | None, match: str = "a.example") -> None:
        add(self.rules, lasting(HostRule(match=match, interval=interval), seconds, self.wall))

    def after(self, seconds: float) -> float | None:
        """The interval in force so many seconds after the start."""
        self.wall = START.timestamp() + seconds
        self.rules.end_due()
        return self.rules.for_host("a.example").own


def rule(interval: float, seconds: float | None = None, match: str = "a.example") -> HostRule:
    until = None if seconds is None else START + timedelta(seconds=seconds)
    return HostRule(match=match, interval=interval, until=until)


def test_after_each_end_the_rule_below_is_in_force_again() -> None:
    ends = Ends(rule(1.0, 40.0), rule(0.5, match="*.example"))
    ends.set(2.0, 30.0)
    ends.set(3.0, 20.0, match="A.Example.")
    ends.set(4.0, 10.0)
    assert [ends.after(s) for s in (0, 9.9, 10, 19.9, 20, 29.9, 30, 39.9, 40)] == [
        *(4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.5),
    ]
    assert not ends.rules.set_for("a.example")


def test_a_rule_that_ends_before_the_rule_over_it_is_never_in_force_again() -> None:
    ends = Ends()
    ends.set(2.0, 10.0)
    ends.set(3.0, 20.0)
    ends.set(4.0, 5.0)
    assert [ends.after(s) for s in (0, 5, 10, 20)] == [4.0, 3.0, 3.0, None]
    ends.set(5.0, None)  # for ever: nothing is below it
    ends.set(6.0, 5.0)
    assert [ends.after(s) for s in (20, 1e6)] == [6.0, 5.0]


def test_one_match_can_be_set_again_and_again_but_only_some_rules_are_kept() -> None:
    ends = Ends(rule(1.0))
    for number in range(100):
        ends.set(2.0, 100.0 + number)
    assert len(ends.rules.set_for("a.example")) == 1
    for number in range(MAX_OVERRIDES - 1):
        ends.set(3.0, 50.0 - number)
    with pytest.raises(ConfigError, match=r"a\.example has 16 overrides already; wait until one"):
        ends.set(4.0, 5.0)
    assert (ends.after(0), ends.after(50), ends.after(199)) == (3.0, 2.0, 1.0)


def test_a_rule_that_has_ended_stays_so_when_the_clock_is_set_back() -> None:
    ends = Ends(rule(1.0, 10.0))
    ends.set(2.0, 5.0)
    assert [ends.after(s) for s in (11, 0)] == [None, None]


def test_a_rule_that_has_ended_when_it_is_read_is_valid_and_said_to_be_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends(rule(1.0, -60.0), rule(2.0, match="*"))
    ends.rules.replace((rule(1.0, -1.0), rule(3.0, match="*")))
    ends.set(4.0, 0.0)
    ends.rules.log_ended()
    assert ends.after(0) == 3.0
    assert [record.getMessage() for record in caplog.records] == [
        "the override for a.example has ended: robots obey, interval 1.0: "
        "until 2026-11-30T23:59:00Z",
        "the override for a.example has ended: robots obey, interval 1.0: "
        "until 2026-11-30T23:59:59Z",
        "the override for a.example has ended: robots obey, interval 4.0: "
        "until 2026-12-01T00:00:00Z",
    ]


def test_an_end_is_kept_in_utc_and_a_reload_changes_no_override() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))
    ends = Ends(HostRule(match="a.example", until=START.astimezone(zone) + timedelta(seconds=10)))
    assert str(ends.rules.entries()[0].until) == "2026-12-01 00:00:10+00:00"
    ends.set(2.0, 20.0)
    ends.rules.replace((rule(7.0),))
    assert [ends.after(s) for s in (10, 20)] == [2.0, 7.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"until": datetime(2026, 12, 1)},
        {"until": 3600.0},
        {"until": "2026-12-01T00:00:00Z"},
        {"until": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))},
        {"by": "x" * 201},
        {"by": ""},
        {"by": "a\nb"},
        {"by": 3},
    ],
)
def test_a_rule_made_in_python_with_a_wrong_end_or_author_changes_nothing(wrong: Any) -> None:
    rules = Rules(Config(host=(rule(1.0),)))
    with pytest.raises(ConfigError, match=r"\[\[host\]\] match='a\.example': (by|until)"):
        add(rules, HostRule(match="a.example", **wrong))
    with pytest.raises(ConfigError, match=r"(by|until)"):
        Rules(Config(host=(HostRule(match="a.example", **wrong),)))
    assert rules.for_host("a.example").own == 1.0


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e12, True, "60"])
def test_a_duration_that_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="not a number of seconds from 0 to ten years"):
        lasting(rule(1.0), seconds, 0.0)
    with pytest.raises(ConfigError, match="either `seconds` or the rule's `until`"):
        lasting(rule(1.0, 5.0), 5.0, 0.0)


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
        add(rules, HostRule(match="a.example", group="x"))
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
