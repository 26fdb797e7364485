"""A worker on one of many nodes, which notes what happens to it.

A note is one line in the pipe `$NODE_DIRECTORY/notes`: what, node, pid, rank, world size,
master port, monotonic nanoseconds.  The worker notes that it has `started`, that it is
`ready` for signals, and that it `receives` SIGTERM.  It then saves, and exits with 143; its child,
which would load data, ends with it.
"""

import time

STARTED_NS = time.monotonic_ns()  # the first instruction of the worker

# ruff: noqa: E402  # the time of the other imports does not count
import os
import signal


def main() -> None:
    """Stay until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a launcher forwards no signal otherwise
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    note("started", STARTED_NS)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)  # until its parent has ended
        os._exit(0)
    note("ready")
    signal.sigwait([signal.SIGTERM])
    note("receives")
    with open(f"{os.environ['NODE_DIRECTORY']}/checkpoint-{os.getpid()}", "wb") as file:
        file.write(bytes(1 << 20))
    os._exit(143)


def note(what: str, at: int = 0) -> None:
    """Write a line; one write, so that lines stay whole."""
    env = os.environ
    place = [env.get(name, "0") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    words = [what, env["NODE_NAME"], str(os.getpid()), *place, str(at or time.monotonic_ns())]
    file = os.open(f"{env['NODE_DIRECTORY']}/notes", os.O_WRONLY)
    os.write(file, " ".join(words).encode() + b"\n")
    os.close(file)


if __name__ == "__main__":
    main()
