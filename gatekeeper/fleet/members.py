"""Who belongs to a fleet, as one member knows it: whom to wait for where the store has forgotten.

The members stand on a list in the store, with the moment of each one's latest sign of life. Where
the store loses its memory, those who are left end the quarantine once everybody on their lists, and
on the lists of those, has told what it knows. So nobody may be granted anything who can't be found
that way from every list that counts:

* a newcomer waits until a member that is known has *read* a list on which it stands, which the next
  sign of life of that member shows. Whoever lacks the newcomer waits for that member, which tells;
* where none does, it waits until each other one has read such a list, or has been silent for so
  long that its own list does not count any more;
* a list counts as complete for as long as newcomers wait, and only in the epoch in which it was
  read, or, for whom it named before that, in the one after;
* a store that is down grants nothing to anybody, and begins an epoch when it is back, which waits
  for all whom those know who were there: a list that counts when its member sees the store down
  counts for a hold more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gatekeeper.clock import Clock

NOTHING, NOT_ALL, ALL = 0, 1, 3
"""What a member's word is worth in a new epoch: it lived in no earlier one; there may be members of
which it never heard; there are none."""
_REMEMBERED = 4.0
"""Seconds for which a list counts as complete: at least, and as long as a hold lasts."""
_MARGIN = 1.0
"""Seconds for which newcomers wait beyond that."""


class MemberList:
    """The members of whom `own` knows, and whether they know of it."""

    def __init__(self, own: str, clock: Clock, hold: float) -> None:
        """`hold`: seconds that a hold lasts."""
        self._own = own
        self._clock = clock
        self._remembered = max(hold, _REMEMBERED)
        self.longest_hold: float = max(hold, self._remembered / 1.5)
        """That a quarantine is to be for: it may not be over before lists count no more."""
        self.ages: dict[str, float] = {}
        """Seconds since each one's sign of life, when we read the list ..."""
        self._asked_at = 0.0
        """... for which we had asked then."""
        self._counts_until = -math.inf
        """Until when nobody may have been granted something whom it lacks."""
        self.read: int = 0
        """Its moment by the store's clock, 0: none was read in this epoch."""
        self._complete = False
        """It names everybody who may have been granted something."""
        self._told = ("", NOTHING)
        """What our word was worth in which epoch."""
        self._gone_at = -math.inf
        """When the latest member was gone, after which nobody but the store knows of its clocks."""
        self.known: bool = False
        """Who ends a quarantine waits for us."""
        self._came_at: int | None = None
        """While that is not so: since when we are on the list, by the store's clock."""

    @property
    def greets(self) -> bool:
        """Is our next sign of life one of which everybody should hear at once?"""
        return not self.known and self._came_at is None

    def word(self, epoch: str, lived: bool) -> int:
        """What our list is worth in that epoch. `lived`: we were a member in an earlier one."""
        if not lived:
            return NOTHING
        if self._told[0] == epoch:
            return self._told[1]
        counts = self._complete and self._clock.monotonic() <= self._counts_until
        return ALL if counts else NOT_ALL

    def nobody_served(self, tried_at: float) -> None:
        """We tried to reach the store then, and heard now that it serves nobody."""
        if self._clock.monotonic() <= self._counts_until:
            self._counts_until = max(self._counts_until, tried_at + self._remembered)

    def some_are_silent(self) -> None:
        """There are clocks that we can't tell: it is as if somebody were gone from now on."""
        self._gone_at = self._clock.monotonic()

    def tells(self, epoch: str, word: int) -> list[str]:
        """We tell our word now: for how long the latest has been gone, and everybody whom we know.
        Others may come in that epoch of whom only its next list says something."""
        self._told, self._complete, self.read, self._came_at = (epoch, word), False, 0, None
        gone_for = self._clock.monotonic() - self._gone_at
        since = "" if math.isinf(gone_for) else str(math.floor(gone_for * 1e6))
        return [since, *{*self.ages, self._own}]

    def told(self, *, too_late: bool) -> None:
        """Our word is known. `too_late`: the quarantine had been over before."""
        if self._told[1] < ALL or too_late:
            self.known = False

    def note(self, epoch: str, asked_at: float, came_at: float, answer: Sequence[Any]) -> bool:
        """Take in what a sign of life brought, see `BEAT`. Is somebody on the list whom we had not
        known, and who waits for us to have read it?"""
        _, left, moment, found, _, read, added, gone = answer
        if int(gone) >= 0:
            self._gone_at = max(self._gone_at, came_at - (int(moment) - int(gone)) / 1e6)
        now, since, self._asked_at = int(moment), asked_at - self._asked_at, asked_at
        self._counts_until = asked_at + self._remembered
        ages = {name: (now - one) / 1e6 for name, one in _scores(found).items()}
        news = bool(ages.keys() - self.ages.keys())
        before = {}
        if int(left) > 0:
            # The store's list began anew with the epoch: whoever stood on it before is waited for,
            # also if the store forgets once more.
            before = {name: age + since for name, age in self.ages.items()}
        self.ages, self.read = before | ages, now
        self._complete = self._complete or int(left) == 0 or self._told == (epoch, ALL)
        if added and self.known:  # we had been silent for long
            self.known, self._came_at = False, None
        if not self.known:
            self._came_at = now if self._came_at is None else self._came_at
            self.known = self._can_be_found(now, _scores(read))
        return news

    def _can_be_found(self, now: int, read: Mapping[str, int]) -> bool:
        """Would everybody whose list counts wait for us, or for one that knows of us? `read`: the
        moment of the list that each one has read, and again behind a + of those that are known."""
        longest, came_at = self._remembered + _MARGIN, self._came_at or 0
        others = {name: age for name, age in self.ages.items() if name != self._own}
        return (
            (now - came_at) / 1e6 > longest
            or any(read.get(f"+{name}", 0) > came_at for name in others)
            or all(age > longest or read.get(name, 0) > came_at for name, age in others.items())
        )

    def owns(self, name: str) -> bool:
        """Rendezvous hashing: is the name ours, if the members divide all among themselves?"""
        members = self.ages or {self._own: 0.0}
        return max(members, key=lambda member: _weight(member, name)) == self._own


def _weight(member: str, name: str) -> bytes:
    """The member with the greatest weight has the name."""
    return hashlib.blake2b(f"{member}\0{name}".encode(), digest_size=8).digest()


def _scores(found: Sequence[Any]) -> dict[str, int]:
    """Names and their scores."""
    return {name.decode(): int(score) for name, score in zip(found[::2], found[1::2], strict=True)}
