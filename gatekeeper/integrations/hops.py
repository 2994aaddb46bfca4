"""Shared code of the integrations: a request under a lease, and the guard for its connections.

Each hop of a request, the initial URL as well as the target of each redirect, has three steps.
`begin` decides it and waits for its lease; the library sends it; and the head of the response or
the failure is reported. The lease lasts until the body has been read, closed or dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

from aiohttp.abc import AbstractResolver

from gatekeeper import descriptors, http_fields, urls
from gatekeeper.config import Config
from gatekeeper.decision import BLOCKED_NOTE, Decision
from gatekeeper.errors import (
    AddressRefused,
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    GatekeeperError,
    InvalidURL,
    LeaseTimeout,
    causes,
)
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.guard import GuardedResolver
from gatekeeper.gate import Gatekeeper
from gatekeeper.gate.decider import refused_request
from gatekeeper.gate.lease_base import (
    adopt,
    enter_detached,
    judge_adopted,
    note_fields,
    other_agent,
    refuse_page,
    unnamed,
)
from gatekeeper.gate.protocols import Gate, HeldLease
from gatekeeper.sync import SyncLease

_T = TypeVar("_T")
Call = Callable[[Callable[[], object]], object]
"""A function that calls a callback, immediately or later."""

_DEFAULT_CONNECT_SECONDS = 60.0
"""Timeout for connecting, in seconds, if the caller sets none."""
_MIN_CONNECT_SECONDS = 0.001
"""Timeout for connecting if no time is left: 0 would make the socket non-blocking, whose error is
not a timeout."""


# Default User-Agents of browsers and of common tools, which identify no one.
_CLIENT_DEFAULT = re.compile(
    r"Mozilla/5\.0 \([^()]*\) (?:AppleWebKit/[\d.]+(?: \(KHTML, like Gecko\))?|Gecko/[\d.]+)"
    r"(?: (?:HeadlessChrome|Chrome|Chromium|Version|Mobile|Safari|Edg|OPR|Firefox)/[\w.]+)+"
    r"|(?:curl|Wget|wget2|Go-http-client|axios|okhttp|lychee)/[\w.+-]+|node|undici"
)


class HopErrors:
    """The error classes of an integration: each derives from our error and from the library's.

    `base` is the library's error for failed requests, `invalid` are those for URLs that it can't
    request, `later` is that for a request which it should try again (by default `base`). `module`
    is the name of the module from which the four classes can be imported under these names.
    """

    def __init__(
        self,
        module: str,
        base: type[Exception],
        invalid: tuple[type[Exception], ...] = (),
        later: type[Exception] | None = None,
    ) -> None:
        def both(ours: type[Exception], *theirs: type[Exception]) -> Any:
            text = f"{ours.__name__}, and an error of the library's."
            # Users of requests expect that its errors have a `response`.
            members = {"__module__": module, "__doc__": text, "response": None}
            return type(f"Request{ours.__name__}", (ours, *theirs), members)

        self.denied: type[Denied] = both(Denied, base)
        self.deferred: type[Deferred] = both(Deferred, later or self.denied)
        self.late: type[LeaseTimeout] = both(LeaseTimeout, later or base)
        self.invalid: type[InvalidURL] = both(InvalidURL, *(invalid or (base,)))

    def of(self, error: GatekeeperError, request: object) -> GatekeeperError:
        """Convert an error to the corresponding class, with the attribute `request` set. Errors of
        other kinds are returned unchanged."""
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
    """The body of a response, for its lease: in use until it is freed or garbage-collected."""

    __slots__ = ("__weakref__", "_call", "_call_later", "_callbacks", "_size", "closed")

    def __init__(self, call: Call, call_later: Call) -> None:
        """Both functions call a callback in the gate's loop. `call_later` can be called from any
        thread, and returns before the callback runs."""
        self._call = call
        self._call_later = call_later
        self._callbacks: list[Callable[[], object]] = []
        self.closed: bool = False
        """Whether the body has been freed."""
        self._size = [0]

    def came(self, size: int) -> None:
        """Add to the number of bytes that were read."""
        self._size[0] += size

    def counting(self, received: Callable[[int], object]) -> Callable[[], object]:
        """Return a callback that passes the number of bytes to `received`. It has no reference to
        this object."""
        size = self._size
        return lambda: received(size[0])

    def add_callback(self, callback: Callable[[], object], /) -> None:
        """Register a callback for the gate's loop, called once the body is freed or dropped."""
        self._callbacks.append(callback)

    def free(self) -> None:
        """Note that the body was read to its end or is not needed any more. Idempotent."""
        self._end(self._call)

    def __del__(self) -> None:
        self._end(self._call_later)  # a garbage collection can run in any thread, at any point

    def _end(self, call: Call) -> None:
        self.closed = True
        callbacks, self._callbacks = self._callbacks, []  # another thread may end it, too
        for callback in callbacks:
            call(callback)


