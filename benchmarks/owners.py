"""The cost of the commands for site owners, on every file: what a command does with a text, without
the start of its process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.corpus import Site
from benchmarks.options import Options
from benchmarks.report import Table, seconds
from gatekeeper.robots import Fragment, RobotsTxt, compose, diff
from gatekeeper.sites.fixes import repaired

__all__ = ["run"]

FRAGMENT = Fragment("fragment.txt", "User-agent: *\nDisallow: /zz\nAllow: /zz/y\n")
"""What is composed with each file: its Allow meets every pattern of the file that begins with a
star."""


def _lint(site: Site, _: Site) -> bool:
    list(RobotsTxt.parse(site.body).findings)
    return True


def _fix(site: Site, _: Site) -> bool:
    repaired(site.body)
    return True


def _test(site: Site, _: Site) -> bool:
    policy = RobotsTxt.parse(site.body).policy(site.agent)
    list(map(policy.match, site.urls))
    return True


def _compose(site: Site, _: Site) -> bool:
    composed = compose([Fragment("robots.txt", site.body), FRAGMENT])
    return all(problem.code != "undecided" for problem in composed.problems)


def _diff(site: Site, other: Site) -> bool:
    return diff(RobotsTxt.parse(site.body), RobotsTxt.parse(other.body)).complete


COMMANDS: dict[str, Callable[[Site, Site], bool]] = {
    "lint": _lint,
    "lint --fix": _fix,
    "test, the site's URLs": _test,
    "compose, with a fragment of three lines": _compose,
    "diff, with the next file": _diff,
}
"""Each returns whether its answer is complete."""


def run(options: Options) -> list[Table]:
    """Return one table: processor time of each command by file, and the incomplete answers."""
    sites = options.sites()
    pairs = list(zip(sites, [*sites[1:], sites[0]], strict=True))
    rows, figures = [], {}
    for name, command in COMMANDS.items():
        measured = list(_each(command, pairs))
        times = sorted(each for each, _ in measured)
        chosen = [times[int((len(times) - 1) * share)] for share in (0.5, 0.99, 1.0)]
        incomplete = sum(not complete for _, complete in measured)
        figures[name] = {"seconds": chosen, "incomplete": incomplete, "files": len(times)}
        rows.append((name, *map(seconds, chosen), str(incomplete)))
    return [
        Table(
            f"The commands for site owners, {len(sites):,} files",
            ("", "p50", "p99", "slowest file", "incomplete"),
            rows,
            "conflicts within a second",
            ("incomplete: the search was given up, or a rule set has another dialect.",),
            figures,
        )
    ]


def _each(
    command: Callable[[Site, Site], bool], pairs: list[tuple[Site, Site]]
) -> Iterator[tuple[float, bool]]:
    command(*pairs[0])  # imports what it needs
    for pair in pairs:
        start = time.process_time()
        complete = command(*pair)
        yield time.process_time() - start, complete
