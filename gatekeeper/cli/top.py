"""`gatekeeper top`: the overview of a running sidecar, in a terminal.

It lists the hosts that are held up first, and then those with the most waiting requests.
"""

from __future__ import annotations

import argparse
import http.client
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from gatekeeper.cli import TOKEN, CommandParser, load, seconds
from gatekeeper.cli.healthcheck import add_address, address_of, get_from, no_answer
from gatekeeper.errors import needs_extra
from gatekeeper.terminal import DENIED, NAME, OK, json_text
from gatekeeper.urls import printable

if TYPE_CHECKING:
    from rich.console import Group

    from gatekeeper.config import ServerConfig

_MAX_HOSTS = 20
_STALE = "out of date: "
_COLUMNS = {"host": 0, "state": 0, "why": 90, "robots.txt": 100, "interval": 60, "source": 120}
_COUNTS = {"in flight": 60, "waiting": 0, "allowed": 80, "denied": 80}
_COLUMNS |= _COUNTS
"""Columns about hosts, each with the width of the narrowest terminal that shows it."""

EXAMPLE = f"{NAME} top --every 5"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `top`."""
    add_address(parser)
    parser.option("--every SECONDS", "time between two updates (2)", type=seconds, default=2.0)
    parser.option("--once", "show the state once and exit")


def run(args: argparse.Namespace) -> int:
    """Exit 0 when interrupted or after one look, 1 if the sidecar does not answer."""
    server, token = load(args).config.server, os.environ.get(TOKEN)
    try:
        if args.json:
            print(json_text(read_state(server, token)))
            return OK
        with needs_extra("cli", "`top` without --json"):
            from rich.console import Console  # noqa: PLC0415 - an extra
            from rich.live import Live  # noqa: PLC0415

        console = Console()
        display = render(read_state(server, token), console.width)
        if args.once or not console.is_terminal:
            console.print(display)
            return OK
        with Live(display, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.refresh()
                time.sleep(args.every)
                live.update(display := refreshed(server, token, display, console.width))
    except KeyboardInterrupt:
        return OK
    except OSError as error:
        print(json_text({"error": str(error)}) if args.json else error)
        return DENIED


def refreshed(server: ServerConfig, token: str | None, before: Group, width: int) -> Group:
    """Return a fresh display, or the previous one, marked as old, if there is no answer."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    try:
        return render(read_state(server, token), width)
    except OSError as error:
        old = before.renderables[1:] if _STALE in str(before.renderables[0]) else before.renderables
        return Group(Text(f"{_STALE}{error}", style="bold red"), *old)


def read_state(server: ServerConfig, token: str | None) -> dict[str, Any]:
    """Return the sidecar's `overview` and its `hosts`, first those that are held up.

    Raises OSError, whose text is for people, if the sidecar does not answer or refuses to.
    """
    path = f"/v1/hosts?sort=-held_up&per_page={_MAX_HOSTS}"
    return {"overview": _ask(server, "/v1/overview", token), "hosts": _ask(server, path, token)}


def _ask(server: ServerConfig, path: str, token: str | None) -> Any:
    try:
        status, body = get_from(server, path, token=token, certified=True)
    except OSError as error:
        raise OSError(no_answer(server, error)) from error
    where = f"{address_of(server)}{path}"
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise OSError(f"{where}: the response, {status}, is not a sidecar's") from None
    if status != http.client.OK:
        remedy = f"; set {TOKEN} to a token of the role admin" if status < 404 else ""
        raise OSError(f"{where}: {status} {answer.get('detail', '')}{remedy}")
    return answer


def render(state: dict[str, Any], width: int = 120) -> Group:
    """Return the result of `read_state` as a display for a terminal of that width.

    Texts of sites can't control the terminal.
    """
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    one = state["overview"]
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
        f"robots.txt  {one['robots_ok']} fetched, {one['robots_failed']} failed",
        f"leases  {one['leases']} out, {one['overdue']} nearly over, {one['expired']} expired",
    )
    numbers.add_row(
        f"hosts  {one['hosts']}: {states['blocked']} blocked, {states['paused']} paused, "
        f"{states.get('deferred', 0)} deferred, {states['busy']} busy",
        "" if one["reload"]["ok"] else "settings  the last reload failed",
    )
    hosts = Table(expand=True, box=None, header_style="bold")
    shown = [name for name, least_width in _COLUMNS.items() if width >= least_width]
    for name in shown:  # a long host takes more lines, and no width from the other columns
        hosts.add_column(name, overflow="fold", no_wrap=name not in ("host", "source", "why"))
        if name in _COUNTS:
            hosts.columns[-1].justify = "right"
    for host in state["hosts"]["hosts"]:
        interval = "-" if host["interval"] is None else f"{host['interval']:g} s"
        texts = host | {"robots.txt": host["robots"] or "-", "interval": interval}
        texts |= {"source": host["interval_source"] or "-", "in flight": host["in_flight"]}
        texts["why"] = host.get("why") or "-"
        hosts.add_row(*(Text(printable(str(texts[name]), 500)) for name in shown))
    return Group(head, "", numbers, "", hosts)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
