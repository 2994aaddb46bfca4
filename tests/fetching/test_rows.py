"""The 28 rows, for each state of the record: cold, warm, stale, unreachable with an old copy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from gatekeeper.fetching.records import Record, Standing
from tests.fetching.directories import DAY, HOUR, NEW, OLD, House, Source, file, house

MINUTE = 60.0
ALLOW, DENY, DEFER = Verdict.ALLOW, Verdict.DENY, Verdict.DEFER
PARSED, UNAVAILABLE, UNREACHABLE = State.PARSED, State.UNAVAILABLE, State.UNREACHABLE


@dataclass(frozen=True)
class Expected:
    """What a row gives for an origin that was never asked before."""

    row: int
    outcome: Outcome
    verdict: Verdict | None
    state: State
    reason: Reason
    keep: float
    """Seconds, give or take the ladder's 20 % of jitter."""
    body: bytes | None = None
    status: int | None = None
    recorded: bool = True
    lapses: bool = True


def text(row: int, outcome: Outcome) -> Expected:
    return Expected(row, outcome, None, PARSED, Reason.NO_RULE, DAY, NEW, 200)


def absent(row: int, outcome: Outcome, reason: Reason, keep: float, status: int) -> Expected:
    return Expected(row, outcome, ALLOW, UNAVAILABLE, reason, keep, None, status)


def fails(
    row: int,
    outcome: Outcome,
    reason: Reason,
    keep: float = MINUTE,
    *,
    status: int | None = None,
    recorded: bool = True,
    lapses: bool = True,
) -> Expected:
    return Expected(row, outcome, DEFER, UNREACHABLE, reason, keep, None, status, recorded, lapses)


ROWS = [
    text(1, Outcome.RULES),
    Expected(2, Outcome.EMPTY, ALLOW, PARSED, Reason.EMPTY_FILE, DAY, b"# hi\n", 200),
    Expected(2, Outcome.EMPTY, ALLOW, PARSED, Reason.EMPTY_FILE, DAY, None, 204),
    absent(3, Outcome.SOFT_404, Reason.SOFT_404, DAY, 200),
    text(4, Outcome.HTML_RULES),
    absent(5, Outcome.NOT_TEXT, Reason.NOT_TEXT, DAY, 200),
    text(6, Outcome.TRANSFORMED_RULES),
    fails(7, Outcome.CHALLENGE, Reason.CHALLENGE, status=403),
    fails(8, Outcome.INVALID_RESPONSE, Reason.INVALID_RESPONSE, status=206),
    fails(9, Outcome.NOT_MODIFIED_NOTHING, Reason.INVALID_RESPONSE, status=304),
    # Row 10 is not final: a redirect is judged by its end. test_fetcher.py follows redirects.
    absent(11, Outcome.TOO_MANY_REDIRECTS, Reason.TOO_MANY_REDIRECTS, DAY, 302),
    fails(11, Outcome.REDIRECTED_AWAY, Reason.TOO_MANY_REDIRECTS, status=302),
    fails(12, Outcome.BAD_REDIRECT, Reason.BAD_REDIRECT, status=301),
    fails(13, Outcome.EGRESS_POLICY, Reason.EGRESS_POLICY, DAY, status=302, lapses=False),
    Expected(13, Outcome.BLOCKED, DENY, UNREACHABLE, Reason.BLOCKED, DAY, lapses=False),
    absent(14, Outcome.NO_FILE, Reason.NO_FILE, DAY, 404),
    absent(14, Outcome.NO_FILE_SAID_OTHERWISE, Reason.NO_FILE, 6 * HOUR, 403),
    absent(14, Outcome.PAYMENT_REQUIRED, Reason.PAYMENT_REQUIRED, 6 * HOUR, 402),
    absent(14, Outcome.LICENSE_REQUIRED, Reason.LICENSE_REQUIRED, 6 * HOUR, 401),
    Expected(
        14,
        Outcome.ACCESS_RESTRICTED,
        DENY,
        UNAVAILABLE,
        Reason.ACCESS_RESTRICTED,
        6 * HOUR,
        status=401,
    ),
    fails(15, Outcome.CLIENT_ERROR, Reason.CLIENT_ERROR, status=408),
    fails(16, Outcome.RATE_LIMITED, Reason.RATE_LIMITED, status=429),
    fails(17, Outcome.SERVER_ERROR, Reason.SERVER_ERROR, status=503),
    fails(18, Outcome.CAPTIVE_PORTAL, Reason.SERVER_ERROR, status=511),
    fails(19, Outcome.CONNECT_FAILED, Reason.CONNECT_FAILED),
    fails(20, Outcome.CONNECT_TIMEOUT, Reason.TIMEOUT),
    fails(20, Outcome.TIMEOUT, Reason.TIMEOUT),
    fails(21, Outcome.TRUNCATED, Reason.TRUNCATED, status=200),
    text(22, Outcome.CUT_RULES),
    fails(23, Outcome.TOO_SLOW, Reason.TOO_SLOW, status=200),
    fails(24, Outcome.DNS_NXDOMAIN, Reason.DNS_NXDOMAIN, HOUR),
    fails(25, Outcome.DNS_FAILURE, Reason.DNS_FAILURE),
    fails(26, Outcome.TLS, Reason.TLS),
    fails(27, Outcome.BAD_ENCODING, Reason.BAD_ENCODING, status=200),
    fails(28, Outcome.OURS, Reason.INTERNAL, 1.0, recorded=False),
    fails(28, Outcome.NO_DESCRIPTORS, Reason.OVERLOADED, 1.0, recorded=False),
    fails(0, Outcome.INTERNAL, Reason.INTERNAL, lapses=False),
]

