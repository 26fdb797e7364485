"""Performs the effects of a supervisor: the drivers of its children run at the same time.

A child is a leaf, with a `LocalRuntime` of its own, or another supervisor.  What belongs to the job
is shared by all of them: the event log, the console, the directory of the run (`TreeParts`).

No child outlives its supervisor: a stop of that stops each of them in its turn, and a defect kills
all of them.  When the event loop shuts down, it is the outermost supervisor that stops the tree,
in its order.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import random
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from elastic_aio import events
from elastic_aio.agent import supervisor
from elastic_aio.agent.driver import KILLED, BaseDriver, Driver
from elastic_aio.agent.event_log import EventLog, EventWriter
from elastic_aio.agent.leaf import LeafPlace
from elastic_aio.agent.machine import (
    Finish,
    PreemptionReceived,
    Publish,
    SingleNodeMachine,
    Start,
    StopReceived,
)
from elastic_aio.agent.preflight import check_file_size, check_start, resolve_nproc
from elastic_aio.agent.runtime import LocalRuntime, remove_old_runs
from elastic_aio.aio import PausableClock, run_shielded, wall_clock, when_all_done
from elastic_aio.child_events import ChildFinished, ChildLaunched, ReadinessChanged
from elastic_aio.errors import HostError, SpawnError, SpecError
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.logs.files import RunDirectory
from elastic_aio.logs.streams import LoggedStreams
from elastic_aio.outcome import (
    SIGKILL,
    AttemptResult,
    ExitStatus,
    Failure,
    JobOutcome,
    JobState,
    LaunchResult,
    make_result,
)
from elastic_aio.process.children import Spawner
from elastic_aio.ranks import NodeSize, WorkerRanks, assign_node_ranks
from elastic_aio.spec import group
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.limits import LimitSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import PreemptionSpec
from elastic_aio.stacks import StackDump
from elastic_aio.status import JobStatus, StatusTracker, is_below

if TYPE_CHECKING:
    from elastic_aio.agent.multi_node_driver import RendezvousFactory
    from elastic_aio.process.listeners import Listeners
    from elastic_aio.spec.sockets import SocketSpec

    _SocketKey: TypeAlias = tuple[str, tuple[SocketSpec, ...], object]

# Of a `JobStarted`, which begins each start of a child.
_OF_START = ("entrypoint", "nproc_per_node", "max_restarts", "log_dir", "role", "children")
_ATTEMPTS_MAX = 100  # of a child's result, over all its starts


def joined(path: str, name: str) -> str:
    """Return the path of a child of the supervisor at `path`."""
    return f"{path}/{name}" if path and name else path or name


# ------------------------------------------------------------------ what a job has


class TreeParts:
    """What the children of one job share; `close` ends the directories of its run."""

    def __init__(
        self,
        spec: group.AnySpec,
        event_log: EventLog,
        *,
        run_id: str,
        host: str,
        spawner: Spawner,
        console: ConsoleTarget | None = None,
        adopt_orphans: bool = False,
        make_rendezvous: RendezvousFactory | None = None,
    ) -> None:
        self.event_log = event_log
        self.run_id = run_id
        self.host = host
        self.logged = LoggedStreams()
        self.make_rendezvous = make_rendezvous
        self.makes_files = False
        """Whether leaves make the files of captured streams at once."""
        self._logs, self._notice = spec.logs, spec.preemption
        self._spawner = spawner
        self._console = console
        self._adopts_orphans = adopt_orphans
        self._directories: dict[str | None, RunDirectory] = {}
        self._runs: set[str] = set()
        self._starts: Counter[str] = Counter()  # by path
        self._attempts: dict[str, int] = {}  # the latest numbers, by path
        self.kept_listeners: dict[str, dict[_SocketKey, Listeners]] = {}
        """The sockets of groups that may be started again, by path."""

    def count_start(self, path: str) -> int:
        """Return the number of the next start of a child: they go on over those of its group."""
        self._starts[path] += 1
        return self._starts[path] - 1

    def next_attempt(self, path: str, former: int = -1) -> int:
        """Return the number of the next attempt of a leaf: they go on over its starts."""
        number = self._attempts[path] = max(self._attempts.get(path, -1), former) + 1
        return number

    def open(self) -> str | None:
        """Make the directory of the run, or raise SpecError; return what users may know of it."""
        if self._logs.is_off:
            return None
        directory = self._directory(self._logs)
        return directory.path if _has_logs(self._logs) else None

    def _directory(self, logs: LogSpec) -> RunDirectory:
        """Return the directory of the run below a `log_dir`; None: a temporary one."""
        if (directory := self._directories.get(logs.log_dir)) is None:
            directory = RunDirectory.make(logs, self.run_id, self.host)
            self._directories[logs.log_dir] = directory
        return directory

    def make_directory(self, path: str, logs: LogSpec) -> RunDirectory:
        """Make the directory of a leaf, or raise HostError, or SpecError for its `log_dir`."""
        if logs.is_off:
            return RunDirectory(None)
        try:
            return self._directory(logs).make_child(path, has_logs=_has_logs(logs))
        except OSError as error:
            raise HostError(
                f"cannot create the directory of {path or 'the job'}: {error}"
            ) from error

    def note_run(self, run_id: str) -> None:
        """Note the run of a leaf of several nodes, or raise SpecError: its store knows its end."""
        if run_id in self._runs:
            raise SpecError(
                "run_id", run_id, "must be of a run of several nodes that has not ended"
            )
        self._runs.add(run_id)

    def make_runtime(
        self, spec: LaunchSpec, nproc: int, log: EventWriter, place: LeafPlace, run_id: str
    ) -> LocalRuntime:
        """Return the runtime of a leaf, with the logs and the notice of the job if it has none."""
        logs = self._logs if spec.logs == LogSpec() else spec.logs
        notice = self._notice if spec.preemption == PreemptionSpec() else spec.preemption
        runtime = LocalRuntime(
            spec.replace(logs=logs, preemption=notice),
            run_id=run_id,
            host=self.host,
            nproc=nproc,
            spawner=self._spawner,
            publish=log.append,
            publish_later=log.append_later,
            console=self._console,
            adopt_orphans=self._adopts_orphans,
            place=place,
        )
        if self.makes_files:
            runtime.output.capture.make_files()
        return runtime

    def close_listeners(self, path: str) -> None:
        for listeners in self.kept_listeners.pop(path).values():
            listeners.close()

    async def close(self) -> str | None:
        """Remove what is empty, and old runs; return the directory with logs, if one remains."""
        for path in [*self.kept_listeners]:
            self.close_listeners(path)
        self.logged.close()
        found = None
        for log_dir, directory in self._directories.items():
            if directory.remove_empty() and log_dir in (self._logs.log_dir, None):
                found = found or directory.path
            if log_dir is not None and self._logs.keep_runs is not None:
                publish = self.event_log.append
                await remove_old_runs(directory, self._logs.keep_runs, publish)
            directory.close()
        return found


class ChildLog:
    """The event log of one start of a child: its events are the job's, with the child's path."""

    def __init__(
        self,
        log: EventLog,
        path: str,
        generation: int = 0,
        *,
        attempt: int = 0,
        beside: bool = False,
    ) -> None:
        """Begin with the first `attempt` of a start; `beside` another start, which it replaces."""
        self._log = log
        self._path = path
        self._generation = generation
        self.first_attempt = attempt
        self.is_beside = beside

    @property
    def tracker(self) -> StatusTracker:
        return self._log.tracker.at(self._path) if self._path else self._log.tracker

    def append(self, event: events.Event) -> None:
        if isinstance(event, events.JobStarted) and (self._path or self._generation):
            event = ChildLaunched(
                attempt=self.first_attempt,
                generation=self._generation,
                is_beside=self.is_beside,
                **{name: getattr(event, name) for name in _OF_START},
            )
        if not isinstance(event, events.JobFinished):  # the supervisor says what follows
            self._log.append(event, self._path)

    def append_later(self, make: Callable[[], events.Event]) -> None:
        self._log.append_later_to(self, make)

    def close(self) -> None:
        self._log.make_all()


class LeafLog(ChildLog):
    """The event log of a leaf, which says when all its workers run, and are ready."""

    def __init__(
        self,
        log: EventLog,
        path: str,
        effect: supervisor.StartChild,
        receive: Callable[[Any], None],
        *,
        nproc: int,
        max_restarts: int,
        has_ready: bool,
        **start: Any,
    ) -> None:
        """Begin a `start`; the supervisor may restart the leaf up to `max_restarts` times."""
        super().__init__(log, path, **start)
        self._child = effect.name, effect.generation
        self._receive = receive
        self._nproc = nproc
        self._max_restarts = max_restarts
        self._has_ready = has_ready
        self._attempt = -1
        self._started: set[int] = set()
        self._ready: set[int] = set()
        self._failures: tuple[Failure, ...] = ()

    def append(self, event: events.Event) -> None:
        if isinstance(event, events.JobStarted):  # a leaf's own spec may leave its restarts to us
            event = replace(event, max_restarts=self._max_restarts)
        super().append(event)
        match event:
            case events.WorkerStarted():
                if event.attempt != self._attempt:
                    self._attempt = event.attempt
                    self._started, self._ready = set(), set()
                self._started.add(event.local_rank)
                if len(self._started) == self._nproc:
                    if not (self._has_ready or self.is_beside):
                        self._note_ready()
                    self._receive(supervisor.ChildStarted(*self._child))
            case events.WorkerReady() if event.attempt == self._attempt and self._has_ready:
                is_first = event.local_rank not in self._ready
                self._ready.add(event.local_rank)
                if is_first and len(self._ready) == self._nproc:
                    self._note_ready()
                    self._receive(supervisor.ChildReady(*self._child))
            case events.AttemptFailed():
                self._failures = event.failures
            case events.Restarting():
                self._receive(
                    supervisor.LeafRestarted(*self._child, event.restarts, self._failures)
                )
                self._failures = ()

    def confirm(self) -> None:
        """Note that the other start has been replaced by this one."""
        if self.is_beside:
            self.is_beside = False
            if not self._has_ready and len(self._started) == self._nproc:
                self._note_ready()

    def _note_ready(self) -> None:
        self.append(ReadinessChanged(attempt=self._attempt, is_ready=True))


# ------------------------------------------------------------------ the children


class _Start:
    """One start of a child: its driver, and the requests that wait until that is open."""

    def __init__(self, effect: supervisor.StartChild) -> None:
        self.effect = effect
        self.driver: BaseDriver | None = None
        self.is_open = False
        self.confirm: Callable[[], None] = lambda: None
        """Called when the start has replaced the former one, beside which it was made."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests: list[Callable[[BaseDriver], object]] = []

    def __repr__(self) -> str:
        return f"<start {self.effect.generation} of {self.effect.name}: {self.driver}>"

    def request(self, call: Callable[[BaseDriver], object]) -> None:
        """Call a function with the driver, as soon as that is open."""
        if self.is_open and self.driver is not None:
            call(self.driver)
        elif not self.over.done():
            self._requests.append(call)

    def open(self) -> None:
        self.is_open = True
        requests, self._requests = self._requests, []
        for call in requests:
            self.request(call)