@dataclass(slots=True, eq=False)
class Hop:
    """A request that may be sent, with its lease."""

    gate: Gate
    """The gate in its loop."""
    lease: HeldLease
    user_agent: str | None
    """The User-Agent to send instead of the library's default; None if the request has one."""
    call: Call
    call_later: Call
    adopted: bool
    """Whether the lease was already open in this context."""
    started: float = field(default_factory=time.monotonic)
    body: BodyInUse | None = None
    """The body of the response, once its head has arrived."""

    def headers(self, method: str, url: str) -> dict[str, str]:
        """Return headers that identify the sender, to add to the request's or replace them."""
        signer = self.gate.parts.signer if isinstance(self.gate, Gatekeeper) else None
        signed = {} if signer is None else signer.headers(method, url)
        return signed if self.user_agent is None else signed | {"User-Agent": self.user_agent}

    def answered(self, status: int, headers: Mapping[str, str]) -> BodyInUse:
        """Report the head of the response: the interval counts from now. Return the body, which the
        caller must free."""
        lease, limit = self.lease, http_fields.rate_limit_of(headers)
        note_fields(lease, status, headers)
        lease.answered(status, retry_after=headers.get("Retry-After"), rate_limit=limit)
        body = self.body = BodyInUse(self.call, self.call_later)
        if lease.counts_bytes:
            body.add_callback(body.counting(lease.received))
        hold = lease.lasts_with if self.adopted else lease.ends_with
        hold(body)
        return body

    def end(self, *, by_network: bool, unconnected: BaseException | None = None) -> None:
        """Free the body. Without a response head, report that there was none, and end the lease.

        `by_network`: the request may have been sent and the host did not respond; otherwise it was
        refused or cancelled locally, which says nothing about the host. `unconnected`: the
        library's error if connecting failed, which may be due to our own uplink.
        """
        if self.body is not None:
            self.body.free()
            return
        if unconnected is not None:
            if (why := by_system(unconnected)) is not None:
                self.call(partial(_unreached, self.gate, self.lease, why))
            by_network = by_network and not descriptors.is_shortage(unconnected)
        try:
            elapsed = time.monotonic() - self.started
            self.lease.report(elapsed=elapsed if by_network else None)
        finally:
            self.lease.end()


def by_system(error: BaseException) -> OSError | None:
    """Return the operating system's error in the chain of causes of a library's error, if any."""
    for one in causes(error):
        if isinstance(one, TimeoutError | socket.gaierror):
            return one
        if isinstance(one, OSError) and one.errno is not None:
            return one
        if isinstance(number := getattr(one, "osError", None), int):  # an error of Twisted
            return OSError(number, str(one))
    return None


async def begin(
    gate: Gate,
    url: str,
    sent: str | None,
    max_wait: float | None = None,
    *,
    guard: GuardedNames | None = None,
    adopting: Callable[[str], HeldLease | None] = adopt,
) -> Hop:
    """Decide a request and acquire its lease. `sent`: its User-Agent, if it has one. `max_wait`:
    maximum number of seconds to wait for a lease; None: no limit. `guard` judges the URL first.

    Uses a lease that is open in this context for this URL, or one that was handed out for it.
    Raises the errors of `gate.lease` and of `GuardedNames.refuse_url`.
    """
    if guard is not None:
        guard.refuse_url(gate, url, sent)
    lease = adopting(url)
    adopted = lease is not None
    if lease is None and (lease := _handed_out_for(gate, url)) is None:
        agent = other_agent(sent, gate.user_agent)
        lease = await enter_detached(gate.lease(url, user_agent=agent, timeout=max_wait))
    else:
        try:
            if adopted or _key(lease.url) == _key(url):
                await judge_adopted(lease, sent, gate, url)
            else:  # acquired for another URL of the host, such as its robots.txt, never denied
                await decide(gate, url, sent)
        except BaseException:
            lease.end()
            raise
    if not adopted:
        lease.claim(url)  # from here on, a missing response counts against the host
    return hop_of(gate, lease, sent, adopted=adopted)


