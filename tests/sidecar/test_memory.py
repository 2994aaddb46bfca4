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


def test_memory_is_trimmed_once_after_many_connections_were_lost(
    memory: Any, acts: list[float]
) -> None:
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


def test_memory_is_not_trimmed_while_connections_come_and_go(
    memory: Any, acts: list[float]
) -> None:
    for _ in range(100):
        lose(memory, MANY_LOST)
        memory.time.advance(QUIET_SECONDS / 2)
    assert acts == []
    memory.time.advance(2 * QUIET_SECONDS)
    assert len(acts) == 1


def test_memory_is_not_trimmed_after_close(memory: Any, acts: list[float]) -> None:
    lose(memory, MANY_LOST)
    memory.close()
    memory.close()
    memory.time.advance(10 * QUIET_SECONDS)
    assert acts == []


def test_trimming_memory_raises_on_no_platform() -> None:
    trim_memory()
