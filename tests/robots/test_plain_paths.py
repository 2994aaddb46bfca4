"""Both forms of a rule set answer about plain paths by one method."""

from __future__ import annotations

import pytest

from gatekeeper.robots import RobotsTxt
from gatekeeper.urls import ALWAYS_SENDABLE_LENGTH

TEXT = "User-agent: *\nDisallow: /a\nAllow: /a/b\nDisallow: /*.gif$\nDisallow: /robots\n"


@pytest.mark.parametrize("form", ["longest", "flat"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *(("/a", False), ("/a/b", True), ("/c", True), ("/x.gif", False), ("/x.gifs", True)),
        *(("/robots.txt", True), ("/robots%2Etxt", True), ("/robots.txt?", False)),
        *(("/%61", False), ("/.a", True), ("/a%20b", False)),
        *(("/a#b", None), ("/c/../a", None), ("/c/.", None), ("/%2e/a", None), ("/a b", None)),
        *(("/ä", None), ("/a\n", None), ("/a%", None), ("/[", None), ("/\ud800", None)),
        ("/" + "c" * ALWAYS_SENDABLE_LENGTH, None),
    ],
)
def test_only_a_plain_path_is_answered_by_plain_rules(
    form: str, path: str, expected: bool | None
) -> None:
    policy = RobotsTxt.parse(TEXT).policy("bot")
    rules = policy.plain if form == "longest" else policy.flat()
    assert rules is not None
    for _ in range(3):
        assert rules.allows_plain(path) is expected


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("User-agent: *\nRobot-version: 2.0\nDisallow: /a\n", {}),
        ("User-agent: *\nRobot-version: 2.0\nDisallow: /a\n", {"conflicts": "declared"}),
    ],
)
def test_a_file_with_rules_that_do_not_decide_alone_has_no_plain_rules(
    text: str, options: dict[str, str]
) -> None:
    assert RobotsTxt.parse(text).policy("bot", **options).plain is None
