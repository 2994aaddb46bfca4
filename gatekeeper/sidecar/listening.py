"""Listening sockets, limits on connections, and the HTTP server that reads requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import re
import shlex
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from gatekeeper import library_internals
from gatekeeper.clock import OwnedTasks
from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.inline import Request, RequestReader
from gatekeeper.sidecar.routing import FORWARD_AUTH, Problem
from gatekeeper.sidecar.security import UNIX, Certificates
from gatekeeper.urls import bracketed, printable

_log = logging.getLogger(__name__)


FIRST_FD = 3  # SD_LISTEN_FDS_START


class _OwnedUnixSocket(socket.socket):
    """A unix socket that removes its file when it closes, if that is still its own.

    Another process may have replaced the file. Device and inode identify it: a bound socket keeps
    its inode, so the number is not used for another file before.
    """

    _path: Path | None = None

    def bind_to(self, path: Path) -> None:
        """Bind to a path that only its owner can ever connect to (T5). Raises OSError."""
        # The umask sets the mode: before a chmod others could connect for a moment.
        previous = os.umask(0o177)
        try:
            self.bind(str(path))
        finally:
            os.umask(previous)
        self._path, self._own_file = path, path.lstat()

    def close(self) -> None:
        """Remove the file, unless a successor has replaced it, and close the socket."""
        path, self._path = self._path, None
        with contextlib.suppress(OSError):
            if path is not None and os.path.samestat(path.lstat(), self._own_file):
                path.unlink()
        super().close()


_SOCKET = "--socket or server.socket"


def open_sockets(server: ServerConfig) -> list[socket.socket]:
    """Return the bound sockets of the service. Raises ConfigError if one can't be bound."""
    if server.socket is not None:
        return [_unix(Path(server.socket))]
    return _open_tcp(server.host, server.port, "--port or server.port")


def open_diagnostics_sockets(server: ServerConfig) -> list[socket.socket]:
    """Return the bound sockets of `server.diagnostics`; none without it. Raises ConfigError."""
    where = diagnostics_address(server)
    setting = "server.diagnostics"
    return [] if where is None else _open_tcp(*where, setting, host_setting=setting)


def diagnostics_address(server: ServerConfig) -> tuple[str, int] | None:
    """Return host and port of `server.diagnostics`, None if it is not set. Raises ConfigError.

    >>> diagnostics_address(ServerConfig(diagnostics="[::]:8751"))
    ('::', 8751)
    """
    given = server.diagnostics
    if given is None:
        return None
    found = _ADDRESS_AND_PORT(given)
    if found is None or int(found[3]) > 65535:
        remedy = 'give an address and a port, such as "0.0.0.0:8751" or "[::]:8751"'
        raise ConfigError(f"server.diagnostics: {printable(given, 80)!r}; {remedy}")
    return found[1] or found[2], int(found[3])


_ADDRESS_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]\s/:@]+)):([0-9]{1,5})").fullmatch


_BIND_REMEDIES: dict[int | None, str] = {
    errno.EACCES: "this user needs a port above 1023, or CAP_NET_BIND_SERVICE; ",
    errno.EADDRINUSE: "another one may be running, ",
}


def _open_tcp(
    host: str, port: int, setting: str, *, host_setting: str = "server.host"
) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        remedy = "give an address or a name of this machine"
        raise ConfigError(f"{host_setting}: {host}: {error.strerror}; {remedy}") from error
    # With port 0 each address would get another port, so only the first address is used.
    wanted = found[:1] if port == 0 else found
    sockets: list[socket.socket] = []
    try:
        # It listens at once: two sockets may be bound to one address as long as neither listens.
        sockets.extend(socket.create_server(one[4], family=one[0]) for one in wanted)
    except OSError as error:
        for one in sockets:
            one.close()
        remedy = _BIND_REMEDIES.get(error.errno, "") + f"{setting} changes it"
        # `create_server` adds the address to the text of the system.
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"{host} port {port}: {why}; {remedy}") from error
    return sockets


