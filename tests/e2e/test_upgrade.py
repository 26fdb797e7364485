"""The package is replaced while a job runs, as `pip install -U` does: the job goes on as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import elastic_aio
from tests.support.children import until_sync
from tests.support.cli import CLI, Running, run_program, running
from tests.support.control import own_control_dir
from tests.support.leaks import leaked_processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PACKAGE = Path(elastic_aio.__file__).parent
PROGRAM = Path(__file__).parents[1] / "support" / "exit_path.py"
ANOTHER = "raise RuntimeError('a module of another version was loaded')\n"


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


@contextmanager
def replaced(tmp_path: Path, *options: str, way: str) -> Iterator[Running]:
    """Run a job of two workers; yield it when it has been idle and its package was replaced."""
    site, notes = tmp_path / "site", tmp_path / "notes"
    shutil.copytree(PACKAGE, site / "elastic_aio", ignore=shutil.ignore_patterns("__pycache__"))
    notes.mkdir()
    script = tmp_path / "train.py"
    script.write_text("import signal\nwhile True: signal.pause()\n")
    run = ("run", "--rdzv-id=run-1", "--nproc-per-node=2", f"--log-dir={tmp_path}/logs", *options)
    argv = [sys.executable, str(PROGRAM), str(notes), *run, str(script)]
    with running(argv, env={"PYTHONPATH": str(site)}, cwd=tmp_path) as launcher:
        until_sync((notes / "idle").exists, "an idle job")
        if way == "removed":
            (site / "elastic_aio").rename(tmp_path / "removed")
        else:
            for path in (site / "elastic_aio").rglob("*.py"):
                path.write_text(ANOTHER)
            for path in (site / "elastic_aio").rglob("__pycache__"):
                shutil.rmtree(path)
        yield launcher
    until_sync(lambda: not leaked_processes(), "the end of the guardian")


def ask(*words: str) -> str:
    ended = run_program([*CLI, *words])
    assert ended.code == 0, ended.err
    return ended.out


def events() -> list[dict[str, object]]:
    return [json.loads(line) for line in ask("events", "--json").splitlines()]


def pids(launcher: Running) -> dict[str, int]:
    """Return the guardian, and the workers by rank."""
    (guardian,) = (pid for pid, line in leaked_processes().items() if "guardian_main.py" in line)
    workers = json.loads(ask("status", "--json"))["workers"]
    assert launcher.process.poll() is None
    return {"guardian": guardian} | {f"{each['rank']}": each["pid"] for each in workers}


@pytest.mark.parametrize("way", ["removed", "replaced"])
@pytest.mark.parametrize("options", [("--tee=3",), ("--preload=json",)], ids=lambda one: one[0])
def test_a_job_goes_on_as_it_began(tmp_path: Path, way: str, options: tuple[str, ...]) -> None:
    """Another installation controls it; restarts, its guardian and its report are those of old."""
    options = (*options, "--max-restarts=1", f"--events={tmp_path}/events")
    with replaced(tmp_path, *options, way=way) as launcher:
        assert "phase     running" in ask("status")
        assert "rank 1" in ask("dump")
        assert "attempt 1 runs" in ask("restart", "run-1")
        assert "sent to 2 workers" in ask("signal", "run-1", "CONT")
        before = pids(launcher)
        os.kill(before["guardian"], signal.SIGKILL)
        until_sync(lambda: "GuardianRestarted" in [one["event"] for one in events()], "a guardian")
        os.kill(before["1"], signal.SIGKILL)
        until_sync(lambda: json.loads(ask("status", "--json"))["attempt"] == 2, "a restart")
        until_sync(lambda: "running" in ask("status"), "the workers")
        assert "attempt 2 follows" in ask("why")
        os.kill(pids(launcher)["0"], signal.SIGKILL)
        assert launcher.wait() == 137
        assert "Root Cause" in launcher.err
        assert "another version" not in launcher.err
        assert "Traceback" not in launcher.err.replace("traceback :", "")
        recorded = (tmp_path / "events").read_text().splitlines()
        assert json.loads(recorded[-1])["event"] == "JobFinished"


def test_a_guardian_of_a_replaced_package_ends_the_job(tmp_path: Path) -> None:
    """The one that was started after the package was replaced."""
    with replaced(tmp_path, way="replaced") as launcher:
        before = pids(launcher)
        os.kill(before["guardian"], signal.SIGKILL)
        until_sync(lambda: "GuardianRestarted" in [one["event"] for one in events()], "a guardian")
        launcher.send(signal.SIGKILL)
        launcher.wait()
