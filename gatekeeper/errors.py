"""Every exception that this package raises on purpose.

    GatekeeperError
    ├── InvalidURL (ValueError)             not an http or https URL
    ├── ConfigError (ValueError)            an invalid setting
    │   └── MissingExtra (ModuleNotFoundError)   an optional package is not installed
    ├── Denied (aiohttp.ClientError)        this request may not be sent
    │   └── Deferred                        ... not now; ask again at retry_at
    ├── LeaseTimeout (aiohttp.ClientError, TimeoutError)   no lease within the timeout
    ├── AddressRefused (OSError)            the guard refused to connect
    ├── StorageError                        the state file can't be read or written
    ├── LedgerLost                          the fleet's ledger can't be reached
    │   └── HoldLapsed                      a ledger's grant ended before the request was sent
    ├── SidecarError                        the sidecar rejected a request
    └── GateClosed (RuntimeError)           the gate is not open

The answer to a *question* is a value (a `Decision`), never an exception; `Denied` is raised only
where a request has to be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from gatekeeper.late import LATE, lazily

if TYPE_CHECKING:
    from gatekeeper.decision import Deferred, Denied, LeaseTimeout
else:
    __getattr__, __dir__, _ = lazily(__name__, LATE[__name__])

__all__ = [
    "AddressRefused",
    "ConfigError",
    "Deferred",
    "Denied",
    "GateClosed",
    "GatekeeperError",
    "HoldLapsed",
    "InvalidURL",
    "LeaseTimeout",
    "LedgerLost",
    "MissingExtra",
    "SidecarError",
    "StorageError",
]


class GatekeeperError(Exception):
    """Base class of every exception that gatekeeper raises on purpose."""


class InvalidURL(GatekeeperError, ValueError):
    """The text is not an http or https URL.

    `url` is the text with credentials masked and cut to a printable length; `problem` describes
    what is wrong with it.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url)  # by Python 3.14 of a library's error, which takes one argument
        self.args: tuple[object, ...] = (url, problem)
        self.url = url
        self.problem = problem

    def __str__(self) -> str:
        return f"{quoted(self.url)}: {self.problem}"


def quoted(url: str) -> str:
    """Return the text in quotes. Unprintable characters are expected to be escaped already, as in
    `InvalidURL.url`: repr would escape the escapes."""
    return f"'{url}'" if url.isprintable() else repr(url)


def counted(count: int, noun: str) -> str:
    """Return how many there are, as people write it.

    >>> counted(1, "line"), counted(1234, "line")
    ('1 line', '1,234 lines')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class ConfigError(GatekeeperError, ValueError):
    """A setting or argument is invalid; the message names it and the remedy."""


class MissingExtra(ModuleNotFoundError, ConfigError):
    """A package of an optional extra is not installed; `name` is its name."""


@contextmanager
def needs_extra(extra: str, user: str) -> Iterator[None]:
    """Explain how to install an extra, if a module that the block imports is missing.

    Raises MissingExtra. `user` is what needs the extra: a setting, an option or a module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"pip install 'robots-gatekeeper[{extra}]'"
        raise MissingExtra(
            f"{user} needs {error.name}: {install} (in a checkout: pip install '.[{extra}]')",
            name=error.name,
        ) from None


class AddressRefused(GatekeeperError, OSError):
    """The guard refused to connect. The message is constant: it reveals nothing (T2)."""

    def __init__(self) -> None:
        super().__init__("blocked")
        self.strerror: str | None = "blocked"  # the part of an OSError that aiohttp shows

    def __reduce__(self) -> tuple[type[AddressRefused], tuple[()]]:
        return AddressRefused, ()


class StorageError(GatekeeperError):
    """The state file can't be read or written; the message names the file and the remedy."""


class LedgerLost(GatekeeperError):
    """The ledger that a fleet shares can't be reached; no lease is granted until it can.

    A gate raises Deferred with the reason `fleet` instead.
    """


class HoldLapsed(LedgerLost):
    """The ledger's grant expired, or a block revoked it, before the request was sent.

    Sessions made by this package acquire another lease by themselves.
    """


