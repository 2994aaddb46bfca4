"""Signed requests, by the name that programs import: see `gatekeeper.signing`."""

from gatekeeper import signing
from gatekeeper.signing import *  # noqa: F403 - every public name, and no other

__all__: list[str] = []
__all__ += signing.__all__
