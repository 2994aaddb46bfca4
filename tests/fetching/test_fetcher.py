"""Single retrievals, over real sockets and under virtual time."""

from __future__ import annotations

import asyncio
import base64
import gzip
import random
import zlib
from typing import Any

import aiohttp
import msgspec
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.fetching.outcomes import Lifetime, Outcome, Retrieval, Validators, next_try
from gatekeeper.urls import Target
from tests.fetching.conftest import Asker, fetcher_on
from tests.internet import (
    Bomb,
    BrokenChunk,
    CloseSilently,
    Conditional,
    Custom,
    Drip,
    Encoded,
    Fail,
    FakeInternet,
    NeverAnswer,
    Page,
    Raw,
    Reset,
    Stall,
    Truncated,
    html,
    redirect,
)

A = "http://a.test"
RULES = "User-agent: *\nDisallow: /private\n"


async def test_a_file_is_fetched_as_the_specification_says(net: FakeInternet, ask: Asker) -> None:
    site = net.site("a.test").robots(
        RULES, headers=[("ETag", '"1"'), ("Cache-Control", "max-age=7200"), ("Age", "200")]
    )
    got = await ask(A, from_address="ops@bot.test")
    assert got.outcome is Outcome.RULES
    assert got.status == 200
    assert got.body == RULES.encode()
    assert got.etag == '"1"'
    assert got.lifetime == Lifetime(7000.0)
    assert got.hops == ()
    (request,) = site.requests
    assert (request.method, request.target) == ("GET", "/robots.txt")
    assert dict(request.headers) == {
        "Host": "a.test",
        "User-Agent": "testbot/1.0 (+https://bot.test/)",
        "Accept": "text/plain, text/*;q=0.9, */*;q=0.1",
        "Accept-Encoding": "gzip, deflate",
        "From": "ops@bot.test",
    }


async def test_cookies_headers_and_middlewares_of_the_session_stay_out(
    net: FakeInternet, ask: Asker
) -> None:
    site = net.site("a.test").robots(Page("", 302, [("Location", "/r"), ("Set-Cookie", "seen=1")]))
    site.on("/r", RULES)

    async def forbidden(*_: Any) -> aiohttp.ClientResponse:
        raise AssertionError("a session middleware saw the robots request")

    got = await ask(
        A,
        session={
            "headers": {"Authorization": "Bearer x", "Referer": "http://c.test/"},
            "cookies": {"tracker": "1"},
            "middlewares": (forbidden,),
        },
    )
    assert got.outcome is Outcome.RULES
    for request in site.requests:
        assert not request.headers.keys() & {"Cookie", "Authorization", "Referer"}


async def test_https_origins_are_asked_over_tls(net: FakeInternet, ask: Asker) -> None:
    net.site("a.test").robots(RULES)
    assert (await ask("https://a.test")).outcome is Outcome.RULES
    assert net.requests[-1].scheme == "https"


@pytest.mark.parametrize("tls", ["self-signed", "expired", "wrong-name"])
async def test_a_bad_certificate_is_unreachable_and_never_retried_in_clear(
    net: FakeInternet, ask: Asker, tls: Any
) -> None:
    net.site("a.test", address=net.address(), tls=tls).robots(RULES)
    assert (await ask("https://a.test")).outcome is Outcome.TLS
    assert net.requests == []


@pytest.mark.parametrize("knob", [{"tls_errors": "accept"}, {"profile": "archival"}])
async def test_a_bad_certificate_can_be_accepted(
    net: FakeInternet, ask: Asker, knob: dict[str, str]
) -> None:
    net.site("a.test", address=net.address(), tls="self-signed").robots(RULES)
    assert (await ask("https://a.test", **knob)).outcome is Outcome.RULES


# Redirects


