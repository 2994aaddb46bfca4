"""`/openapi.json` describes what the routes do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gatekeeper.sidecar.routes.health import document
from gatekeeper.sidecar.routes.table import ROUTES

DOCUMENT = document(ROUTES, version="1")
PATHS: dict[str, Any] = DOCUMENT["paths"]
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize(
    "operation",
    [one for path in PATHS.values() for one in path.values() if "requestBody" in one],
    ids=lambda one: one["operationId"],
)
def test_every_operation_with_a_body_may_answer_408(operation: dict[str, Any]) -> None:
    assert "408" in operation["responses"]


OPERATIONS: list[dict[str, Any]] = [one for path in PATHS.values() for one in path.values()]


def test_every_operation_has_a_name_and_a_tag() -> None:
    names = [one["operationId"] for one in OPERATIONS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z]+[A-Z][A-Za-z]+", name) for name in names), names
    tags = [tag["name"] for tag in DOCUMENT["tags"]]
    assert {tag for one in OPERATIONS for tag in one["tags"]} == set(tags)


def test_no_operation_changes_its_name() -> None:
    """Generated clients call them by these names, which are those of the handlers."""
    names = """
        acquireLease blockHost checkUrl checkUrls dropLease explainText explainUrl fetchPage
        getConfiguration getContract getDecision getHistory getHost getMetrics getOverview
        getRobots getSeries giveBackLease isAlive isReady listEndpoints listHosts listLeases
        listSitemaps overrideHost pauseHost refreshHost reloadConfiguration renewLease reportLease
        resumeHost streamDecisions
    """
    assert sorted(one["operationId"] for one in OPERATIONS) == names.split()


def test_every_endpoint_is_in_the_document() -> None:
    """The list of all operations: generated clients have only these."""
    wanted = {
        "get /v1/check",
        "post /v1/check",
        "get /v1/explain",
        "post /v1/explain",
        "get /v1/robots",
        "get /v1/history",
        "get /v1/fetch",
        "get /v1/sitemaps",
        "get /v1/leases",
        "post /v1/leases",
        "post /v1/leases/{id}/renew",
        "post /v1/leases/{id}/report",
        "delete /v1/leases/{id}",
        "post /v1/leases/{id}/drop",
        "get /v1/hosts",
        "get /v1/hosts/{host}",
        "post /v1/hosts/{host}/pause",
        "post /v1/hosts/{host}/resume",
        "post /v1/hosts/{host}/refresh",
        "post /v1/hosts/{host}/block",
        "post /v1/hosts/{host}/override",
        "get /v1/overview",
        "get /v1/decisions/{id}",
        "get /v1/events",
        "get /v1/series",
        "get /v1/config",
        "post /v1/admin/reload",
        "get /healthz",
        "get /readyz",
        "get /metrics",
        "get /openapi.json",
        "get /",
    }
    assert {f"{method} {path}" for path in PATHS for method in PATHS[path]} == wanted


def test_links_lead_to_operations_and_name_their_parameters() -> None:
    by_name = {one["operationId"]: one for one in OPERATIONS}
    found = [
        link
        for one in OPERATIONS
        for answer in one["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert {"renewLease", "reportLease", "giveBackLease"} <= {one["operationId"] for one in found}
    for link in found:
        parameters = {one["name"] for one in by_name[link["operationId"]]["parameters"]}
        assert link["parameters"].keys() <= parameters


def test_queries_are_described_as_parameters() -> None:
    assert not [name for name in SCHEMAS if name.endswith("Query")]
    hosts = {one["name"]: one["schema"] for one in PATHS["/v1/hosts"]["get"]["parameters"]}
    assert {"any", "free", "paused"} < set(hosts["state"]["enum"])
    assert hosts["state"]["default"] == "any"


def test_a_field_is_required_where_it_is_always_there() -> None:
    wanted, lease = SCHEMAS["LeaseRequestBody"], SCHEMAS["LeaseBody"]
    assert wanted["required"] == ["url"]
    assert wanted["properties"]["ttl"]["description"] == "60.0 unless given."
    assert set(lease["required"]) == lease["properties"].keys()
    assert set(SCHEMAS["Decision"]["required"]) == SCHEMAS["Decision"]["properties"].keys()
    assert "decision" not in SCHEMAS["ProblemDocument"]["required"]
    # Generators treat a field with a default as always present.
    assert not [
        s for s in SCHEMAS.values() for p in s.get("properties", {}).values() if "default" in p
    ]


def test_streamed_lines_have_schemas() -> None:
    assert {"DecisionEvent", "Dropped"} < SCHEMAS.keys()
    assert "`DecisionEvent`" in PATHS["/v1/events"]["get"]["description"]


def test_errors_are_problem_documents_with_retry_after() -> None:
    for one in OPERATIONS:
        for status, answer in one["responses"].items():
            if status.isdecimal() and int(status) >= 400:
                assert "application/problem+json" in answer["content"]
            if status in ("429", "503"):
                assert "Retry-After" in answer["headers"]


def test_a_fetched_page_may_have_any_status_of_its_site() -> None:
    answers = PATHS["/v1/fetch"]["get"]["responses"]
    assert {next(iter(one["content"])) for one in answers.values()} == {"application/octet-stream"}


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
def test_times_have_the_format_date_time(schema: str, name: str) -> None:
    field = SCHEMAS[schema]["properties"][name]
    assert "date-time" in [one.get("format") for one in (field, *field.get("anyOf", ()))]
