"""Which line of a robots.txt a pace rests on, in words for people.

Nothing that a site wrote is repeated: fields and values are said in our own words.
"""

from __future__ import annotations

from collections.abc import Callable

from gatekeeper.robots.lines import Spans
from gatekeeper.robots.timing import RequestRate, parse_crawl_delay, parse_request_rate

__all__ = ["by_crawl_delay", "by_request_rate", "by_rule_of_thumb"]


def by_crawl_delay(text: str, spans: Spans, seconds: float) -> str:
    """The first Crawl-delay line of the spans that asks for so much.

    >>> by_crawl_delay("user-agent: *\\ncrawl-delay: 10", ((0, 29),), 10.0)
    'crawl-delay 10 s from robots.txt line 2'
    """
    line = _line(text, spans, "crawl-delay", lambda value: parse_crawl_delay(value) == seconds)
    return f"crawl-delay {seconds:.10g} s from robots.txt{line}"


def by_request_rate(text: str, spans: Spans, rate: RequestRate) -> str:
    """The first Request-rate line of the spans that says so."""
    line = _line(text, spans, "request-rate", lambda value: parse_request_rate(value) == rate)
    hours = "" if rate.window is None else f" {rate.window} UTC"
    said = f"{rate.documents}/{rate.seconds}s{hours}"
    return f"request-rate {said}, that is {rate.interval:.10g} s, from robots.txt{line}"


def by_rule_of_thumb(seconds: float) -> str:
    """No line: what the 2.0 draft asks for where the text gives no rate (V2-31)."""
    return f"rule of thumb {seconds:.10g} s: robots.txt of the 2.0 draft gives no rate"


def _line(text: str, spans: Spans, field: str, wanted: Callable[[str], bool]) -> str:
    for low, high in spans:
        at = low
        for line in text[low:high].split("\n"):
            head, colon, rest = line.partition("#")[0].partition(":")
            if colon and head.strip(" \t").lower() == field and wanted(rest.strip(" \t")):
                return f" line {text.count(chr(10), 0, at) + 1}"
            at += len(line) + 1
    return ""
