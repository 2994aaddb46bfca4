"""Writing a decision log in a test, without its thread."""

from __future__ import annotations

from gatekeeper.sidecar.logs import DecisionLog


def write_log(log: DecisionLog) -> None:
    """Write the lines of one write immediately."""
    log._write_page(log._take_page())
