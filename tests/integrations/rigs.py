"""Rigs: adapters of the conformance suite to each integration's library."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import os
import socket
import ssl
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import msgspec

from gatekeeper import (
    Config,
    Decision,
    Deferred,
    Denied,
    GateClosed,
    Gatekeeper,
    InvalidURL,
    LeaseTimeout,
    Reason,
    RemoteGatekeeper,
    SyncGatekeeper,
    Verdict,
    urls,
)
from gatekeeper.robots import Rule
from gatekeeper.session import guarded_connector, send_once
from tests.conformance.ways import AGENT, Sidecar
from tests.integrations.scrapy_worker import Connection, Worker, WorkerFailed
from tests.internet import Fail, FakeInternet, certs

SCRAPY_PYTHON = os.environ.get("SCRAPY_PYTHON")
"""The Python of the environment with Scrapy, if it is another one: CI has one with the oldest
supported Scrapy. Only Scrapy is tested then."""


MITMPROXY_TESTS = os.environ.get("MITMPROXY_TESTS")
"""Set in an environment of Python 3.12 or newer with mitmproxy. Only mitmproxy is tested then."""
if MITMPROXY_TESTS:
    with warnings.catch_warnings():  # of what mitmproxy imports
        warnings.simplefilter("ignore")
        importlib.import_module("mitmproxy.tools.dump")


@dataclass
class Answer:
    """A response, independent of the library."""

    status: int
    text: str


class Rig:
    """A client of one library, with a gate in this process or a sidecar."""

    library: str
    error: str
    """The dotted name of the library's error for failed requests."""
    cancels = True
    """Whether a request can be cancelled."""
    guarded = True
    streams = True
    """Whether a response can be returned before its body has been read."""
    drops = True
    """Whether a response can be abandoned before its body has been read."""
    names = True
    """Whether a request can have a User-Agent of its own."""
    threads = False
    """Whether the library blocks, so that each request runs in a thread."""
    stops = True
    """Whether a request ends immediately when it is cancelled or dropped; otherwise it goes on and
    holds its host until it is done."""
    checks_certificates = True
    closes_gate = True
    """Whether its gate can be closed while it is in use."""
    gives_up = False
    """Whether a request that would wait too long fails immediately."""

    def __init__(self, internet: FakeInternet, config: Config, sidecar: Sidecar | None) -> None:
        self.internet = internet
        self.config = config
        self.sidecar = sidecar
        self.gate: Any = None

    @classmethod
    def base_error(cls) -> tuple[type[Exception], ...]:
        module, _, name = cls.error.rpartition(".")
        return (getattr(importlib.import_module(module), name),)

    async def start(self) -> None:
        """Open the gate and the client."""
        if self.threads:
            self.gate = await asyncio.to_thread(self._sync_gate)
            await asyncio.to_thread(self.open)
        else:
            self.gate = await self._gate().__aenter__()
            self.open()

    def _gate(self) -> Any:
        if self.sidecar is None:
            return Gatekeeper(AGENT, config=self.config, resolver=self.internet.resolver)
        return RemoteGatekeeper(self.sidecar.where, AGENT, config=self.config, patience=0.2)

    def _sync_gate(self) -> SyncGatekeeper:
        if self.sidecar is None:
            gate = SyncGatekeeper(AGENT, config=self.config, resolver=self.internet.resolver)
        else:
            gate = SyncGatekeeper.remote(
                self.sidecar.where, AGENT, config=self.config, patience=0.2
            )
        return gate.__enter__()

    async def stop(self) -> None:
        await self.close()
        await self.close_gate()

    async def close_gate(self) -> None:
        if self.threads:
            await asyncio.to_thread(self.gate.close)
        else:
            await self.gate.__aexit__(None, None, None)

    async def ask(self, name: str, *given: Any) -> Any:
        """Call a method of the gate."""
        if self.threads:
            return await asyncio.to_thread(getattr(self.gate, name), *given)
        return await getattr(self.gate, name)(*given)

    async def stats(self) -> Any:
        """Return the stats of the gate that grants the leases."""
        if self.sidecar is not None:
            return self.sidecar.gate.stats()
        if self.threads:
            return await asyncio.to_thread(self.gate.stats)
        return self.gate.stats()

    async def in_flight(self) -> int:
        """Return the number of open leases of the gate that grants them."""
        return int((await self.stats()).pacing.in_flight)

    # -- implemented by each integration

    def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def get(self, url: str, **headers: str) -> Answer:
        """Fetch a page, following redirects."""
        raise NotImplementedError

    async def get_beside(self, url: str) -> Answer:
        """Fetch a page by the library's second interface, if it has one."""
        return await self.get(url)

    async def begin(self, url: str) -> Any:
        """Return a response whose body has not been read."""
        raise NotImplementedError

    async def finish(self, response: Any) -> None:
        """Close a response."""
        raise NotImplementedError

    async def drop(self, url: str) -> None:
        """Drop the last reference to a response whose body has not been read."""
        response = await self.begin(url)
        assert await self.in_flight() == 1
        del response


