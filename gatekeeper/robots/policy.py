"""`Policy`: a RobotsTxt as it reads for one agent. It decides, and says why."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from gatekeeper import speedups
from gatekeeper.robots import signals, timing
from gatekeeper.robots.compiled import (
    DENIED,
    ROBOTS_FILE,
    PlainAnswer,
    QuickAnswer,
    Suspects,
    path_answer,
    plain_path_answer,
)
from gatekeeper.robots.groups import choose
from gatekeeper.robots.model import (
    Candidate,
    Dialect,
    Match,
    Rule,
    Spans,
    line_numbers,
    product_token,
    rule_at,
    rule_offsets,
    shown,
    values_in,
)
from gatekeeper.robots.patterns import ROBOTS_TXT, is_robots_txt, query_form, rfc_pattern
from gatekeeper.robots.rules import (
    LongestMatch,
    PrefixesInOrder,
    RuleSet,
    ready_rules,
    rules_in,
    split_url,
)

if TYPE_CHECKING:
    from gatekeeper.robots.parser import RobotsTxt

__all__ = [
    "Conflicts",
    "Policy",
    "V2Semantics",
]

FIELDS = (
    "crawl-delay",
    "request-rate",
    "visit-time",
    "comment",
    "content-signal",
    "content-usage",
)


class Directives(NamedTuple):
    """What came of the values; those that can't be read are left out."""

    crawl_delay: float | None
    """Seconds; of several the largest (VND-01)."""
    request_rates: tuple[timing.RequestRate, ...]
    visit_times: tuple[timing.Window, ...]
    comments: tuple[str, ...]
    signal: dict[str, str]
    """What the Content-Signal lines say together (SIG-12)."""
    usage: Sequence[str]
    """Content-Usage lines, which speak of paths."""


def read_directives(said: Mapping[str, Sequence[str]]) -> Directives:
    """Read the values, as octets, of each of the `FIELDS`."""
    delays = map(timing.parse_crawl_delay, said["crawl-delay"])
    rates = map(timing.parse_request_rate, said["request-rate"])
    windows = map(timing.parse_visit_time, said["visit-time"])
    return Directives(
        crawl_delay=max((delay for delay in delays if delay is not None), default=None),
        request_rates=tuple(rate for rate in rates if rate),
        visit_times=tuple(window for window in windows if window),
        comments=tuple(map(shown, said["comment"])),
        signal=signals.combine_signals(map(signals.parse_content_signal, said["content-signal"])),
        usage=said["content-usage"],
    )


class UsageRules:
    """The Content-Usage lines of a rule set, by the paths that they speak of.

    Paths are matched as those of Allow and Disallow are, the longest one counts (SIG-05), and
    what is said twice of the same path is combined (SIG-07). Where finding the longest one
    takes too long, as in `pieces`, whatever some line forbids is forbidden.
    """

    __slots__ = ("_everywhere", "_found", "_paths", "_strictest", "_views")

    def __init__(self, values: Sequence[str]) -> None:
        views: dict[str, dict[str, str]] = {}
        known: dict[str, dict[str, str]] = {}
        everywhere: list[dict[str, str]] = []
        for path, text in map(signals.split_content_usage, values):
            view = known.get(text)
            if view is None:
                view = known[text] = signals.parse_preferences(text)
            if not path:
                everywhere.append(view)
                continue
            form = query_form(rfc_pattern(path))
            other = views.get(form)
            views[form] = view if other is None else signals.combine_usage([other, view])
        self._everywhere = signals.combine_usage(everywhere)
        self._paths = list(views)
        self._views = list(views.values())
        said = signals.combine_usage([self._everywhere, *known.values()])
        self._strictest = {label: answer for label, answer in said.items() if answer == "n"}
        paths = [("dis", path) for path in self._paths]
        self._found = ready_rules(paths, robots_file=False)

    def of(self, path: str) -> dict[str, str]:
        """The preferences for a path with its query."""
        code = self._found.decide(path)
        if code == DENIED:
            return dict(self._strictest)
        return dict(self._everywhere if code < 0 else self._views[code >> 1])


Conflicts = Literal["strict", "declared"]
V2Semantics = Literal["order", "precedence"]

_BIG = 65_536
"""Octets of rules from which their places are looked up at once, not with the first answer."""
_MAX_CANDIDATES = 1_000
"""Rules that are named as candidates: more than anybody reads, fewer than a file may hold."""
_MAX_RULES = 256
"""Rule objects that a policy keeps; beyond, it forgets them and makes them anew."""


