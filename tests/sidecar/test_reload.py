"""A reload (T17): everything is checked first; then all of it is in force, or nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gatekeeper import HostRule
from gatekeeper.clock import VirtualClock
from gatekeeper.config import Config, GroupRule, GuardConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar import listening, process
from gatekeeper.sidecar.background import READ_SECONDS, FileReader
from gatekeeper.sidecar.process import ServeOptions, running
from gatekeeper.sidecar.reload import Reloaded, reload
from tests.internet import FakeInternet
from tests.waiting_support import until

Open = Callable[..., Awaitable[Any]]
TOKEN = "t" * 40
URL = "http://a.test/page"


async def reread(service: Any, **changes: Any) -> Reloaded:
    """Reload with these settings changed; `server` is a dictionary."""
    config: Config = service.config
    if "server" in changes:
        changes["server"] = replace(config.server, **changes["server"])
    service.reread = lambda: replace(config, **changes)
    return await reload(service)


def raising(error: Exception) -> Callable[[], Config]:
    def read() -> Config:
        raise error

    return read


BAD: dict[str, dict[str, Any]] = {
    "a group that nobody knows": {"host": (HostRule(match="b.test", group="none"),)},
    "a match that is no host": {"host": (HostRule(match="a b"),)},
    "an entry of guard.allow": {"guard": GuardConfig(allow=("foo/9",))},
    "an agent without a token": {"user_agent": "///"},
    "a token file that is not there": {"server": {"token_file": "/nowhere/tokens"}},
    "a range that is none": {"server": {"trusted_peers": ("here",)}},
    "open to all without a token": {"server": {"host": "0.0.0.0"}},
}


@pytest.mark.parametrize("why", BAD)
async def test_a_reload_of_a_configuration_that_no_start_accepts_changes_nothing(
    serve: Open, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    service = (await serve()).service
    before = service.config
    changes = {"host": (HostRule(match="*.test", interval=9.0),), **BAD[why]}
    changes["server"] = {"max_batch": 5, **changes.get("server", {})}
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError):
        await reread(service, **changes)

    assert service.config is before
    assert service.gate.parts.scheduler.host_rules.find("a.test") is None
    assert (service.metrics.reloads["failure"], service.metrics.last_reload_ok) == (1, False)
    [line] = [one.getMessage() for one in caplog.records]
    assert line.startswith("the configuration was not applied")
    assert "\n" not in line


async def test_an_unexpected_error_is_a_failed_reload(serve: Open) -> None:
    service = (await serve()).service
    service.reread = raising(RuntimeError("a surprise"))
    with pytest.raises(ConfigError, match="a surprise"):
        await reload(service)

    assert (service.metrics.reloads["failure"], service.metrics.last_reload_ok) == (1, False)


async def test_the_sidecar_answers_while_the_files_are_read(serve: Open) -> None:
    admission = await serve()
    service, config = admission.service, admission.service.config
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Config:
        begun.set()
        assert go_on.wait(60)
        return replace(config, server=replace(config.server, max_batch=5))

    service.reread = slowly
    first = asyncio.ensure_future(admission.post("/v1/admin/reload", {}))
    assert await asyncio.to_thread(begun.wait, 60)
    for path in ("/healthz", "/readyz", "/v1/hosts"):
        assert (await admission.get(path))[0] == 200
    assert service.config is config
    service.reread = lambda: replace(config, server=replace(config.server, max_batch=7))
    second = asyncio.ensure_future(reload(service))
    await asyncio.sleep(0)
    go_on.set()
    assert (await first)[0] == 200
    assert (await second).applied == ["server.max_batch"]
    assert service.config.server.max_batch == 7, "one after the other, in the order of the calls"


async def test_files_that_are_never_read_change_nothing_and_take_one_thread() -> None:
    clock, never = VirtualClock(), threading.Event()
    files = FileReader(clock)
    reading = asyncio.ensure_future(files.run(never.wait))
    await clock.elapse(READ_SECONDS - 1.0)
    assert not reading.done()
    await clock.elapse(2.0)
    with pytest.raises(ConfigError, match="were not read within 10 s: see whether the disk"):
        await reading
    with pytest.raises(ConfigError, match="an earlier reload has not read its files yet"):
        await files.run(never.wait)
    never.set()
    while True:  # until the thread has ended
        try:
            assert await files.run(lambda: 5) == 5
        except ConfigError:
            await asyncio.sleep(0)
        else:
            break


async def test_sighup_ends_with_ready_whatever_the_reload_came_to(
    serve: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = (await serve()).service
    service.reread = raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    name = f"\0gatekeeper-test-{id(service)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name[1:])
        await process.reload_and_notify(service)

        assert manager.recv(100).startswith(b"RELOADING=1")
        assert manager.recv(100) == b"READY=1"
    assert not service.metrics.last_reload_ok


async def test_a_pace_for_a_pattern_is_in_force_after_a_reload_and_gone_after_the_next(
    serve: Open, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = (await serve()).service
    async with service.gate.lease(URL) as lease:
        lease.report(status=200)
    told = await reread(service, host=(HostRule(match="*.test", interval=6.0),))

    assert told.applied == ["host"]
    assert 6.0 in [clock.seconds for clock in await service.gate.why("a.test")]

    await reread(service, host=())
    assert 6.0 not in [
        clock.seconds for clock in await service.gate.why("a.test") if clock.kind == "interval"
    ]


async def test_a_reload_that_moves_a_rule_to_another_match_grants_no_early_lease(
    serve: Open, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    service = (await serve()).service
    async with service.gate.lease(URL) as lease:
        lease.report(status=200)
    await reread(service, host=(HostRule(match="*.test", interval=900.0),))
    waiter = asyncio.create_task(service.gate.acquire(URL))
    await until(lambda: service.gate.stats().pacing.waiting)
    await reread(
        service, host=(HostRule(match="*", interval=0.0), HostRule(match="a.test", interval=900.0))
    )
    for _ in range(10):
        await asyncio.sleep(0)

    assert not waiter.done()
    waiter.cancel()
    await asyncio.wait([waiter])


async def test_a_group_that_is_new_needs_a_restart_and_says_so(serve: Open) -> None:
    service = (await serve()).service
    told = await reread(service, group=(GroupRule(name="g", interval=5.0),))
    assert told == Reloaded(applied=[], needs_restart=["group"])

    with pytest.raises(ConfigError, match="restart"):
        await reread(
            service,
            group=(GroupRule(name="g", interval=5.0),),
            host=(HostRule(match="a.test", group="g"),),
        )


async def test_a_change_of_log_format_needs_a_restart(serve: Open) -> None:
    service = (await serve()).service

    told = await reread(service, server={"log_format": "json"})
    assert told.needs_restart == ["server.log_format"]


async def test_new_tokens_in_the_same_file_count_as_a_change(serve: Open, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    service = (await serve(token_file=str(tokens))).service
    await reread(service)  # from the tokens that the service was made with to those of the file
    assert (await reread(service)).applied == []

    tokens.write_text(f"anna:check:{TOKEN}", encoding="utf-8")
    assert (await reread(service)).applied == ["server.token_file"]


async def test_t5_an_open_socket_keeps_its_token_though_the_file_names_loopback_now(
    serve: Open, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    service = (await serve(token_file=str(tokens))).service
    service.exposed = "0.0.0.0 port 8750"
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 port 8750 can be reached"):
        await reread(service, server={"host": "127.0.0.1", "token_file": None})

    assert service.config.server.token_file == str(tokens)


async def test_t5_a_socket_that_was_handed_over_is_judged_by_where_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as given:
        monkeypatch.setattr(listening, "activated_sockets", lambda environ: [given.dup()])
        config = Config.from_dict({"storage": {"path": "memory"}})
        options = ServeOptions("testbot/1.0", config, lambda: config, lambda *_: None)
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0 port \d+ can be reached"):
            async with running(options):
                pass


@pytest.mark.parametrize("mode", [0o666, 0o600])
async def test_t5_a_handed_unix_socket_that_others_may_write_to_needs_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    tokens.chmod(0o600)
    plain = Config.from_dict({"storage": {"path": "memory"}})
    keyed = replace(plain, server=replace(plain.server, token_file=str(tokens)))
    with (
        tempfile.TemporaryDirectory(prefix="gk") as short,
        socket.socket(socket.AF_UNIX) as given,
    ):
        given.bind(f"{short}/s")
        Path(short, "s").chmod(mode)
        monkeypatch.setattr(listening, "activated_sockets", lambda environ: [given.dup()])

        def options(config: Config) -> ServeOptions:
            return ServeOptions("testbot/1.0", config, lambda: plain, lambda *_: None)

        if mode == 0o666:
            with pytest.raises(ConfigError, match=r"unix:.* \(mode 0666\) .*SocketMode=0600"):
                async with running(options(plain)):
                    pass
            async with running(options(keyed)) as service:
                with pytest.raises(ConfigError, match="SocketMode=0600"):
                    await reload(service)  # to a configuration without a token
        else:
            async with running(options(plain)) as service:
                assert service.exposed is None


async def test_t5_a_reload_that_drops_the_token_of_a_public_address_is_refused(
    start: Any, tmp_path: Path
) -> None:
    path, tokens = tmp_path / "gatekeeper.toml", tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    path.write_text(f'[server]\nhost = "0.0.0.0"\ntoken_file = "{tokens}"\n', encoding="utf-8")
    sidecar = await start("--config", str(path))
    path.write_text('[server]\nhost = "127.0.0.1"\n', encoding="utf-8")
    sidecar.tell(signal.SIGHUP)

    assert await sidecar.said("the configuration was not applied")
    async with sidecar.session.get(sidecar.base + "/v1/hosts") as response:
        assert response.status == 401
