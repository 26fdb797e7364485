"""The shell: performs what the machine decides, on this host.

Everything happens in callbacks and owned tasks: a happening is handed to the
machine at once, and each effect that takes time is a task whose result is the next
happening.  No task of ours holds the job's life in its frame, so it does not matter
which of them an event loop that shuts down cancels first: a cancelled effect tells
the machine to stop the job, and a cancelled stop is started over.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from elastic_aio.agent.chronicle import Chronicle
from elastic_aio.agent.decision import ask_user
from elastic_aio.agent.groupkeeper import GroupKeeper
from elastic_aio.agent.groupmachine import GroupMachine
from elastic_aio.agent.vocabulary import (
    AskDecision,
    Begun,
    Decided,
    DecideRaised,
    DelayElapsed,
    Effect,
    Finish,
    Happening,
    Publish,
    StartGroup,
    StopAsked,
    StopGroup,
    StopWaiting,
    Wait,
)
from elastic_aio.aio import owned_task
from elastic_aio.events import JobFinished, JobStarted
from elastic_aio.outcome import JobState, LaunchResult
from elastic_aio.policy import Action
from elastic_aio.spec import LaunchSpec

__all__ = ["Shell"]


class Shell:
    """One job in the making: `done` when it is over and nothing of it is left."""

    def __init__(
        self,
        spec: LaunchSpec,
        machine: GroupMachine,
        keeper: GroupKeeper,
        chronicle: Chronicle,
        *,
        run_id: str,
    ) -> None:
        """Prepare; only `open` touches the machine.

        Args:
            spec: the job.
            machine: decides.
            keeper: performs what is about the workers.
            chronicle: told everything that happens.
            run_id: name of the run.
        """
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result: LaunchResult | None = None
        self.error: BaseException | None = None
        self.is_rendezvous_failure = False
        self.clock = keeper.clock
        self._spec = spec
        self._machine = machine
        self._keeper = keeper
        self._chronicle = chronicle
        self._run_id = run_id
        self._began = self.clock.now()
        self._pending: deque[Happening] = deque()
        self._is_handling = False
        self._is_broken = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._given_up: set[asyncio.Task[Any]] = set()
        self._waiting: asyncio.Task[Any] | None = None
        keeper.on_worker_ended = self._happened

    def __repr__(self) -> str:
        return f"<Shell of run {self._run_id}: {self._machine!r}>"

    async def open(self) -> None:
        """Prepare the host and begin.

        Raises:
            SpecError: a setting does not fit this machine.
            SurroundingsError: the machine lacks something.
        """
        await self._keeper.open()
        self._chronicle.tell(
            JobStarted(
                entrypoint=self._spec.name,
                nproc_per_node=self._keeper.nproc,
                nnodes=str(self._spec.nnodes),
                max_restarts=self._spec.max_restarts,
                agent_pid=os.getpid(),
                log_dir=self._keeper.host.folder.announced,
            )
        )
        self._happened(Begun())

    # -------------------------------------------------------------- requests

    def ask_to_stop(self, reason: str, signal: int | None = None) -> None:
        """Let the job end by its stop plan, which then starts with `signal`."""
        self._happened(StopAsked(reason, signal))

    def kill(self) -> None:
        """Shorten every stop to SIGKILL, and let the job end."""
        self._keeper.host.tree.kill_now()
        self.ask_to_stop("an immediate stop was requested")

    def forward(self, signal: int) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids."""
        return self._keeper.forward(signal)

    async def signal_all(self, signal: int) -> None:
        """Send a signal to every process of the job."""
        await self._keeper.host.tree.signal_all(signal)

    # ------------------------------------------------------------ happenings

    def _happened(self, happening: Happening) -> None:
        """Hand a happening to the machine and perform what it says."""
        self._pending.append(happening)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._pending and not self._is_broken:
                for effect in self._machine.handle(self._pending.popleft()):
                    self._perform(effect)
        except Exception as error:  # noqa: BLE001  # a defect of ours: nothing is left behind
            self._break_off(error)
        finally:
            self._is_handling = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Publish(event):
                self._chronicle.tell(event)
            case StartGroup():
                self._keeper.begin(effect)
                self._run(effect, self._keeper.start(effect))
            case StopGroup():
                self._keeper.announce_stop(effect)
                self._run(effect, self._keeper.stop(effect))
            case AskDecision():
                self._waiting = self._run(effect, self._ask(effect))
            case Wait():
                self._waiting = self._run(effect, self._wait(effect))
            case StopWaiting():
                self._stop_waiting()
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
            if task in self._given_up:
                self._given_up.discard(task)
            elif task.cancelled():
                self._on_cancelled(effect)
            elif (error := task.exception()) is not None:
                self._on_broken(effect, error)
            elif (happening := task.result()) is not None:
                self._happened(happening)

        task.add_done_callback(ended)
        return task

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._give_up(self._waiting)
            self._waiting = None

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task of an effect whose answer nobody wants any more."""
        if task in self._tasks:
            self._given_up.add(task)
            task.cancel()

    def _on_cancelled(self, effect: Effect) -> None:
        """Go on after an event loop that shuts down has cancelled the task of an effect."""
        self.ask_to_stop("the event loop is shutting down")
        if isinstance(effect, StopGroup):
            self._run(effect, self._keeper.stop(effect))
        elif isinstance(effect, Finish):
            self._run(effect, self._finish(effect))

    def _on_broken(self, effect: Effect, error: BaseException) -> None:
        """Give up on a defect of ours; nothing may be left behind even so."""
        if isinstance(effect, Finish):
            self.error = self.error or error
            self._settle()
        elif not self._is_broken:
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        self._is_broken = True
        self._stop_waiting()
        finish = Finish(JobState.FAILED, f"internal error: {error!r}", 1, 0, error)
        self._run(finish, self._kill_and_finish(finish))

    async def _kill_and_finish(self, finish: Finish) -> None:
        self._keeper.host.tree.kill_now()
        await self._keeper.stop_all(self._spec.stop)
        await self._finish(finish)

    # --------------------------------------------------------------- effects

    async def _ask(self, effect: AskDecision) -> Happening:
        decide = self._spec.restart.decide
        assert decide is not None, "the machine asks only where somebody answers"
        answer = await ask_user(decide, effect.failure)
        if isinstance(answer, Action):
            return Decided(effect.attempt, answer)
        return DecideRaised(effect.attempt, answer)

    async def _wait(self, effect: Wait) -> Happening:
        await self.clock.sleep(effect.delay)
        return DelayElapsed(effect.attempt)

    async def _finish(self, effect: Finish) -> None:
        has_logs = await self._keeper.close()
        duration = self.clock.now() - self._began
        if effect.failures:
            self._keeper.ledger.job_failed(self._machine.attempt, effect.failures, time.time())
        self.result = self._keeper.ledger.result(
            run_id=self._run_id,
            state=effect.state,
            why=effect.why,
            exit_code=effect.exit_code,
            duration=duration,
            restarts=effect.restarts,
            log_dir=self._keeper.host.folder.path if has_logs else None,
        )
        self.error = effect.error
        self.is_rendezvous_failure = effect.is_rendezvous
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
