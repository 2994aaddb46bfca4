"""`RemoteGatekeeper`: the methods of `Gatekeeper`, answered by a sidecar.

Beyond passing questions on, a client guarantees:

fail closed   while the sidecar is unreachable, decisions are DEFER, reason gate_unreachable
batching      checks made in one iteration of the event loop are sent in one request
caching       a decision is repeated while it is valid: see `gatekeeper.client.questions`
retries       questions are retried for `patience` seconds (`connect_timeout` before the first
              response), reports for ten minutes
leases        renewed while they are held, given back when their caller is cancelled
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import secrets
import ssl
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import quote, urlencode

from aiohttp import ClientMiddlewareType

from gatekeeper import errors, urls
from gatekeeper.client import wire
from gatekeeper.client.connection import (
    Outbox,
    SidecarConnection,
    SidecarResponse,
    SidecarUnreachable,
    read,
    read_line,
)
from gatekeeper.client.questions import Key, Questions, RememberedDecisions
from gatekeeper.client.remote_leases import (
    HeldRemoteLeases,
    RemoteLease,
    RemoteLeaseRequest,
    RemoteLeases,
)
from gatekeeper.clock import Clock, OwnedTasks, SystemClock, block_end, refuse_unless_open, utc
from gatekeeper.config import (
    Config,
    HostRule,
    RobotsConfig,
    agent_named,
    as_config,
    host_named,
    match_named,
    refuse_wildcard_agent,
    token_of,
)
from gatekeeper.decision import Decision, NotYet, Reason, Verdict
from gatekeeper.pacing.deadlock import WaitGraph
from gatekeeper.pacing.host_settings import checked
from gatekeeper.pacing.waiters import ClockView
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.parser import token_warning
from gatekeeper.session.middleware import gate_middleware
from gatekeeper.sitemaps import SitemapEntry, SitemapFinding, Sitemaps, limit_of, since_when

_log = logging.getLogger(__name__)


_RETRY_SECONDS = 5.0
"""Retry delay in seconds of a decision made while the sidecar is unreachable."""
_ERROR_RETRY_SECONDS = 60.0
"""Retry delay in seconds of a decision made after an internal error of the client."""
_CLOSE_SECONDS = 5.0
"""Seconds that closing waits for the last reports."""
_READ_AHEAD = 1000
"""URLs that `check_many` reads ahead of the one being answered."""


class RemoteGatekeeper:
    """A client of a sidecar: the methods of `Gatekeeper`, over TCP or a unix socket.

    `where` is `"http://127.0.0.1:8750"`, `"https://..."` (with `ssl` for a context of your
    own) or `"unix:/run/gatekeeper/gatekeeper.sock"`; `token` is the sidecar's bearer token.
    `user_agent` is the whole User-Agent header, or a product token, as for `Gatekeeper`: it is sent
    with every question and lease, and its token selects the group in robots.txt. The default is the
    sidecar's own name, which `gate.user_agent` returns once the gate is open. Of `config` only
    `[robots]`, for `robots` and `policy`, and `pacing.own_wait` are used.

    `fail` is the answer of `allowed` and `check` while the sidecar is unreachable: "closed" defers,
    "open" allows; the decision's reason is gate_unreachable. A lease needs the sidecar in any case,
    as only the sidecar knows when a host is due.

    `patience`: seconds for which an unanswered question is retried, for example while the sidecar
    restarts. `connect_timeout`: seconds in which a connection must stand; until the sidecar has
    answered once, questions are retried for no longer, so that a wrong address shows soon.
    `timeout`: seconds for one answer, for which the sidecar may have to fetch a robots.txt and wait
    for its lease. `poll`:
    seconds that one request for a lease waits in the sidecar (less if its server.max_wait is);
    `most_polls`: how many may wait at the same time. `remember`: the most seconds for which a
    decision is cached; `remember_most`: how many are cached (0: none).

    A `PoliteQueue` works with it as with a gate of this process.

    A task that would wait for a lease that it holds itself (also in the `get` of a `PoliteQueue`)
    gets LeaseTimeout immediately; the child of a task that holds the host, and tasks of this client
    that wait for each other, get it after `pacing.own_wait`. The client considers its own leases,
    with one slot per host: not clocks that hosts share, other clients, or the redirects of a
    robots.txt.

    Raises ConfigError for an invalid address, token or name. Every method raises SidecarError if
    the sidecar rejects the client, for example because of a wrong token.

    >>> async def main() -> None:
    ...     where = "unix:/run/gatekeeper/gatekeeper.sock"
    ...     async with RemoteGatekeeper(where, "examplebot/1.0 (+https://example.org)") as gate:
    ...         if await gate.allowed("https://example.org/page"):
    ...             async with gate.lease("https://example.org/page") as lease:
    ...                 ...  # fetch it now
    ...                 lease.report(status=200)
    """

    clock: Clock
    """The clock that the client uses."""
    waits: WaitGraph[RemoteLease]
    """Which tasks of this client hold leases or wait for them. For a `PoliteQueue`."""
    middleware: ClientMiddlewareType
    """Client middleware that decides, paces and reports every request and redirect hop.

    Pass it last: `aiohttp.ClientSession(middlewares=(..., gate.middleware))`.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        user_agent: str | None = None,
        *,
        token: str | None = None,
        fail: Literal["closed", "open"] = "closed",
        config: Config | None = None,
        ssl: ssl.SSLContext | None = None,
        patience: float = 10.0,
        connect_timeout: float = 2.0,
        timeout: float = 90.0,
        poll: float = 240.0,
        most_polls: int = 1000,
        remember: float = 60.0,
        remember_most: int = 10_000,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if fail not in ("closed", "open"):
            raise errors.ConfigError(f'fail={fail!r}: "closed" defers, "open" allows; nothing else')
        if user_agent is not None:
            agent_named(user_agent)
            check_agent(user_agent)  # its length
            if (warning := token_warning(user_agent)) is not None:
                warnings.warn(warning, stacklevel=2)
        self._name = user_agent
        self._sidecars_name: str | None = None
        self.config: Config = as_config(config)
        self.clock = clock or SystemClock()
        self._connection = SidecarConnection(
            where,
            token=token,
            ssl=ssl,
            patience=patience,
            connect_timeout=connect_timeout,
            timeout=timeout,
            clock=self.clock,
            rng=rng or random.Random(),
        )
        self._tasks = OwnedTasks()
        self._answers = RememberedDecisions(self.clock, remember_most, remember)
        unanswered = partial(self._unreachable, fail=fail)
        self._questions = Questions(self._connection, self._answers, self._tasks, unanswered)
        self._outbox = Outbox(self._connection)
        self._held = HeldRemoteLeases(self._outbox, self.config.pacing.own_wait, self.clock)
        self.waits = self._held.waits
        slots = asyncio.Semaphore(most_polls)
        self._leases = RemoteLeases(
            self._connection, self._tasks, self._unreachable, self._held, poll, slots
        )
        self.middleware = gate_middleware(self)
        self._prefix, self._counter = f"client-{secrets.token_hex(4)}-", itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is not open
        self._closed = False
        self._asked = self._remembered = self._unanswered = 0

    def __repr__(self) -> str:
        return f"<RemoteGatekeeper {self._connection!r} {'open' if self._loop else 'shut'}>"

    # -- life ------------------------------------------------------------------------

    if not TYPE_CHECKING:
        __enter__ = __exit__ = __await__ = errors.refusing(
            "a RemoteGatekeeper is opened by `async with`"
        )

    async def __aenter__(self) -> Self:
        if self._loop is not None or self._closed:
            raise errors.GateClosed("this gate was opened already; make another one")
        await self._connection.open()
        try:
            if self._name is None:
                self._sidecars_name = await identity_of(self._connection)
        except BaseException:
            await self._connection.close()
            raise
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Send the last reports, for at most five seconds; pending calls raise GateClosed."""
        self._loop, self._closed = None, True
        try:
            await self._tasks.close()
            self._questions.close()
            self._held.end_all()
            self.waits.close()
            await self._outbox.close(_CLOSE_SECONDS)
        finally:
            await self._connection.close()

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply if a question has no other.

        As given, or else the sidecar's own, read when the gate opens: None before that, and if the
        sidecar was unreachable then.
        """
        return self._name or self._sidecars_name

    # -- questions -------------------------------------------------------------------

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Return True if the URL may be fetched now. Raises InvalidURL."""
        return (await self.check(url, user_agent=user_agent)).verdict is Verdict.ALLOW

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Decide whether the URL may be fetched now, and why. Raises InvalidURL.

        Questions of one iteration of the event loop are sent together, without a delay.
        """
        origin, _ = urls.split(url)
        found = self._ask(url, origin, self._name if user_agent is None else user_agent)
        decision = found if isinstance(found, Decision) else await found
        if decision.reason is Reason.INVALID_URL:
            # A sidecar of another version may parse URLs more strictly than this client.
            raise errors.InvalidURL(urls.mask(url), decision.note or "the sidecar rejects it")
        return decision

    async def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncIterator[Decision]:
        """Yield a decision about each URL, in order; robots.txt files are fetched in parallel.

        A malformed URL yields DENY with reason `invalid_url`, so there is one decision per input.
        """
        errors.refuse_single_text(urls)
        agent = self._name if user_agent is None else user_agent
        waiting = (self._ask_any(raw, agent) for raw in urls)
        window: deque[Decision | asyncio.Future[Decision]] = deque()
        try:
            while True:
                if len(window) < _READ_AHEAD // 2:
                    window.extend(itertools.islice(waiting, _READ_AHEAD - len(window)))
                    if not window:
                        return
                found = window.popleft()
                yield found if isinstance(found, Decision) else await found
        finally:  # the other questions are dropped
            for found in window:
                if not isinstance(found, Decision) and not found.cancel() and not found.cancelled():
                    found.exception()  # retrieved, so that asyncio does not warn

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        """Return the decisions of `check_many` as a list."""
        return [decision async for decision in self.check_many(urls, user_agent=user_agent)]

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """Return the decision if this client has cached it; never ask. Raises InvalidURL."""
        urls.split(url)
        if user_agent is not None:
            check_agent(user_agent)
        return self._answers.find((url, self._name if user_agent is None else user_agent))

    # -- files and hosts: these raise SidecarError if the sidecar is unreachable, as no fail mode
    # has an answer here

    async def robots(self, url: str) -> RobotsTxt | None:
        """Return the robots.txt of the URL's origin; None if there is no text.

        The sidecar sends the text, which is parsed here. It is also None if the guard or the
        operator decides about the origin. Raises InvalidURL.
        """
        return await robots_of(await self._explain(url, None), self.config.robots)

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """Return the rules of the URL's origin for the agent. Raises InvalidURL.

        Without a file the policy allows everything, if the file can't be fetched it allows nothing,
        and if the operator decides it follows the operator.
        """
        agent = self._name if user_agent is None else user_agent
        explanation = await self._explain(url, agent)
        settings, decision = self.config.robots, explanation.decision
        robots = await robots_of(explanation, settings)
        if robots is None:
            # Everything is allowed if there is no file (RFC 9309 section 2.3.1.3, RFC-36) or the
            # operator allows the origin; nothing if the file can't be fetched (section 2.3.1.4,
            # RFC-37) or the guard refuses it.
            welcome = decision.verdict is Verdict.ALLOW
            robots = RobotsTxt.parse("" if welcome else "User-agent: *\nDisallow: /\n")
        return settings.policy(robots, agent or decision.user_agent)

    def sitemaps(
        self,
        origin: str,
        *,
        since: datetime | date | None = None,
        guess: bool = False,
        max_entries: int | None = None,
    ) -> Sitemaps:
        """Iterate over the pages that the origin's sitemaps list. See `Gatekeeper.sitemaps`.

        The sidecar fetches them, under its own name. Iterating also raises SidecarError, if the
        connection breaks off for example: then the entries are not complete.
        """
        query = {"origin": urls.parse(origin).origin, "guess": str(bool(guess)).lower()}
        if (moment := since_when(since)) is not None:
            query["since"] = moment.isoformat()
        if (most := limit_of(max_entries)) is not None:
            query["max_entries"] = str(most)
        return Sitemaps(partial(self._sitemaps, f"/v1/sitemaps?{urlencode(query)}", origin))

    async def _sitemaps(
        self, path: str, origin: str, findings: list[SitemapFinding]
    ) -> AsyncGenerator[SitemapEntry]:
        self._check_usable(None)
        async for text in self._connection.lines(path, origin):
            line = read_line(text, wire.SitemapLine)
            if line.finding is not None:
                findings.append(line.finding)
            elif line.url is not None:
                yield SitemapEntry(line.url, line.lastmod, line.source or "")

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Return every clock of the host, each with its source.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for anything else.
        """
        return (await self._control(host)).clocks

    async def refresh(self, origin: str) -> None:
        """Fetch the robots.txt of an origin, or of a URL's origin, again now. Raises InvalidURL.

        If the host is not due for long, it returns earlier, and the sidecar goes on.
        """
        target = urls.parse(origin)
        await self._control(
            target.host, "/refresh", wire.encode(wire.RefreshBody(origin=target.origin))
        )
        self._answers.forget()

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """Send no request to the host before `until`, an aware datetime or POSIX seconds."""
        block = wire.BlockBody(until=utc(block_end(host, until)), reason=reason)
        await self._control(host, "/block", wire.encode(block))

    async def pause(self, host: str) -> None:
        """Grant no lease for the host until `resume`."""
        await self._control(host, "/pause", b"{}")

    async def resume(self, host: str) -> None:
        """Grant leases for the host again. It lifts a pause, not a block."""
        await self._control(host, "/resume", b"{}")

    async def override(self, rule: HostRule, *, seconds: float | None = None) -> None:
        """Set a `[[host]]` rule at run time; see `Gatekeeper.override`."""
        body = wire.encode(wire.OverrideBody.of(checked(rule), seconds))
        match = quote(match_named(rule.match), safe="")
        read(await self._request("POST", f"/v1/hosts/{match}/override", body), wire.HostBody)
        self._answers.forget()

    # -- leases ----------------------------------------------------------------------

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> RemoteLeaseRequest:
        """Wait until the host is due; the lease is the right to send one request to the URL.

        Use it as `async with gate.lease(url) as lease:`. Arguments and errors are those of
        `Gatekeeper.lease`; a priority outside -1000 to 1000 counts as the nearest of these. It
        also raises Deferred while the sidecar is unreachable.
        """
        return RemoteLeaseRequest(
            lambda: self.acquire(url, priority=priority, timeout=timeout, user_agent=user_agent)
        )

    async def acquire(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
        owned: bool = True,
    ) -> RemoteLease:
        """Wait for a lease that is not bound to a block; call `lease.end()` yourself.

        `owned=False`: it outlives the task that asks for it. Raises as entering `lease` does.
        """
        agent = self._agent_of_lease(user_agent)
        return await self._leases.acquire(
            url, priority=priority, timeout=timeout, user_agent=agent, owned=owned
        )

    async def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> RemoteLease | NotYet:
        """Grant a lease if the host is due now: one round trip. See `Gatekeeper.try_acquire`.

        While the sidecar is unreachable it returns NotYet with `why` gate_unreachable.
        """
        agent = self._agent_of_lease(user_agent)
        return await self._leases.try_acquire(url, priority=priority, user_agent=agent, owned=owned)

    at_a_glance = False
    """For a `PoliteQueue`: False, as only the sidecar knows when a host is due."""

    async def acquire_if_due(self, url: str, *, priority: int = 0) -> RemoteLease:
        """Grant a lease if the host is due now, in one round trip, for a `PoliteQueue`.

        The lease belongs to no task yet. Raises as `acquire` does; the `retry_at` of LeaseTimeout
        is the earliest time at which asking again can help.
        """
        self._check_usable(None)
        return await self._leases.acquire_if_due(url, priority=priority, user_agent=self._name)

    def stats(self) -> RemoteStats:
        """Return the current counters and gauges of this client."""
        return RemoteStats(
            asked=self._asked,
            remembered=self._remembered,
            unanswered=self._unanswered,
            batches=self._questions.batches,
            urls=self._questions.urls,
            requests=self._connection.requests,
            repeated=self._connection.repeated,
            failures=self._connection.failures,
            granted=self._held.granted,
            held=len(self._held),
            told=self._outbox.delivered,
            untold=len(self._outbox),
            dropped=self._outbox.dropped,
            kept=len(self._answers),
            reachable=not self._connection.down,
        )

    @property
    def ready(self) -> bool:
        """Whether the gate is open and the sidecar answered the last question."""
        return self._loop is not None and not self._connection.down

    # -- inside ----------------------------------------------------------------------

    def _check_usable(self, user_agent: str | None) -> None:
        """Raise GateClosed or ConfigError unless a question for the agent can be sent."""
        refuse_unless_open(self._loop)
        if user_agent is not None:
            check_agent(user_agent)

    def _agent_of_lease(self, user_agent: str | None) -> str | None:
        self._check_usable(user_agent)
        refuse_wildcard_agent(user_agent)
        return self._name if user_agent is None else user_agent

    async def _explain(self, url: str, agent: str | None) -> wire.Explanation:
        # About "/", as the answer about /robots.txt itself would explain nothing (RFC 9309 section
        # 2.2.2, RFC-20).
        query = f"url={quote(urls.parse(url).origin + '/', safe='')}"
        self._check_usable(agent)
        if agent is not None:
            query += f"&user_agent={quote(agent, safe='')}"
        return read(await self._request("GET", f"/v1/explain?{query}"), wire.Explanation)

    async def _control(
        self, host: str, action: str = "", body: bytes | None = None
    ) -> wire.HostBody:
        path = f"/v1/hosts/{quote(host_named(host), safe='')}{action}"
        return read(await self._request("POST" if action else "GET", path, body), wire.HostBody)

    async def _request(self, method: str, path: str, body: bytes | None = None) -> SidecarResponse:
        """Return the sidecar's response of any status. Raises SidecarError if there is none."""
        self._check_usable(None)
        try:
            return await self._connection.ask(method, path, body)
        except SidecarUnreachable as error:
            raise errors.SidecarError(503, "unreachable", str(error)) from None

    def _ask_any(self, raw: str, agent: str | None) -> Decision | asyncio.Future[Decision]:
        """Ask as `_ask` does; a malformed URL gets DENY here."""
        try:
            origin, _ = urls.split(raw)
        except errors.InvalidURL as error:
            self._check_usable(agent)
            return self._decision(Verdict.DENY, Reason.INVALID_URL, (raw, agent), "", error.problem)
        except Exception as error:
            if not isinstance(raw, str):
                raise
            # The error of one URL must not fail its batch.
            _log.exception("%s can't be asked about", urls.mask(raw, query=False))
            note = f"an internal error of this client ({type(error).__name__}); see its log"
            reason, wait = Reason.INTERNAL, _ERROR_RETRY_SECONDS
            return self._decision(Verdict.DEFER, reason, (raw, agent), "", note, wait)
        return self._ask(raw, origin, agent)

    def _ask(self, url: str, origin: str, agent: str | None) -> Decision | asyncio.Future[Decision]:
        """Return the cached decision, or a future of it; cancel the future to drop the question."""
        self._check_usable(agent)
        self._asked += 1
        found = self._answers.find((url, agent))
        if found is None:
            return self._questions.ask((url, agent), origin)
        self._remembered += 1
        return found

    def _unreachable(self, key: Key, origin: str, detail: str, fail: str = "closed") -> Decision:
        """Decide without the sidecar: DEFER, or ALLOW with `fail="open"`."""
        self._unanswered += 1
        if fail == "open":
            verdict, wait, note = Verdict.ALLOW, 0.0, "allowed without asking (fail open)"
        else:
            verdict, wait, note = Verdict.DEFER, _RETRY_SECONDS, "the sidecar can't be asked"
        reason = Reason.GATE_UNREACHABLE
        return self._decision(verdict, reason, key, origin, f"{note}: {detail}", wait)

    def _decision(
        self, verdict: Verdict, reason: Reason, key: Key, origin: str, note: str, wait: float = 0.0
    ) -> Decision:
        """Make a decision of the client's own; `wait`: seconds after which to ask again."""
        url, agent = key
        return Decision(
            verdict=verdict,
            reason=reason,
            url=urls.mask(url) if "@" in url or not origin else url,
            origin=origin,
            user_agent=check_agent(named) if (named := agent or self.user_agent) else "",
            note=note,
            retry_at=utc(self.clock.wall() + wait) if wait else None,
            id=f"{self._prefix}{next(self._counter):x}",
        )


