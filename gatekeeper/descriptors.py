"""File descriptors: how many idle connections may take, and what is done when none is left.

A kept-alive connection takes a descriptor while nothing is sent on it. So every pool of this
package bounds its idle connections, and registers here. When the limit of open files is reached all
the same, idle connections are closed, the oldest of each pool first, and the failed step is tried
again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

from gatekeeper.errors import causes

_T = TypeVar("_T")

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_IN_TEXT: Final = re.compile(rf"\[Errno (?:{errno.EMFILE}|{errno.ENFILE})\]")
"""Such an error in the text of several that were merged into one."""
_IDLE_SHARE: Final = 4
"""Idle connections of a pool may take one in so many descriptors."""
_MAX_IDLE: Final = 16_384
_PAUSES: Final = (0.0, 0.0, 0.0, 0.01, 0.05)
"""Seconds before each further attempt: a closed connection frees its descriptor a little later."""

REMEDY: Final = (
    "allow more (ulimit -n, LimitNOFILE=), keep fewer files open, or lower "
    "fetch.max_idle_connections"
)


class IdlePool(Protocol):
    """A pool of connections that are kept open for reuse."""

    def close_idle(self) -> bool:
        """Begin to close idle connections, the oldest first. Return False if there are none.

        It may be called in any thread.
        """


_pools: WeakSet[IdlePool] = WeakSet()
_pools_lock: Final = threading.Lock()


def register(pool: IdlePool) -> None:
    """Have the idle connections of a pool closed when no descriptor is left."""
    with _pools_lock:
        _pools.add(pool)


def close_idle() -> bool:
    """Begin to close idle connections of every pool. Return False if there are none."""
    with _pools_lock:
        pools = list(_pools)
    return sum(pool.close_idle() for pool in pools) > 0


def open_files_limit() -> int | None:
    """Return how many files this process may have open; None: any number."""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not on every system

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if files == resource.RLIM_INFINITY else files


def idle_limit(wanted: int | None) -> int:
    """Return how many idle connections a pool may keep; `wanted` is the setting, if there is one.

    The default is a quarter of the files that the process may have open now.
    """
    if wanted is not None:
        return wanted
    files = open_files_limit()
    return _MAX_IDLE if files is None else max(1, min(_MAX_IDLE, files // _IDLE_SHARE))


def is_shortage(error: BaseException) -> bool:
    """Return True if the error, or what caused it, is that no descriptor is left."""
    return any(
        getattr(one, "errno", None) in _SHORTAGES
        or getattr(one, "osError", None) in _SHORTAGES  # an error of Twisted
        or (isinstance(one, OSError) and one.errno is None and _IN_TEXT.search(str(one)))
        for one in causes(error)
    )


def refuse_shortage() -> None:
    """Raise OSError if no descriptor is left now."""
    for end in os.pipe():
        os.close(end)


def describe_shortage() -> str:
    """Describe for people that no descriptor is left: the limit, and the remedy."""
    files = open_files_limit()
    limit = "the system" if files is None else f"this process (RLIMIT_NOFILE {files})"
    return f"no file descriptor is left to {limit}: {REMEDY}"


async def with_descriptor(attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Return what `attempt` returns. If no descriptor is left for it, close idle connections and
    try again. Raises its last error."""
    closed = False
    for pause in _PAUSES:
        try:
            return await attempt()
        except Exception as error:
            closed = is_shortage(error) and (close_idle() or closed)
            if not closed:
                raise
        await asyncio.sleep(pause)
    return await attempt()


def with_descriptor_sync(attempt: Callable[[], _T]) -> _T:
    """`with_descriptor` for threads."""
    closed = False
    for pause in _PAUSES:
        try:
            return attempt()
        except Exception as error:
            closed = is_shortage(error) and (close_idle() or closed)
            if not closed:
                raise
        time.sleep(pause)
    return attempt()
