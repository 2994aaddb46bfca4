"""Many questions put to a gate at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from gatekeeper.batching import in_order
from gatekeeper.decision import Decision
from gatekeeper.errors import InvalidURL
from gatekeeper.fetching.records import Record
from gatekeeper.operating import Operated
from gatekeeper.urls import Target, parse

__all__ = ["Many"]


class Many(Operated):
    """The methods of a gate that take many URLs."""

    @abstractmethod
    async def check(self, url: str, *, user_agent: str | None = None) -> Decision:
        """One question."""

    @abstractmethod
    def _fresh(self, origin: str) -> Record | None:
        """What is known of the origin, if it need not be asked again."""

    @abstractmethod
    def _decide(self, raw: str, target: Target, record: Record, agent: str) -> Decision:
        """What a record says of a URL."""

    async def check_all(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> list[Decision]:
        """What `check_many` gives, as a list: warm origins are answered in one go."""
        urls = list(urls)
        answers = self._answers.recall_all(urls, self._token_of(user_agent))
        missing = [url for url, known in zip(urls, answers, strict=True) if known is None]
        async with aclosing(self.check_many(missing, user_agent=user_agent)) as rest:
            return [await anext(rest) if known is None else known for known in answers]

    async def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncGenerator[Decision, None]:
        """Decisions in the order of the URLs; cold origins are asked in parallel.

        Text that is no URL gives DENY with reason invalid_url, so that nothing is lost.
        """
        agent = self._token_of(user_agent)
        if self._lessor.foresees:  # `answer` could not tell which file waits for the asker
            for url in urls:
                try:
                    yield await self.check(url, user_agent=user_agent)
                except InvalidURL as error:
                    yield self._decider.invalid(url, error.problem, agent)
            return

        def answer(url: str) -> Decision | str:
            decision = self._answers.recall(url, agent)
            if decision is not None:
                return decision
            try:
                target = parse(url)
            except InvalidURL as error:
                return self._decider.invalid(url, error.problem, agent)
            decision = self._decider.outright(url, target, agent)
            if decision is not None:
                return decision
            record = self._fresh(target.origin)
            if record is None:
                held = self._held_back(url, target, agent)
                return target.origin if held is None else held
            return self._decide(url, target, record, agent)

        def settle(url: str, record: Record) -> Decision:
            return self._decide(url, parse(url), record, agent)

        async for decision in in_order(urls, answer, self._open.get, settle):
            yield decision
