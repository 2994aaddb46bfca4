"""`ShardedLedger`: a fleet's ledger spread over the servers of a Valkey Cluster.

Each scope belongs to one of `SHARDS` shards by its name. A shard is a `RedisLedger` of its own,
with its hash tag, epoch, members and messages, so that every script touches one slot. A request
takes its scopes one after the other, each start not before the last; where one is closed those
that it had are given up as if they had not been taken. That can only slow: see docs/fleet.md.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import CacheConfig, FleetConfig
from gatekeeper.fetching.outcomes import Retrieval, RobotsSource, Validators
from gatekeeper.fleet.ledger import FleetStats, RedisLedger, SharedNews
from gatekeeper.fleet.overrides import FleetOverrides
from gatekeeper.pacing.ledger import (
    End,
    Granted,
    LedgerListener,
    NotBefore,
    Report,
    ScopeClock,
    ScopeView,
    TakeRequest,
)

SHARDS = 16
"""Hash tags over which the scopes are spread. Each costs a member two connections and a beat."""
_WORST = ("lost", "recovering", "connected")

_T = TypeVar("_T")
_R = TypeVar("_R")


class ShardedLedger:
    """A `Ledger` on a Valkey or Redis Cluster, or on one server. It is used as `RedisLedger` is."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "gatekeeper",
        clock: Clock | None = None,
        config: FleetConfig | None = None,
        shards: int = SHARDS,
    ) -> None:
        """`shards`: the same number in each member. Raises ConfigError."""
        config = replace(config or FleetConfig(), sharded=True)
        clock = clock or SystemClock()
        self.shards: list[RedisLedger] = []
        news = SharedNews()
        for number in range(shards):
            self.shards.append(
                RedisLedger(
                    url,
                    namespace=f"{namespace}.{number}",
                    clock=clock,
                    config=config,
                    member=self.shards[0].member if number else None,
                    news=news,
                )
            )
        self.config: FleetConfig = config
        self.member: str = self.shards[0].member
        self.overrides: FleetOverrides = self.shards[0].overrides
        self._lost: set[int] = set()
        """Shards that can't be reached."""
        self._asked: dict[str, dict[int, None]] = {}
        """Shards that may know of a token, the host's first."""

    async def open(self) -> None:
        """Join every shard. Raises ConfigError."""
        await _all(shard.open() for shard in self.shards)

    async def close(self) -> None:
        """Sign off everywhere."""
        await _all(shard.close() for shard in self.shards)

    async def __aenter__(self) -> ShardedLedger:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def listen(self, owner: str, listener: LedgerListener) -> None:
        """Tell what concerns the tokens of that owner, and everybody."""
        for number, shard in enumerate(self.shards):
            shard.listen(owner, _ShardListener(self, number, listener))

    @property
    def state(self) -> str:
        """That of the worst shard: connected, lost or recovering."""
        return min((shard.state for shard in self.shards), key=_WORST.index)

    @property
    def ready(self) -> bool:
        """Can leases be granted?"""
        return all(shard.ready for shard in self.shards)

    @property
    def hearing(self) -> bool:
        """Are we told of what others do?"""
        return all(shard.hearing for shard in self.shards)

    def stats(self) -> FleetStats:
        """Sums over the shards; the state and the members are those of the worst."""
        every = [shard.stats() for shard in self.shards]
        return FleetStats(
            state=self.state,
            members=min(one.members for one in every),
            member=self.member,
            calls=sum(one.calls for one in every),
            requests=sum(one.requests for one in every),
            failures=sum(one.failures for one in every),
            epochs=sum(one.epochs for one in every),
            dividing=any(one.dividing for one in every),
        )

    def sharing(
        self, fetcher: RobotsSource, cache: CacheConfig, renew: Callable[[str], object]
    ) -> RobotsSource:
        """See `RedisLedger.sharing`; each file lies in the shard of its origin."""
        return _ShardedTexts([shard.sharing(fetcher, cache, renew) for shard in self.shards])

    def shard_of(self, scope: str) -> int:
        """The number of the shard to which a scope belongs."""
        return _shard(scope, len(self.shards))

    # --- what a ledger does -----------------------------------------------------------------

    async def take(self, requests: Sequence[TakeRequest]) -> list[Granted | NotBefore]:
        """Grant each request all of its scopes, one shard after the other, or say when to ask
        again. Raises LedgerLost; asked again under the same tokens it goes on."""
        answers: dict[str, Granted | NotBefore] = {}
        waiting = {request.token: self._by_shard(request) for request in requests}
        taken: dict[str, list[int]] = {token: [] for token in waiting}
        while any(waiting.values()):
            calls: dict[int, list[TakeRequest]] = {}
            for parts in waiting.values():
                if parts:
                    number, part = parts.pop(0)
                    calls.setdefault(number, []).append(part)
                    self._asked.setdefault(part.token, {})[number] = None
            found = await _all(self.shards[number].take(asks) for number, asks in calls.items())
            for (number, asks), told in zip(calls.items(), found, strict=True):
                for part, answer in zip(asks, told, strict=True):
                    token = part.token
                    answers[token] = _joined(answers.get(token), answer)
                    if isinstance(answer, Granted):
                        taken[token].append(number)
                    else:
                        waiting[token] = []
        given_up: dict[int, list[End]] = {}
        for token, told_last in answers.items():
            if isinstance(told_last, NotBefore):
                for number in taken[token]:
                    given_up.setdefault(number, []).append(End(token, "undone"))
        await _all(self.shards[number].end(ends) for number, ends in given_up.items())
        return [answers[request.token] for request in requests]

    async def head(self, tokens: Sequence[str]) -> None:
        """The heads of their responses are here."""
        parts = self._parts(tokens, lambda token: self._asked.get(token, ()))
        await _all(self.shards[number].head(part) for number, part in parts.items())

    async def end(self, ends: Sequence[End]) -> None:
        """Free the slots; reports first, so that nobody starts between the two."""
        await self.block(list(dict.fromkeys(one for end in ends for one in end.reports)))
        parts: dict[int, list[End]] = {}
        for token, outcome, _, size in ends:
            for place, number in enumerate(self._asked.get(token, ())):
                told = 0 if place else size  # it counts for the host alone
                parts.setdefault(number, []).append(End(token, outcome, (), told))
        await _all(self.shards[number].end(part) for number, part in parts.items())
        for end in ends:
            self._asked.pop(end.token, None)

    async def renew(self, tokens: Sequence[str]) -> None:
        """The holds last for a whole time to live from now."""
        parts = self._parts(tokens, lambda token: self._asked.get(token, ()))
        await _all(self.shards[number].renew(part) for number, part in parts.items())

    async def block(self, reports: Sequence[Report]) -> None:
        """Take reports into account, and tell everybody."""
        parts = self._parts(reports, lambda report: (self.shard_of(report.scope),))
        await _all(self.shards[number].block(part) for number, part in parts.items())

    async def pause(self, scopes: Sequence[str]) -> None:
        """No request of these scopes, by any member, until `resume`."""
        parts = self._parts(scopes, lambda scope: (self.shard_of(scope),))
        await _all(self.shards[number].pause(part) for number, part in parts.items())

    async def resume(self, scopes: Sequence[str]) -> None:
        """Requests again."""
        parts = self._parts(scopes, lambda scope: (self.shard_of(scope),))
        await _all(self.shards[number].resume(part) for number, part in parts.items())

    async def look(self, scopes: Sequence[str]) -> list[ScopeView]:
        """What is known of each, and which member holds it. Raises LedgerLost."""
        found = await _all(self.shards[self.shard_of(scope)].look([scope]) for scope in scopes)
        return [view for views in found for view in views]

    # --- how --------------------------------------------------------------------------------

    def _by_shard(self, request: TakeRequest) -> list[tuple[int, TakeRequest]]:
        """What is asked of each shard, the host's first."""
        found: dict[int, TakeRequest] = {}
        for one in request.scopes:
            number = self.shard_of(one.scope)
            before = found.get(number)
            scopes = (one,) if before is None else (*before.scopes, one)
            found[number] = TakeRequest(request.token, scopes)
        return list(found.items())

    def _parts(
        self, things: Iterable[_T], shards_of: Callable[[_T], Iterable[int]]
    ) -> dict[int, list[_T]]:
        parts: dict[int, list[_T]] = {}
        for one in things:
            for number in shards_of(one):
                parts.setdefault(number, []).append(one)
        return parts

    def lost(self, number: int, lost: bool) -> bool:
        """A shard was lost, or is back. Is there one that can't be reached?"""
        if lost:
            self._lost.add(number)
        else:
            self._lost.discard(number)
        return bool(self._lost)