def _unix(path: Path) -> socket.socket:
    _remove_stale(path)
    sock = _OwnedUnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind_to(path)
        sock.listen()  # otherwise another start would take the socket for a stale one
    except OSError as error:
        sock.close()
        remedy = "give a shorter one" if error.errno is None else f"{_SOCKET} names another path"
        if error.errno == errno.ENOENT:
            remedy = f"make its directory first, or {remedy}"
        raise ConfigError(f"server.socket: {path}: {error.strerror or error}; {remedy}") from error
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises ConfigError for anything else at the path."""
    if not path.exists():
        return
    problem = "it is not a socket; remove it"
    if path.is_socket():
        problem = "another process listens there; stop it"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
    raise ConfigError(f"server.socket: {path}: {problem}, or name another path with {_SOCKET}")


def activated_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the sockets of LISTEN_FDS, if they are for this process (sd_listen_fds).

    Raises ConfigError if one is unusable.
    """
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found: list[socket.socket] = []
    for number in range(FIRST_FD, FIRST_FD + int(count)):
        with contextlib.suppress(OSError):
            os.set_inheritable(number, False)
            found.append(socket.socket(fileno=number))
            if found[-1].type == socket.SOCK_STREAM:
                continue
        for sock in found:
            sock.close()
        problem = f"descriptor {number} is no stream socket; pass one with ListenStream="
        raise ConfigError(f"LISTEN_FDS: {problem}")
    return found


def notify(message: str, environ: MutableMapping[str, str]) -> None:
    """Send a message to the service manager, if there is one (sd_notify). Never fails."""
    where = environ.get("NOTIFY_SOCKET")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.sendall(message.encode())


def addresses(sockets: list[socket.socket]) -> list[tuple[str, int]]:
    """Return address and port of each TCP socket."""
    return [sock.getsockname()[:2] for sock in sockets if sock.family != socket.AF_UNIX]


def open_to_others(sockets: list[socket.socket]) -> str | None:
    """Describe a unix socket to which other users may connect (T5). Return None if there is none.

    Connecting takes the right to write to the socket's file (unix(7)). A name in the abstract
    namespace has no file, and so no protection. Our own sockets have mode 0600, those of systemd
    0666 by default.
    """
    for sock in (one for one in sockets if one.family == socket.AF_UNIX):
        name = sock.getsockname()
        if not name or isinstance(name, bytes) or name.startswith("\0"):
            shown = name.decode(errors="replace") if isinstance(name, bytes) else name
            return f"{UNIX}{shown.replace(chr(0), '@')}, which has no file,"
        try:
            mode = stat.S_IMODE(Path(name).stat().st_mode)
        except OSError as error:
            return f"{UNIX}{name} ({error.strerror})"
        if mode & 0o022:
            return f"{UNIX}{name} (mode {mode:04o})"
    return None


def describe(sock: socket.socket, server: ServerConfig) -> tuple[str, str]:
    """Return where a socket listens, as a URL or path, and a curl command to try it."""
    if sock.family == socket.AF_UNIX:
        path = sock.getsockname()
        where = f"{UNIX}{path}"
        at = f"--unix-socket {shlex.quote(path)} {_scheme(server)}://localhost"
    else:
        where = url_of(sock, server)
        # Without -g curl would take the brackets for a range of URLs.
        at = f"-g {where}" if "[" in where else where
    query = "--data-urlencode url=https://www.wikipedia.org/"
    return where, f"curl -sG{_credentials(server)} {at}/v1/check {query}"


def url_of(sock: socket.socket, server: ServerConfig) -> str:
    """Return the URL of a TCP listener."""
    host, port = sock.getsockname()[:2]
    return f"{_scheme(server)}://{bracketed(host)}:{port}"


def _scheme(server: ServerConfig) -> str:
    return "http" if server.tls_cert is None else "https"


def _credentials(server: ServerConfig) -> str:
    """Return the curl options for TLS and credentials. They read the token, and do not show it."""
    options = ""
    if server.tls_cert is not None:
        options += " -k"  # our own certificate, which may be for another name of this machine
    if server.token_file is not None:
        first = f"sed '/^#/d;/^$/d;s/.*://;q' {shlex.quote(server.token_file)}"
        options += f' -H "Authorization: Bearer $({first})"'
    elif server.tls_client_ca is not None:
        options += " --cert CLIENT.pem --key CLIENT.key"
    return options


# --- File descriptors: how many connections they allow, and the log line when they run out.


_MAX_FILES = 65_536
_MIN_RESERVED = 64
"""File descriptors reserved at least for the gate's own work: sites, storage, logs."""
_FEW_FILES = 1024
_MAX_BACKLOG = 512
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_SECONDS = 60.0
"""Seconds between two log lines about that."""
_GC_THRESHOLD = 20_000
"""New objects after which the garbage collector runs; they take some megabytes."""


