"""`RobotsTxt`: a robots.txt, parsed once and usable for any number of agents; and `Policy`: its
rules for one agent, which decides about URLs and explains its verdicts.

Parsing only finds the lines. The groups of an agent are located when its policy is created, its
rules are read for the first question, and all other records are read when they are requested: most
files contain rules for robots that never come.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import islice, pairwise
from typing import Literal

from gatekeeper.late import late
from gatekeeper.robots import timing
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.groups import RuleSet, agent_lines, choose, group_starts, records_of
from gatekeeper.robots.longest import LongestMatch
from gatekeeper.robots.model import (
    Candidate,
    DecodedText,
    Finding,
    Group,
    Match,
    Rule,
    group_of,
    records_in,
    rule_at,
)
from gatekeeper.robots.parser import (
    KNOWN_FIELDS,
    LIMIT,
    Dialect,
    FieldLine,
    Spans,
    decode,
    line_numbers,
    product_token,
    rule_starts,
    to_octets,
    to_unicode,
    values_in,
)
from gatekeeper.robots.patterns import split_url
from gatekeeper.robots.rules import UsageRules
from gatekeeper.robots.signals import (
    CleanParam,
    absolute_url,
    combine,
    parse_clean_param,
    parse_content_signal,
    parse_host,
)

Conflicts = Literal["strict", "declared"]
V2Semantics = Literal["order", "precedence"]

_DIRECTIVE = re.compile(
    r"\n[ \t]*+[CRVcrv]"
    r"(?i:rawl-delay|equest-rate|isit-time|omment|ontent-(?:signal|usage))[ \t]*+:"
)
"""Matches the start of a line with one of `timing.FIELDS`. The first line of a file belongs to no
group. Most lines begin with another letter, which is detected fastest without `re.IGNORECASE`."""
_LARGE = 65_536
"""Octets of rules from which the offsets of all rules are computed on creation, not for the first
match."""
_MAX_RULES = 256
"""Maximum number of deciding rules that a policy keeps."""
_MAX_CANDIDATES = 1_000
"""Maximum number of candidates that are listed: more than anybody reads, fewer than a file may
contain."""


class Policy:
    """The rules of a robots.txt for one agent. Immutable, hashable, picklable, safe to share
    between threads.

    Created by `RobotsTxt.policy`. If a rule set declares a dialect other than RFC 9309 and
    `conflicts` is `strict`, a URL is allowed only if both readings allow it (DIA-03); `declared`
    follows the declared dialect. In both modes `Match.conflict` reports that the readings differ.
    """

    allowed: Callable[[str], bool]
    """Whether a URL may be fetched: `allowed(url)` is a bool.

    The URL is absolute, or a path with its query. The host is not considered, except by the 1994
    dialect (R94-26). Raises InvalidURL for text that is neither.
    """
    robots: RobotsTxt
    """The file."""
    agent: str
    """The product token for which rule sets were chosen."""
    dialect: Dialect
    """The dialect that the chosen rule set declares, or the forced one."""
    conflicts: Conflicts
    """What applies where two readings differ: `robots.conflicts` of the settings."""
    v2_semantics: V2Semantics
    """Which rule decides in dialect 2.0: `robots.v2_semantics` of the settings."""
    inherit_crawl_delay: bool
    """Whether a group without Crawl-delay takes that of `*`: `robots.inherit_crawl_delay`."""

    def __init__(
        self,
        robots: RobotsTxt,
        user_agent: str,
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
        self.inherit_crawl_delay = inherit_crawl_delay
        name = to_octets(self.agent).lower()  # in this order, as the text of the file
        readings = choose(
            robots.lines, robots.forced, name, precedence=v2_semantics == "precedence"
        )
        self._compared: tuple[RuleSet, ...] = readings
        """All readings. With `declared` only the first one decides, but the others are compared."""
        if conflicts == "declared":
            readings = readings[:1]
        self._readings: tuple[RuleSet, ...] = readings
        self.dialect = readings[0].dialect
        single = self.plain
        # A bound method of the policy itself would be a reference cycle.
        self.allowed = single.allows_url if single else partial(_allowed, readings)
        self._cached_directives: timing.Directives | None = None
        self._usage: UsageRules | None = None
        self._cached_offsets: list[array[int]] | None = None
        self._rules: dict[tuple[int, int], Rule] = {}
        """The rules that decided last, by the number of their reading and their own."""
        if robots.size > _LARGE and sum(high - low for low, high in readings[0].spans) > _LARGE:
            self._offsets()

    def allows(self, path: str, origin: str) -> bool:
        """Return the verdict for a path with its query and its origin, as from `urls.split`.

        >>> from gatekeeper.robots import RobotsTxt
        >>> policy = RobotsTxt.parse("User-agent: *\\nDisallow: /x").policy("bot")
        >>> policy.allows("/x?y", ""), policy.allows("/a", "")
        (False, True)
        """
        return _allows(self._readings, path, origin)

    def flat(self) -> FlatRules | None:
        """Return the rules as a few strings, or None if the rules alone do not decide."""
        rules, directives = self.plain, self._directives()
        if rules is None or directives.visit_times:
            return None
        return rules.flat(directives.crawl_delay)

    @property
    def plain(self) -> LongestMatch | None:
        """The rule set of RFC 9309 that alone decides, and that no other reading can contradict;
        None if there is none."""
        first = self._compared[0]
        return first if isinstance(first, LongestMatch) and len(self._compared) == 1 else None

    def match(self, url: str) -> Match:
        """Return the verdict with the deciding rule and its line. Raises InvalidURL like
        `allowed`."""
        origin, path = split_url(url)
        return self.match_path(path, origin)

    def match_path(self, path: str, origin: str = "") -> Match:
        """Return the `match` for a path with its query and its origin, as from `urls.split`.

        If the origin is not known, a rule of the 1994 dialect that is a whole URL applies to any
        origin.
        """
        readings = self._compared
        code, by, conflict = readings[0].decide(path, origin), 0, False
        if len(readings) > 1:
            code, by, conflict = self._strictest(code, path, origin)
        rule = None
        if code >= 0:
            rule = self._rules.get((by, code >> 1)) or self._read_rule(by, code >> 1)
        return Match(code & 1 == 1, rule, self.dialect, conflict, path, self, origin)

    def _strictest(self, code: int, path: str, origin: str) -> tuple[int, int, bool]:
        """Return the code that decides, the number of its reading, and whether readings differ.

        `code` is that of the first reading.
        """
        by, conflict = 0, False
        for place, reading in enumerate(self._compared[1:], 1):
            other = reading.decide(path, origin)
            if (code ^ other) & 1:
                conflict = True
                if code & 1 and self.conflicts == "strict":
                    code, by = other, place
        return code, by, conflict

    def candidates(self, path: str, origin: str = "") -> tuple[Candidate, ...]:
        """Return the rules that match the path, the deciding one first, with their lengths in
        octets.

        At most a thousand are returned; only a file constructed for that purpose has more.
        """
        text = self.robots.lines
        places = self._offsets()
        readings = list(enumerate(self._readings))
        # The reading that decides comes first: with `strict` one that denies (DIA-03).
        readings.sort(key=lambda each: each[1].decide(path, origin) & 1)
        lengths: dict[int, tuple[int, bool]] = {}
        for place, reading in readings:
            v2 = reading.dialect is Dialect.V2
            for number, length in reading.matching(path, origin):
                lengths.setdefault(places[place][number], (length, v2))
        chosen = list(islice(lengths.items(), _MAX_CANDIDATES))
        numbers = line_numbers(text, [offset for offset, _ in chosen])
        return tuple(
            Candidate(rule.line, rule.field, rule.value, rule.text, length)
            for offset, (length, v2) in chosen
            for rule in (rule_at(text, offset, numbers[offset], v2=v2),)
        )

    def _read_rule(self, place: int, number: int) -> Rule:
        """Read a rule from the text, and keep it: URLs of a site meet a few rules again and
        again."""
        text = self.robots.lines
        reading = self._readings[place]
        if self._rules or self._cached_offsets:
            offset = self._offsets()[place][number]
        else:  # most files meet one rule
            offset = next(rule_starts(text, reading.spans, number))
        v2 = reading.dialect is Dialect.V2
        rule = rule_at(text, offset, self._line_number(offset), v2=v2)
        if len(self._rules) >= _MAX_RULES:
            self._rules = {}
        self._rules[place, number] = rule
        return rule

    def _offsets(self) -> list[array[int]]:
        """Return the offsets of the rules of each reading, found once."""
        offsets = self._cached_offsets
        if offsets is None:
            offsets = []
            found: dict[Spans, array[int]] = {}
            for reading in self._readings:  # two may have the same lines
                spans = reading.spans
                if spans not in found:
                    found[spans] = array("I", rule_starts(self.robots.lines, spans))
                offsets.append(found[spans])
            self._cached_offsets = offsets
        return offsets

    @property
    def crawl_delay(self) -> float | None:
        """Seconds of Crawl-delay, the largest of several (VND-01), or None."""
        return self._directives().crawl_delay

    @property
    def request_rates(self) -> tuple[timing.RequestRate, ...]:
        """The valid Request-rates, in file order. Of more than 100 different ones only the slowest
        is left, for all hours."""
        return self._directives().request_rates

    @property
    def visit_times(self) -> tuple[timing.Window, ...]:
        """The windows in which visits are welcome; empty means at any time (the 2.0 draft, V2-24).
        Of more than 100 different ones the first 100 are left."""
        return self._directives().visit_times

    @property
    def timed(self) -> bool:
        """Whether a verdict depends on the time of day, because there is a Visit-time."""
        return bool(self._directives().visit_times)

    @property
    def comments(self) -> tuple[str, ...]:
        """Messages of the site to the operators of the robot (the 2.0 draft, V2-32)."""
        return self._directives().comments

    @property
    def content_signal(self) -> dict[str, str]:
        """The Content-Signal preferences of the rule set, and for keys that it does not have those
        of the lines before the first user-agent line, which concern the whole file (SIG-12)."""
        text, own = self.robots.lines, self._directives().signal
        end = next((start for start, _, _ in agent_lines(text.lower())), len(text))
        lines = values_in(text, ((0, end),), "content-signal").get("content-signal", ())
        return combine([parse_content_signal(value) for value, _ in lines], "no") | own

    def content_usage(self, url: str) -> dict[str, str] | None:
        """Return the preferences of the longest matching Content-Usage (SIG-05), or None if the URL
        is denied.

        A missing category means that the preference is unknown. Labels that are not in the
        vocabulary are left out. Raises InvalidURL like `allowed`.
        """
        if not self.allowed(url):
            return None  # SIG-06
        if self._usage is None:
            self._usage = UsageRules(self._directives().usage)
        return self._usage.of(split_url(url)[1])

    def may_visit(self, at: datetime) -> bool:
        """Return True if a visit is welcome at that moment. Raises ValueError for a naive
        datetime."""
        return timing.may_visit(self.visit_times, at)

    def next_visit(self, at: datetime) -> datetime:
        """Return the first moment from `at` on at which a visit is welcome, in UTC.

        Raises ValueError for a naive datetime.
        """
        return timing.next_visit(self.visit_times, at)

    @property
    def asks_steadily(self) -> bool:
        """Whether `interval` is the same at any moment and for any duration of the last
        retrieval."""
        return not self._directives().request_rates and not self._has_rule_of_thumb

    def interval(self, at: datetime, took: float | None = None) -> float | None:
        """Return the seconds between two requests that the text asks for at that moment, or None.

        `took` is the duration of the last retrieval in seconds. It matters only for a 2.0 rule set
        without a rate, for which the draft has a rule of thumb (V2-31).
        """
        directives, thumb = self._directives(), self._has_rule_of_thumb
        return timing.effective_interval(
            directives.crawl_delay, directives.request_rates, rule_of_thumb=thumb, at=at, took=took
        )

    @property
    def _has_rule_of_thumb(self) -> bool:
        return self.dialect is Dialect.V2 or self.robots.forced is Dialect.V2

    def interval_source(self, at: datetime, took: float | None = None) -> str:
        """Describe the line that determines `interval`; empty if the text asks for no interval."""
        seconds, directives = self.interval(at, took), self._directives()
        if seconds is None:
            return ""
        rate = timing.rate_in_force(directives.request_rates, at)
        if seconds == directives.crawl_delay:
            asks, offset = f"crawl-delay {seconds:.10g} s", directives.offsets.get(seconds)
        elif rate is None:
            return f"rule of thumb {seconds:.10g} s: robots.txt of the 2.0 draft gives no rate"
        else:
            asks = f"request-rate {rate}, that is {rate.interval:.10g} s,"
            offset = directives.offsets.get(rate)
        if offset is None:
            return f"{asks} from robots.txt"
        return f"{asks} from robots.txt line {self._line_number(offset)}"

    def _directives(self) -> timing.Directives:
        directives = self._cached_directives
        if directives is None:
            directives, text = timing.NO_DIRECTIVES, self.robots.lines
            start, end, spans = 0, len(text), self._readings[0].spans
            if len(self._readings) == len(spans) == 1 and not self.inherit_crawl_delay:
                ((start, end),) = spans  # as in most files
            if _DIRECTIVE.search(text, start, end):
                directives = timing.read_directives(self._directive_lines())
            self._cached_directives = directives
        return directives

    def _directive_lines(self) -> dict[str, list[FieldLine]]:
        """Return the lines of each of `timing.FIELDS`, of the first reading that has any.

        The Crawl-delay of `*` comes last, if agents without one inherit it (VND-09).
        """
        text = self.robots.lines
        found: dict[str, list[FieldLine]] = {}
        for reading in self._readings:
            found = values_in(text, reading.spans, *timing.FIELDS) | found
        if self.inherit_crawl_delay:
            stars = choose(text, self.robots.forced, "*")[0].spans
            found = values_in(text, stars, "crawl-delay") | found
        return found

    def _line_number(self, offset: int) -> int:
        return self.robots.lines.count("\n", 0, offset) + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return Policy, self._key()

    def __repr__(self) -> str:
        return f"<Policy for {self.agent!r} by {self.dialect} of {self.robots!r}>"

    def _key(self) -> tuple[object, ...]:
        return (
            self.robots,
            self.agent,
            self.conflicts,
            self.v2_semantics,
            self.inherit_crawl_delay,
        )


def _allowed(readings: tuple[RuleSet, ...], url: str) -> bool:
    """Implement `Policy.allowed` for anything but a single rule set of RFC 9309."""
    origin, path = split_url(url)
    return _allows(readings, path, origin)


def _allows(readings: tuple[RuleSet, ...], path: str, origin: str) -> bool:
    """Return True if all readings allow the path."""
    return all(reading.decide(path, origin) & 1 for reading in readings)


_DIALECTS = ("auto", *Dialect)


class RobotsTxt(DecodedText):  # type: ignore[misc, unused-ignore] # frozen, as its base
    """A parsed robots.txt. Immutable, hashable by content, picklable, and safe to share between
    threads.

    >>> robots = RobotsTxt.parse("User-agent: *\\nDisallow: /private/\\nAllow: /private/door")
    >>> policy = robots.policy("examplebot")
    >>> policy.allowed("https://example.com/private/x"), policy.allowed("/private/door")
    (False, True)
    """

    @classmethod
    def parse(
        cls,
        body: bytes | bytearray | memoryview | str,
        *,
        dialect: str = "auto",
        limit: int = LIMIT,
    ) -> RobotsTxt:
        """Parse a body. Never raises on content.

        `dialect` is `auto`, which lets each rule set declare its own (docs/standards.md), or one of
        `rfc9309`, `1994`, `1996`, `2.0`, which is applied to the whole file. `limit` is in octets
        and must be at least 512,000 to satisfy RFC-41. Raises ValueError for an unknown dialect or
        a limit below 1, and TypeError for a body that is neither text nor octets.
        """
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect is one of {', '.join(_DIALECTS)}, not {dialect!r}")
        if limit < 1:
            raise ValueError(f"limit is a number of octets, 1 or more, not {limit}")
        forced = None if dialect == "auto" else Dialect(dialect)
        text, lines, size, truncated, bom = decode(body, limit)
        return cls(text, lines, size, truncated, bom, forced)

    def policy(
        self,
        user_agent: str,
        *,
        conflicts: Conflicts = "strict",
        v2_semantics: V2Semantics = "order",
        inherit_crawl_delay: bool = False,
    ) -> Policy:
        """Return the rules of this file for one agent.

        `user_agent` is a product token, a `token/version` or a whole User-Agent header. `conflicts`
        specifies the verdict where the declared dialect of a rule set and RFC 9309 disagree:
        `strict` denies, `declared` follows the declared dialect (DIA-03). `v2_semantics` selects
        file order or the struck text's precedence for 2.0 rule sets (the 2.0 draft, V2-21). With
        `inherit_crawl_delay` an agent whose own group has no Crawl-delay uses the one of `*`, as
        Bing does (VND-09).
        """
        return Policy(self, user_agent, conflicts, v2_semantics, inherit_crawl_delay)

    @property
    def text(self) -> str:
        """The text that was read: decoded, cut at the limit, with `\\n` as line ends."""
        return to_unicode(self.octets)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups with their lines; in a forced older dialect, the records."""
        text = self.lines
        spans = list(self._group_spans(text))
        numbers = line_numbers(text, [start for start, _, _, _ in spans])
        found: list[Group] = []
        for start, end, dialect, versioned in spans:
            v2 = dialect is Dialect.V2
            records = list(records_in(text[start:end], numbers[start], v2=v2))
            if records:  # text between blank lines may hold no record
                found.append(group_of(records, dialect, versioned))
        return tuple(found)

    @property
    def sitemaps(self) -> tuple[str, ...]:
        """Absolute URLs of Sitemap lines anywhere in the file (VND-13)."""
        return tuple(filter(None, map(absolute_url, self._values("sitemap"))))

    @property
    def licenses(self) -> tuple[str, ...]:
        """Absolute URLs of License lines (SIG-15)."""
        return tuple(filter(None, map(absolute_url, self._values("license"))))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names given in Host lines (VND-13)."""
        return tuple(filter(None, map(parse_host, self._values("host"))))

    @property
    def clean_params(self) -> tuple[CleanParam, ...]:
        """Query parameters that do not change the content of a page (VND-12)."""
        return tuple(filter(None, map(parse_clean_param, self._values("clean-param"))))

    @property
    def extensions(self) -> tuple[Rule, ...]:
        """All lines with a field that this package does not interpret, in file order."""
        found = records_in(self.lines)
        return tuple(rule for rule in found if rule.field.lower() not in KNOWN_FIELDS)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Errors and questionable constructs in the file (GK-06). Computed on each access."""
        found: tuple[Finding, ...] = late(__name__, "findings")(self)
        return found

    def _values(self, field: str) -> list[str]:
        text = self.lines
        lines = values_in(text, ((0, len(text)),), field).get(field, ())
        return [to_unicode(value) for value, _ in lines]

    def _group_spans(self, text: str) -> Iterator[tuple[int, int, Dialect, bool]]:
        """Yield start, end and dialect of each group, and whether it declares a version."""
        if self.forced in {None, Dialect.RFC9309}:
            starts = group_starts(text)
            records = records_of(text) if "robot-version" in text.lower() else ()
            heads = [record.start for record in records]
            for start, end in pairwise([*starts, len(text)]):
                inside = records[bisect_right(heads, start - 1) : bisect_right(heads, end - 1)]
                declared = [record for record in inside if record.version]
                dialect = declared[-1].dialect if declared else Dialect.RFC9309
                yield start, end, dialect, bool(declared)
        else:
            allow_ends = self.forced is not Dialect.R1994
            for record in records_of(text, allow_ends=allow_ends):
                dialect = record.dialect if self.forced is Dialect.V2 else self.forced
                yield record.start, record.end, dialect, record.version is not None

    def __repr__(self) -> str:
        cut = ", truncated" if self.truncated else ""
        groups = len(group_starts(self.lines))
        return f"<RobotsTxt of {self.size} octets, {groups} groups{cut}>"
