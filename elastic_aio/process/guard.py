"""What the guardian process does: when its program is gone, it ends what is left of the jobs.

`guardian_main` runs it, with the arguments LIST, SOCKET, PREFIX and SERIAL.  It waits until it gets
the lock of a byte of the session list, which the program holds (F_SETLK of fcntl(2)).  The kernel
releases such a lock when the process ends, by SIGKILL too, and when it executes another program,
because the descriptor is closed on exec.  A pidfd does not notice an exec, and a pipe stays open in
every child that the embedding program forks; forks do not inherit a lock.

A program that holds the lock of a later byte is not gone: it asks for the end of single jobs, which
are marked in the list.  Reports go to SOCKET: SERIAL when the guardian works, and after the end of
such a job its number, that of the request, and whether nothing is left.

The leaders of a job's workers get the first signal of its plan, their descendants get it after
them (`stop_order`; of some plans at once), and all get SIGKILL after the grace, again and again
until none is found (see `tree`).  Jobs end at the same time, and one look at /proc is for all.

The program was the reader of the workers' pipes.  A worker that prints while it saves would end by
SIGPIPE, so the pipes stay open (`KeptPipes`), and are read here until all jobs have ended.

A worker that was being started has the job's marker only after its exec, which can take long on a
slow file system; until then it shows the program of its parent, and its stack.  If the session list
says that a worker was being started, the guardian therefore waits for the exec of each process that
shows these, or no arguments, and is not older.  It signals none of them before: the embedding
program may have forked it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Generator

    from elastic_aio.process import descendants, proc, stop_order

    Steps = Generator[float, descendants.Snapshot | None, bool]
else:
    # The public module makes enumerations: a third of this process's start.
    import _signal as signal

    import descendants
    import proc
    import stop_order

# Seconds without a descendant before the job counts as gone.
_QUIET_S = 0.25
_LIMIT_S = 10.0
# Descriptors that are left free of pipes, and reads of each pipe between two scans: a megabyte.
_SPARE = 8
_READS = 16
# Seconds for which execs are waited for.
_EXEC_S = 60.0
# Seconds between two scans, before and after SIGKILL is sent: the kernel reports no forks
# of other processes to an unprivileged one.
_GRACE_SCAN_S = 0.02
_SCAN_S = 0.005


def main() -> int:
    """Wait for the program's end, end its jobs; return 1 if some of it is left."""
    listed, channel = int(sys.argv[1]), int(sys.argv[2])
    # A signal to all processes of a user must not leave the workers unguarded; the program
    # ends its guardian with SIGKILL.
    for ignored in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(ignored, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # reserved by the C library
    _check_kernel(listed)
    me = proc.read_process(proc.own_pid())
    program = None if me is None else proc.program_of(me.parent)
    guard = Guard(listed, channel, sys.argv[3], os.getppid(), program)
    guard.look(blocks=False)
    if not guard.is_gone:
        os.write(channel, sys.argv[4].encode("ascii"))
        # Now: no worker waits, and their files may be replaced later.
        import _socket  # noqa: F401
        import resource  # noqa: F401
    return guard.run()


def _check_kernel(listed: int) -> None:
    """Use what the end of the job will need, so that a lack is an error at the start."""
    call = "pidfd_open"
    try:
        descriptor = os.pidfd_open(os.getpid())
        call = "pidfd_send_signal"
        signal.pidfd_send_signal(descriptor, 0)
    except OSError as error:
        sys.exit(f"{call}: {error.strerror}")
    os.close(descriptor)
    descendants.read_jobs(listed)


class Guard:
    """All jobs of a program."""

    def __init__(
        self,
        listed: int,
        channel: int,
        prefix: str,
        supervisor: int,
        program: tuple[int, int, int] | None,
    ) -> None:
        """Begin; `prefix` is that of the markers' names, `supervisor` the pid of the program."""
        self.is_gone = False
        """Whether the program is gone."""
        self._listed = listed
        self._channel = channel
        self._prefix = prefix
        self._supervisor = supervisor
        self._program = program
        self._byte = 0
        self._pipes: list[int] = []
        self._hidden: set[tuple[int, int]] = set()
        # By owner: the request that is being done, or was, and the steps of those that are.
        self._requests: dict[int, int] = {}
        self._ending: dict[int, Steps] = {}

    def look(self, *, blocks: bool) -> bool:
        """Return whether the list has to be read: the program is gone, or asks for something.

        With `blocks`, wait until one of these is so.
        """
        mode, is_woken = fcntl.LOCK_EX | (0 if blocks else fcntl.LOCK_NB), False
        while not self.is_gone and _try_lock(self._listed, mode, 1, self._byte):
            self._byte += 1
            mode, is_woken = fcntl.LOCK_EX | fcntl.LOCK_NB, True
            self.is_gone = _try_lock(self._listed, mode, 0, self._byte)
        return is_woken

    def run(self) -> int:
        """End the jobs that are to be ended, until the program is gone or needs no guardian."""
        is_left, goes_on = False, True
        must_read = True  # a former guardian may not have done what it was asked for
        while True:
            # Before it ends, once more: a job may have begun.
            if must_read or not (goes_on or self._ending or self.is_gone):
                goes_on = self._read()
            if self._ending:
                is_left |= self._take_steps()
            elif not goes_on:
                return 1 if is_left else 0
            must_read = self.look(blocks=goes_on and not self._ending)

    def _read(self) -> bool:
        """Begin the end of jobs, or give it up; return whether any job goes on."""
        jobs = descendants.read_jobs(self._listed)
        if self.is_gone:
            self._pipes = _receive_pipes(self._channel)
            for owner, job in jobs.items():
                if owner not in self._ending:
                    self._ending[owner] = self._end(owner, job)
            return False
        for owner in self._requests.keys() | jobs.keys():
            request = jobs[owner].end if owner in jobs else 0
            if request != self._requests.pop(owner, 0):
                self._ending.pop(owner, None)
                if request:
                    self._ending[owner] = self._end(owner, jobs[owner])
            if request:
                self._requests[owner] = request
        return not jobs or any(job.end != descendants.FINAL for job in jobs.values())

    def _take_steps(self) -> bool:
        """Take a step of each end, and pause; return whether one has left something."""
        is_left, pauses = False, []
        for pipe in self._pipes:
            _drain(pipe)
        try:
            snapshot = descendants.Snapshot(is_shared=len(self._ending) > 1)
        except OSError:
            snapshot = None  # no descriptor for a moment
        for owner, steps in [*self._ending.items()]:
            try:
                pauses.append(steps.send(snapshot))
            except StopIteration as end:
                del self._ending[owner]
                is_left |= not end.value
                self._report(owner, end.value)
        if len(pauses) == len(self._ending):
            time.sleep(min(pauses, default=0))
        return is_left

    def _report(self, owner: int, is_success: bool) -> None:
        if not self.is_gone:
            words = (int(sys.argv[4]), owner, self._requests[owner], int(is_success))
            try:
                os.write(self._channel, b"%d %d %d %d" % words)
            except OSError:
                pass  # the program reads none: it has forgotten many jobs

    def _end(self, owner: int, listed: descendants.JobRow) -> Steps:
        """Return the steps of the end of a job, which have begun."""
        starting = listed.sessions.pop(descendants.STARTING, None)
        hidden = []
        if starting is not None:
            hidden = descendants.list_execs(starting.opened, self._program)
        marker = f"{self._prefix}{owner & 0xFFFFFFFF:08x}".encode("ascii")
        job = Job(marker, listed.since, listed.sessions, self._supervisor, self._hidden)
        steps = self._take_turns(job, listed, hidden)
        next(steps)
        return steps

    def _take_turns(
        self, job: Job, listed: descendants.JobRow, hidden: list[proc.ProcEntry]
    ) -> Steps:
        plan = (listed.signal, listed.grace, listed.is_ordered)
        is_ended = yield from job.end(*plan)
        if hidden:
            yield from self._wait_for_execs(hidden)
            is_ended = yield from job.end(*plan)
        return is_ended

    def _wait_for_execs(self, hidden: list[proc.ProcEntry]) -> Generator[float, object, None]:
        end = time.monotonic() + _EXEC_S
        while time.monotonic() < end:
            try:
                if not any(descendants.may_be_in_exec(one, self._program) for one in hidden):
                    return
            except OSError:
                pass  # no descriptor for a moment: look again
            yield _GRACE_SCAN_S


def _try_lock(descriptor: int, mode: int, size: int, start: int) -> bool:
    try:
        fcntl.lockf(descriptor, mode, size, start)
    except (BlockingIOError, PermissionError):  # either, fcntl(2)
        return False
    return True


def _drain(pipe: int) -> None:
    """Read what the workers have written, so that none waits or gets SIGPIPE."""
    try:
        for _ in range(_READS):
            os.read(pipe, 65536)
    except OSError:
        return  # it is empty


def _receive_pipes(descriptor: int) -> list[int]:
    """Return the ends of pipes that `KeptPipes` has sent, as far as there is room for them."""
    import _socket
    import resource

    # The supervisor may have raised its own limit later.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # a sandbox does not allow it
    pipes: list[int] = []
    try:
        receiver = _socket.socket(fileno=descriptor)
        flags = _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC
        while True:
            data, ancillary, _, _ = receiver.recvmsg(1, _socket.CMSG_SPACE(4 * 253), flags)
            for _, _, content in ancillary:
                pipes += memoryview(content).cast("i")
            if not data:
                break
    except OSError:
        pass  # there is no more
    while pipes:  # what ends the job needs some descriptors too
        spare: list[int] = []
        try:
            while len(spare) < _SPARE:
                spare.append(os.open(os.devnull, os.O_RDONLY))
            break
        except OSError:
            os.close(pipes.pop())
        finally:
            for number in spare:
                os.close(number)
    return pipes


class Job:
    """The rest of a job that is being ended."""

    def __init__(
        self,
        marker: bytes,
        since: int,
        sessions: dict[int, descendants.WorkerSession],
        supervisor: int,
        hidden: set[tuple[int, int]] | None = None,
    ) -> None:
        """Take over from the supervisor, by its pid; for the others see `Scanner`."""
        self._scanner = descendants.Scanner(marker, since, sessions, self._adopters, hidden)
        self._sessions = sessions
        self._supervisor = supervisor
        self._signalled: set[tuple[int, int]] = set()
        self._ignored = stop_order.Ignored()
        self._foreground: set[tuple[int, int]] = set()
        self._leaving = stop_order.Leaving()

    def end(self, number: int, grace: float, is_ordered: bool) -> Steps:
        """Signal what is left, in the order of a stop, and kill it after `grace` seconds.

        Yields the seconds until the next look, and gets the processes of that moment; None: they
        cannot be listed.  Ends 10 seconds after the first SIGKILL at the latest; returns whether
        nothing is left.
        Times are taken around each scan, which takes longer than any of them on a busy host.
        """
        quiet_since = time.monotonic()
        grace_until = killing_until = None
        pause = 0.0
        while True:
            snapshot = yield pause
            now = time.monotonic()
            # The first scan is one of the grace, however late it comes.
            is_grace = grace > 0 and (grace_until is None or now < grace_until)
            if not is_grace and killing_until is None:
                killing_until = now + _LIMIT_S
            try:
                found = self.find_descendants(snapshot) if snapshot is not None else None
            except OSError:
                found = None  # no descriptor for a moment: scan again
            if is_grace:
                self._signal(found or [], number, is_ordered)
            else:
                for process in found or ():
                    proc.signal_process(process, signal.SIGKILL)
            scanned = time.monotonic()
            if grace_until is None:
                grace_until = scanned + grace
            if found == []:
                if now - quiet_since >= _QUIET_S:
                    return True
            elif killing_until is not None and now >= killing_until:
                return False
            else:
                quiet_since = scanned
            left = max(grace_until - scanned, 0)
            pause = min(_GRACE_SCAN_S, left) if is_grace else _SCAN_S

    def _signal(self, processes: list[proc.ProcEntry], number: int, is_ordered: bool) -> None:
        """Signal the processes whose turn it is, each once."""
        due, known = processes, len(self._foreground)
        leaders = {process.pid for process in processes if process.pid in self._sessions}
        for process in processes:
            self._ignored.note(process, self._owner_of(process))
        ignoring = self._ignored.pids(processes, number)
        try:
            if is_ordered:
                due, _ = stop_order.next_due(
                    processes, leaders, self._owner_of, ignoring, self._foreground
                )
            now = time.monotonic()
            for process in due:
                if process.identity not in self._signalled:
                    if is_ordered:
                        is_leader = process.pid in leaders
                        if not is_leader and self._leaving.rest(process, number, now):
                            continue
                        found = stop_order.foreground_of(process.pid)
                        self._foreground.update(item.identity for item in found)
                    self._signalled.add(process.identity)
                    self._ignored.note_signal(self._owner_of(process))
                    proc.signal_process(process, number)
        except OSError:
            return  # no descriptor for a moment
        if len(self._foreground) > known:
            self._signal(processes, number, is_ordered)  # what a shell waits for, with it
        for process in processes:
            # A stopped process acts on a signal only after this, and others may need it.
            if proc.needs_continue(process, number):
                proc.signal_process(process, signal.SIGCONT)

    def _owner_of(self, process: proc.ProcEntry) -> int | None:
        return process.session if process.session in self._sessions else None

    def find_descendants(self, snapshot: descendants.Snapshot) -> list[proc.ProcEntry]:
        """Return the descendants that one scan finds.

        Raises:
            OSError: no descriptor or memory is left: scan again.
        """
        scan = self._scanner.find({}, snapshot)
        while True:
            try:
                if pause := next(scan):
                    time.sleep(pause)
            except StopIteration as end:
                found: list[proc.ProcEntry] = end.value
                return found

    def _adopters(self) -> set[int]:
        parent = os.getppid()
        if parent != self._supervisor:
            # What adopts this process adopts the orphans of the supervisor too.
            return {self._supervisor, parent}
        return {parent} | descendants.may_adopt(proc.own_pid())
