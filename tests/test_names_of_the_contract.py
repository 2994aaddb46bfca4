"""What the contract names is importable from `gatekeeper` itself, and is called as it says."""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import pydoc
import random
import types

import pytest

import gatekeeper
from gatekeeper import (
    Config,
    Gatekeeper,
    Ledger,
    RemoteGatekeeper,
)
from gatekeeper.clock import VirtualClock
from tests.internet import FakeInternet
from tests.pacing_support import CountingLedger

CLASSES = [
    "Gatekeeper",
    "RemoteGatekeeper",
    "Gate",
    "Decision",
    "Lease",
    "LeaseTimeout",
    "Denied",
    "Deferred",
    "InvalidURL",
    "ConfigError",
    "PoliteQueue",
    "Ledger",
    "MemoryLedger",
    "NotYet",
    "RedisLedger",
    "SitemapEntry",
    "SitemapFinding",
    "Sitemaps",
    "SyncGatekeeper",
    "RobotsTxt",
    "Policy",
    "Match",
    "Rule",
    "RequestRate",
    "Window",
    "Finding",
    "Guard",
    "Refusal",
    "Config",
    "HostRule",
    "GateStats",
    "ClockView",
]
ENUMS = ["Verdict", "Reason", "State", "Severity", "Dialect"]
FUNCTIONS = ["polite_session", "session_gate", "guarded_connector", "page_signals"]


@pytest.mark.parametrize("name", [*CLASSES, *ENUMS])
def test_every_class_is_at_the_top(name: str) -> None:
    assert name in gatekeeper.__all__
    assert inspect.isclass(getattr(gatekeeper, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_at_the_top(name: str) -> None:
    assert name in gatekeeper.__all__
    assert callable(getattr(gatekeeper, name))


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_str_enums(name: str) -> None:
    assert issubclass(getattr(gatekeeper, name), enum.StrEnum)


def test_every_name_in_all_exists_once() -> None:
    assert len(set(gatekeeper.__all__)) == len(gatekeeper.__all__)
    for name in gatekeeper.__all__:
        assert getattr(gatekeeper, name) is not None


@pytest.mark.parametrize("name", gatekeeper.__all__)
def test_every_public_name_has_a_signature_that_can_be_shown(name: str) -> None:
    thing = getattr(gatekeeper, name)
    builtin = isinstance(getattr(thing, "__init__", None), types.WrapperDescriptorType)
    if builtin and issubclass(thing, Exception):
        return  # an exception without a constructor of its own has none to show
    assert inspect.signature(thing)


def test_help_can_be_read() -> None:
    assert "class Lease(" in pydoc.render_doc(gatekeeper, renderer=pydoc.plaintext)


def test_help_can_be_read_of_every_module() -> None:
    for module in pkgutil.walk_packages(gatekeeper.__path__, "gatekeeper."):
        if module.name.endswith("__main__"):
            continue
        try:
            found = importlib.import_module(module.name)
        except ModuleNotFoundError:  # an integration is imported by those who have its library
            assert module.name.startswith("gatekeeper.integrations.")
            continue
        assert pydoc.render_doc(found)


@pytest.mark.parametrize("gate", [Gatekeeper, RemoteGatekeeper])
@pytest.mark.parametrize(
    ("method", "positional", "keywords"),
    [
        ("allowed", ["url"], ["user_agent"]),
        ("check", ["url"], ["user_agent"]),
        ("check_many", ["urls"], ["user_agent"]),
        ("peek", ["url"], ["user_agent"]),
        ("policy", ["url"], ["user_agent"]),
        ("robots", ["url"], []),
        ("sitemaps", ["origin"], ["since", "guess", "max_entries"]),
        ("lease", ["url"], ["priority", "timeout", "user_agent"]),
        ("why", ["host"], []),
        ("refresh", ["origin"], []),
        ("pause", ["host"], []),
        ("resume", ["host"], []),
    ],
)
def test_methods_are_called_as_the_contract_says(
    gate: type, method: str, positional: list[str], keywords: list[str]
) -> None:
    found = inspect.signature(getattr(gate, method)).parameters.values()
    assert [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD] == ["self", *positional]
    assert [p.name for p in found if p.kind is p.KEYWORD_ONLY] == keywords


async def test_a_gate_takes_its_grants_from_the_ledger_it_is_given(
    net: FakeInternet,
) -> None:
    assert isinstance(net.clock, VirtualClock)
    net.site("a.test").robots("")
    book = CountingLedger(net.clock)
    ledger: Ledger = book
    config = Config.from_dict({"guard": {"allow": ["127.0.0.0/8", "*.test"]}})

    async def run() -> None:
        async with Gatekeeper(
            "testbot",
            config=config,
            resolver=net.resolver,
            clock=net.clock,
            rng=random.Random(7),
            ledger=ledger,
        ) as gate:
            for _ in range(2):
                async with gate.lease("http://a.test/") as lease:
                    lease.report(status=200)

    await net.drive(run())
    assert len(book.asked) >= 2
    assert set(book.asked) == {("a.test",)}
