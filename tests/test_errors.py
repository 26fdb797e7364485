"""The exceptions: one tree, one-line messages, and what each carries."""

from __future__ import annotations

import copy
import pickle

import pytest

from elastic_aio.errors import (
    ElasticAioError,
    HostError,
    InternalError,
    JobEnded,
    JobFailed,
    JobStopped,
    SpawnError,
    SpecError,
)
from elastic_aio.outcome import AttemptResult, ExitStatus, Failure, JobState, LaunchResult

FAILURE = Failure(
    rank=1, local_rank=1, pid=7, host="h", status=ExitStatus(code=3), time=5.0, order=0
)
RESULT = LaunchResult(
    run_id="r",
    state=JobState.FAILED,
    reason="why",
    exit_code=3,
    duration=1.5,
    attempts=(AttemptResult(0, 1.0, 1.5, failures=(FAILURE,)),),
)


@pytest.mark.parametrize(
    ("error", "parents"),
    [
        (SpecError, (ElasticAioError, ValueError)),
        (HostError, (ElasticAioError,)),
        (SpawnError, (ElasticAioError,)),
        (JobEnded, (ElasticAioError,)),
        (JobFailed, (JobEnded,)),
        (JobStopped, (JobEnded,)),
        (InternalError, (ElasticAioError,)),
        (ElasticAioError, (Exception,)),
    ],
)
def test_the_tree_is_the_one_drawn(error: type[Exception], parents: tuple[type, ...]) -> None:
    assert error.__bases__ == parents


def test_a_spec_error_names_field_problem_and_value() -> None:
    error = SpecError("nproc_per_node", 0, "must be at least 1")
    assert str(error) == "nproc_per_node: must be at least 1 (got 0)"
    assert (error.field, error.value, error.problem) == ("nproc_per_node", 0, "must be at least 1")


def test_a_spec_error_is_one_short_line() -> None:
    """A long value with newlines is truncated."""
    text = str(SpecError("args", "a\nb" * 1000, "must be text"))
    assert "\n" not in text
    assert len(text) == len("args: must be text (got )") + 120


def test_a_spawn_error_carries_its_parts() -> None:
    error = SpawnError("no", permanent=True, exit_code=127, local_rank=3)
    assert str(error) == "no"
    assert (error.permanent, error.exit_code, error.local_rank) == (True, 127, 3)
    assert SpawnError("no", permanent=False, exit_code=1).local_rank == 0


def test_a_failed_job_carries_its_failures() -> None:
    """Those of the last attempt; the first is the root cause."""
    error = JobFailed("rank 1 failed", RESULT)
    assert str(error) == "rank 1 failed"
    assert error.result is RESULT
    assert error.failures == (FAILURE,)
    assert error.root_cause is FAILURE


def test_a_job_without_attempts_has_no_root_cause() -> None:
    nothing = LaunchResult(
        run_id="r", state=JobState.FAILED, reason="", exit_code=1, duration=0.0, attempts=()
    )
    error = JobFailed("", nothing)
    assert (error.failures, error.root_cause) == ((), None)


@pytest.mark.parametrize(
    "error",
    [
        SpecError("field", 1, "must be 2"),
        HostError("no pidfd"),
        SpawnError("gone", permanent=True, exit_code=126, local_rank=2),
        JobFailed("failed", RESULT),
        JobStopped("stopped", RESULT),
        InternalError("ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_survives_copies_and_pickles(error: ElasticAioError) -> None:
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
