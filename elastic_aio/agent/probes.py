"""Asks the workers of an attempt whether they are ready and alive (`spec.probe`).

One timer is set to the first question of all.  A question is a task that ends with its answer or
its timeout; between questions there is none.  A question that could not be asked, because this
process lacks descriptors or its event loop was blocked, has no answer: a worker is not to blame.

The kernel shows which sockets listen at a port and accept (proc_net_tcp(5), `/proc/PID/fd`).  An
answer counts if the child's processes have all of them.  If others have some too (`sockets`, a
reload, SO_REUSEPORT), that which has accepted decides, see `_DOUBTS_MAX`.  If only sockets of
others listen that are older than the attempt, a stranger answers.  All other answers count: of
this program, another host or network namespace, Docker's proxy, processes that this user may not
look at.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from typing import Any, Final

from msgspec import Struct

from elastic_aio import aio
from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.events import Event, ForeignAnswer
from elastic_aio.logs.reader import LogReader
from elastic_aio.logs.streams import LoggedStreams
from elastic_aio.process import proc
from elastic_aio.process.children import Child, ChildExit
from elastic_aio.process.command_output import CommandOutput
from elastic_aio.sockets import Address, accepted_inode, listening_sockets, look_up, port_owner
from elastic_aio.spec import probe as spec
from elastic_aio.text import ESCAPES, error_reason, one_line
from elastic_aio.watch.probe_table import ProbeTable, Verdict

_LACK: Final = {*proc.LACK, errno.ENOBUFS, errno.EADDRNOTAVAIL}
_LATE_S: Final = 0.1
"""Seconds by which a timeout may be noticed late; then the loop was blocked, or the worker was."""
_HEAD_MAX: Final = 16 << 10
_REST_MAX: Final = 10 << 10
"""Bytes that are read after the status, within `_REST_S`, so that the server is not cut short."""
_REST_S: Final = 0.1
_ESCAPES: Final = re.compile(ESCAPES.encode())
_LINE_MAX: Final = 4096
_QUIET_S: Final = 0.2
"""Seconds after which an unfinished line that does not grow counts as a line: a prompt."""
_TEXT_MAX: Final = 100
_ACCEPTED_S: Final = 0.05
"""Seconds in which a server accepts, unless it is busy."""
_DOUBTS_MAX: Final = 3
"""Answers at a shared socket, of others or of unknown processes, until one is reported.  Then they
make a worker ready that replaces none: those with the same socket are as new."""
_KILLED_S: Final = 1.0
"""Seconds for which the end of the probes waits until killed commands are reaped."""


class Answer(Struct, frozen=True):
    """An answer in words; `is_success` None: the question could not be asked."""

    is_success: bool | None
    text: str


class Probes:
    """The probes of the workers of one job on this host; must be closed."""

    def __init__(
        self,
        ready: spec.Probe | None,
        alive: spec.PolledProbe | None,
        clock: aio.PausableClock,
        *,
        start_command: Callable[..., Awaitable[Child]],
        logged: LoggedStreams,
        on_answer: Callable[[int, str], None],
        on_ready: Callable[[int], None],
        on_not_alive: Callable[[int, str, float], None],
        publish: Callable[[Event], None],
        is_beside: bool,
        descendants: Callable[[], Awaitable[list[proc.ProcEntry] | None]],
    ) -> None:
        """Prepare; `begin_attempt` follows.

        `is_beside`: the workers replace others, which run.  `descendants` returns the processes of
        the job, which a probe of a port asks.  `on_answer` gets the local rank and each answer, in
        words; `on_ready` the local rank of a worker that a probe finds ready; `on_not_alive` that
        of one that is not alive, why, and the seconds since its last success.
        """
        self._ready = ready
        self._alive = alive
        self._clock = clock
        self._start_command = start_command
        self._logged = logged
        self._on_answer = on_answer
        self._on_ready = on_ready
        self._on_not_alive = on_not_alive
        self._publish = publish
        self._sockets, self._is_beside = Sockets(descendants), is_beside
        self._foreign: dict[int, int] = {}  # answers of other processes, by local rank
        self._table = ProbeTable(ready, alive)
        self._records: dict[int, WorkerRecord] = {}
        self._questions: dict[int, asyncio.Task[None]] = {}  # by local rank
        self._tasks: set[asyncio.Task[None]] = set()
        self._commands: set[asyncio.Future[ChildExit]] = set()  # their ends
        self._reading: asyncio.Task[None] | None = None
        self._lines: dict[int, str] = {}  # the first that matches, by rank
        self._alarm = aio.Alarm(clock, self._on_alarm)
        self._lookups: dict[tuple[str, int], asyncio.Task[list[Address]]] = {}
        self._attempt = 0

    def __repr__(self) -> str:
        return f"<Probes: {len(self._questions)} questions, {self._table!r}>"

    def begin_attempt(self, attempt: int) -> None:
        """Forget the former attempt."""
        self.end()
        self._attempt = attempt
        self._table = ProbeTable(self._ready, self._alive)
        self._foreign.clear()
        if any(isinstance(one, spec.Http | spec.Tcp) for one in (self._ready, self._alive)):
            self._sockets = Sockets(self._sockets.descendants, {*listening_sockets()})

    def add(self, record: WorkerRecord) -> None:
        """Begin to ask a worker that has been started."""
        local_rank = record.ranks.local_rank
        self._records[local_rank] = record
        self._table.add(local_rank, self._clock.now())
        if record.report is not None and record.report.ready_at is not None:
            self._table.set_ready(local_rank, self._clock.now())
        self._note_line(record)
        if isinstance(self._ready, spec.LogMatch) and self._reading is None and self._lacks_line():
            self._reading = self._start(self._read_lines(self._ready), "log lines")
        self._set_alarm()

    def set_ready(self, local_rank: int) -> None:
        """Note that a worker has become ready.  Idempotent."""
        self._table.set_ready(local_rank, self._clock.now())
        self._set_alarm()

    def remove(self, local_rank: int) -> None:
        """Ask a worker no more: it has exited.  Idempotent."""
        self._table.remove(local_rank)
        self._records.pop(local_rank, None)
        if (question := self._questions.pop(local_rank, None)) is not None:
            question.cancel()
        if self._reading is not None and not self._lacks_line():
            self._reading.cancel()
            self._reading = None
        self._set_alarm()

    def end(self) -> None:
        """Ask no worker any more: they are being stopped.  Idempotent."""
        self._lines.clear()
        for local_rank in [*self._records]:
            self.remove(local_rank)

    async def aclose(self) -> None:
        """End all questions, and wait until their commands are reaped.  Idempotent."""
        self.end()
        await aio.cancel_and_wait([*self._tasks])
        ended = aio.when_all_done(self._commands)
        await self._clock.wait_for(ended, seconds=_KILLED_S)

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = aio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------ the timer

    def _set_alarm(self) -> None:
        self._alarm.set(self._table.next_due)

    def _on_alarm(self) -> None:
        for local_rank, probe in self._table.take_due(self._clock.now()):
            asking = self._ask(local_rank, probe)
            self._questions[local_rank] = self._start(asking, f"probe of local rank {local_rank}")
        self._set_alarm()

    async def _ask(self, local_rank: int, probe: spec.PolledProbe) -> None:
        began, answerer = self._clock.now(), Answerer(self._sockets)
        asking = aio.create_task(
            self._answer(local_rank, probe, answerer), name=f"{type(probe).__name__} probe"
        )
        try:
            await self._clock.wait_for(asking, seconds=probe.timeout)
        finally:
            if not asking.done():
                await aio.cancel_and_wait([asking])
        if not asking.cancelled():
            answer = asking.result()
        elif self._clock.now() - began > probe.timeout + _LATE_S:
            answer = Answer(None, "this process was blocked")
        else:
            is_silent = await answerer.is_silent()
            answer = Answer(False if is_silent else None, f"no answer within {probe.timeout:g} s")
        self._questions.pop(local_rank, None)
        record = self._records[local_rank]
        if answerer.is_stranger or (answerer.doubt and answer.is_success is None):
            count = self._foreign[local_rank] = self._foreign.get(local_rank, 0) + 1
            if count == (1 if answerer.is_stranger else _DOUBTS_MAX):
                who: Any = {"rank": record.ranks.rank, "local_rank": local_rank, "pid": record.pid}
                self._publish(ForeignAnswer(attempt=self._attempt, **who, why=answer.text))
            if count >= _DOUBTS_MAX and probe is self._ready and not self._is_beside:
                answer = Answer(answerer.is_success, answer.text)  # of another that is as new
        now = self._clock.now()
        seconds = self._table.since_success(local_rank, now)
        verdict = self._table.answer(local_rank, began, now, is_success=answer.is_success)
        self._on_answer(local_rank, answer.text)
        if verdict is Verdict.READY:
            self._on_ready(local_rank)
        self._set_alarm()
        if verdict is Verdict.NOT_ALIVE:
            self._on_not_alive(local_rank, answer.text, seconds)

    # ------------------------------------------------------------------ questions

    async def _answer(self, local_rank: int, probe: spec.PolledProbe, answerer: Answerer) -> Answer:
        try:
            match probe:
                case spec.Http():
                    return await self._ask_http(probe, local_rank, answerer)
                case spec.Tcp():
                    with await self._connect(*probe.host_port(local_rank), answerer):
                        await answerer.look(probe.timeout)
                    return answerer.judged(True, "connected")
                case spec.Exec():
                    return await self._ask_command(probe, self._records[local_rank])
        except OSError as error:
            return Answer(None if error.errno in _LACK else False, error_reason(error))
        except ValueError as error:
            return Answer(False, str(error))
        raise AssertionError(f"a probe of an unknown kind: {probe!r}")

    async def _connect(self, host: str, port: int, answerer: Answerer) -> socket.socket:
        """Return a connection to the first address that accepts one; ValueError: of a stranger."""
        addresses = await self._look_up(host, port)
        loop, failures = asyncio.get_running_loop(), [OSError("it has no address")]
        for family, address in addresses:
            with ExitStack() as stack:
                try:
                    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                    stack.enter_context(sock)
                    await loop.sock_connect(sock, address)
                    await answerer.find(sock.getsockname(), sock.getpeername())
                except OSError as error:  # asyncio has words of its own
                    failures.append(OSError(error.errno, os.strerror(error.errno or 0)))
                else:
                    stack.pop_all()
                    return sock
        self._lookups.pop((host, port), None)  # a name may get another one
        # A host without IPv6 lacks the second address of "localhost": the first has answered.
        raise max(reversed(failures[1:] or failures), key=lambda one: one.errno not in _LACK)

    async def _look_up(self, host: str, port: int) -> list[Address]:
        """Return the addresses of a host; a name server is asked once for all questions."""
        asking = self._lookups.get((host, port))
        if asking is None or (asking.done() and asking.exception()):
            # Its thread outlives a question: a further one for each question would pile up.
            asking = self._lookups[host, port] = self._start(look_up(host, port), "look-up")
        await asyncio.wait([asking])
        return asking.result()

    async def _ask_http(self, probe: spec.Http, local_rank: int, answerer: Answerer) -> Answer:
        target = spec.http_target(probe, local_rank)
        sock = await self._connect(target.host, target.port, answerer)
        tls = {"ssl": self._tls, "server_hostname": target.host} if target.is_tls else {}
        # The socket is the loop's from now on, which closes it if the handshake fails.
        reader, writer = await asyncio.open_connection(sock=sock, limit=_HEAD_MAX, **tls)  # type: ignore[arg-type]
        try:
            headers = {"Host": target.authority, "User-Agent": "elastic_aio", "Accept": "*/*"}
            headers |= {**probe.headers, "Connection": "close"}
            lines = [f"GET {target.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
            writer.write("\r\n".join([*lines, ""]).encode("ascii"))
            # The server waits for the last line, while it is looked who has accepted.
            await answerer.look(probe.timeout)
            writer.write(b"\r\n")
            status = await _read_status(reader)
            await answerer.look()
            with suppress(OSError, EOFError):  # TimeoutError too: a stream does not end
                async with asyncio.timeout(_REST_S):
                    await reader.readexactly(_REST_MAX)
        finally:
            writer.transport.abort()
        low, high = probe.expects
        return answerer.judged(low <= status <= high, f"HTTP status {status}")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    async def _ask_command(self, probe: spec.Exec, record: WorkerRecord) -> Answer:
        local_rank = record.ranks.local_rank
        child: Child | None = None

        async def start() -> None:
            nonlocal child
            command = probe.command(local_rank)
            child = await self._start_command(command, output.writer.fileno(), local_rank)
            self._commands.add(child.exited)
            child.exited.add_done_callback(self._commands.discard)

        with closing(CommandOutput()) as output:
            try:
                await aio.run_shielded(start)
                assert child is not None, "it has been started"
                output.writer.close()
                await asyncio.wait([child.exited])
            except (SpawnError, HostError) as error:
                is_lasting = isinstance(error, SpawnError) and error.permanent
                return Answer(False if is_lasting else None, one_line(str(error), _TEXT_MAX))
            finally:
                # While it is not reaped, no other group has its number; in a fork it is not ours.
                if child is not None and child.send_signal(signal.SIGKILL):
                    with suppress(OSError):
                        os.killpg(child.pid, signal.SIGKILL)  # it leads its group
            status, last = child.exited.result().status, output.last_line()
        return Answer(status.is_success, f"{status}: {last}" if last else str(status))

    async def _read_lines(self, probe: spec.LogMatch) -> None:
        """Look for the line of each worker, until all have been found."""
        pattern, attempt = spec.compile_pattern(probe.pattern), self._attempt
        reader = LogReader(
            self._logged,
            lambda one: one.attempt == attempt and one.is_one_of(None, probe.streams),
            follow=True,
            quiet=_QUIET_S,
        )
        async with reader:
            while lines := await reader.batch():
                for line in lines:
                    if line.rank not in self._lines and pattern.search(plain := _plain(line.raw)):
                        frames = plain.decode("utf-8", "replace").split("\n")
                        self._lines[line.rank] = one_line(frames[-1], _TEXT_MAX)
                        for record in [*self._records.values()]:
                            self._note_line(record)
                if not self._lacks_line():
                    self._reading = None  # a worker that is added later is looked for anew
                    return

    def _lacks_line(self) -> bool:
        return any(one.ranks.rank not in self._lines for one in self._records.values())

    def _note_line(self, record: WorkerRecord) -> None:
        """Note that a worker is ready by a line, which may be read before it counts as started."""
        if (text := self._lines.get(record.ranks.rank)) is not None:
            self._on_answer(record.ranks.local_rank, text)
            self._on_ready(record.ranks.local_rank)


def _plain(raw: bytes) -> bytes:
    """Return both ends of a line without escape sequences, and each frame of it as a line."""
    plain = (_ESCAPES.sub(b"", raw) if b"\x1b" in raw else raw).rstrip(b"\r\n")
    if len(plain) > 2 * _LINE_MAX:
        plain = plain[:_LINE_MAX] + b"\n" + plain[-_LINE_MAX:]
    return plain.replace(b"\r", b"\n")


async def _read_status(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer: nothing after it counts.  ValueError: it has none."""
    while True:
        line = await _read_line(reader)
        words = line.split(None, 2)
        is_http = len(words) > 1 and words[0].startswith(b"HTTP/1.") and words[1].isdigit()
        if not is_http or len(words[1]) != 3:
            raise ValueError("the answer is no HTTP" if line else "no answer: connection closed")
        if (status := int(words[1])) >= 200:
            return status
        while line.strip():  # an interim answer (RFC 9110)
            line = await _read_line(reader)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    with suppress(ValueError):  # it is longer than the limit of the reader
        return await reader.readline()
    raise ValueError(f"the head of the answer has more than {_HEAD_MAX} bytes")


