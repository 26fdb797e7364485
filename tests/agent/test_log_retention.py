"""How much of the logs is kept: bytes of a file, attempts of a run, runs of a directory."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Event,
    JobFailed,
    LaunchSpec,
    LogsNotRemoved,
    LogSpec,
    OutputLost,
    RendezvousSpec,
    SpecError,
    launch,
)
from elastic_aio.agent import runtime
from elastic_aio.logs import trimmer
from elastic_aio.logs.files import RunDirectory
from tests.support.children import DEADLINE_S, file_console, python, shell, until
from tests.support.restarts import AT_ONCE

LINES = 40_000
WRITER = python(f"import sys\nfor n in range({LINES}): sys.stdout.write(f'{{n:099}}\\n')")
EXPECTED = [b"%099d" % number for number in range(LINES)]


def space_of(path: str | Path) -> int:
    """Return the disk space that a file takes."""
    return os.stat(path).st_blocks * 512


@pytest.mark.slow
@pytest.mark.both_loops
@pytest.mark.parametrize("logs", [{"tee": 1}, {"redirects": 1}, {"tee": 1, "on_full": "console"}])
async def test_a_file_stays_small(tmp_path: Path, logs: Any) -> None:
    """The console gets every line of the tee, and the end of the file is whole."""
    spec = LaunchSpec(WRITER, logs=LogSpec(log_dir=tmp_path / "logs", max_bytes=1 << 17, **logs))
    with file_console(tmp_path) as console:
        result = await launch(spec, console=console)
    if "tee" in logs:
        shown = (tmp_path / "out").read_bytes().splitlines()
        assert shown == [b"[default0]:" + line for line in EXPECTED]
    path = result.attempts[0].workers[0].stdout_path
    assert path is not None
    assert space_of(path) <= 1 << 17
    assert os.stat(path).st_size == 100 * LINES
    kept = Path(path).read_bytes()[-(1 << 16) :]
    assert kept.endswith(b"\n".join(EXPECTED[-600:]) + b"\n")


async def test_a_reader_sees_how_much_is_gone(tmp_path: Path) -> None:
    spec = LaunchSpec(WRITER, logs=LogSpec(log_dir=tmp_path, redirects=1, max_bytes=1 << 16))
    async with Agent(spec) as agent:
        await agent.wait()
        lines = [line async for line in agent.logs()]
    assert lines[0].missed
    assert lines[0].missed + sum(len(line.raw) for line in lines) == 100 * LINES
    assert [line.raw[:-1] for line in lines] == EXPECTED[-len(lines) :]


async def test_what_the_console_has_not_shown_stays(tmp_path: Path) -> None:
    """A console that takes nothing for a while gets every line later."""
    reading, writing = os.pipe()
    spec = LaunchSpec(WRITER, logs=LogSpec(log_dir=tmp_path, tee=1, max_bytes=1 << 16))
    shown = b""

    def read() -> None:
        nonlocal shown
        while data := os.read(reading, 1 << 16):
            shown += data

    async with Agent(spec, console=(writing, writing)) as agent, asyncio.timeout(DEADLINE_S):
        async for event in agent.events():
            if type(event).__name__ == "WorkerExited":
                break
        consumer = asyncio.create_task(asyncio.to_thread(read))
        await agent.wait()
    os.close(writing)
    await consumer
    os.close(reading)
    assert shown.splitlines() == [b"[default0]:" + line for line in EXPECTED]


async def test_a_file_system_that_cannot_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is complete, and an event says why."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(trimmer, "free_range", refuse)
    seen: list[Event] = []
    spec = LaunchSpec(WRITER, logs=LogSpec(log_dir=tmp_path, redirects=1, max_bytes=1 << 16))
    result = await launch(spec, listeners=[seen.append])
    (lost,) = (event for event in seen if isinstance(event, OutputLost))
    assert "max_bytes has no effect" in lost.why
    path = result.attempts[0].workers[0].stdout_path
    assert Path(path or "").read_bytes().splitlines() == EXPECTED


async def test_only_the_latest_attempts_are_kept(tmp_path: Path) -> None:
    spec = LaunchSpec(
        shell("[ $TORCHELASTIC_RESTART_COUNT = 4 ]"), max_restarts=4, restart=AT_ONCE,
        logs=LogSpec(log_dir=tmp_path, redirects=1, keep_attempts=2),
    )  # fmt: skip
    result = await launch(spec)
    kept = ["attempt_3", "attempt_4", "node.json"]
    assert sorted(os.listdir(result.log_dir or "")) == kept


async def test_only_the_latest_runs_are_kept(tmp_path: Path) -> None:
    """Not those that still run, and not what is another program's."""
    (tmp_path / "other").mkdir()
    await launch(LaunchSpec(["true"], logs=LogSpec(log_dir=tmp_path)))
    logs = LogSpec(log_dir=tmp_path, keep_runs=2)
    left = set(os.listdir(tmp_path))
    async with Agent(LaunchSpec(["sleep", "99"], logs=logs)) as agent:
        (running,) = set(os.listdir(tmp_path)) - left
        names = []
        for _ in range(4):
            result = await launch(LaunchSpec(["true"], logs=logs))
            names.append(Path(result.log_dir or "").name)
        assert set(os.listdir(tmp_path)) == {*left, running, *names[-2:]}
        agent.kill()


