"""The text of a robots.txt: read, decide, explain. Pure: no clock, no I/O, no asyncio."""

from __future__ import annotations

from gatekeeper.robots.model import Candidate, Dialect, Group, Match, Rule, Severity

__all__ = ["Candidate", "Dialect", "Group", "Match", "Rule", "Severity"]