def hop_of(gate: Gate, lease: HeldLease, sent: str | None, *, adopted: bool = False) -> Hop:
    """Return the hop of a request under a lease, decided already. Call it in the gate's loop."""
    loop = asyncio.get_running_loop()

    def call_later(callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so the gate is as well
            loop.call_soon_threadsafe(callback)

    # The name whose rules allow a request that has none of its own (or a library's default).
    own = lease.user_agent or gate.user_agent or lease.decision.user_agent
    return Hop(gate, lease, own if unnamed(sent) else None, operator.call, call_later, adopted)


async def decide(gate: Gate, url: str, sent: str | None) -> Decision:
    """Return the decision about a request that takes no lease of its own. Raises Denied, Deferred
    or InvalidURL."""
    decision = await gate.check(url, user_agent=other_agent(sent, gate.user_agent))
    refuse_page(gate, decision)
    return decision


# --- leases that a scheduler acquires for the code that sends the request -------------------


def _handed_out(gate: Gate) -> dict[HeldLease, str]:
    """Return the leases that wait for their requests, with the URLs of these, oldest first. They
    are few: one for each worker of a crawler. They are kept in the gate itself, which they lead
    back to."""
    return vars(gate).setdefault("_handed_out", {})


def hand_out(gate: Gate, url: str, lease: HeldLease) -> None:
    """Offer a lease to the next request for the URL that begins at this gate, in any task. Call
    `take_back` when the request is done."""
    _handed_out(gate)[lease] = _key(url)


def take_back(gate: Gate, lease: HeldLease) -> bool:
    """Withdraw a lease that was handed out. Return True if it was not used."""
    return _handed_out(gate).pop(lease, None) is not None


def _handed_out_for(gate: Gate, url: str) -> HeldLease | None:
    waiting = _handed_out(gate)
    key = _key(url) if waiting else ""
    found = next((lease for lease, whose in waiting.items() if whose == key), None)
    if found is not None:
        del waiting[found]
    return found


def _key(url: str) -> str:
    return urls.parse(url).url


def _unreached(gate: Gate, lease: HeldLease, error: BaseException) -> None:
    """Report a failure to connect. A sidecar has its own uplink, so it is not notified."""
    if isinstance(gate, Gatekeeper):
        gate.parts.unreached(lease.inner if isinstance(lease, SyncLease) else lease, error)


class GuardedNames:
    """The guard for an integration's connections: resolves a host to its allowed addresses.

    The integration connects to exactly the returned addresses, so DNS rebinding can't bypass the
    guard. An object belongs to one gate; call its methods in the gate's loop.
    """

    def __init__(self, config: Config, resolver: AbstractResolver | None = None) -> None:
        """`config`: its `[guard]` section applies if the gate has no guard of its own (a sidecar's
        client, or a gate that was given a session). `resolver`: by default that of the gate, or the
        system's."""
        self._given = resolver
        self.guard: Guard = Guard(config)
        """The guard of the gate, once a request has begun."""
        self._deny: Callable[[str, str, str], Decision] = refused_request
        self._resolver: Any = None
        self._own: str | None = None
        """The gate's User-Agent, which is sent if a request has none of its own."""

    async def addresses(self, gate: Any, host: str, port: int) -> list[tuple[str, int]]:
        """Return pairs of address and port in the order in which to try them. Raises AddressRefused
        if the guard refuses all of them, and OSError if the name has none."""
        guard, literal = self.guard_of(gate), host.strip("[]")
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, literal)
        except OSError:
            return await self._resolved(host, port)
        if guard.refuses_address(literal, port) is not None:
            raise AddressRefused  # a literal is not resolved, so the guard checks it here
        return [(literal, port)]

    async def _resolved(self, host: str, port: int) -> list[tuple[str, int]]:
        try:
            found = await self._resolver.resolve(host, port, socket.AF_UNSPEC)
        except (AddressRefused, socket.gaierror):
            raise
        except OSError as error:  # aiodns raises its own errors, without further information
            raise socket.gaierror(socket.EAI_AGAIN, str(error)) from error
        return [(one["host"], one["port"]) for one in found]

    def denied(self, url: str, sent: str | None, note: str = BLOCKED_NOTE) -> Denied:
        """Return the error for a request that the guard refused, with the uniform note (T2) unless
        `note` describes a reason that is visible in the URL's text."""
        name = self._own if unnamed(sent) else sent
        return Denied(self._deny(url, name or "", note))

    def refuse_url(self, gate: Any, url: str, sent: str | None) -> None:
        """Raise Denied for a URL whose text the guard refuses, and InvalidURL for a malformed one.
        A sidecar decides by its own settings in addition."""
        if (refusal := self.guard_of(gate).refuses_url(url)) is not None:
            urls.parse(url)
            raise self.denied(url, sent, refusal.note)

    def guard_of(self, gate: Any) -> Guard:
        """Return the guard of the gate, or else one with the settings given here."""
        self._own = gate.user_agent
        if self._resolver is None:
            inner = self._given
            if isinstance(gate, Gatekeeper):
                parts = gate.parts
                self.guard, self._deny = parts.guard or self.guard, parts.decider.refused
                inner = inner or parts.resolver
            self._resolver = GuardedResolver(self.guard, inner)
        return self.guard

    async def close(self) -> None:
        """Close the resolver, if it was used."""
        if self._resolver is not None:
            await self._resolver.close()
            self._resolver = None


