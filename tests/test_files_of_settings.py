"""Files that settings name: reading one neither blocks nor exhausts the memory."""

from __future__ import annotations

import ast
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gatekeeper
from gatekeeper.cli import main
from gatekeeper.config import MAX_FILE, Config, FetchConfig, ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.fetching.tls import trusted_by
from gatekeeper.sidecar.security import Certificates, read_tokens
from gatekeeper.signing import read_public, read_signing_key

OTHER = __file__
READERS: dict[str, Callable[[str], object]] = {
    "--config": Config.load,
    "fetch.ca_file": lambda path: trusted_by(FetchConfig(ca_file=path)),
    "server.token_file": read_tokens,
    "server.tls_cert": lambda path: Certificates(ServerConfig(tls_cert=path, tls_key=OTHER)),
    "server.tls_key": lambda path: Certificates(ServerConfig(tls_cert=path, tls_key=path)),
    "server.tls_client_ca": lambda path: Certificates(ServerConfig(tls_client_ca=path)),
    "identity.key": read_signing_key,
    "identity.key, public": read_public,
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    path.chmod(0o600)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a named pipe": (fifo, "it is a pipe or a device, not a file"),
    "a directory": (Path.mkdir, "Is a directory"),
    "an endless device": (
        lambda path: path.symlink_to("/dev/zero"),
        "it is a pipe or a device, not a file",
    ),
    "too long": (long, "it is longer than 4 MiB"),
    "absent": (lambda path: None, "No such file or directory"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", READERS)
def test_a_file_that_can_not_be_read_is_refused_with_the_reason(
    setting: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    make, why = KINDS[kind]
    make(path)
    with pytest.raises(ConfigError) as caught:
        READERS[setting](str(path))
    assert str(path) in str(caught.value)
    assert why in str(caught.value)


def test_a_socket_in_place_of_a_file_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="gk") as short, socket.socket(socket.AF_UNIX) as own:
        own.bind(f"{short}/s")
        for read in READERS.values():
            with pytest.raises(ConfigError, match="No such device or address"):
                read(f"{short}/s")


def test_the_null_device_is_an_empty_configuration() -> None:
    assert Config.load(os.devnull) == Config()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["serve", "check", "config check"])
def test_a_named_pipe_in_place_of_a_configuration_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    more = ["https://a.example/"] if command == "check" else []
    assert main([*command.split(), *more, "--config", str(tmp_path / "pipe")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/pipe: can't be read (it is a pipe" in said
    assert "give --config a readable TOML file" in said


# --- nothing else reads one ------------------------------------------------------------------

PACKAGE = Path(gatekeeper.__file__).parent
ELSEWHERE = {
    "clock.py": 1,  # the boot id of the system
    "config.py": 1,  # read_file itself
    "signing.py": 1,  # a key that is written
    "sidecar/held_leases.py": 2,  # the journal of leases: our own, beside the state
    "sidecar/pages/shell.py": 1,  # static files of the package
    "terminal.py": 2,  # the null device
}
"""Calls that open a file, by module, except in the storage, in the audit record, and in commands
and what they run."""


def opening(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called not in ("read_text", "read_bytes", "open"):
            continue  # writing every name out takes most of the time
        name = ast.unparse(node.func)
        path = name.endswith((".read_text", ".read_bytes")) or name == "os.open"
        if path or name == "open" or (name.endswith(".open") and "Path(" in name):
            yield node


def test_every_file_that_a_setting_names_is_read_by_one_function() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("audit/", "cli/", "crawl/", "sites/", "storage/")):
            calls = list(opening(ast.parse(path.read_text(encoding="utf-8"))))
            if calls:
                found[name] = len(calls)
    found["config.py"] -= 1  # the descriptor that `open` asks for
    assert found == ELSEWHERE
