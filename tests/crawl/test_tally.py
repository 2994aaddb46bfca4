"""The counts of a crawl, and its summary."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from gatekeeper.crawl.manifest import Entry, Result
from gatekeeper.crawl.progress import (
    INTERVAL,
    DueOrigin,
    Holdup,
    Live,
    Plain,
    Progress,
    Speedometer,
    Tally,
    line_of,
    watcher,
)
from gatekeeper.robots import Rule
from tests.gate_support import decided

AT = datetime(2027, 1, 2, tzinfo=UTC)


def fetched(url: str = "https://a.test/", **more: object) -> Entry:
    given: dict[str, object] = {"status": 200, "size": 10} | more
    return Entry(url=url, outcome=Result.FETCHED, at=AT, **given)  # type: ignore[arg-type]


def failed(url: str, error: str) -> Entry:
    return Entry(url=url, outcome=Result.FAILED, at=AT, error=error)


def denied(url: str, line: int, text: str) -> Entry:
    rule = Rule(line=line, field="disallow", value="", text=text)
    decision = decided(url=url, origin="https://a.test", rule=rule)
    return Entry(url=url, outcome=Result.DENIED, at=AT, decision=decision)


def tally(*entries: Entry, total: int | None = None) -> Tally:
    made = Tally(total=len(entries) if total is None else total, complete=True)
    for entry in entries:
        made.add(entry)
    return made


def test_the_summary_says_what_was_denied_by_which_line() -> None:
    made = tally(
        fetched(),
        denied("https://a.test/x/1", 4, "Disallow: /x"),
        denied("https://a.test/x/2", 4, "Disallow: /x"),
        denied("https://b.test/y", 9, "Disallow: /"),
    )
    assert made.summary() == [
        "fetched 1 (1 x 200), 10 bytes",
        "denied 3",
        "       2  a.test  line 4: Disallow: /x",
        "       1  b.test  line 9: Disallow: /",
    ]


def test_the_summary_says_what_failed_and_why() -> None:
    assert tally(failed("https://a.test/", "reset")).summary()[1:] == [
        "failed 1",
        "       1  a.test  reset",
    ]


def test_the_summary_names_the_text_that_is_no_url() -> None:
    entries = [
        Entry(url=url, outcome=Result.FAILED, at=AT, tries=0, error="invalid URL: no scheme")
        for url in ("example.org/x", "")
    ]
    assert tally(*entries).summary()[2:] == [
        "       1  ''  invalid URL: no scheme",
        "       1  'example.org/x'  invalid URL: no scheme",
    ]


def test_the_summary_says_which_pages_the_warc_file_lacks() -> None:
    made = tally(fetched())
    made.skipped, made.unarchived = 5, 3
    assert made.summary() == [
        "fetched 1 (1 x 200), 10 bytes; 5 skipped, done before",
        "not in the WARC file: 3 of the skipped pages",
    ]


def test_the_summary_names_the_line_of_a_text_that_is_no_url() -> None:
    bad = Entry(
        url="x y", outcome=Result.FAILED, at=AT, tries=0, error="no URL", where="urls.txt:6"
    )
    assert tally(bad).summary()[2:] == ["       1  urls.txt:6: 'x y'  no URL"]
    assert line_of(bad) == "failed urls.txt:6: 'x y': no URL"


def test_the_summary_says_that_pages_were_not_kept() -> None:
    assert tally(fetched()).summary(stored=False)[1:] == [
        "the pages were not stored: use -o DIR or --warc FILE to store them"
    ]


def test_the_summary_is_short_however_many_causes_there_are() -> None:
    made = tally(*(failed(f"https://h{n}.test/", "reset") for n in range(50)))
    assert len(made.summary(most=5)) == 8
    assert made.summary(most=5)[-1].strip() == "and 45 more causes"


def test_urls_neither_done_nor_in_flight_are_waiting() -> None:
    made = tally(fetched(), total=10)
    made.in_flight = 4
    assert made.waiting == 5


@pytest.mark.parametrize(
    ("entries", "total", "clean"),
    [
        ([fetched()], 1, True),
        ([fetched()], 2, False),
        ([fetched(), failed("https://a.test/", "x")], 2, False),
        ([], 0, True),
    ],
)
def test_only_a_crawl_that_fetched_everything_is_clean(
    entries: list[Entry], total: int, clean: bool
) -> None:
    assert tally(*entries, total=total).clean() is clean


NO = denied("https://a.test/no", 2, "Disallow: /no")


@pytest.mark.parametrize(
    ("entries", "total", "skipped", "clean"),
    [
        ([fetched(), NO], 2, {}, True),
        ([NO], 2, {}, False),
        ([NO, failed("https://a.test/", "x")], 2, {}, False),
        ([fetched()], 1, {"refused": True}, True),
        ([fetched()], 1, {"refused": True, "is_url": False}, False),
    ],
    ids=["denied", "unfinished", "failed", "denied before", "no URL"],
)
def test_with_denied_ok_only_failed_and_unfinished_urls_count(
    entries: list[Entry], total: int, skipped: dict[str, bool], clean: bool
) -> None:
    made = tally(*entries, total=total)
    if skipped:
        made.skip(unarchived=False, **skipped)
    assert made.clean(denied_ok=True) is clean
    assert not made.clean()


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (fetched(), "200 https://a.test/ 10 bytes"),
        (fetched(truncated=True), "200 https://a.test/ 10 bytes, truncated"),
        (fetched(final_url="https://b.test/"), "200 https://a.test/ -> https://b.test/ 10 bytes"),
        (failed("https://a.test/", "reset"), "failed https://a.test/: reset"),
        (denied("https://a.test/x", 4, "Disallow: /x"),
         "denied https://a.test/x: line 4: Disallow: /x"),
    ],
)  # fmt: skip
def test_each_entry_is_printed_as_one_line(entry: Entry, line: str) -> None:
    assert line_of(entry) == line


@pytest.mark.parametrize(
    "entry",
    [denied("https://a.test/x", 4, "Disallow: /\x1b]0;owned\x07" + "x" * 9_000),
     failed("https://a.test/x", "the answer \x1b]0;owned\x07" + "x" * 9_000)],
)  # fmt: skip
def test_text_of_a_site_does_not_control_the_terminal(entry: Entry) -> None:
    """It was printed as the site wrote it, at any length."""
    lines = [line_of(entry), *tally(entry).summary()]
    assert any("\\x1b]0;owned\\x07" in line for line in lines)
    assert all(line.isprintable() and len(line) < 1_200 for line in lines)


def test_plain_lines_have_the_counts_and_the_hosts_due_next() -> None:
    stream = io.StringIO()
    with Plain(stream) as progress:
        progress.show(tally(fetched(), total=3), [DueOrigin("a.test", 75, 2)])
    assert stream.getvalue() == (
        "-- 1/3 done: 1 fetched, 0 denied, 0 failed; 2 waiting, 0 in flight; 10 bytes; "
        "next: a.test in 1:15 (2 waiting)\n"
    )


def test_plain_lines_end_with_the_speed() -> None:
    stream = io.StringIO()
    with Plain(stream) as progress:
        progress.show(tally(fetched()), [], ", 2 URLs/s")
    assert stream.getvalue().endswith("10 bytes, 2 URLs/s\n")


def test_the_rate_is_that_of_the_last_minute() -> None:
    meter, made = Speedometer(), Tally(total=1_000)
    assert meter.read(100.0, made, []) == ""
    assert meter.read(100.1, made, []) == ""  # too short a time to tell
    for second in range(1, 201):
        if second <= 100:
            made.add(fetched(size=2_000))
        speed = meter.read(100.0 + second, made, [])
        if second == 100:
            assert speed == ", 1 URLs/s, 2.0 kB/s"  # the list has not come to its end
    assert speed == ", 0 URLs/s, 0 bytes/s"


def test_the_estimate_is_at_least_that_of_the_slowest_host() -> None:
    meter, made = Speedometer(), Tally(total=110, complete=True)
    slow = DueOrigin("slow.test", 4.0, 10, interval=30.0)
    meter.read(0.0, made, [])
    for _ in range(100):
        made.add(fetched())
    rates = ", 10 URLs/s, 100 bytes/s"
    assert meter.read(10.0, made, []) == f"{rates}, about 1.0 s left"
    assert meter.read(10.0, made, [slow]) == f"{rates}, about 4:34 left"
    paused = DueOrigin("paused.test", float("inf"), 1)
    assert meter.read(10.0, made, [paused]) == rates


def test_a_high_rate_has_thousands_separators() -> None:
    meter, made = Speedometer(), Tally(total=110_000)
    meter.read(0.0, made, [])
    made.done = 1_234
    assert meter.read(1.0, made, []) == ", 1,234 URLs/s, 0 bytes/s"


def test_plain_lines_begin_when_there_is_something_to_report() -> None:
    stream = io.StringIO()
    with Plain(stream) as progress:
        progress.show(Tally(), [])
        assert stream.getvalue() == ""
        progress.show(Tally(complete=True), [])
        assert stream.getvalue().startswith("-- 0/0 done")


def test_plain_lines_are_one_a_minute_while_nothing_moves() -> None:
    stream = io.StringIO()
    made = tally(fetched(), total=3)
    with Plain(stream) as progress:
        for _ in range(24):  # two minutes
            progress.show(made, [])
        assert stream.getvalue().count("-- 1/3 done") == 2
        made.add(fetched())
        progress.show(made, [])
        assert stream.getvalue().count("-- 2/3 done") == 1


def test_a_host_that_is_held_up_says_by_what() -> None:
    held = DueOrigin("a.test", 75, 2, holdup=Holdup("connect_failed", "connect failed"))
    paced = DueOrigin("a.test", 75, 2, holdup=Holdup(INTERVAL, "crawl-delay 80 s"))
    assert str(held) == "a.test in 1:15 (2 waiting: connect failed)"
    assert str(paced) == "a.test in 1:15 (2 waiting)"


def test_the_live_display_shows_entries_totals_and_hosts() -> None:
    stream = io.StringIO()
    with Live(stream) as progress:
        progress.entry(denied("https://a.test/[x]", 4, "Disallow: /[x]"))
        progress.show(tally(fetched(), total=3), [DueOrigin("a.test", 75, 2)])
    text = stream.getvalue()
    assert "denied https://a.test/[x]: line 4: Disallow: /[x]" in text
    assert "2 waiting, 0 in flight" in text
    assert "1:15" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_on_the_live_display_has_no_colour_of_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    stream = Terminal()
    with Live(stream) as progress:
        progress.show(tally(fetched(), total=3), [])
        before = len(stream.getvalue())
        progress.entry(denied("https://a.test/x", 4, "Disallow: /x"))
        said, _, bar = stream.getvalue()[before:].partition("\n")
    assert "\x1b[33mdenied https://a.test/x" in said
    assert "1/3 done" in bar
    assert "\x1b[33m" not in bar


def test_a_terminal_gets_the_live_display_and_a_file_plain_lines() -> None:
    assert isinstance(watcher(quiet=False, stream=Terminal()), Live)
    assert isinstance(watcher(quiet=False, stream=io.StringIO()), Plain)
    assert type(watcher(quiet=True, stream=Terminal())) is Progress


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert isinstance(watcher(quiet=False, stream=Terminal()), Plain)


@pytest.mark.parametrize("make", [Plain, Live])
def test_a_message_is_shown_at_once_without_markup(make: type[Plain] | type[Live]) -> None:
    stream = io.StringIO()
    with make(stream) as progress:
        progress.say("stopping: [red]https://a.test/ under way")
        assert "stopping: [red]https://a.test/ under way\n" in stream.getvalue()


def test_a_message_of_a_json_run_goes_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Progress().say("stopping")
    assert capsys.readouterr() == ("", "stopping\n")
