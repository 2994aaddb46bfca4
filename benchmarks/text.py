"""Parse, first answer, match: the text alone, beside the parsers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.corpus import Site
from benchmarks.options import Options
from benchmarks.peers import BASELINE, OURS, Peer, installed, missing
from benchmarks.report import Table, count, seconds, times
from benchmarks.timing import Contender, Sample, compete

__all__ = ["run"]


def run(options: Options) -> list[Table]:
    """The three tables of the text."""
    sites, peers = options.sites(), installed()
    notes = tuple(f"{name}: not installed here" for name in missing())
    rounds = options.rounds(quick=5, full=15)
    parse = compete({peer.name: _parsing(peer, sites) for peer in peers}, rounds=rounds)
    first = compete({peer.name: _answering(peer, sites) for peer in peers}, rounds=rounds)
    match = compete({peer.name: _matching(peer, sites) for peer in peers}, rounds=rounds)
    agreement = _agreement(peers, sites)
    return [
        _table(
            "Parse real files",
            "at least 6x Protego",
            "file",
            peers,
            parse,
            (
                *notes,
                "Bytes in, parsed file out; what a parser puts off until it is asked is "
                "in the next table.",
            ),
        ),
        _table(
            "Parse, choose the agent, first answer",
            "at least 4x Protego",
            "file",
            peers,
            first,
            ("Bytes in, one verdict out, about a URL of that site.",),
        ),
        _table(
            "Match a URL",
            "at least 5x Protego",
            "URL",
            peers,
            match,
            (
                "The policy is ready and was asked once before; the whole URL is given. Every "
                "round asks about URLs never seen before (the file's own ones with a fresh "
                "query), so that no memory of answers counts.",
                "same verdict: the share of the URLs about which both say the same as gatekeeper.",
            ),
            extra=("same verdict", agreement),
        ),
    ]


def _parsing(peer: Peer, sites: Sequence[Site]) -> Contender:
    parse = peer.parse

    def work(_: int) -> int:
        for site in sites:
            parse(site.body)
        return len(sites)

    return Contender(work)


def _answering(peer: Peer, sites: Sequence[Site]) -> Contender:
    parse, ready = peer.parse, peer.ready
    asked = [(site.body, site.urls[0]) for site in sites if site.urls]

    def work(_: int) -> int:
        for body, url in asked:
            ready(parse(body))(url)
        return len(asked)

    return Contender(work)


def _matching(peer: Peer, sites: Sequence[Site]) -> Contender:
    asks = [(peer.ready(peer.parse(site.body)), site.urls) for site in sites if site.urls]
    for ask, urls in asks:
        ask(urls[0])
    turns: dict[int, list[tuple[Any, list[str]]]] = {}

    def work(turn: int) -> int:
        total = 0
        for ask, urls in turns.pop(turn):
            for url in urls:
                ask(url)
            total += len(urls)
        return total

    def prepare(turn: int) -> None:
        turns[turn] = [(ask, [_fresh(url, turn) for url in urls]) for ask, urls in asks]

    return Contender(work, prepare)


def _fresh(url: str, turn: int) -> str:
    return f"{url}{'&' if '?' in url else '?'}r={turn:x}"


def _agreement(peers: Sequence[Peer], sites: Sequence[Site]) -> dict[str, str]:
    answers = {
        peer.name: [
            bool(ask(url))
            for site in sites
            for ask in (peer.ready(peer.parse(site.body)),)
            for url in site.urls
        ]
        for peer in peers
    }
    ours = answers.get(OURS) or answers[BASELINE]
    return {
        name: f"{sum(a == b for a, b in zip(said, ours, strict=True)) / len(ours):.2%}"
        for name, said in answers.items()
    }


def _table(
    title: str,
    goal: str,
    unit: str,
    peers: Sequence[Peer],
    samples: dict[str, Sample],
    notes: tuple[str, ...],
    extra: tuple[str, dict[str, str]] | None = None,
) -> Table:
    base = samples[BASELINE]
    rows, figures = [], {}
    for peer in peers:
        sample = samples[peer.name]
        ratio = sample.faster_than(base)
        row: tuple[str, ...] = (
            f"{peer.name} {peer.version}",
            seconds(sample.each),
            f"{count(sample.rate)}/s",
            times(ratio),
        )
        rows.append((*row, extra[1][peer.name]) if extra else row)
        figures[peer.name] = {"seconds_each": sample.each, "times_protego": ratio}
    columns: tuple[str, ...] = ("", f"a {unit}", f"{unit}s", "against Protego")
    if extra:
        columns = (*columns, extra[0])
    return Table(title, columns, rows, goal, notes, figures)
