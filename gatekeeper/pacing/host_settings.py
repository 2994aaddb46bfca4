"""The operator's rules about hosts: their intervals, limits, shared clocks and daily budgets.

The most specific `[[host]]` wins: the name itself, then the longest `*.suffix`, then `*`. A rule
may end (`until`). Of the rules for one match, the last one set at run time that has not ended is in
force; if there is none, the one of the configuration.

The day of a budget is 24 hours long and starts with a page: with the first lease for a page, and
then with the first one after the previous day ended. So it does not depend on a wall clock, and
the hosts of a crawl do not all start their days at midnight. Pages are counted by the leases
granted for them. A lease that was given back unused does not count, and robots.txt never counts.
Bytes are known only when the response has arrived, so requests in flight may exceed the limit on
bytes; nothing else may.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from gatekeeper.clock import utc
from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError, GatekeeperError, needs_extra

CONFIG_PREFIXES = ("domain:", "group:")
"""Prefixes of the names of scopes that hosts share by configuration."""
SHARED_PREFIXES = (*CONFIG_PREFIXES, "address:")
"""Prefixes of the names of all shared scopes."""
_UNLIMITED = 1 << 60
_log = logging.getLogger(__name__)


DAY = 86_400.0
"""Length of a budget's day, in seconds."""


class DailyBudget(NamedTuple):
    """How many pages and bytes a host may be asked for in a day. 0: no limit but its pace."""

    pages: int = 0
    bytes: int = 0

    def spent(self, pages: int, size: int) -> bool:
        """Return True if so many pages and bytes use up the budget.

        >>> DailyBudget(pages=10).spent(9, 1 << 40), DailyBudget(10, 500).spent(9, 500)
        (False, True)
        """
        return 0 < self.pages <= pages or 0 < self.bytes <= size

    def sentence(self, usage: Usage) -> str:
        """Return how much of the budget was used, as text for people.

        >>> usage = Usage(); usage.count(0.0, pages=3)
        >>> DailyBudget(pages=10).sentence(usage)
        '3 of 10 pages in 24 hours'
        """
        parts = [f"{usage.pages} of {self.pages} pages"] if self.pages else []
        if self.bytes:
            parts.append(f"{usage.bytes} of {self.bytes} bytes")
        return ", ".join(parts) + " in 24 hours"


class BudgetSpent(GatekeeperError):
    """The host's budget allows no page for `seconds`. A gate raises it as a Deferred."""

    def __init__(self, host: str, budget: DailyBudget, usage: Usage, seconds: float) -> None:
        super().__init__(f"the budget of {host} is spent: {budget.sentence(usage)}")
        self.host: str = host
        self.seconds: float = seconds


class Usage(msgspec.Struct, eq=False):
    """Pages and bytes that one host was asked for in its current day, in monotonic seconds."""

    began: float = float("-inf")
    """When the day's first page was granted."""
    pages: int = 0
    bytes: int = 0

    def count(self, start: float, pages: int = 0, size: int = 0) -> None:
        """Add pages and bytes of a lease that started at `start`.

        The first page after the end of a day starts the next day. Reports about a lease of an
        earlier day no longer count.

        >>> usage = Usage()
        >>> usage.count(5.0, pages=1); usage.count(DAY + 6.0, pages=1); usage.count(5.0, size=900)
        >>> usage.began - DAY, usage.pages, usage.bytes
        (6.0, 1, 0)
        """
        if start < self.began:
            return
        if start >= self.began + DAY:
            self.began, self.pages, self.bytes = start, 0, 0
        self.pages += pages
        self.bytes += size

    def allows_after(self, budget: DailyBudget, now: float) -> float:
        """Return the seconds until the budget allows a further page."""
        return max(0.0, self.began + DAY - now) if budget.spent(self.pages, self.bytes) else 0.0


class ScopeSettings(msgspec.Struct, frozen=True, eq=False):
    """The operator's settings for one kind of scope, shared by all scopes of that kind."""

    default: float = 1.0
    """Interval in seconds if robots.txt gives no rate."""
    default_source: str = "default"
    floor: float = 0.0
    cap: float | None = None
    own: float | None = None
    """Interval in seconds set for exactly these hosts. It replaces the default, and is a floor."""
    own_source: str = ""
    limit: int = 1
    """Most requests in flight at the same time."""
    budget: DailyBudget | None = None


MAX_OVERRIDES = 16
"""The most rules for one match that may be set at run time, one over the other."""
_ROUNDING = 1e-6
"""Seconds by which a rule may end early: a wall time is a rounded sum of floats."""
_MAX_SETTINGS = 10_000
"""Rules whose settings are kept, ended ones included."""


