"""Beside Protego, on generated files: where we differ, a rule says who is right.

Files are built from ordinary lines, on which the two must agree, and from *features*, each of
which Protego reads differently. A disagreement is accepted only if one of the features that
explain it was really put into the file or the URL; and every feature shows the difference it
stands for, so that the list can't go stale.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from protego import Protego

from gatekeeper.robots import RobotsTxt
from tests.effort import of_many

HOST = "https://example.com"


@dataclass(frozen=True)
class Difference:
    """A way in which Protego reads a file otherwise, and one file that shows it."""

    rule: str
    why: str
    robots_txt: str
    agent: str
    path: str
    ours: bool
    line: Callable[[random.Random], str] | None = None
    """Makes lines of this kind for a generated file."""
    segment: Callable[[random.Random], str] | None = None
    """Makes parts of a path of this kind, for rules and URLs alike."""


def _rules(*lines: str, agent: str = "*") -> str:
    return "\n".join([f"User-agent: {agent}", *lines, ""])


DIFFERENCES = {
    "escaped reserved octets": Difference(
        rule="RFC-23",
        why="only unreserved octets are decoded; Protego decodes all but %2F and %25",
        robots_txt=_rules("Disallow: /a%26b"),
        agent="alpha",
        path="/a&b",
        ours=True,
        segment=lambda rng: rng.choice(["%26", "&", "%3F", "%3D", "=", "%2C", ",", "%3b", ";"]),
    ),
    "slash and colon in a query": Difference(
        rule="RFC-25",
        why="Figure 4, row 2: behind `?` they equal their escapes",
        robots_txt=_rules("Disallow: /a?b=%2F"),
        agent="alpha",
        path="/a?b=/",
        ours=False,
        segment=lambda rng: rng.choice(["?b=%2F", "?b=/", "?b=:", "?b=%3a", "?b"]),
    ),
    "octets counted after quoting": Difference(
        rule="RFC-17",
        why="the pattern has the octets it is written with; Protego counts three for a `!`",
        robots_txt=_rules("Disallow: /a!!", "Allow: /*aaaa"),
        agent="alpha",
        path="/a!!/aaaa",
        ours=True,
        segment=lambda rng: rng.choice(["!", "@", "(", "+", "!!"]),
    ),
    "index.html": Difference(
        rule="VND-08",
        why="a habit of Google's library, not of the RFC",
        robots_txt=_rules("Allow: /a/index.html", "Disallow: /a"),
        agent="alpha",
        path="/a/",
        ours=False,
        line=lambda rng: f"Allow: /{rng.choice('abc')}/index.html",
    ),
    "a final dollar as a literal": Difference(
        rule="RFC-28",
        why="a final `$` is the end and nothing else",
        robots_txt=_rules("Disallow: /a$"),
        agent="alpha",
        path="/a$b",
        ours=True,
        segment=lambda rng: rng.choice(["$", "%24", "a$"]),
    ),
    "part of a token": Difference(
        rule="RFC-11",
        why="the whole token has to match; Protego takes a prefix of it",
        robots_txt=_rules("Disallow: /", agent="alph"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: f"User-agent: {rng.choice(['alph', 'al', 'a', 'bet'])}",
    ),
    "a star in a name": Difference(
        rule="RFC-15",
        why="a name is a token; Protego takes its stars away wherever they stand",
        robots_txt=_rules("Disallow: /", agent="al*pha"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: f"User-agent: {rng.choice(['al*pha', '*beta', 'be*ta'])}",
    ),
    "other records between user-agent lines": Difference(
        rule="RFC-31",
        why="an unknown record never ends the run of user-agent lines",
        robots_txt="User-agent: alpha\nCrawl-delay: 5\nUser-agent: beta\nDisallow: /\n",
        agent="alpha",
        path="/a",
        ours=False,
        line=lambda rng: rng.choice(["Crawl-delay: 5", "Unknown: x", "Comment: hello"]),
    ),
    "misspelt fields": Difference(
        rule="RFC-45",
        why="leniency is granted for other records only; we report them",
        robots_txt=_rules("Dissallow: /"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: (
            f"{rng.choice(['Dissallow', 'Disalow', 'Diasllow'])}: /{rng.choice('abc')}"
        ),
    ),
    "no colon": Difference(
        rule="VND-08",
        why="a line without a colon is no record",
        robots_txt=_rules("Disallow /"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: f"Disallow /{rng.choice('abc')}",
    ),
    "other line ends": Difference(
        rule="RFC-04",
        why="CR, LF and CRLF end a line, U+2028 and its kin do not",
        robots_txt=_rules("Disallow: /b\u2028Disallow: /a"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: f"Allow: /c\u2028Disallow: /{rng.choice('ab')}",
    ),
    "control octets": Difference(
        rule="RFC-42",
        why="a control spoils its line; Protego ends the line there",
        robots_txt=_rules("Disallow: /a\x0bb"),
        agent="alpha",
        path="/a",
        ours=True,
        line=lambda rng: f"Disallow: /{rng.choice('abc')}\x0b",
    ),
    "a whole URL as a rule": Difference(
        rule="RFC-32",
        why="a pattern begins with `/` or `*`; Protego puts a slash before `http://`",
        robots_txt=_rules("Disallow: http://"),
        agent="alpha",
        path="/http://x",
        ours=True,
        line=lambda rng: f"Disallow: http://{rng.choice('abc')}",
        segment=lambda rng: f"/http://{rng.choice('abc')}",
    ),
}


@dataclass
class File:
    """A generated file with some URLs, and the features that went in."""

    lines: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


class Generator:
    def __init__(self, seed: int, features: list[str]) -> None:
        self.rng = random.Random(seed)
        self.features = features
        self.file = File()

    def make(self) -> File:
        rng = self.rng
        for _ in range(rng.randint(1, 5)):
            self.group()
        self.file.paths = ["/", *(self.path() for _ in range(15))]
        return self.file

    def group(self) -> None:
        rng = self.rng
        agents = ["alpha", "Beta", "gamma", "*"]
        for agent in rng.sample(agents, rng.choice([1, 1, 1, 2, 3])):
            self.add(f"User-agent: {agent}")
            self.feature_line(0.1)
        for _ in range(rng.randint(1, 6)):
            verb = rng.choice(["Disallow", "disallow ", "Allow", "ALLOW"])
            self.add(
                f"{verb}:{rng.choice(['', ' ', '  '])}{self.pattern()}{rng.choice(['', ' # c'])}"
            )
            self.feature_line(0.2)
            if rng.random() < 0.1:
                self.add(rng.choice(["", "# comment", "Sitemap: https://example.com/s.xml"]))
        if rng.random() < 0.3:
            self.add(f"Crawl-delay: {rng.choice(['1', '2.5', '0', '-1', 'soon', '.5', '30'])}")
        self.add("")

    def feature_line(self, chance: float) -> None:
        name = self.rng.choice(self.features) if self.features else None
        if name and DIFFERENCES[name].line and self.rng.random() < chance:
            self.file.used.add(name)
            self.add(DIFFERENCES[name].line(self.rng))  # type: ignore[misc]

    def add(self, line: str) -> None:
        self.file.lines.append(line)

    def segments(self, most: int) -> str:
        rng = self.rng
        text = ""
        for _ in range(rng.randint(1, most)):
            name = rng.choice(self.features) if self.features else None
            if name and DIFFERENCES[name].segment and rng.random() < 0.3:
                self.file.used.add(name)
                text += DIFFERENCES[name].segment(rng)  # type: ignore[misc]
            else:
                text += rng.choice(
                    ["/", "a", "b", "c", "~", "%7E", "ü", "%C3%BC", "aa", "/a", "/b", "[", "%5B"]
                )
        return text

    def path(self) -> str:
        return "/" + self.segments(6)

    def pattern(self) -> str:
        rng = self.rng
        if rng.random() < 0.08:
            return ""
        text = "/" + self.segments(3)
        if rng.random() < 0.3:
            at = rng.randint(0, len(text))
            text = text[:at].rstrip("%") + "*" + text[at:] if "%" not in text else text + "*"
        if rng.random() < 0.15:
            text += "$"
        return text if text.startswith(("/", "*")) else "/" + text


def disagreements(file: File) -> list[tuple[str, str, bool]]:
    text = "\n".join(file.lines)
    ours = RobotsTxt.parse(text, dialect="rfc9309")
    theirs = Protego.parse(text)
    found = []
    for agent in ("alpha", "beta", "delta"):
        kept = ours.policy(agent)
        for number, path in enumerate(file.paths):
            # A policy's first question takes another road than all that follow.
            policy = ours.policy(agent) if number % 2 else kept
            allowed = policy.allowed(HOST + path)
            if allowed != theirs.can_fetch(HOST + path, agent):
                found.append((agent, path, allowed))
    return found


@pytest.mark.parametrize("seed", range(of_many(20)))
def test_protego_agrees_on_ordinary_files(seed: int) -> None:
    for number in range(40):
        file = Generator(seed * 1_000 + number, []).make()
        assert disagreements(file) == [], "\n".join(file.lines)


@pytest.mark.parametrize("seed", range(of_many(20)))
def test_every_disagreement_with_protego_is_listed(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(40):
        features = rng.sample(sorted(DIFFERENCES), rng.randint(1, 4))
        file = Generator(seed * 1_000 + number, features).make()
        if disagreements(file):
            assert file.used, "\n".join(file.lines)


@pytest.mark.parametrize("seed", range(5))
def test_protego_agrees_on_records_other_than_rules(seed: int) -> None:
    for number in range(40):
        text = "\n".join(Generator(seed * 1_000 + number, []).make().lines)
        ours, theirs = RobotsTxt.parse(text, dialect="rfc9309"), Protego.parse(text)
        assert list(ours.sitemaps) == list(theirs.sitemaps)
        for agent in ("alpha", "beta", "delta"):
            delay = ours.policy(agent).crawl_delay
            last = theirs.crawl_delay(agent)
            # VND-01: of several the largest counts; Protego takes the last.
            assert delay == last or (
                text.count("Crawl-delay") > 1
                and delay is not None
                and last is not None
                and delay > last
            ), text


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_listed_difference_to_protego_exists(name: str) -> None:
    known = DIFFERENCES[name]
    policy = RobotsTxt.parse(known.robots_txt, dialect="rfc9309").policy(known.agent)
    theirs = Protego.parse(known.robots_txt).can_fetch(HOST + known.path, known.agent)
    assert policy.allowed(HOST + known.path) is known.ours
    assert theirs is not known.ours
