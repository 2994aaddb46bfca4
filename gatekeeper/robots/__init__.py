"""The text of a robots.txt: read, decide, explain. Pure: no clock, no I/O, no asyncio."""

from __future__ import annotations

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """One rule line, as it stands in the file."""

    line: int
    field: str
    value: str
    text: str
