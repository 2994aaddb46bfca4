"""A directory whose source gives the answers that the test sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.fetching.directory import Directory
from gatekeeper.fetching.outcomes import Lifetime, Outcome, Retrieval, Validators
from gatekeeper.fetching.records import Record
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.storage.base import Storage

ORIGIN = "https://a.test"
OLD = b"User-agent: *\nDisallow: /old\n"
NEW = b"User-agent: *\nDisallow: /new\n"
HOUR = 3600.0
DAY = 86_400.0


def file(body: bytes = OLD, **fields: Any) -> Retrieval:
    """Return the retrieval of an ordinary file."""
    fields.setdefault("status", 200)
    return Retrieval(outcome=Outcome.RULES, body=body, took=0.25, **fields)


def lasting(seconds: float, body: bytes = OLD, **fields: Any) -> Retrieval:
    """Return the retrieval of a file with a lifetime."""
    return file(body, lifetime=Lifetime(seconds), **fields)


class Source:
    """A RobotsSource; `answer` is a retrieval, an exception, or a function of the origin."""

    def __init__(self, answer: Any = None) -> None:
        self.answer: Any = file() if answer is None else answer
        self.asked: list[str] = []
        self.validators: list[Validators | None] = []
        self.hold: asyncio.Event | None = None
        """While set to an unset event, nobody gets an answer."""
        self.running = 0

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        self.asked.append(origin)
        self.validators.append(validators)
        self.running += 1
        try:
            if self.hold is not None:
                await self.hold.wait()
            answer = self.answer
            if callable(answer):
                answer = answer(origin)
                if asyncio.iscoroutine(answer):
                    answer = await answer
        finally:
            self.running -= 1
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Retrieval)
        return answer

    async def reach(self, origin: str) -> bool | None:
        """Return None: unknown."""
        return None


class House:
    """A directory with its collaborators."""

    def __init__(
        self, directory: Directory, source: Source, clock: VirtualClock, config: Config
    ) -> None:
        self.directory = directory
        self.source = source
        self.clock = clock
        self.config = config

    async def get(self, origin: str = ORIGIN) -> Record:
        return await self.directory.get(origin)

    def allows(self, record: Record, path: str) -> bool | None:
        """Return whether a path is allowed now; None if the record defers or denies everything."""
        standing = record.standing(self.clock)
        if standing.verdict is not None:
            return True if standing.verdict == "allow" else None
        assert standing.robots is not None
        return standing.robots.policy("testbot").allowed(path)


@asynccontextmanager
async def house(
    answer: Any = None,
    *,
    clock: VirtualClock | None = None,
    storage: Storage | None = None,
    seed: int = 1,
    choose: Callable[[RobotsTxt, str], Policy] = RobotsTxt.policy,
    agent: str = "",
    **sections: Any,
) -> AsyncIterator[House]:
    """Provide an open directory, closed at the end."""
    clock = clock or VirtualClock(start=1000.0)
    config = Config.from_dict(sections)
    source = answer if isinstance(answer, Source) else Source(answer)
    directory = Directory(
        source,
        config=config,
        clock=clock,
        rng=random.Random(seed),
        storage=storage,
        choose=choose,
        agent=agent,
    )
    await directory.open()
    try:
        yield House(directory, source, clock, config)
    finally:
        await directory.close()
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
