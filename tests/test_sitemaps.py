"""`gate.sitemaps`: what a site lists, fetched politely, whatever the site sends."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper import (
    ConfigError,
    Deferred,
    Denied,
    GateClosed,
    Gatekeeper,
    InvalidURL,
    LeaseTimeout,
    SitemapEntry,
    Sitemaps,
)
from gatekeeper.robots import Severity
from gatekeeper.sitemaps import (
    MAX_ENTRIES,
    MAX_FILES,
    MAX_OCTETS,
    Reporter,
    SitemapFinding,
    parse_modified,
    read_sitemap,
)
from tests.conformance.ways import AGENT, settings
from tests.gate_support import QUICK, gate_on
from tests.internet import (
    Bomb,
    Custom,
    Drip,
    Encoded,
    FakeInternet,
    Page,
    Request,
    Site,
    Stall,
    Truncated,
)

MIB = 2**20


def urlset(*urls: str, lastmod: str = "") -> str:
    dated = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    items = "".join(f"<url><loc>{url}</loc>{dated}</url>" for url in urls)
    return f'<?xml version="1.0"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{items}</urlset>'


def index(*urls: str, lastmod: str = "") -> str:
    dated = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    items = "".join(f"<sitemap><loc>{url}</loc>{dated}</sitemap>" for url in urls)
    return f"<sitemapindex>{items}</sitemapindex>"


# --- one file -------------------------------------------------------------------------------


def pieces(body: bytes, size: int = 16_384) -> Iterator[bytes]:
    return (body[at : at + size] for at in range(0, len(body), size))


def read(
    body: bytes | str | Iterator[bytes], base: str | None = "https://x.test/dir/s.xml"
) -> tuple[list[str], list[str]]:
    """The URLs of a file, and the codes of the findings about it."""
    findings: list[SitemapFinding] = []
    octets = body.encode() if isinstance(body, str) else body
    parts = pieces(octets) if isinstance(octets, bytes) else octets
    urls = [
        one.url for found in read_sitemap(parts, Reporter(findings, "s"), base) for one in found
    ]
    return urls, [finding.code for finding in findings]


ONE, TWO = "https://x.test/1", "https://x.test/2?a=1&b=2"
ATOM = f"""<feed xmlns="http://www.w3.org/2005/Atom"><link href="https://x.test/"/>
<entry><link rel="self" href="https://x.test/self"/><link href="{ONE}"/><link href="https://x.test/3"/>
<updated>2026-11-01T10:00:00Z</updated><published>2020-01-01T00:00:00Z</published>
<source><link href="https://x.test/source"/></source></entry>
<entry><link rel="alternate" type="text/html" href="{TWO.replace("&", "&amp;")}"/></entry></feed>"""
RSS = f"""<rss version="2.0" xmlns:atom="http://www.w3.org/2005/Atom"><channel>
<link>https://x.test/</link><atom:link href="https://x.test/rss"/><image><url>https://x.test/i.png</url>
<link>https://x.test/image</link></image>
<item><title>1</title><link>{ONE}</link><pubDate>Sun, 01 Nov 2026 10:00:00 GMT</pubDate></item>
<item><link><![CDATA[{TWO}]]></link></item></channel></rss>"""
EXTENDED = f"""<urlset xmlns:image="i" xmlns:xhtml="x" xmlns:news="n"><url><loc>
  {ONE}
