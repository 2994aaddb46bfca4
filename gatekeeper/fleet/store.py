"""The connection to Valkey or Redis: URLs, start-up checks, scripts, messages.

Every failure is raised as LedgerLost; a setting that has to be changed raises ConfigError. Every
call has a deadline, and no text that this module produces contains a password.

Calls are pipelined on one connection: a call is sent without waiting for the responses to earlier
calls, and the store executes and answers calls in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from gatekeeper import library_internals
from gatekeeper.config import FleetConfig
from gatekeeper.errors import ConfigError, LedgerLost, needs_extra
from gatekeeper.urls import without_credentials

CALL_DEADLINE = 2.0
"""Seconds within which the store must respond."""
SENTINEL_DEADLINE = 1.0
"""Seconds within which a Sentinel must respond, before the next one is asked."""
_MAX_NODES = 8
"""Maximum number of cluster nodes that are remembered for looking up slots."""
_MIN_VERSION = (6, 2)
"""The oldest supported version of Redis."""
_OPTIONS = frozenset({"db", "client_name", "sentinel_username", "sentinel_password"})
"""Query parameters that a URL may have, besides `ssl_...`. Others could change the deadlines or the
form of responses."""
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
POLL_SECONDS, _SILENT_POLLS = 0.25, 8
"""Seconds between two looks for new channels, and the number of looks without a message after which
the connection is tested with a ping."""
FIRST_PAUSE, _QUICK_ATTEMPTS = 0.25, 4
"""Seconds between two attempts to reach the store, and after how many of them they double."""
_MAX_PAUSE, MAX_REFUSED_PAUSE = 1.0, 10.0
"""The longest pause in seconds: usually, and if the server denies access or is no store."""
MAX_REPLY = 16 * 1024 * 1024
"""Maximum size of a reply in octets. The largest are robots.txt files, compressed."""
_MAX_MESSAGE = 200
"""Maximum length of an error message, which may quote what the server sent."""
_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError),
    msgspec.MsgspecError,  # by some versions no ValueError
)
"""Errors of redis-py while it reads what is not a reply of a Valkey or Redis."""

_log = logging.getLogger(__name__)


class StoreDown(LedgerLost):
    """The store serves no member at the moment: its machine refuses connections, or it is still
    loading. (A connection that breaks or times out may affect this member alone.)"""


class StoreRefuses(LedgerLost):
    """The store denies access, or is no store. Trying again helps only after somebody acted."""


class Store:
    """A client of one server, of the master that Sentinels name, or of one slot of a cluster."""

    def __init__(
        self, url: str, config: FleetConfig, *, any_epoch: bool = False, tag: str = ""
    ) -> None:
        """`any_epoch`: calls do not depend on the store's epoch, so they may use new connections,
        and several of them. `tag`: the hash tag of the keys, for a cluster. Raises ConfigError if
        the URL can't be used or the extra `redis` is not installed."""
        with needs_extra("redis", "fleet.url"):
            import redis.asyncio  # noqa: PLC0415 - an optional extra
            import redis.crc  # noqa: PLC0415
            from redis.asyncio.retry import Retry  # noqa: PLC0415
            from redis.backoff import NoBackoff  # noqa: PLC0415
        self._redis = redis.asyncio
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError, *_UNREADABLE)
        self._loading: type[Exception] = redis.BusyLoadingError
        self.where: str = without_credentials(url)
        self.config = config
        self._parts = parts = _split_url(url, self.where)
        self._sentinel = parts.scheme.endswith("+sentinel")
        self.connect_deadline: float = CALL_DEADLINE
        # A call repeated on a new connection might reach a store with other contents.
        once = Retry(NoBackoff(), 0)
        common: dict[str, Any] = {
            "socket_timeout": CALL_DEADLINE,
            "socket_connect_timeout": CALL_DEADLINE,
            "protocol": 2,
            "retry": once,
            **library_internals.bounded_parser(MAX_REPLY),
        }
        self._sentinels: list[Any] = []
        """Clients of Sentinels, to be closed with the store."""
        self._client_options = common
        self._slot: int | None = None
        """The cluster's slot that has the keys; None if the store is not sharded."""
        self._located = True
        """Whether it is known which server of the cluster has that slot."""
        self._nodes: list[Any] = []
        """Clients of cluster servers that can look up the slot; the first is that of the URL."""
        if config.sharded:
            self._slot, self._located = redis.crc.key_slot(tag.encode()), False
            self._nodes = [self._new_client(url, parts, dict(common))]
        self._connecting = self._any_epoch = any_epoch
        self._create_clients(parts)
        self._starting = False
        self._connection: _StoreConnection | None = None
        """The connection for which `identity` was determined."""
        self.identity: str = ""
        """What the store's contents are known by: different after a restart and a promotion."""

    def _create_clients(self, parts: SplitResult) -> None:
        """Create the clients for calls and for messages."""
        self._current, url, common = parts, parts.geturl(), self._client_options
        calls = {**common, "redis_connect_func": self._on_connect}
        if not self._any_epoch:  # `_deadline` has a timeout; redis-py's may swallow a cancellation
            calls["socket_timeout"] = None
        self._client = self._new_client(url, parts, calls)
        self._messages = self._new_client(url, parts, {**common, "socket_timeout": None})

    async def _locate_slot(self) -> None:
        """Switch to the cluster server that has the slot of the keys. Raises LedgerLost."""
        if self._located or self._slot is None:
            return
        why = "no server of the cluster answers"
        for node in list(self._nodes):
            try:
                async with asyncio.timeout(CALL_DEADLINE):
                    found = await node.execute_command("CLUSTER", "SLOTS")
            except self._redis.ResponseError:
                self._located = True  # not a cluster: the server has all slots
                return
            except self._errors as error:
                why = _message(error)
                continue
            for first, last, master, *_ in found:
                if first <= self._slot <= last:
                    await self._switch_to(master)
                    return
            why = "some slots of the cluster have no server"
        raise LedgerLost(f"{self.where}: {why}")

    async def _switch_to(self, master: list[Any]) -> None:
        host, port = master[0], master[1]
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        name = name or self._parts.hostname or "127.0.0.1"
        before, _, _ = self._parts.netloc.rpartition("@")
        place = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        parts = self._parts._replace(netloc=f"{before}@{place}" if before else place)
        self._located = True
        if parts == self._current:
            return
        await self.hang_up()
        old = [self._client, self._messages]
        self._create_clients(parts)
        while len(self._nodes) > _MAX_NODES:
            old.append(self._nodes.pop(1))
        self._nodes.append(self._new_client(parts.geturl(), parts, dict(self._client_options)))
        await asyncio.gather(*map(self._close, old))

    def _new_client(self, url: str, parts: SplitResult, options: dict[str, Any]) -> Any:
        try:
            if not self._sentinel:
                return self._redis.Redis.from_url(url, **options)
            return self._by_sentinel(parts, options)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"fleet.url: {self.where!r} can't be used: {error}") from error

    def _by_sentinel(self, parts: SplitResult, options: dict[str, Any]) -> Any:
        """Create a client for redis+sentinel://user:password@host:port,host:port/master/database."""
        from redis.asyncio.sentinel import Sentinel  # noqa: PLC0415

        credentials, at, hosts = parts.netloc.rpartition("@")
        asked_at = [urlsplit(f"//{one}") for one in hosts.split(",")]
        places = [(one.hostname or "", one.port or 26379) for one in asked_at]
        name, _, database = parts.path.lstrip("/").partition("/")
        if not name or not all(host for host, _ in places):
            raise ValueError("write redis+sentinel://host:port,host:port/NAME (of the master)")
        # redis-py parses the query, both for the store and for its Sentinels.
        plain = f"redis://{credentials}{at}x/{database}?{parts.query}"
        query: Any = self._redis.connection.parse_url(plain)
        del query["host"]
        if parts.scheme == "rediss+sentinel":
            query["ssl"] = True
        asked: dict[str, Any] = {
            "retry": options["retry"],
            "protocol": 2,
            "socket_timeout": SENTINEL_DEADLINE,
            "socket_connect_timeout": SENTINEL_DEADLINE,
        }
        own = dict(options)
        for key, value in query.items():
            if key.startswith(("sentinel_", "ssl")):
                asked[key.removeprefix("sentinel_")] = value
            if not key.startswith("sentinel_"):
                own[key] = value
        self.connect_deadline = CALL_DEADLINE + len(places) * SENTINEL_DEADLINE
        kind: Any = Sentinel  # redis-py does not annotate it
        sentinels = kind(places, sentinel_kwargs=asked)
        for one in sentinels.sentinels:  # `Redis` itself does not take the option
            one.connection_pool.connection_kwargs |= library_internals.bounded_parser(MAX_REPLY)
        self._sentinels += sentinels.sentinels
        return sentinels.master_for(name, **own)

    # --- connecting -------------------------------------------------------------------------

    async def _on_connect(self, connection: Any) -> None:
        await connection.on_connect()
        if not self._connecting:
            raise self._redis.ConnectionError("a new connection, whose epoch is not known yet")

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Set the deadline of a call to the right server, and convert its errors to LedgerLost."""
        await self._locate_slot()
        try:
            async with asyncio.timeout(
                self.connect_deadline if self._connecting else CALL_DEADLINE
            ):
                yield
        except self._errors as error:
            self._located = self._slot is None
            await self.hang_up()
            fatal = self._starting and (self._connecting or not _is_foreign(error))
            raise self._converted(error, fatal=fatal) from error
        except asyncio.CancelledError:
            await self.hang_up()  # its response must not be mistaken for that of the next call
            raise

    def _converted(self, error: Exception, *, fatal: bool) -> LedgerLost | ConfigError:
        """Return an error of redis-py as one of ours: LedgerLost, or ConfigError for a refusal if
        that is `fatal`."""
        refusal = _refusal(self.where, error, sharded=self._slot is not None)
        if refusal and fatal:
            return refusal
        lost = StoreDown if self._is_down(error) else StoreRefuses if refusal else LedgerLost
        return lost(f"{self.where}: {_message(error)}")

    def _is_down(self, error: BaseException | None) -> bool:
        """Return True if the error shows that the server serves no member at all. False for
        Sentinels and clusters, which may have directed us to a server that is no longer the
        master."""
        if self._sentinel or self._slot is not None:
            return False
        down = (self._loading, ConnectionRefusedError, FileNotFoundError)  # the last: no socket
        while error is not None and not isinstance(error, down):
            error = error.__cause__ or error.__context__
        return error is not None

    async def hang_up(self) -> None:
        """Close the connection. Calls that wait for a response raise LedgerLost."""
        if not self._any_epoch:
            connection, self._connection = self._connection, None
            with suppress(*self._errors):
                if connection is not None:
                    await connection.close()
                await self._client.connection_pool.disconnect(inuse_connections=True)

    async def connect(self, *, starting: bool = False) -> str:
        """Reconnect and return the identity of the store's contents. Raises ConfigError if the
        server's settings can't guarantee the fleet's promises. With `starting`, this and later
        calls also raise ConfigError if the server denies access."""
        await self.hang_up()
        self._connecting, self._starting = True, starting
        try:
            async with self._deadline():
                info = await self._client.info()
                if "redis_version" not in info:
                    raise ValueError("INFO returned no redis_version")
                pool = self._client.connection_pool
                self._connection = _StoreConnection(self._redis, pool, await pool.get_connection())
        finally:
            self._connecting = False
        role = info.get("role", "master")
        if role != "master":
            raise LedgerLost(f"{self.where} is a replica, which takes no writes")
        identity = f"{info.get('run_id', '')}:{info.get('master_replid', '')}"
        if self.identity != identity:
            await self._check(info)
        self.identity = identity
        return identity

    async def _check(self, info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0"))
        if tuple(int(one) for one in version.split(".")[:2] if one.isdigit()) < _MIN_VERSION:
            raise ConfigError(
                f"fleet.url: {self.where} is version {version}; Redis 6.2 or any Valkey is needed"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"fleet.url: {self.where} has maxmemory-policy {policy}, which may drop clocks: "
                "set maxmemory-policy noeviction"
            )
        replicated = self._sentinel or int(info.get("connected_slaves", 0)) > 0
        if replicated and not self.config.allow_lost_writes and await self._loses_writes():
            said = (
                f"fleet.url: {self.where} has replicas but min-replicas-to-write 0, so that a "
                "failover forgets grants: set min-replicas-to-write 1 and min-replicas-max-lag, or "
                "fleet.allow_lost_writes = true (docs/fleet.md says what that costs)"
            )
            if not self.identity:
                raise ConfigError(said)
            _log.warning("%s", said)  # after a failover it is too late to refuse to start

    async def _loses_writes(self) -> bool:
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                (found,) = await self._execute([("CONFIG", "GET", "min-replicas-to-write")])
            if isinstance(found, Exception):
                raise found
        except self._errors as error:
            _log.warning(
                "%s does not return its min-replicas-to-write: %s", self.where, _message(error)
            )
            return False
        return not found or int(found[1]) == 0

    # --- calls ------------------------------------------------------------------------------

    async def run(self, *command: Any, form: Any = Any) -> Any:
        """Execute one command and return its raw response. `form`: its type. Raises LedgerLost."""
        async with self._deadline():
            (found,) = await self._execute([command])
            if isinstance(found, Exception):
                raise found
            return msgspec.convert(found, form)

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[Any], form: Any = Any
    ) -> Any:
        """Execute a script and return its raw response. `form`: its type. Raises LedgerLost."""
        return (await self.scripts(text, [(list(keys), list(arguments))], form))[0]

    async def scripts(
        self, text: str, calls: Sequence[tuple[list[str], list[Any]]], form: Any = Any
    ) -> list[Any]:
        """Execute a script several times in one round trip, loading it first if the store does not
        know it. `calls`: keys and arguments of each call. `form`: the type of each response. Raises
        LedgerLost."""
        name = _sha1(text)
        asked = [("EVALSHA", name, len(keys), *keys, *arguments) for keys, arguments in calls]
        async with self._deadline():
            results = await self._execute(asked)
            errors = [one for one in results if isinstance(one, Exception)]
            if any(_message(one).startswith(("NOSCRIPT", "No matching")) for one in errors):
                # A call that was executed before the script was lost may be repeated.
                results = (await self._execute([("SCRIPT", "LOAD", text), *asked]))[1:]
                errors = [one for one in results if isinstance(one, Exception)]
            if errors:
                raise errors[0]
            return [msgspec.convert(one, form) for one in results]

    async def _execute(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands and return their responses. An error of a single command is returned in
        place of its response."""
        if self._any_epoch:
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
        """Subscribe to `channels()`, which is polled for new ones, and pass each message to
        `heard(channel, data)` until the connection breaks. `subscribed(number)` is called with the
        number of confirmed subscriptions. Raises LedgerLost, or ConfigError if the server denies
        access."""
        wanted: set[str] = set()
        confirmed = silent = 0
        try:
            async with self._messages.pubsub() as pubsub:
                while True:
                    if new := [one for one in channels() if one not in wanted]:
                        wanted.update(new)
                        async with asyncio.timeout(CALL_DEADLINE):
                            await pubsub.subscribe(*new)
                    # redis-py may reconnect here.
                    async with asyncio.timeout(CALL_DEADLINE + POLL_SECONDS):
                        message = await pubsub.get_message(timeout=POLL_SECONDS)
                    silent = silent + 1 if message is None else 0
                    if silent == _SILENT_POLLS:
                        async with asyncio.timeout(CALL_DEADLINE):
                            await pubsub.ping()
                    elif silent >= 2 * _SILENT_POLLS:
                        raise TimeoutError("the connection for notifications is silent")
                    elif message and message["type"] == "subscribe":
                        confirmed += 1
                        subscribed(confirmed)
                    elif message and message["type"] == "message":
                        heard(message["channel"].decode(), message["data"])
        except self._errors as error:
            raise self._converted(error, fatal=not _is_foreign(error)) from error

    async def close(self) -> None:
        """Close every connection."""
        clients = (self._client, self._messages, *self._nodes, *self._sentinels)
        await asyncio.gather(*(self._close(client) for client in clients))

    async def _close(self, client: Any) -> None:
        with suppress(*self._errors):
            async with asyncio.timeout(CALL_DEADLINE):
                await client.aclose()
                await client.connection_pool.disconnect(inuse_connections=True)


