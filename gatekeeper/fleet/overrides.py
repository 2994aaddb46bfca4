"""Overrides that operators set at run time (`Gatekeeper.override`), shared by a whole fleet.

One hash of the store has the rule in force for each match, without who set it and until when: so
members of earlier versions, which read nothing else, apply it too. A second hash, which they do not
read, has all rules of the match with their ends. Such an entry counts only beside the rule that it
names: if the first hash has another one, a member of an earlier version has set that since.

Both hashes last for as long as any member is alive. What is written is also published. A counter
beside the epoch shows with each heartbeat whether a message was lost. After the store has lost its
contents, every member writes the rules that it follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

from gatekeeper.config import HostRule
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fleet.scripts import OVERRIDE
from gatekeeper.fleet.store import Store
from gatekeeper.pacing.host_settings import MAX_OVERRIDES, explained

_EXPIRY_MS = 60_000
"""Milliseconds until the rules expire if no member sends a heartbeat."""
_MAX_EARLIER = 16
_CANT_APPLY = "another member's override of %s can't be applied: %s"

_log = logging.getLogger(__name__)
_Follower = Callable[[str, tuple[HostRule, ...]], object]


class _Overrides(msgspec.Struct, frozen=True):
    """The overrides of one match."""

    text: str
    """The rule in force as JSON, as every version reads it."""
    rules: Annotated[tuple[HostRule, ...], msgspec.Meta(max_length=MAX_OVERRIDES)] = ()
    """Those set at run time, the one in force last. Each member ends them by its own clock."""
    ending: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MAX_EARLIER)] = ()
    """The latest texts of rules that end. A member of an earlier version, which knows no end, may
    write them again."""
    known: bool = True
    """False if a member of an earlier version set the rule."""

    @property
    def record(self) -> str:
        """The entry of the second hash; empty if there is none."""
        return msgspec.json.encode(self).decode() if self.known else ""


def _read(text: str, record: str) -> _Overrides:
    """Decode what the store has about one match. Raises msgspec.MsgspecError."""
    if record:
        found = msgspec.json.decode(record, type=_Overrides)
        if found.text == text:
            return found
    return _Overrides(text, (msgspec.json.decode(text, type=HostRule),), known=False)


def _plain(rule: HostRule) -> str:
    """Return a rule as members of earlier versions read it: its reason says by whom and until when.

    They know no end, so they get no permission that ends: they obey the site's file instead.
    """
    robots = "obey" if rule.robots == "allow" and rule.until is not None else rule.robots
    fields = asdict(replace(rule, robots=robots, reason=explained(rule)))
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in _UNREAD}).decode()


_UNREAD = ("by", "until")
"""Settings of a rule that members of earlier versions refuse."""


class FleetOverrides:
    """The fleet's overrides, as one member follows and sets them.

    If two members set rules with the same match, those of the one that reached the store later
    apply on all members.
    """

    def __init__(self, store: Store, prefix: str, write_soon: Callable[[], object]) -> None:
        """`prefix`: of the fleet's keys. `write_soon()` makes the ledger call `write_new` soon."""
        self._store = store
        self._keys = [prefix + name for name in ("epoch", "overrides", "overrides:ends")]
        self._channel = f"{prefix}all"
        self._write_soon = write_soon
        self._followed: dict[str, _Overrides] = {}
        """What is in force, by match."""
        self._unwritten: dict[str, str] = {}
        """By match, what was set here and has not been written to the store yet: the record that
        it replaces there; empty: any."""
        self._known_writes = 0
        """The store's counter of writes in this epoch when it was last checked."""
        self._followers: list[_Follower] = []

    def follow(self, follower: _Follower) -> None:
        """Call `follower` with each match and its overrides, the one in force last, now and each
        time that another member sets them."""
        self._followers.append(follower)
        for match, found in self._followed.items():
            self._apply([follower], match, found)

    def say(self, match: str, rules: tuple[HostRule, ...], in_force: HostRule) -> None:
        """Set the overrides of a match for every member, present and future, as soon as the store
        can be reached. `in_force` is the rule for members of earlier versions."""
        before = self._followed.get(match)
        ending = () if before is None else before.ending
        text = _plain(in_force)
        if in_force.until is not None:
            ending = (*(one for one in ending if one != text), text)[-_MAX_EARLIER:]
        self._followed[match] = _Overrides(text, rules, ending)
        self._unwritten[match] = ""
        self._write_soon()

    def ended(self, match: str, in_force: HostRule) -> None:
        """Tell members of earlier versions which rule is in force, now that an override ended."""
        before = self._followed.get(match)
        if before is None or not before.known or before.text == _plain(in_force):
            return
        replaces = self._unwritten.get(match, before.record)
        self.say(match, before.rules, in_force)
        self._unwritten[match] = replaces

    def received(self, match: str, text: str, record: str = "") -> None:
        """Apply rules that were published. What was set here comes back as well."""
        mine = self._followed.get(match)
        if match in self._unwritten or (mine and (mine.text, mine.record) == (text, record)):
            return  # what was set here reaches the store later; if not, the counter shows it
        try:
            found = _read(text, record)
        except msgspec.MsgspecError as error:
            _log.error(_CANT_APPLY, match, error)
            return
        if mine is not None and not found.known and text in mine.ending:
            # A member of an earlier version wrote what has an end, which it does not know.
            self._unwritten[match] = ""
            self._write_soon()
            return
        self._followed[match] = found
        if mine is None or mine.rules != found.rules:
            self._apply(self._followers, match, found)

    def _apply(self, followers: Iterable[_Follower], match: str, found: _Overrides) -> None:
        try:
            for follower in followers:
                follower(match, found.rules)
        except ConfigError as error:
            _log.error(_CANT_APPLY, match, error)

    async def write_new(self, epoch: str) -> None:
        """Write what was set here since the last call. Raises LedgerLost."""
        if unwritten := dict(self._unwritten):
            told = {match: self._followed[match] for match in unwritten}
            await self._write(epoch, "0", told, unwritten)
            for match, one in told.items():
                if self._followed.get(match) is one:
                    del self._unwritten[match]

    async def write_all(self, epoch: str) -> None:
        """Write all rules to a new epoch, except those for which another member already wrote a
        rule there. Raises LedgerLost."""
        self._known_writes = 0
        if self._followed:
            await self._write(epoch, "1", self._followed, {})

    async def catch_up(self, count: int) -> None:
        """Read the rules if the store's counter differs from the known one. Raises LedgerLost."""
        if count != self._known_writes:
            found = await self._store.run("HGETALL", self._keys[1])
            records = await self._store.run("HGETALL", self._keys[2])
            by_match = dict(zip(records[::2], records[1::2], strict=True))
            for match, text in zip(found[::2], found[1::2], strict=True):
                self.received(match.decode(), text.decode(), by_match.get(match, b"").decode())
            self._known_writes = count

    async def _write(
        self, epoch: str, after_loss: str, told: dict[str, _Overrides], expected: dict[str, str]
    ) -> None:
        arguments = [epoch, after_loss, str(_EXPIRY_MS), self._channel]
        for match, one in told.items():
            arguments += [match, one.text, one.record, expected.get(match, "")]
        if not await self._store.script(OVERRIDE, self._keys, arguments):
            raise LedgerLost("the store's contents have changed")
