"""`RemoteGatekeeper`: the methods of `Gatekeeper`, answered by a sidecar.

What a client promises beyond passing questions on:

fail closed   a sidecar that can't be asked gives DEFER, reason gate_unreachable
batches       checks asked in one turn of the loop travel in one request
memory        a decision is repeated while it holds: see `gatekeeper.remote.questions`
retries       questions are put again for `patience` seconds, reports for ten minutes
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
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self
from urllib.parse import quote

from aiohttp import ClientMiddlewareType

from gatekeeper import urls
from gatekeeper.clock import Clock, SystemClock, moment_named, utc
from gatekeeper.config import (
    Config,
    RobotsConfig,
    agent_named,
    as_config,
    host_named,
    refuse_everybody,
    token_of,
)
from gatekeeper.deadlock import WaitGraph
from gatekeeper.decision import Decision, NotYet, Reason, Verdict
from gatekeeper.errors import ConfigError, GateClosed, GatekeeperError, InvalidURL, SidecarError
from gatekeeper.middleware import gate_middleware, refuse_one_text
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.remote.connection import (
    Outbox,
    OwnedTasks,
    SidecarConnection,
    SidecarResponse,
    SidecarUnreachable,
    read,
)
from gatekeeper.remote.leases import RemoteLease, RemoteLeaseRequest, RemoteLeases
from gatekeeper.remote.questions import Question, Questions, RememberedDecisions
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.wire import Alive, BlockBody, Explanation, HostBody, RefreshBody, encode

__all__ = [
    "RemoteGatekeeper",
    "RemoteStats",
    "check_agent",
    "identity_of",
    "policy_of",
    "robots_of",
]

_log = logging.getLogger(__name__)


_ASK_AGAIN = 5.0
"""Seconds after which a sidecar that could not be asked may be asked again."""
_AFTER_AN_ERROR = 60.0
"""The same for a URL whose question met an error of this client's."""
_FAREWELL = 5.0
"""Seconds that closing waits for the last reports."""
_WINDOW = 1000
"""URLs that `check_many` reads ahead of the one it answers."""


def _check(fail: str, user_agent: str | None) -> None:
    if fail not in ("closed", "open"):
        raise ConfigError(f'fail={fail!r}: "closed" defers, "open" allows; nothing else')
    if user_agent is not None:
        agent_named(user_agent)
        check_agent(user_agent)  # how long it may be