def checked(rule: HostRule) -> HostRule:
    """Return the rule as it is kept: its match in normal form, its end in UTC. Raises ConfigError
    for a bad match, and for a `by` or `until` that no file could have."""
    match = match_named(rule.match)
    by, until, place = rule.by, rule.until, f"[[host]] match={rule.match!r}"
    if by is not None and not (isinstance(by, str) and 0 < len(by) <= 200 and by.isprintable()):
        raise ConfigError(f"{place}: by: at most 200 printable characters that say who")
    if match != rule.match:
        rule = msgspec.structs.replace(rule, match=match)
    if until is None:
        return rule
    try:
        if not isinstance(until, datetime) or until.utcoffset() is None:
            raise ValueError
        return msgspec.structs.replace(rule, until=until.astimezone(UTC))
    except (ValueError, OverflowError):
        remedy = "give a datetime with its zone, of a year from 1 to 9999"
        raise ConfigError(f"{place}: until={until} is not a moment; {remedy}") from None


def end_of(rule: HostRule) -> float:
    """Return when a rule ends, in wall seconds; inf: never."""
    return math.inf if rule.until is None else rule.until.timestamp()


def lasting(rule: HostRule, seconds: float | None, wall: float) -> HostRule:
    """Return the rule with its end so many seconds after the wall time. None: as it is.

    Raises ConfigError for seconds that are not a number from 0 to ten years, and for a rule that
    says itself when it ends.
    """
    if seconds is None:
        return rule
    known = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not known or not 0 <= seconds <= 10 * 366 * DAY:
        raise ConfigError(f"seconds={seconds!r} is not a number of seconds from 0 to ten years")
    if rule.until is not None:
        raise ConfigError("give either `seconds` or the rule's `until`, not both")
    return msgspec.structs.replace(rule, until=utc(wall + seconds))


def explained(rule: HostRule, *, end: bool = True) -> str | None:
    """Return why the rule is there, who set it and, with `end`, when it ends; None if it says
    nothing.

    >>> explained(HostRule(match="a.example", reason="a complaint", by="Kim"))
    'a complaint (by Kim)'
    """
    notes = [] if rule.by is None else [f"by {rule.by}"]
    if end and rule.until is not None:
        notes.append(f"until {rule.until:%Y-%m-%dT%H:%M:%SZ}")
    if not notes:
        return rule.reason
    text = ", ".join(notes)
    return text if rule.reason is None else f"{rule.reason} ({text})"


def described(rule: HostRule, *, end: bool = True) -> str:
    """Return what a rule sets, and what `explained` returns.

    >>> described(HostRule(match="a.example", robots="deny", interval=2.0, by="Kim"))
    'robots deny, interval 2.0: by Kim'
    """
    names = ("robots", "interval", "concurrency", "max_pages_per_day", "max_bytes_per_day", "group")
    values = {name: getattr(rule, name) for name in names}
    text = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    why = explained(rule, end=end)
    return text if why is None else f"{text}: {why}"


