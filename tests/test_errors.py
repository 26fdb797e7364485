"""The exceptions: one tree, one-line messages, and what each carries."""

from __future__ import annotations

import copy
import pickle

import pytest

from elastic_aio.errors import (
    ElasticAioError,
    InternalError,
    JobEnded,
    JobFailed,
    JobStopped,
    SpawnError,
    SpecError,
    SurroundingsError,
    shown,
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
        (SurroundingsError, (ElasticAioError,)),
        (SpawnError, (ElasticAioError,)),
        (JobEnded, (ElasticAioError,)),
        (JobFailed, (JobEnded,)),
        (JobStopped, (JobEnded,)),
        (InternalError, (ElasticAioError,)),
        (ElasticAioError, (Exception,)),
    ],
)
def test_the_tree_is_the_one_drawn(error: type[Exception], parents: tuple[type, ...]) -> None:
    """Each exception has the parents that the module draws."""
    assert error.__bases__ == parents


def test_a_spec_error_names_field_value_and_what_is_accepted() -> None:
    """The message is one line of the three parts, and the parts can be read."""
    error = SpecError("nproc_per_node", 0, "must be at least 1")
    assert str(error) == "nproc_per_node: must be at least 1, not 0"
    assert (error.field, error.value, error.accepted) == ("nproc_per_node", 0, "must be at least 1")


def test_a_spec_error_stays_one_short_line_whatever_the_value() -> None:
    """A long value with newlines is shown as the beginning of one line."""
    text = str(SpecError("args", "a\nb" * 1000, "must be text"))
    assert "\n" not in text
    assert len(text) == len("args: must be text, not ") + 120


class _TwoLines:
    def __repr__(self) -> str:
        return "<two\n   lines>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (_TwoLines(), "<two lines>"),
        ("y" * 200, "'" + "y" * 118 + "…"),
        ("z" * 118, "'" + "z" * 118 + "'"),
    ],
)
def test_a_value_is_shown_as_one_line(value: object, text: str) -> None:
    """White space shrinks and what is too long is cut with an ellipsis."""
    assert shown(value) == text


def test_a_spawn_error_tells_what_a_shell_would() -> None:
    """Message, permanence, exit code and the worker are kept."""
    error = SpawnError("no", permanent=True, exit_code=127, local_rank=3)
    assert str(error) == "no"
    assert (error.permanent, error.exit_code, error.local_rank) == (True, 127, 3)
    assert SpawnError("no", permanent=False, exit_code=1).local_rank == 0


def test_a_failed_job_carries_its_failures() -> None:
    """`failures` are those of the last attempt in the result."""
    error = JobFailed("rank 1 failed", RESULT)
    assert str(error) == "rank 1 failed"
    assert error.result is RESULT
    assert error.failures == (FAILURE,)


def test_a_job_without_attempts_has_no_failures() -> None:
    """A job that ended before its first attempt has an empty list."""
    nothing = LaunchResult(
        run_id="r", state=JobState.FAILED, reason="", exit_code=1, duration=0.0, attempts=()
    )
    assert JobFailed("", nothing).failures == ()


@pytest.mark.parametrize(
    "error",
    [
        SpecError("field", 1, "must be 2"),
        SurroundingsError("no pidfd"),
        SpawnError("gone", permanent=True, exit_code=126, local_rank=2),
        JobFailed("failed", RESULT),
        JobStopped("stopped", RESULT),
        InternalError("ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_survives_copies_and_pickles(error: ElasticAioError) -> None:
    """What a process pool or a copy makes of an exception says the same."""
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
