"""The text of a robots.txt: read, decide, explain. Pure: no clock, no I/O, no asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gatekeeper.lazy import lazily

if TYPE_CHECKING:
    from gatekeeper.robots.lint import Finding
    from gatekeeper.robots.model import (
        Candidate,
        Dialect,
        Group,
        Match,
        Rule,
        Severity,
        product_token,
    )
    from gatekeeper.robots.parser import RobotsTxt
    from gatekeeper.robots.policy import Policy
    from gatekeeper.robots.signals import CleanParam, PageRules, PageSignals, page_signals
    from gatekeeper.robots.timing import RequestRate, Window
else:  # each when it is first asked for: a parser alone need not wait for an HTTP client
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "gatekeeper.robots.lint": ["Finding"],
            "gatekeeper.robots.model": [
                "Candidate",
                "Dialect",
                "Group",
                "Match",
                "Rule",
                "Severity",
                "product_token",
            ],
            "gatekeeper.robots.parser": ["RobotsTxt"],
            "gatekeeper.robots.policy": ["Policy"],
            "gatekeeper.robots.signals": ["CleanParam", "PageRules", "PageSignals", "page_signals"],
            "gatekeeper.robots.timing": ["RequestRate", "Window"],
        },
    )

__all__ = [
    "Candidate",
    "CleanParam",
    "Dialect",
    "Finding",
    "Group",
    "Match",
    "PageRules",
    "PageSignals",
    "Policy",
    "RequestRate",
    "RobotsTxt",
    "Rule",
    "Severity",
    "Window",
    "page_signals",
    "product_token",
]