@pytest.mark.slow
async def test_the_nodes_of_a_job_are_one_run(tmp_path: Path, unused_tcp_port: int) -> None:
    """Also after a job with the same run id; each node has a directory."""
    rendezvous = RendezvousSpec(endpoint=f"127.0.0.1:{unused_tcp_port}", last_call_timeout=0.1)
    logs = LogSpec(log_dir=tmp_path, redirects=1, keep_runs=2)
    spec = LaunchSpec(shell("exit 3"), nnodes=3, rendezvous=rendezvous, logs=logs)
    runs: list[set[str]] = []
    for _ in range(3):
        nodes = await asyncio.gather(*(launch(spec) for _ in range(3)), return_exceptions=True)
        assert [type(node) for node in nodes] == [JobFailed] * 3
        runs.append(set(os.listdir(tmp_path)) - set().union(*runs))
    assert [len(names) for names in runs] == [3, 3, 3]
    assert set(os.listdir(tmp_path)) == runs[1] | runs[2]


async def test_a_node_that_finds_no_store_removes_nothing(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    """It does not know which directories are those of its run."""
    logs = LogSpec(log_dir=tmp_path, keep_runs=1)
    for _ in range(2):
        await launch(LaunchSpec(["true"], logs=LogSpec(log_dir=tmp_path, keep_runs=9)))
    before = set(os.listdir(tmp_path))
    endpoint = f"127.0.0.1:{unused_tcp_port}"
    rendezvous = RendezvousSpec(endpoint=endpoint, is_host=False)
    async with Agent(LaunchSpec(["true"], nnodes=2, rendezvous=rendezvous, logs=logs)):
        pass
    assert before < set(os.listdir(tmp_path))


async def test_a_directory_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends without it, and says so."""
    answer = threading.Event()
    monkeypatch.setattr(RunDirectory, "remove_old_runs", lambda *_: answer.wait(DEADLINE_S))
    monkeypatch.setattr(runtime, "_RUNS_S", 0.1)
    seen: list[Event] = []
    spec = LaunchSpec(["true"], logs=LogSpec(log_dir=tmp_path, keep_runs=1))
    try:
        result = await launch(spec, listeners=[seen.append])
    finally:
        answer.set()
    assert result.exit_code == 0
    assert "more than 0.1 s" in next(one for one in seen if isinstance(one, LogsNotRemoved)).why
    await until(lambda: "run_in_thread" not in [thread.name for thread in threading.enumerate()])


@pytest.mark.parametrize(
    "logs",
    [{"max_bytes": 1}, {"max_bytes": "9"}, {"keep_attempts": 0}, {"keep_runs": 0, "log_dir": "x"},
     {"keep_runs": 1}],
)  # fmt: skip
def test_mistakes(logs: Any) -> None:
    with pytest.raises(SpecError, match=r"logs\."):
        LogSpec(**logs)


async def test_a_long_captured_stream_takes_little_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was passed on is freed, but for its end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "import sys\nfor n in range(600): sys.stderr.write('x' * 49_999 + '\\n')\n"
    sizes = []
    with open(os.devnull, "w") as null:
        async with Agent(LaunchSpec(python(f"{script}input()")), console=null) as agent:
            async for event in agent.events():
                if type(event).__name__ == "WorkerExited":
                    sizes = [space_of(path) for path in tmp_path.rglob("*.log")]
    assert sizes
    assert max(sizes) < 12 << 20
