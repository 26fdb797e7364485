"""Requests to the members of an etcd cluster: connections, fail-over, users.

One member is used until it fails, then the next one.  A request that no member answers is
sent again with growing, jittered delays; what may be sent again is decided by
`Request.is_repeatable`.  After `lost_after` seconds without an answer of any member the
link is lost for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

from msgspec import Struct

from elastic_aio.errors import StoreClosed, StoreError, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store.etcd_wire import (
    AUTHENTICATE,
    WATCH,
    AuthReply,
    EtcdError,
    Fault,
    Request,
    WatchEvent,
    WatchReply,
    parse_error,
    parse_message,
    parse_reply,
    watch_body,
    watch_error,
)
from elastic_aio.store.handshake import client_context
from elastic_aio.store.http import HttpConnection

_CONNECTIONS: Final = 8
"""Requests at once; further ones wait."""

_RETRY: Final = Backoff(initial=0.05, factor=2.0, cap=1.0)
_TOKENS: Final = 3
"""Tokens in a row that etcd does not accept before the user is refused."""


class _NotSent(Exception):
    """There is no connection; the message says why."""


class EtcdAccess(Struct, frozen=True):
    """Where the members are and how to connect; the fields are described at `EtcdStore`."""

    endpoints: tuple[str, ...]
    user: str | None
    password: str | None
    tls: TlsSpec | None
    lost_after: float

    @property
    def attempt_timeout(self) -> float:
        """Seconds for one member to answer."""
        return min(3.0, max(1.0, self.lost_after / 3))


class EtcdLink:
    """Connections to an etcd cluster; used by any number of tasks."""

    def __init__(self, access: EtcdAccess, on_end: Callable[[StoreError], None]) -> None:
        """Parse the endpoints and load the certificates; nothing is connected yet.

        `on_end` is called once, when the link is lost or closed.

        Raises:
            SpecError: one of them cannot be used.
        """
        self._access = access
        self._members = [parse_host_port("endpoint", text) for text in access.endpoints]
        self._tls = client_context(access.tls)
        # Not always the first: the nodes of a large job share the load.
        self._current = random.randrange(len(self._members))
        self._reasons: dict[int, str] = {}
        self._idle: list[tuple[int, HttpConnection]] = []
        self._busy: dict[HttpConnection, int] = {}
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._token = ""
        self._refused_tokens = 0
        self._login = asyncio.Lock()
        self.error: StoreError | None = None
        self._on_end = on_end
        self.last_received_at = 0.0
        self.local_address = ""

    @property
    def endpoint(self) -> str:
        """The member that is used now."""
        return self._access.endpoints[self._current]

    def explain(self) -> str:
        """Return why each member cannot be used."""
        return ", ".join(
            f"{endpoint}: {self._reasons.get(index, 'not tried')}"
            for index, endpoint in enumerate(self._access.endpoints)
        )

    async def request(self, request: Request, deadline: float | None = None) -> Any:
        """Send a request until it is answered, until `deadline` (of the loop) if given.

        Raises:
            EtcdError: etcd reports an error that the caller handles.
            StoreRefused: etcd refuses the request.
            StoreLost: the link is lost, or the request must not be sent again.
            StoreTimeout: no member has answered until `deadline`.
        """
        loop = asyncio.get_running_loop()
        began, is_repeat = loop.time(), False
        attempt = 0
        while True:
            self.check()
            member = self._current
            try:
                return await self._send(member, request, is_repeat=is_repeat)
            except _NotSent as error:
                reason, is_sent = str(error), False
            except (OSError, EtcdError) as error:
                reason, is_sent = self._judge(error)
            self.check()
            is_repeat = is_repeat or is_sent
            if is_sent and not request.is_repeatable:
                self._fail_over(member, reason)
                raise StoreLost(f"{reason}; the change may have been made or not")
            await self._back_off(member, reason, attempt, began, deadline)
            attempt += 1

    async def changes(
        self, ranges: Sequence[tuple[bytes, bytes]], revision: int
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the changes of ranges of places from `revision` on, in order.

        Raises:
            EtcdError: etcd has no history from there (`Fault.COMPACTED`); of several ranges,
                the watch cannot be continued at another member.
            StoreError: as for `request`.
        """
        attempt = 0
        while True:
            self.check()
            member, began = self._current, asyncio.get_running_loop().time()
            try:
                stream = self._stream(member, watch_body(list(ranges), revision))
                async with contextlib.aclosing(stream) as watch_replies:
                    async for reply in watch_replies:
                        _check_watch(reply, revision)
                        attempt = 0
                        for event in reply.events:
                            yield event
                            revision = event.kv.mod_revision + 1
                        if not reply.events and not reply.created:
                            revision = max(revision, reply.header.revision + 1)
                reason = "the connection was closed"
            except _NotSent as error:
                reason = str(error)
            except (OSError, EtcdError) as error:
                reason, _ = self._judge(error)
            await self._back_off(member, reason, attempt, began, None)
            attempt += 1
            if len(ranges) > 1:
                raise EtcdError(Fault.COMPACTED, reason)

    def check(self) -> None:
        """Raise the error of a link that is lost or closed."""
        if self.error is not None:
            raise self.error

    def fail(self, error: StoreError) -> None:
        """End the link: every request raises `error` from now on."""
        if self.error is None:
            self.error = error
            for connection in self._busy:
                connection.abort()
            self._on_end(error)

    async def aclose(self) -> None:
        """Close all connections.

        Idempotent.
        """
        self.fail(StoreClosed("the store was closed"))
        connections = [*self._busy, *(connection for _, connection in self._idle)]
        self._idle.clear()
        await asyncio.gather(*(connection.aclose() for connection in connections))

    # ------------------------------------------------------------------ one attempt

    async def _send(self, member: int, request: Request, *, is_repeat: bool) -> Any:
        async with self._places:
            self.check()
            headers = await self._headers(member, request)
            connection = await self._connection(member)
            self._busy[connection] = member
            try:
                async with asyncio.timeout(self._access.attempt_timeout):
                    path = f"/v3/{request.path}"
                    status, body = await connection.post(path, request.encode(), headers)
            except BaseException:  # a cancellation too: the reply is not read
                connection.abort()
                raise
            finally:
                del self._busy[connection]
            if connection.is_reusable and self.error is None:
                self._idle.append((member, connection))
            else:
                connection.abort()
        reply = parse_reply(request, status, body, is_repeat=is_repeat)
        self._on_received()
        return reply

    async def _stream(self, member: int, body: bytes) -> AsyncGenerator[WatchReply, None]:
        headers = await self._headers(member, None)
        connection = await self._connection(member)
        self._busy[connection] = member
        try:
            async with asyncio.timeout(self._access.attempt_timeout):
                status = await connection.begin(f"/v3/{WATCH}", body, headers)
            text = b""
            async for part in connection.parts():
                *lines, text = (text + part).split(b"\n")
                for line in lines:
                    if status == 200 and line.strip():
                        yield parse_message(line, WatchReply)
                        self._on_received()
            if status != 200:
                raise parse_error(status, text)
        finally:
            self._busy.pop(connection, None)
            connection.abort()

    async def _connection(self, member: int) -> HttpConnection:
        """Return a connection that is not in use.

        Raises:
            _NotSent: the member cannot be reached.
        """
        while self._idle:
            owner, connection = self._idle.pop()
            if owner == member and connection.is_reusable:
                return connection
            connection.abort()
        host, port = self._members[member]
        name = self._access.tls.server_name if self._access.tls else None
        try:
            async with asyncio.timeout(self._access.attempt_timeout):
                connection = await HttpConnection.open(
                    host,
                    port,
                    tls=self._tls.current() if self._tls else None,
                    server_name=name or host.partition("%")[0],
                    peer_timeout=self._access.lost_after,
                )
        except OSError as error:
            raise _NotSent(_reason(error)) from None
        if self.error is not None:
            connection.abort()
            raise self.error
        self.local_address = connection.local_address
        return connection

    async def _headers(self, member: int, request: Request | None) -> dict[str, str]:
        # Without a leader, a member would answer after many seconds, and keep watches silent.
        headers = {"Grpc-Metadata-hasleader": "true"}
        if self._access.user is None or (request is not None and request.path == AUTHENTICATE):
            return headers
        async with self._login:
            if not self._token:
                body = {"name": self._access.user, "password": self._access.password or ""}
                login = Request(AUTHENTICATE, body, AuthReply)
                try:
                    self._token = (await self._send(member, login, is_repeat=False)).token
                except EtcdError as error:
                    if error.fault is not Fault.NO_AUTH:
                        raise
                    return headers
        return {**headers, "Authorization": self._token}

    def _on_received(self) -> None:
        self.last_received_at = asyncio.get_running_loop().time()
        self._refused_tokens = 0

    # ------------------------------------------------------------------ after a failure

    def _judge(self, error: OSError | EtcdError) -> tuple[str, bool]:
        """Return the reason, and whether etcd may have carried out the request.

        Raises:
            StoreRefused: another attempt cannot help.
            EtcdError: the caller handles it.
        """
        if isinstance(error, OSError):
            return _reason(error), True
        match error.fault:
            case Fault.NOT_DONE:
                return str(error), False
            case Fault.UNKNOWN:
                return str(error), True
            case Fault.TOKEN if self._refused_tokens < _TOKENS:
                self._token = ""
                self._refused_tokens += 1
                return str(error), False
            case Fault.REFUSED | Fault.TOKEN:
                raise StoreRefused(str(error)) from None
        raise error

    def _fail_over(self, member: int, reason: str) -> None:
        """Use the next member, and end all that still waits for this one."""
        self._reasons[member] = reason
        if self._current == member:
            self._current = (member + 1) % len(self._members)
            for connection, other in list(self._busy.items()):
                if other == member:
                    connection.abort()

    async def _back_off(
        self, member: int, reason: str, attempt: int, began: float, deadline: float | None
    ) -> None:
        """Wait before the next attempt.

        Raises:
            StoreLost: no member has answered for too long.
            StoreTimeout: the deadline would pass.
        """
        if self.error is not None:
            raise self.error
        self._fail_over(member, reason)
        # The other members are tried at once.
        turn = attempt // len(self._members)
        is_last = (attempt + 1) % len(self._members) == 0
        delay = _RETRY.delay(turn, random.random) if is_last else 0.0
        now = asyncio.get_running_loop().time()
        if deadline is not None:
            if now + delay >= deadline:
                raise StoreTimeout(self.explain())
        elif now >= max(began, self.last_received_at) + self._access.lost_after:
            self.fail(StoreLost(f"etcd does not answer: {self.explain()}"))
            raise self.error or AssertionError
        # A poll: there is no notification of a server that begins to listen.
        await asyncio.sleep(delay)


def _check_watch(reply: WatchReply, revision: int) -> None:
    """Raise `EtcdError` if a watch from `revision` on has ended."""
    if reply.canceled:
        raise watch_error(reply)
    if reply.created and reply.header.revision < revision - 1:
        raise EtcdError(Fault.COMPACTED, "etcd's history is another one")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        from elastic_aio.store.tls import tls_reason

        return f"TLS: {tls_reason(error)}"
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error) or type(error).__name__
