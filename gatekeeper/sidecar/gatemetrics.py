"""What the gate counts, for Prometheus; the names are those of its neighbours' sidecars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gatekeeper.operating import GateStats
from gatekeeper.sidecar.metrics import Sample

__all__ = ["gate_samples"]


_HOST_STATES = ("idle", "waiting", "blocked", "paused")


def gate_samples(stats: GateStats, hosts: Mapping[str, int]) -> Iterable[Sample]:
    """The samples of one scrape; `hosts` by their state."""
    yield (
        "counter",
        "gatekeeper_decisions",
        "Decisions given.",
        ("outcome", "reason"),
        [((verdict, reason), n) for (verdict, reason), n in stats.decisions.items()],
    )
    yield from _robots(stats)
    yield from _pacing(stats)
    yield (
        "gauge",
        "gatekeeper_hosts",
        "Hosts and shared clocks in memory, by what holds them up.",
        ("state",),
        [((state,), hosts.get(state, 0)) for state in _HOST_STATES],
    )
    if stats.guard is not None:
        yield (
            "counter",
            "gatekeeper_guard_denied",
            "URLs and addresses that the guard refused.",
            ("kind",),
            [((kind,), n) for kind, n in stats.guard.refused.items()],
        )


def _robots(stats: GateStats) -> Iterable[Sample]:
    directory = stats.directory
    yield (
        "counter",
        "gatekeeper_robots_fetch",
        "Retrievals of robots.txt, by what they came to.",
        ("result",),
        [((result,), n) for result, n in directory.outcomes.items()],
    )
    gauges = (
        ("gatekeeper_cache_entries", "Origins in memory.", directory.records),
        ("gatekeeper_cache_bytes", "What they cost, estimated.", directory.bytes),
        ("gatekeeper_robots_fetch_in_flight", "Retrievals under way.", directory.in_flight),
        ("gatekeeper_questions_waiting", "Questions waiting for a file.", directory.waiting),
        ("gatekeeper_local_fault", "Our own network seems to be down.", directory.local_fault),
    )
    for name, text, value in gauges:
        yield ("gauge", name, text, (), [((), float(value))])
    counters = (
        ("gatekeeper_cache_evicted", "Origins dropped from memory.", directory.evicted),
        ("gatekeeper_robots_revalidated", "Files found unchanged.", directory.revalidated),
        ("gatekeeper_internal_errors", "Errors of ours, each deferred.", directory.internal_errors),
        ("gatekeeper_storage_errors", "Failures to read or write state.", directory.storage_errors),
    )
    for name, text, value in counters:
        yield ("counter", name, text, (), [((), float(value))])


def _pacing(stats: GateStats) -> Iterable[Sample]:
    pacing = stats.pacing
    yield (
        "gauge",
        "gatekeeper_turns",
        "Turns, by what is happening with them.",
        ("state",),
        [(("in_flight",), pacing.in_flight), (("waiting",), pacing.waiting)],
    )
    yield (
        "counter",
        "gatekeeper_turns_granted",
        "Turns granted, those for robots.txt included.",
        (),
        [((), pacing.granted)],
    )
    yield (
        "counter",
        "gatekeeper_blocks",
        "Hosts blocked for what they answered.",
        (),
        [((), pacing.blocks)],
    )
    yield (
        "counter",
        "gatekeeper_shadow_denied",
        "Dry run: leases that would have waited.",
        (),
        [((), pacing.dry_waits)],
    )
