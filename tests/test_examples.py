"""Each program of `examples/` runs as a user would run it, against servers on loopback."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.internet import FakeInternet, Page
from tests.sidecar.conftest import Start, start

__all__ = ["start"]

EXAMPLES = Path(__file__).parents[1] / "examples"
NODE = shutil.which("node")
CURL = shutil.which("curl")
ROBOTS = "User-agent: examplebot\nDisallow: /private\n"
INTERVAL = 0.2


async def run(*command: str, config: Path | None = None, **environ: str) -> tuple[int | None, str]:
    """Run a program, with warnings as errors."""
    settings = {} if config is None else {"GATEKEEPER_CONFIG": str(config)}
    return await processes.run(*command, **settings, **environ, PYTHONWARNINGS="error")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gatekeeper.toml"
    path.write_text(
        f"[guard]\nallow = ['127.0.0.0/8']\n[pacing]\ndefault_interval = {INTERVAL}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def base(internet: FakeInternet) -> str:
    """Start a site with two pages, a denied one, one that redirects to it, and one with 429."""
    site = internet.site("127.0.0.1").robots(ROBOTS)
    site.page("/a", "the first").page("/b", "the second").page("/private", "a secret")
    site.redirect("/moved", "/private").on("/busy", Page(status=429, headers={"Retry-After": "1"}))
    return f"http://127.0.0.1:{internet.listener().port()}"


@pytest.fixture
async def sidecar(start: Start, config: Path) -> str:
    """The URL of `gatekeeper serve`, which runs as a process on a free port."""
    return (await start("--config", str(config), "--storage", "memory")).where


def gaps(internet: FakeInternet) -> list[float]:
    return internet.sites["127.0.0.1"].gaps()


@pytest.mark.parametrize("program", ["embedded.py", "session.py", "polite_queue.py"])
async def test_a_crawler_in_this_process_is_polite(
    internet: FakeInternet, base: str, config: Path, program: str
) -> None:
    urls = [f"{base}/a", f"{base}/b", f"{base}/private"]
    code, output = await run(sys.executable, str(EXAMPLES / program), *urls, config=config)

    assert code == 0, output
    said = dict(line.split(" ", 1) for line in output.splitlines())
    assert said[urls[0]].startswith("200")
    assert said[urls[1]].startswith("200")
    assert said[urls[2]].startswith(("deny", "denied"))
    assert sorted(internet.sites["127.0.0.1"].paths) == ["/a", "/b", "/robots.txt"]
    assert min(gaps(internet)) >= INTERVAL * 0.95


async def test_the_session_decides_each_redirect_hop(
    internet: FakeInternet, base: str, config: Path
) -> None:
    code, output = await run(
        sys.executable, str(EXAMPLES / "session.py"), f"{base}/moved", config=config
    )

    assert code == 0, output
    assert "deny (rule)" in output
    assert internet.sites["127.0.0.1"].paths == ["/robots.txt", "/moved"]


async def test_python_asks_a_sidecar(
    internet: FakeInternet, base: str, config: Path, sidecar: str
) -> None:
    urls = [f"{base}/a", f"{base}/b", f"{base}/private"]
    code, output = await run(
        *(sys.executable, str(EXAMPLES / "sidecar_client.py"), *urls),
        config=config,
        GATEKEEPER_URL=sidecar,
    )

    assert code == 0, output
    assert "/private deny (rule)" in output
    assert sorted(internet.sites["127.0.0.1"].paths) == ["/a", "/b", "/robots.txt"]
    assert min(gaps(internet)) >= INTERVAL * 0.95


@pytest.mark.skipif(NODE is None, reason="node is not installed")
async def test_node_asks_a_sidecar(internet: FakeInternet, base: str, sidecar: str) -> None:
    assert NODE is not None
    urls = [f"{base}/a", f"{base}/b", f"{base}/private", f"{base}/busy"]
    internet.site("127.0.0.2").robots("busy", status=503)
    urls.append(f"http://127.0.0.2:{internet.listener('127.0.0.2').port()}/x")
    code, output = await run(
        NODE, str(EXAMPLES / "sidecar_node.mjs"), *urls, GATEKEEPER_URL=sidecar
    )

    assert code == 0, output
    said = dict(line.split(" ", 1) for line in output.splitlines())
    assert said[urls[0]] == "200, 9 bytes"
    assert said[urls[1]] == "200, 10 bytes"
    assert said[urls[2]] == "deny (rule)"
    assert said[urls[3]] == "429, 0 bytes"
    assert said[urls[4]] == "defer (server_error)"
    assert "/private" not in internet.sites["127.0.0.1"].paths
    assert min(gaps(internet)) >= INTERVAL * 0.95


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
async def test_curl_asks_a_sidecar(
    internet: FakeInternet, base: str, sidecar: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    script = str(EXAMPLES / "sidecar_curl.sh")
    done = await run("sh", script, f"{base}/a", str(page), GATEKEEPER_URL=sidecar)
    refused = await run("sh", script, f"{base}/private", str(page), GATEKEEPER_URL=sidecar)
    _, metrics = await run(CURL or "curl", "-sS", f"{sidecar}/metrics")

    assert done == (0, f"{base}/a 200\n")
    assert page.read_text(encoding="utf-8") == "the first"
    assert 'gatekeeper_leases_ended_total{how="reported"} 1.0' in metrics
    assert refused[0] == 1
    assert refused[1].startswith("no lease: {")
    assert internet.sites["127.0.0.1"].paths == ["/robots.txt", "/a"]


MODULES = EXAMPLES / "typescript" / "node_modules"


@pytest.mark.skipif(
    not (MODULES / ".bin" / "openapi-typescript").exists(),
    reason="npm's packages are not installed: npm install --prefix examples/typescript",
)
async def test_typescript_asks_a_sidecar_with_generated_types(
    internet: FakeInternet, base: str, sidecar: str, tmp_path: Path
) -> None:
    folder = tmp_path / "typescript"
    shutil.copytree(
        MODULES.parent, folder, ignore=shutil.ignore_patterns("node_modules", "*.js", "schema.d.ts")
    )
    (folder / "node_modules").symlink_to(MODULES)
    urls = [f"{base}/a", f"{base}/private", f"{base}/busy", f"{base}/b"]
    scripts = json.loads((folder / "package.json").read_text(encoding="utf-8"))["scripts"]
    path = f"{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"  # as `npm run` does
    for name, given in (("types", ()), ("build", ()), ("crawl", urls)):
        command = f'cd "$0" && {scripts[name]} "$@"'
        code, output = await run(
            *("sh", "-c", command, str(folder), *given), GATEKEEPER_URL=sidecar, PATH=path
        )
        assert code == 0, output
        assert "warn" not in output.lower()

    first, *rest = output.splitlines()
    assert first == "4 URLs, 1 denied"
    assert dict(line.split(" ", 1) for line in rest) == {
        urls[0]: "200, 9 bytes",
        urls[1]: "deny (rule)",
        urls[2]: "429, 0 bytes",
        urls[3]: "200, 10 bytes",
    }
    assert "/private" not in internet.sites["127.0.0.1"].paths
    assert min(gaps(internet)) >= INTERVAL * 0.95


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
async def test_the_shell_crawls_through_a_sidecar(
    internet: FakeInternet, base: str, start: Start, config: Path, tmp_path: Path
) -> None:
    words = ("--storage", "memory", "--user-agent", "examplebot/1.0")  # the sidecar's, who fetches
    sidecar = (await start("--config", str(config), *words)).where
    pages, listed = tmp_path / "pages", tmp_path / "urls"
    busy = Page(status=429, headers={"Retry-After": "1"})
    internet.sites["127.0.0.1"].on("/once", busy, Page("at last"))
    urls = [f"{base}/a", f"{base}/private", f"{base}/once", f"{base}/b"]
    listed.write_text("".join(f"{one}\n" for one in urls), encoding="utf-8")
    script = str(EXAMPLES / "sidecar_shell.sh")
    code, output = await run(
        "sh", "-c", 'sh "$0" "$1" <"$2"', script, str(pages), str(listed), GATEKEEPER_URL=sidecar
    )

    assert code == 0, output
    said = dict(line.split(" ", 1) for line in output.splitlines())
    assert said == {
        urls[0]: "200",
        urls[1]: f"403 deny {urls[1]} for examplebot: rule (line 2: Disallow: /private)",
        urls[2]: "429",  # the site's own response, passed on unchanged
        urls[3]: "200",  # after the end of the host's block, as reported by the sidecar
    }
    assert (pages / "1").read_text(encoding="utf-8") == "the first"
    assert (pages / "4").read_text(encoding="utf-8") == "the second"
    assert internet.sites["127.0.0.1"].paths == ["/robots.txt", "/a", "/once", "/b"]


_RUN_ELSEWHERE = {
    "nginx": "tests/sidecar/test_neighbours.py",
    "robots-txt.yml": "tests/documents/test_lint_page.py",
}


def test_every_example_is_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.name == "README.md":
            continue
        assert f"({path.name}{'/' if path.is_dir() else ''})" in listed
        assert f'"{path.name}"' in here or path.name in _RUN_ELSEWHERE
