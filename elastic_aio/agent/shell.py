"""The shell: performs what the machine decides, on this host.

Everything happens in callbacks and owned tasks: a happening is handed to the
machine at once, and each effect that takes time is a task whose result is the next
happening.  No task of ours holds the job's life in its frame, so it does not matter
which of them an event loop that shuts down cancels first: a cancelled effect tells
the machine to stop the job, and a cancelled stop is started over.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from elastic_aio.agent.chronicle import Chronicle
from elastic_aio.agent.evidence import gather_failures
from elastic_aio.agent.host import Host, HostCallbacks
from elastic_aio.agent.ledger import Ledger
from elastic_aio.agent.machine import Machine
from elastic_aio.agent.memory import oom_kills
from elastic_aio.agent.vocabulary import (
    AskDecision,
    Begun,
    Decided,
    DecideRaised,
    DelayElapsed,
    Effect,
    Finish,
    GroupGone,
    GroupStarted,
    Happening,
    Publish,
    StartFailed,
    StartGroup,
    StopAsked,
    StopGroup,
    StopWaiting,
    Wait,
    WorkerEnded,
)
from elastic_aio.aio import Pausable, owned_task, see_through
from elastic_aio.errors import InternalError, SpawnError, SurroundingsError
from elastic_aio.events import (
    ConsoleLost,
    GuardianReplaced,
    JobFinished,
    JobStarted,
    SignalForwarded,
    StopEscalated,
    StopRequested,
    WorkerAbandoned,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.logs.sink import Console, Sink
from elastic_aio.outcome import ExitStatus, Failure, JobState, LaunchResult
from elastic_aio.policy import Action
from elastic_aio.process.base import Child, Exit, Spawner
from elastic_aio.process.results import Told
from elastic_aio.ranks import NodeSize, assign_places
from elastic_aio.spec import LaunchSpec

__all__ = ["Shell"]


class Shell:
    """One job in the making: `done` when it is over and nothing of it is left."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        run_id: str,
        node: str,
        nproc: int,
        console: Console | None,
        spawner: Spawner,
        chronicle: Chronicle,
    ) -> None:
        """Prepare; only `open` touches the machine.

        Args:
            spec: the job.
            run_id: name of the run.
            node: name of this host.
            nproc: number of workers on it.
            console: where shown output goes; None is this process's own.
            spawner: starts processes.
            chronicle: told everything that happens.
        """
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result: LaunchResult | None = None
        self.error: BaseException | None = None
        self.clock = Pausable()
        self._spec = spec
        self._run_id = run_id
        self._node = node
        self._chronicle = chronicle
        self._began = self.clock.now()
        self._places = dict(enumerate(assign_places([NodeSize(spec.role, nproc)], group_rank=0)))
        self._machine = Machine(spec, nproc, random.random)
        self._ledger = Ledger(node)
        self._pending: deque[Happening] = deque()
        self._is_handling = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: asyncio.Task[Happening] | None = None
        self._start_failed: StartFailed | None = None
        self._stopped_at = 0.0
        self._host = Host(
            spec,
            run_id=run_id,
            name=node,
            nproc=nproc,
            console=console,
            spawner=spawner,
            clock=self.clock,
            tell=HostCallbacks(
                started=self._on_started,
                exited=self._on_exited,
                guardian_replaced=lambda pid: chronicle.tell(GuardianReplaced(pid=pid)),
                console_lost=self._on_console_lost,
            ),
        )

    def __repr__(self) -> str:
        return f"<Shell of run {self._run_id}: {self._machine!r}>"

    async def open(self) -> None:
        """Prepare the host and begin.

        Raises:
            SpecError: a setting does not fit this machine.
            SurroundingsError: the machine lacks something.
        """
        try:
            await self._host.open()
        except BaseException:
            await see_through(self._host.close)
            raise
        self._chronicle.tell(
            JobStarted(
                entrypoint=self._spec.name,
                nproc_per_node=len(self._places),
                nnodes=str(self._spec.nnodes),
                max_restarts=self._spec.max_restarts,
                agent_pid=os.getpid(),
                log_dir=self._host.folder.announced,
            )
        )
        self._happened(Begun())

    # -------------------------------------------------------------- requests

    def ask_to_stop(self, reason: str, signal: int | None = None) -> None:
        """Let the job end by its stop plan, which then starts with `signal`."""
        self._happened(StopAsked(reason, signal))

    def kill(self) -> None:
        """Shorten every stop to SIGKILL, and let the job end."""
        self._host.tree.kill_now()
        self.ask_to_stop("an immediate stop was requested")

    def forward(self, signal: int) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids."""
        pids = self._host.tree.signal_leaders(signal)
        told = SignalForwarded(attempt=self._machine.attempt, signal=signal, pids=pids)
        self._chronicle.tell(told)
        return pids

    async def signal_all(self, signal: int) -> None:
        """Send a signal to every process of the job."""
        await self._host.tree.signal_all(signal)

    # ------------------------------------------------------------ happenings

    def _happened(self, happening: Happening) -> None:
        """Hand a happening to the machine and perform what it says."""
        self._pending.append(happening)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._pending:
                try:
                    effects = self._machine.handle(self._pending.popleft())
                except InternalError as error:
                    self._break_off(error)
                    return
                for effect in effects:
                    self._perform(effect)
        finally:
            self._is_handling = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Publish(event):
                self._chronicle.tell(event)
            case StartGroup():
                self._begin_attempt(effect.attempt)
                self._run(effect, self._start_group(effect))
            case StopGroup():
                self._stopped_at = time.time()
                if not effect.leftovers_only:
                    self._announce_stop(effect)
                self._run(effect, self._stop_group(effect))
            case AskDecision():
                self._waiting = self._run(effect, self._ask(effect))
            case Wait():
                self._waiting = self._run(effect, self._wait(effect))
            case StopWaiting():
                if self._waiting is not None:
                    self._waiting.cancel()
            case Finish():
                self._run(effect, self._finish(effect))

    def _run(
        self, effect: Effect, work: Coroutine[Any, Any, Happening | None]
    ) -> asyncio.Task[Any]:
        """Perform an effect in a task; its result is the next happening."""
        task = owned_task(work, name=f"{type(effect).__name__} of run {self._run_id}")
        self._tasks.add(task)

        def ended(task: asyncio.Task[Happening | None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                self._on_cancelled(effect)
            elif (error := task.exception()) is not None:
                self._on_broken(effect, error)
            elif (happening := task.result()) is not None:
                self._happened(happening)

        task.add_done_callback(ended)
        return task

    def _on_cancelled(self, effect: Effect) -> None:
        # By us (StopWaiting: the machine is done and drops this), or by an event
        # loop that shuts down.
        self.ask_to_stop("the event loop is shutting down")
        if isinstance(effect, StopGroup):
            self._run(effect, self._stop_group(effect))
        elif isinstance(effect, Finish):
            self._run(effect, self._finish(effect))

    def _on_broken(self, effect: Effect, error: BaseException) -> None:
        """Give up on a defect of ours; nothing may be left behind even so."""
        if isinstance(effect, Finish):
            self.error = self.error or error
            self._settle()
        else:
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        finish = Finish(JobState.FAILED, f"internal error: {error!r}", 1, 0, error)
        self._run(finish, self._kill_and_finish(finish))

    async def _kill_and_finish(self, finish: Finish) -> None:
        self._host.tree.kill_now()
        await self._host.stop(self._spec.stop, self._on_escalated)
        await self._finish(finish)

    # --------------------------------------------------------------- effects

    def _begin_attempt(self, attempt: int) -> None:
        self._start_failed = None
        self._ledger.begin_attempt(
            attempt,
            self._host.attempt_folder(attempt),
            now=time.monotonic(),
            unix=time.time(),
            oom_kills=oom_kills(),
        )

    async def _start_group(self, effect: StartGroup) -> Happening:
        attempt = effect.attempt
        try:
            await self._host.start(attempt, self._places, effect.restarts)
        except SpawnError as error:
            self._start_failed = StartFailed(
                attempt, str(error), error.permanent, error.exit_code, error.local_rank
            )
        except SurroundingsError as error:
            self._start_failed = StartFailed(attempt, str(error), False, 1, 0)
        return self._start_failed or GroupStarted(attempt, self.clock.now())

    async def _stop_group(self, effect: StopGroup) -> Happening:
        if effect.leftovers_only and await self._host.tree.settle():
            survivors = []
        else:
            if effect.leftovers_only:
                left = replace(effect, reason="the workers have left processes behind")
                self._announce_stop(left)
            survivors = await self._host.stop(effect.plan, self._on_escalated)
        for one in survivors:
            self._chronicle.tell(
                WorkerAbandoned(attempt=effect.attempt, pid=one.pid, state=one.state)
            )
        await self._host.end_attempt()
        told = await self._host.told()
        failures = await self._gather_failures(told)
        self._ledger.end_attempt(failures, time.monotonic(), told)
        return GroupGone(effect.attempt, self.clock.now(), failures, bool(survivors))

    async def _gather_failures(self, told: Mapping[int, Told]) -> tuple[Failure, ...]:
        """Return why the attempt failed; nothing if all that ended badly were victims."""
        failures = await gather_failures(
            self._ledger.unsuccessful(told),
            stopped_at=self._stopped_at,
            oom_kills_before=self._ledger.oom_kills_before,
        )
        if self._start_failed is not None:
            failures = (self._failure_to_start(self._start_failed), *failures)
        return failures if failures and not failures[0].is_victim else ()

    def _failure_to_start(self, failed: StartFailed) -> Failure:
        return Failure(
            rank=self._places[failed.local_rank].rank,
            local_rank=failed.local_rank,
            pid=None,
            host=self._node,
            status=ExitStatus(code=failed.exit_code),
            time=time.time(),
            order=-1,
            message=failed.message,
        )

    async def _ask(self, effect: AskDecision) -> Happening:
        decide = self._spec.restart.decide
        assert decide is not None, "the machine asks only where somebody answers"
        try:
            answer = decide(effect.failure)
            action = await answer if inspect.isawaitable(answer) else answer
            if not isinstance(action, Action):
                raise TypeError(f"restart.decide must return an Action, not {action!r}")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return DecideRaised(effect.attempt, error)  # the callback's own
        except Exception as error:  # noqa: BLE001  # the user's code: handed to the user
            return DecideRaised(effect.attempt, error)
        return Decided(effect.attempt, action)

    async def _wait(self, effect: Wait) -> Happening:
        await self.clock.sleep(effect.delay)
        return DelayElapsed(effect.attempt)

    async def _finish(self, effect: Finish) -> None:
        has_logs = await self._host.close()
        duration = self.clock.now() - self._began
        self.result = self._ledger.result(
            run_id=self._run_id,
            state=effect.state,
            why=effect.why,
            exit_code=effect.exit_code,
            duration=duration,
            restarts=effect.restarts,
            log_dir=self._host.folder.path if has_logs else None,
        )
        self.error = effect.error
        self._chronicle.tell(
            JobFinished(
                attempt=self._machine.attempt,
                state=effect.state,
                why=effect.why,
                exit_code=effect.exit_code,
                duration=duration,
                restarts=effect.restarts,
            )
        )
        self._settle()

    def _settle(self) -> None:
        self._chronicle.close()
        if not self.done.done():
            self.done.set_result(None)

    # --------------------------------------------------------------- telling

    def _announce_stop(self, effect: StopGroup) -> None:
        self._stopped_at = time.time()
        self._chronicle.tell(
            StopRequested(
                attempt=effect.attempt,
                reason=effect.reason,
                plan=str(effect.plan),
                signal=effect.signal,
            )
        )

    def _on_escalated(self, signal: int, pids: tuple[int, ...]) -> None:
        self._chronicle.tell(StopEscalated(attempt=self._machine.attempt, signal=signal, pids=pids))

    def _on_started(self, attempt: int, local_rank: int, child: Child) -> None:
        place = self._places[local_rank]
        logs = self._host.logs_of(attempt, local_rank)
        self._ledger.worker_started(place, child.pid, logs, time.monotonic())
        self._chronicle.tell(
            WorkerStarted(attempt=attempt, rank=place.rank, local_rank=local_rank, pid=child.pid)
        )

    def _on_exited(self, attempt: int, local_rank: int, child: Child, ended: Exit) -> None:
        if self.done.done() or attempt != self._machine.attempt:
            return  # one that could not be killed has gone at last
        is_victim = self._host.tree.was_asked(child.pid)
        duration = self._ledger.worker_exited(
            local_rank,
            ended.status,
            ended.usage,
            at=ended.at,
            unix=time.time(),
            is_victim=is_victim,
        )
        self._chronicle.tell(
            WorkerExited(
                attempt=attempt,
                rank=self._places[local_rank].rank,
                local_rank=local_rank,
                pid=child.pid,
                status=ended.status,
                duration=duration,
                is_victim=is_victim,
                usage=ended.usage,
            )
        )
        self._happened(WorkerEnded(attempt, local_rank, ended.status, is_victim))

    def _on_console_lost(self, sink: Sink, why: str) -> None:
        self._chronicle.tell(ConsoleLost(attempt=self._machine.attempt, stream=sink.name, why=why))
