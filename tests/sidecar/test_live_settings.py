"""After a reload each setting is in force, or is reported to need a restart (T17)."""

from __future__ import annotations

import asyncio
import logging
import re
import tomllib
import types
import typing
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import gatekeeper
from gatekeeper.config import Config, GroupRule, GuardConfig, HostRule
from gatekeeper.decision import Reason, Verdict
from gatekeeper.sidecar.reload import LIVE_TABLES, RESTART, Reloaded, needs_restart, reload
from tests.internet import FakeInternet
from tests.pacing_support import scope_of
from tests.waiting_support import until

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"
TLS = {"server.tls_cert", "server.tls_key", "server.tls_client_ca"}
"""These must be set together; see test_certificates."""

OTHER: dict[str, Any] = {
    "user_agent": "otherbot/2.0",
    "host": (HostRule(match="b.test", robots="deny"),),
    "group": (GroupRule(name="new"),),
    "fleet.url": "redis://127.0.0.1:1",
    "fleet.namespace": "other",
    "identity.also": ("/nowhere/also.pem",),
    "identity.directory": "https://bot.example/keys",
    "fetch.from_address": "me@example.org",
    "guard.allow": ("127.0.0.0/8", "*.test", "10.0.0.0/8"),
    "guard.deny": ("192.0.2.0/24",),
    "guard.ports": (80, 443),
    "pacing.max_interval": 77.0,
    "pacing.max_pages_per_day": 9_999,
    "pacing.max_bytes_per_day": 999_999,
    "pacing.address_interval": 0.5,
    "pacing.domain_interval": 0.5,
    "storage.path": "/nowhere/state.sqlite",
    "audit.folder": "/nowhere/audit",
    "server.diagnostics": "127.0.0.2:8751",
    "server.host": "127.0.0.2",
    "server.socket": "/nowhere/socket",
    "server.allowed_hosts": ("gate.internal",),
    "server.client_leases": 3,
    "server.client_rate": 99.0,
    "server.client_streams": 3,
    "server.forward_auth_hosts": ("gate.internal",),
    "server.trusted_peers": ("192.0.2.1/32",),
}
"""Other values of settings, where none can be derived from the default."""


def every_setting() -> Iterator[str]:
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from (f"{field.name}.{one.name}" for one in msgspec.structs.fields(field.type))
        else:
            yield field.name


def value_of(config: Config, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def changed(config: Config, name: str, value: Any) -> Config:
    table, _, setting = name.partition(".")
    if not setting:
        return replace(config, **{table: value})
    return replace(config, **{table: replace(getattr(config, table), **{setting: value})})


def another(config: Config, name: str) -> Any:
    """Return a valid value of the setting other than its current one."""
    if name in OTHER:
        return OTHER[name]
    value = value_of(config, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.125
    table, _, setting = name.partition(".")
    struct = type(getattr(config, table))
    kinds = typing.get_args(typing.get_type_hints(struct)[setting])
    return next(kind for kind in kinds if kind != value)


SETTINGS = sorted(every_setting())
LIVE = [name for name in SETTINGS if not needs_restart(name)]


# -- the table, the example file


def test_the_table_of_restart_settings_names_existing_settings() -> None:
    assert set(SETTINGS) >= RESTART
    assert {"user_agent", "group", *RESTART} <= {name for name in SETTINGS if needs_restart(name)}


def test_the_example_marks_each_setting_that_needs_a_restart_and_no_other() -> None:
    """`# restart` follows a setting, or the name of a table for all its settings."""
    marked, table, whole = set(), "", False
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        code, mark = line.removeprefix("#"), line.endswith("  # restart")
        if code.startswith("["):
            table, whole = code.partition("]")[0].strip("["), mark
            if code.startswith("[[") and whole:
                marked.add(table)
            continue
        name = code.partition(" = ")[0]
        dotted = f"{table}.{name}" if table else name
        if " = " in code and dotted in SETTINGS and (mark or whole):
            marked.add(dotted)
    assert marked == {name for name in SETTINGS if needs_restart(name)}
    assert tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))


# -- one by one


@pytest.fixture
async def service(serve: Any, internet: FakeInternet) -> Any:
    """A service that has a clock and a record of a host."""
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/page", "x")
    sidecar = await serve()
    await sidecar.get("/v1/check", params={"url": "http://a.test/page"})
    return sidecar.service


async def reread(service: Any, config: Config) -> Reloaded:
    service.reread = lambda: config
    return await reload(service)


