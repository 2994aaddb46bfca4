"""Cache of the decisions about warm origins, one for each rule. Optional speed: see `speedups`.

On a warm origin, the decisions about two URLs that the same rule decides differ only in `url` and
`id`. So the first one is cached, by record, agent and rule, and later ones are copies of it.
Neither the guard, the operator's rules nor the file are consulted again while the record is fresh:
their answers depend only on the origin, and a changed rule of the operator or a new file clears
the entries (`Record.retire`).

Only plain URLs are looked up here: those whose text after the authority is the path that is sent.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gatekeeper import speedups, urls
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.records import Record
from gatekeeper.robots import Policy
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.longest import QuickAnswer
from gatekeeper.robots.patterns import is_normal_path, is_robots_txt
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import MASK, SplitDict

_encode = msgspec.json.Encoder().encode
_MAX_RULES = 256
"""Cached decisions of one file; the URLs of a site match few of its rules."""
_CACHE_AFTER = 4
"""Questions about an origin after which its decisions are cached, if no more than 5,000 to 7,500
questions about other origins lie between any two of them. A crawl that asks a hundred thousand
origins in turn caches none."""
_QUESTIONS_PER_ERA, _MAX_ERAS = 2_500, 2
"""Questions per era, and the most eras that may lie between two questions about an origin."""
_MAX_ORIGINS = 5_000
"""Origins whose decisions are cached; the one that was added first is evicted."""


class CachedDecision(msgspec.Struct, eq=False):
    """The cached decision of one rule, and the counter of how often it was given."""

    decision: Decision
    counter: list[int]
    """A list of one counter, shared by all entries with the same verdict and reason, so that
    counting needs no look-up."""
    prefix: str
    """Prefix of decision ids."""
    json: tuple[bytes, bytes] | None = None
    """The JSON before the URL, and from the URL to the id's number; set by `write`."""

    @property
    def allows(self) -> bool:
        """Whether the verdict is ALLOW."""
        return self.decision.verdict is Verdict.ALLOW

    def write(self) -> tuple[bytes, bytes]:
        """Encode the decision into `json`. The end `"}`, after the number, is left out.

        A plain URL, written as its origin is, contains nothing that JSON escapes.
        """
        bare = replace(self.decision, url="", id=self.prefix)
        # The fields before the URL hold no quotes, and the id is the last field.
        head, url, rest = _encode(bare).partition(b'"url":"')
        self.json = parts = head + url, rest.removesuffix(b'"}')
        return parts


class WrittenDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision that was sent as JSON; it is rebuilt only if it is read."""

    cached: CachedDecision
    url: str
    number: int

    @property
    def allows(self) -> bool:
        """Whether the verdict is ALLOW."""
        return self.cached.allows

    @property
    def decision(self) -> Decision:
        """The decision that was sent."""
        return replace(self.cached.decision, url=self.url, id=self.id)

    @property
    def id(self) -> str:
        """The decision's id."""
        return f"{self.cached.prefix}{self.number:x}"

    def json(self) -> bytes:
        """Encode the decision as JSON; the URL is a plain one."""
        head, rest = self.cached.json or self.cached.write()
        return b'%b%b%b%x"}' % (head, self.url.encode(), rest, self.number)


