"""`gatekeeper fleet init`: begins a fleet on a new store, so that no member waits for others."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import msgspec

from gatekeeper.cli import CommandParser, load
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.terminal import DENIED, NAME, OK, json_text

if TYPE_CHECKING:
    from gatekeeper.fleet.first_start import FirstStart

EXAMPLE = f"{NAME} fleet init redis://127.0.0.1:6379/0"
_MAX_NAMES = 5
"""Maximum number of members that are named."""


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `fleet`."""
    parser.add_argument(
        "action",
        choices=("init",),
        help="init: begin the fleet on a new store, so that the first member starts without "
        "waiting for members that may still be under way. Only if there are none",
    )
    parser.add_argument("url", metavar="URL", help="the Valkey or Redis, as in fleet.url")
    parser.option("--namespace NAME", "the fleet's, if not as configured", dest="fleet.namespace")
    sharded = "for members with fleet.sharded = true, on a Valkey or Redis Cluster"
    parser.option("--sharded", sharded, dest="fleet.sharded", default=None)
    parser.option(
        "--force",
        "also if the store has a fleet already: hosts may be asked too early by members that "
        "have not reported their state",
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 if the fleet has begun, 1 if the store has a fleet; 2 if it can't be used."""
    settings = load(args)
    from gatekeeper.fleet.first_start import begin_fleet  # noqa: PLC0415 - not needed by `--help`

    config = msgspec.structs.replace(settings.config.fleet, url=args.url)
    try:
        found = asyncio.run(begin_fleet(config, force=args.force))
    except LedgerLost as error:
        raise ConfigError(f"{str(error).rstrip('. ')}: is the store running there?") from error
    text = "the epoch has begun: members start without waiting"
    if not found.begun:
        text = (
            f"nothing was written: {_reasons(found)}. If no other process crawls, --force begins "
            "anew without waiting"
        )
    result = {**found._asdict(), "alive": found.alive, "namespace": config.namespace}
    print(json_text(result) if args.json else f"{found.where}, {config.namespace}: {text}")
    return OK if found.begun else DENIED


def _reasons(found: FirstStart) -> str:
    """Return why a store is not new: an epoch, or members that are alive."""
    reasons = []
    if found.since is not None:
        reasons.append(f"an epoch began there at {found.since:%Y-%m-%dT%H:%M:%SZ}")
    if found.alive:
        names = ", ".join([*found.members[:_MAX_NAMES], "..."][: len(found.members)])
        said = "1 member is alive" if found.alive == 1 else f"{found.alive} members are alive"
        reasons.append(f"{said} ({names})" if names else said)
    return " and ".join(reasons)
