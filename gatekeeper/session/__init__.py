"""aiohttp sessions with a gate and a guard: see `gatekeeper.session.polite`."""

from gatekeeper.fetching.fetcher import send_once
from gatekeeper.fetching.allowed_addresses import Guard, Refusal
from gatekeeper.session.polite import guarded_connector, plain_session, polite_session, session_gate

__all__ = ["Guard", "Refusal", "guarded_connector", "plain_session", "polite_session"]
__all__ += ["send_once", "session_gate"]
