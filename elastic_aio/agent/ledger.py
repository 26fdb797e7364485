"""What has become of each worker and attempt so far; the job's result in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import Struct, field

from elastic_aio.agent.evidence import EndedWorker
from elastic_aio.logs.paths import WorkerLogs
from elastic_aio.outcome import (
    AttemptResult,
    ExitStatus,
    Failure,
    JobState,
    LaunchResult,
    ResourceUsage,
    WorkerResult,
)
from elastic_aio.process.results import Told
from elastic_aio.ranks import Place

__all__ = ["Ledger"]


class _Worker(Struct):
    place: Place
    pid: int
    logs: WorkerLogs
    started_at: float  # monotonic
    duration: float = 0.0
    status: ExitStatus | None = None
    usage: ResourceUsage | None = None
    is_victim: bool = False
    ended_at: float = 0.0  # Unix time
    order: int = 0


class _Attempt(Struct):
    number: int
    log_dir: str | None
    began: float  # monotonic
    began_at: float  # Unix time
    oom_kills: int | None
    workers: dict[int, _Worker] = field(default_factory=dict)


class Ledger:
    """Remembers one job; the present attempt is the last one begun."""

    def __init__(self, host: str) -> None:
        """Begin with no attempt on the host of this name."""
        self._host = host
        self._attempt: _Attempt | None = None
        self._ended: list[AttemptResult] = []
        self._exits = 0

    def begin_attempt(
        self, number: int, log_dir: str | None, *, now: float, unix: float, oom_kills: int | None
    ) -> None:
        """Begin an attempt at monotonic time `now`, Unix time `unix`."""
        self._attempt = _Attempt(number, log_dir, now, unix, oom_kills)

    def worker_started(self, place: Place, pid: int, logs: WorkerLogs, now: float) -> None:
        """Take in a worker of the present attempt."""
        self._current.workers[place.local_rank] = _Worker(place, pid, logs, now)

    def worker_exited(
        self,
        local_rank: int,
        status: ExitStatus,
        usage: ResourceUsage | None,
        *,
        at: float,
        unix: float,
        is_victim: bool,
    ) -> float:
        """Note a worker's exit; return how many seconds it lived."""
        worker = self._current.workers[local_rank]
        worker.status, worker.usage, worker.is_victim = status, usage, is_victim
        worker.duration = at - worker.started_at
        worker.ended_at, worker.order = unix, self._exits
        self._exits += 1
        return worker.duration

    @property
    def oom_kills_before(self) -> int | None:
        """The kernel's counter when the present attempt began."""
        return self._current.oom_kills

    def unsuccessful(self, told: Mapping[int, Told]) -> list[EndedWorker]:
        """Return the workers of the present attempt that ended, but not well.

        `told` is what functions said of their ends, by local rank; one whose value
        did not arrive has failed, whatever its exit code.
        """
        nothing = Told(0)
        return [
            EndedWorker(
                rank=worker.place.rank,
                local_rank=worker.place.local_rank,
                pid=worker.pid,
                host=self._host,
                status=worker.status,
                ended_at=worker.ended_at,
                order=worker.order,
                is_victim=worker.is_victim,
                logs=worker.logs,
                error=(said := told.get(worker.place.local_rank, nothing)).error,
                problem=said.problem,
            )
            for worker in self._current.workers.values()
            if worker.status is not None
            and (not worker.status.is_success or told.get(worker.place.local_rank, nothing).problem)
        ]

    def end_attempt(
        self, failures: tuple[Failure, ...], now: float, told: Mapping[int, Told]
    ) -> None:
        """Close the present attempt at monotonic time `now`; `told` holds its values."""
        attempt = self._current
        self._ended.append(
            AttemptResult(
                number=attempt.number,
                started_at=attempt.began_at,
                duration=now - attempt.began,
                workers=tuple(
                    WorkerResult(
                        rank=worker.place.rank,
                        local_rank=worker.place.local_rank,
                        pid=worker.pid,
                        status=worker.status or ExitStatus(),
                        duration=worker.duration,
                        usage=worker.usage,
                        stdout_path=worker.logs.stdout.path,
                        stderr_path=worker.logs.stderr.path,
                        return_value=told[rank].value if rank in told else None,
                    )
                    for rank, worker in attempt.workers.items()
                ),
                failures=failures,
                log_dir=attempt.log_dir,
            )
        )

    def job_failed(self, number: int, failures: tuple[Failure, ...], unix: float) -> None:
        """Let the last attempt have the failures that ended the job, wherever they were.

        A node that has had none gets one without workers, of this `number`, at Unix
        time `unix`.
        """
        last = self._ended.pop() if self._ended else AttemptResult(number, unix, 0.0)
        self._ended.append(replace(last, failures=failures))

    def result(
        self,
        *,
        run_id: str,
        state: JobState,
        why: str,
        exit_code: int,
        duration: float,
        restarts: int,
        log_dir: str | None,
    ) -> LaunchResult:
        """Return the whole story."""
        values: Mapping[int, Any] = {}
        if state is JobState.SUCCEEDED and self._ended:
            values = {worker.rank: worker.return_value for worker in self._ended[-1].workers}
        return LaunchResult(
            run_id=run_id,
            state=state,
            reason=why,
            exit_code=exit_code,
            duration=duration,
            restarts=restarts,
            attempts=tuple(self._ended),
            return_values=values,
            log_dir=log_dir,
        )

    @property
    def _current(self) -> _Attempt:
        assert self._attempt is not None, "begin_attempt() comes first"
        return self._attempt
