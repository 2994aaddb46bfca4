"""robots.txt files shared by a fleet: one member fetches a file, the others read the result.

The store caches the outcome of a retrieval for as long as it is fresh, and half as long again so
that a 304 finds its text. A member that needs a file looks there first. If there is nothing newer
than its own copy, it claims the origin, fetches under the host's lease, and writes the result. The
write is published: members that wait read it immediately, and members with an older copy update it,
so a refresh by one member is a refresh for all. Without a message the others look again until the
claim expires; a member that dies while it has a claim delays them by `CLAIM_FOR` seconds.

A store that lost its data lost the files too. Each member then offers the files that it has, before
the quarantine ends. Who claims an origin with an offer gets no claim: the member with the file gets
it, and writes the file.

A lease may take long to be granted, and a store that lost its data lost the claims too. So a member
looks for a newer result, an offer and another claim once more when it has the lease, and gives the
lease back if there is one.

While the store can't be reached, no member fetches: the store is retried until it responds, and the
question is deferred after `CLAIM_FOR` seconds (reason `fleet`). So it is if the store refuses only
the connections for files. A result that could not be written is written later. If the members have
divided the hosts among themselves, each fetches for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from cachetools import LRUCache

from gatekeeper.clock import OwnedTasks
from gatekeeper.config import CacheConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fetching.directory import Directory, current_flight
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
from gatekeeper.fleet.store import CALL_DEADLINE, MAX_REFUSED_PAUSE, Store, StoreRefuses

CLAIM_FOR = 10.0
"""Seconds after which a claim expires unless its member renews it."""
FIRST_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.1, 1.0
"""Seconds between two looks for the result of another member: initially, and at most."""
_FAILURE_SECONDS = 60.0
"""Seconds for which the other members use a failure that one member observed."""
_STORED_FACTOR = 1.5
"""How long the store keeps a retrieval, as a multiple of the time for which it is fresh."""
_MAX_STAMPS = 100_000
"""Maximum number of origins whose stamps are remembered."""
_MAX_CALLS = 8
"""Maximum number of calls in flight at the same time."""
AWAY_SECONDS = 1.0
"""Seconds for which a store that did not respond is not called again; one that denies access is not
called for `MAX_REFUSED_PAUSE`."""


MAX_TEXT = 64 * 1024 * 1024
"""Maximum size of a text in octets, so that a few octets in the store can't fill the memory."""
_OFFERS_PER_CALL = 500
"""Files that are offered in one script call."""


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
    """Another member has fetched the file while this one waited for the host's lease, or has it and
    will write it (None)."""

    def __init__(self, found: Retrieval | None) -> None:
        super().__init__()
        self.found = found


