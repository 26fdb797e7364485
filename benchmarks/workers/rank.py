"""A worker that notes the time of what happens to it: `rank.py NOTES BEHAVIOUR [...]`.

A note is one line in the file NOTES: what, rank, attempt, monotonic nanoseconds.
Behaviours:

* `fail HOW [MEGABYTES]`: rank 0 writes so much to standard error and exits with 1 once all
  others are ready; they `receive` SIGTERM and note it, `end` by it, or do as trainers do: all
  have a child, and they `save`.  On the last attempt that is allowed, all exit with 0.
* `train`: has a child, and stays until SIGTERM, on which it saves.
* `leave`: all are ready, then all exit with 0.
* `print LINES AT_ONCE`: prints numbered lines when the file NOTES is unlocked.
* `tick LINES SECONDS`: prints the time on every line, SECONDS apart.
"""

import time

STARTED_NS = time.monotonic_ns()  # the first instruction of the worker

# ruff: noqa: E402  # the time of the other imports does not count
import fcntl
import os
import signal
import sys

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LAST_ATTEMPT = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
# torchrun polls for exits every 0.1 s; exits must not be in phase with that.
_SETTLE_S = 0.1
_SCATTER_S = 0.1
_CHECKPOINT = 1 << 20  # bytes


def main() -> None:
    """Behave as the arguments say."""
    note("started", STARTED_NS)
    match sys.argv[2:]:
        case ["fail", how, *megabytes]:
            fail(how, *map(int, megabytes))
        case ["train"]:
            train()
            note("ready")
            time.sleep(600)
        case ["leave"]:
            note("ready")
            wait_for_all("ready")
            scatter()
            note("leaves")
        case ["print", lines, at_once]:
            print_lines(int(lines), int(at_once))
        case ["tick", lines, seconds]:
            tick(int(lines), float(seconds))
        case other:
            raise SystemExit(f"unknown behaviour: {other}")
    os._exit(0)


def fail(how: str, megabytes: int = 0) -> None:
    """Let rank 0 exit with 1, and the others note SIGTERM."""
    if how == "receive":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    elif how == "save":
        train()
    note("ready")
    if ATTEMPT == LAST_ATTEMPT:
        return
    if RANK == 0:
        wait_for_all("ready")
        for _ in range(megabytes):
            os.write(
                2, b"a line of standard error of a rank that is about to fail, padded.\n" * 15384
            )
        scatter()
        note("fails")
        os._exit(1)
    if how == "receive":
        signal.sigwait([signal.SIGTERM])
        note("receives")
    else:
        time.sleep(60)


def train() -> None:
    """Start a child, which loads data, and save on SIGTERM; exit with 143, even ranks with 0."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)  # until its parent has ended
        os._exit(0)
    os.close(reader)

    def save(*_: object) -> None:
        path = f"{sys.argv[1]}-checkpoint-{RANK}"
        with open(f"{path}.new", "wb") as file:
            file.write(bytes(_CHECKPOINT))
        os.replace(f"{path}.new", path)
        note("saved")
        os._exit(143 if RANK % 2 else 0)

    signal.signal(signal.SIGTERM, save)


def print_lines(lines: int, at_once: int) -> None:
    """Print as fast as possible, `at_once` lines with each write."""
    text = [b"rank %d line %06d of a job with much output\n" % (RANK, at) for at in range(lines)]
    blocks = [b"".join(text[at : at + at_once]) for at in range(0, lines, at_once)]
    gate = os.open(sys.argv[1], os.O_RDONLY)
    note("ready")
    fcntl.flock(gate, fcntl.LOCK_SH)
    note("prints")
    for block in blocks:
        os.write(1, block)
    note("printed")


def tick(lines: int, seconds: float) -> None:
    """Print the present time on every line."""
    wait_for_all("started")
    for _ in range(lines):
        time.sleep(seconds)
        os.write(1, b"at %d\n" % time.monotonic_ns())


def note(what: str, at: int = 0) -> None:
    """Add a line to the notes; one write, so that lines stay whole."""
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    os.write(file, b"%s %d %d %d\n" % (what.encode(), RANK, ATTEMPT, at or time.monotonic_ns()))
    os.close(file)


def wait_for_all(what: str) -> None:
    """Wait until every rank of this attempt has noted `what`."""
    wanted = {b"%s %d %d" % (what.encode(), rank, ATTEMPT) for rank in range(SIZE)}
    while True:
        with open(sys.argv[1], "rb") as file:
            if wanted <= {line.rpartition(b" ")[0] for line in file}:
                return
        time.sleep(0.001)


def scatter() -> None:
    """Wait a random time, out of phase with every clock."""
    time.sleep(_SETTLE_S + _SCATTER_S * os.urandom(1)[0] / 256)


if __name__ == "__main__":
    main()
