"""The operator's rules about hosts: their intervals, limits, shared clocks and daily budgets.

The most specific `[[host]]` wins: the name itself, then the longest `*.suffix`, then `*`.

The day of a budget is 24 hours long and starts with a page: with the first lease for a page, and
then with the first one after the previous day ended. So it does not depend on a wall clock, and
the hosts of a crawl do not all start their days at midnight. Pages are counted by the leases
granted for them. A lease that was given back unused does not count, and robots.txt never counts.
Bytes are known only when the response has arrived, so requests in flight may exceed the limit on
bytes; nothing else may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from gatekeeper.config import Config, GroupRule, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError, GatekeeperError, needs_extra

CONFIG_PREFIXES = ("domain:", "group:")
"""Prefixes of the names of scopes that hosts share by configuration."""
SHARED_PREFIXES = (*CONFIG_PREFIXES, "address:")
"""Prefixes of the names of all shared scopes."""
_UNLIMITED = 1 << 60


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

    def check(self, host: str, budget: DailyBudget, now: float) -> None:
        """Raise BudgetSpent if no further page is allowed before the end of the day."""
        left = self.began + DAY - now
        if left > 0 and budget.spent(self.pages, self.bytes):
            raise BudgetSpent(host, budget, self, left)


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


class HostRules:
    """`[[host]]` entries, looked up by host name.

    >>> HostRules([HostRule(match="*.example.org", interval=5.0)]).find("a.example.org").interval
    5.0
    """

    def __init__(self, rules: Iterable[HostRule]) -> None:
        """Raises ConfigError for a bad match, or if two rules have the same one."""
        self._rules: dict[str, HostRule] = {}
        """Rules by their match: a host, `*.` and a domain, or `*`."""
        self._has_domains = False
        """True if any rule matches a domain."""
        for rule in rules:
            if match_named(rule.match) in self._rules:
                raise ConfigError(_twice("host", "match", rule.match))
            self.add(rule)

    def add(self, rule: HostRule) -> None:
        """Add a rule, or replace the rule with the same match. Raises ConfigError."""
        match = match_named(rule.match)
        self._rules[match] = rule
        self._has_domains = self._has_domains or match.startswith("*.")

    def replace(self, rules: Iterable[HostRule]) -> None:
        """Replace all rules with these. If it raises ConfigError, nothing has changed."""
        new = HostRules(rules)
        self._rules, self._has_domains = new._rules, new._has_domains

    def entries(self) -> list[HostRule]:
        """Return all rules, in no particular order."""
        return list(self._rules.values())

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


class Rules:
    """Settings of every scope, from the configuration and from rules added at run time."""

    def __init__(self, config: Config) -> None:
        self.pacing: PacingConfig = config.pacing
        self.hosts: HostRules = HostRules(config.host)
        self._by_rule: dict[HostRule | None, ScopeSettings] = {}
        self._added: set[str] = set()
        self._groups: dict[str, GroupRule] = {}
        for group in config.group:
            if self._groups.setdefault(group.name, group) is not group:
                raise ConfigError(_twice("group", "name", group.name))
        self._by_kind: dict[str, ScopeSettings] = {}
        pacing = config.pacing
        self._domain_of: Callable[[str], str | None] | None = None
        if pacing.domain_interval is not None:
            self._domain_of = _registered_domain_of()
        for rule in config.host:
            self._check_group(rule)

    @property
    def plain(self) -> bool:
        """True if no host shares a clock with others by configuration."""
        return self._domain_of is None and not self._groups

    @property
    def budgeted(self) -> bool:
        """True if any host has a budget."""
        rules = (None, *self.hosts.entries())
        return any(_budget(self.pacing, rule) is not None for rule in rules)

    def for_host(self, host: str) -> ScopeSettings:
        """Return the settings of a host's own scope: one object for all hosts of a rule."""
        rule = self.hosts.find(host)
        settings = self._by_rule.get(rule)
        if settings is None:
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
            else f"operator: {rule.interval:g} s for {rule.match}",
            limit=(rule and rule.concurrency) or pacing.concurrency,
            budget=_budget(pacing, rule),
        )

    def shared_names(self, host: str) -> tuple[str, ...]:
        """Return the names of the scopes that this host shares with others by configuration."""
        names: list[str] = []
        if self._domain_of is not None and (domain := self._domain_of(host)) is not None:
            names.append(f"domain:{domain}")
        rule = self.hosts.find(host)
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
        elif kind == "group" and (group := self._groups.get(rest)) is not None:
            seconds = group.interval
            limit = group.concurrency or _UNLIMITED
        return ScopeSettings(default=seconds, default_source=f"{kind} interval", limit=limit)

    def add(self, rule: HostRule) -> None:
        """Add a rule at run time, or replace the rule with the same match.

        If it raises ConfigError, nothing has changed.
        """
        self._check_group(rule)
        self.hosts.add(rule)
        self._added.add(match_named(rule.match))
        self._by_rule.clear()

    def replace(self, rules: tuple[HostRule, ...]) -> None:
        """Replace all rules with these. If it raises ConfigError, nothing has changed."""
        for rule in rules:
            self._check_group(rule)
        self.hosts.replace(rules)
        self._added.clear()
        self._by_rule.clear()

    def adjust(self, pacing: PacingConfig) -> None:
        """Apply changed settings of `[pacing]`. They must not change which scopes exist."""
        self.pacing = pacing
        self._by_rule.clear()
        self._by_kind.clear()

    def overridden(self, host: str) -> bool:
        """Return True if a rule for exactly this host was added at run time."""
        return host in self._added

    def _check_group(self, rule: HostRule) -> None:
        if rule.group is not None and rule.group not in self._groups:
            raise ConfigError(
                f"[[host]] match={rule.match!r}: no [[group]] named {rule.group!r}; add one"
            )


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
