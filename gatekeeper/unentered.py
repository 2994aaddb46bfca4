"""What a lease has and the request for it has not: said where somebody forgot to enter."""

from __future__ import annotations

from typing import Self

__all__ = ["Unentered"]


class Unentered:
    """A name of the lease on the class of its request: looked at there it tells the remedy.

    A descriptor for the usual names, as `__getattr__` would slow every other one down. It stands
    behind `if not TYPE_CHECKING`: a type checker finds the mistake by itself.
    """

    __slots__ = ()

    def __get__(self, request: object, owner: type) -> Self:
        """Itself for the class; else raises AttributeError, as for any name that is missing."""
        if request is None:
            return self
        raise AttributeError(
            "this is the request for a lease; enter it first: async with gate.lease(...) as lease"
        )
