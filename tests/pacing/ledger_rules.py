"""Rules that every ledger must obey, wherever it stores its records. Each test takes the fixtures
`ledger` and `time`; `time.tick(seconds)` advances the ledger's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import pytest

from gatekeeper.pacing.host_settings import DAY, DailyBudget
from gatekeeper.pacing.ledger import (
    LAPSE,
    End,
    Granted,
    Ledger,
    NotBefore,
    Report,
    ScopeClock,
    ScopeRequest,
    TakeRequest,
)
from tests.waiting_support import until

PATIENCE = 20.0
"""Most seconds that a test waits for anything."""


class Time(Protocol):
    """The ledger's clock."""

    async def tick(self, seconds: float) -> None: ...


class Listener:
    """Records every notification."""

    def __init__(self) -> None:
        self.opened_for: list[tuple[str, float]] = []
        self.reports: list[Report] = []
        self.pauses: list[tuple[str, bool]] = []
        self.losses: list[bool] = []
        self._told = asyncio.Event()

    def opened(self, token: str, seconds: float) -> None:
        self.opened_for.append((token, seconds))
        self._told.set()

    def blocked(self, report: Report) -> None:
        self.reports.append(report)
        self._told.set()

    def paused(self, scope: str, paused: bool) -> None:
        self.pauses.append((scope, paused))
        self._told.set()

    def lost(self, lost: bool) -> None:
        self.losses.append(lost)
        self._told.set()

    def clocks(self) -> list[ScopeClock]:
        return []

    async def until(self, heard: Callable[[], object]) -> None:
        """Wait until the notifications make `heard` true; those of a fleet come over a network."""
        async with asyncio.timeout(PATIENCE):
            while not heard():
                self._told.clear()
                await self._told.wait()

    async def heard(self, count: int = 1) -> None:
        """Wait for this many openings."""
        await self.until(lambda: len(self.opened_for) >= count)


async def listen(ledger: Ledger, owner: str, listener: Listener) -> None:
    """Subscribe a listener, and wait until the subscription is in force."""
    ledger.listen(owner, listener)
    await until(lambda: getattr(ledger, "hearing", True))


def asks(token: str, *scopes: ScopeRequest | str, interval: float = 1.0) -> TakeRequest:
    return TakeRequest(
        token,
        tuple(ScopeRequest(one, interval) if isinstance(one, str) else one for one in scopes),
    )


async def take(
    ledger: Ledger, token: str, *scopes: ScopeRequest | str, interval: float = 1.0
) -> Granted | NotBefore:
    return (await ledger.take([asks(token, *scopes, interval=interval)]))[0]


async def granted(
    ledger: Ledger, token: str, *scopes: ScopeRequest | str, interval: float = 1.0
) -> bool:
    return isinstance(await take(ledger, token, *scopes, interval=interval), Granted)


async def wait_of(
    ledger: Ledger, token: str, *scopes: ScopeRequest | str, interval: float = 1.0
) -> float:
    answer = await take(ledger, token, *scopes, interval=interval)
    assert isinstance(answer, NotBefore), answer
    return answer.seconds


_REAL: list[float] = []


@contextmanager
def real_time() -> Iterator[None]:
    """For ledgers that run in real time: lets `near` know when that started."""
    _REAL.append(monotonic())
    try:
        yield
    finally:
        _REAL.pop()


def near(seconds: float, wanted: float, slack: float = 0.25) -> bool:
    """Compare with tolerance: a ledger's real time may have advanced a little; on a slow machine by
    as much as the whole test takes."""
    passed = monotonic() - _REAL[-1] if _REAL else 0.0
    return wanted - max(slack, passed) <= seconds <= wanted + 1e-6


