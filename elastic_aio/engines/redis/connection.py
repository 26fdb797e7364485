"""A connection to one server of Redis, and the meaning of its errors.

This is the only module that imports the package redis, and only its public names.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.engines.link import NotDone, no_reply_reason
from elastic_aio.errors import SpecError, StoreRefused
from elastic_aio.sockets import keepalive_options
from elastic_aio.text import one_line

try:
    from redis import exceptions
    from redis.asyncio import Connection, SSLConnection
    from redis.asyncio.connection import AbstractConnection
    from redis.exceptions import NoPermissionError as NoPermissionError
    from redis.exceptions import NoScriptError as NoScriptError
    from redis.exceptions import RedisError as RedisError
    from redis.exceptions import ResponseError as ResponseError
except ImportError:
    problem = "needs the package redis: pip install 'elastic_aio[redis]'"
    raise SpecError("rendezvous.backend", "redis", problem) from None

# By default the package looks up its own version for every connection (4 ms), and sends it.
_UNNAMED: Final[dict[str, Any]] = dict.fromkeys(
    ["driver_info"]
    if "driver_info" in inspect.signature(AbstractConnection).parameters
    else ["lib_name", "lib_version"]
)

_CLOSE_TIMEOUT: Final = 1.0
_REASON_MAX: Final = 300
_VERSION_MIN: Final = 5
_INFO: Final = re.compile(
    rb"^(loading|role|redis_version|run_id|maxmemory|maxmemory_policy):(.*?)\r?$", re.MULTILINE
)

_NOT_DONE: Final = (
    ("READONLY", "a read-only replica"),
    ("LOADING", "Redis is loading its data"),
    ("MASTERDOWN", "a replica without its master"),
    ("CLUSTERDOWN", "the Redis Cluster is down"),
    ("TRYAGAIN", "the keys are being moved in the Redis Cluster"),
    ("BUSY ", "Redis is busy with another script"),
    ("NOREPLICAS", "Redis has too few replicas for a write (min-replicas-to-write)"),
)
"""Codes of errors of a request that has not been carried out, and may be later."""

_REFUSED: Final = (
    ("NOAUTH", "Redis asks for a user and a password"),
    ("WRONGPASS", "Redis does not accept the user or the password"),
    ("NOPERM", "the Redis user has no permission for the keys, channels or commands"),
    ("OOM", "the memory of Redis is full (maxmemory)"),
    ("MISCONF", "Redis cannot save its data and refuses changes"),
    ("MOVED", "the keys are at another server of the Redis Cluster"),
    ("CROSSSLOT", "the server is a proxy or Redis Cluster that splits the keys"),
)

_CODES: Final = (
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.NoPermissionError, "NOPERM"),
)
"""Exceptions of the package, whose texts lack the code."""


class RedisConnection:
    """A connection, which any number of tasks use at once.

    `number` counts the connections of a client, 0 if it has none.  `run_id` and `eviction`, a
    `maxmemory-policy`, are empty if not known.  `local_address` is this host's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        server_name: str | None,
        peer_timeout: float,
        user: dict[str, Any],
    ) -> None:
        """Configure it; the kernel ends it `peer_timeout` seconds after its peer's host."""
        self.number = 0
        self.run_id = b""
        self.eviction = ""
        self.local_address = ""
        self._address = host, port
        self._is_open = False
        self._unsent: list[bytes] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._on_message: Callable[[Any], None] | None = None
        self._reading: asyncio.Task[None] | None = None
        make = Connection if tls is None else SSLConnection
        self._redis = make(
            host=host,
            port=port,
            protocol=2,
            # Without timeouts of its own: the callers have theirs.
            socket_timeout=None,
            socket_connect_timeout=None,
            socket_keepalive=True,
            socket_keepalive_options=keepalive_options(peer_timeout),
            **_UNNAMED,
            **user,
        )
        if tls is not None:
            assert isinstance(self._redis, SSLConnection)
            # Its own would trust the authorities of the host as well.
            self._redis.ssl_context.context = _named(tls, server_name)

    async def open(self) -> None:
        """Connect, or raise OSError or RedisError.  Cancellation: leaves nothing open."""
        try:
            await self._redis.connect()  # type: ignore[no-untyped-call]
            self.local_address = await self._find_local_address()
        except BaseException:  # a cancellation too: it has no other owner
            await self._redis.disconnect(nowait=True)
            raise
        host, port = self._address
        self._is_open = True
        self._reading = create_task(self._read(), f"replies of {host}:{port}")

    @property
    def is_open(self) -> bool:
        """Whether `ask` can be called."""
        return self._is_open

    async def ask(self, command: bytes) -> Any:
        """Send a command in the form of the protocol and return its reply.

        Cancellation: leaves the connection usable; the reply is dropped.
        """
        if not self._is_open:
            raise ConnectionResetError
        self.send(command)
        reply = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        return await reply

    def send(self, command: bytes) -> None:
        """Send a command, together with the others of this turn of the event loop."""
        if not self._unsent:
            sending = create_task(self._send_unsent())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        self._unsent.append(command)

    async def _send_unsent(self) -> None:
        commands, self._unsent = self._unsent, []
        if not self._is_open:  # the package would connect again
            return
        try:
            await self._redis.send_packed_command(commands, check_health=False)
        except (OSError, RedisError, RuntimeError):  # the last: uvloop, of one that has ended
            self.abort()

    async def listen(self, on_message: Callable[[Any], None]) -> None:
        """Pass each message of a subscription on, until the connection ends; then raise why."""
        assert self._reading is not None
        self._on_message = on_message
        ended = asyncio.get_running_loop().create_future()
        self._replies.append(ended)
        await ended

    async def _read(self) -> None:
        try:
            while True:
                try:
                    reply = await self._redis.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    reply = error
                self._on_reply(reply)
        except (OSError, RedisError) as error:
            self._end(error)
        except ValueError:  # of the package, at a number that is none
            self._end(exceptions.InvalidResponse())
        finally:
            await self._disconnect()

    def _end(self, failure: Exception) -> None:
        self._is_open = False
        for waiting in self._replies:
            if not waiting.done():
                waiting.set_exception(failure)

    async def _disconnect(self) -> None:
        with contextlib.suppress(OSError, RedisError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._redis.disconnect()

    def _on_reply(self, reply: Any) -> None:
        if self._on_message is not None:
            self._on_message(reply)
            return
        if not self._replies:
            raise exceptions.InvalidResponse
        waiting = self._replies.popleft()
        if waiting.done():
            return
        if isinstance(reply, ResponseError):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    async def read_server(self) -> None:
        """Keep the facts of INFO about the server, or raise as `check_server`."""
        # Sections, since the whole is long.
        sections = (b"server", b"replication", b"persistence", b"memory")
        asked: list[Any] = await asyncio.gather(
            *(self.ask(pack(b"INFO", section)) for section in sections), return_exceptions=True
        )
        for failure in asked:
            if isinstance(failure, BaseException):
                raise failure
        fields = dict(_INFO.findall(b"\r\n".join(asked)))
        policy = check_server(fields)
        self.run_id, self.eviction = fields.get(b"run_id", b""), policy

    async def _find_local_address(self) -> str:
        """Return the address of this host on the way to the server, or raise OSError.

        The package does not show its sockets.  Connecting a datagram socket sends no packet.
        """
        host, port = self._address
        try:
            kind = socket.SOCK_DGRAM
            found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind)
        failure: OSError | None = None
        for family, *_, address in found:
            try:
                with socket.socket(family, kind) as sock:
                    sock.connect(address)
                    return str(sock.getsockname()[0])
            except OSError as error:
                failure = error
        raise failure or OSError(f"no address for host {host!r}")

    def abort(self) -> None:
        self._end(ConnectionResetError())
        if self._reading is not None:
            self._reading.cancel()

    async def aclose(self) -> None:
        """Close it, and wait until that is done; a second at most."""
        self.abort()
        await cancel_and_wait([*self._sending, *([self._reading] if self._reading else [])])
        await self._disconnect()  # a task that has not begun has not done it


