"""Every code block of the documents runs as printed, against servers on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from gatekeeper.config import Config
from tests.documents.blocks import ROOT, RUNNER, SITE, Block, blocks_of, documents
from tests.internet import FakeInternet, certs
from tests.processes import PYTHON

BLOCKS = [block for path in documents() for block in blocks_of(path)]
SHELL = [block for block in BLOCKS if block.kind == "sh" and block.can_run]
PYTHON_OF = {
    name: [b for b in BLOCKS if b.document == name and b.kind == "python" and b.can_run]
    for name in {block.document for block in BLOCKS}
}
NAMES = ("example.org", "www.example.org", "example.net", "example.com", "www.wikipedia.org")
ROBOTS = "User-agent: *\nCrawl-delay: 0.05\nDisallow: /private\n"
KINDS = {"python", "sh", "toml", "json", "nginx", "ini", "yaml", "http", "text", ""}


@dataclass
class Surroundings:
    """The environment in which blocks run, with a sidecar for blocks that use one."""

    environ: dict[str, str]
    directory: Path
    sidecar: asyncio.subprocess.Process | None = None

    async def placed(self, text: str) -> str:
        """Return the block, with the sidecar's default address replaced by the real one."""
        if "127.0.0.1:8750" not in text:
            return text
        if self.sidecar is None:
            self.sidecar = await asyncio.create_subprocess_exec(
                *(PYTHON, "-m", "gatekeeper", "serve", "--port", "0"),
                *("--storage", "memory"),
                env=self.environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert self.sidecar.stdout is not None
            first = (await self.sidecar.stdout.readline()).decode().strip()
            self.address = first.removeprefix("gatekeeper: listening on http://")
        return text.replace("127.0.0.1:8750", self.address)

    async def run(self, *command: str) -> tuple[int, str]:
        """Run a command. Return its exit code and its combined output."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.directory,
            env=self.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What Python reads at its start."""
    path = tmp_path_factory.mktemp("start")
    (path / "sitecustomize.py").write_text(SITE, "utf-8")
    ca: trustme.CA = certs.authority()
    ca.cert_pem.write_to_path(str(path / "authority.pem"))
    return {"PYTHONPATH": f"{path}:{ROOT}", "SSL_CERT_FILE": str(path / "authority.pem")}


@pytest.fixture
async def surroundings(
    internet: FakeInternet, tmp_path: Path, start: dict[str, str]
) -> AsyncIterator[Surroundings]:
    for name in NAMES:
        site = internet.site(name).robots(f"{ROBOTS}Sitemap: https://{name}/sitemap.txt\n")
        site.page("/sitemap.txt", f"https://{name}/a\nhttps://{name}/b\n")
        for path in ("/", "/a", "/b", "/page", "/about", "/w/index.php"):
            site.page(path, "<p>hello</p>")
    ports = {"80": internet.port_of("127.0.0.1", 80), "443": internet.port_of("127.0.0.1", 443)}
    authority = start["SSL_CERT_FILE"]
    here = tmp_path / "here"
    here.mkdir()
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "config.example.toml").symlink_to(ROOT / "config.example.toml")
    (here / "urls.txt").write_text("https://example.org/\nhttps://example.net/a\n", "utf-8")
    (here / "robots.txt").write_text(ROBOTS, "utf-8")
    (here / ".curlrc").write_text(
        f'cacert = "{authority}"\n'
        + "".join(
            f'connect-to = "{name}:{port}:127.0.0.1:{real}"\n'
            for name in NAMES
            for port, real in ports.items()
        ),
        "utf-8",
    )
    path = tmp_path / "bin"
    path.mkdir()
    rules = ", ".join(f"MAP {name}:80 127.0.0.1:{ports['80']}" for name in NAMES)
    chromium = path / "chromium"  # resolves the names of the documents
    chromium.write_text(
        f'#!/bin/sh\nexec /usr/bin/chromium "--host-resolver-rules={rules}" "$@"\n', "utf-8"
    )
    chromium.chmod(0o755)
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GATEKEEPER_")},
        "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        **start,
        "FAKE_PORTS": json.dumps(ports),
        "FAKE_NAMES": json.dumps(NAMES),
        "REQUESTS_CA_BUNDLE": authority,
        "CURL_HOME": str(here),
        "HOME": str(here),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GATEKEEPER_GUARD_ALLOW": "127.0.0.0/8",
        # A block may leave a lease open, for which a sidecar would wait until it stops.
        "GATEKEEPER_SERVER_DRAIN_GRACE": "0",
        "GATEKEEPER_SERVER_DRAIN_TIMEOUT": "0.2",
        "GATEKEEPER_USER_AGENT": "examplebot/1.0 (+https://example.org/bot)",
    }
    given = Surroundings(environ, here)
    try:
        yield given
    finally:
        if given.sidecar is not None:
            given.sidecar.terminate()
            await given.sidecar.communicate()


@pytest.mark.parametrize("name", sorted(name for name, blocks in PYTHON_OF.items() if blocks))
async def test_the_python_of_a_document_runs(
    name: str, surroundings: Surroundings, tmp_path: Path
) -> None:
    program, blocks = tmp_path / "runner.py", tmp_path / "blocks.json"
    program.write_text(RUNNER, "utf-8")
    blocks.write_text(
        json.dumps(
            [[str(block), await surroundings.placed(block.text)] for block in PYTHON_OF[name]]
        ),
        "utf-8",
    )
    # Libraries that a block needs may warn of themselves.
    how = "lenient" if any(block.needs for block in PYTHON_OF[name]) else "strict"
    code, output = await surroundings.run(PYTHON, str(program), str(blocks), how)
    assert code == 0, output


@pytest.mark.parametrize("block", SHELL, ids=str)
async def test_a_shell_block_runs(block: Block, surroundings: Surroundings) -> None:
    code, output = await surroundings.run("sh", "-euc", await surroundings.placed(block.text))
    assert code == block.exit_code, output


def test_configuration_and_json_blocks_are_valid() -> None:
    for block in BLOCKS:
        if block.kind == "toml":
            Config.from_dict(tomllib.loads(block.text))
        elif block.kind == "json":
            json.loads(block.text)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.kind for block in BLOCKS} <= KINDS
    reasons = [block.not_run for block in BLOCKS if block.not_run is not None]
    assert all(reasons)
