"""A worker of the sidecar: a process that answers `/v1/check` from records the owner sends it.

The owner hands connections to the worker. The worker answers `GET` and `POST /v1/check` where it
has the record of the origin. With the first request that it can't answer, it passes the connection
on to the owner: any other path, an origin without a record yet, a client that is not admitted. So
nothing waits here, and everything that one process has to count (leases, limits of clients,
robots.txt fetches) is counted by the owner.

A worker exits when the owner asks it to, or when the owner is gone. If a worker dies, its
connections are lost, but no lease is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from math import inf
from typing import Final, cast

import msgspec

from gatekeeper.clock import OwnedTasks, SingleTimer, SystemClock
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import channel, listening
from gatekeeper.sidecar.channel import Channel, HandOver, Message
from gatekeeper.sidecar.inline import NotPlainError, Request, read
from gatekeeper.sidecar.logs import set_up_logging
from gatekeeper.sidecar.replica import Replica, SharedRecord
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.security import Tokens
from gatekeeper.sidecar.service import Service

_log = logging.getLogger(__name__)
_CLOCK: Final = SystemClock()

_REPORT_SECONDS: Final = 0.2
"""Seconds between two reports of the counts to the owner."""
_MAX_NOTES: Final = 500
"""Decisions that one report holds at most; all are counted."""
_MAX_BATCHES: Final = 4
"""Batches of decisions that one report holds at most; all are counted."""
_WAIT_SECONDS: Final = 0.1
"""Seconds to wait for the rest of a request, or for a record, before the connection goes to the
owner, which counts the request as under way."""
_POLL_SECONDS: Final = 0.01
"""Seconds between two checks whether a connection has written its answers, so that it can be
passed on."""
_MAX_POLLS: Final = 100
"""Number of such checks before `run` gives up on the remaining connections."""
_SWEEP_SECONDS: Final = 20.0
"""Seconds between two sweeps for idle connections."""
_MAX_IDLE_SWEEPS: Final = 4
"""Sweeps that a connection may idle before it is closed; one if it never sent a request."""


class _WorkerConnection(asyncio.Protocol):
    """One connection: reads requests and answers them, or passes the connection to the owner."""

    def __init__(self, worker: _WorkerProcess, unanswered: bytes) -> None:
        self.transport: asyncio.Transport  # from `connection_made` on
        self._worker = worker
        self._unanswered = unanswered
        """Octets that were read and not answered."""
        self._answered = False
        """Whether a question was answered here."""
        self._idle_sweeps = 0
        self._passing_on = False
        self._waiting = False
        """Whether the owner was asked for the record of the question's origin."""
        # Not a SingleTimer: with a method of its own, each connection would be a cycle.
        self._timer: asyncio.TimerHandle | None = None
        self._remote: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading, or pass the connection on if this worker has too many."""
        self.transport = cast("asyncio.Transport", transport)
        self._remote = listening.address_of(transport)
        worker = self._worker
        worker.clients.add(self)
        if len(worker.clients) > worker.max_connections or worker.done.done():
            self.pass_on()
        elif self._unanswered:
            unanswered, self._unanswered = self._unanswered, b""
            self.data_received(unanswered)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the worker."""
        self._worker.clients.discard(self)
        self._waiting = False
        self._stop_timer()

    def pause_writing(self) -> None:
        """Read no further requests from a client that does not read its answers."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read requests again."""
        if not self._passing_on:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Read the data, and answer the question that it completes."""
        self._idle_sweeps = 0
        self._unanswered = self._unanswered + data if self._unanswered else data
        if not self._passing_on and not self._waiting:
            self._answer()
        elif len(self._unanswered) > self._worker.max_request:
            self.pass_on()

    def _answer(self) -> None:
        """Answer what was read, if it is a whole question; else wait for the rest or pass it on."""
        worker = self._worker
        try:
            request = read(self._unanswered, worker.max_header)
        except NotPlainError:
            self.pass_on()
            return
        if request is not None and not request.target.startswith(listening.QUESTION_PATH):
            self.pass_on()
        elif request is not None and not request.missing:
            self._answer_question(request)
        elif len(self._unanswered) > worker.max_request:
            self.pass_on()
        else:
            self._wait()

    def _answer_question(self, request: Request) -> None:
        worker = self._worker
        worker.missing_origin = None
        answer = worker.answer(request, self._remote, self.transport)
        if answer is not None:
            self.transport.write(answer)
            self._unanswered, self._answered = b"", True
            self._stop_timer()
        elif worker.missing_origin is None or request.method != "GET":
            self.pass_on()  # a batch may lack the records of many origins
        else:
            self._waiting = True
            worker.waiting[worker.missing_origin].append(self)
            self._wait()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self._worker.loop.call_later(_WAIT_SECONDS, self.pass_on)

    def retry(self) -> None:
        """Try again, now that the owner has sent the record."""
        if self._waiting:
            self._waiting = False
            self._answer()

    def sweep(self) -> None:
        """Close the connection if it was idle for too many sweeps."""
        self._idle_sweeps += 1
        if self._idle_sweeps > (_MAX_IDLE_SWEEPS if self._answered else 1):
            self.transport.close()

    def pass_on(self) -> None:
        """Give the connection to the owner, as soon as all answers have been sent."""
        transport = self.transport
        if transport.is_closing():
            return
        self._stop_timer()
        self._waiting = False
        if not self._passing_on:
            self._passing_on = True
            transport.pause_reading()
        if transport.get_write_buffer_size():
            self._timer = self._worker.loop.call_later(_POLL_SECONDS, self.pass_on)
            return
        fd = transport.get_extra_info("socket").fileno()
        self._worker.channel.send(HandOver(self._unanswered), fd)
        self._worker.clients.discard(self)
        transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _WorkerProcess:
    """The worker process: its connections, its service, and its channel to the owner."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[str | None] = self.loop.create_future()
        """Completed when the process is to exit. The result is the error that made it exit, or
        None."""
        self.channel: Channel = Channel(sock, self._on_message, self._on_lost)
        self.clients: set[_WorkerConnection] = set()
        self.max_connections: int = 0
        """Connections that this worker keeps at most; further ones go to the owner."""
        self.max_request: int = 0
        """Octets of a request that is read here; larger ones go to the owner."""
        self.max_header: int = 8190
        self._replica: Replica  # made together with the service, by the first `Configure`
        self._service: Service | None = None
        self.waiting: dict[str, list[_WorkerConnection]] = {}
        """Connections that wait for a record, by origin. An origin is a key from when the owner
        was asked for its record until the owner answers."""
        self.missing_origin: str | None = None
        """Origin whose record the latest question lacked."""
        self._tasks = OwnedTasks()
        self._opening = OwnedTasks()
        """Tasks of connections that were accepted and are not among `clients` yet."""
        self._report_timer = SingleTimer(_CLOCK, self._report)
        self._logged = (0, 0)

    async def run(self) -> str | None:
        """Answer until the process is to exit. Return the error that made it exit, or None."""
        self._tasks.start(self._sweep())
        try:
            why = await self.done
            for client in list(self.clients):
                client.pass_on()
            await self._until(lambda: not self.clients and not self._opening)
            for client in list(self.clients):  # clients that do not read their answers
                client.transport.abort()
            self._report()
            await self._until(lambda: not self.channel.queued)
        finally:
            await self._tasks.close()
            await self._opening.close()
            self.channel.close()
        return why

    def stop(self, why: str | None) -> None:
        """Make `run` return `why`: the error that ended the process, or None."""
        if not self.done.done():
            self.done.set_result(why)

    # -- from the owner --------------------------------------------------------------

    def _on_message(self, message: Message, connection: socket.socket | None) -> None:
        if connection is not None and isinstance(message, HandOver):
            self._accept(message, connection)
            return
        try:
            self._follow(message)
        except Exception as error:  # noqa: BLE001 - it would answer from outdated state
            self.stop(f"this worker can't follow its owner: {error!r}")

    def _follow(self, message: Message) -> None:
        match message:
            case channel.Configure():
                self._configure(message)
            case SharedRecord():
                self._replica.take_in(message)
                for client in self.waiting.pop(message.origin, ()):
                    client.retry()
            case channel.DropRecord():
                self._replica.forget(message.origin)
                for client in self.waiting.pop(message.origin, ()):
                    client.pass_on()
            case channel.ClientAtLimit() if self._service is not None:
                at_limit = self._service.clients.at_limit
                (at_limit.add if message.at_limit else at_limit.discard)(message.client)
            case channel.Sync():
                self._report()
                self.channel.send(channel.Synced(message.number))
            case channel.Stop():
                self.stop(None)

    def _on_lost(self) -> None:
        self.stop("the owner process is gone: this worker exits")

    def _configure(self, message: channel.Configure) -> None:
        """Put a configuration in force; the first one starts the service."""
        config, tokens = message.config, Tokens(message.tokens)
        if self._service is None:
            set_up_logging(config.server)
            self._replica = Replica(message.identity, config, wanted=self._request_record)
            self._service = Service(
                self._replica.gate,
                config,
                ROUTES,
                answers=self._replica,
                tokens=tokens,
                addresses=message.addresses,
            )
            self.max_connections = listening.raise_file_limit().clients
            self._tasks.start(self._service.log.run())
            self.channel.send(channel.Ready())
        else:
            self._replica.adjust(config)
            self._service.apply_config(config, tokens)
        self.max_header = config.server.max_header
        self.max_request = config.server.max_body + 2 * self.max_header
        self._replica.follow_rules(message.rules)

    # -- connections -----------------------------------------------------------------

    def _accept(self, message: HandOver, connection: socket.socket) -> None:
        if self.done.done():
            self.channel.send(message, connection.fileno())
            connection.close()
            return
        self._opening.start(self._open(message, connection))

    async def _open(self, message: HandOver, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self.loop.connect_accepted_socket(
                lambda: _WorkerConnection(self, message.unanswered), connection
            )
        except OSError:
            connection.close()

    def answer(
        self, request: Request, remote: str | None, transport: asyncio.Transport
    ) -> bytes | None:
        """Return the response to a request; see `Service.inline`."""
        # With tracing, each request has a span, which only the owner makes.
        if self._service is None or self._service.inline is None:
            return None
        answer = self._service.inline(request, remote, transport)
        if answer is not None and self._report_timer.when == inf:
            self._report_timer.set(_CLOCK.monotonic() + _REPORT_SECONDS)
        return answer

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for client in list(self.clients):
                client.sweep()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Return when `done()` is true, when the owner is gone, or after a second."""
        for _ in range(_MAX_POLLS):
            if done() or self.channel.closed:
                return
            await asyncio.sleep(_POLL_SECONDS)

    # -- to the owner ----------------------------------------------------------------

    def _request_record(self, origin: str) -> None:
        if origin not in self.waiting:
            self.waiting[origin] = []
            self.channel.send(channel.RecordRequest(origin))
        self.missing_origin = origin

    def _report(self) -> None:
        """Send the owner what was counted since the previous call."""
        self._report_timer.cancel()
        if (service := self._service) is None:
            return
        feed = service.operators.feed
        count, feed.count = feed.count, 0
        notes = feed.take_latest(_MAX_NOTES, _MAX_BATCHES)
        decisions, refused = self._replica.drain_counts()
        written, dropped = service.log.written, service.log.dropped
        logged = written - self._logged[0], dropped - self._logged[1]
        self._logged = written, dropped
        self.channel.send(
            channel.WorkerCounts(
                requests=service.metrics.drain_requests(),
                decisions=decisions,
                origins=feed.take_counts(),
                notes=notes,
                unnoted=count - sum(one.count for one in notes),
                refused=refused,
                logged=logged,
                connections=len(self.clients),
            )
        )


def main() -> None:
    """Run the process. Its last argument is the file descriptor of its end of the channel."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner gets them as well, and acts on them
    os.environ.pop("NOTIFY_SOCKET", None)
    factory = listening.loop_factory()
    with listening.rare_collections(), asyncio.Runner(loop_factory=factory) as runner:
        why = runner.run(_serve(socket.socket(fileno=int(sys.argv[-1]))))
    if why is not None:
        _log.error("%s", why)
        sys.exit(1)


async def _serve(sock: socket.socket) -> str | None:
    try:
        worker = _WorkerProcess(sock)
        worker.loop.add_signal_handler(signal.SIGTERM, worker.stop, None)
        return await worker.run()
    except (ConfigError, msgspec.MsgspecError) as error:
        return f"this worker can't start: {error}"
