"""Everything this package raises on purpose, as one tree.

    GatekeeperError
    ├── InvalidURL (ValueError)             text that is no http(s) URL
    ├── ConfigError (ValueError)            a setting that can't be used
    ├── Denied (aiohttp.ClientError)        this request may not be sent
    │   └── Deferred                        ... not now; ask again at retry_at
    ├── LeaseTimeout (aiohttp.ClientError, TimeoutError)   no turn in time
    ├── AddressRefused (OSError)            the guard refused to dial
    ├── StorageError                        the state file can't be used
    ├── LedgerLost                          the ledger of the fleet can't be reached
    ├── SidecarError                        the sidecar refused a client of ours
    └── GateClosed (RuntimeError)           the gate is shut, or was never opened

Denial of a *question* is a value (a `Decision`), never an exception; `Denied` is
raised only where a request has to be stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gatekeeper.speedups import lazily

if TYPE_CHECKING:
    from gatekeeper.decision import Deferred, Denied, LeaseTimeout
else:  # they bring aiohttp in, which who reads a text needs not wait for
    __getattr__, __dir__ = lazily(
        __name__, {"gatekeeper.decision": ["Deferred", "Denied", "LeaseTimeout"]}
    )

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
    "SidecarError",
    "StorageError",
]


class GatekeeperError(Exception):
    """The root: catch this to catch everything that gatekeeper raises on purpose."""


class InvalidURL(GatekeeperError, ValueError):
    """Text that is no http or https URL.

    `url` is the text with credentials masked and cut to a printable length;
    `problem` says what is wrong with it.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def __str__(self) -> str:
        return f"{quoted(self.url)}: {self.problem}"


def quoted(url: str) -> str:
    """A text that is no URL, in quotes. What can't be printed is escaped in it already, as
    `InvalidURL.url` is; repr would escape the escapes."""
    return f"'{url}'" if url.isprintable() else repr(url)


class ConfigError(GatekeeperError, ValueError):
    """A setting that can't be used; the message names the setting and the remedy."""


class AddressRefused(GatekeeperError, OSError):
    """The guard refused to dial. The text is constant: it tells a client nothing (T2)."""

    def __init__(self) -> None:
        super().__init__("blocked")
        self.strerror: str | None = "blocked"  # what aiohttp shows of an OSError

    def __reduce__(self) -> tuple[type[AddressRefused], tuple[()]]:
        return AddressRefused, ()


class StorageError(GatekeeperError):
    """The state can't be read or written; the message names the file and the remedy."""


class LedgerLost(GatekeeperError):
    """The ledger that a fleet shares can't be reached: no lease until it can be again.

    A gate raises Deferred in its place, with the reason `fleet`.
    """


class HoldLapsed(LedgerLost):
    """What the ledger granted ran out, or was taken back by a block, before the request was sent.

    A session of ours takes another turn by itself.
    """


class SidecarError(GatekeeperError):
    """The sidecar refused a request, or its answer can't be read: asking again won't help.

    `status` is its HTTP status, `kind` one word such as "unauthorized", `detail` a sentence.
    A sidecar that can't be reached is no error of this kind: that defers.
    """

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(status, kind, detail)
        self.status = status
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"the sidecar answers {self.status} {self.kind}: {self.detail}"


class GateClosed(GatekeeperError, RuntimeError):
    """The gate was asked before `async with` opened it, or after it was closed."""
