"""The soft limit of descriptors: raised for the agent, unchanged for the workers."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.process.base import ChildSpec
from elastic_aio.process.fd_limit import DescriptorLimit, with_descriptor_limit

ROOT = Path(__file__).parent.parent.parent


def raised_from(soft: int, hard: int, workers: int) -> list[str]:
    """Acquire descriptors in a process with other limits; return `original` and the limits."""
    code = (
        "import resource, sys\n"
        "from elastic_aio.errors import HostError\n"
        "from elastic_aio.process.fd_limit import limit\n"
        "soft, hard, workers = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "try:\n"
        "    limit.acquire(workers)\n"
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


def test_concurrent_jobs_share_the_limit() -> None:
    """The last job restores the original one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DescriptorLimit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        limit.acquire(1)
        originals = [limit.original]
        limit.acquire(256)
        limit.acquire(1)
        originals.append(limit.original)
        limit.release()
        limit.release()
        originals.append(limit.original)
        assert originals == [None, 256, 256]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
        limit.release()
        assert limit.original is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
    finally:
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