# ------------------------------------------------------------- which process answers at a port


class Sockets(Struct):
    """The listening sockets that were there before an attempt, and those that its child has."""

    descendants: Callable[[], Awaitable[list[proc.ProcEntry] | None]]
    before: set[str] = set()
    held: set[str] = set()

    async def opened(self, inodes: set[str]) -> set[str]:
        """Return which of some sockets the child has; all, if this user may not look."""
        pids = [one.pid for one in await self.descendants() or ()]
        return await aio.run_in_thread(_opened, pids, inodes, daemon=True)


def _opened(pids: list[int], inodes: set[str]) -> set[str]:
    links = {proc.link_of(pid, f"fd/{one}") for pid in pids for one in proc.list_numbers(pid, "fd")}
    found = {one for one in inodes if f"socket:[{one}]" in links}
    return inodes if not found and any(map(proc.hides_environment, pids)) else found


class Answerer:
    """Who answers a question: the child, unless it `is_stranger` or there is a `doubt`."""

    def __init__(self, sockets: Sockets) -> None:
        self.is_stranger, self.is_success, self.doubt = False, False, ""
        self._sockets = sockets
        self._ends: Any = ()  # of the connection, the own one first
        self._shared: set[str] = set()  # sockets of the child, and not of it alone

    async def find(self, own: Any, peer: Any) -> None:
        """Find out who listens for a connection; raise ValueError if a stranger does."""
        if own == peer:  # the kernel may choose the port that is asked (RFC 9293, 3.5)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "")
        is_near = own[0] == peer[0] or peer[0].startswith("127.")
        self._ends, known, port = (own, peer), self._sockets, peer[1]
        rows = await aio.run_in_thread(listening_sockets, port, daemon=True) if is_near else {}
        if not (inodes := {*rows}) <= known.held:
            known.held |= await known.opened(inodes)
        if held := inodes & known.held:
            if held != inodes or held & known.before:
                self._shared, self.doubt = held, "no known process"
        elif inodes and inodes <= known.before:
            own_pid = proc.own_pid()
            if not await aio.run_in_thread(_opened, [own_pid], inodes, daemon=True):
                self.is_stranger = True
                owner = await aio.run_in_thread(port_owner, port, daemon=True)
                raise ValueError(f"connected to {owner}, no process of this child")

    async def look(self, timeout: float = 0.0) -> None:
        """Find out who has accepted from a shared socket, which may take part of a timeout."""
        if self.doubt:
            # No event tells a client that its connection is accepted; a server may end it soon.
            await asyncio.sleep(min(_ACCEPTED_S, timeout / 4))
            if inode := await aio.run_in_thread(accepted_inode, *self._ends, daemon=True):
                self.doubt = "" if await self._sockets.opened({inode}) else "another process"

    async def is_silent(self) -> bool:
        """Return whether it is the child that has not answered in time."""
        rows = await aio.run_in_thread(listening_sockets, daemon=True) if self.doubt else {}
        waiting = {one for one, row in rows.items() if not row[4].endswith(":00000000")}
        return not self.doubt or bool(waiting & self._shared)

    def judged(self, is_success: bool, text: str) -> Answer:
        self.is_success = is_success
        if self.doubt:
            return Answer(None, f"{text}, accepted by {self.doubt} at the same socket")
        return Answer(is_success, text)
