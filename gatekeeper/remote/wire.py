"""What travels between client and sidecar: bodies, and problems as exceptions.

A sidecar may be newer than its client, so fields that are not known here are passed over.
"""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

import msgspec

from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, GatekeeperError, InvalidURL, SidecarError
from gatekeeper.pacing.explain import ClockView
from gatekeeper.remote.line import Answer

__all__ = [
    "BATCH",
    "Alive",
    "Batch",
    "BlockBody",
    "Decisions",
    "Explanation",
    "HostBody",
    "LeaseGiven",
    "LeaseWanted",
    "RefreshBody",
    "Renewal",
    "Told",
    "bound_in",
    "encode",
    "problem",
    "read",
]

_T = TypeVar("_T")
BATCH = 1000
"""URLs that one `POST /v1/check` may have."""

encode = msgspec.json.Encoder().encode


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /v1/check`."""

    urls: list[str]
    user_agent: str | None = None


class Decisions(msgspec.Struct, frozen=True):
    """Its answer, in the order of the URLs."""

    decisions: list[Decision]


class LeaseWanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /v1/leases`; seconds."""

    url: str
    wait: float
    ttl: float
    priority: int = 0
    user_agent: str | None = None


class LeaseGiven(msgspec.Struct, frozen=True):
    """Its answer, where the turn came."""

    id: str
    url: str
    decision: Decision


class Renewal(msgspec.Struct, frozen=True):
    """`POST /v1/leases/{id}/renew`."""

    ttl: float


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /v1/leases/{id}/report`."""

    status: int | None = None
    elapsed: float | None = None
    retry_after: float | str | None = None
    size: int | None = None
    rate_limit: str | None = None


class Alive(msgspec.Struct, frozen=True):
    """`GET /healthz`."""

    user_agent: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """What `GET /v1/explain` tells of the file."""

    decision: Decision
    robots_txt: str | None


class HostBody(msgspec.Struct, frozen=True):
    """What `GET /v1/hosts/{host}` tells."""

    clocks: tuple[ClockView, ...]


class BlockBody(msgspec.Struct, frozen=True):
    """`POST /v1/hosts/{host}/block`."""

    until: datetime
    reason: str


class RefreshBody(msgspec.Struct, frozen=True):
    """`POST /v1/hosts/{host}/refresh`."""

    origin: str


class _Problem(msgspec.Struct, frozen=True):
    """RFC 9457, as far as it matters here."""

    type: str = "about:blank"
    detail: str = ""
    decision: Decision | None = None
    most: float | None = None


_decoders: dict[type, msgspec.json.Decoder[object]] = {}


def read(answer: Answer, kind: type[_T]) -> _T:
    """The body of a good answer. Raises what `problem` gives for any other."""
    if answer.status not in (200, 201, 202):
        raise problem(answer)
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(answer.body)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SidecarError(
            answer.status, "unreadable", f"no answer of a sidecar that this client knows: {error}"
        ) from None


def bound_in(answer: Answer) -> float | None:
    """What a refusal names as the most that may be asked for at once, if it does."""
    try:
        return msgspec.json.decode(answer.body, type=_Problem).most
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def problem(answer: Answer, url: str = "") -> GatekeeperError:
    """A problem document as the exception that the embedded gate would raise.

    `url` is the one asked about. What has no counterpart there is a SidecarError.
    """
    try:
        told = msgspec.json.decode(answer.body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SidecarError(answer.status, "unreadable", "this is no answer of a sidecar")
    kind = told.type.rpartition(":")[2]
    decision = told.decision
    if kind == "invalid-url":
        return InvalidURL(url, told.detail.removeprefix(f"{url!r}: "))
    if decision is not None and decision.verdict is Verdict.DEFER:
        return Deferred(decision)
    if decision is not None and decision.verdict is Verdict.DENY:
        return Denied(decision)
    detail = told.detail
    if kind == "unauthorized" and answer.token:
        detail = f"the sidecar does not accept this token ({detail})"
    elif kind == "unauthorized":
        detail += "; give RemoteGatekeeper its token=..."
    return SidecarError(answer.status, kind, detail or "it says no more")
