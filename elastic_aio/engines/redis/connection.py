"""A connection to one server of Redis, and what its errors mean.

This is the only module that imports the package redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.engines.link import NotDone, no_reply_reason
from elastic_aio.errors import SpecError, StoreRefused
from elastic_aio.sockets import discard_unsent, enable_keepalive
from elastic_aio.text import one_line

try:
    from redis import exceptions
    from redis.asyncio import Connection
    from redis.asyncio.connection import AbstractConnection
    from redis.exceptions import NoPermissionError as NoPermissionError
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


class RedisConnection(Connection):
    """A connection; `run_id` and `eviction`, a `maxmemory-policy`, are empty if not known."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, name: str | None, **options: Any
    ) -> None:
        """Configure it; nothing is connected yet."""
        # Without timeouts of its own: the callers have theirs.
        super().__init__(
            host=host,
            port=port,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=None,
            **_UNNAMED,
            **options,
        )
        self._context = context
        self._server_name = name
        self.run_id = b""
        self.eviction = ""
        self._unsent: list[bytes] = []
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._reading: asyncio.Task[None] | None = None

    def _connection_arguments(self) -> dict[str, Any]:
        tls = {"ssl": self._context, "server_hostname": self._server_name or self.host}
        return {"host": self.host, "port": self.port, **(tls if self._context else {})}

    async def ask(self, *command: Any) -> Any:
        """Send a command and return its reply.

        Cancellation: leaves the connection unusable.
        """
        await self.send_command(*command)
        return await self.read_response()

    def share(self) -> None:
        """Let any number of tasks call `ask_packed` at once, and nothing else be called."""
        self._reading = create_task(self._read_replies(), f"replies of {self.host}:{self.port}")

    async def ask_packed(self, command: bytes) -> Any:
        """Send a command in the form of the protocol and return its reply.

        Commands of one turn of the event loop are sent together.

        Cancellation: leaves the connection usable; the reply is dropped.
        """
        if not self.is_shared:
            raise ConnectionResetError
        self.write(command)
        reply = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        return await reply

    @property
    def is_shared(self) -> bool:
        """Whether `ask_packed` can be called."""
        is_open = self._writer is not None and not self._writer.is_closing()
        return is_open and self._reading is not None and not self._reading.done()

    def write(self, command: bytes) -> None:
        """Send a command in the form of the protocol, whose reply is one of the messages."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_unsent)
        self._unsent.append(command)

    def _send_unsent(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def _read_replies(self) -> None:
        failure: Exception = ConnectionResetError()
        try:
            while True:
                try:
                    reply = await self.next_message()
                except ResponseError as error:
                    reply = error
                if not self._replies:
                    raise exceptions.InvalidResponse
                waiting = self._replies.popleft()
                if waiting.done():
                    continue
                if isinstance(reply, ResponseError):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except (OSError, RedisError) as error:
            failure = error
        except ValueError:  # of the package, at a number that is none
            failure = exceptions.InvalidResponse()
        finally:
            self.abort()
            for waiting in self._replies:
                if not waiting.done():
                    waiting.set_exception(failure)

    async def read_server(self) -> None:
        """Keep the run id of the server, and what it does when its memory is full.

        Raises:
            NotDone: it is a replica, or has not loaded its data yet.
            StoreRefused: it cannot be used: its version is too old, or it evicts keys.
        """
        # Sections, since the whole is long; together, since a server may be far away.
        sections = (b"server", b"replication", b"persistence", b"memory")
        await self.send_packed_command(b"".join(pack(b"INFO", one) for one in sections))
        # All are read, so that the next request does not get one of them.
        replies = [await self._read_info() for _ in sections]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        check_server(self, b"\r\n".join(replies))

    async def _read_info(self) -> Any:
        try:
            return await self.read_response()
        except exceptions.ResponseError as error:
            return error

    async def next_message(self) -> Any:
        """Return the next message of a subscription, however late it comes."""
        return await self.read_response(timeout=math.inf)

    @property
    def local_address(self) -> str:
        """The address of this host."""
        return str(self._writer.get_extra_info("sockname")[0]) if self._writer else ""

    def tune(self, peer_timeout: float) -> None:
        """Make the kernel end the connection `peer_timeout` seconds after its peer's host."""
        if self._writer is not None:
            enable_keepalive(self._writer.get_extra_info("socket"), peer_timeout)

    def abort(self) -> None:
        """Close it at once; a pending request fails."""
        if self._writer is not None:
            discard_unsent(self._writer.transport)
            self._writer.transport.abort()

    async def aclose(self) -> None:
        """Close it at once; a pending request fails.

        Idempotent.
        """
        self.abort()
        if self._reading is not None:
            await cancel_and_wait([self._reading])
        with contextlib.suppress(OSError, exceptions.RedisError):
            await self.disconnect(nowait=True)


def pack(*words: bytes) -> bytes:
    """Return a command in the form of the protocol."""
    return b"*%d\r\n%b" % (len(words), pack_words(words))


def pack_words(words: Iterable[bytes]) -> bytes:
    """Return some words of a command in the form of the protocol."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def is_script_unknown(error: Exception) -> bool:
    """Return whether Redis does not know a script by its hash."""
    return isinstance(error, exceptions.NoScriptError)


def check_server(connection: RedisConnection, info: bytes) -> None:
    """Keep the run id of a server, and what it does when its memory is full.

    Raises:
        NotDone: it is a replica, or has not loaded its data yet.
        StoreRefused: it cannot be used: its version is too old, or it evicts keys.
    """
    fields = dict(_INFO.findall(info))
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
    connection.run_id, connection.eviction = fields.get(b"run_id", b""), policy


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


def judge(error: Exception) -> Exception:
    """Return the error if it says nothing about the request.

    Raises:
        NotDone: Redis has not carried it out, and may do so later.
        StoreRefused: another attempt cannot help.
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
