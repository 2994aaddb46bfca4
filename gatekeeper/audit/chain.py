"""The form of the audit record: what its writer and its readers share.

A *chain* is what one gate wrote: lines of JSON, each of which names the digest of the line before.
It is kept in *segments*, the files `CHAIN-000001.jsonl` and so on, where CHAIN is
`HOST-PID-START`. A closed segment is compressed, and ends with a *seal*, which may be signed. The
text of each robots.txt is a file of its own, which lines name by its digest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from gatekeeper.errors import needs_extra
from gatekeeper.signing import PublicKey, SigningKey
from gatekeeper.urls import without_userinfo

VERSION = 1
"""The version of the format, `v` of each line."""
MAX_TEXT = 8_192
"""Characters of a URL, or of another text of others, in a line; a longer one is cut."""
NO_DIGEST = "0" * 64
"""`prev` of the first line of a chain."""
OPEN, CLOSED, SEAL = ".jsonl", ".jsonl.gz", ".seal.json"
"""How names end: a segment, a compressed one, and the seal that a removed one leaves behind."""

MASKED = "***@"
"""What stands in place of credentials."""

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(
    r"(?P<chain>[A-Za-z0-9._-]+-\d+-\d{8}T\d{12}Z)-(?P<number>\d{6}|[1-9]\d{6,17})"
    r"(?P<suffix>\.jsonl|\.jsonl\.gz|\.seal\.json)",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
as_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class BadLine(ValueError):
    """What was read is no line of an audit record; the text says why."""


def recorded_url(url: str) -> str:
    """Return a URL as the record knows it: without its fragment, which no site is sent, and without
    credentials, also of URLs within it.

    >>> recorded_url("https://a.example/@ann?to=//ann:pw@b.example/#top")
    'https://a.example/@ann?to=//***@b.example/'
    """
    if "@" in url:
        url = without_userinfo(url)
    return url.partition("#")[0] if "#" in url else url


# --- lines -----------------------------------------------------------------------------------


def encode_line(n: int, prev: str, t: str, m: float, kind: str, fields: dict[str, Any]) -> bytes:
    """Return a line without its newline; `fields` are those of its kind, in order.

    >>> encode_line(1, "00", "2026-01-31T12:00:00.000000Z", 1.5, "end", {"reason": "closed"})
    b'{"v":1,"n":1,"prev":"00","t":"2026-01-31T12:00:00.000000Z","m":1.5,"kind":"end",\
"reason":"closed"}'
    """
    return encode({"v": VERSION, "n": n, "prev": prev, "t": t, "m": m, "kind": kind, **fields})


def encode(line: Any, as_json: Callable[[Any], bytes] = as_json) -> bytes:
    """Return a line, as a dictionary or one of `lines.WRITTEN`. What JSON in UTF-8 can't hold, such
    as half a character, is escaped."""
    try:
        return as_json(line)
    except (ValueError, TypeError, OverflowError):
        return as_json(_encodable(msgspec.to_builtins(line, enc_hook=str)))


def _encodable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_encodable(str(key)): _encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return max(-(2**63), min(value, 2**63 - 1))
    return value


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a line (without its newline) or of a text, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


# --- times -----------------------------------------------------------------------------------


def time_text(wall: float) -> str:
    """Return seconds since 1970 as RFC 3339 in UTC with microseconds.

    >>> time_text(1769860800.25)
    '2026-01-31T12:00:00.250000Z'
    """
    micros = int(wall * 1e6 + 0.5)
    begin, second = _second[0]
    rest = micros - begin
    if not 0 <= rest < 1_000_000:
        rest = micros % 1_000_000
        at = _EPOCH + timedelta(seconds=micros // 1_000_000)
        second = f"{at:%Y-%m-%dT%H:%M:%S}."
        _second[0] = micros - rest, second
    return f"{second}{_DIGITS[rest // 1000]}{_DIGITS[rest % 1000]}Z"


_DIGITS = [f"{number:03d}" for number in range(1000)]
_second = [(0, "1970-01-01T00:00:00.")]
"""The begin of the latest second, in microseconds, and its text: most times are of one second."""


# --- names -----------------------------------------------------------------------------------


class SegmentName(NamedTuple):
    """The name of a segment, or of the seal that it left behind."""

    chain: str
    """`HOST-PID-START`."""
    number: int
    """Its place in the chain, from 1."""
    suffix: str = OPEN
    """OPEN, CLOSED or SEAL."""

    def __str__(self) -> str:
        return f"{self.chain}-{self.number:06d}{self.suffix}"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Return the parts of a file's name, or None if it is of no segment.

        >>> SegmentName.parse("web-1-20260131T120000250000Z-000002.jsonl.gz")
        SegmentName(chain='web-1-20260131T120000250000Z', number=2, suffix='.jsonl.gz')
        """
        found = _NAME.fullmatch(name)
        return found and cls(found["chain"], int(found["number"]), found["suffix"])


def chain_name(host: str, pid: int, wall: float) -> str:
    """Return the name of a chain that begins at a time, in seconds since 1970.

    >>> chain_name("web/1", 42, 1769860800.25)
    'web_1-42-20260131T120000250000Z'
    """
    written = host.encode("utf-8", "backslashreplace").decode()  # as in the start
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", written) or "_"
    at = _EPOCH + timedelta(seconds=wall)
    return f"{plain}-{pid}-{at:%Y%m%dT%H%M%S}{at.microsecond:06d}Z"


def text_path(digest: str) -> str:
    """Return the path in the folder of the text with a digest. Raises ValueError.

    >>> text_path("0" * 64)[:12]
    'texts/00/000'
    """
    if not _HEX.fullmatch(digest):  # it comes from a line, which may be anybody's
        raise ValueError(f"not a SHA-256: {digest!r}")
    return f"texts/{digest[:2]}/{digest}.gz"


# --- seals -----------------------------------------------------------------------------------


def seal_text(chain: str, n: int, prev: str) -> bytes:
    """Return what the signature of a seal covers: `n` and `prev` are the seal's own.

    >>> seal_text("web-42-20260131T120000250000Z", 7, "ab")
    b'gatekeeper-audit-seal 1 web-42-20260131T120000250000Z 7 ab'
    """
    return f"gatekeeper-audit-seal {VERSION} {chain} {n} {prev}".encode()


def seal_fields(
    key: SigningKey | None, chain: str, n: int, prev: str, first: int, reason: str
) -> dict[str, Any]:
    """Return the fields of a seal, with the Ed25519 signature in base64url without padding if there
    is a key. `first`: the first line of its segment."""
    keyid = signature = None
    if key is not None:
        signed = key.sign(seal_text(chain, n, prev))
        keyid, signature = key.public.keyid, base64.urlsafe_b64encode(signed).rstrip(b"=").decode()
    fields = {"lines": n - 1, "first": first, "reason": reason}
    return {**fields, "key": keyid, "signature": signature}


def is_signed(key: PublicKey, chain: str, n: int, prev: str, signature: str) -> bool:
    """Return whether the signature of a seal was made with a key.

    Raises ConfigError without the extra `sign`.
    """
    with needs_extra("sign", "identity.key"):
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(_unbase64url(key.x))
        public.verify(_unbase64url(signature), seal_text(chain, n, prev))
    except (InvalidSignature, ValueError):
        return False
    return True


def _unbase64url(text: str) -> bytes:
    if re.search(r"[^A-Za-z0-9_-]", text):
        raise binascii.Error("not base64url")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
