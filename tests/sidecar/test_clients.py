"""Limits of a client (T15)."""

from __future__ import annotations

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.routing import Problem
from gatekeeper.sidecar.security import ClientLimits


def test_t15_concurrent_requests_are_bounded_by_client() -> None:
    clients = ClientLimits(ServerConfig(client_concurrency=2), VirtualClock())
    clients.enter("a")
    clients.enter("a")
    with pytest.raises(Problem) as caught:
        clients.enter("a")
    clients.enter("b")

    assert caught.value.status == 429
    assert caught.value.response().headers["Retry-After"] == "1"


def test_a_place_is_free_again_when_the_request_ends() -> None:
    clients = ClientLimits(ServerConfig(client_concurrency=1), VirtualClock())
    clients.enter("a")
    clients.leave("a")
    clients.enter("a")
    with pytest.raises(Problem):
        clients.enter("a")


def test_t15_the_rate_is_bounded_and_says_when_to_come_back() -> None:
    clock = VirtualClock()
    clients = ClientLimits(ServerConfig(client_rate=2.0), clock)
    clients.enter("a")
    clients.enter("a")
    with pytest.raises(Problem) as caught:
        clients.enter("a")
    assert caught.value.response().headers["Retry-After"] == "1"

    clock.advance(0.5)
    clients.enter("a")


def test_t8_the_meters_of_unknown_clients_are_bounded() -> None:
    clients = ClientLimits(ServerConfig(client_rate=1.0), VirtualClock())
    for number in range(10_000):
        clients.enter(f"client {number}")
        clients.leave(f"client {number}")

    assert len(clients._buckets) <= 4096


def test_t15_unknown_clients_do_not_evict_the_meter_of_a_busy_client() -> None:
    """The bucket of a busy client is not evicted, however many other clients come in between."""
    clients = ClientLimits(ServerConfig(client_rate=2.0), VirtualClock())
    for number in range(3):
        for stranger in range(4_000):
            clients.enter(f"client {number} {stranger}")
        if number < 2:
            clients.enter("busy")
    with pytest.raises(Problem, match="2 requests a second"):
        clients.enter("busy")


def test_a_worker_forgets_which_clients_were_at_a_limit_that_has_changed() -> None:
    clients = ClientLimits(ServerConfig(client_concurrency=1), VirtualClock())
    clients.at_limit.add("a")
    assert not clients.may_skip("a")

    clients.adjust(ServerConfig(client_concurrency=2))
    assert clients.may_skip("a")
