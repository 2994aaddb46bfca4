"""The end of a crawl: what is unfinished and why, for people and for machines."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gatekeeper.cli.crawl.holdups import TURN, Holdup
from gatekeeper.cli.crawl.hosts import Explains, Hosts
from gatekeeper.cli.crawl.manifest import Outcome
from gatekeeper.cli.crawl.tally import Tally
from gatekeeper.clock import Clock

__all__ = ["INTERRUPTED_BY_SIGNAL", "MAX_WAIT", "Ending", "HeldUp", "ending"]

MAX_WAIT = "max_wait"
INTERRUPTED_BY_SIGNAL = "interrupted"
_MOST_HELD = 1_000
"""Origins that are looked at and named to machines; people are shown the first 20."""


class HeldUp(msgspec.Struct, frozen=True):
    """An origin whose URLs could not be asked for."""

    origin: str
    urls: int
    reason: str
    """One word: a decision's reason, or `turn` where only the interval stood in the way."""
    why: str
    retry_at: datetime | None
    """From when on it may be asked; None: not before somebody says so."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What a crawl came to: with --json, the last line on stderr. Sizes are bytes."""

    fetched: int
    denied: int
    failed: int
    skipped: int
    refused_before: int
    """Those of the skipped that an earlier run was denied, or that are no URLs."""
    bytes: int
    unfinished: int
    """URLs that have no entry: the next run asks for them."""
    complete: bool
    """Whether the list was read to its end."""
    stopped: str | None
    """`max_wait`, `interrupted`, or None: it came to its end."""
    held_up: tuple[HeldUp, ...]
    """The origins that most of the unfinished URLs wait for."""

    def lines(self, *, max_wait: float, resumes: bool, most: int = 20) -> list[str]:
        """What is said of it under the summary of what was done; nothing of a whole one."""
        if not self.unfinished and self.complete:
            return []
        parts = [f"{self.unfinished:,} unfinished"] if self.unfinished else []
        if not self.complete:
            parts.append("the list was not read to its end")
        if self.stopped == MAX_WAIT:
            parts.append(f"nobody's turn comes within --max-wait {max_wait:g} s")
        parts.append(
            "run the same command again to go on"
            if resumes
            else "the next run begins anew: only -o DIR or --warc FILE remembers what is done"
        )
        lines = [f"stopped: {'; '.join(parts)}"]
        for held in self.held_up[:most]:
            why = Holdup(held.reason, held.why, held.retry_at)
            lines.append(f"  {held.urls:>6,}  {held.origin}  {why}")
        if len(self.held_up) > most:
            lines.append(f"          and {len(self.held_up) - most:,} more hosts")
        rest = self.unfinished - sum(held.urls for held in self.held_up)
        if rest and self.held_up:
            lines.append(f"  {rest:>6,}  whose turn had not come, or was cut short")
        return lines


async def ending(
    tally: Tally, hosts: Hosts, gate: Explains, clock: Clock, stopped: str | None
) -> Ending:
    """How it stands, as far as the gate knows it: no site is asked."""
    held = []
    for turn in await hosts.busiest(gate, clock, _MOST_HELD):
        holdup = turn.holdup
        # That it was not its turn yet is worth a word only where this ended the crawl.
        if holdup is not None and (holdup.reason != TURN or stopped == MAX_WAIT):
            held.append(
                HeldUp(turn.origin, turn.waiting, str(holdup.reason), holdup.text, holdup.until)
            )
    return Ending(
        fetched=tally.outcomes[Outcome.FETCHED],
        denied=tally.outcomes[Outcome.DENIED],
        failed=tally.outcomes[Outcome.FAILED],
        skipped=tally.skipped,
        refused_before=tally.refused,
        bytes=tally.size,
        unfinished=tally.total - tally.done,
        complete=tally.complete,
        stopped=stopped,
        held_up=tuple(sorted(held, key=lambda one: (-one.urls, one.origin))),
    )
