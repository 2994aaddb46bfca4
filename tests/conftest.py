"""Fixtures and hooks for all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aioresponses.core
import pytest
from aiohttp import ClientResponse, StreamReader
from aiohttp.client_proto import ResponseHandler
from aioresponses import aioresponses as Mocked
from hypothesis import HealthCheck, settings

from gatekeeper import urls
from gatekeeper.clock import VirtualClock
from gatekeeper.gate import decider
from tests import processes
from tests.effort import LONG
from tests.internet.fixtures import clock, internet, net, virtual_internet

if sys.platform != "win32":
    import resource

# A busy machine is not a failure: examples have no deadline, and drawing them may be slow.
settings.register_profile(
    "patient",
    settings(),
    deadline=None,
    max_examples=100 if LONG else 40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

__all__ = ["clock", "internet", "mocked", "net", "virtual_internet"]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment of all tests and their processes, however pytest was started."""
    _hear_signals()
    _open_many_files()
    for name in list(os.environ):
        if name.lower() in _SURROUNDINGS or name.startswith("GATEKEEPER_"):
            del os.environ[name]
    os.environ["SSL_CERT_FILE"] = str(_NOBODY)
    _keep_bytecode(config)
    processes.install()


_SURROUNDINGS = (
    *("http_proxy", "https_proxy", "ws_proxy", "wss_proxy", "all_proxy", "no_proxy"),
    *("force_color", "no_color"),
)
"""Variables of the developer's environment to remove: tests contact only loopback, not a proxy."""

_NOBODY = Path(__file__).parent / "internet" / "nobody.pem"
"""The only authority that a default TLS context trusts, and it issued nothing.

Reading the hundred and more of the system takes each process, and each context, 35 ms.
"""


def _hear_signals() -> None:
    """Restore signal handlers.

    A shell without job control starts `pytest &` with SIGINT ignored, and `nohup` with SIGHUP
    ignored. Child processes inherit that, and would ignore a test's signals.
    """
    if sys.platform == "win32":
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _open_many_files() -> None:
    """Raise the limit of open files: a fake internet of a thousand hosts needs over 1,024."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < _FILES:
            many = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many), hard))


_FILES = 8192


def _keep_bytecode(config: pytest.Config) -> None:
    """Write bytecode to pytest's cache if it may not be written beside the sources.

    The suite starts hundreds of interpreters, including its workers. Without bytecode each
    compiles everything that it imports, which takes longer than most tests.
    """
    cache = getattr(config, "cache", None)
    if sys.dont_write_bytecode and sys.pycache_prefix is None and cache is not None:
        folder = str(cache.mkdir("bytecode"))
        if not os.listdir(folder):
            _link_bytecode(folder)
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _link_bytecode(folder: str) -> None:
    """Link the installed packages' bytecode there: Python no longer looks beside their sources."""
    ending = f".{sys.implementation.cache_tag}.pyc"
    rooms = {room for room in sys.path if room.endswith("site-packages")}
    for room in (sysconfig.get_path("stdlib"), *rooms):
        for path, _, names in os.walk(room):
            if path.endswith("__pycache__"):
                there = folder + os.path.dirname(path)
                with contextlib.suppress(OSError):
                    os.makedirs(there, exist_ok=True)
                    for name in names:
                        if name.endswith(ending):
                            os.symlink(f"{path}/{name}", f"{there}/{name}")


def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than processors: many tests wait for processes and browsers, and each
    worker collects all tests."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Exempt the objects of the collected tests from garbage collection.

    They are half a million objects. Creating them takes a seventh longer with the collector on, and
    each `gc.collect()` of a test would scan them for a quarter of a second. So nothing that is
    tested may end the exemption: after one test did, those that look for leaks took ten times as
    long.
    """
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.enable()
        exempt_all()
        gc.freeze = gc.unfreeze = lambda: None


_freeze = gc.freeze
_MANY_OBJECTS = 50_000


def exempt_all() -> None:
    """Exempt every object that is in use from garbage collection."""
    gc.collect()
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Exempt what tests leave once it is much: modules, caches, and what pytest notes of each test.

    After a thousand tests they are two hundred thousand objects, and a `gc.collect()` of a test
    takes a third of a second. It is done between two modules, so that no fixture of a module is
    exempt while a test looks for leaks.
    """
    try:
        return (yield)
    finally:
        between = nextitem is not None and nextitem.path != item.path
        if between and len(gc.get_objects()) > _MANY_OBJECTS:
            exempt_all()


def _import_share(config: pytest.Config) -> None:
    """Import a part of the test modules first, each worker another part.

    In a new clone pytest rewrites the assertions of each module, and keeps the bytecode. That takes
    nine seconds, which workers that import all modules in the same order would each spend.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    modules = sorted(Path(__file__).parent.rglob("test_*.py"))
    for path in modules[int(worker.removeprefix("gw")) :: count]:
        name = ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection will tell
            importlib.import_module(name)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what a run of everything leaves out."""
    if config.args_source is config.ArgsSource.TESTPATHS and "MITMPROXY_TESTS" not in os.environ:
        terminalreporter.write_line(
            "left out: tests/integrations/test_mitmproxy.py: it needs mitmproxy, Python 3.12 or "
            "newer, and MITMPROXY_TESTS=1, as in .ci/run"
        )


class _CompatResponse(ClientResponse):
    """A response made by aioresponses, with the arguments that aiohttp 3.14 requires."""

    def __init__(self, method: str, url: Any, **options: Any) -> None:
        options.setdefault("stream_writer", Mock(output_size=0))
        super().__init__(method.upper(), url, **options)


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mocked]:
    """aioresponses, for tests in which only status and body matter.

    It replaces `ClientSession._request`, so middlewares, traces, resolver and connector never
    run: redirects, leases and the guard are tested on `internet`. Its release 0.7.9 does not
    fit aiohttp 3.14, in which a response requires a `stream_writer`, and reading a body in pieces
    requires a protocol with a parser (or a limit so high that it is never needed).
    """
    monkeypatch.setattr(aioresponses.core, "ClientResponse", _CompatResponse)
    monkeypatch.setattr(
        aioresponses.core,
        "stream_reader_factory",
        lambda loop=None: StreamReader(ResponseHandler(loop=loop), limit=2**30, loop=loop),
    )
    with Mocked() as mock:
        yield mock


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """An empty folder whose name is short: a unix socket's path may have a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="gk") as directory:
        yield Path(directory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a crawl, which does not exist yet."""
    return tmp_path / "pages"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """A collection walks what other tests left, so that a long text or many tasks seem slow."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def dials(clock: VirtualClock) -> Iterator[Any]:
    """The connections that are made to dead hosts, in the virtual time of the test's `clock`."""
    from tests.politeness.dead import Dials

    with Dials.caught(clock) as dials:
        yield dials


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that read a URL raise an unexpected error if it contains %62oom."""

    def failing(read: Any) -> Any:
        def fails(text: str) -> Any:
            if "%62oom" in text:
                raise UnicodeDecodeError("punycode", b"", 0, 1, "injected")
            return read(text)

        return fails

    for module, name in (
        (urls, "split_ordinary"),
        (urls, "is_sent_as_written"),
        (decider, "is_sent_as_written"),
    ):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
