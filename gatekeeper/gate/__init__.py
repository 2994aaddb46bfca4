"""The gate: robots.txt, fetching and pacing joined into one answer."""

from __future__ import annotations

from gatekeeper.gate.gatekeeper import Gatekeeper
from gatekeeper.gate.questions import GateStats

__all__ = ["GateStats", "Gatekeeper"]
