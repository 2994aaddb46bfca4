"""The documentation site: what can be seen without Sphinx. `.ci/site` builds it and looks at it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.documents.blocks import ROOT

DOCS = ROOT / "docs"


def listed(contents: Path) -> set[Path]:
    """Return the pages that the toctrees of a page name."""
    names = re.findall(r"^ {0,3}([a-z][\w/*-]*)$", contents.read_text("utf-8"), re.MULTILINE)
    return {
        found
        for name in names
        for suffix in (".md", ".rst")
        for found in contents.parent.glob(name + suffix)
    }


def test_every_page_of_docs_is_in_the_contents_of_the_site() -> None:
    pages = {*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")}
    contents = {DOCS / "index.md", DOCS / "api" / "index.rst"}
    there = {page for one in contents for page in listed(one)} | {DOCS / "index.md"}
    missing = sorted(str(page.relative_to(DOCS)) for page in pages - there)
    assert missing == [], "name them in docs/index.md"
    assert contents - {DOCS / "index.md"} <= there
