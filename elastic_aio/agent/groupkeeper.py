"""One host's group of workers in the making: started, watched, stopped, written down.

What a machine wants done about its group is done here, whichever machine it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic_aio.agent.chronicle import Chronicle
from elastic_aio.agent.evidence import gather_failures
from elastic_aio.agent.host import Host, HostCallbacks
from elastic_aio.agent.ledger import Ledger
from elastic_aio.agent.memory import oom_kills
from elastic_aio.agent.vocabulary import (
    GroupGone,
    GroupStarted,
    Happening,
    StartFailed,
    StartGroup,
    StopGroup,
    WorkerEnded,
)
from elastic_aio.aio import Pausable, see_through
from elastic_aio.errors import SpawnError, SurroundingsError
from elastic_aio.events import (
    ConsoleLost,
    GuardianReplaced,
    SignalForwarded,
    StopEscalated,
    StopRequested,
    WorkerAbandoned,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.logs.sink import Console, Sink
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.policy import StopPlan
from elastic_aio.process.base import Child, Exit, Spawner
from elastic_aio.process.results import Told
from elastic_aio.process.tree import Survivor
from elastic_aio.ranks import NodeSize, assign_places
from elastic_aio.spec import LaunchSpec

if TYPE_CHECKING:  # a job of one node has none
    from elastic_aio.agent.masters import Masters

__all__ = ["GroupKeeper"]


class GroupKeeper:
    """Performs for one group after the other what is said about it; must be closed."""

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
        masters: Masters | None = None,
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
            masters: where the workers meet those of other nodes, if there are any.
        """
        self.clock = Pausable()
        self.ledger = Ledger(node)
        self.attempt = 0
        self.nproc = nproc
        self._node = node
        self._chronicle = chronicle
        self.on_worker_ended: Callable[[WorkerEnded], None] = lambda ended: None
        self._places = assign_places([NodeSize(spec.role, nproc)], group_rank=0)
        self._start_failed: StartFailed | None = None
        self._stopped_at = 0.0
        self._is_closed = False
        self.host = Host(
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
            masters=masters,
        )

    def __repr__(self) -> str:
        return f"<GroupKeeper of {self.nproc} workers, attempt {self.attempt}>"

    async def open(self) -> None:
        """Prepare the host.

        Raises:
            SpecError: a setting does not fit this machine.
            SurroundingsError: the machine lacks something.
        """
        try:
            await self.host.open()
        except BaseException:  # a cancellation too: half a host must be tidied up
            await see_through(self.host.close)
            raise

    async def close(self) -> bool:
        """Tidy up the host; return whether a log folder remains.  May be started over."""
        has_logs = await self.host.close()
        self._is_closed = True
        return has_logs

    # ------------------------------------------------------------------ effects

    def begin(self, effect: StartGroup) -> None:
        """Take note of an attempt that is going to be started by `start`."""
        self._start_failed = None
        self.attempt = effect.attempt
        if effect.placement is not None:
            self._places = effect.placement.span.places(self.nproc)
        self.ledger.begin_attempt(
            effect.attempt,
            self.host.attempt_folder(effect.attempt),
            now=time.monotonic(),
            unix=time.time(),
            oom_kills=oom_kills(),
        )

    async def start(self, effect: StartGroup) -> Happening:
        """Spawn all workers of an attempt."""
        attempt, placement = effect.attempt, effect.placement
        master = None if placement is None else (placement.master_addr, placement.master_port)
        try:
            await self.host.start(attempt, self._places, effect.restarts, master)
        except SpawnError as error:
            self._start_failed = StartFailed(
                attempt, str(error), error.permanent, error.exit_code, error.local_rank
            )
        except SurroundingsError as error:
            self._start_failed = StartFailed(attempt, str(error), False, 1, 0)
        return self._start_failed or GroupStarted(attempt, self.clock.now())

    def announce_stop(self, effect: StopGroup) -> None:
        """Take note of a stop that is going to be made by `stop`."""
        self._stopped_at = time.time()
        if not effect.leftovers_only:
            self._tell_stop(effect, effect.reason)

    async def stop(self, effect: StopGroup) -> Happening:
        """Stop everything of the attempt; may be started over."""
        if effect.leftovers_only and await self.host.tree.settle():
            survivors = []
        else:
            if effect.leftovers_only:
                self._stopped_at = time.time()
                self._tell_stop(effect, "the workers have left processes behind")
            survivors = await self.stop_all(effect.plan)
        for one in survivors:
            self._chronicle.tell(
                WorkerAbandoned(attempt=effect.attempt, pid=one.pid, state=one.state)
            )
        await self.host.end_attempt()
        told = await self.host.told()
        failures = await self._gather_failures(told)
        self.ledger.end_attempt(failures, time.monotonic(), told)
        return GroupGone(effect.attempt, self.clock.now(), failures, bool(survivors))

    async def stop_all(self, plan: StopPlan) -> list[Survivor]:
        """Stop every process there is; return those that could not be killed."""
        return await self.host.stop(plan, self._on_escalated)

    async def _gather_failures(self, told: Mapping[int, Told]) -> tuple[Failure, ...]:
        """Return why the attempt failed; nothing if all that ended badly were victims."""
        failures = await gather_failures(
            self.ledger.unsuccessful(told),
            stopped_at=self._stopped_at,
            oom_kills_before=self.ledger.oom_kills_before,
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

    # ------------------------------------------------------------------ telling

    def forward(self, signal: int) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids."""
        pids = self.host.tree.signal_leaders(signal)
        self._chronicle.tell(SignalForwarded(attempt=self.attempt, signal=signal, pids=pids))
        return pids

    def _tell_stop(self, effect: StopGroup, reason: str) -> None:
        told = StopRequested(
            attempt=effect.attempt, reason=reason, plan=str(effect.plan), signal=effect.signal
        )
        self._chronicle.tell(told)

    def _on_escalated(self, signal: int, pids: tuple[int, ...]) -> None:
        self._chronicle.tell(StopEscalated(attempt=self.attempt, signal=signal, pids=pids))

    def _on_started(self, attempt: int, local_rank: int, child: Child) -> None:
        place = self._places[local_rank]
        logs = self.host.logs_of(attempt, local_rank)
        self.ledger.worker_started(place, child.pid, logs, time.monotonic())
        self._chronicle.tell(
            WorkerStarted(attempt=attempt, rank=place.rank, local_rank=local_rank, pid=child.pid)
        )

    def _on_exited(self, attempt: int, local_rank: int, child: Child, ended: Exit) -> None:
        if self._is_closed or attempt != self.attempt:
            return  # one that could not be killed has gone at last
        is_victim = self.host.tree.was_asked(child.pid)
        duration = self.ledger.worker_exited(
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
        self.on_worker_ended(WorkerEnded(attempt, local_rank, ended.status, is_victim))

    def _on_console_lost(self, sink: Sink, why: str) -> None:
        self._chronicle.tell(ConsoleLost(attempt=self.attempt, stream=sink.name, why=why))
