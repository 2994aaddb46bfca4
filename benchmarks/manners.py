"""How polite crawlers are: one crawl of 30 loopback hosts each, judged by the servers' log alone.

Each crawler runs twice, in a process of its own. The first crawl is left alone. The second, of ten
other hosts, is killed by SIGKILL with all its processes while hosts wait to be asked again, and
started immediately, with what it had kept and with a new page of each of those hosts.

Peers that are not installed here are run by the Python that the environment variable PEERS_PYTHON
names, if they are installed there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.manners_doors import DOORS
from benchmarks.manners_judge import Crawl, Restart, judge, judge_restart, may_be_had
from benchmarks.manners_peers import PEERS, Peer
from benchmarks.manners_site import Kind, World, crawl, in_thread, interrupted
from benchmarks.options import Options
from benchmarks.report import Table

__all__ = ["Contender", "contenders", "measured", "run", "tables"]

_ROOT = Path(__file__).parents[1]
_QUICK = ("polite_session", "Scrapy, ROBOTSTXT_OBEY")
_AT_ONCE = 3
"""Crawlers that run beside each other: most of the time each of them waits."""
_PATIENCE = 60.0
"""Seconds after which a crawl is ended. What came until then counts."""
_UNTIL_KILL = 20.0
"""Seconds within which every host that makes crawlers wait should have been asked."""
_AFTER_ANSWER = 0.3
"""Seconds between the last of these answers and the kill, in which a crawler can write."""
_WATCHED = 8.0
"""Seconds after the first request of a restarted crawl. A Retry-After lasts longer than that."""
_OURS = "robots-gatekeeper"
_VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


class Contender(NamedTuple):
    """One crawler that can run here."""

    name: str
    module: str
    python: str
    version: str


class Row(NamedTuple):
    """One crawler, and what it did."""

    contender: Contender
    crawl: Crawl
    restart: Restart
    remarks: tuple[str, ...]


def run(options: Options) -> list[Table]:
    """Return the tables of the undisturbed crawl, of the restart, and of Scrapy's cause."""
    here, missing = contenders(_QUICK if options.quick else (*PEERS, *DOORS))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        rows = list(threads.map(measured, here))
    return [*tables(rows, missing), *_waiting(here)]


def tables(rows: list[Row], missing: tuple[str, ...] = ()) -> list[Table]:
    """Return the tables of the undisturbed crawl and of the restart."""
    remarks = tuple(remark for row in rows for remark in row.remarks)
    return [_crawls(rows, missing + remarks), _restarts(rows)]


