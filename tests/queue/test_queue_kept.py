"""A queue with `keep`: its URLs outlive the process, in order and with their data."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Config, Gatekeeper, PoliteQueue, StorageError
from tests.politeness.world import AGENT
from tests.processes import PYTHON


def gate(*denied: str) -> Gatekeeper:
    """A rule for every host that needs no robots.txt."""
    rules = [{"match": name, "robots": "deny"} for name in denied]
    return Gatekeeper(
        AGENT,
        config=Config.from_dict(
            {
                "host": [{"match": "*", "robots": "allow"}, *rules],
                "pacing": {"default_interval": 0.0},
            }
        ),
    )


async def drain(queue: PoliteQueue) -> list[tuple[str, Any]]:
    found = []
    while not queue.empty():
        async with await queue.get() as lease:
            found.append((lease.url, lease.data))
            lease.report(status=200)
    return found


async def test_join_waits_for_urls_that_an_earlier_queue_left(tmp_path: Path) -> None:
    keep = tmp_path / "queue.sqlite"
    async with gate() as opened:
        async with PoliteQueue(opened, keep=keep) as queue:
            await queue.put("http://a.example/1")
        async with PoliteQueue(opened, keep=keep) as queue:
            joining = asyncio.ensure_future(queue.join())
            await asyncio.sleep(0)
            assert not joining.done()
            await drain(queue)
            await joining


async def test_urls_put_and_not_done_come_back_in_order(tmp_path: Path) -> None:
    keep = tmp_path / "queue.sqlite"
    async with gate() as opened:
        async with PoliteQueue(opened, keep=keep) as queue:
            for number in range(200):  # more than fit in memory for one origin
                await queue.put(f"http://a.example/{number}", data={"n": number})
            await queue.put("http://a.example/first", priority=9, data=[b"\x00", None, 1.5])
            await queue.put("http://b.example/")
            async with await queue.get() as lease:
                assert lease.url in ("http://a.example/first", "http://b.example/")
                done = lease.url
        async with PoliteQueue(opened, keep=keep) as queue:
            assert queue.qsize() == queue.stats().unfinished == 201
            await queue.put("http://a.example/late", data="late")
            found = await drain(queue)
            await queue.join()
        async with PoliteQueue(opened, keep=keep) as queue:
            assert queue.empty()
    assert done not in [url for url, _ in found]
    of_a = [one for one in found if "a.example" in one[0] and not one[0].endswith("first")]
    assert of_a == [
        *((f"http://a.example/{number}", {"n": number}) for number in range(200)),
        ("http://a.example/late", "late"),
    ]


async def test_urls_given_back_are_kept_and_denied_ones_are_done(tmp_path: Path) -> None:
    keep = tmp_path / "queue.sqlite"
    denied: list[str] = []
    async with gate("d.example") as opened:
        async with PoliteQueue(
            opened, keep=keep, on_denied=lambda one: denied.append(one.url)
        ) as queue:
            await queue.put("http://d.example/")
            await queue.put("http://a.example/1")
            await queue.put("http://a.example/2")
            turn = await queue.get()
            await turn.give_back()
        assert queue.stats().denied == 1
        assert denied == ["http://d.example/"]
        async with PoliteQueue(opened, keep=keep) as queue:
            assert [url for url, _ in await drain(queue)] == [
                "http://a.example/1",
                "http://a.example/2",
            ]


async def test_data_that_is_not_plain_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    async with gate() as opened, PoliteQueue(opened, keep=tmp_path / "queue.sqlite") as queue:
        with pytest.raises(TypeError, match="plain values"):
            await queue.put("http://a.example/", data=("a tuple", "comes back as a list"))
        assert queue.empty()
        assert queue.stats().origins == 0
        await queue.put("http://a.example/", data=["a", "list"])
        assert await drain(queue) == [("http://a.example/", ["a", "list"])]


async def test_a_second_queue_on_one_file_is_refused(tmp_path: Path) -> None:
    keep = tmp_path / "queue.sqlite"
    async with gate() as opened, PoliteQueue(opened, keep=keep):
        with pytest.raises(StorageError, match="one process at a time"):
            PoliteQueue(opened, keep=keep)
    (tmp_path / "folder").mkdir()
    async with gate() as opened:
        with pytest.raises(StorageError, match="folder"):
            PoliteQueue(opened, keep=tmp_path / "folder")


VICTIM = """
import asyncio, os, signal, sys
from pathlib import Path
from gatekeeper import PoliteQueue
from tests.queue.test_queue_kept import gate

async def main() -> None:
    async with gate() as opened:
        queue = PoliteQueue(opened, keep=Path(sys.argv[1]))
        for number in range(50):
            await queue.put(f"http://h{number % 5}.example/{number}", data=number)
        for _ in range(20):
            async with await queue.get() as lease:
                print(lease.data, flush=True)
        in_hand = await queue.get()
        print("hand", in_hand.data, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_kill_9_loses_no_url_and_repeats_those_in_hand(tmp_path: Path) -> None:
    keep = tmp_path / "queue.sqlite"
    done = subprocess.run(
        [PYTHON, "-c", VICTIM, str(keep)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.split()
    assert done.stderr == ""
    finished, in_hand = set(map(int, lines[:20])), int(lines[-1])
    async with gate() as opened, PoliteQueue(opened, keep=keep) as queue:
        left = [data for _, data in await drain(queue)]
    assert set(left) == set(range(50)) - finished
    of_its_host = [data for data in left if data % 5 == in_hand % 5]
    assert of_its_host == [*sorted(set(of_its_host) - {in_hand}), in_hand]


async def test_a_url_that_kills_each_process_does_not_hold_back_the_others(tmp_path: Path) -> None:
    keep, seen = tmp_path / "queue.sqlite", []
    async with gate() as opened:
        async with PoliteQueue(opened, keep=keep) as queue:
            for number in range(4):
                await queue.put(f"http://a.example/{number}")
            unused = await queue.get()
            await unused.give_back()  # so it keeps its place
        for _ in range(6):
            async with PoliteQueue(opened, keep=keep) as queue:
                turn = await queue.get()
                seen.append(turn.url[-1])
                if turn.url[-1] != "0":
                    turn.done()
            turn.done()  # the queue was closed before, as by the end of a process
    assert seen == ["0", "1", "2", "3", "0", "0"]
