"""A small fake internet on loopback: named hosts, a resolver, servers that misbehave.

Real sockets, real HTTP, real TLS; nothing leaves 127.0.0.0/8 and ::1. A test says what
each host does, sends requests through the resolver, and lets the server's own log judge:

    from tests.internet import Drip, FakeInternet, Page, redirect

    async def test_it(internet):                      # fixture; or: async with FakeInternet()
        a = internet.site("a.test").robots("User-agent: *\\nDisallow: /private\\n")
        a.page("/", "hello").on("/old", redirect("http://b.test/new"))
        internet.site("b.test").on("/new", Page(status=503), Page("now it works"))
        async with internet.session() as session:     # resolver and TLS trust are set
            async with session.get("http://a.test/old") as response:
                assert response.status == 503
        assert a.paths == ["/old"]                     # what the server saw
        assert internet.requests[-1].url == "http://b.test/new"

Ports. The system chooses the real ones. `internet.resolver` answers with them whatever
port the URL names (443 and 8443 lead to TLS), so that `http://a.test/` just works; with
a session of your own pass `resolver=internet.resolver` to its connector (and
`ssl=internet.client_ssl`). A literal needs the real port:
`f"http://127.0.0.1:{internet.listener().port()}/"`.

Hosts. `internet.site(name, address=..., tls=...)`: name, "name:port" or "https://name".
All share 127.0.0.1; `address=internet.address()` gives a host an address of its own, and
`address=["127.1.0.1", "::1"]` several (`has_ipv6()` says whether ::1 is there). `tls`:
"good", "self-signed", "expired", "wrong-name", or "none" (plain HTTP on 443; needs an own
address). `internet.refusing(name)`, `.blackhole(name)` and `.rude(name)` are hosts that
refuse, never complete, or reset each connection. `free_port()` is for servers of other programs.

Paths. `site.on(path, *behaviours)`: successive requests get successive behaviours, the
last repeats; `site.otherwise(behaviour)` for all other paths (else 404). A behaviour is
text, bytes, one of the classes below, or an `async def act(exchange)` of your own.

    Page(body, status, headers, content_type, delay, close)   html(text)   redirect(to, status)
    Conditional(page, etag, last_modified)    answers 304
    Drip(body, size, every)                   a piece every so many seconds of the clock
    Hold(then)                                until hold.release(); hold.waiting counts arrivals
    NeverAnswer()  Stall(body)                no head; a head and no end
    Truncated(body, missing)  BrokenChunk(body)  CloseSilently()  Reset(after)
    Encoded(body, encoding, damage)  Bomb(size)
    Raw(data, then)                           any bytes: bad heads, 1xx, status 700
    Interim(status, times)                    1xx before the answer; without times for ever
    Custom(choose=lambda request: behaviour)

Names. `internet.dns(name, *steps)`: each step an address, a list of them, or `Fail.NXDOMAIN`,
`.SERVFAIL`, `.TIMEOUT`, `.NEVER`, `.EMPTY`; successive look-ups take successive steps
(rebinding). `FakeInternet(dns_delay=(0, 0.3))` delays answers by the clock.
`internet.resolver.queries` is the log. Unknown names do not exist.

The log. `internet.requests`, `site.requests`: `Request` with .at .method .target .path .host
.headers .body .url .concurrent .ended .connection, and of the answer .answered .status
.answer_header(name); `internet.connections` (those too that brought no request),
`internet.dialled(address)`, `site.paths`, `site.gaps()`, `site.most_concurrent`.

Time. Every delay is the injected clock's. With `FakeInternet(clock=VirtualClock())` (fixture
`virtual_internet`) write `await internet.drive(something())`: virtual time moves from timer
to timer whenever the network is quiet, so a 30 s drip takes milliseconds. aiohttp's own
timeouts and happy eyeballs' 250 ms are the loop's, and real.
"""

from __future__ import annotations

from tests.internet.behaviours import (
    Behaviour,
    Bomb,
    BrokenChunk,
    CloseSilently,
    Conditional,
    Custom,
    Drip,
    Encoded,
    Hold,
    Interim,
    NeverAnswer,
    Page,
    Raw,
    Reset,
    Stall,
    Truncated,
    html,
    redirect,
)
from tests.internet.names import Fail, Names, Query
from tests.internet.net import FakeInternet, Listener, free_port, has_ipv6
from tests.internet.sites import Site
from tests.internet.wire import Connection, Exchange, Request
