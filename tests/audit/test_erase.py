"""`erase` replaces the lines of a host by their digests, and the record still verifies."""

from __future__ import annotations

import fcntl
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.audit import erase as erasing
from gatekeeper.audit import writer
from gatekeeper.audit.chain import SegmentName, chain_name
from gatekeeper.audit.erase import ErasureReport, erase
from gatekeeper.audit.files import compress, is_written
from gatekeeper.audit.reading import ChainFiles
from gatekeeper.audit.retention import remove_old
from gatekeeper.audit.show import lines_about
from gatekeeper.cli import main
from gatekeeper.errors import ConfigError
from gatekeeper.signing import new_key
from gatekeeper.testing import ScriptedGate
from tests.audit.conftest import config_of, verified
from tests.audit.maker import BEGIN, Maker, changed, rewrite

A, B = "https://a.test", "https://b.test"
OWN = "User-agent: *\nDisallow: /only-a\n"
SHARED = "User-agent: *\nDisallow:\n"


def erased(folder: Path, host: str = "a.test") -> ErasureReport:
    return erase(folder, host, by="ann", reason="the site's owner asked")


def everything(folder: Path) -> str:
    """All that a folder says, texts and names included."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            octets = path.read_bytes()
            octets = gzip.decompress(octets) if path.suffix == ".gz" else octets
            found.append(f"{path.name} {octets.decode()}")
    return "\n".join(found)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """A chain of three segments, of which the last one was left behind by a killed process."""
    made = Maker(tmp_path / "audit", key=new_key(tmp_path / "key.pem"))
    for origin in (A, B):
        made.robots(origin, SHARED)
        made.page(f"{origin}/1", 1.0)
    made.robots(A, OWN)
    held = made.wait(5.0).grant(f"{A}/2?name=someone", 1.0)
    made.seal()
    made.outcome(held)
    made.refused(f"{A}/only-a/3")
    made.override("a.test", "allow")
    made.override("a.test", "allow", ended=True)
    made.block("a.test", 10.0)
    made.page(f"{B}/4", 1.0)
    made.seal()
    made.wait(60.0).page(f"{A}/5", 1.0)
    return made


def test_nothing_of_the_host_is_left_and_the_chain_verifies(maker: Maker, tmp_path: Path) -> None:
    before = verified(maker.folder)
    report = erased(maker.folder)

    left = everything(maker.folder)
    assert (report.lines, report.segments, report.texts, report.left) == (12, 3, 1, [])
    assert "a.test" not in left
    assert "someone" not in left
    assert "only-a" not in left
    after = verified(maker.folder)
    assert after.differences == []
    assert (after.erased, after.requests) == (report.lines, before.requests - 3)
    assert "ann" in after.erased_by[0]
    assert {path.stat().st_mode & 0o777 for path in maker.folder.glob("*.jsonl*")} <= {0o600, 0o644}


def test_signatures_of_the_seals_hold_and_the_erasure_is_signed_too(
    tmp_path: Path, maker: Maker
) -> None:
    assert maker.key is not None
    public = maker.key.public
    erase(maker.folder, "a.test", by="ann", reason="asked", key=maker.key)

    assert verified(maker.folder, keys=(public,)).differences == []


def test_an_erasure_that_nobody_signed_does_not_hold_where_seals_are_signed(maker: Maker) -> None:
    assert maker.key is not None
    report = erased(maker.folder)
    assert verified(maker.folder).ok
    assert report.erasure is not None
    rewrite(maker.folder / report.erasure, lambda rows: rows[:-1])  # not even a seal

    found = verified(maker.folder, keys=(maker.key.public,)).differences
    assert {one.what for one in found} == {"erasure"}


def test_a_text_that_another_host_used_stays(maker: Maker) -> None:
    assert erased(maker.folder).texts == 1
    assert erased(maker.folder, "b.test").texts == 1  # now nobody uses it
    assert list((maker.folder / "texts").rglob("*.gz")) == []
    assert verified(maker.folder).ok


def test_a_placeholder_that_no_erasure_names_is_found(maker: Maker) -> None:
    report = erased(maker.folder)
    assert report.erasure is not None
    (maker.folder / report.erasure).unlink()

    found = verified(maker.folder).differences
    assert {one.what for one in found} == {"erasure"}


def test_an_erased_line_that_is_changed_is_found(maker: Maker) -> None:
    erased(maker.folder)
    first = min(maker.folder.glob("web*.gz"))
    rewrite(first, lambda rows: [rows[0], changed(rows[1], digest="e" * 64), *rows[2:]])

    assert [one.line for one in verified(maker.folder).differences] == [3]


def test_a_second_time_there_is_nothing_to_erase(maker: Maker) -> None:
    erased(maker.folder)
    files = sorted(maker.folder.rglob("*"))

    again = erased(maker.folder)

    assert (again.lines, again.erasure) == (0, None)
    assert sorted(maker.folder.rglob("*")) == files


def test_a_segment_that_is_written_is_left_alone_and_reported(maker: Maker) -> None:
    octets = maker.path.read_bytes()
    with maker.path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = erased(maker.folder)

    assert maker.path.read_bytes() == octets
    assert (report.segments, report.texts) == (2, 0)
    assert any(str(maker.path) in one and "run this again" in one for one in report.left)
    assert any("texts" in one for one in report.left)
    assert verified(maker.folder).ok  # the line of its file is erased

    assert erased(maker.folder).left == []


def test_a_crash_in_between_leaves_a_record_that_verifies(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = erasing.write_segment, 0

    def crashing(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the erasure and one segment are written
            raise OSError(28, "No space left on device")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(erasing, "write_segment", crashing)
    with pytest.raises(OSError, match="No space"):
        erased(maker.folder)
    monkeypatch.undo()

    assert not list(maker.folder.glob(".*"))
    assert verified(maker.folder).differences == []
    erased(maker.folder)
    assert verified(maker.folder).differences == []
    assert "a.test" not in everything(maker.folder)


def compressed(path: Path) -> None:
    """Compress a segment, as its writer does."""
    compress(path, BEGIN, lambda _path, _members: None)


@pytest.mark.parametrize("left", ["twin", "seal", "unfinished"])
def test_nothing_of_the_host_is_left_in_what_killed_processes_left(maker: Maker, left: str) -> None:
    maker.grant(f"{A}/6", 1.0)
    octets = maker.path.read_bytes()
    match left:
        case "twin":  # killed between the two forms
            compressed(maker.path)
            maker.path.write_bytes(octets)
        case "seal":  # the last line of a segment that `audit.keep` has removed
            os.utime(maker.path, (1.0, 1.0))
            remove_old(maker.folder, 2.0, "")
        case _:
            for name in (f"{maker.path.name}.gz", "texts/ab/" + "ab" * 32 + ".gz"):
                path = maker.folder / name
                path.parent.mkdir(exist_ok=True, parents=True)
                path.with_name(f".{path.name}.42-7").write_bytes(octets)
    assert "a.test" in everything(maker.folder)
    assert erased(maker.folder).left == []
    assert "a.test" not in everything(maker.folder)
    assert verified(maker.folder).differences == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_segment_that_was_compressed_or_removed_since_it_was_listed_is_not_made_again(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    listed, path = erasing.find_chains, maker.path
    maker.seal(compressed=False)

    def then_changed(folders: list[Path]) -> list[ChainFiles]:
        found = listed(folders)
        if path.exists():
            compressed(path)
            if keep:
                remove_old(maker.folder, BEGIN + 1.0, "")
        return found

    monkeypatch.setattr(erasing, "find_chains", then_changed)
    erased(maker.folder)
    assert not path.exists()
    assert "a.test" not in everything(maker.folder)
    assert verified(maker.folder).differences == []


async def test_a_segment_is_left_alone_until_it_is_compressed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is erased while it is compressed would come back."""
    reports = []

    def then_compress(path: Path, *rest: Any) -> None:
        reports.append(erased(folder, "a.example"))
        compress(path, *rest)
        assert is_written(path)

    monkeypatch.setattr(writer, "compress", then_compress)
    async with ScriptedGate(config=config_of(folder)) as gate:
        (await gate.acquire("https://a.example/")).end()
    assert [(one.lines, len(one.left)) for one in reports] == [(0, 1)]
    assert erased(folder, "a.example").left == []
    assert "a.example" not in everything(folder)
    assert verified(folder).differences == []


