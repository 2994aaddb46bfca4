"""Operations: encode the arguments of the script `OPERATIONS` and decode its answers.

An operation is a tuple of a letter, which names the kind, and its arguments. It refers to scopes by
name until `index_scopes` replaces the names by the indexes of keys. Durations are whole
microseconds, and every conversion rounds to the slow side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec

from gatekeeper.clock import micros
from gatekeeper.errors import LedgerLost
from gatekeeper.pacing.ledger import HoldView, Outcome, Report, ScopeClock, ScopeRequest, ScopeView

Operation = tuple[Any, ...]
"""The letter of an operation and its arguments; see `OPERATIONS`."""

_OUTCOMES = {"sent": 0, "given back": 1, "undone": 2}

_MAX_REQUESTS, _SHARED_COST = 128, 4
"""Maximum number of requests in one script call, during which the store serves no other client. One
of several scopes counts as so many."""


def report_operation(report: Report) -> Operation:
    """Return the operation that applies a report."""
    scope, seconds, reason, interval, interval_for = report
    return ("b", scope, micros(seconds), reason, micros(interval), micros(interval_for))


def end_operation(token: str, scopes: Sequence[str], outcome: Outcome, size: int = 0) -> Operation:
    """Return the operation that frees a token's slots. `size`: bytes of the response, if a budget
    counts them."""
    return ("e", token, _OUTCOMES[outcome], scopes, *((size,) if size else ()))


def clock_operation(clock: ScopeClock) -> Operation:
    """Return the operation that pushes a scope's clock to a store that has lost it."""
    age = -1 if clock.age is None else max(0, int(clock.age * 1e6))
    blocked = micros(clock.blocked)
    day = () if clock.day is None else (max(0, int(clock.day * 1e6)), clock.pages, clock.bytes)
    paused = int(clock.paused)
    return ("c", clock.scope, age, micros(clock.interval), blocked, clock.reason, paused, *day)


def _scope_arguments(one: ScopeRequest) -> tuple[int, ...]:
    return (micros(one.interval), one.slots, int(one.guess), *(one.budget or ()))


def index_scopes(operations: list[Operation]) -> tuple[list[str], list[Operation]]:
    """Return the distinct scopes of the operations, and the operations with each scope's name
    replaced by its 1-based index among those scopes."""
    indexes: dict[str, int] = {}

    def index(scope: str) -> int:
        return indexes.setdefault(scope, len(indexes) + 1)

    indexed: list[Operation] = []
    for kind, *rest in operations:
        if kind == "t":
            asked = [(index(one.scope), *_scope_arguments(one)) for one in rest[1]]
            indexed.append((kind, rest[0], asked))
        elif kind in "hr":
            indexed.append((kind, rest[0], [index(scope) for scope in rest[1]], *rest[2:]))
        elif kind == "e":
            indexed.append((kind, rest[0], rest[1], [index(scope) for scope in rest[2]], *rest[3:]))
        else:
            indexed.append((kind, index(rest[0]), *rest[1:]))
    return list(indexes), indexed


def batches(operations: list[Operation]) -> list[list[Operation]]:
    """Split operations into script calls that are short enough not to block the store for long."""
    calls: list[list[Operation]] = [[]]
    room = _MAX_REQUESTS
    for operation in operations:
        cost = _SHARED_COST if operation[0] == "t" and len(operation[2]) > 1 else 1
        if room < cost:
            calls.append([])
            room = _MAX_REQUESTS
        calls[-1].append(operation)
        room -= cost
    return calls


def without_ended_renewals(
    calls: list[list[Operation]], has_ended: Callable[[str], bool]
) -> list[list[Operation]]:
    """Return calls without the renewals of holds that have ended by now. If the end has arrived, a
    renewal would create the hold again. If it has not, the hold must stay until it does: the end
    says whether the request was sent, and carries its reports."""
    return [[one for one in call if one[0] != "r" or not has_ended(one[1])] for call in calls]


def repeated_ends(
    calls: list[list[Operation]], has_ended: Callable[[str], bool]
) -> list[list[Operation]]:
    """Return calls that end once more what `calls` take but has ended by now, unused. The end may
    precede the take in the same calls, or may have arrived in time when these calls were late and
    are now sent again. Otherwise they would leave a hold that no one frees."""
    ends = [
        end_operation(token, [asked.scope for asked in rest[0]], "undone")
        for kind, token, *rest in chain.from_iterable(calls)
        if kind == "t" and has_ended(token)
    ]
    return batches(ends) if ends else []


class OperationsReply(msgspec.Struct, array_like=True):
    """A reply of the script `OPERATIONS`."""

    now: int
    """The server's time in microseconds."""
    status: int
    """0: another epoch, 1: done, 2: outside the expected times."""
    answers: list[Any] = []


def decode_reply(reply: Any) -> OperationsReply:
    """Decode a reply of the script. Raises LedgerLost if it can't be read."""
    try:
        return msgspec.msgpack.decode(reply, type=OperationsReply)
    except (msgspec.MsgspecError, TypeError) as error:
        raise LedgerLost(f"the store's answer can't be read: {error}") from error


def scope_clock(answer: list[Any]) -> ScopeClock:
    """Decode a scope's clock from an answer of the script."""
    name, age, interval, blocked, reason, paused, *rest = answer
    age = None if age is False else age / 1e6
    day, *used = rest or (False,)
    day = None if day is False else day / 1e6
    return ScopeClock(name, age, interval / 1e6, blocked / 1e6, reason, bool(paused), day, *used)


def scope_view(answer: list[Any]) -> ScopeView:
    """Decode the answer to a `v` operation: everything that is known of a scope."""
    clock, holds, waiting = answer
    views = (
        HoldView(token.partition(":")[0], age / 1e6, left / 1e6, bool(headed))
        for token, age, left, headed in holds
    )
    return ScopeView(scope_clock(clock), tuple(views), waiting)
