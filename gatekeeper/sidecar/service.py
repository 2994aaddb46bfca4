"""`Service` handles requests: admission, limits, routing, errors, logs and metrics.

It uses no router or middlewares of a web framework: for a warm `/v1/check` each such layer
would cost a tenth of the total. `handle` is the path of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from gatekeeper import __version__, errors, urls
from gatekeeper.client.wire import Decisions, encode
from gatekeeper.clock import Clock, OwnedTasks, SystemClock, deadline, utc
from gatekeeper.config import Config
from gatekeeper.decision import Decision, Reason
from gatekeeper.fetching.outcomes import Retrieval
from gatekeeper.gate import Gatekeeper
from gatekeeper.library_internals import HEAD_LIMITS
from gatekeeper.pacing.ledger import ScopeView
from gatekeeper.pacing.waiters import Entrance
from gatekeeper.sidecar import routing, security
from gatekeeper.sidecar.background import FileReader, OriginLearner
from gatekeeper.sidecar.channel import Configure
from gatekeeper.sidecar.held_leases import LeaseJournal, LeaseTable
from gatekeeper.sidecar.inline import InlineCall, NotPlainError, Request, response_octets
from gatekeeper.sidecar.listening import Acceptor, Inline, Server
from gatekeeper.sidecar.logs import DecisionLog, RequestHandler, Tracing, make_tracing
from gatekeeper.sidecar.metrics import Metrics, Samples, gate_samples
from gatekeeper.sidecar.pages.recent_decisions import DecisionFeed
from gatekeeper.sidecar.pages.shell import Sessions
from gatekeeper.sidecar.pages.state import OperatorState
from gatekeeper.sidecar.replica import GateAnswers
from gatekeeper.sidecar.routing import Call, EmptyObject, Holder, Problem, Role, Route, Router
from gatekeeper.sidecar.security import Admission, Certificates, ClientLimits, Networks, Tokens
from gatekeeper.sidecar.workers import Owner, Workers

_T = TypeVar("_T")
MAX_PER_ITERATION = 250
"""Requests that begin in one iteration of the loop at most."""
NEW_SECONDS = 1.0
"""Seconds that a connection accepted at the end of `drain` has for its request at most."""
_POLL_SECONDS = 0.02
"""Seconds between two looks at what a drain waits for."""
LOOK_SECONDS = 0.5
"""Seconds for which the fleet's store is asked who holds a host."""
_log = logging.getLogger(__name__)

MAX_BACKGROUND = 1000
DIAGNOSTICS = ("/healthz", "/readyz", "/metrics")
"""The paths that the listener of `server.diagnostics` serves."""
_PROBLEMS = (
    (errors.GateClosed, 503, "closing", 5, "the service is shutting down"),
    (errors.InvalidURL, 400, "invalid-url", None, ""),
    (errors.ConfigError, 400, "bad-request", None, ""),
    (errors.StorageError, 503, "storage", 5, ""),
    (TimeoutError, 504, "timeout", None, "the answer did not come in time"),
)
"""Errors with their status, kind of problem, wait, and what the client is told: else their text."""


