"""The `Storage` protocol, in memory and in a file."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gatekeeper.config import StorageConfig
from gatekeeper.storage import (
    ClockRecord,
    OriginRecord,
    SqliteStorage,
    Storage,
    base,
    pack_body,
    unpack_body,
)
from tests.memory_storage import MemoryStorage
from tests.storage.inside import history_bytes

ORIGIN = "https://a.example"
SMALL = StorageConfig(history_versions=3, history_bytes=4000, flush_interval=60.0)


@pytest.fixture(params=["memory", "sqlite pending", "sqlite written"])
async def storage(request: Any, path: Path) -> AsyncIterator[Storage]:
    """Provide three storages: in memory, with pending writes, and with everything written."""
    kept: Storage
    if request.param == "memory":
        kept = MemoryStorage(config=SMALL)
    elif request.param == "sqlite pending":
        kept = SqliteStorage(path, config=SMALL)
    else:
        kept = _Written(path, config=SMALL)
    await kept.open()
    yield kept
    await kept.close()


class _Written(SqliteStorage):
    """Flushes before each read."""

    async def _read(self, query: Any) -> Any:
        await self.flush()
        return await super()._read(query)

    async def load_origin(self, origin: str) -> Any:
        await self.flush()
        return await super().load_origin(origin)

    async def load_clock(self, scope: str) -> Any:
        await self.flush()
        return await super().load_clock(scope)


async def body_at(storage: Storage, wall: float) -> bytes | None:
    """Return the text last seen at or before a moment; None: no file, or unknown."""
    begun = [one for one in await storage.history(ORIGIN) if one.first_seen <= wall]
    return await storage.body(begun[-1].body_hash) if begun else None


async def test_a_record_comes_back_whole(storage: Storage, made: Any) -> None:
    record = made(
        status=None,
        first_unreachable_at=990.0,
        ladder_step=3,
        hops=("https://a.example/robots.txt", "https://b.example/robots.txt"),
        good_hops=("https://b.example/robots.txt",),
        etag='W/"x"',
        last_modified="Thu, 01 Jan 1970 00:00:00 GMT",
        took=0.25,
        last_page_ok_at=999.5,
    )
    storage.put_origin(record)
    assert await storage.load_origin(ORIGIN) == record


def test_a_cut_compressed_body_is_an_error() -> None:
    body, _ = pack_body(b"Disallow: /x\n" * 100)
    for cut in range(len(body)):
        with pytest.raises(zlib.error):
            unpack_body(body[:cut])


def test_a_body_that_grows_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_TEXT", 1000)
    assert unpack_body(pack_body(bytes(100_000))[0]) == bytes(1000)


async def test_load_origin_of_an_unknown_origin_is_none(storage: Storage) -> None:
    assert await storage.load_origin(ORIGIN) is None
    assert await storage.load_clock("a.example") is None
    assert await storage.history(ORIGIN) == []
    assert await storage.body(b"\0" * 32) is None


async def test_the_latest_record_wins(storage: Storage, made: Any) -> None:
    storage.put_origin(made(at=1.0))
    storage.put_origin(made(at=2.0))
    found = await storage.load_origin(ORIGIN)
    assert found is not None
    assert found.fetched_at == 2.0


async def test_a_body_without_a_hash_gets_one(storage: Storage, made: Any) -> None:
    fields = msgspec.structs.asdict(made(text=b"text")) | {"body_hash": None}
    storage.put_origin(OriginRecord(**fields))
    found = await storage.load_origin(ORIGIN)
    assert found is not None
    assert found.body_hash == pack_body(b"text")[1]


async def test_a_header_that_is_no_utf8_comes_back_as_it_was(storage: Storage, made: Any) -> None:
    record = made(etag='"\udcff"', last_modified="h\u00e9")
    storage.put_origin(record)
    assert await storage.load_origin(ORIGIN) == record


async def test_clocks_come_back_whole(storage: Storage) -> None:
    clock = ClockRecord(
        scope="a.example",
        next_at=5.0,
        blocked_until=float("inf"),
        block_reason="429",
        failures=2,
        last_failure_at=4.0,
        safe_interval=1.5,
        paused=True,
        errors=4,
        latency=2.5,
        said_interval=60.0,
        said_until=3600.0,
        made_at=4.0,
        boot_id="b",
        boot_at=2.5,
        interval=1.5,
        in_flight=True,
    )
    storage.put_clock(clock)
    assert await storage.load_clock("a.example") == clock
    assert await storage.load_clocks() == [clock]


async def test_a_clock_is_read_without_waiting(storage: Storage) -> None:
    clock = ClockRecord(scope="a.example", next_at=5.0)
    storage.put_clock(clock)
    assert storage.load_clock_nowait("a.example") == clock
    await storage.flush()
    assert storage.load_clock_nowait("a.example") == clock
    assert storage.load_clock_nowait("b.example") is None


async def test_a_promise_is_read_back_at_once(storage: Storage) -> None:
    storage.promise(ClockRecord(scope="a.example", next_at=5.0))
    storage.put_clock(ClockRecord(scope="a.example", next_at=6.0))
    found = await storage.load_clock("a.example")
    assert found is not None
    assert found.next_at == 6.0


async def test_a_forgotten_clock_is_gone(storage: Storage) -> None:
    storage.promise(ClockRecord(scope="a.example", next_at=5.0))
    await storage.flush()
    storage.forget_clock("a.example")
    assert await storage.load_clock("a.example") is None
    assert await storage.load_clocks() == []


async def test_a_body_fetched_again_extends_its_history_entry(storage: Storage, made: Any) -> None:
    for at in (1.0, 2.0, 3.0):
        storage.put_origin(made(at=at))
    (entry,) = await storage.history(ORIGIN)
    assert (entry.first_seen, entry.last_seen, entry.size) == (1.0, 3.0, 27)


async def test_a_failed_fetch_extends_no_history_entry(storage: Storage, made: Any) -> None:
    storage.put_origin(made(at=1.0))
    storage.put_origin(made(at=9.0, good_fetched_at=1.0, outcome="timeout", state="unreachable"))
    (entry,) = await storage.history(ORIGIN)
    assert (entry.last_seen, entry.outcome) == (1.0, "rule")


async def test_a_body_that_comes_back_is_an_entry_of_its_own(storage: Storage, made: Any) -> None:
    for at, text in ((1.0, b"A"), (2.0, b"B"), (3.0, b"A")):
        storage.put_origin(made(at=at, text=text))
    texts = [await storage.body(entry.body_hash) for entry in await storage.history(ORIGIN)]
    assert texts == [b"A", b"B", b"A"]
    assert await body_at(storage, 2.5) == b"B"


async def test_every_body_of_one_flush_is_kept(storage: Storage, made: Any) -> None:
    storage.put_origin(made(at=1.0, text=b"A"))
    await storage.flush()
    storage.put_origin(made(at=2.0, text=b"B"))
    storage.put_origin(made(at=3.0, text=b"C"))
    assert [entry.first_seen for entry in await storage.history(ORIGIN)] == [1.0, 2.0, 3.0]


async def test_a_missing_file_is_an_entry_of_the_history(storage: Storage, made: Any) -> None:
    storage.put_origin(made(at=1.0))
    storage.put_origin(made(at=2.0, text=None))
    entry = (await storage.history(ORIGIN))[-1]
    assert (entry.body_hash, entry.outcome, entry.status, entry.size) == (b"", "no_file", 404, 0)
    assert await body_at(storage, 2.0) is None


async def test_nothing_is_known_before_the_first_sighting(storage: Storage, made: Any) -> None:
    storage.put_origin(made(at=1.0))
    assert await body_at(storage, 0.5) is None


async def test_an_origin_that_never_answered_has_no_history(storage: Storage, made: Any) -> None:
    storage.put_origin(made(text=None, good_outcome=None, good_status=None, outcome="timeout"))
    assert await storage.history(ORIGIN) == []


async def test_versions_of_an_origin_are_bounded(storage: Storage, made: Any) -> None:
    for at in range(6):
        storage.put_origin(made(at=float(at), text=b"version %d" % at))
        await storage.flush()
    entries = await storage.history(ORIGIN)
    assert [entry.first_seen for entry in entries] == [3.0, 4.0, 5.0]
    assert await storage.body(pack_body(b"version 0")[1]) is None


async def test_history_is_bounded_in_bytes_but_current_bodies_stay(
    storage: Storage, made: Any
) -> None:
    for at in range(2):
        for site in range(12):
            text = b"site %d version %d" % (site, at)
            storage.put_origin(made(f"https://{site}.example", text, float(at)))
        await storage.flush()
    assert history_bytes(storage) <= SMALL.history_bytes
    for site in range(12):
        found = await storage.load_origin(f"https://{site}.example")
        assert found is not None
        assert found.body == pack_body(b"site %d version 1" % site)[0]


async def test_identical_bodies_are_kept_once(storage: Storage, made: Any) -> None:
    text = b"#" + bytes(range(256)) * 4
    storage.put_origin(made("https://a.example", text))
    await storage.flush()
    alone = history_bytes(storage)
    storage.put_origin(made("https://b.example", text))
    await storage.flush()
    assert history_bytes(storage) - alone < 256


async def test_origins_in_memory_are_bounded_but_what_is_owed_stays(made: Any) -> None:
    storage = MemoryStorage(config=StorageConfig(max_origins=20))
    storage.promise(ClockRecord(scope="0.example", next_at=0.0, paused=True))
    for site in range(60):
        storage.put_origin(made(f"https://{site}.example", at=float(site)))
    found = [site for site in range(60) if await storage.load_origin(f"https://{site}.example")]
    assert len(found) <= 20
    assert found[0] == 0
    assert found[-1] == 59
