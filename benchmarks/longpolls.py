"""`python -m benchmarks.longpolls`: the sidecar's memory after a crawler's kill -9.

A client process sends 5,000 requests that wait for one host's lease, and is killed. The sidecar's
memory is printed before, at the peak, and after the requests are gone.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.resident import resident

__all__ = ["main"]

POLLS = 5000
_MIB = 1 << 20
_CLIENT = """
import json, resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
port, polls = map(int, sys.argv[1:])
body = json.dumps({"url": "http://a.test/", "wait": 290}).encode()
head = "POST /v1/leases HTTP/1.1\\r\\nHost: 127.0.0.1:%d\\r\\nContent-Type: application/json\\r\\n"
head = (head + "Content-Length: %d\\r\\n\\r\\n") % (port, len(body))
open_ = []
for _ in range(polls):
    open_.append(socket.create_connection(("127.0.0.1", port)))
    open_[-1].sendall(head.encode() + body)
print("sent", flush=True)
time.sleep(120)
"""
_CONFIG = """
[[host]]
match = "a.test"
robots = "allow"
interval = 0
"""


def _waiting(base: str) -> int:
    with urllib.request.urlopen(base + "/metrics", timeout=60) as answer:
        found = re.search(rb'gatekeeper_leases\{state="waiting"\} (\S+)', answer.read())
    return int(float(found[1])) if found else 0


def _until(base: str, waiting: int) -> None:
    for _ in range(600):
        if _waiting(base) == waiting:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{waiting} requests never waited")


def _crowd(base: str, pid: int, polls: int) -> int:
    """Let that many requests wait, and kill their client. Return the memory at the peak."""
    port = base.rpartition(":")[2]
    command = [sys.executable, "-c", _CLIENT, port, str(polls)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            client.stdout.readline()
            _until(base, polls)
            return resident(pid)
        finally:
            client.send_signal(signal.SIGKILL)


def main(polls: int = POLLS, rounds: int = 3) -> None:
    """Print one line per round. The sidecar ends with this process."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "gatekeeper.toml"
        config.write_text(_CONFIG, encoding="utf-8")
        arguments = ("--json", "--port", "0", "--storage", "memory", "--config", str(config))
        sidecar = subprocess.Popen(
            [sys.executable, "-m", "gatekeeper", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert sidecar.stdout is not None
            base = json.loads(sidecar.stdout.readline())["listening"]
            held = urllib.request.Request(
                base + "/v1/leases",
                data=b'{"url": "http://a.test/", "ttl": 600}',
                headers={"Content-Type": "application/json"},
            )
            urllib.request.urlopen(held, timeout=60).close()
            before = resident(sidecar.pid)
            for number in range(rounds):
                peak = _crowd(base, sidecar.pid, polls)
                _until(base, 0)
                at_once = resident(sidecar.pid)
                time.sleep(6.0)
                print(
                    f"round {number + 1}: before {before / _MIB:.0f} MiB, {polls} waiting "
                    f"{peak / _MIB:.0f}, just killed {at_once / _MIB:.0f}, "
                    f"6 s later {resident(sidecar.pid) / _MIB:.0f}",
                    flush=True,
                )
        finally:
            sidecar.terminate()
            sidecar.wait()
            if sidecar.stdout is not None:
                sidecar.stdout.close()


if __name__ == "__main__":
    main()