class DecisionBatch(Sequence[str]):
    """Decisions about many URLs, in their order, most of them as cache entries of their rules.

    `body` writes the JSON of all of them. As a sequence, a batch has the JSON of each decision,
    once none is missing.
    """

    __slots__ = ("_first_number", "_given", "_octets")

    def __init__(
        self, given: list[CachedDecision | None], octets: list[bytes], first_number: int
    ) -> None:
        """`given`: the cached decision of each URL, None if it is missing; `octets`: each URL,
        plain if its decision is given; `first_number`: the number in the id of the first decision,
        from which the others count on."""
        self._given = given
        self._octets = octets
        self._first_number = first_number

    def missing(self) -> list[int]:
        """Return the indexes of the URLs that have to be decided."""
        if None not in self._given:
            return []
        return [place for place, cached in enumerate(self._given) if cached is None]

    def tally(self) -> Counter[CachedDecision]:
        """Count the given decisions in the statistics; return how often each one was given."""
        tally = Counter(filter(None, self._given))
        for cached, count in tally.items():
            cached.counter[0] += count
        return tally

    def add(self, decisions: Iterable[Decision]) -> None:
        """Fill in the missing decisions, in their order."""
        for place, decision in zip(self.missing(), decisions, strict=True):
            self._octets[place] = _encode(decision)

    def written(self) -> list[WrittenDecision]:
        """Return the decisions that were not missing."""
        numbers = itertools.count(self._first_number)
        found = zip(self._given, self._octets, numbers, strict=False)
        return [WrittenDecision(one, url.decode(), n) for one, url, n in found if one is not None]

    def body(self) -> list[bytes]:
        """Encode as `{"decisions":[...]}`, in pieces: one piece of half a megabyte would be newly
        allocated each time, which costs as much as encoding."""
        pieces = [self._text(start) for start in range(0, len(self), _PIECE_SIZE)] or [b","]
        pieces[0] = b'{"decisions":[' + pieces[0]
        pieces[-1] = pieces[-1][:-1] + b"]}"
        return pieces

    def _text(self, start: int) -> bytes:
        """Encode the piece that begins at `start`, with a comma after each decision."""
        given = self._given[start : start + _PIECE_SIZE]
        first, size = self._first_number + start, len(given)
        pairs = [_MISSING_PARTS if one is None else one.json or one.write() for one in given]
        # Formatting all numbers together takes half the time of formatting each by itself.
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
        return WrittenDecision(cached, text, self._first_number + place % len(self)).json().decode()


_MISSING_PARTS: Final = b"", b""
_PIECE_SIZE: Final = 128
"""Decisions that are encoded in one piece, of about 60 kB."""


@dataclass(slots=True, eq=False)
class CachedOrigin:
    """Cache entry of one record for one agent."""

    origin: str
    host: str
    policy: Policy
    first_decision: Decision
    """The decision by the record that was cached first; not about /robots.txt."""
    reason: Reason
    """The reason if no rule matches."""
    cacheable: bool
    """Whether its decisions may be cached."""
    interval: RobotsInterval | None
    """The file's interval; None if it changes with the hour, or no decision may be cached."""
    rule_of: Callable[[str], int]
    """Returns the code of the rule that decides a path."""
    quick_answer: QuickAnswer | None
    """For `allowed`: decides the text after the authority, or returns None if the text has to
    be parsed as a URL first. None once the record is no longer warm."""
    decisions: dict[int, CachedDecision] = field(default_factory=dict)
    """Cached decisions by the code of their rule."""

    def retire(self) -> None:
        """Stop answering: the record is no longer warm."""
        self.quick_answer = None


def _no_rule(_path: str) -> int:
    """Return a code that no rule has, for an origin whose decisions are not cached."""
    return -4


_RuleLookups = tuple[Callable[[str], int], Callable[[int], CachedDecision | None]]


