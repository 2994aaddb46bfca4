"""`HostIndex`: pages of the hosts in memory, sorted and filtered, without looking at all of them.

A million hosts are no rarity. So the index keeps their names in order, told of each host that comes
or goes; whoever sorts or filters by anything else has every host looked at, in slices, so that no
other answer waits for more than a millisecond. Where there are many, a question waits for the look
for `PATIENCE` seconds at most; what was found by then is the answer, marked incomplete, and the
look goes on for the next question.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from gatekeeper.clock import Clock
from gatekeeper.wire import HostState

if TYPE_CHECKING:
    from gatekeeper.pacing.scopes import Scope

PATIENCE: Final = 0.01
"""Seconds that a question waits for a look at every host."""
KEPT: Final = 1.0
"""Seconds for which what a look at many hosts found answers further questions."""
_FEW: Final = 10_000
"""Up to so many hosts are looked at for each question anew."""
_CHUNK: Final = 1024
"""Hosts looked at before the loop gets a turn, or twice as many."""
_MOST_SCANS: Final = 8
_SHARE: Final = 10.0
"""What a look found is kept for so many times as long as the look took: it costs a tenth of the
time at most, however often somebody asks."""

DEEPEST: Final = 10_000
"""Hosts that a page of filtered or sorted ones can reach."""

_OLD: Final = 30.0
"""Seconds for which what a look found answers after that, while a new one goes on."""

_Run = list[tuple[float, str]]


class SortedNames:
    """Names in order, in short sorted lists: adding one of a million moves a thousand at most.

    >>> names = SortedNames()
    >>> for name in ("b", "a", "c", "b"):
    ...     _ = names.add(name)
    >>> names.discard("c")
    >>> len(names), names.page(0, 10), names.page(0, 1, descending=True)
    (2, ['a', 'b'], ['b'])
    """

    def __init__(self) -> None:
        self._chunks: list[list[str]] = []
        self._last: list[str] = []
        """The last name of each chunk."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, name: str) -> bool:
        """Put a name in its place; False: it is there already."""
        at = min(bisect_left(self._last, name), len(self._chunks) - 1)
        if at < 0:
            self._chunks.append([name])
            self._last.append(name)
            self._size = 1
            return True
        chunk = self._chunks[at]
        place = bisect_left(chunk, name)
        if place < len(chunk) and chunk[place] == name:
            return False
        chunk.insert(place, name)
        self._size += 1
        if len(chunk) > 2 * _CHUNK:
            self._chunks.insert(at + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]
            self._last.insert(at, chunk[-1])
        self._last[at] = chunk[-1]
        return True

    def discard(self, name: str) -> None:
        """Take a name out, if it is there."""
        at = bisect_left(self._last, name)
        if at == len(self._chunks):
            return
        chunk = self._chunks[at]
        place = bisect_left(chunk, name)
        if place == len(chunk) or chunk[place] != name:
            return
        del chunk[place]
        self._size -= 1
        if chunk:
            self._last[at] = chunk[-1]
        else:
            del self._chunks[at], self._last[at]

    def page(self, first: int, count: int, *, descending: bool = False) -> list[str]:
        """`count` names from the position `first` on."""
        found: list[str] = []
        for chunk in reversed(self._chunks) if descending else self._chunks:
            if first >= len(chunk):
                first -= len(chunk)
                continue
            names = chunk[::-1] if descending else chunk
            found += names[first : first + count - len(found)]
            first = 0
            if len(found) >= count:
                break
        return found

    def chunks(self) -> Iterator[list[str]]:
        """All names in order, some at a time. It goes over those that are there now."""
        yield from list(self._chunks)


class HostPage(NamedTuple):
    """One page of hosts."""

    hosts: list[str]
    total: int
    """How many the filter leaves, as far as they were looked at."""
    complete: bool
    """Every host was looked at; False: the look goes on, and the next page knows more."""


class HostOrder(NamedTuple):
    """What to sort hosts by, other than their name."""

    name: str
    """Names the order, for those who ask for the same."""
    key: Callable[[Scope, float], float]
    """Of a scope, at a monotonic moment."""


class _Scan:
    """A look at many hosts in slices, with what was found so far: sorted runs, one a slice."""

    def __init__(self, clock: Clock, *, counts: bool, whole: bool) -> None:
        self.runs: list[_Run] = []
        self.whole = whole
        """It looks at every host; False: some had not been put in their places when it began."""
        self.found = 0
        self.keys: Counter[float] = Counter()
        """How many have each key, where that is their state."""
        self.complete = False
        self.good_until = 0.0
        self.task: asyncio.Task[None] | None = None
        self.newer: _Scan | None = None
        """The one that goes on to take its place."""
        self._clock = clock
        self._counts = counts

    def tasks(self) -> Iterator[asyncio.Task[None]]:
        """What goes on, of this one and of the newer one."""
        if self.task is not None and not self.task.done():
            yield self.task
        if self.newer is not None:
            yield from self.newer.tasks()

    def cancel(self) -> None:
        """End what goes on."""
        for task in self.tasks():
            task.cancel()

    @property
    def going_on(self) -> bool:
        return self.task is not None and not self.task.done()

    async def run(self, slices: Iterable[_Run]) -> None:
        began = self._clock.monotonic()
        for run in slices:
            if run:
                run.sort()
                self.runs.append(run)
                self.found += len(run)
                if self._counts:
                    self.keys.update(key for key, _ in run)
            await asyncio.sleep(0)
        now = self._clock.monotonic()
        self.good_until = now + max(KEPT, _SHARE * (now - began))
        self.complete = True


