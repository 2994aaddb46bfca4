"""The site that is crawled: pages of 4 kB on any loopback address, in its own process.

`python -m benchmarks.pages` prints its port and serves until standard input ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["HOSTS", "ROBOTS", "serving", "urls"]

HOSTS = 200
ROBOTS = b"User-agent: *\nDisallow: /private/\nDisallow: /*.pdf$\nDisallow: /search?\nAllow: /\n"
_PAGE = b"<!doctype html><title>A page</title><p>" + b"Some words that nobody reads. " * 130


def urls(port: int, pages: int) -> list[str]:
    """Return the URLs of that many pages, distributed evenly over the hosts."""
    return [
        f"http://127.0.1.{1 + number % HOSTS}:{port}/page/{number}.html" for number in range(pages)
    ]


@contextmanager
def serving() -> Iterator[int]:
    """Run a server until the block is left. Yield its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pages"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class _Wire(asyncio.Protocol):
    """Answers every request of a connection immediately, also several in one packet."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *heads, self._rest = (self._rest + data).split(b"\r\n\r\n")
        for head in heads:
            is_file = head.startswith(b"GET /robots.txt ")
            self._transport.write(_ROBOTS_ANSWER if is_file else _PAGE_ANSWER)


def _answer(body: bytes, kind: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    return head + body


_ROBOTS_ANSWER = _answer(ROBOTS, b"text/plain")
_PAGE_ANSWER = _answer(_PAGE, b"text/html; charset=utf-8")


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Wire, "0.0.0.0", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve())
    else:
        uvloop.run(_serve())
