"""The two sides of a rendezvous under the agent of the other side; torch's handlers block.

`HandlerRendezvous`: a handler of torch, of a plug-in or of the program under our agent.  A daemon
thread calls its methods, one after the other.  What they do not offer is done as by torch's agent,
with the same keys in the handler's store:

* The ranks of the workers: every node writes its role and size, the node of rank 0 writes the first
  ranks of each node.
* Restarts are counted by each node for itself.
* A membership change cannot be waited for, so `num_nodes_waiting` is called every
  `monitor_interval` seconds while workers run.  The handler's interface requires this poll, the
  only one of this library.
* After its success a node waits at a barrier in the store, at most `exit_barrier_timeout`.

`Participation`: a rendezvous of ours under torch's agent.  An event loop in a thread drives it.
Its instructions only say what the agent has to do next.  `is_round_over` says that the workers must
be stopped, which the agent sees when it looks for waiting nodes; `next_round` then returns the next
round.  torch's agent does not say why it asks for another round.  If this node was not asked for
that, a worker of its own must have failed: the other nodes then stop theirs at once.  torch's
agents count the restarts, so the rendezvous allows any number of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from elastic_aio.agent.preflight import hostname
from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_error,
)
from elastic_aio.errors import HostError
from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure, JobOutcome, JobState, preempted
from elastic_aio.ranks import NodeRanks, NodeSize, assign_node_ranks
from elastic_aio.rendezvous import base
from elastic_aio.rendezvous.backends import make_rendezvous
from elastic_aio.spec.job import LaunchSpec, NodeRange
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import (
    DECIDE_TIMEOUT,
    UNLIMITED,
    RestartAction,
    RestartBudget,
    RestartPolicy,
    why_undecided,
)
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS
from elastic_aio.sync import LoopThread

T = TypeVar("T")

log = logging.getLogger(__name__)

_POLL_MIN_S = 0.1
_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_BARRIER = "torchelastic/agent/terminal_state"
_BARRIER_S = 300.0
"""Torch's limit of that barrier."""
_END_THREAD = None
_LOCAL = "127.0.0.1"


# --------------------------------------------------- a handler under our agent


class HandlerThread:
    """A thread that calls blocking methods one after the other.

    A daemon: a call may block for minutes after the job has ended without it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rendezvous handler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not _END_THREAD:
            call()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns.

        Cancellation: the call goes on; its result is dropped.
        """
        done: asyncio.Future[tuple[T | None, BaseException | None]] = self._loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if not done.cancelled():
                done.set_result((value, error))

        def run() -> None:
            value, error = None, None
            try:
                value = function(*args)
            except BaseException as raised:  # noqa: BLE001  # handed to the caller
                error = raised
            try:
                self._loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:
                pass  # the event loop is closed: the job has ended

        self._calls.put(run)
        value, error = await done
        if error is None:
            return cast("T", value)
        # A coroutine cannot raise these: StopIteration ends it, GeneratorExit closes it.
        is_usual = isinstance(error, Exception | SystemExit | KeyboardInterrupt)
        if is_usual and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"the rendezvous handler raised {error!r}")

    def close(self) -> None:
        """Let the thread end after the present call."""
        self._calls.put(_END_THREAD)


