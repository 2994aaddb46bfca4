"""Makes each decision of an audit record again, from the texts that it keeps.

A decision is compared with what the file in force asks for: verdict, reason and line, for that URL
and agent, by the settings that the start of the chain names. So is the interval of each grant.
What a record can't show is counted by its reason, as `not_checked`.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from cachetools import LRUCache
from msgspec.structs import replace

from gatekeeper.audit.chain import MASKED, MAX_TEXT, digest_of, text_path
from gatekeeper.audit.files import open_segment
from gatekeeper.audit.lines import (
    AnsweredLine,
    ErasedLine,
    GrantLine,
    Line,
    OverrideLine,
    RobotsLine,
    SettingsLine,
    StartLine,
)
from gatekeeper.audit.reading import DAMAGED, why
from gatekeeper.config import FetchConfig, PacingConfig, RobotsConfig
from gatekeeper.decision import Reason, Verdict
from gatekeeper.errors import InvalidURL
from gatekeeper.fetching.outcomes import (
    Fallback,
    Outcome,
    OutcomeRow,
    classify_body,
    fallback_while_unreachable,
    parser_input,
)
from gatekeeper.gate.decider import TRANSIT_SECONDS, rule_on
from gatekeeper.pacing.scopes import LONGEST
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.patterns import is_robots_txt
from gatekeeper.urls import Target, parse, printable

MAX_OCTETS: Final = 67_108_864
"""Octets of a text that are read. `fetch.max_body` is far below it."""
CACHED_OCTETS: Final = 67_108_864
"""Octets of texts whose policies are kept."""
_CACHED_STARTS: Final = 1_000
_POLICY_OCTETS: Final = 4_000
"""What a policy takes beside its text, roughly."""
_MOMENT: Final = timedelta(seconds=TRANSIT_SECONDS)
_OWN: Final = frozenset(
    {
        *(Reason.STORAGE, Reason.FLEET, Reason.BUDGET, Reason.INTERNAL, Reason.OVERLOADED),
        *(Reason.OWN_LEASE, Reason.UNKNOWN, Reason.HOST_BLOCKED, Reason.HOST_PAUSED),
        *(Reason.LOCAL_FAULT, Reason.GATE_UNREACHABLE, Reason.CLOSING),
    }
)
"""Deferrals for a cause that no file shows."""
_GUARD: Final = frozenset({Reason.BLOCKED, Reason.INVALID_URL, Reason.EGRESS_POLICY})
_NOT_THERE: Final = "its file is not in the record"
_BY_TEXT: Final = frozenset(
    {Reason.RULE, Reason.NO_RULE, Reason.OUTSIDE_VISIT_TIME, Reason.EMPTY_FILE}
)
_REPLACED: Final = timedelta(seconds=5.0)
"""Time for which the file before may have decided: the loop was busy, or a worker process asked."""
_MAX_RULES: Final = 16
"""Overrides of one match that are kept."""
_SPECIAL: Final = re.compile(r"[?*$]")
"""A rule without these characters says the same with any query; so does one whose part before the
first of them does not fit the path."""
_S = TypeVar("_S", bound=msgspec.Struct)

Judged = GrantLine | AnsweredLine


class KnownFile(NamedTuple):
    """What is known about the robots.txt of an origin at one moment."""

    current: RobotsLine
    good: RobotsLine | None
    """The last one that was a file, or a definite absence."""
    before: KnownFile | None = None
    """What was known before the current one."""


class ChainState:
    """What the lines of one chain have said so far."""

    def __init__(self, folder: Path, *, partial: bool = False) -> None:
        """`partial`: lines were removed or erased, so what they said is not known."""
        self.folder: Path = folder
        self.partial: bool = partial
        self.files: dict[str, KnownFile] = {}
        """By origin."""
        self.overrides: dict[str, list[OverrideLine]] = {}
        """By their match, the one in force last; once it has ended, the one before it is again.
        Those that an `ended` line ended stay, with its time as their end."""
        self.urls: str = "full"
        self.version: str | None = None
        """Of the package that wrote it; None: its start was removed."""
        self.robots: RobotsConfig = RobotsConfig()
        self.fetch: FetchConfig = FetchConfig()
        self.pacing: PacingConfig = PacingConfig()
        self._earlier: PacingConfig = self.pacing
        self._reloaded: datetime | None = None
        """When a reload replaced the earlier settings."""

    def note(self, line: Line) -> None:
        """Apply a line that changes how later ones are read."""
        match line:
            case StartLine():
                self.urls, self.version = line.urls, line.gatekeeper
                self.robots = _section(line.settings, "robots", RobotsConfig)
                self.fetch = _section(line.settings, "fetch", FetchConfig)
                self.pacing = _section(line.settings, "pacing", PacingConfig)
            case SettingsLine():
                self._earlier, self._reloaded = self.pacing, line.t
                self.pacing = _section(line.settings, "pacing", PacingConfig)
            case OverrideLine() if line.ended:  # a decision that is written now may be older
                rules = self.overrides.get(line.match, [])
                rules[:] = [replace(one, until=min(one.until or line.t, line.t)) for one in rules]
            case OverrideLine():
                rules = self.overrides.setdefault(line.match, [])
                rules.append(line)
                del rules[:-_MAX_RULES]
            case ErasedLine():
                self.partial = True

    def read(self, digest: str) -> RobotsTxt:
        """Parse a text as the gate did. Raises WrongText."""
        body, limit = parser_input(read_text(self.folder, digest)), self.fetch.max_body
        return RobotsTxt.parse(body, dialect=self.robots.dialect, limit=limit)

    def own_interval(self, host: str, at: datetime) -> float:
        """Return the interval of the override of a host, in seconds; 0 without one. A lease
        may have been granted just before it came into force, or another one ended."""
        known: list[float] = []
        for found in (self.override_of(host, moment) for moment in (at - _MOMENT, at)):
            rule = None if found is None or at - found.t < _MOMENT else found.rule
            own = None if rule is None else rule.get("interval")
            known.append(own if isinstance(own, int | float) else 0.0)
        return min(known)

    def cap(self, at: datetime) -> float:
        """Return the longest interval that a file is obeyed in, in seconds. A lease may have been
        granted just before a reload."""
        recent = self._reloaded is not None and at - self._reloaded < _REPLACED
        caps = (self.pacing.max_interval, self._earlier.max_interval if recent else None)
        return min((one for one in caps if one is not None), default=LONGEST)

    def override_of(self, host: str, at: datetime) -> OverrideLine | None:
        """Return the most specific override of a host that is in force, or None."""
        if not self.overrides:
            return None
        names, rest = [host], host
        while "." in rest:
            rest = rest.partition(".")[2]
            names.append(f"*.{rest}")
        for name in (*names, "*"):
            for found in reversed(self.overrides.get(name, ())):
                if found.until is None or at < found.until:
                    return found
        return None


def _section(settings: dict[str, Any], name: str, kind: type[_S]) -> _S:
    """Return a section of the settings. Those that this version does not know are left out."""
    given = settings.get(name)
    fields = set(kind.__struct_fields__)
    known = {k: v for k, v in given.items() if k in fields} if isinstance(given, dict) else {}
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError:
        return kind()


class Judgement(NamedTuple):
    """What came of making a decision again."""

    wrong: str = ""
    """How it differs; empty if it does not."""
    asked: float | None = None
    """Seconds between two requests that the file asks for at least, if a file decided."""
    host: str = ""
    """The host of the URL, if that is known."""
    expired: float = 0.0
    """Seconds since the file expired that decided."""


class WrongText(Exception):
    """A text that a line names is not there, or not that text."""


class DecisionCheck:
    """Makes decisions again. One object serves all chains of a verification."""

    def __init__(self) -> None:
        self.checked: int = 0
        self.not_checked: Counter[str] = Counter()
        """Decisions that can't be made again, by the reason."""
        self._policies: LRUCache[tuple[Any, ...], tuple[Policy, float | None]] = LRUCache(
            CACHED_OCTETS, getsizeof=lambda one: one[0].robots.size + _POLICY_OCTETS
        )
        self._starts: LRUCache[tuple[Any, ...], tuple[bytes, ...]] = LRUCache(_CACHED_STARTS)
        """Of a text, how the rules begin that a query may matter to."""
        self.texts: set[bytes] = set()
        """The digests of the texts that have them."""

    # --- texts --------------------------------------------------------------------------------

    def robots(self, state: ChainState, line: RobotsLine) -> str:
        """Note a file that came into force. Return what is wrong with it, or ""."""
        outcome = Outcome.named(line.outcome)
        good: RobotsLine | None = line
        before = state.files.get(line.origin)
        if not outcome.good:
            good = None if before is None else before.good
            if line.text is not None and (good is None or good.text != line.text):
                # It failed, and an earlier text is known, such as one from the state file.
                good = replace(line, outcome=line.good or _outcome_of(state, line.text))
            elif good is None and line.good is not None:  # there was no file, says the state file
                good = replace(line, outcome=line.good)
        before = None if before is None else before._replace(before=None)
        state.files[line.origin] = KnownFile(line, good, before)
        if outcome is Outcome.INTERNAL and line.outcome != outcome.row.name:
            return f"an outcome that this version does not know: {printable(line.outcome, 60)}"
        if line.text is not None and bytes.fromhex(line.text) not in self.texts:
            try:
                read_text(state.folder, line.text)
            except WrongText as error:
                return str(error)
            self.texts.add(bytes.fromhex(line.text))
        return ""

    def _policy(self, state: ChainState, digest: str, agent: str) -> tuple[Policy, float | None]:
        """Return the policy of a text, and its interval unless that changes with the hour."""
        settings = state.robots
        key = (digest, agent, settings, state.fetch.max_body)
        found: tuple[Policy, float | None] | None = self._policies.get(key)
        if found is None:
            policy = settings.policy(state.read(digest), agent)
            found = policy, None if policy.request_rates else policy.interval(_ANY_TIME)
            if policy.robots.size + _POLICY_OCTETS <= CACHED_OCTETS:
                self._policies[key] = found
        return found

    # --- decisions ----------------------------------------------------------------------------

    def judge(self, state: ChainState, line: Judged) -> Judgement:
        """Make the decision of a line again."""
        reason = line.reason
        if reason in _OWN or reason in _GUARD:
            if line.verdict == Verdict.ALLOW:
                return Judgement(f"allowed with the reason {reason}, which never allows")
            self.not_checked["guard" if reason in _GUARD else "own limits"] += 1
            return Judgement()
        if state.urls == "digest":
            self.not_checked["urls are digests"] += 1
            return Judgement()
        try:
            target = parse(line.url)
        except InvalidURL as error:
            return Judgement(f"its URL is none: {error}")
        if isinstance(line, GrantLine) and line.robots:
            own = is_robots_txt(target.path)
            self.not_checked["requests for robots.txt" if own else "redirects of robots.txt"] += 1
            return Judgement(host=target.host)
        try:
            return self._compare(state, line, target)
        except WrongText as error:
            return Judgement(str(error), host=target.host)

    def _compare(self, state: ChainState, line: Judged, target: Target) -> Judgement:
        said = _Said(line.verdict, line.reason, line.line, line.text)
        ruled = self._by_override(state, target.host, line)
        asked, expired = None, 0.0
        if ruled is None and is_robots_txt(target.path):
            ruled = [_Said(Verdict.ALLOW, Reason.ROBOTS_FILE)]
        if ruled is not None:
            said = said._replace(text=None)  # no file was asked
        else:
            known = state.files.get(target.origin)
            if known is None and not state.partial and line.verdict != Verdict.DEFER:
                return Judgement(f"no line before it has a robots.txt of {target.origin}")
            uncertain = _NOT_THERE if known is None else self._uncertain(known, line)
            if known is None or uncertain:
                self.not_checked[uncertain] += 1
                return Judgement(host=target.host)
            ruled, asked = self._by_files(state, known, line, said, target)
            # While a file can't be fetched for long, what decides in its place does not expire.
            if known.current.expires_at is not None and said == ruled[0]:
                expired = (line.t - known.current.expires_at).total_seconds()
        if self._not_whole(state, line, target, ruled[-1]):
            self.not_checked["the URL is not recorded as a whole"] += 1
            return Judgement(asked=asked, host=target.host)
        self.checked += 1
        wrong = "" if said in ruled else f"it says {said}; made again it is {ruled[-1]}"
        return Judgement(wrong, asked, target.host, expired)

    @staticmethod
    def _uncertain(known: KnownFile, line: Judged) -> str:
        """Return why the file that decided is not known; empty if it is."""
        if line.text is None and line.reason in _BY_TEXT and not isinstance(line, GrantLine):
            return "its line does not name the file, which was replaced meanwhile"
        failed = known.good is None and known.current.source != "network"
        return _NOT_THERE if failed and line.verdict != Verdict.DEFER else ""

    def _by_files(
        self, state: ChainState, known: KnownFile, line: Judged, said: _Said, target: Target
    ) -> _Ruled:
        # A lease may be granted by the file that was replaced a moment before its line was written.
        if known.before is not None and line.t - known.current.t < _REPLACED:
            ruled, asked = self._by_file(state, known.before, line, target)
            if said in ruled:
                return ruled, asked
        return self._by_file(state, known, line, target)

    def _by_override(self, state: ChainState, host: str, line: Judged) -> list[_Said] | None:
        """Return what the operator's override says; None if the file decides."""
        moments = [line.t]
        if line.reason == Reason.OPERATOR:  # it may have ended between the two
            moments.insert(0, line.t - _MOMENT)
        found = [state.override_of(host, at) for at in moments]
        said = [one.rule.get("robots") for one in found if one is not None and one.rule is not None]
        ruled = [_Said(one, Reason.OPERATOR) for one in said if one in ("allow", "deny")]
        return ruled or None

    def _by_file(self, state: ChainState, known: KnownFile, line: Judged, target: Target) -> _Ruled:
        row, good = Outcome.named(known.current.outcome).row, known.good
        if good is known.current:
            return self._by_text(state, good, line, target)
        # The gate may count the time without a network as no time: it may defer for longer.
        failed = _Said(row.verdict or Verdict.DEFER, row.reason)
        since = known.current.since
        gone = 0.0 if since is None else (line.t - since + _MOMENT).total_seconds()
        fallback = fallback_while_unreachable(
            state.fetch, unreachable_for=gone, has_last_good=good is not None, page_ok_ago=0.0
        )
        if row.lapses and fallback is Fallback.ALLOW_ALL:
            return [failed, _Said(Verdict.ALLOW, Reason.LONG_UNREACHABLE)], None
        if row.lapses and fallback is Fallback.LAST_GOOD and good is not None:
            ruled, asked = self._by_text(state, good, line, target)
            return [failed, *ruled], asked
        return [failed], None

    def _by_text(self, state: ChainState, good: RobotsLine, line: Judged, target: Target) -> _Ruled:
        row: OutcomeRow = Outcome.named(good.outcome).row
        if row.verdict is not None:
            text = None if line.text is None else good.text  # an empty file, or what is no file
            return [_Said(row.verdict, row.reason, text=text)], None
        policy, asked = self._policy(state, good.text or _NO_TEXT, line.agent)
        moments: Sequence[datetime] = (line.t,)
        if line.verdict == Verdict.DEFER:
            # The gate asks for the moment at which a request arrives, too.
            moments = (line.t - _MOMENT, line.t, line.t + _MOMENT)
        walls = [at.timestamp() for at in moments] if policy.timed else ()
        ruled = rule_on(policy, target.path, target.origin, row.reason, walls)
        if policy.request_rates:
            rates = [policy.interval(at) for at in (line.t - _MOMENT, line.t, line.t + _MOMENT)]
            asked = None if None in rates else min(rate for rate in rates if rate is not None)
        by = None if ruled.rule is None else ruled.rule.line
        return [_Said(ruled.verdict, ruled.reason, by, good.text)], asked

    def _not_whole(self, state: ChainState, line: Judged, target: Target, ruled: _Said) -> bool:
        """Return True if what the record leaves out of a URL may decide."""
        if ruled.text is None:
            return False
        if len(line.url) >= MAX_TEXT or MASKED in line.url:
            return True
        if state.urls != "path":
            return False
        key = (ruled.text, line.agent, state.robots, "special")
        starts: tuple[bytes, ...] | None = self._starts.get(key)
        if starts is None:
            groups = self._policy(state, ruled.text, line.agent)[0].robots.groups
            values = {rule.value for group in groups for rule in group.rules}
            parts = (_SPECIAL.split(one, maxsplit=1)[0] for one in values if _SPECIAL.search(one))
            starts = self._starts[key] = tuple({unquote_to_bytes(one) for one in parts})
        return unquote_to_bytes(target.path).startswith(starts)


