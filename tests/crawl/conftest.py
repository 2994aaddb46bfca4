"""Fixtures shared by the tests of `gatekeeper fetch`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a crawl, which does not exist yet."""
    return tmp_path / "pages"
