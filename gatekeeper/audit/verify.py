"""Verifies audit records: the chains and their seals, each decision again, each start again.

What a chain can prove: every change before the last signed or anchored seal is found. Behind it an
edit or an insertion is found that leaves the lines behind it as they are; that the tail was removed
or written again is not, but for what a later start names. Without a signature nothing is proven
against the owner of the files.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from gatekeeper.audit.chain import CLOSED, OPEN, SEAL, SegmentName, chain_name
from gatekeeper.audit.decisions import ChainState, DecisionCheck, Judged, Judgement
from gatekeeper.audit.lines import (
    AnsweredLine,
    BlockLine,
    ErasureLine,
    GrantLine,
    Line,
    OmittedLine,
    OutcomeLine,
    PauseLine,
    RobotsLine,
    StartLine,
)
from gatekeeper.audit.pace import TOLERANCE, Pace
from gatekeeper.audit.reading import (
    AuditDifference,
    ChainEntry,
    ChainReader,
    ChainSummary,
    merged,
    moment_text,
    read_chains,
)
from gatekeeper.clock import utc
from gatekeeper.errors import counted
from gatekeeper.signing import PublicKey
from gatekeeper.urls import printable

MAX_DIFFERENCES = 100
"""Differences that are kept and shown; the others are counted."""
_MAX_CHAINS_SHOWN = 20
_LATE = 120.0
"""Seconds that a file may be used after it has expired: a lease may be late."""
_NAMED_BEFORE = 60.0
"""Seconds from the time in a chain's name to its start, at most."""
BOUNDARY = (
    "Every change before the last signed or anchored seal of a chain is found. Behind it, a line "
    "that was changed or added is found if the lines behind it were left as they are; a tail that "
    "was removed or written again is not, up to what a later start names.",
    "The last segments of a chain, or a whole chain, that were removed with their seals are missed "
    "only by who has anchored one of these seals.",
    "Without a signature nothing is proven against the owner of the files.",
    "No record proves that nothing was sent past the gate, or that its clock was right.",
)
"""What a verification proves, as it is printed with each result."""


class VerifyReport(msgspec.Struct, kw_only=True):
    """The result of a verification."""

    folders: list[str]
    version: str
    """The version of this package."""
    tolerance: float
    """Seconds by which clocks of two processes may differ."""
    signatures_checked: bool
    lines: int = 0
    first: str | None = None
    last: str | None = None
    kinds: dict[str, int] = {}
    texts: int = 0
    decisions: int = 0
    """DecisionCheck that were made again."""
    decisions_not_checked: dict[str, int] = {}
    other_version: dict[str, int] = {}
    """DecisionCheck that another version of the parser made otherwise, by that version."""
    requests: int = 0
    unused_leases: int = 0
    without_outcome: int = 0
    """Requests that count from their grant, because their outcome is not in the record."""
    scopes: int = 0
    starts: int = 0
    """Pairs of starts that were compared."""
    omitted: int = 0
    """Lines that the gate left out, as it says."""
    erased: int = 0
    erased_by: list[str] = []
    seals: int = 0
    removed_segments: int = 0
    """Segments of which the seal alone was kept."""
    chains: list[ChainSummary] = []
    differences: list[AuditDifference] = []
    found: int = 0
    """The number of differences, those that are not listed included."""
    notes: list[str] = []
    boundary: Sequence[str] = BOUNDARY

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.found


def verify(
    folders: Iterable[Path],
    *,
    version: str,
    keys: Sequence[PublicKey] = (),
    tolerance: float = TOLERANCE,
) -> VerifyReport:
    """Verify the records in the folders, as those of one fleet.

    `version`: that of this package; where another one decided, a difference is only noted.
    `keys`: every seal has to be signed with one of them; without any, signatures are not checked.
    `tolerance`: seconds by which the clocks of two processes may differ. Raises ConfigError for a
    folder that can't be read or has no chain.
    """
    return Verification(list(folders), version, keys, tolerance).run()