class SupervisorDriver(BaseDriver):
    """A supervisor of children: of a whole job, or a child itself."""

    def __init__(
        self,
        spec: group.AnySpec,
        parts: TreeParts,
        *,
        path: str = "",
        generation: int = 0,
        parent: SupervisorDriver | None = None,
        on_ready: Callable[[bool], None] | None = None,
    ) -> None:
        if isinstance(spec, LaunchSpec) and group.has_children(spec):
            spec = _resolved(spec, path)
        log = ChildLog(parts.event_log, path, generation) if parent else parts.event_log
        super().__init__(spec, parts.run_id, log, PausableClock())
        self._parts = parts
        self._path = path
        self._parent = parent
        self._on_ready = on_ready
        own = group.outermost_group(spec) if parent is None else spec
        machine = supervisor.SupervisorMachine(own, random)
        self._machine: supervisor.SupervisorMachine = machine
        self._starts: dict[tuple[str, int], _Start] = {}
        self._timers: dict[str, asyncio.Task[Any]] = {}
        self._results: dict[str, LaunchResult] = {}
        # Open over all starts of a child; all independent workers have the same.  While a reload
        # changes them, both are open, and share what stays.
        self._listeners: dict[_SocketKey, Listeners] = {}
        if parent is not None:
            self._listeners = parts.kept_listeners.pop(path, {})
        self._ended: dict[str, deque[AttemptResult]] = {}
        self._opening = asyncio.Lock()
        self._began = self._clock.now()

    def __repr__(self) -> str:
        return f"<SupervisorDriver of {self._path or 'the job'}: {self._machine!r}>"

    # ------------------------------------------------------------- questions

    @property
    def _live(self) -> Iterator[BaseDriver]:
        for start in [*self._starts.values()]:
            if start.is_open and start.driver is not None:
                yield start.driver

    def make_log_files(self) -> None:
        self._parts.makes_files = True
        super().make_log_files()

    def over(self, name: str) -> asyncio.Future[None]:
        """Return a future that is done when nothing of the present starts of a child is left."""
        return when_all_done(one.over for one in self._starts.values() if one.effect.name == name)

    @property
    def leaves(self) -> list[Driver]:
        return [leaf for driver in self._live for leaf in driver.leaves]

    @property
    def runtimes(self) -> list[LocalRuntime]:
        return [runtime for driver in self._live for runtime in driver.runtimes]

    @property
    def logged(self) -> LoggedStreams:
        return self._parts.logged

    def with_reports(self, status: JobStatus) -> JobStatus:
        children = {child.child: child for child in status.children}
        for start in self._starts.values():
            if start.driver is None:
                continue
            if not start.effect.name:
                return start.driver.with_reports(status)
            path = joined(self._path, start.effect.name)
            if path in children:
                children[path] = start.driver.with_reports(children[path])
        return replace(status, children=tuple(children.values()))

    async def dump(self, reason: str) -> StackDump:
        dumps = await asyncio.gather(*(leaf.dump(reason) for leaf in self.leaves))
        if len(dumps) == 1:
            return dumps[0]
        workers = tuple(worker for dump in dumps for worker in dump.workers)
        return StackDump(time=wall_clock(), attempt=0, reason=reason, workers=workers)

    def at(self, path: str) -> BaseDriver | None:
        if not path:
            return self
        name, _, rest = path.partition("/")
        latest = [one for one in self._starts.values() if one.effect.name in (name, "")]
        start = max(latest, key=lambda one: one.effect.generation, default=None)
        if start is not None and not start.effect.name:
            rest = path
        driver = None if start is None or not start.is_open else start.driver
        return driver.at(rest) if driver is not None and rest else driver

    def supervisor_of(self, path: str) -> tuple[SupervisorDriver, str]:
        """Return the supervisor that decides about a child, and the child's name there.

        Raises:
            SpecError: the supervisor does not run.
        """
        if not path:
            only = self._only() if self._machine.is_wrapper else None
            return (only if isinstance(only, SupervisorDriver) else self), ""
        above, _, name = path.rpartition("/")
        found = self.at(above)
        if isinstance(found, SupervisorDriver) and found._machine.is_wrapper:
            found = found._only()
        if not isinstance(found, SupervisorDriver):
            raise SpecError("child", path, f"{above or 'the job'} does not run, or has no children")
        return found, name

    def _only(self) -> BaseDriver | None:
        """Return the driver of the only child, which has no name: a job that starts anew."""
        return next(self._live, None)

    def request(self, request: supervisor.ChildRequest) -> None:
        """Hand in a request about a child.

        Raises:
            SpecError: no child can fulfil it.
            HostError: see `check_restart`.
        """
        self._machine.check(request)
        is_restart = isinstance(request, supervisor.ChildRestartReceived)
        is_restart = is_restart or (
            isinstance(request, supervisor.ReloadReceived) and request.spec is None
        )
        if is_restart and (driver := self.at(request.name)) is not None:
            driver.check_restart()
        self.receive(request)

    @property
    def spec(self) -> group.AnySpec:
        """What it runs: a reload or a change of the scale may have changed it."""
        return self._machine.spec

    def spec_of(self, name: str) -> group.AnySpec:
        """Return what a child runs, or this supervisor itself if the name is empty."""
        children = self._machine.children
        return children[name].spec if name in children else self.spec

    def restarted_by(self, name: str, spec: group.AnySpec | None) -> set[str] | None:
        """Return the paths of the leaves that a reload of a child restarts, also of new leaves.

        None: its workers or replicas are replaced one after the other.
        """
        path, former, is_new = joined(self._path, name), self.spec_of(name), spec is not None
        kinds = (former, spec or former)
        parts = [one.replica if isinstance(one, group.GroupSpec) else one for one in kinds]
        if group.is_same_kind(*kinds) and None not in parts:
            return None
        before = dict(former.leaves()) if is_new and isinstance(former, group.GroupSpec) else {}
        failed = [one._path for one in self._supervisors if one._machine.has_failed_reload]
        found = set()
        for below, leaf in group.leaves_of(kinds[1]).items():
            own = joined(path, below)
            if before.get(below) != leaf or any(is_below(own, one) for one in failed):
                found.add(own)
        tracker = self._parts.event_log.tracker
        return {one for one in found if is_new or tracker.runs(one, is_new=False)}

    @property
    def _supervisors(self) -> Iterator[SupervisorDriver]:
        """Yield this supervisor, and those below it that run."""
        yield self
        for driver in self._live:
            if isinstance(driver, SupervisorDriver):
                yield from driver._supervisors

    async def check_reload(self, name: str, spec: group.AnySpec | None) -> None:
        """Raise SpecError if what a reload of a child changes, or restarts, cannot be started."""
        changed = self.restarted_by(name, spec)
        restarted = [path.rpartition("/")[::2] for path in changed or ()]
        for one in self._supervisors if restarted else ():
            own = {child for above, child in restarted if above == one._path}
            one._check_order(own.intersection(one._machine.children))
        for below, leaf in group.leaves_of(spec or self.spec_of(name)).items():
            path = joined(joined(self._path, name), below)
            if changed is None or path in changed:
                try:
                    await check_start(leaf)
                except SpecError as error:
                    raise _of_child(error, path) from None

    # -------------------------------------------------------------- requests

    async def open(self) -> None:
        """Check the children, make the directory of the run, and start the first of them."""
        is_outermost = self._parent is None
        for path, spec in group.leaves_of(self._spec).items() if is_outermost else ():
            try:
                check_file_size(spec, resolve_nproc(spec))
            except SpecError as error:
                raise _of_child(error, path) from None
        log_dir = self._parts.open() if is_outermost else None
        if not (is_outermost and self._machine.is_wrapper):
            is_group = isinstance(self._spec, group.GroupSpec)
            self._event_log.append(
                events.JobStarted(
                    entrypoint=self._spec.name,
                    nproc_per_node=0 if is_group else group.size_of(self._spec),
                    nnodes="1",
                    max_restarts=group.restart_limit(self._spec),
                    agent_pid=os.getpid(),
                    log_dir=log_dir,
                    role="" if isinstance(self._spec, group.GroupSpec) else self._spec.role,
                    children=tuple(self._machine.children),
                    keeps_logs=_keeps_logs(self._spec),
                )
            )
        self._begin(Start())

    def request_restart(self, reason: str) -> None:
        self.request(supervisor.ChildRestartReceived("", reason))

    def check_restart(self) -> None:
        """Raise SpecError too if a child would wait for another one that was stopped."""
        for one in self._supervisors:
            one._check_order()
        super().check_restart()

    def _check_order(self, names: Iterable[str] | None = None) -> None:
        try:
            self._machine.check_order(names)
        except SpecError as error:
            path = joined(self._path, str(error.value))
            raise SpecError("child", path, error.problem) from None

    def kill(self, reason: str = "", stop: StopReceived = KILLED) -> None:
        for start in [*self._starts.values()]:
            start.request(lambda driver: driver.kill(reason, stop))
        self.receive(stop)

    def skip(self, seconds: float) -> None:
        self._clock.skip(seconds)
        for driver in self._live:
            driver.skip(seconds)

    # ---------------------------------------------------------------- inputs

    def _handle(self, received: Any) -> Sequence[Any]:
        spec = received.spec if isinstance(received, supervisor.ReloadReceived) else None
        if isinstance(spec, LaunchSpec) and not received.name:  # of these workers
            received = replace(received, spec=_resolved(spec, self._path))
        return self._machine.handle(received, self._clock.now())

    def _perform(self, effect: Any) -> None:
        match effect:
            case Publish(event):
                self._event_log.append(event)
            case supervisor.PublishOf(name, event):
                log = ChildLog(self._parts.event_log, joined(self._path, name))
                log.append(replace(event, attempt=log.tracker.attempt))
                if isinstance(event, ChildFinished):
                    self._close_unused()
            case supervisor.StartChild():
                start = self._starts[effect.name, effect.generation] = _Start(effect)
                self._run(effect, self._start(start))
            case supervisor.Arm():
                self._disarm(effect.name)
                self._timers[effect.name] = self._run(effect, self._wait(effect))
            case supervisor.Disarm(name):
                self._disarm(name)
            case supervisor.ReportReady(is_ready):
                self._report_ready(is_ready=is_ready)
            case Finish():
                self._run(effect, self._finish(effect))
            case supervisor.ChildEffect():
                if isinstance(effect, supervisor.StopChild):
                    self._confirm(effect)
                if (found := self._starts.get((effect.name, effect.generation))) is not None:
                    found.request(partial(_change, effect))

    def _confirm(self, former: supervisor.ChildEffect) -> None:
        """Let the start that has replaced a `former` one restart itself from now on."""
        for start in [*self._starts.values()]:
            effect = start.effect
            if effect.name == former.name and effect.generation > former.generation:
                start.confirm()

    def _report_ready(self, *, is_ready: bool) -> None:
        if not (self._parent is None and self._machine.is_wrapper):
            self._event_log.append(ReadinessChanged(is_ready=is_ready))
        if self._on_ready is not None:
            self._on_ready(is_ready)

    def _disarm(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            self._abandon(timer)

    async def _wait(self, effect: supervisor.Arm) -> supervisor.TimerElapsed:
        await self._clock.sleep(effect.delay)
        started = [start for (name, _), start in self._starts.items() if name == effect.name]
        driver = started[-1].driver if started else None
        answers = (one.last_answer for one in (driver.leaves if driver is not None else ()))
        return supervisor.TimerElapsed(effect.name, effect.token, next(filter(None, answers), ""))

    def _on_cancelled(self, effect: Any) -> None:
        if isinstance(effect, Finish):
            self._run(effect, self._finish(effect))
        elif isinstance(effect, supervisor.StartChild):
            why = "the event loop is shutting down"
            self._end_start(effect, JobOutcome(JobState.STOPPED, why, 143))

    def _on_defect(self, effect: Any, error: BaseException) -> None:
        if isinstance(effect, supervisor.StartChild):
            start = self._starts.pop((effect.name, effect.generation), None)
            if start is not None:
                start.over.set_result(None)
        super()._on_defect(effect, error)

    # ------------------------------------------------------- start of a child

    async def _start(self, start: _Start) -> None:
        """Open the driver of a child; its end is an input."""
        effect = start.effect
        try:
            listeners = await self._open_listeners(effect)
            start.driver = self._make_driver(start, listeners)
            start.driver.is_left = True  # the outermost supervisor warns
            start.driver.on_shutdown = self._shut_down
            start.driver.finds_lost_jobs, self.finds_lost_jobs = self.finds_lost_jobs, False
            await start.driver.open()
        except (SpecError, HostError, SpawnError) as error:
            refusal, code = error, 1
            if isinstance(error, SpecError):
                of_workers = isinstance(self._machine.spec, LaunchSpec)  # who have one spec
                path = self._path if of_workers else joined(self._path, effect.name)
                refusal, code = _of_child(error, path), 2
            self.refusal = refusal, str(refusal)
            self._fail_start(effect, str(refusal), code)
            return
        start.driver.done.add_done_callback(lambda _: self._on_child_done(start))
        start.open()

    def _fail_start(self, effect: supervisor.StartChild, why: str, code: int) -> None:
        """Report a start that could not be opened: if it is not for good, as a failed attempt."""
        path, outcome = joined(self._path, effect.name), JobOutcome(JobState.FAILED, why, code)
        tracker = self._parts.event_log.tracker.find(path) or StatusTracker()
        if code == 2 and not tracker.has_run:
            self._end_start(effect, outcome, is_permanent=True)
            return
        place = effect.rank or 0, 0, None, self._parts.host
        root = Failure(*place, ExitStatus(code=code), wall_clock(), -1, message=why)
        failed = events.AttemptFailed(attempt=tracker.attempt, root=root, failures=(root,))
        self._parts.event_log.append(failed, path)
        self._end_start(effect, outcome, failures=(root,))

    def _end_start(self, effect: supervisor.StartChild, outcome: JobOutcome, **fields: Any) -> None:
        """Answer a start: nothing of it is left."""
        start = self._starts.pop((effect.name, effect.generation), None)
        if start is not None:
            start.over.set_result(None)
            name, generation = effect.name, effect.generation
            self.receive(supervisor.ChildEnded(name, generation, outcome, **fields))
            self._close_unused()

    async def _open_listeners(self, effect: supervisor.StartChild) -> Listeners | None:
        """Return the sockets of a leaf, which are open already after its first start."""
        spec = effect.spec
        if not isinstance(spec, LaunchSpec) or not spec.sockets or group.has_children(spec):
            return None
        async with self._opening:  # of several workers the first binds them
            name, sockets, _ = key = self._socket_key(effect.name, spec)
            if (found := self._listeners.get(key)) is not None:
                return found
            from elastic_aio.agent.worker_setup import find_account  # few jobs have sockets
            from elastic_aio.process.listeners import Listeners

            listeners = Listeners(sockets, find_account(spec.limits or LimitSpec()).owner)
            nproc = resolve_nproc(spec) if effect.rank is None else effect.world_size
            former = [one for (other, *_), one in self._listeners.items() if other == name]
            await listeners.open(nproc, former)
            self._listeners[key] = listeners
            self._close_unused()
        return listeners

    def _socket_key(self, name: str, spec: group.AnySpec) -> _SocketKey:
        name = "" if isinstance(self._spec, LaunchSpec) else name
        if isinstance(spec, group.GroupSpec):
            return name, (), None
        limits = spec.limits or LimitSpec()
        return name, spec.sockets, (limits.user, limits.group)  # whose they are

    def _close_unused(self) -> None:
        """Close the sockets that no start of a child has, and none will have."""
        if self._machine.is_ending:  # another start of the group may have them
            return
        for path in [*self._parts.kept_listeners]:
            if is_below(path, self._path):
                name = path[len(self._path) :].lstrip("/").partition("/")[0]
                state = self._machine.children.get(name)
                if state is None or state.phase in supervisor.ENDS:
                    self._parts.close_listeners(path)
        if not self._listeners:
            return
        used = {self._socket_key(one.effect.name, one.effect.spec) for one in self._starts.values()}
        for name, child in self._machine.children.items():
            if child.phase in supervisor.ENDS:
                continue
            used.add(key := self._socket_key(name, child.spec))
            if key[1] and key not in self._listeners:  # its next start takes addresses over
                used |= {one for one in self._listeners if one[0] == key[0]}
        for key in self._listeners.keys() - used:
            self._listeners.pop(key).close()

    def _make_driver(self, start: _Start, listeners: Listeners | None) -> BaseDriver:
        effect = start.effect
        name, path = effect.name, joined(self._path, effect.name)
        spec = effect.spec
        if isinstance(spec, LaunchSpec) and not group.has_children(spec):
            return self._make_leaf(spec, start, path, listeners)

        def on_ready(is_ready: bool) -> None:
            if is_ready:
                self.receive(supervisor.ChildStarted(name, effect.generation))
            self.receive(supervisor.ChildReady(name, effect.generation, is_ready))

        number = self._parts.count_start(path)
        return SupervisorDriver(
            spec, self._parts, path=path, generation=number, parent=self, on_ready=on_ready
        )

    def _make_leaf(
        self, spec: LaunchSpec, start: _Start, path: str, listeners: Listeners | None
    ) -> Driver:
        effect, parts = start.effect, self._parts
        nproc, worker, above = 1, None, self._path
        if effect.rank is None:
            spec = _named(spec, path)
            nproc, above = resolve_nproc(spec), path
        else:
            worker = _ranks_of(spec.role, effect.rank, effect.world_size)
        run_id = ".".join(filter(None, (parts.run_id, above.replace("/", "."))))
        is_alone = spec.nnodes.maximum == 1
        if not is_alone:
            parts.note_run(run_id)
        elif nproc == 1:  # no other worker uses it; another launcher brings its own
            spec = spec.replace(host_store=False)
        directory = partial(parts.make_directory, path)
        others = (one for one in self._starts.values() if one is not start)
        is_beside = any(one.effect.name == effect.name for one in others)
        place = LeafPlace(path, directory, parts.logged, listeners, worker, is_beside)
        log = LeafLog(
            parts.event_log,
            path,
            effect,
            self.receive,
            generation=parts.count_start(path),
            nproc=nproc,
            max_restarts=group.restart_limit(self._machine.children[effect.name].spec),
            has_ready=group.reports_ready(spec),
            attempt=parts.next_attempt(path) if is_alone else 0,
            beside=is_beside,
        )
        runtime = parts.make_runtime(spec, nproc, log, place, run_id)
        if is_alone:
            return self._make_driver_alone(runtime, start, log, path)
        from elastic_aio.agent.multi_node_driver import MultiNodeDriver

        return MultiNodeDriver(runtime, log, make_rendezvous=parts.make_rendezvous)

    def _make_driver_alone(
        self, runtime: LocalRuntime, start: _Start, log: LeafLog, path: str
    ) -> Driver:
        """Return the driver of a leaf whose workers are all on this host."""
        machine = SingleNodeMachine(
            runtime.spec,
            runtime.nproc,
            random,
            attempt=log.first_attempt,
            next_attempt=partial(self._parts.next_attempt, path),
            restarts=start.effect.restarts,
        )
        machine.is_candidate = log.is_beside

        def confirm() -> None:
            machine.is_candidate = False
            log.confirm()

        start.confirm = confirm
        driver = Driver(runtime, machine, log)
        if group.template_of(self.spec) is not None:  # another one may have run the program
            driver.may_have_run = self._event_log.tracker
        return driver

    # --------------------------------------------------------- end of a child

    def _on_child_done(self, start: _Start) -> None:
        driver, effect = start.driver, start.effect
        assert driver is not None, "it has been opened"
        self._confirm(effect)
        outcome, result = driver.outcome, driver.result
        if outcome is None or result is None:
            outcome = JobOutcome(JobState.FAILED, f"internal error: {driver.error!r}", 1)
        else:
            self._note_result(effect.name, result)
        own = None if driver.error is None else (driver.error, outcome.why)
        self.refusal = own or driver.refusal or self.refusal
        spec = driver.spec if isinstance(driver, SupervisorDriver) else effect.spec
        self._end_start(
            effect,
            outcome,
            spec=None if spec == effect.spec else spec,
            failures=() if result is None else result.failures,
            ran_for=driver.ran_for,
            since=driver.since_end,
            has_progress=driver.has_progress,
            is_permanent=driver.is_permanent or driver.error is not None,
        )

    def _note_result(self, name: str, result: LaunchResult) -> None:
        """Keep the result of the latest start of a child, with the attempts of all its starts."""
        attempts = self._ended.setdefault(name, deque(maxlen=_ATTEMPTS_MAX))
        attempts.extend(result.attempts)
        restarts = self._machine.children[name].restarts if name in self._machine.children else 0
        changes = {"attempts": tuple(attempts), "restarts": max(restarts, result.restarts)}
        self._results[name] = replace(result, **changes)

    # ------------------------------------------------------------------- end

    async def _finish(self, effect: Finish) -> None:
        outcome = effect.outcome
        for timer in [*self._timers]:
            self._disarm(timer)
        while self._starts:  # after a defect only
            await asyncio.wait([start.over for start in self._starts.values()])
        is_outermost = self._parent is None
        if self._listeners:  # another start of a group, if one follows, has them too
            self._parts.kept_listeners[self._path] = self._listeners
        log_dir = await run_shielded(self._parts.close) if is_outermost else None
        result = make_result(
            self._parts.run_id,
            outcome,
            0,
            (),
            self._clock.now() - self._began,
            wall_clock(),
            log_dir=log_dir,
            goodput=self._event_log.tracker.goodput(wall_clock()),
        )
        result = self._with_children(result)
        error = effect.error
        if is_outermost and self.refusal is not None and self.refusal[1] in outcome.why:
            error = error or self.refusal[0]
        last = result.attempts[-1].number if result.attempts else 0
        self._end(replace(effect, error=error), result, last)

    def _with_children(self, result: LaunchResult) -> LaunchResult:
        only = self._results.get("")
        if only is not None:
            attempts = only.attempts or result.attempts
            return replace(
                result,
                attempts=attempts,
                return_values=only.return_values,
                children=only.children,
                log_dir=result.log_dir and only.log_dir,
            )
        order = [name for name in self._machine.children if name in self._results]
        children = {name: self._results[name] for name in order}
        values: dict[int, Any] = {}
        if not isinstance(self._spec, group.GroupSpec):  # independent workers
            for child in children.values():
                values.update(child.return_values)
        return replace(result, children=children, return_values=values)

    async def _kill_and_finish(self, finish: Finish) -> None:
        for start in [*self._starts.values()]:
            start.request(lambda driver: driver.kill(finish.outcome.why))
        await self._finish(finish)

    @property
    def is_permanent(self) -> bool:
        return super().is_permanent or self._machine.is_permanent

    @property
    def ran_for(self) -> float:
        return self._clock.now() - self._began - self.since_end

    @property
    def since_end(self) -> float:
        return self._clock.now() - self._machine.ending_at


def _change(effect: Any, driver: BaseDriver) -> None:
    """Perform an effect on a child that is open."""
    asked = effect.stop if isinstance(effect, supervisor.StopChild) else effect.request
    if isinstance(asked, StopReceived) and asked.signal == SIGKILL:  # a slower stop may have begun
        driver.kill(asked.reason, asked)
    elif isinstance(asked, PreemptionReceived):  # by the clock of the child
        driver.request_preemption(asked.reason, max(0.0, asked.until - wall_clock()))
    else:
        driver.receive(asked)


def _named(spec: LaunchSpec, path: str) -> LaunchSpec:
    """Return a spec whose role is the name of the child, unless it has another one."""
    name = path.rpartition("/")[2]
    return spec.replace(role=name) if spec.role == "default" and name else spec


def _resolved(spec: LaunchSpec, path: str) -> LaunchSpec:
    """Return the spec of independent workers with their role and their number."""
    return _named(spec, path).replace(nproc_per_node=resolve_nproc(spec))


def _keeps_logs(spec: group.AnySpec) -> bool:
    """Return whether the output of a leaf may be kept: as the job's logs say, or its own."""
    leaves = group.leaves_of(spec).values()
    return not all((spec if one.logs == LogSpec() else one).logs.is_off for one in leaves)


def _has_logs(logs: LogSpec) -> bool:
    """Return whether files of a success stay, and not only what is captured of a failure."""
    return logs.log_dir is not None or not (logs.redirects.is_empty and logs.tee.is_empty)


def _ranks_of(role: str, rank: int, number: int) -> WorkerRanks:
    """Return the ranks of one of so many independent workers on this host."""
    (node,) = assign_node_ranks([NodeSize(role, max(rank + 1, number))])
    return node.worker_ranks(node.world_size)[rank]


def _of_child(error: SpecError, path: str) -> SpecError:
    """Return an error about the spec of a child that names the child, as a file does."""
    if not path:
        return error
    where = ".".join(f"children.{name}" for name in path.split("/"))
    return SpecError(f"{where}.{error.field}", error.value, error.problem)
