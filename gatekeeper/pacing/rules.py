"""The operator's rules about hosts: which intervals, limits and shared clocks follow from them.

The most specific `[[host]]` wins: the name itself, then the longest `*.suffix`, then `*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gatekeeper.config import Config, HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError
from gatekeeper.pacing.budgets import DailyBudget
from gatekeeper.pacing.scopes import ScopeSettings

__all__ = ["CONFIGURED", "SHARED", "HostRules", "Rules"]

CONFIGURED = ("domain:", "group:")
"""How the names of scopes begin that hosts share by configuration ..."""
SHARED = (*CONFIGURED, "address:")
"""... and of all that are shared."""
_UNLIMITED = 1 << 60


class HostRules:
    """`[[host]]` entries, looked up by host name.

    >>> HostRules([HostRule(match="*.example.org", interval=5.0)]).find("a.example.org").interval
    5.0
    """

    def __init__(self, rules: Iterable[HostRule]) -> None:
        """Of two for the same match the first counts. Raises ConfigError for a bad match."""
        self._exact: dict[str, HostRule] = {}
        self._suffix: dict[str, HostRule] = {}
        self._any: HostRule | None = None
        for rule in reversed(tuple(rules)):
            self.say(rule)

    def __bool__(self) -> bool:
        return bool(self._exact or self._suffix or self._any)

    def say(self, rule: HostRule) -> None:
        """Add a rule; it replaces the one for the same match. Raises ConfigError."""
        match = match_named(rule.match)
        if match == "*":
            self._any = rule
        elif match.startswith("*."):
            self._suffix[match[2:]] = rule
        else:
            self._exact[match] = rule

    def unsay(self, match: str) -> None:
        """Remove the rule for that match, if there is one. Raises ConfigError."""
        match = match_named(match)
        if match == "*":
            self._any = None
        elif match.startswith("*."):
            self._suffix.pop(match[2:], None)
        else:
            self._exact.pop(match, None)

    def replace(self, rules: Iterable[HostRule]) -> None:
        """Put these in the place of all. Raises ConfigError, having changed nothing."""
        new = HostRules(rules)
        self._exact, self._suffix, self._any = new._exact, new._suffix, new._any

    def everyone(self) -> list[HostRule]:
        """All rules, in no order."""
        found = [*self._exact.values(), *self._suffix.values()]
        return found if self._any is None else [*found, self._any]

    def find(self, host: str) -> HostRule | None:
        """The rule for this host, or None."""
        if (rule := self._exact.get(host)) is not None:
            return rule
        if self._suffix:
            rest = host
            while (dot := rest.find(".")) >= 0:
                rest = rest[dot + 1 :]
                if (rule := self._suffix.get(rest)) is not None:
                    return rule
        return self._any


class Rules:
    """The settings of every scope: from the configuration, and from rules added at run time."""

    def __init__(self, config: Config) -> None:
        self.pacing: PacingConfig = config.pacing
        self._hosts = HostRules(config.host)
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
            _budget(self.pacing, rule) is not None for rule in self._hosts.everyone()
        )

    def for_host(self, host: str) -> ScopeSettings:
        """The settings of a host's own scope; one object for all hosts of a rule."""
        rule = self._hosts.find(host) if self._hosts else None
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
        rule = self._hosts.find(host)
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
        self._hosts.say(rule)
        self._said.add(match_named(rule.match))
        self._kept.clear()

    def unsay(self, match: str) -> None:
        """Remove the rule for that match, a configured one too. Raises ConfigError."""
        self._hosts.unsay(match)
        self._said.discard(match_named(match))
        self._kept.clear()

    def replace(self, rules: tuple[HostRule, ...]) -> None:
        """Put these rules in the place of all. Raises ConfigError, and changes nothing then."""
        for rule in rules:
            self._check_group(rule)
        self._hosts.replace(rules)
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
