"""Fixtures: a real server, and control over its clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from gatekeeper.config import FleetConfig
from gatekeeper.errors import LedgerLost
from gatekeeper.fleet import RedisLedger, scripts
from gatekeeper.fleet import store as store_module
from gatekeeper.fleet.store import Store
from gatekeeper.pacing.ledger import Granted, NotBefore
from tests.fleet.server import BINARY, Server
from tests.pacing.ledger_rules import real_time, take
from tests.pacing_support import ShiftedClock
from tests.waiting_support import until

SHIFTED = """(function()
  local t = redis.call('TIME')
  local by = tonumber(redis.call('GET', '{shift}') or '0')
  return {0, t[1] * 1000000 + t[2] + by}
end)()"""


class FleetTime:
    """Advances the clocks of the server and of its members, together or separately."""

    def __init__(self, server: Server, clock: ShiftedClock) -> None:
        self.server = server
        self.clock = clock

    async def tick(self, seconds: float) -> None:
        """Advance all clocks."""
        self.server_alone(seconds)
        self.clock.by += seconds

    def server_alone(self, seconds: float) -> None:
        """Set the server's clock."""
        self.server.ask("INCRBY", "{shift}", str(round(seconds * 1e6)))


@pytest.fixture(autouse=True)
def long_deadlines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise the deadline of calls, so that a busy machine does not lose the store. Tests of
    deadlines set their own. A new listener hears at once, since every test has some."""
    monkeypatch.setattr(store_module, "CALL_DEADLINE", 20.0)
    monkeypatch.setattr(store_module, "POLL_SECONDS", 0.02)
    with real_time():
        yield


@pytest.fixture(scope="session")
def running() -> Iterator[Server]:
    if BINARY is None:
        pytest.skip("no redis-server here")
    server = Server()
    server.start()
    yield server
    server.close()


@pytest.fixture
def server(running: Server) -> Server:
    running.ask("FLUSHALL")
    running.ask("SCRIPT", "FLUSH")
    return running


@pytest.fixture
def time(server: Server, monkeypatch: pytest.MonkeyPatch) -> FleetTime:
    for name in ("OPERATIONS", "DECLARE", "BEAT", "PUSHED", "LEAVE"):
        text = getattr(scripts, name).replace("redis.call('TIME')", SHIFTED)
        monkeypatch.setattr(scripts, name, text)
    return FleetTime(server, ShiftedClock())


async def heartbeat(*ledgers: RedisLedger) -> None:
    """Have each member send a heartbeat now, one after the other."""
    for ledger in ledgers:
        async with lock_of(ledger):
            await ledger._send_heartbeat()


async def deafen(ledger: RedisLedger) -> None:
    """The member receives no messages any more."""
    await _end(ledger._listen_task)


async def silence(ledger: RedisLedger) -> None:
    """The member sends no heartbeats any more, and receives no messages."""
    await deafen(ledger)
    await _end(ledger._heartbeat_task)


async def _end(task: asyncio.Task[None] | None) -> None:
    assert task is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cut_off(ledger: RedisLedger) -> None:
    """The member neither receives nor sends anything any more, and does not notice."""
    await silence(ledger)
    await store_of(ledger).hang_up()


async def again_or_granted(
    ledger: RedisLedger, token: str, host: str, interval: float = 1.0
) -> Granted | NotBefore:
    """Return the answer after a loss, which the first calls may be needed to detect."""
    for _ in range(3):
        try:
            return await take(ledger, token, host, interval=interval)
        except LedgerLost:
            continue
    raise AssertionError("it does not come back")


async def again(ledger: RedisLedger, token: str, host: str, interval: float = 1.0) -> NotBefore:
    """Return the answer after a loss, which is no grant."""
    answer = await again_or_granted(ledger, token, host, interval)
    assert isinstance(answer, NotBefore), answer
    return answer


async def end_quarantine(ledger: RedisLedger) -> None:
    """Skip the quarantine of an empty store."""
    await ledger._store.run("HDEL", ledger._key("epoch"), "until", "floor")


def lock_of(ledger: RedisLedger) -> asyncio.Lock:
    """What a heartbeat holds until it is answered, and a recovery until its end."""
    return ledger._lock


def flights_of(ledger: RedisLedger) -> set[asyncio.Task[None]]:
    """The flights that are under way."""
    return ledger._flights.tasks


def unsent(ledger: RedisLedger) -> bool:
    """Whether calls wait for a flight."""
    return bool(ledger._pending)


def forget_epoch(ledger: RedisLedger) -> None:
    """Let the member know that the store has lost its data."""
    ledger._epoch = ""


def store_of(ledger: RedisLedger) -> Store:
    """The member's connection, so that a test can make its calls fail."""
    return ledger._store


Join = Callable[..., Awaitable[RedisLedger]]


@pytest.fixture
async def join(server: Server, time: FleetTime) -> AsyncIterator[Join]:
    """Create members; the first one waits until the quarantine of the empty store is over. `user`
    is called with each ledger before it is opened, so that it can register listeners."""
    made: list[RedisLedger] = []

    async def build(
        *, wait: bool = True, user: Callable[[RedisLedger], object] | None = None, **settings: Any
    ) -> RedisLedger:
        ledger = RedisLedger(server.url, clock=time.clock, config=FleetConfig(**settings))
        made.append(ledger)
        if user is not None:
            user(ledger)
        await ledger.open()
        await until(lambda: ledger.hearing)  # until then waiters poll once a second
        if wait and len(made) == 1:
            await time.tick(100_000)
            await heartbeat(ledger)
        return ledger

    yield build
    for ledger in made:
        await ledger.close()


@pytest.fixture
async def ledger(join: Join) -> RedisLedger:
    return await join()
