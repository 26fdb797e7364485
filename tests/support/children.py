"""Workers as named one-liners, and ways to wait for them.

A worker reports its state by files in the directory `$NOTES`: a test waits until they
exist.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from elastic_aio.errors import SpecError
from elastic_aio.process.descendants import read_jobs
from elastic_aio.spec.checks import UsageError
from tests.support.leaks import alive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_aio import Agent
    from elastic_aio.process.children import Child, ChildExit
    from elastic_aio.process.descendants import WorkerSession
    from elastic_aio.process.guardian_process import GuardedJob

T = TypeVar("T")

# Seconds after which a wait has failed: far more than a loaded host needs.
DEADLINE_S = 30.0

SLEEPER = ["sleep", "99"]


def shell(script: str) -> list[str]:
    """Return a worker that runs a shell script."""
    return ["bash", "-c", script]


def python(code: str) -> list[str]:
    """Return a worker that runs Python code, without the site modules."""
    return [sys.executable, "-S", "-u", "-c", code]


_NOTE = 'echo $$ > "$NOTES/.$RANK"; mv "$NOTES/.$RANK" "$NOTES/$RANK"; '


def noting(script: str = "exec sleep 99", *, first: str = "") -> list[str]:
    """Return a worker that runs `first`, notes its pid in `$NOTES/<rank>`, and runs `script`."""
    return shell(f"{first}\n{_NOTE} {script}")


def ignoring_signals(script: str = "exec sleep 99") -> list[str]:
    """Return a worker that ignores all stop signals; so do its children."""
    return noting(script, first="trap '' TERM INT HUP QUIT USR1 USR2")


def trapping(script: str) -> list[str]:
    """Return a worker that runs `script` on a stop signal."""
    return noting("sleep 99 & wait; wait", first=f"trap '{script}' TERM INT HUP QUIT")


# Writes the signals that it gets to `$NOTES/log`, and goes on.
SIGNAL_LOGGER = python(
    """
import os, signal
log = os.open(os.environ["NOTES"] + "/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def log_signal(number, frame):
    os.write(log, (signal.Signals(number).name + "\\n").encode())
for name in "HUP", "INT", "QUIT", "TERM", "USR1", "USR2":
    signal.signal(getattr(signal, "SIG" + name), log_signal)
notes, rank = os.environ["NOTES"], os.environ["RANK"]
with open(f"{notes}/.{rank}", "w") as file:
    file.write(str(os.getpid()))
# Not `signal.pause`: a signal just before it would be handled only with the next one.
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
os.rename(f"{notes}/.{rank}", f"{notes}/{rank}")
while True:
    os.read(reader, 1)
"""
)
# Ends with code 0 on a stop signal, and writes its rank to `$NOTES/stopped`.
POLITE = trapping('echo $RANK >> "$NOTES/stopped"; exit 0')


def restart_count_exits(*codes: int) -> list[str]:
    """Return a worker whose exit code is the next of `codes` on each attempt."""
    cases = " ".join(f"{attempt}) exit {code};;" for attempt, code in enumerate(codes))
    return shell(f"case $TORCHELASTIC_RESTART_COUNT in {cases} esac")


async def until(condition: Callable[[], T], what: str = "") -> T:
    """Poll until a condition holds, with a deadline; return its value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"timed out: {what or condition}"
        await asyncio.sleep(0.003)
    return value


async def until_ready(agent: Agent) -> None:
    """Wait until all workers of an agent run."""
    async for _ in agent.events():
        if agent.status(usage=False).is_ready:
            return


def until_sync(condition: Callable[[], T], what: str = "", seconds: float = DEADLINE_S) -> T:
    """Poll, without a loop, until a condition holds; return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"timed out: {what or condition}"
        time.sleep(0.003)
    return value


async def end_of(child: Child) -> ChildExit:
    """Wait until a child has ended."""
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.shield(child.exited)


def wait_for_end(pidfd: int) -> None:
    """Wait, without a loop, until the process of a pidfd has ended, and close it."""
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "it still runs"
    os.close(pidfd)


def line_from(descriptor: int) -> str:
    """Read one line that a child prints, without a loop."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "nothing was printed"
        line += os.read(descriptor, 1)
    return line.decode().rstrip("\n")


def noted(directory: Path, count: int) -> Callable[[], list[int]]:
    """Return a condition: `count` workers have noted their pids, in order of rank."""

    def pids() -> list[int]:
        paths = [directory / str(rank) for rank in range(count)]
        return [int(path.read_text()) for path in paths] if all(map(Path.exists, paths)) else []

    return pids


def none_alive(pids: Iterable[int]) -> Callable[[], bool]:
    """Return a condition: no process of `pids` runs."""
    pids = list(pids)
    return lambda: not any(map(alive, pids))


@contextmanager
def file_console(directory: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of the files `out` and `err` of a directory."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptors = [os.open(directory / name, flags, 0o600) for name in ("out", "err")]
    try:
        yield descriptors[0], descriptors[1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def assert_one_line(make: Callable[[], object]) -> None:
    """Check that a value is made and can be printed, or is refused in one short line."""
    try:
        made = make()
    except (SpecError, UsageError) as error:
        text = str(error)
    else:
        assert repr(made)
        return
    assert "\n" not in text
    assert len(text) < 400


def listed_sessions(job: GuardedJob) -> dict[int, WorkerSession]:
    """Return what the guardian reads about a job: its sessions by number."""
    return read_jobs(job.program.list.descriptor)[job.owner].sessions
