"""Memory of `gatekeeper serve`: idle, warm, and over a million requests.

The real command is asked over loopback: by a flood of checks, and, if wrk is installed, by the
mixture of requests in growth.lua.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import AGENT
from benchmarks.options import Options
from benchmarks.report import Table, count
from benchmarks.resident import resident
from benchmarks.sidecar import CONNECTIONS, ORIGINS, _get, _server

__all__ = ["run"]

SCRIPT = Path(__file__).with_name("growth.lua")
STEPS = 10
_MOST = 600
"""Longest duration of one step, in seconds."""


@dataclass(frozen=True, slots=True)
class _Command:
    pid: int
    port: int


def run(options: Options) -> list[Table]:
    """Measure a flood of checks, and a crawler's mixture of requests if wrk is installed."""
    tables = [_flooded(options)]
    wrk = shutil.which("wrk")
    if wrk is not None:
        tables.append(_mixed(wrk, options))
    return tables


def _flooded(options: Options) -> Table:
    warm, total = (50_000, 50_000) if options.quick else (200_000, 1_000_000)
    with _server("gatekeeper", _loop()) as origins, _command() as service:
        held = {"idle": resident(service.pid)}
        _flood(service.port, origins.origins, warm)
        held["warm"] = resident(service.pid)
        _flood(service.port, origins.origins, total)
        held["after"] = resident(service.pid)
    grown = held["after"] - held["warm"]
    rows = [
        ("idle", _megabytes(held["idle"])),
        (f"{ORIGINS} origins warm, {count(warm)} requests", _megabytes(held["warm"])),
        (f"after {count(total)} more, each another URL", _megabytes(held["after"])),
        ("grown by", _megabytes(grown)),
    ]
    return Table(
        "The memory of `gatekeeper serve`",
        ("", "resident"),
        rows,
        "idle under 60 MB; no growth over a million requests",
        (
            "Resident set, as the kernel counts it; refusals alone are logged. Where all is, "
            "and comes faster than `log_rate`, the log's ring holds up to 20 k decisions more.",
        ),
        {"resident_bytes": held, "grown_bytes": grown, "requests": total},
    )


def _mixed(wrk: str, options: Options) -> Table:
    total = 100_000 if options.quick else 1_000_000
    step = total // STEPS
    with _server("gatekeeper", _loop()) as origins, _command() as service:
        held = [resident(service.pid)]
        answers: dict[str, int] = {}
        for turn in range(STEPS):
            for status, times in _ask(wrk, service.port, step, turn, origins.origins):
                answers[status] = answers.get(status, 0) + times
            held.append(resident(service.pid))
    rows = [("idle", _megabytes(held[0]))]
    rows += [(f"after {count(step * n)}", _megabytes(held[n])) for n in range(1, STEPS + 1)]
    told = ", ".join(f"{count(times)} times {status}" for status, times in sorted(answers.items()))
    return Table(
        "The memory of `gatekeeper serve`, over requests of every kind",
        ("", "resident"),
        rows,
        "idle under 60 MB; no growth over a million requests",
        (
            f"wrk over {CONNECTIONS} connections, {ORIGINS} origins: checks, batches of 20, leases "
            "with their reports, leases that run out, and what is refused; no URL twice.",
            f"Answered: {told}.",
            "What is remembered of ended leases (10 k of them) fills up in the first steps.",
        ),
        {"resident_bytes": held, "requests": total, "answers": answers},
    )


def _ask(
    wrk: str, port: int, total: int, turn: int, origins: list[str]
) -> Iterator[tuple[str, int]]:
    """Get at least that many responses with wrk. Return how often each status occurred."""
    process = subprocess.Popen(
        [
            *(wrk, "-t", "1", "-c", str(CONNECTIONS), "-d", f"{_MOST}s", "--timeout", "20s"),
            *("-s", str(SCRIPT), f"http://127.0.0.1:{port}"),
            *("--", str(total), str(1 + 100 * total * turn), *origins),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "enough\n":
            process.send_signal(signal.SIGINT)
            break
    lines = process.communicate()[0].splitlines()
    if "errors 0" not in lines:
        raise RuntimeError("\n".join(["wrk met errors:", *lines]))
    statuses = next(line for line in lines if line.startswith("statuses")).split()[1:]
    for status, _, times in (word.partition(":") for word in statuses):
        if status >= "500":
            raise RuntimeError(f"{times} answers were {status}")
        yield status, int(times)


def _flood(port: int, origins: list[str], total: int) -> None:
    """Send that many checks of new URLs, several in each packet."""
    each = 16
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    for first in range(0, total, CONNECTIONS * each):
        for number, connection in enumerate(connections):
            start = first + number * each
            connection.sendall(
                b"".join(
                    _get(f"/v1/check?url={origins[n % len(origins)]}/a/{n}", port)
                    for n in range(start, start + each)
                )
            )
        for connection in connections:
            _read_many(connection, each)
    for connection in connections:
        connection.close()


def _read_many(connection: socket.socket, answers: int) -> None:
    """Read that many responses, which must all be 200."""
    data = b""
    while answers:
        data += connection.recv(1 << 16)
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head = data[:end].lower()
            if head[9:12] != b"200":
                raise RuntimeError(f"answered {head!r}")
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(data) < end + 4 + size:
                break
            data = data[end + 4 + size :]
            answers -= 1


@contextmanager
def _command() -> Iterator[_Command]:
    """Run the service as its users do, with up to 1,000 concurrent requests per host."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gatekeeper", "serve", "--port", "0", "--storage", "memory"),
            *("--allow-address", "127.0.0.0/8", "--user-agent", AGENT),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "GATEKEEPER_SERVER_LOG_DECISIONS": "refused",
            "GATEKEEPER_PACING_DEFAULT_INTERVAL": "0",
            "GATEKEEPER_PACING_CONCURRENCY": "1000",
        },
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        yield _Command(process.pid, port)
    finally:
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        process.wait()


def _loop() -> str:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return "asyncio"
    return "uvloop"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
