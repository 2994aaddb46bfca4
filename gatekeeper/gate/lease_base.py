"""What all leases share: entering, adoption by a request, and the end with a connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import ref

import msgspec
from yarl import URL

from gatekeeper.decision import Decision, Verdict, refuse
from gatekeeper.errors import refusing
from gatekeeper.gate.protocols import ConnectionInUse, Gate, HeldLease
from gatekeeper.robots import product_token
from gatekeeper.urls import url_of

# The references are weak: each task, timer and connection keeps the context in which it was made,
# and a lease leads to its gate.
open_leases: ContextVar[tuple[ref[Any], ...]] = ContextVar("gatekeeper_open_leases", default=())
"""The leases that `async with gate.lease(...)` holds open in this context, oldest first."""


held_leases: ContextVar[tuple[ref[Any], ...]] = ContextVar("gatekeeper_held_leases", default=())
"""The leases without a block that belong to tasks of this context, oldest first."""


def bind(lease: Any) -> None:
    """Let requests of this context adopt a lease whose block is entered."""
    open_leases.set((*open_leases.get(), ref(lease)))


def unbind(lease: Any) -> None:
    """Undo `bind`, as the block is left."""
    open_leases.set(tuple(other for other in open_leases.get() if other() is not lease))


def hold_in_context(lease: Any) -> None:
    """Make a lease without a block visible to tasks that are started from this context."""
    known = held_leases.get()
    still = (one for one in known if (held := one()) is not None and not held.ended)
    held_leases.set((*still, ref(lease)))


def inherited(task: asyncio.Task[object] | None) -> list[Any]:
    """Return the open leases of other tasks that this task was started under.

    A task's context is a copy of the context that started it.
    """
    blocks, others = open_leases.get(), held_leases.get()
    if not blocks and not others:
        return []
    found = dict.fromkeys(one() for one in (*blocks, *others))
    return [one for one in found if one and one.owner and one.owner is not task and not one.ended]


def adopt(url: str) -> HeldLease | None:
    """Claim and return the open lease of this context for the URL. None if there is none."""
    for one in reversed(open_leases.get()):
        lease: HeldLease | None = one()
        if lease is not None and lease.claim(url):
            return lease
    return None


class _LeaseState(msgspec.Struct, eq=False, kw_only=True):
    """Attributes of a lease with defaults; in a class of their own, as they are keyword-only."""

    data: Any = None
    """The payload of a URL from a `PoliteQueue`; otherwise free for the caller's use."""
    user_agent: str | None = None
    """The name that the lease was requested for, as given; None: the gate's own."""
    _head_at: float | None = None
    """Monotonic time at which the head of the response arrived."""
    _claimed: bool = False
    _block_left: bool = False
    """Whether its block was left while the connection was in use."""
    _on_free: Callable[[], None] | None = None
    """Called when the connection is free."""


class LeaseBase(_LeaseState, eq=False, weakref=True):
    """The part that the leases of both gates share: entering, and ending with a connection."""

    url: str
    host: str
    owner: asyncio.Task[object] | None
    """The task that holds the lease, which would wait for itself if it asked for another one of
    the host; None if no task does."""

    if TYPE_CHECKING:  # each kind of lease defines these

        @property
        def expires_at(self) -> datetime:
            """When the lease expires."""

        @property
        def ended(self) -> bool:
            """Whether the slot was given back, or the lease expired."""

        @property
        def holdings(self) -> Any:
            """The open leases of its gate, by owner."""

        def _hold_while(self, connection: ConnectionInUse | None) -> None: ...

        def end(self) -> None:
            """End the lease."""

        def leave(self) -> None:
            """Undo `enter` and end the lease. Without a report it counts as sent and unanswered."""

    async def __aenter__(self) -> Self:
        """Enter a lease from `acquire`, as a block of `gate.lease` does."""
        self.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"until {self.expires_at:%H:%M:%SZ}"
        return f"<{type(self).__name__} {self.url} {state}>"

    def enter(self) -> None:
        """Let requests of this context adopt the lease, and make the current task its owner.

        For a lease that one task requested and another one uses; the context of the first task is
        left unchanged.
        """
        if self.ended:
            return
        self.holdings.own(self, asyncio.current_task())
        if ref(self) not in open_leases.get():
            bind(self)

    def ends_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until the connection is free, then end the lease; None: end it now.

        `then` is called at that moment, before the slot is passed on.
        """
        self._on_free = then
        if connection is None:
            self._end_when_free()
            return
        self._hold_while(connection)
        connection.add_callback(self.end if then is None else self._end_when_free)
        if self.owner is not None:
            hold_in_context(self)

    def lasts_with(
        self, connection: ConnectionInUse | None, then: Callable[[], None] | None = None
    ) -> None:
        """Hold the slot until both the connection is free and the lease's block is left.

        `then` is called when the connection is free; immediately if `connection` is None.
        """
        if connection is not None:
            self._on_free = then
            self._hold_while(connection)
            connection.add_callback(self._free_in_block)
        elif then is not None:
            then()

    def claim(self, url: str) -> bool:
        """Use the lease for a request to `url`. Return True for the first claim that matches."""
        if self._claimed or self.ended:
            return False
        # aiohttp sends the URL that yarl parses, and yarl unescapes parts of it: both URLs are
        # brought into that form before they are compared.
        self._claimed = url == self.url or _as_sent(url) == _as_sent(self.url)
        return self._claimed

    def _free_in_block(self) -> None:
        """Connection callback of `lasts_with`: the block may still be open."""
        self._hold_while(None)
        if self._block_left:
            self._end_when_free()
            return
        then, self._on_free = self._on_free, None
        if then is not None:
            then()

    def _end_when_free(self) -> None:
        """Connection callback of `ends_with`: call `then`, and end the lease."""
        then, self._on_free = self._on_free, None
        try:
            if then is not None:
                then()
        finally:
            self.end()


def _as_sent(url: str) -> URL | None:
    try:
        return url_of(url).with_fragment(None)
    except ValueError:
        return None


# Default User-Agents of libraries, sent if the caller set none.
_LIBRARY_DEFAULT = re.compile(
    r"Python/[0-9.]+ aiohttp/\S+|python-(?:httpx2?|requests|urllib3)/\S+|Python-urllib/\S+"
    r"|Scrapy/\S+ \(\+https?://scrapy\.org\)"
)


def unnamed(sent: str | None) -> bool:
    """Return True if a User-Agent is missing or a library's default, which names no crawler."""
    return sent is None or _LIBRARY_DEFAULT.fullmatch(sent) is not None