@cache
def _sha1(script: str) -> str:
    return hashlib.sha1(script.encode()).hexdigest()  # noqa: S324 - the name that a server gives it


class StoreAttempts:
    """The attempts of a member's loop to reach the store: what is logged, and the pauses."""

    def __init__(self, what: str, member: str, logged: set[str]) -> None:
        """`what` names an attempt, for the log. `logged`: the errors that were logged."""
        self._what = what
        self._logged = logged
        self._random = random.Random(f"{member} {what}")
        self._failures = 0
        self._longest = _MAX_PAUSE

    def succeeded(self) -> None:
        """Note that the store was reached."""
        self._failures = 0

    def failed(self, error: Exception) -> None:
        """Note a failure. What an operator or a developer has to correct is logged once."""
        self._failures += 1
        refused = isinstance(error, StoreRefuses | ConfigError)
        self._longest = MAX_REFUSED_PAUSE if refused else _MAX_PAUSE
        unexpected = not isinstance(error, LedgerLost | ConfigError)
        key = type(error).__name__ if unexpected else str(error).rpartition(": ")[2]  # the remedy
        if not isinstance(error, LedgerLost) and key not in self._logged:
            self._logged.add(key)
            said = f"{self._what} failed" if unexpected else error
            _log.error("%s", said, exc_info=error if unexpected else None)

    def pause(self) -> float:
        """Return the seconds until the next attempt: more after many failures, and not the same for
        each member."""
        doubled: float = FIRST_PAUSE * 2 ** min(20, max(0, self._failures - _QUICK_ATTEMPTS))
        return min(doubled, self._longest) * self._random.uniform(0.75, 1.25)


