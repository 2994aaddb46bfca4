"""Which rule sets an agent obeys, and under what name."""

from __future__ import annotations

import pytest

from gatekeeper.robots import RobotsTxt, product_token


@pytest.mark.parametrize(
    ("user_agent", "token"),
    [
        ("ExampleBot", "ExampleBot"),
        ("ExampleBot/2.1", "ExampleBot"),
        ("MJ12bot/v1.4.8", "MJ12bot"),
        ("ia_archiver-web.archive.org", "ia_archiver-web.archive.org"),
        ("ExampleBot/2.1 (+https://example.com/bot) aiohttp/3.14", "ExampleBot"),
        ("Mozilla/5.0 (compatible; ExampleBot/2.1; +https://example.com/bot)", "ExampleBot"),
        ("Mozilla/5.0 (compatible; ExampleBot; +https://example.com/bot)", "ExampleBot"),
        (
            "Mozilla/5.0 (Linux; Android 6.0.1) AppleWebKit/537.36 (KHTML, like Gecko) "
            "Chrome/120.0 Mobile Safari/537.36 (compatible; ExampleBot/2.1; +https://e.com)",
            "ExampleBot",
        ),
        (
            "Mozilla/5.0 AppleWebKit/537.36 (KHTML, like Gecko; compatible; ExampleBot/1.2; +x)",
            "ExampleBot",
        ),
        ("Mozilla/5.0 (X11; Linux x86_64) ExampleBot/0.1", "ExampleBot"),
        ("Mozilla/5.0 (ExampleBot/0.1; +https://example.com)", "ExampleBot"),
        ("Mozilla/5.0", "Mozilla"),
        ("*", "*"),
        ("  ExampleBot  ", "ExampleBot"),
        ("", ""),
        ("(", ""),
        ("Mozilla/5.0 (compatible; ;", "Mozilla"),
    ],
)
def test_the_product_token_of_a_user_agent_is_found(user_agent: str, token: str) -> None:
    assert product_token(user_agent) == token


def obeys(text: str, agent: str, dialect: str = "rfc9309") -> bool:
    """Whether the agent is kept out of /x."""
    return not RobotsTxt.parse(text, dialect=dialect).policy(agent).allowed("/x")


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("ExampleBot", "examplebot"),
        ("EXAMPLEBOT/2.1", "ExampleBot"),
        ("ExampleBot 2.1", "ExampleBot"),
        ("ExampleBot*", "ExampleBot"),
        ("MJ12bot", "MJ12bot"),
        ("Example Bot", "Example"),
        ("*", "anybody"),
        ("* everybody", "anybody"),
        ("Spürhund", "Spürhund/1.0"),
        ("Паук", "Паук"),
    ],
)
def test_user_agent_line_is_read_leniently(line: str, agent: str) -> None:
    """RFC-11, RFC-15"""
    assert obeys(f"User-agent: {line}\nDisallow: /x\n", agent)


@pytest.mark.parametrize(
    ("line", "agent"),
    [("ExampleBot-News", "ExampleBot"), ("Example", "ExampleBot"), ("", "ExampleBot"), ("", "")],
)
def test_user_agent_line_is_no_part_of_a_name(line: str, agent: str) -> None:
    """RFC-11: whole tokens; an empty one is nobody's."""
    assert not obeys(f"User-agent: {line}\nDisallow: /x\n", agent)


def test_own_group_replaces_the_default_one() -> None:
    """RFC-09, RFC-13"""
    text = "User-agent: *\nDisallow: /x\n\nUser-agent: bot\n"
    assert not obeys(text, "bot")
    assert obeys(text, "other")


def test_unknown_records_between_user_agent_lines_close_no_group() -> None:
    """RFC-31"""
    text = (
        "User-agent: a\nCrawl-delay: 5\nContent-Signal: search=yes\nUser-agent: b\nDisallow: /x\n"
    )
    assert obeys(text, "a")


def test_empty_rule_closes_a_group() -> None:
    """RFC-02, RFC-21"""
    assert not obeys("User-agent: a\nDisallow:\nUser-agent: b\nDisallow: /x\n", "a")


def test_rule_named_in_a_comment_closes_no_group() -> None:
    text = "User-agent: a\n# Disallow: /\n#allow: /\nUser-agent: b\nDisallow: /x\n"
    assert obeys(text, "a")


@pytest.mark.parametrize("line", ["x user-agent: bot", "# user-agent: bot", "user-agents: bot"])
def test_user_agent_elsewhere_in_a_line_begins_no_group(line: str) -> None:
    assert obeys(f"User-agent: *\nDisallow: /x\n{line}\nDisallow: /y\n", "bot")


def test_hundred_names_share_one_group() -> None:
    text = "".join(f"User-agent: bot{n}\n" for n in range(100)) + "Disallow: /x\n"
    assert all(obeys(text, f"bot{n}") for n in range(100))
    assert not obeys(text, "bot100")


def test_groups_of_one_name_are_united() -> None:
    """RFC-12"""
    text = "User-agent: a\nDisallow: /x\nUser-agent: b\nDisallow: /y\nUser-agent: A\nAllow: /x/y\n"
    policy = RobotsTxt.parse(text).policy("a")
    assert not policy.allowed("/x")
    assert policy.match("/x/y").rule.line == 6
    assert policy.allowed("/y")
