"""For tests of several folders: gates on the fake internet."""

from __future__ import annotations

from typing import Any

import msgspec

from gatekeeper import Config, Decision, Gatekeeper, Reason, State, Verdict
from gatekeeper.clock import Clock
from tests.internet import FakeInternet

QUICK = {"default_interval": 0.0}
"""The table `pacing` of a gate that waits for nothing but what a file asks for."""


def open_config(**tables: Any) -> Config:
    """The default settings, with the addresses of the fake internet allowed."""
    return Config.from_dict({"guard": {"allow": ["127.0.0.0/8", "::1/128", "*.test"]}, **tables})


def gate_on(
    net: FakeInternet,
    config: Config | None = None,
    *,
    agent: str = "testbot/1.0",
    clock: Clock | None = None,
    **more: Any,
) -> Gatekeeper:
    """A gate, not open yet, that fetches from the fake internet by its clock, or by another one."""
    return Gatekeeper(
        agent,
        config=config or open_config(),
        resolver=net.resolver,
        clock=clock or net.clock,
        **more,
    )


def decided(verdict: Verdict = Verdict.DENY, **fields: Any) -> Decision:
    """A decision that no gate made."""
    values: dict[str, Any] = {
        "verdict": verdict,
        "reason": Reason.RULE,
        "url": "https://a.example/x",
        "origin": "https://a.example",
        "user_agent": "bot",
        "state": State.PARSED,
    }
    return Decision(**(values | fields))


def common(decision: Decision | None, *others: str) -> dict[str, object]:
    """The fields of a decision that equal decisions share: all but the id, and some others."""
    assert decision is not None
    fields = msgspec.structs.asdict(decision)
    return {name: value for name, value in fields.items() if name not in ("id", *others)}