class ConnectionLimits(NamedTuple):
    """The numbers of connections that the limit of open files allows."""

    clients: int
    """Open connections. Further ones are turned away, which takes a descriptor for a moment."""
    backlog: int
    """Connections that may arrive together: the event loop accepts as many in one iteration,
    before any of them can be turned away."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None if uvloop is not installed."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely, and not over imported modules.

    Reference counting frees the objects of a request when it ends, and the requests in progress
    are not garbage. A full collection stops the event loop for tens of milliseconds.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def raise_file_limit() -> ConnectionLimits:
    """Raise the limit of open files as far as allowed. Return the limits that follow from it."""
    try:
        import resource  # noqa: PLC0415 - not on Windows, where `gatekeeper fetch` calls this, too
    except ImportError:
        return _divide_files(_MAX_FILES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MAX_FILES) if hard != resource.RLIM_INFINITY else _MAX_FILES
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < _FEW_FILES:
        _log.warning("only %d files may be open: allow more (LimitNOFILE=, ulimit -n)", soft)
    return _divide_files(soft)


def _divide_files(files: int) -> ConnectionLimits:
    """Divide the open files: a quarter, at least 64, for the gate; half of that for the backlog.

    Of very few files clients get half.

    >>> _divide_files(128)
    ConnectionLimits(clients=64, backlog=32)
    >>> _divide_files(64)
    ConnectionLimits(clients=32, backlog=16)
    >>> _divide_files(65536)
    ConnectionLimits(clients=49152, backlog=512)
    """
    clients = max(files // 2, files - max(_MIN_RESERVED, files // 4))
    return ConnectionLimits(clients, max(8, min(_MAX_BACKLOG, (files - clients) // 2)))


class Acceptor:
    """Accepts the connections of one listening socket.

    It takes all that wait in one iteration of the event loop. uvloop by itself takes one, so that
    under load nobody else, not even a health check, is served for minutes.
    """

    def __init__(
        self, sock: socket.socket, take: Callable[[socket.socket], object], *, backlog: int
    ) -> None:
        """`take` is called with each connection."""
        self._sock = sock
        self._take = take
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._log_at = -math.inf

    async def start(self) -> None:
        """Start listening."""
        self._sock.setblocking(False)
        self._sock.listen(self._backlog)
        self._loop.add_reader(self._sock.fileno(), self._accept)

    async def stop(self) -> None:
        """Accept what is waiting, then close the socket. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._loop.remove_reader(self._sock.fileno())
            self._accept()  # closing the socket would reset these connections
            self._sock.close()

    def _accept(self) -> None:
        for _ in range(self._backlog):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                if self._loop.time() >= self._log_at:
                    self._log_at = self._loop.time() + _LOG_SECONDS
                    _log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(1.0, self._resume)
                return
            self._take(connection)

    def _resume(self) -> None:
        if not self._stopped:
            self._loop.add_reader(self._sock.fileno(), self._accept)


# --- aiohttp's low-level server, with limits on connections and our own error responses.


FIRST_REQUEST_SECONDS = 20.0
"""Seconds that a new connection has to set up TLS and send the head of its first request (T9:
slow-loris)."""
_IDLE_SECONDS = 75.0
"""Seconds that a connection may idle, or take for the head of a later request."""
_MAX_BEGINNING = 100
"""Octets kept of the beginning of a request, to know its path if it can't be parsed."""
_FORWARD_AUTH_LINE = re.compile(rb"\s*[A-Z]+ " + re.escape(FORWARD_AUTH.encode()) + rb"[ /?]")
_ABSOLUTE_FORM = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)/?(.*)", re.DOTALL).fullmatch
_data_received = web.RequestHandler.data_received

Inline = Callable[[Request, str | None, asyncio.Transport], bytes | None]
"""Returns the response to a request, given the client's address and the transport. None if it has
to be handled the usual way. See `Service.inline`."""
PassOn = Callable[[int, bytes], bool]
"""Gives a worker a connection: its descriptor, and the octets read of its next request. Returns
False if no worker takes it."""
QUESTION_PATH: Final = "/v1/check"
"""The path of the requests that workers answer."""
QUESTION_STARTS: Final = (b"GET /v1/check?", b"POST /v1/check ")
"""The beginnings of the requests that workers answer."""
_QUESTIONS_IN_A_ROW: Final = 64
"""Questions in a row that are answered before a worker is given the connection, so that one that
also sends other requests does not go back and forth."""


