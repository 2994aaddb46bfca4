"""Parse a robots.txt, decide about URLs, and explain the verdicts.

The package is pure: no clock, no I/O, no asyncio.
"""

from __future__ import annotations

from gatekeeper.speedups import lazily

TYPE_CHECKING = False

if TYPE_CHECKING:
    from gatekeeper.robots.composition import (
        Change,
        Composed,
        ComposeProblem,
        Difference,
        Fragment,
        Ruling,
        compose,
        diff,
    )
    from gatekeeper.robots.lint import Finding
    from gatekeeper.robots.model import Candidate, Group, Match, Rule, Severity
    from gatekeeper.robots.parser import Dialect, RobotsTxt, product_token
    from gatekeeper.robots.policy import Policy
    from gatekeeper.robots.signals import (
        AccessChallenge,
        CleanParam,
        PageRules,
        PageSignals,
        page_signals,
    )
    from gatekeeper.robots.timing import RequestRate, Window
    from gatekeeper.robots.witness import Witness, witnesses
else:  # imported on first use: parsing alone must not import an HTTP client
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "gatekeeper.robots.composition": [
                "Change",
                "ComposeProblem",
                "Composed",
                "Difference",
                "Fragment",
                "Ruling",
                "compose",
                "diff",
            ],
            "gatekeeper.robots.lint": ["Finding"],
            "gatekeeper.robots.model": [
                "Candidate",
                "Group",
                "Match",
                "Rule",
                "Severity",
            ],
            "gatekeeper.robots.parser": ["Dialect", "RobotsTxt", "product_token"],
            "gatekeeper.robots.policy": ["Policy"],
            "gatekeeper.robots.signals": [
                "AccessChallenge",
                "CleanParam",
                "PageRules",
                "PageSignals",
                "page_signals",
            ],
            "gatekeeper.robots.timing": ["RequestRate", "Window"],
            "gatekeeper.robots.witness": ["Witness", "witnesses"],
        },
    )

__all__ = [
    "AccessChallenge",
    "Candidate",
    "Change",
    "CleanParam",
    "ComposeProblem",
    "Composed",
    "Dialect",
    "Difference",
    "Finding",
    "Fragment",
    "Group",
    "Match",
    "PageRules",
    "PageSignals",
    "Policy",
    "RequestRate",
    "RobotsTxt",
    "Rule",
    "Ruling",
    "Severity",
    "Window",
    "Witness",
    "compose",
    "diff",
    "page_signals",
    "product_token",
    "witnesses",
]
