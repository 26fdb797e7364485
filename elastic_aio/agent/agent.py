"""The agent: performs what the machine decides, and reports by events only.

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec

from elastic_aio.agent.evidence import gather_failures
from elastic_aio.agent.host import Host, HostCallbacks
from elastic_aio.agent.ledger import Ledger
from elastic_aio.agent.machine import Machine
from elastic_aio.agent.memory import oom_kills
from elastic_aio.agent.surroundings import check_child_signals, node_name, resolve_nproc
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
from elastic_aio.aio import Pausable, outlast, owned_task, see_through
from elastic_aio.channel import History, Reader
from elastic_aio.errors import JobFailed, JobStopped, SpawnError, SpecError, SurroundingsError
from elastic_aio.events import (
    ConsoleLost,
    Event,
    EventsMissed,
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
from elastic_aio.logs.sink import Console, Sink, open_console
from elastic_aio.outcome import ExitStatus, Failure, JobState, LaunchResult
from elastic_aio.policy import Action
from elastic_aio.process.base import Child, Exit, Spawner
from elastic_aio.process.command import command_spawner
from elastic_aio.ranks import NodeSize, Place, assign_places
from elastic_aio.spec import LaunchSpec

__all__ = ["Agent"]

Listener = Callable[[Event], None]


class Agent:
    """Runs one job on this host: an async context manager.

    Entering starts the job, `wait` gives its result, `events` its story; leaving
    the block early stops everything by the stop plan.  Works on any event loop and
    any thread, and never touches signal handlers.

    ::

        async with Agent(spec) as agent:
            async for event in agent.events():
                print(event)
            result = await agent.wait()
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        console: Console | None = None,
        spawner: Spawner | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        """Prepare a job; nothing is started before the block is entered.

        Args:
            spec: the job.
            console: where tee'd output goes; None is this process's own.
            spawner: starts processes; None chooses by the running loop.
            listeners: called with every event as it happens; they must not block.
        """
        self.spec = spec
        self.run_id = spec.run_id or os.urandom(8).hex()
        self._console = console
        self._spawner = spawner
        self._listeners = listeners
        self._node = node_name()
        self._history: History[Event] = History(spec.events_kept, self._missed)
        self._ledger = Ledger(self._node)
        self._pending: deque[Happening] = deque()
        self._is_handling = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: asyncio.Task[Happening] | None = None
        self._result: LaunchResult | None = None
        self._error: BaseException | None = None
        self._start_failed: StartFailed | None = None
        self._stopped_at = 0.0
        self._consoles_lost: set[str] = set()

    def __repr__(self) -> str:
        return f"<Agent of run {self.run_id}: {self._result.state if self._result else 'not over'}>"

    async def __aenter__(self) -> Agent:
        """Check the surroundings, start the job, and return.

        Raises:
            SpecError: a setting does not fit this machine.
            SurroundingsError: the machine or this process lacks something.
        """
        if self.spec.nnodes.maximum > 1:
            raise SpecError("nnodes", str(self.spec.nnodes), "must be 1 in this version")
        check_child_signals()
        nproc = resolve_nproc(self.spec)
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._clock = Pausable()
        self._began = self._clock.now()
        self._places = {
            place.local_rank: place
            for place in assign_places([NodeSize(self.spec.role, nproc)], group_rank=0)
        }
        self._machine = Machine(self.spec, nproc, random.random)
        self._own_console = None if self._console else open_console()
        console = self._console or self._own_console
        assert console is not None
        self._host = Host(
            self.spec,
            run_id=self.run_id,
            name=self._node,
            nproc=nproc,
            console=console,
            spawner=self._spawner or command_spawner(loop),
            clock=self._clock,
            tell=HostCallbacks(
                started=self._on_started,
                exited=self._on_exited,
                guardian_replaced=lambda pid: self._publish(GuardianReplaced(pid=pid)),
                console_lost=self._on_console_lost,
                console_blocked=self._on_console_blocked,
            ),
        )
        try:
            await self._host.open()
        except BaseException:
            await see_through(self._close_host)
            raise
        self._publish(
            JobStarted(
                entrypoint=self.spec.name,
                nproc_per_node=nproc,
                nnodes=str(self.spec.nnodes),
                max_restarts=self.spec.max_restarts,
                agent_pid=os.getpid(),
                log_dir=self._host.folder.announced,
            )
        )
        self._happened(Begun())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the job if it still runs, and wait until nothing of it is left."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        reason = "the launch was cancelled" if is_cancelled else "the agent's block was left"
        self._happened(StopAsked(reason))
        await outlast(self._done)

    def events(self, after: int = -1) -> Reader[Event]:
        """Return an async iterator over the events of the job, from its start.

        Any number of readers may iterate, each at its own pace; the iteration ends
        after `JobFinished`.  A reader that comes too late for some events gets one
        `EventsMissed` in their place.

        Args:
            after: a cursor: the `seq` of the last event that was already seen.
        """
        return self._history.read(after + 1)

    async def wait(self) -> LaunchResult:
        """Wait for the end of the job and return its result.

        Cancelling this wait stops nothing by itself; leaving the block does.

        Raises:
            JobFailed: the workers failed and no restart is left.
            JobStopped: a signal or `stop` ended the job.
            Exception: whatever `restart.decide` raised.
        """
        if not self._done.done():
            await asyncio.wait([self._done])
        if self._error is not None:
            raise self._error
        result = self._result
        assert result is not None, "a job that is over has a result or an error"
        if result.state is JobState.FAILED:
            raise JobFailed(_failed_message(self.spec, result), result)
        if result.state is JobState.STOPPED:
            raise JobStopped(f"{self.spec.name} was stopped: {result.reason}", result)
        return result

    def stop(
        self, *, signal: int | None = None, reason: str = "a stop was requested"
    ) -> Awaitable[None]:
        """Ask the job to end by its stop plan; `wait` then raises `JobStopped`.

        Args:
            signal: replaces the first signal of the plan.
            reason: told in the events and the result.

        Returns:
            An awaitable that is done when nothing of the job is left; the request
            is made whether or not it is awaited.
        """
        self._happened(StopAsked(reason, signal))
        return asyncio.shield(self._done)

    def kill(self) -> None:
        """Ask the job to end at once: every stop is shortened to SIGKILL."""
        self._host.tree.kill_now()
        self._happened(StopAsked("an immediate stop was requested"))

    def forward_signal(self, signal: int) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids."""
        pids = self._host.tree.signal_leaders(signal)
        self._publish(SignalForwarded(attempt=self._machine.attempt, signal=signal, pids=pids))
        return pids

    async def pause_while(self, away: Callable[[], None], stop: int, go_on: int) -> None:
        """Hold all processes of the job while `away` runs, and all deadlines with them.

        Args:
            away: blocks this whole process, and returns when it goes on.
            stop: the signal that holds the processes.
            go_on: the signal that lets them go on.
        """
        await self._host.tree.signal_all(stop)
        began = time.monotonic()
        away()
        self._clock.skip(time.monotonic() - began)
        await self._host.tree.signal_all(go_on)

    # ------------------------------------------------------------ happenings

    def _happened(self, happening: Happening) -> None:
        """Hand a happening to the machine and perform what it says."""
        self._pending.append(happening)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._pending:
                for effect in self._machine.handle(self._pending.popleft()):
                    self._perform(effect)
        finally:
            self._is_handling = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Publish(event):
                self._publish(event)
            case StartGroup():
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
        task = owned_task(work, name=f"{type(effect).__name__} of run {self.run_id}")
        self._tasks.add(task)

        def ended(task: asyncio.Task[Happening | None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                self._on_effect_cancelled(effect)
            elif (error := task.exception()) is not None:
                self._on_effect_broken(effect, error)
            elif (happening := task.result()) is not None:
                self._happened(happening)

        task.add_done_callback(ended)
        return task

    def _on_effect_cancelled(self, effect: Effect) -> None:
        # By us (StopWaiting: the machine is done and ignores this), or by an event
        # loop that shuts down.
        self._happened(StopAsked("the event loop is shutting down"))
        if isinstance(effect, StopGroup):
            self._run(effect, self._stop_group(effect))
        elif isinstance(effect, Finish):
            self._run(effect, self._finish(effect))

    def _on_effect_broken(self, effect: Effect, error: BaseException) -> None:
        """Give up on a defect of ours, without leaving anything behind."""
        self._error = error
        if isinstance(effect, Finish):
            self._settle()
        else:
            self._host.tree.kill_now()
            finish = Finish(JobState.FAILED, f"internal error: {error!r}", 1, 0, error)
            self._run(finish, self._finish(finish))

    # --------------------------------------------------------------- effects

    async def _start_group(self, effect: StartGroup) -> Happening:
        attempt = effect.attempt
        self._start_failed = None
        self._ledger.begin_attempt(
            attempt,
            self._host.attempt_folder(attempt),
            now=time.monotonic(),
            unix=time.time(),
            oom_kills=oom_kills(),
        )
        try:
            await self._host.start(attempt, self._places, effect.restarts)
        except SpawnError as error:
            self._start_failed = StartFailed(
                attempt, str(error), error.permanent, error.exit_code, error.local_rank
            )
        except SurroundingsError as error:
            self._start_failed = StartFailed(attempt, str(error), False, 1, 0)
        return self._start_failed or GroupStarted(attempt, self._clock.now())

    async def _stop_group(self, effect: StopGroup) -> Happening:
        if effect.leftovers_only and await self._host.tree.settle():
            survivors = []
        else:
            if effect.leftovers_only:
                left = replace(effect, reason="the workers have left processes behind")
                self._announce_stop(left)
            survivors = await self._host.stop(effect.plan, self._on_escalated)
        for one in survivors:
            self._publish(WorkerAbandoned(attempt=effect.attempt, pid=one.pid, state=one.state))
        self._host.finish_logs()
        failures = await self._gather_failures()
        self._ledger.end_attempt(failures, time.monotonic())
        return GroupGone(effect.attempt, self._clock.now(), failures)

    async def _gather_failures(self) -> tuple[Failure, ...]:
        """Return why the attempt failed; nothing if all that ended badly were victims."""
        failures = await gather_failures(
            self._ledger.unsuccessful(),
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
        decide = self.spec.restart.decide
        assert decide is not None, "the machine asks only where somebody answers"
        try:
            answer = decide(effect.failure)
            action = await answer if inspect.isawaitable(answer) else answer
            if not isinstance(action, Action):
                raise TypeError(f"restart.decide must return an Action, not {action!r}")
        except Exception as error:  # noqa: BLE001  # the user's code: handed to the user
            return DecideRaised(effect.attempt, error)
        return Decided(effect.attempt, action)

    async def _wait(self, effect: Wait) -> Happening:
        await self._clock.sleep(effect.delay)
        return DelayElapsed(effect.attempt)

    async def _finish(self, effect: Finish) -> None:
        has_logs = await self._close_host()
        duration = self._clock.now() - self._began
        self._result = self._ledger.result(
            run_id=self.run_id,
            state=effect.state,
            why=effect.why,
            exit_code=effect.exit_code,
            duration=duration,
            restarts=effect.restarts,
            log_dir=self._host.folder.path if has_logs else None,
        )
        self._error = effect.error
        self._publish(
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

    async def _close_host(self) -> bool:
        has_logs = await self._host.close()
        if self._own_console is not None:
            self._own_console.close()
            self._own_console = None
        return has_logs

    def _settle(self) -> None:
        self._history.close()
        if not self._done.done():
            self._done.set_result(None)

    # ---------------------------------------------------------------- events

    def _publish(self, event: Event) -> None:
        stamped = msgspec.structs.replace(
            event,
            seq=self._history.count,
            time=time.time(),
            run_id=self.run_id,
            node=self._node,
        )
        self._history.append(stamped)
        for listener in self._listeners:
            listener(stamped)

    def _missed(self, count: int, following: int) -> Event:
        return EventsMissed(
            seq=following - 1,
            time=time.time(),
            run_id=self.run_id,
            node=self._node,
            count=count,
        )

    def _announce_stop(self, effect: StopGroup) -> None:
        self._stopped_at = time.time()
        self._publish(
            StopRequested(
                attempt=effect.attempt,
                reason=effect.reason,
                plan=str(effect.plan),
                signal=effect.signal,
            )
        )

    def _on_escalated(self, signal: int, pids: tuple[int, ...]) -> None:
        self._publish(StopEscalated(attempt=self._machine.attempt, signal=signal, pids=pids))

    def _on_started(self, attempt: int, local_rank: int, child: Child) -> None:
        place: Place = self._places[local_rank]
        logs = self._host.logs_of(attempt, local_rank)
        self._ledger.worker_started(place, child.pid, logs, time.monotonic())
        self._publish(
            WorkerStarted(attempt=attempt, rank=place.rank, local_rank=local_rank, pid=child.pid)
        )

    def _on_exited(self, attempt: int, local_rank: int, child: Child, ended: Exit) -> None:
        if self._done.done():
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
        self._publish(
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

    def _on_console_lost(self, sink: Sink) -> None:
        if sink.name not in self._consoles_lost:
            self._consoles_lost.add(sink.name)
            self._publish(
                ConsoleLost(
                    attempt=self._machine.attempt, stream=sink.name, why=sink.lost or "it is closed"
                )
            )

    def _on_console_blocked(self) -> None:
        why = "nobody has read it since the workers ended"
        self._publish(ConsoleLost(attempt=self._machine.attempt, stream="console", why=why))


def _failed_message(spec: LaunchSpec, result: LaunchResult) -> str:
    if not result.failures:
        return f"{spec.name} failed: {result.reason}"
    root = result.failures[0]
    if root.pid is None:
        return root.message
    return f"{spec.name} failed, {root.summary}; {result.reason}"
