"""Ask first, then wait until the host is due: a robots.txt gate for polite crawlers."""

from __future__ import annotations

from gatekeeper.late import lazily

TYPE_CHECKING = False  # not typing's: importing typing takes longer than all of this

if TYPE_CHECKING:  # `as` marks the names that the package exports
    from gatekeeper.clock import Clock as Clock, SystemClock as SystemClock
    from gatekeeper.config import Config as Config, GroupRule as GroupRule, HostRule as HostRule
    from gatekeeper.decision import (
        Decision as Decision,
        NotYet as NotYet,
        Reason as Reason,
        State as State,
        Verdict as Verdict,
    )
    from gatekeeper.errors import (
        AddressRefused as AddressRefused,
        ConfigError as ConfigError,
        Deferred as Deferred,
        Denied as Denied,
        GateClosed as GateClosed,
        GatekeeperError as GatekeeperError,
        InvalidURL as InvalidURL,
        LeaseTimeout as LeaseTimeout,
        SidecarError as SidecarError,
        StorageError as StorageError,
    )
    from gatekeeper.fleet import RedisLedger as RedisLedger
    from gatekeeper.gate import Gatekeeper as Gatekeeper, GateStats as GateStats
    from gatekeeper.gate.lease import Lease as Lease
    from gatekeeper.gate.protocols import Gate as Gate
    from gatekeeper.session.middleware import signals as signals
    from gatekeeper.pacing.ledger import (
        Granted as Granted,
        Ledger as Ledger,
        NotBefore as NotBefore,
    )
    from gatekeeper.pacing.waiters import ClockView as ClockView
    from gatekeeper.queue.polite import PoliteQueue as PoliteQueue
    from gatekeeper.client.client import (
        RemoteGatekeeper as RemoteGatekeeper,
        RemoteStats as RemoteStats,
    )
    from gatekeeper.robots import (
        Candidate as Candidate,
        CleanParam as CleanParam,
        Dialect as Dialect,
        Finding as Finding,
        Group as Group,
        Match as Match,
        PageRules as PageRules,
        PageSignals as PageSignals,
        Policy as Policy,
        RequestRate as RequestRate,
        RobotsTxt as RobotsTxt,
        Rule as Rule,
        Severity as Severity,
        Window as Window,
        page_signals as page_signals,
        product_token as product_token,
    )
    from gatekeeper.session import (
        Guard as Guard,
        Refusal as Refusal,
        guarded_connector as guarded_connector,
        polite_session as polite_session,
        session_gate as session_gate,
    )
    from gatekeeper.sitemaps import (
        SitemapEntry as SitemapEntry,
        SitemapFinding as SitemapFinding,
        Sitemaps as Sitemaps,
    )
    from gatekeeper.sync import SyncGatekeeper as SyncGatekeeper
    from gatekeeper.testing.memory_ledger import MemoryLedger as MemoryLedger
    from gatekeeper.testing.virtual_clock import VirtualClock as VirtualClock
    from gatekeeper.urls import Target as Target
else:  # imported on first use: a program that only parses files does not load an HTTP client
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "gatekeeper.client.client": "RemoteGatekeeper RemoteStats",
            "gatekeeper.clock": "Clock SystemClock",
            "gatekeeper.config": "Config GroupRule HostRule",
            "gatekeeper.decision": "Decision NotYet Reason State Verdict",
            "gatekeeper.errors": (
                "AddressRefused ConfigError Deferred Denied GateClosed GatekeeperError "
                "InvalidURL LeaseTimeout SidecarError StorageError"
            ),
            "gatekeeper.fleet": "RedisLedger",
            "gatekeeper.gate": "Gatekeeper GateStats",
            "gatekeeper.gate.lease": "Lease",
            "gatekeeper.gate.protocols": "Gate",
            "gatekeeper.session.middleware": "signals",
            "gatekeeper.pacing.waiters": "ClockView",
            "gatekeeper.pacing.ledger": "Granted Ledger NotBefore",
            "gatekeeper.queue": "PoliteQueue",
            "gatekeeper.robots": (
                "Candidate CleanParam Dialect Finding Group Match "
                "PageRules PageSignals Policy RequestRate RobotsTxt Rule "
                "Severity Window page_signals product_token"
            ),
            "gatekeeper.session": "Guard Refusal guarded_connector polite_session session_gate",
            "gatekeeper.sitemaps": "SitemapEntry SitemapFinding Sitemaps",
            "gatekeeper.sync": "SyncGatekeeper",
            "gatekeeper.testing.memory_ledger": "MemoryLedger",
            "gatekeeper.testing.virtual_clock": "VirtualClock",
            "gatekeeper.urls": "Target",
        },
    )

__version__ = "0.9.0"