</loc><xhtml:link rel="alternate" href="https://x.test/de"/><image:image>
<image:loc>https://x.test/i.png</image:loc></image:image><news:news><news:title>t</news:title></news:news>
</url><url><loc>{TWO.replace("&", "&amp;")}</loc></url></urlset>"""
PREFIXED = EXTENDED.replace("urlset", "s:urlset").replace("<url>", "<s:url>")
PREFIXED = PREFIXED.replace("</url>", "</s:url>").replace("<loc>", "<s:loc>")
PREFIXED = PREFIXED.replace("</loc>", "</s:loc>")
RDF = f"""<rdf:RDF xmlns:rdf="r" xmlns="http://purl.org/rss/1.0/"><channel><link>https://x.test/</link>
</channel><item><link>{ONE}</link></item>
<item><link>{TWO.replace("&", "&amp;")}</link></item></rdf:RDF>"""
PLAIN = f"{ONE}\r\n\n# a comment\n  {TWO}  "
SITEMAP = urlset(ONE, TWO.replace("&", "&amp;"))


@pytest.mark.parametrize("text", [SITEMAP, EXTENDED, PREFIXED, ATOM, RSS, RDF, PLAIN])
@pytest.mark.parametrize("packed", [False, True])
def test_every_format_gives_its_urls(text: str, packed: bool) -> None:
    body = text.encode()
    assert read(gzip.compress(body) if packed else body) == ([ONE, TWO], [])


@pytest.mark.parametrize("text", [SITEMAP, ATOM, RSS, PLAIN])
def test_a_sitemap_may_be_cut_into_pieces_anywhere(text: str) -> None:
    body = text.encode()
    for octets in (body, gzip.compress(body[:50]) + gzip.compress(body[50:])):
        first, rest = octets[:2], octets[2:]
        assert read(iter([first, *pieces(rest, 1)])) == ([ONE, TWO], [])


def test_octets_after_the_gzip_data_are_ignored() -> None:
    assert read(gzip.compress(SITEMAP.encode()) + b"\0" * 99) == ([ONE, TWO], [])


@pytest.mark.parametrize(
    "body",
    [
        codecs.BOM_UTF8 + SITEMAP.encode(),
        SITEMAP.encode("utf-16"),
        codecs.BOM_UTF16_BE + SITEMAP.encode("utf-16-be"),
        SITEMAP.encode("utf-16-le"),
        b"\r\n  " + SITEMAP.encode(),
        SITEMAP.replace('"1.0"', '"1.0" encoding="utf-16"').encode(),
        SITEMAP.replace('"1.0"', '"1.0" encoding="zip"').encode(),
        SITEMAP.replace('"1.0"', '"1.0" encoding="no-such"').encode(),
        codecs.BOM_UTF8 + PLAIN.encode(),
        PLAIN.encode("utf-16"),
    ],
)
def test_every_encoding_is_read(body: bytes) -> None:
    assert read(body) == ([ONE, TWO], [])


@pytest.mark.parametrize("encoding", ["iso-8859-1", "windows-1252", "gb2312", "Shift_JIS"])
def test_a_declared_encoding_is_obeyed(encoding: str) -> None:
    letter = {"gb2312": "\u4e2d", "Shift_JIS": "\u30a2"}.get(encoding, "\u00fc")
    text = f'<?xml version="1.0" encoding="{encoding}"?>{urlset(f"https://x.test/{letter}")[21:]}'
    assert read(text.encode(encoding)) == ([f"https://x.test/{letter}"], [])


def test_octets_of_another_encoding_cost_no_other_entry() -> None:
    assert read(urlset("https://x.test/\u00fc", ONE).encode("latin-1"))[0][1] == ONE


def test_relative_urls_are_completed() -> None:
    """They are against the protocol, but generators of static sites write them."""
    text = urlset("/a?b", "//other.test/c", "post.xml", "blog/post.html", "../up", "x?y=z:1")
    base = "https://x.test/"
    assert read(text) == (
        [
            *(f"{base}a?b", "https://other.test/c", f"{base}dir/post.xml"),
            *(f"{base}dir/blog/post.html", f"{base}up", f"{base}dir/x?y=z:1"),
        ],
        [],
    )
    assert read(text, base=None) == ([], ["invalid-url"])
    assert read(index("post-sitemap.xml")) == ([f"{base}dir/post-sitemap.xml"], [])


def test_a_url_without_a_scheme_and_text_that_is_no_url_are_not_completed() -> None:
    text = urlset(
        "www.x.test/d", "www.x.test", "x.test/a", "", "a page", "ftp://x.test/", "http:///"
    )
    assert read(text) == ([], ["invalid-url"])
    assert read("Forbidden\n/x\n") == ([], ["invalid-url", "not-a-sitemap"])


def test_urls_of_other_hosts_are_given() -> None:
    assert read(urlset("https://other.test/", "http://u:p@x.test/"))[0] == [
        "https://other.test/",
        "http://u:p@x.test/",
    ]


BROKEN = {
    "cut": (SITEMAP[:-20], "broken-xml"),
    "ampersand": (SITEMAP.replace("</urlset>", "<url><loc>a&b</loc></url></urlset>"), "broken-xml"),
    "control": (SITEMAP.replace("</urlset>", "\x01</urlset>"), "broken-xml"),
    "tags": (SITEMAP.replace("</urlset>", "</url>"), "broken-xml"),
    "gzip cut": (gzip.compress(SITEMAP.encode())[:-6], "broken-gzip"),
    "undeclared": (SITEMAP.replace("</urlset>", "&lol;</urlset>"), "broken-xml"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_entries_before_an_error_are_given(name: str) -> None:
    body, code = BROKEN[name]
    found, codes = read(body)
    assert found[:1] == [ONE]
    assert codes == [code]


def test_a_finding_names_the_line() -> None:
    findings: list[SitemapFinding] = []
    body = b"<urlset>\n<url>\n<loc>https://x.test/</loc></url>\n<url><loc>x</loc></url>\n<loc"
    list(read_sitemap(iter([body]), Reporter(findings, "https://x.test/s")))
    assert [(f.source, f.code, f.severity, f.line) for f in findings] == [
        ("https://x.test/s", "invalid-url", Severity.WARNING, 4),
        ("https://x.test/s", "broken-xml", Severity.ERROR, 5),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_finding_names_the_line_of_a_list_whatever_ends_the_lines(end: bytes, size: int) -> None:
    findings: list[SitemapFinding] = []
    body = end.join([b"https://x.test/", b"", b"# no", b"what", b"https://x.test/a", b"that"])
    list(read_sitemap(pieces(body, size), Reporter(findings, "https://x.test/s")))
    assert [(one.code, one.line) for one in findings] == [("invalid-url", 4)]
    assert "'what'" in findings[0].message


@pytest.mark.parametrize(
    "body",
    [b"", b"  \n", b"<html><body>Sorry</body></html>", b"Not found", b"\x89PNG\r\n", b"\x00" * 99],
)
def test_a_file_that_is_no_sitemap_gives_no_entries(body: bytes) -> None:
    found, codes = read(body)
    assert not found
    assert {"not-a-sitemap", "broken-xml"} & set(codes)


def test_an_empty_sitemap_has_no_entries_and_no_findings() -> None:
    assert read("<urlset></urlset>") == ([], [])


LAUGHS = "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(9))


@pytest.mark.parametrize(
    "subset",
    [
        f'<!ENTITY l0 "ha">{LAUGHS}',
        '<!ENTITY x SYSTEM "file:///etc/passwd">',
        '<!ENTITY % p SYSTEM "http://127.0.0.1/"> %p;',
        f'<!ATTLIST url a CDATA "{"a" * 60_000}">',
    ],
    ids=["billion laughs", "file", "parameter", "attributes"],
)
def test_a_sitemap_with_declarations_is_refused(subset: str) -> None:
    body = f"<!DOCTYPE urlset [{subset}]>" + SITEMAP.partition("?>")[2]
    assert read(body) == ([], ["entities"])


def test_a_document_type_without_declarations_is_fine() -> None:
    body = '<!DOCTYPE urlset SYSTEM "http://127.0.0.1/s.dtd">' + SITEMAP.partition("?>")[2]
    assert read(body) == ([ONE, TWO], [])


def endless(start: bytes, again: bytes, *, packed: bool = True) -> Iterator[bytes]:
    """A file whose second part is repeated beyond every bound."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = again * (MIB // len(again))
    for _ in range(6):
        part, start = start + block, b""
        if packed:
            part = squeeze.compress(part)
        yield from pieces(part)


