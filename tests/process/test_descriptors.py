"""The soft limit of descriptors: raised for the agent, unchanged for the workers."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.process.children import ChildSpec, spawn_with_popen
from elastic_aio.process.descriptors import DescriptorLimit, StandardStreams, with_descriptor_limit
from tests.support.cli import environment

ROOT = Path(__file__).parent.parent.parent


def raised_from(soft: int, hard: int, workers: int) -> list[str]:
    """Acquire descriptors in a process with other limits; return `original` and the limits."""
    code = (
        "import resource, sys\n"
        "from elastic_aio.errors import HostError\n"
        "from elastic_aio.process.descriptors import limit\n"
        "soft, hard, workers = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "try:\n"
        "    limit.reserve(workers, 4)\n"
        "    print(limit.original)\n"
        "except HostError as error:\n"
        "    print(str(error).replace(' ', '_'))\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(soft), str(hard), str(workers)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    return done.stdout.split()


def test_a_limit_that_suffices_is_left_alone() -> None:
    assert raised_from(1024, 4096, 8) == ["None", "1024", "4096"]


def test_a_small_limit_is_raised_as_far_as_needed() -> None:
    """Two pidfds and two logs for every worker."""
    original, soft, hard = raised_from(256, 4096, 256)
    assert (original, hard) == ("256", "4096")
    assert 256 * 4 < int(soft) < 256 * 4 + 200


def test_the_hard_limit_is_the_end() -> None:
    """If it does not suffice, that is an error, and nothing changes."""
    assert raised_from(256, 320, 64) == ["256", "320", "320"]
    message, soft, hard = raised_from(256, 400, 256)
    assert message.startswith("too_few_descriptors:_this_job_takes_about_10")
    assert message.endswith("_and_the_limit_is_400_(raise_it_with_ulimit_-n)")
    assert (soft, hard) == ("256", "400")


def test_the_needs_of_concurrent_jobs_are_added_up() -> None:
    """The last job restores the original limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DescriptorLimit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        originals = []
        jobs = []
        for workers in (1, 256, 300):
            jobs.append(limit.reserve(workers, 4))
            originals.append(limit.original)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= (1 + 256 + 300) * 4
        for job in jobs:
            limit.release(job)
            originals.append(limit.original)
        assert originals == [None, 256, 256, 256, 256, None]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_other_jobs_have_open_is_counted_once() -> None:
    """It is a part of what they have reserved."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DescriptorLimit()
    opened: list[int] = []
    outside = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        jobs = [limit.reserve(100, 4)]
        opened += [os.dup(0) for _ in range(jobs[0])]
        jobs += [limit.reserve(100, 4)]
        reached = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert sum(jobs) + outside <= reached < sum(jobs) + outside + 100
        for job in jobs:
            limit.release(job)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def spec_of(*argv: str) -> ChildSpec:
    """Return the spec of a child that is never started."""
    return ChildSpec(argv, {"PATH": os.defpath}, None, stdin=0, stdout=1, stderr=2)


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), (__file__, 126)])
def test_a_program_that_cannot_run_is_an_error_at_once(program: str, code: int) -> None:
    """With the wrapper it would look like a worker that failed, which is restarted."""
    with pytest.raises(SpawnError, match=re.escape(f"cannot run {program}: ")) as caught:
        with_descriptor_limit(spec_of(program), 123)
    assert (caught.value.permanent, caught.value.exit_code) == (True, code)


@pytest.mark.parametrize("directories", ["ab", "a", "ba", "db", "d", ""])
@pytest.mark.parametrize("is_limited", [False, True])
async def test_a_program_is_found_as_by_a_shell(
    directories: str, is_limited: bool, tmp_path: Path
) -> None:
    """A namesake earlier in PATH that cannot be executed is passed over: exit codes are equal."""
    (tmp_path / "d" / "program").mkdir(parents=True)
    for directory, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "program").write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / directory / "program").chmod(mode)
    path = ":".join(str(tmp_path / directory) for directory in directories)
    env = {"PATH": path}
    shell = subprocess.run(
        ["/bin/bash", "-c", "program"], env=env, stderr=subprocess.DEVNULL, check=False, timeout=60
    )
    spec = ChildSpec(("program",), env, None, stdin=0, stdout=1, stderr=2)
    try:
        child = await spawn_with_popen(with_descriptor_limit(spec, 123) if is_limited else spec)
        code = (await child.exited).status.code
    except SpawnError as error:
        code = error.exit_code if error.permanent else None
    assert code == shell.returncode


@pytest.mark.parametrize("argument", ["plain", "two words", "$HOME", "'", '"', "-n", "*", "\n", ""])
@pytest.mark.parametrize("has_prlimit", [True, False])
def test_a_worker_gets_the_old_limit_and_its_own_arguments(
    argument: str, has_prlimit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper changes nothing else: pid, environment, arguments."""
    monkeypatch.delenv("PWD", raising=False)
    if not has_prlimit:
        monkeypatch.setenv("PATH", "/nonexistent")
    code = (
        "import os, resource, sys\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.getpid(), *sorted(os.environ))\n"
        "sys.stdout.write(sys.argv[1])"
    )
    spec = with_descriptor_limit(spec_of(sys.executable, "-I", "-S", "-c", code, argument), 123)
    argv = spec.argv
    assert has_prlimit or argv[0] == "/bin/sh"
    env = {"A": "1", "LC_ALL": "C.UTF-8"}
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    out, _ = child.communicate(timeout=60)
    assert out == f"123 {child.pid} A LC_ALL\n{argument}"
    assert child.returncode == 0


# ---------------------------------------------------------------------- standard streams


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
        "from elastic_aio.process.descriptors import StandardStreams\n"
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
