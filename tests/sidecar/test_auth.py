"""Authentication: tokens (T6), Host and Origin (T4), addresses (T5), trusted peers (T7)."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from gatekeeper.config import Config, ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.reload import check_server
from gatekeeper.sidecar.routing import Problem
from gatekeeper.sidecar.security import (
    ANY_LITERAL,
    Admission,
    Networks,
    Tokens,
    accepted_hosts,
    read_tokens,
)

ONE, TWO = "a" * 32, "b" * 40


def admission_of(*tokens: str, hosts: frozenset[str] | None = None) -> Admission:
    return Admission(
        ServerConfig(), tokens=Tokens(tuple(token.encode() for token in tokens)), hosts=hosts
    )


def refusal(subject: Admission, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(Problem) as caught:
        subject.admit(make_mocked_request("GET", "/v1/check", headers=named))
    return caught.value.status


def admitted(subject: Admission, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return subject.admit(make_mocked_request("GET", "/v1/check", headers=named))


@pytest.mark.parametrize(("token", "client"), [(ONE, "token-1"), (TWO, "token-2")])
def test_t6_two_tokens_are_valid_during_rotation(token: str, client: str) -> None:
    assert admitted(admission_of(ONE, TWO), Authorization=f"Bearer {token}") == client


@pytest.mark.parametrize(
    "header", ["", "Bearer", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}", f"Basic {ONE}", "Bearer ä"]
)
def test_t6_anything_but_a_token_is_refused(header: str) -> None:
    assert refusal(admission_of(ONE), Authorization=header) == 401


@pytest.mark.parametrize(
    ("header", "detail"),
    [
        ("", "a bearer token is needed"),
        (f"Basic {ONE}", "a bearer token is needed"),
        (f"Bearer {TWO}", "the bearer token is not in server.token_file"),
        (f"bearer {ONE[:-1]}", "the bearer token is not in server.token_file"),
    ],
)
def test_t6_a_wrong_token_and_a_missing_one_have_different_errors(header: str, detail: str) -> None:
    with pytest.raises(Problem) as caught:
        admission_of(ONE).admit_by({"Authorization": header} if header else {}, None, None)
    assert caught.value.detail == detail


def test_t6_tokens_never_show_in_a_representation() -> None:
    assert ONE not in repr(Tokens((ONE.encode(),)))


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "LOCALHOST:8750"])
def test_t4_a_host_header_with_the_sidecars_own_address_is_accepted(host: str) -> None:
    ours = accepted_hosts(ServerConfig(), [("127.0.0.1", 8750)])

    admitted(admission_of(hosts=ours), Host=host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "127.0.0.1.evil.example:8750",
        "127.0.0.1:87500",
        "127.0.0.1",
        "127.0.0.2:8750",
    ],
)
def test_t4_a_host_header_similar_to_the_sidecars_address_is_refused(host: str) -> None:
    ours = accepted_hosts(ServerConfig(), [("127.0.0.1", 8750)])

    assert refusal(admission_of(hosts=ours), Host=host) == 403


def test_t4_a_host_header_listed_in_the_settings_is_accepted() -> None:
    server = ServerConfig(allowed_hosts=("gate.internal",))

    admitted(
        admission_of(hosts=accepted_hosts(server, [("127.0.0.1", 8750)])), Host="gate.internal"
    )


def test_t4_listening_on_all_addresses_accepts_any_literal_address_but_no_name() -> None:
    ours = accepted_hosts(ServerConfig(host="0.0.0.0"), [("0.0.0.0", 8750)])

    admitted(admission_of(hosts=ours), Host="192.0.2.7:8750")
    admitted(admission_of(hosts=ours), Host="[2001:db8::1]:8750")
    assert refusal(admission_of(hosts=ours), Host="evil.example:8750") == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8750.evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_t4_a_request_of_a_foreign_web_page_is_refused(headers: dict[str, str]) -> None:
    subject = admission_of(hosts=frozenset({"127.0.0.1:8750"}))

    assert refusal(subject, Host="127.0.0.1:8750", **headers) == 403


def test_t4_a_request_of_the_sidecars_own_pages_is_accepted() -> None:
    subject = admission_of(hosts=frozenset({"127.0.0.1:8750"}))

    admitted(
        subject,
        Host="127.0.0.1:8750",
        Origin="http://127.0.0.1:8750",
        Sec_Fetch_Site="same-origin",
    )


def test_t4_a_unix_socket_has_no_host_to_judge() -> None:
    admitted(admission_of(hosts=None), Host="whatever")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_t5_listening_on_a_public_address_without_a_token_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="token_file"):
        check_server(Config(server=ServerConfig(host=host)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_t5_listening_on_loopback_needs_no_token(host: str) -> None:
    check_server(Config(server=ServerConfig(host=host)))


def test_t5_listening_on_a_public_address_with_a_token_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(ONE, encoding="utf-8")

    check_server(Config(server=ServerConfig(host="0.0.0.0", token_file=str(path))))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no token"),
        (f"{ONE}\n{TWO}\n{ONE}c", "3 tokens"),
        ("short", "32 characters"),
    ],
)
def test_a_bad_token_file_says_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=problem):
        read_tokens(str(path))


def test_a_token_file_may_have_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# for the crawler\n\n{ONE}\n", encoding="utf-8")

    assert read_tokens(str(path)).tokens == Tokens((ONE.encode(),)).tokens


@pytest.mark.parametrize(
    ("address", "inside"),
    [("127.0.0.1", True), ("127.0.0.2", False), ("::ffff:127.0.0.1", True), ("x", False)],
)
def test_networks_of_trusted_peers_include_mapped_addresses(address: str, inside: bool) -> None:
    assert (address in Networks(("127.0.0.1/32", "::1/128"), setting="x")) is inside


def test_a_bad_range_names_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"server\.trusted_peers"):
        Networks(("10.0.0.0/33",), setting="server.trusted_peers")


def test_no_host_header_equals_the_mark_for_any_literal_address() -> None:
    assert refusal(admission_of(hosts=frozenset({ANY_LITERAL})), Host="name") == 403
