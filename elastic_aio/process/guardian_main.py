"""The guardian process: when its supervisor is gone, it ends what is left of the job.

Run as `python -I -S guardian_main.py REPORT SESSIONS PIPES MARKER SINCE SIGNAL GRACE SCOPE`, in a
session of its own.  It waits until it gets the lock of the session list, which the supervisor holds
(F_SETLK of fcntl(2)).  The kernel releases such a lock when the process ends, by SIGKILL too, and
when it executes another program, because the descriptor is closed on exec.  A pidfd does not notice
an exec, and a pipe stays open in every child that the embedding program forks; forks do not inherit
a lock.

Then the leaders of the workers get SIGNAL, their descendants get it after them (`stop_order`; with
the SCOPE "all" at once), and all get SIGKILL after GRACE seconds, again and again until none is
found (see `tree`).

The supervisor was the reader of the workers' pipes.  A worker that prints while it saves would end
by SIGPIPE, so the pipes stay open (`KeptPipes`), and are read here until the job has ended.

A worker that was being started has the job's marker only after its exec, which can take long on a
slow file system; until then it shows the supervisor's program and stack.  If the session list says
that a worker was being started, the guardian therefore waits for the exec of each process that
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

    from elastic_aio.process import descendants, proc, stop_order
else:
    # The public module makes enumerations: a third of this process's start.
    import _signal as signal

    # -I leaves this file's directory out of the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
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
    """Wait for the supervisor's end, end its job; return 1 if some of it is left."""
    report, sessions, pipes, since, number = (int(sys.argv[index]) for index in (1, 2, 3, 5, 6))
    # A signal to all processes of a user must not leave the workers unguarded; the agent
    # ends its guardian with SIGKILL.
    for ignored in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(ignored, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # reserved by the C library
    _check_kernel(sessions)
    supervisor = os.getppid()
    me = proc.read_process(proc.own_pid())
    program = None if me is None else proc.program_of(me.parent)
    if _is_locked(sessions):  # else the supervisor has ended by now
        os.write(report, b"!")
        os.close(report)
        # Now: no worker waits, and their files may be replaced later.
        import _socket  # noqa: F401
        import resource  # noqa: F401

        fcntl.lockf(sessions, fcntl.LOCK_EX)
    workers = descendants.read_session_list(sessions)
    starting = workers.pop(descendants.STARTING, None)
    hidden = [] if starting is None else descendants.list_execs(starting.opened, program)
    marker, grace = sys.argv[4].encode("ascii"), float(sys.argv[7])
    is_ordered = sys.argv[8] != "all"
    # A supervisor that goes on reads them itself.
    is_gone = os.getppid() != supervisor or proc.program_of(supervisor) != program
    job = Job(marker, since, workers, supervisor, _receive_pipes(pipes) if is_gone else [])
    is_ended = job.end(number, grace, is_ordered)
    if hidden:
        _wait_for_execs(hidden, program)
        is_ended = job.end(number, grace, is_ordered)
    return 0 if is_ended else 1


def _check_kernel(sessions: int) -> None:
    """Use what the end of the job will need, so that a lack is an error at the start."""
    descriptor = os.pidfd_open(os.getpid())
    signal.pidfd_send_signal(descriptor, 0)
    os.close(descriptor)
    descendants.read_session_list(sessions)


def _wait_for_execs(hidden: list[proc.ProcEntry], program: tuple[int, int, int] | None) -> None:
    end = time.monotonic() + _EXEC_S
    while time.monotonic() < end:
        try:
            if not any(descendants.may_be_in_exec(process, program) for process in hidden):
                return
        except OSError:
            pass  # no descriptor for a moment: look again
        time.sleep(_GRACE_SCAN_S)


def _is_locked(sessions: int) -> bool:
    try:
        fcntl.lockf(sessions, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either, fcntl(2)
        return True
    return False


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
    """The rest of a job whose supervisor is gone."""

    def __init__(
        self,
        marker: bytes,
        since: int,
        sessions: dict[int, descendants.WorkerSession],
        supervisor: int,
        pipes: list[int],
    ) -> None:
        """Take over from the supervisor, by its pid, and the ends of `pipes` that it has read."""
        self._scanner = descendants.Scanner(marker, since, sessions, self._adopters)
        self._sessions = sessions
        self._supervisor = supervisor
        self._pipes = pipes
        self._signalled: set[tuple[int, int]] = set()
        self._foreground: set[tuple[int, int]] = set()
        self._readers: dict[tuple[int, int], float] = {}

    def end(self, number: int, grace: float, is_ordered: bool) -> bool:
        """Signal what is left, in the order of a stop, and kill it after `grace` seconds.

        Ends 10 seconds after the first SIGKILL at the latest; returns whether nothing is left.
        Times are taken around each scan, which takes longer than any of them on a busy host.
        """
        quiet_since = time.monotonic()
        grace_until = killing_until = None
        while True:
            self._drain()
            now = time.monotonic()
            # The first scan is one of the grace, however late it comes.
            is_grace = grace > 0 and (grace_until is None or now < grace_until)
            if not is_grace and killing_until is None:
                killing_until = now + _LIMIT_S
            try:
                found = self.find_descendants()
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
            time.sleep(min(_GRACE_SCAN_S, left) if is_grace else _SCAN_S)

    def _signal(self, processes: list[proc.ProcEntry], number: int, is_ordered: bool) -> None:
        """Signal the processes whose turn it is, each once."""
        due = processes
        leaders = {process.pid for process in processes if process.pid in self._sessions}
        try:
            if is_ordered:
                due, _ = stop_order.next_due(
                    processes, leaders, self._owner_of, number, self._foreground
                )
            now = time.monotonic()
            for process in due:
                if process.identity not in self._signalled:
                    if is_ordered:
                        is_leader = process.pid in leaders
                        if not is_leader and stop_order.is_draining(process, self._readers, now):
                            continue
                        found = stop_order.foreground_of(process.pid)
                        self._foreground.update(item.identity for item in found)
                    self._signalled.add(process.identity)
                    proc.signal_process(process, number)
        except OSError:
            return  # no descriptor for a moment
        for process in processes:
            # A stopped process acts on a signal only after this, and others may need it.
            if proc.needs_continue(process, number):
                proc.signal_process(process, signal.SIGCONT)

    def _owner_of(self, process: proc.ProcEntry) -> int | None:
        return process.session if process.session in self._sessions else None

    def find_descendants(self) -> list[proc.ProcEntry]:
        """Return the descendants that one scan finds.

        Raises:
            OSError: no descriptor or memory is left: scan again.
        """
        scan = self._scanner.find({})
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

    def _drain(self) -> None:
        """Read what the workers have written, so that none waits or gets SIGPIPE."""
        for descriptor in self._pipes:
            try:
                for _ in range(_READS):
                    os.read(descriptor, 65536)
            except OSError:
                continue  # it is empty


if __name__ == "__main__":
    sys.exit(main())
