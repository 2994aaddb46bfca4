"""Every vector about HTTP in tests/vectors/robots.jsonl, one test per line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.config import Config
from gatekeeper.decision import Verdict
from gatekeeper.fetching.outcomes import Outcome, Retrieval, age_of, classify_head, metadata_of
from gatekeeper.http_fields import wait_of
from tests.fetching.directories import DAY, House, house

VECTORS = [
    vector
    for line in (Path(__file__).parents[1] / "vectors" / "robots.jsonl").read_text().splitlines()
    if (vector := json.loads(line)).keys() & {"http", "header"}
]
HEADERS = [v for v in VECTORS if "header" in v]
ANSWERS = [v for v in VECTORS if "http" in v]

# The vectors from which the project deviates, and the rule that says so.
DECIDED: dict[str, dict[str, Any]] = {
    # VND-06 and row 16: by the letter 429 is "unavailable, may access"; here it defers.
    "V402": {"allowed": False},
    # RFC 9309 section 2.3.1.4 (RFC-38): after 30 days welcome only if the site is generally
    # up, which is not reported here.
    "V414": {"allowed": False},
    # DIA-12: lifetimes are always RFC 9309's, so the 1996 draft's 7 days meet the 24 hours.
    "V152": {"fresh_for_s": 86_400},
}

ERRORS = {
    "timeout": Outcome.TIMEOUT,
    "dns": Outcome.DNS_FAILURE,
    "tls": Outcome.TLS,
    "truncated-body": Outcome.TRUNCATED,
}


def by_id(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", vectors, ids=lambda v: f"{v['id']}-{v['rule']}")


def test_every_listed_exception_names_a_vector() -> None:
    assert DECIDED.keys() <= {vector["id"] for vector in VECTORS}


@by_id(HEADERS)
def test_header_vectors_give_the_expected_times(vector: dict[str, Any]) -> None:
    now = datetime.fromisoformat(vector.get("now", "2026-11-20T10:00:00Z")).timestamp()
    headers = vector["header"]
    if "fresh_for_s" in vector:
        assert metadata_of(headers, now).lifetime(age_of(headers)).seconds == vector["fresh_for_s"]
    else:
        assert wait_of(headers, now) == vector["retry_after_s"]


def config_of(vector: dict[str, Any]) -> dict[str, Any]:
    # R96-05: that draft reads 401 and 403 as complete restriction; it is a knob here (DIA-12).
    knobs = {"on_401": "deny", "on_403": "deny"} if vector["dialect"] == "1996" else {}
    return {"fetch": knobs, "robots": {"dialect": vector["dialect"]}}


def retrieval_of(vector: dict[str, Any]) -> Retrieval:
    http = vector["http"]
    config = Config.from_dict(config_of(vector)).fetch
    if "error" in http:
        return Retrieval(outcome=ERRORS[http["error"]])
    outcome = classify_head(http["status"], config=config)
    if outcome is Outcome.REDIRECT:
        outcome = Outcome.TOO_MANY_REDIRECTS  # more of them than are followed
    body = vector["robots_txt"].encode() if outcome.has_text else None
    headers = http.get("headers", {})
    hops = tuple(f"http://example.com/{n}" for n in range(http.get("redirects", 0)))
    return Retrieval(
        outcome=outcome,
        status=http["status"],
        body=body,
        hops=hops,
        lifetime=metadata_of(headers, 0.0).lifetime(age_of(headers)),
    )


def allowed(it: House, vector: dict[str, Any], standing: Any) -> bool:
    if standing.verdict is not None:
        return bool(standing.verdict is Verdict.ALLOW)
    return bool(standing.robots.policy(vector["agent"]).allowed(vector["url"]))


@by_id([v for v in ANSWERS if v.get("outcome") != "follow"])
async def test_answer_vectors_give_the_expected_decision(vector: dict[str, Any]) -> None:
    expected = {**vector, **DECIDED.get(vector["id"], {})}
    http = vector["http"]
    async with house(retrieval_of(vector), **config_of(vector)) as it:
        if "cached_age_s" in http:
            await _have_a_copy(it, vector, http["cached_age_s"])
        record = await it.get()
        if "unreachable_for_s" in http:
            await it.clock.elapse(http["unreachable_for_s"])
            record = await it.get()
        standing = record.standing(it.clock)
        if "fresh_for_s" in vector:
            assert record.expires - it.clock.monotonic() == expected["fresh_for_s"]
        elif "outcome" in vector:
            assert standing.verdict == vector["outcome"]
        else:
            assert allowed(it, vector, standing) is expected["allowed"]


async def _have_a_copy(it: House, vector: dict[str, Any], age: float) -> None:
    """Give the origin a copy of that age, and an outage since its expiry."""
    down, it.source.answer = (
        it.source.answer,
        Retrieval(outcome=Outcome.RULES, status=200, body=vector["robots_txt"].encode()),
    )
    await it.get()
    it.source.answer = down
    await it.clock.elapse(DAY)
    await it.get()
    await it.clock.elapse(age - DAY)


@by_id([v for v in ANSWERS if v.get("outcome") == "follow"])
def test_every_redirect_vector_is_a_redirect_status(vector: dict[str, Any]) -> None:
    # test_fetcher.py follows them over real sockets.
    status = vector["http"]["status"]
    assert classify_head(status, config=Config().fetch) is Outcome.REDIRECT


def test_all_vectors_are_read() -> None:
    assert len(HEADERS) + len(ANSWERS) == len(VECTORS) >= 30