class Httpx(Rig):
    library = "httpx"
    error = "httpx.RequestError"
    gives_up = True
    max_wait = 20.0
    transport_name, client_name = "PoliteTransport", "AsyncClient"

    def open(self) -> None:
        self.httpx = importlib.import_module(self.library)
        module = importlib.import_module(f"gatekeeper.integrations.{self.library}")
        self.transport = getattr(module, self.transport_name)(
            self.gate,
            resolver=self.internet.resolver,
            verify=self.internet.client_ssl,
            max_wait=self.max_wait,
        )
        client = getattr(self.httpx, self.client_name)
        self.client = client(transport=self.transport, follow_redirects=True)

    async def close(self) -> None:
        await self.client.aclose()

    async def get(self, url: str, **headers: str) -> Answer:
        response = await self.client.get(url, headers=named(headers))
        return Answer(response.status_code, response.text)

    async def begin(self, url: str) -> Any:
        return await self.client.send(self.client.build_request("GET", url), stream=True)

    async def finish(self, response: Any) -> None:
        await response.aclose()


class Httpx2(Httpx):
    library = "httpx2"
    error = "httpx2.RequestError"


class Blocking(Rig):
    """A client whose calls block, and run in threads."""

    cancels = False
    threads = True
    gives_up = True
    max_wait = 20.0
    client: Any

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)

    async def get(self, url: str, **headers: str) -> Answer:
        options = {"headers": named(headers), "timeout": 60}
        response = await asyncio.to_thread(self.client.get, url, **options)
        return Answer(response.status_code, response.text)

    async def finish(self, response: Any) -> None:
        await asyncio.to_thread(response.close)


class SyncHttpx(Blocking):
    library = "httpx"
    error = "httpx.RequestError"
    transport_name, client_name = "SyncPoliteTransport", "Client"
    open = Httpx.open

    async def begin(self, url: str) -> Any:
        request = self.client.build_request("GET", url)
        return await asyncio.to_thread(self.client.send, request, stream=True)


class SyncHttpx2(SyncHttpx):
    library = "httpx2"
    error = "httpx2.RequestError"


class Requests(Blocking):
    library = "requests"
    error = "requests.RequestException"

    def open(self) -> None:
        import requests

        from gatekeeper.integrations.requests import PoliteAdapter

        self.client = requests.Session()
        self.client.trust_env = False
        self.folder = tempfile.TemporaryDirectory()
        self.client.verify = str(Path(self.folder.name) / "authority.pem")
        certs.authority().cert_pem.write_to_path(self.client.verify)
        adapter = PoliteAdapter(self.gate, resolver=self.internet.resolver, max_wait=self.max_wait)
        for scheme in ("http://", "https://"):
            self.client.mount(scheme, adapter)

    async def close(self) -> None:
        await super().close()
        self.folder.cleanup()

    async def begin(self, url: str) -> Any:
        return await asyncio.to_thread(self.client.get, url, stream=True)


