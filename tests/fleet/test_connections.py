"""Connections to a store: each kind of URL against a real server, its display, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time as wall
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio as redis
import trustme

from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.fleet import RedisLedger
from gatekeeper.fleet import redis_ledger as ledger_module
from gatekeeper.fleet import store as store_module
from gatekeeper.fleet.first_start import begin_fleet
from gatekeeper.fleet.scripts import FORMAT
from gatekeeper.fleet.store import Store, StoreAttempts, StoreDown, StoreRefuses
from gatekeeper.pacing.ledger import Report
from gatekeeper.sidecar.routes.operators import masked
from gatekeeper.urls import without_credentials
from tests.fleet.conftest import end_quarantine, store_of
from tests.fleet.proxy import Proxy
from tests.fleet.server import BINARY, Replicated, Server
from tests.internet import free_port
from tests.pacing.ledger_rules import PATIENCE, Listener, granted, take
from tests.waiting_support import until

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server here")

SECRET = "p@ss/w?rd#1"
ESCAPED = "p%40ss%2Fw%3Frd%231"
Started = Callable[..., Server]
Works = Callable[..., Awaitable[RedisLedger]]


def rights_documented() -> list[str]:
    text = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")
    return re.findall(r"\+[@\w|]+", text.partition("An ACL user needs `")[2].partition("`")[0])


@pytest.fixture
def started() -> Iterator[Started]:
    made: list[Server] = []

    def build(*options: str, port: int = 0) -> Server:
        server = Server(*options, port=port)
        made.append(server)
        server.start()
        return server

    yield build
    for server in made:
        server.close()


@pytest.fixture
async def works() -> AsyncIterator[Works]:
    """Join by the URL, acquire and end a lease, and return the ledger."""
    made: list[RedisLedger] = []

    async def try_it(url: str, **settings: object) -> RedisLedger:
        ledger = RedisLedger(url, config=FleetConfig(hold=1.0, **settings))  # type: ignore[arg-type]
        made.append(ledger)
        listener = Listener()
        ledger.listen("a", listener)
        await ledger.open()
        await end_quarantine(ledger)
        assert await granted(ledger, "a:1", "h")
        await ledger.head(["a:1"])
        assert not await granted(ledger, "a:2", "h")
        async with asyncio.timeout(PATIENCE):
            await until(lambda: ledger.hearing)
            await ledger.pause(["h"])
            await until(lambda: listener.pauses)
        return ledger

    yield try_it
    for ledger in made:
        await ledger.close()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis://127.0.0.1:{port}/99", "DB index is out of range: name a database that"),
        (
            "redis+sentinel://127.0.0.1:{port}/name/0",
            "this server is not a Sentinel: name the Sentinels",
        ),
    ],
)
async def test_a_wrong_store_url_is_refused_at_the_start(
    started: Started, url: str, remedy: str
) -> None:
    """Such a URL must not be treated as a store that is away, or nothing would ever be granted."""
    server = started(port=free_port())
    stranger = RedisLedger(url.format(port=server.port))
    with pytest.raises(ConfigError, match=remedy):
        await stranger.open()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """Return the file of a CA, and the options of a server whose certificate it has issued."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(folder / "key.pem")
    for blob in pair.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    return folder / "ca.pem", (
        *("--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem")),
        *("--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "no"),
    )


async def test_a_store_over_tls_works_and_an_unknown_certificate_is_refused(
    started: Started, works: Works, certificates: tuple[Path, tuple[str, ...]]
) -> None:
    authority, options = certificates
    port = free_port()
    started("--tls-port", str(port), *options)
    url = f"rediss://127.0.0.1:{port}/0"
    await works(f"{url}?ssl_ca_certs={authority}")
    stranger = Store(url, FleetConfig())
    with pytest.raises(LedgerLost, match="CERTIFICATE_VERIFY_FAILED"):
        await stranger.connect()
    await stranger.close()


