"""Decisions of warm origins, kept for each rule that decides. Optional speed: see `speedups`.

On a warm origin two URLs that the same rule decides have decisions that differ in `url` and `id`
alone. So the first decision is kept, by record, agent and rule, and the following ones are
copies of it. Neither guard, operator nor file is asked again as long as the record is fresh: what
they say depends on the origin alone, and a new word of the operator or a new file empties what
was kept (`Record.retire`).

A URL is looked up here only where its text is plain, so that what stands behind the authority is
the path that is sent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gatekeeper import speedups, urls
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.records import Record
from gatekeeper.robots import Policy
from gatekeeper.robots.flat import FlatRules, is_compared_as_sent
from gatekeeper.robots.longest import QuickAnswer
from gatekeeper.robots.patterns import is_robots_txt
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import MASK, SplitDict

_encode = msgspec.json.Encoder().encode
_MAX_RULES = 256
"""Rules of one file whose decision is kept; the URLs of a file meet few of its rules."""
_OFTEN = 4
"""Questions about an origin, with at most 5,000 to 7,500 others between any two, from which on its
decisions are kept: a crawl that asks a hundred thousand origins by turns keeps none."""
_ERA, _ERAS = 2_500, 2
"""Questions of one era; by how many eras two may be apart."""
_MAX_ORIGINS = 5_000
"""Origins whose decisions are kept; of the one that was taken in first they go."""


class CachedDecision:
    """The decision of one rule, and how often it was given."""

    __slots__ = ("count", "decision", "json", "prefix")

    def __init__(self, decision: Decision, count: list[int], prefix: str) -> None:
        self.decision: Decision = decision
        self.count: list[int] = count
        """One cell for each verdict and reason, shared by all that are kept: to count a decision
        looks nothing up."""
        self.json: tuple[bytes, bytes] | None = None
        """The JSON before the URL, and from there to the number of the id; made by `write`."""
        self.prefix: str = prefix
        """Of the ids of decisions."""

    @property
    def allows(self) -> bool:
        """The verdict is ALLOW."""
        return self.decision.verdict is Verdict.ALLOW

    def write(self) -> tuple[bytes, bytes]:
        """Make `json`. Behind the number `"}` is missing.

        Nothing in a plain URL, spelt as its origin, is escaped in JSON.
        """
        bare = replace(self.decision, url="", id=self.prefix)
        # Two words without a quote stand before the URL, and nothing behind the id.
        head, url, rest = _encode(bare).partition(b'"url":"')
        self.json = parts = head + url, rest.removesuffix(b'"}')
        return parts


class WrittenDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision that was given as JSON; most are never looked at again."""

    cached: CachedDecision
    url: str
    number: int

    @property
    def allows(self) -> bool:
        """The verdict is ALLOW."""
        return self.cached.allows

    @property
    def decision(self) -> Decision:
        """What was given."""
        return replace(self.cached.decision, url=self.url, id=self.id)

    @property
    def id(self) -> str:
        """Its id."""
        return f"{self.cached.prefix}{self.number:x}"

    def json(self) -> bytes:
        """What was given; the URL is a plain one."""
        head, rest = self.cached.json or self.cached.write()
        return b'%b%b%b%x"}' % (head, self.url.encode(), rest, self.number)


