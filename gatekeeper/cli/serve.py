"""`gatekeeper serve`: run the sidecar."""

from __future__ import annotations

import argparse

from gatekeeper.cli import CommandParser, check_folder, integer, load
from gatekeeper.errors import StorageError
from gatekeeper.terminal import NAME, OK, identity_of, json_text, warn_if_anonymous

EXAMPLE = f"{NAME} serve --socket /run/gatekeeper/gatekeeper.sock"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `serve`."""
    option = parser.option
    option("--host H", "address to listen on (127.0.0.1)", dest="server.host")
    option("--port P", "port (8750); 0 takes a free one", type=integer, dest="server.port")
    option("--socket PATH", "listen on a unix socket (mode 0600) instead", dest="server.socket")
    workers = "more processes that answer /v1/check (0)"
    option("--workers N", workers, type=integer, dest="server.workers")
    option("--token-file FILE", "bearer tokens, one per line", dest="server.token_file")
    option("--storage PATH|memory", "where state is stored; memory: nowhere", dest="storage.path")
    option("--fleet URL", "a Valkey or Redis that several sidecars share", dest="fleet.url")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; exit 0 when all leases and streams have ended."""
    settings = load(args)
    check_folder(settings)
    from gatekeeper.sidecar.process import ServeOptions, serve  # noqa: PLC0415

    warn_if_anonymous(settings.config)
    options = ServeOptions(
        identity=identity_of(settings.config),
        config=settings.config,
        reread=lambda: load(args).config,
        sources=lambda: args.settings.sources,
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