class LedgerRules:
    """To be inherited by a class with the fixtures `ledger` and `time`."""

    async def test_the_interval_counts_from_the_head_of_the_response(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=5.0)
        await time.tick(2.0)
        await ledger.head(["a:1"])
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "b:1", "h", interval=5.0), 5.0)
        await time.tick(5.1)
        assert await granted(ledger, "b:1", "h", interval=5.0)

    async def test_no_request_starts_while_a_response_head_is_awaited(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h")
        for _ in range(3):
            await time.tick(7.0)
            await ledger.renew(["a:1"])
            assert not await granted(ledger, "b:1", "h")

    async def test_without_an_interval_only_the_slots_limit_requests(
        self, ledger: Ledger, time: Time
    ) -> None:
        two = ScopeRequest("h", 0.0, 2)
        assert await granted(ledger, "a:1", two)
        assert await granted(ledger, "b:1", two)
        assert not await granted(ledger, "c:1", two)
        await ledger.end([End("a:1")])
        assert await granted(ledger, "c:1", two)

    async def test_a_grant_takes_all_scopes_or_none(self, ledger: Ledger, time: Time) -> None:
        assert await granted(ledger, "a:1", "h", "g")
        assert not await granted(ledger, "b:1", "k", "g")
        assert await granted(ledger, "c:1", "k")  # b took nothing of it, and reserved nothing.

    async def test_a_repeated_request_gets_the_same_answer(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h")
        assert await granted(ledger, "a:1", "h")
        await ledger.end([End("a:1")])
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "b:1", "h"), 1.0)

    async def test_of_two_intervals_the_longer_counts(self, ledger: Ledger, time: Time) -> None:
        for token, first, second in (("a:1", 3.0, 1.0), ("a:2", 1.0, 3.0)):
            host = f"h{token}"
            assert await granted(ledger, token, host, interval=first)
            await ledger.end([End(token)])
            assert near(await wait_of(ledger, "b:1", host, interval=second), 3.0)

    async def test_a_known_interval_replaces_a_guessed_one(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", ScopeRequest("h", 30.0, 1, True))
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "c:1", ScopeRequest("h", 1.0, 1, True)), 30.0)
        assert near(await wait_of(ledger, "b:1", ScopeRequest("h", 2.0)), 2.0)

    async def test_a_hold_that_ran_out_unheaded_moves_the_clock(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=60.0)
        await time.tick(20.1)
        # It may have been sent at the end of its hold, so a whole interval counts from there.
        assert near(await wait_of(ledger, "b:1", "h", interval=60.0), 60.0)

    async def test_a_headed_hold_that_ran_out_frees_its_slot(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=1.0)
        await ledger.head(["a:1"])
        await time.tick(5.0)
        assert not await granted(ledger, "b:1", "h")
        await time.tick(15.1)
        assert await granted(ledger, "b:1", "h")

    async def test_a_request_under_way_is_held_again_after_its_hold_ran_out(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h")
        await time.tick(25.0)
        await ledger.renew(["a:1"])
        assert not await granted(ledger, "b:1", "h")
        await time.tick(5.0)
        assert not await granted(ledger, "b:1", "h")

    async def test_an_undone_grant_leaves_the_clock_as_it_was(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=60.0)
        await ledger.end([End("a:1", "undone")])
        assert await granted(ledger, "b:1", "h", interval=60.0)
        await ledger.end([End("b:1", "given back")])
        assert near(await wait_of(ledger, "c:1", "h", interval=60.0), 60.0)

    async def test_a_grant_undone_after_another_started_leaves_the_clock(
        self, ledger: Ledger, time: Time
    ) -> None:
        two = ScopeRequest("h", 0.0, 2)
        assert await granted(ledger, "a:1", two)
        await time.tick(0.01)
        assert await granted(ledger, "b:1", two)
        await ledger.end([End("a:1", "undone"), End("b:1")])
        assert near(await wait_of(ledger, "c:1", "h", interval=9.0), 9.0)

    async def test_of_two_blocks_the_later_end_counts(self, ledger: Ledger, time: Time) -> None:
        await ledger.block([Report("h", 50.0, "429")])
        await ledger.block([Report("h", 20.0, "earlier")])
        answer = await take(ledger, "a:1", "h")
        assert isinstance(answer, NotBefore)
        assert near(answer.seconds, 50.0)
        assert answer.clocks[0].reason == "429"
        await ledger.block([Report("h")])  # the operator lifts it
        assert await granted(ledger, "a:1", "h")

    async def test_a_report_blocks_before_the_end_frees(self, ledger: Ledger, time: Time) -> None:
        """Both come in one call, and the block is reported once more."""
        block = Report("h", 60.0, "429")
        assert await granted(ledger, "a:1", "h", interval=0.0)
        await ledger.end([End("a:1", "sent", (block,))])
        assert near(await wait_of(ledger, "b:1", "h", interval=0.0), 60.0)
        await ledger.block([block])
        assert near(await wait_of(ledger, "b:1", "h", interval=0.0), 60.0)

    async def test_an_interval_learnt_from_a_response_holds_for_all_members(
        self, ledger: Ledger, time: Time
    ) -> None:
        await ledger.block([Report("h", 0.0, "", 8.0, 100.0)])
        assert await granted(ledger, "a:1", "h")
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "b:1", "h"), 8.0)
        await time.tick(101.0)
        assert await granted(ledger, "b:1", "h")
        await ledger.end([End("b:1")])
        assert near(await wait_of(ledger, "c:1", "h"), 1.0)

    async def test_a_pause_lasts_until_the_resume(self, ledger: Ledger, time: Time) -> None:
        await ledger.pause(["h"])
        await time.tick(5000.0)
        answer = await take(ledger, "a:1", "h")
        assert isinstance(answer, NotBefore)
        assert answer.clocks[0].paused
        await ledger.resume(["h"])
        assert await granted(ledger, "a:1", "h")

    async def test_waiting_members_are_told_in_the_order_in_which_they_asked(
        self, ledger: Ledger, time: Time, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("pacing.ledger", "fleet.redis_ledger"):
            # No ticket lapses on a slow machine.
            monkeypatch.setattr(f"gatekeeper.{module}.LAPSE", 20.0)
        listener = Listener()
        await listen(ledger, "b", listener)
        other = Listener()
        await listen(ledger, "c", other)
        assert await granted(ledger, "a:1", "h")
        assert not await granted(ledger, "b:1", "h")
        assert not await granted(ledger, "c:1", "h")
        await ledger.head(["a:1"])
        await ledger.end([End("a:1")])
        await listener.heard()
        token, seconds = listener.opened_for[-1]
        assert token == "b:1"
        assert near(seconds, 1.0)
        await time.tick(1.01)
        # The second asks too early: the scope is reserved for the first.
        assert not await granted(ledger, "c:1", "h")
        assert await granted(ledger, "b:1", "h")
        assert not other.opened_for

    async def test_a_ticket_that_is_not_used_lapses(self, ledger: Ledger, time: Time) -> None:
        assert await granted(ledger, "a:1", "h")
        await ledger.end([End("a:1")])
        assert not await granted(ledger, "b:1", "h")  # and never asks again
        assert not await granted(ledger, "c:1", "h")
        await time.tick(1.0 + LAPSE + 0.02)
        assert await granted(ledger, "c:1", "h")

    async def test_a_ticket_reserves_no_scope_while_another_scope_is_closed(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=1.0)
        await ledger.end([End("a:1")])
        assert await granted(ledger, "a:2", "g", interval=100.0)
        await ledger.end([End("a:2")])
        both = (ScopeRequest("h", 1.0), ScopeRequest("g", 100.0))
        assert not await granted(ledger, "b:1", *both)
        await time.tick(1.01)
        assert await granted(ledger, "c:1", "h")

    async def test_a_shorter_interval_does_not_overtake_a_longer_one(
        self, ledger: Ledger, time: Time
    ) -> None:
        """As in the queue of a single process, the request that asked first starts first. Otherwise
        members whose robots.txt group or settings ask for less would starve the others."""
        for _ in range(2):
            assert await granted(ledger, "a:1", "h", interval=0.5)
            await ledger.head(["a:1"])
            await ledger.end([End("a:1")])
            assert near(await wait_of(ledger, "b:1", "h", interval=2.0), 2.0)
            await time.tick(1.0)
            assert near(await wait_of(ledger, "a:1", "h", interval=0.5), 1.0 + LAPSE)
            await time.tick(1.02)
            assert await granted(ledger, "b:1", "h", interval=2.0)
            await ledger.head(["b:1"])
            await ledger.end([End("b:1")])
            assert near(await wait_of(ledger, "a:1", "h", interval=0.5), 2.0)
            await time.tick(2.02)

    async def test_a_longer_interval_of_a_dead_process_reserves_the_scope_until_it_is_due(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=0.5)
        await ledger.head(["a:1"])
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "b:1", "h", interval=20.0), 20.0)
        await time.tick(1.0)
        assert near(await wait_of(ledger, "a:2", "h", interval=0.5), 19.0 + LAPSE)
        await time.tick(19.0 + LAPSE + 0.02)
        assert await granted(ledger, "a:2", "h", interval=0.5)

    async def test_a_longer_interval_reserves_no_scope_while_another_scope_is_closed(
        self, ledger: Ledger, time: Time
    ) -> None:
        await ledger.block([Report("h", 60.0, "429")])
        assert await granted(ledger, "a:1", "group", interval=0.5)
        await ledger.head(["a:1"])
        await ledger.end([End("a:1")])
        assert near(await wait_of(ledger, "b:1", "h", "group", interval=5.0), 60.0)
        await time.tick(0.52)
        assert await granted(ledger, "a:2", "group", interval=0.5)

    async def test_a_contested_scope_costs_two_calls_per_grant(
        self, ledger: Ledger, time: Time
    ) -> None:
        tokens = [f"m{number}:1" for number in range(8)]
        listeners = {token: Listener() for token in tokens}
        for token, listener in listeners.items():
            await listen(ledger, token.partition(":")[0], listener)
        calls = 0
        for token in tokens:
            calls += 1
            if await granted(ledger, token, "h"):
                current = token
        for following in tokens[1:]:
            await ledger.head([current])
            await ledger.end([End(current)])
            await listeners[following].heard()
            await time.tick(1.01)
            calls += 1
            assert await granted(ledger, following, "h")
            current = following
        assert calls == 2 * len(tokens) - 1

    async def test_every_member_is_told_of_blocks_and_pauses(
        self, ledger: Ledger, time: Time
    ) -> None:
        listener = Listener()
        await listen(ledger, "b", listener)
        assert await granted(ledger, "b:1", "warm")  # Everything is set up by now.
        await ledger.block([Report("h", 60.0, "429", 2.0, 100.0)])
        await ledger.pause(["k"])
        await listener.until(lambda: listener.reports and listener.pauses)
        assert [one.scope for one in listener.reports] == ["h"]
        assert near(listener.reports[0].seconds, 60.0)
        assert listener.reports[0].interval == 2.0
        assert listener.pauses == [("k", True)]

    async def test_a_refused_grant_tells_the_age_and_interval_of_the_clock(
        self, ledger: Ledger, time: Time
    ) -> None:
        assert await granted(ledger, "a:1", "h", interval=30.0)
        await ledger.end([End("a:1")])
        await time.tick(10.0)
        answer = await take(ledger, "b:1", "h", interval=1.0)
        assert isinstance(answer, NotBefore)
        (clock,) = answer.clocks
        assert clock.age is not None
        assert 10.0 <= clock.age < 10.5
        assert clock.interval == 30.0

    async def test_a_budget_holds_for_all_members_until_its_day_is_over(
        self, ledger: Ledger, time: Time
    ) -> None:
        page = ScopeRequest("h", 0.0, 9, False, DailyBudget(pages=2))
        assert await granted(ledger, "a:1", page)
        await time.tick(100.0)
        answer = await take(ledger, "b:1", page)
        assert isinstance(answer, Granted)
        assert [(one.scope, one.pages, one.age) for one in answer.clocks] == [("h", 2, None)]
        answer = await take(ledger, "c:1", page)
        assert isinstance(answer, NotBefore)
        assert near(answer.seconds, 3600.0)  # The day ends later, but no denial is longer.
        (clock,) = answer.clocks
        assert (clock.pages, round(clock.day or 0.0)) == (2, 100)
        assert await granted(ledger, "c:2", ScopeRequest("h", 0.0, 9))  # a robots.txt
        await time.tick(DAY - 100.5)
        assert not await granted(ledger, "c:1", page)
        await time.tick(0.6)
        assert await granted(ledger, "c:1", page)

    async def test_a_page_that_was_not_sent_does_not_count_for_the_budget(
        self, ledger: Ledger, time: Time
    ) -> None:
        page = ScopeRequest("h", 0.0, 9, False, DailyBudget(pages=1))
        for number, outcome in enumerate(("undone", "given back", "sent")):
            assert await granted(ledger, f"a:{number}", page)
            assert await granted(ledger, f"a:{number}", page)  # A repeated request counts once.
            assert not await granted(ledger, "b:1", page)
            await ledger.end([End(f"a:{number}", outcome)])  # type: ignore[arg-type]
        assert not await granted(ledger, "b:1", page)

    async def test_bytes_count_for_the_budget_once_they_are_reported(
        self, ledger: Ledger, time: Time
    ) -> None:
        page = ScopeRequest("h", 0.0, 9, False, DailyBudget(bytes=1000))
        group = ScopeRequest("g", 0.0, 9)
        assert await granted(ledger, "a:1", page, group)
        assert await granted(ledger, "a:2", page)
        await ledger.end([End("a:1", size=600)])
        assert await granted(ledger, "a:3", page)
        await ledger.end([End("a:2", size=400), End("a:3")])
        answer = await take(ledger, "a:4", page)
        assert isinstance(answer, NotBefore)
        assert answer.clocks[0].bytes == 1000
        assert await granted(ledger, "a:5", ScopeRequest("g", 0.0, 9, False, DailyBudget(bytes=9)))

    async def test_concurrent_requests_of_members_do_not_exceed_a_budget(
        self, ledger: Ledger, time: Time
    ) -> None:
        page = ScopeRequest("h", 0.0, 999, False, DailyBudget(pages=70))
        group = ScopeRequest("g", 0.0, 999)
        answers = await ledger.take([asks(f"a:{number}", page, group) for number in range(200)])
        assert sum(isinstance(one, Granted) for one in answers) == 70

    async def test_a_spent_budget_reserves_no_scope_that_others_wait_for(
        self, ledger: Ledger, time: Time
    ) -> None:
        page = ScopeRequest("h", 0.0, 1, False, DailyBudget(pages=1))
        group = ScopeRequest("g", 5.0)
        assert await granted(ledger, "a:1", page, group)
        assert not await granted(ledger, "b:1", page, group)
        await ledger.end([End("a:1")])
        assert not await granted(ledger, "b:1", page, group)
        assert not await granted(ledger, "c:1", group)
        await time.tick(5.01)
        assert await granted(ledger, "c:1", group)

    async def test_the_ledger_tells_who_holds_what(self, ledger: Ledger, time: Time) -> None:
        page = ScopeRequest("h", 0.0, 9, False, DailyBudget(pages=5))
        assert await granted(ledger, "a:1", page)
        await ledger.head(["a:1"])
        await time.tick(2.0)
        assert await granted(ledger, "b:1", page)
        await ledger.block([Report("h", 60.0, "429")])
        await ledger.pause(["g"])
        assert not await granted(ledger, "c:1", "h", "g")
        h, g, nothing = await ledger.look(["h", "g", "unknown"])
        assert [(one.owner, one.headed) for one in h.holds] == [("a", True), ("b", False)]
        assert near(20.0 - h.holds[1].age, 20.0)
        assert near(h.holds[0].seconds, 18.0)
        assert near(h.clock.blocked, 60.0)
        assert (h.clock.reason, h.clock.pages, h.waiting) == ("429", 2, 1)
        assert (g.clock.paused, g.holds) == (True, ())
        assert nothing == (ScopeClock("unknown"), (), 0)

    async def test_one_call_may_ask_for_many_grants(self, ledger: Ledger, time: Time) -> None:
        answers: Sequence[Granted | NotBefore] = await ledger.take(
            [asks(f"a:{number}", f"h{number % 300}") for number in range(600)]
        )
        assert sum(isinstance(one, Granted) for one in answers) == 300
        assert all(isinstance(one, Granted) for one in answers[:300])
