"""The switch for everything that exists for speed alone.

Behind it stand the decision cache, the compiled rules and first-match shortcuts of a policy, the
URL cache of a polite session, and the responses that the sidecar writes inline. Each has a plain
way beside it that gives the same answers; the whole test suite passes with the switch off.
"""

from __future__ import annotations

import os

__all__ = ["ON", "VARIABLE"]

VARIABLE = "GATEKEEPER_NO_SPEEDUPS"
"""The environment variable that turns them off: any value but the empty text and "0"."""

ON: bool = os.environ.get(VARIABLE, "") in ("", "0")
"""Whether they are used. Classes read it when they are constructed, as `speedups.ON`, so that a
test can set it; what was made before keeps to what it read."""
