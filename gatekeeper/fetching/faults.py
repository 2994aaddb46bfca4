"""Detection of local faults: our own network fails, not the sites.

One lost uplink must not record "unreachable" for every origin and start thousands of 30-day
timers; nor may a list of dead links stop the hosts that answer. The evidence:

for      name servers that don't answer, no route, connections and TLS that time out, 511: of
         20 distinct sites within 10 seconds, and 30 % of the sites tried; or of three sites
         that answered recently, if none of the others that did can be reached either
against  any response, a page's head as well as a robots.txt: it clears all suspicion and ends a
         fault immediately, and any attempt that began before it failed because of its site
neither  refused and reset connections, and names that don't exist: something responded, but
         it may have been a middlebox

A site is a registrable domain, or an address: 25 names of one domain, or of one machine, count
as one. During a fault nothing is recorded, and the records of the suspects' failures are undone.
Hosts that answered and have not failed since continue; the others wait for the probes.

`LocalFaults` is pure: no I/O, no clock; times are monotonic seconds. `Uplink` reports the results
of page requests to it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from ipaddress import ip_address
from itertools import takewhile
from typing import Final

import aiohttp
import msgspec

from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.fetching.outcomes import classify_error
from gatekeeper.urls import host_of, make_room

WINDOW_SECONDS: Final = 10.0
"""Seconds over which sites are counted."""
MIN_FAILED_SITES: Final = 20
"""The number of distinct sites that must have failed."""
MIN_FAILED_SHARE: Final = 0.30
"""The share of the sites tried that must have failed."""
MIN_RECENT_SITES: Final = 3
"""With so many failed sites that had answered recently, a local fault is suspected."""
RECENT_SECONDS: Final = 300.0
"""Seconds for which an answer of a site counts as recent."""
_MIN_QUIET_SECONDS: Final = 0.9
"""Seconds without any answer before a fault is declared; a false alarm raises them."""
_MAX_QUIET_SECONDS: Final = 5.0
"""The most seconds without any answer that a false alarm raises them to."""
_FALSE_ALARM_SECONDS: Final = 3.0
"""A fault ended by an answer within so many seconds was a false alarm: answers are just sparse."""
PROBE_SECONDS: Final = 3.0
"""Seconds that a probe may take to connect, and again until the response head."""
_FIRST_PROBE_SECONDS: Final = 1.0
_NEXT_PROBE_SECONDS: Final = 2.0
"""Seconds between probes while there are origins that answered recently, or were never asked, to
probe: the end of a fault is found within five seconds."""
_MAX_PROBE_SECONDS: Final = 60.0
"""The most seconds between probes."""
_RECENT_PER_PROBE: Final = 2
"""Origins that answered recently that are probed at a time."""
_MAX_PROBED: Final = 8
"""Origins probed at a time in total. An origin that was never asked before is probed once, as it
would have been fetched anyway."""
_MAX_UNDO: Final = 100
"""The maximum number of undo callbacks per suspect."""
_MAX_ORIGINS: Final = 10_000
"""The maximum number of origins in each collection here."""
_SILENT_SECONDS: Final = 8.0
"""Seconds without any answer after which requests in flight are examined."""
_IDLE_SECONDS: Final = 60.0
"""Seconds without an answer, or a request that waits for one, after which checks stop."""


class Uptime(msgspec.Struct, eq=False, gc=False):
    """Converts a monotonic moment into seconds during which our own network worked.

    Every record holds it, and the garbage collector does not track records: it has only numbers.
    """

    stopped_at: float = math.inf
    """When the fault in progress began."""
    lost: float = 0.0
    """Seconds of all earlier faults."""

    def __call__(self, now: float) -> float:
        """Return the seconds at a monotonic moment."""
        return min(now, self.stopped_at) - self.lost

    def resume(self, now: float) -> None:
        """End the fault in progress."""
        self.lost += now - self.stopped_at
        self.stopped_at = math.inf


class _Suspect(msgspec.Struct, eq=False):
    """An origin that failed."""

    group: int
    """The number of its site; see `LocalFaults._group_of_origin`."""
    recent: bool
    """It had answered recently when it failed."""
    evidence_at: float = -math.inf
    """When it last failed as it would with a lost uplink; -inf: it only gave no answer, for an
    unknown reason."""
    at: float = 0.0
    """When it last failed."""
    undo: list[Callable[[], object]] = []

    def is_evidence(self, now: float) -> bool:
        """Return True if it failed within the window as it would with a lost uplink."""
        return now - self.evidence_at <= WINDOW_SECONDS


class LocalFaults:
    """Weighs recent failures against answers, and decides when our own network is at fault."""

    def __init__(
        self,
        rng: random.Random,
        on_change: Callable[[bool], object] = lambda _on: None,
        on_answer: Callable[[], object] = lambda: None,
        on_doubt: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_change` is called when a fault begins (True) and when it ends (False), `on_answer`
        at an answer while `doubtful`, `on_doubt` when there are origins to probe."""
        self._rng = rng
        self._on_change = on_change
        self._on_answer = on_answer
        self._on_doubt = on_doubt
        self.answered_at: dict[str, float] = {}
        """Origin -> when it last answered, in order of time."""
        self.last_answer: float = float("-inf")
        self.doubtful: bool = True
        """An answer has to be reported: there are suspects, or a fault, or there was no answer for
        long."""
        self.active: bool = False
        """A local fault is in progress: no failure may be held against any origin."""
        self.count: int = 0
        """The number of faults so far."""
        self.unanswered: set[str] = set()
        """During a fault: hosts whose last attempt failed."""
        self._suspects: dict[str, _Suspect] = {}
        """Origins that failed lately, in order of time."""
        self._group_of: dict[str, int] = {}
        """Domain or address -> the number of its site; filled only while there are suspects."""
        self._awaited: set[str] | None = None
        """Origins being probed to find out whether our network fails; None: no probe is needed."""
        self._newcomers: dict[str, None] = {}
        """During a fault: origins that were never asked before."""
        self._rotation: deque[str] = deque(maxlen=MIN_FAILED_SITES)
        """During a fault: origins that are probed in rotation. They answered recently (`_recent`),
        or else are one suspect of each site."""
        self._recent = False
        self._involved: set[str] = set()
        """Origins that were suspected or probed during this fault."""
        self._quiet = _MIN_QUIET_SECONDS
        self._due: float | None = None
        """When to judge again, even without new evidence; during a fault, when to probe."""
        self._pause = _FIRST_PROBE_SECONDS
        self.uptime: Uptime = Uptime()
        """In its seconds outages are measured: no origin's 12 hours or 30 days elapse while our own
        network is down."""
        self._answered_count = (float("-inf"), 0)
        """When the sites that answered within the window were last counted, and their number."""

    # -- evidence --------------------------------------------------------------------

    def answered(self, origin: str, now: float) -> None:
        """Record an answer from the network, which refutes all suspicion."""
        before = self.last_answer
        # Removed first, to keep the order of answers: the oldest are evicted.
        if self.answered_at.pop(origin, None) is None:
            make_room(self.answered_at, _MAX_ORIGINS)
        self.answered_at[origin] = self.last_answer = now
        if self.doubtful:
            self._on_answer()
            self._clear()
            if self.active:
                if now - self.uptime.stopped_at <= _FALSE_ALARM_SECONDS:
                    self._quiet = min(max(self._quiet, 2 * (now - before)), _MAX_QUIET_SECONDS)
                self.active = False
                self.uptime.resume(now)
                self._on_change(False)

    def failed(
        self,
        origin: str,
        *,
        began: float,
        now: float,
        undo: Callable[[], object] | None = None,
        addresses: Iterable[str] = (),
        evidence: bool = True,
    ) -> bool:
        """Record an attempt that failed as with a lost uplink, or was silent for too long.

        `addresses`: those that were dialled, if any. `evidence` False: there was no answer for an
        unknown reason, such as a refusal, which is only a reason to probe origins that answered
        recently.

        Return True if a local fault is in progress. If this failure is found now or later to be
        part of a fault, `undo` is called; a suspect's callbacks are called latest first. During a
        fault `undo` is ignored.
        """
        if self.active:
            if len(self._involved) < _MAX_ORIGINS:
                self._involved.add(origin)
                self.unanswered.add(host_of(origin))
            self._newcomers.pop(origin, None)
            return True
        if self.last_answer >= began:
            return False
        self._forget_old(now)
        if self._awaited is not None and evidence:
            self._awaited.discard(origin)
        suspect = self._suspects.pop(origin, None)  # put back as the latest one
        if suspect is None:
            answered_at = self.answered_at.get(origin)
            recent = answered_at is not None and began - answered_at <= RECENT_SECONDS
            suspect = _Suspect(self._group_of_origin(origin, addresses), recent=recent)
        make_room(self._suspects, _MAX_ORIGINS)
        self._suspects[origin] = suspect
        suspect.at = now
        if evidence:
            suspect.evidence_at = now
        if undo is not None and len(suspect.undo) < _MAX_UNDO:
            suspect.undo.append(undo)
        self.doubtful = True
        return self._judge(now)

    def probe_inconclusive(self, origin: str, now: float) -> None:
        """Record a probe without evidence: a refusal, or its host was not due."""
        if self.active or self._awaited is None:
            return
        self._awaited.discard(origin)
        self._judge(now)

    # -- consequences ----------------------------------------------------------------

    def may_ask(self, origin: str, now: float) -> bool:
        """Return True if a retrieval may start. During a fault it may only for an origin that
        answered and has not failed since. The others wait for the probes; one that was never
        asked before is probed.
        """
        if not self.active:
            return True
        if origin in self.answered_at and host_of(origin) not in self.unanswered:
            return True
        if origin not in self._involved:
            first = not self._newcomers
            self._newcomers.pop(origin, None)  # the latest is probed first
            make_room(self._newcomers, _MAX_ORIGINS)
            self._newcomers[origin] = None
            if first and self._pause > _NEXT_PROBE_SECONDS:
                self._pause = _NEXT_PROBE_SECONDS
                self._set_probe(now)
                self._on_doubt()
        return False

    def retry_at(self, now: float) -> float:
        """Return the moment of the next attempt during a fault."""
        return max(self._due or now, now + _FIRST_PROBE_SECONDS)

    def pause(self, now: float) -> float | None:
        """Return the seconds until `next_probes` is due, or None if no probe is planned."""
        return None if self._due is None else max(0.0, self._due - now)

    def next_probes(self, now: float) -> list[str]:
        """Return the origins to probe now: those that answered recently, newcomers, suspects."""
        if not self.active and self._due is not None and now >= self._due:
            self._due = None
            self._judge(now)
        if not self.active:
            return sorted(self._awaited or ())
        chosen: list[str] = []
        while self._newcomers and len(chosen) < _MAX_PROBED - _RECENT_PER_PROBE:
            origin, _ = self._newcomers.popitem()
            self._involved.add(origin)
            chosen.append(origin)
        for _ in range(min(_RECENT_PER_PROBE if self._recent else 1, len(self._rotation))):
            self._rotation.rotate(-1)
            chosen.append(self._rotation[-1])
        swift = self._recent or self._newcomers
        self._pause = _NEXT_PROBE_SECONDS if swift else min(self._pause * 2, _MAX_PROBE_SECONDS)
        self._set_probe(now)
        return chosen

    # -- inside ----------------------------------------------------------------------

    def _judge(self, now: float) -> bool:
        """Begin a fault if the evidence is sufficient and return True. If it is only suspected,
        choose origins that answered recently to be probed."""
        quiet_at = self.last_answer + self._quiet
        if (now >= quiet_at or self._due is None) and self._many_sites_fail(now):
            if now >= quiet_at:
                return self._begin(now)
            self._due = quiet_at  # an answer may be about to arrive, and refute the fault
            self._on_doubt()
        recent = [one for one in self._suspects.values() if one.recent]
        if self._awaited is None:
            if len({one.group for one in recent}) < MIN_RECENT_SITES:
                return False
            self._awaited = self._witnesses(now)
            if self._awaited:
                self._due = now  # the probes
                self._on_doubt()
        if self._awaited:
            return False
        self._awaited = None
        if len({one.group for one in recent if one.is_evidence(now)}) >= MIN_RECENT_SITES:
            return self._begin(now)
        # The others were probed: something answered, or there was no evidence.
        self._suspects = {name: one for name, one in self._suspects.items() if one.is_evidence(now)}
        self._forget_old(now)
        return False

    def _witnesses(self, now: float) -> set[str]:
        """Return origins whose probes tell whether our network fails: those without an answer for
        an unknown reason, and a few others that answered recently."""
        hints = [n for n, one in self._suspects.items() if one.recent and not one.is_evidence(now)]
        chosen = set(hints[-MIN_RECENT_SITES:])
        sites = {site_of(origin) for origin in self._suspects}
        others = 0
        for origin, when in reversed(self.answered_at.items()):
            if others >= MIN_RECENT_SITES or now - when > RECENT_SECONDS:
                break
            if site_of(origin) not in sites:
                sites.add(site_of(origin))
                chosen.add(origin)
                others += 1
        return chosen

    def _begin(self, now: float) -> bool:
        suspects = self._suspects.copy()
        recent = [
            origin
            for origin, when in reversed(self.answered_at.items())
            if now - when <= RECENT_SECONDS
        ]
        recent.sort(key=suspects.__contains__)  # those that did not fail first
        self._clear()
        self.active = True
        self.doubtful = True
        self.uptime.stopped_at = now
        self.count += 1
        self._recent = bool(recent)
        sites = {one.group: origin for origin, one in suspects.items()}
        self._rotation.extend(recent[:MIN_FAILED_SITES] or sites.values())
        self._involved.update(suspects)
        self.unanswered.update(map(host_of, suspects))
        self._pause = _FIRST_PROBE_SECONDS
        self._set_probe(now)
        self._on_change(True)
        for one in suspects.values():
            for undo in reversed(one.undo):
                undo()
        self._on_doubt()
        return True

    def _clear(self) -> None:
        """Clear all suspicion."""
        self.doubtful = False
        self._awaited = self._due = None
        self._suspects.clear()
        self._group_of.clear()
        self._newcomers.clear()
        self._rotation.clear()
        self._involved.clear()
        self.unanswered.clear()

    def _group_of_origin(self, origin: str, addresses: Iterable[str]) -> int:
        """Return the number of the origin's site, shared by all origins of a domain or address."""
        names = (site_of(origin), *addresses)
        known = [self._group_of[name] for name in names if name in self._group_of]
        group = known[0] if known else len(self._group_of) + 1
        for name in names:
            self._group_of.setdefault(name, group)
        return group

    def _many_sites_fail(self, now: float) -> bool:
        """Return True if enough sites have failed within the window, and enough of those tried."""
        failed = len({one.group for one in self._suspects.values() if one.is_evidence(now)})
        if failed < MIN_FAILED_SITES:
            return False
        return failed >= MIN_FAILED_SHARE * (failed + self._answered_sites(now))

    def _answered_sites(self, now: float) -> int:
        """Return the number of sites that answered within the window."""
        counted_at, sites = self._answered_count
        if not counted_at <= now < counted_at + 1.0:  # counted once a second, as they may be many
            recent = [one for one, when in self.answered_at.items() if now - when <= WINDOW_SECONDS]
            sites = len({site_of(origin) for origin in recent})
            self._answered_count = now, sites
        return sites

    def _forget_old(self, now: float) -> None:
        suspects = self._suspects
        for origin in [*takewhile(lambda one: now - suspects[one].at > WINDOW_SECONDS, suspects)]:
            del suspects[origin]
        if not suspects:
            self._clear()

    def _set_probe(self, now: float) -> None:
        self._due = now + self._pause * self._rng.uniform(0.8, 1.2)


