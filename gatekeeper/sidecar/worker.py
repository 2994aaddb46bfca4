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
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp.base_protocol import BaseProtocol

from gatekeeper import speedups
from gatekeeper.errors import ConfigError
from gatekeeper.gate import Replica
from gatekeeper.library_internals import Octets, request_parser, whole_request, write_octets
from gatekeeper.sidecar.channel import (
    Adopt,
    BatchNote,
    Channel,
    ClientFull,
    Connected,
    Counted,
    Forget,
    Known,
    Leave,
    Mark,
    Message,
    OriginTally,
    Reached,
    Ready,
    RuntimeRules,
    Want,
)
from gatekeeper.sidecar.exchange import Role
from gatekeeper.sidecar.listening import (
    QUESTION,
    QUESTIONS,
    KnownHeads,
    address_of,
    loop_factory,
    raise_file_limit,
    usual,
)
from gatekeeper.sidecar.logs import set_up
from gatekeeper.sidecar.security import Token, Tokens
from gatekeeper.sidecar.service import Service

_log = logging.getLogger(__name__)

_TELL: Final = 0.2
"""Seconds between two reports of the counts to the owner."""
_NOTES: Final = 500
"""Decisions that one report holds at most; all are counted."""
_BATCHES: Final = 4
"""Batches of decisions that one report holds at most; all are counted."""
_PATIENCE: Final = 0.1
"""Seconds to wait for the rest of a request, or for a record, before the connection goes to the
owner, which counts the request as under way."""
_TRY: Final = 0.01
"""Seconds between two checks whether a connection has written its answers, so that it can be
passed on."""
_TRIES: Final = 100
"""Number of such checks before `run` gives up on the remaining connections."""
_SWEEP: Final = 20.0
"""Seconds between two sweeps for idle connections."""
_IDLE: Final = 4
"""Sweeps that a connection may idle before it is closed; one if it never sent a request."""
_FORGIVEN: Final = 4
"""A connection counts as not passed on recently after this many times as many questions as the
owner answered before it passed the connection on."""


