"""The guard's judgement of URLs, the operator's lists, its counters and its log."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import Any

import pytest

from gatekeeper.config import Config, GuardConfig
from gatekeeper.decision import BLOCKED_NOTE
from gatekeeper.errors import AddressRefused, ConfigError
from gatekeeper.fetching.allowed_addresses import (
    ADDRESS_NOTE,
    NAME_NOTE,
    NO_NAME_NOTE,
    NO_PORT_NOTE,
    PORT_NOTE,
    USERINFO_NOTE,
    Guard,
    Kind,
    Refusal,
)
from gatekeeper.fetching.guard import refuse_proxy


def guard_with(**settings: object) -> Guard:
    return Guard(Config(guard=GuardConfig(**settings)))


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("ftp://example.com/", Kind.MALFORMED),
        ("http://exa%6dple.com/", Kind.MALFORMED),
        ("http://127.1/", Kind.MALFORMED),
        ("http://" + "a" * 64 + ".com/", Kind.MALFORMED),
        ("http://" + "a." * 127 + "com/", Kind.MALFORMED),
        ("http://user@example.com/", Kind.USERINFO),
        ("http://@example.com/", Kind.USERINFO),
        ("http://example.com:22/", Kind.PORT),
        ("http://localhost/", Kind.NAME),
        ("http://redis./", Kind.NAME),
        ("http://127.0.0.1/", Kind.LOOPBACK),
        ("http://①②⑦.0.0.1/", Kind.LOOPBACK),
        ("http://[::ffff:a9fe:a9fe]/", Kind.LINK_LOCAL),
        ("http://[2002:7f00:1::]/", Kind.TRANSITION),
    ],
)
def test_each_refused_url_has_its_kind(url: str, kind: Kind) -> None:
    assert Guard().refuses_url(url).kind is kind


def test_the_default_refuses_loopback() -> None:
    guard = Guard(Config())
    assert guard.refuses_address("127.0.0.1", 80)
    assert guard.refuses_address("::1", 80)


def test_the_text_of_every_refusal_is_blocked() -> None:
    guard = Guard()
    refusals = [
        guard.refuses_url(url) for url in ("http://127.0.0.1/", "http://a:b@c.com/", "nonsense")
    ]
    assert {str(refusal) for refusal in refusals} == {"blocked"}
    assert str(AddressRefused()) == "blocked"
    assert AddressRefused().strerror == "blocked"


def test_refusals_are_equal_by_value_and_immutable() -> None:
    one, other = Guard().refuses_url("http://redis/"), Guard().refuses_url("http://redis/")
    assert one == other
    with pytest.raises(AttributeError):
        one.kind = Kind.PORT


# -- one authority, several URLs


@pytest.mark.parametrize(
    "url",
    [
        "http://u:p@seen.example.com/",
        "http://seen.example.com:22/",
        "http://seen.example.com/a\nb",
        "http://seen.example.com\\@10.0.0.1/",
        "http://seen.example.com@10.0.0.1/",
    ],
)
def test_a_known_authority_does_not_pass_another_url(url: str) -> None:
    guard = Guard()
    assert guard.refuses_url("http://seen.example.com/") is None
    assert guard.refuses_url(url) is not None


def test_the_memory_of_verdicts_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("gatekeeper.fetching.allowed_addresses.MAX_CACHED_ORIGINS", 10)
    guard = Guard()
    origins = [f"http://h{number}.example.com" for number in range(100)]
    assert not any(map(guard.refuses_url, origins))
    assert 0 < sum(map(guard.passed, origins)) <= 10


# -- the operator's lists


def test_an_allowed_range_opens_its_addresses_only() -> None:
    guard = guard_with(allow=("10.1.0.0/16", "::1", "192.168.7.7"))
    assert guard.refuses_address("10.1.2.3", 80) is None
    assert guard.refuses_url("http://10.1.2.3:8080/") is None
    assert guard.refuses_url("http://[::1]/") is None
    assert guard.refuses_address("192.168.7.7", 80) is None
    assert guard.refuses_address("10.2.0.0", 80).kind is Kind.PRIVATE
    assert guard.refuses_address("192.168.7.8", 80).kind is Kind.PRIVATE


def test_an_allowed_range_includes_its_mapped_addresses() -> None:
    guard = guard_with(allow=("10.1.0.0/16",))
    assert guard.refuses_address("::ffff:10.1.0.1", 80) is None
    assert guard.refuses_address("::ffff:10.2.0.1", 80) is not None


def test_all_of_ipv6_allowed_does_not_open_mapped_addresses() -> None:
    guard = guard_with(allow=("::/0",))
    assert guard.refuses_address("fd00::1", 80) is None
    assert guard.refuses_address("::ffff:127.0.0.1", 80).kind is Kind.LOOPBACK


def test_an_allowed_range_opens_no_bad_port() -> None:
    assert guard_with(allow=("10.0.0.0/8",)).refuses_address("10.0.0.1", 22).kind is Kind.PORT


def test_an_allowed_name_opens_the_addresses_it_resolves_to() -> None:
    guard = guard_with(allow=("Intranet.", "*.corp.internal"))
    assert guard.refuses_url("http://intranet/") is None
    assert guard.refuses_url("http://a.b.corp.internal/") is None
    assert guard.refuses_answer("10.0.0.1", 80, "intranet") is None
    assert guard.refuses_url("http://corp.internal/").kind is Kind.NAME
    assert guard.refuses_url("http://other/").kind is Kind.NAME
    assert guard.refuses_answer("10.0.0.1", 80, "other.com").kind is Kind.PRIVATE
    assert guard.refuses_url("http://10.0.0.1/").kind is Kind.PRIVATE


NO_NAME_OPENS = {
    "169.254.169.254": Kind.LINK_LOCAL,
    "::ffff:169.254.169.254": Kind.LINK_LOCAL,
    "64:ff9b::a9fe:a9fe": Kind.LINK_LOCAL,
    "fe80::1": Kind.LINK_LOCAL,
    "fe80::1%eth0": Kind.LINK_LOCAL,
    "127.0.0.1": Kind.LOOPBACK,
    "127.8.8.8": Kind.LOOPBACK,
    "::1": Kind.LOOPBACK,
    "::ffff:127.0.0.1": Kind.LOOPBACK,
    "64:ff9b::7f00:1": Kind.LOOPBACK,
    "0.0.0.0": Kind.THIS_NETWORK,
    "::": Kind.THIS_NETWORK,
    "2002:7f00:1::": Kind.TRANSITION,
    "2002:a9fe:a9fe::": Kind.TRANSITION,
    "::127.0.0.1": Kind.TRANSITION,
}


@pytest.mark.parametrize("nat64", ["unwrap", "deny"])
@pytest.mark.parametrize("ip", NO_NAME_OPENS)
def test_t1_no_allowed_name_opens_link_local_or_this_machine(ip: str, nat64: str) -> None:
    guard = guard_with(allow=("intranet", "*.corp.example", "localhost"), nat64=nat64)
    kind = NO_NAME_OPENS[ip]
    for name in ("intranet", "a.corp.example", "INTRANET.", "a.localhost"):
        assert guard.refuses_answer(ip, 80, name).kind in (kind, Kind.NAT64)
    own = guard.refuses_answer(ip, 80, "localhost")
    assert own is None if kind is Kind.LOOPBACK else own.kind is kind


@pytest.mark.parametrize("ip", NO_NAME_OPENS)
def test_an_allowed_range_opens_link_local_and_this_machine(ip: str) -> None:
    guard = guard_with(allow=("0.0.0.0/0", "::/0"))
    assert guard.refuses_answer(ip, 80, "intranet.example") is None


def test_the_log_says_that_a_name_does_not_open_loopback(caplog) -> None:
    with caplog.at_level(logging.WARNING, "gatekeeper.guard"):
        guard_with(allow=("intranet",)).refuses_answer("127.0.0.1", 80, "intranet")
    assert "which a name does not open: list a CIDR range" in caplog.text


def test_a_denied_address_is_refused_though_its_range_is_allowed() -> None:
    guard = guard_with(
        allow=("10.0.0.0/8", "*.corp.internal"), deny=("10.0.0.5", "secret.corp.internal")
    )
    assert guard.refuses_address("10.0.0.4", 80) is None
    assert guard.refuses_address("10.0.0.5", 80).kind is Kind.OPERATOR
    assert guard.refuses_address("::ffff:10.0.0.5", 80).kind is Kind.OPERATOR
    assert guard.refuses_url("http://secret.corp.internal/").kind is Kind.OPERATOR


def test_denied_public_addresses_and_names_are_refused() -> None:
    guard = guard_with(deny=("93.184.0.0/16", "*.example.com", "2606::/16"))
    assert guard.refuses_address("93.184.215.14", 80).kind is Kind.OPERATOR
    assert guard.refuses_address("2606:4700::1", 80).kind is Kind.OPERATOR
    assert guard.refuses_url("http://www.example.com/").kind is Kind.OPERATOR
    assert guard.refuses_url("http://example.com/") is None


def test_a_denied_range_holds_for_the_address_as_written() -> None:
    guard = guard_with(deny=("64:ff9b::/96",))
    assert guard.refuses_address("64:ff9b::808:808", 80).kind is Kind.OPERATOR
    assert guard.refuses_address("8.8.8.8", 80) is None


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.5/8", "127.1", "", "a b", "http://x/"])
def test_an_entry_that_is_neither_range_nor_name_is_a_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"guard\.allow"):
        guard_with(allow=(entry,))


# -- our own listeners (T3)


def test_the_own_listener_stays_refused_though_its_range_is_allowed() -> None:
    guard = guard_with(allow=("127.0.0.0/8",))
    guard.listens_on("127.0.0.1", 8750)
    assert guard.refuses_address("127.0.0.1", 8750).kind is Kind.SELF
    assert guard.refuses_address("::ffff:127.0.0.1", 8750).kind is Kind.SELF
    assert guard.refuses_url("http://127.0.0.1:8750/v1/check").kind is Kind.SELF


def test_the_own_listener_is_address_and_port_together() -> None:
    guard = guard_with(allow=("127.0.0.0/8",))
    guard.listens_on("127.0.0.1", 8750)
    assert guard.refuses_address("127.0.0.1", 8751) is None
    assert guard.refuses_address("127.0.0.2", 8750) is None


def test_a_verdict_given_before_the_listener_opened_is_forgotten() -> None:
    guard = guard_with(allow=("127.0.0.0/8",))
    assert guard.refuses_url("http://127.0.0.1:8750/") is None
    assert guard.refuses_answer("127.0.0.1", 8750, "127.0.0.1") is None
    guard.listens_on("127.0.0.1", 8750)
    assert guard.refuses_url("http://127.0.0.1:8750/").kind is Kind.SELF
    assert guard.refuses_answer("127.0.0.1", 8750, "127.0.0.1").kind is Kind.SELF


def test_an_address_allowed_by_one_name_or_port_is_refused_for_others() -> None:
    guard = guard_with(allow=("inner.example",), ports=(80,))
    assert guard.refuses_answer("10.0.0.1", 80, "inner.example") is None
    assert guard.refuses_answer("10.0.0.1", 80, "other.example").kind is Kind.PRIVATE
    assert guard.refuses_answer("10.0.0.1", 80, "10.0.0.1").kind is Kind.PRIVATE
    assert guard.refuses_address("10.0.0.1", 80).kind is Kind.PRIVATE


def test_an_address_that_passed_is_judged_anew_by_other_settings() -> None:
    guard = guard_with(allow=("127.0.0.0/8",))
    assert guard.refuses_answer("127.0.0.1", 80, "127.0.0.1") is None
    guard.adjust(GuardConfig())
    assert guard.refuses_answer("127.0.0.1", 80, "127.0.0.1").kind is Kind.LOOPBACK


def test_the_addresses_of_this_machine_are_looked_up_at_every_dial() -> None:
    ours: set[str] = set()
    guard = Guard(
        Config.from_dict({"guard": {"allow": ["10.0.0.0/8"]}}),
        is_local=lambda ip: str(ip) in ours,
    )
    guard.listens_on("0.0.0.0", 8750)
    assert guard.refuses_answer("10.0.0.1", 8750, "a.example") is None
    ours.add("10.0.0.1")
    assert guard.refuses_answer("10.0.0.1", 8750, "a.example").kind is Kind.SELF


@pytest.mark.parametrize(
    ("listener", "closed"),
    [
        ("0.0.0.0", {"127.0.0.1": True, "0.0.0.0": True, "10.0.0.9": True, "::1": False}),
        ("::", {"127.0.0.1": True, "::1": True, "10.0.0.9": True, "10.0.0.10": False}),
        ("", {"127.0.0.1": True, "::1": True, "10.0.0.10": False}),
    ],
)
def test_a_listener_on_every_interface_closes_all_addresses_of_this_machine(
    listener: str, closed: dict[str, bool]
) -> None:
    own = {ip_address(text) for text in ("127.0.0.1", "::1", "10.0.0.9")}
    config = Config(guard=GuardConfig(allow=("0.0.0.0/0", "::/0")))
    guard = Guard(config, is_local=own.__contains__)
    guard.listens_on(listener, 8750)
    refused = {ip: guard.refuses_address(ip, 8750) is not None for ip in closed}
    assert refused == closed


def test_the_unspecified_address_is_this_machine() -> None:
    guard = guard_with(allow=("0.0.0.0/0",))
    guard.listens_on("127.0.0.1", 8750)
    assert guard.refuses_address("0.0.0.0", 8750).kind is Kind.SELF
    assert guard.refuses_address("0.0.0.0", 8751) is None


def test_this_machine_knows_its_own_addresses() -> None:
    guard = guard_with(allow=("127.0.0.0/8",))
    guard.listens_on("0.0.0.0", 8750)
    assert guard.refuses_address("127.0.0.1", 8750).kind is Kind.SELF
    assert guard.refuses_address("93.184.215.14", 8750) is None


def test_a_listener_without_a_numeric_address_is_refused() -> None:
    with pytest.raises(ConfigError):
        Guard().listens_on("localhost", 80)


# -- counting and logging


def test_refusals_are_counted_by_kind() -> None:
    guard = Guard()
    for url in ("http://10.0.0.1/", "http://10.0.0.1/a", "http://redis/", "http://example.com/"):
        guard.refuses_url(url)
    guard.refuses_address("1.1.1.1", 80)
    stats = guard.stats()
    assert stats.refused == {"private": 2, "name": 1}
    assert stats.mode == "full"


def test_a_refusal_is_logged_once_with_its_detail(caplog) -> None:
    guard = Guard()
    with caplog.at_level(logging.WARNING, "gatekeeper.guard"):
        for _ in range(3):
            guard.refuses_url("http://10.0.0.1:8080/secret?token=1")
        guard.refuses_answer("127.0.0.1", 80, "evil.example.com")
    remedy = "if it is your own network, let it in with guard.allow (--allow-address)"
    assert caplog.messages == [
        f"refused (private): 10.0.0.1 port 8080: private address; {remedy}",
        f"refused (loopback): evil.example.com -> 127.0.0.1 port 80: loopback address; {remedy}",
    ]


def test_the_log_names_a_remedy_only_where_one_exists(caplog) -> None:
    guard = guard_with(deny=("evil.example.com",))
    guard.listens_on("127.0.0.1", 80)
    guard.refuses_url("http://example.com:22/")
    guard.refuses_url("http://127.0.0.1:80/")
    guard.refuses_url("http://evil.example.com/")
    assert caplog.messages == [
        "refused (port): example.com: port 22; guard.ports can list it",
        "refused (self): 127.0.0.1 port 80: our own listener",
        "refused (operator): evil.example.com: on the deny list",
    ]


def test_credentials_and_control_characters_stay_out_of_the_log(caplog) -> None:
    guard = Guard()
    guard.refuses_url("http://ann:secret@example.com/?key=hidden")
    guard.refuses_url("http://example.com/\r\nforged line")
    guard.refuses_url("http://" + "x" * 10_000)
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text
    assert all("\n" not in message and len(message) < 500 for message in caplog.messages)


def test_the_memory_of_logged_refusals_is_bounded(monkeypatch, caplog) -> None:
    monkeypatch.setattr("gatekeeper.fetching.allowed_addresses.MAX_LOGGED", 10)
    guard = Guard()
    for number in range(100):
        guard.refuses_url(f"http://10.0.0.{number}/")
    caplog.clear()
    guard.refuses_url("http://10.0.0.99/")
    assert not caplog.messages
    guard.refuses_url("http://10.0.0.0/")  # forgotten, and so logged again
    assert len(caplog.messages) == 1
    assert guard.stats().refused == {"private": 102}


# -- proxies (T19)


def test_a_proxy_needs_the_url_only_mode() -> None:
    refuse_proxy("full", None)
    refuse_proxy("url-only", "http://proxy:3128")
    with pytest.raises(ConfigError, match="url-only"):
        refuse_proxy("full", "http://proxy:3128")


def test_refusals_of_one_kind_differ_by_their_detail() -> None:
    assert Refusal(Kind.PORT, "a") != Refusal(Kind.PORT, "b")
    assert str(Refusal(Kind.PORT, "a")) == str(Refusal(Kind.NAME, "b"))


def test_no_note_of_a_refusal_is_cut() -> None:
    """The text of a decision would cut a note at 200 characters."""
    ports = PORT_NOTE.format(65_535), NO_PORT_NOTE.format(0)
    notes = (BLOCKED_NOTE, ADDRESS_NOTE, NAME_NOTE, NO_NAME_NOTE, *ports, USERINFO_NOTE)
    assert max(map(len, notes)) <= 200


@pytest.mark.parametrize(
    ("raw", "settings", "corrected"),
    [
        ("http://10.0.0.1/", {"allow": ["10.0.0.0/8"]}, None),
        ("http://169.254.169.254/", {"allow": ["169.254.169.254"]}, None),
        ("http://224.0.0.1/", {"allow": ["224.0.0.1"]}, None),
        ("http://localhost/", {"allow": ["localhost"]}, None),
        ("http://intranet/", {"allow": ["intranet"]}, None),
        ("http://a.test:22/", {"ports": [22, 80]}, None),
        ("http://a.test:0/", {}, "http://a.test:81/"),
        ("http://u:p@a.test/", {}, "http://a.test/"),
        (f"http://{'a' * 64}.test/", {}, f"http://{'a' * 63}.test/"),
        ("mailto:a@b.test", {}, "http://b.test/"),
    ],
)
def test_the_remedy_named_in_a_note_lifts_the_refusal(
    raw: str, settings: dict[str, Any], corrected: str | None
) -> None:
    refusal = Guard(Config()).refuses_url(raw)
    assert refusal is not None
    for name in ("allow", "ports"):
        assert (name in settings) <= (f"guard.{name}" in refusal.note)
    if corrected:
        assert "guard.allow" not in refusal.note
        assert "guard.ports" not in refusal.note
    guard = Guard(Config.from_dict({"guard": settings}))
    assert guard.refuses_url(corrected or raw) is None
