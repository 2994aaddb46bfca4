"""Memory is trimmed after many clients disconnected, and not while clients come and go."""

from __future__ import annotations

from typing import Any

import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.sidecar.process import MANY_LOST, QUIET_SECONDS, MemoryTrimmer, trim_memory


@pytest.fixture
def acts() -> list[float]:
    return []


@pytest.fixture
def memory(acts: list[float]) -> Any:
    clock = VirtualClock()
    made = MemoryTrimmer(clock, lambda: acts.append(clock.monotonic()))
    made.time = clock  # type: ignore[attr-defined]
    return made


def lose(memory: MemoryTrimmer, number: int) -> None:
    for _ in range(number):
        memory.lost()


def test_it_acts_once_after_many_were_lost_and_no_more_are(memory: Any, acts: list[float]) -> None:
    lose(memory, MANY_LOST - 1)
    memory.time.advance(10 * QUIET_SECONDS)
    assert acts == []
    lose(memory, 4 * MANY_LOST)
    assert acts == []
    memory.time.advance(QUIET_SECONDS)
    memory.time.advance(QUIET_SECONDS)
    assert len(acts) == 1
    memory.time.advance(10 * QUIET_SECONDS)
    lose(memory, MANY_LOST - 1)
    memory.time.advance(10 * QUIET_SECONDS)
    assert len(acts) == 1


def test_clients_that_come_and_go_are_no_reason(memory: Any, acts: list[float]) -> None:
    for _ in range(100):
        lose(memory, MANY_LOST)
        memory.time.advance(QUIET_SECONDS / 2)
    assert acts == []
    memory.time.advance(2 * QUIET_SECONDS)
    assert len(acts) == 1


def test_once_closed_it_does_nothing(memory: Any, acts: list[float]) -> None:
    lose(memory, MANY_LOST)
    memory.close()
    memory.close()
    memory.time.advance(10 * QUIET_SECONDS)
    assert acts == []


def test_giving_back_fails_nowhere() -> None:
    trim_memory()
