"""docs/monitoring: every metric in a dashboard or an alert exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.sidecar import metrics
from tests.internet import FakeInternet
from tests.processes import run

PLACE = Path(__file__).parents[2] / "docs" / "monitoring"
PROMTOOL = shutil.which("promtool")
NAME = re.compile(r"\bgatekeeper_\w+")


async def names(serve: Any, internet: FakeInternet) -> set[str]:
    """Return the names of all samples, as Prometheus stores them."""
    internet.site("a.test").robots("")
    service = await serve()
    await service.get("/v1/check?url=http://a.test/")
    async with service.session.get(service.base + "/metrics") as response:
        text = await response.text()
    found: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:4]
            found |= {name} | ({f"{name}_bucket"} if kind == "histogram" else set())
    return found


async def test_every_scraped_metric_has_the_kind_of_the_table(
    serve: Any, internet: FakeInternet
) -> None:
    service = await serve()
    async with service.session.get(service.base + "/metrics") as response:
        text = await response.text()
    scraped = re.findall(r"^# TYPE (gatekeeper_\w+) (counter|gauge)$", text, re.MULTILINE)
    kinds = {name: kind for name, (kind, *_) in metrics.METRICS.items()}
    assert {name.removesuffix("_total"): kind for name, kind in scraped}.items() <= kinds.items()
    absent = kinds.keys() - {name.removesuffix("_total") for name, _ in scraped}
    assert all("_fleet_" in name or "_worker" in name or "_connections" in name for name in absent)


OPENMETRICS = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPENMETRICS};version=1.0.0;q=0.6,text/plain;q=0.4", f"{OPENMETRICS}; version=1.0.0"),
        (f"text/plain, {OPENMETRICS}; version=x\xe4", f"{OPENMETRICS}; version=1.0.0"),
    ],
)
async def test_the_scraper_chooses_the_format_and_each_is_valid(
    serve: Any, internet: FakeInternet, accept: str | None, content_type: str
) -> None:
    internet.site("a.test").robots("")
    service = await serve()
    await service.get("/v1/check?url=http://a.test/")
    headers = {} if accept is None else {"Accept": accept}
    async with service.session.get(service.base + "/metrics", headers=headers) as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith(content_type)
    is_open = content_type.startswith(OPENMETRICS)
    parse = openmetrics if is_open else prometheus
    found = {family.name: family for family in parse(text)}
    assert text.endswith("# EOF\n") == is_open
    assert found["gatekeeper_robots_fetch_seconds"].type == "histogram"
    assert {"process_resident_memory_bytes", "process_open_fds"} <= found.keys()


async def test_an_unknown_parameter_of_a_scrape_is_ignored_and_a_wrong_value_is_not(
    serve: Any,
) -> None:
    service = await serve()
    for query, status in (("?x=1", 200), ("?exemplars=true", 200), ("?exemplars=2", 400)):
        async with service.session.get(service.base + "/metrics" + query) as response:
            assert response.status == status


async def test_the_dashboard_names_metrics_that_exist(serve: Any, internet: FakeInternet) -> None:
    dashboard = json.loads((PLACE / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [one["query"]["query"] for one in dashboard["templating"]["list"][1:]]
    assert len(asked) > 15
    assert {name for one in asked for name in NAME.findall(one)} <= await names(serve, internet)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(one["x"] + one["w"] <= 24 for one in places)
    assert len({(one["x"], one["y"]) for one in places}) == len(places)


async def test_the_alerts_name_metrics_that_exist(serve: Any, internet: FakeInternet) -> None:
    for file in ("alerts.yml", "alerts_test.yml"):
        text = (PLACE / file).read_text()
        assert set(NAME.findall(text)) <= await names(serve, internet)


def test_the_alert_leaves_out_exactly_the_good_outcomes() -> None:
    """The alert leaves out exactly the results that brought a file or its definite absence."""
    (listed,) = re.findall(r'result!~"([^"]+)"', (PLACE / "alerts.yml").read_text())
    good = {outcome.row.name for outcome in Outcome if outcome.good}
    assert set(listed.split("|")) == good - {Outcome.REDIRECT.row.name}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("arguments", [("check", "alerts.yml"), ("test", "alerts_test.yml")])
async def test_prometheus_takes_the_alerts(arguments: tuple[str, str]) -> None:
    assert PROMTOOL is not None
    code, out = await run(PROMTOOL, arguments[0], "rules", arguments[1], cwd=PLACE)
    assert code == 0, out


def test_the_histograms_write_no_files(tmp_path: Path) -> None:
    """The variable may be inherited from a program beside the sidecar."""
    code = "from gatekeeper.sidecar.metrics import Histogram; Histogram('a', 'b').observe(1.0)"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