HOSTILE = {
    "blanks": (b"<urlset>", b" ", "too-large"),
    "text": (b"<urlset><url><loc>", b"a", "too-large"),
    "tag": (b"<urlset><url ", b"a", "too-large"),
    "comment": (b"<urlset><!--", b"a", "too-large"),
    "depth": (b"<urlset>", b"<a>", "too-large"),
    "a line": (b"https://x.test/", b"a", "too-large"),
    "lines": (b"", b"x\n", "too-many-entries"),
    "entries": (b"<urlset>", b"<url/>", "too-many-entries"),
    "files": (b"<sitemapindex>", b"<sitemap/>", "too-many-entries"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_without_end_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatekeeper.sitemaps.MAX_OCTETS", 3 * MIB)
    monkeypatch.setattr("gatekeeper.sitemaps.MAX_ENTRIES", 5_000)
    start, again, code = HOSTILE[name]
    found, codes = read(endless(start, again))
    assert not found
    assert codes[-1] == code
    assert read(endless(start, again, packed=False))[1][-1] == code


def test_a_sitemap_with_too_many_different_names_is_refused() -> None:
    """Expat keeps every name, so 50 MB of different ones would take half a gigabyte."""
    body = b"<urlset>" + b"".join(b"<a%x/>" % number for number in range(100_000))
    assert read(body) == ([], ["too-large"])
    body = b"<urlset>" + b"".join(b"<a b%x=''/>" % number for number in range(100_000))
    assert read(body) == ([], ["too-large"])


def test_more_entries_than_allowed_are_left_out() -> None:
    body = urlset(*(f"https://x.test/{n}" for n in range(MAX_ENTRIES + 1)))
    found, codes = read(body)
    assert (len(found), codes) == (MAX_ENTRIES, ["too-many-entries"])


def test_many_small_gzip_members_yield_to_others() -> None:
    body = gzip.compress(b"") * 100_000 + gzip.compress(SITEMAP.encode())
    findings: list[SitemapFinding] = []
    parts = list(read_sitemap(pieces(body), Reporter(findings, "s")))
    assert [one.url for found in parts for one in found] == [ONE, TWO]
    assert len(parts) > len(body) / 16_384
    assert not findings


WORDS = [
    *(b"<", b">", b"&", b"]]>", b"<!--", b"<![CDATA[", b"<?xml", b"encoding='big5'", b"<url>"),
    *(b"</url>", b"<loc>", b"</loc>", b"<!DOCTYPE a [", b"\x1f\x8b", b"\xff\xfe", b"\n", b"\0"),
]


@given(
    st.sampled_from([SITEMAP, ATOM, RSS, PLAIN, ""]),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(WORDS) | st.binary(max_size=5))),
    st.booleans(),
)
def test_no_sitemap_makes_its_reader_raise(
    text: str, edits: list[tuple[int, bytes]], packed: bool
) -> None:
    body = text.encode()
    for at, octets in edits:
        body = body[:at] + octets + body[at + len(octets) :]
    found, codes = read(gzip.compress(body) if packed else body)
    assert len(codes) == len(set(codes))
    assert all(url.startswith("http") for url in found)


