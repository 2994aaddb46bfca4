"""How a chain is written: segments, seals, failures of the disk, forks."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper import Deferred, Denied, StorageError, __version__
from gatekeeper.audit import chain, files, retention, writer
from gatekeeper.audit.index import index_path
from gatekeeper.audit.lines import SealLine, read_line
from gatekeeper.audit.verify import verify
from gatekeeper.clock import VirtualClock
from gatekeeper.signing import new_key
from gatekeeper.testing import ScriptedGate
from tests.audit.conftest import chains_of, config_of, full_disk
from tests.audit.maker import Maker
from tests.waiting_support import until

Read = Callable[..., list[dict[str, Any]]]
A = "https://a.example"


async def a_request(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await requests(gate, 1)


async def requests(gate: ScriptedGate, count: int) -> None:
    for number in range(count):
        (await gate.acquire(f"{A}/{number}")).end()


async def test_a_full_segment_is_sealed_and_compressed_and_the_next_one_goes_on(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder, audit={"rotate": 8192})) as gate:
        await requests(gate, 60)
    lines = read_record()
    seals = [line for line in lines if line["kind"] == "seal"]
    assert len(seals) == len(list(folder.glob("*.jsonl.gz"))) > 3
    assert [seal["reason"] for seal in seals] == ["size"] * (len(seals) - 1) + ["end"]
    first = 1
    for seal in seals:
        assert (seal["first"], seal["lines"]) == (first, seal["n"] - 1)
        assert (seal["key"], seal["signature"]) == (None, None)
        first = seal["n"] + 1
    assert not list(folder.glob("*.jsonl"))
    assert not list(folder.glob(".*"))


async def test_a_segment_is_closed_after_a_day(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=clock) as gate:
        await requests(gate, 1)
        clock.advance(86_401.0)
        await requests(gate, 1)
    assert [seal["reason"] for seal in read_record("seal")] == ["age", "end"]


async def test_seals_are_signed_with_the_key_of_the_identity(
    folder: Path, read_record: Read, tmp_path: Path
) -> None:
    key = new_key(tmp_path / "bot.pem")
    identity = {"key": str(tmp_path / "bot.pem"), "directory": "https://bot.example"}
    async with ScriptedGate(config=config_of(folder, identity=identity)) as gate:
        await requests(gate, 1)
    (seal,) = read_record("seal")
    ((name, _),) = chains_of(folder).items()
    assert seal["key"] == key.public.keyid
    assert chain.is_signed(key.public, name, seal["n"], seal["prev"], seal["signature"])


async def test_folders_and_files_are_readable_by_their_owner_alone(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        gate.say(A, "User-agent: *\nDisallow: /x\n")
        await requests(gate, 1)
        paths = [folder, *folder.rglob("*")]
        assert len(paths) == 5
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


async def test_a_start_names_the_last_whole_line_of_each_unsealed_chain(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder)):
        pass  # a sealed chain, which is not named
    folder.joinpath("notes.txt").write_text("not ours")
    (sealed,) = folder.glob("*.gz")
    whole = gzip.decompress(sealed.read_bytes()).splitlines()[0]  # its start
    chain_of, _, rest = sealed.name.partition("Z-")
    # The other chain began a microsecond before or after.
    torn = folder / f"{chain_of[:-1]}{int(chain_of[-1]) ^ 1}Z-{rest.removesuffix('.gz')}"
    torn.write_bytes(whole + b'\n{"v":1,"n":2')
    empty = folder / "old-2-20260101T000000000000Z-000001.jsonl"
    empty.write_bytes(b"")
    for path in (torn, empty):
        path.chmod(0o600)
    async with ScriptedGate(config=config_of(folder)):
        pass
    starts = [
        one for lines in chains_of(folder).values() for one in lines if one["kind"] == "start"
    ]
    named = max(starts, key=lambda line: line["t"])["chains"]
    assert named == [{"segment": torn.name, "n": 1, "digest": chain.digest_of(whole)}]
    assert torn.read_bytes() == whole + b'\n{"v":1,"n":2'


@pytest.mark.parametrize("octets", [0, 1, 100])
async def test_on_a_full_disk_leases_are_deferred_until_the_record_can_be_written(
    octets: int,
    folder: Path,
    read_record: Read,
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=clock) as gate:
        await requests(gate, 2)
        before = read_record()
        with full_disk(monkeypatch, octets):
            for _ in range(3):
                with pytest.raises(Deferred, match=r"storage.*No space left") as caught:
                    await gate.acquire(f"{A}/3")
                assert caught.value.decision.reason == "storage"
            assert not gate.ready
            assert "No space left" in (gate.parts.storage_failing or "")
            assert any(view.kind == "storage" for view in await gate.why("a.example"))
            clock.advance(1.5)
            assert not gate.ready
        assert read_record() == before
        clock.advance(4.0)
        assert gate.ready
        await requests(gate, 2)
    lines = read_record()
    assert [line["kind"] for line in lines].count("grant") == 4
    (omitted,) = read_record("omitted")
    assert omitted["count"] >= 3
    assert "No space left" in omitted["why"]


async def test_on_a_full_disk_requests_go_on_if_asked_for_and_the_gap_is_written(
    folder: Path, read_record: Read, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, audit={"on_failure": "continue"})
    async with ScriptedGate(config=config, clock=clock) as gate:
        open_lease = await gate.acquire(f"{A}/open")
        open_lease.report(status=200)
        open_lease.end()
        with full_disk(monkeypatch, 50):
            await requests(gate, 5)
            late = await gate.acquire("http://b.example/late")
            assert gate.ready
        clock.advance(2.0)
        late.end()
        await requests(gate, 1)
    assert len(read_record("grant")) == len(read_record("outcome")) == 2
    # Five grants with their outcomes, and one whose outcome came when lines were written again.
    assert [line["count"] for line in read_record("omitted")] == [11, 1]


async def test_a_text_that_cant_be_stored_defers_the_leases_that_it_would_decide(
    folder: Path, read_record: Read, clock: VirtualClock
) -> None:
    async with ScriptedGate(config=config_of(folder), clock=clock) as gate:
        gate.say(A, "User-agent: *\nDisallow: /x\n")
        (folder / "texts").write_text("in the way")
        with pytest.raises(Deferred, match="storage"):
            await gate.acquire(f"{A}/")
        (folder / "texts").unlink()
        clock.advance(2.0)
        (await gate.acquire(f"{A}/")).end()
    assert len(read_record("grant")) == 1


async def test_a_folder_that_cant_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"audit\.folder: .*file: can't be used .*give a folder"):
        async with ScriptedGate(config=config_of(tmp_path / "file")):
            pass


async def test_a_gate_that_starts_on_a_full_disk_begins_its_chain_later(
    folder: Path, read_record: Read, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch, 10):
        gate = ScriptedGate(config=config_of(folder), clock=clock)
        await gate.__aenter__()
        assert not gate.ready
    clock.advance(2.0)
    await requests(gate, 1)
    await gate.__aexit__()
    assert len(read_record("grant")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_forked_child_writes_a_chain_of_its_own(folder: Path) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await requests(gate, 1)
        parent = await gate.acquire(f"{A}/parent")
        if (child := os.fork()) == 0:
            code = 1
            try:  # what waits in the parent is not written here
                gate.parts.scheduler.block("a.example", gate.parts.clock.wall() + 60.0)
                asyncio.run(a_request(folder))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        parent.end()
    chains = chains_of(folder)
    of_parent = next(lines for name, lines in chains.items() if f"-{os.getpid()}-" in name)
    assert [line["url"] for line in of_parent if line["kind"] == "grant"] == [
        f"{A}/0",
        f"{A}/parent",
    ]
    assert len(chains) == 2
    for name, lines in chains.items():
        assert lines[0]["pid"] == int(name.split("-")[-2])
        assert not [line for line in lines if line["kind"] == "block"]


async def test_lines_of_a_closed_gate_begin_no_chain(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        lease = await gate.acquire(f"{A}/")
    lease.end()
    assert read_record()[-1]["kind"] == "seal"


async def test_half_characters_do_not_stop_the_record(folder: Path, read_record: Read) -> None:
    async with ScriptedGate(config=config_of(folder)) as gate:
        await gate.block("a.example", gate.parts.clock.wall() + 60.0, "half \ud800")
    assert read_record("block")[0]["reason"] == r"half \ud800"


def test_a_large_text_is_stored_whole(tmp_path: Path) -> None:
    from gatekeeper.audit.files import TextStore

    for body in (b"", b"User-agent: *\n", b"Disallow: /x\n" * 40_000):
        digest = TextStore(tmp_path).keep(body)
        assert gzip.decompress((tmp_path / chain.text_path(digest)).read_bytes()) == body
        assert TextStore(tmp_path).keep(body) == digest


async def test_old_segments_leave_their_seals_and_take_texts_that_nothing_names_with_them(
    folder: Path, clock: VirtualClock
) -> None:
    def texts() -> set[str]:
        return {path.name for path in folder.glob("texts/*/*.gz")}

    config = config_of(folder, audit={"keep": 86_400.0 * 2})
    async with ScriptedGate(config=config, clock=clock) as gate:
        gate.say(A, "User-agent: *\nDisallow: /old\n")
        gate.say("https://b.example", "User-agent: *\nDisallow: /stays\n")
        await requests(gate, 2)
        (await gate.acquire("https://b.example/")).end()
        old = texts()
        for _ in range(5):
            clock.advance(86_401.0)
            gate.say(A, "User-agent: *\nDisallow: /new\n")
            await requests(gate, 1)
            (await gate.acquire("https://b.example/")).end()
            await until(lambda: len(list(folder.glob("*.jsonl"))) == 1)
    names = sorted(path.name.split("-", 3)[3] for path in folder.iterdir() if path.is_file())
    assert len(old - texts()) == 1
    assert len(texts()) == 2
    ends = [name.partition(".")[2] for name in names]
    assert ends == [*["seal.json"] * 3, *["ids", "jsonl.gz"] * 3]
    assert isinstance(read_line(next(folder.glob("*.seal.json")).read_bytes()), SealLine)


async def test_a_lease_of_an_earlier_process_is_held_though_its_line_cant_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may be in flight."""
    config = config_of(folder, pacing={"default_interval": 1.0})
    async with ScriptedGate(config=config) as gate:
        with full_disk(monkeypatch):
            lease = await gate.parts.leases.hold(f"{A}/", 60.0, None)
            assert not lease.ended
            assert gate.stats().pacing.in_flight == 1
            lease.end()


