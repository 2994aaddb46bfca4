"""A real redis-server for the tests: on a unix socket of its own, ended with the test run."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
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

    def stop(self) -> None:
        """SIGSTOP: it accepts connections and never answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

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

    def start_sentinel(self, master: int, *lines: str) -> None:
        """As a Sentinel of the server on that port, named `store`; it alone decides."""
        assert BINARY is not None
        settings = self.folder / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\nbind 127.0.0.1\nunixsocket {self.socket}\ndir {self.folder}\n"
            f"logfile {self.folder / 'log'}\n"
            + "".join(f"{one}\n" for one in lines)
            + f"sentinel monitor store 127.0.0.1 {master} 1\n"
            "sentinel down-after-milliseconds store 300\nsentinel failover-timeout store 3000\n"
        )
        self.process = subprocess.Popen(
            [BINARY, str(settings), "--sentinel"], stdin=subprocess.DEVNULL
        )
        until(self.socket.exists)

    def watches(self) -> bool:
        """Does this Sentinel know of a replica?"""
        try:
            return b"num-slaves\r\n$1\r\n1" in self.ask("SENTINEL", "MASTER", "store")
        except OSError:
            return False

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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


QUICK = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
"""A replica is there at once."""


class Replicated:
    """A master, a replica of it, and Sentinels that watch both."""

    def __init__(self, *options: str, sentinels: int = 1) -> None:
        self.master = Server(*QUICK, *options, port=free_port())
        self.replica = Server(
            *QUICK, *options, "--replicaof", "127.0.0.1", str(self.master.port), port=free_port()
        )
        self.sentinels = [Server(port=free_port()) for _ in range(sentinels)]

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return f"redis+sentinel://{places}/store/0"

    def start(self) -> None:
        self.master.start()
        self.replica.start()
        until(lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"))
        for one in self.sentinels:
            one.start_sentinel(self.master.port)
            until(one.watches)

    def promote(self) -> None:
        """The master is lost, with what it had not passed on."""
        self.master.kill()
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        for one in (*self.sentinels, self.replica, self.master):
            one.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for another process."""
    end = time.monotonic() + 15.0
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
