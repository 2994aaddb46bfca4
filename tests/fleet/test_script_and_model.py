"""The script and the ledger in memory return the same answers over generated histories.

`MemoryLedger` is the model in plain Python. Every call goes to both at the same time; the answers,
the notifications, and the clocks of refusals must be equal to the microsecond. Calls are repeated,
as after a lost reply, and the server loses its scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from gatekeeper.clock import VirtualClock
from gatekeeper.fleet import RedisLedger, scripts
from gatekeeper.fleet.operations import end_operation, report_operation, scope_view
from gatekeeper.fleet.redis_ledger import _TokenState
from gatekeeper.pacing.host_settings import DAY, DailyBudget
from gatekeeper.pacing.ledger import (
    End,
    Granted,
    NotBefore,
    Outcome,
    Report,
    ScopeRequest,
    TakeRequest,
)
from gatekeeper.testing import memory_ledger
from gatekeeper.testing.memory_ledger import MemoryLedger
from tests.fleet.server import Server
from tests.pacing.ledger_rules import Listener

HOSTS = st.sampled_from(["h", "k", "g"])
OWNERS = ("a", "b", "c")
TOKENS = st.builds(
    lambda owner, number: f"{owner}:{number}", st.sampled_from(OWNERS), st.integers(0, 3)
)
SECONDS = st.sampled_from(
    [0.0, 0.000001, 0.05, 0.1, 1.0, 2.5, 19.999999, 20.0, 60.0, 60.0, DAY - 60.0]
)
BUDGETS = st.none() | st.sampled_from([DailyBudget(1), DailyBudget(2, 900), DailyBudget(0, 900)])
OPERATIONS = scripts.OPERATIONS.replace("redis.call('TIME')", "{'0', ARGV[2]}")


def at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call of the model, none of which waits."""
    with pytest.raises(StopIteration) as done:
        call.send(None)
    return done.value.value


class Script:
    """Calls the script at a given time, without an event loop."""

    def __init__(self, server: Server, clock: VirtualClock) -> None:
        self.clock = clock
        self.client = redis.Redis(unix_socket_path=str(server.socket), protocol=2)
        self.client.flushall()
        self.ledger = RedisLedger(server.url, clock=clock)
        self.tokens = self.ledger._tokens
        self.ledger._epoch = "now"
        self.client.hset("{gatekeeper}:epoch", mapping={"id": "now"})
        self.told = self.client.pubsub(ignore_subscribe_messages=True)
        self.told.psubscribe("{gatekeeper}:m:*")
        while self.told.get_message(timeout=0.2) is not None:
            pass

    def turn(self, operations: Sequence[tuple[Any, ...]]) -> list[Any]:
        keys, (text,) = self.ledger._packed(list(operations), self.clock.monotonic(), "now")
        now = round(self.clock.monotonic() * 1e6)
        reply = self.client.eval(OPERATIONS, len(keys), *keys, text, str(now))
        _, state, answers = msgspec.msgpack.decode(reply)
        assert state == 1
        return list(answers)

    def opened(self, count: int) -> list[tuple[str, float]]:
        found = []
        while len(found) < count + 1:
            message = self.told.get_message(timeout=0.5 if len(found) < count else 0.0)
            if message is None:
                break
            token, micros = msgspec.msgpack.decode(message["data"])
            found.append((token, micros / 1e6))
        return found

    def close(self) -> None:
        self.told.close()
        self.client.close()


