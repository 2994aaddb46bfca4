"""`ShardedLedger`: a fleet's ledger distributed over the servers of a Valkey Cluster.

A hash of its name assigns each scope to one of `SHARDS` shards. A shard is a separate `RedisLedger`
with its own hash tag, epoch, members and messages, so every script accesses one slot only. A
request acquires its scopes shard by shard. If one of them can't be acquired, the scopes acquired
before it are released as if they had not been taken. This can only slow requests: see
docs/fleet.md.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from gatekeeper.clock import Clock
from gatekeeper.config import CacheConfig, FleetConfig
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.outcomes import Retrieval, RobotsSource, Validators
from gatekeeper.fleet.overrides import FleetOverrides
from gatekeeper.fleet.redis_ledger import RedisLedger, SharedLog
from gatekeeper.pacing.ledger import (
    End,
    FleetStats,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    ScopeClock,
    ScopeView,
    TakeRequest,
    Withheld,
)

SHARDS = 16
"""Number of hash tags. Each costs every member two connections and a heartbeat."""
_WORST_FIRST = ("lost", "recovering", "connected")

_T = TypeVar("_T")
_R = TypeVar("_R")


class ShardedLedger:
    """A `Ledger` on a Valkey or Redis Cluster, or on one server. Use it like `RedisLedger`."""

    def __init__(
        self,
        url: str,
        *,
        shards: int = SHARDS,
        namespace: str = "gatekeeper",
        clock: Clock | None = None,
        config: FleetConfig | None = None,
    ) -> None:
        """`shards` must be the same number on each member. Raises ConfigError."""
        config = replace(config or FleetConfig(), sharded=True)
        make = partial(RedisLedger, url, clock=clock, config=config, shared_log=SharedLog())
        first, *others = shard_namespaces(namespace, shards)
        self.shards: list[RedisLedger] = [make(namespace=first)]
        self.config: FleetConfig = config
        self.member: str = self.shards[0].member
        self.shards += [make(namespace=name, member=self.member) for name in others]
        self.overrides: FleetOverrides = self.shards[0].overrides
        self.lost_shards: set[int] = set()
        """Numbers of the shards that can't be reached."""
        self._shards_of_token: dict[str, dict[int, None]] = {}
        """By token, the shards that may know it, the host's first (a dictionary as ordered set)."""

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Notify `listener` of events about the tokens of `owner`, and of those about everyone."""
        for number, shard in enumerate(self.shards):
            shard.listen(owner, _ShardListener(self, number, listener))

    async def open(self) -> None:
        """Open every shard's ledger. Raises ConfigError."""
        await _gather(shard.open() for shard in self.shards)

    async def close(self) -> None:
        """Leave the fleet on every shard."""
        await _gather(shard.close() for shard in self.shards)

    async def __aenter__(self) -> ShardedLedger:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def state(self) -> str:
        """The state of the worst shard: `connected`, `lost` or `recovering`."""
        return min((shard.state for shard in self.shards), key=_WORST_FIRST.index)

    @property
    def recovery(self) -> str:
        """For what a shard waits, and how long, after its store lost its data; or empty."""
        return next((one.recovery for one in self.shards if one.recovery), "")

    @property
    def ready(self) -> bool:
        """Whether leases can be granted on every shard."""
        return all(shard.ready for shard in self.shards)

    @property
    def hearing(self) -> bool:
        """Whether notifications of other members arrive from every shard."""
        return all(shard.hearing for shard in self.shards)

    def stats(self) -> FleetStats:
        """Return sums over the shards; state and members are those of the worst shard."""
        every = [shard.stats() for shard in self.shards]
        counters = ("calls", "requests", "failures", "epochs")
        return replace(
            every[0],
            state=self.state,
            members=min(one.members for one in every),
            dividing=any(one.dividing for one in every),
            recovery=self.recovery,
            **{name: sum(getattr(one, name) for one in every) for name in counters},
        )

    def sharing(
        self, fetcher: RobotsSource, cache: CacheConfig, files: Callable[[], Directory | None]
    ) -> RobotsSource:
        """See `RedisLedger.sharing`. A file is stored on the shard of its origin."""

        def source(number: int, shard: RedisLedger) -> RobotsSource:
            return shard.sharing(fetcher, cache, files, lambda one: self.shard_of(one) == number)

        return _ShardedSource([source(*one) for one in enumerate(self.shards)])

    def shard_of(self, scope: str) -> int:
        """Return the number of the shard that a scope belongs to."""
        return _shard(scope, len(self.shards))

    # --- the Ledger protocol ----------------------------------------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request all of its scopes, one shard after the other, or return when to ask
        again. Raises LedgerLost; a repeated call with the same tokens continues where this one
        stopped."""
        answers: dict[str, Granted | NotBefore] = {}
        waiting = {request.token: self._by_shard(request) for request in requests}
        taken: dict[str, list[int]] = {token: [] for token in waiting}
        while any(waiting.values()):
            calls: dict[int, list[TakeRequest]] = {}
            for parts in waiting.values():
                if parts:
                    number, part = parts.pop(0)
                    calls.setdefault(number, []).append(part)
                    self._shards_of_token.setdefault(part.token, {})[number] = None
            found = await _gather(self.shards[number].take(asks) for number, asks in calls.items())
            for (number, asks), told in zip(calls.items(), found, strict=True):
                for part, answer in zip(asks, told, strict=True):
                    token = part.token
                    answers[token] = _combined(answers.get(token), answer)
                    if isinstance(answer, Granted):
                        taken[token].append(number)
                    else:
                        waiting[token] = []
        given_up: dict[int, list[End]] = {}
        for token, told_last in answers.items():
            if isinstance(told_last, NotBefore):
                for number in taken[token]:
                    given_up.setdefault(number, []).append(End(token, "undone"))
        await _gather(self.shards[number].end(ends) for number, ends in given_up.items())
        return [answers[request.token] for request in requests]

    async def head(self, tokens: Sequence[str]) -> None:
        """Note that the response heads have arrived."""
        parts = self._split(tokens, lambda token: self._shards_of_token.get(token, ()))
        await _gather(self.shards[number].head(part) for number, part in parts.items())

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots. The reports take effect first, so that no request starts in between."""
        await self.block(list(dict.fromkeys(one for end in ends for one in end.reports)))
        parts: dict[int, list[End]] = {}
        for token, outcome, _, size in ends:
            for place, number in enumerate(self._shards_of_token.get(token, ())):
                told = 0 if place else size  # only the host's scope counts bytes
                parts.setdefault(number, []).append(End(token, outcome, (), told))
        await _gather(self.shards[number].end(part) for number, part in parts.items())
        for end in ends:
            self._shards_of_token.pop(end.token, None)

    async def renew(self, tokens: Sequence[str]) -> None:
        """Extend the holds by a full time to live from now."""
        parts = self._split(tokens, lambda token: self._shards_of_token.get(token, ()))
        await _gather(self.shards[number].renew(part) for number, part in parts.items())

    async def block(self, reports: Sequence[Report]) -> None:
        """Apply reports and notify every member of them."""
        parts = self._split(reports, lambda report: (self.shard_of(report.scope),))
        await _gather(self.shards[number].block(part) for number, part in parts.items())

    async def pause(self, scopes: Sequence[str]) -> None:
        """Grant no request of these scopes to any member until `resume`."""
        parts = self._split(scopes, lambda scope: (self.shard_of(scope),))
        await _gather(self.shards[number].pause(part) for number, part in parts.items())

    async def resume(self, scopes: Sequence[str]) -> None:
        """Grant requests of these scopes again."""
        parts = self._split(scopes, lambda scope: (self.shard_of(scope),))
        await _gather(self.shards[number].resume(part) for number, part in parts.items())

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """Return what is known of each scope and which members hold it. Raises LedgerLost."""
        found = await _gather(self.shards[self.shard_of(scope)].look([scope]) for scope in scopes)
        return [view for views in found for view in views]

    def withheld(self, scopes: Sequence[str], interval: float) -> Withheld | None:
        """See `Ledger`: what keeps the request from one of its shards for the longest."""
        parts = self._split(scopes, lambda scope: (self.shard_of(scope),))
        found = (self.shards[number].withheld(part, interval) for number, part in parts.items())
        return max(filter(None, found), default=None)

    # --- internals --------------------------------------------------------------------------

    def _by_shard(self, request: TakeRequest) -> list[tuple[int, TakeRequest]]:
        """Split a request by shard, the host's shard first."""
        found: dict[int, TakeRequest] = {}
        for one in request.scopes:
            number = self.shard_of(one.scope)
            scopes = (*found[number].scopes, one) if number in found else (one,)
            found[number] = TakeRequest(request.token, scopes)
        return list(found.items())

    def _split(
        self, things: Iterable[_T], shards_of: Callable[[_T], Iterable[int]]
    ) -> dict[int, list[_T]]:
        parts: dict[int, list[_T]] = {}
        for one in things:
            for number in shards_of(one):
                parts.setdefault(number, []).append(one)
        return parts