class RemoteGatekeeper:
    """A gate in another process: `Gatekeeper`'s methods, over TCP or a unix socket.

    `where` is `"http://127.0.0.1:8750"`, `"https://..."` (with `ssl` for a context of your
    own) or `"unix:/run/gatekeeper/gatekeeper.sock"`; `token` the sidecar's bearer token.
    `user_agent` is the whole User-Agent header, or a product token, as of `Gatekeeper`: it goes
    with every question and lease, and its token chooses the group in robots.txt. Without one
    the sidecar's own identity does, which `gate.user_agent` tells once the gate is open. Of
    `config` only `[robots]` matters, for `robots` and `policy`, and `pacing.own_wait`.

    `fail` says what `allowed` and `check` answer while the sidecar can't be asked: "closed"
    defers, "open" allows; the decision's reason is gate_unreachable. A lease needs the
    sidecar whatever `fail` says: nobody else knows whose turn it is.

    `patience`: seconds for which an unanswered question is put again. `timeout`: seconds in
    which one answer must come; the sidecar may have to fetch a robots.txt, and wait for its
    turn, first. `poll`: seconds that one request for a lease waits in the sidecar, fewer
    where its server.max_wait is less; `most_polls` how many may wait at once. `remember`: for
    how many seconds at most a decision is repeated, `remember_most` how many are kept (0: none).

    A `PoliteQueue` works over it as over a gate of this process.

    A task that would wait for what it holds, alone or in a circle of this client's tasks (in the
    `get` of a `PoliteQueue`, too), gets LeaseTimeout at once, and the child of one that holds the
    host after `pacing.own_wait`. The client goes by its own leases and one slot a host: it knows
    nothing of a circle through clocks that hosts share, through another client, or through where a
    robots.txt is redirected.

    Raises ConfigError for an address, token or name that can't be used. Every method raises
    SidecarError where the sidecar refuses the client (a wrong token, say).

    >>> async def main() -> None:
    ...     where = "unix:/run/gatekeeper/gatekeeper.sock"
    ...     async with RemoteGatekeeper(where, "examplebot/1.0 (+https://example.org)") as gate:
    ...         if await gate.allowed("https://example.org/page"):
    ...             async with gate.lease("https://example.org/page") as lease:
    ...                 ...  # fetch it now
    ...                 lease.report(status=200)
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
        timeout: float = 90.0,
        poll: float = 240.0,
        most_polls: int = 1000,
        remember: float = 60.0,
        remember_most: int = 10_000,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        _check(fail, user_agent)
        self._name = user_agent
        self._sidecars_name: str | None = None
        self.config: Config = as_config(config)
        self._fail = fail
        self._clock = clock or SystemClock()
        rng = rng or random.Random()
        times = {"patience": patience, "timeout": timeout}
        self._connection = SidecarConnection(
            where, token=token, context=ssl, clock=self._clock, rng=rng, **times
        )
        self._tasks = OwnedTasks()
        self._answers = RememberedDecisions(self._clock, size=remember_most, cap=remember)
        self._questions = Questions(
            self._connection,
            self._answers,
            self._tasks,
            self._unanswered_question,
            self._clock,
        )
        self._outbox = Outbox(self._connection, self._clock, rng)
        self._leases = RemoteLeases(
            self._connection,
            self._outbox,
            self._tasks,
            self._deferral,
            own_wait=self.config.pacing.own_wait,
            poll=poll,
            most_polls=most_polls,
            patience=patience,
            clock=self._clock,
            rng=rng,
        )
        self._middleware = gate_middleware(self)
        self._prefix = f"client-{secrets.token_hex(4)}-"
        self._counter = itertools.count(1)
        self._open = self._closed = False
        self._asked = self._remembered = self._unanswered = 0

    def __repr__(self) -> str:
        return f"<RemoteGatekeeper {self._connection!r} {'open' if self._open else 'shut'}>"

    # -- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._open or self._closed:
            raise GateClosed("this gate was opened already; make another one")
        await self._connection.open()
        try:
            if self._name is None:
                self._sidecars_name = await identity_of(self._connection)
        except BaseException:
            await self._connection.close()
            raise
        self._open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        """Tell the last reports, five seconds at most; what still waits gets GateClosed."""
        self._open, self._closed = False, True
        try:
            await self._tasks.close()
            self._questions.close()
            self._leases.held.end_all()
            self._leases.waits.close()
            await self._outbox.close(_FAREWELL)
        finally:
            await self._connection.close()

    @property
    def user_agent(self) -> str | None:
        """The name whose rules apply where a question names no other.

        As it was given, or else the sidecar's own, read when the gate opens: None before, and
        where the sidecar could not be asked then.
        """
        return self._name or self._sidecars_name

    # -- questions -------------------------------------------------------------------

    async def allowed(self, url: str, *, user_agent: str | None = None) -> bool:
        """Whether the URL may be fetched now. Raises InvalidURL."""
        origin, _ = urls.split(url)
        found = self._ask(url, origin, self._name if user_agent is None else user_agent)
        decision = found if isinstance(found, Decision) else await found
        if decision.reason is Reason.INVALID_URL:
            raise _invalid(url, decision)
        return decision.verdict is Verdict.ALLOW

    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """Whether the URL may be fetched now, and why. Raises InvalidURL.

        Those asked in one turn of the loop travel together, without a wait.
        """
        origin, _ = urls.split(url)
        found = self._ask(url, origin, self._name if user_agent is None else user_agent)
        decision = found if isinstance(found, Decision) else await found
        if decision.reason is Reason.INVALID_URL:
            raise _invalid(url, decision)
        return decision

    async def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncIterator[Decision]:
        """Decisions in the order of the URLs; origins are asked in parallel.

        Text that is no URL gives DENY with reason invalid_url, so that nothing is lost.
        """
        refuse_one_text(urls)
        agent = self._name if user_agent is None else user_agent
        waiting = iter(urls)
        window: deque[Decision | asyncio.Future[Decision]] = deque()
        try:
            while True:
                if len(window) < _WINDOW // 2:
                    for raw in itertools.islice(waiting, _WINDOW - len(window)):
                        window.append(self._ask_any(raw, agent))
                    if not window:
                        return
                found = window.popleft()
                yield found if isinstance(found, Decision) else await found
        finally:
            _abandon(window)

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        """What `check_many` gives, as a list."""
        return [decision async for decision in self.check_many(urls, user_agent=user_agent)]

    def peek(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The decision if this client remembers it; never asks. Raises InvalidURL."""
        urls.split(url)
        if user_agent is not None:
            check_agent(user_agent)
        return self._answers.find((url, self._name if user_agent is None else user_agent))

    # -- files and hosts: SidecarError where the sidecar can't be asked, as no fail mode has
    # an answer to give here

    async def robots(self, url: str) -> RobotsTxt | None:
        """The robots.txt that speaks for the URL's origin; None where there is none to read.

        The text is the sidecar's, read here. None too where guard or operator decide.
        Raises InvalidURL.
        """
        return await robots_of(await self._explain(url, None), self.config.robots)

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """The file as it reads for the agent. Raises InvalidURL.

        Where there is no file it allows everything, where it can't be had nothing; where
        the operator decides, what he says.
        """
        agent = self._name if user_agent is None else user_agent
        told = await self._explain(url, agent)
        robots = await robots_of(told, self.config.robots)
        return policy_of(told, robots, agent or told.decision.user_agent, self.config.robots)

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for others.
        """
        answer = await self._must("GET", f"/v1/hosts/{_segment(host)}")
        return read(answer, HostBody).clocks

    async def refresh(self, origin: str) -> None:
        """Ask the origin (or the origin of that URL) again now. Raises InvalidURL.

        Where the host's turn is far off it returns before, and the sidecar goes on.
        """
        target = urls.parse(origin)
        await self._control(target.host, "refresh", encode(RefreshBody(origin=target.origin)))
        self._answers.forget()

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """See `Gatekeeper.block`."""
        moment = utc(moment_named(host, until))
        await self._control(host, "block", encode(BlockBody(until=moment, reason=reason)))

    async def pause(self, host: str) -> None:
        """No turns for the host until `resume`."""
        await self._control(host, "pause", b"{}")

    async def resume(self, host: str) -> None:
        """Turns again; lifts a pause, not a block."""
        await self._control(host, "resume", b"{}")

    # -- turns -----------------------------------------------------------------------

    def lease(
        self,
        url: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        user_agent: str | None = None,
    ) -> RemoteLeaseRequest:
        """The right to send one request, once the host's turn has come.

        `async with gate.lease(url) as lease:`. Priorities from -1000 to 1000 are told apart.
        Entering raises InvalidURL, Denied, Deferred (also where the sidecar can't be asked),
        or LeaseTimeout.
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
        """A lease that ends by `lease.end()`, for those to whom a block does not fit.

        `owned=False`: it outlives the task that asks for it. Raises as `lease` does.
        """
        self._admit(user_agent)
        refuse_everybody(user_agent)
        return await self._leases.acquire(
            url,
            priority=priority,
            timeout=timeout,
            user_agent=self._name if user_agent is None else user_agent,
            owned=owned,
        )

    async def try_acquire(
        self, url: str, *, priority: int = 0, user_agent: str | None = None, owned: bool = True
    ) -> RemoteLease | NotYet:
        """The lease if it can be had now: one round trip. See `Gatekeeper.try_acquire`.

        A sidecar that can't be asked gives NotYet, its `why` gate_unreachable.
        """
        self._admit(user_agent)
        refuse_everybody(user_agent)
        agent = self._name if user_agent is None else user_agent
        return await self._leases.attempt(url, priority=priority, user_agent=agent, owned=owned)

    at_a_glance = False
    """For a `PoliteQueue`: whose turn it is, the sidecar has to be asked."""

    async def look(self, url: str, *, priority: int = 0) -> RemoteLease:
        """The lease, if its turn is now, in one round trip; it belongs to no task yet.

        What a `PoliteQueue` asks. Raises as `acquire` does; LeaseTimeout says in `retry_at`
        from when on it is worth while to ask again.
        """
        self._admit(None)
        return await self._leases.look(url, priority=priority, user_agent=self._name)

    @property
    def waits(self) -> WaitGraph[RemoteLease]:
        """Who of this client waits and holds what. For a `PoliteQueue`."""
        return self._leases.waits

    @property
    def clock(self) -> Clock:
        """Where it reads the time."""
        return self._clock

    @property
    def middleware(self) -> ClientMiddlewareType:
        """For `aiohttp.ClientSession(middlewares=(gate.middleware,))`; put it last."""
        return self._middleware

    def stats(self) -> RemoteStats:
        """Counters and gauges of this client, at this moment."""
        return RemoteStats(
            asked=self._asked,
            remembered=self._remembered,
            unanswered=self._unanswered,
            batches=self._questions.batches,
            urls=self._questions.urls,
            requests=self._connection.requests,
            repeated=self._connection.repeated,
            failures=self._connection.failures,
            granted=self._leases.granted,
            held=len(self._leases.held),
            told=self._outbox.told,
            untold=len(self._outbox),
            dropped=self._outbox.dropped,
            kept=len(self._answers),
            reachable=not self._connection.down,
        )

    @property
    def ready(self) -> bool:
        """Open, and the sidecar answered when it was asked last."""
        return self._open and not self._connection.down

    # -- inside ----------------------------------------------------------------------

    def _admit(self, user_agent: str | None) -> None:
        """Raise unless a question can be put, for that agent."""
        if not self._open:
            raise GateClosed("open the gate first: async with RemoteGatekeeper(...) as gate")
        if user_agent is not None:
            check_agent(user_agent)

    async def _explain(self, url: str, agent: str | None) -> Explanation:
        # The question is about "/": of /robots.txt itself nothing could be learnt (RFC 9309
        # section 2.2.2, RFC-20).
        query = f"url={quote(urls.parse(url).origin + '/', safe='')}"
        if agent is not None:
            check_agent(agent)
            query += f"&user_agent={quote(agent, safe='')}"
        return read(await self._must("GET", f"/v1/explain?{query}", agent=agent), Explanation)

    async def _control(self, host: str, action: str, body: bytes) -> None:
        answer = await self._must("POST", f"/v1/hosts/{_segment(host)}/{action}", body)
        read(answer, HostBody)

    async def _must(
        self, method: str, path: str, body: bytes | None = None, *, agent: str | None = None
    ) -> SidecarResponse:
        """An answer, whatever it says. Raises SidecarError where none comes."""
        self._admit(agent)
        try:
            return await self._connection.ask(method, path, body)
        except SidecarUnreachable as error:
            raise SidecarError(503, "unreachable", str(error)) from None

    def _ask_any(self, raw: str, agent: str | None) -> Decision | asyncio.Future[Decision]:
        """As `_ask`; text that is no URL gets its DENY here."""
        try:
            origin, _ = urls.split(raw)
        except InvalidURL as error:
            self._admit(agent)
            return self._decision(Verdict.DENY, Reason.INVALID_URL, raw, "", agent, error.problem)
        except Exception as error:
            if not isinstance(raw, str):
                raise
            # One URL's error is not its batch's.
            _log.exception("%s can't be asked about", urls.mask(raw, query=False))
            note = f"an error of this client's ({type(error).__name__}); its log says more"
            return self._decision(
                Verdict.DEFER, Reason.INTERNAL, raw, "", agent, note, _AFTER_AN_ERROR
            )
        return self._ask(raw, origin, agent)

    def _ask(self, url: str, origin: str, agent: str | None) -> Decision | asyncio.Future[Decision]:
        """The decision, or the future that will hold it; cancel it to want it no more."""
        self._asked += 1
        key = (url, agent)
        try:
            found = self._answers.find(key)
        except TypeError:  # an agent that is no text
            self._admit(agent)
            raise
        if found is not None:
            self._remembered += 1
            return found
        self._admit(agent)
        return self._questions.ask(key, origin)

    def _unanswered_question(self, question: Question, detail: str) -> Decision:
        """The fail mode: DEFER, or ALLOW where the word for it was given."""
        url, agent = question.key
        if self._fail != "open":
            return self._deferral(url, question.origin, agent, detail)
        self._unanswered += 1
        reason, note = Reason.GATE_UNREACHABLE, f"let through unasked (fail open): {detail}"
        return self._decision(Verdict.ALLOW, reason, url, question.origin, agent, note)

    def _deferral(self, url: str, origin: str, agent: str | None, detail: str) -> Decision:
        self._unanswered += 1
        reason, note = Reason.GATE_UNREACHABLE, f"the sidecar can't be asked: {detail}"
        return self._decision(Verdict.DEFER, reason, url, origin, agent, note, _ASK_AGAIN)

    def _decision(
        self,
        verdict: Verdict,
        reason: Reason,
        url: str,
        origin: str,
        agent: str | None,
        note: str,
        wait: float | None = None,
    ) -> Decision:
        """One of this client's own; `wait`: seconds after which to ask again."""
        return Decision(
            verdict=verdict,
            reason=reason,
            url=urls.mask(url) if "@" in url or not origin else url,
            origin=origin,
            user_agent=check_agent(named) if (named := agent or self.user_agent) else "",
            note=note,
            retry_at=None if wait is None else utc(self._clock.wall() + wait),
            id=f"{self._prefix}{next(self._counter):x}",
        )


def _invalid(url: str, decision: Decision) -> InvalidURL:
    # The sidecar reads URLs more strictly than this client, being of another version.
    return InvalidURL(urls.mask(url), decision.note or "no URL by the sidecar's word")


def _abandon(window: Iterable[Decision | asyncio.Future[Decision]]) -> None:
    """Want those answers no more, and let no error among them go unseen by accident."""
    for found in window:
        if not isinstance(found, Decision) and not found.cancel() and not found.cancelled():
            found.exception()


# --- What is asked of a sidecar one by one: files, clocks, and the operator's hand on hosts.


_IDENTITY = 5.0
"""Seconds in which a sidecar must say who it is: a crawl may begin without that."""


async def identity_of(connection: SidecarConnection) -> str | None:
    """The name under which a sidecar asks; None where it can't be asked, or doesn't say."""
    try:
        answer = await connection.request("GET", "/healthz", timeout=_IDENTITY)
        return read(answer, Alive).user_agent
    except (SidecarUnreachable, GatekeeperError) as error:
        _log.info("the sidecar does not say who it is: %s", error)
        return None


def _segment(host: str) -> str:
    return quote(host_named(host), safe="")


# --- `RemoteStats`: what a client counts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """What a client counts. All counters run since it was made."""

    asked: int
    """Questions put to the client."""
    remembered: int
    """... answered without the sidecar."""
    unanswered: int
    """... for which the sidecar could not be asked: the fail mode answered."""
    batches: int
    urls: int
    """URLs sent in those batches."""
    requests: int
    """Attempts of every kind; `failures` of them got no answer."""
    repeated: int
    failures: int
    granted: int
    held: int
    """Leases held at this moment."""
    told: int
    """Reports, renewals and returns that the sidecar heard."""
    untold: int
    """... that are under way or wait."""
    dropped: int
    """... that were given up; the sidecar ends those leases by itself, as used."""
    kept: int
    """Decisions remembered at this moment."""
    reachable: bool
    """False from the moment a question was given up until an answer comes."""


# --- The robots.txt itself, as a sidecar tells of it, read here.


_LARGE = 65_536
"""Characters above which a text is read beside the loop."""


async def robots_of(told: Explanation, reading: RobotsConfig) -> RobotsTxt | None:
    """The file, parsed; None where there is none to read."""
    text = told.robots_txt
    if text is None:
        return None
    size = max(512_000, len(text) * 4)  # the sidecar has cut it already
    if len(text) < _LARGE:
        return RobotsTxt.parse(text, dialect=reading.dialect, limit=size)
    return await asyncio.to_thread(RobotsTxt.parse, text, dialect=reading.dialect, limit=size)


def policy_of(
    told: Explanation, robots: RobotsTxt | None, agent: str, reading: RobotsConfig
) -> Policy:
    """The file as it reads for the agent, or what stands for one that can't be read.

    Everything is allowed where there is no file (RFC 9309 section 2.3.1.3, RFC-36) or the operator
    says so, nothing where it can't be had (section 2.3.1.4, RFC-37) or the guard refuses.
    """
    if robots is None:
        welcome = told.decision.verdict is Verdict.ALLOW
        robots = RobotsTxt.parse("" if welcome else "User-agent: *\nDisallow: /\n")
    return robots.policy(
        agent,
        conflicts=reading.conflicts,
        v2_semantics=reading.v2_semantics,
        inherit_crawl_delay=reading.inherit_crawl_delay,
    )


# --- Names that agents give themselves, judged before they are sent.


_LONGEST = 512


def check_agent(user_agent: str) -> str:
    """The product token. Raises ConfigError for a name that holds none, or is too long."""
    token = token_of(user_agent)
    if len(user_agent) > _LONGEST:
        raise ConfigError(
            f"user agent {user_agent[:_LONGEST]!r} is longer than {_LONGEST} characters"
        )
    return token