# --- the sidecar's name ---------------------------------------------------------------------


_IDENTITY_SECONDS = 5.0
"""Seconds that opening waits for the sidecar's name, without which a crawl can begin."""


async def identity_of(connection: SidecarConnection) -> str | None:
    """Return the sidecar's own user agent. None if it is unreachable or does not return one."""
    try:
        answer = await connection.request("GET", "/healthz", timeout=_IDENTITY_SECONDS)
        return read(answer, wire.Alive).user_agent
    except (SidecarUnreachable, errors.GatekeeperError) as error:
        _log.info("the sidecar did not return its name: %s", error)
        return None


# --- statistics -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """Counters and gauges of a client. The counters run since it was made."""

    asked: int
    """Questions that the client was asked."""
    remembered: int
    """Questions answered from the client's cache."""
    unanswered: int
    """Questions answered by the fail mode, as the sidecar was unreachable."""
    batches: int
    """Batches of questions sent."""
    urls: int
    """URLs sent in those batches."""
    requests: int
    """HTTP requests sent, of every kind, including retries."""
    repeated: int
    """Requests that were retries."""
    failures: int
    """Requests that got no response."""
    granted: int
    """Leases granted."""
    held: int
    """Leases held now."""
    told: int
    """Reports, renewals and returns of leases that the sidecar received."""
    untold: int
    """Reports, renewals and returns that are being sent or wait."""
    dropped: int
    """Reports, renewals and returns that were given up; the sidecar lets those leases expire, as
    used."""
    kept: int
    """Decisions cached now."""
    reachable: bool
    """False from the time at which a question was given up until the next response."""


# --- the robots.txt, sent by the sidecar and parsed here ------------------------------------


_THREAD_SIZE = 65_536
"""Characters above which a text is parsed in a thread."""


async def robots_of(explanation: wire.Explanation, settings: RobotsConfig) -> RobotsTxt | None:
    """Parse the file of an explanation; None if there is no text."""
    text = explanation.robots_txt
    if text is None:
        return None
    size = max(512_000, len(text) * 4)  # no further limit: the sidecar applied its own
    if len(text) < _THREAD_SIZE:
        return RobotsTxt.parse(text, dialect=settings.dialect, limit=size)
    return await asyncio.to_thread(RobotsTxt.parse, text, dialect=settings.dialect, limit=size)


# --- names of agents ------------------------------------------------------------------------


_MAX_AGENT = 512
"""The most characters of a User-Agent that a sidecar accepts."""


def check_agent(user_agent: str) -> str:
    """Return the product token of a name. Raises ConfigError if it has none or is too long."""
    token = token_of(user_agent)
    if len(user_agent) > _MAX_AGENT:
        raise errors.ConfigError(
            f"user agent {user_agent[:_MAX_AGENT]!r} is longer than {_MAX_AGENT} characters"
        )
    return token
