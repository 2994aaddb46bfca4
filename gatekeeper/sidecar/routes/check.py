"""`/v1/check`: may this URL be fetched, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gatekeeper.decision import Decision
from gatekeeper.gate.decision_cache import WrittenDecision
from gatekeeper.sidecar.exchange import (
    CHECK,
    Call,
    InlineCall,
    Problem,
    Route,
    decode,
    read_body,
    read_query,
    respond_json,
)
from gatekeeper.wire import Batch, Decisions, UserAgent, encode

if TYPE_CHECKING:
    from gatekeeper.sidecar.service import Service

__all__ = ["ROUTES", "CheckQuery"]


class CheckQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `GET /v1/check` asks."""

    url: str
    user_agent: UserAgent | None = None


async def check(service: Service, call: Call) -> web.StreamResponse:
    """One decision; 200 whatever the verdict."""
    query = _plain_question(call.query) or read_query(call.query, CheckQuery)
    decision = await service.gate.check(query.url, user_agent=query.user_agent)
    service.decided(decision, call)
    return respond_json(call.request, decision)


def check_inline(service: Service, call: InlineCall) -> bytes | None:
    """The same where everything about the URL is known and ordinary."""
    question = _plain_question(call.query)
    if question is None:
        return None
    decision = service.internals.recall(question.url)
    if decision is None:
        return None
    service.decided_inline(decision, call)
    return encode(decision)


def _plain_question(text: str) -> CheckQuery | None:
    """The usual question, of one parameter, read without a dictionary; else None."""
    if text.startswith("url=") and "&" not in text:
        return CheckQuery(decode(text[4:]))
    return None


async def check_batch(service: Service, call: Call) -> web.StreamResponse:
    """Decisions in the order of the URLs; a URL that is none gets deny, invalid_url."""
    batch = await read_body(call.request, Batch, limit=service.config.server.max_body)
    most = service.config.server.max_batch
    if len(batch.urls) > most:
        raise Problem(413, "too-large", f"a batch may have {most} URLs at most", most=most)
    gate, agent = service.gate, batch.user_agent
    written: list[WrittenDecision] | None = [] if service.log.enabled else None
    texts = service.internals.write_many(batch.urls, user_agent=agent, written=written)
    if written:
        service.log.add_many(written, call.id, call.client)
    missing = [url for url, text in zip(batch.urls, texts, strict=True) if text is None]
    late: Iterator[str] = iter(())
    if missing:
        rest = await gate.check_all(missing, user_agent=agent)
        service.log.add_many(rest, call.id, call.client)
        late = (encode(decision).decode() for decision in rest)
    given = [next(late) if text is None else text for text in texts]
    service.operators.feed.add_batch(given, call.id, call.client)
    return respond_json(call.request, f'{{"decisions":[{",".join(given)}]}}'.encode())


ROUTES = (
    Route(
        "GET",
        "/v1/check",
        check,
        "May this URL be fetched?",
        query=CheckQuery,
        answers={200: Decision},
        needs=CHECK,
        problems=(400,),
        inline=check_inline,
    ),
    Route(
        "POST",
        "/v1/check",
        check_batch,
        "May these URLs be fetched?",
        body=Batch,
        answers={200: Decisions},
        needs=CHECK,
        problems=(400, 413, 415),
    ),
)
