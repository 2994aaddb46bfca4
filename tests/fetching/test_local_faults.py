"""A lost uplink changes no origin's record."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from tests.fetching.directories import DAY, House, file, house
from tests.memory_storage import MemoryStorage

REFUSED = Retrieval(outcome=Outcome.CONNECT_FAILED)
CUT_OFF = Retrieval(outcome=Outcome.DNS_FAILURE)
DEAD = Retrieval(outcome=Outcome.CONNECT_FAILED)


def origin(number: int) -> str:
    return f"https://o{number}.test"


async def ask(it: House, count: int) -> list[Reason]:
    records = await asyncio.gather(*(it.get(origin(n)) for n in range(count)))
    return [record.standing(it.clock).reason for record in records]


async def test_failures_of_all_origins_at_once_are_a_local_fault() -> None:
    storage = MemoryStorage()
    async with house(CUT_OFF, storage=storage) as it:
        assert it.directory.ready
        await ask(it, 40)
        assert it.directory.stats().local_fault
        assert not it.directory.ready
        assert it.directory.stats().local_faults == 1
        standing = (await it.get(origin(0))).standing(it.clock)
        assert (standing.verdict, standing.state, standing.reason) == (
            Verdict.DEFER,
            State.UNREACHABLE,
            Reason.LOCAL_FAULT,
        )
        assert standing.retry_at is not None
        assert 0 < standing.retry_at - it.clock.wall() < 70
        # Nothing is held against any of them, including those that failed before the detection.
        for n in range(40):
            assert it.directory.peek(origin(n)) is None


async def test_the_end_of_a_local_fault_is_found_by_probes() -> None:
    async with house(CUT_OFF) as it:
        await ask(it, 40)
        asked = len(it.source.asked)
        await it.clock.elapse(120.0)
        asked_again = Counter(it.source.asked[asked:])
        first = [one for one in asked_again if one not in it.source.asked[:asked]]
        assert 2 <= asked_again.total() - len(first) <= 12, "with back-off, and nobody asked"
        assert all(asked_again[one] == 1 for one in first), "who was never asked, once"
        it.source.answer = file()
        await it.clock.elapse(90.0)
        assert it.directory.ready
        records = [await it.get(origin(n)) for n in range(40)]
        assert all(record.reachable for record in records)
        assert all(record.unreachable_since is None for record in records)


async def test_during_a_fault_callers_are_answered_at_once() -> None:
    async with house(CUT_OFF) as it:
        await ask(it, 40)
        asked = len(it.source.asked)
        for n in range(100, 200):
            assert (await it.get(origin(n))).current.outcome is Outcome.LOCAL_FAULT
        assert len(it.source.asked) - asked <= 1


async def test_known_origins_are_answered_during_a_local_fault() -> None:
    async with house(file()) as it:
        await it.get("https://known.test")
        await it.clock.elapse(0.96 * DAY)  # after its soft expiry
        it.source.answer = CUT_OFF
        await ask(it, 40)
        for _ in range(10):
            record = await it.get("https://known.test")
            assert it.allows(record, "/old") is False
            await it.clock.settle()
        assert it.directory.stats().local_fault
        assert record.reachable


async def test_a_forced_refresh_during_a_fault_gives_what_is_known() -> None:
    async with house(file()) as it:
        before = await it.get("https://known.test")
        it.source.answer = CUT_OFF
        await it.clock.elapse(100.0)
        await ask(it, 40)
        assert it.directory.stats().local_fault
        assert await it.directory.refresh("https://known.test") is before


async def test_dead_origins_among_living_ones_are_dead() -> None:
    def answer(name: str) -> Retrieval:
        return DEAD if int(name[9:-5]) % 3 == 0 else file()

    async with house(answer) as it:
        reasons = await ask(it, 90)
        assert not it.directory.stats().local_fault
        assert reasons.count(Reason.CONNECT_FAILED) == 30


async def test_names_that_do_not_exist_are_no_fault_of_ours() -> None:
    async with house(Retrieval(outcome=Outcome.DNS_NXDOMAIN)) as it:
        assert set(await ask(it, 60)) == {Reason.DNS_NXDOMAIN}
        assert it.directory.ready


async def test_connections_that_are_refused_are_no_fault_of_ours() -> None:
    async with house(REFUSED) as it:
        assert set(await ask(it, 60)) == {Reason.CONNECT_FAILED}
        assert it.directory.ready


@given(
    st.lists(
        st.tuples(
            st.integers(0, 80),
            st.sampled_from([Outcome.CONNECT_FAILED, Outcome.DNS_NXDOMAIN, Outcome.TRUNCATED]),
        ),
        max_size=120,
    )
)
def test_refused_connections_and_unknown_names_are_never_a_local_fault(
    said: list[tuple[int, Outcome]],
) -> None:
    async def run() -> None:
        async with house() as it:
            for number, outcome in said:
                it.source.answer = Retrieval(outcome=outcome)
                await it.directory.refresh(origin(number))
                assert it.directory.ready
                assert it.directory.stats().local_faults == 0

    asyncio.run(run())


async def test_a_redirect_is_an_answer_wherever_it_leads() -> None:
    async with house(CUT_OFF) as it:
        await ask(it, 19)
        it.source.answer = Retrieval(
            outcome=Outcome.CONNECT_TIMEOUT, hops=("https://elsewhere.test/robots.txt",)
        )
        await it.get("https://living.test")
        it.source.answer = CUT_OFF
        await it.clock.elapse(1.0)
        await asyncio.gather(*(it.get(origin(n)) for n in range(50, 60)))
        assert it.directory.ready


async def test_the_answer_of_a_captive_portal_does_not_end_a_local_fault() -> None:
    async with house(Retrieval(outcome=Outcome.CAPTIVE_PORTAL, status=511)) as it:
        await ask(it, 40)
        assert it.directory.stats().local_fault


async def test_a_retry_delay_from_before_a_local_fault_is_restored_after_it() -> None:
    async with house(Retrieval(outcome=Outcome.SERVER_ERROR, status=500)) as it:
        before = await it.get(origin(0))
        it.source.answer = CUT_OFF
        await it.clock.elapse(100.0)
        await ask(it, 40)
        assert it.directory.stats().local_fault
        after = it.directory.recall(origin(0))
        assert after is not None
        assert after.step == before.step
        assert after.unreachable_since == before.unreachable_since


async def test_the_twelve_hours_of_an_outage_do_not_pass_during_a_local_fault() -> None:
    async with house(file()) as it:
        await it.get("https://known.test")
        await it.clock.elapse(DAY)
        it.source.answer = Retrieval(outcome=Outcome.SERVER_ERROR, status=500)
        record = await it.get("https://known.test")
        it.source.answer = CUT_OFF
        await it.clock.elapse(1.0)
        await ask(it, 40)
        assert it.directory.stats().local_fault
        await it.clock.elapse(13 * 3600.0)
        assert record.unreachable_for(it.clock.monotonic()) < 60.0
        assert record.standing(it.clock).verdict is Verdict.DEFER
