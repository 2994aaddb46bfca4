"""All of tests/vectors/ssrf.jsonl, one test per line. Nothing here uses the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from gatekeeper import urls
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config
from gatekeeper.errors import InvalidURL
from gatekeeper.fetching.allowed_addresses import Guard
from gatekeeper.fetching.guard import GuardedResolver
from tests.internet import Fail, Names

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "vectors" / "ssrf.jsonl")
    .read_text("utf-8")
    .split("\n")
    if line
]
assert len(VECTORS) >= 200


async def url_denied(url: str) -> bool:
    return Guard(Config()).refuses_url(url) is not None


async def answers_dialled(host: str, *look_ups: str) -> list[set[str]]:
    """Return the addresses that the guard allows, per look-up; empty: refused."""
    names = Names(VirtualClock(), lambda _, port: port)
    names.script(host, *(look_up.split(",") if look_up else Fail.EMPTY for look_up in look_ups))
    guard = Guard(Config())
    resolver = GuardedResolver(guard, names)
    dialled: list[set[str]] = []
    for _ in look_ups:
        try:
            answers = await resolver.resolve(host, 80)
        except OSError:
            answers = []
        dialled.append({answer["host"] for answer in answers})
    return dialled


async def dns_denied(host: str, answers: str) -> bool:
    [dialled] = await answers_dialled(host, answers)
    assert not dialled & {"127.0.0.1", "169.254.169.254"}
    return not dialled


async def rebind_denied(host: str, checked: str, connected: str) -> bool:
    first, second = await answers_dialled(host, checked, connected)
    return first == {checked} and not second


async def redirect_denied(start: str, *locations: str) -> bool:
    guard, here = Guard(Config()), urls.parse(start)
    for location in locations:
        try:
            here = urls.join(here, location)
        except InvalidURL:
            return True
        if guard.refuses_target(here) is not None:
            return True
    return len(locations) > Config().fetch.max_redirects


async def self_denied(listener: str, url: str) -> bool:
    own = {IPv4Address("203.0.114.9")}
    guard = Guard(Config(), is_local=lambda ip: ip in own)
    address, _, port = listener.rpartition(":")
    assert guard.refuses_url(url) is None  # only the listener is a reason to refuse
    guard.listens_on(address, int(port))
    return guard.refuses_url(url) is not None


JUDGES: dict[str, Callable[..., object]] = {
    "dns": dns_denied,
    "rebind": rebind_denied,
    "redirect": redirect_denied,
    "self": self_denied,
}


@pytest.mark.parametrize(
    "vector",
    VECTORS,
    ids=[f"{number:03}-{vector['vector'][:60]!a}" for number, vector in enumerate(VECTORS, 1)],
)
async def test_guard_vector_is_judged_as_expected(vector: dict[str, str]) -> None:
    kind, *parts = vector["vector"].split("|")
    judge = JUDGES.get(kind)
    denied = await (judge(*parts) if judge and parts else url_denied(vector["vector"]))  # type: ignore[misc]
    assert ("deny" if denied else "allow") == vector["expect"], vector["why"]
