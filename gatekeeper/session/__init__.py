"""aiohttp sessions with a gate and a guard: see `gatekeeper.session.polite`."""

from gatekeeper.session.polite import (
    Guard,
    Refusal,
    guarded_connector,
    plain_session,
    polite_session,
    send_once,
    session_gate,
)

__all__ = [
    "Guard",
    "Refusal",
    "guarded_connector",
    "plain_session",
    "polite_session",
    "send_once",
    "session_gate",
]
