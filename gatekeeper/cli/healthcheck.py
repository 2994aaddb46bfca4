"""`gatekeeper healthcheck`: ask the running sidecar for its health, for HEALTHCHECK and probes.

The module also has the options that name the sidecar of this machine, and the client for it.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import socket
import ssl
from contextlib import closing
from pathlib import Path

from gatekeeper.cli import CommandParser, integer, load
from gatekeeper.config import ServerConfig
from gatekeeper.terminal import DENIED, NAME, OK, json_text
from gatekeeper.urls import bracketed

EXAMPLE = f"{NAME} healthcheck --ready"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `healthcheck`."""
    parser.option("--ready", "check that it is ready for requests")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if the sidecar answers 200, 1 if not."""
    server = load(args).config.server
    path = "/readyz" if args.ready else "/healthz"
    try:
        status, _ = get_from(server, path)
    except OSError as error:
        reason = error.strerror or str(error)
        result = {"path": path, "status": None, "error": reason, "asked": address_of(server)}
        print(json_text(result) if args.json else f"{path}: {no_answer(server, error)}")
        return DENIED
    print(json_text({"path": path, "status": status}) if args.json else f"{path}: {status}")
    return OK if status == http.client.OK else DENIED


# --- the sidecar of this machine -------------------------------------------------------------

TIMEOUT = 2.0


def add_address(parser: CommandParser) -> None:
    """Add --host, --port and --socket."""
    option = parser.option
    option("--host HOST", "its address, if not as configured", dest="server.host")
    option("--port PORT", "its port, if not as configured", type=integer, dest="server.port")
    option("--socket PATH", "its unix socket", dest="server.socket")


def address_of(server: ServerConfig) -> str:
    """Return, for people, the address at which a sidecar with these settings is reached."""
    if server.socket is not None:
        return f"unix:{server.socket}"
    host = _connectable(server.host)
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{bracketed(host)}:{server.port}"


def no_answer(server: ServerConfig, error: OSError) -> str:
    """Return a sentence for people about a sidecar that gave no response."""
    why = error.strerror or str(error)
    return f"no answer from {address_of(server)} ({why}); is `{NAME} serve` running there?"


def get_from(
    server: ServerConfig, path: str, *, token: str | None = None, certified: bool = False
) -> tuple[int, bytes]:
    """Send a GET request, and return the status and the body. Raises OSError if none comes.

    With `certified` the server must present the configured certificate; required with a `token`.
    """
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with closing(_connection_to(server, certified=certified)) as connection:
            if server.socket is not None:
                connection.sock.connect(server.socket)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
    except OSError:  # that of a wrong certificate is a ValueError as well
        raise
    except (http.client.HTTPException, ValueError) as error:  # ValueError: no name of a host
        raise OSError(str(error) or type(error).__name__) from error


def _connection_to(server: ServerConfig, *, certified: bool) -> http.client.HTTPConnection:
    if server.socket is not None:
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(TIMEOUT)
        return connection
    host = _connectable(server.host)
    if server.tls_cert is None:
        return http.client.HTTPConnection(host, server.port, timeout=TIMEOUT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate need not name an address of this machine
    if certified:  # by this very certificate, the first of the file, whoever issued it
        pem = Path(server.tls_cert).read_text("ascii", "ignore")
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        leaf, end, _ = pem.partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=leaf + end)
    else:
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, server.port, timeout=TIMEOUT, context=context)


def _connectable(host: str) -> str:
    """Return the address to connect to for a listening address; `0.0.0.0` is this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"
