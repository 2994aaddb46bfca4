"""The connection to a sidecar: requests, responses, and an outbox of reports.

Reports, ends and renewals of leases are sent from the outbox. Each is idempotent, and retried until
it is answered or its time is over. The sidecar lets a lease that it hears nothing of expire, as
used.
"""

from __future__ import annotations

import logging
import os
import random
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
from yarl import URL

from gatekeeper import descriptors, errors
from gatekeeper.client.wire import ProblemDocument
from gatekeeper.clock import Clock, OwnedTasks, deadline
from gatekeeper.decision import Verdict
from gatekeeper.http_fields import delta_seconds
from gatekeeper.library_internals import HEAD_LIMITS
from gatekeeper.urls import url_of

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


_LINE_OCTETS = 1_048_576
"""More octets than a line has, which may hold two of the longest URLs."""
_JSON = {"Content-Type": "application/json"}
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.05, 2.0
"""The first and the longest retry delay, in seconds."""
_ADDRESS_FORMS = (
    'give "http://127.0.0.1:8750", "https://..." with a name, or a unix socket as '
    '"unix:/run/gatekeeper/gatekeeper.sock"'
)


class SidecarResponse(NamedTuple):
    """A response of the sidecar, of any status."""

    status: int
    body: bytes
    retry_after: float | None
    """Seconds of its Retry-After header; None without one, or if that is a date."""
    token: bool = False
    """Whether the request had a bearer token."""

    @property
    def document(self) -> ProblemDocument | None:
        """Its problem document; None if the body is none."""
        with suppress(errors.SidecarError):
            return read_line(self.body, ProblemDocument)
        return None


class SidecarUnreachable(Exception):
    """There was no response. `late`: the timeout passed, which leaves no time for a retry."""

    def __init__(self, detail: str, *, late: bool = False) -> None:
        super().__init__(detail)
        self.late = late


