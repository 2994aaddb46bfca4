"""The text of a robots.txt: read, decide, explain. Pure: no clock, no I/O, no asyncio."""

from __future__ import annotations

from gatekeeper.robots.agents import product_token
from gatekeeper.robots.findings import Finding
from gatekeeper.robots.headers import PageRules, PageSignals
from gatekeeper.robots.headers import from_headers as page_signals
from gatekeeper.robots.model import Candidate, Dialect, Group, Match, Rule, Severity
from gatekeeper.robots.parser import RobotsTxt
from gatekeeper.robots.policy import Policy
from gatekeeper.robots.signals import CleanParam
from gatekeeper.robots.timing import RequestRate, Window

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
