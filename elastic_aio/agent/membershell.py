"""The shell of a node in a job of many: it performs what is about the others too.

The rendezvous instructs, and the machine decides what that means here.  Leaving is
like stopping: started over when an event loop that shuts down cancels it, and
nothing is done before it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

from elastic_aio.agent.chronicle import Chronicle
from elastic_aio.agent.decision import ask_user
from elastic_aio.agent.groupkeeper import GroupKeeper
from elastic_aio.agent.masters import Masters
from elastic_aio.agent.membermachine import MemberMachine
from elastic_aio.agent.shell import Shell
from elastic_aio.agent.vocabulary import (
    BarrierElapsed,
    Effect,
    Finish,
    Happening,
    Instructed,
    Join,
    JoinFailed,
    Leave,
    Left,
    StartBarrier,
    Tell,
)
from elastic_aio.errors import SpecError, SurroundingsError
from elastic_aio.events import Event
from elastic_aio.outcome import Failure, JobState
from elastic_aio.policy import Action
from elastic_aio.rendezvous.base import Begin, Instruction, Listener, NodeCard, Rendezvous
from elastic_aio.spec import LaunchSpec

__all__ = ["MakeRendezvous", "MemberShell"]

MakeRendezvous: TypeAlias = Callable[[LaunchSpec, NodeCard, str, Listener], Rendezvous]
"""Makes a node's part in a rendezvous, from the job, the node, the run id and the agent."""


class MemberShell(Shell):
    """One node's part of a job of many; the rendezvous sees it as its `Listener`."""

    def __init__(
        self,
        spec: LaunchSpec,
        keeper: GroupKeeper,
        chronicle: Chronicle,
        *,
        run_id: str,
        node: str,
        masters: Masters,
        make: MakeRendezvous | None = None,
    ) -> None:
        """Prepare; only `open` touches the machine.

        Args:
            spec: the job.
            keeper: performs what is about the workers.
            chronicle: told everything that happens.
            run_id: name of the run.
            node: name of this host.
            masters: the ports at which the workers of all nodes meet.
            make: makes the rendezvous; None takes the backend that the job names.

        Raises:
            SpecError: the backend does not exist, or cannot do what the job wants.
        """
        super().__init__(spec, MemberMachine(spec, keeper.nproc), keeper, chronicle, run_id=run_id)
        self._masters = masters
        card = NodeCard(name=node, pid=os.getpid(), nproc=keeper.nproc, role=spec.role)
        self._rendezvous = (make or _made_by_backend)(spec, card, run_id, self)
        self._joining: asyncio.Task[Any] | None = None
        self._leaving: asyncio.Task[Any] | None = None
        self._is_member = False
        self._decide_error: BaseException | None = None

    # ------------------------------------------------ what the rendezvous says

    def instructed(self, instruction: Instruction) -> None:
        """Take an instruction."""
        if isinstance(instruction, Begin):
            self._decide_error = None
            if instruction.placement.span.group_rank == 0:
                self._masters.claim(instruction.placement.master_port)
        self._happened(Instructed(instruction))

    def told(self, event: Event) -> None:
        """Take an event for this node's readers."""
        if not self.done.done():
            attempt = event.attempt or self._machine.attempt
            self._chronicle.tell(replace(event, attempt=attempt))

    async def decide(self, failure: Failure) -> Action:
        """Ask the user's `restart.decide`.

        Raises:
            Exception: the callback has failed; if that is the end of the job, the
                callers on this node get what it raised.
        """
        decide = self._spec.restart.decide
        if decide is None:
            return Action.BY_POLICY
        answer = await ask_user(decide, failure)
        if isinstance(answer, Action):
            return answer
        self._decide_error = answer
        if isinstance(answer, Exception):
            raise answer
        raise RuntimeError(f"restart.decide raised {type(answer).__name__}") from answer

    def reserve_master(self, address: str) -> int:
        """Return the port that is reserved for the next round's workers at `address`.

        Raises:
            SurroundingsError: there is none.
        """
        return self._masters.reserve(address)

    # ----------------------------------------------------------------- requests

    def kill(self) -> None:
        """Shorten every stop to SIGKILL, wait for no other node, and let the job end."""
        super().kill()
        if self._leaving is not None and not self._leaving.done():
            why = "an immediate stop was requested"
            self._run(Leave(why), self._rendezvous.leave(why))

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Join():
                self._is_member = True
                self._joining = self._run(effect, self._open_rendezvous())
            case Tell(report):
                self._rendezvous.report(report)
            case StartBarrier():
                self._waiting = self._run(effect, self._wait_at_barrier(effect))
            case Leave():
                self._leaving = self._run(effect, self._leave(effect))
            case _:
                super()._perform(effect)

    async def _open_rendezvous(self) -> Happening | None:
        try:
            await self._rendezvous.open()
        except (SpecError, SurroundingsError) as error:
            return JoinFailed(error)
        return None

    async def _wait_at_barrier(self, effect: StartBarrier) -> Happening:
        await self.clock.sleep(effect.timeout)
        return BarrierElapsed(effect.attempt)

    async def _leave(self, effect: Leave) -> Happening:
        await self._leave_rendezvous(effect.why)
        return Left()

    async def _leave_rendezvous(self, why: str) -> None:
        """Leave, whether or not the rendezvous is open yet; may be started over."""
        if self._joining is not None and not self._joining.done():
            self._give_up(self._joining)
            await asyncio.wait([self._joining])
        await self._rendezvous.leave(why)
        self._is_member = False

    def _on_cancelled(self, effect: Effect) -> None:
        super()._on_cancelled(effect)
        if isinstance(effect, Leave):
            self._leaving = self._run(effect, self._leave(effect))

    async def _finish(self, effect: Finish) -> None:
        if self._is_member:
            # A defect has ended the job; the one that follows from it is not the story.
            with contextlib.suppress(Exception):
                await self._leave_rendezvous(effect.why)
        if effect.state is JobState.FAILED and effect.error is None:
            effect = replace(effect, error=self._decide_error)
        await super()._finish(effect)


def _made_by_backend(
    spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener
) -> Rendezvous:
    # Imported here: whoever brings a rendezvous of their own needs no other.
    from elastic_aio.rendezvous.registry import make_rendezvous

    return make_rendezvous(spec, card, run_id, listener)
