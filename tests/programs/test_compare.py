"""`python -m benchmarks.compare`, and the lines of its table."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.table import TIMES, Goal, Line, as_table
from benchmarks.turns import compare
from tests.support.cli import REPOSITORY, run_program

COMMAND = [sys.executable, "-m", "benchmarks.compare"]

needs_git = pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="needs a clone")


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize(
    ("revisions", "name"), [(["no-such", "HEAD"], "OLD"), (["HEAD", "--", "--all"], "NEW")]
)
def test_unknown_revision_is_refused_in_one_line(revisions: list[str], name: str) -> None:
    """A revision that looks like an option of git is one too."""
    ended = run_program([*COMMAND, *revisions])
    problem = f"{name}: must be a commit of this repository"
    assert ended.errors == [f"{problem} (got {revisions[-1 if name == 'NEW' else 0]!r})"]
    assert ended.code == 2


@needs_git
@pytest.mark.slow
def test_both_commits_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    """The cheapest row, of one commit against itself."""
    words = ["HEAD", "HEAD", "--quick", "--only=start"]
    ended = run_program([*COMMAND, *words], env={"TMPDIR": str(tmp_path)}, seconds=300)
    assert ended.code == 0, ended.err
    commit = subprocess.check_output(["git", "-C", REPOSITORY, "rev-parse", "HEAD"], text=True)
    assert ended.out.splitlines()[:2] == [f"OLD: {commit.strip()}", f"NEW: {commit.strip()}"]
    assert "NEW/OLD (goal)" in ended.out
    (row,) = [line for line in ended.out.splitlines() if ": wall" in line]
    _, _, old, new, ratio, *_ = row.split("|")
    assert old.strip().endswith("ms")
    assert new.strip().endswith("ms")
    assert ratio.strip().endswith(f"{TIMES} ({Goal(1)})")
    assert not list(tmp_path.iterdir())


def test_a_line_misses_a_goal_that_compares_with_the_earlier_version() -> None:
    """Without an earlier version the goal is left out."""
    line = Line("start", "ms", 12, theirs=100, goal=Goal(0.5), old=10, old_goal=Goal(1))
    assert line.is_met is False
    assert f"| 10 ms | 12 ms | 1.2{TIMES} ({Goal(1)}) " in as_table([line], with_old=True)
    alone = dataclasses.replace(line, old=None)
    assert alone.is_met is True
    assert f"1.2{TIMES}" not in as_table([alone])


def test_what_an_earlier_version_cannot_do_is_left_out() -> None:
    """Its figure is empty; the others are measured as ever."""
    figures = {"new": 2.0, "old": None}
    results = compare(3, figures.__getitem__, "new", None, lambda: 1.0, old="old")
    line = results.line("read", "/s", max, limit_name="limit")
    assert (line.ours, line.old, line.theirs, line.limit) == (2.0, None, None, 1.0)
    assert results.ours == [2.0] * 3
