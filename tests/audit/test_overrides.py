"""The audit record says who set a rule, until when, and which rule is in force after it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gatekeeper import HostRule
from gatekeeper.clock import VirtualClock
from gatekeeper.testing import ScriptedGate

from .conftest import config_of

Read = Callable[..., list[dict[str, Any]]]


def told(lines: list[dict[str, Any]]) -> list[tuple[str | None, str, bool]]:
    """Return of each line who set the rule, where it came from, and whether it has ended."""
    return [(line["by"], line["source"], line["ended"]) for line in lines]


async def test_each_end_of_a_rule_is_written_and_the_rule_that_is_in_force_again(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    until = datetime.fromtimestamp(clock.wall() + 100.0, UTC)
    rules = [
        {"match": "a.example", "robots": "deny", "by": "file"},
        {"match": "b.example", "robots": "deny", "by": "file", "until": until},
    ]
    gate = ScriptedGate(config=config_of(folder, host=rules), clock=clock)
    gate.override(HostRule(match="c.example", by="early"))
    async with gate:
        gate.override(HostRule(match="A.example", robots="allow", by="Kim", reason="ours"))
        gate.override(HostRule(match="a.example", by="Lou"), seconds=50.0)
        clock.advance(50.0)
        gate.override(HostRule(match="a.example"), seconds=0)
        clock.advance(50.0)
    lines = read_record("override")
    assert told(lines) == [
        ("file", "configuration", False),
        ("file", "configuration", False),
        ("early", "call", False),
        ("Kim", "call", False),
        ("Lou", "call", False),
        ("Lou", "call", True),
        ("Kim", "call", False),  # again
        ("Kim", "call", True),
        ("file", "configuration", False),
        ("file", "configuration", True),
    ]
    kim, lou, ended = lines[3:6]
    assert ended["rule"] is None
    assert lou["until"] == ended["until"] < lines[-1]["until"]
    assert lines[-1]["match"] == "b.example"
    assert lines[-1]["until"] == f"{until:%Y-%m-%dT%H:%M:%S.%f}Z"
    assert (kim["reason"], kim["until"], kim["match"]) == ("ours", None, "a.example")


async def test_no_line_has_the_credentials_of_a_url_in_a_reason(
    folder: Path, read_record: Read
) -> None:
    reason = "Ann@b.example, see https://ann:secret@b.example/x and //x"
    config = config_of(folder, host=[{"match": "b.example", "reason": reason}])
    async with ScriptedGate(config=config) as gate:
        gate.override(HostRule(match="a.example", by="Kim", reason=reason))
        await gate.block("a.example", gate.parts.clock.wall() + 60.0, reason)
    lines = [*read_record("override"), *read_record("block")]
    shown = reason.replace("ann:secret", "***")
    assert [line["reason"] for line in lines] == [shown] * 3
    assert [line["rule"]["reason"] for line in lines[:2]] == [shown] * 2
