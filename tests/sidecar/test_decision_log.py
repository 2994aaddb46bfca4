"""The decision log: one line for each decision; masked, bounded, counted (T8, T11, T20)."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any

import msgspec
import pytest

from gatekeeper.clock import VirtualClock
from gatekeeper.config import ServerConfig
from gatekeeper.decision import Decision, Verdict
from gatekeeper.robots import Rule
from gatekeeper.sidecar import logs
from gatekeeper.sidecar.logs import DecisionLog
from tests.gate_support import decided
from tests.sidecar.decision_log_support import write_log

RULE = Rule(line=3, field="disallow", value="/private", text="Disallow: /private")


def decision(url: str = "https://a.example/x", **changes: Any) -> Decision:
    return decided(**({"url": url, "rule": RULE, "id": "d-7"} | changes))


def written(*decisions: Decision, **settings: Any) -> list[str]:
    stream = io.StringIO()
    log = DecisionLog(
        ServerConfig(**({"log_format": "json"} | settings)), VirtualClock(), stream=stream
    )
    for one in decisions:
        log.add(one, "r-1", "token-1")
    write_log(log)
    return stream.getvalue().splitlines()


def test_t20_a_line_of_the_decision_log_has_the_ids_the_client_and_the_rule() -> None:
    [line] = written(decision())
    record = json.loads(line)

    assert record["event"] == "decision"
    assert (record["id"], record["request"], record["client"]) == ("d-7", "r-1", "token-1")
    assert (record["line"], record["rule"]) == (3, "Disallow: /private")
    assert record["time"].endswith("Z")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://a.example/x#token=secret", "https://a.example/x#***"),
        ("https://a.example/x?a=b#token?secret", "https://a.example/x?***#***"),
        ("https://a.example/x#token?secret", "https://a.example/x#***"),
    ],
)
def test_t11_a_fragment_is_masked(url: str, shown: str) -> None:
    [line] = written(decision(url))

    assert json.loads(line)["url"] == shown


def test_t11_a_query_is_masked() -> None:
    [line] = written(decision("https://a.example/x?token=secret"))

    assert json.loads(line)["url"] == "https://a.example/x?***"


def test_a_query_is_shown_where_that_is_wanted() -> None:
    [line] = written(decision("https://a.example/x?a=b"), log_queries=True)

    assert json.loads(line)["url"] == "https://a.example/x?a=b"


def test_t11_a_line_end_in_a_url_makes_no_second_line() -> None:
    hostile = decision('https://a.example/\n{"event":"forged"}\x1b[2J')

    assert len(written(hostile)) == 1
    assert len(written(hostile, log_format="text")) == 1
    assert "\x1b" not in written(hostile, log_format="text")[0]


def test_only_refusals_are_logged_where_that_is_wanted() -> None:
    allow = decision(verdict=Verdict.ALLOW)

    assert len(written(allow, decision(), log_decisions="refused")) == 1
    assert written(allow, decision(), log_decisions="none") == []


def test_t8_decisions_logged_too_fast_are_dropped_and_counted() -> None:
    stream = io.StringIO()
    log = DecisionLog(ServerConfig(log_rate=100, log_format="json"), VirtualClock(), stream=stream)
    log.add_many([decision()] * 50_000, "r-1", "c")
    write_log(log)

    assert log.written == 10
    assert log.dropped == 50_000 - 10 - 10  # ten more wait for the next write
    write_log(log)
    assert log.written + log.dropped == 50_000


def test_a_closed_log_stream_stops_no_response() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = DecisionLog(ServerConfig(log_format="json"), VirtualClock(), stream=Broken())
    log.add(decision(), "r-1", "c")
    write_log(log)

    assert (log.written, log.dropped) == (0, 1)


@pytest.fixture
def long_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shutdown wait for the writing thread longer, for a busy machine."""
    monkeypatch.setattr(logs, "SHUTDOWN_SECONDS", 45.0)


@pytest.mark.usefixtures("long_shutdown")
async def test_the_rest_of_the_log_is_written_when_its_task_is_cancelled() -> None:
    stream = io.StringIO()
    clock = VirtualClock()
    log = DecisionLog(ServerConfig(log_format="json"), clock, stream=stream)
    task = asyncio.create_task(log.run())
    log.add(decision(), "r-1", "c")
    await clock.elapse(0.2)
    log.add(decision(), "r-2", "c")
    task.cancel()
    await asyncio.wait([task])

    assert [msgspec.json.decode(line)["request"] for line in stream.getvalue().splitlines()] == [
        "r-1",
        "r-2",
    ]


@pytest.mark.usefixtures("long_shutdown")
async def test_t8_a_stopped_log_reader_delays_no_response_and_drops_are_counted() -> None:
    reader, writer = os.pipe()
    clock = VirtualClock()
    with open(writer, "w") as stream, open(reader, "rb") as pipe:
        log = DecisionLog(ServerConfig(log_format="json"), clock, stream=stream)
        task = asyncio.create_task(log.run())
        for _ in range(40):  # far more than a pipe and the ring hold; the loop does not block
            log.add_many([decision()] * 1000, "r-1", "c")
            await clock.elapse(0.1)
        dropped = log.dropped
        # Now the pipe is read, until the end of the file.
        reading = asyncio.create_task(asyncio.to_thread(pipe.read))
        task.cancel()
        await asyncio.wait([task])
        stream.close()
        lines = (await reading).splitlines()

    assert dropped >= 40_000 - 20_000 - 2 * 1000
    assert len(lines) == log.written
    assert {json.loads(line)["request"] for line in lines} == {"r-1"}


def test_the_decision_log_writes_whole_lines(tmp_path: Any) -> None:
    with open(tmp_path / "log", "w") as stream:
        log = DecisionLog(ServerConfig(log_format="json"), VirtualClock(), stream=stream)
        log.add_many([decision()] * 500, "r-1", "c")
        write_log(log)
    lines = (tmp_path / "log").read_text().splitlines()

    assert [json.loads(line)["id"] for line in lines] == ["d-7"] * 500
