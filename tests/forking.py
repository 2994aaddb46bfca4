"""For tests that kill processes: one that forks those to be killed, so that Python starts once.

`fork_for_each` is its program, and `Victims` the test's side:

    stdin     one line per process
    stdout    "pid <n>", then what that process says, then "dead" once it is gone
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tests.processes import PYTHON

T = TypeVar("T", str, bytes)


def say(text: str) -> None:
    """Write a line at once, which a kill does not lose."""
    os.write(1, f"{text}\n".encode())


def fork_for_each(lines: Iterable[T], live: Callable[[T], None]) -> None:
    """Fork a process for each line, one after the other."""
    for line in lines:
        child = os.fork()
        if child == 0:
            say(f"pid {os.getpid()}")
            live(line)
            os._exit(0)
        os.waitpid(child, 0)
        say("dead")


class Victims:
    """The processes of `python -m MODULE`, of which one lives at a time."""

    def __init__(self, module: str) -> None:
        self._parent = subprocess.Popen(
            [PYTHON, "-m", module],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pid = 0

    def start(self, *words: object) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(" ".join(map(str, words)) + "\n")
        self._parent.stdin.flush()
        self._pid = int(self.line().split()[1])

    def line(self) -> str:
        """The next line that the process says."""
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "the victim died by itself"
        return line.strip()

    def kill(self) -> list[str]:
        """Kill the process, and return what it had said by then."""
        os.kill(self._pid, signal.SIGKILL)
        return list(iter(self.line, "dead"))

    def close(self) -> None:
        with self._parent:
            assert self._parent.stdin is not None
            self._parent.stdin.close()
