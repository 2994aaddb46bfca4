"""The members of a fleet as one member knows them: whom to wait for after the store lost its data.

The store has a list of the members with the time of each one's latest heartbeat. If the store loses
its contents, the remaining members end the quarantine once every member on their lists, and every
member on the lists of those, has pushed what it knows. A member may therefore be granted a request
only if it can be found this way from every valid list:

* A newcomer waits until a known member has *read* a list that contains the newcomer; the next
  heartbeat of that member shows this. A member that does not know the newcomer waits for that known
  member, whose push names the newcomer.
* If no known member does so, the newcomer waits until each other member has read such a list, or
  has been silent for so long that its own list is no longer valid.
* A list is considered complete for as long as newcomers wait, and only in the epoch in which it was
  read. For members that it named before, it also counts in the following epoch.
* A store that is down grants nothing to anyone, and starts an epoch when it is back. The quarantine
  then waits for all members that the remaining members know: a list that is valid when its member
  finds the store down stays valid for the duration of one more hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gatekeeper.clock import Clock

NOTHING, NOT_ALL, ALL = 0, 1, 3
"""How complete a member's list is in a new epoch. NOTHING: it was not a member in an earlier epoch.
NOT_ALL: there may be members that it does not know. ALL: it knows every member."""
_MIN_VALID_SECONDS = 4.0
"""Minimum number of seconds for which a list is considered complete; a longer hold extends it."""
_MARGIN = 1.0
"""Additional seconds for which newcomers wait."""


class MemberList:
    """The members that the member `own` knows, and whether they know `own`."""

    def __init__(self, own: str, clock: Clock, hold: float) -> None:
        """`hold`: the time to live of a hold in seconds."""
        self._own = own
        self._clock = clock
        self._valid_for = max(hold, _MIN_VALID_SECONDS)
        self.longest_hold: float = max(hold, self._valid_for / 1.5)
        """Seconds from which a quarantine's length is computed, so that it outlasts valid lists."""
        self.heartbeat_ages: dict[str, float] = {}
        """Seconds since each member's latest heartbeat at the time the list was read."""
        self._requested_at = 0.0
        """When the latest list was requested (monotonic)."""
        self._valid_until = -math.inf
        """Until when no member that is missing from the list may have been granted anything."""
        self.list_time: int = 0
        """The time of the latest list on the store's clock; 0 if none was read in this epoch."""
        self._complete = False
        """Whether the list names every member that may have been granted something."""
        self._pushed = ("", NOTHING)
        """The latest epoch to which this member pushed, and how complete its list was."""
        self._left_at = -math.inf
        """When the latest member left (monotonic): since then only the store has its clocks."""
        self.known: bool = False
        """Whether a quarantine is not ended without waiting for this member."""
        self._listed_since: int | None = None
        """While not `known`: since when this member is on the list, by the store's clock."""

    @property
    def announces(self) -> bool:
        """Whether the next heartbeat should announce this member to all the others."""
        return not self.known and self._listed_since is None

    def completeness(self, epoch: str, lived: bool) -> int:
        """Return how complete this member's list is in an epoch: NOTHING, NOT_ALL or ALL. `lived`:
        whether it was a member in an earlier epoch."""
        if not lived:
            return NOTHING
        if self._pushed[0] == epoch:
            return self._pushed[1]
        counts = self._complete and self._clock.monotonic() <= self._valid_until
        return ALL if counts else NOT_ALL

    def store_is_down(self, tried_at: float) -> None:
        """Note that the store, tried at `tried_at`, turned out to serve no member at all."""
        if self._clock.monotonic() <= self._valid_until:
            self._valid_until = max(self._valid_until, tried_at + self._valid_for)

    def clocks_are_missing(self) -> None:
        """Note that some clocks can't be pushed, as if a member had left now."""
        self._left_at = self._clock.monotonic()

    def push_arguments(self, epoch: str, completeness: int) -> list[str]:
        """Return what a push says of members: how many microseconds ago the latest one left (empty:
        none did), and the names of all known members. Members that join in this epoch appear only
        on its next list, so the current list no longer counts as complete."""
        self._pushed = (epoch, completeness)
        self._complete, self.list_time, self._listed_since = False, 0, None
        gone_for = self._clock.monotonic() - self._left_at
        since = "" if math.isinf(gone_for) else str(math.floor(gone_for * 1e6))
        return [since, *{*self.heartbeat_ages, self._own}]

    def pushed(self, *, too_late: bool) -> None:
        """Note that the push has arrived. `too_late`: the quarantine had already ended."""
        if self._pushed[1] < ALL or too_late:
            self.known = False

    def update(self, epoch: str, asked_at: float, came_at: float, answer: Sequence[Any]) -> bool:
        """Process the answer to a heartbeat (see `BEAT`). Return True if the list has an unknown
        member, which waits for this one to show that it has read the list."""
        _, left, moment, found, _, read, added, gone = answer
        if int(gone) >= 0:
            self._left_at = max(self._left_at, came_at - (int(moment) - int(gone)) / 1e6)
        now, since, self._requested_at = int(moment), asked_at - self._requested_at, asked_at
        self._valid_until = asked_at + self._valid_for
        ages = {name: (now - one) / 1e6 for name, one in _scores(found).items()}
        news = bool(ages.keys() - self.heartbeat_ages.keys())
        before = {}
        if int(left) > 0:
            # The list started empty with the epoch. Members of the earlier list are waited for,
            # even if the store loses its contents again.
            before = {name: age + since for name, age in self.heartbeat_ages.items()}
        self.heartbeat_ages, self.list_time = before | ages, now
        self._complete = self._complete or int(left) == 0 or self._pushed == (epoch, ALL)
        if added and self.known:  # this member had been silent for so long that it was removed
            self.known, self._listed_since = False, None
        if not self.known:
            self._listed_since = now if self._listed_since is None else self._listed_since
            self.known = self._can_be_found(now, _scores(read))
        return news

    def _can_be_found(self, now: int, read: Mapping[str, int]) -> bool:
        """Return True if every member with a valid list would wait for this one, or for a member
        that knows it. `read`: by name, the time of the list that each member has read; members that
        are known have a second entry, with a + before the name."""
        longest, came_at = self._valid_for + _MARGIN, self._listed_since or 0
        others = {name: age for name, age in self.heartbeat_ages.items() if name != self._own}
        return (
            (now - came_at) / 1e6 > longest
            or any(read.get(f"+{name}", 0) > came_at for name in others)
            or all(age > longest or read.get(name, 0) > came_at for name, age in others.items())
        )

    def owner_of(self, name: str) -> str:
        """Return the member to which rendezvous hashing over the members assigns the name."""
        members = self.heartbeat_ages or {self._own: 0.0}
        return max(members, key=lambda member: _weight(member, name))


def waiting_text(seconds: float) -> str:
    """Return for what a quarantine of that many seconds waits, and what to do if nobody is there.

    >>> waiting_text(27.3)[:55]
    'a new or emptied store: waiting 28 s for members that m'
    """
    return (
        f"a new or emptied store: waiting {math.ceil(seconds)} s for members that may still be "
        "under way; `gatekeeper fleet init` if there are none"
    )


def _weight(member: str, name: str) -> bytes:
    """Return the rendezvous weight; the member with the greatest weight owns the name."""
    return hashlib.blake2b(f"{member}\0{name}".encode(), digest_size=8).digest()


def _scores(found: Sequence[Any]) -> dict[str, int]:
    """Parse names and scores from the reply to ZRANGE WITHSCORES."""
    return {name.decode(): int(score) for name, score in zip(found[::2], found[1::2], strict=True)}
