"""The form of the audit record, which its writer and its readers share."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.audit import chain
from gatekeeper.audit.lines import digest_after, read_line
from gatekeeper.signing import new_key

NAME = "web-42-20260131T120000250000Z"
T = "2026-01-31T12:00:00.250000Z"


def line(**fields: object) -> bytes:
    whole = {
        "v": 1,
        "n": 1,
        "prev": chain.NO_DIGEST,
        "t": T,
        "m": 1.5,
        "kind": "end",
        "reason": "closed",
        **fields,
    }
    return json.dumps(whole).encode()


@given(
    st.integers(1, 10**12),
    st.floats(0, 1e7),
    st.dictionaries(st.text(max_size=8).map("x".__add__), st.text(max_size=20), min_size=1),
)
def test_a_line_is_one_line_of_json_with_its_keys_in_order(
    n: int, m: float, fields: dict[str, str]
) -> None:
    raw = chain.encode_line(n, "a" * 64, T, m, "grant", fields)
    assert b"\n" not in raw
    plain = json.loads(raw)
    assert list(plain) == ["v", "n", "prev", "t", "m", "kind", *fields]
    assert plain["m"] == pytest.approx(m, abs=1e-6)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "truncated"),
        (line()[:-1], "truncated"),
        (b'{"v":1,"n":1,"kind":"\xff"}', "(?i)utf-8"),
        (b"[]", "object"),
        (line(v=2), "version 2 of the format; this program reads 1"),
        (line(v=None), "version None"),
        (line(n=0), "n"),
        (line(n=True), "n"),
        (line(prev="A" * 64), "prev"),
        (line(prev="0" * 63), "prev"),
        (line(kind=3), "kind"),
        (line(kind="erased"), "digest"),
    ],
)
def test_what_is_no_line_is_refused_with_its_reason(raw: bytes, why: str) -> None:
    with pytest.raises(chain.BadLine, match=why):
        read_line(raw)


def test_an_erased_line_keeps_the_digest_of_the_original() -> None:
    original = line()
    erased = line(kind="erased", digest=hashlib.sha256(original).hexdigest())
    assert digest_after(erased, read_line(erased)) == chain.digest_of(original)
    assert digest_after(original, read_line(original)) == chain.digest_of(original)


@given(st.integers(0, 4_000_000_000_000_000))
def test_a_time_is_read_as_it_was_written(microseconds: int) -> None:
    wall = microseconds / 1e6
    at = datetime.fromisoformat(chain.time_text(wall))
    assert at.timestamp() == pytest.approx(wall, abs=1e-6)
    assert len(chain.time_text(wall)) == len(T)


@given(st.text(max_size=20), st.integers(1, 4_000_000), st.floats(0, 4e9), st.integers(1, 10**7))
def test_a_segment_is_named_by_host_process_start_and_number(
    host: str, pid: int, wall: float, number: int
) -> None:
    for suffix in (chain.OPEN, chain.CLOSED, chain.SEAL):
        name = chain.SegmentName(chain.chain_name(host, pid, wall), number, suffix)
        assert chain.SegmentName.parse(str(name)) == name
        assert "/" not in str(name)


@pytest.mark.parametrize(
    "name", ["", "texts", f"{NAME}-1.jsonl", f"{NAME}-000001.jsonl\n", f"{NAME}-000001.gz"]
)
def test_other_files_are_no_segments(name: str) -> None:
    assert chain.SegmentName.parse(name) is None


def test_the_path_of_a_text_leads_nowhere_else() -> None:
    digest = hashlib.sha256(b"User-agent: *\n").hexdigest()
    assert chain.text_path(digest) == f"texts/{digest[:2]}/{digest}.gz"
    for bad in ("../../etc/passwd", digest[:-1], digest.upper()):
        with pytest.raises(ValueError, match="not a SHA-256"):
            chain.text_path(bad)


def test_the_signature_of_a_seal_covers_chain_number_and_head(tmp_path: Path) -> None:
    key, other = new_key(tmp_path / "a.pem"), new_key(tmp_path / "b.pem")
    signature = chain.seal_fields(key, NAME, 7, "ab" * 32, 1, "end")["signature"]
    assert chain.is_signed(key.public, NAME, 7, "ab" * 32, signature)
    assert not chain.is_signed(other.public, NAME, 7, "ab" * 32, signature)
    assert not chain.is_signed(key.public, NAME + "1", 7, "ab" * 32, signature)
    assert not chain.is_signed(key.public, NAME, 8, "ab" * 32, signature)
    assert not chain.is_signed(key.public, NAME, 7, "ac" * 32, signature)
    for bad in ("", signature[:-2], signature + "=", "é"):
        assert not chain.is_signed(key.public, NAME, 7, "ab" * 32, bad)
