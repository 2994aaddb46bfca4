"""The service conforms to `/openapi.json`: schemathesis checks every route."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from tests.processes import run

ACCEPTED = """
[checks]
# Which texts are URLs, names of hosts or leases that are out is more than a schema can say, and
# a page's site, a host's block and the room that is left have their say as well.
positive_data_acceptance.expected-statuses = ["2xx", 400, 403, 404, 409, 429, 502, 503, 504]
"""


async def test_no_response_violates_the_openapi_contract(start: Any, tmp_path: Path) -> None:
    """No 500, no undocumented status, no body that violates its schema, no bad request accepted."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(ACCEPTED)
    sidecar = await start(
        "--storage",
        "memory",
        env={
            "GATEKEEPER_SERVER_MAX_WAIT": "0.05",
            "GATEKEEPER_FETCH_TOTAL_TIMEOUT": "0.5",
            "GATEKEEPER_SERVER_LOG_DECISIONS": "none",
        },
    )
    tool = shutil.which("st", path=str(Path(sys.executable).parent)) or "st"
    code, out = await run(
        tool,
        "--config-file",
        str(config),
        "run",
        f"{sidecar.base}/openapi.json",
        "--checks",
        "all",
        "--phases",
        "examples,coverage,fuzzing,stateful",
        "--exclude-path",
        "/v1/events",  # a stream has no end: see test_operator_feeds
        "--max-examples",
        "4",
        "--generation-deterministic",
        "--no-color",
    )
    assert code == 0, out[-4000:]
