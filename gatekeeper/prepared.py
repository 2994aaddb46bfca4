"""Whole answers of warm records, made once for each rule that decides.

On a warm origin nearly all of a decision is the same from one URL to the next: two URLs
decided by the same rule differ in `url` and `id` alone. So the first one is kept as the
pattern of those that follow, and neither guard, operator nor file is asked again as long as
the record is fresh: what they say depends on the origin alone, and a new word of the
operator or a new file clears what was prepared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from gatekeeper import urls
from gatekeeper.clock import Clock
from gatekeeper.config import Config
from gatekeeper.deciding import Decider
from gatekeeper.decision import Decision, Reason, Verdict
from gatekeeper.fetching.records import Record
from gatekeeper.pacing.scopes import RobotsInterval
from gatekeeper.robots import Policy
from gatekeeper.robots.normal import ROBOTS_TXT
from gatekeeper.robots.quick import PlainAnswer
from gatekeeper.robots.rulesets import ROBOTS_FILE
from gatekeeper.urls import not_text

__all__ = ["Given", "Pattern", "Prepared", "PreparedAnswers"]

_encode = msgspec.json.Encoder().encode
_MAX_PATTERNS = 256
"""Rules of one file whose answer is kept; a file's URLs meet few of its rules."""


class Pattern:
    """An answer, and how often it was given again."""

    __slots__ = ("_prefix", "decision", "tally", "text", "welcome")

    def __init__(self, decision: Decision, tally: list[int], prefix: str) -> None:
        self.decision = decision
        self.welcome = decision.verdict is Verdict.ALLOW
        self.tally = tally
        self._prefix = prefix
        self.text: tuple[str, str] | None = None
        """What `write` gave."""

    def again(self, url: str, number: int) -> Decision:
        """The same answer about another URL."""
        return replace(self.decision, url=url, id=f"{self._prefix}{number:x}")

    def write(self) -> tuple[str, str]:
        """The same as JSON: what stands before the URL, and from there to the number.

        Behind the number `"}` is left. Nothing in a URL that `split_ordinary` reads, spelt as
        its origin, is escaped in JSON: it stands between the two as it is.
        """
        bare = replace(self.decision, url="", id=self._prefix)
        # Two words without a quote stand before the URL, and nothing behind the id.
        head, url, rest = _encode(bare).decode().partition('"url":"')
        self.text = text = head + url, rest.removesuffix('"}')
        return text


class Given(msgspec.Struct, frozen=True):
    """An answer that was written at once; most are never looked at again."""

    pattern: Pattern
    url: str
    number: int

    @property
    def decision(self) -> Decision:
        """What was said."""
        return self.pattern.again(self.url, self.number)


class Prepared:
    """The answers of one record for one agent, by the number of the rule that decides."""

    __slots__ = (
        *("_keep", "_policy", "_reason"),
        *("decide", "host", "origin", "patterns", "plain", "wish"),
    )

    def __init__(
        self,
        record: Record,
        policy: Policy,
        decide: Callable[[str], int],
        wish: RobotsInterval | None,
        keep: Callable[[Prepared, int, Decision], Pattern],
    ) -> None:
        self.origin = record.origin
        self.host = urls.host_of(record.origin)
        self.wish = wish
        """The pace that the text asks for; None where that changes with the hour."""
        self.decide = decide
        self.patterns: dict[int, Pattern] = {}
        self.plain: PlainAnswer | None = None
        """The verdict about a plain path, once somebody asked that way."""
        self._policy = policy
        self._reason = record.current.outcome.row.reason
        self._keep = keep

    def plainly(self) -> PlainAnswer:
        """Make `plain`."""
        self.plain = answer = self._policy.plain_answer(self.origin)
        return answer

    def tell(self, url: str, path: str, number: int) -> Decision:
        """The decision about a URL of this origin, at whatever moment it is asked for."""
        code = self.decide(path)
        pattern = self.patterns.get(code)
        if pattern is None:
            match = self._policy.match_path(path, self.origin)
            like = next(iter(self.patterns.values())).decision
            verdict = Verdict.ALLOW if match.allowed else Verdict.DENY
            reason = self._reason if match.rule is None else Reason.RULE
            if code == ROBOTS_FILE:
                reason = Reason.ROBOTS_FILE
            like = replace(
                like, verdict=verdict, reason=reason, rule=match.rule, conflict=match.conflict
            )
            pattern = self._keep(self, code, like)
        pattern.tally[0] += 1
        return pattern.again(url, number)


