"""A storage that can lose its last second, for the tests of pacing."""

from __future__ import annotations

from gatekeeper.storage.base import ClockRecord


class FakeStorage:
    """Promises are durable at once; the rest is lost in a crash before the next flush."""

    def __init__(self, durable: dict[str, ClockRecord] | None = None) -> None:
        self.durable = dict(durable or {})
        self.pending: dict[str, ClockRecord | None] = {}
        self.dead = False
        self.fails = False

    def promise(self, record: ClockRecord) -> None:
        if self.fails:
            raise OSError("disk full")
        if not self.dead:
            self.pending.pop(record.scope, None)
            self.durable[record.scope] = record

    def put_clock(self, record: ClockRecord) -> None:
        self.pending[record.scope] = record

    def forget_clock(self, scope: str) -> None:
        self.pending[scope] = None

    async def load_clocks(self) -> list[ClockRecord]:
        return list(self.durable.values())

    async def load_clock(self, scope: str) -> ClockRecord | None:
        return self.load_clock_nowait(scope)

    def load_clock_nowait(self, scope: str) -> ClockRecord | None:
        return self.pending.get(scope, self.durable.get(scope))

    async def flush(self) -> None:
        if not self.dead:
            for scope, record in self.pending.items():
                if record is None:
                    self.durable.pop(scope, None)
                else:
                    self.durable[scope] = record
        self.pending.clear()

    def crash(self) -> FakeStorage:
        """What a new process finds."""
        self.dead = True
        return FakeStorage(self.durable)
