"""One crawl from arguments to exit code: files, session, signals, progress and summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp import hdrs

from gatekeeper import __version__
from gatekeeper.clock import Clock, SystemClock, deadline
from gatekeeper.crawl.engine import Crawl, Outputs
from gatekeeper.crawl.manifest import Folder, Manifest, Result, refuse_links
from gatekeeper.crawl.output import PeerResponse, Warc, warc_writer
from gatekeeper.crawl.progress import INTERVAL, DueOrigin, Holdup, Progress, Tally
from gatekeeper.crawl.sources import MANIFEST, STATE, GivenURL, Job, URLList, open_list, read_urls
from gatekeeper.errors import ConfigError, Denied, StorageError
from gatekeeper.robots import Severity
from gatekeeper.session.polite import polite_session
from gatekeeper.sitemaps import SitemapFinding
from gatekeeper.storage.journal import FileLock
from gatekeeper.terminal import DENIED, OK, json_text
from gatekeeper.urls import mask

# --- the end ---------------------------------------------------------------------------------

MAX_WAIT = "max_wait"
INTERRUPTED_BY_SIGNAL = "interrupted"
_MAX_HELD_UP = 1_000
"""Maximum origins to name in the JSON summary; people are shown the first 20."""


class HeldUpHost(Holdup, frozen=True, kw_only=True):
    """An origin with URLs that could not be requested, and why."""

    origin: str
    urls: int


class CrawlSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a crawl; with --json the last line on stderr. Sizes are bytes."""

    fetched: int
    denied: int
    failed: int
    skipped: int
    refused_before: int
    """Skipped URLs that an earlier run was denied, or that are not URLs."""
    bytes: int
    unfinished: int
    """URLs without an entry: the next run requests them."""
    complete: bool
    """True if the list was read to its end."""
    stopped: str | None
    """Why the crawl ended early: `max_wait` or `interrupted`; else None."""
    held_up: tuple[HeldUpHost, ...]
    """The origins with the most unfinished URLs."""
    sitemap_findings: tuple[SitemapFinding, ...] = ()
    """What is wrong with the sitemaps of --sitemap."""

    def lines(self, *, max_wait: float, resumes: bool, most: int = 20) -> list[str]:
        """Return the lines about unfinished URLs, for people; none if the crawl is complete."""
        if not self.unfinished and self.complete:
            return []
        parts = [f"{self.unfinished:,} unfinished"] if self.unfinished else []
        if not self.complete:
            parts.append("the list was not read to its end")
        if self.stopped == MAX_WAIT:
            parts.append(f"no host is due within --max-wait {max_wait:g} s")
        parts.append(
            "run the same command again to resume"
            if resumes
            else "the next run starts over: only -o DIR or --warc FILE stores what is done"
        )
        lines = [f"stopped: {'; '.join(parts)}"]
        lines += [f"  {held.urls:>6,}  {held.origin}  {held}" for held in self.held_up[:most]]
        if len(self.held_up) > most:
            lines.append(f"          and {len(self.held_up) - most:,} more hosts")
        rest = self.unfinished - sum(held.urls for held in self.held_up)
        if rest and self.held_up:
            lines.append(f"  {rest:>6,}  not due yet, or interrupted")
        return lines


# --- the run ---------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

INTERRUPTED = 130
_HEADERS: dict[str, str] = {hdrs.ACCEPT: "text/html, application/xhtml+xml, */*;q=0.8"}
_HOSTS_SHOWN = 8
DISK_WAIT = 300.0
"""Seconds for which a crawl waits for room on the disk, or --max-wait if that is less."""


async def crawl(job: Job, progress: Progress, *, clock: Clock | None = None, **session: Any) -> int:
    """Run a crawl and return the exit code. `session` arguments are passed to `polite_session`.

    Raises ConfigError, StorageError or OSError for files that can't be used or read.
    """
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        listed = stack.enter_context(open_list(job.input))  # create nothing if it is missing
        outputs = _open_outputs(job, stack)
        record = outputs.warc is not None  # uncompressed bodies
        client = await stack.enter_async_context(
            polite_session(
                user_agent=job.identity,
                config=job.kept_config,
                clock=clock,
                # A host that does not accept connections must not occupy a worker for long.
                timeout=aiohttp.ClientTimeout(
                    total=job.timeout, sock_connect=job.config.fetch.connect_timeout
                ),
                auto_decompress=not record,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS | ({hdrs.ACCEPT_ENCODING: "identity"} if record else {}),
                response_class=PeerResponse if record else aiohttp.ClientResponse,
                **session,
            )
        )
        work = _ShownCrawl(job, client, outputs, clock, progress)
        stack.enter_context(progress)
        async with interruptible(work, progress, job.grace) as interrupted:
            await work.complete(listed)
        stopped = work.stopped_by or (INTERRUPTED_BY_SIGNAL if interrupted() else None)
        end = await work.summary(stopped)
    _print_summary(job, work.tally, end)
    if interrupted():
        return INTERRUPTED
    return OK if work.tally.clean(denied_ok=job.denied_ok) else DENIED