class HandlerRendezvous(base.Rendezvous):
    """A node's part in the rendezvous of a blocking handler; `error` is what the handler raised."""

    def __init__(
        self,
        handler: Any,
        spec: LaunchSpec,
        node: base.NodeInfo,
        agent: base.AgentPort,
        *,
        master: tuple[str | None, int | None] = (None, None),
        interval: float = _POLL_MIN_S,
        decide_timeout: float = DECIDE_TIMEOUT,
    ) -> None:
        """Prepare; nothing is called before `open`.

        `handler` is a torch `RendezvousHandler`, `master` the address and port of the workers'
        store in place of the handler's, `interval` the seconds (at least 0.1) between two looks for
        waiting nodes, and `decide_timeout` the seconds in which `restart.decide` has to return.
        """
        self.error: BaseException | None = None
        self._handler = handler
        self._spec = spec
        self._node = node
        self._agent = agent
        self._master = master
        self._interval = max(interval, _POLL_MIN_S)
        self._decide_timeout = decide_timeout
        self._budget = RestartBudget(spec.max_restarts, spec.restart, random.random)
        self._reports: asyncio.Queue[base.Report] = asyncio.Queue()
        self._thread: HandlerThread | None = None
        self._attending: asyncio.Task[None] | None = None
        self._round = -1
        self._changes = 0
        self._preempted = ""  # why: torch's handlers pass no notice on to other nodes

    async def open(self) -> None:
        self._thread = HandlerThread()
        self._attending = create_task(self._attend(), name="rendezvous handler")

    def report(self, report: base.Report) -> None:
        self._reports.put_nowait(report)

    async def leave(self, why: str) -> None:
        if self._attending is not None:
            await cancel_and_wait([self._attending])
        if self._thread is not None:
            self._thread.close()

    # ------------------------------------------------------------------ rounds

    async def _attend(self) -> None:
        try:
            outcome = await self._attend_rounds()
        except Exception as error:  # noqa: BLE001  # the handler's: the caller of `run` gets it
            if _is_graceful_exit(error):
                why = f"this node is not part of the rendezvous: {error}"
                outcome = JobOutcome(JobState.SUCCEEDED, why, 0)
            else:
                self.error = error
                why = f"{type(error).__name__}: {error}"
                outcome = JobOutcome(
                    JobState.FAILED, why, base.RENDEZVOUS_FAILED, is_rendezvous=True
                )
        self._agent.on_instruction(base.EndJob(outcome))

    async def _attend_rounds(self) -> JobOutcome:
        """Take part in one round after the other; return how the job ended."""
        cause: base.RestartCause | None = None
        while True:
            self._round += 1
            info = await self._call(self._handler.next_rendezvous)
            placement = await self._call(self._place, info)
            self._agent.on_instruction(base.StartRound(placement, cause))
            ended = await self._round_end()
            if self._preempted:
                return preempted(self._preempted, self._restarts)
            if isinstance(ended, base.RoundSucceeded):
                await self._call(self._wait_at_barrier, info)
                return JobOutcome(
                    JobState.SUCCEEDED, "all workers have finished", 0, self._restarts
                )
            if ended.failures or ended.is_permanent:
                outcome, cause = await self._decide(ended)
                if outcome is not None:
                    return outcome
            else:
                why = "other nodes wait to join"
                cause = base.RestartCause(self._round + 1, why, self._restarts)
                self._changes += 1

    async def _round_end(self) -> base.RoundStopped | base.RoundSucceeded:
        """Wait for the end of the round, which waiting nodes bring about."""
        is_running = is_stopping = False
        self._budget.begin_attempt()
        while True:
            is_watching = is_running and not is_stopping
            try:
                async with asyncio.timeout(self._interval if is_watching else None):
                    report = await self._reports.get()
            except TimeoutError:
                if await self._call(self._handler.num_nodes_waiting) > 0:
                    is_stopping = True
                    stop = base.StopRound(self._round, "other nodes wait to join")
                    self._agent.on_instruction(stop)
                continue
            if isinstance(report, base.PreemptionNoticed):
                self._preempted = report.change.why
                continue
            if isinstance(report, base.NodeDraining) or report.round != self._round:
                continue
            match report:
                case base.RoundStarted():
                    is_running = True
                case base.RoundFailing():
                    is_stopping = True
                case base.RoundProgressed():
                    self._budget.has_progress = True
                case base.RoundStopped() | base.RoundSucceeded():
                    return report

    async def _decide(
        self, stopped: base.RoundStopped
    ) -> tuple[JobOutcome | None, base.RestartCause | None]:
        failures = stopped.failures
        if stopped.is_permanent or not failures:
            why = stopped.permanent_reason
        else:
            action = RestartAction.DEFAULT
            if self._spec.restart.decide is not None:
                deciding = asyncio.ensure_future(self._agent.decide(failures[0]))
                try:
                    await asyncio.wait([deciding], timeout=self._decide_timeout)
                    is_late = not deciding.done()
                finally:
                    # Not waited for: the callback is the user's.
                    deciding.add_done_callback(lambda task: task.cancelled() or task.exception())
                    deciding.cancel()
                if is_late:
                    return self._failed(stopped, why_undecided(self._decide_timeout)), None
                action = deciding.result()
            now = time.monotonic()
            decision = self._budget.decide(failures[0], action, stopped.runtime, now)
            if decision.restart:
                self._budget.record(now)
                cause = base.RestartCause(
                    self._round + 1, decision.why, self._restarts, decision.delay, failures[0]
                )
                self._agent.on_instruction(base.RestartPending(cause))
                await asyncio.sleep(decision.delay)  # the back-off of the restart policy
                return None, cause
            why = decision.why
        return self._failed(stopped, why), None

    def _failed(self, stopped: base.RoundStopped, why: str) -> JobOutcome:
        code, failures = stopped.exit_code, stopped.failures
        return JobOutcome(JobState.FAILED, why, code, self._restarts, failures)

    @property
    def _restarts(self) -> int:
        return self._budget.restarts

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        assert self._thread is not None, "open() comes first"
        return await self._thread.call(function, *args)

    # ----------------------------------------- in the handler's thread, blocking

    def _place(self, info: Any) -> base.Placement:
        """Agree with the other nodes on the ranks of all workers."""
        span = self._span(info.store, info.rank, info.world_size)
        where = info.bootstrap_store_info
        address, port = self._master
        return base.Placement(
            round=self._round,
            formed_by="",
            attempt=self._round,
            restarts=self._restarts,
            changes=self._changes,
            span=span,
            master_addr=address or where.master_addr,
            master_port=int(port or where.master_port),
        )

    def _span(self, store: Any, rank: int, world_size: int) -> NodeRanks:
        own = {"role": self._node.role, "rank": rank, "local_world_size": self._node.nproc}
        store.set(f"{_ROLE}{rank}", json.dumps(own))
        if rank == 0:
            infos = [json.loads(store.get(f"{_ROLE}{node}")) for node in range(world_size)]
            sizes = [NodeSize(info["role"], info["local_world_size"]) for info in infos]
            for node, ranks in enumerate(assign_node_ranks(sizes)):
                values = (
                    ranks.first_rank,
                    ranks.world_size,
                    ranks.first_role_rank,
                    ranks.role_world_size,
                )
                store.set(f"{_RANKS}{node}", json.dumps(values))
        first, world, first_of_role, role_world = json.loads(store.get(f"{_RANKS}{rank}"))
        return NodeRanks(rank, world_size, first, world, first_of_role, role_world)

    def _wait_at_barrier(self, info: Any) -> None:
        """Wait for the other nodes; an error or the timeout only ends the wait, as in torch."""
        store, limit = info.store, self._spec.rendezvous.exit_barrier_timeout
        seconds = _BARRIER_S if limit is None else limit
        try:
            if store.add(f"{_BARRIER}/num_members", 1) == info.world_size:
                store.set(f"{_BARRIER}/last_member", "<val_ignored>")
            store.wait([f"{_BARRIER}/last_member"], timedelta(seconds=seconds))
        except Exception as error:  # noqa: BLE001  # the workers of this node have succeeded
            log.warning("the exit barrier of the rendezvous failed: %s", error)