async def test_texts_are_kept_that_a_segment_names_which_is_compressed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A)
    maker.seal()
    maker.robots(A)
    maker.seal(compressed=False)
    (plain,) = maker.folder.glob("*.jsonl")
    (old,) = maker.folder.glob("*.gz")
    os.utime(old, (1.0, 1.0))

    def then_compress(path: Path) -> Path:
        files.compress(plain, 9.0, lambda _path, _members: None)
        return index_path(path)

    monkeypatch.setattr(retention, "index_path", then_compress)
    assert retention.remove_old(maker.folder, 2.0, maker.name) == set()


def test_texts_that_stayed_because_of_another_process_are_removed_later(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A)
    maker.seal()
    other = Maker(maker.folder, pid=7)
    other.seal()
    other.line("end", reason="closed")
    first, second = sorted(maker.folder.glob("*.gz"))
    for path in (first, second):
        os.utime(path, (1.0, 1.0))
    with other.path.open("rb") as file:
        files.lock_file(file.fileno())
        assert retention.remove_old(maker.folder, 2.0, "") == set()
    os.utime(other.path, (1.0, 1.0))
    assert len(retention.remove_old(maker.folder, 2.0, "")) == 1
    assert verify([maker.folder], version=__version__).differences == []


def test_no_text_is_removed_that_a_process_may_name_which_began_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A)
    maker.seal()

    def then_begin(path: Path) -> Path:
        Maker(maker.folder, pid=7).robots(A)
        return index_path(path)

    monkeypatch.setattr(retention, "index_path", then_begin)
    assert retention.remove_old(maker.folder, 2e9, "") == set()


