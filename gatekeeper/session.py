"""An aiohttp session that asks first and waits its turn: `polite_session`.

Also the names of the guard, for sessions of one's own: `guarded_connector`, `Guard`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from gatekeeper.clock import Clock, SystemClock, Timer, deadline
from gatekeeper.config import Config
from gatekeeper.errors import ConfigError
from gatekeeper.fetching.guard import Guard, Refusal, guarded_connector
from gatekeeper.gate import Gatekeeper
from gatekeeper.storage.base import Storage

__all__ = ["Guard", "Refusal", "guarded_connector", "polite_session", "session_gate"]

_gates: WeakKeyDictionary[aiohttp.ClientSession, Gatekeeper] = WeakKeyDictionary()


def session_gate(session: aiohttp.ClientSession) -> Gatekeeper:
    """The gate behind a session made by `polite_session`.

    Raises LookupError for any other session.
    """
    try:
        return _gates[session]
    except KeyError:
        raise LookupError(
            "this session was not made by polite_session(); keep the gate you gave it"
        ) from None


@asynccontextmanager
async def polite_session(
    user_agent: str,
    *,
    config: Config | None = None,
    storage: Storage | None = None,
    clock: Clock | None = None,
    resolver: aiohttp.abc.AbstractResolver | None = None,
    **session_arguments: Any,
) -> AsyncIterator[aiohttp.ClientSession]:
    """A real `aiohttp.ClientSession`, gated on every hop and guarded at the socket.

    `user_agent` is the whole User-Agent header; its product token chooses the group in
    robots.txt. Further arguments go to ClientSession. Waiting for a turn does not count
    against `timeout`: its `total` is the time on the network, over all hops and the body.
    `middlewares` given here or with a request run outside the gate's, never instead of it:
    each attempt of a retrying one is a turn of its own.

    Raises ConfigError for arguments that would lead round the guard (`connector`,
    `trust_env`, or a proxy without guard.mode = "url-only").

    >>> async def main() -> None:
    ...     async with polite_session(user_agent="examplebot/1.0 (+https://example.org)") as s:
    ...         async with s.get("https://example.org/") as response:
    ...             print(response.status)
    """
    config = config or Config()
    clock = clock or SystemClock()
    _refuse_ways_round(config, session_arguments)
    headers = {"User-Agent": user_agent, **(session_arguments.pop("headers", None) or {})}
    inner = tuple(session_arguments.pop("middlewares", ()))
    gate = Gatekeeper(user_agent, config=config, storage=storage, clock=clock, resolver=resolver)
    async with gate:
        session = aiohttp.ClientSession(
            connector=gate.guarded_connector(),
            headers=headers,
            middlewares=(*inner, gate.middleware, _network_time),
            **session_arguments,
        )
        _keep_to_the_gate(session, gate, clock)
        _gates[session] = gate
        async with session:
            yield session


def _refuse_ways_round(config: Config, arguments: dict[str, Any]) -> None:
    """T1, T19: nothing that a caller passes may lead past the guard."""
    if "connector" in arguments:
        raise ConfigError(
            "polite_session makes its own guarded connector; for one of your own use "
            "aiohttp.ClientSession(connector=..., middlewares=(gate.middleware,))"
        )
    if arguments.get("trust_env"):
        raise ConfigError("trust_env would send requests past the guard; leave it False")
    _refuse_proxy(config, arguments.get("proxy"))


def _refuse_proxy(config: Config, proxy: object) -> None:
    if proxy is not None and config.guard.mode != "url-only":
        raise ConfigError(
            'behind a proxy the guard can only judge URLs: set guard.mode = "url-only" '
            "to accept that, or leave the proxy out"
        )


def _keep_to_the_gate(session: aiohttp.ClientSession, gate: Gatekeeper, clock: Clock) -> None:
    """See every request's own timeout, proxy and middlewares before aiohttp does.

    aiohttp starts the total timeout before the middlewares run and has no public way to
    tell them what it is, and a request's own `middlewares` replace the session's. Both
    are settled here, on this one session; its class stays aiohttp's.
    """
    plain = session._request
    inherited = session.timeout

    @functools.wraps(plain)
    async def request(method: str, url: Any, **arguments: Any) -> ClientResponse:
        _refuse_proxy(gate.config, arguments.get("proxy"))
        own = arguments.pop("middlewares", None)
        if own is not None:
            arguments["middlewares"] = (*own, gate.middleware, _network_time)
        wanted = _as_timeout(arguments.pop("timeout", inherited), inherited)
        mark = _budget.set(_Budget(clock, wanted.total))
        try:
            unhurried = aiohttp.ClientTimeout(
                total=None,
                connect=wanted.connect,
                sock_connect=wanted.sock_connect,
                sock_read=wanted.sock_read,
                ceil_threshold=wanted.ceil_threshold,
            )
            return await plain(method, url, timeout=unhurried, **arguments)
        finally:
            _budget.reset(mark)

    # object's own: in asyncio's debug mode ClientSession warns of foreign attributes.
    object.__setattr__(session, "_request", request)


def _as_timeout(given: Any, inherited: aiohttp.ClientTimeout) -> aiohttp.ClientTimeout:
    if isinstance(given, aiohttp.ClientTimeout):
        return given
    if given is None or isinstance(given, int | float):
        return aiohttp.ClientTimeout(total=given)
    return inherited  # aiohttp's own mark for "not given"


class _Budget:
    """The seconds that one request, with its redirects, may still spend on the network."""

    __slots__ = ("clock", "left")

    def __init__(self, clock: Clock, total: float | None) -> None:
        self.clock = clock
        self.left = total or None  # aiohttp: 0 and None are no limit

    def watch(self, response: ClientResponse, started: float) -> None:
        """Let the same seconds cover the body: at their end the connection is closed."""
        connection = response.connection
        if connection is None or self.left is None:
            return
        timer = self.clock.call_at(started + self.left, _expire, response)
        connection.add_callback(self._spend(timer, started))

    def _spend(self, timer: Timer, started: float) -> Callable[[], None]:
        def settle() -> None:
            timer.cancel()
            if self.left is not None:
                self.left = max(0.0, self.left - (self.clock.monotonic() - started))

        return settle


def _expire(response: ClientResponse) -> None:
    response.content.set_exception(TimeoutError())
    response.close()


_budget: ContextVar[_Budget | None] = ContextVar("gatekeeper_network_budget", default=None)


async def _network_time(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """The innermost middleware: count the time on the network, and nothing else."""
    budget = _budget.get()
    if budget is None or budget.left is None:
        return await handler(request)
    started = budget.clock.monotonic()
    async with deadline(budget.clock, budget.left):
        response = await handler(request)
    budget.watch(response, started)
    return response
