"""The connection to Valkey or Redis: URLs, start-up checks, scripts, messages.

Whatever goes wrong on the way is a LedgerLost; a setting that has to be changed is a ConfigError.
No call goes without a deadline, and no text that leaves here holds a password.

Calls that are made while others are under way are sent behind them on the same connection, and
answered in turn: none waits for the answer of another, and the store serves them in their order.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError, LedgerLost
from gatekeeper.urls import without_credentials

CALL_DEADLINE = 2.0
"""Seconds that the store may take to answer."""
SENTINEL_DEADLINE = 1.0
"""Seconds that one Sentinel may take, before the next one is asked."""
_MOST_NODES = 8
_OLDEST = (6, 2)
_OPTIONS = frozenset({"db", "client_name", "sentinel_username", "sentinel_password"})
"""What the query of a URL may say, beside `ssl_...`: the rest would undo deadlines and answers."""
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_LOOK, _SILENT = 0.25, 8
"""Seconds after which to look for new channels, and how often nothing may come before the
connection that brings messages is tried."""

_log = logging.getLogger(__name__)


class StoreDown(LedgerLost):
    """The store itself serves nobody at this moment: its machine refuses connections, or it is
    still loading. (A connection that breaks, or is not answered, may be cut for us alone.)"""


class StoreIdentity(NamedTuple):
    """Which memory a store has: another one after a restart, and after each promotion."""

    run: str
    replication: str

    @property
    def text(self) -> str:
        """As it is written beside the epoch."""
        return f"{self.run}:{self.replication}"


class Store:
    """One server, or the master that Sentinels name."""

    def __init__(
        self, url: str, config: FleetConfig, *, any_memory: bool = False, tag: str = ""
    ) -> None:
        """`any_memory`: what is asked does not depend on whose memory the store has, so calls may
        go on a new connection, and several at once. Raises ConfigError for a URL that can't be
        used, and without the extra `redis`. `tag`: the hash tag of our keys, for a cluster."""
        try:
            import redis.asyncio  # noqa: PLC0415 - an optional extra
            import redis.crc  # noqa: PLC0415
            from redis.asyncio.retry import Retry  # noqa: PLC0415
            from redis.backoff import NoBackoff  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "fleet.url needs redis-py: pip install 'robots-gatekeeper[redis]' "
                "(in a checkout: pip install '.[redis]')"
            ) from error
        self._redis = redis.asyncio
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError, TimeoutError)
        self._loading: type[Exception] = redis.BusyLoadingError
        self.where: str = without_credentials(url)
        self.config = config
        self._url, self._parts = url, _parts(url, self.where)
        parts = self._parts
        self._sentinel = parts.scheme.endswith("+sentinel")
        self._connect_deadline = CALL_DEADLINE
        # A call that is repeated on a new connection would not know whose memory it meets.
        once = Retry(NoBackoff(), 0)
        common: dict[str, Any] = {
            "socket_timeout": CALL_DEADLINE,
            "socket_connect_timeout": CALL_DEADLINE,
            "protocol": 2,
            "retry": once,
        }
        self._closing: list[Any] = []
        """Sentinels."""
        self._common = common
        self._slot: int | None = None
        """Of a cluster: where our keys are ..."""
        self._located = True
        """... and whether it is known which server has that slot."""
        self._nodes: list[Any] = []
        """Clients of servers of the cluster that can be asked for that; the first is the URL's."""
        if config.sharded:
            self._slot, self._located = redis.crc.key_slot(tag.encode()), False
            self._nodes = [self._made(url, parts, dict(common))]
        self._connecting = self._any_memory = any_memory
        self._begin(parts)
        self._starting = False
        self._checked = ""
        """The run of the server whose settings were looked at."""
        self._hashes: dict[str, str] = {}
        self._connection: _StoreConnection | None = None
        """The connection whose memory was looked at."""
        self.identity: StoreIdentity = StoreIdentity("", "")

    def _begin(self, parts: SplitResult) -> None:
        """Make the clients for calls and for messages."""
        self._at, url, common = parts, parts.geturl(), self._common
        calls = {**common, "redis_connect_func": self._connected}
        if not self._any_memory:  # `_within` has the deadline, and redis-py's may lose a cancel
            calls["socket_timeout"] = None
        self._client = self._made(url, parts, calls)
        self._messages = self._made(url, parts, {**common, "socket_timeout": None})

    async def _locate(self) -> None:
        """Go to the server of the cluster that has our slot. Raises LedgerLost."""
        if self._located or self._slot is None:
            return
        why = "no server of the cluster answers"
        for node in list(self._nodes):
            try:
                async with asyncio.timeout(CALL_DEADLINE):
                    found = await node.execute_command("CLUSTER", "SLOTS")
            except self._redis.ResponseError:
                self._located = True  # no cluster: it has all
                return
            except self._errors as error:
                why = _said(error)
                continue
            for first, last, master, *_ in found:
                if first <= self._slot <= last:
                    await self._move(master)
                    return
            why = "nobody has some slots of the cluster"
        raise LedgerLost(f"{self.where}: {why}")

    async def _move(self, master: list[Any]) -> None:
        host, port = master[0], master[1]
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        name = name or self._parts.hostname or "127.0.0.1"
        before, _, _ = self._parts.netloc.rpartition("@")
        place = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        parts = self._parts._replace(netloc=f"{before}@{place}" if before else place)
        self._located = True
        if parts == self._at:
            return
        await self.hang_up()
        old = [self._client, self._messages]
        self._begin(parts)
        while len(self._nodes) > _MOST_NODES:
            old.append(self._nodes.pop(1))
        self._nodes.append(self._made(parts.geturl(), parts, dict(self._common)))
        for client in old:
            with suppress(*self._errors):
                await client.connection_pool.disconnect(inuse_connections=True)

    def _made(self, url: str, parts: SplitResult, options: dict[str, Any]) -> Any:
        try:
            if not self._sentinel:
                return self._redis.Redis.from_url(url, **options)
            return self._by_sentinel(parts, options)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"fleet.url: {self.where!r} can't be used: {error}") from error

    def _by_sentinel(self, parts: SplitResult, options: dict[str, Any]) -> Any:
        """redis+sentinel://user:password@host:port,host:port/name of the master/database"""
        from redis.asyncio.sentinel import Sentinel  # noqa: PLC0415

        _, _, hosts = parts.netloc.rpartition("@")
        places = [_place(one) for one in hosts.split(",")]
        name, _, database = parts.path.lstrip("/").partition("/")
        if not name or not all(host for host, _ in places):
            raise ValueError("write redis+sentinel://host:port,host:port/name of the master")
        # What the query says is read as redis-py reads it, of the store and of its Sentinels.
        query: dict[str, Any] = dict(
            self._redis.connection.parse_url(f"redis://x/{database}?{parts.query}")
        )
        secure = {key: value for key, value in query.items() if key.startswith("ssl_")}
        if parts.scheme == "rediss+sentinel":
            secure["ssl"] = True
        own = {key: value for key, value in query.items() if key in ("db", "client_name")}
        asked = {
            **{
                key: query[f"sentinel_{key}"]
                for key in ("username", "password")
                if f"sentinel_{key}" in query
            },
            **secure,
            "retry": options["retry"],
            "protocol": 2,
            "socket_timeout": SENTINEL_DEADLINE,
            "socket_connect_timeout": SENTINEL_DEADLINE,
        }
        self._connect_deadline = CALL_DEADLINE + len(places) * SENTINEL_DEADLINE
        kind: Any = Sentinel  # redis-py says no types of it
        sentinels = kind(places, sentinel_kwargs=asked)
        self._closing += sentinels.sentinels
        return sentinels.master_for(name, **{**options, **_credentials(parts), **secure, **own})

    # --- connecting -------------------------------------------------------------------------

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        if not self._connecting:
            raise self._redis.ConnectionError("a new connection: its memory was not looked at yet")

    @asynccontextmanager
    async def _within(self) -> AsyncIterator[None]:
        """A call, with its deadline; whatever it raises is a LedgerLost."""
        try:
            async with asyncio.timeout(
                self._connect_deadline if self._connecting else CALL_DEADLINE
            ):
                yield
        except self._errors as error:
            self._located = self._slot is None
            await self.hang_up()
            if self._starting and (remedy := _remedy(error)) is not None:
                said = _said(error).rstrip(". ")
                raise ConfigError(f"fleet.url: {self.where}: {said}: {remedy}") from error
            lost = StoreDown if self._serves_nobody(error) else LedgerLost
            raise lost(f"{self.where}: {_said(error)}") from error
        except asyncio.CancelledError:
            await self.hang_up()  # its answer is not to be taken for that of the next call
            raise

    def _serves_nobody(self, error: BaseException | None) -> bool:
        """Does it say so of the one server that all members use? (A Sentinel may have sent us to
        one that is no master any more, and so may what we know of a cluster.)"""
        if self._sentinel or self._slot is not None:
            return False
        down = (self._loading, ConnectionRefusedError, FileNotFoundError)  # the last: no socket
        while error is not None and not isinstance(error, down):
            error = error.__cause__ or error.__context__
        return error is not None

    async def hang_up(self) -> None:
        """Give the connection up; calls that wait for an answer get LedgerLost."""
        if not self._any_memory:
            connection, self._connection = self._connection, None
            with suppress(*self._errors):
                if connection is not None:
                    await connection.close()
                await self._client.connection_pool.disconnect(inuse_connections=True)

    async def connect(self, *, starting: bool = False) -> StoreIdentity:
        """Connect anew, and see whose memory it is. Raises ConfigError where the server's settings
        can't keep a promise; `starting`, also where it lets nobody in, now or by a later call."""
        await self.hang_up()
        await self._locate()
        self._connecting, self._starting = True, starting
        try:
            async with self._within():
                info = await self._client.info()
                pool = self._client.connection_pool
                self._connection = _StoreConnection(self._redis, pool, await pool.get_connection())
        finally:
            self._connecting = False
        role = info.get("role", "master")
        if role != "master":
            raise LedgerLost(f"{self.where} is a replica, which takes no writes")
        identity = StoreIdentity(info.get("run_id", ""), info.get("master_replid", ""))
        if self._checked != identity.run:
            await self._check(info)
            self._checked = identity.run
        self.identity = identity
        return identity

    async def _check(self, info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0"))
        if tuple(int(one) for one in version.split(".")[:2] if one.isdigit()) < _OLDEST:
            raise ConfigError(
                f"fleet.url: {self.where} is version {version}; Redis 6.2 or any Valkey is needed"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"fleet.url: {self.where} has maxmemory-policy {policy}, which drops promises: "
                "set maxmemory-policy noeviction"
            )
        replicated = self._sentinel or int(info.get("connected_slaves", 0)) > 0
        if replicated and not self.config.allow_lost_writes and await self._loses_writes():
            said = (
                f"fleet.url: {self.where} has replicas but min-replicas-to-write 0, so that a "
                "failover forgets grants: set min-replicas-to-write 1 and min-replicas-max-lag, or "
                "fleet.allow_lost_writes = true (docs/fleet.md says what that costs)"
            )
            if not self._checked:
                raise ConfigError(said)
            _log.warning("%s", said)  # after a failover it is too late to refuse

    async def _loses_writes(self) -> bool:
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                (found,) = await self._asked([("CONFIG", "GET", "min-replicas-to-write")])
            if isinstance(found, Exception):
                raise found
        except self._errors as error:
            _log.warning("%s does not say its min-replicas-to-write: %s", self.where, _said(error))
            return False
        return not found or int(found[1]) == 0

    # --- calls ------------------------------------------------------------------------------

    async def run(self, *command: Any) -> Any:
        """One command; its answer as the store gives it, not read in any way."""
        await self._locate()
        async with self._within():
            (found,) = await self._asked([command])
            if isinstance(found, Exception):
                raise found
            return found

    async def script(self, text: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run one script."""
        return (await self.scripts(text, [(list(keys), list(arguments))]))[0]

    async def scripts(self, text: str, calls: Sequence[tuple[list[str], list[Any]]]) -> list[Any]:
        """Run a script several times in one round trip; it is loaded again where it is unknown."""
        known = self._hashes.get(text)
        if known is None:
            known = self._hashes[text] = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324
        await self._locate()
        async with self._within():
            results = await self._sent(known, calls)
            unknown = [
                number
                for number, one in enumerate(results)
                if isinstance(one, Exception) and _said(one).startswith(("NOSCRIPT", "No matching"))
            ]
            if unknown:
                await self._asked([("SCRIPT", "LOAD", text)])
                again = await self._sent(known, [calls[number] for number in unknown])
                for number, one in zip(unknown, again, strict=True):
                    results[number] = one
            for one in results:
                if isinstance(one, Exception):
                    raise one
            return results

    async def _sent(self, known: str, calls: Sequence[tuple[list[str], list[Any]]]) -> list[Any]:
        asked = [("EVALSHA", known, len(keys), *keys, *arguments) for keys, arguments in calls]
        return await self._asked(asked)

    async def _asked(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers; an error that concerns one command alone in its place."""
        if self._any_memory:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute(raise_on_error=False))
        if self._connection is None:
            raise self._redis.ConnectionError("not connected")
        return await self._connection.ask(commands)

    # --- messages ---------------------------------------------------------------------------

    async def listen(
        self,
        channels: Callable[[], list[str]],
        heard: Callable[[str, bytes], None],
        subscribed: Callable[[int], None],
    ) -> None:
        """Hand on what is published until the connection breaks. Raises LedgerLost."""
        try:
            async with self._messages.pubsub() as pubsub:
                await self._listen(pubsub, channels, heard, subscribed)
        except self._errors as error:
            raise LedgerLost(f"{self.where}: {_said(error)}") from error

    async def _listen(
        self,
        pubsub: Any,
        channels: Callable[[], list[str]],
        heard: Callable[[str, bytes], None],
        subscribed: Callable[[int], None],
    ) -> None:
        wanted: set[str] = set()
        confirmed = silent = 0
        while True:
            if new := [one for one in channels() if one not in wanted]:
                wanted.update(new)
                async with asyncio.timeout(CALL_DEADLINE):
                    await pubsub.subscribe(*new)
            async with asyncio.timeout(CALL_DEADLINE + _LOOK):  # it may connect anew by itself
                message = await pubsub.get_message(timeout=_LOOK)
            if message is None:
                silent += 1
                if silent == _SILENT:
                    async with asyncio.timeout(CALL_DEADLINE):
                        await pubsub.ping()
                elif silent >= 2 * _SILENT:
                    raise TimeoutError("the connection that brings messages is silent")
                continue
            silent = 0
            if message["type"] == "subscribe":
                confirmed += 1
                subscribed(confirmed)
            elif message["type"] == "message":
                heard(message["channel"].decode(), message["data"])

    async def close(self) -> None:
        """Close every connection."""
        clients = (self._client, self._messages, *self._nodes, *self._closing)
        await asyncio.gather(*(self._close(client) for client in clients))

    async def _close(self, client: Any) -> None:
        with suppress(*self._errors):
            async with asyncio.timeout(CALL_DEADLINE):
                await client.aclose()
                await client.connection_pool.disconnect(inuse_connections=True)


class Flights:
    """Flights of a ledger that are under way, and how long they take."""

    def __init__(self) -> None:
        self.flights: set[asyncio.Task[None]] = set()
        self.boarding: bool = False
        """The last one has not left yet."""
        self.turns: int = 0
        """Calls of the script which the store has not answered yet ..."""
        self.all_answered: asyncio.Event = asyncio.Event()
        """... none of them."""
        self.all_answered.set()
        self.nearest: list[float] = [math.inf, math.inf]
        """Seconds of the shortest round trip since our last sign of life, and of the one before."""

    def turns_by(self, number: int) -> None:
        """So many more."""
        self.turns += number
        if self.turns:
            self.all_answered.clear()
        else:
            self.all_answered.set()

    def ahead(self, seconds: float) -> float:
        """In how many seconds to ask, so that the question arrives when the store said: what it
        said took its time, and so will the question, together a round trip at least."""
        nearest = min(self.nearest)
        return max(0.0, seconds - nearest) if nearest < math.inf else seconds


class _StoreConnection:
    """One connection, on which calls are sent before those before them are answered."""

    def __init__(self, redis: Any, pool: Any, connection: Any) -> None:
        """`connection` is one of the pool, which gets it back by `close`."""
        self._redis = redis
        self._pool = pool
        self._connection = connection
        self._last: asyncio.Future[None] | None = None
        """Done once the calls so far are answered."""
        self._open = True

    async def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send them in one go, behind all that was asked before; the answers, and errors that
        concern one command alone in their places. Raises what redis-py raises; nobody can be
        answered on this connection then."""
        connection, before = self._connection, self._last
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last = answered
        try:
            if self._open:
                packed = connection.pack_commands(commands)
                await connection.send_packed_command(packed, check_health=False)
            if before is not None and not before.done():
                await asyncio.wait([before])
            return [await self._answer() for _ in commands]
        except Exception as error:
            if not self._open:  # given up by another call, and in whichever state
                raise self._redis.ConnectionError("the connection was given up") from error
            self._open = False  # what comes is not the answer to the next call
            raise
        finally:
            answered.set_result(None)

    async def _answer(self) -> Any:
        if not self._open:
            raise ConnectionError("it broke")
        try:
            return await self._connection.read_response()
        except self._redis.ResponseError as error:
            return error

    async def close(self) -> None:
        """Hang up; who still waits for an answer gets an error."""
        self._open = False
        try:
            await self._connection.disconnect()
        finally:
            await self._pool.release(self._connection)


def _parts(url: str, where: str) -> SplitResult:
    """The parts of a store's URL. Raises ConfigError for one that would be misread."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or "://" not in url:
        raise ConfigError(
            f"fleet.url: {where!r} begins with none of "
            + ", ".join(f"{one}://" for one in _SCHEMES)
        )
    if "@" in (parts.path if "@" in parts.netloc else url):
        raise ConfigError(
            f"fleet.url: {where!r}: write /, ?, # and @ in user and password as %2F, %3F, %23, %40"
        )
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS and not name.startswith("ssl_"):
            raise ConfigError(
                f"fleet.url: {where!r}: the option {name!r} can't be set: what can is "
                f"{', '.join(sorted(_OPTIONS))} and ssl_..."
            )
    database = parts.path.rpartition("/")[2] if parts.scheme != "unix" else ""
    if parts.scheme.endswith("+sentinel") and parts.path.count("/") < 2:
        database = ""
    if database and not database.isdecimal():
        raise ConfigError(f"fleet.url: {where!r}: {database!r} is no number of a database")
    return parts


def _place(text: str) -> tuple[str, int]:
    """Host and port of a Sentinel."""
    parts = urlsplit(f"//{text}")
    return parts.hostname or "", parts.port or 26379


def _credentials(parts: SplitResult) -> dict[str, str]:
    found = {}
    if parts.username:
        found["username"] = unquote(parts.username)
    if parts.password:
        found["password"] = unquote(parts.password)
    return found


_RIGHTS = "name a user and a password in it, with the rights that docs/fleet.md lists"
_MISTAKES = {
    "NOAUTH": _RIGHTS,
    "WRONGPASS": _RIGHTS,
    "NOPERM": _RIGHTS,
    "invalid username-password": _RIGHTS,
    "uthentication": _RIGHTS,
    "no permissions": _RIGHTS,
    "can't run this command": _RIGHTS,
    "DB index": "name a database that the server has",
    "SELECT is not allowed": "name no database; a cluster has but one",
    "'SENTINEL'": "this is no Sentinel: name those, or write it without +sentinel",
}
"""What a server says of a URL that no waiting makes right, by a part of its words."""


def _remedy(error: Exception) -> str | None:
    """What mends the URL; None: it may be right."""
    text = str(error)
    return next((remedy for words, remedy in _MISTAKES.items() if words in text), None)


def _said(error: Exception) -> str:
    """What an error says; not the connections of Sentinels that it may list, nor arguments of a
    command, which it does not hold."""
    return str(error).partition(" : <")[0] or type(error).__name__