async def test_a_store_user_with_the_documented_rights_works_in_its_own_database(
    started: Started, works: Works, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = started(port=free_port())
    server.ask(
        *("ACL", "SETUSER", "crawler", "on", f">{SECRET}", "~{gatekeeper}:*", "&{gatekeeper}:*"),
        *rights_documented(),
    )
    place = f"127.0.0.1:{server.port}/3"
    assert (await begin_fleet(FleetConfig(url=f"redis://crawler:{ESCAPED}@{place}"))).begun
    ledger = await works(f"redis://crawler:{ESCAPED}@{place}")
    assert b"db3:keys=" in server.ask("INFO", "keyspace")
    assert SECRET not in repr(ledger.config)
    for user in (f"crawler:{SECRET[:3]}", "nobody:" + ESCAPED):
        stranger = RedisLedger(f"redis://{user}@{place}")
        with pytest.raises(ConfigError, match=r"fleet\.url: redis://127.*add a user") as refused:
            await stranger.open()
        assert SECRET not in str(refused.value)
    for rights in ("~* &* +@read", "~other &* +@all", "~* resetchannels +@all"):
        server.ask("ACL", "SETUSER", "weak", "reset", "on", f">{SECRET}", *rights.split())
        stranger = RedisLedger(f"redis://weak:{ESCAPED}@{place}")
        with pytest.raises(ConfigError, match=r"docs/fleet\.md"):
            await stranger.open()
    assert SECRET not in caplog.text
    assert ESCAPED not in caplog.text


async def test_a_user_who_may_not_subscribe_is_named_once_in_the_log(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks and newcomers would otherwise be noticed late without any hint why."""
    server = started(port=free_port())
    server.ask("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "&*", "+@all", "-subscribe")
    async with RedisLedger(f"redis://deaf:pw@127.0.0.1:{server.port}/0") as ledger:
        async with asyncio.timeout(PATIENCE):
            await until(lambda: caplog.records)
            tried = asyncio.Event()
            store = store_of(ledger)
            listen = store.listen

            async def listen_again(*args: object) -> None:
                tried.set()
                await listen(*args)  # type: ignore[arg-type]

            store.listen = listen_again  # type: ignore[method-assign]
            await tried.wait()
            await store.run("PING")
    (said,) = (one.getMessage() for one in caplog.records if one.levelname == "ERROR")
    assert "subscribe" in said
    assert "docs/fleet.md" in said


async def test_a_store_at_a_unix_socket_with_a_database_works(
    started: Started, works: Works
) -> None:
    server = started()
    await works(f"{server.url}?db=5")
    assert b"db5:keys=" in server.ask("INFO", "keyspace")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:secret@h:1/0", "redis://h:1/0"),
        ("redis://u:a/secret@h:1/0", "redis://h:1/0"),
        ("redis://u:a?secret@h:1/0", "redis://h:1/0"),
        ("redis://u:a#secret@h:1/0", "redis://h:1/0"),
        ("redis://u:a@b/secret@h:1/0", "redis://h:1/0"),
        ("redis://:secret@h/0?ssl_ca_certs=/x", "redis://h/0"),
        ("redis://h/0?sentinel_password=secret", "redis://h/0"),
        ("unix://:secret@/run/s?db=1", "unix:///run/s"),
        ("redis+sentinel://u:secret@h:1,g:2/m/0", "redis+sentinel://h:1,g:2/m/0"),
    ],
)
def test_no_password_is_shown_however_it_is_written(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
    assert "secret" not in str(masked(url))
    assert "secret" not in repr(FleetConfig(url=url))
    said = None
    try:
        where = Store(url, FleetConfig()).where
    except ConfigError as error:
        said, where = error, str(error)
    assert "secret" not in where
    assert said is None or said.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("foo", "foo"),
        ("valkey.example:6379/0", "valkey.example:6379/0"),
        ("u:secret@valkey.example:6379/0?x=secret", "valkey.example:6379/0"),
        ("redis:/u:a/secret@h", "h"),
    ],
)
def test_a_store_url_without_a_scheme_is_quoted_as_given(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
    assert "secret" not in repr(FleetConfig(url=url))
    with pytest.raises(
        ConfigError, match=rf"fleet\.url: '{shown}' must begin with one of redis://"
    ):
        Store(url, FleetConfig())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "must begin with one of redis://"),
        ("redis://u:a/b@h:1/0", "%2F"),
        ("redis://h/zero", "'zero' is not a database number"),
        ("redis://h/0?socket_timeout=600", "'socket_timeout' is not supported"),
        ("redis://h/0?decode_responses=1", "'decode_responses' is not supported"),
        ("redis://h:port/0", "can't be used"),
        ("redis://[::1/0", "can't be used"),
        ("redis://h/1/2", "'1/2' is not a database number"),
        ("unix://", "names no socket"),
        ("unix://?db=1", "names no socket"),
        ("redis+sentinel://h:1/", "of the master"),
        ("redis+sentinel://h:1/m/zero", "'zero' is not a database number"),
    ],
)
def test_a_url_that_would_be_misread_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.url") as refused:
        Store(url, FleetConfig())
    assert said in str(refused.value)


# --- stores that are down for every member ---------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "unix"])
async def test_a_store_that_refuses_connections_is_down_for_all_but_behind_sentinels(
    scheme: str, tmp_path: Path
) -> None:
    """Sentinels may have named a server that is no longer the master."""
    place = tmp_path / "no" if scheme == "unix" else f"127.0.0.1:{free_port()}"
    url = f"{scheme}://{place}" + ("/store" if "+" in scheme else "")
    store = Store(url, FleetConfig())
    with pytest.raises(LedgerLost) as caught:
        await store.connect()
    assert isinstance(caught.value, StoreDown) is ("+" not in scheme)
    await store.close()


@pytest.mark.parametrize(
    ("how", "down"), [("loads", True), ("is gone", False), ("is full", False), ("hangs", False)]
)
async def test_a_proxy_that_hangs_or_refuses_cuts_off_only_its_member(
    started: Started, monkeypatch: pytest.MonkeyPatch, how: str, down: bool
) -> None:
    """A proxy that accepts but can't connect, or never responds, may affect this member alone."""
    if how == "hangs":
        monkeypatch.setattr(store_module, "CALL_DEADLINE", 0.1)
    server = started()
    proxy = Proxy(str(server.socket))
    await proxy.open()
    store = Store(proxy.url, FleetConfig())
    if how == "is gone":
        server.kill()
    elif how == "hangs":
        proxy.how = "drop"
    else:
        refusals = {"loads": "LOADING Redis is loading", "is full": "OOM command not allowed"}
        proxy.refusal = refusals[how]
    with pytest.raises(LedgerLost) as caught:
        await store.connect()
    assert isinstance(caught.value, StoreDown) is down
    await store.close()
    await proxy.close()


# --- Sentinels --------------------------------------------------------------------------------


async def test_sentinels_name_the_master_also_when_some_are_away_and_after_a_failover(
    works: Works, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first Sentinel accepts and never responds; the second one refuses connections."""
    pair = Replicated()
    hung = Server(port=free_port())
    try:
        pair.start()
        hung.start()
        hung.stop()
        places = f"127.0.0.1:{hung.port},127.0.0.1:{free_port()}"
        url = pair.url.replace("://", f"://{places},")
        with pytest.raises(ConfigError, match="min-replicas-to-write 1"):
            await works(url)
        pair.master.ask("CONFIG", "SET", "min-replicas-to-write", "1")
        # The time that the hanging Sentinel costs; the others must respond within it.
        monkeypatch.setattr(store_module, "SENTINEL_DEADLINE", 0.5)
        ledger = await works(url)
        epochs = ledger.stats().epochs
        pair.master.kill()
        pair.sentinels[0].ask("SENTINEL", "FAILOVER", "store")
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    answers = [await take(ledger, "a:3", "x"), await take(ledger, "a:2", "h")]
                    break
                except LedgerLost:
                    await asyncio.sleep(0.05)
        assert ledger.stats().epochs == epochs + 1
        assert answers
        warned = [one for one in caplog.messages if "min-replicas-to-write 0" in one]
        assert len(warned) == 1  # about the replica, since it is too late to refuse to start
    finally:
        hung.close()
        pair.close()


async def test_sentinels_and_their_master_over_tls_with_a_password_each(
    started: Started, works: Works, certificates: tuple[Path, tuple[str, ...]]
) -> None:
    authority, options = certificates
    master, watch = free_port(), Server(port=0)
    started("--tls-port", str(master), "--tls-replication", "yes", *options)
    port = free_port()
    pairs = zip(options[::2], options[1::2], strict=True)
    secure = [f"{name.removeprefix('--')} {value}" for name, value in pairs]
    try:
        watch.start_sentinel(
            master, f"tls-port {port}", "tls-replication yes", "requirepass watch", *secure
        )
        place = f"rediss+sentinel://127.0.0.1:{port}/store/0?ssl_ca_certs={authority}"
        async with asyncio.timeout(PATIENCE):
            while True:
                store = Store(
                    f"{place}&sentinel_password=watch", FleetConfig(allow_lost_writes=True)
                )
                try:
                    assert await store.connect(starting=True)
                    break
                except LedgerLost:  # the Sentinel has not asked its master yet
                    await asyncio.sleep(0.05)
                finally:
                    await store.close()
        stranger = Store(place, FleetConfig(allow_lost_writes=True))
        with pytest.raises(LedgerLost, match=r"No master found for 'store'$"):
            await stranger.connect()
        await stranger.close()
    finally:
        watch.close()


async def test_a_replica_is_no_store() -> None:
    pair = Replicated(sentinels=0)
    try:
        pair.start()
        store = Store(pair.replica.url, FleetConfig())
        with pytest.raises(LedgerLost, match="is a replica"):
            await store.connect()
        await store.close()
    finally:
        pair.close()


# --- errors at the start -------------------------------------------------------------------------


async def refused(url: str, **settings: object) -> str:
    """Return the error message of a member that can't start."""
    ledger = RedisLedger(url, config=FleetConfig(**settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        await ledger.open()
    assert not [task for task in asyncio.all_tasks() if "RedisLedger" in repr(task)]
    return str(error.value)


@pytest.mark.parametrize(
    "policy", ["allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"]
)
async def test_a_store_that_may_evict_is_refused(server: Server, policy: str) -> None:
    """Also with a policy for keys that expire, since all of ours do."""
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    try:
        said = await refused(server.url)
    finally:
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert f"maxmemory-policy {policy}" in said
    assert "set maxmemory-policy noeviction" in said


@pytest.mark.parametrize(("version", "right"), [("6.0", False), ("5.9", False), ("6.2", True)])
async def test_a_version_that_is_too_old_is_refused(
    server: Server, version: str, right: bool
) -> None:
    proxy = Proxy(str(server.socket))
    await proxy.open()
    found = re.search(rb"redis_version:\d\.\d", server.ask("INFO", "server"))
    assert found is not None
    proxy.rewrite = (found[0], f"redis_version:{version}".encode())
    try:
        if right:
            store = Store(proxy.url, FleetConfig())
            assert await store.connect(starting=True)
            await store.close()
        else:
            said = await refused(proxy.url)
            assert f"is version {version}" in said
            assert "Redis 6.2 or any Valkey is needed" in said
    finally:
        await proxy.close()


async def test_replicas_that_may_miss_the_last_writes_are_refused_unless_that_is_wanted() -> None:
    pair = Replicated(sentinels=0)
    try:
        pair.start()
        said = await refused(pair.master.url)
        assert "set min-replicas-to-write 1" in said
        assert "fleet.allow_lost_writes = true" in said
        for settings, least in (({"allow_lost_writes": True}, "0"), ({}, "1")):
            pair.master.ask("CONFIG", "SET", "min-replicas-to-write", least)
            store = Store(pair.master.url, FleetConfig(**settings))  # type: ignore[arg-type]
            assert await store.connect(starting=True)
            await store.close()
    finally:
        pair.close()


async def test_a_namespace_of_another_format_is_refused(server: Server) -> None:
    """Also if a new epoch would start: this version can't interpret the stored data."""
    server.ask("HSET", "{gatekeeper}:epoch", "id", "x", "server", "y", "format", str(FORMAT + 1))
    said = await refused(server.url)
    assert f"have format {FORMAT + 1}" in said
    assert "fleet.namespace" in said
    assert "choose another namespace" in said
    assert b"x" in server.ask("HGET", "{gatekeeper}:epoch", "id")


async def test_unknown_fields_and_kinds_of_messages_are_ignored(
    server: Server, works: Works, caplog: pytest.LogCaptureFixture
) -> None:
    """Additional fields of messages and unknown kinds of messages are ignored."""
    ledger = await works(server.url)
    ledger.listen("a", listener := Listener())
    encoded = msgspec.msgpack.encode
    async with redis.Redis(unix_socket_path=str(server.socket), protocol=2) as client:
        for said in (
            ["new", 1, 2],
            ["b", "h", 5_000_000, "429", 0, 0, {"more": 1}],
            ["p", "h", 1, 2],
        ):
            await client.publish("{gatekeeper}:all", encoded(said))
    await until(lambda: listener.reports and listener.pauses)
    assert listener.reports == [Report("h", 5.0, "429")]
    assert not [one for one in caplog.messages if "can't be read" in one]


# --- deadlines --------------------------------------------------------------------------------


Deadline = Callable[[RedisLedger, float], None]


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Deadline:
    """Shorten the deadline of calls only while the store does not respond, since a busy machine
    might exceed it otherwise."""
    monkeypatch.setattr(store_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ledger_module, "HEARTBEAT_SECONDS", 0.1)

    def give(ledger: RedisLedger, seconds: float) -> None:
        monkeypatch.setattr(store_module, "CALL_DEADLINE", seconds)
        monkeypatch.setattr(store_of(ledger), "connect_deadline", seconds)

    return give


async def test_a_server_that_never_answers_blocks_nobody(
    started: Started, works: Works, deadline: Deadline
) -> None:
    server = started()
    ledger = await works(server.url)
    deadline(ledger, 0.4)
    server.stop()
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(LedgerLost):
                await take(ledger, "a:9", "x")
            await until(lambda: not ledger.hearing)  # the other connection as well
            begun = wall.monotonic()
            await asyncio.gather(
                *(take(ledger, f"a:{n}", "x") for n in range(50)), return_exceptions=True
            )
            # All of them wait for one flight; one after the other would take 20 s.
            assert wall.monotonic() - begun < 10.0
            newcomer = RedisLedger(server.url, config=FleetConfig(hold=1.0))
            await newcomer.open()
            assert newcomer.state == "lost"
            await newcomer.close()
    finally:
        server.go_on()
    deadline(ledger, PATIENCE)
    await until(lambda: ledger.hearing and ledger.state == "connected")


async def gather_one(call: Coroutine[object, object, object]) -> object:
    (found,) = await asyncio.gather(call, return_exceptions=True)
    return found


@pytest.mark.parametrize("how", ["drop", "swallow replies", "half-close"])
async def test_a_connection_that_breaks_in_any_way_is_noticed(
    started: Started, works: Works, deadline: Deadline, how: str
) -> None:
    server = started()
    proxy = Proxy(str(server.socket))
    await proxy.open()
    try:
        ledger = await works(proxy.url)
        epochs = ledger.stats().epochs
        deadline(ledger, 0.2)
        proxy.how = how  # type: ignore[assignment]
        async with asyncio.timeout(PATIENCE):
            if how == "half-close":  # the store still answers what it has received
                await asyncio.gather(
                    *(take(ledger, f"a:{n}", "x") for n in (4, 5)), return_exceptions=True
                )
            found = [await gather_one(take(ledger, f"a:{n}", f"y{n}")) for n in range(6, 10)]
            assert any(isinstance(one, LedgerLost) for one in found)
            proxy.how = "pass"
            deadline(ledger, PATIENCE)
            await until(lambda: ledger.hearing and ledger.state == "connected")
        assert await granted(ledger, "a:20", "z")
        assert not await granted(ledger, "a:21", "h")
        assert ledger.stats().epochs == epochs
        await ledger.close()
    finally:
        proxy.cut()
        await proxy.close()


async def test_closing_does_not_wait_for_a_store_that_is_away(
    started: Started, works: Works, deadline: Deadline
) -> None:
    server = started()
    ledger = await works(server.url)
    deadline(ledger, 0.4)
    server.stop()
    try:
        async with asyncio.timeout(PATIENCE):
            await ledger.close()
    finally:
        server.go_on()


FOREIGN = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n<html>",
    "ssh": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "no length of a list": b"*abc\r\n",
    "no length of a text": b"$zz\r\n",
    "too deep": b"*1\r\n" * 5_000,
    "a line without an end": b"+" + b"a" * 200_000,
}
MISFITS = FOREIGN | {
    "numbers": b":5\r\n" * 3,
    "texts": b"$5\r\nhello\r\n",
    "lists": b"*2\r\n:1\r\n:2\r\n",
    "nothing": b"$-1\r\n",
    "OK": b"+OK\r\n",
}


class Speaker:
    """A server that answers whatever it receives with the same octets."""

    def __init__(self, answer: bytes, *, endless: bool = False) -> None:
        self.answer = answer
        self.endless = endless
        self.sent = 0
        self.port = 0

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                writer.write(self.answer)
                await writer.drain()
                while self.endless:
                    writer.write(b"x" * 65_536)
                    await writer.drain()
                    self.sent += 65_536
        writer.close()


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
@pytest.mark.parametrize("what", FOREIGN)
async def test_a_url_of_another_service_is_refused_in_one_line(what: str, scheme: str) -> None:
    speaker = Speaker(FOREIGN[what])
    async with await speaker.open():
        ledger = RedisLedger(
            f"{scheme}://:secret@127.0.0.1:{speaker.port}" + ("/name/0" if "+" in scheme else "/0")
        )
        with pytest.raises(ConfigError, match=r"^fleet\.url: redis.*: name a Valkey or R") as told:
            await ledger.open()
    assert "\n" not in str(told.value)
    assert "secret" not in str(told.value)
    assert len(str(told.value)) < 400


@pytest.mark.parametrize(
    "denial",
    [
        b"-NOPERM this user has no permissions to access one of the keys\r\n",  # Redis 6 and 7
        b"-NOPERM No permissions to access a key\r\n",  # Redis 8
        b"-NOAUTH Authentication required.\r\n",
    ],
)
async def test_a_denial_is_refused_with_the_remedy_however_it_is_worded(
    server: Server, denial: bytes
) -> None:
    proxy = Proxy(str(server.socket))
    await proxy.open()
    try:
        store = Store(proxy.url, FleetConfig())
        await store.connect(starting=True)
        proxy.answer = denial
        with pytest.raises(ConfigError, match=r"add a user .* docs/fleet\.md lists"):
            await store.run("PING")
        await store.close()
    finally:
        await proxy.close()


@pytest.mark.parametrize("what", MISFITS)
async def test_a_store_that_answers_nonsense_is_lost_with_one_log_line(
    server: Server, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(ledger_module, "LOST_AFTER", 0.05)
    monkeypatch.setattr(store_module, "FIRST_PAUSE", 0.001)  # it doubles
    proxy = Proxy(str(server.socket))
    await proxy.open()
    try:
        async with RedisLedger(proxy.url) as ledger:
            assert ledger.state != "lost"
            caplog.clear()
            proxy.answer = MISFITS[what]
            with monkeypatch.context() as meanwhile:  # some answers are read as incomplete
                meanwhile.setattr(store_module, "CALL_DEADLINE", 0.1)
                meanwhile.setattr(store_of(ledger), "connect_deadline", 0.1)
                await until(lambda: ledger.state == "lost" and proxy.connections >= 12)
            proxy.answer = b""
            lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
            assert [one.getMessage() for one in lines if "can't be reached" not in one.msg] == []
            assert len(lines) == 1
            assert lines[0].exc_info is None
            await until(lambda: ledger.state != "lost")
    finally:
        await proxy.close()


@pytest.mark.parametrize("start", [b"$2000000000\r\n", b"*1\r\n$2000000000\r\n"])
async def test_a_reply_that_is_too_large_is_not_read(start: bytes) -> None:
    speaker = Speaker(start, endless=True)
    async with await speaker.open():
        with pytest.raises(LedgerLost, match="more than 16777216 octets"):
            await Store(f"redis://127.0.0.1:{speaker.port}/0", FleetConfig()).connect()
    assert speaker.sent < 32 * 1024 * 1024


async def test_a_reply_of_too_many_elements_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_REPLY", 1 << 17)
    elements = b"*2100\r\n" + b"*0\r\n" * 2_100
    speaker = Speaker(elements)
    async with await speaker.open():
        with pytest.raises(LedgerLost, match="more than 131072 octets"):
            await Store(f"redis://127.0.0.1:{speaker.port}/0", FleetConfig()).connect()


@pytest.mark.parametrize("secret", ["", ":secret@"])
async def test_a_store_at_its_maxclients_is_named_in_the_error(
    started: Started, secret: str
) -> None:
    server = started("--maxclients", "1", *(("--requirepass", "secret") if secret else ()))
    with socket.socket(socket.AF_UNIX) as held:
        held.connect(str(server.socket))
        store = Store(f"unix://{secret}{server.socket}", FleetConfig())
        for _ in range(3):
            with pytest.raises(LedgerLost, match="at its maxclients the server closes"):
                await store.connect()
        await store.close()


def test_errors_with_one_remedy_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each command that the rights of a user lack has an error message of its own."""
    logged: set[str] = set()
    for name in ("a heartbeat", "receiving notifications"):
        attempts = StoreAttempts(name, "one", logged)
        for command in ("ping", "subscribe"):
            denied = f"this user has no permissions to run the '{command}' command"
            attempts.failed(ConfigError(f"fleet.url: redis://a.test/0: {denied}: add a user"))
    attempts.failed(ConfigError("fleet.url: the maxmemory-policy: set maxmemory-policy noeviction"))
    assert len(caplog.records) == 2


async def test_a_password_that_no_user_has_is_refused_with_the_remedy(server: Server) -> None:
    ledger = RedisLedger(f"unix://:secret@{server.socket}")
    with pytest.raises(ConfigError, match="remove the password") as told:
        await ledger.open()
    assert "secret" not in str(told.value)


async def test_a_member_that_is_refused_asks_less_and_less(started: Started) -> None:
    """Its password has changed. After 20 s it has tried a dozen times, and then every 10 s."""
    server = started("--requirepass", "another")
    store = Store(f"unix://:secret@{server.socket}", FleetConfig())
    with pytest.raises(StoreRefuses) as refused:
        await store.connect()
    pauses: dict[str, list[float]] = {}
    for member in ("one", "other"):
        attempts = StoreAttempts("a heartbeat", member, set())
        pauses[member] = []
        for _ in range(40):
            attempts.failed(refused.value)
            pauses[member].append(attempts.pause())
        assert sum(pauses[member][:14]) > 20.0
        assert all(7.5 <= one <= 12.5 for one in pauses[member][12:])
        attempts.succeeded()
        assert attempts.pause() < 0.5
        for _ in range(40):
            attempts.failed(LedgerLost("away"))
        assert attempts.pause() <= 1.25  # when it is back that should be noticed soon
    assert pauses["one"] != pauses["other"]
    await store.close()