class SidecarError(GatekeeperError):
    """The sidecar rejected a request, or its response can't be read: retrying won't help.

    `status` is the HTTP status, `kind` one word such as "unauthorized", `detail` a sentence.
    Questions and leases are deferred, and don't raise this, while the sidecar is unreachable.
    """

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(status, kind, detail)
        self.status = status
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"the sidecar answers {self.status} {self.kind}: {self.detail}"


class GateClosed(GatekeeperError, RuntimeError):
    """The gate was used before `async with` opened it, after it was closed, or in an event loop
    that is not the one that opened it."""


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and those that it wraps; at most 32, as a chain may be circular."""
    found = [error]
    for one in found:  # grows
        wrapped = getattr(one, "os_error", None) or getattr(one, "_os_error", None)
        group = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for cause in (one.__cause__, one.__context__, wrapped, *group):
            if isinstance(cause, BaseException) and len(found) < 32 and cause not in found:
                found.append(cause)
    return found


# --- mistakes of callers that use no type checker -------------------------------------------


def refusing(text: str) -> Callable[..., NoReturn]:
    """Return a special method, such as `__await__`, that raises a TypeError with the remedy.

    Use it inside `if not TYPE_CHECKING`, as a type checker finds the mistake by itself.
    """

    def refuse(*_: object) -> NoReturn:
        raise TypeError(text)

    return refuse


def refuse_single_text(urls: Iterable[str]) -> None:
    """Raise TypeError for a single text, which would yield a URL per character, and for anything
    that is not iterable.

    >>> refuse_single_text("https://example.org/")
    Traceback (most recent call last):
    TypeError: urls must be a list of URLs, not one str: give [url], or ask check(url)
    """
    if isinstance(urls, str | bytes | bytearray):
        kind = type(urls).__name__
        raise TypeError(
            f"urls must be a list of URLs, not one {kind}: give [url], or ask check(url)"
        )
    if not isinstance(urls, Iterable):
        raise TypeError(
            f"urls must be a list of URLs, or another iterable, not {type(urls).__name__}"
        )


_ARGUMENT_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "status": ((int,), "an int such as 200"),
    "elapsed": ((float, int), "seconds such as 0.25"),
    "size": ((int,), "bytes such as 1024"),
    "retry_after": ((str, float, int), "seconds such as 120, or the Retry-After field"),
    "priority": ((int, float), "a number such as 1"),
    "timeout": ((float, int), "seconds such as 60.0"),
}
_INTEGER = frozenset({type(None), int})
_NUMBER = _INTEGER | {float}
_NUMBER_OR_TEXT = _NUMBER | {str}


def refuse_wrong_report(status: object, elapsed: object, retry_after: object, size: object) -> None:
    """Raise a TypeError that describes the wrong argument of a report.

    >>> refuse_wrong_report("200", None, None, None)
    Traceback (most recent call last):
    TypeError: status must be an int such as 200, not the str '200': give int(status)
    """
    # The classes first, as that is fast: each request has a report, and nearly all are right.
    if (
        status.__class__ in _INTEGER
        and elapsed.__class__ in _NUMBER
        and size.__class__ in _INTEGER
        and retry_after.__class__ in _NUMBER_OR_TEXT
    ):
        return
    _refuse_wrong_type(status=status, elapsed=elapsed, size=size, retry_after=retry_after)


def refuse_wrong_wait(priority: object, timeout: object = None) -> None:
    """Raise a TypeError that describes the wrong argument of a wait for a lease.

    >>> refuse_wrong_wait(0, "60")
    Traceback (most recent call last):
    TypeError: timeout must be seconds such as 60.0, not the str '60': give float(timeout)
    """
    if priority.__class__ is not int or timeout.__class__ not in _NUMBER:
        _refuse_wrong_type(priority=priority, timeout=timeout)
        # An infinite priority is that of a robots.txt; NaN has no place in an order.
        if isinstance(priority, float) and not math.isfinite(priority):
            raise TypeError(f"priority must be a finite number such as 1, not {priority}")


def _refuse_wrong_type(**given: object) -> None:
    for name, value in given.items():
        kinds, wanted = _ARGUMENT_TYPES[name]
        if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
            continue
        text = f"{name} must be {wanted}, not the {type(value).__name__} {f'{value!r}'[:40]}"
        if isinstance(value, str | bytes):
            text += f": give {kinds[0].__name__}({name})"
        raise TypeError(text)