class SidecarConnection:
    """A pool of connections to one sidecar.

    `patience` is the number of seconds for which `ask` retries before it gives up. After that every
    question is attempted once, until one is answered. `connect_timeout` is the number of seconds in
    which a connection must stand, and replaces `patience` until the first response: before that, a
    wrong address is more likely than a restart. `timeout` is the number of seconds for one
    response. Raises ConfigError for an invalid address or token.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        token: str | None,
        ssl: ssl.SSLContext | None,
        patience: float,
        connect_timeout: float,
        timeout: float,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        if not connect_timeout > 0:
            raise errors.ConfigError(f"connect_timeout={connect_timeout!r}: give seconds above 0")
        base, self._socket = _parse_address(where)
        self.base: str = base
        self._where = self._socket or base
        """The address, for people."""
        self._headers = _authorization(token)
        self._context = True if ssl is None else ssl
        self.patience: float = patience
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self.clock: Clock = clock
        self._rng = rng
        self._session: aiohttp.ClientSession
        self.down: bool = False
        """True from the time at which a request was given up until the next response."""
        self._answered = False
        """There was a response."""
        self.requests: int = 0
        self.repeated: int = 0
        self.failures: int = 0

    def __repr__(self) -> str:
        # Never the headers: one of them is the token.
        return f"<SidecarConnection to {self._where}>"

    async def open(self) -> None:
        """Create the HTTP session; nothing is sent yet."""
        # Without a limit, as long polls must not delay a report. The callers have limits.
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._context)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            trust_env=False,  # T19: no proxy between a client and its sidecar
            **HEAD_LIMITS,  # a proxy before the sidecar may add fields
        )

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._session.close()

    def _refuse_if_closed(self) -> None:
        if self._session.closed:
            raise errors.GateClosed("the gate was closed meanwhile")
        self.requests += 1

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout: float | None = None
    ) -> SidecarResponse:
        """Send a request once. Raises SidecarUnreachable if `timeout` passes without a response."""
        seconds = self._timeout if timeout is None else timeout
        self._refuse_if_closed()
        url = URL(self.base + path, encoded=True)
        options: dict[str, Any] = {} if body is None else {"data": body, "headers": _JSON}
        try:
            async with (
                deadline(self.clock, seconds),
                # A redirect would carry the token to another server.
                self._session.request(method, url, allow_redirects=False, **options) as response,
            ):
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error, seconds) from None
        self.down, self._answered = False, True
        # Only seconds: a sidecar never sends a date.
        retry_after = delta_seconds(response.headers.get("Retry-After", ""))
        return SidecarResponse(response.status, data, retry_after, token=bool(self._headers))

    async def lines(self, path: str, url: str) -> AsyncGenerator[bytes]:
        """Request JSON lines, and yield them as they come, however long that takes.

        Raises the error of `problem` for a response of another status, and SidecarError if there is
        none or it breaks off.
        """
        self._refuse_if_closed()
        where = URL(self.base + path, encoded=True)
        try:
            async with self._session.get(
                where, allow_redirects=False, read_bufsize=_LINE_OCTETS
            ) as response:
                if response.status == 200:
                    async for line in response.content:
                        yield line
                    return
                body = await response.content.read(_LINE_OCTETS)
        except (aiohttp.ClientError, OSError) as error:
            failure = str(self._failure(error, self._timeout))
            raise errors.SidecarError(503, "unreachable", failure) from None
        raise problem(SidecarResponse(response.status, body, None, bool(self._headers)), url)

    def _failure(self, error: Exception, seconds: float) -> SidecarUnreachable:
        """Count a failure, and describe it for people; aiohttp's own message prints its TLS
        context."""
        self.failures += 1
        where, hint = f"no connection to {self._where}", "is `gatekeeper serve` running there?"
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            why = f"{where}: nothing within {self._connect_timeout:g} s; {hint}"
        elif isinstance(error, TimeoutError):
            return SidecarUnreachable(f"no answer within {seconds:g} s", late=True)
        elif descriptors.is_shortage(error):
            descriptors.close_idle()  # for the next attempt
            why = f"{where}: {descriptors.describe_shortage()}"
        elif isinstance(error, aiohttp.ClientSSLError):
            why = f"{where}: {_os_reason(error.os_error)}"
        elif isinstance(error, aiohttp.ClientConnectorError):
            why = f"{where}: {_os_reason(error.os_error)}; {hint}"
        else:
            why = str(error) or type(error).__name__
        return SidecarUnreachable(why)

    def backoff(self, attempt: int) -> float:
        """Return the seconds before the next attempt: doubled each time, half of them random."""
        pause = min(_MAX_RETRY_SECONDS, _FIRST_RETRY_SECONDS * float(2 ** min(attempt, 16)))
        return pause * (0.5 + self._rng.random() / 2)

    def give_up(self, why: object) -> None:
        """Note that a request is given up: `why` is logged, unless the one before was as well."""
        if not self.down:
            _log.warning("the sidecar can't be asked: %s", why)
        self.down = True

    def last_retry(self, began: float, end: float) -> float:
        """Return when the last attempt of a request may begin that began at `began`, and of which
        the attempts end at `end`."""
        return end if self._answered else min(end, began + self._connect_timeout)

    async def ask(self, method: str, path: str, body: bytes | None = None) -> SidecarResponse:
        """Send an idempotent request, with retries while patience lasts.

        Raises SidecarUnreachable if there was no response, or only those of a busy sidecar.
        """
        end = self.clock.monotonic() + (0.0 if self.down else self.patience)
        try:
            return await self.send_until(end, method, path, body)
        except SidecarUnreachable as error:
            self.give_up(error)
            raise

    async def send_until(
        self,
        end: float,
        method: str,
        path: str,
        body: bytes | None,
        *,
        timeout: float | None = None,
    ) -> SidecarResponse:
        """Send an idempotent request, with retries until the monotonic time `end`.

        `timeout` is the number of seconds for one response; None: that of the connection, and then
        a response that was late is not retried. Raises SidecarUnreachable as `ask` does.
        """
        attempt, began = 0, self.clock.monotonic()
        while True:
            pause = self.backoff(attempt)
            try:
                answer = await self.request(method, path, body, timeout=timeout)
                if answer.status < 500 and answer.status != 429:  # else busy: draining or full
                    return answer
                why = SidecarUnreachable(f"it answers {answer.status}")
                pause = answer.retry_after or pause
            except SidecarUnreachable as error:
                why = error
            last = self.last_retry(began, end)
            if (why.late and timeout is None) or self.clock.monotonic() + pause > last:
                raise why
            attempt += 1
            self.repeated += 1
            await self.clock.sleep(pause)


def _parse_address(where: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the base URL and the socket's path. Raises ConfigError."""
    text = os.fspath(where)
    if text.startswith(("unix:", "/")) or not isinstance(where, str):
        socket = re.sub(r"\Aunix:(/?)/*", r"\1", text)
        if not socket:
            raise errors.ConfigError(f"the sidecar's address names no socket; {_ADDRESS_FORMS}")
        return "http://localhost", socket
    try:
        url = url_of(text)
        (url.host or "").encode("idna")  # as for its look-up, which can't refuse a..b in words
    except ValueError:
        raise errors.ConfigError(f"the sidecar's address can't be read; {_ADDRESS_FORMS}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise errors.ConfigError(f"{text!r} is not an address of a sidecar; {_ADDRESS_FORMS}")
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        # The address is not shown: it may contain a secret.
        raise errors.ConfigError(
            f"the sidecar's address has credentials, a query or a fragment; {_ADDRESS_FORMS}"
        )
    return str(url).rstrip("/"), None


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        # The token is not shown: not even a part of a secret belongs in a log (T6, T11).
        raise errors.ConfigError(
            "the token contains spaces or characters that a header can't contain"
        )
    return {"Authorization": f"Bearer {token}"}


def _os_reason(error: OSError) -> str:
    """Return the system's message, without the address that asyncio adds to it."""
    if error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error)


