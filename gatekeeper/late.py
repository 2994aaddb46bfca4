"""Names that a module hands out without importing their module: they are resolved at first use.

This is the only place in which the core names parts of the products beside it. It also serves the
package itself, so that a program that only parses files does not load an HTTP client (PEP 562).
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # not typing's: importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

LATE: Mapping[str, Mapping[str, str]] = {
    "gatekeeper.clock": {"gatekeeper.testing.virtual_clock": "VirtualClock"},
    # `decision` imports aiohttp, for which a program that only parses files should not wait.
    "gatekeeper.errors": {"gatekeeper.decision": "Deferred Denied LeaseTimeout"},
    "gatekeeper.robots": {
        "gatekeeper.page_rules": "PageRules PageSignals page_signals",
        "gatekeeper.sites.composition": "Change ComposeProblem Composed Difference Fragment Ruling "
        "compose diff",
        "gatekeeper.sites.witness": "Witness witnesses",
    },
    "gatekeeper.robots.policy": {"gatekeeper.sites.lint": "findings"},
    "gatekeeper.gate": {
        "gatekeeper.audit.record": "AuditRecord",
        "gatekeeper.fleet": "configured_ledger",
        "gatekeeper.session.middleware": "gate_middleware_with",
        "gatekeeper.signing": "Signer",
    },
    "gatekeeper.gate.gatekeeper": {"gatekeeper.sitemaps": "Sitemaps sitemaps_of"},
}
"""For each module of the core: where its late names are defined, and which those are."""


def late(user: str, name: str) -> Any:
    """Return a late name of a module of the core. It is imported at the first call.

    >>> late("gatekeeper.errors", "Denied").__module__
    'gatekeeper.errors'
    """
    place = next(module for module, names in LATE[user].items() if name in names.split())
    return getattr(import_module(place), name)


def lazily(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a module that imports names on first use.

    `names_by_module` maps each module to those of its names that `package` hands out, with blanks
    between. The modules of a package are its attributes, too, imported or not.

    >>> getattr_, dir_, all_ = lazily("gatekeeper", {"gatekeeper.urls": "mask"})
    >>> getattr_("mask").__module__, "mask" in dir_(), all_
    ('gatekeeper.urls', True, ['mask'])
    """
    sources = {name: module for module, names in names_by_module.items() for name in names.split()}

    def find(name: str) -> object:
        if name in sources:
            value: object = getattr(import_module(sources[name]), name)
        else:
            value = _module_of(package, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return find, names, sorted(sources)


def _module_of(package: str, name: str) -> object:
    whole = f"{package}.{name}"
    try:
        if not name.startswith("_"):
            return import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
