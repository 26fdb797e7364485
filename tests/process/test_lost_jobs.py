"""Jobs whose launcher and guardian were killed: `aio-elastic gc --host`, and the next launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.cli import CLI, REPOSITORY, run_program
from tests.support.lost_jobs import SCENARIOS

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a pid namespace")
@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_lost_jobs(scenario: str, tmp_path: Path) -> None:
    """Each scenario of `tests.support.lost_jobs` says in its name and docstring what holds."""
    if run_program([*NAMESPACE, "true"]).code != 0:
        pytest.skip("needs the right to make a pid namespace")
    tmp_path.chmod(0o700)
    words = [sys.executable, "-m", "tests.support.lost_jobs", scenario]
    ended = run_program(
        [*NAMESPACE, *words], env={"NOTES": str(tmp_path)}, cwd=REPOSITORY, seconds=60.0
    )
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "--lost"], "--host: asks no store: only --json"),
        (["--host", "--older-than", "9"], "--host: asks no store: only --json"),
        (["--host", "--rdzv-endpoint", "a:1"], "--host: asks no store: only --json"),
        (["--shutdown-timeout", "9"], "--shutdown-timeout: needs --host"),
        (["--host", "--shutdown-timeout", "x"], "--shutdown-timeout: must be a number of seconds"),
    ],
)
@pytest.mark.e2e
def test_options_that_do_not_fit_are_errors(words: list[str], problem: str) -> None:
    ended = run_program([*CLI, "gc", *words])
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"aio-elastic gc: {problem}")