def _is_graceful_exit(error: BaseException) -> bool:
    """Whether a handler, torch's own too, says that this node is not needed."""
    return any(kind.__name__ == "RendezvousGracefulExitError" for kind in type(error).__mro__)


# ------------------------------------------ our rendezvous under torch's agent


class Participation:
    """A node's part in a rendezvous; must be closed."""

    def __init__(
        self, run_id: str, nodes: NodeRange, rendezvous: RendezvousSpec, *, serves: bool
    ) -> None:
        """Prepare; nothing is connected before `next_round`.

        With `serves` the node of rank 0 serves the store of each round's workers.
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
        self._rendezvous: base.Rendezvous | None = None
        self._changed = threading.Condition()
        self._next: base.Placement | None = None
        self._current: base.Placement | None = None
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
        self._loop.call(self._report(base.RoundStarted(placement.round)))
        return self._info(placement)

    def end_job(self) -> None:
        """Let no further round begin, on any node."""
        if self._loop is not None and self._current is not None and not self.has_ended:
            self._is_closing = True
            why = f"the agent on {hostname()} has closed the rendezvous"
            end = base.RoundStopped(self._current.round, is_permanent=True, permanent_reason=why)
            self._loop.call(self._report(end))

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

    def _info(self, placement: base.Placement) -> RendezvousInfo:
        """Connect to the store of a round, which is the agents' and its workers'."""
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
        self._current = base.Placement(number, "", number, 0, 0, alone, _LOCAL, port)
        return self._info(self._current)

    # ------------------------------------------------------- on the event loop

    async def _open(self) -> None:
        node = base.NodeInfo(name=hostname(), pid=os.getpid(), nproc=1, role=self._spec.role)
        self._rendezvous = make_rendezvous(self._spec, node, self._run_id, self)
        await self._rendezvous.open()

    async def _report(self, *reports: base.Report) -> None:
        assert self._rendezvous is not None, "the round came from it"
        for report in reports:
            self._rendezvous.report(report)

    async def _report_stopped(self, placement: base.Placement) -> None:
        if self.is_round_over:
            # A stopped round may be newer: one that began and was stopped unseen.
            await self._report(base.RoundStopped(max(placement.round, self._stopping)))
            return
        failure = _unknown_failure(placement)
        failing = base.RoundFailing(placement.round, failure.message)
        await self._report(failing, base.RoundStopped(placement.round, (failure,)))

    async def _leave(self) -> None:
        if self._rendezvous is not None:
            await self._rendezvous.leave("the rendezvous was shut down")

    # --------------------------------------------- called by the rendezvous

    def on_instruction(self, instruction: base.Instruction) -> None:
        with self._changed:
            match instruction:
                case base.StartRound(placement):
                    self._next = placement
                    if placement.span.group_rank == 0:
                        self._claimed, self._reserved = self._reserved, None
                case base.StopRound(round):
                    self._stopping = max(round, self._stopping)
                    self._next = None
                case base.EndJob(outcome):
                    self._outcome = outcome
            self._changed.notify_all()

    def on_event(self, event: Event) -> None:
        """Take an event; torch's agent has no use for it."""

    def decide(self, failure: Failure) -> Awaitable[RestartAction]:
        """Not called: the job has no `restart.decide`."""
        raise NotImplementedError

    async def check_health(self) -> str:
        """Return nothing: the job has no check."""
        return ""

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


def _unknown_failure(placement: base.Placement) -> Failure:
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