class ToolFailed(Exception):
    """An error result of a tool, with its text for the agent."""


class ToolDenied(Denied, ToolFailed):
    """An error result with a decision."""


class ToolDeferred(Deferred, ToolFailed):
    """An error result with a decision."""


class Mcp(Rig):
    """The SDK's own client. Error results of tools are converted back to exceptions."""

    library = "mcp"
    error = "tests.integrations.rigs.ToolFailed"
    streams = drops = names = False

    def open(self) -> None:
        connector = guarded_connector(
            self.config, resolver=self.internet.resolver, ssl=self.internet.client_ssl
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            headers={"User-Agent": AGENT},
            middlewares=(self.gate.middleware, send_once),
        )
        self.client: Any = None
        self.opened, self.ended = asyncio.Event(), asyncio.Event()
        # A client of the SDK must be opened and closed by the same task.
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        import mcp

        from gatekeeper.integrations.mcp import build

        async with mcp.Client(build(self.session, self.gate)) as self.client:
            self.opened.set()
            await self.ended.wait()

    async def close(self) -> None:
        await self.session.close()
        self.ended.set()
        await self.task

    async def get(self, url: str, **headers: str) -> Answer:
        assert not headers
        await self.opened.wait()
        found = await self.client.call_tool("fetch", {"url": url, "form": "raw"})
        page = found.structured_content
        if not found.is_error:
            return Answer(page["status"], page["content"])
        text = found.content[0].text
        if page is None:
            raise GateClosed(text) if "gate" in text else ToolFailed(text)
        decision = Decision(
            verdict=Verdict(page["verdict"]),
            reason=Reason(page["reason"]),
            url=page["url"],
            origin=urls.split(page["url"])[0],
            user_agent=page["user_agent"],
            rule=None if page["line"] is None else Rule(page["line"], "", "", ""),
            retry_at=page["retry_at"] and datetime.fromisoformat(page["retry_at"]),
            note=page["why"].partition(": blocked (")[2].removesuffix(")") or None,
        )
        raise (ToolDenied if decision.verdict is Verdict.DENY else ToolDeferred)(decision)


class Crawlee(Rig):
    """crawlee's HTTP client; whole crawls are in test_crawlee.py."""

    library = "crawlee"

    @classmethod
    def base_error(cls) -> tuple[type[Exception], ...]:
        """Crawlee has no common class for the errors of its clients."""
        from aiohttp import ClientError
        from crawlee.errors import ContextPipelineInterruptedError, RequestThrottledError

        return ContextPipelineInterruptedError, RequestThrottledError, ClientError

    def open(self) -> None:
        from gatekeeper.integrations.crawlee import PoliteHttpClient

        self.client = PoliteHttpClient(
            self.gate, resolver=self.internet.resolver, verify=self.internet.client_ssl
        )
        assert self.client.guarded

    async def close(self) -> None:
        await self.client.cleanup()

    async def get(self, url: str, **headers: str) -> Answer:
        response = await self.client.send_request(url, headers=named(headers))
        return Answer(response.status_code, (await response.read()).decode())

    async def begin(self, url: str) -> Any:
        stream = self.client.stream(url)
        await stream.__aenter__()
        return stream

    async def finish(self, response: Any) -> None:
        await response.__aexit__(None, None, None)


