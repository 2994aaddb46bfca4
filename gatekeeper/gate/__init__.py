"""The gate: robots.txt, fetching and pacing joined into one answer."""

from __future__ import annotations

from gatekeeper.gate.gatekeeper import GateInternals, Gatekeeper, GateStats, internals

__all__ = ["GateInternals", "GateStats", "Gatekeeper", "internals"]
