"""Bounds on what one client may ask at once, and in a second (T8, T15)."""

from __future__ import annotations

from collections.abc import Iterable

from gatekeeper.clock import Clock
from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.metrics import Sample
from gatekeeper.sidecar.problems import Problem, retry_after

__all__ = ["Clients"]

_MAX_BUCKETS = 4096


class Clients:
    """Counts requests under way by client, and meters them where a rate is set.

    Holds an entry only for a client with a request under way, and at most 4096 meters:
    a meter that is full again is as good as none.
    """

    def __init__(self, server: ServerConfig, clock: Clock) -> None:
        self._clock = clock
        self.adjust(server)
        self._busy: dict[str, int] = {}
        self._meters: dict[str, tuple[float, float]] = {}
        self.refused = {"concurrency": 0, "rate": 0}

    def adjust(self, server: ServerConfig) -> None:
        """Put other bounds in force, for the requests to come."""
        self._most = server.client_concurrency
        self._rate = server.client_rate

    def samples(self) -> Iterable[Sample]:
        """For /metrics; summed over clients, whose addresses are not ours to bound (T10)."""
        yield (
            "gauge",
            "gatekeeper_requests_under_way",
            "Requests being answered.",
            (),
            [((), sum(self._busy.values()))],
        )
        yield (
            "counter",
            "gatekeeper_clients_refused",
            "Requests that met a bound of their client.",
            ("bound",),
            [((bound,), n) for bound, n in self.refused.items()],
        )

    def enter(self, client: str) -> None:
        """Count one in; raises Problem 429 with Retry-After. Pair it with `leave`."""
        busy = self._busy.get(client, 0)
        if busy >= self._most:
            self.refused["concurrency"] += 1
            raise Problem(
                429,
                "too-many-requests",
                f"{self._most} requests at once are allowed to one client",
                headers={"Retry-After": "1"},
            )
        if self._rate is not None:
            self._meter(client, self._rate)
        self._busy[client] = busy + 1

    def passes(self, client: str) -> bool:
        """Whether one that is over at once may pass unmetered; else `enter` must judge it."""
        return self._rate is None and self._busy.get(client, 0) < self._most

    def leave(self, client: str) -> None:
        """Count one out."""
        busy = self._busy[client] - 1
        if busy:
            self._busy[client] = busy
        else:
            del self._busy[client]

    def stats(self) -> dict[str, int]:
        """Requests under way, by client."""
        return dict(self._busy)

    def _meter(self, client: str, rate: float) -> None:
        """A bucket of one second's worth of requests that fills at `rate`."""
        now = self._clock.monotonic()
        depth = max(1.0, rate)
        level, at = self._meters.get(client, (depth, now))
        level = min(depth, level + (now - at) * rate)
        if level < 1.0:
            self.refused["rate"] += 1
            raise Problem(
                429,
                "too-many-requests",
                f"{rate:g} requests a second are allowed to one client",
                headers={"Retry-After": retry_after((1.0 - level) / rate)},
            )
        if client not in self._meters and len(self._meters) >= _MAX_BUCKETS:
            self._forget_full(now, rate, depth)
        self._meters[client] = (level - 1.0, now)

    def _forget_full(self, now: float, rate: float, depth: float) -> None:
        self._meters = {
            client: (level, at)
            for client, (level, at) in self._meters.items()
            if level + (now - at) * rate < depth
        }
        if len(self._meters) >= _MAX_BUCKETS:
            # All of them are busy: the oldest goes, which can only err in its favour.
            self._meters.pop(next(iter(self._meters)))
