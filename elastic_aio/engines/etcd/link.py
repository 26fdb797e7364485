"""Requests to the members of an etcd cluster: connections, users, batches, and watches.

`EngineLink` decides which member is used, and which requests are sent again.  Reads that begin in
one turn of the event loop are one transaction, and so are writes.  Writes are fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.engines.etcd import wire
from elastic_aio.engines.etcd.http import HttpConnection
from elastic_aio.engines.link import (
    EngineAccess,
    EngineLink,
    NotAnswered,
    NotDone,
    no_reply_reason,
)
from elastic_aio.errors import StoreError, StoreRefused

_CONNECTIONS: Final = 8
"""Requests at once; further ones wait."""

_TOKENS: Final = 3
"""Tokens in a row that etcd does not accept before the user is refused."""

_BATCH_MAX: Final = 1 << 18
"""Bytes of the values of a batch; etcd's own limit of a request is 1.5 MiB."""


class _Batch:
    """Requests that begin in one turn of the event loop, and their replies to come."""

    def __init__(self, first: wire.Request) -> None:
        self.requests = [first]
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """That to the first."""
        self._replies = [self.reply]
        self._size = 0
        self._keys: set[tuple[bytes, bytes]] = set()

    def add(self, request: wire.Request) -> asyncio.Future[Any] | None:
        """Return its reply; None if there is no room."""
        # Counted only now: most batches have one request.
        if not self._keys:
            self._size, self._keys = self.requests[0].size, {self.requests[0].key}
        self._size += request.size
        if (
            len(self.requests) >= wire.MAX_OPS
            or self._size > _BATCH_MAX
            or request.key in self._keys
        ):
            return None
        self._keys.add(request.key)
        self.requests.append(request)
        self._replies.append(asyncio.get_running_loop().create_future())
        return self._replies[-1]

    def end(self, reply: wire.TxnReply | None) -> None:
        """Set the replies; None lets each request be sent by itself."""
        parts = [None] * len(self._replies) if reply is None else reply.ranges
        for future, part in zip(self._replies, parts, strict=True):
            if not future.done():
                header = reply.header if reply else None
                future.set_result(part and msgspec.structs.replace(part, header=header))