class HostIndex:
    """The hosts of one gate, in pages.

    `scopes` is what the scheduler holds, read and never changed here; `changes` takes those
    that came or went since it was last emptied; `shared` begins the names of scopes that are
    no hosts.
    """

    def __init__(
        self,
        scopes: Mapping[str, Scope],
        changes: list[Scope],
        clock: Clock,
        *,
        shared: tuple[str, ...],
    ) -> None:
        self._scopes = scopes
        self._changes = changes
        self._clock = clock
        self._shared = shared
        self._names = SortedNames()
        self._pending: list[Scope] = list(scopes.values())
        self._hosts: list[Scope] = []
        """Their scopes, in no order. Not copied for a look, which may go over a million."""
        self._gone: set[str] = set()
        """Names of which an old scope may stand among those."""
        self._scans: dict[tuple[object, ...], _Scan] = {}
        self._follower: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._names)

    @property
    def behind(self) -> int:
        """Hosts that came or went and are not in their places yet."""
        return len(self._pending) + len(self._changes)

    def follow(self) -> None:
        """Put hosts that came or went in their places, a thousand now and others in the
        background: called now and then, so that nobody has to wait for it."""
        if self.behind:
            self._put_some(_CHUNK)
        if self.behind and (self._follower is None or self._follower.done()):
            self._follower = asyncio.get_running_loop().create_task(self._put_all())

    async def close(self) -> None:
        """End what goes on in the background."""
        left = [task for scan in self._scans.values() for task in scan.tasks()]
        if self._follower is not None and not self._follower.done():
            left.append(self._follower)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._scans.clear()

    async def _put_all(self) -> None:
        while self.behind:
            self._put_some(_CHUNK // 2)
            await asyncio.sleep(0)
        if len(self._gone) > max(_CHUNK, len(self._hosts) // 8):
            await self._let_go()

    def _put_some(self, most: int) -> None:
        if not self._pending:
            self._pending, self._changes[:] = self._changes[:], []
        part = self._pending[-most:]
        del self._pending[-most:]
        for scope in part:
            name = scope.name
            if name.startswith(self._shared):
                continue
            if (now := self._scopes.get(name)) is scope:
                self._names.add(name)
                self._hosts.append(scope)
                continue
            self._gone.add(name)
            if now is None:
                self._names.discard(name)

    async def _let_go(self) -> None:
        """Keep the scopes of those alone that are there."""
        gone = set(self._gone)
        kept: list[Scope] = []
        for part in self._slices():
            kept += part
            await asyncio.sleep(0)
        self._hosts = kept
        self._gone -= gone

    def _slices(self) -> Iterator[list[Scope]]:
        """The scopes of the hosts, some at a time, without those that went meanwhile."""
        hosts, scopes, first = self._hosts, self._scopes, 0
        while part := hosts[first : first + _CHUNK]:
            first += _CHUNK
            if gone := self._gone:
                part = [s for s in part if s.name not in gone or scopes.get(s.name) is s]
            yield part

    # --- pages --------------------------------------------------------------------------

    async def page(
        self,
        *,
        q: str = "",
        state: str = "any",
        order: HostOrder | None = None,
        descending: bool = False,
        first: int = 0,
        count: int = 50,
    ) -> HostPage:
        """Names of `count` hosts from the position `first` on.

        `q` is part of the name, `state` one that `state_of` gives, or "any"; `order` None sorts by
        name. Raises ValueError for a page deeper than `DEEPEST`, but of all hosts by name.
        """
        self.follow()
        if self._follower is not None and len(self._scopes) <= _FEW:
            await self._follower
        settled = not self.behind
        if order is None and state == "any" and not q:
            names = self._names.page(first, count, descending=descending)
            return HostPage(names, len(self._names), settled)
        if first + count > DEEPEST:
            raise ValueError(f"only the first {DEEPEST} hosts are sorted: narrow the filter")
        if order is None and state == "any":
            scan = self._matching(q)
        else:
            scan = self._ranked(q, state, order, descending=descending)
        await self._wait_for(scan)
        hosts = _head(scan, first, count, flip=order is None and descending)
        return HostPage(hosts, scan.found, settled and scan.complete and scan.whole)

    async def states(self) -> tuple[dict[str, int], bool]:
        """How many hosts are in each state but "free"; and whether all were looked at."""
        self.follow()
        scan = self._ranked("", _HELD_UP, _BY_STATE, descending=False)
        await self._wait_for(scan)
        counts = {state: scan.keys[float(n)] for n, state in enumerate(STATES) if state != "free"}
        return counts, scan.complete and scan.whole and not self.behind

    async def _wait_for(self, scan: _Scan) -> None:
        """Wait for a look that goes on: where it is one at many, not for long."""
        if scan.task is not None and scan.going_on:
            few = len(self._scopes) <= _FEW
            await asyncio.wait((scan.task,), timeout=None if few else PATIENCE)

    # --- looking at many ----------------------------------------------------------------

    def _ranked(self, q: str, state: str, order: HostOrder | None, *, descending: bool) -> _Scan:
        """The hosts that pass the filter, in runs sorted by the key."""
        key = None if order is None else order.key
        sign = -1.0 if descending else 1.0
        held_up = state not in ("any", "free")
        every = state in ("any", _HELD_UP)

        def look(part: list[Scope], now: float) -> Iterator[tuple[float, str]]:
            for scope in part:
                name = scope.name
                if q and q not in name:
                    continue
                if every or state_of(scope, now) == state:
                    yield 0.0 if key is None else sign * key(scope, now), name

        def slices() -> Iterator[_Run]:
            now = self._clock.monotonic()
            for part in self._slices():
                yield list(
                    look([one for one in part if _active(one, now)] if held_up else part, now)
                )

        name = "" if order is None else order.name
        return self._scan(("ranked", q, state, name, descending), slices)

    def _matching(self, q: str) -> _Scan:
        """All hosts with `q` in their name."""

        def slices() -> Iterator[_Run]:
            for chunk in self._names.chunks():
                yield [(0.0, name) for name in chunk if q in name]

        return self._scan(("names", q), slices)

    def _scan(self, name: tuple[object, ...], slices: Callable[[], Iterable[_Run]]) -> _Scan:
        """The look of that name that is going on or was just made; else a new one. While a new
        one goes on, one that was made not long ago answers in its place."""
        now = self._clock.monotonic()
        scan = self._scans.get(name)
        many = len(self._scopes) > _FEW
        if scan is not None and scan.newer is not None and scan.newer.complete:
            scan = self._scans[name] = scan.newer
        if scan is not None and scan.complete and not scan.whole and not self.behind:
            scan.cancel()
            scan = None  # now all are in their places
        if scan is not None:
            if scan.going_on or (scan.complete and many and now < scan.good_until):
                return scan
            if scan.complete and many and now < scan.good_until + _OLD:
                if scan.newer is None:
                    scan.newer = self._begin(name, slices)
                return scan
        for old in [one for one, old in self._scans.items() if next(old.tasks(), None) is None]:
            if now >= self._scans[old].good_until + _OLD:
                del self._scans[old]
        while len(self._scans) >= _MOST_SCANS:
            self._scans.pop(next(iter(self._scans))).cancel()
        scan = self._scans[name] = self._begin(name, slices)
        return scan

    def _begin(self, name: tuple[object, ...], slices: Callable[[], Iterable[_Run]]) -> _Scan:
        scan = _Scan(self._clock, counts=_HELD_UP in name, whole=not self.behind)
        scan.task = asyncio.get_running_loop().create_task(scan.run(slices()))
        return scan


def _head(scan: _Scan, first: int, count: int, *, flip: bool = False) -> list[str]:
    """`count` names from the position `first` on; `flip`: from the other end."""
    runs: list[Iterable[tuple[float, str]]] = list(scan.runs)
    if flip:
        runs = [reversed(run) for run in scan.runs]
    return [name for _, name in islice(merge(*runs, reverse=flip), first, first + count)]


def _active(scope: Scope, now: float) -> bool:
    """Has it something to show: who waits, is in flight, was held up, or is due later?"""
    return (
        scope.queue is not None
        or scope.in_flight > 0
        or scope.history is not None
        or scope.clock_at() > now
        or bool(scope.shared)
    )


STATES: Final = ("free", "waiting", "busy", "blocked", "paused")
"""What holds a host up, in the order in which they are sorted."""
_HELD_UP: Final = "held up"


def state_of(scope: Scope, now: float) -> HostState:
    """What holds a host up: "paused", "blocked", "busy", "waiting" (its clock runs), or "free"."""
    if scope.history is None and not scope.shared:  # as most are
        if scope.in_flight:
            return "busy"
        return "waiting" if scope.clock_at() > now else "free"
    everything = (scope, *scope.shared)
    histories = [one.history for one in everything if one.history is not None]
    if any(one.paused for one in histories):
        return "paused"
    if any(one.blocked_until > now for one in histories):
        return "blocked"
    if any(one.in_flight for one in everything):
        return "busy"
    return "waiting" if any(one.clock_at() > now for one in everything) else "free"


_BY_STATE: Final = HostOrder("state", lambda scope, now: STATES.index(state_of(scope, now)))