@lru_cache(maxsize=1024)
def other_agent(sent: str | None, own: str | None) -> str | None:
    """Return the User-Agent of a request if it names another agent than the gate's; else None."""
    if sent is None or unnamed(sent) or (own is not None and _same_agent(sent, own)):
        return None
    return sent


def _same_agent(one: str, other: str) -> bool:
    return product_token(one).lower() == product_token(other).lower()


def note_refusal(gate: object, decision: Decision) -> None:
    """Tell the audit record of a gate of this process, if it has one, that a page was refused."""
    audit = getattr(getattr(gate, "parts", None), "audit", None)
    if audit is not None:
        audit.refused(decision)


def note_fields(lease: object, status: int, headers: Mapping[str, str]) -> None:
    """Tell the audit record, if the lease has a line there, what the head of its response says."""
    inner = getattr(lease, "inner", lease)  # of a lease for threads
    audit = getattr(getattr(inner, "grant", None), "audit", None)
    if audit is not None:
        audit.answered(inner, status, headers)


def refuse_page(gate: object, decision: Decision) -> None:
    """Raise Denied or Deferred unless the decision about a page is ALLOW; see `note_refusal`."""
    if decision.verdict is not Verdict.ALLOW:
        note_refusal(gate, decision)
    refuse(decision)


async def judge_adopted(lease: HeldLease, sent: str | None, gate: Gate, url: str) -> None:
    """Check that a request with another User-Agent than that of its adopted lease is allowed.

    The host's pace is the same for every agent. Raises Denied or Deferred.
    """
    if sent is None or unnamed(sent):
        return  # it is sent with the lease's name
    if not _same_agent(sent, lease.user_agent or gate.user_agent or lease.decision.user_agent):
        refuse_page(gate, await gate.check(url, user_agent=sent))


async def enter_detached(request: AbstractAsyncContextManager[HeldLease]) -> HeldLease:
    """Enter a lease that ends with its connection, not with a block.

    Entering adds it to the context's open leases. No other request may adopt it, so it is claimed
    immediately and removed from them again.
    """
    before = open_leases.get()
    lease = await request.__aenter__()
    lease.claim(lease.url)
    open_leases.set(before)
    return lease


await_request: Callable[..., NoReturn] = refusing(
    "a request for a lease is entered, not awaited: `async with gate.lease(...) as lease`, or "
    "`lease = await gate.acquire(...)` and `lease.end()`"
)
"""The `__await__` of the request for a lease."""


class Unentered:
    """Descriptor for an attribute of a lease on the class of its request, which was not entered:
    reading it raises an AttributeError with the remedy.

    A descriptor for the common names, as `__getattr__` would slow every other attribute down. It is
    used inside `if not TYPE_CHECKING`, as a type checker finds the mistake by itself.
    """

    __slots__ = ("_entered",)

    def __init__(self, entered: str = "async with") -> None:
        self._entered = entered

    def __get__(self, request: object, owner: type) -> Self:
        """Return the descriptor for the class; raise AttributeError for an instance."""
        if request is None:
            return self
        raise AttributeError(
            f"this is the request for a lease; enter it first: {self._entered} gate.lease(...) as "
            "lease"
        )
