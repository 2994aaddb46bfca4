"""`GET /v1/fetch`, `GET /v1/sitemaps`: what the service fetches politely and streams to clients."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import Annotated, Final

import aiohttp
import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.client import wire
from gatekeeper.clock import deadline
from gatekeeper.decision import Decision
from gatekeeper.descriptors import describe_shortage, is_shortage
from gatekeeper.errors import AddressRefused, Denied, InvalidURL, LeaseTimeout, StorageError
from gatekeeper.gate.lease import Lease
from gatekeeper.gate.lease_base import refuse_page
from gatekeeper.http_fields import REDIRECTS, unreadable
from gatekeeper.robots.signals import parse_challenges
from gatekeeper.session.middleware import counting_bytes
from gatekeeper.sidecar.lease_requests import draining
from gatekeeper.sidecar.routes.operators import open_stream, stream_response
from gatekeeper.sidecar.routing import CRAWL, OCTETS, Call, Problem, Routes
from gatekeeper.sidecar.service import Service
from gatekeeper.sitemaps import SitemapEntry, Sitemaps, parse_since, sitemaps_of

ROUTES: Routes[Service] = Routes(needs=CRAWL, problems=(403, 429, 503))

_REQUEST_FIELDS = (
    "Accept",
    "Accept-Encoding",
    "Accept-Language",
    "If-Match",
    "If-Modified-Since",
    "If-None-Match",
    "If-Range",
    "If-Unmodified-Since",
    "Range",
)
_RESPONSE_FIELDS = (
    "Accept-Ranges",
    "Age",
    "Cache-Control",
    "Content-Encoding",
    "Content-Language",
    "Content-Range",
    "Content-Type",
    "ETag",
    "Expires",
    "Last-Modified",
    "Retry-After",
    "Vary",
    "X-Robots-Tag",
)
_USAGE_FIELDS = (
    "Content-Usage",
    "Crawler-Price",
    "Link",
    "Payment-Required",
    "Robots-Tag",
    "TDM-Policy",
    "TDM-Reservation",
)
"""Header fields about the use and the price of a page. They are lists: all lines are passed on."""
_MAX_FIELD = 8_000
"""Characters of a field that is passed on: many clients refuse a response with a longer one."""
# A page that a browser opens here would run as a page of this service, and could send requests
# to it (T12): it is sandboxed, never sniffed, and saved instead of shown. Problem documents are
# sandboxed as well, since they may quote a site or a URL.
_SAFETY_FIELDS = {
    **wire.SANDBOXED,
    "Content-Disposition": "attachment",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # our own URL contains the page's, with its query
}
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
"""Characters that no header may hold: controls (RFC 9110 section 5.5), and what stands for octets
that are not UTF-8."""
_OWN_FIELDS = (
    "X-Gatekeeper-Verdict",
    "X-Gatekeeper-Reason",
    "X-Gatekeeper-Decision-Id",
    "X-Gatekeeper-Line",
    "Content-Location",
)
_PIECE_OCTETS = 65_536
_LEASE_SHARE = 0.9
"""Share of the remaining `fetch_timeout` that waiting for a lease may take. The page takes time as
well, and a 429 that says when to try again is more useful than a 504."""
_MAX_REDIRECTS = 5  # T9


class FetchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/fetch`. Pages are fetched only under the service's own name."""

    url: str


@ROUTES.add(
    "GET",
    "/v1/fetch",
    query=FetchQuery,
    answers={200: OCTETS},
    headers=(*_OWN_FIELDS, *_RESPONSE_FIELDS, *_USAGE_FIELDS, "WWW-Authenticate"),
    relays=True,
    problems=(403, 429, 502, 503, 504),
)
async def fetch_page(service: Service, call: Call) -> web.StreamResponse:
    """Fetch a page politely: decide, wait for the host, then stream the site's response."""
    query = call.parameters(FetchQuery)
    seconds = service.config.server.fetch_timeout
    try:
        async with deadline(service.clock, seconds):
            return await _follow(service, call, query.url, service.clock.monotonic() + seconds)
    except Denied as error:  # 403 or 429, for the first URL as for a redirect hop
        service.decided(error.decision, call)
        raise
    except LeaseTimeout:
        raise
    except TimeoutError as error:
        raise Problem(504, "timeout", "the page did not come in time") from error
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, AddressRefused):
            raise Problem(403, "blocked", "blocked") from error  # T2: this one word
        if is_shortage(error):
            raise Problem(503, "busy", describe_shortage()) from error
        raise Problem(502, "no-answer", "the site could not be reached") from error
    except aiohttp.ClientResponseError as error:
        raise Problem(502, "no-answer", unreadable(error.message)) from error
    except aiohttp.ClientError as error:
        raise Problem(502, "no-answer", "the site broke the connection off") from error


