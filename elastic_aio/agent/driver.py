"""Performs the effects of a job's state machine on this host, and feeds the results back.

No task holds the life of the job in its frame: an input is handed to the state machine at once, and
an effect that takes time is a task whose result is the next input.  So the order in which an event
loop that shuts down cancels the tasks does not matter: a cancelled effect asks the state machine to
stop the job, and a cancelled stop is started again.

The embedding program may fork while a job runs.  The fork has a copy of everything here, and its
event loop cancels the copied tasks when it is closed (`sys.exit` in a coroutine).  But the job is
the parent's; so a copy takes no input and closes nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from elastic_aio import aio
from elastic_aio.agent import machine
from elastic_aio.agent.event_log import EventWriter
from elastic_aio.agent.logs import JobOutput
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.events import JobFinished, JobStarted, LostJobFound, SignalForwarded
from elastic_aio.logs.streams import LoggedStreams
from elastic_aio.outcome import (
    AttemptResult,
    Failure,
    JobOutcome,
    JobState,
    LaunchResult,
    make_result,
)
from elastic_aio.process.children import ChildExit
from elastic_aio.process.proc import ended_by_default
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.spec.restart import DECIDE_TIMEOUT, Decide, RestartAction, why_undecided
from elastic_aio.spec.stop import StopPlan
from elastic_aio.status import JobStatus

if TYPE_CHECKING:
    from elastic_aio.spec.group import AnySpec
    from elastic_aio.stacks import StackDump

_SHUTDOWN = "the event loop is shutting down"
KILLED = machine.StopReceived("an immediate stop was requested")
_QUIET_S = 1.0  # from the start of the workers to a look around
_ATTEMPTS_MAX = 100  # of a result: a job may restart for months


class BaseDriver(ABC):
    """Performs the effects of a state machine; `done` when that is over and nothing of it is left.

    `Agent.wait` returns `result`, or raises `error`; `outcome` is how the job ended.  `is_left`:
    the agent's block has been left; an agent that was entered by hand may outlive its event loop.
    `finds_lost_jobs`: the job reports those of this host, soon after its workers have started,
    unless another job of this program has looked.
    """

    _machine: Any  # of a kind that each driver knows

    def __init__(
        self, spec: AnySpec, run_id: str, event_log: EventWriter, clock: aio.PausableClock
    ) -> None:
        self._fork = aio.ForkGuard()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outcome: JobOutcome | None = None
        self.result: LaunchResult | None = None
        self.error: BaseException | None = None
        self.refusal: tuple[BaseException, str] | None = None
        """Of a tree: the last error with which a child could not be opened, or has ended, and the
        reason of that end."""
        self.is_left = False
        self.finds_lost_jobs = False
        self.on_shutdown: Callable[[], None] | None = None
        """Of a child in a tree: called when the event loop shuts down, to stop all of the tree."""
        self._spec = spec
        self._run_id = run_id
        self._event_log = event_log
        self._clock = clock
        self._inputs: deque[Any] = deque()
        self._is_handling = False
        self._is_broken = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------- questions

    @property
    @abstractmethod
    def runtimes(self) -> list[LocalRuntime]:
        """The runtimes that are open: of this job, or of the leaves of a tree."""

    @property
    def is_copy(self) -> bool:
        """Whether this process is a fork of the process that runs the job."""
        return self._fork.is_copy

    @property
    @abstractmethod
    def leaves(self) -> list[Driver]:
        """The drivers of workers: this, or those of a tree that are open."""

    @abstractmethod
    def with_reports(self, status: JobStatus) -> JobStatus:
        """Return a status with what the workers have reported about themselves."""

    @abstractmethod
    def at(self, path: str) -> BaseDriver | None:
        """Return the driver of the child at a path; None if it does not run."""

    @property
    @abstractmethod
    def logged(self) -> LoggedStreams:
        """The log files of the workers."""

    def make_log_files(self) -> None:
        """Make the files of captured streams now, and of later workers' streams at their start."""
        for leaf in self.leaves:
            leaf.output.capture.make_files()

    @property
    @abstractmethod
    def ran_for(self) -> float:
        """Seconds for which the last attempt ran, until its first failure or its stop."""

    @property
    @abstractmethod
    def since_end(self) -> float:
        """Seconds since then."""

    @property
    def has_progress(self) -> bool:
        """Whether a worker has reported a step in the last attempt."""
        return False

    @property
    def is_permanent(self) -> bool:
        """Whether no start can repair the failure, or a process is left."""
        return self._is_broken

    # -------------------------------------------------------------- requests

    @abstractmethod
    async def open(self) -> None:
        """Start the job, or raise SpecError or HostError."""

    def request_stop(
        self, reason: str, signal: int | None = None, plan: StopPlan | None = None
    ) -> None:
        """End the job by its stop plan or by `plan`, which then starts with `signal`."""
        self.receive(machine.StopReceived(reason, signal, plan))

    @abstractmethod
    def request_restart(self, reason: str) -> None:
        """Replace the present attempt, or raise as `check_restart` does."""

    def check_restart(self) -> None:
        """Raise HostError if no further attempt can have the arguments of a function."""
        for leaf in self.leaves:
            leaf.check_restart()

    def request_preemption(self, reason: str, seconds: float | None = None) -> bool:
        """Give notice of a preemption in so many seconds, by default the spec's.

        Return whether it counts (see `AgentMachine.accepts`).
        """
        left = self._spec.preemption.deadline if seconds is None else seconds
        now = self._clock.now()
        notice = machine.PreemptionReceived(reason, aio.wall_clock() + left, left, now + left)
        is_accepted: bool = self._machine.accepts(notice)
        self.receive(notice)
        return is_accepted

    @abstractmethod
    def kill(self, reason: str = "", stop: machine.StopReceived = KILLED) -> None:
        """Shorten every stop to SIGKILL because of `reason`, and end the job by `stop`."""

    @abstractmethod
    async def dump(self, reason: str) -> StackDump:
        """Read what all workers are doing."""

    def forward(self, signal: int, *, is_for_all: bool) -> None:
        """Send a signal that this process has received to the workers that handle it, or to all."""
        for leaf in self.leaves:
            leaf.forward(signal, is_for_all=is_for_all)

    def send(self, signal: int, pid: int | None = None) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker, or to one; return their pids."""
        return tuple(sent for leaf in self.leaves for sent in leaf.send(signal, pid))

    async def suspend_while(self, wait: Callable[[], None]) -> None:
        """Suspend all processes and deadlines of the job while `wait` blocks this process.

        Cancellation: the processes continue, as after an exception of `wait`, or an OSError for
        lack of descriptors to find them.
        """
        runtimes, began = self.runtimes, time.monotonic()
        try:
            for runtime in runtimes:
                await runtime.tree.signal_all(SIGSTOP)
            began = time.monotonic()
            wait()
        finally:
            self.skip(time.monotonic() - began)
            for runtime in runtimes:
                await aio.run_shielded(partial(runtime.tree.signal_all, SIGCONT))

    @abstractmethod
    def skip(self, seconds: float) -> None:
        """Leave out the last `seconds` of all deadlines: the job was suspended."""

    # --------------------------------------------------------------- its life

    def _begin(self, start: object) -> None:
        """Hand in the first input, and keep the event loop until the job is over."""
        if self.on_shutdown is None:  # else what keeps the tree does
            aio.separate_in_forks(self.done)
            keeper = aio.create_task(self._keep(), name=f"end of run {self._run_id}")
            self._tasks.add(keeper)
            keeper.add_done_callback(self._tasks.discard)
        self.receive(start)

    async def _keep(self) -> None:
        """Keep an event loop that shuts down until the job is over: no caller may wait for that."""
        try:
            await asyncio.wait([self.done])
        except asyncio.CancelledError:
            if self.is_copy:
                raise
            self.request_stop(_SHUTDOWN)
            await aio.wait_shielded(self.done)
            if not self.is_left:
                self._warn("when its event loop was shut down")
            raise

    def abandon(self) -> None:
        loop = self.done.get_loop()
        if self.is_left or self.is_copy or self.done.done() or loop.is_closed():
            return
        self.is_left = True  # one warning is enough
        if loop.is_running():
            loop.call_soon_threadsafe(self.request_stop, "the agent was garbage-collected")
        else:
            for runtime in self.runtimes:
                runtime.release()
        self._warn("when its agent was garbage-collected")

    def _warn(self, when: str) -> None:
        text = f"the job {self._spec.name} was running {when}; use `async with`"
        warnings.warn(text, ResourceWarning, stacklevel=2)

    # ---------------------------------------------------------------- inputs

    def receive(self, received: Any) -> None:
        """Hand an input to the state machine and perform the effects that it returns."""
        self._inputs.append(received)
        if self._is_handling or self.is_copy:
            return
        self._is_handling = True
        try:
            while self._inputs and not self._is_broken:
                for effect in self._handle(self._inputs.popleft()):
                    self._perform(effect)
        except Exception as error:  # noqa: BLE001  # a defect of ours: stop all processes
            self._abort(error)
        finally:
            self._is_handling = False

    @abstractmethod
    def _handle(self, received: Any) -> Sequence[Any]:
        """Return the effects of an input, in their order."""

    @abstractmethod
    def _perform(self, effect: Any) -> None:
        """Perform an effect, or begin to: see `_run`."""

    def _run(self, effect: Any, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start the task of an effect, whose result is the next input, if it is not None."""
        task = aio.create_task(work, name=f"{type(effect).__name__} of run {self._run_id}")
        self._tasks.add(task)

        def on_done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if self.is_copy:
                return
            if task in self._abandoned:
                self._abandoned.discard(task)
            elif task.cancelled():
                self._shut_down()
                self._on_cancelled(effect)
            elif (error := task.exception()) is not None:
                self._on_defect(effect, error)
            elif (received := task.result()) is not None:
                self.receive(received)

        task.add_done_callback(on_done)
        return task

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        if task in self._tasks:
            self._abandoned.add(task)
            task.cancel()

    def _shut_down(self) -> None:
        """Stop the job since its event loop shuts down, in the order of its tree."""
        if self.on_shutdown is None:
            self.request_stop(_SHUTDOWN)
        else:
            self.on_shutdown()

    @abstractmethod
    def _on_cancelled(self, effect: Any) -> None:
        """Go on after an event loop that shuts down has cancelled the task of an effect."""

    def _on_defect(self, effect: Any, error: BaseException) -> None:
        """End the job after a defect of ours; no process may be left."""
        if isinstance(effect, machine.Finish):
            self.error = self.error or error
            self._settle()
        elif not self._is_broken:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        self._is_broken = True
        outcome = JobOutcome(JobState.FAILED, f"internal error: {error!r}", 1)
        finish = machine.Finish(outcome, error)
        self._run(finish, self._kill_and_finish(finish))

    @abstractmethod
    async def _kill_and_finish(self, finish: machine.Finish) -> None:
        """Kill all processes after a defect, and end."""

    def _end(self, effect: machine.Finish, result: LaunchResult, attempt: int) -> None:
        """Publish the result: the job is over, and `attempt` was its last."""
        outcome = effect.outcome
        self.result, self.outcome, self.error = result, outcome, effect.error
        self._event_log.append(
            JobFinished(
                attempt=attempt,
                state=outcome.state,
                why=outcome.why,
                exit_code=outcome.exit_code,
                duration=result.duration,
                restarts=outcome.restarts,
                goodput=result.goodput,
            )
        )
        self._settle()

    def _settle(self) -> None:
        self._event_log.close()
        if not self.done.done():
            self.done.set_result(None)