class BothLedgers(RuleBasedStateMachine):
    """Each rule makes one call to both ledgers."""

    server: Server

    @initialize()
    def begin(self) -> None:
        self.clock = VirtualClock(start=1_000_000.0)
        self.model = MemoryLedger(self.clock)
        self.script = Script(self.server, self.clock)
        self.listeners = {owner: Listener() for owner in OWNERS}
        for owner, listener in self.listeners.items():
            self.model.listen(owner, listener)

    @rule(seconds=SECONDS)
    def time_goes_on(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        token=TOKENS,
        wanted=st.lists(
            st.tuples(HOSTS, SECONDS, st.sampled_from([1, 1, 2]), st.booleans(), BUDGETS),
            min_size=1,
            max_size=3,
            unique_by=lambda one: one[0],
        ),
        times=st.sampled_from([1, 1, 1, 2]),
    )
    def take(self, token: str, wanted: list[tuple[Any, ...]], times: int) -> None:
        if known := self.held(token):  # a token asks for the same scopes each time
            by_name = {one[0]: one for one in wanted}
            wanted = [by_name.get(name, (name, 1.0, 1, False)) for name in known]
        request = TakeRequest(token, tuple(ScopeRequest(*one) for one in wanted))
        self.script.tokens.setdefault(
            token, _TokenState(tuple(one.scope for one in request.scopes))
        )
        for _ in range(times):
            (expected,) = self.model.take_nowait([request])
            (found,) = self.script.turn([("t", token, request.scopes)])
            self.script.ledger._subscribed = 99
            assert self.script.ledger._answer(request, found) == expected
            assert isinstance(expected, Granted | NotBefore)

    def held(self, token: str) -> tuple[str, ...]:
        return self.model._scopes_of.get(token, ())

    @rule(token=TOKENS, times=st.sampled_from([1, 2]))
    def head(self, token: str, times: int) -> None:
        for _ in range(times):
            if self.held(token):
                self.script.tokens[token].headed = True
                at_once(self.model.head([token]))
                self.script.turn([("h", token, self.held(token))])

    @rule(
        token=TOKENS,
        outcome=st.sampled_from(get_args(Outcome)),
        report=st.none() | st.builds(Report, HOSTS, SECONDS, st.just("429"), SECONDS, SECONDS),
        size=st.sampled_from([0, 0, 400, 900]),
    )
    def end(self, token: str, outcome: Outcome, report: Report | None, size: int) -> None:
        scopes = self.held(token)
        if not scopes:
            return
        reports = () if report is None else (report,)
        operations = [*map(report_operation, reports), end_operation(token, scopes, outcome, size)]
        at_once(self.model.end([End(token, outcome, reports, size)]))
        self.script.turn(operations)
        self.script.tokens.pop(token, None)

    @rule(token=TOKENS)
    def renew(self, token: str) -> None:
        scopes = self.held(token)
        if scopes:
            at_once(self.model.renew([token]))
            self.script.turn(self.script.ledger._renewals([token]))

    @rule(report=st.builds(Report, HOSTS, SECONDS, st.just("503"), SECONDS, SECONDS))
    def block(self, report: Report) -> None:
        at_once(self.model.block([report]))
        self.script.turn([report_operation(report)])

    @rule(host=HOSTS, paused=st.booleans())
    def pause(self, host: str, paused: bool) -> None:
        at_once(self.model.pause([host]) if paused else self.model.resume([host]))
        self.script.turn([("p", host, int(paused))])

    @rule(host=HOSTS)
    def look(self, host: str) -> None:
        (expected,) = at_once(self.model.look([host]))
        (found,) = self.script.turn([("v", host)])
        assert scope_view(found) == expected

    @rule()
    def scripts_are_forgotten(self) -> None:
        self.script.client.script_flush()

    @invariant()
    def the_same_is_told(self) -> None:
        if not hasattr(self, "script"):
            return
        expected = [one for listener in self.listeners.values() for one in listener.opened_for]
        for listener in self.listeners.values():
            listener.opened_for = []
        assert Counter(self.script.opened(len(expected))) == Counter(expected)

    def teardown(self) -> None:
        if hasattr(self, "script"):
            self.script.close()


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ledger, "_call_soon", lambda call, *arguments: call(*arguments))
    return


def test_the_script_equals_its_model(server: Server, told_at_once: None) -> None:
    class Machine(BothLedgers):
        pass

    Machine.server = server
    run_machine(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
