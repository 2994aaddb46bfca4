"""The process's own log: text on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime
from typing import IO

import msgspec

from gatekeeper.clock import utc
from gatekeeper.config import ServerConfig

__all__ = ["JsonFormatter", "set_up", "wants_json"]


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="log"
):
    time: datetime
    level: str
    logger: str
    message: str
    exception: str | None = None


class JsonFormatter(logging.Formatter):
    """A record as one line: JSON escapes whatever a URL may have smuggled in (T11)."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = _Line(
            time=utc(record.created),
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            exception=self.formatException(record.exc_info) if record.exc_info else None,
        )
        return msgspec.json.encode(line).decode()


def wants_json(server: ServerConfig, stream: IO[str]) -> bool:
    """What `log_format` comes to for that stream."""
    if server.log_format == "auto":
        return not stream.isatty()
    return server.log_format == "json"


def set_up(server: ServerConfig) -> None:
    """Send the log of the whole process to stderr; the service calls it once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    if wants_json(server, sys.stderr):
        handler.setFormatter(JsonFormatter())
    else:
        # In UTC, as the decisions that stand between them.
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
