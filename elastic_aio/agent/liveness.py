"""The channel by which the workers of a job report, and the watchdog of silent workers.

A worker inherits one end of a pair of datagram sockets.  That end does not block: if the launcher
does not read, the message is dropped, and the write fails (as bash shows).  Datagram sockets raise
no SIGPIPE.  The socket with an address is for programs that know `NOTIFY_SOCKET` only.

The kernel tells the sender's pid (SO_PASSCRED of unix(7)): only the worker itself speaks for the
worker, unless the job has `notify_access="all"`.  Helpers inherit the variables, and report about
themselves.

The watchdog is loaded by the first message, or by a limit or a timer of the job.  Without it no
timer runs here, and an idle job causes no wake-up.  A success starts a timer for the workers that
still run; so does the success of all workers of another node.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.aio import Alarm, PausableClock, cancel_and_wait, create_task
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.events import Event, MessageDropped
from elastic_aio.process import proc
from elastic_aio.process.tree import ProcessTree
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.liveness import UNFINISHED_S, LivenessSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    from elastic_aio.agent.probes import Probes
    from elastic_aio.stacks import StackDump
    from elastic_aio.watch.watchdog import Watchdog

_DUMP_S = 2.0  # seconds that the stacks may take
_SHORT_STOP_S = 1.0  # a shorter stop has no time for them


class Liveness:
    """The reports of the workers of one job on this host; must be closed."""

    def __init__(
        self,
        spec: LaunchSpec,
        clock: PausableClock,
        publish: Callable[[Event], None],
        tree: Callable[[], ProcessTree],
        directory: Callable[[int], str | None],
        *,
        unfinished_after: float = UNFINISHED_S,
        make_probes: Callable[..., Probes] | None = None,
    ) -> None:
        """Prepare; nothing is opened yet.

        The limits of the job stand still while `clock` does.  `tree` returns all processes of the
        job, `directory` the log directory of an attempt, if any.  Workers that run
        `unfinished_after` seconds after the first success are reported.  `make_probes` makes the
        probes, with their callbacks, if the job has some.
        """
        self.on_agreed: Callable[[int, int], None] = lambda attempt, change: None
        """Called with the attempt, and the number of a change to which all its workers agree."""
        self.on_progress: Callable[[int], None] = lambda attempt: None
        """Called with the attempt when a worker reports the first step of it."""
        self.on_excluded: Callable[[int, str], None] = lambda attempt, why: None
        """Called with the attempt, and why a worker of it excludes this node."""
        self.peers_finished = 0  # workers of other nodes that have finished, as far as is known
        self._spec = spec
        self._clock = clock
        self._publish = publish
        self._tree = tree
        self._directory = directory
        # A message may be noticed late by an eighth of a limit.
        period = min([PERIOD_S, *(limit / 8 for limit in spec.liveness.deadlines)])
        takes_all = spec.liveness.notify_access == "all"
        foreign = None if takes_all else self._on_foreign
        self._sockets = NotifySockets(self._on_message, foreign, clock, period=period)
        self._watchdog: Watchdog | None = None
        self._make_probes = make_probes
        self._probes: Probes | None = None
        self._records: Mapping[int, WorkerRecord] = {}
        self._attempt = 0
        self._on_hung: Callable[[int, str], None] = lambda local_rank, why: None
        self._on_stuck: Callable[[int], None] = lambda local_rank: None
        self._is_stopping = False
        self._succeeded_at: float | None = None
        self._unfinished_after = unfinished_after
        self._unfinished = Alarm(clock, self._on_unfinished)

    def __repr__(self) -> str:
        return f"<Liveness of attempt {self._attempt}, {self._watchdog or 'no watchdog'}>"

    @property
    def address(self) -> str:
        """The address for `NOTIFY_SOCKET`; empty without deadlines."""
        return self._sockets.address

    @property
    def timer_file(self) -> str:
        """The pipe of the timers; empty without timers."""
        pipe = None if self._watchdog is None else self._watchdog.pipe
        return "" if pipe is None else pipe.path

    def open(self) -> None:
        """Open the pipe and the address that workers write to, or raise HostError."""
        spec = self._spec
        if spec.liveness != LivenessSpec() or spec.uninterruptible_timeout is not None:
            self._loaded()
        is_message = spec.ready is not None and spec.ready.is_message
        is_asked = spec.alive is not None or (spec.ready is not None and not is_message)
        if is_asked and self._make_probes is not None:
            watchdog = self._loaded()
            self._probes = self._make_probes(
                on_answer=watchdog.on_answer,
                on_ready=watchdog.set_ready,
                on_not_alive=watchdog.on_not_alive,
            )
        if spec.liveness.deadlines or is_message:
            try:
                self._sockets.open_address()
            except OSError as error:
                raise HostError(f"cannot listen to the workers: {error_reason(error)}") from error
        if spec.timers:
            self._loaded().open_timers(spec.timers)

    def _loaded(self) -> Watchdog:
        """Return the watchdog, made now if it was not before.

        Its modules are loaded while the job is idle (see `later`); before, OSError or ImportError
        may be raised.
        """
        if self._watchdog is None:
            from elastic_aio.watch.watchdog import Watchdog

            watchdog = self._watchdog = Watchdog(
                self._spec.liveness,
                self._clock,
                self._publish,
                self._tree,
                directory=self._directory,
                read_messages=self._sockets.read_all,
                on_agreed=lambda attempt, change: self.on_agreed(attempt, change),
                on_progress=lambda attempt: self.on_progress(attempt),
                on_excluded=lambda attempt, why: self.on_excluded(attempt, why),
                on_hung=lambda local_rank, why: self._on_hung(local_rank, why),
                on_stuck=lambda local_rank: self._on_stuck(local_rank),
                on_ready=self._on_ready,
                stop_grace=self._spec.stop.grace,
                unfinished_after=self._unfinished_after,
                takes_ready=self._spec.ready is None or self._spec.ready.is_message,
            )
            watchdog.begin_attempt(self._attempt, self._records)
            for local_rank in self._sockets.local_ranks:
                watchdog.add(local_rank)
            if self._is_stopping:
                watchdog.end_deadlines()
            if self._succeeded_at is not None:
                watchdog.on_success(self._succeeded_at, self.peers_finished)
        return self._watchdog

    # ------------------------------------------------------------ an attempt

    def begin_attempt(self, attempt: int, records: Mapping[int, WorkerRecord]) -> None:
        """Forget the former attempt; `records` will be the workers of this one."""
        self._attempt, self._records = attempt, records
        self._is_stopping = False
        self._succeeded_at, self.peers_finished = None, 0
        if self._watchdog is not None:
            self._watchdog.begin_attempt(attempt, records)
        if self._probes is not None:
            self._probes.begin_attempt(attempt)

    def watch(self, on_hung: Callable[[int, str], None], on_stuck: Callable[[int], None]) -> None:
        """Watch the workers of the attempt.

        `on_hung` is called with the local rank of each worker that misses a deadline, and the
        reason, once all have been examined; `on_stuck` with the local rank of the first worker that
        is in an uninterruptible system call for too long.
        """
        self._on_hung, self._on_stuck = on_hung, on_stuck
        if self._watchdog is not None:
            self._watchdog.start_polls(self._spec.uninterruptible_timeout)

    @contextmanager
    def open_worker(self, local_rank: int) -> Iterator[int]:
        """Begin the deadlines of a worker, and open its sockets (see `NotifySockets`)."""
        with self._sockets.open_worker(local_rank) as descriptor:
            if self._watchdog is not None:
                self._watchdog.add(local_rank)
            yield descriptor

    def on_started(self, record: WorkerRecord) -> None:
        if self._watchdog is not None:
            self._watchdog.on_started(record)
        self._sockets.note_started(record.ranks.local_rank, record.pid)
        if self._probes is not None and not self._is_stopping and record.is_running:
            self._probes.add(record)

    def _on_ready(self, local_rank: int) -> None:
        if self._probes is not None:
            self._probes.set_ready(local_rank)

    def on_exited(self, local_rank: int, *, is_success: bool) -> None:
        """Read the last messages of a worker that has exited, and end its deadlines."""
        self._sockets.close_worker(local_rank)
        if self._probes is not None:
            self._probes.remove(local_rank)
        if self._watchdog is not None:
            self._watchdog.on_exited(local_rank, is_success=is_success)
        elif is_success:
            self._note_success(self._clock.now())

    def _note_success(self, at: float) -> None:
        if self._succeeded_at is None or at < self._succeeded_at:
            self._succeeded_at = at
            self._unfinished.set(at + self._unfinished_after)

    def _on_unfinished(self) -> None:
        if self._sockets.local_ranks and self._succeeded_at is not None and not self._is_stopping:
            with suppress(OSError, ImportError):
                self._loaded()  # which reports them

    def on_peers_finished(self, workers: int, ago: float) -> None:
        """Note that so many workers of other nodes have finished, the first `ago` seconds ago."""
        self.peers_finished = workers
        at = self._clock.now() - ago
        if self._watchdog is not None:
            self._watchdog.on_success(at, workers)
        else:
            self._note_success(at)

    def end_deadlines(self) -> None:
        """End all deadlines: the workers are being stopped.  Idempotent."""
        self._is_stopping = True
        self._unfinished.set(None)
        if self._watchdog is not None:
            self._watchdog.end_deadlines()
        if self._probes is not None:
            self._probes.end()

    def close_workers(self) -> None:
        """Close the sockets of the workers: no process of the attempt is left.  Idempotent."""
        self._sockets.close_workers()

    async def aclose(self) -> None:
        self.end_deadlines()
        self._sockets.close()
        if self._probes is not None:
            await self._probes.aclose()
        if self._watchdog is not None:
            await self._watchdog.aclose()

    def _on_message(self, local_rank: int, message: bytes) -> None:
        try:
            watchdog = self._loaded()
        except (OSError, ImportError):
            return  # as if this process did not read; the next message brings another try
        watchdog.on_message(local_rank, message)

    def _on_foreign(self, pid: int) -> None:
        program = proc.name_of(pid)
        self._publish(MessageDropped(attempt=self._attempt, pid=pid, program=program))

    # ----------------------------------------------------------------- dumps

    async def dump(self, reason: str) -> StackDump:
        return await self._loaded().dump(reason)

    @asynccontextmanager
    async def stopping(self, plan: StopPlan) -> AsyncIterator[None]:
        """Read the stacks of workers that are being stopped, shortly before they are killed."""
        # SIGKILL is not delayed: the stacks are read in the last two seconds before it.
        reading = create_task(self._dump_before_kill(plan), name="stacks before SIGKILL")
        try:
            yield
        finally:
            await cancel_and_wait([reading])

    async def _dump_before_kill(self, plan: StopPlan) -> None:
        seconds = sum(step.grace for step in plan.steps)
        if seconds < _SHORT_STOP_S:
            return
        waited = seconds - min(_DUMP_S, seconds / 2)
        await self._clock.sleep(waited)
        if any(record.is_running for record in self._records.values()):
            await self.dump(f"still running {waited:g} s after the stop began")


# ----------------------------------------------------------------------- the sockets

PERIOD_S = 1.0  # until a socket is read again
_MESSAGE_BYTES = 4097  # that are read of a message: one more than it may have
_BURST = 512  # messages of one worker that are read at a time; the kernel keeps fewer
_PERIOD_MAX = 1024  # messages of all workers that are read at the end of a period
_ANCESTORS_MAX = 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7)
_CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)


class NotifySockets:
    """The sockets of one job on this host; must be closed."""

    # A socket that has been read is read again after a period, until it is empty twice: workers
    # that report every second would cause as many wake-ups, and any process of the job may write
    # without end.  The first message after such a pause is read at once.

    def __init__(
        self,
        on_message: Callable[[int, bytes], None],
        on_foreign: Callable[[int], None] | None,
        clock: PausableClock,
        *,
        period: float,
    ) -> None:
        """Begin without sockets.

        `on_message` is called with local rank and content of each message.  `on_foreign` is called
        once with the pid of a process below a worker whose message is dropped; None: it speaks for
        the worker.  `period` is in seconds.
        """
        self.address = ""  # for `NOTIFY_SOCKET`; empty before `open_address`
        self._on_message = on_message
        self._on_foreign = on_foreign
        self._has_foreign = False
        self._clock = clock
        self._period = period
        self._ends: dict[int, socket.socket] = {}  # by local rank
        self._leaders: dict[int, int] = {}  # local ranks by pid
        self._early: list[tuple[int, bytes]] = []  # from processes that may be such
        self._shared: socket.socket | None = None
        self._readers: dict[int, Callable[[int], int]] = {}  # by descriptor
        # Descriptors, in the order in which they are read; True: it was empty the last time.
        self._paused: dict[int, bool] = {}
        self._timer = Alarm(clock, self._on_period)

    def __repr__(self) -> str:
        return f"<NotifySockets of {len(self._ends)} workers>"

    @property
    def local_ranks(self) -> list[int]:
        return [*self._ends]

    def open_address(self) -> None:
        """Open an abstract socket, of which nothing is left, or raise OSError."""
        shared = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            shared.bind("")  # the kernel chooses the address
        except OSError:
            shared.close()
            raise
        self._shared = shared
        self.address = "@" + shared.getsockname()[1:].decode("ascii")
        self._add_reader(shared.fileno(), partial(self._read, shared, None))

    @contextmanager
    def open_worker(self, local_rank: int) -> Iterator[int]:
        """Open the sockets of a worker, or raise SpawnError; the value is its end of them."""
        try:
            own, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
            )
            own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        except OSError as error:
            message = f"cannot open the socket for its messages: {error_reason(error)}"
            raise SpawnError(message, permanent=False, exit_code=1) from error
        with theirs:
            self._ends[local_rank] = own
            self._add_reader(own.fileno(), partial(self._read, own, local_rank))
            try:
                yield theirs.fileno()
            except BaseException:  # a cancellation too
                self.close_worker(local_rank)
                raise

    def note_started(self, local_rank: int, pid: int) -> None:
        """Note the process of a worker, and take the messages that it has sent before."""
        self._leaders[pid] = local_rank
        early, self._early = self._early, []
        for sender, message in early:
            self._take(None, sender, message)

    def close_worker(self, local_rank: int) -> None:
        """Read what a worker has sent last, and close its socket.  Idempotent."""
        if (own := self._ends.get(local_rank)) is not None:
            self._read(own, local_rank, _BURST)
            if self._shared is not None:
                self._read(self._shared, None, _BURST)
            self._remove_reader(own.fileno())
            own.close()
            del self._ends[local_rank]
            self._leaders = {pid: one for pid, one in self._leaders.items() if one != local_rank}

    def close_workers(self) -> None:
        for local_rank in [*self._ends]:
            self.close_worker(local_rank)

    def close(self) -> None:
        self.close_workers()
        if self._shared is not None:
            self._remove_reader(self._shared.fileno())
            self._shared.close()
            self._shared = None
        self._timer.set(None)

    def read_all(self) -> None:
        """Read what has arrived: the event loop may have been blocked since."""
        for read in [*self._readers.values()]:
            read(_BURST)

    def _add_reader(self, descriptor: int, read: Callable[[int], int]) -> None:
        self._readers[descriptor] = read
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable, descriptor)

    def _remove_reader(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        del self._readers[descriptor]
        self._paused.pop(descriptor, None)

    def _on_readable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        self._paused[descriptor] = False
        if self._timer.at is None:
            self._timer.set(self._clock.now() + self._period)
        self._readers[descriptor](_BURST)

    def _on_period(self) -> None:
        """Read the sockets that have been read before; wait for those that are empty now."""
        loop, left = asyncio.get_running_loop(), _PERIOD_MAX
        for descriptor, was_empty in [*self._paused.items()]:
            if left <= 0:
                break
            count = self._readers[descriptor](min(_BURST, left))
            left -= count
            del self._paused[descriptor]
            if count or not was_empty:
                self._paused[descriptor] = not count
            else:
                loop.add_reader(descriptor, self._on_readable, descriptor)
        if self._paused:
            self._timer.set(self._clock.now() + self._period)

    def _read(self, sock: socket.socket, own: int | None, limit: int) -> int:
        """Read at most `limit` messages, of a worker or of all; return their number."""
        for count in range(limit):
            try:
                message, ancillary, _, _ = sock.recvmsg(_MESSAGE_BYTES, _CREDENTIALS_SPACE)
            except OSError:  # there are no more; or an error of the peer, which this has cleared
                return count
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self._take(own, _CREDENTIALS.unpack_from(data)[0], message)
        return limit

    def _take(self, own: int | None, pid: int, message: bytes) -> None:
        """Pass a message of a process on, as that of the worker for which it speaks."""
        is_starting = len(self._leaders) < len(self._ends)  # then some are not known yet
        is_own = self._on_foreign is None or (is_starting and own not in self._leaders.values())
        local_rank = own if is_own and own is not None else self._leaders.get(pid)
        if local_rank is None and self._on_foreign is None:
            with suppress(OSError):
                local_rank = self._find_ancestor(pid)
        if local_rank is not None and own in (None, local_rank):
            self._on_message(local_rank, message)
        elif is_starting and len(self._early) < _BURST:
            self._early.append((pid, message))
        elif self._on_foreign is not None and not self._has_foreign:
            self._has_foreign = True
            self._on_foreign(pid)

    def _find_ancestor(self, pid: int) -> int | None:
        """Return the local rank of the worker that has started a process."""
        for _ in range(_ANCESTORS_MAX):
            process = proc.read_process(pid)
            if process is None:
                return None
            if (local_rank := self._leaders.get(process.session)) is not None:
                return local_rank
            pid = process.parent
        return None