def _open_outputs(job: Job, stack: AsyncExitStack) -> Outputs:
    """Lock the output files, then open and repair them."""
    if job.warc is not None:
        warc_writer()  # raises if the extra is missing, before any file is created
    _lock(job, stack)
    path = job.manifest
    if path is None:
        return Outputs()
    has_content = job.warc is None or (job.warc.exists() and job.warc.stat().st_size > 0)
    archive = job.archive if has_content else ""
    manifest = stack.enter_context(Manifest(path, archive=archive, retry_denied=job.retry_denied))
    if manifest.unreadable:
        _log.warning(
            "%s: %d lines are not entries of a crawl; they are left unchanged, and their URLs, if "
            "any, are fetched again",
            path,
            manifest.unreadable,
        )
    warc = None
    if job.warc is not None:
        last = manifest.warc_places.get(archive) if archive else None
        writer = Warc(job.warc, software=f"gatekeeper/{__version__}", name=job.archive, last=last)
        warc = stack.enter_context(writer)
    return Outputs(manifest, Folder(job.output) if job.output is not None else None, warc)


def _lock(job: Job, stack: AsyncExitStack) -> None:
    """Lock the folder and the WARC file before either is read.

    Otherwise a record that another process is writing would look like a torn one. Raises
    StorageError, which names the file and the process that holds the lock, and ConfigError for a
    WARC file with the name of a file of the crawl.
    """
    if job.output is not None:
        _make_folder("-o", job.output, job.output)
        refuse_links(job.output, MANIFEST, STATE)
    if job.warc is not None:
        if job.warc.is_dir():
            raise ConfigError(f"--warc {job.warc}: is a directory; name a file in it")
        # The file and the manifest have the path, in UTF-8.
        if any("\ud800" <= one <= "\udfff" for one in f"{job.archive}{job.warc.name}"):
            raise ConfigError(f"--warc {job.warc}: the path is not UTF-8; give another")
        _make_folder("--warc", job.warc, job.warc.parent)
        own = job.output is not None and job.warc.parent.samefile(job.output)
        if own and job.warc.name.startswith((MANIFEST, STATE)):
            raise ConfigError(f"--warc {job.warc}: -o has its own file there; give another name")
    for path in (job.output and job.output / MANIFEST, job.warc):
        if path is not None:
            real = path.resolve()  # one lock for all names of a file
            lock = FileLock(real.with_name(f"{real.name}.lock"), guarded=path)
            stack.callback(lock.release)


def _make_folder(option: str, given: Path, folder: Path) -> None:
    """Create a folder if needed. Raises ConfigError, which names the option and the remedy."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((one for one in (folder, *folder.parents) if one.exists()), folder)
        inner = f" {file}" if file != given else ""
        raise ConfigError(f"{option} {given}:{inner} is not a directory; name another") from error
    except OSError as error:
        raise ConfigError(
            f"{option} {given}: {folder} can't be created ({error.strerror}); choose a place "
            "that this user may write to"
        ) from error


class _ShownCrawl(Crawl):
    """A crawl that is shown while it runs, and that ends by itself if it only waits."""

    async def complete(self, listed: URLList | None) -> None:
        """Run the crawl, and show its progress until it ends."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                await self.run(self._urls(listed))
                watching.cancel()
                self._show(())
        except BaseExceptionGroup as errors:
            error: BaseException = errors  # the command prints the one that ended the crawl
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _urls(self, listed: URLList | None) -> AsyncIterator[GivenURL]:
        """Yield the URLs of all sources: arguments, the list, and the sitemaps."""
        async for given in read_urls(self._job.urls, listed):
            yield given
        for origin in self._job.sitemaps:
            async for given in self._listed_by(origin):
                yield given

    async def _listed_by(self, origin: str) -> AsyncIterator[GivenURL]:
        """Yield every page that the sitemaps of an origin list, and note what is missing. If the
        next page does not come within `max_wait` seconds, the origin is left."""
        max_wait, findings = self._job.max_wait, self.tally.sitemaps
        found, told = self._gate.sitemaps(origin, since=self._job.since), 0
        async with aclosing(found):
            while True:
                entry = None
                try:
                    async with deadline(self._clock, max_wait):
                        entry = await anext(found, None)
                except (Denied, TimeoutError) as error:  # or a LeaseTimeout
                    code = "deferred" if getattr(error, "retryable", True) else "denied"
                    text = f"its sitemaps did not come within --max-wait {max_wait:g} s"
                    said, at = str(error) or text, getattr(error, "retry_at", None)
                    findings.append(SitemapFinding(origin, code, Severity.ERROR, said, retry_at=at))
                findings += found.findings[told:]
                told = len(found.findings)
                if entry is None:
                    break
                yield GivenURL(entry.url)

    def _show(self, due: Sequence[DueOrigin]) -> None:
        tally = self.tally
        self._progress.show(tally, due, self._speed.read(self._clock.monotonic(), tally, due))

    async def _watch(self) -> None:
        """Show the progress periodically; stop a crawl that has only waited for `max_wait` seconds.

        Raises StorageError if the crawl waits for room on the disk for too long.
        """
        gate, clock, max_wait = self._gate, self._clock, self._job.max_wait
        last_moved, moved_at, written_at = (-1, -1), 0.0, 0.0
        while True:
            tally, now = self.tally, clock.monotonic()
            moved = tally.done, tally.begun
            problem = gate.parts.storage_failing
            if moved != last_moved:
                moved_at = now
            if problem is None or moved != last_moved:
                written_at = now
            elif (waited := now - written_at) >= min(max_wait, DISK_WAIT):
                path = str(gate.config.storage.path)
                if getattr(gate.parts.storage, "failing", None) and path not in problem:
                    problem = f"{path}: {problem}"  # else it is the audit record that is meant
                raise StorageError(
                    f"{problem}: for {waited:.0f} s no clock of a host could be stored, and "
                    "nothing is requested without; make room there, and run the command again to "
                    "resume"
                )
            self._show(await self.hosts.busiest(gate, clock, _HOSTS_SHOWN))
            # If nothing moved since the last look, stop if no host is due in time. The deferrals of
            # a host may each be short; together they are one wait, since the last move.
            remaining = max(0.0, max_wait - (now - moved_at))
            idle = tally.complete and not tally.in_flight and moved == last_moved
            idle = idle and len(self.hosts) > 0
            if idle and await self.hosts.soonest(gate, clock, remaining) > remaining:
                self.stop(MAX_WAIT)
            last_moved = moved
            await clock.sleep(self._progress.every)

    async def summary(self, stopped: str | None) -> CrawlSummary:
        """Return the summary of the crawl from what the gate knows, without any request."""
        tally = self.tally
        held_up = []
        for one in await self.hosts.busiest(self._gate, self._clock, _MAX_HELD_UP):
            holdup = one.holdup
            # An interval that has not passed is worth mentioning only if it ended the crawl.
            if holdup is not None and (holdup.reason != INTERVAL or stopped == MAX_WAIT):
                why = msgspec.structs.asdict(holdup)
                held_up.append(HeldUpHost(**why, origin=one.origin, urls=one.waiting))
        return CrawlSummary(
            fetched=tally.outcomes[Result.FETCHED],
            denied=tally.outcomes[Result.DENIED],
            failed=tally.outcomes[Result.FAILED],
            skipped=tally.skipped,
            refused_before=tally.refused,
            bytes=tally.size,
            unfinished=tally.total - tally.done,
            complete=tally.complete,
            stopped=stopped,
            held_up=tuple(sorted(held_up, key=lambda one: (-one.urls, one.origin))),
            sitemap_findings=tuple(tally.sitemaps),
        )


