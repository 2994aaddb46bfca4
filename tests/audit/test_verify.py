"""`verify` makes each decision of a record again, and compares each start with its interval."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatekeeper.audit import decisions, pace
from gatekeeper.audit.chain import MAX_TEXT, text_path, time_text
from gatekeeper.audit.lines import read_line
from gatekeeper.audit.verify import BOUNDARY, lines_of
from gatekeeper.cli import main
from tests.audit.conftest import verified
from tests.audit.maker import BEGIN, Maker
from tests.effort import of_many

A, B = "https://a.test", "https://b.test"


def at(seconds: float) -> str:
    return time_text(BEGIN + seconds)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """A chain that has read a file: /private is denied, and a Crawl-delay of 10 s."""
    made = Maker(tmp_path / "audit")
    made.page(f"{A}/robots.txt", 1.0, robots=True, reason="robots_file", line=None, text=None)
    made.robots(A)
    return made.wait(10.0)


def test_a_record_of_a_gate_that_obeys_passes(maker: Maker) -> None:
    maker.page(f"{A}/")
    maker.refused(f"{A}/private/x")
    maker.wait(10.0).page(f"{A}/private/door")
    maker.robots(B, None)
    maker.page(f"{B}/any", 1.0)
    maker.refused(f"{A}/y", "decision")
    maker.refused(f"{B}/y", verdict="defer", reason="budget", line=None, text=None)
    maker.outcome(maker.grant(f"{B}/unused", 1.0), start=None, head=None, status=None)
    maker.line("omitted", count=7, since=at(0), why="audit.max_rate")
    maker.close()

    report = verified(maker.folder)
    assert report.differences == []
    assert (report.requests, report.unused_leases, report.omitted) == (4, 1, 7)
    assert report.decisions == 6
    assert report.decisions_not_checked == {"own limits": 1, "requests for robots.txt": 1}
    text = "\n".join(lines_of(report))
    assert all(line in text for line in BOUNDARY)
    assert "differ by 0.1 s" in text
    assert text.endswith("nothing differs")


WRONG: dict[str, tuple[str, Callable[[Maker], object]]] = {
    "a denied page is fetched": ("decision", lambda m: m.page(f"{A}/private/x")),
    "another line is said to decide": ("decision", lambda m: m.page(f"{A}/private/door", line=2)),
    "no line is said to decide": (
        "decision",
        lambda m: m.page(f"{A}/private/door", line=None, reason="no_rule"),
    ),
    "an allowed page is refused": (
        "decision",
        lambda m: m.refused(f"{A}/x", verdict="deny", reason="rule", line=2),
    ),
    "no file was read": ("decision", lambda m: m.page(f"{B}/x", 1.0)),
    "there is said to be no file": (
        "decision",
        lambda m: m.page(f"{A}/private/x", reason="no_file", line=None, text=None),
    ),
    "another text is said to decide": ("decision", lambda m: m.page(f"{A}/x", text="0" * 64)),
    "an earlier file decides": (
        "decision",
        lambda m: (
            m.robots(A, "User-agent: *\nAllow: /"),
            m.wait(10.0).page(f"{A}/x", reason="no_rule", line=None, text=m.first_text),
        ),
    ),
    "an operator is named without an override": (
        "decision",
        lambda m: m.page(f"{A}/private/x", reason="operator", line=None, text=None),
    ),
    "an operator's deny is not obeyed": (
        "decision",
        lambda m: (m.override("*.test", "deny"), m.page(f"{A}/x")),
    ),
    "a robots.txt is said to be asked for": (
        "decision",
        lambda m: m.page(f"{A}/private/x", reason="robots_file", line=None, text=None),
    ),
    "a deferral is granted": (
        "decision",
        lambda m: m.page(f"{A}/x", reason="budget", line=None, text=None),
    ),
    "what is no URL is granted": ("decision", lambda m: m.grant("nonsense/x/y")),
    "an unreachable file allows": (
        "decision",
        lambda m: (
            m.robots(B, None, outcome="server_error", status=503, since=at(10)),
            m.page(f"{B}/x", 1.0),
        ),
    ),
    "it comes too early": ("pace", lambda m: (m.page(f"{A}/1"), m.wait(9.8).page(f"{A}/2"))),
    "its interval is too short": (
        "pace",
        lambda m: (m.page(f"{A}/1"), m.wait(5.0).page(f"{A}/2", 5.0)),
    ),
    "its file is long expired": (
        "decision",
        lambda m: m.wait(86_400.0 + 200.0).page(f"{A}/1"),
    ),
    "the operator's interval is not kept": (
        "pace",
        lambda m: (
            m.override("a.test", "obey", rule={"match": "a.test", "interval": 20.0}),
            m.wait(1.0).page(f"{A}/1"),
        ),
    ),
    "a block is not kept": ("pace", lambda m: (m.block("a.test", 60.0), m.page(f"{A}/1"))),
    "a pause is not kept": (
        "pace",
        lambda m: (
            m.line(
                "pause",
                scope="a.test",
                by="ann",
                reason=None,
                since=at(10),
                until=None,
                ended=False,
            ),
            m.page(f"{A}/1"),
        ),
    ),
    "two requests share a lease": (
        "pace",
        lambda m: (m.grant(f"{A}/1", lease="L"), m.wait(11.0).page(f"{A}/2", lease="L")),
    ),
    "the scope of its host is missing": ("pace", lambda m: m.page(f"{A}/1", scopes=[])),
    "the scope of a host without a file is missing": (
        "pace",
        lambda m: (m.robots(B, None), m.page(f"{B}/1", scopes=[])),
    ),
    "the text is not there": (
        "witness",
        lambda m: m.robots(B, "x", text="f" * 64),
    ),
    "an erased line is not named": (
        "erasure",
        lambda m: m.line("erased", digest=m.prev),
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_verify_finds_every_kind_of_difference(maker: Maker, case: str) -> None:
    what, do = WRONG[case]
    maker.first_text = maker.ruling(f"{A}/x")["text"]
    assert verified(maker.folder).ok

    do(maker)

    found = verified(maker.folder).differences
    assert [one.what for one in found][:1] == [what], found
    assert found[0].line > 3


def test_a_wall_clock_that_was_set_back_passes_within_the_tolerance(maker: Maker) -> None:
    maker.page(f"{A}/1")
    maker.wait(11.0, wall=-4.0).page(f"{A}/2")
    assert not verified(maker.folder).ok
    assert verified(maker.folder, tolerance=15.0).ok


def test_a_chain_without_its_start_is_found(tmp_path: Path) -> None:
    """Without it the settings by which decisions are made again are not known."""
    maker = Maker(tmp_path / "audit", start=False)
    maker.robots(A)
    (one,) = verified(maker.folder).differences
    assert (one.what, one.line) == ("chain", 1)


def test_grants_with_digests_of_urls_need_a_scope(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit", urls="digest")
    maker.page("0" * 64 + "/ / ", scopes=[], text=None, line=None, reason="no_file")
    assert [one.what for one in verified(maker.folder).differences] == ["pace"]


def test_a_change_of_a_text_is_found(maker: Maker) -> None:
    digest = maker.ruling(f"{A}/x")["text"]
    path = maker.folder / text_path(digest)
    for octets in (gzip.compress(b"User-agent: *\nAllow: /\n"), b"no gzip", b"", b"\x1f\x8b"):
        path.write_bytes(octets)
        (one,) = verified(maker.folder).differences
        assert (one.what, one.line) == ("witness", 4)


def test_a_decision_is_made_in_the_dialect_and_by_the_settings_of_the_start(
    tmp_path: Path,
) -> None:
    """`*` is a plain character in 1994: the same file and URL, another verdict."""
    for dialect, line in (("1994", None), ("rfc9309", 2)):
        maker = Maker(tmp_path / dialect, settings={"robots": {"dialect": dialect}})
        maker.robots(A, "User-agent: *\nAllow: /*.gif\nDisallow: /b")
        reason = "no_rule" if line is None else "rule"
        maker.page(f"{A}/a.gif", 1.0, line=line, reason=reason)
        assert verified(maker.folder).ok, dialect


def test_visit_time_is_read_at_the_time_of_the_line(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A, "User-agent: *\nRobot-version: 2.0\nVisit-time: 1200-1259\nAllow: *\n")
    maker.page(f"{A}/x")
    maker.wait(3600.0 - 10.0).page(f"{A}/y")
    assert verified(maker.folder).ok
    maker.wait(20.0).refused(f"{A}/z", verdict="defer", reason="outside_visit_time")
    assert verified(maker.folder).ok

    maker.wait(20.0).page(f"{A}/z")

    (one,) = verified(maker.folder).differences
    assert "outside_visit_time" in one.text


def test_request_rates_are_read_at_the_time_of_the_line(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A, "User-agent: *\nDisallow:\nRequest-rate: 1/5 1300-1400\n")
    maker.page(f"{A}/1", 1.0)
    maker.wait(3600.0).page(f"{A}/2", 5.0)
    assert verified(maker.folder).ok
    maker.wait(5.0).page(f"{A}/3", 1.0)
    assert [one.what for one in verified(maker.folder).differences] == ["pace"]


def test_the_operators_cap_shortens_what_a_file_asks_for(tmp_path: Path) -> None:
    for cap, ok in ((4.0, True), (6.0, False)):
        maker = Maker(tmp_path / str(cap), settings={"pacing": {"max_interval": cap}})
        maker.robots(A)
        maker.page(f"{A}/1", 4.0)
        maker.wait(4.0).page(f"{A}/2", 4.0)
        assert verified(maker.folder).ok is ok


def test_the_cap_of_a_later_reload_shortens_what_a_file_asks_for(maker: Maker) -> None:
    maker.line("settings", settings={"pacing": {"max_interval": 5.0}})
    maker.page(f"{A}/1", 5.0)
    maker.wait(20.0).page(f"{A}/2", 5.0)
    assert verified(maker.folder).ok
    maker.line("settings", settings={"pacing": {"max_interval": None}})
    maker.wait(4.0).page(f"{A}/3", 5.0)  # it was granted before
    assert len(verified(maker.folder).differences) == 1  # too early
    maker.wait(20.0).page(f"{A}/4", 5.0)
    assert [one.what for one in verified(maker.folder).differences] == ["pace", "pace"]


def test_a_missing_file_an_outage_and_an_old_copy_decide_as_in_a_gate(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A, "", outcome="empty")
    maker.page(f"{A}/1", 1.0, reason="empty_file")
    maker.robots(B, None, outcome="access_restricted", status=403)
    maker.refused(f"{B}/1", verdict="deny", reason="access_restricted")
    maker.wait(10.0).robots(B, None, outcome="server_error", status=503, since=at(0))
    maker.refused(f"{B}/1", verdict="defer", reason="server_error")
    maker.robots(A, None, outcome="timeout", status=None, since=at(0), source="state")
    maker.wait(43_200.0)
    maker.robots(A, None, outcome="timeout", status=None, since=at(0))
    maker.page(f"{A}/2", 1.0, reason="empty_file")  # by the last good one, after twelve hours
    maker.robots(A, None, outcome="dns_nxdomain", status=None, since=at(0))
    maker.refused(f"{A}/1", verdict="defer", reason="dns_nxdomain")

    assert verified(maker.folder).differences == []


def test_overrides_decide_from_their_line_until_their_end(maker: Maker) -> None:
    operator: dict[str, Any] = {"reason": "operator", "line": None, "text": None}
    maker.override("*.test", "deny")
    maker.override("a.test", "allow", until=at(100.0))
    maker.page(f"{A}/private/x", **operator)
    maker.refused("https://x.test/", verdict="deny", **operator)
    maker.wait(50.0).page(f"{A}/private/y", **operator)
    assert verified(maker.folder).differences == []
    maker.wait(50.0).refused(f"{A}/x", verdict="deny", **operator)  # `*.test` is in force again
    maker.override("*.test", "deny", ended=True)
    maker.page(f"{A}/x")
    assert verified(maker.folder).differences == []

    maker.wait(10.0).page(f"{A}/private/x", **operator)
    assert [one.line for one in verified(maker.folder).differences] == [maker.n - 1]


def test_an_override_that_has_ended_gives_way_to_the_one_before(maker: Maker) -> None:
    operator: dict[str, Any] = {"reason": "operator", "line": None, "text": None}
    maker.override("a.test", "deny", source="configuration")
    maker.override("a.test", "allow", until=at(30.0))
    maker.page(f"{A}/private/x", **operator)
    maker.wait(30.0).refused(f"{A}/x", verdict="deny", **operator)  # before a line says so
    maker.override("a.test", "allow", ended=True)
    maker.override("a.test", "deny", source="configuration")
    maker.refused(f"{A}/y", verdict="deny", **operator)
    maker.override("a.test", "deny", ended=True, source="configuration")
    maker.page(f"{A}/z")
    assert verified(maker.folder).differences == []


@pytest.mark.parametrize("below", ["deny", "obey"])
@pytest.mark.parametrize("said", [True, False], ids=["a line says so", "by its until"])
def test_a_decision_is_written_a_moment_after_its_override_has_ended(
    maker: Maker, below: str, said: bool
) -> None:
    maker.override("*", below, rule={"match": "*", "robots": below, "interval": 60.0})
    maker.override("a.test", "allow", until=time_text(maker.now + 5.0))
    maker.wait(5.001)
    if said:
        maker.override("a.test", "allow", ended=True)
    by_it = {"reason": "operator", "line": None, "text": None}
    maker.page(f"{A}/private/x", **by_it)
    assert verified(maker.folder).differences == []

    maker.wait(10.0).page(f"{A}/private/y", **by_it)
    found = [one.what for one in verified(maker.folder).differences]
    assert found == ["decision", "pace"]


def test_a_block_that_was_lifted_holds_no_more(maker: Maker) -> None:
    maker.block("a.test", 60.0)
    maker.wait(1.0).block("a.test", 0.0)
    maker.page(f"{A}/1")
    maker.block("a.test", 60.0)
    maker.wait(60.0).page(f"{A}/2")
    lease = maker.wait(10.0).grant(f"{A}/3")
    maker.block("a.test", 60.0)  # the request is under way
    maker.wait(0.5).outcome(lease)
    assert verified(maker.folder).differences == []


@pytest.mark.parametrize(
    ("spans", "missing"),
    [
        ([[4, 9]], 0),
        ([[8, 9], [4, 6], [5, 7]], 0),
        ([[4, 6], [1, 1], [9, 4], [7, 30]], 0),
        ([[4, 6], [8, 9]], 7),
        ([[6, 9]], 5),
        ([[4, 8], [10, 12]], 9),
        ([], 5),
    ],
)
def test_every_erased_line_is_in_a_span_of_an_erasure(
    maker: Maker, spans: list[list[int]], missing: int
) -> None:
    while maker.n < 9:
        maker.line("erased", digest="0" * 64)
        maker.prev = "0" * 64
    said = {"host": "sha256:0", "by": "ann", "reason": "asked"}
    maker.line("erasure", segment=maker.path.name, lines=spans, **said)

    found = [one.line for one in verified(maker.folder).differences]
    assert found == ([missing] if missing else [])


def test_a_pause_changes_no_block(maker: Maker) -> None:
    maker.block("a.test", 600.0, reason="no such name")
    pause = {"scope": "a.test", "by": "ann", "reason": None, "since": at(0), "until": None}
    maker.line("pause", **pause, ended=False)
    maker.line("pause", **pause, ended=True)
    asks = {"robots": True, "reason": None, "line": None, "text": None}
    maker.wait(10.0).page(f"{A}/robots.txt", 1.0, **asks)  # whether the name is there again
    assert verified(maker.folder).differences == []

    maker.wait(10.0).page(f"{A}/1")
    assert ["blocked for" in one.text for one in verified(maker.folder).differences] == [True]


def test_what_decides_while_a_file_cant_be_fetched_does_not_expire(tmp_path: Path) -> None:
    """The gate answers by it, and tries again behind the answer."""
    maker = Maker(tmp_path / "audit")
    maker.robots(A)
    maker.robots(A, outcome="timeout", status=None, since=at(0), expires_at=at(600))
    maker.wait(90_000.0).page(f"{A}/x")
    assert verified(maker.folder).differences == []

    maker.robots(B, None, expires_at=at(600))
    maker.page(f"{B}/x", 1.0)
    assert ["expired" in one.text for one in verified(maker.folder).differences] == [True]


# --- settings of privacy --------------------------------------------------------------------------


def test_without_queries_a_rule_about_paths_is_still_checked(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit", urls="path")
    maker.robots(A, "User-agent: *\nDisallow: /private\n")
    maker.refused(f"{A}/private/x")
    assert verified(maker.folder).decisions == 1
    maker.page(f"{A}/private/x", 1.0, reason="no_rule", line=None)
    assert [one.what for one in verified(maker.folder).differences] == ["decision"]


def test_without_queries_a_rule_that_a_query_may_matter_to_is_counted_as_not_checked(
    tmp_path: Path,
) -> None:
    maker = Maker(tmp_path / "audit", urls="path")
    maker.robots(A, "User-agent: *\nDisallow: /lis%74/*?sort=\nDisallow: /end$\n")
    maker.refused(f"{A}/list/x", verdict="deny", reason="rule", line=2)
    maker.refused(f"{A}/list/y")  # it may have had a query as well
    maker.refused(f"{A}/end")
    maker.refused(f"{A}/other")

    report = verified(maker.folder)
    assert report.ok
    assert report.decisions_not_checked == {"the URL is not recorded as a whole": 3}
    assert report.decisions == 1


def test_a_url_that_is_cut_is_counted_as_not_checked(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A, "User-agent: *\nDisallow: /*end\n")
    maker.refused(f"{A}/".ljust(MAX_TEXT, "x"), verdict="deny", reason="rule", line=2)
    assert verified(maker.folder).decisions_not_checked == {"the URL is not recorded as a whole": 1}


def test_a_url_with_credentials_in_it_is_counted_as_not_checked(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.robots(A, "User-agent: *\nDisallow: /*b:\n")
    maker.refused(f"{A}/?to=//***@b.test/", verdict="deny", reason="rule", line=2)
    assert verified(maker.folder).decisions_not_checked == {"the URL is not recorded as a whole": 1}


def test_with_digests_of_urls_starts_are_still_compared(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit", urls="digest")
    scopes = [{"scope": "f" * 64, "interval": 5.0, "source": "default", "since": None}]
    for _ in range(2):
        maker.page("0" * 64 + "/ / ", scopes=scopes, text=None, line=None, reason="no_file")
        maker.wait(4.0)

    report = verified(maker.folder)
    assert report.decisions_not_checked == {"urls are digests": 2}
    assert [one.what for one in report.differences] == ["pace"]


# --- versions -------------------------------------------------------------------------------------


def test_decisions_of_another_version_are_compared_and_noted_only(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit", version="0.0.1")
    maker.robots(A)
    maker.page(f"{A}/private/x")
    maker.page(f"{A}/1")

    report = verified(maker.folder)
    assert report.other_version == {"0.0.1": 1}
    assert [one.what for one in report.differences] == ["pace"]  # clocks know no version
    assert "decision" in report.notes[0]


# --- starts ---------------------------------------------------------------------------------------


def test_members_of_a_fleet_share_the_clock_of_a_host(tmp_path: Path) -> None:
    one, two = (
        Maker(tmp_path / "1", host="one"),
        Maker(tmp_path / "2", host="two", at=BEGIN + 0.001),
    )
    for maker in (one, two):
        maker.robots(A)
    one.page(f"{A}/1")
    two.wait(10.05).page(f"{A}/2")
    one.wait(20.0).page(f"{A}/3")
    assert verified(one.folder, two.folder, tolerance=0.1).differences == []

    two.wait(17.0).page(f"{A}/4")

    assert verified(two.folder).ok
    (found,) = verified(one.folder, two.folder).differences
    assert (found.what, found.line) == ("pace", two.n - 1)
    assert "7.0" in found.text
    assert verified(one.folder, two.folder, tolerance=3.0).ok


def test_a_start_that_is_known_only_later_is_compared_with_both_neighbours(maker: Maker) -> None:
    """Two requests at a time: the first one ends last."""
    slow = maker.grant(f"{A}/slow")
    begun = time_text(maker.now)
    for number in range(100):
        maker.wait(10.0).page(f"{A}/{number}")
    maker.outcome(slow, start=begun)
    assert verified(maker.folder).ok

    maker.wait(10.0)
    slow = maker.grant(f"{A}/slow")
    maker.wait(5.0)
    begun = time_text(maker.now)  # the request waited, and came in between
    maker.wait(5.0).page(f"{A}/next")
    maker.wait(5.0).outcome(slow, start=begun)
    assert not verified(maker.folder).ok


def test_a_grant_without_an_outcome_counts_from_its_own_time(maker: Maker) -> None:
    maker.grant(f"{A}/1")  # kill -9
    again = Maker(maker.folder, pid=43, at=maker.now + 5.0)
    again.robots(A, source="state")
    again.page(f"{A}/2")

    report = verified(maker.folder)
    assert report.without_outcome == 1
    assert [one.what for one in report.differences] == ["pace"]


@pytest.mark.parametrize(("wall", "monotonic"), [(1.0, 10.0), (10.0, 1.0)])
def test_a_clock_that_ran_too_fast_is_found(maker: Maker, wall: float, monotonic: float) -> None:
    """The scheduler counted ten seconds, and the other clock one."""
    maker.page(f"{A}/1")
    maker.wait(monotonic, wall=wall).page(f"{A}/2")

    (one,) = verified(maker.folder).differences
    assert "was asked 1.000 s after" in one.text


@settings(max_examples=of_many(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 200), st.integers(0, 300), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_starts_in_any_order_are_judged_like_a_sorted_list(
    leases: list[tuple[int, int, int, bool]],
) -> None:
    """The judge keeps few starts, and learns of them in any order. Times are tenths of seconds."""
    judge = pace.Pace(tolerance=0.0)
    events: list[tuple[float, int, int]] = []
    now, begun = 0.0, []
    for number, (scope, wait, lasts, ends) in enumerate(leases):
        now += wait / 10
        begun.append((scope, now))
        events += [(now, 0, number), *([(now + lasts / 10, 1, number)] if ends else [])]
    found = set()
    for moment, kind, number in sorted(events):
        scope, start = begun[number]
        if kind == 0:
            scopes = [{"scope": str(scope), "interval": 5.05, "source": "", "since": None}]
            line = fields("grant", moment, scopes=scopes, lease=str(number))
            list(judge.grant(line, moment, 0, str(number)))
        else:
            line = fields("outcome", moment, lease=str(number), start=utc(start))
            found |= {one.file for one in judge.outcome(line, 0)}
    found |= {one.file for one in judge.end(0)}
    expected = set()
    for scope in range(3):
        starts = [(start, number) for number, (s, start) in enumerate(begun) if s == scope]
        for (before, _), (after, number) in pairwise(starts):
            if after - before < 5.04:
                expected.add(str(number))
    assert found == expected


def fields(kind: str, moment: float, **given: Any) -> Any:
    """A line of a grant or an outcome."""
    common = {"v": 1, "n": 1, "prev": "0" * 64, "t": utc(moment), "m": moment, "kind": kind}
    if kind == "grant":
        given |= {"url": "", "agent": "", "robots": False, "decision": None, "reason": None}
        given |= {"line": None, "text": None}
    else:
        given |= {
            "head": None,
            "end": utc(moment),
            "status": None,
            "retry_after": None,
            "size": None,
        }
        given |= {"signed": False, "signals": {}}
    return read_line(json.dumps(common | given).encode())


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# --- bounds and the command -----------------------------------------------------------------------


def test_leases_that_never_end_are_bounded(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_OPEN", 5)
    for number in range(20):
        maker.grant(f"{A}/{number}")
        maker.wait(10.0)

    report = verified(maker.folder)
    assert (report.found, report.requests) == (0, 21)


def test_parsed_texts_are_bounded(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "CACHED_OCTETS", 1_000)  # none fits
    maker.page(f"{A}/1")
    assert verified(maker.folder).ok


def test_the_command_prints_differences_and_exits_1(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "verify", str(maker.folder)]) == 0
    assert "nothing differs" in capsys.readouterr().out

    maker.page(f"{A}/private/\u202e")

    assert main(["audit", "verify", str(maker.folder)]) == 1
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert f"{maker.path}: line {maker.n - 1}: decision: it says allow" in first
    assert out.replace("\n", "").isprintable()

    assert main(["audit", "verify", str(maker.folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["differences"][0]["line"] == maker.n - 1
    assert report["boundary"] == list(BOUNDARY)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (["verify", "DIR", "-o", "report.html"], "`verify` has no --output: it is for `report`"),
        (["verify", "DIR", "--by", "ann"], "`verify` has no --by"),
        (["report", "DIR", "--reason", "x"], "`report` has no --reason"),
        (["show", "DIR", "a.test", "--tolerance", "1"], "`show` has no --tolerance"),
        (
            ["erase", "DIR", "a.test", "--key", "x.pem"],
            "`erase` has no --key: it is for `verify` and `report`",
        ),
    ],
)
def test_an_option_of_another_action_is_refused(
    call: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *call])
    assert stopped.value.code == 2
    assert wrong in capsys.readouterr().err


def test_the_command_says_what_is_wrong_with_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "verify", str(tmp_path)]) == 2
    assert "no audit record" in capsys.readouterr().err
