"""Ask first, then wait your turn: an asynchronous robots.txt gate for polite crawlers."""

from __future__ import annotations

from gatekeeper.speedups import lazily

TYPE_CHECKING = False  # not typing's: importing typing takes longer than all of this

if TYPE_CHECKING:
    from gatekeeper.clock import Clock, SystemClock, VirtualClock
    from gatekeeper.config import Config, GroupRule, HostRule
    from gatekeeper.decision import Decision, NotYet, Reason, State, Verdict
    from gatekeeper.errors import (
        AddressRefused,
        ConfigError,
        Deferred,
        Denied,
        GateClosed,
        GatekeeperError,
        InvalidURL,
        LeaseTimeout,
        SidecarError,
        StorageError,
    )
    from gatekeeper.fleet import RedisLedger
    from gatekeeper.gate import Gatekeeper, GateStats
    from gatekeeper.gate.leases import Lease
    from gatekeeper.middleware import Gate, signals
    from gatekeeper.pacing.ledger import Granted, Ledger, MemoryLedger, NotBefore
    from gatekeeper.pacing.waiting import ClockView
    from gatekeeper.queue import PoliteQueue
    from gatekeeper.remote.client import RemoteGatekeeper, RemoteStats
    from gatekeeper.robots import (
        Candidate,
        CleanParam,
        Dialect,
        Finding,
        Group,
        Match,
        PageRules,
        PageSignals,
        Policy,
        RequestRate,
        RobotsTxt,
        Rule,
        Severity,
        Window,
        product_token,
    )
    from gatekeeper.session import Guard, Refusal, guarded_connector, polite_session, session_gate
    from gatekeeper.sync import SyncGatekeeper
    from gatekeeper.urls import Target
else:  # imported on first use: a program that only parses files does not load an HTTP client
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "gatekeeper.remote.client": ["RemoteGatekeeper", "RemoteStats"],
            "gatekeeper.clock": ["Clock", "SystemClock", "VirtualClock"],
            "gatekeeper.config": ["Config", "GroupRule", "HostRule"],
            "gatekeeper.decision": ["Decision", "NotYet", "Reason", "State", "Verdict"],
            "gatekeeper.errors": [
                "AddressRefused",
                "ConfigError",
                "Deferred",
                "Denied",
                "GateClosed",
                "GatekeeperError",
                "InvalidURL",
                "LeaseTimeout",
                "SidecarError",
                "StorageError",
            ],
            "gatekeeper.fleet": ["RedisLedger"],
            "gatekeeper.gate": ["Gatekeeper", "GateStats"],
            "gatekeeper.gate.leases": ["Lease"],
            "gatekeeper.middleware": ["Gate", "signals"],
            "gatekeeper.pacing.waiting": ["ClockView"],
            "gatekeeper.pacing.ledger": ["Granted", "Ledger", "MemoryLedger", "NotBefore"],
            "gatekeeper.queue": ["PoliteQueue"],
            "gatekeeper.robots": [
                "Candidate",
                "CleanParam",
                "Dialect",
                "Finding",
                "Group",
                "Match",
                "PageRules",
                "PageSignals",
                "Policy",
                "RequestRate",
                "RobotsTxt",
                "Rule",
                "Severity",
                "Window",
                "product_token",
            ],
            "gatekeeper.session": [
                "Guard",
                "Refusal",
                "guarded_connector",
                "polite_session",
                "session_gate",
            ],
            "gatekeeper.sync": ["SyncGatekeeper"],
            "gatekeeper.urls": ["Target"],
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AddressRefused",
    "Candidate",
    "CleanParam",
    "Clock",
    "ClockView",
    "Config",
    "ConfigError",
    "Decision",
    "Deferred",
    "Denied",
    "Dialect",
    "Finding",
    "Gate",
    "GateClosed",
    "GateStats",
    "Gatekeeper",
    "GatekeeperError",
    "Granted",
    "Group",
    "GroupRule",
    "Guard",
    "HostRule",
    "InvalidURL",
    "Lease",
    "LeaseTimeout",
    "Ledger",
    "Match",
    "MemoryLedger",
    "NotBefore",
    "NotYet",
    "PageRules",
    "PageSignals",
    "Policy",
    "PoliteQueue",
    "Reason",
    "RedisLedger",
    "Refusal",
    "RemoteGatekeeper",
    "RemoteStats",
    "RequestRate",
    "RobotsTxt",
    "Rule",
    "Severity",
    "SidecarError",
    "State",
    "StorageError",
    "SyncGatekeeper",
    "SystemClock",
    "Target",
    "Verdict",
    "VirtualClock",
    "Window",
    "guarded_connector",
    "polite_session",
    "product_token",
    "session_gate",
    "signals",
]
