"""The map in docs/modules.md is complete, and no page has a section twice."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import tomllib
from pathlib import Path

from tests.documents.blocks import documents

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def block(first: str) -> list[str]:
    """Return the lines of the indented block whose first line begins with `first`."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:    .*\n)*", PAGE, re.MULTILINE)
    assert found is not None
    return [line[4:] for line in found[0].splitlines()]


def test_every_module_stands_once_on_the_map() -> None:
    loader = importlib.machinery.SourceFileLoader("structure", str(ROOT / ".ci" / "structure"))
    spec = importlib.util.spec_from_loader("structure", loader)
    assert spec is not None
    structure = importlib.util.module_from_spec(spec)
    loader.exec_module(structure)
    assert structure.check_map() == []


def test_the_layers_are_those_that_are_held() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["type"] == "layers")
    held = [re.findall(r"\w+", layer) for layer in layers if layer != "__main__"]
    assert [re.findall(r"\w+", line.partition("  ")[0]) for line in block("cli")] == held


def test_no_page_has_a_section_twice() -> None:
    for path in documents():
        text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8"))
        sections = re.findall(r"(?m)^##+ .+$", text)
        assert len(sections) == len(set(sections)), path
