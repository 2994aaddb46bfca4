"""Which URLs a crawl has met, whose way each is part of, and who waits for whose end.

A redirect to a URL that is somebody else's already is not asked for twice: its entry waits
for the other one's, and says what that one came to. Only whoever has the page may say so.
"""

from __future__ import annotations

import msgspec

from gatekeeper.cli.crawl.manifest import Entry, Outcome, digest

__all__ = ["Trails"]


class Trails:
    """The URLs of one run, each part of one way: of a given URL over its redirects to its end.

    `longest` bounds the ways that wait for one another in a row. Memory: a dictionary's slot
    and 16 bytes for every URL met, an entry for every way that waits.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # None while the way that it is part of has no end.
        self._outcomes: dict[bytes, Outcome | None] = {}
        # Hops only, while their way has no end; a given URL is part of its own.
        self._owners: dict[bytes, bytes] = {}
        self._leaders: dict[bytes, bytes] = {}
        self._followers: dict[bytes, list[Entry]] = {}

    def __contains__(self, url: str) -> bool:
        return digest(url) in self._outcomes

    def begin(self, url: str) -> None:
        """A given URL sets out."""
        self._outcomes[digest(url)] = None

    def extend(self, url: str, hop: str) -> None:
        """Its way goes on to a URL that is nobody's, or was."""
        key = digest(hop)
        self._outcomes[key] = None
        self._owners[key] = digest(url)

    def outcome(self, url: str) -> Outcome | None:
        """What the way that it is part of came to; None: there is none, or no end yet."""
        return self._outcomes.get(digest(url))

    def follow(self, entry: Entry) -> str | None:
        """Keep an entry until the way that its last redirect led into has its end.

        The problem instead, and nothing kept, if that end would wait for this one, or if
        too many wait for one another.
        """
        url, hop = entry.redirects[-1][1], digest(entry.redirects[-1][1])
        own, leader = digest(entry.url), self._owners.get(hop, hop)
        ahead: bytes | None = leader
        for _ in range(self._longest):
            if ahead == own:
                return f"redirected in a circle, back to {url}"
            ahead = self._leaders.get(ahead) if ahead is not None else None
        if ahead is not None:
            return f"more than {self._longest} redirects"
        self._leaders[own] = leader
        self._followers.setdefault(leader, []).append(entry)
        return None

    def end(self, entry: Entry) -> list[Entry]:
        """A way has its end; the entries that waited for it, saying the same."""
        own = digest(entry.url)
        if own in self._outcomes:
            self._outcomes[own] = entry.outcome
        self._leaders.pop(own, None)
        for _, url in entry.redirects:
            hop = digest(url)
            # A hop of those that follow somebody is that one's.
            if self._owners.get(hop) == own:
                del self._owners[hop]
                self._outcomes[hop] = entry.outcome
        return [self._as(entry, waited) for waited in self._followers.pop(own, ())]

    def _as(self, leader: Entry, follower: Entry) -> Entry:
        """The follower's entry: its own way and the rest of the leader's, to the same end.

        Without size and file: those are the leader's, and counted once.
        """
        met = follower.redirects[-1][1]
        way = [leader.url, *(url for _, url in leader.redirects)]
        redirects = follower.redirects + leader.redirects[way.index(met) :]
        if len(redirects) > self._longest:  # as it would have come to alone
            return msgspec.structs.replace(
                follower, outcome=Outcome.FAILED, error=f"more than {self._longest} redirects"
            )
        return msgspec.structs.replace(
            follower,
            outcome=leader.outcome,
            redirects=redirects,
            final_url=redirects[-1][1],
            decision=leader.decision,
            status=follower.status if leader.outcome is Outcome.FETCHED else leader.status,
            error=leader.error,
        )