async def test_five_redirects_are_followed_each_with_its_own_lease(
    net: FakeInternet, ask: Asker
) -> None:
    a = net.site("a.test").on("/robots.txt", redirect("/1", 301))
    for n, status in ((1, 302), (2, 303), (3, 307), (4, 308)):
        a.on(f"/{n}", redirect(f"http://b.test/{n + 1}" if n == 4 else f"/{n + 1}", status))
    net.site("b.test").on("/5", RULES)
    got = await ask(A)
    assert got.outcome is Outcome.RULES
    assert got.hops == (*(f"{A}/{n}" for n in (1, 2, 3, 4)), "http://b.test/5")
    urls = [f"{A}/robots.txt", *got.hops]
    # A lease is released before the next one is acquired.
    assert ask.leases == [(act, url) for url in urls for act in ("take", "give")]
    assert [status for _, status, _ in ask.reports] == [301, 302, 303, 307, 308, 200]


async def test_the_sixth_redirect_is_not_followed(net: FakeInternet, ask: Asker) -> None:
    a = net.site("a.test").on("/robots.txt", redirect("/1"))
    for n in range(1, 8):
        a.on(f"/{n}", redirect(f"/{n + 1}"))
    got = await ask(A)
    assert got.outcome is Outcome.TOO_MANY_REDIRECTS
    assert len(a.requests) == 6
    again = await ask(A, too_many_redirects="unreachable")
    assert again.outcome is Outcome.REDIRECTED_AWAY


async def test_a_redirect_loop_ends_without_a_second_request(net: FakeInternet, ask: Asker) -> None:
    a = net.site("a.test").on("/robots.txt", redirect("http://b.test/r"))
    net.site("b.test").on("/r", redirect(f"{A}/robots.txt"))
    assert (await ask(A)).outcome is Outcome.TOO_MANY_REDIRECTS
    assert len(a.requests) == 1


async def test_redirects_to_https_and_to_www_lead_to_the_file(
    net: FakeInternet, ask: Asker
) -> None:
    net.site(A).on("/robots.txt", redirect("https://a.test/robots.txt", 301))
    net.site("https://a.test").on("/robots.txt", redirect("https://www.a.test/robots.txt", 301))
    net.site("www.a.test").robots(RULES)
    got = await ask(A)
    assert got.outcome is Outcome.RULES
    assert got.url == "https://www.a.test/robots.txt"


@pytest.mark.parametrize("location", ["http://[oops/", "http://", "http://a%2fb.test/"])
async def test_a_location_that_is_no_url_is_an_invalid_answer(
    net: FakeInternet, ask: Asker, location: str
) -> None:
    net.site("a.test").on("/robots.txt", redirect(location))
    assert (await ask(A)).outcome is Outcome.BAD_REDIRECT


@pytest.mark.parametrize("page", [Page("", 301), Page("", 300), Page("", 305)])
async def test_a_redirect_without_a_usable_location_is_bad_redirect(
    net: FakeInternet, ask: Asker, page: Page
) -> None:
    net.site("a.test").robots(page)
    assert (await ask(A)).outcome is Outcome.BAD_REDIRECT


@pytest.mark.parametrize(
    "location",
    [
        "",
        " \t",
        "ftp://127.0.0.1/robots.txt",
        "FTP://b.test/robots.txt",
        "file:///etc/passwd",
        "mailto:webmaster@a.test",
        "javascript:void(0)",
        "data:text/plain,User-agent:%20*",
        "about:blank",
        "ws://b.test/robots.txt",
        "b.test:80/robots.txt",
        "localhost:80/robots.txt",
        "http:",
        "http://",
        "http:///robots.txt",
        "https:robots.txt",
        "//",
        "///robots.txt",
        "http://[::1/robots.txt",
        "http://b.test:port/robots.txt",
        "http://b..test/robots.txt",
        "http://b%zz.test/",
    ],
)
async def test_a_location_that_is_no_url_of_a_site_is_asked_for_again_in_a_minute(
    net: FakeInternet, ask: Asker, location: str
) -> None:
    net.site("a.test").on("/robots.txt", redirect(location))
    net.site("b.test").robots(RULES)
    got = await ask(A)
    assert got.outcome is Outcome.BAD_REDIRECT
    assert next_try(got.outcome.row.cache_time, 0, random.Random(1)) <= 72.0
    assert len(ask.leases) == 2


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://localhost/robots.txt",
        "http://user:secret@b.test/robots.txt",
        "//user:secret@b.test/robots.txt",
        "http://b.test:25/robots.txt",
    ],
)
async def test_a_redirect_that_the_guard_refuses_is_not_followed_and_defers(
    net: FakeInternet, ask: Asker, location: str
) -> None:
    b = net.site("b.test").robots(RULES)
    net.site("a.test").on("/robots.txt", redirect(location))
    got = await ask(A)
    assert got.outcome is Outcome.EGRESS_POLICY
    assert b.requests == []
    assert len(ask.leases) == 2


