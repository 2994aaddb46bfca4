"""The file that reserves text and data mining."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.robots.tdmrep import TdmRule, match_tdmrep, parse_tdmrep

BODY = b"""[
  {"location": "/open/*", "tdm-reservation": 0},
  {"location": "/*.jpg$", "tdm-reservation": 1, "tdm-policy": "https://example.com/p.json"},
  {"location": "/open/x.html", "tdm-reservation": 1},
  {"location": "/odd", "tdm-reservation": true, "tdm-policy": "p.json"},
  {"tdm-reservation": 1}, 5
]"""


@pytest.mark.parametrize(
    ("path", "reserved", "policy"),
    [
        ("/open/x.html", False, None),
        ("/a.jpg", True, "https://example.com/p.json"),
        ("/odd", None, None),
    ],
)
def test_the_first_rule_that_matches_counts(
    path: str, reserved: bool | None, policy: str | None
) -> None:
    rule = match_tdmrep(parse_tdmrep(BODY), path)
    assert rule is not None
    assert (rule.reserved, rule.policy) == (reserved, policy)


@pytest.mark.parametrize("path", ["/", "/a.jpg?x", "/A.JPG"])
def test_a_path_without_a_rule_is_unset(path: str) -> None:
    assert match_tdmrep(parse_tdmrep(BODY), path) is None


@pytest.mark.parametrize("body", [b"", b"{}", b"5", b"[", b"<html>", b"\xff", b"[" * 100_000])
def test_another_file_has_no_rules(body: bytes) -> None:
    assert parse_tdmrep(body) == ()


def test_a_huge_file_is_not_read() -> None:
    assert parse_tdmrep(b" " * 600_000 + b"[]") == ()


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.text(max_size=20))
def test_no_file_raises(body: bytes, location: str) -> None:
    parse_tdmrep(body)
    match_tdmrep([TdmRule(location, None, None)], "/a")
