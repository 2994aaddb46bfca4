"""A store whose memory is really full: nothing is granted, members are notified, and everything
continues by itself once there is memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger
from gatekeeper.pacing.ledger import End, NotBefore, Report
from tests.fleet.conftest import Join
from tests.fleet.server import Server
from tests.pacing.ledger_rules import Listener, granted, near, take, wait_of
from tests.waiting_support import until

JUNK = 50_000
"""The size in bytes of the values that fill the memory."""


@pytest.fixture
def full(server: Server) -> Iterator[Callable[[], None]]:
    """Return a function that fills the memory of the server."""

    def fill() -> None:
        server.ask("CONFIG", "SET", "maxmemory", "8mb")
        numbers = itertools.count()
        while server.ask("SET", f"junk:{next(numbers)}", "x" * JUNK) == b"+OK\r\n":
            pass
        # The connection of the refused command had buffers, which are free now.
        server.ask("CONFIG", "SET", "maxmemory", "8000000")

    yield fill
    server.ask("CONFIG", "SET", "maxmemory", "0")


def empty(server: Server) -> None:
    """Free the memory again."""
    numbers = itertools.count()
    while server.ask("DEL", f"junk:{next(numbers)}") == b":1\r\n":
        pass


async def refused(ledger: RedisLedger, call: str, *arguments: object) -> None:
    with pytest.raises(LedgerLost):
        await getattr(ledger, call)(*arguments)


async def test_a_store_out_of_memory_is_lost_until_memory_is_free(
    join: Join,
    server: Server,
    full: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.LOST_AFTER", 0.1)
    listener = Listener()
    ledger = await join(user=lambda one: one.listen("a", listener))
    await ledger.block([Report("blocked", 60.0, "429")])
    assert await granted(ledger, "a:1", "h")
    epochs = ledger.stats().epochs
    full()
    for call, arguments in (
        ("take", [[]]),
        ("head", [["a:1"]]),
        ("block", [[Report("x", 5.0, "429")]]),
        ("end", [[End("a:1")]]),
    ):
        if call == "take":
            with pytest.raises(LedgerLost):
                await take(ledger, "a:2", "other")
        else:
            await refused(ledger, call, *arguments)
    await until(lambda: listener.losses == [True])
    assert ledger.state == "lost"
    assert not ledger.ready
    with pytest.raises(LedgerLost):
        await take(ledger, "a:2", "other")
    empty(server)
    await until(lambda: listener.losses == [True, False])
    assert ledger.state == "connected"
    assert ledger.stats().epochs == epochs  # the store had not lost anything
    assert isinstance(await take(ledger, "a:3", "h"), NotBefore)  # the end could not be sent
    assert near(await wait_of(ledger, "a:4", "blocked"), 59.0, 3.0)
    await ledger.end([End("a:1")])
    assert near(await wait_of(ledger, "a:3", "h"), 1.0, 0.5)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert ["maxmemory" in one for one in said] == [True, False]  # lost with the reason, then back
