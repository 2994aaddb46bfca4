"""`RemoteStats`: what a client counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RemoteStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """What a client counts. All counters run since it was made."""

    asked: int
    """Questions put to the client."""
    remembered: int
    """... answered without the sidecar."""
    unanswered: int
    """... for which the sidecar could not be asked: the fail mode answered."""
    batches: int
    urls: int
    """URLs sent in those batches."""
    requests: int
    """Attempts of every kind; `failures` of them got no answer."""
    repeated: int
    failures: int
    granted: int
    held: int
    """Leases held at this moment."""
    told: int
    """Reports, renewals and returns that the sidecar heard."""
    untold: int
    """... that are under way or wait."""
    dropped: int
    """... that were given up; the sidecar ends those leases by itself, as used."""
    kept: int
    """Decisions remembered at this moment."""
    reachable: bool
    """False from the moment a question was given up until an answer comes."""
