"""What the tests of the commands share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a crawl puts its pages; not there yet."""
    return tmp_path / "pages"


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody can meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])
