"""`compose`: one file from several texts; `diff`: the verdicts that change between two."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gatekeeper.errors import InvalidURL
from gatekeeper.robots import Composed, Fragment, RobotsTxt, compose, diff
from gatekeeper.sites import composition, witness
from gatekeeper.sites.composition import named_agents
from tests.effort import processor_time

GROUP = "User-agent: *\n"


def made(*bodies: str) -> Composed:
    return compose(Fragment(f"{i}.txt", body) for i, body in enumerate(bodies))


def text_of(*bodies: str) -> str:
    composed = made(*bodies)
    assert composed.problems == ()
    assert composed.text is not None
    return composed.text


def codes(*bodies: str) -> list[str]:
    composed = made(*bodies)
    assert composed.text is None
    return [problem.code for problem in composed.problems]


def test_a_named_agent_keeps_the_star_rules_of_fragments_that_do_not_name_it() -> None:
    text = text_of(
        "User-agent: *\nDisallow: /shop/cart\n",
        "User-agent: ExampleBot\nDisallow: /blog/drafts\n\nUser-agent: *\nDisallow: /blog/x\n",
    )
    robots = RobotsTxt.parse(text)
    named, others = robots.policy("ExampleBot"), robots.policy("other")
    assert [named.allowed(p) for p in ("/shop/cart", "/blog/drafts", "/blog/x")] == [
        *(False, False, True)
    ]
    assert [others.allowed(p) for p in ("/shop/cart", "/blog/drafts", "/blog/x")] == [
        *(False, True, False)
    ]


def test_each_agent_has_one_group() -> None:
    text = text_of(
        "User-agent: A\nDisallow: /1\n\nUser-agent: b\nDisallow: /2\n\nUser-agent: a\nDisallow: /3",
        "User-agent: a\nUser-agent: B\nDisallow: /4\n",
    )
    agents = [agent for group in RobotsTxt.parse(text).groups for agent in group.agents]
    assert agents == ["A", "b"]


def test_agents_with_the_same_rules_share_a_group() -> None:
    text = text_of("User-agent: a\nUser-agent: b\nUser-agent: c\nDisallow: /1\n")
    assert [group.agents for group in RobotsTxt.parse(text).groups] == [("a", "b", "c")]


def test_an_agent_that_is_allowed_everything_does_not_fall_into_another_group() -> None:
    text = text_of(
        "User-agent: welcome\nDisallow:\n\nUser-agent: silent\nCrawl-delay: 3\n\n"
        "User-agent: *\nDisallow: /\n"
    )
    robots = RobotsTxt.parse(text)
    assert [robots.policy(name).allowed("/x") for name in ("welcome", "other")] == [True, False]
    # Before composing, the line behind `silent` belongs to it and to `*` both (RFC-02).
    assert robots.policy("silent").crawl_delay == 3


def test_the_order_of_fragments_is_the_order_of_their_lines_and_all_is_deterministic() -> None:
    one, other = "User-agent: *\nDisallow: /b\nDisallow: /a\n", "User-agent: *\nDisallow: /c\n"
    assert text_of(one, other) == text_of(one, other)
    lines = [line for line in text_of(one, other).splitlines() if line.startswith("Disallow")]
    assert lines == ["Disallow: /b", "Disallow: /a", "Disallow: /c"]


def test_comments_stay_with_their_lines_and_say_their_source() -> None:
    text = text_of(
        "# Ask shop@example.org.\n\n# For all.\nUser-agent: * # everybody\n"
        "# The cart is private.\nDisallow: /cart # since 2019\n\nUser-agent: b\nDisallow: /b\n",
        "User-agent: *\nDisallow: /x\n# The end.\n",
    )
    assert text.splitlines() == [
        "# Composed of:",
        "#   0.txt",
        "#   1.txt",
        "#",
        "# 0.txt",
        "# Ask shop@example.org.",
        "#",
        "# 1.txt",
        "# The end.",
        "",
        "# 0.txt",
        "# For all.",
        "# everybody",
        "User-agent: *",
        "# 0.txt",
        "# The cart is private.",
        "Disallow: /cart  # since 2019",
        "# 1.txt",
        "Disallow: /x",
        "",
        "User-agent: b",
        "# 0.txt",
        "Disallow: /b",
        "# 1.txt",
        "Disallow: /x",
    ]


def test_the_name_of_a_fragment_adds_no_rule() -> None:
    composed = compose([Fragment("a\nDisallow: /evil\n", "User-agent: *\nDisallow: /a\n")])
    assert composed.text is not None
    assert RobotsTxt.parse(composed.text).policy("bot").allowed("/evil")


def test_records_other_than_rules_are_kept() -> None:
    text = text_of(
        "X-Note: outside\nUser-agent: *\nCrawl-delay: 2\nNoindex: /n\nSitemap: https://a.test/1\n",
        "Sitemap: https://a.test/1\nSitemap: https://a.test/2\nHost: a.test\n"
        "Clean-param: ref /\nLicense: https://a.test/l\n"
        "User-agent: *\nContent-Signal: ai-train=no\nContent-Usage: train-ai=n\n"
        "Request-rate: 1/10\nVisit-time: 0100-0200\nComment: hello\n",
    )
    robots = RobotsTxt.parse(text)
    policy = robots.policy("bot")
    assert robots.sitemaps == ("https://a.test/1", "https://a.test/2")
    assert (robots.hosts, robots.licenses) == (("a.test",), ("https://a.test/l",))
    assert len(robots.clean_params) == 1
    assert policy.crawl_delay == 2
    assert policy.content_signal == {"ai-train": "no"}
    assert policy.content_usage("/x") == {"train-ai": "n"}
    assert len(policy.request_rates) == len(policy.visit_times) == len(policy.comments) == 1
    assert [rule.field for rule in robots.extensions] == ["X-Note", "Noindex"]


def test_text_that_is_not_ascii_is_written_unchanged() -> None:
    head = "# compose: owner=M\u00fcller prefix=/\u00f6\n"
    fragments = [
        Fragment("\u0444.txt", head + "User-agent: a\nDisallow: /\u00f6 # \u00e9\n"),
        Fragment("b\ud800", b"User-agent: a\nDisallow: /b\xff\n"),
    ]
    text = compose(fragments).text
    assert text is not None
    assert "#   \u0444.txt (owner M\u00fcller, prefix /%C3%B6)\n#   b?\n" in text
    assert "# \u0444.txt\nDisallow: /\u00f6  # \u00e9\n# b?\nDisallow: /b%FF\n" in text


@pytest.mark.parametrize("name", ["\u00e4", b"b\xff", b"\xff"])
def test_a_user_agent_line_that_is_not_ascii_is_a_problem(name: str | bytes) -> None:
    line = f"User-agent: {name}" if isinstance(name, str) else b"User-agent: " + name
    (problem,) = compose([Fragment("a.txt", line)]).problems
    assert problem.code == "agents"
    assert problem.places[0].line == 1
    assert "ASCII" in problem.message


@given(st.lists(st.text() | st.binary(), max_size=3))
def test_no_text_makes_compose_raise(texts: list[str | bytes]) -> None:
    lines: list[str | bytes] = []
    for text in texts:
        head = "User-agent: " if isinstance(text, str) else b"User-agent: "
        lines += [text, head + text]  # type: ignore[operator]
    compose(Fragment(str(place), text) for place, text in enumerate(lines))


def test_a_fragment_with_a_rule_outside_its_prefix_is_named_with_a_url() -> None:
    composed = made("# compose: owner=shop prefix=/shop/\nUser-agent: *\nDisallow: /shop\n")
    (problem,) = composed.problems
    assert (problem.code, problem.url, problem.places[0].line) == ("outside", "/shop", 3)
    assert "0.txt:3 (Disallow: /shop)" in problem.message


@pytest.mark.parametrize(
    "line",
    ["Disallow: /*.pdf$", "Allow: /", "Disallow: *", "Content-Usage: /blog/ train-ai=n"],
)
def test_a_rule_that_matches_outside_its_prefix_is_refused(line: str) -> None:
    assert codes(f"# compose: prefix=/shop/\nUser-agent: *\nDisallow: /shop/a\n{line}\n") == [
        "outside"
    ]


@pytest.mark.parametrize(
    "line",
    [
        *("Disallow: /shop/*.pdf$", "Disallow: /sh%6Fp/", "Disallow:", "Disallow: nonsense"),
        *("Content-Usage: /shop/x train-ai=n", "Crawl-delay: 3", "Disallow: /shop/?a"),
    ],
)
def test_a_rule_that_stays_within_its_prefix_is_accepted(line: str) -> None:
    text_of(f"# compose: prefix=/shop/\nUser-agent: *\nDisallow: /shop/a\n{line}\n")


def test_lines_that_decide_one_url_differently_are_named_with_it() -> None:
    composed = made(
        "User-agent: *\nDisallow: /*.pdf$\n", "User-agent: *\nDisallow: /x\nAllow: /public/\n"
    )
    (problem,) = composed.problems
    assert problem.code == "conflict"
    assert [(place.name, place.line) for place in problem.places] == [("0.txt", 2), ("1.txt", 3)]
    assert problem.url == "/public/.pdf"
    assert problem.url in problem.message


def test_a_conflict_for_one_agent_alone_says_for_whom() -> None:
    composed = made(
        "User-agent: *\nDisallow: /x\n",
        "User-agent: *\nDisallow: /x\n\nUser-agent: Friend\nAllow: /x\n",
    )
    (problem,) = composed.problems
    assert (problem.code, problem.agent) == ("conflict", "friend")


def test_rules_that_never_decide_are_no_conflict() -> None:
    # Allow: /x of the second never decides: /x* of the same fragment does.
    text_of("User-agent: *\nDisallow: /x\n", "User-agent: *\nAllow: /x\nDisallow: /x*\n")


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("# compose: prefix=shop", "header"),
        ("# compose: prefix=/shop/*", "header"),
        ("# compose: prefix=/shop$", "header"),
        ("# compose: prefixes=/shop/", "header"),
        ("# compose:", "header"),
        ("# compose: owner=a\n# compose: owner=b", "header"),
        ("User-agent: x\nDisallow: /\n# compose: prefix=/", "header"),
        ("User-agent: x\nRobot-version: 2.0\nDisallow: /", "version"),
    ],
)
def test_input_that_can_not_be_composed_is_refused(header: str, wanted: str) -> None:
    assert wanted in codes(header + "\nUser-agent: *\nDisallow: /shop/a\n")


def test_a_fragment_beyond_the_limit_and_a_file_beyond_it_are_refused() -> None:
    long = "User-agent: *\n" + "\n".join(f"Disallow: /a/{i:090}" for i in range(5_200))
    assert codes(long) == ["truncated"]
    half = [
        "User-agent: *\n" + "\n".join(f"Disallow: /{p}/{i:090}" for i in range(2_600)) for p in "ab"
    ]
    assert codes(*half) == ["size"]


def test_a_name_that_another_agent_reads_as_its_own_is_refused() -> None:
    # `bot2` is read by robots called `bot`, too, who have other rules in the second fragment.
    shared = "User-agent: bot\nDisallow: /b\n\nUser-agent: *\nDisallow: /c\n"
    assert codes("User-agent: bot2\nDisallow: /a\n", shared) == ["agents"]
    text_of("User-agent: bot2\nDisallow: /a\n", "User-agent: bot\nDisallow: /b\n")
    text_of("User-agent: MJ12bot\nDisallow: /a\n", "User-agent: *\nDisallow: /b\n")


def test_the_number_of_problems_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "MAX_PROBLEMS", 5)
    rules = "\n".join(f"Disallow: /{i}" for i in range(50))
    found = codes(f"# compose: prefix=/x/\nUser-agent: *\n{rules}\n")
    assert found == ["outside"] * 5 + ["too-many"]


def test_octets_that_are_no_utf8_keep_their_meaning() -> None:
    composed = compose([Fragment("a", b"User-agent: *\nDisallow: /caf\xe9\nDisallow: /\xc3\xa4\n")])
    assert composed.text is not None
    policy = RobotsTxt.parse(composed.text).policy("bot")
    assert not policy.allowed("/caf%E9")
    assert not policy.allowed("/%C3%A4")


def test_a_conflict_search_that_exceeds_its_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(witness, "MAX_STEPS", 500)
    bodies = [
        "User-agent: *\n" + "".join(f"{f}: /*{i}*{i}\n" for i in range(2_000))
        for f in ("Allow", "Disallow")
    ]
    composed = made(*bodies)
    assert composed.text is None
    assert [problem.code for problem in composed.problems][-1] == "undecided"
    assert len(composed.problems) < 50
    assert composed.problems[-1].message.endswith("; the lines after these were not compared")
    found = diff(*map(RobotsTxt.parse, bodies))
    assert not found.complete
    assert len(found.changes) < 50
    assert found.unsearched
    assert found.stopped
    assert all(before or after for before, after in found.unsearched)


def test_a_fragment_that_meets_hundreds_of_patterns_is_compared_in_a_moment() -> None:
    """Each pair was searched for among all patterns of the file: 12 to 27 seconds."""
    wild = "".join(f"Disallow: /*{mark}p{i}=*\n" for i in range(110) for mark in "?&")
    bodies = [GROUP + wild, GROUP + "Disallow: /zz\nAllow: /zz/y\n"]
    assert codes(*bodies) == ["conflict"] * 100 + ["too-many"]
    assert processor_time(lambda: made(*bodies), 1.0) < 1.0
    assert processor_time(lambda: diff(*map(RobotsTxt.parse, bodies)), 1.0) < 1.0


@pytest.mark.parametrize("rule", ["", "Disallow: /x{}\n"], ids=["one group", "a group each"])
def test_a_file_that_names_thousands_of_robots_is_compared_in_a_second(rule: str) -> None:
    """The text was read again for each robot: minutes."""
    names = ["".join(letters) for letters in itertools.product("abcdefghijklmno", repeat=3)][:2_000]
    groups = "".join(f"User-agent: {name}bot\n{rule.format(name)}" for name in names)
    bodies = [groups + "Disallow: /y\n", "User-agent: *\nDisallow: /zz\n"]
    assert text_of(*bodies).count("User-agent: ") == 2_001
    assert processor_time(lambda: made(*bodies), 1.0) < 1.0
    assert processor_time(lambda: diff(*map(RobotsTxt.parse, bodies)), 1.0) < 1.0


@pytest.mark.parametrize(
    ("one", "other", "url"),
    [
        ("Disallow: /*?id=", "Allow: /shop/*.php", "/shop/?id=.php"),
        ("Disallow: /*?id=", "Allow: /shop/*.php$", "/shop/?id=.php"),
        ("Disallow: /*.php?id=$", "Allow: /shop/*/x", "/shop//x.php?id="),
        ("Disallow: /*.tar.gz$", "Allow: /a*.gz$", "/a.tar.gz"),
        # Behind `/img/` another line of the file decides whatever matches both.
        ("Disallow: /img/\nAllow: /img/*.gif", "Allow: /*.gif", None),
        ("Disallow: /img/*?a\nAllow: /img/*?a*", "Allow: /*?a", None),
        ("Disallow: *find", "Allow: /i/*.css?\nDisallow: /*.css" + "*" * 9, None),
        ("Disallow: /*.html$", "Allow: /a/*.gif$", None),
    ],
)
def test_a_url_shared_by_two_simple_patterns_is_found_without_a_search(
    one: str, other: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "MAX_SEARCH", 0)
    composed = made(GROUP + one, GROUP + other)
    assert [problem.url for problem in composed.problems][:1] == ([url] if url else [])


@pytest.mark.parametrize(
    ("one", "other", "url"),
    [
        ("Disallow: /*ab$\nAllow: /a*ab\n", "Allow: /a\n", "/ab"),
        ("Disallow: */a\nAllow: /*/\n", "Allow: /*\n", "/a"),
    ],
)
def test_a_line_that_covers_another_only_after_their_beginning_hides_no_conflict(
    one: str, other: str, url: str
) -> None:
    assert [problem.url for problem in made(GROUP + one, GROUP + other).problems] == [url]


def test_conflicts_that_need_no_search_are_found_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hard = "Disallow: /*a*b\nAllow: /*ab***\nAllow: /*axb***\nAllow: /*b***a\n"
    bodies = [GROUP + hard + "Disallow: /easy\n", GROUP + "Allow: /*a\nAllow: /easy\n"]
    monkeypatch.setattr(witness, "MAX_SEARCH", 0)
    first, *others = made(*bodies).problems
    assert (first.code, first.url) == ("conflict", "/easy")
    assert {problem.code for problem in others} == {"undecided"}
    assert [place.line for place in others[0].places] == [2, 2]
    found = diff(*map(RobotsTxt.parse, bodies))
    assert "/easy" in {change.url for change in found.changes}
    assert not found.complete
    assert not found.stopped  # each of the others was tried
    lines = [tuple(rule and rule.line for rule in rules) for rules in found.unsearched]
    assert (2, 2) in lines


# --- the property ----------------------------------------------------------------------------

_NAMES = ["*", "a", "b", "Cee", "MJ12bot", "d/1.0"]
_TAIL = st.lists(st.sampled_from(["a", "b", "/", "*", "$", "?", "%2F"]), max_size=4).map("".join)


def fragments(prefix: str) -> st.SearchStrategy[str]:
    rule = st.tuples(st.sampled_from(["Allow", "Disallow"]), _TAIL).map(
        lambda each: f"{each[0]}: {prefix}{each[1]}"
    )
    group = st.tuples(
        st.lists(st.sampled_from(_NAMES), min_size=1, max_size=2, unique=True),
        st.lists(rule | st.just("Disallow:"), min_size=1, max_size=4),
    ).map(lambda each: "\n".join([*(f"User-agent: {name}" for name in each[0]), *each[1]]))
    return st.lists(group, max_size=4).map(
        lambda groups: f"# compose: prefix={prefix}\n" + "\n\n".join(groups) + "\n"
    )


_PATHS = ["".join(rest) for size in range(4) for rest in itertools.product("ab/?", repeat=size)]


@settings(deadline=None)
@given(st.tuples(fragments("/x/"), fragments("/y/"), fragments("/z")))
def test_inside_each_prefix_the_verdicts_are_those_of_its_fragment(
    bodies: tuple[str, str, str],
) -> None:
    composed = made(*bodies)
    assert composed.text is not None, composed.problems
    whole = RobotsTxt.parse(composed.text)
    for prefix, body in zip(["/x/", "/y/", "/z"], bodies, strict=True):
        part = RobotsTxt.parse(body)
        for name in ("a", "b", "cee", "mj12bot", "mj", "d", "other"):
            want, got = part.policy(name), whole.policy(name)
            for rest in _PATHS:
                assert got.allowed(prefix + rest) == want.allowed(prefix + rest), (name, rest)


@settings(deadline=None)
@given(st.tuples(fragments("/x/"), fragments("/")))
def test_without_conflicts_each_fragment_decides_the_urls_of_its_rules(
    bodies: tuple[str, str],
) -> None:
    composed = made(bodies[0], bodies[1].replace("# compose: prefix=/\n", ""))
    if composed.text is None:
        # A conflict is never told without a URL that shows it.
        for problem in composed.problems:
            assert problem.code == "conflict"
            assert problem.url is not None
            assert problem.agent is not None
            verdicts = {
                RobotsTxt.parse(b).policy(problem.agent).allowed(problem.url) for b in bodies
            }
            assert len(verdicts) == 2
        return
    whole = RobotsTxt.parse(composed.text)
    for name in ("a", "mj12bot", "other"):
        policies = [RobotsTxt.parse(body).policy(name) for body in bodies]
        for path in ("/" + prefix + rest for prefix in ("", "x/") for rest in _PATHS):
            said = {m.allowed for p in policies if (m := p.match(path)).rule}
            assert len(said) < 2
            assert whole.policy(name).allowed(path) == (False not in said)


@settings(deadline=None)
@given(st.tuples(fragments("/x/"), fragments("/y/")))
def test_composing_what_was_composed_changes_no_verdict(bodies: tuple[str, str]) -> None:
    text = text_of(*bodies)
    again = text_of(text)
    assert diff(RobotsTxt.parse(text), RobotsTxt.parse(again)).changes == ()


# --- diff ------------------------------------------------------------------------------------


def changes(old: str, new: str, **given: object) -> list[tuple[object, ...]]:
    found = diff(RobotsTxt.parse(old), RobotsTxt.parse(new), **given)  # type: ignore[arg-type]
    assert found.complete
    return [
        (*c.agents, c.url, *(each.rule.line if each.rule else 0 for each in (c.old, c.new)))
        for c in found.changes
    ]


def test_the_same_verdicts_are_no_change_however_they_are_written() -> None:
    old = "User-agent: *\nDisallow: /a\nDisallow: /a/b\nAllow: /c\n"
    assert changes(old, "# Hello\nUser-agent: *\nDisallow: /a\n") == []


def test_each_changed_pair_of_lines_has_one_example_url() -> None:
    old = "User-agent: *\nDisallow: /a\nAllow: /a/b\n"
    new = "User-agent: *\nAllow: /a\nDisallow: /c\n"
    assert changes(old, new) == [("*", "/a", 2, 2), ("*", "/c", 0, 3)]


def test_agents_that_read_the_same_lines_are_reported_together() -> None:
    old = "User-agent: a\nUser-agent: b\nDisallow: /\n\nUser-agent: c\nDisallow: /x\n"
    new = "User-agent: a\nUser-agent: b\nDisallow:\n\nUser-agent: c\nDisallow: /x\n"
    assert changes(old, new) == [("a", "b", "/", 3, 0)]


def test_an_agent_that_gets_a_group_of_its_own_loses_the_rules_for_all() -> None:
    old = "User-agent: *\nDisallow: /x\n"
    new = old + "\nUser-agent: a\nDisallow: /y\n"
    assert changes(old, new) == [("a", "/x", 2, 0), ("a", "/y", 0, 5)]
    assert changes(old, new, agents=["b"]) == []


def test_given_urls_are_judged_and_kept_as_they_are_written() -> None:
    url = "https://example.org/x?q=1"
    found = changes("User-agent: *\nDisallow: /x", "User-agent: *\nDisallow: /y", urls=[url])
    assert found[0] == ("*", url, 2, 0)
    with pytest.raises(InvalidURL):
        diff(RobotsTxt.parse(""), RobotsTxt.parse(""), urls=["ftp://example.org/"])


def test_a_comparison_in_another_dialect_is_not_called_complete() -> None:
    old = RobotsTxt.parse("User-agent: *\nRobot-version: 2.0\nDisallow: /a*\n")
    new = RobotsTxt.parse("User-agent: *\nDisallow: /b\n")
    found = diff(old, new)
    assert not found.complete
    assert {change.url for change in found.changes} >= {"/b"}
    assert diff(old, old).complete


def test_a_rule_that_is_repeated_is_searched_for_once() -> None:
    """Each repetition was compared with all others: half a minute, and an incomplete result."""
    old = RobotsTxt.parse("User-agent: *\n" + "Disallow: /x\n" * 20_000)
    found = diff(old, RobotsTxt.parse("User-agent: *\n" + "Disallow: /a\n"))
    assert found.complete
    assert [(change.url, change.old.allowed) for change in found.changes] == [
        ("/x", False), ("/a", True),
    ]  # fmt: skip


def test_the_number_of_changes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "MAX_CHANGES", 3)
    new = "User-agent: *\n" + "\n".join(f"Disallow: /{i}" for i in range(9))
    found = diff(RobotsTxt.parse(""), RobotsTxt.parse(new))
    assert len(found.changes) == 3
    assert not found.complete


_ANY = fragments("/") | fragments("/x")


@settings(deadline=None)
@given(_ANY, _ANY)
def test_every_changed_verdict_is_reported_by_its_pair_of_lines(old: str, new: str) -> None:
    found = diff(RobotsTxt.parse(old), RobotsTxt.parse(new))
    assume(found.complete)
    told = {
        (agent, c.old.rule and c.old.rule.line, c.new.rule and c.new.rule.line)
        for c in found.changes
        for agent in c.agents
    }
    for agent in {*named_agents(RobotsTxt.parse(old)), *named_agents(RobotsTxt.parse(new)), "*"}:
        before, after = (RobotsTxt.parse(text).policy(agent) for text in (old, new))
        for change in found.changes:
            if agent in change.agents:
                assert before.allowed(change.url) != after.allowed(change.url)
        for path in ("/" + rest for rest in _PATHS):
            one, other = before.match(path), after.match(path)
            if one.allowed != other.allowed:
                lines = one.rule and one.rule.line, other.rule and other.rule.line
                assert (agent, *lines) in told