class _Said(NamedTuple):
    """What a decision says."""

    verdict: str
    reason: str | None
    line: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        text = "" if self.text is None else f" of robots.txt {self.text[:12]}..."
        return f"{self.verdict} ({printable(str(self.reason), 60)}{line}{text})"


_Ruled = tuple[list[_Said], float | None]
"""What a file may say, what it says now last, and what interval it asks for."""
_ANY_TIME: Final = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_NO_TEXT: Final = digest_of(b"")


def _outcome_of(state: ChainState, digest: str) -> str:
    """Return the outcome of an earlier retrieval of a text."""
    try:
        body = read_text(state.folder, digest)
    except WrongText:
        return Outcome.RULES.row.name  # it is reported where its digest is checked
    return classify_body(Outcome.RULES, body, truncated=False).row.name


def read_text(folder: Path, digest: str) -> bytes:
    """Return the text with a digest. Raises WrongText."""
    if digest == _NO_TEXT:
        return b""
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        with open_segment(folder / text_path(digest)) as file:
            body = decoder.decompress(file.read(MAX_OCTETS), MAX_OCTETS)
    except FileNotFoundError as error:
        raise WrongText(f"the text {digest} is not there") from error
    except DAMAGED as error:
        raise WrongText(f"the text {digest} can't be read: {why(error)}") from error
    if not decoder.eof or decoder.unused_data or digest_of(body) != digest:
        raise WrongText(f"the text {digest} was changed: its digest is another one")
    return body
