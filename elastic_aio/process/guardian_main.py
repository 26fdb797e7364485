"""The guardian: waits for its supervisor to die, then ends what is left of the job.

Run as `python -I -S guardian_main.py PIDFD ROSTER MARKER SINCE`, in a session of
its own.  It waits on a pidfd of the supervisor, not on a pipe: a pipe stays open
in every child that the embedding program forks.  When the supervisor is gone it
sends SIGKILL to every descendant of the workers, again and again until none is
found: a worker that was in the middle of being spawned shows its marker only
after its exec, and a forking process can hide a child from one look at `/proc`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_aio.process import roster, sweep
else:
    # -I leaves this file's folder out of the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import roster
    import sweep

# Seconds without a find before the job counts as gone.  A child that was being
# spawned when its parent was killed needs about a millisecond until its exec; a
# busy machine may make that a hundred.
_QUIET_S = 0.25
_LIMIT_S = 10.0


def main() -> int:
    """Wait for the supervisor's death, end its job, and return the exit code."""
    supervisor, listing, since = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    _ignore_signals()
    waiting = select.poll()
    waiting.register(supervisor, select.POLLIN)
    waiting.poll()
    end_job(sys.argv[3].encode("ascii"), since, roster.read_roster(listing))
    return 0


def end_job(marker: bytes, since: int, listing: bytes) -> None:
    """Kill every descendant of the workers in `listing`, for 10 seconds at most."""
    sessions = {
        number: sweep.Session(number, opened, closed)
        for number, opened, closed in roster.parse_roster(listing)
    }
    elders = sweep.Elders()
    began = quiet_since = time.monotonic()
    # A poll of 5 ms for a quarter of a second, since no event tells that a stranger
    # has appeared: the kernel reports no forks to an unprivileged process.
    while (now := time.monotonic()) - quiet_since < _QUIET_S and now - began < _LIMIT_S:
        if kill_descendants(marker, since, sessions, elders):
            quiet_since = time.monotonic()
        time.sleep(0.005)


def kill_descendants(
    marker: bytes, since: int, sessions: dict[int, sweep.Session], elders: sweep.Elders
) -> int:
    """Send SIGKILL to all that one look finds; return how many there were."""
    looking = sweep.find_descendants(marker, since, sessions, elders=elders)
    while True:
        try:
            next(looking)
        except StopIteration as done:
            found: list[sweep.Process] = done.value
            break
        except OSError:
            return 1  # an exec under way, or no descriptor for a moment: look again
    for process in found:
        try:
            descriptor = sweep.open_pidfd(process)
        except OSError:
            continue  # no descriptor left: the next look tries again
        if descriptor is not None:
            sweep.send(descriptor, signal.SIGKILL)
            os.close(descriptor)
    return len(found)


def _ignore_signals() -> None:
    # A signal meant for the whole machine's workers must not leave them unguarded;
    # the agent ends its guardian with SIGKILL.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # reserved by the C library


if __name__ == "__main__":
    sys.exit(main())
