"""A launcher that is killed while it starts functions leaves none of them."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import noted, until_sync
from tests.support.cli import running
from tests.support.leaks import leaked_processes

# Is killed when its first worker has been started, before this worker is on the session list;
# with "hold" another fork of it keeps open what it had open.
KILLED_BEFORE_LISTING = """
import os, signal, sys
from elastic_aio import LaunchSpec, run
from elastic_aio.process.tree import ProcessTree
from tests.support import functions

notes, method, hold = sys.argv[1:]

def be_killed(tree, leader):
    if hold and os.fork() == 0:
        functions.note_and_sleep(notes)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    ProcessTree.add = be_killed
    os.environ["RANK"] = "0"
    run(LaunchSpec(functions.sleep, start_method=method))
"""

KILLED_AT_RANDOM = """
import sys
from elastic_aio import LaunchSpec, run
from tests.support import functions

ballast = bytearray(100 << 20)  # a fork copies the tables of its pages
for offset in range(0, len(ballast), 4096):
    ballast[offset] = 1
if __name__ == "__main__":
    print("ready", flush=True)
    run(LaunchSpec(functions.sleep, start_method=sys.argv[1], nproc_per_node=16))
"""


def running_launcher(code: str, *args: object) -> Any:
    return running([sys.executable, "-c", code, *map(str, args)])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_that_is_not_listed_yet_does_not_stay(method: str, tmp_path: Path) -> None:
    """It has the job's marker; or it waits, before it runs the function, until it is listed."""
    with running_launcher(KILLED_BEFORE_LISTING, tmp_path, method, "") as launcher:
        assert launcher.wait() == 128 + signal.SIGKILL
        until_sync(lambda: not leaked_processes(), "the end of the worker", 10)


@pytest.mark.slow
def test_a_forked_worker_ends_though_a_pipe_of_its_parent_is_open(tmp_path: Path) -> None:
    """Other forks of the program hold the end of the pipe on which the worker waits."""
    with running_launcher(KILLED_BEFORE_LISTING, tmp_path, "fork", "hold") as launcher:
        assert launcher.wait() == 128 + signal.SIGKILL
        (holder,) = until_sync(noted(tmp_path, 1))
        try:
            until_sync(lambda: set(leaked_processes()) == {holder}, "the end of the worker", 10)
        finally:
            os.kill(holder, signal.SIGKILL)
    until_sync(lambda: not leaked_processes())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_launcher_killed_at_a_random_moment_leaves_no_worker(method: str) -> None:
    """While 16 workers are being started."""
    generator = random.Random(time.time_ns())
    for _ in range(int(os.environ.get("ELASTIC_AIO_KILLS", "5"))):
        with running_launcher(KILLED_AT_RANDOM, method) as launcher:
            launcher.wait_out("ready")
            end = time.monotonic() + generator.uniform(0.02, 0.3)
            while time.monotonic() < end:
                pass  # a random moment, so there is no event to wait for
            launcher.send(signal.SIGKILL)
            launcher.wait()
            until_sync(lambda: not leaked_processes(), "the end of all workers", 10)
