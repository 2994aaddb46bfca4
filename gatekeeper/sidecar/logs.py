"""The log of the process and of its decisions, and spans of OpenTelemetry."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent import futures
from datetime import datetime
from functools import partial
from typing import IO, TYPE_CHECKING, Final, TypeVar

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.clock import Clock, utc
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Decision
from gatekeeper.fetching.outcomes import Retrieval
from gatekeeper.gate.decision_cache import WrittenDecision
from gatekeeper.sidecar.exchange import METHODS, Problem, Route, Router
from gatekeeper.sidecar.metrics import Sample, counter

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider


_T = TypeVar("_T")


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="log"
):
    time: datetime
    level: str
    logger: str
    message: str
    exception: str | None = None


class JsonFormatter(logging.Formatter):
    """A record as one line: JSON escapes whatever a URL may have smuggled in (T11)."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = _Line(
            time=utc(record.created),
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            exception=self.formatException(record.exc_info) if record.exc_info else None,
        )
        return msgspec.json.encode(line).decode()


def wants_json(server: ServerConfig, stream: IO[str]) -> bool:
    """What `log_format` comes to for that stream."""
    if server.log_format == "auto":
        return not stream.isatty()
    return server.log_format == "json"


def set_up(server: ServerConfig) -> None:
    """Send the log of the whole process to stderr; the service calls it once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    if wants_json(server, sys.stderr):
        handler.setFormatter(JsonFormatter())
    else:
        # In UTC, as the decisions that stand between them.
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


# --- Written by threads: who reads a log, or does not, holds up no answer.


_ATOMIC: Final = 4096
"""Octets that a pipe takes in one piece (PIPE_BUF): other writers' lines go between pieces."""


def in_thread(work: Callable[[], _T], *, name: str) -> futures.Future[_T]:
    """What `work` comes to, in a thread of its own, for what may take as long as it likes: a pipe
    that nobody empties, a mount that is gone. The end of the process does not wait for it, as it
    does for an executor's threads."""
    done: futures.Future[_T] = futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def write_lines(stream: IO[str], lines: list[str]) -> None:
    """Write lines past the stream's own buffer, whose lock the end of the process waits for.

    Pieces end with a line. Raises OSError or ValueError.
    """
    try:
        fd = stream.fileno()
    except OSError:  # a stream in memory
        stream.write("".join(lines))
        stream.flush()
        return
    piece = b""
    for line in lines:
        data = line.encode("utf-8", "replace")
        if piece and len(piece) + len(data) > _ATOMIC:
            _write_all(fd, piece)
            piece = b""
        piece += data
    _write_all(fd, piece)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# --- One line a decision, off the way of the answer: a bounded ring that a thread writes out.


_PAUSE = 0.1
"""Seconds between two writes."""
_RING = 20_000
_PATIENCE = 1.0
"""Seconds that the end of the service waits for the last lines to be taken."""
_MAX_URL = 2048


class DecisionRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="decision"
):
    """One line of the log; `event` is "decision", for readers of more than one kind."""

    time: datetime
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
    rule: str | None = None
    robots_status: int | None = None
    retry_at: datetime | None = None


_Entry = tuple[float, Decision | WrittenDecision, str, str]


