"""One tree of errors: what catches what, and what each of them says."""

from __future__ import annotations

import copy
import inspect
import pickle
from datetime import UTC, datetime

import aiohttp
import pytest

from gatekeeper import errors, urls
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.errors import (
    AddressRefused,
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    GatekeeperError,
    HoldLapsed,
    InvalidURL,
    LeaseTimeout,
    LedgerLost,
    MissingExtra,
    SidecarError,
    StorageError,
)
from gatekeeper.pacing.deadlock import WaitsForItself

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
DECISION = Decision(
    verdict=Verdict.DEFER,
    reason=Reason.TIMEOUT,
    url="https://a.example/x",
    origin="https://a.example",
    user_agent="bot",
    retry_at=NOON,
)

EVERY = [
    InvalidURL("ftp://a.example", "not an http or https URL"),
    ConfigError("fetch.timout: no such setting"),
    MissingExtra("the fleet needs redis: pip install 'robots-gatekeeper[redis]'", name="redis"),
    Denied(DECISION),
    Deferred(DECISION),
    LeaseTimeout("https://a.example/x", "no lease within 5 s", retry_at=NOON),
    AddressRefused(),
    StorageError("state.db: full"),
    LedgerLost("redis://127.0.0.1: it does not answer"),
    HoldLapsed("the hold of a.example ran out"),
    SidecarError(401, "unauthorized", "a bearer token is needed"),
    GateClosed("the gate is closed"),
]


def test_every_error_class_is_tested() -> None:
    classes = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    assert {type(error).__name__ for error in EVERY} == classes - {"GatekeeperError"}


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_every_error_is_a_gatekeeper_error(error: Exception) -> None:
    assert isinstance(error, GatekeeperError)


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (InvalidURL, ValueError),
        (ConfigError, ValueError),
        (Denied, aiohttp.ClientError),
        (Deferred, Denied),
        (LeaseTimeout, aiohttp.ClientError),
        (LeaseTimeout, TimeoutError),
        (AddressRefused, OSError),
        (GateClosed, RuntimeError),
    ],
)
def test_every_error_is_of_its_builtin_class(error: type[Exception], also: type[Exception]) -> None:
    assert issubclass(error, also)


@pytest.mark.parametrize(
    "error",
    [*EVERY, WaitsForItself("https://a.example/x", "never", "https://a.example/y", "this task")],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_every_error_survives_pickling_and_copying(error: Exception, again: object) -> None:
    assert callable(again)
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_an_invalid_url_is_escaped_once() -> None:
    with pytest.raises(InvalidURL) as caught:
        urls.parse("http://a.test/\ud800")
    assert str(caught.value).startswith("'http://a.test/\\ud800': ")
    assert "\n" not in str(InvalidURL("a\nb", "no URL"))


def test_an_invalid_url_says_what_is_wrong() -> None:
    error = InvalidURL("http://a\x1b.example", "holds a control character")
    assert str(error) == r"'http://a\x1b.example': holds a control character"
    assert (error.url, error.problem) == ("http://a\x1b.example", "holds a control character")


def test_a_denial_says_what_its_decision_says() -> None:
    error = Deferred(DECISION)
    assert str(error) == DECISION.explain()
    assert error.decision is DECISION
    assert error.retry_at == NOON


def test_a_lease_that_did_not_come_says_when_it_may() -> None:
    error = LeaseTimeout("https://a.example/x", "no lease within 5 s", retry_at=NOON)
    assert str(error) == "no lease within 5 s"
    assert (error.url, error.retry_at) == ("https://a.example/x", NOON)
    assert error.errno is None


def test_the_text_of_a_refused_address_is_blocked() -> None:
    assert str(AddressRefused()) == "blocked"
    assert AddressRefused().args == ("blocked",)
