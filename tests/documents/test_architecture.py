"""The map in docs/modules.md is complete, and no page has a section twice."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

from tests.documents.blocks import documents

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def block(first: str) -> list[str]:
    """Return the lines of the indented block whose first line begins with `first`."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:    .*\n)*", PAGE, re.MULTILINE)
    assert found is not None
    return [line[4:] for line in found[0].splitlines()]


def test_every_module_is_named_once_on_the_map() -> None:
    loader = importlib.machinery.SourceFileLoader("structure", str(ROOT / ".ci" / "structure"))
    spec = importlib.util.spec_from_loader("structure", loader)
    assert spec is not None
    structure = importlib.util.module_from_spec(spec)
    loader.exec_module(structure)
    assert structure.check_map() == []


def contracts(kind: str) -> list[dict[str, Any]]:
    """Return import-linter's contracts of a type."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    every = settings["tool"]["importlinter"]["contracts"]
    return [one for one in every if one["type"] == kind]


def test_the_layers_on_the_page_are_those_of_the_import_contract() -> None:
    (layers,) = (one["layers"] for one in contracts("layers"))
    held = [re.findall(r"\w+", layer) for layer in layers if layer != "__main__"]
    assert [re.findall(r"\w+", line.partition("  ")[0]) for line in block("cli")] == held


def test_the_imports_of_each_product_are_those_on_the_page() -> None:
    (core,) = contracts("forbidden")[:1]
    held = {name: set[str]() for name in core["forbidden_modules"]}
    for contract in contracts("protected"):
        for user in set(contract["allowed_importers"]) & held.keys():
            held[user] |= set(contract["protected_modules"])
    rows = re.findall(r"^\| `(\w+)` \| (`[\w`, ]+) \|$", PAGE, re.MULTILINE)
    page = {f"gatekeeper.{name}": re.findall(r"\w+", names) for name, names in rows}
    assert page == {
        name: sorted(one.removeprefix("gatekeeper.") for one in names)
        for name, names in held.items()
        if names
    }


def test_every_module_is_of_the_core_or_of_one_product() -> None:
    (core,) = contracts("forbidden")[:1]
    named = [*core["source_modules"], *core["forbidden_modules"]]
    there = {
        f"gatekeeper.{one.stem}"
        for one in (ROOT / "gatekeeper").iterdir()
        if one.suffix == ".py" or (one / "__init__.py").exists()
    }
    assert sorted(named) == sorted(there - {"gatekeeper.__init__", "gatekeeper.__main__"})
    protected = [one for each in contracts("protected") for one in each["protected_modules"]]
    assert sorted(protected) == sorted(set(core["forbidden_modules"]) - {"gatekeeper.cli"})


def test_no_page_has_a_section_twice() -> None:
    for path in documents():
        text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8"))
        sections = re.findall(r"(?m)^##+ .+$", text)
        assert len(sections) == len(set(sections)), path