class Hops:
    """What a client of a library has: its gate, its guard, and the bodies that are being read."""

    def __init__(
        self,
        gate: Any,
        errors: HopErrors,
        *,
        max_wait: float | None = None,
        resolver: AbstractResolver | None = None,
        blocking: bool = False,
    ) -> None:
        """`gate` is a SyncGatekeeper if `blocking`. Raises TypeError if it is not."""
        self.gate: Any = gate
        self.config: Config = config_of(gate, blocking=blocking)
        self.names: GuardedNames = GuardedNames(self.config, resolver)
        self.guarded: bool = True
        """Whether the guard judges each request; otherwise the gate alone does."""
        self._errors = errors
        self._max_wait = max_wait
        self._bodies: WeakSet[BodyInUse] = WeakSet()

    @contextmanager
    def converting(self, request: object) -> Iterator[None]:
        """Convert our errors to those that derive from the library's as well."""
        try:
            yield
        except GatekeeperError as error:
            raise self._errors.of(error, request) from error

    async def begin(self, url: str, sent: str | None, request: object) -> Hop:
        """Call `begin`, and convert its errors."""
        guard = self.names if self.guarded else None
        with self.converting(request):
            return await begin(self.gate, url, sent, self._max_wait, guard=guard)

    def begin_sync(self, url: str, sent: str | None, request: object) -> Hop:
        """Call `begin` for a thread: in the gate's loop, with a lease that the thread has open."""
        gate, options = self.gate, {"guard": self.names if self.guarded else None}
        with self.converting(request):
            # Not in the loop: a lease of another gate would make it wait for that one's.
            held = adopt(url)
            if held is not None and not isinstance(held, SyncLease):  # context of `to_thread`
                text = f"{urls.mask(url)}: its lease is open in asynchronous code, to which it "
                text += "belongs: end it first, or send the request from there"
                raise LeaseTimeout(url, text)

            async def begun(inner: Any) -> Hop:
                hop = await begin(
                    inner, url, sent, self._max_wait, adopting=lambda _: held, **options
                )
                lease = hop.lease if hop.adopted else SyncLease(cast("Any", hop.lease), gate)
                return replace(hop, lease=lease, call=gate.post, call_later=gate.post)

            return gate.wait(begun, undo=lambda hop: hop.lease.give_back())

    def refused(self, url: str, sent: str | None, request: object) -> GatekeeperError:
        """Return the error for a request whose addresses the guard refuses."""
        return self._errors.of(self.names.denied(url, sent), request)

    async def connect(
        self,
        host: str,
        port: int,
        timeout: float | None,
        dial: Callable[[str, int, float], Awaitable[_T]],
        failures: tuple[type[Exception], ...],
        unresolved: type[Exception] | None = None,
    ) -> _T:
        """Call `dial` with allowed addresses of a host, its port and seconds, until one accepts the
        connection. `failures` are what it raises if it does not, and `timeout` is for all together.

        Raises AddressRefused, what `dial` raises, and for a name without an address `unresolved`,
        or the system's error.
        """
        began, failed = time.monotonic(), []
        found = await self._addresses(self.gate, host, port, unresolved)
        for attempt in attempts(self.names.guard, found, timeout, began):
            try:
                return await descriptors.with_descriptor(partial(dial, *attempt))
            except failures as error:
                failed.append(error)
        raise _failure(failed)

    def connect_sync(
        self,
        host: str,
        port: int,
        timeout: float | None,
        dial: Callable[[str, int, float], _T],
        failures: tuple[type[Exception], ...],
        unresolved: type[Exception] | None = None,
    ) -> _T:
        """Call `connect` for threads. Names are resolved in the gate's loop."""
        began, failed = time.monotonic(), []
        found = self.gate.wait(lambda inner: self._addresses(inner, host, port, unresolved))
        for attempt in attempts(self.names.guard, found, timeout, began):
            try:
                return descriptors.with_descriptor_sync(partial(dial, *attempt))
            except failures as error:
                failed.append(error)
        raise _failure(failed)

    async def _addresses(
        self, gate: Any, host: str, port: int, unresolved: type[Exception] | None
    ) -> list[tuple[str, int]]:
        try:
            return await self.names.addresses(gate, host, port)
        except socket.gaierror as error:
            if unresolved is None:
                raise
            raise unresolved(str(error)) from error

    def answered(self, hop: Hop, status: int, headers: Mapping[str, str]) -> BodyInUse:
        """Call `hop.answered`; `close` frees the body if nobody else has."""
        body = hop.answered(status, headers)
        self._bodies.add(body)
        return body

    def free(self) -> None:
        """Free all bodies, which ends their leases."""
        for body in list(self._bodies):
            body.free()

    async def close(self) -> None:
        """Free all bodies, and close the resolver."""
        self.free()
        await self.names.close()

    def close_sync(self) -> None:
        """Call `close` in the gate's loop, from another thread."""
        self.free()
        with suppress(GateClosed):
            self.gate.wait(lambda _: self.names.close())


