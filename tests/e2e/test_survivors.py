"""What the launcher may not end is named on the console, whatever the end of the job is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.children import until_sync
from tests.support.cli import CLI, run_program, running
from tests.support.denied import AS_OTHER, OTHER_UID, UNPRIVILEGED, needs_root
from tests.support.leaks import alive

pytestmark = [pytest.mark.e2e, needs_root]

RUN = [*UNPRIVILEGED, *CLI, "run", "--shutdown-timeout", "0.5"]
# Of another user, in a session of its own or not: notes its pid and goes on.
OTHER = f"{AS_OTHER} sh -c 'echo $$; exec sleep 99' > $NOTES/pid &"
LEFT = (
    r"process {} \(sleep 99\) did not exit after SIGKILL"
    r" \(state \w[^,]*, of (user \S+|uid \d+), no permission to signal it\), left behind\n"
)


def check_left(directory: Path, text: str) -> None:
    """Check that the process of another user is named once, and end it."""
    pid = int((directory / "pid").read_text())
    assert alive(pid)
    assert os.stat(f"/proc/{pid}").st_uid == OTHER_UID
    os.kill(pid, signal.SIGKILL)
    until_sync(lambda: not alive(pid))
    assert len(re.findall(LEFT.format(pid), text)) == 1, text


@pytest.mark.parametrize("new_session", ["", "setsid "])
@pytest.mark.parametrize("code", [0, 3])
def test_a_process_of_another_user_is_named(code: int, new_session: str, tmp_path: Path) -> None:
    """No restart follows, and the 10 s of SIGKILL are not waited for."""
    script = f"{new_session}{OTHER} until [ -s $NOTES/pid ]; do sleep 0.01; done; exit {code}"
    job = [*RUN, "--max-restarts", "2", "--no-python", "bash", "-c", script]
    ended = run_program(job, env={"NOTES": str(tmp_path)}, seconds=8)
    assert ended.code == code
    check_left(tmp_path, ended.err)
    assert "restarting" not in ended.err


@pytest.mark.parametrize("leads", [False, True])
def test_a_stop_names_a_process_of_another_user(tmp_path: Path, *, leads: bool) -> None:
    """It is a helper of the worker, or the worker itself."""
    script = f"exec {OTHER.removesuffix(' &')}" if leads else f"{OTHER} exec sleep 98"
    job = [*RUN, "--no-python", "bash", "-c", script]
    with running(job, env={"NOTES": str(tmp_path)}) as launcher:
        until_sync(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(8) == 128 + signal.SIGTERM
        check_left(tmp_path, launcher.err)


def test_a_process_of_another_user_that_ends_is_not_named(tmp_path: Path) -> None:
    script = f"{OTHER.replace('99', '0.2')} until [ -s $NOTES/pid ]; do sleep 0.01; done"
    job = [*RUN, "--no-python", "bash", "-c", script]
    ended = run_program(job, env={"NOTES": str(tmp_path)}, seconds=8)
    assert ended.code == 0
    assert "SIGKILL" not in ended.err
