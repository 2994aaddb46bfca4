"""`python -m benchmarks.against REVISION`: what became slower since a revision.

Both trees run their own benchmarks, one after the other, several times. The medians of the cells
that both print are compared: durations, sizes and rates. Ratios to peers are left out, because the
figures that they are made of are compared themselves. The rows of peers tell how noisy the machine
was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.report import Table

__all__ = ["Comparison", "compared", "figure_of", "main"]

SUITES = (
    "text",
    "memory",
    "origins",
    "stops",
    "hostile",
    "gate",
    "storage",
    "pacing",
    "sidecar",
    "client",
    "crawl",
)
"""Those that take minutes, not hours."""

_UNITS = {
    **{"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    **{"B": 1.0, "bytes": 1.0, "kB": 1e3, "KiB": 1024.0, "MB": 1e6, "MiB": 2.0**20},
}
_RATES = {"": 1.0, "k": 1e3, "M": 1e6}
_CELL = re.compile(r"(?:\A|, )(\d[\d,]*(?:\.\d+)?) ?([A-Za-zµ]*)\Z")

Key = tuple[str, str, str]
"""Title of the table, first cell of the row, column."""
Figure = tuple[float, bool]
"""A number, and whether less is better."""
Comparison = tuple[Key, str, str, float]
"""Where it stands, its value before and now, and how much worse it is: 1.1 is 10 %."""


def figure_of(cell: str, *labels: str) -> Figure | None:
    """Read a cell: a duration or a size, or a rate where a label of its column or row says "/s".

    >>> figure_of("12.5 µs", "check"), figure_of("1.2 M", "leases/s"), figure_of("1.08x", "ratio")
    ((1.25e-05, True), (1200000.0, False), None)
    """
    found = _CELL.search(cell.strip())
    if found is None:
        return None
    number, unit = float(found[1].replace(",", "")), found[2]
    if unit in _UNITS:
        return number * _UNITS[unit], True
    if unit in _RATES and any("/s" in label or "per second" in label for label in labels):
        return number * _RATES[unit], False
    return None


def cells_of(document: dict[str, list[dict[str, object]]]) -> dict[Key, str]:
    """The cells of what `--json` wrote, by where they stand."""
    cells: dict[Key, str] = {}
    for one in document["tables"]:
        table = Table(**one)  # type: ignore[arg-type]
        for row in table.rows:
            for column, cell in zip(table.columns[1:], row[1:], strict=True):
                cells[table.title, row[0], column] = cell
    return cells


def compared(before: list[dict[Key, str]], now: list[dict[Key, str]]) -> list[Comparison]:
    """Compare the median cells of what all runs of both trees printed."""
    found = []
    for key in sorted(set.intersection(*(set(run) for run in (*before, *now)))):
        old, new = ([run[key] for run in runs] for runs in (before, now))
        if all((figure := figure_of(cell, *key)) and figure[0] > 0 for cell in (*old, *new)):
            (was, less_is_better), was_cell = _middle(old, key)
            (is_now, _), now_cell = _middle(new, key)
            worse = is_now / was if less_is_better else was / is_now
            found.append((key, was_cell, now_cell, worse))
    return found


def _middle(cells: list[str], key: Key) -> tuple[Figure, str]:
    read = sorted((figure, cell) for cell in cells if (figure := figure_of(cell, *key)))
    return read[len(read) // 2]


def _measure(tree: Path, suite: str, *, quick: bool, target: Path) -> dict[Key, str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "benchmarks", "--only", suite, "--json", str(target)]
    subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return cells_of(json.loads(target.read_text(encoding="utf-8"))) if target.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Print the cells that became slower by more than a tenth. Return 1 if nothing was compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("revision", help="a commit or a tag")
    parser.add_argument("--repository", default=".", help="where git finds the revision")
    parser.add_argument("--only", action="append", metavar="NAME", help="a suite (repeatable)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tree (default: 3)")
    parser.add_argument("--full", action="store_true", help="not the suites' quick form")
    options = parser.parse_args(arguments)
    here = Path(__file__).resolve().parents[1]
    slower: list[Comparison] = []
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        tree.mkdir()
        archive = subprocess.run(
            [
                "git",
                "-c",
                "safe.directory=*",
                "-C",
                options.repository,
                "archive",
                options.revision,
            ],
            stdout=subprocess.PIPE,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        for suite in options.only or SUITES:
            runs: dict[Path, list[dict[Key, str]]] = defaultdict(list)
            for number in range(options.rounds):
                for one in (tree, here):
                    target = Path(folder) / f"{suite}-{number}-{one.name}.json"
                    runs[one].append(_measure(one, suite, quick=not options.full, target=target))
            found = compared(runs[tree], runs[here])
            count += len(found)
            slower += [one for one in found if one[3] > 1.1]
            print(f"{suite}: {len(found)} figures", flush=True)
    rows = [(*key, old, new, f"{worse:.2f}") for key, old, new, worse in slower]
    if rows:
        columns = ("table", "row", "column", "before", "now", "times as slow")
        print(Table(f"Slower than {options.revision} by more than 10 %", columns, rows).markdown())
    print(f"{count} figures compared, {len(slower)} slower by more than 10 %")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
