"""Workers as named one-liners, and ways to wait for what they do.

A worker tells the test what it does by files in the folder `$NOTES`: their
appearance is the event to wait for.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from elastic_aio.logs.sink import Console, open_sink
from tests.support.traces import alive

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

# Seconds after which a wait has failed: far more than a loaded machine needs.
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


def deaf(script: str = "exec sleep 99") -> list[str]:
    """Return a worker that ignores what asks it to stop, its children too."""
    return noting(script, first="trap '' TERM INT HUP QUIT USR1 USR2")


def trapping(script: str) -> list[str]:
    """Return a worker that runs `script` when it is asked to stop."""
    return noting("sleep 99 & wait; wait", first=f"trap '{script}' TERM INT HUP QUIT")


# Says in `$NOTES/log` which signals it gets, and goes on.
SIGNAL_LOGGER = python(
    """
import os, signal
log = os.open(os.environ["NOTES"] + "/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def tell(number, frame):
    os.write(log, (signal.Signals(number).name + "\\n").encode())
for name in "HUP", "INT", "QUIT", "TERM", "USR1", "USR2":
    signal.signal(getattr(signal, "SIG" + name), tell)
notes, rank = os.environ["NOTES"], os.environ["RANK"]
with open(f"{notes}/.{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{notes}/.{rank}", f"{notes}/{rank}")
while True:
    signal.pause()
"""
)
# Ends with code 0 when it is asked to stop, and says so in `$NOTES/stopped`.
POLITE = trapping('echo $RANK >> "$NOTES/stopped"; exit 0')


def restart_count_exits(*codes: int) -> list[str]:
    """Return a worker whose exit code is the next of `codes` on each attempt."""
    cases = " ".join(f"{attempt}) exit {code};;" for attempt, code in enumerate(codes))
    return shell(f"case $TORCHELASTIC_RESTART_COUNT in {cases} esac")


async def until(condition: Callable[[], T], what: str = "") -> T:
    """Wait until a condition holds, in small steps with a deadline; return its value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"this never happened: {what or condition}"
        await asyncio.sleep(0.003)
    return value


def until_sync(condition: Callable[[], T], what: str = "", seconds: float = DEADLINE_S) -> T:
    """Wait, without a loop, until a condition holds; return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"this never happened: {what or condition}"
        time.sleep(0.003)
    return value


def noted(folder: Path, count: int) -> Callable[[], list[int]]:
    """Return a condition: `count` workers have noted their pids, in order of rank."""

    def pids() -> list[int]:
        paths = [folder / str(rank) for rank in range(count)]
        return [int(path.read_text()) for path in paths] if all(map(Path.exists, paths)) else []

    return pids


def none_alive(pids: Iterable[int]) -> Callable[[], bool]:
    """Return a condition: none of these processes runs."""
    listed = list(pids)
    return lambda: not any(map(alive, listed))


@contextmanager
def file_console(folder: Path) -> Iterator[Console]:
    """Give a console whose streams are the files `out` and `err` of a folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptors = [os.open(folder / name, flags, 0o600) for name in ("out", "err")]
    console = Console(open_sink("stdout", descriptors[0]), open_sink("stderr", descriptors[1]))
    try:
        yield console
    finally:
        console.close()
        for descriptor in descriptors:
            os.close(descriptor)
