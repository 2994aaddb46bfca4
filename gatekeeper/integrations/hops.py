"""What the integrations share: one request under a lease, and the guard where it is dialled.

Each hop of a request, the first as well as what a redirect leads to, is begun (decided, and its
turn waited for), sent by the library, and told: the head of its answer or its failure. The lease
lasts until the body was read, closed or dropped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp.abc import AbstractResolver

from gatekeeper import http_fields, urls
from gatekeeper.config import Config
from gatekeeper.decision import BLOCKED_NOTE, Decision, refuse
from gatekeeper.errors import (
    AddressRefused,
    ConfigError,
    Deferred,
    Denied,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
)
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.fetching.guard_policy import Guard
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.gate.decider import refused_request
from gatekeeper.identity import Signer
from gatekeeper.middleware import (
    Gate,
    HeldLease,
    adopt,
    enter_detached,
    judge_adopted,
    other_agent,
    unnamed,
)
from gatekeeper.sync import SyncGatekeeper, SyncLease

Call = Callable[[Callable[[], object]], object]
"""Calls a callback, now or later."""

_MOST_SECONDS = 60.0
"""Seconds for connecting where the caller sets no limit."""
_LEAST_SECONDS = 0.001
"""Seconds for connecting where none are left: a socket takes 0 for not to wait, and says so with an
error that is no timeout."""


class HopErrors:
    """The errors of a library that are ours as well: subclasses of both.

    `base` is what the library raises for a request that failed; `module` where the four classes
    can be imported from, under these names.
    """

    def __init__(self, module: str, base: type[Exception]) -> None:
        def both(name: str, text: str, *bases: type[Exception]) -> Any:
            return type(name, bases, {"__module__": module, "__doc__": text})

        self.denied: type[Denied] = both(
            "RequestDenied", "Denied, and an error of the library's.", Denied, base
        )
        self.deferred: type[Deferred] = both(
            "RequestDeferred",
            "Deferred (a Denied), and an error of the library's.",
            *(Deferred, self.denied),
        )
        self.late: type[LeaseTimeout] = both(
            "RequestLeaseTimeout",
            "LeaseTimeout, and an error of the library's.",
            *(LeaseTimeout, base),
        )
        self.invalid: type[InvalidURL] = both(
            "RequestInvalidURL", "InvalidURL, and an error of the library's.", InvalidURL, base
        )

    def of(self, error: GatekeeperError, request: object) -> GatekeeperError:
        """The error as the library's users expect it."""
        found: GatekeeperError = error
        if isinstance(error, Denied):
            kind = self.deferred if isinstance(error, Deferred) else self.denied
            found = kind(error.decision)
        elif isinstance(error, LeaseTimeout):
            found = self.late(error.url, str(error), retry_at=error.retry_at)
        elif isinstance(error, InvalidURL):
            found = self.invalid(error.url, error.problem)
        if found is not error:
            found.request = request  # type: ignore[attr-defined] # each of them has it
        return found


class BodyInUse:
    """What a response's body is read from, for its lease: in use until it is freed or dropped."""

    __slots__ = ("__weakref__", "_call", "_call_later", "_callbacks", "_size", "closed")

    def __init__(self, call: Call, call_later: Call) -> None:
        """Both call in the gate's loop; `call_later` from any thread, not before this returns."""
        self._call = call
        self._call_later = call_later
        self._callbacks: list[Callable[[], object]] = []
        self.closed: bool = False
        """Nothing travels on it any more."""
        self._size = [0]

    def came(self, size: int) -> None:
        """So many bytes more were read of it."""
        self._size[0] += size

    def counting(self, received: Callable[[int], object]) -> Callable[[], object]:
        """What tells how many came, without keeping this."""
        size = self._size
        return lambda: received(size[0])

    def add_callback(self, callback: Callable[[], object], /) -> None:
        """Have that called, in the gate's loop, once it is free, or dropped."""
        self._callbacks.append(callback)

    def free(self) -> None:
        """The body was read to its end, or is not wanted any more. Idempotent."""
        self._end(self._call)

    def __del__(self) -> None:
        self._end(self._call_later)  # a collector may be at work anywhere

    def _end(self, call: Call) -> None:
        self.closed = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            call(callback)