class HostRules:
    """`[[host]]` entries and the rules set over them at run time, looked up by host name.

    >>> HostRules([HostRule(match="*.example.org", interval=5.0)]).find("a.example.org").interval
    5.0
    """

    def __init__(
        self,
        rules: Iterable[HostRule],
        wall: Callable[[], float] = lambda: -math.inf,
        groups: Mapping[str, GroupRule] | None = None,
    ) -> None:
        """`wall` is the wall clock by which rules end; the default ends none. `groups`: those that
        rules may name; None: any. Raises ConfigError for a bad rule, or if two rules have the same
        match."""
        self._wall = wall
        self._groups = groups
        self._configured: dict[str, HostRule] = {}
        """The configuration's rules by their match: a host, `*.` and a domain, or `*`."""
        self._set: dict[str, tuple[HostRule, ...]] = {}
        """Rules set at run time, by their match. Each one ends before those in front of it."""
        self._rules: dict[str, HostRule] = {}
        """The rules in force, by their match."""
        self._has_domains = False
        """True if any rule matches a domain."""
        self._ended: list[HostRule] = []
        """The rules that have ended since `log_ended`."""
        for given in rules:
            rule = self._checked(given)
            if rule.match in self._configured:
                raise ConfigError(_twice("host", "match", given.match))
            self._configured[rule.match] = rule
        for match in list(self._configured):
            self._choose(match)

    def put(self, match: str, rules: Iterable[HostRule]) -> None:
        """Replace the rules that are set at run time for a match: each is in force until it ends,
        then the one before it is again. Raises ConfigError, and changes nothing, for a bad rule,
        and for too many at a time."""
        kept: list[HostRule] = []
        for rule in map(self._checked, rules):
            # What ends no later than the rule over it is never in force again.
            if not self._is_over(rule):
                kept = [one for one in kept if end_of(one) > end_of(rule)]
            kept.append(rule)
        if len(kept) > MAX_OVERRIDES:
            remedy = "wait until one ends, or end them (seconds=0)"
            raise ConfigError(f"{match} has {MAX_OVERRIDES} overrides already; {remedy}")
        self._set[match] = tuple(kept)
        self._choose(match)

    def replace(self, rules: Iterable[HostRule]) -> None:
        """Replace the configuration's rules, below those set at run time. If it raises ConfigError,
        nothing has changed."""
        new = HostRules(rules, self._wall, self._groups)
        self._configured, self._ended = new._configured, self._ended + new._ended
        self._rules, self._has_domains = new._rules, new._has_domains
        for match in list(self._set):
            self._choose(match)

    def _checked(self, rule: HostRule) -> HostRule:
        if not (rule.group is None or self._groups is None or rule.group in self._groups):
            raise ConfigError(
                f"[[host]] match={rule.match!r}: no [[group]] named {rule.group!r}; add one"
            )
        return checked(rule)

    def _choose(self, match: str) -> None:
        """Put the rule for a match in force, and drop those that have ended."""
        known = self.known(match)
        self._ended += (over := [rule for rule in known if self._is_over(rule)])
        if self._configured.get(match) in over:
            del self._configured[match]
        self._set[match] = tuple(one for one in self._set.get(match, ()) if one not in over)
        if not self._set[match]:
            del self._set[match]
        self._rules.pop(match, None)
        if left := [rule for rule in known if rule not in over]:
            self._rules[match] = left[-1]
            self._has_domains = self._has_domains or match.startswith("*.")

    def _is_over(self, rule: HostRule) -> bool:
        return rule.until is not None and end_of(rule) <= self._wall() + _ROUNDING

    def end_due(self) -> list[str]:
        """End the rules in force whose time has come, and return their matches."""
        due = [match for match, rule in self._rules.items() if self._is_over(rule)]
        for match in due:
            self._choose(match)
        return due

    def log_ended(self) -> None:
        """Log which rules have ended since the last call, or had when they were read."""
        for rule in self._ended:
            _log.warning("the override for %s has ended: %s", rule.match, described(rule))
        self._ended.clear()

    def next_end(self) -> float:
        """Return when the next rule in force ends, in wall seconds; inf: none does."""
        return min(map(end_of, self._rules.values()), default=math.inf)

    def entries(self) -> list[HostRule]:
        """Return all rules in force, in no particular order."""
        return list(self._rules.values())

    def known(self, match: str) -> tuple[HostRule, ...]:
        """Return the rules for a match that are in force or can be again, the one in force last."""
        configured = self._configured.get(match)
        return (*(() if configured is None else (configured,)), *self._set.get(match, ()))

    def set_for(self, match: str) -> tuple[HostRule, ...]:
        """Return the rules that are set at run time for a match, the one in force last."""
        return self._set.get(match, ())

    def in_force(self, match: str) -> HostRule:
        """Return the rule for what a match names, whatever less specific match it comes from."""
        found = self.find(match.removeprefix("*")) or HostRule(match=match)
        return msgspec.structs.replace(found, match=match)

    def find(self, host: str) -> HostRule | None:
        """Return the most specific rule for this host, or None."""
        rules = self._rules
        rule = rules.get(host)
        dot = host.find(".") if self._has_domains and rule is None else -1
        while dot >= 0:
            if (rule := rules.get("*" + host[dot:])) is not None:
                break
            dot = host.find(".", dot + 1)
        return rule or rules.get("*")


