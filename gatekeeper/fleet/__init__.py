"""A fleet: several gates that share one Valkey or Redis, and with it one pace per host."""

from gatekeeper.fleet.ledger import FleetStats, RedisLedger

__all__ = ["FleetStats", "RedisLedger"]