class Flights:
    """The flights of a ledger that are under way, and their round-trip times."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.scheduled: bool = False
        """Whether the last flight has been created but not sent yet."""
        self.unanswered: int = 0
        """Number of `RedisLedger._execute` calls that the store has not answered yet."""
        self.all_answered: asyncio.Event = asyncio.Event()
        """Set while `unanswered` is 0."""
        self.all_answered.set()
        self.shortest_trips: list[float] = [math.inf, math.inf]
        """The shortest round trip in seconds since the last heartbeat, and in the period before it.
        """

    @contextmanager
    def unanswered_call(self) -> Iterator[None]:
        """Count a call as long as it is unanswered."""
        self.unanswered += 1
        self.all_answered.clear()
        try:
            yield
        finally:
            self.unanswered -= 1
            if not self.unanswered:
                self.all_answered.set()

    def send_delay(self, seconds: float) -> float:
        """Return after how many seconds to send a request that should arrive `seconds` after the
        store sent its response: the response and the request together take at least one round trip.
        """
        trip = min(self.shortest_trips)
        return max(0.0, seconds - trip) if trip < math.inf else seconds


class _StoreConnection:
    """A connection that pipelines calls: each is sent before earlier ones are answered."""

    def __init__(self, redis: Any, pool: Any, connection: Any) -> None:
        """`connection` belongs to `pool`; `close` returns it."""
        self._redis = redis
        self._pool = pool
        self._connection = connection
        self._last_answered: asyncio.Future[None] | None = None
        """Done once all calls so far are answered."""
        self._open = True

    async def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one write and return their responses. An error of a single command is
        returned in place of its response. Raises the errors of redis-py; after one the connection
        can't be used any more."""
        connection, before = self._connection, self._last_answered
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_answered = answered
        try:
            if self._open:
                packed = connection.pack_commands(commands)
                await connection.send_packed_command(packed, check_health=False)
            if before is not None and not before.done():
                await asyncio.wait([before])
            return [await self._answer() for _ in commands]
        except Exception as error:
            if not self._open:  # another call has closed it, so its state is undefined
                raise self._redis.ConnectionError("the connection was closed") from error
            self._open = False  # later data would not be the response to the next call
            raise
        finally:
            answered.set_result(None)

    async def _answer(self) -> Any:
        if not self._open:
            raise ConnectionError("the connection broke")
        try:
            return await self._connection.read_response()
        except self._redis.ResponseError as error:
            return error

    async def close(self) -> None:
        """Disconnect. Calls that still wait for a response raise an error."""
        self._open = False
        try:
            await self._connection.disconnect()
        finally:
            await self._pool.release(self._connection)


