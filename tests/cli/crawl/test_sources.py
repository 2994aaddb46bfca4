"""Where URLs come from."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path

import pytest

from gatekeeper.cli.crawl.sources import given


async def read(*arguments: str, file: str | None = None) -> list[str]:
    return [url async for url in given(arguments, file)]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Standard input as a pipe; gives its other end."""
    reading, writing = os.pipe()
    stdin = os.fdopen(reading, "rb")
    monkeypatch.setattr(sys, "stdin", stdin)
    with os.fdopen(writing, "wb", buffering=0) as other:
        yield other
    stdin.close()


async def test_arguments_come_first_then_the_lines_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("https://b.test/\n\n# a comment\n  https://c.test/ \nhttps://d.test/")
    assert await read("https://a.test/", file=str(file)) == [
        "https://a.test/",
        "https://b.test/",
        "https://c.test/",
        "https://d.test/",
    ]


async def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await read(file=str(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize("as_argument", [True, False])
async def test_a_hyphen_is_standard_input(pipe: io.FileIO, as_argument: bool) -> None:
    pipe.write(b"https://a.test/\r\nhttps://b.test/\n")
    pipe.close()
    found = await (read("-") if as_argument else read(file="-"))
    assert found == ["https://a.test/", "https://b.test/"]


async def test_standard_input_may_be_a_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("https://a.test/\n")
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert await read("-") == ["https://a.test/"]


async def test_waiting_for_standard_input_can_be_cancelled(pipe: io.FileIO) -> None:
    task = asyncio.create_task(read("-"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_standard_input_is_left_blocking_as_it_was(pipe: io.FileIO) -> None:
    pipe.close()
    await read("-")
    assert os.get_blocking(sys.stdin.fileno())


async def test_a_line_too_long_for_a_url_is_left_out(pipe: io.FileIO) -> None:
    def write() -> None:
        pipe.write(b"https://a.test/" + b"x" * 400_000 + b"\nhttps://b.test/\n")
        pipe.close()

    found, _ = await asyncio.gather(read("-"), asyncio.to_thread(write))
    assert found[-1] == "https://b.test/"
    assert len(found) <= 2
