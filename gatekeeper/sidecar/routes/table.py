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
from gatekeeper.sidecar.routing import Route
from gatekeeper.sidecar.service import Service

_MODULES = (check, leases, fetch, hosts, operators, pages, health, forward_auth)
ROUTES: Final[tuple[Route[Service], ...]] = tuple(
    route for module in _MODULES for route in module.ROUTES
)
