"""The JSON Schema of the lines, and the verifier that the documents print."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gatekeeper.audit.chain import BadLine, digest_of, text_path
from gatekeeper.audit.erase import erase
from gatekeeper.audit.lines import json_schema, read_line
from tests.audit.maker import SCHEMA, Maker, changed, check_schema, lines_in, rewrite, schema_of
from tests.documents.blocks import ROOT, blocks_of

A = "https://a.test"


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """A chain with a line of every kind."""
    made = Maker(tmp_path / "audit")
    made.robots(A)
    made.page(f"{A}/1")
    made.robots("https://b.test", "User-agent: *\nDisallow:\n")
    made.page("https://b.test/1", 1.0)
    made.seal()
    made.refused(f"{A}/private")
    made.refused(f"{A}/private", "decision")
    made.line("omitted", count=1, since="2026-01-31T12:00:00.000000Z", why="audit.max_rate")
    made.override("a.test", "deny")
    made.block("a.test", 1.0)
    pause = {"scope": "a.test", "by": None, "reason": None, "since": None, "until": None}
    made.line("pause", **pause, ended=True)
    made.line("settings", settings={"pacing": {"max_interval": 5.0}})
    made.close()
    erase(made.folder, "b.test", by="ann", reason="asked")
    return made


def test_the_schema_in_the_documents_is_that_of_the_reader() -> None:
    assert json_schema() == SCHEMA


def test_every_kind_of_line_fits_the_schema(maker: Maker) -> None:
    kinds = check_schema(maker.folder)
    assert kinds == set(SCHEMA["discriminator"]["mapping"])


def test_a_line_without_a_field_or_with_a_wrong_one_fits_neither_schema_nor_reader(
    maker: Maker,
) -> None:
    for line in {line["kind"]: line for line in lines_in(maker.folder)}.values():
        check = jsonschema.Draft202012Validator(schema_of(line["kind"]))
        for name in line:
            if name in ("salt", "ended", "good") and line["kind"] in ("start", "pause", "robots"):
                continue
            less = {key: value for key, value in line.items() if key != name}
            other = line | {name: {"wrong": [1]}} if name not in _ANY else less
            for wrong in (less, other):
                assert not check.is_valid(wrong), (line["kind"], name)
                with pytest.raises(BadLine):
                    read_line(json.dumps(wrong).encode())


_ANY = {"settings", "rule", "signals", "validators"}
"""Fields that may hold any object."""


@pytest.fixture(scope="module")
def wrong_in() -> Callable[[Path], Iterator[str]]:
    """The verifier in docs/audit.md."""
    (block,) = [one for one in blocks_of(ROOT / "docs" / "audit.md") if one.kind == "python"]
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 34
    space: dict[str, Any] = {}
    exec(block.text, space)
    found: Callable[[Path], Iterator[str]] = space["wrong_in"]
    return found


def test_the_verifier_in_the_documents_finds_changes(
    maker: Maker, wrong_in: Callable[[Path], Iterator[str]]
) -> None:
    first, second = sorted(maker.folder.glob("web*.gz"))
    assert list(wrong_in(maker.folder)) == []

    first.with_suffix("").write_bytes(gzip.decompress(first.read_bytes()))
    assert list(wrong_in(maker.folder)) == []
    first.with_suffix("").unlink()

    text = maker.folder / text_path(digest_of(str(maker.texts[A]).encode()))
    good = text.read_bytes()
    text.write_bytes(gzip.compress(b"Disallow:"))
    assert ["its text was changed" in one for one in wrong_in(maker.folder)] == [True]
    text.write_bytes(good)

    rewrite(second, lambda rows: [rows[0], changed(rows[1], line=9), *rows[2:]])
    assert [one.partition(": ")[2] for one in wrong_in(maker.folder)] == [
        f"line {maker.n - 6} does not follow the one before"
    ]

    seal = gzip.decompress(first.read_bytes()).splitlines()[-1]
    first.with_name(first.name.replace(".jsonl.gz", ".seal.json")).write_bytes(seal + b"\n")
    first.unlink()
    assert len(list(wrong_in(maker.folder))) == 1
