"""The sources of URLs: arguments, files and standard input."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path

import pytest

from gatekeeper.crawl.sources import open_list, read_urls
from gatekeeper.errors import ConfigError
from gatekeeper.urls import MAX_URL


async def read(*arguments: str, file: str | None = None) -> list[str]:
    with open_list(file) as listed:
        return [found.text async for found in read_urls(arguments, listed)]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Replace standard input by a pipe, and return the other end."""
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
    with pytest.raises(ConfigError, match=r"-i .*nowhere.txt: No such .*; give a file with one"):
        await read(file=str(tmp_path / "nowhere.txt"))


async def test_each_url_knows_the_line_it_stands_in(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("# a comment\n\nhttps://b.test/\nhttps://c.test/")
    with open_list(str(file)) as listed:
        found = [(one.text, one.where) async for one in read_urls(["https://a.test/"], listed)]
    assert found == [
        ("https://a.test/", None),
        ("https://b.test/", f"{file}:3"),
        ("https://c.test/", f"{file}:4"),
    ]


@pytest.mark.parametrize("as_argument", [True, False])
async def test_a_hyphen_reads_standard_input(pipe: io.FileIO, as_argument: bool) -> None:
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


@pytest.mark.parametrize("as_argument", [True, False])
async def test_standard_input_may_be_the_null_device(
    monkeypatch: pytest.MonkeyPatch, as_argument: bool
) -> None:
    with open(os.devnull, "rb") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert await (read("-") if as_argument else read(file="-")) == []


async def test_standard_input_may_be_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty")
    controlling, terminal = pty.openpty()
    os.write(controlling, b"https://a.test/\nhttps://b.test/\n\x04")  # Ctrl-D ends it
    with os.fdopen(terminal, "rb") as stdin, os.fdopen(controlling, "rb"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert await read("-") == ["https://a.test/", "https://b.test/"]


@pytest.mark.parametrize("closed", [True, False])
async def test_a_closed_standard_input_is_one_error(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    stdin = io.BytesIO()
    stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin if closed else None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        await read("-")


async def test_a_list_may_come_through_a_named_pipe(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    os.mkfifo(path)
    writing = os.open(path, os.O_RDWR)
    task = asyncio.create_task(read(file=str(path)))
    os.write(writing, b"https://a.test/\n")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()  # waiting for more, and the loop runs on
    os.close(writing)
    assert await task == ["https://a.test/"]


async def test_a_byte_order_mark_is_no_part_of_the_first_url(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_bytes(b"\xef\xbb\xbfhttps://a.test/\r\nhttps://b.test/\r\n")
    assert await read(file=str(file)) == ["https://a.test/", "https://b.test/"]


async def test_reading_a_long_file_lets_other_tasks_run(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("https://a.test/\n" * 50_000)
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert len(await read(file=str(file))) == 50_000
    task.cancel()
    assert others > 5


@pytest.mark.parametrize("through", ["a pipe", "a file"])
async def test_a_line_too_long_for_a_url_is_cut(
    pipe: io.FileIO, tmp_path: Path, through: str
) -> None:
    text = b"https://a.test/" + b"x" * 400_000 + b"\nhttps://b.test/\n"
    file = tmp_path / "urls.txt"
    file.write_bytes(text)

    def write() -> None:
        pipe.write(text)
        pipe.close()

    if through == "a pipe":
        found, _ = await asyncio.gather(read("-"), asyncio.to_thread(write))
    else:
        found = await read(file=str(file))
    assert [len(url) for url in found] == [4 * MAX_URL, len("https://b.test/")]


async def test_a_line_that_never_ends_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "zeros"
    with file.open("wb") as zeros:
        zeros.truncate(20 * 1024 * 1024)
    with pytest.raises(ConfigError, match="zeros: a line is too long"):
        await read(file=str(file))