def test_an_old_segment_that_cant_be_read_stays_and_a_damaged_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maker = Maker(tmp_path / "audit")
    for _ in range(3):
        maker.robots(A)
        maker.seal()
    unreadable, damaged, good = sorted(maker.folder.glob("*.gz"))
    os.mkfifo(maker.path)  # it is not waited for
    damaged.write_bytes(b"no gzip")
    opened = retention.open_either

    def fail(path: Path) -> Any:
        if path == unreadable:
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(retention, "open_either", fail)
    assert retention.remove_old(maker.folder, 2e9, "") == set()
    assert sorted(maker.folder.glob("*.gz")) == [unreadable]
    assert (maker.folder / good.name.replace(".jsonl.gz", ".seal.json")).exists()
    assert "Permission denied" in caplog.text


async def test_a_segment_is_locked_though_another_process_asks_at_that_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = files.lock_file

    def while_asked(fd: int) -> None:
        (path,) = folder.glob("*.jsonl")
        other = os.open(path, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.01, os.close, [other]).start()
        lock(fd)

    monkeypatch.setattr(writer, "lock_file", while_asked)
    async with ScriptedGate(config=config_of(folder)):
        (path,) = folder.glob("*.jsonl")
        assert files.is_written(path)


async def test_what_a_killed_process_did_not_finish_is_removed_at_the_next_start(
    folder: Path,
) -> None:
    folder.mkdir()
    names = [".x-1-20260101T000000000000Z-000001.jsonl.gz.42-7", ".notes.1-2"]
    for name in names:
        (folder / name).write_bytes(b"half")
    with files.whole_file(folder / "x-2-20260101T000000000000Z-000001.ids"):
        async with ScriptedGate(config=config_of(folder)):
            pass
        left = sorted(one.name for one in folder.glob(".*"))
    assert left[0] == names[1]
    assert [one.split("-")[1] for one in left[1:]] == ["2"]  # it is still written


