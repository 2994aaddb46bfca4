"""The robots.txt itself, as a sidecar tells of it, read here."""

from __future__ import annotations

import asyncio

from gatekeeper.config import RobotsConfig
from gatekeeper.decision import Verdict
from gatekeeper.remote.wire import Explanation
from gatekeeper.robots import Policy, RobotsTxt

__all__ = ["policy_of", "robots_of"]

_LARGE = 65_536
"""Characters above which a text is read beside the loop."""


async def robots_of(told: Explanation, reading: RobotsConfig) -> RobotsTxt | None:
    """The file, parsed; None where there is none to read."""
    text = told.robots_txt
    if text is None:
        return None
    size = max(512_000, len(text) * 4)  # the sidecar has cut it already
    if len(text) < _LARGE:
        return RobotsTxt.parse(text, dialect=reading.dialect, limit=size)
    return await asyncio.to_thread(RobotsTxt.parse, text, dialect=reading.dialect, limit=size)


def policy_of(
    told: Explanation, robots: RobotsTxt | None, agent: str, reading: RobotsConfig
) -> Policy:
    """The file as it reads for the agent, or what stands for one that can't be read.

    Everything is allowed where there is no file (RFC-36) or the operator says so, nothing
    where it can't be had (RFC-37) or the guard refuses.
    """
    if robots is None:
        welcome = told.decision.verdict is Verdict.ALLOW
        robots = RobotsTxt.parse("" if welcome else "User-agent: *\nDisallow: /\n")
    return robots.policy(
        agent,
        conflicts=reading.conflicts,
        v2_semantics=reading.v2_semantics,
        inherit_crawl_delay=reading.inherit_crawl_delay,
    )
