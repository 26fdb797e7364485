"""The resources of a job on this host: directory, process tree, guardian, logs.

`worker_group` has the resources of one attempt.

The order of closing
====================

`LocalRuntime.close` runs when no worker is left and the last group is closed.  The launcher can be
killed between any two steps, and a cancelled close is called again, so no step may release what a
later step, or the guardian in place of this process, needs:

1. The stores of reserved master ports, the inherited sockets and the pipe of the timers are closed:
   no worker connects any more, another job may want the ports, and the next step can take seconds.
2. The output is closed: first it is shown to the end, unless the console takes nothing for 5 s.
3. The fork server is killed, and what its modules have started is stopped; while it still imports,
   it is stopped by the plan too.  The memory files with the calls and results of functions are
   closed.  The group has read the results by now.
4. The guardian leaves the job alone; after the last job of the program it exits.  It guards until
   here: a kill of this process in the steps before leaves no fork server or survivor behind.
5. The cgroup of the workers is removed, which is empty unless a process could not be killed.  The
   tree is closed: a survivor that exits later must not write to the session list.  Orphans are
   adopted until here, so that the last orphans are found and reaped.
6. The job and the standard streams are closed, and with the last job of the program the session
   list, which a guardian inherits.
7. The descriptor limit is released: everything that needed the higher limit is closed.
8. The directory is tidied: empty files and directories are removed.
9. Old runs are removed, for some seconds at most.  The lock on the directory is released.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict, replace

from elastic_aio import events
from elastic_aio.agent.entrypoint import BareOptions, Entrypoint
from elastic_aio.agent.liveness import Liveness
from elastic_aio.agent.logs import JobOutput
from elastic_aio.agent.preflight import device_env, startup_env, worker_cpus, worker_env
from elastic_aio.agent.worker_store import MASTER_ADDR, MasterPorts
from elastic_aio.aio import (
    ForkGuard,
    PausableClock,
    cancel_and_wait,
    create_task,
    run_in_thread,
    run_shielded,
)
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.logs.files import RunDirectory
from elastic_aio.process.adopted import subreaper
from elastic_aio.process.children import Child, ChildSpec, Spawner
from elastic_aio.process.descendants import marker_value
from elastic_aio.process.descriptors import StandardStreams, limit, with_descriptor_limit
from elastic_aio.process.guardian import Guardian
from elastic_aio.process.guardian_process import GuardedJob, take_early
from elastic_aio.process.tree import ProcessTree, Survivor
from elastic_aio.ranks import WorkerRanks
from elastic_aio.signals import default_interrupts
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason
from elastic_aio.worker.context import (
    ERROR_FILE,
    NOTICE_SIGNAL,
    NOTIFY_FD,
    NOTIFY_SOCKET,
    PENDING_CHANGE,
    REAL_LOCAL_RANK,
    TASK,
    TIMER_FILE,
    WATCHDOG_USEC,
    WorkerContext,
    task_of,
    without_channels,
)

if TYPE_CHECKING:
    from elastic_aio.agent.failures import WorkerRecord
    from elastic_aio.agent.leaf import LeafPlace
    from elastic_aio.agent.probes import Probes
    from elastic_aio.agent.worker_setup import WorkerSetup
    from elastic_aio.logs.paths import WorkerLogs
    from elastic_aio.process.listeners import Listeners


# Seconds that the removal of old runs may take at the end: a file server may be gone.
_RUNS_S: Final = 10.0


_CommonEnv = tuple[dict[str, str], dict[str, str]]
"""Variables that all workers have, and those of them that no worker may have otherwise."""


class LocalRuntime:
    """The resources of one job on this host; must be closed."""

    notes_failures = False  # an exception that nothing catches, in the error file of a worker
    _loading: asyncio.Task[None] | None = None
    _worker_env: dict[int, dict[str, str]]  # of their commands, by local rank
    _abandoned: Set[int] = frozenset()  # survivors of the last stop, which have been reported

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        run_id: str,
        host: str,
        nproc: int,
        spawner: Spawner,
        publish: Callable[[events.Event], None],
        publish_later: Callable[[Callable[[], events.Event]], None] | None = None,
        console: ConsoleTarget | None = None,
        bare: BareOptions | None = None,
        adopt_orphans: bool = False,
        place: LeafPlace | None = None,
    ) -> None:
        """Prepare; nothing is opened before `open`.

        `publish_later` is called with a function that makes an event of this time (see `EventLog`).
        `bare` is of a bare group, which has no master port; `place` of a leaf in a tree.
        """
        self.spec = spec
        self.run_id, self.host, self.nproc = run_id, host, nproc
        self.place = place
        self.publish = publish
        self.publish_later = publish_later or (lambda make: publish(make()))
        self.clock = PausableClock()
        self._fork = ForkGuard()
        self.entrypoint = Entrypoint(spec, partial(self._spawn_listed, spawner), bare)
        self.master_ports = MasterPorts(spec, self._on_store_refused)
        self.output = JobOutput(
            spec,
            run_id=run_id,
            host=host,
            nproc=nproc,
            publish=publish,
            console=console,
            on_pipes=self._keep_pipes,
            may_capture=bare is None,
            place=place,
        )
        directory = self.output.attempt_directory
        self.liveness = Liveness(
            spec, self.clock, publish, lambda: self.tree, directory, make_probes=self._make_probes
        )
        self.exit_numbers = itertools.count()
        self.attempt = 0  # -1 once closed
        self._adopts_orphans = adopt_orphans
        self._tree: ProcessTree | None = None
        self._guardian: Guardian | None = None
        self._reserved = 0  # descriptors
        self.job: GuardedJob | None = None
        self._streams: StandardStreams | None = None
        self._setup = _setup_of(spec, nproc, None if place is None else place.listeners)
        self._cpus: list[frozenset[int]] = []
        self._common_env: _CommonEnv | None = None  # of the present attempt

    def __repr__(self) -> str:
        return f"<LocalRuntime of run {self.run_id}: {self._tree or 'not open'}>"

    @property
    def tree(self) -> ProcessTree:
        assert self._tree is not None, "open() comes first"
        return self._tree

    @property
    def cgroup(self) -> str:
        """The directory of the cgroup of the workers; empty without one."""
        return "" if self._setup is None else self._setup.cgroup

    # --------------------------------------------------------- open and close

    async def open(self) -> None:
        """Make the run's directory, and start the guardian and the fork server.

        SpecError: the log directory cannot be used, a function not be pickled, or a worker not be
        bound.  HostError: this host lacks something.  Cancellation: nothing is left open.
        """
        try:
            await self._open()
        except BaseException:  # a cancellation too: what was opened so far is closed
            await run_shielded(self.close)
            raise

    async def _open(self) -> None:
        self.entrypoint.check()
        worker = None if self.place is None else self.place.worker
        self._cpus = worker_cpus(self.spec, worker.local_world_size if worker else self.nproc)
        try:
            each = self.entrypoint.descriptors_each
            further = 0 if self._setup is None else self._setup.descriptors
            self._reserved = limit.reserve(self.nproc, each, further=further)
            self._streams = StandardStreams()
        except OSError as error:
            raise HostError(f"cannot start a job here: {error_reason(error)}") from error
        if self._setup is not None:
            await self._setup.open()
        job = self.job = take_early() or GuardedJob.create(self.spec.stop)
        self._tree = ProcessTree(job.marker, self.clock, job.sessions, since=job.since)
        if self._setup is not None:
            self._tree.on_kill = self._setup.kill
        self._guardian = Guardian(
            job,
            self.spec.stop,
            on_restarted=lambda pid: self.publish(events.GuardianRestarted(pid=pid)),
            on_lost=lambda why: self.publish(events.GuardianLost(why=why)),
            python=self.spec.python,
        )
        self._guardian.start()
        self.output.open(self._streams)
        if self.spec.ready is not None:
            self.output.check_readable("ready", self.spec.ready.streams)
        self.liveness.open()
        if self._setup is not None and self._setup.account.owner != (-1, -1):
            self.output.directory.give_to(self._setup.account.owner)
            if self.liveness.timer_file:
                os.chown(self.liveness.timer_file, *self._setup.account.owner)
        if self._adopts_orphans:
            self._tree.orphans.adopt()
        streams = (self._streams.null, self._streams.inherited(1), self._streams.inherited(2))
        try:
            await self.entrypoint.start(self._command_env(), streams, self._tree.exclude)
        except SpawnError as error:
            raise HostError(f"cannot start the server that forks: {error}") from error
        await self._guardian.wait_ready()
        if self.spec.nnodes.maximum > 1:  # its workers may start much later
            from elastic_aio.agent.later import load_later_modules  # a start does without

            self._loading = create_task(load_later_modules(), name="load what may follow")

    def _keep_pipes(self, descriptors: list[int]) -> None:
        if self.job is not None:
            self.job.keep_pipes(descriptors)

    def release(self) -> None:
        """Let the guardian end the job; needs no event loop."""
        if self._guardian is not None and self.job is not None:
            self._guardian.release()

    async def close(self) -> bool:
        """Show the rest of the output and release everything; see the module for the order.

        Returns whether a log directory remains.  A copy in a fork closes nothing, since all of it
        is the parent's.  Idempotent.
        """
        if self._fork.is_copy:
            return False
        if self._loading is not None:
            await cancel_and_wait([self._loading])
        await self.master_ports.aclose()
        if self._setup is not None:
            self._setup.close_sockets()
        await self.liveness.aclose()
        await self.output.aclose()
        await self._close_fork_server()
        await self.entrypoint.aclose()
        if self._guardian is not None:
            await self._guardian.aclose()
        if self._setup is not None:
            await self._setup.aclose()
        if self._tree is not None:
            await self._tree.aclose()
        if self.job is not None:
            self.job.close()
            self.job = None
        if self._streams is not None:
            self._streams.close()
        if self._reserved:
            limit.release(self._reserved)
            self._reserved = 0
        has_logs = self.output.remove_empty()
        if self.spec.logs.keep_runs is not None and self.place is None:
            directory = self.output.directory
            # A node that has not met the others does not know which of them are this run's: it
            # removes none.
            if directory.job or self.spec.nnodes.maximum == 1:
                await remove_old_runs(directory, self.spec.logs.keep_runs, self.publish)
        self.output.directory.close()
        self.attempt = -1
        return has_logs

    async def _close_fork_server(self) -> None:
        if self._tree is None or not self.entrypoint.uses_forkserver:
            return
        await self._tree.include()
        if not self.entrypoint.is_importing:
            await self.entrypoint.aclose()
        left = await self._tree.descendants()
        if left and {process.pid for process in left} <= self._abandoned:
            return  # all of them have been reported
        if not await self._tree.forget_if_empty():
            why, plan = "the fork server has left processes behind", self.spec.stop
            self.publish(events.StopRequested(attempt=self.attempt, reason=why, plan=str(plan)))
            await self.stop_processes(plan)

    async def stop_processes(self, plan: StopPlan) -> list[Survivor]:
        """Stop every process; return those that survive SIGKILL.  Idempotent."""
        async with self.liveness.stopping(plan):
            survivors = await self.tree.stop(plan, self._on_escalated)
        if self._setup is not None:
            self._setup.kill()  # what no scan has found
        can_help = any(not survivor.is_denied for survivor in survivors)
        if can_help and self._guardian is not None and await self._guardian.end_job():
            survivors = await self.tree.wait_reaped(plan.reap_timeout)
        self._abandoned = {one.pid for one in survivors}
        for one in survivors:
            abandoned = events.WorkerAbandoned(pid=one.pid, state=one.state, program=one.program)
            self.publish(replace(abandoned, attempt=self.attempt))
        return survivors

    def _on_escalated(self, signal: int, pids: tuple[int, ...]) -> None:
        why = self.tree.kill_reason()
        self.publish(
            events.StopEscalated(attempt=self.attempt, signal=signal, pids=pids, reason=why)
        )

    def _on_store_refused(self, peer: str, why: str) -> None:
        self.publish(events.WorkerStoreRefused(attempt=self.attempt, peer=peer, why=why))

    # ------------------------------------------------------------ an attempt

    def begin_attempt(self, attempt: int, records: Mapping[int, WorkerRecord]) -> str | None:
        """Note the current attempt and its future `records`; return its log directory, if any."""
        self.attempt = attempt
        self._common_env, self._worker_env = None, {}
        self.liveness.begin_attempt(attempt, records)
        return self.output.attempt_directory(attempt)

    async def open_master(self, group_rank: int, master: tuple[str, int] | None) -> tuple[str, int]:
        """Return address and port at which the workers of the current attempt meet, or HostError.

        The node of `group_rank` 0 serves the store at `master`, on which the nodes have agreed;
        None if all workers are on this host.
        """
        if self.entrypoint.bare is not None:
            return MASTER_ADDR, 0
        await self.master_ports.end_attempt()
        if master is None:
            return await self.master_ports.open_local()
        if group_rank == 0:
            await self.master_ports.serve(*master)
        else:
            self.master_ports.introduce(*master)
        return self.master_ports.address_of(master[0]), master[1]

    async def prepare_attempt(self, attempt: int, group_rank: int) -> None:
        """Drop the last attempt's results; make this attempt's directory, or raise SpawnError."""
        await self.entrypoint.forget_results()
        if (kept := self.spec.logs.keep_attempts) is not None:
            await run_in_thread(self.output.directory.remove_attempts, attempt - kept)
        self.output.begin_attempt(attempt, group_rank)

    # -------------------------------------------------------------- a worker

    def notify_socket(self, local_rank: int) -> AbstractContextManager[int | None]:
        """Open the socket of a worker, or raise SpawnError; the value is None in a bare group."""
        if self.entrypoint.bare is not None:
            return nullcontext()
        return self.liveness.open_worker(local_rank)

    @property
    def change_file(self) -> str:
        """Path of the file that shows a pending change to workers; empty without a directory."""
        directory = self.output.directory.path
        return "" if directory is None else f"{directory}/pending_change"

    def environment(
        self,
        ranks: WorkerRanks,
        *,
        restarts: int,
        round_number: int,
        master: tuple[str, int],
        logs: WorkerLogs,
        notify: int | None = None,
    ) -> dict[str, str]:
        """Return the environment variables of one worker; `notify` is the socket it inherits."""
        error_file = logs.error_file
        of_worker = self.spec.worker_env[ranks.local_rank] if self.spec.worker_env else {}
        if self.entrypoint.bare is not None:
            own = {ERROR_FILE: error_file, self.tree.marker: marker_value()}
            inherited = {name: value for name, value in os.environ.items() if name != NOTIFY_FD}
            return {**inherited, **self.spec.env, **of_worker, **own}
        context = WorkerContext(
            **asdict(ranks),
            role=self.spec.role,
            run_id=self.run_id,
            master_addr=master[0],
            master_port=master[1],
            restart_count=restarts,
            max_restarts=self.spec.max_restarts,
            use_agent_store=self.spec.host_store,
            error_file=error_file,
            attempt=self.attempt,
            round=round_number,
        )
        if self._common_env is None:
            self._common_env = self._make_common_env(ranks.local_world_size)
        common, own = self._common_env
        env = {**common, **of_worker, **own, **context.to_env()}
        self._worker_env[ranks.local_rank] = without_channels({**env, ERROR_FILE: ""})
        if self.spec.virtual_local_rank:
            env |= {"LOCAL_RANK": "0", REAL_LOCAL_RANK: str(ranks.local_rank)}
            env |= device_env(self.spec, ranks.local_rank)
        if notify is not None:
            env[NOTIFY_FD] = str(notify)
        needs_record = bool(error_file) and self.output.needs_record(logs)
        is_watched = needs_record or self.spec.liveness != LivenessSpec()
        startup = startup_env(self.spec, env, is_watched=is_watched)
        self.notes_failures = bool(startup and error_file)
        return env | startup

    def _make_common_env(self, nproc: int) -> _CommonEnv:
        """Return the variables that all workers of an attempt have; `nproc` is their number."""
        task = task_of({**os.environ, **self.spec.env})
        seconds, notice = self.spec.liveness.heartbeat_timeout, self.spec.preemption.signal
        channels = {
            PENDING_CHANGE: self.change_file,
            TIMER_FILE: self.liveness.timer_file,
            NOTIFY_SOCKET: self.liveness.address,
            WATCHDOG_USEC: "" if seconds is None else str(int(seconds * 1e6)),
            NOTICE_SIGNAL: str(notice) if notice in (signal.SIGUSR1, signal.SIGUSR2) else "",
        }
        own = {name: value for name, value in channels.items() if value}
        own |= {self.tree.marker: marker_value(), TASK: task}
        return worker_env(self.spec, nproc, own), own

    async def spawn(
        self,
        local_rank: int,
        env: Mapping[str, str],
        streams: tuple[int, int],
        notify: int | None = None,
    ) -> Child:
        """Start a worker, which inherits the socket `notify`, or raise SpawnError or HostError."""
        standard = self.streams
        source, place = self.spec.stdin if local_rank == 0 else "null", self.place
        if source == "auto" and place is not None and place.path != ("0" if place.worker else ""):
            source = "null"  # of several programs none is asked at the terminal
        if source == "rank0":
            stdin = self.output.directory.give(standard.inherited(0), "pipe:")
        else:
            stdin = standard.null if source == "null" else standard.take_terminal()
        command = self.entrypoint.command(local_rank)
        child_spec = ChildSpec(
            argv=command.argv,
            env=env,
            cwd=self.spec.cwd,
            stdin=stdin,
            stdout=streams[0],
            stderr=streams[1],
            pass_fds=command.pass_fds if notify is None else (*command.pass_fds, notify),
            call=command.call,
            cpus=self._cpus[local_rank] if self._cpus else frozenset(),
        )
        spawn, setup = self.entrypoint.spawner, self._setup
        if not self.entrypoint.uses_forkserver:
            spawn = partial(_spawn_within_limit, spawn)
        if setup is None:
            return await spawn(child_spec)
        return await setup.spawn_worker(spawn, child_spec, local_rank)

    def _make_probes(self, **callbacks: Any) -> Probes:
        from elastic_aio.agent.probes import Probes  # few jobs have any

        spec, logged = self.spec, self.output.logged
        return Probes(
            spec.ready,
            spec.alive,
            self.clock,
            start_command=self.start_command,
            logged=logged,
            publish=self.publish,
            is_beside=self.place is not None and self.place.is_beside,
            descendants=lambda: self.tree.descendants(),
            **callbacks,
        )

    async def start_command(
        self, argv: Sequence[str], output: int, local_rank: int | None = None
    ) -> Child:
        """Start a command of the job, or one with the environment of a worker that has started.

        It writes to `output`.  Raises SpawnError.  A stop of the workers ends it too.
        """
        env = self._command_env() if local_rank is None else self._worker_env[local_rank]
        child_spec = ChildSpec(tuple(argv), env, self.spec.cwd, self.streams.null, output, output)
        spawn = partial(_spawn_within_limit, self.entrypoint.command_spawner)
        setup = self._setup
        return await (setup.spawn_command(spawn, child_spec) if setup else spawn(child_spec))

    def _command_env(self) -> dict[str, str]:
        return worker_env(self.spec, self.nproc, {self.tree.marker: marker_value()})

    def starting(self) -> AbstractContextManager[None]:
        """Return a block in which workers are started, which the guardian learns at its end."""
        is_listed = self.entrypoint.spawner is self.entrypoint.command_spawner
        return self.tree.starting() if is_listed else nullcontext()

    async def _spawn_listed(self, spawner: Spawner, child_spec: ChildSpec) -> Child:
        # The terminal's signals never reach a worker: it leads a session of its own.
        reset = default_interrupts() if subreaper.owns_process else nullcontext()
        with self.tree.starting(), reset:
            return await spawner(child_spec)

    @property
    def streams(self) -> StandardStreams:
        assert self._streams is not None, "open() comes first"
        return self._streams


async def remove_old_runs(
    directory: RunDirectory, kept: int, publish: Callable[[events.Event], None]
) -> None:
    """Remove the directories of the runs beside one that are not kept.

    Cancellation: the thread that removes them runs on; it ends with the program.
    """
    try:
        async with asyncio.timeout(_RUNS_S):
            await run_in_thread(directory.remove_old_runs, kept, daemon=True)
    except TimeoutError:
        publish(events.LogsNotRemoved(why=f"it has taken more than {_RUNS_S:g} s"))
    except OSError as error:
        publish(events.LogsNotRemoved(why=error_reason(error)))


def _setup_of(spec: LaunchSpec, nproc: int, listeners: Listeners | None) -> WorkerSetup | None:
    if not spec.sockets and spec.limits is None:
        return None
    from elastic_aio.agent.worker_setup import WorkerSetup  # few jobs have one

    return WorkerSetup(spec, nproc, listeners)


async def _spawn_within_limit(spawner: Spawner, child_spec: ChildSpec) -> Child:
    """Start a child with the descriptor limit that this process had before it raised its own."""
    return await spawner(with_descriptor_limit(child_spec, limit.original))
