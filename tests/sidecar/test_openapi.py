"""`/openapi.json` says what the routes do."""

from __future__ import annotations

from typing import Any

import pytest

from gatekeeper.sidecar.routes.service import document
from gatekeeper.sidecar.service import ROUTES

DOCUMENT = document(ROUTES, version="1")
PATHS: dict[str, Any] = DOCUMENT["paths"]
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize(
    "operation",
    [one for path in PATHS.values() for one in path.values() if "requestBody" in one],
    ids=lambda one: one["operationId"],
)
def test_a_body_may_be_too_slow(operation: dict[str, Any]) -> None:
    assert "408" in operation["responses"]


def test_a_fetched_page_has_the_sites_status_and_our_headers() -> None:
    fetch = PATHS["/v1/fetch"]["get"]
    assert [one["name"] for one in fetch["parameters"]] == ["url"]
    for status in ("200", "default"):
        assert {"X-Gatekeeper-Verdict", "Retry-After"} <= fetch["responses"][status][
            "headers"
        ].keys()


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("Decision", "retry_at"),
        ("LeaseBody", "expires_at"),
        ("HostBody", "next_at"),
        ("FetchStory", "fetched_at"),
        ("Version", "first_seen"),
        ("ClockView", "until"),
    ],
)
def test_times_are_said_to_be_times(schema: str, name: str) -> None:
    field = SCHEMAS[schema]["properties"][name]
    assert "date-time" in [one.get("format") for one in (field, *field.get("anyOf", ()))]
