"""Many URLs over many hosts: `PoliteQueue` hands out leases of the hosts that are due."""

from gatekeeper.queue.polite import PoliteQueue

__all__ = ["PoliteQueue"]