class Policy:
    """What a robots.txt asks of one agent. Immutable, hashable, picklable, safe to share.

    Made by `RobotsTxt.policy`. Where a rule set declares a dialect other than RFC 9309 and
    `conflicts` is `strict`, a URL is allowed only if both readings allow it (DIA-03).
    """

    __slots__ = (
        "_offsets",
        "_readings",
        "_rules",
        "_sources",
        "_usage",
        "_wishes",
        "agent",
        "allowed",
        "conflicts",
        "dialect",
        "inherit_crawl_delay",
        "robots",
        "v2_semantics",
    )

    allowed: Callable[[str], bool]
    """allowed(url) -> bool: whether the URL may be fetched.

    The URL is absolute, or a path with its query; the host is not looked at, except by the
    1994 dialect (R94-26). Raises InvalidURL for text that is neither.
    """
    robots: RobotsTxt
    """The file."""
    agent: str
    """The product token that rule sets were chosen by."""
    dialect: Dialect
    """The one that the chosen rule set declares, or that was forced."""

    def __init__(
        self,
        robots: RobotsTxt,
        user_agent: str,
        *,
        conflicts: Conflicts = "strict",
        v2_semantics: V2Semantics = "order",
        inherit_crawl_delay: bool = False,
    ) -> None:
        if conflicts not in {"strict", "declared"}:
            raise ValueError(f'conflicts is "strict" or "declared", not {conflicts!r}')
        if v2_semantics not in {"order", "precedence"}:
            raise ValueError(f'v2_semantics is "order" or "precedence", not {v2_semantics!r}')
        self.robots = robots
        self.agent = product_token(user_agent)
        self.conflicts = conflicts
        self.v2_semantics = v2_semantics
        self.inherit_crawl_delay: bool = inherit_crawl_delay
        source = robots.source(precedence=v2_semantics == "precedence")
        readings = choose(source, self.agent.lower())
        if conflicts == "declared":
            readings = readings[:1]
        self._readings = readings
        self.dialect = readings[0].dialect
        first = readings[0]
        if speedups.ON and isinstance(first, LongestMatch) and len(readings) == 1:
            self.allowed = first.allows_url
        else:
            self.allowed = _of_urls(readings)
        self._wishes: Directives | None = None
        self._usage: UsageRules | None = None
        self._sources: dict[timing.RequestRate | None, str] | None = None
        self._rules: dict[tuple[int, int], Rule] | None = None
        self._offsets: list[array[int]] | None = None
        if robots.size > _BIG and sum(high - low for low, high in readings[0].spans) > _BIG:
            self._places(source.text)

    @property
    def allows_path(self) -> Callable[[str], bool]:
        """The hot one: takes a path with its query, as `urls.split` gives it; the verdict alone.

        >>> from gatekeeper.robots import RobotsTxt
        >>> allows = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot").allows_path
        >>> allows("/x?y"), allows("/a")
        (False, True)
        """
        return self._asker("")

    def _asker(self, origin: str) -> Callable[[str], bool]:
        readings = self._readings
        if len(readings) > 1:
            return _strictest([_allower(each, origin) for each in readings])
        return _allower(readings[0], origin)

    def quick_answer(self, origin: str = "") -> QuickAnswer:
        """A function for a hot path: `answer(text behind the authority)` is the verdict, or
        None where the text needs to be read as a URL first. `origin`: as `match_path` takes it.

        >>> from gatekeeper.robots import RobotsTxt
        >>> answer = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot").quick_answer()
        >>> answer("/x?y"), answer("/a"), answer("/a/../x")
        (False, True, None)
        """
        return path_answer(self._suspects(), self._asker(origin))

    def plain_answer(self, origin: str = "") -> PlainAnswer:
        """The same for paths that are known to be plain: never None.

        >>> from gatekeeper.robots import RobotsTxt
        >>> answer = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot").plain_answer()
        >>> answer("/x/y"), answer("/a")
        (False, True)
        """
        return plain_path_answer(self._suspects(), self._asker(origin))

    def _suspects(self) -> Suspects | None:
        first = self._readings[0]
        if isinstance(first, LongestMatch) and len(self._readings) == 1:
            return first.suspects()
        return None

    def decider(self, origin: str = "") -> Callable[[str], int] | None:
        """Which rule decides a path of the origin, as a number; None where two readings have a
        say.

        Paths with the same number get the same answer for the same reason; ROBOTS_FILE is the
        number of `/robots.txt`, which may always be asked for (RFC 9309 section 2.2.2, RFC-20).
        """
        readings = self._readings
        return _decider(readings[0], origin) if len(readings) == 1 else None

    def match(self, url: str) -> Match:
        """The answer with its reason: the deciding rule and its line. Raises as `allowed`."""
        origin, path = split_url(url)
        return self._match(path, origin)

    def match_path(self, path: str, origin: str = "") -> Match:
        """The same for a path with its query and its origin, as `urls.split` gives them.

        Where the origin is not known, a rule of 1994 that is a whole URL holds for any.
        """
        return self._match(path, origin)

    def _match(self, path: str, origin: str) -> Match:
        readings = self._readings
        code, by = _decider(readings[0], origin)(path), 0
        conflict = False
        for place in range(1, len(readings)):
            other = _decider(readings[place], origin)(path)
            if (code ^ other) & 1:
                conflict = True
                if code & 1:  # the stricter one decides
                    code, by = other, place
        rule = self._rule(by, code >> 1) if code >= 0 else None
        return Match(code & 1 == 1, rule, self.dialect, conflict, path, self, origin)

    def candidates(self, path: str, origin: str = "") -> tuple[Candidate, ...]:
        """The rules that match the path, the deciding one first, with their octets.

        All of them, unless a file made for it has more than a thousand.
        """
        text = self.robots.lines
        places = self._places(text)
        readings = list(enumerate(self._readings))
        # The reading that decides speaks first: with `strict` one that denies (DIA-03).
        readings.sort(key=lambda each: _decider(each[1], origin)(path) & 1)
        found: dict[int, tuple[int, bool]] = {}
        for place, reading in readings:
            v2 = reading.dialect is Dialect.V2
            rules = rules_in(text, reading.spans, v2=v2)
            given = {"origin": origin} if isinstance(reading, PrefixesInOrder) else {}
            for number, length in reading.matching(path, rules, **given):
                found.setdefault(places[place][number], (length, v2))
        kept = list(islice(found.items(), _MAX_CANDIDATES))
        numbers = line_numbers(text, [offset for offset, _ in kept])
        return tuple(
            Candidate(rule.line, rule.field, rule.value, rule.text, length)
            for offset, (length, v2) in kept
            for rule in (rule_at(text, offset, numbers[offset], v2=v2),)
        )

    def _rule(self, place: int, number: int) -> Rule:
        known = self._rules
        if known is None or len(known) >= _MAX_RULES:
            known = self._rules = {}
        rule = known.get((place, number))
        if rule is None:
            text = self.robots.lines
            offset = self._places(text)[place][number]
            line = text.count("\n", 0, offset) + 1
            v2 = self._readings[place].dialect is Dialect.V2
            rule = known[place, number] = rule_at(text, offset, line, v2=v2)
        return rule

    def _places(self, text: str) -> list[array[int]]:
        """Where each rule of each reading stands in the text; kept where finding it is felt."""
        found = self._offsets
        if found is None:
            spans = [reading.spans for reading in self._readings]
            known = {each: rule_offsets(text, each) for each in dict.fromkeys(spans)}
            found = [known[each] for each in spans]
            if self.robots.size > _BIG:
                self._offsets = found
        return found

    @property
    def crawl_delay(self) -> float | None:
        """Seconds by Crawl-delay; of several the largest (VND-01)."""
        return self._said().crawl_delay

    @property
    def request_rates(self) -> tuple[timing.RequestRate, ...]:
        """Every Request-rate that can be used, in file order."""
        return self._said().request_rates

    @property
    def visit_times(self) -> tuple[timing.Window, ...]:
        """The windows in which visits are all_allowed; none means any time (V2-24)."""
        return self._said().visit_times

    @property
    def timed(self) -> bool:
        """A verdict depends on the time of day: there is a Visit-time."""
        return bool(self._said().visit_times)

    @property
    def comments(self) -> tuple[str, ...]:
        """What the site tells the people behind the robot (V2-32)."""
        return self._said().comments

    @property
    def content_signal(self) -> dict[str, str]:
        """What the Content-Signal lines of the rule set say (SIG-12)."""
        return dict(self._said().signal)

    def content_usage(self, url: str) -> dict[str, str] | None:
        """Preferences for the URL by the longest Content-Usage (SIG-05); None if it is denied.

        A category that is missing is unknown; labels that the vocabulary does not know are left
        out. Raises InvalidURL as `allowed` does.
        """
        if not self.allowed(url):
            return None  # SIG-06
        if self._usage is None:
            self._usage = UsageRules(self._said().usage)
        return self._usage.of(split_url(url)[1])

    def may_visit(self, at: datetime) -> bool:
        """Whether a visit is all_allowed at that moment. Raises ValueError for a naive one."""
        return timing.may_visit(self.visit_times, at)

    def next_visit(self, at: datetime) -> datetime:
        """The first moment from `at` on at which a visit is all_allowed, in UTC."""
        return timing.next_visit(self.visit_times, at)

    def interval(self, at: datetime, took: float | None = None) -> float | None:
        """Seconds between two requests that the text asks for at that moment, or None.

        `took`: seconds that the last retrieval took. Only a rule set of the 2.0 draft has a
        rule of thumb for a file that names no rate (V2-31).
        """
        said = self._said()
        thumb = Dialect.V2 in {self.dialect, self.robots.forced}
        return timing.effective_interval(
            said.crawl_delay, said.request_rates, rule_of_thumb=thumb, at=at, took=took
        )

    def interval_source(self, at: datetime, took: float | None = None) -> str:
        """The line that `interval` goes by, for people; empty where the text asks for nothing."""
        seconds, said = self.interval(at, took), self._said()
        if seconds is None:
            return ""
        rate = timing.rate_in_force(said.request_rates, at)
        if seconds != said.crawl_delay and rate is None:
            return timing.by_rule_of_thumb(seconds)
        by = None if seconds == said.crawl_delay else rate
        known = self._sources
        if known is None:
            known = self._sources = {}
        if by not in known:  # finding a line costs a look at the whole rule set
            text = self.robots.lines
            known[by] = (
                timing.by_crawl_delay(text, self._spans("crawl-delay"), seconds)
                if by is None
                else timing.by_request_rate(text, self._spans("request-rate"), by)
            )
        return known[by]

    def _said(self) -> Directives:
        if self._wishes is None:
            said: dict[str, list[str]] = {}
            for _, values in self._spoken(*FIELDS):
                said = {field: said.get(field) or found for field, found in values.items()}
            if not said["crawl-delay"]:
                for _, values in self._inherited():
                    said |= values
            self._wishes = read_directives(said)
        return self._wishes

    def _spoken(self, *fields: str) -> Iterator[tuple[Spans, dict[str, list[str]]]]:
        """What each reading says of the fields. The first that speaks of one is read_directives."""
        text = self.robots.lines
        for reading in self._readings:
            yield reading.spans, values_in(text, reading.spans, *fields)

    def _inherited(self) -> Iterator[tuple[Spans, dict[str, list[str]]]]:
        """The Crawl-delay of `*`, where it counts for those that have none (VND-09)."""
        if self.inherit_crawl_delay:
            source = self.robots.source(precedence=False)
            spans = choose(source, "*")[0].spans
            yield spans, values_in(source.text, spans, "crawl-delay")

    def _spans(self, field: str) -> Spans:
        """Where the rule set speaks of a field: in the first reading that says something."""
        inherited = self._inherited() if field == "crawl-delay" else ()
        each = chain(self._spoken(field), inherited)
        return next((spans for spans, values in each if values[field]), ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, self._key()

    def __repr__(self) -> str:
        return f"<Policy for {self.agent!r} by {self.dialect} of {self.robots!r}>"

    def _key(self) -> tuple[RobotsTxt, str, Conflicts, V2Semantics, bool]:
        return (
            self.robots,
            self.agent,
            self.conflicts,
            self.v2_semantics,
            self.inherit_crawl_delay,
        )


def _restore(
    robots: RobotsTxt, agent: str, conflicts: Conflicts, semantics: V2Semantics, inherit: bool
) -> Policy:
    return Policy(
        robots,
        agent,
        conflicts=conflicts,
        v2_semantics=semantics,
        inherit_crawl_delay=inherit,
    )


def _of_urls(readings: tuple[RuleSet, ...]) -> Callable[[str], bool]:
    """`allowed` where not one set of RFC 9309 alone has the say."""

    def allowed(url: str) -> bool:
        origin, path = split_url(url)
        return all(_decider(each, origin)(path) & 1 for each in readings)

    return allowed


def _strictest(asked: Sequence[Callable[[str], bool]]) -> Callable[[str], bool]:
    """Allowed by all. A closure, for a bound method would keep the policy alive by itself."""

    def allows(path: str) -> bool:
        return all(allow(path) for allow in asked)

    return allows


def _allower(rules: RuleSet, origin: str) -> Callable[[str], bool]:
    if isinstance(rules, LongestMatch):
        return rules.asker
    decide = _decider(rules, origin)
    return lambda path: decide(path) & 1 == 1


def _decider(rules: RuleSet, origin: str) -> Callable[[str], int]:
    """Gives the code of the rule that decides a path.

    `/robots.txt` may be asked for in every dialect (RFC 9309 section 2.2.2, RFC-20, R96-16,
    V2-34). Compiled rules have an entry for it; of the others it is kept away here.
    """
    if isinstance(rules, LongestMatch):
        return rules.decider
    decide: Callable[[str], int] = rules.decide
    if isinstance(rules, PrefixesInOrder):
        decide = partial(rules.decide, origin=origin)  # R94-26 looks at the origin

    def decide_other(path: str) -> int:
        if path == ROBOTS_TXT or ("%" in path and is_robots_txt(path)):
            return ROBOTS_FILE
        return decide(path)

    return decide_other
