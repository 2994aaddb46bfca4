"""Each row of the table, from the head of a response or from an exception."""

from __future__ import annotations

import errno
import socket
import ssl
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from gatekeeper.config import FetchConfig
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.errors import AddressRefused
from gatekeeper.fetching.outcomes import CacheTime, Outcome, classify_error, classify_head

PLAIN = FetchConfig()


def of_status(status: int, config: FetchConfig = PLAIN, **headers: str) -> Outcome:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return classify_head(status, named, config=config)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.RULES),
        (201, Outcome.RULES),
        (202, Outcome.CHALLENGE),
        (203, Outcome.TRANSFORMED_RULES),
        (204, Outcome.EMPTY),
        (205, Outcome.EMPTY),
        (206, Outcome.INVALID_RESPONSE),
        (101, Outcome.INVALID_RESPONSE),
        (600, Outcome.INVALID_RESPONSE),
        (999, Outcome.INVALID_RESPONSE),
        (304, Outcome.NOT_MODIFIED),
        (301, Outcome.REDIRECT),
        (302, Outcome.REDIRECT),
        (303, Outcome.REDIRECT),
        (307, Outcome.REDIRECT),
        (308, Outcome.REDIRECT),
        (300, Outcome.BAD_REDIRECT),
        (305, Outcome.BAD_REDIRECT),
        (306, Outcome.BAD_REDIRECT),
        (402, Outcome.PAYMENT_REQUIRED),
        (404, Outcome.NO_FILE),
        (410, Outcome.NO_FILE),
        (400, Outcome.NO_FILE_SAID_OTHERWISE),
        (401, Outcome.NO_FILE_SAID_OTHERWISE),
        (403, Outcome.NO_FILE_SAID_OTHERWISE),
        (451, Outcome.NO_FILE_SAID_OTHERWISE),
        (499, Outcome.NO_FILE_SAID_OTHERWISE),
        (408, Outcome.CLIENT_ERROR),
        (421, Outcome.CLIENT_ERROR),
        (425, Outcome.CLIENT_ERROR),
        (429, Outcome.RATE_LIMITED),
        (500, Outcome.SERVER_ERROR),
        (503, Outcome.SERVER_ERROR),
        (520, Outcome.SERVER_ERROR),
        (599, Outcome.SERVER_ERROR),
        (511, Outcome.CAPTIVE_PORTAL),
    ],
)
def test_each_status_has_its_outcome(status: int, outcome: Outcome) -> None:
    assert of_status(status) is outcome


@pytest.mark.parametrize("status", [202, 403, 405, 503])
def test_a_bot_challenge_is_no_answer_about_the_file(status: int) -> None:
    assert of_status(status, cf_mitigated="challenge") is Outcome.CHALLENGE
    assert of_status(status, x_amzn_waf_action="captcha") is Outcome.CHALLENGE


@pytest.mark.parametrize("status", [400, 401, 403, 418])
@pytest.mark.parametrize(
    ("field", "value", "outcome"),
    [
        ("www_authenticate", 'License error="invalid_request"', Outcome.LICENSE_REQUIRED),
        ("www_authenticate", 'Basic realm="a", License', Outcome.LICENSE_REQUIRED),
        ("www_authenticate", 'License, Payment id="1"', Outcome.PAYMENT_REQUIRED),
        ("www_authenticate", 'L402 macaroon="a", invoice="b"', Outcome.PAYMENT_REQUIRED),
        ("www_authenticate", 'Basic realm="License"', Outcome.NO_FILE_SAID_OTHERWISE),
        ("crawler_price", "USD 0.01", Outcome.PAYMENT_REQUIRED),
        ("payment_required", "e30=", Outcome.PAYMENT_REQUIRED),
    ],
)
def test_a_demand_to_pay_or_license_means_no_file(
    status: int, field: str, value: str, outcome: Outcome
) -> None:
    found = of_status(status, **{field: value})
    assert found is outcome
    assert found.row.verdict is Verdict.ALLOW


def test_a_demand_for_a_license_changes_no_other_status() -> None:
    for status in (200, 301, 404, 410, 429, 503):
        assert of_status(status, www_authenticate="License") is of_status(status)
    for status in (401, 403):
        deny = FetchConfig(on_401="deny", on_403="deny")
        assert of_status(status, deny, www_authenticate="License") is Outcome.ACCESS_RESTRICTED


def test_a_bot_challenge_can_be_judged_by_its_status() -> None:
    by_status = FetchConfig(challenge="status")
    assert of_status(403, by_status, cf_mitigated="challenge") is Outcome.NO_FILE_SAID_OTHERWISE
    assert of_status(202, by_status) is Outcome.RULES


@pytest.mark.parametrize("status", [401, 403])
def test_the_operator_may_read_refusals_as_the_1996_draft_does(status: int) -> None:
    config = FetchConfig(on_401="deny", on_403="deny")
    assert of_status(status, config) is Outcome.ACCESS_RESTRICTED
    assert Outcome.ACCESS_RESTRICTED.row.verdict is Verdict.DENY


