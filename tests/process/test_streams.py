"""Standard streams: a closed one of the host program is `/dev/null` for its workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio.process.streams import StandardStreams
from tests.support.cli import environment

# Runs a command, and a function by each start method, and exits with 0 if all succeeded.
HOST = """
import sys
from elastic_aio import LaunchSpec, LogSpec, run
from job import report

logs = LogSpec(tee=3)
run(LaunchSpec([sys.executable, "job.py", "command"], stdin="rank0"))
run(LaunchSpec([sys.executable, "job.py", "tee"], logs=logs))
for method in ("spawn", "fork", "forkserver"):
    spec = LaunchSpec(report, args=[method], start_method=method, stdin="rank0", logs=logs)
    run(spec)
"""
JOB = """
import json, os, sys

def report(name):
    print("x" * 80, flush=True)
    targets = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    with open(name + ".json", "w") as file:
        json.dump(targets, file)

if __name__ == "__main__":
    report(sys.argv[1])
"""


@pytest.mark.slow
def test_workers_of_a_program_without_standard_streams(tmp_path: Path) -> None:
    """They get neither the epoll of its event loop nor its sockets.

    (libuv aborts in such a program: it refuses to close a descriptor below 3.)
    """
    (tmp_path / "job.py").write_text(JOB)
    argv = [sys.executable, "-c", HOST]
    path = f"{environment()['PYTHONPATH']}{os.pathsep}{tmp_path}"
    closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *argv]
    env = environment({"PYTHONPATH": path, "TMPDIR": str(tmp_path)})
    done = subprocess.run(closing, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0
    targets = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    *others, captured = targets["command"]
    assert others == ["/dev/null"] * 2
    assert captured.startswith("pipe:"), "its last lines are the reason of a failure"
    for name in ("tee", "spawn", "fork", "forkserver"):
        stdin, *logs = targets[name]
        assert stdin == "/dev/null"
        assert [Path(log).name for log in logs] == ["stdout.log", "stderr.log"]


def test_the_numbers_of_closed_streams_are_occupied() -> None:
    """No later file of the job gets one of them."""
    code = (
        "import os, sys\n"
        "from elastic_aio.process.streams import StandardStreams\n"
        "streams = StandardStreams()\n"
        "sys.exit(min(streams.null, os.open('/dev/null', os.O_RDONLY)) <= 2)\n"
    )
    closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(closing, env=environment(), timeout=60).returncode == 0


def test_open_streams_are_inherited() -> None:
    streams = StandardStreams()
    assert streams.null > 2
    assert [streams.inherited(number) for number in range(3)] == [0, 1, 2]
    os.set_inheritable(0, False)
    try:
        assert streams.inherited(0) == streams.null
    finally:
        os.set_inheritable(0, True)
    assert repr(streams) == f"<StandardStreams, /dev/null is {streams.null}>"
    streams.close()
    streams.close()