# --- dates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("2026", "2026-01-01T00:00", "2027-01-01T12:00"),
        ("2026-12", "2026-12-01T00:00", "2027-01-01T12:00"),
        ("2026-02", "2026-02-01T00:00", "2026-03-01T12:00"),
        ("2026-11-28", "2026-11-28T00:00", "2026-11-29T12:00"),
        ("2026-11-28T10:05Z", "2026-11-28T10:05", "2026-11-28T10:06"),
        ("2026-11-28T10:05+02:00", "2026-11-28T08:05", "2026-11-28T08:06"),
        ("2026-11-28T10:05:07-0330", "2026-11-28T13:35:07", "2026-11-28T13:35:07"),
        ("2026-11-28T10:05:07.5Z", "2026-11-28T10:05:07.5", "2026-11-28T10:05:07.5"),
        ("2026-11-28T23:59:60Z", "2026-11-28T23:59:59", "2026-11-28T23:59:59"),
        (
            "2026-11-28t10:05:07.123456789z",
            "2026-11-28T10:05:07.123456",
            "2026-11-28T10:05:07.123456",
        ),
        ("2026-11-28 10:05:07", "2026-11-28T10:05:07", "2026-11-28T22:05:07"),
        ("Sat, 28 Nov 2026 10:05:07 +0100", "2026-11-28T09:05:07", "2026-11-28T09:05:07"),
        ("28 Nov 2026 10:05:07 -0000", "2026-11-28T10:05:07", "2026-11-28T10:05:07"),
    ],
)
def test_a_date_means_a_span_of_time(text: str, start: str, end: str) -> None:
    found = parse_modified(text)
    assert found is not None
    assert found.start == datetime.fromisoformat(start).replace(tzinfo=UTC)
    assert found.end == datetime.fromisoformat(end).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        *("yesterday", "2026-13-01", "2026-02-30", "0000-01-01", "2026-11-28T25:00Z", "28.11.2026"),
        *("9999-12-31", "9999", "0001-01-01T00:00+14:00", "2026-11-28T10:05:07+99:99", "26-11-28"),
        *("\u0662\u0660\u0662\u0666", "2026-11-28Tnoon", "1" * 5_000, "9" * 40, "Mon, " * 12),
        "Fri, 31 Dec 9999 23:59:59 -1200",
    ],
)
def test_text_that_is_no_date_is_none(text: str) -> None:
    assert parse_modified(text) is None


