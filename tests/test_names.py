"""Whatever an operator calls a host, it is the host that `urls` knows."""

from __future__ import annotations

import pytest

from gatekeeper import urls
from gatekeeper.config import Config, host_named, match_named
from gatekeeper.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a.test", "a.test"),
        ("A.Test", "a.test"),
        ("a.test.", "a.test"),
        ("a.test:8080", "a.test"),
        ("http://a.test/", "a.test"),
        ("https://A.TEST:8443/x?y#z", "a.test"),
        ("münchen.test", "xn--mnchen-3ya.test"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("http://[2001:db8::1]:8080/", "2001:db8::1"),
        ("::1", "::1"),
    ],
)
def test_every_spelling_of_a_host_has_one_normal_form(text: str, host: str) -> None:
    assert host_named(text) == host
    bracketed = f"[{host}]" if ":" in host else host
    assert urls.parse(f"http://{bracketed}/").host == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a..test",
        "a.test/",
        "a.test/x",
        "*",
        "*.a.test",
        "a b",
        "me@a.test",
        "1.2.3",
        "ftp://a/",
    ],
)
def test_text_that_is_no_host_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a host: .*; write it as") as caught:
        host_named(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("*", "*"),
        ("*.Example.ORG.", "*.example.org"),
        ("*.münchen.test", "*.xn--mnchen-3ya.test"),
        ("http://a.test/", "a.test"),
    ],
)
def test_the_normal_form_of_a_match_keeps_its_star(text: str, match: str) -> None:
    assert match_named(text) == match


@pytest.mark.parametrize("text", ["*.", "a.*", "*a.test", "*.*.test", "**"])
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        match_named(text)


def test_a_bad_match_is_refused_where_the_configuration_is_read() -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml: \[\[host\]\] match: 'a/b' is not a host"):
        Config.from_dict({"host": [{"match": "a/b"}]}, source="mine.toml")
