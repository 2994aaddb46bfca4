from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.storage import OriginRecord, pack_body

MakeRecord = Callable[..., OriginRecord]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def record_of(
    origin: str = "https://a.example",
    text: bytes | None = b"User-agent: *\nDisallow: /x\n",
    at: float = 1000.0,
    **fields: Any,
) -> OriginRecord:
    """Return the record of an origin whose file was fetched at a moment."""
    body, digest = (None, None) if text is None else pack_body(text)
    found = {"good_outcome": "rule", "good_status": 200}
    absent = {"good_outcome": "no_file", "good_status": 404}
    values: dict[str, Any] = {
        "origin": origin,
        "outcome": "rule",
        "state": "parsed",
        "status": 200,
        "fetched_at": at,
        "soft_expires_at": at + 80_000.0,
        "expires_at": at + 86_400.0,
        "good_fetched_at": at,
        "body": body,
        "body_hash": digest,
        **(absent if text is None else found),
    }
    return OriginRecord(**(values | fields))


@pytest.fixture
def made() -> MakeRecord:
    return record_of