class Scrapy(Rig):
    """A crawl with the add-on, whose requests go through the scheduler. It opens its own gate."""

    library = "scrapy"
    worker: ClassVar[Worker | None] = None
    """The process of all crawls of this run, once it has started."""
    way = "get"
    max_wait = 20.0
    """Longer than any wait for a lease in a test."""
    guarded = False
    streams = False
    cancels = False  # a request can't be removed from the scheduler
    stops = False
    checks_certificates = False  # unless Scrapy is configured to
    gives_up = True
    closes_gate = False  # the crawl closes its gate after the last request

    @classmethod
    def base_error(cls) -> tuple[type[Exception], ...]:
        """Errors of connections in Scrapy and Twisted have no common class."""
        from scrapy.exceptions import IgnoreRequest

        return IgnoreRequest, WorkerFailed

    @classmethod
    async def connect(cls) -> Connection:
        """Create a crawl without starting it."""
        if Scrapy.worker is None:
            Scrapy.worker = await asyncio.to_thread(Worker, SCRAPY_PYTHON or sys.executable)
        crawl = Connection()
        await crawl.open(Scrapy.worker.path)
        return crawl

    async def start(self) -> None:
        self.crawl = await self.connect()
        where = {"GATEKEEPER_CONFIG": self.config}
        if self.sidecar is not None:
            where["GATEKEEPER_URL"] = self.sidecar.where
        settings = {
            "ADDONS": {"gatekeeper.integrations.scrapy.Addon": 500},
            "USER_AGENT": AGENT,
            "GATEKEEPER_MAX_WAIT": self.max_wait,
            "RETRY_ENABLED": False,
            "HTTPERROR_ALLOW_ALL": True,
            "TELNETCONSOLE_ENABLED": False,
            "LOG_ENABLED": bool(os.environ.get("SLOG")),
        }
        await self.crawl.call("open", settings | where)

    async def stop(self) -> None:
        await self.crawl.close()

    async def close(self) -> None:
        await self.crawl.call("close")

    async def close_gate(self) -> None:
        await self.crawl.call("close_gate")

    async def ask(self, name: str, *given: Any) -> Any:
        await self.tell_names()
        return await self.crawl.call("ask", name, *given)

    async def stats(self) -> Any:
        return await super().stats() if self.sidecar is not None else await self.crawl.call("stats")

    async def in_flight(self) -> int:
        found = await self.stats()
        return 0 if found is None else int(found.pacing.in_flight)

    async def get(self, url: str, **headers: str) -> Answer:
        await self.tell_names()
        return Answer(*await self.crawl.call(self.way, url, named(headers), {}))

    async def begin(self, url: str) -> Any:
        await self.tell_names()
        await self.crawl.call("begin", self.way, url, {"download_timeout": 0.5})

    async def finish(self, response: Any) -> None:
        """Let the response be read to its end."""

    async def drop(self, url: str) -> None:
        """Have a signal handler stop the download after the head."""
        await self.tell_names()
        with contextlib.suppress(WorkerFailed):
            await self.crawl.call(self.way, url, {}, {"stop": True})

    async def tell_names(self) -> None:
        errors = {Fail.NXDOMAIN: socket.EAI_NONAME, Fail.SERVFAIL: socket.EAI_AGAIN}
        names: dict[str, Any] = {}
        ports = {}
        for name, [step, *_] in self.internet.resolver.scripts.items():
            if isinstance(step, Fail):
                names[name] = int(errors[step])
                continue
            names[name] = [step] if isinstance(step, str) else list(step)
            for address in names[name]:
                ports[address, 80] = self.internet.port_of(address, 80)
        await self.crawl.tell("names", names, ports)


class ScrapyDownloads(Scrapy):
    """A crawl that requests pages by `engine.download_async`, as file pipelines do."""

    way = "download"
    cancels = closes_gate = True

    async def get_beside(self, url: str) -> Answer:
        await self.tell_names()
        return Answer(*await self.crawl.call("get", url, {}, {}))


