"""Reads audit records and judges them without the package's own reader."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Config
from gatekeeper.audit import writer
from gatekeeper.audit.chain import NO_DIGEST, SegmentName, text_path
from gatekeeper.clock import VirtualClock

Line = dict[str, Any]


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """Return a configuration with a record in the folder, and no pace."""
    audit = {"folder": str(folder), **sections.pop("audit", {})}
    pacing = {"default_interval": 0.0, **sections.pop("pacing", {})}
    return Config.from_dict({"audit": audit, "pacing": pacing, **sections})


def chains_of(folder: Path) -> dict[str, list[Line]]:
    """Return the lines of each chain in a folder, once the chains were judged."""
    segments: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        if (name := SegmentName.parse(path.name)) is not None:
            assert path.stat().st_mode & 0o777 == 0o600
            segments[name.chain].setdefault(name.number, path)
    return {chain: _lines(folder, found) for chain, found in segments.items()}


def _lines(folder: Path, segments: dict[int, Path]) -> list[Line]:
    assert sorted(segments) == list(range(1, len(segments) + 1))
    lines: list[Line] = []
    prev, granted = NO_DIGEST, set[str]()
    for number in sorted(segments):
        path = segments[number]
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        *whole, torn = data.split(b"\n")
        assert not torn or number == len(segments), f"{path} is torn before the end"
        for raw in whole:
            line = json.loads(raw)
            assert (line["n"], line["prev"]) == (len(lines) + 1, prev), f"{path}: {line}"
            prev = hashlib.sha256(raw).hexdigest()
            lines.append(line)
            if line["kind"] == "grant":
                assert line["lease"] not in granted
                granted.add(line["lease"])
                for scope in line["scopes"]:
                    assert scope["since"] is None or scope["since"] >= scope["interval"] - 1e-6
            if line["kind"] == "outcome":
                assert line["lease"] in granted
            if line.get("text") is not None:
                body = gzip.decompress((folder / text_path(line["text"])).read_bytes())
                assert hashlib.sha256(body).hexdigest() == line["text"]
        if number < len(segments):
            assert lines[-1]["kind"] == "seal"
    if lines:
        assert lines[0]["kind"] == "start"
    return lines


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, octets: int = 0) -> Iterator[None]:
    """Let the record's writes fail, after so many octets of the first one."""
    left, write = [octets], os.write

    def fail(fd: int, data: bytes) -> int:
        if left[0]:
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


@pytest.fixture(name="virtual_clock")
def virtual_clock() -> VirtualClock:
    """Return a clock that moves only when it is advanced."""
    return VirtualClock()
