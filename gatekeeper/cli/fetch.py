"""`gatekeeper fetch URL...`: fetch pages politely, stop cleanly and resume."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from gatekeeper import urls
from gatekeeper.cli import CommandParser, load, number_type, positive, seconds
from gatekeeper.crawl.sources import MANIFEST, Job
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import NAME, identity_of, log_to_stderr, warn_if_anonymous

_JSON_HELP = (
    f"stdout: one entry per line, as in {MANIFEST}. stderr: the last line is the summary, "
    '{"fetched", "denied", "failed", "skipped", "refused_before", "bytes", "unfinished", '
    '"complete", "stopped": "max_wait" or "interrupted" or null, "held_up": [{"origin", "urls", '
    '"reason", "why", "retry_at"}, ...], "sitemap_findings": [{"source", "code", "severity", '
    '"message", "line", "retry_at"}, ...]}; unfinished URLs have no entry, and held_up says why'
)


EXAMPLE = f"{NAME} fetch -i urls.txt -o pages"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `fetch`."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="`-` reads standard input")
    for form, text in _FILES.items():
        parser.option(form, text, type=_path)
    parser.option("--audit FOLDER", _AUDIT, type=_path, dest="audit.folder")
    for form, text in _CHOICES.items():
        parser.option(form, text)
    for form, kind, default, text in _LIMITS:
        parser.option(form, text, type=kind, default=default)
    parser.add_argument_group("output with --json", _JSON_HELP)


def _path(text: str) -> str:
    if not text:  # an unset "$DIR" in a shell must not mean the current folder
        raise argparse.ArgumentTypeError("the path is empty; use `.` for the current folder")
    return text


_concurrency = number_type(positive, "at most 10000", lambda number: number <= 10_000)
_FILES = {
    "-i --input FILE": "URLs, one per line; # starts a comment",
    "-o --output DIR": f"folder for pages and {MANIFEST}; an interrupted crawl resumes",
    "--warc FILE": "WARC 1.1, compressed if it ends in .gz; resumes by FILE.* next to it, or by -o",
}
_AUDIT = "write the audit record there: each robots.txt, request and refusal"
_CHOICES = {
    "--sitemap ORIGIN...": "every page that the sitemaps of its robots.txt list (repeatable)",
    "--since DATE": "of --sitemap, no page certainly not modified since, such as 2026-11-01",
    "--retry-denied": "ask again about URLs that an earlier run was denied (refusals by the guard "
    "or by an override of the configuration are always asked about again)",
    "--denied-ok": "exit 0 if every URL was fetched or denied, as scripts under `set -e` need",
}
_LIMITS: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
    ("--concurrency N", _concurrency, 100, "requests in flight (100); each host has its own limit"),
    ("--max-body BYTES", positive, 10 * 1024 * 1024, "maximum bytes to read of one body (10 MiB)"),
    ("--tries N", positive, 3, "attempts for a URL that fails or is answered 429 or 503 (3)"),
    ("--timeout SECONDS", seconds, 300.0, "network time of one request, without waiting (300)"),
    ("--max-wait SECONDS", seconds, 3600.0, "stop if no host is due so long after a page (3600)"),
)


def run(args: argparse.Namespace) -> int:
    """Exit 0 if every URL was fetched (with --denied-ok: or denied), 1 if not, 130 after Ctrl-C."""
    from gatekeeper.crawl.progress import watcher  # noqa: PLC0415 - `--help` stays quick
    from gatekeeper.crawl.runner import crawl  # noqa: PLC0415
    from gatekeeper.sidecar.listening import (  # noqa: PLC0415
        loop_factory,
        raise_file_limit,
        rare_collections,
    )
    from gatekeeper.sitemaps import parse_since  # noqa: PLC0415

    raise_file_limit()  # each silent host occupies one socket until its request times out
    log_to_stderr()
    if not args.urls and args.input is None and not args.sitemap:
        raise ConfigError(
            "no URLs; give some, or -i FILE, or `-` for standard input, or --sitemap ORIGIN"
        )
    if args.since is not None and not args.sitemap:
        raise ConfigError("--since is about --sitemap ORIGIN, which is missing")
    config = load(args).config
    warn_if_anonymous(config)
    job = Job(
        identity=identity_of(config),
        config=config,
        urls=tuple(args.urls),
        input=args.input,
        sitemaps=tuple(urls.parse(origin).origin for origin in args.sitemap),
        since=None if args.since is None else parse_since(args.since),
        output=Path(args.output) if args.output is not None else None,
        warc=Path(args.warc) if args.warc is not None else None,
        concurrency=args.concurrency,
        max_body=args.max_body,
        tries=args.tries,
        timeout=args.timeout,
        max_wait=args.max_wait,
        as_json=args.json,
        retry_denied=args.retry_denied,
        denied_ok=args.denied_ok,
    )
    with rare_collections(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(crawl(job, watcher(quiet=args.json)))
