"""A real redis-server for the tests: on a unix socket of its own, ended with the test run."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class Server:
    """One server process. `kill` and `start` it again; its data stays where it is."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gk-", dir="/tmp"))
        self.port = port
        self.options = options
        self.socket = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}" if not self.port else f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert BINARY is not None
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                *(BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--daemonize", "no"),
                *("--unixsocket", str(self.socket), "--dir", str(self.folder)),
                *("--save", "", "--logfile", str(self.folder / "log"), *self.options),
            ],
            stdin=subprocess.DEVNULL,
        )
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self.ask("PING").startswith(b"+PONG"):
                    return
            time.sleep(0.01)
        raise AssertionError((self.folder / "log").read_text())

    def ask(self, *words: str) -> bytes:
        """One command, its answer as it comes."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(5.0)
            wire.connect(str(self.socket))
            parts = [f"*{len(words)}"] + [f"${len(one.encode())}\r\n{one}" for one in words]
            wire.sendall(("\r\n".join(parts) + "\r\n").encode())
            return wire.recv(1 << 16)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