class Mitmproxy(Rig):
    """aiohttp's client with mitmproxy as its proxy, which runs in this loop with our add-on.
    Problem documents of the proxy are converted back to errors."""

    library = "mitmproxy"
    error = "aiohttp.ClientError"
    streams = False  # a short body has passed the proxy before its client reads it
    gives_up = True
    max_wait = 20.0
    options: ClassVar[dict[str, Any]] = {}
    """Options of the add-on."""

    async def start(self) -> None:
        from mitmproxy.options import Options
        from mitmproxy.tools.dump import DumpMaster

        from gatekeeper.integrations.mitmproxy import PoliteProxy

        self.gate = await self._gate().__aenter__()
        self.proxy = PoliteProxy(
            self.gate, resolver=self.internet.resolver, max_wait=self.max_wait, **self.options
        )
        folder = authority_folder()
        trusted = str(Path(folder) / "sites.pem")
        certs.authority().cert_pem.write_to_path(trusted)
        master = self.master = DumpMaster(
            Options(
                confdir=folder,
                listen_host="127.0.0.1",
                listen_port=0,
                ssl_verify_upstream_trusted_ca=trusted,
            ),
            with_termlog=False,
            with_dumper=False,
        )
        up = asyncio.Event()
        master.addons.add(self.proxy, Running(up))
        self.running = asyncio.create_task(master.run())
        await up.wait()
        host, port, *_ = master.addons.get("proxyserver").listen_addrs()[0]
        self.address = f"http://{host}:{port}"
        self.certificate = str(Path(folder) / "mitmproxy-ca-cert.pem")
        trust = ssl.create_default_context(cafile=self.certificate)
        self.client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust), proxy=self.address
        )

    async def close(self) -> None:
        await self.client.close()

    async def stop(self) -> None:
        from gatekeeper.integrations.mitmproxy import close_connections

        await self.close()
        self.master.shutdown()
        await self.running
        await close_connections(self.master)
        await self.close_gate()

    async def get(self, url: str, **headers: str) -> Answer:
        async with await self._send(url, **headers) as response:
            return Answer(response.status, await response.text())

    async def begin(self, url: str) -> Any:
        return await self._send(url)

    async def _send(self, url: str, **headers: str) -> aiohttp.ClientResponse:
        response = await self.client.get(url, headers=named(headers))
        if response.headers.get("Content-Type") != "application/problem+json":
            if response.headers.get("Server", "").startswith("mitmproxy"):  # its error page
                raise aiohttp.ClientError(await response.text())
            return response
        document = await response.json(content_type=None)
        kind, detail = document["type"].rpartition(":")[2], document["detail"]
        if kind in ("denied", "deferred"):
            decision = msgspec.convert(document["decision"], Decision)
            assert response.headers["X-Gatekeeper-Decision-Id"] == decision.id
            raise (Denied if response.status == 403 else Deferred)(decision)
        errors = {
            "not-yet": lambda: LeaseTimeout(url, detail),
            "closing": lambda: GateClosed(detail),
            "invalid-url": lambda: InvalidURL(url, detail),
        }
        raise errors.get(kind, lambda: aiohttp.ClientError(f"{response.status} {detail}"))()

    async def finish(self, response: Any) -> None:
        response.close()

    async def drop(self, url: str) -> None:
        """Hang up: aiohttp's parser refers to a response whose body has not come."""
        response = await self.begin(url)
        assert await self.in_flight() == 1
        response.close()


class Running:
    """An add-on of mitmproxy that tells when it runs."""

    def __init__(self, up: asyncio.Event) -> None:
        self.up = up

    def running(self) -> None:
        self.up.set()


@functools.cache
def authority_folder() -> str:
    """The folder of the authority that mitmproxy makes once for all tests of this process."""
    folder = tempfile.TemporaryDirectory(prefix="gk")
    atexit.register(folder.cleanup)
    return folder.name


def named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


RIGS: list[Callable[..., Rig]] = [Httpx, Httpx2, SyncHttpx, SyncHttpx2, Requests, Mcp, Crawlee]
RIGS = [*([] if SCRAPY_PYTHON else RIGS), Scrapy, ScrapyDownloads]
RIGS = [Mitmproxy] if MITMPROXY_TESTS else RIGS