async def test_a_name_that_resolves_to_a_private_address_is_refused(
    net: FakeInternet, ask: Asker
) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/robots.txt"))
    net.dns("b.test", "10.0.0.1")
    net.dns("c.test", "10.0.0.1")
    assert (await ask(A)).outcome is Outcome.EGRESS_POLICY
    assert (await ask("http://c.test")).outcome is Outcome.BLOCKED


async def test_a_fresh_record_of_the_redirects_target_is_not_fetched_again(
    net: FakeInternet, ask: Asker
) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/robots.txt"))
    b = net.site("b.test").robots("User-agent: *\nDisallow: /new\n")
    asked: list[str] = []

    def known(origin: str) -> Retrieval:
        asked.append(origin)
        return Retrieval(outcome=Outcome.RULES, status=200, body=RULES.encode())

    ask.known = known
    got = await ask(A)
    assert got.body == RULES.encode()
    assert got.hops == ("http://b.test/robots.txt",)
    assert asked == ["http://b.test"]
    assert b.requests == []


async def test_another_path_of_the_redirects_target_is_fetched(
    net: FakeInternet, ask: Asker
) -> None:
    net.site("a.test").on("/robots.txt", redirect("http://b.test/a/robots.txt"))
    net.site("b.test").on("/a/robots.txt", RULES)
    ask.known = lambda origin: pytest.fail(f"{origin} was consulted")
    assert (await ask(A)).outcome is Outcome.RULES


# Conditional requests

VALIDATORS = Validators(url=f"{A}/robots.txt", etag='"1"', last_modified=None)


async def test_a_304_to_a_conditional_request_is_not_modified(
    net: FakeInternet, ask: Asker
) -> None:
    site = net.site("a.test").on("/robots.txt", Conditional(Page(RULES), etag='"1"'))
    got = await ask(A, VALIDATORS)
    assert got.outcome is Outcome.NOT_MODIFIED
    assert got.body is None
    assert site.requests[0].headers["If-None-Match"] == '"1"'


async def test_a_304_to_if_modified_since_is_not_modified(net: FakeInternet, ask: Asker) -> None:
    date = "Fri, 20 Nov 2026 10:00:00 GMT"
    net.site("a.test").on("/robots.txt", Conditional(Page(RULES), last_modified=date))
    validators = Validators(url=f"{A}/robots.txt", last_modified=date)
    assert (await ask(A, validators)).outcome is Outcome.NOT_MODIFIED


async def test_a_304_to_an_unconditional_request_is_retried_and_then_unreachable(
    net: FakeInternet, ask: Asker
) -> None:
    site = net.site("a.test").on("/robots.txt", Page("", 304), RULES)
    assert (await ask(A)).outcome is Outcome.RULES
    assert len(site.requests) == 2
    site.on("/robots.txt", Page("", 304))
    assert (await ask(A)).outcome is Outcome.NOT_MODIFIED_NOTHING


@pytest.mark.parametrize(
    ("etag", "outcome"),
    [('"2"', Outcome.RULES), ('W/"2"', Outcome.RULES), ('W/"1"', Outcome.NOT_MODIFIED)],
)
async def test_a_304_about_another_text_renews_nothing(
    net: FakeInternet, ask: Asker, etag: str, outcome: Outcome
) -> None:
    site = net.site("a.test").on("/robots.txt", Page("", 304, headers={"ETag": etag}), RULES)
    assert (await ask(A, VALIDATORS)).outcome is outcome
    assert all("If-None-Match" not in again.headers for again in site.requests[1:])


