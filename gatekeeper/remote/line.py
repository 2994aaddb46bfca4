"""`Line`: HTTP to one sidecar, over TCP or a unix socket, asked again within bounds."""

from __future__ import annotations

import os
import random
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from gatekeeper.clock import Clock, deadline
from gatekeeper.errors import ConfigError, GateClosed
from gatekeeper.url_cache import url_of

__all__ = ["Answer", "Line", "Unreached", "backoff"]

_CONNECT = 5.0
"""Seconds in which a sidecar must take the connection."""
_JSON = {"Content-Type": "application/json"}
_FIRST_PAUSE, _MOST_PAUSE = 0.05, 2.0
_FORMS = (
    'give "http://127.0.0.1:8750", "https://..." with a name, or a unix socket as '
    '"unix:/run/gatekeeper/gatekeeper.sock"'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sidecar answered, whatever it was."""

    status: int
    body: bytes
    retry_after: float | None
    """Seconds, where it named a number of them."""
    token: bool = False
    """The question came with a bearer token."""

    @property
    def busy(self) -> bool:
        """No answer to the question: draining, full, or an error of its own."""
        return self.status >= 500

    @property
    def detail(self) -> str:
        """The status, for people."""
        return f"it answers {self.status}"


class Unreached(Exception):
    """No answer came. `late`: the time for it was over, so asking again has none left."""

    def __init__(self, detail: str, *, late: bool = False) -> None:
        super().__init__(detail)
        self.late = late


def backoff(attempt: int, rng: random.Random) -> float:
    """Seconds before the next attempt: doubled each time, half of it by chance."""
    pause = min(_MOST_PAUSE, _FIRST_PAUSE * float(2 ** min(attempt, 16)))
    return pause * (0.5 + rng.random() / 2)


class Line:
    """Connections to one sidecar, kept and used again.

    `patience` is how many seconds `ask` tries again before it gives up. Once it gave up,
    every further question is one attempt, until one is answered.
    Raises ConfigError for an address or a token that can't be used.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        token: str | None,
        context: ssl.SSLContext | None,
        patience: float,
        timeout: float,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.base, self._socket = _address(where)
        self._headers = _authorization(token)
        self._context = context
        self._patience = patience
        self._timeout = timeout
        self._clock = clock
        self._rng = rng
        self._session: aiohttp.ClientSession | None = None
        self.down = False
        self.requests = 0
        self.repeated = 0
        self.failures = 0

    def __repr__(self) -> str:
        # Never the headers: the token is one of them.
        return f"<Line to {self._socket or self.base}>"

    async def open(self) -> None:
        """Make ready; nothing is sent yet."""
        # Unbounded: long polls must not keep a report from going out. Who asks has bounds.
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
        else:
            context: ssl.SSLContext | bool = True if self._context is None else self._context
            connector = aiohttp.TCPConnector(limit=0, ssl=context)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            trust_env=False,  # T19: no proxy between a client and its sidecar
        )

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout: float | None = None
    ) -> Answer:
        """One attempt. Raises Unreached where no answer came within `timeout`."""
        session = self._session
        if session is None:
            raise GateClosed("open the gate first: async with RemoteGatekeeper(...) as gate")
        seconds = self._timeout if timeout is None else timeout
        self.requests += 1
        url = URL(self.base + path, encoded=True)
        options: dict[str, Any] = {} if body is None else {"data": body, "headers": _JSON}
        try:
            async with (
                deadline(self._clock, seconds),
                # A redirect would carry the token to wherever it leads.
                session.request(method, url, allow_redirects=False, **options) as response,
            ):
                data = await response.read()
        except aiohttp.ConnectionTimeoutError:
            raise self._failed(f"no connection within {_CONNECT:g} s") from None
        except TimeoutError:
            raise self._failed(f"no answer within {seconds:g} s", late=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(self._told(error)) from None
        self.down = False
        retry_after = _seconds(response.headers.get("Retry-After"))
        return Answer(response.status, data, retry_after, token=bool(self._headers))

    def _told(self, error: Exception) -> str:
        """What went wrong, for people; aiohttp's own words name a TLS context of its own."""
        where = f"no connection to {self._socket or self.base}"
        if isinstance(error, aiohttp.ClientSSLError):
            return f"{where}: {_reason(error.os_error)}"
        if isinstance(error, aiohttp.ClientConnectorError):
            return f"{where}: {_reason(error.os_error)}; is `gatekeeper serve` running there?"
        return str(error) or type(error).__name__

    def _failed(self, detail: str, *, late: bool = False) -> Unreached:
        self.failures += 1
        return Unreached(detail, late=late)

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """The answer to a question that may be put twice, repeated while patience lasts.

        Raises Unreached where none came, or the sidecar was too busy all the while.
        """
        end = self._clock.monotonic() + (0.0 if self.down else self._patience)
        attempt = 0
        while True:
            try:
                answer = await self.request(method, path, body)
                if not answer.busy and answer.status != 429:
                    return answer
                why = Unreached(answer.detail)
                pause = answer.retry_after or backoff(attempt, self._rng)
            except Unreached as error:
                why = error
                pause = backoff(attempt, self._rng)
            if why.late or self._clock.monotonic() + pause > end:
                self.down = True
                raise why
            attempt += 1
            self.repeated += 1
            await self._clock.sleep(pause)


def _address(where: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Base URL and socket path."""
    text = os.fspath(where)
    if text.startswith("unix:"):
        text = "/" + text[5:].lstrip("/") if text[5:].startswith("/") else text[5:]
        if not text:
            raise ConfigError(f"the sidecar's address names no socket; {_FORMS}")
        return "http://localhost", text
    if text.startswith("/") or not isinstance(where, str):
        return "http://localhost", text
    try:
        url = url_of(text)
    except ValueError:
        raise ConfigError(f"the sidecar's address can't be read; {_FORMS}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{text!r} is no address of a sidecar; {_FORMS}")
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        # Not shown: what stands there may be a secret.
        raise ConfigError(f"the sidecar's address holds more than a place; {_FORMS}")
    return str(url).rstrip("/"), None


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        # It is not shown: half a secret in a log is one too many (T6, T11).
        raise ConfigError("the token holds blanks or characters that no header may have")
    return {"Authorization": f"Bearer {token}"}


def _reason(error: OSError) -> str:
    """As the system has it, without the address that asyncio repeats."""
    if error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _seconds(header: str | None) -> float | None:
    """A Retry-After in seconds; our own service writes no other."""
    if header is None or not header.isascii() or not header.isdigit():
        return None
    return float(header[:9])
