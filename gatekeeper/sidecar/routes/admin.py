"""`/v1/admin`: what the operator does to the service itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.reload import Reloaded, reload
from gatekeeper.sidecar.routing import Call, Route
from gatekeeper.sidecar.wire import Nothing, json_response, read_body

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["ROUTES"]


async def reload_config(service: Service, call: Call) -> web.StreamResponse:
    """Read the configuration again; a bad one changes nothing."""
    await read_body(call.request, Nothing, limit=service.config.server.max_body)
    try:
        return json_response(reload(service))
    except ConfigError as error:
        raise Problem(409, "config", str(error)) from error


ROUTES = (
    Route(
        "POST",
        "/v1/admin/reload",
        reload_config,
        "Read the configuration again.",
        body=Nothing,
        answers={200: Reloaded},
        problems=(400, 409, 413, 415),
    ),
)