@pytest.mark.parametrize(
    ("modified", "outcome"),
    [
        ("Fri, 20 Nov 2026 10:00:00 GMT", Outcome.NOT_MODIFIED),
        ("Mon, 04 Feb 2019 10:00:00 GMT", Outcome.RULES),
    ],
)
async def test_a_304_about_an_older_text_renews_nothing(
    net: FakeInternet, ask: Asker, modified: str, outcome: Outcome
) -> None:
    """A copy restored from a backup is not newer than If-Modified-Since."""
    validators = Validators(url=f"{A}/robots.txt", last_modified="Fri, 20 Nov 2026 10:00:00 GMT")
    headers = {"Last-Modified": modified}
    net.site("a.test").on("/robots.txt", Page("", 304, headers=headers), RULES)
    assert (await ask(A, validators)).outcome is outcome


async def test_only_the_url_that_gave_the_validators_gets_them(
    net: FakeInternet, ask: Asker
) -> None:
    a = net.site("a.test").on("/robots.txt", redirect("http://b.test/r"))
    b = net.site("b.test").on("/r", Conditional(Page(RULES), etag='"1"'))
    validators = Validators(url="http://b.test/r", etag='"1"')
    assert (await ask(A, validators)).outcome is Outcome.NOT_MODIFIED
    assert "If-None-Match" not in a.requests[0].headers
    assert b.requests[0].headers["If-None-Match"] == '"1"'


@pytest.mark.parametrize("etag", ['"\xff"', '"' + "x" * 2000 + '"', ""])
async def test_a_validator_that_can_not_be_sent_back_is_not_kept(
    net: FakeInternet, ask: Asker, etag: str
) -> None:
    net.site("a.test").robots(RULES, headers=[("ETag", etag)])
    got = await ask(A)
    assert (got.outcome, got.etag) == (Outcome.RULES, None)


@pytest.mark.parametrize("location", ["http://b.test/\xff", "/\xff\xfe robots", "//b.test/%zz"])
async def test_odd_octets_in_a_location_break_nothing(
    net: FakeInternet, ask: Asker, location: str
) -> None:
    net.site("b.test").otherwise(Page(RULES))
    net.site("a.test").otherwise(Page(RULES)).on("/robots.txt", redirect(location))
    got = await ask(A)
    assert all(hop.isascii() for hop in got.hops)
    assert got.outcome in {Outcome.RULES, Outcome.BAD_REDIRECT}


# Bodies


