"""File descriptors: how many clients they allow, and what is said when they run out."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, NamedTuple

__all__ = ["Descriptors", "quiet_scarcity", "raise_file_limit"]

logger = logging.getLogger(__name__)

_WANTED = 65_536
_RESERVED = 64
"""Kept at least for the gate's own work: sites, storage, logs."""
_MOST_BACKLOG = 512
_SCARCE = "socket.accept() out of system resource"
"""What asyncio calls it."""
_SILENCE = 60.0
"""Seconds between two lines about it."""


class Descriptors(NamedTuple):
    """What the limit of open files allows."""

    clients: int
    """Connections; further ones are turned away, which needs a descriptor for a moment."""
    backlog: int
    """Connections that may come in at once: the event loop accepts as many in one go, before
    any of them can be turned away."""


def raise_file_limit() -> Descriptors:
    """Take as many open files as the system lets us have, and share them out."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return _shared_out(_WANTED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _WANTED) if hard != resource.RLIM_INFINITY else _WANTED
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError):
            logger.warning("the limit of open files stays at %d", soft)
    return _shared_out(soft)


def _shared_out(files: int) -> Descriptors:
    """A quarter and at least 64 stay with us; half of those may be at the door.

    >>> _shared_out(128)
    Descriptors(clients=64, backlog=32)
    >>> _shared_out(65536)
    Descriptors(clients=49152, backlog=512)
    """
    clients = max(_RESERVED, files - max(_RESERVED, files // 4))
    return Descriptors(clients, max(8, min(_MOST_BACKLOG, (files - clients) // 2)))


def quiet_scarcity(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop say once a minute that no descriptor is left for a connection.

    asyncio says it, with its traceback, for each one that it may accept in one go; a reader
    of our log that is slower than that would stop the service.
    """
    said = -math.inf
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        if context.get("message") != _SCARCE:
            if before is None:
                loop.default_exception_handler(context)
            else:
                before(loop, context)
        elif loop.time() >= said + _SILENCE:
            said = loop.time()
            logger.error("no connection can be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)