async def test_a_chain_goes_on_as_another_one_if_its_open_segment_is_removed(
    folder: Path, clock: VirtualClock
) -> None:
    config = config_of(folder, host=[{"match": "b.example", "robots": "allow"}])
    async with ScriptedGate(config=config, clock=clock) as gate:
        await requests(gate, 2)
        (lost,) = folder.glob("*.jsonl")
        lost.unlink()
        clock.advance(2.0)
        with pytest.raises(Deferred, match="its open segment was removed"):
            await gate.acquire(f"{A}/")
        clock.advance(2.0)
        await requests(gate, 1)
        (await gate.acquire("https://b.example/")).end()
    (segment,) = folder.glob("*.jsonl.gz")
    (found,) = verify([folder], version=__version__).differences
    assert found.text == f"{lost.name}, which its start names up to line 6, is missing"
    assert gzip.decompress(segment.read_bytes()).count(b'"kind":"grant"') == 2


async def test_a_folder_that_cant_be_listed_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(writer.os, "listdir", fail)
    with pytest.raises(StorageError, match=r"can't be used .Permission denied"):
        async with ScriptedGate(config=config_of(folder)):
            pass


async def test_gates_that_begin_at_the_same_moment_one_after_the_other_have_chains_of_their_own(
    folder: Path,
) -> None:
    for _ in range(3):
        async with ScriptedGate(config=config_of(folder), clock=VirtualClock()) as gate:
            await requests(gate, 1)
    assert len(chains_of(folder)) == 3


async def test_what_waits_is_bounded_while_nothing_can_be_written(
    folder: Path, read_record: Read, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_KEPT", 20)
    config = config_of(folder, audit={"max_rate": 1, "on_failure": "continue"})
    async with ScriptedGate(config=config, clock=clock) as gate:
        gate.say("https://deny.example", "User-agent: *\nDisallow: /\n")
        with full_disk(monkeypatch):
            for number in range(100):
                await requests(gate, 1)
                gate.say(f"https://{number}.example", "User-agent: *\nDisallow: /x\n")
                (await gate.acquire(f"https://{number}.example/")).end()
                for page in range(3):
                    with pytest.raises(Denied):
                        await gate.acquire(f"https://deny.example/{page}")
                clock.advance(61.0)
                await clock.settle()
        clock.advance(61.0)
        await clock.settle()
        for number in range(100):  # each has its robots.txt in the record
            (await gate.acquire(f"https://{number}.example/")).end()
    assert len(read_record("omitted")) < 20
    assert len([line for line in read_record() if line["kind"] != "grant"]) < 350


async def test_a_chain_that_could_not_begin_begins_later_with_the_salt_that_it_had(
    folder: Path, read_record: Read, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path, *rest: Any, opened: Callable[..., int] = os.open) -> int:
        if str(path).endswith(".jsonl"):
            raise OSError(28, "No space left on device")
        return opened(path, *rest)

    salts = list[str]()
    begin = writer.ChainWriter.open

    async def open_writer(one: writer.ChainWriter) -> None:
        salts.append(one.salt)  # what waits for the chain has digests with it
        await begin(one)

    monkeypatch.setattr(writer.ChainWriter, "open", open_writer)
    config = config_of(folder, audit={"urls": "digest"})
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "open", no_room)
        gate = ScriptedGate(config=config, clock=clock)
        await gate.__aenter__()
        assert not gate.ready
    clock.advance(2.0)
    await requests(gate, 1)
    await gate.__aexit__()
    assert [line["salt"] for line in read_record("start")] == salts
    assert len(read_record("grant")) == 1


@pytest.mark.parametrize("urls", ["full", "digest"])
async def test_names_that_are_no_utf_8_do_not_stop_the_record(
    tmp_path: Path, read_record: Read, monkeypatch: pytest.MonkeyPatch, urls: str
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff") / "audit"
    monkeypatch.setattr(socket, "gethostname", lambda: os.fsdecode(b"h\xff"))
    group = os.fsdecode(b"g\xff")
    sections: dict[str, Any] = {
        "group": [{"name": group, "interval": 0.0}],
        "host": [{"match": "a.example", "group": group, "reason": group}],
    }
    config = config_of(folder, audit={"urls": urls}, **sections)
    async with ScriptedGate(config=config) as gate:
        await requests(gate, 1)
    lines = read_record(folder=folder)
    assert lines[0]["host"] == r"h\udcff"
    assert [one["scopes"][1]["scope"] for one in lines if one["kind"] == "grant"] == [
        r"group:g\udcff"
    ]


async def test_the_end_stands_behind_the_lines_that_were_left_out(
    folder: Path, read_record: Read
) -> None:
    async with ScriptedGate(config=config_of(folder, audit={"max_rate": 1})) as gate:
        gate.say(A, "User-agent: *\nDisallow: /\n")
        for _ in range(3):
            with pytest.raises(Denied):
                await gate.acquire(f"{A}/")
    assert [line["kind"] for line in read_record()[-3:]] == ["omitted", "end", "seal"]
