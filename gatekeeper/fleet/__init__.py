"""A fleet: several gates that share one Valkey or Redis, and with it one pace per host."""

from gatekeeper.clock import Clock
from gatekeeper.config import FleetConfig
from gatekeeper.fleet.ledger import FleetStats, RedisLedger
from gatekeeper.fleet.sharded import ShardedLedger

__all__ = ["FleetLedger", "FleetStats", "RedisLedger", "ShardedLedger", "configured_ledger"]

FleetLedger = RedisLedger | ShardedLedger


def configured_ledger(config: FleetConfig, clock: Clock) -> FleetLedger | None:
    """The ledger that the settings name; None where they name none. Raises ConfigError."""
    if config.url is None:
        return None
    if config.sharded:
        return ShardedLedger(config.url, namespace=config.namespace, clock=clock, config=config)
    return RedisLedger(config.url, namespace=config.namespace, clock=clock, config=config)
