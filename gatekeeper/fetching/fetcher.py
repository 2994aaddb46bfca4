"""`Fetcher`: one retrieval of a robots.txt, through turns, hops and misfortunes.

fetching.md section 2 is the procedure. Redirects are followed by hand, so that each hop is
judged before it is sent and takes the turn of its own host. A turn is given back before the
next one is asked for: holding one while waiting for another could wait for ever.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Final

import aiohttp
import msgspec
from aiohttp.hdrs import ETAG, LAST_MODIFIED, LOCATION, RETRY_AFTER

from gatekeeper.clock import Clock
from gatekeeper.config import Config, FetchConfig, PacingConfig
from gatekeeper.errors import GateClosed, InvalidURL, LeaseTimeout, StorageError
from gatekeeper.fetching.asking import Asker, Reply
from gatekeeper.fetching.freshness import lifetime
from gatekeeper.fetching.outcomes import Outcome
from gatekeeper.fetching.retrieval import Known, Refuse, Retrieval, TakeTurn, Validators
from gatekeeper.fetching.turns import HostTurns, Slots
from gatekeeper.http_fields import wait_of
from gatekeeper.urls import Target, join, parse

__all__ = ["Fetcher"]

_ACCEPT: Final = "text/plain, text/*;q=0.9, */*;q=0.1"
_ENCODING: Final = "gzip, deflate"  # DESIGN section 8; the cap stands on decoded octets
_RATE_LIMIT: Final = type(ETAG)("RateLimit")
_PATH: Final = "/robots.txt"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MAX_VALIDATOR: Final = 1_024
"""Octets of an ETag or a date that are kept: they come back with every refresh."""


class Fetcher:
    """Retrieves robots.txt files; keeps nothing of them.

    `session` lends its connections alone: no cookies, default headers or middlewares.
    `take_turn(url)` gives the turn of the URL's host (default: one request at a time for a
    host, `pacing.default_interval` apart). `refuse(url)` is the guard's word about a redirect:
    None, or what is wrong. `known(origin)` is what is fresh about another origin to whose
    /robots.txt a redirect leads.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        user_agent: str,
        config: Config,
        clock: Clock,
        rng: random.Random,
        take_turn: TakeTurn | None = None,
        refuse: Refuse | None = None,
        known: Known | None = None,
    ) -> None:
        self._session = session
        self._config = config.fetch
        self._clock = clock
        self._rng = rng
        self._take_turn = take_turn or HostTurns(clock, config.pacing.default_interval)
        self._refuse = refuse
        self.known = known
        self._slots = Slots(
            clock, config.fetch.max_concurrent, max_in_flight=config.pacing.max_in_flight
        )
        self._longest_wait = config.pacing.backoff_max
        self._asker = Asker(
            session, headers=_headers(user_agent, config.fetch), config=config.fetch, clock=clock
        )

    def adjust(self, pacing: PacingConfig) -> None:
        """Follow other settings of `[pacing]`."""
        self._longest_wait = pacing.backoff_max
        self._slots.adjust(pacing.max_in_flight)

    async def fetch(self, origin: str, validators: Validators | None = None) -> Retrieval:
        """Ask for the origin's robots.txt. Whatever goes wrong out there is an outcome.

        With `validators` the request is conditional (HTTP-01).
        """
        try:
            retrieval = await _Journey(self, origin, validators).run()
        except LeaseTimeout as error:  # row 28: too many wait for turns
            return Retrieval(outcome=Outcome.OVERLOADED, detail=str(error))
        except StorageError as error:
            return Retrieval(outcome=Outcome.STORAGE, detail=str(error))
        except GateClosed as error:
            return Retrieval(outcome=Outcome.OURS, detail=str(error))  # row 28
        if self._session.closed and not retrieval.outcome.good:
            return Retrieval(outcome=Outcome.OURS, detail="the session was closed meanwhile")
        return retrieval

    async def reach(self, origin: str) -> bool | None:
        """Whether a new connection to the origin comes about; nothing is requested over it.

        It takes no turn and starts no clock. False: it failed as a lost uplink would make it
        fail. None: it can't be told, as where it was refused, or where a proxy stands in
        between.
        """
        try:
            return await self._asker.reach(parse(origin + _PATH), self._asker.watch())
        except GateClosed:
            return None

    def _wait_of(self, headers: Mapping[str, str]) -> float | None:
        """Seconds that an answer asks to wait, `pacing.backoff_max` at the most.

        A page's Retry-After is obeyed as it stands (HTTP-08). That of a robots.txt would keep
        the whole host closed, the file that could say otherwise included: one mistaken year
        must not outlast its repair.
        """
        seconds = wait_of(headers, self._clock.wall())
        return None if seconds is None else min(seconds, self._longest_wait)