class Server(web.Server):
    """aiohttp's `web.Server` with limits on headers and connections.

    `handler_cancellation` is essential: without it a client that hangs up would keep its place
    in the queue, and be granted a lease that nobody uses.
    """

    def __init__(
        self,
        handler: Any,
        *,
        header: int,
        connections: int = 100_000,
        inline: Inline | None = None,
        pass_on: PassOn | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`header`: maximum octets of the request line and of each header field.

        `inline` answers the requests that it can as soon as they are read, `handler` all others.
        `pass_on` takes over connections that ask questions.
        """
        self.options: dict[str, Any] = {
            "access_log": None,
            "max_line_size": header,
            "max_field_size": header,
            "keepalive_timeout": _IDLE_SECONDS,
            # Encoded bodies are refused, or passed on as they are. A false one can't be decoded and
            # would break the connection.
            "auto_decompress": False,
        }
        super().__init__(
            handler, request_factory=self._new_request, handler_cancellation=True, **self.options
        )
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.inline: Inline | None = inline
        self.max_header: int = header
        self.pass_on: PassOn | None = pass_on
        self._certificates = certificates
        self._taken = OwnedTasks()
        self.accepted: set[_Protocol] = set()
        """The connections that are open, also those whose TLS is not set up yet."""
        self.draining: bool = False
        """Whether each answer is the last one of its connection, and says so."""
        self.max_connections: int = connections
        self.refused: int = 0
        """Number of connections turned away."""

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return _Protocol(self)

    def serve(self, connection: socket.socket, unanswered: bytes = b"") -> None:
        """Serve an accepted connection, or refuse it if too many are open.

        `unanswered`: the octets that a worker read of its next request.
        """
        connection.setblocking(False)
        if len(self.accepted) >= self.max_connections:
            self._reject(connection)
            return
        protocol = _Protocol(self, unanswered)
        self.accepted.add(protocol)
        self._taken.start(self._serve(connection, protocol))

    async def _serve(self, connection: socket.socket, protocol: _Protocol) -> None:
        context = self._tls()
        seconds = None if context is None else FIRST_REQUEST_SECONDS
        try:
            await self.loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=seconds
            )
        except OSError:  # the client is gone, or TLS failed or was not set up in time
            self.accepted.discard(protocol)
            connection.close()

    def _tls(self) -> ssl.SSLContext | None:
        return None if self._certificates is None else self._certificates.context

    def drain(self) -> None:
        """Close each connection after its next answer, which says so (RFC 9112 section 9.6)."""
        self.draining, self.inline = True, None

    def is_busy(self, new_seconds: float) -> bool:
        """Return whether a request is being answered, or an answer is not sent yet.

        A connection that was accepted less than `new_seconds` ago may still bring one.
        """
        return any(one.may_need_answer(new_seconds) for one in self.accepted)

    async def shutdown(self, timeout: float | None = None) -> None:
        """End all connections, also those whose TLS is not set up yet."""
        await self._taken.close()
        self.pre_shutdown()
        await super().shutdown(timeout)

    def _reject(self, connection: socket.socket) -> None:
        """Close a connection immediately: with 503, unless the client expects TLS first."""
        if not self.refused:
            _log.error("%d connections are open; further ones get 503", self.max_connections)
        self.refused += 1
        with connection, contextlib.suppress(OSError):
            if self._tls() is None:
                connection.send(FULL_RESPONSE)

    def _new_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        protocol.on_request()
        if (found := _ABSOLUTE_FORM(message.path)) is not None:  # RFC 9112 section 3.2.2
            headers = message.headers.copy()
            headers["Host"] = found[1]
            message = message._replace(path=f"/{found[2]}", headers=headers)
        return _ServedRequest(message, payload, protocol, writer, task, self.loop)


class _ServedRequest(web.BaseRequest):
    """A request whose connection ends with its answer while the server drains."""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open. aiohttp asks when it writes the head."""
        protocol = cast("_Protocol", self.protocol)
        # The requests behind it were sent before the client could know.
        ends = protocol.server.draining and not library_internals.has_queued_request(protocol)
        return bool(super().keep_alive) and not ends


class _Protocol(web.RequestHandler):
    """One connection: limited in number and time, with problem documents for errors."""

    def __init__(self, server: Server, already_read: bytes = b"") -> None:
        super().__init__(server, loop=server.loop, **server.options)
        self._already_read = already_read
        self._remote: str | None = None
        self._accepted_at = server.loop.time()
        self._first_timer: asyncio.TimerHandle | None = None
        """Closes the connection if its first request does not come in time."""
        self._was_asked = False
        self._requests = RequestReader(server.max_header)
        self._question_count = 0
        """Questions answered inline since the last request that was not one."""
        self.server: Server = server
        self._beginning = self._latest = b""
        """Beginnings of the request being read, and of the latest data."""
        self._unparsed: tuple[bytes, ...] = ()
        """Possible beginnings of a request that could not be parsed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read requests, with those that were read elsewhere."""
        super().connection_made(transport)
        self._remote = address_of(transport)
        # aiohttp's own timer allows the first request as much time as any other. `abort`: closing
        # would wait for the client where TLS is in use.
        end = self._accepted_at + FIRST_REQUEST_SECONDS
        abort = cast("asyncio.Transport", transport).abort
        self._first_timer = self.server.loop.call_at(end, abort)
        if self._already_read:
            self.data_received(self._already_read)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the timer of the first request, and count the connection no longer."""
        self._cancel_first_timer()
        super().connection_lost(exc)
        self.server.accepted.discard(self)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and remember its beginning."""
        if self._question_count >= _QUESTIONS_IN_A_ROW and self._try_pass_on(data):
            return
        if self.server.inline is not None:
            request = self._requests.read(data)
            if request is not None and self._answer(request, self.server.inline):
                return
        self._latest = data[:_MAX_BEGINNING]
        if len(self._beginning) < _MAX_BEGINNING:
            self._beginning += self._latest
        _data_received(self, data)
        if self._beginning:
            library_internals.fail_broken_body(self)

    def on_request(self) -> None:
        """Note that aiohttp made a request, from what it parsed or for what it could not parse."""
        self._unparsed = (self._latest, self._beginning)
        self._beginning = b""
        self._question_count = 0
        self._cancel_first_timer()

    def _try_pass_on(self, data: bytes) -> bool:
        """Give the connection to a worker if `data` begins a question. Return whether it did."""
        transport, pass_on = self.transport, self.server.pass_on
        if pass_on is None or self._beginning or not data.startswith(QUESTION_STARTS):
            return False
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        transport.pause_reading()
        fd = transport.get_extra_info("socket").fileno()
        if not pass_on(fd, data):
            transport.resume_reading()
            return False
        transport.abort()
        return True

    def may_need_answer(self, new_seconds: float) -> bool:
        """Return whether a request is being answered, or may still come; see `Server.is_busy`."""
        new = not self._was_asked and self.server.loop.time() < self._accepted_at + new_seconds
        transport = self.transport
        unsent = transport is not None and transport.get_write_buffer_size() > 0
        busy = library_internals.is_answering(self) or library_internals.has_queued_request(self)
        return new or unsent or busy

    def _cancel_first_timer(self) -> None:
        self._was_asked = True
        if self._first_timer is not None:
            self._first_timer.cancel()
            self._first_timer = None

    def _answer(self, request: Request, inline: Inline) -> bool:
        """Answer a request inline, if that needs no waiting. Return whether it did."""
        transport = library_internals.idle_transport(self, keepalive=_IDLE_SECONDS)
        answer = None if transport is None else inline(request, self._remote, transport)
        if transport is None or answer is None:
            return False
        transport.write(answer)
        is_question = request.target.startswith(QUESTION_PATH)
        self._question_count = self._question_count + 1 if is_question else 0
        self._cancel_first_timer()
        return True

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log an internal error, but not a client's broken body or closed connection."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError | ConnectionError):
            super().log_exception(*args, **options)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return a problem document for a request that never reached the handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer is under way already")
        if status >= 500:
            problem = Problem(500, "internal", "an internal error")
            self.log_exception("a request failed", exc_info=exc)
        else:
            # T7: a visitor can make a subrequest unreadable, and must be refused: nginx makes a
            # 400 into a 500.
            status = 403 if any(map(_FORWARD_AUTH_LINE.match, self._unparsed)) else 400
            detail = "the request is not valid HTTP"
            if isinstance(exc, LineTooLong):
                detail = "a line exceeds server.max_header; ask about long URLs by POST /v1/check"
            problem = Problem(status, "bad-request", detail)
        response = problem.response()
        response.force_close()
        return response


def address_of(transport: asyncio.BaseTransport) -> str | None:
    """Return the address of the peer, as aiohttp's `request.remote` does."""
    peer = transport.get_extra_info("peername")
    return str(peer[0] if isinstance(peer, list | tuple) else peer) if peer is not None else None


_FULL = msgspec.json.encode(Problem(503, "full", "too many connections are open").document())
FULL_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)
