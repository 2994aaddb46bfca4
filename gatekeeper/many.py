"""Many questions put to a gate at once."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from gatekeeper.batching import in_order
from gatekeeper.deadlock import WaitsForItself
from gatekeeper.decision import Decision
from gatekeeper.errors import GatekeeperError, InvalidURL
from gatekeeper.fetching.records import Record
from gatekeeper.middleware import refuse_one_text
from gatekeeper.operating import Operated
from gatekeeper.urls import Target, parse

__all__ = ["Many"]

_log = logging.getLogger(__name__)


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
        refuse_one_text(urls)
        urls = list(urls)
        agent = self._token_of(user_agent)
        try:
            answers = self._answers.recall_all(urls, agent)
        except Exception:  # noqa: BLE001 - one URL's error is its own
            _log.exception("many URLs can't be looked up at once")
            answers = [None] * len(urls)  # each is looked at by itself
        missing = [url for url, known in zip(urls, answers, strict=True) if known is None]
        async with aclosing(self.check_many(missing, user_agent=user_agent)) as rest:
            return [await anext(rest) if known is None else known for known in answers]

    async def check_many(
        self, urls: Iterable[str], *, user_agent: str | None = None
    ) -> AsyncGenerator[Decision, None]:
        """Decisions in the order of the URLs; cold origins are asked in parallel.

        Text that is no URL gives DENY with reason invalid_url, so that nothing is lost.
        """
        refuse_one_text(urls)
        agent = self._token_of(user_agent)
        asker = asyncio.current_task()

        def answer(url: str) -> Decision | str:
            try:
                return self._answer(url, agent)
            except Exception as error:  # noqa: BLE001 - see `_instead`
                return self._instead(url, agent, error)

        async def ask(origin: str) -> Record | WaitsForItself:
            # In a task of the batch's own; the leases that count are the asker's.
            try:
                return await self._learn(parse(f"{origin}/"), asker)
            except WaitsForItself as error:
                return error

        def settle(url: str, known: Record | WaitsForItself) -> Decision:
            try:
                target = parse(url)
                if isinstance(known, WaitsForItself):
                    return self._decider.held_back(url, target, agent, known.held, known.whose)
                return self._decide(url, target, known, agent)
            except Exception as error:  # noqa: BLE001 - see `_instead`
                return self._instead(url, agent, error)

        async for decision in in_order(urls, answer, ask, settle):
            yield decision

    def _answer(self, url: str, agent: str) -> Decision | str:
        """The decision, or the origin that has to be asked first. Raises InvalidURL."""
        decision = self._answers.recall(url, agent)
        if decision is not None:
            return decision
        target = parse(url)
        decision = self._decider.outright(url, target, agent)
        if decision is not None:
            return decision
        record = self._fresh(target.origin)
        if record is None:
            return target.origin
        return self._decide(url, target, record, agent)

    def _instead(self, url: str, agent: str, error: Exception) -> Decision:
        """The decision about a URL of many whose question failed: none of the others is lost.

        Raises what is not about this URL: the gate is shut, or the caller gave no text.
        """
        if isinstance(error, InvalidURL):
            return self._decider.invalid(url, error.problem, agent)
        if isinstance(error, GatekeeperError) or not isinstance(url, str):
            raise error
        return self._decider.failed(url, agent, error)
