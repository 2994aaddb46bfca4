"""The report of a record: one page for people, or JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gatekeeper.audit import report as reports
from gatekeeper.audit.report import TimeSeries, report_of
from gatekeeper.cli import main
from gatekeeper.sidecar.pages.audit_report import report_page
from tests.audit.conftest import verification
from tests.audit.maker import Maker
from tests.integrations.browsers import CHROMIUM, browser

AXE = Path(__file__).parents[1] / "sidecar" / "vendor" / "axe.min.js"
A, B = "https://a.test", "https://b.test"
EVIL = "<script>document.title='x'</script>\u202e"


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """A record with something in each part of the report."""
    made = Maker(tmp_path / "audit")
    made.page(f"{A}/robots.txt", 1.0, robots=True, reason=None, line=None, text=None)
    made.robots(A)
    for number in range(3):
        made.wait(12.5 + number).page(f"{A}/{number}")
    made.refused(f"{A}/private/x")
    made.robots(B, None)
    made.outcome(made.grant(f"{B}/1", 1.0), status=402, signals={"payment": True, "x": EVIL})
    made.outcome(made.grant(f"{B}/2", 0.0), status=None, size=None)
    made.outcome(made.grant(f"{B}/3", 0.0), start=None)
    made.block("b.test", 60.0)
    made.override("*.c.test", "allow", by=EVIL, reason=EVIL)
    made.override("*.c.test", "allow", ended=True)
    made.wait(60.0)
    made.close()
    return made


def test_a_chain_without_a_line_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "web-1-20260131T120000000000Z-000001.jsonl").touch()
    assert "None" not in report_page(report_of(verification(tmp_path)))


def test_values_within_values_are_shown_to_a_bounded_depth(tmp_path: Path) -> None:
    made, deep = Maker(tmp_path / "audit"), json.loads('{"a":' * 400 + "1" + "}" * 400)
    made.robots(A)
    made.outcome(made.grant(f"{A}/1", 10.0), signals=deep)
    made.override("a.test", "allow", rule=deep)

    assert "a a ..." in report_page(report_of(verification(made.folder)))


def test_a_report_sums_up_what_was_done(maker: Maker) -> None:
    report = report_of(verification(maker.folder))

    assert report.verified.differences == []
    a, b = report.hosts
    assert (a.host, a.requests, a.robots, a.refused, a.failed) == ("a.test", 4, 1, 1, 0)
    assert a.shortest == pytest.approx(12.5, abs=1e-3)
    assert (a.interval, a.bytes, a.asked) == (10.0, 4000, "crawl_delay")
    assert (b.requests, b.failed, b.blocks) == (2, 1, 1)
    assert report.allowed == {"no_rule": 3, "no_file": 3}
    assert report.refused == {"deny: rule": 1}
    assert report.statuses == {"200": 4, "402": 1, "no response": 1}
    assert report.files == {"rules": 1, "no_file": 1}
    assert report.signals["payment: yes"] == 1
    (override,) = report.overrides
    assert (override.match, override.rule) == ("*.c.test", "robots allow")
    assert override.ended is not None
    assert sum(sent for _, sent, _ in report.times) == 7


def test_beyond_the_busiest_hosts_only_their_sum_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_HOSTS", 3)
    maker = Maker(tmp_path / "audit")
    for number in range(8):
        maker.robots(f"https://{number}.test", None)
        for page in range(number + 1):
            maker.page(f"https://{number}.test/{page}", 0.0)

    report = report_of(verification(maker.folder))
    assert [one.host for one in report.hosts] == ["7.test", "6.test", "5.test"]
    assert (report.other_hosts, report.others.requests) == (5, 15)
    assert "5 other hosts" in report_page(report)


def test_what_sites_choose_is_bounded(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "audit")
    maker.batch = 10_000
    maker.robots(A, None)
    for number in range(reports.MAX_ROWS + 50):
        maker.outcome(maker.grant(f"{A}/{number}", 0.0), signals={f"s{number}": "v" * 1_000})
        maker.override(f"h{number}.test", "deny")
    maker.save()

    report = report_of(verification(maker.folder))
    assert len(report.signals) == reports.MAX_ROWS + 1
    assert report.signals["others"] == 50
    assert max(map(len, report.signals)) <= 300
    assert len(report.overrides) == reports.MAX_ROWS


def test_the_points_of_the_chart_are_bounded_and_none_is_lost() -> None:
    series = TimeSeries()
    for number in range(1_000):
        series.add(number * 3_600.0, number % 2)
    series.add(1e9, 0)

    rows = series.rows()
    assert len(rows) <= 120
    assert sum(one + two for _, one, two in rows) == 1_001


def test_the_page_is_self_contained_and_escapes_what_others_wrote(maker: Maker) -> None:
    page = report_page(report_of(verification(maker.folder)))

    assert "<script" not in page.lower()
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page
    assert "src=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "@import" not in page
    assert "url(" not in page


def test_the_shortest_gap_has_the_source_of_its_own_interval(tmp_path: Path) -> None:
    made = Maker(tmp_path / "audit")
    made.robots(A)
    made.page(f"{A}/1")
    made.wait(11.0).page(f"{A}/2")
    refused = [{"scope": "a.test", "interval": 20.0, "source": "after a refusal", "since": 30.0}]
    made.wait(30.0).page(f"{A}/3", scopes=refused)
    made.close()
    (row,) = report_of(verification(made.folder)).hosts
    assert (row.interval, row.asked) == (10.0, "crawl_delay")


def test_a_page_about_a_record_that_differs_says_so(maker: Maker) -> None:
    other = Maker(maker.folder, pid=99)
    other.robots(A)
    other.page(f"{A}/private/x")
    page = report_page(report_of(verification(maker.folder)))
    assert "differences, see below" in page
    assert "What differs" in page


def test_the_command_writes_a_file_or_json(
    maker: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["audit", "report", str(maker.folder), "-o", str(out)]) == 0
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == ""
    assert main(["audit", "report", str(maker.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hosts"][0]["host"] == "a.test"


# --- in a browser ---------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def chromium() -> AsyncIterator[Any]:
    async with browser() as opened:
        yield opened


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
async def test_the_page_passes_axe_and_is_readable_without_javascript(
    maker: Maker, tmp_path: Path, chromium: Any
) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_page(report_of(verification(maker.folder))), "utf-8")
    looks: list[tuple[int, str, dict[str, list[str]]]] = [
        (1400, "light", {}),
        (1400, "dark", {"runOnly": ["color-contrast"]}),
        (360, "light", {"runOnly": ["color-contrast", "scrollable-region-focusable"]}),
    ]
    for width, scheme, rules in looks:
        context = await chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        page = await context.new_page()
        requests: list[str] = []
        page.on("request", lambda one, seen=requests: seen.append(one.url))
        await page.goto(file.as_uri())
        assert requests == [file.as_uri()]
        for one in await page.query_selector_all("details"):
            await one.evaluate("one => { one.open = true; }")
        await page.add_script_tag(path=str(AXE))
        found = await page.evaluate("rules => axe.run(document, rules)", rules)
        assert found["violations"] == [], (width, scheme, found["violations"])
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        await context.close()

    context = await chromium.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(file.as_uri())
    text = await page.inner_text("main")
    for part in ("nothing differs", "a.test", "deny: rule", "payment: yes", "12.5 s", "*.c.test"):
        assert part in text.replace("\n", " "), part
    assert await page.locator("svg rect").count() > 0
    await context.close()
