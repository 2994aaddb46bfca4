"""The inputs of the benchmarks are reproducible and shaped like real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.against import compared, figure_of
from benchmarks.corpus import generate, load, shape
from benchmarks.refusals import SCENES, simulate
from benchmarks.report import Table
from benchmarks.timing import Contender, Sample, compete, spread
from tests.effort import some_of


def test_the_same_seed_makes_the_same_sites() -> None:
    assert generate(20) == generate(20)
    assert generate(20) != generate(20, seed=1)


def test_made_up_sites_have_the_size_and_the_rules_of_real_ones() -> None:
    found = shape(generate())
    assert 1_000 < found["bytes_mean"] < 2_200
    assert 8 < found["rules_p50"] < 25
    assert 60 < found["rules_p90"] < 150
    assert 150 < found["rules_p99"] < 700


def test_a_corpus_can_be_read_from_a_file(tmp_path: Path) -> None:
    row = {"robots_txt": "User-agent: *\n", "urls": ["https://a.example/"]}
    path = tmp_path / "robots.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (site,) = load(path)
    assert site.body == b"User-agent: *\n"
    assert site.urls == ("https://a.example/",)


@pytest.mark.parametrize("text", ["", "{}", "[]", "x", '{"robots_txt": 1, "urls": []}'])
def test_a_file_that_is_no_corpus_is_an_error_of_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "robots.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["--only", "text", "--corpus", str(path)])
    assert f"error: --corpus {path}: " in capsys.readouterr().err


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    slow = Sample((2.0, 20.0, 2.0), work=10)
    fast = Sample((1.0, 10.0, 1.0), work=10)
    assert fast.faster_than(slow) == (2.0, 2.0, 2.0)


def test_a_spread_stays_within_the_measured_values() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    low, median, high = spread([1.0, 2.0, 9.0])
    assert 1.0 <= low < median == 2.0 < high <= 9.0
    assert spread([float(number) for number in range(11)]) == (1.0, 5.0, 9.0)


def test_every_contender_works_once_a_round_after_a_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The objects of the test suite stay exempt from collections.
    monkeypatch.setattr("benchmarks.timing.gc.unfreeze", lambda: None)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def contender(name: str) -> Contender:
        def work(turn: int) -> int:
            seen[name].append(turn)
            return 5

        return Contender(work)

    samples = compete({name: contender(name) for name in seen}, rounds=3)
    assert seen == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    assert [len(sample.rounds) for sample in samples.values()] == [3, 3]


def test_a_table_is_markdown() -> None:
    table = Table("Title", ("", "figure"), [("ours", "1 µs")], "fast", ("a note",))
    assert table.markdown() == (
        "## Title\n\nGoal: fast\n\n"
        "|      | figure |\n|------|--------|\n| ours | 1 µs   |\n\n- a note\n"
    )


FIXED = some_of(["1 in 3 s", "60 a minute, Retry-After 60", "60 a minute, no Retry-After"], 2)


@pytest.mark.parametrize("title", FIXED)
def test_a_site_with_a_fixed_limit_is_met_a_few_times_a_day_and_well_used(title: str) -> None:
    (scene,) = [scene for scene in SCENES if scene.title == title]
    (day,) = simulate(scene)
    assert 5 <= day.refused <= 12  # at first, and after 1, 2, 4, 8 and 16 hours
    assert day.share > 0.6


HOURLY = some_of((s.title for s in SCENES if s.title.startswith("1,000 an hour")), 2)


@pytest.mark.parametrize("title", HOURLY)
def test_a_site_that_counts_by_the_hour_is_met_at_most_once_an_hour(title: str) -> None:
    """A trial of the usual rate succeeds for many minutes before the quota is used up."""
    (scene,) = [scene for scene in SCENES if scene.title == title]
    first, second = simulate(scene, 2)
    assert first.refused <= 40
    assert second.refused <= 6
    if "600" in title:
        assert first.refused <= 24
        assert second.share > 0.8


def test_a_fault_once_in_ten_thousand_costs_little() -> None:
    (scene,) = [scene for scene in SCENES if scene.title == "0.01 % at random"]
    (day,) = simulate(scene)
    assert day.refused < 12
    assert day.share > 0.8


def test_a_longer_duration_and_a_lower_rate_are_both_worse() -> None:
    def run(duration: str, rate: str) -> dict[tuple[str, str, str], str]:
        return {("gate", "check", "time"): duration, ("pacing", "one host", "leases/s"): rate}

    before = [run("5.0x (4.9x to 5.1x), 1.00 µs", "200 k"), run("5.0x, 1.00 µs", "210 k")]
    now = [run("5.0x, 2.00 µs", "100 k"), run("5.0x, 2.00 µs", "105 k")]
    assert [round(worse, 2) for *_, worse in compared(before, now)] == [2.0, 2.0]
    assert [round(worse, 2) for *_, worse in compared(now, before)] == [0.5, 0.5]


def test_only_what_all_runs_print_as_a_duration_a_size_or_a_rate_is_compared() -> None:
    table = ("text", "gatekeeper")
    before = [{(*table, "ratio"): "1.20x", (*table, "hosts"): "200", (*table, "gone"): "1 ms"}]
    assert compared(before, [{(*table, "ratio"): "1.00x", (*table, "hosts"): "100"}]) == []
    assert figure_of("2.8 kB") == (2800.0, True)
    assert figure_of("no figure") is None
