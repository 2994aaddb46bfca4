"""The parsers that are compared, each with the same three functions.

All parsers get the bytes received from the network. Parsers that read text get them decoded as
UTF-8, as in the crawlers that use them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from benchmarks.report import version_of

__all__ = ["BASELINE", "OURS", "Peer", "installed", "missing"]

OURS = "gatekeeper"
BASELINE = "Protego"


@dataclass(frozen=True, slots=True)
class Peer:
    """One parser."""

    name: str
    version: str
    parse: Callable[[bytes], Any]
    """Read the file."""
    ready: Callable[[Any, str], Callable[[str], bool]]
    """Choose the group of a robot. Returns a function from an absolute URL to the verdict."""


def _gatekeeper() -> Peer:
    from gatekeeper.robots import RobotsTxt

    return Peer(
        OURS,
        version_of("gatekeeper") or "in this tree",
        RobotsTxt.parse,
        lambda robots, agent: robots.policy(agent).allowed,
    )


def _protego() -> Peer:
    from protego import Protego

    def ready(robots: Any, agent: str) -> Callable[[str], bool]:
        can_fetch = robots.can_fetch
        return lambda url: can_fetch(url, agent)

    def parse(body: bytes) -> Any:
        return Protego.parse(body.decode("utf-8", "replace"))

    return Peer(BASELINE, version_of("protego") or "?", parse, ready)


def _reppy() -> Peer:
    from reppy.robots import Robots

    def parse(body: bytes) -> Any:
        # Without a host it judges the URLs of every host.
        return Robots.parse("/robots.txt", body)

    return Peer(
        "reppy (C++)",
        version_of("reppy") or "?",
        parse,
        lambda robots, agent: robots.agent(agent).allowed,
    )


def _urllib() -> Peer:
    import platform
    from urllib.robotparser import RobotFileParser

    def parse(body: bytes) -> Any:
        parser = RobotFileParser()
        parser.parse(body.decode("utf-8", "replace").splitlines())
        parser.modified()
        return parser

    def ready(parser: Any, agent: str) -> Callable[[str], bool]:
        can_fetch = parser.can_fetch
        return lambda url: can_fetch(agent, url)

    return Peer("urllib.robotparser", platform.python_version(), parse, ready)


def _robotspy() -> Peer:
    from robots import RobotsParser

    def parse(body: bytes) -> Any:
        # It prints warnings, which a crawler would discard as well.
        with redirect_stdout(io.StringIO()):
            return RobotsParser.from_string(body.decode("utf-8", "replace"))

    def ready(parser: Any, agent: str) -> Callable[[str], bool]:
        can_fetch = parser.can_fetch
        return lambda url: can_fetch(agent, url)

    return Peer("robotspy", version_of("robotspy") or "?", parse, ready)


def _rerp() -> Peer:
    from robotexclusionrulesparser import RobotExclusionRulesParser

    def parse(body: bytes) -> Any:
        parser = RobotExclusionRulesParser()
        parser.parse(body.decode("utf-8", "replace"))
        return parser

    def ready(parser: Any, agent: str) -> Callable[[str], bool]:
        is_allowed = parser.is_allowed
        return lambda url: is_allowed(agent, url)

    return Peer(
        "robotexclusionrulesparser",
        version_of("robotexclusionrulesparser") or "?",
        parse,
        ready,
    )


_MAKERS: dict[str, Callable[[], Peer]] = {
    OURS: _gatekeeper,
    BASELINE: _protego,
    "reppy (C++)": _reppy,
    "urllib.robotparser": _urllib,
    "robotspy": _robotspy,
    "robotexclusionrulesparser": _rerp,
}


def installed(names: tuple[str, ...] | None = None) -> list[Peer]:
    """Return the parsers that can be imported, gatekeeper first."""
    peers = []
    for name, make in _MAKERS.items():
        if names is None or name in names:
            try:
                peers.append(make())
            except ImportError:
                continue
    return peers


def missing() -> list[str]:
    """Return the parsers that can't be imported, to be named below the tables."""
    there = {peer.name for peer in installed()}
    return [name for name in _MAKERS if name not in there]
