"""A system call that a sandbox, a kernel or a file system refuses costs what needs it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.cli import CLI, run_program
from tests.support.refused import needs_x86, refusing

pytestmark = [pytest.mark.e2e, needs_x86]


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "pidfd_send_signal"])
def test_a_job_that_cannot_run_names_the_call(call: str, error: int) -> None:
    ended = run_program(refusing(call, error, [*CLI, "run", "--no-python", "true"]))
    assert ended.code == 1
    (line,) = ended.errors
    assert line.startswith("aio-elastic run: ")
    assert f"{call}: " in line


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_the_logs_are_kept(error: int, tmp_path: Path) -> None:
    """And no run is removed, as nothing says whether it goes on."""
    run = ["run", "--log-dir", str(tmp_path), "--log-keep-runs", "1", "--redirects", "3"]
    command = [*CLI, *run, "--no-python", "echo", "hello"]
    for count in 1, 2:
        ended = run_program(refusing("flock", error, command))
        assert ended.code == 0
        (line,) = [one for one in ended.errors if "old runs" in one]
        assert line.startswith("aio-elastic: logs of old runs are not removed: flock: ")
        assert len([*tmp_path.glob("*/attempt_0/0/stdout.log")]) == count
