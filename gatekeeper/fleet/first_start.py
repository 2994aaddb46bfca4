"""Begins a fleet on a store that has none: `gatekeeper fleet init`.

The first member of an empty store waits, because an empty store can't be told from an emptied one:
other members may have requests under way. Who knows that there are none can begin the epoch with
this module; members then start without waiting. Clocks that the store has stay as they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import NamedTuple

from gatekeeper.clock import micros, utc
from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError
from gatekeeper.fleet.scripts import EPOCH_KEYS, FORMAT, INIT, check_format, key_prefix
from gatekeeper.fleet.sharded import shard_namespaces
from gatekeeper.fleet.store import Store

_SILENT_SECONDS = 60.0
"""A member without a heartbeat for that long, or three holds if they are longer, is gone."""
_LOOK, _IF_NONE, _ALWAYS = "look", "none", "always"


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


_Found = tuple[bytes, int, bytes, list[bytes], int, int]
"""The reply of `INIT`."""


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
            shards.append((store, name))
        # Of a cluster, every server is looked at before the first one is written to.
        found = [await _init(store, name, _LOOK, config) for store, name in shards]
        free = all(not one[0] and not one[3] and not one[4] for one in found)
        if free or force:
            how = _ALWAYS if force else _IF_NONE
            found = [await _init(store, name, how, config) for store, name in shards]
        return _summary(shards[0][0].where, found)


async def _init(store: Store, namespace: str, how: str, config: FleetConfig) -> _Found:
    prefix = key_prefix(namespace)
    silent = micros(max(_SILENT_SECONDS, 3 * config.hold))
    arguments = [how, secrets.token_hex(4), store.identity, str(FORMAT), str(micros(config.hold))]
    arguments += [str(silent), f"{prefix}all"]
    keys = [prefix + name for name in EPOCH_KEYS]
    found: _Found = await store.script(INIT, keys, arguments, _Found)
    if found[0]:
        check_format(found[2].decode(), prefix)
    return found


def _summary(where: str, found: Sequence[_Found]) -> FirstStart:
    began = [int(one[1]) for one in found if one[0]]
    names = {name.decode() for one in found for name in one[3]}
    return FirstStart(
        where,
        begun=all(one[5] for one in found),
        since=utc(max(began) / 1e6) if began else None,
        members=tuple(sorted(names)),
        listening=max(one[4] for one in found),
    )
