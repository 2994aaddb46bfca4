"""What the README shows is there, and reads as it says."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gatekeeper.cli import COMMANDS
from tests.test_decision import texts_of_reasons

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_compiles_and_its_names_exist(example: str) -> None:
    tree = ast.parse(example)
    compile(example, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_reading_a_file_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in EXAMPLES if "RobotsTxt.parse" in text)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "False 2\n"


def test_every_command_that_is_shown_exists() -> None:
    shown = set(re.findall(r"^gatekeeper (\w+)", README, re.MULTILINE))
    assert shown <= set(COMMANDS)
    assert shown >= {"check", "fetch", "history", "lint", "serve"}


def test_every_reason_is_there_in_its_own_words() -> None:
    for reason, text in texts_of_reasons().items():
        verdicts, _, meaning = re.sub(r" \((?:RFC|T)-?\d+\)", "", text).partition(": ")
        assert f"| `{reason}` | {verdicts} | {meaning} |" in README


def test_the_two_commands_are_one_line_each() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[:2]
    assert [block.count("\n") for block in blocks] == [1, 1]
    assert "gatekeeper serve" in blocks[0]
    assert blocks[1].rstrip().endswith("pytest")


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gatekeeper", "--help"], capture_output=True, text=True, check=True
    )
    assert "fetch" in done.stdout
