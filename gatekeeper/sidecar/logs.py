"""The log of the process, the decision log, and OpenTelemetry spans."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.clock import Clock, UtcTime, utc
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Decision
from gatekeeper.fetching.outcomes import Retrieval
from gatekeeper.sidecar.background import in_thread
from gatekeeper.sidecar.metrics import Samples
from gatekeeper.sidecar.routing import METHODS, Problem, Route, Router

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON, which escapes control characters of URLs (T11)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its line end."""
        line = {
            "event": "log",
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def wants_json(server: ServerConfig, stream: IO[str]) -> bool:
    """Return whether `log_format` asks for JSON; "auto" does so unless `stream` is a terminal."""
    if server.log_format == "auto":
        return not stream.isatty()
    return server.log_format == "json"


def set_up_logging(server: ServerConfig) -> None:
    """Send the log of the process to stderr. Called once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    plain.converter = time.gmtime  # in UTC, as the lines of the decision log
    handler.setFormatter(JsonFormatter() if wants_json(server, sys.stderr) else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


# --- Logs are written by threads, so a slow reader of a log delays no response.


def write_lines(stream: IO[str], lines: list[str]) -> None:
    """Write lines directly to the stream's file descriptor, one at a time.

    A pipe takes each whole (PIPE_BUF), not mixed with other writers' lines. The stream's own buffer
    has a lock for which the exit of the process would wait. Raises OSError or ValueError.
    """
    try:
        fd = stream.fileno()
    except OSError:  # a stream in memory
        stream.write("".join(lines))
        stream.flush()
        return
    for line in lines:
        data = line.encode("utf-8", "replace")
        while data:
            data = data[os.write(fd, data) :]


# --- The decision log: one line for each decision, from a bounded ring that a thread writes out.


_WRITE_SECONDS = 0.1
"""Seconds between two writes."""
SHUTDOWN_SECONDS = 1.0
"""Seconds that the shutdown waits for the last lines to be written."""
_MAX_URL = 2048


class DecisionEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision and the request that it answered: the data of an event of the kind `decision`."""

    time: UtcTime
    id: str
    request: str
    client: str
    url: str
    origin: str
    user_agent: str
    verdict: str
    reason: str
    state: str | None = None
    line: int | None = None
    """The line of the deciding rule."""
    rule: str | None = None
    robots_status: int | None = None
    retry_at: UtcTime | None = None

    @classmethod
    def of(cls, decision: Decision, request: str, client: str, *, at: float, url: str) -> Self:
        """Describe a decision made at the wall time `at`; `url` is its URL as it may be shown."""
        rule = decision.rule
        return cls(
            time=utc(at),
            id=decision.id,
            request=request,
            client=client,
            url=url[:_MAX_URL],
            origin=decision.origin,
            user_agent=decision.user_agent,
            verdict=decision.verdict,
            reason=decision.reason,
            state=decision.state,
            line=rule.line if rule is not None else None,
            rule=rule.text[:200] if rule is not None else None,
            robots_status=decision.robots_status,
            retry_at=decision.retry_at,
        )


class DecisionLine(DecisionEvent, frozen=True, tag_field="event", tag="decision"):
    """One line of the decision log. Its `event` is "decision", to tell it from other lines."""


_Entry = tuple[float, Decision, str, str]


class DecisionLog:
    """A bounded queue of decisions to log. Drops, and counts, those that come too fast.

    Adding a decision can neither block nor fail a response: it is an append. As OPA learned, a
    queue without a limit runs out of memory, and a drop that is not counted goes unnoticed.
    """

    def __init__(
        self, server: ServerConfig, clock: Clock, *, stream: IO[str] | None = None
    ) -> None:
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self.adjust(server)
        self._ring: deque[_Entry] = deque()
        self.written: int = 0
        self._written_by_workers = 0
        self._dropped = 0
        """Those of workers as well."""
        self._failed_lines = 0

    def adjust(self, server: ServerConfig) -> None:
        """Apply changed settings."""
        self._all = server.log_decisions == "all"
        self.enabled: bool = server.log_decisions != "none"
        self._queries = server.log_queries
        self._lines_per_write = max(1, int(server.log_rate * _WRITE_SECONDS))
        self._max_entries = 2 * self._lines_per_write
        """Those of one write, and of the next."""
        self._json = wants_json(server, self._stream)

    def samples(self) -> Samples:
        """Return the samples for /metrics."""
        written = self.written + self._written_by_workers
        return {"gatekeeper_decision_log": {"written": written, "dropped": self.dropped}}

    def add_counts(self, written: int, dropped: int) -> None:
        """Count lines that a worker process wrote or dropped."""
        self._written_by_workers += written
        self._dropped += dropped

    def add(self, decision: Decision, request: str, client: str) -> None:
        """Queue a decision for the log."""
        if not self.enabled or (decision and not self._all):
            return
        if len(self._ring) >= self._max_entries:
            self._dropped += 1
            return
        self._ring.append((self._clock.wall(), decision, request, client))

    def add_many(self, decisions: Sequence[Decision], request: str, client: str) -> None:
        """Queue a batch; decisions that the ring has no room for are counted as dropped."""
        if not self.enabled:
            return
        now = self._clock.wall()
        wanted = decisions if self._all else [one for one in decisions if not one]
        free = max(0, self._max_entries - len(self._ring))
        self._ring.extend((now, decision, request, client) for decision in wanted[:free])
        self._dropped += max(0, len(wanted) - free)

    async def run(self) -> None:
        """Write the log until cancelled, then what is left.

        If the log's reader stops reading, only the writing thread waits: the ring fills up, and
        further decisions are dropped.
        """
        writing: futures.Future[None] | None = None
        try:
            while True:
                await self._clock.sleep(_WRITE_SECONDS)
                if self._ring and (writing is None or writing.done()):
                    page = self._take_page()
                    writing = in_thread(partial(self._write_page, page), name="decision-log")
        finally:
            last_page = partial(self._write_page, self._take_page(), after=writing)
            last = in_thread(last_page, name="decision-log")
            futures.wait([last], SHUTDOWN_SECONDS)

    def _take_page(self) -> list[str]:
        """Take the lines for one write from the ring."""
        ring = self._ring
        return [self._line(ring.popleft()) for _ in range(min(len(ring), self._lines_per_write))]

    def _write_page(self, lines: list[str], *, after: futures.Future[None] | None = None) -> None:
        # One page at a time: no other thread touches `written` and `_failed_lines`.
        if after is not None:
            after.result()
        try:
            write_lines(self._stream, lines)
        except (OSError, ValueError):
            # The log's reader is gone. Responses go on without a log.
            self._failed_lines += len(lines)
            return
        self.written += len(lines)

    @property
    def dropped(self) -> int:
        """Number of lines that were never written."""
        return self._dropped + self._failed_lines

    def _line(self, entry: _Entry) -> str:
        at, decision, request, client = entry
        url = self._masked(decision.url)
        line = DecisionLine.of(decision, request, client, at=at, url=url)
        if self._json:
            # T11: the JSON encoder escapes every control character that a URL may hold.
            return msgspec.json.encode(line).decode() + "\n"
        rule_text = f" (line {line.line}: {line.rule})" if line.line is not None else ""
        text = f"{line.verdict} {line.url} [{line.reason}]{rule_text} id={line.id}"
        text += f" client={client}"
        return f"{line.time:%H:%M:%S} {urls.printable(text, 10_000)}\n"

    def _masked(self, url: str) -> str:
        if not self._queries:
            url, hidden, _ = url.partition("#")  # T11: a fragment may hold a token as well
            head, mark, _ = url.partition("?")
            url = f"{head}{'?***' if mark else ''}{'#***' if hidden else ''}"
        return url


# --- OpenTelemetry spans, if its API is installed and a provider is set.


RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def make_tracing(version: str) -> Tracing | None:
    """Return the maker of spans, or None without OpenTelemetry's API or a provider.

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
    """Makes the spans of requests and robots.txt fetches. Requires OpenTelemetry's API."""

    def __init__(self, provider: TracerProvider, version: str) -> None:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - the extra `otel`

        self._trace = trace
        self._extract = propagate.extract
        self._tracer = provider.get_tracer("gatekeeper", version)

    def around(self, answer: RequestHandler, router: Router[Any]) -> RequestHandler:
        """Wrap a handler so that each request has a span, except for probes."""

        async def traced(request: web.BaseRequest) -> web.StreamResponse:
            path = request.raw_path.partition("?")[0]
            route = None
            with suppress(Problem):
                route, _ = router.find(request.method, path)
            if route is not None and route.probe:
                return await answer(request)
            with self._span(request, route, path) as span:
                try:
                    response = await answer(request)
                except (Exception, asyncio.CancelledError) as error:
                    # The client hung up, so there is no response.
                    span.set_attribute("error.type", type(error).__qualname__)
                    raise
                span.set_attribute("http.response.status_code", response.status)
                if response.status >= 500:
                    self._set_error(span, str(response.status))
                return response

        return traced

    def decided(self, decision: Decision) -> None:
        """Add a decision to the span of the current request."""
        span = self._trace.get_current_span()
        span.set_attribute("gatekeeper.verdict", decision.verdict.value)
        span.set_attribute("gatekeeper.reason", decision.reason.value)
        span.set_attribute("gatekeeper.decision.id", decision.id)

    def trace_id(self) -> str:
        """Return the trace of the current request; empty without one, or if nobody keeps it."""
        context = self._trace.get_current_span().get_span_context()
        return self._trace.format_trace_id(context.trace_id) if context.trace_flags.sampled else ""

    def retrieved(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        """Add a span for a finished robots.txt fetch, including its wait for leases."""
        # Real time, since traces combine spans of several processes.
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
            self._set_error(span, retrieval.outcome.row.name)
        span.end(end)

    def _span(
        self, request: web.BaseRequest, route: Route[Any] | None, path: str
    ) -> AbstractContextManager[Span]:
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
            # Parameters of a path name hosts and leases, so its pattern is recorded instead.
            attributes["url.path"] = route.path if "{" in route.path else path
        return self._tracer.start_as_current_span(
            name,
            context=self._extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        )

    def _set_error(self, span: Span, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.StatusCode.ERROR)
