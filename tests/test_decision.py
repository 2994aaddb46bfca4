"""The answer about one URL: what it is worth, what it says, how it looks in JSON."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from datetime import UTC, datetime
from enum import StrEnum

import msgspec
import pytest

from gatekeeper.decision import Decision, Reason, State, Verdict
from gatekeeper.robots import Rule
from tests.gate_support import decided

RULE = Rule(line=7, field="Disallow", value="/x", text="Disallow: /x  # not here")


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_an_allow_decision_is_true(verdict: Verdict) -> None:
    assert bool(decided(verdict)) is (verdict is Verdict.ALLOW)


def test_a_decision_is_immutable() -> None:
    with pytest.raises(AttributeError):
        decided().verdict = Verdict.ALLOW  # type: ignore[misc]


@pytest.mark.parametrize("enum", [Verdict, Reason, State])
def test_the_values_of_enums_are_their_names_in_lower_case(enum: type[StrEnum]) -> None:
    for member in enum:
        assert member.value == member.name.lower()


def texts_of_reasons() -> dict[str, str]:
    """The text under each word of `Reason`, in one line."""
    body = ast.parse(inspect.getsource(Reason)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for word, text in itertools.pairwise(body):
        if isinstance(word, ast.Assign) and isinstance(text, ast.Expr):
            found[ast.literal_eval(word.value)] = " ".join(ast.literal_eval(text.value).split())
    return found


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_says_its_verdicts_and_what_happened(reason: Reason) -> None:
    verdicts, colon, meaning = texts_of_reasons()[reason].partition(": ")
    assert colon
    assert set(verdicts.split(", ")) <= set(Verdict)
    assert meaning.endswith(".")


def test_explain_names_the_deciding_line() -> None:
    assert decided(rule=RULE).explain() == (
        "deny https://a.example/x for bot: rule (line 7: Disallow: /x  # not here)"
    )


def test_a_decision_without_a_user_agent_shows_none() -> None:
    assert decided(user_agent="").explain() == "deny https://a.example/x: rule"


def test_a_deferral_says_when_to_ask_again() -> None:
    retry_at = datetime(2026, 11, 20, 12, tzinfo=UTC)
    text = decided(Verdict.DEFER, reason=Reason.TIMEOUT, retry_at=retry_at).explain()
    assert text == ("defer https://a.example/x for bot: timeout; ask again at 2026-11-20T12:00:00Z")


def test_explain_tells_the_reason_of_the_operator() -> None:
    text = decided(reason=Reason.OPERATOR, state=State.OVERRIDE, note="by request").explain()
    assert text.endswith(": operator (by request)")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Disallow: /\x1b[2J", r"Disallow: /\x1b[2J"),
        ("Disallow:\t/x", r"Disallow:\t/x"),
        ("Disallow: /\u202ex", r"Disallow: /\u202ex"),
        ("Disallow: /\u2028x", r"Disallow: /\u2028x"),
        ("Disallow: /ü", "Disallow: /ü"),
        ("Disallow: /" + "x" * 500_000, "Disallow: /" + "x" * 188 + "…"),
    ],
)
def test_text_of_a_site_is_escaped_in_explain(written: str, shown: str) -> None:
    rule = Rule(line=1, field="Disallow", value="", text=written)
    assert decided(rule=rule).explain().endswith(f"(line 1: {shown})")


def test_json_has_the_names_of_the_fields() -> None:
    at = datetime(2026, 11, 20, 12, tzinfo=UTC)
    decision = decided(
        rule=RULE,
        state=State.PARSED,
        robots_status=200,
        fetched_at=at,
        hops=("https://a.example/robots.txt",),
        crawl_delay=2.5,
        id="f00-1",
    )
    assert json.loads(msgspec.json.encode(decision)) == {
        "verdict": "deny",
        "reason": "rule",
        "url": "https://a.example/x",
        "origin": "https://a.example",
        "user_agent": "bot",
        "state": "parsed",
        "rule": {
            "line": 7,
            "field": "Disallow",
            "value": "/x",
            "text": "Disallow: /x  # not here",
        },
        "retry_at": None,
        "robots_status": 200,
        "fetched_at": "2026-11-20T12:00:00Z",
        "expires_at": None,
        "hops": ["https://a.example/robots.txt"],
        "crawl_delay": 2.5,
        "conflict": False,
        "clamped": False,
        "note": None,
        "id": "f00-1",
    }


def test_a_decision_comes_back_from_its_json() -> None:
    decision = decided(rule=RULE, retry_at=datetime(2026, 11, 20, tzinfo=UTC))
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
