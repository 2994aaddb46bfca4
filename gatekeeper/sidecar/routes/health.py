"""Alive, and ready: two questions, since a draining service is the one and not the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gatekeeper.sidecar.problems import Problem
from gatekeeper.sidecar.routing import Call, Route
from gatekeeper.sidecar.wire import json_response

if TYPE_CHECKING:
    from gatekeeper.sidecar.app import Service

__all__ = ["ROUTES", "Alive", "Health"]


class Health(msgspec.Struct, frozen=True):
    """The body of `/readyz`."""

    status: str


class Alive(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of `/healthz`. `user_agent` is the name whose rules apply where a question names
    no other, and under which sites are asked: no secret, every site is told it."""

    status: str
    user_agent: str | None = None


async def healthz(service: Service, call: Call) -> web.StreamResponse:
    """The process answers: 200, whatever it is doing; and says who it is."""
    return json_response(Alive("alive", getattr(service.gate, "user_agent", None)))


async def readyz(service: Service, call: Call) -> web.StreamResponse:
    """New questions are taken: 200, or 503 while starting, draining, without a network, or
    while promises can't be kept."""
    if not service.ready:
        raise Problem(503, "not-ready", service.unready, headers={"Retry-After": "1"})
    return json_response(Health("ready"))


ROUTES = (
    Route(
        "GET",
        "/healthz",
        healthz,
        "Is the process alive, and who is it?",
        answers={200: Alive},
        probe=True,
    ),
    Route(
        "GET",
        "/readyz",
        readyz,
        "Does it take questions?",
        answers={200: Health},
        problems=(503,),
        probe=True,
    ),
)
