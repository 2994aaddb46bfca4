"""Spans of OpenTelemetry, where its API is installed and somebody collects them.

A span for each request (decisions and leases among them) and, below the one that was the
first to ask, for each robots.txt fetch. Names and attributes are OpenTelemetry's semantic
conventions for HTTP. No query of a URL is in them, and no lease id: who reads traces may
not read what is asked about, nor report in another's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from gatekeeper import urls
from gatekeeper.decision import Decision
from gatekeeper.fetching.retrieval import Retrieval
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.routing import METHODS, Route, Router

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["Answer", "Tracing", "tracing"]

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def tracing(version: str) -> Tracing | None:
    """None without the API, and where no provider is set: then nothing is to be paid.

    The provider must be set before the service is made, as `opentelemetry-instrument` does.
    """
    try:
        from opentelemetry import trace  # noqa: PLC0415 - the extra `otel`
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracing(provider, version)


class Tracing:
    """Makes the spans. Only where the API is installed."""

    def __init__(self, provider: TracerProvider, version: str) -> None:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - the extra `otel`

        self._trace = trace
        self._extract = propagate.extract
        self._tracer = provider.get_tracer("gatekeeper", version)

    def around(self, answer: Answer, router: Router) -> Answer:
        """The same answers, each within a span; probes have none."""

        async def traced(request: web.BaseRequest) -> web.StreamResponse:
            path = request.raw_path.partition("?")[0]
            route = _route_of(router, request.method, path)
            if route is not None and route.probe:
                return await answer(request)
            span = self._begin(request, route, path)
            try:
                with self._trace.use_span(
                    span, record_exception=False, set_status_on_exception=False
                ):
                    response = await answer(request)
                self._answered(span, response.status)
                return response
            except (Exception, asyncio.CancelledError) as error:
                # The client hung up: nobody was answered.
                span.set_attribute("error.type", type(error).__qualname__)
                raise
            finally:
                span.end()

        return traced

    def decided(self, decision: Decision) -> None:
        """Say in the request's span what the answer was."""
        span = self._trace.get_current_span()
        span.set_attribute("gatekeeper.verdict", decision.verdict.value)
        span.set_attribute("gatekeeper.reason", decision.reason.value)
        span.set_attribute("gatekeeper.decision.id", decision.id)

    def retrieved(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        """A span for a robots.txt fetch that is over, its wait for turns included."""
        # Real time, as everywhere in a trace: spans of other processes stand beside it.
        end = time.time_ns()
        target = urls.parse(f"{origin}/robots.txt")
        attributes: dict[str, str | int | float] = {
            "http.request.method": "GET",
            "url.full": target.url,
            "url.template": "/robots.txt",
            "server.address": target.host,
            "server.port": target.port,
            "gatekeeper.robots.outcome": retrieval.outcome.row.name,
            "gatekeeper.robots.hops": len(retrieval.hops),
            "gatekeeper.robots.network_seconds": retrieval.took,
        }
        if retrieval.status is not None:
            attributes["http.response.status_code"] = retrieval.status
        span = self._tracer.start_span(
            "GET /robots.txt",
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if not retrieval.outcome.good:
            self._failed(span, retrieval.outcome.row.name)
        span.end(end)

    def _begin(self, request: web.BaseRequest, route: Route | None, path: str) -> Span:
        method = request.method if request.method in METHODS else "_OTHER"
        name = "HTTP" if method == "_OTHER" else method
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.scheme": request.scheme,
            "network.protocol.version": f"{request.version.major}.{request.version.minor}",
        }
        if route is not None:
            name = f"{name} {route.path}"
            attributes["http.route"] = route.path
            # Where the path has parameters they name hosts and leases: their pattern does.
            attributes["url.path"] = route.path if "{" in route.path else path
        return self._tracer.start_span(
            name,
            context=self._extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        )

    def _answered(self, span: Span, status: int) -> None:
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._failed(span, str(status))

    def _failed(self, span: Span, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.StatusCode.ERROR)


def _route_of(router: Router, method: str, path: str) -> Route | None:
    try:
        return router.find(method, path)[0]
    except Problem:
        return None
