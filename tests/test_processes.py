"""A process that is forked from the template is like one that a new interpreter runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PYTHON

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")

TELL = """
import json, os, resource, signal, sys
streams = sys.stdin, sys.stdout, sys.stderr
os.umask(mask := os.umask(0))
print(json.dumps({
    "words": sys.argv, "path": sys.path, "name": __name__, "folder": os.getcwd(), "umask": mask,
    "environ": {**os.environ}, "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "descriptors": [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}")],
    "streams": [
        (s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through, s.name)
        for s in streams
    ],
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "input": sys.stdin.read(), "parent": os.getppid(), "group": os.getpgrp(),
    "modules": [name for name in sys.modules if name == "tests" or name == "pytest"],
}))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def told(python: str, folder: Path, *words: str, passed: tuple[int, ...] = ()) -> Any:
    done = subprocess.run(
        [python, *words, "a word"],
        cwd=folder,
        env={**os.environ, "GIVEN": "value"},
        input="given",
        capture_output=True,
        text=True,
        check=False,
        pass_fds=passed,
    )
    assert (done.returncode, done.stderr) == (3, "to stderr\n")
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_a_forked_process_has_what_a_new_one_has(way: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TELL, "utf-8")
    words = {"-c": ("-c", TELL), "-m": ("-m", "program"), "file": (str(program),)}[way]
    read, write = os.pipe()
    try:
        forked, new = (
            told(one, tmp_path, *words, passed=(write,)) for one in (PYTHON, sys.executable)
        )
    finally:
        os.close(read)
        os.close(write)
    assert forked == new
    assert forked["parent"] == os.getpid()


def test_a_process_that_would_import_another_package_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "gatekeeper.py").write_text("here = True", "utf-8")
    code = "import gatekeeper; print(gatekeeper.here)"
    done = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"True\n"


async def test_signals_reach_a_forked_process_and_its_status_is_told() -> None:
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, -2)):
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-c", code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"here\n"
        process.send_signal(number)
        assert await process.wait() == status
