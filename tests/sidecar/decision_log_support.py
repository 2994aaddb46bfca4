"""Writing a decision log in a test, without its thread."""

from __future__ import annotations

import io
import json
from typing import Any, Literal

from gatekeeper.config import ServerConfig
from gatekeeper.sidecar.logs import DecisionLog
from gatekeeper.sidecar.service import Service


def write_log(log: DecisionLog) -> None:
    """Write the lines of one write immediately."""
    log._write_page(log._take_page())


class LogOf:
    """The decisions that a service logs from now on."""

    def __init__(self, service: Service, decisions: Literal["all", "refused"] = "all") -> None:
        self.stream = io.StringIO()
        server = ServerConfig(log_decisions=decisions, log_format="json")
        self.log = service.log = DecisionLog(server, service.clock, stream=self.stream)

    def lines(self) -> list[Any]:
        """Those so far, decoded."""
        write_log(self.log)
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]
