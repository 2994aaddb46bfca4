"""The routes of the sidecar, as `Service` is given them."""

from typing import Final

from gatekeeper.sidecar.routes import (
    check,
    fetch,
    forward_auth,
    health,
    hosts,
    leases,
    operators,
    pages,
)

ROUTES: Final = (
    *check.ROUTES,
    *leases.ROUTES,
    *fetch.ROUTES,
    *hosts.ROUTES,
    *operators.ROUTES,
    *pages.ROUTES,
    *health.ROUTES,
    *forward_auth.ROUTES,
)
