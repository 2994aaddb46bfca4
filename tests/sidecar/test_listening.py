"""Sockets: modes, stale files, sockets handed over, messages to the service manager."""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import listening
from gatekeeper.sidecar.routes.hosts import ROUTES
from gatekeeper.sidecar.routing import Call


@pytest.fixture
def path(socket_folder: Path) -> Path:
    return socket_folder / "s"


def opened(path: Path) -> socket.socket:
    [sock] = listening.open_sockets(ServerConfig(socket=str(path)))
    return sock


def test_t5_a_unix_socket_belongs_to_its_owner_alone(path: Path) -> None:
    with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closing_removes_the_socket_file(path: Path) -> None:
    opened(path).close()

    assert not path.exists()


def test_closing_does_not_remove_another_socket_at_the_path(path: Path) -> None:
    first = opened(path)
    path.rename(path.with_name("moved"))
    with opened(path):
        first.close()

        assert path.exists()


def test_closing_does_not_remove_the_socket_of_a_successor(path: Path) -> None:
    first, second = opened(path), socket.socket(socket.AF_UNIX)
    path.unlink()
    with second:
        second.bind(str(path))
        first.close()  # its inode is in use until then, so the other file has another number
        assert path.exists()
        first.close()  # as at the end of a server that has drained
        assert path.exists()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as of a process that was killed

    with opened(path) as sock:
        assert sock.getsockname() == str(path)


def test_a_socket_in_use_is_refused_and_not_replaced(path: Path) -> None:
    message = r"another process listens there; stop it, .*--socket"
    with opened(path), pytest.raises(ConfigError, match=message):  # its service may be starting
        opened(path)


def test_a_file_at_the_path_of_the_socket_is_refused_unchanged(path: Path) -> None:
    path.write_text("mine", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"not a socket; remove it, .*--socket"):
        opened(path)
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            listening.open_sockets(ServerConfig(port=port))


def test_a_port_is_in_use_as_soon_as_it_is_opened() -> None:
    # Two sockets may be bound to one port until one of them listens.
    [sock] = listening.open_sockets(ServerConfig(port=0))
    with sock:
        port = listening.addresses([sock])[0][1]
        with pytest.raises(ConfigError, match=f"port {port}: .*--port or server.port"):
            listening.open_sockets(ServerConfig(port=port))


def test_port_0_takes_a_free_port() -> None:
    [sock] = listening.open_sockets(ServerConfig(port=0))
    with sock:
        assert listening.addresses([sock])[0][1] > 0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"},
    ],
)
def test_sockets_activated_for_another_process_are_not_used(environ: dict[str, str]) -> None:
    assert listening.activated_sockets(environ) == []
    assert environ == {}


@pytest.mark.parametrize("kind", ["datagram", "file", "closed"])
def test_an_activated_socket_that_cannot_accept_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "datagram":
        number = socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()
    else:
        number = os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)
    monkeypatch.setattr(listening, "FIRST_FD", number)
    if kind == "closed":
        os.close(number)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    with pytest.raises(ConfigError, match=r"LISTEN_FDS: .* is no stream socket; .*ListenStream="):
        listening.activated_sockets(environ)
    if kind == "file":
        os.close(number)


def test_the_service_manager_is_notified(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        listening.notify("READY=1", {"NOTIFY_SOCKET": str(path)})

        assert manager.recv(100) == b"READY=1"


def test_a_service_manager_that_is_gone_is_no_error(path: Path) -> None:
    listening.notify("READY=1", {"NOTIFY_SOCKET": str(path)})


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o606, 0o622])
def test_t5_a_socket_that_was_handed_over_is_judged_by_its_files_mode(
    path: Path, mode: int
) -> None:
    with opened(path) as sock:
        assert listening.open_to_others([sock]) is None
        path.chmod(mode)
        assert listening.open_to_others([sock]) == f"unix:{path} (mode {mode:04o})"
        path.unlink()
        assert listening.open_to_others([sock]) == f"unix:{path} (No such file or directory)"


def test_t5_an_abstract_unix_socket_counts_as_open_to_others() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"\0gatekeeper-test-{os.getpid()}")
        assert "has no file" in (listening.open_to_others([sock]) or "")


def test_a_tcp_socket_has_no_file_mode_to_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert listening.open_to_others([sock]) is None


async def test_a_client_that_hangs_up_at_the_grant_logs_no_error(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a client could fill the log with tracebacks."""

    async def gone(*_: object, **__: object) -> None:
        raise ConnectionResetError("the client hung up while its lease was granted")

    service = await serve()
    monkeypatch.setattr(service.service.leases, "acquire", gone)
    with suppress(aiohttp.ClientError):
        await service.post("/v1/leases", {"url": "http://a.test/", "wait": 1})
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


async def test_an_internal_error_in_the_middle_of_a_response_is_logged(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client only sees that the connection breaks, so nothing else would show the error."""

    async def half(_service: object, call: Call) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(call.request)
        await response.write(b"half of it")
        raise RuntimeError("a mistake of ours")

    service = await serve()
    route = replace(ROUTES[0], handler=half)
    monkeypatch.setattr(service.service.router, "find", lambda *_: (route, {}))
    with suppress(aiohttp.ClientError):
        await service.get("/v1/hosts")
    errors = [one for one in caplog.records if one.levelname == "ERROR"]
    assert [str(one.exc_info[1]) for one in errors if one.exc_info] == ["a mistake of ours"]


def test_a_system_that_limits_no_open_files_lets_clients_have_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Windows, where `gatekeeper fetch` asks too."""
    monkeypatch.setitem(sys.modules, "resource", None)
    assert listening.raise_file_limit().clients > 10_000
