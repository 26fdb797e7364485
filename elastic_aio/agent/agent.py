"""The agent: one job on this host, as an async context manager."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from elastic_aio.agent.chronicle import Chronicle, Listener
from elastic_aio.agent.groupkeeper import GroupKeeper
from elastic_aio.agent.machine import Machine
from elastic_aio.agent.shell import Shell
from elastic_aio.agent.surroundings import (
    check_child_signals,
    check_guarded,
    node_name,
    resolve_nproc,
)
from elastic_aio.aio import outlast
from elastic_aio.channel import Reader
from elastic_aio.errors import JobFailed, JobStopped, RendezvousFailed, SpecError
from elastic_aio.events import Event
from elastic_aio.logs.sink import Console
from elastic_aio.outcome import JobState, LaunchResult
from elastic_aio.process.base import Spawner
from elastic_aio.process.command import command_spawner
from elastic_aio.signames import signal_number
from elastic_aio.spec import LaunchSpec

if TYPE_CHECKING:
    from elastic_aio.agent.masters import Masters
    from elastic_aio.agent.membershell import MakeRendezvous

__all__ = ["Agent"]


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
        rendezvous: MakeRendezvous | None = None,
    ) -> None:
        """Prepare a job; nothing is started before the block is entered.

        Args:
            spec: the job.
            console: where tee'd output goes; None is this process's own.
            spawner: starts processes; None chooses by the running loop.
            listeners: called with every event as it happens; they must not block.
            rendezvous: makes this node's part in a rendezvous of many; None takes the
                backend that the job names.
        """
        if not isinstance(spec, LaunchSpec):
            raise SpecError("spec", spec, "must be a LaunchSpec")
        self.spec = spec
        self.run_id = spec.run_id or os.urandom(8).hex()
        self._node = node_name()
        self._chronicle = Chronicle(
            self.run_id, self._node, keep=spec.events_kept, listeners=listeners
        )
        self._console = console
        self._spawner = spawner
        self._make_rendezvous = rendezvous
        self._shell: Shell | None = None

    def __repr__(self) -> str:
        return f"<Agent of run {self.run_id}: {self._shell or 'not started'}>"

    async def __aenter__(self) -> Agent:
        """Check the surroundings, start the job, and return.

        Raises:
            SpecError: a setting does not fit this machine.
            SurroundingsError: the machine or this process lacks something.
        """
        if self._shell is not None:
            raise RuntimeError("an Agent runs one job once; make another one")
        check_guarded()
        check_child_signals()
        shell = self._shell = self._made_shell(resolve_nproc(self.spec))
        try:
            await shell.open()
        except BaseException:  # a cancellation too: nothing more will be told
            self._chronicle.close()
            raise
        return self

    def _made_shell(self, nproc: int) -> Shell:
        if self.spec.nnodes.maximum == 1:
            machine = Machine(self.spec, nproc, random.random)
            keeper = self._made_keeper(nproc)
            return Shell(self.spec, machine, keeper, self._chronicle, run_id=self.run_id)
        # Imported here: a job of one node pays for no rendezvous.
        from elastic_aio.agent.masters import Masters
        from elastic_aio.agent.membershell import MemberShell

        masters = Masters(self.spec)
        return MemberShell(
            self.spec,
            self._made_keeper(nproc, masters),
            self._chronicle,
            run_id=self.run_id,
            node=self._node,
            masters=masters,
            make=self._make_rendezvous,
        )

    def _made_keeper(self, nproc: int, masters: Masters | None = None) -> GroupKeeper:
        return GroupKeeper(
            self.spec,
            run_id=self.run_id,
            node=self._node,
            nproc=nproc,
            console=self._console,
            spawner=self._spawner or command_spawner(asyncio.get_running_loop()),
            chronicle=self._chronicle,
            masters=masters,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the job if it still runs, and wait until nothing of it is left."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        reason = "the launch was cancelled" if is_cancelled else "the agent's block was left"
        self._running.ask_to_stop(reason)
        await outlast(self._running.done)

    def events(self, after: int = -1) -> Reader[Event]:
        """Return an async iterator over the events of the job, from its start.

        Any number of readers may iterate, each at its own pace; the iteration ends
        after `JobFinished`.  A reader that comes too late for some events gets one
        `EventsMissed` in their place.

        Args:
            after: a cursor: the `seq` of the last event that was already seen.
        """
        return self._chronicle.read(after)

    async def wait(self) -> LaunchResult:
        """Wait for the end of the job and return its result.

        Cancelling this wait stops nothing by itself; leaving the block does.

        Raises:
            JobFailed: the workers failed and no restart is left.
            RendezvousFailed: the nodes of the job did not come together.
            JobStopped: a signal or `stop` ended the job.
            SurroundingsError: this node lacks something that the rendezvous needs.
            Exception: whatever `restart.decide` raised.
        """
        shell = self._running
        if not shell.done.done():
            await asyncio.wait([shell.done])
        if shell.error is not None:
            raise shell.error
        result = shell.result
        assert result is not None, "a job that is over has a result or an error"
        if shell.is_rendezvous_failure:
            raise RendezvousFailed(f"{self.spec.name} failed: {result.reason}", result)
        if result.state is JobState.FAILED:
            raise JobFailed(_failed_message(self.spec, result), result)
        if result.state is JobState.STOPPED:
            raise JobStopped(f"{self.spec.name} was stopped: {result.reason}", result)
        return result

    def stop(
        self, *, signal: int | str | None = None, reason: str = "a stop was requested"
    ) -> Awaitable[None]:
        """Ask the job to end by its stop plan; `wait` then raises `JobStopped`.

        Args:
            signal: replaces the first signal of the plan; SIGKILL ends the job at once.
            reason: told in the events and the result.

        Returns:
            An awaitable that is done when nothing of the job is left; the request
            is made whether or not it is awaited.

        Raises:
            SpecError: there is no such signal.
        """
        number = None if signal is None else signal_number("signal", signal)
        self._running.ask_to_stop(reason, number)
        return asyncio.shield(self._running.done)

    def kill(self) -> None:
        """Ask the job to end at once: every stop is shortened to SIGKILL."""
        self._running.kill()

    def forward_signal(self, signal: int) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids."""
        return self._running.forward(signal)

    async def pause_while(self, away: Callable[[], None], hold: int, go_on: int) -> None:
        """Hold all processes of the job while `away` runs, and all deadlines with them.

        Args:
            away: blocks this whole process, and returns when it goes on.
            hold: the signal that holds the processes.
            go_on: the signal that lets them go on.
        """
        shell = self._running
        await shell.signal_all(hold)
        began = time.monotonic()
        away()
        shell.clock.skip(time.monotonic() - began)
        await shell.signal_all(go_on)

    @property
    def _running(self) -> Shell:
        if self._shell is None:
            raise RuntimeError("the job has not been started: use `async with Agent(spec)`")
        return self._shell


def _failed_message(spec: LaunchSpec, result: LaunchResult) -> str:
    if not result.failures:
        return f"{spec.name} failed: {result.reason}"
    root = result.failures[0]
    if root.pid is None:
        return root.message
    return f"{spec.name} failed, {root.summary}; {result.reason}"
