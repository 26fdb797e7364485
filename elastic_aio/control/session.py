"""A connection to the control socket: a request, its answer, the end."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from msgspec import Raw

from elastic_aio.aio import EventReader, cancel_and_wait, create_task, wait_readable
from elastic_aio.control import protocol
from elastic_aio.control.sockets import describe_peer, has_event
from elastic_aio.errors import ControlError, SpecError
from elastic_aio.event_json import event_to_json
from elastic_aio.events import Event, JobFinished, SignalForwarded
from elastic_aio.outcome import SIGKILL
from elastic_aio.stacks import StackDump
from elastic_aio.status import JobStatus
from elastic_aio.text import format_value

PATIENCE: Final = 5.0
"""Seconds for a client to send its request."""
_READ_S: Final = 60.0  # for a client to read a part of its answer, unless it follows the job

Send = Callable[[protocol.Reply], Awaitable[None]]
Place = Callable[[], contextlib.AbstractContextManager[None]]
"""Takes a place among the clients that wait, or raises a ControlError."""


class ViewedJob(Protocol):
    """The part of an `Agent` that a view needs."""

    def status(self, *, usage: bool = True) -> JobStatus: ...
    def events(self, after: int = -1) -> EventReader[Event]: ...
    def make_log_files(self) -> None: ...


class ControlledJob(ViewedJob, Protocol):
    """The part of an `Agent` that a request on the control socket needs."""

    def kill(
        self,
        *,
        signal: int | str | None = None,
        reason: str = "an immediate stop was requested",
    ) -> None: ...
    def stop(
        self,
        *,
        signal: int | str | None = None,
        reason: str = "a stop was requested",
        child: str = "",
    ) -> Awaitable[None]: ...
    async def restart(
        self, reason: str = "a restart was requested", *, child: str = ""
    ) -> bool: ...
    async def reload(self, child: str = "") -> bool: ...
    async def scale(self, child: str, number: int) -> None: ...
    def preempt(
        self, *, seconds: float | None = None, reason: str = "a preemption was requested"
    ) -> bool: ...
    async def dump(self, reason: str = "a dump was requested", *, child: str = "") -> StackDump: ...
    def forward_signal(
        self, signal: int | str, *, rank: int | None = None, child: str = ""
    ) -> tuple[int, ...]: ...


async def serve(connection: socket.socket, job: ControlledJob, place: Place) -> None:
    """Read one request from a connection, answer it, and close the connection.

    A client that reads slowly delays only its own answer; a client that breaks off, or takes too
    long to send its request, gets none.  A client that waits for the job needs a `place`, so that
    others can ask at any time.

    Cancellation: the connection is closed; the request goes on.
    """
    try:
        client = f"requested by {describe_peer(connection)}"
        limit = protocol.REQUEST_MAX
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=limit)
    except BaseException:  # a cancellation too
        connection.close()
        raise
    # Without a buffer, `drain` waits until the kernel has all of the answer.
    writer.transport.set_write_buffer_limits(0)
    is_answered = False
    seconds: float | None = _READ_S

    async def send(reply: protocol.Reply) -> None:
        if writer.is_closing():  # uvloop raises a RuntimeError
            raise ConnectionResetError
        writer.write(protocol.encode(reply))
        try:
            async with asyncio.timeout(seconds):
                await writer.drain()
        except TimeoutError:
            writer.transport.abort()
            raise ConnectionResetError from None

    try:
        async with asyncio.timeout(PATIENCE):
            try:
                request = await _read_request(reader)
            except ControlError as error:
                await send(protocol.ErrorReply(str(error)))
                return
        if has_event(connection.fileno()):
            return  # it has hung up: this process was suspended, or busy
        held: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        follows = isinstance(request, protocol.GetEvents) and request.follow
        if follows or isinstance(request, protocol.AwaitEnd | protocol.RestartJob):
            held, seconds = place(), None
        answering = create_task(_answer(job, request, client, send, held), name="answer")
        ending = create_task(_hang_up(reader, connection), name="end of a control connection")
        try:
            await asyncio.wait([answering, ending], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                is_answered = True
                answering.result()
        finally:
            await cancel_and_wait([answering, ending])
    except (ConnectionError, EOFError, TimeoutError):
        pass
    finally:
        writer.close() if is_answered else writer.transport.abort()


async def _hang_up(reader: asyncio.StreamReader, connection: socket.socket) -> None:
    """Wait until the client has closed the connection."""
    while await reader.read(protocol.REQUEST_MAX):
        pass
    if has_event(connection.fileno()):
        return
    # It sends no more, and still reads, as `nc -N` does.  The loop cannot wait for a hang-up
    # alone, which epoll always reports (epoll_ctl(2)).
    with select.epoll() as hang_up:
        hang_up.register(connection.fileno(), 0)
        await wait_readable([hang_up.fileno()])


async def _read_request(reader: asyncio.StreamReader) -> protocol.ControlRequest:
    try:
        return protocol.decode_request(await reader.readuntil(b"\n"))
    except asyncio.LimitOverrunError:
        raise ControlError(f"request: must have at most {protocol.REQUEST_MAX} bytes") from None


async def _answer(
    job: ControlledJob,
    request: protocol.ControlRequest,
    client: str,
    send: Send,
    place: contextlib.AbstractContextManager[None],
) -> None:
    try:
        with place:
            if request.acknowledge:
                await send(protocol.AcceptedReply())
            await send(await _perform(job, request, client, send))
    except (ControlError, SpecError, RuntimeError) as error:
        # No place is left, it is not valid, or the job has not begun.
        await send(protocol.ErrorReply(str(error)))
    except Exception as error:  # a defect, or a lack of descriptors, or the client is gone
        with contextlib.suppress(OSError):
            await send(protocol.ErrorReply(f"the request failed: {format_value(error)}"))
        raise


async def _perform(
    job: ControlledJob, request: protocol.ControlRequest, client: str, send: Send
) -> protocol.Reply:
    match request:
        case protocol.GetStatus():
            if request.makes_files:
                job.make_log_files()
            return protocol.StatusReply(job.status(usage=False))
        case protocol.GetEvents():
            last = job.status(usage=False).seq
            if request.follow or request.after < last:
                async for event in job.events(request.after):
                    await send(protocol.EventReply(Raw(event_to_json(event))))
                    if event.seq >= last and not request.follow:
                        break
            return protocol.DoneReply()
        case protocol.SendSignal():
            return await _send_signal(job, request)
        case protocol.DumpStacks(reason=reason):
            dump = await job.dump(_reason(reason, client), child=request.child)
            return protocol.DumpReply(str(dump), dump.path)
        case protocol.RestartJob(reason=reason):
            child, reason = request.child, _reason(reason, client)
            return protocol.DoneReply(is_done=await job.restart(reason, child=child))
        case protocol.ReloadJob():
            return protocol.DoneReply(is_done=await job.reload(request.child))
        case protocol.ScaleJob(number=number):
            await job.scale(request.child, number)
            return protocol.DoneReply()
        case protocol.PreemptJob(reason=reason, seconds=seconds):
            return protocol.DoneReply(
                is_done=job.preempt(seconds=seconds, reason=_reason(reason, client))
            )
        case protocol.StopJob():
            return await _stop(job, request, client)
        case protocol.AwaitEnd():
            return await _end_of(job)


async def _stop(job: ControlledJob, request: protocol.StopJob, client: str) -> protocol.Reply:
    reason, number = _reason(request.reason, client), request.signal
    if request.kill and not request.child:
        job.kill(signal=number, reason=reason)
    number = SIGKILL if request.kill and request.child else number
    stopping = job.stop(signal=number, reason=reason, child=request.child)
    if request.wait:
        await stopping
    return await _end_of(job) if request.wait and not request.child else protocol.DoneReply()


def _reason(given: str, client: str) -> str:
    return f"{given}, {client}" if given else client


async def _send_signal(job: ControlledJob, request: protocol.SendSignal) -> protocol.Reply:
    status = job.status(usage=False)
    workers = [worker for leaf in status.leaves for worker in leaf.workers]
    pids = job.forward_signal(request.signal, rank=request.rank, child=request.child)
    async for event in job.events(status.seq):
        if isinstance(event, SignalForwarded):
            unhandled = (one.rank for one in workers if one.pid in event.unhandled)
            return protocol.DoneReply(pids=pids, unhandled=tuple(sorted(unhandled)))
    return protocol.DoneReply(pids=pids)


async def _end_of(job: ControlledJob) -> protocol.Reply:
    last = job.status(usage=False).seq
    async for event in job.events(last - 1):
        if isinstance(event, JobFinished):
            return protocol.EndReply(event.state, event.why, event.exit_code)
    return protocol.ErrorReply("the job has ended by an internal error")
