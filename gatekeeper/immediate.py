"""What a gate answers on the spot: for a server that has read a request and could go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gatekeeper.decision import Decision
from gatekeeper.leasing import Lease, Lessor
from gatekeeper.operating import token_of
from gatekeeper.prepared import Given, PreparedAnswers

__all__ = ["Immediate"]

_log = logging.getLogger(__name__)


class Immediate:
    """The methods of a gate that wait for no turn. None says nothing: the ones that may know."""

    _agent: str
    _answers: PreparedAnswers
    _lessor: Lessor

    def recall(self, url: str, *, user_agent: str | None = None) -> Decision | None:
        """The fast half of `check`."""
        agent = self._agent if user_agent is None else token_of(user_agent)
        return self._answers.recall(url, agent)

    def write_all(
        self,
        raws: Sequence[str],
        *,
        user_agent: str | None = None,
        given: list[Given] | None = None,
    ) -> list[str | None]:
        """The same for many, as JSON; `given`, if any, takes what was written."""
        agent = self._agent if user_agent is None else token_of(user_agent)
        try:
            return self._answers.write_all(raws, agent, given)
        except Exception:  # noqa: BLE001 - one URL's error is its own
            # One URL's error is not its batch's: each is looked at by itself then.
            _log.exception("many URLs can't be answered at once")
            if given is not None:
                given.clear()
            return [None] * len(raws)

    def take(self, url: str) -> Lease | None:
        """The lease that `acquire` gives with `owned=False`, if its turn is free."""
        return self._lessor.take(url, None)

    async def hold(self, url: str, seconds: float, *, user_agent: str | None = None) -> Lease:
        """A lease that an earlier process gave out and that is still out, open for `seconds`.

        It takes its host's slot at once, without a turn; with no second left it is one that
        has ended, whose report counts. Raises InvalidURL, LeaseTimeout.
        """
        return await self._lessor.hold(url, seconds, user_agent)