class Verification:
    """One run of `verify`, and what it knows at its end."""

    def __init__(
        self, folders: list[Path], version: str, keys: Sequence[PublicKey], tolerance: float
    ) -> None:
        self.result: VerifyReport = VerifyReport(
            folders=[str(one) for one in folders],
            version=version,
            tolerance=tolerance,
            signatures_checked=bool(keys),
        )
        self.readers: list[ChainReader] = read_chains(folders, self.add, keys=keys)
        self.states: list[ChainState] = [
            ChainState(one.files.folder, partial=1 not in one.files.segments)
            for one in self.readers
        ]
        self.decisions: DecisionCheck = DecisionCheck()
        self.pace: Pace = Pace(tolerance)
        self.erasures: dict[tuple[Path, str], list[tuple[int, int, int, int]]] = {}
        """By folder and segment: first and last line, and the chain and number that say so."""

    def add(self, *found: AuditDifference) -> None:
        """Count differences, and keep them if there are not too many."""
        differences = [one for one in found if not _is_removed(one)]
        self.result.found += len(differences)
        room = MAX_DIFFERENCES - len(self.result.differences)
        self.result.differences.extend(differences[:room])

    def differ(self, what: str, entry: ChainEntry, text: str) -> None:
        """Report a difference at a line."""
        n = 0 if entry.line is None else entry.line.n
        self.add(AuditDifference(what, entry.file, n, text))

    def run(self, observe: Callable[[ChainEntry, Line], object] | None = None) -> VerifyReport:
        """Read everything, and return the result. `observe` is called with each line."""
        result, kinds = self.result, Counter[str]()
        last = 0.0
        for entry in merged(self.readers):
            line = entry.line
            if line is None:
                self.add(*self.pace.end(entry.chain))
                self.states[entry.chain] = ChainState(Path())  # its lines are not needed any more
                continue
            result.first = result.first or moment_text(utc(entry.wall))
            last = entry.wall
            kinds[type(line).__struct_config__.tag] += 1  # type: ignore[index]
            self.look(entry, line)
            if observe is not None:
                observe(entry, line)
        result.last = result.first and moment_text(utc(last))
        result.kinds = dict(kinds)
        self.compare_erasures()
        self.sum_up()
        return result

    # --- lines ----------------------------------------------------------------------------------

    def look(self, entry: ChainEntry, line: Line) -> None:
        """Check one line by its kind."""
        state, wall = self.states[entry.chain], entry.wall
        if line.n == 1:
            self.check_begin(entry, line)
        match line:
            case GrantLine():
                judged = self.judge(entry, line)
                self.check_interval(entry, line, judged)
                self.add(*self.pace.grant(line, wall, entry.chain, entry.file))
            case OutcomeLine():
                self.add(*self.pace.outcome(line, entry.chain))
            case AnsweredLine():
                self.judge(entry, line)
            case RobotsLine():
                if wrong := self.decisions.robots(state, line):
                    self.differ("witness", entry, wrong)
            case BlockLine():
                self.pace.block(line, wall, entry.chain)
            case PauseLine():
                self.pace.pause(line, wall, entry.chain)
            case OmittedLine():
                self.result.omitted += line.count
            case ErasureLine():
                self.erasure(entry, line)
            case _:
                state.note(line)

    def check_begin(self, entry: ChainEntry, line: Line) -> None:
        """Check the first line of a chain."""
        if isinstance(line, StartLine):
            files = self.readers[entry.chain].files
            named = chain_name(line.host, line.pid, files.started)
            if files.name != named or abs(files.started - entry.wall) > _NAMED_BEFORE:
                self.differ("chain", entry, "its files are not named after its start")
        elif not isinstance(line, ErasureLine):
            self.differ("chain", entry, "its chain does not begin with a start")

    def judge(self, entry: ChainEntry, line: Judged) -> Judgement:
        """Make a decision again, and report how it differs."""
        state = self.states[entry.chain]
        judged = self.decisions.judge(state, line)
        if not judged.wrong:
            return judged
        if self.by_other(state):
            version = printable(state.version or "unknown", 40)
            self.result.other_version[version] = self.result.other_version.get(version, 0) + 1
        self.differ_by_text("decision", entry, judged.wrong)
        return judged

    def by_other(self, state: ChainState) -> bool:
        """Return True if another version of the parser decided, or it is not known which one."""
        return state.partial if state.version is None else state.version != self.result.version

    def differ_by_text(self, what: str, entry: ChainEntry, text: str) -> None:
        """Report how a line differs from what its file says; only note it if another version of
        the parser read that."""
        if not self.by_other(self.states[entry.chain]):
            self.differ(what, entry, text)
        elif len(self.result.notes) < MAX_DIFFERENCES and entry.line is not None:
            note = AuditDifference(what, entry.file, entry.line.n, text)
            self.result.notes.append(str(note))

    def check_interval(self, entry: ChainEntry, line: GrantLine, judged: Judgement) -> None:
        """Check that the interval in force of the host is at least what its file and the operator's
        rule for it ask for, and that the file was in force."""
        scope = next((one for one in line.scopes if one.scope == judged.host), None)
        # A file lasts for one lease at least, however long the interval is.
        if judged.expired > _LATE + (scope.interval if scope is not None else 0.0):
            text = f"its file had expired {judged.expired:.0f} s before"
            self.differ("decision", entry, text)
        if scope is None:
            if judged.host or not line.scopes:  # of a digest the host is not known
                self.differ("pace", entry, f"it has no scope for its host {judged.host}".rstrip())
            return
        state = self.states[entry.chain]
        asked, by = min(judged.asked or 0.0, state.cap(line.t)), "its robots.txt asks"
        if (own := state.own_interval(judged.host, line.t)) > asked:
            asked, by = own, "the override asks"
        if scope.interval >= asked - 1e-6:
            return
        text = (
            f"the interval in force of {judged.host} is {scope.interval:.3f} s "
            f"({printable(scope.source, 60)}), but {by} for {asked:.3f} s"
        )
        self.differ_by_text("pace", entry, text)

    # --- erased lines ---------------------------------------------------------------------------

    def erasure(self, entry: ChainEntry, line: ErasureLine) -> None:
        """Note which lines were erased, and by whom."""
        folder = self.readers[entry.chain].files.folder
        spans = [(first, last, entry.chain, line.n) for first, last in line.lines]
        self.erasures.setdefault((folder, line.segment), []).extend(spans)
        if len(self.result.erased_by) < MAX_DIFFERENCES:
            at = moment_text(utc(entry.wall))
            said = line.host, line.by, line.reason, line.segment
            host, by, why, segment = (printable(one, 200) for one in said)
            self.result.erased_by.append(f"{at} {by}: {host} ({why}), in {segment}")

    def compare_erasures(self) -> None:
        """Check that an erasure names each erased line: a signed one, if seals have to be."""
        for reader in self.readers:
            for segment, spans in reader.placeholders.items():
                self.result.erased += sum(last - first + 1 for first, last in spans)
                said = self.erasures.get((reader.files.folder, segment), ())
                named = deque(sorted(one[:2] for one in said if self.is_signed(*one[2:])))
                n = 1  # the first line that is not known to be named
                for first, last in spans:
                    n = max(n, first)
                    while named and named[0][0] <= n:
                        n = max(n, named.popleft()[1] + 1)
                    if n <= last:
                        text = "it was erased, but no erasure that holds names it"
                        name = str(reader.files.folder / segment)
                        self.add(AuditDifference("erasure", name, n, text))

    def is_signed(self, chain: int, n: int) -> bool:
        """Return True if a line stands before a good seal of its chain, or no seal has to be."""
        return not self.result.signatures_checked or n < self.readers[chain].summary.sealed

    # --- the result -----------------------------------------------------------------------------

    def sum_up(self) -> None:
        """Fill in the result from what the parts have counted."""
        result, pace = self.result, self.pace
        result.chains = [one.summary for one in self.readers]
        result.lines = sum(one.lines for one in result.chains)
        result.texts = len(self.decisions.texts)
        result.decisions = self.decisions.checked
        result.decisions_not_checked = dict(self.decisions.not_checked)
        result.requests, result.unused_leases = pace.requests, pace.unused
        result.without_outcome, result.starts = pace.without_outcome, pace.compared
        result.scopes = len(pace.scopes)
        result.seals = sum(one.seals for one in self.readers)
        result.removed_segments = sum(one.kept_seals for one in self.readers)


