"""The workers of the sidecar, as the owner process manages them.

The owner accepts every connection, and hands each to the next worker, as a file descriptor. A
worker answers questions about origins whose records it has, and passes the connection back with
the first request that is anything else. A connection that asks only questions from then on is
handed out again. So leases, pages, metrics and all other shared state belong to one process, which
also answers every request itself while there is no worker.

What makes it one service
    * a worker knows what the owner sent it. What the owner learns about an origin, is told by the
      operator or reads in its configuration goes to every worker immediately. `settle` returns
      when each worker follows it, or is gone; the answers to a refresh and a reload wait for that;
    * workers report what they answered to the owner five times a second and at each `settle`;
    * when a worker dies its connections are lost, and it is started again. One that does not
      follow gets no new connections after half a second, and is killed after five.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from gatekeeper.clock import OwnedTasks
from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.fetching.records import Record
from gatekeeper.gate import Gatekeeper
from gatekeeper.sidecar import channel
from gatekeeper.sidecar.channel import Channel, HandOver, Message
from gatekeeper.sidecar.listening import Server
from gatekeeper.sidecar.logs import DecisionLog
from gatekeeper.sidecar.metrics import Metrics, Samples
from gatekeeper.sidecar.pages.recent_decisions import DecisionFeed
from gatekeeper.sidecar.replica import shared_record
from gatekeeper.sidecar.security import ClientLimits

_log = logging.getLogger(__name__)

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); "
    "from gatekeeper.sidecar.worker import main; main()"
)
_RESTART_SECONDS: Final = 0.5
"""Seconds before a worker that exited is started again; doubled each time."""
_MAX_RESTART_SECONDS: Final = 30.0
_STEADY_SECONDS: Final = 60.0
"""Seconds that a worker has to live for the pause to be `_RESTART_SECONDS` again."""
SYNC_SECONDS: Final = 5.0
"""Seconds that a worker has to answer a `Sync`, or to exit, before it is killed."""
_LATE_SECONDS: Final = 0.5
"""Seconds after which a worker that has not answered a `Sync` is given no connection."""
_CHECK_SECONDS: Final = 2.0
"""Seconds between two checks that every worker follows."""
_MAX_QUEUED: Final = 8 << 20
"""Octets that may be queued for a worker; beyond, it is killed."""


def check_workers(server: ServerConfig) -> None:
    """Check that the other settings allow workers. Raises ConfigError."""
    if server.workers and server.tls_cert is not None:
        raise ConfigError(
            "server.workers: TLS can't be handed on; put a proxy in front that ends TLS, or set 0"
        )
    if server.workers and server.client_rate is not None:
        raise ConfigError(
            "server.workers: server.client_rate is counted by one process; leave one of them out"
        )


class _Worker:
    """One worker process, from its start to its end."""

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, sock: socket.socket, owner: Workers
    ) -> None:
        self.number = number
        self.process = process
        self.channel: Channel = Channel(sock, partial(owner.on_message, self), self.lost)
        self.ready: bool = False
        self.connections: int = 0
        self.synced: int = 0
        """Number of the last `Sync` that the worker answered."""
        self.sync_sent_at: float = math.inf
        """Monotonic moment at which the first `Sync` that is not answered yet was sent."""

    def lost(self) -> None:
        self.ready = False

    def send(self, message: Message, fd: int = -1) -> None:
        self.channel.send(message, fd)
        if self.channel.queued > _MAX_QUEUED:
            self.kill("takes no messages")

    def kill(self, why: str) -> None:
        self.ready = False
        if self.process.returncode is None:
            _log.error("worker %d (process %d) %s: killed", self.number, self.process.pid, why)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


@dataclass(frozen=True, slots=True)
class Owner:
    """The parts of the owner process that its workers follow, and to which they report."""

    gate: Gatekeeper
    clients: ClientLimits
    metrics: Metrics
    feed: DecisionFeed
    log: DecisionLog
    configuration: Callable[[], channel.Configure]
    """Returns the configuration in force."""


class Workers:
    """The worker processes of a sidecar, `count` of them. `serving` starts them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: dict[int, _Worker] = {}
        self._round = itertools.count()
        self._sync_numbers = itertools.count(1)
        self._progress = asyncio.Event()
        self.owner: Owner  # set by the service of this process
        self._server: Server  # inside `serving`
        self._tasks = OwnedTasks()
        self._stopping = False
        self.restarts: int = 0

    # -- life ------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self, server: Server) -> AsyncIterator[None]:
        """Run the workers inside the context. On exit they pass their connections back."""
        self._server = server
        self.owner.gate.parts.followers.append(self)
        self.owner.metrics.add_source(self._samples)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run(n)) for n in range(1, self._count + 1)]
            running.append(tasks.create_task(self._watch()))
            try:
                yield
            finally:
                await self.recall()
                for task in running:
                    task.cancel()
                await self._tasks.close()

    async def recall(self) -> None:
        """Make every worker pass its connections back and exit. Idempotent."""
        self._stopping = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.ready = False
            worker.send(channel.Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_SECONDS):
                for worker in workers:
                    await worker.process.wait()
        for worker in workers:
            worker.kill("did not end")
            worker.channel.read_rest()

    async def _watch(self) -> None:
        """Kill workers that hang, since their clients would wait."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            await self.settle()

    async def _run(self, number: int) -> None:
        """Keep worker `number` running until the service ends."""
        loop, pause = asyncio.get_running_loop(), _RESTART_SECONDS
        while not self._stopping:
            began = loop.time()
            how = await self._run_once(number)
            if self._stopping:
                return
            pause = _RESTART_SECONDS if loop.time() - began > _STEADY_SECONDS else pause
            _log.error("worker %d %s; it is started again in %g s", number, how, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RESTART_SECONDS)
            self.restarts += 1

    async def _run_once(self, number: int) -> str:
        """Start a worker and wait until it exits. Return how it ended, for the log."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            return f"could not be started ({error.strerror or error})"
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _PROGRAM,
                "\n".join(sys.path),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            return f"could not be started ({error.strerror or error})"
        finally:
            theirs.close()
        self._workers[number] = worker = _Worker(number, process, ours, self)
        self._configure(worker)
        try:
            code = await process.wait()
        finally:
            del self._workers[number]
            worker.ready = False
            if process.returncode is None:
                process.kill()
                await process.wait()
            worker.channel.read_rest()
            worker.channel.close()
            self._wake()
        name = signal.Signals(-code).name if code < 0 else ""
        return f"(process {process.pid}) ended " + (f"by {name}" if name else f"with status {code}")

    # -- connections -----------------------------------------------------------------

    def dispatch(self, connection: socket.socket) -> None:
        """Hand a new connection to a worker, or serve it in this process if none takes it."""
        if self.pass_on(connection.fileno(), b""):
            connection.close()
        else:
            self._server.serve(connection)

    def pass_on(self, fd: int, unanswered: bytes) -> bool:
        """Hand a connection to the next worker that takes it. Return False if there is none."""
        workers = self.accepting()
        for _ in workers:
            worker = workers[next(self._round) % len(workers)]
            if not worker.channel.queued:
                worker.send(HandOver(unanswered), fd)
                return True
        return False

    def accepting(self) -> list[_Worker]:
        """Return the workers that take connections; one that does not follow may hang."""
        before = asyncio.get_running_loop().time() - _LATE_SECONDS
        return [one for one in self._workers.values() if one.ready and one.sync_sent_at > before]

    # -- what workers have to know ---------------------------------------------------

    def _configure(self, worker: _Worker) -> None:
        message = self.owner.configuration()
        server = message.config.server
        log_rate = max(1, server.log_rate // (self._count + 1))  # a share of the whole
        server = msgspec.structs.replace(server, log_rate=log_rate)
        config = msgspec.structs.replace(message.config, server=server)
        worker.send(msgspec.structs.replace(message, config=config))
        for client in self.owner.clients.at_limit:
            worker.send(channel.ClientAtLimit(client, at_limit=True))

    def _broadcast(self, message: Message) -> None:
        for worker in list(self._workers.values()):
            worker.send(message)

    def send_configuration(self) -> None:
        """Send every worker the configuration that is in force now."""
        for worker in list(self._workers.values()):
            self._configure(worker)

    def learnt(self, record: Record) -> None:
        """Make the workers drop their record of an origin that is about to be stored anew.

        They ask for the new one by a message, which is read after it was stored.
        """
        self._broadcast(channel.DropRecord(record.origin))

    rules_changed = send_configuration  # the operator's rules about hosts are part of it

    def client_at_limit(self, client: str, at_limit: bool) -> None:
        """Tell every worker that a client reached its limit, or fell below it again."""
        self._broadcast(channel.ClientAtLimit(client, at_limit))

    async def settle(self) -> None:
        """Return when every worker follows all that was sent, and has reported all its counts.

        A worker that does not within five seconds is killed.
        """
        number = next(self._sync_numbers)
        waiting = [one for one in self._workers.values() if one.ready]
        now = asyncio.get_running_loop().time()
        for worker in waiting:
            worker.sync_sent_at = min(worker.sync_sent_at, now)
            worker.send(channel.Sync(number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_SECONDS):
                while any(one.ready and one.synced < number for one in waiting):
                    await self._progress.wait()
        for worker in waiting:
            if worker.ready and worker.synced < number:
                worker.kill("does not follow")

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    # -- what workers say ------------------------------------------------------------

    def on_message(
        self, worker: _Worker, message: Message, connection: socket.socket | None
    ) -> None:
        """Handle a message from a worker."""
        if connection is not None and isinstance(message, HandOver):
            self._server.serve(connection, message.unanswered)
        elif isinstance(message, channel.WorkerCounts):
            self._add_counts(worker, message)
        elif isinstance(message, channel.RecordRequest):
            # Without a record the worker passes the connections on that wait for it.
            record = shared_record(self.owner.gate, message.origin)
            worker.send(record or channel.DropRecord(message.origin))
        elif isinstance(message, channel.Synced):
            worker.synced, worker.sync_sent_at = message.number, math.inf
            self._wake()
        elif isinstance(message, channel.Ready):
            worker.ready = not self._stopping
            self._wake()
            _log.info("worker %d (process %d) answers", worker.number, worker.process.pid)

    def _add_counts(self, worker: _Worker, added: channel.WorkerCounts) -> None:
        """Add a worker's counts and decisions to this process's own."""
        owner = self.owner
        for answered, count in added.requests.items():
            owner.metrics.count_response(*answered, count)
        parts = owner.gate.parts
        parts.decider.count(added.decisions)
        if parts.guard is not None:
            parts.guard.count(added.refused)
        feed = owner.feed
        for origin, new in added.origins.items():
            counts = feed.count_of(origin)
            counts.allow += new.allow
            counts.deny += new.deny
            counts.defer += new.defer
        feed.count += added.unnoted
        for note in added.notes:
            feed.merge(note)
        if parts.audit is not None and parts.audit.every_decision:
            decided = [one for note in added.notes for one in note.decided()]
            parts.audit.decided_elsewhere(decided, added.unnoted)
        owner.log.add_counts(*added.logged)
        worker.connections = added.connections

    def _samples(self) -> Samples:
        workers = list(self._workers.values())
        return {
            "gatekeeper_workers": sum(one.ready for one in workers),
            "gatekeeper_worker_connections": sum(one.connections for one in workers),
            "gatekeeper_worker_restarts": self.restarts,
        }
