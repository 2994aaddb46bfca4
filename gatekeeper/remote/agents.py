"""Names that agents give themselves, judged before they are sent."""

from __future__ import annotations

from functools import lru_cache

from gatekeeper.errors import ConfigError
from gatekeeper.robots import product_token

__all__ = ["check_agent"]

_LONGEST = 512


@lru_cache(maxsize=1024)
def check_agent(user_agent: str) -> str:
    """The product token. Raises ConfigError for a name that holds none, or is too long."""
    token = product_token(user_agent)
    if not token or len(user_agent) > _LONGEST:
        raise ConfigError(
            f"user agent {user_agent[:_LONGEST]!r} holds no product token, or is too long; "
            'say who you are, such as "examplebot/1.0 (+https://example.org/bot)"'
        )
    return token
