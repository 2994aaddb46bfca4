"""robots.txt files shared by a fleet: one member fetches a file, the others read the result.

The store caches the outcome of a retrieval for as long as it is fresh, and half as long again so
that a 304 finds its text. A member that needs a file looks there first. If there is nothing newer
than its own copy, it claims the origin, fetches under the host's lease, and writes the result. The
write is published: members that wait read it immediately, and members with an older copy update it,
so a refresh by one member is a refresh for all. Without a message the others look again until the
claim expires; a member that dies while it has a claim delays them by `CLAIM_FOR` seconds.

A lease may take long to be granted, and a store that lost its data lost the claims too. So a member
looks for a newer result once more when it has the lease, and gives the lease back if there is one.

While the store can't be reached, no member is granted a lease to fetch, so the store is retried
until it responds, for at most `CLAIM_FOR` seconds. A result that could not be written is written
later. If the members have divided the hosts among themselves, each fetches for itself.
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
from gatekeeper.fetching.directory import current_flight
from gatekeeper.fetching.outcomes import (
    NO_METADATA,
    CacheTime,
    Lifetime,
    Metadata,
    Outcome,
    Retrieval,
    RobotsSource,
    Validators,
    fresh_for,
    last_look,
)
from gatekeeper.fleet import scripts
from gatekeeper.fleet.store import CALL_DEADLINE, Store

CLAIM_FOR = 10.0
"""Seconds after which a claim expires unless its member renews it."""
_FIRST_LOOK_SECONDS, _MAX_LOOK_SECONDS = 0.1, 1.0
"""Seconds between two looks for the result of another member: initially, and at most."""
_FAILURE_SECONDS = 60.0
"""Seconds for which the other members use a failure that one member observed."""
_STORED_FACTOR = 1.5
"""How long the store keeps a retrieval, as a multiple of the time for which it is fresh."""
_MAX_STAMPS = 100_000
"""Maximum number of origins whose stamps are remembered."""
_MAX_CALLS = 8
"""Maximum number of calls in flight at the same time."""
_AWAY_SECONDS = 1.0
"""Seconds for which a store that did not respond is not called again."""


class _StoredRetrieval(msgspec.Struct, array_like=True):
    """A retrieval as it is stored. The order of the fields is the storage format."""

    stamp: str
    """A random identifier of this version."""
    fresh: float
    """Seconds for which the retrieval is fresh."""
    kept: float
    """Seconds for which the store keeps it."""
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
    metadata: Metadata = NO_METADATA


class _Superseded(Exception):
    """Another member has fetched the file while this one waited for the host's lease."""

    def __init__(self, found: Retrieval) -> None:
        super().__init__()
        self.found = found