@dataclass(eq=False)
class SharedFetcher:
    """A source of robots.txt files that reads results of other members before it fetches."""

    fetcher: RobotsSource
    store: Store
    cache: CacheConfig
    prefix: str
    """The prefix of the namespace's keys."""
    member: str
    """The name of this member."""
    files: Callable[[], Directory | None] = lambda: None
    """Returns the files that this member has; None: not yet."""
    mine: Callable[[str], bool] = lambda _origin: True
    """The origins whose files are stored here."""
    divided: Callable[[], bool] = field(default=lambda: True, kw_only=True)
    """Returns True while each member grants leases of its own without the store."""

    def __post_init__(self) -> None:
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._away_until = 0.0
        """The store did not respond: calls fail immediately until then (the loop's time)."""
        self._away_because = ""
        self._stamps: LRUCache[str, str] = LRUCache(_MAX_STAMPS)
        """By origin, the stamp of the version that this member has."""
        self._offered_stamps: LRUCache[str, str] = LRUCache(_MAX_STAMPS)
        """By origin, the stamp of a newer version that another member has."""
        self._supplying: set[str] = set()
        """The origins whose files are being written because another member needs them."""
        self._writing = OwnedTasks()
        """Tasks that renew a claim, or write a result once the store responds, or a wanted file."""
        self._written_events: dict[str, asyncio.Event] = {}
        """By origin, an event that is set when another member has written its result."""

    async def reach(self, origin: str) -> bool | None:
        """Return whether the origin accepts a new connection, or None if that can't be tested."""
        return await self.fetcher.reach(origin)

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Return a result of another member that is newer than this member's, or else fetch the
        file. A forced refresh accepts only results that are written from now on."""
        flight = current_flight.get()
        forced = flight is not None and flight.force
        if forced and self._offered_stamps.pop(origin, None) is not None:
            forced = False  # the newer file is in the store
        offers = not forced

        async def look() -> None:
            with contextlib.suppress(LedgerLost):
                found = await self._newer(origin, forced)
                if found is not None or await self._claim(origin, offers=offers):
                    raise _Superseded(found)

        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CLAIM_FOR
        seconds, first, alone = FIRST_LOOK_SECONDS, True, False
        looking = last_look.set(look)
        try:
            while True:
                try:
                    if alone:
                        return await self.fetcher.fetch(origin, validators)
                    if (found := await self._newer(origin, forced)) is not None:
                        return found
                    forced = False
                    left = await self._claim(origin, offers=offers)
                    if not left:
                        return await self._fetch_and_share(origin, validators)
                except LedgerLost as error:
                    if loop.time() >= give_up_at and not self.divided():
                        return Retrieval(outcome=Outcome.FLEET, detail=str(error))
                    alone = self.divided() and not first
                    if not alone:
                        await asyncio.sleep(AWAY_SECONDS * 1.1)
                    first = False  # perhaps only the connection broke, and the store is available
                    continue
                except _Superseded as by:
                    if by.found is not None:
                        return by.found
                    left, alone = seconds, False
                await self._wait(origin, min(seconds, left))
                seconds = min(2 * seconds, MAX_LOOK_SECONDS)
        finally:
            last_look.reset(looking)

    def written(self, origin: str, stamp: str, good: bool) -> None:
        """Note that a member, perhaps this one, wrote a result. `good`: the site answered."""
        if (waiting := self._written_events.get(origin)) is not None:
            waiting.set()
        if good and self._stamps.get(origin, stamp) != stamp:
            self._offered_stamps[origin] = stamp
            if (files := self.files()) is not None:
                files.renew(origin)

    async def offer(self, store: Store, seconds: float) -> None:
        """Offer the other members the files that this one has, as the store has lost them, for at
        most `seconds`. `store`: the ledger's connection. Raises LedgerLost."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        files = self.files()
        fresh = (one for one in (() if files is None else files.fresh()) if self.mine(one[0]))
        while loop.time() < end and (batch := list(islice(fresh, _OFFERS_PER_CALL))):
            keys = [f"{self.prefix}o:{origin}" for origin, _ in batch]
            arguments = [self.member, *(str(max(1, int(left * 1000))) for _, left in batch)]
            await store.script(scripts.OFFER, keys, arguments)

    def supply(self, origin: str) -> None:
        """Write a file that this member has offered: another one needs it, and waits as for a
        fetch."""
        if origin not in self._supplying:
            self._supplying.add(origin)
            self._writing.start(self._supply(origin))

    async def _supply(self, origin: str) -> None:
        files = self.files()
        found = None if files is None else files.known(origin)
        with contextlib.suppress(LedgerLost):
            if found is not None and _is_of_the_site(found.outcome):
                good, left = found.outcome.good, found.lifetime.seconds or 0.0
                fresh = left - self.cache.min_ttl if good else min(_FAILURE_SECONDS, left)
                if fresh > 0.0:
                    await self._put(origin, _stored(found, fresh, self._stamps.get(origin)), good)
        await self._release_claim(origin, offer=True)
        self._supplying.discard(origin)

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
                    raise LedgerLost(self._away_because)
                try:
                    return await call
                except LedgerLost as error:
                    refused = isinstance(error, StoreRefuses)
                    away = MAX_REFUSED_PAUSE if refused else AWAY_SECONDS
                    self._away_until, self._away_because = loop.time() + away, str(error)
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
        key = f"{self.prefix}r:{origin}"
        form = tuple[int, bytes | None]
        left, raw = await self._call(self.store.script(scripts.READ, [key], [], form))
        if raw is None:
            return None, 0.0
        try:
            shared = msgspec.msgpack.decode(raw, type=_StoredRetrieval)
        except msgspec.MsgspecError:
            return None, 0.0
        # One second is added, so that an error in the age refreshes earlier.
        return shared, max(0.0, shared.kept - left / 1000) + 1.0

    async def _claim(self, origin: str, *, offers: bool = False) -> float:
        """Claim the right to fetch, or renew the claim. Return 0, or the seconds for which another
        member has it. `offers`: a member that offers the file gets the claim and writes the file.
        """
        keys = [f"{self.prefix}f:{origin}", *([f"{self.prefix}o:{origin}"] if offers else ())]
        arguments = [self.member, str(round(CLAIM_FOR * 1000)), f"{self.prefix}all", origin]
        left = await self._call(self.store.script(scripts.CLAIM, keys, arguments, int))
        return max(0.0, float(left) / 1000)

    async def _fetch_and_share(self, origin: str, validators: Validators | None) -> Retrieval:
        renewing = self._writing.start(self._renew_claim(origin))
        written = True
        try:
            retrieval = await self.fetcher.fetch(origin, validators)
            try:
                await self._write(origin, retrieval)
            except LedgerLost:
                written = False
                self._writing.start(self._write_later(origin, retrieval, renewing))
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
                await asyncio.sleep(AWAY_SECONDS * 1.1)
                late = asyncio.get_running_loop().time() - begun
                with contextlib.suppress(LedgerLost):
                    return await self._write(origin, retrieval, late + CALL_DEADLINE)
        finally:
            await self._release_claim(origin, renewing)

    async def _release_claim(
        self, origin: str, renewing: asyncio.Task[None] | None = None, *, offer: bool = False
    ) -> None:
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(LedgerLost):
            keys = [f"{self.prefix}f:{origin}", *([f"{self.prefix}o:{origin}"] if offer else ())]
            await self._call(self.store.script(scripts.RELEASE, keys, [self.member]))

    async def close(self) -> None:
        """Cancel the writes that have not succeeded yet, renew no claim any more, and close the
        store."""
        await self._writing.close()
        await self.store.close()

    async def _renew_claim(self, origin: str) -> None:
        """Renew the claim until cancelled, since the host's lease may take long to be granted."""
        while True:
            await asyncio.sleep(CLAIM_FOR / 3)
            with contextlib.suppress(LedgerLost):
                await self._claim(origin)

    async def _write(self, origin: str, retrieval: Retrieval, late: float = 0.0) -> None:
        """Write a result for all members. `late`: the maximum age of the result in seconds."""
        if not _is_of_the_site(retrieval.outcome):
            return
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
            whole = fresh_for(outcome.row.cache_time, retrieval.lifetime, self.cache)
            fresh = max(whole - self.cache.min_ttl, min(_FAILURE_SECONDS, whole / 2))
        shared = _stored(retrieval, max(0.001, fresh - late))
        if before is not None:
            new = ("stamp", "fresh", "kept", "brief", "metadata")
            shared = msgspec.structs.replace(
                before, **{name: getattr(shared, name) for name in new}
            )
        await self._put(origin, shared, retrieval.outcome.good)

    async def _put(self, origin: str, shared: _StoredRetrieval, good: bool) -> None:
        """Write a result and publish a message about it. `good`: the site answered."""
        key, milliseconds = f"{self.prefix}r:{origin}", str(max(1, round(shared.kept * 1000)))
        self._stamps[origin] = shared.stamp  # before this member receives its own message
        message = msgspec.msgpack.encode(("t", origin, shared.stamp, good))
        arguments = [msgspec.msgpack.encode(shared), milliseconds, f"{self.prefix}all", message]
        async with self._calls:
            await self.store.script(scripts.WRITE, [key], arguments)


