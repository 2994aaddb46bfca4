"""Fleets in virtual time over the real scripts, with a store that loses data at any message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from gatekeeper.fleet.members import MemberList
from tests.fleet.explorer import explore, impatient, plan_of, told_after
from tests.fleet.server import BINARY, Server

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server here")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of a server that nothing else uses."""
    server = Server()
    server.start()
    with redis.Redis(unix_socket_path=str(server.socket)) as one:
        yield one
    server.close()


RENEWED = (1139,)
"""Runs in which a request ends while its renewal waits for a recovery."""


@pytest.mark.parametrize("seeds", [range(12), (*range(12, 24), *RENEWED)])
def test_no_explored_order_of_events_violates_an_interval(
    client: Any, seeds: Sequence[int]
) -> None:
    """`python -m tests.fleet.explorer` runs thousands, and prints the log of a single one."""
    visits = 0
    for seed in seeds:
        outcome = explore(plan_of(seed), client)
        assert not outcome.violations, plan_of(seed)
        visits += outcome.visits
    assert visits > 50


def test_the_explorer_finds_a_member_list_that_forgets_members(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer finds violations: here each member waits only for itself."""
    push_arguments = MemberList.push_arguments

    def alone(self: MemberList, epoch: str, completeness: int) -> list[str]:
        since, *_ = push_arguments(self, epoch, completeness)
        return [since, self._own]

    monkeypatch.setattr(MemberList, "push_arguments", alone)
    # These show it; if the plans change, others do.
    assert any(explore(plan_of(seed), client).violations for seed in (29, 33, *range(60)))


OVERTAKEN = (14, 44, 50)
"""Runs in which an end is in time and its take is not, or both are sent together."""


@pytest.mark.parametrize("seeds", [OVERTAKEN, range(5)], ids=["overtaken", "others"])
def test_a_waiter_that_gives_up_leaves_no_hold(client: Any, seeds: Sequence[int]) -> None:
    """All waiters give up soon, before or after their grant, far from the store and near it."""
    for seed in seeds:
        assert not explore(impatient(seed), client).violations, impatient(seed)


def test_the_explorer_finds_a_hold_that_nobody_owns(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatekeeper.fleet.redis_ledger.repeated_ends", lambda calls, is_over: [])
    found = [one for seed in OVERTAKEN for one in explore(impatient(seed), client).violations]
    assert found
    assert all(one.startswith("left for nobody") for one in found)


def test_heads_reach_the_store_within_three_round_trips(client: Any) -> None:
    """If computing takes no time; any excess in `benchmarks.fleet` is due to the machine."""
    told, late = told_after(client, hosts=200, trip=0.02)
    assert len(told) > 550  # some heads are replaced by ends
    assert told[int(0.99 * len(told))] < 1.6
    assert told[-1] < 3.0
    assert told[len(told) // 2] < 1.2
    assert late[int(0.99 * len(late))] < 1.5
    assert late[-1] < 3.0
