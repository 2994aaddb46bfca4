"""A gate in a process of its own, driven by lines of JSON: `python worker.py '{"storage": ...}'`.

It is run by this version and by an earlier one, so it uses what both have.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from gatekeeper import Config, Gatekeeper, HostRule, NotYet


class Worker:
    """The open gate and its leases."""

    def __init__(self, gate: Gatekeeper) -> None:
        self.gate = gate
        self.leases: dict[str, Any] = {}

    async def text(self, url: str) -> Any:
        robots = await self.gate.robots(url)
        return robots and robots.text

    async def allowed(self, url: str) -> Any:
        return await self.gate.allowed(url)

    async def acquire(self, url: str) -> Any:
        self.leases[url] = await self.gate.acquire(url, owned=False)

    async def seconds(self, url: str) -> Any:
        """Return the seconds after which the host may be asked; None: nobody knows."""
        lease = await self.gate.try_acquire(url, owned=False)
        assert isinstance(lease, NotYet)
        return lease.due_at and (lease.due_at - datetime.now(UTC)).total_seconds()

    async def report(self, url: str, status: int, retry_after: float | None) -> Any:
        lease = self.leases.pop(url)
        lease.report(status=status, elapsed=0.01, retry_after=retry_after)
        lease.end()

    async def block(self, host: str, seconds: float) -> Any:
        await self.gate.block(host, datetime.now(UTC) + timedelta(seconds=seconds))

    async def pause(self, host: str) -> Any:
        await self.gate.pause(host)

    async def override(self, rule: dict[str, Any], seconds: float | None = None) -> Any:
        """Set a rule; the earlier version knows no `seconds`."""
        self.gate.override(HostRule(**rule), **({} if seconds is None else {"seconds": seconds}))

    async def note(self, url: str) -> Any:
        """Return the verdict about a URL, and why."""
        decision = await self.gate.check(url)
        return [decision.verdict, decision.note]

    async def clocks(self, host: str) -> Any:
        return sorted(clock.kind for clock in await self.gate.why(host))


async def main() -> None:
    settings = {
        "guard": {"allow": ["127.0.0.0/8"]},
        "pacing": {"default_interval": 0.2},
        **json.loads(sys.argv[1]),
    }
    loop = asyncio.get_running_loop()
    async with Gatekeeper("upgradebot/1.0", config=Config.from_dict(settings)) as gate:
        worker = Worker(gate)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            name, *arguments = json.loads(line)
            try:
                answer = {"answer": await getattr(worker, name)(*arguments)}
            except Exception as error:  # noqa: BLE001 - the test prints it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
