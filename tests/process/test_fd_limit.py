"""The soft limit of descriptors: raised for us, unchanged for the workers."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.process.base import ChildPlan
from elastic_aio.process.limits import DescriptorLimit, with_descriptor_limit

ROOT = Path(__file__).parent.parent.parent


def raised_from(soft: int, hard: int, workers: int) -> list[str]:
    """Acquire descriptors for a job in a process with other limits."""
    code = (
        "import resource, sys\n"
        "from elastic_aio.errors import SurroundingsError\n"
        "from elastic_aio.process.limits import limit\n"
        "soft, hard, workers = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "try:\n"
        "    limit.acquire(workers)\n"
        "    print(limit.original)\n"
        "except SurroundingsError as error:\n"
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
    """A few workers need no change."""
    assert raised_from(1024, 4096, 8) == ["None", "1024", "4096"]


def test_a_small_limit_is_raised_as_far_as_needed() -> None:
    """Two pidfds and two logs for every worker; the former limit is told, the hard one stays."""
    former, soft, hard = raised_from(256, 4096, 256)
    assert (former, hard) == ("256", "4096")
    assert 256 * 4 < int(soft) < 256 * 4 + 200


def test_the_hard_limit_is_the_end() -> None:
    """Just enough is taken as it is; too little is refused in one line, and nothing changes."""
    assert raised_from(256, 320, 64) == ["256", "320", "320"]
    said, soft, hard = raised_from(256, 400, 256)
    assert said.startswith("too_few_descriptors:_this_job_takes_about_10")
    assert said.endswith("_and_the_limit_is_400_(raise_it_with_ulimit_-n)")
    assert (soft, hard) == ("256", "400")


def test_jobs_side_by_side_share_the_limit() -> None:
    """The original one is remembered while any job needs more, and put back by the last."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DescriptorLimit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        limit.acquire(1)
        told = [limit.original]
        limit.acquire(256)
        limit.acquire(1)
        told.append(limit.original)
        limit.release()
        limit.release()
        told.append(limit.original)
        assert told == [None, 256, 256]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
        limit.release()
        assert limit.original is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def plan_of(*argv: str) -> ChildPlan:
    """Return a plan that is never started."""
    return ChildPlan(argv, {"PATH": os.defpath}, None, stdin=0, stdout=1, stderr=2)


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), (__file__, 126)])
def test_a_program_that_cannot_run_is_found_out_before(program: str, code: int) -> None:
    """What stands in between would hide it: a worker that fails could be restarted."""
    with pytest.raises(SpawnError, match=re.escape(f"cannot run {program}: ")) as caught:
        with_descriptor_limit(plan_of(program), 123)
    assert (caught.value.permanent, caught.value.exit_code) == (True, code)


@pytest.mark.parametrize("argument", ["plain", "two words", "$HOME", "'", '"', "-n", "*", "\n", ""])
@pytest.mark.parametrize("has_prlimit", [True, False])
def test_a_worker_gets_the_old_limit_and_its_own_arguments(
    argument: str, has_prlimit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in between changes the limit and nothing else, the pid included."""
    monkeypatch.delenv("PWD", raising=False)
    if not has_prlimit:
        monkeypatch.setenv("PATH", "/nonexistent")
    code = (
        "import os, resource, sys\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.getpid(), *sorted(os.environ))\n"
        "sys.stdout.write(sys.argv[1])"
    )
    plan = with_descriptor_limit(plan_of(sys.executable, "-I", "-S", "-c", code, argument), 123)
    argv = plan.argv
    assert has_prlimit or argv[0] == "/bin/sh"
    env = {"A": "1", "LC_ALL": "C.UTF-8"}
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    out, _ = child.communicate(timeout=60)
    assert out == f"123 {child.pid} A LC_ALL\n{argument}"
    assert child.returncode == 0