def test_an_invalid_date_costs_no_entry() -> None:
    assert read(urlset(ONE, lastmod="soon")) == ([ONE], ["invalid-lastmod"])


# --- from file to file ----------------------------------------------------------------------


Run = Callable[..., Any]


class Walked:
    """What a call gave."""

    def __init__(self, entries: list[SitemapEntry], found: Sitemaps) -> None:
        self.entries = entries
        self.urls = [entry.url for entry in entries]
        self.codes = [finding.code for finding in found.findings]
        self.findings = found.findings
        self.complete = found.complete


async def walk(net: FakeInternet, origin: str, *, pacing: Any = None, **given: Any) -> Walked:
    """The entries of an origin, on the clock of the internet."""

    async def run() -> Walked:
        async with gate_on(net, settings(pacing=pacing or QUICK), agent=AGENT) as gate:
            found = gate.sitemaps(origin, **given)
            return Walked([entry async for entry in found], found)

    return await net.drive(run())


def listing(net: FakeInternet, name: str, *paths: str) -> Site:
    lines = "".join(f"Sitemap: http://{name}{path}\n" for path in paths)
    return net.site(name).robots(f"User-agent: *\nDisallow: /private\n{lines}")


async def test_entries_come_in_order_with_their_source(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/index.xml", "/list.txt")
    site.page("/index.xml", index("http://a.test/1.xml", "/2.xml.gz"))
    site.page("/1.xml", urlset("http://a.test/p1", "http://a.test/p2", lastmod="2026-11-01"))
    site.page("/2.xml.gz", gzip.compress(ATOM.encode()))
    site.page("/list.txt", "http://a.test/p3")
    found = await walk(net, "http://a.test/any/page")
    assert found.urls == ["http://a.test/p1", "http://a.test/p2", ONE, TWO, "http://a.test/p3"]
    assert found.entries[0] == SitemapEntry(
        "http://a.test/p1", datetime(2026, 11, 1, tzinfo=UTC), "http://a.test/1.xml"
    )
    assert [entry.source.rpartition("/")[2] for entry in found.entries[2:]] == [
        *("2.xml.gz", "2.xml.gz", "list.txt"),
    ]
    assert found.complete
    assert not found.findings
    assert site.paths == ["/robots.txt", "/index.xml", "/1.xml", "/2.xml.gz", "/list.txt"]
    assert {request.headers["User-Agent"] for request in site.requests} == {AGENT}


async def test_each_sitemap_file_takes_a_lease_of_its_host(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/1.txt", "/2.txt", "/3.txt")
    site.otherwise(Page("http://a.test/p"))
    assert len((await walk(net, "http://a.test", pacing={"default_interval": 5.0})).urls) == 3
    assert min(site.gaps()) >= 5.0


async def test_files_that_are_denied_are_not_requested(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/private/1.xml", "/2.xml", "/moved.xml")
    site.page("/2.xml", urlset("http://a.test/p", "http://a.test/private/q"))
    site.redirect("/moved.xml", "/private/3.xml")
    found = await walk(net, "http://a.test")
    assert found.urls == ["http://a.test/p", "http://a.test/private/q"]
    assert found.codes == ["denied", "denied"]
    assert not found.complete
    assert not [path for path in site.paths if path.startswith("/private")]


async def test_another_origins_file_is_fetched_by_that_origins_rules(net: FakeInternet) -> None:
    site = net.site("a.test").robots(
        "Sitemap: http://b.test/s.xml\nSitemap: http://b.test/private/s.xml\n"
        "Sitemap: http://c.test/s.xml\nSitemap: http://a.test/moved.xml\n"
    )
    site.redirect("/moved.xml", "http://b.test/private/t.xml")
    other = listing(net, "b.test").page("/s.xml", urlset("http://a.test/p"))
    net.site("c.test").robots(Page("", status=503))
    found = await walk(net, "http://a.test")
    assert found.urls == ["http://a.test/p"]
    assert found.codes == ["denied", "deferred", "denied"]
    assert found.findings[1].retry_at is not None
    assert other.paths == ["/robots.txt", "/s.xml"]


async def test_no_file_leads_to_a_private_address(net: FakeInternet) -> None:
    site = net.site("a.test").robots(
        "Sitemap: http://10.0.0.1/s.xml\nSitemap: http://a.test/1.xml\nSitemap: http://a.test/2.xml\n"
        "Sitemap: http://a.test/3.xml\n"
    )
    net.dns("inside.example", "10.0.0.1")
    site.redirect("/1.xml", "http://169.254.169.254/latest/meta-data/")
    site.redirect("/2.xml", "http://inside.example/")
    site.redirect("/3.xml", "http://u:p@a.test/4.xml")
    found = await walk(net, "http://a.test")
    assert not found.urls
    assert found.codes == ["denied"] * 4
    assert not net.dialled("10.0.0.1")
    assert "/4.xml" not in site.paths


async def test_sitemap_xml_is_only_guessed_on_demand(net: FakeInternet) -> None:
    site = net.site("a.test").page("/sitemap.xml", urlset("http://a.test/p"))
    found = await walk(net, "http://a.test")
    assert (found.urls, found.codes, found.complete) == ([], ["no-sitemap"], True)
    assert "/sitemap.xml" not in site.paths
    assert (await walk(net, "http://a.test", guess=True)).urls == ["http://a.test/p"]
    net.site("b.test")
    found = await walk(net, "http://b.test", guess=True)
    assert (found.urls, found.codes, found.complete) == ([], ["no-sitemap"], True)


async def test_a_named_file_is_not_guessed_again(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/sitemap.xml", "/sitemap.xml").page("/sitemap.xml", urlset(ONE))
    assert (await walk(net, "http://a.test", guess=True)).urls == [ONE]
    assert site.paths == ["/robots.txt", "/sitemap.xml"]


async def test_an_origin_whose_rules_are_not_known_is_deferred(net: FakeInternet) -> None:
    net.site("a.test").robots(Page("", status=503))
    with pytest.raises(Deferred) as caught:
        await walk(net, "http://a.test", guess=True)
    assert caught.value.retry_at is not None
    with pytest.raises(Denied):
        await walk(net, "http://10.0.0.1", guess=True)


async def test_only_what_changed_since_is_fetched_and_given(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/index.xml")
    site.page(
        "/index.xml",
        index("/old.xml", lastmod="2026-10-01").replace("</sitemapindex>", "")
        + "<sitemap><loc>/new.xml</loc><lastmod>2026-11-20</lastmod></sitemap>"
        "<sitemap><loc>/undated.xml</loc></sitemap></sitemapindex>",
    )
    site.page("/new.xml", urlset(ONE, lastmod="2026-11-19") + "\n")
    site.page(
        "/undated.xml",
        urlset(ONE, lastmod="2026-11-18").replace("</urlset>", "")
        + f"<url><loc>{ONE}?undated</loc></url></urlset>",
    )
    for since in (
        date(2026, 11, 20),
        datetime(2026, 11, 20, 1, tzinfo=timezone(timedelta(hours=1))),
    ):
        found = await walk(net, "http://a.test", since=since)
        # A day without a zone may end twelve hours after the UTC day.
        assert found.urls == [ONE, f"{ONE}?undated"]
    assert "/old.xml" not in site.paths
    assert (await walk(net, "http://a.test", since=date(2026, 11, 21))).urls == [f"{ONE}?undated"]


async def test_indexes_that_name_each_other_end(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/1.xml")
    site.page("/1.xml", index("/1.xml", "/2.xml", "/1.xml"))
    site.page("/2.xml", index("/1.xml", "/3.xml"))
    site.page("/3.xml", urlset(ONE))
    found = await walk(net, "http://a.test")
    assert (found.urls, found.codes) == ([ONE], [])
    assert sorted(site.paths) == ["/1.xml", "/2.xml", "/3.xml", "/robots.txt"]


async def test_an_index_on_the_third_level_is_not_followed(net: FakeInternet) -> None:
    def deeper(request: Request) -> Page:
        level = int(request.target.strip("/"))
        return Page(
            index(f"/{level + 1}").replace(
                "</sitemapindex>", f"<url><loc>{ONE}</loc></url></sitemapindex>"
            )
        )

    site = listing(net, "a.test", "/1").otherwise(Custom(choose=deeper))
    found = await walk(net, "http://a.test")
    assert (found.urls, found.codes) == ([ONE] * 3, ["too-deep"])
    assert site.paths[1:] == ["/1", "/2", "/3"]


async def test_endless_indexes_are_bounded(net: FakeInternet, monkeypatch: Any) -> None:
    monkeypatch.setattr("gatekeeper.sitemaps.MAX_FILES", 100)
    count = iter(range(10**9))

    def more(_: Request) -> Page:
        return Page(index(*(f"/{next(count)}" for _ in range(50))))

    site = listing(net, "a.test", "/start").otherwise(Custom(choose=more))
    found = await walk(net, "http://a.test")
    assert not found.urls
    assert "too-many-files" in found.codes
    assert len(site.paths) == 1 + 100


async def test_long_names_of_files_are_bounded(net: FakeInternet, monkeypatch: Any) -> None:
    monkeypatch.setattr("gatekeeper.sitemaps.MAX_NAMED", 10_000)
    site = listing(net, "a.test", "/index.xml").otherwise(Page(urlset(ONE)))
    site.page("/index.xml", index(*(f"/{number:01000}" for number in range(50))))
    found = await walk(net, "http://a.test")
    assert 0 < len(found.urls) < 10
    assert found.codes == ["too-many-files"]


def test_the_bounds_on_sitemaps_are_those_of_the_protocol() -> None:
    assert (MAX_ENTRIES, MAX_FILES, MAX_OCTETS) == (50_000, 50_000, 50 * MIB)


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_no_more_entries_are_given_than_asked_for(net: FakeInternet, most: int) -> None:
    site = listing(net, "a.test", "/1.txt", "/2.txt", "/3.txt")
    site.otherwise(Page(f"{ONE}\n{ONE}\n"))
    found = await walk(net, "http://a.test", max_entries=most)
    assert found.urls == [ONE] * most
    assert len(site.paths) == 1 + -(-most // 2)


async def test_a_failure_of_one_file_costs_no_other(net: FakeInternet) -> None:
    body = urlset(ONE, ONE).encode()
    acts: dict[str, Any] = {
        "/missing": Page("", 404),
        "/error": Page("", 500),
        "/loop": Custom(choose=lambda _: Page("", 302, [("Location", "/loop")])),
        "/cut": Truncated(body[:-30]),
        "/stalls": Stall(body[:-30]),
        "/coded": Encoded(body, damage="flipped"),
        "/unknown": Page(body, headers=[("Content-Encoding", "br")]),
        "/drips": Drip(body, size=1, every=20.0),
        "/html": Page("<!DOCTYPE html><html></html>"),
        "/good": Page(body),
    }
    site = listing(net, "a.test", *acts)
    for path, act in acts.items():
        site.on(path, act)
    net.refusing("down.test")
    site.robots(
        "".join(f"Sitemap: http://a.test{path}\n" for path in acts) + "Sitemap: http://down.test/\n"
    )
    before = net.clock.monotonic()
    found = await walk(net, "http://a.test")
    codes = {finding.source.rpartition("/")[2]: finding.code for finding in found.findings}
    assert codes["missing"] == codes["error"] == codes["loop"] == "not-fetched"
    assert codes["cut"] == codes["stalls"] == codes["drips"] == "incomplete"
    assert codes["coded"] in {"incomplete", "not-fetched"}
    assert codes["html"] == "not-a-sitemap"
    assert codes[""] in {"deferred", "not-fetched"}
    assert "good" not in codes
    sources = [entry.source.rpartition("/")[2] for entry in found.entries]
    assert sources.count("good") == 2
    assert sources.count("cut") == sources.count("stalls") == 1  # what came before
    assert net.clock.monotonic() - before < 2_000


async def test_bombs_are_read_to_the_bound(net: FakeInternet, monkeypatch: Any) -> None:
    monkeypatch.setattr("gatekeeper.sitemaps.MAX_OCTETS", 3 * MIB)
    listing(net, "a.test", "/bomb", "/good").on(
        "/bomb", Bomb(size=2**24, filler=b" " * 65_536)
    ).page("/good", urlset(ONE))
    found = await walk(net, "http://a.test")
    assert (found.urls, found.codes) == ([ONE], ["too-large"])


async def test_no_lease_is_held_between_entries(net: FakeInternet) -> None:
    """Its taker can fetch the pages as they come, from the same host, with one slot a host."""
    site = listing(net, "a.test", "/1.txt", "/2.txt").otherwise(
        Page("http://a.test/p\nhttp://a.test/q\n")
    )

    async def run() -> None:
        async with gate_on(net, settings(), agent=AGENT) as gate:
            async for entry in gate.sitemaps("http://a.test"):
                async with gate.lease(entry.url, timeout=60) as lease:
                    lease.report(status=200)
                assert gate.stats().pacing.in_flight == 0
                assert site.in_flight == 0

    await net.drive(run())


async def test_an_abandoned_call_leaves_nothing_behind(net: FakeInternet) -> None:
    site = listing(net, "a.test", "/1.txt", "/2.txt").otherwise(Page(f"{ONE}\n{ONE}\n"))

    async def run() -> None:
        async with gate_on(net, settings(), agent=AGENT) as gate:
            found = gate.sitemaps("http://a.test")
            assert (await anext(found)).url == ONE
            await found.aclose()
            await found.aclose()
            assert [entry async for entry in found] == []
            assert net.clock.next_timer() is None or gate.ready  # type: ignore[attr-defined]
        assert site.paths == ["/robots.txt", "/1.txt"]

    await net.drive(run())


async def test_a_task_that_holds_the_host_gets_lease_timeout(net: FakeInternet) -> None:
    listing(net, "a.test", "/1.txt").page("/1.txt", ONE)

    async def run() -> None:
        async with gate_on(net, settings(), agent=AGENT) as gate, gate.lease("http://a.test/"):
            with pytest.raises(LeaseTimeout):
                await anext(gate.sitemaps("http://a.test"))

    await net.drive(run())


async def test_wrong_arguments_of_sitemaps_are_named(net: FakeInternet) -> None:
    gate = gate_on(net, settings(), agent=AGENT)
    for wrong in ({"since": datetime(2026, 1, 1)}, {"since": "2026"}, {"max_entries": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            gate.sitemaps("http://a.test", **wrong)
    with pytest.raises(InvalidURL):
        gate.sitemaps("a.test")
    with pytest.raises(GateClosed):
        await anext(gate.sitemaps("http://a.test"))


@pytest.fixture
async def own_session(internet: FakeInternet) -> AsyncIterator[aiohttp.ClientSession]:
    async with internet.session(headers={"User-Agent": "other/1.0"}) as session:
        yield session


async def test_a_gate_with_the_callers_session_uses_that(
    internet: FakeInternet, own_session: aiohttp.ClientSession
) -> None:
    site = listing(internet, "a.test", "/1.txt", "/private/2.txt").page("/1.txt", ONE)
    async with Gatekeeper(AGENT, config=settings(), session=own_session) as gate:
        found = gate.sitemaps("http://a.test")
        assert [entry.url async for entry in found] == [ONE]
        assert [finding.code for finding in found.findings] == ["denied"]
    assert site.requests[-1].headers["User-Agent"] == AGENT
    await asyncio.sleep(0)