class _ShardListener:
    """Listener of one shard: it forwards notifications as a single ledger would send them."""

    def __init__(self, ledger: ShardedLedger, number: int, listener: LedgerListener) -> None:
        self._ledger = ledger
        self._number = number
        self._listener = listener
        self.opened = listener.opened
        self.blocked = listener.blocked
        self.paused = listener.paused

    def lost(self, lost: bool) -> None:
        """Report the ledger as lost while any shard is: a host may belong to the lost shard."""
        shards = self._ledger.lost_shards
        (shards.add if lost else shards.discard)(self._number)
        if lost or not shards:
            self._listener.lost(lost)

    def clocks(self) -> list[ScopeClock]:
        """Return the clocks of this shard, and the nameless one that says that there are more."""
        mine, every = self._ledger.shard_of, self._listener.clocks()
        return [one for one in every if not one.scope or mine(one.scope) == self._number]


class _ShardedSource:
    """A source of robots.txt files that uses the source of the origin's shard."""

    def __init__(self, sources: list[RobotsSource]) -> None:
        self._sources = sources

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """See `SharedFetcher.fetch`."""
        return await self._of(origin).fetch(origin, validators)

    async def reach(self, origin: str) -> bool | None:
        """Return whether the origin accepts a new connection, or None if that can't be tested."""
        return await self._of(origin).reach(origin)

    def _of(self, origin: str) -> RobotsSource:
        return self._sources[_shard(origin, len(self._sources))]


def shard_namespaces(namespace: str, shards: int = SHARDS) -> list[str]:
    """Return the namespace of each shard."""
    return [f"{namespace}.{number}" for number in range(shards)]


def _shard(name: str, shards: int) -> int:
    return zlib.crc32(name.encode()) % shards


def _combined(
    before: Granted | NotBefore | None, answer: Granted | NotBefore
) -> Granted | NotBefore:
    """Combine the answer of one shard with that of the shards before it."""
    if isinstance(before, Granted) and isinstance(answer, Granted):
        seconds = min(before.seconds, answer.seconds)
        return Granted(answer.token, seconds, (*before.clocks, *answer.clocks))
    return answer


async def _gather(calls: Iterable[Awaitable[_R]]) -> list[_R]:
    """Return all results once every call is done; raise the first error then."""
    found: list[_R] = []
    for one in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
