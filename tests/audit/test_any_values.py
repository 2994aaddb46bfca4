"""Whatever a record holds, its readers end with a result, and never with a traceback."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper import __version__
from gatekeeper.audit.chain import NO_DIGEST, digest_of
from gatekeeper.audit.erase import erase
from gatekeeper.audit.report import report_of
from gatekeeper.audit.show import lines_about
from gatekeeper.audit.verify import lines_of, verify
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.pages.audit_report import report_page
from tests.audit.conftest import verification
from tests.audit.maker import Maker
from tests.effort import of_many

A = "https://a.test"
NUMBERS = itertools.count(1)

strange = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(
        [
            *("0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z", "1970-01-01T00:00:00Z"),
            *("https://a.test:99999/", "https://[::1", "https://\u00fc.test/%zz", "http://", "//"),
            *("0" * 64, "rules", "server_error", "operator", "rule", "budget", "timeout", "deny"),
            *([], {}, [{}], {"robots": {"dialect": 7}}, {"robots": "allow"}, {"pacing": []}, 1e308),
        ]
    ),
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A line of every kind that a gate writes."""
    maker = Maker(tmp_path_factory.mktemp("lines") / "audit")
    maker.robots(A)
    maker.page(f"{A}/1")
    maker.robots(A, None, outcome="timeout", since="2026-01-31T12:00:00.000000Z")
    maker.refused(f"{A}/private")
    maker.refused(f"{A}/private", "decision")
    maker.line("omitted", count=1, since="2026-01-31T12:00:00.000000Z", why="audit.max_rate")
    maker.override("a.test", "deny", until="2026-02-01T12:00:00.000000Z")
    maker.block("a.test", 1.0)
    pause = {"scope": "a.test", "by": None, "reason": None, "since": None, "until": None}
    maker.line("pause", **pause, ended=True)
    maker.wait(10.0).page(f"{A}/2")
    maker.line("end", reason="closed")
    return [json.loads(raw) for raw in maker.path.read_bytes().splitlines()]


def chained(lines: list[dict[str, Any]]) -> Iterator[bytes]:
    """The same lines, each with the digest of the one before."""
    prev = NO_DIGEST
    for line in lines:
        raw = json.dumps(line | {"prev": prev}, separators=(",", ":")).encode()
        yield raw + b"\n"
        prev = digest_of(raw)


def read_everything(folder: Path) -> None:
    """Call every reader."""
    list(lines_of(verify([folder], version=__version__)))
    report_page(report_of(verification(folder)))
    for what in (f"{A}/1", "a.test", "L1"):
        list(lines_about([folder], what))
    with suppress(ConfigError):  # a segment with a line that is too long, for example
        erase(folder, "a.test", by="ann", reason="asked")


@settings(max_examples=of_many(160), deadline=None)
@given(st.data())
def test_any_value_in_any_field_is_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"values{next(NUMBERS)}"
    folder.mkdir()
    rows = [dict(line) for line in lines]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows))
        name = data.draw(st.sampled_from(sorted(row)))
        row[name] = data.draw(strange)
        if name == "scopes" and data.draw(st.booleans()):
            row[name] = [{"scope": data.draw(st.text()), "interval": data.draw(strange)}]
    octets = b"".join(chained(rows))
    (folder / "web-1-20260131T120000000000Z-000001.jsonl").write_bytes(octets)

    read_everything(folder)


@settings(max_examples=of_many(80), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.binary(max_size=30)), min_size=1, max_size=9))
def test_any_octets_in_any_place_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[dict[str, Any]],
    changes: list[tuple[int, bytes]],
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"octets{next(NUMBERS)}"
    folder.mkdir()
    octets = bytearray(b"".join(chained(lines)))
    for place, new in changes:
        at = place % len(octets)
        octets[at : at + len(new)] = new
    suffix = ".jsonl" if changes[0][0] % 2 else ".jsonl.gz"
    (folder / f"web-1-20260131T120000000000Z-000001{suffix}").write_bytes(octets)

    read_everything(folder)
