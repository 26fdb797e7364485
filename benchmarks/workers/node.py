"""A worker on one of many nodes, which notes what happens to it: `node.py NOTES NODE`.

A note is one line in the file NOTES: what, node, pid, rank, world size, port at which
the workers meet, monotonic nanoseconds.  It notes that it is `born`, that it is `ready`
for signals, and that it `hears` SIGTERM, of which it then dies.
"""

import time

BORN = time.monotonic_ns()  # the first instruction of ours

# ruff: noqa: E402  # what is imported later does not count
import os
import signal
import sys


def main() -> None:
    """Stay until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    note("born", BORN)
    note("ready")
    signal.sigwait([signal.SIGTERM])
    note("hears")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def note(what: str, at: int = 0) -> None:
    """Add a line to the notes; one write, so that lines stay whole."""
    path, node = sys.argv[1:3]
    place = [os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    words = [what, node, str(os.getpid()), *place, str(at or time.monotonic_ns())]
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(file, " ".join(words).encode() + b"\n")
    os.close(file)


if __name__ == "__main__":
    main()
