"""The names, commands and reasons in the documents exist; `tests/documents` runs their blocks."""

from __future__ import annotations

import ast
import gc
import importlib
import re
import subprocess
import sys
import tomllib
from datetime import datetime, tzinfo
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gatekeeper
from gatekeeper import GateClosed, Gatekeeper
from gatekeeper.cli import COMMANDS
from tests.documents.blocks import blocks_of, documents
from tests.gate_support import open_config
from tests.internet import FakeInternet, Page
from tests.test_decision import texts_of_reasons

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REASONS = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
EXAMPLES = [b.text for b in blocks_of(ROOT / "docs" / "python.md") if b.kind == "python"]
BLOCKS = [block for path in documents() for block in blocks_of(path)]


# What needs other libraries is read in their environments.
IMPORTING = [
    block for block in BLOCKS if block.kind == "python" and all(map(find_spec, block.needs))
]


@pytest.mark.parametrize("block", IMPORTING, ids=str)
def test_every_name_that_is_imported_exists(block: object) -> None:
    text = getattr(block, "text", "")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_reading_a_file_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in EXAMPLES if "RobotsTxt.parse" in text)
    exec(compile(example, "python.md", "exec"), {})
    assert capsys.readouterr().out == "False 2\n"


@pytest.fixture
def example_net(net: FakeInternet, monkeypatch: pytest.MonkeyPatch) -> FakeInternet:
    """Put the gate of the examples on the fake internet and its clock."""
    config = open_config()
    made = partial(Gatekeeper, config=config, resolver=net.resolver, clock=net.clock)
    monkeypatch.setattr(gatekeeper, "Gatekeeper", made)
    return net


def run(example: str) -> dict[str, Any]:
    """Run an example against a test site. Return its namespace, with `main` for top-level await."""
    text = example.replace("https://example.org/", "http://example.test/")
    names: dict[str, Any] = {}
    code = compile(text, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names["main"] = eval(code, names)
    return names


@pytest.mark.parametrize(
    ("robots", "printed"),
    [
        ("", "http://example.test/a {'depth': 0}\n"),
        ("User-agent: *\nDisallow: /\n", "Decision(verdict=<Verdict.DENY: 'deny'>"),
    ],
    ids=["welcome", "denied"],
)
async def test_the_queue_s_example_closes_what_it_opens(
    example_net: FakeInternet, capsys: pytest.CaptureFixture[str], robots: str, printed: str
) -> None:
    """Anything left open would raise a ResourceWarning, which is an error here."""
    example_net.site("example.test").robots(robots)
    (example,) = (text for text in EXAMPLES if "PoliteQueue(" in text)
    names = run(example)
    await example_net.drive(names["main"])
    gc.collect()
    assert capsys.readouterr().out.startswith(printed)
    with pytest.raises(GateClosed):
        await names["queue"].put("http://example.test/b")


@pytest.mark.parametrize(
    ("robots", "told"),
    [
        ([Page("", status=503), Page("User-agent: *\nAllow: /\n")], (True, "")),
        ([Page("User-agent: *\nDisallow: /x\n")], (False, "line 2: Disallow: /x")),
        ([Page("User-agent: *\nCrawl-delay: 7200\n")], (False, "http://example.test/x")),
    ],
    ids=["deferred", "denied", "timeout"],
)
async def test_the_example_loop_asks_again_at_retry_at(
    example_net: FakeInternet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    robots: list[Page],
    told: tuple[bool, str],
) -> None:
    net, slept = example_net, []
    net.site("example.test").on("/robots.txt", *robots)
    (example,) = (text for text in EXAMPLES if "except Deferred" in text)
    names = run(example)

    class Now(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Now:
            return cls.fromtimestamp(net.clock.wall(), tz)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await net.clock.sleep(seconds)

    names["visit"].__globals__.update(datetime=Now, asyncio=SimpleNamespace(sleep=sleep))

    async def visited() -> bool:
        async with gatekeeper.Gatekeeper("examplebot/1.0") as gate:
            found: bool = await names["visit"](gate, "http://example.test/x")
            return found

    assert await net.drive(visited(), limit=1e6) is told[0]
    assert told[1] in capsys.readouterr().out
    # One wait until retry_at, or a second short one, because times have whole microseconds.
    assert [wait > 1.0 for wait in slept[:1]] == [True] * told[0]
    assert slept[1:] in ([], [1.0])


def test_every_command_is_shown_and_exists() -> None:
    text = "\n".join(block.text for block in BLOCKS if block.kind == "sh")
    shown = set(re.findall(r"^gatekeeper (\w+)", text, re.MULTILINE))
    assert shown <= set(COMMANDS)
    assert shown >= {"check", "fetch", "history", "lint", "serve"}


def test_every_reason_is_listed_with_its_text() -> None:
    rows = 0
    for reason, text in texts_of_reasons().items():
        verdicts, _, meaning = re.sub(r" \((?:RFC|T)[^()]*\d\)", "", text).partition(": ")
        assert f'| <a id="{reason}"></a>`{reason}` | {verdicts} | {meaning} |' in REASONS
        rows += 1
    assert REASONS.count("| <a id=") == rows


def test_the_first_two_commands_are_one_line_each() -> None:
    first, second = (block for block in blocks_of(ROOT / "README.md")[:2])
    assert [first.text.count("\n"), second.text.count("\n")] == [1, 1]
    assert "gatekeeper serve" in first.text
    assert second.text.rstrip().endswith("pytest")


def test_the_readme_fits_and_shows_what_a_lease_may_raise() -> None:
    assert README.count("\n") <= 160
    for name in ("Deferred", "LeaseTimeout", "acquire", "why", "retry_at"):
        assert name in README


def test_the_links_of_the_readme_work_on_the_package_index_too() -> None:
    """The index resolves no relative link. `.ci/structure` looks where these lead."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    address = project.get("urls", {}).get(
        "Source", "https://github.com/robots-gatekeeper/gatekeeper"
    )
    assert {link[: len(address)] for link in links if "github.com" in link} == {address}


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gatekeeper", "--help"], capture_output=True, text=True, check=True
    )
    assert "fetch" in done.stdout