class DecisionCache:
    """Cached decisions about warm origins. It stays empty if `speedups` were off at creation."""

    def __init__(
        self, records: SplitDict[str, Record], prefix: str, *, agent: str, max_agents: int
    ) -> None:
        """`records`: the directory's hot records by origin; `prefix`: that of decision ids;
        `agent`: the gate's own; `max_agents`: the most agents with cached decisions per record."""
        self.on: bool = speedups.ON
        self.rules_version: int = 1
        """Version of the operator's rules: a record is ready if `record.ready` equals it."""
        self._first, self._table = records.first, records.table
        self._prefix = prefix
        self._agent = agent
        self._max_agents = max_agents
        self._counts: dict[tuple[Verdict, Reason], list[int]] = {}
        self._era, self._left_in_era = _MAX_ERAS + 1, _QUESTIONS_PER_ERA
        """The current era, and the questions left in it; questions about origins without cached
        decisions are counted in eras. All records asked in an era share its number, one int object:
        with the question's own number, each question would free an int far away in memory."""
        self._cached_records: deque[Record] = deque()
        """Records with cached decisions, the oldest first."""

    def forget(self) -> None:
        """Drop every cached decision; the cost does not grow with the number of records."""
        self.rules_version += 1
        while self._cached_records:
            self._cached_records.pop().drop_cached()

    def counts(self) -> Counter[tuple[Verdict, Reason]]:
        """Count the decisions given from this cache, by verdict and reason."""
        return Counter({key: counter[0] for key, counter in self._counts.items() if counter[0]})

    # --- looking up ---------------------------------------------------------------------

    def origin(self, origin: str, agent: str, now: float) -> CachedOrigin | None:
        """Return the cache entry of an origin for an agent, if it is fresh at monotonic `now`."""
        record = self._first.get(origin) or self._table[hash(origin) & MASK].get(origin)
        if record is None or record.cached is None or now >= record.fresh_until:
            return None
        found: CachedOrigin | None = record.cached.get(agent)
        return found

    def find(self, url: str, agent: str, now: float) -> tuple[CachedOrigin, str] | None:
        """Return the cache entry of a plain URL's origin, if its decisions are cached, and the
        URL's path."""
        found = self.warm_record(url, now)
        if found is None or (cached := found[0].cached) is None:
            return None
        origin: CachedOrigin | None = cached.get(agent)
        return (origin, found[1]) if origin is not None and origin.cacheable else None

    def warm_record(self, url: str, now: float) -> tuple[Record, str] | None:
        """Return the warm record of a plain URL, written with its origin's exact text, and the
        URL's path. None if the cache can have no decision for any agent."""
        try:
            cut = url.find("/", 8)  # after `https://`
        except (AttributeError, TypeError):
            raise urls.not_text(url) from None
        origin = url[:cut]
        record = self._first.get(origin) or self._table[hash(origin) & MASK].get(origin)
        if record is None or cut < 0 or now >= record.fresh_until or len(url) > urls.MAX_URL:
            return None
        if record.cached is None and record.ready != self.rules_version:
            return None
        path = url[cut:]
        return (record, path) if urls.is_sent_as_written(path) else None

    def verdict(self, record: Record, path: str) -> bool | None:
        """Decide the part of a URL after its authority, for the gate's own agent, by the policy of
        a warm record.

        None if the policy does not decide alone, if the text has to be parsed as a URL first, or if
        decisions about the origin are worth caching from now on, for which one has to be built. No
        clock is read: a timer ends the time for which a record is warm.
        """
        if record.ready != self.rules_version or len(path) >= urls.ALWAYS_SENDABLE_LENGTH:
            return None
        as_sent = "/." not in path and is_normal_path(path)
        if (not as_sent and not urls.is_sent_as_written(path)) or self.count_question(record):
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

    def would_cache_next(self, record: Record) -> bool:
        """Return True if its decisions are worth caching with the next question."""
        if not self.on:
            return True
        return record.questions >= _CACHE_AFTER - 1 and self._era - record.last_era <= _MAX_ERAS

    def count_question(self, record: Record) -> bool:
        """Count a question about a record. Return True if its decisions are worth caching."""
        self._left_in_era -= 1
        if self._left_in_era <= 0:
            self._era, self._left_in_era = self._era + 1, _QUESTIONS_PER_ERA
        era = self._era
        record.questions = record.questions + 1 if era - record.last_era <= _MAX_ERAS else 1
        record.last_era = era
        return record.questions >= _CACHE_AFTER

    def write_many(
        self, raws: Sequence[str], agent: str, now: float, numbers: Iterator[int]
    ) -> DecisionBatch:
        """Return the cached decision of each URL. It is missing if it is not cached, or if the URL
        is not written with its origin's exact text. `numbers` make the ids."""
        octets = urls.plain_octets(raws)
        split = None if octets is not None else urls.split_ordinary
        # By authority, the bound methods that find a path's rule and a rule's decision: looking up
        # both attributes for each URL costs as much as the dictionary. "": a URL without a slash.
        lookups: dict[str, _RuleLookups | None] = {"": None}
        given: list[CachedDecision | None] = []
        for url in raws:
            cut = url.find("/", 8) + 1
            try:
                found = lookups[url[:cut]]
            except KeyError:
                origin = self.origin(url[: cut - 1], agent, now)
                found = None if origin is None else (origin.rule_of, origin.decisions.get)
                lookups[url[:cut]] = found
            if found is None or (split is not None and not split(url)):
                given.append(None)
            else:
                given.append(found[1](found[0](url[cut - 1 :])))
        if octets is None:
            both = zip(raws, given, strict=True)
            octets = [b"" if cached is None else url.encode() for url, cached in both]
        # The numbers of missing decisions stay unused.
        last = next(itertools.islice(numbers, len(given) - 1, None)) if given else 0
        return DecisionBatch(given, octets, last - len(given) + 1)

    def allowed_origin(self, url: str) -> CachedOrigin | None:
        """Return the cache entry of a URL's origin, if the URL is plain and the gate's own agent
        may fetch it; else None.

        No clock is read: a timer ends the time for which a record is warm.
        """
        try:
            cut = url.find("/", 8)  # after `https://`
        except (AttributeError, TypeError):
            raise urls.not_text(url) from None
        name = url[:cut]
        record = self._first.get(name) or self._table[hash(name) & MASK].get(name)
        if cut < 0 or record is None or (cached := record.cached) is None:
            return None
        origin: CachedOrigin | None = cached.get(self._agent)
        if origin is None or (quick_answer := origin.quick_answer) is None:
            return None
        path = url[cut:]
        if quick_answer(path) and "#" not in path and path.isascii():
            return origin
        return None

    # --- keeping ------------------------------------------------------------------------

    def entry(self, record: Record, agent: str) -> CachedOrigin | None:
        """Return the record's cache entry for an agent."""
        return None if record.cached is None else record.cached.get(agent)

    def add_origin(
        self,
        record: Record,
        policy: Policy,
        agent: str,
        decision: Decision,
        *,
        interval: RobotsInterval | None,
        cacheable: bool,
    ) -> CachedOrigin | None:
        """Add a cache entry of a warm record for an agent. None if the record has too many.

        `interval` is the file's, None if it changes with the hour; `cacheable`: its decisions may
        be cached, if a single reading of the file makes them.
        """
        if record.cached is None:
            if len(self._cached_records) >= _MAX_ORIGINS:
                oldest = self._cached_records.popleft()
                oldest.drop_cached()
            self._cached_records.append(record)
            record.cached = {}
        own_agent = agent == self._agent
        if len(record.cached) >= self._max_agents and not own_agent:
            return None
        rule_of = policy.decider(record.origin) if cacheable else None
        origin = record.cached[agent] = CachedOrigin(
            record.origin,
            urls.host_of(record.origin),
            policy,
            decision,
            record.current.outcome.row.reason,
            cacheable=rule_of is not None,
            interval=interval if rule_of else None,
            rule_of=rule_of or _no_rule,
            quick_answer=policy.quick_answer() if own_agent else None,
        )
        return origin

    def add_decision(self, origin: CachedOrigin, rule: int, decision: Decision) -> CachedDecision:
        """Cache the decision of a rule for other URLs that it decides, if there is room."""
        counter = self._counts.setdefault((decision.verdict, decision.reason), [0])
        cached = CachedDecision(decision, counter, self._prefix)
        if len(origin.decisions) < _MAX_RULES or rule in origin.decisions:
            origin.decisions[rule] = cached
        return cached
