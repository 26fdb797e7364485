"""The guardian process: when its supervisor is gone, it ends what is left of the job.

Run as `python -I -S guardian_main.py REPORT SESSIONS MARKER SINCE SIGNAL GRACE`, in a
session of its own.  It waits until it gets the lock of the session list, which the
supervisor holds (F_SETLK of fcntl(2)).  The kernel releases such a lock when the process
ends, by SIGKILL too, and when it executes another program, because the descriptor is
closed on exec.  A pidfd does not notice an exec, and a pipe stays open in every child
that the embedding program forks; a lock is not inherited by forks.

Then all descendants of the workers get SIGNAL, and SIGKILL after GRACE seconds, again and
again until none is found: a process that forks can hide a child from one scan of /proc
(see `tree`).

A worker that was being started has the job's marker only after its exec, which can take
long on a slow file system; until then it shows the supervisor's program and stack.  So if
the session list says that a worker was being started, the guardian waits for the exec of
each process that shows these, or no arguments, and is not older.  It signals none of them
before: the embedding program may have forked it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from elastic_aio.process import proc_scan, session_list
else:
    # The public module makes enumerations: a third of this process's start.
    import _signal as signal

    # -I leaves this file's directory out of the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import proc_scan
    import session_list

# Seconds without a descendant before the job counts as gone.
_QUIET_S = 0.25
_LIMIT_S = 10.0
# Seconds for which execs are waited for.
_EXEC_S = 60.0
# Seconds between two scans, before and after SIGKILL is sent: the kernel reports no forks
# of other processes to an unprivileged one.
_GRACE_SCAN_S = 0.02
_SCAN_S = 0.005


def main() -> int:
    """Wait for the supervisor's end, end its job; return 1 if some of it is left."""
    report, sessions, since, number = (int(sys.argv[index]) for index in (1, 2, 4, 5))
    # A signal to all processes of a user must not leave the workers unguarded; the agent
    # ends its guardian with SIGKILL.
    for ignored in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(ignored, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # reserved by the C library
    _check_kernel(sessions)
    program = _program_of_parent()
    if _is_locked(sessions):  # else the supervisor has ended by now
        os.write(report, b"!")
        os.close(report)
        fcntl.lockf(sessions, fcntl.LOCK_EX)
    workers = session_list.read_session_list(sessions)
    starting = workers.pop(session_list.STARTING, None)
    hidden = [] if starting is None else proc_scan.list_execs(starting.opened, program)
    marker, grace = sys.argv[3].encode("ascii"), float(sys.argv[6])
    is_ended = end_job(marker, since, workers, number, grace)
    if hidden:
        _wait_for_execs(hidden, program)
        is_ended = end_job(marker, since, workers, number, grace)
    return 0 if is_ended else 1


def _check_kernel(sessions: int) -> None:
    """Use what the end of the job will need, so that a lack is an error at the start."""
    descriptor = os.pidfd_open(os.getpid())
    signal.pidfd_send_signal(descriptor, 0)
    os.close(descriptor)
    session_list.read_session_list(sessions)


def _program_of_parent() -> tuple[int, int, int] | None:
    me = proc_scan.read_process(int(os.readlink("/proc/self")))
    return None if me is None else proc_scan.program_of(me.parent)


def _wait_for_execs(
    hidden: list[proc_scan.ProcEntry], program: tuple[int, int, int] | None
) -> None:
    end = time.monotonic() + _EXEC_S
    while time.monotonic() < end:
        try:
            if not any(proc_scan.may_be_in_exec(process, program) for process in hidden):
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


def end_job(
    marker: bytes,
    since: int,
    sessions: dict[int, session_list.WorkerSession],
    number: int,
    grace: float,
) -> bool:
    """Signal all descendants of the workers, and after `grace` seconds kill what is left.

    Ends 10 seconds after the first SIGKILL at the latest; returns whether nothing is left.
    The times are taken around each scan: on a busy host one takes longer than any of them.
    """
    cache = proc_scan.ScanCache()
    signalled: set[tuple[int, int]] = set()
    quiet_since = time.monotonic()
    grace_until = killing_until = None
    while True:
        now = time.monotonic()
        # The first scan is one of the grace, however late it comes.
        is_grace = grace > 0 and (grace_until is None or now < grace_until)
        if not is_grace and killing_until is None:
            killing_until = now + _LIMIT_S
        try:
            descendants = find_descendants(marker, since, sessions, cache)
        except OSError:
            descendants = None  # no descriptor for a moment: scan again
        for process in descendants or ():
            if not is_grace:
                proc_scan.signal_process(process, signal.SIGKILL)
            elif process.identity not in signalled:
                signalled.add(process.identity)
                proc_scan.signal_process(process, number)
                # A stopped process acts on a signal only after this one.
                proc_scan.signal_process(process, signal.SIGCONT)
        scanned = time.monotonic()
        if grace_until is None:
            grace_until = scanned + grace
        if descendants == []:
            if now - quiet_since >= _QUIET_S:
                return True
        elif killing_until is not None and now >= killing_until:
            return False
        else:
            quiet_since = scanned
        left = max(grace_until - scanned, 0)
        time.sleep(min(_GRACE_SCAN_S, left) if is_grace else _SCAN_S)


def find_descendants(
    marker: bytes,
    since: int,
    sessions: dict[int, session_list.WorkerSession],
    cache: proc_scan.ScanCache,
) -> list[proc_scan.ProcEntry]:
    """Return the descendants that one scan finds.

    Raises:
        OSError: no descriptor or memory is left: scan again.
    """
    scan = proc_scan.find_descendants(marker, since, sessions, {}, cache)
    while True:
        try:
            if pause := next(scan):
                time.sleep(pause)
        except StopIteration as end:
            descendants: list[proc_scan.ProcEntry] = end.value
            return descendants


if __name__ == "__main__":
    sys.exit(main())
