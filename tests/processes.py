"""Python processes of the tests that begin with the package imported.

To import the package takes twenty times the processor time that most of these processes need for
the rest. So a command that begins with `PYTHON` is forked from a template, a process that has
imported the package and done nothing else (`processes_template.py`). It is an ordinary process in
all else: a child of the test's process, with the words, environment, folder, streams and
descriptors that it was given. Where the start itself is tested, a command begins with
`sys.executable`.

A new interpreter is started nevertheless in the long form of the suite, on systems other than
Linux, and where a process has options of Python, or is prepared by a function.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.effort import LONG

if sys.platform != "win32":
    import resource


class _Prepared(str):
    """The path of an interpreter, by which a `Popen` knows what may be forked."""

    __slots__ = ()


PYTHON: Final[str] = _Prepared(sys.executable)
"""The first word of a command for a Python that has imported the package."""


async def run(*command: str, cwd: Path | None = None, **environ: str) -> tuple[int | None, str]:
    """Run a program, with more variables than those of the tests. Return its exit code, and all
    that it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode(errors="replace")


_READ_AT_START: Final = ("PYTHON", "LANG", "LC_", "LD_", "TZ", "SSL_", "AIOHTTP_")
"""What the names of the variables begin with that Python, or an import, reads once."""
_USUAL: Final = (None, None, None, -1, False, -1)
"""The last arguments of a `Popen`: no other group, user, umask, session or process group."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_lock: Final = threading.Lock()


class _Template:
    """The process from which those are forked for which these variables are set."""

    def __init__(self, variables: Iterable[tuple[str, str]]) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._folder = tempfile.TemporaryDirectory(prefix="gk")
        self._path = f"{self._folder.name}/s"
        self._process = subprocess.Popen(
            # -P: what is in the script's folder is not to be imported
            [sys.executable, "-P", Path(__file__).with_name("processes_template.py"), self._path],
            env={**dict(variables), "PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._close)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def _close(self) -> None:
        self._process.communicate()  # closes its input
        self._folder.cleanup()

    def fork(self, command: Mapping[str, Any], descriptors: Iterable[int]) -> int:
        """Start a process and return its id.

        The process is forked by one that exits, and an orphan becomes a child of its nearest
        ancestor that takes orphans: for this time, of this process.
        """
        text = json.dumps(command).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                connection.connect(self._path)
                socket.send_fds(connection, [len(text).to_bytes(4, "big")], [*descriptors])
                connection.sendall(text)
                with connection.makefile("rb") as answer:
                    return int(answer.read())
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_template_for: Final = cache(_Template)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` that forks a template if its command begins with `PYTHON`."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *more: Any,
    ) -> None:
        _, _, shell, *pipes = more[:9]
        if (
            not (isinstance(args, (list, tuple)) and isinstance(args[0], _Prepared))
            or (str(args[1]).startswith("-") and args[1] not in {"-c", "-m"})
            or (executable, preexec_fn, close_fds, shell) != (None, None, True, False)
            or more[10:] != _USUAL
        ):
            given = (executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        environ = {**(os.environ if env is None else env)}
        first = sorted(one for one in environ.items() if one[0].startswith(_READ_AT_START))
        own = [n if end == -1 else end for n, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        with _lock:
            os.umask(mask := os.umask(0))
            command = {
                "words": [os.fspath(word) for word in args[1:]],
                "environ": environ,
                "folder": os.path.join(os.getcwd(), cwd or ""),
                "umask": mask,
                "files": resource.getrlimit(resource.RLIMIT_NOFILE),
                "passed": [*pass_fds],
            }
            self.pid = _template_for(tuple(first)).fork(command, [*own, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def install() -> None:
    """Let commands that begin with `PYTHON` be forked from now on."""
    if sys.platform == "linux" and not LONG:
        subprocess.Popen = _Popen  # type: ignore[misc]
