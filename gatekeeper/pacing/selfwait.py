"""What a turn of a host takes a slot of: what the deadlock check goes by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gatekeeper.pacing.books import Books
from gatekeeper.pacing.ledger import Scope

__all__ = ["EVERYTHING", "Need", "needs"]

EVERYTHING = ""
"""The name under which all leases count together (pacing.max_in_flight)."""


class Need(NamedTuple):
    """A slot that a turn takes."""

    scope: str
    slots: int
    """How many there are."""
    paced: bool
    """An interval is in force: a lease whose head is awaited keeps everybody else out."""


def needs(books: Books, host: str, near: Iterable[str] = ()) -> list[Need]:
    """Of which scopes a turn of the host takes a slot.

    `near` names scopes that the host shares beside those the books know of: its addresses,
    before its first turn. None in a dry run, in which nobody waits.
    """
    if books.pacing.dry_run:
        return []
    scope = books.scopes.get(host)
    known: tuple[Scope, ...]
    if scope is None:
        known, near = (), (*books.rules.shared_names(host), *near)
    else:
        known = (scope, *scope.shared)
    names = {one.name for one in known}
    beside = (books.scopes[name] for name in near if name in books.scopes and name not in names)
    found = [Need(one.name, _slots(one), one.gap > 0) for one in (*known, *beside)]
    found.append(Need(EVERYTHING, books.pacing.max_in_flight, False))
    return found


def _slots(one: Scope) -> int:
    """Half open, after a block, one probe is all there may be."""
    probing = one.history is not None and one.history.probing
    return 1 if probing else one.settings.limit
