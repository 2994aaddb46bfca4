"""The kinds of lines of an audit record, as its readers see them.

`docs/audit.schema.json` is made of these classes. The first fields are common to all kinds: `v`,
the version of the format; `n`, which counts the lines of the chain from 1; `prev`, the digest of
the line before; `t` and `m`, the wall clock and the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec

from gatekeeper.audit.chain import VERSION, BadLine, digest_of

MAX_LINE = 4_194_304
"""Octets of a line that are read; a longer one is reported, and only its digest is made."""

Digest = Annotated[
    str,
    # `$` also fits before a newline at the end: hence the length.
    msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64, description="a SHA-256"),
]
Time = Annotated[datetime, msgspec.Meta(tz=True, description="RFC 3339, in UTC")]
Number = Annotated[int, msgspec.Meta(ge=1)]
Origin = Annotated[str, msgspec.Meta(description="of a site: scheme, host and port")]
Address = Annotated[
    str, msgspec.Meta(description='a URL, as `urls` of the start line says: "full", "path", ...')
]


class ChainLine(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """A line of a chain."""

    v: Literal[1]
    n: Number
    prev: Digest
    t: Time
    m: float


class NamedEnd(msgspec.Struct, frozen=True, gc=False):
    """The last whole line of another chain, as a start saw it."""

    segment: str
    n: Number
    digest: Digest


class StartLine(ChainLine, frozen=True, kw_only=True, tag="start"):
    """The begin of a chain: who writes it, and by which settings."""

    gatekeeper: str
    user_agent: str
    token: str
    host: str
    pid: int
    boot: str | None
    config: Digest
    settings: dict[str, Any]
    urls: Literal["full", "path", "digest"]
    salt: str | None = None
    chains: tuple[NamedEnd, ...]


class SettingsLine(ChainLine, frozen=True, kw_only=True, tag="settings"):
    """Sections of the settings that a reload changed; they replace those of the start."""

    settings: dict[str, Any]


class EndLine(ChainLine, frozen=True, kw_only=True, tag="end"):
    """The end of a chain; a seal follows."""

    reason: str


class RobotsLine(ChainLine, frozen=True, kw_only=True, tag="robots"):
    """A robots.txt that came into force, or what stands in its place."""

    origin: Origin
    source: Literal["network", "state", "fleet"]
    outcome: str
    status: int | None
    hops: tuple[Address, ...]
    validators: dict[str, str | None] | None
    fetched_at: Time | None
    expires_at: Time | None
    size: int | None
    text: Digest | None
    since: Time | None
    good: str | None = None
    """Since then, the outcome of the last attempt that did not fail: the file, or its absence, that
    decides if it lasts. None: there was none."""


class ScopeInForce(msgspec.Struct, frozen=True, gc=False):
    """What a grant had to wait for in one scope, in seconds."""

    scope: str
    interval: Annotated[float, msgspec.Meta(ge=0)]
    source: str
    since: float | None
    """Since the scope's last start in this process's knowledge; None: it knows none."""


class GrantLine(ChainLine, frozen=True, kw_only=True, tag="grant"):
    """The right to send one request, written before it is given."""

    verdict: ClassVar[str] = "allow"
    """As in `AnsweredLine`."""
    lease: str
    url: Address
    agent: str
    robots: bool
    """The request is for a robots.txt, or a redirect of one."""
    decision: str | None
    reason: str | None
    line: int | None
    text: Digest | None
    scopes: tuple[ScopeInForce, ...]


class OutcomeLine(ChainLine, frozen=True, kw_only=True, tag="outcome"):
    """What became of a lease."""

    lease: str
    start: Time | None
    """When the request was sent; None: it was not."""
    head: Time | None
    end: Time
    status: int | None
    retry_after: float | None
    size: int | None
    signed: bool
    signals: dict[str, Any]


class AnsweredLine(ChainLine, frozen=True, kw_only=True, gc=False):
    """What a decision says."""

    url: Address
    agent: str
    verdict: Literal["allow", "deny", "defer"]
    decision: str | None
    reason: str
    line: int | None
    text: Digest | None
    retry_at: Time | None


class RefusedLine(AnsweredLine, frozen=True, kw_only=True, tag="refused"):
    """A lease or a page that was refused, or put off."""


class DecidedLine(AnsweredLine, frozen=True, kw_only=True, tag="decision"):
    """The answer to a question, with `audit.what = "decisions"`."""


class OmittedLine(ChainLine, frozen=True, kw_only=True, tag="omitted"):
    """Lines that were left out."""

    count: int
    since: Time
    why: str


class OverrideLine(ChainLine, frozen=True, kw_only=True, tag="override"):
    """A rule of the operator that came into force, or ended."""

    match: str
    by: str | None
    reason: str | None
    until: Time | None
    rule: dict[str, Any] | None
    source: str
    ended: bool


class HeldLine(ChainLine, frozen=True, kw_only=True, gc=False):
    """What says that a scope may not be asked."""

    scope: str
    by: str | None
    reason: str | None
    since: Time | None
    until: Time | None


class BlockLine(HeldLine, frozen=True, kw_only=True, tag="block"):
    """A time before which a scope may not be asked. One that is over already lifts the block."""


class PauseLine(HeldLine, frozen=True, kw_only=True, tag="pause"):
    """A scope that may not be asked until the pause has ended."""

    ended: bool = False


class SealLine(ChainLine, frozen=True, kw_only=True, tag="seal"):
    """The end of a segment."""

    lines: int
    first: Number
    reason: str
    key: str | None
    """The thumbprint of the key that signed."""
    signature: str | None


class ErasureLine(ChainLine, frozen=True, kw_only=True, tag="erasure"):
    """What `gatekeeper audit erase` replaced in a segment, from each first line to its last."""

    segment: str
    host: str
    lines: tuple[tuple[int, int], ...]
    by: str
    reason: str


class ErasedLine(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="erased"
):
    """What is left of a line that was erased."""

    v: Literal[1]
    n: Number
    prev: Digest
    digest: Digest


Line = (
    StartLine
    | SettingsLine
    | RobotsLine
    | GrantLine
    | OutcomeLine
    | RefusedLine
    | DecidedLine
    | OmittedLine
    | OverrideLine
    | BlockLine
    | PauseLine
    | SealLine
    | EndLine
    | ErasureLine
    | ErasedLine
)
"""Any line."""


def _written(kind: type[ChainLine]) -> Callable[..., Any]:
    common = ["v", "n", "prev", "t", "m", "kind"]
    own = kind.__struct_fields__[len(ChainLine.__struct_fields__) :]
    return msgspec.defstruct(kind.__name__, [*common, *own], gc=False)


WRITTEN: Final = {
    kind.__struct_config__.tag: _written(kind)
    for kind in get_args(Line)
    if issubclass(kind, ChainLine)
}
"""What makes a line of each kind for its writer: with `kind` among its fields, where it stands in
the line, and times as text. It has to be given every field."""


class _Version(msgspec.Struct):
    v: int | None = None


@cache
def _decoder() -> msgspec.json.Decoder[Line]:
    """Return the decoder of lines, which takes 7 ms to make: a writer seldom needs it."""
    return msgspec.json.Decoder(Line)


def read_line(raw: bytes) -> Line:
    """Return a line, without or with its newline. Raises BadLine, which says what is wrong."""
    try:
        try:
            line: Line = _decoder().decode(raw)
        except msgspec.ValidationError as error:
            if (version := msgspec.json.decode(raw, type=_Version).v) != VERSION:
                text = f"version {version} of the format; this program reads {VERSION}"
                raise BadLine(text) from error
            raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise BadLine("nested too deeply" if deep else f"{error}") from error
    if not isinstance(line, ErasedLine) and not 1 < line.t.year < 9999:
        raise BadLine("its time is out of range")  # readers ask for the moments beside it
    return line


def digest_after(raw: bytes, line: Line) -> str:
    """Return what the next line has as `prev`: of an erased line, the digest that it keeps."""
    return line.digest if isinstance(line, ErasedLine) else digest_of(raw)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line, which `docs/audit.schema.json` is."""
    schema = msgspec.json.schema(Line)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of an audit record",
        **schema,
    }
