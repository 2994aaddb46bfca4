"""`HostIndex`: sorted and filtered pages of the hosts in memory.

There may be a million hosts. The index keeps their names sorted, updated with each host that comes
or goes. Sorting or filtering by anything else scans every host, in slices, so that no other
answer waits for more than a millisecond. If there are many hosts, a request waits for the scan for
`SCAN_WAIT` seconds at most, then answers with the result so far, marked as incomplete. The scan
goes on for the next request.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple

from gatekeeper.clock import Clock, OwnedTasks
from gatekeeper.pacing.scopes import Scope
from gatekeeper.pacing.waiters import HELD_UP, STATES, HostState

SCAN_WAIT: Final = 0.01
"""Seconds that a request waits for a scan of all hosts."""
MIN_REUSE: Final = 1.0
"""Minimum seconds for which the result of a scan of many hosts is reused."""
_MAX_RESCAN: Final = 10_000
"""Up to this many hosts are scanned again for each request."""
_CHUNK: Final = 1024
"""Hosts scanned before the event loop runs other tasks; sometimes twice as many."""
_MAX_SCANS: Final = 8
_REUSE_FACTOR: Final = 10.0
"""A result is reused for this many times the duration of its scan. So scans take a tenth of the
time at most, however many requests there are."""

DEEPEST: Final = 10_000
"""The last position that pages of filtered or sorted hosts can reach."""

MAX_NAMED: Final = 5
"""The number of hosts of a state that are named beside their count."""

_MAX_STALE: Final = 30.0
"""Seconds for which an older result may be used while a new scan is running."""

_FOLLOWER: Final = "follower"
"""The key of the task that updates the index."""
_name = attrgetter("name")


def _last_name(chunk: list[Scope]) -> str:
    return chunk[-1].name if chunk else ""


_Run = list[tuple[Any, Any]]
"""Names of hosts with their keys, or states with their numbers."""
_Examine = Callable[[list[Scope], float], _Run]
"""Returns what a scan wants to know of some hosts at a monotonic time."""


class SortedHosts:
    """Scopes by name, in short lists: adding one to a million moves a thousand or two at most.

    >>> from gatekeeper.pacing.host_settings import ScopeSettings
    >>> from gatekeeper.pacing.scopes import Scope
    >>> hosts = SortedHosts()
    >>> for name in ("b", "a", "c", "b"):
    ...     hosts.put(name, Scope(name, ScopeSettings()))
    >>> hosts.put("c", None)
    >>> len(hosts), hosts.names(0, 10), hosts.names(0, 1, descending=True)
    (2, ['a', 'b'], ['b'])
    """

    def __init__(self) -> None:
        self._chunks: list[list[Scope]] = [[]]
        """None is empty, unless it is the only one."""

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def put(self, name: str, scope: Scope | None) -> None:
        """Set the scope of a name; None removes it."""
        chunks = self._chunks
        at = min(bisect_left(chunks, name, key=_last_name), len(chunks) - 1)
        chunk = chunks[at]
        place = bisect_left(chunk, name, key=_name)
        known = any(one.name == name for one in chunk[place : place + 1])
        chunk[place : place + known] = [] if scope is None else [scope]
        if len(chunk) > 2 * _CHUNK:
            chunks.insert(at + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]
        if not chunk and len(chunks) > 1:
            del chunks[at]

    def names(self, first: int, count: int, *, descending: bool = False) -> list[str]:
        """Return `count` names from the position `first` on."""
        found: list[str] = []
        for chunk in reversed(self._chunks) if descending else self._chunks:
            if first < len(chunk):
                scopes = chunk[::-1] if descending else chunk
                found += map(_name, scopes[first : first + count - len(found)])
            first = max(0, first - len(chunk))
            if len(found) >= count:
                break
        return found

    def chunks(self) -> Iterator[list[Scope]]:
        """Yield the scopes in order, in lists that take less than a millisecond to examine.

        Scopes may come and go meanwhile: the others are yielded, each once.
        """
        last = ""
        while (at := bisect_right(self._chunks, last, key=_last_name)) < len(self._chunks):
            chunk = self._chunks[at]
            first = bisect_right(chunk, last, key=_name)
            scopes = chunk[first : first + _CHUNK // 2]
            last = scopes[-1].name
            yield scopes


class HostPage(NamedTuple):
    """One page of hosts."""

    hosts: list[str]
    total: int
    """Hosts that pass the filter, among those scanned so far."""
    complete: bool
    """True if all hosts were scanned. If not, the scan goes on, and the next page is more exact."""


class HostStates(NamedTuple):
    """The hosts by state, as far as they were scanned."""

    counts: dict[str, int]
    """The number of hosts in each state but "free"."""
    held_up: dict[str, list[str]]
    """The names of up to `MAX_NAMED` hosts in each state of `HELD_UP`."""
    complete: bool
    """True if all hosts were scanned."""


class HostOrder(NamedTuple):
    """A sort order of hosts other than by name."""

    name: str
    """Identifies the order, so that requests with the same order share a scan."""
    key: Callable[[Scope, float], float]
    """Returns the sort key of a scope at a monotonic time."""


@dataclass(eq=False)
class _Scan:
    """A scan of all hosts in slices, and its result so far: one sorted run per slice."""

    up_to_date: bool
    """True if the index was up to date when the scan started, so that it covers every host."""
    previous: _Scan | None
    """A complete scan that answers while this one is running."""
    runs: list[_Run] = field(default_factory=list)
    complete: bool = False
    fresh_until: float = inf
    """Until when its result is reused."""
    task: asyncio.Task[None] = field(init=False)

    async def run(self, hosts: SortedHosts, examine: _Examine, clock: Clock) -> None:
        began = clock.monotonic()
        for scopes in hosts.chunks():
            if run := sorted(examine(scopes, began)):
                self.runs.append(run)
            await asyncio.sleep(0)
        now = clock.monotonic()
        self.fresh_until = now + max(MIN_REUSE, _REUSE_FACTOR * (now - began))
        self.complete, self.previous = True, None


class HostIndex:
    """The hosts of one gate, in pages.

    `scopes` are the scheduler's scopes, which are only read here. `changes` is the list to which
    the scheduler adds scopes that came or went; the index empties it. `shared` are prefixes of the
    names of scopes that are not hosts. `state_of` returns the state of a host at a monotonic time.
    """

    def __init__(
        self,
        scopes: Mapping[str, Scope],
        changes: list[Scope],
        clock: Clock,
        state_of: Callable[[Scope, float], HostState],
        *,
        shared: tuple[str, ...],
    ) -> None:
        self._scopes = scopes
        self._state_of = state_of
        self._changes = changes
        self._clock = clock
        self._shared = shared
        self._hosts = SortedHosts()
        changes += scopes.values()
        self._scans: dict[tuple[object, ...], _Scan] = {}
        self._tasks = OwnedTasks()

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def pending(self) -> int:
        """The number of hosts that came or went and are not in the index yet."""
        return len(self._changes)

    def follow(self) -> None:
        """Update the index: a thousand changes now, the others in the background.

        It is called regularly, so that requests need not wait for it.
        """
        self._apply(_CHUNK)
        if self.pending and self._tasks.find(_FOLLOWER) is None:
            self._tasks.start(self._apply_all(), _FOLLOWER)

    async def close(self) -> None:
        """Cancel the background tasks and wait for their end."""
        await self._tasks.close()
        self._scans.clear()

    async def _apply_all(self) -> None:
        while self.pending:
            self._apply(_CHUNK // 2)
            await asyncio.sleep(0)

    def _apply(self, most: int) -> None:
        part = self._changes[-most:]
        del self._changes[-most:]
        for scope in part:
            if not scope.name.startswith(self._shared):
                self._hosts.put(scope.name, self._scopes.get(scope.name))

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
        """Return the names of `count` hosts from the position `first` on.

        `q` is a substring of the name, `state` one of `STATES`, or "any"; with `order` None the
        hosts are sorted by name. Raises ValueError for a page beyond `DEEPEST`, except for the
        unfiltered list by name.
        """
        self.follow()
        follower = self._tasks.find(_FOLLOWER)
        if follower is not None and len(self._scopes) <= _MAX_RESCAN:
            await asyncio.wait((follower,))  # a request that is cancelled does not cancel it
        settled = not self.pending
        if order is None and state == "any" and not q:
            names = self._hosts.names(first, count, descending=descending)
            return HostPage(names, len(self._hosts), settled)
        if first + count > DEEPEST:
            raise ValueError(f"only the first {DEEPEST} hosts are sorted: narrow the filter")
        sign = -1.0 if descending else 1.0

        def ranked(scopes: list[Scope], now: float) -> _Run:
            return [
                (0.0 if order is None else sign * order.key(scope, now), scope.name)
                for scope in scopes
                if q in scope.name and (state == "any" or self._state_of(scope, now) == state)
            ]

        scan = await self._scanned((q, state, order and order.name, descending), ranked)
        flip = order is None and descending
        runs = [reversed(run) if flip else run for run in scan.runs]
        found = islice(merge(*runs, reverse=flip), first, first + count)
        total = sum(map(len, scan.runs))
        complete = settled and scan.complete and scan.up_to_date
        return HostPage([name for _, name in found], total, complete)

    async def states(self, key: Callable[[Scope], float] = lambda _: 0.0) -> HostStates:
        """Count the hosts of each state. Of those held up, the ones with the least `key` are
        named, and of equal ones the first by name."""
        self.follow()

        def counted(scopes: list[Scope], now: float) -> _Run:
            found: dict[str, list[tuple[float, str]]] = defaultdict(list)
            for scope in scopes:
                if (state := self._state_of(scope, now)) != STATES[0]:
                    found[state].append((key(scope), scope.name))
            return [
                (state, (len(hosts), nsmallest(MAX_NAMED, hosts) if state in HELD_UP else []))
                for state, hosts in found.items()
            ]

        scan = await self._scanned((), counted)
        counts: dict[str, int] = dict.fromkeys(STATES[1:], 0)
        named: dict[str, list[tuple[float, str]]] = {state: [] for state in HELD_UP}
        for run in scan.runs:
            for state, (count, first) in run:
                counts[state] += count
                if first:
                    named[state] = nsmallest(MAX_NAMED, named[state] + first)
        held_up = {state: [name for _, name in first] for state, first in named.items()}
        complete = scan.complete and scan.up_to_date and not self.pending
        return HostStates(counts, held_up, complete)

    async def _scanned(self, name: tuple[object, ...], examine: _Examine) -> _Scan:
        """Return the scan of this name that is running or recent, else start a new one.

        If there are many hosts, it is waited for for `SCAN_WAIT` seconds at most; and while a new
        scan is running, an older result that is not too old is returned.
        """
        now, few = self._clock.monotonic(), len(self._scopes) <= _MAX_RESCAN
        scan = self._scans.get(name)
        reusable = scan is not None and not few and (scan.up_to_date or self.pending > 0)
        if scan is None or (scan.complete and not (reusable and now < scan.fresh_until)):
            previous = scan if scan and reusable and now < scan.fresh_until + _MAX_STALE else None
            while len(self._scans) >= _MAX_SCANS:
                self._scans.pop(next(iter(self._scans))).task.cancel()
            scan = self._scans[name] = _Scan(not self.pending, previous)
            scan.task = self._tasks.start(scan.run(self._hosts, examine, self._clock))
        if scan.previous is None and not scan.task.done():
            await asyncio.wait((scan.task,), timeout=None if few else SCAN_WAIT)
        return scan.previous or scan
