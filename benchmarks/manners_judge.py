"""Counts what a crawler did wrong, from the servers' log alone.

It knows the hosts and the log, nothing of the crawlers, and shares no code with gatekeeper.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from benchmarks.manners_site import BY_REDIRECT, PRIVATE, WAYS, Host, Kind, Seen, World

__all__ = ["Crawl", "Restart", "judge", "judge_restart"]

SLACK = 0.1
"""Seconds by which a gap may be shorter than asked for: a busy machine delays packets."""
CROSSING = 0.1
"""Seconds after a refusal in which another page's request may have been sent before it was read."""


@dataclass(frozen=True, slots=True)
class Crawl:
    """What an undisturbed crawl did. Each count is of requests unless it says otherwise."""

    disallowed: int
    """Disallowed URLs of the list that were requested."""
    hops: int
    """Redirects to a disallowed page that were followed."""
    short_gaps: int
    """Gaps between pages of a host that were shorter than its Crawl-delay."""
    gaps: int
    shortest: float | None
    """Seconds of the shortest such gap; None without any."""
    in_429: int
    """Requests to a host that had answered 429, before its Retry-After was over."""
    in_503: int
    """The same for 503."""
    robots_503: int
    """Pages requested of hosts whose robots.txt answered 503."""
    robots_fetches: float
    """Requests for robots.txt per origin, without the hosts that answer 503 to them."""
    robots_most: int
    """The most for one origin."""
    private: int
    """Ways to the private address that were taken: a redirect, a link, a redirect of robots.txt."""
    pages: int
    """Different pages had of those that may be had."""
    seconds: float
    """From the first request to the last page that was had."""

    def faults(self) -> set[str]:
        """Return the names of the columns that are not clean."""
        clean = {"gaps", "shortest", "pages", "seconds", "robots_fetches"}
        counts = {one.name: getattr(self, one.name) for one in fields(self)}
        counts["robots_most"] -= 1
        return {name for name, count in counts.items() if name not in clean and count > 0}


@dataclass(frozen=True, slots=True)
class Restart:
    """What a crawl did that was killed and started again."""

    inside: int
    """Hosts that were asked inside the Crawl-delay or Retry-After that was in force at the kill."""
    held: int
    """Hosts that had one in force when the first request came after the restart."""
    robots_again: int
    """Origins whose robots.txt was fetched before the kill and after it."""
    robots: int
    """Origins whose robots.txt was fetched before the kill."""
    twice: int
    """Pages that were answered 200 before the kill, and asked for again."""
    before: int
    """Pages that were answered 200 before the kill."""


def judge(world: World) -> Crawl:
    """Judge an undisturbed crawl."""
    log = sorted(world.log)
    gaps = [gap for host in _of(world, Kind.DELAY) for gap in _gaps(_pages(log, host))]
    delay = max((host.seconds for host in _of(world, Kind.DELAY)), default=0.0)
    robots = Counter(
        seen.address
        for seen in log
        if seen.path == "/robots.txt"
        and seen.address in world.hosts
        and world.hosts[seen.address].kind is not Kind.ROBOTS_503
    )
    listed = {(host.address, path) for host in world.hosts.values() for path in host.paths}
    had, start = _had(log) & may_be_had(world), log[0].at if log else 0.0
    return Crawl(
        disallowed=len(
            {one[1:3] for one in log if one[1:3] in listed and one.path.startswith("/private/")}
        ),
        hops=sum(seen.path.startswith(BY_REDIRECT) for seen in log),
        short_gaps=sum(gap < delay - SLACK for gap in gaps),
        gaps=len(gaps),
        shortest=min(gaps, default=None),
        in_429=sum(_inside(log, host) for host in _of(world, Kind.LIMITED)),
        in_503=sum(_inside(log, host) for host in _of(world, Kind.DOWN)),
        robots_503=sum(len(_pages(log, host)) for host in _of(world, Kind.ROBOTS_503)),
        robots_fetches=sum(robots.values()) / max(1, len(robots)),
        robots_most=max(robots.values(), default=0),
        private=len({seen.path for seen in log if seen.address == PRIVATE} & WAYS),
        pages=len(had),
        seconds=max((one.at for one in log if one[1:3] in had), default=start) - start,
    )


def judge_restart(world: World, killed_at: float) -> Restart:
    """Judge a crawl that was killed at that moment and started again."""
    log = sorted(world.log)
    before = [seen for seen in log if seen.at <= killed_at]
    after = [seen for seen in log if seen.at > killed_at]
    inside = held = 0
    restarted_at = min((seen.at for seen in after), default=killed_at)
    for host in world.hosts.values():
        until = _in_force(before, host)
        if until > restarted_at:
            held += 1
            inside += any(seen.at < until - SLACK for seen in _requests(after, host))
    had, robots = _had(before) & may_be_had(world), _robots(before)
    return Restart(
        inside=inside,
        held=held,
        robots_again=len(robots & _robots(after)),
        robots=len(robots),
        twice=len(had & {one[1:3] for one in after}),
        before=len(had),
    )


def may_be_had(world: World) -> set[tuple[str, str]]:
    """Return the pages that a polite crawler can have, each as address and path."""
    closed = (Kind.ROBOTS_503, Kind.ROBOTS_PRIVATE, Kind.SLOW)
    return {
        (host.address, path)
        for host in world.hosts.values()
        if host.kind not in closed
        for path in host.paths
        if not path.startswith(("/private/", "/to/"))
    }


def _of(world: World, kind: Kind) -> list[Host]:
    return [host for host in world.hosts.values() if host.kind is kind]


def _requests(log: Iterable[Seen], host: Host) -> list[Seen]:
    return [seen for seen in log if seen.address == host.address]


def _pages(log: Iterable[Seen], host: Host) -> list[Seen]:
    return [seen for seen in _requests(log, host) if seen.path != "/robots.txt"]


def _gaps(log: Sequence[Seen]) -> list[float]:
    return [later.at - earlier.at for earlier, later in pairwise(log)]


def _had(log: Iterable[Seen]) -> set[tuple[str, str]]:
    return {seen[1:3] for seen in log if seen.status == 200}


def _robots(log: Iterable[Seen]) -> set[str]:
    return {seen.address for seen in log if seen.path == "/robots.txt"}


def _inside(log: Iterable[Seen], host: Host) -> int:
    """Count the requests to a host before the Retry-After that it had answered was over.

    A first request for another page, a moment after the refusal, may have been sent before the
    crawler had read it, and is not counted.
    """
    found, asked = 0, defaultdict[str, int](int)
    refused: list[Seen] = []
    for seen in _requests(log, host):
        again = asked[seen.path] > 0
        asked[seen.path] += 1
        found += any(
            seen.at < one.at + (one.retry_after or 0.0) - SLACK
            and (again or seen.at > one.at + CROSSING)
            for one in refused
        )
        if seen.retry_after is not None:
            refused.append(seen)
    return found


def _in_force(before: Iterable[Seen], host: Host) -> float:
    """Return until when the host may not be asked, of what the crawler had been told."""
    ends = [0.0]
    for seen in _requests(before, host):
        if seen.retry_after is not None:
            ends.append(seen.at + seen.retry_after)
        if host.kind is Kind.DELAY and seen.path != "/robots.txt":
            ends.append(seen.at + host.seconds)
    return max(ends)
