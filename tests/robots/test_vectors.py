"""The vectors in tests/vectors: every line that the text alone can decide, one test id a line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import urls
from gatekeeper.robots import Policy, RobotsTxt

VECTORS = Path(__file__).parent.parent / "vectors"


def cases(name: str) -> list[dict[str, Any]]:
    lines = (VECTORS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def decided_by_the_text(case: dict[str, Any]) -> bool:
    """Not those about HTTP, nor those whose file belongs to another origin than the URL."""
    if case["dialect"] == "http" or "http" in case:
        return False
    found_at = case.get("robots_url")
    return found_at is None or urls.split(found_at)[0] == urls.split(case["url"])[0]


ROBOTS = [case for case in cases("robots.jsonl") if decided_by_the_text(case)]
FROMMITZ = cases("frommitz.jsonl")
FROMMITZ_TXT = (VECTORS / "frommitz.txt").read_text(encoding="utf-8")


def moment(case: dict[str, Any]) -> datetime:
    at = case.get("at", "12:00Z")
    return datetime(2026, 1, 5, int(at[:2]), int(at[3:5]), tzinfo=UTC)


def rate(policy: Policy) -> list[dict[str, Any]]:
    return [
        {
            "documents": rate.documents,
            "seconds": rate.seconds,
            "window": rate.window and [f"{rate.window.start:%H:%M}", f"{rate.window.end:%H:%M}"],
        }
        for rate in policy.request_rates
    ]


def answers(case: dict[str, Any]) -> dict[str, Any]:
    """What we say to everything that the line asks."""
    robots = RobotsTxt.parse(case["robots_txt"], dialect=case["dialect"])
    policy = robots.policy(case["agent"], v2_semantics=case.get("semantics", "order"))
    url = case.get("url", "http://example.com/")
    asked = {
        "allowed": lambda: policy.allowed(url),
        "chosen": lambda: policy.match(url).dialect.value,
        "conflict": lambda: policy.match(url).conflict,
        "crawl_delay": lambda: policy.crawl_delay,
        "request_rate": lambda: rate(policy),
        "visit_time": lambda: [
            [f"{window.start:%H:%M}", f"{window.end:%H:%M}"] for window in policy.visit_times
        ],
        "in_visit_window": lambda: policy.may_visit(moment(case)),
        "delay_s": lambda: policy.interval(moment(case), case.get("fetch_took_s")),
        "sitemaps": lambda: list(robots.sitemaps),
        "licenses": lambda: list(robots.licenses),
        "comment": lambda: list(policy.comments),
        "content_usage": lambda: policy.content_usage(url),
        "content_signal": lambda: policy.content_signal,
    }
    return {question: answer() for question, answer in asked.items() if question in case}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in ROBOTS])
def test_each_vector_has_the_expected_answer(case: dict[str, Any]) -> None:
    assert answers(case) == {question: case[question] for question in answers(case)}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case["id"]) for case in ROBOTS if "allowed" in case]
)
def test_the_explanation_of_a_vector_agrees_with_its_verdict(case: dict[str, Any]) -> None:
    robots = RobotsTxt.parse(case["robots_txt"], dialect=case["dialect"])
    policy = robots.policy(case["agent"], v2_semantics=case.get("semantics", "order"))

    match = policy.match(case["url"])

    assert match.allowed is case["allowed"]
    assert policy.allowed(case["url"]) is case["allowed"]  # a second question, made ready by now
    if match.rule is not None:
        assert match.candidates[0].line == match.rule.line
        assert match.rule.text == robots.text.split("\n")[match.rule.line - 1]


READINGS = [
    ("2.0", "order", "allowed"),
    ("2.0", "precedence", "allowed_struck_precedence_this_file"),
    ("rfc9309", "order", "allowed_rfc9309"),
]


@pytest.mark.parametrize(
    ("case", "dialect", "semantics", "allowed"),
    [
        pytest.param(
            case, dialect, semantics, case[column], id=f"{case['agent']}{case['path']}-{column}"
        )
        for case in FROMMITZ
        for dialect, semantics, column in READINGS
        if column in case
    ],
)
def test_the_example_site_of_the_2_0_draft_is_judged_as_printed(
    case: dict[str, Any], dialect: str, semantics: Any, allowed: bool
) -> None:
    """V2 3.7: the agents on the example site of the 2.0 draft, by three readings."""
    robots = RobotsTxt.parse(FROMMITZ_TXT, dialect=dialect)
    policy = robots.policy(case["agent"], v2_semantics=semantics)
    assert policy.allowed(case["path"]) is allowed