def test_texts_that_were_left_are_removed_by_the_next_call(maker: Maker) -> None:
    (maker.folder / "texts" / "ab").mkdir(exist_ok=True)
    (maker.folder / "texts" / "ab" / "notes.gz").write_bytes(gzip.compress(b"not ours"))
    other = Maker(maker.folder, pid=7, at=BEGIN + 1.0)
    with other.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = erased(maker.folder)
        assert (report.lines, report.texts) == (12, 0)
        assert "run this again" in report.left[0]
    assert "only-a" in everything(maker.folder)
    assert erased(maker.folder).texts == 1
    assert "only-a" not in everything(maker.folder)
    assert "not ours" in everything(maker.folder)


def test_a_text_is_kept_if_its_writer_began_a_segment_meanwhile(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = erasing.find_chains
    other = Maker(maker.folder, pid=7, at=BEGIN + 1.0)
    calls: list[int] = []

    def then_rotated(folders: list[Path]) -> list[ChainFiles]:
        found = listed(folders)
        calls.append(1)
        if len(calls) == 2:  # before the texts
            compressed(other.path)  # and its writer goes on
        return found

    monkeypatch.setattr(erasing, "find_chains", then_rotated)
    report = erased(maker.folder)
    assert (len(calls), report.texts) == (2, 0)
    assert "texts" in report.left[0]


def test_other_hosts_and_names_within_a_name_stay(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    for origin in (A, "https://www.a.test", "https://xa.test", "http://a.test:8080"):
        maker.robots(origin, None)
        maker.page(f"{origin}/x", 1.0)

    assert erased(maker.folder, "A.TEST").lines == 6
    left = everything(maker.folder)
    assert left.count("www.a.test/x") == left.count("xa.test/x") == 1


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0::1"])
def test_an_ipv6_address_may_lack_its_brackets(tmp_path: Path, host: str) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots("http://[::1]", None)
    assert list(lines_about([maker.folder], host))
    assert erased(maker.folder, host).lines == 1


def test_a_damaged_segment_is_left_alone_and_reported(maker: Maker) -> None:
    closed = min(maker.folder.glob("*.jsonl.gz"))
    closed.write_bytes(damaged := closed.read_bytes()[:-9])
    os.mkfifo(maker.folder / str(SegmentName(chain_name("web", 7, BEGIN), 1)))
    report = erased(maker.folder)
    assert report.segments == 2
    assert ["can't be read" in one for one in report.left] == [True, True]
    assert closed.read_bytes() == damaged


def test_digests_of_urls_are_erased_by_their_scope(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit", urls="digest")
    scopes = [{"scope": "a.test", "interval": 1.0, "source": "default", "since": None}]
    maker.page("0" * 64 + "/ / ", scopes=scopes, text=None, line=None, reason="no_file")
    maker.refused("0" * 64 + "/ / ", verdict="deny", reason="operator", line=None, text=None)

    report = erased(maker.folder)
    assert report.lines == 2
    assert "digests" in report.left[0]


def test_an_erasure_removes_a_torn_last_line(maker: Maker) -> None:
    with maker.path.open("ab") as file:
        file.write(b'{"v":1,"url":"https://a.test/')
    assert erased(maker.folder).left == []
    assert "a.test" not in everything(maker.folder)


def test_the_command_needs_a_name_and_a_reason(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["audit", "erase", str(maker.folder), "a.test"]
    with pytest.raises(SystemExit):
        main(call)
    assert "--by and --reason" in capsys.readouterr().err

    assert main([*call, "--by", "ann", "--reason", "asked"]) == 0
    assert "erased: 12 lines in 3 segments" in capsys.readouterr().out
    assert main([*call, "--by", "ann", "--reason", "asked"]) == 1
    assert "no line of a.test" in capsys.readouterr().out


def test_what_is_no_host_is_a_clear_error(maker: Maker) -> None:
    for host in ("", "https://a.test/", "a b", "a.test/x"):
        with pytest.raises(ConfigError, match="no host"):
            erased(maker.folder, host)
