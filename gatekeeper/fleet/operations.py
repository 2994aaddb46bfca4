"""Operations: encode the arguments of the script `TURN` and decode its answers.

An operation is a tuple of a letter, which names the kind, and its arguments. It refers to scopes by
name until `packed` replaces the names by the indexes of keys. Durations are whole microseconds, and
every conversion rounds to the slow side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec

from gatekeeper.errors import LedgerLost
from gatekeeper.pacing.ledger import (
    HoldView,
    Outcome,
    Report,
    ScopeClock,
    ScopeRequest,
    ScopeView,
    micros,
)

Operation = tuple[Any, ...]
"""The letter of an operation and its arguments; see `TURN`."""

_OUTCOMES = {"sent": 0, "given back": 1, "undone": 2}

_BATCH, _BATCH_SHARED = 128, 32
"""Maximum number of requests in one script call, during which the store serves no other client:
for requests of one scope, and for requests of several."""


def reported(report: Report) -> Operation:
    """Return the operation that applies a report."""
    scope, seconds, reason, interval, interval_for = report
    return ("b", scope, micros(seconds), reason, micros(interval), micros(interval_for))


def ended(token: str, scopes: Sequence[str], outcome: Outcome, size: int = 0) -> Operation:
    """Return the operation that frees a token's slots. `size`: bytes of the response, if a budget
    counts them."""
    return ("e", token, _OUTCOMES[outcome], scopes, *((size,) if size else ()))


def clock_told(clock: ScopeClock) -> Operation:
    """Return the operation that pushes a scope's clock to a store that has lost it."""
    age = -1 if clock.age is None else max(0, int(clock.age * 1e6))
    blocked = micros(clock.blocked)
    day = () if clock.day is None else (max(0, int(clock.day * 1e6)), clock.pages, clock.bytes)
    paused = int(clock.paused)
    return ("c", clock.scope, age, micros(clock.interval), blocked, clock.reason, paused, *day)


def _asks(one: ScopeRequest) -> tuple[int, ...]:
    return (micros(one.interval), one.slots, int(one.guess), *(one.budget or ()))


def packed(operations: list[Operation]) -> tuple[list[str], list[Operation]]:
    """Return the distinct scopes of the operations, and the operations with each scope's name
    replaced by its 1-based index among those scopes."""
    keys: dict[str, int] = {}

    def place(scope: str) -> int:
        return keys.setdefault(scope, len(keys) + 1)

    found: list[Operation] = []
    for kind, *rest in operations:
        if kind == "t":
            found.append((kind, rest[0], [(place(one.scope), *_asks(one)) for one in rest[1]]))
        elif kind in "hr":
            found.append((kind, rest[0], [place(scope) for scope in rest[1]], *rest[2:]))
        elif kind == "e":
            found.append((kind, rest[0], rest[1], [place(scope) for scope in rest[2]], *rest[3:]))
        else:
            found.append((kind, place(rest[0]), *rest[1:]))
    return list(keys), found


def batches(operations: list[Operation]) -> list[list[Operation]]:
    """Split operations into script calls that are short enough not to block the store for long."""
    found, room = list[list[Operation]](), 0.0
    for one in operations or [()]:
        cost = 1.0
        if one and one[0] == "t" and len(one[2]) > 1:
            cost = _BATCH / _BATCH_SHARED
        if not found or room < cost:
            found.append([])
            room = float(_BATCH)
        if one:
            found[-1].append(one)
        room -= cost
    return found


def ends_once_more(
    calls: list[list[Operation]], is_over: Callable[[str], bool]
) -> list[list[Operation]]:
    """Return calls that end once more what `calls` take or renew but has ended by now. The end may
    precede the take in the same calls, or may have arrived in time when these calls were late and
    are now sent again. Otherwise they would leave a hold that no one frees."""
    ends = list[Operation]()
    for one in chain.from_iterable(calls):
        kind = one[0]
        if kind in {"t", "r"} and is_over(one[1]):
            scopes = [asked.scope for asked in one[2]] if kind == "t" else one[2]
            ends.append(ended(one[1], scopes, "undone"))
    return batches(ends) if ends else []


def decoded(reply: Any) -> Any:
    """Decode a reply of the script. Raises LedgerLost if it can't be read."""
    try:
        return msgspec.msgpack.decode(reply)
    except (msgspec.MsgspecError, TypeError) as error:
        raise LedgerLost(f"the store's answer can't be read: {error}") from error


def scope_clock(told: list[Any]) -> ScopeClock:
    """Decode a scope's clock from an answer of the script."""
    name, age, interval, blocked, reason, paused, *rest = told
    age = None if age is False else age / 1e6
    day, *used = rest or (False,)
    day = None if day is False else day / 1e6
    return ScopeClock(name, age, interval / 1e6, blocked / 1e6, reason, bool(paused), day, *used)


def scope_view(told: list[Any]) -> ScopeView:
    """Decode the answer to a `v` operation: everything that is known of a scope."""
    clock, holds, waiting = told
    views = (
        HoldView(token.partition(":")[0], age / 1e6, left / 1e6, bool(headed))
        for token, age, left, headed in holds
    )
    return ScopeView(scope_clock(clock), tuple(views), waiting)
