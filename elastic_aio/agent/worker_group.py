"""One attempt's workers on this host: started, watched, stopped, and their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elastic_aio import signals
from elastic_aio.agent.failures import (
    OomCounts,
    WorkerRecord,
    collect_failures,
    has_failed,
    note_effect,
    note_state,
    reason_now,
)
from elastic_aio.agent.machine import StopReceived
from elastic_aio.agent.preflight import check_runnable
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import cancel_and_wait, create_task, set_result_if_pending
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.events import LeftoversFound, StopRequested, WorkerExited, WorkerStarted
from elastic_aio.logs.paths import WorkerLogs
from elastic_aio.outcome import AttemptResult, ExitStatus, Failure
from elastic_aio.process import proc
from elastic_aio.process.children import Child, ChildExit
from elastic_aio.process.rusage import peek_usage
from elastic_aio.process.tree import Survivor
from elastic_aio.ranks import WorkerRanks
from elastic_aio.reasons import compile_patterns
from elastic_aio.spec.stop import StopPlan
from elastic_aio.status import JobStatus

if TYPE_CHECKING:
    from elastic_aio.process.calls import CallResult

# Seconds for which a stop waits for the worker that is being spawned: the fork server may be
# suspended.  Its imports are not waited for.
_SPAWN_S = 5.0
# Seconds after which the launcher prepares for a failure: until then the workers need the CPUs.
_IDLE_S = 0.1
# Seconds in which helpers end by themselves after their parents, such as the resource tracker
# of multiprocessing.
_SETTLE_S = 0.1


class WorkerGroup:
    """The workers of one attempt, by local rank.

    Start it once, stop it in any case, then ask for the `result`.  Methods that stop or close are
    idempotent.  Every start and exit is published as an event of the runtime.

    `records` has the workers that have been started; `start_error` is why not all could be.  After
    `result`, `calls` has how functions ended, and `failures` all failures, victims too, the root
    cause first.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        ranks: Sequence[WorkerRanks],
        *,
        on_exit: Callable[[int, ChildExit], None],
        on_stuck: Callable[[Failure], None] = lambda failure: None,
        on_hung: Callable[[int, str], None] = lambda local_rank, why: None,
        attempt: int = 0,
        restarts: int = 0,
        round_number: int = 0,
        master: tuple[str, int] | None = None,
    ) -> None:
        """Begin an attempt with workers of these ranks; nothing is started yet.

        `on_exit` is called with the local rank and the exit of each worker, after its record has
        been updated; `on_stuck` once if a worker is in an uninterruptible system call for too long;
        `on_hung` with the local rank of a worker that is silent for too long, and why.  Without
        rounds, `round_number` is the attempt's.  `master` is as for `LocalRuntime.open_master`.
        """
        self.attempt = attempt
        self.records: dict[int, WorkerRecord] = {}
        self.start_error: SpawnError | HostError | None = None
        self.calls: dict[int, CallResult] = {}
        self.failures: tuple[Failure, ...] = ()
        self._runtime = runtime
        self._tree = runtime.tree
        self._ranks = ranks
        self._on_exit = on_exit
        self._on_stuck = on_stuck
        self._stuck: Failure | None = None
        self._on_hung = on_hung
        self._restarts = restarts
        self._round_number = round_number
        self._master = master
        self._log_dir = runtime.begin_attempt(attempt, self.records)
        self._began, self._began_at = time.monotonic(), time.time()
        self._oom_before = OomCounts.read(runtime.cgroup)
        self._starting: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._is_abandoned = False
        self._stopped_at = 0.0
        self.ran_until: float | None = None
        """The first failure, or the beginning of the stop, in clock seconds."""
        self._linger_over: asyncio.Future[StopReceived | None] = (
            asyncio.get_running_loop().create_future()
        )

    def __repr__(self) -> str:
        running = sum(record.exit is None for record in self.records.values())
        return f"<WorkerGroup, attempt {self.attempt}: {running} of {len(self._ranks)} running>"

    # ------------------------------------------------------------------ start

    async def start(self) -> None:
        """Spawn the workers in order of local rank, or raise HostError for the master port.

        A SpawnError names the local rank; earlier workers run on until `stop`.

        Cancellation: spawning goes on; `stop` ends it.
        """
        try:
            check_runnable(self._runtime.spec)
            self._runtime.liveness.watch(self._on_hung, self._on_stuck_in_kernel)
            # In a task of its own: a stop can wait for the child that is being spawned.
            self._starting = create_task(self._spawn_all(), name=f"start {self.attempt}")
            await asyncio.wait([self._starting])
            if not (self._is_abandoned and self._starting.cancelled()):
                self._starting.result()
        except (SpawnError, HostError) as error:
            self.start_error = error
            raise

    async def _spawn_all(self) -> None:
        runtime = self._runtime
        group_rank = self._ranks[0].group_rank
        master = await runtime.open_master(group_rank, self._master)
        await runtime.prepare_attempt(self.attempt, group_rank)
        with runtime.starting():
            for ranks in self._ranks:
                if self._is_abandoned:
                    break
                await self._spawn(ranks, master)
                await asyncio.sleep(0)  # yield to other tasks: spawning may not have waited
        runtime.entrypoint.on_group_started()
        runtime.output.on_group_started()
        self._preparing = create_task(self._prepare_for_failure(), name="prepare for a failure")

    async def _spawn(self, ranks: WorkerRanks, master: tuple[str, int]) -> None:
        runtime = self._runtime
        try:
            logs = runtime.output.plan(self.attempt, ranks.local_rank)
            # Each worker's descriptors are open only while it is spawned.
            with (
                runtime.output.open_streams(logs, self.attempt, ranks) as streams,
                runtime.notify_socket(ranks.local_rank) as notify,
            ):
                env = runtime.environment(
                    ranks,
                    restarts=self._restarts,
                    round_number=self._round_number,
                    master=master,
                    logs=logs,
                    notify=notify,
                )
                child = await runtime.spawn(ranks.local_rank, env, streams, notify)
        except SpawnError as error:
            error.local_rank = ranks.local_rank
            raise
        self._on_started(ranks, logs, child)

    async def _prepare_for_failure(self) -> None:
        """Do what would delay the next stop or restart, while the loop is idle."""
        await asyncio.sleep(_IDLE_S)  # no event reports that the workers have started up
        self._runtime.output.directory.tidy()
        if not self.attempt:
            compile_patterns()
            peek_usage(-1)
            await self._tree.descendants()  # which notes the processes that are older than the job
        from elastic_aio.agent.later import load_later_modules  # a start does without

        await load_later_modules()

    def _on_started(self, ranks: WorkerRanks, logs: WorkerLogs, child: Child) -> None:
        record = WorkerRecord(ranks, child.pid, logs, time.monotonic())
        record.notes_failure = self._runtime.notes_failures
        if child.exited.done():
            child.exited.add_done_callback(lambda ended: self._on_exited(record, ended.result()))
        else:
            child.on_exit = partial(self._on_exited, record)
        # The tree knows each child before the next one starts: an interruption leaves
        # no child that a stop would not find.
        self._tree.add(child)
        self.records[ranks.local_rank] = record
        self._runtime.publish(
            WorkerStarted(
                attempt=self.attempt,
                rank=ranks.rank,
                local_rank=ranks.local_rank,
                pid=child.pid,
                role_rank=ranks.role_rank,
                role_world_size=ranks.role_world_size,
                stdout_path=logs.stdout.path,
                stderr_path=logs.stderr.path,
            )
        )
        self._runtime.liveness.on_started(record)

    def _on_exited(self, record: WorkerRecord, ended: ChildExit) -> None:
        """Pass an exit on, so that the others are signalled at once; it is explained later."""
        if signals.unread:
            signals.deliver()
        if self._runtime.attempt != self.attempt:
            return  # it could not be killed, and exits after the end of its attempt
        record.exit = ended
        record.exited_at = time.time()
        record.order = next(self._runtime.exit_numbers)
        record.stop_signals = self._tree.stop_signals(record.pid)
        record.unkept = self._runtime.output.capture.read_now(record.logs.stderr.path)
        note_effect(record)
        if not ended.status.is_success:
            self._note_end()
            if not record.is_victim:
                self._note_state(record)
        self._runtime.publish_later(partial(self._explain, record))
        self._on_exit(record.ranks.local_rank, record.exit)

    def _explain(self, record: WorkerRecord) -> WorkerExited:
        """Return the event of an exit; the last messages of the worker are read first."""
        assert record.exit is not None, "it has exited"
        is_success = record.exit.status.is_success
        self._runtime.liveness.on_exited(record.ranks.local_rank, is_success=is_success)
        return WorkerExited(
            attempt=self.attempt,
            rank=record.ranks.rank,
            local_rank=record.ranks.local_rank,
            pid=record.pid,
            status=record.exit.status,
            duration=record.duration,
            is_victim=record.is_victim,
            usage=record.exit.usage,
            reason=reason_now(record),
        )

    def _on_stuck_in_kernel(self, local_rank: int) -> None:
        """Fail: the worker holds what another attempt would need, and no signal ends it."""
        record, timeout = self.records[local_rank], self._runtime.spec.uninterruptible_timeout
        why = f"in an uninterruptible system call (state D) for {timeout:g} s"
        message = f"process {record.pid} has been {why}"
        self._stuck = self._failure_of(local_rank, record.pid, 1, message, record.notes)
        self._on_stuck(self._stuck)

    def _note_end(self) -> None:
        if self.ran_until is None:
            self.ran_until = self._runtime.clock.now()

    def _begin_stop(self) -> None:
        self._note_end()
        self._stopped_at = self._stopped_at or time.time()

    @property
    def ready_at(self) -> float | None:
        """When all workers with a `ready` were, in clock seconds; None without a `ready`."""
        if self._runtime.spec.ready is None:
            return None
        reports = [record.report for record in self.records.values()]
        times = [one.ready_at for one in reports if one is not None and one.ready_at is not None]
        return max(times) if times and len(times) == len(self._ranks) else self.ran_until

    # ------------------------------------------------------------------- stop

    def begin_stop(self, plan: StopPlan) -> None:
        """Send the first signal of a plan to the workers now; `announce_stop` and `stop` follow."""
        self._begin_stop()
        failed = [*filter(has_failed, self.records.values())]
        for record in self.records.values():
            if record.is_running:
                # After a plain failure, the others wait for the signal.
                self._note_state(record, is_brief=bool(failed) and not failed[0].may_be_effect)
        self._tree.begin_stop(plan)

    def _note_state(self, record: WorkerRecord, *, is_brief: bool = False) -> None:
        taken_at = self._runtime.output.capture.taken_at(record.logs.stderr.path)
        note_state(record, taken_at, is_brief=is_brief)

    def announce_stop(
        self, plan: StopPlan, reason: str, signal: int | None = None, *, is_ordered: bool = False
    ) -> None:
        """Note that a stop begins now, and publish why; `stop` follows."""
        self._begin_stop()
        self._runtime.liveness.end_deadlines()
        attempt = self.attempt
        self._runtime.publish_later(
            lambda: StopRequested(
                attempt=attempt, reason=reason, plan=str(plan), signal=signal, is_ordered=is_ordered
            )
        )

    async def stop(self, plan: StopPlan, *, leftovers_only: bool = False) -> list[Survivor]:
        """Stop every process of the attempt; return those that could not be killed.

        With `leftovers_only` all workers have exited, and the processes that they left are stopped.
        """
        self._begin_stop()
        survivors: list[Survivor] = []
        if not (leftovers_only and await self._have_leftovers_ended(plan)):
            if leftovers_only:
                plan = self._announce_end_of_linger(plan)
            survivors = await self.stop_processes(plan)
        await self.close()
        return survivors

    async def _have_leftovers_ended(self, plan: StopPlan) -> bool:
        """Wait as long as leftovers of successes may run; return whether they have ended."""
        tree = self._tree
        if await tree.forget_if_empty():
            return True
        if await tree.linger(_SETTLE_S, self._linger_over):
            return True
        left = {entry.pid: proc.name_of(entry.pid) for entry in await tree.staying()}
        if left:
            self._runtime.publish(
                LeftoversFound(
                    attempt=self.attempt,
                    pids=tuple(left),
                    programs=tuple(left.values()),
                    linger=plan.linger,
                )
            )
        return await tree.linger(plan.linger, self._linger_over)

    def _announce_end_of_linger(self, plan: StopPlan) -> StopPlan:
        """Publish why leftovers are stopped; return the plan of that stop."""
        why, signal = "the workers had left processes behind", None
        if self._linger_over.done():
            if (stop := self._linger_over.result()) is not None:
                why, signal, plan = f"{stop.reason}; {why}", stop.signal, stop.plan_of(plan)
        elif plan.linger:
            why = f"processes that the workers left still run after {plan.linger:g} s"
        self.announce_stop(plan, why, signal)
        return plan

    def end_linger(self, stop: StopReceived | None = None) -> None:
        """Stop leftovers without waiting for them any longer, by `stop` if given."""
        set_result_if_pending(self._linger_over, stop)

    async def stop_processes(self, plan: StopPlan) -> list[Survivor]:
        """Spawn no further worker and stop every process; return those that survive SIGKILL."""
        self._is_abandoned = True
        self._runtime.liveness.end_deadlines()
        await self._end_preparation()
        if self._starting is not None and not self._starting.done():
            if not self._runtime.entrypoint.is_importing:
                await self._runtime.clock.wait_for(self._starting, seconds=_SPAWN_S)
            self._starting.cancel()
            await asyncio.wait([self._starting])
        return await self._runtime.stop_processes(plan)

    async def close(self) -> None:
        """Finish the logs; no worker runs any more."""
        # The store stays: workers of other nodes may use it.
        await self._end_preparation()
        self._runtime.streams.restore_terminal()
        self._runtime.liveness.close_workers()
        self._runtime.output.end_attempt(self.attempt)
        for record in self.records.values():
            unkept = self._runtime.output.capture.pop_unkept(record.logs.stderr.path)
            record.unkept = unkept or record.unkept

    async def _end_preparation(self) -> None:
        if self._preparing is not None:
            await cancel_and_wait([self._preparing])

    def with_reports(self, status: JobStatus) -> JobStatus:
        """Return a status with what the workers have reported about themselves."""
        if status.attempt != self.attempt:
            return status
        began = time.time() - self._runtime.clock.now()
        workers = []
        for worker in status.workers:
            record = self.records.get(worker.local_rank)
            report = None if record is None else record.report
            if report is not None and report.heartbeat_at is not None:
                worker = replace(
                    worker,
                    heartbeat=began + report.heartbeat_at,
                    reported=str(report),
                    step=report.step,
                    step_since=None if report.step_at is None else began + report.step_at,
                )
            if report is not None and report.probe:
                worker = replace(worker, probe=report.probe)
            workers.append(worker)
        return replace(status, workers=tuple(workers))

    # ---------------------------------------------------------------- results

    @property
    def first_success(self) -> tuple[int, float] | None:
        """Rank of the first worker that exited with 0 by itself, and when, in Unix seconds."""
        ends = [
            (record.ranks.rank, record.exited_at)
            for record in self.records.values()
            if record.status.is_success and not record.is_victim
        ]
        return min(ends, key=lambda end: end[1], default=None)

    @property
    def has_failed_to_stop(self) -> bool:
        """Whether a worker has failed by itself while it was stopped, as by a save."""
        return any(reason_now(one) for one in self.records.values() if one.is_victim)

    async def result(self) -> AttemptResult:
        """Return the result of a stopped group; victims alone are no failures of it."""
        self.calls = await self._runtime.entrypoint.results()
        failures = await collect_failures(
            self.records.values(),
            self.calls,
            host=self._runtime.host,
            stopped_at=self._stopped_at,
            oom_before=self._oom_before,
            store_refusals=self._runtime.master_ports.refusals,
            cwd=self._runtime.spec.cwd or "",
        )
        statuses = {failure.local_rank: failure.status for failure in failures}
        if self.start_error is not None:
            failures = self._failure_to_start(self.start_error), *failures
        if self._stuck is not None:
            failures = self._stuck, *failures
        self.failures = failures
        return AttemptResult(
            number=self.attempt,
            started_at=self._began_at,
            duration=time.monotonic() - self._began,
            workers=tuple(
                record.result(statuses.get(local_rank, record.status), self.calls.get(local_rank))
                for local_rank, record in self.records.items()
            ),
            failures=failures if failures and not failures[0].is_victim else (),
            log_dir=self._log_dir,
        )

    def _failure_to_start(self, error: SpawnError | HostError) -> Failure:
        if isinstance(error, SpawnError):
            return self._failure_of(error.local_rank, None, error.exit_code, str(error))
        return self._failure_of(0, None, 1, str(error))

    def _failure_of(
        self, local_rank: int, pid: int | None, code: int, message: str, notes: tuple[str, ...] = ()
    ) -> Failure:
        """Return the failure of a worker that has not exited; it precedes all others."""
        ranks = next((one for one in self._ranks if one.local_rank == local_rank), self._ranks[0])
        return Failure(
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            pid=pid,
            host=self._runtime.host,
            status=ExitStatus(code=code),
            time=time.time(),
            order=-1,
            message=message,
            notes=notes,
        )
