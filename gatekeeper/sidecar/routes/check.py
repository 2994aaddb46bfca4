"""`/v1/check`, `/v1/explain`, `/v1/robots`, `/v1/history`: decisions, and the files behind them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web

from gatekeeper import urls
from gatekeeper.client import wire
from gatekeeper.clock import UtcTime, utc
from gatekeeper.config import token_of
from gatekeeper.decision import Decision, Reason, State
from gatekeeper.fetching.outcomes import Outcome, classify_body, is_binary, parser_input
from gatekeeper.fetching.records import NO_TEXT
from gatekeeper.robots import Finding, Group, Policy, RobotsTxt
from gatekeeper.sidecar import routing
from gatekeeper.sidecar.inline import InlineCall, read_inline_body
from gatekeeper.sidecar.routing import CHECK, Call, Problem, Routes, json_response
from gatekeeper.sidecar.service import Service
from gatekeeper.sites.lint import coding_findings

ROUTES: Routes[Service] = Routes(needs=CHECK)


class CheckQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/check`."""

    url: str
    user_agent: wire.UserAgent | None = None


def check_url_inline(service: Service, call: InlineCall) -> bytes | None:
    """`check_url`, if the file is cached. Return None otherwise."""
    query = _read_question(call.query)
    decision = service.answers.decide(query.url, user_agent=query.user_agent)
    if decision is None:
        return None
    service.decided(decision, call)
    return wire.encode(decision)


@ROUTES.add("GET", "/v1/check", query=CheckQuery, answers={200: Decision}, inline=check_url_inline)
async def check_url(service: Service, call: Call) -> web.StreamResponse:
    """Check one URL. The status is 200 whatever the verdict."""
    query = _read_question(call.query)
    decision = await service.gate.check(query.url, user_agent=query.user_agent)
    service.decided(decision, call)
    return json_response(decision)


def _read_question(text: str) -> CheckQuery:
    """Read the query string of a question. Raises Problem 400."""
    if text.startswith("url=") and "&" not in text:  # the usual form needs no dictionary
        return CheckQuery(routing.decode(text[4:]))
    return routing.read_query(text, CheckQuery)


def check_urls_inline(service: Service, call: InlineCall) -> bytes | None:
    """`check_urls`, if the batch is short and every file is cached. Return None otherwise."""
    server, answers = service.config.server, service.answers
    batch = read_inline_body(call, wire.Batch, limit=server.max_body)
    if len(batch.urls) > min(server.max_batch, answers.max_batch):
        return None
    decisions = answers.decide_all(batch.urls, user_agent=batch.user_agent)
    return None if decisions is None else service.decided_all(decisions, call)


@ROUTES.add(
    "POST", "/v1/check", body=wire.Batch, answers={200: wire.Decisions}, inline=check_urls_inline
)
async def check_urls(service: Service, call: Call) -> web.StreamResponse:
    """Check a batch of URLs, in their order. A malformed URL gets `deny`, `invalid_url`."""
    batch = await call.body(wire.Batch)
    max_batch = service.config.server.max_batch
    if len(batch.urls) > max_batch:
        detail = f"a batch may have {max_batch} URLs at most"
        raise Problem(413, "too-large", detail, most=max_batch)
    decisions = await service.gate.check_all(batch.urls, user_agent=batch.user_agent)
    return json_response(service.decided_all(decisions, call))


# --- `/v1/explain`, `/v1/robots`, `/v1/history`: how a decision came about, and the file.


class WhatIf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/explain`: a robots.txt, and the URL to decide by it."""

    robots_txt: str
    url: str
    user_agent: wire.UserAgent


class RobotsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/robots`."""

    origin: str
    user_agent: wire.UserAgent | None = None
    version: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """The SHA-256 of a past version, as `/v1/history` lists it."""


class HistoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/history`."""

    origin: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an origin's file, or its absence, and when it was seen."""

    sha256: str | None
    first_seen: UtcTime
    last_seen: UtcTime
    outcome: str
    status: int | None
    size: int