@lru_cache(20_000)
def site_of(origin: str) -> str:
    """Return an origin's site: the registrable domain of its host, or its address.

    The domain is found by the Public Suffix List if the extra `psl` is installed; else it is the
    last two labels.

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


@dataclass(eq=False)
class Uplink:
    """Reports answers, failures and silence of page requests to `LocalFaults`.

    The response head of a page is as good an answer as a robots.txt: it ends a local fault, and
    marks an origin that can be probed when one is suspected. A request without an answer is a
    hint; one that can't be connected, or is silent for long while no others are answered either,
    is evidence. `LocalFaults` weighs it.
    """

    faults: LocalFaults
    clock: Clock
    sent: Callable[[], Iterable[tuple[str, float]]]
    """Returns the origins of the requests without any answer yet, and since when (monotonic
    seconds)."""
    busy: Callable[[], bool]
    """Returns True if any lease is open."""
    forgive: Callable[[str, str], object]
    """Takes back the error that a request was counted as, by its host and URL."""

    def __post_init__(self) -> None:
        self._timer = SingleTimer(self.clock, self._check)

    def wake(self) -> None:
        """After a request or an answer: start checking the open leases, until there are none and
        have been none for a while."""
        if self._timer.when == math.inf:
            self._timer.set(self.clock.monotonic() + _SILENT_SECONDS)

    def close(self) -> None:
        """Stop checking."""
        self._timer.hold()

    def unanswered(self, origin: str, host: str, url: str, began: float) -> None:
        """Record a request that ended without an answer and was counted as its host's error."""
        now, undo = self.clock.monotonic(), partial(self.forgive, host, url)
        self.faults.failed(origin, began=began, now=now, undo=undo, evidence=False)

    def unreached(self, lease: object, error: BaseException, *, connected: bool = True) -> None:
        """Record a failed request, if it failed as it would with a lost uplink.

        `connected`: False if it failed before it could be sent; errors of aiohttp tell that
        themselves.
        """
        origin = getattr(lease, "origin", None)
        if origin is None:
            return  # not a lease of this package
        connected = connected and not isinstance(error, aiohttp.ConnectionTimeoutError)
        if classify_error(error, connected=connected).row.local:
            began: float = getattr(lease, "started_at", 0.0)
            self.faults.failed(origin, began=began, now=self.clock.monotonic())

    def _check(self) -> None:
        """Unless there was an answer recently, report each request that was sent long ago."""
        faults, now = self.faults, self.clock.monotonic()
        if not self.busy() and now - faults.last_answer >= _IDLE_SECONDS:
            faults.doubtful = True
            return
        moment = faults.last_answer + _SILENT_SECONDS
        if moment <= now:
            moment = now + _SILENT_SECONDS
            for origin, began in self.sent():
                if began + _SILENT_SECONDS <= now:
                    faults.failed(origin, began=began, now=now)
                else:
                    moment = min(moment, began + _SILENT_SECONDS)
        self._timer.set(moment)
