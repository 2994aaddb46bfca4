"""robots.txt files that a fleet shares: one member fetches, the others read what it found.

What a retrieval came to lies in the store for as long as it is fresh, and half as long again so
that a 304 finds its text. Who wants a file looks there first; who finds nothing newer than what it
has claims the origin, fetches in the host's turn, and writes. That is published: who waits reads it
at once, and who holds an older copy takes it over, so that a refresh by one is one by all. Where
nothing is heard the others look again until the claim is over: a member that dies with one delays
them by `CLAIM_FOR` seconds.

While the store can't be reached nobody gets a turn to fetch in, so the store is asked again until
it answers, for `CLAIM_FOR` seconds at most; what could not be written is written later. Where the
members have divided the hosts among them each fetches for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from cachetools import LRUCache

from gatekeeper.config import CacheConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fetching.directory import flying
from gatekeeper.fetching.outcomes import (
    Kept,
    Lifetime,
    Outcome,
    Retrieval,
    RobotsSource,
    Validators,
    fresh_for,
)
from gatekeeper.fleet import scripts
from gatekeeper.fleet.store import CALL_DEADLINE, Store

CLAIM_FOR = 10.0
"""Seconds after which the claim of a member that gives no sign of life is over."""
_LOOK, _LOOK_MAX = 0.1, 1.0
"""Seconds between two looks at what another member fetches: at first, and at most."""
_FAILED_FOR = 60.0
"""Seconds for which a failure is believed by those who did not see it."""
_LONGER = 1.5
_REMEMBERED = 100_000
_AT_ONCE = 8
"""Calls of the store at once."""
_AWAY = 1.0
"""Seconds for which a store that did not answer is not asked again."""


class _Shared(msgspec.Struct, array_like=True):
    """A retrieval, as it lies in the store."""

    stamp: str
    fresh: float
    """Seconds for which it is good ..."""
    kept: float
    """... and for which the store keeps it."""
    outcome: str
    status: int | None
    hops: tuple[str, ...]
    url: str
    body: bytes | None
    etag: str | None
    last_modified: str | None
    brief: bool
    retry_after: float | None
    took: float
    truncated: bool
    received: int


class SharedFetcher:
    """A source of robots.txt files that asks the fleet first."""

    def __init__(
        self,
        fetcher: RobotsSource,
        store: Store,
        cache: CacheConfig,
        prefix: str,
        member: str,
        *,
        renew: Callable[[str], object] = lambda _origin: None,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """`prefix`: how the keys of the namespace begin; `member`: our own name in the fleet;
        `renew(origin)`: fetch a file again, of which another member has a newer one; `alone()`:
        does each member get turns of its own without the store?"""
        self._fetcher = fetcher
        self._store = store
        self._cache = cache
        self._prefix = prefix
        self._member = member
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._away_until = 0.0
        """The store did not answer: nobody waits for it until then (the loop's time)."""
        self._seen: LRUCache[str, str] = LRUCache(_REMEMBERED)
        """The stamp of what we have of an origin."""
        self._offered: LRUCache[str, str] = LRUCache(_REMEMBERED)
        """The stamp of what another member wrote since, and which `renew` was called for."""
        self._renew = renew
        self._alone = alone
        self._writing: set[asyncio.Task[None]] = set()
        """What is to be written once the store answers."""
        self._waiting: dict[str, asyncio.Event] = {}
        """Origins that another member asks, and somebody here waits for."""

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; None: it can't be told."""
        return await self._fetcher.reach(origin)

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """What another member found since we asked last, or else what we find. Where somebody
        wants the site itself to be asked, only what is found from now on will do."""
        look, flight = _LOOK, flying.get()
        anew = flight is not None and flight.force and self._offered.pop(origin, None) is None
        loop = asyncio.get_running_loop()
        first, patience = True, loop.time() + CLAIM_FOR
        while True:
            try:
                if (found := await self._newer(origin, anew)) is not None:
                    return found
                left = await self._claim(origin)
            except LedgerLost:
                if loop.time() >= patience or (self._alone() and not first):
                    return await self._fetcher.fetch(origin, validators)
                first = False  # it may be a connection that broke, and no store that is away
                await asyncio.sleep(_AWAY * 1.1)
                continue
            if not left:
                return await self._fetch_for_all(origin, validators)
            anew = False
            await self._wait(origin, min(look, left))
            look = min(2 * look, _LOOK_MAX)

    def told(self, origin: str, stamp: str, good: bool) -> None:
        """Another member, or we, wrote what it found; `good`: the site answered."""
        if (waiting := self._waiting.get(origin)) is not None:
            waiting.set()
        if good and self._seen.get(origin, stamp) != stamp:
            self._offered[origin] = stamp
            self._renew(origin)

    async def _wait(self, origin: str, seconds: float) -> None:
        """Until another member has written what it found; at most so many seconds, for a message
        may be lost."""
        written = self._waiting.setdefault(origin, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await written.wait()
        if self._waiting.get(origin) is written:
            del self._waiting[origin]

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Some at once. While the store is away, those that wait do not try it one by one."""
        loop = asyncio.get_running_loop()
        try:
            async with self._calls:
                if loop.time() < self._away_until:
                    raise LedgerLost("the store did not answer a moment ago")
                try:
                    return await call
                except LedgerLost:
                    self._away_until = loop.time() + _AWAY
                    raise
        finally:
            call.close()

    async def _newer(self, origin: str, anew: bool = False) -> Retrieval | None:
        """What lies in the store and we have not; `anew`: what lies there now is known."""
        shared, age = await self._read(origin)
        if shared is None or shared.stamp == self._seen.get(origin) or age >= shared.fresh:
            return None
        try:
            found = _retrieval(shared, age)
        except zlib.error:
            return None
        if found.outcome is Outcome.INTERNAL:  # one that a later version knows and we don't
            return None
        self._seen[origin] = shared.stamp
        return None if anew else found

    async def _read(self, origin: str) -> tuple[_Shared | None, float]:
        """What lies in the store, and how old it is in seconds."""
        key = f"{self._prefix}r:{origin}"
        left, raw = await self._call(self._store.script(scripts.READ, [key], []))
        if raw is None:
            return None, 0.0
        try:
            shared = msgspec.msgpack.decode(raw, type=_Shared)
        except msgspec.MsgspecError:
            return None, 0.0
        # It counts as older by a second than it seems: an error refreshes earlier.
        return shared, max(0.0, shared.kept - left / 1000) + 1.0

    async def _claim(self, origin: str) -> float:
        """Take the right to fetch, or renew it: 0, or the seconds for which another has it."""
        arguments = [self._member, str(round(CLAIM_FOR * 1000))]
        claim = self._store.script(scripts.CLAIM, [f"{self._prefix}f:{origin}"], arguments)
        left = await self._call(claim)
        return max(0.0, int(left) / 1000)

    async def _fetch_for_all(self, origin: str, validators: Validators | None) -> Retrieval:
        keeping = asyncio.create_task(self._keep_claim(origin))
        written = True
        try:
            with contextlib.suppress(LedgerLost):  # between the look and the claim it may have come
                if (found := await self._newer(origin)) is not None:
                    return found
            retrieval = await self._fetcher.fetch(origin, validators)
            try:
                await self._write(origin, retrieval)
            except LedgerLost:
                written = False
                writing = asyncio.create_task(self._write_later(origin, retrieval, keeping))
                self._writing.add(writing)
                writing.add_done_callback(self._writing.discard)
            return retrieval
        finally:
            if written:
                await self._let_go(origin, keeping)

    async def _write_later(
        self, origin: str, retrieval: Retrieval, keeping: asyncio.Task[None]
    ) -> None:
        """Others wait for what we found, as long as the claim lives."""
        begun = asyncio.get_running_loop().time()
        late = 0.0
        try:
            while late < CLAIM_FOR:
                await asyncio.sleep(_AWAY * 1.1)
                late = asyncio.get_running_loop().time() - begun
                with contextlib.suppress(LedgerLost):
                    return await self._write(origin, retrieval, late + CALL_DEADLINE)
        finally:
            await self._let_go(origin, keeping)

    async def _let_go(self, origin: str, keeping: asyncio.Task[None]) -> None:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with contextlib.suppress(LedgerLost):
            keys = [f"{self._prefix}f:{origin}"]
            await self._call(self._store.script(scripts.RELEASE, keys, [self._member]))

    async def close(self) -> None:
        """What was not written is not written any more."""
        for task in list(self._writing):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep_claim(self, origin: str) -> None:
        """The turn may be long in coming: the claim lives as long as we do."""
        while True:
            await asyncio.sleep(CLAIM_FOR / 3)
            with contextlib.suppress(LedgerLost):
                await self._claim(origin)

    async def _write(self, origin: str, retrieval: Retrieval, late: float = 0.0) -> None:
        """Keep it for all. `late`: seconds since it was found, at most."""
        if retrieval.outcome.row.kept is Kept.NOT or retrieval.outcome.row.local:
            return  # it says something about us, and nothing about the site
        fresh = _FAILED_FOR
        if retrieval.outcome.good:
            # A margin: a member that takes it over keeps it for `min_ttl` at least.
            whole = fresh_for(retrieval.outcome.row.kept, retrieval.lifetime, self._cache)
            fresh = max(whole - self._cache.min_ttl, min(_FAILED_FOR, whole / 2))
        shared = _share(retrieval, max(0.001, fresh - late))
        if retrieval.outcome is Outcome.NOT_MODIFIED:
            before, _ = await self._read(origin)
            if before is None or (before.etag, before.last_modified) != (
                retrieval.etag or before.etag,
                retrieval.last_modified or before.last_modified,
            ):
                return  # the text that it speaks of is not here
            shared = msgspec.structs.replace(
                before, stamp=shared.stamp, fresh=shared.fresh, kept=shared.kept
            )
        key, milliseconds = f"{self._prefix}r:{origin}", str(round(shared.kept * 1000))
        self._seen[origin] = shared.stamp  # before the message about it comes back
        message = msgspec.msgpack.encode(("t", origin, shared.stamp, retrieval.outcome.good))
        arguments = [msgspec.msgpack.encode(shared), milliseconds, f"{self._prefix}all", message]
        async with self._calls:
            await self._store.script(scripts.WRITE, [key], arguments)


def _share(retrieval: Retrieval, fresh: float) -> _Shared:
    body = retrieval.body
    return _Shared(
        stamp=secrets.token_hex(6),
        fresh=fresh,
        kept=_LONGER * fresh,
        outcome=retrieval.outcome.row.name,
        status=retrieval.status,
        hops=retrieval.hops,
        url=retrieval.url,
        body=None if body is None else zlib.compress(body),
        etag=retrieval.etag,
        last_modified=retrieval.last_modified,
        brief=retrieval.lifetime.brief,
        retry_after=retrieval.retry_after,
        took=retrieval.took,
        truncated=retrieval.truncated,
        received=retrieval.received,
    )


def _retrieval(shared: _Shared, age: float) -> Retrieval:
    """As it reads after so many seconds: what is left of its lifetime is its lifetime."""
    return Retrieval(
        outcome=Outcome.named(shared.outcome),
        status=shared.status,
        hops=shared.hops,
        url=shared.url,
        body=None if shared.body is None else zlib.decompress(shared.body),
        etag=shared.etag,
        last_modified=shared.last_modified,
        lifetime=Lifetime(max(0.0, shared.fresh - age), shared.brief),
        retry_after=None if shared.retry_after is None else max(0.0, shared.retry_after - age),
        took=shared.took,
        truncated=shared.truncated,
        received=shared.received,
        detail="another member of the fleet fetched it",
    )
