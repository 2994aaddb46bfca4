"""`AuditRecord`: the audit record of a gate, as lines of a chain.

It makes the lines of what the gate does. Its classes (`leases`) call it: before a lease is granted,
when a lease ends, and at each refusal. What is said of a robots.txt is written before the first
decision by it that has a line.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gatekeeper import http_fields
from gatekeeper.audit.chain import (
    MAX_TEXT,
    VERSION,
    SegmentName,
    digest_of,
    encode,
    recorded_url,
    time_text,
)
from gatekeeper.audit.files import TextStore, count_segments
from gatekeeper.audit.index import find_decision
from gatekeeper.audit.leases import AuditedDecider, AuditedGrant, AuditedLeases, AuditedRobotsLease
from gatekeeper.audit.lines import WRITTEN, ScopeInForce
from gatekeeper.audit.retention import remove_old
from gatekeeper.audit.writer import ChainWriter
from gatekeeper.clock import Clock, boot_of
from gatekeeper.config import Config, HostRule, PacingConfig, agent_named
from gatekeeper.decision import Decision, State
from gatekeeper.fetching.outcomes import Retrieval
from gatekeeper.fetching.records import FileText, Record
from gatekeeper.gate.decider import Decider
from gatekeeper.gate.lease import Lease, LeaseManager
from gatekeeper.gate.parts import AuditStatus, FoundLine, GateParts
from gatekeeper.gate.protocols import HeldLease
from gatekeeper.gate.robots_pacing import RobotsLease
from gatekeeper.pacing.grants import Grant
from gatekeeper.pacing.host_settings import end_of
from gatekeeper.pacing.scopes import LONGEST, UNDERIVED, Scope
from gatekeeper.page_rules import PAGE_FIELDS, page_signals
from gatekeeper.signing import read_signing_key
from gatekeeper.urls import Target, without_credentials, without_userinfo

_log = logging.getLogger(__name__)

_URL: Final = re.compile(r"\b\w+://\S+")
_MAX_SOURCES: Final = 10_000
_OVERRIDE, _UNREACHABLE = State.OVERRIDE, State.UNREACHABLE
_GRANT, _OUTCOME = WRITTEN["grant"], WRITTEN["outcome"]
_POLITE: Final = ("robots", "fetch", "cache", "guard", "pacing", "group")
"""The sections whose settings are in the `start` line."""


class AuditRecord:
    """The record of one gate: what `audit.folder` turns on."""

    grants: type[Grant] = AuditedGrant

    def __init__(self, config: Config, user_agent: str, clock: Clock) -> None:
        """Raises ConfigError if the key that signs seals can't be used."""
        self._config = config
        self._user_agent = user_agent
        self._token = agent_named(user_agent)
        self._clock = clock
        audit = config.audit
        key = None if config.identity.key is None else read_signing_key(config.identity.key)
        self._folder = Path(audit.folder or ".")
        self._writer = ChainWriter(audit, clock, self._start, key=key, closed=self._remove_old)
        self._removing = asyncio.Lock()
        self._texts = TextStore(self._folder)
        self._finding = asyncio.Lock()
        self._refuses = audit.on_failure == "refuse"
        urls = {"full": _whole, "path": _without_query, "digest": self._digest}
        self._url: Callable[[str], str] = urls[audit.urls]
        self._rules: dict[str, HostRule] = {}
        self._sources: dict[str, str] = {}
        """Where the new file of an origin comes from, if not from the network."""
        self._rule_sources: dict[HostRule, str] = {}
        """Where rules came from; one that another replaces for a time comes back."""
        self._second, self._in_second = 0, 0
        self._robots_leases = 0
        self.signs: bool = config.identity.key is not None
        self.every_decision: bool = audit.what == "decisions"
        audited = partial(AuditedDecider, self)
        self.decider: Callable[..., Decider] = audited if self.every_decision else Decider
        self.leases: Callable[..., LeaseManager] = partial(AuditedLeases, self)
        self.robots_lease: Callable[..., RobotsLease] = partial(AuditedRobotsLease, audit=self)

    @property
    def failing(self) -> str | None:
        """Why no lease can be granted; None if one can."""
        return self._writer.failing if self._refuses else None

    async def open(self, parts: GateParts) -> None:
        """Begin a chain. Raises StorageError."""
        self._parts, self._rules = parts, {}
        await self._writer.open()
        await self._remove_old()
        parts.followers.append(self)
        parts.listeners.append(self._retrieved)
        self.overrides_changed("configuration")

    async def close(self) -> None:
        """End the chain."""
        self._parts.followers.remove(self)
        self._parts.listeners.remove(self._retrieved)
        await self._writer.close("closed")

    async def _remove_old(self) -> None:
        """Remove the segments that `audit.keep` does not keep, and texts that nothing names."""
        keep = self._config.audit.keep
        if keep is None:
            return
        async with self._removing:
            # A text that is named from now on is stored again, or known again; those that were
            # named before stand in a segment.
            self._texts.known.clear()
            written = self._writer.flush()
            before, own = self._clock.wall() - keep, self._writer.name
            try:
                unnamed = await asyncio.to_thread(remove_old, self._folder, before, own)
            except OSError as error:
                _log.warning("old segments in %s can't be removed: %s", self._folder, error)
                return
            if written:
                self._texts.remove(unnamed)

    def _start(self, writer: ChainWriter) -> dict[str, Any]:
        """Return the fields of the first line. What an earlier chain says, which was lost, is said
        again."""
        for record in self._parts.decider.records.values():
            record.witness = None
        if self._rules:
            self._rules = {}
            self.overrides_changed("configuration")
        config = msgspec.to_builtins(self._config)
        if self._config.fleet.url is not None:
            config["fleet"]["url"] = without_credentials(self._config.fleet.url)
        return {
            "gatekeeper": import_module("gatekeeper").__version__,  # no import of its products
            "user_agent": self._user_agent,
            "token": self._token,
            "host": writer.host,
            "pid": os.getpid(),
            "boot": boot_of(self._clock).id or None,
            "config": digest_of(encode(config, msgspec.json.Encoder(order="sorted").encode)),
            "settings": {name: config[name] for name in _POLITE},
            "urls": self._config.audit.urls,
            "salt": writer.salt if self._config.audit.urls == "digest" else msgspec.UNSET,
            "chains": writer.named,
        }

    # --- files --------------------------------------------------------------------------

    def learnt(self, record: Record) -> None:
        """Write the line of a new record."""
        if record.witness is None:
            self._robots(record, self._sources.pop(record.origin, "network"))

    def _retrieved(self, origin: str, retrieval: Retrieval, _seconds: float) -> None:
        if retrieval.shared:
            self._note_source(origin, "fleet")

    def _note_source(self, origin: str, source: str) -> None:
        if len(self._sources) >= _MAX_SOURCES:
            self._sources.clear()
        self._sources[origin] = source

    def _robots(self, record: Record, source: str) -> None:
        """Store the text of a record, and write its line. If the text can't be stored, the record
        has no line, and no lease is granted by it."""
        clock, current, good = self._clock, record.current, record.good
        now, wall = clock.monotonic(), clock.wall()
        digest = size = None
        if record.text is not None:
            size, digest = record.text.size, self._stored(record.text)
            if digest is None:
                self._note_source(record.origin, source)  # for the next attempt
                return
        down = record.unreachable_since is not None
        etag, modified = (None, None) if good is None else (good.etag, good.last_modified)
        if self._writer.note(
            "robots",
            origin=record.origin,
            source=source,
            outcome=current.outcome.row.name,
            status=current.status,
            hops=[self._url(hop) for hop in current.hops],
            validators={"etag": etag, "last_modified": modified},
            fetched_at=time_text(current.wall),
            expires_at=time_text(wall + record.expires - now),
            size=size,
            text=digest,
            since=time_text(wall - record.unreachable_for(now)) if down else None,
            good=good.outcome.row.name if down and good is not None else None,
        ):
            record.witness = digest or ""
        else:
            self._note_source(record.origin, source)

    def _stored(self, text: FileText) -> str | None:
        """Store a text, and return its digest; None if that failed."""
        try:
            return self._texts.keep(text.body())
        except OSError as error:
            self._writer.fail(error)
            return None

    def _witness(self, decision: Decision, record: Record) -> str | None:
        """Return the digest of the text that decided, None without one. A record that has no line
        yet gets it: it comes from the state file."""
        if record.witness is None:
            self._robots(record, self._sources.pop(record.origin, "state"))
        elif record.text is not None and record.witness not in self._texts.known:
            self._stored(record.text)
        state = decision.state
        by_text = not (state is None or state is _OVERRIDE or state is _UNREACHABLE)
        return record.witness or None if by_text else None

    # --- leases -------------------------------------------------------------------------

    def granted(self, grant: Grant, url: str, decision: Decision, record: Record | None) -> bool:
        """Write the line of a lease for a page. Return False if it may not be granted."""
        text = None if record is None else self._witness(decision, record)
        rule, lease = decision.rule, decision.id
        by = lease, decision.reason, None if rule is None else rule.line, text
        return self._granted(grant, lease, url, decision.user_agent, False, by)

    def robots_granted(self, grant: Grant, target: Target) -> bool:
        """Write the line of a lease for a robots.txt. Return False if it may not be granted."""
        self._robots_leases += 1
        lease = f"robots-{self._robots_leases:x}"
        return self._granted(grant, lease, target.url, self._token, True, (None, None, None, None))

    def _granted(
        self, grant: Any, lease: str, url: str, agent: str, robots: bool, by: tuple[Any, ...]
    ) -> bool:
        """`by`: the decision, its reason, line and text."""
        # A grant and its outcome are the cost of the record: their lines are made in as few calls
        # as is readable, and with no list of arguments that has to be copied.
        clock, writer, url = self._clock, self._writer, self._url(url)
        t, m, scopes = time_text(clock.wall()), clock.monotonic(), _scopes(grant)
        id_, why, row, text = by
        line = _GRANT(
            VERSION, 0, "", t, m, "grant", lease, url, agent, robots, id_, why, row, text, scopes
        )
        if writer.add_now(line):
            if grant.open:
                grant.audit, grant.lease_id, grant.place = self, lease, writer.place
        elif self._refuses:
            return False
        else:
            writer.omit(writer.failing or "")
            grant.audit = self if grant.open else None  # its outcome is left out, too
        return True

    async def status(self) -> AuditStatus:
        """Return the state of the record. Raises OSError."""
        segments, size = await asyncio.to_thread(count_segments, self._folder)
        writer = self._writer
        at, line = writer.sealed or (None, None)
        return AuditStatus(
            folder=str(self._folder),
            chain=writer.name,
            lines=writer.lines,
            failing=writer.failing,
            refuses=self._refuses,
            segments=segments,
            size=size,
            sealed_at=at,
            sealed_line=line,
            signed=self.signs,
        )

    async def find(self, decision: str) -> FoundLine | None:
        """Find a line about a decision in the open and the last closed segment. Raises OSError."""
        async with self._finding:  # one may read a whole segment
            writer = self._writer
            name = SegmentName(writer.name, writer.number)
            return await asyncio.to_thread(
                find_decision, self._folder, name, writer.index, decision
            )

    def place_of(self, lease: Lease) -> tuple[str, int] | None:
        """Return the chain and the number of the line of a lease; None if it has none."""
        return lease.grant.place if isinstance(lease.grant, AuditedGrant) else None

    def left_open(self, grant: Grant) -> None:
        """Write what is known of a lease that is still open as the gate closes."""
        if isinstance(grant, AuditedGrant) and grant.audit is not None:
            self.ended(grant)

    def ended(self, grant: AuditedGrant) -> None:
        """Write what became of a lease, once; count it, if its grant was left out."""
        grant.audit = None
        if grant.place is None:
            self._writer.omit(self._writer.failing or "the grant was left out")
            return
        clock, start, head = self._clock, None, None
        wall, now = clock.wall(), clock.monotonic()
        if grant.sent:
            start = time_text(wall - now + grant.start_at)
        if grant.head_at is not None:
            head = time_text(wall - now + grant.head_at)
        waits = http_fields.parse_retry_after(grant.retry_after, wall)
        signals = grant.signals or {}
        if grant.status == 402:
            signals = {"payment": True, **signals}
        end = time_text(wall)
        line = _OUTCOME(
            VERSION,
            0,
            "",
            end,
            now,
            "outcome",
            grant.lease_id,
            start,
            head,
            end,
            grant.status,
            waits,
            grant.size,
            self.signs and grant.sent and grant.is_ours(),
            signals,
        )
        self._writer.add(line)

    def answered(self, lease: HeldLease, status: int, headers: Mapping[str, str]) -> None:
        """Note what the head of a response says about use, for the lease's outcome. `headers`: as
        for `page_signals`."""
        grant = getattr(lease, "grant", None)
        silent = PAGE_FIELDS.isdisjoint(map(str.lower, headers))
        if isinstance(grant, AuditedGrant) and not silent:
            found = page_signals(headers, self._token, url=lease.url, status=status)
            signals = {
                "content_usage": found.content_usage,
                "x_robots_tag": sorted(found.rules.names),
                "licence": [self._url(one) for one in found.licenses] or found.license_required,
                "payment": found.payment_required,
                "tdm_reserved": found.tdm_reserved,
            }
            grant.signals = {name: value for name, value in signals.items() if value}

    # --- refusals and decisions ---------------------------------------------------------

    def refused(self, decision: Decision) -> None:
        """Write that a lease or a page was refused."""
        self.decided(decision, "refused")

    def decided_elsewhere(self, decisions: Sequence[Decision], count: int) -> None:
        """Write the decisions of a worker process, and count those that it made beside them."""
        for decision in decisions:
            self.decided(decision)
        if count:
            self._writer.omit("the worker process sent no more", count)

    def decided(self, decision: Decision, kind: str = "decision") -> None:
        """Write a decision of a question, or a refusal."""
        second = int(self._clock.monotonic())
        if second != self._second:
            self._second, self._in_second = second, 0
            self._writer.settle_rate()
        self._in_second += 1
        if self._in_second > self._config.audit.max_rate:
            self._writer.omit("audit.max_rate")
            return
        record = self._parts.decider.records.get(decision.origin)
        if record is not None and not _decided_by(record, decision):
            record = None  # it was replaced meanwhile
        text = None if record is None else self._witness(decision, record)
        retry_at = decision.retry_at
        self._writer.note(
            kind,
            url=self._url(decision.url),
            agent=decision.user_agent,
            verdict=decision.verdict,
            decision=decision.id,
            reason=decision.reason,
            line=None if decision.rule is None else decision.rule.line,
            text=text,
            retry_at=None if retry_at is None else time_text(retry_at.timestamp()),
        )

    # --- operators and blocks -----------------------------------------------------------

    def blocked(self, scope: Scope, by: str) -> None:
        """Write a block, or that it was lifted."""
        clock, history = self._clock, scope.history
        wall = clock.wall()
        until, reason = 0.0, None
        if history is not None:
            until, reason = history.blocked_until - clock.monotonic(), history.reason
        self._writer.note(
            "block",
            scope=scope.name,
            by=by,
            reason=_short(reason),
            since=time_text(wall),
            until=time_text(wall + max(0.0, min(until, LONGEST))),
        )

    def paused(self, host: str, by: str, ended: bool) -> None:
        """Write a pause, or its end."""
        since = time_text(self._clock.wall())
        self._writer.note(
            "pause", scope=host, by=by, reason=None, since=since, until=None, ended=ended
        )

    def settings_changed(self, pacing: PacingConfig) -> None:
        """Write settings of a reload."""
        self._writer.note("settings", settings={"pacing": msgspec.to_builtins(pacing)})

    def rules_changed(self) -> None:
        """Do nothing: `overrides_changed` knows the source."""

    def overrides_changed(self, source: str) -> None:
        """Write the operator's rules about hosts that came, changed or ended."""
        earlier, hosts = self._rules, self._parts.scheduler.host_rules
        self._rules = {one.match: one for one in hosts.entries()}
        for match in {**earlier, **self._rules}:
            before, rule = earlier.get(match), self._rules.get(match)
            if rule == before:
                continue
            if before is not None and before not in hosts.known(match):
                self._override(before, self._rule_sources.pop(before, source), ended=True)
            if rule is not None:
                fresh = "call" if source == "configuration" and hosts.set_for(match) else source
                self._override(rule, self._rule_sources.setdefault(rule, fresh), ended=False)
        if len(self._rule_sources) > 2 * len(self._rules) + 100:  # most rules are no more
            self._rule_sources = {one: self._rule_sources[one] for one in self._rules.values()}

    def _override(self, rule: HostRule, source: str, *, ended: bool) -> None:
        self._writer.note(
            "override",
            match=rule.match,
            by=rule.by,
            reason=_short(rule.reason),
            until=None if rule.until is None else time_text(end_of(rule)),
            rule=None if ended else msgspec.to_builtins(replace(rule, reason=_short(rule.reason))),
            source=source,
            ended=ended,
        )

    # --- URLs ---------------------------------------------------------------------------

    def _digest(self, url: str) -> str:
        salted = f"{self._writer.salt}{recorded_url(url)}"
        return hashlib.sha256(salted.encode(errors="replace")).hexdigest()


