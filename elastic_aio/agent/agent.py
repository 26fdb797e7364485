"""The agent: one job on this host, as an async context manager."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
import weakref
from collections.abc import Awaitable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elastic_aio.agent.driver import BaseDriver, Driver
from elastic_aio.agent.entrypoint import BareOptions
from elastic_aio.agent.event_log import EventListener, EventLog, log_event
from elastic_aio.agent.machine import SingleNodeMachine, StopReceived
from elastic_aio.agent.preflight import (
    check_file_size,
    check_main_guard,
    check_start,
    hostname,
    resolve_nproc,
)
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import EventReader, running_loop, wait_shielded
from elastic_aio.errors import JobFailed, JobPreempted, JobStopped, RendezvousFailed, SpecError
from elastic_aio.events import AttemptFailed, ControlUnavailable, Event
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.logs.streams import LoggedStream
from elastic_aio.outcome import JobState, LaunchResult
from elastic_aio.process.children import Spawner, check_sigchld, command_spawner
from elastic_aio.process.rusage import with_usage
from elastic_aio.spec import checks
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.status import JobStatus, is_below

if TYPE_CHECKING:
    from elastic_aio.agent.multi_node_driver import RendezvousFactory
    from elastic_aio.agent.supervisor_driver import SupervisorDriver
    from elastic_aio.control.server import ControlServer
    from elastic_aio.logs.reader import LogReader
    from elastic_aio.spec.group import AnySpec, GroupSpec
    from elastic_aio.stacks import StackDump
    from elastic_aio.status import StatusTracker


class Agent:
    """Runs one job on this host, or a group of jobs: an async context manager.

    Entering starts the job, `events` iterates over its events, `wait` returns the result.  Leaving
    the block early stops the job by the stop plan.  So does, with a ResourceWarning, the end of the
    event loop, or the loss of the last reference to an agent that was entered by hand.  Works on
    any event loop and any thread, and never touches signal handlers.  Before the start, all other
    methods raise RuntimeError.

    A `child` is the path of a child of a `GroupSpec`, such as `serving/3`, or the rank of a
    worker of independent workers; empty, it is the whole job.  SpecError: there is no such child.

    ::

        async with Agent(spec) as agent:
            async for event in agent.events():
                print(event)
            result = await agent.wait()
    """

    _driver: BaseDriver | None = None
    _spawner: Spawner | None = None
    _bare: BareOptions | None = None
    _make_rendezvous: RendezvousFactory | None = None

    def __init__(
        self,
        spec: LaunchSpec | GroupSpec,
        *,
        console: ConsoleTarget | None = None,
        listeners: Sequence[EventListener] = (),
        adopt_orphans: bool = False,
        control: bool = False,
    ) -> None:
        """Prepare a job; nothing is started before the block is entered.

        Args:
            console: where output is shown, see `ConsoleTarget`; None is this process's own stdout
                and stderr.
            listeners: called with every event as it happens; they must not block.
            adopt_orphans: make this process the parent of processes of the job that lose theirs
                (PR_SET_CHILD_SUBREAPER), while the job runs.  Daemons that hide their environment,
                such as `ssh-agent`, are then found and stopped too.
            control: let other processes of this user see and control the job, by a Unix socket:
                `aio-elastic ps`, `status`, `stop` and others.  If that is not possible, the job
                runs without (`ControlUnavailable`).
        """
        self._is_supervised = _is_supervised(spec)
        for listener in checks.checked_items("listeners", listeners):
            if not callable(listener):
                raise SpecError("listeners", listener, "must be callables")
            if any(map(inspect.iscoroutinefunction, (listener, type(listener).__call__))):
                problem = "must not be coroutine functions, which nothing would await"
                raise SpecError("listeners", listener, problem)
        self.spec: Any = spec  # its user knows which of the two it is
        self.run_id = spec.run_id or os.urandom(8).hex()
        self._host = hostname()
        self._event_log = EventLog(
            self.run_id, self._host, keep=spec.event_history, listeners=listeners
        )
        self._console = checks.checked_console(console)
        self._adopts_orphans = checks.checked_part("adopt_orphans", adopt_orphans, kind=bool)
        self._has_control = checks.checked_part("control", control, kind=bool)
        self._control: ControlServer | None = None

    def __repr__(self) -> str:
        return f"<Agent of run {self.run_id}: {self._driver or 'not started'}>"

    async def __aenter__(self) -> Agent:
        """Check this host and this process, start the job, and return.

        Cancellation: nothing of the job is left.

        Raises:
            SpecError: a setting does not fit this host.
            HostError: the host or this process lacks something.
        """
        if self._driver is not None:
            raise RuntimeError("an Agent runs one job once; make another one")
        running_loop()
        check_main_guard()
        check_sigchld()
        driver = self._driver = self._make_driver()
        driver.finds_lost_jobs = self._has_control
        if self._bare is None:  # else the program uses processes, and no job
            self._event_log.listen(log_event)
        try:
            await driver.open()
        except BaseException:  # a cancellation too: no event follows
            driver.is_left = True
            self._event_log.close()
            raise
        # Weak: an agent that is dropped ends its job.
        self._event_log.offer_agent(weakref.ref(self))
        if self._has_control:
            self._open_control(driver)
        return self

    def _open_control(self, driver: BaseDriver) -> None:
        # Imported here: most embedded jobs have none.
        from elastic_aio.control.server import ControlServer

        log = self._event_log
        server = ControlServer(self, lambda why: log.append(ControlUnavailable(why=why)))
        self._control = server
        server.open()
        driver.done.add_done_callback(lambda _: server.close())

    def _make_driver(self) -> BaseDriver:
        spawner = self._spawner or command_spawner(asyncio.get_running_loop())
        if self._is_supervised or not isinstance(self.spec, LaunchSpec):
            return self._make_supervisor(spawner)
        nproc = resolve_nproc(self.spec)
        check_file_size(self.spec, nproc)
        runtime = LocalRuntime(
            self.spec,
            run_id=self.run_id,
            host=self._host,
            nproc=nproc,
            spawner=spawner,
            publish=self._event_log.append,
            publish_later=self._event_log.append_later,
            console=self._console,
            adopt_orphans=self._adopts_orphans,
            bare=self._bare,
        )
        if self.spec.nnodes.maximum == 1:
            waits = self._bare is not None and self._bare.waits_for_stop
            machine = SingleNodeMachine(self.spec, nproc, _random, waits_for_stop=waits)
            return Driver(runtime, machine, self._event_log)
        # Imported here: a job of one node pays for no rendezvous.
        from elastic_aio.agent.multi_node_driver import MultiNodeDriver

        return MultiNodeDriver(runtime, self._event_log, make_rendezvous=self._make_rendezvous)

    def _make_supervisor(self, spawner: Spawner) -> BaseDriver:
        # Imported here: a job of one group has none.
        from elastic_aio.agent.supervisor_driver import SupervisorDriver, TreeParts

        parts = TreeParts(
            self.spec,
            self._event_log,
            run_id=self.run_id,
            host=self._host,
            spawner=spawner,
            console=self._console,
            adopt_orphans=self._adopts_orphans,
            make_rendezvous=self._make_rendezvous,
        )
        return SupervisorDriver(self.spec, parts)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the job if it still runs, and wait until nothing of it is left."""
        # In a fork of the process that entered the block, the job is the parent's.
        if self._driver is not None and self._driver.is_copy:
            return
        is_cancelled = isinstance(error, asyncio.CancelledError)
        reason = "the launch was cancelled" if is_cancelled else "the agent's block was left"
        self._started_driver.is_left = True
        self._started_driver.request_stop(reason)
        await wait_shielded(self._started_driver.done)
        if self._control is not None:
            await self._control.aclose()

    def __del__(self) -> None:
        if self._driver is not None:
            self._driver.abandon()

    def events(self, after: int = -1) -> EventReader[Event]:
        """Return an async iterator over the events of the job, from its start.

        Any number of readers may iterate, each at its own pace, until `JobFinished`.  A reader that
        comes too late for some events gets one `EventsMissed` in their place.

        Args:
            after: a cursor: the `seq` of the last event that was already seen.
        """
        start = checks.checked_integer("after", after, at_least=-1)
        _ = self._started_driver
        return self._event_log.read(start)

    def logs(
        self,
        *,
        ranks: Iterable[int] | None = None,
        streams: Iterable[str] = ("stdout", "stderr"),
        follow: bool = True,
        since: float = 0.0,
        child: str = "",
    ) -> LogReader:
        """Return an async iterator over the lines that the workers of this host write.

        Only streams in files can be read: redirected, tee'd or captured streams.  The lines of a
        stream come in order, lines of different streams as they are found.  A reader never delays a
        worker.  A reader after the end of the job gets one empty line, with `LogLine.missed`, for a
        file that was removed, such as the captured stream of a success.

        Args:
            ranks: global ranks; None is all.
            streams: `stdout`, `stderr` or both.
            follow: go on until the job is over; otherwise end with what is written by now.
            since: Unix seconds; lines that were seen earlier are left out.

        Raises:
            SpecError: none of these streams is in a file, or no worker of this host has a rank, as
                far as that is known: later rounds of several nodes may have others.
        """
        names = frozenset(checks.checked_items("streams", streams))
        if not names or not names <= {"stdout", "stderr"}:
            raise SpecError("streams", streams, "must be 'stdout', 'stderr' or both")
        chosen = None if ranks is None else frozenset(checks.checked_items("ranks", ranks))
        for rank in chosen or ():
            checks.checked_integer("ranks", rank, at_least=0)
        driver = self._started_driver
        self._tracker(child)
        if isinstance(driver, Driver):
            return driver.output.read_logs(chosen, names, follow=follow, since=since)
        from elastic_aio.logs.reader import LogReader

        def is_chosen(stream: LoggedStream) -> bool:
            return is_below(stream.child, child) and stream.is_one_of(chosen, names)

        return LogReader(driver.logged, is_chosen, follow=follow, since=since)

    def make_log_files(self) -> None:
        """Make the files of captured streams now, and of later workers' streams at their start.

        Otherwise the first byte makes the file of a captured stream.  For programs that open the
        paths of `WorkerStarted` and wait for more; `logs` does not need it.  Idempotent.
        """
        self._started_driver.make_log_files()

    async def wait(self) -> LaunchResult:
        """Wait for the end of the job and return its result.

        Cancellation: the job goes on; leaving the block stops it.

        Raises:
            JobFailed: the workers failed and no restart is left.
            RendezvousFailed: the nodes of the job did not come together.
            JobStopped: a signal or `stop` ended the job; as `JobPreempted`, a preemption.
            HostError: this node lacks something that the rendezvous needs.
            Exception: raised by `restart.decide`.
        """
        driver = self._started_driver
        if not driver.done.done():
            await asyncio.wait([driver.done])
        if driver.error is not None:
            raise driver.error
        outcome, result = driver.outcome, driver.result
        assert outcome is not None, "a job that is over has an outcome or an error"
        assert result is not None, "a job that is over has a result or an error"
        if outcome.is_rendezvous:
            raise RendezvousFailed(f"{self.spec.name} failed: {result.reason}", result)
        if result.state is JobState.FAILED:
            raise JobFailed(_failed_message(self.spec, result), result)
        if result.state is JobState.PREEMPTED:
            raise JobPreempted(f"{self.spec.name} was preempted: {result.reason}", result)
        if result.state is JobState.STOPPED:
            raise JobStopped(f"{self.spec.name} was stopped: {result.reason}", result)
        return result

    def stop(
        self,
        *,
        signal: int | str | None = None,
        reason: str = "a stop was requested",
        child: str = "",
    ) -> Awaitable[None]:
        """End the job by its stop plan; `wait` then raises `JobStopped`.

        A child that is stopped stays so until `restart(child=...)`.

        Args:
            signal: number or name; replaces the first signal of the plan.  SIGKILL ends the job at
                once.
            reason: for the events and the result.

        Returns:
            An awaitable that is done when nothing of the job, or of the child, is left; the request
            is made whether or not it is awaited.

        Raises:
            SpecError: there is no such signal.
        """
        number = None if signal is None else checks.signal_number("signal", signal)
        if child:
            from elastic_aio.agent.supervisor import ChildStopReceived

            supervisor, name = self._supervisor_of(child)
            supervisor.request(ChildStopReceived(name, reason, number))
            return asyncio.shield(supervisor.over(name))
        self._started_driver.request_stop(reason, number)
        return asyncio.shield(self._started_driver.done)

    def preempt(
        self, *, seconds: float | None = None, reason: str = "a preemption was requested"
    ) -> bool:
        """Give the workers of all nodes notice that the job is about to be preempted.

        They see it by `elastic_aio.worker.pending_change`, and may save; none is restarted.  When
        all have ended, or at the deadline by the stop plan, the job ends and `wait` raises
        `JobPreempted`.

        Args:
            seconds: until the deadline; None for that of `LaunchSpec.preemption`.
            reason: for the events and the result.

        Returns:
            Whether it counts: it comes before a stop, and leaves less time than a notice before.

        Raises:
            SpecError: the number of seconds is negative, or no number.
        """
        if seconds is not None:
            checks.check_number("seconds", seconds, at_least=0)
        text = checks.checked_part("reason", reason, kind=str)
        return self._started_driver.request_preemption(text, seconds)

    async def restart(self, reason: str = "a restart was requested", *, child: str = "") -> bool:
        """Replace the present attempt by another one, on all nodes of the job.

        The workers are stopped by the stop plan and started again, which costs no restart of
        `max_restarts`.  A pending back-off ends; an attempt that is ending is not ended again.  A
        child that has ended, or was stopped, is started.

        Returns:
            True once all workers of this node run in a later attempt; False if the job, or the
            child, has ended first.

        Raises:
            HostError: descriptors among the arguments of a function, in a job without restarts,
                are the workers' alone.
            RuntimeError: the node has no place in the round: it is on standby, or excluded.

        Cancellation: the request stays.
        """
        driver, tracker = self._started_driver, self._tracker(child)
        if (phase := tracker.status(time.time()).phase) in ("standby", "excluded"):
            raise RuntimeError(f"this node has no workers to restart ({phase}): ask another node")
        log = self._event_log
        last = log.count - 1
        events = log.read(last)
        checks.checked_part("reason", reason, kind=str)
        if child:
            from elastic_aio.agent.supervisor import ChildRestartReceived
            from elastic_aio.child_events import is_end_of

            supervisor, name = self._supervisor_of(child)
            supervisor.request(ChildRestartReceived(name, reason))
        else:
            driver.request_restart(reason)
        async for event in events:
            if child and is_end_of(event, child):
                return False
            if tracker.has_started_after(last):
                return True
        return False

    async def reload(self, child: str = "", spec: LaunchSpec | GroupSpec | None = None) -> bool:
        """Have a child start anew, perhaps by another spec.

        Independent workers, and replicas, are replaced one after the other: each new one is started
        beside the old one, which is stopped when the new one is ready.  If that is not ready in
        time, the old one stays, and the reload ends.  Of another group, the children whose spec is
        another one are restarted.

        Args:
            spec: the new spec; None for the same.

        Returns:
            Whether all of it now runs the new spec.

        Raises:
            SpecError: there is no such child, or it cannot have this spec.

        Cancellation: the request stays.
        """
        driver = self._started_driver
        if isinstance(driver, Driver) and not child and spec is None:
            await check_start(self.spec)
            return await self.restart("a reload was requested")
        if spec is not None and spec.run_id not in (None, self.run_id):
            raise SpecError("run_id", spec.run_id, f"must stay {self.run_id!r}: the job runs")
        from elastic_aio.agent.supervisor import ReloadReceived
        from elastic_aio.child_events import ChildFinished, ReloadFailed, ReloadFinished, is_end_of

        self._tracker(child)
        supervisor, name = self._supervisor_of(child)
        await supervisor.check_reload(name, spec)
        log = self._event_log
        last = log.count - 1
        events = log.read(last)
        changed = supervisor.restarted_by(name, spec)
        if changed is not None:  # what does not run is started later, or not at all
            changed = {path for path in changed if log.tracker.runs(path, is_new=True)}
        supervisor.request(ReloadReceived(name, spec))
        begun = log.count  # before, an earlier reload may have ended because of this one
        if changed == set():
            return True
        async for event in events:
            is_failed = isinstance(event, ReloadFailed) and is_below(event.child, child)
            is_no_start = isinstance(event, AttemptFailed) and event.root.pid is None
            if is_no_start or (isinstance(event, ChildFinished) and event.state is JobState.FAILED):
                is_failed = any(is_below(event.child, one) for one in changed or ())
            if event.seq >= begun and is_failed:
                return False
            # Independent workers that run by the spec already are not started again.
            done = event.child if isinstance(event, ReloadFinished) else None
            if changed is None and done == child:
                return True
            if is_end_of(event, child, or_start_above=True):
                return False
            if changed is not None:
                changed = {one for one in changed - {done} if not is_end_of(event, one)}
                found = [log.tracker.find(path) for path in changed]
                if all(one and one.has_started_after(last) for one in found):
                    return True
        return False

    async def scale(self, child: str, number: int) -> None:
        """Change the number of the workers of a child, or of the children of equal replicas.

        Of independent workers, workers are added, or those with the highest ranks are stopped; a
        program of a group is restarted with so many.  A child that does not run has as many when it
        is started.  An empty `child` is the job itself: `scale("", 4)` changes the number of
        independent workers.

        Raises:
            SpecError: there is no such child, or it has no number: it is a group of different
                children, or a job whose workers restart together.

        Cancellation: the request stays.
        """
        from elastic_aio.agent.supervisor import ScaleReceived
        from elastic_aio.child_events import Scaled, is_end_of

        checks.checked_integer("number", number, at_least=1)
        events = self._event_log.read(self._event_log.count - 1)
        supervisor, name = self._supervisor_of(child)
        supervisor.request(ScaleReceived(name, number))
        async for event in events:
            is_done = isinstance(event, Scaled) and event.child == child
            if is_done or is_end_of(event, child, or_start_above=True):
                return

    def status(self, *, usage: bool = True) -> JobStatus:
        """Return the status of the job on this node; also after its end.

        Args:
            usage: read what each running worker has used so far, by itself and by children that it
                has reaped, in some 20 µs for each; None otherwise.
        """
        status = self._event_log.tracker.status(time.time())
        status = self._started_driver.with_reports(status)
        return with_usage(status) if usage else status

    def children(self) -> dict[str, JobStatus]:
        """Return the status of each child by its path, also of those below others."""
        return {child.child: child for child in self.status(usage=False).descendants}

    def pids(self, child: str = "") -> dict[int, int]:
        """Return the process ids of this node's running workers by global rank.

        Raises:
            SpecError: the child is a group, of which several children have the same ranks.
        """
        _ = self._started_driver
        workers = [
            worker
            for leaf in self._tracker(child).leaves()
            for worker in leaf.workers.values()
            if worker.state == "running"
        ]
        pids = {worker.rank: worker.pid for worker in workers}
        if len(pids) < len(workers):
            raise SpecError("child", child, "must be given: the children have the same ranks")
        return pids

    def kill(
        self, *, signal: int | str | None = None, reason: str = "an immediate stop was requested"
    ) -> None:
        """End the job at once: every stop is shortened to SIGKILL.

        Args:
            signal: number or name, for the exit code; None for SIGTERM.  It is not sent.
            reason: for the events and the result, unless a stop has begun before.

        Raises:
            SpecError: there is no such signal.
        """
        number = None if signal is None else checks.signal_number("signal", signal)
        stop = StopReceived(checks.checked_part("reason", reason, kind=str), number)
        self._started_driver.kill(stop=stop)

    def forward_signal(
        self, signal: int | str, *, rank: int | None = None, child: str = ""
    ) -> tuple[int, ...]:
        """Send a signal to the leader of each live worker; return their pids.

        Args:
            signal: number or name.
            rank: global rank of the only worker to get it; None for all of this node.

        Raises:
            SpecError: there is no such signal, or no such worker runs on this node.
        """
        number, driver = checks.signal_number("signal", signal), self._driver_at(child)
        if driver is None:
            return ()
        if rank is None:
            return driver.send(number)
        pids = self.pids(child)
        if rank not in pids:
            problem = f"must be one of this node's running workers: {sorted(pids)}"
            raise SpecError("rank", rank, problem)
        return driver.send(number, pids[rank])

    async def dump(self, reason: str = "a dump was requested", *, child: str = "") -> StackDump:
        """Read what all workers of this node are doing, for two seconds at most.

        Python stacks come from workers that have offered them (functions, scripts of the fork
        server, users of `elastic_aio.worker`), or from `py-spy`; other workers have the kernel's
        view only.  The text also goes to `stacks.txt` in the directory of the attempt.

        Cancellation: the workers notice nothing.
        """
        checks.checked_text("reason", reason)
        driver = self._driver_at(child)
        if driver is None:
            raise SpecError("child", child, "must run: it has no process")
        return await driver.dump(reason)

    def _driver_at(self, child: str) -> BaseDriver | None:
        """Return the driver of a child; None if it does not run."""
        driver = self._started_driver
        self._tracker(child)
        return driver.at(child)

    def _tracker(self, child: str) -> StatusTracker:
        """Return the tracker of a child, or raise SpecError for a path that is of no child."""
        tracker = self._event_log.tracker.find(checks.checked_text("child", child))
        if tracker is None:
            known = ", ".join(one.job.child for one in self._event_log.tracker.descendants())
            problem = f"must be one of: {known}" if known else "must be empty: the job has none"
            raise SpecError("child", child, problem)
        return tracker

    def _supervisor_of(self, child: str) -> tuple[SupervisorDriver, str]:
        """Return the supervisor that decides about a child, and the child's name there."""
        self._tracker(child)
        driver = self._started_driver
        if isinstance(driver, Driver):
            problem = "must be of a group or of independent workers: the workers of this job"
            why = "restart together, and have no other number or spec"
            raise SpecError("child", child, f"{problem} {why}")
        from elastic_aio.agent.supervisor_driver import SupervisorDriver

        assert isinstance(driver, SupervisorDriver), "there is no other kind"
        return driver.supervisor_of(child)

    @property
    def _started_driver(self) -> BaseDriver:
        if self._driver is None:
            raise RuntimeError("the job has not been started: use `async with Agent(spec)`")
        if self._driver.is_copy:
            raise RuntimeError("the job runs in the process that has forked this one")
        return self._driver


