"""Metrics for Prometheus. Labels have fixed sets of values, never a host or a URL (T10)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from gatekeeper.gate import GateStats

OPENMETRICS = "application/openmetrics-text"
Samples = Mapping[str, float | Mapping[Any, float]]
"""Values by the name of their metric. The value of a metric with a label is a mapping from the
value of the label; with several labels, a key is a tuple of their values."""

# Names follow those of comparable sidecars.
_TABLE = """
counter gatekeeper_http_requests{route,method,code}: Answers given.
counter gatekeeper_config_reload{result}: Reloads of the configuration.
gauge gatekeeper_config_last_reload_successful: Whether the last reload was applied.
gauge gatekeeper_config_last_reload_success_timestamp_seconds: When a configuration was
    last applied.
gauge gatekeeper_config_restart_required{setting}: Settings that changed in the file, but need a
    restart.
gauge gatekeeper_build_info{version}: The version.
gauge gatekeeper_ready: Whether new questions are accepted.
gauge gatekeeper_storage_failing: Whether state can't be stored, so that leases are deferred.
gauge gatekeeper_connections: Open connections.
counter gatekeeper_connections_refused: Connections refused.
gauge gatekeeper_requests_under_way: Requests being answered.
counter gatekeeper_clients_refused{bound}: Requests refused by a limit of their client.
counter gatekeeper_decision_log{result}: Lines of the decision log.
counter gatekeeper_learning_put_off: Origins that forward-auth did not fetch, because too many were
    being fetched.
gauge gatekeeper_leases{state}: Leases that clients hold or wait for.
counter gatekeeper_leases_ended{how}: Leases ended, by how.
counter gatekeeper_leases_refused{bound}: Requests for a lease refused by a limit.
gauge gatekeeper_workers: Worker processes that answer questions.
gauge gatekeeper_worker_connections: Open connections of workers.
counter gatekeeper_worker_restarts: Workers that were started again.

counter gatekeeper_decisions{outcome,reason} = decisions: Decisions made, for a lease also when it
    is granted.
counter gatekeeper_robots_fetch{result} = directory.outcomes: Retrievals of robots.txt, by result.
gauge gatekeeper_cache_entries = directory.records: Origins in memory.
gauge gatekeeper_cache_bytes = directory.bytes: Estimated memory of the origins, in bytes.
gauge gatekeeper_robots_fetch_in_flight = directory.in_flight: Retrievals under way.
gauge gatekeeper_questions_waiting = directory.waiting: Questions waiting for a file.
gauge gatekeeper_local_fault = directory.local_fault: Our own network seems to be down.
counter gatekeeper_cache_evicted = directory.evicted: Origins dropped from memory.
counter gatekeeper_robots_revalidated = directory.revalidated: Files found unchanged.
counter gatekeeper_internal_errors = directory.internal_errors: Internal errors, all deferred.
counter gatekeeper_storage_errors = directory.storage_errors: Failures to read or write state.
gauge gatekeeper_turns{state}: Requests that wait for a lease or hold one, by state.
counter gatekeeper_turns_granted = pacing.granted: Leases granted, those for robots.txt included.
counter gatekeeper_blocks = pacing.blocks: Blocks of hosts because of their responses.
counter gatekeeper_shadow_denied = pacing.dry_waits: Dry run: leases that would have waited.
gauge gatekeeper_hosts{state}: Hosts and shared clocks in memory, by state.
counter gatekeeper_guard_denied{kind} = guard.refused: URLs and addresses that the guard refused.