class DecisionLog:
    """Keeps what is to be written; drops, and counts, what comes too fast.

    Nothing here can block or fail an answer: adding is an append, and OPA's two lessons
    are kept, a ring without a bound runs out of memory, a drop uncounted goes unseen.
    """

    def __init__(
        self, server: ServerConfig, clock: Clock, *, stream: IO[str] | None = None
    ) -> None:
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self.adjust(server)
        self._ring: deque[_Entry] = deque()
        self._encoder = msgspec.json.Encoder()
        self.written: int = 0
        self._elsewhere = (0, 0)
        self._dropped = 0
        self._lost = 0

    def adjust(self, server: ServerConfig) -> None:
        """Put other settings in force."""
        self._all = server.log_decisions == "all"
        self.enabled: bool = server.log_decisions != "none"
        self._queries = server.log_queries
        self._per_pause = max(1, int(server.log_rate * _PAUSE))
        self._json = wants_json(server, self._stream)

    def samples(self) -> Iterable[Sample]:
        """For /metrics."""
        written, dropped = self._elsewhere
        counts = {"written": self.written + written, "dropped": self.dropped + dropped}
        yield counter("gatekeeper_decision_log", "Lines of the decision log.", counts, "result")

    def count(self, written: int, dropped: int) -> None:
        """Count lines of another process that answers for this one."""
        self._elsewhere = self._elsewhere[0] + written, self._elsewhere[1] + dropped

    def wants(self, decision: Decision | WrittenDecision) -> bool:
        """Whether it is one of those that are logged."""
        return self.enabled and (self._all or not _welcome(decision))

    def add(self, decision: Decision | WrittenDecision, request: str, client: str) -> None:
        """Note a decision for the log."""
        if not self.wants(decision):
            return
        if len(self._ring) >= _RING:
            self._dropped += 1
            return
        self._ring.append((self._clock.wall(), decision, request, client))

    def add_many(
        self, decisions: Sequence[Decision] | Sequence[WrittenDecision], request: str, client: str
    ) -> None:
        """Note a batch; what the ring has no room for is counted as dropped."""
        if not self.enabled:
            return
        now = self._clock.wall()
        wanted = decisions if self._all else [one for one in decisions if not _welcome(one)]
        room = max(0, _RING - len(self._ring))
        self._ring.extend((now, decision, request, client) for decision in wanted[:room])
        self._dropped += max(0, len(wanted) - room)

    async def run(self) -> None:
        """Have it written until cancelled, then what is left.

        Where the log's reader has stopped, the ring fills up and what it has no room for is
        dropped: only the writer waits.
        """
        page: futures.Future[None] | None = None
        try:
            while True:
                await self._clock.sleep(_PAUSE)
                if self._ring and (page is None or page.done()):
                    page = in_thread(partial(self._put, self._page()), name="decision-log")
        finally:
            last = in_thread(partial(self._put, self._page(), after=page), name="decision-log")
            futures.wait([last], _PATIENCE)

    def write(self) -> None:
        """Write a pause's worth at once."""
        self._put(self._page())

    def _page(self) -> list[str]:
        """A pause's worth of lines; drops, and counts, what exceeds `log_rate`."""
        ring = self._ring
        lines = [self._line(ring.popleft()) for _ in range(min(len(ring), self._per_pause))]
        if len(ring) > self._per_pause:
            # More than can be written at the next turn: the oldest are let go.
            excess = len(ring) - self._per_pause
            for _ in range(excess):
                ring.popleft()
            self._dropped += excess
        return lines

    def _put(self, lines: list[str], *, after: futures.Future[None] | None = None) -> None:
        # One page at a time: nobody else touches `written` and `_lost` while it writes.
        if after is not None:
            after.result()
        try:
            write_lines(self._stream, lines)
        except (OSError, ValueError):
            # The log's reader is gone: answers matter more than their log.
            self._lost += len(lines)
            return
        self.written += len(lines)

    @property
    def dropped(self) -> int:
        """Lines that were never written."""
        return self._dropped + self._lost

    def _line(self, entry: _Entry) -> str:
        when, told, request, client = entry
        decision = told.decision if isinstance(told, WrittenDecision) else told
        rule = decision.rule
        record = DecisionRecord(
            time=utc(when),
            id=decision.id,
            request=request,
            client=client,
            url=self._shown(decision.url),
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
        if self._json:
            # T11: a JSON encoder escapes every control that a URL could smuggle in.
            return self._encoder.encode(record).decode() + "\n"
        shown = f" (line {record.line}: {record.rule})" if rule is not None else ""
        text = (
            f"{record.verdict} {record.url} [{record.reason}]{shown} id={record.id} client={client}"
        )
        return f"{record.time:%H:%M:%S} {_printable(text)}\n"

    def _shown(self, url: str) -> str:
        if not self._queries:
            url, hidden, _ = url.partition("#")  # T11: a fragment may hold a token as well
            head, mark, _ = url.partition("?")
            url = f"{head}{'?***' if mark else ''}{'#***' if hidden else ''}"
        return url[:_MAX_URL]


def _welcome(told: Decision | WrittenDecision) -> bool:
    return told.cached.allows if isinstance(told, WrittenDecision) else bool(told)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


# --- Spans of OpenTelemetry, where its API is installed and somebody collects them.


RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


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

    def around(self, answer: RequestHandler, router: Router) -> RequestHandler:
        """A handler that answers as `answer` does, each time within a span; probes have none."""

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
