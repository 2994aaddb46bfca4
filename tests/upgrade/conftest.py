"""Fixtures: processes of this version and of an earlier one.

`earlier.tar.xz` is the package as it was before the core and its products were set apart (commit
5d64486), without integrations, `gatekeeper fetch` and what the pages have from others.
"""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fleet.conftest import running as server
from tests.processes import PYTHON

__all__ = ["server"]

HERE = Path(__file__).parent
PATIENCE = 60.0
"""Seconds that a process may take to answer on a busy machine; usually far less."""


class Member:
    """A gate in a process of its own: see `worker.py`."""

    def __init__(self, package: Path, settings: dict[str, Any]) -> None:
        self._package = package
        self._settings = settings

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(PYTHON, str(HERE / "worker.py"), json.dumps(self._settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(self._package)},
        )
        return self

    async def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a method of the worker, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            line = await self._process.stdout.readline()
        assert line, "the worker ended"
        answer = json.loads(line)
        assert "answer" in answer, answer
        return answer["answer"]

    async def __aexit__(self, *error: object) -> None:
        """Close the gate, and wait for the end of the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            assert await self._process.wait() == 0


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each version is imported from."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(HERE / "earlier.tar.xz") as archive:
        # Not extractall: its filter came with Python 3.11.4, and later versions warn without it.
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    return {"earlier": folder, "this": HERE.parents[1]}


MakeMember = Callable[[str, dict[str, Any]], Member]


@pytest.fixture
def member(packages: dict[str, Path]) -> MakeMember:
    """`async with member("earlier", settings) as one` runs a member of that version."""
    return lambda version, settings: Member(packages[version], settings)
