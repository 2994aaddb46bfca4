"""The judge of a crawl, from the public `gatekeeper.testing`."""

from __future__ import annotations

from gatekeeper.testing import Breach, Manners, Seen, answers, judge

__all__ = ["Breach", "Manners", "Seen", "answers", "judge"]