@dataclass(slots=True, eq=False)
class Hop:
    """One request that was let in, with its lease."""

    lease: HeldLease
    user_agent: str | None
    """The User-Agent to send in the place of the library's own; None: the request has one."""
    call: Call
    call_later: Call
    adopted: bool
    """The lease was open already."""
    unreached: Callable[[BaseException], object]
    """Told, in the gate's loop, why the request could not be connected."""
    signer: Signer | None
    started: float = field(default_factory=time.monotonic)

    def headers(self, method: str, url: str) -> dict[str, str]:
        """What to add to the request's headers, or put in the place of its own: who sends it."""
        signed = {} if self.signer is None else self.signer.headers(method, url)
        return signed if self.user_agent is None else signed | {"User-Agent": self.user_agent}

    def answered(self, status: int, headers: Mapping[str, str]) -> BodyInUse:
        """The head is here: the interval counts from now. Free the body that this gives."""
        limit = http_fields.rate_limit_of(headers)
        self.lease.answered(status, retry_after=headers.get("Retry-After"), rate_limit=limit)
        lease, body = self.lease, BodyInUse(self.call, self.call_later)
        if lease.counts_bytes:
            body.add_callback(body.counting(lease.received))
        if self.adopted:
            self.lease.lasts_with(body)
        else:
            self.lease.ends_with(body)
        return body

    def failed(self, *, by_network: bool, unconnected: BaseException | None = None) -> None:
        """No head came. `by_network`: it may have been sent, and the host did not answer; else it
        was refused or cancelled here, which says nothing about the host. `unconnected`: the
        library's error, where it could not be connected: it may be our own uplink."""
        if unconnected is not None and (why := by_system(unconnected)) is not None:
            self.call(partial(self.unreached, why))
        try:
            elapsed = time.monotonic() - self.started
            self.lease.report(elapsed=elapsed if by_network else None)
        finally:
            self.lease.end()


def by_system(error: BaseException) -> OSError | None:
    """What the system raised, under the errors of a library."""
    one: BaseException | None = error
    for _ in range(32):  # a chain may be a ring
        if one is None or isinstance(one, TimeoutError | socket.gaierror):
            return one
        if isinstance(one, OSError) and one.errno is not None:
            return one
        if isinstance(number := getattr(one, "osError", None), int):  # as Twisted names it
            return OSError(number, str(one))
        one = one.__cause__ or one.__context__  # also where httpcore suppresses it
    return None


