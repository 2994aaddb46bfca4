"""`gatekeeper top`: the display of a running sidecar."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from gatekeeper.cli import main
from gatekeeper.cli.healthcheck import get_from
from gatekeeper.cli.top import refreshed, render
from gatekeeper.config import ServerConfig
from tests.processes import PYTHON, run

TOP = (PYTHON, "-m", "gatekeeper", "top")
TOLD: dict[str, Any] = {
    "overview": {
        "version": "1",
        "ready": True,
        "state": "serving",
        "now": "2026-11-22T12:00:00.5Z",
        "rates": {"allow": 1.25, "deny": None, "defer": 0.0},
        "waiting": 2,
        "oldest_wait": 61.0,
        "robots_ok": 3,
        "robots_failed": 1,
        "leases": 1,
        "overdue": 0,
        "expired": 4,
        "hosts": 9,
        "host_states": {"blocked": 1, "paused": 0, "busy": 1, "waiting": 0},
        "reload": {"ok": True},
    },
    "hosts": {
        "hosts": [
            {
                "host": "a.test",
                "state": "busy",
                "robots": "parsed",
                "interval": 2.0,
                "interval_source": "crawl-delay \x1b[31m2 s [bold]x[/bold]",
                "in_flight": 1,
                "waiting": 2,
                "allowed": 5,
                "denied": 0,
            }
        ]
    },
}


def text_of(told: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=140, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(render(told))
    return capture.get()


def test_top_shows_numbers_and_hosts_with_control_characters_escaped() -> None:
    text = text_of(TOLD)
    assert "1.2 allow, - deny" in text
    assert "waiting  2 (oldest 61 s)" in text
    assert "settings" not in text
    failed = TOLD | {"overview": TOLD["overview"] | {"reload": {"ok": False}}}
    assert "the last reload failed" in text_of(failed)
    assert "[bold]x[/bold]" in text
    assert "\x1b[31m2 s" not in text


def test_top_says_what_holds_a_host_up() -> None:
    (host,) = TOLD["hosts"]["hosts"]
    dead = host | {"state": "deferred", "why": "http://a.test: file: connect_failed"}
    states = TOLD["overview"]["host_states"] | {"deferred": 7}
    overview = TOLD["overview"] | {"host_states": states}
    text = " ".join(text_of({"overview": overview, "hosts": {"hosts": [dead]}}).split())
    assert "7 deferred" in text
    assert "connect_failed" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
def test_a_narrow_terminal_shows_whole_names_of_hosts(width: int) -> None:
    """The names were cut to three characters at 60 columns, and to seven at 80."""
    from rich.console import Console

    name = "www.example.org"
    host = TOLD["hosts"]["hosts"][0] | {"host": name, "interval_source": "crawl-delay 0.05 s " * 3}
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(TOLD | {"hosts": {"hosts": [host]}}, width))
    text = capture.get()
    assert name in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert ("source" in text, "denied" in text) == (width >= 120, width >= 80)


async def test_top_shows_a_running_sidecar(start: Any, tmp_path: Path) -> None:
    token = "t" * 32
    file = tmp_path / "tokens"
    file.write_text(token)
    file.chmod(0o600)
    sidecar = await start("--token-file", str(file), "--storage", "memory")
    port = sidecar.where.rpartition(":")[2]
    code, said = await run(*TOP, "--once", "--port", port, COLUMNS="140")
    assert code == 1
    assert "401" in said
    assert "GATEKEEPER_TOKEN" in said
    code, said = await run(*TOP, "--port", port, GATEKEEPER_TOKEN=token, COLUMNS="140")
    assert (code, "ready" in said, "decisions/s" in said) == (0, True, True), said
    code, said = await run(*TOP, "--json", "--port", port, GATEKEEPER_TOKEN=token)
    assert (code, json.loads(said)["overview"]["ready"]) == (0, True)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Callable[[trustme.LeafCert], int]]:
    """Start a server with a certificate in a thread, and return its port."""
    with ExitStack() as stack:

        def start(certificate: trustme.LeafCert) -> int:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            stack.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_address[1]

        yield start


@pytest.mark.parametrize("chain", ["leaf", "with its authority"])
def test_the_token_is_sent_to_the_configured_certificate_alone(
    answering: Callable[[trustme.LeafCert], int], tmp_path: Path, chain: str
) -> None:
    """An authority may have issued it, and the same authority issues those of others."""
    authority = trustme.CA()
    own, other = authority.issue_cert("own.test"), authority.issue_cert("other.test")
    file = tmp_path / "tls.pem"
    file.write_text("subject: Bj\u00f6rn\n", encoding="utf-8")
    own.cert_chain_pems[0].write_to_path(str(file), append=True)
    if chain != "leaf":
        authority.cert_pem.write_to_path(str(file), append=True)
    server = ServerConfig(tls_cert=str(file), port=answering(own))
    assert get_from(server, "/", token="t", certified=True) == (200, b"")
    server = ServerConfig(tls_cert=str(file), port=answering(other))
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        get_from(server, "/", token="t", certified=True)


@pytest.mark.parametrize(
    "where", [("--socket", "/nowhere.sock"), ("--host", "127.0.0.1", "--port", "1")]
)
def test_top_without_a_sidecar_says_what_healthcheck_says(
    capsys: pytest.CaptureFixture[str], where: tuple[str, ...]
) -> None:
    assert main(["healthcheck", *where]) == 1
    told = capsys.readouterr().out.removeprefix("/healthz: ")
    assert "is `gatekeeper serve` running there?" in told
    assert main(["top", "--once", *where]) == 1
    assert capsys.readouterr().out == told
    assert main(["top", "--json", *where]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": told.rstrip()}


def test_top_keeps_its_last_display_while_the_sidecar_is_away() -> None:
    from rich.console import Console

    away, display = ServerConfig(socket="/nowhere.sock"), render(TOLD)
    for _ in range(2):
        display = refreshed(away, None, display, 140)
    console = Console(width=140)
    with console.capture() as capture:
        console.print(display)
    lines = capture.get().splitlines()
    assert lines[0].startswith("out of date: no answer from unix:/nowhere.sock (No such file")
    assert lines[1].startswith("gatekeeper 1")
    assert "out of date" not in "".join(lines[1:])


def test_top_says_which_server_is_no_sidecar(
    answering: Callable[[trustme.LeafCert], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An empty response ended it with a traceback."""
    certificate = trustme.CA().issue_cert("own.test")
    file, settings = tmp_path / "tls.pem", tmp_path / "gatekeeper.toml"
    certificate.cert_chain_pems[0].write_to_path(str(file))
    key = tmp_path / "key.pem"
    certificate.private_key_pem.write_to_path(str(key))
    port = answering(certificate)
    settings.write_text(f'[server]\ntls_cert = "{file}"\ntls_key = "{key}"\nport = {port}\n')
    assert main(["top", "--once", "--config", str(settings)]) == 1
    said = f"https://127.0.0.1:{port}/v1/overview: the response, 200, is not a sidecar's\n"
    assert capsys.readouterr().out == said
