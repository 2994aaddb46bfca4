"""What a rule set says beside Allow and Disallow (DIA-08)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gatekeeper.robots import lines, normal, signals, timing
from gatekeeper.robots.glance import octets_of
from gatekeeper.robots.longest import ready_rules
from gatekeeper.robots.rulesets import DENIED, ROBOTS_FILE

__all__ = ["FIELDS", "UsageRules", "Wishes", "heard"]

FIELDS = (
    "crawl-delay",
    "request-rate",
    "visit-time",
    "comment",
    "content-signal",
    "content-usage",
)


class Wishes(NamedTuple):
    """What came of the values; those that can't be read are left out."""

    crawl_delay: float | None
    """Seconds; of several the largest (VND-01)."""
    request_rates: tuple[timing.RequestRate, ...]
    visit_times: tuple[timing.Window, ...]
    comments: tuple[str, ...]
    signal: dict[str, str]
    """What the Content-Signal lines say together (SIG-12)."""
    usage: Sequence[str]
    """Content-Usage lines, which speak of paths."""


def heard(said: Mapping[str, Sequence[str]]) -> Wishes:
    """Read the values, as octets, of each of the `FIELDS`."""
    delays = map(timing.parse_crawl_delay, said["crawl-delay"])
    rates = map(timing.parse_request_rate, said["request-rate"])
    windows = map(timing.parse_visit_time, said["visit-time"])
    return Wishes(
        crawl_delay=max((delay for delay in delays if delay is not None), default=None),
        request_rates=tuple(rate for rate in rates if rate),
        visit_times=tuple(window for window in windows if window),
        comments=tuple(map(lines.shown, said["comment"])),
        signal=signals.combine_signals(map(signals.parse_content_signal, said["content-signal"])),
        usage=said["content-usage"],
    )


class UsageRules:
    """The Content-Usage lines of a rule set, by the paths that they speak of.

    Paths are matched as those of Allow and Disallow are, the longest one counts (SIG-05), and
    what is said twice of the same path is combined (SIG-07). Where finding the longest one
    takes too long, as in `pieces`, whatever some line forbids is forbidden.
    """

    __slots__ = ("_everywhere", "_found", "_paths", "_strictest", "_views")

    def __init__(self, values: Sequence[str]) -> None:
        views: dict[str, dict[str, str]] = {}
        known: dict[str, dict[str, str]] = {}
        everywhere: list[dict[str, str]] = []
        for path, text in map(signals.split_content_usage, values):
            view = known.get(text)
            if view is None:
                view = known[text] = signals.parse_preferences(text)
            if not path:
                everywhere.append(view)
                continue
            form = normal.query_form(normal.rfc_pattern(path))
            other = views.get(form)
            views[form] = view if other is None else signals.combine_usage([other, view])
        self._everywhere = signals.combine_usage(everywhere)
        self._paths = list(views)
        self._views = list(views.values())
        said = signals.combine_usage([self._everywhere, *known.values()])
        self._strictest = {label: answer for label, answer in said.items() if answer == "n"}
        self._found = ready_rules([("dis", path) for path in self._paths])

    def of(self, path: str) -> dict[str, str]:
        """The preferences for a path with its query."""
        code = self._found.decide(path)
        if code == DENIED:
            return dict(self._strictest)
        if code == ROBOTS_FILE:  # no rule of Allow and Disallow, but one of these
            code = self._among_all(normal.rfc_path(path))
        return dict(self._everywhere if code < 0 else self._views[code >> 1])

    def _among_all(self, path: str) -> int:
        octets = [octets_of(each, path, path) for each in self._paths]
        longest = max(octets, default=0)
        return octets.index(longest) * 2 if longest else -1