async def begin(gate: Gate, url: str, sent: str | None) -> Hop:
    """Decide a request and wait for its turn. `sent`: its User-Agent.

    An open lease of this context for this URL is used, or one that was handed out for it. Raises
    what `gate.lease` raises.
    """
    lease = adopt(url)
    adopted = lease is not None
    agent = other_agent(sent, gate.user_agent)
    if lease is None:
        lease = _handed_out_for(gate, url)
        if lease is None:
            lease = await enter_detached(gate.lease(url, user_agent=agent))
        else:
            await _judged(lease, _judge_handed_out(lease, sent, gate, url))
        lease.claim(url)  # it is sent from here: that nothing is heard of it then says something
    else:
        await _judged(lease, judge_adopted(lease, sent, gate, url))
    loop = asyncio.get_running_loop()

    def call_later(callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the gate with it
            loop.call_soon_threadsafe(callback)

    name = name_to_send(lease, gate.user_agent, sent)
    told = partial(_unreached, gate, lease)
    return Hop(lease, name, _call, call_later, adopted, told, _signer(gate))


async def _judged(lease: HeldLease, judging: Coroutine[Any, Any, None]) -> None:
    try:
        await judging
    except BaseException:
        lease.end()
        raise


async def _judge_handed_out(lease: HeldLease, sent: str | None, gate: Gate, url: str) -> None:
    """See that the request is welcome under its own name, and where the lease was taken for
    another URL of the host (its robots.txt, say, which anybody may ask for)."""
    if _key(lease.url) == _key(url):
        await judge_adopted(lease, sent, gate, url)
        return
    refuse(await gate.check(url, user_agent=other_agent(sent, gate.user_agent)))


def _call(callback: Callable[[], object]) -> None:
    callback()


# --- leases that a scheduler took for whoever sends the request -----------------------------

_handed_out: WeakKeyDictionary[Any, dict[str, list[HeldLease]]] = WeakKeyDictionary()


def hand_out(gate: Gate, url: str, lease: HeldLease) -> None:
    """Let the next request for the URL that is begun at this gate use the lease, in whatever task
    it is. Take it back when the request is done."""
    _handed_out.setdefault(gate, {}).setdefault(_key(url), []).append(lease)


def take_back(gate: Gate, url: str, lease: HeldLease) -> bool:
    """Whether the lease that was handed out for the URL was not used; nobody will any more."""
    waiting = _handed_out.get(gate, {})
    found = waiting.get(_key(url), [])
    unused = lease in found
    if unused:
        found.remove(lease)
        if not found:
            del waiting[_key(url)]
    return unused


def _handed_out_for(gate: Gate, url: str) -> HeldLease | None:
    waiting = _handed_out.get(gate)
    found = waiting.get(_key(url)) if waiting else None
    if not waiting or not found:
        return None
    lease = found[0]
    take_back(gate, url, lease)
    return lease


def _key(url: str) -> str:
    return urls.parse(url).url


def begin_sync(gate: SyncGatekeeper, url: str, sent: str | None) -> Hop:
    """`begin`, for a thread."""
    lease: HeldLease | None = adopt(url)
    adopted = lease is not None
    if lease is None:
        lease = taken = gate.acquire(url, user_agent=other_agent(sent, gate.user_agent))
        gate.post(partial(taken.inner.claim, url))
    else:
        held = lease
        try:
            gate.wait(lambda inner: judge_adopted(held, sent, inner, url))
        except BaseException:
            lease.end()
            raise
    name = name_to_send(lease, gate.user_agent, sent)
    # Asked for in the loop, which takes a while, only where there is one.
    signer = None if gate.config.identity.key is None else gate.do(_signer)
    inner = lease.inner if isinstance(lease, SyncLease) else lease

    def told(error: BaseException) -> None:
        gate.do(lambda asked: _unreached(asked, inner, error))  # in the gate's loop already

    return Hop(lease, name, gate.post, gate.post, adopted, told, signer)


def _unreached(gate: Any, lease: object, error: BaseException) -> None:
    """A sidecar has an uplink of its own: that this process reaches nobody is not its affair."""
    if isinstance(gate, Gatekeeper):
        internals(gate).unreached(lease, error)


def _signer(gate: Any) -> Signer | None:
    """What signs the requests of a gate; a sidecar's client has no key."""
    return internals(gate).signer if isinstance(gate, Gatekeeper) else None


def name_to_send(lease: HeldLease, own: str | None, sent: str | None) -> str | None:
    """The User-Agent to send where a request has none of its own (`sent` is none, or a library's
    default): the one whose rules allow it. `own`: the gate's. None: the request has one."""
    return (lease.user_agent or own or lease.decision.user_agent) if unnamed(sent) else None


class GuardedNames:
    """The guard where an integration dials: which addresses a host may be dialled at.

    The answers are those that are dialled, so that rebinding finds no gap. Make it for a gate; its
    methods are called in the gate's loop.
    """

    def __init__(self, config: Config, resolver: AbstractResolver | None = None) -> None:
        """`config`: its `[guard]`, where the gate has no guard of its own (a sidecar's client, or
        one that was given a session). `resolver` None: the gate's, or the system's."""
        self._config = config
        self._given = resolver
        self._guard: Guard | None = None
        self._deny: Callable[[str, str, str], Decision] | None = None
        self._resolver: AbstractResolver | None = None
        self._own: str | None = None
        """The gate's User-Agent, which is sent where a request has no name of its own."""

    async def addresses(self, gate: Any, host: str, port: int) -> list[tuple[str, int]]:
        """Address and port, in the order in which to try them. Raises AddressRefused where the
        guard refuses them all, and OSError where the name has none."""
        guard, resolver = self._of(gate)
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host.strip("[]"))
        except OSError:
            found = await self._resolved(resolver, host, port)
            return [(one["host"], one["port"]) for one in found]
        if guard.refuses_address(host.strip("[]"), port) is not None:
            raise AddressRefused  # no resolver is asked about a literal
        return [(host.strip("[]"), port)]

    async def _resolved(self, resolver: AbstractResolver, host: str, port: int) -> Any:
        try:
            return await resolver.resolve(host, port, socket.AF_UNSPEC)
        except AddressRefused:
            raise
        except OSError as error:
            if isinstance(error, socket.gaierror):
                raise
            # aiodns has errors of its own, which say no more than that.
            raise socket.gaierror(socket.EAI_AGAIN, str(error)) from error

    def dialled(self) -> None:
        """One of them is about to be dialled: it is counted."""
        if self._guard is not None:
            self._guard.dialled()

    def denied(self, url: str, sent: str | None, note: str = BLOCKED_NOTE) -> Denied:
        """The error for what the guard refused, as everywhere: one word (T2). `note`: what the
        URL's own text shows."""
        deny = self._deny or refused_request
        name = self._own if sent is None or unnamed(sent) else sent
        return Denied(deny(url, name or "", note))

    def refuse_url(self, gate: Any, url: str, sent: str | None) -> None:
        """Raise Denied for a URL whose text the guard refuses, and InvalidURL for what is none. A
        gate with a guard of its own decides that itself; a sidecar goes by its own settings, this
        by those given here."""
        guard, _ = self._of(gate)
        if (refusal := guard.refuses_url(url)) is not None:
            urls.parse(url)
            raise self.denied(url, sent, refusal.note)

    def _of(self, gate: Any) -> tuple[Guard, AbstractResolver]:
        self._own = gate.user_agent
        if self._guard is None or self._resolver is None:
            inner = self._given
            if isinstance(gate, Gatekeeper):
                inside = internals(gate)
                self._guard, self._deny = inside.guard, inside.refused
                inner = inner or inside.resolver
            self._guard = self._guard or Guard(self._config)
            self._resolver = GuardedResolver(self._guard, inner)
        return self._guard, self._resolver

    async def close(self) -> None:
        """Release the system's resolver, if it was used."""
        if self._resolver is not None:
            await self._resolver.close()
            self._resolver = None


