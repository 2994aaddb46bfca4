"""OpenTelemetry spans, and the histogram of robots.txt fetches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gatekeeper.sidecar.logs import make_tracing
from tests.internet import FakeInternet, Page

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Spans = Callable[[str], ReadableSpan]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def span(exporter: InMemorySpanExporter) -> Spans:
    """Returns the only span of a name."""

    def named(name: str) -> ReadableSpan:
        [found] = [one for one in exporter.get_finished_spans() if one.name == name]
        return found

    return named


@pytest.fixture
async def traced(exporter: InMemorySpanExporter, serve: Any, internet: FakeInternet) -> Any:
    """A service with tracing, made after the exporter was set."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n")
    return await serve()


async def test_a_decision_is_a_span_by_the_conventions_for_http(traced: Any, span: Spans) -> None:
    await traced.get("/v1/check", params={"url": "http://a.test/private?secret=1"})
    one = span("GET /v1/check")
    told = dict(one.attributes or {})
    told.pop("gatekeeper.decision.id")

    assert one.kind is SpanKind.SERVER
    assert told == {
        "http.request.method": "GET",
        "http.route": "/v1/check",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/check",
        "network.protocol.version": "1.1",
        "gatekeeper.verdict": "deny",
        "gatekeeper.reason": "rule",
    }


async def test_a_robots_fetch_is_a_span_below_the_question_that_began_it(
    traced: Any, span: Spans
) -> None:
    await traced.get("/v1/check", params={"url": "http://a.test/x"})
    question, fetch = span("GET /v1/check"), span("GET /robots.txt")
    told = dict(fetch.attributes or {})

    assert fetch.kind is SpanKind.CLIENT
    assert fetch.parent is not None
    assert question.context is not None
    assert fetch.parent.span_id == question.context.span_id
    assert told["url.full"] == "http://a.test/robots.txt"
    assert (told["server.address"], told["server.port"]) == ("a.test", 80)
    assert told["http.response.status_code"] == 200
    assert fetch.status.status_code is StatusCode.UNSET


async def test_a_robots_fetch_that_failed_says_so(
    traced: Any, span: Spans, internet: FakeInternet
) -> None:
    internet.site("down.test").robots(Page("", status=503))
    await traced.get("/v1/check", params={"url": "http://down.test/x"})
    fetch = span("GET /robots.txt")

    assert fetch.status.status_code is StatusCode.ERROR
    assert (fetch.attributes or {})["error.type"] == "server_error"


async def test_a_lease_is_a_span_and_no_span_tells_its_id(
    traced: Any, span: Spans, exporter: InMemorySpanExporter
) -> None:
    _, lease = await traced.post("/v1/leases", {"url": "http://a.test/x?secret=1", "wait": 5})
    await traced.post(f"/v1/leases/{lease['id']}/report", {"status": 200})

    assert (span("POST /v1/leases").attributes or {})["http.response.status_code"] == 201
    assert (span("POST /v1/leases/{id}/report").attributes or {})["url.path"] == (
        "/v1/leases/{id}/report"
    )
    everything = "".join(one.to_json() for one in exporter.get_finished_spans())
    assert "secret" not in everything
    assert lease["id"] not in everything


async def test_the_trace_of_the_caller_goes_on(traced: Any, span: Spans) -> None:
    await traced.get(
        "/v1/check", params={"url": "http://a.test/x"}, headers={"traceparent": PARENT}
    )
    one = span("GET /v1/check")
    assert one.context is not None
    assert f"{one.context.trace_id:032x}" == PARENT[3:35]


async def test_an_answer_of_400_is_no_error_of_ours(traced: Any, span: Spans) -> None:
    await traced.get("/v1/check", params={"url": "no url"})
    one = span("GET /v1/check")
    assert (one.attributes or {})["http.response.status_code"] == 400
    assert one.status.status_code is StatusCode.UNSET


async def test_spans_of_probes_and_unknown_routes_name_no_path(
    traced: Any, exporter: InMemorySpanExporter
) -> None:
    await traced.get("/healthz")
    await traced.get("/secret/place?x=1")
    [one] = exporter.get_finished_spans()
    assert one.name == "GET"
    assert "secret" not in one.to_json()


def test_without_the_api_there_is_no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert make_tracing("1") is None


def test_where_nobody_set_a_provider_there_is_no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert make_tracing("1") is None


async def test_the_seconds_of_robots_fetches_are_a_histogram(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    internet.site("b.test").robots(Page("", status=503))
    service = await serve()
    for name in ("a.test", "b.test", "a.test"):
        await service.get("/v1/check", params={"url": f"http://{name}/"})
    async with service.session.get(service.base + "/metrics") as response:
        text = await response.text()

    assert "gatekeeper_robots_fetch_seconds_count 2.0" in text
    assert 'gatekeeper_robots_fetch_seconds_bucket{le="+Inf"} 2.0' in text


async def test_the_trace_of_a_request_is_an_exemplar_only_if_openmetrics_is_asked_for_it(
    traced: Any,
) -> None:
    """T10: the trace is the only label, and each bucket has one exemplar at most."""
    await traced.get("/v1/check", params={"url": "http://a.test/"}, headers={"traceparent": PARENT})
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    found = {}
    for query in ("", "?exemplars=true"):
        for headers in ({}, accept):
            async with traced.session.get(
                f"{traced.base}/metrics{query}", headers=headers
            ) as response:
                found[query, "Accept" in headers] = await response.text()
    trace_id = PARENT.split("-")[1]
    lines = [line for line in found.pop(("?exemplars=true", True)).splitlines() if "# {" in line]
    assert len(lines) == 1
    assert f'# {{trace_id="{trace_id}"}} ' in lines[0]
    assert lines[0].startswith("gatekeeper_robots_fetch_seconds_bucket")
    assert not any(trace_id in text for text in found.values())