class SharedFetcher:
    """A source of robots.txt files that reads results of other members before it fetches."""

    def __init__(
        self,
        fetcher: RobotsSource,
        store: Store,
        cache: CacheConfig,
        prefix: str,
        member: str,
        *,
        renew: Callable[[str], object] = lambda _origin: None,
        divided: Callable[[], bool] = lambda: True,
    ) -> None:
        """`prefix`: the prefix of the namespace's keys. `member`: the name of this member.
        `renew(origin)` is called to fetch a file again when another member has a newer one.
        `divided()` returns True while each member grants leases of its own without the store."""
        self._fetcher = fetcher
        self._store = store
        self._cache = cache
        self._prefix = prefix
        self._member = member
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._away_until = 0.0
        """The store did not respond: calls fail immediately until then (the loop's time)."""
        self._stamps: LRUCache[str, str] = LRUCache(_MAX_STAMPS)
        """By origin, the stamp of the version that this member has."""
        self._offered_stamps: LRUCache[str, str] = LRUCache(_MAX_STAMPS)
        """By origin, the stamp of a newer version for which `renew` was called."""
        self._renew = renew
        self._divided = divided
        self._writing: set[asyncio.Task[None]] = set()
        """Tasks that write a result once the store responds."""
        self._written_events: dict[str, asyncio.Event] = {}
        """By origin, an event that is set when another member has written its result."""

    async def reach(self, origin: str) -> bool | None:
        """Return whether the origin accepts a new connection, or None if that can't be tested."""
        return await self._fetcher.reach(origin)

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Return a result of another member that is newer than this member's, or else fetch the
        file. A forced refresh accepts only results that are written from now on."""
        flight = current_flight.get()
        forced = flight is not None and flight.force
        if forced and self._offered_stamps.pop(origin, None) is not None:
            forced = False  # the newer file is in the store

        async def look() -> None:
            with contextlib.suppress(LedgerLost):
                if (found := await self._newer(origin, forced)) is not None:
                    raise _Superseded(found)

        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CLAIM_FOR
        seconds, first = _FIRST_LOOK_SECONDS, True
        looking = last_look.set(look)
        try:
            while True:
                try:
                    if (found := await self._newer(origin, forced)) is not None:
                        return found
                    forced = False
                    left = await self._claim(origin)
                except LedgerLost:
                    if loop.time() >= give_up_at or (self._divided() and not first):
                        return await self._fetcher.fetch(origin, validators)
                    first = False  # perhaps only the connection broke, and the store is available
                    await asyncio.sleep(_AWAY_SECONDS * 1.1)
                    continue
                if not left:
                    return await self._fetch_and_share(origin, validators)
                await self._wait(origin, min(seconds, left))
                seconds = min(2 * seconds, _MAX_LOOK_SECONDS)
        except _Superseded as by:
            return by.found
        finally:
            last_look.reset(looking)

    def written(self, origin: str, stamp: str, good: bool) -> None:
        """Note that a member, perhaps this one, wrote a result. `good`: the site answered."""
        if (waiting := self._written_events.get(origin)) is not None:
            waiting.set()
        if good and self._stamps.get(origin, stamp) != stamp:
            self._offered_stamps[origin] = stamp
            self._renew(origin)

    async def _wait(self, origin: str, seconds: float) -> None:
        """Wait until another member has written its result, at most `seconds`, since the message
        may be lost."""
        written = self._written_events.setdefault(origin, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await written.wait()
        if self._written_events.get(origin) is written:
            del self._written_events[origin]

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call of the store, limited to a few at the same time. While the store does not
        respond, waiting calls fail immediately instead of trying it one by one."""
        loop = asyncio.get_running_loop()
        try:
            async with self._calls:
                if loop.time() < self._away_until:
                    raise LedgerLost("the store did not answer a moment ago")
                try:
                    return await call
                except LedgerLost:
                    self._away_until = loop.time() + _AWAY_SECONDS
                    raise
        finally:
            call.close()

    async def _newer(self, origin: str, forced: bool = False) -> Retrieval | None:
        """Return the stored result if it is fresh and not this member's own version, else None.
        `forced`: mark the stored version as seen and return None."""
        shared, age = await self._read(origin)
        if shared is None or shared.stamp == self._stamps.get(origin) or age >= shared.fresh:
            return None
        try:
            found = _retrieval(shared, age)
        except zlib.error:
            return None
        if found.outcome is Outcome.INTERNAL:  # an outcome that only a later version knows
            return None
        self._stamps[origin] = shared.stamp
        return None if forced else found

    async def _read(self, origin: str) -> tuple[_StoredRetrieval | None, float]:
        """Return the stored result, if there is a readable one, and its age in seconds."""
        key = f"{self._prefix}r:{origin}"
        left, raw = await self._call(self._store.script(scripts.READ, [key], []))
        if raw is None:
            return None, 0.0
        try:
            shared = msgspec.msgpack.decode(raw, type=_StoredRetrieval)
        except msgspec.MsgspecError:
            return None, 0.0
        # One second is added, so that an error in the age refreshes earlier.
        return shared, max(0.0, shared.kept - left / 1000) + 1.0

    async def _claim(self, origin: str) -> float:
        """Claim the right to fetch, or renew the claim. Return 0, or the seconds for which another
        member has it."""
        arguments = [self._member, str(round(CLAIM_FOR * 1000))]
        claim = self._store.script(scripts.CLAIM, [f"{self._prefix}f:{origin}"], arguments)
        left = await self._call(claim)
        return max(0.0, int(left) / 1000)

    async def _fetch_and_share(self, origin: str, validators: Validators | None) -> Retrieval:
        renewing = asyncio.create_task(self._renew_claim(origin))
        written = True
        try:
            retrieval = await self._fetcher.fetch(origin, validators)
            try:
                await self._write(origin, retrieval)
            except LedgerLost:
                written = False
                writing = asyncio.create_task(self._write_later(origin, retrieval, renewing))
                self._writing.add(writing)
                writing.add_done_callback(self._writing.discard)
            return retrieval
        finally:
            if written:
                await self._release_claim(origin, renewing)

    async def _write_later(
        self, origin: str, retrieval: Retrieval, renewing: asyncio.Task[None]
    ) -> None:
        """Retry writing a result, for which others wait as long as the claim is renewed."""
        begun = asyncio.get_running_loop().time()
        late = 0.0
        try:
            while late < CLAIM_FOR:
                await asyncio.sleep(_AWAY_SECONDS * 1.1)
                late = asyncio.get_running_loop().time() - begun
                with contextlib.suppress(LedgerLost):
                    return await self._write(origin, retrieval, late + CALL_DEADLINE)
        finally:
            await self._release_claim(origin, renewing)

    async def _release_claim(self, origin: str, renewing: asyncio.Task[None]) -> None:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(LedgerLost):
            keys = [f"{self._prefix}f:{origin}"]
            await self._call(self._store.script(scripts.RELEASE, keys, [self._member]))

    async def close(self) -> None:
        """Cancel the writes that have not succeeded yet."""
        for task in list(self._writing):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew_claim(self, origin: str) -> None:
        """Renew the claim until cancelled, since the host's lease may take long to be granted."""
        while True:
            await asyncio.sleep(CLAIM_FOR / 3)
            with contextlib.suppress(LedgerLost):
                await self._claim(origin)

    async def _write(self, origin: str, retrieval: Retrieval, late: float = 0.0) -> None:
        """Write a result for all members. `late`: the maximum age of the result in seconds."""
        if retrieval.outcome.row.cache_time is CacheTime.NOT or retrieval.outcome.row.local:
            return  # the outcome describes this member, not the site
        before: _StoredRetrieval | None = None
        outcome = retrieval.outcome
        if outcome is Outcome.NOT_MODIFIED:
            before, _ = await self._read(origin)
            if before is None or (before.etag, before.last_modified) != (
                retrieval.etag or before.etag,
                retrieval.last_modified or before.last_modified,
            ):
                return  # the text that the 304 refers to is not stored
            outcome = Outcome.named(before.outcome)
        fresh = _FAILURE_SECONDS
        if outcome.good:
            # Leave a margin: a member that reads the result caches it for at least `min_ttl`.
            whole = fresh_for(outcome.row.cache_time, retrieval.lifetime, self._cache)
            fresh = max(whole - self._cache.min_ttl, min(_FAILURE_SECONDS, whole / 2))
        shared = _stored(retrieval, max(0.001, fresh - late))
        if before is not None:
            shared = msgspec.structs.replace(
                before,
                stamp=shared.stamp,
                fresh=shared.fresh,
                kept=shared.kept,
                brief=shared.brief,
                metadata=shared.metadata,
            )
        key, milliseconds = f"{self._prefix}r:{origin}", str(round(shared.kept * 1000))
        self._stamps[origin] = shared.stamp  # before this member receives its own message
        message = msgspec.msgpack.encode(("t", origin, shared.stamp, retrieval.outcome.good))
        arguments = [msgspec.msgpack.encode(shared), milliseconds, f"{self._prefix}all", message]
        async with self._calls:
            await self._store.script(scripts.WRITE, [key], arguments)


def _stored(retrieval: Retrieval, fresh: float) -> _StoredRetrieval:
    body = retrieval.body
    return _StoredRetrieval(
        stamp=secrets.token_hex(6),
        fresh=fresh,
        kept=_STORED_FACTOR * fresh,
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
        metadata=retrieval.metadata,
    )


def _retrieval(shared: _StoredRetrieval, age: float) -> Retrieval:
    """Convert a stored result. `age`: its age in seconds, which is subtracted from its lifetime."""
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
        metadata=shared.metadata,
        detail="another member of the fleet fetched it",
    )
