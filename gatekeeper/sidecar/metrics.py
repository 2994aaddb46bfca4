"""Counters for Prometheus: closed sets of labels, never a host or a URL (T10)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics", "Sample"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]
"""kind ("counter" or "gauge"), name, help, label names, (label values, value)."""

_BOUNDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Durations in fixed buckets."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        """The buckets as Prometheus wants them: each with all that lie below it."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        return family


class Metrics(Collector):
    """Plain numbers on the hot path, made into families when somebody scrapes.

    prometheus_client's own counters take a lock and a label look-up, a microsecond each,
    on every answer; a dictionary entry takes 50 ns.
    """

    def __init__(self, *, build: str) -> None:
        self._build = build
        self.requests: dict[tuple[str, str, int], int] = {}
        self.reloads = {"success": 0, "failure": 0}
        self.last_reload_ok = True
        self.last_reload_at = time.time()
        self._sources: list[Callable[[], Iterable[Sample]]] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.queue_wait = Histogram(
            "gatekeeper_queue_wait_seconds", "Time from the request for a lease to its grant."
        )
        self.robots_fetch = Histogram(
            "gatekeeper_robots_fetch_seconds",
            "Network time of one robots.txt retrieval, all its hops.",
        )
        self.registry.register(self)

    def add_source(self, source: Callable[[], Iterable[Sample]]) -> None:
        """Read further samples at each scrape."""
        self._sources.append(source)

    def answered(self, route: str, method: str, status: int) -> None:
        """Count one answer; `route` is the pattern of its path, never the path."""
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def reloaded(self, *, ok: bool) -> None:
        """Count one reload of the configuration; a failed one turns the gauge to 0 (T17)."""
        self.reloads["success" if ok else "failure"] += 1
        self.last_reload_ok = ok
        if ok:
            self.last_reload_at = time.time()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Everything, as families."""
        yield self.queue_wait.family()
        yield self.robots_fetch.family()
        for kind, name, text, labels, values in self._own():
            yield _family(kind, name, text, labels, values)
        for source in self._sources:
            for kind, name, text, labels, values in source():
                yield _family(kind, name, text, labels, values)

    def _own(self) -> Iterator[Sample]:
        yield (
            "counter",
            "gatekeeper_http_requests",
            "Answers given.",
            ("route", "method", "code"),
            [((r, m, str(code)), n) for (r, m, code), n in list(self.requests.items())],
        )
        yield (
            "counter",
            "gatekeeper_config_reload",
            "Reloads of the configuration.",
            ("result",),
            [((result,), n) for result, n in self.reloads.items()],
        )
        yield (
            "gauge",
            "gatekeeper_config_last_reload_successful",
            "Whether the last reload was taken over.",
            (),
            [((), float(self.last_reload_ok))],
        )
        yield (
            "gauge",
            "gatekeeper_config_last_reload_success_timestamp_seconds",
            "When a configuration was last taken over.",
            (),
            [((), self.last_reload_at)],
        )
        version = [((self._build,), 1.0)]
        yield ("gauge", "gatekeeper_build_info", "The version.", ("version",), version)


def _family(
    kind: str,
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(name, text, labels=labels)
        if kind == "counter"
        else GaugeMetricFamily(name, text, labels=labels)
    )
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
