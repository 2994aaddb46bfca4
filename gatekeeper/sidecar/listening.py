"""The sockets of the service: its own, or those that systemd hands over."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError

__all__ = [
    "UNIX",
    "activated_sockets",
    "addresses",
    "close_own",
    "describe",
    "notify",
    "open_sockets",
    "open_to_others",
]

UNIX = "unix:"
"""How the place of a unix socket begins, where it is shown."""
_FIRST_FD = 3  # SD_LISTEN_FDS_START
_HOLD = getattr(os, "O_PATH", None)
"""Opens a file for nothing but its identity; Linux has it."""


class _Named(socket.socket):
    """A unix socket that knows which file is its own: another may come to stand there.

    Device and inode tell them apart. An inode's number can be given to the next file as
    soon as nobody has the old one, so it is held open until then.
    """

    def bind_to(self, path: Path) -> None:
        """Bind, for the owner alone from the first moment on (T5). Raises OSError."""
        # The mode comes from the umask: chmod alone would leave a moment for others.
        before = os.umask(0o177)
        try:
            self.bind(str(path))
        finally:
            os.umask(before)
        self._path = path
        self._file = _identity(path)
        self._held = -1 if _HOLD is None else os.open(path, _HOLD | os.O_NOFOLLOW)

    def take_away(self) -> None:
        """Remove the file if it is still ours: a successor may listen at this path."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._file:
                self._path.unlink()
        if self._held != -1:
            os.close(self._held)
            self._held = -1


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def open_sockets(server: ServerConfig) -> list[socket.socket]:
    """Bound sockets for the configuration. Raises ConfigError saying what is in the way."""
    if server.socket is not None:
        return [_unix(Path(server.socket))]
    try:
        found = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"server.host: {server.host}: {error.strerror}") from error
    # A free port can't be the same one for two addresses, so one address it is.
    wanted = found[:1] if server.port == 0 else found
    sockets: list[socket.socket] = []
    try:
        sockets.extend(_tcp(family, address) for family, _, _, _, address in wanted)
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(_in_the_way(server, error)) from error
    return sockets


def _in_the_way(server: ServerConfig, error: OSError) -> str:
    remedy = "--port or server.port changes it"
    if error.errno == errno.EACCES:
        remedy = "this user needs a port above 1023, or CAP_NET_BIND_SERVICE"
    elif error.errno == errno.EADDRINUSE:
        remedy = f"another one may be running, {remedy}"
    return f"{server.host} port {server.port}: {error.strerror}; {remedy}"


def _tcp(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _unix(path: Path) -> socket.socket:
    _remove_stale(path)
    sock = _Named(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind_to(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"server.socket: {path}: {error.strerror or error}") from error
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on; anything else in the way is an error."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"server.socket: {path} exists and is no socket; remove it, or name another path "
            "with --socket or server.socket"
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink()
    else:
        raise ConfigError(
            f"server.socket: {path}: another process listens there; stop it, or name another "
            "path with --socket or server.socket"
        )
    finally:
        probe.close()


def close_own(sockets: list[socket.socket]) -> None:
    """Close what `open_sockets` made, and take a unix socket's own name away."""
    for sock in sockets:
        if isinstance(sock, _Named):
            sock.take_away()
        sock.close()


def activated_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets of LISTEN_FDS, if they are meant for this process (sd_listen_fds)."""
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found = []
    for number in range(_FIRST_FD, _FIRST_FD + int(count)):
        os.set_inheritable(number, False)
        found.append(socket.socket(fileno=number))
    return found


def notify(message: str, environ: MutableMapping[str, str]) -> None:
    """Tell the service manager, where there is one (sd_notify); never fails."""
    where = environ.get("NOTIFY_SOCKET")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(address)
            sock.sendall(message.encode())
        except OSError:
            return


def addresses(sockets: list[socket.socket]) -> list[tuple[str, int]]:
    """Address and port of each TCP socket."""
    return [sock.getsockname()[:2] for sock in sockets if sock.family != socket.AF_UNIX]


def open_to_others(sockets: list[socket.socket]) -> str | None:
    """A unix socket among them to which another user than its owner may connect (T5).

    That takes the right to write to its file (unix(7)); a name in the abstract namespace has
    no file, and no rights. Ours are made with mode 0600; systemd's have 0666 unless told.
    """
    for sock in sockets:
        if sock.family != socket.AF_UNIX:
            continue
        name = sock.getsockname()
        if not name or isinstance(name, bytes) or name.startswith("\0"):
            shown = name.decode(errors="replace") if isinstance(name, bytes) else name
            return f"{UNIX}{shown.replace(chr(0), '@')}, which has no file,"
        try:
            mode = stat.S_IMODE(Path(name).stat().st_mode)
        except OSError as error:
            return f"{UNIX}{name} ({error.strerror})"
        if mode & 0o022:
            return f"{UNIX}{name} (mode {mode:04o})"
    return None


def describe(sock: socket.socket, server: ServerConfig) -> tuple[str, str]:
    """Where a socket listens, as a URL or path, and a curl line to try it."""
    scheme = "http" if server.tls_cert is None else "https"
    if sock.family == socket.AF_UNIX:
        path = sock.getsockname()
        where, base = f"{UNIX}{path}", f"{scheme}://localhost"
        at = f"--unix-socket {shlex.quote(path)} {base}"
    else:
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        # In brackets curl would see a range of URLs.
        where = base = f"{scheme}://{host}:{port}"
        at = f"-g {base}" if "[" in host else base
    query = "--data-urlencode url=https://www.wikipedia.org/"
    return where, f"curl -sG{_credentials(server)} {at}/v1/check {query}"


def _credentials(server: ServerConfig) -> str:
    """What curl has to be given beside the address; no token stands there itself."""
    options = ""
    if server.tls_cert is not None:
        options += " -k"  # our own certificate, which may be for another name of this machine
    if server.token_file is not None:
        first = f"sed '/^#/d;/^$/d;s/.*://;q' {shlex.quote(server.token_file)}"
        options += f' -H "Authorization: Bearer $({first})"'
    elif server.tls_client_ca is not None:
        options += " --cert CLIENT.pem --key CLIENT.key"
    return options
