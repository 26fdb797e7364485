"""A few cases of `benchmarks.parity`, and what it says of others."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from benchmarks.parity import Outcome
from benchmarks.parity_cases import Case, Difference
from tests.support.cli import run_program

SUBSET = ["nproc 2", "end with 7", "logs tee", "signal SIGTERM", "nodes dynamic"]


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_no_difference_is_unexplained() -> None:
    """Of these cases; `python -m benchmarks.parity` runs them all."""
    names = [f"--only={name}" for name in SUBSET]
    ended = run_program([sys.executable, "-m", "benchmarks.parity", *names], seconds=1800)
    assert ended.code == 0, ended.out + ended.err
    assert f"{len(SUBSET)} cases: 3 same, 2 differs, 0 UNEXPLAINED" in ended.out


def outcome(theirs: Any, ours: Any, declared: Difference | None) -> Outcome:
    """Return the outcome of a case with different exit codes."""
    case = Case("x", "", {} if declared is None else {"code": declared})
    return Outcome(case, {"code": theirs, "out": []}, {"code": ours, "out": []}, False, 0.0)


@pytest.mark.parametrize(
    ("theirs", "ours", "declared", "verdict"),
    [
        (0, 0, None, "same"),
        (1, 7, Difference("D42", 1, 7), "differs"),
        (1, 7, Difference("D42"), "differs"),
        (1, 7, None, "UNEXPLAINED"),
        (1, 8, Difference("D42", 1, 7), "UNEXPLAINED"),
        (2, 7, Difference("D42", 1, 7), "UNEXPLAINED"),
        (0, 0, Difference("D42"), "UNEXPLAINED"),
    ],
)
def test_only_declared_differences_are_explained(
    theirs: int, ours: int, declared: Difference | None, verdict: str
) -> None:
    """A declaration without a difference is not explained either."""
    found = outcome(theirs, ours, declared)
    assert found.verdict == verdict
    assert "".join(found.rows())
