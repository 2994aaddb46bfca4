"""The first and the second Ctrl-C in a crawl with requests in flight."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gatekeeper.crawl.progress import Progress
from gatekeeper.crawl.runner import interruptible


class Running:
    """The part of a crawl that signal handlers use."""

    def __init__(self) -> None:
        self.stops = 0
        self.in_flight = ["http://a.test/slow"]

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.getsignal(request.param)
    yield request.param
    assert signal.getsignal(request.param) is before


async def turns_of_the_loop(many: int = 10) -> None:
    for _ in range(many):
        await asyncio.sleep(0)


def test_the_first_signal_stops_the_crawl_cleanly(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Running()

    async def crawl() -> bool:
        async with interruptible(work, Progress(), 5.0) as interrupted:  # type: ignore[arg-type]
            signal.raise_signal(number)
            await turns_of_the_loop()
        return interrupted()

    assert asyncio.run(crawl())
    assert work.stops == 1
    assert "stopping: waiting at most 5 s for http://a.test/slow" in capsys.readouterr().err


def test_the_second_signal_ends_the_crawl_and_every_task_runs_its_cleanup(
    number: signal.Signals,
) -> None:
    work, wound_up = Running(), []

    async def task(name: int) -> None:
        try:
            while True:
                await asyncio.sleep(0)  # always in the loop's hands, where one could get lost
        finally:
            wound_up.append(name)

    async def crawl() -> None:
        crawling = interruptible(work, Progress(), 5.0)  # type: ignore[arg-type]
        async with crawling, asyncio.TaskGroup() as group:
            for name in range(20):
                group.create_task(task(name))
            await turns_of_the_loop()
            signal.raise_signal(number)
            await turns_of_the_loop()
            signal.raise_signal(number)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(crawl())
    assert sorted(wound_up) == list(range(20))
    assert work.stops == 1


@pytest.mark.parametrize("error", [None, OSError("full")])
def test_a_second_signal_at_the_end_does_not_interrupt_the_clean_up(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """Its cancellation must not interrupt the closing of files and connections."""
    handlers, closed = {}, []

    def add(number: int, handler: Callable[[int], None], *arguments: int) -> None:
        handlers[number] = partial(handler, *arguments)

    async def crawl() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_signal_handler", add)
        try:
            async with interruptible(Running(), Progress(), 5.0):  # type: ignore[arg-type]
                for _ in range(2):
                    handlers[signal.SIGINT]()
                if error is not None:
                    raise error
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(crawl())
    assert closed == [True]


def test_the_handler_of_the_runner_is_restored_after_the_crawl() -> None:
    """The runner's handler cancels the task instead of raising between two callbacks."""

    async def crawl() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with interruptible(Running(), Progress(), 5.0):  # type: ignore[arg-type]
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
        assert before is not signal.default_int_handler

    asyncio.run(crawl())
