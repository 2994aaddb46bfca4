"""One crawl from arguments to exit code: files, session, signals, progress and summary."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gatekeeper import __version__
from gatekeeper.cli import DENIED, OK, json_text
from gatekeeper.cli.crawl.engine import Crawl, Place, headers_of
from gatekeeper.cli.crawl.manifest import Entry, Folder, Manifest, Result, refuse_links
from gatekeeper.cli.crawl.output import Response, Warc, warc_writer
from gatekeeper.cli.crawl.progress import (
    TURN,
    Holdup,
    Hosts,
    Progress,
    Speedometer,
    Tally,
    Told,
)
from gatekeeper.cli.crawl.sources import MANIFEST, STATE, Limits, Listed, given, opened
from gatekeeper.clock import Clock, SystemClock
from gatekeeper.config import Config
from gatekeeper.decision import Decision
from gatekeeper.errors import ConfigError, StorageError
from gatekeeper.gate import Gatekeeper, internals
from gatekeeper.queue import PoliteQueue
from gatekeeper.session import polite_session, session_gate
from gatekeeper.storage.journal import FileLock
from gatekeeper.urls import mask

# --- the end ---------------------------------------------------------------------------------

MAX_WAIT = "max_wait"
INTERRUPTED_BY_SIGNAL = "interrupted"
_MOST_HELD = 1_000
"""Maximum origins to name in the JSON summary; people are shown the first 20."""


class HeldUp(msgspec.Struct, frozen=True):
    """An origin with URLs that could not be requested."""

    origin: str
    urls: int
    reason: str
    """One word: a decision's reason, or `turn` if only the interval was in the way."""
    why: str
    retry_at: datetime | None
    """The time from which it may be requested; None: not before an operator allows it."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
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
    held_up: tuple[HeldUp, ...]
    """The origins with the most unfinished URLs."""

    def lines(self, *, max_wait: float, resumes: bool, most: int = 20) -> list[str]:
        """Return the lines about unfinished URLs, for people; none if the crawl is complete."""
        if not self.unfinished and self.complete:
            return []
        parts = [f"{self.unfinished:,} unfinished"] if self.unfinished else []
        if not self.complete:
            parts.append("the list was not read to its end")
        if self.stopped == MAX_WAIT:
            parts.append(f"nobody's turn comes within --max-wait {max_wait:g} s")
        parts.append(
            "run the same command again to go on"
            if resumes
            else "the next run begins anew: only -o DIR or --warc FILE remembers what is done"
        )
        lines = [f"stopped: {'; '.join(parts)}"]
        for held in self.held_up[:most]:
            why = Holdup(held.reason, held.why, held.retry_at)
            lines.append(f"  {held.urls:>6,}  {held.origin}  {why}")
        if len(self.held_up) > most:
            lines.append(f"          and {len(self.held_up) - most:,} more hosts")
        rest = self.unfinished - sum(held.urls for held in self.held_up)
        if rest and self.held_up:
            lines.append(f"  {rest:>6,}  whose turn had not come, or was cut short")
        return lines


async def ending(
    tally: Tally, hosts: Hosts, gate: Gatekeeper, clock: Clock, stopped: str | None
) -> Ending:
    """Return the summary of a crawl from what the gate knows, without any request."""
    held = []
    for turn in await hosts.busiest(gate, clock, _MOST_HELD):
        holdup = turn.holdup
        # An interval that has not passed is worth mentioning only if it ended the crawl.
        if holdup is not None and (holdup.reason != TURN or stopped == MAX_WAIT):
            held.append(
                HeldUp(turn.origin, turn.waiting, str(holdup.reason), holdup.text, holdup.until)
            )
    return Ending(
        fetched=tally.outcomes[Result.FETCHED],
        denied=tally.outcomes[Result.DENIED],
        failed=tally.outcomes[Result.FAILED],
        skipped=tally.skipped,
        refused_before=tally.refused,
        bytes=tally.size,
        unfinished=tally.total - tally.done,
        complete=tally.complete,
        stopped=stopped,
        held_up=tuple(sorted(held, key=lambda one: (-one.urls, one.origin))),
    )


# --- the run ---------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

INTERRUPTED = 130
_SHOWN_TURNS = 8
_MAX_QUEUED = 1_000_000
_BETWEEN_COLLECTIONS = 20_000
"""New objects after which the garbage collector runs; they take some megabytes."""
_FOR_ROOM = 300.0
"""Seconds for which a crawl waits for room on the disk, or --max-wait if that is less."""


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of one crawl. Times are seconds."""

    identity: str
    config: Config
    urls: tuple[str, ...] = ()
    input: str | None = None
    output: Path | None = None
    warc: Path | None = None
    limits: Limits = field(default_factory=Limits)
    timeout: float = 300.0
    max_wait: float = 3600.0
    as_json: bool = False
    retry_denied: bool = False
    """Ask again about URLs that an earlier run was denied."""

    @property
    def manifest(self) -> Path | None:
        """The path of the manifest: in the output folder, or next to the WARC file."""
        if self.output is not None:
            return self.output / MANIFEST
        return self.warc.with_name(f"{self.warc.name}.{MANIFEST}") if self.warc else None

    @property
    def kept_config(self) -> Config:
        """The configuration, with a storage path next to the manifest unless one is set.

        It stores the hosts' clocks, so that a resumed crawl still waits for them (promise 8).
        """
        if self.manifest is None or self.config.storage.path is not None:
            return self.config
        name = self.manifest.name.removesuffix(MANIFEST) + STATE
        path = str(self.manifest.with_name(name))
        storage = msgspec.structs.replace(self.config.storage, path=path)
        return msgspec.structs.replace(self.config, storage=storage)

    @property
    def archive(self) -> str | None:
        """The path of the WARC file in the manifest, which tells apart files of the same name."""
        if self.warc is None or self.manifest is None:
            return None
        warc, folder = self.warc.resolve(), self.manifest.parent.resolve()
        try:
            return Path(os.path.relpath(warc, folder)).as_posix()
        except ValueError:  # another drive
            return warc.as_posix()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely, and not over imported modules.

    Reference counting frees the objects of a page when it ends, and a hundred pages in progress
    are not garbage.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def crawl(job: Job, progress: Progress, *, clock: Clock | None = None, **session: Any) -> int:
    """Run a crawl and return the exit code. `session` arguments are passed to `polite_session`.

    Raises ConfigError, StorageError or OSError for files that can't be used or read.
    """
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        listed = stack.enter_context(opened(job.input))  # create nothing if the list is missing
        place = _place(job, stack)
        client = await stack.enter_async_context(
            polite_session(
                user_agent=job.identity,
                config=job.kept_config,
                clock=clock,
                # A host that does not accept connections must not occupy a worker for long.
                timeout=aiohttp.ClientTimeout(
                    total=job.timeout, sock_connect=job.config.fetch.connect_timeout
                ),
                auto_decompress=place.warc is None,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers_of(record=place.warc is not None),
                response_class=aiohttp.ClientResponse if place.warc is None else Response,
                **session,
            )
        )
        gate = session_gate(client)
        work = _work(job, client, place, clock, progress)
        stack.enter_context(progress)
        async with _interruptible(work, progress, job.limits.grace) as interrupted:
            await _watched(work, job, listed, gate, progress, clock)
        stopped = work.stopped_by or (INTERRUPTED_BY_SIGNAL if interrupted() else None)
        end = await ending(work.tally, work.hosts, gate, clock, stopped)
    _say_summary(job, work.tally, end)
    if interrupted():
        return INTERRUPTED
    return OK if work.tally.clean else DENIED


