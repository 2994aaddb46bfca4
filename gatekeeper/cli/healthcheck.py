"""`gatekeeper healthcheck`: for HEALTHCHECK and probes; asks the running sidecar."""

from __future__ import annotations

import argparse
import http.client

from gatekeeper.cli.common import DENIED, NAME, OK, Subparsers, add_command, json_text, load
from gatekeeper.cli.local_sidecar import connection_to, where
from gatekeeper.config import ServerConfig

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Put `healthcheck` among the commands."""
    parser = add_command(
        subparsers,
        "healthcheck",
        summary="ask the running sidecar whether it is alive",
        example=f"{NAME} healthcheck --ready",
        run=run,
    )
    parser.add_argument("--ready", action="store_true", help="ask whether it takes questions")
    parser.add_argument("--host", help="where it listens, if not as configured")
    parser.add_argument("--port", type=int, help="its port, if not as configured")
    parser.add_argument("--socket", metavar="PATH", help="its unix socket")


def run(args: argparse.Namespace) -> int:
    """Exit 0 if it answers 200, 1 if not."""
    settings = load(
        args, server__host=args.host, server__port=args.port, server__socket=args.socket
    )
    path = "/readyz" if args.ready else "/healthz"
    try:
        status = ask(settings.config.server, path)
    except OSError as error:
        why = str(error.strerror or error)
        asked = where(settings.config.server)
        told = {"path": path, "status": None, "error": why, "asked": asked}
        print(json_text(told) if args.json else f"{path}: no answer from {asked} ({why})")
        return DENIED
    if args.json:
        print(json_text({"path": path, "status": status}))
    else:
        print(f"{path}: {status}")
    return OK if status == http.client.OK else DENIED


def ask(server: ServerConfig, path: str) -> int:
    """The status of a GET to our own server. Raises OSError when it can't be had."""
    connection = connection_to(server)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(str(error) or type(error).__name__) from error
    finally:
        connection.close()