def attempts(
    guard: Guard, found: Sequence[tuple[str, int]], timeout: float | None, began: float
) -> Iterator[tuple[str, int, float]]:
    """Yield each address and port, with the seconds for connecting to it: of the timeout, which is
    for all together and counts from `began`. The guard counts each attempt."""
    end = None if timeout is None else began + timeout
    for number, (address, port) in enumerate(found):
        left = _DEFAULT_CONNECT_SECONDS if end is None else end - time.monotonic()
        guard.dialled()
        yield address, port, max(_MIN_CONNECT_SECONDS, left / (len(found) - number))


def _failure(failures: list[Exception]) -> Exception:
    """Return the error to raise once all attempts have failed.

    An address that was reached and refused the connection takes precedence: it shows that our own
    uplink works.
    """
    refused = (one for one in failures if isinstance(by_system(one), ConnectionError))
    return next(refused, failures[-1])


def accept_unguarded(config: Config, guarded: bool | None, what: str) -> None:
    """Raise ConfigError for `what` bypasses the guard at the socket, unless the user accepts that
    by `guarded=False` or by guard.mode = "url-only" in the gate's settings (T19)."""
    if guarded is not False and config.guard.mode != "url-only":
        raise ConfigError(
            f"{what} dials by itself, so that the guard can only judge URLs: say guarded=False "
            '(or set guard.mode = "url-only") to accept that, or leave it out'
        )


def unless_default(sent: str | None) -> str | None:
    """Return a User-Agent unless it is the default of a browser or of a common tool."""
    return None if sent is None or _CLIENT_DEFAULT.fullmatch(sent) else sent


def usual_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the header fields, those that a lease evaluates with their usual capitalization, for a
    library that converts all names to lower case."""
    usual = {"retry-after": "Retry-After", "ratelimit": "RateLimit", "age": "Age"}
    return {usual.get(name, name): value for name, value in headers.items()}


def config_of(gate: object, *, blocking: bool = False) -> Config:
    """Return a gate's settings, by which its requests are guarded, or else the defaults.

    Raises TypeError for what is no gate, or not one for the caller's kind of code.
    """
    check, config = getattr(gate, "check", None), getattr(gate, "config", None)
    if check is None or inspect.iscoroutinefunction(check) is blocking:
        wanted = "a SyncGatekeeper" if blocking else "a Gatekeeper or a RemoteGatekeeper"
        raise TypeError(f"gate must be {wanted}, not {type(gate).__name__}")
    return config if isinstance(config, Config) else Config()
