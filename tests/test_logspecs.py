"""Plug-ins that lay out the logs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic_aio import JobFailed, LaunchSpec, LogSpec, launch
from elastic_aio.logs.paths import StreamPlan, StreamTarget, plan_logs
from elastic_aio.logspecs import DefaultLogsSpecs, LogsDest, LogsSpecs, LogsWorker
from tests.support.children import file_console, shell
from tests.support.cli import run_cli

PLUG_IN = '''
from elastic_aio.logspecs import LogsDest, LogsSpecs

class Flat(LogsSpecs):
    """All in one folder."""

    __slots__ = ()

    def plan(self, worker):
        path = f"{self.log_dir}/flat/{worker.attempt}-{worker.local_rank}.txt"
        return LogsDest(stdout=path, stderr="/dev/null")
'''


class Flat(LogsSpecs):
    """Streams of all workers in one folder."""

    __slots__ = ()

    def plan(self, worker: LogsWorker) -> LogsDest:
        name = f"{self.log_dir}/flat/{worker.attempt}-{worker.local_rank}"
        shown = frozenset({"stderr"})
        return LogsDest(f"{name}.out", f"{name}.err", f"{worker.folder}/error.json", shown)


class Wrong(LogsSpecs):
    """Cannot decide."""

    __slots__ = ()

    def plan(self, worker: LogsWorker) -> LogsDest:
        raise LookupError("where to?")


def test_the_plan_is_pure() -> None:
    """A value in, a value out; None inherits and /dev/null drops."""

    class Mixed(LogsSpecs):
        __slots__ = ()

        def plan(self, worker: LogsWorker) -> LogsDest:
            return LogsDest(stderr=os.devnull)

    logs = plan_logs(Mixed(), "/run", 2, 1)
    assert logs.stdout == StreamPlan(StreamTarget.CONSOLE)
    assert logs.stderr == StreamPlan(StreamTarget.NOWHERE)
    assert (logs.folder, logs.error_file) == ("/run/attempt_2/1", "")
    assert plan_logs(DefaultLogsSpecs(redirects=3), "/r", 0, 0) == plan_logs(
        LogSpec(redirects=3), "/r", 0, 0
    )
    with pytest.raises(NotImplementedError):
        plan_logs(LogsSpecs(), "/run", 0, 0)


async def test_a_plug_in_lays_out_the_files(tmp_path: Path) -> None:
    """Its folders are made, its files written, and what it shows is shown."""
    with file_console(tmp_path) as console:
        spec = LaunchSpec(
            shell("echo out $RANK; echo err $RANK >&2"),
            nproc_per_node=2,
            logs=Flat(log_dir=tmp_path / "logs"),
        )
        result = await launch(spec, console=console)
    folder = tmp_path / "logs" / "flat"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "0-0.out": "out 0\n",
        "0-0.err": "err 0\n",
        "0-1.out": "out 1\n",
        "0-1.err": "err 1\n",
    }
    shown = sorted((tmp_path / "err").read_text().splitlines())
    assert shown == ["[default0]:err 0", "[default1]:err 1"]
    assert result.attempts[0].workers[0].stdout_path == str(folder / "0-0.out")


async def test_a_plug_in_that_fails() -> None:
    """The job fails with one line, and is not tried again."""
    with pytest.raises(JobFailed, match=r"the plan of the logs failed: LookupError: where to\?"):
        await launch(LaunchSpec(["true"], logs=Wrong(), max_restarts=3))


def test_a_plug_in_is_found_by_its_name(tmp_path: Path) -> None:
    """An entry point of an installed distribution; other names are refused."""
    (tmp_path / "flat_logs.py").write_text(PLUG_IN)
    info = tmp_path / "flat_logs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-logs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[elastic_aio.logs_specs]\nflat = flat_logs:Flat\nbroken = flat_logs:Nothing\n"
    )
    path = f"{tmp_path}:{Path(__file__).parent.parent}"
    words = ["--log-dir", tmp_path / "logs", "--no-python", sys.executable, "-c", "print('hi')"]
    ended = run_cli("--logs-specs", "flat", *words, env={"PYTHONPATH": path})
    assert ended.code == 0
    assert (tmp_path / "logs" / "flat" / "0-0.txt").read_text() == "hi\n"
    refused = run_cli("--logs-specs", "round", *words, env={"PYTHONPATH": path})
    assert refused.code == 2
    assert "must be one of broken, default, flat, not 'round'" in refused.err
    broken = run_cli("--logs-specs", "broken", *words, env={"PYTHONPATH": path})
    assert broken.code == 2
    assert "broken cannot be loaded" in broken.err