class PreparedAnswers:
    """What `check` has answered and may answer again. `warm` is the directory's own dict."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        decider: Decider,
        house: str,
        pace: Callable[[Record, str], RobotsInterval | None],
    ) -> None:
        """`house`: our own agent; `pace(record, agent)`: what a text asks for at any hour."""
        self._house = house
        self.warm: dict[str, Record] = {}
        self._pace = pace
        self._monotonic = clock.monotonic
        self._prefix, self._serial = decider.prefix, decider.serial
        self._max_agents = config.cache.max_agents
        self._capped = config.pacing.max_interval is not None
        # One cell a reason, shared by all patterns: counting an answer looks nothing up.
        self._tallies: dict[tuple[Verdict, Reason], list[int]] = {}

    def adjust(self, config: Config) -> None:
        """Follow another configuration; what was prepared has to be retired."""
        self._capped = config.pacing.max_interval is not None

    def counts(self) -> Counter[tuple[Verdict, Reason]]:
        """Answers given from here, by verdict and reason."""
        return Counter({key: tally[0] for key, tally in self._tallies.items() if tally[0]})

    def recall(self, url: str, agent: str) -> Decision | None:
        """The decision about the URL, if everything about it is ordinary and was met before."""
        found = self.find(url, agent)
        return None if found is None else self.tell(url, found[1])

    def tell(self, url: str, pattern: Pattern) -> Decision:
        """The decision that was found, counted."""
        pattern.tally[0] += 1
        return pattern.again(url, next(self._serial))

    def find(self, url: str, agent: str) -> tuple[Prepared, Pattern, str] | None:
        """What the decision about the URL is made of, uncounted; with the URL's path."""
        ordinary = urls.split_ordinary(url)
        if ordinary is None:
            return None
        record = self.warm.get(ordinary[0])
        if record is None or record.prepared is None or self._monotonic() >= record.fresh_until:
            return None
        prepared: Prepared | None = record.prepared.get(agent)
        path = ordinary[1]
        if prepared is None:
            return None
        pattern = prepared.patterns.get(prepared.decide(path))
        return None if pattern is None else (prepared, pattern, path)

    def recall_all(self, raws: Iterable[str], agent: str) -> list[Decision | None]:
        """The same for many, at one moment."""
        now = self._monotonic()
        split, find = urls.split_ordinary, self.warm.get
        prefix, serial = self._prefix, self._serial
        answers: list[Decision | None] = []
        for url in raws:
            answers.append(None)
            found = split(url)
            if found is None:
                continue
            record = find(found[0])
            if record is None or record.prepared is None or now >= record.fresh_until:
                continue
            prepared: Prepared | None = record.prepared.get(agent)
            path = found[1]
            if prepared is None:
                continue
            pattern = prepared.patterns.get(prepared.decide(path))
            if pattern is not None:
                pattern.tally[0] += 1
                answers[-1] = replace(pattern.decision, url=url, id=f"{prefix}{next(serial):x}")
        return answers

    def write_all(
        self, raws: Sequence[str], agent: str, given: list[Given] | None = None
    ) -> list[str | None]:
        """The same as the JSON of each; None also where the authority is spelt otherwise.

        `given`, if any, takes what was written.
        """
        now, split = self._monotonic(), None if urls.all_plain(raws) else urls.split_ordinary
        known: dict[str, Prepared | None] = {"": None}  # no slash, no authority
        texts: list[str | None] = []
        # A number that no answer takes is left out.
        for url, number in zip(raws, self._serial, strict=False):
            cut = url.find("/", 8) + 1
            try:
                prepared = known[url[:cut]]
            except KeyError:
                prepared = known[url[:cut]] = self._fresh(url[: cut - 1], agent, now)
            path = url[cut - 1 :]
            if prepared is None or (split is not None and not split(url)):
                texts.append(None)
                continue
            pattern = prepared.patterns.get(prepared.decide(path))
            if pattern is None:
                texts.append(None)
                continue
            pattern.tally[0] += 1
            head, rest = pattern.text or pattern.write()
            texts.append(f'{head}{url}{rest}{number:x}"}}')
            if given is not None:
                given.append(Given(pattern, url, number))
        return texts

    def _fresh(self, origin: str, agent: str, now: float) -> Prepared | None:
        record = self.warm.get(origin)
        if record is None or record.prepared is None or now >= record.fresh_until:
            return None
        prepared: Prepared | None = record.prepared.get(agent)
        return prepared

    def at_once(self, url: str) -> Prepared | None:
        """For the agent of the house: the answers of the URL's origin, if it is welcome.

        None says nothing. Only a URL that is spelt in its normal form is answered about.
        """
        try:
            cut = url.find("/", 8)  # behind `https://`
        except (AttributeError, TypeError):
            raise not_text(url) from None
        record = self.warm.get(url[:cut])
        if record is None or cut < 0 or (ready := record.ready) is None:
            return None
        path = url[cut:]
        if ready(path) and "#" not in path and path.isascii() and path != ROBOTS_TXT:
            house: Prepared | None = record.house
            return house
        return None

    def at_place(self, origin: str, path: str) -> Prepared | None:
        """The same for an origin and a path that is known to be plain."""
        record = self.warm.get(origin)
        if record is None or record.ready is None:
            return None
        house: Prepared | None = record.house
        if house is None:
            return None
        welcome = house.plain or house.plainly()
        return house if welcome(path) and path != ROBOTS_TXT else None

    def keep(self, decision: Decision, path: str, record: Record, agent: str) -> None:
        """Let the next URL that the same rule decides have its answer from this one.

        `record` answers by the policy of its text alone until `fresh_until`.
        """
        prepared = self._prepared(record, agent)
        if prepared is None or len(prepared.patterns) >= _MAX_PATTERNS:
            return
        self._keep(prepared, prepared.decide(path), decision)

    def _keep(self, prepared: Prepared, code: int, decision: Decision) -> Pattern:
        tally = self._tallies.setdefault((decision.verdict, decision.reason), [0])
        pattern = Pattern(decision, tally, self._prefix)
        if len(prepared.patterns) < _MAX_PATTERNS:
            prepared.patterns[code] = pattern
        return pattern

    def _prepared(self, record: Record, agent: str) -> Prepared | None:
        if record.prepared is None:
            record.prepared = {}
        prepared: Prepared | None = record.prepared.get(agent)
        if prepared is None and len(record.prepared) < self._max_agents:
            policy = record.policies.get(agent)
            decide = None if policy is None else policy.decider(record.origin)
            # Visit-time is asked of the clock each time: it has no answer to keep. Nor has a
            # rate that is cut short at some hours.
            hourly = policy is not None and self._capped and bool(policy.request_rates)
            if policy is not None and decide is not None and not policy.timed and not hourly:
                wish = self._pace(record, agent)
                prepared = Prepared(record, policy, decide, wish, self._keep)
                record.prepared[agent] = prepared
                if agent == self._house:
                    record.house = prepared
        return prepared