def lines(size: int) -> bytes:
    """Return a file of exactly so many octets whose last line is a rule."""
    head, last = b"User-agent: *\n", b"Disallow: /last\n"
    filler = b"# " + b"x" * 61 + b"\n"
    room = size - len(head) - len(last)
    body = head + filler * (room // len(filler))
    rest = size - len(body) - len(last)
    return body + b"#" * max(0, rest - 1) + b"\n" * min(1, rest) + last


@pytest.mark.parametrize(
    ("kib", "outcome", "kept"),
    [
        (499, Outcome.RULES, 499 * 1024),
        (500, Outcome.RULES, 512_000),
        (501, Outcome.CUT_RULES, 512_001),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
async def test_the_size_limit_counts_decoded_octets(
    net: FakeInternet, ask: Asker, kib: int, outcome: Outcome, kept: int, packed: bool
) -> None:
    body = lines(kib * 1024)
    page = Page(body)
    if packed:
        # Stored, not compressed, as a real file doesn't shrink a hundredfold.
        level = gzip.compress(body, 0)
        page = Page(level, headers=[("Content-Encoding", "gzip")])
    net.site("a.test").robots(page)
    got = await ask(A)
    assert got.outcome is outcome
    assert got.body is not None
    assert len(got.body) == kept
    assert got.body == body[:kept]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_gzip_and_deflate_bodies_are_decoded(
    net: FakeInternet, ask: Asker, encoding: str
) -> None:
    net.site("a.test").robots(Encoded(RULES, encoding))
    assert (await ask(A)).body == RULES.encode()


@pytest.mark.parametrize("damage", ["garbage", "cut"])
async def test_a_body_with_a_broken_encoding_is_fetched_again_without_encoding(
    net: FakeInternet, ask: Asker, damage: str
) -> None:
    site = net.site("a.test").on("/robots.txt", Encoded(RULES, damage=damage), RULES)
    assert (await ask(A)).outcome is Outcome.RULES
    assert [r.headers["Accept-Encoding"] for r in site.requests] == ["gzip, deflate", "identity"]
    site.on("/robots.txt", Encoded(RULES, damage=damage))
    assert (await ask(A)).outcome is Outcome.BAD_ENCODING


NO_CODINGS = ("utf-8", "UTF-8", "none", "binary", "8bit", "text/plain", "", "identity", "x, y")
READABLE: dict[str, tuple[bytes, Outcome]] = {
    "rules": (RULES.encode(), Outcome.RULES),
    "all that is allowed": ("User-agent: *\t\f\r\nDisallow: /caf\u00e9\n".encode(), Outcome.RULES),
    "a mark": (b"\xef\xbb\xbf" + RULES.encode(), Outcome.RULES),
    "a sitemap": (b"Sitemap: http://a.test/map", Outcome.RULES),
    "comments": (b"# nothing here\n", Outcome.EMPTY),
    "nothing": (b"", Outcome.EMPTY),
    "a page": (b"<!doctype html><title>x</title>", Outcome.SOFT_404),
    "a long text": (b"#" * 511_999 + "\u00e9".encode() * 9, Outcome.CUT_RULES),
}


@pytest.mark.parametrize(
    ("encoding", "kind"),
    [*((encoding, "rules") for encoding in NO_CODINGS), *(("7bit", kind) for kind in READABLE)],
)
async def test_a_plain_text_is_read_under_any_content_encoding(
    net: FakeInternet, ask: Asker, encoding: str, kind: str
) -> None:
    body, outcome = READABLE[kind]
    if kind == "a long text":
        body = RULES.encode() + body[len(RULES) :]
    site = net.site("a.test").robots(Page(body, headers=[("Content-Encoding", encoding)]))
    got = await ask(A)
    assert got.outcome is outcome
    assert got.metadata.coding == encoding.partition(",")[0].lower().replace("identity", "")
    assert len(site.requests) == 1


@pytest.mark.parametrize("encoding", ["\xff\xfe", "\x1b[31m" + "x" * 60_000, "caf\xe9"])
async def test_an_odd_name_of_an_encoding_can_be_stored_and_shown(
    net: FakeInternet, ask: Asker, encoding: str
) -> None:
    net.site("a.test").robots(Page(RULES, headers=[("Content-Encoding", encoding)]))
    coding = (await ask(A)).metadata.coding
    assert coding.isprintable()
    assert 0 < len(coding) < 50
    assert msgspec.json.encode(coding)


UNREADABLE = {
    "gzip": gzip.compress(RULES.encode()),
    "bytes": bytes(range(256)),
    "Latin-1": b"User-agent: *\nDisallow: /caf\xe9\n",
    "NUL": b"User-agent: *\nDisallow: /\0\n",
    "escape": b"User-agent: *\nDisallow: /\x1b[0m\n",
    "DEL": b"User-agent: *\nDisallow: /\x7f\n",
    "C1": b"User-agent: *\nDisallow: /\xc2\x85\n",
    "surrogate": b"User-agent: *\nDisallow: /\xed\xa0\x80\n",
    "UTF-16": b"\xff\xfe" + RULES.encode("utf-16-le"),
    "cut": RULES.encode() + b"# \xc3",
    "long": b"#" * 1_000_000 + b"\0",
    "base64": base64.encodebytes(RULES.encode() * 20),
    "a picture": b"\x89PNG\r\n\x1a\n" + b"\0" * 3000,
}


@pytest.mark.parametrize("encoding", ["snappy", "gzip, none"])
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_a_binary_body_under_an_unknown_encoding_never_allows_a_site(
    net: FakeInternet, ask: Asker, encoding: str, kind: str
) -> None:
    body = UNREADABLE[kind]
    if kind == "long":
        body = b"\0" + body
    if encoding.startswith("gzip"):
        body = gzip.compress(body, 1)
    site = net.site("a.test").robots(Page(body, headers=[("Content-Encoding", encoding)]))
    assert (await ask(A)).outcome is Outcome.BAD_ENCODING
    assert [r.headers["Accept-Encoding"] for r in site.requests] == ["gzip, deflate", "identity"]


async def test_several_content_encoding_fields_are_one_list(net: FakeInternet, ask: Asker) -> None:
    """Undone once only, the body would be binary data, which counts as no file."""
    body = gzip.compress(gzip.compress(RULES.encode()))
    headers = [("Content-Encoding", "gzip"), ("Content-Encoding", "gzip")]
    net.site("a.test").robots(Page(body, headers=headers))
    assert (await ask(A)).body == RULES.encode()


async def test_a_body_in_an_encoding_never_asked_for_is_no_file(
    net: FakeInternet, ask: Asker
) -> None:
    net.site("a.test").robots(Page(RULES, headers=[("Content-Encoding", "br")]))
    assert (await ask(A)).outcome is Outcome.BAD_ENCODING


async def test_a_decompression_bomb_is_no_file(net: FakeInternet, ask: Asker) -> None:
    net.site("a.test").robots(Bomb(2**26))
    got = await ask(A)
    assert got.outcome is Outcome.BAD_ENCODING


async def test_a_compressed_body_of_endless_padding_is_cut(net: FakeInternet, ask: Asker) -> None:
    # Empty stored blocks: five octets are received for no text.
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(b"User-agent: *\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    padding = b"\x00\x00\x00\xff\xff" * 400_000
    net.site("a.test").robots(Page(start + padding, headers=[("Content-Encoding", "deflate")]))
    assert (await ask(A)).outcome is Outcome.BAD_ENCODING


@pytest.mark.parametrize(
    "act",
    [
        Truncated(RULES),
        Truncated(RULES, reset=True),
        BrokenChunk(RULES),
        Reset(),
        Reset(after=RULES.encode()),
        CloseSilently(),
    ],
    ids=repr,
)
async def test_a_truncated_answer_is_retried_once_and_then_unreachable(
    net: FakeInternet, ask: Asker, act: Any
) -> None:
    site = net.site("a.test").on("/robots.txt", act, RULES)
    assert (await ask(A)).outcome is Outcome.RULES
    assert len(site.requests) == 2
    site = net.site("b.test").on("/robots.txt", act)
    assert (await ask("http://b.test")).outcome is Outcome.TRUNCATED
    assert len(site.requests) == 2, "aiohttp must not repeat it by itself"
    assert len(ask.leases) == 8, "each attempt has a lease of its own"


async def test_a_body_with_broken_chunks_is_never_a_file(net: FakeInternet, ask: Asker) -> None:
    net.site("a.test").robots(BrokenChunk(RULES, garbage=True))
    # The row depends on whether head and garbage arrived in one segment.
    assert (await ask(A)).outcome in {Outcome.TRUNCATED, Outcome.INVALID_RESPONSE}


@pytest.mark.parametrize("status", [408, 421, 425])
async def test_a_status_about_the_connection_gets_one_more_try(
    net: FakeInternet, ask: Asker, status: int
) -> None:
    site = net.site("a.test").on("/robots.txt", Page("", status), RULES)
    assert (await ask(A)).outcome is Outcome.RULES
    site.on("/robots.txt", Page("", status))
    assert (await ask(A)).outcome is Outcome.CLIENT_ERROR
    assert len(site.requests) == 4


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (b"HTTP/1.1 700 Odd\r\nContent-Length: 0\r\n\r\n", Outcome.INVALID_RESPONSE),
        (b"HELLO THERE\r\n\r\n", Outcome.INVALID_RESPONSE),
        (b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", Outcome.INVALID_RESPONSE),
        (b"HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\nU", Outcome.INVALID_RESPONSE),
        (b"HTTP/1.0 200 OK\r\n\r\nUser-agent: *\n", Outcome.RULES),
    ],
)
async def test_unusual_response_heads_have_their_outcome(
    net: FakeInternet, ask: Asker, raw: bytes, outcome: Outcome
) -> None:
    net.site("a.test").robots(Raw(raw))
    assert (await ask(A)).outcome is outcome


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        (Page(b""), Outcome.EMPTY),
        (Page(b"", 204), Outcome.EMPTY),
        (Page("# nothing to say\n"), Outcome.EMPTY),
        (html("<html><h1>Not found</h1></html>"), Outcome.SOFT_404),
        (html("<pre>User-agent: *\nDisallow: /</pre>"), Outcome.HTML_RULES),
        (html(RULES), Outcome.RULES),
        (Page(b"\x89PNG\0\0", content_type=None), Outcome.NOT_TEXT),
        (Page(b"GIF89a", content_type="image/gif"), Outcome.NOT_TEXT),
        (Page(b"User-agent: *\nDisallow: /\0x\nDisallow: /y\n"), Outcome.RULES),
        (Page("denied", 403, [("cf-mitigated", "challenge")]), Outcome.CHALLENGE),
    ],
)
async def test_the_content_decides_whether_a_page_is_a_file(
    net: FakeInternet, ask: Asker, page: Page, outcome: Outcome
) -> None:
    net.site("a.test").robots(page)
    assert (await ask(A)).outcome is outcome


async def test_a_picture_is_not_read_to_its_end(net: FakeInternet, ask: Asker) -> None:
    net.site("a.test").robots(Drip(b"\0" * 5_000_000, size=5_000, every=1.0))
    got = await ask(A, min_rate=0)
    assert got.outcome is Outcome.NOT_TEXT
    assert got.took < 4.0  # its first 20,000 octets


async def test_the_body_of_an_error_is_not_read(net: FakeInternet, ask: Asker) -> None:
    net.site("a.test").robots(Page("User-agent: *\nDisallow:\n", 403))
    got = await ask(A)
    assert got.outcome is Outcome.NO_FILE_SAID_OTHERWISE
    assert got.body is None


# Time


@pytest.fixture
def started(net: FakeInternet) -> VirtualClock:
    assert isinstance(net.clock, VirtualClock)
    return net.clock


async def test_a_host_that_never_completes_is_given_ten_seconds(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.blackhole("a.test")
    assert (await ask(A)).outcome is Outcome.CONNECT_TIMEOUT
    assert started.monotonic() == pytest.approx(10.0)


async def test_a_name_service_that_never_answers_is_given_ten_seconds(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.dns("a.test", Fail.NEVER)
    assert (await ask(A)).outcome is Outcome.CONNECT_TIMEOUT
    assert started.monotonic() == pytest.approx(10.0)


async def test_the_first_octet_is_waited_for_fifteen_seconds(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.site("a.test").robots(NeverAnswer())
    assert (await ask(A)).outcome is Outcome.TIMEOUT
    assert started.monotonic() == pytest.approx(15.0)


async def test_a_file_that_arrives_octet_by_octet_is_given_up_after_10_s(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.site("a.test").robots(Drip(RULES * 100, size=1, every=0.5))
    assert (await ask(A)).outcome is Outcome.TOO_SLOW
    assert started.monotonic() == pytest.approx(10.0)


async def test_a_file_that_arrives_slowly_is_given_up_at_the_total_deadline(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.site("a.test").robots(Drip(RULES * 10_000, size=300, every=1.0))
    got = await ask(A)
    assert got.outcome is Outcome.TOO_SLOW
    assert started.monotonic() == pytest.approx(30.0)
    assert got.took == pytest.approx(30.0)


async def test_a_body_that_stops_in_the_middle_has_the_outcome_too_slow(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.site("a.test").robots(Stall())
    assert (await ask(A)).outcome is Outcome.TOO_SLOW
    assert started.monotonic() == pytest.approx(10.0)


async def test_slow_hops_share_one_deadline(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    a = net.site("a.test").on("/robots.txt", Page("", 302, [("Location", "/1")], delay=12.0))
    a.on("/1", Page("", 302, [("Location", "/2")], delay=12.0))
    a.on("/2", Page(RULES, delay=12.0))
    assert (await ask(A)).outcome is Outcome.TIMEOUT
    assert started.monotonic() == pytest.approx(30.0)


async def test_waiting_for_a_lease_is_not_network_time(
    net: FakeInternet, ask: Asker, started: VirtualClock
) -> None:
    net.site("a.test").on("/robots.txt", redirect("/1"))
    net.sites["a.test"].on("/1", Page(RULES, delay=5.0))
    take = ask.acquire

    def late(target: Target) -> Any:
        return _Late(started, take(target))

    ask.acquire = late  # type: ignore[method-assign]
    got = await ask(A)
    assert got.outcome is Outcome.RULES
    assert started.monotonic() == pytest.approx(205.0)
    assert got.took == pytest.approx(5.0)


class _Late:
    def __init__(self, clock: VirtualClock, lease: Any) -> None:
        self.clock = clock
        self.lease = lease

    async def __aenter__(self) -> Any:
        await self.clock.sleep(100.0)
        return await self.lease.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self.lease.__aexit__(*error)


# Failures before the first octet


async def test_a_name_that_does_not_exist_is_nxdomain(net: FakeInternet, ask: Asker) -> None:
    net.dns("a.test", Fail.NXDOMAIN)
    assert (await ask(A)).outcome is Outcome.DNS_NXDOMAIN


async def test_a_name_without_an_address_is_nxdomain(net: FakeInternet, ask: Asker) -> None:
    net.dns("a.test", Fail.EMPTY)
    assert (await ask(A)).outcome is Outcome.DNS_NXDOMAIN


async def test_a_name_service_that_fails_is_a_dns_failure(net: FakeInternet, ask: Asker) -> None:
    net.dns("a.test", Fail.SERVFAIL)
    assert (await ask(A)).outcome is Outcome.DNS_FAILURE


async def test_a_refused_connection_is_connect_failed(net: FakeInternet, ask: Asker) -> None:
    net.refusing("a.test")
    assert (await ask(A)).outcome is Outcome.CONNECT_FAILED


async def test_a_retry_after_reaches_the_report_and_the_record(
    net: FakeInternet, ask: Asker
) -> None:
    net.site("a.test").robots(Page("", 429, [("Retry-After", "120")]))
    got = await ask(A)
    assert got.outcome is Outcome.RATE_LIMITED
    assert got.retry_after == 120.0
    assert ask.reports == [(f"{A}/robots.txt", 429, 120.0)]


@pytest.mark.parametrize("years", [b"315360000", b"Fri, 31 Dec 2049 23:59:59 GMT"])
@pytest.mark.parametrize("redirected", [False, True])
async def test_a_wait_of_years_is_capped_by_the_longest_back_off(
    net: FakeInternet, ask: Asker, years: bytes, redirected: bool
) -> None:
    """Otherwise the block would outlast the repair of the file, which alone could end it."""
    said = [("Retry-After", years.decode())]
    if redirected:
        net.site("b.test").robots(Page("", 503, said))
        said.append(("Location", "http://b.test/robots.txt"))
    net.site("a.test").robots(Page("", 302 if redirected else 429, said))
    got = await ask(A)
    assert got.retry_after == 86_400.0
    assert [wait for _, _, wait in ask.reports] == [86_400.0] * (1 + redirected)


async def test_a_cancelled_retrieval_leaves_no_connection(net: FakeInternet, ask: Asker) -> None:
    hold = asyncio.Event()

    async def act(exchange: Any) -> None:
        hold.set()
        await exchange.gone.wait()

    net.site("a.test").robots(Custom(act=act))
    task = asyncio.create_task(ask(A, limit=0.0))
    await hold.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ask.leases[-1][0] == "give"


async def test_a_closed_session_is_no_failure_of_the_site(net: FakeInternet, ask: Asker) -> None:
    session = net.session()
    await session.close()
    assert (await fetcher_on(session, net.clock).fetch(A)).outcome is Outcome.OURS
