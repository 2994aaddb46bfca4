"""`gatekeeper top`: the overview of a running sidecar and its busiest hosts, in a terminal."""

from __future__ import annotations

import argparse
import http.client
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from gatekeeper.cli import DENIED, NAME, OK, TOKEN, json_text, seconds
from gatekeeper.cli.healthcheck import add_address, ask, server_of, where
from gatekeeper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group

    from gatekeeper.config import ServerConfig

_HOSTS = 20
_OLD = "no answer, what follows is old"


EXAMPLE = f"{NAME} top --every 5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    add_address(parser)
    parser.add_argument(
        "--every", metavar="SECONDS", type=seconds, default=2.0, help="between two looks (2)"
    )
    parser.add_argument("--once", action="store_true", help="one look, and no more")


def run(args: argparse.Namespace) -> int:
    """Exit 0 when interrupted or after one look, 1 if the sidecar does not answer."""
    server, token = server_of(args), os.environ.get(TOKEN)
    try:
        if args.json:
            print(json_text(seen(server, token)))
            return OK
        from rich.console import Console  # noqa: PLC0415 - the extra `cli`
        from rich.live import Live  # noqa: PLC0415

        console = Console()
        if args.once or not console.is_terminal:
            console.print(shown(seen(server, token)))
            return OK
        told = shown(seen(server, token))
        with Live(told, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.refresh()
                time.sleep(args.every)
                live.update(told := _again(server, token, told))
    except KeyboardInterrupt:
        return OK
    except ImportError as error:
        raise ConfigError(
            "`top` needs rich: pip install 'robots-gatekeeper[cli]', or use --json"
        ) from error
    except OSError as error:
        print(f"{where(server)}: {error.strerror or error}")
        return DENIED


def _again(server: ServerConfig, token: str | None, before: Group) -> Group:
    """Return a fresh display, or the previous one, marked as old, if there is no answer."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    try:
        return shown(seen(server, token))
    except OSError as error:
        old = before.renderables[1:] if _OLD in str(before.renderables[0]) else before.renderables
        return Group(Text(f"{_OLD}: {error.strerror or error}", style="bold red"), *old)


def seen(server: ServerConfig, token: str | None) -> dict[str, Any]:
    """Return the sidecar's `overview` and its `hosts`, the ones with most waiters first.

    Raises OSError if the sidecar does not answer or refuses to.
    """
    path = f"/v1/hosts?sort=-waiting&per_page={_HOSTS}"
    return {"overview": _ask(server, "/v1/overview", token), "hosts": _ask(server, path, token)}


def _ask(server: ServerConfig, path: str, token: str | None) -> Any:
    status, body = ask(server, path, token=token, certified=True)
    told = msgspec.json.decode(body)
    if status != http.client.OK:
        remedy = f"; show a token of the role admin in {TOKEN}" if status < 404 else ""
        raise OSError(f"{path}: {status} {told.get('detail', '')}{remedy}")
    return told


def shown(told: dict[str, Any]) -> Group:
    """Return the result of `seen` as a display. Texts of sites can't control the terminal."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    one = told["overview"]
    rates, states = one["rates"], one["host_states"]
    ready = ("ready", "bold green") if one["ready"] else (one["state"], "bold red")
    head = Text.assemble(
        ("gatekeeper ", "bold"), (one["version"], "dim"), "  ", ready, f"  {one['now'][:19]}Z"
    )
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"decisions/s  {_rate(rates['allow'])} allow, {_rate(rates['deny'])} deny, "
        f"{_rate(rates['defer'])} defer",
        f"waiting  {one['waiting']}"
        + (f" (oldest {one['oldest_wait']:.0f} s)" if one["oldest_wait"] is not None else ""),
    )
    numbers.add_row(
        f"robots.txt  {one['robots_ok']} had, {one['robots_failed']} not",
        f"leases  {one['leases']} out, {one['overdue']} nearly over, {one['expired']} ran out",
    )
    numbers.add_row(
        f"hosts  {one['hosts']}: {states['blocked']} blocked, {states['paused']} paused, "
        f"{states['busy']} busy",
        "settings  " + ("in force" if one["reload"]["ok"] else "the last reload failed"),
    )
    hosts = Table(expand=True, box=None, header_style="bold")
    for name in ("host", "state", "robots.txt", "interval", "source"):
        hosts.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("in flight", "waiting", "allowed", "denied"):
        hosts.add_column(name, justify="right")
    for host in told["hosts"]["hosts"]:
        interval = "-" if host["interval"] is None else f"{host['interval']:g} s"
        texts = (
            *(host["host"], host["state"], host["robots"] or "-", interval),
            *(host["interval_source"] or "-", host["in_flight"], host["waiting"]),
            *(host["allowed"], host["denied"]),
        )
        hosts.add_row(*(Text(_plain(str(text))) for text in texts))
    return Group(head, "", numbers, "", hosts)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
