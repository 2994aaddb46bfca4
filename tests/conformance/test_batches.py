"""The error of one URL never fails its batch, in every way to the gate."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gatekeeper import InvalidURL
from tests.internet import FakeInternet

ODD = [
    *("http://xn--\u00df.com/", "http://xn--\u2167", "http://xn--\u017f/", "http://xn--\u2460/x"),
    *(
        "//:-",
        "http://:-",
        "http://[::1]@/",
        "http:/u:secret@h/",
        "\ud800",
        "",
        "\x00",
        "http://[/",
    ),
]
FAULTY = "http://a.test/%62oom"


@pytest.fixture
def world(internet: FakeInternet) -> FakeInternet:
    internet.site("a.test").robots("User-agent: *\nDisallow: /no\n")
    internet.site("b.test").robots("")
    return internet


async def test_text_that_is_no_url_is_denied_among_the_others(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    given = ["http://a.test/", *ODD, "http://a.test/no", "http://b.test/x"]
    for _ in range(2):  # cold and warm
        decisions = await gate.check_all(given)
        assert [d.verdict for d in decisions] == ["allow", *["deny"] * len(ODD), "deny", "allow"]
        assert {d.reason for d in decisions[1:-2]} == {"invalid_url"}
        assert not any("secret" in d.url for d in decisions)
    for odd in ODD:
        with pytest.raises(InvalidURL):
            await gate.check(odd)


@pytest.mark.usefixtures("faulty")
async def test_an_internal_error_defers_only_its_own_url(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    given = ["http://a.test/", FAULTY, "http://b.test/x", f"{FAULTY}?2"]
    for _ in range(2):
        decisions = await gate.check_all(given)
        assert [d.verdict for d in decisions] == ["allow", "defer", "allow", "defer"]
        for decision in decisions[1::2]:
            assert decision.reason == "internal"
            assert decision.retry_at is not None
            assert "UnicodeDecodeError" in decision.note


@pytest.mark.usefixtures("faulty")
async def test_an_internal_error_within_a_lease_defers_only_its_own_url(
    world: FakeInternet, open_gate: Any
) -> None:
    gate = await open_gate(world)
    async with gate.lease("http://b.test/y"):
        decisions = await gate.check_all(["http://a.test/", FAULTY, ODD[0]])
    assert [d.reason for d in decisions] == ["no_rule", "internal", "invalid_url"]


@pytest.mark.usefixtures("faulty")
async def test_a_posted_batch_has_an_answer_for_every_url(
    world: FakeInternet, sidecar_on: Any
) -> None:
    """Post a batch as a client in another language does, without validation on its side."""
    sidecar = await sidecar_on(world)
    given = ["http://a.test/", FAULTY, *ODD, "http://a.test/\udcff", "http://b.test/x"]
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.post(f"{sidecar.where}/v1/check", json={"urls": given}) as response:
                assert response.status == 200
                told = (await response.json())["decisions"]
            reasons = [decision["reason"] for decision in told]
            assert reasons == [
                "no_rule",
                "internal",
                *["invalid_url"] * (len(ODD) + 1),
                "empty_file",
            ]
        for body in (
            b'{"urls": ["\\ud800"], "user_agent": "\\udcff"}',
            b'{"urls": ["\\ud800", 5]}',
            b'{"urls": ["\\ud800"], "wait": NaN}',
            b'["\\ud800"]',
            b'{"urls": ["\\ud800"' + b"[" * 200_000,
        ):
            async with session.post(
                f"{sidecar.where}/v1/check",
                data=body,
                headers={"Content-Type": "application/json"},
            ) as response:
                assert response.status == 400
        for one in ODD:
            async with session.post(f"{sidecar.where}/v1/leases", json={"url": one}) as response:
                assert response.status == 400
            if one == "\ud800":  # a query string can't contain it
                continue
            async with session.get(f"{sidecar.where}/v1/check", params={"url": one}) as response:
                assert response.status == 400
