"""Parse a robots.txt, decide about URLs, and explain the verdicts.

The package is pure: no clock, no I/O, no asyncio.
"""

from __future__ import annotations

from gatekeeper.late import LATE, lazily

TYPE_CHECKING = False

if TYPE_CHECKING:  # `as` marks the names that the package exports
    from gatekeeper.page_rules import (
        PageRules as PageRules,
        PageSignals as PageSignals,
        page_signals as page_signals,
    )
    from gatekeeper.sites.composition import (
        Change as Change,
        Composed as Composed,
        ComposeProblem as ComposeProblem,
        Difference as Difference,
        Fragment as Fragment,
        Ruling as Ruling,
        compose as compose,
        diff as diff,
    )
    from gatekeeper.robots.model import (
        Candidate as Candidate,
        Finding as Finding,
        Group as Group,
        Match as Match,
        Rule as Rule,
        Severity as Severity,
    )
    from gatekeeper.robots.parser import Dialect as Dialect, product_token as product_token
    from gatekeeper.robots.policy import Policy as Policy, RobotsTxt as RobotsTxt
    from gatekeeper.robots.signals import (
        AccessChallenge as AccessChallenge,
        CleanParam as CleanParam,
    )
    from gatekeeper.robots.timing import RequestRate as RequestRate, Window as Window
    from gatekeeper.sites.witness import Witness as Witness, witnesses as witnesses
else:  # imported on first use: parsing alone must not import an HTTP client
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        LATE[__name__]
        | {
            "gatekeeper.robots.model": "Candidate Finding Group Match Rule Severity",
            "gatekeeper.robots.parser": "Dialect product_token",
            "gatekeeper.robots.policy": "Policy RobotsTxt",
            "gatekeeper.robots.signals": "AccessChallenge CleanParam",
            "gatekeeper.robots.timing": "RequestRate Window",
        },
    )
