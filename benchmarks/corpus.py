"""The sites of the benchmarks: generated in the shape of real ones, or read from a file.

Generated sites follow the quantiles of a few thousand real robots.txt files: the numbers of plain
rules and of wildcard rules in the group for an unnamed robot, and the numbers of groups, comments,
sitemaps and blank lines. Half of the URLs match rules of their file, half are arbitrary.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["AGENT", "Site", "generate", "load", "shape"]

AGENT = "examplebot"
"""The default robot: one that no file names."""

# (share of files, value): log-linear interpolation between two points.
_PLAIN = ((0.12, 0), (0.13, 1), (0.5, 7), (0.75, 24), (0.9, 53), (0.99, 234), (1.0, 706))
_WILD = ((0.52, 0), (0.53, 1), (0.75, 6), (0.9, 25), (0.99, 105), (1.0, 517))
_GROUPS = ((0.6, 0), (0.61, 1), (0.75, 2), (0.9, 4), (0.99, 33), (1.0, 115))
_COMMENTS = ((0.62, 0), (0.63, 1), (0.75, 3), (0.9, 19), (0.99, 34), (1.0, 132))
_SITEMAPS = ((0.43, 0), (0.44, 1), (0.75, 1), (0.9, 4), (0.99, 17), (1.0, 88))

_WORDS = """
    about account admin ajax api archive article assets author blog cart category cgi-bin
    checkout comment compare content customer data download en event feed file forum
    gallery help image includes index info install item js language link list login mail
    media member misc module my news node order page plugin print private product profile
    public register report review rss script search section session shop site sort static
    store style tag temp theme thread tmp tools topic track upload user version video view
    wiki wp-admin wp-content wp-includes xmlrpc
""".split()  # noqa: SIM905 - a list of a hundred quoted words reads worse
_SUFFIXES = ("", "", "", "/", "/", ".html", ".php", ".aspx", ".txt", ".pdf", ".js")
_ROBOTS = """
    AhrefsBot Baiduspider bingbot Bytespider CCBot DotBot GPTBot Googlebot Googlebot-Image
    ia_archiver Mediapartners-Google MJ12bot msnbot PetalBot SemrushBot Slurp Twitterbot
    Yandex AdsBot-Google ClaudeBot facebookexternalhit
