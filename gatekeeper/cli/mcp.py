"""`gatekeeper mcp`: tools for agents, over the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
import os

from gatekeeper.cli import TOKEN, CommandParser, add_wait, integer, load, refuse_taken
from gatekeeper.terminal import NAME, OK, agent_for

EXAMPLE = f"{NAME} mcp --user-agent 'examplebot/1.0 (+https://example.org/bot)'"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `mcp`."""
    parser.option("--http PORT", "streamable HTTP on 127.0.0.1 instead of stdio", type=_free_port)
    parser.option(
        "--gate URL",
        f"ask a sidecar (http://127.0.0.1:8750, or unix:PATH); its token is read from {TOKEN}",
    )
    add_wait(parser, "maximum time of one call, waiting for the host included (60)")


def _free_port(text: str) -> int:
    """Argument type: a port of 127.0.0.1 on which nothing listens."""
    port = integer(text)
    try:
        refuse_taken("127.0.0.1", port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", "no such port")
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}; give another port") from error
    return port


def run(args: argparse.Namespace) -> int:
    """Serve until the client disconnects, or until Ctrl-C."""
    from gatekeeper.integrations.mcp import serving  # noqa: PLC0415

    config, url = load(args).config, args.gate
    agent, token = agent_for(config, url), os.environ.get(TOKEN)

    async def serve() -> None:
        async with serving(agent, config=config, gate=url, token=token, wait=args.wait) as server:
            if args.http is None:
                await server.run_stdio_async()
            else:
                await server.run_streamable_http_async(port=args.http)

    asyncio.run(serve())
    return OK
