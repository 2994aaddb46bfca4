"""Whether a turn could only come once leases end that the asker itself holds."""

from __future__ import annotations

from collections.abc import Iterable

from gatekeeper.pacing.books import Books
from gatekeeper.pacing.leases import Grant
from gatekeeper.pacing.ledger import Scope

__all__ = ["stands_alone", "stuck_behind"]


def stuck_behind(
    books: Books, host: str, mine: Iterable[Grant], near: Iterable[str] = ()
) -> Grant | None:
    """The first of these leases that has to end, or go out, before the host's next turn.

    Whoever holds them and waits meanwhile waits for itself: it had all the slots of one of
    the host's scopes, or holds back the request whose head the next interval is counted from.
    None where others, or the clock alone, decide. `near` names scopes that the host shares
    beside those the books know of: its addresses, before its first turn.
    """
    held = [grant for grant in mine if grant.open]
    if not held:
        return None
    if len(held) >= books.pacing.max_in_flight:
        return held[0]
    scope = books.scopes.get(host)
    known: tuple[Scope, ...]
    if scope is None:
        known, near = (), (*books.rules.shared_names(host), *near)
    else:
        known = (scope, *scope.shared)
    for one in (*known, *(books.scopes[name] for name in near if name in books.scopes)):
        inside = [grant for grant in held if grant.scope is one or one in grant.others]
        if inside and len(inside) >= _limit(one):
            return inside[0]
        if one.gap > 0:
            for grant in inside:
                if not grant.headed:
                    return grant
    return None


def stands_alone(books: Books, host: str) -> bool:
    """Whether only the host's own leases can keep anybody from its next turn."""
    if books.granted >= books.turnstile:
        return False
    scope = books.scopes.get(host)
    return not (books.rules.shared_names(host) if scope is None else scope.shared)


def _limit(scope: Scope) -> int:
    """Half open, after a block, one probe is all there may be."""
    probing = scope.history is not None and scope.history.probing
    return 1 if probing else scope.settings.limit
