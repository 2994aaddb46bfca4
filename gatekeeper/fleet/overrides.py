"""What operators say of hosts at run time (`Gatekeeper.override`), for every member of a fleet.

The rules lie in one hash of the store, by what they match, for as long as a member lives. They are
published as they are said; a count beside the epoch shows with each beat whether a message was
lost. After a loss of the store's memory every member tells those that it follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from gatekeeper.config import HostRule, match_named
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fleet.scripts import OVERRIDE
from gatekeeper.fleet.store import Store

_KEPT = 60_000
"""Milliseconds until they are gone where no member gives a sign of life."""

_log = logging.getLogger(__name__)


class FleetOverrides:
    """The overrides of a fleet, as one member follows and says them.

    Of two for the same match the one counts that reached the store later, everywhere.
    """

    def __init__(
        self,
        store: Store,
        keys: tuple[str, str],
        channel: str,
        tell_now: Callable[[], object],
    ) -> None:
        """`keys` of the epoch and the overrides, `channel` the one that all hear; `tell_now()` has
        `tell` called soon."""
        self._store = store
        self._keys = list(keys)
        self._channel = channel
        self._tell_now = tell_now
        self._followed: dict[str, str] = {}
        """The rules in force, as they are written, by what they match."""
        self._untold: dict[str, str] = {}
        self._count = 0
        """How many had been said in this epoch when we looked last."""
        self._followers: list[Callable[[HostRule], object]] = []

    def follow(self, follower: Callable[[HostRule], object]) -> None:
        """Call that with each override that is in force, and that another member says."""
        self._followers.append(follower)
        for match, rule in self._followed.items():
            self._apply([follower], match, rule)

    def say(self, rule: HostRule) -> None:
        """Tell every member, those that come later too, as soon as the store can be reached."""
        match = match_named(rule.match)
        self._followed[match] = self._untold[match] = msgspec.json.encode(rule).decode()
        self._tell_now()

    def heard(self, match: str, rule: str) -> None:
        """Somebody said this; also what was said here comes back."""
        if self._followed.get(match) == rule or match in self._untold:
            return  # ours reaches the store later; if it did not, the count shows it
        self._followed[match] = rule
        self._apply(self._followers, match, rule)

    def _apply(self, followers: list[Callable[[HostRule], object]], match: str, rule: str) -> None:
        try:
            said = msgspec.json.decode(rule, type=HostRule)
            for follower in followers:
                follower(said)
        except (msgspec.MsgspecError, ConfigError) as error:
            _log.error("another member's override of %s can't be followed: %s", match, error)

    async def tell(self, epoch: str) -> None:
        """Tell what was said here since. Raises LedgerLost."""
        if untold := dict(self._untold):
            await self._write(epoch, "0", untold)
            for match, rule in untold.items():
                if self._untold.get(match) is rule:
                    del self._untold[match]

    async def tell_again(self, epoch: str) -> None:
        """The store's memory is another one: tell all that is followed, where nobody has told
        anything newer. Raises LedgerLost."""
        self._count = 0
        if self._followed:
            await self._write(epoch, "1", self._followed)

    async def catch_up(self, count: int) -> None:
        """So many were said: read them if that is news. Raises LedgerLost."""
        if count != self._count:
            found = await self._store.run("HGETALL", self._keys[1])
            for match, rule in zip(found[::2], found[1::2], strict=True):
                self.heard(match.decode(), rule.decode())
            self._count = count

    async def _write(self, epoch: str, after_a_loss: str, rules: Mapping[str, str]) -> None:
        pairs = [part for pair in rules.items() for part in pair]
        arguments = [epoch, after_a_loss, str(_KEPT), self._channel, *pairs]
        if not await self._store.script(OVERRIDE, self._keys, arguments):
            raise LedgerLost("the store's memory is another one than it was")
