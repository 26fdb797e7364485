"""One node's part in a rendezvous at a store: the backends that are built in.

With "c10d" (or "tcp") and "static" one node hosts the store; with "etcd" and "redis" an engine has
it.  With "static" every node is given its rank and the address of rank 0, which hosts the store
there.  The workers use the same store and port, because firewalls are opened for it; the keys of
one attempt's workers are deleted before the next.

One task finds a store, takes part there until it is lost, and finds another.  Each stay at a store
is a `StoreSession`.  The decisions are made by the pure `Member` and, on the elected node, by the
pure `elastic_aio.rendezvous.coordinator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from msgspec.structs import replace

from elastic_aio.aio import Notifier, create_task, random_bytes, run_shielded
from elastic_aio.discovery.choice import FENCE
from elastic_aio.discovery.locator import DiscoveryError, LocatedStore, Locator, StoreLocator
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.errors import HostError, SpecError, StoreError
from elastic_aio.events import Event, WorkerStoreRefused
from elastic_aio.node_events import (
    NodeExcluded,
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundForming,
    RoundWaiting,
)
from elastic_aio.outcome import EndCause
from elastic_aio.rendezvous.base import (
    RECHECK,
    UNCHECKED,
    AgentPort,
    ChangePending,
    EndJob,
    NodeInfo,
    PeersFinished,
    Rendezvous,
    Report,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import PROBE_TIMEOUT, MemberStatus, ProbePeers
from elastic_aio.rendezvous.session import FormerStay, StoreSession
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.fields import changed_fields
from elastic_aio.spec.job import Command, LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartBudget
from elastic_aio.store import Dropped
from elastic_aio.text import truncate

_AFTER_S: Final = 5.0
"""Seconds without enough nodes: the nodes of one command start within fewer."""
_TIMEOUT_S: Final = 5.0
_READ_MAX: Final = 64
"""Runs of which the state is read."""
_NAMED_MAX: Final = 8
_NAME_MAX: Final = 64


class OtherRuns:
    """Looks once for other runs; the coordinator's node does it for its run."""

    def __init__(
        self, spec: RendezvousSpec, run_id: str, publish: Callable[[RoundForming], object]
    ) -> None:
        """Prepare; `publish` gets the latest event again when other runs are found."""
        self._spec = spec
        self._run_id = run_id
        self._publish = publish
        self._names: tuple[str, ...] = ()
        self._latest: tuple[RoundForming, float] | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<OtherRuns: {', '.join(self._names) or 'none'}>"

    def complete(self, event: RoundForming, *, looks: bool) -> RoundForming:
        """Return an event with the other runs that are known; with `looks`, look for some."""
        self._latest = event, asyncio.get_running_loop().time()
        if looks and self._task is None and event.joined < event.minimum:
            self._task = create_task(self._look(), name="look for other runs")
        return replace(event, others=self._names) if self._names else event

    def stop(self) -> asyncio.Task[None] | None:
        """Look no more: the run has formed a round, or this node leaves.  Return the task."""
        task, self._latest, self._names = self._task, None, ()
        if task is not None:
            task.cancel()
        return task

    async def _look(self) -> None:
        from elastic_aio.rendezvous.job_list import JobList, ListedState  # most runs need none

        # Time is the condition; `stop` ends the wait when the round is formed.
        await asyncio.sleep(_AFTER_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with JobList(self._spec, timeout=_TIMEOUT_S) as jobs:
                    listed = await jobs.read(limit=_READ_MAX)
        except (StoreError, SpecError, OSError):  # a TimeoutError too; it is a hint only
            return
        names = [
            job.run_id
            for job in listed
            if job.state is ListedState.WAITING and job.run_id != self._run_id
        ]
        self._names = tuple(truncate(name, _NAME_MAX) for name in names[-_NAMED_MAX:])
        if self._names and self._latest is not None:
            event, since = self._latest
            passed = asyncio.get_running_loop().time() - since
            left = None if event.time_left is None else max(0.0, event.time_left - passed)
            self._publish(replace(event, others=self._names, time_left=left))


SILENT = "the store has been silent"
"""How the reason of a stop begins that follows no loss of a connection."""

_LATE_S = 0.1
"""A timer this late, in seconds, shows that this process was suspended."""
_ANSWER_S = 0.25
"""Seconds that the store then has for its answer to the next ping."""


def silence_limits(spec: LaunchSpec) -> tuple[float, float] | None:
    """Return after how many seconds without a reply of the store this node stops its workers.

    And after how many it kills them: then its lease is about to end.  The stop plan has the time
    between, if half of the lease's time remains for the store to come back.  None: the workers run
    on.
    """
    settings = spec.rendezvous
    limit, grace = settings.heartbeat_timeout - FENCE, settings.store_grace
    if grace is None:
        if settings.is_on_engine:
            return None
        grace = max(settings.heartbeat_timeout / 2, limit - spec.stop.grace)
    return grace, max(grace, limit)


class SilenceWatch:
    """Isolates a member whose workers run, before the other nodes replace it.

    Once its notice of a preemption was in a store, no node replaces it.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        member: Member,
        session: Callable[[], StoreSession | None],
        perform: Callable[[Iterable[MemberEffect]], None],
    ) -> None:
        self._limits = silence_limits(spec)
        self._connected_min = spec.rendezvous.heartbeat_timeout / 2  # above the ping interval
        self._member, self._session, self._perform = member, session, perform
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        """When the last store that was joined has sent its last reply, in loop seconds."""
        self._lost_because = ""
        self._cut_off_round = -1

    def on_lost(self, heard_at: float, why: str) -> None:
        """Take the loss of a store that was joined, whose last reply came at `heard_at`."""
        self._heard_at, self._lost_because = heard_at, why
        self.check()

    def check(self, due: float = math.inf) -> None:
        """Isolate the member if it is time, and check again later, as long as its workers run.

        `due` is when this was to be called, in loop seconds.
        """
        self.cancel()
        status = self._member.status
        if self._limits is None or not status.is_busy or self._member.has_published_notice:
            return
        if status.round == self._cut_off_round:
            return
        loop, session = asyncio.get_running_loop(), self._session()
        stop_after, kill_after = self._limits
        now, why = loop.time(), f"no store could be found for {{:g}} s ({self._lost_because})"
        if session is not None and session.has_joined:
            self._heard_at, why = session.last_received_at, f"{SILENT} for {{:g}} s"
            stop_after = max(stop_after, self._connected_min)
        silent = now - self._heard_at
        if now - due > _LATE_S and silent < kill_after:
            # This process was suspended: the store is asked again before it counts as silent.
            when = now + _ANSWER_S
        elif silent < stop_after:
            when = self._heard_at + stop_after
        else:
            is_over = silent >= kill_after
            if is_over:
                self._cut_off_round = status.round
            self._perform(self._member.isolate(why.format(round(silent, 1)), is_cut_off=is_over))
            if is_over:
                return
            when = self._heard_at + kill_after
        self._timer = loop.call_at(when, self.check, when)

    def cancel(self) -> None:
        """Check no more.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()


_LAST_STATUS_S = 0.5
"""Seconds for which a node that leaves waits until its last status has been written."""

_DRAIN_NOTICE_S = 1.0
"""Seconds after which a node reports that it stays for others after the end of the job."""

_STAY_ANSWER_S = 2.0
"""Seconds in which a store answers, if the node is to stay for others that use it."""

_RELEASE_S = 0.25
"""Seconds for which it then waits until the store has ended its lease."""

_ABANDONED_S = 150.0
"""Seconds between two looks of a node that has succeeded, whether the others know of it."""

START_TIMEOUT = 600.0
"""Seconds after which a node gives up whose workers do not start."""
_START_NOTICE_S = 60.0

_REJOIN = Backoff(initial=0.5, factor=2.0, cap=10.0)
"""Before the next attempt at a store that refuses this node, with a lease for example."""


class DynamicRendezvous(Rendezvous):
    """One node's part in a rendezvous at a store."""

    def __init__(
        self,
        spec: LaunchSpec,
        node: NodeInfo,
        run_id: str,
        agent: AgentPort,
        network: StoreNetwork | None = None,
    ) -> None:
        """Prepare; nothing is connected before `open`.  `network` None: this host's."""
        settings = spec.rendezvous
        if settings.backend == "static":
            rank = settings.node_rank or 0
            settings = settings.replace(node_rank=rank, is_host=rank == 0)
        self._settings = settings
        self._node = node
        self._agent = agent
        self._run_id = run_id
        self._locator = self._make_locator(network)
        self._round_settings = round_settings(spec)
        self._member = _make_member(spec, settings, self._round_settings, node)
        self._hosts_worker_store, self._program = spec.host_store, _program_of(spec)
        self._budget = RestartBudget(spec.max_restarts, spec.restart, random.random)
        self._other_runs = OtherRuns(settings, run_id, agent.on_event)
        self._detector = CoordinatorLink()
        self._changed = Notifier()
        """Of the member's status, and of the session."""
        self._session: StoreSession | None = None
        self._settled_at = 0.0
        self._attending: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._excluding: asyncio.Task[None] | None = None
        self._silence = SilenceWatch(spec, self._member, lambda: self._session, self._perform)
        self._former = FormerStay()
        self._leaves = 0
        self._draining: asyncio.Timeout | None = None
        self._has_refused = False

    def __repr__(self) -> str:
        return f"<DynamicRendezvous {self._member!r}, {self._session or 'no store'}>"

    @property
    def job(self) -> str:
        return self._member.job

    @property
    def _shares_store(self) -> bool:
        return self._round_settings.shared_store

    def _make_locator(self, network: StoreNetwork | None) -> Locator:
        settings, run_id, on_wait = self._settings, self._run_id, self._on_store_awaited
        if settings.is_on_engine:
            from elastic_aio.discovery.engine import EngineLocator

            return EngineLocator(settings, run_id, on_wait)
        return StoreLocator(settings, run_id, network, on_wait=on_wait, on_drop=self._on_drop)

    # ---------------------------------------------------------------- the agent

    async def open(self) -> None:
        if self._settings.health_check is not None:
            self._member.extend_exclusion(UNCHECKED)
            self._excluding = create_task(self._end_exclusion(0.0), name="first health check")
        self._attending = create_task(self._attend(), name=f"rendezvous {self._run_id}")

    def report(self, report: Report) -> None:
        self._perform(self._member.report(report))

    def abandoned(self) -> Awaitable[None]:
        return self._wait_abandoned()

    async def _wait_abandoned(self) -> None:
        """Wait until no coordinator at the present store has this node's round.

        The job may have ended at the former store while this node was cut off.  No event shows
        that, so the node looks from time to time.  A coordinator that runs the round, or is about
        to replace it, has recorded its number.
        """
        former: StoreSession | None = None
        while True:
            await asyncio.sleep(_ABANDONED_S)
            session = self._session
            if session is None or session is not former:
                former = session  # the search for a store has a limit of its own
                continue
            with contextlib.suppress(StoreError):
                if not (session.has_joined and await session.has_own_round()):
                    return

    async def wait_unneeded(self) -> None:
        """Wait until no other node runs workers, if this one serves a store to them.

        While the store is lost, this node knows nothing of the others.  A node that lost the same
        store comes to the next one within the time of a lease, or stops its workers.
        """
        if self._member.status.drain_reason:
            session, status = self._session, self._member.status
            # A coordinator forms the next round before it leaves, and orders it at this store.
            serves = self._member.is_lead or status.is_host
            if session is not None and (serves or session.is_leader):
                with contextlib.suppress(StoreError, TimeoutError):
                    async with asyncio.timeout(_STAY_ANSWER_S):  # it may be suspended
                        await session.has_own_round()
                    await session.wait_alone()
            return
        is_reported = False
        while (session := self._session) is not None or self._member.is_lead:
            if session is None:
                await self._changed.wait()
                continue
            if not (self._member.status.is_host or self._member.is_lead):
                return
            if not is_reported:
                what = "other nodes' workers, which use the store of this node"
                waited = self._settings.exit_barrier_timeout or 0.0
                self._agent.on_event(RoundWaiting(phase="barrier", what=what, waited=waited))
                is_reported = True
            left = self._settled_at - asyncio.get_running_loop().time()
            if left > 0:
                await self._changed.wait(left)
                continue
            with contextlib.suppress(StoreError):
                await session.wait_alone()
                return
            if session is self._session:
                await self._changed.wait()

    async def leave(self, why: str) -> None:
        self._leaves += 1
        if self._draining is not None:
            self._draining.reschedule(0.0)
        await run_shielded(self._leave)

    # ---------------------------------------------------------------- attending

    async def _attend(self) -> None:
        """Take part; a defect of this package ends the job instead of hanging it."""
        try:
            await self._attend_stores()
        except Exception as error:  # noqa: BLE001  # a defect: it is reported and ends the job
            message = "a rendezvous has a defect"
            asyncio.get_running_loop().call_exception_handler(
                {"message": message, "exception": error, "task": asyncio.current_task()}
            )
            self._perform(self._member.fail(f"internal error: {error!r}"))
        finally:
            await self._detector.aclose()

    async def _attend_stores(self) -> None:
        is_first, refusals = True, 0
        while True:
            try:
                located = await self._locator.locate(
                    is_first=is_first, job=self._member.job, may_serve=self._may_serve
                )
            except DiscoveryError as error:
                self._perform(self._member.fail(str(error), EndCause.NO_STORE))
                return
            endpoint, is_host = located.endpoint, located.is_host
            if not is_first:
                self._agent.on_event(RendezvousStoreRecovered(endpoint=endpoint, is_host=is_host))
            is_first = False
            try:
                session = self._begin_session(located)
                if session is None:
                    return
                why = await session.run()
            finally:
                self._session = None
                loop = asyncio.get_running_loop()
                self._settled_at = loop.time() + self._settings.heartbeat_timeout
                self._changed.notify_all()
                await self._locator.aclose()
            if self._member.has_ended:
                return
            self._agent.on_event(RendezvousStoreLost(endpoint=endpoint, why=why))
            if session.has_joined:
                refusals = 0
                self._former = session.stay
                self._silence.on_lost(session.last_received_at, why)
            # The store is there, so the search alone would not wait.
            elif (refusals := refusals + 1) > 1:
                await asyncio.sleep(_REJOIN.delay(refusals - 2, random.random))

    def _begin_session(self, located: LocatedStore) -> StoreSession | None:
        """Return the session; None if there is no port for the workers."""
        settings, run_id, member = self._settings, self._run_id, self._member
        host, port = parse_host_port("endpoint", located.endpoint)
        address = host if self._shares_store else settings.local_addr or located.local_address
        member.set_address(address, is_host=located.is_host)
        if self._shares_store:
            member.set_port(port)
        elif not self._reserve_port():
            return None
        runner = CoordinatorRunner(
            self._round_settings,
            self._budget,
            self._agent,
            node=self._node,
            run_id=run_id,
            root=located.store if self._shares_store else None,
            on_end=lambda outcome: self._perform(self._member.on_end(outcome)),
        )
        perform, changed = self._perform, self._changed
        election = Election(located, run_id, member, runner, self._detector, perform, changed)
        self._session = StoreSession(
            located,
            settings,
            run_id,
            self._program,
            member,
            runner,
            election,
            perform,
            changed,
            self._former,
        )
        self._changed.notify_all()
        return self._session

    def _perform(self, effects: Iterable[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case StartRound(placement):
                    self._other_runs.stop()
                    self._await_start(placement.round)
                    self._silence.check()
                    self._agent.on_instruction(effect)
                    if not self._shares_store:
                        self._reserve_port()
                case StopRound() | RestartPending() | ChangePending() | PeersFinished() | EndJob():
                    self._agent.on_instruction(effect)
                case RoundForming():
                    looks = self._session is not None and self._session.is_leader
                    self._agent.on_event(self._other_runs.complete(effect, looks=looks))
                case NodeExcluded(seconds=seconds):
                    self._agent.on_event(effect)
                    self._begin_exclusion(seconds)
                case Event():
                    self._agent.on_event(effect)
                case ProbePeers():
                    if self._probing is not None:
                        self._probing.cancel()  # its result must not replace the newer one
                    probing = self._probe(effect)
                    self._probing = create_task(probing, name=f"probe {effect.address}")
        self._changed.notify_all()

    def _await_start(self, round: int, waited: float = 0.0) -> None:
        """Publish, and finally end, a wait for workers that the agent does not start."""
        status = self._member.status
        if (
            self._leaves
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

    def _begin_exclusion(self, seconds: float | None) -> None:
        if self._excluding is not None:
            self._excluding.cancel()  # of a shorter exclusion
        if seconds is not None:
            ending = self._end_exclusion(seconds)
            self._excluding = create_task(ending, name="end of the exclusion")

    async def _end_exclusion(self, seconds: float) -> None:
        """Take part again after so many seconds, once this host is healthy."""
        await asyncio.sleep(seconds)  # time is the condition; `leave` ends the wait
        count = 0
        while why := await self._agent.check_health():
            delay, count = RECHECK.delay(count, random.random), count + 1
            self._agent.on_event(self._member.extend_exclusion(why, delay))
            self._changed.notify_all()
            await asyncio.sleep(delay)
        self._member.readmit()
        self._changed.notify_all()

    async def _probe(self, probe: ProbePeers) -> None:
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
            is_reached = isinstance(error, ConnectionRefusedError) and not self._hosts_worker_store
            problem = "" if is_reached else f"{probe.address}: {error.strerror or error}"
        except (ValueError, OverflowError) as error:  # an invalid name or port
            problem = f"{probe.address}: {error}"
        self._member.probed(probe.round, problem)
        self._changed.notify_all()

    # ---------------------------------------------------------- without a store

    def _may_serve(self) -> bool:
        """Whether this node may serve a store: not after it has left its own for another."""
        return self._former.goes_on_in is None

    def _on_store_awaited(self, why: str, time_left: float | None) -> None:
        left = None if time_left is None else round(time_left, 1)
        self._agent.on_event(RendezvousStoreAwaited(why=why, time_left=left))

    def _on_drop(self, dropped: Dropped) -> None:
        """Report, once, a refused request of a worker that uses the nodes' own store."""
        if dropped.is_refusal and self._shares_store and not self._has_refused:
            self._has_refused = True
            self._agent.on_event(WorkerStoreRefused(peer=dropped.peer, why=dropped.reason))

    # ------------------------------------------------------------------ leaving

    async def _leave(self) -> None:
        self._silence.cancel()
        if self._session is not None and self._leaves == 1:
            await self._leave_session(self._session)
        running = (self._probing, self._excluding, self._attending, self._other_runs.stop())
        tasks = [task for task in running if task is not None]
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

    async def _leave_session(self, session: StoreSession) -> None:
        """Write the last status, and stay while other nodes need this node.

        A node that was refused, or has failed alone, leaves a job that goes on.
        """
        outcome = self._member.status.outcome
        is_over = outcome is not None
        if not is_over:
            self._member.leave()
            self._changed.notify_all()
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(_LAST_STATUS_S):
                await session.write_last()
                await session.confirm_end()
                if not is_over:
                    await session.resign()
        if outcome is None:
            return
        limit = self._settings.close_timeout
        what = f"other nodes have not learned yet of the end: {outcome.why}"
        left = limit - _DRAIN_NOTICE_S
        notice = RoundWaiting(phase="ending", what=what, waited=_DRAIN_NOTICE_S, time_left=left)
        call_later = asyncio.get_running_loop().call_later
        timer = call_later(_DRAIN_NOTICE_S, self._agent.on_event, notice)
        # Nodes that are still there after the timeout notice the end of the connection.
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(limit) as self._draining:
                try:
                    await session.drain()
                finally:
                    timer.cancel()
                    self._draining = None


def _make_member(
    spec: LaunchSpec, settings: RendezvousSpec, alike: RoundSettings, node: NodeInfo
) -> Member:
    return Member(
        # The name of the host makes it readable.
        f"{node.name}.{node.pid}.{random_bytes(4).hex()}",
        MemberStatus(
            serial=0,
            node=node,
            address="",
            port=0,
            preferred_rank=settings.node_rank,
            minimum=spec.nnodes.minimum,
            maximum=spec.nnodes.maximum,
            program=alike.program,
            uid=alike.uid,
            policy=alike.policy,
            stop_time=spec.stop.grace
            + spec.stop.reap_timeout
            + (settings.health_check_timeout if settings.health_check else 0.0),
        ),
        exclude_for=spec.restart.exclude_for,
    )


def order_timeout(spec: LaunchSpec) -> float:
    """Return how many seconds a member may leave orders without an acknowledgement.

    A suspended node is lost by its lease, and not by its silence.
    """
    return max(28.0, 2 * spec.rendezvous.heartbeat_timeout)


def _program_of(spec: LaunchSpec) -> str:
    """Return what all nodes of one job run, however each of them spells a path.

    A command may be a shell or a wrapper, which its arguments tell apart.
    """
    words = [os.path.basename(spec.name)]
    if isinstance(spec.entrypoint, Command):
        words += [*spec.entrypoint.argv[1:], *map(str, spec.args)]
    return " ".join(words)


def round_settings(spec: LaunchSpec) -> RoundSettings:
    settings = spec.rendezvous
    is_static = settings.backend == "static"
    return RoundSettings(
        minimum=spec.nnodes.minimum,
        maximum=spec.nnodes.maximum,
        join_timeout=settings.join_timeout,
        replace_timeout=(
            settings.join_timeout if settings.replace_timeout is None else settings.replace_timeout
        ),
        last_call_timeout=settings.last_call_timeout,
        scale_up_delay=(
            settings.last_call_timeout
            if settings.scale_up_delay is None
            else settings.scale_up_delay
        ),
        scale_up_limit=settings.scale_up_limit if settings.scale_up == "checkpoint" else 0.0,
        keep_workers=settings.keep_workers,
        fixed_ranks=is_static,
        # Torch's own clients have no token and no TLS; worker 0 may want to host its store.
        shared_store=is_static and not (settings.token or settings.tls) and spec.host_store,
        overlap=settings.overlap,
        heartbeat_timeout=settings.heartbeat_timeout,
        fence=FENCE,
        order_timeout=order_timeout(spec),
        policy=changed_fields(spec),
        program=os.path.basename(spec.name),
        uid=os.getuid(),
        any_program=settings.any_program,
        has_decide=spec.restart.decide is not None,
        may_move=len(settings.endpoints) > 1 and not settings.is_on_engine,
    )
