"""The backends that are built in: a rendezvous at a store.

With "c10d" (or "tcp") and "static" one node hosts the store; with "etcd" it is on an engine.

One task finds a store, takes part there until it is lost, and finds another.  Each stay
at a store is a `StoreSession`.  The decisions are those of the pure `Member` and, on the
node of the leader, of the pure `Coordinator`.

With "static" every node is given its rank and the address of rank 0, which hosts the
store there.  The workers use the same store and port, because firewalls are opened for
it; the keys of one attempt's workers are deleted before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_aio.aio import create_task, random_bytes, run_shielded
from elastic_aio.discovery.choice import FENCE
from elastic_aio.discovery.locator import DiscoveryError, LocatedStore, StoreLocator
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.errors import HostError, StoreError
from elastic_aio.events import Event, WorkerStoreRefused
from elastic_aio.node_events import (
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundForming,
    RoundWaiting,
)
from elastic_aio.outcome import EndCause
from elastic_aio.rendezvous.barrier import Barrier
from elastic_aio.rendezvous.base import (
    AgentPort,
    EndJob,
    NodeInfo,
    Rendezvous,
    Report,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.failure_detector import FailureDetector
from elastic_aio.rendezvous.member import Member, MemberEffect, Probe
from elastic_aio.rendezvous.members import RoundSettings
from elastic_aio.rendezvous.messages import PROBE_TIMEOUT, MemberStatus
from elastic_aio.rendezvous.other_runs import OtherRuns
from elastic_aio.rendezvous.session import StoreSession
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartBudget, changed_settings
from elastic_aio.store import Dropped

if TYPE_CHECKING:
    from elastic_aio.discovery.engine import EngineLocator

_LAST_STATUS_S = 0.5
"""Seconds for which a node that leaves waits until its last status has been written."""

_RELEASE_S = 0.25
"""Seconds for which it then waits until the store has ended its lease."""

START_TIMEOUT = 600.0
"""Seconds after which a node gives up whose workers do not start."""
_START_NOTICE_S = 60.0
"""Seconds between two notices of that."""

_REJOIN = Backoff(initial=0.5, factor=2.0, cap=10.0)
"""Before the next attempt at a store that refuses this node, with a lease for example."""


def make_static(
    spec: LaunchSpec,
    node: NodeInfo,
    run_id: str,
    agent: AgentPort,
    network: StoreNetwork | None = None,
) -> Rendezvous:
    """Return a rendezvous of backend "static": every node is given its rank."""
    rank = spec.rendezvous.node_rank or 0
    settings = dataclasses.replace(spec.rendezvous, node_rank=rank, is_host=rank == 0)
    spec = spec.replace(rendezvous=settings)
    return DynamicRendezvous(spec, node, run_id, agent, network, fixed_ranks=True)


class DynamicRendezvous(Rendezvous):
    """One node's part in a rendezvous at a store; ranks are given in the order of arrival."""

    def __init__(
        self,
        spec: LaunchSpec,
        node: NodeInfo,
        run_id: str,
        agent: AgentPort,
        network: StoreNetwork | None = None,
        *,
        fixed_ranks: bool = False,
    ) -> None:
        """Prepare; nothing is connected before `open`.

        With `fixed_ranks`, `node_rank` is binding, and the workers use the nodes' own store.
        `network` is None for that of this host.
        """
        self._spec = spec
        self._node = node
        self._agent = agent
        self._locator = self._make_locator(run_id, network, is_exclusive=fixed_ranks)
        nnodes = spec.nnodes
        self._round_settings = _round_settings(spec, fixed_ranks=fixed_ranks)
        self._member = Member(
            MemberStatus(
                serial=0,
                node=node,
                address="",
                port=0,
                preferred_rank=spec.rendezvous.node_rank,
                minimum=nnodes.minimum,
                maximum=nnodes.maximum,
                policy=self._round_settings.policy,
                stop_time=spec.stop.grace + spec.stop.reap_timeout,
            )
        )
        self._shares_store = self._round_settings.shared_store
        self._budget = RestartBudget(spec.max_restarts, spec.restart, random.random)
        self._run_id = run_id
        # Unique among all members ever; the host's name makes it readable.
        self._name = f"{node.name}.{node.pid}.{random_bytes(4).hex()}"
        self._barrier = Barrier(self._member, spec.rendezvous.heartbeat_timeout)
        self._attending: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._grace: asyncio.TimerHandle | None = None
        self._refusals = 0
        self._is_leaving = self._is_hurried = self._has_refused = False
        self._draining: asyncio.Timeout | None = None
        self._other_runs = OtherRuns(spec.rendezvous, run_id, agent.on_event)

    def __repr__(self) -> str:
        return f"<DynamicRendezvous {self._name}: {self._member!r}, {self._session or 'no store'}>"

    @property
    def _settings(self) -> RendezvousSpec:
        return self._spec.rendezvous

    @property
    def _session(self) -> StoreSession | None:
        return self._barrier.session

    def _make_locator(
        self, run_id: str, network: StoreNetwork | None, *, is_exclusive: bool
    ) -> StoreLocator | EngineLocator:
        if self._settings.is_on_engine:
            from elastic_aio.discovery.engine import EngineLocator

            return EngineLocator(self._settings, run_id, on_wait=self._on_store_awaited)
        return StoreLocator(
            self._settings,
            run_id,
            network,
            is_exclusive=is_exclusive,
            on_wait=self._on_store_awaited,
            on_drop=self._on_drop,
        )

    # ---------------------------------------------------------------- the agent

    async def open(self) -> None:
        self._attending = create_task(self._attend(), name=f"rendezvous {self._run_id}")

    def report(self, report: Report) -> None:
        self._member.report(report)
        self._status_changed()

    async def wait_unneeded(self) -> None:
        """Wait until no other node runs workers, if this one serves a store to them."""
        waited = self._settings.exit_barrier_timeout
        await self._barrier.wait_unneeded(
            lambda session: self._agent.on_event(session.waiting_event(waited))
        )

    async def leave(self, why: str) -> None:
        if self._is_leaving:
            self._is_hurried = True
            if self._draining is not None:
                self._draining.reschedule(0.0)
        self._is_leaving = True
        await run_shielded(self._leave)

    # ---------------------------------------------------------------- attending

    async def _attend(self) -> None:
        """Take part; a defect of this package ends the job instead of hanging it."""
        detector = FailureDetector()
        try:
            await self._attend_stores(detector)
        except Exception as error:  # noqa: BLE001  # a defect: it is reported and ends the job
            message = "a rendezvous has a defect"
            asyncio.get_running_loop().call_exception_handler(
                {"message": message, "exception": error, "task": asyncio.current_task()}
            )
            self._perform(self._member.fail(f"internal error: {error!r}"))
        finally:
            await detector.aclose()

    async def _attend_stores(self, detector: FailureDetector) -> None:
        """Take part at one store after the other until the job is over."""
        is_first = True
        while True:
            try:
                located = await self._locator.locate(is_first=is_first)
            except DiscoveryError as error:
                self._perform(self._member.fail(str(error), EndCause.NO_STORE))
                return
            endpoint, is_host = located.endpoint, located.is_host
            if not is_first:
                self._agent.on_event(RendezvousStoreRecovered(endpoint=endpoint, is_host=is_host))
            is_first = False
            try:
                why = await self._attend_store(located, detector)
            finally:
                self._barrier.end()
                await self._locator.aclose()
            if self._member.has_ended:
                return
            self._agent.on_event(RendezvousStoreLost(endpoint=endpoint, why=why))
            self._start_grace(why, located.store.last_received_at)
            # The store is there, so the search alone would not wait.
            if self._refusals > 1:
                await asyncio.sleep(_REJOIN.delay(self._refusals - 2, random.random))

    async def _attend_store(self, located: LocatedStore, detector: FailureDetector) -> str:
        """Take part at one store until it is lost; return the reason."""
        host, port = parse_host_port("endpoint", located.endpoint)
        address = host if self._shares_store else self._settings.local_addr or located.local_address
        self._member.set_address(address, is_host=located.is_host)
        if self._shares_store:
            self._member.set_port(port)
        elif not self._reserve_port():
            return "no port for the workers"
        runner = CoordinatorRunner(
            self._round_settings,
            self._budget,
            self._agent,
            node=self._node,
            run_id=self._run_id,
            root=located.store if self._shares_store else None,
        )
        self._refusals += 1
        session = StoreSession(
            located,
            self._locator,
            runner,
            detector,
            name=self._name,
            run_id=self._run_id,
            reuse=self._settings.reuse,
            member=self._member,
            ttl=self._settings.heartbeat_timeout,
            perform=self._perform,
            on_joined=self._on_joined,
        )
        self._barrier.begin(session)
        return await session.run()

    def _perform(self, effects: Iterable[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case StartRound(placement):
                    self._other_runs.stop()
                    self._await_start(placement.round)
                    self._agent.on_instruction(effect)
                    if not self._shares_store:
                        self._reserve_port()
                case StopRound() | RestartPending() | EndJob():
                    self._agent.on_instruction(effect)
                case RoundForming():
                    looks = self._session is not None and self._session.is_leader
                    self._agent.on_event(self._other_runs.complete(effect, looks=looks))
                case Event():
                    self._agent.on_event(effect)
                case Probe():
                    for former in self._probes:
                        former.cancel()  # its result must not replace the newer one
                    task = create_task(self._probe(effect), name=f"probe {effect.address}")
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
        self._status_changed()

    def _await_start(self, round: int, waited: float = 0.0) -> None:
        """Publish, and finally end, a wait for workers that the agent does not start."""
        status = self._member.status
        if (
            self._is_leaving
            or status.round > round
            or round in (self._member.started_round, status.stopped_round)
        ):
            return
        left = START_TIMEOUT - waited
        if left <= 0:
            why = f"the workers of this node have not started within {START_TIMEOUT:g} s"
            self._perform(self._member.fail(why))
            return
        if waited:
            what = "the workers of this node have not started"
            self._agent.on_event(
                RoundWaiting(phase="starting", what=what, waited=waited, time_left=left)
            )
        later = waited + _START_NOTICE_S
        asyncio.get_running_loop().call_later(_START_NOTICE_S, self._await_start, round, later)

    def _reserve_port(self) -> bool:
        try:
            address = self._member.status.address
            self._member.set_port(self._agent.reserve_master_port(address))
        except HostError as error:
            self._perform(self._member.fail(str(error)))
            return False
        return True

    def _status_changed(self) -> None:
        if self._session is not None:
            self._session.status_changed()

    async def _probe(self, probe: Probe) -> None:
        """Connect to the address at which the workers would meet."""
        problem = ""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                _, writer = await asyncio.open_connection(probe.address, probe.port)
            writer.close()
        except TimeoutError:
            problem = f"no answer from {probe.address} within {PROBE_TIMEOUT:g} s"
        except OSError as error:
            # If worker 0 itself is to listen there, a refusal proves that the host is reached.
            is_reached = isinstance(error, ConnectionRefusedError) and not self._spec.host_store
            problem = "" if is_reached else f"{probe.address}: {error.strerror or error}"
        except (ValueError, OverflowError) as error:  # an invalid name or port
            problem = f"{probe.address}: {error}"
        self._member.probed(probe.round, problem)
        self._status_changed()

    # ---------------------------------------------------------- without a store

    def _start_grace(self, why: str, last_received_at: float) -> None:
        """Keep the workers running until the other nodes may have replaced this one."""
        grace = self._settings.store_grace
        if self._grace is None and not (grace is None and self._settings.is_on_engine):
            seconds = self._settings.heartbeat_timeout - FENCE if grace is None else grace
            reason = f"no store could be found for {seconds:g} s ({why})"
            loop = asyncio.get_running_loop()
            # The lease of this node began at the last message that was exchanged.
            self._grace = loop.call_at(last_received_at + seconds, self._isolate, reason)

    def _on_store_awaited(self, why: str, time_left: float | None) -> None:
        left = None if time_left is None else round(time_left, 1)
        self._agent.on_event(RendezvousStoreAwaited(why=why, time_left=left))

    def _on_drop(self, dropped: Dropped) -> None:
        """Report, once, a refused request of a worker that uses the nodes' own store."""
        if dropped.is_refusal and self._shares_store and not self._has_refused:
            self._has_refused = True
            self._agent.on_event(WorkerStoreRefused(peer=dropped.peer, why=dropped.reason))

    def _on_joined(self) -> None:
        self._refusals = 0
        self._stop_grace()

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _isolate(self, why: str) -> None:
        self._grace = None
        self._perform(self._member.isolate(why))

    # ------------------------------------------------------------------ leaving

    async def _leave(self) -> None:
        self._stop_grace()
        if self._session is not None and not self._is_hurried:
            await self._leave_session(self._session)
        looking = self._other_runs.stop()
        tasks = {*self._probes, *filter(None, (self._attending, looking))}
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_RELEASE_S)
            if pending:
                # The store does not answer.  It ends the lease when it reads the request,
                # which is sent, or when it sees the end of the connection.
                await self._locator.aclose()
                await asyncio.wait(pending)
        self._attending = None

    async def _leave_session(self, session: StoreSession) -> None:
        """Write the last status, and stay while other nodes need this one."""
        if not self._member.has_ended:
            self._member.leave()
            self._status_changed()
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(_LAST_STATUS_S):
                await session.wait_status_written()
                if self._member.has_succeeded and not self._member.has_ended:
                    await session.resign()
        if not self._member.has_ended:
            return
        # Nodes that are still there after the timeout notice the end of the connection.
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(self._settings.close_timeout) as self._draining:
                try:
                    await session.drain()
                finally:
                    self._draining = None


def order_timeout(spec: LaunchSpec) -> float:
    """Return how many seconds a member may leave orders without an acknowledgement.

    A suspended node is lost by its lease, and not by its silence.
    """
    return max(28.0, 2 * spec.rendezvous.heartbeat_timeout)


def _round_settings(spec: LaunchSpec, *, fixed_ranks: bool) -> RoundSettings:
    settings = spec.rendezvous
    return RoundSettings(
        minimum=spec.nnodes.minimum,
        maximum=spec.nnodes.maximum,
        join_timeout=settings.join_timeout,
        last_call_timeout=settings.last_call_timeout,
        keep_workers=settings.keep_workers,
        fixed_ranks=fixed_ranks,
        # Torch's own clients have no token and no TLS; worker 0 may want to host its store.
        shared_store=fixed_ranks and not (settings.token or settings.tls) and spec.host_store,
        overlap=settings.overlap,
        heartbeat_timeout=settings.heartbeat_timeout,
        fence=FENCE,
        order_timeout=order_timeout(spec),
        policy=changed_settings(spec.max_restarts, spec.restart) | settings.changed_settings,
        has_decide=spec.restart.decide is not None,
    )