def _place(job: Job, stack: AsyncExitStack) -> Place:
    """Lock the output files, then open and repair them."""
    if job.warc is not None:
        warc_writer()  # raises if the extra is missing, before any file is created
    _lock(job, stack)
    path = job.manifest
    if path is None:
        return Place()
    archive = job.archive
    begun = job.warc is not None and job.warc.exists() and job.warc.stat().st_size > 0
    if job.warc is not None and not begun:
        archive = ""
    manifest = stack.enter_context(Manifest(path, archive=archive, retry_denied=job.retry_denied))
    if manifest.unreadable:
        _log.warning(
            "%s: %d of its lines are no entries of a crawl: they are left alone, and what they "
            "may speak of is fetched again",
            *(path, manifest.unreadable),
        )
    warc = None
    if job.warc is not None:
        last = manifest.warc_places.get(archive) if archive else None
        made = Warc(job.warc, software=f"gatekeeper/{__version__}", name=job.archive, last=last)
        warc = stack.enter_context(made)
    return Place(manifest, Folder(job.output) if job.output is not None else None, warc)


def _lock(job: Job, stack: AsyncExitStack) -> None:
    """Lock the folder and the WARC file before either is read.

    Otherwise a record that another process is writing would look like a torn one. Raises
    StorageError, which names the file and the process that holds the lock.
    """
    if job.output is not None:
        _make_folder("-o", job.output, job.output)
        refuse_links(job.output, MANIFEST, STATE)
    if job.warc is not None:
        if job.warc.is_dir():
            raise ConfigError(f"--warc {job.warc}: is a directory; name a file in it")
        _make_folder("--warc", job.warc, job.warc.parent)
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
        raise ConfigError(f"{option} {given}:{inner} is no directory; name another one") from error
    except OSError as error:
        raise ConfigError(
            f"{option} {given}: {folder} can't be made ({error.strerror}); name a place where "
            "this user may write"
        ) from error


