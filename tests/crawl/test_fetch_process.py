"""`gatekeeper fetch` as a real process: stopped, killed, and started again."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.internet import FakeInternet, Hold, Page
from tests.processes import PYTHON

if sys.platform != "win32":
    import resource

ROBOTS = "User-agent: *\nDisallow: /page/3\nCrawl-delay: 0.05\n"
PAGES = 12


@pytest.fixture
async def site(internet: FakeInternet) -> str:
    """A site at a literal address, since commands use the machine's own resolver."""
    made = internet.site("127.0.0.1").robots(ROBOTS)
    for number in range(PAGES):
        made.page(f"/page/{number}", f"page {number}")
    return f"http://127.0.0.1:{internet.listener().port()}"


async def start(
    *arguments: str,
    stdin: int | IO[bytes] = asyncio.subprocess.PIPE,
    first: Callable[[], None] | None = None,
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "gatekeeper", "fetch", "--allow-address", "127.0.0.0/8"),
        *("--user-agent", "examplebot/1.0"),
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=first,
    )


async def finish(process: asyncio.subprocess.Process, given: bytes = b"") -> tuple[int, str, str]:
    out, err = await process.communicate(given or None)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def urls(site: str) -> str:
    return "".join(f"{site}/page/{number}\n" for number in range(PAGES))


def entries(folder: Path) -> list[dict[str, str]]:
    text = (folder / "manifest.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def no_request_came_too_early(internet: FakeInternet) -> bool:
    """Return True if the server's log shows the interval; arrivals may jitter a little."""
    times = [request.at for request in internet.requests]
    return all(later - earlier >= 0.045 for earlier, later in itertools.pairwise(times))


async def test_fetch_reads_urls_from_standard_input_and_lists_denied_ones(
    internet: FakeInternet, site: str, tmp_path: Path
) -> None:
    process = await start("-", "-o", str(tmp_path))
    code, out, err = await finish(process, urls(site).encode())
    assert code == 1, err
    assert f"fetched {PAGES - 1} ({PAGES - 1} x 200)" in out
    assert "1  127.0.0.1  line 2: Disallow: /page/3" in out
    assert f"200 {site}/page/0 6 bytes" in err
    assert len(entries(tmp_path)) == PAGES
    assert no_request_came_too_early(internet)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_the_same_command_resumes_a_stopped_crawl(
    internet: FakeInternet, site: str, tmp_path: Path, how: signal.Signals
) -> None:
    listed = tmp_path / "urls.txt"
    listed.write_text(urls(site))
    folder = tmp_path / "pages"
    process = await start("-i", str(listed), "-o", str(folder))
    assert process.stderr is not None
    for _ in range(4):
        await process.stderr.readline()
    process.send_signal(how)
    code, *_ = await finish(process)
    assert code == (130 if how is signal.SIGINT else -how)
    done = {entry["url"] for entry in entries(folder)}
    asked = Counter(request.path for request in internet.requests)
    assert 0 < len(done) < PAGES

    code, out, err = await finish(await start("-i", str(listed), "-o", str(folder)))
    assert {entry["url"] for entry in entries(folder)} == set(urls(site).split())
    assert f"{len(done)} skipped, done before" in out, err
    again = Counter(request.path for request in internet.requests)
    assert all(again[url.removeprefix(site)] == asked[url.removeprefix(site)] for url in done)
    assert no_request_came_too_early(internet)


async def test_a_call_without_urls_is_an_error_of_one_line(tmp_path: Path) -> None:
    code, out, err = await finish(await start())
    assert (code, out) == (2, "")
    assert err == (
        "gatekeeper fetch: no URLs; give some, or -i FILE, or `-` for standard input, or "
        "--sitemap ORIGIN\n"
    )


async def test_a_missing_list_of_urls_is_an_error_of_one_line() -> None:
    code, _, err = await finish(await start("-i", "nowhere.txt"))
    assert code == 2
    assert err.splitlines()[-1] == (
        "gatekeeper fetch: -i nowhere.txt: No such file or directory; give a file with one URL per "
        "line, or `-` for standard input"
    )


async def test_an_empty_standard_input_fetches_nothing_and_exits_0() -> None:
    code, out, err = await finish(await start("-", stdin=asyncio.subprocess.DEVNULL))
    assert (code, out) == (0, "fetched 0, 0 bytes\n"), err


async def test_a_second_ctrl_c_ends_the_crawl_at_once(internet: FakeInternet) -> None:
    hold = Hold(Page("slow"))
    internet.site("127.0.0.1").robots("").on("/slow", hold)
    process = await start(f"http://127.0.0.1:{internet.listener().port()}/slow")
    await hold.waiting.acquire()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = b""
    while not said.startswith(b"stopping: waiting "):
        said = await process.stderr.readline()
        assert said, "it ended at the first Ctrl-C"
    process.send_signal(signal.SIGINT)
    code, out, err = await finish(process)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def in_the_background() -> None:
    """Ignore SIGINT, as for a command that a shell without job control starts with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def test_a_crawl_in_the_background_ignores_ctrl_c(
    internet: FakeInternet,
) -> None:
    hold = Hold(Page("slow"))
    internet.site("127.0.0.1").robots("").on("/slow", hold)
    url = f"http://127.0.0.1:{internet.listener().port()}/slow"
    process = await start(url, first=in_the_background)
    await hold.waiting.acquire()
    process.send_signal(signal.SIGINT)
    hold.release()
    code, out, err = await finish(process)
    assert (code, out.splitlines()[0]) == (0, "fetched 1 (1 x 200), 4 bytes"), err


def no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
async def test_a_crawl_on_a_full_disk_waits_for_room_for_a_while_and_says_so(
    internet: FakeInternet, site: str, tmp_path: Path
) -> None:
    """With and without the state of an earlier run, side by side: the command looks at its
    deadline every five seconds. No request is sent while they wait."""
    folders = tmp_path / "earlier", tmp_path / "first"
    for folder in folders:
        folder.mkdir()
    code, *_ = await finish(await start(f"{site}/page/0", "-o", str(folders[0])))
    assert code == 0
    asked = len(internet.requests)

    async def run(folder: Path) -> tuple[int, str, str]:
        page, most = f"{site}/page/1", ("--max-wait", "2")
        return await finish(await start(page, "-o", str(folder), *most, first=no_file_may_grow))

    ended = await asyncio.gather(*(run(folder) for folder in folders))
    assert len(internet.requests) == asked
    for folder, (code, _, said) in zip(folders, ended, strict=True):
        assert code == 2
        last = said.splitlines()[-1]
        assert last.startswith(f"gatekeeper fetch: {folder}")
        assert "no clock of a host could be stored" in last
        assert last.endswith("make room there, and run the command again to resume")
        again, out, err = await finish(await start(f"{site}/page/1", "-o", str(folder)))
        assert (again, "fetched 1 (1 x 200)" in out) == (0, True), err
