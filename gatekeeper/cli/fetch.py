"""`gatekeeper fetch URL...`: fetch pages politely, stop cleanly and resume."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from gatekeeper import urls
from gatekeeper.cli import CommandParser, load, positive, seconds
from gatekeeper.crawl.sources import MANIFEST, Limits
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import NAME, log_to_stderr, warn_if_anonymous

_MAX_CONCURRENCY = 10_000
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
    parser.option("-i --input FILE", "URLs, one per line; # starts a comment", type=_path)
    parser.option(
        "--sitemap ORIGIN...", "every page that the sitemaps of its robots.txt list (repeatable)"
    )
    parser.option(
        "--since DATE",
        "of --sitemap, no page that was certainly not modified since, such as 2026-11-01",
    )
    parser.option(
        "-o --output DIR",
        f"folder for pages and {MANIFEST}; an interrupted crawl resumes",
        type=_path,
    )
    parser.option(
        "--warc FILE",
        "WARC 1.1, compressed if it ends in .gz; resumes by FILE.* next to it, or by -o",
        type=_path,
    )
    parser.option(
        "--audit FOLDER",
        "write the audit record there: each robots.txt, request and refusal",
        type=_path,
        dest="audit.folder",
    )
    parser.option(
        "--retry-denied",
        "ask again about URLs that an earlier run was denied (refusals by the guard or by an "
        "override of the configuration are always asked about again)",
    )
    parser.option(
        "--denied-ok", "exit 0 if every URL was fetched or denied, as scripts under `set -e` need"
    )
    _add_limits(parser)
    parser.add_argument_group("output with --json", _JSON_HELP)


def _add_limits(parser: CommandParser) -> None:
    parser.option(
        "--concurrency N",
        "requests in flight over all hosts (100); the limit of each host still applies",
        type=_concurrency,
        default=100,
    )
    parser.option(
        "--max-body BYTES",
        "maximum bytes to read of one body (10 MiB)",
        type=positive,
        default=10 * 1024 * 1024,
    )
    parser.option(
        "--tries N",
        "attempts for a URL that fails or is answered 429 or 503 (3)",
        type=positive,
        default=3,
    )
    parser.option(
        "--timeout SECONDS",
        "network time of one request (300); waiting for the host does not count",
        type=seconds,
        default=300.0,
    )
    parser.option(
        "--max-wait SECONDS",
        "stop if no host is due this long after the last request (3600); run again to resume",
        type=seconds,
        default=3600.0,
    )


def _path(text: str) -> str:
    if not text:  # an unset "$DIR" in a shell must not mean the current folder
        raise argparse.ArgumentTypeError("the path is empty; use `.` for the current folder")
    return text


def _concurrency(text: str) -> int:
    number = positive(text)
    if number > _MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"{text!r}; give at most {_MAX_CONCURRENCY}")
    return number


def run(args: argparse.Namespace) -> int:
    """Exit 0 if every URL was fetched (with --denied-ok: or denied), 1 if not, 130 after Ctrl-C."""
    from gatekeeper.crawl.progress import watcher  # noqa: PLC0415 - `--help` stays quick
    from gatekeeper.crawl.runner import Job, crawl  # noqa: PLC0415
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
    settings = load(args)
    warn_if_anonymous(settings)
    job = Job(
        identity=settings.identity(),
        config=settings.config,
        urls=tuple(args.urls),
        input=args.input,
        sitemaps=tuple(urls.parse(origin).origin for origin in args.sitemap),
        since=None if args.since is None else parse_since(args.since),
        output=Path(args.output) if args.output is not None else None,
        warc=Path(args.warc) if args.warc is not None else None,
        limits=Limits(concurrency=args.concurrency, max_body=args.max_body, tries=args.tries),
        timeout=args.timeout,
        max_wait=args.max_wait,
        as_json=args.json,
        retry_denied=args.retry_denied,
        denied_ok=args.denied_ok,
    )
    with rare_collections(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(crawl(job, watcher(quiet=args.json)))
