"""One line a decision, off the way of the answer: a bounded ring that a thread writes out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import IO

import msgspec

from gatekeeper.clock import Clock, utc
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Decision, Verdict
from gatekeeper.prepared import Given
from gatekeeper.sidecar.logs import wants_json
from gatekeeper.sidecar.metrics import Sample
from gatekeeper.sidecar.pen import Pen, put

__all__ = ["DecisionLog", "DecisionRecord"]

_PAUSE = 0.1
"""Seconds between two writes."""
_RING = 20_000
_PATIENCE = 1.0
"""Seconds that the end of the service waits for the last lines to be taken."""
_MAX_URL = 2048


class DecisionRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="decision"
):
    """One line of the log; `event` is "decision", for readers of more than one kind."""

    time: datetime
    id: str
    request: str
    client: str
    url: str
    origin: str
    user_agent: str
    verdict: str
    reason: str
    state: str | None = None
    line: int | None = None
    rule: str | None = None
    robots_status: int | None = None
    retry_at: datetime | None = None


_Entry = tuple[float, Decision | Given, str, str]


class DecisionLog:
    """Keeps what is to be written; drops, and counts, what comes too fast.

    Nothing here can block or fail an answer: adding is an append, and OPA's two lessons
    are kept, a ring without a bound runs out of memory, a drop uncounted goes unseen.
    """

    def __init__(
        self, server: ServerConfig, clock: Clock, *, stream: IO[str] | None = None
    ) -> None:
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self.adjust(server)
        self._ring: deque[_Entry] = deque()
        self._encoder = msgspec.json.Encoder()
        self.written = 0
        self._dropped = 0
        self._lost = 0

    def adjust(self, server: ServerConfig) -> None:
        """Put other settings in force."""
        self._all = server.log_decisions == "all"
        self.enabled = server.log_decisions != "none"
        self._queries = server.log_queries
        self._per_pause = max(1, int(server.log_rate * _PAUSE))
        self._json = wants_json(server, self._stream)

    def samples(self) -> Iterable[Sample]:
        """For /metrics."""
        counts = (("written", self.written), ("dropped", self.dropped))
        yield (
            "counter",
            "gatekeeper_decision_log",
            "Lines of the decision log.",
            ("result",),
            [((result,), n) for result, n in counts],
        )

    def wants(self, decision: Decision) -> bool:
        """Whether it is one of those that are logged."""
        return self.enabled and (self._all or decision.verdict is not Verdict.ALLOW)

    def add(self, decision: Decision, request: str, client: str) -> None:
        """Note a decision for the log."""
        if not self.wants(decision):
            return
        if len(self._ring) >= _RING:
            self._dropped += 1
            return
        self._ring.append((self._clock.wall(), decision, request, client))

    def add_many(
        self, decisions: Sequence[Decision] | Sequence[Given], request: str, client: str
    ) -> None:
        """Note a batch; what the ring has no room for is counted as dropped."""
        if not self.enabled:
            return
        now = self._clock.wall()
        wanted = decisions if self._all else [one for one in decisions if not _welcome(one)]
        room = max(0, _RING - len(self._ring))
        self._ring.extend((now, decision, request, client) for decision in wanted[:room])
        self._dropped += max(0, len(wanted) - room)

    async def run(self) -> None:
        """Have it written until cancelled, then what is left.

        Where the log's reader has stopped, the ring fills up and what it has no room for is
        dropped: only the pen waits.
        """
        pen = Pen(self._put)
        try:
            while True:
                await self._clock.sleep(_PAUSE)
                if self._ring and pen.free:
                    pen.give(self._page())
        finally:
            pen.give(self._page())
            pen.finish(_PATIENCE)

    def write(self) -> None:
        """Write a pause's worth at once."""
        self._put(self._page())

    def _page(self) -> list[str]:
        """A pause's worth of lines; drops, and counts, what exceeds `log_rate`."""
        ring = self._ring
        lines = [self._line(ring.popleft()) for _ in range(min(len(ring), self._per_pause))]
        if len(ring) > self._per_pause:
            # More than can be written at the next turn: the oldest are let go.
            excess = len(ring) - self._per_pause
            for _ in range(excess):
                ring.popleft()
            self._dropped += excess
        return lines

    def _put(self, lines: list[str]) -> None:
        # The pen's thread: nobody else touches `written` and `_lost` while it writes.
        try:
            put(self._stream, lines)
        except (OSError, ValueError):
            # The log's reader is gone: answers matter more than their log.
            self._lost += len(lines)
            return
        self.written += len(lines)

    @property
    def dropped(self) -> int:
        """Lines that were never written."""
        return self._dropped + self._lost

    def _line(self, entry: _Entry) -> str:
        when, told, request, client = entry
        decision = told.decision if isinstance(told, Given) else told
        rule = decision.rule
        record = DecisionRecord(
            time=utc(when),
            id=decision.id,
            request=request,
            client=client,
            url=self._shown(decision.url),
            origin=decision.origin,
            user_agent=decision.user_agent,
            verdict=decision.verdict,
            reason=decision.reason,
            state=decision.state,
            line=rule.line if rule is not None else None,
            rule=rule.text[:200] if rule is not None else None,
            robots_status=decision.robots_status,
            retry_at=decision.retry_at,
        )
        if self._json:
            # T11: a JSON encoder escapes every control that a URL could smuggle in.
            return self._encoder.encode(record).decode() + "\n"
        shown = f" (line {record.line}: {record.rule})" if rule is not None else ""
        text = (
            f"{record.verdict} {record.url} [{record.reason}]{shown} id={record.id} client={client}"
        )
        return f"{record.time:%H:%M:%S} {_printable(text)}\n"

    def _shown(self, url: str) -> str:
        if not self._queries:
            url, hidden, _ = url.partition("#")  # T11: a fragment may hold a token as well
            head, mark, _ = url.partition("?")
            url = f"{head}{'?***' if mark else ''}{'#***' if hidden else ''}"
        return url[:_MAX_URL]


def _welcome(told: Decision | Given) -> bool:
    return told.pattern.welcome if isinstance(told, Given) else bool(told)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
