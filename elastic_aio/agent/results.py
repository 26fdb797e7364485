"""Makes the result of a job from its outcome and its attempts on this host."""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec.structs import replace

from elastic_aio.outcome import AttemptResult, Goodput, JobOutcome, JobState, LaunchResult


def make_result(
    run_id: str,
    outcome: JobOutcome,
    attempt: int,
    ended: Iterable[AttemptResult],
    duration: float,
    *,
    log_dir: str | None,
    goodput: Goodput,
) -> LaunchResult:
    """Return what `Agent.wait` returns, or raises within an exception.

    Args:
        run_id: identifier of the run.
        outcome: how the job ended.
        attempt: number of the last attempt of the job.
        ended: the attempts on this host.
        duration: seconds that the job ran.
        log_dir: directory of the run's logs; None if there is none, or it was removed.
        goodput: how the time was spent.
    """
    attempts = [*ended]
    if outcome.failures:
        # A node that had no failure itself, or no attempt at all, gets the job's.
        last = attempts[-1:] or [AttemptResult(attempt, time.time(), 0.0)]
        attempts = [*attempts[:-1], replace(last[0], failures=outcome.failures)]
    if log_dir is None:
        attempts = [replace(each, log_dir=None) for each in attempts]
    workers = attempts[-1].workers if outcome.state is JobState.SUCCEEDED and attempts else ()
    return LaunchResult(
        run_id=run_id,
        state=outcome.state,
        reason=outcome.why,
        exit_code=outcome.exit_code,
        duration=duration,
        restarts=outcome.restarts,
        attempts=tuple(attempts),
        return_values={worker.rank: worker.return_value for worker in workers},
        log_dir=log_dir,
        cause=outcome.cause,
        goodput=goodput,
    )
