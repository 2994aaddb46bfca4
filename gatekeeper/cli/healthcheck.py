"""`gatekeeper healthcheck`: for HEALTHCHECK and probes; asks the running sidecar.

How a call names the sidecar of this machine, and how that is asked, stands here, too.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import socket
import ssl

from gatekeeper.cli import DENIED, NAME, OK, json_text, load, whole
from gatekeeper.config import ServerConfig

EXAMPLE = f"{NAME} healthcheck --ready"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `healthcheck`."""
    parser.add_argument("--ready", action="store_true", help="ask whether it takes questions")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if it answers 200, 1 if not."""
    server = server_of(args)
    path = "/readyz" if args.ready else "/healthz"
    try:
        status, _ = ask(server, path)
    except OSError as error:
        why, asked = str(error.strerror or error), where(server)
        told = {"path": path, "status": None, "error": why, "asked": asked}
        text = f"{path}: no answer from {asked} ({why}); is `{NAME} serve` running there?"
        print(json_text(told) if args.json else text)
        return DENIED
    print(json_text({"path": path, "status": status}) if args.json else f"{path}: {status}")
    return OK if status == http.client.OK else DENIED


# --- the sidecar of this machine -------------------------------------------------------------

TIMEOUT = 2.0


def add_address(parser: argparse.ArgumentParser) -> None:
    """--host, --port, --socket."""
    parser.add_argument("--host", help="where it listens, if not as configured")
    parser.add_argument("--port", type=whole, help="its port, if not as configured")
    parser.add_argument("--socket", metavar="PATH", help="its unix socket")


def server_of(args: argparse.Namespace) -> ServerConfig:
    """The settings of the sidecar that a call means. Raises ConfigError."""
    settings = load(
        args, server__host=args.host, server__port=args.port, server__socket=args.socket
    )
    return settings.config.server


def where(server: ServerConfig) -> str:
    """The address at which a sidecar with these settings is asked, for people."""
    if server.socket is not None:
        return f"unix:{server.socket}"
    host = _reachable(server.host)
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def ask(
    server: ServerConfig, path: str, *, token: str | None = None, certified: bool = False
) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError where there is no answer.

    `certified`: only who has the configured certificate is asked, as for a `token` it has to be.
    """
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection = _connection_to(server, certified=certified)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise OSError(str(error) or type(error).__name__) from error
    finally:
        connection.close()


def _connection_to(server: ServerConfig, *, certified: bool) -> http.client.HTTPConnection:
    if server.socket is not None:
        return _UnixConnection(server.socket)
    host = _reachable(server.host)
    if server.tls_cert is None:
        return http.client.HTTPConnection(host, server.port, timeout=TIMEOUT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # an address of this machine need not stand in it
    if certified:
        context.load_verify_locations(server.tls_cert)
    else:
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
