"""Metrics for Prometheus. Labels have fixed sets of values, never a host or a URL (T10)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gatekeeper.fleet import FleetStats
from gatekeeper.gate import GateStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = CounterMetricFamily | GaugeMetricFamily

_Key = TypeVar("_Key", bound=str | tuple[str, ...])


def counter(name: str, text: str, values: float | Mapping[_Key, float], *labels: str) -> Sample:
    """Return a counter: one number, or a mapping from the value of its label to a number.

    With several labels, a key is a tuple of their values. `labels` are the names of the labels.

    >>> counter("leases_ended", "Leases ended, by how.", {"reported": 3}, "how").samples[0].value
    3
    """
    return _fill(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: float | Mapping[_Key, float], *labels: str) -> Sample:
    """Return a gauge; see `counter`."""
    return _fill(GaugeMetricFamily(name, text, labels=labels), values)


def _fill(family: Sample, values: float | Mapping[_Key, float]) -> Sample:
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric((key,) if isinstance(key, str) else key, value)
    else:
        family.add_metric((), values)
    return family


_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """A histogram of durations, with fixed buckets."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BUCKETS, seconds)] += 1
        self._sum += seconds

    def counts(self) -> list[int]:
        """Return the number of observations in each bucket so far."""
        return list(self._counts)

    @staticmethod
    def quantile(counts: Sequence[int], share: float) -> float:
        """Return the duration below which that share of the observations lies.

        Observations count as evenly spread within their bucket. Return nan if there are none.

        >>> round(Histogram.quantile([0, 10] + [0] * 11, 0.5), 4)
        0.0055
        """
        rank, below, lower = share * sum(counts), 0, 0.0
        if not rank:
            return nan
        for count, bound in zip(counts, (*_BUCKETS, _BUCKETS[-1]), strict=True):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below, lower = below + count, bound
        return lower

    def family(self) -> Metric:
        """Return the histogram for Prometheus, with cumulative buckets."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return family


class Metrics(Collector):
    """Counts requests in plain dictionaries, which become metric families at each scrape.

    prometheus_client's own counters take a lock and a label look-up, a microsecond each,
    for every response; a dictionary entry takes 50 ns.
    """

    def __init__(self, *, build: str) -> None:
        self._build = build
        self.requests: dict[tuple[str, str, int], int] = {}
        self.reloads: dict[str, int] = {"success": 0, "failure": 0}
        self.last_reload_ok: bool = True
        self.last_reload_at: float = time.time()
        self._sources: list[Callable[[], Iterable[Sample]]] = []
        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self.queue_wait: Histogram = Histogram(
            "gatekeeper_queue_wait_seconds", "Time from the request for a lease to its grant."
        )
        self.robots_fetch: Histogram = Histogram(
            "gatekeeper_robots_fetch_seconds",
            "Network time of one robots.txt retrieval, all its hops.",
        )
        self.registry.register(self)

    def add_source(self, source: Callable[[], Iterable[Sample]]) -> None:
        """Include the samples that `source` returns in each scrape."""
        self._sources.append(source)

    def count_response(self, route: str, method: str, status: int, count: int = 1) -> None:
        """Count responses; `route` is the pattern of their path, never the path."""
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + count

    def drain_requests(self) -> dict[tuple[str, str, int], int]:
        """Return the numbers of responses by route, method and status, and reset them."""
        taken, self.requests = self.requests, {}
        return taken

    def count_reload(self, *, ok: bool) -> None:
        """Count a reload of the configuration; a failed one sets the gauge to 0 (T17)."""
        self.reloads["success" if ok else "failure"] += 1
        self.last_reload_ok = ok
        if ok:
            self.last_reload_at = time.time()

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Return every metric family; called by the registry."""
        yield self.queue_wait.family()
        yield self.robots_fetch.family()
        yield from self._service_samples()
        for source in self._sources:
            yield from source()

    def _service_samples(self) -> Iterator[Sample]:
        yield counter(
            "gatekeeper_http_requests",
            "Answers given.",
            {(r, m, str(code)): n for ((r, m, code), n) in list(self.requests.items())},
            "route",
            "method",
            "code",
        )
        yield counter(
            "gatekeeper_config_reload", "Reloads of the configuration.", self.reloads, "result"
        )
        yield gauge(
            "gatekeeper_config_last_reload_successful",
            "Whether the last reload was applied.",
            float(self.last_reload_ok),
        )
        yield gauge(
            "gatekeeper_config_last_reload_success_timestamp_seconds",
            "When a configuration was last applied.",
            self.last_reload_at,
        )
        yield gauge("gatekeeper_build_info", "The version.", {self._build: 1.0}, "version")


