"""`Gatekeeper` and `RemoteGatekeeper` have the same methods, those of the `Gate` protocol."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from gatekeeper import Gate, Gatekeeper, RemoteGatekeeper
from gatekeeper.gate import gatekeeper

METHODS = [name for name in vars(Gate) if not name.startswith("_") and callable(vars(Gate)[name])]
MOST_NAMES = 25


def test_the_list_of_protocol_methods_is_not_empty() -> None:
    assert {"allowed", "check", "check_many", "lease"} <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_both_gates_have_the_protocols_signature(method: str) -> None:
    wanted = inspect.signature(getattr(Gate, method))
    for gate in (Gatekeeper, RemoteGatekeeper):
        found = inspect.signature(getattr(gate, method))
        assert list(found.parameters.values()) == list(wanted.parameters.values()), gate
        if method not in (
            "check_many",
            "lease",
            "try_acquire",
        ):  # their leases have more methods than the protocol requires
            assert found.return_annotation == wanted.return_annotation, gate


@pytest.mark.parametrize("method", [*METHODS, "check_all", "peek", "acquire", "policy", "robots"])
def test_both_gates_take_the_same_arguments(method: str) -> None:
    embedded, remote = (
        list(inspect.signature(getattr(gate, method)).parameters.values())
        for gate in (Gatekeeper, RemoteGatekeeper)
    )
    assert embedded == remote


def test_the_gate_has_few_public_names() -> None:
    """Methods, properties and attributes; what a product needs beside them are its `parts`."""
    tree = ast.parse(inspect.getsource(gatekeeper))
    [body] = [node for node in tree.body if getattr(node, "name", "") == "Gatekeeper"]
    names = {node.name for node in ast.walk(body) if isinstance(node, ast.AsyncFunctionDef)}
    names |= {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}
    names |= {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }
    assert len([name for name in names if not name.startswith("_")]) <= MOST_NAMES


def test_nothing_below_the_gate_imports_it() -> None:
    package = Path(inspect.getfile(gatekeeper)).parents[1]
    alone = ("decision", "config")
    below = [package / f"{name}.py" for name in alone]
    for room in ("fetching", "pacing", "storage"):
        below += (modules := list((package / room).glob("*.py")))
        assert len(modules) > 3
    for path in below:
        if path.suffix == ".py":
            assert "gatekeeper.gate" not in path.read_text(encoding="utf-8"), path