def _watched(world: World, process: subprocess.Popen[bytes], since: float) -> None:
    """Watch a restarted crawl for some seconds after its first request, then end it."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and process.poll() is None:
        if any(seen.at > since for seen in list(world.log)):
            end = min(end, time.monotonic() + _WATCHED)
            break
        time.sleep(0.02)
    _ended(process, max(0.0, end - time.monotonic()))


def contenders(names: tuple[str, ...]) -> tuple[list[Contender], tuple[str, ...]]:
    """Return the crawlers that are installed, and a line for each that is not."""
    wanted = sorted({name for one in (PEERS | DOORS).values() for name in one.distributions})
    pythons = [sys.executable, *filter(None, [os.environ.get("PEERS_PYTHON")])]
    installed = {python: _installed(python, wanted) for python in pythons}
    here, missing = [], []
    for name in names:
        one = PEERS.get(name) or DOORS[name]
        module = "benchmarks.manners_peers" if name in PEERS else "benchmarks.manners_doors"
        for python, there in installed.items():
            if all(there[distribution] for distribution in one.distributions):
                here.append(Contender(name, module, python, _version(one, there)))
                break
        else:
            lacking = [d for d in one.distributions if not installed[sys.executable][d]]
            missing.append(f"{name}: not measured, {', '.join(lacking)} is not installed")
    return here, tuple(missing)


def _installed(python: str, names: list[str]) -> dict[str, str | None]:
    command = [python, "-c", _VERSIONS, *names]
    found: dict[str, str | None] = json.loads(
        subprocess.run(command, capture_output=True, check=True).stdout
    )
    return found


def _version(one: Peer, installed: dict[str, str | None]) -> str:
    named = [name for name in one.distributions if name != _OURS]
    return ", ".join(str(installed[name]) for name in named)


def measured(contender: Contender) -> Row:
    """Let one crawler crawl undisturbed, and again with a kill."""
    remarks = []
    with tempfile.TemporaryDirectory(prefix="manners-", ignore_cleanup_errors=True) as made:
        world = crawl()
        with in_thread(world):
            process = _started(contender, world.urls(), Path(made))
            if not _ended(process, _PATIENCE):
                remarks.append(f"{contender.name}: still running after {_PATIENCE:.0f} s, ended")
    with tempfile.TemporaryDirectory(prefix="manners-", ignore_cleanup_errors=True) as made:
        other = interrupted()
        with in_thread(other) as loop:
            process = _started(contender, other.urls(), Path(made))
            _wait_until_told(other, process)
            _ended(process, 0)
            killed_at = time.monotonic()
            loop.call_soon_threadsafe(other.release)
            process = _started(contender, other.urls() + other.later_urls(), Path(made))
            _watched(other, process, killed_at)
    return Row(contender, judge(world), judge_restart(other, killed_at), tuple(remarks))


def _started(contender: Contender, urls: list[str], folder: Path) -> subprocess.Popen[bytes]:
    (folder / "urls.txt").write_text("\n".join(urls), "utf-8")
    environment = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder)}
    environment |= {"CRAWL4_AI_BASE_DIRECTORY": str(folder), "CRAWL4AI_NO_CLOUD_NOTICE": "1"}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [contender.python, "-m", contender.module, contender.name, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=_ROOT,
            start_new_session=True,
        )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a crawl, then kill what is left of it. Return whether it ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    by_itself = process.poll() is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return by_itself


def _wait_until_told(world: World, process: subprocess.Popen[bytes]) -> None:
    """Wait until every host that makes crawlers wait has answered, and a slow page is under way."""
    waited = {host.address for host in world.hosts.values() if host.seconds}
    waited |= {host.address for host in world.hosts.values() if host.kind is Kind.SLOW}
    end = time.monotonic() + _UNTIL_KILL
    while time.monotonic() < end and process.poll() is None:
        if waited <= {seen.address for seen in list(world.log) if seen.path != "/robots.txt"}:
            time.sleep(_AFTER_ANSWER)
            return
        time.sleep(0.02)


def _crawls(rows: list[Row], notes: tuple[str, ...]) -> Table:
    world = crawl()
    most = len(may_be_had(world))
    columns = (
        "",
        "disallowed pages",
        "disallowed redirect hops",
        "gaps under Crawl-delay",
        "shortest gap",
        "inside Retry-After: 429",
        "503",
        "pages under a robots.txt of 503",
        "robots.txt per origin",
        "ways to a private address",
        f"pages had, of {most}",
        "time",
    )
    cells = []
    for row in rows:
        one = row.crawl
        robots = f"{one.robots_fetches:.2g}"
        if one.robots_most > 1:
            robots += f", at most {one.robots_most}"
        cells.append(
            (
                _named(row),
                f"{one.disallowed} of 8",
                f"{one.hops} of 6",
                f"{one.short_gaps} of {one.gaps}",
                "" if one.shortest is None else _gap(one.shortest),
                str(one.in_429),
                str(one.in_503),
                f"{one.robots_503} of 9",
                robots,
                f"{one.private} of 3",
                str(one.pages),
                f"{one.seconds:.1f} s",
            )
        )
    return Table(
        "Manners: 30 hosts, judged by the servers' log",
        columns,
        cells,
        "no fault by gatekeeper, but redirects in a browser behind `polite_route`, which sees none",
        (*notes, "Time: from the first request to the last page that was had, without start-up."),
        {row.contender.name: asdict(row.crawl) for row in rows},
    )


def _restarts(rows: list[Row]) -> Table:
    columns = (
        "",
        "hosts asked too early",
        "robots.txt fetched again",
        "pages fetched again",
    )
    cells = [
        (
            _named(row),
            f"{row.restart.inside} of {row.restart.held}",
            f"{row.restart.robots_again} of {row.restart.robots}",
            f"{row.restart.twice} of {row.restart.before}",
        )
        for row in rows
    ]
    return Table(
        "Manners after kill -9 and a restart",
        columns,
        cells,
        "no host is asked inside a Crawl-delay or Retry-After that was in force at the kill",
        (
            f"Watched for {_WATCHED:.0f} s after the first request of the restarted crawl. Which "
            "pages it has is for the caller of a library to remember.",
        ),
        {row.contender.name: asdict(row.restart) for row in rows},
    )


def _waiting(here: list[Contender]) -> list[Table]:
    """Return what the minimal program shows of Scrapy, where it is installed."""
    python = next((one.python for one in here if one.name.startswith("Scrapy")), None)
    if python is None:
        return []
    command = [python, "-m", "benchmarks.manners_scrapy"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [
        Table(
            "Scrapy: five disallowed URLs of one host, asked for together at the start",
            ("version", "the server was asked for"),
            [tuple(told.stdout.strip().split(": ", 1))],
            notes=("The cause is in benchmarks/manners_scrapy.py.",),
        )
    ]


def _named(row: Row) -> str:
    return f"{row.contender.name} {row.contender.version}".strip()


def _gap(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"
