"""Scrapy in a separate process that runs crawls one after another, controlled by a client.

Importing Scrapy and its reactor takes longer than most crawls, so the rigs share one process. A
connection is one crawl: `["open", settings, names]`, then any number of `["get", ...]` and other
calls of methods of `_Crawl`, each answered by its number. Messages are pickled.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gatekeeper

ROOT: Final = Path(__file__).parents[2]
_names: dict[str, Any] = {}
"""The addresses of each name, or the errno of the error that resolving it raises."""
_ports: dict[tuple[str, int], int] = {}
"""The real port for an address and the port of a URL."""


class WorkerFailed(Exception):
    """An error of Scrapy or Twisted, as its class name and text, since it may not be picklable."""


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(struct.pack("!I", len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = struct.unpack("!I", await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(size))


class Connection:
    """One crawl of the worker, on the side of the test."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def open(self, path: str) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                number, error, value = await _receive(self._reader)
                asked = self._asked.pop(number, None)
                if asked is None or asked.done():
                    continue
                if error is None:
                    asked.set_result(value)
                else:
                    asked.set_exception(error)
        except asyncio.IncompleteReadError:
            pass
        finally:
            for asked in self._asked.values():
                asked.cancel()

    async def call(self, name: str, *given: Any) -> Any:
        """Call a method and return its result. Cancelling the call cancels it in the worker."""
        self._number += 1
        number = self._number
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        await _send(self._writer, (number, name, given))
        try:
            return await asked
        except asyncio.CancelledError:
            await self.tell("cancel", number)
            raise

    async def tell(self, name: str, *given: Any) -> None:
        """Send a call without waiting for its result; it precedes the next call."""
        await _send(self._writer, (0, name, given))

    async def close(self) -> None:
        """End the crawl, unless it has ended."""
        self._writer.close()
        await self._writer.wait_closed()
        await self._listening


