"""What every room's tests share."""

from __future__ import annotations

from tests.internet.fixtures import internet, virtual_internet

__all__ = ["internet", "virtual_internet"]