# --- responses: bodies, and problem documents as exceptions ---------------------------------


def read(answer: SidecarResponse, kind: type[_T]) -> _T:
    """Decode the body of a successful response. Raises the error of `problem` for any other."""
    if answer.status not in (200, 201, 202):
        raise problem(answer)
    return read_line(answer.body, kind, answer.status)


def read_line(body: bytes, kind: type[_T], status: int = 200) -> _T:
    """Decode JSON of the sidecar. Raises SidecarError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"this client can't read the response: {error}"
        raise errors.SidecarError(status, "unreadable", detail) from None


def limit_in(answer: SidecarResponse) -> float | None:
    """Return the limit that a refusal names, if it does."""
    return getattr(answer.document, "most", None)


def problem(answer: SidecarResponse, url: str = "") -> errors.GatekeeperError:
    """Convert a problem document into the exception that the embedded gate would raise.

    `url` is the one asked about. A problem without a counterpart there becomes a SidecarError.
    """
    document = answer.document
    if document is None:
        return errors.SidecarError(answer.status, "unreadable", "the response is not a sidecar's")
    kind = document.type.rpartition(":")[2]
    decision = document.decision
    if kind == "invalid-url":
        return errors.InvalidURL(url, document.detail.removeprefix(f"{url!r}: "))
    if decision is not None and decision.verdict is not Verdict.ALLOW:
        return (errors.Deferred if decision.verdict is Verdict.DEFER else errors.Denied)(decision)
    detail = document.detail
    if kind == "unauthorized" and answer.token:
        detail = f"the sidecar does not accept this token ({detail})"
    elif kind == "unauthorized":
        detail += "; give RemoteGatekeeper its token=..."
    return errors.SidecarError(answer.status, kind, detail or "no further detail")


# --- messages to the sidecar whose response no caller waits for -----------------------------

_SENDERS = 8
"""The most messages that are sent at the same time."""
_MAX_MESSAGES = 100_000
"""The most messages that wait; beyond that the oldest is dropped: its lease counts as used."""
_REPORT_SECONDS = 600.0
"""Seconds for which sending a report is retried: a restarted sidecar still accepts it."""
_ATTEMPT_SECONDS = 10.0
"""Seconds in which one attempt must be answered."""


class Outbox(msgspec.Struct, eq=False):
    """A queue of messages and a few sender tasks, which end when the queue is empty."""

    _connection: SidecarConnection
    _queue: deque[tuple[str, str, bytes | None, float]] = msgspec.field(default_factory=deque)
    _tasks: OwnedTasks = msgspec.field(default_factory=OwnedTasks)
    _senders: int = 0
    delivered: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self._queue) + self._senders

    def send(
        self, method: str, path: str, body: bytes | None, lasts: float = _REPORT_SECONDS
    ) -> None:
        """Send a message, without waiting. It is retried for `lasts` seconds."""
        if len(self._queue) >= _MAX_MESSAGES:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append((method, path, body, self._connection.clock.monotonic() + lasts))
        if self._senders < _SENDERS:
            self._senders += 1
            self._tasks.start(self._send_all())

    async def close(self, seconds: float) -> None:
        """Send the remaining messages, for at most that many seconds, then drop the rest."""
        await self._tasks.finish(self._connection.clock, seconds)
        if left := len(self):
            self.dropped += left
            _log.warning("%d reports did not reach the sidecar before the client closed", left)
        self._queue.clear()
        await self._tasks.close()

    async def _send_all(self) -> None:
        try:
            while self._queue:
                await self._deliver(*self._queue.popleft())
        finally:
            # There was no await since the queue was empty: the next message starts another task.
            self._senders -= 1

    async def _deliver(self, method: str, path: str, body: bytes | None, give_up: float) -> None:
        try:
            answer = await self._connection.send_until(
                give_up, method, path, body, timeout=_ATTEMPT_SECONDS
            )
        except SidecarUnreachable as error:
            self.dropped += 1
            _log.warning("%s %s was given up: %s", method, path, error)
            return
        self.delivered += 1
        if answer.status >= 400:
            # Mostly a lease that expired meanwhile: it counts as used.
            _log.info("%s %s: it answers %d", method, path, answer.status)
