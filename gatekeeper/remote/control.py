"""What is asked of a sidecar one by one: files, clocks, and the operator's hand on hosts."""

from __future__ import annotations

import logging
from datetime import datetime
from urllib.parse import quote

from gatekeeper import urls
from gatekeeper.clock import utc
from gatekeeper.config import Config, host_named
from gatekeeper.errors import GateClosed, GatekeeperError, SidecarError
from gatekeeper.pacing.explain import ClockView
from gatekeeper.remote.agents import check_agent
from gatekeeper.remote.answers import Answers
from gatekeeper.remote.files import policy_of, robots_of
from gatekeeper.remote.line import Answer, Line, Unreached
from gatekeeper.remote.wire import (
    Alive,
    BlockBody,
    Explanation,
    HostBody,
    RefreshBody,
    encode,
    read,
)
from gatekeeper.robots import Policy, RobotsTxt

__all__ = ["Controlled", "identity_of"]

_log = logging.getLogger(__name__)

_IDENTITY = 5.0
"""Seconds in which a sidecar must say who it is: a crawl may begin without that."""


class Controlled:
    """The files' and the operator's methods of a `RemoteGatekeeper`.

    Each raises SidecarError where the sidecar can't be asked: here no fail mode has an
    answer to give.
    """

    config: Config
    _name: str | None
    _line: Line
    _answers: Answers
    _open: bool

    async def robots(self, url: str) -> RobotsTxt | None:
        """The robots.txt that speaks for the URL's origin; None where there is none to read.

        The text is the sidecar's, read here. None too where guard or operator decide.
        Raises InvalidURL.
        """
        return await robots_of(await self._explain(url, None), self.config.robots)

    async def policy(self, url: str, *, user_agent: str | None = None) -> Policy:
        """The file as it reads for the agent. Raises InvalidURL.

        Where there is no file it allows everything, where it can't be had nothing; where
        the operator decides, what he says.
        """
        agent = user_agent or self._name
        told = await self._explain(url, agent)
        robots = await robots_of(told, self.config.robots)
        return policy_of(told, robots, agent or told.decision.user_agent, self.config.robots)

    async def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from.

        `host` is a name, an address or a URL, here and below. Raises ConfigError for others.
        """
        answer = await self._must("GET", f"/v1/hosts/{_segment(host)}")
        return read(answer, HostBody).clocks

    async def refresh(self, origin: str) -> None:
        """Ask the origin (or the origin of that URL) again now. Raises InvalidURL.

        Where the host's turn is far off it returns before, and the sidecar goes on.
        """
        target = urls.parse(origin)
        await self._control(target.host, "refresh", encode(RefreshBody(target.origin)))
        self._answers.forget()

    async def block(self, host: str, until: datetime | float, reason: str = "operator") -> None:
        """No request to the host before `until` (aware datetime, or wall seconds)."""
        moment = until if isinstance(until, datetime) else utc(until)
        await self._control(host, "block", encode(BlockBody(moment, reason)))

    async def pause(self, host: str) -> None:
        """No turns for the host until `resume`."""
        await self._control(host, "pause", b"{}")

    async def resume(self, host: str) -> None:
        """Turns again; lifts a pause, not a block."""
        await self._control(host, "resume", b"{}")

    def _admit(self, user_agent: str | None) -> None:
        """Raise unless a question can be put, for that agent."""
        if not self._open:
            raise GateClosed("open the gate first: async with RemoteGatekeeper(...) as gate")
        if user_agent is not None:
            check_agent(user_agent)

    async def _explain(self, url: str, agent: str | None) -> Explanation:
        # The question is about "/": of /robots.txt itself nothing could be learnt (RFC-20).
        query = f"url={quote(urls.parse(url).origin + '/', safe='')}"
        if agent is not None:
            query += f"&user_agent={quote(agent, safe='')}"
        return read(await self._must("GET", f"/v1/explain?{query}", agent=agent), Explanation)

    async def _control(self, host: str, action: str, body: bytes) -> None:
        answer = await self._must("POST", f"/v1/hosts/{_segment(host)}/{action}", body)
        read(answer, HostBody)

    async def _must(
        self, method: str, path: str, body: bytes | None = None, *, agent: str | None = None
    ) -> Answer:
        """An answer, whatever it says. Raises SidecarError where none comes."""
        self._admit(agent)
        try:
            return await self._line.ask(method, path, body)
        except Unreached as error:
            raise SidecarError(503, "unreachable", str(error)) from None


async def identity_of(line: Line) -> str | None:
    """The name under which a sidecar asks; None where it can't be asked, or doesn't say."""
    try:
        answer = await line.request("GET", "/healthz", timeout=_IDENTITY)
        return read(answer, Alive).user_agent
    except (Unreached, GatekeeperError) as error:
        _log.info("the sidecar does not say who it is: %s", error)
        return None


def _segment(host: str) -> str:
    return quote(host_named(host), safe="")
