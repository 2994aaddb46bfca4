"""One process per state file, even if the lock file was deleted."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gatekeeper.cli import main
from gatekeeper.errors import StorageError
from gatekeeper.storage import ClockRecord, SqliteStorage
from tests.processes import PYTHON

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="open files can't be deleted")

SECOND = """
import asyncio, sys
from gatekeeper.errors import StorageError
from gatekeeper.storage import SqliteStorage

async def main():
    storage = SqliteStorage(sys.argv[1])
    try:
        await storage.open()
    except StorageError as error:
        print(error)
    else:
        await storage.close()
        print("opened")

asyncio.run(main())
"""


def second(path: Path) -> str:
    """Return the output of another process that opens the same file."""
    run = subprocess.run([PYTHON, "-c", SECOND, path], capture_output=True, text=True, check=True)
    return run.stdout


def delete_lock(path: Path) -> None:
    path.with_name(f"{path.name}.lock").unlink()


def refuse_command(*_: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@needs_locks
@pytest.mark.parametrize("of_files", [True, False])
async def test_a_second_process_is_refused_though_the_lock_file_is_gone(
    path: Path, of_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not of_files:  # the system knows only the locks of processes
        monkeypatch.setattr("fcntl.fcntl", refuse_command)
    async with SqliteStorage(path) as storage:
        delete_lock(path)
        assert "state.db: in use by another gatekeeper; stop that one" in second(path)
        storage.promise(ClockRecord(scope="a.example", next_at=1.0))
        await storage.flush()
    assert second(path) == "opened\n"


@needs_locks
async def test_a_second_storage_of_one_process_is_refused_and_keeps_the_lock_of_the_first(
    path: Path,
) -> None:
    """It must not even open the file: closing it again would drop the locks of the first."""
    async with SqliteStorage(path) as storage:
        for _ in range(2):
            delete_lock(path)
            with pytest.raises(StorageError, match=rf"in use .*process {os.getpid()}"):
                await SqliteStorage(path).open()
        delete_lock(path)
        assert "in use" in second(path)
        storage.promise(ClockRecord(scope="a.example", next_at=1.0))
        await storage.flush()
    async with SqliteStorage(path) as storage:
        assert len(await storage.load_clocks()) == 1


@needs_locks
async def test_a_lock_ends_with_its_process(path: Path) -> None:
    killed = subprocess.run(
        [
            PYTHON,
            "-c",
            SECOND.replace("await storage.close()", "import os; os.kill(os.getpid(), 9)"),
            path,
        ],
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9
    delete_lock(path)
    assert second(path) == "opened\n"


async def test_history_is_read_while_the_file_is_held(
    path: Path, made: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async with SqliteStorage(path) as storage:
        storage.put_origin(made("https://a.example"))  # type: ignore[operator]
        await storage.flush()
        assert main(["history", "https://a.example", "--storage", str(path)]) == 0
        assert "1 version" in capsys.readouterr().out
        storage.promise(ClockRecord(scope="a.example", next_at=1.0))
        await storage.flush()


FORKING = """
import asyncio, os, sys
from gatekeeper.storage import SqliteStorage

async def main():
    storage = SqliteStorage(sys.argv[1])
    await storage.open()
    read, write = os.pipe()
    if not os.fork():
        os.write(write, b"!")
        sys.stdin.read()
        os._exit(0)
    os.read(read, 1)
    if sys.argv[2] == "closes":
        await storage.close()
    print("over", flush=True)
    if sys.argv[2] == "is killed":
        os.kill(os.getpid(), 9)
    if sys.argv[2] == "goes on":
        sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.parametrize(
    ("parent", "expected"), [("closes", "opened"), ("is killed", "opened"), ("goes on", "in use")]
)
def test_a_forked_child_does_not_prolong_the_locks(path: Path, parent: str, expected: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING, path, parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as forking:
        assert forking.stdout is not None
        assert forking.stdout.readline() == b"over\n"
        if parent == "is killed":
            forking.wait()
        assert expected in second(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_child_may_open_the_file_after_its_parent(path: Path) -> None:
    """The child has none of the parent's locks, and does not believe that it has them."""
    program = FORKING.replace(
        "        sys.stdin.read()\n        os._exit(0)",
        "        sys.stdin.readline()\n"
        "        asyncio.events._set_running_loop(None)\n"
        "        asyncio.run(again())\n"
        "        os._exit(0)",
    ).replace(
        "async def main",
        "async def again():\n"
        "    async with SqliteStorage(sys.argv[1]):\n"
        "        print('opened', flush=True)\n\n"
        "async def main",
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, path, "is killed"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        assert forking.stdout.readline() == b"over\n"
        forking.wait()
        forking.stdin.write(b"\n")
        forking.stdin.flush()
        assert forking.stdout.readline() == b"opened\n"
