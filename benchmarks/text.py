"""Parsing and matching, compared with other parsers: the first answers of a file, and later ones.

A crawl usually asks only a few questions about an origin. So each file is parsed and asked 1, 2, 10
and 100 times. Later answers are measured for URLs as they come, for new paths, and for new queries.
Every second file is asked for the first robot that it names. Most files of the web are small, so
the figures are also reported by size of file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise

from benchmarks.corpus import Site
from benchmarks.options import Options
from benchmarks.peers import BASELINE, OURS, Peer, installed, missing
from benchmarks.report import Table, seconds, times
from benchmarks.timing import Contender, Sample, compete

__all__ = ["run"]

_QUESTIONS = (1, 2, 10, 100)
_SIZES = (300, 1_000, 3_000, 10_000)
Ask = Callable[[str], bool]
Fresh = Callable[[str, int], str]


def run(options: Options) -> list[Table]:
    """Return three tables: parsing with the first answers, later answers, and both by size of
    file."""
    sites, peers = [site for site in options.sites() if site.urls], installed()
    rounds = options.rounds(quick=5, full=15)
    notes = tuple(f"{name}: not installed here" for name in missing())
    asked: dict[str, dict[str, Sample]] = {
        "parse": compete({peer.name: _parsing(peer, sites) for peer in peers}, rounds=rounds)
    }
    for number in _QUESTIONS:
        contenders = {peer.name: _answering(peer, sites, number) for peer in peers}
        asked[f"+ {number}"] = compete(contenders, rounds=rounds)
    later = {
        name: compete({peer.name: _matching(peer, sites, fresh) for peer in peers}, rounds=rounds)
        for name, fresh in _FRESH.items()
    }
    return [
        _table(
            "A file and its first questions",
            "pure Python: parse and 1 question 4.5x, 2 questions 4x, 10 3.5x, 100 3x",
            peers,
            asked,
            (
                *notes,
                "Processor time a file. `parse`: bytes in, parsed file out. `+ n`: parse, choose "
                "the agent, and ask about n URLs of that site, its 20 ones in turn.",
            ),
        ),
        _table(
            "Match a URL",
            "pure Python: 3x, and 6x with a fresh query",
            peers,
            later,
            (
                "Processor time a URL. The whole URL is given; each policy has answered about all "
                "of these URLs before. `as they come`: the site's own URLs; `fresh path`, `fresh "
                "query`: with a segment or a parameter that is new in each round.",
                "same verdict: the share of the URLs about which both say the same as gatekeeper.",
            ),
            extra=("same verdict", _agreement(peers, sites)),
        ),
        _by_size([peer for peer in peers if peer.name in {OURS, BASELINE}], sites, rounds),
    ]


def _by_size(peers: Sequence[Peer], sites: Sequence[Site], rounds: int) -> Table:
    rows: list[tuple[str, ...]] = []
    figures: dict[str, dict[str, float]] = {}
    for low, high in pairwise((0, *_SIZES, 1 << 40)):
        name = f"{low:,} to {high - 1:,}" if high <= _SIZES[-1] else f"{low:,} or more"
        some = [site for site in sites if low <= len(site.body) < high]
        if not some:
            continue
        taken = {
            f"+ {number}": compete(
                {peer.name: _answering(peer, some, number) for peer in peers}, rounds=rounds
            )
            for number in _QUESTIONS
        }
        fresh = _FRESH["as they come"]
        contenders = {peer.name: _matching(peer, some, fresh) for peer in peers}
        taken["match"] = compete(contenders, rounds=rounds)
        ratios = {each: of[OURS].faster_than(of[BASELINE]) for each, of in taken.items()}
        cells = [
            f"{ratios[each].shown(times)}, {seconds(taken[each][OURS].each)}" for each in taken
        ]
        rows.append((name, str(len(some)), *cells))
        figures[name] = {each: ratio.median for each, ratio in ratios.items()}
    columns = ("octets of a file", "files", *(f"+ {number}" for number in _QUESTIONS), "match")
    notes = ("As in the tables above: gatekeeper against Protego, and gatekeeper's time.", _RATIOS)
    return Table("By size of file", columns, rows, "", notes, figures)


def _parsing(peer: Peer, sites: Sequence[Site]) -> Contender:
    parse = peer.parse

    def work(_: int) -> int:
        for site in sites:
            parse(site.body)
        return len(sites)

    return Contender(work)


def _answering(peer: Peer, sites: Sequence[Site], questions: int) -> Contender:
    parse, ready = peer.parse, peer.ready
    asked = [(site.body, site.agent, [*islice(cycle(site.urls), questions)]) for site in sites]

    def work(_: int) -> int:
        for body, agent, urls in asked:
            ask = ready(parse(body), agent)
            for url in urls:
                ask(url)
        return len(asked)

    return Contender(work)


def _matching(peer: Peer, sites: Sequence[Site], fresh: Fresh) -> Contender:
    asks = [(peer.ready(peer.parse(site.body), site.agent), site.urls) for site in sites]
    for ask, urls in asks:
        for url in urls:
            ask(url)
    turns: dict[int, list[tuple[Ask, list[str]]]] = {}

    def work(turn: int) -> int:
        total = 0
        for ask, urls in turns.pop(turn):
            for url in urls:
                ask(url)
            total += len(urls)
        return total

    def prepare(turn: int) -> None:
        turns[turn] = [(ask, [fresh(url, turn) for url in urls]) for ask, urls in asks]

    return Contender(work, prepare)


def _fresh_path(url: str, turn: int) -> str:
    path, mark, query = url.partition("?")
    return f"{path}{'' if path.endswith('/') else '/'}r{turn:x}{mark}{query}"


def _fresh_query(url: str, turn: int) -> str:
    return f"{url}{'&' if '?' in url else '?'}r={turn:x}"


_FRESH: dict[str, Fresh] = {
    "as they come": lambda url, _: url,
    "fresh path": _fresh_path,
    "fresh query": _fresh_query,
}


def _agreement(peers: Sequence[Peer], sites: Sequence[Site]) -> dict[str, str]:
    answers = {
        peer.name: [
            bool(ask(url))
            for site in sites
            for ask in (peer.ready(peer.parse(site.body), site.agent),)
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
    peers: Sequence[Peer],
    columns: dict[str, dict[str, Sample]],
    notes: tuple[str, ...],
    extra: tuple[str, dict[str, str]] | None = None,
) -> Table:
    rows: list[tuple[str, ...]] = []
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for peer in peers:
        cells, own = [f"{peer.name} {peer.version}"], figures.setdefault(peer.name, {})
        for name, samples in columns.items():
            sample = samples[peer.name]
            ratio = sample.faster_than(samples[BASELINE])
            cells.append(f"{ratio.shown(times)}, {seconds(sample.each)}")
            own[name] = {
                "seconds_each": sample.each,
                "times_protego": ratio.median,
                "p10": ratio.low,
                "p90": ratio.high,
            }
        rows.append((*cells, extra[1][peer.name]) if extra else tuple(cells))
    heads = ("against Protego", *columns, *((extra[0],) if extra else ()))
    return Table(title, heads, rows, goal, (*notes, _RATIOS), figures)


_RATIOS = "Ratios within a round: median (p10 to p90)."
