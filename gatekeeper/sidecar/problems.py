"""Errors as problem documents (RFC 9457)."""

from __future__ import annotations

import http
import math
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec
from aiohttp import web

from gatekeeper.decision import Decision

__all__ = ["SANDBOXED", "Holder", "Problem", "ProblemDocument", "retry_after"]

CONTENT_TYPE = "application/problem+json"
_PREFIX = "urn:gatekeeper:problem:"
SANDBOXED = {
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""On every answer that may quote what a site says: a browser runs nothing of it (T12)."""


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    """The id of the request, as in the log."""
    decision: Decision | None = None
    """With a lease that was denied or deferred: why."""
    most: float | None = None
    """Where too much was asked at once: the most that may be, of what `detail` speaks of."""
    held_since: datetime | None = None
    """Where a turn did not come in time: since when a lease holds the host."""
    held_until: datetime | None = None
    """When that lease ends at the latest, unless it is renewed."""
    held_by: str | None = None
    """The client that has it: told to that client, and to the role `admin`."""


class Holder(NamedTuple):
    """Which lease holds a host that somebody waits for, as far as he may know."""

    since: datetime | None = None
    until: datetime | None = None
    client: str | None = None

    def __str__(self) -> str:
        if self.since is None or self.until is None:
            return ""
        whose = f" of {self.client}" if self.client is not None else ""
        return (
            f"; a lease{whose} holds the host since {self.since:%Y-%m-%dT%H:%M:%SZ}, "
            f"until {self.until:%Y-%m-%dT%H:%M:%SZ} at the latest"
        )


class Problem(Exception):
    """Stops a request; `Service` turns it into its document.

    `kind` is a word for programs (the end of `type`), `detail` a sentence for people.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        decision: Decision | None = None,
        most: float | None = None,
        held: Holder | None = None,
    ) -> None:
        super().__init__(status, kind, detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.decision = decision
        self.most = most
        self.held = held or Holder()

    def document(self, request_id: str | None = None) -> ProblemDocument:
        """The body, for the request with that id."""
        return ProblemDocument(
            type=_PREFIX + self.kind,
            title=http.HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            instance=f"urn:gatekeeper:request:{request_id}" if request_id else None,
            decision=self.decision,
            most=self.most,
            held_since=self.held.since,
            held_until=self.held.until,
            held_by=self.held.client,
        )

    def response(self, request_id: str | None = None) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.document(request_id)),
            content_type=CONTENT_TYPE,
            headers={"Server": "gatekeeper", **SANDBOXED, **self.headers},
        )


def retry_after(seconds: float) -> str:
    """A Retry-After header: whole seconds, rounded up, at least 1.

    >>> retry_after(0.2), retry_after(1.0), retry_after(1.01)
    ('1', '1', '2')
    """
    return str(max(1, math.ceil(seconds)))
