"""Fixtures that open a gate in each of three ways: embedded, over TCP, over a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Gatekeeper, RemoteGatekeeper
from gatekeeper.clock import VirtualClock
from gatekeeper.sidecar.security import Tokens
from tests.conformance.ways import AGENT, AnyGate, Open, Sidecar, settings
from tests.internet import FakeInternet


@pytest.fixture
async def sidecar_on(socket_folder: Path) -> AsyncIterator[Callable[..., Awaitable[Sidecar]]]:
    """`await sidecar_on(internet, unix=True, pacing={...})`."""
    async with AsyncExitStack() as stack:

        async def begin(
            internet: FakeInternet,
            *,
            unix: bool = False,
            agent: str = AGENT,
            tokens: Tokens | None = None,
            **tables: Any,
        ) -> Sidecar:
            socket = socket_folder / "gate.sock" if unix else None
            sidecar = Sidecar(internet, settings(**tables), socket, agent)
            sidecar.tokens = tokens or Tokens()
            await sidecar.start()
            stack.push_async_callback(sidecar.stop)
            return sidecar

        yield begin


@pytest.fixture(params=["embedded", "tcp", "unix"])
async def open_gate(
    request: pytest.FixtureRequest, sidecar_on: Callable[..., Awaitable[Sidecar]]
) -> AsyncIterator[Open]:
    """`await open_gate(internet, pacing={...})`: a gate, in the way under test."""
    async with AsyncExitStack() as stack:

        async def begin(internet: FakeInternet, **tables: Any) -> AnyGate:
            given: dict[str, Any] = {}
            if isinstance(internet.clock, VirtualClock):
                given["clock"] = internet.clock
            if request.param == "embedded":
                config = settings(**tables)
                gate: AnyGate = Gatekeeper(
                    AGENT, config=config, resolver=internet.resolver, **given
                )
            else:
                sidecar = await sidecar_on(internet, unix=request.param == "unix", **tables)
                gate = RemoteGatekeeper(sidecar.where, **given)
            return await stack.enter_async_context(gate)

        yield begin
