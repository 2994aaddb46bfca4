"""Begins a fleet on a store that has none: `gatekeeper fleet init`.

The first member of an empty store waits, because an empty store can't be told from an emptied one:
other members may have requests under way. Who knows that there are none can begin the epoch with
this module; members then start without waiting. Clocks that the store has stay as they are.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import datetime
from typing import NamedTuple

from gatekeeper.clock import utc
from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError
from gatekeeper.fleet.scripts import declare, key_prefix, read_epoch
from gatekeeper.fleet.sharded import shard_namespaces
from gatekeeper.fleet.store import Store

_SILENT_SECONDS = 60.0
"""A member without a heartbeat for that long, or three holds if they are longer, is gone."""


class FirstStart(NamedTuple):
    """What `begin_fleet` found in the store, and whether it began an epoch."""

    where: str
    """The URL of the store, without its password."""
    begun: bool
    """Whether an epoch was begun."""
    since: datetime | None
    """When the epoch began that the store had before; None if it had none."""
    members: tuple[str, ...]
    """The members with a recent heartbeat."""
    listening: int
    """Number of members that listen for messages: they may not have sent a heartbeat yet."""

    @property
    def alive(self) -> int:
        """How many members are alive."""
        return max(len(self.members), self.listening)


class _Found(NamedTuple):
    """What one shard of the store has."""

    epoch: str
    """Its id; empty if there is none."""
    began: int
    """When it began, in microseconds of the server's clock."""
    members: list[bytes]
    listening: int


async def begin_fleet(config: FleetConfig, *, force: bool = False) -> FirstStart:
    """Begin the epoch of a fleet in which members need not wait for each other.

    Nothing is written if the store has an epoch or if members are alive, unless `force` is set.
    Raises ConfigError if `fleet.url` is not set or leads to no store that a fleet can use, and
    LedgerLost if the store can't be reached.
    """
    if config.url is None:
        raise ConfigError("fleet.url is not set: name the store, as in redis://127.0.0.1:6379/0")
    names = shard_namespaces(config.namespace) if config.sharded else [config.namespace]
    async with AsyncExitStack() as stack:
        shards = []
        for name in names:
            store = Store(config.url, config, tag=name)
            stack.push_async_callback(store.close)
            await store.connect(starting=True)
            shards.append((store, key_prefix(name)))
        while True:
            # Of a cluster, every server is looked at before the first one is written to.
            found = [await _look(store, prefix, config.hold) for store, prefix in shards]
            begun = force or not any(one.epoch or one.members or one.listening for one in found)
            if not begun:
                break
            started = [
                await declare(store, prefix, one.epoch, config.hold, f"{prefix}all")
                for (store, prefix), one in zip(shards, found, strict=True)
            ]
            if all(started):  # else a member has come since, and begun an epoch itself
                break
        began = [one.began for one in found if one.epoch]
        return FirstStart(
            shards[0][0].where,
            begun=begun,
            since=utc(max(began) / 1e6) if began else None,
            members=tuple(sorted({name.decode() for one in found for name in one.members})),
            listening=max(one.listening for one in found),
        )


async def _look(store: Store, prefix: str, hold: float) -> _Found:
    epoch, _, began = await read_epoch(store, prefix)
    seconds, _ = await store.run("TIME", form=tuple[bytes, bytes])
    silent = int(int(seconds) - max(_SILENT_SECONDS, 3 * hold)) * 1_000_000
    members = await store.run("ZRANGEBYSCORE", f"{prefix}members", silent, "+inf", form=list[bytes])
    _, listening = await store.run("PUBSUB", "NUMSUB", f"{prefix}all", form=tuple[bytes, int])
    return _Found(epoch, int(began or 0), members, listening)