class _WorkerConnection(BaseProtocol):
    """One connection: reads requests and answers them, or passes the connection to the owner."""

    __slots__ = (
        *("_answered", "_begun", "_idle", "_leaving", "_message", "_passes"),
        *("_payload", "_raw", "_reader", "_remote", "_timer", "_waits", "_worker"),
    )

    def __init__(self, worker: _WorkerProcess, begun: bytes, passes: int) -> None:
        super().__init__(worker.loop)
        self._reader = request_parser(self, worker.loop, header=worker.header)
        self._worker = worker
        self._raw = b""
        """Octets that were read and not answered."""
        self._begun = begun
        self._passes = passes
        self._answered = 0
        """Questions answered here."""
        self._idle = 0
        self._message: Any = None
        self._payload: Any = None
        self._leaving = False
        self._waits = False
        """Whether the owner was asked for the record of the question's origin."""
        self._timer: asyncio.TimerHandle | None = None
        self._remote: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading, or pass the connection on if this worker has too many."""
        super().connection_made(transport)
        self._remote = address_of(transport)
        worker = self._worker
        worker.clients.add(self)
        begun, self._begun = self._begun, b""
        if self._reader is None or len(worker.clients) > worker.most:
            self._raw = begun
            self.pass_on()
        elif begun:
            self.data_received(begun)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the worker."""
        super().connection_lost(exc)
        self._worker.clients.discard(self)
        self._stop_timer()

    def pause_writing(self) -> None:
        """Read no further requests from a client that does not read its answers."""
        super().pause_writing()
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read requests again."""
        super().resume_writing()
        if self.transport is not None and not self._leaving:
            self.transport.resume_reading()

    def pause_reading(self) -> None:
        """Do nothing: a body this large is about to be passed to the owner."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Do nothing, since `pause_reading` pauses nothing."""

    def data_received(self, data: bytes) -> None:
        """Read the data, and answer the question that it completes."""
        self._idle = 0
        self._raw = self._raw + data if self._raw else data
        if self._leaving or self._waits:
            if len(self._raw) > self._worker.most_octets:
                self.pass_on()
            return
        if self._raw is data and self._answer_known(data):
            return
        try:
            messages, upgraded, _ = self._reader.feed_data(data)
        except Exception:  # noqa: BLE001 - the owner answers with the error
            self.pass_on()
            return
        if messages:
            if len(messages) > 1 or upgraded or self._message is not None:
                self.pass_on()
                return
            self._message, self._payload = messages[0]
        message = self._message
        if message is not None and not message.path.startswith(QUESTION):
            self.pass_on()
        elif message is None or not self._payload.is_eof():
            if len(self._raw) > self._worker.most_octets:
                self.pass_on()
            elif self._timer is None:
                self._timer = self._worker.loop.call_later(_PATIENCE, self.pass_on)
        else:
            self._try()

    def _try(self) -> None:
        """Answer the request that was read, wait for the record of its origin, or pass it on.

        A batch is passed on immediately, since it may lack the records of many origins.
        """
        worker = self._worker
        worker.lacks = None
        if self._answer(self._message):
            return
        if worker.lacks is None or self._message.method != "GET":
            self.pass_on()
            return
        self._waits = True
        worker.waiting[worker.lacks].append(self)
        if self._timer is None:
            self._timer = worker.loop.call_later(_PATIENCE, self.pass_on)

    def again(self) -> None:
        """Try again, now that the owner has answered about the origin."""
        if self._waits:
            self._waits = False
            self._try()

    def _answer(self, message: Any) -> bool:
        """Answer the request that was read. Return False if only the owner can."""
        raw = self._raw
        length = whole_request(raw, self._payload)
        if length < 0 or not usual(message):
            return False
        heads = self._worker.heads
        if heads is not None:
            heads.learn(raw, message, length)
        body = raw[len(raw) - length :]
        return self._write(message.method, message.path, message.headers, body)

    def _answer_known(self, data: bytes) -> bool:
        """Answer a question whose head was parsed before. Return False if it must be parsed."""
        heads = self._worker.heads
        if heads is None or not data.startswith(QUESTIONS) or self._message is not None:
            return False
        found = heads.read(data)
        return found is not None and self._write(*found)

    def _write(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Write the answer to a request. Return False if only the owner can answer."""
        transport = self.transport
        if transport is None:
            return False
        answer = self._worker.answer(method, target, headers, body, self._remote, transport)
        if answer is None:
            return False
        write_octets(transport, answer)
        self._raw, self._message, self._payload = b"", None, None
        self._stop_timer()
        self._answered += 1
        if self._passes and self._answered >= _FORGIVEN << self._passes:
            self._passes = 0
        return True

    def sweep(self) -> None:
        """Close the connection if it was idle for too many sweeps."""
        self._idle += 1
        if self._idle > (_IDLE if self._answered or self._passes else 1) and self.transport:
            self.transport.close()

    def pass_on(self) -> None:
        """Give the connection to the owner, as soon as all answers have been sent."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._stop_timer()
        self._waits = False
        if not self._leaving:
            self._leaving = True
            transport.pause_reading()
        if transport.get_write_buffer_size():
            self._timer = self._worker.loop.call_later(_TRY, self.pass_on)
            return
        fd = transport.get_extra_info("socket").fileno()
        self._worker.channel.send(Connected(self._raw, self._passes), fd)
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
        self.most: int = 0
        """Connections that this worker keeps at most; further ones go to the owner."""
        self.most_octets: int = 0
        """Octets of a request that is read here; larger ones go to the owner."""
        self.header: int = 8190
        self.answer: Callable[..., Octets | None] = lambda *_: None
        self.heads: KnownHeads | None = None
        self._replica: Replica  # made together with the service, by the first `Adopt`
        self._service: Service | None = None
        self._asked: set[str] = set()
        self.waiting: dict[str, list[_WorkerConnection]] = {}
        """Connections that wait for a record, by origin. An origin is a key from when the owner
        was asked for its record until the owner answers."""
        self.lacks: str | None = None
        """Origin whose record the latest question lacked. None if it lacked none, or none that the
        owner is expected to send."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._logged = (0, 0)
        self._acts: dict[type, Callable[[Any], object]] = {
            Adopt: self._adopt,
            RuntimeRules: lambda message: self._replica.follow_rules(message.rules),
            Known: self._learn,
            Forget: self._forget,
            ClientFull: self._on_full,
            Mark: self._on_mark,
            Leave: lambda _message: self.leave(None),
        }

    async def run(self) -> str | None:
        """Answer until the process is to exit. Return the error that made it exit, or None."""
        sweeping = self.loop.create_task(self._sweep())
        try:
            why = await self.done
            for client in list(self.clients):
                client.pass_on()
            await self._until(lambda: not self.clients)
            for client in list(self.clients):  # clients that do not read their answers
                if client.transport is not None:
                    client.transport.abort()
            self._tell()
            await self._until(lambda: not self.channel.queued)
        finally:
            sweeping.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(sweeping, *self._tasks, return_exceptions=True)
            if self._service is not None:
                self._replica.close()
            self.channel.close()
        return why

    def leave(self, why: str | None) -> None:
        """Make `run` return `why`: the error that ended the process, or None."""
        if not self.done.done():
            self.done.set_result(why)

    # -- from the owner --------------------------------------------------------------

    def _on_message(self, message: Message, connection: socket.socket | None) -> None:
        if connection is not None and isinstance(message, Connected):
            self._take(message, connection)
        elif (act := self._acts.get(type(message))) is not None:
            try:
                act(message)
            except Exception as error:  # noqa: BLE001 - it would answer from outdated state
                self.leave(f"this worker can't follow its owner: {error!r}")

    def _on_lost(self) -> None:
        self.leave("the process that owns the turns is gone, and so this worker of it ends")

    def _adopt(self, adopt: Adopt) -> None:
        """Put a configuration in force; the first one starts the service."""
        config = adopt.config
        tokens = Tokens(
            Token(one.value, one.name, frozenset(map(Role, one.roles))) for one in adopt.tokens
        )
        if self._service is None:
            self._start(adopt, tokens)
        else:
            self._replica.adjust(config)
            self._service.take_over(config, tokens)
        self.most_octets = config.server.max_body + 2 * config.server.max_header
        self._replica.follow_rules(adopt.rules)

    def _start(self, adopt: Adopt, tokens: Tokens) -> None:
        config = adopt.config
        set_up(config.server)
        self._replica = Replica(adopt.identity, config, wanted=self._want)
        for address, port in adopt.addresses:
            if self._replica.guard is not None:
                self._replica.guard.listens_on(address, port)  # T3
        self._service = service = Service(
            self._replica.gate,
            config,
            inside=self._replica,
            tokens=tokens,
            addresses=adopt.addresses,
            version=adopt.version,
        )
        self.header, self.most = config.server.max_header, raise_file_limit().clients
        if speedups.ON:
            self.heads = KnownHeads(line=self.header)
        # With tracing, each request has a span, which only the owner makes.
        self.answer = self._answer if not service.traced else lambda *_: None
        self._keep(self.loop.create_task(service.log.run()))
        self.channel.send(Ready())

    def _learn(self, known: Known) -> None:
        self._asked.discard(known.origin)
        self._replica.take_in(known.origin, known.record)
        self._told(known.origin)

    def _forget(self, message: Forget) -> None:
        self._replica.forget(message.origins)
        for origin in message.origins:
            self._told(origin)

    def _told(self, origin: str) -> None:
        for client in self.waiting.pop(origin, ()):
            client.again()

    def _on_full(self, message: ClientFull) -> None:
        if self._service is not None:
            self._service.clients.full_elsewhere(message.client, message.full)

    def _on_mark(self, mark: Mark) -> None:
        self._tell()
        self.channel.send(Reached(mark.number))

    # -- connections -----------------------------------------------------------------

    def _take(self, message: Connected, connection: socket.socket) -> None:
        if self.done.done():
            self.channel.send(message, connection.fileno())
            connection.close()
            return
        self._keep(self.loop.create_task(self._open(message, connection)))

    async def _open(self, message: Connected, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self.loop.connect_accepted_socket(
                lambda: _WorkerConnection(self, message.begun, message.passes), connection
            )
        except OSError:
            connection.close()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, *request: Any) -> Octets | None:
        service = self._service
        answer = None if service is None else service.answer_at_once(*request)
        if answer is not None and self._telling is None:
            self._telling = self.loop.call_later(_TELL, self._tell)
        return answer

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            for client in list(self.clients):
                client.sweep()
            self._asked.clear()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Return when `done()` is true, when the owner is gone, or after a second."""
        for _ in range(_TRIES):
            if done() or self.channel.closed:
                return
            await asyncio.sleep(_TRY)

    # -- to the owner ----------------------------------------------------------------

    def _want(self, origin: str) -> None:
        if origin not in self._asked:
            self._asked.add(origin)
            self.waiting.setdefault(origin, [])
            self.channel.send(Want(origin))
        self.lacks = origin if origin in self.waiting else None

    def _tell(self) -> None:
        """Send the owner what was counted since the previous call."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if (service := self._service) is None:
            return
        feed = service.operators.feed
        given, feed.count = feed.count, 0
        notes, bases, batches = feed.take_latest(_NOTES)
        told = [
            BatchNote(at, request, client, list(texts))
            for _, at, texts, request, client in batches[-_BATCHES:]
        ]
        decisions, refused = self._replica.drain_counts()
        written, dropped = service.log.written, service.log.dropped
        logged = written - self._logged[0], dropped - self._logged[1]
        self._logged = written, dropped
        self.channel.send(
            Counted(
                requests=[(*key, n) for key, n in service.metrics.take_requests().items()],
                decisions=[(str(v), str(reason), n) for (v, reason), n in decisions.items()],
                origins=[
                    OriginTally(origin, one.allow, one.deny, one.defer)
                    for origin, one in feed.take_counts().items()
                ],
                bases=bases,
                notes=notes,
                batches=told,
                unnoted=given - len(notes) - sum(len(one.decisions) for one in told),
                refused=dict(refused),
                logged=logged,
                connections=len(self.clients),
            )
        )


def main() -> None:
    """Run the process. Its last argument is the file descriptor of its end of the channel."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner gets them as well, and acts on them
    os.environ.pop("NOTIFY_SOCKET", None)
    gc.freeze()  # as the owner does
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        why = runner.run(_serve(socket.socket(fileno=int(sys.argv[-1]))))
    if why is not None:
        _log.error("%s", why)
        sys.exit(1)


async def _serve(sock: socket.socket) -> str | None:
    try:
        worker = _WorkerProcess(sock)
        worker.loop.add_signal_handler(signal.SIGTERM, worker.leave, None)
        return await worker.run()
    except (ConfigError, msgspec.MsgspecError) as error:
        return f"this worker can't begin: {error}"