class _Journey:
    """One retrieval on its way."""

    __slots__ = (
        "_encoding",
        "_fetcher",
        "_hops",
        "_origin",
        "_retried",
        "_start",
        "_target",
        "_validators",
        "_wait",
        "_watch",
    )

    def __init__(self, fetcher: Fetcher, origin: str, validators: Validators | None) -> None:
        self._fetcher = fetcher
        self._origin = origin
        self._validators = validators
        self._target: Target = parse(origin + _PATH)
        self._hops: list[str] = []
        self._start = self._target.url
        self._watch = fetcher._asker.watch()
        self._encoding = _ENCODING
        self._retried = False
        self._wait: float | None = None
        """Seconds that the latest reply asks to wait."""

    async def run(self) -> Retrieval:
        while True:
            reply = await self._ask()
            reply = self._not_modified(reply)
            if reply.outcome.row.retry and not self._retried:
                self._retried = True
                if reply.outcome is Outcome.BAD_ENCODING:
                    self._encoding = "identity"  # row 27
                self._validators = None
                continue
            if reply.outcome is not Outcome.REDIRECT:
                return self._arrived(reply)
            if (ended := self._follow(reply)) is not None:
                return ended

    async def _ask(self) -> Reply:
        """Take the turn of the hop's host, send the request, give the turn back."""
        fetcher = self._fetcher
        target, url = self._target, self._target.url
        async with fetcher._slots.with_turn(fetcher._take_turn(url)) as turn:
            reply = await fetcher._asker.ask(
                target, self._own_headers(url), self._watch, first_hop=not self._hops
            )
            headers = reply.headers
            self._wait = None
            if RETRY_AFTER in headers or _RATE_LIMIT in headers:
                self._wait = fetcher._wait_of(headers)
            turn.report(status=reply.status, elapsed=reply.elapsed, retry_after=self._wait)
        return reply

    def _own_headers(self, url: str) -> dict[str, str] | None:
        """Those that this request has beside, or instead of, the usual ones."""
        headers = {}
        if self._encoding is not _ENCODING:
            headers["Accept-Encoding"] = self._encoding
        validators = self._validators
        if validators is not None and validators.url == url:
            if validators.etag:
                headers["If-None-Match"] = validators.etag
            if validators.last_modified:
                headers["If-Modified-Since"] = validators.last_modified
        return headers or None

    def _not_modified(self, reply: Reply) -> Reply:
        """Row 9: a 304 means something only in answer to a condition of ours."""
        if reply.outcome is not Outcome.NOT_MODIFIED:
            return reply
        validators = self._validators
        if validators is not None and validators.url == self._target.url:
            return reply
        return msgspec.structs.replace(reply, outcome=Outcome.NOT_MODIFIED_NOTHING)

    def _follow(self, reply: Reply) -> Retrieval | None:
        """Take the redirect; a retrieval if the journey ends with it."""
        try:
            target = self._location(reply.headers.get(LOCATION, ""))
        except InvalidURL:
            return self._ended(Outcome.BAD_REDIRECT, reply)  # row 12
        if target is None:
            return self._ended(Outcome.EGRESS_POLICY, reply)  # row 13
        been_there = target.url == self._start or target.url in self._hops
        if been_there or len(self._hops) >= self._fetcher._config.max_redirects:
            if self._fetcher._config.too_many_redirects == "absent":
                return self._ended(Outcome.TOO_MANY_REDIRECTS, reply)  # row 11
            return self._ended(Outcome.REDIRECTED_AWAY, reply)
        self._hops.append(target.url)
        self._target = target
        return self._consult(target)

    def _location(self, reference: str) -> Target | None:
        """Where a Location leads; None where we don't go. Raises InvalidURL."""
        reference = reference.strip(" \t")
        if not reference:
            raise InvalidURL("", "no Location")
        scheme = _SCHEME.match(reference)
        if scheme is not None and scheme[0].lower() not in {"http:", "https:"}:
            return None
        # An absolute one must stand by itself: `http:` without a host is no URL.
        target = join(self._target, reference) if scheme is None else parse(reference)
        if target.userinfo:  # DESIGN section 8: refused, and never sent
            return None
        if self._fetcher._refuse is not None and self._fetcher._refuse(target.url) is not None:
            return None
        return target

    def _consult(self, target: Target) -> Retrieval | None:
        """Another origin's own robots.txt: what is fresh of it need not be asked for again."""
        known = self._fetcher.known
        if known is None or target.path != _PATH or target.origin == self._origin:
            return None
        fresh = known(target.origin)
        if fresh is None:
            return None
        return msgspec.structs.replace(
            fresh, hops=(*self._hops, *fresh.hops), url=target.url, took=self._watch.used
        )

    def _arrived(self, reply: Reply) -> Retrieval:
        now = self._fetcher._clock.wall()
        headers = reply.headers
        return Retrieval(
            outcome=reply.outcome,
            status=reply.status,
            hops=tuple(self._hops),
            url=self._target.url,
            body=reply.body,
            etag=_sendable(headers.get(ETAG)),
            last_modified=_sendable(headers.get(LAST_MODIFIED)),
            lifetime=lifetime(headers, now),
            retry_after=self._wait,
            took=self._watch.used,
            truncated=reply.truncated,
            received=reply.received,
            detail=reply.detail,
            addresses=reply.addresses,
        )

    def _ended(self, outcome: Outcome, reply: Reply) -> Retrieval:
        """The journey ends with a redirect that is not taken."""
        return msgspec.structs.replace(
            self._arrived(reply), outcome=outcome, body=None, etag=None, last_modified=None
        )


def _headers(user_agent: str, config: FetchConfig) -> dict[str, str]:
    """Those of every request (fetching.md 2.1)."""
    headers = {"User-Agent": user_agent, "Accept": _ACCEPT, "Accept-Encoding": _ENCODING}
    if config.from_address:
        headers["From"] = config.from_address  # HTTP-12
    return headers


def _sendable(value: str | None) -> str | None:
    """A validator that can be kept and sent back: octets that are no text can't."""
    if value and len(value) <= _MAX_VALIDATOR and value.isascii() and value.isprintable():
        return value
    return None
