"""`gatekeeper serve`: run the sidecar."""

from __future__ import annotations

import argparse

from gatekeeper.cli import CommandParser, check_folder, integer, load
from gatekeeper.cli.settings import Settings
from gatekeeper.config import Config
from gatekeeper.errors import StorageError
from gatekeeper.terminal import NAME, OK, json_text, warn_if_anonymous

EXAMPLE = f"{NAME} serve --socket /run/gatekeeper/gatekeeper.sock"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `serve`."""
    parser.option("--host H", "address to listen on (127.0.0.1)")
    parser.option("--port P", "port (8750); 0 takes a free one", type=integer)
    parser.option("--socket PATH", "listen on a unix socket (mode 0600) instead")
    parser.option("--workers N", "more processes that answer /v1/check (0)", type=integer)
    parser.option("--token-file FILE", "bearer tokens, one per line")
    parser.option("--storage PATH|memory", "where state is stored; memory: nowhere")
    parser.option("--fleet URL", "a Valkey or Redis that several sidecars share")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; exit 0 when all leases and streams have ended."""

    def read() -> Settings:
        return load(
            args,
            server__host=args.host,
            server__port=args.port,
            server__socket=args.socket,
            server__token_file=args.token_file,
            server__workers=args.workers,
            storage__path=args.storage,
            fleet__url=args.fleet,
        )

    settings = read()
    current = [settings]

    def reread() -> Config:
        current[0] = read()
        return current[0].config

    check_folder(settings)
    from gatekeeper.sidecar.process import ServeOptions, serve  # noqa: PLC0415

    warn_if_anonymous(settings)
    options = ServeOptions(
        identity=settings.identity(),
        config=settings.config,
        reread=reread,
        sources=lambda: current[0].sources,
        announce=_announce_json if args.json else _announce,
    )
    try:
        serve(options)
    except StorageError as error:
        raise StorageError(f"{error} (--storage PATH sets another place)") from error
    return OK


def _announce_json(where: str, curl: str) -> None:
    """Print the listening address as one line of JSON."""
    print(json_text({"listening": where, "try": curl}), flush=True)


def _announce(where: str, curl: str) -> None:
    """Print the listening address; programs read it from the first line."""
    print(f"{NAME}: listening on {where}")
    print(f"try: {curl}", flush=True)
