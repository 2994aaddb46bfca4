"""`gatekeeper healthcheck`: for HEALTHCHECK and probes; asks the running sidecar."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import socket
import ssl

from gatekeeper.cli.common import DENIED, NAME, OK, Subparsers, add_command, json_text, load
from gatekeeper.config import ServerConfig

__all__ = ["add_parser", "connection_to", "run", "where"]

TIMEOUT = 2.0


def add_parser(subparsers: Subparsers) -> None:
    """Put `healthcheck` among the commands."""
    parser = add_command(
        subparsers,
        "healthcheck",
        summary="ask the running sidecar whether it is alive",
        example=f"{NAME} healthcheck --ready",
        run=run,
    )
    parser.add_argument("--ready", action="store_true", help="ask whether it takes questions")
    parser.add_argument("--host", help="where it listens, if not as configured")
    parser.add_argument("--port", type=int, help="its port, if not as configured")
    parser.add_argument("--socket", metavar="PATH", help="its unix socket")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if it answers 200, 1 if not."""
    settings = load(
        args, server__host=args.host, server__port=args.port, server__socket=args.socket
    )
    path = "/readyz" if args.ready else "/healthz"
    try:
        status = ask(settings.config.server, path)
    except OSError as error:
        why = str(error.strerror or error)
        asked = where(settings.config.server)
        told = {"path": path, "status": None, "error": why, "asked": asked}
        print(json_text(told) if args.json else f"{path}: no answer from {asked} ({why})")
        return DENIED
    if args.json:
        print(json_text({"path": path, "status": status}))
    else:
        print(f"{path}: {status}")
    return OK if status == http.client.OK else DENIED


def where(server: ServerConfig) -> str:
    """The address at which a sidecar with these settings is asked, for people."""
    if server.socket is not None:
        return f"unix:{server.socket}"
    host = _reachable(server.host)
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def ask(server: ServerConfig, path: str) -> int:
    """The status of a GET to our own server. Raises OSError when it can't be had."""
    connection = connection_to(server)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(str(error) or type(error).__name__) from error
    finally:
        connection.close()


def connection_to(
    server: ServerConfig, context: ssl.SSLContext | None = None
) -> http.client.HTTPConnection:
    """A connection to the sidecar with these settings, not opened yet. Without a `context` its
    certificate is not looked at: ask it nothing that a secret goes with."""
    if server.socket is not None:
        return _UnixConnection(server.socket)
    host = _reachable(server.host)
    if server.tls_cert is None:
        return http.client.HTTPConnection(host, server.port, timeout=TIMEOUT)
    # Our own certificate, on our own machine: only whether it answers is asked here.
    if context is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, server.port, timeout=TIMEOUT, context=context)


def _reachable(host: str) -> str:
    """An address to dial for an address to listen on: `0.0.0.0` means this machine too."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)
