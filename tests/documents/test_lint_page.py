"""docs/lint.md has a section for every code, with correct examples."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from gatekeeper.cli import main
from gatekeeper.robots import RobotsTxt
from gatekeeper.sites.fixes import FIXABLE
from gatekeeper.sites.lint import CODES
from tests.documents.blocks import ROOT


class Section(NamedTuple):
    code: str
    intro: str
    blocks: dict[str, str]


def sections() -> list[Section]:
    page = (ROOT / "docs" / "lint.md").read_text("utf-8")
    found = []
    for part in page.split("\n## ")[1:]:
        head = re.match(r'<a id="([a-z0-9-]+)"></a>`([a-z0-9-]+)`\n\n(.*?)\n\n', part, re.DOTALL)
        assert head is not None, part[:80]
        blocks = re.findall(
            r"^(Bad|Good):\n\n```text\n(.*?)\n?```$", part, re.DOTALL | re.MULTILINE
        )
        assert head[1] == head[2]
        found.append(Section(head[1], head[3], dict(blocks)))
    return found


SECTIONS = {section.code: section for section in sections()}
# Codes that can't be shown on a page: files that are too long, or not text.
WITHOUT_EXAMPLES = {"truncated", "too-many", "encoding", "control", "not-utf8"}


def test_every_code_has_its_section_in_order() -> None:
    assert [section.code for section in sections()] == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_section_has_the_severity_and_the_meaning_of_its_code(code: str) -> None:
    intro = SECTIONS[code].intro
    assert intro.startswith(f"*{CODES[code].severity.capitalize()}*")
    assert CODES[code].meaning in intro
    assert ("fixed by `--fix`" in intro) == (code in FIXABLE)


@pytest.mark.parametrize("code", sorted(set(CODES) - WITHOUT_EXAMPLES))
def test_the_bad_example_has_the_finding_and_the_good_one_has_none(code: str) -> None:
    blocks = SECTIONS[code].blocks
    assert code in [finding.code for finding in RobotsTxt.parse(blocks["Bad"]).findings]
    assert [finding.code for finding in RobotsTxt.parse(blocks["Good"] + "\n").findings] == []


def test_the_pre_commit_hooks_call_existing_commands(tmp_path: object) -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text("utf-8")
    workflow = (ROOT / "examples" / "robots-txt.yml").read_text("utf-8")
    calls = re.findall(r"(?:entry:|run:) gatekeeper (lint[^\n>]*)", hooks + workflow)
    assert len(calls) == 4
    for call in calls:
        path = tmp_path / "robots.txt"  # type: ignore[operator]
        for text, code in (("User-agent: *\nDisallow: /\n", 0), ("Disallow: x\n", 1)):
            path.write_text(text)
            words = [word for word in call.split() if word != "."]
            assert main([*words, str(path)]) == code


def test_lint_finds_the_mistakes_that_the_page_for_site_owners_begins_with() -> None:
    page = (ROOT / "docs" / "sites.md").read_text("utf-8")
    named = re.findall(r"lint\.md#([\w-]+)", page.partition("```")[0])
    text = "User-agent: *\nDisallow: /a\nDisalow: /b\n\nUser-agent: ExampleBot\nDisallow: /c\n"
    found = {finding.code for finding in RobotsTxt.parse(text + "# long\n" * 80_000).findings}
    assert named == ["misspelt-field", "named-group-exempts", "truncated"]
    assert set(named) <= found