class EtcdLink(EngineLink[HttpConnection]):
    """Connections to an etcd cluster; used by any number of tasks."""

    engine = "etcd"

    def __init__(
        self, access: EngineAccess, fence: wire.EtcdFence, on_end: Callable[[StoreError], None]
    ) -> None:
        super().__init__(access, on_end)
        self.fence = fence
        self._raising = asyncio.Lock()
        # Not always the first: the nodes of a large job share the load.
        self._current = random.randrange(len(self._members))
        self._idle: list[tuple[int, HttpConnection]] = []
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._batches: dict[str, _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._token = ""
        self._refused_tokens = 0
        self._login = asyncio.Lock()

    async def request(self, request: wire.Request, deadline: float | None = None) -> Any:
        """Send a request, with others of this moment, as `repeat`; EtcdError: etcd reports it."""
        if request.operation is None or deadline is not None:
            return await self._request(request, deadline)
        batch = self._batches.get(request.path)
        reply = None if batch is None else batch.add(request)
        if reply is None:
            reply = await self._begin_batch(request)
        found = None if reply is None else await reply
        return await self._request(request) if found is None else found

    async def _begin_batch(self, request: wire.Request) -> asyncio.Future[Any] | None:
        """Return the reply of a batch that begins with a request; None without another one."""
        batch = self._batches[request.path] = _Batch(request)
        try:
            await asyncio.sleep(0)  # the others begin in this turn of the loop
        except asyncio.CancelledError:
            batch.end(None)
            raise
        finally:
            if self._batches.get(request.path) is batch:
                del self._batches[request.path]
        if len(batch.requests) == 1:
            return None
        # A task: the cancellation of one request must not end the others.
        task = create_task(self._send_batch(batch), "a batch of requests")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return batch.reply

    async def _send_batch(self, batch: _Batch) -> None:
        reply, member = None, self._current
        operations = [one.operation for one in batch.requests if one.operation]
        try:
            # Once: nothing is sent again for a task that has been cancelled.
            reply = await self._attempt(member, wire.txn([], operations))
        except (NotDone, NotAnswered) as error:
            self._fail_over(member, str(error))
        except (wire.EtcdError, StoreError):
            pass  # perhaps the error of one request only
        finally:
            batch.end(reply)

    async def aclose(self) -> None:
        await super().aclose()
        if self._sending:
            await cancel_and_wait(list(self._sending))

    async def _request(self, request: wire.Request, deadline: float | None = None) -> Any:
        reply, is_repeat = await self.repeat(
            request, is_repeatable=request.is_repeatable, deadline=deadline
        )
        return msgspec.structs.replace(reply, is_repeat=True) if is_repeat else reply

    async def changes(
        self, begin: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[wire.WatchEvent, None]:
        """Yield the changes of the places from `begin` to `end`, from a revision on, in order.

        Each range has a connection: the gateway opens the watch of the first message of a body, and
        drops what it has not read when it begins to reply.  Of further messages it read as many as
        the JSON decoder of Go had buffered, which depends on the release of Go.  Measured with etcd
        3.4, a further connection costs a descriptor at each side, 50 KB at etcd, and half a
        millisecond of CPU once; nothing while it is idle.

        Raises:
            EtcdError: etcd has no history from there (`Fault.COMPACTED`).
            StoreError: as for `request`.
        """
        attempts = 0
        while True:
            self.check()
            member, began = self._current, asyncio.get_running_loop().time()
            reason = "the connection was closed"
            try:
                stream = self._stream(member, wire.watch_body(begin, end, revision))
                async with contextlib.aclosing(stream) as watch_replies:
                    async for reply in watch_replies:
                        attempts = 0
                        if reply.created and reply.header.revision < revision - 1:
                            raise wire.EtcdError(
                                wire.Fault.COMPACTED, "etcd's history is another one"
                            )
                        for event in reply.events:
                            yield event
                            revision = event.kv.mod_revision + 1
                        if not reply.events and not reply.created:
                            revision = max(revision, reply.header.revision + 1)
            except NotDone as error:
                reason = str(error)
            except (OSError, wire.EtcdError) as error:
                reason = str(self._judge(error))
            await self._back_off(member, reason, attempts, began)
            attempts += 1

    def _connections(self) -> list[HttpConnection]:
        idle = [connection for _, connection in self._idle]
        self._idle.clear()
        return [*self._busy, *idle]

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, member: int, request: wire.Request) -> Any:
        try:
            if request.is_change:
                return await self._change(member, request)
            is_doubtful = self.fence.revision and not self.fence.is_up
            if is_doubtful and request.path in (wire.RANGE, wire.TXN):
                await self._raise_fence(member)  # a read does not overtake a change either
            return await self._send(member, request)
        except (OSError, wire.EtcdError) as error:
            raise self._judge(error) from None

    async def _change(self, member: int, request: wire.Request) -> wire.TxnReply:
        """Carry out a transaction within the fence."""
        while True:
            if not self.fence.is_up:
                await self._raise_fence(member)
            revision = self.fence.revision
            fenced = request.fenced(self.fence.key, revision)
            try:
                reply: wire.TxnReply = await self._send(member, fenced)
            except BaseException as error:  # a cancellation too: etcd may have the request
                fault = error.fault if isinstance(error, wire.EtcdError) else wire.Fault.UNKNOWN
                if fault is wire.Fault.UNKNOWN and not isinstance(error, NotDone):
                    self.fence.lower(revision)
                raise
            if not reply.is_fenced(revision):
                return reply
            # Not carried out: the fence was raised since then, or its lease has expired.
            self.fence.lower(revision)

    async def _raise_fence(self, member: int) -> None:
        """Let no change take effect any more that was sent before and has no reply."""
        async with self._raising:
            while not self.fence.is_up:
                if member != self._current:  # it has failed since then
                    raise NotDone(self._reasons.get(member, ""))
                try:
                    self.fence.on_reply(await self._send(member, self.fence.next_request()))
                except (OSError, wire.EtcdError) as error:
                    if isinstance(error, OSError) or error.fault is wire.Fault.UNKNOWN:
                        raise NotDone(str(self._judge(error))) from None
                    if error.fault is not wire.Fault.LEASE_GONE:
                        raise
                    self.fence.lease = 0  # another one is granted

    async def _send(self, member: int, request: wire.Request) -> Any:
        headers = await self._headers(member, request)  # first: a login needs a place too
        async with self._places:
            self.check()
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
        try:
            reply = wire.parse_reply(request, status, body)
        except wire.EtcdError as error:
            self._on_error(error, headers)
            raise
        self._on_received()
        if request.path != wire.AUTHENTICATE:
            self._refused_tokens = 0
        return reply

    async def _stream(self, member: int, body: bytes) -> AsyncGenerator[wire.WatchReply, None]:
        headers = await self._headers(member, None)
        connection = await self._connection(member)
        self._busy[connection] = member
        try:
            deadline = asyncio.get_running_loop().time() + self._access.attempt_timeout
            async with asyncio.timeout_at(deadline):
                status = await connection.begin(f"/v3/{wire.WATCH}", body, headers)
            text, is_open, parts = b"", False, connection.parts()
            while True:
                # One that etcd does not confirm would be silent for ever.
                async with asyncio.timeout_at(None if is_open else deadline):
                    part = await anext(parts, b"")
                if not part:
                    break
                *lines, text = (text + part).split(b"\n")
                for line in lines:
                    if status == 200 and line.strip():
                        reply = wire.parse_message(line, wire.WatchReply)
                        if reply.canceled:
                            raise wire.watch_error(reply)
                        is_open = is_open or reply.created
                        yield reply
                        self._on_received()
                        self._refused_tokens = 0
            if status != 200:
                raise wire.parse_error(status, text)
        except wire.EtcdError as error:
            self._on_error(error, headers)
            raise
        finally:
            self._busy.pop(connection, None)
            connection.abort()

    async def _connection(self, member: int) -> HttpConnection:
        """Return a connection that is not in use; NotDone: the member cannot be reached."""
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
            raise NotDone(no_reply_reason(error)) from None
        if self.error is not None:
            connection.abort()
            raise self.error
        self.local_address = connection.local_address
        return connection

    async def _headers(self, member: int, request: wire.Request | None) -> dict[str, str]:
        # Without a leader, a member would answer after many seconds, and keep watches silent.
        headers = {"Grpc-Metadata-hasleader": "true"}
        if self._access.user is None or (request is not None and request.path == wire.AUTHENTICATE):
            return headers
        async with self._login:
            if not self._token:
                body = {"name": self._access.user, "password": self._access.password or ""}
                login = wire.Request(wire.AUTHENTICATE, body, wire.AuthReply)
                try:
                    self._token = (await self._send(member, login)).token
                except OSError as error:
                    raise NotDone(no_reply_reason(error)) from None
                except wire.EtcdError as error:
                    if error.fault is not wire.Fault.NO_AUTH:
                        raise
                    return headers
        return {**headers, "Authorization": self._token}

    def _on_received(self) -> None:
        self.last_received_at = asyncio.get_running_loop().time()

    def _on_error(self, error: wire.EtcdError, headers: dict[str, str]) -> None:
        """Discard the token of a request, unless another request has replaced it since."""
        if error.fault is wire.Fault.TOKEN and headers.get("Authorization") == self._token:
            self._token = ""
            self._refused_tokens += 1

    def _judge(self, error: OSError | wire.EtcdError) -> NotDone | NotAnswered:
        """Return the meaning of an error that another attempt may help against.

        Otherwise raise StoreRefused, or EtcdError for the caller to handle.
        """
        if isinstance(error, OSError):
            return NotAnswered(no_reply_reason(error))
        match error.fault:
            case wire.Fault.NOT_DONE:
                return NotDone(str(error))
            case wire.Fault.UNKNOWN:
                return NotAnswered(str(error))
            case wire.Fault.TOKEN if self._refused_tokens < _TOKENS:
                return NotDone(str(error))
            case wire.Fault.REFUSED | wire.Fault.TOKEN:
                raise StoreRefused(str(error)) from None
        raise error