def _split_url(url: str, where: str) -> SplitResult:
    """Split and validate a store's URL. Raises ConfigError if it would be misread."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"fleet.url: {where!r} can't be used: {error}") from error
    if problem := _problem_of(url, parts):
        raise ConfigError(f"fleet.url: {where!r} {problem}")
    return parts


def _problem_of(url: str, parts: SplitResult) -> str:
    """Return why a store's URL would be misread, and the remedy; or an empty text."""
    if parts.scheme not in _SCHEMES or "://" not in url:
        return f"must begin with one of {', '.join(f'{one}://' for one in _SCHEMES)}"
    if "@" in (parts.path if "@" in parts.netloc else url):
        return "must have /, ?, # and @ in user and password as %2F, %3F, %23, %40"
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS and not name.startswith("ssl_"):
            known = ", ".join(sorted(_OPTIONS))
            return f"has an option too many: {name!r} is not supported, only {known} and ssl_..."
    database = parts.path.removeprefix("/")
    if parts.scheme == "unix":
        return "" if parts.path else "names no socket: unix:///path/of/socket"
    if parts.scheme.endswith("+sentinel"):
        database = database.partition("/")[2]
    if database and not database.isdecimal():
        return f"must end with a database: {database!r} is not a database number"
    return ""


_ADD_CREDENTIALS = "add a user and a password to it, with the rights that docs/fleet.md lists"
_DENIED: tuple[str, ...] = ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username-password")
_DENIED += ("authentication", "no permissions", "The user executing the script can't")
_REMEDIES = dict.fromkeys(_DENIED, _ADD_CREDENTIALS) | {
    "DB index": "name a database that the server has",
    "SELECT is not allowed": "remove the database number; a cluster has only database 0",
    "without any password configured": "remove the password; this user has none",
    "'SENTINEL'": "this server is not a Sentinel: name the Sentinels, or remove +sentinel",
}
"""Remedies for errors that retrying can't fix, by a part of the server's error message."""


