"""Overrides that operators set at run time (`Gatekeeper.override`), shared by a whole fleet.

One hash of the store has the rules, keyed by what they match, for as long as any member is alive.
Each rule is also published. A counter beside the epoch shows with each heartbeat whether a message
was lost. After the store has lost its contents, every member writes the rules that it follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from gatekeeper.config import HostRule, match_named
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fleet.scripts import OVERRIDE
from gatekeeper.fleet.store import Store

_EXPIRY_MS = 60_000
"""Milliseconds until the rules expire if no member sends a heartbeat."""

_log = logging.getLogger(__name__)


class FleetOverrides:
    """The fleet's overrides, as one member follows and sets them.

    If two rules have the same match, the one that reached the store later applies on all members.
    """

    def __init__(
        self,
        store: Store,
        keys: tuple[str, str],
        channel: str,
        write_soon: Callable[[], object],
    ) -> None:
        """`keys`: of the epoch and of the overrides. `channel`: the channel that every member
        subscribes to. `write_soon()` makes the ledger call `write_new` soon."""
        self._store = store
        self._keys = list(keys)
        self._channel = channel
        self._write_soon = write_soon
        self._followed: dict[str, str] = {}
        """The rules in force as JSON, by what they match."""
        self._unwritten: dict[str, str] = {}
        """Rules that were set here and have not been written to the store yet."""
        self._known_writes = 0
        """The store's counter of writes in this epoch when it was last checked."""
        self._followers: list[Callable[[HostRule], object]] = []

    def follow(self, follower: Callable[[HostRule], object]) -> None:
        """Call `follower` with each override in force, and with each one that another member sets
        later."""
        self._followers.append(follower)
        for match, rule in self._followed.items():
            self._apply([follower], match, rule)

    def say(self, rule: HostRule) -> None:
        """Set an override for every member, present and future, as soon as the store can be
        reached."""
        match = match_named(rule.match)
        self._followed[match] = self._unwritten[match] = msgspec.json.encode(rule).decode()
        self._write_soon()

    def received(self, match: str, rule: str) -> None:
        """Apply a rule that was published. Rules that were set here come back as well."""
        if self._followed.get(match) == rule or match in self._unwritten:
            return  # the rule set here will reach the store later; if not, the counter shows it
        self._followed[match] = rule
        self._apply(self._followers, match, rule)

    def _apply(self, followers: list[Callable[[HostRule], object]], match: str, rule: str) -> None:
        try:
            said = msgspec.json.decode(rule, type=HostRule)
            for follower in followers:
                follower(said)
        except (msgspec.MsgspecError, ConfigError) as error:
            _log.error("another member's override of %s can't be applied: %s", match, error)

    async def write_new(self, epoch: str) -> None:
        """Write the rules that were set here since the last call. Raises LedgerLost."""
        if unwritten := dict(self._unwritten):
            await self._write(epoch, "0", unwritten)
            for match, rule in unwritten.items():
                if self._unwritten.get(match) is rule:
                    del self._unwritten[match]

    async def write_all(self, epoch: str) -> None:
        """Write all rules to a new epoch, except those for which another member already wrote a
        rule there. Raises LedgerLost."""
        self._known_writes = 0
        if self._followed:
            await self._write(epoch, "1", self._followed)

    async def catch_up(self, count: int) -> None:
        """Read the rules if the store's counter differs from the known one. Raises LedgerLost."""
        if count != self._known_writes:
            found = await self._store.run("HGETALL", self._keys[1])
            for match, rule in zip(found[::2], found[1::2], strict=True):
                self.received(match.decode(), rule.decode())
            self._known_writes = count

    async def _write(self, epoch: str, after_loss: str, rules: Mapping[str, str]) -> None:
        pairs = [part for pair in rules.items() for part in pair]
        arguments = [epoch, after_loss, str(_EXPIRY_MS), self._channel, *pairs]
        if not await self._store.script(OVERRIDE, self._keys, arguments):
            raise LedgerLost("the store's contents have changed")
