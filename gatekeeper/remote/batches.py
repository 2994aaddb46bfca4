"""`Batches`: many questions in one request, no more of them than the sidecar takes."""

from __future__ import annotations

from gatekeeper.decision import Decision
from gatekeeper.errors import SidecarError
from gatekeeper.remote.line import Line
from gatekeeper.remote.wire import BATCH, Batch, Decisions, bound_in, encode, read

__all__ = ["Batches"]


class Batches:
    """Sends batches, and learns from a refusal how long they may be."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.longest = BATCH
        """URLs that a batch may have, as far as is known: server.max_batch may be less."""

    async def post(self, urls: list[str], agent: str | None) -> list[Decision]:
        """The decisions in the order of the URLs. Raises SidecarError, or Unreached."""
        answer = await self._line.ask("POST", "/v1/check", encode(Batch(urls, agent)))
        if answer.status == 413 and len(urls) > 1:
            most = bound_in(answer)
            if most is not None:
                self.longest = max(1, min(self.longest, int(most)))
            # Without a number it was the octets: server.max_body.
            length = min(self.longest, len(urls) - 1) if most is not None else len(urls) // 2
            parts = [urls[at : at + length] for at in range(0, len(urls), length)]
            return [decision for part in parts for decision in await self.post(part, agent)]
        decisions = read(answer, Decisions).decisions
        if len(decisions) != len(urls):
            raise SidecarError(
                answer.status,
                "unreadable",
                f"{len(decisions)} answers to {len(urls)} questions",
            )
        return decisions