class History(msgspec.Struct, frozen=True):
    """The versions of an origin's file, oldest first."""

    origin: str
    versions: tuple[Version, ...]


class RobotsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of an origin as it was parsed."""

    origin: str
    user_agent: str
    state: State | None = None
    status: int | None
    fetched_at: UtcTime | None
    expires_at: UtcTime | None = None
    size: int | None
    truncated: bool
    groups: tuple[Group, ...]
    sitemaps: tuple[str, ...]
    licenses: tuple[str, ...]
    hosts: tuple[str, ...]
    timing: wire.Timing
    content_signal: dict[str, str]
    findings: tuple[Finding, ...]
    version: str | None = None
    """The SHA-256 of the text, where a past version was asked for."""
    robots_txt: str | None = None
    """The text, where a past version was asked for."""


@ROUTES.add("GET", "/v1/explain", query=CheckQuery, answers={200: wire.Explanation})
async def explain_url(service: Service, call: Call) -> web.StreamResponse:
    """Explain a decision: the text, every rule that matched, and how the file was fetched."""
    return json_response(await explanation(service, call.parameters(CheckQuery), call))


async def explanation(service: Service, query: CheckQuery, call: Call) -> wire.Explanation:
    """Build the answer of `GET /v1/explain`. Raises what `Gatekeeper.check` raises."""
    gate, agent = service.gate, query.user_agent
    decision = await gate.check(query.url, user_agent=agent)
    service.decided(decision, call)
    held = decision.reason in (Reason.HOST_BLOCKED, Reason.HOST_PAUSED)
    if held or decision.state is None or decision.state is State.OVERRIDE:
        # The guard or the operator decided, or the host is held: no file is fetched now.
        return wire.Explanation(decision=decision, robots_txt=None, candidates=(), fetch=None)
    robots = await gate.robots(query.url)
    policy = await gate.policy(query.url, user_agent=agent)
    body = await gate.parts.questions.source(query.url)
    return wire.Explanation(
        decision=decision,
        robots_txt=None if body is None else body.decode("utf-8", "replace"),
        candidates=policy.match(query.url).candidates if robots is not None else (),
        fetch=wire.FetchStory(
            status=decision.robots_status,
            fetched_at=decision.fetched_at,
            expires_at=decision.expires_at,
            hops=decision.hops,
            size=robots.size if robots is not None else None,
            truncated=robots.truncated if robots is not None else False,
            ignored_coding=gate.parts.directory.coding(decision.origin) or None,
        ),
    )


@ROUTES.add("POST", "/v1/explain", body=WhatIf, answers={200: wire.Explanation})
async def explain_text(service: Service, call: Call) -> web.StreamResponse:
    """Explain a decision by the robots.txt in the request.

    Nothing is fetched, stored, counted or logged.
    """
    question = await call.body(WhatIf)
    # Half a megabyte takes a tenth of a second, during which the loop goes on.
    answer = await asyncio.to_thread(what_if_explanation, service, question)
    return json_response(answer)


def what_if_explanation(service: Service, question: WhatIf) -> wire.Explanation:
    """Build the answer of `POST /v1/explain`. Raises InvalidURL or ConfigError."""
    limit = service.config.fetch.max_body
    body = question.robots_txt.encode("utf-8", "surrogatepass")
    outcome = Outcome.NOT_TEXT
    if not is_binary(body):
        outcome = classify_body(Outcome.RULES, body[: limit + 1], truncated=len(body) > limit)
    text = as_read(service, body)
    target, agent = urls.parse(question.url), token_of(question.user_agent)
    parts = service.gate.parts
    policy, wall = parts.decider.policy_of(text, agent), parts.clock.wall()
    decision = parts.decider.what_if(question.url, target, agent, policy, outcome.row, wall)
    candidates = policy.match(question.url).candidates if outcome.row.verdict is None else ()
    return wire.Explanation(
        decision=decision, robots_txt=question.robots_txt, candidates=candidates, fetch=None
    )


@ROUTES.add("GET", "/v1/robots", query=RobotsQuery, answers={200: RobotsFile}, problems=(403, 404))
async def get_robots(service: Service, call: Call) -> web.StreamResponse:
    """Show the parsed robots.txt of an origin, or a past version: groups, timing, findings."""
    query = call.parameters(RobotsQuery)
    gate = service.gate
    target = urls.parse(query.origin)
    if query.version is not None:
        return json_response(await past_version(service, target.origin, query))
    if target.path not in ("/", "/robots.txt"):
        raise Problem(400, "bad-request", "origin: only scheme, host and port may be given")
    # Checking "/" first applies the guard and the operator's rules, as for any other URL.
    decision = await gate.check(target.origin + "/", user_agent=query.user_agent)
    if decision.state is None:
        raise Problem(403, "denied", decision.explain(), decision=decision)
    found = await gate.robots(target.origin + "/")
    policy = await gate.policy(target.origin + "/", user_agent=query.user_agent)
    answer = _describe_file(
        found,
        policy,
        coding_findings(gate.parts.directory.coding(target.origin)),
        origin=target.origin,
        user_agent=decision.user_agent,
        state=decision.state,
        status=decision.robots_status,
        fetched_at=decision.fetched_at,
        expires_at=decision.expires_at,
    )
    return json_response(answer)


def _describe_file(
    robots: RobotsTxt | None, policy: Policy, sent: tuple[Finding, ...] = (), **fields: Any
) -> RobotsFile:
    """Describe a file as it was parsed. `sent`: the findings about its response. `fields`: the
    fields that do not follow from the text."""
    text = robots or NO_TEXT
    return RobotsFile(
        size=None if robots is None else robots.size,
        truncated=text.truncated,
        groups=text.groups,
        sitemaps=text.sitemaps,
        licenses=text.licenses,
        hosts=text.hosts,
        timing=wire.Timing.of(policy),
        content_signal=dict(policy.content_signal),
        findings=() if robots is None else sent + robots.findings,
        **fields,
    )


async def past_version(service: Service, origin: str, query: RobotsQuery) -> RobotsFile:
    """Describe a past version of the file. Raises Problem 404 if it is not stored."""
    entries = await service.gate.history(origin)
    digest = bytes.fromhex(query.version or "")
    entry = next((one for one in reversed(entries) if one.body_hash == digest), None)
    body = None if entry is None else await text_of(service, digest)
    if entry is None or body is None:
        raise Problem(404, "not-found", f"no such version of {origin} is stored; see /v1/history")
    robots = as_read(service, body)
    agent = token_of(query.user_agent or service.gate.user_agent)
    return _describe_file(
        robots,
        robots.policy(agent),
        origin=origin,
        user_agent=agent,
        status=entry.status,
        fetched_at=utc(entry.first_seen),
        version=query.version,
        robots_txt=body.decode("utf-8", "replace"),
    )


async def text_of(service: Service, digest: bytes) -> bytes | None:
    """Return the text with that hash in `Gatekeeper.history`; None if it is not stored."""
    storage = service.gate.parts.storage
    return None if storage is None else await storage.body(digest)


def as_read(service: Service, body: bytes) -> RobotsTxt:
    """Parse a body as the gate parses those that it fetches."""
    settings, limit = service.config.robots, service.config.fetch.max_body
    return RobotsTxt.parse(parser_input(body), dialect=settings.dialect, limit=limit)


@ROUTES.add("GET", "/v1/history", query=HistoryQuery, answers={200: History})
async def get_history(service: Service, call: Call) -> web.StreamResponse:
    """List the versions of an origin's robots.txt, and when each was seen. Needs a storage."""
    query = call.parameters(HistoryQuery)
    entries = await service.gate.history(query.origin)
    versions = tuple(
        Version(
            sha256=entry.body_hash.hex() if entry.body_hash else None,
            first_seen=utc(entry.first_seen),
            last_seen=utc(entry.last_seen),
            outcome=entry.outcome,
            status=entry.status,
            size=entry.size,
        )
        for entry in entries
    )
    return json_response(History(urls.parse(query.origin).origin, versions))