class DecisionBatch(Sequence[str]):
    """Decisions about many URLs, in their order: of most only what is kept of their rule. Their
    text is made where it is asked for, all of it in one go by `body`; as a sequence they are the
    JSON of each, once none is missing.
    """

    __slots__ = ("_first", "_given", "_octets")

    def __init__(self, given: list[CachedDecision | None], octets: list[bytes], first: int) -> None:
        """`given`: what decides each, None: it is missing; `octets`: each URL, plain where its
        decision is given; `first` makes the id of the first, the next number that of the next."""
        self._given = given
        self._octets = octets
        self._first = first

    def missing(self) -> list[int]:
        """The places of those that have to be decided."""
        if None not in self._given:
            return []
        return [place for place, cached in enumerate(self._given) if cached is None]

    def tally(self) -> Counter[CachedDecision]:
        """Count those that are given; returns how often each was."""
        tally = Counter(filter(None, self._given))
        for cached, count in tally.items():
            cached.count[0] += count
        return tally

    def add(self, decisions: Iterable[Decision]) -> None:
        """Put in those that were missing, in their order."""
        for place, decision in zip(self.missing(), decisions, strict=True):
            self._octets[place] = _encode(decision)

    def written(self) -> list[WrittenDecision]:
        """Those that were not missing."""
        found = zip(
            self._given, self._octets, range(self._first, self._first + len(self)), strict=True
        )
        return [WrittenDecision(one, url.decode(), n) for one, url, n in found if one is not None]

    def body(self) -> list[bytes]:
        """`{"decisions":[...]}`, in pieces: a single one of half a megabyte would be new memory
        each time, which costs as much as all its text."""
        pieces = [self._text(start) for start in range(0, len(self), _PIECE)] or [b","]
        pieces[0] = b'{"decisions":[' + pieces[0]
        pieces[-1] = pieces[-1][:-1] + b"]}"
        return pieces

    def _text(self, start: int) -> bytes:
        """The JSON of those from `start` on that make a piece, with a comma behind each."""
        given = self._given[start : start + _PIECE]
        first, size = self._first + start, len(given)
        pairs = [_LATE if one is None else one.json or one.write() for one in given]
        # One look at many numbers: each for itself would cost twice as much.
        ends = (b'%x"}, ' * size % (*range(first, first + size),)).split()
        if None in given:
            ends = [b"," if one is None else end for one, end in zip(given, ends, strict=True)]
        parts = [b""] * (4 * size)
        parts[0::4] = [head for head, _ in pairs]
        parts[1::4] = self._octets[start : start + size]
        parts[2::4] = [rest for _, rest in pairs]
        parts[3::4] = ends
        return b"".join(parts)

    def __len__(self) -> int:
        return len(self._octets)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[n] for n in range(*place.indices(len(self)))]
        cached, text = self._given[place], self._octets[place].decode()
        if cached is None:
            return text
        return WrittenDecision(cached, text, self._first + place % len(self)).json().decode()


_LATE: Final = b"", b""
_PIECE: Final = 128
"""Decisions whose text is made in one piece: some 60 kB."""


class CachedOrigin:
    """What is kept of one record for one agent."""

    __slots__ = (
        *(
            "decisions",
            "first_decision",
            "first_match",
            "host",
            "interval",
            "keeps",
            "origin",
        ),
        *("policy", "reason", "rule_of"),
    )

    def __init__(
        self,
        record: Record,
        policy: Policy,
        first_decision: Decision,
        *,
        interval: RobotsInterval | None,
        keeps: bool,
        ours: bool,
    ) -> None:
        """`first_decision` was made by the record, and is about no /robots.txt; `interval` is
        what the text asks for, None where that changes with the hour; `keeps`: its decisions
        may be kept; `ours`: it is for the gate's own agent."""
        self.origin: str = record.origin
        self.host: str = urls.host_of(record.origin)
        self.policy = policy
        self.first_decision = first_decision
        self.reason: Reason = record.current.outcome.row.reason
        """The reason where no rule matches."""
        rule_of = policy.decider(record.origin) if keeps else None
        self.keeps: bool = rule_of is not None
        self.interval: RobotsInterval | None = interval if self.keeps else None
        self.rule_of: Callable[[str], int] = rule_of or _no_rule
        """The code of the rule that decides a path."""
        self.decisions: dict[int, CachedDecision] = {}
        """By that code."""
        self.first_match: QuickAnswer | None = policy.quick_answer() if ours else None
        """For `allowed`: the verdict about what stands behind the authority, or None where that
        text has to be read as a URL first. None once the record is no longer warm."""

    def retire(self) -> None:
        """The record is no longer warm."""
        self.first_match = None


def _no_rule(_path: str) -> int:
    """For an origin whose decisions are not kept."""
    return -4


_Found = tuple[Callable[[str], int], Callable[[int], CachedDecision | None]]