def _is_of_the_site(outcome: Outcome) -> bool:
    """Return True if an outcome describes the site, and not this member."""
    return outcome.row.cache_time is not CacheTime.NOT and not outcome.row.local


_EQUAL = ("status", "hops", "url", "etag", "last_modified", "took", "metadata")
"""Fields that are stored as they are."""


def _stored(retrieval: Retrieval, fresh: float, stamp: str | None = None) -> _StoredRetrieval:
    body = retrieval.body
    return _StoredRetrieval(
        stamp=stamp or secrets.token_hex(6),
        fresh=fresh,
        kept=_STORED_FACTOR * fresh,
        outcome=retrieval.outcome.row.name,
        body=None if body is None else zlib.compress(body),
        brief=retrieval.lifetime.brief,
        retry_after=retrieval.retry_after,
        **{name: getattr(retrieval, name) for name in _EQUAL},
    )


def _retrieval(shared: _StoredRetrieval, age: float) -> Retrieval:
    """Convert a stored result. `age`: its age in seconds, which is subtracted from its lifetime."""
    return Retrieval(
        outcome=Outcome.named(shared.outcome),
        body=None if shared.body is None else _inflated(shared.body),
        lifetime=Lifetime(max(0.0, shared.fresh - age), shared.brief),
        retry_after=None if shared.retry_after is None else max(0.0, shared.retry_after - age),
        detail="another member of the fleet fetched it",
        shared=True,
        **{name: getattr(shared, name) for name in _EQUAL},
    )


def _inflated(body: bytes) -> bytes:
    """Decompress a text. Raises zlib.error, also if it is larger than `MAX_TEXT`."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(body, MAX_TEXT)
    if not unpacker.eof:
        raise zlib.error("the text is cut or too large")
    return text
