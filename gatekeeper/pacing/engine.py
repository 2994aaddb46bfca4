"""The scheduler without asyncio: decides which waiter may start a request now.

`Engine` grants leases of scopes that are due, in the order in which they fall due, and evaluates
the reports about them. It does no I/O and never waits: it reads time from the clock that it is
given, hands what must outlive the process to `Promises`, and what other processes must know to
`LedgerCalls`. `Scheduler` is the asyncio shell around it.

Invariants that hold between any two calls:

* A request starts no earlier than the `due_at` of each of its scopes: the interval since the
  scope's latest start or response head is over, and the scope is not blocked or paused.
* While a scope's interval is above zero, at most one of its leases has not seen its head.
* A lease takes all of its scopes or none, and frees all of them together. A scope's `in_flight`
  is the number of its open leases, its `unheaded` the number of those whose head is awaited.
* A clock that lies more than `DURABLE` seconds ahead is durable before the grant that set it is
  returned. If it can't be made durable, the grant is undone.
* At most `pacing.max_in_flight` leases are open. If this limit, and not a clock, keeps a due
  queue waiting, `overdue` is set, and the end of a lease serves that queue.
* A report is final, and only a good response ever shortens an interval.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Set
from functools import lru_cache
from typing import cast

from gatekeeper import http_fields
from gatekeeper.clock import Clock, SingleTimer
from gatekeeper.config import PacingConfig
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.ledger import LedgerCalls, Report
from gatekeeper.pacing.persistence import Promises, ScopeMemory
from gatekeeper.pacing.queues import (
    REFETCH,
    ROBOTS,
    Counters,
    Offer,
    QueuePlace,
    Queues,
    ScopeQueue,
    UnprovenLeases,
    Waiter,
)
from gatekeeper.pacing.scopes import (
    DURABLE,
    INF,
    LONGEST,
    REFUSALS,
    UNDERIVED,
    UNKNOWN,
    RequestReport,
    Scope,
    interval_for,
    jittered,
    usual_interval,
)
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import MASK
from gatekeeper.urls import mask

HELD, SERVING = QueuePlace.HELD, QueuePlace.SERVING

_MAX_INTERVALS = 10_000
_EXPIRY_PAUSE = 1.0
"""Least seconds between two searches for expired leases."""

_log = logging.getLogger(__name__)


class Engine:
    """Grants leases of scopes; see the module docstring. It is halted until `open` is called.

    `timer` is set for the moment at which something falls due. Without a timer the caller has to
    call `run` and `expire`. `remote` is the ledger outside this process. `on_idle` is called when
    the last lease ends after `halt`.
    """

    def __init__(
        self,
        clock: Clock,
        memory: ScopeMemory,
        rng: random.Random,
        timer: SingleTimer | None = None,
        *,
        remote: LedgerCalls | None = None,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        self.clock = clock
        self.now: Callable[[], float] = clock.monotonic
        self.scopes: list[dict[str, Scope]] = memory.scopes.table
        """The parts of the dictionary of scopes in memory, for a lookup without a call."""
        self.counters: Counters = Counters()
        if timer is None:
            timer = SingleTimer(clock, bool)
            timer.hold()
        self.timer = timer
        self.queues: Queues = Queues(timer, None if remote is None else remote.forget)
        self.leases: dict[Grant, None] = {}
        """The open leases."""
        self._next_expiry = INF
        """No lease expires before this monotonic time."""
        self.remote = remote
        self._usual_interval = lru_cache(_MAX_INTERVALS)(usual_interval)
        self.promises: Promises | None = None
        """Makes clocks durable; None while the engine is not open, or if there is no storage."""
        self.frozen: bool = False
        self.unanswered: Set[str] = frozenset()
        self.halted: bool = True
        """True if nothing is granted: not open yet, or closing."""
        self.overdue: bool = False
        """A queue is due that could not be served: too many leases in flight, or halted."""
        self.granted: int = 0
        """Leases granted since the start."""
        self._memory = memory
        self._rng = rng
        self._on_idle = on_idle
        self._audit = memory.audit
        self._grant_class = Grant if memory.audit is None else memory.audit.grants
        self._running = False
        self.unproven: UnprovenLeases = UnprovenLeases()
        self.adjust()

    # --- lifecycle and settings ---------------------------------------------------------

    def open(self) -> None:
        """Start granting, and make clocks durable if there is a storage."""
        self.promises = self._memory.promises
        self.halted = False

    def halt(self) -> None:
        """Stop granting. Open leases continue."""
        self.halted = True
        self.overdue = True

    def close(self) -> None:
        """Stop making clocks durable. Leases that are still open have no later line."""
        self.promises = None
        if self._audit is not None:
            for grant in self.leases:
                self._audit.left_open(grant)

    def adjust(self) -> None:
        """Apply changed settings of the operator's rules."""
        pacing = self._memory.rules.pacing
        self.pacing: PacingConfig = pacing
        # No lease is granted without waiting in a dry run, which counts each start, or with a
        # remote ledger, which has to book each start.
        self._never_immediate = pacing.dry_run or self.remote is not None
        self.follow_budgets()
        if self._audit is not None:
            self._audit.settings_changed(pacing)
        self.unproven.adjust(pacing.max_in_flight)

    def follow_budgets(self) -> None:
        """Apply changed daily budgets of the operator's rules."""
        self.budgeted: bool = self._memory.rules.budgeted

    def freeze(self, unanswered: Set[str]) -> None:
        """Record no failure against any host, since the fault is local. Hosts in `unanswered`,
        whose last attempt failed, get no lease except for robots.txt, whose fetch shows when the
        fault is over. The set may grow meanwhile."""
        self.frozen, self.unanswered = True, unanswered

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.frozen = False
        self.unanswered = frozenset()
        self.reconsider_all(self.now())

    # --- intervals ----------------------------------------------------------------------

    def derive(self, scope: Scope, asked: RobotsInterval, now: float) -> float:
        """Return the host's interval now, in seconds, and note its sources in `scope.derived`."""
        if scope.history is not None:
            found = interval_for(asked, scope.settings, scope.history, self.pacing, now)
            scope.asked, scope.derived = asked, found
            return found.seconds
        if asked is not scope.asked or scope.derived is UNDERIVED:
            scope.asked, scope.derived = self._usual_interval(asked, scope.settings)
        return scope.derived.seconds

    def robots_read(self, scope: Scope, asked: RobotsInterval, now: float) -> float:
        """Apply what a fetched robots.txt asks for; return the interval in force, in seconds.

        The interval counts from the last request. If the file was not known before, that
        request's clock was started with a guess, and now runs by what the file asks for, whether
        that is longer or shorter.
        """
        known, guessed, before = asked is not UNKNOWN, scope.asked is UNKNOWN, scope.interval
        seconds = self.derive(scope, asked, now)
        taught = None if scope.history is None else scope.history.back_off
        if known and taught is not None and taught.guessed:
            taught.interval_known(scope.derived.usual, self.pacing)
            seconds = self.derive(scope, asked, now)
        if seconds > scope.interval:
            self._lengthen(scope, seconds, now)
        elif known and guessed and scope.interval < LONGEST:
            scope.interval = jittered(seconds, self.pacing.jitter, self._rng)
        if scope.interval < before:
            self.changed(scope, now)
        return seconds

    def _put_in_force(self, scope: Scope, asked: RobotsInterval, now: float) -> bool:
        """Apply the interval that robots.txt asks for to a request that starts now. Return False
        if the request may not start now by that interval."""
        same = asked is scope.asked or asked == scope.asked
        seconds = self.derive(scope, asked, now)
        if seconds == scope.interval:
            return True
        if seconds > scope.interval and (scope.unheaded or scope.clock_at(seconds) > now):
            self._lengthen(scope, seconds, now)
            return False
        # If robots.txt asks for the same as before, another cause of slowing ended. If not, another
        # origin of the host asks for less.
        if seconds <= DURABLE < scope.interval < LONGEST and not same:
            self._memory.longer_intervals[scope.name] = scope.interval
        scope.interval = jittered(seconds, self.pacing.jitter, self._rng)
        return True

    def _lengthen(self, scope: Scope, seconds: float, now: float) -> None:
        """Lengthen the interval after the last request, which started by a shorter one."""
        scope.interval = seconds
        if self.promises is not None and seconds > DURABLE:
            self.promises.remember(scope, now)

    # --- granting -----------------------------------------------------------------------

    def acquire_nowait(
        self,
        url: str,
        host: str,
        asked: RobotsInterval | None,
        now: float | None = None,
        admit: Callable[[], Offer] | None = None,
        scope: Scope | None = None,
    ) -> Grant | None:
        """Grant a lease without waiting if the host is in memory and due and has no waiters.
        Return None otherwise.

        `asked` is what robots.txt asks for now. If it is None, `admit` is called for it once the
        lease could be granted; there is no lease if `admit` returns no interval. `scope` is the
        host's scope if the caller has it. Raises what `admit` raises, and StorageError.
        """
        if scope is None and (scope := self.scopes[hash(host) & MASK].get(host)) is None:
            return None
        if now is None:
            now = self.now()
        if (
            scope.queue is not None
            or self.halted
            or len(self.leases) >= self.pacing.max_in_flight
            or scope.due_at() > now
            or (scope.to_prove and self.unproven.room <= 0)
            or self._never_immediate
            or (self.budgeted and scope.settings.budget is not None)
            or (self.frozen and scope.name in self.unanswered)
        ):
            return None
        for other in scope.shared:
            if other.queue is not None or other.due_at() > now:
                return None
        if asked is None:
            offer = None if admit is None else admit()
            if offer is not scope.asked and not isinstance(offer, RobotsInterval):
                return None
            asked = offer
        return self.grant(scope, asked, now, url)

    def grant(
        self,
        scope: Scope,
        asked: RobotsInterval | None,
        now: float,
        url: str,
        counts_as_page: bool = False,
    ) -> Grant | None:
        """Grant a lease of a host that is due. Return None if it may not start now after all.

        All scopes are taken or none. There must be no await between the admission that returned
        `asked` and this call. Raises StorageError if the clocks can't be made durable.

        `asked` None: the caller sets the clocks. The lease starts whatever they are, with the
        interval in force, and they are not made durable. `counts_as_page`: of the host's budget.
        """
        history = scope.history
        # Usually robots.txt asks for the same as before, and that interval is in force.
        if (
            asked is not scope.asked
            or scope.derived.seconds != scope.interval
            or history is not None
        ) and not (asked is None or self._put_in_force(scope, asked, now)):
            return None
        promises = self.promises
        if promises is not None and promises.unwritten and not (asked is None or promises.marked):
            promises.mark()
        to_prove, shared = scope.to_prove, scope.shared
        expires = now + self.pacing.lease_ttl
        grant = self._grant_class(self, scope, url, now, expires, (scope.basis,), shared, to_prove)
        scope.basis = now
        scope.in_flight += 1
        scope.unheaded += 1
        if to_prove:
            self.unproven.room -= 1
        if shared:
            self._start_shared(grant, now)
        if history is not None:
            grant.refusals = history.refusals
        if counts_as_page:
            grant.counts_as_page = True
            scope.count_usage(now, pages=1)
        self.granted += 1
        self.leases[grant] = None
        if expires < self._next_expiry:
            self.expire_by(expires)
        if promises is not None and asked is not None:
            try:
                self.make_durable(grant, now, promises.promise)
            except BaseException:
                self.granted -= 1  # Not durable, so not granted.
                grant.undo()
                raise
        return grant

    def grant_at_any_time(self, scope: Scope, now: float, url: str) -> Grant:
        """Grant a lease whatever the clocks say; the caller sets them."""
        return cast("Grant", self.grant(scope, None, now, url))  # Never None without `asked`.

    def reopen(self, scope: Scope, url: str, now: float, seconds: float) -> Grant:
        """Reopen a lease that an earlier process granted. The clocks stay as they are."""
        if seconds <= 0:
            bases = (scope.basis,)
            return Grant(self, scope, url, now, now, bases, (), head_reported=True, open=False)
        clocks = [(one, one.basis, one.interval) for one in (scope, *scope.shared)]
        grant = self.grant_at_any_time(scope, now, url)
        grant.renew(seconds)
        for one, basis, interval in clocks:
            one.basis, one.interval = basis, interval
        if self.remote is not None:
            grant.hold = self.remote.adopt(tuple(one.name for one, _, _ in clocks))
        return grant

    def _start_shared(self, grant: Grant, start: float) -> None:
        for other in grant.others:
            grant.bases_before += (other.basis,)
            other.basis = start
            other.interval = jittered(other.settings.default, self.pacing.jitter, self._rng)
            other.in_flight += 1
            other.unheaded += 1

    def make_durable(self, grant: Grant, now: float, keep: Callable[[Scope, float], None]) -> None:
        """Make those clocks of a lease durable that have to be, by calling `keep`."""
        for scope in (grant.scope, *grant.others):
            if self._memory.must_keep(scope):
                keep(scope, now)

    # --- serving the waiters ------------------------------------------------------------

    def run(self, now: float) -> None:
        """Grant every lease that is due now, in the order in which the queues fell due. Callbacks
        may join, leave and report meanwhile."""
        if self._running:
            return  # Called by a callback: the loop below sees the changes.
        self._running = True
        self.overdue = False
        try:
            queues, unproven, queue = self.queues, self.unproven, None
            ready = queues.ready
            if queues.moments and queues.moments[0] <= now:
                queues.fall_due(now)
            while not self.halted and len(self.leases) < self.pacing.max_in_flight:
                # Queues held for lack of room fell due before all queues that are due now.
                if not unproven.held or unproven.room <= 0 or not (queue := unproven.next_held()):
                    if not ready:
                        return
                    queue = ready.popleft()
                    queue.place = SERVING
                self._serve(queue, now)
            self.overdue = True
        finally:
            self._running = False
        if self.halted and not self.leases:
            self._on_idle()

    def next_due(self) -> float:
        """Return when the next queue falls due or lease expires; inf: not before an event."""
        expiry = self._next_expiry
        return expiry if self.halted else min(expiry, self.queues.next_due())

    def freed(self, grant: Grant, now: float) -> None:
        """Reconsider the waiters for the scopes of a lease, and grant what is due."""
        queues = self.queues
        queues.reposition(grant.scope, now)
        for other in grant.others:
            queues.reposition(other, now)
        if queues.ready or self.overdue:
            self.run(now)

    def release_unproven(self, grant: Grant, now: float) -> None:
        """Stop counting the lease among those of unproven hosts, since its head arrived or another
        limit applies to it. A page of another unproven host may start then."""
        if grant.unproven:
            grant.unproven = 0
            self.unproven.room += 1
            if self.unproven.held:
                self.run(now)

    def reconsider_all(self, now: float) -> None:
        """Reconsider every queue, and grant what is due now."""
        self.queues.reposition_all(now)
        self.run(now)

    def changed(self, scope: Scope, now: float) -> None:
        """Reconsider a scope that changed, and grant what is due now."""
        self.queues.reposition(scope, now)
        self.run(now)

    def expire_by(self, moment: float) -> None:
        """Have `expire` called at that moment."""
        if moment < self._next_expiry:
            self._next_expiry = moment
            self.timer.set_no_later(moment)

    def expire(self, now: float) -> None:
        """End every expired lease as used, except those whose request is in flight. As it reads
        all open leases, it does so once in `_EXPIRY_PAUSE` seconds, so some end a little late."""
        if now < self._next_expiry:
            return
        for grant in [one for one in self.leases if one.expires_at <= now]:
            if grant.in_use:
                if grant.scope.queue is not None:
                    told = "requests wait for the response of %s, open for %.0f s: %s"
                    remedy = "a response has to be read to its end, or closed"
                    _log.warning(told, mask(grant.url), now - grant.start_at, remedy)
                grant.renew(self.pacing.lease_ttl)
                continue
            self.counters.expired += 1
            grant.release()
        first = min((one.expires_at for one in self.leases), default=INF)
        self._next_expiry = max(first, now + _EXPIRY_PAUSE)

    def _serve(self, queue: ScopeQueue, now: float) -> None:
        """Offer one lease to the queue's waiters, and leave the queue in its next place."""
        if queue.parked is not None:
            self._serve_shared(queue, now)
            return
        queues, scope = self.queues, queue.scope
        while True:
            waiter = queue.only
            if (waiter is None or waiter.gone) and (waiter := queue.first()) is None:
                queues.retire(queue)
                break
            if (queue.due_at() if queue.has_conditions else scope.due_at()) > now:
                queue.place = HELD
                queues.reposition(scope, now)
                break
            full = scope.to_prove and self.unproven.room <= 0
            if (full or scope.shared or self.frozen) and self._is_hindered(queue, waiter, now):
                break
            if (grant := self._offer(queue, scope, waiter, now)) is None:
                continue
            if not waiter.stays:
                queues.served(queue, waiter)
            waiter.deliver(grant)
            if not queue.alive:
                queues.retire(queue)
            else:
                queue.place = HELD
                if scope.in_flight < scope.settings.limit:  # Otherwise it is not due.
                    queues.reposition(scope, now)
            break  # One lease at a time: other hosts are due as well.
        for other in scope.shared:
            queues.reposition(other, now)

    def _is_hindered(self, queue: ScopeQueue, waiter: Waiter, now: float) -> bool:
        """Return True if something other than the host's own clock forbids the lease. The queue
        then waits for that."""
        if queue.scope.to_prove and self.unproven.room <= 0 and waiter.priority != ROBOTS:
            queue.place = HELD
            self.unproven.held[queue] = None
            return True
        if self.frozen and waiter.priority != ROBOTS and queue.scope.name in self.unanswered:
            queue.place = HELD  # Until `thaw`; a robots.txt waiter that joins moves it.
            return True
        for other in queue.scope.shared:
            if other.due_at() > now:
                self.queues.park(queue, other, now)
                return True
        return False

    def _serve_shared(self, queue: ScopeQueue, now: float) -> None:
        """Serve the first queue that is parked at a shared scope, if that scope is due."""
        if queue.parked and queue.scope.due_at() <= now:
            first, _ = queue.parked.popitem(last=False)
            first.parked_in, first.place = None, SERVING
            self._serve(first, now)
        if queue.parked:
            queue.place = HELD
            self.queues.reposition(queue.scope, now)
        else:
            self.queues.retire(queue)

    def _offer(self, queue: ScopeQueue, scope: Scope, waiter: Waiter, now: float) -> Grant | None:
        """Offer a lease to one waiter. Return the grant, or None if it may not start now."""
        budget = remote = None
        try:
            asked = waiter.offer()
            # Usually it is the same object as before, which needs no check of its type.
            if asked is not scope.asked and not isinstance(asked, RobotsInterval):
                if asked == REFETCH:
                    self.counters.refetches += 1
                    self.queues.start_fetching(queue, waiter)
                else:  # PASSED: it only wanted to be notified.
                    self.queues.served(queue, waiter)
                return None
            if self.budgeted and waiter.priority != ROBOTS:
                if (spent := scope.budget_spent(now)) is not None:
                    raise spent
                budget = scope.settings.budget
            if (remote := self.remote) is not None:
                seconds = self.derive(scope, asked, now)
                if not remote.holds(queue, seconds, asked is UNKNOWN, now, budget):
                    return None
            grant = self.grant(scope, asked, now, waiter.url, budget is not None)
        except Exception as error:  # noqa: BLE001 - any error goes to the waiter
            self.counters.refused += 1
            self.queues.served(queue, waiter)
            waiter.refuse(error)
            return None
        if remote is not None and grant is not None:
            grant.hold = remote.granted(queue)
        return grant

    # --- reports ------------------------------------------------------------------------

    def observe(
        self,
        grant: Grant,
        status: int | None,
        elapsed: float | None,
        retry_after: float | str | None,
        rate_limit: str | None,
        now: float,
    ) -> None:
        """Evaluate a report from which something may be learnt. See `Grant.report`."""
        if self.frozen and status is None and retry_after is None:
            return  # A local fault says nothing about the host, but a Retry-After came from it.
        scope, past = grant.scope, grant.scope.history
        wait, rate = None, http_fields.NO_QUOTA_RATE
        if retry_after is not None:
            wait = http_fields.parse_retry_after(retry_after, self.clock.wall())
        if rate_limit is not None:
            rate = http_fields.quota_rate(rate_limit) or rate
        # Sent before the last refusal arrived: a burst that is refused counts as one refusal.
        sent_before_refusal = past is not None and grant.refusals < past.refusals
        report = RequestReport(status, elapsed, wait, *rate, sent_before_refusal, hash(grant.url))
        if not self._learn(scope, report, now):
            return
        history = scope.ensure_history()
        if status in REFUSALS and history.back_off is not None and not sent_before_refusal:
            slowed = history.back_off.describe(now, self.clock.wall(), self.pacing)
            _log.info("%s: %s", scope.name, slowed)
        self.counters.blocks += 1
        self._blocked(scope, now)
        for other in grant.others:
            # Two hosts of one address refused requests: the machine is overloaded.
            if other.name.startswith("address:") and other.ensure_history().is_second_refused(
                scope.name
            ):
                other.ensure_history().block(
                    history.blocked_until, f"{scope.name}: {history.reason}"
                )
                self._blocked(other, now)

    def _learn(self, scope: Scope, report: RequestReport, now: float) -> bool:
        """Evaluate a report for its host's scope; return True if it blocks the scope. A longer
        interval counts from this request on: the clock changes immediately, and durably."""
        history = scope.ensure_history()
        pause, slowed = history.error_pause(), history.back_off is not None
        usual, guessed = 0.0, scope.asked is UNKNOWN
        if slowed or report.status in REFUSALS:
            self.derive(scope, scope.asked, now)
            usual = scope.derived.usual
        blocks = history.observe(report, now, usual, self.pacing, self._rng, guessed=guessed)
        changed = history.error_pause() != pause or (slowed and history.back_off is None)
        if not blocks:
            self.forget_if_clear(scope, now)
        seconds = self.derive(scope, scope.asked, now)
        if seconds > scope.interval:
            self._lengthen(scope, seconds, now)
            if self.remote is not None and not blocks:
                self.remote.report(Report(scope.name, 0.0, "", seconds, max(60.0, 2 * seconds)))
        if self.promises is not None and changed and not blocks:
            self.promises.remember(scope, now)
        return blocks

    def forget_if_clear(self, scope: Scope, now: float) -> None:
        """Drop the history of a scope if nothing in it matters any longer."""
        history = scope.history
        if (
            history is not None
            and history.latency is None
            and not history.matters(now, self.pacing)
        ):
            scope.history, scope.derived = None, UNDERIVED

    def _blocked(self, scope: Scope, now: float) -> None:
        self.queues.blocked(scope, now)
        if self.remote is not None:
            self.remote.report(report_of(scope, now))
        if self.promises is not None:
            self.promises.remember(scope, now)
        if self._audit is not None:
            self._audit.blocked(scope, "response")


def report_of(scope: Scope, now: float) -> Report:
    """Return the report for other processes about a scope that was refused or blocked."""
    history = scope.ensure_history()
    taught, seconds = history.back_off, max(0.0, history.blocked_until - now)
    if taught is None or not taught.slowed:
        return Report(scope.name, seconds, history.reason)
    return Report(scope.name, seconds, history.reason, taught.slowed, max(0.0, taught.try_at - now))