class DecisionCache:
    """The decisions that were given about warm origins, and may be given again.

    `origin` is the one way in: what it gives answers for one origin and agent. Empty, and stays
    so, where `speedups` were off when it was made.
    """

    def __init__(
        self, records: SplitDict[str, Record], prefix: str, *, agent: str, max_agents: int
    ) -> None:
        """`records`: the directory's by origin; `prefix`: that of decision ids; `agent`: the
        gate's own; `max_agents`: agents of one record of which decisions are kept."""
        self.on: bool = speedups.ON
        self.word: int = 1
        """The number of the operator's latest word: records that are `ready` by it are."""
        self._few, self._many = records.first, records.table
        self._prefix = prefix
        self._agent = agent
        self._max_agents = max_agents
        self._counts: dict[tuple[Verdict, Reason], list[int]] = {}
        self._era, self._left = _ERAS + 1, _ERA
        """Questions about origins whose decisions are not kept are counted in eras; what is left of
        one. Records share its number: one of their own, that of the question, would be memory far
        away that each question gives back."""
        self._taken_in: deque[Record] = deque()

    def forget(self) -> None:
        """Keep nothing of before, whatever number of records there is."""
        self.word += 1
        while self._taken_in:
            self._taken_in.pop().drop_cached()

    def counts(self) -> Counter[tuple[Verdict, Reason]]:
        """Decisions given from here, by verdict and reason."""
        return Counter({key: count[0] for key, count in self._counts.items() if count[0]})

    # --- looking up ---------------------------------------------------------------------

    def origin(self, origin: str, agent: str, now: float) -> CachedOrigin | None:
        """What is kept of an origin for an agent, if that holds at the monotonic moment."""
        record = self._few.get(origin) or self._many[hash(origin) & MASK].get(origin)
        if record is None or record.cached is None or now >= record.fresh_until:
            return None
        found: CachedOrigin | None = record.cached.get(agent)
        return found

    def find(self, url: str, agent: str, now: float) -> tuple[CachedOrigin, str] | None:
        """What is kept of a plain URL's origin, where its decisions are kept; and its path."""
        found = self.warm_record(url, now)
        if found is None or (cached := found[0].cached) is None:
            return None
        origin: CachedOrigin | None = cached.get(agent)
        return (origin, found[1]) if origin is not None and origin.keeps else None

    def warm_record(self, url: str, now: float) -> tuple[Record, str] | None:
        """The warm record of a plain URL whose authority is spelt as its origin is; and the URL's
        path. None where there is nothing to find for any agent."""
        try:
            cut = url.find("/", 8)  # behind `https://`
        except (AttributeError, TypeError):
            raise urls.not_text(url) from None
        origin = url[:cut]
        record = self._few.get(origin) or self._many[hash(origin) & MASK].get(origin)
        if record is None or cut < 0 or now >= record.fresh_until or len(url) > urls.MAX_URL:
            return None
        if record.cached is None and record.ready != self.word:
            return None
        path = url[cut:]
        return (record, path) if urls.is_sent_as_written(path) else None

    def verdict(self, record: Record, path: str) -> bool | None:
        """The verdict alone about what stands behind the authority in a URL, for the gate's own
        agent, by the policy of a warm record. None where that does not decide alone or the text has
        to be read as a URL first, and where decisions about the origin are worth being kept from
        now on: one has to be made first.

        No clock is read: a timer ends that a record is warm.
        """
        if record.ready != self.word or len(path) >= speedups.SURELY_SHORT:
            return None
        as_sent = "/." not in path and is_compared_as_sent(path)
        if (not as_sent and not urls.is_sent_as_written(path)) or self.often(record):
            return None
        rules = record.rules
        if rules is None:
            text = record.text
            if text is None:
                return True
            text.used = True
            ready = text.ready
            if not isinstance(ready, FlatRules):
                return None if ready is None else ready.allows(path, record.origin)
            rules = record.rules = ready
        score = rules.score_as_sent(path) if as_sent else rules.score(path)
        return None if score is None else bool(score & 1) or is_robots_txt(path)

    def asked_lately(self, record: Record) -> bool:
        """With one question more its decisions are worth being kept."""
        if not self.on:
            return True
        return record.asked >= _OFTEN - 1 and self._era - record.seen <= _ERAS

    def often(self, record: Record) -> bool:
        """Count a question about a record; whether its decisions are worth being kept."""
        self._left -= 1
        if self._left <= 0:
            self._era, self._left = self._era + 1, _ERA
        era = self._era
        record.asked = record.asked + 1 if era - record.seen <= _ERAS else 1
        record.seen = era
        return record.asked >= _OFTEN

    def write_many(
        self, raws: Sequence[str], agent: str, now: float, numbers: Iterator[int]
    ) -> DecisionBatch:
        """The decision of each URL; it is missing where it is not kept, or the authority is not
        spelt as the origin is. `numbers` make the ids."""
        octets = urls.plain_octets(raws)
        split = None if octets is not None else urls.split_ordinary
        # What finds the rule of a path, and the decision of a rule: to look the two up by their
        # names for each URL costs as much as the dictionary does. No slash, no authority.
        known: dict[str, _Found | None] = {"": None}
        given: list[CachedDecision | None] = []
        for url in raws:
            cut = url.find("/", 8) + 1
            try:
                found = known[url[:cut]]
            except KeyError:
                origin = self.origin(url[: cut - 1], agent, now)
                found = None if origin is None else (origin.rule_of, origin.decisions.get)
                known[url[:cut]] = found
            if found is None or (split is not None and not split(url)):
                given.append(None)
            else:
                given.append(found[1](found[0](url[cut - 1 :])))
        if octets is None:
            both = zip(raws, given, strict=True)
            octets = [b"" if cached is None else url.encode() for url, cached in both]
        # A number that no decision takes is left out.
        last = next(islice(numbers, len(given) - 1, None)) if given else 0
        return DecisionBatch(given, octets, last - len(given) + 1)

    def allowed_origin(self, url: str) -> CachedOrigin | None:
        """What is kept of the origin of a plain URL that the gate's own agent may fetch; None for
        any other.

        No clock is read: a timer ends that a record is warm.
        """
        try:
            cut = url.find("/", 8)  # behind `https://`
        except (AttributeError, TypeError):
            raise urls.not_text(url) from None
        name = url[:cut]
        record = self._few.get(name) or self._many[hash(name) & MASK].get(name)
        if cut < 0 or record is None or (cached := record.cached) is None:
            return None
        origin: CachedOrigin | None = cached.get(self._agent)
        if origin is None or (first_match := origin.first_match) is None:
            return None
        path = url[cut:]
        if first_match(path) and "#" not in path and path.isascii():
            return origin
        return None

    # --- keeping ------------------------------------------------------------------------

    def known(self, record: Record, agent: str) -> CachedOrigin | None:
        """What is kept of that record for an agent."""
        return None if record.cached is None else record.cached.get(agent)

    def add(
        self,
        record: Record,
        policy: Policy,
        agent: str,
        decision: Decision,
        *,
        interval: RobotsInterval | None,
        keeps: bool,
    ) -> CachedOrigin | None:
        """Begin to keep decisions of a warm record for an agent; None: there are too many."""
        if record.cached is None:
            if len(self._taken_in) >= _MAX_ORIGINS:
                oldest = self._taken_in.popleft()
                oldest.drop_cached()
            self._taken_in.append(record)
            record.cached = {}
        ours = agent == self._agent
        if len(record.cached) >= self._max_agents and not ours:
            return None
        origin = record.cached[agent] = CachedOrigin(
            record, policy, decision, interval=interval, keeps=keeps, ours=ours
        )
        return origin

    def keep(self, origin: CachedOrigin, rule: int, decision: Decision) -> CachedDecision:
        """Keep the decision of a rule, if there is room, for the URLs that it decides as well."""
        count = self._counts.setdefault((decision.verdict, decision.reason), [0])
        cached = CachedDecision(decision, count, self._prefix)
        if len(origin.decisions) < _MAX_RULES or rule in origin.decisions:
            origin.decisions[rule] = cached
        return cached