async def _follow(service: Service, call: Call, url: str, end: float) -> web.StreamResponse:
    """Follow redirects to the page and pass it on, before `end` (monotonic).

    Redirects are followed here, not by aiohttp, which drops the credentials of a Location before
    the guard can see them (T1, each hop). Also, each hop's decision belongs in the log (T20).
    """
    for _ in range(1 + _MAX_REDIRECTS):
        async with await _lease(service, call, url, end) as lease:
            call.streams = True
            answer = await _send(service, call, url, lease)
            call.streams = False
        if isinstance(answer, web.StreamResponse):
            return answer
        url = answer
    raise Problem(502, "too-many-redirects", f"more than {_MAX_REDIRECTS} redirects")


async def _send(service: Service, call: Call, url: str, lease: Lease) -> web.StreamResponse | str:
    """Request one URL under its lease. Return the page passed on, or the URL it redirects to."""
    sent = call.request.headers
    headers = {name: sent[name] for name in _REQUEST_FIELDS if name in sent}
    headers.setdefault("Accept-Encoding", "identity")
    async with service.session.request(
        call.request.method, url, headers=headers, allow_redirects=False
    ) as page:
        service.operators.feed.reported(lease.host, page.status)
        if page.status in REDIRECTS and (location := page.headers.get("Location")):
            try:
                return urls.redirected(url, location)
            except InvalidURL as error:
                raise Problem(502, "bad-redirect", f"the page redirects to {error}") from error
        # The slot is held, and bytes are counted, until the page has been read.
        count = counting_bytes(lease, page) if lease.counts_bytes else None
        lease.ends_with(page.connection, count)
        return await _pass_on(service, call, page, lease.decision)


async def _lease(service: Service, call: Call, url: str, end: float) -> Lease:
    """Wait for a lease of the host as any client does: bounded and fair (T8, T15).

    Nobody waits while the service drains (T16). Raises LeaseTimeout if the lease does not come in
    time, until `end` (monotonic).
    """
    if (cached := service.gate.peek(url)) is not None:
        refuse_page(service.gate, cached)
    # Nobody waits for the end of a block or a pause: the client learns when to try again.
    with contextlib.suppress(StorageError):  # the waiter gets the error
        for view in await service.gate.why(url):
            if view.kind in ("block", "pause"):
                raise LeaseTimeout(url, f"{urls.mask(url)}: {view}", retry_at=view.until)
    started = service.clock.monotonic()
    wanted = wire.LeaseRequestBody(url=url, wait=(end - started) * _LEASE_SHARE)
    lease = await service.leases.waiters.acquire(service.gate, wanted, call.client)
    service.waited(service.clock.monotonic() - started)
    service.decided(lease.decision, call)
    return lease


async def _pass_on(
    service: Service, call: Call, page: aiohttp.ClientResponse, decision: Decision
) -> web.StreamResponse:
    """Send a response with the head of a page, and stream its body.

    The body has at most `fetch_max_body` octets. Once the head has been sent, any error makes
    `Service` abort the connection.
    """
    limit = service.config.server.fetch_max_body
    length = page.content_length
    if length is not None and length > limit and call.request.method != "HEAD":
        raise Problem(502, "too-large", f"the page has {length} bytes; {limit} are allowed")
    if not 200 <= page.status <= 599:
        raise Problem(502, "bad-answer", f"the site answered with the status {page.status}")
    response = web.StreamResponse(status=page.status, headers=_head(page, decision))
    response.headers["X-Request-Id"] = call.id
    if length is not None:
        response.content_length = length
    await response.prepare(call.request)
    size = 0
    async for piece in page.content.iter_chunked(_PIECE_OCTETS):
        size += len(piece)
        if size > limit:
            raise aiohttp.ClientPayloadError("too large")
        await response.write(piece)
    await response.write_eof()
    return response


