"""A proxy in front of a store that forwards, drops, delays or holds data, or closes one way."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Literal

from tests.internet import free_port

How = Literal["pass", "drop", "delay", "hold", "half-close", "swallow replies"]


class Proxy:
    """A proxy on loopback; `how` determines what happens to data from now on."""

    def __init__(self, target: str | int) -> None:
        """`target`: a unix socket, or a port of loopback."""
        self.target = target
        self.first: list[Callable[[], Awaitable[None]]] = []
        """Awaitables for the next connections: each is awaited before its data is forwarded."""
        self.how: How = "pass"
        self.delay = 0.2
        self.released = asyncio.Event()
        """Ends the waiting of data that came while `how` was "hold"."""
        self.rewrite: tuple[bytes, bytes] | None = None
        """Replacements of equal length: what the store sends, and what arrives instead."""
        self.refusal = ""
        """An error that replaces the store's response to every command."""
        self.answer = b""
        """What replaces the store's response to every command, as it is sent."""
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port: int = 0

    @property
    def url(self) -> str:
        """The URL of the store behind the proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def open(self) -> None:
        """Listen; after `refuse`, on the same port as before."""
        self.port = self.port or free_port()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def refuse(self) -> None:
        """Refuse connections, like a store that is down, until `open`."""
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            if self.first:
                await self.first.pop(0)()
            if isinstance(self.target, int):
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
            else:
                there, back = await asyncio.open_unix_connection(self.target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        ways = self._pass(reader, back, refuses=writer), self._pass(there, writer)
        for way in ways:
            task = asyncio.create_task(way)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        refuses: asyncio.StreamWriter | None = None,
    ) -> None:
        """Forward data. `refuses`: the writer that gets a refusal, towards the store only."""
        asks = refuses is not None
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.how == "drop" or (self.how == "swallow replies" and not asks):
                    continue
                if refuses is not None and (self.refusal or self.answer):
                    commands = len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", data))
                    refuses.write((self.answer or f"-{self.refusal}\r\n".encode()) * commands)
                    continue
                if self.rewrite is not None and not asks:
                    data = data.replace(*self.rewrite)
                if self.how == "delay":
                    await asyncio.sleep(self.delay)
                elif self.how == "hold":
                    await self.released.wait()
                writer.write(data)
                await writer.drain()
                if self.how == "half-close" and asks:
                    writer.write_eof()  # the store still answers what it has received
                    return
        writer.close()
        self._writers.discard(writer)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
