"""Where the sidecar of this machine is, and a connection to it."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl

from gatekeeper.config import ServerConfig

__all__ = ["connection_to", "where"]

TIMEOUT = 2.0


def where(server: ServerConfig) -> str:
    """The address at which a sidecar with these settings is asked, for people."""
    if server.socket is not None:
        return f"unix:{server.socket}"
    host = _reachable(server.host)
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


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