def _is_removed(difference: AuditDifference) -> bool:
    """Return True if the text that a line names may be missing because `audit.keep` has removed
    both since the line was read."""
    path = Path(difference.file)
    name = SegmentName.parse(path.name)
    if name is None or difference.what not in ("witness", "decision"):
        return False
    forms = (path.with_name(str(name._replace(suffix=one))) for one in (OPEN, CLOSED, SEAL))
    return [one.exists() for one in forms] == [False, False, True]


# --- for people -----------------------------------------------------------------------------------


def lines_of(result: VerifyReport) -> Iterator[str]:
    """Yield the result as lines for people: what differs, what was checked, what that proves."""
    for one in result.differences:
        yield str(one)
    if (more := result.found - len(result.differences)) > 0:
        yield f"... and {more:,} more"
    yield from _counts(result)
    yield from _chain_lines(result)
    yield from (f"note: {note}" for note in result.notes)
    yield from result.boundary
    yield "nothing differs" if result.ok else counted(result.found, "difference")


def _counts(result: VerifyReport) -> Iterator[str]:
    span = f", {result.first} to {result.last}" if result.first else ""
    lines, chains = counted(result.lines, "line"), counted(len(result.chains), "chain")
    yield f"{lines} in {chains}{span}; {counted(result.texts, 'text')}"
    yield (
        f"{counted(result.requests, 'request')} in {counted(result.scopes, 'scope')}, "
        f"{counted(result.starts, 'interval')} compared; "
        f"clocks of two processes may differ by {result.tolerance:g} s"
    )
    if result.without_outcome:
        yield f"{counted(result.without_outcome, 'request')} without an outcome"
    yield f"{counted(result.decisions, 'decision')} made again"
    for why, count in sorted(result.decisions_not_checked.items()):
        yield f"{counted(count, 'decision')} not made again: {why}"
    for version, count in sorted(result.other_version.items()):
        decisions = counted(count, "decision")
        yield f"{decisions} of version {version}: {result.version} decides otherwise"
    if result.omitted:
        omitted = counted(result.omitted, "line")
        yield f"{omitted} left out by the gate (audit.max_rate, or a full disk)"
    if result.erased:
        yield f"{counted(result.erased, 'line')} erased"
        yield from (f"erased: {one}" for one in result.erased_by)
    if result.removed_segments:
        yield f"{counted(result.removed_segments, 'segment')} removed by audit.keep; the seals hold"


def _chain_lines(result: VerifyReport) -> Iterator[str]:
    for one in result.chains[:_MAX_CHAINS_SHOWN]:
        if one.sealed:
            signed = "not signed"
            if one.key is not None:
                checked = "checked" if result.signatures_checked else "not checked"
                signed = f"signed by {printable(one.key, 60)}, {checked}"
            text = f"sealed up to line {one.sealed:,} ({one.sealed_at}, {signed})"
        else:
            text = "without a seal"
        text += f", {counted(one.behind, 'line')}{' behind it' if one.sealed else ''}"
        if one.torn:
            text += ", ends in a torn line"
        yield f"{one.chain}: {text}"
    if (more := len(result.chains) - _MAX_CHAINS_SHOWN) > 0:
        yield f"... and {counted(more, 'more chain')}"