class Service:
    """The gate over HTTP. One object per process; `process.running` starts and ends it."""

    def __init__(
        self,
        gate: Gatekeeper,
        config: Config,
        routes: tuple[Route[Service], ...],
        *,
        answers: GateAnswers | None = None,
        tokens: Tokens | None = None,
        clock: Clock | None = None,
        version: str = __version__,
        reread: Callable[[], Config] | None = None,
        lease_journal: LeaseJournal | None = None,
        exposed: str | None = None,
        addresses: Sequence[tuple[str, int]] = (),
        diagnostics: Sequence[tuple[str, int]] = (),
        sources: Callable[[], Mapping[str, str]] = dict,
        workers: Workers | None = None,
    ) -> None:
        """`routes` are those of `routes.table`, `answers` a worker's. `workers` answer questions.

        `addresses` are those of the TCP listeners, from which the accepted Host headers follow; a
        unix socket has none, and takes any (T4). `diagnostics` are those of the listener for
        health and metrics. `sources` returns where the settings came from.
        """
        self.gate = gate
        self.answers: GateAnswers = answers or GateAnswers(gate)
        self.version = version
        self.clock: Clock = clock or SystemClock()
        self.phase: str = "starting"
        self.metrics: Metrics = Metrics(build=version)
        keep_going = config.storage.on_failure == "continue"
        feed = DecisionFeed(self.clock)
        self.leases: LeaseTable = LeaseTable(
            config.server, self.clock, lease_journal, keep_going=keep_going, on_report=feed.reported
        )
        self.learner: OriginLearner = OriginLearner(gate, self.clock)
        self.reread = reread
        self.file_reader: FileReader = FileReader(self.clock)
        self._read_sources = sources
        self.certificates: Certificates = Certificates(config.server)
        """The certificates of the listeners."""
        self.exposed = exposed
        """Description of a listener that others can reach, or None (T5)."""
        self.grace: bool = True
        """Whether `drain` waits for `drain_grace`, so that clients and load balancers notice."""
        self._drain_ended = False
        self.addresses = addresses
        self.diagnostics = diagnostics
        self.workers = workers
        self._tasks = OwnedTasks()
        if gate.parts.guard is not None:
            for address, port in (*addresses, *diagnostics):
                gate.parts.guard.listens_on(address, port)  # T3: even within an allowed range
        self._prepare_accounts(config, feed)
        self._prepare_requests(routes)
        self.apply_config(config, tokens or Tokens())
        self.metrics.add_source(self._samples)
        gate.parts.listeners.append(self._retrieved)

    def _prepare_accounts(self, config: Config, feed: DecisionFeed) -> None:
        """Make what keeps account of clients and decisions, for operators and for workers."""
        self.log: DecisionLog = DecisionLog(config.server, self.clock)
        on_limit = None if self.workers is None else self.workers.client_at_limit
        self.clients: ClientLimits = ClientLimits(config.server, self.clock, on_limit)
        self.operators: OperatorState = OperatorState(
            self.gate, self.clock, self.leases, self.metrics, feed
        )
        """The state that the pages for operators show."""
        self._hosts_by_state: Mapping[str, int] = {}
        self._scraping = asyncio.Lock()
        """Held while metrics are collected: one thread does that, however many clients ask."""
        if self.workers is not None:
            self.workers.owner = Owner(
                self.gate, self.clients, self.metrics, feed, self.log, self._for_workers
            )
        self.sessions: Sessions = Sessions(self.clock)

    def _prepare_requests(self, routes: tuple[Route[Service], ...]) -> None:
        self.router: Router[Service] = Router(routes)
        self._diagnostics: Router[Service] = Router(
            tuple(route for route in routes if route.path in DIAGNOSTICS),
            hint=f"only {', '.join(DIAGNOSTICS)} are served here",
        )
        self._prefix = f"{secrets.token_hex(4)}-"
        self._counter = itertools.count(1)
        self._entrance = Entrance(MAX_PER_ITERATION)
        self._answers: dict[Call, asyncio.Timeout] = {}
        """The answers under way, with the timeouts by which `_ask_again` ends them."""
        self.tracing: Tracing | None = make_tracing(self.version)
        """Makes a span for each request, or None."""
        self.handle: RequestHandler = self._handle
        """Handles one request; every error becomes a problem document."""
        self.handle_diagnostics: RequestHandler = functools.partial(self._handle, diagnostics=True)
        """Handles a request to the listener of `server.diagnostics`."""
        self.inline: Inline | None = self.answer_inline
        """Answers requests that need no waiting as soon as they are read. None with tracing."""
        if self.tracing is not None:
            self.inline = None
            self.handle = self.tracing.around(self._handle, self.router)

    def apply_config(
        self, config: Config, tokens: Tokens, *, restart_required: Sequence[str] = ()
    ) -> None:
        """Put a checked configuration in force: completely, or not at all if it raises.

        `restart_required`: settings that changed in the file, but need a restart.
        """
        trusted = Networks(config.server.trusted_peers, setting="server.trusted_peers")
        hosts = security.accepted_hosts(config.server, self.addresses) if self.addresses else None
        probed = security.accepted_hosts(config.server, self.diagnostics)
        # No await from here on: no request sees half of the new settings (T17).
        self.config: Config = config
        self.restart_required: Sequence[str] = restart_required
        self.sources: Mapping[str, str] = self._read_sources()
        """Where each setting in force came from, by its dotted name. Defaults are absent."""
        self.trusted_peers = trusted
        hosts_in_front = frozenset(map(str.lower, config.server.forward_auth_hosts))
        self.forward_auth_hosts: frozenset[str] = hosts_in_front
        self.admission: Admission = Admission(config.server, tokens=tokens, hosts=hosts)
        self._diagnostics_admission = Admission(config.server, tokens=tokens, hosts=probed)
        self.clients.adjust(config.server)
        self.leases.adjust(config.server)
        self.log.adjust(config.server)
        if self.workers is not None:
            self.workers.send_configuration()
        if self._answers:
            self._tasks.start(self._ask_again())

    def _for_workers(self) -> Configure:
        return Configure(
            config=self.config,
            tokens=self.admission.tokens.tokens,
            rules=self.gate.parts.scheduler.host_rules.entries(),
            identity=self.gate.user_agent,
            addresses=list(self.addresses),
        )

    async def _ask_again(self) -> None:
        """End each answer under way whose client may not have it any more (T17)."""
        for number, (call, limit) in enumerate(list(self._answers.items()), 1):
            if call in self._answers and not limit.expired():
                end = asyncio.get_running_loop().time() + call.goodbye
                limit.reschedule(None if call.permitted() else end)
            if number % MAX_PER_ITERATION == 0:
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Return when every worker follows this process, and its answers are counted here."""
        if self.workers is not None:
            await self.workers.settle()

    def serve(self) -> None:
        """Accept questions from now on; called when the sockets listen."""
        self.phase = "serving"
        self.operators.start()

    async def metrics_text(self, accept: str = "", *, exemplars: bool = False) -> tuple[bytes, str]:
        """Return what Prometheus scrapes, and its Content-Type; see `Metrics.render`."""
        async with self._scraping:
            await self.settle()
            # In a thread, since this iterates over every host, and there may be a million.
            self._hosts_by_state = await asyncio.to_thread(self.gate.parts.scheduler.holdups.count)
            return self.metrics.render(accept, exemplars=exemplars)

    @property
    def ready(self) -> bool:
        """Whether new questions are accepted."""
        return self.phase == "serving" and self.gate.ready and self.leases.writable

    @property
    def unready(self) -> str:
        """Why new questions are not accepted, for people."""
        if self.phase != "serving":
            return self.phase
        if (why := self.gate.parts.storage_failing) is not None:
            return f"promises can't be kept: {why} (storage)"
        fleet = self.gate.stats().fleet
        if fleet is not None and fleet.state == "lost" and not fleet.dividing:
            return "the store of the fleet can't be reached (fleet)"
        if not self.leases.writable:
            return "the journal of leases can't be written (storage)"
        return "our own network seems to be down"

    @functools.cached_property
    def session(self) -> aiohttp.ClientSession:
        """The session of `/v1/fetch`, opened when first used.

        It is guarded, decides and paces each hop, and does not decode bodies.
        """
        return aiohttp.ClientSession(
            connector=self.gate.parts.make_connector(),
            middlewares=(self.gate.middleware,),
            headers={"User-Agent": self.gate.user_agent},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # T19
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0),
            **HEAD_LIMITS,
        )

    @property
    def streams(self) -> int:
        """Number of streams in flight."""
        return sum(call.streams for call in self._answers)

    def background(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T] | None:
        """Run a coroutine in the background and return its task. Return None if too many run.

        The service owns the task: `close` cancels it. The caller may await its result.
        """
        if len(self._tasks) >= MAX_BACKGROUND or self.phase == "closed":
            work.close()
            return None
        task = self._tasks.start(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("work in the background failed: %s", error)

    async def close(self) -> None:
        """End leases, background work and streams. Idempotent."""
        self.phase = "closed"
        self.leases.close()
        await self.operators.close()
        await self._tasks.close()
        await self.learner.close()
        if "session" in vars(self):
            await self.session.close()

    def end_drain(self) -> None:
        """Wait no longer for leases and streams, whether `drain` has begun or not."""
        self._drain_ended = True

    @property
    def drain_seconds(self) -> float:
        """Maximum duration of `drain` in seconds."""
        server = self.config.server
        return server.drain_timeout + (server.drain_grace if self.grace else 0.0)

    async def drain(self, sites: Sequence[Acceptor], servers: Sequence[Server] = ()) -> None:
        """Become unready, wait a limited time for leases and streams to end, then stop listening.

        From the beginning each answer ends its connection. During the grace at the end clients
        that keep connections open learn so with their next answer, and a load balancer has noticed
        the unready service before connections are refused.
        """
        end = self.clock.monotonic() + self.drain_seconds
        grace = self.config.server.drain_grace if self.grace else 0.0
        self.phase = "draining"
        for server in servers:
            server.drain()
        self.leases.drain()
        if self.workers is not None:
            await self.workers.recall()
        # Reports are accepted meanwhile: clients with leases often shut down with us. No new
        # leases or streams begin (T16).
        await self._until(end - grace, lambda: not self.leases and not self.streams)
        await self.clock.sleep(grace)
        for site in sites:
            await site.stop()
        new = min(grace, NEW_SECONDS)
        end = max(end, self.clock.monotonic() + new)
        await self._until(end, lambda: not any(server.is_busy(new) for server in servers))

    async def _until(self, end: float, done: Callable[[], bool]) -> None:
        """Wait until `done()`, until `end` (monotonic), or until `end_drain` is called."""
        while not (done() or self._drain_ended or self.clock.monotonic() >= end):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    def decided(self, decision: Decision, call: Call | InlineCall) -> None:
        """Log a decision and show it to operators; the gate has counted it already."""
        self.operators.feed.add(decision, call.id, call.client)
        if self.log.enabled:
            self.log.add(decision, call.id, call.client)
        if self.tracing is not None:
            self.tracing.decided(decision)

    def decided_all(self, decisions: list[Decision], call: Call | InlineCall) -> bytes:
        """Log the decisions of a batch, show them to operators, and return the response's body."""
        body = encode(Decisions(decisions))
        feed = self.operators.feed
        for decision in decisions:
            feed.count_of(decision.origin).add(decision.verdict)
        feed.add_batch(body, len(decisions), call.id, call.client)
        self.log.add_many(decisions, call.id, call.client)
        return body

    def new_id(self) -> str:
        """Return an id for a request, for its response and the logs."""
        return f"{self._prefix}{next(self._counter):x}"

    def waited(self, seconds: float) -> None:
        """Count a lease that was granted after so many seconds."""
        self.metrics.queue_wait.observe(seconds, self._trace_id())

    def _trace_id(self) -> str:
        return "" if self.tracing is None else self.tracing.trace_id()

    def _retrieved(self, origin: str, retrieval: Retrieval, seconds: float) -> None:
        self.metrics.robots_fetch.observe(retrieval.took, self._trace_id())
        if self.tracing is not None:
            self.tracing.retrieved(origin, retrieval, seconds)

    async def _handle(
        self, request: web.BaseRequest, *, diagnostics: bool = False
    ) -> web.StreamResponse:
        call = Call(request, self.new_id(), "", "", {}, self.config.server.max_body)
        try:
            async with asyncio.timeout(None) as limit:
                self._answers[call] = limit
                try:
                    response = await self._dispatch(call, diagnostics=diagnostics)
                finally:
                    del self._answers[call]
        except Exception as raised:  # noqa: BLE001 - the only place where errors become responses
            error = call.refused if limit.expired() and call.refused is not None else raised
            if _reset_if_begun(request):
                await self._problem(error, call)  # logs an unexpected error
                raise ConnectionResetError("the answer broke off") from error
            response = (await self._problem(error, call)).response(call.id)
        except asyncio.CancelledError:
            _reset_if_begun(request)
            raise
        method = request.method if request.method in routing.METHODS else "other"
        self.metrics.count_response(call.where, method, response.status)
        if not response.prepared:
            response.headers["X-Request-Id"] = call.id
            response.headers["Server"] = "gatekeeper"
        return response

    async def _dispatch(self, call: Call, *, diagnostics: bool) -> web.StreamResponse:
        request = call.request
        path, _, call.query = request.raw_path.partition("?")
        router = self._diagnostics if diagnostics else self.router
        route, call.params = router.find(request.method, path)
        call.where = route.path
        if route.probe:
            return await route.handler(self, call)
        # Thousands may be read in one iteration of the loop, which must not block for so long.
        if (before := self._entrance.enter()) is not None:
            await before
            self._entrance.entered()

        def admit() -> str:
            admission = self._diagnostics_admission if diagnostics else self.admission
            return admission.admit(request, route.needs)

        call.admit(admit)
        self.clients.enter(call.client)
        try:
            if call.query and route.no_query:
                call.parameters(EmptyObject)
            if Role.ADMIN in route.needs:
                await self.settle()  # so that operators see what workers did
            return await route.handler(self, call)
        finally:
            self.clients.leave(call.client)

    def answer_inline(
        self, request: Request, remote: str | None, transport: asyncio.Transport
    ) -> bytes | None:
        """Return the octets of the response to a request that needs no waiting.

        Such are a warm check, an immediate lease and a report. Return None, without any effect, if
        the request has to be handled the usual way. That includes every error, since only `handle`
        explains those. `remote` is the client's address.
        """
        path, _, query = request.target.partition("?")
        try:
            route, params = self.router.find(request.method, path)
            if route.inline is None or request.method != route.method or (query and route.no_query):
                return None
            client = self.admission.admit_by(request.headers, remote, transport, route.needs)
            if not self.clients.may_skip(client):
                return None
            call = InlineCall(request, query, params, client, self.new_id())
            body = route.inline(self, call)
        except (NotPlainError, Problem, errors.InvalidURL, errors.ConfigError):
            return None
        except Exception:  # noqa: BLE001 - it is logged
            _log.exception("a request was not answered inline")
            return None
        if body is None:
            return None
        self.metrics.count_response(route.path, route.method, route.status)
        return response_octets(route.status, body, call.id)

    def _samples(self) -> Samples:
        failing = self.gate.parts.storage_failing is not None or not self.leases.writable
        return {
            **gate_samples(self.gate.stats(), self._hosts_by_state),
            **self.leases.samples(),
            **self.clients.samples(),
            **self.log.samples(),
            "gatekeeper_learning_put_off": self.learner.put_off,
            "gatekeeper_ready": float(self.ready),
            "gatekeeper_config_restart_required": dict.fromkeys(self.restart_required, 1.0),
            "gatekeeper_storage_failing": float(failing),
        }

    async def _problem(self, error: Exception, call: Call) -> Problem:
        """Return the problem document for an exception. An unexpected one is only logged."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, ConnectionError):
            raise error  # the client is gone
        if isinstance(error, errors.Denied):
            return self.refusal(error)
        if isinstance(error, errors.LeaseTimeout):
            return await self.lease_timeout(error, call)
        for kind, status, name, wait, told in _PROBLEMS:
            if isinstance(error, kind):
                return Problem(status, name, told or str(error), wait=wait)
        _log.error("request %s failed", call.id, exc_info=error)
        return Problem(500, "internal", f"an internal error; the log names it {call.id}")

    def refusal(self, error: errors.Denied) -> Problem:
        """Return 403 for a denial. For a deferral return 429 with Retry-After.

        It is a 503 instead if our own disk is the reason, or the store of a fleet that does not
        divide the hosts among its members.
        """
        decision = error.decision
        if not isinstance(error, errors.Deferred):
            return Problem(403, "denied", decision.explain(), decision=decision)
        internal = decision.reason is Reason.STORAGE
        if decision.reason is Reason.FLEET:
            fleet = self.gate.stats().fleet
            internal = fleet is None or not fleet.dividing  # else another member serves this host
        status, kind = (503, str(decision.reason)) if internal else (429, "deferred")
        wait = self.seconds_until(decision.retry_at)
        return Problem(status, kind, decision.explain(), wait=wait, decision=decision)

    async def lease_timeout(self, error: errors.LeaseTimeout, call: Call) -> Problem:
        """Return the 429 for a lease that did not come within `wait`, with what holds the host."""
        try:
            host = urls.parse(error.url).host
        except errors.InvalidURL:
            host = ""
        holder = await self._holder(host, call)
        why, until = self.gate.parts.scheduler.held_up(host)
        retry_at = error.retry_at or (utc(until) if until else None)
        wait, known = self.seconds_until(retry_at), None if why == "turn" else why
        return Problem(429, "not-yet", f"{error}{holder or ''}", wait=wait, held=holder, why=known)

    async def _holder(self, host: str, call: Call) -> Holder | None:
        """Describe the lease that holds the host; whose it is only to its client and admins (T15).

        A lease of another member of the fleet is described by the store.
        """
        admin = Role.ADMIN in self.admission.roles(call.request.headers)
        if (held := self.leases.holding(host)) is not None:
            may_know = admin or held.client == call.client
            return Holder(held.granted_at, held.expires_at, held.client if may_know else None)
        views: list[ScopeView] = []
        with contextlib.suppress(TimeoutError):  # a store that hangs holds up no response
            async with deadline(self.clock, LOOK_SECONDS):
                views = await self.gate.parts.scheduler.look(host)
        if not views or not views[0].holds:
            return None
        hold, wall = views[0].holds[0], self.clock.wall()
        member = hold.owner if admin else None
        return Holder(utc(wall - hold.age), utc(wall + hold.seconds), member)

    def seconds_until(self, moment: datetime | None) -> float:
        """Return the seconds until a moment, for Retry-After; 1 if there is none."""
        return 1.0 if moment is None else moment.timestamp() - self.clock.wall()


def _reset_if_begun(request: web.BaseRequest) -> bool:
    """Reset the connection if part of a response was sent. Return whether that was so.

    A second response would end up in its body, and a plain close would be the regular end of a body
    without a Content-Length.
    """
    begun, transport = request.writer.output_size > 0, request.transport
    if begun and transport is not None:
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        transport.abort()
    return begun