class Attempts:
    """The addresses of a host in turn, with the seconds that connecting to each may take.

    Those that fail go into `failures`, in the order in which they were tried.
    """

    def __init__(
        self,
        names: GuardedNames,
        found: Sequence[tuple[str, int]],
        timeout: float | None,
        began: float,
    ) -> None:
        """`timeout`: seconds for all of them, counted from `began` (`time.monotonic`)."""
        self._names = names
        self._found = found
        self._end = None if timeout is None else began + timeout
        self.failures: list[Exception] = []

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        """Address, port and seconds; each is counted as dialled."""
        for number, (address, port) in enumerate(self._found):
            left = _MOST_SECONDS if self._end is None else self._end - time.monotonic()
            self._names.dialled()
            yield address, port, max(_LEAST_SECONDS, left / (len(self._found) - number))

    def failure(self) -> Exception | None:
        """What to raise once all have failed; None: the host has no address.

        Of several, that of one which was reached and said no: our own uplink is not lost then.
        """
        for error in self.failures:
            if isinstance(by_system(error), ConnectionError):
                return error
        return self.failures[-1] if self.failures else None


def config_of(gate: Any) -> Config:
    """The settings of a gate, by which its requests are guarded; the defaults where it has none."""
    config = getattr(gate, "config", None)
    return config if isinstance(config, Config) else Config()


def accept_unguarded(config: Config, guarded: bool | None, what: str) -> None:
    """Raise ConfigError for what takes the guard from the socket, unless the user said that it
    may: `guarded=False`, or guard.mode = "url-only" in the gate's settings (T19)."""
    if guarded is not False and config.guard.mode != "url-only":
        raise ConfigError(
            f"{what} dials by itself, so that the guard can only judge URLs: say guarded=False "
            '(or set guard.mode = "url-only") to accept that, or leave it out'
        )


def usual_names(headers: Mapping[str, str]) -> dict[str, str]:
    """The header fields that a lease is told of, for a library that writes all names small."""
    usual = {"retry-after": "Retry-After", "ratelimit": "RateLimit", "age": "Age"}
    return {usual[name]: value for name, value in headers.items() if name in usual}
