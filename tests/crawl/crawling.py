"""Run `gatekeeper fetch` on the fake internet, and read its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warcio.archiveiterator import ArchiveIterator

from gatekeeper.config import Config, GuardConfig, PacingConfig
from gatekeeper.crawl.progress import Progress
from gatekeeper.crawl.runner import crawl
from gatekeeper.crawl.sources import Job
from tests.internet import FakeInternet

CONFIG = Config(
    guard=GuardConfig(allow=("127.0.0.0/8",)), pacing=PacingConfig(default_interval=0.0)
)
OPEN = "User-agent: *\nAllow: /\n"
ROBOTS = "/robots.txt"


async def fetch(net: FakeInternet, *urls: str, config: Config = CONFIG, **job: Any) -> int:
    """Run the command on the fake internet with its clock, and return the exit code."""
    made = Job(identity="examplebot/1.0", config=config, urls=urls, **job)
    return await crawl(made, Progress(), clock=net.clock, resolver=net.resolver, trace_configs=[])


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last entry of every URL."""
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    return {entry["url"]: entry for entry in map(json.loads, lines)}


def stored(folder: Path, url: str) -> bytes:
    return folder.joinpath(manifest(folder)[url]["file"]).read_bytes()


def records(path: Path) -> list[tuple[str, bytes, Any]]:
    """Return every record of a WARC file as its type, its body and itself."""
    with path.open("rb") as file:
        return [
            (record.rec_type, record.content_stream().read(), record)
            for record in ArchiveIterator(file, check_digests="raise")
        ]


def archived(path: Path) -> list[tuple[str, str, bytes]]:
    """Return every response in a WARC file as URL, status line and body."""
    return [
        (record.rec_headers.get_header("WARC-Target-URI"), record.http_headers.statusline, body)
        for kind, body, record in records(path)
        if kind == "response"
    ]
