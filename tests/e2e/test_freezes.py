"""Launcher and workers are frozen and go on: a cgroup's freezer, a virtual machine, SIGSTOP."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import until_sync
from tests.support.cli import REPOSITORY, noted_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Reports until it has made 20 steps since the test says that it may end; then saves, if asked to.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from elastic_aio import worker
notes, asked = Path(os.environ["NOTES"]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))

Path(notes / ".0").write_text(str(os.getpid()))
os.rename(notes / ".0", notes / "0")
if "--late" not in sys.argv:
    worker.ready()
step = left = 20
while left and not asked:
    left -= (notes / "thawed").exists()
    step += 1
    if "--silent" not in sys.argv:
        worker.progress(step)
    time.sleep(0.05)
    if "--late" in sys.argv and left == 10:
        worker.ready()
if asked:
    (notes / "asked").touch()
    for _ in range(20):
        time.sleep(0.05)
    (notes / "saved").touch()
    sys.exit(143)
"""
LIMIT_S = 1.5
FROZEN_S = 3.0


def job_of(directory: Path, words: Iterable[str], *options: object) -> Any:
    worker = [sys.executable, "-c", WORKER, *words]
    env = {"PYTHONPATH": str(REPOSITORY)}
    return noted_job(directory, 1, worker, *options, env=env)


def freeze(pids: list[int]) -> None:
    """Freeze processes, and thaw them in their order."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)  # what is frozen makes no event
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("frozen", ["launcher, worker", "worker, launcher", "launcher"])
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], ["--heartbeat-timeout", LIMIT_S]),
        ([], ["--progress-timeout", LIMIT_S]),
        (["--late"], ["--ready", "notify", "--ready-timeout", LIMIT_S]),
    ],
)
def test_a_frozen_job_has_been_silent_for_no_time(
    words: list[str], options: list[object], frozen: str, tmp_path: Path
) -> None:
    with job_of(tmp_path, words, *options) as (job, (pid,)):
        freeze([job.pid if one == "launcher" else pid for one in frozen.split(", ")])
        (tmp_path / "thawed").touch()
        assert job.wait() == 0
        assert "attempt 0 failed" not in job.err


def test_a_silent_worker_is_found_after_a_freeze(tmp_path: Path) -> None:
    """Its deadline goes on."""
    options = ["--heartbeat-timeout", LIMIT_S]
    with job_of(tmp_path, ["--silent"], *options) as (job, (pid,)):
        freeze([job.pid, pid])
        thawed = time.monotonic()
        job.wait_err("no heartbeat for 1.5 s")
        assert time.monotonic() - thawed < LIMIT_S + 5
        assert job.wait() == 1


@pytest.mark.parametrize("first", ["launcher", "worker"])
def test_a_frozen_job_has_its_grace(first: str, tmp_path: Path) -> None:
    with job_of(tmp_path, [], "--shutdown-timeout", 2) as (job, (pid,)):
        job.send(signal.SIGTERM)
        until_sync((tmp_path / "asked").exists)
        freeze([job.pid, pid] if first == "launcher" else [pid, job.pid])
        assert job.wait() == 143
        assert (tmp_path / "saved").exists()
