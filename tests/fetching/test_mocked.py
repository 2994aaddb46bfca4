"""The outcome of many statuses and bodies, with a mocked session."""

from __future__ import annotations

import aiohttp
import pytest
from aioresponses import aioresponses as Mocked

from gatekeeper.clock import SystemClock
from gatekeeper.fetching.outcomes import Outcome, Retrieval
from tests.fetching.conftest import fetcher_on
from tests.fetching.host_leases import HostLeases

URL = "https://a.test/robots.txt"


async def fetch() -> Retrieval:
    async with aiohttp.ClientSession() as session:
        clock = SystemClock()
        fetcher = fetcher_on(session, clock, acquire=HostLeases(clock, 0.05))
        return await fetcher.fetch("https://a.test")


@pytest.mark.parametrize("status", range(400, 500))
async def test_each_4xx_status_has_its_outcome(mocked: Mocked, status: int) -> None:
    mocked.get(URL, status=status, body="User-agent: *\nDisallow: /\n", repeat=True)
    got = await fetch()
    assert got.body is None
    expected = {
        402: Outcome.PAYMENT_REQUIRED,
        404: Outcome.NO_FILE,
        410: Outcome.NO_FILE,
        429: Outcome.RATE_LIMITED,
    }
    expected |= dict.fromkeys((408, 421, 425), Outcome.CLIENT_ERROR)
    assert got.outcome is expected.get(status, Outcome.NO_FILE_SAID_OTHERWISE)


@pytest.mark.parametrize("status", range(500, 600))
async def test_each_5xx_status_has_its_outcome(mocked: Mocked, status: int) -> None:
    mocked.get(URL, status=status)
    outcome = (await fetch()).outcome
    assert outcome is (Outcome.CAPTIVE_PORTAL if status == 511 else Outcome.SERVER_ERROR)


async def test_a_large_body_is_read_whole(mocked: Mocked) -> None:
    body = b"User-agent: *\n" + b"Disallow: /x\n" * 30_000
    mocked.get(URL, body=body, content_type="text/plain")
    assert (await fetch()).body == body


async def test_an_error_of_aiohttp_is_no_answer(mocked: Mocked) -> None:
    mocked.get(URL, exception=aiohttp.ClientError("odd"))
    assert not (await fetch()).outcome.good
