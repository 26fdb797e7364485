"""Performs the effects that concern the other nodes, and passes on the rendezvous's instructions.

Leaving is like stopping: it is started again when an event loop that shuts down cancels it, and the
job is not done before it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

from elastic_aio.agent import machine
from elastic_aio.agent.driver import KILLED, Driver, call_decide
from elastic_aio.agent.event_log import EventWriter
from elastic_aio.agent.multi_node import MultiNodeMachine
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import cancel_and_wait, create_task, wait_forever, wall_clock
from elastic_aio.errors import HostError, SpecError
from elastic_aio.events import Event
from elastic_aio.node_events import RoundWaiting
from elastic_aio.outcome import Failure, JobState
from elastic_aio.rendezvous import base
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import RestartAction, why_undecided

RendezvousFactory: TypeAlias = Callable[
    [LaunchSpec, base.NodeInfo, str, base.AgentPort], base.Rendezvous
]
"""Makes a node's part in a rendezvous, from the job, the node, the run id and the agent."""


_NOTICE_S = 60.0  # until a node that has succeeded says that it waits for others


class MultiNodeDriver(Driver):
    """One node of a job of many; the rendezvous sees it as its `AgentPort`."""

    def __init__(
        self,
        runtime: LocalRuntime,
        event_log: EventWriter,
        *,
        make_rendezvous: RendezvousFactory | None = None,
    ) -> None:
        """Prepare, or raise SpecError; the job's backend is the default of `make_rendezvous`."""
        spec, nproc = runtime.spec, runtime.nproc
        super().__init__(runtime, MultiNodeMachine(spec, nproc), event_log)
        node = base.NodeInfo(name=runtime.host, pid=os.getpid(), nproc=nproc, role=spec.role)
        make = make_rendezvous or _make_from_backend
        self.rendezvous = make(spec, node, runtime.run_id, self)
        self._joining: asyncio.Task[Any] | None = None
        self._leaving: asyncio.Task[Any] | None = None
        self._staying: asyncio.Task[None] | None = None
        self._over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """The end of the job, for this node, which is stopped, or for all."""
        self._stop_ends_at = 0.0  # end of the grace of this node's stop, by the runtime's clock
        self._is_member = False
        self._decide_error: BaseException | None = None

    # ------------------------------------------------ calls of the rendezvous

    def on_instruction(self, instruction: base.Instruction) -> None:
        if isinstance(instruction, base.StartRound):
            self._decide_error = None
            # A backend may not know it: then all jobs of this run id are one run.
            self.output.directory.note_job(self.rendezvous.job or self._runtime.run_id)
            if instruction.placement.span.group_rank == 0:
                self._runtime.master_ports.claim(instruction.placement.master_port)
        elif isinstance(instruction, base.ChangePending) and instruction.until:
            # Its clock may have been set since, and the order may have taken long.
            left = min(instruction.until - wall_clock(), instruction.time_left or 0.0)
            super().request_preemption(instruction.why, max(0.0, left))
            return
        self.receive(machine.InstructionReceived(instruction))

    def on_event(self, event: Event) -> None:
        if not self.done.done():
            attempt = event.attempt or self._machine.attempt
            self._event_log.append(replace(event, attempt=attempt))

    async def decide(self, failure: Failure) -> RestartAction:
        """Return the decision of the user's `restart.decide`, or raise its exception."""
        # If that ends the job, the callers on this node get the same exception.
        decide = self._runtime.spec.restart.decide
        if decide is None:
            return RestartAction.DEFAULT
        decision = await call_decide(decide, failure)
        if isinstance(decision, RestartAction):
            return decision
        self._decide_error = decision
        if isinstance(decision, Exception):
            raise decision
        raise RuntimeError(why_undecided(decision)) from decision

    async def check_health(self) -> str:
        """Return why this host is not fit for workers; empty if it is, or if the job is over."""
        command = self._runtime.spec.rendezvous.health_check
        if command is None or self._over.done():
            return ""
        task = create_task(self._run_check(command), name="health check")
        try:
            await asyncio.wait([task, self._over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([task])
        return "" if task.cancelled() else task.result()

    async def _run_check(self, command: str) -> str:
        from elastic_aio.agent.health import check_health

        timeout = self._runtime.spec.rendezvous.health_check_timeout
        return await check_health(self._runtime, command, timeout)

    def reserve_master_port(self, address: str) -> int:
        """Return the port that is reserved for the next round at `address`, or raise HostError."""
        return self._runtime.master_ports.reserve(address)

    # -------------------------------------------------------------- requests

    def receive(self, received: machine.Input) -> None:
        """Hand an input to the state machine, and note when the grace of a stop ends."""
        if isinstance(received, machine.StopReceived):
            plan = received.plan or self._runtime.spec.stop
            now = self._runtime.clock.now()
            self._stop_ends_at = self._stop_ends_at or now + plan.grace
        match received:
            case machine.StopReceived() | machine.InstructionReceived(base.EndJob()) if (
                not self._over.done()
            ):
                self._over.set_result(None)
        super().receive(received)
        is_stopping = self._machine.phase is machine.AgentPhase.STOPPING
        if self._machine.notice is not None and is_stopping and not self._over.done():
            self._over.set_result(None)  # no round follows that this host would have to be fit for

    def request_preemption(self, reason: str, seconds: float | None = None) -> bool:
        return super().request_preemption(f"{reason} (on {self._runtime.host})", seconds)

    def kill(self, reason: str = "", stop: machine.StopReceived = KILLED) -> None:
        """Shorten every stop to SIGKILL, wait for no other node, and end the job."""
        super().kill(reason, stop)
        if self._staying is not None:
            self._staying.cancel()
        if self._leaving is not None and not self._leaving.done():
            self._run(machine.Leave(KILLED.reason), self.rendezvous.leave(KILLED.reason))

    # --------------------------------------------------------------- effects

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Join():
                self._is_member = True
                self._joining = self._run(effect, self._join())
            case machine.SendReport(report):
                self.rendezvous.report(report)
            case machine.StartBarrier():
                self._waiting = self._run(effect, self._wait_at_barrier(effect))
            case machine.Leave():
                self._leaving = self._run(effect, self._leave(effect))
            case machine.NotePeers(peers):
                self._runtime.liveness.on_peers_finished(peers.workers, peers.ago)
            case _:
                if isinstance(effect, machine.StopGroup) and self._machine.notice is None:
                    self._show_change(machine.ShowChange())
                super()._perform(effect)

    async def _stop_group(self, effect: machine.StopGroup) -> machine.GroupStopped:
        stopped = await super()._stop_group(effect)
        # While the others stop: the next round knows whether this node is fit.
        is_last = not self._runtime.spec.max_restarts or self._machine.notice is not None
        if stopped.failures and not is_last and (why := await self.check_health()):
            self.receive(machine.ExclusionReceived(effect.attempt, why, base.RECHECK.initial))
        return stopped

    async def _join(self) -> machine.Input | None:
        try:
            await self.rendezvous.open()
        except (SpecError, HostError) as error:
            return machine.JoinFailed(error)
        return None

    async def _wait_at_barrier(self, effect: machine.StartBarrier) -> machine.Input:
        what = "the workers of this node have finished, those of others have not"
        notice = RoundWaiting(phase="barrier", what=what, waited=_NOTICE_S)
        timer = asyncio.get_running_loop().call_later(_NOTICE_S, self.on_event, notice)
        try:
            if effect.timeout is None:
                await (self.rendezvous.abandoned() or wait_forever())
            else:
                await self._runtime.clock.sleep(effect.timeout)
        finally:
            timer.cancel()
        await self.rendezvous.wait_unneeded()
        return machine.BarrierTimedOut(effect.attempt)

    async def _leave(self, effect: machine.Leave) -> machine.Input:
        left = self._stop_ends_at - self._runtime.clock.now()
        if effect.stays and left > 0:
            # A kill cancels it, so it has a task of its own.
            waiting = self.rendezvous.wait_unneeded()
            self._staying = create_task(waiting, name="stay for the workers of other nodes")
            try:
                await asyncio.wait([self._staying], timeout=left)
            finally:
                await cancel_and_wait([self._staying])
        await self._leave_rendezvous(effect.why)
        return machine.LeftRendezvous()

    async def _leave_rendezvous(self, why: str) -> None:
        """Leave, whether or not the rendezvous is open yet.  Idempotent."""
        if self._joining is not None and not self._joining.done():
            self._abandon(self._joining)
            await asyncio.wait([self._joining])
        await self.rendezvous.leave(why)
        self._is_member = False

    def _on_cancelled(self, effect: machine.Effect) -> None:
        super()._on_cancelled(effect)
        if isinstance(effect, machine.Leave):
            self._leaving = self._run(effect, self._leave(effect))

    async def _finish(self, effect: machine.Finish) -> None:
        if self.rendezvous.job:
            self.output.directory.note_job(self.rendezvous.job)
        if self._is_member:
            # A defect ended the job; an error that follows from it must not hide it.
            with contextlib.suppress(Exception):
                await self._leave_rendezvous(effect.outcome.why)
        if effect.outcome.state is JobState.FAILED and effect.error is None:
            effect = replace(effect, error=self._decide_error)
        await super()._finish(effect)


def _make_from_backend(
    spec: LaunchSpec, node: base.NodeInfo, run_id: str, agent: base.AgentPort
) -> base.Rendezvous:
    # Imported here: a rendezvous that the caller makes needs no backend.
    from elastic_aio.rendezvous.backends import make_rendezvous

    return make_rendezvous(spec, node, run_id, agent)
