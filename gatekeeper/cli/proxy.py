"""`gatekeeper proxy`: a proxy through which any client fetches politely, over http and https."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import ipaddress
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from gatekeeper.cli import TOKEN, CommandParser, add_wait, load, refuse_taken
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import NAME, OK, agent_for, json_text

if TYPE_CHECKING:
    from gatekeeper.integrations.mitmproxy import Listening

EXAMPLE = f"{NAME} proxy --user-agent 'examplebot/1.0 (+https://example.org/bot)'"
PYTHON: tuple[int, int] = sys.version_info[:2]
_SCRIPT = "gatekeeper.integrations.mitmproxy_script"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `proxy`."""
    parser.option(
        "--listen HOST:PORT",
        "address to listen on (127.0.0.1:8080); port 0 takes a free one",
        type=_address,
        default="127.0.0.1:8080",
    )
    parser.option(
        "--sidecar URL",
        f"ask a sidecar (http://127.0.0.1:8750, or unix:PATH); its token is read from {TOKEN}",
    )
    parser.option(
        "--subresources", "for browsers: what a page loads is decided, and takes no lease"
    )
    parser.option(
        "--passthrough HOST...",
        "leave the TLS of this host (or *.example.org) closed, and decide a tunnel by its "
        "front page (repeatable)",
    )
    add_wait(parser, "maximum time that a request waits for its host; then it gets 429 (60)")
    parser.option("--script", "print the path of the add-on, for `mitmdump -s`, and exit")


def _address(text: str) -> tuple[str, int]:
    """Argument type: a host and a port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r}; give HOST:PORT, such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError for an address that others reach, or on which something listens."""
    found, loopback = f"--listen {host}:{port}", host == "localhost"
    with suppress(ValueError):
        loopback = loopback or ipaddress.ip_address(host).is_loopback
    if not loopback:
        raise ConfigError(
            f"{found}: everybody could fetch through it; give an address of loopback, or run "
            'mitmdump -s "$(gatekeeper proxy --script)" with its option proxyauth'
        )
    try:
        refuse_taken(host, port)
    except OSError as error:
        raise ConfigError(f"{found}: {error.strerror}; give another address") from error


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    if args.script:
        spec = importlib.util.find_spec(_SCRIPT)
        print(None if spec is None else spec.origin)
        return OK
    if PYTHON < (3, 12):
        raise ConfigError(
            f"mitmproxy needs Python 3.12 or newer, and this is {PYTHON[0]}.{PYTHON[1]}: install "
            "gatekeeper by a newer Python (pip install 'robots-gatekeeper[mitmproxy]')"
        )
    from gatekeeper.integrations.mitmproxy import PoliteProxy, open_gate, serve  # noqa: PLC0415
    from gatekeeper.sidecar.listening import raise_file_limit  # noqa: PLC0415

    config = load(args).config
    agent = agent_for(config, args.sidecar)
    _check_address(*args.listen)
    raise_file_limit()

    async def proxy() -> None:
        async with open_gate(agent, config, args.sidecar) as gate:
            addon = PoliteProxy(
                gate,
                subresources=args.subresources,
                passthrough=args.passthrough,
                max_wait=args.wait,
            )
            await serve(addon, config, args.listen, _announce_json if args.json else _announce)

    asyncio.run(proxy())
    return OK


def _announce_json(found: Listening) -> None:
    """Print what clients need as one line of JSON."""
    certificate = str(found.certificate)
    message = {"listening": found.url, "certificate": certificate, "spki": found.spki}
    print(json_text(message), flush=True)


_CLIENTS = """{name}: a proxy for any client listens on {proxy}
certificate of its authority: {file}
  curl --proxy {proxy} --cacert {file} https://example.org/
  Node: NODE_EXTRA_CA_CERTS={file}
  Python: HTTPS_PROXY={proxy} HTTP_PROXY={proxy} REQUESTS_CA_BUNDLE={file}
  Chromium: --proxy-server={proxy} --ignore-certificate-errors-spki-list={spki} --user-data-dir=DIR
  Playwright: browser.new_context(proxy={{"server": "{proxy}"}}, ignore_https_errors=True)"""


def _announce(found: Listening) -> None:
    """Print the address, the certificate, and how the common clients take both."""
    where = {"proxy": found.url, "file": found.certificate, "spki": found.spki}
    print(_CLIENTS.format(name=NAME, **where), flush=True)
