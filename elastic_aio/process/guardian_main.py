"""The guardian process: when its supervisor ends, it kills what is left of the job.

Run as `python -I -S guardian_main.py PIDFD SESSIONS MARKER SINCE`, in a session of its
own.  It waits on a pidfd of the supervisor, not on a pipe: a pipe stays open in every
child that the embedding program forks.  When the supervisor is gone it sends SIGKILL to
every descendant of the workers, again and again until none is found: a worker that was
being spawned has its marker only after its exec, and a process that forks can hide a
child from one scan of /proc (see `tree`).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_aio.process import proc_scan
else:
    # -I leaves this file's directory out of the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import proc_scan

# Seconds without a descendant before the job counts as gone.  A child that was being
# spawned when its parent was killed needs about a millisecond until its exec; on a
# busy host it may be a hundred.
_QUIET_S = 0.25
_LIMIT_S = 10.0


def main() -> int:
    """Wait for the supervisor's end, kill its job, and return the exit code."""
    supervisor, sessions, since = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    # A signal to all processes of a user must not leave the workers unguarded; the agent
    # ends its guardian with SIGKILL.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # reserved by the C library
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    poller.poll()
    kill_job(sys.argv[3].encode("ascii"), since, proc_scan.read_session_list(sessions))
    return 0


def kill_job(marker: bytes, since: int, sessions: dict[int, proc_scan.WorkerSession]) -> None:
    """Kill all descendants of the workers, for 10 seconds at most."""
    cache = proc_scan.ScanCache()
    began = quiet_since = time.monotonic()
    # Polled every 5 ms for a quarter of a second: the kernel reports no forks of other
    # processes to an unprivileged one.
    while (now := time.monotonic()) - quiet_since < _QUIET_S and now - began < _LIMIT_S:
        if kill_descendants(marker, since, sessions, cache):
            quiet_since = time.monotonic()
        time.sleep(0.005)


def kill_descendants(
    marker: bytes,
    since: int,
    sessions: dict[int, proc_scan.WorkerSession],
    cache: proc_scan.ScanCache,
) -> int:
    """Send SIGKILL to all descendants that one scan finds; return how many there were."""
    scan = proc_scan.find_descendants(marker, since, sessions, {}, cache)
    while True:
        try:
            next(scan)
        except StopIteration as end:
            descendants: list[proc_scan.ProcEntry] = end.value
            break
        except OSError:
            return 1  # an exec under way, or no descriptor for a moment: scan again
    for process in descendants:
        proc_scan.signal_process(process, signal.SIGKILL)
    return len(descendants)


if __name__ == "__main__":
    sys.exit(main())
