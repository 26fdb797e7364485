"""One node's part in a rendezvous of ours, called as torch's agent does: blocking.

An event loop in a thread drives the rendezvous.  Its instructions only say what the agent
has to do next: `is_round_over` says that the workers must be stopped, which the agent sees
when it looks for waiting nodes, and `next_round` then returns the next round.

torch's agent does not say why it asks for another round.  If this node was not asked for
that, a worker of its own must have failed: the other nodes then stop theirs at once.  torch's
agents count the restarts, so the rendezvous allows any number of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable
from typing import Any

from elastic_aio.agent.preflight import hostname
from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from elastic_aio.compat.torch.rendezvous.outcomes import rendezvous_error
from elastic_aio.errors import HostError
from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure, JobOutcome
from elastic_aio.ranks import NodeRanks
from elastic_aio.rendezvous.backends import make_rendezvous
from elastic_aio.rendezvous.base import (
    EndJob,
    Instruction,
    NodeInfo,
    Placement,
    Rendezvous,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    StartRound,
    StopRound,
)
from elastic_aio.spec.job import LaunchSpec, NodeRange
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import UNLIMITED, RestartAction, RestartPolicy
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS
from elastic_aio.sync import LoopThread

_LOCAL = "127.0.0.1"


class Participation:
    """One node's part in a rendezvous; must be closed."""

    def __init__(
        self, run_id: str, nodes: NodeRange, rendezvous: RendezvousSpec, *, serves: bool
    ) -> None:
        """Prepare; nothing is connected before `next_round`.

        Args:
            run_id: id of the run, the same on all nodes.
            nodes: how many nodes the job has.
            rendezvous: how they find each other.
            serves: whether the node of rank 0 serves the store of each round's workers.
        """
        self._run_id = run_id
        self._spec = LaunchSpec(
            ["the workers of torch's agent"],
            nnodes=nodes,
            rendezvous=rendezvous,
            run_id=run_id,
            max_restarts=UNLIMITED,
            restart=RestartPolicy(**TORCHRUN_DEFAULTS["restart"]),
        )
        self._serves = serves
        self._loop: LoopThread | None = None
        self._rendezvous: Rendezvous | None = None
        self._changed = threading.Condition()
        self._next: Placement | None = None
        self._current: Placement | None = None
        self._stopping = -1
        self._outcome: JobOutcome | None = None
        self._is_leaving = self._is_closing = False
        # torch TCPStores for the workers of the next round, an announced one, the present one
        self._reserved: Any = None
        self._claimed: Any = None
        self._serving: Any = None

    # -------------------------------------------------- called by torch's agent

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self._outcome is not None

    @property
    def is_round_over(self) -> bool:
        """Whether the workers of the present round have to be stopped."""
        current = self._current
        if current is None or self.has_ended:
            return False
        return self._next is not None or self._stopping >= current.round

    def next_round(self) -> RendezvousInfo:
        """Leave the present round, wait for the next one, and return it.

        Raises:
            RendezvousError: the job has ended, or the nodes do not come together.
            HostError: this host lacks something.
        """
        if self._spec.nnodes.maximum == 1:
            return self._local_round()
        if self._loop is None:
            self._loop = LoopThread()
            self._loop.call(self._open())
        elif self._current is not None:
            self._loop.call(self._report_stopped(self._current))
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._outcome or self._is_leaving)
            if self._outcome is not None:
                raise rendezvous_error(self._outcome)
            if self._next is None:
                raise RendezvousClosedError(f"the rendezvous of run {self._run_id} is closed")
            placement, self._next = self._next, None
            self._current = placement
        self._loop.call(self._report_started(placement))
        return self._info(placement)

    def end_job(self) -> None:
        """Let no further round begin, on any node."""
        if self._loop is not None and self._current is not None and not self.has_ended:
            self._is_closing = True
            self._loop.call(self._report_closed(self._current))

    def close(self) -> None:
        """Leave, and release everything.

        After `end_job` the other nodes learn of the end first, within `close_timeout`.
        """
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
            if self._is_closing:
                seconds = self._spec.rendezvous.close_timeout
                self._changed.wait_for(lambda: self.has_ended, seconds)
        if self._loop is not None:
            self._loop.call(self._leave())
            self._loop.close()
        self._reserved = self._claimed = self._serving = None

    def _info(self, placement: Placement) -> RendezvousInfo:
        """Connect to the store of a round; that of the agents and of its workers are one."""
        from torch.distributed import PrefixStore, TCPStore

        address, port = placement.master_addr, placement.master_port
        rank = placement.span.group_rank
        if rank == 0:
            self._serving, self._claimed = self._claimed, None
        store = TCPStore(address, port, is_master=False, wait_for_workers=False)
        prefix = f"torch.rendezvous.{self._run_id}.{placement.round}"
        shared = PrefixStore(prefix, store)
        where = RendezvousStoreInfo(address, port)
        if not self._serves:
            # Worker 0 serves another store, at a port that is free on its host.
            where = RendezvousStoreInfo.build(rank, shared, address)
        return RendezvousInfo(shared, rank, placement.span.group_world_size, where)

    def _local_round(self) -> RendezvousInfo:
        number = 0 if self._current is None else self._current.round + 1
        port = self.reserve_master_port(_LOCAL)
        self._claimed, self._reserved = self._reserved, None
        alone = NodeRanks(0, 1, 0, 1, 0, 1)
        self._current = Placement(number, "", number, 0, 0, alone, _LOCAL, port)
        return self._info(self._current)

    # ------------------------------------------------------- on the event loop

    async def _open(self) -> None:
        node = NodeInfo(name=hostname(), pid=os.getpid(), nproc=1, role=self._spec.role)
        self._rendezvous = make_rendezvous(self._spec, node, self._run_id, self)
        await self._rendezvous.open()

    async def _report_started(self, placement: Placement) -> None:
        assert self._rendezvous is not None, "the round came from it"
        self._rendezvous.report(RoundStarted(placement.round))

    async def _report_stopped(self, placement: Placement) -> None:
        assert self._rendezvous is not None, "the round came from it"
        if self.is_round_over:
            # A stopped round may be newer: one that began and was stopped unseen.
            self._rendezvous.report(RoundStopped(max(placement.round, self._stopping)))
            return
        failure = _unknown_failure(placement)
        self._rendezvous.report(RoundFailing(placement.round, failure.message))
        self._rendezvous.report(RoundStopped(placement.round, (failure,)))

    async def _report_closed(self, placement: Placement) -> None:
        assert self._rendezvous is not None, "the round came from it"
        why = f"the agent on {hostname()} has closed the rendezvous"
        self._rendezvous.report(
            RoundStopped(placement.round, is_permanent=True, permanent_reason=why)
        )

    async def _leave(self) -> None:
        if self._rendezvous is not None:
            await self._rendezvous.leave("the rendezvous was shut down")

    # --------------------------------------------- called by the rendezvous

    def on_instruction(self, instruction: Instruction) -> None:
        """Take an instruction."""
        with self._changed:
            match instruction:
                case StartRound(placement):
                    self._next = placement
                    if placement.span.group_rank == 0:
                        self._claimed, self._reserved = self._reserved, None
                case StopRound(round):
                    self._stopping = max(round, self._stopping)
                    self._next = None
                case EndJob(outcome):
                    self._outcome = outcome
            self._changed.notify_all()

    def on_event(self, event: Event) -> None:
        """Take an event; torch's agent has no use for it."""

    def decide(self, failure: Failure) -> Awaitable[RestartAction]:
        """Not called: the job has no `restart.decide`."""
        raise NotImplementedError

    def reserve_master_port(self, address: str) -> int:
        """Return the port of the store that is ready for the next round's workers.

        Raises:
            HostError: there is no free port.
        """
        if self._reserved is None or self._reserved.host != address:
            from torch.distributed import TCPStore

            try:
                self._reserved = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            except RuntimeError as error:
                raise HostError(f"cannot serve the workers' store: {error}") from error
        port: int = self._reserved.port
        return port


def _unknown_failure(placement: Placement) -> Failure:
    """Return a failure of which only torch's agent knows more."""
    return Failure(
        rank=placement.span.first_rank,
        local_rank=0,
        pid=None,
        host=hostname(),
        status=ExitStatus(code=1),
        time=time.time(),
        order=0,
        message="torch's agent asks for another round, because a worker has failed",
    )
