"""A gate with many origins: no single container grows with their number."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from gatekeeper import VirtualClock, split_dict
from gatekeeper.testing import ScriptedGate, drive
from tests.pacing_support import scopes_of

ORIGINS = 1_000
NOT_OURS = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, ScriptedGate


def hashed(root: object) -> Iterator[dict[Any, Any] | set[Any]]:
    """Return every dictionary and set that can be reached from the object."""
    seen = {id(root)}
    waiting = deque([root])
    while waiting:
        one = waiting.popleft()
        if isinstance(one, dict | set):
            yield one
        for each in gc.get_referents(one):
            if id(each) not in seen and not isinstance(each, NOT_OURS):
                seen.add(id(each))
                waiting.append(each)


async def test_no_single_container_grows_with_the_number_of_origins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dictionary of 300,000 keys that grows stops the loop for 8 ms and more, and several with a
    key per origin do so at the same moment.

    With parts of 50 entries, no container of a gate with 1,000 origins has a quarter as many.
    """
    monkeypatch.setattr(split_dict, "PART_LIMIT", 50)
    clock = VirtualClock()
    async with ScriptedGate(clock=clock) as gate:

        async def meet() -> None:
            for number in range(ORIGINS):
                url = f"https://site{number}.example"
                gate.say(url, f"User-agent: *\nDisallow: /{number}\n")
                assert not await gate.allowed(f"{url}/{number}")
                async with gate.lease(f"{url}/") as lease:
                    lease.report(status=200)

        await drive(clock, meet())
        assert gate.stats().directory.hot == gate.stats().directory.warm == ORIGINS
        said = gate.robots_files._said
        # Origins that answered lately: 10,000 at most, which grow within half a millisecond.
        known = {id(said), id(gate._faults.answered_at)}
        large = [one for one in hashed(gate) if len(one) > ORIGINS // 4 and id(one) not in known]
        # The containers with an entry per origin are among those that were found.
        scopes = {id(part) for part in scopes_of(gate.parts.scheduler).parts}  # type: ignore[attr-defined]
        assert scopes <= {id(one) for one in hashed(gate)}
        assert [(len(one), [*one][:3]) for one in large] == []