def _refusal(where: str, error: Exception, *, sharded: bool = False) -> ConfigError | None:
    """Return an error that says how to correct the URL, or None if the URL may be right."""
    if _is_elsewhere(error) and not sharded:
        return ConfigError(f"fleet.sharded: {where}: {_message(error)}: set it on every member")
    text = str(error).lower()  # Redis 8 writes `No permissions`, older ones `no permissions`
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words.lower() in text), None)
    if remedy is None and _is_foreign(error):
        remedy = "name a Valkey or Redis server"
    said = _message(error).rstrip(". ")
    return None if remedy is None else ConfigError(f"fleet.url: {where}: {said}: {remedy}")


def _is_foreign(error: Exception) -> bool:
    """Return True if an error shows that the server speaks another protocol."""
    return isinstance(error, _UNREADABLE) or type(error).__name__ == "InvalidResponse"


def _is_elsewhere(error: Exception) -> bool:
    """Return True if another server of a cluster has the keys."""
    return type(error).__name__ == "MovedError"


_CLOSED = ("while writing to socket", "max number of clients reached")
"""Parts of the messages of redis-py and of the server that mean a closed connection."""


def _message(error: Exception) -> str:
    """Return the message of an error, without the connections of Sentinels that it may list (and
    thus without their passwords). It does not contain arguments of commands."""
    text = str(error).partition(" : <")[0][:_MAX_MESSAGE] or type(error).__name__
    if _is_foreign(error):
        quoted = "" if isinstance(error, _UNREADABLE) else f" ({text})"
        return f"it sends what no Valkey or Redis sends{quoted}"
    if _is_elsewhere(error):
        return f"the server {text.rpartition(' ')[2]} of this cluster has the keys"
    if any(part in text for part in _CLOSED):
        return "it closed the connection: at its maxclients the server closes new connections"
    return text
