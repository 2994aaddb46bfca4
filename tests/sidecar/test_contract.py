"""The contract of `/openapi.json` holds: schemathesis asks every route, with its checks."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any


async def test_no_request_breaks_the_contract(start: Any) -> None:
    """No 500, no undocumented status, no body outside its schema, nothing wrong accepted.

    Left out is the check that every text of the schema's form is accepted: which texts are
    URLs is more than a schema can say.
    """
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
    run = await asyncio.create_subprocess_exec(
        tool,
        *("run", f"{sidecar.base}/openapi.json", "--checks", "all"),
        *("--exclude-checks", "positive_data_acceptance"),
        *("--phases", "coverage,fuzzing", "--max-examples", "4"),
        *("--generation-deterministic", "--no-color"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await run.communicate()

    assert run.returncode == 0, out.decode(errors="replace")[-4000:]
