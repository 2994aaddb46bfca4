"""Telling our own uplink's failure from the sites'.

One lost uplink must not write "unreachable" on every origin and start thousands of 30-day
timers; nor may a list of dead links stop the hosts that answer. What is evidence of what:

for      name servers that don't answer, no route, connections and TLS that time out, 511: of
         20 distinct sites within 10 seconds, 30 % of those that were tried; or of three sites
         that answered lately, where no other one that did can be reached either
against  any answer, a page's head as much as a robots.txt: it clears all suspicion, ends a
         fault at once, and whatever began to fail before it came is the site's own affair
neither  refused and reset connections, and names that don't exist: something answered, but
         a middlebox may have

A site is a registrable domain, or an address: 25 names of one domain, or of one machine, are
one. While a fault is on, nothing is recorded, what was recorded of the suspects is undone,
hosts that answered and have not failed since go on, and the others wait for the probes.

`LocalFaults` is pure: no I/O, no clock; times are monotonic seconds. `Uplink` tells it what became
of the requests for pages.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from ipaddress import ip_address
from operator import itemgetter
from typing import Final

import aiohttp
import msgspec

from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.config import FetchConfig
from gatekeeper.fetching.outcomes import classify
from gatekeeper.urls import host_of, make_room

WINDOW: Final = 10.0
"""Seconds over which sites are counted."""
LEAST: Final = 20
"""Distinct sites that must have failed."""
SHARE: Final = 0.30
"""Share of those tried that must have failed."""
FEW: Final = 3
"""Failed sites, of those that answered lately, from which on it may be us."""
LATELY: Final = 300.0
"""Seconds for which a site that answered counts as one that answers."""
_QUIET: Final = 0.9
"""Seconds without any answer before a fault is told; a false alarm makes them more ..."""
_MOST_QUIET: Final = 5.0
"""... up to this."""
_FALSE_ALARM: Final = 3.0
"""A fault that an answer ended so soon was none: answers just come so far apart."""
PATIENCE: Final = 3.0
"""Seconds that a probe may take to connect, and then to its head."""
_FIRST_PROBE: Final = 1.0
_NEXT_PROBE: Final = 2.0
"""Seconds between probes while somebody is there to be asked who answered lately, or who was
never asked: the end of a fault is found within five seconds."""
_LAST_PROBE: Final = 60.0
_AT_ONCE: Final = 2
"""Origins that answered lately that are probed at once."""
_NEWCOMERS: Final = 8
"""Origins probed at once in all; one that was never asked before is asked once, as it would be
anyway."""
_MOST_UNDONE: Final = 100
_MOST: Final = 10_000
"""Origins remembered in any list here."""
_SILENCE: Final = 8.0
"""Seconds without any answer after which requests under way are looked at."""
_IDLE: Final = 60.0
"""Seconds without an answer, nor anything that waits for one, after which nobody looks."""
_USUAL: Final = FetchConfig()


class _Suspect(msgspec.Struct, eq=False):
    """An origin that failed as a lost uplink would make it fail."""

    group: int
    lately: bool
    """It had answered lately."""
    at: float = 0.0
    """When it last failed."""
    undo: list[Callable[[], object]] = []


class LocalFaults:
    """Weighs who failed lately against who answered; says when it is us."""

    def __init__(
        self,
        rng: random.Random,
        on_change: Callable[[bool], object] = lambda _on: None,
        on_answer: Callable[[], object] = lambda: None,
        on_doubt: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_change` is called when a fault begins (True) and when it is over, `on_answer` at
        the first answer in a while, `on_doubt` when there is somebody to be probed."""
        self._rng = rng
        self._on_change = on_change
        self._on_answer = on_answer
        self._on_doubt = on_doubt
        self.heard: dict[str, float] = {}
        """Origin -> when it last answered."""
        self.last_answer: float = float("-inf")
        self.doubtful: bool = True
        """Somebody is suspected, or a fault is on, or nobody was heard for long: an answer has
        to be told."""
        self.active: bool = False
        """A local fault is on: nothing may be held against any origin."""
        self.count: int = 0
        """Faults so far."""
        self.unanswered: set[str] = set()
        """Hosts whose last attempt failed, while a fault is on."""
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._groups: Counter[int] = Counter()
        self._group_of: dict[str, int] = {}
        """Domain or address -> the number of its site; while anybody is suspected."""
        self._hints: OrderedDict[str, _Suspect] = OrderedDict()
        """Origins that gave no answer, nobody knows why."""
        self._pending: set[str] | None = None
        """Origins being asked whether it is us; None: nobody need be asked yet."""
        self._handed_out = False
        """Whoever sends the probes knows of them."""
        self._living: deque[str] = deque()
        """During a fault: origins that answered lately, to be probed by turns."""
        self._newcomers: OrderedDict[str, None] = OrderedDict()
        self._probes: deque[str] = deque(maxlen=LEAST)
        self._met: set[str] = set()
        """Origins that were suspected or probed in this fault."""
        self._quiet = _QUIET
        self._judge_at: float | None = None
        """When to judge again, though nothing else happens."""
        self._probe_at = 0.0
        self._pause = _FIRST_PROBE
        self._began = 0.0
        self._lasted = 0.0
        self._domains = (float("-inf"), 0)
        """When it was last counted how many sites answered within the window; how many."""

    # -- evidence --------------------------------------------------------------------

    def answered(self, origin: str, now: float) -> None:
        """Something came from the network: all suspicion is contradicted."""
        before = self.last_answer
        self.heard.pop(origin, None)  # in the order in which they answered: the oldest go
        make_room(self.heard, _MOST)
        self.heard[origin] = self.last_answer = now
        if self.doubtful:
            self._on_answer()
            self._clear()
            if self.active:
                if now - self._began <= _FALSE_ALARM:
                    self._quiet = min(max(self._quiet, 2 * (now - before)), _MOST_QUIET)
                self.active = False
                self._lasted += now - self._began
                self._on_change(False)

    def failed(
        self,
        origin: str,
        *,
        began: float,
        now: float,
        undo: Callable[[], object] | None = None,
        addresses: Iterable[str] = (),
    ) -> bool:
        """An attempt failed as a lost uplink would make it fail, or is silent for too long.

        `addresses`: those that were dialled, if any. Returns whether the fault is ours. If
        that turns out now or later, `undo` of every suspect but those of a running fault is
        called, the latest first.
        """
        if self.active:
            self._failed_again(origin)
            return True
        if self.last_answer >= began:
            return False
        self._forget_old(now)
        if self._pending is not None:
            self._pending.discard(origin)
        self._noted(self._suspects, origin, began, now, undo, addresses)
        return self._judge(now)

    def unanswered_by(
        self, origin: str, *, began: float, now: float, undo: Callable[[], object] | None = None
    ) -> None:
        """No answer came from an origin, and nobody knows why: it may have refused.

        That proves nothing; but of origins that answered lately it is a reason to ask them.
        """
        if self.active:
            self._failed_again(origin)
        elif self.last_answer < began:
            self._forget_old(now)
            self._noted(self._hints, origin, began, now, undo, ())
            self._judge(now)

    def given_up(self, origin: str, now: float) -> None:
        """A probe came to nothing that is evidence: a refusal, or its host's turn never came."""
        if self.active or self._pending is None:
            return
        self._pending.discard(origin)
        self._judge(now)

    def rest(self) -> None:
        """Nobody has asked for long: the next answer is to be told."""
        self.doubtful = True

    # -- what follows from it --------------------------------------------------------

    def uptime(self, now: float) -> float:
        """Monotonic seconds without those of local faults: what an outage is measured in.

        While nothing can be asked nobody's 12 hours or 30 days go by.
        """
        return (self._began if self.active else now) - self._lasted

    def may_ask(self, origin: str, now: float) -> bool:
        """Whether a retrieval may start: during a fault, of an origin that answered lately and
        has not failed since. The others wait for the probes, and newcomers are among them.
        """
        if not self.active:
            return True
        if origin in self.heard and host_of(origin) not in self.unanswered:
            return True
        if origin not in self._met:
            first = not self._newcomers
            self._newcomers[origin] = None
            self._newcomers.move_to_end(origin)
            if len(self._newcomers) > _MOST:
                self._newcomers.popitem(last=False)
            if first and self._pause > _NEXT_PROBE:
                self._pause = _NEXT_PROBE
                self._set_probe(now)
                self._on_doubt()
        return False

    def retry_at(self, now: float) -> float:
        """When to ask again during a fault."""
        return max(self._probe_at, now + _FIRST_PROBE)

    def pause(self, now: float) -> float | None:
        """Seconds until somebody is to be probed; None: nobody is."""
        if self.active:
            return max(0.0, self._probe_at - now)
        if self._pending and not self._handed_out:
            return 0.0
        return None if self._judge_at is None else max(0.0, self._judge_at - now)

    def to_ask(self, now: float) -> list[str]:
        """Whom to probe now: who answered lately first, then newcomers, then the suspects."""
        if self._judge_at is not None and now >= self._judge_at:
            self._judge_at = None
            self._judge(now)
        if not self.active:
            self._handed_out = True
            return sorted(self._pending or ())
        chosen: list[str] = []
        for _ in range(min(_AT_ONCE, len(self._living))):
            self._living.rotate(-1)
            chosen.append(self._living[-1])
        while self._newcomers and len(chosen) < _NEWCOMERS:
            origin, _ = self._newcomers.popitem()
            self._met.add(origin)
            chosen.append(origin)
        if self._probes and not self._living:
            self._probes.rotate(-1)
            chosen.append(self._probes[-1])
        swift = self._living or self._newcomers
        self._pause = _NEXT_PROBE if swift else min(self._pause * 2, _LAST_PROBE)
        self._set_probe(now)
        return chosen

    def close(self) -> None:
        """Undo nothing any more: what was recorded is of no interest to anybody."""
        for suspect in (*self._suspects.values(), *self._hints.values()):
            suspect.undo.clear()

    # -- inside ----------------------------------------------------------------------

    def _noted(
        self,
        among: OrderedDict[str, _Suspect],
        origin: str,
        began: float,
        now: float,
        undo: Callable[[], object] | None,
        addresses: Iterable[str],
    ) -> _Suspect:
        suspect = among.get(origin)
        if suspect is None:
            heard = self.heard.get(origin)
            lately = heard is not None and began - heard <= LATELY
            suspect = among[origin] = _Suspect(self._group(origin, addresses), lately=lately)
            if among is self._suspects:
                self._groups[suspect.group] += 1
        suspect.at = now
        if undo is not None and len(suspect.undo) < _MOST_UNDONE:
            suspect.undo.append(undo)
        among.move_to_end(origin)
        self.doubtful = True
        return suspect

    def _judge(self, now: float) -> bool:
        """Is it us? Begin the fault if so; where it may be, ask some who answered lately."""
        sites = len(self._groups)
        if sites >= LEAST and sites >= SHARE * self._tried(now):
            quiet_at = self.last_answer + self._quiet
            if now >= quiet_at:
                return self._begin(now)
            if self._judge_at is None:  # an answer may be about to come: it is no fault then
                self._judge_at = quiet_at
                self._on_doubt()
        few = {one.group for one in self._suspects.values() if one.lately}
        if self._pending is None:
            hints = {one.group for one in self._hints.values() if one.lately}
            if len(few | hints) < FEW:
                return False
            self._pending = self._witnesses(now)
            self._handed_out = False
            if self._pending:
                self._on_doubt()
        if self._pending:
            return False
        self._pending = None
        if len(few) >= FEW:
            return self._begin(now)
        self._hints.clear()  # they were asked: something answered, or nothing is known
        self._forget_old(now)
        return False

    def _witnesses(self, now: float) -> set[str]:
        """Who can say whether it is us: those who gave no answer, nobody knows why, and a few
        others that answered lately."""
        chosen = {origin for origin, one in [*self._hints.items()][-FEW:] if one.lately}
        sites = {site_of(origin) for origin in (*self._suspects, *self._hints)}
        others = 0
        for origin, when in sorted(self.heard.items(), key=itemgetter(1), reverse=True):
            if others >= FEW or now - when > LATELY:
                break
            if site_of(origin) not in sites:
                sites.add(site_of(origin))
                chosen.add(origin)
                others += 1
        return chosen

    def _begin(self, now: float) -> bool:
        suspects = [*self._suspects.items(), *self._hints.items()]
        failed = {origin for origin, _ in suspects}
        recent = [one for one in self.heard.items() if now - one[1] <= LATELY]
        recent.sort(key=lambda one: (one[0] in failed, -one[1]))  # who did not fail goes first
        self._clear()
        self.active = True
        self.doubtful = True
        self._began = now
        self.count += 1
        self._living.extend(origin for origin, _ in recent[:LEAST])
        self._living.rotate(_AT_ONCE - 1)
        self._probes.extend({one.group: origin for origin, one in suspects}.values())
        self._met.update(failed)
        self.unanswered.update(map(host_of, failed))
        self._pause = _FIRST_PROBE
        self._set_probe(now)
        self._on_change(True)
        for _, one in suspects:
            for undo in reversed(one.undo):
                undo()
        self._on_doubt()
        return True

    def _failed_again(self, origin: str) -> None:
        if len(self._met) < _MOST:
            self._met.add(origin)
            self.unanswered.add(host_of(origin))
        self._newcomers.pop(origin, None)

    def _clear(self) -> None:
        """Nobody is suspected of anything."""
        self.doubtful = False
        self._pending = self._judge_at = None
        for one in (
            *(self._suspects, self._hints, self._groups, self._group_of),
            *(self._living, self._newcomers, self._probes, self._met, self.unanswered),
        ):
            one.clear()

    def _group(self, origin: str, addresses: Iterable[str]) -> int:
        """The number of the origin's site, the same for all of a domain or of an address."""
        names = (site_of(origin), *map(_plain, addresses))
        known = [self._group_of[name] for name in names if name in self._group_of]
        group = known[0] if known else len(self._group_of) + 1
        for name in names:
            self._group_of.setdefault(name, group)
        return group

    def _tried(self, now: float) -> int:
        """Sites that answered or failed within the window."""
        at, domains = self._domains
        if not at <= now < at + 1.0:  # they may be many, and so may the failures
            recent = [one for one, when in self.heard.items() if now - when <= WINDOW]
            domains = len({site_of(origin) for origin in recent})
            self._domains = now, domains
        return domains + len(self._groups)

    def _forget_old(self, now: float) -> None:
        for group in (self._suspects, self._hints):
            while group:
                origin, oldest = next(iter(group.items()))
                if now - oldest.at <= WINDOW and len(group) <= _MOST:
                    break
                del group[origin]
                if group is self._suspects:
                    self._groups[oldest.group] -= 1
                    if not self._groups[oldest.group]:
                        del self._groups[oldest.group]
        if not self._suspects and not self._hints:
            self._clear()

    def _set_probe(self, now: float) -> None:
        self._probe_at = now + self._pause * self._rng.uniform(0.8, 1.2)


