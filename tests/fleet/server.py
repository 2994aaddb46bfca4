"""A real redis-server for the tests, on a unix socket of its own; it ends with the test run.

It waits for lines in the server's log, with a deadline.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from gatekeeper.fleet.scripts import FORMAT
from tests.internet import free_port

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class Server:
    """A server process. It can be killed and started again; its data stays where it is."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gk-", dir="/tmp"))
        self.port = port
        self.options = options
        self.socket = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "log"

    def begin_long_ago(self, namespace: str) -> None:
        """Pretend that a fleet's epoch began long ago, so that there is no quarantine."""
        told = self.ask("INFO", "everything").decode()
        facts = dict(line.split(":", 1) for line in told.split("\r\n") if ":" in line)
        identity = f"{facts['run_id']}:{facts['master_replid']}"
        epoch = ("id", "old", "server", identity, "format", str(FORMAT))
        self.ask("HSET", f"{{{namespace}}}:epoch", *epoch)

    def stop(self) -> None:
        """Send SIGSTOP: the server accepts connections and never responds."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}" if not self.port else f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._run(
            *("--port", str(self.port), "--bind", "127.0.0.1", "--daemonize", "no"),
            *("--unixsocket", str(self.socket), "--dir", str(self.folder)),
            *("--save", "", "--logfile", "", *self.options),
        )
        self.said("eady to accept connections")

    def _run(self, *arguments: str) -> None:
        assert BINARY is not None
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [BINARY, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def said(self, text: str) -> None:
        """Wait for a text in the log. If it does not appear, end the server."""
        assert self.process is not None
        end = time.monotonic() + 60.0
        while text not in (said := self.log.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(said)
            time.sleep(0.002)

    def start_sentinel(self, master: int, *lines: str) -> None:
        """Start as a Sentinel, with a quorum of one, of the server on that port, named `store`."""
        settings = self.folder / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\nbind 127.0.0.1\nunixsocket {self.socket}\ndir {self.folder}\n"
            + "".join(f"{one}\n" for one in lines)
            + f"sentinel monitor store 127.0.0.1 {master} 1\n"
            "sentinel down-after-milliseconds store 300\nsentinel failover-timeout store 3000\n"
        )
        self._run(str(settings), "--sentinel")
        self.said("+monitor master store")

    def ask(self, *words: str) -> bytes:
        """Execute a command and return its raw response."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(60.0)
            wire.connect(str(self.socket))
            parts = [f"*{len(words)}"] + [f"${len(one.encode())}\r\n{one}" for one in words]
            wire.sendall(("\r\n".join(parts) + "\r\n").encode())
            return wire.recv(1 << 16)

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


QUICK = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
"""Options that make a replica ready immediately."""


class Replicated:
    """A master, its replica, and Sentinels that monitor both."""

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
        self.replica.said("sync: Finished with success")
        for one in self.sentinels:
            one.start_sentinel(self.master.port)
            one.said("+slave slave")

    def promote(self) -> None:
        """Kill the master, along with writes that were not replicated, and promote the replica."""
        self.master.kill()
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        for one in (*self.sentinels, self.replica, self.master):
            one.close()
