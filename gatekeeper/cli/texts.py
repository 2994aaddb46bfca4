"""Where the text of a robots.txt comes from: files, directories, standard input, URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gatekeeper.cli.common import hint, open_gate, standard_input, warn_if_anonymous
from gatekeeper.errors import GatekeeperError
from gatekeeper.robots import RobotsTxt

if TYPE_CHECKING:
    from gatekeeper.cli.settings import Settings

__all__ = ["Text", "is_url", "read_all", "read_text", "replace_file"]


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """One text as it was found."""

    name: str
    """The path as it was given, `-`, or the URL that was read."""
    body: bytes
    robots: RobotsTxt | None
    """None: the site has no such file, and everything is welcome."""


def is_url(source: str) -> bool:
    """It is fetched, and no file."""
    return source.startswith(("http://", "https://"))


def read_all(settings: Settings, sources: Iterable[str]) -> Iterator[Text]:
    """The text of each source, one after the other; of a directory every robots.txt in it.

    Raises GatekeeperError for what isn't there, OSError for what can't be read.
    """
    for source in sources:
        if source == "-" or is_url(source) or not Path(source).is_dir():
            yield read_text(settings, source)
            continue
        found = sorted(_in_directory(source))
        if not found:
            raise GatekeeperError(
                f"{source}: no file in it is called robots.txt, or anything that ends so "
                "(name others themselves)"
            )
        for path in found:
            yield read_text(settings, path)


def _in_directory(directory: str) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if name.endswith("robots.txt"))


def read_text(settings: Settings, source: str) -> Text:
    """The text of a file, of standard input (`-`), or of the origin of a URL."""
    if is_url(source):
        from gatekeeper.urls import parse  # noqa: PLC0415 - a file takes neither

        warn_if_anonymous(settings)
        import asyncio  # noqa: PLC0415

        origin = parse(source).origin
        robots = asyncio.run(_fetch(settings, origin))
        body = b"" if robots is None else robots.octets.encode("latin-1")
        return Text(name=f"{origin}/robots.txt", body=body, robots=robots)
    try:
        body = standard_input().read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise GatekeeperError(f"{source}: {error.strerror}{hint(source)}") from error
    robots = RobotsTxt.parse(
        body, dialect=settings.config.robots.dialect, limit=settings.config.fetch.max_body
    )
    return Text(name=source, body=body, robots=robots)


async def _fetch(settings: Settings, origin: str) -> RobotsTxt | None:
    from gatekeeper.decision import State  # noqa: PLC0415

    async with open_gate(settings.obeying()) as gate:
        robots = await gate.robots(f"{origin}/robots.txt")
        if robots is None:
            # Not of /robots.txt itself, which may be asked for whatever became of it (RFC 9309
            # section 2.2.2, RFC-20).
            decision = await gate.check(f"{origin}/")
            if decision.state is not State.UNAVAILABLE:
                raise GatekeeperError(
                    f"{origin}/robots.txt: the file can't be had ({decision.reason})"
                )
    return robots


def replace_file(path: Path, body: bytes) -> None:
    """Write a file whole or not at all; one that is there keeps its mode."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(body)
        with suppress(FileNotFoundError):
            beside.chmod(path.stat().st_mode & 0o7777)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