class Rules(HostRules):
    """The rules of a gate, and the settings of every scope that follow from them."""

    def __init__(self, config: Config, wall: Callable[[], float] = lambda: -math.inf) -> None:
        """`wall`: see `HostRules`."""
        self.pacing: PacingConfig = config.pacing
        self._by_rule: dict[HostRule | None, ScopeSettings] = {}
        self._group_rules: dict[str, GroupRule] = {}
        for group in config.group:
            if self._group_rules.setdefault(group.name, group) is not group:
                raise ConfigError(_twice("group", "name", group.name))
        super().__init__(config.host, wall, self._group_rules)
        self._by_kind: dict[str, ScopeSettings] = {}
        self._domain_of: Callable[[str], str | None] | None = None
        if config.pacing.domain_interval is not None:
            self._domain_of = _registered_domain_of()

    @property
    def plain(self) -> bool:
        """True if no host shares a clock with others by configuration."""
        return self._domain_of is None and not self._group_rules

    @property
    def budgeted(self) -> bool:
        """True if any host has a budget."""
        rules = (None, *self.entries())
        return any(_budget(self.pacing, rule) is not None for rule in rules)

    def for_host(self, host: str) -> ScopeSettings:
        """Return the settings of a host's own scope: one object for all hosts of a rule."""
        rule = self.find(host)
        settings = self._by_rule.get(rule)
        if settings is None:
            if len(self._by_rule) >= _MAX_SETTINGS:
                self._by_rule.clear()
            settings = self._by_rule[rule] = self._settings(rule)
        return settings

    def _settings(self, rule: HostRule | None) -> ScopeSettings:
        pacing = self.pacing
        return ScopeSettings(
            default=pacing.default_interval,
            default_source="robots.txt gives no rate: pacing.default_interval",
            floor=pacing.min_interval,
            cap=pacing.max_interval,
            own=rule.interval if rule is not None else None,
            own_source=""
            if rule is None or rule.interval is None
            else f"operator: {rule.interval:g} s for {rule.match}{_note(rule)}",
            limit=(rule and rule.concurrency) or pacing.concurrency,
            budget=_budget(pacing, rule),
        )

    def shared_names(self, host: str) -> tuple[str, ...]:
        """Return the names of the scopes that this host shares with others by configuration."""
        names: list[str] = []
        if self._domain_of is not None and (domain := self._domain_of(host)) is not None:
            names.append(f"domain:{domain}")
        rule = self.find(host)
        if rule is not None and rule.group is not None:
            names.append(f"group:{rule.group}")
        return tuple(names)

    def for_shared(self, name: str) -> ScopeSettings:
        """Return the settings of a shared scope: `domain:`, `address:`, `group:` or a caller's."""
        kind, _, rest = name.partition(":")
        key = name if kind == "group" else kind
        settings = self._by_kind.get(key)
        if settings is None:
            settings = self._by_kind[key] = self._shared_settings(kind, rest)
        return settings

    def _shared_settings(self, kind: str, rest: str) -> ScopeSettings:
        seconds, limit = 0.0, _UNLIMITED
        if kind == "domain":
            seconds = self.pacing.domain_interval or 0.0
        elif kind == "address":
            seconds = self.pacing.address_interval or 0.0
        elif kind == "group" and (group := self._group_rules.get(rest)) is not None:
            seconds = group.interval
            limit = group.concurrency or _UNLIMITED
        return ScopeSettings(default=seconds, default_source=f"{kind} interval", limit=limit)

    def adjust(self, pacing: PacingConfig) -> None:
        """Apply changed settings of `[pacing]`. They must not change which scopes exist."""
        self.pacing = pacing
        self._by_rule.clear()
        self._by_kind.clear()


def _note(rule: HostRule) -> str:
    """Return who set a rule and until when, for the end of a text; empty if it does not say."""
    note = explained(msgspec.structs.replace(rule, reason=None))
    return "" if note is None else f" ({note})"


def _twice(table: str, key: str, value: str) -> str:
    return f"[[{table}]] {key}={value!r}: an earlier table has this {key} too; keep one of them"


def _budget(pacing: PacingConfig, rule: HostRule | None) -> DailyBudget | None:
    """Return a host's daily budget by the operator's settings; None if it has none."""
    pages, size = pacing.max_pages_per_day, pacing.max_bytes_per_day
    if rule is not None:
        pages = pages if rule.max_pages_per_day is None else rule.max_pages_per_day
        size = size if rule.max_bytes_per_day is None else rule.max_bytes_per_day
    return None if pages is None is size else DailyBudget(pages or 0, size or 0)


def _registered_domain_of() -> Callable[[str], str | None]:
    """Return a function from host to registered domain, by the Public Suffix List.

    Raises ConfigError if the extra `psl` is not installed.
    """
    with needs_extra("psl", "pacing.domain_interval"):
        from publicsuffixlist import PublicSuffixList  # noqa: PLC0415 - an optional extra
    suffixes = PublicSuffixList()

    def domain_of(host: str) -> str | None:
        if ":" in host or host.replace(".", "").isdigit():
            return None  # an address has no registered domain
        found = suffixes.privatesuffix(host)
        return str(found) if found else None

    return domain_of
