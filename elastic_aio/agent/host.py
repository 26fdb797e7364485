"""One host's part of a job: its processes, their guardian, their logs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.agent.surroundings import check_runnable, environment, free_port
from elastic_aio.agent.work import Crew, Work
from elastic_aio.agent.workerstore import MASTER_ADDR, WorkerStore, bind_store
from elastic_aio.aio import Pausable, owned_task
from elastic_aio.errors import SpawnError, SurroundingsError
from elastic_aio.logs.files import RunFolder
from elastic_aio.logs.paths import WorkerLogs, attempt_folder, plan_logs
from elastic_aio.logs.prefix import LineOrigin, make_prefix
from elastic_aio.logs.sink import Console, Sink, open_console
from elastic_aio.logs.tee import Tee
from elastic_aio.policy import StopPlan
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner
from elastic_aio.process.group import WorkerGroup
from elastic_aio.process.guardian import Guardian, open_roster
from elastic_aio.process.limits import limit, with_descriptor_limit
from elastic_aio.process.results import Told
from elastic_aio.process.tree import ProcessTree, Survivor
from elastic_aio.ranks import Place
from elastic_aio.spec import LaunchSpec
from elastic_aio.worker.context import ERROR_FILE, WorkerContext

if TYPE_CHECKING:  # a job of one node has none
    from elastic_aio.agent.masters import Masters

__all__ = ["Host", "HostCallbacks"]

# Seconds without any progress after which a blocked console is given up, once the
# workers are gone.  Their output is in the files.
_PATIENCE_S = 5.0


class HostCallbacks(Struct, frozen=True):
    """Whom a host tells what; attempts, then local ranks, come first."""

    started: Callable[[int, int, Child], None]
    exited: Callable[[int, int, Child, Exit], None]
    guardian_replaced: Callable[[int], None]
    console_lost: Callable[[Sink, str], None]


class Host:
    """Starts and stops the workers of a job on this host; must be closed."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        run_id: str,
        name: str,
        nproc: int,
        console: Console | None,
        spawner: Spawner,
        clock: Pausable,
        tell: HostCallbacks,
        crew: Crew | None = None,
        masters: Masters | None = None,
    ) -> None:
        """Prepare; only `open` touches the machine.

        Args:
            spec: the job.
            run_id: name of the run.
            name: name of this host.
            nproc: number of workers.
            console: where shown output goes; None is this process's own.
            spawner: starts processes.
            clock: measures graces.
            tell: whom to tell what happens.
            crew: differences between the workers of a bare group.
            masters: where the workers meet those of other nodes, if there are any.
        """
        self.folder = RunFolder(None)
        self.masters = masters
        self._spec = spec
        self._run_id = run_id
        self._name = name
        self._nproc = nproc
        self._console = console
        self._own_console: Console | None = None
        self._spawner = spawner
        self._clock = clock
        self._tell = tell
        self._crew = crew
        self._work = Work(spec, spawner, crew)
        self._marker = f"ELASTIC_AIO_JOB_{os.urandom(16).hex()}"
        self._holds_limit = False
        self._roster = -1
        self._nothing = -1
        self._tree: ProcessTree | None = None
        self._guardian: Guardian | None = None
        self._tee: Tee | None = None
        self._tee_tokens: list[int] = []
        self._group: WorkerGroup | None = None
        self._starting: asyncio.Task[None] | None = None
        self._store: WorkerStore | None = None

    @property
    def tree(self) -> ProcessTree:
        """All processes of the job on this host."""
        assert self._tree is not None, "open() comes first"
        return self._tree

    async def open(self) -> None:
        """Make the run's folder and start the guardian.

        Raises:
            SpecError: the log folder cannot be used, or a function not be pickled.
            SurroundingsError: the machine lacks something.
        """
        self._work.check()
        try:
            limit.acquire(self._nproc, self._work.descriptors_each)
            self._holds_limit = True
            self._nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SurroundingsError(f"cannot start a job here: {error}") from error
        self._roster = open_roster()
        self._tree = ProcessTree(self._marker, self._clock, self._roster)
        self.folder = RunFolder.make(self._spec.logs, self._run_id)
        self._guardian = Guardian(
            self._spawner,
            marker=self._marker,
            since=self._tree.since,
            roster=self._roster,
            on_replaced=self._tell.guardian_replaced,
        )
        await self._guardian.start()
        await self._start_server()

    async def _start_server(self) -> None:
        env = environment(self._spec, self._nproc, {self._marker: "1"})
        streams = (self._nothing, self._ours(1), self._ours(2))
        try:
            await self._work.start(env, streams, _limited, self.tree.spare)
        except SpawnError as error:
            raise SurroundingsError(f"cannot start the server that forks: {error}") from error

    async def start(
        self,
        attempt: int,
        places: Sequence[Place],
        restarts: int,
        master: tuple[str, int] | None = None,
    ) -> None:
        """Spawn all workers of an attempt.

        Args:
            attempt: its number.
            places: of the workers, by local rank.
            restarts: restarts after failures so far.
            master: address and port at which the workers of all nodes meet; None when
                they are all here.

        Raises:
            SpawnError: one could not be spawned; those before it may run.
            SurroundingsError: the port cannot be had.
        """
        check_runnable(self._spec)
        self._group = WorkerGroup(
            self._work.spawner,
            self.tree,
            on_started=lambda rank, child: self._tell.started(attempt, rank, child),
            on_exited=lambda rank, child, ended: self._tell.exited(attempt, rank, child, ended),
        )
        # Kept, so that a stop can wait for the child that is being spawned.
        spawning = self._spawn(self._group, attempt, places, restarts, master)
        self._starting = owned_task(spawning, name=f"start {attempt}")
        await asyncio.shield(self._starting)

    async def _spawn(
        self,
        group: WorkerGroup,
        attempt: int,
        places: Sequence[Place],
        restarts: int,
        master: tuple[str, int] | None,
    ) -> None:
        master = await self._meet(places[0].group_rank, master)
        self._work.forget_results()
        try:
            self.folder.make_attempt(attempt)
        except OSError as error:
            raise _log_error(error) from error
        await group.start(self._plan(attempt, place, restarts, master) for place in places)

    async def stop(
        self, plan: StopPlan, on_escalated: Callable[[int, tuple[int, ...]], None]
    ) -> list[Survivor]:
        """Stop everything of the attempt; return what could not be killed.

        May be started over after a cancellation.
        """
        await self.abandon_start()
        return await self.tree.stop(plan, on_escalated)

    async def abandon_start(self) -> None:
        """Spawn no further worker; wait for the one that is being spawned."""
        if self._group is not None and self._starting is not None:
            self._group.abandon()
            await asyncio.wait([self._starting])

    async def told(self) -> dict[int, Told]:
        """Return, by local rank, how the functions of the attempt have ended."""
        return await self._work.told()

    async def end_attempt(self) -> None:
        """Take note that no worker of the attempt is left: finish its logs, close its store.

        May be started over.
        """
        if self._tee is not None:
            self._tee.finish(self._tee_tokens)
        self._tee_tokens = []
        if self._store is not None:
            await self._store.aclose()
            self._store = None
        if self.masters is not None:
            await self.masters.end_round()

    async def close(self) -> bool:
        """Show what is left to show, end the guardian, tidy up.

        Returns whether a log folder remains.  May be started over.
        """
        await self.end_attempt()
        if self.masters is not None:
            await self.masters.aclose()
        if self._tee is not None:
            for sink in await self._tee.drain(_PATIENCE_S):
                self._tell.console_lost(sink, "nobody has read it since the workers ended")
            await self._tee.aclose()
            self._tee = None
        if self._own_console is not None:
            self._own_console.close()
            self._own_console = None
        await self._work.aclose()
        if self._guardian is not None:
            await self._guardian.aclose()
        if self._tree is not None:
            self._tree.close()
        for descriptor in (self._roster, self._nothing):
            if descriptor >= 0:
                os.close(descriptor)
        self._roster = self._nothing = -1
        if self._holds_limit:
            self._holds_limit = False
            limit.release()
        return self.folder.tidy()

    def attempt_folder(self, attempt: int) -> str | None:
        """Return the folder of an attempt; None when nothing is kept."""
        return None if self.folder.path is None else attempt_folder(self.folder.path, attempt)

    def logs_of(self, attempt: int, local_rank: int) -> WorkerLogs:
        """Return where one worker's output goes.

        Raises:
            SpawnError: the plug-in that decides it has failed.
        """
        try:
            return plan_logs(self._spec.logs, self.folder.path, attempt, local_rank)
        except Exception as error:
            said = f"the plan of the logs failed: {type(error).__name__}: {error}"
            raise SpawnError(said, permanent=True, exit_code=1) from error

    @contextmanager
    def _plan(
        self, attempt: int, place: Place, restarts: int, master: tuple[str, int]
    ) -> Iterator[ChildPlan]:
        logs = self.logs_of(attempt, place.local_rank)
        inherited = self._ours(1), self._ours(2)
        try:
            with self.folder.open_streams(logs, inherited, self._nothing) as (out, err):
                self._follow(logs, attempt, place)
                takes_stdin = self._spec.stdin == "rank0" and place.local_rank == 0
                task = self._work.task(place.local_rank)
                plan = ChildPlan(
                    argv=task.argv,
                    env=self._environment(place, restarts, master, logs.error_file),
                    cwd=self._spec.cwd,
                    stdin=self._ours(0) if takes_stdin else self._nothing,
                    stdout=out,
                    stderr=err,
                    pass_fds=task.pass_fds,
                    call=task.call,
                )
                yield plan if self._work.is_served else _limited(plan)
        except OSError as error:
            raise _log_error(error) from error

    async def _meet(self, group_rank: int, master: tuple[str, int] | None) -> tuple[str, int]:
        """Return where the workers of the next attempt meet; a bare group meets nowhere.

        A store of ours listens there, unless the workers shall host it themselves
        (torch's TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).

        Raises:
            SurroundingsError: the port cannot be had.
        """
        if self._crew is not None:
            return MASTER_ADDR, 0
        if master is not None:
            if self.masters is not None and group_rank == 0:
                await self.masters.serve(*master)
            return master
        if self._spec.hosts_store:
            self._store = await bind_store(self._spec.master_port or 0)
            return MASTER_ADDR, self._store.port
        return MASTER_ADDR, self._spec.master_port or free_port()

    def _environment(
        self, place: Place, restarts: int, master: tuple[str, int], error_file: str
    ) -> dict[str, str]:
        if self._crew is not None:
            env = self._crew.envs[place.local_rank]
            ours = {ERROR_FILE: error_file, self._marker: "1"}
            return {**os.environ, **self._spec.env, **env, **ours}
        context = WorkerContext(
            place=place,
            role=self._spec.role,
            run_id=self._run_id,
            master_addr=master[0],
            master_port=master[1],
            restart_count=restarts,
            max_restarts=self._spec.max_restarts,
            use_agent_store=self._spec.hosts_store,
            error_file=error_file,
        )
        ours = {**context.to_env(), self._marker: "1"}
        return environment(self._spec, place.local_world_size, ours)

    def _follow(self, logs: WorkerLogs, attempt: int, place: Place) -> None:
        for stream in (logs.stdout, logs.stderr):
            if stream.is_shown and stream.path is not None:
                self._follow_one(stream.path, stream is logs.stdout, attempt, place)

    def _follow_one(self, path: str, is_stdout: bool, attempt: int, place: Place) -> None:
        if self._tee is None:
            self._tee = Tee(self._tell.console_lost)
            if self._console is None:
                self._console = self._own_console = open_console()
        assert self._console is not None
        sink = self._console.out if is_stdout else self._console.err
        origin = LineOrigin(
            self._spec.role,
            place.rank,
            place.local_rank,
            attempt,
            self._name,
            "stdout" if is_stdout else "stderr",
        )
        prefix = make_prefix(self._spec.logs.prefix, origin, _timestamp)
        self._tee_tokens.append(self._tee.follow(path, sink, prefix))

    def _ours(self, descriptor: int) -> int:
        """Return one of our standard streams; `/dev/null` in place of a closed one."""
        try:
            os.fstat(descriptor)
        except OSError:
            return self._nothing
        return descriptor


def _limited(plan: ChildPlan) -> ChildPlan:
    """Give a plan the limits that this process had before it raised them."""
    soft = limit.original
    return plan if soft is None else with_descriptor_limit(plan, soft)


def _log_error(error: OSError) -> SpawnError:
    where = f": {error.filename}" if error.filename else ""
    said = (error.strerror or str(error)).lower()
    return SpawnError(f"cannot make the log files ({said}){where}", permanent=False, exit_code=1)


def _timestamp() -> str:
    now = time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))
    return f"{clock}.{int(now % 1 * 1000):03d}"
