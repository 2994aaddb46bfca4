"""Fleets: several gates share a Valkey or Redis server, and through it one pace per host."""

from gatekeeper.clock import Clock
from gatekeeper.config import FleetConfig
from gatekeeper.fleet.redis_ledger import RedisLedger
from gatekeeper.fleet.sharded import ShardedLedger
from gatekeeper.pacing.ledger import FleetStats

__all__ = ["FleetLedger", "FleetStats", "RedisLedger", "ShardedLedger", "configured_ledger"]

FleetLedger = RedisLedger | ShardedLedger


def configured_ledger(config: FleetConfig, clock: Clock) -> FleetLedger | None:
    """Return the ledger for `config`, or None if `fleet.url` is not set. Raises ConfigError."""
    if config.url is None:
        return None
    kind = ShardedLedger if config.sharded else RedisLedger
    return kind(config.url, namespace=config.namespace, clock=clock, config=config)
