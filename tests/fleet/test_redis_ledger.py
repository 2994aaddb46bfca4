"""`RedisLedger` on a real server: the rules of every ledger."""

from __future__ import annotations

from tests.pacing.ledger_rules import LedgerRules


class TestRedisLedger(LedgerRules):
    """The same tests as for `MemoryLedger`."""