def _decided_by(record: Record, decision: Decision) -> bool:
    at = None if decision.fetched_at is None else decision.fetched_at.timestamp()
    walls = (record.current.wall, None if record.good is None else record.good.wall)
    return any(at is not None and one is not None and abs(at - one) < 1e-5 for one in walls)


def _whole(url: str) -> str:
    if len(url) <= MAX_TEXT and "@" not in url and "#" not in url:
        return url  # as most are
    return recorded_url(url)[:MAX_TEXT]


def _without_query(url: str) -> str:
    return _whole(url).partition("?")[0]


def _short(text: str | None) -> str | None:
    """Return a text of people, without credentials in URLs."""
    if text is not None and "@" in text:
        text = _URL.sub(lambda url: without_userinfo(url[0]), text)
    return None if text is None else text[:MAX_TEXT]


def _scopes(grant: Any) -> list[ScopeInForce]:
    """Return the interval in force of each scope of a grant, and the time since its last start."""
    derived, start, bases = grant.derived, grant.start_at, grant.bases_before
    if derived is UNDERIVED:
        seconds, source = 0.0, "an earlier process"
    else:
        seconds, parts = derived.seconds, derived.parts
        source = parts[0][1] if len(parts) == 1 else derived.source
    known = _since(start - bases[0])
    found = [ScopeInForce(grant.scope.name, min(seconds, LONGEST), source, known)]
    if grant.others:
        for one, settings, basis in zip(grant.others, grant.shared, bases[1:], strict=True):
            seconds, source = settings.default, settings.default_source
            found.append(ScopeInForce(one.name, seconds, source, _since(start - basis)))
    return found


def _since(seconds: float) -> float | None:
    # It is without end for a scope that was not asked yet.
    return int(seconds * 1e6 + 0.5) / 1e6 if seconds < LONGEST else None
