"""The operator's hand on the scheduler, and looking at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from math import isnan

from gatekeeper.config import HostRule, PacingConfig, match_named
from gatekeeper.errors import ConfigError, StorageError
from gatekeeper.pacing.accounts import DURABLE
from gatekeeper.pacing.explain import ClockView, explain
from gatekeeper.pacing.intervals import Wish
from gatekeeper.pacing.ledger import INF, Scope
from gatekeeper.pacing.selfwait import Need, needs
from gatekeeper.pacing.shell import Shell

__all__ = ["SHARED", "Controls", "check_moment"]

CONFIGURED = ("domain:", "group:")
"""How the names of scopes begin that hosts share by configuration ..."""
SHARED = (*CONFIGURED, "address:")
"""... and of all that are shared."""


def check_moment(host: str, until_wall: float) -> None:
    """Raise ConfigError if a block of the host can't end then."""
    if isnan(until_wall):
        raise ConfigError(f"block of {host}: until={until_wall!r} is no moment; give seconds")


class Controls(Shell):
    """Pause, block, override, freeze; why, due_at, blocked."""

    # --- the operator's hand ------------------------------------------------------------

    def pause(self, host: str) -> None:
        """No turn of the host until `resume`; outlives a restart. Raises StorageError where that
        can't be made sure of; it is in force all the same. So do `resume` and `block`."""
        self._change(host, paused=True)

    def resume(self, host: str) -> None:
        """Turns again."""
        self._change(host, paused=False)

    def _change(self, host: str, *, paused: bool) -> None:
        scope = self._books.host(host)
        scope.past().paused = paused
        self._changed(scope)

    def block(self, host: str, until_wall: float, reason: str = "operator") -> None:
        """No turn before `until_wall` (wall seconds); a moment in the past lifts any block.

        Raises ConfigError, and changes nothing, where it is no number.
        """
        check_moment(host, until_wall)
        scope = self._books.host(host)
        now = self._clock.monotonic()
        until = now + (until_wall - self._clock.wall())
        if until > now:
            scope.past().block(until, reason)
            if self._remote is not None:
                self._remote.push(scope, until, reason)
        elif scope.history is not None:
            scope.history.unblock()
        self._changed(scope)

    def say(self, rule: HostRule) -> None:
        """The operator's word about hosts from now on, as a `[[host]]` table says it.

        It replaces, whole, the one for the same match. Raises ConfigError, and changes
        nothing then.
        """
        self._rules.say(rule)
        self._reheard(match_named(rule.match))

    def unsay(self, match: str) -> None:
        """Take the word for that match back, the configured one too. Raises ConfigError."""
        self._rules.unsay(match)
        self._reheard(match_named(match))

    def replace_words(self, rules: tuple[HostRule, ...]) -> None:
        """Another configuration's `[[host]]` tables instead of all that was said before.

        At once: taken one by one, a turn could be granted between two of them, at a pace
        that neither the old tables nor the new ones allow. Raises ConfigError, and changes
        nothing then.
        """
        self._rules.replace(rules)
        self._reheard("*")

    def adjust(self, pacing: PacingConfig) -> None:
        """Pace by other settings from now on, what is under way and waits included.

        Those that make a scope, or none, and `lease_ttl` have to stay as they are.
        """
        self._pacing = pacing
        self._rules.adjust(pacing)
        self._books.adjust()
        self._memory.adjust()
        for scope in self._books.scopes.values():
            if scope.name.startswith(SHARED):
                scope.settings = self._rules.for_shared(scope.name)
        self._reheard("*")

    def _reheard(self, match: str) -> None:
        """Hosts in memory hear what was said; others do when they are begun."""
        scopes = self._books.scopes
        if "*" in match:
            concerned = [one for one in scopes.values() if not one.name.startswith(SHARED)]
        else:
            concerned = [scopes[match]] if match in scopes else []
        now = self._clock.monotonic()
        for scope in concerned:
            scope.settings = self._rules.for_host(scope.name)
            told = tuple(o.name for o in scope.shared if not o.name.startswith(CONFIGURED))
            self._books.share(scope, told)
            if scope.interval is not None:
                scope.interval = None
                self._books.interval(scope, scope.wish, now)
            self._turns.requeue(scope, now)
        self._turns.run(now)

    def _changed(self, scope: Scope) -> None:
        now = self._clock.monotonic()
        try:
            if self._promises is not None:
                self._promises.promise(scope, now)
        finally:
            self._turns.requeue(scope, now)
            self._turns.run(now)

    def freeze(self, unanswered: Set[str]) -> None:
        """The fault is ours: no failure is recorded against any host, and those in
        `unanswered`, whose last attempt failed, get no turn but that of a robots.txt, which
        finds out when it is over. The set may grow meanwhile.
        """
        self._books.frozen = True
        self._books.unanswered = unanswered
        self._books.survey()

    def thaw(self) -> None:
        """Go on."""
        self._books.frozen = False
        self._books.unanswered = frozenset()
        self._books.survey()
        now = self._clock.monotonic()
        self._turns.look_again(now)
        self._turns.run(now)

    def forgive(self, host: str) -> None:
        """Take back what one request without an answer was counted as: the fault was ours."""
        scope = self._books.known(host)
        history = None if scope is None else scope.history
        if scope is None or history is None or not history.errors:
            return
        pause, now = history.error_pause(), self._clock.monotonic()
        history.errors -= 1
        if history.latency is None and not history.owes(now, self._pacing):
            scope.history = scope.interval = None
        gap = self._books.interval(scope, scope.wish, now)
        if pause > gap:
            scope.gap = gap
            self._changed(scope)

    def told(self, host: str, wish: Wish) -> float:
        """The text of a host was just read: its pace holds from the last request on, and
        outlives the process, whether or not anybody waits for a turn.

        Returns the seconds after which the next turn can be had at the latest.
        """
        scope = self._books.known(host)
        if scope is None:
            return 0.0
        now = self._clock.monotonic()
        before = scope.gap
        gap = self._books.found(scope, wish, now)
        if scope.gap < before:
            self._turns.requeue(scope, now)
            self._turns.run(now)
        return gap * (1.0 + self._pacing.jitter)

    # --- looking ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any lease is open."""
        return self._books.in_flight > 0

    def why(self, host: str) -> tuple[ClockView, ...]:
        """Every clock of the host, each with where it came from; empty for an unknown one."""
        scope = self._books.known(host)
        return () if scope is None else explain(scope, self._clock, self._pacing)

    def due_at(self, host: str) -> float:
        """Monotonic moment before which no turn can be had; inf: not before an event."""
        scope = self._books.known(host)
        if scope is None:
            return -INF
        return max(scope.due_at(), *(other.due_at() for other in scope.shared), -INF)

    def needs(self, host: str, near: Iterable[str] = ()) -> list[Need]:
        """Of which scopes a turn of the host takes a slot; see `selfwait.needs`."""
        return needs(self._books, host, near)

    def blocked(self, host: str) -> tuple[float, str] | None:
        """Until when (wall seconds) and why a host is blocked; None if it is not."""
        scope = self._books.known(host)
        now = self._clock.monotonic()
        if scope is None or scope.history is None or scope.history.blocked_until <= now:
            return None
        history = scope.history
        return self._clock.wall() + history.blocked_until - now, history.reason

    def held(self, host: str) -> tuple[float, str] | None:
        """For how many seconds the host gets no turn whatever else happens, and why: by a
        block of its own or of a scope that it shares. inf, "paused": until the operator says.
        """
        scope = self._books.known(host)
        if scope is None:
            return None
        now, longest = self._clock.monotonic(), None
        for one in (scope, *scope.shared):
            history = one.history
            if history is None:
                continue
            if history.paused:
                return INF, "paused"
            left = history.blocked_until - now
            if left > 0 and (longest is None or left > longest[0]):
                longest = left, history.reason
        return longest

    def refuse_unknown(self, host: str) -> None:
        """Raise StorageError while no clock can be kept: a host of whose pace nothing is known
        is not to be asked for it then, for its answer would start one.
        """
        if self._promises is not None and self._promises.exhausted:
            raise StorageError(f"the clock of {host} could not be kept: {self._promises.failing}")

    def unkept(self, host: str) -> str | None:
        """Why no turn of the host can be granted for the want of a place to keep its clock;
        None: that is not so, as far as can be told before the turn itself.
        """
        promises = self._promises
        if promises is None or (why := promises.failing) is None:
            return None
        if not promises.marked:
            return why
        scope = self._books.scopes.get(host)
        if scope is None:
            return None
        books = self._books
        kept = (
            one.gap > DURABLE or one.name in books.mixed or promises.unkept(one)
            for one in (scope, *scope.shared)
        )
        return why if any(kept) else None

    def paused(self, host: str) -> bool:
        """Did the operator pause the host?"""
        scope = self._books.known(host)
        return scope is not None and scope.history is not None and scope.history.paused

    def hosts(self) -> tuple[str, ...]:
        """Every scope held in memory, by name."""
        return tuple(self._books.scopes)

    def host_states(self) -> Counter[str]:
        """How many scopes are paused, blocked, waited for or idle. It looks at every one and
        changes nothing, so that it may be called from another thread.
        """
        now = self._clock.monotonic()
        return Counter(_state_of(scope, now) for scope in list(self._books.scopes.values()))


def _state_of(scope: Scope, now: float) -> str:
    history = scope.history
    if history is not None and history.paused:
        return "paused"
    if history is not None and history.blocked_until > now:
        return "blocked"
    return "idle" if scope.line is None else "waiting"