class _ShardListener:
    """What one shard tells, as a whole ledger would."""

    def __init__(self, ledger: ShardedLedger, number: int, listener: LedgerListener) -> None:
        self._ledger = ledger
        self._number = number
        self._listener = listener
        self.opened = listener.opened
        self.blocked = listener.blocked
        self.paused = listener.paused

    def lost(self, lost: bool) -> None:
        """Without one shard nothing is granted: nobody knows which hosts it has."""
        if not self._ledger.lost(self._number, lost):
            self._listener.lost(False)
        elif lost:
            self._listener.lost(True)

    def clocks(self) -> list[ScopeClock]:
        """Those that belong to the shard, and whether there are more."""
        mine, every = self._ledger.shard_of, self._listener.clocks()
        return [one for one in every if not one.scope or mine(one.scope) == self._number]


class _ShardedTexts:
    """Sources of robots.txt files, by the shard of the origin."""

    def __init__(self, sources: list[RobotsSource]) -> None:
        self._sources = sources

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """See `SharedFetcher.fetch`."""
        return await self._of(origin).fetch(origin, validators)

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; None: it can't be told."""
        return await self._of(origin).reach(origin)

    def _of(self, origin: str) -> RobotsSource:
        return self._sources[_shard(origin, len(self._sources))]


def _shard(name: str, shards: int) -> int:
    return zlib.crc32(name.encode()) % shards


def _joined(before: Granted | NotBefore | None, answer: Granted | NotBefore) -> Granted | NotBefore:
    """The answer about all scopes so far."""
    if isinstance(before, Granted) and isinstance(answer, Granted):
        seconds = min(before.seconds, answer.seconds)
        return Granted(answer.token, seconds, (*before.clocks, *answer.clocks))
    return answer


async def _all(calls: Iterable[Awaitable[_R]]) -> list[_R]:
    """Every result, once all are there. Raises the first error then."""
    found: list[_R] = []
    for one in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
