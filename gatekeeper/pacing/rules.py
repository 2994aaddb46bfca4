"""The operator's rules about hosts: their intervals, limits, shared clocks and daily budgets.

The most specific `[[host]]` wins: the name itself, then the longest `*.suffix`, then `*`.

The day of a budget is 24 hours that begin with a page: the first lease for one, and then the first
after the day before was over. So it depends on nobody's wall clock, and the hosts of a crawl don't
all begin theirs at midnight. Pages are leases granted for them; one that was given back unused does
not count, robots.txt never does. Bytes are known when the answer is here, so requests under way
may exceed them, and nothing else may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from gatekeeper.config import Config, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError, GatekeeperError

CONFIGURED = ("domain:", "group:")
"""How the names of scopes begin that hosts share by configuration ..."""
SHARED = (*CONFIGURED, "address:")
"""... and of all that are shared."""
_UNLIMITED = 1 << 60


DAY = 86_400.0
"""Seconds."""


class DailyBudget(NamedTuple):
    """What a host may be asked for in a day; 0: as much as its pace allows."""

    pages: int = 0
    bytes: int = 0

    def spent(self, pages: int, size: int) -> bool:
        """Is nothing left of it?

        >>> DailyBudget(pages=10).spent(9, 1 << 40), DailyBudget(10, 500).spent(9, 500)
        (False, True)
        """
        return 0 < self.pages <= pages or 0 < self.bytes <= size

    def sentence(self, usage: Usage) -> str:
        """What was used of it, for people.

        >>> usage = Usage(); usage.count(0.0, pages=3)
        >>> DailyBudget(pages=10).sentence(usage)
        '3 of 10 pages in 24 hours'
        """
        parts = [f"{usage.pages} of {self.pages} pages"] if self.pages else []
        if self.bytes:
            parts.append(f"{usage.bytes} of {self.bytes} bytes")
        return ", ".join(parts) + " in 24 hours"


class BudgetSpent(GatekeeperError):
    """No lease for a page of the host in the next `seconds`; a gate makes a Deferred of it."""

    def __init__(self, host: str, budget: DailyBudget, usage: Usage, seconds: float) -> None:
        super().__init__(f"the budget of {host} is spent: {budget.sentence(usage)}")
        self.host: str = host
        self.seconds: float = seconds


class Usage:
    """What one host was asked for in its day. Moments are monotonic seconds."""

    __slots__ = ("began", "bytes", "pages")

    def __init__(self, began: float = float("-inf"), pages: int = 0, size: int = 0) -> None:
        self.began: float = began
        """The moment of the day's first page."""
        self.pages: int = pages
        self.bytes: int = size

    def count(self, start: float, pages: int = 0, size: int = 0) -> None:
        """So many more of the lease that started then. The first page after the end of a day
        begins the next one; what is told of a lease of an earlier day does not count any more.

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

    def check(self, host: str, budget: DailyBudget, now: float) -> None:
        """Raise BudgetSpent where no page may be asked for before the end of the day."""
        left = self.began + DAY - now
        if left > 0 and budget.spent(self.pages, self.bytes):
            raise BudgetSpent(host, budget, self, left)


class ScopeSettings(msgspec.Struct, frozen=True, eq=False):
    """The operator's word about one kind of scope; shared by all scopes of the kind."""

    default: float = 1.0
    """Seconds where the text gives no rate."""
    default_source: str = "default"
    floor: float = 0.0
    cap: float | None = None
    own: float | None = None
    """Seconds set for these very hosts; takes the default's place, and is a floor."""
    own_source: str = ""
    limit: int = 1
    """Requests in flight at once."""
    budget: DailyBudget | None = None


class HostRules:
    """`[[host]]` entries, looked up by host name.

    >>> HostRules([HostRule(match="*.example.org", interval=5.0)]).find("a.example.org").interval
    5.0
    """

    def __init__(self, rules: Iterable[HostRule]) -> None:
        """Of two for the same match the first counts. Raises ConfigError for a bad match."""
        self._rules: dict[str, HostRule] = {}
        """By their match: a host, `*.` and a domain, or `*`."""
        self._domains = False
        """Some are of a domain."""
        for rule in reversed(tuple(rules)):
            self.say(rule)

    def say(self, rule: HostRule) -> None:
        """Add a rule; it replaces the one for the same match. Raises ConfigError."""
        match = match_named(rule.match)
        self._rules[match] = rule
        self._domains = self._domains or match.startswith("*.")

    def replace(self, rules: Iterable[HostRule]) -> None:
        """Put these in the place of all. Raises ConfigError, having changed nothing."""
        new = HostRules(rules)
        self._rules, self._domains = new._rules, new._domains

    def everyone(self) -> list[HostRule]:
        """All rules, in no order."""
        return list(self._rules.values())

    def find(self, host: str) -> HostRule | None:
        """The rule for this host, or None."""
        rules = self._rules
        rule = rules.get(host)
        dot = host.find(".") if self._domains and rule is None else -1
        while dot >= 0:
            if (rule := rules.get("*" + host[dot:])) is not None:
                break
            dot = host.find(".", dot + 1)
        return rule or rules.get("*")


