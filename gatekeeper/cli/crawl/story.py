"""One URL on its way through a crawl, and the entry it ends in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gatekeeper.cli.crawl.manifest import Entry, Outcome
from gatekeeper.cli.crawl.warc import WarcHead
from gatekeeper.decision import Decision

__all__ = ["Answer", "Story"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a response, and what its body will be stored with."""

    status: int
    headers: Any
    at: datetime
    elapsed: float
    took: float
    location: str | None
    signals: dict[str, Any] | None
    warc: WarcHead | None


@dataclass(frozen=True, slots=True)
class Story:
    """The URL that was given, where it was redirected, how often it was tried."""

    url: str
    redirects: tuple[tuple[int, str], ...] = ()
    tries: int = 1

    @property
    def last(self) -> str:
        """The URL that is asked for now."""
        return self.redirects[-1][1] if self.redirects else self.url

    def redirected(self, status: int, url: str) -> Story:
        """It went on to another URL."""
        return Story(self.url, (*self.redirects, (status, url)), self.tries)

    def tried_again(self) -> Story:
        """It will be asked for once more."""
        return Story(self.url, self.redirects, self.tries + 1)

    def passed(self, url: str) -> bool:
        """Whether that URL is part of it already."""
        return url == self.url or any(url == hop for _, hop in self.redirects)

    def denied(self, decision: Decision, at: datetime) -> Entry:
        """It may not be fetched."""
        return self._entry(Outcome.DENIED, at, decision=decision)

    def failed(self, error: str, at: datetime, **more: Any) -> Entry:
        """It could not be fetched."""
        return self._entry(Outcome.FAILED, at, error=error, **more)

    def fetched(self, answer: Answer, decision: Decision, **stored: Any) -> Entry:
        """It was, and is stored as said."""
        return self._entry(
            Outcome.FETCHED,
            answer.at,
            status=answer.status,
            decision=decision,
            elapsed=round(answer.elapsed, 6),
            took=round(answer.took, 6),
            signals=answer.signals,
            **stored,
        )

    def _entry(self, outcome: Outcome, at: datetime, **more: Any) -> Entry:
        return Entry(
            url=self.url,
            outcome=outcome,
            at=at,
            final_url=self.last if self.redirects else None,
            redirects=self.redirects,
            tries=self.tries,
            **more,
        )