def connector_error(inner: OSError, kind: Any = aiohttp.ClientConnectorError) -> Exception:
    key = SimpleNamespace(host="a.test", port=80, ssl=True)
    return kind(key, inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (connector_error(ConnectionRefusedError(errno.ECONNREFUSED, "no")), Outcome.CONNECT_FAILED),
        (connector_error(ConnectionResetError(errno.ECONNRESET, "no")), Outcome.CONNECT_FAILED),
        (connector_error(OSError(errno.ENETUNREACH, "no")), Outcome.NO_ROUTE),
        (connector_error(OSError(errno.EHOSTUNREACH, "no")), Outcome.NO_ROUTE),
        (connector_error(OSError(errno.ETIMEDOUT, "no")), Outcome.CONNECT_TIMEOUT),
        # Of several addresses: one that refused was reached.
        (
            connector_error(OSError("Multiple exceptions: [Errno 101] no, [Errno 111] no")),
            Outcome.CONNECT_FAILED,
        ),
        (
            connector_error(OSError("Multiple exceptions: [Errno 101] no, [Errno 110] no")),
            Outcome.CONNECT_TIMEOUT,
        ),
        (
            connector_error(OSError("Multiple exceptions: [Errno 101] no, [Errno 113] no")),
            Outcome.NO_ROUTE,
        ),
        (connector_error(OSError(errno.EMFILE, "too many files")), Outcome.NO_DESCRIPTORS),
        (
            connector_error(OSError(errno.EMFILE, "full"), aiohttp.ClientConnectorDNSError),
            Outcome.NO_DESCRIPTORS,
        ),
        (connector_error(OSError(errno.ENOMEM, "no memory")), Outcome.OURS),
        (
            connector_error(
                socket.gaierror(socket.EAI_NONAME, "unknown"), aiohttp.ClientConnectorDNSError
            ),
            Outcome.DNS_NXDOMAIN,
        ),
        (
            connector_error(
                socket.gaierror(socket.EAI_AGAIN, "later"), aiohttp.ClientConnectorDNSError
            ),
            Outcome.DNS_FAILURE,
        ),
        (
            connector_error(ssl.SSLError(1, "handshake"), aiohttp.ClientConnectorSSLError),
            Outcome.TLS,
        ),
        (connector_error(AddressRefused()), Outcome.BLOCKED),
        (connector_error(AddressRefused(), aiohttp.ClientConnectorDNSError), Outcome.BLOCKED),
        (TimeoutError(), Outcome.TIMEOUT),
        (aiohttp.ServerDisconnectedError(), Outcome.TRUNCATED),
        (aiohttp.ClientPayloadError("short"), Outcome.TRUNCATED),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Outcome.TRUNCATED),
        (
            aiohttp.ClientResponseError(None, (), status=400, message="bad head"),  # type: ignore[arg-type]
            Outcome.INVALID_RESPONSE,
        ),
        (RuntimeError("nobody foresaw this"), Outcome.INTERNAL),
        (KeyError("nor this"), Outcome.INTERNAL),
    ],
)
def test_each_exception_has_its_outcome(error: Exception, outcome: Outcome) -> None:
    assert classify_error(error) is outcome


def test_an_address_refused_on_a_redirect_is_held_against_the_site() -> None:
    outcome = classify_error(connector_error(AddressRefused()), first_hop=False)
    assert outcome is Outcome.EGRESS_POLICY


def test_a_timeout_before_the_connection_may_be_our_own_fault() -> None:
    outcome = classify_error(TimeoutError(), connected=False)
    assert outcome is Outcome.CONNECT_TIMEOUT
    assert outcome.row.local


def test_every_row_of_the_specification_is_in_the_table() -> None:
    assert {outcome.row.number for outcome in Outcome} == set(range(29))


def test_only_a_file_an_empty_one_or_a_missing_one_allows() -> None:
    welcome = {outcome for outcome in Outcome if outcome.row.verdict is Verdict.ALLOW}
    assert welcome == {
        Outcome.EMPTY,
        Outcome.SOFT_404,
        Outcome.NOT_TEXT,
        Outcome.TOO_MANY_REDIRECTS,
        Outcome.NO_FILE,
        Outcome.NO_FILE_SAID_OTHERWISE,
        Outcome.PAYMENT_REQUIRED,
        Outcome.LICENSE_REQUIRED,
    }


def test_an_unreachable_outcome_never_allows() -> None:
    for outcome in Outcome:
        if outcome.row.state is State.UNREACHABLE:
            assert outcome.row.verdict in {Verdict.DEFER, Verdict.DENY}
            assert outcome.row.cache_time is not CacheTime.FRESH


def test_row_names_are_unique_and_name_their_outcome() -> None:
    assert [Outcome.named(outcome.row.name) for outcome in Outcome] == list(Outcome)


def test_a_row_that_this_version_does_not_know_defers() -> None:
    assert Outcome.named("invented_later") is Outcome.INTERNAL
    assert Outcome.INTERNAL.row.reason is Reason.INTERNAL