ALONE = TLS | {"identity.key", "fetch.ca_file", "fetch.ca_dir"}
"""Settings that are invalid without another one, or without a file."""


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - set(LIVE) - ALONE))
async def test_a_setting_that_needs_a_restart_is_named_and_unchanged_by_a_reload(
    service: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "pacing.domain_interval":
        pytest.importorskip("publicsuffixlist")
    before = service.config
    assert "gatekeeper_config_restart_required{" not in service.metrics.render()[0].decode()
    with caplog.at_level(logging.INFO):
        told = await reread(service, changed(before, name, another(before, name)))

    assert told == Reloaded(applied=[], needs_restart=[name])
    assert service.config == service.gate.config == before
    assert f"these settings need a restart: {name}" in caplog.text
    metric = f'gatekeeper_config_restart_required{{setting="{name}"}} 1.0'
    assert metric in service.metrics.render()[0].decode()

    assert await reread(service, before) == Reloaded(applied=[], needs_restart=[])
    assert "gatekeeper_config_restart_required{" not in service.metrics.render()[0].decode()


MARK = 0.08712634
"""A value that occurs nowhere else."""


@pytest.mark.parametrize("name", LIVE)
async def test_a_live_setting_is_in_force_everywhere_after_a_reload(
    serve: Any, internet: FakeInternet, tmp_path: Path, name: str
) -> None:
    """No object of the service holds the old value any more."""
    table, _, setting = name.partition(".")
    marked = isinstance(value_of(Config(), name), float) or OTHER.get(name).__class__ is float
    begin = {setting: MARK} if marked else {}
    internet.site("a.test").robots("User-agent: *\nDisallow: /private\n").page("/page", "x")
    sidecar = await (serve(pacing=begin) if table == "pacing" else serve(**begin))
    service = sidecar.service
    async with service.gate.lease("http://a.test/page") as lease:
        lease.report(status=200)
    old = service.config
    assert not marked or value_of(old, name) == MARK
    tokens = tmp_path / "tokens"
    tokens.write_text("t" * 32, encoding="utf-8")
    value = str(tokens) if name == "server.token_file" else another(old, name)
    new = changed(old, name, value)
    told = await reread(service, new)

    assert told == Reloaded(applied=[name], needs_restart=[])
    assert value_of(service.config, name) == value_of(service.gate.config, name)
    assert value_of(service.config, name) == value_of(new, name)
    before = getattr(old, table)
    stale = [
        path
        for path, found in reachable(service)
        if (found is before and before) or (marked and found == MARK)
        # The clock of a request already sent keeps its interval.
        if not path.endswith("].interval")
    ]
    assert stale == []


def test_fetching_reads_no_live_setting_of_its_configuration() -> None:
    """`fetching` holds the Config that it was made with, so it may only read settings that stay."""
    read = {
        (path.name, table)
        for path in (Path(gatekeeper.__file__).parent / "fetching").glob("*.py")
        for table in re.findall(r"config\.(\w+)\.", path.read_text(encoding="utf-8"))
        if table in LIVE_TABLES
    }
    assert read == {("fetcher.py", "pacing")}  # see Fetcher.adjust


def reachable(root: object) -> Iterator[tuple[str, object]]:
    """Yield every object reachable from `root` by attributes, containers and closures."""
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([("service", root)])
    while waiting:
        path, one = waiting.popleft()
        yield path, one
        if id(one) in seen or isinstance(one, str | bytes | int | float | type | None):
            continue
        seen.add(id(one))
        waiting.extend((f"{path}{name}", held) for name, held in _held_by(one))


def _held_by(one: object) -> Iterator[tuple[str, object]]:
    if isinstance(one, dict):
        yield from ((f"[{key!r:.20}]", value) for key, value in one.items())
        yield from ((f".key({key!r:.20})", key) for key in one)
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from ((f"[{number}]", value) for number, value in enumerate(one))
    elif isinstance(one, types.MethodType):
        yield ".__self__", one.__self__
    elif isinstance(one, types.FunctionType):
        cells = one.__closure__ or ()
        yield from ((".cell", cell.cell_contents) for cell in cells)
    elif isinstance(one, partial):
        yield from ((".args", value) for value in (one.func, *one.args, *one.keywords.values()))
    elif type(one).__module__.startswith("gatekeeper"):
        names = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
        names |= {*getattr(one, "__dict__", ()), *getattr(one, "__struct_fields__", ())}
        if type(one).__module__.startswith("gatekeeper.fetching."):
            names -= {"_config"}  # another test checks what is read of it
        for name in names - {"reread", "__weakref__"}:
            if hasattr(one, name):
                yield f".{name}", getattr(one, name)


async def test_the_search_for_stale_values_finds_nested_ones(service: Any) -> None:
    class Hidden:
        __module__ = "gatekeeper.hidden"
        __slots__ = ("kept",)

    hidden = Hidden()
    hidden.kept = {"deep": [partial(max, MARK)]}
    service.somewhere = lambda: hidden
    assert any(found == MARK for _, found in reachable(service))
    nested = service.gate.parts.scheduler.holdups
    assert any(found is nested for _, found in reachable(service))


# -- behaviour: a few of each kind, as a client sees them


async def decide(service: Any, url: str) -> tuple[Verdict, Reason]:
    decision = await service.gate.check(url)
    return decision.verdict, decision.reason


async def test_a_range_that_is_allowed_opens_what_was_refused_before(
    service: Any, internet: FakeInternet
) -> None:
    internet.site("inner.example").robots("").page("/", "inside")
    url = "http://inner.example/"
    shut = changed(service.config, "guard.allow", ("*.test",))
    await reread(service, shut)
    assert await decide(service, url) == (Verdict.DENY, Reason.BLOCKED)
    assert await decide(service, url) == (Verdict.DENY, Reason.BLOCKED)  # from the cache

    await reread(service, changed(shut, "guard.allow", ("127.0.0.0/8",)))
    assert (await decide(service, url))[0] is Verdict.ALLOW


async def test_a_range_that_is_denied_closes_connections_that_are_open(
    service: Any, internet: FakeInternet
) -> None:
    async def page() -> int:
        async with service.session.get("http://a.test/page") as response:
            await response.read()
            return int(response.status)

    assert await page() == 200
    await reread(service, changed(service.config, "guard.deny", ("127.0.0.0/8",)))
    with pytest.raises(Exception, match="blocked"):
        await page()
    assert internet.requests[-1].path == "/page"
    assert len([one for one in internet.requests if one.path == "/page"]) == 1


async def test_a_name_that_is_denied_is_refused_at_once_though_it_is_warm(service: Any) -> None:
    url = "http://a.test/page"
    for _ in range(3):
        assert await service.gate.allowed(url)
    await reread(service, changed(service.config, "guard.deny", ("a.test",)))
    assert not await service.gate.allowed(url)
    assert await decide(service, url) == (Verdict.DENY, Reason.BLOCKED)
    await reread(service, changed(service.config, "guard.deny", ()))
    assert await service.gate.allowed(url)


async def test_another_default_interval_holds_for_hosts_in_memory(service: Any) -> None:
    url, gate = "http://a.test/page", service.gate
    for seconds in (0.3, 0.0, 0.7):
        await reread(service, changed(service.config, "pacing.default_interval", seconds))
        async with gate.lease(url) if seconds == 0.0 else gate.lease(url, timeout=9) as lease:
            lease.report(status=200)
        shown = [one.seconds for one in await gate.why("a.test") if one.kind == "interval"]
        assert shown == [seconds]
        await gate.block("a.test", 0)
        scope_of(gate.parts.scheduler, "a.test").interval = 0.0  # no wait between the rounds


async def test_a_higher_max_in_flight_grants_leases_to_those_who_wait(
    service: Any, internet: FakeInternet
) -> None:
    internet.site("b.test").robots("")
    await reread(service, changed(service.config, "pacing.max_in_flight", 1))
    first = await service.gate.acquire("http://a.test/page", owned=False)
    waiter = asyncio.create_task(service.gate.acquire("http://b.test/page", owned=False))
    await until(lambda: service.gate.stats().pacing.waiting == 1)
    await reread(service, changed(service.config, "pacing.max_in_flight", 5))
    (await waiter).end()
    first.end()


async def test_limits_tokens_and_hosts_are_in_force(
    serve: Any, internet: FakeInternet, tmp_path: Path
) -> None:
    sidecar = await serve()
    service = sidecar.service
    body = {"urls": ["http://a.test/"] * 3}
    assert (await sidecar.post("/v1/check", body))[0] == 200
    await reread(service, changed(service.config, "server.max_batch", 2))
    assert (await sidecar.post("/v1/check", body))[0] == 413

    tokens = tmp_path / "tokens"
    for line in ("a" * 32, f"news:check:{'b' * 32}"):
        tokens.write_text(line, encoding="utf-8")
        await reread(service, changed(service.config, "server.token_file", str(tokens)))
        bearer = {"Authorization": f"Bearer {line[-32:]}"}
        assert (await sidecar.get("/v1/hosts"))[0] == 401
        status = (await sidecar.get("/v1/hosts", headers=bearer))[0]
        assert status == (403 if ":" in line else 200)


async def test_a_host_header_is_accepted_once_it_is_listed(serve: Any) -> None:
    sidecar = await serve()
    service = sidecar.service
    service.addresses = [("127.0.0.1", 8750)]
    for hosts, status in (((), 403), (("gate.internal",), 200), ((), 403)):
        await reread(service, changed(service.config, "server.allowed_hosts", hosts))
        found = await sidecar.get("/v1/hosts", headers={"Host": "gate.internal"})
        own = await sidecar.get("/v1/hosts", headers={"Host": "127.0.0.1:8750"})
        assert (found[0], own[0]) == (status, 200)


def test_a_guard_that_cannot_be_read_changes_nothing() -> None:
    from gatekeeper.errors import ConfigError
    from gatekeeper.fetching.allowed_addresses import Guard

    guard = Guard(Config(guard=GuardConfig(allow=("10.0.0.0/8",))))
    with pytest.raises(ConfigError):
        guard.adjust(GuardConfig(deny=("10.0.0.0/8",), allow=("foo/9",)))
    assert guard.refuses_address("10.0.0.1", 80) is None