class Worker:
    """The worker process."""

    def __init__(self, python: str = sys.executable) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gk")
        self.path = str(Path(self._folder.name) / "worker")
        self._process = subprocess.Popen(
            [python, "-c", f"from {__name__} import main; main({self.path!r})"],
            cwd=ROOT,
            # With `-c`, modules are found in the current folder, which crawls change: later imports
            # would find the package that is installed in the environment.
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        package = self._process.stdout.readline().decode().strip()  # written once it listens
        # Another environment may have its own installed version, which is not to be tested.
        assert package == gatekeeper.__file__, package

    def close(self) -> None:
        """End the process."""
        self._process.communicate()  # closes its input
        self._folder.cleanup()
        assert self._process.returncode == 0


# --- in the worker process ------------------------------------------------------------------


def _patch_sockets() -> None:
    """Resolve names and map ports as the test specifies."""
    look_up, connect, connect_ex = (
        socket.getaddrinfo,
        socket.socket.connect,
        socket.socket.connect_ex,
    )

    def getaddrinfo(host: Any, port: Any, *more: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        found = _names.get(name, [name] if _literal(name) else socket.EAI_NONAME)
        if isinstance(found, int):
            raise socket.gaierror(found, f"{name} can't be looked up")
        return [one for address in found for one in look_up(address, port, *more, **options)]

    def real(address: Any) -> Any:
        if not isinstance(address, tuple):
            return address
        return (address[0], _ports.get(address[:2], address[1]), *address[2:])

    changed: Any = socket
    changed.getaddrinfo = getaddrinfo
    changed.socket.connect = lambda self, address: connect(self, real(address))
    changed.socket.connect_ex = lambda self, address: connect_ex(self, real(address))


def _literal(name: str | None) -> bool:
    return name in (None, "localhost") or ":" in name or name.replace(".", "").isdigit()


class _Crawl:
    """One crawl."""

    def __init__(self) -> None:
        self.running: asyncio.Future[None] | None = None
        self.crawler: Any = None

    async def open(self, settings: dict[str, Any]) -> None:
        """Start the crawl."""
        import scrapy
        from scrapy.crawler import CrawlerRunner

        opened = asyncio.Event()
        self.heads: dict[str, asyncio.Event] = {}

        class Commanded(scrapy.Spider):
            name = "commanded"

            async def start(self) -> Any:
                opened.set()
                for nothing in ():
                    yield nothing

        runner = CrawlerRunner(settings)
        self.crawler = runner.create_crawler(Commanded)
        self.crawler.signals.connect(self._stay, signal=scrapy.signals.spider_idle)
        self.crawler.signals.connect(self._head, signal=scrapy.signals.headers_received)
        # Returns a Deferred: runners of coroutines exist since Scrapy 2.14.
        self.running = runner.crawl(self.crawler).asFuture(asyncio.get_running_loop())
        waiting = asyncio.create_task(opened.wait())
        await asyncio.wait([self.running, waiting], return_when="FIRST_COMPLETED")
        assert opened.is_set(), self.running

    def _stay(self) -> None:
        from scrapy.exceptions import DontCloseSpider

        raise DontCloseSpider

    def _head(self, request: Any) -> None:
        from scrapy.exceptions import StopDownload

        if (stop := request.meta.get("stop")) is not None:
            raise StopDownload(fail=stop)
        if (come := request.meta.get("head")) is not None:
            come.set()

    async def get(self, url: str, headers: dict[str, str], meta: dict[str, Any]) -> Any:
        """Send a request through the scheduler. Return its status and text."""
        import scrapy

        request = scrapy.Request(url, headers=headers, meta=meta, dont_filter=True)
        return await self._crawled(request)

    async def _crawled(self, request: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        request.callback = done.set_result
        request.errback = lambda failure: done.set_exception(failure.value)
        self.crawler.engine.crawl(request)
        del request
        return _told(await done)

    async def download(self, url: str, headers: dict[str, str], meta: dict[str, Any]) -> Any:
        """Request a download from the engine, as callbacks and pipelines do."""
        import scrapy

        return await self._downloaded(scrapy.Request(url, headers=headers, meta=meta))

    async def _downloaded(self, request: Any) -> Any:
        engine = self.crawler.engine
        if hasattr(engine, "download_async"):
            return _told(await engine.download_async(request))
        from scrapy.utils.defer import maybe_deferred_to_future  # before Scrapy 2.14

        return _told(await maybe_deferred_to_future(engine.download(request)))

    async def twice(self, url: str) -> Any:
        """Send a request through the scheduler, and download it once more."""
        import scrapy

        request = scrapy.Request(url, dont_filter=True)
        await self._crawled(request)
        while request in self.crawler.engine._slot.inprogress:  # Scrapy requires one at a time
            await asyncio.sleep(0)
        return await self._downloaded(request)

    async def begin(self, way: str, url: str, meta: dict[str, Any]) -> None:
        """Send a request and return when the response head has arrived."""
        come = asyncio.Event()
        asked = asyncio.ensure_future(getattr(self, way)(url, {}, {**meta, "head": come}))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting = asyncio.ensure_future(come.wait())
        await asyncio.wait([asked, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert come.is_set(), "it ended before its head came"

    async def run(self, source: str, folder: str, environ: dict[str, str]) -> list[Any]:
        """Run the `Spider` of a source as a separate crawl, in a folder. Return its output."""
        import logging

        from scrapy.crawler import CrawlerRunner

        # One run at a time, since these are global to the process.
        os.chdir(folder)
        os.environ.update(environ)
        said: list[Any] = []
        space = {"__name__": "spider", "print": lambda line, **_: said.append(json.loads(line))}
        # Scrapy inspects the source of callbacks.
        file = Path(folder) / f"spider{time.monotonic_ns()}.py"
        file.write_text(source, "utf-8")
        exec(compile(source, file, "exec"), space)
        handler = logging.FileHandler(Path(folder) / "log", mode="w")
        logging.getLogger().addHandler(handler)
        logging.getLogger("gatekeeper").setLevel(logging.INFO)
        try:
            await CrawlerRunner({}).crawl(space["Spider"]).asFuture(asyncio.get_running_loop())
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()
        return said

    async def alive(self) -> dict[str, int]:
        """Count the objects of the package in this process, by class."""
        loop = asyncio.get_running_loop()
        for _ in range(1_000):  # a loop drops its cancelled timers when they are many
            loop.call_later(3_600, int).cancel()
        for _ in range(5):
            await asyncio.sleep(0)
            gc.collect()
        kinds = [type(one) for one in gc.get_objects()]
        return Counter(
            kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("gatekeeper")
        )

    @property
    def gate(self) -> Any:
        from gatekeeper.integrations.scrapy_requests import ScrapyCrawl

        return ScrapyCrawl.of(self.crawler).gate

    async def ask(self, name: str, *given: Any) -> Any:
        """Call a method of the gate."""
        return await getattr(self.gate, name)(*given)

    async def stats(self) -> Any:
        """Return the gate's stats, or None once the crawl has closed it."""
        return None if self.gate is None else self.gate.stats()

    async def close_gate(self) -> None:
        """Close the gate during the crawl."""
        from gatekeeper.integrations.scrapy_requests import ScrapyCrawl

        await ScrapyCrawl.of(self.crawler).close()

    async def close(self) -> dict[str, Any]:
        """End the crawl and return its stats."""
        if self.running is None:
            return {}
        if not self.running.done():
            await self.crawler.stop_async() if hasattr(self.crawler, "stop_async") else None
            if not hasattr(self.crawler, "stop_async"):
                self.crawler.stop()
        await self.running
        stats: dict[str, Any] = self.crawler.stats.get_stats()
        return {name: value for name, value in stats.items() if isinstance(value, int | str)}


def _told(response: Any) -> tuple[int, str]:
    return response.status, response.text


def _as_told(error: BaseException) -> BaseException:
    from gatekeeper import GatekeeperError

    if isinstance(error, GatekeeperError):
        error.__dict__.pop("request", None)  # it refers to the crawl
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    kind = type(error)
    return WorkerFailed(f"{kind.__module__}.{kind.__qualname__}: {error}")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    crawl, tasks = _Crawl(), dict[int, asyncio.Task[None]]()

    async def act(number: int, name: str, given: Any) -> None:
        try:
            answer = number, None, await getattr(crawl, name)(*given)
        except Exception as error:  # noqa: BLE001 - raised in the test
            answer = number, _as_told(error), None
        await _send(writer, answer)

    try:
        while True:
            number, name, given = await _receive(reader)
            if name == "names":
                _names.update(given[0])
                _ports.update(given[1])
            elif name == "cancel":
                if (task := tasks.get(given[0])) is not None:
                    task.cancel()
            else:
                tasks[number] = asyncio.create_task(act(number, name, given))
                tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number))
    except asyncio.IncompleteReadError:
        for task in tasks.values():
            task.cancel()
        await crawl.close()
        writer.close()


def main(path: str) -> None:
    """Serve until the input ends."""
    _patch_sockets()
    from scrapy.utils.reactor import install_reactor

    install_reactor("twisted.internet.asyncioreactor.AsyncioSelectorReactor")
    from twisted.internet import reactor as installed

    reactor: Any = installed

    async def serve() -> None:
        server = await asyncio.start_unix_server(_serve, path)
        print(gatekeeper.__file__, flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()
        reactor.stop()

    begin: Callable[[], Any] = lambda: asyncio.ensure_future(serve())  # noqa: E731
    reactor.callWhenRunning(begin)
    reactor.run()