rows = pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row.row}-{row.outcome.row.name}-{row.status}"
)


def came(row: Expected) -> Retrieval:
    return Retrieval(outcome=row.outcome, status=row.status, body=row.body)


def keeps(house: House, record: Record) -> float:
    return record.expires - house.clock.monotonic()


def assert_reads(row: Expected, standing: Standing) -> None:
    assert (standing.verdict, standing.state, standing.reason) == (
        row.verdict,
        row.state,
        row.reason,
    )
    assert standing.status == row.status
    assert (standing.retry_at is not None) is (row.verdict is DEFER)


@rows
async def test_a_row_of_outcomes_for_an_unknown_origin_has_its_verdict_and_lifetime(
    row: Expected,
) -> None:
    async with house(came(row)) as it:
        record = await it.get()
        assert_reads(row, record.standing(it.clock))
        assert keeps(it, record) == pytest.approx(row.keep, rel=0.2)
        if row.verdict is None:
            assert it.allows(record, "/new") is False
            assert it.allows(record, "/other") is True
        # Cached: the next question causes no fetch.
        assert await it.get() is record or not row.recorded
        assert len(it.source.asked) == (1 if row.recorded else 2)
        assert record.policy_only is (row.verdict in {None, ALLOW})


@rows
async def test_a_row_of_outcomes_does_not_change_a_fresh_record(row: Expected) -> None:
    async with house(file(OLD)) as it:
        before = await it.get()
        it.source.answer = came(row)
        await it.clock.elapse(17 * HOUR)  # before soft expiry for any jitter
        assert await it.get() is before
        assert it.allows(before, "/old") is False
        assert len(it.source.asked) == 1


@rows
async def test_a_row_of_outcomes_after_expiry_has_its_verdict(row: Expected) -> None:
    async with house(file(OLD)) as it:
        await it.get()
        it.source.answer = came(row)
        await it.clock.elapse(DAY + 1)
        record = await it.get()
        assert len(it.source.asked) == 2
        assert_reads(row, record.standing(it.clock))
        if row.verdict is None:
            assert it.allows(record, "/old") is True
        elif row.recorded and row.state is UNREACHABLE:
            # A failure never overwrites the last good copy, which does not answer for 12 hours.
            assert record.text is not None
            assert record.text.body() == OLD


@rows
async def test_an_unreachable_origin_with_an_old_copy_is_deferred_and_then_uses_the_copy(
    row: Expected,
) -> None:
    async with house(file(OLD)) as it:
        await it.get()
        await it.clock.elapse(DAY + 1)
        it.source.answer = Retrieval(outcome=Outcome.SERVER_ERROR, status=500, retry_after=DAY)
        await it.get()
        await it.clock.elapse(DAY)
        it.source.answer = came(row)
        # After 12 hours the old copy answers immediately, while the file is fetched.
        before = await it.get()
        assert before.standing(it.clock).state is State.STALE
        assert it.allows(before, "/old") is False
        await it.clock.settle()
        assert len(it.source.asked) == 3
        record = await it.get()
        standing = record.standing(it.clock)
        if row.state is not UNREACHABLE:
            assert_reads(row, standing)
        elif row.lapses:
            assert (standing.verdict, standing.state) == (None, State.STALE)
            assert it.allows(record, "/old") is False
        else:
            assert_reads(row, standing)


async def test_a_304_renews_the_known_record() -> None:
    """Row 9, the good case: a 304 confirms an existing record."""
    source = Source(file(OLD, etag='"1"'))
    async with house(source) as it:
        before = await it.get()
        await it.clock.elapse(DAY + 1)
        source.answer = Retrieval(outcome=Outcome.NOT_MODIFIED, status=304)
        record = await it.get()
        assert source.validators[1] is not None
        assert source.validators[1].etag == '"1"'
        assert record.standing(it.clock).state is PARSED
        assert record.text is before.text
        assert keeps(it, record) == DAY
        assert record.current.etag == '"1"'
        assert record.current.wall == before.current.wall + DAY + 1
