"""`gatekeeper healthcheck`: for HEALTHCHECK and probes; asks the running sidecar."""

from __future__ import annotations

import argparse
import http.client

from gatekeeper.cli.common import DENIED, NAME, OK, json_text
from gatekeeper.cli.local_sidecar import add_address, ask, server_of, where

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = f"{NAME} healthcheck --ready"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `healthcheck`."""
    parser.add_argument("--ready", action="store_true", help="ask whether it takes questions")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if it answers 200, 1 if not."""
    server = server_of(args)
    path = "/readyz" if args.ready else "/healthz"
    try:
        status, _ = ask(server, path)
    except OSError as error:
        why, asked = str(error.strerror or error), where(server)
        told = {"path": path, "status": None, "error": why, "asked": asked}
        print(json_text(told) if args.json else f"{path}: no answer from {asked} ({why})")
        return DENIED
    print(json_text({"path": path, "status": status}) if args.json else f"{path}: {status}")
    return OK if status == http.client.OK else DENIED