def make_agent(
    spec: AnySpec,
    *,
    console: ConsoleTarget | None = None,
    listeners: Sequence[EventListener] = (),
    spawner: Spawner | None = None,
    bare: BareOptions | None = None,
    rendezvous: RendezvousFactory | None = None,
    control: bool = False,
) -> Agent:
    """Return an agent with another spawner or rendezvous, or with workers of a `bare` group."""
    agent = Agent(spec, console=console, listeners=listeners, control=control)
    agent._spawner = spawner
    agent._bare = bare
    agent._make_rendezvous = rendezvous
    return agent


def driver_of(agent: Agent) -> BaseDriver:
    """Return the driver of an agent that this process has started, or raise RuntimeError."""
    return agent._started_driver


def _is_supervised(spec: AnySpec) -> bool:
    """Return whether a job needs a supervisor, or raise SpecError: it is no job."""
    if isinstance(spec, LaunchSpec):
        return spec.restart.scope != "group" or spec.restart.when == "always"
    from elastic_aio.spec.group import GroupSpec

    if not isinstance(spec, GroupSpec):
        raise SpecError("spec", spec, "must be a LaunchSpec or a GroupSpec")
    return True


def _failed_message(spec: AnySpec, result: LaunchResult) -> str:
    child = result.failed_child
    name = f"child {child} of {spec.name}" if child else spec.name
    if not result.failures:
        return f"{name} failed: {result.reason}"
    root = result.failures[0]
    if root.pid is None:
        return f"{name}: {root.message}" if child else root.message
    return f"{name} failed, {root.summary}; {result.reason}"


def _random() -> float:
    from random import random  # for the jitter of restarts

    return random()