@asynccontextmanager
async def interruptible(
    work: Crawl, progress: Progress, grace: float
) -> AsyncIterator[Callable[[], bool]]:
    """Stop the crawl cleanly at the first Ctrl-C (or SIGTERM), and cancel it at the second.

    A cancelled crawl raises KeyboardInterrupt. Yields a function that returns True after the first
    signal. Both signals are handled by the loop: a KeyboardInterrupt that Python raises at any
    point of the code may interrupt a callback of the loop, whose task would then wait for ever. If
    SIGINT is ignored from the start, it stays ignored: the shell does that for background jobs
    (POSIX, Shell Command Language, section 2.11).
    """
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[int]", asyncio.current_task())
    signals: list[int] = []
    handlers: dict[int, Any] = {}

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) == 1:
            work.stop()
            progress.say(_stop_message(work.in_flight, grace))
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if number is signal.SIGINT and handler is signal.SIG_IGN:
            continue
        # On Windows, and outside of the main thread, KeyboardInterrupt ends the crawl.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop, number)
            handlers[number] = handler
    try:
        yield lambda: bool(signals)
    except BaseException:
        if len(signals) < 2:
            raise  # not caused by a second signal
    finally:
        for caught, handler in handlers.items():
            loop.remove_signal_handler(caught)
            if handler is not None:
                signal.signal(caught, handler)
    if len(signals) > 1:
        # If the work ended at the same moment, the cancellation is still to be delivered.
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        # The cancellations were handled. If they still counted, asyncio's runner would not make a
        # third Ctrl-C, which comes during the clean-up, into a KeyboardInterrupt.
        for _ in signals[1:]:
            task.uncancel()
        raise KeyboardInterrupt


def _stop_message(in_flight: Sequence[str], grace: float) -> str:
    """Return the message after a Ctrl-C: what is waited for, and how to end that wait."""
    if not in_flight:
        return "stopping"
    more = f" and {len(in_flight) - 1:,} more" if len(in_flight) > 1 else ""
    return (
        f"stopping: waiting at most {grace:g} s for {mask(in_flight[0])}{more}; "
        "a second Ctrl-C ends immediately"
    )


def _print_summary(job: Job, tally: Tally, end: CrawlSummary) -> None:
    """Print the summary: for people on stdout, with --json as the last line on stderr.

    With --json stdout has nothing but entries.
    """
    if job.as_json:
        print(json_text(end, sys.stderr), file=sys.stderr, flush=True)
        return
    lines = tally.summary(stored=job.manifest is not None)
    lines += end.lines(max_wait=job.max_wait, resumes=job.manifest is not None)
    print("\n".join(lines))
