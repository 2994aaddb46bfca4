"""What a rule set says beside Allow and Disallow (DIA-08)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gatekeeper.robots import lines, normal, signals, timing

__all__ = ["FIELDS", "Wishes", "heard"]

FIELDS = (
    "crawl-delay",
    "request-rate",
    "visit-time",
    "comment",
    "content-usage",
    "content-signal",
)


class Wishes(NamedTuple):
    """What came of the values; those that can't be read are left out."""

    crawl_delay: float | None
    """Seconds; of several the largest (VND-01)."""
    request_rates: tuple[timing.RequestRate, ...]
    visit_times: tuple[timing.Window, ...]
    comments: tuple[str, ...]
    content_usage: tuple[tuple[str, dict[str, str]], ...]
    """Pattern in normal form, or nothing for all paths, and the preferences for it."""
    content_signal: dict[str, str]


def heard(said: Mapping[str, Sequence[str]]) -> Wishes:
    """Read the values, as octets, of each of the `FIELDS`."""
    delays = map(timing.parse_crawl_delay, said["crawl-delay"])
    rates = map(timing.parse_request_rate, said["request-rate"])
    windows = map(timing.parse_visit_time, said["visit-time"])
    usage = (signals.parse_content_usage(value) for value in said["content-usage"])
    return Wishes(
        crawl_delay=max((delay for delay in delays if delay is not None), default=None),
        request_rates=tuple(rate for rate in rates if rate),
        visit_times=tuple(window for window in windows if window),
        comments=tuple(map(lines.shown, said["comment"])),
        content_usage=tuple((normal.rfc_pattern(path), view) for path, view in usage),
        content_signal=signals.combine_signals(
            map(signals.parse_content_signal, said["content-signal"])
        ),
    )
