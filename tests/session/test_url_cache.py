"""The short road from text to the URL that is sent gives what yarl gives."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from gatekeeper.urls import UrlCache

AUTHORITIES = st.sampled_from(
    [
        "http://a.example",
        "https://a.example:8443",
        "http://a.example:80",
        "http://127.0.0.1:8080",
        "http://[::1]:8080",
        "HTTP://A.Example",
        "http://a.example.",
        "http://ann:secret@a.example",
        "http://bücher.example",
        "http://a.example?x=",
        "http://a.example\\b",
        "ftp://a.example",
        "http:/",
    ]
)
PIECES = st.text(
    alphabet=st.one_of(
        st.sampled_from("/.%?#&=+ ~:;,!$'()*@[]{}|\\^`\"<>ab0é\x00\n\t"),
        st.characters(codec="utf-8"),
    ),
    max_size=12,
)


def read(cache: UrlCache, text: str) -> URL | None:
    try:
        return cache.read(text)
    except ValueError:
        return None


def by_yarl(text: str) -> URL | None:
    try:
        return URL(text)
    except (ValueError, IndexError):
        return None


def seen(url: URL) -> tuple[object, ...]:
    """What aiohttp looks at."""
    return (
        str(url),
        url.scheme,
        url.raw_authority,
        url.raw_host,
        url.host_port_subcomponent,
        url.port,
        url.explicit_port,
        url.raw_user,
        url.raw_password,
        url.raw_path_qs,
        url.raw_fragment,
    )


@given(AUTHORITIES, PIECES)
@example("http://a.example", "/page/7.html")
@example("http://a.example", "/a/../b")
@example("http://a.example", "/.well-known/x")
@example("http://a.example", "//b.example/x")
@example("http://a.example", "/a|b")
@example("http://a.example", "")
@example("http://xn--", "/x")  # no host that can be decoded
@example("http://", "[]@/")  # IndexError in yarl
def test_the_cache_reads_urls_as_yarl_does(authority: str, rest: str) -> None:
    known, new = UrlCache(), UrlCache()
    read(known, authority + "/")  # the authority is known from now on
    text = authority + rest
    for cache in (known, new):
        found, expected = read(cache, text), by_yarl(text)
        assert found == expected
        if found is not None and expected is not None:
            assert seen(found) == seen(expected)
            assert found is not cache.last or cache.text == str(expected)


def test_the_first_url_of_an_authority_is_the_last_url_of_the_cache() -> None:
    cache = UrlCache()
    url = cache.read("http://a.example/x")
    assert cache.last is url
    assert (cache.text, cache.origin) == ("http://a.example/x", "http://a.example")
    assert cache.read("http://b.example/%41") is not cache.last


def test_the_cache_knows_text_and_origin_of_the_last_plain_url() -> None:
    cache = UrlCache()
    first, second = (cache.read(f"http://a.example/{name}") for name in "ab")
    assert cache.last is second
    assert (cache.text, cache.origin) == ("http://a.example/b", "http://a.example")
    for odd in ("http://a.example/%41", "http://a.example/a?b", "http://a.example/a/../b"):
        assert cache.read(odd) is not cache.last
    assert first is not second


def test_authorities_are_forgotten_before_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gatekeeper.urls.MAX_ROOTS", 10)
    cache = UrlCache()
    for number in range(95):
        assert cache.read(f"http://{number}.example/").host == f"{number}.example"
    assert len(cache._authorities) <= 10
