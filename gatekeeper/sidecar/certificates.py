"""The certificate of the listeners, which is renewed at the same path every few weeks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.checks import load_pair, tls_context

__all__ = ["Certificates"]

_OWN = ("tls_cert", "tls_key")
_SETTINGS = (*_OWN, "tls_client_ca")


class Certificates:
    """The TLS context of the open sockets, and what its files held when they were read.

    `context` is None without TLS. Raises ConfigError.
    """

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._seen = _digests(server)
        self.context = tls_context(server)

    def renewal(self, server: ServerConfig) -> Certificates | None:
        """What the same paths hold now, loaded and found right; None where nothing differs.

        Paths that `server` changes are not looked at: they need a restart. Raises
        ConfigError.
        """
        if any(getattr(server, name) != getattr(self._server, name) for name in _SETTINGS):
            return None
        if _digests(server) == self._seen:
            return None
        return Certificates(server)

    def take_over(self, new: Certificates) -> tuple[list[str], list[str]]:
        """Show the new certificate from the next connection on.

        Returns the settings whose files are in force now, and those that need a restart: a
        context takes further authorities, but never lets one go. Raises ConfigError.
        """
        server, before, now = self._server, self._seen, new._seen
        changed = [name for name in _SETTINGS if before.get(name) != now.get(name)]
        own = [f"server.{name}" for name in changed if name in _OWN]
        left = [f"server.{name}" for name in changed if name not in _OWN]
        if own and self.context is not None and server.tls_cert is not None:
            load_pair(self.context, server.tls_cert, server.tls_key or server.tls_cert)
            self._seen = before | {name: now[name] for name in _OWN}
        return own, left


def _digests(server: ServerConfig) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in _SETTINGS:
        path = getattr(server, name)
        if path is not None:
            try:
                found[name] = hashlib.sha256(Path(path).read_bytes()).digest()
            except OSError as error:
                raise ConfigError(f"server.{name}: {path}: {error.strerror}") from error
    return found