""".split()  # noqa: SIM905 - a list of a hundred quoted words reads worse


@dataclass(frozen=True, slots=True)
class Site:
    """One site: its robots.txt as raw bytes, and URLs to ask about."""

    body: bytes
    urls: tuple[str, ...]
    agent: str = AGENT
    """The robot whose rules apply."""


_NAMED = re.compile(rb"^[ \t]*user-agent[ \t]*:[ \t]*([a-z_-]+)", re.IGNORECASE | re.MULTILINE)


def _asked_as_named(sites: list[Site]) -> list[Site]:
    """Use the first robot that the file names, if any, for every second site."""
    for place in range(1, len(sites), 2):
        if found := _NAMED.search(sites[place].body):
            sites[place] = replace(sites[place], agent=found[1].decode())
    return sites


def load(path: str | Path) -> list[Site]:
    """Read JSON lines with `robots_txt` and `urls`; other fields are ignored.

    Raises ValueError for a line that is not one of them, and OSError.
    """
    sites = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                sites.append(Site(row["robots_txt"].encode(), tuple(row["urls"])))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"line {number} has no text robots_txt and list urls") from error
    if not sites:
        raise ValueError("no lines")
    return _asked_as_named(sites)


def generate(files: int = 400, *, urls: int = 20, seed: int = 9309) -> list[Site]:
    """Generate that many sites; the same seed gives the same sites."""
    rng = random.Random(seed)
    return _asked_as_named([_site(f"www.site{index}.example", urls, rng) for index in range(files)])


def shape(sites: list[Site]) -> dict[str, int]:
    """Describe the sites, to be printed above the figures."""
    sizes = sorted(len(site.body) for site in sites)
    rules = sorted(_rules(site.body) for site in sites)
    return {
        "files": len(sites),
        "urls": sum(len(site.urls) for site in sites),
        "bytes_mean": sum(sizes) // len(sizes),
        "bytes_p50": sizes[len(sizes) // 2],
        "bytes_p99": sizes[int(len(sizes) * 0.99)],
        "rules_p50": rules[len(rules) // 2],
        "rules_p90": rules[int(len(rules) * 0.9)],
        "rules_p99": rules[int(len(rules) * 0.99)],
    }


def _rules(body: bytes) -> int:
    lines = (line.lstrip().lower() for line in body.splitlines())
    return sum(line.startswith((b"allow", b"disallow")) for line in lines)


def _draw(quantiles: tuple[tuple[float, int], ...], rng: random.Random) -> int:
    """Draw a value from the distribution with these quantiles."""
    share = rng.random()
    low_share, low = 0.0, 0
    for high_share, high in quantiles:
        if share <= high_share:
            along = (share - low_share) / (high_share - low_share)
            return round(math.exp((1 - along) * math.log(low + 1) + along * math.log(high + 1))) - 1
        low_share, low = high_share, high
    return quantiles[-1][1]


def _site(host: str, urls: int, rng: random.Random) -> Site:
    main = _group(["*"], _draw(_PLAIN, rng), _draw(_WILD, rng), rng)
    others = []
    for _ in range(_draw(_GROUPS, rng)):
        names = rng.sample(_ROBOTS, 1 if rng.random() < 0.9 else 3)
        others.append(_group(names, rng.choice((1, 1, 1, 2, 6)), 0, rng))
    blocks = [*others, main] if rng.random() < 0.4 else [main, *others]
    if notes := _draw(_COMMENTS, rng):
        blocks.insert(0, [f"# {_sentence(rng)}" for _ in range(notes)])
    blocks.append(
        [f"Sitemap: https://{host}/{_path(rng)}.xml" for _ in range(_draw(_SITEMAPS, rng))]
    )
    end = "\r\n" if rng.random() < 0.34 else "\n"
    gap = [""] if rng.random() < 0.7 else []
    text = end.join(line for block in blocks for line in (*block, *gap)) + end
    patterns = [line.split(": ", 1)[1] for line in main if "llow: /" in line]
    made = tuple(f"https://{host}{_url(patterns, rng)}" for _ in range(urls))
    return Site(text.encode(), made)


def _group(agents: list[str], plain: int, wild: int, rng: random.Random) -> list[str]:
    lines = [f"User-agent: {agent}" for agent in agents]
    if rng.random() < 0.15:
        lines.append(f"Crawl-delay: {rng.choice((1, 2, 5, 10, 30))}")
    rules = [_plain(rng) for _ in range(plain)] + [_wild(rng) for _ in range(wild)]
    rng.shuffle(rules)
    fields = ("Allow" if rng.random() < 0.11 else "Disallow" for _ in rules)
    lines += [f"{field}: {rule}" for field, rule in zip(fields, rules, strict=True)]
    if not rules:
        lines.append("Disallow:")
    return lines


def _word(rng: random.Random) -> str:
    word = rng.choice(_WORDS)
    return f"{word}{rng.randrange(900)}" if rng.random() < 0.2 else word


def _path(rng: random.Random) -> str:
    return "/".join(_word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))


def _sentence(rng: random.Random) -> str:
    return " ".join(_word(rng) for _ in range(rng.randrange(2, 12)))


def _plain(rng: random.Random) -> str:
    return f"/{_path(rng)}{rng.choice(_SUFFIXES)}" if rng.random() < 0.98 else "/"


def _wild(rng: random.Random) -> str:
    """Draw a rule with `*` or `$`, of the kinds and shares found in real files."""
    return rng.choices(
        (
            f"/{_path(rng)}/*/{_word(rng)}",
            f"/{_path(rng)}*",
            f"/*.{rng.choice(('swf', 'php', 'pdf', 'json'))}$",
            f"/*{_word(rng)}*",
            f"/*{_word(rng)}=",
            f"/*?{_word(rng)}={_word(rng)}",
            f"/*/{_word(rng)}*{_word(rng)}*",
            f"/{_path(rng)}$",
            f"/{_path(rng)}/*?*{_word(rng)}=*",
        ),
        weights=(40, 17, 12, 11, 9, 5, 2, 2, 2),
    )[0]


def _url(patterns: list[str], rng: random.Random) -> str:
    """Draw a URL. Half of them match a rule of the file, with its wildcards filled in."""
    if patterns and rng.random() < 0.5:
        aimed = rng.choice(patterns).rstrip("$").replace("*", _word(rng))
        return aimed + rng.choice(("", "", _word(rng), ".html"))
    path = f"/{_path(rng)}{rng.choice(_SUFFIXES)}"
    if rng.random() < 0.2:
        path += f"?{_word(rng)}={rng.randrange(10_000)}"
    if rng.random() < 0.05:
        path += "%20caf%C3%A9"
    return path
