"""Mistakes of a caller that no type checker looked at: each is told in one line."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gatekeeper import (
    Config,
    ConfigError,
    Gatekeeper,
    GatekeeperError,
    PoliteQueue,
    RemoteGatekeeper,
    SyncGatekeeper,
    polite_session,
)
from gatekeeper.integrations.crawlee import PoliteHttpClient
from gatekeeper.integrations.httpx import PoliteTransport, SyncPoliteTransport
from gatekeeper.integrations.requests import PoliteAdapter
from gatekeeper.testing import ScriptedGate


@pytest.mark.parametrize("raw", [None, b"http://a.test/", URL("http://a.test/"), 3])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_a_url_that_is_no_text_raises_type_error(raw: Any, far: bool) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        for question in (gate.allowed(raw), gate.check(raw), gate.acquire(raw)):
            with pytest.raises(TypeError, match=f"url must be str, not {type(raw).__name__}"):
                await question
        with pytest.raises(TypeError, match="url must be str"):
            gate.peek(raw)


@pytest.mark.parametrize("name", [None, b"examplebot"])
def test_a_user_agent_that_is_no_text_raises_type_error(name: Any) -> None:
    with pytest.raises(TypeError, match=f"user_agent must be str, not {type(name).__name__}"):
        Gatekeeper(name)


@pytest.mark.parametrize("name", ["report", "renew", "give_back", "end", "decision", "expires_at"])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_a_lease_request_that_was_not_entered_says_so(name: str, far: bool) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        with pytest.raises(AttributeError, match=r"enter it first: async with gate\.lease"):
            getattr(gate.lease("http://a.test/"), name)


@pytest.mark.parametrize("raw", ["http://a.test/", b"http://b.test/"])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_one_url_in_place_of_a_list_raises_type_error(raw: Any, far: bool) -> None:
    """Each of its characters was answered as a URL."""
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        with pytest.raises(TypeError, match=r"urls must be a list of URLs, not one .*give \[url\]"):
            await gate.check_all(raw)
        with pytest.raises(TypeError, match="urls must be a list of URLs, not one"):
            await anext(gate.check_many(raw))
        with pytest.raises(TypeError, match=r"urls must be a list of URLs, or .*not int"):
            await gate.check_all(3)  # type: ignore[arg-type]


# --- each method, each kind of mistake, both kinds of gate -----------------------------------

PAGE = "http://a.test/"
URL_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "allowed": lambda gate, raw: gate.allowed(raw),
    "check": lambda gate, raw: gate.check(raw),
    "check_many": lambda gate, raw: anext(gate.check_many([raw])),
    "check_all": lambda gate, raw: gate.check_all([raw]),
    "peek": lambda gate, raw: gate.peek(raw),
    "robots": lambda gate, raw: gate.robots(raw),
    "policy": lambda gate, raw: gate.policy(raw),
    "lease": lambda gate, raw: gate.lease(raw).__aenter__(),
    "acquire": lambda gate, raw: gate.acquire(raw),
    "try_acquire": lambda gate, raw: gate.try_acquire(raw),
    "refresh": lambda gate, raw: gate.refresh(raw),
}
HOST_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "why": lambda gate, raw: gate.why(raw),
    "pause": lambda gate, raw: gate.pause(raw),
    "resume": lambda gate, raw: gate.resume(raw),
    "block": lambda gate, raw: gate.block(raw, 0.0),
}
AGENT_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "allowed": lambda gate, raw: gate.allowed(PAGE, user_agent=raw),
    "check": lambda gate, raw: gate.check(PAGE, user_agent=raw),
    "check_many": lambda gate, raw: anext(gate.check_many([PAGE], user_agent=raw)),
    "check_all": lambda gate, raw: gate.check_all([PAGE], user_agent=raw),
    "peek": lambda gate, raw: gate.peek(PAGE, user_agent=raw),
    "policy": lambda gate, raw: gate.policy(PAGE, user_agent=raw),
    "lease": lambda gate, raw: gate.lease(PAGE, user_agent=raw).__aenter__(),
    "acquire": lambda gate, raw: gate.acquire(PAGE, user_agent=raw),
    "try_acquire": lambda gate, raw: gate.try_acquire(PAGE, user_agent=raw),
}
METHODS = [
    *(("url", name, call) for name, call in URL_METHODS.items()),
    *(("host", name, call) for name, call in HOST_METHODS.items()),
    *(("user_agent", name, call) for name, call in AGENT_METHODS.items()),
]
NOT_TEXT: dict[str, Any] = {
    "None": None,
    "bytes": b"http://a.test/",
    "int": 3,
    "float": 1.5,
    "URL": URL(PAGE),
    "list": [PAGE],
    "tuple": (PAGE,),
    "dict": {PAGE: 1},
    "Path": Path("a.test"),
    "object": object(),
}
REMEDIES = {"URL": r"; give str\({}\)", "bytes": "; decode it first"}
REMEDIES |= dict.fromkeys(("list", "tuple", "dict"), "; give one at a time")


async def mistake(call: Callable[[Any, Any], Any], gate: Any, raw: Any) -> Exception:
    try:
        found = call(gate, raw)
        if inspect.isawaitable(found):
            await found
    except (TypeError, GatekeeperError) as error:
        return error
    pytest.fail("it was taken")


@pytest.mark.parametrize("kind", NOT_TEXT)
@pytest.mark.parametrize(
    ("argument", "call"),
    [(argument, call) for argument, _, call in METHODS],
    ids=[f"{name}-{argument}" for argument, name, _ in METHODS],
)
async def test_each_method_of_both_gates_refuses_what_is_no_text_with_one_message(
    argument: str, call: Callable[[Any, Any], Any], kind: str
) -> None:
    raw = NOT_TEXT[kind]
    if argument == "user_agent" and raw is None:
        return  # the gate's own
    async with Gatekeeper("examplebot") as near, RemoteGatekeeper("http://127.0.0.1:1") as far:
        told, also = await mistake(call, near, raw), await mistake(call, far, raw)
    assert type(told) is type(also) is TypeError
    assert str(told) == str(also)
    assert str(told).startswith(f"{argument} must be str, not {type(raw).__name__}")
    assert str(told).endswith(REMEDIES.get(kind, "").replace("\\", "").format(argument))


@pytest.mark.parametrize("raw", ["", "   ", "\udc80", "bot/\udc80"])
@pytest.mark.parametrize("name", AGENT_METHODS)
async def test_a_user_agent_that_is_no_name_is_refused_by_both_gates(name: str, raw: str) -> None:
    async with Gatekeeper("examplebot") as near, RemoteGatekeeper("http://127.0.0.1:1") as far:
        call = AGENT_METHODS[name]
        told, also = await mistake(call, near, raw), await mistake(call, far, raw)
    assert type(told) is type(also) is ConfigError
    assert str(told) == str(also)
    assert "say who you are" in str(told)


@pytest.mark.parametrize("until", ["soon", None, [], float("nan")])
async def test_a_block_until_a_value_that_is_no_time_is_refused(until: Any) -> None:
    async with Gatekeeper("examplebot") as near, RemoteGatekeeper("http://127.0.0.1:1") as far:
        for gate in (near, far):
            with pytest.raises(ConfigError, match=r"is not a moment; give wall seconds"):
                await gate.block("a.test", until)


@pytest.mark.parametrize("raw", [None, "a.test", ["a.test"], {"match": "a.test"}])
async def test_an_override_that_is_no_rule_and_a_history_of_no_url_are_refused(raw: Any) -> None:
    async with Gatekeeper("examplebot") as gate:
        with pytest.raises(TypeError, match=r"rule must be a HostRule, not .*; write HostRule\("):
            gate.override(raw)
        with pytest.raises((TypeError, GatekeeperError), match=r"url must be str|not an http"):
            await gate.history(raw)


@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_with_instead_of_async_with_raises_type_error(far: bool) -> None:
    gate = RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot")
    managers: list[Any] = [gate, PoliteQueue(gate)]
    for manager in managers:
        told = f"a {type(manager).__name__} is opened by `async with`"
        with pytest.raises(TypeError, match=told), manager:
            pass
        with pytest.raises(TypeError, match=told), ExitStack() as stack:
            stack.enter_context(manager)
        with pytest.raises(TypeError, match=told):
            await manager
    async with gate:
        request: Any = gate.lease("http://a.test/")
        with pytest.raises(AttributeError, match=r"enter it first: async with gate\.lease"):
            request.__enter__()


@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_awaiting_what_is_entered_or_iterated_says_what_was_meant(far: bool) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        request: Any = gate.lease("http://a.test/")
        with pytest.raises(TypeError, match=r"async with gate\.lease.*lease = await gate\.acquire"):
            await request
        with pytest.raises(TypeError, match=r"async with gate\.lease"):
            await asyncio.wait_for(request, 5)
        pages: Any = gate.sitemaps("http://a.test/")
        with pytest.raises(TypeError, match=r"async for entry in gate\.sitemaps"):
            await pages
        with pytest.raises(TypeError, match=r"async for entry in gate\.sitemaps"):
            list(pages)


async def test_a_session_that_was_not_opened_says_so() -> None:
    request: Any = polite_session("examplebot")
    with pytest.raises(AttributeError, match=r"async with polite_session.* use session\.get"):
        request.get("http://a.test/")
    with pytest.raises(TypeError, match=r"open it first: `async with polite_session"):
        await request
    with pytest.raises(TypeError, match=r"open it first: `async with polite_session"), request:
        pass
    async with request as session:
        assert isinstance(session, aiohttp.ClientSession)


async def test_asynchronous_use_of_a_blocking_gate_says_what_was_meant() -> None:
    told = "a SyncGatekeeper is for blocking code: use `with`, without async and await"
    gate: Any = SyncGatekeeper("examplebot")
    config = Config.from_dict({"host": [{"match": "a.test", "robots": "allow"}]})
    with SyncGatekeeper("examplebot", config=config) as opened:
        for one in (gate, opened.lease(PAGE), opened.acquire(PAGE)):
            awaited: Any = one
            with pytest.raises(TypeError, match=told):
                await awaited
            with pytest.raises(TypeError, match=told):
                async with awaited:
                    pass
        request: Any = opened.lease(PAGE)
        with pytest.raises(AttributeError, match=r"enter it first: with gate\.lease"):
            request.report(status=200)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"timeout": "60"}, "timeout must be seconds such as 60.0, not the str '60'"),
        ({"timeout": True}, "timeout must be seconds such as 60.0, not the bool True"),
        ({"priority": "high"}, "priority must be a number such as 1, not the str 'high'"),
        # As a robots.txt it went before every page, and counted for no budget.
        ({"priority": float("inf")}, "priority must be a finite number such as 1, not inf"),
        ({"priority": float("nan")}, "priority must be a finite number such as 1, not nan"),
    ],
)
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_a_timeout_of_the_wrong_type_is_refused(
    options: dict[str, Any], told: str, far: bool
) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        with pytest.raises(TypeError, match=told):
            await gate.acquire("http://a.test/", **options)


async def test_a_timeout_of_the_wrong_type_is_refused_though_the_lease_is_free() -> None:
    """Otherwise the mistake would show first when two requests meet."""
    wrong: Any = "60"
    config = Config.from_dict({"pacing": {"default_interval": 0.0}})
    async with ScriptedGate(config=config) as gate:
        gate.say("http://a.test", "")
        assert await gate.allowed("http://a.test/")
        for _ in range(2):
            (await gate.acquire("http://a.test/")).end()
            with pytest.raises(TypeError, match="timeout must be seconds"):
                await gate.acquire("http://a.test/", timeout=wrong)
            with pytest.raises(TypeError, match="priority must be a number"):
                await gate.try_acquire("http://a.test/", priority=wrong)


async def test_data_in_place_of_a_priority_is_refused() -> None:
    async with Gatekeeper("examplebot") as gate, PoliteQueue(gate) as queue:
        with pytest.raises(TypeError, match="priority must be a number such as 1, not the dict"):
            await queue.put("http://a.test/", {"depth": 0})  # type: ignore[arg-type]


async def test_a_block_for_seconds_is_refused_with_the_way_to_give_a_time() -> None:
    """As a time of 1970 it would lift the block."""
    async with Gatekeeper("examplebot") as gate:
        with pytest.raises(ConfigError, match=r"30 seconds from now give time\.time\(\) \+ 30"):
            await gate.block("a.test", 30)
        await gate.block("a.test", 0)
        with pytest.raises(ConfigError, match="is not a moment"):
            await gate.block("a.test", 10**400)


@pytest.mark.parametrize("raw", [[], "gatekeeper.toml", None])
def test_settings_that_are_no_dict_are_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r'a dict such as \{"pacing": .*, not '):
        Config.from_dict(raw)


@pytest.mark.parametrize("blocking", [False, True], ids=["asynchronous", "blocking"])
def test_a_gate_of_the_other_kind_of_code_is_refused(blocking: bool) -> None:
    """The first request failed, by a missing attribute."""
    other: Any = Gatekeeper("examplebot") if blocking else SyncGatekeeper("examplebot")
    wanted = "a SyncGatekeeper" if blocking else "a Gatekeeper or a RemoteGatekeeper"
    kinds: tuple[Any, ...] = (PoliteTransport, PoliteHttpClient)
    if blocking:
        kinds = (SyncPoliteTransport, PoliteAdapter)
    for gate in (other, "examplebot", None):
        told = f"gate must be {wanted}, not {type(gate).__name__}"
        for kind in kinds:
            with pytest.raises(TypeError, match=told):
                kind(gate)
