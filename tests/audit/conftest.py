"""Reads audit records, and verifies them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Config, __version__
from gatekeeper.audit import writer
from gatekeeper.audit.files import open_either
from gatekeeper.audit.reading import find_chains, raw_lines
from gatekeeper.audit.verify import Verification, VerifyReport, verify
from gatekeeper.signing import PublicKey

Line = dict[str, Any]


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """Return a configuration with a record in the folder, and no pace."""
    audit = {"folder": str(folder), **sections.pop("audit", {})}
    pacing = {"default_interval": 0.0, **sections.pop("pacing", {})}
    return Config.from_dict({"audit": audit, "pacing": pacing, **sections})


def verified(
    *folders: Path, keys: tuple[PublicKey, ...] = (), tolerance: float = 0.1
) -> VerifyReport:
    """Verify the records in the folders, as this version does."""
    return verify(folders, version=__version__, keys=keys, tolerance=tolerance)


def verification(folder: Path) -> Verification:
    """A verification of the records in a folder, which is not run yet."""
    return Verification([folder], __version__, (), 0.1)


def chains_of(folder: Path) -> dict[str, list[Line]]:
    """Return the lines of each chain in a folder, once they were verified."""
    assert verified(folder).differences == []
    chains: dict[str, list[Line]] = {}
    for files in find_chains([folder]):
        granted = set[str]()
        lines = chains[files.name] = []
        for _, path in sorted(files.segments.items()):
            with open_either(path) as file:
                assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
            raws = list(raw_lines(path))
            lines += [json.loads(raw.octets or b"") for raw in raws if raw.whole]
        for line in lines:  # what `verify` can't ask of a record from which lines were removed
            if line["kind"] == "grant":
                assert line["lease"] not in granted
                granted.add(line["lease"])
            assert line["kind"] != "outcome" or line["lease"] in granted
    return chains


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, octets: int = 0) -> Iterator[None]:
    """Let the record's writes fail, after so many octets of the first one."""
    left, write = [octets], os.write

    def fail(fd: int, data: bytes) -> int:
        if left[0] or not data:  # nothing can be written to a full disk, too
            part, left[0] = data[: left[0]], 0
            return write(fd, part)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "write", fail)
        yield


@pytest.fixture(name="read_record")
def read_record(tmp_path: Path) -> Callable[..., list[Line]]:
    """Return a function that returns the lines of the only chain in a folder."""

    def read(*kinds: str, folder: Path | None = None) -> list[Line]:
        ((_, lines),) = chains_of(folder or tmp_path / "audit").items()
        return [line for line in lines if not kinds or line["kind"] in kinds]

    return read


@pytest.fixture(name="folder")
def folder(tmp_path: Path) -> Path:
    """Return the folder of the record."""
    return tmp_path / "audit"
