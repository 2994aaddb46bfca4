"""How a gate reaches the network: its connectors, and the addresses of hosts."""

from __future__ import annotations

import aiohttp
from aiohttp.abc import AbstractResolver

from gatekeeper.config import Config
from gatekeeper.errors import GateClosed
from gatekeeper.fetching.guard import Guard, Whereabouts, guarded_connector
from gatekeeper.url_cache import UrlCache

__all__ = ["Dialling"]


class Dialling:
    """The methods of a gate for those who connect as it does."""

    config: Config
    guard: Guard | None
    _own: aiohttp.ClientSession | None
    _resolver: AbstractResolver | None
    _whereabouts: Whereabouts | None
    url_cache: UrlCache

    def guarded_connector(self) -> aiohttp.TCPConnector:
        """A connector that dials through this gate's guard; close it with its session."""
        places = self._whereabouts
        return guarded_connector(
            self.config,
            resolver=self._resolver if places is None else places.resolver,
            guard=self.guard,
            url_cache=self.url_cache,
            # No limit of its own: the turns and the fetch slots are the bound, and waiting in
            # a connection pool would be waiting that no clock knows of.
            limit=0,
            # Two memories would let the addresses that are dialled and those whose clocks
            # were taken drift apart.
            use_dns_cache=places is None,
        )

    @property
    def connector(self) -> aiohttp.BaseConnector:
        """That of the session which fetches robots.txt, for another session on the same
        connections (`connector_owner=False`); the gate closes it. Raises GateClosed.
        """
        connector = None if self._own is None else self._own.connector
        if connector is None:
            raise GateClosed("the gate has no session of its own, or is not open")
        return connector

    def _own_session(self) -> aiohttp.ClientSession:
        self._own = aiohttp.ClientSession(
            connector=self.guarded_connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # T19: a proxy from the environment would lead round the guard
        )
        return self._own