def _work(
    job: Job, client: aiohttp.ClientSession, place: Place, clock: Clock, progress: Progress
) -> Crawl:
    gate, told = session_gate(client), Told(progress.say)

    def report(entry: Entry) -> None:
        if job.as_json:
            print(json_text(entry), flush=True)
        progress.entry(entry)

    def deferred(decision: Decision) -> None:
        told.tell(decision.origin, Holdup.of(decision))

    async def set_back(url: str) -> None:
        turn = await work.hosts.turn(url, gate, clock)
        if turn.holdup is not None:
            told.tell(turn.origin, turn.holdup, turn.slowed)

    work = Crawl(
        client,
        lambda on_denied: PoliteQueue(
            gate, maxsize=_MAX_QUEUED, on_denied=on_denied, on_deferred=deferred
        ),
        clock=clock,
        limits=job.limits,
        place=place,
        on_entry=report,
        on_setback=set_back,
    )
    return work


@asynccontextmanager
async def _interruptible(
    work: Crawl, progress: Progress, grace: float
) -> AsyncIterator[Callable[[], bool]]:
    """Stop the crawl cleanly at the first Ctrl-C (or SIGTERM), and cancel it at the second.

    A cancelled crawl raises KeyboardInterrupt. Yields a function that returns True after the first
    signal. Both signals are handled by the loop: a KeyboardInterrupt that Python raises at any
    point of the code may interrupt a callback of the loop, whose task would then wait for ever. If
    SIGINT is ignored from the start, it stays ignored: the shell does that for background jobs
    (POSIX, Shell Command Language, section 2.11).
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    caught: list[int] = []
    before: dict[int, Any] = {}

    def stop(number: int) -> None:
        caught.append(number)
        if len(caught) == 1:
            work.stop()
            progress.say(_farewell(work.in_flight, grace))
        elif task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if number is signal.SIGINT and handler is signal.SIG_IGN:
            continue
        try:
            loop.add_signal_handler(number, stop, number)
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # Windows, or not the main thread: KeyboardInterrupt ends the crawl
        before[number] = handler
    try:
        yield lambda: bool(caught)
    except BaseException:
        if len(caught) < 2:
            raise  # not caused by a second signal
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            if handler is not None:
                signal.signal(each, handler)
    if len(caught) > 1:
        # If the work ended at the same moment, the cancellation is still to be delivered.
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        raise KeyboardInterrupt


def _farewell(in_flight: Sequence[str], grace: float) -> str:
    """Return the message after a Ctrl-C: what is waited for, and how to end that wait."""
    if not in_flight:
        return "stopping"
    more = f" and {len(in_flight) - 1:,} more" if len(in_flight) > 1 else ""
    return (
        f"stopping: {mask(in_flight[0])}{more} under way, at most {grace:g} s are waited; "
        "a second Ctrl-C ends at once"
    )


async def _watched(
    work: Crawl, job: Job, listed: Listed | None, gate: Gatekeeper, progress: Progress, clock: Clock
) -> None:
    """Run the crawl, and show its progress until it ends."""
    speed = Speedometer()
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(work, gate, progress, clock, speed, job.max_wait))
            await work.run(given(job.urls, listed))
            watching.cancel()
            progress.show(work.tally, (), speed.read(clock.monotonic(), work.tally, ()))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    """Return the error that ended a task group; the command prints it as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _watch(
    work: Crawl,
    gate: Gatekeeper,
    progress: Progress,
    clock: Clock,
    speed: Speedometer,
    max_wait: float,
) -> None:
    """Show the progress periodically; stop a crawl that has only waited for `max_wait` seconds.

    Raises StorageError if the crawl waits for room on the disk for too long.
    """
    before, moved_at, written_at = (-1, -1), 0.0, 0.0
    while True:
        tally, now = work.tally, clock.monotonic()
        moved = tally.done, tally.begun
        why = internals(gate).storage_failing
        if moved != before:
            moved_at = now
        if why is None or moved != before:
            written_at = now
        elif (waited := now - written_at) >= min(max_wait, _FOR_ROOM):
            path = str(gate.config.storage.path)
            why = why if path in why else f"{path}: {why}"
            raise StorageError(
                f"{why}: for {waited:.0f} s no clock of a host could be kept, and nothing is asked "
                "without; make room there and run it again: it goes on where it stopped"
            )
        turns = await work.hosts.busiest(gate, clock, _SHOWN_TURNS)
        progress.show(tally, turns, speed.read(now, tally, turns))
        # If nothing moved since the last look, stop unless a turn comes in time. The deferrals of a
        # host may each be short; together they are one wait, which started with the last move.
        left = max(0.0, max_wait - (now - moved_at))
        idle = tally.complete and not tally.in_flight and moved == before and len(work.hosts)
        if idle and await work.hosts.soonest(gate, clock, left) > left:
            work.stop(MAX_WAIT)
        before = moved
        await clock.sleep(progress.every)


def _say_summary(job: Job, tally: Tally, end: Ending) -> None:
    """Print the summary: for people on stdout, with --json as the last line on stderr.

    With --json stdout has nothing but entries.
    """
    if job.as_json:
        print(json_text(end, sys.stderr), file=sys.stderr, flush=True)
        return
    lines = tally.summary(kept=job.manifest is not None)
    lines += end.lines(max_wait=job.max_wait, resumes=job.manifest is not None)
    print("\n".join(lines))