class Driver(BaseDriver):
    """One job on this host, or one leaf of a tree; `group` has the workers of its attempt."""

    has_looked: ClassVar[bool] = False
    """Whether a job of this program has looked for lost jobs: it reads every process."""

    def __init__(
        self, runtime: LocalRuntime, decides: machine.AgentMachine, event_log: EventWriter
    ) -> None:
        super().__init__(runtime.spec, runtime.run_id, event_log, runtime.clock)
        self.group: WorkerGroup | None = None
        self.may_have_run = event_log.tracker  # whether the program has
        self._runtime = runtime
        self._machine: machine.AgentMachine = decides
        self._attempts: deque[AttemptResult] = deque(maxlen=_ATTEMPTS_MAX)
        self._sound: list[int] = []  # attempts without a failure
        self._began = runtime.clock.now()
        self._waiting: asyncio.Task[Any] | None = None
        self._stopping: asyncio.Task[Any] | None = None
        self._shows_change = self._has_forwarded = False
        runtime.liveness.on_agreed = lambda *agreed: self.receive(machine.WorkersAgreed(*agreed))
        runtime.liveness.on_progress = lambda attempt: self.receive(machine.ProgressMade(attempt))
        runtime.liveness.on_excluded = lambda *excluded: self.receive(
            machine.ExclusionReceived(*excluded)
        )

    def __repr__(self) -> str:
        return f"<Driver of run {self._runtime.run_id}: {self._machine!r}>"

    @property
    def output(self) -> JobOutput:
        return self._runtime.output

    @property
    def runtimes(self) -> list[LocalRuntime]:
        return [self._runtime]

    @property
    def leaves(self) -> list[Driver]:
        return [self]

    @property
    def logged(self) -> LoggedStreams:
        return self.output.logged

    def with_reports(self, status: JobStatus) -> JobStatus:
        return status if self.group is None else self.group.with_reports(status)

    def at(self, path: str) -> BaseDriver | None:
        return self

    def skip(self, seconds: float) -> None:
        self._clock.skip(seconds)

    @property
    def ran_for(self) -> float:
        return self._machine.uptime

    @property
    def since_end(self) -> float:
        ran_until = None if self.group is None else self.group.ran_until
        return 0.0 if ran_until is None else self._clock.now() - ran_until

    @property
    def has_progress(self) -> bool:
        return isinstance(self._machine, machine.SingleNodeMachine) and self._machine.has_progress

    @property
    def is_permanent(self) -> bool:
        one = self._machine
        return super().is_permanent or (
            isinstance(one, machine.SingleNodeMachine) and one.is_permanent
        )

    async def open(self) -> None:
        await self._runtime.open()
        spec = self._runtime.spec
        self._event_log.append(
            JobStarted(
                entrypoint=spec.name,
                nproc_per_node=self._runtime.nproc,
                nnodes=str(spec.nnodes),
                max_restarts=spec.max_restarts,
                node_losses=str(spec.restart.node_losses or "") if spec.nnodes.maximum > 1 else "",
                agent_pid=os.getpid(),
                role=spec.role,
                rdzv_backend=spec.rendezvous.backend,
                has_timers=bool(spec.timers),
                awaits_ready=spec.ready is not None,
                log_dir=self._runtime.output.directory.log_dir,
                keeps_logs=not spec.logs.is_off,
            )
        )
        self._begin(machine.Start())

    # -------------------------------------------------------------- requests

    def request_restart(self, reason: str) -> None:
        self.check_restart()
        self.receive(machine.RestartReceived(reason))

    def check_restart(self) -> None:
        self._runtime.entrypoint.check_further()

    def kill(self, reason: str = "", stop: machine.StopReceived = KILLED) -> None:
        # First: a stop that begins sends its first signal at once.
        self._runtime.tree.escalate_to_kill(reason or stop.reason)
        self.receive(stop)

    def forward(self, signal: int, *, is_for_all: bool) -> None:
        pids, others = self._runtime.tree.forward(signal)
        if is_for_all:
            for pid in others:
                pids += self._runtime.tree.signal_leaders(signal, pid)
        self._on_forwarded(signal, pids, others)

    @property
    def last_answer(self) -> str:
        """The last answer to a probe of a worker; empty if there is none."""
        records = () if self.group is None else self.group.records.values()
        reports = (one.report for one in records if one.report is not None)
        return next((one.probe for one in reports if one.probe), "")

    def send(self, signal: int, pid: int | None = None) -> tuple[int, ...]:
        records = () if self.group is None else self.group.records.values()
        workers = [record.pid for record in records if pid in (None, record.pid)]
        unhandled = ended_by_default(workers, signal)
        pids = self._runtime.tree.signal_leaders(signal, pid)
        self._on_forwarded(signal, pids, tuple(one for one in unhandled if one in pids))
        return pids

    def _on_forwarded(self, signal: int, pids: tuple[int, ...], unhandled: tuple[int, ...]) -> None:
        attempt = self._runtime.attempt
        self._event_log.append(
            SignalForwarded(attempt=attempt, signal=signal, pids=pids, unhandled=unhandled)
        )

    # ---------------------------------------------------------------- inputs

    def _handle(self, received: machine.Input) -> list[machine.Effect]:
        kept = machine.EffectResult | machine.RestartReceived | machine.PreemptionReceived
        if self.group is not None and not isinstance(received, kept):
            # What follows does not wait for what workers have left.
            self.group.end_linger(received if isinstance(received, machine.StopReceived) else None)
        effects = self._machine.handle(received)
        for effect in effects:  # the signals of a stop precede all other effects
            if isinstance(effect, machine.StopGroup) and not effect.leftovers_only:
                self._current_group.begin_stop(effect.plan)
        return effects

    def _on_exit(self, local_rank: int, ended: ChildExit) -> None:
        group = self._current_group
        record = group.records[local_rank]
        self.receive(
            machine.WorkerEnded(
                group.attempt,
                local_rank,
                ended.status,
                record.is_victim,
                is_lost_peer=record.is_lost_peer,
            )
        )

    def _on_stuck(self, failure: Failure) -> None:
        attempt, local_rank = self._current_group.attempt, failure.local_rank
        why = "another attempt would need what this worker holds"
        stuck = machine.StartFailed(attempt, failure.message, True, 1, local_rank, why)
        self.receive(stuck)

    def _on_hung(self, local_rank: int, why: str) -> None:
        self.receive(machine.WorkerHung(self._current_group.attempt, local_rank, why))

    async def dump(self, reason: str) -> StackDump:
        return await self._runtime.liveness.dump(reason)

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Publish(event):
                self._event_log.append(event)
            case machine.StartGroup():
                self.group = self._make_group(effect)
                self._run(effect, self._start_group(effect))
            case machine.StopGroup():
                if not effect.leftovers_only:
                    self._current_group.announce_stop(
                        effect.plan, effect.reason, effect.signal, is_ordered=effect.is_ordered
                    )
                if self._stopping is not None:
                    self._abandon(self._stopping)  # by a longer plan
                self._stopping = self._run(effect, self._stop_group(effect))
            case machine.CallDecide():
                self._waiting = self._run(effect, self._decide(effect))
            case machine.BackOff():
                self._waiting = self._run(effect, self._back_off(effect))
            case machine.CancelBackOff():
                self._cancel_waiting()
            case machine.ShowChange():
                self._show_change(effect)
            case machine.Finish():
                self._run(effect, self._finish(effect))

    def _show_change(self, change: machine.ShowChange) -> None:
        """Show the workers a change by a file, and a preemption by a signal too, but only once."""
        if change.time_left is None and not self._shows_change:
            return
        from elastic_aio.worker.membership import PREEMPTION, PendingChange, write_pending_change

        self._shows_change, pending = change.time_left is not None, None
        if change.time_left is not None:
            why = PREEMPTION if change.until else change.why
            until = change.until or aio.wall_clock() + change.time_left
            pending = PendingChange(why, until, change.number)
        with suppress(OSError):  # the disk is full, and takes no checkpoint either
            write_pending_change(self._runtime.change_file, pending)
        forwarded = self._runtime.spec.preemption.forward
        if change.until and forwarded is not None and not self._has_forwarded:
            self._has_forwarded = True
            self.forward(forwarded, is_for_all=False)

    def _cancel_waiting(self) -> None:
        if self._waiting is not None:
            self._abandon(self._waiting)
            self._waiting = None

    def _on_cancelled(self, effect: machine.Effect) -> None:
        if isinstance(effect, machine.StopGroup):
            self._run(effect, self._stop_group(effect))
        elif isinstance(effect, machine.Finish):
            self._run(effect, self._finish(effect))

    def _abort(self, error: BaseException) -> None:
        self._cancel_waiting()
        super()._abort(error)

    async def _kill_and_finish(self, finish: machine.Finish) -> None:
        self._runtime.tree.escalate_to_kill(finish.outcome.why)
        if self.group is not None:
            await self.group.stop_processes(self._runtime.spec.stop)
        await self._finish(finish)

    # --------------------------------------------------------------- effects

    def _make_group(self, effect: machine.StartGroup) -> WorkerGroup:
        placement, nproc = effect.placement, self._runtime.nproc
        if placement is None:
            (node,) = assign_node_ranks([NodeSize(self._runtime.spec.role, nproc)])
            master = None
        else:
            node = placement.span
            master = placement.master_addr, placement.master_port
        ranks = node.worker_ranks(nproc)
        if self._runtime.place is not None and self._runtime.place.worker is not None:
            ranks = (self._runtime.place.worker,)
        return WorkerGroup(
            self._runtime,
            ranks,
            on_exit=self._on_exit,
            on_stuck=self._on_stuck,
            on_hung=self._on_hung,
            attempt=effect.attempt,
            restarts=effect.restarts,
            round_number=effect.attempt if placement is None else placement.round,
            master=master,
        )

    @property
    def _current_group(self) -> WorkerGroup:
        assert self.group is not None, "the state machine starts a group first"
        return self.group

    async def _start_group(self, effect: machine.StartGroup) -> machine.Input:
        try:
            await self._current_group.start()
        except SpawnError as error:
            is_permanent = error.permanent and not self.may_have_run.has_run
            return machine.StartFailed(
                effect.attempt, str(error), is_permanent, error.exit_code, error.local_rank
            )
        except HostError as error:
            return machine.StartFailed(effect.attempt, str(error), False, 1, 0)
        if self.finds_lost_jobs:
            self.finds_lost_jobs = False
            finding = aio.create_task(self._find_lost_jobs(), name="find lost jobs")
            self.done.add_done_callback(lambda _: finding.cancel())
        return machine.GroupStarted(effect.attempt, self._clock.now())

    async def _find_lost_jobs(self) -> None:
        await asyncio.sleep(_QUIET_S)  # the workers start, and need the CPUs
        if self.is_copy or Driver.has_looked:
            return
        Driver.has_looked = True
        from elastic_aio.process.lost_jobs import find_lost_jobs

        for job in await find_lost_jobs():
            found = LostJobFound(lost_run_id=job.run_id, pids=job.pids, since=job.since)
            if not self.done.done():
                self._event_log.append(found)

    async def _stop_group(self, effect: machine.StopGroup) -> machine.GroupStopped:
        group = self._current_group
        survivors = await group.stop(effect.plan, leftovers_only=effect.leftovers_only)
        result = await group.result()
        self._attempts.append(result)
        if not (result.failures or group.has_failed_to_stop):
            self._sound.append(result.number)
        now = self._clock.now()
        return machine.GroupStopped(
            effect.attempt,
            now,
            result.failures,
            bool(survivors),
            group.first_success,
            group.ran_until,
            group.ready_at,
        )

    async def _decide(self, effect: machine.CallDecide) -> machine.Input:
        decide = self._runtime.spec.restart.decide
        assert decide is not None, "the state machine asks only if there is a callback"
        deciding = aio.create_task(call_decide(decide, effect.failure), name="restart.decide")
        try:
            await self._clock.wait_for(deciding, seconds=DECIDE_TIMEOUT)
        finally:
            deciding.cancel()  # not waited for: the callback is the user's
        if not deciding.done():
            return machine.DecisionFailed(effect.attempt, why_undecided(DECIDE_TIMEOUT))
        decision = deciding.result()
        if isinstance(decision, RestartAction):
            return machine.DecisionMade(effect.attempt, decision)
        return machine.DecisionFailed(effect.attempt, why_undecided(decision), decision)

    async def _back_off(self, effect: machine.BackOff) -> machine.Input:
        await self._clock.sleep(effect.delay)
        return machine.BackoffElapsed(effect.attempt)

    async def _finish(self, effect: machine.Finish) -> None:
        outcome = effect.outcome
        self._show_change(machine.ShowChange())
        if self.group is not None:
            await self.group.close()
        if outcome.state is not JobState.FAILED:
            await self.output.remove_captured(self._sound)
        has_logs = await self._runtime.close()
        duration = self._clock.now() - self._began
        goodput = self._event_log.tracker.goodput(time.time())
        result = make_result(
            self._runtime.run_id,
            outcome,
            self._machine.attempt,
            self._attempts,
            duration,
            time.time(),
            log_dir=self.output.directory.path if has_logs else None,
            goodput=goodput,
        )
        attempts = await self.output.drop_missing(result.attempts, has_logs=has_logs)
        self._end(effect, replace(result, attempts=attempts), self._machine.attempt)