def _named(context: ssl.SSLContext, name: str | None) -> ssl.SSLContext:
    """Let a context ask for the certificate of `name`, which the package has no setting for."""
    if name is not None:

        def wrap_bio(incoming: Any, outgoing: Any, server_side: bool = False, **_: Any) -> Any:
            return ssl.SSLContext.wrap_bio(
                context, incoming, outgoing, server_side, server_hostname=name
            )

        context.wrap_bio = wrap_bio  # type: ignore[method-assign, assignment]
    return context


def pack(*words: bytes) -> bytes:
    """Return a command in the form of the protocol."""
    return b"*%d\r\n%b" % (len(words), pack_words(words))


def pack_words(words: Iterable[bytes]) -> bytes:
    """Return some words of a command in the form of the protocol."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def check_server(fields: dict[bytes, bytes]) -> str:
    """Check a server by the fields of INFO; return its eviction policy.

    NotDone: it is a replica, or has not loaded its data yet.  StoreRefused: its version is too old,
    or it evicts keys.
    """
    if fields.get(b"loading") == b"1":
        raise NotDone("Redis is loading its data")
    if fields.get(b"role") == b"slave":
        raise NotDone("a read-only replica")
    version = fields.get(b"redis_version", b"0").decode()
    if int(version.partition(".")[0]) < _VERSION_MIN:
        raise StoreRefused(f"Redis {version}: {_VERSION_MIN} or later is needed")
    policy = fields.get(b"maxmemory_policy", b"").decode()
    if policy not in ("", "noeviction") and int(fields.get(b"maxmemory", b"0")):
        # The eviction of one key of a store alone would be noticed by no client.
        raise StoreRefused(f"store: Redis must not evict keys: noeviction is needed (got {policy})")
    return policy


def judge(error: Exception) -> Exception:
    """Return the error if it says nothing about the request.

    NotDone: Redis has not carried it out, and may do so later.  StoreRefused: it never will.
    """
    text = str(error)
    if isinstance(error, exceptions.AuthenticationError):
        code = "NOAUTH" if "required" in text else "WRONGPASS"
    else:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "")
    # A script's error may have the code of its command in the middle.
    text = f"{code} {text}"
    for part, reason in _NOT_DONE:
        if part in text:
            raise NotDone(reason)
    for part, reason in _REFUSED:
        if part in text:
            raise StoreRefused(reason)
    if isinstance(error, exceptions.ResponseError):
        raise StoreRefused(one_line(f"Redis: {error}", _REASON_MAX))
    return error


def reason_of_redis(error: Exception, *, is_plain: bool = False) -> str:
    """Return why there is no reply; `is_plain` is true for a first request without TLS."""
    # The package raises an error of its own for one of the system.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        error = cause
    if isinstance(error, exceptions.TimeoutError):
        return "does not answer"
    if isinstance(error, OSError) and not isinstance(error, ConnectionResetError):
        return no_reply_reason(error)  # before ValueError, which an error of a certificate is too
    if isinstance(error, exceptions.InvalidResponse | ValueError):
        return "it does not speak the protocol of Redis"
    hint = " without a reply (perhaps it asks for TLS)" if is_plain else ""
    return f"the connection was closed{hint}"
