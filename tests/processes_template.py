"""The template of `processes.py`: it imports the package, and forks a process for each command."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MODULES: Final = (
    *("gatekeeper.cli.fetch", "gatekeeper.cli.serve", "gatekeeper.client.client"),
    *("gatekeeper.crawl.progress", "gatekeeper.crawl.runner", "gatekeeper.fleet"),
    *("gatekeeper.queue", "gatekeeper.sidecar.process", "redis.asyncio", "uvloop"),
)


def commands(path: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each command that comes. Returns in the new process, with its command."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                if child := os.fork():
                    os.waitpid(child, 0)
                    continue
                size, descriptors, *_ = socket.recv_fds(connection, 4, 64)
                with connection.makefile("rb") as sent:
                    command = json.loads(sent.read(int.from_bytes(size, "big")))
                if process := os.fork():
                    connection.sendall(b"%d" % process)
                    os._exit(0)
                return command, list(descriptors)


def take_over(command: dict[str, Any], descriptors: list[int]) -> None:
    """Take the surroundings that the process is to have."""
    targets = [0, 1, 2, *command["passed"]]
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, max(targets) + 1) for one in descriptors]
    for one, target in zip(moved, targets, strict=True):
        os.dup2(one, target)
    for one in {int(name) for name in os.listdir("/proc/self/fd")}.difference(targets):
        with contextlib.suppress(OSError):
            os.close(one)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw.name = old.name  # type: ignore[misc]
        new = io.TextIOWrapper(
            raw if isinstance(old.buffer, io.FileIO) else type(old.buffer)(raw),
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=old.line_buffering or raw.isatty(),
            write_through=old.write_through,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(command["folder"])
    os.umask(command["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, command["files"])
    os.environ.clear()
    os.environ.update(command["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def program(first: str, *more: str) -> tuple[Any, ModuleType]:
    """Return the program of a command line and its module, as Python prepares them."""
    module = ModuleType("__main__")
    sys.path.insert(0, {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent)))
    package = PathFinder.find_spec("gatekeeper")
    if package is None or package.origin != sys.modules["gatekeeper"].__file__:
        os.execv(sys.executable, [sys.executable, first, *more])  # it would import another one
    if first == "-c":
        sys.argv = ["-c", *more[1:]]
        code: Any = compile(more[0], "<string>", "exec")
    elif first == "-m":
        spec = importlib.util.find_spec(more[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{more[0]}.__main__")
        assert spec is not None
        assert spec.origin is not None
        sys.argv = [spec.origin, *more[1:]]
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
    else:
        sys.argv = [first, *more]
        code = compile(Path(first).read_bytes(), first, "exec")
        module.__file__ = first
    sys.modules["__main__"] = module
    return code, module


class Ending:
    """Ends the process as Python does, but without freeing each object: that copies the memory."""

    status: int | None = None
    """What the process exits with; None: it ends as Python does."""

    def __call__(self) -> None:
        if self.status is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.status & 0xFF)


if __name__ == "__main__":
    ending = Ending()
    atexit.register(ending)  # the first registered is called last
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is for pytest
    for name in MODULES:
        with contextlib.suppress(ImportError):  # an earlier version has not all
            importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    command, descriptors = commands(sys.argv[1])
    take_over(command, descriptors)
    code, module = program(*command["words"])
    try:
        exec(code, module.__dict__)
        ending.status = 0
    except SystemExit as exited:
        if isinstance(exited.code or 0, int):
            ending.status = exited.code or 0
        raise
