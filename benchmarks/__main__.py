"""`python -m benchmarks`: run benchmarks, print tables, optionally write the figures as JSON."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import time
from pathlib import Path

from benchmarks.corpus import shape
from benchmarks.options import Options
from benchmarks.report import Table, environment

SUITES = {
    "text": "parse, first answer and match, compared with six parsers",
    "memory": "memory of one cached policy",
    "origins": "cost of an origin in the gate, in time and memory",
    "stops": "how long large files block the event loop",
    "hostile": "the worst 500 KiB files that we can construct",
    "owners": "lint, lint --fix, test, compose and diff, by file",
    "gate": "`await gate.allowed(url)` on warm origins",
    "storage": "the journal and the state file",
    "audit": "the audit record: on the loop, for a crawl, on disk and in memory",
    "pacing": "the scheduler, under virtual time and in a real event loop",
    "fleet": "leases over a store that several processes share",
    "faults": "a fleet's crawl while members, store and connections fail (twelve minutes)",
    "members": "a fleet of 1,000 members and a million hosts under virtual time",
    "waiters": "100,000 tasks that begin to wait for one host, and are cancelled, together",
    "refusals": "sites that answer 429, a simulated day each",
    "sidecar": "the HTTP service, compared with a handler that returns a constant",
    "browser": "the pages for operators in a browser (five minutes; needs chromium)",
    "growth": "memory of the HTTP service over a million requests",
    "client": "RemoteGatekeeper with a sidecar in another process",
    "dead": "the pace of hosts that answer, beside up to 2,000 dead ones",
    "instructions": "instructions per additional page of a crawl, by valgrind (ten minutes)",
    "crawl": "20,000 pages of 200 hosts on loopback, compared with other crawlers",
    "manners": "how polite crawlers are, by the logs of the servers (five minutes)",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the selected suites. Return 1 if any of them failed, else 0."""
    names = "\n".join(f"  {name:13} {text}" for name, text in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gatekeeper and its peers, interleaved in one run.",
        epilog=f"benchmarks:\n{names}\n\n"
        "example: python -m benchmarks --quick --only text --only gate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        help='real sites as JSON lines, {"robots_txt": "...", "urls": ["..."]}; else generated',
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller inputs")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="one of those below (repeatable; default: all)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only or ()) - set(SUITES))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)} (there are {', '.join(SUITES)})")
    try:
        Options(options.corpus).sites()
    except (OSError, ValueError) as error:
        parser.error(f"--corpus {options.corpus}: {error}")
    return _run(options.only or list(SUITES), Options(options.corpus, options.quick), options.json)


def _run(names: list[str], options: Options, target: str | None) -> int:
    facts = environment()
    facts["corpus"] = options.corpus or "made up, seed 9309"
    facts |= {f"corpus {key}": f"{value:,}" for key, value in shape(options.sites()).items()}
    print("# gatekeeper, measured\n")
    print("\n".join(f"- {key}: {value}" for key, value in facts.items()), flush=True)
    tables: list[Table] = []
    failed = []
    for name in names:
        start = time.monotonic()
        try:
            made = _suite(name, options)
        except Exception as error:  # noqa: BLE001 - the other suites should still run
            failed.append(name)
            print(f"\n## {name}: not measured ({type(error).__name__}: {error})", flush=True)
            continue
        tables += made
        for table in made:
            print(f"\n{table.markdown()}", flush=True)
        print(f"({name}: {time.monotonic() - start:.0f} s)", flush=True)
    if target:
        document = {"environment": facts, "tables": [table.as_dict() for table in tables]}
        Path(target).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _suite(name: str, options: Options) -> list[Table]:
    """Run one suite: `run(options)` returns tables; a module with only `main` prints its own."""
    module = importlib.import_module(f"benchmarks.{name}")
    if hasattr(module, "run"):
        return list(module.run(options))
    arguments = ["--quick"] if options.quick else []
    module.main(*([arguments] if inspect.signature(module.main).parameters else []))
    return []


if __name__ == "__main__":
    sys.exit(main())
