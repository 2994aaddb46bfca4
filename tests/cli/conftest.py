"""What the tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a crawl puts its pages; not there yet."""
    return tmp_path / "pages"