@lru_cache(20_000)
def site_of(origin: str) -> str:
    """What counts as one site: the registrable domain of an origin's host, or its address.

    By the Public Suffix List where the extra `psl` is installed, else the last two labels.

    >>> site_of("https://www.example.com:8443"), site_of("http://[::1]")
    ('example.com', '::1')
    """
    host = host_of(origin) or origin
    try:
        return ip_address(host).compressed
    except ValueError:
        pass
    found = _private_suffix()(host)
    return found or ".".join(host.split(".")[-2:])


@cache
def _private_suffix() -> Callable[[str], str | None]:
    try:
        from publicsuffixlist import PublicSuffixList  # noqa: PLC0415 - an optional extra
    except ImportError:
        return lambda _host: None
    suffix: Callable[[str], str | None] = PublicSuffixList().privatesuffix
    return suffix


def _plain(address: str) -> str:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)


class Uplink:
    """Tells what the pages' answers, failures and silence say about our own network.

    The head of a page is as good an answer as a robots.txt: it ends a fault of our own, and
    shows whom to ask when one is suspected. A request that gets none is a hint; one that can't
    be connected, or of which nothing is heard for long while nobody else answers either, is
    evidence. What it is worth is for `LocalFaults` to say.
    """

    def __init__(
        self,
        faults: LocalFaults,
        clock: Clock,
        sent: Callable[[], Iterable[tuple[str, float]]],
        *,
        busy: Callable[[], bool],
        forgive: Callable[[str], object],
    ) -> None:
        """`sent`: the origins of the requests that were sent and of which nothing was heard, and
        since when (monotonic seconds). `busy`: is any lease open? `forgive`: take back what a
        request of the host was counted as."""
        self.faults = faults
        self._clock = clock
        self._sent = sent
        self._busy = busy
        self._forgive = forgive
        self._timer = SingleTimer(clock, self._look)

    def wake(self) -> None:
        """Something was sent, or answered: look after the open leases for as long as there are
        any, and a while longer."""
        if self._timer.when == math.inf:
            self._timer.set(self._clock.monotonic() + _SILENCE)

    def close(self) -> None:
        """Look no more."""
        self._timer.hold()

    def unanswered(self, origin: str, host: str, began: float) -> None:
        """A request ended without an answer, and was counted as an error of its host."""
        now, undo = self._clock.monotonic(), partial(self._forgive, host)
        self.faults.unanswered_by(origin, began=began, now=now, undo=undo)

    def unreached(self, lease: object, error: BaseException, *, connected: bool = True) -> None:
        """A request of ours failed with that error: as a lost uplink would make it fail?

        `connected` False: it failed before it could be sent, as an error of aiohttp says itself.
        """
        origin = getattr(lease, "origin", None)
        if origin is None:
            return  # not a lease of ours
        connected = connected and not isinstance(error, aiohttp.ConnectionTimeoutError)
        if classify(error=error, config=_USUAL, connected=connected).row.local:
            began: float = getattr(lease, "started_at", 0.0)
            self.faults.failed(origin, began=began, now=self._clock.monotonic())

    def _look(self) -> None:
        """Has anybody answered? If not, each request that went out long ago is evidence."""
        faults, now = self.faults, self._clock.monotonic()
        if not self._busy() and now - faults.last_answer >= _IDLE:
            faults.rest()
            return
        moment = faults.last_answer + _SILENCE
        if moment <= now:
            moment = now + _SILENCE
            for origin, began in self._sent():
                if began + _SILENCE <= now:
                    faults.failed(origin, began=began, now=now)
                else:
                    moment = min(moment, began + _SILENCE)
        self._timer.set(moment)
