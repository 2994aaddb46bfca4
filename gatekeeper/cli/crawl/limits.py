"""How far one crawl goes, and what its files are called."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MANIFEST", "STATE", "Limits"]

MANIFEST = "manifest.jsonl"
STATE = "gatekeeper.db"


@dataclass(frozen=True, slots=True)
class Limits:
    """How far one crawl goes."""

    concurrency: int = 100
    """Requests in flight, over all hosts."""
    max_body: int = 10 * 1024 * 1024
    """Bytes of a body that are read."""
    redirects: int = 10
    tries: int = 3
    """Requests for one URL, where it fails or the host asks to wait."""
    grace: float = 10.0
    """Seconds that running requests have to end once the crawl is stopped."""
