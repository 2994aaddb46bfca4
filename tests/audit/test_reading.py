"""What `verify` finds in a chain that somebody changed, and what it says of damaged files."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gatekeeper.audit import reading
from gatekeeper.audit.chain import CLOSED, OPEN, digest_of, text_path
from gatekeeper.audit.files import TextStore, compress
from gatekeeper.audit.retention import remove_old
from gatekeeper.audit.verify import lines_of
from gatekeeper.errors import ConfigError
from gatekeeper.signing import SigningKey, new_key
from tests.audit.conftest import verification, verified
from tests.audit.maker import Maker, changed, rewrite
from tests.effort import of_many

SITE = "https://a.test"


def crawl(maker: Maker, pages: int, *, rotate: int = 0) -> Maker:
    """Pages of one site; `rotate`: a segment ends after so many pages."""
    maker.page(f"{SITE}/robots.txt", 1.0, robots=True, reason="robots_file", line=None, text=None)
    maker.robots(SITE)
    for number in range(1, pages + 1):
        maker.wait(10.0).page(f"{SITE}/{number}")
        if rotate and number % rotate == 0:
            maker.seal()
    return maker


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return new_key(tmp_path_factory.mktemp("key") / "bot.pem")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, key: SigningKey) -> Path:
    """A signed chain of two sealed segments, and lines behind them; it was killed."""
    folder = tmp_path_factory.mktemp("signed") / "audit"
    crawl(Maker(folder, key=key), 9, rotate=4)
    return folder


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl*"))


def number_of(raw: bytes) -> int:
    n: int = json.loads(raw)["n"]
    return n


def edited(raw: bytes, at: int, octet: int) -> bytes:
    at %= len(raw)
    octet = octet if octet != raw[at] else ord("~")
    return raw[:at] + bytes([octet]) + raw[at + 1 :]


CHANGES: dict[str, Callable[[list[bytes], int, int, int], list[bytes]]] = {
    "edit": lambda rows, k, at, octet: [*rows[:k], edited(rows[k], at, octet), *rows[k + 1 :]],
    "remove": lambda rows, k, _, __: [*rows[:k], *rows[k + 1 :]],
    "repeat": lambda rows, k, _, __: [*rows[:k], rows[k], *rows[k:]],
    "insert": lambda rows, k, _, __: [
        *rows[:k],
        changed(rows[k], m=0.5),
        *rows[k:],
    ],
    "swap": lambda rows, k, _, __: [*rows[:k], rows[k + 1], rows[k], *rows[k + 2 :]],
}


@settings(
    max_examples=of_many(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(sorted(CHANGES)),
    st.integers(0, 1),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(11, 125),
)
def test_every_change_before_the_last_seal_is_found_and_its_place_named(
    signed: Path,
    key: SigningKey,
    tmp_path: Path,
    change: str,
    segment: int,
    k: int,
    at: int,
    octet: int,
) -> None:
    folder = tmp_path / "audit"
    shutil.copytree(signed, folder, dirs_exist_ok=True)
    place = 0

    def apply(rows: list[bytes]) -> list[bytes]:
        nonlocal place
        row = k % (len(rows) - 1)
        place = number_of(rows[row])
        return CHANGES[change](rows, row, at, octet)

    rewrite(segments(folder)[segment], apply)

    found = verified(folder, keys=(key.public,)).differences
    assert any(abs(one.line - place) <= 1 for one in found), (place, found)
    assert {Path(one.file).name for one in found} <= {one.name for one in segments(folder)}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_behind_the_last_seal_edits_and_insertions_are_found(
    signed: Path, tmp_path: Path, change: str
) -> None:
    folder = shutil.copytree(signed, tmp_path / "audit")
    last = max(folder.glob("*.jsonl"))
    rewrite(last, lambda rows: CHANGES[change](rows, 0, 100, 0x41))

    assert verified(folder).found


def test_a_removed_tail_is_not_found_unless_a_later_start_names_it(tmp_path: Path) -> None:
    killed = crawl(Maker(tmp_path / "a"), 3)
    named = killed.last()
    assert verified(tmp_path / "a").ok
    rewrite(killed.path, lambda rows: rows[:-2])
    assert verified(tmp_path / "a").ok

    crawl(Maker(tmp_path / "a", pid=43, at=killed.now + 60, chains=(named,)), 1)

    (one,) = verified(tmp_path / "a").differences
    assert (one.line, Path(one.file).name) == (named["n"], named["segment"])
    assert "tail" in one.text


def test_a_chain_that_a_later_start_names_must_not_be_missing(tmp_path: Path) -> None:
    killed = crawl(Maker(tmp_path / "a"), 3)
    crawl(Maker(tmp_path / "a", pid=43, at=killed.now + 60, chains=(killed.last(),)), 1)
    killed.path.unlink()

    assert ["missing" in one.text for one in verified(tmp_path / "a").differences] == [True]


def test_a_line_that_a_later_start_names_must_be_that_line(tmp_path: Path) -> None:
    killed = crawl(Maker(tmp_path / "a"), 3)
    named = killed.last() | {"digest": "f" * 64}
    crawl(Maker(tmp_path / "a", pid=43, at=killed.now + 60, chains=(named,)), 1)

    (one,) = verified(tmp_path / "a").differences
    assert (one.line, "later start" in one.text) == (named["n"], True)


def test_a_later_start_that_names_another_line_hides_no_change(tmp_path: Path) -> None:
    """Whoever changes the end of a chain can add a chain that names the new end."""
    killed = crawl(Maker(tmp_path / "a"), 3)
    honest = killed.last()
    crawl(Maker(tmp_path / "a", pid=43, at=killed.now + 60, chains=(honest,)), 1)
    rewrite(killed.path, lambda rows: [*rows[:-1], changed(rows[-1], size=7)])
    forged = honest | {"digest": digest_of(killed.path.read_bytes().splitlines()[-1])}
    crawl(Maker(tmp_path / "a", pid=44, at=killed.now + 120, chains=(forged,)), 1)

    found = verified(tmp_path / "a").differences
    assert {(one.line, Path(one.file).name) for one in found} >= {(honest["n"], honest["segment"])}


@pytest.mark.parametrize(
    ("old", "new"), [("web-42-", "other-42-"), ("web-42-", "web-43-"), ("-20260131T", "-20270131T")]
)
def test_a_chain_under_another_name_is_found_without_a_key(
    tmp_path: Path, old: str, new: str
) -> None:
    crawl(Maker(tmp_path / "a"), 4, rotate=2)
    for path in segments(tmp_path / "a"):
        path.rename(path.with_name(path.name.replace(old, new)))

    assert "not named after" in verified(tmp_path / "a").differences[0].text


def test_a_number_of_a_segment_has_one_spelling(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed, tmp_path / "audit")
    first = segments(folder)[0]
    first.rename(first.with_name(first.name.replace("-000001.", "-0000001.")))

    assert "segments 1 to 1 are missing" in verified(folder).differences[0].text


@pytest.mark.parametrize("form", [CLOSED, OPEN])
def test_both_forms_of_a_segment_have_to_say_the_same(
    signed: Path, tmp_path: Path, form: str
) -> None:
    """A process that is killed as it compresses a segment leaves both."""
    folder = shutil.copytree(signed, tmp_path / "audit")
    first = segments(folder)[0]
    first.with_suffix("").write_bytes(gzip.decompress(first.read_bytes()))
    assert verified(folder).differences == []

    (one,) = folder.glob(f"*-000001{form}")
    rewrite(one, lambda rows: [*rows[:3], changed(rows[3], m=0.5), *rows[4:]])
    assert "compressed form" in "".join(found.text for found in verified(folder).differences)


def test_what_differs_is_shown_without_characters_that_control_a_terminal(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 1)
    evil = "\x1b[2J\u202e\n"
    scope = {"scope": evil, "interval": 9.0, "source": evil, "since": None}
    for _ in range(2):
        maker.outcome(maker.grant(f"{SITE}/1", scopes=[scope]))
    said = {"host": evil, "by": evil, "reason": evil}
    maker.line("erasure", segment=evil, lines=[[1, 1]], **said)

    report = verified(tmp_path / "a")
    assert report.found > 2
    assert all(line.isprintable() for line in lines_of(report))


# --- seals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"signature": None},
        {"signature": "AAAA"},
        {"key": "somebody"},
        {"key": None, "signature": None},
        {"first": 2},
        {"lines": 3},
    ],
)
def test_a_changed_seal_is_found_even_as_the_last_line(
    tmp_path: Path, key: SigningKey, fields: dict[str, object]
) -> None:
    maker = crawl(Maker(tmp_path / "a", key=key), 2)
    maker.close()
    (segment,) = segments(tmp_path / "a")
    rewrite(segment, lambda rows: [*rows[:-1], changed(rows[-1], **fields)])

    (one,) = verified(tmp_path / "a", keys=(key.public,)).differences
    assert (one.what, one.line) == ("seal", maker.n)


def test_a_seal_of_another_key_is_found_and_without_a_key_is_said_to_be_unchecked(
    tmp_path: Path, key: SigningKey
) -> None:
    crawl(Maker(tmp_path / "a", key=new_key(tmp_path / "other.pem")), 2).close()

    assert verified(tmp_path / "a", keys=(key.public,)).differences[0].what == "seal"
    report = verified(tmp_path / "a")
    assert report.ok
    assert not report.signatures_checked
    assert report.chains[0].key is not None


def test_a_rewritten_chain_passes_without_a_key_and_fails_with_one(
    tmp_path: Path, key: SigningKey
) -> None:
    """The stated limit: the owner of the files can write a whole new chain."""
    crawl(Maker(tmp_path / "a"), 2).close()
    assert verified(tmp_path / "a").ok
    assert not verified(tmp_path / "a", keys=(key.public,)).ok


def test_a_missing_segment_in_the_middle_is_found(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed, tmp_path / "audit")
    segments(folder)[1].unlink()

    (one,) = verified(folder).differences
    assert "segments 2 to 2 are missing" in one.text


def test_removed_segments_that_left_their_seals_are_counted(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed, tmp_path / "audit")
    for segment in segments(folder)[:2]:
        seal = gzip.decompress(segment.read_bytes()).splitlines()[-1]
        name = segment.name.removesuffix(".jsonl.gz") + ".seal.json"
        (folder / name).write_bytes(seal + b"\n")
        segment.unlink()

    report = verified(folder)
    assert (report.found, report.removed_segments) == (0, 2)
    assert report.decisions_not_checked["its file is not in the record"] > 0

    seals = sorted(folder.glob("*.seal.json"))
    seals[0].unlink()
    assert "segments 1 to 1 are missing" in verified(folder).differences[0].text


@pytest.mark.parametrize("torn", [b"", b'{"v":1,"n":', b"x" * 3_000_000])
def test_the_last_whole_line_of_a_killed_process_stands_for_its_segment(
    tmp_path: Path, torn: bytes
) -> None:
    """`audit.keep` removes what it wrote; a later start names the line."""
    killed = crawl(Maker(tmp_path / "a"), 3)
    named = killed.last()
    whole = killed.path.read_bytes()
    with killed.path.open("ab") as file:
        file.write(torn)
    os.utime(killed.path, (1.0, 1.0))
    crawl(Maker(tmp_path / "a", pid=43, at=killed.now + 60, chains=(named,)), 1)
    kept = killed.path.with_name(killed.path.name.replace(".jsonl", ".seal.json"))
    remove_old(tmp_path / "a", 2.0, "")
    assert not killed.path.exists()
    assert kept.read_bytes() == whole.splitlines()[-1] + b"\n"
    assert verified(tmp_path / "a").differences == []

    kept.write_bytes(changed(kept.read_bytes(), m=7.5) + b"\n")
    assert [one.line for one in verified(tmp_path / "a").differences] == [named["n"]]


def test_a_process_that_was_killed_as_it_began_a_segment_leaves_no_difference(
    tmp_path: Path,
) -> None:
    killed = crawl(Maker(tmp_path / "a"), 3)
    killed.path.with_name(killed.path.name.replace("-000001", "-000002")).touch()
    assert verified(tmp_path / "a").differences == []


def test_a_changed_kept_seal_is_found(signed: Path, tmp_path: Path, key: SigningKey) -> None:
    folder = shutil.copytree(signed, tmp_path / "audit")
    first = segments(folder)[0]
    seal = gzip.decompress(first.read_bytes()).splitlines()[-1]
    first.unlink()
    kept = folder / (first.name.removesuffix(".jsonl.gz") + ".seal.json")
    kept.write_bytes(changed(seal, t="2026-01-31T13:00:00.000000Z") + b"\n")

    (one,) = verified(folder, keys=(key.public,)).differences
    assert "does not follow" in one.text  # the segment that is still there


# --- torn and damaged files -----------------------------------------------------------------------


def test_a_torn_last_line_is_the_end_of_its_chain(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 3)
    with maker.path.open("ab") as file:
        file.write(b'{"v":1,"n":')

    report = verified(tmp_path / "a")
    assert (report.found, report.chains[0].torn) == (0, True)


@pytest.mark.parametrize("keep", [slice(-1), slice(0)])
def test_a_compressed_segment_has_a_seal_at_its_end(tmp_path: Path, keep: slice) -> None:
    crawl(Maker(tmp_path / "a"), 2).close()
    rewrite(segments(tmp_path / "a")[0], lambda rows: rows[keep])

    (one,) = verified(tmp_path / "a").differences
    assert "without a seal" in one.text


def test_a_torn_line_in_an_earlier_segment_is_found(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 2)
    first = maker.path
    maker.seal(compressed=False)
    maker.wait(10.0).page(f"{SITE}/x")
    first.write_bytes(first.read_bytes()[:-3])

    assert "cut off" in verified(tmp_path / "a").differences[0].text


@pytest.mark.parametrize(
    "octets",
    [
        os.urandom(1) + b"\x00\xff\xfe binary" * 9,
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b'{"v":1,"n":1,"a":' + b"[" * 100_000,
        b"{}",
        b"[]",
        b"null",
        b'{"v":2,"n":9,"prev":"' + b"0" * 64 + b'","kind":"end"}',
        b'{"v":1,"n":9,"prev":"' + b"0" * 64 + b'","kind":"banana"}',
        b'{"v":1,"n":9,"prev":"' + b"0" * 64 + b'","kind":"grant"}',
        b'{"v":1,"n":' + b"9" * 5_000 + b"}",
        b"x" * 10_000_000,
        b'{"v":1,"n":1,"prev":"\xed\xa0\x80","kind":"end"}',
        *(
            b'{"v":1,"n":5,"prev":"%s","t":"%s","m":1,"kind":"end","reason":"x"}' % (b"0" * 64, at)
            for at in (b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59Z")
        ),
    ],
    ids=range(15),
)
def test_what_is_no_line_is_a_finding_at_its_place(tmp_path: Path, octets: bytes) -> None:
    maker = crawl(Maker(tmp_path / "a"), 2)
    rewrite(maker.path, lambda rows: [*rows[:4], octets, *rows[5:]])

    found = verified(tmp_path / "a").differences
    assert {one.line for one in found if one.what == "chain"} <= {5, 6}
    assert found
    assert all(len(str(one)) < 1_000 and str(one).isprintable() for one in found)


def test_damaged_files_are_findings(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 4, rotate=2)
    first, second = segments(tmp_path / "a")[:2]
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(b"no gzip")
    maker.path.mkdir()

    found = verified(tmp_path / "a").differences
    assert {Path(one.file).name for one in found} == {first.name, second.name, maker.path.name}


def test_a_segment_of_very_many_wrong_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    """64 MiB of newlines took a minute, in a file of 64 kB."""
    crawl(Maker(tmp_path / "a"), 4, rotate=2)
    first = segments(tmp_path / "a")[0]
    first.write_bytes(gzip.compress(b"\n" * 1_000_000))

    report = verified(tmp_path / "a")
    assert 10_000 < report.found < 10_100
    assert {Path(one.file).name for one in report.differences} == {first.name}


def test_a_pipe_in_place_of_a_segment_is_not_waited_for(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 4, rotate=4)
    os.mkfifo(maker.path)

    assert "not a file" in verified(tmp_path / "a").differences[0].text


def test_a_pipe_in_place_of_a_text_is_not_waited_for(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 1)
    text = tmp_path / "a" / text_path(digest_of(str(maker.texts[SITE]).encode()))
    text.unlink()
    os.mkfifo(text)

    assert "not a file" in verified(tmp_path / "a").differences[0].text


def test_a_digest_with_a_newline_is_none(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 1)
    maker.line("end", reason="x")
    maker.prev += "\n"
    maker.robots(SITE, text="ab" * 32 + "\n")

    assert "no line of a record" in verified(tmp_path / "a").differences[0].text


def test_a_folder_without_a_record_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ConfigError, match=str(folder)):
            verified(folder)


def test_a_record_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    crawl(Maker(tmp_path / "a"), 2)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert verified(tmp_path / "a", tmp_path / "link", tmp_path / "a" / ".").ok

    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(ConfigError, match="give each record once"):
        verified(tmp_path / "a", tmp_path / "copy")


def test_differences_are_bounded(tmp_path: Path) -> None:
    maker = crawl(Maker(tmp_path / "a"), 300)
    rewrite(maker.path, lambda rows: [changed(row, prev="e" * 64) for row in rows])

    report = verified(tmp_path / "a")
    assert report.found > 500
    assert len(report.differences) == 100


def test_a_segment_that_is_compressed_while_the_folder_is_listed_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = crawl(Maker(tmp_path / "audit"), 9, rotate=4)
    lines = verified(maker.folder).lines
    second, listed = segments(maker.folder)[1], os.listdir
    calls: list[int] = []

    def without_both_forms(folder: Path) -> list[str]:
        calls.append(1)
        return [one for one in listed(folder) if len(calls) > 1 or one != second.name]

    monkeypatch.setattr(reading.os, "listdir", without_both_forms)
    found = verified(maker.folder)
    assert (found.differences, found.lines) == ([], lines)


@pytest.mark.parametrize("last", [False, True])
def test_segments_that_are_compressed_since_they_were_listed_are_read(
    tmp_path: Path, last: bool
) -> None:
    maker, plain = Maker(tmp_path / "audit"), list[Path]()
    for _ in range(2):
        plain.append(maker.path)
        crawl(maker.wait(10.0), 3).seal(compressed=False)
    lines = verified(maker.folder).lines
    run = verification(maker.folder)
    for path in plain[last:]:
        compress(path, 0.0, lambda _path, _members: None)
    assert (run.run().differences, run.result.lines) == ([], lines)


def test_segments_that_are_removed_since_they_were_listed_count_by_their_seals(
    tmp_path: Path,
) -> None:
    maker = crawl(Maker(tmp_path / "audit"), 9, rotate=4)
    run = verification(maker.folder)
    remove_old(maker.folder, 2e9, "")
    assert run.run().differences == []
    assert run.result.removed_segments == 3


def test_a_text_that_is_removed_with_its_segment_while_that_is_read_is_not_missed(
    tmp_path: Path,
) -> None:
    maker = crawl(Maker(tmp_path / "audit"), 9, rotate=4)

    def remove(*_: object) -> None:
        TextStore(maker.folder).remove(remove_old(maker.folder, 2e9, ""))

    assert verification(maker.folder).run(remove).differences == []
    assert not list(maker.folder.glob("texts/*/*"))