async def call_decide(decide: Decide, failure: Failure) -> RestartAction | BaseException:
    """Return the decision of the user's `restart.decide`, or what it raised.

    Cancellation: raised only if the caller's task was cancelled; a CancelledError that the callback
    raises is returned.  A thread goes on, but the program does not wait for it.
    """
    # A coroutine function runs on the event loop.  Any other callback runs in a thread: it may
    # block, and the loop has heartbeats to send and perhaps the store of all nodes to serve.
    decision: RestartAction | Awaitable[RestartAction] | None
    try:
        if inspect.iscoroutinefunction(decide):
            decision = decide(failure)
        else:
            call = partial(contextvars.copy_context().run, decide, failure)
            decision, error = await aio.run_in_thread(_result_of, call, daemon=True)
            if error is not None:
                raise error
        action = await decision if inspect.isawaitable(decision) else decision
        if not isinstance(action, RestartAction):
            raise TypeError(f"restart.decide must return a RestartAction (got {action!r})")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except (SystemExit, KeyboardInterrupt):
        raise  # which ends the loop
    except BaseException as error:  # noqa: BLE001  # the user's code: handed to the user
        return error
    return action


def _result_of(
    call: Callable[[], RestartAction | Awaitable[RestartAction]],
) -> tuple[RestartAction | Awaitable[RestartAction] | None, BaseException | None]:
    # A future cannot carry every exception: GeneratorExit closes the coroutines that await it.
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001  # handed to the caller
        return None, error
