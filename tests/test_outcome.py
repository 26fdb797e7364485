"""How processes end, and which failure is the root cause."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.outcome import (
    AttemptResult,
    ExitStatus,
    Failure,
    JobState,
    LaunchResult,
    WorkerError,
    root_cause_first,
)
from elastic_aio.reasons import LOST_PEER


@pytest.mark.parametrize(
    ("returncode", "status", "shell_code", "text"),
    [
        (0, ExitStatus(code=0), 0, "exit code 0"),
        (7, ExitStatus(code=7), 7, "exit code 7"),
        (255, ExitStatus(code=255), 255, "exit code 255"),
        (-9, ExitStatus(signal=9), 137, "killed by SIGKILL"),
        (-15, ExitStatus(signal=15), 143, "killed by SIGTERM"),
        (-35, ExitStatus(signal=35), 163, "killed by SIGRTMIN+1"),
        (None, ExitStatus(), 255, "exit status lost"),
    ],
)
def test_a_return_code_is_a_status(
    returncode: int | None, status: ExitStatus, shell_code: int, text: str
) -> None:
    """From and to subprocess's convention, and to a shell's."""
    assert ExitStatus.from_returncode(returncode) == status
    assert status.returncode == returncode
    assert status.shell_code == shell_code
    assert str(status) == text
    assert status.is_success is (returncode == 0)


def failure(
    rank: int = 0,
    *,
    time: float = 0.0,
    order: int = 0,
    is_victim: bool = False,
    pid: int | None = 42,
    message: str = "",
    error: WorkerError | None = None,
) -> Failure:
    return Failure(
        rank=rank,
        local_rank=rank,
        pid=pid,
        host="h",
        status=ExitStatus(code=1),
        time=time,
        order=order,
        is_victim=is_victim,
        message=message,
        error=error,
    )


@pytest.mark.parametrize(
    ("failed", "text"),
    [
        (failure(), "rank 0 (pid 42): exit code 1"),
        (failure(message="\nfirst\nlast\n"), "rank 0 (pid 42): exit code 1: first"),
        (failure(pid=None, message="cannot run x"), "rank 0: cannot run x"),
        (failure(pid=None), "rank 0: exit code 1"),
        (
            failure(message="m", error=WorkerError("ValueError: x\n  y \n", None, 0.0, "p")),
            "rank 0 (pid 42): exit code 1: ValueError: x",
        ),
    ],
)
def test_a_failure_has_a_summary_of_one_line(failed: Failure, text: str) -> None:
    """The worker, how it ended and the first line of its message, which names the exception."""
    assert failed.summary == text


def test_the_earliest_culprit_is_the_root() -> None:
    """Victims come last even if they exited first; equal times keep the order of exits."""
    victim = failure(0, time=1.0, order=0, is_victim=True)
    early = failure(1, time=2.0, order=3)
    tied_first = failure(2, time=3.0, order=1)
    tied_second = failure(3, time=3.0, order=2)
    for shuffled in itertools.permutations([victim, early, tied_first, tied_second]):
        assert root_cause_first(shuffled) == (early, tied_first, tied_second, victim)


def test_the_cause_of_a_lost_peer_is_the_root() -> None:
    """The peers end first, and notice it by their connections."""
    victim = failure(0, time=1.0, is_victim=True)
    lost = replace(failure(1, time=2.0), cause=LOST_PEER)
    root = failure(2, time=3.0)
    for shuffled in itertools.permutations([victim, lost, root]):
        assert root_cause_first(shuffled) == (root, lost, victim)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 9), st.integers(0, 9)), max_size=6))
def test_sorting_keeps_every_failure(drawn: list[tuple[bool, float, int]]) -> None:
    """No victim comes before a culprit."""
    failures = [
        failure(rank, time=time, order=order, is_victim=is_victim)
        for rank, (is_victim, time, order) in enumerate(drawn)
    ]
    ordered = root_cause_first(failures)
    assert sorted(failed.rank for failed in ordered) == list(range(len(drawn)))
    assert [failed.is_victim for failed in ordered] == sorted(
        failed.is_victim for failed in ordered
    )


def test_a_result_has_the_failures_of_its_last_attempt() -> None:
    """Earlier ones were followed by a restart."""
    first, second = failure(0), failure(1)
    result = LaunchResult(
        run_id="r",
        state=JobState.FAILED,
        reason="",
        exit_code=1,
        duration=0.0,
        attempts=(
            AttemptResult(0, 0.0, 0.0, failures=(first,)),
            AttemptResult(1, 0.0, 0.0, failures=(second,)),
        ),
    )
    assert result.failures == (second,)
    assert result.state == "failed"