# --- The counts of the gate. The names of the metrics follow those of comparable sidecars.


_HOST_STATES = ("idle", "waiting", "blocked", "paused")


def gate_samples(stats: GateStats, hosts: Mapping[str, int]) -> Iterable[Sample]:
    """Return the gate's samples for one scrape. `hosts`: the number of hosts in each state."""
    yield counter("gatekeeper_decisions", "Decisions given.", stats.decisions, "outcome", "reason")
    yield from _robots(stats)
    yield from _pacing(stats)
    yield gauge(
        "gatekeeper_hosts",
        "Hosts and shared clocks in memory, by state.",
        {state: hosts.get(state, 0) for state in _HOST_STATES},
        "state",
    )
    if stats.guard is not None:
        yield counter(
            "gatekeeper_guard_denied",
            "URLs and addresses that the guard refused.",
            stats.guard.refused,
            "kind",
        )


def _robots(stats: GateStats) -> Iterable[Sample]:
    directory = stats.directory
    yield counter(
        "gatekeeper_robots_fetch",
        "Retrievals of robots.txt, by result.",
        directory.outcomes,
        "result",
    )
    gauges = (
        ("gatekeeper_cache_entries", "Origins in memory.", directory.records),
        ("gatekeeper_cache_bytes", "Estimated memory of the origins, in bytes.", directory.bytes),
        ("gatekeeper_robots_fetch_in_flight", "Retrievals under way.", directory.in_flight),
        ("gatekeeper_questions_waiting", "Questions waiting for a file.", directory.waiting),
        ("gatekeeper_local_fault", "Our own network seems to be down.", directory.local_fault),
    )
    for name, text, value in gauges:
        yield gauge(name, text, value)
    counters = (
        ("gatekeeper_cache_evicted", "Origins dropped from memory.", directory.evicted),
        ("gatekeeper_robots_revalidated", "Files found unchanged.", directory.revalidated),
        ("gatekeeper_internal_errors", "Internal errors, all deferred.", directory.internal_errors),
        ("gatekeeper_storage_errors", "Failures to read or write state.", directory.storage_errors),
    )
    for name, text, value in counters:
        yield counter(name, text, value)


def _pacing(stats: GateStats) -> Iterable[Sample]:
    pacing = stats.pacing
    yield gauge(
        "gatekeeper_turns",
        "Turns, by state.",
        {"in_flight": pacing.in_flight, "waiting": pacing.waiting},
        "state",
    )
    yield counter(
        "gatekeeper_turns_granted", "Turns granted, those for robots.txt included.", pacing.granted
    )
    yield counter("gatekeeper_blocks", "Blocks of hosts because of their responses.", pacing.blocks)
    yield counter(
        "gatekeeper_shadow_denied", "Dry run: leases that would have waited.", pacing.dry_waits
    )
    if stats.fleet is not None:
        yield from _fleet(stats.fleet)


def _fleet(fleet: FleetStats) -> Iterable[Sample]:
    states = ("connected", "lost", "recovering")
    yield gauge(
        "gatekeeper_fleet_state",
        "1 for the state of the store that the fleet shares.",
        {state: float(fleet.state == state) for state in states},
        "state",
    )
    for make, name, text, value in (
        (gauge, "gatekeeper_fleet_members", "Members that are alive.", fleet.members),
        (gauge, "gatekeeper_fleet_dividing", "The store is lost, hosts divided.", fleet.dividing),
        (counter, "gatekeeper_fleet_calls", "Script calls of the store.", fleet.calls),
        (counter, "gatekeeper_fleet_requests", "Requests in these calls.", fleet.requests),
        (counter, "gatekeeper_fleet_failures", "Calls that failed.", fleet.failures),
        (counter, "gatekeeper_fleet_epochs", "Epochs that this member began.", fleet.epochs),
    ):
        yield make(name, text, value)