gauge gatekeeper_fleet_state{state}: 1 for the state of the store that the fleet shares.
gauge gatekeeper_fleet_members = fleet.members: Members that are alive.
gauge gatekeeper_fleet_dividing = fleet.dividing: The store is lost, hosts divided.
counter gatekeeper_fleet_calls = fleet.calls: Script calls of the store.
counter gatekeeper_fleet_requests = fleet.requests: Requests in these calls.
counter gatekeeper_fleet_failures = fleet.failures: Calls that failed.
counter gatekeeper_fleet_epochs = fleet.epochs: Epochs that this member began.
"""
"""Kind, name, labels and description of each metric, apart from the histograms; and after "=" its
place in `GateStats`, if the value is there as it is."""


def _read_table(table: str) -> dict[str, tuple[str, str, tuple[str, ...], str]]:
    """Return kind, description, labels and place by name."""
    metrics = {}
    for row in filter(None, table.replace("\n    ", " ").splitlines()):
        head, _, text = row.partition(": ")
        head, _, place = head.partition(" = ")
        kind, _, name = head.partition(" ")
        name, _, labels = name.removesuffix("}").partition("{")
        metrics[name] = kind, text, tuple(labels.split(",")) if labels else (), place
    return metrics


METRICS = _read_table(_TABLE)


def family_of(name: str, values: float | Mapping[Any, float]) -> Metric:
    """Return the family of a metric for Prometheus; see `Samples`.

    >>> family_of("gatekeeper_leases_ended", {"reported": 3}).samples[0].value
    3
    """
    kind, text, labels, _ = METRICS[name]
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(name, text, labels=labels)
    by_label = values if isinstance(values, Mapping) else {(): values}
    for key, value in by_label.items():
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family


_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """A histogram of durations, with fixed buckets.

    That of prometheus_client writes to files where PROMETHEUS_MULTIPROC_DIR is set, and takes five
    times as long.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}
        """The latest one of each bucket."""

    def observe(self, seconds: float, trace_id: str = "") -> None:
        """Count one duration. `trace_id`: the trace in which it was measured, if there is one."""
        bucket = bisect_left(_BUCKETS, seconds)
        self._counts[bucket] += 1
        self._sum += seconds
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, seconds, time.time())

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

    def family(self, *, exemplars: bool = False) -> Metric:
        """Return the histogram for Prometheus, with cumulative buckets."""
        total = 0
        buckets: list[Any] = []
        bounds = (*map(str, _BUCKETS), "+Inf")
        for bucket, (bound, count) in enumerate(zip(bounds, self._counts, strict=True)):
            total += count
            exemplar = self._exemplars.get(bucket) if exemplars else None
            buckets.append((bound, float(total), exemplar))
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
        self._sources: list[Callable[[], Samples]] = [self._samples]
        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self.queue_wait: Histogram = Histogram(
            "gatekeeper_queue_wait_seconds", "Time from the request for a lease to its grant."
        )
        self.robots_fetch: Histogram = Histogram(
            "gatekeeper_robots_fetch_seconds",
            "Network time of one robots.txt retrieval, all its hops.",
        )
        self._exemplars = False
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add_source(self, source: Callable[[], Samples]) -> None:
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

    def render(self, accept: str = "", *, exemplars: bool = False) -> tuple[bytes, str]:
        """Return what Prometheus scrapes, and its Content-Type.

        It is OpenMetrics if the Accept header names that, and else the text format of Prometheus,
        which has no exemplars.
        """
        # A constant, since prometheus_client would send the client's `version` back.
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in accept.lower() else "")
        self._exemplars = exemplars
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Return every metric family; called by the registry."""
        yield self.queue_wait.family(exemplars=self._exemplars)
        yield self.robots_fetch.family(exemplars=self._exemplars)
        for source in self._sources:
            for name, values in source().items():
                yield family_of(name, values)

    def _samples(self) -> Samples:
        return {
            "gatekeeper_http_requests": {
                (route, method, str(code)): count
                for (route, method, code), count in list(self.requests.items())
            },
            "gatekeeper_config_reload": self.reloads,
            "gatekeeper_config_last_reload_successful": float(self.last_reload_ok),
            "gatekeeper_config_last_reload_success_timestamp_seconds": self.last_reload_at,
            "gatekeeper_build_info": {self._build: 1.0},
        }


_HOST_STATES = ("idle", "waiting", "deferred", "blocked", "paused")
_FLEET_STATES = ("connected", "lost", "recovering")


def gate_samples(stats: GateStats, hosts: Mapping[str, int]) -> Samples:
    """Return the gate's samples for one scrape. `hosts`: the number of hosts in each state."""
    pacing, fleet = stats.pacing, stats.fleet
    # There may be no guard, and no fleet.
    samples: dict[str, float | Mapping[Any, float]] = {
        name: attrgetter(place)(stats)
        for name, (*_, place) in METRICS.items()
        if place and getattr(stats, place.partition(".")[0]) is not None
    }
    samples["gatekeeper_turns"] = {"in_flight": pacing.in_flight, "waiting": pacing.waiting}
    samples["gatekeeper_hosts"] = {state: hosts.get(state, 0) for state in _HOST_STATES}
    if fleet is not None:
        states = {one: float(fleet.state == one) for one in _FLEET_STATES}
        samples["gatekeeper_fleet_state"] = states
    return samples