def _head(page: aiohttp.ClientResponse, decision: Decision) -> dict[str, str]:
    """Return the header fields for a page. Raises Problem 502 if one can't be passed on."""
    headers = {
        name: page.headers[name]
        for name in _RESPONSE_FIELDS
        if name in page.headers and len(page.headers[name]) <= _MAX_FIELD
    }
    for name, value in headers.items():
        if _UNSENDABLE.search(value):
            raise Problem(502, "bad-answer", f"the site's {name} header holds forbidden characters")
    headers |= _usage_fields(page) | _SAFETY_FIELDS | wire.decision_headers(decision)
    return headers | {"Content-Location": str(page.url), "Server": "gatekeeper"}


def _usage_fields(page: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the fields about use and price, without those that can't be passed on."""
    fields = {name: ", ".join(page.headers.getall(name, ())) for name in _USAGE_FIELDS}
    challenges = parse_challenges(page.headers.getall("WWW-Authenticate", ()))
    # Only those for machines: for Basic a browser would prompt its user in this service's name.
    fields["WWW-Authenticate"] = ", ".join([challenge.text for challenge in challenges])
    return {
        name: value
        for name, value in fields.items()
        if value and len(value) <= _MAX_FIELD and not _UNSENDABLE.search(value)
    }


# --- `/v1/sitemaps`

_LIST_WAIT = 3_600.0
"""Seconds that one sitemap waits for its lease at most, by `_LEASE_SHARE` less."""
JSON_LINES: Final = "text/plain"
"""JSON lines have no registered type, and generators of clients know no other type for them."""


class SitemapsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/sitemaps`. Files are fetched only under the service's own name."""

    origin: str
    since: str | None = None
    guess: bool = False
    max_entries: Annotated[int, msgspec.Meta(ge=0)] | None = None


@ROUTES.add("GET", "/v1/sitemaps", query=SitemapsQuery, answers={200: JSON_LINES})
async def list_sitemaps(service: Service, call: Call) -> web.StreamResponse:
    """List the pages that an origin's sitemaps name, one JSON object a line, as they are read.

    A line has `url`, `lastmod` and `source`, or a `finding`: what is wrong with a sitemap. If the
    connection breaks off, the list is not complete.
    """
    query = call.parameters(SitemapsQuery)
    found = sitemaps_of(
        service.gate,
        query.origin,
        since=None if query.since is None else parse_since(query.since),
        guess=query.guess,
        max_entries=query.max_entries,
        take=partial(_lease_for_list, service, call),
    )
    with open_stream(service, call):
        async with contextlib.aclosing(found):
            entry = await _next_entry(service, found)  # an error before it has its own status
            response = stream_response(call, JSON_LINES)
            await response.prepare(call.request)
            if call.request.method == "HEAD":
                return response
            told = 0
            while True:
                for finding in found.findings[told:]:
                    await response.write(wire.encode(wire.SitemapLine(finding=finding)) + b"\n")
                told = len(found.findings)
                if entry is None:
                    return response
                await response.write(wire.encode(entry) + b"\n")
                entry = await _next_entry(service, found)


async def _lease_for_list(service: Service, call: Call, url: str) -> Lease:
    """Wait for a lease for one sitemap, as any client does (T15). The decision is logged (T20)."""
    try:
        return await _lease(service, call, url, service.clock.monotonic() + _LIST_WAIT)
    except Denied as error:
        service.decided(error.decision, call)
        raise


async def _next_entry(service: Service, found: Sitemaps) -> SitemapEntry | None:
    """Return the next entry, or None. Raises Problem 503 while the service drains (T16)."""
    if service.phase != "serving":
        raise draining()
    return await anext(found, None)
