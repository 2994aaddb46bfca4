"""The examples in the docstrings of the package show what the code does."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.documents.blocks import ROOT

PACKAGE = ROOT / "gatekeeper"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_is_shown(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed
