"""What exists for speed alone: its switch, and names that are imported when first asked for.

Behind the switch stand the decision cache, the compiled rules and first-match shortcuts of a
policy, the URL cache of a polite session, and the responses that the sidecar writes inline. Each
has a plain way beside it that gives the same answers; the whole test suite passes with the
switch off.

`lazily` is for packages of many parts (PEP 562), `lazy_pattern` for modules of many regular
expressions: an import costs what its user uses. A module that needs another one seldom names it
as an attribute of its package: an import in a function takes 2 µs each time.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

TYPE_CHECKING = False  # as typing's: see gatekeeper/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from re import Pattern
    from typing import Any

VARIABLE = "GATEKEEPER_NO_SPEEDUPS"
"""The environment variable that turns them off: any value but the empty text and "0"."""

ON: bool = os.environ.get(VARIABLE, "") in ("", "0")
"""Whether they are used. Classes read it when they are constructed, as `speedups.ON`, so that a
test can set it; what was made before keeps to what it read."""

SURELY_SHORT = 5_460
"""Characters of a text that is not too long for a URL, whatever they become when they are escaped:
a twelfth of `urls.MAX_PATH`. Rules know it without importing what reads URLs."""

_USES = ("findall", "finditer", "fullmatch", "match", "pattern", "search", "split", "sub")


def lazily(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the package. `homes`: each module, and which of its names
    (`name`, or `name as other`) are the package's.

    Modules of the package can be had as its attributes, too, imported or not.

    >>> getattr_, dir_ = lazily("gatekeeper", {"gatekeeper.urls": ["mask", "mask as hide"]})
    >>> getattr_("hide") is getattr_("mask"), {"hide", "mask"} <= {*dir_()}
    (True, True)
    """
    places: dict[str, tuple[str, str]] = {}
    for module, its in homes.items():
        for text in its:
            name, _, other = text.partition(" as ")
            places[other or name] = module, name

    def find(name: str) -> object:
        place = places.get(name)
        if place is not None:
            value: object = getattr(import_module(place[0]), place[1])
        elif name.startswith("_"):
            raise _missing(package, name)
        else:
            value = _module(package, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names


def _module(package: str, name: str) -> object:
    whole = f"{package}.{name}"
    try:
        return import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise
        raise _missing(package, name) from None


def _missing(package: str, name: str) -> AttributeError:
    return AttributeError(f"module {package!r} has no attribute {name!r}", name=name)


class UsedPattern:
    """A `LazyPattern` once it was used."""

    __slots__ = ("_given", *_USES)


class LazyPattern(UsedPattern):
    """A regular expression that is compiled when it is first used: see `lazy_pattern`."""

    __slots__ = ()

    def __init__(self, text: str, flags: int) -> None:
        self._given = text, flags

    def __getattr__(self, name: str) -> Any:  # asked only for what is not set yet
        from re import compile as compiled  # noqa: PLC0415

        pattern = compiled(*self._given)
        for use in _USES:
            setattr(self, use, getattr(pattern, use))
        # Where a class has this method, each look at an attribute takes 0.1 µs more.
        self.__class__ = UsedPattern  # type: ignore[assignment]
        return getattr(pattern, name)


def lazy_pattern(text: str, flags: int = 0) -> Pattern[str]:
    """`re.compile(text, flags)`, for as long as nobody asks for anything but uses of it.

    It is compiled with its first use; from then on it costs nothing beside it. Compiling takes some
    0.2 ms, and most files never meet most expressions.

    >>> blanks = lazy_pattern(" +")
    >>> blanks.sub("_", "a  b"), blanks.split("a b"), blanks.pattern
    ('a_b', ['a', 'b'], ' +')
    """
    return LazyPattern(text, flags)  # type: ignore[return-value]