class Rules:
    """The settings of every scope: from the configuration, and from rules added at run time."""

    def __init__(self, config: Config) -> None:
        self.pacing: PacingConfig = config.pacing
        self.hosts: HostRules = HostRules(config.host)
        self._kept: dict[HostRule | None, ScopeSettings] = {}
        self._said: set[str] = set()
        self._groups = {group.name: group for group in config.group}
        self._shared: dict[str, ScopeSettings] = {}
        pacing = config.pacing
        self._domain_of: Callable[[str], str | None] | None = None
        if pacing.domain_interval is not None:
            self._domain_of = _registered_domain_of()
        for rule in config.host:
            self._check_group(rule)

    @property
    def plain(self) -> bool:
        """Every host has its own clock and no other."""
        return self._domain_of is None and not self._groups

    @property
    def budgeted(self) -> bool:
        """Has any host a budget?"""
        return _budget(self.pacing, None) is not None or any(
            _budget(self.pacing, rule) is not None for rule in self.hosts.everyone()
        )

    def for_host(self, host: str) -> ScopeSettings:
        """The settings of a host's own scope; one object for all hosts of a rule."""
        rule = self.hosts.find(host)
        settings = self._kept.get(rule)
        if settings is None:
            settings = self._kept[rule] = self._settings(rule)
        return settings

    def _settings(self, rule: HostRule | None) -> ScopeSettings:
        pacing = self.pacing
        limit = pacing.concurrency
        if rule is not None and rule.concurrency is not None:
            limit = rule.concurrency
        return ScopeSettings(
            default=pacing.default_interval,
            default_source="robots.txt gives no rate: pacing.default_interval",
            floor=pacing.min_interval,
            cap=pacing.max_interval,
            own=rule.interval if rule is not None else None,
            own_source=""
            if rule is None or rule.interval is None
            else f"operator: {rule.interval:g} s for {rule.match}",
            limit=limit,
            budget=_budget(pacing, rule),
        )

    def shared_names(self, host: str) -> tuple[str, ...]:
        """The clocks that this host shares with others by configuration."""
        names: list[str] = []
        if self._domain_of is not None and (domain := self._domain_of(host)) is not None:
            names.append(f"domain:{domain}")
        rule = self.hosts.find(host)
        if rule is not None and rule.group is not None:
            names.append(f"group:{rule.group}")
        return tuple(names)

    def for_shared(self, name: str) -> ScopeSettings:
        """The settings of a shared scope: `domain:`, `address:`, `group:` or the caller's."""
        kind, _, rest = name.partition(":")
        key = name if kind == "group" else kind
        settings = self._shared.get(key)
        if settings is None:
            settings = self._shared[key] = self._shared_settings(kind, rest)
        return settings

    def _shared_settings(self, kind: str, rest: str) -> ScopeSettings:
        seconds, limit = 0.0, _UNLIMITED
        if kind == "domain":
            seconds = self.pacing.domain_interval or 0.0
        elif kind == "address":
            seconds = self.pacing.address_interval or 0.0
        elif kind == "group" and (group := self._groups.get(rest)) is not None:
            seconds = group.interval
            limit = group.concurrency or _UNLIMITED
        return ScopeSettings(default=seconds, default_source=f"{kind} interval", limit=limit)

    def say(self, rule: HostRule) -> None:
        """Add a rule at run time; it replaces the one for the same match.

        Raises ConfigError, and changes nothing then.
        """
        self._check_group(rule)
        self.hosts.say(rule)
        self._said.add(match_named(rule.match))
        self._kept.clear()

    def replace(self, rules: tuple[HostRule, ...]) -> None:
        """Put these rules in the place of all. Raises ConfigError, and changes nothing then."""
        for rule in rules:
            self._check_group(rule)
        self.hosts.replace(rules)
        self._said.clear()
        self._kept.clear()

    def adjust(self, pacing: PacingConfig) -> None:
        """Follow other settings of `[pacing]`; which scopes there are does not change."""
        self.pacing = pacing
        self._kept.clear()
        self._shared.clear()

    def overridden(self, host: str) -> bool:
        """Was a rule for this very host added at run time?"""
        return host in self._said

    def _check_group(self, rule: HostRule) -> None:
        if rule.group is not None and rule.group not in self._groups:
            raise ConfigError(
                f"[[host]] match={rule.match!r}: no [[group]] named {rule.group!r}; add one"
            )


def _budget(pacing: PacingConfig, rule: HostRule | None) -> DailyBudget | None:
    """What the operator gives a host for a day; None: as much as its pace allows."""
    pages, size = pacing.max_pages_per_day, pacing.max_bytes_per_day
    if rule is not None:
        pages = pages if rule.max_pages_per_day is None else rule.max_pages_per_day
        size = size if rule.max_bytes_per_day is None else rule.max_bytes_per_day
    return None if pages is None is size else DailyBudget(pages or 0, size or 0)


def _registered_domain_of() -> Callable[[str], str | None]:
    """A function from host to registered domain, by the Public Suffix List.

    Raises ConfigError where the extra `psl` is not installed.
    """
    try:
        from publicsuffixlist import PublicSuffixList  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(
            "pacing.domain_interval needs the Public Suffix List: "
            "pip install 'robots-gatekeeper[psl]' (in a checkout: pip install '.[psl]')"
        ) from error
    suffixes = PublicSuffixList()

    def domain_of(host: str) -> str | None:
        if ":" in host or host.replace(".", "").isdigit():
            return None  # an address has no registered domain
        found = suffixes.privatesuffix(host)
        return str(found) if found else None

    return domain_of
